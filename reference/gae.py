"""Generalised advantage estimation."""

from typing import NamedTuple

import torch

from goldenppo.reference.checks import inside, is_mask, one_of, same_shape
from goldenppo.reference.whiten import whiten


class GAE(NamedTuple):
    """Advantages and returns, both [B, T], 0 where the mask is False."""

    advantages: torch.Tensor
    returns: torch.Tensor


def gae(
    rewards,
    values,
    mask,
    *,
    gamma,
    lam,
    gaps="skip",
    whitening="none",
    variance="unbiased",
    epsilon="var+1e-8",
):
    """Estimates advantages by the exponentially weighted sum of temporal-difference errors.

        δ_t = r_t + γ·V_{t+1} − V_t
        A_t = δ_t + γλ·A_{t+1}          for t = T−1 … 0, V and A after a row's last token are 0
        R_t = A_t + V_t

    γ = λ = 1 gives A_t = Σ_{k≥t} r_k − V_t; λ = 0 gives the one-step error.

    Args:
        rewards: float [B, T], r_t is received for token t.
        values: float [B, T], V_t is the value of the state in which token t is chosen.
        mask: bool [B, T], True = counts.
        gamma, lam: discount γ and trace λ, in [0, 1].
        gaps: at a masked slot between two tokens (tool output inside a response) the next value and running advantage are
            carried over unchanged ("skip"), the recursion steps through with r = V = 0 ("zero"), or both restart at 0 as at
            an episode's end ("cut").
        whitening: "none", or "inside": the advantages are whitened over the tokens. Returns never are.
        variance, epsilon: how, see `whiten`; only under whitening "inside".

    Returns:
        GAE(advantages, returns).

    Raises:
        ValueError: shapes differ, the mask is not boolean, or an axis has no such value.

    Source: Schulman et al. 2016 (arXiv:1506.02438) equation 16. `skip`: verl, core_algos.compute_gae_advantage_return;
    `zero`: OpenRLHF, get_advantages_and_returns; `cut`: AgileRL, PPO for language models.
    """
    same_shape(rewards=rewards, values=values, mask=mask)
    is_mask(mask)
    one_of("gaps", gaps, ("skip", "zero", "cut"))
    one_of("whitening", whitening, ("none", "inside"))
    r, V = inside(rewards, mask), inside(values, mask)
    advantages = torch.zeros_like(r)
    next_value = advantage = torch.zeros_like(r[:, 0])  # [B]
    for t in reversed(range(r.shape[1])):
        counts = mask[:, t]
        stepped = r[:, t] + gamma * next_value - V[:, t] + gamma * lam * advantage  # GAE-1
        advantages[:, t] = torch.where(counts, stepped, 0.0)
        if gaps == "skip":
            next_value, advantage = torch.where(counts, V[:, t], next_value), torch.where(counts, stepped, advantage)
        elif gaps == "zero":  # r and V are 0 at masked slots already
            next_value, advantage = V[:, t], stepped
        else:
            next_value, advantage = V[:, t], advantages[:, t]
    returns = torch.where(mask, advantages + V, 0.0)
    if whitening == "inside":
        advantages = whiten(advantages, mask, variance=variance, epsilon=epsilon)
    return GAE(advantages, returns)
