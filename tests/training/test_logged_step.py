"""A logged step with a row on the console, the csv tracker and a record: the Python calls that it adds to a step."""

from __future__ import annotations

from logged_step import LIMIT, calls_of_a_logged_step, of_package


def test_a_logged_step_adds_few_calls() -> None:
    calls = of_package(calls_of_a_logged_step())
    reached = {file for file, _ in calls}
    assert {"console/table.py", "record/metrics_log.py", "trackers/feed.py"} <= reached, "nothing was logged"
    listing = "\n".join(f"{number:8.2f}  {file} {function}" for (file, function), number in calls.items())
    assert sum(calls.values()) <= LIMIT, f"at most {LIMIT} calls:\n{listing}"
