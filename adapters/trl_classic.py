"""TRL's classic PPOTrainer, 0.7 to 0.11: its own methods, and its own step() for the whole span.

The methods work on full rows of prompt and response, so a case's response stands in a window between poisoned
prompt and padding positions. They are called on a trainer made without its constructor, with the few
attributes that they read.
"""

import importlib
import importlib.metadata
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy
import torch

from goldenppo.adapters import Unsupported, window

try:
    VERSION = importlib.metadata.version("trl")
except importlib.metadata.PackageNotFoundError:
    raise Unsupported("TRL is not installed in this environment: pip install 'trl==0.11.4'") from None

NAME = "trl-classic"
KNOWN_VERSIONS = ["0.7.11", "0.9.6", "0.10.1", "0.11.4"]
MASK = "int"  # batched_forward_pass makes the masks from the attention mask, an integer tensor

if not (0, 7) <= tuple(int(part) for part in VERSION.split(".")[:2]) < (0, 12):
    raise Unsupported(
        f"TRL {VERSION} has no PPO made of methods: that is 0.7 to 0.11, pip install 'trl==0.11.4'; "
        "the adapter trl-ppo checks 0.12 to 1.12.0"
    )

core = importlib.import_module("trl.core")
ppo_trainer = importlib.import_module("trl.trainer.ppo_trainer")

_methods = "trl.trainer.ppo_trainer:PPOTrainer"
SOURCES = {
    "token_logprobs": [f"{_methods}.batched_forward_pass", "trl.trainer.ppo_trainer:logprobs_from_logits"],
    "entropy": "trl.core:entropy_from_logits",
    "ratio": f"{_methods}.loss",
    "policy_loss": f"{_methods}.loss",
    "value_loss": f"{_methods}.loss",
    "kl_penalty": f"{_methods}._kl_penalty",
    "shaped_rewards": f"{_methods}.compute_rewards",
    "gae": f"{_methods}.compute_advantages",
    "whiten": "trl.core:masked_whiten",
    "experience": [f"{_methods}.{name}" for name in ("step", "compute_rewards", "compute_advantages")],
    "aggregate": "trl.core:masked_mean",
    "kl_controller": [f"trl.trainer.ppo_trainer:{name}KLController.update" for name in ("Adaptive", "Fixed")],
}

PROMPT = 3  # prompt tokens in front of every response
BEFORE, AFTER = PROMPT - 1, 2  # rows of PROMPT + T − 1 predictions, and two more of padding
ESTIMATORS = {"k1": "kl", "abs": "abs", "k2": "mse"}


def _trainer(**config):
    """A trainer without models; `ratio_threshold` and the other settings have the defaults of PPOConfig."""
    trainer = object.__new__(ppo_trainer.PPOTrainer)
    defaults = {
        "kl_penalty": "kl",
        "whiten_rewards": False,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 1.0,
        "ratio_threshold": 10.0,
        "use_score_scaling": False,
        "use_score_norm": False,
        "score_clip": None,
    }
    trainer.config = SimpleNamespace(**(defaults | config))
    return trainer


def _estimator(name: str) -> str:
    if name not in ESTIMATORS:
        raise Unsupported(f"TRL {VERSION} penalises {', '.join(ESTIMATORS)}; the case asks for {name}")
    return ESTIMATORS[name]


def _row(response, fill=window.POISON):
    return window.embed(torch, response, BEFORE, AFTER, fill)


def _response(full, width):
    return window.cut(full, BEFORE, width)


def kl_penalty(logprobs, ref_logprobs, *, estimator="k1"):
    return _trainer(kl_penalty=_estimator(estimator))._kl_penalty(logprobs, ref_logprobs)


def shaped_rewards(logprobs, ref_logprobs, scores, mask, *, kl_coef, estimator="k1"):
    trainer = _trainer(kl_penalty=_estimator(estimator))
    trainer.kl_ctl = SimpleNamespace(value=kl_coef)
    # 0.7.0 returns two tensors, later versions three; the rewards come first
    rewards = trainer.compute_rewards(scores, _row(logprobs, -7.0), _row(ref_logprobs, -3.0), _row(mask, 0))[0]
    return _response(rewards, mask.shape[1])


def gae(rewards, values, mask, *, gamma, lam):
    trainer = _trainer(gamma=gamma, lam=lam)
    _, advantages, returns = trainer.compute_advantages(_row(values), _row(rewards), _row(mask, 0))
    return {"advantages": _response(advantages, mask.shape[1]), "returns": _response(returns, mask.shape[1])}


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip, approx_kl="k2"):
    logged = {"k1": "policy/policykl", "k2": "policy/approxkl"}
    if approx_kl not in logged:
        raise Unsupported(f"TRL {VERSION} logs {' and '.join(logged)}; the case asks for {approx_kl}")
    zero = torch.zeros_like(advantages)
    loss, _, stats = _loss(mask, logprobs, old_logprobs, advantages, zero, zero, zero, cliprange=clip)
    return {"loss": loss, "clip_fraction": stats["policy/clipfrac"], "approx_kl": stats[logged[approx_kl]]}


def value_loss(values, old_values, returns, mask, *, clip):
    zero = torch.zeros_like(returns)
    # the returned loss is scaled by vf_coef, which is 1 here
    _, loss, stats = _loss(mask, zero, zero, zero, values, old_values, returns, cliprange_value=clip)
    return {"loss": loss, "clip_fraction": stats["val/clipfrac"]}


def ratio(logprobs, old_logprobs, mask):
    zero = torch.zeros_like(logprobs)
    stats = _loss(mask, logprobs, old_logprobs, zero, zero, zero, zero)[2]
    return _response(stats["policy/ratio"], mask.shape[1])


def _loss(mask, logprobs, old_logprobs, advantages, values, old_values, returns, **config):
    """PPOTrainer.loss on full rows; the logits only serve its entropy metric."""
    full = _row(mask, 0)
    logits = logprobs.new_zeros((*full.shape, 2))
    return _trainer(**config).loss(
        _row(old_logprobs, -7.0),
        _row(old_values),
        logits,
        _row(values),
        _row(logprobs, -3.0),
        full,
        _row(advantages),
        _row(returns),
    )


def whiten(x, mask, *, mean="removed"):
    return core.masked_whiten(x, mask, shift_mean=mean == "removed")


def aggregate(x, mask):
    return core.masked_mean(x, mask)


def entropy(logits, *, temperature):
    _check_temperature(temperature)
    return core.entropy_from_logits(logits)


def _check_temperature(temperature):
    if temperature != 1:
        raise Unsupported(f"TRL {VERSION} takes log-probs and entropy of the raw logits, whatever the temperature")


def kl_controller(kl, *, init_coef, target, horizon, batch_size, controller="proportional"):
    if controller == "fixed":
        controlled = ppo_trainer.FixedKLController(init_coef)
    else:
        controlled = ppo_trainer.AdaptiveKLController(init_coef, target, horizon)
    # step() hands over what stats_to_np makes of the KL
    observed = [core.stats_to_np({"kl": value})["kl"] for value in kl]
    return numpy.array([controlled.update(value, batch_size) or controlled.value for value in observed])


class _Model:
    """Answers with a case's arrays, as (logits, loss, values)."""

    def __init__(self, logits, values):
        self.logits, self.values = logits, values

    def eval(self):
        return self

    def __call__(self, input_ids, attention_mask):
        return self.logits, None, self.values


def token_logprobs(logits, tokens, *, temperature):
    _check_temperature(temperature)
    trainer = _trainer(mini_batch_size=len(tokens))
    trainer.is_encoder_decoder = False
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    model = _Model(logits, torch.zeros_like(logits[:, :, 0]))
    return trainer.batched_forward_pass(model, tokens[:, :1], tokens[:, 1:], inputs)[0]


class _Done(BaseException):
    """Leaves step() once advantages are known."""


class _Inputs(dict):
    def to(self, _device):
        return self


def _collate(rows):
    """Pads on the right, as the data collator does with a tokenizer that pads there."""
    names = ("input_ids", "attention_mask")
    pad = torch.nn.utils.rnn.pad_sequence
    return _Inputs({name: pad([row[name] for row in rows], batch_first=True) for name in names})


def experience(logprobs, ref_logprobs, values, scores, mask, *, kl_coef, gamma, lam, score_clip=None, estimator="k1"):
    trainer = _trainer(
        batch_size=len(mask),
        mini_batch_size=len(mask),
        kl_penalty=_estimator(estimator),
        gamma=gamma,
        lam=lam,
        score_clip=score_clip,
    )
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    lengths = (mask * positions).amax(1)
    width = int(lengths.max())
    tokens = [torch.arange(PROMPT, PROMPT + int(length), device=mask.device) for length in lengths]
    vocabulary = PROMPT + width
    trainer.current_device = mask.device
    trainer.kl_ctl = SimpleNamespace(value=kl_coef)
    trainer.data_collator, trainer.optional_peft_ctx = _collate, nullcontext
    trainer.is_distributed = trainer.is_encoder_decoder = trainer.is_peft_model = False
    trainer.model = _Model(_logits(logprobs, width, vocabulary), _predictions(values, width))
    trainer.ref_model = _Model(_logits(ref_logprobs, width, vocabulary), _predictions(values, width))
    seen = _step(trainer, tokens, list(scores.unbind()), _holes(mask, lengths))
    missing = mask.shape[1] - width
    return {name: torch.nn.functional.pad(window.cut(full, PROMPT - 1, width), (0, missing)) for name, full in seen.items()}


def _step(trainer, tokens, scores, response_masks) -> dict:
    """Runs step() to the point where the advantages are known."""
    compute = trainer.compute_advantages
    seen: dict = {}

    def observe(values, rewards, mask):
        _, advantages, returns = compute(values, rewards, mask)
        seen.update(rewards=rewards, advantages=advantages, returns=returns)
        raise _Done

    trainer.compute_advantages = observe
    prompt = torch.arange(PROMPT, device=trainer.current_device)
    with _given_logprobs():
        try:
            trainer.step([prompt] * len(tokens), tokens, scores, response_masks)
        except _Done:
            return seen
    raise Unsupported(f"step() of TRL {VERSION} computes no advantages; this adapter does not know its shape")


def _holes(mask, lengths):
    """The masks of the response tokens, or None where every one of them counts."""
    rows = [row[: int(length)] for row, length in zip(mask, lengths, strict=True)]
    return None if all(bool(row.all()) for row in rows) else rows


def _predictions(response, width):
    """[B, L] with L = PROMPT + width: position PROMPT − 1 + t holds what is known before response token t."""
    return window.embed(torch, response[:, :width], PROMPT - 1, 1)


def _logits(logprobs, width, vocabulary):
    """[B, L, V]: response token t is PROMPT + t, and its column holds the log-prob."""
    others = logprobs.new_full((len(logprobs), width, vocabulary), -7.0)
    tokens = torch.arange(PROMPT, vocabulary, device=logprobs.device).expand(len(logprobs), width)
    filled = others.scatter(2, tokens.unsqueeze(-1), logprobs[:, :width].unsqueeze(-1))
    return window.embed(torch, filled, PROMPT - 1, 1)


@contextmanager
def _given_logprobs():
    """Takes log-probs for logits: the op begins with log-probs (token_logprobs runs the real log-softmax)."""
    real = ppo_trainer.logprobs_from_logits
    ppo_trainer.logprobs_from_logits = lambda logits, labels: logits.gather(2, labels.unsqueeze(2)).squeeze(-1)
    try:
        yield
    finally:
        ppo_trainer.logprobs_from_logits = real
