"""Compares layouts of ranks with one process: losses, gradient norms, weights, bytes sent and held.

    python benchmarks/layouts.py [--layouts fsdp2,"hsdp 2x2"] [--variants tied,moe] [--steps 20] [--compiled]

Prints a row for each layout and variant, and ends with 1 if any is outside of its bounds. Each row is a run of real
processes over gloo on this machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
import multiprocessing
import socket
import sys
import tempfile
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from layout_names import LAYOUTS, VARIANTS, Layout, Variant
from layout_rows import run_row

COMPILED = "fsdp2 compiled"
MUON = "optimizer.optimizer=muon"
TABLE = [name for name in LAYOUTS if name not in (COMPILED, "one")]
_SECONDS = 600
_MUST = {"float32": (1e-5, 1e-4), "float64": (1e-10, 1e-10)}
"""How far losses and norms (relatively), and parameters (absolutely), may be from one process."""
_IN_BF16 = "mixed_precision=bf16_mixed"
_MUST_IN_BF16 = 2e-2
_MUST_OF_MUON = (1e-5, 2e-4, 1e-3)
"""Muon rounds gradients to bfloat16, by which the last bits of a sum over ranks grow, in every layout alike: after 20
steps replicas on four ranks are outside of these bounds too."""


@dataclass
class Compared:
    """A row beside the same training in one process."""

    loss: float
    norm: float
    parameters: float
    sent: dict[str, float]
    """Bytes of a step by kind, and the number of small sums."""
    sent_in_theory: dict[str, float]
    held: dict[str, float]
    """Bytes of rank 0."""
    held_in_theory: dict[str, float]

    def outside(self, layout: Layout, variant: Variant) -> list[str]:
        """What is not as it must be."""
        found = []
        if _IN_BF16 in layout.keys:
            found += [f"loss {self.loss:.1e}"] if self.loss > _MUST_IN_BF16 else []
        else:
            scalar, absolute = _MUST[variant.dtype]
            of_norm = scalar
            if MUON in variant.keys:
                scalar, of_norm, absolute = _MUST_OF_MUON
            found += [f"loss {self.loss:.1e}"] if not self.loss <= scalar else []
            found += [f"norm {self.norm:.1e}"] if not self.norm <= of_norm else []
            found += [f"parameters {self.parameters:.1e}"] if not self.parameters <= absolute else []
        for what, real, theory in (
            ("sent", self.sent, self.sent_in_theory),
            ("held", self.held, self.held_in_theory),
        ):
            found += [
                f"{what} {kind} {real.get(kind, 0)} for {theory[kind]}"
                for kind in theory
                if real.get(kind, 0) != theory[kind]
            ]
        return found + ([f"{self.sent['small']} small sums"] if self.sent.get("small", 0) > _SMALL_SUMS else [])


_SMALL_SUMS = 3 + 1
"""Of a step, at most: the losses, the norm over one or two dimensions of a mesh."""


def sent_in_theory(layout: Layout, variant: Variant, shapes: list[Any]) -> dict[str, float]:
    """Bytes of a step by kind: see "Going distributed"."""
    keys = dict(key.split("=") for key in layout.keys)
    shards = int(keys.get("parallel.data_parallel_shard_size", 1))
    micros = variant.accumulation
    if shards == 1:
        times = micros if keys.get("ddp.sync_each_micro_batch") == "true" else 1
        is_counted = layout.ranks > 1 and variant.door == "train"
        return {"reduce": times * _padded(shapes, 1, trained=True)} if is_counted else {}
    is_kept = keys.get("fsdp.reshard_after_forward") == "false"
    rest = 0.5 if "mixed_precision" in keys else 1.0
    exchanges = 1 if keys.get("ddp.sync_each_micro_batch") == "false" else micros
    scattered = _padded(shapes, shards, trained=True) * exchanges
    theory = {"gather": _padded(shapes, shards) * (1 if is_kept else 2) * micros * rest, "scatter": scattered}
    return theory | {"reduce": scattered / shards if layout.ranks > shards else 0}


def held_in_theory(layout: Layout, variant: Variant, shapes: list[Any]) -> dict[str, float]:
    """Bytes of rank 0: 4 for each parameter, 4 for its gradient, 8 for AdamW's state, in shards of whole rows."""
    keys = dict(key.split("=") for key in layout.keys)
    shards = int(keys.get("parallel.data_parallel_shard_size", 1))
    trained = _padded(shapes, shards, trained=True) / shards
    held = {"parameters": _padded(shapes, shards) / shards, "gradients": trained}
    return held if MUON in variant.keys else {**held, "state": 2 * trained}


def _padded(shapes: list[Any], shards: int, *, trained: bool = False) -> float:
    """Bytes of the parameters, with rows that the number of shards divides."""
    sizes = [
        math.ceil(shape[0] / shards) * shards * math.prod(shape[1:]) * width
        for shape, is_trained, width in shapes
        if is_trained or not trained
    ]
    return float(sum(sizes))


def compared(layout: Layout, variant: Variant, one: tuple[Any, Any], row: tuple[Any, Any]) -> Compared:
    """A row beside one process; each is what rank 0 found, and its parameters."""
    (alone, weights), (found, own) = one, row
    return Compared(
        loss=_apart(alone["losses"], found["losses"]),
        norm=_apart(alone["norms"], found["norms"]),
        parameters=max(float((weights[name] - own[name]).abs().max()) for name in weights),
        sent=found["sent"],
        sent_in_theory=sent_in_theory(layout, variant, found["shapes"]),
        held=found["held"],
        held_in_theory=held_in_theory(layout, variant, found["shapes"]),
    )


def _apart(expected: list[float], found: list[float]) -> float:
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, found, strict=True))


def alone_of(layout: str, variant: str) -> tuple[str, Variant]:
    """What a row is compared with: one process, but for dropout, whose masks are those of each share of the samples."""
    chosen = VARIANTS[variant]
    if variant == "dropout" and LAYOUTS[layout].ranks > 1:
        return f"ddp{LAYOUTS[layout].ranks}", chosen
    is_alike = chosen.same_micro_batches
    return "one", replace(chosen, accumulation=chosen.accumulation * LAYOUTS[layout].ranks) if is_alike else chosen


def run(layout: Layout, variant: Variant, steps: int, directory: Path) -> tuple[Any, Any]:
    """Run the ranks of a row; what rank 0 found, and its parameters."""
    directory.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank, port, layout, variant, steps, str(directory)))
        for rank in range(layout.ranks)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(_SECONDS)
        if rank.is_alive():
            rank.kill()
            rank.join()
    if any(rank.exitcode for rank in ranks):
        said = sorted(directory.glob("error-*"))
        raise RuntimeError(said[0].read_text() if said else f"ranks ended with {[rank.exitcode for rank in ranks]}")
    return json.loads((directory / "found.json").read_text()), torch.load(directory / "weights.pt")


def _rank(rank: int, port: int, layout: Layout, variant: Variant, steps: int, directory: str) -> None:
    os.chdir(directory)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(layout.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        with open("said", "w") as said, redirect_stdout(said):
            found = run_row(layout, variant, steps, parameters="weights.pt")
        if rank == 0:
            Path("found.json").write_text(json.dumps(found))
    except BaseException:  # noqa: BLE001 - told by the process that waits
        Path(f"error-{rank}").write_text(traceback.format_exc()[-2000:])
        os._exit(1)
    os._exit(0)


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--layouts", help="names, with commas")
    options.add_argument("--variants", help="names, with commas")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--compiled", action="store_true", help="add a row with torch.compile, which takes minutes")
    chosen = options.parse_args()
    layouts = chosen.layouts.split(",") if chosen.layouts else [*TABLE, *([COMPILED] if chosen.compiled else [])]
    variants = chosen.variants.split(",") if chosen.variants else list(VARIANTS)
    print("loss, norm: largest relative difference from one process; sent: bytes of a step in units of the parameters'")
    print(
        f"{'layout':19}{'variant':14}{'loss':>9}{'norm':>9}{'weights':>9}{'gather':>8}{'scatter':>8}{'reduce':>8}{'held':>7}"
    )
    ended_well = True
    with tempfile.TemporaryDirectory() as directory:
        known: dict[tuple[str, str], tuple[Any, Any]] = {}
        for variant in variants:
            for layout in layouts:
                if (reference := alone_of(layout, variant))[0] == layout:
                    continue
                if VARIANTS[variant].dtype == "float64" and _IN_BF16 in LAYOUTS[layout].keys:
                    continue
                place = Path(directory) / f"{layout} {variant}"
                key = (reference[0], repr(reference[1]))
                if key not in known:
                    known[key] = run(
                        LAYOUTS[reference[0]], reference[1], chosen.steps, place.with_name(f"{place.name} alone")
                    )
                row = run(LAYOUTS[layout], VARIANTS[variant], chosen.steps, place)
                found = compared(LAYOUTS[layout], VARIANTS[variant], known[key], row)
                ended_well &= _print(layout, variant, found, row[0]["shapes"])
    sys.exit(not ended_well)


def _print(layout: str, variant: str, found: Compared, shapes: list[Any]) -> bool:
    whole = _padded(shapes, 1)
    sent = "".join(f"{found.sent.get(kind, 0) / whole:8.3f}" for kind in ("gather", "scatter", "reduce"))
    outside = found.outside(LAYOUTS[layout], VARIANTS[variant])
    apart = f"{found.loss:9.1e}{found.norm:9.1e}{found.parameters:9.1e}"
    held = sum(found.held.values()) / whole
    print(f"{layout:19}{variant:14}{apart}{sent}{held:7.3f}  {'; '.join(outside) or 'as in theory'}", flush=True)
    return not outside


if __name__ == "__main__":
    main()
