"""Random callbacks on random ranks that request random things: `job_*(settings)`."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

from onstep import Callback, pretrain
from onstep.errors import OnstepError
from tests.support.jobs.rank_jobs import RANK
from tests.support.small_configs import small_pretrain_config

EVENTS = (
    *("on_step_begin", "on_train_step_start", "on_forward_backward_end", "on_train_step_end", "on_step_end"),
    *("on_log", "on_eval_start", "on_eval_step_end", "on_eval_end", "on_checkpoint_save", "on_train_start"),
)
REQUESTS = ("stop", "abort", "end_epoch", "save", "evaluate", "log", "rollback", "skip_batch", "sigterm")
ENDS = ("raise", "exit")
STEPS = 8


class Action(NamedTuple):
    """What a callback on a rank does at the n-th event of a name."""

    rank: int
    event: str
    nth: int
    request: str


def plan(seed: int, ranks: int, *, ends: bool) -> list[Action]:
    """The actions of a run, the same on all ranks; of those that end one rank alone at most one, the last."""
    draw = random.Random(seed)
    actions = [
        Action(draw.randrange(ranks), draw.choice(EVENTS), draw.randint(1, STEPS), draw.choice(REQUESTS))
        for _ in range(draw.randint(1, 5))
    ]
    if ends:
        at = draw.choice([event for event in EVENTS if event not in ("on_log", "on_checkpoint_save")])
        nth = 1 if "eval" in at or "start" in at else draw.randint(1, 3)
        actions = [one for one in actions if one.request in ("save", "evaluate", "log") or one.nth > nth]
        actions.append(Action(draw.randrange(ranks), at, nth, draw.choice(ENDS)))
    return actions


class Actor(Callback):
    """Carries out the actions of this rank, and notes what happens on it."""

    def __init__(self, actions: list[Action]) -> None:
        self.actions = [one for one in actions if one.rank == RANK]
        self.seen: Counter[str] = Counter()
        self.did: list[str] = []

    def act(self, event: str, context: Any) -> None:
        self.seen[event] += 1
        for action in self.actions:
            if (action.event, action.nth) == (event, self.seen[event]):
                self.carry_out(action.request, context)
        if event in ("on_log", "on_eval_end", "on_checkpoint_save", "on_run_end"):
            self.did.append(f"{event} at {context.state.train_state.step}")

    def carry_out(self, request: str, context: Any) -> None:
        if request == "raise":
            raise ValueError("of the test")
        if request == "exit":
            raise SystemExit(3)
        if request == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            getattr(context.control, request)()


def _method(event: str) -> Any:
    def called(self: Actor, context: Any) -> None:
        self.act(event, context)

    return called


for _event in (*EVENTS, "on_run_end"):
    setattr(Actor, _event, _method(_event))


def outcome(settings: dict[str, Any], seed: int, ranks: int, *, ends: bool) -> dict[str, Any]:
    """How a run ends on this rank, and what it did."""
    chosen, actor = small_pretrain_config(settings["corpus"], settings["cache"]), Actor(plan(seed, ranks, ends=ends))
    chosen.train.train_iters, chosen.train.global_batch_size, chosen.train.micro_batch_size = STEPS, 12, 1
    chosen.run.name, chosen.run.output_dir = f"run-{seed}", settings["runs"]
    chosen.checkpoint.save_interval, chosen.validation.eval_interval, chosen.logger.log_interval = 3, 4, 2
    chosen.validation.eval_iters = 2
    chosen.checkpoint.async_save = bool(seed % 2)
    chosen.parallel.data_parallel_shard_size = settings.get("shards", 1)
    chosen.ft.watchdog_seconds, chosen.dist.timeout_after_first_step = 30.0, 60.0
    ended, step = "", -1
    try:
        state = pretrain(chosen, callbacks=[actor])
        ended, step = "returned", state.train_state.step
    except OnstepError as error:
        ended = f"{type(error).__name__}: {error}"
    except SystemExit as leaving:
        ended = f"exit {leaving.code}"
    return {"ended": ended, "step": step, "did": actor.did}


def job_request(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The outcome of the run of each seed."""
    ranks = int(os.environ["WORLD_SIZE"])
    return [outcome(settings, seed, ranks, ends=False) for seed in settings["seeds"]]


def job_end(settings: dict[str, Any]) -> None:
    """A run that an action ends on one rank alone."""
    with suppress(SystemExit):
        outcome(settings, settings["seed"], int(os.environ["WORLD_SIZE"]), ends=True)
    raise SystemExit(1)
