"""The whole run: supervised fine-tuning, reward model, PPO. Read `ppo_step` for the data flow of one step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Stages are called through their modules, so that each can be exchanged for another one from outside.
from goldenppo.reference.run import advantages, controller, experience, rollout, shaping, task, update
from goldenppo.reference.run.model import Weights
from goldenppo.reference.run.random import gumbel
from goldenppo.reference.run.settings import (
    DEFAULT,
    DTYPES,
    deterministic,
    gradient_settings,
    model_shape,
    step_params,
    update_params,
)
from goldenppo.reference.run.training import Write, prefixed, train

__all__ = ["Run", "ppo_step", "run", "step_draws"]

Watch = Callable[[str], AbstractContextManager[None]]


class Run(NamedTuple):
    """What a run leaves behind: models, one row of figures per PPO step, the true reward before and after."""

    models: dict[str, Weights]
    table: list[dict[str, float]]
    true_reward_before: float
    true_reward_after: float


def run(
    device: str = "cpu",
    dtype: str = "float64",
    steps: int | None = None,
    seed: int = 0,
    *,
    settings: dict[str, Any] = DEFAULT,
    write: Write | None = None,
    on_models: Callable[[dict[str, Weights]], None] | None = None,
    on_row: Callable[[dict[str, float]], object] | None = None,
    on_stage: Callable[[str], None] | None = None,
    watch: Watch | None = None,
    tf32: bool = False,
) -> Run:
    """Train the policy and the reward model, then the four models' PPO.

    The critic starts as the reward model, the reference model is the fine-tuned policy, kept as it was.

    Args:
        device: cpu or cuda.
        dtype: float64, float32 or bfloat16: what the models compute in. Weights are stored in at least
        float32.
        steps: PPO steps; the setting's own number if none.
        seed: of every random number.
        settings: hyperparameters, a dict with the keys of `DEFAULT`.
        write: called with (file name, tensors, parameters) for everything that a recording holds.
        on_models, on_row, on_stage: called with the four models before PPO, with each step's figures, and
            with "sft", "reward_model", "ppo" when they start.
        watch: context manager factory around each stage of the first step (see `memory.watcher`).
        tf32: let CUDA round float32 matrix products to TF32.

    Returns:
        models, table, and the true reward of the same prompts' answers before and after PPO.
    """
    notify, where = on_stage or (lambda stage: None), torch.device(device)
    with deterministic(where, tf32=tf32):
        notify("sft")
        policy = train("sft", where, dtype, seed, settings, write)
        notify("reward_model")
        reward = train("reward_model", where, dtype, seed, settings, write)
        models = {"actor": policy, "critic": reward, "reference": policy, "reward": reward}
        if on_models:
            on_models(models)
        before = evaluate(models["actor"], where, dtype, seed, settings)
        notify("ppo")
        table = []
        adams = {name: update.new_adam(models[name]) for name in ("actor", "critic")}
        kl_coef = settings["kl_coef"]
        for step in range(settings["steps"] if steps is None else steps):
            watched = watch if watch and step == 0 else nullcontext
            models, adams, kl_coef, row = ppo_step(
                models,
                adams,
                kl_coef,
                step,
                where,
                dtype,
                seed,
                settings,
                write or (lambda *_: None),
                watched,
            )
            table.append(row)
            if on_row:
                on_row(row)
        return Run(models, table, before, evaluate(models["actor"], where, dtype, seed, settings))


def ppo_step(
    models: dict[str, Weights],
    adams: dict[str, update.Adam],
    kl_coef: float,
    step: int,
    device: torch.device,
    dtype: str,
    seed: int,
    settings: dict[str, Any],
    write: Write,
    watch: Watch | Any = nullcontext,
) -> tuple[dict[str, Weights], dict[str, update.Adam], float, dict[str, float]]:
    """Take one PPO step: rollout → experience → shaping → advantages → (gradient → optimizer)… → controller.

    Returns:
        (models, Adam states, KL coefficient of the next step, figures of this step).
    """
    s, shape, compute = settings, model_shape(settings), DTYPES[dtype]
    prompts, noise = step_draws(seed, step, settings, device)
    common = {"temperature": s["temperature"], "dtype": compute}
    with watch("rollout"):
        batch = rollout.rollout(models["actor"], shape, *prompts, noise, **common)
    with watch("experience"):
        seen = (batch["sequences"], batch["attention_mask"])
        batch |= experience.experience(models, shape, *seen, response_length=s["response_length"], **common)
    old = (batch["old_logprobs"], batch["ref_logprobs"])
    with watch("shaping"):
        batch |= shaping.shaping(*old, batch["scores"], batch["mask"], kl_coef=kl_coef, score_clip=s["score_clip"])
    with watch("advantages"):
        returned = (batch["rewards"], batch["old_values"], batch["mask"])
        batch |= advantages.advantages(*returned, gamma=s["gamma"], lam=s["lam"])
    updates = []
    for index, rows in enumerate(update.minibatches(seed, step, s["epochs"], s["minibatches"], s["batch"])):
        part = select(batch, rows.to(device))
        with watch("gradient"):
            gradients, entry = update.gradient(models, shape, part, **common, **gradient_settings(s))
        with watch("optimizer"):
            models, adams, norms = apply(models, gradients, adams, s)
        updates.append(entry | norms)
        write(
            f"step-{step:03}-update-{index}",
            update_tensors(rows, part, entry | norms, gradients, models, adams),
            update_params(s),
        )
    with watch("controller"):
        control = controller.controller(*old, batch["mask"], kl_coef=kl_coef, target=s["kl_target"], horizon=s["kl_horizon"])
    written = {"prompts": prompts[0], "prompt_mask": prompts[1], "noise": noise, **batch, **control}
    write(f"step-{step:03}", written, step_params(s, kl_coef))
    return models, adams, float(control["next_kl_coef"]), figures(step, batch, control, updates, kl_coef)


def apply(
    models: dict[str, Weights],
    gradients: dict[str, Weights],
    adams: dict[str, update.Adam],
    settings: dict[str, Any],
) -> tuple[dict[str, Weights], dict[str, update.Adam], dict[str, Tensor]]:
    """Run the optimizer on actor and critic; the reference and reward models pass through.

    Returns:
        (models, Adam states, {"actor_grad_norm", "critic_grad_norm": scalars}).
    """
    models, adams, norms = dict(models), dict(adams), {}
    rates = {"learning_rate": settings["learning_rate"], "max_norm": settings["max_norm"]}
    for name, found in gradients.items():
        models[name], adams[name], norms[f"{name}_grad_norm"] = update.optimizer(models[name], found, adams[name], **rates)
    return models, adams, norms


def step_draws(seed: int, step: int, settings: dict[str, Any], device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Draw the prompts and the sampling noise of a PPO step.

    Returns:
        ((prompts, prompt_mask) [B, P], noise float64 [B, T, V]), on the device.
    """
    rows, length = settings["batch"], settings["response_length"]
    tokens, mask = task.prompts(seed, "prompts", step, rows, settings["prompt_length"])
    noise = gumbel(seed, "sampling", step, (rows, length, task.VOCABULARY))
    return (tokens.to(device), mask.to(device)), noise.to(device)


def evaluate(actor: Weights, device: torch.device, dtype: str, seed: int, settings: dict[str, Any]) -> float:
    """Return the mean true reward of answers to a fixed set of prompts, with fixed noise."""
    count, length = settings["evaluated"], settings["response_length"]
    prompts = task.prompts(seed, "evaluation_prompts", 0, count, settings["prompt_length"])
    noise = gumbel(seed, "evaluation_sampling", 0, (count, length, task.VOCABULARY))
    given = (tensor.to(device) for tensor in (*prompts, noise))
    shape, how = model_shape(settings), {"temperature": settings["temperature"], "dtype": DTYPES[dtype]}
    batch = rollout.rollout(actor, shape, *given, **how)
    return float(rewarded(batch).mean())


def rewarded(batch: dict[str, Tensor]) -> Tensor:
    """Return the true reward of each response of a rollout, float64 [B]."""
    length = batch["mask"].shape[1]
    response, last = batch["sequences"][:, -length:], batch["sequences"][:, -length - 1]
    return task.true_reward(last, response, batch["mask"])


def figures(
    step: int,
    batch: dict[str, Tensor],
    control: dict[str, Tensor],
    updates: list[dict[str, Tensor]],
    kl_coef: float,
) -> dict[str, float]:
    """Return the row of the table: rewards and KL of the rollout, the updates' figures averaged."""
    names = (
        "mean_entropy",
        "clip_fraction",
        "approx_kl",
        "policy_loss",
        "value_loss",
        "actor_grad_norm",
        "critic_grad_norm",
    )
    return {
        "step": step,
        "learned_reward": float(batch["scores"].double().mean()),
        "true_reward": float(rewarded(batch).mean()),
        "length": float(batch["mask"].sum(1).double().mean()),
        "sequence_kl": float(control["sequence_kl"]),
        "kl_coef": kl_coef,
        **{name: sum(float(entry[name]) for entry in updates) / len(updates) for name in names},
    }


def update_tensors(
    rows: Tensor,
    part: dict[str, Tensor],
    entry: dict[str, Tensor],
    gradients: dict[str, Weights],
    models: dict[str, Weights],
    adams: dict[str, update.Adam],
) -> dict[str, Tensor]:
    """Collect an update's tensors: rows, losses, derivatives, then gradients and what Adam made of them."""
    inputs = (
        "sequences",
        "attention_mask",
        "tokens",
        "mask",
        "old_logprobs",
        "advantages",
        "old_values",
        "returns",
    )
    tensors = {"rows": rows, **{name: part[name] for name in inputs}, **entry}
    for name, found in gradients.items():
        tensors |= prefixed(f"gradient/{name}", found) | prefixed(f"weights/{name}", models[name])
        tensors |= prefixed(f"adam_m/{name}", adams[name].m) | prefixed(f"adam_v/{name}", adams[name].v)
    return tensors


def select(batch: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return the given rows of every tensor of a batch."""
    return {name: tensor[rows] for name, tensor in batch.items()}
