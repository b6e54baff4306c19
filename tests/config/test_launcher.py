"""The options of `accelerate launch` have the effect on `TrainingArguments` that they have in transformers."""

from __future__ import annotations

from typing import Any

import pytest

from onstep import TrainingArguments
from onstep.config import args_to_config
from onstep.errors import ConfigError


@pytest.mark.parametrize(
    ("variables", "given", "expected"),
    [
        ({"MIXED_PRECISION": "no", "DYNAMO_BACKEND": "NO", "USE_CPU": "False"}, {}, {"mixed_precision": None}),
        ({"MIXED_PRECISION": "bf16"}, {}, {"mixed_precision": "bf16"}),
        ({"MIXED_PRECISION": "bf16"}, {"fp16": True}, {"mixed_precision": None, "fp16": True}),
        ({"USE_CPU": "true"}, {}, {"use_cpu": True}),
        ({"USE_CPU": "True"}, {"use_cpu": False}, {"use_cpu": True}),
        (
            {"DYNAMO_BACKEND": "INDUCTOR", "DYNAMO_MODE": "default", "DYNAMO_USE_FULLGRAPH": "False"},
            {},
            {"torch_compile": True, "torch_compile_backend": "inductor", "torch_compile_mode": None},
        ),
        (
            {"DYNAMO_BACKEND": "INDUCTOR", "DYNAMO_MODE": "max-autotune"},
            {"torch_compile_backend": "eager"},
            {"torch_compile_backend": "eager", "torch_compile_mode": "max-autotune"},
        ),
    ],
)
def test_the_launcher_decides_what_the_arguments_leave_open(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    args = TrainingArguments(**given)
    assert {name: getattr(args, name) for name in expected} == expected


def test_half_precision_of_the_launcher_reaches_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert args_to_config(TrainingArguments()).mixed_precision == "bf16_mixed"


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("USE_FSDP", "true", r"fsdp_config\['version'\]='1' must be 2: .* fully_shard"),
        ("USE_DEEPSPEED", "True", "USE_DEEPSPEED=True, not supported"),
        ("DYNAMO_USE_FULLGRAPH", "True", "torch_compile_backend"),
        ("MIXED_PRECISION", "fp8", "must be one of no, bf16, fp16, got 'fp8'"),
    ],
)
def test_an_option_without_effect_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, rule: str
) -> None:
    monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    with pytest.raises(ConfigError, match=rule):
        TrainingArguments()
