"""Correct implementations written differently from the reference: the suite must pass every one of them.

They sum in another order, multiply by the mask instead of selecting, leave the detach to the caller, work row by row or all
at once. `goldenppo doctor` and the tests run them; tests/conformance/test_correct.py adds numpy and JAX ones.
"""

import torch
import torch.nn.functional as F


def policy_loss_multiplying(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high):
    """Multiplies by the mask at the end, detaches nothing, and writes the surrogate as minus a minimum."""
    r = torch.exp(logprobs - old_logprobs)
    gain = torch.minimum(r * advantages, torch.clamp(r, 1 - clip_low, 1 + clip_high) * advantages)
    return -(gain * mask).sum() / mask.sum().to(gain.dtype)


def policy_loss_by_rows(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high):
    """Takes the tokens of one row after the other and adds up the rows last first."""
    terms = []
    for row in reversed(range(len(mask))):
        keep = mask[row]
        A, r = advantages[row][keep], (logprobs[row][keep] - old_logprobs[row][keep]).exp()
        terms.append(torch.maximum(-A * r, -A * r.clamp(1 - clip_low, 1 + clip_high)).sum())
    return torch.stack(terms).sum() / mask.sum()


def value_loss_other_clip(values, old_values, returns, mask, *, clip=None):
    """Clips the step instead of the value, and selects the tokens first."""
    v, o, R = values[mask], old_values[mask], returns[mask]
    loss = (v - R).square()
    if clip is not None:
        loss = torch.max(loss, (o + (v - o).clamp(-clip, clip) - R).square())
    return 0.5 * loss.mean()


def kl_penalty_k3_expm1(logprobs, ref_logprobs):
    """k3 through expm1."""
    x = ref_logprobs - logprobs
    return torch.expm1(x) - x


def shaped_rewards_by_index(logprobs, ref_logprobs, scores, mask, *, kl_coef, score_clip=None):
    """Adds the score at an index counted from the mask."""
    if score_clip is not None:
        scores = torch.clip(scores, -score_clip, score_clip)
    rewards = torch.where(mask, kl_coef * (ref_logprobs - logprobs), 0.0)
    for row in range(len(mask)):
        at = mask[row].nonzero()
        if len(at):
            rewards[row, at[-1]] += scores[row]
    return rewards


def gae_all_at_once(rewards, values, mask, *, gamma, lam):
    """Builds all powers of γλ in one matrix and multiplies, row by row, over the tokens alone."""
    advantages = torch.zeros_like(rewards)
    for row in range(len(mask)):
        keep = mask[row].nonzero()[:, 0]
        if not len(keep):
            continue
        r, v = rewards[row, keep], values[row, keep]
        delta = r + gamma * torch.cat([v[1:], v.new_zeros(1)]) - v
        steps = torch.arange(len(keep))
        apart = (steps[None, :] - steps[:, None]).clamp(min=0)
        powers = torch.triu(torch.tensor(gamma * lam, dtype=r.dtype) ** apart.to(r.dtype))
        advantages[row, keep] = powers @ delta
    return {"advantages": advantages, "returns": advantages + torch.where(mask, values, 0.0)}


def whiten_by_moments(x, mask):
    """Takes the biased variance, corrects it, and multiplies by the reciprocal root."""
    kept = x[mask]
    n = kept.numel()
    mean = kept.mean()
    variance = (kept - mean).square().mean() * n / (n - 1)
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + 1e-8), 0.0)


def reward_model_loss_log1p(chosen, rejected, *, margin=None):
    """log(1 + exp(−d)), or log(1 + exp(d)) − d where that would overflow."""
    d = chosen - rejected if margin is None else chosen - rejected - margin
    return torch.where(d > 0, torch.log1p(torch.exp(-d.clamp(min=0))), torch.log1p(torch.exp(d.clamp(max=0))) - d).mean()


def token_logprobs_gathered(logits, tokens, *, temperature):
    """Gathers first and subtracts the log-sum-exp afterwards."""
    z = logits[:, :-1].double() / temperature
    return (z.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1) - z.logsumexp(-1)).to(logits.dtype)


def entropy_by_expectation(logits, *, temperature):
    """−Σ p·log p."""
    logp = F.log_softmax(logits / temperature, -1)
    return -(logp.exp() * logp).sum(-1)


def dpo_loss_by_ratio(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta):
    """Differences each response against its reference first."""
    gain = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    return -F.logsigmoid(beta * gain).mean()


IMPLEMENTATIONS = [
    ("multiplies by the mask", "policy_loss", policy_loss_multiplying),
    ("row by row, last first", "policy_loss", policy_loss_by_rows),
    ("clips the step", "value_loss", value_loss_other_clip),
    ("k3 by expm1", "kl_penalty", kl_penalty_k3_expm1),
    ("adds the score by index", "shaped_rewards", shaped_rewards_by_index),
    ("all powers at once", "gae", gae_all_at_once),
    ("by moments", "whiten", whiten_by_moments),
    ("log1p", "reward_model_loss", reward_model_loss_log1p),
    ("gathers first", "token_logprobs", token_logprobs_gathered),
    ("expectation", "entropy", entropy_by_expectation),
    ("by ratios", "dpo_loss", dpo_loss_by_ratio),
]
