"""Score of a response read from token scores."""

import torch

from goldenppo.reference.checks import is_mask, same_shape


def end_score(token_scores, attention_mask):
    """Reads each response's score at its last attended position, whatever the padding side.

        scores[b] = token_scores[b, max{t : attention_mask[b, t]}]

    Args:
        token_scores: float [B, L].
        attention_mask: bool [B, L], True = attended.

    Returns:
        Scores [B]; NaN for a row that attends to nothing.

    Raises:
        ValueError: shapes differ, or the mask is not boolean.

    Source: Stiennon et al. 2020 (arXiv:2009.01325) section 3.4; transformers, *ForSequenceClassification.
    """
    same_shape(token_scores=token_scores, attention_mask=attention_mask)
    is_mask(attention_mask, "attention_mask")
    position = torch.arange(token_scores.shape[1], device=token_scores.device)
    last = torch.where(attention_mask, position, -1).amax(1)  # END-1
    scores = token_scores.gather(1, last.clamp(min=0)[:, None])[:, 0]
    return torch.where(last >= 0, scores, torch.nan)
