"""Names the bug: which known deviation gives exactly the numbers that a trainer gave.

A deviation is a function with the op's signature (reference/deviations/). It is evaluated on the failing cases in float64
and compared with what the trainer returned, by the tolerance law; it matches the op if it explains every failing attempt
that is compared, and no passing one contradicts it.
"""

import math
from dataclasses import dataclass

from goldenppo.conformance.cases import read_yaml, table
from goldenppo.conformance.judge import OpReport, Verdict
from goldenppo.conformance.law import DTYPES, K
from goldenppo.conformance.run import Attempt

MOST_CASES = 6  # failing cases and passing cases that a deviation is held against: enough to tell deviations apart


@dataclass(frozen=True)
class Named:
    """A deviation that explains the numbers, or the nearest one."""

    id: str
    title: str
    distance: float  # largest use of the tolerance; at most 1 is a match
    variant: dict

    @property
    def exact(self) -> bool:
        """Whether the numbers are the deviation's, within the tolerance."""
        return self.distance <= 1


def name(report: OpReport, found: list[Attempt], evaluator: "Evaluator | None" = None) -> list[Named]:
    """The deviations that explain an op's failures, best first; where none does, the nearest one.

    Args:
        report: the op's report with its deciding failures.
        found: all attempts on the op.
        evaluator: one to be shared where many reports on the same cases are to be named.
    """
    failing = [verdict for verdict in report.failed if verdict.verdict == "fail" and verdict.attempt is not None]
    if not failing:
        return []
    from goldenppo.reference.deviations import deviations

    catalogue = read_yaml("deviations.yaml")["deviations"]
    evaluator = evaluator or Evaluator(report.op)
    nearest: list[Named] = []
    # A trainer that works in float32 inside gives a bug's numbers to float32 accuracy only, so float32 is asked next.
    for dtype in [dtype for dtype in DTYPES if any(verdict.dtype == dtype for verdict in failing)][:2]:
        held = _held_against(report, failing, dtype)
        ranked = []
        for identifier, function in deviations(report.op).items():
            distance, variant = evaluator.distance(identifier, function, held, report.variant)
            ranked.append(Named(identifier, catalogue[identifier]["title"], distance, variant))
        matching = [named for named in ranked if named.exact]
        if matching:
            return matching
        nearest = nearest or [min(ranked, key=lambda named: named.distance)]
    return [named for named in nearest if math.isfinite(named.distance)]


def _held_against(report: OpReport, failing: list[Verdict], dtype: str) -> list[Attempt]:
    """The attempts that a deviation has to explain: failing and passing ones in one dtype."""
    passing = [v for v in report.cases if v.verdict == "pass" and v.dtype == dtype and v.case.level == "must"]
    wrong = [v for v in failing if v.dtype == dtype]
    return [v.attempt for v in wrong[:MOST_CASES] + passing[:MOST_CASES] if v.attempt is not None]


class Evaluator:
    """Evaluates deviations on attempts; inputs are made once per attempt.

    Args:
        op: name of the op.
        gradients: whether gradients are evaluated too.
    """

    def __init__(self, op: str, gradients: bool = True):
        import torch

        self.gradients = gradients
        self.torch, self.op, self.spec = torch, op, table()["ops"][op]
        self.inputs: dict = {}
        self.answers: dict = {}

    def distance(self, identifier: str, function, held: list[Attempt], variant: dict) -> tuple[float, dict]:
        """How far a deviation is from what was returned, under the variant that explains most, output by output.

        Numbers that are wrong identify no variant, so each one is tried, those that are left first.
        """
        furthest = 0.0
        chosen: dict = {}
        for output in self.spec["outputs"]:
            returned = [attempt for attempt in held if output in attempt.answer["result"]["outputs"]]
            if returned:
                best, best_variant = self._output_distance(identifier, function, returned, output, variant)
                furthest, chosen = max(furthest, best), {**best_variant, **chosen}
            if furthest == math.inf:
                break
        return furthest, chosen

    def _output_distance(self, identifier, function, held, output, variant) -> tuple[float, dict]:
        best, best_variant = math.inf, {}
        for candidate in self._candidates(held[0], output, variant):
            furthest = 0.0
            for attempt in held:
                furthest = max(furthest, self._distance(identifier, function, attempt, output, candidate))
                if furthest > max(1.0, best):
                    break
            if furthest < best:
                best, best_variant = furthest, candidate
            if best <= 1:
                break
        return best, best_variant

    def _candidates(self, attempt: Attempt, output: str, variant: dict) -> list[dict]:
        """Variants of an output to try: one per answer of the first case that it is held against, and the identified one."""
        axes = [axis for axis in self.spec["outputs"][output]["axes"] if axis not in attempt.axes]
        identified = {axis: values[0] for axis, values in variant.items() if axis not in attempt.axes}
        tried = [identified] if all(axis in identified for axis in axes) else []
        for entry in attempt.case.answers[output]:
            # axes that move other outputs only stay as identified: a bug may let them move this one
            candidate = identified | {axis: entry.when.get(axis, table()["axes"][axis])[0] for axis in axes}
            if candidate not in tried:
                tried.append(candidate)
        return tried

    def _distance(self, identifier: str, function, attempt: Attempt, output: str, candidate: dict) -> float:
        axes = {**candidate, **attempt.axes}
        full = attempt.case.full or "mask" not in attempt.case.inputs
        if not full and any(axes.get(axis) in values for axis, values in table()["unmasked"].items()):
            return math.inf
        # in float32 where the trainer ran in float32: some bugs are an overflow there and nowhere else
        dtype = "float32" if attempt.dtype == "float32" else "float64"
        key = (identifier, id(attempt.case), dtype, tuple(sorted(axes.items(), key=str)))
        if key not in self.answers:
            self.answers[key] = self.evaluate(function, attempt.case, axes, dtype)
        return self._compare(self.answers[key], attempt, output)

    def evaluate(self, function, case, axes: dict, dtype: str = "float64") -> dict | None:
        """A deviation's outputs and gradients on a case, as flat lists; None where it cannot be evaluated."""
        torch = self.torch
        kinds = {"bool": torch.bool, "int": torch.int64}
        if (id(case), dtype) not in self.inputs:
            self.inputs[id(case), dtype] = [
                torch.tensor(case.inputs[name], dtype=kinds.get(about.get("kind"), getattr(torch, dtype)))
                for name, about in self.spec["inputs"].items()
            ]
        constants = list(case.constants)
        made = [tensor.clone() for tensor in self.inputs[id(case), dtype]]
        differentiated = [name for about in self.spec["outputs"].values() for name in about.get("gradients", [])]
        for name, tensor in zip(self.spec["inputs"], made, strict=True):
            tensor.requires_grad_(name in differentiated or name in constants)
        params = {}
        for name, about in self.spec["params"].items():
            value = case.params.get(name)
            if value is not None:
                kind = kinds.get(about.get("kind"), getattr(torch, dtype))
                params[name] = torch.tensor(value, dtype=kind) if "shape" in about else value
        try:
            raw = function(*made, **params, **axes)
            named = raw._asdict() if hasattr(raw, "_asdict") else {next(iter(self.spec["outputs"])): raw}
            answer = {output: value.detach().double().reshape(-1).tolist() for output, value in named.items()}
            loss = next((named[output] for output, about in self.spec["outputs"].items() if about.get("gradients")), None)
            if loss is not None and self.gradients:
                answer["dead"] = not loss.requires_grad
                if loss.requires_grad:
                    loss.sum().backward()
                    for name, tensor in zip(self.spec["inputs"], made, strict=True):
                        if name in constants and tensor.grad is not None and bool(tensor.grad.any()):
                            answer["leaks"] = [*answer.get("leaks", []), name]
                        if name in differentiated:
                            grad = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                            answer[f"grad_{name}"] = grad.reshape(-1).tolist()
            return answer
        except (ValueError, RuntimeError, IndexError, TypeError, ZeroDivisionError):
            return None

    def _compare(self, answer: dict | None, attempt: Attempt, output: str) -> float:
        """The largest use of the tolerance between a deviation's numbers and the trainer's, on one output and its gradients."""
        if answer is None:
            return math.inf
        result, law, entries = attempt.answer["result"], DTYPES[attempt.dtype], attempt.case.answers[output]
        furthest = _distance(result["outputs"][output], answer[output], [entry.block for entry in entries], law)
        if not self.spec["outputs"][output].get("gradients") or furthest == math.inf:
            return furthest
        if not self.gradients:
            return furthest
        if answer.get("dead", False) != result["dead"] or set(answer.get("leaks", [])) != set(result["leaks"]):
            return math.inf
        for name, got in result["gradients"].items():
            blocks = [entry.gradients[name] for entry in entries if name in entry.gradients]
            if blocks and f"grad_{name}" in answer:
                furthest = max(furthest, _distance(got, answer[f"grad_{name}"], blocks, law))
        return furthest


def _distance(got: dict, want: list[float], blocks: list, law) -> float:
    """Compares two results; the gauge is the largest that any answer of the case has, scaled up to the wrong number's size."""
    if len(got["data"]) != len(want) or math.prod(got["shape"]) != len(want) or tuple(got["shape"]) != blocks[0].shape:
        return math.inf
    out = DTYPES.get(got["dtype"], law)
    furthest = 0.0
    # One gauge for the whole block: a bug moves numbers between slots, so a slot's own gauge may be that of a plain zero.
    gauge = max(max(block.gauge, default=0.0) for block in blocks)
    size = max(
        (abs(number) for block in blocks for number in block.want if number is not None and math.isfinite(number)), default=0.0
    )
    for index, (a, b) in enumerate(zip(got["data"], want, strict=True)):
        if all(block.want[index] is None for block in blocks):
            continue
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        if not (math.isfinite(a) and math.isfinite(b)):
            return math.inf
        scale = max(1.0, abs(b) / size) if size else 1.0
        allowed = K * (law.unit * max(gauge * scale, abs(b)) + law.tiny) + out.unit * abs(b)
        furthest = max(furthest, abs(a - b) / allowed)
    return furthest


def describe(identifier: str) -> dict:
    """The catalogue's entry of a deviation."""
    return read_yaml("deviations.yaml")["deviations"][identifier]
