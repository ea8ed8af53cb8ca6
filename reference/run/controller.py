"""Stage `controller`: the KL coefficient of the next step."""

from __future__ import annotations

import torch
from torch import Tensor

from goldenppo.reference import aggregate, kl_controller, kl_penalty

__all__ = ["controller", "sequence_kl"]


@torch.no_grad()
def controller(
    old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kl_coef: float, target: float, horizon: int
) -> dict[str, Tensor]:
    """Return the observed KL and the coefficient that follows from it.

    Args:
        old_logprobs, ref_logprobs: [B, T].
        mask: bool [B, T].
        kl_coef: coefficient of this step.
        target: KL per response that the controller steers towards.
        horizon: responses over which an error of 1 acts once in full.

    Returns:
        {"sequence_kl", "next_kl_coef": scalars}.

    Source: Ziegler et al. 2019 (arXiv:1909.08593) section 2.2.
    """
    observed = sequence_kl(old_logprobs, ref_logprobs, mask)
    coef = kl_controller(
        observed[None],
        init_coef=kl_coef,
        target=target,
        horizon=horizon,
        batch_size=len(mask),
        controller="proportional",
    )
    return {"sequence_kl": observed, "next_kl_coef": coef[-1]}


def sequence_kl(old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the KL that the target is stated in: summed over a response, averaged over responses."""
    return aggregate(kl_penalty(old_logprobs, ref_logprobs), mask, aggregation="seq_mean_token_sum")
