"""Records one step of OpenRLHF for `goldenppo audit`.

    python examples/record_openrlhf.py step.safetensors
    goldenppo audit step.safetensors

One PPO step of OpenRLHF 0.11.2 runs on the CPU in one process, with its own code throughout: its `Actor` and critic around
GPT-2 models of one layer with random weights, `RemoteExperienceMaker.make_experience_batch` (log-probs, KL, values, rewards,
GAE, whitening), its replay buffer, and `CriticPPOTrainer.ppo_train` and `ActorPPOTrainer.ppo_train` (losses and updates).
What needs GPUs is left out or replaced: Ray (the models are called directly), the rollout (prompts, responses and scores are
drawn at random), DeepSpeed (`Strategy` divides a loss by the number of micro-batches and calls backward and the optimizer, as
its engine does). No number that is recorded is computed here.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import transformers

from goldenppo.conformance import Recorder

LEFT_OUT = (
    "openrlhf.utils.deepspeed",
    "openrlhf.trainer.ray.launcher",
    "openrlhf.trainer.ray.vllm_engine",
    "openrlhf.utils.vlm_utils",
)
HEAVY = ("deepspeed", "ray", "peft", "flash_attn", "PIL", "pylatexenc", "word2number", "aiohttp", "vllm")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules in the place of packages that OpenRLHF imports and this step never calls: classes without content."""

    def __init__(self):
        self.absent = [name for name in HEAVY if importlib.util.find_spec(name) is None]

    def find_spec(self, name, path=None, target=None):
        if name.startswith("flash_attn.ops"):
            return None  # the log-probs are taken by torch then
        if name.startswith(LEFT_OUT) or name.partition(".")[0] in self.absent:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: type(name, (), {}) if name[0].isupper() else mock.MagicMock()
        return module

    def exec_module(self, module):
        """There is nothing to run."""


sys.meta_path.insert(0, StandIns())
from openrlhf.models import Actor
from openrlhf.models.model import _get_critic_model
from openrlhf.trainer.ppo_utils import Experience, FixedKLController, experience_maker
from openrlhf.trainer.ray import ppo_actor, ppo_critic

ROWS, VOCABULARY, PASSES = 6, 24, 3  # the last pass over the batch is recorded, when the policy has moved
PROMPTS, RESPONSES = (3, 4, 2, 4, 1, 4), (8, 5, 7, 1, 6, 3)  # tokens of each row


def main(path: str, micro_batches: int = 1) -> None:
    """Trains one step and records it.

    Args:
        path: where the dump goes.
        micro_batches: how many the batch is split into.
    """
    torch.manual_seed(0)
    strategy = Strategy(micro_batches)
    args = strategy.args
    recorder = Recorder(
        path,
        gamma=args.algo.advantage.gamma,
        lam=args.algo.advantage.lambd,
        kl_coef=args.algo.kl.init_coef,
        score_clip=args.reward.clip_range[1],
        clip=args.actor.eps_clip_low_high[0],
        dual_clip=args.actor.dual_clip,
        value_clip=args.critic.value_clip,
        entropy_coef=args.actor.entropy_coef,
        vf_coef=0.0,  # actor and critic are two models with a loss each
        temperature=1.0,  # the logits are recorded after their division
    )
    with (
        torch.compiler.set_stance("force_eager"),  # the entropy is compiled, which needs a C++ compiler
        mock.patch("torch.utils.data.dataloader.RandomSampler", lambda data, **_: range(len(data))),  # rows in one order
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None),
    ):
        step(recorder, strategy)
    print(f"wrote {recorder.save()}; now run: goldenppo audit {path}")


def step(recorder: Recorder, strategy: "Strategy") -> None:
    """What PPOTrainer does with a batch, once the rollout is there."""
    args, rows = strategy.args, ROWS // strategy.accumulated_gradient
    actor, reference, critic = make_actor(), make_actor(), make_critic()
    maker = experience_maker.RemoteExperienceMaker(
        Group(actor),
        Group(critic),
        None,
        Group(reference),
        FixedKLController(args.algo.kl.init_coef),
        strategy,
        SimpleNamespace(pad_token_id=0),
    )
    maker.get_advantages_and_returns = keep(maker.get_advantages_and_returns, partial(record_gae, recorder))
    with mock.patch.multiple(
        experience_maker,
        ray=SimpleNamespace(get=lambda answer: answer, put=lambda value: value),
        compute_approx_kl=keep(experience_maker.compute_approx_kl, partial(record_kl, recorder)),
        compute_reward=keep(experience_maker.compute_reward, partial(record_rewards, recorder)),
    ):
        (experience,) = maker.make_experience_batch(make_rollout())
    recorder.record(tokens=experience.sequences)

    optimizers = [torch.optim.Adam(model.parameters(), lr=0.02) for model in (actor, critic)]
    schedule = SimpleNamespace(get_last_lr=lambda: [0.02])
    trainers = (
        ppo_actor.ActorPPOTrainer(strategy, actor, None, optimizers[0], schedule, micro_train_batch_size=rows),
        ppo_critic.CriticPPOTrainer(strategy, critic, optimizers[1], schedule, rows, value_clip=args.critic.value_clip),
    )
    for trainer in trainers:
        trainer.dataloader_pin_memory = False
        trainer.replay_buffer.append(experience)
    with mock.patch.object(torch.cuda, "current_device", lambda: "cpu"):
        for passed in range(PASSES):
            if passed == PASSES - 1:
                actor.register_forward_hook(partial(record_actor, recorder))
                trainers[0].actor_loss_fn.register_forward_hook(partial(record_policy_loss, recorder), with_kwargs=True)
                trainers[1].critic_loss_fn.register_forward_hook(partial(record_value_loss, recorder), with_kwargs=True)
            reported = trainers[1].ppo_train() | trainers[0].ppo_train(args.algo.kl.init_coef)
    recorder.record(
        policy_loss=reported["policy_loss"], value_loss=reported["critic_loss"], mean_entropy=reported["entropy_loss"]
    )
    recorder.record(clip_fraction=reported["ppo_clip_ratio"], approx_kl=reported["ppo_kl"])


def record_kl(recorder: Recorder, kl: torch.Tensor, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, **_) -> None:
    """Records the KL; in OpenRLHF these lines stand in `make_experience`, behind `kl = compute_approx_kl(…)`."""
    recorder.record(kl=kl, ref_logprobs=ref_logprobs)


def record_rewards(recorder: Recorder, rewards: torch.Tensor, scores: torch.Tensor, *_, **__) -> None:
    """Records the shaped rewards; they stand in `compute_advantages_and_returns`, behind `reward = compute_reward(…)`."""
    recorder.record(rewards=rewards, scores=scores)


def record_gae(recorder: Recorder, answer: tuple, values: torch.Tensor, *_) -> None:
    """Records advantages before they are whitened, and returns; both are the next lines there."""
    raw_advantages, returns = answer
    recorder.record(old_values=values, raw_advantages=raw_advantages, returns=returns)


def record_actor(recorder: Recorder, _module, _arguments, answer: tuple) -> None:
    """Records what the actor answers in the update; it stands in `training_step`, behind `self.actor(…)`."""
    _, output = answer
    recorder.record(logits=output["logits"], token_entropy=output.entropy)


def record_policy_loss(recorder: Recorder, _module, arguments: tuple, named: dict, answer: tuple) -> None:
    """Records a micro-batch of the actor; it stands in `training_step`, behind `self.actor_loss_fn(…)`."""
    logprobs, old_logprobs, advantages = arguments
    mask = named["action_mask"]
    recorder.record(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    recorder.record(micro_policy_loss=answer[0], micro_tokens=mask.sum(), micro_rows=len(mask))


def record_value_loss(recorder: Recorder, _module, arguments: tuple, _named: dict, answer: torch.Tensor) -> None:
    """Records a micro-batch of the critic; it stands in its `training_step`, behind `self.critic_loss_fn(…)`."""
    recorder.record(values=arguments[0], micro_value_loss=answer)


def keep(function, show):
    """The function, with what it was given and what it answered shown to someone."""

    def kept(*arguments, **named):
        answer = function(*arguments, **named)
        show(answer, *arguments, **named)
        return answer

    return kept


class Group:
    """A model in the place of a group of Ray workers that hold it."""

    def __init__(self, model):
        self.model = model

    def async_run_method_batch(self, method_name, **lists):
        self.model.eval()
        return [[self.model(*values) for values in zip(*lists.values(), strict=True)]]


class Strategy:
    """What the trainers ask of DeepSpeed, for one process."""

    ring_attn_group = None

    def __init__(self, micro_batches: int):
        self.args, self.accumulated_gradient, self.steps = make_args(), micro_batches, {}

    def is_rank_0(self):
        return False

    def all_reduce(self, status):
        return status

    def get_grad_norm(self, model):
        return 0.0

    def backward(self, loss, model, optimizer):
        (loss / self.accumulated_gradient).backward()

    def optimizer_step(self, optimizer, model, scheduler, name):
        self.steps[name] = self.steps.get(name, 0) + 1
        if self.steps[name] % self.accumulated_gradient == 0:
            optimizer.step()
            optimizer.zero_grad()


def make_args() -> SimpleNamespace:
    """The part of OpenRLHF's arguments that the step reads."""
    space = SimpleNamespace
    correction = {"level": "off", "mode": "mask", "gating": "ratio", "threshold": (0.5, 5.0)}
    return space(
        actor=space(
            aux_loss_coef=0.0,
            eps_clip_low_high=[0.2, 0.2],
            dual_clip=None,
            loss_agg_mode="token-mean",
            policy_loss_type="ppo",
            entropy_coef=0.01,
        ),
        critic=space(value_clip=0.2),
        algo=space(
            advantage=space(
                estimator="gae",
                gamma=0.99,
                lambd=0.9,
                no_std_norm=False,
                **{f"is_correction_{name}": value for name, value in correction.items()},
            ),
            kl=space(use_loss=False, estimator="k1", init_coef=0.05),
        ),
        reward=space(clip_range=[-1.0, 1.0], overlong_buffer_len=None, stop_properly_penalty_coef=None),
        rollout=space(n_samples_per_prompt=1, micro_batch_size=ROWS),
        train=space(
            max_epochs=1,
            dynamic_batch_enable=False,
            colocate_all=False,
            colocate_actor_ref=False,
            colocate_critic_reward=False,
            async_enable=False,
        ),
        ds=space(packing_samples=False, ring_attn_size=1, tensor_parallel_size=1),
        vllm=space(sync_backend="gloo"),
    )


def make_config() -> transformers.GPT2Config:
    """GPT-2 of one layer."""
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=1, n_head=2, initializer_range=0.3, normalize_reward=False
    )


def make_actor() -> Actor:
    """OpenRLHF's actor around a model with random weights."""
    actor = Actor(transformers.GPT2LMHeadModel(make_config()), temperature=0.7)
    actor.packing_samples = False
    return without_dropout(actor)


def make_critic():
    """OpenRLHF's critic with random weights."""
    kind = _get_critic_model(transformers.GPT2PreTrainedModel, transformers.GPT2Model)
    return without_dropout(kind(make_config()))


def without_dropout(model):
    """The model; the ratio of a policy that has not moved is 1 then."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def make_rollout() -> list[Experience]:
    """One sample per row: a prompt and a response of random tokens, with a random score, as the samples generator leaves them."""
    samples = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        tokens = torch.randint(2, VOCABULARY, (1, prompt + response))
        action_mask = torch.arange(1, prompt + response)[None] >= prompt
        samples.append(
            Experience(
                sequences=tokens,
                attention_mask=torch.ones_like(tokens),
                action_mask=action_mask.long(),
                rewards=2 * torch.randn(1),
                total_length=torch.tensor([prompt + response]),
            )
        )
    return samples


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "openrlhf.safetensors", int(sys.argv[2]) if len(sys.argv) > 2 else 1)
