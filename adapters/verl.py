"""verl, 0.3 to 0.9: its own core_algos, torch_functional, ray_trainer and, from 0.8 on, FSDP engine functions.

verl multiplies by masks, so masks are floats; a boolean one would fail in `1 - mask`. Two of its settings have no off
switch and are therefore parameters that a case must give: the dual clip (clip_ratio_c, 3 by default; 0.3 has none) and the
clip of the critic (cliprange_value). Advantages come whitened; returns are not.
"""

import importlib
import inspect
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

from goldenppo.adapters import Unsupported

try:
    VERSION = metadata.version("verl")
    RELEASE = tuple(int(part) for part in VERSION.split(".")[:2])
    ENGINE = RELEASE >= (0, 8)  # the engine workers took the place of dp_actor and dp_critic
    import numpy
    import torch
    from verl import DataProto
    from verl.trainer.ppo import core_algos, ray_trainer
    from verl.utils import torch_functional

    reward_manager = importlib.import_module(
        "verl.experimental.reward_loop.reward_manager.base" if ENGINE else "verl.workers.reward_manager.naive"
    )
    engines = importlib.import_module("verl.workers.engine.fsdp.transformer_impl") if ENGINE else None
    losses = importlib.import_module("verl.workers.utils.losses") if ENGINE else None
    tensordict_utils = importlib.import_module("verl.utils.tensordict_utils") if ENGINE else None
except (ImportError, metadata.PackageNotFoundError) as missing:
    raise Unsupported(
        f"verl is not importable here ({missing}); pip install 'verl==0.9.1' cachetools fastapi uvicorn, "
        "or name an environment that has it: --python ENV/bin/python"
    ) from None

if RELEASE < (0, 3):
    raise Unsupported(f"verl {VERSION} is older than what this adapter knows, 0.3 to 0.9: pip install 'verl==0.9.1'")

NAME = "verl"
KNOWN_VERSIONS = ["0.3.0.post1", "0.5.0", "0.6.1", "0.7.0", "0.8.0", "0.9.1"]
MASK = "float"
_policy = "compute_policy_loss_vanilla" if hasattr(core_algos, "compute_policy_loss_vanilla") else "compute_policy_loss"
_engine = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"
_place = "base:RewardManagerBase.assemble_rm_scores" if ENGINE else "naive:NaiveRewardManager.__call__"
SOURCES = {
    "policy_loss": f"verl.trainer.ppo.core_algos:{_policy}",
    "value_loss": "verl.trainer.ppo.core_algos:compute_value_loss",
    "kl_penalty": "verl.trainer.ppo.core_algos:kl_penalty",
    "shaped_rewards": [
        "verl.trainer.ppo.ray_trainer:apply_kl_penalty",
        f"{reward_manager.__name__.rpartition('.')[0]}.{_place}",
    ],
    "gae": "verl.trainer.ppo.core_algos:compute_gae_advantage_return",
    "whiten": "verl.utils.torch_functional:masked_whiten",
    "experience": ["verl.trainer.ppo.ray_trainer:apply_kl_penalty", "verl.trainer.ppo.ray_trainer:compute_advantage"],
    "aggregate": "verl.trainer.ppo.core_algos:agg_loss" if RELEASE > (0, 3) else "verl.utils.torch_functional:masked_mean",
    "kl_controller": "verl.trainer.ppo.core_algos:AdaptiveKLController.update",
}
if ENGINE:
    SOURCES |= {
        "token_logprobs": [f"{_engine}WithLMHead.prepare_model_inputs", f"{_engine}WithLMHead.prepare_model_outputs"],
        "entropy": [f"{_engine}WithLMHead.prepare_model_outputs", "verl.utils.torch_functional:entropy_from_logits"],
        "accumulated_policy_loss": [
            f"{_engine}.forward_backward_batch",
            "verl.workers.utils.losses:ppo_loss",
            "verl.trainer.ppo.core_algos:agg_loss",
        ],
        "accumulated_value_loss": [
            f"{_engine}.forward_backward_batch",
            "verl.workers.utils.losses:value_loss",
            "verl.trainer.ppo.core_algos:agg_loss",
        ],
    }
else:
    SOURCES |= {
        "token_logprobs": "verl.utils.torch_functional:log_probs_from_logits_response",
        "entropy": "verl.utils.torch_functional:entropy_from_logits",
    }

_AGGREGATIONS = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
_ESTIMATORS = {"k1": "kl", "abs": "abs", "k2": "mse", "k3": "low_var_kl"}


def token_logprobs(logits, tokens, *, temperature):
    if ENGINE:
        return _forward(logits, tokens, temperature)["log_probs"].values().view(tokens.shape)[:, :-1]
    _check_temperature(temperature)
    return torch_functional.log_probs_from_logits_response(tokens, logits, tokens.shape[1] - 1)


def entropy(logits, *, temperature):
    if not ENGINE:
        _check_temperature(temperature)
        return torch_functional.entropy_from_logits(logits)
    tokens = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
    return _forward(logits, tokens, temperature)["entropy"].values().view(tokens.shape)


def _check_temperature(temperature):
    if temperature != 1:
        raise Unsupported(f"the actor of verl {VERSION} divides the logits by the temperature before it calls this function")


def policy_loss(
    logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip=None, horizon=None, aggregation="token_mean"
):
    arrays, mode = (old_logprobs, logprobs, advantages, mask), _mode(aggregation)
    if RELEASE == (0, 3):
        if dual_clip is not None or clip_low != clip_high:
            raise Unsupported(f"verl {VERSION} has one clip for both sides and no dual clip")
        loss, fraction, kl = core_algos.compute_policy_loss(*arrays, clip_low)
        return {"loss": loss, "clip_fraction": fraction, "approx_kl": kl}
    if dual_clip is None:
        raise Unsupported(f"the dual clip of verl {VERSION} cannot be switched off; the case has none")
    if _policy == "compute_policy_loss":
        clips = {"cliprange_low": clip_low, "cliprange_high": clip_high, "clip_ratio_c": dual_clip}
        arrays = _as_wide_as(horizon, aggregation, arrays)
        loss, fraction, kl, _ = core_algos.compute_policy_loss(*arrays, loss_agg_mode=mode, **clips)
        return {"loss": loss, "clip_fraction": fraction, "approx_kl": kl}
    config = _actor(clip_low, clip_high, dual_clip)
    if hasattr(config, "global_batch_info"):
        config.global_batch_info["loss_scale_factor"] = horizon
    else:
        arrays = _as_wide_as(horizon, aggregation, arrays)
    loss, metrics = core_algos.compute_policy_loss_vanilla(*arrays, loss_agg_mode=mode, config=config)
    return {"loss": loss, "clip_fraction": metrics["actor/pg_clipfrac"], "approx_kl": metrics["actor/ppo_kl"]}


def value_loss(values, old_values, returns, mask, *, clip, horizon=None, aggregation="token_mean"):
    arrays, settings = _reduced(core_algos.compute_value_loss, (values, returns, old_values, mask), horizon, aggregation)
    loss, fraction = core_algos.compute_value_loss(*arrays, clip, **settings)
    return {"loss": loss, "clip_fraction": fraction}


def _reduced(function, arrays, horizon, aggregation):
    """What a function of core_algos is given for an aggregation: arrays [B, T], and its settings in this version."""
    settings = {"loss_agg_mode": _mode(aggregation), "loss_scale_factor": horizon}
    known = inspect.signature(function).parameters
    if "loss_scale_factor" not in known:
        arrays = _as_wide_as(horizon, aggregation, arrays)
    return arrays, {name: value for name, value in settings.items() if name in known}


def _as_wide_as(horizon, aggregation, arrays):
    """Arrays [B, T] padded to the width by which verl divides where it takes no loss_scale_factor: the horizon."""
    if aggregation != "seq_mean_token_sum_norm":
        return arrays
    return tuple(torch.nn.functional.pad(array, (0, horizon - array.shape[1])) for array in arrays)


def accumulated_policy_loss(parts, *, clip_low, clip_high, dual_clip, horizon, aggregation):
    _check_loop()
    config = _actor(clip_low, clip_high, dual_clip, loss_agg_mode=_mode(aggregation), loss_scale_factor=horizon)
    return _accumulated(partial(losses.ppo_loss, config), parts, ("log_probs", "old_log_probs", "advantages"))


def accumulated_value_loss(parts, *, clip, horizon, aggregation):
    _check_loop()
    config = SimpleNamespace(cliprange_value=clip, loss_agg_mode=_mode(aggregation), loss_scale_factor=horizon)
    return _accumulated(partial(losses.value_loss, config), parts, ("values", "values", "returns"))


def _check_loop():
    if not ENGINE:
        raise Unsupported(f"the training loop of verl {VERSION} stands in its workers, which this adapter does not drive")


def kl_penalty(logprobs, ref_logprobs, *, estimator, clamp):
    if (estimator == "k3") != (clamp == 10):
        raise Unsupported("verl clamps k3 at 10 and no other estimator")
    return core_algos.kl_penalty(logprobs, ref_logprobs, _ESTIMATORS[estimator])


def shaped_rewards(logprobs, ref_logprobs, scores, mask, *, kl_coef, estimator):
    return _shaped(logprobs, ref_logprobs, scores, mask, kl_coef, estimator).batch["token_level_rewards"]


def gae(rewards, values, mask, *, gamma, lam):
    advantages, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    return {"advantages": advantages, "returns": returns}


def whiten(x, mask, *, mean):
    return torch_functional.masked_whiten(x, mask, shift_mean=mean == "removed")


def experience(logprobs, ref_logprobs, values, scores, mask, *, kl_coef, gamma, lam, estimator):
    data = _shaped(logprobs, ref_logprobs, scores, mask, kl_coef, estimator)
    data.batch["values"] = values
    config = {"config": {}} if RELEASE > (0, 3) else {}
    data = ray_trainer.compute_advantage(data, ray_trainer.AdvantageEstimator.GAE, gamma=gamma, lam=lam, **config)
    return {
        "rewards": data.batch["token_level_rewards"],
        "advantages": data.batch["advantages"],
        "returns": data.batch["returns"],
    }


def aggregate(x, mask, *, horizon=None, aggregation="token_mean"):
    if RELEASE == (0, 3):
        _mode(aggregation)
        return torch_functional.masked_mean(x, mask)
    arrays, settings = _reduced(core_algos.agg_loss, (x, mask), horizon, aggregation)
    return core_algos.agg_loss(*arrays, **settings)


def kl_controller(kl, *, init_coef, target, horizon, batch_size, controller):
    if controller == "fixed":
        keeper = core_algos.FixedKLController(init_coef)
    else:
        keeper = core_algos.AdaptiveKLController(init_coef, target, horizon)
    coefficients = []
    for observed in kl.tolist():
        keeper.update(observed, batch_size)
        coefficients.append(keeper.value)
    return torch.tensor(coefficients, dtype=kl.dtype, device=kl.device)


def _mode(aggregation: str) -> str:
    if aggregation not in _AGGREGATIONS:
        raise Unsupported("verl has no mean that reads no mask")
    if RELEASE == (0, 3) and aggregation != "token_mean":
        raise Unsupported(f"verl {VERSION} takes the mean over tokens and nothing else")
    if RELEASE < (0, 9) and aggregation == "token_sum":
        raise Unsupported(f"verl {VERSION} has no sum over tokens")
    return _AGGREGATIONS[aggregation]


def _actor(clip_low, clip_high, dual_clip, **settings):
    return importlib.import_module("verl.workers.config").FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=clip_low,
        clip_ratio_high=clip_high,
        clip_ratio_c=dual_clip,
        **settings,
    )


class _Engine(engines.FSDPEngineWithLMHead if ENGINE else object):  # type: ignore[misc]
    """The FSDP engine with given answers in the place of a model's: its loop over micro-batches is what runs."""

    def __init__(self, name: str, answers: list):
        self.name, self.answers = name, answers  # "log_probs" or "values"; a tensor per row, in the batch's order
        self.ulysses_sequence_parallel_size, self.ulysses_device_mesh = 1, None
        self.engine_config = SimpleNamespace(use_no_sync_for_gradient_accumulation=False)

    def forward_step(self, micro_batch, loss_function, forward_only):
        # The model's answer to position t-1 is about token t, so a row of n response tokens has its answers before the end.
        lengths = micro_batch["attention_mask"][:, 1:].sum(1).tolist()
        rows = zip(micro_batch["row"].tolist(), lengths, strict=True)
        flat = torch.cat([torch.nn.functional.pad(self.answers[row][:length], (0, 1)) for row, length in rows])
        loss, metrics = loss_function(model_output={self.name: flat}, data=micro_batch)
        return loss, {"loss": loss.detach().item(), "metrics": metrics}


def _accumulated(loss_function, parts, names):
    """One optimizer step through the engine's forward_backward_batch."""
    if len({len(part[0]) for part in parts}) > 1:
        raise Unsupported("verl's micro-batches of a fixed size hold equally many rows")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    answers = [row for part in parts for row in part[0]]
    old, target, mask = (torch.cat(column) for column in list(zip(*parts, strict=True))[1:])
    position = torch.arange(mask.shape[1], device=mask.device)
    attended = (mask.flip(1).cumsum(1).flip(1) > 0).long() * torch.ones_like(position)
    prompt = torch.ones(len(mask), 1, dtype=torch.long, device=mask.device)
    fields = {
        "prompts": prompt,
        "responses": torch.ones_like(attended),
        "attention_mask": torch.cat([prompt, attended], 1),
        "response_mask": mask,
        "loss_mask": mask,
        "row": torch.arange(len(mask)),
        names[1]: old,
        names[2]: target,
    }
    data = engines.TensorDict(fields, batch_size=[len(mask)])
    rows = len(mask) * torch.distributed.get_world_size()  # ray_trainer.py: the mini-batch size, rows without tokens included
    for name, value in {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": len(parts[0][0]),
        "global_batch_size": rows,
    }.items():
        tensordict_utils.assign_non_tensor_data(data, name, value)
    with mock.patch.object(engines, "get_device_id", lambda: mask.device):  # it knows accelerators only
        output = _Engine(names[0], answers).forward_backward_batch(data, loss_function)
    return torch.tensor(output["loss"], dtype=old.dtype).sum()  # as TrainingWorker._postprocess_output adds them


def _forward(logits, tokens, temperature):
    """What the FSDP engine makes of a language model's logits [B, L, V]; rows have no padding, as the engine wants them."""
    engine = object.__new__(engines.FSDPEngineWithLMHead)
    engine.pad_to_length, engine.use_ulysses_sp = None, False
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.compute_entropy_from_logits = torch_functional.entropy_from_logits
    rows = torch.nested.as_nested_tensor(list(tokens), layout=torch.jagged)
    batch = engines.TensorDict({"input_ids": rows, "position_ids": rows}, batch_size=[len(tokens)])
    tensordict_utils.assign_non_tensor_data(batch, "temperature", temperature)
    tensordict_utils.assign_non_tensor_data(batch, "calculate_entropy", True)
    _, arguments = engine.prepare_model_inputs(batch)
    answer = SimpleNamespace(logits=logits.flatten(0, 1).unsqueeze(0))
    return engine.prepare_model_outputs(answer, arguments, batch, None)


def _shaped(logprobs, ref_logprobs, scores, mask, kl_coef, estimator):
    """A batch as the trainer has it after apply_kl_penalty.

    The score is placed by the attention mask, which counts tool output inside a response, and the KL by the response mask.
    """
    position = torch.arange(mask.shape[1], device=mask.device)
    attended = (mask.flip(1).cumsum(1).flip(1) > 0).long() * torch.ones_like(position)
    prompt = torch.ones(len(mask), 1, dtype=torch.long, device=mask.device)
    if not bool(attended.any(1).all()):
        raise Unsupported("verl puts the score of an empty response in the last column")
    if RELEASE == (0, 3) and bool((attended != mask).any()):
        raise Unsupported(f"verl {VERSION} counts every attended token: a mask with gaps cannot be expressed")
    data = DataProto.from_single_dict(
        {
            "prompts": prompt,
            "responses": torch.ones_like(attended),
            "attention_mask": torch.cat([prompt, attended], 1),
            "response_mask": mask,
            "old_log_probs": logprobs,
            "ref_log_prob": ref_logprobs,
            **_rows(len(mask)),
        }
    )
    if ENGINE:
        placed = reward_manager.RewardManagerBase.assemble_rm_scores(data, scores.tolist())
    else:
        placed = reward_manager.NaiveRewardManager(_Tokenizer, 0, lambda ground_truth, **_: scores[ground_truth].item())(data)
    data.batch["token_level_scores"] = placed
    data, _ = ray_trainer.apply_kl_penalty(data, core_algos.FixedKLController(kl_coef), kl_penalty=_ESTIMATORS[estimator])
    return data


class _Tokenizer:
    """Reads nothing: a row's score is given."""

    decode = staticmethod(lambda *_, **__: "")


def _rows(count):
    """What the reward manager asks of each row: its number in the place of its ground truth."""
    column = {"data_source": "case", "extra_info": {}}
    rows = {name: [value] * count for name, value in column.items()} | {
        "reward_model": [{"ground_truth": n} for n in range(count)]
    }
    return {name: numpy.array([*values, None], dtype=object)[:-1] for name, values in rows.items()}
