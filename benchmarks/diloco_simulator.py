"""How fast `onstep diloco simulate` is, and how close its round times are to those of real workers.

Run with `python benchmarks/diloco_simulator.py` on a machine with two free cores, or with `--only speed|accuracy`. Rows
and limits:

- "speed": seconds for 1,000 workers and 1,000 rounds at ten sites, whose workers share the site's line (limit 60).
- "accuracy": median round time of a server and three workers that reach it through throttled sockets, divided by that
  of the simulation of the same scenario (limits 0.85 and 1.15), with all numbers of the scenario taken as they are:
  nothing is fitted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from onstep.diloco.simulator.reading import from_values
from onstep.diloco.simulator.simulation import simulate
from real_sites import run_for_real

LIMIT_SECONDS, LIMIT_RATIO = 60.0, 0.15
_LINE = {"upload_mbit": 16, "download_mbit": 16, "round_trip_ms": 40, "step_seconds": 0.05}
_SMALL = {"sync_every": 40, "parameters": 500_000}
SCENARIOS: dict[str, dict[str, Any]] = {
    "three equal sites, fp32": _SMALL | {"sites": {"a": _LINE, "b": _LINE, "c": _LINE}, "codec": "fp32", "rounds": 6},
    "unequal sites, int8": _SMALL
    | {
        "sites": {
            "a": _LINE,
            "thin": _LINE | {"upload_mbit": 3},
            "far": _LINE | {"step_seconds": 0.06, "round_trip_ms": 250},
        },
        "codec": "int8",
        "rounds": 6,
    },
    "a straggler, quorum of two": _SMALL
    | {"sites": {"a": _LINE, "b": _LINE, "slow": _LINE | {"step_seconds": 0.25}}, "codec": "int8", "rounds": 10},
}


def main() -> int:
    """Measure, print a row for each comparison, and return 1 if one is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("speed", "accuracy"))
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of the speed row")
    arguments = parser.parse_args()
    held = True
    if arguments.only != "accuracy":
        held &= _measure_speed(arguments.rounds)
    if arguments.only != "speed":
        for name, values in SCENARIOS.items():
            held &= _measure_accuracy(name, values)
    return 0 if held else 1


def _measure_speed(rounds: int) -> bool:
    site: dict[str, float] = {"workers": 100, "upload_mbit": 1000, "download_mbit": 1000, "round_trip_ms": 30}
    site |= {"step_jitter": 0.1, "worker_spread": 0.05, "tokens_per_step": 16_384}
    values = {"sites": {f"site-{n}": site for n in range(10)}, "codec": "int8", "rounds": rounds}
    started, cpu_started = time.perf_counter(), time.process_time()
    report = simulate(from_values(values))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    limit = LIMIT_SECONDS * rounds / 1000
    holds = seconds < limit
    print(
        f"speed: 1,000 workers, {report.num_rounds:,} rounds, {report.events:,} events in {seconds:.1f} s "
        f"({cpu_seconds:.1f} s of processor time, {report.seconds / 3600:.0f} simulated hours; limit {limit:.0f} s): "
        f"{_word(holds)}"
    )
    return holds


def _measure_accuracy(name: str, values: dict[str, Any]) -> bool:
    scenario = from_values(values)
    run = run_for_real(scenario)
    simulated = statistics.median([one.seconds for one in simulate(run.as_measured(scenario)).rounds][1:])
    real = statistics.median(run.round_seconds)
    holds = abs(real / simulated - 1.0) <= LIMIT_RATIO
    print(
        f"accuracy: {name}: a round lasts {real:.2f} s, simulated {simulated:.2f} s, ratio {real / simulated:.3f} "
        f"(limits {1 - LIMIT_RATIO} and {1 + LIMIT_RATIO}): {_word(holds)}"
    )
    return holds


def _word(holds: bool) -> str:
    return "holds" if holds else "BEYOND THE LIMIT"


if __name__ == "__main__":
    sys.exit(main())
