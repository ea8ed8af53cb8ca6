"""A tiny decoder-only transformer of GPT-2's architecture, as functions of a dict of weights.

The weights carry the names and shapes that Hugging Face transformers gives them, so a dict saves as a
checkpoint that GPT2LMHeadModel (policy, reference) or GPT2ForSequenceClassification (critic, reward model;
one score without bias at every position) loads as it is. There is no dropout.

The shape is a plain dict with GPT-2's own keys: vocab_size, n_positions, n_embd, n_layer, n_head, n_inner.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from goldenppo.reference.run.random import uniform
from goldenppo.reference.run.task import END, PAD

__all__ = [
    "Shape",
    "Weights",
    "init_weights",
    "load_checkpoint",
    "save_checkpoint",
    "token_logits",
    "token_scores",
]

Weights = dict[str, Tensor]
Shape = dict[str, int]

LAYER_NORM_EPSILON = 1e-5
SHAPE_KEYS = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner")


def parameter_shapes(shape: Shape, head: bool) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every weight; a matrix is stored [inputs, outputs] except for the score head.

    Args:
        shape: the model's shape.
        head: True for a model with a scalar head (critic, reward model).
    """
    d, inner = shape["n_embd"], shape["n_inner"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (shape["vocab_size"], d),
        "transformer.wpe.weight": (shape["n_positions"], d),
    }
    for layer in range(shape["n_layer"]):
        linear = {
            "attn.c_attn": (d, 3 * d),
            "attn.c_proj": (d, d),
            "mlp.c_fc": (d, inner),
            "mlp.c_proj": (inner, d),
        }
        for name in ("ln_1", "ln_2"):
            shapes |= {f"transformer.h.{layer}.{name}.{kind}": (d,) for kind in ("weight", "bias")}
        for name, (rows, columns) in linear.items():
            shapes[f"transformer.h.{layer}.{name}.weight"] = (rows, columns)
            shapes[f"transformer.h.{layer}.{name}.bias"] = (columns,)
    shapes |= {"transformer.ln_f.weight": (d,), "transformer.ln_f.bias": (d,)}
    return shapes | ({"score.weight": (1, d)} if head else {})


def init_weights(shape: Shape, seed: int, stream: str, *, head: bool, dtype: torch.dtype) -> Weights:
    """Draw weights: matrices uniform in ±√3·σ, biases 0, layer-norm weights 1.

    σ = 1/√n_embd for embeddings, c_attn, c_fc and the head, and 1/√(n_layer·rows) for the projections back
    into the residual stream. Each parameter has a step of the stream to itself.

    Returns:
        dict of tensors on the CPU.
    """
    weights = {}
    for step, (name, size) in enumerate(parameter_shapes(shape, head).items()):
        if len(size) == 1:
            fill = 1.0 if name.endswith("weight") else 0.0
            weights[name] = torch.full(size, fill, dtype=dtype)
            continue
        variance = 1 / (shape["n_layer"] * size[0]) if "c_proj" in name else 1 / shape["n_embd"]
        draws = uniform(seed, stream, step, size)
        weights[name] = ((2 * draws - 1) * math.sqrt(3 * variance)).to(dtype)
    return weights


def hidden_states(weights: Weights, shape: Shape, tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the last layer's normalised states.

    Positions count attended tokens only, so padding on the left moves nothing.

    Args:
        weights: dict of tensors of one dtype, the dtype that is computed in.
        tokens: int64 [B, L].
        attention_mask: bool [B, L], True = a token.

    Returns:
        [B, L, n_embd].
    """
    position = (attention_mask.cumsum(1) - 1).clamp(min=0)
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    # a padded position sees itself, so that its softmax is over something; nobody reads it
    itself = torch.eye(length, dtype=torch.bool, device=tokens.device)
    visible = (causal & attention_mask[:, None, :]) | itself  # [B, L, L]
    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"][position]
    for layer in range(shape["n_layer"]):
        prefix = f"transformer.h.{layer}"
        x = x + attention(weights, f"{prefix}.attn", layer_norm(weights, f"{prefix}.ln_1", x), visible, shape["n_head"])
        x = x + feed_forward(weights, f"{prefix}.mlp", layer_norm(weights, f"{prefix}.ln_2", x))
    return layer_norm(weights, "transformer.ln_f", x)


def attention(weights: Weights, name: str, x: Tensor, visible: Tensor, heads: int) -> Tensor:
    """Return causal self-attention: softmax(q·kᵀ/√d)·v per head, then the output projection.

    Args:
        x: [B, L, n_embd].
        visible: bool [B, L, L], True where position l may look at position k.
        heads: number of heads H; d = n_embd/H.

    Returns:
        [B, L, n_embd].
    """
    rows, length, width = x.shape
    split = linear(weights, f"{name}.c_attn", x).view(rows, length, 3, heads, width // heads)
    q, k, v = split.permute(2, 0, 3, 1, 4)  # three of [B, H, L, d]
    scores = q @ k.transpose(-1, -2) / math.sqrt(width // heads)  # [B, H, L, L]
    scores = scores.masked_fill(~visible[:, None], torch.finfo(scores.dtype).min)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width)
    return linear(weights, f"{name}.c_proj", mixed)


def feed_forward(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return c_proj(gelu(c_fc(x))) with the tanh form of gelu, GPT-2's."""
    return linear(weights, f"{name}.c_proj", functional.gelu(linear(weights, f"{name}.c_fc", x), approximate="tanh"))


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return x·W + b with W stored [inputs, outputs]."""
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def layer_norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return x with mean 0 and variance 1 along the last axis, scaled and shifted."""
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, LAYER_NORM_EPSILON)


def computed_in(weights: Weights, dtype: torch.dtype) -> Weights:
    """Return the weights in the dtype that is computed in; gradients flow back to the weights as stored."""
    return {name: weight.to(dtype) for name, weight in weights.items()}


def token_logits(weights: Weights, shape: Shape, tokens: Tensor, attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits of the next token at every position; the output matrix is the embedding.

    Returns:
        [B, L, V] in `dtype`.
    """
    weights = computed_in(weights, dtype)
    return hidden_states(weights, shape, tokens, attention_mask) @ weights["transformer.wte.weight"].T


def token_scores(weights: Weights, shape: Shape, tokens: Tensor, attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scalar head's output at every position, widened to float32 if it was computed in 16 bits.

    Returns:
        [B, L].
    """
    weights = computed_in(weights, dtype)
    scores = (hidden_states(weights, shape, tokens, attention_mask) @ weights["score.weight"].T)[..., 0]
    return scores.to(torch.promote_types(dtype, torch.float32))


def save_checkpoint(folder: Path, weights: Weights, shape: Shape) -> None:
    """Write config.json and model.safetensors as transformers does for GPT-2.

    Args:
        folder: made if missing.
        weights: with `score.weight` a sequence classifier of one label, without it a language model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head = "score.weight" in weights
    config: dict[str, object] = {
        "architectures": ["GPT2ForSequenceClassification" if head else "GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{key: shape[key] for key in SHAPE_KEYS},
        "activation_function": "gelu_new",
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": END,
        "eos_token_id": END,
        "torch_dtype": str(weights["transformer.wte.weight"].dtype).removeprefix("torch."),
    }
    if head:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    on_cpu = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(on_cpu, folder / "model.safetensors", metadata={"format": "pt"})


def load_checkpoint(folder: Path) -> tuple[Weights, Shape]:
    """Read what `save_checkpoint` wrote, or a GPT-2 checkpoint of transformers with the same names.

    Returns:
        (weights on the CPU, shape).
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return load_file(folder / "model.safetensors"), {key: config[key] for key in SHAPE_KEYS}
