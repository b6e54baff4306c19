"""Defines the features of the loop: their hooks, and how the features of a run are combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, ClassVar, Generic, Literal, ParamSpec, TypeVar

from torch import Tensor

from onstep.checkpoint import SaveRequest
from onstep.distributed import World, attempt
from onstep.errors import ConfigError
from onstep.events import Request
from onstep.events.dispatch import NO_OP
from onstep.training.compute.losses import MicroLoss, Scalar
from onstep.training.compute.step import Step
from onstep.training.protocols import Metrics

Host = TypeVar("Host")
"""What a feature is built for: a `Run`, or the `Job` of one training."""
P = ParamSpec("P")
Found = TypeVar("Found")
Function = TypeVar("Function", bound=Callable[..., object])

Interruption = Literal[
    "evaluate",
    "score",
    "save",
    "write",
    "finalize",
    "compare",
    "generate",
    "export",
    "rollback",
    "replay",
    "wait",
]
"""Work outside of any step: an evaluation inside the loop, and any evaluation; a checkpoint, writing it, and making an
asynchronous one durable; a comparison of weights; generating text; writing the model for other programs; loading a
checkpoint in the middle of the run; recomputing the gradients of a bad step; waiting while paused."""

Work = Literal[
    "act",
    "due",
    "iterate",
    "read",
    "step",
    "compute",
    "forward",
    "backward",
    "update",
    "score",
    "log",
    "count_flops",
    "final_metrics",
    "load",
    "evaluate",
    "save",
]
"""The loop's own work that a feature may wrap: what is due or asked for at the end of a step or epoch, with and without
the agreement before it (`act`, `due`); a whole iteration, reading its micro-batches, training on them, all forward and
backward passes, the forward pass of one micro-batch, its backward pass, and the update. `score` is a batch of an
evaluation, `load` the components of a checkpoint. The others belong to what is due: appending a record, adding up the
FLOPs of a logging interval, the final metrics, an evaluation inside the loop, and a checkpoint."""


Need = Literal["loss", "backward", "replay"]
"""What a feature may rely on of the engine that runs a step: a loss of each micro-batch on this rank (`before_backward`
is then called for each), a backward pass right after each forward pass, and that a step can be run again."""


def is_due(step: int, every: int | None, *, start: int = 0) -> bool:
    """Whether an action that happens every `every` steps, from `start` on, is due at `step`.

    If `every` is None or 0, it is never due. The phase is counted from step 0, so a resumed run keeps it.
    """
    return bool(every) and step >= start and step % (every or 1) == 0


def within(context: Callable[[], AbstractContextManager[object]], function: Callable[P, Found]) -> Callable[P, Found]:
    """Wrap the function so that each call runs in a new context."""

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Found:
        with context():
            return function(*args, **kwargs)

    return wrapped


class Hooks:
    """The points of the loop at which features run, in the order in which a run reaches them."""

    def opening(self) -> None:
        """The features' states of a checkpoint are loaded; `on_train_start` is about to fire."""

    def begin(self) -> None:
        """The state of a checkpoint is loaded and the data is ready; before the first step."""

    def ready(self) -> None:
        """Every feature has begun; the set-up is over."""

    def restart_interval(self) -> None:
        """A logging interval begins: at the first step, and after a rollback."""

    def before_iteration(self) -> None:
        """Before the next step is read or skipped."""

    def after_zero_grad(self) -> None:
        """The last step's gradients have been cleared."""

    def before_micro_batch(self, is_filler: bool) -> None:
        """A micro-batch is on the device."""

    def before_backward(self, step: Step, micro: MicroLoss, start: Scalar | None) -> None:
        """The loss of a micro-batch is known, and what its backward pass starts from. Only on a rank with a loss."""

    def before_update(self, step: Step) -> None:
        """The gradients are unscaled, measured and clipped, and checked by the gate; they may still be changed."""

    def admits(self, step: Step) -> bool:
        """Whether the update may be applied. Every feature is asked on every rank, so the hook may be collective."""
        return True

    def after_update(self, step: Step) -> None:
        """The update was applied or rejected; the schedule has not advanced yet."""

    def after_train_step(self, step: Step) -> None:
        """`on_train_step_end` has fired; the counters still hold the step before."""

    def after_count(self, step: Step) -> None:
        """The counters hold this step."""

    def requested(self, request: Request) -> None:
        """The ranks have agreed on a request, which is about to be recorded."""

    def before_acting(self) -> None:
        """The ranks have agreed on what is due or asked for; nothing of it is done yet. Not in an aborted run."""

    def after_agreement(self) -> None:
        """The ranks have agreed on what is due or asked for."""

    def settle(self) -> None:
        """Resolve what the device has not answered yet: a log, an evaluation or a save is about to rely on it."""

    def before_log(self) -> None:
        """A step is about to be logged."""

    def add_to_read(self, unread: dict[str, dict[str, Tensor]]) -> None:
        """A step is logged: add 0-d device tensors to be read together with its loss. Called on all ranks."""

    def after_read(self) -> None:
        """The logging interval was read, and the next one begins."""

    def add_to_log(self, logs: Metrics) -> None:
        """The record of a logged step is built, and `on_log_step` is about to fire: add or replace values."""

    def add_to_checkpoint(self, request: SaveRequest) -> None:
        """A checkpoint is about to be written: add files. Called on all ranks."""

    def after_iteration(self, step: Step) -> None:
        """The step is complete, saves included."""

    def after_skip(self) -> None:
        """A step of `train.iterations_to_skip` was counted without being trained on."""

    def pause(self, work: Interruption) -> AbstractContextManager[object]:
        """Context around work outside of any step."""
        return nullcontext()

    def before_rollback(self, bad_step: int, request: Request) -> None:
        """The run is about to go back to a checkpoint before `bad_step`."""

    def rolled_back(self, bad_step: int, request: Request) -> None:
        """The run has gone back to a checkpoint."""

    def concluding(self) -> None:
        """The last step was trained; the final metrics and the final checkpoint come next."""

    def failing(self, error: BaseException) -> None:
        """An error is ending the run; callbacks have not been notified yet."""

    def end(self) -> None:
        """Training ended without an error."""


class Feature(Hooks, Generic[Host]):
    """An addition to the training loop. A feature that is off is not built, and costs nothing.

    A subclass overrides the hooks that it needs; the loop calls no others. A `wrap_<work>(function)` receives the
    loop's own work and returns what is called in its place. With `has_state`, its state is saved in checkpoints. After
    an error no hook may start a collective; the world refuses to run one.
    """

    name: ClassVar[str]
    """Its key in checkpoints, and its name in `onstep why --features`."""
    when: ClassVar[str] = "always"
    """The configuration keys that enable it, of which one is enough; the documentation shows them."""
    collective: ClassVar[bool] = False
    """Some hook communicates with other ranks: wanted on one rank, it is built on all."""
    per_rank: ClassVar[bool] = False
    """Each rank has its own state; otherwise the state is the same on all ranks."""
    needs_grad_norm: bool = False
    """It uses the gradient norm of every step."""
    logs_skipped_losses: bool = False
    """The logged loss contains the steps that an anomaly skipped."""
    reads_weights: bool = False
    """It reads weights after an update, outside of `pause`: gathers that the update has started end first."""
    evaluates_last_step: bool = False
    """An evaluation is due at the last step, inside the loop."""
    needs_of_engine: tuple[Need, ...] = ()
    """What it relies on of the engine; a run whose engine does not give it is refused."""
    has_state: bool = False
    """Checkpoints save the `state_dict()` of `stateful`, and restore it with `load_state_dict()`."""

    @classmethod
    def wanted(cls, host: Host) -> bool:
        """Whether this rank wants it: as `when` says, unless it depends on callbacks or the model too."""
        config: Any = getattr(getattr(host, "run", host), "cfg")  # noqa: B009 - a `Run`, or the `Job` of one
        return cls.when.startswith("always") or any(attrgetter(key)(config) for key in cls.when.split(", "))

    def __init__(self, host: Host) -> None:
        self.host = host

    @property
    def stateful(self) -> Any:
        """What has its state: itself, unless that is the object that it puts into the loop."""
        return self

    def session(self) -> AbstractContextManager[object]:
        """Context around the whole training; on exit, it sees the error that ended the training."""
        return nullcontext()


FLAGS = ("needs_grad_norm", "logs_skipped_losses", "reads_weights", "evaluates_last_step")
HOOKS = ("session", *(name for name in vars(Hooks) if not name.startswith("_")))


class Features(Hooks):
    """The features of a run. Each hook is one function that calls theirs, in table order."""

    needs_grad_norm: bool
    logs_skipped_losses: bool
    reads_weights: bool
    evaluates_last_step: bool

    def __init__(self) -> None:
        self.built: list[Feature[Any]] = []
        self._open: set[int] = set()
        self._rooms: dict[type[object], object] = {}
        self.instruments: tuple[type[Feature[Any]], ...] = ()
        """Features that the caller of one training adds to it, after those of the table."""
        self.of_the_loop: dict[str, Any] = {}
        """The loop's own state between steps, by its key in checkpoints."""
        self._compose()

    @contextmanager
    def open(self, table: Sequence[type[Feature[Host]]], host: Host, world: World) -> Iterator[None]:
        """Build the wanted features of a table, and enter their sessions. Collective.

        Sessions open in table order and close in reverse, each with the error if there is one. If one fails to open on
        one rank, no rank continues.
        """
        made = self.build(table, host, world)
        with ExitStack() as stack:

            def enter(one: Feature[Host]) -> object:
                self._open.add(id(one))
                stack.callback(self._open.discard, id(one))
                return stack.enter_context(one.session())

            _on_all_or_none(world, lambda: [enter(one) for one in made])
            yield

    def build(self, table: Sequence[type[Feature[Host]]], host: Host, world: World) -> list[Feature[Host]]:
        """Build the wanted features of a table that are not open yet, and compose the hooks. Collective.

        Features of the table that an earlier training left behind are replaced.
        """
        self.built = [one for one in self.built if id(one) in self._open or type(one) not in table]
        rows = [kind for kind in table if self.find(kind) is None]
        wishes = _on_all_or_none(world, lambda: [int(kind.wanted(host)) for kind in rows])
        wanted = [
            kind
            for kind, is_mine, is_any in zip(rows, wishes, world.agree(wishes), strict=True)
            if is_mine or (is_any and kind.collective)
        ]
        made = _on_all_or_none(world, lambda: [kind(host) for kind in wanted])
        self.built = [*self.built, *made]
        self._compose()
        return made

    def find(self, kind: type[Found]) -> Found | None:
        """The feature of that class; None if it is off."""
        return next((one for one in self.built if isinstance(one, kind)), None)

    def room(self, kind: type[Found]) -> Found:
        """An object that lives as long as the run, created on first use; available even while its feature is off."""
        found = self._rooms.get(kind)
        if not isinstance(found, kind):
            found = self._rooms[kind] = kind()
        return found

    def renew(self, kind: type[object]) -> None:
        """Begin again with a new object of this class."""
        self._rooms.pop(kind, None)

    def wrap(self, work: Work, function: Function) -> Function:
        """`function` wrapped by the features for this work; the first row of the table is outermost."""
        for one in reversed(self.built):
            wrapper = getattr(one, f"wrap_{work}", None)
            function = function if wrapper is None else wrapper(function)
        return function

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        """Enter the features' contexts for work outside of any step."""
        with ExitStack() as stack:
            for pause in self._pauses:
                stack.enter_context(pause(work))
            yield

    def states(self, *, per_rank: bool) -> dict[str, Any]:
        """The features' states for checkpoints, by name: those common to all ranks, or each rank's own."""
        own = {} if per_rank else self.of_the_loop
        return own | {one.name: one.stateful for one in self.built if one.has_state and one.per_rank is per_rank}

    def _compose(self) -> None:
        for hook in HOOKS:
            if hook not in ("session", "pause"):
                compose = _all_of if hook == "admits" else _in_turn
                setattr(self, hook, compose(self._overriding(hook)))
        for flag in FLAGS:
            setattr(self, flag, any(getattr(one, flag) for one in self.built))
        self._pauses = self._overriding("pause")

    def _overriding(self, hook: str) -> list[Callable[..., Any]]:
        base = getattr(Feature, hook)
        return [getattr(one, hook) for one in self.built if getattr(type(one), hook) is not base]


def _on_all_or_none(world: World, work: Callable[[], list[Found]]) -> list[Found]:
    """The result of the work; if it fails on one rank, no rank continues. Collective."""
    done, error = attempt(work)
    [failed] = world.agree([int(error is not None)])
    if error is not None:
        raise error
    if failed or done is None:
        raise ConfigError("a feature of the run could not be set up on another rank; see the error of that rank.")
    return done


def _in_turn(functions: list[Callable[..., object]]) -> Callable[..., object]:
    if len(functions) < 2:
        return functions[0] if functions else NO_OP

    def in_turn(*given: object) -> None:
        for function in functions:
            function(*given)

    return in_turn


def _all_of(gates: list[Callable[[Step], bool]]) -> Callable[[Step], bool]:
    """Ask all gates, whatever the first says: a collective one must run on every rank."""
    return gates[0] if len(gates) == 1 else lambda step: all([gate(step) for gate in gates])  # noqa: C419 - a list: none is left out
