"""The binding rules: what a function takes of its op, and what it is given."""

import pytest

from goldenppo.adapters import Unsupported
from goldenppo.adapters.binding import NotTheOp, bind, keyword_arguments
from goldenppo.conformance.cases import table

POLICY = table()["ops"]["policy_loss"]
FULL = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None, "horizon": 8}


def test_inputs_are_positional_and_parameters_go_by_keyword():
    """The names of input slots are free; parameters are recognised by name."""

    def function(new, old, adv, m, clip_low, clip_high=0.2): ...

    bound = bind("policy_loss", POLICY, function)

    assert bound.inputs == ("logprobs", "old_logprobs", "advantages", "mask")
    assert bound.parameters == {"clip_low", "clip_high"}
    assert bound.required == {"clip_low"}


def test_kwargs_take_no_name():
    """`**kwargs` swallows anything, so it never counts as taking a parameter."""

    def function(logprobs, old_logprobs, advantages, mask, **kwargs): ...

    assert bind("policy_loss", POLICY, function).parameters == frozenset()


def test_one_clip_offers_symmetric_cases_only():
    def function(logprobs, old_logprobs, advantages, mask, *, clip): ...

    bound = bind("policy_loss", POLICY, function)

    assert keyword_arguments(bound, FULL | {"clip_high": 0.2}, {}) == {"clip": 0.2}
    with pytest.raises(Unsupported, match=r"takes one clip; the case has clip_low 0.2, clip_high 0.28"):
        keyword_arguments(bound, FULL, {})


def test_a_parameter_that_is_none_is_left_out():
    def function(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip=None): ...

    assert "dual_clip" not in keyword_arguments(bind("policy_loss", POLICY, function), FULL, {})


def test_a_parameter_without_default_never_receives_none():
    def function(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip): ...

    with pytest.raises(Unsupported, match="dual_clip cannot be left out"):
        keyword_arguments(bind("policy_loss", POLICY, function), FULL, {})


def test_a_parameter_that_is_not_taken_stops_the_case():
    def function(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high): ...

    with pytest.raises(Unsupported, match=r"takes no dual_clip; the case has dual_clip 3.0"):
        keyword_arguments(bind("policy_loss", POLICY, function), FULL | {"dual_clip": 3.0}, {})


def test_without_horizon_one_aggregation_is_not_offered():
    """The horizon serves one aggregation only, so the other ones remain."""

    def function(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, aggregation): ...

    bound = bind("policy_loss", POLICY, function)

    assert bound.withheld() == {"aggregation": ["seq_mean_token_sum_norm"]}
    assert bound.axes == ("aggregation",)


def test_a_function_without_mask_offers_unmasked_cases():
    def function(logprobs, old_logprobs, advantages, *, clip): ...

    assert bind("policy_loss", POLICY, function).missing == ("mask",)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logprobs: 0, "takes 1 of the 4 inputs"),
        (lambda logprobs, old_logprobs, clip: 0, "takes 2 of the 4 inputs"),
        (lambda old_logprobs, logprobs, advantages, mask: 0, "has its input 'old_logprobs' in the place of 'logprobs'"),
        (lambda a, b, c, d, config: 0, "needs 'config', which is no input"),
    ],
)
def test_a_function_that_does_not_take_the_inputs_is_refused_with_a_reason(function, message):
    with pytest.raises(NotTheOp, match=message):
        bind("policy_loss", POLICY, function)
