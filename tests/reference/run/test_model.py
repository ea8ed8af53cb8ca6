"""The transformer: padding moves nothing, no look ahead, a checkpoint comes back as it was."""

import json

import pytest
import torch

from goldenppo.reference.run.model import (
    init_weights,
    load_checkpoint,
    save_checkpoint,
    token_logits,
    token_scores,
)

SHAPE = {"vocab_size": 10, "n_positions": 12, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": 12}


@pytest.fixture
def policy():
    return init_weights(SHAPE, 3, "policy_weights", head=False, dtype=torch.float64)


def test_left_padding_moves_nothing(policy):
    tokens = torch.tensor([[2, 5, 7, 3, 9]])
    padded = torch.tensor([[8, 8, 8, 2, 5, 7, 3, 9]])
    mask = torch.arange(8)[None] >= 3

    short = token_logits(policy, SHAPE, tokens, torch.ones_like(tokens).bool(), torch.float64)
    long = token_logits(policy, SHAPE, padded, mask, torch.float64)[:, 3:]

    assert torch.allclose(short, long, rtol=1e-13, atol=1e-13)


def test_no_position_looks_ahead(policy):
    tokens = torch.tensor([[2, 5, 7, 3, 9]])
    changed = torch.tensor([[2, 5, 7, 4, 2]])
    mask = torch.ones_like(tokens).bool()

    before, after = (token_logits(policy, SHAPE, t, mask, torch.float64) for t in (tokens, changed))

    assert torch.equal(before[:, :3], after[:, :3]) and not torch.equal(before[:, 3], after[:, 3])


@pytest.mark.parametrize("head", [False, True])
def test_checkpoint_round_trip(tmp_path, head):
    """Weights and shape come back bit for bit, under the architecture's name in transformers."""
    weights = init_weights(SHAPE, 3, "reward_weights", head=head, dtype=torch.float64)
    save_checkpoint(tmp_path, weights, SHAPE)

    again, shape = load_checkpoint(tmp_path)

    assert shape == SHAPE and list(sorted(again)) == sorted(weights)
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert architecture == ["GPT2ForSequenceClassification" if head else "GPT2LMHeadModel"]


def test_bfloat16_computes_in_bfloat16_and_differentiates_the_stored_weights():
    weights = init_weights(SHAPE, 3, "reward_weights", head=True, dtype=torch.float32)
    leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
    tokens = torch.tensor([[2, 5, 7]])

    scores = token_scores(leaves, SHAPE, tokens, torch.ones_like(tokens).bool(), torch.bfloat16)
    scores.sum().backward()

    assert scores.dtype == torch.float32 and torch.equal(scores, scores.bfloat16().float())
    assert all(weight.grad.dtype == torch.float32 for weight in leaves.values())
