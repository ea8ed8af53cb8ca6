"""Known mistakes in masked whitening."""

from goldenppo.reference import whiten
from goldenppo.reference.deviations._common import deviation_of, everywhere, select


def _multiplier(v, epsilon):
    """Return what `epsilon` makes of a variance."""
    if epsilon.startswith("std+"):
        return 1 / (v.sqrt() + float(epsilon.removeprefix("std+")))
    return (v.clamp(min=1e-8) if epsilon == "max(var,1e-8)" else v + 1e-8).rsqrt()


def _mean(x, mask):
    return select(x, mask).sum() / mask.sum()


def _bessel(mask, variance):
    n = mask.sum().double()  # int/int would be float32
    return n / (n - 1) if variance == "unbiased" else n / n


def _variance(x, mask, variance):
    return _mean((x - _mean(x, mask)).square(), mask) * _bessel(mask, variance)


def _scaled(x, v, mask, params, mu=None):
    """Return x whitened with this variance and this mean."""
    mu = _mean(x, mask) if mu is None else mu
    kept = mu if params["mean"] == "kept" else 0
    return select((x - mu) * _multiplier(v, params["epsilon"]) + kept, mask)


@deviation_of(whiten)
def wh_over_padding(x, mask, **params):
    """Take mean and variance over every slot, with what stands at the masked ones."""
    return select(whiten(x, everywhere(mask), **params), mask)


@deviation_of(whiten)
def wh_over_zeroed_padding(x, mask, **params):
    """Take mean and variance over every slot, masked ones counted as 0."""
    return select(whiten(select(x, mask), everywhere(mask), **params), mask)


@deviation_of(whiten)
def wh_mean_over_slots(x, mask, **params):
    """Divide the sum over the tokens by the number of all slots to get the mean."""
    mu = select(x, mask).mean()
    v = _mean((x - mu).square(), mask) * _bessel(mask, params["variance"])
    return _scaled(x, v, mask, params, mu)


@deviation_of(whiten)
def wh_not_centred(x, mask, **params):
    """Divide by the deviation without removing the mean: x / std."""
    return select(x * _multiplier(_variance(x, mask, params["variance"]), params["epsilon"]), mask)


@deviation_of(whiten)
def wh_not_scaled(x, mask, **params):
    """Remove the mean without dividing by the deviation: x − mean."""
    return select(x - _mean(x, mask), mask)


@deviation_of(whiten)
def wh_divided_by_variance(x, mask, **params):
    """Leave the square root out: (x − mean) / var."""
    return _scaled(x, _variance(x, mask, params["variance"]).square(), mask, params)


@deviation_of(whiten)
def wh_by_second_moment(x, mask, **params):
    """Divide by the root of the mean square, which still holds the mean."""
    return _scaled(x, _mean(x.square(), mask) * _bessel(mask, params["variance"]), mask, params)


@deviation_of(whiten)
def wh_per_row(x, mask, **params):
    """Whiten each row by itself in place of the batch."""
    result = select(x, mask)
    for b in range(len(x)):
        result[b] = whiten(x[b : b + 1], mask[b : b + 1], **params)[0]
    return result


@deviation_of(whiten)
def wh_variance_by_mean_of_squares(x, mask, **params):
    """Form the variance as mean(x²) − mean(x)², which cancels where the mean is large."""
    v = _mean(x.square(), mask) - _mean(x, mask).square()
    return _scaled(x, v * _bessel(mask, params["variance"]), mask, params)


@deviation_of(whiten)
def wh_variance_floored(x, mask, **params):
    """Raise the variance to at least 1e-6 before the square root."""
    return _scaled(x, _variance(x, mask, params["variance"]).clamp(min=1e-6), mask, params)


@deviation_of(whiten)
def wh_mask_multiplied(x, mask, **params):
    """Multiply by the mask in place of selecting: NaN or inf at a masked slot makes every result NaN."""
    mu = (x * mask).sum() / mask.sum()
    v = ((x - mu).square() * mask).sum() / mask.sum() * _bessel(mask, params["variance"])
    return _scaled(x, v, mask, params, mu)
