"""The ops that sum, in numpy, every operation in the dtype of the inputs; `add` is the way in which numbers are summed."""

import numpy as np

NAME = "numpy"
VERSION = np.__version__
ARRAYS = "numpy"


def sequential(x):
    """One after the other, as a loop does it."""
    total = x.dtype.type(0)
    for number in x.reshape(-1):
        total = total + number
    return total


def pairwise(x):
    """Halves of halves, as numpy and torch do it for long rows."""
    x = x.reshape(-1)
    if x.size <= 1:
        return x.sum()
    return pairwise(x[: x.size // 2]) + pairwise(x[x.size // 2 :])


def shuffled(x):
    """One after the other in a random order, as atomic additions on a GPU do it."""
    return sequential(np.random.default_rng(x.size).permutation(x.reshape(-1)))


def vectorised(x):
    """numpy's own sum."""
    return x.sum()


SUMS = {"sequential": sequential, "pairwise": pairwise, "shuffled": shuffled, "vectorised": vectorised}
add = sequential


def by_row(x):
    """The sums over the last axis."""
    rows = [add(row) for row in x.reshape(-1, x.shape[-1])]
    return np.array(rows, x.dtype).reshape(x.shape[:-1])


def logsumexp(z):
    top = z.max(-1, keepdims=True)
    return np.log(by_row(np.exp(z - top))) + top[..., 0]


def token_logprobs(logits, tokens, *, temperature):
    z = logits[:, :-1] / temperature
    return np.take_along_axis(z, tokens[:, 1:, None], -1)[..., 0] - logsumexp(z)


def entropy(logits, *, temperature):
    z = logits / temperature
    logp = z - logsumexp(z)[..., None]
    return -by_row(np.exp(logp) * logp)


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high):
    r, A = np.exp(logprobs[mask] - old_logprobs[mask]), advantages[mask]
    plain, clipped = -A * r, -A * np.clip(r, 1 - clip_low, 1 + clip_high)
    n = r.dtype.type(r.size)
    slopes = np.zeros_like(logprobs)
    slopes[mask] = np.where(plain >= clipped, plain, 0) / n
    return {"loss": add(np.maximum(plain, clipped)) / n, "grad_logprobs": slopes}


def value_loss(values, old_values, returns, mask, *, clip=None):
    v, o, R = values[mask], old_values[mask], returns[mask]
    near = v if clip is None else np.clip(v, o - clip, o + clip)
    plain, clipped = (v - R) ** 2, (near - R) ** 2
    n = v.dtype.type(v.size)
    slopes = np.zeros_like(values)
    slopes[mask] = np.where((plain >= clipped) | (near == v), v - R, 0) / n
    return {"loss": add(np.maximum(plain, clipped)) / n / 2, "grad_values": slopes}


def gae(rewards, values, mask, *, gamma, lam):
    """Every advantage as its own sum over the tokens that follow."""
    advantages = np.zeros_like(rewards)
    for row in range(len(mask)):
        keep = np.flatnonzero(mask[row])
        following = np.append(values[row, keep], 0).astype(rewards.dtype)[1:]
        delta = rewards[row, keep] + gamma * following - values[row, keep]
        for i, t in enumerate(keep):
            weights = (gamma * lam) ** np.arange(len(keep) - i)
            advantages[row, t] = add(weights.astype(rewards.dtype) * delta[i:])
    return {"advantages": advantages, "returns": advantages + np.where(mask, values, 0)}


def whiten(x, mask):
    kept = x[mask]
    n = kept.dtype.type(kept.size)
    mean = add(kept) / n
    variance = add((kept - mean) ** 2) / (n - 1)
    whitened = np.zeros_like(x)
    whitened[mask] = (kept - mean) / np.sqrt(variance + kept.dtype.type(1e-8))
    return whitened


def aggregate(x, mask):
    return add(x[mask]) / x.dtype.type(mask.sum())


def reward_model_loss(chosen, rejected, *, margin=None):
    d = chosen - rejected - (0 if margin is None else margin)
    n = d.dtype.type(d.size)
    share = 1 / (1 + np.exp(d)) / n
    return {"loss": add(np.logaddexp(0, -d)) / n, "grad_chosen": -share, "grad_rejected": share}


def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta):
    d = beta * ((policy_chosen - policy_rejected) - (ref_chosen - ref_rejected))
    n = d.dtype.type(d.size)
    share = beta / (1 + np.exp(d)) / n
    return {"loss": add(np.logaddexp(0, -d)) / n, "grad_policy_chosen": -share, "grad_policy_rejected": share}
