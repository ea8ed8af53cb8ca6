"""Invariances: properties of the trainer's own code that need no expected value (spec/invariances.md, `check --invariances`).

Each one asks the adapter twice, for an input and for a changed one, and holds the answers against each other. How far they
may lie apart is the tolerance law's business: both are allowed the error that the law allows for the exact answer, so the
oracle is asked for gauges, not for numbers.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

from goldenppo.adapters.binding import axes_of
from goldenppo.adapters.interface import AdapterError
from goldenppo.conformance.cases import LEVELS, clauses, flatten, load, table
from goldenppo.conformance.law import DTYPES, tolerance, use
from goldenppo.conformance.ranks import Ranks
from goldenppo.conformance.run import calls
from goldenppo.fixtures.generate import plain
from goldenppo.reference import exact
from goldenppo.reference.exact.aggregate import flags, weights
from goldenppo.reference.exact.number import NAN, ZERO, Number, lift, literal, parameter, to_float, total

READ_AFTER = ("shaped_rewards", "experience")  # under first_pad these read the slot after the last token
LOGPROBS, OTHERS = (-57.0, -43.5, -29.25, -0.0625), (1888.0, -920.0, 744.0, -1616.0)
NOT_NUMBERS = (math.nan, math.inf, -math.inf)


class NotCompared(Exception):
    """An invariance says nothing about an input, or the adapter does not take the changed one; the message says why."""


class DoesNotApply(NotCompared):
    """An invariance says nothing about an op."""


class Raised(Exception):
    """The trainer raised on the changed input."""


@dataclass(frozen=True)
class Given:
    """The arguments of one call."""

    inputs: dict
    params: dict
    axes: dict

    @property
    def key(self) -> str:
        """Equal for equal contents."""
        return json.dumps([self.inputs, self.params, self.axes])


@dataclass(frozen=True)
class Claim:
    """Two numbers that ought to be equal, and (value, gauge) of everything whose error the law allows."""

    part: str
    index: tuple[int, ...]
    got: float
    want: float
    bounds: tuple[tuple[float, float], ...]
    out: str
    allowed: float | None = None  # the two are errors: how much larger the first may be

    def share(self, dtype: str) -> float:
        """Their distance as a share of what the law allows: at most 1 is right."""
        if self.allowed is not None:
            return max(self.got - self.want, 0.0) / self.allowed if self.allowed else math.inf * (self.got > self.want)
        if self.got == self.want or (math.isnan(self.got) and math.isnan(self.want)):
            return 0.0
        if not (math.isfinite(self.got) and math.isfinite(self.want)):
            return math.inf
        law, out = DTYPES[dtype], DTYPES.get(self.out, DTYPES[dtype])
        return abs(self.got - self.want) / sum(tolerance(value, gauge, law, out) for value, gauge in self.bounds)


Trials = Iterator[tuple[str, Callable[[], list[Claim]]]]  # what is changed, and a function that asks and compares


@dataclass
class Finding:
    """What became of one invariance of one op."""

    clause: str
    op: str
    level: str
    verdict: str  # holds, fails, coarse (holds to float32 accuracy at float64), not-compared, does-not-apply
    reason: str = ""
    trials: int = 0  # changed inputs that were compared
    use: float = 0.0  # the largest share of the tolerance
    what: str = ""  # the change that shows a failure
    claim: Claim | None = None
    given: Given | None = None  # the smallest input that shows it
    problem: str = ""  # set where the trainer raised instead of answering
    dtype: str = ""


@dataclass
class Bench:
    """An op of an adapter, ready to be asked; answers and oracle numbers are kept."""

    session: Any
    op: str
    offer: dict
    variant: dict  # axis → the values that the check left
    dtype: str
    dtypes: tuple[str, ...]
    device: str
    ranks: Ranks | None
    asked: dict = field(default_factory=dict)
    solved: dict = field(default_factory=dict)

    @property
    def spec(self) -> dict:
        """The op's entry of the op table."""
        return table()["ops"][self.op]

    @property
    def mask(self) -> str | None:
        """The name of the mask, if the op has one and the adapter takes it."""
        names = [name for name, about in self.spec["inputs"].items() if about.get("kind") == "bool"]
        return names[0] if names and names[0] not in self.offer["missing"] else None

    def values(self, axis: str, given: Given) -> list:
        """The values that an axis may have in a call: the one asked for, else what the check left."""
        left = self.variant.get(axis) or table()["axes"][axis]
        return [given.axes[axis]] if axis in given.axes else list(left)

    def first_pad(self, given: Given) -> bool:
        """Whether the slot after the last token is read on purpose."""
        return self.op in READ_AFTER and self.values("score_at", given) != ["last_token"]

    def request(self, given: Given, dtype: str | None = None, **more) -> dict:
        """A request to the adapter (adapters/session.py); keys of `more` come on top."""
        return {
            "op": self.op,
            "inputs": given.inputs,
            "params": given.params,
            "axes": {axis: value for axis, value in given.axes.items() if axis in self.offer["axes"]},
            "dtype": dtype or self.dtype,
            "device": self.device,
            "gradients": differentiated(self.op) if self.offer["gradients"] else [],
            "constants": [],
            **more,
        }

    def ask(self, given: Given, dtype: str | None = None, parts: list | None = None) -> dict:
        """The adapter's answer by part: outputs by name, gradients as grad_<input>."""
        key = (given.key, dtype, json.dumps(parts))
        if key not in self.asked:
            more = {} if parts is None else {"parts": parts}
            self.asked[key] = self.session.call(self.request(given, dtype, **more))
        return parts_of(self.asked[key])

    def exact(self, given: Given) -> dict[str, list]:
        """The oracle's numbers by part, in row order; None where nothing is compared."""
        if given.key not in self.solved:
            params = {name: value for name, value in given.params.items() if value is not None}
            axes = {axis: self.values(axis, given)[0] for axis in axes_of(self.spec)}
            try:
                answer = getattr(exact, self.op)(*given.inputs.values(), **params, **axes)
            except ValueError as problem:
                raise NotCompared(f"the oracle has no answer: {problem}") from None
            self.solved[given.key] = {part: flatten(nested)[1] for part, nested in answer.items()}
        return self.solved[given.key]


def differentiated(op: str) -> list[str]:
    """The inputs that the gradient of an op's output is an answer for."""
    return [name for about in table()["ops"][op]["outputs"].values() for name in about.get("gradients", [])]


def parts_of(answer: dict) -> dict:
    """An answer's arrays by name, gradients as grad_<input>."""
    if "unsupported" in answer:
        raise NotCompared(answer["unsupported"])
    if "error" in answer:
        raise Raised(f"{answer['error']['type']}: {answer['error']['message']}")
    result = answer["result"]
    return {**result["outputs"], **{f"grad_{name}": array for name, array in result["gradients"].items()}}


# --- comparing ----------------------------------------------------------------------------------------------


def bound(number) -> tuple[float, float]:
    """Value and gauge of an oracle number."""
    return to_float(number), number.gauge


def positions(shape: list[int]) -> list[tuple[int, ...]]:
    """All indices of an array, in row order."""
    return list(itertools.product(*(range(size) for size in shape)))


def at(array: dict, index: tuple[int, ...]) -> float:
    """One element; NaN where the array has none there."""
    if len(index) != len(array["shape"]) or any(i >= size for i, size in zip(index, array["shape"], strict=True)):
        return math.nan
    flat = 0
    for i, size in zip(index, array["shape"], strict=True):
        flat = flat * size + i
    return float(array["data"][flat])


def compared(
    bench: Bench,
    given: Given,
    other: Given | dict,
    move: Callable[[tuple], tuple] = lambda index: index,
    relation: Callable[[str, tuple, float], tuple[float, tuple]] = lambda part, index, value: (value, ()),
    skip: tuple[str, ...] = (),
) -> list[Claim]:
    """Claims that an answer is what another one implies.

    Args:
        bench: the op.
        given: the input as it was.
        other: the changed input, or the answer to it.
        move: where an element of the first answer is found in the second.
        relation: from (part, index, number in the first answer) to the number implied and the bounds of the way there.
        skip: parts about which the invariance says nothing.
    """
    try:
        before = bench.ask(given)
    except Raised:
        raise NotCompared("raises on the unchanged input, which the check judges") from None
    numbers = bench.exact(given)
    after = bench.ask(other) if isinstance(other, Given) else other
    claims = []
    for part in [part for part in before if part in after and part in numbers and part not in skip]:
        indices = positions(before[part]["shape"])
        if len(indices) != len(numbers[part]):
            raise NotCompared(f"{part} has shape {tuple(before[part]['shape'])}, which the check judges")
        for index, number in zip(indices, numbers[part], strict=True):
            if number is None or number.value is None:
                continue
            value = at(before[part], index)
            if not math.isfinite(value):
                raise NotCompared(f"{part} is not finite on the unchanged input, which the check judges")
            want, more = relation(part, index, value)
            bounds = (bound(number), bound(number), (want, 0.0), *more)
            claims.append(Claim(part, index, at(after[part], move(index)), want, bounds, after[part]["dtype"]))
    if not claims:
        raise NotCompared("no output to compare")
    return claims


# --- changing inputs ----------------------------------------------------------------------------------------


def along(shape: list[str], axis: str, nested, change: Callable[[list], list]):
    """A nested list with its lists along a named axis changed."""
    if axis not in shape:
        return nested
    if shape[0] == axis:
        return change(nested)
    return [along(shape[1:], axis, item, change) for item in nested]


def changed(bench: Bench, given: Given, axis: str, change: Callable[[list], list]) -> Given:
    """The input with every array's lists along an axis (B, T, L) changed, parameters that have a shape included."""
    spec = bench.spec
    inputs = {name: along(spec["inputs"][name]["shape"], axis, nested, change) for name, nested in given.inputs.items()}
    params = {
        name: value if value is None else along(spec["params"][name].get("shape", []), axis, value, change)
        for name, value in given.params.items()
    }
    return Given(inputs, params, given.axes)


def rows(bench: Bench, given: Given) -> int:
    """The number of rows; 0 where the op has no batch."""
    return next((len(given.inputs[name]) for name, about in bench.spec["inputs"].items() if about["shape"][:1] == ["B"]), 0)


def chosen(bench: Bench, given: Given, kept: list[int]) -> Given:
    """Some rows, in the order given."""
    return changed(bench, given, "B", lambda nested: [nested[row] for row in kept])


def grids(bench: Bench) -> list[str]:
    """The inputs that have the mask's shape, without it."""
    shape = bench.spec["inputs"][bench.mask]["shape"]
    return [name for name, about in bench.spec["inputs"].items() if about["shape"] == shape and name != bench.mask]


def poison(name: str, turn: int) -> float:
    """A number for a slot that does not count."""
    choices = LOGPROBS if name.endswith("logprobs") else OTHERS
    return choices[turn % len(choices)]


def refilled(bench: Bench, given: Given, fill: Callable[[str, int, float], float]) -> Given:
    """The input with other numbers at masked slots; where the slot after the last token is read, that one stays."""
    mask, keep_next = given.inputs[bench.mask], bench.first_pad(given)
    inputs = dict(given.inputs)
    for name in grids(bench):
        inputs[name] = [
            [
                x if on or (keep_next and t and t - 1 == last_token(counts)) else fill(name, b + t, x)
                for t, (x, on) in enumerate(zip(row, counts, strict=True))
            ]
            for b, (row, counts) in enumerate(zip(given.inputs[name], mask, strict=True))
        ]
    return replace(given, inputs=inputs)


def last_token(counts: list[bool]) -> int:
    """The position of a row's last token; −1 if it has none."""
    return max((t for t, on in enumerate(counts) if on), default=-1)


def mask_of(bench: Bench, given: Given) -> list[list[bool]]:
    """The mask; the invariances of masked slots and padding are about ops that read one."""
    if bench.mask is None:
        raise NotCompared("takes no mask") if bench.offer["missing"] else DoesNotApply("no mask")
    unmasked = table()["unmasked"]
    if any(bench.values(axis, given) == values for axis, values in unmasked.items() if axis in axes_of(bench.spec)):
        raise NotCompared("reads no mask under plain_mean")
    return given.inputs[bench.mask]


# --- the invariances ----------------------------------------------------------------------------------------


def masked_numbers(bench: Bench, given: Given) -> Trials:
    """INV-1: other finite numbers at masked slots."""
    if all(all(row) for row in mask_of(bench, given)):
        raise NotCompared("no masked slot")
    other = refilled(bench, given, lambda name, turn, x: next(p for p in (poison(name, turn + i) for i in range(2)) if p != x))
    yield "other large numbers at masked slots", partial(compared, bench, given, other)
    yield "zeros at masked slots", partial(compared, bench, given, refilled(bench, given, lambda name, turn, x: 0.0))


def masked_nan(bench: Bench, given: Given) -> Trials:
    """INV-2: NaN and infinities at masked slots."""
    if all(all(row) for row in mask_of(bench, given)):
        raise NotCompared("no masked slot")
    for name, bad in (("NaN", NOT_NUMBERS[:1]), ("infinities", NOT_NUMBERS[1:])):
        other = refilled(bench, given, partial(_one_of, bad))
        yield f"{name} at masked slots", partial(compared, bench, given, other)


def _one_of(choices: tuple[float, ...], name: str, turn: int, x: float) -> float:
    return choices[turn % len(choices)]


def row_order(bench: Bench, given: Given) -> Trials:
    """INV-3: rows in another order."""
    count = rows(bench, given)
    if not count:
        raise DoesNotApply("no rows")
    for order in dict.fromkeys([tuple(reversed(range(count))), (*range(1, count), 0)]):
        moved = chosen(bench, given, list(order))
        back = {row: place for place, row in enumerate(order)}
        move = partial(_moved_row, back)
        yield f"rows in the order {', '.join(map(str, order))}", partial(compared, bench, given, moved, move)


def _moved_row(back: dict[int, int], index: tuple) -> tuple:
    return (back[index[0]], *index[1:]) if index else index


def more_padding(bench: Bench, given: Given) -> Trials:
    """INV-4: masked columns added on the right; parameters, horizon among them, stay."""
    mask = mask_of(bench, given)
    if bench.first_pad(given) and any(row[-1] for row in mask):
        raise NotCompared("a full row gets its score in the first pad, once there is one")
    for count in (1, 3):
        inputs = {**given.inputs, bench.mask: [[*row, *[False] * count] for row in mask]}
        for name in grids(bench):
            inputs[name] = [[*row, *(poison(name, b + i) for i in range(count))] for b, row in enumerate(inputs[name])]
        what = f"{count} masked column{'s' if count > 1 else ''} more on the right"
        yield what, partial(compared, bench, given, replace(given, inputs=inputs))


def padding_side(bench: Bench, given: Given) -> Trials:
    """INV-5: the padding of each row moved to its other side."""
    mask = mask_of(bench, given)
    if bench.first_pad(given):
        raise NotCompared("the score goes into the first pad on the right")
    width = len(mask[0])
    shifts = [width - 1 - last_token(row) if any(row) else 0 for row in mask]
    if not any(shifts):
        raise NotCompared("no padding on the right")
    inputs = {
        name: [[*row[width - s :], *row[: width - s]] for row, s in zip(given.inputs[name], shifts, strict=True)]
        if name in (bench.mask, *grids(bench))
        else nested
        for name, nested in given.inputs.items()
    }
    places = {(b, t): (b, (t + shift) % width) for b, shift in enumerate(shifts) for t in range(width)}
    other = replace(given, inputs=inputs)
    yield (
        "padding on the left instead of the right",
        partial(compared, bench, given, other, lambda index: places.get(index, index)),
    )


def micro_batches(bench: Bench, given: Given) -> Trials:
    """INV-6: loss and gradient accumulated over every split into micro-batches."""
    if not summed_outputs(bench):
        raise DoesNotApply("no mean or sum over the batch")
    unit = "tokens" if "mask" in given.inputs else "pairs"
    for split in partitions(list(range(rows(bench, given)))):
        held = ", ".join(str(held_by(bench, chosen(bench, given, part))) for part in split)
        what = f"micro-batches of rows {' | '.join(', '.join(map(str, part)) for part in split)} ({held} {unit})"
        yield what, partial(accumulated if bench.offer["accumulated"] else composed, bench, given, split)


def over_ranks(bench: Bench, given: Given) -> Trials:
    """INV-7: loss and gradient of rows that are spread over 2 and 4 processes."""
    if not differentiated(bench.op) or "mask" not in bench.spec["inputs"]:
        raise DoesNotApply("no loss over tokens")
    if not bench.offer["accumulated"]:
        raise NotCompared(f"the adapter has no accumulated_{bench.op}")
    if bench.ranks is None:
        raise NotCompared("ranks are Python adapters in processes of their own")
    count = rows(bench, given)
    if count % 2:
        raise NotCompared("an odd number of rows")
    for processes in (processes for processes in (2, 4) if count % processes == 0):
        each = count // processes
        held = [list(range(rank * each, (rank + 1) * each)) for rank in range(processes)]
        tokens = ", ".join(str(held_by(bench, chosen(bench, given, part))) for part in held)
        yield f"{processes} ranks with {tokens} tokens", partial(spread_over, bench, given, [[part] for part in held])
        if each > 1:
            what = f"{processes} ranks with {tokens} tokens, each row a micro-batch"
            yield what, partial(spread_over, bench, given, [[[row] for row in part] for part in held])


def shifted_values(bench: Bench, given: Given) -> Trials:
    """INV-8: at gamma = 1, values that are all larger by a constant."""
    if bench.op not in ("gae", "experience"):
        raise DoesNotApply("no values that bootstrap")
    if bench.first_pad(given):
        raise NotCompared("a value is kept after the last token")
    mask = mask_of(bench, given)
    tokens = [[t for t, on in enumerate(row) if on] for row in mask]
    if any(row != list(range(row[0], row[-1] + 1)) for row in tokens if row):
        raise NotCompared("what is bootstrapped at a hole depends on the variant")
    given = replace(given, params={**given.params, "gamma": 1.0})
    skip = ("advantages",) if bench.values("whitening", given) != ["none"] else ()
    for c in (1.0, -0.5):
        values = [
            [x + c if on else x for x, on in zip(row, counts, strict=True)]
            for row, counts in zip(given.inputs["values"], mask, strict=True)
        ]
        other = replace(given, inputs={**given.inputs, "values": values})
        relation = partial(_shifted, tokens, given.params["lam"], c)
        yield f"all values {c:+g}, at gamma 1", partial(compared, bench, given, other, relation=relation, skip=skip)


def _shifted(tokens: list[list[int]], lam: float, c: float, part: str, index: tuple, value: float) -> tuple[float, tuple]:
    """A − c·λ^k and R + c − c·λ^k, k the tokens that follow; the sums on the way may reach |c|/(1 − λ), or |c| a token."""
    if part == "rewards":
        return value, ()
    power = literal(1)
    for _ in range(tokens[index[0]][-1] - index[1]):
        power = power * parameter(lam)
    moved = literal(Fraction(c)) * ((literal(1) - power) if part == "returns" else -power)
    return value + to_float(moved), (bound(moved), (c, abs(c) * len(tokens[index[0]])))


def scaled_rewards(bench: Bench, given: Given) -> Trials:
    """INV-9: rewards and values times a power of two."""
    if bench.op != "gae":
        raise DoesNotApply("no rewards as an input")
    skip = ("advantages",) if bench.values("whitening", given) != ["none"] else ()
    numbers = bench.exact(given)
    for factor in (4.0, 0.25, -1.0):
        inputs = {
            name: nested if name == bench.mask else [[x * factor for x in row] for row in nested]
            for name, nested in given.inputs.items()
        }
        relation = partial(_scaled, numbers, len(given.inputs["rewards"][0]), factor)
        other = replace(given, inputs=inputs)
        yield (
            f"rewards and values times {factor:g}",
            partial(compared, bench, given, other, relation=relation, skip=skip),
        )


def _scaled(numbers: dict, width: int, factor: float, part: str, index: tuple, value: float) -> tuple[float, tuple]:
    number = numbers[part][index[0] * width + index[1]]
    return value * factor, ((value * factor, abs(factor) * number.gauge),)


def first_step(bench: Bench, given: Given) -> Trials:
    """INV-10: on the policy that sampled, the ratio is 1 and the gradient is the plain policy gradient."""
    if bench.op not in ("ratio", "policy_loss"):
        raise DoesNotApply("no ratio")
    given = replace(given, inputs={**given.inputs, "old_logprobs": given.inputs["logprobs"]})
    yield "old log-probabilities equal to the new ones", partial(_on_policy, bench, given)


def _on_policy(bench: Bench, given: Given) -> list[Claim]:
    answer, numbers = bench.ask(given), bench.exact(given)
    wanted: dict[str, list[Number | None]] = {}
    if bench.op == "ratio":
        wanted["ratio"] = [None if number is None else literal(1) for number in numbers["ratio"]]
    else:
        how = {axis: bench.values(axis, given)[0] for axis in ("aggregation", "empty_rows")}
        mask = flags(given.inputs["mask"], how["aggregation"])
        shares = weights(mask, horizon=given.params.get("horizon"), **how)
        plain = [
            -lift(A) * share if on else ZERO
            for row, counts, share in zip(given.inputs["advantages"], mask, shares, strict=True)
            for A, on in zip(row, counts, strict=True)
        ]
        wanted |= {"loss": [total(plain)], "grad_logprobs": list(plain)}
    claims = []
    for part, block in wanted.items():
        if part in answer and len(answer[part]["data"]) == len(block):
            for index, want, number in zip(positions(answer[part]["shape"]), block, numbers[part], strict=True):
                if want is not None:
                    bounds = (bound(number), bound(want))
                    claims.append(Claim(part, index, at(answer[part], index), bounds[1][0], bounds, answer[part]["dtype"]))
    if not claims:
        raise NotCompared("no output to compare")
    return claims


def wider(bench: Bench, given: Given) -> Trials:
    """INV-11: the error in a wider dtype is at most the one in a narrower dtype, within the law."""
    numbers = [number for block in bench.exact(given).values() for number in block if number is not None]
    laws = {dtype: DTYPES[dtype] for dtype in DTYPES if dtype in bench.dtypes}
    inside = [dtype for dtype, law in laws.items() if all(n.low >= law.normal and n.high <= law.largest for n in numbers)]
    if len(inside) < 2:
        raise NotCompared("one dtype only")
    for wide, narrow in itertools.pairwise(inside):
        yield f"{wide} instead of {narrow}", partial(_errors, bench, given, wide, narrow)


def _errors(bench: Bench, given: Given, wide: str, narrow: str) -> list[Claim]:
    """For each part, its largest error in two dtypes."""
    numbers, ours, theirs = bench.exact(given), bench.ask(given, wide), bench.ask(given, narrow)
    claims = []
    for part in [part for part in ours if part in theirs and part in numbers]:
        known = [(i, *bound(number)) for i, number in enumerate(numbers[part]) if number is not None and number.value is not None]
        sizes = {len(numbers[part]), len(ours[part]["data"]), len(theirs[part]["data"])}
        if not known or len(sizes) > 1:
            continue
        error, other = (max(abs(answer[part]["data"][i] - value) for i, value, _ in known) for answer in (ours, theirs))
        law = DTYPES[narrow]
        if any(use(theirs[part]["data"][i], value, gauge, law, law) > 1 for i, value, gauge in known):
            continue
        allowed = max(tolerance(value, gauge, law, law) for _, value, gauge in known)
        claims.append(Claim(part, (), error, other, (), wide, allowed))
    if not claims:
        raise NotCompared(f"wrong in {narrow} already, which the check judges")
    return claims


def empty_row(bench: Bench, given: Given) -> Trials:
    """INV-12: accumulation where a row has no token."""
    if not summed_outputs(bench) or "mask" not in bench.spec["inputs"]:
        raise DoesNotApply("no mean or sum over tokens")
    mask = mask_of(bench, given)
    if len(mask) < 2 or not all(any(row) for row in mask):
        raise NotCompared("no row to empty")
    emptied = [*mask[:-1], [False] * len(mask[-1])]
    for what, claims in micro_batches(bench, replace(given, inputs={**given.inputs, bench.mask: emptied})):
        yield f"the last row without tokens, {what}", claims


# --- micro-batches ------------------------------------------------------------------------------------------


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to split rows into at least two parts, whole halves before single rows."""

    def every(rest: list[int]) -> Iterator[list[list[int]]]:
        if not rest:
            yield []
            return
        head, tail = rest[0], rest[1:]
        for smaller in every(tail):
            yield [[head], *smaller]
            for i, part in enumerate(smaller):
                yield [*smaller[:i], [head, *part], *smaller[i + 1 :]]

    yield from sorted((sorted(split) for split in every(items) if len(split) > 1), key=len)


def summed_outputs(bench: Bench) -> dict[str, bool]:
    """The outputs that are means or sums over the batch, and whether an `aggregation` says of what."""
    outputs = {name: about for name, about in bench.spec["outputs"].items() if about["shape"] == []}
    batched = any("B" in about["shape"] for about in bench.spec["inputs"].values())
    return {name: "aggregation" in about["axes"] for name, about in outputs.items()} if batched else {}


def held_by(bench: Bench, given: Given) -> int:
    """Tokens, or rows where the op knows no tokens."""
    return sum(map(sum, given.inputs["mask"])) if "mask" in given.inputs else rows(bench, given)


def weight(bench: Bench, given: Given, part: Given, aggregated: bool, how: dict):
    """What a micro-batch weighs in the batch (INV-6), as a number of the oracle."""
    mode = how.get("aggregation") if aggregated else "token_mean"
    if mode == "token_sum":
        return literal(1)

    def size(some: Given) -> Fraction:
        if "mask" not in some.inputs or mode == "plain_mean":
            return Fraction(rows(bench, some))
        if mode == "token_mean":
            count = Fraction(held_by(bench, some))
            return count + Fraction(1e-8) if how.get("denominator") == "n+1e-8" else count
        mask = some.inputs["mask"]
        return Fraction(len(mask) if how.get("empty_rows") == "counted" else sum(any(row) for row in mask))

    whole = size(given)
    return literal(size(part)) / literal(whole) if size(part) else ZERO


def pieces(bench: Bench, given: Given, split: list[list[int]]) -> dict[str, list]:
    """The weighted sum over micro-batches in the oracle's numbers: what it may be off by."""
    how = {axis: bench.values(axis, given)[0] for axis in axes_of(bench.spec)}
    return _summed(bench, given, split, how, lambda part: bench.exact(part))


def _summed(bench: Bench, given: Given, split: list[list[int]], how: dict, answers: Callable) -> dict[str, list]:
    """Σ w_k·L_k for every output and, row by row, gradient."""
    aggregated = summed_outputs(bench)
    loss = next(iter(bench.spec["outputs"]))
    terms: dict[str, list] = {name: [] for name in aggregated}
    gradients: dict[str, dict[int, list]] = {f"grad_{name}": {} for name in differentiated(bench.op)}
    for kept in split:
        part = chosen(bench, given, kept)
        found = None
        for name in aggregated:
            share = weight(bench, given, part, aggregated[name], how)
            if not share.value:
                continue
            found = found or answers(part)
            if name in found:
                terms[name].append(share * found[name][0])
        for name in gradients:
            share = weight(bench, given, part, aggregated[loss], how)
            found = found or (answers(part) if share.value else None)
            for i, row in enumerate(kept):
                if found is None:
                    width = len(given.inputs[name[5:]][0]) if isinstance(given.inputs[name[5:]][0], list) else 1
                    gradients[name][row] = [ZERO] * width
                elif name in found:
                    width = len(found[name]) // len(kept)
                    gradients[name][row] = [share * g for g in found[name][i * width : (i + 1) * width]]
    summed = {name: [total(numbers)] for name, numbers in terms.items() if numbers}
    for name, by_row in gradients.items():
        if len(by_row) == rows(bench, given):
            summed[name] = [number for row in sorted(by_row) for number in by_row[row]]
    return summed


def against(bench: Bench, given: Given, answer: dict, bounds: dict[str, list]) -> list[Claim]:
    """Claims that an accumulated answer is the whole batch's."""
    return compared(
        bench,
        given,
        answer,
        relation=lambda part, index, value: (value, (bound(bounds[part][_flat(bench, given, part, index)]),)),
        skip=tuple(part for part in answer if part not in bounds),
    )


def _flat(bench: Bench, given: Given, part: str, index: tuple[int, ...]) -> int:
    shape = bench.ask(given)[part]["shape"]
    return positions(shape).index(index)


def accumulated(bench: Bench, given: Given, split: list[list[int]]) -> list[Claim]:
    """The trainer's own accumulation against the batch in one piece."""
    return against(bench, given, bench.ask(given, parts=split), pieces(bench, given, split))


def spread_over(bench: Bench, given: Given, held: list[list[list[int]]]) -> list[Claim]:
    """What every rank has after the trainer's own accumulation and the averaging, against the batch in one piece."""
    assert bench.ranks is not None
    try:
        answers = bench.ranks.ask([bench.request(given, parts=parts) for parts in held])
    except AdapterError as problem:
        raise NotCompared(f"a rank does not start: {problem}") from None
    bounds = pieces(bench, given, [part for parts in held for part in parts])
    return [claim for answer in answers for claim in against(bench, given, parts_of(answer), bounds)]


def composed(bench: Bench, given: Given, split: list[list[int]]) -> list[Claim]:
    """Micro-batches composed by the clause's weights against the batch in one piece.

    Where the check left several aggregations or ways to count rows, one of them has to fit.
    """
    before = bench.ask(given)
    names = [axis for axis in ("aggregation", "empty_rows", "denominator") if axis in axes_of(bench.spec)]
    best: list[Claim] | None = None
    for values in itertools.product(*(bench.values(axis, given) for axis in names)):
        how = dict(zip(names, values, strict=True))

        def lifted(part: Given) -> dict[str, list]:
            return {name: [_lifted(x) for x in array["data"]] for name, array in bench.ask(part).items()}

        got = _summed(bench, given, split, how, lifted)
        answer = {
            name: {**before[name], "data": [to_float(number) for number in numbers]}
            for name, numbers in got.items()
            if name in before
        }
        claims = against(bench, given, answer, _summed(bench, given, split, how, bench.exact))
        if best is None or worst(claims, bench.dtype) < worst(best, bench.dtype):
            best = claims
    assert best is not None
    return best


def _lifted(x: float) -> Number:
    return lift(x) if math.isfinite(x) else NAN


def worst(claims: list[Claim], dtype: str) -> float:
    """The largest share of the tolerance."""
    return max((claim.share(dtype) for claim in claims), default=0.0)


# --- running ------------------------------------------------------------------------------------------------

INVARIANCES: dict[str, Callable[[Bench, Given], Trials]] = {
    "INV-1": masked_numbers,
    "INV-2": masked_nan,
    "INV-3": row_order,
    "INV-4": more_padding,
    "INV-5": padding_side,
    "INV-6": micro_batches,
    "INV-7": over_ranks,
    "INV-8": shifted_values,
    "INV-9": scaled_rewards,
    "INV-10": first_step,
    "INV-11": wider,
    "INV-12": empty_row,
}


@dataclass(frozen=True)
class Failure:
    """A changed input whose answer is not what the other one implies."""

    what: str
    share: float
    claim: Claim | None
    problem: str


def examine(bench: Bench, label: str, bases: list[Given]) -> Finding:
    """What becomes of one invariance over some inputs; the first failure is made as small as it gets.

    Args:
        bench: the op.
        label: the clause.
        bases: inputs to change.
    """
    finding = Finding(label, bench.op, clauses()[label]["level"], "not-compared", dtype=bench.dtype)
    reasons: dict[str, None] = {}
    for given in bases:
        failure = first_failure(bench, label, given, finding, reasons)
        if failure is not None:
            finding.given, failure = smallest(bench, label, given, failure)
            finding.verdict, finding.use = "fails", failure.share
            finding.what, finding.claim, finding.problem = failure.what, failure.claim, failure.problem
            return finding
    if finding.verdict == "not-compared":
        finding.reason = "; ".join(reasons)
        finding.verdict = "not-compared" if reasons else "does-not-apply"
    elif label == "INV-6" and not bench.offer["accumulated"]:
        finding.reason = "composed by the clause's weights, since the adapter drives no accumulation"
    return finding


def first_failure(
    bench: Bench, label: str, given: Given, finding: Finding | None = None, reasons: dict | None = None
) -> Failure | None:
    """The first change of an input that breaks an invariance; what is learned on the way goes into finding and reasons."""
    finding, reasons = finding or Finding(label, bench.op, "", ""), {} if reasons is None else reasons
    trials = INVARIANCES[label](bench, given)
    while True:
        try:
            what, ask = next(trials)
        except StopIteration:
            return None
        except NotCompared as reason:
            if not isinstance(reason, DoesNotApply):
                reasons[str(reason)] = None
            return None
        try:
            claims = ask()
        except NotCompared as reason:
            reasons[str(reason)] = None
            continue
        except Raised as problem:
            return Failure(what, math.inf, None, str(problem))
        share = worst(claims, bench.dtype)
        finding.trials += 1
        if share > 1 and not (bench.dtype == "float64" and worst(claims, "float32") <= 1):
            claim = next(claim for claim in claims if claim.share(bench.dtype) > 1)
            return Failure(what, claim.share(bench.dtype), claim, "")
        if share > 1 or finding.verdict == "coarse":
            finding.verdict = "coarse"
        else:
            finding.verdict = "holds"
        finding.use = max(finding.use, share)


def smallest(bench: Bench, label: str, given: Given, failure: Failure) -> tuple[Given, Failure]:
    """Takes out rows, then columns, as long as the invariance still fails."""
    while True:
        for candidate in smaller(bench, given):
            found = first_failure(bench, label, candidate)
            if found is not None and (found.claim is None) == (failure.claim is None):
                given, failure = candidate, found
                break
        else:
            return given, failure


def smaller(bench: Bench, given: Given) -> Iterator[Given]:
    """The input without two rows (ranks need an even number), one row, or one column; no row loses its last token."""
    counts = {"B": rows(bench, given)}
    for name, about in bench.spec["inputs"].items():
        if len(about["shape"]) > 1:
            counts.setdefault(about["shape"][1], len(given.inputs[name][0]))
    least = {"L": 2}  # the first token has no log-probability
    for axis, size in counts.items():
        pairs = list(itertools.combinations(range(size), 2)) if axis == "B" else []
        for out in [*pairs, *((i,) for i in range(size))]:
            if size - len(out) < least.get(axis, 1):
                continue
            candidate = changed(bench, given, axis, partial(_without, out))
            if bench.mask is None or all(any(row) for row in candidate.inputs[bench.mask]):
                yield candidate


def _without(out: tuple[int, ...], items: list) -> list:
    return [x for i, x in enumerate(items) if i not in out]


def kind(given: Given) -> str:
    """Every position counts; right-padded; left-padded; with holes."""
    mask = next((nested for name, nested in given.inputs.items() if name.endswith("mask")), None)
    if mask is None or all(all(row) for row in mask):
        return "full"
    if any(list(row) != sorted(row, reverse=True) for row in mask):
        return "left" if all(list(row) == sorted(row) for row in mask) else "holes"
    return "right"


def bases(bench: Bench) -> list[Given]:
    """Some of the op's `must` inputs that the adapter takes: one of each kind, with an odd and with an even number of rows.

    Each is asked in the first way that the adapter offers, and in those that differ from it on one axis.
    """
    found: dict[tuple, Given] = {}
    for case in load(bench.op):
        if case.level != "must" or case.edge or case.precision:
            continue
        first, *others = calls(case, bench.offer)
        for axes in [first, *(axes for axes in others if sum(axes[axis] != first[axis] for axis in axes) == 1)]:
            given = Given(case.inputs, case.params, axes)
            key = (kind(given), rows(bench, given) % 2, json.dumps(axes))
            if key not in found:
                try:
                    bench.ask(given)
                except (NotCompared, Raised):
                    continue
                found[key] = given
    return list(found.values())


def check(session, found, ranks: Ranks | None, progress=None) -> list[Finding]:
    """Examines every invariance of every op of a check.

    Args:
        session: the adapter that was checked.
        found: the check (conformance/result.py), which says what the adapter offers and which variants it has.
        ranks: processes that hold the adapter too, or None where it cannot be loaded there.
        progress: called with (op, invariances done, invariances in all).
    """
    dtype = next(dtype for dtype in DTYPES if dtype in found.dtypes)
    reports = [report for report in found.ops if report.op in found.hello["ops"] and found.attempts.get(report.op)]
    findings: list[Finding] = []
    for done, report in enumerate(reports, 1):
        offer = found.hello["ops"][report.op]
        bench = Bench(session, report.op, offer, report.variant, dtype, found.dtypes, found.device, ranks)
        inputs = bases(bench)
        findings += [examine(bench, label, inputs) for label in INVARIANCES]
        if progress:
            progress(report.op, done, len(reports))
    return findings


def failing(findings: list[Finding], level: str) -> list[Finding]:
    """The failures that decide the exit code."""
    deciding = LEVELS[: LEVELS.index(level) + 1]
    return [finding for finding in findings if finding.verdict == "fails" and finding.level in deciding]


def document(finding: Finding) -> dict:
    """A finding as the result file holds it."""
    row: dict = {
        "clause": finding.clause,
        "op": finding.op,
        "level": finding.level,
        "verdict": finding.verdict,
        "dtype": finding.dtype,
        "trials": finding.trials,
        "use": plain(finding.use),
    }
    if finding.reason:
        row["reason"] = finding.reason
    if finding.given is not None:
        row["change"] = finding.what
        if finding.problem:
            row["problem"] = finding.problem
        if finding.claim is not None:
            row |= {"output": finding.claim.part, "index": list(finding.claim.index)}
            row |= {"got": plain(finding.claim.got), "want": plain(finding.claim.want)}
        row["smallest"] = {
            "inputs": _plain(finding.given.inputs),
            "params": _plain(finding.given.params),
            "axes": finding.given.axes,
        }
    return row


def _plain(value):
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return plain(value) if isinstance(value, float) else value
