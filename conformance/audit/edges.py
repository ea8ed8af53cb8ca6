"""The edges of a PPO step: which op leads from which tensors of a dump to which others.

An edge is checked where all its ends are in the dump. Where several names are given for an end, the first one that the dump
has is taken. The gradient of a loss with respect to an input stands under `<name of the loss>_grad_<name of the op's input>`.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Edge:
    """One op between tensors of a dump.

    Attributes:
        name: what the report calls it.
        op: name of the op.
        inputs: op input → names in a dump, best first; `None` among them stands for "may be absent".
        outputs: op output → names in a dump.
        params: op parameter → names in a dump's parameters, where they are not its own.
    """

    name: str
    op: str
    inputs: dict[str, tuple]
    outputs: dict[str, tuple]
    params: dict[str, tuple] = field(default_factory=dict)


EARLIER = ("old_logprobs", "logprobs")  # at experience time; where both are there, the others are under training
EARLIER_VALUES = ("old_values", "values")

EDGES = (
    Edge(
        "logprobs", "token_logprobs", {"logits": ("logits",), "tokens": ("tokens",)}, {"logprobs": ("logprobs", "old_logprobs")}
    ),
    Edge("ref_logprobs", "token_logprobs", {"logits": ("ref_logits",), "tokens": ("tokens",)}, {"logprobs": ("ref_logprobs",)}),
    Edge("entropy", "entropy", {"logits": ("logits",)}, {"entropy": ("token_entropy", "entropy")}),
    Edge("kl", "kl_penalty", {"logprobs": EARLIER, "ref_logprobs": ("ref_logprobs",)}, {"kl": ("kl",)}),
    Edge(
        "scores", "end_score", {"token_scores": ("token_scores",), "attention_mask": ("attention_mask",)}, {"scores": ("scores",)}
    ),
    Edge(
        "rewards",
        "shaped_rewards",
        {"logprobs": EARLIER, "ref_logprobs": ("ref_logprobs",), "scores": ("scores",), "mask": ("mask",)},
        {"rewards": ("rewards",)},
    ),
    Edge(
        "advantages",
        "gae",
        {"rewards": ("rewards",), "values": EARLIER_VALUES, "mask": ("mask",)},
        {"advantages": ("raw_advantages", "advantages"), "returns": ("returns",)},
    ),
    Edge(
        "experience",
        "experience",
        {
            "logprobs": EARLIER,
            "ref_logprobs": ("ref_logprobs",),
            "values": EARLIER_VALUES,
            "scores": ("scores",),
            "mask": ("mask",),
        },
        {"rewards": ("rewards",), "advantages": ("advantages",), "returns": ("returns",)},
    ),
    Edge("whitening", "whiten", {"x": ("raw_advantages",), "mask": ("mask",)}, {"whitened": ("advantages",)}),
    Edge(
        "ratio",
        "ratio",
        {"logprobs": ("logprobs",), "old_logprobs": ("old_logprobs",), "mask": ("mask",)},
        {"ratio": ("ratio",)},
    ),
    Edge(
        "policy_loss",
        "policy_loss",
        {"logprobs": ("logprobs",), "old_logprobs": ("old_logprobs",), "advantages": ("advantages",), "mask": ("mask",)},
        {"loss": ("policy_loss",), "clip_fraction": ("clip_fraction",), "approx_kl": ("approx_kl",)},
        {"clip_low": ("clip_low", "clip"), "clip_high": ("clip_high", "clip")},
    ),
    Edge(
        "value_loss",
        "value_loss",
        {"values": ("values",), "old_values": ("old_values",), "returns": ("returns",), "mask": ("value_mask", "mask")},
        {"loss": ("value_loss",), "clip_fraction": ("value_clip_fraction",)},
        {"clip": ("value_clip",)},
    ),
    Edge("mean_entropy", "aggregate", {"x": ("token_entropy", "entropy"), "mask": ("mask",)}, {"value": ("mean_entropy",)}),
    Edge("mean", "aggregate", {"x": ("x",), "mask": ("mask",)}, {"value": ("value",)}),
    Edge(
        "total_loss",
        "total_loss",
        {
            "policy_loss": ("policy_loss",),
            "value_loss": ("value_loss",),
            "entropy": ("mean_entropy", "entropy", None),
            "kl_loss": ("kl_loss", None),
        },
        {"loss": ("total_loss", "loss")},
    ),
    Edge(
        "reward_model_loss",
        "reward_model_loss",
        {"chosen": ("chosen_scores",), "rejected": ("rejected_scores",)},
        {"loss": ("reward_model_loss", "loss")},
    ),
    Edge(
        "reward_model_token_loss",
        "reward_model_token_loss",
        {
            "chosen": ("chosen_token_scores",),
            "rejected": ("rejected_token_scores",),
            "chosen_tokens": ("chosen_tokens",),
            "rejected_tokens": ("rejected_tokens",),
        },
        {"loss": ("reward_model_token_loss",)},
    ),
    Edge(
        "dpo_loss",
        "dpo_loss",
        {name: (name,) for name in ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")},
        {"loss": ("dpo_loss",)},
    ),
    Edge("kl_controller", "kl_controller", {"kl": ("observed_kl",)}, {"coef": ("coef",)}),
)

# Tensors with one number per response token; the rest of the dump is aligned to them.
TOKENWISE = (
    *("logprobs", "old_logprobs", "ref_logprobs", "rewards", "raw_advantages", "advantages", "returns", "kl", "ratio"),
    *("x", "value", "token_entropy", "entropy", "value_mask"),
)
STATES = ("values", "old_values")  # in a full sequence, one per token: the last speaks of no token
MASKS = ("mask", "response_mask")
