"""DeepSpeed-Chat, from a checkout (--source): its PPO trainer's methods, train_rlhf() and reward model.

The trainer works on full rows of prompt and answer, so a case's response stands in a window behind a poisoned
prompt; the row ends with the response, as it does there. It is called on a trainer made without its
constructor, whose settings (kl_ctl, clip_reward_value, cliprange, gamma, lam) are plain attributes.
"""

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import torch

from goldenppo.adapters import Unsupported, window

NAME = "deepspeed-chat"
VERSION = "unknown commit"  # setup() reads it from the checkout
KNOWN_VERSIONS = ["83757d9", "45b4b71"]
MASK = "int"  # made by `attention_mask = seq.not_equal(pad_token_id).long()`

_ppo, _reward = "dschat.rlhf.ppo_trainer", "dschat.utils.model.reward_model:RewardModel"
_trainer_class = f"{_ppo}:DeepSpeedPPOTrainer"
SOURCES = {
    "token_logprobs": f"{_ppo}:gather_log_probs",
    "policy_loss": f"{_trainer_class}.actor_loss_fn",
    "value_loss": f"{_trainer_class}.critic_loss_fn",
    "shaped_rewards": f"{_trainer_class}.compute_rewards",
    "gae": f"{_trainer_class}.get_advantages_and_returns",
    "experience": [f"{_trainer_class}.{name}" for name in ("train_rlhf", "compute_rewards", "get_advantages_and_returns")],
    "reward_model_token_loss": f"{_reward}.forward",
    "end_score": f"{_reward}.forward_value",
    "dpo_loss": "step2_dpo_finetuning_main:main",
}

PROMPT = 3
BEFORE = PROMPT - 1  # predictions in front of that of the first response token
PAD, TEXT = 0, 1


def setup(source):
    """Puts the checkout on the import path and imports the trainer from it.

    Args:
        source: a checkout of DeepSpeedExamples, or its folder applications/DeepSpeed-Chat; None for that in the environment
            variable DEEPSPEED_EXAMPLES.
    """
    global VERSION
    source = source or os.environ.get("DEEPSPEED_EXAMPLES")
    if not source:
        raise Unsupported(
            "DeepSpeed-Chat is no package: give a checkout of github.com/deepspeedai/DeepSpeedExamples, "
            "by --source DIR or the environment variable DEEPSPEED_EXAMPLES"
        )
    root = Path(source).resolve()
    found = [folder for folder in (root, root / "applications" / "DeepSpeed-Chat") if (folder / "dschat").is_dir()]
    if not found:
        raise Unsupported(f"{source} holds no folder dschat; expected a checkout of DeepSpeedExamples")
    sys.path.insert(0, str(found[0]))
    try:
        for module in (_ppo, "dschat.utils.model.reward_model"):
            importlib.import_module(module)
    except ImportError as problem:
        raise Unsupported(f"the trainer in {source} does not import ({problem}): pip install deepspeed") from None
    VERSION = _commit(found[0]) or VERSION
    _dpo_script(found[0] / "training" / "step2_dpo_finetuning" / "main.py")


def _commit(folder: Path) -> str | None:
    """Seven digits of the checkout's commit, as far as plain files tell it."""
    for parent in (folder, *folder.parents):
        head = parent / ".git" / "HEAD"
        if head.is_file():
            text = head.read_text().strip()
            branch = parent / ".git" / text.removeprefix("ref: ")
            if text.startswith("ref: "):
                return branch.read_text()[:7] if branch.is_file() else None
            return text[:7]
    return None


def _module():
    return importlib.import_module(_ppo)


def _trainer(**settings):
    trainer = object.__new__(_module().DeepSpeedPPOTrainer)
    vars(trainer).update(compute_fp32_loss=False, **settings)
    return trainer


def _no_gaps(mask):
    if bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise Unsupported("the mask is token != PAD: a gap in it would be a PAD inside the answer, which ends it")


def _row(response, fill=window.POISON):
    return window.embed(torch, response, BEFORE, 0, fill)


def _prompts(mask):
    return torch.full((len(mask), PROMPT), TEXT, device=mask.device)


def token_logprobs(logits, tokens, *, temperature):
    if temperature != 1:
        raise Unsupported("DeepSpeed-Chat takes log-probs of the raw logits, whatever the temperature")
    return _module().gather_log_probs(logits[:, :-1], tokens[:, 1:])


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip):
    return _trainer(cliprange=clip).actor_loss_fn(logprobs, old_logprobs, advantages, mask)


def value_loss(values, old_values, returns, mask, *, clip):
    return _trainer(cliprange_value=clip).critic_loss_fn(values, old_values, returns, mask)


def shaped_rewards(logprobs, ref_logprobs, scores, mask, *, kl_coef, score_clip=float("inf")):
    _no_gaps(mask)
    trainer = _trainer(kl_ctl=kl_coef, clip_reward_value=score_clip)
    full = _row(logprobs, -7.0), _row(ref_logprobs, -3.0), scores, _row(mask, 1)
    return window.cut(trainer.compute_rewards(_prompts(mask), *full), BEFORE, mask.shape[1])


def gae(rewards, values, mask, *, gamma, lam):
    _no_gaps(mask)
    trainer = _trainer(gamma=gamma, lam=lam)
    # train_rlhf zeroes both behind a row's end: `old_rewards[i, ends[i]:] = 0`, `old_values[i, ends[i]:] = 0`
    values, rewards = (_row(torch.where(mask.bool(), array, 0)) for array in (values, rewards))
    advantages, returns = trainer.get_advantages_and_returns(values, rewards, BEFORE)
    return {"advantages": advantages, "returns": returns}


class _Done(BaseException):
    """Leaves train_rlhf() once advantages are known."""


def experience(logprobs, ref_logprobs, values, scores, mask, *, kl_coef, gamma, lam, score_clip=float("inf")):
    _no_gaps(mask)
    trainer = _trainer(kl_ctl=kl_coef, clip_reward_value=score_clip, gamma=gamma, lam=lam)
    compute, seen = trainer.get_advantages_and_returns, {}

    def observe(values, rewards, start):
        advantages, returns = compute(values, rewards, start)
        seen.update(rewards=rewards[:, start:], advantages=advantages, returns=returns)
        raise _Done

    trainer.get_advantages_and_returns = observe
    attention = torch.cat([torch.ones_like(mask[:, :1]), _row(mask, 1)], dim=1)
    batch = {
        "prompts": _prompts(mask),
        "logprobs": _row(logprobs, -7.0),
        "ref_logprobs": _row(ref_logprobs, -3.0),
        "rewards": scores,
        "value": _row(values),
        "attention_mask": attention,
        "input_ids": torch.where(attention.bool(), TEXT, PAD),
    }
    try:
        trainer.train_rlhf(batch)
    except _Done:
        return seen
    raise Unsupported("train_rlhf() computed no advantages; this adapter does not know its shape")


def _reward_model(token_scores, pad_id):
    """A RewardModel whose transformer answers with the given scores and whose head passes them on."""
    home = importlib.import_module("dschat.utils.model.reward_model")
    model = object.__new__(home.RewardModel)
    torch.nn.Module.__init__(model)
    model.config, model.PAD_ID = SimpleNamespace(model_type="llama"), pad_id
    model.num_padding_at_beginning, model.compute_fp32_loss = 0, False
    model.rwtransformer = lambda *_, **__: (token_scores.unsqueeze(-1),)
    model.v_head = torch.nn.Identity()
    return model


def reward_model_token_loss(chosen, rejected, chosen_tokens, rejected_tokens, *, pad_id):
    if bool((chosen_tokens[:, 0] != rejected_tokens[:, 0]).any()):
        raise Unsupported("RewardModel.forward asserts that the answers of a pair share their first token, the prompt's")
    tokens = torch.cat([chosen_tokens, rejected_tokens])
    return _reward_model(torch.cat([chosen, rejected]), pad_id).forward(tokens)["loss"]


def end_score(token_scores, attention_mask):
    # PADs up to here stand in front of prompts; the smallest prompt that forward_value accepts has two tokens
    prompt = max(2, int(attention_mask.argmax(1).max()))
    answer = attention_mask[:, prompt:]
    if bool((answer[:, 1:] > answer[:, :-1]).any()) or not bool(attention_mask[:, prompt - 1 :].any(1).all()):
        raise Unsupported("forward_value takes the first PAD of the answer for its end: this mask cannot be expressed")
    tokens = torch.where(attention_mask.bool(), TEXT, PAD)
    return _reward_model(token_scores, PAD).forward_value(tokens, prompt_length=prompt)["chosen_end_scores"]


def _dpo_script(path: Path):
    """Imports the DPO training script under the name in SOURCES; without it the op is not offered."""
    spec = importlib.util.spec_from_file_location("step2_dpo_finetuning_main", path)
    assert spec is not None and spec.loader is not None  # the path ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        _statements(module.main, "logits", "loss")
    except (ImportError, FileNotFoundError, LookupError):
        return
    sys.modules[spec.name] = module


def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta, label_smoothing=0.0):
    """Runs the statements of the script's main() from the DPO logits to the loss, on given log-probs."""
    script = sys.modules.get("step2_dpo_finetuning_main")
    if script is None:
        raise Unsupported("the checkout has no DPO script that imports and whose shape this adapter knows")
    names = {
        "chosen_logps": policy_chosen,
        "rejected_logps": policy_rejected,
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
        "args": SimpleNamespace(beta=beta, label_smoothing=label_smoothing),
    }
    code = compile(_statements(script.main, "logits", "loss"), script.__file__, "exec")
    exec(code, vars(script) | names, names)
    return names["loss"]


def _statements(function, first, last) -> ast.Module:
    """The statements of a function's source between the assignments to two names, both included."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        body = getattr(node, "body", None)
        body = body if isinstance(body, list) else []
        targets = [ast.unparse(line.targets[0]) if isinstance(line, ast.Assign) else "" for line in body]
        if first in targets and last in targets:
            return ast.Module(body[targets.index(first) : targets.index(last) + 1], type_ignores=[])
    raise LookupError(f"no assignments to {first} and {last} in {function.__qualname__}")
