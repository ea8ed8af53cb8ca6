"""The tolerance law, element by element."""

import math

import pytest

from goldenppo.conformance.cases import Block
from goldenppo.conformance.law import DTYPES, in_range, telling, tolerance, use, worst

F32, F64 = DTYPES["float32"], DTYPES["float64"]


def block(want, gauge, low=1.0, high=1.0, upto=None):
    return Block((len(want),), tuple(want), tuple(gauge), low, high, upto)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_answer_just_outside_the_tolerance_is_wrong(dtype):
    """The comparison fails in both directions as soon as the error is above the tolerance."""
    law, want, gauge = DTYPES[dtype], 0.75, 3.0
    allowed = tolerance(want, gauge, law, law)

    assert use(want + 0.8 * allowed, want, gauge, law, law) <= 1
    assert use(want + 1.3 * allowed, want, gauge, law, law) > 1
    assert use(want - 1.3 * allowed, want, gauge, law, law) > 1


def test_a_gauge_of_zero_asks_for_the_exact_answer():
    assert use(0.0, 0.0, 0.0, F32, F32) == 0
    assert use(1e-20, 0.0, 0.0, F32, F32) > 1


def test_not_a_number_is_right_only_where_it_is_wanted():
    assert use(math.nan, math.nan, 0.0, F32, F32) == 0
    assert use(math.nan, 1.0, 1.0, F32, F32) == math.inf
    assert use(0.0, math.nan, 0.0, F32, F32) == math.inf
    assert use(math.inf, 1.0, 1.0, F32, F32) == math.inf


def test_none_is_not_compared():
    assert use(math.nan, None, 0.0, F32, F32) == 0


def test_between_two_one_sided_derivatives_anything_is_right():
    assert use(0.5, 0.0, 0.0, F64, F64, upto=1.0) == 0
    assert use(1.5, 0.0, 1.0, F64, F64, upto=1.0) > 1


def test_the_first_wrong_element_is_reported():
    largest, index = worst([1.0, 2.5, 9.0], block([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]), "float32", "float32")

    assert index == 1 and largest > 1


def test_a_result_may_be_rounded_to_its_own_dtype():
    """A float32 result at float64 is allowed its own rounding, not more."""
    want = 1 / 3
    rounded = want * (1 + 2.0**-25)

    assert use(rounded, want, 0.0, F64, F32) <= 1
    assert use(rounded, want, 0.0, F64, F64) > 1


def test_out_of_range_where_an_intermediate_is_not_normal():
    assert not in_range(block([1.0], [1.0], low=1e-39), F32)
    assert not in_range(block([1.0], [1.0], high=1e39), F32)
    assert in_range(block([1.0], [1.0], low=1e-39, high=1e39), F64)


def test_a_dtype_that_takes_zero_for_an_answer_tells_nothing():
    assert not telling(block([1e-3], [1.0]), DTYPES["bfloat16"])
    assert telling(block([1e-3], [1.0]), F32)
    assert telling(block([0.0], [0.0]), F32)
