"""A symbol-level task with a known rule, so that the true reward is known beside the learned one.

Eight letters stand on a ring. A prompt is a few letters; a good response goes on around the ring, each letter
the successor of the one before it, and ends with the end symbol. The rule counts right and wrong steps; the
reward model only ever sees which of two responses is better by it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from goldenppo.reference.run.random import choices, uniform

__all__ = [
    "END",
    "FIRST_LETTER",
    "LETTERS",
    "PAD",
    "VOCABULARY",
    "answers",
    "preferences",
    "prompts",
    "true_reward",
]

PAD, END, FIRST_LETTER, LETTERS = 0, 1, 2, 8
VOCABULARY = FIRST_LETTER + LETTERS


def successor(letters: Tensor) -> Tensor:
    """Return the next letter on the ring; what is no letter maps to some letter too."""
    return (letters - FIRST_LETTER + 1) % LETTERS + FIRST_LETTER


def prompts(seed: int, stream: str, step: int, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Draw prompts of 1 to `length` letters, padded on the left.

    Returns:
        (tokens int64 [count, length], mask bool [count, length], True = a letter).
    """
    draws = choices(seed, stream, step, (count, length + 1), LETTERS * length)
    letters = draws[:, :length] % LETTERS + FIRST_LETTER
    missing = draws[:, length:] // LETTERS  # in [0, length − 1], so that one letter always stays
    mask = torch.arange(length) >= missing
    return torch.where(mask, letters, PAD), mask


def answers(seed: int, stream: str, step: int, last: Tensor, length: int, skill: Tensor) -> tuple[Tensor, Tensor]:
    """Write responses that take the right step with probability `skill`, else to any letter, then end.

    A response has 1 to `length` letters followed by the end symbol; the longest have no room for the end.

    Args:
        last: last letter of each prompt, int64 [B].
        length: T.
        skill: probability of a right step, float64 [B].

    Returns:
        (tokens int64 [B, T], mask bool [B, T], True up to and including the end symbol).
    """
    draws = uniform(seed, stream, step, (len(last), 2 * length + 1))
    letters = (draws[:, -1:] * length).floor().to(torch.int64) + 1  # in [1, T]
    columns = []
    for t in range(length):
        anything = (draws[:, length + t] * LETTERS).floor().to(torch.int64) + FIRST_LETTER
        last = torch.where(draws[:, t] < skill, successor(last), anything)
        columns.append(last)
    position = torch.arange(length)
    tokens = torch.where(position < letters, torch.stack(columns, 1), END)  # [B, T]
    mask = position <= letters
    return torch.where(mask, tokens, PAD), mask


def true_reward(last: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the rule's reward of each response: (right steps − wrong steps)/T, plus ½ if it ends.

    A step leads from one token to a letter after it, the first from the prompt's last letter.

    Args:
        last: last letter of each prompt, int64 [B].
        tokens: int64 [B, T].
        mask: bool [B, T].

    Returns:
        float64 [B], in [−1, 1½ − 1/T].
    """
    before = torch.cat([last[:, None], tokens[:, :-1]], 1)
    letter = mask & (tokens >= FIRST_LETTER)
    right = letter & (tokens == successor(before))
    steps = 2.0 * right.sum(1, dtype=torch.float64) - letter.sum(1)
    ended = (mask & (tokens == END)).any(1)
    return steps / tokens.shape[1] + 0.5 * ended


def preferences(seed: int, stream: str, step: int, count: int, prompt_length: int, length: int) -> dict[str, Tensor]:
    """Draw pairs of responses to one prompt, the better one by the rule first; equal pairs are left out.

    Every response has a skill of its own between 0 and 1, so the reward model sees bad and good ones.

    Returns:
        {"prompts", "prompt_mask": [count, P]; "chosen", "chosen_mask", "rejected", "rejected_mask": [count,
        T]}.

    Raises:
        ValueError: more than two thirds of the candidates are ties.
    """
    candidates = 3 * count
    tokens, prompt_mask = prompts(seed, stream, 4 * step, candidates, prompt_length)
    skill = uniform(seed, stream, 4 * step + 1, (candidates, 2))
    pair = [answers(seed, stream, 4 * step + 2 + side, tokens[:, -1], length, skill[:, side]) for side in (0, 1)]
    first, second = (true_reward(tokens[:, -1], *response) for response in pair)
    kept = (first != second).nonzero()[:count, 0]
    if len(kept) < count:
        raise ValueError(f"{len(kept)} of {candidates} pairs differ but {count} are needed; use longer responses.")
    swap = (second > first)[:, None]
    chosen, chosen_mask = (torch.where(swap, b, a)[kept] for a, b in zip(*pair, strict=True))
    rejected, rejected_mask = (torch.where(swap, a, b)[kept] for a, b in zip(*pair, strict=True))
    return {
        "prompts": tokens[kept],
        "prompt_mask": prompt_mask[kept],
        "chosen": chosen,
        "chosen_mask": chosen_mask,
        "rejected": rejected,
        "rejected_mask": rejected_mask,
    }
