"""Wrong reductions of per-token terms to one number, shared by `aggregate` and the losses that use it.

Each takes (x, mask) with x [B, T] and mask [B, T], the keywords of `aggregate`, and returns a 0-d tensor. The
terms at masked slots are read only where reading them is the mistake.
"""

from goldenppo.reference import aggregate
from goldenppo.reference.deviations._common import everywhere, select, span


def reduced(sums, counts, mask, *, horizon=None, aggregation, empty_rows="excluded", denominator="n"):
    """Reduce row sums with the token counts given, however the two came about.

    Args:
        sums: sum of each row, [B].
        counts: what each row's number of tokens is taken to be, [B].
        mask: decides only which rows count in a mean over rows, [B, T].

    Returns:
        0-d tensor.
    """
    if aggregation == "token_sum":
        return sums.sum()
    if aggregation in ("token_mean", "plain_mean"):
        return sums.sum() / _divisor(counts.sum(), denominator)
    rows = len(mask) if empty_rows == "counted" else mask.any(1).sum()
    if aggregation == "seq_mean_token_mean":
        sums = select(sums / _divisor(counts.clamp(min=1), denominator), counts > 0)
    if aggregation == "seq_mean_token_sum_norm":
        sums = sums / horizon
    return sums.sum() / rows


def _divisor(count, denominator):
    if denominator == "n+1e-8":
        return count + 1e-8
    return count.clamp(min=1) if denominator == "max(n,1)" else count


def mask_ignored(x, mask, **how):
    """Reduce over every slot."""
    return aggregate(x, everywhere(mask), **how)


def numerator_only(x, mask, **how):
    """Sum over the tokens but divide by the number of all slots."""
    return aggregate(select(x, mask), everywhere(mask), **how)


def denominator_only(x, mask, **how):
    """Sum over every slot but divide by the number of tokens."""
    return reduced(x.sum(1), mask.sum(1), mask, **how)


def span_length(x, mask, **how):
    """Sum over the tokens but count the holes between them as well."""
    return reduced(select(x, mask).sum(1), span(mask).sum(1), mask, **how)


def multiplied(x, mask, **how):
    """Multiply by the mask, so that NaN and inf at masked slots stay."""
    return reduced((x * mask).sum(1), mask.sum(1), mask, **how)


def length_squared(x, mask, **how):
    """Weigh every slot with its row's length and take the plain mean, in place of a mean of row sums."""
    if how["aggregation"] != "seq_mean_token_sum":
        return aggregate(x, mask, **how)
    return (x * mask.sum(1, keepdim=True)).mean()


def divided_twice(x, mask, **how):
    """Divide each row by its length twice in a mean of row means."""
    if how["aggregation"] != "seq_mean_token_mean":
        return aggregate(x, mask, **how)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    return aggregate(x / lengths, mask, **how)


def rows_summed(x, mask, **how):
    """Sum the normed rows where their mean is asked for."""
    if how["aggregation"] != "seq_mean_token_sum_norm":
        return aggregate(x, mask, **how)
    return aggregate(x, mask, aggregation="token_sum") / how["horizon"]


def width_as_horizon(x, mask, **how):
    """Divide by the width of the array where a constant horizon is asked for."""
    return aggregate(x, mask, **{**how, "horizon": x.shape[1]})
