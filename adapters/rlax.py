"""rlax: its own functions, in JAX; gradients are those of jax.grad.

There are no masks here: a function takes one sequence, and an episode ends in it where the discount is 0. So the tokens
that count become such a sequence, row behind row. Functions that begin with logits get those of a policy with two actions,
whose first has the log-prob of the case.
"""

import warnings
from importlib import metadata

from goldenppo.adapters import Unsupported, window

try:
    import jax

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import rlax
except ImportError as missing:
    raise Unsupported(
        f"rlax is not importable here ({missing}); pip install rlax==0.1.9, "
        "or name an environment that has it: --python ENV/bin/python"
    ) from None

NAME = "rlax"
VERSION = metadata.version("rlax")
KNOWN_VERSIONS = ["0.1.9"]
ARRAYS = "jax"
SOURCES = {
    "token_logprobs": "rlax:softmax",
    "entropy": "rlax:softmax",
    "ratio": "rlax:categorical_importance_sampling_ratios",
    "policy_loss": ["rlax:categorical_importance_sampling_ratios", "rlax:clipped_surrogate_pg_loss"],
    "gae": ["rlax:truncated_generalized_advantage_estimation", "rlax:lambda_returns"],
}

numpy = jax.numpy


def token_logprobs(logits, tokens, *, temperature):
    return rlax.softmax(temperature).logprob(tokens[:, 1:], logits[:, :-1])


def entropy(logits, *, temperature):
    return rlax.softmax(temperature).entropy(logits)


def ratio(logprobs, old_logprobs, mask):
    return _in_place(_ratios(logprobs[mask], old_logprobs[mask]), mask)


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip):
    old, gains = old_logprobs[mask], advantages[mask]

    def loss(new):
        return rlax.clipped_surrogate_pg_loss(_ratios(new, old), gains, clip)

    # Compiled as one program, as its users do; one by one, the operations take three times as long to compile.
    value, gradient = jax.jit(jax.value_and_grad(loss))(logprobs[mask])
    return {"loss": value, "grad_logprobs": _in_place(gradient, mask)}


def gae(rewards, values, mask, *, gamma, lam):
    count = mask.cumsum(1)
    if bool((mask[:, 1:] & ~mask[:, :-1] & (count[:, :-1] > 0)).any()):
        raise Unsupported("an episode has no gaps: its steps follow each other")
    last = mask & (count == count[:, -1:])
    discounts = numpy.where(last, 0.0, gamma).astype(values.dtype)[mask]
    stream = numpy.append(values[mask], numpy.asarray(window.POISON, values.dtype))  # after the end, whatever it is
    advantages = rlax.truncated_generalized_advantage_estimation(rewards[mask], discounts, lam, stream)
    returns = rlax.lambda_returns(rewards[mask], discounts, stream[1:], lam)
    return {"advantages": _in_place(advantages, mask), "returns": _in_place(returns, mask)}


def _ratios(logprobs, old_logprobs):
    first = numpy.zeros(logprobs.shape, int)
    return rlax.categorical_importance_sampling_ratios(_two_actions(logprobs), _two_actions(old_logprobs), first)


def _two_actions(logprobs):
    """[N, 2] logits whose softmax gives the first action the log-prob asked for."""
    return numpy.stack([logprobs, numpy.log(-numpy.expm1(logprobs))], -1)


def _in_place(stream, mask):
    """[B, T]: the stream's numbers where the mask counts, 0 elsewhere."""
    return numpy.zeros(mask.shape, stream.dtype).at[mask].set(stream)
