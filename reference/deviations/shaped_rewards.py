"""Known mistakes in the token rewards.

Rewards are linear in the score and in the KL, so the reference function gives each part alone: kl_coef 0
leaves the score, scores of 0 leave the KL.
"""

import torch

from goldenppo.reference import kl_penalty, shaped_rewards
from goldenppo.reference.deviations._common import deviation_of, early, last, late, select


def _slot(mask, score_at):
    """Return True at the position of each row that the score lands on."""
    nothing = torch.zeros(mask.shape, device=mask.device)
    ones = torch.ones(len(mask), device=mask.device)
    return shaped_rewards(nothing, nothing, ones, mask, kl_coef=0.0, score_at=score_at) > 0


def _scores(scores, mask, params):
    """Return the score of each row after clip and end penalty, [B, 1]."""
    nothing = torch.zeros_like(scores[:, None].expand(mask.shape))
    placed = shaped_rewards(nothing, nothing, scores, mask, **{**params, "kl_coef": 0.0})
    return placed.sum(1, keepdim=True)


def _penalty(inputs, params):
    """Return the KL part of the rewards."""
    logprobs, ref_logprobs, scores, mask = inputs
    without = {**params, "eos_penalty": None, "ended": None}
    return shaped_rewards(logprobs, ref_logprobs, torch.zeros_like(scores), mask, **without)


def _score_moved(inputs, slot, params):
    """Return the rewards with the score at the True positions of `slot`."""
    _, _, scores, mask = inputs
    return _penalty(inputs, params) + select(_scores(scores, mask, params).expand(mask.shape), slot)


def _with_kl(inputs, kl, params):
    """Return the rewards for this KL, taken as it is at every slot."""
    _, _, scores, mask = inputs
    slot = _slot(mask, params["score_at"])
    if params["level"] == "sequence":
        kl = select(kl.sum(1, keepdim=True).expand(mask.shape), slot)
    return select(_scores(scores, mask, params).expand(mask.shape), slot) - params["kl_coef"] * kl


@deviation_of(shaped_rewards)
def sr_score_on_every_token(logprobs, ref_logprobs, scores, mask, **params):
    """Add the score to every token, so that the return grows with the length of the response."""
    return _score_moved((logprobs, ref_logprobs, scores, mask), mask, params)


@deviation_of(shaped_rewards)
def sr_score_at_last_column(logprobs, ref_logprobs, scores, mask, **params):
    """Put the score into the last column whatever the padding."""
    column = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape) == mask.shape[1] - 1
    return _score_moved((logprobs, ref_logprobs, scores, mask), column, params)


@deviation_of(shaped_rewards)
def sr_score_two_past_last(logprobs, ref_logprobs, scores, mask, **params):
    """Put the score two positions after the last token where there is room, else into the last column."""
    place = (_index(last(mask)) + 2).clamp(max=mask.shape[1] - 1)
    return _score_moved((logprobs, ref_logprobs, scores, mask), _at(place, mask), params)


@deviation_of(shaped_rewards)
def sr_score_one_early(logprobs, ref_logprobs, scores, mask, **params):
    """Put the score one position before the last token."""
    place = (_index(last(mask)) - 1).clamp(min=0)
    return _score_moved((logprobs, ref_logprobs, scores, mask), _at(place, mask), params)


@deviation_of(shaped_rewards)
def sr_score_at_token_count(logprobs, ref_logprobs, scores, mask, **params):
    """Take the number of tokens for the end of the row, which is too early after a hole or left padding."""
    after = 0 if params["score_at"] == "last_token" else 1
    place = (mask.sum(1, keepdim=True) - 1 + after).clamp(0, mask.shape[1] - 1)
    return _score_moved((logprobs, ref_logprobs, scores, mask), _at(place, mask), params)


def _index(position):
    return position.to(torch.int64).argmax(1, keepdim=True)


def _at(place, mask):
    """Return True at the position `place` of each row that has a token."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return (columns == place) & mask.any(1, keepdim=True)


@deviation_of(shaped_rewards)
def sr_score_overwrites_kl(logprobs, ref_logprobs, scores, mask, **params):
    """Assign the score in place of adding it: the KL at its position is lost."""
    slot = _slot(mask, params["score_at"])
    if params["level"] == "sequence":
        return shaped_rewards(logprobs, ref_logprobs, scores, mask, **params)
    rewards = _penalty((logprobs, ref_logprobs, scores, mask), params)
    return torch.where(slot, _scores(scores, mask, params), rewards)


@deviation_of(shaped_rewards)
def sr_score_lost_on_full_rows(logprobs, ref_logprobs, scores, mask, **params):
    """Drop the score of a row without room after its last token, where it belongs there."""
    slot = _slot(mask, params["score_at"])
    if params["score_at"] != "last_token":
        slot = slot & ~mask
    return _score_moved((logprobs, ref_logprobs, scores, mask), slot, params)


@deviation_of(shaped_rewards)
def sr_score_truncated_to_integer(logprobs, ref_logprobs, scores, mask, **params):
    """Write the score into an integer array, which cuts off its fraction."""
    return shaped_rewards(logprobs, ref_logprobs, scores.trunc(), mask, **params)


@deviation_of(shaped_rewards)
def sr_score_clip_ignored(*inputs, **params):
    """Ignore the score clip that was given."""
    return shaped_rewards(*inputs, **{**params, "score_clip": None})


@deviation_of(shaped_rewards)
def sr_score_minus_batch_mean(logprobs, ref_logprobs, scores, mask, **params):
    """Subtract the mean score of the batch from each score."""
    return shaped_rewards(logprobs, ref_logprobs, scores - scores.mean(), mask, **params)


@deviation_of(shaped_rewards)
def sr_kl_sign(*inputs, **params):
    """Reward the KL in place of penalising it: +kl_coef·kl."""
    return shaped_rewards(*inputs, **{**params, "kl_coef": -params["kl_coef"]})


@deviation_of(shaped_rewards)
def sr_kl_neither_scaled_nor_negated(*inputs, **params):
    """Use the KL itself as reward: +kl, as in log_probs − ref_log_probs."""
    return shaped_rewards(*inputs, **{**params, "kl_coef": -1.0})


@deviation_of(shaped_rewards)
def sr_kl_unscaled(*inputs, **params):
    """Leave the coefficient out: −kl."""
    return shaped_rewards(*inputs, **{**params, "kl_coef": 1.0})


@deviation_of(shaped_rewards)
def sr_kl_dropped(*inputs, **params):
    """Leave the KL out although a coefficient was given."""
    return shaped_rewards(*inputs, **{**params, "kl_coef": 0.0})


@deviation_of(shaped_rewards)
def sr_k3_direction_swapped(logprobs, ref_logprobs, scores, mask, **params):
    """Form k3 with the two models exchanged: exp(x) − 1 − x, x = ℓ − ℓ_ref."""
    inputs = (ref_logprobs, logprobs) if params["estimator"] == "k3" else (logprobs, ref_logprobs)
    return shaped_rewards(*inputs, scores, mask, **params)


@deviation_of(shaped_rewards)
def sr_kl_one_late(logprobs, ref_logprobs, scores, mask, **params):
    """Penalise each token for the KL of the token before it, and the first position for none."""
    new, ref = (late(select(x, mask), fill=0.0) for x in (logprobs, ref_logprobs))
    return shaped_rewards(new, ref, scores, mask, **params)


@deviation_of(shaped_rewards)
def sr_ref_one_late(logprobs, ref_logprobs, scores, mask, **params):
    """Compare each token with the reference log-probability of the next one."""
    return shaped_rewards(logprobs, early(select(ref_logprobs, mask), fill=0.0), scores, mask, **params)


@deviation_of(shaped_rewards)
def sr_kl_mask_one_late(logprobs, ref_logprobs, scores, mask, **params):
    """Mask the KL with the mask of the position before: the slot after the last token keeps its KL.

    A token after a hole loses its own.
    """
    seen = late(mask, fill=True)
    kl = kl_penalty(select(logprobs, seen), select(ref_logprobs, seen), estimator=params["estimator"])
    return _with_kl((logprobs, ref_logprobs, scores, mask), kl, params)


@deviation_of(shaped_rewards)
def sr_kl_not_masked(logprobs, ref_logprobs, scores, mask, **params):
    """Take the KL of every slot, masked ones included."""
    kl = kl_penalty(logprobs, ref_logprobs, estimator=params["estimator"])
    return _with_kl((logprobs, ref_logprobs, scores, mask), kl, params)


@deviation_of(shaped_rewards)
def sr_kl_averaged(logprobs, ref_logprobs, scores, mask, **params):
    """Subtract the mean KL of a response where the sum belongs."""
    if params["level"] != "sequence":
        return shaped_rewards(logprobs, ref_logprobs, scores, mask, **params)
    penalty = _penalty((logprobs, ref_logprobs, scores, mask), params) / mask.sum(1, keepdim=True).clamp(min=1)
    return penalty + shaped_rewards(logprobs, ref_logprobs, scores, mask, **{**params, "kl_coef": 0.0})


@deviation_of(shaped_rewards)
def sr_ended_inferred_from_width(*inputs, **params):
    """Take a row that fills the width of the batch for unfinished, and every other row for finished."""
    if params["eos_penalty"] is None:
        return shaped_rewards(*inputs, **params)
    return shaped_rewards(*inputs, **{**params, "ended": ~inputs[3][:, -1]})


@deviation_of(shaped_rewards)
def sr_penalty_on_every_row(*inputs, **params):
    """Take every response for unfinished, so that all of them pay the penalty."""
    if params["eos_penalty"] is None:
        return shaped_rewards(*inputs, **params)
    return shaped_rewards(*inputs, **{**params, "ended": torch.zeros_like(inputs[3][:, 0])})


@deviation_of(shaped_rewards)
def sr_penalty_on_finished_rows(*inputs, **params):
    """Penalise the finished responses in place of the unfinished ones."""
    if params["eos_penalty"] is None:
        return shaped_rewards(*inputs, **params)
    return shaped_rewards(*inputs, **{**params, "ended": ~params["ended"]})


@deviation_of(shaped_rewards)
def sr_penalty_ignored(*inputs, **params):
    """Ignore the penalty for a missing end token that was given."""
    return shaped_rewards(*inputs, **{**params, "eos_penalty": None, "ended": None})


@deviation_of(shaped_rewards)
def sr_penalty_sign(*inputs, **params):
    """Add the penalty in place of subtracting it."""
    if params["eos_penalty"] is None or params["missing_eos"] != "subtract":
        return shaped_rewards(*inputs, **params)
    return shaped_rewards(*inputs, **{**params, "eos_penalty": -params["eos_penalty"]})
