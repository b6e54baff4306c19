"""The weights of models in shards are written by rank 0 while all ranks gather them, and exported from checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model

from onstep import Trainer
from onstep.cli.main import main
from tests.support.forked_processes import Processes
from tests.support.jobs.written_weights_jobs import MODELS, made, train_adapter, write, write_by_trainer
from tests.support.small_models import Regression

pytestmark = pytest.mark.distributed


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_they_are_those_of_one_process_and_an_error_reaches_all_ranks(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, ranks, weights = tmp_path / "alone", tmp_path / "ranks", "model.safetensors"
    alone.mkdir()
    found = processes.results("tests.support.jobs.written_weights_jobs", "written", ranks, {})
    monkeypatch.chdir(alone)
    for name in MODELS:
        write(name, name)
        assert files(ranks / name) == files(alone / name), name
        assert main(["checkpoint", "verify", str(ranks / "saved" / name)]) == 0
        assert main(["checkpoint", "export", str(ranks / "saved" / name), f"exported-{name}"]) == 0
        exported, written = (Path(place, weights).read_bytes() for place in (f"exported-{name}", f"{name}/model"))
        assert exported == written, name
    write_by_trainer(Trainer, made("family").model, "theirs")  # type: ignore[arg-type]
    assert (ranks / "theirs" / weights).read_bytes() == (alone / "theirs" / weights).read_bytes()
    train_adapter("adapted")
    for place in ("checkpoint-1", "."):
        one, other = (load_file(side / "adapted" / place / "adapter_model.safetensors") for side in (ranks, alone))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        assert (ranks / "adapted" / place / "adapter_config.json").is_file()
    assert all(one["names"] == ["layer.weight", "layer.bias"] for one in found)
    plain = Regression(seed=7)
    load_model(plain, ranks / "plain" / weights)
    own = torch.load(ranks / "own" / "own.pt")
    for name, value in Regression().state_dict().items():
        assert torch.equal(plain.state_dict()[name], value)
        assert torch.equal(own[name], value)
    assert all(one["error"].startswith("cannot write the final weights to full/model") for one in found), found
