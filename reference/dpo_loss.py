"""Direct preference optimisation loss."""

from torch.nn.functional import logsigmoid

from goldenppo.reference.checks import same_shape, wide


def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta, label_smoothing=None):
    """Computes the DPO loss of pairs from summed log-probabilities.

        Δ_b = (π_c − π_r) − (ref_c − ref_r)
        L = mean_b [ (1 − ε)·softplus(−βΔ_b) + ε·softplus(βΔ_b) ]

    Args:
        policy_chosen, policy_rejected: log-probability of each response under the policy, float [B].
        ref_chosen, ref_rejected: the same under the reference model, float [B]; no gradient reaches them.
        beta: strength of the preference.
        label_smoothing: probability ε that a label is wrong, or None for 0.

    Returns:
        A 0-d tensor, differentiable in the policy's log-probabilities.

    Raises:
        ValueError: shapes differ.

    Source: Rafailov et al. 2023 (arXiv:2305.18290) equation 7; smoothing: Mitchell 2023, note on conservative DPO.
    """
    same_shape(policy_chosen=policy_chosen, policy_rejected=policy_rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    gain = wide(policy_chosen) - wide(policy_rejected)
    delta = beta * (gain - (wide(ref_chosen) - wide(ref_rejected)).detach())
    loss = -logsigmoid(delta)  # DPO-1
    if label_smoothing is not None:
        loss = (1 - label_smoothing) * loss - label_smoothing * logsigmoid(-delta)
    return loss.mean()
