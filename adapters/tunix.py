"""Tunix: its own algo_core and common functions, and its PPO learner for the span from log-probs to advantages.

The learner runs with a cluster that answers with the arrays of a case, and is read where it reports its first metrics,
when rewards, advantages and returns are made. Arrays are JAX's; gradients are those of jax.grad.
"""

import sys
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

from goldenppo.adapters import Unsupported, window

try:
    import jax
    import numpy as host
    from flax import nnx
    from tunix.rl import algo_core, common
    from tunix.rl.ppo import ppo_learner
except ImportError as missing:
    raise Unsupported(
        f"Tunix is not importable here ({missing}); pip install --no-deps google-tunix==0.1.7 and what it imports, "
        "or name an environment that has it: --python ENV/bin/python"
    ) from None

NAME = "tunix"
VERSION = metadata.version("google-tunix")
KNOWN_VERSIONS = ["0.1.7"]
ARRAYS = "jax"
MASK = "int"
_LEARNER = "tunix.rl.ppo.ppo_learner:PPOLearner._generate_and_compute_advantage"
SOURCES = {
    "token_logprobs": ["tunix.rl.common:compute_per_token_logps", "tunix.rl.common:selective_log_softmax"],
    "entropy": "tunix.rl.algo_core:compute_entropy_from_logits",
    "policy_loss": "tunix.rl.algo_core:ppo_policy_loss_fn",
    "value_loss": "tunix.rl.algo_core:ppo_value_loss_fn",
    "kl_penalty": "tunix.rl.common:compute_kl_divergence",
    "shaped_rewards": [_LEARNER, "tunix.rl.common:compute_kl_divergence"],
    "gae": "tunix.rl.algo_core:compute_gae_advantages",
    "whiten": "tunix.rl.algo_core:masked_whiten",
    "experience": [_LEARNER, "tunix.rl.common:compute_kl_divergence"],
    "aggregate": "tunix.rl.common:aggregate_loss",
}

numpy = jax.numpy
PROMPT = 2  # prompt tokens in front of every response
PAD, EOS, TEXT = 0, 1, 2  # token ids, all that the cluster knows
_AGGREGATIONS = {
    "token_mean": "token-mean",
    "seq_mean_token_mean": "sequence-mean-token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_sum_norm": "sequence-mean-token-scale",
}
_ESTIMATORS = {"k1": "kl", "k2": "mse_kl", "k3": "low_var_kl"}


class _Model(nnx.Module):
    """A language model that answers with given logits."""

    def __init__(self, logits):
        self.logits = nnx.Param(logits)

    def __call__(self, tokens, positions, cache, attention_mask):
        return self.logits[...], None


def token_logprobs(logits, tokens, *, temperature):
    graph, state = nnx.split(_Model(logits))
    return common.compute_per_token_logps(
        graph, state, tokens[:, :1], tokens[:, 1:], pad_id=-1, eos_id=-1, temperature=temperature
    )


def entropy(logits, *, temperature):
    if temperature != 1:
        raise Unsupported("Tunix divides the logits by the temperature before it calls this function")
    return algo_core.compute_entropy_from_logits(logits)


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip=None):
    config = ppo_learner.PPOConfig(epsilon_low=clip_low, epsilon_high=clip_high, epsilon_c=dual_clip)
    example = _example(mask, advantages=advantages, old_per_token_logps=old_logprobs)

    def loss(given):
        with mock.patch.object(common, "compute_per_token_logps", lambda *_, **__: (given, None)):
            return algo_core.ppo_policy_loss_fn(nnx.Module(), example, config, PAD, EOS)

    (value, found), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs)
    return {"loss": value, "clip_fraction": found["pg_clipfrac"], "grad_logprobs": gradient}


def value_loss(values, old_values, returns, mask, *, clip):
    example = _example(mask, old_values=old_values, returns=returns)

    def loss(given):
        full = window.embed(numpy, given, PROMPT - 1, 1)
        with mock.patch.object(common, "compute_score", lambda *_, **__: full):
            return algo_core.ppo_value_loss_fn(nnx.Module(), example, clip, PAD, EOS)

    (value, found), gradient = jax.value_and_grad(loss, has_aux=True)(values)
    return {"loss": value, "clip_fraction": found["vf_clipfrac"], "grad_values": gradient}


def kl_penalty(logprobs, ref_logprobs, *, estimator, clamp):
    return common.compute_kl_divergence(
        logprobs, ref_logprobs, _method(estimator), clamp_value=None if clamp == "none" else float(clamp)
    )


def shaped_rewards(logprobs, ref_logprobs, scores, mask, *, kl_coef, estimator):
    values = numpy.zeros_like(logprobs)
    return _learn(logprobs, ref_logprobs, values, scores, mask, beta=kl_coef, kl_method=_method(estimator))["rewards"]


def gae(rewards, values, mask, *, gamma, lam):
    advantages, returns = algo_core.compute_gae_advantages(rewards, values, mask, gamma, lam)
    return {"advantages": advantages, "returns": returns}


def whiten(x, mask):
    return algo_core.masked_whiten(x, mask)


def experience(logprobs, ref_logprobs, values, scores, mask, *, kl_coef, gamma, lam, estimator):
    settings = {"beta": kl_coef, "gamma": gamma, "gae_lambda": lam, "kl_method": _method(estimator)}
    return _learn(logprobs, ref_logprobs, values, scores, mask, **settings)


def aggregate(x, mask, *, horizon, aggregation):
    if aggregation not in _AGGREGATIONS:
        raise Unsupported("Tunix has no sum over all tokens and no mean that reads no mask")
    return common.aggregate_loss(x, mask, _AGGREGATIONS[aggregation], norm=horizon)


def _method(estimator: str) -> str:
    if estimator not in _ESTIMATORS:
        raise Unsupported("Tunix has no absolute value of the KL")
    return _ESTIMATORS[estimator]


def _example(mask, **given):
    """A batch as the loss functions take it."""
    tokens = numpy.where(mask == 1, TEXT, PAD)
    prompt = numpy.full((len(mask), PROMPT), TEXT)
    return SimpleNamespace(prompt_ids=prompt, completion_ids=tokens, completion_mask=mask, **given)


class _Stop(BaseException):
    """Leaves the learner once its frame has been read."""


def _learn(logprobs, ref_logprobs, values, scores, mask, **settings) -> dict:
    """Rewards, advantages and returns of the learner for one batch of responses."""
    if bool((numpy.diff(mask, axis=1) > 0).any()) or not bool(mask[:, 0].all()):
        raise Unsupported("the learner knows right-padded responses with at least one token only")
    width = mask.shape[1]
    tokens = host.where(host.asarray(mask) == 1, TEXT, PAD)
    last = numpy.arange(width) == mask.sum(1, keepdims=True) - 1
    token_scores = numpy.where(last, scores[:, None], window.POISON).astype(scores.dtype)
    seen: dict = {}

    def read(*_, **__):
        local = sys._getframe(1).f_locals
        seen.update({name: local[name] for name in ("rewards", "advantages", "returns")})
        raise _Stop

    output = SimpleNamespace(tokens=list(tokens), left_padded_prompt_tokens=host.full((len(mask), PROMPT), TEXT), text=[])
    learner = object.__new__(ppo_learner.PPOLearner)
    vars(learner).update(
        rl_cluster=SimpleNamespace(
            cluster_config=SimpleNamespace(rollout_config=SimpleNamespace(max_tokens_to_generate=width)),
            rollout=SimpleNamespace(pad_id=lambda: PAD, eos_id=lambda: EOS),
            generate=lambda **_: output,
            get_ref_per_token_logps=lambda **_: ref_logprobs,
            get_old_per_token_logps=lambda **_: logprobs,
            get_values=lambda **_: window.embed(numpy, values, PROMPT - 1, 1),
            get_rewards=lambda **_: window.embed(numpy, token_scores, PROMPT, 0),
            buffer_metrics=read,
        ),
        algo_config=ppo_learner.PPOConfig(**settings),
        _use_reward_model=True,
        _rollout_micro_batch_size=None,
        _compute_logps_micro_batch_size=None,
    )
    try:
        learner._generate_and_compute_advantage({"prompts": []})
    except _Stop:
        return seen
    raise Unsupported(f"the learner of Tunix {VERSION} reports no metrics; this adapter does not know its shape")
