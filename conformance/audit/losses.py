"""Losses of a large dump: the terms of each token, block by block, then every way to aggregate their row sums."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from goldenppo.conformance.audit import engine
from goldenppo.conformance.audit.step import Step
from goldenppo.conformance.audit.tracked import Tracked, tracked, within
from goldenppo.conformance.cases import Entry, table
from goldenppo.conformance.law import DTYPES, K
from goldenppo.conformance.run import Attempt
from goldenppo.reference.aggregate import aggregate
from goldenppo.reference.checks import inside
from goldenppo.reference.policy_loss import policy_terms
from goldenppo.reference.value_loss import value_terms


def judge_terms(finding: engine.Finding, step: Step, params: dict) -> None:
    """Judges a loss under the usual form of its terms first, and under all forms where that is wrong."""
    forms = list(_forms(finding.edge.op))
    outputs = {output: step.get(finding.ends[output]) for output in finding.edge.outputs if output in finding.ends}
    finding.compared, full = len(outputs), _full(finding, step)
    for tried, edges in dict.fromkeys([(1, False), (1, True), (len(forms), True)]):
        case = engine.case_of(finding, _answers(finding, step, params, forms[:tried], edges, full), params, full)
        attempt = Attempt(case, finding.dtype, {}, {"result": engine.result(finding.edge, outputs, finding.dtype)})
        wrong = bool(engine.judging.judge(case.op, [attempt], "must").failed)
        if not wrong or (edges and tried == len(forms)):
            tensors = engine.tensors_of(finding.edge, finding.ends, step, 0, None) if wrong else {}
            engine.settle(finding, attempt, engine.prepared(case.op, case, tensors) if wrong else None)
            engine.say_first(finding)
            return


def _full(finding: engine.Finding, step: Step) -> bool:
    return all(bool(step.mask(*part, finding.ends.get("mask")).all()) for part in step.blocks(1))


def _forms(op: str):
    """The axes that change the terms themselves, the usual form first."""
    axes = {
        "policy_loss": ("log_ratio_clamp", "clip_fraction", "approx_kl"),
        "value_loss": ("form",),
        "aggregate": (),
    }[op]
    for values in itertools.product(*(table()["axes"][axis] for axis in axes)):
        yield dict(zip(axes, values, strict=True))


def _answers(
    finding: engine.Finding, step: Step, params: dict, forms: list[dict], edges: bool, full: bool
) -> dict[str, list[Entry]]:
    """Every output under every form and every aggregation; `edges`: with the slack of counting near an edge."""
    op = finding.edge.op
    answers: dict[str, list[Entry]] = {}
    for form in forms:
        sums, counts = _row_sums(finding, step, params, form)
        if edges and "clip_fraction" in sums and _clips(params):
            sums["clip_fraction"] = _undecided(sums["clip_fraction"], finding, step, params, form)
        for output, rows in sums.items():
            axes = table()["ops"][op]["outputs"][output]["axes"]
            ways = _ways(full, params) if "aggregation" in axes else [{}]
            for way in ways:
                mean = _aggregate(rows, counts, params, way)
                for factor, scale in (("half", 0.5), ("one", 1.0)) if "factor" in axes else ((None, 1.0),):
                    when = {
                        axis: [value]
                        for axis, value in (form | way | ({"factor": factor} if factor else {})).items()
                        if axis in axes
                    }
                    if not any(entry.when == when for entry in answers.setdefault(output, [])):
                        answers[output].append(Entry(when, engine.block(mean * scale), {}))
    return answers


def _row_sums(finding: engine.Finding, step: Step, params: dict, form: dict) -> tuple[dict[str, Tracked], torch.Tensor]:
    """Σ_t of the terms of each row, and the number of its tokens."""
    op, counts = finding.edge.op, []
    parts: dict[str, list[Tracked]] = {}
    own = {name: value for name, value in params.items() if name != "horizon"}
    for start, stop in step.blocks(1):
        tensors = engine.tensors_of(finding.edge, finding.ends, step, start, stop)
        mask = tensors["mask"]
        counts.append(mask.sum(1))
        if op == "aggregate":
            terms = {"value": Tracked(tensors["x"])}
        else:
            named = engine.call(policy_terms if op == "policy_loss" else value_terms, tensors, own, op, form)
            terms = named._asdict()
        for output, term in terms.items():
            if output in finding.ends:
                parts.setdefault(output, []).append(within(tracked(term), mask).sum(1))
    joined = {
        output: Tracked(torch.cat([part.value for part in rows]), torch.cat([part.gauge for part in rows]))
        for output, rows in parts.items()
    }
    return joined, torch.cat(counts)


def _clips(params: dict) -> list[str]:
    return [name for name in ("clip", "clip_low", "clip_high") if params.get(name) is not None]


def _undecided(rows: Tracked, finding: engine.Finding, step: Step, params: dict, form: dict) -> Tracked:
    """Counts of clipped tokens whose gauge holds the tokens that a dtype may count or not: among millions some lie on the edge.

    They are those that clips a few roundings wider and narrower disagree on.
    """
    law, size = DTYPES[finding.dtype], 8.0
    if finding.edge.op == "value_loss":
        masks = ((part, step.mask(*part, finding.ends.get("mask"))) for part in step.blocks(1))
        size = max(float(inside(step.get(finding.ends["values"], *part), mask).abs().max()) for part, mask in masks) + 1
    counted = []
    for sign in (-1, 1):
        moved = params | {name: params[name] + sign * K * law.unit * size for name in _clips(params)}
        counted.append(_clipped(finding, step, moved, form))
    return Tracked(rows.value, rows.gauge + (counted[0] - counted[1]).abs() / (K * law.unit))


def _clipped(finding: engine.Finding, step: Step, params: dict, form: dict) -> torch.Tensor:
    """How many tokens of each row are clipped."""
    terms: Callable = policy_terms if finding.edge.op == "policy_loss" else value_terms
    own = {name: value for name, value in params.items() if name != "horizon" and value is not None}
    counts = []
    for start, stop in step.blocks(1):
        tensors = engine.tensors_of(finding.edge, finding.ends, step, start, stop)
        clipped = terms(*(tensors[end] for end in finding.edge.inputs), **own, **form).clip_fraction
        counts.append(inside(clipped, tensors["mask"]).sum(1))
    return torch.cat(counts)


def _ways(full: bool, params: dict):
    for aggregation, empty_rows in itertools.product(table()["axes"]["aggregation"], table()["axes"]["empty_rows"]):
        if aggregation == "seq_mean_token_sum_norm" and params.get("horizon") is None:
            continue
        if aggregation == "plain_mean" and not full:
            continue
        yield {"aggregation": aggregation, "empty_rows": empty_rows}


def _aggregate(rows: Tracked, counts: torch.Tensor, params: dict, way: dict) -> Tracked:
    """`aggregate` from row sums: a row is one term, divided by its tokens where the mean is over them."""
    aggregation, empty_rows = way.get("aggregation", "token_mean"), way.get("empty_rows", "excluded")
    any_token = (counts > 0)[:, None]
    if aggregation in ("token_mean", "token_sum", "plain_mean"):
        total = aggregate(rows[:, None], any_token, aggregation="token_sum")
        return total if aggregation == "token_sum" else total / counts.sum()
    if aggregation == "seq_mean_token_mean":
        rows, aggregation = rows / counts.clamp(min=1).double(), "seq_mean_token_sum"
    return aggregate(rows[:, None], any_token, horizon=params.get("horizon"), aggregation=aggregation, empty_rows=empty_rows)
