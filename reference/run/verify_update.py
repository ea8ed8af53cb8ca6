"""Verify the stages `gradient` and `optimizer` of one minibatch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from goldenppo.reference import entropy, exact
from goldenppo.reference.exact.number import ZERO
from goldenppo.reference.run import update
from goldenppo.reference.run.comparison import (
    Check,
    Setup,
    Tensors,
    check_logprobs,
    check_optimizer,
    moved_to,
    near_by,
    op_stage,
    same,
    stored,
    under,
)
from goldenppo.reference.run.law import ROUNDOFF, K
from goldenppo.reference.run.model import Weights
from goldenppo.reference.run.settings import DTYPES, gradient_settings, model_shape

__all__ = ["check_update", "edges", "exact_losses"]


def check_update(
    setup: Setup,
    step: int,
    index: int,
    rows: Tensor,
    models: dict[str, Tensors],
    adams: dict[str, dict[str, Tensors]],
    taken: int,
    batch: Tensors,
    done: Tensors,
) -> Iterator[Check]:
    """Check one minibatch: its rows, the gradient in its three parts and as a whole, and the optimizer."""
    settings, prefix = setup.manifest["settings"], f"update {index} "
    yield same(step, "gradient", f"{prefix}rows", rows, done["rows"])
    for name in (
        "sequences",
        "attention_mask",
        "tokens",
        "mask",
        "old_logprobs",
        "advantages",
        "old_values",
        "returns",
    ):
        yield same(step, "gradient", prefix + name, done[name], batch[name][done["rows"]])._replace(whose="recording")
    per_row = {name: done[name] for name in done if "/" not in name and done[name].dim()}
    part = moved_to(per_row, setup.device, DTYPES[setup.ops])
    here = {name: stored(models[name], setup) for name in adams}
    yield from check_forward(setup, step, prefix, here, part, done)
    yield from check_losses(setup, step, prefix, done)
    yield from check_accumulation(setup, step, prefix, here, part)
    rates = {name: settings[name] for name in ("learning_rate", "max_norm")}
    for name in adams:
        before = {"weights": models[name], **adams[name]}
        gradient, norm = under(done, f"gradient/{name}"), f"{name}_grad_norm"
        yield from check_optimizer(setup, step, "optimizer", before, gradient, done, taken, rates, f"/{name}", norm, prefix)


def check_forward(
    setup: Setup, step: int, prefix: str, models: dict[str, Weights], part: Tensors, done: Tensors
) -> Iterator[Check]:
    """Check what actor and critic say of the rows, and the weight gradients from the recorded derivatives."""
    settings = setup.manifest["settings"]
    how = {"temperature": settings["temperature"], "dtype": DTYPES[setup.dtype]}
    weights = {name: update.leaves(models[name]) for name in models}
    read_ = update.forward(weights, model_shape(settings), part, **how)
    yield from near_by(setup.outputs, step, "gradient", read_, done, read_, prefix)
    yield from check_logprobs(setup, step, "gradient", done, "logits", "logprobs", prefix)
    yield from op_stage(
        setup,
        step,
        "gradient",
        done,
        ("logits",),
        lambda x: {"token_entropy": entropy(x["logits"][:, :-1], temperature=settings["temperature"])},
        lambda x: {
            "token_entropy": exact.entropy([row[:-1] for row in x["logits"]], temperature=settings["temperature"])["entropy"]
        },
        prefix=prefix,
    )
    for name, got in update.weight_gradients(weights, read_, part).items():
        yield from near_by(
            setup.gradients,
            step,
            "gradient",
            got,
            under(done, f"gradient/{name}"),
            got,
            f"{prefix}gradient/{name}/",
        )


def check_losses(setup: Setup, step: int, prefix: str, done: Tensors) -> Iterator[Check]:
    """Check the losses and the derivative at each token as ops of the recorded log-probs and values."""
    settings = setup.manifest["settings"]
    names = ("clip_low", "clip_high", "value_clip", "vf_coef", "entropy_coef")
    how = {name: settings[name] for name in names}
    inputs = (
        "logprobs",
        "token_entropy",
        "values",
        "mask",
        "old_logprobs",
        "advantages",
        "old_values",
        "returns",
    )
    yield from op_stage(
        setup,
        step,
        "gradient",
        done,
        inputs,
        lambda x: update.losses(x, x, 1.0, **how),
        lambda x: exact_losses(x, **how),
        lambda x, dtype: edges(x, how, ROUNDOFF[dtype]),
        prefix,
    )


def exact_losses(
    x: dict[str, Any],
    *,
    clip_low: float,
    clip_high: float,
    value_clip: float,
    vf_coef: float,
    entropy_coef: float,
) -> dict[str, Any]:
    """Return the exact answers for everything that `update.losses` returns."""
    old, mask = x["old_logprobs"], x["mask"]
    policy = exact.policy_loss(x["logprobs"], old, x["advantages"], mask, clip_low=clip_low, clip_high=clip_high)
    value = exact.value_loss(x["values"], x["old_values"], x["returns"], mask, clip=value_clip)
    mean_entropy = exact.aggregate(x["token_entropy"], mask)["value"]
    coefficients = {"vf_coef": vf_coef, "entropy_coef": entropy_coef, "kl_loss_coef": 0.0}
    total = exact.total_loss(policy["loss"], value["loss"], mean_entropy, 0.0, **coefficients)
    tokens = sum(sum(row) for row in mask)
    share = total["grad_entropy"] / tokens
    return {
        "policy_loss": policy["loss"],
        "value_loss": value["loss"],
        "mean_entropy": mean_entropy,
        "loss": total["loss"],
        "clip_fraction": policy["clip_fraction"],
        "value_clip_fraction": value["clip_fraction"],
        "approx_kl": policy["approx_kl"],
        "grad_logprobs": policy["grad_logprobs"],
        "grad_values": [[g * total["grad_value_loss"] for g in row] for row in value["grad_values"]],
        "grad_entropy": [[share if m else ZERO for m in row] for row in mask],
    }


def edges(x: dict[str, Any], how: dict[str, float], roundoff: float) -> dict[str, dict[int, str]]:
    """Find tokens whose ratio or value is within tolerance of a clip edge, where the derivative jumps.

    Args:
        x: inputs of the losses as lists.
        how: clip_low, clip_high, value_clip.
        roundoff: u of the tolerance law, which counts the error of the ratio and of the edge itself.

    Returns:
        output name → flat index → sentence. A fraction that such a token may change is left out with it.
    """
    found: dict[str, dict[int, str]] = {"grad_logprobs": {}, "grad_values": {}}
    ratio = exact.ratio(x["logprobs"], x["old_logprobs"], x["mask"])["ratio"]
    width = len(x["mask"][0])
    for b, t in ((b, t) for b, row in enumerate(x["mask"]) for t, m in enumerate(row) if m):
        r, size = exact.to_float(ratio[b][t]), ratio[b][t].gauge
        for edge in (1 - how["clip_low"], 1 + how["clip_high"]):
            if abs(r - edge) <= K * roundoff * (size + edge + 1):
                found["grad_logprobs"][b * width + t] = (
                    f"row {b}, token {t}: ratio {r:.6g} is within tolerance of the edge {edge:.6g}"
                )
        V, old, R = x["values"][b][t], x["old_values"][b][t], x["returns"][b][t]
        edge = old + math.copysign(how["value_clip"], V - old)
        kinks = [V - edge]
        if abs(V - old) > how["value_clip"]:
            kinks.append(V + edge - 2 * R)  # beyond its edge the error is cut off once R lies past the middle
        size = abs(V) + abs(old) + abs(R) + how["value_clip"]
        if min(abs(kink) for kink in kinks) <= 4 * K * roundoff * size:
            found["grad_values"][b * width + t] = (
                f"row {b}, token {t}: value {V:.6g} is within tolerance of a clip edge around {old:.6g}"
            )
    for fraction, gradient in (("clip_fraction", "grad_logprobs"), ("value_clip_fraction", "grad_values")):
        if found[gradient]:
            found[fraction] = {0: f"{fraction}: a token is within tolerance of a clip edge"}
    return found


def check_accumulation(setup: Setup, step: int, prefix: str, models: dict[str, Weights], part: Tensors) -> Iterator[Check]:
    """Check that the gradient stage, micro-batch by micro-batch, gives what one pass gives."""
    settings, shape = setup.manifest["settings"], model_shape(setup.manifest["settings"])
    how = {"temperature": settings["temperature"], "dtype": DTYPES[setup.dtype]}
    coefficients = gradient_settings(settings)
    got, _ = update.gradient(models, shape, part, **how, **coefficients)
    weights = {name: update.leaves(models[name]) for name in models}
    read_ = update.forward(weights, shape, part, **how)
    del coefficients["microbatches"]
    at_once = update.weight_gradients(weights, read_, update.losses(read_, part, 1.0, **coefficients))
    for name, want in at_once.items():
        yield from near_by(setup.gradients, step, "gradient", got[name], want, want, f"{prefix}accumulated/{name}/")
