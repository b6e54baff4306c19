"""Pipelines of real ranks train, save, evaluate and continue as one process does."""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from onstep.analysis.pipeline_traces import read_steps
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.pipeline_jobs"
DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
DIVIDED = ["ddp.use_distributed_optimizer=true", "ddp.bucket_cap_mb=0.05", "train.micro_batch_size=1"]
PROOFS = [
    *(f"checkpoint.{key}=true" for key in ("certify", "validate_replication")),
    *("train.check_weight_hash_across_dp_replicas_interval=1", "optimizer.decoupled_lr=0.002"),
    *("logger.log_params_norm=true", "logger.console=bridge"),
]
TIED, TWO = "model.share_embeddings_and_output_weights=true", "parallel.virtual_pipeline_model_parallel_size=2"
PARTS = ("forward", "input gradient", "weight gradient")
Row = tuple[list[str], dict[str, Any]]


def row(name: str, *keys: str, ranks: int = 2, size: int = 2, **options: Any) -> Row:
    own = [f"parallel.pipeline_model_parallel_size={size}", f"parallel.pipeline_schedule={name}"]
    return [*own, *keys], {"ranks": ranks, **options}


def results(processes: Processes, directory: Path, wanted: list[Row], steps: int) -> list[list[dict[str, Any]]]:
    """What each rank found in each row; all rows in one start of the ranks."""
    ranks = wanted[0][1].get("ranks", 1)
    found = processes.results(JOBS, "rows", directory, {"rows": wanted, "steps": steps}, ranks=ranks)
    return [list(one) for one in zip(*found, strict=True)]


def alone(processes: Processes, directory: Path, wanted: list[Row], steps: int) -> list[dict[str, Any]]:
    """The same in one process, of rows that are alike there once."""
    rows: list[Row] = []
    for keys, options in wanted:
        of_one = [key for key in keys if not key.startswith(("parallel.", "ddp.", "fsdp."))]
        rows.append((of_one, {name: value for name, value in options.items() if name not in ("ranks", "traced")}))
    alike = [one for place, one in enumerate(rows) if rows.index(one) == place]
    found = [one for [one] in results(processes, directory, alike, steps)]
    return [found[alike.index(one)] for one in rows]


def furthest(own: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(own, reference, strict=True))


def check(processes: Processes, directory: Path, wanted: list[Row], steps: int) -> list[list[dict[str, Any]]]:
    """Loss and norm are those of one process, and the same on all ranks; what each rank found in each row."""
    single, found = alone(processes, directory, wanted, steps), results(processes, directory, wanted, steps)
    for (keys, options), ranks, one in zip(wanted, found, single, strict=True):
        bound = 1e-10 if options.get("dtype") == "float64" else 1e-5
        figures = " ".join(
            f"{name} {furthest(ranks[0][name], one[name]):.1e}" for name in ("losses", "norms", "weights")
        )
        print(figures, options.get("dtype"), " ".join(key.partition(".")[2] for key in keys))
        for name in ("losses", "norms"):
            assert furthest(ranks[0][name], one[name]) <= bound, (keys, name)
            assert all(other[name] == ranks[0][name] for other in ranks), (keys, name)
        if options.get("family") != "gpt2":  # whose key biases have gradients of rounding alone
            assert ranks[0]["zeros"] == one["zeros"], keys
        assert furthest(ranks[0]["weights"], one["weights"]) <= 10 * bound, keys
        if options["ranks"] == 2:
            assert furthest(ranks[0]["own"], one["own"]) <= bound, keys
    return found


def test_schedules_train_as_one_process_and_share_what_the_last_stage_knows(
    processes: Processes, tmp_path: Path
) -> None:
    """Ragged labels with an empty micro-batch, tied embeddings, two groups, clipping, losses in step and function.

    Of four micro-batches, GPipe keeps all for the backward passes and 1F1B two and one; a trace names all passes.
    """
    wanted = [
        row("1F1B", TIED, dtype="float64", saved=True),
        row("Interleaved1F1B", TWO, dtype="float64", step="mean"),
        row("ZBVZeroBubble", TIED, dtype="float64", traced=str(tmp_path / "traces")),
        row("GPipe", TIED, dtype="float64", saved=True),
    ]
    found = check(processes, tmp_path, wanted, 2)
    for rank, times in ((0, 2), (1, 4)):
        assert found[3][rank]["saved"] == times * found[0][rank]["saved"] > 0
    [step] = read_steps([tmp_path / "traces"])
    for rank, stages in enumerate(([0, 3], [1, 2])):
        wanted_passes = {(part, index, stage) for part in PARTS for index in range(4) for stage in stages}
        assert {(one.part, one.micro_batch, one.stage) for one in step.ranks[rank]} == wanted_passes
        assert len(step.ranks[rank]) == len(wanted_passes)


TENSORS = ["parallel.tensor_model_parallel_size=2"]
SEQUENCES = [*TENSORS, "parallel.sequence_parallel=true"]
SHARDS = ["parallel.data_parallel_shard_size=2", "train.micro_batch_size=1"]
KEPT = "fsdp.reshard_after_forward=false"


def test_stages_are_divided_further_between_ranks(processes: Processes, tmp_path: Path) -> None:
    """Their tensors, and their parameters in shards: each with ragged labels, an empty micro-batch, and clipping."""
    wanted = [
        row("1F1B", TIED, *TENSORS, ranks=4, dtype="float64"),
        row("Interleaved1F1B", TWO, TIED, *SEQUENCES, ranks=4, dtype="float64", step="mean"),
        row("ZBVZeroBubble", TIED, *SEQUENCES, ranks=4, dtype="float64"),
        row("1F1B", TIED, KEPT, *SHARDS, ranks=4, dtype="float64"),
        row("Interleaved1F1B", TWO, TIED, *SHARDS, ranks=4, dtype="float64", step="mean"),
        row("ZBVZeroBubble", *SHARDS, ranks=4, dtype="float64"),
        row("1F1B", TIED, *DIVIDED, ranks=4, dtype="float64"),
        row("ZBVZeroBubble", *DIVIDED, ranks=4, dtype="float64"),
    ]
    check(processes, tmp_path, wanted, 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_stages_whose_updates_are_divided_train_20_steps_as_one_process(
    processes: Processes, tmp_path: Path, dtype: str
) -> None:
    wanted = [
        row(name, *keys, *DIVIDED, ranks=4, dtype=dtype) for name, keys in SCHEDULES.items() if name != "DualPipeV"
    ]
    wanted += [row("1F1B", TIED, *DIVIDED, ranks=4, dtype=dtype)]
    check(processes, tmp_path, wanted, 20)
    runs = [results(processes, tmp_path, wanted[-1:], 4) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    of_all = [row("ZBVZeroBubble", *DIVIDED, *TENSORS[:1], ranks=8, dtype=dtype)]
    check(processes, tmp_path, of_all, 3)


@pytest.mark.slow
def test_divided_updates_of_stages_continue_in_other_layouts(processes: Processes, tmp_path: Path) -> None:
    """From the checkpoints of an interrupted run: in one process, and with other ranks."""
    keys = [*row("Interleaved1F1B", TWO, *DIVIDED, "train.micro_batch_size=1", "checkpoint.async_save=true")[0]]
    whole = pretrained(processes, tmp_path, "whole", 4, *keys, *PROOFS)
    for name, ranks, others in (
        ("one", 1, PROOFS),
        ("sharded", 2, [*PROOFS, "parallel.data_parallel_shard_size=2"]),
    ):
        before = pretrained(processes, tmp_path, name, 4, *keys, *PROOFS, "train.exit_interval=2")
        after = pretrained(processes, tmp_path, name, ranks, *others)
        assert before["prints"][1] == after["prints"][0]
        for value in ("losses", "norms"):
            assert furthest(before[value] + after[value], whole[value]) <= 1e-5, (name, value)
    back = pretrained(processes, tmp_path, "back", 1, *PROOFS, "train.exit_interval=2")
    rest = pretrained(processes, tmp_path, "back", 4, *keys, *PROOFS)
    assert back["prints"][1] == rest["prints"][0]
    assert furthest(back["losses"] + rest["losses"], whole["losses"]) <= 1e-5


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("deaf", "rank 0, pp 0: the forward step has not read its micro-batch on stage 0 of a pipeline"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [
                ("cut", "where the next one expects (3, 12, 32): the forward step must call"),
                ("absent", "rank 0, pp 0: the forward step has not called the model on stage 0"),
                (
                    "reading",
                    "rank 1, pp 1: stage 1 of a pipeline has no layers.0.attention.key.weight, which is on sta",
                ),
                (
                    "outlined",
                    "reads a weight that stage 1 of a pipeline does not have (the loss is on the device meta)",
                ),
                (
                    "decaying trained",
                    "stage 1 of a pipeline has no layers.0.attention_norm.weight, which is on stage 0",
                ),
                ("decaying named", "stage 1 of a pipeline has no layers.0.attention.query.weight, which is on stage 0"),
                ("decaying norms", "stage 1 of a pipeline has no layers.0.attention_norm.weight, which is on stage 0"),
                ("hooked", "rank 0, pp 0: a forward hook of layers.0 keeps an activation of stage 0 of a pipeline"),
                ("uneven", "the forward step has called the model with other tokens on rank 1, pp 1 than on rank 0"),
            ]
        ),
    ],
)
def test_a_forward_step_that_stages_cannot_share_is_refused_on_all_ranks(
    processes: Processes, tmp_path: Path, step: str, said: str
) -> None:
    """Each ends in the line of the first, without a report of stacks."""
    codes = processes.run(JOBS, "rows", tmp_path, {"rows": [row("1F1B", step=step)], "steps": 1}, ranks=2)
    assert 0 not in codes
    for rank in range(2):
        output = (tmp_path / f"rank-{rank}.out").read_text()
        last = [line for line in output.splitlines() if "Error: " in line][-1]
        assert said.removeprefix(f"rank {rank}, pp {rank}: ") in last
        assert "stacks of" not in output


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_a_loss_of_another_stages_activations_is_refused_on_all_ranks_unless_they_are_detached(
    processes: Processes, tmp_path: Path, schedule: str
) -> None:
    check(processes, tmp_path, [row(schedule, TIED, step="detaching", dtype="float64")], 2)
    wanted = {"rows": [row(schedule, TIED, step="borrowing")], "steps": 1}
    assert 0 not in processes.run(JOBS, "rows", tmp_path / "refused", wanted, ranks=2)
    for rank in range(2):
        output = (tmp_path / "refused" / f"rank-{rank}.out").read_text()
        last = [line for line in output.splitlines() if "Error: " in line][-1]
        assert "computes on stage 3 of a pipeline with activations of stage 0, which is on the same rank" in last
        assert "detach() the activations" in last
        assert "stacks of" not in output


@pytest.mark.slow
def test_an_error_of_the_users_loss_is_not_blamed_on_another_stage(processes: Processes, tmp_path: Path) -> None:
    codes = processes.run(JOBS, "rows", tmp_path, {"rows": [row("1F1B", step="failing")], "steps": 1}, ranks=2)
    output = (tmp_path / "rank-1.out").read_text()
    assert 0 not in codes
    assert "RuntimeError: no metadata in this batch" in output
    assert "reads a weight" not in output


SCHEDULES = {
    "GPipe": [],
    "1F1B": [],
    "Interleaved1F1B": [TWO],
    "LoopedBFS": [TWO],
    "InterleavedZeroBubble": [TWO],
    "ZBVZeroBubble": [],
    "DualPipeV": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_schedule_trains_20_steps_as_one_process(processes: Processes, tmp_path: Path, dtype: str) -> None:
    wanted = [row(name, *keys, *tied, dtype=dtype) for name, keys in SCHEDULES.items() for tied in ([], [TIED])]
    uneven = ["parallel.pipeline_model_parallel_layout=[1,3]", "train.micro_batch_size=12"]
    wanted += [row("GPipe", *uneven, dtype=dtype), row("1F1B", "model.recompute_granularity=full", dtype=dtype)]
    check(processes, tmp_path, wanted, 20)


def divided_rows(dtype: str) -> list[Row]:
    """Stages whose tensors are divided between two ranks, and stages in two shards."""
    tensors: list[tuple[str, list[str]]] = [
        ("1F1B", [TIED, *TENSORS, *DROPOUT]),
        ("1F1B", [TIED, *SEQUENCES, "model.position_embedding_type=learned_absolute", *DROPOUT]),
        ("GPipe", [*SEQUENCES, "train.micro_batch_size=12"]),
        ("Interleaved1F1B", [TWO, TIED, *SEQUENCES]),
        ("LoopedBFS", [TWO, *TENSORS]),
        ("InterleavedZeroBubble", [TWO, TIED, *SEQUENCES]),
        ("ZBVZeroBubble", [TIED, *SEQUENCES]),
        ("DualPipeV", [*TENSORS]),
    ]
    shards: list[tuple[str, list[str]]] = [
        ("1F1B", [TIED, *SHARDS]),
        ("1F1B", [TIED, KEPT, "fsdp.prefetch=1", *SHARDS]),
        ("GPipe", [*SHARDS[:1], "train.micro_batch_size=6"]),
        ("Interleaved1F1B", [TWO, TIED, *SHARDS]),
        ("InterleavedZeroBubble", [TWO, KEPT, *SHARDS]),
        ("ZBVZeroBubble", SHARDS),
    ]
    return [row(name, *keys, ranks=4, dtype=dtype) for name, keys in (*tensors, *shards)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_divided_stages_train_20_steps_as_one_process(processes: Processes, tmp_path: Path, dtype: str) -> None:
    check(processes, tmp_path, divided_rows(dtype), 20)


@pytest.mark.slow
def test_three_runs_of_divided_stages_are_equal_to_the_bit(processes: Processes, tmp_path: Path) -> None:
    first, second, third = (results(processes, tmp_path, divided_rows("float32"), 4) for _ in range(3))
    assert first == second == third


@pytest.mark.slow
def test_eight_ranks_of_replicas_shards_tensors_and_stages(processes: Processes, tmp_path: Path) -> None:
    small, replicas = "train.micro_batch_size=1", "parallel.data_parallel_replicate_size=2"
    wanted = [
        row("1F1B", TIED, *SEQUENCES, small, ranks=8, dtype="float64"),
        row("ZBVZeroBubble", TIED, *TENSORS, small, ranks=8, dtype="float64"),
        row("1F1B", TIED, *SHARDS, replicas, ranks=8, dtype="float64"),
        row("1F1B", TIED, *SHARDS, *SEQUENCES, ranks=8, dtype="float64"),
        row("ZBVZeroBubble", *SHARDS, *TENSORS, ranks=8, dtype="float64"),
    ]
    check(processes, tmp_path, wanted, 5)


@pytest.mark.slow
def test_three_and_four_ranks_and_replicas_of_a_pipeline(processes: Processes, tmp_path: Path) -> None:
    uneven = "parallel.pipeline_model_parallel_layout=[1,1,2]"
    check(processes, tmp_path, [row("1F1B", TIED, uneven, ranks=3, size=3, dtype="float64")], 5)
    four: list[Row] = [
        row("1F1B", TIED, ranks=4, size=4, dtype="float64"),
        row("1F1B", TIED, "train.micro_batch_size=1", ranks=4, dtype="float64"),
        row("Interleaved1F1B", TWO, TIED, "train.micro_batch_size=1", ranks=4, dtype="float64"),
        row("ZBVZeroBubble", TIED, "train.micro_batch_size=1", ranks=4, dtype="float64"),
    ]
    check(processes, tmp_path, four, 5)


@pytest.mark.slow
def test_three_runs_of_a_pipeline_are_equal_to_the_bit(processes: Processes, tmp_path: Path) -> None:
    wanted = [row(name, *keys, TIED) for name, keys in SCHEDULES.items()]
    first, second, third = (results(processes, tmp_path, wanted, 4) for _ in range(3))
    assert first == second == third


def text_run(directory: Path, name: str, *keys: str, **more: Any) -> dict[str, Any]:
    own_options = [] if "family" in more else [TIED]
    return {
        "corpus": str(Path(__file__).parents[2] / "LICENSE"),
        "cache": str(directory / "cache"),
        "output": str(directory / "runs"),
        "name": name,
        "steps": 5,
        "keys": ["logger.console=quiet", *own_options, *keys],
        **more,
    }


def pretrained(processes: Processes, directory: Path, name: str, ranks: int, *keys: str, **more: Any) -> dict[str, Any]:
    settings = text_run(directory, name, *keys, **more)
    [found, *others] = processes.results(JOBS, "pretrain", directory, settings, ranks=ranks)
    assert all(other == found for other in others)
    result: dict[str, Any] = found
    return result


def params_norms(directory: Path) -> list[str]:
    return re.findall(r"params norm: [0-9.]+", (directory / "rank-0.out").read_text())


def test_a_pipeline_is_evaluated_as_one_process_and_continues_there_and_back(
    processes: Processes, tmp_path: Path
) -> None:
    """Two ranks, one, four with divided tensors and another schedule: curves, evaluations, norms, prints of weights.

    Each stage has a group of the optimizer that the other has not, as many as the other. Another run on two ranks ends
    with the bit by which one copy of the tied embedding differs.
    """
    groups = "optimizer.param_groups=[{match: layers.0.*, lr_mult: 0.1}, {match: layers.3.*, lr_mult: 5}]"
    keys = [*DROPOUT, *PROOFS, groups]
    one = pretrained(processes, tmp_path, "one", 1, *keys)
    norms_of_one = params_norms(tmp_path)
    there = text_run(tmp_path, "there", *row("1F1B", *keys)[0], "train.exit_interval=2")
    drifted = text_run(tmp_path, "drifted", *row("1F1B", *keys)[0], drifts=[0, 1, "embedding.weight"])
    [piece, error], _ = processes.results(JOBS, "pretrains", tmp_path, {"runs": [there, drifted]})
    assert "after 1 iterations: rank 1, pp 1 differs in embedding.weight" in error["error"]
    assert params_norms(tmp_path)[:2] == norms_of_one[:2]
    pieces = [
        piece,
        pretrained(processes, tmp_path, "there", 1, *keys, "train.exit_interval=4"),
        pretrained(processes, tmp_path, "there", 4, *row("ZBVZeroBubble", *SEQUENCES, *keys)[0]),
    ]
    assert one["prints"][0] == pieces[0]["prints"][0], "a fingerprint knows no layout"
    assert [one["prints"][1] for one in pieces[:2]] == [one["prints"][0] for one in pieces[1:]]
    for name in ("losses", "norms", "evaluated"):
        there = [value for piece in pieces for value in piece[name]]
        assert furthest(there, one[name]) <= 1e-5
    [manifest] = (tmp_path / "runs" / "there" / "checkpoints").glob("*-5/manifest.json")
    names = set((manifest.parent / "model").iterdir())
    assert {one.name for one in names} == {*(f"rank_{rank}.safetensors" for rank in range(4)), "state.json"}
    assert (tmp_path / "runs" / "there" / "model" / "model.safetensors").is_file()


def collected(processes: Processes, directory: Path, *rows: list[str], ranks: int) -> list[Any]:
    settings = {"rows": [[*row, "train.micro_batch_size=1"] for row in rows], "ranks": ranks}
    found: list[Any] = processes.results(JOBS, "collected", directory, settings, ranks=ranks)[-1]
    return found


def are_collected(found: list[Any], expected: list[Any]) -> None:
    for (*others, loss, texts, _), (*known, known_loss, known_texts, _) in zip(found, expected, strict=True):
        assert (others, texts) == (known, known_texts)
        assert loss == pytest.approx(known_loss, rel=1e-6)


def test_the_last_rank_collects_beside_losses_what_one_process_does(processes: Processes, tmp_path: Path) -> None:
    """Also in a V, whose last stage is on the first rank; the last one has the tracker."""
    found = collected(processes, tmp_path, row("1F1B")[0], row("ZBVZeroBubble")[0], ranks=2)
    [one] = collected(processes, tmp_path, [], ranks=1)
    assert len(one[0]) == 12
    are_collected(found, [one, one])


@pytest.mark.slow
def test_the_last_rank_of_divided_stages_and_of_replicas_collects_it_too(processes: Processes, tmp_path: Path) -> None:
    rows = [row(name, *keys)[0] for name in ("1F1B", "ZBVZeroBubble") for keys in (SEQUENCES, [])]
    found = collected(processes, tmp_path, *rows, ranks=4)
    [one] = collected(processes, tmp_path, [], ranks=1)
    [half] = collected(processes, tmp_path, [], ranks=2)
    are_collected(found, [one, half, one, half])


@pytest.mark.slow
@pytest.mark.parametrize("best", [[], ["checkpoint.load_best_model_at_end=true"]], ids=["average", "best"])
def test_divided_stages_keep_and_export_what_one_process_does(
    processes: Processes, tmp_path: Path, best: list[str]
) -> None:
    """The best checkpoint beside the last, and at the end the average of the weights, or the best ones.

    With the greatest loss as the best, it is not the last one.
    """
    kept = ["checkpoint.save_interval=1", "checkpoint.most_recent_k=1", "checkpoint.keep_best_n=1", *best]
    kept += ["validation.eval_interval=1", "validation.greater_is_better=true", "checkpoint.validate_replication=true"]
    exports = {"exports_average": not best}
    one = pretrained(processes, tmp_path, "one", 1, *kept, **exports)
    there = pretrained(processes, tmp_path, "there", 4, *row("Interleaved1F1B", TWO, *SEQUENCES, *kept)[0], **exports)
    assert furthest(there["evaluated"], one["evaluated"]) <= 1e-5
    runs = [tmp_path / "runs" / name for name in ("one", "there")]
    saved = [sorted(path.name for path in (run / "checkpoints").glob("checkpoint-*")) for run in runs]
    assert saved[0] == saved[1]
    assert len(saved[0]) == 2, "the best is not the last"
    weights, others = (load_file(run / "model" / "model.safetensors") for run in runs)
    assert weights.keys() == others.keys()
    assert max(float((one - others[name]).abs().max()) for name, one in weights.items()) < 1e-4


@pytest.mark.slow
def test_replicas_of_a_stage_that_drift_are_named_and_overflows_skip_the_updates_of_all_stages(
    processes: Processes, tmp_path: Path
) -> None:
    float16 = [
        "mixed_precision=fp16_mixed",
        "optimizer.initial_loss_scale=1048576",
        "optimizer.hysteresis=1",
        "train.micro_batch_size=2",
    ]
    hashes, validated = (
        text_run(
            tmp_path,
            name,
            *row("1F1B", *keys)[0],
            drifts=[int(name == "validated"), 3, "layers.3.attention_norm.weight"],
        )
        for name, keys in (("hashes", PROOFS), ("validated", ["checkpoint.validate_replication=true"]))
    )
    one = pretrained(processes, tmp_path, "one", 1, *float16)
    runs = [hashes, validated, text_run(tmp_path, "float16", *row("1F1B", *float16)[0])]
    [hashed, refused, low], *_ = processes.results(JOBS, "pretrains", tmp_path, {"runs": runs}, ranks=4)
    where = "rank 3, dp_replicate 1, pp 1"
    assert f"{where} differs in layers.3.attention_norm.weight. A rank" in hashed["error"]
    assert f"'model' differs between rank 2, dp_replicate 0, pp 1 and {where}" in refused["error"]
    assert furthest(low["losses"], one["losses"]) <= 1e-5
    assert [one == -1 for one in low["norms"]] == [one == -1 for one in one["norms"]] == [True] * 2 + [False] * 3
    assert len(low["losses"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "ranks", "who", "place"),
    [
        ([], 2, "rank 1, pp 1", "disk"),
        ([], 2, "rank 1, pp 1", "memory"),
        (SEQUENCES, 4, "rank 1, tp 1, pp 0", "disk"),
    ],
    ids=["pp2", "pp2 in memory", "tp2 sp x pp2"],
)
def test_a_rank_killed_in_the_passes_ends_all_and_the_next_start_has_the_bits(
    processes: Processes, tmp_path: Path, keys: list[str], ranks: int, who: str, place: str
) -> None:
    keys = [*row("ZBVZeroBubble", *keys)[0], "checkpoint.save_interval=1"]
    if place == "memory":
        keys[-1] = "checkpoint.save_interval=100"
        keys += ["checkpoint.non_persistent_save_interval=1", "checkpoint.non_persistent_place=memory"]
        (tmp_path / "memory").mkdir()
        keys += [f"checkpoint.memory_dir={tmp_path / 'memory'}"]
    whole = pretrained(processes, tmp_path, "whole", ranks, *keys)
    settings = text_run(tmp_path, "killed", *keys, dies=3)
    first, killed, *others = processes.start(JOBS, "pretrain", tmp_path, settings, ranks=ranks)
    assert killed.wait() == -signal.SIGKILL
    died = time.monotonic()
    assert all(other.wait(20) != 0 for other in (first, *others))
    print(f"\nall ranks have ended {time.monotonic() - died:.1f} s after {who} was killed")
    assert f"first failure: {who} is gone" in (tmp_path / "rank-0.out").read_text()
    after = pretrained(processes, tmp_path, "killed", ranks, *keys)
    assert after["losses"] == whole["losses"][-len(after["losses"]) :]
    assert len(after["losses"]) <= 3


@pytest.mark.slow
def test_a_checkpoint_that_lacks_a_stage_is_refused(processes: Processes, tmp_path: Path) -> None:
    pretrained(processes, tmp_path, "lacking", 2, *row("1F1B")[0], "train.exit_interval=2")
    [saved] = (tmp_path / "runs" / "lacking" / "checkpoints").glob("*-2")
    (saved / "model" / "rank_1.safetensors").unlink()
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    with pytest.raises(AssertionError, match=r"rank_1\.safetensors"):
        pretrained(processes, tmp_path, "lacking", 2, *row("1F1B")[0])
