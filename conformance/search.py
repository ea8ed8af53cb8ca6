"""Searches random inputs for one on which an adapter is wrong, and shrinks it (`goldenppo fuzz`).

Hypothesis draws the inputs, the exact oracle answers them under the variant that the adapter implements, the tolerance law
decides. Every input is one that a fixture might hold: exact in bfloat16 and float16, its masked slots full of poison.

Inputs come in three levels, those of spec/levels.md, each of which holds the one before:

    must    the formula on ordinary values: log-ratios up to 1, poison that is large and finite
    should  values of every size that 16 bits hold: tails, cancellation, confident tokens
    robust  NaN and infinities in masked slots, rows without tokens
"""

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.errors import NoSuchExample

from goldenppo.conformance import files
from goldenppo.conformance import judge as judging
from goldenppo.conformance.cases import LEVELS, Case, load, parse, table
from goldenppo.conformance.judge import OpReport
from goldenppo.conformance.result import Check
from goldenppo.conformance.run import Attempt, attempts
from goldenppo.fixtures.generate import SCHEMA, build_case, canonical
from goldenppo.fixtures.lint import NEAREST_EDGE
from goldenppo.fixtures.recipes import draw as recipes

ROWS, WIDTH = 4, 6  # the oracle is slow on more, and nothing new happens there
BATCH = 200  # inputs of one run of Hypothesis; a search is a sequence of them
SHRINK_SECONDS = 20.0
CLEAR = 10.0  # shrinking goes no nearer to the tolerance than this many of it, so that a failure stays one elsewhere
SHARES = (0.5, 0.25, 0.25)  # of an op's time, by level
MOST_TEMPLATES = 8
WELL_CONDITIONED, CONDITIONED = 2.0**8, 2.0**14  # gauges of whitened numbers up to which a running bound says something

# --- numbers ------------------------------------------------------------------------------------------------


def simple(low: float, high: float) -> list[float]:
    """Numbers of [low, high] ⊂ (-4, 4) that 16 bits hold exactly: quarters, then 64ths, those near 0 first.

    One list, and so one draw a number, and shrinking goes towards its start.
    """
    found = [n / 64 for n in range(math.ceil(low * 64), math.floor(high * 64) + 1)]
    return sorted(found, key=lambda x: (x * 4 % 1 != 0, abs(x), x < 0))


def wild(negative: bool = False) -> st.SearchStrategy[float]:
    """Numbers of any size that bfloat16 and float16 hold exactly; negative ones as log-probs are, down to -255."""
    size = st.builds(lambda m, e: m * 2.0**e, st.integers(1, 255), st.integers(-14, 0 if negative else 8))
    return size.map(lambda x: -x) if negative else st.builds(lambda x, sign: -x if sign else x, size, st.booleans())


TINY = [x / 256 for x in simple(-0.25, 0.25)]  # several of them have a variance near the usual epsilons


def number(level: str, limit: float = 2.0) -> st.SearchStrategy[float]:
    """An input number, at most `limit` in size at level must."""
    ordinary = st.sampled_from(simple(-limit, limit))
    return ordinary if level == "must" else ordinary | wild() | st.sampled_from(TINY)


# Steps from an old number to a new one that are clear of the usual clips, whose edges a comparison at 16 bits must avoid.
CLEAR_STEPS = [0.0, 0.5, -0.5, 0.75, -0.75, 1.0, -1.0, 0.0625, -0.0625, 0.625, -0.875]


def step(clear: bool) -> st.SearchStrategy[float]:
    """A log-ratio, or how far a value moves."""
    return st.sampled_from(CLEAR_STEPS if clear else simple(-1.0, 1.0))


def pair(level: str, clear: bool) -> st.SearchStrategy[tuple[float, float]]:
    """A new and an old (or reference) log-prob; at most 1 apart at level must."""
    near = st.builds(lambda ell, d: (ell + d, ell), st.sampled_from(simple(-2.75, -65 / 64)), step(clear))
    return near if level == "must" else near | st.tuples(wild(negative=True), wild(negative=True))


def move(level: str, clear: bool) -> st.SearchStrategy[tuple[float, float]]:
    """A value and an old one; at most 1 apart at level must."""
    near = st.builds(lambda old, d: (old + d, old), st.sampled_from(simple(-2.0, 2.0)), step(clear))
    return near if level == "must" else near | st.tuples(number(level), number(level))


# --- inputs -------------------------------------------------------------------------------------------------


# What stands at one position, for every op whose inputs are [B, T] with a mask: a tuple in the op table's order.
TOKENS: dict[str, Callable[[str, bool], st.SearchStrategy[tuple]]] = {
    "ratio": pair,
    "policy_loss": lambda level, clear: st.builds(lambda two, A: (*two, A), pair(level, clear), number(level)),
    "value_loss": lambda level, clear: st.builds(lambda two, R: (*two, R), move(level, clear), number(level)),
    "shaped_rewards": pair,
    "gae": lambda level, clear: st.tuples(number(level, 1.0), number(level)),
    "whiten": lambda level, clear: st.tuples(number(level)),
    "aggregate": lambda level, clear: st.tuples(number(level)),
    "experience": lambda level, clear: st.builds(lambda two, V: (*two, V), pair(level, clear), number(level)),
    "end_score": lambda level, clear: st.tuples(number(level)),
}
POISON = {True: (-57.0, -0.0625, -43.5, -29.25), False: (744.0, -1888.0, 1616.0, -920.0)}  # by: is a log-prob
NOT_NUMBERS = (math.nan, math.inf, -math.inf)
READ_AFTER = ("shaped_rewards", "experience")  # the slot after the last token is read by some variants
ORDINARY = {True: (-1.5, -1.25), False: (0.75, -0.5)}
WHITENED = {"whiten": ("whitened",), "gae": ("advantages",), "experience": ("advantages",)}


@functools.cache
def _slots(op: str, level: str, clear: bool) -> st.SearchStrategy:
    """A token, and a mark that makes it a hole where there are some."""
    return st.tuples(TOKENS[op](level, clear), st.integers(0, 3))


@st.composite
def masked(draw, op: str, level: str, full: bool) -> dict:
    """Inputs [B, T] and their mask: rows of tokens, holes between them, padding on one side; and what else a row has.

    Rows are lists of tokens, so that shrinking can take out a token or a row.
    """
    slots = st.lists(_slots(op, level, draw(st.booleans())), min_size=1, max_size=WIDTH)
    if op in READ_AFTER:
        drawn = draw(st.lists(st.tuples(slots, number(level, 3.5), st.booleans()), min_size=1, max_size=ROWS))
        rows, beside = [row[0] for row in drawn], {"scores": [row[1] for row in drawn], "ended": [row[2] for row in drawn]}
    else:
        rows, beside = draw(st.lists(slots, min_size=1, max_size=ROWS)), {}
    holes, on_the_left, extra, turn = draw(st.tuples(st.booleans(), st.booleans(), st.integers(0, 1), st.integers(0, 3)))
    special = level == "robust" and draw(st.booleans())
    empty = draw(st.integers(0, ROWS)) if level == "robust" else 0  # the row of that number has no token, if there are others
    if full:
        width = min(map(len, rows))
        rows, holes, extra, empty = [row[:width] for row in rows], False, 0, 0
    counts = [[not (holes and mark == 3) for _, mark in row] for row in rows]
    for b, row in enumerate(counts, start=1):
        if b == empty and len(rows) > 1:
            row[:] = [False] * len(row)
        elif not any(row):
            row[0] = True
    width = max(map(len, rows)) + extra
    mask = [_padded(row, width, on_the_left, False) for row in counts]
    tokens = [_padded([token for token, _ in row], width, on_the_left, None) for row in rows]
    names = [name for name, about in table()["ops"][op]["inputs"].items() if about["shape"] == ["B", width_name(op)]]
    read = recipes.after_last(mask) if op in READ_AFTER else [[False] * width for _ in mask]
    inputs: dict = {}
    for k, name in enumerate(names[:-1]):
        logprobs = name.endswith("logprobs")
        poison = NOT_NUMBERS if special else POISON[logprobs]
        inputs[name] = [
            [
                token[k] if on else ORDINARY[logprobs][k % 2] if after else poison[(turn + k + 3 * b + t) % len(poison)]
                for t, (token, on, after) in enumerate(zip(*row, strict=True))
            ]
            for b, row in enumerate(zip(tokens, mask, read, strict=True))
        ]
    return {**inputs, **beside, names[-1]: mask}


def _padded(row: list, width: int, on_the_left: bool, pad) -> list:
    missing = [pad] * (width - len(row))
    return missing + row if on_the_left else row + missing


def width_name(op: str) -> str:
    """The name of the second axis of an op's inputs."""
    return next(about["shape"][1] for about in table()["ops"][op]["inputs"].values() if len(about["shape"]) > 1)


def rectangle(position: st.SearchStrategy, shortest: int = 1) -> st.SearchStrategy[list[list]]:
    """Rows of equal length, cut to the shortest one."""
    row = st.lists(position, min_size=shortest, max_size=WIDTH)
    return st.lists(row, min_size=1, max_size=ROWS).map(lambda rows: [row[: min(map(len, rows))] for row in rows])


def columns(rows: list, names: tuple[str, ...]) -> dict:
    """A list of tuples, or a list of rows of them, as one nested list per name."""
    if isinstance(rows[0], list):
        return {name: [[position[k] for position in row] for row in rows] for k, name in enumerate(names)}
    return {name: [position[k] for position in rows] for k, name in enumerate(names)}


@st.composite
def logits(draw, op: str, level: str) -> dict:
    """Logits over two to four tokens, in [-3, 3] at level must; tokens where the op has some."""
    vocabulary = draw(st.integers(2, 4))
    position = st.tuples(st.tuples(*[number(level, 3.0)] * vocabulary), st.integers(0, vocabulary - 1))
    rows = draw(rectangle(position, 2 if op == "token_logprobs" else 1))
    made = columns([[(list(z), y) for z, y in row] for row in rows], ("logits", "tokens"))
    return made if op == "token_logprobs" else {"logits": made["logits"]}


@st.composite
def token_pairs(draw, level: str, pad_id: int) -> dict:
    """Scored answers of a pair; nothing but pads follows a pad, as in a batch that a tokenizer made."""
    limit = 1.5 if level == "must" else 2.0
    position = st.tuples(number(level, limit), number(level, limit), st.integers(0, 3), st.integers(0, 3))
    made = columns(draw(rectangle(position)), ("chosen", "rejected", "chosen_tokens", "rejected_tokens"))
    for name in ("chosen_tokens", "rejected_tokens"):
        made[name] = [_ended([pad_id + n for n in row], pad_id) for row in made[name]]
    return made


def _ended(tokens: list[int], pad_id: int) -> list[int]:
    return [pad_id if pad_id in tokens[: t + 1] else token for t, token in enumerate(tokens)]


def flat(op: str, level: str) -> st.SearchStrategy[dict]:
    """Inputs of the ops that have neither a mask nor logits."""
    if op == "kl_penalty":
        return rectangle(pair(level, False)).map(lambda rows: columns(rows, ("logprobs", "ref_logprobs")))
    if op == "reward_model_loss":
        two = st.tuples(number(level, 1.5), number(level, 1.5), st.sampled_from([0.0, 0.25, 1.0, 1.5]))
        return st.lists(two, min_size=1, max_size=ROWS).map(lambda rows: columns(rows, ("chosen", "rejected", "margin")))
    if op == "dpo_loss":
        names = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
        both = st.builds(lambda c, r: (c[0], r[0], c[1], r[1]), pair(level, False), pair(level, False))
        return st.lists(both, min_size=1, max_size=ROWS).map(lambda rows: columns(rows, names))
    if op == "kl_controller":
        return st.lists(number(level, 3.5), min_size=1, max_size=WIDTH).map(lambda kl: {"kl": kl})
    return st.fixed_dictionaries({name: number(level) for name in table()["ops"][op]["inputs"]})


# --- parameters ---------------------------------------------------------------------------------------------


def hundredths(low: int, high: int) -> st.SearchStrategy[float]:
    """Parameters as people write them: two decimals."""
    return st.integers(low, high).map(lambda n: n / 100)


UNIT = st.sampled_from([1.0, 0.0]) | hundredths(50, 99)
VALUES: dict[str, st.SearchStrategy] = {
    "temperature": st.sampled_from([1.0, 0.5, 2.0]) | hundredths(30, 200),
    "clip_low": hundredths(10, 30),
    "clip_high": hundredths(10, 30),
    "clip": hundredths(10, 30),
    "dual_clip": st.integers(6, 16).map(lambda n: n / 4),
    "horizon": st.integers(1, 16),
    "kl_coef": hundredths(1, 50),
    "score_clip": st.integers(2, 20).map(lambda n: n / 4),
    "eos_penalty": st.integers(-8, 8).map(lambda n: n / 4),
    "gamma": UNIT,
    "lam": UNIT,
    "init_coef": hundredths(1, 50),
    "target": st.integers(1, 24).map(lambda n: n / 4),
    "batch_size": st.integers(8, 512),
    "beta": hundredths(5, 100),
    "label_smoothing": hundredths(1, 45),
    "vf_coef": hundredths(0, 100),
    "entropy_coef": hundredths(0, 100),
    "kl_loss_coef": hundredths(0, 100),
    "pad_id": st.integers(0, 3),
}
OTHER_VALUES = {("kl_controller", "horizon"): st.integers(100, 10000)}


@dataclass(frozen=True)
class Template:
    """Parameters that the adapter took on a fixture, and the groups of them that it takes with other values."""

    params: dict
    free: tuple[tuple[str, ...], ...]  # the members of a group share one value

    def strategy(self, op: str) -> st.SearchStrategy[dict]:
        """The parameters of a case; those that have a value per row are drawn with the rows."""
        drawn = [OTHER_VALUES.get((op, group[0]), VALUES[group[0]]) for group in self.free]
        return st.tuples(*drawn).map(
            lambda values: {
                **self.params,
                **{name: value for group, value in zip(self.free, values, strict=True) for name in group},
            }
        )


# --- what is searched ---------------------------------------------------------------------------------------


@dataclass
class Target:
    """One op of an adapter: what a check found out about it and so what a search may ask."""

    session: object
    op: str
    offer: dict
    dtypes: tuple[str, ...]
    device: str
    report: OpReport  # of the check
    attempts: list[Attempt]  # of the check
    left: dict[str, list[tuple]]  # output → variants that it may have, over the axes that a call leaves open
    templates: list[Template]
    full: bool  # only cases in which every position counts


@dataclass(frozen=True)
class Input:
    """One drawn input: what a case holds before its answers, and the axes to ask for."""

    inputs: dict
    params: dict
    axes: dict

    @property
    def key(self) -> str:
        """Equal for equal contents."""
        return json.dumps([self.inputs, self.params, self.axes], sort_keys=True)

    @property
    def size(self) -> tuple:
        """How much there is to read: slots, rows, then characters."""
        rows, positions = map(max, zip(*map(shape, self.inputs.values()), strict=True))
        return rows * positions, rows, len(self.key), self.key


def shape(nested) -> tuple[int, int]:
    """Rows and positions of an input; 1 where it has no such axis."""
    rows = len(nested) if isinstance(nested, list) else 1
    return rows, len(nested[0]) if isinstance(nested, list) and isinstance(nested[0], list) else 1


@dataclass
class Failure:
    """An input on which the adapter is wrong."""

    given: Input
    level: str
    raw: dict  # as a fixture file holds it
    report: OpReport
    attempts: list[Attempt]
    use: float


@dataclass
class Outcome:
    """What the search of one op came to."""

    op: str
    cases: int = 0  # inputs tried
    compared: int = 0  # of them, those that some dtype could compare
    seconds: float = 0.0
    levels: list[str] = field(default_factory=list)  # searched
    failure: Failure | None = None  # the smallest
    first: Failure | None = None  # before it was shrunk
    last: Input | None = None  # tried


def targets(session, check: Check) -> list[Target]:
    """The ops of a check that can be searched.

    Args:
        session: the adapter that was checked.
        check: the check, whose attempts say what the adapter takes and which variants it has.
    """
    found = []
    for report in check.ops:
        answered = [attempt for attempt in check.attempts.get(report.op, []) if "result" in attempt.answer]
        dtypes = check.dtypes
        if report.precision == "coarse":  # it computes in float32, so what float64 says is known already
            dtypes = tuple(dtype for dtype in dtypes if dtype != "float64")
        if not answered or not dtypes:
            continue
        offer = check.hello["ops"][report.op]
        left = variants_left(report, answered)
        full = bool(offer["missing"]) or all(
            any(value in table()["unmasked"].get(axis, []) for axis, value in variant) for variant in next(iter(left.values()))
        )
        target = Target(session, report.op, offer, dtypes, check.device, report, answered, left, [], full)
        target.templates = templates(target)
        found.append(target)
    return found


def variants_left(report: OpReport, answered: list[Attempt]) -> dict[str, list[tuple]]:
    """For each output that the adapter returns, the variants that it may have over the axes that a call leaves open.

    Those of the check; where no variant agrees with the fixtures, the one of the deviation that explains the numbers, else
    the nearest one.
    """
    matched = {id(attempt): judging.matches(attempt, {}) for attempt in answered}
    must = [attempt for attempt in answered if attempt.case.level == "must"]
    later = [attempt for attempt in answered if attempt.case.level != "must"]
    wrong = any(verdict.case.level == "must" for verdict in report.failed)
    named = report.matches[0].variant if wrong and report.matches and report.matches[0].exact else {}
    left = {}
    for output, about in table()["ops"][report.op]["outputs"].items():
        returned = [attempt for attempt in answered if output in attempt.answer["result"]["outputs"]]
        if not returned:
            continue
        axes = about["axes"]
        found = judging.identify(output, axes, must, later, matched) or _nearest(output, axes, returned, matched)
        agreeing = {variant for variant in found if all(named.get(axis, value) == value for axis, value in variant)}
        explained = {tuple((axis, named.get(axis, value)) for axis, value in variant) for variant in found}
        left[output] = sorted(agreeing or explained, key=str)
    return left


def _nearest(output: str, axes: list[str], returned: list[Attempt], matched: dict) -> set[tuple]:
    """The variants of the answers that lie nearest to what was returned, over all cases together."""
    distances: dict[tuple, float] = {}
    for attempt in returned:
        for match in matched[id(attempt)][output]:
            for variant in judging.cover(match.entry.when, axes, attempt):
                distances[variant] = distances.get(variant, 0.0) + min(match.use, 1e9)
    least = min(distances.values(), default=0.0)
    return {variant for variant, distance in distances.items() if distance == least}


def templates(target: Target) -> list[Template]:
    """The parameters that the adapter takes, learned by asking: those of the fixtures, and which of them may change."""
    spec = table()["ops"][target.op]
    found: dict[str, Template] = {}
    for attempt in target.attempts:
        params = attempt.case.params
        key = json.dumps(params)
        if key in found or attempt.case.level != "must" or attempt.dtype not in target.dtypes:
            continue
        plain = [name for name, value in params.items() if value is not None and not isinstance(value, list)]
        groups = [tuple(name for name in names if name in plain) for names in spec.get("alias", {}).values()]
        free = []
        for name in plain:
            tied = next((group for group in groups if name in group), (name,))
            if _taken(target, attempt, (name,)):
                free.append((name,))
            elif len(tied) > 1 and tied not in free and _taken(target, attempt, tied):
                free.append(tied)
        found[key] = Template(params, tuple(free))
        if len(found) == MOST_TEMPLATES:
            break
    return list(found.values())


def _taken(target: Target, attempt: Attempt, names: tuple[str, ...]) -> bool:
    """Whether the adapter answers when these parameters have another value than in the fixture."""
    params, case = attempt.case.params, attempt.case
    value = params[names[0]]
    other = value + 1 if isinstance(value, int) else 0.75 * value if value else 0.25
    changed = replace(case, params={**params, **{name: other for name in names}})
    offer = {**target.offer, "variants": attempt.axes}
    return all("unsupported" not in item.answer for item in _call(target, changed, offer, (attempt.dtype,)))


def _call(target: Target, case: Case, offer: dict, dtypes: tuple[str, ...]) -> list[Attempt]:
    return list(attempts(target.session, target.op, offer, [case], dtypes, target.device))


@st.composite
def inputs_of(draw, target: Target, level: str) -> Input:
    """Everything that one call needs."""
    op = target.op
    axes = {}
    for axis in target.offer["axes"]:
        if axis not in target.offer["variants"]:
            barred = target.offer["withheld"].get(axis, [])
            axes[axis] = draw(st.sampled_from([value for value in table()["axes"][axis] if value not in barred]))
    template = draw(st.sampled_from(target.templates))
    full = target.full or any(value in table()["unmasked"].get(axis, []) for axis, value in axes.items())
    params = draw(template.strategy(op))
    if op in TOKENS:
        given = draw(masked(op, level, full))
    elif op in ("token_logprobs", "entropy"):
        given = draw(logits(op, level))
    elif op == "reward_model_token_loss":
        given = draw(token_pairs(level, params["pad_id"]))
    else:
        given = draw(flat(op, level))
    shaped = {name: given[name] for name, value in params.items() if isinstance(value, list)}
    return Input({name: given[name] for name in table()["ops"][op]["inputs"]}, {**params, **shaped}, axes)


# --- one input ----------------------------------------------------------------------------------------------


def examine(target: Target, given: Input, level: str, seed: int = 0) -> tuple[bool, Failure | None]:
    """Calls the adapter on one input and judges what comes back.

    Returns:
        Whether something could be compared, and the failure. Nothing can be compared where the adapter does not offer the
        combination, and where no right answer can be held against rounding (a variance of 0, 0/0).
    """
    op, spec = target.op, table()["ops"][target.op]
    asked = {**target.offer["variants"], **given.axes}
    blank = Case("", op, (), "must", "", given.params, given.inputs, {}, (), {})
    called = _call(target, blank, {**target.offer, "variants": asked}, target.dtypes)
    if all("unsupported" in attempt.answer for attempt in called):
        return False, None
    full = blank.full or "mask" not in given.inputs
    chosen = {}
    for output, variants in target.left.items():
        axes = spec["outputs"][output]["axes"]
        whole = [tuple((axis, {**dict(variant), **asked}[axis]) for axis in axes) for variant in variants]
        unmasked = table()["unmasked"]
        defined = [v for v in whole if full or not any(value in unmasked.get(axis, []) for axis, value in v)]
        if defined:
            chosen[output] = defined
    raw = answered(op, given, chosen, level, seed) if chosen else None
    if raw is None:
        return False, None
    case = parse(json.dumps({"schema": SCHEMA, "op": op, "cases": [raw]}), op)[0]
    made = [replace(attempt, case=case) for attempt in called if not case.edge or attempt.dtype in ("float64", "float32")]
    report = judging.judge(op, made, "must", forgiving=False)
    if report.failed:
        return True, Failure(given, level, raw, report, made, max(verdict.use for verdict in report.failed))
    return any(verdict.verdict == "pass" for verdict in report.cases), None


def answered(op: str, given: Input, chosen: dict[str, list[tuple]], level: str, seed: int) -> dict | None:
    """The input as a fixture file holds it, with the oracle's answers; None where no finite answer can be held to a law."""
    name = f"{op}/fuzz-{hashlib.sha256(given.key.encode()).hexdigest()[:12]}"
    label = f"{table()['ops'][op]['label']}-1"
    purpose = f"Found by goldenppo fuzz with seed {seed}: {LEVEL_WORDS[level]}."
    case = recipes.Case(name, [label], "must", purpose, given.inputs, given.params, seed)
    try:
        raw = build_case(case, op, table(), chosen)
        if raw["margin"] is not None and raw["margin"] < NEAREST_EDGE and _has_sides(op):
            raw = build_case(replace(case, edge=True), op, table(), chosen)
            if "clip_fraction" in chosen:  # a count: which side of the edge a token falls on is not for the law to say
                raw["answers"]["clip_fraction"] = [{**e, "value": None} for e in raw["answers"]["clip_fraction"]]
    except (ValueError, ZeroDivisionError):
        return None
    if any(word in json.dumps(raw["answers"]) for word in ('"nan"', '"inf"', '"-inf"')):
        return None
    gauge = _whitened_gauge(op, chosen, raw)
    if gauge > (WELL_CONDITIONED if level == "must" else CONDITIONED):
        return None
    if gauge > WELL_CONDITIONED:
        raw["edge"] = True
    source = raw.pop("source")
    return {**raw, "source": {**source, "recipe": "goldenppo fuzz"}}


LEVEL_WORDS = {
    "must": "ordinary values",
    "should": "values of any size",
    "robust": "NaN in masked slots or rows without tokens may be there",
}


def _has_sides(op: str) -> bool:
    """Whether the oracle knows both one-sided gradients on an edge; elsewhere an answer is continuous across it."""
    import goldenppo.reference.exact as exact

    return "sides" in inspect.signature(getattr(exact, op)).parameters


def _whitened_gauge(op: str, chosen: dict, raw: dict) -> float:
    """The largest gauge of the numbers that were divided by a standard deviation; 0 if none was."""
    outputs = [name for name in WHITENED.get(op, ()) if name in chosen]
    inside = any(dict(variant).get("whitening", "inside") == "inside" for name in outputs for variant in chosen[name])
    entries = [entry for name in outputs if inside for entry in raw["answers"][name]]
    return max((x for entry in entries for row in entry["gauge"] for x in row if x is not None), default=0.0)


# --- the search ---------------------------------------------------------------------------------------------


class _Stopped(BaseException):
    """The time is over, or no answer comes any more: the exception in `args`. Hypothesis would shrink an `Exception`."""


def levels_of(op: str, level: str) -> list[str]:
    """The levels that are searched, up to the one asked for; without masked slots there is nothing more to be robust to."""
    masked_op = op in TOKENS
    return [name for name in LEVELS[: LEVELS.index(level) + 1] if name != "robust" or masked_op]


def search_op(target: Target, level: str, seed: int, seconds: float, outcome: Outcome, progress=None) -> None:
    """Searches one op level by level until an input fails or the time is over.

    Args:
        target: the op.
        level: the highest level of inputs.
        seed: the search is the same for the same seed, as far as the time lets it go.
        seconds: time to search; shrinking what was found may take SHRINK_SECONDS more.
        outcome: filled in as the search goes on, so that an interrupted one has something to show.
        progress: called with the outcome every now and then.
    """
    _warm_up()
    start = time.monotonic()
    names = levels_of(target.op, level)
    whole = sum(SHARES[: len(names)])
    with no_traces():
        try:
            for name, until in zip(names, itertools.accumulate(SHARES), strict=False):
                outcome.levels.append(name)
                _search_level(target, name, seed, start + seconds * until / whole, outcome, progress)
                if outcome.failure:
                    break
        finally:
            outcome.seconds = time.monotonic() - start


@functools.cache
def _warm_up() -> None:
    """Lets Hypothesis read the constants of the sources, a second or two, before the clock of the first op starts."""
    with no_traces():
        find(st.integers(), lambda n: True, settings=settings(max_examples=1, database=None))


@contextlib.contextmanager
def no_traces():
    """Keeps the folder clean: Hypothesis would leave what it read in a .hypothesis of its own."""
    with tempfile.TemporaryDirectory() as home:
        set_hypothesis_home_dir(home)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)


def _search_level(target: Target, level: str, seed: int, deadline: float, outcome: Outcome, progress) -> None:
    """Draws inputs of one level, a batch at a time, and shrinks the first that fails."""
    strategy = inputs_of(target, level)
    how = settings(
        max_examples=BATCH,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    known: dict[str, bool] = {}
    bar, until = 0.0, deadline

    def wrong(given: Input) -> bool:
        nonlocal bar, until
        key = given.key
        if key in known:
            return known[key]
        if time.monotonic() > until:
            raise _Stopped
        outcome.last = given
        try:
            compared, found = examine(target, given, level, seed)
        except Exception as problem:
            raise _Stopped(problem) from problem
        outcome.cases += 1
        outcome.compared += compared
        if progress:
            progress(outcome)
        known[key] = found is not None and found.use >= bar
        if found and known[key]:
            if not outcome.first:
                bar, until = min(found.use, CLEAR), time.monotonic() + SHRINK_SECONDS
                outcome.first = outcome.failure = found
            if outcome.failure and given.size < outcome.failure.given.size:
                outcome.failure = found
        return known[key]

    for batch in itertools.count():
        if time.monotonic() > until or outcome.failure:
            return
        known.clear()
        try:
            find(strategy, wrong, settings=how, random=random.Random(f"{seed}:{target.op}:{level}:{batch}"))
        except NoSuchExample:
            pass
        except _Stopped as stopped:
            if stopped.args:
                raise stopped.args[0] from None


def explain(target: Target, found: Failure, first: Failure) -> OpReport:
    """The report of a failure, with the deviations that explain it, what it was shrunk from and all that the check saw.

    One small input fits many deviations; the fixtures, passed and failed, and the input before it was shrunk tell them apart.
    """
    from goldenppo.conformance.naming import name

    report = found.report
    report.precision = target.report.precision  # a single number says nothing about the precision of an op
    behind = [*target.report.cases, *first.report.cases]
    # a fixture first: its answers of every variant say which ones to try
    failed = [*target.report.failed[:1], *report.failed, *first.report.failed, *target.report.failed[1:]]
    wide = [verdict for verdict in failed if verdict.dtype in ("float64", "float32")]  # 16 bits fit too many deviations
    whole = OpReport(target.op, "does-not-conform", target.report.variant, [*report.cases, *behind], failed=wide or failed)
    report.matches = name(whole, [*found.attempts, *first.attempts, *target.attempts])
    if report.matches and report.matches[0].exact:
        judging.retell(report, report.matches[0].variant)
    return report


# --- saving -------------------------------------------------------------------------------------------------


def save(directory: Path, op: str, raw: dict) -> Path:
    """Adds a case to DIR/<op>.json, beside the cases that are there; one of the same id is replaced.

    Raises:
        UsageError: what is there is no fixture file, or the file cannot be written.
    """
    path = directory / f"{op}.json"
    load(op, directory)  # refuses a file that is none of ours
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.is_file() else []
    kept = [case for case in cases if case["id"] != raw["id"]]
    files.write(path, canonical({"schema": SCHEMA, "op": op, "cases": [*kept, raw]}))
    return path
