"""optax's losses where they are one of the ops, as an adapter; gradients are those of jax.grad."""

import functools

import jax
import jax.numpy as jnp
import optax

from goldenppo.adapters import Unsupported

NAME = "optax"
VERSION = optax.__version__
ARRAYS = "jax"


@jax.jit
def token_logprobs(logits, tokens, *, temperature):
    return -optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1] / temperature, tokens[:, 1:])


@jax.jit
def entropy(logits, *, temperature):
    z = logits / temperature
    return optax.softmax_cross_entropy(z, jax.nn.softmax(z))


@functools.partial(jax.jit, static_argnames="factor")
def _value_loss(values, returns, mask, factor):
    loss = optax.l2_loss if factor == "half" else optax.squared_error
    mean = lambda v: jnp.where(mask, loss(v, returns), 0).sum() / mask.sum()  # noqa: E731
    return jax.value_and_grad(mean)(values)


def value_loss(values, old_values, returns, mask, *, clip=None, factor):
    if clip is not None:
        raise Unsupported("clips no value")
    loss, slope = _value_loss(values, returns, mask, factor)
    return {"loss": loss, "grad_values": slope}


@jax.jit
def reward_model_loss(chosen, rejected, *, margin=None):
    def loss(chosen, rejected):
        ahead = chosen - rejected - (0 if margin is None else margin)
        return optax.sigmoid_binary_cross_entropy(ahead, jnp.ones_like(ahead)).mean()

    value, slopes = jax.value_and_grad(loss, (0, 1))(chosen, rejected)
    return {"loss": value, "grad_chosen": slopes[0], "grad_rejected": slopes[1]}


@jax.jit
def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta, label_smoothing=0.0):
    def loss(chosen, rejected):
        ahead = beta * ((chosen - rejected) - (ref_chosen - ref_rejected))
        return optax.sigmoid_binary_cross_entropy(ahead, jnp.full_like(ahead, 1 - label_smoothing)).mean()

    value, slopes = jax.value_and_grad(loss, (0, 1))(policy_chosen, policy_rejected)
    return {"loss": value, "grad_policy_chosen": slopes[0], "grad_policy_rejected": slopes[1]}
