"""A run on any layout, continued from the checkpoint of each of its steps, has the bits of the run nobody stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from onstep.checkpoint import checkpoints
from onstep.training.verification.trajectory_hash import CHAIN
from tests.distributed.test_pairs_of_layouts import DIVIDED, ROWS
from tests.distributed.test_pipeline_trainer import INTERLEAVED, V
from tests.distributed.test_pipeline_trainer import trained as trained_by_trainers
from tests.distributed.test_pipelines import DROPOUT, TIED
from tests.support.forked_processes import Processes

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]

JOBS = "tests.support.jobs.pipeline_jobs"
STEPS, EVALUATED, AT_ONCE = 10, 4, 6
"""Steps, those after which a run is evaluated, and runs in one start of the ranks."""
GROUPS = ["optimizer.decoupled_lr=0.002", "optimizer.param_groups=[{match: layers.3.*, lr_mult: 5}]"]
Row = tuple[int, list[str], dict[str, Any]]


def continued(processes: Processes, directory: Path, row: Row) -> None:
    """Run it whole, saving synchronously and asynchronously, and then from each of its checkpoints, in new processes.

    A continued run takes two steps, one in the middle all: every file of its checkpoint is that of the whole run, so
    that what follows is known by the next one. Equal are losses, norms, evaluations and trajectory hashes, too.
    """
    ranks, keys, options = row
    size = options.get("steps", STEPS)

    def trained(names: list[str]) -> list[dict[str, Any]]:
        runs = [settings(directory, name, keys, options) for name in names]
        [found, *others] = processes.results(JOBS, "pretrains", directory, {"runs": runs}, ranks=ranks)
        assert all(other == found for other in others)
        return list(found)

    first, second = trained(["false", "true"])
    assert first == second
    assert "error" not in first, first
    assert len(first["losses"]) == len(set(first["losses"])) == size
    starts = [(saving, step) for step in range(1, size) for saving in ("false", "true")]
    runs = directory / "runs"
    for saving, step in starts:
        copy_until(runs / saving, runs / f"{saving} {step}", step)
    names = [f"{saving} {step}" for saving, step in starts]
    resumed = [one for at in range(0, len(names), AT_ONCE) for one in trained(names[at : at + AT_ONCE])]
    for (saving, step), name, found in zip(starts, names, resumed, strict=True):
        end = end_of(step, size)
        for kind in ("losses", "norms"):
            assert found[kind] == first[kind][step:end], (name, kind)
        evaluated = first["evaluated"][step // EVALUATED : end // EVALUATED]
        assert found["evaluated"][: len(evaluated)] == evaluated, name
        assert files_of(runs / name / "checkpoints", end) == files_of(runs / saving / "checkpoints", end), name
        assert json.loads((runs / name / CHAIN).read_text()) == json.loads((runs / saving / CHAIN).read_text())[:end]
        if end == size:
            exported = [weights_of(runs / of / "model") for of in (name, saving)]
            assert exported[0] == exported[1]
            assert bool(exported[0]) != (EXPERTS[0] in keys)


def weights_of(directory: Path) -> dict[str, bytes]:
    """The files with weights; transformers has no class for our experts, which are not exported."""
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def end_of(step: int, size: int) -> int:
    """The step after which a run ends that has been continued after another one."""
    return size if step == size // 2 else min(step + 2, size)


def copy_until(source: Path, target: Path, step: int) -> None:
    """A copy of a run without its checkpoints of later steps, as if it had failed; its logs are too long."""
    later = [f"checkpoint-{after}" for after in range(step + 1, 2 * STEPS)]
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*later))
    if (known := target / "run.json").exists():
        known.write_text(json.dumps({**json.loads(known.read_text()), "status": "failed"}))


def files_of(run: Path, step: int) -> dict[str, str]:
    """The hashes of the files of a checkpoint, but for the one with times of the clock."""
    [info] = [one for one in checkpoints(run) if one.step == step]
    files = {name: entry.blake3 for name, entry in info.manifest.files.items() if name != "trainer/state.json"}
    parts = {name.split("/")[0] for name in files}
    assert {"model", "optimizer", "rng", "average_ema", "scheduler", "dataset", "loop"} <= parts
    return files


def settings(directory: Path, name: str, keys: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Of a run that is named by whether it saves asynchronously, and by the step after which it is continued."""
    saving, _, step = name.partition(" ")
    size = options.get("steps", STEPS)
    ends = [f"train.exit_interval={end_of(int(step), size)}"] if step else []
    common = ["logger.console=quiet", "checkpoint.most_recent_k=-1", "checkpoint.certify=true"]
    common += ["train.global_batch_size=4", "train.micro_batch_size=1", f"checkpoint.async_save={saving}"]
    common += [f"validation.eval_interval={EVALUATED}", "validation.eval_iters=1"]
    places = {"cache": str(directory / "cache"), "output": str(directory / "runs"), "name": name}
    own = {"corpus": str(Path(__file__).parents[2] / "LICENSE"), "steps": size, "save": 1, **options}
    return {**own, **places, "keys": [*common, *keys, *ends]}


@pytest.mark.parametrize("name", DIVIDED)
def test_every_layout_continues_from_each_of_its_steps(processes: Processes, tmp_path: Path, name: str) -> None:
    """With dropout, two groups, a schedule of rates, an average of the weights, and the trajectory hash."""
    ranks, keys = ROWS[name]
    tied = [] if "ZBV" in name and ("fsdp" in name or "distopt" in name) else [TIED]
    given = {"keys": [*DROPOUT, *tied, *keys], "steps": STEPS}
    found, *others = processes.results("tests.support.jobs.pair_jobs", "continued", tmp_path, given, ranks=ranks)
    assert all(other == found for other in others)
    assert len(set(found["False"]["losses"])) == STEPS
    assert found["False"] == found["True"]
    for saving in ("False", "True"):
        for step in range(1, STEPS):
            end, part = end_of(step, STEPS), found[f"{saving} {step}"]
            for kind in ("losses", "norms"):
                assert part[kind] == found[saving][kind][step:end], (saving, step, kind)
            assert files_of(tmp_path / f"{saving} {step}", end) == files_of(tmp_path / saving, end), (saving, step)


EXPERTS = ["model.num_moe_experts=4", "model.moe_aux_loss_coeff=0.05", "model.moe_router_enable_expert_bias=true"]
EXPERTS += ["model.moe_router_score_function=sigmoid", "model.mtp_num_layers=2"]
FLOAT16 = ["mixed_precision=fp16_mixed", "optimizer.initial_loss_scale=1048576", "optimizer.hysteresis=1"]
FLOAT16 += ["optimizer.loss_scale_window=3"]
TAIL = ["train.train_iters=null", "train.num_epochs=2", "train.drop_last=false", "train.global_batch_size=8"]
TAIL += ["model.seq_length=256", "dataset.seq_length=256"]
RAMP_UP = ["train.rampup_batch_size=[4,4,16]", "train.global_batch_size=8"]
PROOFS = ["checkpoint.validate_replication=true", "train.check_weight_hash_across_dp_replicas_interval=1"]
OTHERS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "gpt2": ("pp2 interleaved", [], {"family": "gpt2"}),
    "mixtral": ("pp2 ZBV", [], {"family": "mixtral"}),
    "llama": ("tp2", [], {"family": "llama"}),
    "qwen3": ("tp2 sp", [], {"family": "qwen3"}),
    "experts": ("tp2 sp x pp2 interleaved", [*EXPERTS, *DROPOUT], {}),
    "muon": ("fsdp2 x pp2", ["optimizer.optimizer=muon"], {}),
    "float16": ("tp2 x pp2", [*FLOAT16, *DROPOUT], {}),
    "epochs": ("pp2 interleaved", [*TAIL, *DROPOUT], {"steps": 10}),
    "ramp-up": ("tp2 sp x pp2 ZBV", [*RAMP_UP, *DROPOUT], {}),
    "proofs": ("dp2 x tp2", [*PROOFS, *DROPOUT], {}),
    "proofs of stages": ("dp2 x pp2 interleaved", [*PROOFS, *DROPOUT], {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_a_layout_trains_continues_from_each_of_its_steps(
    processes: Processes, tmp_path: Path, name: str
) -> None:
    """Models of transformers, experts, skipped steps of a loss scale, ends of epochs, growing batches, replicas."""
    layout, keys, options = OTHERS[name]
    ranks, of_layout = ROWS[layout]
    own = [] if "family" in options else ["model.num_attention_heads=4"]
    continued(processes, tmp_path, (ranks, [*own, *of_layout, *keys], options))


DROPS = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1)
TRAINERS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"axes": {"tp_size": 2}, "kind": "qwen3"}),
    "dp2 x tp2": (4, {"axes": {"tp_size": 2}, "rows": 1}),
    "pp2": (2, {}),
    "pp2 interleaved": (2, {"parallel": INTERLEAVED, "kind": "gpt2", "changed": DROPS}),
    "pp2 ZBV": (2, {"parallel": V, "kind": "qwen3", "factory": True}),
    "dp2 x pp2": (4, {"kind": "mixtral", "rows": 1}),
}


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_trainer_continues_from_each_of_its_steps(
    processes: Processes, tmp_path: Path, name: str, is_async: bool
) -> None:
    """By the newest checkpoint, or by the path of one."""
    ranks, options = TRAINERS[name]
    checkpoint = {"async_save": is_async, "certify": True, "validate_replication": True}
    common = {"steps": STEPS, "saves": 1, "rates": "linear", "averages": True, "checkpoint": checkpoint, **options}
    [whole] = trained_by_trainers(processes, tmp_path, {**common, "directory": "whole"}, ranks=ranks)
    assert len(whole["losses"]) == len(set(whole["losses"])) == STEPS, whole
    steps = range(1, STEPS)
    for step in steps:
        copy_until(tmp_path / "whole", tmp_path / f"from {step}", step)
    starts = [True if step % 2 else str(tmp_path / f"from {step}" / f"checkpoint-{step}") for step in steps]
    resumed = [
        {**common, "directory": f"from {step}", "resumes": start} for step, start in zip(steps, starts, strict=True)
    ]
    for step, found in zip(steps, trained_by_trainers(processes, tmp_path, *resumed, ranks=ranks), strict=True):
        for kind in ("losses", "norms", "evaluated", "predicted"):
            assert found[kind] == whole[kind], (step, kind)
        for file in (Path(CHAIN), Path("final") / "model.safetensors"):
            assert (tmp_path / f"from {step}" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
