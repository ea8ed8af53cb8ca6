"""Known mistakes in the reduction of per-token terms to one number."""

from goldenppo.reference import aggregate
from goldenppo.reference.deviations import _reductions
from goldenppo.reference.deviations._common import deviation_of, first, last, late, span


@deviation_of(aggregate)
def agg_mask_ignored(x, mask, **how):
    """Reduce over every slot, masked ones included: Σ x / (B·T) in place of Σ x·m / N."""
    return _reductions.mask_ignored(x, mask, **how)


@deviation_of(aggregate)
def agg_mask_in_numerator_only(x, mask, **how):
    """Divide the sum over tokens by the number of all slots: Σ x·m / (B·T)."""
    return _reductions.numerator_only(x, mask, **how)


@deviation_of(aggregate)
def agg_mask_in_denominator_only(x, mask, **how):
    """Divide the sum over all slots by the number of tokens: Σ x / N."""
    return _reductions.denominator_only(x, mask, **how)


@deviation_of(aggregate)
def agg_holes_counted(x, mask, **how):
    """Fill the holes of the mask: every slot from a row's first to its last token counts."""
    return aggregate(x, span(mask), **how)


@deviation_of(aggregate)
def agg_holes_in_denominator(x, mask, **how):
    """Leave the holes out of the sum but not of the count: Σ x·m over the lengths of the spans."""
    return _reductions.span_length(x, mask, **how)


@deviation_of(aggregate)
def agg_length_squared(x, mask, **how):
    """Take the plain mean over all slots of x times the row's length where a mean of row sums is asked for.

    A row of n tokens weighs n²/T in place of n, and masked slots enter.
    """
    return _reductions.length_squared(x, mask, **how)


@deviation_of(aggregate)
def agg_row_mean_divided_twice(x, mask, **how):
    """Divide each row's mean by the row's length once more: mean over rows of Σ x·m / n²."""
    return _reductions.divided_twice(x, mask, **how)


@deviation_of(aggregate)
def agg_sum_norm_without_row_mean(x, mask, **how):
    """Leave out the mean over rows of seq_mean_token_sum_norm: Σ x·m / horizon."""
    return _reductions.rows_summed(x, mask, **how)


@deviation_of(aggregate)
def agg_horizon_is_width(x, mask, **how):
    """Divide by the width T of the padded batch in place of the constant horizon."""
    return _reductions.width_as_horizon(x, mask, **how)


@deviation_of(aggregate)
def agg_last_token_dropped(x, mask, **how):
    """Leave out each row's last token, as when the end token counts as padding."""
    return aggregate(x, mask & ~last(mask), **how)


@deviation_of(aggregate)
def agg_first_token_dropped(x, mask, **how):
    """Leave out each row's first token."""
    return aggregate(x, mask & ~first(mask), **how)


@deviation_of(aggregate)
def agg_mask_one_late(x, mask, **how):
    """Read the mask of the position before: a row loses its first token and gains the slot after its last."""
    return aggregate(x, late(mask, fill=False), **how)


@deviation_of(aggregate)
def agg_mask_multiplied(x, mask, **how):
    """Multiply by the mask in place of selecting: NaN or inf at a masked slot reaches the result."""
    return _reductions.multiplied(x, mask, **how)
