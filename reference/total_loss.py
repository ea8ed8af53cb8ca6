"""Weighted sum of policy, value, entropy and KL terms."""


def total_loss(policy_loss, value_loss, entropy, kl_loss, *, vf_coef, entropy_coef, kl_loss_coef):
    """Adds up what one update minimises.

        L = policy_loss + vf_coef·value_loss − entropy_coef·entropy + kl_loss_coef·kl_loss

    The entropy is a bonus and is subtracted; the KL is a cost and is added.

    Args:
        policy_loss, value_loss, entropy, kl_loss: 0-d float tensors.
        vf_coef, entropy_coef, kl_loss_coef: their weights.

    Returns:
        A 0-d tensor, differentiable in all four.

    Source: Schulman et al. 2017 (arXiv:1707.06347) equation 9; the KL term: Shao et al. 2024 (arXiv:2402.03300) equation 3.
    """
    return policy_loss + vf_coef * value_loss - entropy_coef * entropy + kl_loss_coef * kl_loss  # TL-1
