"""`onstep verify-resume`: checks that the user's own job gives bitwise the same run when killed and resumed.

With `--layouts` it compares two layouts instead.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from tqdm import tqdm

from onstep.cli.application import Imports, Recipe
from onstep.cli.completed_words import complete_words
from onstep.cli.config import configuration
from onstep.cli.exit_codes import ERROR
from onstep.cli.layout_comparison import (
    BOUND,
    Layout,
    bound_words,
    common_words,
    hint,
    layout_of,
    report_comparison,
    tolerance_of,
)
from onstep.cli.user_job import JobError, UserJob
from onstep.config import ConfigContainer, resolve
from onstep.config.lengths import train_iters
from onstep.config.parallel_sizes import ParallelSizes
from onstep.errors import ConfigError

if TYPE_CHECKING:
    from onstep.training.verification.comparison import Difference

WORDS = (
    "checkpoint.certify=true",
    "checkpoint.resume=true",
    "checkpoint.save=null",
    "logger.logging_dir=null",
    "run.save_weights=true",
    "train.exit_interval=null",
    "train.exit_duration_in_mins=null",
    "train.exit_margin_seconds=null",
)
"""Overrides of the job for the check, besides its run directory: nothing is written elsewhere, nothing ends early."""

_CAUSES = {
    "samples": "The data order depends on state that is not saved in checkpoints.",
    "rng": "Code draws random numbers when a process starts, or uses its own random generator.",
    "learning_rate": "A scheduler, or a callback that sets the rate, has state that is not saved in checkpoints.",
    "loss": "The loss depends on state that is not saved in checkpoints: a callback's state, changes that it makes to "
    "weights when training begins, or a non-persistent buffer.",
    "weights": "Your own optimizer, or a callback that modifies weights or gradients, has state that is not saved in "
    "checkpoints.",
}
_FROM_KERNELS = ("loss", "weights")
"""What differs first where only kernels do."""
_STATES = ("save_rng", "save_optim", "load_rng", "load_optim")
"""Keys of `checkpoint` that leave a part of the state out if they are false."""


@dataclass(frozen=True)
class Kill:
    """A kill that hit the job before it finished."""

    step: int
    """The last completed step."""
    victim: str
    checkpoint: int
    """The step that the job resumes from; 0 without a checkpoint."""


def verify_resume(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml | RUN | RECIPE] [KEY=VALUE ...]",
            autocompletion=complete_words,
            help="The job, as in onstep train.",
        ),
    ] = None,
    kills: Annotated[int, typer.Option(min=1, help="Number of kills.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed for the random times of the kills.")] = 0,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks; more than one are started by torchrun.")] = 1,
    directory: Annotated[
        Path | None, typer.Option(help="Keep both runs in this directory; default: a temporary one in run.output_dir.")
    ] = None,
    layouts: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Kill nothing, and compare loss and gradient norm of the job in two layouts: one, ddp2, fsdp2, "
            "hsdp2x2 (2 replicas of 2 shards), distopt2, tp2, 'tp2 sp', pp2, 'pp2 interleaved', or several, as in "
            "'fsdp2 x tp2 sp'.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="With --layouts: the relative difference allowed; default: 1e-5, in 16 bits 2e-2."),
    ] = None,
    recipe: Recipe = None,
    imports: Imports = None,
) -> None:
    """Run a job twice, once uninterrupted and once killed (SIGKILL) at random times, and compare them step by step.

    Compares the samples, random state, learning rate, loss and weights of every step on every rank, the final weights,
    and the metrics log except for timings. The exit code is 0 if everything is equal; otherwise it is 1 and the first
    step and item that differ are named. Your own run is not touched. Files that your own code writes are written here
    too.

    With --layouts A B, the two runs are of two layouts, and nothing is killed: their losses and gradient norms are
    compared step by step, with a tolerance, as sums over ranks are rounded in another order. Of a longer job these are
    its first 20 steps, unless the overrides say how long to train.
    """
    config, callbacks = configuration(words or [], recipe)
    if layouts is not None:
        if ranks != 1:
            raise ConfigError("--ranks is not for --layouts, which say the number of ranks themselves; drop --ranks.")
        given = [*(words or []), *_more(imports, recipe)]
        _compare_layouts([layout_of(one) for one in layouts], config, words or [], recipe, given, directory, tolerance)
        return
    planned = train_iters(resolve(config, ranks), world_size=config.parallel_sizes(ranks).data)
    where, is_temporary = _work_dir(directory, config.run.local_output_dir)
    more = _more(imports, recipe)
    if not _saves(config):  # saves that we add must not trigger evaluations that `whole` does not have
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
        chosen = kill_steps(steps, kills, random.Random(seed))
        landed = _run_killed(killed, chosen, steps, seconds, random.Random(seed + 1))
        advise = partial(advice, config, ranks if not (imports or callbacks) else None, landed)
        is_equal = _report_result(whole, killed, landed, advise, config.parallel_sizes(ranks))
        if is_equal and varies(config):
            print(
                "train.deterministic=false: on this GPU two runs may differ by themselves, and these did not; a later "
                "check of the same job may say otherwise."
            )
    except (JobError, ConfigError):
        print(f"Both runs are kept in {where}.")
        raise
    if is_temporary and is_equal:
        shutil.rmtree(where)
    else:
        print(f"Both runs are kept in {where}.")
    if not is_equal:
        raise typer.Exit(ERROR)


def _more(imports: list[str] | None, recipe: str | None) -> list[str]:
    """The options of the job itself."""
    return [word for path in imports or [] for word in ("--import", path)] + (["--recipe", recipe] if recipe else [])


def _compare_layouts(
    layouts: list[Layout],
    config: ConfigContainer,
    words: list[str],
    recipe: str | None,
    given: list[str],
    directory: Path | None,
    tolerance: float | None,
) -> None:
    """Run the job in both layouts, and compare them; exits with 1 if they are further apart than the tolerance."""
    common = common_words(config, layouts)
    planned = []
    for one in layouts:  # a layout that is refused is refused before anything runs
        of_layout, _ = configuration([*words, *common, *one.words], recipe)
        planned.append(train_iters(resolve(of_layout, one.ranks), world_size=one.sizes.data))
    if bound := bound_words(words, planned):
        common, planned = (*common, *bound), [BOUND for _ in layouts]
    where, is_temporary = _work_dir(directory, config.run.local_output_dir)
    jobs = [
        UserJob((*given, *WORDS, *common, *one.words), one.ranks, where / f"{number}-{'-'.join(one.name.split())}")
        for number, one in enumerate(layouts, start=1)
    ]
    try:
        for job, one, steps in zip(jobs, layouts, planned, strict=True):
            _run_in_peace(job, steps, one.name)
    except JobError:
        print(f"Both runs are kept in {where}.")
        raise
    is_equal = report_comparison(jobs, layouts, tolerance_of(config) if tolerance is None else tolerance)
    if not is_equal:
        print(hint(config, layouts))
    if is_temporary and is_equal:
        shutil.rmtree(where)
    else:
        print(f"Both runs are kept in {where}.")
    if not is_equal:
        raise typer.Exit(ERROR)


def kill_steps(steps: int, kills: int, chance: random.Random) -> list[int]:
    """The steps after which to kill: a random one in each of `kills` equal parts of the run, never the last step.

    Raises:
        ConfigError: when the run has too few steps.
    """
    if steps <= kills:
        most = f"use at most --kills {steps - 1}" if steps > 1 else "it must have at least two steps"
        raise ConfigError(f"the run has {steps} steps, too few to be killed {kills} times; {most}.")
    edges = [1 + number * (steps - 1) // kills for number in range(kills + 1)]
    return [chance.randint(first, after - 1) for first, after in pairwise(edges)]


def _work_dir(directory: Path | None, output_dir: Path) -> tuple[Path, bool]:
    """The directory that holds both runs, and whether it is temporary."""
    try:
        if directory is None:
            output_dir.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix="verify-resume-", dir=output_dir)), True
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {directory or output_dir} ({error.strerror}); choose another --directory."
        ) from None
    if any(directory.iterdir()):
        raise ConfigError(f"--directory {directory} is not empty; choose an empty or new directory.")
    return directory, False


def varies(config: ConfigContainer) -> bool:
    """Whether two uninterrupted runs of the job may differ, since it computes on a GPU with any kernels."""
    import torch

    device = config.dist.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return config.train.deterministic is False and device.startswith("cuda")


def _saves(config: ConfigContainer) -> bool:
    """Whether the job saves checkpoints during training."""
    checkpoint = config.checkpoint
    return bool(checkpoint.save_interval or checkpoint.non_persistent_save_interval or checkpoint.save_each_epoch)


def _run_in_peace(job: UserJob, planned: int | None, name: str = "uninterrupted") -> float:
    """Run the job uninterrupted; returns the seconds per step."""
    first: float | None = None
    with job.start() as attempt, tqdm(total=planned, desc=name, unit="step") as bar:

        def notify(step: int) -> None:
            nonlocal first
            first = time.monotonic() if first is None and step else first
            _show(bar, step)

        attempt.wait_for(lambda: False, notify)
    return 0.0 if first is None else (time.monotonic() - first) / max(1, job.step())


def _run_killed(
    job: UserJob, kill_steps: list[int], steps: int, step_seconds: float, chance: random.Random
) -> list[Kill]:
    """Run the job and kill it after each step in `kill_steps`; then let it finish.

    The last kill waits for a checkpoint, so that at least one start resumes from one.
    """
    landed: list[Kill] = []
    with tqdm(total=steps, desc="killed 0 times", unit="step") as bar:
        for kill_step in kill_steps:
            with job.start() as attempt:
                attempt.wait_for(partial(_is_reached, job, kill_step, kill_step == kill_steps[-1]), partial(_show, bar))
                time.sleep(chance.uniform(0, step_seconds))
                victim = attempt.kill(chance)
            if victim is None:
                break
            landed.append(Kill(job.step(), victim, job.newest_checkpoint()))
            bar.set_description(f"killed {len(landed)} times")
        with job.start() as attempt:
            attempt.wait_for(lambda: False, partial(_show, bar))
    return landed


def _is_reached(job: UserJob, kill_step: int, needs_checkpoint: bool) -> bool:
    return job.step() >= kill_step and (not needs_checkpoint or job.newest_checkpoint() > 0)


def _show(bar: tqdm[NoReturn], step: int) -> None:
    """Update the bar, also backwards where a start repeats steps."""
    if step != bar.n:
        bar.update(step - bar.n)


def _report_result(
    whole: UserJob, killed: UserJob, landed: list[Kill], advise: Callable[[Difference], str], sizes: ParallelSizes
) -> bool:
    from onstep.training.verification.comparison import first_difference

    steps, ranks = whole.step(), whole.ranks
    where = ", ".join(f"{one.step} ({one.victim})" if ranks > 1 else str(one.step) for one in landed)
    print(f"\n{steps} steps on {ranks} rank{'s' * (ranks > 1)}; killed {len(landed)} times, after steps {where}.")
    difference = first_difference(whole.run, killed.run)
    if difference is not None:
        print(f"NOT equal. First difference: {difference.described(sizes.place)} (uninterrupted and killed).")
        print(advise(difference))
        return False
    if not any(one.checkpoint for one in landed):
        print("Inconclusive: no start had a checkpoint to resume from. Save more often, or use a longer run.")
        return False
    print(
        "Equal: samples, random state, learning rate, loss and weights of every step on every rank, the final weights, "
        "and the metrics log except for timings."
    )
    return True


def advice(config: ConfigContainer, ranks: int | None, landed: list[Kill], difference: Difference) -> str:
    """What may be the cause of a difference; `ranks` is None for a job that has code of its own."""
    if varies(config) and (difference.item in _FROM_KERNELS or difference.step is None):
        return (
            "train.deterministic=false: kernels of a GPU may sum in another order in each run, so this difference "
            "shows neither an error in the resume nor one in your code. Equal up to there: samples, random state and "
            "learning rate, which do not depend on kernels. Drop train.deterministic=false for a check of all bits."
        )
    if difference.step is not None and (not landed or difference.step <= landed[0].checkpoint):
        return (
            "The first kill came later, so this job is not deterministic even without kills. Look for randomness that "
            "does not come from rng.seed, and for nondeterministic kernels."
        )
    left_out = [f"checkpoint.{key}=false" for key in _STATES if not getattr(config.checkpoint, key)]
    left_out += ["checkpoint.components"] * (config.checkpoint.components is not None)
    if left_out:
        return f"{', '.join(left_out)}: a start from a checkpoint does not get that part of the state back."
    if ranks is None or difference.item == "samples":
        return _CAUSES.get(
            difference.item, "All steps are equal; check what callbacks report or write from state of their own."
        )
    collective = ", or the order in which a collective sums over ranks," if ranks > 2 else ""
    return (
        f"The job has no code of its own. A kernel{collective} may be nondeterministic on this machine: compare two "
        f"uninterrupted runs. If those are equal, this is a bug in Onstep; please report it with both runs."
    )
