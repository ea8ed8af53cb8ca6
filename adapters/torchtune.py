"""torchtune: its own torchtune.rlhf functions, and the train() of its PPO recipe for the span from scores to advantages.

Where the score lands and which values stay at padding is decided by the recipe, not by the functions. So the recipe's
train() runs, with models that answer with the arrays of a case, up to its first ppo_step, and is read there.
"""

import contextlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from goldenppo.adapters import Unsupported, window

try:
    import torch
    import torchtune
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
# Said by the recipe (generate_trajectory, steps 5 and 6), so that a departure is held against what is meant there.
VARIANTS = {
    "shaped_rewards": {"estimator": "k1", "score_at": "first_pad", "level": "token", "missing_eos": "replace"},
    "experience": {"estimator": "k1", "score_at": "first_pad", "whitening": "inside"},
}


def _load_recipe():
    """The recipe's module; recipes are scripts beside the package, which cannot be imported by name."""
    name = "ppo_full_finetune_single_device"
    path = Path(torchtune.__file__).parents[1] / "recipes" / f"{name}.py"
    if not path.is_file():
        raise Unsupported(f"torchtune {VERSION} is installed without its recipes ({name}.py)")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


recipe = _load_recipe()
_RECIPE = "ppo_full_finetune_single_device:PPOFullFinetuneRecipeSingleDevice"
_SPAN = [f"{_RECIPE}.train", f"{_RECIPE}.generate_trajectory", "torchtune.rlhf:get_rewards_ppo"]
SOURCES = {
    "token_logprobs": ["torchtune.rlhf:logits_to_logprobs", "torchtune.rlhf:truncate_sequence_for_logprobs"],
    "policy_loss": "torchtune.rlhf.loss:PPOLoss.forward",
    "value_loss": "torchtune.rlhf.loss:PPOLoss.forward",
    "shaped_rewards": _SPAN,
    "experience": [*_SPAN, "torchtune.rlhf:estimate_advantages"],
    "kl_penalty": "torchtune.rlhf:get_rewards_ppo",
    "gae": "torchtune.rlhf:estimate_advantages",
    "whiten": "torchtune.rlhf:whiten",
    "aggregate": "torchtune.rlhf:masked_mean",
}

PROMPT = 2  # prompt tokens in front of every response
PAD, EOS, TEXT = 0, 1, 2  # token ids, all that the stub models know


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


def shaped_rewards(logprobs, ref_logprobs, scores, mask, *, kl_coef, eos_penalty=None, ended=None):
    settings = {"_kl_coeff": kl_coef}
    if eos_penalty is not None:
        settings.update(_penalise_no_eos=True, _reward_penalty=eos_penalty)
    seen = _train(logprobs, ref_logprobs, torch.zeros_like(logprobs), scores, mask, ended, **settings)
    return seen["rewards"]


def experience(logprobs, ref_logprobs, values, scores, mask, *, kl_coef, gamma, lam):
    seen = _train(logprobs, ref_logprobs, values, scores, mask, _kl_coeff=kl_coef, _gamma=gamma, _lmbda=lam)
    return {name: seen[name] for name in ("rewards", "advantages", "returns")}


def gae(rewards, values, mask, *, gamma, lam):
    _lengths(mask)
    # The function masks nothing but the whitening. Zeros stand for what its caller leaves at padding; that the recipe
    # leaves one value there is judged by `experience`.
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


class _Stop(BaseException):
    """Leaves train() once its frame has been read."""


def _train(logprobs, ref_logprobs, values, scores, mask, ended=None, **settings) -> dict:
    """The local variables of train() at its first ppo_step, for one batch of responses."""
    batch, width = mask.shape
    lengths = _lengths(mask)
    responses = _responses(lengths, width, ended)
    prompts = torch.full_like(responses[:, :1], TEXT).expand(batch, PROMPT)
    full = {"reference": _at_tokens(ref_logprobs, responses), "values": values.unsqueeze(-1)}
    full = {name: window.embed(torch, array, PROMPT - 1, 1) for name, array in full.items()}
    at_end = torch.arange(PROMPT + width, device=mask.device) == PROMPT - 1 + lengths.unsqueeze(1)
    token_scores = torch.where(at_end, scores.unsqueeze(1), window.POISON).unsqueeze(-1)
    seen: dict = {}

    def read(*_):
        seen.update(sys._getframe(1).f_locals)
        raise _Stop

    trainer = object.__new__(recipe.PPOFullFinetuneRecipeSingleDevice)
    vars(trainer).update(
        _SETTINGS
        | dict.fromkeys(("batch_size", "_forward_batch_size", "_ppo_batch_size", "_ppo_backward_batch_size"), batch)
        | settings,
        _max_generated_tokens=width,
        _dataloader=[{"tokens": prompts}],
        _device=mask.device,
        _stop_token_ids=torch.tensor([EOS], device=mask.device),
        _policy_model=None,
        _ref_policy_model=lambda *_, **__: full["reference"],
        _value_model=lambda *_, **__: full["values"],
        _reward_model=lambda *_, **__: token_scores,
        ppo_step=read,
    )
    sampled = torch.cat([prompts, responses], 1), _at_tokens(logprobs, responses)
    with _swapped(sampled), contextlib.suppress(_Stop):
        trainer.train()
    return seen


_SETTINGS = {
    "compile": False,
    "enable_kv_cache": False,
    "cache_ctx_manager": lambda *_, **__: contextlib.nullcontext(),
    "profiler_profile_memory": False,
    "_profiler": SimpleNamespace(start=lambda: None),
    "_sampler": SimpleNamespace(set_epoch=lambda _: None),
    "_tokenizer": SimpleNamespace(pad_id=PAD),
    "_optimizer_in_bwd": True,
    "_total_steps": 1,
    "_steps_run": 0,
    "_total_epochs": 1,
    "_epochs_run": 0,
    "_ppo_epochs": 1,
    "_temperature": 1.0,
    "_top_k": None,
    "_rng": None,
    "_penalise_no_eos": False,
    "_min_response_length": None,
    "_gamma": 1.0,
    "_lmbda": 1.0,
}


@contextlib.contextmanager
def _swapped(sampled):
    """Puts a given sample in the place of generation, takes log-probs for logits, and hides the progress bar."""
    stubs = {
        "generation": {"generate": lambda **_: sampled},
        "rlhf": {"logits_to_logprobs": lambda logits, tokens, _: logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)},
    }
    before = {name: getattr(recipe, name) for name in (*stubs, "tqdm")}
    for name, functions in stubs.items():
        setattr(recipe, name, SimpleNamespace(**{**vars(before[name]), **functions}))
    recipe.tqdm = lambda **_: None
    try:
        yield
    finally:
        vars(recipe).update(before)


def _responses(lengths, width, ended):
    """[B, width] tokens as generated: text, EOS as the last one that counts, text behind it."""
    position = torch.arange(width, device=lengths.device)
    last = position == lengths.unsqueeze(1) - 1
    stops = (lengths < width if ended is None else ended | (lengths < width)).unsqueeze(1)
    return torch.where(last & stops, EOS, TEXT)


def _at_tokens(logprobs, tokens):
    """[B, T, 3]: each log-prob in its token's column, poison in the others."""
    others = logprobs.new_full((*logprobs.shape, TEXT + 1), -window.POISON)
    return others.scatter(2, tokens.unsqueeze(-1), logprobs.unsqueeze(-1))
