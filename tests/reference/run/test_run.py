"""The run learns, repeats itself, and keeps constants constant."""

import pytest
import torch

from goldenppo.reference.run import experience, update
from goldenppo.reference.run.memory import STAGES, LiveBytes
from goldenppo.reference.run.record import read
from goldenppo.reference.run.run import run
from goldenppo.reference.run.settings import SETTINGS

SHORT = SETTINGS["default"] | {"reward_steps": 500, "steps": 15}


def test_ppo_raises_the_true_reward():
    """Fifteen steps raise the true reward of fixed prompts by 0.3; the best possible is 1.375."""
    result = run(dtype="float32", settings=SHORT)

    assert result.true_reward_before < 0.7
    assert result.true_reward_after > result.true_reward_before + 0.3
    assert len(result.table) == 15


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_seed_gives_one_run(dtype):
    first, again = (run(dtype=dtype, steps=2, settings=SETTINGS["tiny"]) for _ in range(2))
    other = run(dtype=dtype, steps=2, seed=1, settings=SETTINGS["tiny"])

    assert first.table == again.table and first.table != other.table
    for name, weights in first.models.items():
        assert all(torch.equal(weight, again.models[name][key]) for key, weight in weights.items())


def test_reference_and_reward_model_stay_and_actor_and_critic_move():
    start = {}
    result = run(steps=1, settings=SETTINGS["tiny"], on_models=start.update)

    moved = {
        name: any(not torch.equal(weight, start[name][key]) for key, weight in weights.items())
        for name, weights in result.models.items()
    }
    assert moved == {"actor": True, "critic": True, "reference": False, "reward": False}


def test_experience_carries_no_gradient(recorded):
    """No gradient reaches old log-probs, reference log-probs, old values, advantages or returns."""
    step, settings = read(recorded, "step-000"), SETTINGS["tiny"]
    update_ = read(recorded, "step-000-update-0")
    batch = {name: t for name, t in update_.items() if "/" not in name and t.dim()}
    constants = ("old_logprobs", "advantages", "old_values", "returns")
    for name in constants:
        batch[name] = batch[name].requires_grad_()

    found = update.losses(batch, batch, 1.0, clip_low=0.2, clip_high=0.2, value_clip=0.2, vf_coef=0.5, entropy_coef=0.01)

    assert not any(tensor.requires_grad for tensor in found.values())
    assert not any(tensor.requires_grad for tensor in step.values()) and settings["batch"] == len(step["mask"])


def test_values_are_read_one_position_before_their_token(recorded):
    """values[t] belongs to the state in which token t is chosen: the critic's output at token t − 1."""
    step = read(recorded, "step-000")
    length = step["mask"].shape[1]

    # the critic starts as the reward model, whose output at every position is recorded
    assert torch.equal(step["old_values"], step["token_scores"][:, -length - 1 : -1])
    assert torch.equal(step["tokens"][:, 1:][step["mask"]], step["chosen"][step["mask"]])
    assert experience.__doc__


def test_live_bytes_count_what_is_alive():
    with LiveBytes() as live:
        a = torch.zeros(100)
        b = a + 1
        del a
        c = b.view(10, 10) * 2
    assert (live.peak, live.now) == (800, 800)
    assert c.shape == (10, 10) and set(STAGES) >= {"rollout", "gradient", "optimizer"}
