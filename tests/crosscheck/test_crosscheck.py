"""Implementations that nobody here wrote agree with the answers and with the reference; correct code stays clear of the law.

polgrad, rlax and optax check the oracle, whose answers the fixtures are, and the reference on random inputs. JAX and numpy
implementations written for this purpose show how much of the tolerance correct code uses in every dtype.
`tox -e crosscheck` has the packages; elsewhere what is missing is skipped.
"""

import functools
import importlib.util
import math
import random
from pathlib import Path

import pytest

from goldenppo.adapters.loader import load as load_adapter
from goldenppo.adapters.session import Session
from goldenppo.conformance import targets
from goldenppo.conformance.cases import load, table
from goldenppo.conformance.judge import judge
from goldenppo.conformance.run import attempts

HERE = Path(__file__).resolve().parent
DTYPES = ("float64", "float32", "float16", "bfloat16")
FULL = ("float64", "float32")

# name → what it needs, the ops that it has, the dtypes that it computes in
IMPLEMENTATIONS = {
    "polgrad": ("polgrad", "policy_loss value_loss kl_penalty gae whiten aggregate", FULL),
    "rlax": ("rlax", "policy_loss gae", FULL),
    "optax": ("optax", "token_logprobs entropy value_loss reward_model_loss dpo_loss", DTYPES),
    "jax": (
        "jax",
        "token_logprobs entropy ratio policy_loss value_loss kl_penalty shaped_rewards gae whiten aggregate reward_model_loss "
        "end_score dpo_loss",
        DTYPES,
    ),
}
SUMMING = [
    "token_logprobs",
    "entropy",
    "policy_loss",
    "value_loss",
    "gae",
    "whiten",
    "aggregate",
    "reward_model_loss",
    "dpo_loss",
]
ALL = [(name, op) for name, (_, ops, _) in IMPLEMENTATIONS.items() for op in ops.split()]


@functools.cache
def session(name: str) -> Session:
    """The implementation as an adapter: a file here, or the adapter that goldenppo has."""
    if importlib.util.find_spec(IMPLEMENTATIONS[name][0]) is None:
        pytest.skip(f"{IMPLEMENTATIONS[name][0]} is not installed; `tox -e crosscheck` has it")
    path = HERE / f"{name}_ops.py"
    return Session(load_adapter(str(path) if path.exists() else name), table(), name=name)


def must(op: str) -> list:
    """The cases that decide."""
    return [case for case in load(op) if case.level == "must"]


def examine(tested: Session, op: str, dtypes: tuple[str, ...]):
    """The verdict on an op, and the worst share of the tolerance at each dtype, infinite where no case passed."""
    report = judge(op, list(attempts(tested, op, tested.hello()["ops"][op], must(op), dtypes, "cpu")), "must")
    passed = [verdict for verdict in report.cases if verdict.verdict == "pass"]
    return report, {dtype: max((v.use for v in passed if v.dtype == dtype), default=math.inf) for dtype in dtypes}


@pytest.mark.parametrize(("name", "op"), ALL, ids=[f"{name}-{op}" for name, op in ALL])
def test_an_implementation_agrees_with_the_answers_with_a_factor_of_two_to_spare(name, op, evidence):
    report, worst = examine(session(name), op, IMPLEMENTATIONS[name][2])
    evidence.update({(name, op, dtype): share for dtype, share in worst.items()})

    assert report.verdict == "conforms", [(v.case.id, v.dtype, v.use, v.reason) for v in report.failed]
    assert max(worst.values()) < 0.5, worst


@pytest.mark.parametrize("order", ["sequential", "pairwise", "shuffled", "vectorised"])
@pytest.mark.parametrize("op", SUMMING)
def test_the_order_of_summation_does_not_matter(order, op, evidence, monkeypatch):
    module = load_adapter(str(HERE / "numpy_ops.py"))
    monkeypatch.setattr(module, "add", module.SUMS[order])

    report, worst = examine(Session(module, table(), name="numpy"), op, ("float64", "float32", "float16"))
    evidence.update({(f"numpy, {order}", op, dtype): share for dtype, share in worst.items()})

    assert report.verdict == "conforms", [(v.case.id, v.dtype, v.use, v.reason) for v in report.failed]
    assert max(worst.values()) < 0.5, worst


PARAMETERS = {
    "temperature": 0.7,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "clip": 0.25,
    "horizon": 40,
    "kl_coef": 0.3,
    "score_clip": 1.5,
    "gamma": 0.97,
    "lam": 0.9,
    "beta": 0.4,
    "label_smoothing": 0.1,
}


def drawn(op: str, seed: int) -> dict:
    """A request with random inputs: ragged rows, numbers of every sign, parameters that a trainer would have."""
    rng, spec = random.Random(f"{op} {seed}"), table()["ops"][op]
    sizes = {"B": rng.randint(1, 5), "T": rng.randint(2, 9), "L": rng.randint(3, 9), "V": rng.randint(2, 11)}
    ends = [rng.randint(1, sizes["T"]) for _ in range(sizes["B"])]

    def grid(shape, make, place=()):
        return [grid(shape[1:], make, (*place, i)) for i in range(sizes[shape[0]])] if shape else make(place)

    def number(about, name):
        if about.get("kind") == "bool":
            ends_here = ends if about["shape"][-1] == "T" else [rng.randint(1, sizes["L"]) for _ in ends]
            return lambda place: place[1] < ends_here[place[0]]
        if about.get("kind") == "int":
            return lambda place: rng.randrange(sizes["V"])
        return lambda place: -rng.expovariate(1.0) if name.endswith("logprobs") else rng.gauss(0.0, 1.0)

    inputs = {name: grid(about["shape"], number(about, name)) for name, about in spec["inputs"].items()}
    for name in ("old_logprobs", "ref_logprobs", "old_values"):  # near the new ones, so that some are clipped and some not
        new = {"old_values": "values"}.get(name, "logprobs")
        if name in inputs:
            inputs[name] = [[x + rng.uniform(-0.5, 0.5) for x in row] for row in inputs[new]]
    return {
        "op": op,
        "inputs": inputs,
        "params": {name: PARAMETERS[name] for name in spec["params"] if name in PARAMETERS},
        "axes": {},
        "dtype": "float64",
        "device": "cpu",
        "gradients": [name for about in spec["outputs"].values() for name in about.get("gradients", [])],
        "constants": [],
    }


OTHERS = [(name, op) for name, op in ALL if name != "jax"]


@pytest.mark.parametrize(("name", "op"), OTHERS, ids=[f"{name}-{op}" for name, op in OTHERS])
def test_the_reference_agrees_on_random_inputs(name, op):
    tested, ours = session(name), targets.open_adapter("reference")
    offered = tested.hello()["ops"][op]["axes"]
    axes = {axis: table()["axes"][axis] for axis in offered}
    compared = 0
    for seed in range(12):
        request = drawn(op, seed)
        request["axes"] = {axis: values[seed % len(values)] for axis, values in axes.items()}
        if name == "optax":
            request["params"].pop("clip", None)
        theirs = tested.call(request)
        assert "error" not in theirs, theirs
        if "unsupported" in theirs:
            continue
        right = ours.call(request)["result"]
        for part in ("outputs", "gradients"):
            for output, got in theirs["result"][part].items():
                want = right[part][output]
                assert got["shape"] == want["shape"]
                largest = max(map(abs, want["data"]), default=0.0)
                worst = max((abs(a - b) for a, b in zip(got["data"], want["data"], strict=True)), default=0.0)
                assert worst <= 1e-12 * largest, (seed, output, worst, largest)
                compared += 1
    assert compared >= 8


def test_a_mistake_would_be_seen(monkeypatch):
    """The comparison itself: a mean that counts one token too many fails at every dtype."""
    module = load_adapter(str(HERE / "numpy_ops.py"))
    monkeypatch.setattr(module, "aggregate", lambda x, mask: x[mask].sum() / (mask.sum() + x.dtype.type(1)))

    report, _ = examine(Session(module, table(), name="numpy"), "aggregate", ("float32", "float16"))

    assert {verdict.dtype for verdict in report.failed} == {"float32", "float16"}
