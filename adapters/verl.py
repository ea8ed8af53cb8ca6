"""verl: its own core_algos, torch_functional, ray_trainer and FSDP engine functions.

verl multiplies by masks, so masks are floats; a boolean one would fail in `1 - mask`. Two of its settings have no off
switch and are therefore parameters that a case must give: the dual clip (clip_ratio_c, 3 by default) and the clip of the
critic (cliprange_value). Advantages come whitened; returns are not.
"""

from functools import partial
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

from goldenppo.adapters import Unsupported

try:
    import torch
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager import base as reward_manager
    from verl.trainer.ppo import core_algos, ray_trainer
    from verl.utils import tensordict_utils, torch_functional
    from verl.workers.config import FSDPActorConfig
    from verl.workers.engine.fsdp import transformer_impl as engines
    from verl.workers.utils import losses
except ImportError as missing:
    raise Unsupported(
        f"verl is not importable here ({missing}); pip install 'verl==0.9.1' cachetools fastapi uvicorn, "
        "or name an environment that has it: --python ENV/bin/python"
    ) from None

NAME = "verl"
VERSION = metadata.version("verl")
KNOWN_VERSIONS = ["0.9.1"]
MASK = "float"
_ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
SOURCES = {
    "token_logprobs": [f"{_ENGINE}.prepare_model_inputs", f"{_ENGINE}.prepare_model_outputs"],
    "entropy": [f"{_ENGINE}.prepare_model_outputs", "verl.utils.torch_functional:entropy_from_logits"],
    "policy_loss": "verl.trainer.ppo.core_algos:compute_policy_loss_vanilla",
    "value_loss": "verl.trainer.ppo.core_algos:compute_value_loss",
    "accumulated_policy_loss": [
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.forward_backward_batch",
        "verl.workers.utils.losses:ppo_loss",
        "verl.trainer.ppo.core_algos:agg_loss",
    ],
    "accumulated_value_loss": [
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.forward_backward_batch",
        "verl.workers.utils.losses:value_loss",
        "verl.trainer.ppo.core_algos:agg_loss",
    ],
    "kl_penalty": "verl.trainer.ppo.core_algos:kl_penalty",
    "shaped_rewards": [
        "verl.trainer.ppo.ray_trainer:apply_kl_penalty",
        "verl.experimental.reward_loop.reward_manager.base:RewardManagerBase.assemble_rm_scores",
    ],
    "gae": "verl.trainer.ppo.core_algos:compute_gae_advantage_return",
    "whiten": "verl.utils.torch_functional:masked_whiten",
    "experience": ["verl.trainer.ppo.ray_trainer:apply_kl_penalty", "verl.trainer.ppo.ray_trainer:compute_advantage"],
    "aggregate": "verl.trainer.ppo.core_algos:agg_loss",
    "kl_controller": "verl.trainer.ppo.core_algos:AdaptiveKLController.update",
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
    return _forward(logits, tokens, temperature)["log_probs"].values().view(tokens.shape)[:, :-1]


def entropy(logits, *, temperature):
    tokens = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
    return _forward(logits, tokens, temperature)["entropy"].values().view(tokens.shape)


def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip, horizon, aggregation):
    config = _actor(clip_low, clip_high, dual_clip)
    config.global_batch_info["loss_scale_factor"] = horizon
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        old_logprobs, logprobs, advantages, mask, loss_agg_mode=_mode(aggregation), config=config
    )
    return {"loss": loss, "clip_fraction": metrics["actor/pg_clipfrac"], "approx_kl": metrics["actor/ppo_kl"]}


def value_loss(values, old_values, returns, mask, *, clip, horizon, aggregation):
    loss, fraction = core_algos.compute_value_loss(
        values, returns, old_values, mask, clip, loss_agg_mode=_mode(aggregation), loss_scale_factor=horizon
    )
    return {"loss": loss, "clip_fraction": fraction}


def accumulated_policy_loss(parts, *, clip_low, clip_high, dual_clip, horizon, aggregation):
    config = _actor(clip_low, clip_high, dual_clip, loss_agg_mode=_mode(aggregation), loss_scale_factor=horizon)
    return _accumulated(partial(losses.ppo_loss, config), parts, ("log_probs", "old_log_probs", "advantages"))


def accumulated_value_loss(parts, *, clip, horizon, aggregation):
    config = SimpleNamespace(cliprange_value=clip, loss_agg_mode=_mode(aggregation), loss_scale_factor=horizon)
    return _accumulated(partial(losses.value_loss, config), parts, ("values", "values", "returns"))


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
    data = ray_trainer.compute_advantage(data, core_algos.AdvantageEstimator.GAE, gamma=gamma, lam=lam, config={})
    return {
        "rewards": data.batch["token_level_rewards"],
        "advantages": data.batch["advantages"],
        "returns": data.batch["returns"],
    }


def aggregate(x, mask, *, horizon, aggregation):
    return core_algos.agg_loss(x, mask, _mode(aggregation), loss_scale_factor=horizon)


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
    return _AGGREGATIONS[aggregation]


def _actor(clip_low, clip_high, dual_clip, **settings):
    return FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=clip_low,
        clip_ratio_high=clip_high,
        clip_ratio_c=dual_clip,
        **settings,
    )


class _Engine(engines.FSDPEngineWithLMHead):
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
    data = DataProto.from_single_dict(
        {
            "prompts": prompt,
            "responses": torch.ones_like(attended),
            "attention_mask": torch.cat([prompt, attended], 1),
            "response_mask": mask,
            "old_log_probs": logprobs,
            "ref_log_prob": ref_logprobs,
        }
    )
    if not bool(attended.any(1).all()):
        raise Unsupported("verl puts the score of an empty response in the last column")
    placed = reward_manager.RewardManagerBase.assemble_rm_scores(data, scores.tolist())
    data.batch["token_level_scores"] = placed
    data, _ = ray_trainer.apply_kl_penalty(data, core_algos.FixedKLController(kl_coef), kl_penalty=_ESTIMATORS[estimator])
    return data
