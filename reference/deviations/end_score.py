"""Known mistakes in reading the score of a response from token scores."""

import torch

from goldenppo.reference import end_score
from goldenppo.reference.deviations._common import deviation_of, last, select


def _read(token_scores, index):
    return token_scores.gather(1, (index % token_scores.shape[1])[:, None])[:, 0]


def _last_index(attention_mask):
    return last(attention_mask).to(torch.int64).argmax(1)


@deviation_of(end_score)
def end_first_pad_minus_one(token_scores, attention_mask):
    """Read one position before the first pad: last column under left padding, too early at inner pads."""
    pads = (~attention_mask).to(torch.int64)
    end = torch.where(pads.any(1), pads.argmax(1), pads.shape[1])
    return _read(token_scores, end - 1)


@deviation_of(end_score)
def end_count_minus_one(token_scores, attention_mask):
    """Take the number of attended positions minus one for the index, which holds for right padding only."""
    return _read(token_scores, attention_mask.sum(1) - 1)


@deviation_of(end_score)
def end_last_column(token_scores, attention_mask):
    """Read the last column whatever the padding."""
    return token_scores[:, -1]


@deviation_of(end_score)
def end_one_early(token_scores, attention_mask):
    """Read one position before the last attended one, as when the end token is left out."""
    return _read(token_scores, (_last_index(attention_mask) - 1).clamp(min=0))


@deviation_of(end_score)
def end_one_late(token_scores, attention_mask):
    """Read one position after the last attended one, the last column if there is none."""
    return _read(token_scores, (_last_index(attention_mask) + 1).clamp(max=token_scores.shape[1] - 1))


@deviation_of(end_score)
def end_mean_without_last_column(token_scores, attention_mask):
    """Average the scores of every position but the last column, prompt and padding included."""
    return token_scores[:, :-1].mean(1)


@deviation_of(end_score)
def end_mean_over_attended(token_scores, attention_mask):
    """Average the scores of the attended positions."""
    return select(token_scores, attention_mask).sum(1) / attention_mask.sum(1)


@deviation_of(end_score)
def end_sum_over_attended(token_scores, attention_mask):
    """Add up the scores of the attended positions."""
    return select(token_scores, attention_mask).sum(1)


@deviation_of(end_score)
def end_first_attended(token_scores, attention_mask):
    """Read the first attended position."""
    return _read(token_scores, attention_mask.to(torch.int64).argmax(1))


@deviation_of(end_score)
def end_largest(token_scores, attention_mask):
    """Read the largest score of the attended positions."""
    return token_scores.where(attention_mask, -torch.inf).amax(1)
