"""From log-probabilities and scores to advantages and returns, in one span."""

from typing import NamedTuple

import torch

from goldenppo.reference.checks import one_of
from goldenppo.reference.gae import gae
from goldenppo.reference.shaped_rewards import score_slot, shaped_rewards
from goldenppo.reference.whiten import whiten


class Experience(NamedTuple):
    """What a rollout becomes before the update; all [B, T]."""

    rewards: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


def experience(
    logprobs,
    ref_logprobs,
    values,
    scores,
    mask,
    *,
    kl_coef,
    gamma,
    lam,
    score_clip=None,
    score_at="last_token",
    estimator="k1",
    gaps="skip",
    whitening="none",
):
    """Makes rewards, advantages and returns of a rollout.

        rewards = shaped_rewards(…);   advantages, returns = gae(rewards, values, …)

    Where the score lands after the last token, that position is one more step of the recursion: it keeps its value, and the
    value after it is 0. Advantages and returns are reported, and whitened, at tokens only.

    Args:
        logprobs, ref_logprobs, scores, kl_coef, score_clip, estimator, score_at: see `shaped_rewards`.
        values, gamma, lam, gaps: see `gae`.
        mask: bool [B, T], True = counts.
        whitening: "none" or "inside" (unbiased variance, 1e-8 under the root, mean removed).

    Returns:
        Experience(rewards, advantages, returns).

    Raises:
        ValueError: as the two ops.

    Source: Huang et al. 2024 (arXiv:2403.17031); the spans are TRL's PPOTrainer.train, DeepSpeed-Chat's train_rlhf,
    torchtune's PPO recipe, trlX's make_experience.
    """
    one_of("whitening", whitening, ("none", "inside"))
    rewards = shaped_rewards(
        logprobs, ref_logprobs, scores, mask, kl_coef=kl_coef, score_clip=score_clip, estimator=estimator, score_at=score_at
    )
    steps = mask | score_slot(mask, score_at)  # EX-2
    advantages, returns = gae(rewards, values, steps, gamma=gamma, lam=lam, gaps=gaps)
    advantages, returns = torch.where(mask, advantages, 0.0), torch.where(mask, returns, 0.0)
    return Experience(rewards, whiten(advantages, mask) if whitening == "inside" else advantages, returns)
