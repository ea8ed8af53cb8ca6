"""A response inside a full sequence: put there between other positions, and cut out again.

Full-sequence trainers work on [B, L] arrays with the prompt in front of the response and padding behind it.
What stands at those other positions must not matter, so it is poison, and a trainer that reads one position
too far shows it.
"""

POISON = 55.0
"""Finite and exact in every 16-bit format: code that multiplies by a mask afterwards still gets through."""


def embed(arrays, response, before: int, after: int, fill=POISON):
    """Puts a response [B, T, …] between `before` and `after` positions that hold `fill`.

    Args:
        arrays: the array library of `response` (torch, numpy or jax.numpy).
        response: array of shape [B, T, …] with T ≥ 1; a gradient passes through to it.
        before: number of positions in front, the prompt's.
        after: number of positions behind, the padding's.
        fill: what they hold, a number, or False for a mask.

    Returns:
        Array of shape [B, before + T + after, …] and the dtype of `response`.
    """
    edge = arrays.full_like(response[:, :1], fill)
    return arrays.concatenate([edge] * before + [response] + [edge] * after, axis=1)


def cut(full, before: int, length: int):
    """Cuts positions before … before + length − 1 out of an array [B, L, …].

    Args:
        full: array of any library.
        before: number of positions in front of the response.
        length: number of response positions, T.
    """
    return full[:, before : before + length]
