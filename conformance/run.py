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

    def ask(case: Case, axes: dict, dtype: str) -> Attempt:
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
        return Attempt(case, dtype, axes, session.call(request))

    for case in cases:
        for axes in calls(case, offer):
            for dtype in dtypes:
                if case.edge and dtype not in ("float64", "float32"):
                    continue
                attempt = ask(case, axes, dtype)
                if "unsupported" in attempt.answer:  # a trainer may have this answer under other values only
                    others = (ask(case, other, dtype) for other in _alike(case, offer, axes))
                    attempt = next((other for other in others if "unsupported" not in other.answer), attempt)
                yield attempt


def calls(case: Case, offer: dict) -> list[dict]:
    """The axis values to ask for: every answer of every output, and every value, at least once.

    Axes that the function does not take are left to identification.
    """
    # Outputs are judged one by one, so each answer of each output is asked for once, not each combination of them.
    kept: list[dict] = []
    choices = _choices(case, offer)
    wanted = {
        (output, index)
        for output, entries in case.answers.items()
        for index, entry in enumerate(entries)
        if all(set(values) & set(entry.when.get(axis, values)) for axis, values in choices.items())
    }
    covered: set[tuple] = set()
    unseen = {(axis, value) for axis, values in choices.items() for value in values}
    for chosen in _products(choices):
        answers = _answers(case, chosen)
        if not kept or not answers <= covered:
            kept.append(chosen)
            covered |= answers
            unseen -= set(chosen.items())
        if wanted <= covered:
            break
    extra: list[dict] = []
    for axis, value in sorted(unseen, key=str):
        if not any(chosen[axis] == value for chosen in extra):
            extra.append(next(chosen for chosen in _products(choices) if chosen[axis] == value))
    return [*kept, *extra]


def _alike(case: Case, offer: dict, axes: dict, most: int = 12) -> Iterator[dict]:
    """Other axis values that lead to the same answers."""
    same = _answers(case, axes)
    others = (chosen for chosen in _products(_choices(case, offer)) if chosen != axes and _answers(case, chosen) == same)
    return itertools.islice(others, most)


def _choices(case: Case, offer: dict) -> dict[str, list]:
    """The values that can be asked for on each axis that the function takes or declares."""
    choices = {}
    for axis in axes_of(table()["ops"][case.op]):
        if axis in offer["axes"] or axis in offer["variants"]:
            values = [offer["variants"][axis]] if axis in offer["variants"] else table()["axes"][axis]
            barred = offer["withheld"].get(axis, [])
            if not case.full and "mask" in case.inputs:
                barred = [*barred, *table()["unmasked"].get(axis, [])]
            choices[axis] = [value for value in values if value not in barred]
    return choices


def _products(choices: dict[str, list]) -> Iterator[dict]:
    return (dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))


def _answers(case: Case, chosen: dict) -> set[tuple]:
    """Which entries of each output the axis values lead to; an axis that is not chosen stands for its first one."""
    return {
        (output, index)
        for output, entries in case.answers.items()
        for index, entry in enumerate(entries)
        if all(chosen.get(axis, allowed[0]) in allowed for axis, allowed in entry.when.items())
    }


def _differentiated(spec: dict) -> list[str]:
    return [name for about in spec["outputs"].values() for name in about.get("gradients", [])]
