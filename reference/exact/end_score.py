"""Exact score of a response read from token scores."""

from __future__ import annotations

from goldenppo.reference.exact.number import Answer, Grid, Mask, lift

__all__ = ["end_score"]


def end_score(token_scores: Grid, attention_mask: Mask) -> Answer:
    """Return the score at the last attended position of each row, whichever side is padded.

    Args:
        token_scores: floats [B, L].
        attention_mask: bools [B, L].

    Returns:
        {"scores": Numbers [B]}, None for a row that attends to nothing.
    """
    ends = [max((t for t, m in enumerate(row) if m), default=None) for row in attention_mask]
    return {"scores": [None if t is None else lift(row[t]) for row, t in zip(token_scores, ends, strict=True)]}
