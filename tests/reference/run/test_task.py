"""The task's rule, worked by hand, and the data drawn from it."""

import torch

from goldenppo.reference.run.task import END, FIRST_LETTER, PAD, answers, preferences, prompts, true_reward


def test_true_reward_by_hand():
    """Letters 2 to 9 on a ring: 9 → 2 and 2 → 3 are right; (right − wrong)/T + ½ if ended."""
    last = torch.tensor([9, 4, 5, 2])
    tokens = torch.tensor([[2, 3, END, PAD], [4, 5, 6, 8], [END, PAD, PAD, PAD], [3, 5, END, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]).bool()

    reward = true_reward(last, tokens, mask)

    # 2 right; wrong, right, right, wrong; no letter; right, wrong, then padding
    assert reward.tolist() == [2 / 4 + 0.5, 0.0, 0.5, 0.0 + 0.5]


def test_prompts_are_padded_on_the_left_and_never_empty():
    tokens, mask = prompts(0, "prompts", 0, 200, 4)

    assert bool(mask[:, -1].all()) and bool((mask.int().diff(dim=1) >= 0).all())
    assert bool((tokens[mask] >= FIRST_LETTER).all()) and bool((tokens[~mask] == PAD).all())
    assert set(mask.sum(1).tolist()) == {1, 2, 3, 4}


def test_a_skilled_answer_is_right_and_a_long_one_has_no_end():
    last = torch.full((300,), 9)
    tokens, mask = answers(0, "demonstrations", 0, last, 6, torch.ones(300, dtype=torch.float64))

    ended = (tokens == END).any(1)
    assert bool((tokens[:, 0] == FIRST_LETTER).all())
    assert bool((ended == ~(mask.all(1) & (tokens[:, -1] != END))).all()) and 0 < ended.sum() < 300
    assert bool((tokens[~mask] == PAD).all())


def test_preferences_follow_the_rule():
    pair = preferences(0, "preferences", 0, 50, 4, 6)
    last = pair["prompts"][:, -1]

    better = true_reward(last, pair["chosen"], pair["chosen_mask"])
    worse = true_reward(last, pair["rejected"], pair["rejected_mask"])

    assert len(better) == 50 and bool((better > worse).all())
