"""What a checkpoint costs: ours against the bare disk, a bare copy, and three other ways, interleaved, medians.

Each repetition runs every way once, in turn, on the same state and in the same process: a model of about 50 million
parameters with its AdamW state, about 600 MB. Before each the page cache is written out, and what it wrote is deleted
after. `write + fsync` and `copy in memory` are the references that the limits are multiples of. While a save goes on in
the background a small model trains in the main thread and takes its share of the cores; what that alone costs a plain
write is a row of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from onstep.checkpoint import (
    CheckpointManager,
    ModelState,
    Retention,
    SaveRequest,
    SharingPattern,
    StateComponent,
    encode_state,
)
from onstep.distributed import World

HIDDEN = 512
CHUNK_BYTES = 8 * 1024**2


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    reference: str = ""
    """The line it is compared with."""
    limit: float | None = None
    """How many times the reference it may take."""


ROWS = [
    Row("write + fsync of the same bytes"),
    Row("onstep, blocking", "write + fsync of the same bytes", 1.5),
    Row("torch.save + fsync", "write + fsync of the same bytes"),
    Row("safetensors.save_file + fsync", "write + fsync of the same bytes"),
    Row("DCP, blocking", "write + fsync of the same bytes"),
    Row("onstep, async: until durable, loop waits", "write + fsync of the same bytes", 1.5),
    Row("write + fsync in a thread, loop trains", "write + fsync of the same bytes"),
    Row("onstep, async: until durable", "write + fsync of the same bytes", 1.5),
    Row("DCP async: until durable", "write + fsync of the same bytes"),
    Row("DCP async, kept stager: until durable", "write + fsync of the same bytes"),
    Row("copy in memory of the same bytes"),
    Row("onstep, async: loop blocked", "copy in memory of the same bytes", 1.3),
    Row("onstep, async: finalize in the loop", "copy in memory of the same bytes"),
    Row("DCP async: loop blocked", "copy in memory of the same bytes"),
    Row("DCP async, kept stager: loop blocked", "copy in memory of the same bytes"),
    Row("small training step, alone: median"),
    Row("small training step, alone: slowest", "small training step, alone: median"),
    Row("onstep, async: slowest step meanwhile", "small training step, alone: median"),
    Row("DCP async: slowest step meanwhile", "small training step, alone: median"),
    Row("DCP async, kept stager: slowest step meanwhile", "small training step, alone: median"),
]


class Case:
    """The state to save, and a small model that trains meanwhile."""

    def __init__(self, parameters: int) -> None:
        torch.manual_seed(0)
        self.model = stack_of_blocks(parameters)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.components = [
            StateComponent("model", ModelState([self.model]), SharingPattern.REPLICATED),
            StateComponent("optimizer", self.optimizer, SharingPattern.REPLICATED),
        ]
        self.tensors = [tensor for part in self.components for tensor in self._tensors_of(part)]
        self.copies = [torch.ones_like(tensor) for tensor in self.tensors]
        self._small = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        self._small_optimizer = torch.optim.SGD(self._small.parameters(), lr=1e-3)
        self._batch = torch.randn(64, 256)

    @staticmethod
    def _tensors_of(component: StateComponent) -> list[Tensor]:
        return list(encode_state(component.stateful.state_dict())[0].values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def plain_state(self) -> dict[str, Any]:
        """The same state, for the others."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def train_step(self) -> None:
        """A step of the small model."""
        self._small_optimizer.zero_grad()
        self._small(self._batch).square().mean().backward()
        self._small_optimizer.step()


def stack_of_blocks(parameters: int) -> nn.Module:
    """Feed-forward blocks, until there are as many parameters."""
    blocks: list[nn.Module] = []
    count = 0
    while count < parameters:
        blocks.append(nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)))
        count += sum(parameter.numel() for parameter in blocks[-1].parameters())
    return nn.Sequential(*blocks)


Times = dict[str, float]


@contextmanager
def clean_dir(parent: Path) -> Iterator[Path]:
    """An empty directory, with nothing left to be written back by others; gone afterwards."""
    directory = Path(tempfile.mkdtemp(dir=parent))
    os.sync()
    yield directory
    shutil.rmtree(directory)


def timed(work: Callable[[], object]) -> float:
    """Seconds that the work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def fsync(path: Path) -> None:
    """Make a file or directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def plain_write(case: Case, directory: Path) -> Times:
    """The tensors' bytes into one file, in order."""

    return {"write + fsync of the same bytes": timed(lambda: write_bytes(case, directory))}


def plain_write_beside_training(case: Case, directory: Path) -> Times:
    """The same in a thread: what the disk gives while training takes its share of the cores."""
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(timed, lambda: write_bytes(case, directory))
        while not writing.done():
            case.train_step()
    return {"write + fsync in a thread, loop trains": writing.result()}


def write_bytes(case: Case, directory: Path) -> None:
    """Write and sync one file of the tensors' bytes."""
    with open(directory / "bytes", "wb", buffering=0) as file:
        for tensor in case.tensors:
            data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
            for start in range(0, data.nbytes, CHUNK_BYTES):
                file.write(data[start : start + CHUNK_BYTES])
        os.fsync(file.fileno())
    fsync(directory)


def memory_copy(case: Case, directory: Path) -> Times:
    """Each tensor into memory that was touched before."""

    def copy() -> None:
        for copied, tensor in zip(case.copies, case.tensors, strict=True):
            copied.copy_(tensor)

    return {"copy in memory of the same bytes": timed(copy)}


def onstep_blocking(case: Case, directory: Path) -> Times:
    """Durable on return."""
    manager = CheckpointManager(directory, World())
    return {"onstep, blocking": timed(lambda: manager.save(SaveRequest(1, case.components, {})))}


class OnstepAsync:
    """The manager is kept: its buffers are warm from the second save on, as in a run."""

    def __init__(self, root: Path) -> None:
        self._manager = CheckpointManager(root, World(), async_save=True, retention=Retention(most_recent_k=1))
        self._step = 0

    def __call__(self, case: Case, directory: Path) -> Times:
        """Save, and train until it is durable."""
        name = "onstep, async: "
        waiting = timed(lambda: self._save_and_wait(case))
        os.sync()
        self._step += 1
        start = time.perf_counter()
        blocked = timed(lambda: self._manager.save(SaveRequest(self._step, case.components, {})))
        steps = []
        while not self._manager.is_written:
            steps.append(timed(case.train_step))
        finalized = timed(self._manager.finalize)
        durable = time.perf_counter() - start
        return {
            name + "loop blocked": blocked,
            name + "finalize in the loop": finalized,
            name + "until durable, loop waits": waiting,
            name + "until durable": durable,
            name + "slowest step meanwhile": max(steps),
        }

    def _save_and_wait(self, case: Case) -> None:
        self._step += 1
        self._manager.save(SaveRequest(self._step, case.components, {}))
        self._manager.finalize()


def torch_save(case: Case, directory: Path) -> Times:
    """One file, pickled."""

    def save() -> None:
        torch.save(case.plain_state(), directory / "state.pt")
        fsync(directory / "state.pt")
        fsync(directory)

    return {"torch.save + fsync": timed(save)}


def safetensors_save(case: Case, directory: Path) -> Times:
    """One file of the same tensors."""

    def save() -> None:
        save_file({str(i): tensor for i, tensor in enumerate(case.tensors)}, directory / "state.safetensors")
        fsync(directory / "state.safetensors")
        fsync(directory)

    return {"safetensors.save_file + fsync": timed(save)}


def dcp_blocking(case: Case, directory: Path) -> Times:
    """torch.distributed.checkpoint, one rank."""
    return {"DCP, blocking": timed(lambda: save(case.plain_state(), storage_writer=FileSystemWriter(directory)))}


class DcpAsync:
    """torch.distributed.checkpoint in the background; with `is_kept` one stager serves all saves."""

    def __init__(self, is_kept: bool) -> None:
        self._name = "DCP async, kept stager: " if is_kept else "DCP async: "
        options = StagingOptions(False, False, False, False)  # what needs no GPU
        self._stager = DefaultStager(options) if is_kept else None

    def __call__(self, case: Case, directory: Path) -> Times:
        """Save, and train until the future is done."""
        start = time.perf_counter()
        writer = FileSystemWriter(directory)
        done: Any = async_save(case.plain_state(), storage_writer=writer, async_stager=self._stager)
        blocked = time.perf_counter() - start
        future: Future[Any] = done if isinstance(done, Future) else done.upload_completion
        steps = []
        while not future.done():
            steps.append(timed(case.train_step))
        future.result()
        durable = time.perf_counter() - start
        return {
            self._name + "loop blocked": blocked,
            self._name + "until durable": durable,
            self._name + "slowest step meanwhile": max(steps),
        }


def training_alone(case: Case, directory: Path) -> Times:
    """What a step of the small model takes when nothing is saved."""
    steps = [timed(case.train_step) for _ in range(500)]
    name = "small training step, alone: "
    return {name + "median": statistics.median(steps), name + "slowest": max(steps)}


def measure(case: Case, parent: Path, repetitions: int) -> dict[str, float]:
    """Median seconds of each row; the first round warms up and does not count."""
    onstep_root = Path(tempfile.mkdtemp(dir=parent))
    ways: list[Callable[[Case, Path], Times]] = [
        plain_write,
        plain_write_beside_training,
        onstep_blocking,
        memory_copy,
        OnstepAsync(onstep_root),
        torch_save,
        safetensors_save,
        dcp_blocking,
        DcpAsync(is_kept=False),
        DcpAsync(is_kept=True),
        training_alone,
    ]
    times: dict[str, list[float]] = defaultdict(list)
    for repetition in range(repetitions + 1):
        for way in ways if repetition % 2 else reversed(ways):
            with clean_dir(parent) as directory:
                found = way(case, directory)
            for name, seconds in found.items() if repetition else ():
                times[name].append(seconds)
    shutil.rmtree(onstep_root)
    return {name: statistics.median(values) for name, values in times.items()}


def print_table(medians: dict[str, float]) -> None:
    """One line a row: median, ratio to its reference, limit and whether it is kept."""
    print(f"{'':<50}{'ms':>10}{'ratio':>8}  {'limit':<7}")
    for row in ROWS:
        line = f"{row.name:<50}{medians[row.name] * 1e3:>10.1f}"
        if row.reference:
            ratio = medians[row.name] / medians[row.reference]
            line += f"{ratio:>8.2f}"
            if row.limit is not None:
                line += f"  {row.limit:<5} {'pass' if ratio <= row.limit else 'FAIL'}"
        print(line)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure; default: the temporary directory"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    case = Case(options.parameters)
    print(
        f"torch {torch.__version__}, {options.threads} threads, {len(case.tensors)} tensors, {case.nbytes / 1e6:.0f} MB"
        f", {options.repetitions} interleaved repetitions, medians"
    )
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        print_table(measure(case, Path(directory), options.repetitions))
    dist.destroy_process_group()
    print(f"file: {Path(__file__).name}")


if __name__ == "__main__":
    main()
