"""TorchRL: its PPO losses, its GAE module, and what it has for language models (KL, rollout rewards, reward-model loss).

The losses read a mask from their input. GAE reads none: its batches hold whole trajectories, so the tokens that count
become a stream, one trajectory behind the other. Rewards are made by RolloutFromModel, with models that answer with the
arrays of a case.
"""

import importlib
import itertools
import math
from importlib import metadata
from types import SimpleNamespace

from goldenppo.adapters import Unsupported, window

try:
    import torch
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictModuleBase
    from torchrl import objectives
    from torchrl.data.llm import utils as rollouts
    from torchrl.modules.distributions import LLMMaskedCategorical
    from torchrl.modules.models import llm as reward_models
    from torchrl.objectives.llm import distillation, grpo
    from torchrl.objectives.value import advantages as estimators

    transforms = importlib.import_module("torchrl.envs.llm.transforms.kl")
except ImportError as missing:
    raise Unsupported(
        f"torchrl is not importable here ({missing}); pip install torchrl==0.14.1, "
        "or name an environment that has it: --python ENV/bin/python"
    ) from None

NAME = "torchrl"
VERSION = metadata.version("torchrl")
KNOWN_VERSIONS = ["0.14.1"]
_MAKER = "torchrl.data.llm.utils:RolloutFromModel"
_CATEGORICAL = "torchrl.modules.distributions:LLMMaskedCategorical"
_REWARD_MODEL = "torchrl.modules.models.llm:GPT2RewardModel"
SOURCES = {
    "token_logprobs": f"{_CATEGORICAL}.log_prob",
    "entropy": f"{_CATEGORICAL}.entropy",
    "ratio": "torchrl.objectives:PPOLoss.forward",
    "policy_loss": "torchrl.objectives:ClipPPOLoss.forward",
    "value_loss": "torchrl.objectives:ClipPPOLoss.loss_critic",
    "kl_penalty": [
        "torchrl.envs.llm.transforms.kl:KLComputation.forward",
        "torchrl.objectives.llm.distillation:k3_kl_token_estimate",
    ],
    "shaped_rewards": [f"{_MAKER}._log_ratio", f"{_MAKER}.create_rollout_td"],
    "gae": [
        "torchrl.objectives.value.advantages:GAE.forward",
        "torchrl.objectives.value.advantages:generalized_advantage_estimate",
    ],
    "whiten": "torchrl.objectives:ClipPPOLoss._standardize_advantage",
    "aggregate": "torchrl.objectives.llm.grpo:GRPOLoss._aggregate_loss_value",
    "reward_model_token_loss": f"{_REWARD_MODEL}.compute_reward_loss",
    "end_score": f"{_REWARD_MODEL}._compute_end_scores",
    "kl_controller": [f"{_MAKER}.create_rollout_td", "torchrl.data.llm.utils:AdaptiveKLController.update"],
}

PROMPT = 2  # prompt tokens in front of every response
EOS, TEXT = 0, 1  # EOS is the padding too, as in RolloutFromModel


def token_logprobs(logits, tokens, *, temperature):
    return _categorical(logits[:, :-1], temperature).log_prob(tokens[:, 1:])


def entropy(logits, *, temperature):
    return _categorical(logits, temperature).entropy()


def ratio(logprobs, old_logprobs, mask):
    # Without a clip the gain of a token is its ratio times its advantage; the loss is minus that.
    module = objectives.PPOLoss(_Actor(logprobs), None, entropy_bonus=False, reduction="none")
    return module(_batch(mask, old_logprobs, torch.full_like(logprobs, -1.0)))["loss_objective"]


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, aggregation):
    clip = clip_low if clip_low == clip_high else (clip_low, clip_high)
    module = objectives.ClipPPOLoss(
        _Actor(logprobs), None, clip_epsilon=clip, entropy_bonus=False, reduction=_reduction(aggregation)
    )
    # The loss refuses log-probs of the old policy that require a gradient.
    found = module(_batch(mask, old_logprobs.detach(), advantages))
    return {"loss": found["loss_objective"], "clip_fraction": found["clip_fraction"], "approx_kl": found["kl_approx"]}


def value_loss(values, old_values, returns, mask, *, clip=None, aggregation):
    critic = TensorDictModule(torch.nn.Identity(), ["new_value"], ["state_value"])
    module = objectives.ClipPPOLoss(
        _Actor(torch.zeros_like(values)),
        critic,
        entropy_bonus=False,
        loss_critic_type="l2",
        clip_value=clip,
        reduction=_reduction(aggregation),
    )
    nothing = torch.zeros_like(values).detach()
    batch = _batch(mask, nothing, nothing)
    for name, array in {"new_value": values, "state_value": old_values, "value_target": returns}.items():
        batch[name] = array.unsqueeze(-1)
    # Its value_clip_fraction counts the values outside the band, and not those whose clipped error is the larger one.
    return module(batch)["loss_critic"]


def kl_penalty(logprobs, ref_logprobs, *, estimator):
    if estimator == "k3":
        return distillation.k3_kl_token_estimate(ref_logprobs, logprobs)
    if estimator != "k1":
        raise Unsupported("torchrl has k1 and k3")
    given = TensorDict({("log_probs", "full"): logprobs, ("ref_log_probs", "full"): ref_logprobs}, [len(logprobs)])
    found = transforms.KLComputation(add_to_reward=False)(TensorDict({"next": given}, [len(logprobs)]))
    return torch.stack(found["next"].get("kl_penalty").unbind())


def shaped_rewards(logprobs, ref_logprobs, scores, mask, *, kl_coef, score_clip=None):
    lengths, width = mask.sum(1), mask.shape[1]
    if bool((mask.long().diff(dim=1) > 0).any()) or not bool(mask[:, 0].all()):
        raise Unsupported("a response ends with its first EOS, which counts: it has a token and no gaps")
    position = torch.arange(width, device=mask.device)
    open_end = (position < lengths.unsqueeze(1) - 1) | (lengths.unsqueeze(1) == width)
    responses = torch.where(open_end, TEXT, EOS)
    prompt = torch.full_like(responses[:, :1], TEXT).expand(-1, PROMPT)
    generated = torch.cat([prompt, responses], 1)
    maker = _maker(width, kl_coef, scores, math.inf if score_clip is None else score_clip)
    maker.model, maker.ref_model = (_LanguageModel(array, responses) for array in (logprobs, ref_logprobs))
    maker.logprobs_of_labels = lambda logits, labels: logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)  # they are given
    batch = _prompts(prompt)
    log_ratio = maker._log_ratio(generated, batch.prompt_rindex)
    return maker.create_rollout_td(batch, generated, logprobs.unsqueeze(-1), log_ratio)["next", "reward"].squeeze(-1)


def gae(rewards, values, mask, *, gamma, lam, whitening):
    if bool((mask[:, 1:] & ~mask[:, :-1] & (mask.cumsum(1)[:, :-1] > 0)).any()):
        raise Unsupported("a trajectory has no gaps: its steps follow each other")
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    following = window.embed(torch, values, 0, 1)[:, 1:].masked_fill(last, window.POISON)  # of a state after the end
    stream = {
        "state_value": values,
        "next": {"state_value": following, "reward": rewards, "done": last, "terminated": last},
    }
    batch = TensorDict(stream, mask.shape)[mask].unsqueeze(0).apply(lambda array: array.unsqueeze(-1))
    module = estimators.GAE(gamma=gamma, lmbda=lam, value_network=None, average_gae=whitening == "inside")
    found = module(batch)
    return {
        "advantages": _in_place(found["advantage"], mask),
        "returns": _in_place(found["value_target"], mask),
    }


def whiten(x, mask, *, variance):
    """The statistics are those of the whole batch, or, where it says which steps are valid, those of these steps."""
    module = objectives.ClipPPOLoss(_Actor(x), None, entropy_bonus=False, normalize_advantage=True)
    if variance == "biased":
        return module._standardize_advantage(x.unsqueeze(-1), TensorDict({"shifted_valid": mask}, mask.shape)).squeeze(-1)
    stream = x[mask].unsqueeze(-1)
    return _in_place(module._standardize_advantage(stream, TensorDict({}, stream.shape[:1])), mask)


def aggregate(x, mask, *, aggregation):
    modes = {"token_mean": "token_mean", "seq_mean_token_mean": "prompt_mean"}
    if aggregation not in modes:
        raise Unsupported("torchrl's losses for language models have token_mean and prompt_mean")
    return grpo.GRPOLoss(aggregation=modes[aggregation])._aggregate_loss_value(x.unsqueeze(-1), mask).squeeze()


def reward_model_token_loss(chosen, rejected, chosen_tokens, rejected_tokens, *, pad_id):
    pairs = ((chosen_tokens, chosen), (rejected_tokens, rejected))
    batches = (SimpleNamespace(input_ids=tokens, rewards=rewards) for tokens, rewards in pairs)
    return reward_models.GPT2RewardModel.compute_reward_loss(*batches, pad_id)


def end_score(token_scores, attention_mask):
    if bool((attention_mask[:, 1:] & ~attention_mask[:, :-1]).any()):
        raise Unsupported("a sequence ends before its first pad: left padding and gaps cannot be expressed")
    tokens = torch.where(attention_mask, TEXT, EOS)
    return reward_models.GPT2RewardModel._compute_end_scores(SimpleNamespace(pad_id=EOS), token_scores, tokens)


def kl_controller(kl, *, init_coef, target, horizon, batch_size, controller):
    """Every step sees its KL through create_rollout_td, which queues it, once per response."""
    maker = _maker(1, init_coef, torch.zeros_like(kl[:1]), math.inf)
    if controller == "fixed":
        maker.kl_scheduler = rollouts.ConstantKLController(kl_coef=init_coef)
    else:
        maker.kl_scheduler = rollouts.AdaptiveKLController(init_kl_coef=init_coef, target=target, horizon=horizon)
    prompt = torch.full((1, 1), TEXT, device=kl.device)
    coefficients = []
    for observed in kl:
        log_ratio = observed.reshape(1, 1)
        maker.create_rollout_td(_prompts(prompt), torch.cat([prompt, prompt], 1), log_ratio.unsqueeze(-1), log_ratio)
        maker._kl_queue *= batch_size
        maker.step_scheduler()
        coefficients.append(float(maker.kl_coef))
    return torch.tensor(coefficients, dtype=kl.dtype, device=kl.device)


def _categorical(logits, temperature):
    if temperature != 1:
        raise Unsupported("torchrl's losses take no temperature")
    everywhere = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    return LLMMaskedCategorical(logits, everywhere)


class _Actor(TensorDictModuleBase):
    """A policy whose distribution gives every action the log-prob of the case."""

    in_keys = ("action",)
    out_keys = ("action",)

    def __init__(self, logprobs):
        super().__init__()
        self.distribution = SimpleNamespace(log_prob=lambda _: logprobs)

    def get_dist(self, _):
        return self.distribution


class _LanguageModel:
    """Answers with logits [B, L, 2] that hold the given log-probs [B, T] in the columns of the tokens."""

    def __init__(self, logprobs, tokens):
        others = logprobs.new_full((*logprobs.shape, 2), -window.POISON)
        self.logits = window.embed(torch, others.scatter(2, tokens.unsqueeze(-1), logprobs.unsqueeze(-1)), PROMPT - 1, 1)
        self.device = logprobs.device

    def __call__(self, **_):
        return self


def _batch(mask, old_logprobs, advantages):
    """A batch as the losses take it, the mask where a collector leaves it."""
    return TensorDict(
        {
            "action": torch.zeros_like(mask, dtype=torch.long),
            "action_log_prob": old_logprobs,
            "advantage": advantages.unsqueeze(-1),
            ("collector", "mask"): mask,
        },
        mask.shape,
    )


def _reduction(aggregation: str) -> str:
    modes = {"token_mean": "mean", "token_sum": "sum"}
    if aggregation not in modes:
        raise Unsupported("torchrl's PPO losses have the reductions mean and sum")
    return modes[aggregation]


def _in_place(stream, mask):
    """[B, T]: the stream's numbers where the mask counts, 0 elsewhere."""
    return stream.new_zeros(mask.shape).masked_scatter(mask, stream)


def _maker(width, kl_coef, scores, score_clip):
    """A RolloutFromModel without its constructor, which asks for transformers; the label of a prompt scores 0."""
    answers = itertools.cycle([scores, torch.zeros_like(scores)])
    maker = object.__new__(rollouts.RolloutFromModel)
    vars(maker).update(
        EOS_TOKEN_ID=EOS,
        max_new_tokens=width,
        kl_coef=kl_coef,
        score_clip=score_clip,
        reward_model=lambda **_: (None, next(answers)),
        _kl_queue=[],
    )
    return maker


def _prompts(tokens):
    """[B, P] prompts as RolloutFromModel has them."""
    end = torch.full_like(tokens[:, 0], tokens.shape[1])
    return SimpleNamespace(input_ids=tokens, attention_mask=tokens == TEXT, prompt_rindex=end)
