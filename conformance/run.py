"""Runs an adapter over the cases: which calls a case needs, and what came back."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from goldenppo.adapters.binding import axes_of
from goldenppo.conformance.cases import Case, table

DTYPES = ("float64", "float32", "bfloat16")


@dataclass(frozen=True)
class Attempt:
    """One call of the adapter on one case."""

    case: Case
    dtype: str
    axes: dict  # values asked for on the axes that the function takes, and those that it declares
    answer: dict  # result, unsupported or error: see adapters/session.py


def attempts(session, op: str, offer: dict, cases: list[Case], dtypes: tuple[str, ...], device: str) -> Iterator[Attempt]:
    """Calls the adapter's function for every case, dtype and distinct answer.

    Args:
        session: the adapter (adapters/session.py or adapters/process.py).
        op: name of the op.
        offer: what the adapter's greeting says of the op.
        cases: cases to run.
        dtypes: dtypes to run them in.
        device: where the tensors live.
    """
    spec = table()["ops"][op]
    for case in cases:
        for axes in calls(case, offer):
            for dtype in dtypes:
                if case.edge and dtype not in ("float64", "float32"):
                    continue
                request = {
                    "op": op,
                    "inputs": case.inputs,
                    "params": case.params,
                    "axes": {axis: value for axis, value in axes.items() if axis in offer["axes"]},
                    "dtype": dtype,
                    "device": device,
                    "gradients": _differentiated(spec) if offer["gradients"] else [],
                    "constants": list(case.constants),
                }
                yield Attempt(case, dtype, axes, session.call(request))


def calls(case: Case, offer: dict) -> list[dict]:
    """The axis values to ask for: every answer of every output, and every value, at least once.

    Axes that the function does not take are left to identification.
    """
    spec = table()["ops"][case.op]
    declared = offer["variants"]
    axes = [axis for axis in axes_of(spec) if axis in offer["axes"] or axis in declared]
    choices = []
    for axis in axes:
        values = [declared[axis]] if axis in declared else table()["axes"][axis]
        barred = offer["withheld"].get(axis, [])
        if not case.full and "mask" in case.inputs:
            barred = [*barred, *table()["unmasked"].get(axis, [])]
        choices.append([value for value in values if value not in barred])
    # Outputs are judged one by one, so each answer of each output is asked for once, not each combination of them.
    kept: list[dict] = []
    wanted = {
        (output, index)
        for output, entries in case.answers.items()
        for index, entry in enumerate(entries)
        if all(set(values) & set(entry.when.get(axis, values)) for axis, values in zip(axes, choices, strict=True))
    }
    covered: set[tuple] = set()
    unseen = {(axis, value) for axis, values in zip(axes, choices, strict=True) for value in values}
    for values in itertools.product(*choices):
        chosen = dict(zip(axes, values, strict=True))
        answers = {
            (output, index)
            for output, entries in case.answers.items()
            for index, entry in enumerate(entries)
            if all(chosen.get(axis, allowed[0]) in allowed for axis, allowed in entry.when.items())
        }
        if not kept or not answers <= covered:
            kept.append(chosen)
            covered |= answers
            unseen -= set(chosen.items())
        if wanted <= covered:
            break
    extra: list[dict] = []
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*choices)]
    for axis, value in sorted(unseen, key=str):
        if not any(chosen[axis] == value for chosen in extra):
            extra.append(next(chosen for chosen in combinations if chosen[axis] == value))
    return [*kept, *extra]


def _differentiated(spec: dict) -> list[str]:
    return [name for about in spec["outputs"].values() for name in about.get("gradients", [])]
