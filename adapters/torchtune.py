"""torchtune: its own torchtune.rlhf functions.

Its recipe zeroes values and rewards at padding before it estimates advantages (recipes/ppo_full_finetune_single_device.py,
estimate_trajectory), so zeros stand at masked slots here too.
"""

from importlib import metadata

from goldenppo.adapters import Unsupported

try:
    import torch
    from torchtune import rlhf
    from torchtune.rlhf import loss as losses
except ImportError as missing:
    raise Unsupported(
        f"torchtune is not importable here ({missing}); pip install torchtune==0.6.1 torchao==0.9.0, "
        "or name an environment that has it: --python ENV/bin/python"
    ) from None

NAME = "torchtune"
VERSION = metadata.version("torchtune")
KNOWN_VERSIONS = ["0.6.1"]
SOURCES = {
    "token_logprobs": ["torchtune.rlhf:logits_to_logprobs", "torchtune.rlhf:truncate_sequence_for_logprobs"],
    "policy_loss": "torchtune.rlhf.loss:PPOLoss.forward",
    "value_loss": "torchtune.rlhf.loss:PPOLoss.forward",
    "shaped_rewards": "torchtune.rlhf:get_rewards_ppo",
    "kl_penalty": "torchtune.rlhf:get_rewards_ppo",
    "gae": "torchtune.rlhf:estimate_advantages",
    "whiten": "torchtune.rlhf:whiten",
    "aggregate": "torchtune.rlhf:masked_mean",
}


def token_logprobs(logits, tokens, *, temperature):
    response = rlhf.truncate_sequence_for_logprobs(logits, 1)  # one prompt token: all but the last position
    return rlhf.logits_to_logprobs(response, tokens[:, 1:], temperature)


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip):
    blank = torch.zeros_like(advantages)
    # The parts come back detached; the total has the graph, and with a coefficient of 0 it is the policy's part.
    loss, _, _, _, fraction = losses.PPOLoss(epsilon=clip, value_coeff=0.0)(
        old_logprobs, logprobs, advantages, blank, blank, blank, padding_masks=mask, value_padding_masks=mask
    )
    return {"loss": loss, "clip_fraction": fraction}


def value_loss(values, old_values, returns, mask, *, clip):
    blank = torch.zeros_like(values)
    # With advantages of 0 the total is the critic's part.
    loss, *_ = losses.PPOLoss(value_clip_range=clip, value_coeff=1.0)(
        blank, blank, blank, old_values, values, returns, padding_masks=mask, value_padding_masks=mask
    )
    return {"loss": loss}


def kl_penalty(logprobs, ref_logprobs):
    _, kl, _ = rlhf.get_rewards_ppo(torch.zeros_like(logprobs[:, 0]), logprobs, ref_logprobs, 1.0)
    return kl


def shaped_rewards(logprobs, ref_logprobs, scores, mask, *, kl_coef):
    """The recipe scores the position after the last token where there is one, and zeroes log-probs from there on."""
    lengths = _lengths(mask)
    slot = torch.where(lengths < mask.shape[1], lengths, lengths - 1)
    # ppo_full_finetune_single_device.py, generate_trajectory: log-probs of padding are filled with 1.0 on both sides
    logprobs, ref_logprobs = logprobs.masked_fill(~mask, 1.0), ref_logprobs.masked_fill(~mask, 1.0)
    rewards, _, _ = rlhf.get_rewards_ppo(scores, logprobs, ref_logprobs, kl_coef, slot)
    return rewards


def gae(rewards, values, mask, *, gamma, lam):
    _lengths(mask)
    advantages, returns = rlhf.estimate_advantages(
        values.masked_fill(~mask, 0.0), rewards.masked_fill(~mask, 0.0), gamma, lam, masks=mask
    )
    return {"advantages": advantages, "returns": returns}


def whiten(x, mask, *, mean):
    # The opposite sense of TRL's flag: here shift_mean=True adds the mean back.
    return rlhf.whiten(x, mask, shift_mean=mean == "kept")


def aggregate(x, mask):
    return rlhf.masked_mean(x, mask)


def _lengths(mask):
    """The length of each response; the recipe knows no other masks than right padding."""
    lengths = mask.sum(1)
    if bool((lengths == 0).any()) or not bool((mask.long().diff(dim=1) <= 0).all()):
        raise Unsupported("the recipe knows right-padded responses with at least one token only")
    return lengths
