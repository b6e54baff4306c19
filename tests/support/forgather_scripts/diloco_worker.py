"""A DiLoCo worker script in Forgather's form: a Trainer with a callback; the environment names the server."""

import os
import sys

import torch
from forgather.ml.trainer import Trainer
from forgather.ml.trainer.callbacks import DiLoCoCallback, JsonLogger
from forgather.ml.trainer.trainer_types import TrainerCallback
from transformers import Qwen2Config, Qwen2ForCausalLM

RATE = 0.2


def make_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=21, **sizes, **heads))


def make_rows(count=400, length=12):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 20, (length,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(f"step {state.global_step}", flush=True)
        if state.global_step == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), 9)

    def on_save(self, args, state, control, **kwargs):
        print(f"saved {state.global_step}", flush=True)


def main(output_dir, max_steps):
    diloco = DiLoCoCallback(
        server_addr=None,
        sync_every=None,
        worker_id=None,
        bf16_comm=False,
        dylu=None,
        heartbeat_interval=0.05,
        num_fragments=None,
        timeout=600,
        max_sync_retries=3,
    )
    assert diloco.active
    trainer = Trainer(
        args={
            "output_dir": output_dir,
            "per_device_train_batch_size": 2,
            "max_steps": max_steps,
            "max_grad_norm": None,
            "logging_steps": 1,
            "save_steps": int(os.environ.get("SAVE_STEPS", "1000")),
            "train_sampling_strategy": "sequential",
            "use_cpu": True,
        },
        model=make_model(),
        train_dataset=make_rows(),
        data_collator=lambda batch: {key: torch.stack([row[key] for row in batch]) for key in batch[0]},
        callbacks=[diloco, JsonLogger(), Steps()],
        optimizer_factory=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        lr_scheduler_factory=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
    )
    trainer.train()
    torch.save({name: value.clone() for name, value in trainer.model.state_dict().items()}, f"{output_dir}/final.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
