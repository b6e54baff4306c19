"""Checkpoints of models in shards: written by all ranks, loaded on any other layout, to the bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.checkpoint import read_header, resolve, verify
from onstep.checkpoint.compare import compare
from onstep.checkpoint.loading import open_weights, read_weights
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.shard_jobs"
LAYOUTS = {1: ["one"], 2: ["ddp2", "fsdp2"], 4: ["fsdp4", "hsdp4"], 3: ["fsdp3"]}
SAVED = ["one", "ddp2", "fsdp2", "fsdp4", "hsdp4"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def saved(processes: Processes, root: Path) -> dict[str, Any]:
    """What each layout has saved, and the losses after it."""
    found: dict[str, Any] = {}
    for ranks in (1, 2, 4):
        of_ranks = processes.results(JOBS, "cross", root, {"saves": LAYOUTS[ranks], "async": ranks > 2}, ranks=ranks)
        assert all(one == of_ranks[0] for one in of_ranks)
        found |= of_ranks[0]
    return found


SOME = {
    1: [("fsdp2", "one"), ("fsdp4", "one"), ("hsdp4", "one")],
    2: [("one", "fsdp2"), ("fsdp2", "fsdp2"), ("fsdp4", "fsdp2"), ("hsdp4", "ddp2")],
    3: [("fsdp4", "fsdp3")],
    4: [("ddp2", "fsdp4"), ("hsdp4", "hsdp4")],
}
EVERY = {ranks: [(source, layout) for source in SAVED for layout in layouts] for ranks, layouts in LAYOUTS.items()}


@pytest.mark.parametrize(
    ("ranks", "pairs"),
    [*SOME.items(), *(pytest.param(*one, marks=pytest.mark.slow) for one in EVERY.items())],
)
def test_layouts_load_each_other(
    processes: Processes, root: Path, saved: dict[str, Any], ranks: int, pairs: list[tuple[str, str]]
) -> None:
    for found in processes.results(JOBS, "cross", root, {"loads": pairs}, ranks=ranks):
        for source, layout in pairs:
            loaded = found[f"{source} {layout}"]
            assert loaded["digests"] == saved[source]["digests"], (source, layout)
            assert loaded["losses"] == pytest.approx(saved[source]["losses"], rel=1e-5)
            if source == layout:
                assert loaded["losses"] == saved[source]["losses"]
        assert found["weights alone"].items() < saved[pairs[-1][0]]["digests"].items()


def test_each_rank_writes_its_share_and_plain_checkpoints_are_as_they_were(root: Path, saved: dict[str, Any]) -> None:
    for layout in SAVED:
        manifest = verify(root / layout / "checkpoint-3")
        model = manifest.components["model"]
        if layout in LAYOUTS[2][1:] + LAYOUTS[4]:
            ranks = int(layout[-1])
            assert model.sharing_pattern == "sharded"
            assert model.ranks == list(range(ranks))
            files = {f"model/rank_{rank}.safetensors" for rank in range(ranks)}
            assert set(model.files) == {"model/state.json", *files}
            axes = {"dp_replicate": 2, "dp_shard": 2} if layout == "hsdp4" else {"dp_shard": ranks}
            placements = [*(["Replicate()"] if layout == "hsdp4" else []), "Shard(dim=0)"]
            assert model.metadata == {"layout": [{"mesh": axes, "placements": placements, "tensors": 9}]}
            headers = [read_header(root / layout / "checkpoint-3" / name) for name in files]
            assert all(0 not in info.shape for header in headers for info in header.values())
            sizes = [manifest.files[name].size for name in files]
            assert max(sizes) < 2 * min(sizes)  # replicas too are divided
        else:
            assert (model.sharing_pattern, model.files) == (
                "replicated",
                ["model/model.safetensors", "model/state.json"],
            )


def test_replicas_of_a_part_that_differ_are_refused_by_their_ranks(saved: dict[str, Any]) -> None:
    said = saved["hsdp4"]["said"]
    assert re.search(
        r"rank 1 and rank 3, which hold the same part of it; first at model\.embed\.weight\[34:67", said
    ), said


SPOILED = {
    "another step": r"rank_1.safetensors is of step 3, but its checkpoint is of step 4; put back",
    "truncated": r"rank_1.safetensors is not a tensor file: .* it was truncated or added to; put back .* another",
    "lost": r"rank_1.safetensors cannot be read: No such file or directory; put back the file that was saved, or",
    "overlap": r"model: the parts .* overlap \(rank_0.safetensors, rank_1.safetensors\); .*: use another checkpoint",
    "shape": r"rank_1.safetensors: '.*' is a part of a tensor of shape .*, but of one of .* in rank_0.*; use",
}


def test_files_that_do_not_belong_together_are_refused_on_all_ranks_before_anything_changes(
    processes: Processes, tmp_path: Path
) -> None:
    one, other = processes.results(JOBS, "spoiled", tmp_path, {"cases": [*SPOILED]})
    assert one == other
    for how, said in SPOILED.items():
        assert re.search(f"^Loading 'model' of .* failed: rank 0: .*{said}", one[how]), one[how]
        assert "\n" not in one[how]
        assert re.search("rank_1.safetensors", one[f"{how} verified"]), how
    assert one["unchanged"]
    assert "weights do not match this model: missing blocks.2.weight, blocks.2.bias" in one["another model"]
    assert one["plans"] == 2, "one for each component, at the first of two saves"
    assert one["before"], "an optimizer's state by number, of an older checkpoint"
    assert "'parts' of parts/checkpoint-1 failed: rank 0: it has no b, which would keep the values" in one["unfilled"]


def test_tensors_divided_along_two_axes_come_back(saved: dict[str, Any]) -> None:
    assert saved["hsdp4"]["planes"] == [True] * 4


def test_weights_are_read_one_tensor_at_a_time_and_compare_across_layouts(root: Path, saved: dict[str, Any]) -> None:
    one, parts = resolve(root / "one"), resolve(root / "hsdp4")
    weights = open_weights(parts)
    assert weights.tied == {"out.weight": "embed.weight"}
    assert weights.tensors["embed.weight"].shape == (67, 12)
    tensors, tied = read_weights(one)
    assert tied == weights.tied
    for name, stored in weights.tensors.items():
        assert torch.equal(stored.read(), tensors[name])
    assert compare(one, parts).is_equal


def test_torch_reads_the_weights_without_onstep(root: Path, saved: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    tensors, _ = read_weights(resolve(root / "fsdp4"))
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    reader = HuggingFaceStorageReader(str(root / "fsdp4" / "checkpoint-3" / "model"))
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, storage_reader=reader, no_dist=True)
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)
