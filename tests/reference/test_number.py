"""The oracle's number: its rules of error bound, range, selection and rounding."""

import math
from fractions import Fraction

import pytest

from goldenppo.reference.exact.number import (
    NAN,
    ZERO,
    Number,
    clip,
    exceeds,
    exp,
    kinks,
    lift,
    literal,
    log,
    log_softmax,
    logsumexp,
    max_,
    min_,
    mp,
    near,
    parameter,
    sigmoid,
    softplus,
    span,
    sqrt,
    to_float,
    total,
    widest,
)


def with_gauge(value, gauge):
    return Number(Fraction(value), gauge)


class TestGauge:
    def test_inputs_are_exact_and_parameters_may_be_rounded(self):
        assert lift(0.75).gauge == 0
        assert parameter(-0.75).gauge == 0.75
        assert literal(3).gauge == 0

    @pytest.mark.parametrize(
        ("result", "value", "gauge"),
        [
            (lambda a, b: a + b, 5, 0.5 + 0.25 + 5),
            (lambda a, b: a - b, 1, 0.5 + 0.25 + 1),
            (lambda a, b: a * b, 6, 3 * 0.25 + 2 * 0.5 + 6),
            (lambda a, b: a / b, 1.5, 0.5 / 2 + 1.5 * 0.25 / 2 + 1.5),
            (lambda a, b: -a, -3, 0.5),
            (lambda a, b: abs(-a), 3, 0.5),
            (lambda a, b: 1 - a, -2, 0.5 + 2),
            (lambda a, b: sqrt(a + 1), 2, (0.5 + 4) / 4 + 2),
            (lambda a, b: total([a, b, -b]), 3, 1.0 + 7),
        ],
    )
    def test_each_operation_adds_its_result_to_what_it_propagates(self, result, value, gauge):
        got = result(with_gauge(3, 0.5), with_gauge(2, 0.25))
        assert to_float(got) == value
        assert got.gauge == gauge

    def test_functions_propagate_with_their_derivatives(self):
        x = with_gauge(2, 0.5)
        assert exp(x).gauge == pytest.approx(math.exp(2) * 0.5 + math.exp(2), rel=1e-15)
        assert log(x).gauge == pytest.approx(0.5 / 2 + math.log(2), rel=1e-15)

    @pytest.mark.parametrize("x", [-30.0, -2.0, 0.5, 40.0])
    def test_softplus_and_sigmoid_cover_their_composed_forms(self, x):
        x = with_gauge(x, 0.5)
        one = literal(1)
        assert softplus(x).gauge >= log(one + exp(x)).gauge * (1 - 1e-12)
        assert softplus(x).gauge >= log(rounded_sigmoid(-x)).gauge * (1 - 1e-12)
        assert sigmoid(x).gauge >= (one / (one + exp(-x))).gauge * (1 - 1e-12)
        assert sigmoid(x).gauge >= (one - rounded_sigmoid(-x)).gauge * (1 - 1e-12)

    def test_log_softmax_covers_both_of_its_forms(self):
        items = [lift(x) for x in (3.0, 50.0, -2.0, 49.5)]
        shifted = [item - items[1] for item in items]
        by_shift = shifted[3] - log(total([exp(item) for item in shifted]))
        by_lse = items[3] - logsumexp(items)
        got = log_softmax(items, 3)
        assert abs(got.value - by_shift.value) < 1e-50
        assert got.gauge >= by_lse.gauge >= 49.5
        assert got.gauge >= by_shift.gauge * (1 - 1e-12)

    @pytest.mark.parametrize("operation", [lambda x: x + 0, lambda x: x * 1, lambda x: x / 1, lambda x: total([ZERO, x])])
    def test_what_is_exact_at_every_dtype_is_no_operation(self, operation):
        x = with_gauge(3, 0.5)
        assert operation(x) is x

    def test_selection_takes_the_winners_gauge_and_adds_nothing(self):
        far, x = with_gauge(8, 0.125), with_gauge(2, 0.5)
        assert max_(far, x) is far
        assert min_(far, x) is x
        assert clip(x, -1, 1).gauge == 0
        assert clip(x, 0, 4) is x

    def test_selection_takes_the_larger_gauge_near_a_tie(self):
        a, b = with_gauge(Fraction(2) + Fraction(1, 64), 0.25), with_gauge(2, 0.5)
        assert near(a, b)
        assert max_(a, b).gauge == 0.5
        assert max_(a, b).value == a.value
        assert not near(with_gauge(Fraction(2) + Fraction(3, 64), 0.25), b)

    def test_widest_takes_the_largest_gauge_of_one_value(self):
        x = widest(with_gauge(2, 0.5), with_gauge(2, 3.0), with_gauge(2, 1.0))
        assert x.gauge == 3.0
        with pytest.raises(ValueError, match="differ"):
            widest(with_gauge(2, 0.5), with_gauge(3, 0.5))


class TestRange:
    def test_a_result_counts_once_it_is_used(self):
        product = lift(0.5) * lift(0.125)
        assert span(product) == (0.125, 0.5)
        assert span(product + lift(4.0)) == (0.0625, 4.0625)

    def test_the_result_counts_in_the_upper_end_only(self):
        assert span(lift(0.5) * lift(0.25)) == (0.25, 0.5)
        assert span(lift(300.0) * lift(300.0)) == (300.0, 90000.0)
        assert span(lift(2.0)) == (math.inf, 2.0)

    def test_parameters_literals_and_zero_are_not_recorded(self):
        assert span(lift(2.0) + parameter(1e-8)).__getitem__(0) == 2.0
        assert span((lift(2.0) + parameter(1e-8) * parameter(1e-8)) * literal(1000))[0] == pytest.approx(2.0)
        assert span((lift(2.0) - lift(2.0)) * lift(4.0)) == (2.0, 4.0)

    def test_an_addend_beside_which_it_cannot_be_seen_does_no_harm(self):
        assert span(total([exp(lift(-100.0)), lift(1.0)]) * literal(2))[0] == 1.0
        assert span(exp(lift(-100.0)) * literal(2))[0] == pytest.approx(math.exp(-100))

    def test_a_remainder_below_the_noise_of_its_own_bound_is_not_recorded(self):
        remainder = parameter(0.95) * lift(20.0) - lift(19.0)  # 0.95 is not 19/20 in binary
        assert 0 < remainder.size < 1e-14
        assert span(remainder * literal(2))[0] == 19.0

    def test_magnitudes_beyond_float64_keep_their_side(self):
        assert span(exp(lift(1000.0)))[1] == math.inf
        assert span(exp(lift(-1000.0)) * literal(2))[0] == 5e-324


class TestKinks:
    def test_distances_are_in_units_of_the_gauges(self):
        with kinks() as found:
            max_(with_gauge(3, 0.5), with_gauge(2, 0.5))
            exceeds(with_gauge(3, 0.25), with_gauge(2, 0.25))
            abs(with_gauge(-3, 1.5))
        assert found == [1.0, 2.0, 2.0]

    def test_exact_operands_are_compared_relatively_and_a_tie_is_zero(self):
        with kinks() as found:
            min_(lift(3.0), lift(1.0))
            max_(lift(2.0), lift(2.0))
        assert found == [0.5, 0.0]

    def test_blocks_nest_and_nothing_is_recorded_outside(self):
        with kinks() as outer:
            with kinks() as inner:
                clip(lift(3.0), 0, 1)
            max_(lift(3.0), lift(1.0))
        max_(lift(3.0), lift(1.0))
        assert len(inner) == 2
        assert outer == [*inner, 0.5]


class TestValue:
    def test_rational_arithmetic_stays_exact(self):
        assert (lift(0.1) * 3 - parameter(0.3)).value == 3 * Fraction(0.1) - Fraction(0.3)
        assert exp(lift(1.0) - lift(1.0)).value == Fraction(1)

    def test_rounding_to_float64_happens_once(self):
        half = 1 + Fraction(1, 2**53)  # half way between two floats
        assert to_float(Number(half)) == 1.0
        assert to_float(Number(half + Fraction(1, 2**200))) == 1 + 2**-52
        assert to_float(Number(mp.mpf(1) + mp.mpf(2) ** -53 + mp.mpf(2) ** -150)) == 1 + 2**-52
        assert to_float(Number(Fraction(3, 2**1075))) == 1e-323  # 1.5 subnormals, ties to even
        assert to_float(Number(mp.mpf(3) / 2**1075)) == 1e-323
        assert to_float(exp(lift(1000.0))) == math.inf
        assert to_float(-exp(lift(1000.0))) == -math.inf

    def test_confident_tokens_keep_their_digits(self):
        log_p = log_softmax([lift(0.0), lift(-100.0), lift(-101.0)], 0)
        with mp.workdps(120):
            want = -mp.log1p(mp.exp(-100) + mp.exp(-101))
        assert to_float(log_p) == float(want)

    def test_zero_by_zero_is_an_answer_that_spreads(self):
        assert math.isnan(to_float(lift(0.0) / 0))
        for spread in (
            NAN + 1,
            2 * NAN,
            NAN / 3,
            -NAN,
            max_(NAN, ZERO),
            exp(NAN),
            sqrt(NAN),
            total([NAN, ZERO]),
        ):
            assert spread.value is None

    @pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_refused(self, x):
        with pytest.raises(ValueError, match="finite"):
            lift(x)

    def test_a_float_in_a_formula_is_refused(self):
        with pytest.raises(TypeError, match="neither"):
            lift(1.0) + 0.1

    def test_impossible_arguments_are_refused(self):
        with pytest.raises(ValueError, match="divided by 0"):
            lift(1.0) / 0
        with pytest.raises(ValueError, match="logarithm"):
            log(lift(0.0))
        with pytest.raises(ValueError, match="square root"):
            sqrt(lift(-1.0))
        with pytest.raises(ValueError, match="0/0"):
            assert NAN < ZERO


def rounded_sigmoid(x):
    """σ(x) of a library: one rounding of the result, and what the argument carries."""
    s = 1 / (1 + math.exp(-to_float(x)))
    return Number(sigmoid(x).value, s * (1 - s) * x.gauge + s)
