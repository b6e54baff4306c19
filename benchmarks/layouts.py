"""Compares layouts of ranks with one process: losses, gradient norms, weights, bytes sent and held.

    python benchmarks/layouts.py [--layouts fsdp2,"hsdp 2x2"] [--variants tied,moe] [--steps 20] [--compiled]
    python benchmarks/layouts.py --page docs/guide/layouts.md [--steps 10]

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
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from layout_names import IN_BF16, IN_MXFP8, LAYOUTS, MASTERS, PAGE, VARIANTS, Layout, Variant
from layout_page import EVALUATION, LOSS, ROWS, SAME, TOKENS, Found, write
from layout_rows import run_row
from onstep.errors import ConfigError
from stage_layouts import held_in_parts, sent_in_parts
from tensor_layouts import small_sums_of_experts

COMPILED = "fsdp2 compiled"
MUON = "optimizer.optimizer=muon"
_PRECISELY = "optimizer.muon_fp32_matmul_prec=highest"
STARTS = "starts.pt"
TABLE = [name for name in LAYOUTS if name not in (COMPILED, "one", "one MXFP8")]
_SECONDS, _SECONDS_TO_FAIL = 1800, 40
_MUST = {"float32": (1e-5, 1e-4), "float64": (1e-10, 1e-10)}
"""How far losses and norms (relatively), and parameters (absolutely), may be from one process."""
_MUST_IN_BF16 = 2e-2
"""Of losses and norms where something rounds to bfloat16. From step to step such differences grow, so that norms of
replicas in autocast are up to 10 % from one process in autocast. Norms in bf16 are therefore held in a second run,
whose steps begin with the float32 weights of one process; parameters are only shown. So is it in MXFP8, where a
number close to the middle between two that can be represented is rounded to the other one, an eighth of it away."""


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
    along: tuple[float, float] | None = None
    """Loss and norm of a run whose steps begin with the parameters of one process."""
    evaluated: float = 0.0
    """Of the losses of evaluations."""
    generates_alike: bool = True
    """Whether the model adds the same tokens to prompts."""
    small: int = 0
    """The greatest number of small sums."""
    others: list[str] = field(default_factory=list)
    """What other ranks have sent or held that is not as in theory."""

    def outside(self, layout: Layout, variant: Variant) -> list[str]:
        """What is not as it must be."""
        rounds = not {IN_BF16, MASTERS}.isdisjoint(layout.keys) or (
            MUON in variant.keys and _PRECISELY not in variant.keys
        )
        scalar, absolute = (_MUST_IN_BF16, math.inf) if rounds else _MUST[variant.dtype]
        if layout.ranks == 1 and not rounds:
            scalar = absolute = 0.0  # shards on one rank
        loss, norm = (self.loss, self.norm) if self.along is None else (max(self.loss, self.along[0]), self.along[1])
        found: list[str] = []
        if self.along is not None and IN_MXFP8 in layout.keys:
            found += [f"drift {self.loss:.1e}"] if not self.loss <= _MUST_IN_BF16 else []
            loss, absolute = self.along[0], math.inf
        found += [f"loss {loss:.1e}"] if not loss <= scalar else []
        found += [f"norm {norm:.1e}"] if not norm <= scalar else []
        found += [f"parameters {self.parameters:.1e}"] if not self.parameters <= absolute else []
        found += [f"evaluation {self.evaluated:.1e}"] if not self.evaluated <= scalar else []
        found += [] if self.generates_alike or rounds or IN_MXFP8 in layout.keys else ["other tokens"]
        if variant.on_page:
            return found
        found += [*_differences("sent", self.sent, self.sent_in_theory), *self.others]
        found += _differences("held", self.held, self.held_in_theory)
        return found + ([f"{self.sent['small']} small sums"] if self.sent.get("small", 0) > self.small else [])


def _differences(what: str, real: dict[str, float], theory: dict[str, float]) -> list[str]:
    return [
        f"{what} {kind} {real.get(kind, 0)} for {theory[kind]}" for kind in theory if real.get(kind, 0) != theory[kind]
    ]


def _of_other_ranks(layout: Layout, variant: Variant, found: list[Any], whole: Any) -> list[str]:
    """What ranks after the first have sent or held that is not as in theory."""
    differences = []
    for rank, one in enumerate(found, 1):
        for what, theory in (("sent", sent_in_theory), ("held", held_in_theory)):
            expected = theory(layout, variant, whole["shapes"], whole["names"], rank)
            differences += [f"rank {rank}: {said}" for said in _differences(what, one[what], expected)]
    return differences


_SMALL_SUMS = 3 + 1
"""Of a step, at most: the losses, the norm over one or two dimensions of a mesh."""


def _small_sums(layout: Layout, variant: Variant, names: list[str]) -> int:
    """Small sums of a step, at most."""
    if layout.tensor_ranks == 1:
        return _SMALL_SUMS
    found = _SMALL_SUMS + small_sums_of_experts(layout, variant, names)
    if variant.loss == "model" or variant.door == "pretrain":  # the maximum of logits, and sums over the vocabulary
        depths = int(dict(_pairs(variant.keys)).get("model.mtp_num_layers", 0))
        found += 2 * variant.accumulation * variant.losses_of_micro_batch * (1 + depths)
    return found


def sent_in_theory(
    layout: Layout, variant: Variant, shapes: list[Any], names: list[str], rank: int = 0
) -> dict[str, float]:
    """Bytes of a step by kind on a rank: see "Going distributed"; nothing for variants of the page of layouts."""
    keys = dict(key.split("=") for key in layout.keys)
    if variant.on_page:
        return {}
    if layout.stage_ranks * layout.tensor_ranks > 1:
        return sent_in_parts(layout, variant, shapes, names, rank)
    if _divides_updates(keys):
        instances = int(keys.get("ddp.num_distributed_optimizer_instances", 1))
        shards = layout.ranks // instances
        whole = _padded(shapes, shards, trained=True)
        gathered = whole
        if IN_MXFP8 in layout.keys:  # a byte for each number of a matrix, and one for each 32 of a row
            vectors = _padded([one for one in shapes if len(one[0]) < 2], shards, trained=True)
            rows = [([*shape[:-1], shape[-1] + math.ceil(shape[-1] / 32)], trained, 1) for shape, trained, _ in shapes]
            gathered = vectors + _padded([one for one in rows if len(one[0]) > 1], shards, trained=True)
        scattered = whole * (2 if MASTERS in layout.keys else 1)  # in float32
        return {"gather": gathered, "scatter": scattered, "reduce": whole / shards if instances > 1 else 0}
    shards = _shards(layout)
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


def held_in_theory(
    layout: Layout, variant: Variant, shapes: list[Any], names: list[str], rank: int = 0
) -> dict[str, float]:
    """Bytes of a rank: 4 for each parameter, 4 for its gradient, 8 for AdamW's state, in shards of whole rows."""
    keys = dict(key.split("=") for key in layout.keys)
    if variant.on_page:
        return {}
    if layout.stage_ranks * layout.tensor_ranks > 1 or not _divides_updates(keys):
        return held_in_parts(layout, variant, shapes, names, rank)
    shards = layout.ranks // int(keys.get("ddp.num_distributed_optimizer_instances", 1))
    held = {"parameters": _padded(shapes, 1)}
    own = _of_shard(shapes, shards, rank % shards)
    if IN_MXFP8 in layout.keys:
        held["masters"] = own
    # for each 2 bytes, two averages in float32 and the other half of the master
    state = (5 if MASTERS in layout.keys else 2) * own
    return held if MUON in variant.keys else {**held, "state": state}  # the gradients are in buffers


def _divides_updates(keys: dict[str, str]) -> bool:
    return keys.get("ddp.use_distributed_optimizer") == "true"


def _shards(layout: Layout) -> int:
    keys = dict(key.split("=") for key in layout.keys)
    number = int(keys.get("parallel.data_parallel_shard_size", 1))
    return layout.ranks if number == -1 else number


def _of_shard(shapes: list[Any], shards: int, number: int) -> float:
    """Bytes of the rows of trained parameters that a shard has; the last ones have fewer."""
    total = 0.0
    for shape, is_trained, width in shapes:
        rows = math.ceil(shape[0] / shards)
        here = max(0, min(rows, shape[0] - number * rows))
        total += here * math.prod(shape[1:]) * width if is_trained else 0
    return total


def _padded(shapes: list[Any], shards: int, *, trained: bool = False) -> float:
    """Bytes of the parameters, with rows that the number of shards divides."""
    sizes = [
        math.ceil(shape[0] / shards) * shards * math.prod(shape[1:]) * width
        for shape, is_trained, width in shapes
        if is_trained or not trained
    ]
    return float(sum(sizes))


def compared(
    layout: Layout, variant: Variant, one: tuple[Any, Any], row: tuple[Any, Any], along: dict[str, Any] | None = None
) -> Compared:
    """A row beside one process; each is what rank 0 found, and its parameters.

    Args:
        layout: of the row.
        variant: of both.
        one: one process.
        row: the row.
        along: what rank 0 found where each step began with the parameters of one process.
    """
    (alone, weights), (found, own) = one, row
    whole = alone if layout.stage_ranks > 1 else found  # a rank with stages has some of the parameters
    return Compared(
        loss=_apart(alone["losses"], found["losses"]),
        norm=_apart(alone["norms"], found["norms"]),
        parameters=max(float((weights[name] - own[name]).abs().max()) for name in weights),
        sent=found["sent"],
        sent_in_theory=sent_in_theory(layout, variant, whole["shapes"], whole["names"]),
        held=found["held"],
        held_in_theory=held_in_theory(layout, variant, whole["shapes"], whole["names"]),
        evaluated=_apart(alone["evaluated"], found["evaluated"]),
        generates_alike=alone["tokens"] == found["tokens"],
        small=_small_sums(layout, variant, whole["names"]),
        others=_of_other_ranks(layout, variant, found.get("others", []), whole),
        along=None
        if along is None
        else (_apart(alone["losses"], along["losses"]), _apart(alone["norms"], along["norms"])),
    )


def _pairs(overrides: tuple[str, ...]) -> Iterator[list[str]]:
    return (one.split("=") for one in overrides)


def _apart(expected: list[float], found: list[float]) -> float:
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, found, strict=True)), default=0.0)


def has_second_run(layout: str) -> bool:
    """Whether norms are held in a run whose steps begin with the weights of one process, as its numbers are rounded."""
    return not {IN_BF16, IN_MXFP8, MASTERS}.isdisjoint(LAYOUTS[layout].keys)


def alone_of(layout: str, variant: str) -> tuple[str, Variant]:
    """What a row is compared with: one process, but for dropout, whose masks are those of each share of the samples."""
    chosen = variant_of(layout, variant)
    if chosen.has_dropout and LAYOUTS[layout].data_ranks > 1:
        return f"ddp{LAYOUTS[layout].data_ranks}", chosen
    is_alike = chosen.same_micro_batches
    return "one MXFP8" if IN_MXFP8 in LAYOUTS[layout].keys else "one", replace(
        chosen, accumulation=chosen.accumulation * LAYOUTS[layout].data_ranks
    ) if is_alike else chosen


def variant_of(layout: str, variant: str) -> Variant:
    """What a row trains: of a pipeline four layers, and as many micro-batches as its schedule runs."""
    chosen = VARIANTS[variant]
    if LAYOUTS[layout].stage_ranks == 1 or chosen.on_page:
        return chosen
    accumulation = 4 if LAYOUTS[layout].data_ranks == 1 else 3
    return replace(chosen, keys=(*chosen.keys, "model.num_layers=4"), accumulation=accumulation)


def run(
    layout: Layout,
    variant: Variant,
    steps: int,
    directory: Path,
    *,
    keeps_starts: bool = False,
    along: str | None = None,
) -> tuple[Any, Any]:
    """Run the ranks of a row; what rank 0 found, and its parameters.

    Args:
        layout: of the row.
        variant: what is trained.
        steps: the number of steps.
        directory: where it runs.
        keeps_starts: whether it writes the parameters with which each step began to `starts.pt`.
        along: such a file, whose parameters each step begins with.

    Raises:
        RuntimeError: with what a rank raised, a refusal too.
    """
    files = {"starts": STARTS if keeps_starts else None, "along": along}
    [found] = run_all(layout, [variant], steps, directory, files)
    if "refused" in found[0]:
        raise RuntimeError(f"ConfigError: {found[0]['refused']}")
    return found


def run_all(
    layout: Layout,
    variants: list[Variant],
    steps: int,
    directory: Path,
    files: dict[str, str | None] | None = None,
) -> list[tuple[Any, Any]]:
    """Run rows of one layout in one start of its ranks; of each what rank 0 found, and its parameters.

    What all ranks refuse has `refused` in place of the rest.

    Args:
        layout: of the rows.
        variants: what is trained.
        steps: the number of steps.
        directory: where they run.
        files: of the options of `run_row`.

    Raises:
        RuntimeError: with what a rank raised.
    """
    directory.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank, port, layout, variants, steps, str(directory), files or {}))
        for rank in range(layout.ranks)
    ]
    for rank in ranks:
        rank.start()
    _wait(ranks)
    if any(rank.exitcode for rank in ranks):
        said = sorted(directory.glob("error-*"))
        raise RuntimeError(said[0].read_text() if said else f"ranks ended with {[rank.exitcode for rank in ranks]}")
    found, *others = (json.loads((directory / f"found-{rank}.json").read_text()) for rank in range(layout.ranks))
    refused = [one.get("refused") for one in found]
    if any([one.get("refused") for one in other] != refused for other in others):
        raise RuntimeError(f"ranks refuse different things: {[refused, *others]}")
    return [
        (one | {"others": rest}, None if "refused" in one else torch.load(directory / _weights(at)))
        for at, (one, *rest) in enumerate(zip(found, *others, strict=True))
    ]


def _wait(ranks: list[Any]) -> None:
    """Until all ranks have ended; some seconds after one has failed, the others are killed."""
    deadline = time.monotonic() + _SECONDS
    while any(rank.is_alive() for rank in ranks):
        if any(rank.exitcode for rank in ranks):
            deadline = min(deadline, time.monotonic() + _SECONDS_TO_FAIL)
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(0.01)


def _weights(number: int) -> str:
    return f"weights-{number}.pt"


def _rank(
    rank: int,
    port: int,
    layout: Layout,
    variants: list[Variant],
    steps: int,
    directory: str,
    files: dict[str, str | None],
) -> None:
    os.chdir(directory)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(layout.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    found: list[Any] = []
    try:
        with open("said", "w") as said, redirect_stdout(said):
            for number, variant in enumerate(variants):
                try:
                    found.append(run_row(layout, variant, steps, parameters=_weights(number), **files))
                except ConfigError as error:
                    found.append({"refused": str(error)})
        Path(f"found-{rank}.json").write_text(json.dumps(found))
    except BaseException:  # noqa: BLE001 - told by the process that waits
        Path(f"error-{rank}").write_text(traceback.format_exc()[-4000:])
        os._exit(1)
    os._exit(0)


def measured(steps: int, directory: Path, rows: Iterable[str] = ROWS.values()) -> dict[tuple[str, str], Found]:
    """What the page of layouts says, by layout and variant.

    Args:
        steps: of each training.
        directory: where they run.
        rows: the layouts.
    """
    variants = list(PAGE)
    wanted = {alone_of(layout, variant)[0] for layout in rows for variant in variants}
    alone = {
        name: run_all(LAYOUTS[name], [VARIANTS[one] for one in variants], steps, directory / f"alone {name}")
        for name in sorted(wanted)
    }
    found: dict[tuple[str, str], Found] = {}
    for layout in rows:
        ran = run_all(LAYOUTS[layout], [VARIANTS[one] for one in variants], steps, directory / layout)
        for number, variant in enumerate(variants):
            one, row = alone[alone_of(layout, variant)[0]][number], ran[number]
            if "refused" in row[0]:
                found[layout, variant] = Found(refusal=row[0]["refused"])
                print(f"{layout:19}{variant:15} refused: {row[0]['refused']}", flush=True)
                continue
            beside = compared(LAYOUTS[layout], VARIANTS[variant], one, row)
            found[layout, variant] = Found(
                {
                    LOSS: f"{max(beside.loss, beside.norm):.0e}",
                    EVALUATION: f"{beside.evaluated:.0e}",
                    TOKENS: SAME if beside.generates_alike else "others",
                }
            )
            outside = beside.outside(LAYOUTS[layout], VARIANTS[variant])
            apart = f"{beside.loss:9.1e}{beside.norm:9.1e}{beside.parameters:9.1e}{beside.evaluated:9.1e}"
            print(f"{layout:19}{variant:15}{apart}  {'; '.join(outside) or 'as one process'}", flush=True)
    return found


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--layouts", help="names, with commas")
    options.add_argument("--variants", help="names, with commas")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument(
        "--compiled", action="store_true", help="add a row with torch.compile, one to two minutes each"
    )
    options.add_argument("--page", type=Path, help="measure the features of the page of layouts, and write its table")
    chosen = options.parse_args()
    if chosen.page is not None:
        with tempfile.TemporaryDirectory() as directory:
            found = measured(chosen.steps, Path(directory))
        write(chosen.page, found)
        return
    layouts = chosen.layouts.split(",") if chosen.layouts else [*TABLE, *([COMPILED] if chosen.compiled else [])]
    variants = chosen.variants.split(",") if chosen.variants else [one for one in VARIANTS if one not in PAGE]
    print("loss, norm: largest relative difference from one process; sent: bytes of a step in units of the parameters'")
    print(
        f"{'layout':23}{'variant':18}{'loss':>9}{'norm':>9}{'weights':>9}{'gather':>8}{'scatter':>8}{'reduce':>8}{'send':>8}{'held':>7}"
    )
    ended_well = True
    with tempfile.TemporaryDirectory() as directory:
        known: dict[tuple[str, str], tuple[tuple[Any, Any], str]] = {}
        for variant in variants:
            for layout in layouts:
                if (reference := alone_of(layout, variant))[0] == layout:
                    continue
                if VARIANTS[variant].dtype == "float64" and has_second_run(layout):
                    continue
                if MASTERS in LAYOUTS[layout].keys and (
                    VARIANTS[variant].door == "train" or MUON in VARIANTS[variant].keys
                ):
                    continue  # by an optimizer of the caller's own; of whole matrices
                if variant == "dropout" and IN_MXFP8 in LAYOUTS[layout].keys:
                    continue  # one process draws other masks, and replicas have other weights
                place = Path(directory) / f"{layout} {variant}"
                key = (reference[0], repr(reference[1]))
                if key not in known:
                    alone = Path(directory) / f"alone {len(known)}"
                    run_alone = run(LAYOUTS[reference[0]], reference[1], chosen.steps, alone, keeps_starts=True)
                    known[key] = run_alone, str(alone / STARTS)
                one, starts = known[key]
                trained = variant_of(layout, variant)
                try:
                    row = run(LAYOUTS[layout], trained, chosen.steps, place)
                except RuntimeError as error:
                    if (refusal := _refusal_in(str(error))) is None:
                        raise
                    print(f"{layout:23}{variant:18} refused: {refusal}", flush=True)
                    continue
                along = None
                if has_second_run(layout):
                    own = place.with_name(f"{place.name} along")
                    along, _ = run(LAYOUTS[layout], VARIANTS[variant], chosen.steps, own, along=starts)
                beside = compared(LAYOUTS[layout], trained, one, row, along)
                ended_well &= _print(layout, variant, beside, one[0]["shapes"])
    sys.exit(not ended_well)


def _refusal_in(text: str) -> str | None:
    """What a row's configuration is refused with, if that is what ended it."""
    lines = [line for line in text.splitlines() if "ConfigError: " in line]
    return lines[-1].partition("ConfigError: ")[2] if lines else None


def _print(layout: str, variant: str, found: Compared, shapes: list[Any]) -> bool:
    whole = _padded(shapes, 1)
    sent = "".join(f"{found.sent.get(kind, 0) / whole:8.3f}" for kind in ("gather", "scatter", "reduce", "send"))
    outside = found.outside(LAYOUTS[layout], variant_of(layout, variant))
    apart = f"{found.loss:9.1e}{found.norm:9.1e}{found.parameters:9.1e}"
    held = sum(found.held.values()) / whole
    print(f"{layout:23}{variant:18}{apart}{sent}{held:7.3f}  {'; '.join(outside) or 'as in theory'}", flush=True)
    if found.along is not None:
        loss, norm = found.along
        print(f"{'':8}{'with the weights of one':25}{loss:9.1e}{norm:9.1e}", flush=True)
    return not outside


if __name__ == "__main__":
    main()
