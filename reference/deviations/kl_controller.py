"""Known mistakes in the controller of the KL coefficient."""

import torch

from goldenppo.reference import kl_controller
from goldenppo.reference.deviations._common import deviation_of


def _stepped(kl, params, growth):
    """Return the coefficient after each step, multiplied by growth(kl_s) each time, [S]."""
    if params["controller"] == "fixed":
        return kl_controller(kl, **params)
    coef, result = params["init_coef"], []
    for observed in kl:
        coef = coef * growth(observed)
        result.append(coef)
    return torch.stack(result)


def _rate(params):
    return params["batch_size"] / params["horizon"]


def _error(observed, params):
    return (observed / params["target"] - 1).clamp(-0.2, 0.2)


@deviation_of(kl_controller)
def kc_sign(kl, **params):
    """Lower the coefficient where the KL is above the target."""
    return _stepped(kl, params, lambda x: 1 - _error(x, params) * _rate(params))


@deviation_of(kl_controller)
def kc_clip_missing(kl, **params):
    """Leave out the bound of ±0.2 on the relative error."""
    return _stepped(kl, params, lambda x: 1 + (x / params["target"] - 1) * _rate(params))


@deviation_of(kl_controller)
def kc_error_not_relative(kl, **params):
    """Use the difference KL − target in place of KL/target − 1."""
    return _stepped(kl, params, lambda x: 1 + (x - params["target"]).clamp(-0.2, 0.2) * _rate(params))


@deviation_of(kl_controller)
def kc_batch_size_missing(kl, **params):
    """Count updates in place of samples: the step is 1/horizon whatever the batch size."""
    return _stepped(kl, params, lambda x: 1 + _error(x, params) / params["horizon"])


@deviation_of(kl_controller)
def kc_horizon_missing(kl, **params):
    """Leave out the horizon and the batch size: the whole bounded error acts in one step."""
    return _stepped(kl, params, lambda x: 1 + _error(x, params))


@deviation_of(kl_controller)
def kc_horizon_inverted(kl, **params):
    """Divide by the batch size and multiply by the horizon."""
    return _stepped(kl, params, lambda x: 1 + _error(x, params) / _rate(params))


@deviation_of(kl_controller)
def kc_additive(kl, **params):
    """Add the correction to the coefficient in place of multiplying with it."""
    if params["controller"] == "fixed":
        return kl_controller(kl, **params)
    return params["init_coef"] + (_error(kl, params) * _rate(params)).cumsum(0)


@deviation_of(kl_controller)
def kc_restarts_from_init(kl, **params):
    """Apply each correction to the initial coefficient in place of the last one."""
    if params["controller"] == "fixed":
        return kl_controller(kl, **params)
    return params["init_coef"] * (1 + _error(kl, params) * _rate(params))


@deviation_of(kl_controller)
def kc_one_step_late(kl, **params):
    """Answer each observation one step late: the coefficient after a step knows only the steps before."""
    after = kl_controller(kl, **params)
    return torch.cat([torch.full_like(after[:1], params["init_coef"]), after[:-1]])
