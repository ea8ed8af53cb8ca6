"""polgrad's policy-gradient reference as an adapter: it was written elsewhere, from the papers."""

import polgrad
import torch
from polgrad.advantages import GAEConfig
from polgrad.aggregate import Aggregation
from polgrad.kl import KLEstimator, kl_estimate
from polgrad.losses import ClipConfig, PolicyLossConfig, RatioKind, SurrogateKind

from goldenppo.adapters import Unsupported

NAME = "polgrad"
VERSION = polgrad.__version__
AGGREGATIONS = {
    "token_mean": Aggregation.TOKEN_MEAN,
    "seq_mean_token_mean": Aggregation.SEQ_MEAN_TOKEN_MEAN,
    "seq_mean_token_sum": Aggregation.SEQ_MEAN_TOKEN_SUM,
    "seq_mean_token_sum_norm": Aggregation.TOKEN_SUM_NORM,
}


def policy_loss(
    logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip=None, horizon=None, aggregation="token_mean"
):
    clip = ClipConfig(clip_low, clip_high, dual_clip)
    config = PolicyLossConfig(RatioKind.TOKEN, SurrogateKind.PG_CLIP, clip, *_reduction(mask, aggregation, horizon))
    made = polgrad.policy_loss(config, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, response_mask=mask)
    clipped = (made.clipped_low | made.clipped_high).to(logprobs.dtype)
    fraction = {} if dual_clip else {"clip_fraction": polgrad.aggregate(clipped, mask, Aggregation.TOKEN_MEAN)}
    return {"loss": made.loss, **fraction}


def value_loss(values, old_values, returns, mask, *, clip=None, horizon=None, aggregation="token_mean"):
    mode, length = _reduction(mask, aggregation, horizon)
    made = polgrad.value_loss(values, old_values, returns, mask, clip_eps=clip, aggregation=mode, norm_len=length)
    return {"loss": made.loss, "clip_fraction": made.clipped_frac}


def kl_penalty(logprobs, ref_logprobs, *, estimator):
    everywhere = torch.ones_like(logprobs, dtype=torch.bool)
    return kl_estimate(logprobs, ref_logprobs, KLEstimator(estimator), response_mask=everywhere)


def gae(rewards, values, mask, *, gamma, lam):
    _check_rows(mask)
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise Unsupported("padding stands on the right only")
    advantages, returns = polgrad.gae(rewards, values, config=GAEConfig(gamma, lam), response_mask=mask)
    return {"advantages": advantages, "returns": returns}


def whiten(x, mask, *, mean):
    _check_rows(mask)
    if mask.sum() < 2:
        raise Unsupported("refuses a single token, whose variance is 0/0")
    return polgrad.whiten(x, mask, shift_mean=mean == "removed")


def aggregate(x, mask, *, horizon=None, aggregation):
    mode, length = _reduction(mask, aggregation, horizon)
    return polgrad.aggregate(x, mask, mode, norm_len=length)


def _reduction(mask, aggregation, horizon):
    """The mode and its constant length, where polgrad has them."""
    if aggregation not in AGGREGATIONS:
        raise Unsupported(f"has no {aggregation}")
    _check_rows(mask)
    return AGGREGATIONS[aggregation], horizon


def _check_rows(mask):
    if not mask.any(1).all():
        raise Unsupported("refuses rows without tokens")
