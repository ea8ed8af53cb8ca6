"""Parameters that a dump does not give, read from its numbers.

Each function yields guesses; a guess counts only once the edge is right under it, by the tolerance law.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

CLIPS = (0.2, 0.1, 0.15, 0.25, 0.3, 0.05, 0.4, 0.5)
CLIP_PAIRS = ((0.2, 0.28), (0.2, 0.25), (0.2, 0.3), (0.2, 0.4))
DIGITS = 6  # a guess is rounded to the fewest decimals, up to these, that the numbers allow


@dataclass(frozen=True)
class Inferred:
    """A parameter read from the numbers, and the largest error that is left there."""

    value: float | None
    residual: float | None = None

    def __str__(self) -> str:
        text = "none" if self.value is None else f"{self.value:g}"
        return text if self.residual is None else f"{text} (residual {self.residual:.1e})"


Guess = dict[str, Inferred]


def parameters(op: str, tensors: dict[str, torch.Tensor], given: dict, missing: list[str]) -> Iterator[Guess]:
    """Guesses for the parameters of an op, those that are missing first, then those that are given.

    Args:
        op: name of the op.
        tensors: inputs and outputs of the op by name, float64, on some rows; `mask` bool [B, T].
        given: parameters that are given.
        missing: names of parameters without which the op cannot be computed.
    """
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in _at_tokens(tensors) if tensor.is_floating_point())
    if op in _READERS and finite:
        yield from _READERS[op](tensors, given)


def _at_tokens(tensors: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """What is read: per-token tensors where a token counts, all others whole."""
    mask = tensors.get("mask")
    for tensor in tensors.values():
        yield tensor[mask] if mask is not None and tensor.shape == mask.shape else tensor


def fewest_digits(values: list[float], cost: Callable[[list[float]], float]) -> tuple[list[float], float]:
    """The shortest decimals that fit the numbers as well as the fitted values do.

    Args:
        values: fitted values.
        cost: the largest error that a set of values leaves.
    """
    fitted = cost(values)
    for digits in range(1, DIGITS + 1):
        rounded = [round(value, digits) for value in values]
        left = cost(rounded)
        if left <= 4 * fitted + 1e-12:
            return rounded, left
    return values, fitted


def _temperature(tensors: dict, given: dict) -> Iterator[Guess]:
    """The temperature that brings the log-probs (or entropies) nearest, by golden section on its logarithm."""
    from goldenppo.reference import entropy, token_logprobs

    logits = tensors["logits"]
    if "tokens" in tensors:
        want, keep = tensors["logprobs"], tensors["compared"]
        made = lambda t: token_logprobs(logits, tensors["tokens"], temperature=t)  # noqa: E731
    else:
        want, keep = tensors["entropy"], tensors["compared"]
        made = lambda t: entropy(logits, temperature=t)  # noqa: E731
    if not keep.any():
        return

    def cost(values: list[float]) -> float:
        return float((made(values[0]) - want)[keep].abs().max()) if values[0] > 0 else math.inf

    low, high, ratio = math.log(0.02), math.log(50.0), (math.sqrt(5) - 1) / 2
    for _ in range(60):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if cost([math.exp(a)]) < cost([math.exp(b)]) else (a, high)
    (value,), left = fewest_digits([math.exp((low + high) / 2)], cost)
    yield {"temperature": Inferred(value, left)}


def _kl_coef(tensors: dict, given: dict) -> Iterator[Guess]:
    """−r/kl between the first and the last token, then the clip of the score from what is left at its slot."""
    from goldenppo.reference import kl_penalty
    from goldenppo.reference.shaped_rewards import score_slot

    mask, rewards, scores = tensors["mask"], tensors["rewards"], tensors["scores"]
    last = score_slot(mask, "last_token")
    inner = mask & ~last
    fits: list[tuple] = []
    for estimator in ("k1", "abs", "k2", "k3"):
        kl = kl_penalty(tensors["logprobs"], tensors["ref_logprobs"], estimator=estimator)
        x, y = kl[inner], -rewards[inner]
        if not len(x) or not float((x * x).sum()):
            continue
        if not rewards[inner].any():  # the whole penalty is at one slot
            total = torch.where(mask, kl, 0.0).sum(1)
            paid = rewards.sum(1)
            at = total.abs() > 1e-6
            coefficient = float(((scores - paid)[at] / total[at]).median()) if at.any() else 0.0
            fits.append((0.0 if at.any() else math.inf, coefficient, None, kl))
            continue
        cost = lambda values, x=x, y=y: float((y - values[0] * x).abs().max())  # noqa: E731
        (value,), left = fewest_digits([float((x * y).sum() / (x * x).sum())], cost)
        fits.append((left, value, left, kl))
    for _, value, left, kl in sorted(fits, key=lambda fit: fit[0])[:2]:
        yield {"kl_coef": Inferred(value, left)}
        for slot in ("last_token", "first_pad"):
            at = score_slot(mask, slot)
            paid = torch.where(at, rewards + (value * kl if slot == "last_token" else 0.0), 0.0).sum(1)
            short = (paid - scores).abs() > 1e-3 * scores.abs() + 1e-6
            bounds = paid[short].abs()
            if len(bounds) and float(bounds.max() - bounds.min()) <= 1e-3 * float(bounds.max()):
                (clip,), off = fewest_digits([float(bounds.median())], functools.partial(_furthest, bounds))
                yield {"kl_coef": Inferred(value, left), "score_clip": Inferred(clip, off)}


def _furthest(bounds: torch.Tensor, values: list[float]) -> float:
    """How far the bounds are from the one value, at most."""
    return float((bounds - values[0]).abs().max())


def _gamma_lam(tensors: dict, given: dict) -> Iterator[Guess]:
    """A_t − r_t + V_t = γ·V_{t+1} + γλ·A_{t+1} between neighbouring tokens: two unknowns by least squares."""
    mask, rewards, values = tensors["mask"], tensors["rewards"], tensors["values"]
    if "returns" in tensors:
        advantages = tensors["returns"] - values  # whitened or not, the returns are of the advantages before that
    elif "advantages" in tensors:
        advantages = tensors["advantages"]
    else:
        return
    both = mask[:, :-1] & mask[:, 1:]
    y = (advantages - rewards + values)[:, :-1][both]
    x = torch.stack([values[:, 1:][both], advantages[:, 1:][both]], 1)
    if len(y) < 2 or torch.linalg.matrix_rank(x.T @ x) < 2:
        return
    gamma, both_factors = torch.linalg.lstsq(x, y[:, None]).solution[:, 0].tolist()

    def cost(pair: list[float]) -> float:
        return float((y - x @ torch.tensor([pair[0], pair[0] * pair[1]], dtype=torch.float64)).abs().max())

    if gamma <= 0:
        return
    (gamma, lam), left = fewest_digits([gamma, both_factors / gamma], cost)
    yield {"gamma": Inferred(gamma, left), "lam": Inferred(lam, left)}


def _span(tensors: dict, given: dict) -> Iterator[Guess]:
    """kl_coef and the score's clip from the rewards, gamma and lam from what follows."""
    rewards = list(_kl_coef(tensors, given)) if "rewards" in tensors else [{}]
    chain = list(_gamma_lam(tensors, given)) if "rewards" in tensors else [{}]
    for one, other in itertools.product(rewards or [{}], chain or [{}]):
        if one or other:
            yield {**one, **other}


def _policy_clip(tensors: dict, given: dict) -> Iterator[Guess]:
    for low, high in ((clip, clip) for clip in CLIPS):
        yield {"clip_low": Inferred(low), "clip_high": Inferred(high)}
    for low, high in CLIP_PAIRS:
        yield {"clip_low": Inferred(low), "clip_high": Inferred(high)}


def _value_clip(tensors: dict, given: dict) -> Iterator[Guess]:
    for clip in (None, *CLIPS, 1.0):
        yield {"clip": Inferred(clip)}


def _coefficients(tensors: dict, given: dict) -> Iterator[Guess]:
    """The one coefficient that is missing: the sum is linear in each."""
    terms = {"vf_coef": ("value_loss", 1), "entropy_coef": ("entropy", -1), "kl_loss_coef": ("kl_loss", 1)}
    unknown = [name for name in terms if given.get(name) is None]
    if len(unknown) != 1 or not float(tensors[terms[unknown[0]][0]]):
        return
    rest = float(tensors["loss"]) - float(tensors["policy_loss"])
    for name, (term, sign) in terms.items():
        if name != unknown[0]:
            rest -= sign * given[name] * float(tensors[term])
    term, sign = terms[unknown[0]]
    size = float(tensors[term])
    (value,), left = fewest_digits([sign * rest / size], lambda values: abs(rest - sign * values[0] * size) + 1e-7 * abs(rest))
    yield {unknown[0]: Inferred(value, left)}


_READERS = {
    "token_logprobs": _temperature,
    "entropy": _temperature,
    "shaped_rewards": _kl_coef,
    "gae": _gamma_lam,
    "experience": _span,
    "policy_loss": _policy_clip,
    "value_loss": _value_clip,
    "total_loss": _coefficients,
}
