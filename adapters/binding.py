"""How a case's inputs, parameters and axes become the arguments of an adapter's function.

Inputs go positionally in the order of the op table, parameters and axes by keyword. What a function takes is read from
its signature; `**kwargs` never counts as taking a name.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

from goldenppo.adapters.interface import Unsupported

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class NotTheOp(Exception):
    """A function has an op's name but does not take the op's inputs; the message says what is in the way."""


@dataclass(frozen=True)
class Bound:
    """A function together with what it takes of its op."""

    op: str
    spec: dict
    function: Callable
    inputs: tuple[str, ...]  # passed positionally
    parameters: frozenset[str]  # passed by keyword, aliases included
    required: frozenset[str]  # of these, the ones without a default
    axes: tuple[str, ...]  # variant axes taken by keyword
    missing: tuple[str, ...] = field(default=())  # inputs not taken: at most the mask

    def withheld(self) -> dict[str, list]:
        """Axis values that cannot be asked for because the parameter that they need is not taken."""
        values: dict[str, list] = {}
        for name, about in self.spec["params"].items():
            if name not in self.parameters:
                for axis, needing in about.get("needed_by", {}).items():
                    values.setdefault(axis, []).extend(needing)
        return values


def axes_of(spec: dict) -> list[str]:
    """The variant axes of an op, each once, in the order in which its outputs name them."""
    return list(dict.fromkeys(axis for output in spec["outputs"].values() for axis in output["axes"]))


def bind(op: str, spec: dict, function: Callable) -> Bound:
    """Reads from a function's signature what it takes of the op.

    Args:
        op: name of the op.
        spec: the op's entry of the op table.
        function: any callable with an inspectable signature.

    Raises:
        NotTheOp: the function cannot take the op's inputs; the message says why and what is expected.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as problem:
        raise NotTheOp(f"{op} has no readable signature ({problem})") from None
    inputs, aliases, axes = list(spec["inputs"]), spec.get("alias", {}), axes_of(spec)
    keywords = {*spec["params"], *aliases, *axes} - set(inputs)
    slots, rest = _input_slots(signature, keywords, len(inputs))
    taken = inputs[: len(slots)]
    expected = f"{op}({', '.join(inputs)}, ...)"
    if taken != inputs and not (taken == inputs[:-1] and inputs[-1] == "mask"):
        raise NotTheOp(f"{op} takes {len(slots)} of the {len(inputs)} inputs; expected {expected}")
    for slot, name in zip(slots, taken, strict=True):
        if slot in inputs and slot != name:
            raise NotTheOp(f"{op} has its input {slot!r} in the place of {name!r}; expected {expected}")
    named = {parameter.name: parameter for parameter in rest}
    for name, parameter in named.items():
        if name not in keywords and parameter.default is inspect.Parameter.empty:
            raise NotTheOp(f"{op} needs {name!r}, which is no input, parameter or axis of the op; expected {expected}")
    parameters = frozenset(name for name in named if name in spec["params"] or name in aliases)
    required = frozenset(name for name in parameters if named[name].default is inspect.Parameter.empty)
    taken_axes = tuple(axis for axis in axes if axis in named)
    return Bound(op, spec, function, tuple(taken), parameters, required, taken_axes, tuple(inputs[len(taken) :]))


def _input_slots(signature: inspect.Signature, keywords: set[str], wanted: int) -> tuple[list[str], list]:
    """Splits a signature into the names of its input slots and the parameters that can be given by keyword."""
    slots: list[str] = []
    rest: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL and not rest:
            slots += ["*"] * (wanted - len(slots))
        elif parameter.kind in _POSITIONAL and parameter.name not in keywords and len(slots) < wanted and not rest:
            slots.append(parameter.name)
        elif parameter.kind in _NAMED or parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            rest.append(parameter)
    return slots, rest


def keyword_arguments(bound: Bound, params: dict, axes: dict) -> dict:
    """The keyword arguments of one call.

    A parameter whose value is None is left out. A parameter that the function does not take stops the case unless it is
    None there or only serves axis values that are not asked for.

    Args:
        bound: what the function takes.
        params: the case's parameters by name; None stands for none.
        axes: the value asked for on each axis that the function takes.

    Raises:
        Unsupported: the function cannot be given what the case needs.
    """
    arguments = {axis: axes[axis] for axis in bound.axes if axis in axes}
    for alias, members in bound.spec.get("alias", {}).items():
        if alias in bound.parameters:
            values = [params.get(name) for name in members]
            if any(value != values[0] for value in values):
                given = ", ".join(f"{name} {params.get(name)}" for name in members)
                raise Unsupported(f"takes one {alias}; the case has {given}")
            _give(bound, arguments, alias, values[0])
    covered = {name for alias, names in bound.spec.get("alias", {}).items() if alias in bound.parameters for name in names}
    for name, about in bound.spec["params"].items():
        value = params.get(name)
        if name in bound.parameters:
            _give(bound, arguments, name, value)
        elif value is not None and name not in covered and "needed_by" not in about:
            raise Unsupported(f"takes no {name}; the case has {name} {_short(value)}")
    return arguments


def _give(bound: Bound, arguments: dict, name: str, value) -> None:
    if value is not None:
        arguments[name] = value
    elif name in bound.required:
        raise Unsupported(f"{name} cannot be left out; the case has none")


def _short(value) -> str:
    return str(value) if not isinstance(value, list) else "given"
