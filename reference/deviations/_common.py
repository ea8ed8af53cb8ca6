"""What the deviations share: the signature of their op, and the positions of a mask that bugs mix up."""

import inspect
from functools import wraps

import torch


def deviation_of(op):
    """Return a decorator that gives a function the signature of the reference function `op`.

    The decorated function receives the inputs positionally and every parameter and axis by keyword, defaults
    filled in, so it names only those that it changes. 16-bit inputs arrive as float32, as the reference
    forms its results there.

    Args:
        op: a function of goldenppo.reference.

    Returns:
        The decorator.
    """
    signature = inspect.signature(op)

    def decorate(function):
        @wraps(function)
        def deviation(*args, **kwargs):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return function(*map(_widened, given.args), **given.kwargs)

        deviation.__signature__ = signature
        return deviation

    return decorate


def _widened(x):
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x


def select(x, mask):
    """Return x where the mask is True and 0 elsewhere, whatever stands there."""
    return torch.where(mask, x, torch.zeros_like(x))


def late(x, fill):
    """Return x one position later: x[:, t-1] at t, and `fill` at 0."""
    return torch.cat([torch.full_like(x[:, :1], fill), x[:, :-1]], dim=1)


def early(x, fill):
    """Return x one position earlier: x[:, t+1] at t, and `fill` at the last position."""
    return torch.cat([x[:, 1:], torch.full_like(x[:, :1], fill)], dim=1)


def span(mask):
    """Return True from the first to the last token of each row: the mask with its holes filled."""
    return (mask.cumsum(1) > 0) & (mask.flip(1).cumsum(1).flip(1) > 0)


def first(mask):
    """Return True at the first token of each row only."""
    return mask & (mask.cumsum(1) == 1)


def last(mask):
    """Return True at the last token of each row only."""
    return first(mask.flip(1)).flip(1)


def everywhere(mask):
    """Return a mask of the same shape that is True at every slot."""
    return torch.ones_like(mask)
