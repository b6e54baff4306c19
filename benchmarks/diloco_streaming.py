"""How long workers wait for a thin line, and how much they send, with and without streaming.

Run with `python benchmarks/diloco_streaming.py`; it takes six minutes. A server and two workers, whose sockets pass a
proxy of 10 Mbit/s and 100 ms there and back, train for some rounds. Rows and limits:

- "bytes": of a submission, for each parameter, beside theory: a level, and a scale for each block (limit 1.01 times).
- "stall": share of the workers' time in which they do not train: they encode, wait, or merge. With streaming, as parts
  of the model or with one part in flight for a fixed number of steps, at most 0.2 of the share without.

Nothing is lost on this line. Simulated values are those of the same scenario, with the steps as they were measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from typing import Any

from onstep.diloco.simulator.reading import from_values
from onstep.diloco.simulator.simulation import simulate
from onstep.diloco.sizes import BLOCKS
from real_sites import RealRun, run_for_real

STALL_LIMIT, BYTES_LIMIT = 0.2, 1.01
_LINE = {"upload_mbit": 10, "download_mbit": 10, "round_trip_ms": 100, "step_seconds": 0.2}
_RUN: dict[str, Any] = {"sites": {"a": _LINE, "b": _LINE}, "sync_every": 40, "parameters": 1_000_000}
STREAMED: dict[str, dict[str, Any]] = {
    "4 fragments": {"num_fragments": 4},
    "4 fragments, merged after 8 steps": {"num_fragments": 4, "overlap_steps": 8},
    "1 fragment, merged after 20 steps": {"num_fragments": 1, "overlap_steps": 20},
    "1 fragment, eager": {"num_fragments": 1, "eager": True, "overlap_steps": 40},
}


def main() -> int:
    """Measure, print a row for each run, and return 1 if one is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", choices=tuple(BLOCKS), nargs="*", default=list(BLOCKS))
    arguments = parser.parse_args()
    held = True
    for codec in arguments.codec:
        values = {**_RUN, "codec": codec, "rounds": arguments.rounds}
        plain, stalled, simulated = _measured(values)
        print(f"stall  {codec}, no streaming: {stalled:.1%} of the time (simulated {simulated:.1%})", flush=True)
        held &= _show_bytes(codec, plain)
        for name, streamed in STREAMED.items():
            _, rest, simulated = _measured({**values, **streamed})
            holds = rest <= STALL_LIMIT * stalled
            shown = f"{rest:.1%} of the time (simulated {simulated:.1%}), {rest / stalled:.2f} of that without"
            print(f"stall  {codec}, {name}: {shown}, <= {STALL_LIMIT}: {_word(holds)}", flush=True)
            held &= holds
    return 0 if held else 1


def _measured(values: dict[str, Any]) -> tuple[RealRun, float, float]:
    scenario = from_values(values)
    run = run_for_real(scenario)
    return (
        run,
        statistics.fmean(run.stalled_share.values()),
        simulate(replace(run.as_measured(scenario), rounds=200)).idle_share,
    )


def _show_bytes(codec: str, run: RealRun) -> bool:
    theory: float = {"int8": 1.0, "int4": 0.5}[codec] + 4 / BLOCKS[codec]
    sent = statistics.fmean(run.sent_bytes.values()) / _RUN["parameters"]
    holds = bool(theory <= sent <= BYTES_LIMIT * theory)
    print(f"bytes  {codec}: {sent:.4f} for each parameter, theory {theory:.4f}: {_word(holds)}", flush=True)
    return holds


def _word(holds: bool) -> str:
    return "holds" if holds else "BEYOND THE LIMIT"


if __name__ == "__main__":
    sys.exit(main())
