"""A trainer script in Forgather's form: every argument and callback of its page on trainer callbacks."""

import os
import sys
from functools import partial
from types import SimpleNamespace

import torch
from forgather.ml.trainer import Trainer
from forgather.ml.trainer.callbacks import (
    DefaultMetrics,
    DiLoCoCallback,
    DivergenceDetector,
    GradNormLogger,
    InfoCallback,
    JsonLogger,
    ParameterNormLogger,
    PeakMemory,
    ProfilerCallback,
    ProgressCallback,
    ResumableSummaryWriter,
    TBLogger,
    TextgenCallback,
    TrainerControlCallback,
    WeightNormLogger,
)
from forgather.ml.trainer.trainer_types import TrainerCallback
from loss import FusedLoss
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = "abcdefghijklmnopqrst"
STEPS, BATCH, ACCUMULATION, RATE = 8, 2, 2, 0.2


def make_tokenizer():
    words = {letter: index for index, letter in enumerate([*WORDS, "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


def make_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS) + 1, **sizes, **heads))


def make_rows(count=STEPS * BATCH * ACCUMULATION, length=12):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, len(WORDS), (length,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


class MyCallback(TrainerCallback):
    """The page: receives `args, state, control, **kwargs`, may return None or the control."""

    @property
    def name(self):
        return "my callback"

    def on_log_step(self, args, state, control, logs=None, **kwargs):
        logs["injected"] = state.global_step

    def on_train_metrics(self, args, state, control, loss=None, grad_norm=None, tokens=None, **kwargs):
        self.loss, self.tokens = loss, tokens

    def on_step_end(self, args, state, control, **kwargs):
        print(f"step {state.global_step} {float(self.loss):.9f} {int(self.tokens)}", flush=True)
        if state.global_step == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), 9)
        return control


def main(output_dir):
    logging_dir = os.path.join(output_dir, "logs")
    summary_writer = ResumableSummaryWriter(logging_dir)
    callbacks = [
        DefaultMetrics(peak_hardware_flops=1e12),
        ProgressCallback(
            use_tqdm=None,
            output_stream=None,
            step_columns={"mfu": None, "injected": {"label": "mine", "width": 6, "fmt": "d"}},
            final_metrics=None,
            header_interval=20,
        ),
        InfoCallback(),
        TrainerControlCallback(
            job_id="forgather", port=None, enable_http=None, host=None, auth_token=None, disable_auth=False
        ),
        DivergenceDetector(
            smoothing=0.3,
            threshold=1.0,
            relative_threshold=None,
            patience=3,
            warmup=10,
            action="abort",
            use_eval_loss=False,
            metric_key=None,
        ),
        JsonLogger(experiment="page"),
        summary_writer,
        TBLogger(summary_writer, scalars={"injected": {}, "grad-norm": None}, experiment_info={"name": "page"}),
        GradNormLogger(),
        ParameterNormLogger(log_norms=True, log_spectral_norms=True, power_iter_steps=10),
        WeightNormLogger(),
        PeakMemory(
            summary_writer=None,
            show_details=False,
            do_log=False,
            enable_memory_snapshot=False,
            file_prefix="memory_snapshot",
        ),
        TextgenCallback(summary_writer, ["abc", "de"], generation_config=None, generation_steps=None, max_new_tokens=5),
        ProfilerCallback(
            start_step=1,
            num_steps=1,
            output_dir=os.path.join(output_dir, "profiles"),
            with_stack=False,
            with_flops=True,
            record_shapes=True,
        ),
        DiLoCoCallback(),
        MyCallback(),
    ]
    rows = make_rows()
    trainer = Trainer(
        args={
            "output_dir": output_dir,
            "logging_dir": logging_dir,
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "gradient_accumulation_steps": ACCUMULATION,
            "num_train_epochs": 1,
            "max_steps": -1,
            "max_grad_norm": None,
            "logging_strategy": "steps",
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_strategy": "steps",
            "save_steps": 3,
            "save_total_limit": 2,
            "resume_from_checkpoint": True,
            "train_sampling_strategy": "sequential",
            "gradient_checkpointing": True,
            "use_cpu": True,
            "seed": 3,
        },
        model_init=make_model,
        train_dataset=rows,
        eval_dataset=rows[:4],
        processing_class=make_tokenizer(),
        data_collator=lambda batch: {key: torch.stack([row[key] for row in batch]) for key in batch[0]},
        callbacks=callbacks,
        distributed_env=SimpleNamespace(
            rank=0, local_rank=0, world_size=1, local_world_size=1, master_addr="localhost", master_port=29501
        ),
        optimizer_factory=partial(torch.optim.SGD, lr=RATE),
        lr_scheduler_factory=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        optimizer_groups=[("norm", {"lr": RATE / 2})],
        fused_loss_factory=FusedLoss,
        enable_activation_checkpoint_fn=lambda rank, module: module.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
