"""Known mistakes in the clipped critic loss."""

import torch

from goldenppo.reference import aggregate, value_loss
from goldenppo.reference.deviations import _reductions
from goldenppo.reference.deviations._common import deviation_of, early, everywhere, last, late, select, span


def _pair(values, clipped, returns):
    """Return the squared errors of the values and of the clipped values."""
    return (values - returns).square(), (clipped - returns).square()


def _around(values, centre, params):
    c = params["clip"]
    return values if c is None else values.clamp(centre - c, centre + c)


def _terms(errors, params):
    """Return the loss of each token from the two squared errors."""
    plain, clipped = errors
    if params["clip"] is None:
        terms = plain
    elif params["form"] == "clamped_error":
        terms = plain.clamp(max=params["clip"])
    else:
        terms = clipped if params["form"] == "clipped_only" else torch.maximum(plain, clipped)
    return terms / 2 if params["factor"] == "half" else terms


def _right_terms(inputs, params):
    """Return the loss of each slot, masked or not; gradients reach all of values, old values and returns."""
    values, old_values, returns = inputs
    return _terms(_pair(values, _around(values, old_values, params), returns), params)


def _how(params):
    return {name: params[name] for name in ("horizon", "aggregation", "empty_rows")}


def _with_terms(terms, inputs, params):
    """Return the reference outputs with the loss of these per-token terms."""
    loss = aggregate(terms, inputs[3], **_how(params))
    return value_loss(*inputs, **params)._replace(loss=loss)


def _selected(values, old_values, returns, mask):
    return select(values, mask), select(old_values.detach(), mask), select(returns.detach(), mask)


@deviation_of(value_loss)
def vl_loss_sign(*inputs, **params):
    """Maximise the squared error: the loss with the opposite sign."""
    right = value_loss(*inputs, **params)
    return right._replace(loss=-right.loss)


@deviation_of(value_loss)
def vl_clip_around_new_value(values, old_values, returns, mask, **params):
    """Clip the new value around itself, so that the clip never acts: ½·(V − R)².

    The same number comes out where a clip that was given is not used at all.
    """
    return value_loss(values, old_values, returns, mask, **{**params, "clip": None})


@deviation_of(value_loss)
def vl_clip_around_zero(values, old_values, returns, mask, **params):
    """Clip the value itself to ±clip in place of its distance to the old value: clip(V, −c, c)."""
    V, _, R = _selected(values, old_values, returns, mask)
    terms = _terms(_pair(V, _around(V, torch.zeros_like(V), params), R), params)
    return _with_terms(terms, (values, old_values, returns, mask), params)


@deviation_of(value_loss)
def vl_clip_relative(values, old_values, returns, mask, **params):
    """Take the clip for a share of the old value: clip(V, V_old·(1 ∓ c))."""
    inputs = (values, old_values, returns, mask)
    if params["clip"] is None:
        return value_loss(*inputs, **params)
    V, old, R = _selected(*inputs)
    reach = params["clip"] * old.abs()
    return _with_terms(_terms(_pair(V, V.clamp(old - reach, old + reach), R), params), inputs, params)


@deviation_of(value_loss)
def vl_min_for_max(values, old_values, returns, mask, **params):
    """Take the smaller of the two squared errors."""
    inputs = (values, old_values, returns, mask)
    V, old, R = _selected(*inputs)
    plain, clipped = _pair(V, _around(V, old, params), R)
    if params["form"] == "max":
        plain = clipped = torch.minimum(plain, clipped)
    return _with_terms(_terms((plain, clipped), params), inputs, params)


@deviation_of(value_loss)
def vl_half_twice(values, old_values, returns, mask, **params):
    """Apply the factor ½ twice."""
    right = value_loss(values, old_values, returns, mask, **params)
    return right._replace(loss=right.loss / 2) if params["factor"] == "half" else right


@deviation_of(value_loss)
def vl_against_zeros(values, old_values, returns, mask, **params):
    """Fit the values to 0: the returns never reach the loss."""
    return value_loss(values, old_values, torch.zeros_like(returns), mask, **params)


@deviation_of(value_loss)
def vl_values_one_late(values, old_values, returns, mask, **params):
    """Compare each return with the value of the next position, and the last position's with 0."""
    return value_loss(early(select(values, mask), fill=0.0), old_values, returns, mask, **params)


@deviation_of(value_loss)
def vl_mask_ignored(values, old_values, returns, mask, **params):
    """Count every slot, padding included."""
    return value_loss(values, old_values, returns, everywhere(mask), **params)


@deviation_of(value_loss)
def vl_mask_in_numerator_only(values, old_values, returns, mask, **params):
    """Sum the loss over the tokens but divide by the number of all slots."""
    inputs = (values, old_values, returns, mask)
    terms = _right_terms(_selected(*inputs), params)
    loss = _reductions.numerator_only(terms, mask, **_how(params))
    return value_loss(*inputs, **params)._replace(loss=loss)


@deviation_of(value_loss)
def vl_mask_in_denominator_only(values, old_values, returns, mask, **params):
    """Sum the loss over all slots but divide by the number of tokens."""
    terms = _right_terms((values, old_values.detach(), returns.detach()), params)
    loss = _reductions.denominator_only(terms, mask, **_how(params))
    return value_loss(values, old_values, returns, mask, **params)._replace(loss=loss)


@deviation_of(value_loss)
def vl_holes_counted(values, old_values, returns, mask, **params):
    """Fit the holes of the mask (tool output): every slot from a row's first to its last token counts."""
    return value_loss(values, old_values, returns, span(mask), **params)


@deviation_of(value_loss)
def vl_last_token_dropped(values, old_values, returns, mask, **params):
    """Leave out each row's last token, as when the end token counts as padding."""
    return value_loss(values, old_values, returns, mask & ~last(mask), **params)


@deviation_of(value_loss)
def vl_mask_one_late(values, old_values, returns, mask, **params):
    """Read the mask of the position before: a row loses its first token and gains the slot after its last."""
    return value_loss(values, old_values, returns, late(mask, fill=False), **params)


@deviation_of(value_loss)
def vl_sum_norm_without_row_mean(values, old_values, returns, mask, **params):
    """Leave out the mean over rows of seq_mean_token_sum_norm: Σ loss / horizon."""
    inputs = (values, old_values, returns, mask)
    if params["aggregation"] != "seq_mean_token_sum_norm":
        return value_loss(*inputs, **params)
    total = value_loss(*inputs, **{**params, "aggregation": "token_sum"})
    return total._replace(loss=total.loss / params["horizon"])


@deviation_of(value_loss)
def vl_horizon_is_width(*inputs, **params):
    """Divide by the width T of the padded batch in place of the constant horizon."""
    return value_loss(*inputs, **{**params, "horizon": inputs[0].shape[1]})


@deviation_of(value_loss)
def vl_mask_multiplied(values, old_values, returns, mask, **params):
    """Multiply by the mask in place of selecting: NaN or inf at a masked slot reaches the loss."""
    terms = _right_terms((values, old_values.detach(), returns.detach()), params)
    loss = _reductions.multiplied(terms, mask, **_how(params))
    return value_loss(values, old_values, returns, mask, **params)._replace(loss=loss)


@deviation_of(value_loss)
def vl_unreduced(values, old_values, returns, mask, **params):
    """Leave the loss unreduced where no clip is given: one number a position, [B, T]."""
    inputs = (values, old_values, returns, mask)
    if params["clip"] is not None:
        return value_loss(*inputs, **params)
    return value_loss(*inputs, **params)._replace(loss=_right_terms(_selected(*inputs), params))


@deviation_of(value_loss)
def vl_gradient_dead(values, *others, **params):
    """Cut the graph: the right value without a gradient."""
    return value_loss(values.detach(), *others, **params)


@deviation_of(value_loss)
def vl_returns_not_detached(values, old_values, returns, mask, **params):
    """Let the gradient reach the returns: the target moves with the prediction."""
    V, old, _ = _selected(values, old_values, returns, mask)
    terms = _right_terms((V, old, select(returns, mask)), params)
    return _with_terms(terms, (values, old_values, returns, mask), params)


@deviation_of(value_loss)
def vl_old_values_not_detached(values, old_values, returns, mask, **params):
    """Let the gradient reach the old values through the clip."""
    V, _, R = _selected(values, old_values, returns, mask)
    terms = _right_terms((V, select(old_values, mask), R), params)
    return _with_terms(terms, (values, old_values, returns, mask), params)


@deviation_of(value_loss)
def vl_clip_fraction_is_the_loss(values, old_values, returns, mask, **params):
    """Report the mean squared error as the clip fraction where no clip is given, in place of 0."""
    right = value_loss(values, old_values, returns, mask, **params)
    if params["clip"] is not None:
        return right
    V, _, R = _selected(values, old_values, returns, mask)
    return right._replace(clip_fraction=aggregate((V - R).square(), mask))


@deviation_of(value_loss)
def vl_clip_fraction_outside_band(values, old_values, returns, mask, **params):
    """Report the share of tokens whose value moved by more than the clip, whichever error is larger."""
    right = value_loss(values, old_values, returns, mask, **params)
    if params["clip"] is None:
        return right
    V, old, _ = _selected(values, old_values, returns, mask)
    return right._replace(clip_fraction=aggregate(((V - old).abs() > params["clip"]).to(V.dtype), mask))


@deviation_of(value_loss)
def vl_clip_fraction_over_padding(*inputs, **params):
    """Divide the number of clipped tokens by the number of all slots."""
    right = value_loss(*inputs, **params)
    return right._replace(clip_fraction=right.clip_fraction * inputs[3].to(inputs[0].dtype).mean())
