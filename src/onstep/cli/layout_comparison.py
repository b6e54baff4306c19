"""Compares the short training of a job in two layouts, step by step: `onstep verify-resume --layouts A B`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from onstep.cli.user_job import UserJob
from onstep.config import ConfigContainer
from onstep.config.parallel_sizes import ParallelSizes
from onstep.config.pipelines import SCHEDULES, Schedule, schedule_named
from onstep.config.suggestions import shown
from onstep.errors import ConfigError

COMPARED = {"loss": "loss", "grad_norm": "gradient norm"}
"""Keys of the metrics log, and what they are called."""
BOUND = 20
"""The steps that are compared, unless the user says how long to train."""
_LENGTHS = ("train.train_iters=", "train.train_samples=", "train.num_epochs=")
_TOLERANCE, _LOW_TOLERANCE = 1e-5, 2e-2
"""Relative: for float32, and where anything is computed in 16 bits."""
_DROPOUT = ("hidden_dropout", "attention_dropout")


ONE = ParallelSizes()


@dataclass(frozen=True)
class Layout:
    """How a job is laid out over ranks."""

    name: str
    sizes: ParallelSizes = ONE
    schedule: str | None = None
    """That of a pipeline; 1F1B by default."""
    divides_sequences: bool = False
    """Whether it is sequence-parallel."""
    divides_updates: bool = False
    """Whether the distributed optimizer divides the updates between replicas."""

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.sizes.ranks

    @property
    def words(self) -> tuple[str, ...]:
        """The overrides of the job for it."""
        schedule = self._schedule
        stages = {"one": "null", "several": "2", "two": "null"}[schedule.chunks]
        divided = str(self.divides_updates).lower()
        words = [
            f"parallel.data_parallel_replicate_size={self.sizes.dp_replicate}",
            f"parallel.data_parallel_shard_size={self.sizes.dp_shard}",
            f"parallel.tensor_model_parallel_size={self.sizes.tp}",
            f"parallel.sequence_parallel={str(self.divides_sequences).lower()}",
            f"parallel.pipeline_model_parallel_size={self.sizes.pp}",
            f"parallel.virtual_pipeline_model_parallel_size={stages}",
            f"parallel.pipeline_schedule={'null' if self.sizes.pp == 1 else schedule.name}",
            f"ddp.use_distributed_optimizer={divided}",
            f"optimizer.use_distributed_optimizer={divided}",
        ]
        if self.sizes.pp == 1:
            words.append("parallel.pipeline_model_parallel_layout=null")
        if not self.divides_updates:
            words += [f"{section}.overlap_param_gather=false" for section in ("ddp", "optimizer")]
        return tuple(words)

    @property
    def shares(self) -> int:
        """The micro-batches of a step must be a multiple of this: some for each rank with samples of its own."""
        return self.sizes.data * (max(self.sizes.pp, self._schedule.least(self.sizes.pp)) if self.sizes.pp > 1 else 1)

    @property
    def _schedule(self) -> Schedule:
        return SCHEDULES[self.schedule or "1F1B"]

    def __str__(self) -> str:
        return f"{self.name} ({self.ranks} rank{'s' * (self.ranks > 1)})"


_SHORT = {"interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
"""Schedules as the documentation calls them, beside their full names."""
_PART = re.compile(r"(ddp|fsdp|distopt|tp|pp)([1-9]\d{0,4})(?: (\w+))?|hsdp([1-9]\d{0,4})x([1-9]\d{0,4})")
_AXES = {"ddp": "dp_replicate", "distopt": "dp_replicate", "fsdp": "dp_shard", "tp": "tp", "pp": "pp"}
_RULE = (
    "each of --layouts must be one, ddpN, fsdpN, hsdpRxS (R replicas of S shards), distoptN, tpN, 'tpN sp' "
    "(sequence-parallel), ppN, 'ppN SCHEDULE', or several of different axes, as in 'fsdp2 x tp2 sp x pp2 interleaved'"
)


def layout_of(name: str) -> Layout:
    """The layout of a name: `one`, or parts such as `fsdp2`, `hsdp2x2`, `tp2 sp` and `pp2 ZBV`, joined by ` x `.

    Raises:
        ConfigError: for another name.
    """
    layout = Layout(name)
    for part in name.split(" x ") if name != "one" else ():
        layout = _with_part(layout, part)
    return layout


def _with_part(layout: Layout, part: str) -> Layout:
    found = _PART.fullmatch(part)
    if found is None:
        raise ConfigError(f"{_RULE}, got {shown(layout.name)}.")
    kind, number, more, replicas, shards = found.groups()
    sizes = {"dp_replicate": int(replicas), "dp_shard": int(shards)} if kind is None else {_AXES[kind]: int(number)}
    of_data = layout.sizes.data > 1 and sizes.keys() <= {"dp_replicate", "dp_shard"}
    if of_data or any(getattr(layout.sizes, axis) > 1 for axis in sizes):
        raise ConfigError(f"--layouts has two parts of one axis in {shown(layout.name)}; drop {shown(part)}.")
    divides_updates = layout.divides_updates or kind == "distopt"
    layout = replace(layout, sizes=replace(layout.sizes, **sizes), divides_updates=divides_updates)
    return layout if more is None else _with_kind(layout, kind, more)


def _with_kind(layout: Layout, kind: str | None, more: str) -> Layout:
    """The layout whose last part has a word after its size."""
    if kind == "tp" and more == "sp":
        return replace(layout, divides_sequences=True)
    if kind == "pp":
        return replace(layout, schedule=schedule_named(more, "a schedule in --layouts", _SHORT).name)
    raise ConfigError(f"{_RULE}, got {shown(layout.name)}.")


def common_words(config: ConfigContainer, layouts: Sequence[Layout]) -> tuple[str, ...]:
    """The overrides for both: each step is logged, and has as many samples in one layout as in the other.

    Without a size of micro-batches, pipelines get those of one sample, of which they run the most at once.
    """
    train, words = config.train, ["logger.log_interval=1"]
    if train.global_batch_size is None:
        size = (train.micro_batch_size or 1) * math.lcm(*(one.shares for one in layouts))
        words.append(f"train.global_batch_size={size}")
    if train.micro_batch_size is None and any(one.sizes.pp > 1 for one in layouts):
        words.append("train.micro_batch_size=1")
    return tuple(words)


def bound_words(words: Sequence[str], planned: Sequence[int | None]) -> tuple[str, ...]:
    """The overrides that end a longer training after `BOUND` steps, with its own schedules, and a line that says so.

    Nothing is ended where the user says how long to train.

    Args:
        words: the user's overrides.
        planned: the steps of the job in each layout.
    """
    is_short = all(steps is not None and steps <= BOUND for steps in planned)
    if is_short or any(word.startswith(_LENGTHS) for word in words):
        return ()
    print(f"Comparing the first {BOUND} steps; for another number: train.train_iters=N.")
    return (f"train.exit_interval={BOUND}",)


def tolerance_of(config: ConfigContainer) -> float:
    """The relative difference that is allowed by default."""
    is_low = config.mixed_precision is not None or config.optimizer.params_dtype != "float32"
    return _LOW_TOLERANCE if is_low else _TOLERANCE


@dataclass(frozen=True)
class Gap:
    """The difference of a value in a step."""

    step: int
    key: str
    left: float | None
    right: float | None

    @property
    def size(self) -> float:
        """Relative to the greater; infinite where one has no value."""
        if self.left is None or self.right is None:
            return math.inf
        if self.left == self.right or (math.isnan(self.left) and math.isnan(self.right)):
            return 0.0
        found = abs(self.left - self.right) / max(abs(self.left), abs(self.right))
        return math.inf if math.isnan(found) else found


def report_comparison(jobs: Sequence[UserJob], layouts: Sequence[Layout], tolerance: float) -> bool:
    """Print how far the two runs are apart; whether it is within the tolerance."""
    gaps = list(_gaps(*jobs))
    steps = len({one.step for one in gaps})
    print(f"\n{steps} step{'s' * (steps != 1)} in {layouts[0]} and {layouts[1]}; relative tolerance {tolerance:g}.")
    for key, name in COMPARED.items():
        of_key = [one for one in gaps if one.key == key]
        if of_key:
            most = max(of_key, key=lambda one: one.size)
            print(f"  largest difference of the {name}: {most.size:.1e}, at step {most.step}")
    beyond = next((one for one in gaps if one.size > tolerance), None)
    if beyond is not None or not gaps:
        print("NOT equal: " + ("no step was logged." if beyond is None else f"{_sentence(beyond, layouts)}."))
        return False
    print("Equal within the tolerance: loss and gradient norm of every step.")
    return True


def hint(config: ConfigContainer, layouts: Sequence[Layout]) -> str:
    """What may be the cause of a difference."""
    rates = {f"model.{key}": getattr(config.model, key, 0.0) for key in _DROPOUT}
    active = [key for key, rate in rates.items() if rate]
    if active and layouts[0].sizes.data != layouts[1].sizes.data:
        zero = " and ".join(f"{key}=0" for key in active)
        return f"Each rank with samples of its own draws masks of dropout of its own; compare with {zero}."
    return (
        "Rounding grows from step to step: compare fewer steps before you look for a term that is not summed over all "
        "ranks."
    )


def _sentence(gap: Gap, layouts: Sequence[Layout]) -> str:
    values = [f"{value:.9g}" if value is not None else "nothing" for value in (gap.left, gap.right)]
    by = "" if math.isinf(gap.size) else f" by {gap.size:.1e}"
    return f"step {gap.step}: {COMPARED[gap.key]} differs{by}, {values[0]} in {layouts[0].name} and {values[1]} in " + (
        layouts[1].name
    )


def _gaps(left: UserJob, right: UserJob) -> Iterator[Gap]:
    """The differences, step by step."""
    for ours, theirs in zip_longest(_logged(left).items(), _logged(right).items()):
        if ours is None or theirs is None or ours[0] != theirs[0]:
            step, values = ours or theirs
            pair = (values.get("loss"), None) if ours else (None, values.get("loss"))
            yield Gap(step, "loss", *pair)
            return
        for key in COMPARED:
            if key in ours[1] or key in theirs[1]:
                yield Gap(ours[0], key, ours[1].get(key), theirs[1].get(key))


def _logged(job: UserJob) -> dict[int, dict[str, float]]:
    """The compared values of each step that the run has logged."""
    from onstep.record import read_records
    from onstep.training.runs.run_dir import RunDir

    records = read_records(RunDir(job.run).metrics_log)
    found = {int(one["global_step"]): one for one in records if "loss" in one and "global_step" in one}
    return {step: {key: float(one[key]) for key in COMPARED if key in one} for step, one in found.items()}
