"""Known mistakes in the log-probability of each token."""

import torch

from goldenppo.reference import token_logprobs
from goldenppo.reference.deviations._common import deviation_of


def _gathered(x, tokens):
    """Return x at each token, [B, L, V] and [B, L] to [B, L]."""
    return x.gather(2, tokens.long()[:, :, None])[:, :, 0]


@deviation_of(token_logprobs)
def lp_temperature_missing(logits, tokens, *, temperature):
    """Leave the temperature out: the log-softmax of the raw logits."""
    return token_logprobs(logits, tokens, temperature=1.0)


@deviation_of(token_logprobs)
def lp_temperature_multiplied(logits, tokens, *, temperature):
    """Multiply the logits by the temperature in place of dividing."""
    return token_logprobs(logits, tokens, temperature=1 / temperature)


@deviation_of(token_logprobs)
def lp_temperature_after_softmax(logits, tokens, *, temperature):
    """Divide the log-probabilities by the temperature: they are not normalised any more."""
    return token_logprobs(logits, tokens, temperature=1.0) / temperature


@deviation_of(token_logprobs)
def lp_shift_missing(logits, tokens, *, temperature):
    """Read each token's own position: log-softmax of the logits that come after it, first token left out."""
    return _gathered(torch.log_softmax(logits / temperature, 2), tokens)[:, 1:]


@deviation_of(token_logprobs)
def lp_shift_missing_last_dropped(logits, tokens, *, temperature):
    """Read each token's own position and leave out the last one."""
    return _gathered(torch.log_softmax(logits / temperature, 2), tokens)[:, :-1]


@deviation_of(token_logprobs)
def lp_shifted_twice(logits, tokens, *, temperature):
    """Shift twice: the logits one position earlier than right, and for the first token those before it."""
    logprobs = torch.log_softmax(logits / temperature, 2)
    return _gathered(torch.cat([logprobs[:, :1], logprobs[:, :-2]], 1), tokens[:, 1:])


@deviation_of(token_logprobs)
def lp_unnormalised(logits, tokens, *, temperature):
    """Leave the normaliser out: the tempered logit itself."""
    return _gathered(logits[:, :-1] / temperature, tokens[:, 1:])


@deviation_of(token_logprobs)
def lp_negated(logits, tokens, *, temperature):
    """Return the cross-entropy, which is the log-probability with the opposite sign."""
    return -token_logprobs(logits, tokens, temperature=temperature)


@deviation_of(token_logprobs)
def lp_probability(logits, tokens, *, temperature):
    """Return the probability in place of its logarithm."""
    return token_logprobs(logits, tokens, temperature=temperature).exp()


@deviation_of(token_logprobs)
def lp_softmax_twice(logits, tokens, *, temperature):
    """Take the log-softmax of probabilities."""
    return token_logprobs(torch.softmax(logits / temperature, 2), tokens, temperature=1.0)


@deviation_of(token_logprobs)
def lp_normalised_over_positions(logits, tokens, *, temperature):
    """Normalise over positions in place of the vocabulary."""
    return _gathered(torch.log_softmax(logits[:, :-1] / temperature, 1), tokens[:, 1:])


@deviation_of(token_logprobs)
def lp_largest(logits, tokens, *, temperature):
    """Read the most likely token in place of the one that was chosen."""
    return torch.log_softmax(logits[:, :-1] / temperature, 2).amax(2)
