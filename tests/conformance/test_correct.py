"""Correct implementations, written differently, pass at `must` with a factor of two to spare."""

import types

import numpy as np
import pytest

from goldenppo.adapters.session import Session
from goldenppo.conformance.cases import load, table
from goldenppo.conformance.commands.doctor import planted
from goldenppo.conformance.correct import IMPLEMENTATIONS
from goldenppo.conformance.judge import judge
from goldenppo.conformance.run import attempts


def must(op):
    return [case for case in load(op) if case.level == "must"]


@pytest.mark.parametrize(("label", "op", "function"), IMPLEMENTATIONS, ids=[f"{op}: {label}" for label, op, _ in IMPLEMENTATIONS])
def test_a_correct_implementation_passes_and_uses_less_than_half_of_the_tolerance(label, op, function):
    # at float16 the poison of masked slots overflows in an exponential, so what multiplies by the mask is wrong there
    dtypes = (
        ("float64", "float32", "bfloat16") if label == "multiplies by the mask" else ("float64", "float32", "float16", "bfloat16")
    )

    report = judge(op, planted(op, function, must(op), dtypes=dtypes), "must")

    assert report.verdict == "conforms", [(v.case.id, v.dtype, v.use) for v in report.failed]
    assert max(v.use for v in report.cases if v.verdict == "pass") < 0.5


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high):
    """numpy, one token after the other, in the dtype of the inputs."""
    one = logprobs.dtype.type(1)
    total, grads, count = logprobs.dtype.type(0), np.zeros_like(logprobs), 0
    for place in zip(*np.nonzero(mask), strict=True):
        r, A = np.exp(logprobs[place] - old_logprobs[place]), advantages[place]
        plain, clipped = -A * r, -A * min(max(r, one - logprobs.dtype.type(clip_low)), one + logprobs.dtype.type(clip_high))
        total += max(plain, clipped)
        grads[place] = plain if plain >= clipped else 0
        count += 1
    n = logprobs.dtype.type(count)
    return {"loss": total / n, "grad_logprobs": grads / n}


def gae(rewards, values, mask, *, gamma, lam):
    """numpy, forwards: every pair of positions once."""
    advantages = np.zeros_like(rewards)
    for row in range(len(mask)):
        keep = np.flatnonzero(mask[row])
        v = np.append(values[row, keep], 0).astype(rewards.dtype)
        delta = rewards[row, keep] + rewards.dtype.type(gamma) * v[1:] - v[:-1]
        for i, t in enumerate(keep):
            powers = (rewards.dtype.type(gamma * lam) ** np.arange(len(keep) - i)).astype(rewards.dtype)
            advantages[row, t] = (powers[::-1] * delta[i:][::-1]).sum()
    return {"advantages": advantages, "returns": advantages + np.where(mask, values, 0)}


def reward_model_loss(chosen, rejected, *, margin=None):
    """numpy.logaddexp."""
    d = chosen - rejected - (0 if margin is None else margin)
    share = 1 / (1 + np.exp(d))
    return {"loss": np.logaddexp(0, -d).mean(), "grad_chosen": -share / d.size, "grad_rejected": share / d.size}


@pytest.mark.parametrize("function", [policy_loss, gae, reward_model_loss], ids=lambda function: function.__name__)
def test_a_numpy_implementation_passes(function):
    op = function.__name__
    module = types.ModuleType("numpy_trainer")
    setattr(module, op, function)
    module.ARRAYS = "numpy"
    session = Session(module, {"ops": {op: table()["ops"][op]}, "axes": table()["axes"]})

    report = judge(op, list(attempts(session, op, session.hello()["ops"][op], must(op), ("float64", "float32"), "cpu")), "must")

    assert report.verdict == "conforms", [(v.case.id, v.dtype, v.use, v.reason) for v in report.failed]
    assert max(v.use for v in report.cases if v.verdict == "pass") < 0.5


@pytest.mark.parametrize("op", list(table()["ops"]))
def test_every_deviation_lies_ten_tolerances_off_in_a_case_at_float32(op):
    """So that catching one is never a matter of the last digit (those that act above float32's sight aside)."""
    from goldenppo.conformance.cases import LEVELS, read_yaml
    from goldenppo.conformance.commands.doctor import conventions
    from goldenppo.reference.deviations import deviations

    catalogue = read_yaml("deviations.yaml")["deviations"]
    for identifier, function in deviations(op).items():
        level = catalogue[identifier]["level"]
        cases = [case for case in load(op) if LEVELS.index(case.level) <= LEVELS.index(level)]
        furthest = 0.0
        for axes in conventions(op):
            report = judge(op, planted(op, function, cases, axes), level)
            uses = [float("inf") if v.verdict == "error" or v.reason else v.use for v in report.failed if v.dtype == "float32"]
            furthest = max([furthest, *uses])
            if furthest >= 10:
                break
        assert furthest >= 10, (identifier, furthest)
