"""The torch reference: gradients, identities that need no numbers, and error messages."""

import pytest
import torch

from goldenppo import reference

B, T, V = 4, 6, 5


@pytest.fixture
def rollout():
    """A seeded float64 rollout with ragged rows and a hole."""
    torch.manual_seed(7)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, 4:], mask[2, 1:], mask[3, 5:], mask[0, 2] = False, False, False, False
    draw = {name: torch.randn(B, T, dtype=torch.float64) for name in ("values", "old_values", "returns", "advantages", "rewards")}
    logprobs = -torch.rand(B, T, dtype=torch.float64) - 0.2
    return {**draw, "logprobs": logprobs, "old_logprobs": logprobs + 0.1 * draw["values"], "mask": mask}


def poisoned(tensor, mask):
    return torch.where(mask, tensor, torch.nan)


LOSSES = {
    "policy_loss": (("logprobs", "old_logprobs", "advantages", "mask"), {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}),
    "value_loss": (("values", "old_values", "returns", "mask"), {"clip": 0.2}),
}


@pytest.mark.parametrize("op", LOSSES)
def test_gradients_are_those_of_the_value(op, rollout):
    names, params = LOSSES[op]
    first = rollout[names[0]].requires_grad_()

    assert torch.autograd.gradcheck(
        lambda x: getattr(reference, op)(x, *(rollout[n] for n in names[1:]), **params).loss, (first,)
    )


def test_gradients_of_the_pair_losses():
    torch.manual_seed(0)
    pair = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    tokens = torch.tensor([[1, 2, 0], [3, 4, 5]]), torch.tensor([[1, 3, 4], [3, 6, 0]])
    scores = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    assert torch.autograd.gradcheck(lambda a, b: reference.reward_model_loss(a, b, margin=torch.ones(3).double()), pair[:2])
    assert torch.autograd.gradcheck(lambda a, b: reference.dpo_loss(a, b, *pair[2:], beta=0.3, label_smoothing=0.1), pair[:2])
    assert torch.autograd.gradcheck(lambda a, b: reference.reward_model_token_loss(a, b, *tokens, pad_id=0), scores)


@pytest.mark.parametrize("op", LOSSES)
def test_masked_slots_change_neither_value_nor_gradient(op, rollout):
    names, params = LOSSES[op]
    mask = rollout["mask"]
    results = []
    for change in (lambda x, m: x, poisoned):
        inputs = [change(rollout[name], mask) for name in names[:-1]]
        inputs[0] = inputs[0].clone().requires_grad_()
        loss = getattr(reference, op)(*inputs, mask, **params).loss
        loss.backward()
        results.append((loss.item(), torch.where(mask, inputs[0].grad, 0.0)))
        assert torch.equal(inputs[0].grad * ~mask, torch.zeros(B, T).double())

    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_lambda_one_gives_monte_carlo_returns(rollout):
    returns = reference.gae(rollout["rewards"], rollout["values"], rollout["mask"], gamma=1.0, lam=1.0).returns

    paid = torch.where(rollout["mask"], rollout["rewards"], 0.0)
    later = paid.flip(1).cumsum(1).flip(1)
    assert torch.allclose(returns, torch.where(rollout["mask"], later, 0.0), atol=1e-12)


def test_lambda_zero_gives_one_step_errors(rollout):
    full = torch.ones_like(rollout["mask"])
    advantages = reference.gae(rollout["rewards"], rollout["values"], full, gamma=0.9, lam=0.0).advantages

    after = torch.cat([rollout["values"][:, 1:], torch.zeros(B, 1).double()], 1)
    assert torch.allclose(advantages, rollout["rewards"] + 0.9 * after - rollout["values"], atol=1e-12)


def test_gaps_do_not_matter_without_gaps(rollout):
    full = torch.ones_like(rollout["mask"])
    found = [
        reference.gae(rollout["rewards"], rollout["values"], full, gamma=0.9, lam=0.8, gaps=gaps)
        for gaps in ("skip", "zero", "cut")
    ]

    assert torch.equal(found[0].advantages, found[1].advantages) and torch.equal(found[0].advantages, found[2].advantages)


def test_rows_are_independent(rollout):
    order = torch.tensor([2, 0, 3, 1])
    inputs = [rollout[name] for name in ("rewards", "values", "mask")]

    straight = reference.gae(*inputs, gamma=0.9, lam=0.8)
    permuted = reference.gae(*(tensor[order] for tensor in inputs), gamma=0.9, lam=0.8)

    assert torch.equal(straight.advantages[order], permuted.advantages)


def test_ratio_one_gives_the_policy_gradient(rollout):
    logprobs = rollout["logprobs"].clone().requires_grad_()
    reference.policy_loss(
        logprobs, rollout["logprobs"], rollout["advantages"], rollout["mask"], clip_low=0.2, clip_high=0.2
    ).loss.backward()

    expected = torch.where(rollout["mask"], -rollout["advantages"] / rollout["mask"].sum(), 0.0)
    assert torch.allclose(logprobs.grad, expected, atol=1e-15)


def test_a_dtype_of_16_bits_is_worked_on_in_float32(rollout):
    half = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in rollout.items()}

    for op, (names, params) in LOSSES.items():
        assert getattr(reference, op)(*(half[name] for name in names), **params).loss.dtype is torch.float32


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r: reference.gae(r["rewards"], r["values"][:, :-1], r["mask"], gamma=1, lam=1), r"values has shape \(4, 5\)"),
        (lambda r: reference.gae(r["rewards"], r["values"], r["mask"].float(), gamma=1, lam=1), "mask has dtype torch.float32"),
        (
            lambda r: reference.gae(r["rewards"], r["values"], r["mask"], gamma=1, lam=1, gaps="hop"),
            "expected 'skip' or 'zero' or 'cut'",
        ),
        (lambda r: reference.aggregate(r["values"], r["mask"], aggregation="seq_mean_token_sum_norm"), "needs horizon"),
        (lambda r: reference.token_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), temperature=0), "temperature is 0"),
        (
            lambda r: reference.reward_model_loss(torch.zeros(3), torch.zeros(3), margin=torch.zeros(3, 1)),
            r"margin has shape \(3, 1\)",
        ),
        (
            lambda r: reference.shaped_rewards(
                r["logprobs"], r["logprobs"], torch.zeros(B).double(), r["mask"], kl_coef=1, eos_penalty=1.0
            ),
            "eos_penalty is given without ended",
        ),
    ],
)
def test_bad_arguments_get_a_sentence(call, says, rollout):
    with pytest.raises(ValueError, match=says):
        call(rollout)
