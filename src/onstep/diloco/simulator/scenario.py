"""Describes a run to be simulated: sites with their lines and workers, a server, a model, and the run's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from onstep.diloco.protocol.messages import Settings
from onstep.diloco.protocol.settings import check_settings
from onstep.diloco.simulator.environment.network import CONGESTION_CONTROLS, packet_loss_limit
from onstep.diloco.sizes import check_codec
from onstep.errors import ConfigError, require

_MOST_WORKERS = 100_000
_MOST_ROUNDS = 10_000_000


@dataclass(frozen=True)
class Site:
    """A place with workers that share its connection to the server."""

    workers: int = 1
    upload_mbit: float | None = None
    """Megabits per second from the site, for all its workers together. None: without limit."""
    download_mbit: float | None = None
    round_trip_ms: float = 0.0
    """Milliseconds to the server and back, as `ping` prints them."""
    packet_loss: float = 0.0
    """Share of packets that are lost; limits the rate of each connection, unless its congestion control is BBR."""
    congestion_control: str = "cubic"
    """Of TCP at both ends: `cubic`, the default of Linux, `bbr` or `reno`."""
    request_loss: float = 0.0
    """Share of requests whose connection breaks, half of them after the server has received the request."""
    step_seconds: float = 1.0
    """Mean duration of an optimizer step."""
    step_jitter: float = 0.0
    """Standard deviation of a step's duration, as a share of the mean; the steps are independent of each other."""
    worker_spread: float = 0.0
    """Standard deviation of the workers' mean step durations, as a share of `step_seconds`."""
    tokens_per_step: int = 1
    """Tokens of a worker's step; contributions are weighted by them."""
    sync_seconds: float = 0.0
    """Time in which a worker encodes a submission and applies a version, during which it does not train."""
    hours_between_failures: float | None = None
    """Mean time until a worker is killed. None: never."""
    minutes_away: float = 10.0
    """Mean time until a killed worker restarts, without the steps that it had not submitted."""
    hours_between_outages: float | None = None
    """Mean time until the site is cut off from the server, while its workers keep training. None: never."""
    outage_minutes: float = 10.0
    """Mean duration of an outage."""

    @property
    def connection_limit(self) -> float:
        """Bytes per second of one connection, by packet loss alone; infinite without a limit."""
        return packet_loss_limit(self.packet_loss, self.round_trip_ms / 1000.0, self.congestion_control)


@dataclass(frozen=True)
class ServerSite:
    """The place of the server."""

    upload_mbit: float | None = None
    """Megabits per second from the server to all workers together. None: without limit."""
    download_mbit: float | None = None
    round_seconds: float = 0.0
    """Duration of an outer step: averaging, the optimizer, encoding and writing to disk."""
    hours_between_failures: float | None = None
    """Mean time until the server is killed. None: never."""
    minutes_away: float = 2.0
    """Mean time until it restarts from its last commit."""


@dataclass(frozen=True)
class Scenario:
    """A run to be simulated."""

    sites: dict[str, Site]
    settings: Settings
    """Its `num_workers` are by default those of all sites, and its codec is `bf16`."""
    server: ServerSite = field(default_factory=ServerSite)
    parameters: int = 124_000_000
    rounds: int = 100
    """The simulation ends when each fragment has had this many rounds; in async mode, as many per worker."""
    hours: float | None = None
    """The simulation ends after this time even if there were fewer rounds; default: a thousand times the time that the
    rounds would need without communication."""
    seed: int = 0

    def __post_init__(self) -> None:
        _check_scenario(self)
        for name, site in self.sites.items():
            _check_bounds(f"sites.{name}", site)
        _check_bounds("server", self.server)

    @property
    def total_workers(self) -> int:
        """Workers of all sites."""
        return sum(site.workers for site in self.sites.values())

    @property
    def total_rounds(self) -> int:
        """Rounds of all fragments together; in async mode, every submission is a round."""
        return self.rounds * self.settings.num_fragments * (self.total_workers if self.settings.mode == "async" else 1)

    def random(self, purpose: str) -> Random:
        """A stream of its own for each purpose, so that a varied setting does not change what else happens."""
        return Random(f"{self.seed}/{purpose}")


def _check_scenario(scenario: Scenario) -> None:
    sites, workers = scenario.sites, scenario.total_workers
    require(len(sites) > 0, "sites", "a mapping of at least one site", sites, "; add 'home: {workers: 2}'.")
    require(0 < workers <= _MOST_WORKERS, "the number of workers", "from 1 to 100,000", workers)
    require(1 <= scenario.parameters <= 10**13, "parameters", "from 1 to 1e13", scenario.parameters)
    require(1 <= scenario.rounds <= _MOST_ROUNDS, "rounds", "from 1 to 10,000,000", scenario.rounds)
    require(scenario.hours is None or scenario.hours > 0, "hours", "> 0", scenario.hours)
    check_codec(scenario.settings.codec)
    check_settings(scenario.settings)
    quorum = scenario.settings.min_workers
    if quorum > workers:
        raise ConfigError(
            f"min_workers must be at most {workers}, the workers of all sites, got {quorum}; with more, no round would "
            "ever be committed."
        )


_POSITIVE = ("upload_mbit", "download_mbit", "hours_between_failures", "hours_between_outages", "step_seconds")
_BOUNDS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(_POSITIVE, (lambda value: value > 0, "> 0")),
    "packet_loss": (lambda value: 0 <= value < 1, "a share from 0 to below 1"),
    "request_loss": (lambda value: 0 <= value <= 0.5, "a share from 0 to 0.5"),
    "worker_spread": (lambda value: 0 <= value <= 1, "a share from 0 to 1"),
    "tokens_per_step": (lambda value: value >= 1, ">= 1"),
}
_NOT_NEGATIVE: tuple[Callable[[float], bool], str] = (lambda value: value >= 0, ">= 0")


def _check_bounds(place: str, site: Site | ServerSite) -> None:
    """Check the numbers of a site or of the server's place; None is for no limit, or never."""
    if isinstance(site, Site):
        rule = f"one of {', '.join(CONGESTION_CONTROLS)}"
        control = site.congestion_control
        require(control in CONGESTION_CONTROLS, f"{place}.congestion_control", rule, control)
    for key, value in ((key, value) for key, value in vars(site).items() if not isinstance(value, str)):
        holds, rule = _BOUNDS.get(key, _NOT_NEGATIVE)
        require(value is None or holds(value), f"{place}.{key}", rule, value)
