"""The running bound of tensors beside the exact oracle's, on the fixtures."""

import math

import pytest
import torch

import goldenppo.reference as reference
from goldenppo.conformance.audit.tracked import Tracked, parameter, tracked, tracked_gae
from goldenppo.conformance.cases import load, table
from goldenppo.reference import gae

OPS = [op for op in table()["ops"] if op not in ("kl_controller", "end_score")]  # neither ever runs on tracked tensors
KINDS = {"bool": torch.bool, "int": torch.int64}


def made(op, case, axes):
    """Every output of the reference on a case, tracked."""
    spec = table()["ops"][op]

    def tensor(value, about):
        return torch.tensor(value, dtype=KINDS[about["kind"]]) if about.get("kind") else Tracked(torch.tensor(value).double())

    inputs = [tensor(case.inputs[name], about) for name, about in spec["inputs"].items()]
    params = {}
    for name, about in spec["params"].items():
        value = case.params.get(name)
        if value is not None:
            scalar = value if about.get("kind") == "int" else parameter(value) if "shape" not in about else None
            params[name] = tensor(value, about) if scalar is None else scalar
    raw = getattr(reference, op)(*inputs, **params, **axes)
    return raw._asdict() if hasattr(raw, "_asdict") else {next(iter(spec["outputs"])): raw}


@pytest.mark.parametrize("op", OPS)
def test_values_are_exact_and_gauges_near_those_of_the_oracle(op):
    ratios, compared = [], 0
    for case in load(op):
        for output, entries in case.answers.items():
            if case.level == "robust" or output == "clip_fraction":  # a count: losses.py bounds it by other means
                continue
            for entry in entries:
                axes = {axis: values[0] for axis, values in entry.when.items()}
                found = tracked(made(op, case, axes)[output])
                block = entry.block
                numbers = zip(
                    found.value.flatten().tolist(), found.gauge.flatten().tolist(), block.want, block.gauge, strict=True
                )
                for value, gauge, want, oracle in numbers:
                    if want is None or not math.isfinite(want):
                        continue
                    compared += 1
                    assert abs(value - want) <= 2.0**-53 * (4 * oracle + abs(want)), (case.id, output, axes)
                    if oracle > 0 and abs(want) > 0:
                        ratios.append(gauge / oracle)

    assert compared > 0
    # The oracle takes the widest of all forms that trainers write; four of its units cover the difference below.
    assert all(ratio >= 0.25 for ratio in ratios if ratio), min(ratios)
    assert max(ratios) <= 8, max(ratios)


@pytest.mark.parametrize("gaps", ["skip", "zero", "cut"])
def test_two_plain_recursions_bound_as_one_over_tracked_tensors(gaps):
    torch.manual_seed(0)
    rewards, values, mask = torch.randn(5, 30).double(), 3 * torch.randn(5, 30).double(), torch.rand(5, 30) > 0.3
    slow = gae(Tracked(rewards), Tracked(values), mask, gamma=parameter(0.99), lam=parameter(0.95), gaps=gaps)
    fast = tracked_gae(rewards, values, mask, gamma=0.99, lam=0.95, gaps=gaps)

    for one, other in zip(slow, fast, strict=True):
        assert torch.equal(one.value, other.value)
        ratio = (other.gauge / one.gauge)[mask]
        assert ratio.min() > 0.7 and ratio.max() < 4


def test_what_has_no_rule_is_refused():
    with pytest.raises(TypeError, match="no rule for cumsum"):
        torch.cumsum(Tracked(torch.ones(2)), 0)
