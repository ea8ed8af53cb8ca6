"""The four recorded models are Hugging Face GPT-2 checkpoints: transformers computes the same from them."""

import pytest
import torch

from goldenppo.reference.run.model import load_checkpoint, token_logits, token_scores
from goldenppo.reference.run.task import prompts

transformers = pytest.importorskip("transformers")


@pytest.fixture
def batch():
    """Tokens padded on the left, as a trainer hands them over, with the positions that generate() gives."""
    tokens, mask = prompts(1, "prompts", 0, 6, 8)
    return tokens, mask, (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("name", ["actor", "reference"])
def test_policy_logits_equal(recorded, batch, name):
    tokens, mask, position = batch
    folder = recorded / "models" / name
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )

    want = theirs.eval()(input_ids=tokens, attention_mask=mask.long(), position_ids=position).logits
    got = token_logits(*load_checkpoint(folder), tokens, mask, torch.float64)

    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.allclose(got[mask], want[mask], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["critic", "reward"])
def test_scores_equal(recorded, batch, name):
    """The score at every position, by the classifier's head over its states, and at the last by its call."""
    tokens, mask, position = batch
    folder = recorded / "models" / name
    theirs, info = transformers.GPT2ForSequenceClassification.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )
    given = {"attention_mask": mask.long(), "position_ids": position}

    states = theirs.eval().transformer(input_ids=tokens, **given).last_hidden_state
    last = theirs(input_ids=tokens, **given).logits[:, 0]
    got = token_scores(*load_checkpoint(folder), tokens, mask, torch.float64)

    assert not info["missing_keys"] and not info["unexpected_keys"] and theirs.config.num_labels == 1
    assert torch.allclose(got[mask], theirs.score(states)[..., 0][mask], rtol=1e-12, atol=1e-12)
    assert torch.allclose(got[:, -1], last, rtol=1e-12, atol=1e-12)


def test_a_checkpoint_that_transformers_saves_loads_here(recorded, batch, tmp_path):
    tokens, mask, _ = batch
    model = transformers.GPT2LMHeadModel.from_pretrained(recorded / "models" / "actor", dtype=torch.float64)
    model.save_pretrained(tmp_path)

    weights, shape = load_checkpoint(tmp_path)
    ours, _ = load_checkpoint(recorded / "models" / "actor")

    got = token_logits(weights, shape, tokens, mask, torch.float64)
    assert torch.equal(got, token_logits(ours, shape, tokens, mask, torch.float64))
