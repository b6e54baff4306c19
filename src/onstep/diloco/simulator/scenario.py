"""Describes what is simulated: sites with their lines and workers, a server, a model, and the settings of the run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from random import Random
from typing import Any

from onstep.diloco.codec.sizes import check_codec
from onstep.diloco.protocol.messages import Settings, majority
from onstep.diloco.protocol.settings import check_settings
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
    """Share of packets that are lost; limits the rate of each connection."""
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
    """Mean time until a killed worker is back, without what it had not submitted."""
    hours_between_outages: float | None = None
    """Mean time until the site is cut off from the server, while its workers keep training. None: never."""
    outage_minutes: float = 10.0
    """Mean duration of an outage."""


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
    """Mean time until it is back with what it had committed."""


@dataclass(frozen=True)
class Scenario:
    """A run to be simulated; the fields from `mode` on are those of `Settings`."""

    sites: dict[str, Site]
    server: ServerSite = field(default_factory=ServerSite)
    parameters: int = 124_000_000
    rounds: int = 100
    """The simulation is over when each fragment has had this many rounds; in async mode, as many per worker."""
    hours: float | None = None
    """The simulation is over after this time even if there were fewer rounds; default: a thousand times the time that
    the rounds would need without communication."""
    seed: int = 0
    mode: str = "sync"
    num_workers: int | None = None
    """Expected workers; None for those of all sites."""
    min_workers: int | None = None
    """Quorum; None for a majority of `num_workers`, or 1 in async mode."""
    sync_every: int = 500
    num_fragments: int = 1
    codec: str = "bf16"
    dylu: bool = False
    max_staleness: int = 1
    heartbeat_timeout: float = 120.0
    initial_deadline: float = 600.0
    patience: float = 2.0

    def __post_init__(self) -> None:
        _check_scenario(self)
        for name, site in self.sites.items():
            _check_site(name, site)
        _check_lines("server", self.server)

    @property
    def total_workers(self) -> int:
        """Workers of all sites."""
        return sum(site.workers for site in self.sites.values())

    @property
    def total_rounds(self) -> int:
        """Rounds of all fragments together; in async mode, a submission is one."""
        return self.rounds * self.num_fragments * (self.total_workers if self.mode == "async" else 1)

    def random(self, purpose: str) -> Random:
        """A stream of its own for each purpose, so that a varied setting does not change what else happens."""
        return Random(f"{self.seed}/{purpose}")

    def settings(self) -> Settings:
        """What the server makes known to its workers."""
        num_workers = self.total_workers if self.num_workers is None else self.num_workers
        quorum = self.min_workers or (1 if self.mode == "async" else majority(num_workers))
        shared = {one.name for one in fields(Settings)} & {one.name for one in fields(self)}
        values: dict[str, Any] = {name: getattr(self, name) for name in shared - {"num_workers", "min_workers"}}
        return Settings(num_workers=num_workers, min_workers=quorum, **values)


def _check_scenario(one: Scenario) -> None:
    require(len(one.sites) > 0, "sites", "a mapping of at least one site", one.sites, "; add 'home: {workers: 2}'.")
    require(0 < one.total_workers <= _MOST_WORKERS, "the number of workers", "from 1 to 100,000", one.total_workers)
    require(1 <= one.parameters <= 10**13, "parameters", "from 1 to 1e13", one.parameters)
    require(1 <= one.rounds <= _MOST_ROUNDS, "rounds", "from 1 to 10,000,000", one.rounds)
    require(one.hours is None or one.hours > 0, "hours", "> 0", one.hours)
    check_codec(one.codec)
    settings = one.settings()
    check_settings(settings)
    if settings.min_workers > one.total_workers:
        raise ConfigError(
            f"min_workers must be at most {one.total_workers}, the workers of all sites, got {settings.min_workers}; "
            "with more, no round would ever be committed."
        )


def _check_site(name: str, site: Site) -> None:
    place = f"sites.{name}"
    _check_lines(place, site)
    require(site.workers >= 0, f"{place}.workers", ">= 0", site.workers)
    require(site.step_seconds > 0, f"{place}.step_seconds", "> 0", site.step_seconds)
    require(site.tokens_per_step >= 1, f"{place}.tokens_per_step", ">= 1", site.tokens_per_step)
    for key in ("round_trip_ms", "sync_seconds", "step_jitter"):
        require(getattr(site, key) >= 0, f"{place}.{key}", ">= 0", getattr(site, key))
    require(0 <= site.packet_loss < 1, f"{place}.packet_loss", "a share from 0 to below 1", site.packet_loss)
    require(0 <= site.request_loss <= 0.5, f"{place}.request_loss", "a share from 0 to 0.5", site.request_loss)
    require(0 <= site.worker_spread <= 1, f"{place}.worker_spread", "a share from 0 to 1", site.worker_spread)


def _check_lines(place: str, one: Site | ServerSite) -> None:
    """What sites and the server have in common: lines, and times between events, where None is never."""
    for key in ("upload_mbit", "download_mbit", "hours_between_failures", "hours_between_outages"):
        value: float | None = getattr(one, key, None)
        require(value is None or value > 0, f"{place}.{key}", "> 0", value, "; drop the key for no limit.")
    for key in ("minutes_away", "outage_minutes", "round_seconds"):
        least: float = getattr(one, key, 0.0)
        require(least >= 0, f"{place}.{key}", ">= 0", least)
