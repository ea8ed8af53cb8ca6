"""Records one step of verl for `goldenppo audit`.

    python examples/record_verl.py step.safetensors
    goldenppo audit step.safetensors

One PPO step of verl 0.9.1 runs on the CPU in one process: `TrainingWorker`s with verl's FSDP engine hold an actor, a
reference and a critic (Qwen2 of one layer, random weights), and `RayPPOTrainer` drives them through the methods that its
fit() calls: _compute_old_log_prob, _compute_ref_log_prob, _compute_values, apply_kl_penalty, compute_advantage,
_update_critic and _update_actor. What needs GPUs is left out or replaced: Ray (the workers are called directly), the
rollout (prompts, responses and scores are drawn at random), FlashAttention (the critic is loaded without it). Nothing is
computed here.
"""

import os
import sys
import tempfile
from functools import partial
from types import SimpleNamespace
from unittest import mock

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the name under which the FSDP engine is registered; it runs where the platform says

import torch
from transformers import AutoModelForTokenClassification, Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform


class Cpu(PlatformCUDA):
    """The CPU as a platform of verl."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        **{name: lambda: 0 for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")},
        mem_get_info=lambda: (0, 0),
        empty_cache=lambda: None,
        is_available=lambda: False,
        get_device_name=lambda: "cpu",
    )

    def current_device(self):
        return "cpu"


set_platform(Cpu())  # before anything asks for it

from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty, compute_advantage, compute_response_mask
from verl.workers.config import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine.fsdp import transformer_impl as engines
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import no_padding_2_padding

from goldenppo.conformance import Recorder

ROWS, PROMPT, RESPONSE, VOCABULARY, EPOCHS = 6, 4, 8, 24, 3  # the last epoch is recorded, when the policy has moved
GAMMA, LAM, KL_COEF = 0.99, 0.9, 0.05


def main(path: str, micro_batches: int = 1) -> None:
    """Trains one step and records it.

    Args:
        path: where the dump goes.
        micro_batches: how many the batch is split into.
    """
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    actor_config, critic_config = make_configs(ROWS // micro_batches)
    recorder = Recorder(
        path,
        gamma=GAMMA,
        lam=LAM,
        kl_coef=KL_COEF,
        clip=actor_config.clip_ratio_low,
        dual_clip=actor_config.clip_ratio_c,
        value_clip=critic_config.cliprange_value,
        entropy_coef=actor_config.entropy_coeff,
        vf_coef=0.0,  # actor and critic are two models with a loss each
        temperature=1.0,  # the logits are recorded after their division
    )
    step(recorder, actor_config, critic_config, ROWS // micro_batches)
    print(f"wrote {recorder.save()}; now run: goldenppo audit {path}")


def step(recorder: Recorder, actor_config, critic_config, micro: int) -> None:
    """What fit() does with a batch, once the rollout is there."""
    actor, reference = (make_worker("language_model", Qwen2ForCausalLM, micro) for _ in range(2))
    critic = make_worker("value_model", Qwen2ForTokenClassification, micro)
    trainer = object.__new__(RayPPOTrainer)
    vars(trainer).update(
        config=make_settings(actor_config, critic_config),
        ref_in_actor=False,
        actor_rollout_wg=SimpleNamespace(compute_log_prob=actor.infer_batch, update_actor=actor.train_mini_batch),
        ref_policy_wg=SimpleNamespace(compute_ref_log_prob=reference.infer_batch),
        critic_wg=SimpleNamespace(infer_batch=later(critic.infer_batch), train_mini_batch=later(critic.train_mini_batch)),
    )
    latest: dict = {}
    actor.set_loss_fn(Watched(partial(ppo_loss, actor_config), ROWS // micro, partial(record_actor, recorder, latest)))
    critic.set_loss_fn(Watched(partial(value_loss, critic_config), ROWS // micro, partial(record_critic, recorder)))

    batch = make_batch()
    scores = torch.randn(ROWS)
    old, _ = trainer._compute_old_log_prob(batch)
    batch = batch.union(old).union(trainer._compute_ref_log_prob(batch)).union(trainer._compute_values(batch))
    batch.batch["token_level_scores"] = RewardManagerBase.assemble_rm_scores(batch, scores.tolist())
    with mock.patch.object(core_algos, "kl_penalty", keep(core_algos.kl_penalty, partial(record_kl, recorder))):
        batch, _ = apply_kl_penalty(batch, core_algos.FixedKLController(KL_COEF), kl_penalty="kl")
    batch = compute_advantage(batch, core_algos.AdvantageEstimator.GAE, gamma=GAMMA, lam=LAM, config={})
    recorder.record(
        tokens=batch.batch["responses"],
        mask=batch.batch["response_mask"],
        old_logprobs=batch.batch["old_log_probs"],
        ref_logprobs=batch.batch["ref_log_prob"],
        old_values=batch.batch["values"],
        scores=scores,
        rewards=batch.batch["token_level_rewards"],
        advantages=batch.batch["advantages"],
        returns=batch.batch["returns"],
    )
    engines.logprobs_from_logits = keep(engines.logprobs_from_logits, partial(keep_logits, latest))
    critic_metrics = trainer._update_critic(batch).meta_info["metrics"]
    actor_metrics = trainer._update_actor(batch).meta_info["metrics"]
    recorder.record(  # one number per pass over the batch
        value_loss=critic_metrics["critic/vf_loss"][-1],
        policy_loss=actor_metrics["actor/pg_loss"][-1],
        mean_entropy=actor_metrics["actor/entropy_loss"][-1],
        loss=actor_metrics["actor/loss"][-1],
    )
    if micro == ROWS:  # otherwise these are means over micro-batches of different sizes
        recorder.record(
            clip_fraction=actor_metrics["actor/pg_clipfrac"][-1],
            approx_kl=actor_metrics["actor/ppo_kl"][-1],
            value_clip_fraction=critic_metrics["critic/vf_clipfrac"][-1],
        )


class Watched:
    """A loss function of verl that shows what it was given and what it answered in the last pass over the batch."""

    def __init__(self, loss_function, micro_batches: int, show):
        self.loss_function, self.show, self.skip = loss_function, show, micro_batches * (EPOCHS - 1)

    def __call__(self, model_output, data, dp_group=None):
        answer = self.loss_function(model_output=model_output, data=data, dp_group=dp_group)
        self.skip -= 1
        if self.skip < 0:
            self.show(model_output, data, answer)
        return answer


def record_kl(recorder: Recorder, kl: torch.Tensor, *_, **__) -> None:
    """Records the KL; in verl this line stands in `apply_kl_penalty`."""
    recorder.record(kl=kl)


def keep_logits(latest: dict, _logprobs: torch.Tensor, logits: torch.Tensor, **_) -> None:
    """Keeps the logits until the loss is made; in verl: behind the call of `logprobs_from_logits` in the engine."""
    latest["logits"] = logits


def record_actor(recorder: Recorder, latest: dict, model_output: dict, data, answer: tuple) -> None:
    """Records a micro-batch of the actor; in verl these lines stand at the end of `ppo_loss`.

    `no_padding_2_padding` is verl's: it cuts the response window out of the packed sequences.
    """
    _, metrics = answer
    recorder.record(
        logits=no_padding_2_padding(latest["logits"], data),
        logprobs=no_padding_2_padding(model_output["log_probs"], data),
        token_entropy=no_padding_2_padding(model_output["entropy"], data),
        micro_policy_loss=metrics["actor/pg_loss"].values[0],
        micro_tokens=data["response_mask"].sum(),
        micro_rows=len(data["response_mask"]),
    )


def record_critic(recorder: Recorder, model_output: dict, data, answer: tuple) -> None:
    """Records a micro-batch of the critic; in verl these lines stand at the end of `value_loss`."""
    recorder.record(values=no_padding_2_padding(model_output["values"], data), micro_value_loss=answer[0])


def make_worker(kind: str, model: type, micro: int) -> TrainingWorker:
    """A worker with verl's FSDP engine around a model of one layer with random weights."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        num_labels=1,
        architectures=[model.__name__],
    )
    with tempfile.TemporaryDirectory() as folder:  # verl loads models from folders
        model(config).save_pretrained(folder)
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type=kind,
                model_config=HFModelConfig(
                    path=folder,
                    load_tokenizer=False,
                    use_remove_padding=False,
                    enable_gradient_checkpointing=False,
                    override_config={"attn_implementation": "eager"},
                ),
                engine_config=FSDPEngineConfig(
                    strategy="fsdp2",
                    use_dynamic_bsz=False,
                    micro_batch_size_per_gpu=micro,
                    infer_micro_batch_size_per_gpu=micro,
                    use_torch_compile=False,
                    mixed_precision={"param_dtype": "fp32"},
                ),
                optimizer_config=FSDPOptimizerConfig(lr=0.02, total_training_steps=1),
                checkpoint_config=CheckpointConfig(),
            )
        )
        with mock.patch("verl.utils.model.load_valuehead_model", load_critic):
            worker.reset()
    return worker


def load_critic(local_path, torch_dtype, model_config, trust_remote_code):
    """As verl's own function, without FlashAttention."""
    return AutoModelForTokenClassification.from_pretrained(local_path, dtype=torch_dtype, config=model_config)


def make_batch() -> DataProto:
    """Prompts padded on the left, responses on the right, as a rollout leaves them."""
    lengths = torch.tensor([3, 4, 2, 4, 1, 4]), torch.tensor([8, 5, 7, 1, 8, 3])
    before = torch.arange(PROMPT) >= PROMPT - lengths[0][:, None]
    after = torch.arange(RESPONSE) < lengths[1][:, None]
    attended = torch.cat([before, after], 1).long()
    tokens = torch.randint(1, VOCABULARY, attended.shape) * attended
    batch = DataProto.from_single_dict(
        {
            "prompts": tokens[:, :PROMPT],
            "responses": tokens[:, PROMPT:],
            "input_ids": tokens,
            "attention_mask": attended,
            "position_ids": (attended.cumsum(1) - 1).clamp(min=0),
        }
    )
    batch.batch["response_mask"] = compute_response_mask(batch)
    batch.meta_info |= {"temperature": 0.7, "global_token_num": attended.sum(1).tolist()}
    return batch


def make_configs(micro: int):
    """verl's configurations of actor and critic."""
    shared = {"strategy": "fsdp2", "rollout_n": 1, "ppo_mini_batch_size": ROWS, "ppo_micro_batch_size_per_gpu": micro}
    actor = FSDPActorConfig(**shared, ppo_epochs=EPOCHS, calculate_entropy=True, entropy_coeff=0.01)
    return actor, FSDPCriticConfig(**shared, ppo_epochs=EPOCHS, shuffle=False, cliprange_value=0.2)


def make_settings(actor, critic) -> SimpleNamespace:
    """The part of verl's configuration tree that the driven methods read."""
    rollout = SimpleNamespace(n=1, temperature=0.7, multi_turn=SimpleNamespace(enable=False))
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor, rollout=rollout), critic=critic, get=lambda name: None)


def keep(function, show):
    """The function, with what it answered and what it was given shown to someone."""

    def kept(*arguments, **named):
        answer = function(*arguments, **named)
        show(answer, *arguments, **named)
        return answer

    return kept


def later(method):
    """A call of a Ray worker that does not block answers with a future."""
    return lambda data: SimpleNamespace(get=lambda: method(data))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "verl.safetensors", int(sys.argv[2]) if len(sys.argv) > 2 else 1)
