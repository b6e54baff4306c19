"""The logs of a project are found in every layout, newest first."""

from __future__ import annotations

import os
from pathlib import Path

from onstep.analysis import find_diagnostic_logs, find_log_files


def touch(path: Path, seconds: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n]")
    os.utime(path, (seconds, seconds))
    return path


def test_logs_of_all_layouts_are_found_newest_first(tmp_path: Path) -> None:
    own = touch(tmp_path / "runs" / "a" / "trainer_logs.json", 2)
    of_model = touch(tmp_path / "output_models" / "gpt" / "runs" / "b" / "trainer_logs.json", 3)
    of_trainer = touch(tmp_path / "out" / "runs" / "c" / "trainer_logs.json", 1)
    touch(tmp_path / "runs" / "a" / "trainer_logs.1.json", 9)
    touch(tmp_path / "somewhere" / "else" / "trainer_logs.json", 9)
    assert find_log_files(tmp_path) == [of_model, own, of_trainer]
    assert find_log_files(str(tmp_path / "runs")) == [own]


def test_model_name_chooses(tmp_path: Path) -> None:
    touch(tmp_path / "runs" / "a" / "trainer_logs.json", 2)
    wanted = touch(tmp_path / "output_models" / "g[p]t" / "runs" / "b" / "trainer_logs.json", 3)
    touch(tmp_path / "output_models" / "gpt" / "runs" / "b" / "trainer_logs.json", 3)
    assert find_log_files(tmp_path, "g[p]t") == [wanted]


def test_missing_directory_has_none(tmp_path: Path) -> None:
    assert find_log_files(tmp_path / "absent") == []
    assert find_diagnostic_logs(tmp_path / "absent", "parameter_norms.json") == []


def test_diagnostic_logs_of_several_names_are_merged_by_time(tmp_path: Path) -> None:
    old = touch(tmp_path / "runs" / "a" / "parameter_norms.json", 1)
    newest = touch(tmp_path / "runs" / "b" / "gradient_norms.json", 3)
    middle = touch(tmp_path / "output_models" / "m" / "runs" / "c" / "parameter_norms.json", 2)
    assert find_diagnostic_logs(tmp_path, "parameter_norms.json", "gradient_norms.json") == [newest, middle, old]
    assert find_diagnostic_logs(tmp_path, "parameter_norms.json") == [middle, old]
