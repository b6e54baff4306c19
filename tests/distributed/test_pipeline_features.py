"""What a model, a run and its data may have in one process, a pipeline has too, with the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.stage_feature_jobs"
DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
DOCUMENTS = ["dataset.reset_attention_mask=true"]
LEARNED = ["model.position_embedding_type=learned_absolute"]
DECAY = [
    "optimizer.weight_decay=0.1",
    "scheduler.start_weight_decay=0",
    "scheduler.end_weight_decay=0.2",
    "scheduler.weight_decay_incr_style=linear",
]
RAMP_UP = ["train.rampup_batch_size=[4,4,8]"]
LONG = ["model.seq_length=256", "dataset.seq_length=256", "train.micro_batch_size=1"]
TAIL = ["train.train_iters=null", "train.num_epochs=1", "train.drop_last=false", *LONG]
BF16, QK = "mixed_precision=bf16_mixed", "model.qk_layernorm=true"
FULL, SELECTIVE = "model.recompute_granularity=full", "model.recompute_granularity=selective"
LORA = ["checkpoint.pretrained_checkpoint=BASE", "peft.peft_scheme=lora", "peft.dim=4", "peft.dropout=0.1"]
COMPILED = ["train.torch_compile=true", "train.torch_compile_backend=aot_eager"]
MUON, LOGIT = "optimizer.optimizer=muon", "model.log_max_attention_logit=true"
EXPERTS = ["model.num_moe_experts=4", "model.moe_aux_loss_coeff=0.05", "model.moe_z_loss_coeff=0.001"]
BIAS = ["model.moe_router_enable_expert_bias=true", "model.moe_router_score_function=sigmoid"]
GLOBAL = ["model.moe_router_load_balancing_type=[seq_aux_loss,global_aux_loss]", "model.moe_aux_loss_coeff=[0.01,0.02]"]
SOME, MORE = "model.moe_layer_freq=[1,0,0,1]", "model.mtp_num_layers=2"
TIED = "model.share_embeddings_and_output_weights=true"
WATCHED = ["logger.timing_log_level=2", "straggler.log_straggler=true", "profiling.nvtx_ranges=true"]
ONE, V = "parallel.pipeline_schedule=1F1B", "parallel.pipeline_schedule=ZBVZeroBubble"
TWO = "parallel.virtual_pipeline_model_parallel_size=2"
TENSORS = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
SHARDS = ["parallel.data_parallel_shard_size=2"]
UPDATES = ["ddp.use_distributed_optimizer=true", "optimizer.use_distributed_optimizer=true"]
Row = tuple[list[str], str]


def trained(
    processes: Processes, directory: Path, rows: list[Row], ranks: int, *keys: str, name: str = ""
) -> list[dict[str, Any]]:
    """What each run found, the same on all ranks."""
    corpus = directory / "corpus"
    corpus.mkdir(exist_ok=True)
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    for number, paragraph in enumerate(text.split("\n\n")):
        (corpus / f"{number:03}.txt").write_text(paragraph)
    settings = {"corpus": str(corpus), "cache": str(directory / "cache"), "output": str(directory / "runs")}
    settings |= {"name": name or f"of-{ranks}", "steps": 4, "keys": [*keys], "rows": rows}
    [found, *others] = processes.results(JOBS, "runs", directory, settings, ranks=ranks)
    assert all(repr(other) == repr(found) for other in others)
    return list(found)


def check(
    processes: Processes, directory: Path, rows: list[Row], ranks: int = 2, *keys: str, stages: int | None = None
) -> None:
    """Losses, norms and evaluations are those of one process, and the run ends as there."""
    of_one = [([key for key in own if not key.startswith("parallel.")], trouble) for own, trouble in rows]
    single = trained(processes, directory, of_one, 1)
    size = f"parallel.pipeline_model_parallel_size={stages or ranks}"
    for row, there, one in zip(rows, trained(processes, directory, rows, ranks, size, *keys), single, strict=True):
        assert one["losses"], (row, one["end"])
        assert bool(one["texts"]) == bool(one["evaluated"]), row
        assert [there["end"], there["texts"]] == [one["end"], one["texts"]], row
        for name in ("losses", "norms", "evaluated", "logits", "experts"):
            assert there[name] == pytest.approx(one[name], rel=1e-5, nan_ok=True), (row, name)
        check_norms(there["of_parameters"], one["of_parameters"], row)


def check_norms(there: dict[str, float], one: dict[str, float], row: Row) -> None:
    """Callbacks have recorded the norms of all parameters, in the order of one process."""
    assert list(there) == list(one), row
    assert not one or any(" spectral_norms " in name or name.endswith(" all") for name in one), row
    for name, norm in one.items():  # matrices that are measured together decide how long a spectral norm is estimated
        within = 1e-2 if " spectral_norms " in name else 1e-3
        assert there[name] == pytest.approx(norm, rel=within, abs=1e-6, nan_ok=True), (row, name)


def test_what_one_process_trains_with_a_pipeline_does_too(processes: Processes, tmp_path: Path) -> None:
    """Dropout among documents, Muon; bfloat16, a ramp-up; an epoch's tail; experts and more tokens, NaN in one stage;
    LoRA of the first."""
    rows: list[Row] = [
        ([*DROPOUT, *DOCUMENTS, SELECTIVE, TWO, MUON, LOGIT], ""),
        ([*DROPOUT, *RAMP_UP, *LEARNED, BF16, QK, FULL, V], ""),
        ([*TAIL, *WATCHED], ""),
        (["train.on_nonfinite=skip", *DECAY, *EXPERTS, MORE], "nan"),
        ([*LORA, *DROPOUT], ""),
    ]
    check(processes, tmp_path, rows)
    told = (tmp_path / "rank-0.out").read_text()
    assert all(name in told for name in ("forward-compute", "backward-compute", "optimizer", "straggler"))


def test_features_that_need_more_than_a_schedule_gives_are_refused_by_name(
    processes: Processes, tmp_path: Path
) -> None:
    rows: list[Row] = [
        (["rerun_state_machine.rerun_mode=validate_results", TWO], ""),
        (["train.torch_compile=true", "train.torch_compile_backend=cudagraphs"], ""),
    ]
    found = trained(processes, tmp_path, rows, 2, "parallel.pipeline_model_parallel_size=2")
    need, remedy = (
        "requires a loss of each micro-batch on every rank, which the pipeline schedule",
        "or train without a",
    )
    for one, names in zip(found, (("rerun", "Interleaved1F1B"), ("cuda_graphs", "1F1B")), strict=True):
        assert one["end"].startswith(f"the feature {names[0]} {need} {names[1]} does not have; switch it off"), one
        assert remedy in one["end"]
        assert not one["losses"]


def test_all_ranks_generate_what_one_process_does(processes: Processes, tmp_path: Path) -> None:
    """Chosen and drawn tokens, beyond the window, with an end; in stages one after the other, interleaved, in a V."""
    dynamic = "model.rope_scaling={rope_type: dynamic, factor: 2.0}"
    check_generation(processes, tmp_path, [[ONE, *LEARNED], [TWO, dynamic], [V, TIED]], 2)


@pytest.mark.slow
def test_stages_of_families_and_divided_ones_generate_what_one_process_does(
    processes: Processes, tmp_path: Path
) -> None:
    """Those of transformers with the keys and values of their layers, some of them in a window."""
    families = ("llama", "gpt2", "qwen3", "mistral", "gemma2", "mixtral")
    check_generation(processes, tmp_path, [[TWO], [V]], 2, families=families)
    divided = [[TWO, *TENSORS], [V, TIED, *TENSORS], [TWO, *SHARDS], [V, *SHARDS], [ONE]]
    check_generation(processes, tmp_path, divided, 4, stages=2)


@pytest.mark.slow
def test_three_ranks_generate_what_one_process_does(processes: Processes, tmp_path: Path) -> None:
    check_generation(processes, tmp_path, [[ONE], [TWO], [V]], 3, "model.num_layers=6")


def check_generation(
    processes: Processes,
    directory: Path,
    rows: list[list[str]],
    ranks: int,
    *keys: str,
    stages: int | None = None,
    families: Sequence[str | None] = (None,),
) -> None:
    size = f"parallel.pipeline_model_parallel_size={stages or ranks}"
    own = [([size, *keys, *row], family) for family in families for row in rows]
    for found in processes.results(JOBS, "generation", directory, {"rows": own, "ranks": ranks}, ranks=ranks):
        assert [stages for stages, _ in found] == [whole for _, whole in found]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_each_feature_by_itself(processes: Processes, tmp_path: Path, part: int) -> None:
    alone = [DROPOUT, DOCUMENTS, LEARNED, DECAY, RAMP_UP, TAIL, [BF16], [QK], [FULL], [SELECTIVE]]
    alone += [[MUON, V], [LOGIT, V], COMPILED, [*COMPILED, V], [*LORA, V]]
    alone += [
        [*EXPERTS, V, FULL, *DROPOUT],
        [*EXPERTS, *BIAS, TWO],
        [*EXPERTS, *GLOBAL, SOME],
        [MORE, TIED],
        [MORE, *DROPOUT],
    ]
    check(processes, tmp_path, [([], ""), *((keys, "") for keys in alone[part::5])])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TENSORS, SHARDS, UPDATES], ids=["tensors", "shards", "updates"])
def test_divided_stages_train_what_one_process_does(processes: Processes, tmp_path: Path, layout: list[str]) -> None:
    features = [DOCUMENTS, [*LORA, "peft.dropout=0"], [*EXPERTS, *BIAS], [MORE], [MUON, V], [LOGIT, V], COMPILED]
    features += [[*EXPERTS, MORE, TWO], [MUON, TWO], [*COMPILED, TWO]]
    check(processes, tmp_path, [(keys, "") for keys in features], 4, *layout, stages=2)


@pytest.mark.slow
def test_three_ranks_drop_what_one_process_does(processes: Processes, tmp_path: Path) -> None:
    rows: list[Row] = [([*DROPOUT, *DOCUMENTS, FULL], ""), ([*DROPOUT, *TAIL], "")]
    check(processes, tmp_path, rows, 3, "parallel.pipeline_model_parallel_layout=[1,1,2]")


@pytest.mark.slow
def test_four_ranks_grow_and_end_their_steps_as_one_process(processes: Processes, tmp_path: Path) -> None:
    """Steps of fewer micro-batches than the schedule requires: two at first, and the last one of an epoch."""
    layers = "model.num_layers=8"
    rows: list[Row] = [([layers, *RAMP_UP], ""), ([layers, *RAMP_UP, V], ""), ([layers, *TAIL], "")]
    rows.append(([layers, *TAIL, TWO], ""))
    check(processes, tmp_path, rows, 4)


@pytest.mark.slow
def test_what_ends_or_turns_back_a_run_does_so_on_all_ranks_at_one_step(processes: Processes, tmp_path: Path) -> None:
    decided = [(f"train.on_nonfinite={way}", "nan") for way in ("stop", "raise", "rollback")]
    asked = [("train.on_nonfinite=raise", way) for way in ("sigterm", "stop", "rollback")]
    check(processes, tmp_path, [([key, ONE], trouble) for key, trouble in [*decided, *asked]])


@pytest.mark.slow
def test_a_run_of_a_pipeline_goes_on_in_one_process_and_back(processes: Processes, tmp_path: Path) -> None:
    kinds = [[], [*EXPERTS, *BIAS, MORE, *DROPOUT], [*LORA, *DROPOUT], [MUON, TIED]]
    whole = trained(processes, tmp_path, [(keys, "") for keys in kinds], 1)
    size, found = "parallel.pipeline_model_parallel_size=2", []
    for ranks, own in ((2, [size, "train.exit_interval=1"]), (1, ["train.exit_interval=3"]), (2, [size, TWO])):
        found.append(trained(processes, tmp_path, [([*keys, *own], "") for keys in kinds], ranks, name="there"))
    for number, one in enumerate(whole):
        for name in ("losses", "norms", "experts"):
            there = [value for piece in found for value in piece[number][name]]
            assert there == pytest.approx(one[name], rel=1e-5), (number, name)
