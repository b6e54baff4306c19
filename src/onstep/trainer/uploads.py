"""Uploads what the methods of a Trainer write to an `output_dir` in an object store outside of a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onstep.errors import ConfigError, StoreError
from onstep.stores.urls import is_url, without_secrets
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.own_arguments import config_of, local_output_dir
from onstep.training.runs.mirrored import MirroredRun


@contextmanager
def writing_output(trainer: BaseTrainer, output_dir: str | None = None) -> Iterator[str]:
    """The local directory for `output_dir` (default: that of the arguments); what is written there is uploaded after.

    During a training, that is what its mirror does. A directory without a run is local only.

    Args:
        trainer: the Trainer.
        output_dir: as given to one of its methods.

    Raises:
        ConfigError: for the URL of another place, and if the store cannot be reached or refuses.
        StoreError: if something is not uploaded.
    """
    args = trainer.args
    own = str(args.output_dir)
    if output_dir not in (None, own):
        if is_url(str(output_dir)):
            raise ConfigError(
                f"output_dir={without_secrets(str(output_dir))} cannot be written; give a local directory, or the "
                f"output_dir of the arguments, which is mirrored."
            )
        yield str(output_dir)
        return
    directory = local_output_dir(args)
    yield directory
    is_due = is_url(own) and trainer.session is None and args.process_index == 0
    if is_due and Path(directory, "run.json").exists():
        mirrored = MirroredRun(config_of(args, num_samples=None, world_size=args.world_size, for_training=False))
        mirrored.close()
        if mirrored.mirror.unfinished is not None:
            raise StoreError(mirrored.mirror.unfinished)
