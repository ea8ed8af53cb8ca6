"""The reference: one small pure function per op, in plain torch.

    from goldenppo.reference import gae
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.95)

Shapes: B responses, T response positions, L full-sequence positions, V vocabulary. `mask` is True where a token counts.
Position t of `logprobs`, `values` and `rewards` is the t-th response token; `values[t]` belongs to the state in which token t
is chosen. Losses are minimised. What stands at a position that does not count never matters, NaN included.
"""

from goldenppo.reference.accumulate import accumulated_policy_loss, accumulated_value_loss
from goldenppo.reference.aggregate import aggregate
from goldenppo.reference.dpo_loss import dpo_loss
from goldenppo.reference.end_score import end_score
from goldenppo.reference.entropy import entropy
from goldenppo.reference.experience import Experience, experience
from goldenppo.reference.gae import GAE, gae
from goldenppo.reference.kl_controller import kl_controller
from goldenppo.reference.kl_penalty import kl_penalty
from goldenppo.reference.policy_loss import PolicyLoss, policy_loss
from goldenppo.reference.ratio import ratio
from goldenppo.reference.reward_model_loss import reward_model_loss
from goldenppo.reference.reward_model_token_loss import reward_model_token_loss
from goldenppo.reference.shaped_rewards import shaped_rewards
from goldenppo.reference.token_logprobs import token_logprobs
from goldenppo.reference.total_loss import total_loss
from goldenppo.reference.value_loss import ValueLoss, value_loss
from goldenppo.reference.whiten import whiten

__all__ = [
    "GAE",
    "Experience",
    "PolicyLoss",
    "ValueLoss",
    "accumulated_policy_loss",
    "accumulated_value_loss",
    "aggregate",
    "dpo_loss",
    "end_score",
    "entropy",
    "experience",
    "gae",
    "kl_controller",
    "kl_penalty",
    "policy_loss",
    "ratio",
    "reward_model_loss",
    "reward_model_token_loss",
    "shaped_rewards",
    "token_logprobs",
    "total_loss",
    "value_loss",
    "whiten",
]
