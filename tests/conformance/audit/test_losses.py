"""Losses in a dump: with a mask of their own, and made up of micro-batches."""

import json

import pytest
import torch
from safetensors.torch import save_file

from goldenppo.conformance.audit.dump import Dump
from goldenppo.conformance.audit.engine import audit
from goldenppo.conformance.audit.step import Step
from goldenppo.reference import policy_loss, value_loss

NAMES = ("logprobs", "old_logprobs", "advantages", "mask")


def audited(path, tensors: dict, **params) -> dict:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"params": json.dumps(params)})
    return {finding.edge.name: finding for finding in audit(Step(Dump([str(path)])))}


@pytest.mark.parametrize("rows", [5, 60])  # judged whole; block by block
def test_the_value_loss_may_have_a_mask_of_its_own(tmp_path, rows):
    torch.manual_seed(0)
    width = 9
    lengths = torch.arange(rows) % (width - 1) + 1
    position = torch.arange(width)
    mask, longer = position < lengths[:, None], position <= lengths[:, None]
    values, old_values, returns = torch.randn(3, rows, width, dtype=torch.float64)
    made = value_loss(values, old_values, returns, longer, clip=0.2)
    x = {"values": values, "old_values": old_values, "returns": returns, "mask": mask, "value_loss": made.loss}
    x["value_clip_fraction"] = made.clip_fraction

    assert audited(tmp_path / "d.safetensors", x, value_clip=0.2)["value_loss"].verdict == "wrong"
    found = audited(tmp_path / "d.safetensors", x | {"value_mask": longer}, value_clip=0.2)["value_loss"]
    assert found.verdict == "right" and found.ends["mask"] == "value_mask"
    x["returns"][0, int(lengths[0])] = float("nan")  # at a position that counts for the value loss only
    found = audited(tmp_path / "d.safetensors", x | {"value_mask": longer}, value_clip=0.2)["value_loss"]
    assert found.verdict == "wrong" and "not finite" in found.reason


def batch() -> dict[str, torch.Tensor]:
    """Four rows of 8, 2, 5 and 1 tokens; two micro-batches of two rows have 10 and 6."""
    torch.manual_seed(1)
    logprobs, old_logprobs, advantages = torch.randn(3, 4, 8, dtype=torch.float64)
    return dict(
        zip(NAMES, (logprobs, old_logprobs, advantages, torch.arange(8) < torch.tensor([[8], [2], [5], [1]])), strict=True)
    )


def parts(x: dict, loss) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the number of tokens of each micro-batch."""
    halves = [[x[name][rows] for name in NAMES] for rows in (slice(0, 2), slice(2, 4))]
    return torch.stack([loss(*half) for half in halves]), torch.tensor([int(half[3].sum()) for half in halves])


def right_loss(*half: torch.Tensor) -> torch.Tensor:
    return policy_loss(*half, clip_low=0.2, clip_high=0.2).loss


@pytest.mark.parametrize("factor", [1, 2])  # divided by the batch's tokens; times the number of micro-batches too
def test_micro_batches_that_are_divided_by_the_batchs_tokens_add_up(tmp_path, factor):
    x = batch()
    losses, tokens = parts(x, right_loss)
    x |= {"policy_loss": right_loss(*(x[name] for name in NAMES)), "micro_tokens": tokens}
    x["micro_policy_loss"] = losses * tokens / tokens.sum() * factor

    found = audited(tmp_path / "d.safetensors", x, clip=0.2)
    assert found["policy_loss"].verdict == found["micro_policy_loss"].verdict == "right"
    found = audited(tmp_path / "d.safetensors", x | {"micro_policy_loss": x["micro_policy_loss"] * 0.9}, clip=0.2)
    assert found["micro_policy_loss"].verdict == "wrong"


def test_a_mean_of_token_means_is_no_loss_of_the_batch_though_the_rows_are_equally_many(tmp_path):
    x = batch()
    losses, tokens = parts(x, right_loss)
    x |= {"policy_loss": losses.mean(), "micro_policy_loss": losses, "micro_tokens": tokens, "micro_rows": torch.tensor([2, 2])}

    found = audited(tmp_path / "d.safetensors", x, clip=0.2)
    assert found["policy_loss"].verdict == found["micro_policy_loss"].verdict == "wrong"
    assert "expected their mean, weighted by tokens (INV-6)" in found["micro_policy_loss"].reason


def test_a_bug_in_every_micro_batch_is_no_fault_of_how_they_are_joined(tmp_path):
    x = batch()
    losses, tokens = parts(x, lambda *half: -right_loss(*half))
    x |= {"policy_loss": (losses * tokens).sum() / tokens.sum(), "micro_policy_loss": losses, "micro_tokens": tokens}

    found = audited(tmp_path / "d.safetensors", x, clip=0.2)
    assert found["policy_loss"].verdict == "wrong"
    assert found["micro_policy_loss"].verdict == "right"
