"""Judges what an adapter returned: attempt by attempt, then the op as a whole.

An attempt is compared with every answer of its case. Which variants an attempt agrees with is a set; an op conforms if,
for each output, one variant is left when the sets of all `must` attempts are intersected. That variant is what the trainer
implements.
"""

import functools
import itertools
from dataclasses import dataclass, field

from goldenppo.conformance.cases import Case, Entry, table
from goldenppo.conformance.law import DTYPES, in_range, telling, worst
from goldenppo.conformance.run import Attempt

LOW_PRECISION = ("float16", "bfloat16")


@dataclass(frozen=True)
class Match:
    """How one output of an attempt compares with one entry."""

    entry: Entry
    use: float  # share of the tolerance; at most 1 is right
    part: str  # the output's name, or grad_<input>
    index: int  # the element named in the report
    problem: str = ""  # set where the numbers cannot be compared at all


@dataclass
class Verdict:
    """The verdict on one case at one dtype (the worst of its attempts)."""

    case: Case
    dtype: str
    verdict: str  # pass, fail, error, unsupported, blind, out-of-range, coarse
    reason: str = ""
    use: float = 0.0
    attempt: Attempt | None = None
    output: str = ""
    match: Match | None = None


@dataclass
class OpReport:
    """Everything found out about one op."""

    op: str
    verdict: str  # conforms, does-not-conform, not-offered, error
    variant: dict = field(default_factory=dict)  # axis → values that are left
    cases: list[Verdict] = field(default_factory=list)
    gradients: bool = False
    precision: str = ""  # computes-in-bfloat16 …, or "coarse"
    notes: list[str] = field(default_factory=list)
    matches: list = field(default_factory=list)  # filled by naming.py
    failed: list[Verdict] = field(default_factory=list)  # deciding failures, first one first


_SEVERITY = ("pass", "coarse", "blind", "out-of-range", "unsupported", "error", "fail")


def judge(op: str, found: list[Attempt], level: str, forgiving: bool = True) -> OpReport:
    """The verdict on one op.

    Args:
        op: name of the op.
        found: all attempts, of all levels and dtypes.
        level: cases up to this level decide (must, should or robust).
        forgiving: whether float64 answers that are right to float32 accuracy only may be coarse instead of wrong; needs
            enough cases for "every case" to mean something.
    """
    deciding = {"must": ("must",), "should": ("must", "should"), "robust": ("must", "should", "robust")}[level]
    if not any("result" in attempt.answer or "error" in attempt.answer for attempt in found):
        return OpReport(op, "not-offered", cases=_summary(found, {}, lambda attempt: None))
    report = _judged(op, found, {})
    failing = [verdict for verdict in report.cases if verdict.verdict == "fail" and verdict.case.level == "must"]
    if forgiving and failing and {verdict.dtype for verdict in failing} == {"float64"}:
        wider = _judged(op, found, {"float64": "float32"})
        if not any(verdict.verdict in ("fail", "error") and verdict.case.level == "must" for verdict in wider.cases):
            strict = {(verdict.case.id, verdict.dtype): verdict for verdict in report.cases}
            for verdict in wider.cases:
                if verdict.verdict == "pass" and strict[verdict.case.id, verdict.dtype].verdict == "fail":
                    verdict.verdict, verdict.use = "coarse", strict[verdict.case.id, verdict.dtype].use
            report, report.precision = wider, "coarse"
    elif any(verdict.dtype == "float32" for verdict in failing):
        report.precision = _low_precision(op, found)
    report.failed = [v for v in report.cases if v.verdict in ("fail", "error") and v.case.level in deciding]
    report.verdict = "does-not-conform" if report.failed else "conforms"
    if not report.failed and not any(v.verdict in ("pass", "coarse") for v in report.cases):
        report.verdict = "not-offered"
    report.notes += _notes(report, found)
    return report


def _low_precision(op: str, found: list[Attempt]) -> str:
    """The 16-bit format in whose law every float32 answer is right, if there is one.

    float16 is the finer one and is tried first, unless results come back in bfloat16.
    """
    returned = {
        got["dtype"] for attempt in found if "result" in attempt.answer for got in attempt.answer["result"]["outputs"].values()
    }
    for dtype in ("bfloat16", "float16") if "bfloat16" in returned else ("float16", "bfloat16"):
        report = _judged(op, found, {"float64": dtype, "float32": dtype})
        if not any(v.verdict in ("fail", "error") and v.case.level == "must" for v in report.cases):
            return f"computes-in-{dtype}"
    return ""


def _judged(op: str, found: list[Attempt], laws: dict[str, str]) -> OpReport:
    """Identifies the variant and judges every attempt under it; `laws` names another dtype's law where one is to be used."""
    matched = {id(attempt): matches(attempt, laws) for attempt in found if "result" in attempt.answer}
    must = [attempt for attempt in found if attempt.case.level == "must" and id(attempt) in matched]
    later = [attempt for attempt in found if attempt.case.level != "must" and id(attempt) in matched]
    left = {}
    for output, about in table()["ops"][op]["outputs"].items():
        free = [axis for axis in about["axes"]]
        left[output] = identify(output, free, must, later, matched)

    def decide(attempt: Attempt):
        return _decide(attempt, matched[id(attempt)], left)

    report = OpReport(op, "", cases=_summary(found, left, decide))
    report.variant = _variant(op, left, found, report.notes)
    report.gradients = any(attempt.answer["result"]["gradients"] for attempt in found if "result" in attempt.answer)
    return report


def matches(attempt: Attempt, laws: dict[str, str]) -> dict[str, list[Match]]:
    """For each output of an attempt, how it compares with each entry of the case that the call allows."""
    result, found = attempt.answer["result"], {}
    for output, entries in attempt.case.answers.items():
        got = result["outputs"].get(output)
        if got is not None:
            allowed = [entry for entry in entries if _allows(entry.when, attempt.axes)]
            found[output] = [_match(output, got, result, entry, attempt, laws) for entry in allowed]
    return found


def _allows(when: dict, chosen: dict) -> bool:
    return all(chosen.get(axis, values[0]) in values for axis, values in when.items())


def _match(output: str, got: dict, result: dict, entry: Entry, attempt: Attempt, laws: dict) -> Match:
    """Compares an output and its gradients with one entry; the worst part counts."""
    law = laws.get(attempt.dtype, attempt.dtype)
    if attempt.case.precision and law in LOW_PRECISION:
        law = attempt.case.precision
    parts = [(output, got, entry.block)]
    if entry.gradients and result["dead"] and not _incomparable(got, entry.block):
        return Match(entry, float("inf"), output, 0, "gradient dead: the result does not require grad although an input did")
    parts += [
        (f"grad_{name}", result["gradients"][name], entry.gradients[name])
        for name in result["gradients"]
        if name in entry.gradients
    ]
    worst_match: Match | None = None
    for part, numbers, block in parts:
        problem = _incomparable(numbers, block)
        share, index = (float("inf"), 0) if problem else worst(numbers["data"], block, law, numbers["dtype"])
        match = Match(entry, share, part, index, problem)
        if (
            worst_match is None
            or (match.use > 1) > (worst_match.use > 1)
            or (worst_match.use <= 1 and match.use > worst_match.use)
        ):
            worst_match = match
    assert worst_match is not None  # the output itself is a part
    return worst_match


def _incomparable(got: dict, block) -> str:
    if tuple(got["shape"]) != block.shape:
        return f"shape {tuple(got['shape'])}, expected {block.shape}"
    if got["dtype"] not in DTYPES:
        return f"dtype {got['dtype']}, expected a floating-point dtype"
    return ""


def identify(output: str, axes: list[str], must: list[Attempt], later: list[Attempt], matched: dict) -> set[tuple]:
    """The variants of an output that agree with every `must` attempt; where none does, those that agree with most.

    Returns:
        Tuples of (axis, value) pairs over the axes that the calls leave open.
    """
    votes: dict[tuple, int] = {}
    total = 0
    for attempt in must:
        found = matched[id(attempt)].get(output)
        if found is None:
            continue
        total += 1
        agreeing = set().union(*(cover(match.entry.when, axes, attempt) for match in found if match.use <= 1), set())
        for variant in agreeing:
            votes[variant] = votes.get(variant, 0) + 1
    if not votes:
        return set()
    best = max(votes.values())
    left = {variant for variant, count in votes.items() if count == best}
    for attempt in later:  # harder cases may tell apart what ordinary ones cannot, and never decide
        found = matched[id(attempt)].get(output) or []
        agreeing = set().union(*(cover(match.entry.when, axes, attempt) for match in found if match.use <= 1), set())
        left = left & agreeing or left
    return left


def cover(when: dict, axes: list[str], attempt: Attempt) -> set[tuple]:
    """The variants, over the axes that the call leaves open, that an entry speaks for.

    Where the call asks for a value under which an axis moves nothing, the entry speaks for all values of that axis.
    """
    acts_under = table()["ops"][attempt.case.op].get("acts_under", {})

    def values(axis: str) -> tuple:
        acts = all(attempt.axes.get(other, active[0]) in active for other, active in acts_under.get(axis, {}).items())
        return tuple(when.get(axis, table()["axes"][axis]) if acts else table()["axes"][axis])

    return set(_products(tuple((axis, values(axis)) for axis in axes if axis not in attempt.axes)))


@functools.cache
def _products(choices: tuple) -> tuple:
    names = [axis for axis, _ in choices]
    return tuple(tuple(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in choices)))


def _decide(attempt: Attempt, found: dict[str, list[Match]], left: dict[str, set]) -> Verdict:
    """The verdict on one attempt under the variants that are left."""
    case, dtype = attempt.case, attempt.dtype
    verdict = Verdict(case, dtype, "pass", attempt=attempt)
    unseen = []
    for output, candidates in found.items():
        axes = table()["ops"][case.op]["outputs"][output]["axes"]
        fitting = [m for m in candidates if not left[output] or cover(m.entry.when, axes, attempt) & left[output]]
        if not fitting:
            return Verdict(case, dtype, "unsupported", "the case has no answer for this variant", attempt=attempt)
        best = min(fitting, key=lambda match: match.use)
        blocks = [best.entry.block, *best.entry.gradients.values()]
        if not all(in_range(block, DTYPES[dtype]) for block in blocks):
            unseen.append("out-of-range")
            continue
        if not any(telling(block, DTYPES[dtype]) for block in blocks):
            unseen.append("blind")
            continue
        unseen.append("")
        if best.use > 1 and (verdict.verdict != "fail" or best.problem):
            verdict = Verdict(case, dtype, "fail", best.problem, best.use, attempt, output, best)
        elif verdict.verdict == "pass" and best.use >= verdict.use:
            verdict.use, verdict.output, verdict.match = best.use, output, best
    if verdict.verdict == "pass" and unseen and all(unseen):
        verdict.verdict = "out-of-range" if "out-of-range" in unseen else "blind"
    leaks, changed = attempt.answer["result"]["leaks"], attempt.answer["result"]["changed"]
    if verdict.verdict in ("pass", "blind", "out-of-range") and case.level != "must":
        if leaks:
            verdict.verdict, verdict.reason = "fail", f"a gradient reaches {', '.join(leaks)}: relies on the caller's detach"
        elif changed:
            verdict.verdict, verdict.reason = "fail", f"changed its input {', '.join(changed)}"
    return verdict


def _summary(found: list[Attempt], left: dict, decide) -> list[Verdict]:
    """One verdict per case and dtype: the worst of its attempts; a case counts as compared if any attempt was."""
    grouped: dict[tuple, list[Verdict]] = {}
    for attempt in found:
        answer = attempt.answer
        if "unsupported" in answer:
            verdict = Verdict(attempt.case, attempt.dtype, "unsupported", answer["unsupported"], attempt=attempt)
        elif "error" in answer:
            reason = f"{answer['error']['type']}: {answer['error']['message']}"
            verdict = Verdict(attempt.case, attempt.dtype, "error", reason, float("inf"), attempt)
        else:
            verdict = decide(attempt)
        grouped.setdefault((attempt.case.id, attempt.dtype), []).append(verdict)
    return [_worst_of(verdicts) for verdicts in grouped.values()]


def _worst_of(verdicts: list[Verdict]) -> Verdict:
    failing = [v for v in verdicts if v.verdict in ("fail", "error")]
    passing = [v for v in verdicts if v.verdict == "pass"]
    if failing:
        return failing[0]
    if passing:
        return max(passing, key=lambda verdict: verdict.use)
    return max(verdicts, key=lambda verdict: _SEVERITY.index(verdict.verdict))


def _variant(op: str, left: dict[str, set], found: list[Attempt], contradictions: list[str]) -> dict:
    """What is left on each axis: a value, or the list of values that could not be told apart, or that are all offered."""
    asked: dict[str, list] = {axis: [] for attempt in found for axis in attempt.axes}
    for attempt in found:
        if "result" in attempt.answer:
            for axis, value in attempt.axes.items():
                if value not in asked[axis]:
                    asked[axis].append(value)
    variant: dict[str, list] = {}
    for output, variants in left.items():
        for axis in table()["ops"][op]["outputs"][output]["axes"]:
            order = table()["axes"][axis]
            if axis in asked:
                values = set(asked[axis])
            else:
                values = {dict(item)[axis] for item in variants if axis in dict(item)}
                before = set(variant.get(axis, values))
                if values and not values & before:  # one output clamps, another does not: the first one speaks
                    contradictions.append(f"{output} has {axis} {', '.join(map(str, sorted(values, key=order.index)))}")
                values = values & before or before
            under = table()["ops"][op].get("acts_under", {}).get(axis, {})
            if values and all(set(active) & set(variant.get(other, active)) for other, active in under.items()):
                variant[axis] = sorted(values, key=order.index)
    return variant


def _notes(report: OpReport, found: list[Attempt]) -> list[str]:
    """What a reader should know beside the verdict."""
    notes = []
    results = [attempt.answer["result"] for attempt in found if "result" in attempt.answer]
    if report.precision == "coarse":
        notes.append("agrees to float32 accuracy at float64")
    leaking = sorted({name for result in results for name in result["leaks"]})
    if leaking:
        notes.append(f"relies on the caller's detach: a gradient reaches {', '.join(leaking)}")
    changed = sorted({name for result in results for name in result["changed"]})
    if changed:
        notes.append(f"changes its input {', '.join(changed)}")
    offers = any("gradients" in about for about in table()["ops"][report.op]["outputs"].values())
    if offers and not report.gradients and not any(result["dead"] for result in results):
        notes.append("gradients not offered")
    return notes


def retell(report: OpReport, variant: dict) -> None:
    """Shows failures against the answer of a variant: that of the deviation which explains them.

    Numbers that are wrong identify no variant, so a failure is first shown against the nearest answer of any.
    """
    for verdict in report.failed:
        if verdict.match is None or verdict.match.problem or verdict.attempt is None:
            continue
        chosen = {**variant, **verdict.attempt.axes}
        fitting = [
            match
            for matches_of_output in matches(verdict.attempt, {}).values()
            for match in matches_of_output
            if _allows(match.entry.when, chosen) and match.use > 1 and not match.problem
        ]
        if fitting:
            verdict.match = fitting[0]
            verdict.use = fitting[0].use
