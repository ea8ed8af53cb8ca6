"""Verify a recording stage by stage, so that the first stage that departs is named and no error compounds.

Every stage is fed what was recorded for the stage before it. Two laws judge it:

* Op stages, by the tolerance law |got − want| ≤ k·(u·gauge + s) + u·|want|, with want and gauge from the
  exact oracle on the very inputs. It is asked twice: of what is computed here, and of what was recorded.
* Model stages, weight gradients and the optimizer, by the normwise law max|got − want| ≤ k_run·u·max|want|
  per tensor, want as recorded, u and k_run those of the coarser of the two dtypes.

A gradient jumps at a clip edge. Tokens within tolerance of one are listed and left out, and weight gradients
are formed from the recorded derivatives at each token, so that no jump reaches them. That the micro-batches
add up to the minibatch is checked by computing both here. A sampled token may differ where its recorded
margin is below the error that the law grants the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from goldenppo.reference import aggregate, end_score, exact, reward_model_loss
from goldenppo.reference.run import (
    advantages,
    controller,
    experience,
    reward_model,
    rollout,
    sft,
    shaping,
    update,
)
from goldenppo.reference.run import run as pipeline
from goldenppo.reference.run.comparison import (
    Check,
    Setup,
    Tensors,
    check_logprobs,
    check_optimizer,
    near_by,
    op_stage,
    same,
    setup_for,
    stored,
    under,
)
from goldenppo.reference.run.law import K_OUTPUT, ROUNDOFF, normwise
from goldenppo.reference.run.model import load_checkpoint
from goldenppo.reference.run.record import load, parameters, read
from goldenppo.reference.run.settings import DTYPES, MODELS, deterministic, model_shape
from goldenppo.reference.run.training import initial_weights, reward_draw, sft_draw
from goldenppo.reference.run.verify_update import check_update

__all__ = ["verify"]


def verify(folder: Path, device: str = "cpu", dtype: str | None = None, *, tf32: bool = False) -> Iterator[Check]:
    """Check every stage of a recording in the order in which the run made them.

    Args:
        folder: the recording, from any device.
        device: where the stages are computed now.
        dtype: what the models compute in now; that of the recording if none.
        tf32: let CUDA round float32 matrix products to TF32.

    Yields:
        One `Check` per tensor.

    Raises:
        FileNotFoundError: the folder is no recording.
        DamagedRecording: a file is missing or changed.
    """
    setup = setup_for(folder, load(folder), device, dtype, tf32)
    with deterministic(setup.device, tf32=tf32):
        yield from check_training(setup, "sft")
        yield from check_training(setup, "reward_model")
        yield from check_steps(setup)


# --- sft and reward model -----------------------------------------------------------------------------------


def check_training(setup: Setup, stage: str) -> Iterator[Check]:
    """Check initial weights, and data, gradient and optimizer of the last update of sft or reward_model."""
    settings, seed = setup.manifest["settings"], setup.manifest["seed"]
    recorded, params = read(setup.folder, stage), parameters(setup.folder, stage)
    first = initial_weights(stage, seed, settings, setup.dtype, setup.device)
    yield from near_by(setup.stored, -1, stage, first, under(recorded, "initial"), first, "initial/")
    draw = sft_draw if stage == "sft" else reward_draw
    batch = draw(seed, params["step"], settings)
    for name, tensor in batch.items():
        yield same(-1, stage, name, tensor, recorded[name])
    before = {kind: under(recorded, f"before/{kind}") for kind in ("weights", "adam_m", "adam_v")}
    find = sft.sft_gradient if stage == "sft" else reward_model.reward_model_gradient
    given = {name: tensor.to(setup.device) for name, tensor in batch.items()}
    shape = model_shape(settings)
    found, entry = find(stored(before["weights"], setup), shape, given, dtype=DTYPES[setup.dtype])
    yield from near_by(setup.outputs, -1, stage, entry, recorded, [name for name in entry if name != "accuracy"])
    yield from check_training_loss(setup, stage, recorded)
    gradient = under(recorded, "gradient")
    yield from near_by(setup.gradients, -1, stage, found, gradient, gradient, "gradient/")
    rates = {name: params[name] for name in ("learning_rate", "max_norm")}
    yield from check_optimizer(setup, -1, stage, before, gradient, recorded, params["step"], rates, "", "grad_norm")


def check_training_loss(setup: Setup, stage: str, recorded: Tensors) -> Iterator[Check]:
    """Check the loss as an op of the recorded log-probs or scores."""

    def imitation(x: dict[str, Any]) -> dict[str, Any]:
        return {"loss": -exact.aggregate(x["logprobs"], x["mask"])["value"]}

    def pairwise(x: dict[str, Any]) -> dict[str, Any]:
        return {"loss": exact.reward_model_loss(x["chosen_scores"], x["rejected_scores"])["loss"]}

    if stage == "sft":
        names, oracle = ("logprobs", "mask"), imitation
        yield from op_stage(
            setup,
            -1,
            stage,
            recorded,
            names,
            lambda x: {"loss": aggregate(-x["logprobs"], x["mask"])},
            oracle,
        )
    else:
        names, oracle = ("chosen_scores", "rejected_scores"), pairwise
        yield from op_stage(setup, -1, stage, recorded, names, lambda x: {"loss": reward_model_loss(*x.values())}, oracle)


# --- PPO ----------------------------------------------------------------------------------------------------


def check_steps(setup: Setup) -> Iterator[Check]:
    """Check every PPO step; the weights at its start are those that the step before recorded."""
    models = {name: load_checkpoint(setup.folder / "models" / name)[0] for name in MODELS}
    zeros = {name: {key: torch.zeros_like(w) for key, w in models[name].items()} for name in ("actor", "critic")}
    adams = {name: {"adam_m": zeros[name], "adam_v": zeros[name]} for name in zeros}
    kl_coef, taken = setup.manifest["settings"]["kl_coef"], 0
    for step in range(setup.manifest["steps"]):
        recorded, params = read(setup.folder, f"step-{step:03}"), parameters(setup.folder, f"step-{step:03}")
        yield from check_rollout(setup, step, models["actor"], recorded)
        yield from check_experience(setup, step, models, recorded)
        # the coefficient that acts is the one that the controller gave
        use = 0.0 if params["kl_coef"] == kl_coef else math.inf
        yield Check(step, "shaping", "kl_coef", "exact", "recording", use)
        yield from check_shaping(setup, step, recorded, params)
        yield from check_advantages(setup, step, recorded, params)
        orders = update.minibatches(setup.manifest["seed"], step, *rows_of(setup.manifest["settings"]))
        for index, rows in enumerate(orders):
            done = read(setup.folder, f"step-{step:03}-update-{index}")
            yield from check_update(setup, step, index, rows, models, adams, taken, recorded, done)
            for name in adams:
                models[name] = under(done, f"weights/{name}")
                adams[name] = {kind: under(done, f"{kind}/{name}") for kind in ("adam_m", "adam_v")}
            taken += 1
        yield from check_controller(setup, step, recorded, params)
        kl_coef = float(recorded["next_kl_coef"])


def rows_of(settings: dict[str, Any]) -> tuple[int, int, int]:
    """Return what `minibatches` takes after the step: epochs, minibatches per epoch, rows."""
    return settings["epochs"], settings["minibatches"], settings["batch"]


def check_rollout(setup: Setup, step: int, actor: Tensors, recorded: Tensors) -> Iterator[Check]:
    """Check prompts and noise against the seed, and every token against its own logits and the actor's."""
    settings, stage = setup.manifest["settings"], "rollout"
    prompts, noise = pipeline.step_draws(setup.manifest["seed"], step, settings, setup.device)
    yield same(step, stage, "prompts", prompts[0], recorded["prompts"])
    yield same(step, stage, "prompt_mask", prompts[1], recorded["prompt_mask"])
    yield Check(
        step,
        stage,
        "noise",
        "normwise",
        "here",
        normwise(noise, recorded["noise"], K_OUTPUT * ROUNDOFF["float64"]),
    )
    mask, response = recorded["mask"], recorded["sequences"][:, -recorded["mask"].shape[1] :]
    chosen, margins = rollout.sample(
        recorded["sampling_logits"].flatten(0, 1), recorded["noise"].flatten(0, 1), settings["temperature"]
    )
    yield same(step, stage, "chosen", chosen.view_as(response)[mask], response[mask])._replace(whose="recording")
    use = normwise(margins.view_as(recorded["margins"]), recorded["margins"], K_OUTPUT * ROUNDOFF["float64"])
    yield Check(step, stage, "margins", "normwise", "recording", use)
    given = (recorded[name].to(setup.device) for name in ("prompts", "prompt_mask", "noise"))
    how = {
        "temperature": settings["temperature"],
        "dtype": DTYPES[setup.dtype],
        "forced": response.to(setup.device),
    }
    got = rollout.rollout(stored(actor, setup), model_shape(settings), *given, **how)
    yield from near_by(setup.outputs, step, stage, got, recorded, ["sampling_logits"])
    for name in ("sequences", "attention_mask", "mask"):
        yield same(step, stage, name, got[name], recorded[name])
    yield check_choices(setup, step, got["chosen"].cpu(), response, recorded)


def check_choices(setup: Setup, step: int, chosen: Tensor, response: Tensor, recorded: Tensors) -> Check:
    """Compare the tokens chosen here with the recorded ones, except where the margin decides nothing."""
    granted = setup.outputs * float(recorded["sampling_logits"].double().abs().max())
    # two logits may each be off by as much as the law grants
    open_ = recorded["margins"] <= 2 * granted / setup.manifest["settings"]["temperature"]
    wrong = recorded["mask"] & (chosen != response)
    left = [
        f"row {b}, token {t}: sampled with a margin below the logits' tolerance" for b, t in (wrong & open_).nonzero().tolist()
    ]
    use = math.inf if bool((wrong & ~open_).any()) else 0.0
    return Check(step, "rollout", "tokens", "exact", "here", use, tuple(left))


def check_experience(setup: Setup, step: int, models: dict[str, Tensors], recorded: Tensors) -> Iterator[Check]:
    """Check what the four models say of the recorded sequences, and log-probs and scores as ops of that."""
    settings, stage = setup.manifest["settings"], "experience"
    seen = (recorded[name].to(setup.device) for name in ("sequences", "attention_mask"))
    got = experience.experience(
        {name: stored(weights, setup) for name, weights in models.items()},
        model_shape(settings),
        *seen,
        response_length=settings["response_length"],
        temperature=settings["temperature"],
        dtype=DTYPES[setup.dtype],
    )
    yield same(step, stage, "tokens", got["tokens"], recorded["tokens"])
    yield from near_by(setup.outputs, step, stage, got, recorded, [name for name in got if name != "tokens"])
    for logits, logprobs in (("logits", "old_logprobs"), ("ref_logits", "ref_logprobs")):
        yield from check_logprobs(setup, step, stage, recorded, logits, logprobs)
    yield from op_stage(
        setup,
        step,
        stage,
        recorded,
        ("token_scores", "attention_mask"),
        lambda x: {"scores": end_score(*x.values())},
        lambda x: {"scores": exact.end_score(*x.values())["scores"]},
    )


def check_shaping(setup: Setup, step: int, recorded: Tensors, params: dict[str, Any]) -> Iterator[Check]:
    """Check the token rewards."""
    how = {name: params[name] for name in ("kl_coef", "score_clip")}
    names = ("old_logprobs", "ref_logprobs", "scores", "mask")
    yield from op_stage(
        setup,
        step,
        "shaping",
        recorded,
        names,
        lambda x: shaping.shaping(*x.values(), **how),
        lambda x: exact.shaped_rewards(*x.values(), **how),
    )


def check_advantages(setup: Setup, step: int, recorded: Tensors, params: dict[str, Any]) -> Iterator[Check]:
    """Check advantages and returns."""
    how = {name: params[name] for name in ("gamma", "lam")}
    yield from op_stage(
        setup,
        step,
        "advantages",
        recorded,
        ("rewards", "old_values", "mask"),
        lambda x: advantages.advantages(*x.values(), **how),
        lambda x: exact.gae(*x.values(), **how, whitening="inside"),
    )


def check_controller(setup: Setup, step: int, recorded: Tensors, params: dict[str, Any]) -> Iterator[Check]:
    """Check the observed KL and the coefficient that follows."""
    settings = setup.manifest["settings"]
    how = {"kl_coef": params["kl_coef"], "target": settings["kl_target"], "horizon": settings["kl_horizon"]}

    def oracle(x: dict[str, Any]) -> dict[str, Any]:
        kl = exact.kl_penalty(x["old_logprobs"], x["ref_logprobs"])["kl"]
        observed = exact.aggregate(kl, x["mask"], aggregation="seq_mean_token_sum")["value"]
        coef = exact.kl_controller(
            [observed],
            init_coef=how["kl_coef"],
            target=how["target"],
            horizon=how["horizon"],
            batch_size=len(x["mask"]),
            controller="proportional",
        )["coef"]
        return {"sequence_kl": observed, "next_kl_coef": coef[-1]}

    names = ("old_logprobs", "ref_logprobs", "mask")
    yield from op_stage(
        setup,
        step,
        "controller",
        recorded,
        names,
        lambda x: controller.controller(*x.values(), **how),
        oracle,
    )
