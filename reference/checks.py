"""Argument checks: each message says what was given and what was expected, for every offender at once."""

from __future__ import annotations

import torch


def same_shape(**arrays: torch.Tensor) -> None:
    """Refuses arrays whose shapes differ: a broadcast would give a number, and the wrong one.

    Raises:
        ValueError: names every array with its shape.
    """
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) > 1:
        given = "; ".join(f"{name} has shape {tuple(array.shape)}" for name, array in arrays.items())
        raise ValueError(f"{given}; expected one shape")


def is_mask(mask: torch.Tensor, name: str = "mask") -> None:
    """Refuses a mask that is not boolean.

    Raises:
        ValueError: names the dtype.
    """
    if mask.dtype is not torch.bool:
        raise ValueError(f"{name} has dtype {mask.dtype}; expected torch.bool, True where a token counts")


def one_of(name: str, value, allowed: tuple) -> None:
    """Refuses a value that a variant axis does not have.

    Raises:
        ValueError: names the values that it has.
    """
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected {' or '.join(map(repr, allowed))}")


def wide(array: torch.Tensor) -> torch.Tensor:
    """An array in float32 if it is of a 16-bit dtype, else as it is.

    16 bits hold a log-probability to two digits; sums and exponentials of such numbers are formed in float32 or wider.
    """
    return array.float() if array.dtype in (torch.bfloat16, torch.float16) else array


def inside(array: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """An array with 0 where the mask is False, selected before anything is computed from it.

    Selecting afterwards, or multiplying by the mask, would let an overflow at a masked slot turn the gradient into NaN.
    """
    return torch.where(mask, wide(array), 0.0)
