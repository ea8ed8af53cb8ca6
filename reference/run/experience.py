"""Stage `experience`: the four models read the finished responses."""

from __future__ import annotations

import torch
from torch import Tensor

from goldenppo.reference import end_score, token_logprobs
from goldenppo.reference.run.model import Shape, Weights, token_logits, token_scores

__all__ = ["experience", "response_logits", "response_values"]


@torch.no_grad()
def experience(
    models: dict[str, Weights],
    shape: Shape,
    sequences: Tensor,
    attention_mask: Tensor,
    *,
    response_length: int,
    temperature: float,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the actor's and the reference model's log-probs, the critic's values and the learned scores.

    The score of a response is the reward model's output at its last token.

    Args:
        models: actor, critic, reference, reward.
        sequences: int64 [B, L].
        attention_mask: bool [B, L].
        response_length: T.

    Returns:
        tokens int64 [B, T+1]; logits and ref_logits [B, T+1, V]; old_logprobs, ref_logprobs, old_values
        [B, T]; token_scores [B, L]; scores [B]. Column 0 of tokens and logits is the prompt's last position.
    """
    seen = (shape, sequences, attention_mask)
    tokens = sequences[:, -response_length - 1 :]
    logits = response_logits(models["actor"], *seen, response_length, dtype)
    ref_logits = response_logits(models["reference"], *seen, response_length, dtype)
    all_scores = token_scores(models["reward"], *seen, dtype)
    return {
        "tokens": tokens,
        "logits": logits,
        "ref_logits": ref_logits,
        "token_scores": all_scores,
        "old_logprobs": token_logprobs(logits, tokens, temperature=temperature),
        "ref_logprobs": token_logprobs(ref_logits, tokens, temperature=temperature),
        "old_values": response_values(models["critic"], *seen, response_length, dtype),
        "scores": end_score(all_scores, attention_mask),
    }


def response_logits(
    weights: Weights, shape: Shape, sequences: Tensor, attention_mask: Tensor, length: int, dtype: torch.dtype
) -> Tensor:
    """Return the logits from the prompt's last position on: row t predicts response token t, t in [0, T−1].

    Returns:
        [B, T+1, V]; the last column predicts nothing.
    """
    return token_logits(weights, shape, sequences, attention_mask, dtype)[:, -length - 1 :]


def response_values(
    weights: Weights, shape: Shape, sequences: Tensor, attention_mask: Tensor, length: int, dtype: torch.dtype
) -> Tensor:
    """Return the value of the state in which each response token is chosen: read one position before it.

    Returns:
        [B, T].
    """
    return token_scores(weights, shape, sequences, attention_mask, dtype)[:, -length - 1 : -1]
