"""Claims the directory of a Trainer's run: continues the run that is there, or starts a new one."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from onstep.checkpoint import checkpoints, resolve
from onstep.checkpoint.catalog.discovery import named_dirs
from onstep.checkpoint.catalog.unfinished import is_unfinished
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.config import ChangeClass, ConfigContainer
from onstep.config.differences import Change, changes, decide
from onstep.config.hf.argument import argument_of
from onstep.config.keys import typed_copy
from onstep.config.suggestions import listed, shown
from onstep.data.corpus.hub_names import hub_commits
from onstep.distributed import World
from onstep.errors import CheckpointError, ConfigError
from onstep.files.bounded_reading import integer_from_environment
from onstep.mirror.copies import named
from onstep.stores.urls import is_url
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.call import Resume
from onstep.trainer.computing.batch_size_search import Search
from onstep.trainer.output_dir.identity import trainer_identity
from onstep.trainer.own_arguments import local_output_dir
from onstep.training.opening import claim_for_all
from onstep.training.protocols import StateDict
from onstep.training.runs.claims import Claim, go_on, hold_and_claim, in_store, named_dir, start, without_effect
from onstep.training.runs.fingerprints import is_arrow_dataset
from onstep.training.runs.hold import Hold
from onstep.training.runs.hub import hub_revisions
from onstep.training.runs.identity import Identify, Identity, compare
from onstep.training.runs.run_dir import FINISHED, RunDir
from onstep.training.runs.sent_commands import what_ended

logger = logging.getLogger(__name__)

_ARGUMENTS_SHOWN = 4
SEARCHED_FROM = "auto_find_batch_size_from"
"""Entry of run.json: the batch size with which `auto_find_batch_size` began; None without it."""


@dataclass(frozen=True)
class Wish:
    """What the user asks for, and what this Trainer knows of the directory."""

    resume: Resume
    """`resume_from_checkpoint`: a path, True, False or None."""
    overwrites: bool = False
    """`overwrite_output_dir` of transformers 4."""
    owned: Identity | None = None
    """The identity of this Trainer's own run in the directory, if that is unfinished: its weights are those of its
    start, not those that it has reached."""
    search: Search | None = None
    """The search for a batch size that this training is part of."""
    revisions: Mapping[str, str] = field(default_factory=dict)
    """The commits of the model and the datasets on the Hub, by name."""
    or_starts: bool = False
    """True is of the arguments, as in Forgather: without a checkpoint to continue from, a new run starts."""

    @property
    def is_retry(self) -> bool:
        """Whether an attempt of this training with larger batches ran out of memory."""
        return self.search is not None and self.search.is_retry

    @property
    def entries(self) -> dict[str, object]:
        """What run.json records of this start."""
        searched_from = None if self.search is None else self.search.given
        return {"launch": _launch(), SEARCHED_FROM: searched_from, "hub_revisions": dict(self.revisions)}


def acquire_dir(
    trainer: BaseTrainer, config: ConfigContainer, world: World, resume: Resume, *, or_starts: bool = False
) -> tuple[Claim | None, Hold | None]:
    """Claim the run's directory; rank 0 decides for all. Collective.

    A run that completed or was stopped is over: the next process starts from scratch, unless `resume` asks to continue.
    One that was killed, preempted or failed is continued if its arguments, data, code and initial weights are the same.
    Starting from scratch moves the earlier checkpoints to `checkpoints-<n>` and says so; other files stay as they are.

    Args:
        or_starts: `resume=True` starts a new run where there is nothing to continue from.

    Raises:
        RunExistsError: if a live process works on the directory.
        CheckpointError: if there is nothing to continue from, and `resume` is True.
        ConfigError: if it cannot be written, or the stored state does not fit the arguments.
    """
    if config.run.name is None:
        return None, None
    asked = config.run.local_output_dir.absolute() / config.run.name
    config.checkpoint.load = _without_own_url(config)
    identity = as_owned = trainer_identity(trainer)
    owned = trainer.owned_dirs.get(asked)
    if owned is not None:
        config.run.fresh, config.run.name = False, owned[0].path.name
        as_owned = Identity({**identity.parts, **{k: v for k, v in owned[1].parts.items() if k == "weights"}})
    search = trainer.batch_size_search if trainer.args.auto_find_batch_size else None
    given = None if owned is None else as_owned
    wish = Wish(resume, trainer.args.overwrite_output_dir, given, search, _revisions(trainer), or_starts)
    claim, hold = claim_for_all(config, world, lambda _: identity, partial(_acquire, wish=wish))
    assert claim is not None
    is_same = claim.identity == as_owned.digests
    trainer.owned_dirs[asked] = claim.directory, as_owned if is_same else identity
    return claim, hold


def _revisions(trainer: BaseTrainer) -> dict[str, str]:
    """The commits on the Hub of the model and of the datasets, where these were loaded from its libraries' caches."""
    evaluated = trainer.eval_dataset
    datasets = [trainer.train_dataset, *(evaluated.values() if isinstance(evaluated, dict) else [evaluated])]
    commits = {
        f"datasets/{name}": commit
        for one in datasets
        if is_arrow_dataset(one)
        for name, commit in hub_commits(one).items()
    }
    return hub_revisions(getattr(trainer.model, "name_or_path", None)) | commits  # transformers 5 keeps no other trace


def _acquire(config: ConfigContainer, identify: Identify | None, *, wish: Wish) -> tuple[Claim, Hold]:
    assert identify is not None
    identity = identify(config)

    def acquire() -> tuple[Claim, Hold]:
        arrival = _Arrival(named_dir(config), typed_copy(config), identity, wish)
        return hold_and_claim(arrival.directory, arrival.claim, shares=True, elsewhere="another output_dir")

    if not config.run.is_in_store:
        return acquire()
    claim, hold = in_store(config, acquire)
    assert hold is not None
    return claim, hold


def _without_own_url(config: ConfigContainer) -> str | None:
    """What `checkpoint.load` names; for the URL of this run, or of a checkpoint of it, the local path."""
    load, run = config.checkpoint.load, config.run
    if load is None or not is_url(load):
        return load
    asked, directory = named(load), run.local_output_dir / str(run.name)
    if asked.run != run.place or asked.choice == "best":
        return load
    return str(directory if asked.choice is None else directory / f"checkpoint-{asked.choice}")


@dataclass
class _Arrival:
    """A Trainer at the directory of its run, whose lock it holds, on rank 0."""

    directory: RunDir
    config: ConfigContainer
    identity: Identity
    wish: Wish

    def claim(self) -> Claim:
        """Continue the run that is there, or start a new one."""
        self._pass_over_unfinished()
        if not self.directory.run_json.exists():
            return self._without_record()
        stored = self.directory.read()
        is_finished, is_asked = stored.get("status") in FINISHED, self._names_own()
        if not is_asked and (self._is_unwanted(stored) or stored.get("status") == "again"):
            return self._from_scratch(_ended(stored) if is_finished else "", stored)
        if is_asked:
            return self._continued(stored, is_finished)
        if self._started_elsewhere() or is_finished:
            return self._from_scratch(_ended(stored), stored)
        reason = "" if _is_restart(stored) else self._difference(stored)
        if reason:
            return self._from_scratch(f"an unfinished run that differs from this one ({reason})", stored)
        return self._go_on(self.config, ())

    def _pass_over_unfinished(self) -> None:
        """Continue from the newest whole checkpoint where the named one is what a kill during its save has left."""
        load = self.config.checkpoint.load
        if load is None or not self._names_own():
            return
        if is_unfinished(Path(os.path.expanduser(load))):
            self.config.checkpoint.load, self.config.checkpoint.exit_on_missing_checkpoint = None, False
            self.wish = replace(self.wish, resume=True, or_starts=True)

    def _without_record(self) -> Claim:
        """Claim a directory without run.json, which may hold the files of others."""
        if not self._names_own():
            return self._from_scratch("", {})
        self.directory = RunDir(self.directory.path, "hugging_face")
        self._check_is_there()
        return self._start()

    def _check_is_there(self) -> None:
        """Reject (CheckpointError) what has no manifest, before anything is written; files are verified later."""
        load = self.config.checkpoint.load
        if self.wish.resume is True or load is None:
            if not checkpoints(self.directory.checkpoints):
                raise _nothing_there(self.directory)
            return
        path = Path(os.path.expanduser(load))
        is_named = path.name.startswith("checkpoint-") or bool(named_dirs(path))
        if is_named and not os.path.lexists(path / MANIFEST) and not checkpoints(path):
            resolve(path)  # raises

    def _names_own(self) -> bool:
        """Whether the user asks to continue the run that is in this directory."""
        load = self.config.checkpoint.load
        if load is None or self.wish.resume is True:
            return self.wish.resume is True and (not self.wish.or_starts or self._has_checkpoints())
        if is_url(load):
            return False
        path = Path(os.path.expanduser(load)).resolve()
        own = [RunDir(self.directory.path, layout).checkpoints.resolve() for layout in ("onstep", "hugging_face")]
        return path in own or (path.parent in own and path.name.startswith("checkpoint-"))

    def _has_checkpoints(self) -> bool:
        path = self.directory.path
        return any(checkpoints(one.checkpoints) for one in (RunDir(path, "onstep"), RunDir(path, "hugging_face")))

    def _started_elsewhere(self) -> bool:
        """Whether the user names another run's checkpoint, from which the run that is here has not started."""
        load = self.config.checkpoint.load
        return load is not None and not self.directory.has_started_from(
            load if is_url(load) else str(Path(load).absolute())
        )

    def _is_unwanted(self, stored: StateDict) -> bool:
        """Whether the user asks for a new run; a restart by torchrun still continues its own."""
        if self.wish.resume is False or not self.config.checkpoint.resume:
            return True
        return self.wish.overwrites and not _is_restart(stored)

    def _continued(self, stored: StateDict, is_finished: bool) -> Claim:
        """Continue because the user says so, whatever has changed."""
        self._check_is_there()
        try:
            found = changes(stored["config"], self.config)
        except ConfigError as error:
            raise ConfigError(
                f"{self.directory.path} cannot be continued, its arguments cannot be read: {error}"
            ) from None
        moved = [one for one in found if one.kind is not ChangeClass.SAFE]
        try:
            config = _decided(found, self.config)
        except ConfigError as error:
            raise ConfigError(
                f"{self.directory.path} cannot be continued: {in_words(moved)}; its stored state does not fit. Use the "
                f"earlier value, or train from scratch without resume_from_checkpoint."
            ) from error
        notes = [f"it continues with other arguments: {in_words(moved)}"] if moved else []
        notes += compare(stored.get("identity"), self.identity, self.directory.path, without=("weights",)).notes
        if is_finished and not moved and self._is_at_end():
            steps = stored.get("step", 0)
            more = (what_ended(self.directory.decisions, steps), without_effect(self.config))
            logger.warning(
                "%s is finished: %d steps, nothing left to do. To train longer, raise max_steps or num_train_epochs; "
                "to train again from the given weights, drop resume_from_checkpoint.%s",
                self.directory.path,
                steps,
                "".join(f" Note: {note}." for note in more if note),
            )
            identity = self.wish.owned or self.identity
            return Claim(self.directory, config, is_finished=True, identity=identity.digests)
        if is_finished and "started_from" in stored:
            self.directory.write({key: value for key, value in stored.items() if key != "started_from"})
        return self._go_on(config, [f"{self.directory.path}: {note}" for note in notes])

    def _is_at_end(self) -> bool:
        """Whether the newest checkpoint is asked for."""
        load = self.config.checkpoint.load
        return load is None or not Path(load).name.startswith("checkpoint-")

    def _go_on(self, config: ConfigContainer, notes: Sequence[str]) -> Claim:
        identity = self.wish.owned or self.identity
        claim = Claim(self.directory, config, identity=identity.digests, notes=tuple(notes))
        go_on(claim, identity, **self.wish.entries)
        return claim

    def _from_scratch(self, what: str, stored: StateDict) -> Claim:
        """Start a new run; the checkpoints that are there are moved aside."""
        path = self.directory.path
        load = self.config.checkpoint.load
        if load is not None and not is_url(load) and not Path(os.path.expanduser(load)).exists():
            resolve(load)  # raises
        before = self.directory if stored else RunDir(path, "hugging_face")
        aside = before.set_checkpoints_aside()
        self.directory = RunDir(path, "hugging_face")
        if aside is not None and self.wish.is_retry:
            logger.info("the checkpoints of the attempt that ran out of memory are now in %s", aside)
        elif aside is not None and not stored:
            logger.warning("%s held checkpoints of other runs, which are now in %s.", path, aside)
        elif aside is not None:
            logger.warning(
                "%s held %s. Training starts from scratch, and the earlier checkpoints are now in %s; to continue from "
                "them instead: resume_from_checkpoint=%r.",
                path,
                what or "an earlier run",
                aside,
                str(aside),
            )
        elif what and stored and stored.get("status") not in FINISHED and not self.wish.is_retry:
            logger.warning("%s held %s; it has no checkpoints, so training starts from scratch.", path, what)
        return self._start()

    def _start(self) -> Claim:
        """Record a new run; an attempt with smaller batches is the same run to the next process."""
        identity = (self.wish.owned or self.identity) if self.wish.is_retry else self.identity
        return start(self.directory, self.config, identity, layout=self.directory.layout, **self.wish.entries)

    def _difference(self, stored: StateDict) -> str:
        """What of an unfinished run differs from this one, in words; empty if it is the same."""
        policy, other = self.config.checkpoint.on_config_change, ""
        try:
            found = changes(stored["config"], self.config)
        except ConfigError as error:
            return f"its arguments cannot be read: {error}"
        try:
            self.config = decide(found, self.config, policy)
        except ConfigError:
            other = in_words([one for one in found if one.kind is not ChangeClass.SAFE])
        inputs = compare(stored.get("identity"), self.wish.owned or self.identity, self.directory.path)
        has_paused = self.wish.owned is not None and stored.get("status") in ("paused", "preempted")
        changed = "" if policy == "apply" or has_paused else inputs.changed
        return "; ".join(text for text in (other, changed) if text)


def unfinished_batch_size(trainer: BaseTrainer, resume: Resume) -> int | None:
    """The batch size that `auto_find_batch_size` reached in the run that `resume` continues; None without one."""
    args, asked = trainer.args, Path(local_output_dir(trainer.args)).absolute()
    if resume is None:
        resume = args.resume_from_checkpoint
    directory = trainer.owned_dirs[asked][0] if asked in trainer.owned_dirs else RunDir(asked)
    if resume is False or (args.overwrite_output_dir and not resume) or not directory.run_json.is_file():
        return None
    stored = directory.read()
    size, first = (stored["config"].get("train") or {}).get("micro_batch_size"), args.per_device_train_batch_size
    if stored.get(SEARCHED_FROM) != first or not isinstance(size, int) or not 0 < size < first:
        return None
    own = directory.path.resolve()
    is_named = resume is True or (resume is not None and own in (Path(resume).resolve(), Path(resume).resolve().parent))
    if not is_named and (resume is not None or stored.get("status") in FINISHED):
        return None
    logger.warning("starting with micro-batches of %d samples: the run in %s came to this size", size, asked)
    return size


def _decided(found: Sequence[Change], config: ConfigContainer) -> ConfigContainer:
    """The configuration to continue with, because the user says so: the current one, unless its policy is another."""
    policy = config.checkpoint.on_config_change
    if policy == "error":
        try:
            return decide(found, config, policy)
        except ConfigError:
            config.checkpoint.on_config_change = policy = "apply"
    return decide(found, config, policy)


def in_words(found: Sequence[Change]) -> str:
    """Changed arguments, with both values."""
    by_name = {argument_of(one.key): one for one in reversed(found)}
    texts = [f"{name} was {shown(one.old)} and is {shown(one.new)}" for name, one in reversed(by_name.items())]
    return listed(texts, _ARGUMENTS_SHOWN)


def _ended(stored: StateDict) -> str:
    how = {"completed": "is finished", "stopped": "was stopped"}.get(str(stored.get("status")), "was interrupted")
    return f"a run that {how} ({stored.get('step', 0)} steps)"


def _nothing_there(directory: RunDir) -> CheckpointError:
    return CheckpointError(
        f"resume_from_checkpoint=True, but {directory.path} has no checkpoint to continue from; drop the argument to "
        f"train from the given weights, or name a checkpoint."
    )


def _launch() -> dict[str, object]:
    """The launch by torchrun that started this process, and its attempt; empty without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    name = f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}"
    return {"id": name, "attempt": integer_from_environment("TORCHELASTIC_RESTART_COUNT", 0)}


def _is_restart(stored: StateDict) -> bool:
    """Whether torchrun has restarted this process, whose earlier attempt worked on the run."""
    before, now = stored.get("launch"), _launch()
    if not isinstance(before, dict) or not now:
        return False
    return (
        before.get("id") == now["id"] and isinstance(before.get("attempt"), int) and before["attempt"] < now["attempt"]
    )
