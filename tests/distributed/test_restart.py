"""torchrun starts the ranks again after one of them died: they continue from the newest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onstep.config import ConfigContainer, save_yaml
from onstep.record import read_records, without_wall_clock
from tests.support import torchrun
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

KILLER = '''
import os, signal

class Killer:
    """Kills rank 1 at step 5 of the first attempt, and rank 0 at step 7 of the second."""

    def on_step_end(self, args, state, control, **kwargs):
        at = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], state.global_step
        if os.environ["DIES"] == "1" and at in (("0", "1", 5), ("1", "0", 7)):
            os.kill(os.getpid(), signal.SIGKILL)
'''


def test_killed_ranks_are_started_again_and_the_run_is_the_same(
    processes: Processes, tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    tiny_config.train.global_batch_size, tiny_config.train.micro_batch_size = 4, 2
    tiny_config.checkpoint.save_interval, tiny_config.checkpoint.certify = 2, True
    tiny_config.model.hidden_dropout = 0.1
    tiny_config.run.output_dir = str(tmp_path / "runs")
    save_yaml(tiny_config, tmp_path / "config.yaml")
    (tmp_path / "killer.py").write_text(KILLER)
    for name, dies in (("whole", "0"), ("killed", "1")):
        words = ["-m", "onstep", "train", str(tmp_path / "config.yaml"), f"run.name={name}"]
        words += ["--import", str(tmp_path / "killer.py"), "callbacks=[killer:Killer]"]
        place = tmp_path / name
        code, said = torchrun.finish_forked(processes, words, place, options=("--max-restarts=2",), DIES=dies)
        assert code == 0, said[-4000:]
    whole, killed = (tmp_path / "runs" / name for name in ("whole", "killed"))
    assert json.loads((killed / "run.json").read_text())["status"] == "completed"
    starts = [one["global_step"] for one in read_records(killed / "record.jsonl") if one["kind"] == "start"]
    assert starts == [0, 4, 6], "it was started again"
    for file in ("model/model.safetensors", "certificate/chain.json"):
        assert (killed / file).read_bytes() == (whole / file).read_bytes(), file
    metrics_logs = [
        [without_wall_clock(one) for one in read_records(run / "trainer_logs.json")] for run in (whole, killed)
    ]
    assert metrics_logs[0] == metrics_logs[1]
