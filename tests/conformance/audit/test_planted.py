"""Each deviation of the catalogue, planted in a dump, is flagged at its edge and named."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import save_file

import goldenppo.reference as reference
from goldenppo.conformance.audit.dump import Dump
from goldenppo.conformance.audit.edges import EDGES
from goldenppo.conformance.audit.engine import audit
from goldenppo.conformance.audit.step import Step
from goldenppo.conformance.cases import Case, load, table
from goldenppo.conformance.naming import Evaluator
from goldenppo.reference.deviations import deviations

# Deviations that no number of a dump shows, and why.
INVISIBLE = {
    "pl-gradient-dead": "the numbers are right; no gradient is computed at all",
    "vl-gradient-dead": "the numbers are right; no gradient is computed at all",
    "rm-gradient-dead": "the numbers are right; no gradient is computed at all",
    "rmt-gradient-dead": "the numbers are right; no gradient is computed at all",
    "tl-gradient-dead": "the numbers are right; no gradient is computed at all",
    "dpo-gradient-dead": "the numbers are right; no gradient is computed at all",
    "pl-empty-batch-detached": "the numbers are right; no gradient is computed at all",
    "pl-old-logprobs-not-detached": "gradients of constants are not dumped",
    "pl-advantages-not-detached": "gradients of constants are not dumped",
    "vl-returns-not-detached": "gradients of constants are not dumped",
    "vl-old-values-not-detached": "gradients of constants are not dumped",
    "dpo-reference-not-detached": "gradients of constants are not dumped",
}
UNNAMED = {"vl-unreduced": "flagged by its shape"}


@pytest.mark.parametrize("op", table()["ops"])
def test_every_planted_bug_is_flagged_at_its_edge_and_named(op, tmp_path):
    missed = [name for name, function in deviations(op).items() if not _caught(tmp_path / "dump.safetensors", op, name, function)]

    assert set(missed) == {name for name in deviations(op) if name in INVISIBLE}


def _caught(path, op: str, name: str, function) -> bool:
    """Whether some dump with the bug is flagged at the op's edge with the bug's name; float32 shows what overflows there."""
    for dtype in ("float64", "float32"):
        evaluator, tried = Evaluator(op), 0
        rounds = itertools.zip_longest(
            *([(case, *found) for found in answers(op, function, case, dtype)] for case in cases_of(op))
        )
        for case, axes, answer in filter(None, itertools.chain.from_iterable(rounds)):  # one variant of each case, then the next
            if tried == 30 or not differs(evaluator.evaluate(getattr(reference, op), case, axes, dtype), answer):
                continue
            tried += 1
            edge = dump_of(path, op, case, answer, dtype)
            wrong = {finding.edge.name: finding for finding in audit(Step(Dump([str(path)]))) if finding.verdict == "wrong"}
            named = {match.id for finding in wrong.values() if finding.report for match in finding.report.matches if match.exact}
            if (edge in wrong or "experience" in wrong) and (name in named or name in UNNAMED):
                return True
    return False


def dump_of(path, op: str, case: Case, answer: dict, dtype: str = "float64") -> str:
    """Writes a case's inputs and an answer to them as a dump; returns the name of the edge that joins them."""
    edge, spec = next(edge for edge in EDGES if edge.op == op), table()["ops"][op]
    tensors, params = {}, {}
    kinds = {"bool": torch.bool, "int": torch.int64}
    for name, about in spec["inputs"].items():
        tensors[edge.inputs[name][0]] = torch.tensor(case.inputs[name], dtype=kinds.get(about.get("kind"), getattr(torch, dtype)))
    for name, about in spec["params"].items():
        value = case.params.get(name)
        if "shape" in about and value is not None:
            tensors[name] = torch.tensor(value, dtype=kinds.get(about.get("kind"), getattr(torch, dtype)))
        elif "shape" not in about:
            params[edge.params.get(name, (name,))[0]] = value
    for output, names in edge.outputs.items():
        if output in answer:
            made, shape = torch.tensor(answer[output], dtype=getattr(torch, dtype)), case.answers[output][0].block.shape
            tensors[names[0]] = made.reshape(shape) if made.numel() == math.prod(shape) else made  # one bug reduces nothing
    loss = next(iter(edge.outputs))
    for name in spec["outputs"][loss].get("gradients", []):
        if f"grad_{name}" in answer:
            shape = case.answers[loss][0].gradients[name].shape
            gradient = torch.tensor(answer[f"grad_{name}"], dtype=getattr(torch, dtype)).reshape(shape)
            tensors[f"{edge.outputs[loss][0]}_grad_{name}"] = gradient
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"params": json.dumps(params)})
    return edge.name


def cases_of(op: str) -> list[Case]:
    """Cases that a dump can hold, ordinary ones first."""
    return sorted((case for case in load(op) if not case.edge and not case.precision), key=lambda case: case.level != "must")


def answers(op: str, function, case: Case, dtype: str = "float64"):
    """What a deviation answers under every variant that the case tells apart, with the variant."""
    evaluator, seen = Evaluator(op), []
    for entries in case.answers.values():
        for entry in entries:
            axes = {axis: values[0] for axis, values in entry.when.items()}
            if axes not in seen:
                seen.append(axes)
                answer = evaluator.evaluate(function, case, axes, dtype)
                if answer is not None:
                    yield axes, answer


def differs(right: dict | None, answer: dict) -> bool:
    """Whether a dump would show any difference: some number that is there in both."""
    if right is None:
        return True
    arrays = [name for name in answer if isinstance(answer[name], list) and name != "leaks" and name in right]
    return any(
        len(right[name]) != len(answer[name])
        or any(abs(a - b) > 1e-12 or (a != a) != (b != b) for a, b in zip(right[name], answer[name], strict=True))
        for name in arrays
    )
