"""Known mistakes in the clipped surrogate."""

import torch

from goldenppo.reference import PolicyLoss, aggregate, policy_loss, whiten
from goldenppo.reference.deviations import _reductions
from goldenppo.reference.deviations._common import deviation_of, everywhere, first, last, late, select, span


def _log_ratio(logprobs, old_logprobs, mask, params):
    return _clamped(select(logprobs - old_logprobs.detach(), mask), params)


def _clamped(d, params):
    return d if params["log_ratio_clamp"] == "none" else d.clamp(-20.0, 20.0)


def _branches(ratio, advantages, params):
    """Return the unclipped and the clipped surrogate, as losses."""
    low, high = 1 - params["clip_low"], 1 + params["clip_high"]
    return -advantages * ratio, -advantages * ratio.clamp(low, high)


def _dual(loss, advantages, params):
    c = params["dual_clip"]
    if c is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -c * advantages), loss)


def _terms(ratio, advantages, params):
    """Return the loss of each token."""
    return _dual(torch.maximum(*_branches(ratio, advantages, params)), advantages, params)


def _unmasked_terms(logprobs, old_logprobs, advantages, params):
    """Return the loss of each slot, masked or not."""
    ratio = _clamped(logprobs - old_logprobs.detach(), params).exp()
    return _terms(ratio, advantages.detach(), params)


def _how(params):
    return {name: params[name] for name in ("horizon", "aggregation", "empty_rows")}


def _outputs(d, ratio, advantages, mask, params):
    """Return what policy_loss gives for this log-ratio and this ratio."""
    advantages = select(advantages.detach(), mask)
    plain, clipped = _branches(ratio, advantages, params)
    outside = (ratio < 1 - params["clip_low"]) | (ratio > 1 + params["clip_high"])
    hit = clipped > plain if params["clip_fraction"] == "larger_loss" else outside
    kl = {"k1": -d, "minus_k1": d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[params["approx_kl"]]
    loss = aggregate(_terms(ratio, advantages, params), mask, **_how(params))
    return PolicyLoss(loss, aggregate(hit.to(ratio.dtype), mask), aggregate(kl, mask))


def _with_terms(terms, inputs, params):
    """Return the reference outputs with the loss of these per-token terms."""
    mask = inputs[3]
    return policy_loss(*inputs, **params)._replace(loss=aggregate(terms, mask, **_how(params)))


@deviation_of(policy_loss)
def pl_loss_sign(*inputs, **params):
    """Maximise the loss: the surrogate with the opposite sign."""
    right = policy_loss(*inputs, **params)
    return right._replace(loss=-right.loss)


@deviation_of(policy_loss)
def pl_ratio_inverted(logprobs, old_logprobs, advantages, mask, **params):
    """Divide the old by the new probability: r = exp(ℓ_old − ℓ)."""
    d = -_log_ratio(logprobs, old_logprobs, mask, params)
    return _outputs(d, d.exp(), advantages, mask, params)


@deviation_of(policy_loss)
def pl_ratio_of_itself(logprobs, old_logprobs, advantages, mask, **params):
    """Compare the new log-probabilities with themselves: r = exp(ℓ − ℓ) is 1 and its gradient 0."""
    d = select(logprobs - logprobs, mask)
    return _outputs(d, d.exp(), advantages, mask, params)


@deviation_of(policy_loss)
def pl_ratio_not_exponentiated(logprobs, old_logprobs, advantages, mask, **params):
    """Use the log-ratio for the ratio: r = ℓ − ℓ_old."""
    d = _log_ratio(logprobs, old_logprobs, mask, params)
    return _outputs(d, d, advantages, mask, params)


@deviation_of(policy_loss)
def pl_ratio_softmax_quotient(logprobs, old_logprobs, advantages, mask, **params):
    """Take log-probabilities for scores: r = softmax(ℓ) / softmax(ℓ_old), each over the tokens of its row."""
    new, old = (torch.log_softmax(x.where(mask, -1e30), 1) for x in (logprobs, old_logprobs))
    d = _log_ratio(new, old, mask, params)
    return _outputs(d, d.exp(), advantages, mask, params)


@deviation_of(policy_loss)
def pl_ratio_broadcast(logprobs, old_logprobs, advantages, mask, **params):
    """Multiply [B, T, 1] by [B, T]: every ratio of a row meets every advantage of that row.

    The loss of token j is the mean over the row's tokens i of the surrogate of r_i and A_j.
    """
    ratio = _log_ratio(logprobs, old_logprobs, mask, params).exp()[:, :, None]
    A = select(advantages.detach(), mask)[:, None, :]
    pairs = select(_terms(ratio.expand(-1, -1, A.shape[2]), A, params), mask[:, :, None])
    terms = pairs.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    return _with_terms(terms, (logprobs, old_logprobs, advantages, mask), params)


@deviation_of(policy_loss)
def pl_ratio_missing(logprobs, old_logprobs, advantages, mask, **params):
    """Leave the ratio out: −A·ℓ, the plain policy gradient, whatever the old policy was."""
    terms = -select(advantages.detach(), mask) * select(logprobs, mask)
    return _with_terms(terms, (logprobs, old_logprobs, advantages, mask), params)


@deviation_of(policy_loss)
def pl_clipped_weight_branch(logprobs, old_logprobs, advantages, mask, **params):
    """Evaluate another objective: −min(r, clip_high)·A·ℓ with the weight held constant."""
    ratio = _log_ratio(logprobs, old_logprobs, mask, params).exp()
    weight = ratio.clamp(max=params["clip_high"]).detach()
    terms = -weight * select(advantages.detach(), mask) * select(logprobs, mask)
    return _with_terms(terms, (logprobs, old_logprobs, advantages, mask), params)


@deviation_of(policy_loss)
def pl_min_for_max(logprobs, old_logprobs, advantages, mask, **params):
    """Take the smaller of the two losses: min(−A·r, −A·clip(r)), the optimistic bound."""
    ratio, A = _log_ratio(logprobs, old_logprobs, mask, params).exp(), select(advantages.detach(), mask)
    terms = _dual(torch.minimum(*_branches(ratio, A, params)), A, params)
    return _with_terms(terms, (logprobs, old_logprobs, advantages, mask), params)


@deviation_of(policy_loss)
def pl_clip_ignored(logprobs, old_logprobs, advantages, mask, **params):
    """Ignore the clip that was given: −A·r."""
    ratio, A = _log_ratio(logprobs, old_logprobs, mask, params).exp(), select(advantages.detach(), mask)
    terms = _dual(_branches(ratio, A, params)[0], A, params)
    return _with_terms(terms, (logprobs, old_logprobs, advantages, mask), params)


@deviation_of(policy_loss)
def pl_clipped_only(logprobs, old_logprobs, advantages, mask, **params):
    """Use the clipped branch alone: −A·clip(r), without the maximum."""
    ratio, A = _log_ratio(logprobs, old_logprobs, mask, params).exp(), select(advantages.detach(), mask)
    terms = _dual(_branches(ratio, A, params)[1], A, params)
    return _with_terms(terms, (logprobs, old_logprobs, advantages, mask), params)


@deviation_of(policy_loss)
def pl_clip_high_ignored(*inputs, **params):
    """Clip above at 1 + clip_low although clip_high was given."""
    return policy_loss(*inputs, **{**params, "clip_high": params["clip_low"]})


@deviation_of(policy_loss)
def pl_clip_bounds_swapped(*inputs, **params):
    """Exchange the two widths: clip to [1 − clip_high, 1 + clip_low]."""
    swapped = {"clip_low": params["clip_high"], "clip_high": params["clip_low"]}
    return policy_loss(*inputs, **{**params, **swapped})


@deviation_of(policy_loss)
def pl_dual_clip_ignored(*inputs, **params):
    """Ignore the dual clip that was given."""
    return policy_loss(*inputs, **{**params, "dual_clip": None})


@deviation_of(policy_loss)
def pl_dual_clip_for_every_sign(logprobs, old_logprobs, advantages, mask, **params):
    """Apply the dual clip to A > 0 as well: min(loss, −dual_clip·A) at every token."""
    inputs = (logprobs, old_logprobs, advantages, mask)
    if params["dual_clip"] is None:
        return policy_loss(*inputs, **params)
    ratio, A = _log_ratio(logprobs, old_logprobs, mask, params).exp(), select(advantages.detach(), mask)
    terms = torch.minimum(torch.maximum(*_branches(ratio, A, params)), -params["dual_clip"] * A)
    return _with_terms(terms, inputs, params)


@deviation_of(policy_loss)
def pl_dual_clip_by_maximum(logprobs, old_logprobs, advantages, mask, **params):
    """Take max(loss, −dual_clip·A) where A < 0: the bound raises the loss that it should limit."""
    inputs = (logprobs, old_logprobs, advantages, mask)
    if params["dual_clip"] is None:
        return policy_loss(*inputs, **params)
    ratio, A = _log_ratio(logprobs, old_logprobs, mask, params).exp(), select(advantages.detach(), mask)
    terms = torch.maximum(*_branches(ratio, A, params))
    terms = torch.where(A < 0, torch.maximum(terms, -params["dual_clip"] * A), terms)
    return _with_terms(terms, inputs, params)


@deviation_of(policy_loss)
def pl_advantage_whitened_in_one_branch(logprobs, old_logprobs, advantages, mask, **params):
    """Whiten the advantages of the clipped branch only: max(−A·r, −whiten(A)·clip(r))."""
    ratio, A = _log_ratio(logprobs, old_logprobs, mask, params).exp(), select(advantages.detach(), mask)
    plain, clipped = _branches(ratio, A, params)[0], _branches(ratio, whiten(A, mask), params)[1]
    terms = _dual(torch.maximum(plain, clipped), A, params)
    return _with_terms(terms, (logprobs, old_logprobs, advantages, mask), params)


@deviation_of(policy_loss)
def pl_advantages_one_late(logprobs, old_logprobs, advantages, mask, **params):
    """Give each token the advantage of the position before it, and the first position 0."""
    return policy_loss(logprobs, old_logprobs, late(select(advantages, mask), fill=0.0), mask, **params)


@deviation_of(policy_loss)
def pl_mask_ignored(logprobs, old_logprobs, advantages, mask, **params):
    """Count every slot, padding included."""
    return policy_loss(logprobs, old_logprobs, advantages, everywhere(mask), **params)


@deviation_of(policy_loss)
def pl_mask_in_numerator_only(logprobs, old_logprobs, advantages, mask, **params):
    """Sum the loss over the tokens but divide by the number of all slots."""
    inputs = (logprobs, old_logprobs, advantages, mask)
    ratio = _log_ratio(logprobs, old_logprobs, mask, params).exp()
    terms = _terms(ratio, select(advantages.detach(), mask), params)
    loss = _reductions.numerator_only(terms, mask, **_how(params))
    return policy_loss(*inputs, **params)._replace(loss=loss)


@deviation_of(policy_loss)
def pl_mask_in_denominator_only(logprobs, old_logprobs, advantages, mask, **params):
    """Sum the loss over all slots but divide by the number of tokens."""
    inputs = (logprobs, old_logprobs, advantages, mask)
    terms = _unmasked_terms(*inputs[:3], params)
    loss = _reductions.denominator_only(terms, mask, **_how(params))
    return policy_loss(*inputs, **params)._replace(loss=loss)


@deviation_of(policy_loss)
def pl_holes_counted(logprobs, old_logprobs, advantages, mask, **params):
    """Train on the holes of the mask (tool output): every slot between first and last token counts."""
    return policy_loss(logprobs, old_logprobs, advantages, span(mask), **params)


@deviation_of(policy_loss)
def pl_last_token_dropped(logprobs, old_logprobs, advantages, mask, **params):
    """Leave out each row's last token, as when the end token counts as padding."""
    return policy_loss(logprobs, old_logprobs, advantages, mask & ~last(mask), **params)


@deviation_of(policy_loss)
def pl_first_token_dropped(logprobs, old_logprobs, advantages, mask, **params):
    """Leave out each row's first token."""
    return policy_loss(logprobs, old_logprobs, advantages, mask & ~first(mask), **params)


@deviation_of(policy_loss)
def pl_mask_one_late(logprobs, old_logprobs, advantages, mask, **params):
    """Read the mask of the position before: a row loses its first token and gains the slot after its last."""
    return policy_loss(logprobs, old_logprobs, advantages, late(mask, fill=False), **params)


@deviation_of(policy_loss)
def pl_sum_norm_without_row_mean(logprobs, old_logprobs, advantages, mask, **params):
    """Leave out the mean over rows of seq_mean_token_sum_norm: Σ loss / horizon."""
    inputs = (logprobs, old_logprobs, advantages, mask)
    if params["aggregation"] != "seq_mean_token_sum_norm":
        return policy_loss(*inputs, **params)
    total = policy_loss(*inputs, **{**params, "aggregation": "token_sum"})
    return total._replace(loss=total.loss / params["horizon"])


@deviation_of(policy_loss)
def pl_horizon_is_width(*inputs, **params):
    """Divide by the width T of the padded batch in place of the constant horizon."""
    return policy_loss(*inputs, **{**params, "horizon": inputs[0].shape[1]})


@deviation_of(policy_loss)
def pl_mask_multiplied(logprobs, old_logprobs, advantages, mask, **params):
    """Take exp at every slot and multiply by the mask afterwards: inf·0 is NaN for the whole loss."""
    inputs = (logprobs, old_logprobs, advantages, mask)
    terms = _unmasked_terms(*inputs[:3], params)
    loss = _reductions.multiplied(terms, mask, **_how(params))
    return policy_loss(*inputs, **params)._replace(loss=loss)


@deviation_of(policy_loss)
def pl_selected_after_exp(logprobs, old_logprobs, advantages, mask, **params):
    """Select by the mask only after exp: the loss is right, but its gradient is NaN where exp overflowed."""
    inputs = (logprobs, old_logprobs, advantages, mask)
    return _with_terms(select(_unmasked_terms(*inputs[:3], params), mask), inputs, params)


@deviation_of(policy_loss)
def pl_gradient_dead(logprobs, *others, **params):
    """Cut the graph: the right value without a gradient."""
    return policy_loss(logprobs.detach(), *others, **params)


@deviation_of(policy_loss)
def pl_empty_batch_detached(logprobs, old_logprobs, advantages, mask, **params):
    """Return a constant 0 without a graph for a batch without tokens."""
    if mask.any():
        return policy_loss(logprobs, old_logprobs, advantages, mask, **params)
    return PolicyLoss(*(torch.zeros((), dtype=logprobs.dtype, device=logprobs.device) for _ in range(3)))


@deviation_of(policy_loss)
def pl_old_logprobs_not_detached(logprobs, old_logprobs, advantages, mask, **params):
    """Let the gradient reach the old log-probabilities as well."""
    ratio = _clamped(select(logprobs - old_logprobs, mask), params).exp()
    terms = _terms(ratio, select(advantages.detach(), mask), params)
    return _with_terms(terms, (logprobs, old_logprobs, advantages, mask), params)


@deviation_of(policy_loss)
def pl_advantages_not_detached(logprobs, old_logprobs, advantages, mask, **params):
    """Let the gradient reach the advantages, and through them the critic."""
    ratio = _log_ratio(logprobs, old_logprobs, mask, params).exp()
    terms = _terms(ratio, select(advantages, mask), params)
    return _with_terms(terms, (logprobs, old_logprobs, advantages, mask), params)


@deviation_of(policy_loss)
def pl_approx_kl_minus_ratio(logprobs, old_logprobs, advantages, mask, **params):
    """Report the mean of −r as the KL: −1 for an unchanged policy."""
    right = policy_loss(logprobs, old_logprobs, advantages, mask, **params)
    d = _log_ratio(logprobs, old_logprobs, mask, params)
    return right._replace(approx_kl=aggregate(-d.exp(), mask))


@deviation_of(policy_loss)
def pl_approx_kl_over_padding(*inputs, **params):
    """Average the KL over all slots, where padding adds 0 to the sum and 1 to the count."""
    right = policy_loss(*inputs, **params)
    return right._replace(approx_kl=right.approx_kl * inputs[3].to(inputs[0].dtype).mean())


@deviation_of(policy_loss)
def pl_metrics_over_padding(logprobs, old_logprobs, advantages, mask, **params):
    """Average both metrics over all slots, the numbers that padding holds included."""
    right = policy_loss(logprobs, old_logprobs, advantages, mask, **params)
    every = policy_loss(logprobs, old_logprobs, advantages, torch.ones_like(mask), **params)
    return right._replace(approx_kl=every.approx_kl, clip_fraction=every.clip_fraction)


@deviation_of(policy_loss)
def pl_approx_kl_k2_half_missing(*inputs, **params):
    """Leave the factor ½ out of k2: the mean of d²."""
    right = policy_loss(*inputs, **params)
    return right._replace(approx_kl=2 * right.approx_kl) if params["approx_kl"] == "k2" else right


@deviation_of(policy_loss)
def pl_approx_kl_k3_direction_swapped(logprobs, old_logprobs, advantages, mask, **params):
    """Form k3 with d = ℓ_old − ℓ: exp(d) − 1 − d of the opposite log-ratio."""
    right = policy_loss(logprobs, old_logprobs, advantages, mask, **params)
    if params["approx_kl"] != "k3":
        return right
    d = -_log_ratio(logprobs, old_logprobs, mask, params)
    return right._replace(approx_kl=aggregate(d.exp() - 1 - d, mask))


@deviation_of(policy_loss)
def pl_clip_fraction_is_mean_ratio(logprobs, old_logprobs, advantages, mask, **params):
    """Report the mean of the clipped ratio as the clip fraction."""
    ratio = _log_ratio(logprobs, old_logprobs, mask, params).exp()
    clipped = ratio.clamp(1 - params["clip_low"], 1 + params["clip_high"])
    right = policy_loss(logprobs, old_logprobs, advantages, mask, **params)
    return right._replace(clip_fraction=aggregate(clipped, mask))


@deviation_of(policy_loss)
def pl_clip_fraction_over_padding(*inputs, **params):
    """Divide the number of clipped tokens by the number of all slots."""
    right = policy_loss(*inputs, **params)
    return right._replace(clip_fraction=right.clip_fraction * inputs[3].to(inputs[0].dtype).mean())
