"""TRL's current trainers: log-probs, GRPO's surrogate, reward-model and DPO loss; TRL ≥ 1.13 has no PPO.

Methods of GRPOTrainer, RewardTrainer and DPOTrainer, called on trainers made without their constructors, with
the few attributes that they read and a stub model that answers with the arrays of a case. PPO itself was
taken out of TRL in 1.13.0: the adapters trl-ppo (0.12 to 1.12.0) and trl-classic (0.7 to 0.11) check it.
"""

import importlib
import importlib.metadata
import inspect
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from goldenppo.adapters import Unsupported

try:
    VERSION = importlib.metadata.version("trl")
except importlib.metadata.PackageNotFoundError:
    raise Unsupported("TRL is not installed in this environment: pip install trl") from None

NAME = "trl"
KNOWN_VERSIONS = [
    "0.7.11",
    "0.9.6",
    "0.11.4",
    "0.12.2",
    "0.16.1",
    "0.23.1",
    "0.24.0",
    "1.0.0",
    "1.12.0",
    "1.16.0",
]
MASK = "int"  # completion_mask is an integer tensor

importlib.import_module("trl")  # a sentence now rather than one for each op

AGGREGATIONS = {
    "token_mean": "dapo",
    "seq_mean_token_mean": "grpo",
    "seq_mean_token_sum": "luspo",
    "seq_mean_token_sum_norm": "dr_grpo",
}


def _trainer(module: str, cls: str, device):
    """A trainer without models, and its module."""
    try:
        home = importlib.import_module(f"trl.trainer.{module}")
    except ImportError as problem:
        raise Unsupported(f"{cls} of TRL {VERSION} does not import: {problem}") from None
    trainer = object.__new__(getattr(home, cls))
    trainer.accelerator = SimpleNamespace(device=device, **_ACCELERATOR)
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer._total_train_tokens, trainer._tp_size = 0, 1
    return trainer, home


_ACCELERATOR = {
    "num_processes": 1,
    "is_main_process": True,
    "sync_gradients": True,
    "autocast": nullcontext,
    "gather": lambda value: value,
    "gather_for_metrics": lambda value: value,
    "reduce": lambda value, reduction="sum": value,
}


class _Model(torch.nn.Module):
    """A model that answers whatever it is given."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, **inputs):
        return self.answer(**inputs)


class _Answer(SimpleNamespace):
    """A model's output, read by attribute or by key."""

    def __getitem__(self, name):
        return getattr(self, name)


def _names(module: str, qualified: str) -> set[str]:
    """The names in a function's code, which tell its shape in this version; none where it does not exist."""
    try:
        found: Any = importlib.import_module(f"trl.trainer.{module}")
    except ImportError:
        return set()
    for part in qualified.split("."):
        found = getattr(found, part, None)
    code = getattr(inspect.unwrap(found), "__code__", None) if found else None
    return {*code.co_names, *code.co_varnames} if code else set()


_logps = "_get_per_token_logps_and_entropies"
_logps = _logps if _names("grpo_trainer", f"GRPOTrainer.{_logps}") else "_get_per_token_logps"
_grpo = "_compute_loss" if _names("grpo_trainer", "GRPOTrainer._compute_loss") else "compute_loss"
_dpo = "_compute_loss" if _names("dpo_trainer", "DPOTrainer._compute_loss") else "get_batch_loss_metrics"
_grpo_names = _names("grpo_trainer", f"GRPOTrainer.{_grpo}")
_dpo_names = _names("dpo_trainer", f"DPOTrainer.{_dpo}")
SOURCES = {
    "token_logprobs": f"trl.trainer.grpo_trainer:GRPOTrainer.{_logps}",
    "entropy": f"trl.trainer.grpo_trainer:GRPOTrainer.{_logps}",
    "policy_loss": f"trl.trainer.grpo_trainer:GRPOTrainer.{_grpo}",
    "reward_model_loss": "trl.trainer.reward_trainer:RewardTrainer.compute_loss",
    "dpo_loss": f"trl.trainer.dpo_trainer:DPOTrainer.{_dpo}",
}


def token_logprobs(logits, tokens, *, temperature):
    return _forward(logits, tokens, temperature)[0]


def entropy(logits, *, temperature):
    if not _logps.endswith("entropies"):
        raise Unsupported(f"TRL {VERSION} computes no entropy in GRPOTrainer")
    # the last position predicts a token beyond the row and is left out: one more row position makes up for it
    longer = torch.cat([logits, logits[:, :1]], dim=1)
    tokens = torch.zeros(longer.shape[:2], dtype=torch.long, device=logits.device)
    return _forward(longer, tokens, temperature, compute_entropy=True)[1]


def _forward(logits, tokens, temperature, **wanted):
    """The log-probs (and entropies) with which GRPOTrainer trains, for given logits [B, L, V]."""
    trainer, home = _trainer("grpo_trainer", "GRPOTrainer", logits.device)
    trainer.temperature, trainer.model_kwarg_keys, trainer._entropy_bonus_enabled = temperature, (), False
    trainer.args, trainer.state = (
        SimpleNamespace(report_to=[]),
        SimpleNamespace(global_step=0),
    )  # for its timer
    model = _language_model(home, logits, temperature)
    found = getattr(trainer, _logps)(model, tokens, torch.ones_like(tokens), tokens.shape[1] - 1, **wanted)
    return found if isinstance(found, tuple) else (found, None)


def _language_model(home, logits, temperature):
    """A model with the given logits; since 1.15 TRL fuses the LM head, which is the identity here."""
    model = _Model(lambda **_: SimpleNamespace(logits=logits.clone()))  # the trainer may scale it in place
    if hasattr(home, "add_fused_lm_head"):
        model.config = SimpleNamespace(get_text_config=SimpleNamespace)
        model.base_model = lambda **_: SimpleNamespace(last_hidden_state=logits)
        head = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        model.get_output_embeddings = lambda: SimpleNamespace(weight=head, bias=None)
        home.add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    return model


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    clip_low,
    clip_high,
    dual_clip=None,
    horizon=None,
    aggregation="token_mean",
):
    if aggregation not in AGGREGATIONS:
        raise Unsupported(f"GRPOTrainer reduces by {', '.join(AGGREGATIONS)}; the case asks for {aggregation}")
    trainer, _ = _trainer("grpo_trainer", "GRPOTrainer", mask.device)
    if "dim" not in _grpo_names:
        raise Unsupported(f"GRPOTrainer of TRL {VERSION} takes one advantage for each response, not for each token")
    given = (logprobs, torch.zeros_like(logprobs).detach(), None)
    vars(trainer).update(
        {_logps: lambda *_, **__: given if "aux_loss" in _grpo_names else given[:2]},
        model=_Model(None),
        loss_type=AGGREGATIONS[aggregation],
        max_completion_length=horizon,
        epsilon_low=clip_low,
        epsilon_high=clip_high,
        args=SimpleNamespace(delta=dual_clip, use_bias_correction_kl=False, steps_per_generation=1),
        **_GRPO_OFF,
    )
    batch = {
        "prompt_ids": torch.zeros_like(mask[:, :1]),
        "prompt_mask": torch.ones_like(mask[:, :1]),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old_logprobs,
        "num_items_in_batch": mask.sum(),
    }
    loss = getattr(trainer, _grpo)(trainer.model, batch)
    return {"loss": loss, "clip_fraction": trainer._metrics["train"]["clip_ratio/region_mean"][-1]}


_GRPO_OFF = {
    "beta": 0.0,
    "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
    "vllm_importance_sampling_correction": False,
    "current_gradient_accumulation_steps": 1,
    "aux_loss_enabled": False,
    "_entropy_bonus_enabled": False,
}


def reward_model_loss(chosen, rejected, *, margin=None):
    trainer, _ = _trainer("reward_trainer", "RewardTrainer", chosen.device)
    trainer.args, trainer.use_reward_data_collator = SimpleNamespace(center_rewards_coefficient=None), True
    scores = torch.cat([chosen, rejected])
    rows = torch.arange(len(scores), device=scores.device).unsqueeze(1)
    trainer.model = _Model(lambda input_ids, **_: _Answer(logits=scores[input_ids]))
    # up to 0.23 two batches, later one of chosen and rejected rows
    first, last = rows.chunk(2)
    batch = {"input_ids": rows, "input_ids_chosen": first, "input_ids_rejected": last}
    batch |= {name.replace("input_ids", "attention_mask"): torch.ones_like(ids) for name, ids in batch.items()}
    return trainer.compute_loss(trainer.model, batch if margin is None else batch | {"margin": margin})


def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta, label_smoothing=0.0):
    if _dpo == "_compute_loss":
        return _dpo_in_one(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, label_smoothing)
    trainer, _ = _trainer("dpo_trainer", "DPOTrainer", ref_chosen.device)
    policy, reference = _Model(None), _Model(None)
    answers = {policy: (policy_chosen, policy_rejected), reference: (ref_chosen, ref_rejected)}
    vars(trainer).update(
        _DPO_PLAIN,
        beta=beta,
        label_smoothing=label_smoothing,
        loss_type=["sigmoid"] if "loss_weights" in _dpo_names else "sigmoid",
        concatenated_forward=lambda model, _batch: _forward_output(*answers[model]),
    )
    trainer.__dict__.update(model=policy, ref_model=reference)
    batch = {"ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}  # read from 0.12 on
    return trainer.get_batch_loss_metrics(policy, batch)[0]


_DPO_PLAIN = {
    "args": SimpleNamespace(
        rpo_alpha=None,
        use_liger_loss=False,
        discopop_tau=0.05,
        gradient_checkpointing_kwargs=None,
        max_length=None,
    ),
    "reference_free": False,
    "f_divergence_type": "reverse_kl",
    "f_divergence_params": None,
    "f_alpha_divergence_coef": 1.0,
    "precompute_ref_log_probs": False,
    "precompute_ref_logps": True,
    "aux_loss_enabled": False,
    "use_weighting": False,
    "ld_alpha": None,
    "loss_types": ["sigmoid"],
    "loss_weights": [1.0],
}


def _forward_output(chosen, rejected):
    """What concatenated_forward returns: log-probs of the answers, then logits and a loss for the metrics."""
    nothing = torch.zeros_like(chosen).detach()
    if "model_output" in _dpo_names:  # from 0.12 on
        names = ("mean_chosen_logits", "mean_rejected_logits", "nll_loss")
        return {"chosen_logps": chosen, "rejected_logps": rejected, **dict.fromkeys(names, nothing.mean())}
    return (chosen, rejected, nothing, nothing, nothing)[: 5 if "policy_nll_loss" in _dpo_names else 4]


def _dpo_in_one(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, label_smoothing):
    """_compute_loss of newer versions: each answer is one token, whose log-prob is the answer's."""
    if label_smoothing:
        raise Unsupported(f"TRL {VERSION} applies label_smoothing to other losses than sigmoid, where it ignores it")
    trainer, home = _trainer("dpo_trainer", "DPOTrainer", ref_chosen.device)
    logps = torch.cat([policy_chosen, policy_rejected]).unsqueeze(1)
    nothing = torch.zeros_like(logps).detach()
    output = SimpleNamespace(
        log_probs=logps,
        logits=torch.stack([logps, logps], dim=1),  # a vocabulary of one token
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing.bool(),
    )
    vars(trainer).update(_DPO_PLAIN, beta=beta, label_smoothing=0.0)
    trainer.__dict__["model"] = _Model(lambda **_: output)
    tokens = torch.zeros((len(logps), 2), dtype=torch.long, device=logps.device)
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "completion_mask": torch.ones_like(tokens),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    with _given_logprobs(home):
        return trainer._compute_loss(trainer.model, batch, False)


@contextmanager
def _given_logprobs(home):
    """Takes log-probs for logits where log-softmax is taken inside the loss (up to 1.14)."""
    if not hasattr(home, "selective_log_softmax"):
        yield
        return
    real = home.selective_log_softmax
    home.selective_log_softmax = lambda logits, index: logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    try:
        yield
    finally:
        home.selective_log_softmax = real
