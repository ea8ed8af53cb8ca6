"""Token rewards from KL penalty and terminal score."""

import torch

from goldenppo.reference.checks import inside, is_mask, one_of, same_shape, wide
from goldenppo.reference.kl_penalty import kl_penalty


def shaped_rewards(
    logprobs,
    ref_logprobs,
    scores,
    mask,
    *,
    kl_coef,
    score_clip=None,
    eos_penalty=None,
    ended=None,
    estimator="k1",
    score_at="last_token",
    level="token",
    missing_eos="subtract",
):
    """Shapes the rewards of a response: a KL penalty at every token, the score at one position.

        r_bt = −kl_coef·kl_bt + [t = slot_b]·clip(score_b, −score_clip, score_clip)

    Args:
        logprobs, ref_logprobs: float [B, T], see `kl_penalty`.
        scores: one score per response, float [B].
        mask: bool [B, T], True = counts.
        kl_coef: weight of the KL penalty.
        score_clip: bound on the score, before anything is added to it; or None.
        eos_penalty: for responses that did not end, or None.
        ended: bool [B], True where the response ended by itself; needed with eos_penalty.
        estimator: see `kl_penalty`.
        score_at: the slot is the last token ("last_token"), or the position after it where the row has one ("first_pad";
            the KL there is 0, or its own under "first_pad_with_kl").
        level: "token" as above; "sequence": 0 everywhere but at the slot, which holds score − kl_coef·Σ_t kl_bt.
        missing_eos: a response that did not end has eos_penalty subtracted from its score, or its score replaced by it.

    Returns:
        Rewards [B, T], 0 where nothing is said above. A row without tokens has no slot.

    Raises:
        ValueError: shapes differ, the mask is not boolean, an axis has no such value, or `ended` is missing.

    Source: Ziegler et al. 2019 (arXiv:1909.08593) equation 2; Ouyang et al. 2022 (arXiv:2203.02155) equation 2; Huang et al.
    2024 (arXiv:2403.17031) details 14 to 16 for the position after the last token.
    """
    same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
    is_mask(mask)
    one_of("level", level, ("token", "sequence"))
    score = _score(wide(scores), score_clip, eos_penalty, ended, missing_eos)
    at = score_slot(mask, score_at)
    paying = mask | at if score_at == "first_pad_with_kl" else mask
    kl = kl_penalty(inside(logprobs, paying), inside(ref_logprobs, paying), estimator=estimator)
    if level == "sequence":
        return torch.where(at, (score - kl_coef * kl.sum(1))[:, None], 0.0)
    return torch.where(at, score[:, None] - kl_coef * kl, torch.where(mask, -kl_coef * kl, 0.0))  # SR-1


def score_slot(mask, score_at):
    """True at the position of each row that receives the score; nowhere in a row without tokens.

    Args:
        mask: bool [B, T].
        score_at: "last_token", "first_pad" or "first_pad_with_kl".

    Returns:
        bool [B, T].
    """
    one_of("score_at", score_at, ("last_token", "first_pad", "first_pad_with_kl"))
    later = mask.flip(1).cumsum(1).flip(1)  # tokens from t on
    last = mask & (later == 1)
    if score_at == "last_token":
        return last
    after = torch.zeros_like(last)
    after[:, 1:] = last[:, :-1]
    after[:, -1] |= last[:, -1]  # a full row has no position after its last token
    return after


def _score(scores, score_clip, eos_penalty, ended, missing_eos):
    """The score as it enters the reward: clipped, then corrected where the response did not end."""
    one_of("missing_eos", missing_eos, ("subtract", "replace"))
    if score_clip is not None:
        scores = scores.clamp(-score_clip, score_clip)
    if eos_penalty is None:
        return scores
    if ended is None:
        raise ValueError("eos_penalty is given without ended; expected a bool per response, True where it ended by itself")
    unended = scores - eos_penalty if missing_eos == "subtract" else torch.full_like(scores, eos_penalty)
    return torch.where(ended, scores, unended)
