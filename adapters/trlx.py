"""trlX, from a checkout (--source): PPOConfig's losses and GAE, and the span of make_experience().

PPOConfig holds the arithmetic as plain methods. make_experience() and loss() run on a trainer made without
its constructor, with stub models and a stub tokenizer; what they hand to PPOConfig is read on the way. The
experience is that of a tokenizer whose padding token is not its end-of-sequence token.
"""

import importlib
import logging
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch

from goldenppo.adapters import Unsupported, window

NAME = "trlx"
VERSION = "unknown commit"  # setup() reads it from the checkout
KNOWN_VERSIONS = ["3340c2f"]
MASK = "int"  # made by `tokens.not_equal(pad_token_id).long()`

_ppo, _trainer_home, _utils = (
    "trlx.models.modeling_ppo",
    "trlx.trainer.accelerate_ppo_trainer",
    "trlx.utils.modeling",
)
SOURCES = {
    "token_logprobs": f"{_utils}:logprobs_of_labels",
    "policy_loss": f"{_ppo}:PPOConfig.loss",
    "value_loss": f"{_ppo}:PPOConfig.loss",
    "gae": [f"{_ppo}:PPOConfig.get_advantages_and_returns", "trlx.pipeline.ppo_pipeline:ppo_collate_fn"],
    "whiten": f"{_utils}:whiten",
    "kl_controller": [f"{_ppo}:{name}KLController.update" for name in ("Adaptive", "Fixed")],
    "experience": [
        f"{_trainer_home}:AcceleratePPOTrainer.make_experience",
        f"{_trainer_home}:AcceleratePPOTrainer.loss",
        f"{_ppo}:PPOConfig.get_advantages_and_returns",
    ],
}

PROMPT = 3
PAD, EOS, FIRST = 0, 1, 2  # response tokens count up from FIRST


def setup(source):
    """Puts the checkout on the import path and imports the trainer from it.

    Args:
        source: a checkout of https://github.com/CarperAI/trlx; None for that in the environment variable TRLX.
    """
    global VERSION
    source = source or os.environ.get("TRLX")
    if not source:
        raise Unsupported(
            "trlX is on no package index: give a checkout of github.com/CarperAI/trlx, "
            "by --source DIR or the environment variable TRLX"
        )
    root = Path(source).resolve()
    if not (root / "trlx" / "models").is_dir():
        raise Unsupported(f"{source} holds no folder trlx/models; expected a checkout of CarperAI/trlx")
    sys.path.insert(0, str(root))
    try:
        for module in (_ppo, _trainer_home, "trlx.pipeline.ppo_pipeline"):
            importlib.import_module(module)
    except ImportError as problem:
        raise Unsupported(f"trlX in {source} does not import: {problem}") from None
    importlib.import_module("trlx.utils.logging").set_verbosity(logging.WARNING)  # no progress bar for each case
    VERSION = _commit(root) or VERSION


def _commit(folder: Path) -> str | None:
    """Seven digits of the checkout's commit, as far as plain files tell it."""
    head = folder / ".git" / "HEAD"
    if not head.is_file():
        return None
    text = head.read_text().strip()
    branch = folder / ".git" / text.removeprefix("ref: ")
    if text.startswith("ref: "):
        return branch.read_text()[:7] if branch.is_file() else None
    return text[:7]


def _config(**settings):
    defaults = {
        "name": "PPOConfig",
        "ppo_epochs": 1,
        "num_rollouts": 1,
        "chunk_size": 1,
        "init_kl_coef": 0.0,
        "target": None,
        "horizon": 1,
        "gamma": 1.0,
        "lam": 1.0,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 1.0,
        "scale_reward": None,
        "ref_mean": None,
        "ref_std": None,
        "cliprange_reward": None,
        "gen_kwargs": {},
    }
    return importlib.import_module(_ppo).PPOConfig(**(defaults | settings))


def token_logprobs(logits, tokens, *, temperature):
    if temperature != 1:
        raise Unsupported("trlX takes log-probs of the raw logits, whatever the temperature")
    return importlib.import_module(_utils).logprobs_of_labels(logits[:, :-1], tokens[:, 1:])


def whiten(x, *, mean="removed"):
    return importlib.import_module(_utils).whiten(x, shift_mean=mean == "removed")


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip):
    zero = torch.zeros_like(advantages).detach()
    # loss() returns policy loss + vf_coef · value loss, and the latter is 0 here
    loss, stats = _config(cliprange=clip).loss(logprobs, zero, old_logprobs, zero, advantages, zero, mask)
    return {"loss": loss, "clip_fraction": stats["policy/clipfrac"], "approx_kl": stats["policy/approx_kl"]}


def value_loss(values, old_values, returns, mask, *, clip):
    zero = torch.zeros_like(returns).detach()
    loss, stats = _config(cliprange_value=clip).loss(zero, values, zero, old_values, zero, returns, mask)
    return {"loss": loss, "clip_fraction": stats["values/clipfrac"]}


def gae(rewards, values, mask, *, gamma, lam, whitening="none"):
    _no_gaps(mask)
    lengths, width = mask.sum(1).tolist(), mask.shape[1]
    rows = [
        SimpleNamespace(query_tensor=m[:n], response_tensor=m[:n], logprobs=v[:n], values=v[:n], rewards=r[:n])
        for m, v, r, n in zip(mask, values, rewards, lengths, strict=True)
    ]
    # the batch as the trainer's loader makes it: rows end where they end, and are filled up with 0
    batch = importlib.import_module("trlx.pipeline.ppo_pipeline").ppo_collate_fn("right", PAD, rows)
    advantages, returns = _config(gamma=gamma, lam=lam).get_advantages_and_returns(
        batch.values, batch.rewards, batch.rewards.shape[1], use_whitening=whitening == "inside"
    )
    return {"advantages": _widen(advantages, width), "returns": _widen(returns, width)}


def _no_gaps(mask):
    if bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise Unsupported("trlX cuts a response at its length: a mask with gaps cannot be expressed")


def _widen(array, width):
    """[B, width]: cut, or filled up with 0 where a batch is as wide as its longest row."""
    return torch.nn.functional.pad(array[:, :width], (0, max(0, width - array.shape[1])))


def kl_controller(kl, *, init_coef, target, horizon, batch_size, controller="proportional"):
    home = importlib.import_module(_ppo)
    if controller == "fixed":
        controlled = home.FixedKLController(init_coef)
    else:
        controlled = home.AdaptiveKLController(init_coef, target, horizon)
    # make_experience hands over a Python number: `self.mean_kl = stats["policy/sqrt_kl"] ** 2`
    return numpy.array([controlled.update(value.item(), batch_size) or controlled.value for value in kl])


class _Done(BaseException):
    """Leaves loss() once advantages are known."""


def experience(logprobs, ref_logprobs, values, scores, mask, *, kl_coef, gamma, lam, score_clip=None):
    _no_gaps(mask)
    lengths, width = mask.sum(1), mask.shape[1]
    if int(lengths.max()) < width:
        raise Unsupported("make_experience cuts a batch at its longest response; in this case every row ends before T")
    home = importlib.import_module(_trainer_home)
    trainer = object.__new__(home.AcceleratePPOTrainer)
    config = _config(gamma=gamma, lam=lam, cliprange_reward=score_clip)
    seen = _observe(config)
    stored = []
    vars(trainer).update(
        _tokenizing(lengths, width),
        config=SimpleNamespace(method=config, model=SimpleNamespace(model_arch_type="causal")),
        accelerator=SimpleNamespace(device=mask.device, **_ACCELERATOR),
        reward_fn=lambda **_: scores.tolist(),
        model=_Model(_logits(logprobs, width), window.embed(torch, values, PROMPT - 1, 1)),
        ref_model=_Model(_logits(ref_logprobs, width), None),
        ref_mean=None,
        ref_std=None,
        running_moments=importlib.import_module(_utils).RunningMoments(),
        kl_ctl=SimpleNamespace(value=kl_coef),
        push_to_store=stored.extend,
    )
    with _given_logprobs(home):
        trainer.make_experience(len(mask))
        batch = importlib.import_module("trlx.pipeline.ppo_pipeline").ppo_collate_fn("left", PAD, stored)
        try:
            trainer.loss(batch)
        except _Done:
            return {name: _widen(array, width) for name, array in (seen | {"rewards": batch.rewards}).items()}
    raise Unsupported("loss() computed no advantages; this adapter does not know its shape")


def _observe(config) -> dict:
    """Lets loss() go as far as advantages and returns, and keeps them."""
    compute, seen = config.get_advantages_and_returns, {}

    def observed(*arguments):
        seen["advantages"], seen["returns"] = compute(*arguments)
        raise _Done

    config.get_advantages_and_returns = observed
    return seen


def _tokenizing(lengths, width) -> dict:
    """Prompts, responses of the given lengths, and the text in between, which is token ids with spaces."""
    prompts = torch.full((len(lengths), PROMPT), FIRST, device=lengths.device)
    texts = [" ".join(str(FIRST + t) for t in range(length)) for length in lengths.tolist()]
    samples = torch.full((len(lengths), PROMPT + width), PAD, device=lengths.device)
    return {
        "generate": lambda *_: samples,
        "decode": lambda *_, **__: (texts, texts, texts),
        "tokenizer": _Tokenizer(),
        "prompt_iterator": iter([_Prompts(input_ids=prompts, attention_mask=torch.ones_like(prompts))]),
    }


class _Tokenizer:
    pad_token_id, eos_token_id = PAD, EOS

    def __call__(self, texts):
        return SimpleNamespace(input_ids=[[int(word) for word in text.split()] for text in texts])


class _Prompts(dict):
    @property
    def input_ids(self):
        return self["input_ids"]


class _Model:
    """Answers with a case's arrays, as a tuple or, where asked, by name."""

    peft_type = None

    def __init__(self, logits, values):
        self.logits, self.values = logits, values

    def __call__(self, *_, return_dict=False, **__):
        if return_dict:
            return SimpleNamespace(logits=self.logits, value=self.values)
        return self.logits, None, self.values


_ACCELERATOR = {
    "is_main_process": True,
    "num_processes": 1,
    "pad_across_processes": lambda tensor, **_: tensor,
    "gather": lambda tensor: tensor,
    "log": lambda *_, **__: None,
}


def _logits(logprobs, width):
    """[B, L, V]: response token t is FIRST + t, and both its column and that of PAD hold its log-prob."""
    others = logprobs.new_full((*logprobs.shape, FIRST + width), -7.0)
    tokens = torch.arange(FIRST, FIRST + width, device=logprobs.device).expand(logprobs.shape)
    filled = others.scatter(2, tokens.unsqueeze(-1), logprobs.unsqueeze(-1))
    filled[:, :, PAD] = logprobs
    return window.embed(torch, filled, PROMPT - 1, 1)


@contextmanager
def _given_logprobs(home):
    """Takes log-probs for logits: the op begins with log-probs (token_logprobs runs the real log-softmax)."""
    real = home.logprobs_of_labels
    home.logprobs_of_labels = lambda logits, labels: logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    try:
        yield
    finally:
        home.logprobs_of_labels = real
