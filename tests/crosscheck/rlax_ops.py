"""rlax's clipped surrogate and advantages, as an adapter.

The built-in adapter (`goldenppo check rlax`) makes importance ratios by rlax too, from the logits of two actions, which rounds
more often than a ratio does; here only the loss is rlax's, so that what it uses of the tolerance can be held to a half.
"""

import warnings

import jax
import jax.numpy as jnp

from goldenppo.adapters.rlax import VERSION, gae

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import rlax

NAME = "rlax"
ARRAYS = "jax"
__all__ = ["ARRAYS", "NAME", "VERSION", "gae", "policy_loss"]


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip):
    old, gains = old_logprobs[mask], advantages[mask]
    loss = lambda new: rlax.clipped_surrogate_pg_loss(jnp.exp(new - old), gains, clip)  # noqa: E731
    value, slope = jax.jit(jax.value_and_grad(loss))(logprobs[mask])
    return {"loss": value, "grad_logprobs": jnp.zeros(mask.shape, slope.dtype).at[mask].set(slope)}
