"""Known mistakes in generalised advantage estimation."""

import torch

from goldenppo.reference import GAE, gae, whiten
from goldenppo.reference.deviations._common import deviation_of, early, everywhere, last, late, select, span


def _unwhitened(params):
    return {**params, "whitening": "none"}


def _whitened(advantages, mask, params):
    if params["whitening"] == "none":
        return advantages
    return whiten(advantages, mask, variance=params["variance"], epsilon=params["epsilon"])


def _outputs(advantages, values, mask, params):
    """Return what gae gives for these unwhitened advantages."""
    advantages, returns = select(advantages, mask), select(advantages + values, mask)
    return GAE(_whitened(advantages, mask, params), returns)


def _along(chain, rewards, values, mask, params):
    """Run gae along another mask and report it at the tokens."""
    advantages = gae(rewards, values, chain, **_unwhitened(params)).advantages
    return _outputs(advantages, select(values, mask), mask, params)


def _recursion(rewards, values, mask, gaps, delta, decay, value_gaps=None):
    """Run A_t = delta(r_t, V_t, V_{t+1}) + decay·A_{t+1} backwards over a batch.

    Args:
        gaps: what a masked slot does to the running advantage, and to the next value unless `value_gaps`
            says otherwise: skip keeps it, zero steps on with r = V = 0, cut sets it to 0.

    Returns:
        Advantages [B, T], 0 at masked slots.
    """
    rewards, values = select(rewards, mask), select(values, mask)
    after = running = torch.zeros_like(values[:, 0])
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        token, V = mask[:, t], values[:, t]
        A = delta(rewards[:, t], V, after) + decay * running
        advantages[:, t] = select(A, token)
        after = _carried(V, after, token, value_gaps or gaps)
        running = A if gaps == "zero" else _carried(A, running, token, gaps)
    return advantages


def _td_error(gamma):
    return lambda r, V, after: r + gamma * after - V


def _carried(new, old, token, gaps):
    return torch.where(token, new, old) if gaps == "skip" else select(new, token)


@deviation_of(gae)
def gae_gamma_lambda_swapped(rewards, values, mask, **params):
    """Exchange the discount and lambda: δ with λ, decay γλ."""
    return gae(rewards, values, mask, **{**params, "gamma": params["lam"], "lam": params["gamma"]})


@deviation_of(gae)
def gae_lambda_ignored(rewards, values, mask, **params):
    """Use λ = 1 although another was given: discounted return minus value."""
    return gae(rewards, values, mask, **{**params, "lam": 1.0})


@deviation_of(gae)
def gae_gamma_ignored(rewards, values, mask, **params):
    """Use γ = 1 although another was given."""
    return gae(rewards, values, mask, **{**params, "gamma": 1.0})


@deviation_of(gae)
def gae_gamma_missing_in_delta(rewards, values, mask, **params):
    """Leave γ out of the TD error: δ = r + V' − V; the decay stays γλ."""
    decay = params["gamma"] * params["lam"]
    A = _recursion(rewards, values, mask, params["gaps"], lambda r, V, after: r + after - V, decay)
    return _outputs(A, values, mask, params)


@deviation_of(gae)
def gae_gamma_missing_in_decay(rewards, values, mask, **params):
    """Leave γ out of the decay: A_t = δ_t + λ·A_{t+1}."""
    gamma = params["gamma"]
    A = _recursion(rewards, values, mask, params["gaps"], _td_error(gamma), params["lam"])
    return _outputs(A, values, mask, params)


@deviation_of(gae)
def gae_baseline_missing(rewards, values, mask, **params):
    """Leave the value of the present state out of the TD error: δ = r + γV'."""
    gamma, decay = params["gamma"], params["gamma"] * params["lam"]
    A = _recursion(rewards, values, mask, params["gaps"], lambda r, V, after: r + gamma * after, decay)
    return _outputs(A, values, mask, params)


@deviation_of(gae)
def gae_next_value_missing(rewards, values, mask, **params):
    """Leave the value of the next state out of the TD error: δ = r − V."""
    decay = params["gamma"] * params["lam"]
    A = _recursion(rewards, values, mask, params["gaps"], lambda r, V, after: r - V, decay)
    return _outputs(A, values, mask, params)


@deviation_of(gae)
def gae_mask_ignored(rewards, values, mask, **params):
    """Run the recursion over every slot with the rewards and values that stand there."""
    return _along(everywhere(mask), rewards, values, mask, params)


@deviation_of(gae)
def gae_pad_bootstrap(rewards, values, mask, **params):
    """Bootstrap from padding: values are read at every slot, rewards at tokens only.

    The critic's output on padding stands for the value after the last token, and its TD errors enter the sum.
    """
    return _along(everywhere(mask), select(rewards, mask), values, mask, params)


@deviation_of(gae)
def gae_pad_rewards(rewards, values, mask, **params):
    """Let rewards at masked slots into the sum; values there are 0."""
    return _along(everywhere(mask), rewards, select(values, mask), mask, params)


@deviation_of(gae)
def gae_value_kept_after_end(rewards, values, mask, **params):
    """Keep the value of one slot after the last token, with a reward of 0 there."""
    chain = mask | late(last(mask), fill=False)
    return _along(chain, select(rewards, mask), values, mask, params)


@deviation_of(gae)
def gae_holes_visited(rewards, values, mask, **params):
    """Run through the holes of the mask with the rewards and values that stand there; padding is left out."""
    return _along(span(mask), rewards, values, mask, params)


@deviation_of(gae)
def gae_next_value_zeroed_at_gap(rewards, values, mask, **params):
    """Carry the running advantage across a hole but read 0 for the next value before it."""
    gamma, decay = params["gamma"], params["gamma"] * params["lam"]
    A = _recursion(rewards, values, mask, params["gaps"], _td_error(gamma), decay, value_gaps="zero")
    return _outputs(A, values, mask, params)


@deviation_of(gae)
def gae_next_value_unmasked(rewards, values, mask, **params):
    """Read the next value at the next slot whatever the mask; masked slots reset the running advantage.

    The last token bootstraps from the critic's output on padding, a token before a hole from the hole's.
    """
    gamma, decay = params["gamma"], params["gamma"] * params["lam"]
    deltas = select(rewards + gamma * early(values, fill=0.0) - values, mask)
    A = _recursion(deltas, values, mask, "cut", lambda r, V, after: r, decay)
    return _outputs(A, values, mask, params)


@deviation_of(gae)
def gae_bootstraps_own_value(rewards, values, mask, **params):
    """Bootstrap the last token from its own value: the value after the end is V of the last token."""
    bootstrap = select(params["gamma"] * values, last(mask))
    return gae(rewards + bootstrap, values, mask, **params)


@deviation_of(gae)
def gae_last_token_skipped(rewards, values, mask, **params):
    """Start the recursion one token before the last, whose advantage stays 0 and whose reward is lost."""
    ending = last(mask)
    shifted = select(rewards, mask & ~ending) + select(values, ending)
    return gae(shifted, values, mask, **params)


@deviation_of(gae)
def gae_values_one_late(rewards, values, mask, **params):
    """Use the value of the state after the action: V_{t+1} in place of V_t, the slot after the end too."""
    return gae(rewards, early(values, fill=0.0), mask, **params)


@deviation_of(gae)
def gae_rewards_one_late(rewards, values, mask, **params):
    """Give each token the reward of the position before it; the last reward of a full row is lost."""
    return gae(late(select(rewards, mask), fill=0.0), values, mask, **params)


@deviation_of(gae)
def gae_immediate_reward(rewards, values, mask, **params):
    """Take the advantage for r − V: no later reward counts."""
    return _outputs(select(rewards - values, mask), values, mask, params)


@deviation_of(gae)
def gae_reward_minus_batch_mean(rewards, values, mask, **params):
    """Take the advantage for the reward minus the mean reward of the batch, without a critic."""
    r = select(rewards, mask)
    return _outputs(r - r.sum() / mask.sum(), values, mask, params)


@deviation_of(gae)
def gae_runs_forward(rewards, values, mask, **params):
    """Run the recursion from the first token on: A_t = δ_t + γλ·A_{t−1}."""
    deltas = gae(rewards, values, mask, **{**_unwhitened(params), "lam": 0.0}).advantages
    decay = params["gamma"] * params["lam"]
    forward = _recursion(deltas.flip(1), values, mask.flip(1), params["gaps"], lambda r, V, after: r, decay)
    return _outputs(forward.flip(1), values, mask, params)


@deviation_of(gae)
def gae_rows_leak(rewards, values, mask, **params):
    """Run through the rows as through one episode: the last token of a row goes on in the next row."""
    flat = [x.reshape(1, -1) for x in (rewards, values, mask)]
    A = gae(*flat, **_unwhitened(params)).advantages.reshape(mask.shape)
    return _outputs(A, values, mask, params)


@deviation_of(gae)
def gae_returns_from_whitened(rewards, values, mask, **params):
    """Form the returns from the whitened advantages: R = whiten(A) + V."""
    advantages = gae(rewards, values, mask, **params).advantages
    return GAE(advantages, select(advantages + values, mask))


@deviation_of(gae)
def gae_returns_without_values(rewards, values, mask, **params):
    """Take the advantages for the returns: R = A."""
    advantages = gae(rewards, values, mask, **_unwhitened(params)).advantages
    return GAE(_whitened(advantages, mask, params), advantages)


@deviation_of(gae)
def gae_returns_one_step(rewards, values, mask, **params):
    """Take the one-step target for the returns: R = r + γV'."""
    right = gae(rewards, values, mask, **params)
    return right._replace(returns=gae(rewards, values, mask, **{**params, "lam": 0.0}).returns)


@deviation_of(gae)
def gae_whitening_keeps_mean(rewards, values, mask, **params):
    """Add the mean back after whitening, so that the advantages are scaled but not centred."""
    right = gae(rewards, values, mask, **_unwhitened(params))
    if params["whitening"] == "none":
        return right
    how = {"variance": params["variance"], "epsilon": params["epsilon"], "mean": "kept"}
    return right._replace(advantages=whiten(right.advantages, mask, **how))


@deviation_of(gae)
def gae_whitening_over_padding(rewards, values, mask, **params):
    """Whiten over every slot, where padding counts as advantages of 0."""
    right = gae(rewards, values, mask, **_unwhitened(params))
    whitened = _whitened(right.advantages, everywhere(mask), params)
    return right._replace(advantages=select(whitened, mask))


@deviation_of(gae)
def gae_mask_multiplied(rewards, values, mask, **params):
    """Multiply rewards and values by the mask and run over every slot: NaN at a masked slot spreads."""
    return _along(everywhere(mask), rewards * mask, values * mask, mask, params)
