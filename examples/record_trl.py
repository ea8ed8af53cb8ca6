"""Records one step of TRL's PPOTrainer for `goldenppo audit`.

    python examples/record_trl.py step.safetensors
    goldenppo audit step.safetensors

The real `PPOTrainer.train()` of TRL 1.12.0 runs one batch on the CPU, with GPT-2 models of one layer and random weights: it
generates, scores, shapes rewards, runs GAE and makes four passes over the batch. Its arithmetic stands in local variables of
train(). Whoever owns a copy of the trainer pastes the body of `record_step` into it; here the same variables are read from
train()'s frame at the end of its `with accelerator.accumulate(model)` block. Nothing is computed here.
"""

import os
import random
import sys
import tempfile
from types import SimpleNamespace

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl.experimental.ppo import PPOConfig, PPOTrainer

from goldenppo.conformance import Recorder

VOCABULARY = 24


def main(path: str, micro_batches: int = 1) -> None:
    """Trains one step and records it.

    Args:
        path: where the dump goes.
        micro_batches: how many the batch is split into. Of one, the last of four passes is recorded, when the policy has moved
            away from the one that sampled; of more, one pass, since TRL reports a mean over passes.
    """
    trainer = make_trainer(micro_batches, passes=4 if micro_batches == 1 else 1)
    recorder = Recorder(
        path,
        gamma=trainer.args.gamma,
        lam=trainer.args.lam,
        kl_coef=trainer.args.kl_coef,
        clip=trainer.args.cliprange,
        value_clip=trainer.args.cliprange_value,
        vf_coef=trainer.args.vf_coef,
        temperature=1.0,  # the logits are recorded after their division
    )
    trainer.accelerator.accumulate = Watched(trainer.accelerator.accumulate, lambda frame: record_step(recorder, frame))
    trainer.train()
    if micro_batches > 1:
        recorder.record(policy_loss=trainer.state.log_history[-1]["loss/policy_avg"])
    print(f"wrote {recorder.save()}; now run: goldenppo audit {path}")


def record_step(recorder: Recorder, frame: dict) -> None:
    """Records the local variables of train() as they are at the end of a micro-batch.

    Inside train() this is `recorder.record(old_logprobs=mb_logprobs, …)`. The rows of a batch are shuffled in each pass, so
    what belongs to a whole batch is taken in the order of the micro-batch.
    """
    here = SimpleNamespace(**frame)
    if here.ppo_epoch_idx < here.args.num_ppo_epochs - 1:
        return
    rows = here.micro_batch_inds
    recorder.record(  # made before the passes, once per batch
        mask=~here.padding_mask[rows],
        value_mask=~here.padding_mask_p1[rows],  # one position more: the state after the last token
        tokens=here.mb_responses,
        old_logprobs=here.mb_logprobs,
        ref_logprobs=here.ref_logprobs[rows],
        old_values=here.mb_values,
        scores=here.scores[rows],
        kl=here.kl[rows],
        rewards=here.rewards[rows],
        advantages=here.mb_advantage,
        returns=here.mb_return,
    )
    recorder.record(  # made in this micro-batch
        logits=here.logits,
        logprobs=here.new_logprobs,
        token_entropy=here.entropy,
        values=here.vpred,
        ratio=here.ratio,
    )
    if here.args.gradient_accumulation_steps == 1:
        recorder.record(
            policy_loss=here.pg_loss,
            clip_fraction=here.pg_clipfrac,
            approx_kl=here.approxkl,
            value_loss=here.vf_loss,
            value_clip_fraction=here.vf_clipfrac,
            loss=here.loss,
        )
    else:
        recorder.record(micro_policy_loss=here.pg_loss, micro_tokens=(~here.padding_mask[rows]).sum(), micro_rows=len(rows))


class Watched:
    """A context manager around another one, which shows the frame that it was used in when it is left."""

    def __init__(self, make, show):
        self.make, self.show = make, show

    def __call__(self, *arguments):
        self.inner = self.make(*arguments)
        return self

    def __enter__(self):
        return self.inner.__enter__()

    def __exit__(self, kind, *rest):
        if kind is None:
            self.show(sys._getframe(1).f_locals)
        return self.inner.__exit__(kind, *rest)


def make_trainer(micro_batches: int, passes: int) -> PPOTrainer:
    """The trainer with four models of one layer and random weights, and prompts of different lengths."""
    torch.manual_seed(3)
    text = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    words = Tokenizer(models.WordLevel(text, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left")
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    draw, rows = random.Random(0), 6
    prompts = [" ".join(f"w{draw.randrange(2, VOCABULARY)}" for _ in range(draw.randrange(2, 5))) for _ in range(rows)]
    scratch = tempfile.mkdtemp()
    settings = PPOConfig(
        output_dir=scratch,
        per_device_train_batch_size=rows // micro_batches,
        gradient_accumulation_steps=micro_batches,
        num_mini_batches=1,
        num_ppo_epochs=passes,
        total_episodes=rows,
        response_length=8,
        stop_token="eos",
        temperature=0.7,
        missing_eos_penalty=None,
        learning_rate=0.02,
        kl_coef=0.05,
        gamma=0.99,
        lam=0.9,
        num_sample_generations=0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    return PPOTrainer(
        args=settings,
        processing_class=tokenizer,
        model=GPT2LMHeadModel(config),
        ref_model=GPT2LMHeadModel(config),
        reward_model=GPT2ForSequenceClassification(config),
        value_model=GPT2ForSequenceClassification(config),
        train_dataset=Dataset.from_list([dict(tokenizer(prompt)) for prompt in prompts]),
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "trl.safetensors", int(sys.argv[2]) if len(sys.argv) > 2 else 1)
