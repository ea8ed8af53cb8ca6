"""Verification passes a right recording in every dtype and names the stage of a wrong one."""

import math

import pytest
import torch

from goldenppo.conformance.cli import main
from goldenppo.reference import aggregate, kl_penalty, shaped_rewards
from goldenppo.reference.run import controller, experience, rollout, shaping, update
from goldenppo.reference.run.free_running import free_run
from goldenppo.reference.run.law import normwise
from goldenppo.reference.run.verify import verify
from goldenppo.reference.run.verify_update import edges


def departing(folder, dtype=None):
    """The (step, stage) of every check that departs, in order and once each."""
    found = [(check.step, check.stage) for check in verify(folder, dtype=dtype) if not check.use <= 1]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_right_recording_agrees_in_every_dtype(recorded, dtype):
    checks = list(verify(recorded, dtype=dtype))

    assert [check for check in checks if not check.use <= 1] == []
    stages = [
        "sft",
        "reward_model",
        "rollout",
        "experience",
        "shaping",
        "advantages",
        "gradient",
        "optimizer",
    ]
    assert list(dict.fromkeys(check.stage for check in checks)) == [*stages, "controller"]
    assert {check.whose for check in checks if check.law == "op"} == {"here", "recording"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recording_in_another_dtype_agrees(tmp_path, dtype):
    folder = tmp_path / "recording"
    assert main(["run", "--size", "tiny", "--steps", "1", "--dtype", dtype, "--record", str(folder)]) == 0

    assert departing(folder) == []
    assert departing(folder, "float64") == []


def shift_values(monkeypatch):
    whole = experience.token_scores

    def shifted(weights, shape, sequences, attention_mask, length, dtype):
        return whole(weights, shape, sequences, attention_mask, dtype)[:, -length:]

    monkeypatch.setattr(experience, "response_values", shifted)


def turn_kl(monkeypatch):
    monkeypatch.setattr(shaping, "shaped_rewards", lambda new, ref, *rest, **how: shaped_rewards(ref, new, *rest, **how))


def score_late(monkeypatch):
    monkeypatch.setattr(shaping, "shaped_rewards", lambda *a, **how: shaped_rewards(*a, **how, score_at="first_pad"))


def mean_of_means(monkeypatch):
    monkeypatch.setattr(update, "microbatch_share", lambda mask, tokens, microbatches: 1 / microbatches)


def keep_gradient(monkeypatch):
    whole, before = update.gradient, []

    def accumulated(*args, **kwargs):
        found, entry = whole(*args, **kwargs)
        if before:
            found = {m: {name: g + before[-1][m][name] for name, g in gs.items()} for m, gs in found.items()}
        before.append(found)
        return found, entry

    monkeypatch.setattr(update, "gradient", accumulated)


def control_by_token_mean(monkeypatch):
    monkeypatch.setattr(controller, "sequence_kl", lambda new, ref, mask: aggregate(kl_penalty(new, ref), mask))


def forget_temperature(monkeypatch):
    whole = rollout.sample
    monkeypatch.setattr(rollout, "sample", lambda logits, noise, temperature: whole(logits, noise, 1.0))


def forget_bias_correction(monkeypatch):
    whole = update.adam

    def adam(weights, gradients, state, **how):
        new, after = whole(weights, gradients, state._replace(steps=999), **how)
        return new, after._replace(steps=state.steps + 1)

    monkeypatch.setattr(update, "adam", adam)


FAULTS = {
    "value shifted by one": (shift_values, (0, "experience")),
    "KL sign": (turn_kl, (1, "shaping")),  # at step 0 actor and reference model are one and the KL is 0
    "score one late": (score_late, (0, "shaping")),
    "mean of means across micro-batches": (mean_of_means, (0, "gradient")),
    "gradient not zeroed": (keep_gradient, (0, "gradient")),
    "adaptive KL fed the wrong KL": (control_by_token_mean, (1, "controller")),
    "temperature forgotten": (forget_temperature, (0, "rollout")),
    "bias correction forgotten": (forget_bias_correction, (-1, "sft")),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_stage_is_named(tmp_path, monkeypatch, capsys, fault, dtype):
    """A recording made by a faulty trainer is verified by the right code, in its own dtype and in float32."""
    plant, where = FAULTS[fault]
    folder = tmp_path / "recording"
    with monkeypatch.context() as patched:
        plant(patched)
        assert main(["run", "--size", "tiny", "--steps", "2", "--record", str(folder)]) == 0
    capsys.readouterr()

    if dtype == "float32":
        assert departing(folder, dtype)[0] == where
        return
    assert main(["run", "--verify", str(folder)]) == 1
    step, stage = where
    place = "before PPO" if step < 0 else f"step {step}"
    assert f"The first stage that departs: {stage}, {place}\n" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["value shifted by one", "score one late", "mean of means across micro-batches"])
def test_a_wrong_stage_here_is_named_on_a_right_recording(recorded, monkeypatch, fault):
    """The other way round: the recording is right and the code that verifies it is not."""
    plant, where = FAULTS[fault]
    plant(monkeypatch)

    assert departing(recorded)[0] == where


def test_normwise_law_takes_no_nonsense():
    want = torch.tensor([1.0, -2.0])

    assert normwise(want, want, 1e-3) == 0
    assert normwise(want + torch.tensor([0.0, 2e-3]), want, 1e-3) == pytest.approx(1, rel=1e-3)
    assert normwise(torch.tensor([math.nan, -2.0]), want, 1e-3) == math.inf
    assert normwise(want[:1], want, 1e-3) == math.inf
    assert normwise(torch.ones(2), torch.zeros(2), 1e-3) == math.inf
    assert normwise(torch.zeros(2), torch.zeros(2), 1e-3) == 0


def test_tokens_on_an_edge_are_listed():
    """A ratio and a value exactly on their edge are named; ordinary ones are not."""
    how = {"clip_low": 0.2, "clip_high": 0.25, "value_clip": 0.5}
    inputs = {
        "logprobs": [[math.log(1.25) - 1.0, -1.0]],
        "old_logprobs": [[-1.0, -1.0]],
        "values": [[0.1, 1.5]],
        "old_values": [[0.0, 1.0]],
        "returns": [[0.3, 0.2]],
        "mask": [[True, True]],
    }

    found = edges(inputs, how, 2.0**-53)

    assert list(found["grad_logprobs"]) == [0] and list(found["grad_values"]) == [1]
    assert {"clip_fraction", "value_clip_fraction"} <= set(found)
    assert edges(inputs | {"mask": [[False, False]]}, how, 2.0**-53) == {
        "grad_logprobs": {},
        "grad_values": {},
    }


def test_free_running_follows_the_distance(recorded, capsys):
    """The same dtype repeats bit for bit; float32 stays near and then drifts."""
    same, other = free_run(recorded), free_run(recorded, dtype="float32")

    assert [entry.error for entry in same] == [0.0] * len(same) and not any(entry.diverged for entry in same)
    assert all(entry.error > 0 for entry in other) and other[0].error < 1e-3
    assert main(["run", "--verify", str(recorded), "--free-running"]) == 0
    assert "stays within the normwise law" in capsys.readouterr().out
