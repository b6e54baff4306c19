"""Every configuration that cannot run is refused with value, rule and remedy before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from onstep import finetune, pretrain
from onstep.config import ConfigContainer, TrainingArguments, apply_overrides, validate
from onstep.errors import ConfigError


class Refused(NamedTuple):
    """What is changed about a run that works, and what its refusal says."""

    overrides: str
    """Joined by ` & `."""
    value: str
    """The key and the value, as the message begins or names them."""
    rule: str
    remedy: str


MOE = "model.num_moe_experts=4 & "
BIASED = MOE + "model.moe_router_enable_expert_bias=true & model.moe_router_score_function=sigmoid & "
SAMPLES = "train.train_iters=null & train.train_samples=80 & scheduler.lr_warmup_iters=0 & "
LORA = "peft.peft_scheme=lora"

IMPOSSIBLE_SIZES = [
    Refused("model.num_layers=0", "model.num_layers=0", "must be > 0", ""),
    Refused("model.hidden_size=130", "hidden_size=130", "even width", "change the number of heads"),
    Refused("model.hidden_size=33", "model.hidden_size=33", "multiple of num_attention_heads=2", "kv_channels"),
    Refused("model.num_query_groups=3", "num_attention_heads=2", "multiple of num_query_groups=3", "same number"),
    Refused("model.kv_channels=7", "a head is 7", "even width", "even model.kv_channels"),
    Refused("model.seq_length=64", "dataset.seq_length=32", "must be the same", "set both"),
    Refused("train.micro_batch_size=0", "train.micro_batch_size=0", "must be > 0", ""),
    Refused("train.global_batch_size=6", "train.global_batch_size=6", "multiple of micro_batch_size", "choose 4 or 8"),
    Refused("train.train_iters=0", "train.train_iters=0", "must be > 0", ""),
    Refused(MOE + "model.moe_router_topk=5", "moe_router_topk=5", "at most model.num_moe_experts=4", "lower it"),
    Refused(MOE + "model.moe_layer_freq=[1]", "moe_layer_freq=[1]", "each of the 2 layers", "an integer"),
    Refused(MOE + "model.moe_layer_freq=[0,0]", "moe_layer_freq=[0, 0]", "no layer with experts", "set a layer to 1"),
    Refused(BIASED + "model.moe_router_bias_update_rate=1e308", "bias_update_rate=1e+308", "from 0 to 1", ""),
    Refused("train.num_epochs=1e308 & train.train_iters=null", "num_epochs=1e+308", "at most 1,000,000,000", ""),
    Refused("model.mtp_num_layers=32", "mtp_num_layers=32", "below model.seq_length=32", "shorter sequence"),
    Refused("optimizer.muon_num_ns_steps=1000", "muon_num_ns_steps=1000", "from 1 to 99", "5 is usual"),
    Refused("ft.watchdog_seconds=0.5", "ft.watchdog_seconds=0.5", "at least 1", "choose more"),
    Refused("model.hidden_size=1000000000000", "model.hidden_size=1000000000000", "GiB of memory", "Lower"),
    Refused("model.vocab_size=9e18", "model.vocab_size=9000000000000000000", "GiB of memory", "Lower"),
    Refused(
        "model.seq_length=10000000000 & dataset.seq_length=10000000000", "seq_length=10000", "GiB of memory", "Lower"
    ),
    Refused("model.num_layers=1000000000", "model.num_layers=1000000000", "at most 10,000", ""),
    Refused("dataset.num_workers=100000", "dataset.num_workers=100000", "at most 1,024", ""),
    Refused("dataset.prefetch_factor=1000000000000000000", "dataset.prefetch_factor=1000", "at most 10,000", ""),
    Refused("ft.watchdog_seconds=1e18", "ft.watchdog_seconds=1e+18", "at most 31,536,000, a year", "or null"),
    Refused("ft.simulated_fault_base_delay=1e18", "simulated_fault_base_delay=1e+18", "31,536,000, a year", ""),
    Refused("nvrx_straggler.report_time_interval=1e18", "report_time_interval=1e+18", "31,536,000, a year", ""),
    Refused("train.data_timeout=1e18", "train.data_timeout=1e+18", "at most 31,536,000, a year", ""),
    Refused("train.exit_duration_in_mins=1e18", "train.exit_duration_in_mins=1e+18", "at most 525,600, a year", ""),
    Refused("ddp.bucket_cap_mb=1e20", "ddp.bucket_cap_mb=1e+20", "at most 1,000,000", ""),
    Refused("dist.device=cuda:99999999999999999999", "cuda:99999999999999999999", "n up to 127", ""),
    Refused("train.exit_signal=0", "train.exit_signal has '0'", "is not known", "Known: SIGHUP"),
    Refused("dist.distributed_timeout_minutes=1e18", "timeout_minutes=1e+18", "at most 525,600, a year", ""),
    Refused("peft.dropout=1.0", "peft.dropout=1.0", "below 1", ""),
]

RAMPUPS = [
    Refused("train.rampup_batch_size=[4,3,100]", "[4, 3, 100]", "8", ""),
    Refused("train.rampup_batch_size=[2,2,100]", "[2, 2, 100]", "multiple of micro_batch_size", "choose"),
    Refused("train.rampup_batch_size=[4,4]", "[4, 4]", "", ""),
    Refused("train.step_batch_size_schedule='0:4 100:16'", "ends at 16", "must end at train.global_batch", "same"),
    Refused("train.step_batch_size_schedule='5:8'", "5:8", "", ""),
]

BOTH_OF_TWO = [
    Refused("train.train_samples=100", "train.train_iters=8 and train.train_samples=100", "both lengths", "keep one"),
    Refused("train.num_epochs=1", "train.train_iters=8 and train.num_epochs=1.0", "both lengths", "keep one"),
    Refused(
        "train.rampup_batch_size=[4,4,100] & train.step_batch_size_schedule='0:4 100:8'",
        "train.rampup_batch_size and train.step_batch_size_schedule",
        "both ramp",
        "keep one",
    ),
    Refused("scheduler.lr_warmup_fraction=0.1", "given twice", "not both", "keep"),
    Refused("scheduler.lr_decay_samples=80", "lr_decay_samples=80", "does not fit a run", "lr_decay_iters"),
    Refused(
        "scheduler.override_opt_param_scheduler=true & scheduler.use_checkpoint_opt_param_scheduler=true",
        "override_opt_param_scheduler",
        "both true",
        "set one of them to false",
    ),
    Refused(
        "profiling.use_pytorch_profiler=true & profiling.use_nsys_profiler=true", "use_nsys", "one profiler", "to false"
    ),
    Refused(
        "checkpoint.finetune=true & checkpoint.pretrained_checkpoint=a & checkpoint.load=b",
        "pretrained_checkpoint=a and checkpoint.load=b",
        "both name the weights",
        "keep one",
    ),
    Refused(
        "model.position_embedding_type=none & model.rope_scaling={rope_type: linear, factor: 2.0}",
        "rope_scaling",
        "has none",
        "to null",
    ),
    Refused("dist.device=cpu & dist.distributed_backend=nccl", "nccl", "requires GPUs", "use gloo"),
]

SCHEDULES = [
    Refused("scheduler.lr_decay_style=WSD & scheduler.lr_wsd_decay_iters=9", "9 iterations", "longer", ""),
    Refused("scheduler.max_steps=5", "scheduler.max_steps=5", "at least the run's 8 steps", ""),
    Refused("optimizer.min_lr=1.0", "optimizer.min_lr=1.0", "at most optimizer.lr", ""),
    Refused(
        "scheduler.lr_decay_style=WSD & scheduler.lr_wsd_decay_iters=7",
        "scheduler.lr_wsd_decay_iters=7",
        "(8 iterations) has after the warm-up (2 iterations)",
        "at most 6",
    ),
    Refused(
        SAMPLES + "scheduler.lr_warmup_samples=20 & scheduler.lr_decay_style=WSD & scheduler.lr_wsd_decay_samples=61",
        "scheduler.lr_wsd_decay_samples=61",
        "(80 samples) has after the warm-up (20 samples)",
        "at most 60",
    ),
    Refused("scheduler.lr_warmup_init=1.0", "scheduler.lr_warmup_init=1.0", "at most optimizer.lr", "lower it"),
    Refused("optimizer.decoupled_min_lr=1.0", "1.0", "must not end above", "decoupled_min_lr"),
    Refused(
        "optimizer.decoupled_lr=1.0 & optimizer.param_groups=[{match: 'layers.*', lr_mult: 2.0}, "
        "{match: 'output.*', min_lr: 2.0, max_lr: 3.0}, {match: '*embedding*', max_lr: 0.5}] & "
        "optimizer.decoupled_min_lr=0.75",
        "optimizer.param_groups[2] (match='*embedding*')",
        "param_groups[2].max_lr=0.5 and optimizer.decoupled_min_lr=0.75",
        "set max_lr and min_lr in the entry",
    ),
    Refused("optimizer.decoupled_lr=1e-9", "1e-09", "must not end above", "decoupled_min_lr"),
]

ALONE_MEANINGLESS = [
    Refused("model.moe_aux_loss_coeff=0.1", "moe_aux_loss_coeff=0.1", "model.num_moe_experts is null", "set it"),
    Refused(MOE + "model.moe_shared_expert_gate=true", "moe_shared_expert_gate", "there is none", "to its width"),
    Refused(
        "dataset.weights=[1.0]", "dataset.weights=[1.0]", "has no effect with dataset.kind=text", "set dataset.kind"
    ),
    Refused("dataset.kind=chat & dataset.paths=[]", "dataset.paths=[]", "is empty", "requires JSONL"),
    Refused("tokenizer.tokenizer_type=huggingface", "tokenizer_type=huggingface", "requires tokenizer.", "the path of"),
    Refused("tokenizer.vocab_size=300", "tokenizer.vocab_size=300", "what tokenizer_type=bpe learns", "leave it"),
    Refused("env_vars={'A=B': c}", "env_vars has the name 'A=B'", "must not be empty or contain '='", ""),
    Refused("env_vars={'': c}", "env_vars has the name ''", "must not be empty", ""),
    Refused("checkpoint.finetune=true", "checkpoint.finetune=True", "requires weights", "set checkpoint.pretrained"),
    Refused(LORA, "peft.peft_scheme=lora", "none are given", "peft_scheme=null"),
    Refused(
        LORA + " & checkpoint.pretrained_checkpoint=a & peft.target_modules=[]",
        "target_modules=[]",
        "no layer",
        "or null",
    ),
    Refused("optimizer.param_groups=[{match: '*.bias'}]", "param_groups[0]", "sets nothing", "give it one of"),
    Refused("optimizer.param_groups=[{matches: x}]", "'matches'", "no key", "Did you mean 'match'"),
    Refused("train.iterations_to_skip=[0]", "holds 0", "counted from 1", "give 1 or more"),
    Refused("train.empty_unused_memory_level=3", "empty_unused_memory_level=3", "must be 0", "or 2"),
    Refused("ft.simulated_fault_rank=7", "simulated_fault_rank=7", "one of the ranks 0 to 0", "leave it null"),
    Refused("ft.calc_ft_timeouts=true", "calc_ft_timeouts=True", "no checkpoint directory", "set run.name"),
    Refused(
        "optimizer.muon_momentum=0.9", "muon_momentum=0.9", "has no effect with optimizer.optimizer=adam", "to muon"
    ),
    Refused("optimizer.optimizer=muonn", "'muonn'", "adam | sgd | muon", "Did you mean 'muon'"),
    Refused("model.normalization=layernorm", "'layernorm'", "RMSNorm | LayerNorm", "Did you mean 'LayerNorm'"),
]

TABLE = [*IMPOSSIBLE_SIZES, *RAMPUPS, *BOTH_OF_TWO, *SCHEDULES, *ALONE_MEANINGLESS]


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigContainer:
    """A run that works, in a directory of its own that is empty."""
    monkeypatch.chdir(tmp_path)
    tiny_config.run.output_dir, tiny_config.dataset.cache_dir = str(tmp_path / "runs"), str(tmp_path / "cache")
    tiny_config.train.global_batch_size = 8
    return tiny_config


def test_the_run_of_the_table_works(config: ConfigContainer) -> None:
    validate(config)


@pytest.mark.parametrize("refused", TABLE, ids=lambda refused: refused.overrides[:70])
def test_it_is_refused_before_anything_is_built(config: ConfigContainer, tmp_path: Path, refused: Refused) -> None:
    apply_overrides(config, refused.overrides.split(" & "))
    if "ft.calc_ft_timeouts" not in refused.overrides:
        config.run.name = "run"
    built: list[str] = []

    def build(chunks: list[object]) -> None:
        built.append("model")

    with pytest.raises(ConfigError) as raised:
        pretrain(config, pre_wrap_hooks=[build])
    message = str(raised.value)
    for part in (refused.value, refused.rule, refused.remedy):
        assert part in message
    assert built == []
    assert list(tmp_path.iterdir()) == []


def test_a_batch_is_judged_by_the_number_of_ranks(config: ConfigContainer) -> None:
    config.train.global_batch_size = 12
    validate(config, world_size=3)
    with pytest.raises(ConfigError, match=r"=12 must be a multiple of micro_batch_size \* ranks = 4 \* 2 = 8"):
        validate(config, world_size=2)


@pytest.mark.parametrize("start", [pretrain, finetune])
def test_arguments_of_the_other_door_are_named(start: Callable[..., object]) -> None:
    with pytest.raises(
        ConfigError, match=r"must be a ConfigContainer, got TrainingArguments; .* Trainer\(model, args\)"
    ):
        start(TrainingArguments(report_to=[]))


def test_fine_tuning_of_nothing_is_refused(config: ConfigContainer, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"finetune requires weights to start from; set checkpoint.pretrained_checkpoint"
    ):
        finetune(config)
    assert list(tmp_path.iterdir()) == []
