"""`goldenppo identify`: conventions without declarations."""

import textwrap

from goldenppo.conformance.cli import main

ADAPTER = """
import torch
VARIANTS = {{"policy_loss": {{"aggregation": "token_mean"}}}}
def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip):
    r = (logprobs - old_logprobs).exp()
    loss = torch.maximum(-advantages * r, -advantages * r.clamp(1 - clip, 1 + clip)) * mask
    return {reduction}
"""


def write(path, reduction):
    path.write_text(textwrap.dedent(ADAPTER.format(reduction=reduction)))
    return str(path)


def test_one_adapter_is_a_table(tmp_path, capsys):
    adapter = write(tmp_path / "one.py", "(loss.sum(1) / mask.sum(1).to(loss.dtype)).mean()")

    assert main(["identify", adapter, "--op", "policy_loss"]) == 0
    output = capsys.readouterr().out
    assert "seq_mean_token_mean" in output, "what it declares is not what it does"


def test_two_adapters_stand_side_by_side_with_differences_marked(tmp_path, capsys):
    one = write(tmp_path / "one.py", "loss.sum() / mask.sum().to(loss.dtype)")
    two = write(tmp_path / "two.py", "loss.sum(1).mean()")

    assert main(["identify", one, two, "--op", "policy_loss"]) == 0
    marked = [line for line in capsys.readouterr().out.split("\n") if line.startswith("*")]
    assert len(marked) == 1
    assert "token_mean" in marked[0] and "seq_mean_token_sum" in marked[0]


def test_more_than_two_is_a_usage_error():
    assert main(["identify", "a", "b", "c"]) == 2


WHITENING_BY_KEYWORD = """
import torch
def gae(rewards, values, mask, *, gamma, lam, whitening):
    values, advantages = values.masked_fill(~mask, 0), torch.zeros_like(values)
    following = running = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        new = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * running
        running = torch.where(mask[:, t], new, running)
        following = torch.where(mask[:, t], values[:, t], following)
        advantages[:, t] = running
    returns = advantages + values
    if whitening == "inside":
        counted = advantages[mask]
        advantages = (advantages - counted.mean()) / counted.std().clamp(min=1e-4)
    return {"advantages": advantages, "returns": returns}
"""


def test_a_call_without_whitening_says_nothing_of_its_epsilon(tmp_path, capsys):
    """Epsilon moves nothing where `whitening` is none, so those calls must not vote for one."""
    path = tmp_path / "whitening.py"
    path.write_text(WHITENING_BY_KEYWORD)

    assert main(["check", str(path), "--op", "gae", "--level", "should"]) == 0
    assert "epsilon: max(var,1e-8)" in capsys.readouterr().out
