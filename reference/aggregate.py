"""Reduction of per-token terms to one number."""

import torch

from goldenppo.reference.checks import inside, is_mask, one_of, same_shape, wide

MODES = ("token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "plain_mean")


def aggregate(x, mask, *, horizon=None, aggregation="token_mean", empty_rows="excluded", denominator="n"):
    """Reduces per-token terms to one number.

    With m the mask, N = Σ_bt m_bt tokens in all, n_b = Σ_t m_bt in row b and K the number of rows:

        token_mean               Σ_bt x·m / N
        token_sum                Σ_bt x·m
        seq_mean_token_mean      (1/K) Σ_b (Σ_t x·m / n_b)
        seq_mean_token_sum       (1/K) Σ_b  Σ_t x·m
        seq_mean_token_sum_norm  (1/K) Σ_b (Σ_t x·m / horizon)
        plain_mean               Σ_bt x / (B·T), the mask is not read

    A row without tokens adds 0; `empty_rows` says whether K counts it. The mean of no token at all is 0/0, NaN.

    Args:
        x: terms, float [B, T].
        mask: bool [B, T], True = counts.
        horizon: constant that divides row sums under seq_mean_token_sum_norm; not the width T.
        aggregation: one of the six above.
        empty_rows: "excluded" or "counted".
        denominator: how a token count enters: "n", "n+1e-8" or "max(n,1)".

    Returns:
        A 0-d tensor, differentiable in x.

    Raises:
        ValueError: shapes differ, the mask is not boolean, an axis has no such value, or horizon is missing.

    Source: Schulman et al. 2017 (plain mean over samples); DAPO (arXiv:2503.14476) section 3.3 for the token mean;
    Dr. GRPO (arXiv:2503.20783) section 3.2 for the constant length.
    """
    _check(x, mask, horizon, aggregation, empty_rows, denominator)
    if aggregation == "plain_mean":
        return wide(x).mean()
    terms = inside(x, mask)
    if aggregation == "token_sum":
        return terms.sum()
    if aggregation == "token_mean":  # AGG-1
        return terms.sum() / _count(mask.sum(), terms.dtype, denominator)
    rows = terms.sum(1)  # [B]
    if aggregation == "seq_mean_token_mean":
        tokens = mask.sum(1)
        rows = torch.where(tokens > 0, rows / _count(tokens.clamp(min=1), terms.dtype, denominator), 0.0)
    elif aggregation == "seq_mean_token_sum_norm":
        rows = rows / horizon
    counted = mask.any(1).sum() if empty_rows == "excluded" else torch.tensor(len(mask), device=x.device)
    return rows.sum() / counted.to(terms.dtype)


def _count(tokens: torch.Tensor, dtype: torch.dtype, denominator: str) -> torch.Tensor:
    """A token count as a denominator. The count goes to the terms' dtype first: int/int would be float32."""
    n = tokens.to(dtype)
    if denominator == "n+1e-8":
        return n + 1e-8
    return n.clamp(min=1) if denominator == "max(n,1)" else n


def _check(x, mask, horizon, aggregation, empty_rows, denominator) -> None:
    same_shape(x=x, mask=mask)
    is_mask(mask)
    one_of("aggregation", aggregation, MODES)
    one_of("empty_rows", empty_rows, ("excluded", "counted"))
    one_of("denominator", denominator, ("n", "n+1e-8", "max(n,1)"))
    if aggregation == "seq_mean_token_sum_norm" and horizon is None:
        raise ValueError("aggregation 'seq_mean_token_sum_norm' needs horizon, the constant that row sums are divided by")
