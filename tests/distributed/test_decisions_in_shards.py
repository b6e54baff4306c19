"""What ranks that divide weights or updates decide: all alike, at one step, and the same after a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes
from tests.support.whole_runs import Ranks, check_same, left_by

pytestmark = pytest.mark.distributed

SLOW = pytest.mark.slow
SHARDS = {"parallel.data_parallel_shard_size": 2}
BOTH = dict.fromkeys(("ddp.use_distributed_optimizer", "ddp.overlap_grad_reduce", "ddp.overlap_param_gather"), True) | {
    "ddp.bucket_cap_mb": 1e-4
}
"""Each rank updates some rows, in a bucket for each parameter; sums and gathers overlap with the passes."""
TENSORS = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
STAGES = {"parallel.pipeline_model_parallel_size": 2, "model.num_layers": 4}
KEYS: dict[str, dict[str, Any]] = {
    "fsdp2": SHARDS,
    "hsdp 2x2": SHARDS,
    "distopt2": BOTH,
    "tp2 sp": TENSORS,
    "pp2 1F1B": STAGES,
    "pp2 interleaved": STAGES | {"parallel.virtual_pipeline_model_parallel_size": 2},
    "pp2 ZBV": STAGES | {"parallel.pipeline_schedule": "ZBVZeroBubble"},
    "tp2 sp x pp2": TENSORS | STAGES,
    "distopt2 x pp2": {"ddp.use_distributed_optimizer": True, "ddp.bucket_cap_mb": 1e-4} | STAGES,
}
RANKS = {layout: 4 if " x " in layout or layout == "hsdp 2x2" else 2 for layout in KEYS}
WITH_ALL_SAMPLES = [layout for layout in KEYS if layout.startswith(("tp", "pp"))]
"""Whose ranks have the same samples, and so the four micro-batches of one process."""
IN_ORDER = {"train_sampling_strategy": "sequential", "max_steps": 9, "logging_steps": 1, "eval_strategy": "no"}
STOP = {"9": [["should_training_stop", {}]]}
BACK = {"9": [["rollback", {"to_step": 4, "lr_factor": 0.5}]]}
KILLS = [("on_step_end", 5), ("on_checkpoint_load", 1), ("on_log", 5)]


@pytest.fixture(scope="module")
def ranks(processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Ranks:
    return Ranks(processes, tmp_path_factory.mktemp("ranks"), corpus=str(corpus), cache=str(token_cache))


@pytest.fixture(scope="module")
def sent(processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Ranks:
    """The runs that get requests from outside."""
    directory, jobs = tmp_path_factory.mktemp("sent"), "tests.support.jobs.steered_jobs"
    return Ranks(processes, directory, jobs, corpus=str(corpus), cache=str(token_cache))


def words(layout: str) -> list[str]:
    """The overrides of a layout."""
    return [f"{key}={str(value).lower()}" for key, value in KEYS[layout].items()]


def ended(ranks: Ranks, name: str, layout: str, **settings: Any) -> dict[str, Any]:
    """How a run that gets requests ends, on all ranks alike."""
    size, given = RANKS[layout], [*words(layout), "train.micro_batch_size=1"]
    settings["sender"] = size - 1 if layout in WITH_ALL_SAMPLES else 0
    assert ranks.start(name, "sent", ranks=size, words=given, **settings) == [0] * size, ranks.output(name)
    first, *others = results(ranks, name, size)
    assert others == [first] * (size - 1)
    return first


def results(ranks: Ranks, name: str, size: int) -> list[dict[str, Any]]:
    return [json.loads((ranks.directory / name / f"result-{rank}.json").read_text()) for rank in range(size)]


def lines_of(ranks: Ranks, name: str, rank: int, kind: str = "taken") -> list[dict[str, Any]]:
    """What a rank took, step by step as it happened."""
    return [json.loads(line) for line in (ranks.directory / name / f"{kind}-{rank}.jsonl").read_text().splitlines()]


def anomalous(kind: str, **overrides: Any) -> dict[str, Any]:
    """A run that meets a bad sample in step 4, on the last rank, and goes back."""
    policy: dict[str, Any] = {"train.on_nonfinite": "rollback"}
    if kind == "spike":
        policy = {"anomaly.on_spike": "rollback", "anomaly.spike_warmup": 2}
    spoiled = {"30": math.nan if kind == "nan" else 1e4}
    return {"arguments": IN_ORDER, "spoiled": spoiled, "overrides": {**policy, **overrides}, "notes_states": True}


@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("hsdp 2x2", marks=SLOW), "distopt2"])
@pytest.mark.parametrize("kind", ["nan", pytest.param("spike", marks=SLOW)])
def test_all_ranks_go_back_to_one_checkpoint_and_a_kill_after_it_changes_nothing(
    ranks: Ranks, kind: str, layout: str
) -> None:
    size, name, is_short = RANKS[layout], f"{kind}-{layout}", (kind, RANKS[layout]) == ("nan", 2)
    wrapped = {"fsdp.wrap": ["Linear"]} if KEYS[layout] is SHARDS else {}
    settings = anomalous(kind, **KEYS[layout], **wrapped)
    whole = ranks.finish(name, "trainer", ranks=size, **settings)
    for rank, found in enumerate(results(ranks, name, size)):
        assert (found["num_rollbacks"], found["step"]) == (1, 9)
        steps = [one["step"] for one in lines_of(ranks, name, rank)]
        assert steps == [1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 9]
        saved, loaded, *_ = lines_of(ranks, name, rank, "states")
        assert loaded == saved, "weights and optimizer are those of the checkpoint"
        assert saved["step"] == 2
    assert len(whole["certificates"][0]) == 9
    for event, number in KILLS if not is_short else []:
        killed = f"{name}-{event}"
        dies = {"rank": size - 1, "signal": "SIGKILL", "event": event, "number": number}
        assert 0 not in ranks.start(killed, "trainer", ranks=size, strikes=[dies], **settings)
        check_same(ranks.finish(killed, "trainer", ranks=size, **settings), whole)


@SLOW
@pytest.mark.parametrize("kind", ["nan", "spike"])
def test_ranks_that_divide_go_back_where_replicas_do(ranks: Ranks, kind: str) -> None:
    divided = {"fsdp2": SHARDS | {"fsdp.wrap": ["Linear"]}, "distopt2": BOTH}
    for how, keys in {"replicas": {}, **divided}.items():
        ranks.finish(f"{kind}-beside-{how}", "trainer", **anomalous(kind, **keys))
    for how in divided:
        for rank in range(2):
            found, expected = (lines_of(ranks, f"{kind}-beside-{one}", rank) for one in (how, "replicas"))
            assert [(one["step"], one["ids"]) for one in found] == [(one["step"], one["ids"]) for one in expected]
            losses, others = ([one["loss"] for one in lines] for lines in (found, expected))
            assert losses == pytest.approx(others, rel=1e-5, nan_ok=True)


@SLOW
@pytest.mark.parametrize("layout", KEYS)
def test_a_pause_and_a_signal_change_nothing(ranks: Ranks, layout: str) -> None:
    size, given = RANKS[layout], words(layout)
    whole = ranks.finish(f"whole-{layout}", ranks=size, words=given)
    without_calls = {key: value for key, value in whole.items() if key not in ("told", "journal")}
    check_same(ranks.finish(f"paused-{layout}", ranks=size, words=given, pauses={"after": 4}), without_calls)
    name, last = f"signal-{layout}", size - 1
    strike = {"rank": last, "signal": "SIGTERM", "event": "on_forward_backward_start", "number": 5}
    assert ranks.start(name, ranks=size, strikes=[strike], words=given) == [75] * size
    steps = 2 if layout in WITH_ALL_SAMPLES else 5 if layout == "hsdp 2x2" else 3
    assert ranks.steps(name) == [steps], "of four micro-batches, two on two ranks of data, or one on four"
    check_same(ranks.finish(name, ranks=size, words=given), whole)


@SLOW
@pytest.mark.parametrize("layout", KEYS)
@pytest.mark.parametrize("plan", [STOP, BACK])
def test_what_is_sent_to_a_run_is_repeated_after_a_kill(sent: Ranks, layout: str, plan: dict[str, Any]) -> None:
    name, size = f"{layout}-{plan['9'][0][0]}", RANKS[layout]
    expected = ended(sent, f"whole-{name}", layout, plan=plan)
    expected_files = left_by(sent.directory / f"whole-{name}" / "runs" / "run")
    dies, given = {"on_final_metrics": 1} if plan is STOP else {"on_step_begin": 10}, words(layout)
    settings = {"plan": plan, "words": [*given, "train.micro_batch_size=1"], "dies": dies}
    settings["sender"] = size - 1 if layout in WITH_ALL_SAMPLES else 0
    assert sent.start(f"killed-{name}", "sent", ranks=size, **settings) == [-9] * size
    assert ended(sent, f"killed-{name}", layout, plan={}) == expected
    check_same(left_by(sent.directory / f"killed-{name}" / "runs" / "run"), expected_files)
