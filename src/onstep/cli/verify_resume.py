"""`onstep verify-resume`: proves with the user's own job that kills change nothing, or names what they change."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from tqdm import tqdm

from onstep.cli.application import Imports, Recipe
from onstep.cli.config import configuration
from onstep.cli.exit_codes import ERROR
from onstep.config import ConfigContainer, resolve
from onstep.config.lengths import train_iters
from onstep.errors import ConfigError, OnstepError

WORDS = (
    "checkpoint.certify=true",
    "checkpoint.resume=true",
    "checkpoint.save=null",
    "logger.logging_dir=null",
    "run.save_weights=true",
    "train.exit_interval=null",
    "train.exit_duration_in_mins=null",
)
"""What the proof needs of the job, beside a run folder of its own: nothing is written elsewhere, nothing ends early."""

_CAUSES = {
    "samples": "The data order depends on something that no checkpoint holds.",
    "rng": "Something draws random numbers at the start of a process, or has a random generator of its own.",
    "learning_rate": "A scheduler, or a callback that sets the rate, has a state that no checkpoint holds.",
    "loss": "Something that the loss depends on is in no checkpoint: a callback's state, what it does to weights when "
    "training begins, a buffer that is not persistent.",
    "weights": "The optimizer, or what a callback does to weights or gradients, has a state that no checkpoint holds.",
}

POLL_SECONDS = 0.002
TEARDOWN_SECONDS = 60.0
"""How long torchrun may take to end the other ranks after one was killed."""
_STEP = re.compile(rb'"step": (\d+)')


class JobError(OnstepError):
    """The job ended with an error of its own."""


@dataclass(frozen=True)
class UserJob:
    """`onstep train` with the user's words, in a run folder of its own."""

    words: tuple[str, ...]
    """Everything after `onstep train`."""
    ranks: int
    output_dir: Path
    """The run is `<output_dir>/run`."""

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.output_dir / "run"

    @property
    def log(self) -> Path:
        """What its processes print."""
        return self.output_dir / "output.txt"

    def newest_checkpoint(self) -> int:
        """The step that the next start continues from; 0 without a checkpoint."""
        names = (path.name.partition("-")[2] for path in (self.run / "checkpoints").glob("checkpoint-*"))
        return max((int(step) for step in names if step.isdigit()), default=0)

    def step(self) -> int:
        """The last step in the certificate of rank 0, also while it is written; 0 without one."""
        try:
            with (self.run / "certificate" / "rank_0.json").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                found = _STEP.findall(file.read())
        except FileNotFoundError:
            return 0
        return int(found[-1]) if found else 0

    def start(self) -> Attempt:
        """Start it, or continue it where it was killed."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        own = [f"run.output_dir={self.output_dir}", "run.name=run", "run.fresh=false"]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *launcher[: 4 * (self.ranks > 1)], "-m", "onstep", "train", *self.words, *own],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us; we end the job
            )
        return Attempt(self, process)


class Attempt:
    """One start of a job. As a context manager it leaves no process behind."""

    def __init__(self, job: UserJob, process: subprocess.Popen[bytes]) -> None:
        self._job = job
        self._process = process

    def wait_for(self, reached: Callable[[], bool], tell: Callable[[int], None]) -> bool:
        """Wait until something holds (True) or the job is done (False); `tell` is told the step meanwhile.

        Raises:
            JobError: when the job fails by itself.
        """
        while not reached():
            code = self._process.poll()
            if code is not None:
                tell(self._job.step())
                if code != 0:
                    lines = self._job.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
                    last_words = "\n".join(f"  {line}" for line in lines)
                    raise JobError(
                        f"the job failed by itself, with exit code {code}:\n{last_words}\n"
                        f"All it printed is in {self._job.log}"
                    )
                return False
            tell(self._job.step())
            time.sleep(POLL_SECONDS)
        return True

    def kill(self, chance: random.Random) -> str | None:
        """SIGKILL for the job, or for one of its ranks; returns for whom, None if the job was done before."""
        members = _children_of(self._process.pid) if self._job.ranks > 1 else []
        victim = chance.randrange(self._job.ranks)
        is_alone = chance.random() < 0.5 and len(members) == self._job.ranks
        if is_alone:
            with suppress(ProcessLookupError):
                os.kill(members[victim], signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TEARDOWN_SECONDS)
        self.kill_all()
        if self._process.returncode == 0:
            return None
        return f"rank {victim}" if is_alone else "all"

    def kill_all(self) -> None:
        """End whatever of the job still lives."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGSTOP)  # it starts nothing new
            for pid in [*_descendants_of(self._process.pid), self._process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill_all()


def _descendants_of(parent: int) -> list[int]:
    below = _children_of(parent)
    for one in below:
        below += _children_of(one)
    return below


def _children_of(parent: int) -> list[int]:
    """The processes that a process has started, by age."""
    if Path("/proc/self/task").exists():
        found: list[int] = []
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return sorted(found)
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [line.split() for line in listed.splitlines()]
    return sorted(int(pid) for pid, of in pairs if int(of) == parent)


@dataclass(frozen=True)
class Kill:
    """A kill that found the job alive."""

    step: int
    """The last step that was done."""
    victim: str
    checkpoint: int
    """The step that the job continues from; 0 without a checkpoint."""


def verify_resume(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG.yaml] [KEY=VALUE ...]", help="The job, as for onstep train.")
    ] = None,
    kills: Annotated[int, typer.Option(min=1, help="How often the job is killed.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the random moments.")] = 0,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, started by torchrun where there are several.")] = 1,
    folder: Annotated[
        Path | None, typer.Option(help="Keep both runs here; default: a temporary folder in run.output_dir.")
    ] = None,
    recipe: Recipe = None,
    imports: Imports = None,
) -> None:
    """Run a job twice, once in peace and once killed (SIGKILL) at random moments, and compare them step by step.

    Compared are the samples, the random state, the learning rate, the loss and the weights of every step on every rank,
    the final weights, and the journal but for the fields of the clock. The exit code is 0 if all are equal, else 1, and
    the first step and item that differ are named. Your own run is not touched. Your code that writes files of its own
    does so here too.
    """
    config, _ = configuration(words or [], recipe)
    planned = train_iters(resolve(config, ranks), world_size=ranks)
    where, is_temporary = _made(folder, Path(config.run.output_dir))
    more = [word for path in imports or [] for word in ("--import", path)] + (["--recipe", recipe] if recipe else [])
    if not _saves(config):  # where we choose when to save, saves must not bring evaluations that `whole` does not have
        more.append("validation.eval_on_save=false")
    whole = UserJob((*(words or []), *more, *WORDS), ranks, where / "whole")
    try:
        seconds = _run_in_peace(whole, planned)
        steps = whole.step()
        killed = replace(whole, output_dir=where / "killed")
        if not _saves(config):
            interval = max(1, steps // 10)
            print(f"The job sets no checkpoint.save_interval; the killed run saves every {interval} steps.")
            killed = replace(killed, words=(*killed.words, f"checkpoint.save_interval={interval}"))
        moments = kill_steps(steps, kills, random.Random(seed))
        landed = _run_killed(killed, moments, steps, seconds, random.Random(seed + 1))
        is_equal = _judge(whole, killed, landed)
    except (JobError, ConfigError):
        print(f"Both runs are kept in {where}.")
        raise
    if is_temporary and is_equal:
        shutil.rmtree(where)
    else:
        print(f"Both runs are kept in {where}.")
    if not is_equal:
        raise typer.Exit(ERROR)


def kill_steps(steps: int, kills: int, chance: random.Random) -> list[int]:
    """After which steps to kill: one at random in each of `kills` equal parts of the run, none after the last step.

    Raises:
        ConfigError: when the run has too few steps.
    """
    if steps <= kills:
        most = f"--kills {steps - 1} at the most" if steps > 1 else "it has to have two steps at least"
        raise ConfigError(f"the run has {steps} steps, too few to be killed {kills} times in between; {most}.")
    edges = [1 + number * (steps - 1) // kills for number in range(kills + 1)]
    return [chance.randint(first, after - 1) for first, after in pairwise(edges)]


def _made(folder: Path | None, output_dir: Path) -> tuple[Path, bool]:
    """The folder of the proof, and whether it is a temporary one."""
    try:
        if folder is None:
            output_dir.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix="verify-resume-", dir=output_dir)), True
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder or output_dir} cannot be written ({error.strerror}); choose another --folder."
        ) from None
    if any(folder.iterdir()):
        raise ConfigError(f"--folder {folder} is not empty; give the proof a folder of its own.")
    return folder, False


def _saves(config: ConfigContainer) -> bool:
    """Whether the job saves checkpoints while it trains."""
    checkpoint = config.checkpoint
    return bool(checkpoint.save_interval or checkpoint.non_persistent_save_interval or checkpoint.save_each_epoch)


def _run_in_peace(job: UserJob, planned: int | None) -> float:
    """The uninterrupted run; returns the seconds that a step takes."""
    first: float | None = None
    with job.start() as attempt, tqdm(total=planned, desc="uninterrupted", unit="step") as bar:

        def tell(step: int) -> None:
            nonlocal first
            first = time.monotonic() if first is None and step else first
            _show(bar, step)

        attempt.wait_for(lambda: False, tell)
    return 0.0 if first is None else (time.monotonic() - first) / max(1, job.step())


def _run_killed(job: UserJob, moments: list[int], steps: int, step_seconds: float, chance: random.Random) -> list[Kill]:
    """Run the job and kill it after each of `moments`; then let it finish.

    The last kill waits for a checkpoint, so that there is one that is resumed from.
    """
    landed: list[Kill] = []
    with tqdm(total=steps, desc="killed 0 times", unit="step") as bar:
        for moment in moments:
            with job.start() as attempt:
                attempt.wait_for(partial(_is_reached, job, moment, moment == moments[-1]), partial(_show, bar))
                time.sleep(chance.uniform(0, step_seconds))
                victim = attempt.kill(chance)
            if victim is None:
                break
            landed.append(Kill(job.step(), victim, job.newest_checkpoint()))
            bar.set_description(f"killed {len(landed)} times")
        with job.start() as attempt:
            attempt.wait_for(lambda: False, partial(_show, bar))
    return landed


def _is_reached(job: UserJob, moment: int, needs_checkpoint: bool) -> bool:
    return job.step() >= moment and (not needs_checkpoint or job.newest_checkpoint() > 0)


def _show(bar: tqdm[NoReturn], step: int) -> None:
    """Move the bar, also backwards, where a start repeats steps."""
    if step != bar.n:
        bar.update(step - bar.n)


def _judge(whole: UserJob, killed: UserJob, landed: list[Kill]) -> bool:
    from onstep.training.verification.trajectory_hash import certificates, first_difference

    steps, ranks = whole.step(), len(certificates(whole.run))
    where = ", ".join(f"{one.step} ({one.victim})" if ranks > 1 else str(one.step) for one in landed)
    print(f"\n{steps} steps on {ranks} rank{'s' * (ranks > 1)}; killed {len(landed)} times, after steps {where}.")
    difference = first_difference(whole.run, killed.run)
    if difference is not None:
        print(f"NOT equal. The first difference: {difference} (uninterrupted and killed).")
        print(_advice(difference.item, difference.step, landed))
        return False
    if not any(one.checkpoint for one in landed):
        print("Nothing is proved: no start had a checkpoint to continue from. Save more often, or use a longer run.")
        return False
    print(
        "Equal: samples, random state, learning rate, loss and weights of every step on every rank, the final weights, "
        "and the journal but for the fields of the clock."
    )
    return True


def _advice(item: str, step: int | None, landed: list[Kill]) -> str:
    if step is not None and (not landed or step <= landed[0].checkpoint):
        return (
            "The first kill came later: this job is not the same twice, killed or not. Look for randomness that does "
            "not come from rng.seed, and for nondeterministic kernels."
        )
    return _CAUSES.get(item, "The steps are equal; look at what a callback reports or writes from a state of its own.")
