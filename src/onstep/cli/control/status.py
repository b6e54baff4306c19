"""`onstep control status`: shows what a job is doing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from onstep.analysis.text_tables import printable
from onstep.cli.cells import size_shown
from onstep.cli.control.options import AsJson, Job, Remote, TokenFile
from onstep.cli.control.target import Target, find_target
from onstep.control import ControlError
from onstep.control.history import finite_number

Status = Mapping[str, Any]
_METRICS = ("loss", "learning_rate", "grad_norm", "eval_loss")


def status(job: Job = None, as_json: AsJson = False, remote: Remote = None, token_file: TokenFile = None) -> None:
    """Show progress, loss, speed, time left, and what was changed by hand."""
    found = read_status(find_target(job, remote, token_file))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(printable(headline(found)))
    rows = list(status_rows(found))
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        print(printable(f"  {name:<{width}}  {text}"))


def read_status(target: Target) -> dict[str, Any]:
    """The status of a job.

    Raises:
        ControlError: if it cannot be read.
    """
    found = target.client.get_status(target.job_id)
    if "error" in found:
        raise ControlError(printable(str(found["error"])))
    return found


def headline(found: Status) -> str:
    """Id, state and output directory of a job."""
    state = str(found.get("status", "unknown"))
    by = f" by {found['paused_by']}" if state == "paused" and found.get("paused_by") else ""
    where = f" in {found['output_dir']}" if found.get("output_dir") else ""
    return f"{found.get('job_id')}: {state}{by}{where}"


def status_rows(found: Status) -> Iterator[tuple[str, str]]:
    """Names and texts of what is known; nothing for what is not."""
    yield from ((name, text) for name, text in _rows(found) if text)


def one_line(found: Status) -> str:
    """Progress, loss, learning rate, speed and time left, for a line that is updated."""
    metrics = [f"{name} {value:.4g}" for name in _METRICS[:2] if (value := finite_number(found.get(name))) is not None]
    speed, left = _speed(found), _duration(found.get("eta_seconds"))
    state = str(found.get("status", ""))
    parts = [_progress(found) and f"step {_progress(found)}", *metrics, speed, left and f"{left} left"]
    return printable("  ".join(part for part in (*parts, state if state != "running" else "") if part))


def _rows(found: Status) -> Iterator[tuple[str, str]]:
    yield "step", _progress(found)
    yield "epoch", _epoch(found)
    for name in _METRICS:
        value = finite_number(found.get(name))
        yield name, "" if value is None else f"{value:.4g}"
    yield "speed", _speed(found)
    yield "time left", _duration(found.get("eta_seconds"))
    yield "changed by hand", ", ".join(f"{key}={value}" for key, value in _mapping(found.get("overrides")).items())
    yield "checkpoints", _checkpoints(found)
    yield "ranks", str(found.get("world_size") or "")
    yield "memory", ", ".join(_memory(found))
    queue = found.get("queue")
    yield "commands waiting", str(len(queue) if isinstance(queue, list) else queue or "")


def _progress(found: Status) -> str:
    step, most, progress = (finite_number(found.get(key)) for key in ("global_step", "max_steps", "progress"))
    if step is None:
        return ""
    of = f" of {most:,.0f}" if most is not None and most > 0 else ""
    return f"{step:,.0f}{of}" + (f" ({progress:.1%})" if progress is not None else "")


def _epoch(found: Status) -> str:
    epoch, most = finite_number(found.get("epoch")), finite_number(found.get("num_train_epochs"))
    if epoch is None:
        return ""
    return f"{epoch:.4g}" + (f" of {most:.4g}" if most is not None and most > 0 else "")


def _speed(found: Status) -> str:
    speed = finite_number(found.get("steps_per_second"))
    if speed is None or speed <= 0:
        return ""
    return f"{speed:.3g} steps/s" if speed >= 1 else f"{1 / speed:.3g} s/step"


def _duration(seconds: Any) -> str:
    number = finite_number(seconds)
    return "" if number is None or not 0 <= number < 1e11 else str(timedelta(seconds=round(number)))


def _checkpoints(found: Status) -> str:
    steps = found.get("checkpoints")
    if not isinstance(steps, list):
        return ""
    more = "..., " if len(steps) > 5 else ""
    return more + ", ".join(str(step) for step in steps[-5:])


def _memory(found: Status) -> Iterator[str]:
    rows = found.get("memory")
    for row in rows if isinstance(rows, list) else []:
        sizes = [
            ("", finite_number(row.get("rss_bytes"))),
            (" peak on the device", finite_number(row.get("peak_device_bytes"))),
        ]
        texts = [f"{size_shown(int(size))}{where}" for where, size in sizes if size]
        if texts:
            yield f"rank {row.get('rank')}: {', '.join(texts)}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
