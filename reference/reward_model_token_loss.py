"""Pairwise reward-model loss over token scores."""

import torch
from torch.nn.functional import logsigmoid

from goldenppo.reference.checks import same_shape, wide


def reward_model_token_loss(chosen, rejected, chosen_tokens, rejected_tokens, *, pad_id):
    """Compares two answers at every position from where they part to where the longer one ends.

        L = mean_b mean_{t = first_b … end_b − 1} −log σ(chosen_bt − rejected_bt)

    first_b is the first position at which the token rows differ, end_b the larger of the two ends; an answer ends before its
    first pad_id. A pair of identical rows is compared at the last column.

    Args:
        chosen, rejected: a score at every token, float [B, L].
        chosen_tokens, rejected_tokens: int [B, L].
        pad_id: id of the padding token.

    Returns:
        A 0-d tensor, differentiable in both scores.

    Raises:
        ValueError: shapes differ.

    Source: DeepSpeedExamples, DeepSpeed-Chat, reward_model.py, RewardModel.forward; trlX, summarize_rlhf example.
    """
    same_shape(chosen=chosen, rejected=rejected, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens)
    width = chosen.shape[1]
    position = torch.arange(width, device=chosen.device)
    different = chosen_tokens != rejected_tokens
    padded = torch.stack([chosen_tokens, rejected_tokens]) == pad_id
    ended = (padded.cumsum(-1) > 0).all(0)  # True once both answers are over
    span = (different.cumsum(-1) > 0) & ~ended
    identical = ~different.any(-1, keepdim=True)
    span = torch.where(identical, position == width - 1, span)  # RMT-2
    loss = -logsigmoid(torch.where(span, wide(chosen) - wide(rejected), 0.0))
    return (torch.where(span, loss, 0.0).sum(-1) / span.sum(-1).to(loss.dtype)).mean()
