"""stable-baselines3: its own PPO.train() and RolloutBuffer, with a policy that answers with the arrays of a case.

The arithmetic of the losses stands inside train(). So train() runs over one batch, its own backward pass and clipping of
the gradient's norm included, and is read where it calls optimizer.step(). There are no masks here: a buffer holds
transitions, one episode behind the other, so the tokens that count become such a stream. What a buffer holds is float32.
"""

import contextlib
import math
import sys
from importlib import metadata
from types import SimpleNamespace

from goldenppo.adapters import Unsupported, window

try:
    import numpy
    import torch
    from gymnasium import spaces
    from stable_baselines3.common import buffers, distributions
    from stable_baselines3.ppo import ppo
except ImportError as missing:
    raise Unsupported(
        f"stable-baselines3 is not importable here ({missing}); pip install stable-baselines3==2.9.2, "
        "or name an environment that has it: --python ENV/bin/python"
    ) from None

NAME = "stable-baselines3"
VERSION = metadata.version("stable-baselines3")
KNOWN_VERSIONS = ["2.9.2"]
_TRAIN = "stable_baselines3.ppo.ppo:PPO.train"
_CATEGORICAL = "stable_baselines3.common.distributions:CategoricalDistribution"
_BUFFER = "stable_baselines3.common.buffers:RolloutBuffer"
SOURCES = {
    "token_logprobs": f"{_CATEGORICAL}.log_prob",
    "entropy": f"{_CATEGORICAL}.entropy",
    "ratio": [_TRAIN, f"{_BUFFER}._get_samples"],
    "policy_loss": [_TRAIN, f"{_BUFFER}._get_samples"],
    "value_loss": [_TRAIN, f"{_BUFFER}._get_samples"],
    "gae": f"{_BUFFER}.compute_returns_and_advantage",
    "whiten": [_TRAIN, f"{_BUFFER}._get_samples"],
}


def token_logprobs(logits, tokens, *, temperature):
    return _categorical(logits[:, :-1], temperature).log_prob(tokens[:, 1:])


def entropy(logits, *, temperature):
    return _categorical(logits, temperature).entropy()


def ratio(logprobs, old_logprobs, mask):
    seen = _train(mask, logprobs=logprobs, log_probs=old_logprobs)
    return _in_place(seen["ratio"], mask)


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip):
    seen = _train(mask, logprobs=logprobs, log_probs=old_logprobs, advantages=advantages, clip_range=lambda _: clip)
    return {
        "loss": seen["policy_loss"],
        "clip_fraction": seen["clip_fraction"],
        "approx_kl": seen["approx_kl_div"],
        "grad_logprobs": _in_place(seen["log_prob"].grad, mask),
    }


def value_loss(values, old_values, returns, mask, *, clip=None):
    clip_range = None if clip is None else lambda _: clip
    seen = _train(mask, new_values=values, values=old_values, returns=returns, vf_coef=1.0, clip_range_vf=clip_range)
    return {"loss": seen["value_loss"], "grad_values": _in_place(seen["values"].grad, mask)}


def whiten(x, mask):
    return _in_place(_train(mask, advantages=x, normalize_advantage=True)["advantages"], mask)


def gae(rewards, values, mask, *, gamma, lam):
    count = mask.cumsum(1)
    if bool((mask[:, 1:] & ~mask[:, :-1] & (count[:, :-1] > 0)).any()):
        raise Unsupported("an episode has no gaps: its transitions follow each other")
    buffer = _buffer(mask, rewards=rewards, values=values, gamma=gamma, gae_lambda=lam)
    buffer.episode_starts[:, 0] = (count == 1)[mask].cpu()
    after_the_last = torch.full((1,), window.POISON)
    buffer.compute_returns_and_advantage(after_the_last, numpy.ones(1, dtype=bool))
    found = {"advantages": buffer.advantages, "returns": buffer.returns}
    return {name: _in_place(torch.from_numpy(stream[:, 0]).to(mask.device), mask) for name, stream in found.items()}


def _categorical(logits, temperature):
    if temperature != 1:
        raise Unsupported("stable-baselines3 has no temperature")
    return distributions.CategoricalDistribution(logits.shape[-1]).proba_distribution(logits)


def _in_place(stream, mask):
    """[B, T]: the stream's numbers where the mask counts, 0 elsewhere."""
    return stream.new_zeros(mask.shape).masked_scatter(mask, stream.detach())


def _buffer(mask, gamma=0.99, gae_lambda=1.0, **arrays):
    """A rollout buffer of one environment whose transitions are the tokens that count, row behind row."""
    size = int(mask.sum())
    if size == 0:
        raise Unsupported("a rollout buffer holds at least one transition")
    nothing = spaces.Box(-1.0, 1.0, (1,))
    buffer = buffers.RolloutBuffer(size, nothing, nothing, device=mask.device, gae_lambda=gae_lambda, gamma=gamma)
    for name, array in arrays.items():
        getattr(buffer, name)[:, 0] = array.detach()[mask].float().cpu()
    return buffer


class _Stop(BaseException):
    """Leaves train() once its frame has been read."""


def _train(mask, logprobs=None, new_values=None, vf_coef=0.0, clip_range=lambda _: 0.2, clip_range_vf=None, **arrays) -> dict:
    """The local variables of train() at its first optimizer.step(), for one batch.

    Args:
        mask: [B, T], the tokens that count.
        logprobs: [B, T] log-probs, the policy's answer; 0 if not given.
        new_values: [B, T] values, the critic's answer; 0 if not given.
        vf_coef: weight of the critic in the loss whose gradient is formed.
        clip_range: the clip of the ratio as train() has it, a function of the progress.
        clip_range_vf: the clip of the critic, likewise, or None.
        **arrays: what the rollout buffer holds, and normalize_advantage.
    """
    normalize = arrays.pop("normalize_advantage", False)
    batch = _buffer(mask, **arrays)._get_samples(numpy.arange(int(mask.sum())))  # get() shuffles first
    zero = torch.zeros_like(batch.advantages)
    leaves = [zero if answer is None else answer.detach()[mask] for answer in (logprobs, new_values)]
    log_prob, values = (leaf.clone().requires_grad_(True) for leaf in leaves)
    seen: dict = {}

    def read():
        seen.update(sys._getframe(1).f_locals)
        raise _Stop

    trainer = object.__new__(ppo.PPO)
    vars(trainer).update(
        policy=SimpleNamespace(
            evaluate_actions=lambda *_: (values, log_prob, zero),
            parameters=lambda: [log_prob, values],
            optimizer=SimpleNamespace(zero_grad=lambda: None, step=read),
            set_training_mode=lambda _: None,
        ),
        rollout_buffer=SimpleNamespace(get=lambda _: [batch]),
        action_space=spaces.Box(-1.0, 1.0, (1,)),
        _update_learning_rate=lambda _: None,
        _current_progress_remaining=1.0,
        batch_size=None,
        n_epochs=1,
        normalize_advantage=normalize,
        clip_range=clip_range,
        clip_range_vf=clip_range_vf,
        target_kl=None,
        ent_coef=0.0,
        vf_coef=vf_coef,
        max_grad_norm=math.inf,
    )
    with contextlib.suppress(_Stop):
        trainer.train()
    return seen
