"""Known mistakes in the pairwise reward-model loss over token scores."""

import torch

from goldenppo.reference import reward_model_loss, reward_model_token_loss
from goldenppo.reference.deviations._common import deviation_of


def _ends(tokens, pad_id):
    """Return the index of each row's first pad, or the width, [B]."""
    pads = (tokens == pad_id).to(torch.int64)
    return torch.where(pads.any(1), pads.argmax(1), tokens.shape[1])


def _starts(chosen_tokens, rejected_tokens):
    """Return the index of the first differing token, or the last column for identical rows, [B]."""
    differing = (chosen_tokens != rejected_tokens).to(torch.int64)
    return torch.where(differing.any(1), differing.argmax(1), differing.shape[1] - 1)


def _bounds(tokens, pad_id):
    """Return first and end of the positions that are compared, [B] each."""
    start = _starts(*tokens)
    ends = torch.maximum(*(_ends(row, pad_id) for row in tokens))
    # an identical pair uses the last column
    return start, torch.where((tokens[0] != tokens[1]).any(1), ends, tokens[0].shape[1])


def _losses(chosen, rejected, start, end):
    """Return the loss of each pair over positions start … end−1, [B]."""
    columns = torch.arange(chosen.shape[1], device=chosen.device)
    inside = (columns >= start[:, None]) & (columns < end[:, None])
    terms = torch.nn.functional.softplus(torch.where(inside, rejected - chosen, 0.0))
    return torch.where(inside, terms, 0.0).sum(1) / inside.sum(1)


@deviation_of(reward_model_token_loss)
def rmt_sign(chosen, rejected, chosen_tokens, rejected_tokens, *, pad_id):
    """Exchange chosen and rejected."""
    return reward_model_token_loss(rejected, chosen, rejected_tokens, chosen_tokens, pad_id=pad_id)


@deviation_of(reward_model_token_loss)
def rmt_last_token_only(chosen, rejected, *tokens, pad_id):
    """Compare only the score at each answer's own last token."""
    scores = (
        x.gather(1, (_ends(row, pad_id) - 1).clamp(min=0)[:, None])[:, 0]
        for x, row in zip((chosen, rejected), tokens, strict=True)
    )
    return reward_model_loss(*scores)


@deviation_of(reward_model_token_loss)
def rmt_from_first_token(chosen, rejected, *tokens, pad_id):
    """Start at the first token in place of the first one that differs: the shared prompt counts."""
    start, end = _bounds(tokens, pad_id)
    return _losses(chosen, rejected, torch.zeros_like(start), end).mean()


@deviation_of(reward_model_token_loss)
def rmt_to_shorter_end(chosen, rejected, *tokens, pad_id):
    """Stop at the shorter answer's end; a pair that differs only behind it uses one position."""
    start, _ = _bounds(tokens, pad_id)
    end = torch.minimum(*(_ends(row, pad_id) for row in tokens))
    return _losses(chosen, rejected, start, torch.maximum(end, start + 1)).mean()


@deviation_of(reward_model_token_loss)
def rmt_to_last_column(chosen, rejected, *tokens, pad_id):
    """Go on to the last column: padding behind both answers counts."""
    start, end = _bounds(tokens, pad_id)
    return _losses(chosen, rejected, start, torch.full_like(end, chosen.shape[1])).mean()


@deviation_of(reward_model_token_loss)
def rmt_one_past_end(chosen, rejected, *tokens, pad_id):
    """Include the first pad behind the longer answer."""
    start, end = _bounds(tokens, pad_id)
    return _losses(chosen, rejected, start, (end + 1).clamp(max=chosen.shape[1])).mean()


@deviation_of(reward_model_token_loss)
def rmt_mean_over_positions(chosen, rejected, *tokens, pad_id):
    """Average over the positions of all pairs together: a longer pair weighs more."""
    start, end = _bounds(tokens, pad_id)
    lengths = (end - start).to(chosen.dtype)
    return (_losses(chosen, rejected, start, end) * lengths).sum() / lengths.sum()


@deviation_of(reward_model_token_loss)
def rmt_softplus_of_mean(chosen, rejected, *tokens, pad_id):
    """Average the score differences of a pair before the log-sigmoid."""
    start, end = _bounds(tokens, pad_id)
    columns = torch.arange(chosen.shape[1], device=chosen.device)
    inside = (columns >= start[:, None]) & (columns < end[:, None])
    mean = torch.where(inside, rejected - chosen, 0.0).sum(1) / inside.sum(1)
    return torch.nn.functional.softplus(mean).mean()


@deviation_of(reward_model_token_loss)
def rmt_identical_pair_counted(chosen, rejected, *tokens, pad_id):
    """Skip identical pairs in the sum but count them in the mean."""
    losses = _losses(chosen, rejected, *_bounds(tokens, pad_id))
    return torch.where((tokens[0] != tokens[1]).any(1), losses, 0.0).mean()


@deviation_of(reward_model_token_loss)
def rmt_divided_inside_loop(chosen, rejected, *tokens, pad_id):
    """Divide the running sum by B after each pair: Σ l_i / B^(B−i+1), i = 1 … B."""
    loss = torch.zeros((), dtype=chosen.dtype, device=chosen.device)
    for term in _losses(chosen, rejected, *_bounds(tokens, pad_id)):
        loss = (loss + term) / len(chosen)
    return loss


@deviation_of(reward_model_token_loss)
def rmt_log_of_sigmoid(chosen, rejected, *tokens, pad_id):
    """Form −log(sigmoid(d)) literally: inf for a large negative d, 0 for a large positive one."""
    start, end = _bounds(tokens, pad_id)
    columns = torch.arange(chosen.shape[1], device=chosen.device)
    inside = (columns >= start[:, None]) & (columns < end[:, None])
    terms = -torch.log(torch.sigmoid(torch.where(inside, chosen - rejected, 0.0)))
    return (torch.where(inside, terms, 0.0).sum(1) / inside.sum(1)).mean()


@deviation_of(reward_model_token_loss)
def rmt_gradient_dead(chosen, rejected, *tokens, pad_id):
    """Cut the graph: the right value without a gradient."""
    return reward_model_token_loss(chosen.detach(), rejected.detach(), *tokens, pad_id=pad_id)
