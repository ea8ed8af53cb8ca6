"""Recomputes every edge of a step that its dump allows.

A small dump is a case like any other: the exact oracle answers for every variant, and the dump's numbers are judged and named
as a trainer's are. Of a large one a few windows are judged that way, which tells the variant; then all of it is compared, block
by block, with the reference under that variant and the tolerance of the running bound (tracked.py).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from goldenppo.adapters.arrays import words
from goldenppo.adapters.interface import UsageError
from goldenppo.conformance import judge as judging
from goldenppo.conformance import naming
from goldenppo.conformance.audit import infer, micro
from goldenppo.conformance.audit.dump import Dump
from goldenppo.conformance.audit.edges import EDGES, STATES, TOKENWISE, Edge
from goldenppo.conformance.audit.step import Step
from goldenppo.conformance.audit.tracked import Tracked, parameter, tracked
from goldenppo.conformance.cases import Block, Case, Entry, clauses, parse, table
from goldenppo.conformance.law import DTYPES, K
from goldenppo.conformance.result import wrong_element
from goldenppo.conformance.run import Attempt
from goldenppo.fixtures.generate import SCHEMA, build_case, combinations
from goldenppo.fixtures.recipes.draw import Case as Recipe

SMALL, SMALL_WIDTH, SMALL_LOGITS = 256, 64, 8192  # up to here the exact oracle answers for the whole dump
WINDOWS, WINDOW = 3, 16  # beyond, for this many rows, at this many positions at the end of each
COARSEST = ("bfloat16", "float16", "float32", "float64")


@dataclass
class Finding:
    """What was found out about one edge."""

    edge: Edge
    ends: dict[str, str]  # op input or output → tensor of the dump
    verdict: str  # right, wrong, unchecked
    reason: str = ""
    dtype: str = ""  # whose law it was held against
    report: judging.OpReport | None = None
    compared: int = 0
    worst: float = 0.0  # largest error as a share of the tolerance
    first: str = ""  # the first wrong element of a large dump
    inferred: infer.Guess = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    place: str = ""  # the rank's file, where each rank reports a number of its own

    @property
    def variant(self) -> dict:
        """Axis → the values that are left."""
        return self.report.variant if self.report else {}


class Unchecked(Exception):
    """An edge cannot be checked; the message says why."""


def audit_ranks(paths: list[str], layout: str | None, mask_from: str | None, only: list[str]) -> tuple[Step, list[Finding]]:
    """Checks a step that lies in one file, or in one per rank.

    Ranks are joined row by row. An edge with a number that differs from rank to rank is checked on each rank by itself.

    Args:
        paths: the files.
        layout, mask_from: see `Step`.
        only: names of edges; all if empty.
    """
    step = Step(Dump(paths), layout, mask_from)
    own = set(step.dump.split)
    findings = [finding for finding in audit(step, only) if not own & set(finding.ends.values())]
    for path in paths if own else ():
        for finding in audit(Step(Dump([path]), layout, mask_from), only):
            if own & set(finding.ends.values()):
                finding.place = path
                findings.append(finding)
    return step, findings


def audit(step: Step, only: list[str] | None = None) -> list[Finding]:
    """Checks every edge whose ends are there.

    Args:
        step: an opened dump.
        only: names of edges; all if None.

    Returns:
        Findings in the order of a step. An edge whose result the dump does not hold is left out.
    """
    findings: list[Finding] = []
    for edge in EDGES:
        ends = _ends(edge, step)
        if only and edge.name not in only:
            continue
        unreduced = _unreduced(edge, step)
        if unreduced:
            findings.append(Finding(edge, ends, "wrong", unreduced))
        if unreduced or not any(output in ends for output in edge.outputs):
            continue
        if edge.name == "experience" and not _span_wanted(findings, ends):
            continue
        missing = [names[0] for end, names in edge.inputs.items() if end not in ends and None not in names]
        if missing:
            if edge.name != "experience" and "logits" not in edge.inputs and set(ends) & set(edge.inputs) - {"mask"}:
                findings.append(Finding(edge, ends, "unchecked", f"the dump has no {' and no '.join(missing)}"))
            continue
        poisoned = _not_finite(edge, ends, step)
        if poisoned:
            findings.append(Finding(edge, ends, "wrong", poisoned))
            continue
        try:
            findings.append(_check(edge, ends, step))
        except Unchecked as reason:
            findings.append(Finding(edge, ends, "unchecked", str(reason)))
    return [*_settled(findings), *micro.findings(step, findings, only)]


def _ends(edge: Edge, step: Step) -> dict[str, str]:
    """Which tensors of the dump an edge runs between; a name counts only if it has the op's number of axes."""
    spec = table()["ops"][edge.op]
    found = {}
    for end, names in (edge.inputs | edge.outputs).items():
        axes = len((spec["outputs"] if end in edge.outputs else spec["inputs"])[end]["shape"])
        if end == "mask":
            if step.width:
                own = names[0] if names[0] != "mask" and names[0] in step.dump else None
                found[end] = own or step.mask_name or "mask"
            continue
        name = next((name for name in names if name in step.dump and len(step.dump.shapes[name]) == axes), None)
        if name:
            found[end] = name
    return found


def _unreduced(edge: Edge, step: Step) -> str:
    """What to say where a loss is not one number."""
    for output, names in edge.outputs.items():
        shape = step.dump.shapes.get(names[0], ())
        if shape and not table()["ops"][edge.op]["outputs"][output]["shape"] and names[0].endswith("loss"):
            return f"{names[0]} has shape {shape}; expected one number"
    return ""


def _span_wanted(findings: list[Finding], ends: dict[str, str]) -> bool:
    """Whether rewards, advantages and returns are to be judged as one span.

    They are where the dump lacks the rewards, where a part is wrong, and where the score stands after the last token: the
    chain of the advantages is one position longer then, which only the span knows.
    """
    if not {"advantages", "returns"} & set(ends):
        return False
    parts = {finding.edge.name: finding for finding in findings}
    return "rewards" not in parts or any(
        finding.verdict == "wrong" for finding in parts.values() if finding.edge.op in ("shaped_rewards", "gae")
    )


def _settled(findings: list[Finding]) -> list[Finding]:
    """Drops the advantages' own verdict where rewards and span are right: it was reached on a chain that is too short."""
    verdicts = {finding.edge.name: finding.verdict for finding in findings}
    if verdicts.get("experience") == "right" and verdicts.get("rewards") == "right":
        return [finding for finding in findings if finding.edge.name != "advantages"]
    if verdicts.get("experience") == "wrong" and {verdicts.get("rewards"), verdicts.get("advantages")} != {"right"}:
        named = next(finding for finding in findings if finding.edge.name == "experience").report
        exact = named is not None and any(match.exact for match in named.matches)
        return findings if exact else [finding for finding in findings if finding.edge.name != "experience"]
    return findings


# --- parameters ---------------------------------------------------------------------------------------------


def _given(edge: Edge, ends: dict[str, str], step: Step) -> dict[str, Any]:
    """The op's parameters that the dump gives, None where it says null; tensors among them under their own name."""
    found: dict[str, Any] = {}
    for name, about in table()["ops"][edge.op]["params"].items():
        for given in edge.params.get(name, (name,)):
            if "shape" in about and given in step.dump:
                found[name] = step.dump.read(given)
            elif "shape" not in about and given in step.params:
                found[name] = _number(given, step.params[given])
            if name in found:
                break
    for end, coefficient in (("entropy", "entropy_coef"), ("kl_loss", "kl_loss_coef")):
        if edge.op == "total_loss" and end not in ends:
            if found.get(coefficient):
                raise Unchecked(f"{coefficient} is {found[coefficient]:g}, and the dump has no {edge.inputs[end][0]}")
            found[coefficient] = 0.0
    return found


def _number(name: str, value):
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)):
        return value
    raise UsageError(f"the parameter {name} is {value!r}; expected a number or null")


def _check(edge: Edge, ends: dict[str, str], step: Step) -> Finding:
    """Judges an edge under the parameters given; reads from the numbers those that are missing or that they contradict."""
    given = _given(edge, ends, step)
    about = table()["ops"][edge.op]["params"]
    needed = [name for name in about if not about[name].get("optional") and "needed_by" not in about[name]]
    missing = [name for name in needed if given.get(name) is None]
    finding = None if missing else judge_edge(edge, ends, step, given)
    if finding and (finding.verdict == "right" or (finding.report and any(match.exact for match in finding.report.matches))):
        return finding
    for guess in infer.parameters(edge.op, _sample(edge, ends, step), given, missing):
        news = {name: item for name, item in guess.items() if name not in given or given[name] != item.value}
        if not news or any((given | {n: i.value for n, i in news.items()}).get(name) is None for name in needed):
            continue
        other = judge_edge(edge, ends, step, given | {name: item.value for name, item in news.items()})
        other.inferred = news
        contradicted = [name for name in news if given.get(name) is not None]
        if other.verdict == "right" and contradicted:
            other.verdict, other.report = "wrong", None
            other.reason = "; ".join(
                f"the dump gives {name} {given[name]:g}; its numbers say {news[name]}, and are right under that"
                for name in contradicted
            )
        if other.verdict == "right" or (contradicted and other.reason):
            return other
        finding = finding or (other if missing else None)
    if finding is None:
        names = ", ".join(edge.params.get(name, (name,))[0] for name in missing)
        raise Unchecked(f"{names} is not given, and the numbers do not determine it")
    return finding


def _not_finite(edge: Edge, ends: dict[str, str], step: Step) -> str:
    """What to say of NaN or an infinity at a position that counts: it poisons whatever is computed from it."""
    for end in edge.inputs:
        name = ends.get(end)
        if end == "mask" or name is None or step.dump.dtypes[name] in ("int", "bool") or len(step.dump.shapes[name]) != 2:
            continue
        for start, stop in step.blocks(1) if name in (*TOKENWISE, *STATES) else ():
            bad = ~torch.isfinite(step.get(name, start, stop)) & step.mask(start, stop, ends.get("mask"))
            if bad.any():
                row, column = bad.nonzero()[0].tolist()
                return f"{name} is not finite at row {start + row}, position {column}, which counts"
    return ""


# --- judging ------------------------------------------------------------------------------------------------


def judge_edge(edge: Edge, ends: dict[str, str], step: Step, params: dict) -> Finding:
    """The verdict on an edge under given parameters."""
    kinds = [step.dump.dtypes[name] for name in ends.values() if step.dump.dtypes.get(name) in COARSEST]
    dtype = min(kinds, key=COARSEST.index)
    finding = Finding(edge, ends, "right", dtype=dtype, params=params)
    if _small(edge, ends, step):
        tensors = tensors_of(edge, ends, step, 0, None)
        _exact(finding, tensors, params)
    elif edge.op in ("policy_loss", "value_loss", "aggregate"):
        from goldenppo.conformance.audit import losses

        losses.judge_terms(finding, step, params)
    elif edge.op in ("reward_model_loss", "reward_model_token_loss", "dpo_loss", "kl_controller"):
        _whole(finding, tensors_of(edge, ends, step, 0, None), params)
    else:
        from goldenppo.conformance.audit import rows

        rows.judge_rows(finding, step, params)
    return finding


def _small(edge: Edge, ends: dict[str, str], step: Step) -> bool:
    shapes = [step.dump.shapes[name] for name in ends.values() if name in step.dump.shapes]
    size = max(math.prod(shape) for shape in shapes)
    width = max((shape[1] for shape in shapes if len(shape) > 1), default=0)
    return size <= (SMALL_LOGITS if any(len(shape) == 3 for shape in shapes) else SMALL) and width <= SMALL_WIDTH


def tensors_of(edge: Edge, ends: dict[str, str], step: Step, start: int, stop: int | None) -> dict[str, torch.Tensor]:
    """Inputs and outputs of the op on some rows, aligned; `compared`: bool, which positions of the outputs count."""
    spec, found = table()["ops"][edge.op], {}
    stop = step.rows if stop is None and step.rows else stop
    for end in spec["inputs"]:
        if end == "mask":
            found[end] = step.mask(start, stop, ends.get("mask"))
        elif end not in ends:
            found[end] = torch.zeros((), dtype=torch.float64)  # a term that the step does not have
        elif end == "logits":
            logits, tokens = step.logits(ends[end], start, stop)
            found |= {"logits": logits, "tokens": tokens} if edge.op == "token_logprobs" else {"logits": logits[:, :-1]}
        elif end != "tokens":
            found[end] = step.get(ends[end], start, stop)
    for end in edge.outputs:
        if end in ends:
            found[end] = step.get(ends[end], start, stop)
            first = next(iter(spec["outputs"]))
            for name in spec["outputs"][first].get("gradients", []) if end == first else []:
                gradient = f"{ends[end]}_grad_{name}"
                if gradient in step.dump:
                    found[f"grad_{name}"] = step.dump.read(gradient, start, stop)
    _check_shapes(edge, ends, found)
    if step.width and len(next(iter(spec["outputs"].values()))["shape"]) == 2:
        found["compared"] = compared(edge, ends, step, step.mask(start, stop))
    return found


def _check_shapes(edge: Edge, ends: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    """Axes of one letter have one length throughout an op."""
    spec = table()["ops"][edge.op]
    sizes: dict[str, tuple[str, int]] = {}
    for end, about in (spec["inputs"] | spec["outputs"]).items():
        if end in tensors and end in ends and "logits" not in tensors:
            for axis, size in zip(about["shape"], tensors[end].shape, strict=True):
                name, known = sizes.setdefault(axis, (ends[end], size))
                if known != size:
                    raise UsageError(
                        f"{ends[end]} has shape {tuple(tensors[end].shape)} where {name} has {known} along the same axis {axis}"
                    )


def compared(edge: Edge, ends: dict[str, str], step: Step, mask: torch.Tensor) -> torch.Tensor:
    """Which positions count: the tokens; for rewards also the slot after the last one, where a score may stand."""
    if edge.op == "shaped_rewards":
        from goldenppo.reference.shaped_rewards import score_slot

        return mask | score_slot(mask, "first_pad")
    if edge.op in ("token_logprobs", "entropy") and step.unspoken(ends["logits"]):
        mask = mask.clone()
        mask[:, 0] = False
    return mask


def _sample(edge: Edge, ends: dict[str, str], step: Step) -> dict[str, torch.Tensor]:
    """Tensors of the first rows, for reading parameters from them."""
    wide = max((math.prod(step.dump.shapes[name][1:]) for name in ends.values() if name in step.dump.shapes), default=1)
    return tensors_of(edge, ends, step, 0, max(1, min(step.rows, (1 << 20) // max(1, wide))) if step.rows else None)


# --- the exact oracle ---------------------------------------------------------------------------------------


def _exact(finding: Finding, tensors: dict[str, torch.Tensor], params: dict) -> None:
    """Judges tensors against the exact oracle, all variants of it, and names what is wrong."""
    attempt = exact_attempt(finding.edge, tensors, params, finding.dtype, finding.ends)
    settle(finding, attempt)
    finding.compared = sum(want is not None for entries in attempt.case.answers.values() for want in entries[0].block.want)


def exact_attempt(edge: Edge, tensors: dict, params: dict, dtype: str, ends: dict) -> Attempt:
    """A dump's numbers as an attempt on a case that the oracle answers.

    Raises:
        Unchecked: the oracle has no finite answer.
    """
    spec = table()["ops"][edge.op]
    inputs = {end: _finite(tensors[end]).tolist() for end in spec["inputs"]}
    numbers = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in params.items()}
    recipe = Recipe(f"{edge.op}/audit-{edge.name}", _labels(edge.op), "must", _purpose(edge, ends), inputs, numbers)
    ops = table()
    chosen = {
        output: [
            variant for variant in combinations(about["axes"], spec, ops, inputs.get("mask")) if _possible(spec, variant, params)
        ]
        for output, about in spec["outputs"].items()
        if output in tensors
    }
    try:
        raw = build_case(recipe, edge.op, ops, chosen)
    except (ValueError, ZeroDivisionError, OverflowError) as problem:
        raise Unchecked(f"the exact answer cannot be formed: {problem}") from None
    if "compared" in tensors:
        for entry in itertools.chain.from_iterable(raw["answers"].values()):
            entry["value"] = _only(entry["value"], tensors["compared"].tolist())
    raw["inputs"] = {end: words(tensors[end].tolist()) for end in spec["inputs"]}  # a deviation may read the NaN of a masked slot
    (case,) = parse(json.dumps({"schema": SCHEMA, "op": edge.op, "cases": [raw]}), edge.op)
    return Attempt(case, dtype, {}, {"result": result(edge, tensors, dtype)})


def result(edge: Edge, tensors: dict, dtype: str) -> dict:
    """The dump's outputs in the form in which an adapter answers."""

    def array(tensor) -> dict:
        return {"dtype": dtype, "shape": list(tensor.shape), "data": tensor.reshape(-1).tolist()}

    gradients = {name[5:]: array(tensor) for name, tensor in tensors.items() if name.startswith("grad_")}
    outputs = {output: array(tensors[output]) for output in table()["ops"][edge.op]["outputs"] if output in tensors}
    return {"outputs": outputs, "gradients": gradients, "dead": False, "leaks": [], "changed": []}


def settle(finding: Finding, attempt: Attempt, evaluator: naming.Evaluator | None = None) -> None:
    """Judges an attempt and names the deviation that it matches."""
    report = judging.judge(finding.edge.op, [attempt], "must")
    if report.failed:
        report.matches = naming.name(report, [attempt], evaluator)
        if report.matches and report.matches[0].exact:
            judging.retell(report, report.matches[0].variant)
            report.precision = ""
    if report.precision.startswith("computes") and not any(block.shape for block in _blocks(attempt)):
        report.precision = ""  # one number off is within 16 bits of the right one too easily
    finding.report = report
    finding.verdict = "wrong" if report.failed else "right" if report.verdict == "conforms" else "unchecked"
    finding.worst = max((verdict.use for verdict in report.cases), default=0.0)
    if finding.verdict == "unchecked":
        finding.reason = report.cases[0].reason or report.cases[0].verdict if report.cases else "nothing was compared"


def _blocks(attempt: Attempt) -> list[Block]:
    """The right answers of an attempt's case, one per output."""
    return [entries[0].block for entries in attempt.case.answers.values()]


def _possible(spec: dict, variant: tuple, params: dict) -> bool:
    """Whether the parameters that a variant needs are there."""
    chosen = dict(variant)
    needed = [about["needed_by"] for name, about in spec["params"].items() if "needed_by" in about and params.get(name) is None]
    return not any(chosen.get(axis) in values for needs in needed for axis, values in needs.items())


def _labels(op: str) -> list[str]:
    return [label for label, clause in clauses().items() if clause["op"] == op and clause["level"] == "must"][:1]


def _purpose(edge: Edge, ends: dict[str, str]) -> str:
    made = " and ".join(ends[output] for output in edge.outputs if output in ends)
    return f"The dump's {made}, from its {', '.join(ends[end] for end in edge.inputs if end in ends)}."


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """Masked slots may hold NaN, which the oracle does not read and a fixture does not hold."""
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0) if tensor.is_floating_point() else tensor


def _only(nested, compared):
    if isinstance(compared, list):
        return [_only(item, keep) for item, keep in zip(nested, compared, strict=True)]
    return nested if compared else None


# --- the running bound --------------------------------------------------------------------------------------


def call(function, tensors: dict, params: dict, op: str, variant: dict):
    """A function of the reference on tracked tensors.

    Args:
        function: takes the op's inputs, parameters and some of its axes.
        tensors: the op's inputs.
        params: the op's parameters; None among them are left out.
        op: name of the op.
        variant: axis → value.
    """
    spec = table()["ops"][op]
    inputs = [_tracked_input(tensors[end]) for end in spec["inputs"]]
    given = {name: _tracked_parameter(value, spec["params"][name]) for name, value in params.items() if value is not None}
    return function(*inputs, **given, **variant)


def _tracked_input(tensor: torch.Tensor):
    return Tracked(tensor) if tensor.is_floating_point() else tensor


def _tracked_parameter(value, about: dict):
    if isinstance(value, torch.Tensor):
        return _tracked_input(value)
    return value if about.get("kind") == "int" else parameter(value)


def block(answer) -> Block:
    """A tracked number as the right answer of a case."""
    answer = tracked(answer)
    want = answer.value.reshape(-1).tolist()
    return Block(tuple(answer.shape), tuple(want), tuple(answer.gauge.reshape(-1).tolist()), 1.0, max([1.0, *map(abs, want)]))


def case_of(finding: Finding, answers: dict[str, list[Entry]], params: dict, full: bool) -> Case:
    """A case whose inputs are too large for lists; `full` says whether every position counts."""
    edge = finding.edge
    label, inputs = f"{edge.op}/audit-{edge.name}", {"mask": [[full]]}
    return Case(label, edge.op, tuple(_labels(edge.op)), "must", _purpose(edge, finding.ends), params, inputs, answers, (), {})


def _whole(finding: Finding, tensors: dict, params: dict) -> None:
    """Judges an op of a few thousand numbers in one go."""
    import goldenppo.reference as reference

    spec = table()["ops"][finding.edge.op]
    answers: dict[str, list[Entry]] = {}
    for output, about in spec["outputs"].items():
        if output in tensors:
            entries = []
            for variant in combinations(about["axes"], spec, table(), None):
                made = call(getattr(reference, finding.edge.op), tensors, params, finding.edge.op, dict(variant))
                made = getattr(made, output) if hasattr(made, "_asdict") else made
                entries.append(Entry({axis: [value] for axis, value in variant}, block(made), {}))
            answers[output] = entries
    case = case_of(finding, answers, params, True)
    evaluator = prepared(finding.edge.op, case, tensors)
    settle(finding, Attempt(case, finding.dtype, {}, {"result": result(finding.edge, tensors, finding.dtype)}), evaluator)
    finding.compared = sum(tensors[output].numel() for output in answers)
    say_first(finding)


def say_first(finding: Finding) -> None:
    """Words for the first wrong number of an edge whose inputs are too large to print."""
    if finding.verdict == "wrong":
        assert finding.report is not None
        element = wrong_element(finding.report.failed[0])
        name = finding.ends.get(element["output"], element["output"]) if element else ""
        where = element["index"] or "" if element else ""
        finding.first = (
            f"{name}{where}: got {element['got']!r}, want {element['want']!r}" if element else finding.report.failed[0].reason
        )


def prepared(op: str, case: Case, tensors: dict) -> naming.Evaluator:
    """An evaluator of deviations that has the inputs of a case as tensors already."""
    evaluator = naming.Evaluator(op, gradients=False)
    for dtype in ("float64", "float32"):
        evaluator.inputs[id(case), dtype] = [
            tensors[end].to(getattr(torch, dtype)) if tensors[end].is_floating_point() else tensors[end]
            for end in table()["ops"][op]["inputs"]
        ]
    return evaluator


def shares(got: torch.Tensor, want: Tracked, dtype: str, out: str) -> torch.Tensor:
    """The error of each element as a share of the tolerance (conformance/law.py, for tensors)."""
    law, result_law = DTYPES[dtype], DTYPES[out]
    allowed = K * (law.unit * want.gauge + law.tiny) + result_law.unit * want.value.abs()
    share = (got - want.value).abs() / allowed
    return torch.where(torch.isfinite(got) | (got == want.value), share, math.inf)


def variants_left(report: judging.OpReport, most: int = 12) -> Iterator[dict]:
    """The variants that are left after identification, one after the other."""
    axes = list(report.variant)
    for values in itertools.islice(itertools.product(*(report.variant[axis] for axis in axes)), most):
        yield dict(zip(axes, values, strict=True))
