"""Every random number of the run: made on the CPU, a function of (seed, stream, step) and of nothing else.

No generator is carried from stage to stage, so a stage can be repeated alone and every device sees the same
numbers. Only the raw bits of Philox and exact arithmetic are used for weights, data and orders; the Gumbel
noise takes two logarithms more.
"""

from __future__ import annotations

import math

import numpy
import torch
from torch import Tensor

__all__ = ["STREAMS", "choices", "gumbel", "permutation", "uniform"]

# One number per purpose: two purposes never share a stream.
STREAMS = {
    "policy_weights": 1,
    "reward_weights": 2,
    "demonstrations": 3,
    "preferences": 4,
    "prompts": 5,
    "sampling": 6,
    "minibatches": 7,
    "evaluation_prompts": 8,
    "evaluation_sampling": 9,
}


def uniform(seed: int, stream: str, step: int, shape: tuple[int, ...]) -> Tensor:
    """Return numbers in the open interval (0, 1), each exact in float64.

    u = (⌊raw / 2¹²⌋ + ½) · 2⁻⁵² with raw the 64-bit words of Philox4x64-10, key (seed, stream), whose counter
    starts at step·2⁶⁴.

    Args:
        seed: int in [0, 2⁶³).
        stream: a name of `STREAMS`.
        step: int >= 0; what is drawn at one step never overlaps another step's numbers.
        shape: shape of the result.

    Returns:
        float64 tensor on the CPU.

    Raises:
        KeyError: the stream has no name in `STREAMS`.

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3 (Philox); bits by numpy.
    """
    bits = numpy.random.Philox(key=[seed, STREAMS[stream]], counter=[0, step, 0, 0])
    raw = bits.random_raw(math.prod(shape)) >> numpy.uint64(12)
    return torch.from_numpy((raw.astype(numpy.float64) + 0.5) * 2.0**-52).reshape(shape)


def choices(seed: int, stream: str, step: int, shape: tuple[int, ...], options: int) -> Tensor:
    """Return integers in [0, options), each about equally likely: ⌊u·options⌋.

    Returns:
        int64 tensor on the CPU.
    """
    return (uniform(seed, stream, step, shape) * options).floor().to(torch.int64)


def permutation(seed: int, stream: str, step: int, count: int) -> Tensor:
    """Return the integers [0, count) in random order: the order of as many uniform numbers.

    Returns:
        int64 tensor [count] on the CPU.
    """
    return uniform(seed, stream, step, (count,)).argsort(stable=True)


def gumbel(seed: int, stream: str, step: int, shape: tuple[int, ...]) -> Tensor:
    """Return standard Gumbel noise, −log(−log u); argmax(z + noise) samples from softmax(z).

    Returns:
        float64 tensor on the CPU.

    Source: Maddison et al. 2014 (arXiv:1411.0030), the Gumbel-max trick.
    """
    return -(-uniform(seed, stream, step, shape).log()).log()
