"""Per-micro-batch losses against the loss that was reported for the batch (INV-6)."""

from __future__ import annotations

from goldenppo.conformance.audit import engine
from goldenppo.conformance.audit.edges import Edge
from goldenppo.conformance.audit.step import Step
from goldenppo.conformance.audit.tracked import Tracked

LOSSES = ("policy_loss", "value_loss")


def findings(step: Step, found: list[engine.Finding], only: list[str] | None) -> list[engine.Finding]:
    """One finding per loss whose micro-batches the dump holds.

    A loss of the whole batch is Σ w_k·L_k with w_k the share of tokens under a token mean, of rows under a mean over rows,
    and 1 under a sum; the variant is the one that the loss's own edge has, where that could be told.

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
    wanted = _wanted(own)
    right = [way for way in fits if way in wanted or (not wanted and "weighted" in way)]
    finding = engine.Finding(edge, {"x": name, "value": loss}, "right" if right else "wrong", dtype=dtype, compared=1)
    if not right:
        expected = " or ".join(wanted) if wanted else "their mean, weighted by tokens or by rows"
        finding.reason = f"{loss} is {' and '.join(fits) or 'no mean of its micro-batches'}; expected {expected} (INV-6)"
        if not wanted and not fits and not any("weighted" in way for way in ways):
            finding.verdict, finding.reason = "unchecked", "the dump has no micro_tokens and no micro_rows"
    return finding


def _wanted(own: engine.Finding | None) -> list[str]:
    """How the micro-batches of a loss have to be joined, by the aggregation that its own edge has."""
    values = own.variant.get("aggregation", []) if own is not None and own.verdict == "right" else []
    kinds = {
        "token_mean": "their mean, weighted by tokens",
        "plain_mean": "their mean, weighted by tokens",
        "token_sum": "their sum",
    }
    return list(dict.fromkeys(kinds.get(value, "their mean, weighted by rows") for value in values))
