"""Per-token estimate of the KL divergence from the reference model."""

from goldenppo.reference.checks import one_of, same_shape, wide


def kl_penalty(logprobs, ref_logprobs, *, estimator="k1", clamp="none"):
    """Estimates KL(policy ‖ reference) at each token from the sampled token alone.

    With x = ℓ − ℓ_ref:  k1 = x,  abs = |x|,  k2 = ½x²,  k3 = exp(−x) − 1 + x.

    Args:
        logprobs: log-probabilities under the policy, float [B, T].
        ref_logprobs: log-probabilities under the frozen reference model, float [B, T].
        estimator: "k1", "abs", "k2" or "k3".
        clamp: "none", or 10 to clamp the estimate to [−10, 10].

    Returns:
        Estimates [B, T].

    Raises:
        ValueError: shapes differ, or an axis has no such value.

    Source: J. Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html); Ziegler et al. 2019 (arXiv:1909.08593)
    equation 2 for k1 in the reward.
    """
    same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    one_of("estimator", estimator, ("k1", "abs", "k2", "k3"))
    one_of("clamp", clamp, ("none", 10))
    x = wide(logprobs) - wide(ref_logprobs)
    if estimator == "k3":
        kl = (-x).exp() - 1 + x
    else:
        kl = {"k1": x, "abs": x.abs(), "k2": 0.5 * x * x}[estimator]  # KL-1
    return kl if clamp == "none" else kl.clamp(-clamp, clamp)
