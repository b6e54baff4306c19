"""A run's folder has one owner: what is there is never overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep.config import ConfigContainer
from onstep.errors import ConfigError, RunExistsError
from onstep.training.run_folder import claim_run_folder


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path / "runs")
    return tiny_config


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_completed_run_of_the_same_configuration_is_finished(config: ConfigContainer) -> None:
    claim_run_folder(config).folder.finish("completed", 8)
    config.logger.log_interval += 1  # changes nothing that is learned
    assert claim_run_folder(config).is_finished


def test_another_configuration_is_refused_with_the_first_differing_key(config: ConfigContainer) -> None:
    folder = claim_run_folder(config).folder
    folder.finish("completed", 8)
    before = contents(folder.path)
    config.optimizer.lr = 0.123
    with pytest.raises(RunExistsError, match=r"optimizer\.lr.*0\.123") as raised:
        claim_run_folder(config)
    assert "run.fresh=true" in str(raised.value)
    assert contents(folder.path) == before


@pytest.mark.parametrize("status", ["running", "stopped", "failed"])
def test_an_unfinished_run_is_refused_with_the_way_out(config: ConfigContainer, status: str) -> None:
    folder = claim_run_folder(config).folder
    folder.finish(status, 3)  # type: ignore[arg-type]
    with pytest.raises(RunExistsError, match="unfinished") as raised:
        claim_run_folder(config)
    assert "run.fresh=true" in str(raised.value)
    assert folder.read()["step"] == 3


def test_a_run_that_failed_before_its_first_step_may_be_started_again(config: ConfigContainer) -> None:
    claim_run_folder(config).folder.finish("failed", 0)
    config.optimizer.lr = 0.123
    claim = claim_run_folder(config)
    assert not claim.is_finished
    assert claim.folder.read()["config"]["optimizer"]["lr"] == 0.123


def test_fresh_starts_beside_it(config: ConfigContainer) -> None:
    claim_run_folder(config).folder.finish("completed", 8)
    config.run.fresh = True
    assert [claim_run_folder(config).folder.path.name for _ in range(2)] == ["mine-2", "mine-3"]


def test_a_folder_with_other_files_is_left_alone(config: ConfigContainer) -> None:
    folder = Path(config.run.output_dir) / "mine"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(RunExistsError, match=r"no run\.json"):
        claim_run_folder(config)
    assert contents(folder) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"status": "completed"}'])
def test_a_broken_record_is_refused_and_kept(config: ConfigContainer, text: str) -> None:
    folder = Path(config.run.output_dir) / "mine"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(text)
    with pytest.raises(RunExistsError, match=r"run\.name"):
        claim_run_folder(config)
    assert (folder / "run.json").read_text() == text


def test_an_output_folder_that_cannot_be_written_is_named(config: ConfigContainer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config.run.output_dir = str(tmp_path / "file" / "runs")
    with pytest.raises(ConfigError, match=r"run\.output_dir"):
        claim_run_folder(config)
