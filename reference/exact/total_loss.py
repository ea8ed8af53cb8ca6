"""Exact weighted sum of the loss terms, with its gradients."""

from __future__ import annotations

from goldenppo.reference.exact.number import ONE, Answer, Real, lift, parameter, total

__all__ = ["total_loss"]


def total_loss(
    policy_loss: Real,
    value_loss: Real,
    entropy: Real,
    kl_loss: Real,
    *,
    vf_coef: Real,
    entropy_coef: Real,
    kl_loss_coef: Real,
) -> Answer:
    """Return the weighted sum of the four terms, and its four derivatives.

    loss = policy_loss + vf_coef·value_loss − entropy_coef·entropy + kl_loss_coef·kl_loss.

    Args:
        policy_loss, value_loss, entropy, kl_loss: floats.
        vf_coef, entropy_coef, kl_loss_coef: parameters.

    Returns:
        {"loss", "grad_policy_loss", "grad_value_loss", "grad_entropy", "grad_kl_loss": Number}.
    """
    terms = (policy_loss, value_loss, entropy, kl_loss)
    factors = (ONE, parameter(vf_coef), -parameter(entropy_coef), parameter(kl_loss_coef))
    gradients = zip(("policy_loss", "value_loss", "entropy", "kl_loss"), factors, strict=True)
    weighted = [lift(policy_loss), *(f * lift(x) for f, x in zip(factors[1:], terms[1:], strict=True))]
    return {"loss": total(weighted), **{f"grad_{name}": factor for name, factor in gradients}}
