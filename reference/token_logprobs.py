"""Log-probability of each token given those before it."""

import torch

from goldenppo.reference.checks import wide


def token_logprobs(logits, tokens, *, temperature):
    """Scores each token by the logits of the position before it.

        logprobs[b, t] = z[b, t, y] − log Σ_v exp z[b, t, v],   y = tokens[b, t+1],   z = logits / temperature

    for t = 0 … L−2: logits at position t speak of the token at t+1, and nothing speaks of the first token.

    Args:
        logits: float [B, L, V].
        tokens: int [B, L], ids in [0, V).
        temperature: the sampling temperature, above 0.

    Returns:
        Log-probabilities [B, L−1].

    Raises:
        ValueError: logits and tokens do not belong together, or the temperature is not above 0.

    Source: Holtzman et al. 2020 (arXiv:1904.09751) section 2 for the temperature; the shift: any causal language model.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(f"logits have shape {tuple(logits.shape)}, tokens {tuple(tokens.shape)}; expected [B, L, V] and [B, L]")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; expected a number above 0")
    z = wide(logits)[:, :-1] / temperature  # [B, L-1, V]
    return torch.log_softmax(z, -1).gather(-1, tokens[:, 1:, None])[..., 0]  # LP-1
