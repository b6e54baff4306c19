"""Tensor-parallel runs: resumed to the bit and on other layouts, killed in a step, with a weight that drifts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from onstep.checkpoint import checkpoints, verify
from tests.support.forked_processes import Processes, output_of

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.tensor_run_jobs"
CLOSE = 1e-5


class Runs:
    """Runs in one directory, by name."""

    def __init__(self, processes: Processes, directory: Path, corpus: Path, cache: Path) -> None:
        self.processes, self.directory = processes, directory
        self.settings = {"corpus": str(corpus), "cache": str(cache), "directory": str(directory / "runs")}

    def train(self, *runs: dict[str, Any], ranks: int = 2) -> list[list[dict[str, Any]]]:
        """Train runs one after the other in the same processes; what each rank found of each."""
        given = [{**self.settings, **one} for one in runs]
        found = self.processes.results(JOBS, "runs", self.directory, {"runs": given}, ranks=ranks)
        return [list(of_run) for of_run in zip(*found, strict=True)]

    def copy(self, name: str, other: str) -> None:
        shutil.copytree(self.directory / "runs" / name, self.directory / "runs" / other)


@pytest.fixture
def runs(processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path) -> Runs:
    return Runs(processes, tmp_path, corpus, token_cache)


UNTIL_2 = ["train.exit_interval=2"]


def is_rest(found: dict[str, Any], whole: dict[str, Any], start: int) -> bool:
    """Whether a run that was continued after a step has the bits of the untouched one."""
    return all(found[name] == whole[name][start:] for name in ("losses", "norms", "random", "prints"))


def is_close(found: dict[str, Any], whole: dict[str, Any], start: int) -> bool:
    return all(found[name] == pytest.approx(whole[name][start:], rel=CLOSE) for name in ("losses", "norms"))


def test_a_run_continues_to_the_bit_and_in_one_process_with_the_masks_of_one_process(runs: Runs) -> None:
    how = "tp2 sp"
    whole, part = runs.train(
        {"how": how, "run": "whole"},
        {"how": how, "run": "part", "keys": UNTIL_2},
    )
    assert whole[0] == whole[1], "ranks draw the same numbers, and know the same losses"
    runs.copy("part", "one")
    there = {"run": "there", "keys": UNTIL_2}
    (one, whole_of_one, _) = runs.train(
        {"how": "one", "run": "one"}, {"how": "one", "run": "whole-one"}, {"how": "one", **there}, ranks=1
    )
    [rest, from_one] = runs.train(
        {"how": how, "run": "part", "keys": ["checkpoint.async_save=true"]}, {"how": how, "run": "there"}
    )
    assert is_close(from_one[0], whole[0], 2)
    assert from_one[0]["random"] == from_one[1]["random"] == whole[0]["random"][2:]
    assert is_rest(rest[0], whole[0], 2)
    assert rest[0]["evaluated"] == whole[0]["evaluated"][1:]
    assert is_close(one[0], whole[0], 2)
    assert is_close(whole_of_one[0], whole[0], 0)
    assert whole_of_one[0]["prints"][0] == whole[0]["prints"][0], "a fingerprint knows no layout"
    assert one[0]["prints"][0] == whole[0]["prints"][2]
    assert one[0]["random"] == whole[0]["random"][2:]
    assert part[0]["step"] == 2
    for info in checkpoints(runs.directory / "runs" / "part" / "checkpoints"):
        verify(info.path)
    assert (runs.directory / "runs" / "whole" / "model" / "model.safetensors").is_file()


def test_a_bit_of_a_replicated_weight_that_drifts_ends_the_run_with_its_name(runs: Runs) -> None:
    keys = ["train.check_weight_hash_across_dp_replicas_interval=1"]
    names = ["layers.1.attention_norm.weight", "layers.1.attention.key.weight"]
    [sound, *drifted] = runs.train(
        {"how": "tp2", "run": "sound", "keys": keys, "steps": 2},
        *({"how": "tp2 sp", "run": name, "keys": keys, "drifts": [1, 1], "drifting": name} for name in names),
    )
    assert "error" not in sound[0]
    for name, of_run in zip(names, drifted, strict=True):
        for found in of_run:
            assert f"after 2 iterations: rank 1, tp 1 differs in {name}" in found["error"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_replicas_are_equal_to_the_bit_after_a_thousand_steps_and_a_drift_is_found_at_the_next_check(
    runs: Runs,
) -> None:
    keys = ["train.check_weight_hash_across_dp_replicas_interval=25", "checkpoint.certify=false"]
    keys += ["checkpoint.save_interval=null", "validation.eval_interval=null", "logger.log_interval=100"]
    keys += ["train.micro_batch_size=2"]
    common = {"how": "tp2 sp", "keys": keys, "steps": 1000, "long": True}
    drifts = {"drifts": [30, 1], "drifting": "layers.1.attention_norm.weight"}
    [drifted] = runs.train({**common, "run": "drifted", **drifts})
    settings = {**runs.settings, **common, "run": "whole"}
    children = runs.processes.start(JOBS, "pretrain", runs.directory, settings, ranks=2)
    assert [child.wait(3000) for child in children] == [0, 0], output_of(runs.directory)
    first, second = (json.loads((runs.directory / f"result-{rank}.json").read_text()) for rank in range(2))
    assert first["step"] == second["step"] == 1000
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0] / 2
    assert {"layers.0.attention_norm.weight", "final_norm.weight"} <= first["replicas"].keys()
    assert first["replicas"] == second["replicas"]
    print(f"\n{len(first['replicas'])} replicated weights after {first['step']} steps: equal to the bit on 2 ranks")
    for found in drifted:
        assert "after 50 iterations: rank 1, tp 1 differs in layers.1.attention_norm.weight" in found["error"]


def test_after_a_kill_in_a_step_all_ranks_end_and_the_run_continues_to_the_bit(runs: Runs) -> None:
    [whole] = runs.train({"how": "tp2 sp", "run": "whole"})
    settings = {**runs.settings, "how": "tp2 sp", "run": "killed", "killed": [3, 1]}
    children = runs.processes.start(JOBS, "pretrain", runs.directory, settings, ranks=2)
    codes = [child.wait() for child in children]
    assert codes[1] == -9
    assert codes[0] not in (0, -9), output_of(runs.directory)
    assert "first failure: rank 1, tp 1 is gone" in (runs.directory / "rank-0.out").read_text()
    [rest] = runs.train({"how": "tp2 sp", "run": "killed"})
    assert is_rest(rest[0], whole[0], 2)


@pytest.mark.slow
def test_compiled_blocks_compute_what_others_do(runs: Runs) -> None:
    dry, compiled = ["model.hidden_dropout=0"], ["train.torch_compile=true", "train.torch_compile_backend=aot_eager"]
    [plain, once, *others] = runs.train(
        {"how": "tp2 sp", "run": "plain", "keys": dry, "steps": 3},
        {"how": "tp2 sp", "run": "compiled", "keys": [*dry, *compiled, *UNTIL_2], "steps": 3},
        {"how": "tp2 sp", "run": "compiled", "keys": [*dry, *compiled], "steps": 3},
    )
    assert is_close(once[0], {name: plain[0][name][:2] for name in ("losses", "norms")}, 0)
    for found in others:
        assert is_close(found[0], plain[0], 2)


@pytest.mark.slow
def test_layouts_continue_each_other(runs: Runs) -> None:
    dry = ["model.hidden_dropout=0", "train.exit_interval=2"]
    [whole, _, _] = runs.train(
        {"how": "tp2 sp", "run": "whole", "keys": dry[:1], "steps": 6},
        {"how": "tp2 sp", "run": "tp2", "keys": dry, "steps": 6},
        {"how": "fsdp2", "run": "fsdp2", "keys": dry, "steps": 6},
    )
    runs.copy("tp2", "tp2-fsdp2")
    runs.copy("fsdp2", "fsdp2-both")
    runs.copy("tp2", "tp2-both")
    [one] = runs.train({"how": "one", "run": "tp2", "keys": dry, "steps": 6}, ranks=1)
    assert is_close(one[0], {name: whole[0][name][:4] for name in ("losses", "norms")}, 2)
    [again, sharded, tensors] = runs.train(
        {"how": "tp2", "run": "tp2", "keys": dry[:1], "steps": 6},
        {"how": "fsdp2", "run": "tp2-fsdp2", "keys": dry[:1], "steps": 6},
        {"how": "tp2 sp", "run": "fsdp2", "keys": dry[:1], "steps": 6},
    )
    assert is_close(again[0], whole[0], 4)
    assert is_close(sharded[0], whole[0], 2)
    assert is_close(tensors[0], whole[0], 2)
    runs.copy("tp2-both", "tp2-divided")
    both = runs.train(
        {"how": "fsdp2 x tp2 sp", "run": "tp2-both", "keys": dry[:1], "steps": 6},
        {"how": "fsdp2 x tp2 sp", "run": "fsdp2-both", "keys": dry[:1], "steps": 6},
        {"how": "distopt2 x tp2 sp", "run": "tp2-divided", "keys": dry[:1], "steps": 6},
        ranks=4,
    )
    for found in both:
        assert is_close(found[0], whole[0], 2)


@pytest.mark.slow
def test_divided_updates_continue_to_the_bit_and_in_other_layouts(runs: Runs) -> None:
    how, dry = "distopt2 x tp2 sp", ["model.hidden_dropout=0"]
    keys = [*dry, "train.check_weight_hash_across_dp_replicas_interval=1"]
    whole, _, drifted = runs.train(
        {"how": how, "run": "whole", "keys": keys},
        {"how": how, "run": "part", "keys": [*keys, *UNTIL_2]},
        {"how": how, "run": "drifted", "keys": keys, "drifts": [1, 1], "drifting": "layers.1.attention_norm.weight"},
        ranks=4,
    )
    for found in drifted:
        assert "rank 1, tp 1, dp_shard 0 differs in layers.1.attention_norm.weight; rank 3, tp 1" in found["error"]
    for other in ("one", "fsdp2", "asynchronous"):
        runs.copy("part", other)
    both = (
        {"how": how, "run": "part", "keys": dry},
        {"how": how, "run": "asynchronous", "keys": [*dry, "checkpoint.async_save=true"]},
    )
    for rest in runs.train(*both, ranks=4):
        assert is_rest(rest[0], whole[0], 2)
    [one] = runs.train({"how": "one", "run": "one", "keys": dry}, ranks=1)
    [sharded] = runs.train({"how": "fsdp2", "run": "fsdp2", "keys": dry})
    assert is_close(sharded[0], one[0], 0)
    assert one[0]["prints"][0] == sharded[0]["prints"][0] == whole[0]["prints"][2]
