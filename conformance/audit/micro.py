"""Per-micro-batch losses against the loss that was reported for the batch (INV-6)."""

from __future__ import annotations

import copy

import torch

from goldenppo.conformance.audit import engine
from goldenppo.conformance.audit.edges import Edge
from goldenppo.conformance.audit.step import Step
from goldenppo.conformance.audit.tracked import Tracked

LOSSES = ("policy_loss", "value_loss")


def findings(step: Step, found: list[engine.Finding], only: list[str] | None) -> list[engine.Finding]:
    """One finding per loss whose micro-batches the dump holds.

    A loss of the whole batch is Σ w_k·L_k with w_k the share of tokens under a token mean and of rows under a mean over rows;
    where a trainer has divided each by the count of the whole batch, it is their sum, and their mean where it has multiplied
    by their number too. Which of them it is, the loss's own edge knows where the dump has it.

    Args:
        step: the dump; `micro_policy_loss` [M], `micro_value_loss` [M], `micro_tokens` [M], `micro_rows` [M].
        found: what is known of the other edges.
        only: names of edges; all if empty.
    """
    return [
        _judged(step, loss, next((finding for finding in found if finding.edge.name == loss), None))
        for loss in LOSSES
        if f"micro_{loss}" in step.dump and loss in step.dump and (not only or f"micro_{loss}" in only)
    ]


def _judged(step: Step, loss: str, own: engine.Finding | None) -> engine.Finding:
    name = f"micro_{loss}"
    edge = Edge(name, "aggregate", {"x": (name,)}, {"value": (loss,)})
    parts, reported = step.dump.read(name), step.dump.read(loss)
    dtype = step.dump.dtypes[name]
    ways = {"the mean of the micro-batches": Tracked(parts).mean(), "their sum": Tracked(parts).sum()}
    for kind in ("tokens", "rows"):
        if f"micro_{kind}" in step.dump:
            counts = step.dump.read(f"micro_{kind}").double()
            ways[f"their mean, weighted by {kind}"] = (Tracked(parts) * counts).sum() / counts.sum()
    fits = [way for way, want in ways.items() if float(engine.shares(reported, want, dtype, dtype)) <= 1]
    wanted = _wanted(step, loss, own, ways, fits)
    right = [way for way in fits if way in wanted]
    finding = engine.Finding(edge, {"x": name, "value": loss}, "right" if right else "wrong", dtype=dtype, compared=1)
    if not right:
        expected = " or ".join(wanted) or "their mean, weighted by tokens or by rows"
        finding.reason = f"{loss} is {' and '.join(fits) or 'no mean of its micro-batches'}; expected {expected} (INV-6)"
        if not wanted and not fits:
            finding.verdict, finding.reason = "unchecked", "the dump has no micro_tokens and no micro_rows"
    return finding


def _wanted(step: Step, loss: str, own: engine.Finding | None, ways: dict[str, Tracked], fits: list[str]) -> list[str]:
    """The ways to join the micro-batches that give the loss of the batch."""
    if own is not None and own.verdict == "right" and fits:
        return fits
    if own is not None and own.verdict == "wrong" and own.report is not None:
        known = [way for way, joined in ways.items() if _is_right(own, step, loss, joined.value)]
        if known:
            return known
    return [way for way in ways if "weighted" in way]


def _is_right(own: engine.Finding, step: Step, loss: str, number: torch.Tensor) -> bool:
    """Whether a loss's own edge would be right, were another number what was reported."""
    other = copy.copy(step)
    other.dump = copy.copy(step.dump)
    read = step.dump.read
    other.dump.read = lambda name, *where: number if name == loss else read(name, *where)  # type: ignore[method-assign]
    ends = {end: name for end, name in own.ends.items() if end in own.edge.inputs or name == loss}
    return engine.judge_edge(own.edge, ends, other, own.params).verdict == "right"
