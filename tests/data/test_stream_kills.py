"""A run on a stream that is served on the way, killed and continued on other numbers of ranks."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from onstep import pretrain
from onstep.errors import DataError
from tests.support.file_server import file_server
from tests.support.forked_processes import Processes, output_of
from tests.support.jobs.stream_jobs import BATCH, Notes, line_of, run_config

RECORDS = 60
"""Of each file."""
FILES = 3


def content_of(path: str) -> bytes:
    first = int(path[1]) * RECORDS
    return b"".join(map(line_of, range(first, first + RECORDS)))


@pytest.mark.process
def test_every_sample_once_over_kills_and_other_numbers_of_ranks(processes: Processes, tmp_path: Path) -> None:
    steps = RECORDS * FILES // BATCH
    found: dict[int, list[int]] = {}
    with file_server(content_of, breaks_after=2500) as served:
        for start, (ranks, kill_at, workers) in enumerate([(2, 8, 0), (1, 17, 1), (3, 0, 0)]):
            settings = {
                "url": f"{served.url}/{{0..{FILES - 1}}}.jsonl",
                "runs": str(tmp_path),
                "steps": steps,
                "start": start,
                "kill_at": kill_at,
                "num_workers": workers,
            }
            folder = tmp_path / f"start-{start}"
            codes = processes.run("tests.support.jobs.stream_jobs", "trained", folder, settings, ranks=ranks)
            assert set(codes) == {-9 if kill_at else 0}
            assert "is read up to it" not in output_of(folder)  # the place of the position is known
            of_start: dict[int, list[int]] = defaultdict(list)
            for rank in range(ranks):
                for line in (tmp_path / f"start-{start}-rank-{rank}").read_text().splitlines():
                    step, *records = map(int, line.split())
                    of_start[step] += records
            found.update(of_start)
    assert sorted(found) == list(range(1, steps + 1))
    assert sorted(record for records in found.values() for record in records) == list(range(RECORDS * FILES))


def test_a_run_whose_stream_is_damaged_is_saved_and_continues_there(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = b"".join(map(line_of, range(RECORDS)))
    path.write_bytes(whole[: len(whole) // 2 + 9])
    config = run_config(str(path), tmp_path, RECORDS // BATCH)
    config.checkpoint.save_interval = None
    with pytest.raises(DataError, match=r"a\.jsonl, byte .* is not valid JSON.*'text' \(or leave .*skip_damaged=true"):
        pretrain(config, callbacks=[Notes(tmp_path / "before", 0)])
    [saved] = [one.name for one in (tmp_path / "x" / "checkpoints").glob("checkpoint-*")]
    path.write_bytes(whole)
    config.checkpoint.on_config_change = "apply"
    pretrain(config, callbacks=[Notes(tmp_path / "after", 0)])
    steps = [(tmp_path / name).read_text().splitlines() for name in ("before", "after")]
    assert saved == f"checkpoint-{len(steps[0])}"
    records = [int(word) for line in steps[0] + steps[1] for word in line.split()[1:]]
    assert sorted(records) == list(range(RECORDS))
