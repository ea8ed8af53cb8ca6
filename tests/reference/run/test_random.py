"""Random numbers are a function of seed, stream and step."""

import numpy
import pytest
import torch

from goldenppo.reference.run.random import STREAMS, gumbel, permutation, uniform


def test_philox_is_the_published_one():
    """The bits are the known answer of Random123 for key 0 and counter 0 (philox4x64, 10 rounds)."""
    bits = numpy.random.Philox(key=[0, 0], counter=[2**64 - 1] * 4)  # numpy counts up before it draws

    words = [int(word) for word in bits.random_raw(4)]

    assert words == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]


def test_numbers_are_pinned():
    """These numbers may never change: recordings and initial weights hang on them."""
    expected = [0.5194702346216372, 0.03808623283639456, 0.5316851626622084]

    assert uniform(7, "sampling", 3, (3,)).tolist() == expected


def test_streams_steps_and_seeds_differ():
    """No two purposes, steps or seeds share numbers, and the shape only folds them."""
    drawn = [uniform(s, name, step, (2, 3)) for s in (0, 1) for name in STREAMS for step in (0, 1)]

    assert len({tuple(d.flatten().tolist()) for d in drawn}) == len(drawn)
    assert len(set(STREAMS.values())) == len(STREAMS)
    assert torch.equal(uniform(0, "prompts", 5, (6,)).reshape(2, 3), uniform(0, "prompts", 5, (2, 3)))


def test_distributions():
    """Uniform numbers stay in (0, 1), Gumbel noise has mean 0.577, a permutation has every integer once."""
    u, g = uniform(0, "prompts", 0, (100_000,)), gumbel(0, "prompts", 0, (100_000,))

    assert u.min() > 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.005
    assert abs(float(g.mean()) - 0.5772) < 0.02
    assert sorted(permutation(0, "minibatches", 0, 50).tolist()) == list(range(50))


def test_a_stream_without_a_name_is_refused():
    with pytest.raises(KeyError):
        uniform(0, "dropout", 0, (1,))
