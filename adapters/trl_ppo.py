"""TRL's PPOTrainer, 0.12 to 1.12.0 (PPOv2Trainer, 0.9.6 to 0.11): its real train(), with stub models.

All of this trainer's arithmetic stands inside train(). So train() itself runs, with a policy, a reference, a
value and a reward model that answer with the arrays of a case: it generates, shifts, truncates, masks, shapes
rewards, runs GAE and computes both losses. What it computed is read from its frame at the two ends of its
`accelerator.accumulate` block. For the losses, advantages and returns are put into the frame at the first of
these, where its own have just been made.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from contextlib import contextmanager
from ctypes import c_int, py_object, pythonapi
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from goldenppo.adapters import Unsupported, window

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

try:
    VERSION = importlib.metadata.version("trl")
except importlib.metadata.PackageNotFoundError:
    raise Unsupported("TRL is not installed in this environment: pip install 'trl==1.12.0'") from None

NAME = "trl-ppo"
KNOWN_VERSIONS = ["0.9.6", "0.11.4", "0.12.2", "0.16.1", "0.24.0", "1.0.0", "1.12.0"]

PROMPT = 3  # prompt tokens in front of every response; the first one says which row it is
ROW = 1000  # token id of row 0
PAD, EOS, FILLER, VOCABULARY = 0, 1, 2, 6  # text is made of tokens 3, 4 and 5


def _find_trainer() -> tuple[str, str]:
    """The module and the class that hold train(); they moved twice."""
    numbers = [int(part) for part in VERSION.split(".")[:2]]
    if numbers >= [1, 13]:
        raise Unsupported(f"TRL {VERSION} has no PPO; the last release with it is 1.12.0: pip install 'trl==1.12.0'")
    if numbers < [0, 12]:
        if not importlib.util.find_spec("trl.trainer.ppov2_trainer"):
            raise Unsupported(
                f"TRL {VERSION} has PPO as methods only, which the adapter trl-classic checks; this one knows 0.9.6 to 1.12.0"
            )
        return "trl.trainer.ppov2_trainer", "PPOv2Trainer"
    moved = importlib.util.find_spec("trl.experimental") and importlib.util.find_spec("trl.experimental.ppo")
    return ("trl.experimental.ppo" if moved else "trl.trainer") + ".ppo_trainer", "PPOTrainer"


HOME, CLASS = _find_trainer()
trainer_module = importlib.import_module(HOME)
_names = getattr(trainer_module, CLASS).train.__code__.co_names
ESTIMATORS = ("k1", "k3") if "kl_estimator" in _names else ("k1",)  # a setting since 0.17

_train = f"{HOME}:{CLASS}.train"
SOURCES = {
    "token_logprobs": _train,
    "entropy": _train,
    "ratio": _train,
    "policy_loss": _train,
    "value_loss": _train,
    "accumulated_policy_loss": _train,
    "kl_penalty": _train,
    "shaped_rewards": _train,
    "gae": _train,
    "experience": _train,
    "whiten": f"{HOME}:masked_whiten",
    "aggregate": f"{HOME}:masked_mean",
    "end_score": f"{HOME}:get_reward",
}


class _Stop(BaseException):
    """Leaves train() once its frame has been read."""


@dataclass
class Tape:
    """What the stub models answer and what was read; every tensor has one row a prompt."""

    responses: torch.Tensor  # [B, T] tokens
    sampled: torch.Tensor  # [B, T, V] logits that generate() returns
    reference: torch.Tensor  # [B, L, V] logits
    policy: torch.Tensor  # [B, L, V] logits in the update
    values: torch.Tensor  # [B, L] at experience time
    new_values: torch.Tensor  # [B, L] in the update
    token_scores: torch.Tensor  # [B, L]
    replace: dict = field(default_factory=dict)  # locals of train() to be overwritten after GAE
    last_prompt_token: torch.Tensor | None = None
    pad: int = PAD
    updating: bool = False
    losses: list = field(default_factory=list)  # what train() hands to accelerator.backward, micro-batch by micro-batch
    seen: dict = field(default_factory=dict)


def _rows(input_ids):
    return input_ids[:, 0] - ROW


class _LanguageModel:
    """Policy or reference: replays the tape's tokens and logits."""

    is_gradient_checkpointing = False

    def __init__(self, tape, logits):
        self.tape, self.logits = tape, logits

    def generate(self, input_ids, **_):
        rows = _rows(input_ids)
        sequences = torch.cat([input_ids, self.tape.responses[rows]], dim=1)
        return SimpleNamespace(sequences=sequences, scores=self.tape.sampled[rows].unbind(1))

    def __call__(self, input_ids, **_):
        return SimpleNamespace(logits=self.logits[_rows(input_ids)])


class _ScoreModel:
    """Value or reward model: the backbone's one hidden unit is the answer, the head passes it on."""

    base_model_prefix = "backbone"

    def __init__(self, answer):
        self.answer = answer

    def backbone(self, input_ids, **_):
        return SimpleNamespace(hidden_states=[self.answer()[_rows(input_ids)].unsqueeze(-1)])

    def score(self, hidden):
        return hidden


class _Accelerator:
    """One process, no wrapping; its `accumulate` block is where the frame of train() is read and written."""

    num_processes = 1
    state = SimpleNamespace(deepspeed_plugin=None)

    def __init__(self, tape, last, steps):
        self.tape, self.last, self.steps, self.device = tape, last, steps, tape.values.device

    def unwrap_model(self, model):
        return model

    def print(self, *_):
        """Says nothing."""

    def backward(self, loss):
        """Keeps the loss and leaves the graph to whoever asks for gradients."""
        self.tape.losses.append(loss)

    def accumulate(self, _model):
        return self

    def __enter__(self):
        frame = sys._getframe(1)
        self.tape.updating = True
        for name, value in self.tape.replace.items():
            _overwrite(frame, name, value)
        if self.last == "rollout":
            self._stop(frame)

    def __exit__(self, kind, *_):
        if kind is None and (self.last != "step" or len(self.tape.losses) == self.steps):
            self._stop(sys._getframe(1))

    def _stop(self, frame):
        self.tape.seen.update(frame.f_locals)
        raise _Stop


def _overwrite(frame, name, value):
    """Assigns a local variable of a running function."""
    if name not in frame.f_locals:
        raise Unsupported(f"train() of TRL {VERSION} has no local variable {name!r}; this adapter does not know its shape")
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):  # from 3.13 on f_locals writes through (PEP 667)
        pythonapi.PyFrame_LocalsToFast(py_object(frame), c_int(0))


@contextmanager
def _swapped(**names):
    """Replaces names of the trainer's module for the time of a block."""
    before = {name: getattr(trainer_module, name) for name in names}
    vars(trainer_module).update(names)
    try:
        yield
    finally:
        vars(trainer_module).update(before)


def _given_logprobs() -> dict:
    """Takes log-probs for logits: these ops begin with log-probs (token_logprobs runs the real ones)."""
    if hasattr(trainer_module, "selective_log_softmax"):
        return {"selective_log_softmax": lambda logits, index: logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)}
    return {"F": SimpleNamespace(**{**vars(trainer_module.F), "log_softmax": lambda logits, dim: logits})}


def _play(tape: Tape, last: str, swap: dict, **settings) -> dict:
    """Runs train() over one batch; returns its local variables at the end of the rollout, the update or the whole step."""
    trainer = object.__new__(getattr(trainer_module, CLASS))
    batch, width = tape.responses.shape
    args = SimpleNamespace(**(_SETTINGS | dict.fromkeys(_BATCH_SIZES, batch) | {"response_length": width} | settings))
    policy = _LanguageModel(tape, tape.policy)
    value = _ScoreModel(lambda: tape.new_values if tape.updating else tape.values)
    reference = _LanguageModel(tape, tape.reference)
    tokenizer = SimpleNamespace(pad_token_id=tape.pad, eos_token_id=EOS)
    vars(trainer).update(
        args=args,
        accelerator=_Accelerator(tape, last, args.gradient_accumulation_steps),
        optimizer=SimpleNamespace(step=lambda: None, zero_grad=lambda: None),
        lr_scheduler=SimpleNamespace(step=lambda: None),
        model=trainer_module.PolicyAndValueWrapper(policy, value),
        ref_policy=reference,
        ref_model=reference,
        reward_model=_ScoreModel(lambda: tape.token_scores),
        processing_class=tokenizer,
        tokenizer=tokenizer,
        stop_token_id=args.stop_token_id,
        dataloader=[{"input_ids": _prompts(tape)}],
        callback_handler=SimpleNamespace(on_train_begin=lambda *_: None),
        state=SimpleNamespace(),
        control=None,
        is_deepspeed_enabled=False,
        train_dataset_len=batch,
    )
    no_collection = SimpleNamespace(collect=lambda: None)  # a full collection costs more than the rest of train()
    with _swapped(gc=no_collection, **swap):
        try:
            trainer.train()
        except _Stop:
            return tape.seen
    raise Unsupported(f"train() of TRL {VERSION} ended without an accumulate block; this adapter does not know its shape")


_BATCH_SIZES = (
    "batch_size",
    "local_batch_size",
    "local_mini_batch_size",
    "per_device_train_batch_size",
    "local_rollout_forward_batch_size",
    "total_episodes",
)
_SETTINGS = {
    "num_ppo_epochs": 1,
    "num_mini_batches": 1,
    "gradient_accumulation_steps": 1,
    "num_total_batches": 1,
    "num_updates": 1,
    "num_sample_generations": 0,
    "logging_steps": None,
    "eval_steps": None,
    "save_steps": None,
    "ds3_gather_for_generation": True,
    "temperature": 1 - 1e-7,  # train() divides by temperature + 1e-7; here log-probs are given, so by exactly 1
    "stop_token_id": EOS,
    "missing_eos_penalty": None,
    "non_eos_penalty": False,
    "penalty_reward_value": None,
    "whiten_rewards": False,
    "kl_estimator": "k1",
    "kl_coef": 0.0,
    "gamma": 1.0,
    "lam": 1.0,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 1.0,
}


def _prompts(tape):
    """[B, PROMPT] tokens: the row's number, a filler, and the last token of the prompt."""
    batch = tape.responses.shape[0]
    first = torch.arange(ROW, ROW + batch, device=tape.responses.device)
    filler = torch.full_like(first, FILLER)
    last = filler if tape.last_prompt_token is None else tape.last_prompt_token
    return torch.stack([first, filler, last], dim=1)


def _lengths(mask):
    """Tokens of each row; train() ends a response before its first PAD, so a mask is a prefix of its row."""
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise Unsupported("train() takes the first PAD for the end of a response: a mask with gaps cannot be expressed")
    return mask.sum(1)


def _responses(lengths, width, ended):
    """[B, width] tokens: text, EOS as the last one where `ended`, then PAD."""
    position = torch.arange(width, device=lengths.device)
    row = torch.arange(len(lengths), device=lengths.device).unsqueeze(1)
    text = 3 + (position + row) % 3
    tokens = torch.where(position < lengths.unsqueeze(1), text, PAD)
    return torch.where((position == lengths.unsqueeze(1) - 1) & ended.unsqueeze(1), EOS, tokens)


def _tape(responses, sampled, **given) -> Tape:
    """A tape of log-probs [B, T] and values [B, T], embedded in full sequences; what is not given is 0."""
    zero = torch.zeros_like(sampled).detach()
    logits = {name: _at_tokens(given.pop(name, zero), responses) for name in ("reference", "policy")}
    values = {name: given.pop(name, zero) for name in ("values", "new_values")}
    full = {name: window.embed(torch, array, PROMPT - 1, 1) for name, array in {**logits, **values}.items()}
    scores = given.pop("token_scores", full["values"])
    return Tape(responses, _at_tokens(sampled, responses), token_scores=scores, **full, **given)


def _at_tokens(logprobs, tokens):
    """[B, T, V]: each log-prob in its token's column, poison in the others."""
    others = logprobs.new_full((*logprobs.shape, VOCABULARY), -window.POISON)
    return others.scatter(2, tokens.unsqueeze(-1), logprobs.unsqueeze(-1))


def _at_last_tokens(scores, lengths, width):
    """[B, L]: each row's score at its last token (an empty response: of the prompt), poison elsewhere."""
    position = torch.arange(PROMPT + width, device=scores.device)
    return torch.where(position == PROMPT - 1 + lengths.unsqueeze(1), scores.unsqueeze(1), window.POISON)


def _check_estimator(estimator):
    if estimator not in ESTIMATORS:
        raise Unsupported(f"TRL {VERSION} knows {', '.join(ESTIMATORS)} for the KL; the case asks for {estimator}")


def _rollout(logprobs, ref_logprobs, values, scores, mask, ended=None, **settings) -> dict:
    _check_estimator(settings["kl_estimator"])
    lengths, width = _lengths(mask), mask.shape[1]
    ended = lengths < width if ended is None else ended
    tape = _tape(
        _responses(lengths, width, ended),
        logprobs,
        reference=ref_logprobs,
        values=values,
        token_scores=_at_last_tokens(scores, lengths, width),
    )
    return _play(tape, "rollout", _given_logprobs(), **settings)


def experience(logprobs, ref_logprobs, values, scores, mask, *, kl_coef, gamma, lam, estimator="k1"):
    seen = _rollout(
        logprobs,
        ref_logprobs,
        values,
        scores,
        mask,
        kl_coef=kl_coef,
        gamma=gamma,
        lam=lam,
        kl_estimator=estimator,
    )
    return {name: seen[name] for name in ("rewards", "advantages", "returns")}


def shaped_rewards(logprobs, ref_logprobs, scores, mask, *, kl_coef, eos_penalty=None, ended=None, estimator="k1"):
    settings = {"kl_coef": kl_coef, "kl_estimator": estimator}
    if eos_penalty is not None:
        settings["missing_eos_penalty"] = eos_penalty
        settings.update(non_eos_penalty=True, penalty_reward_value=eos_penalty)  # the names of 0.9 and 0.10
        if bool((ended & ~mask.any(1)).any()):
            raise Unsupported("a response without tokens has no EOS; the case says that one has ended")
    values = torch.zeros_like(logprobs)
    return _rollout(logprobs, ref_logprobs, values, scores, mask, ended, **settings)["rewards"]


def kl_penalty(logprobs, ref_logprobs, *, estimator="k1"):
    everywhere = torch.ones_like(logprobs, dtype=torch.bool)
    scores = torch.zeros_like(logprobs[:, 0])
    values = torch.zeros_like(logprobs)
    return _rollout(logprobs, ref_logprobs, values, scores, everywhere, kl_estimator=estimator)["kl"]


def gae(rewards, values, mask, *, gamma, lam):
    if not bool(mask.all()):
        raise Unsupported("train() keeps one value after a response's last token: `experience` judges it on ragged rows")
    # With log-probs of 0 and kl_coef 1 the shaped reward of a token is its reference log-prob, bit by bit.
    nothing, scores = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    seen = _rollout(nothing, rewards, values, scores, mask, kl_coef=1.0, gamma=gamma, lam=lam, kl_estimator="k1")
    return {name: seen[name] for name in ("advantages", "returns")}


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip):
    seen = _update(logprobs, old_logprobs, mask, advantages=advantages, cliprange=clip)
    return {"loss": seen["pg_loss"], "clip_fraction": seen["pg_clipfrac"], "approx_kl": seen["approxkl"]}


def accumulated_policy_loss(parts, *, clip):
    if len({len(part[0]) for part in parts}) > 1:
        raise Unsupported("train() makes micro-batches of equally many rows")
    logprobs, old_logprobs, advantages, mask = (torch.cat(column) for column in zip(*parts, strict=True))
    count, drawn = len(parts), trainer_module.np
    in_order = SimpleNamespace(**{**vars(drawn), "random": SimpleNamespace(permutation=drawn.arange)})
    how = {"cliprange": clip, "vf_coef": 0.0, "per_device_train_batch_size": len(parts[0][0])}
    with _swapped(np=in_order):
        losses = _update(logprobs, old_logprobs, mask, advantages, "step", gradient_accumulation_steps=count, **how)[
            "tape"
        ].losses
    return sum(loss / count for loss in losses)  # as Accelerator.backward of accelerate divides


def ratio(logprobs, old_logprobs, mask):
    return _unshuffled(_update(logprobs, old_logprobs, mask, advantages=torch.zeros_like(logprobs)), "ratio")


def _update(logprobs, old_logprobs, mask, advantages, last="update", **settings) -> dict:
    lengths, width = _lengths(mask), mask.shape[1]
    responses = _responses(lengths, width, lengths < width)
    # train() puts 0 where there is no token: `advantages = torch.masked_fill(advantages, padding_mask, 0)`
    replace = {"advantages": torch.where(mask, advantages.detach(), 0)}
    tape = _tape(responses, old_logprobs.detach(), policy=logprobs, replace=replace)
    return {**_play(tape, last, _given_logprobs(), **settings), "tape": tape}


def value_loss(values, old_values, returns, mask, *, clip):
    # The value mask of train() is one position longer than the response: a row of n values has n − 1 tokens.
    tokens, width = _lengths(mask) - 1, mask.shape[1]
    if int(tokens.min()) < 0:
        raise Unsupported("train() trains the value of at least one position of each row; the case has an empty row")
    if int(tokens.sum()) == 0:
        raise Unsupported("train() whitens advantages before the loss and refuses a batch without response tokens")
    # Returns beyond it are 0 in train(): the sum of an advantage and a value that are both 0 there.
    replace = {"returns": torch.where(mask, returns.detach(), 0)}
    responses = _responses(tokens, width, tokens < width)
    nothing = torch.zeros_like(old_values).detach()
    tape = _tape(responses, nothing, values=old_values.detach(), new_values=values, replace=replace)
    seen = _play(tape, "update", _given_logprobs(), cliprange_value=clip)
    return {"loss": seen["vf_loss"], "clip_fraction": seen["vf_clipfrac"]}


def token_logprobs(logits, tokens, *, temperature):
    seen = _forward(logits[:, :-1], tokens[:, 1:], tokens[:, 0], temperature)
    return _unshuffled(seen, "new_logprobs")


def entropy(logits, *, temperature):
    tokens = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
    return _unshuffled(_forward(logits, tokens, tokens[:, 0], temperature), "entropy")


def _forward(logits, responses, last_prompt_token, temperature) -> dict:
    """The update's forward pass on given logits [B, T, V]: real log-softmax, real shift, real temperature."""
    nothing = logits.new_zeros(responses.shape)
    full = window.embed(torch, logits, PROMPT - 1, 1)
    flat = window.embed(torch, nothing, PROMPT - 1, 1)
    never = logits.shape[-1]  # an id that no token has: nothing is padding
    tape = Tape(responses, logits, full, full, flat, flat, flat, last_prompt_token=last_prompt_token, pad=never)
    return _play(tape, "update", {}, temperature=temperature, stop_token_id=None)


def _unshuffled(seen, name):
    """A local of the update, its rows in the order of the case again."""
    shuffled = torch.as_tensor(seen["micro_batch_inds"], device=seen[name].device)
    return seen[name][shuffled.argsort()]


def whiten(x, mask, *, mean="removed"):
    return trainer_module.masked_whiten(x, mask, shift_mean=mean == "removed")


def aggregate(x, mask):
    return trainer_module.masked_mean(x, mask)


def end_score(token_scores, attention_mask):
    # PADs up to here stand in front of prompts
    prompt = int(attention_mask.int().argmax(1).max())
    response = attention_mask[:, prompt:]
    ended_before = prompt > 0 and not bool(attention_mask[:, prompt - 1 :].any(1).all())
    if ended_before or bool((response[:, 1:] & ~response[:, :-1]).any()):
        raise Unsupported("get_reward takes the first PAD of the response for its end: this mask cannot be expressed")
    tokens = torch.where(attention_mask, FILLER, PAD)
    hidden = SimpleNamespace(hidden_states=[token_scores.unsqueeze(-1)])
    model = SimpleNamespace(base_model_prefix="backbone", backbone=lambda **_: hidden, score=lambda states: states)
    return trainer_module.get_reward(model, tokens, PAD, prompt)[1]
