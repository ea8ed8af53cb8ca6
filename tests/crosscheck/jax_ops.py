"""The ops once more, in JAX, each compiled as one program; gradients are those of jax.grad.

Written for the tolerance law's evidence: XLA fuses and reorders what torch does one operation after the other.
"""

import inspect

import jax
import jax.numpy as jnp

NAME = "jax"
VERSION = jax.__version__
ARRAYS = "jax"


AXES = ("aggregation", "estimator", "factor", "form", "gaps", "mean", "variance")


def compiled(function):
    """The function as one program; axes are known when it is compiled."""
    return jax.jit(function, static_argnames=[name for name in inspect.signature(function).parameters if name in AXES])


def reduced(x, mask, aggregation, horizon):
    """The mean over tokens, the sum, or a mean over the rows that have tokens."""
    if aggregation == "plain_mean":
        return x.mean()
    x = jnp.where(mask, x, 0)
    if aggregation in ("token_mean", "token_sum"):
        return x.sum() / (mask.sum() if aggregation == "token_mean" else 1)
    lengths = {"seq_mean_token_mean": jnp.maximum(mask.sum(1), 1), "seq_mean_token_sum": 1, "seq_mean_token_sum_norm": horizon}
    return (x.sum(1) / lengths[aggregation]).sum() / mask.any(1).sum()


@compiled
def token_logprobs(logits, tokens, *, temperature):
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1] / temperature), tokens[:, 1:, None], -1)[..., 0]


@compiled
def entropy(logits, *, temperature):
    z = logits / temperature
    return -(jax.nn.softmax(z) * jax.nn.log_softmax(z)).sum(-1)


@compiled
def ratio(logprobs, old_logprobs, mask):
    return jnp.where(mask, jnp.exp(jnp.where(mask, logprobs - old_logprobs, 0)), 0)


@compiled
def policy_loss(
    logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip=None, horizon=None, aggregation="token_mean"
):
    def loss(logprobs):
        r = jnp.exp(jnp.where(mask, logprobs - old_logprobs, 0))
        term = -jnp.minimum(r * advantages, jnp.clip(r, 1 - clip_low, 1 + clip_high) * advantages)
        if dual_clip is not None:
            term = jnp.where(advantages < 0, jnp.minimum(term, -dual_clip * advantages), term)
        return reduced(term, mask, aggregation, horizon)

    value, slope = jax.value_and_grad(loss)(logprobs)
    return {"loss": value, "grad_logprobs": slope}


@compiled
def value_loss(values, old_values, returns, mask, *, clip=None, factor, form):
    def loss(values):
        v, o, R = (jnp.where(mask, x, 0) for x in (values, old_values, returns))
        error = (v - R) ** 2
        if clip is not None and form == "clamped_error":
            error = jnp.minimum(error, clip)
        elif clip is not None:
            clipped = (jnp.clip(v, o - clip, o + clip) - R) ** 2
            error = jnp.maximum(error, clipped) if form == "max" else clipped
        return jnp.mean(error, where=mask) * (0.5 if factor == "half" else 1)

    value, slope = jax.value_and_grad(loss)(values)
    return {"loss": value, "grad_values": slope}


@compiled
def kl_penalty(logprobs, ref_logprobs, *, estimator):
    x = logprobs - ref_logprobs
    return {"k1": x, "abs": jnp.abs(x), "k2": x * x / 2, "k3": jnp.expm1(-x) + x}[estimator]


@compiled
def shaped_rewards(logprobs, ref_logprobs, scores, mask, *, kl_coef, score_clip=None):
    scores = scores if score_clip is None else jnp.clip(scores, -score_clip, score_clip)
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdims=True))
    return jnp.where(mask, -kl_coef * (logprobs - ref_logprobs), 0) + jnp.where(last, scores[:, None], 0)


@compiled
def gae(rewards, values, mask, *, gamma, lam, gaps):
    """A scan from the right over columns."""

    def step(carry, column):
        following, running = carry
        reward, value, counts = column
        now = reward + gamma * following - value + gamma * lam * running
        kept = jnp.where(counts, now, 0)
        if gaps == "skip":
            return (jnp.where(counts, value, following), jnp.where(counts, now, running)), kept
        return (value, now if gaps == "zero" else kept), kept

    r, v = jnp.where(mask, rewards, 0), jnp.where(mask, values, 0)
    start = (jnp.zeros_like(r[:, 0]), jnp.zeros_like(r[:, 0]))
    advantages = jax.lax.scan(step, start, (r.T, v.T, mask.T), reverse=True)[1].T
    return {"advantages": advantages, "returns": jnp.where(mask, advantages + v, 0)}


@compiled
def whiten(x, mask, *, variance, mean):
    mu = jnp.mean(x, where=mask)
    scaled = (x - mu) * jax.lax.rsqrt(jnp.var(x, where=mask, ddof=1 if variance == "unbiased" else 0) + 1e-8)
    return jnp.where(mask, scaled if mean == "removed" else scaled + mu, 0)


@compiled
def aggregate(x, mask, *, horizon=None, aggregation):
    return reduced(x, mask, aggregation, horizon)


@compiled
def reward_model_loss(chosen, rejected, *, margin=None):
    def loss(chosen, rejected):
        return jax.nn.softplus(rejected - chosen + (0 if margin is None else margin)).mean()

    value, slopes = jax.value_and_grad(loss, (0, 1))(chosen, rejected)
    return {"loss": value, "grad_chosen": slopes[0], "grad_rejected": slopes[1]}


@compiled
def end_score(token_scores, attention_mask):
    last = attention_mask.shape[1] - 1 - jnp.argmax(attention_mask[:, ::-1], 1)
    return jnp.take_along_axis(token_scores, last[:, None], 1)[:, 0]


@compiled
def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta, label_smoothing=0.0):
    def loss(chosen, rejected):
        ahead = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
        return ((1 - label_smoothing) * jax.nn.softplus(-ahead) + label_smoothing * jax.nn.softplus(ahead)).mean()

    value, slopes = jax.value_and_grad(loss, (0, 1))(policy_chosen, policy_rejected)
    return {"loss": value, "grad_policy_chosen": slopes[0], "grad_policy_rejected": slopes[1]}
