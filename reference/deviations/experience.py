"""Known mistakes in the span from log-probabilities and scores to advantages and returns.

The span is shaped_rewards and then gae, so most are a mistake of the one or the other in its place.
"""

from goldenppo.reference import Experience, experience, gae, shaped_rewards, whiten
from goldenppo.reference.deviations import gae as _gae
from goldenppo.reference.deviations import shaped_rewards as _rewards
from goldenppo.reference.deviations._common import deviation_of, everywhere, select


def _shaped(inputs, params, shape=shaped_rewards):
    logprobs, ref_logprobs, _, scores, mask = inputs
    how = {name: params[name] for name in ("kl_coef", "score_clip", "score_at", "estimator")}
    return shape(logprobs, ref_logprobs, scores, mask, **how)


def _estimated(rewards, values, mask, params, estimate=gae):
    """Return unwhitened advantages and returns at the tokens, by gae along tokens and score slot."""
    chain = mask | _rewards._slot(mask, params["score_at"])
    how = {name: params[name] for name in ("gamma", "lam", "gaps")}
    advantages, returns = estimate(rewards, values, chain, **how)
    return select(advantages, mask), select(returns, mask)


def _span(inputs, params, shape=shaped_rewards, estimate=gae):
    """Return the span with one of its two steps replaced."""
    _, _, values, _, mask = inputs
    rewards = _shaped(inputs, params, shape)
    advantages, returns = _estimated(rewards, values, mask, params, estimate)
    if params["whitening"] == "inside":
        advantages = whiten(advantages, mask)
    return Experience(rewards, advantages, returns)


@deviation_of(experience)
def ex_score_on_every_token(*inputs, **params):
    """Add the score to every token, so that the return grows with the length of the response."""
    return _span(inputs, params, shape=_rewards.sr_score_on_every_token)


@deviation_of(experience)
def ex_score_one_early(*inputs, **params):
    """Put the score one position before the last token."""
    return _span(inputs, params, shape=_rewards.sr_score_one_early)


@deviation_of(experience)
def ex_score_lost_on_full_rows(*inputs, **params):
    """Drop the score of a row without room after its last token, where it belongs there."""
    return _span(inputs, params, shape=_rewards.sr_score_lost_on_full_rows)


@deviation_of(experience)
def ex_score_at_last_column(logprobs, ref_logprobs, values, scores, mask, **params):
    """Put the score into the last column whatever the padding, and run the recursion over every slot to it.

    Values at masked slots are 0.
    """
    inputs = (logprobs, ref_logprobs, select(values, mask), scores, mask)
    return _span(inputs, params, _rewards.sr_score_at_last_column, _gae.gae_pad_rewards)


@deviation_of(experience)
def ex_score_overwrites_kl(*inputs, **params):
    """Assign the score in place of adding it: the KL at its position is lost."""
    return _span(inputs, params, shape=_rewards.sr_score_overwrites_kl)


@deviation_of(experience)
def ex_score_truncated_to_integer(*inputs, **params):
    """Write the score into an integer array, which cuts off its fraction."""
    return _span(inputs, params, shape=_rewards.sr_score_truncated_to_integer)


@deviation_of(experience)
def ex_score_clip_ignored(*inputs, **params):
    """Ignore the score clip that was given."""
    return experience(*inputs, **{**params, "score_clip": None})


@deviation_of(experience)
def ex_kl_sign(*inputs, **params):
    """Reward the KL in place of penalising it: +kl_coef·kl."""
    return experience(*inputs, **{**params, "kl_coef": -params["kl_coef"]})


@deviation_of(experience)
def ex_kl_neither_scaled_nor_negated(*inputs, **params):
    """Use the KL itself as reward: +kl, as in log_probs − ref_log_probs."""
    return experience(*inputs, **{**params, "kl_coef": -1.0})


@deviation_of(experience)
def ex_kl_unscaled(*inputs, **params):
    """Leave the coefficient out: −kl."""
    return experience(*inputs, **{**params, "kl_coef": 1.0})


@deviation_of(experience)
def ex_kl_dropped(*inputs, **params):
    """Leave the KL out although a coefficient was given."""
    return experience(*inputs, **{**params, "kl_coef": 0.0})


@deviation_of(experience)
def ex_k3_direction_swapped(*inputs, **params):
    """Form k3 with the two models exchanged: exp(x) − 1 − x, x = ℓ − ℓ_ref."""
    return _span(inputs, params, shape=_rewards.sr_k3_direction_swapped)


@deviation_of(experience)
def ex_kl_mask_one_late(*inputs, **params):
    """Keep KL and value of the slot after the last token, masked with the mask of the position before.

    The score stays where it belongs, and the recursion starts at that slot.
    """
    _, _, values, _, mask = inputs
    rewards = _shaped(inputs, params, _rewards.sr_kl_mask_one_late)
    advantages, returns = _estimated(rewards, values, mask, params, _one_slot_longer)
    if params["whitening"] == "inside":
        advantages = whiten(advantages, mask)
    return Experience(rewards, advantages, returns)


def _one_slot_longer(rewards, values, mask, **how):
    chain = mask | _rewards.late(_rewards.last(mask), fill=False)
    return gae(rewards, values, chain, **how)


@deviation_of(experience)
def ex_kl_not_masked(*inputs, **params):
    """Let the KL of masked slots into rewards and recursion, which visits every slot; values there are 0."""
    return _span(inputs, params, _rewards.sr_kl_not_masked, _gae.gae_pad_rewards)


@deviation_of(experience)
def ex_gamma_lambda_swapped(*inputs, **params):
    """Exchange the discount and lambda: δ with λ, decay γλ."""
    return experience(*inputs, **{**params, "gamma": params["lam"], "lam": params["gamma"]})


@deviation_of(experience)
def ex_lambda_ignored(*inputs, **params):
    """Use λ = 1 although another was given: discounted return minus value."""
    return experience(*inputs, **{**params, "lam": 1.0})


@deviation_of(experience)
def ex_gamma_ignored(*inputs, **params):
    """Use γ = 1 although another was given."""
    return experience(*inputs, **{**params, "gamma": 1.0})


@deviation_of(experience)
def ex_mask_ignored(logprobs, ref_logprobs, values, scores, mask, **params):
    """Run over every slot: KL, rewards and values at masked slots all count."""
    return _span((logprobs, ref_logprobs, values, scores, mask), params, _rewards.sr_kl_not_masked, _raw)


def _raw(rewards, values, mask, **how):
    return gae(rewards, values, everywhere(mask), **how)


@deviation_of(experience)
def ex_pad_bootstrap(*inputs, **params):
    """Bootstrap from padding: values are read at every slot, rewards where they belong."""
    return _span(inputs, params, estimate=_gae.gae_pad_bootstrap)


@deviation_of(experience)
def ex_value_kept_after_end(*inputs, **params):
    """Keep the value of one more slot after the chain, with a reward of 0 there."""
    return _span(inputs, params, estimate=_gae.gae_value_kept_after_end)


@deviation_of(experience)
def ex_holes_visited(logprobs, ref_logprobs, values, scores, mask, **params):
    """Run through the holes of the mask with the values that stand there; padding is left out."""
    return _span((logprobs, ref_logprobs, values, scores, mask), params, estimate=_gae.gae_holes_visited)


@deviation_of(experience)
def ex_next_value_zeroed_at_gap(*inputs, **params):
    """Carry the running advantage across a hole but read 0 for the next value before it."""
    return _span(inputs, params, estimate=_gae.gae_next_value_zeroed_at_gap)


@deviation_of(experience)
def ex_next_value_unmasked(*inputs, **params):
    """Read the next value at the next slot whatever the mask; masked slots reset the running advantage."""
    return _span(inputs, params, estimate=_gae.gae_next_value_unmasked)


@deviation_of(experience)
def ex_values_one_late(*inputs, **params):
    """Use the value of the state after the action: V_{t+1} in place of V_t, the slot after the end too."""
    return _span(inputs, params, estimate=_gae.gae_values_one_late)


@deviation_of(experience)
def ex_immediate_reward(*inputs, **params):
    """Take the advantage for r − V: no later reward counts."""
    return _span(inputs, params, estimate=_gae.gae_immediate_reward)


@deviation_of(experience)
def ex_reward_minus_batch_mean(*inputs, **params):
    """Take the advantage for the reward minus the mean reward of the batch, without a critic."""
    return _span(inputs, params, estimate=_gae.gae_reward_minus_batch_mean)


@deviation_of(experience)
def ex_bootstraps_own_value(*inputs, **params):
    """Bootstrap the end of the chain from its own last value."""
    return _span(inputs, params, estimate=_gae.gae_bootstraps_own_value)


@deviation_of(experience)
def ex_returns_from_whitened(*inputs, **params):
    """Form the returns from the whitened advantages: R = whiten(A) + V."""
    right = experience(*inputs, **params)
    return right._replace(returns=select(right.advantages + inputs[2], inputs[4]))


@deviation_of(experience)
def ex_returns_without_values(*inputs, **params):
    """Take the advantages for the returns: R = A."""
    right = experience(*inputs, **params)
    return right._replace(returns=experience(*inputs, **{**params, "whitening": "none"}).advantages)


@deviation_of(experience)
def ex_whitening_keeps_mean(*inputs, **params):
    """Add the mean back after whitening, so that the advantages are scaled but not centred."""
    right = experience(*inputs, **{**params, "whitening": "none"})
    if params["whitening"] == "none":
        return right
    return right._replace(advantages=whiten(right.advantages, inputs[4], mean="kept"))


@deviation_of(experience)
def ex_whitening_over_padding(*inputs, **params):
    """Whiten over every slot, where padding counts as advantages of 0."""
    right = experience(*inputs, **{**params, "whitening": "none"})
    if params["whitening"] == "none":
        return right
    whitened = whiten(right.advantages, everywhere(inputs[4]))
    return right._replace(advantages=select(whitened, inputs[4]))
