"""Checks the arguments of a server, and answers those of Forgather's that have another meaning here."""

from __future__ import annotations

import logging

from onstep.diloco.protocol.messages import Settings
from onstep.diloco.protocol.settings import check_settings
from onstep.diloco.sizes import check_codec
from onstep.errors import ConfigError, require
from onstep.http.server import TlsFiles

logger = logging.getLogger(__name__)


def check_arguments(dn_buffer_size: int | None, settings: Settings, save_every: int, tls: TlsFiles | None) -> None:
    """Refuse (ConfigError) values that are out of range."""
    check_settings(settings)
    check_codec(settings.codec)
    require(dn_buffer_size is None or dn_buffer_size >= 0, "dn_buffer_size", ">= 0", dn_buffer_size)
    if dn_buffer_size and settings.mode != "async":
        raise ConfigError(f"dn_buffer_size={dn_buffer_size} requires async_mode=True; pass 0 in synchronous mode.")
    require(save_every >= 0, "save_every_n_rounds", ">= 0", save_every, "; 0 writes no checkpoints.")
    if tls is not None:
        tls.check()


def check_forgathers(safetensors: bool, dashboard_enabled: bool, default_work_units: int | None) -> None:
    """Refuse (ConfigError) pickles and work units, and name the command that shows what a dashboard would."""
    if not safetensors:
        raise ConfigError("safetensors=False would save pickles, which a server never does; leave it out.")
    if default_work_units is not None:
        raise ConfigError(
            f"default_work_units={default_work_units} hands out units of the data, but a worker has a share of it, "
            f"which it gets back when it returns; leave it out."
        )
    if dashboard_enabled:
        logger.info(
            "the page of the run is always served, at the address of the server; `onstep diloco status` has the same"
        )
