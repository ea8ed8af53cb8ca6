"""Known mistakes in the per-token estimate of the KL divergence from the reference model."""

import torch

from goldenppo.reference import kl_penalty
from goldenppo.reference.deviations._common import deviation_of


@deviation_of(kl_penalty)
def kl_sign(logprobs, ref_logprobs, *, estimator, clamp):
    """Return the estimate with the opposite sign."""
    return -kl_penalty(logprobs, ref_logprobs, estimator=estimator, clamp=clamp)


@deviation_of(kl_penalty)
def kl_k3_direction_swapped(logprobs, ref_logprobs, *, estimator, clamp):
    """Form k3 with d = ℓ − ℓ_ref in place of ℓ_ref − ℓ: exp(x) − 1 − x, x = ℓ − ℓ_ref."""
    inputs = (ref_logprobs, logprobs) if estimator == "k3" else (logprobs, ref_logprobs)
    return kl_penalty(*inputs, estimator=estimator, clamp=clamp)


@deviation_of(kl_penalty)
def kl_k3_swapped_and_guarded(logprobs, ref_logprobs, *, estimator, clamp):
    """Form k3 with d = ℓ − ℓ_ref and put 1 for exp(d) where d >= 10, which makes the estimate −d there."""
    if estimator != "k3":
        return kl_penalty(logprobs, ref_logprobs, estimator=estimator, clamp=clamp)
    d = logprobs - ref_logprobs
    kl = d.where(d < 10, 0.0).exp() - 1 - d
    return kl if clamp == "none" else kl.clamp(-10.0, 10.0)


@deviation_of(kl_penalty)
def kl_k3_linear_term_missing(logprobs, ref_logprobs, *, estimator, clamp):
    """Leave the linear term out of k3: exp(−x) − 1."""
    if estimator != "k3":
        return kl_penalty(logprobs, ref_logprobs, estimator=estimator, clamp=clamp)
    kl = torch.expm1(ref_logprobs - logprobs)
    return kl if clamp == "none" else kl.clamp(-10.0, 10.0)


@deviation_of(kl_penalty)
def kl_k2_half_missing(logprobs, ref_logprobs, *, estimator, clamp):
    """Leave the factor ½ out of k2: x²."""
    if estimator != "k2":
        return kl_penalty(logprobs, ref_logprobs, estimator=estimator, clamp=clamp)
    kl = (logprobs - ref_logprobs).square()
    return kl if clamp == "none" else kl.clamp(-10.0, 10.0)


@deviation_of(kl_penalty)
def kl_against_itself(logprobs, ref_logprobs, *, estimator, clamp):
    """Compare the policy with itself: 0 at every token."""
    return kl_penalty(logprobs, logprobs, estimator=estimator, clamp=clamp)


@deviation_of(kl_penalty)
def kl_probability_ratio(logprobs, ref_logprobs, *, estimator, clamp):
    """Return a ratio of probabilities where a difference is meant: exp(ℓ − ℓ_ref), 1 for equal models."""
    kl = (logprobs - ref_logprobs).exp()
    return kl if clamp == "none" else kl.clamp(-10.0, 10.0)


@deviation_of(kl_penalty)
def kl_probability_difference(logprobs, ref_logprobs, *, estimator, clamp):
    """Subtract probabilities in place of their logarithms: exp(ℓ) − exp(ℓ_ref)."""
    return logprobs.exp() - ref_logprobs.exp()


@deviation_of(kl_penalty)
def kl_weighted_by_probability(logprobs, ref_logprobs, *, estimator, clamp):
    """Weigh the estimate with the token's probability, as in a sum over the vocabulary: exp(ℓ)·kl.

    The token was sampled, so the weight is already in the sampling.
    """
    return logprobs.exp() * kl_penalty(logprobs, ref_logprobs, estimator=estimator, clamp=clamp)


@deviation_of(kl_penalty)
def kl_negative_cut(logprobs, ref_logprobs, *, estimator, clamp):
    """Cut negative estimates to 0, which makes the mean of k1 too large."""
    return kl_penalty(logprobs, ref_logprobs, estimator=estimator, clamp=clamp).clamp(min=0.0)
