"""`DiLoCoServer`: holds the parameters of a run that trains at several sites, and averages what they learn."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from types import TracebackType

from torch import Tensor

from onstep.checkpoint import checkpoints
from onstep.diloco.codec.specs import specs_of
from onstep.diloco.fragments import assign
from onstep.diloco.outer import OuterFactory, delayed, nesterov_rates, nesterov_sgd
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server.arguments import check_arguments, check_forgathers
from onstep.diloco.server.initial import Origin, Source, initial_parameters, places, saved_parameters
from onstep.diloco.server.masters import Fragment
from onstep.diloco.server.memory import Buffers
from onstep.diloco.server.operator import Operator
from onstep.diloco.server.run_state import RunState
from onstep.diloco.server.served_run import ServedRun
from onstep.diloco.server.serving.app import build_app
from onstep.diloco.server.serving.limits import BACKLOG, client_limits
from onstep.diloco.server.store import Store
from onstep.diloco.server.weights import WeightFiles
from onstep.diloco.wire.http import PORTS
from onstep.diloco.wire.roles import RoleTokens, roles_path
from onstep.diloco.wire.tokens import checked, keep_token, token_path
from onstep.errors import CheckpointError, require
from onstep.http.access import Access
from onstep.http.addresses import authority, reachable
from onstep.http.binding import listen
from onstep.http.listener import Listener
from onstep.http.server import HttpServer, TlsFiles

logger: logging.Logger = logging.getLogger(__name__)

STATE, CHECKPOINTS = "diloco", "checkpoints"
STOP_SECONDS = 30.0
"""Between two messages that the end waits for a round."""


class DiLoCoServer:
    """The server of a run: workers register, submit what they learned, and get the new parameters.

    With a directory, everything is kept in its subdirectory `diloco` at each round before any worker sees the round,
    and a server that is started again with the same arguments continues from there, also with what an operator changed
    since. Other arguments are refused unless `change_settings` says that they are to take effect. As a context manager
    it serves while the block runs, and raises at its end what made further rounds impossible.

    Args:
        model: what the run starts with: a module, a state dict, or the path of a safetensors file, a checkpoint or a
            Hugging Face directory; see `initial_parameters`. A path to a directory is also `output_dir` unless that is
            given. May be left out to continue what `output_dir` has.
        num_workers: how many workers are expected.
        output_dir: where the server saves; None for a directory that `model` names, else nowhere.
        save_dir: another name of `output_dir`.
        from_checkpoint: a path to start from, in place of the newest checkpoint of `output_dir`.
        port: 0 for any, whose token file is removed at the end; None for the first free one from 8512.
        host: the address to bind.
        outer_optimizer_factory: makes the outer optimizer of a list of parameters, once for each fragment; None for
            SGD with learning rate 0.7 and Nesterov momentum 0.6.
        save_every_n_rounds: rounds between two checkpoints for other programs, in `checkpoints`; 0 for none.
        save_total_limit: how many of those are kept.
        token_budget: tokens of all workers after which they are to save and stop, and the server ends with the
            last of them; None for no end.
        keep_versions: versions before the newest that are kept in `diloco`, to which an operator can go back.
        async_mode: make every submission a round of its own.
        dn_buffer_size: N of `DelayedNesterov`, by which asynchronous submissions are applied; None for `num_workers`
            if the outer optimizer is SGD, 0 for a step of the outer optimizer at each submission.
        dylu_enabled: tell slower workers to take fewer steps a round, of `dylu_base_sync_every` for the fastest.
        heartbeat_timeout: seconds of silence after which a worker is evicted; 0 for never.
        min_workers: the quorum; None for more than half of `num_workers` (1 in asynchronous mode).
        settings: all that the server decides for workers; replaces the arguments about them.
        exclude: names of the model that are not trained, see `initial_parameters`.
        change_settings: continue with settings and rates of the outer optimizer as they are given, also where an
            operator had changed them; the run's model, mode and fragments stay.
        token: the bearer token; None for that of the port's token file, "" for none, which lets everyone in.
        renews_token: make a new token for the port's file.
        tls: the PEM files to serve `https` with; None for plain HTTP.
        safetensors: True; checkpoints are never pickles.
        dashboard_enabled: the page is always served; True says so in the log.
        default_work_units: None; workers have shares of the data.
        model_state_dict: the initial parameters, by name.
        dylu_base_sync_every: steps of a round for the fastest worker, if workers train at their own speed.

    Raises:
        ConfigError: for an invalid argument, or if there are no parameters. It is a ValueError.
        CheckpointError: for a path that cannot be read, or a state of a different model.
    """

    def __init__(
        self,
        model: Source | None = None,
        num_workers: int = 1,
        *,
        model_state_dict: Source | None = None,
        output_dir: str | Path | None = None,
        save_dir: str | Path | None = None,
        from_checkpoint: str | Path | None = None,
        port: int | None = None,
        host: str = "127.0.0.1",
        outer_optimizer_factory: OuterFactory | None = None,
        save_every_n_rounds: int = 10,
        save_total_limit: int = 3,
        keep_versions: int = 3,
        token_budget: int | None = None,
        async_mode: bool = False,
        dn_buffer_size: int | None = None,
        dylu_enabled: bool = False,
        dylu_base_sync_every: int = 500,
        heartbeat_timeout: float = 120.0,
        min_workers: int | None = None,
        settings: Settings | None = None,
        exclude: Collection[str] = (),
        change_settings: bool = False,
        token: str | None = None,
        renews_token: bool = False,
        tls: TlsFiles | None = None,
        safetensors: bool = True,
        dashboard_enabled: bool = False,
        default_work_units: int | None = None,
    ) -> None:
        if settings is None:
            require(num_workers >= 1, "num_workers", ">= 1", num_workers)
            settings = Settings.with_quorum(
                num_workers,
                "async" if async_mode else "sync",
                min_workers,
                sync_every=dylu_base_sync_every,
                dylu=dylu_enabled,
                heartbeat_timeout=heartbeat_timeout,
            )
        check_arguments(dn_buffer_size, settings, save_every_n_rounds, tls)
        check_forgathers(safetensors, dashboard_enabled, default_work_units)
        model = model_state_dict if model is None else model
        source, self._directory = places(model, output_dir or save_dir, from_checkpoint)
        factory = outer_optimizer_factory or nesterov_sgd
        self._save_every = save_every_n_rounds
        own = None if self._directory is None else self._directory / STATE
        saved = saved_parameters(own) if source == self._directory and own is not None else None
        parameters = initial_parameters(source, exclude) if saved is None else saved
        self._model, self._buffers = specs_of(parameters), self._new_buffers(own)
        if settings.mode == "async" and dn_buffer_size != 0:
            factory = delayed(factory, dn_buffer_size, settings.num_workers)
        parts = assign(self._model, settings.num_fragments)
        fragments = [Fragment(part, parameters, factory, settings.codec, self._buffers) for part in parts]
        if settings.eager:
            nesterov_rates(fragments[0].optimizer)
        origin = Origin.of(settings, fragments, None if saved is not None else source)
        require(token_budget is None or token_budget > 0, "token_budget", "> 0", token_budget, "; None for no end.")
        self._token_budget = token_budget
        require(keep_versions >= 0, "keep_versions", ">= 0", keep_versions)
        self._state = RunState(
            settings, self._model, fragments, origin, own, may_change=change_settings, keep_versions=keep_versions
        )
        try:
            self._listener = Listener(listen(host, port, PORTS, BACKLOG), client_limits(self.settings.num_workers))
        except BaseException:
            self._state.close()
            raise
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self.token = keep_token(self.port, renew=renews_token) if token is None else checked(token) if token else None
        self._drops_token = port == 0 and token is None  # no later server will look for the file of this port
        self._scheme = "http" if tls is None else "https"
        self._serving: HttpServer | None = None
        self._tls = tls
        self._failure: BaseException | None = None
        self._is_stopped = False
        self._weights = self._weight_files(save_total_limit)
        self.model_path: Path | None = None
        """The newest checkpoint for other programs that this server has written."""

    @property
    def settings(self) -> Settings:
        """All that the server decides for workers."""
        return self._state.settings

    @property
    def address(self) -> str:
        """`host:port`, and `https://` before it with TLS: what workers are given, on this machine if all addresses are
        bound."""
        return self.address_at(reachable(self.host))

    @property
    def url(self) -> str:
        """Of the page."""
        return f"{self._scheme}://{authority(reachable(self.host), self.port)}"

    def address_at(self, host: str) -> str:
        """The same with another name or address of this machine.

        Args:
            host: the name of this machine as workers reach it.
        """
        return f"{'https://' if self._scheme == 'https' else ''}{authority(host, self.port)}"

    @property
    def sync_round(self) -> int:
        """Rounds committed so far, of all fragments."""
        return sum(self._state.coordinator.versions)

    @property
    def tokens(self) -> float:
        """Tokens of all workers in the rounds committed so far."""
        return self._state.coordinator.tokens

    @property
    def saves(self) -> bool:
        """Whether it has a directory to save to."""
        return self._directory is not None

    @property
    def run_id(self) -> str:
        """Identifies the run, through all restarts."""
        return self._state.coordinator.run_id

    def start(self) -> None:
        """Serve from a thread of its own.

        Raises:
            RuntimeError: if it was stopped.
        """
        if self._is_stopped:
            raise RuntimeError("a server that was stopped cannot be started again; make another one.")
        if self._serving is not None:
            return
        run = ServedRun(
            self._state.coordinator,
            self._state.fragments,
            self._state.store,
            on_commit=self._after_commit,
            token_budget=self._token_budget,
            end=self._ask_to_stop,
        )
        operator = Operator(
            run,
            save_dir=self._directory,
            save=None if self._weights is None else self._save_weights,
            shut_down=self._ask_to_stop,
        )
        self._serving = HttpServer(
            build_app(
                run, operator, Access(self.token, None), self._model, self._buffers, RoleTokens(roles_path(self.port))
            ),
            self._listener,
            name="onstep-diloco-server",
            beside=run.serve,
            on_end=lambda error: self._end(run, error),
            tls=self._tls,
        )
        self._serving.start()
        logger.debug("DiLoCo server of %d workers at %s", self.settings.num_workers, self.address)

    def run(self) -> None:
        """Serve until Ctrl-C, `stop` from another thread, or a shutdown by an operator; then save.

        Raises:
            Exception: whatever made further rounds impossible.
        """
        self.start()
        assert self._serving is not None
        try:
            while not self._serving.wait(0.5):
                pass
        except KeyboardInterrupt:
            logger.info("Interrupted; the server ends.")
        self.stop()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End, after the round that is being committed, however long its disk needs. Calling this twice is harmless."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._serving is not None:
            self._serving.stop(STOP_SECONDS)
            while not self._serving.wait(0):  # until then, no other server may have the directory
                logger.warning("The server ends when the round is written that is being saved in %s", self._directory)
                self._serving.wait(STOP_SECONDS)
        self._listener.close()
        if self._drops_token:
            token_path(self.port).unlink(missing_ok=True)
        if self._serving is not None and self._failure is None and self._weights is not None and self.sync_round:
            self._save_weights(self.sync_round)
        self._state.close()

    def get_global_params(self) -> dict[str, Tensor]:
        """Copies of the newest parameters, as workers have them, in float32 or float64."""
        return {name: tensor.clone() for name, tensor in self._newest().items()}

    def save_state(self, path: str | Path) -> None:
        """Save everything to another directory, while no round is being executed: before `start` or after `stop`.

        Args:
            path: the directory to write to.

        Raises:
            CheckpointError: if the disk refuses.
        """
        self._require_idle("saved")
        with closing(Store(Path(path))) as store:
            self._state.save_to(store)

    def load_state(self, path: str | Path) -> None:
        """Continue from what `save_state` wrote, or from the subdirectory `diloco` of another server; before `start`.

        Args:
            path: the directory to read.

        Raises:
            CheckpointError: if there is none, or it was saved with a different model.
        """
        self._require_idle("loaded")
        with closing(Store(Path(path))) as store:
            self._state.load_from(store)

    def __enter__(self) -> DiLoCoServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None and self._failure is not None:
            raise self._failure

    def _new_buffers(self, own: Path | None) -> Buffers:
        """What is mapped from files of the server's directory, or of the one for temporary files."""
        if own is not None:
            own.mkdir(parents=True, exist_ok=True)
        return Buffers(Path(tempfile.gettempdir()) if own is None else own)

    def _weight_files(self, most_recent: int) -> WeightFiles | None:
        if self._directory is None:
            return None
        theirs = [one for one in checkpoints(self._directory / CHECKPOINTS) if one.manifest.run_id != self.run_id]
        directory = self._directory / STATE if theirs else self._directory  # never into those of a training run
        return WeightFiles(directory / CHECKPOINTS, self.run_id, most_recent)

    def _save_weights(self, num_rounds: int) -> None:
        assert self._weights is not None
        self.model_path = self._weights.save(num_rounds, self._newest())
        parts = len(self._state.fragments)
        of_what = f"{num_rounds} rounds of {parts} fragments are" if parts > 1 else f"round {num_rounds}"
        logger.info("%s saved for other programs: %s", of_what, self.model_path)

    def _newest(self) -> dict[str, Tensor]:
        """The newest parameters."""
        newest = [part.newest for part in self._state.fragments]
        return {name: tensor for version in newest for name, tensor in version.parameters.items()}

    def _after_commit(self, num_rounds: int) -> None:
        if self._weights is None or not self._save_every or num_rounds % self._save_every:
            return
        try:
            self._save_weights(num_rounds)
        except CheckpointError as error:
            logger.error("The checkpoint of round %d was not written; the run continues: %s", num_rounds, error)

    def _ask_to_stop(self) -> None:
        if self._serving is not None:
            self._serving.ask_to_stop()

    def _end(self, run: ServedRun, error: BaseException | None) -> None:
        if error is not None:
            logger.error("The DiLoCo server has ended", exc_info=error)
        self._failure = error
        run.close()

    def _require_idle(self, what: str) -> None:
        if self._serving is not None and not self._is_stopped:
            raise RuntimeError(f"the state of a running server cannot be {what}; stop it first.")
