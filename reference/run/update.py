"""Stages `gradient` and `optimizer`: one step of PPO on one minibatch.

The two are separate functions because Adam divides by the size of the gradient and so turns rounding noise
near 0 into steps of full size: it can only be compared when it is fed the same gradient.

The gradient goes through three functions that meet at recorded tensors: `forward` (weights to log-probs),
`losses` (log-probs to losses and their derivative at each token), `weight_gradients` (those back to weights).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from goldenppo.reference import aggregate, entropy, policy_loss, token_logprobs, total_loss, value_loss
from goldenppo.reference.run.experience import response_logits, response_values
from goldenppo.reference.run.model import Shape, Weights
from goldenppo.reference.run.random import permutation

__all__ = [
    "Adam",
    "adam",
    "forward",
    "gradient",
    "losses",
    "minibatches",
    "new_adam",
    "optimizer",
    "weight_gradients",
]

PER_TOKEN = ("logits", "logprobs", "token_entropy", "values", "grad_logprobs", "grad_values", "grad_entropy")
SCALARS = (
    "policy_loss",
    "value_loss",
    "mean_entropy",
    "loss",
    "clip_fraction",
    "value_clip_fraction",
    "approx_kl",
)


class Adam(NamedTuple):
    """Adam's state of one model: steps taken, and the two running means under the weights' names."""

    steps: int
    m: Weights
    v: Weights


def minibatches(seed: int, step: int, epochs: int, count: int, rows: int) -> list[Tensor]:
    """Return the rows of every minibatch of a PPO step: each epoch a new order, cut into `count` parts.

    Returns:
        epochs·count int64 tensors on the CPU.
    """
    orders = [permutation(seed, "minibatches", step * epochs + epoch, rows) for epoch in range(epochs)]
    return [part for order in orders for part in order.tensor_split(count)]


def gradient(
    models: dict[str, Weights],
    shape: Shape,
    batch: dict[str, Tensor],
    *,
    microbatches: int,
    temperature: float,
    dtype: torch.dtype,
    group: Any = None,
    **coefficients: float,
) -> tuple[dict[str, Weights], dict[str, Tensor]]:
    """Return the gradient of the minibatch's loss, accumulated over micro-batches and over processes.

    The loss is a mean over the minibatch's tokens, however they are spread: a micro-batch's mean enters with
    its share of the tokens, so that splitting changes nothing.

    Args:
        models: actor and critic (others are left alone).
        batch: the minibatch's rows of sequences, attention_mask, tokens, mask, old_logprobs, advantages,
            old_values, returns; under data parallelism this process's rows of it.
        microbatches: number of parts that are worked through one after another.
        group: None for one process, else a torch.distributed process group whose members hold the other rows.
        coefficients: clip_low, clip_high, value_clip, vf_coef, entropy_coef.

    Returns:
        ({"actor", "critic": weight gradients}, per-token tensors [b, …] of this process's rows and the
        scalars of the whole minibatch).
    """
    tokens = total_over(batch["mask"].sum(), group)
    gradients = {name: zeros_like(models[name]) for name in ("actor", "critic")}
    entries = []
    for part in split(batch, microbatches):
        share = microbatch_share(part["mask"], tokens, microbatches)
        weights = {name: leaves(models[name]) for name in gradients}
        read = forward(weights, shape, part, temperature=temperature, dtype=dtype)
        entry = losses(read, part, share, **coefficients)
        for name, found in weight_gradients(weights, read, entry).items():
            gradients[name] = {key: total + found[key] for key, total in gradients[name].items()}
        entries.append({**read, **entry})
    return reduced(gradients, group), merged(entries, group)


def microbatch_share(mask: Tensor, tokens: Tensor, microbatches: int) -> Tensor:
    """Return the micro-batch's share of the minibatch's tokens, n_i/N; not 1/microbatches, rows are ragged.

    Returns:
        float64 scalar: the quotient of two integer tensors would be a float32.
    """
    return mask.sum().double() / tokens


def forward(
    weights: dict[str, Weights],
    shape: Shape,
    batch: dict[str, Tensor],
    *,
    temperature: float,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Run actor and critic over the rows.

    Returns:
        logits [b, T+1, V]; logprobs, token_entropy and values [b, T]; all part of the autograd graph.
    """
    seen = (shape, batch["sequences"], batch["attention_mask"], batch["mask"].shape[1], dtype)
    logits = response_logits(weights["actor"], *seen)
    return {
        "logits": logits,
        "logprobs": token_logprobs(logits, batch["tokens"], temperature=temperature),
        "token_entropy": entropy(logits[:, :-1], temperature=temperature),
        "values": response_values(weights["critic"], *seen),
    }


def losses(
    read: dict[str, Tensor],
    batch: dict[str, Tensor],
    share: Tensor | float,
    *,
    clip_low: float,
    clip_high: float,
    value_clip: float,
    vf_coef: float,
    entropy_coef: float,
) -> dict[str, Tensor]:
    """Return the losses of these rows times their share, and the derivative of the total at each token.

    Args:
        read: logprobs, token_entropy, values as `forward` returns them; taken as constants here.
        share: the rows' share of the minibatch's tokens.

    Returns:
        policy_loss, value_loss, mean_entropy, loss, clip_fraction, value_clip_fraction, approx_kl: scalars;
        grad_logprobs, grad_values, grad_entropy [b, T].
    """
    logprobs, values, token_entropy = (read[name].detach().requires_grad_() for name in ("logprobs", "values", "token_entropy"))
    old, mask = batch["old_logprobs"], batch["mask"]  # RUN-3: the ops detach what is constant
    share = torch.as_tensor(share, dtype=logprobs.dtype, device=logprobs.device)
    policy = policy_loss(logprobs, old, batch["advantages"], mask, clip_low=clip_low, clip_high=clip_high)
    value = value_loss(values, batch["old_values"], batch["returns"], mask, clip=value_clip)
    parts = (policy.loss * share, value.loss * share, aggregate(token_entropy, mask) * share)
    coefficients = {"vf_coef": vf_coef, "entropy_coef": entropy_coef, "kl_loss_coef": 0.0}
    loss = total_loss(*parts, torch.zeros_like(parts[0]), **coefficients)
    at_tokens = torch.autograd.grad(loss, (logprobs, values, token_entropy))
    figures = (
        *parts,
        loss,
        policy.clip_fraction * share,
        value.clip_fraction * share,
        policy.approx_kl * share,
    )
    return {
        **dict(zip(SCALARS, (figure.detach() for figure in figures), strict=True)),
        **dict(zip(("grad_logprobs", "grad_values", "grad_entropy"), at_tokens, strict=True)),
    }


def weight_gradients(weights: dict[str, Weights], read: dict[str, Tensor], at_tokens: dict[str, Tensor]) -> dict[str, Weights]:
    """Carry the derivative at each token back to the weights.

    Args:
        weights: the leaves that `forward` read.
        read: what `forward` returned, with its graph.
        at_tokens: grad_logprobs, grad_values, grad_entropy [b, T].

    Returns:
        {"actor", "critic": name → gradient in the weights' dtype}.
    """
    sources = {
        "actor": (("logprobs", "token_entropy"), ("grad_logprobs", "grad_entropy")),
        "critic": (("values",), ("grad_values",)),
    }
    result = {}
    for name, (outputs, derivatives) in sources.items():
        found = torch.autograd.grad(
            [read[key] for key in outputs],
            list(weights[name].values()),
            [at_tokens[key].to(read[output].dtype) for key, output in zip(derivatives, outputs, strict=True)],
        )
        result[name] = dict(zip(weights[name], found, strict=True))
    return result


@torch.no_grad()
def optimizer(
    weights: Weights, gradients: Weights, state: Adam, *, learning_rate: float, max_norm: float
) -> tuple[Weights, Adam, Tensor]:
    """Clip one model's gradient by its global norm and take a step of Adam.

    The gradient is scaled by min(1, max_norm/(norm + 1e-6)).

    Returns:
        (new weights, new state, norm of the gradient before clipping).
    """
    norm = torch.sqrt(torch.stack([(g * g).sum() for g in gradients.values()]).sum())
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    clipped = {name: g * scale for name, g in gradients.items()}
    return *adam(weights, clipped, state, learning_rate=learning_rate), norm


@torch.no_grad()
def adam(
    weights: Weights,
    gradients: Weights,
    state: Adam,
    *,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-5,
) -> tuple[Weights, Adam]:
    """Take one step of Adam with bias correction; nothing is changed in place.

    m ← β₁m + (1 − β₁)g, v ← β₂v + (1 − β₂)g², w ← w − lr·(m/(1 − β₁ⁿ))/(√(v/(1 − β₂ⁿ)) + ε), n the step from
    1.

    Returns:
        (new weights, new state).

    Source: Kingma and Ba 2015 (arXiv:1412.6980) algorithm 1; ε 1e-5 as in openai/baselines ppo2.
    """
    steps = state.steps + 1
    m = {name: beta1 * state.m[name] + (1 - beta1) * g for name, g in gradients.items()}
    v = {name: beta2 * state.v[name] + (1 - beta2) * g * g for name, g in gradients.items()}
    new = {}
    for name, weight in weights.items():
        root = torch.sqrt(v[name] / (1 - beta2**steps))
        new[name] = weight - learning_rate * (m[name] / (1 - beta1**steps)) / (root + epsilon)
    return new, Adam(steps, m, v)


def new_adam(weights: Weights) -> Adam:
    """Return the state before the first step."""
    return Adam(0, zeros_like(weights), zeros_like(weights))


def zeros_like(weights: Weights) -> Weights:
    """Return zeros under the same names."""
    return {name: torch.zeros_like(weight) for name, weight in weights.items()}


def leaves(weights: Weights) -> Weights:
    """Return the weights as fresh leaves of autograd, so that no gradient is left from an earlier pass."""
    return {name: weight.detach().requires_grad_() for name, weight in weights.items()}


def split(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Cut the rows into parts, none of them empty."""
    rows = len(batch["mask"])
    sizes = [len(part) for part in torch.arange(rows).tensor_split(parts) if len(part)]
    columns = {name: tensor.split(sizes) for name, tensor in batch.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(sizes))]


def total_over(value: Tensor, group: Any) -> Tensor:
    """Return the sum of a tensor over the processes of a group; the tensor itself without one."""
    if group is None:
        return value
    value = value.clone()
    torch.distributed.all_reduce(value, group=group)
    return value


def reduced(gradients: dict[str, Weights], group: Any) -> dict[str, Weights]:
    """Add the gradients of all processes, one message per model; shares already refer to all tokens."""
    if group is None:
        return gradients
    result = {}
    for name, found in gradients.items():
        flat = total_over(torch.cat([g.flatten() for g in found.values()]), group)
        pieces = flat.split([g.numel() for g in found.values()])
        result[name] = {key: piece.view_as(found[key]) for key, piece in zip(found, pieces, strict=True)}
    return result


def merged(entries: list[dict[str, Tensor]], group: Any) -> dict[str, Tensor]:
    """Join the micro-batches: rows one after another, scalars (already times their share) added."""
    rows = {name: torch.cat([entry[name].detach() for entry in entries]) for name in PER_TOKEN}
    figures = {name: total_over(torch.stack([entry[name] for entry in entries]).sum(), group) for name in SCALARS}
    return rows | figures
