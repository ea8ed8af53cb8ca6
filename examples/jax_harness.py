"""A harness in JAX: goldenppo check "cmd: ENV/bin/python examples/jax_harness.py"; ENV needs JAX, and nothing of goldenppo.

Reads one JSON message a line on stdin, writes one answer a line on stdout (docs/process.md). Replace the functions below by
calls of your own code; gradients come from jax.grad.
"""

import json
import sys

import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)
sys.stdout, channel = sys.stderr, sys.stdout  # whatever prints from here on does not disturb the protocol


class Unsupported(Exception):
    """A combination that is not offered."""


def masked_mean(x, mask):
    return jnp.where(mask, x, 0).sum() / mask.sum()


def policy_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip):
    if dual_clip is not None:
        raise Unsupported("takes no dual_clip")
    ratio = jnp.exp(jnp.where(mask, logprobs - old_logprobs, 0))
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)
    return {"loss": -masked_mean(gain, mask)}


def value_loss(values, old_values, returns, mask, clip):
    values, old_values, returns = (jnp.where(mask, x, 0) for x in (values, old_values, returns))
    error = (values - returns) ** 2
    if clip is not None:
        error = jnp.maximum(error, (jnp.clip(values, old_values - clip, old_values + clip) - returns) ** 2)
    return {"loss": 0.5 * masked_mean(error, mask)}


def kl_penalty(logprobs, ref_logprobs):
    return {"kl": logprobs - ref_logprobs}


def gae(rewards, values, mask, gamma, lam):
    def step(carry, x):
        next_value, advantage = carry
        reward, value, counts = x
        now = reward + gamma * next_value - value + gamma * lam * advantage
        carry = jnp.where(counts, value, next_value), jnp.where(counts, now, advantage)
        return carry, jnp.where(counts, now, 0)

    columns = tuple(jnp.moveaxis(x, 1, 0) for x in (jnp.where(mask, rewards, 0), jnp.where(mask, values, 0), mask))
    start = (jnp.zeros(rewards.shape[0], rewards.dtype),) * 2
    advantages = jnp.moveaxis(jax.lax.scan(step, start, columns, reverse=True)[1], 0, 1)
    return {"advantages": advantages, "returns": jnp.where(mask, advantages + values, 0)}


def reward_model_loss(chosen, rejected, margin):
    return {"loss": jax.nn.softplus(rejected - chosen + (0 if margin is None else margin)).mean()}


OPS = {
    "policy_loss": (policy_loss, ["clip_low", "clip_high", "dual_clip"]),
    "value_loss": (value_loss, ["clip"]),
    "kl_penalty": (kl_penalty, []),
    "gae": (gae, ["gamma", "lam"]),
    "reward_model_loss": (reward_model_loss, ["margin"]),
}


def read(nested, dtype):
    """An array from nested lists; "nan", "inf" and "-inf" become numbers."""
    flat = json.dumps(nested).replace('"nan"', "NaN").replace('"inf"', "Infinity").replace('"-inf"', "-Infinity")
    array = jnp.array(json.loads(flat))
    return array if array.dtype == bool else array.astype(dtype)


def write(array):
    """An array as {"dtype", "shape", "data"}, numbers that are not finite as words."""
    data = [x if x - x == 0 else str(x) for x in array.astype("float64").reshape(-1).tolist()]
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def run(request):
    """One case: the outputs, and the gradient of the first one with respect to each input that is asked for."""
    function, names = OPS[request["op"]]
    arrays = {name: read(value, request["dtype"]) for name, value in request["inputs"].items()}
    given = {name: request["params"].get(name) for name in names}
    given = {name: read(value, request["dtype"]) if isinstance(value, list) else value for name, value in given.items()}
    outputs = function(*arrays.values(), **given)
    gradients = {}
    for name in request["gradients"]:
        loss = lambda x, name=name: next(iter(function(*(arrays | {name: x}).values(), **given).values()))  # noqa: E731
        gradients[name] = write(jax.grad(loss)(arrays[name]))
    return {"outputs": {name: write(value) for name, value in outputs.items()}, "gradients": gradients}


def answer(request):
    if request["cmd"] == "hello":
        return {"hello": {"name": "jax-harness", "version": jax.__version__, "ops": {op: {} for op in OPS}}}
    try:
        return {"result": run(request)}
    except Unsupported as reason:
        return {"unsupported": str(reason)}
    except Exception as problem:
        return {"error": {"type": type(problem).__name__, "message": str(problem), "traceback": ""}}


for line in sys.stdin:
    request = json.loads(line)
    if request["cmd"] == "stop":
        break
    print(json.dumps({"seq": request["seq"], **answer(request)}), file=channel, flush=True)
