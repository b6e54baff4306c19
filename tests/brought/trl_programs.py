"""TRL's own scripts, as its wheel has them."""

from __future__ import annotations

from collections.abc import Iterable

from tests.brought.programs import Program

COMMON = (
    "--use_cpu --seed 3 --train_sampling_strategy sequential --num_train_epochs 1 --learning_rate 1e-3 "
    "--per_device_train_batch_size 4 --logging_steps 2 --save_steps 5"
)
EVALUATED = "--eval_strategy steps --eval_steps 4"
LANGUAGE_MODEL = "--model_name_or_path {here}/model"
REWARD_MODEL = "--model_name_or_path {here}/rewards"
GENERATED = "--reward_funcs rewards.variety --num_generations 4 --max_completion_length 12"


def _script(name: str, script: str, *arguments: str, needs: Iterable[str] = (), ranks: int = 1) -> Program:
    words = " ".join((COMMON, *arguments)).split()
    return Program(name, ("-m", f"trl.scripts.{script}"), words, ranks=ranks, needs=("trl", *needs))


def _data(name: str) -> str:
    return f"--dataset_name {{here}}/{name}"


PROGRAMS = [
    _script("trl-sft", "sft", LANGUAGE_MODEL, _data("texts"), EVALUATED, "--gradient_accumulation_steps 2"),
    _script("trl-sft-float32", "sft", LANGUAGE_MODEL, _data("chats"), EVALUATED, "--bf16 False"),
    _script("trl-sft-packing", "sft", LANGUAGE_MODEL, _data("chats"), EVALUATED, "--packing --max_length 64"),
    _script("trl-sft-lora", "sft", LANGUAGE_MODEL, _data("chats"), EVALUATED, "--use_peft --lora_r 4", needs=["peft"]),
    _script("trl-dpo", "dpo", LANGUAGE_MODEL, _data("preferences"), EVALUATED, "--gradient_accumulation_steps 2"),
    _script("trl-dpo-lora", "dpo", LANGUAGE_MODEL, _data("preferences"), "--use_peft --lora_r 4", needs=["peft"]),
    _script("trl-kto", "kto", LANGUAGE_MODEL, _data("ratings"), EVALUATED, "--gradient_accumulation_steps 2"),
    _script("trl-reward", "reward", REWARD_MODEL, _data("preferences"), EVALUATED),
    _script("trl-grpo", "grpo", LANGUAGE_MODEL, _data("prompts"), GENERATED, "--gradient_accumulation_steps 2"),
    _script("trl-sft-ranks", "sft", LANGUAGE_MODEL, _data("texts"), "--gradient_accumulation_steps 2", ranks=2),
    _script("trl-dpo-ranks", "dpo", LANGUAGE_MODEL, _data("preferences"), EVALUATED, ranks=2),
]
