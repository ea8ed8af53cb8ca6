"""Known mistakes in the entropy of the token distribution."""

import torch

from goldenppo.reference import entropy
from goldenppo.reference.deviations._common import deviation_of


@deviation_of(entropy)
def ent_sign(logits, *, temperature):
    """Return Σ p·log p, the entropy with the opposite sign."""
    return -entropy(logits, temperature=temperature)


@deviation_of(entropy)
def ent_temperature_missing(logits, *, temperature):
    """Leave out the temperature that was given."""
    return entropy(logits, temperature=1.0)


@deviation_of(entropy)
def ent_from_overwritten_logits(logits, *, temperature):
    """Compute the entropy from a buffer that already holds exp(z − max z)."""
    z = logits / temperature
    return entropy((z - z.amax(2, keepdim=True)).exp(), temperature=1.0)


@deviation_of(entropy)
def ent_mean_over_vocabulary(logits, *, temperature):
    """Average −p·log p over the vocabulary in place of adding it up."""
    return entropy(logits, temperature=temperature) / logits.shape[2]


@deviation_of(entropy)
def ent_in_bits(logits, *, temperature):
    """Use the logarithm to base 2."""
    return entropy(logits, temperature=temperature) / torch.log(torch.tensor(2.0, dtype=torch.float64)).item()


@deviation_of(entropy)
def ent_normaliser_only(logits, *, temperature):
    """Leave the weighted mean of the logits out: log Σ exp z."""
    return torch.logsumexp(logits / temperature, 2)


@deviation_of(entropy)
def ent_unweighted(logits, *, temperature):
    """Average −log p over the vocabulary without weighing it by p."""
    return -torch.log_softmax(logits / temperature, 2).mean(2)


@deviation_of(entropy)
def ent_of_largest(logits, *, temperature):
    """Return −log p of the most likely token."""
    return -torch.log_softmax(logits / temperature, 2).amax(2)


@deviation_of(entropy)
def ent_tempered_weights(logits, *, temperature):
    """Weigh the logits before the temperature: log Σ exp z − Σ softmax(z)·logits."""
    z = logits / temperature
    return torch.logsumexp(z, 2) - (torch.softmax(z, 2) * logits).sum(2)
