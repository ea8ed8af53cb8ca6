"""Pairwise reward-model loss."""

from torch.nn.functional import logsigmoid

from goldenppo.reference.checks import same_shape, wide


def reward_model_loss(chosen, rejected, *, margin=None):
    """Computes the Bradley–Terry loss of scored pairs.

        L = mean_b softplus(rejected_b + margin_b − chosen_b) = mean_b −log σ(chosen_b − rejected_b − margin_b)

    Args:
        chosen, rejected: scores of the preferred and of the other response, float [B].
        margin: by how much the preferred one has to win, float [B], or None for 0.

    Returns:
        A 0-d tensor, differentiable in both scores.

    Raises:
        ValueError: shapes differ: a margin of another shape would broadcast to pairs that nobody compared.

    Source: Bradley and Terry 1952; Stiennon et al. 2020 (arXiv:2009.01325) section 3.4; the margin: Touvron et al. 2023
    (arXiv:2307.09288) equation 2.
    """
    same_shape(chosen=chosen, rejected=rejected, **({} if margin is None else {"margin": margin}))
    ahead = wide(chosen) - wide(rejected)
    # −logsigmoid is the softplus that overflows on neither side; log(1 + exp(x)) does from x = 89 in float32.
    return -logsigmoid(ahead if margin is None else ahead - wide(margin)).mean()  # RM-1
