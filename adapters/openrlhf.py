"""OpenRLHF: its own loss modules and helpers, by a light path that needs torch and the wheel alone.

The packages' __init__ files pull in DeepSpeed, Ray and vLLM, none of which the arithmetic uses. So the packages are made
importable without running these files, and the names that the modules import from them are empty stand-ins.
"""

import importlib
import sys
import types
from importlib import metadata, util

from goldenppo.adapters import Unsupported

try:
    import torch

    VERSION = metadata.version("openrlhf")
except (ImportError, metadata.PackageNotFoundError) as missing:
    raise Unsupported(
        f"OpenRLHF is not installed here ({missing}); pip install --no-deps openrlhf==0.11.2, "
        "or name an environment that has it: --python ENV/bin/python"
    ) from None


def _open_packages() -> None:
    """Makes openrlhf.models and its neighbours importable without what their __init__ files import."""
    found = util.find_spec("openrlhf")
    assert found is not None and found.submodule_search_locations  # a package, as its metadata was found
    root = found.submodule_search_locations[0]
    for name in ("", ".models", ".trainer", ".trainer.ppo_utils", ".trainer.ray", ".utils"):
        package = types.ModuleType(f"openrlhf{name}")
        package.__path__ = [root + name.replace(".", "/")]
        sys.modules[package.__name__] = package
    for name in ("deepspeed", "ray"):
        if util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
    launcher = types.ModuleType("openrlhf.trainer.ray.launcher")
    launcher.RayActorGroup = object  # type: ignore[attr-defined]
    sys.modules[launcher.__name__] = launcher


_open_packages()
utils = importlib.import_module("openrlhf.models.utils")
losses = importlib.import_module("openrlhf.models.loss")
loss_utils = importlib.import_module("openrlhf.utils.loss_utils")
experience_maker = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")
controllers = importlib.import_module("openrlhf.trainer.ppo_utils.kl_controller")
_MAKER = "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker"

NAME = "openrlhf"
KNOWN_VERSIONS = ["0.11.2"]
MASK = "float"
SOURCES = {
    "token_logprobs": "openrlhf.models.utils:log_probs_from_logits",
    "entropy": "openrlhf.models.utils:compute_entropy",
    "policy_loss": "openrlhf.models.loss:PolicyLoss.forward",
    "value_loss": "openrlhf.models.loss:ValueLoss.forward",
    "accumulated_policy_loss": [
        "openrlhf.utils.loss_utils:iter_grad_accum_global_norm",
        "openrlhf.models.loss:PolicyLoss.forward",
    ],
    "accumulated_value_loss": [
        "openrlhf.utils.loss_utils:iter_grad_accum_global_norm",
        "openrlhf.models.loss:ValueLoss.forward",
    ],
    "kl_penalty": "openrlhf.models.utils:compute_approx_kl",
    "shaped_rewards": ["openrlhf.models.utils:compute_approx_kl", "openrlhf.models.utils:compute_reward"],
    "gae": f"{_MAKER}.get_advantages_and_returns",
    "whiten": f"{_MAKER}.compute_advantages_and_returns",
    "experience": [f"{_MAKER}.compute_advantages_and_returns", f"{_MAKER}.get_advantages_and_returns"],
    "aggregate": "openrlhf.models.loss:aggregate_loss",
    "kl_controller": "openrlhf.trainer.ppo_utils.kl_controller:AdaptiveKLController.update",
    "reward_model_loss": "openrlhf.models.loss:PairWiseLoss.forward",
    "dpo_loss": "openrlhf.models.loss:DPOLoss.forward",
}


def token_logprobs(logits, tokens, *, temperature):
    return utils.log_probs_from_logits(logits[:, :-1], tokens[:, 1:], temperature)


def entropy(logits, *, temperature):
    if temperature != 1:
        raise Unsupported("OpenRLHF's actor divides the logits by the temperature before it calls this function")
    with torch.compiler.set_stance("force_eager"):  # it is compiled, which needs a C++ compiler and changes no formula
        return utils.compute_entropy(logits)


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip=None, aggregation):
    module = losses.PolicyLoss(
        clip_eps_low=clip_low, clip_eps_high=clip_high, dual_clip=dual_clip, token_level_loss=_by_token(aggregation)
    )
    loss, fraction, kl, _, _ = module(logprobs, old_logprobs, advantages, mask)
    return {"loss": loss, "clip_fraction": fraction, "approx_kl": kl}


def value_loss(values, old_values, returns, mask, *, clip=None, aggregation):
    return losses.ValueLoss(clip, token_level_loss=_by_token(aggregation))(values, old_values, returns, mask)


def accumulated_policy_loss(parts, *, clip_low, clip_high, dual_clip=None, aggregation):
    module = losses.PolicyLoss(
        clip_eps_low=clip_low, clip_eps_high=clip_high, dual_clip=dual_clip, token_level_loss=_by_token(aggregation)
    )
    return _accumulated(lambda part, info: module(*part, **info)[0], parts)


def accumulated_value_loss(parts, *, clip=None, aggregation):
    module = losses.ValueLoss(clip, token_level_loss=_by_token(aggregation))
    return _accumulated(lambda part, info: module(*part, **info), parts)


def _accumulated(loss, parts):
    """The micro-batches of one step with the counts that ppo_train (trainer/ray/ppo_actor.py, ppo_critic.py) gives them.

    Each loss goes to DeepSpeed's engine, whose backward divides it by the number of accumulation steps.
    """
    windows = loss_utils.iter_grad_accum_global_norm(parts, types.SimpleNamespace(), len(parts), lambda part: part[-1])
    return sum(loss(part, info) / len(parts) for part, info in windows)


def kl_penalty(logprobs, ref_logprobs, *, estimator):
    return utils.compute_approx_kl(logprobs, ref_logprobs, kl_estimator=_known(estimator))


def shaped_rewards(logprobs, ref_logprobs, scores, mask, *, kl_coef, score_clip=None, estimator):
    kl = _kl(logprobs, ref_logprobs, mask, estimator)
    return utils.compute_reward(scores, kl_coef, kl, mask, _bounds(score_clip))


def gae(rewards, values, mask, *, gamma, lam):
    maker = object.__new__(experience_maker.RemoteExperienceMaker)  # the method reads no attribute
    advantages, returns = maker.get_advantages_and_returns(values, rewards, mask, gamma, lam)
    return {"advantages": advantages, "returns": returns}


def whiten(x, mask):
    # With gamma and values of 0 the advantage of a token is its reward, here minus its KL: x, bit by bit.
    scores, values = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    return _experience(-x, values, scores, mask, kl_coef=1.0, gamma=0.0, lam=0.0).advantages


def experience(logprobs, ref_logprobs, values, scores, mask, *, kl_coef, gamma, lam, score_clip=None, estimator):
    """Returns only: the rewards are not kept, and the variance of the whitening (biased) is an axis of `whiten`."""
    kl = _kl(logprobs, ref_logprobs, mask, estimator)
    return {"returns": _experience(kl, values, scores, mask, kl_coef, gamma, lam, _bounds(score_clip)).returns}


def aggregate(x, mask, *, aggregation):
    return losses.aggregate_loss(x, mask, token_level_loss=_by_token(aggregation))


def kl_controller(kl, *, init_coef, target, horizon, batch_size, controller):
    if controller == "fixed":
        keeper = controllers.FixedKLController(init_coef)
    else:
        keeper = controllers.AdaptiveKLController(init_coef, target, horizon)
    coefficients = []
    for observed in kl.tolist():
        keeper.update(observed, batch_size)
        coefficients.append(float(keeper.value))
    return torch.tensor(coefficients, dtype=kl.dtype, device=kl.device)


def reward_model_loss(chosen, rejected, *, margin=None):
    return losses.PairWiseLoss()(chosen, rejected, margin)


def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta, label_smoothing=None):
    smoothing = {} if label_smoothing is None else {"label_smoothing": label_smoothing}
    loss, _, _ = losses.DPOLoss(beta, **smoothing)(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return loss


def _by_token(aggregation: str) -> bool:
    if aggregation not in ("token_mean", "seq_mean_token_mean"):
        raise Unsupported("OpenRLHF offers token_mean and seq_mean_token_mean")
    return aggregation == "token_mean"


def _kl(logprobs, ref_logprobs, mask, estimator):
    """The KL as the experience maker has it."""
    if not bool(mask.any(1).all()):
        raise Unsupported("OpenRLHF puts the score of an empty response in the last column")
    # models/actor.py, Actor.forward multiplies log-probs by the action mask: masked slots hold zeros
    logprobs, ref_logprobs = logprobs.masked_fill(mask == 0, 0.0), ref_logprobs.masked_fill(mask == 0, 0.0)
    return utils.compute_approx_kl(logprobs, ref_logprobs, kl_estimator=_known(estimator))


def _bounds(score_clip):
    return None if score_clip is None else (-score_clip, score_clip)


def _experience(kl, values, scores, mask, kl_coef, gamma, lam, bounds=None):
    """One batch after the real compute_advantages_and_returns."""
    advantage = types.SimpleNamespace(estimator="gae", gamma=gamma, lambd=lam, no_std_norm=False)
    reward = types.SimpleNamespace(clip_range=bounds, overlong_buffer_len=None, stop_properly_penalty_coef=None)
    args = types.SimpleNamespace(
        algo=types.SimpleNamespace(advantage=advantage),
        reward=reward,
        rollout=types.SimpleNamespace(n_samples_per_prompt=1),
    )
    maker = object.__new__(experience_maker.RemoteExperienceMaker)
    maker.strategy = types.SimpleNamespace(args=args)
    maker.advantage_estimator = "gae"
    maker.kl_ctl = controllers.FixedKLController(kl_coef)
    batch = experience_maker.Experience(
        index=list(range(len(mask))), rewards=scores, kl=kl, values=values, action_mask=mask, info={}
    )
    return maker.compute_advantages_and_returns([batch])[0]


def _known(estimator: str) -> str:
    if estimator == "abs":
        raise Unsupported("OpenRLHF has no absolute value of the KL")
    return estimator
