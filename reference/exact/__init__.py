"""The exact oracle: every op from its definition, in numbers that carry value, error bound and range.

A function takes plain nested lists and the keywords of the op table, and returns a dict: each output, nested
lists of `Number` with None where nothing is compared, and "grad_<input>" for each input that the gradient is
an answer for.
"""

from goldenppo.reference.exact.aggregate import aggregate
from goldenppo.reference.exact.dpo_loss import dpo_loss
from goldenppo.reference.exact.end_score import end_score
from goldenppo.reference.exact.entropy import entropy
from goldenppo.reference.exact.experience import experience
from goldenppo.reference.exact.gae import gae
from goldenppo.reference.exact.kl_controller import kl_controller
from goldenppo.reference.exact.kl_penalty import kl_penalty
from goldenppo.reference.exact.number import Number, kinks, span, to_float
from goldenppo.reference.exact.policy_loss import policy_loss
from goldenppo.reference.exact.ratio import ratio
from goldenppo.reference.exact.reward_model_loss import reward_model_loss
from goldenppo.reference.exact.reward_model_token_loss import reward_model_token_loss
from goldenppo.reference.exact.shaped_rewards import shaped_rewards
from goldenppo.reference.exact.token_logprobs import token_logprobs
from goldenppo.reference.exact.total_loss import total_loss
from goldenppo.reference.exact.value_loss import value_loss
from goldenppo.reference.exact.whiten import whiten

__all__ = [
    "Number",
    "aggregate",
    "dpo_loss",
    "end_score",
    "entropy",
    "experience",
    "gae",
    "kinks",
    "kl_controller",
    "kl_penalty",
    "policy_loss",
    "ratio",
    "reward_model_loss",
    "reward_model_token_loss",
    "shaped_rewards",
    "span",
    "to_float",
    "token_logprobs",
    "total_loss",
    "value_loss",
    "whiten",
]
