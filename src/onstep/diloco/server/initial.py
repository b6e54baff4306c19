"""Finds what a server starts with: a module, a state dict, a checkpoint, a directory, or what a run has saved."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from onstep.checkpoint import read_tensors, resolve
from onstep.checkpoint.catalog.foreign import describe_foreign
from onstep.checkpoint.loading import read_weights
from onstep.diloco.outer import check_rates
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.protocol.settings import arguments_of, changed_arguments, check_settings, outer_name, saved_settings
from onstep.diloco.server.masters import Fragment
from onstep.diloco.server.store import Saved, Store
from onstep.diloco.sizes import CODECS
from onstep.errors import CheckpointError, ConfigError, require
from onstep.models.hf import weight_files

Source = nn.Module | Mapping[str, Tensor] | str | Path
"""What parameters can come from."""


def initial_parameters(source: Source, exclude: Collection[str] = ()) -> dict[str, Tensor]:
    """The parameters to be trained, by name.

    Args:
        source: a module (its parameters that require a gradient), a state dict, a safetensors file, a checkpoint or a
            directory with some, or a Hugging Face directory. Of all but a module, every tensor of floating point is
            taken, tied ones once.
        exclude: names not to take, with `*` for any text: buffers and frozen parameters of a state dict.

    Raises:
        ConfigError: if there are none, or a pattern fits no name.
        CheckpointError: for a file that cannot be read.
    """
    found = _all(source)
    unused = [pattern for pattern in exclude if not any(fnmatchcase(name, pattern) for name in found)]
    if unused:
        raise ConfigError(f"exclude must fit names of the model, and {unused[0]!r} fits none; see its names.")
    kept = {
        name: tensor for name, tensor in found.items() if not any(fnmatchcase(name, pattern) for pattern in exclude)
    }
    if not kept:
        raise ConfigError("the model of a server must have parameters to train, and none is left.")
    return kept


def _all(source: Source) -> dict[str, Tensor]:
    if isinstance(source, nn.Module):
        return {name: one.detach() for name, one in source.named_parameters() if one.requires_grad}
    if isinstance(source, Mapping):
        return _trainable(source)
    return _trainable(_read(Path(source)))


def _read(path: Path) -> Mapping[str, Tensor]:
    if path.is_file():
        return read_tensors(path)
    if path.is_dir() and describe_foreign(path) is not None:
        state: Mapping[str, Tensor] = weight_files.read_tensors(weight_files.weight_files(path))
        return state
    return read_weights(resolve(path))[0]


def _trainable(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is of floating point, and tensors that share their memory once, under the first name."""
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name}: a state dict must have tensors, got {type(tensor).__name__}.")
        place = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tuple(tensor.shape))
        is_twin = tensor.numel() > 0 and place in seen
        seen.add(place)
        if tensor.is_floating_point() and tensor.element_size() >= 2 and not is_twin:
            kept[name] = tensor.detach()
    return kept


def places(
    model: Source | None, output_dir: str | Path | None, from_checkpoint: str | Path | None
) -> tuple[Source, Path | None]:
    """Where the parameters come from, and where the server saves.

    Raises:
        ConfigError: if there is neither a model nor a directory.
    """
    directory = None if output_dir is None else Path(output_dir)
    if model is None and directory is None:
        raise ConfigError("a server requires a model or an output_dir with checkpoints; give one.")
    if isinstance(model, str | Path):
        model = Path(model)
        directory = model if directory is None and model.is_dir() else directory
    if from_checkpoint is not None:
        model = Path(from_checkpoint)
    source = directory if model is None else model
    assert source is not None
    return source, directory


def saved_parameters(directory: Path) -> dict[str, Tensor] | None:
    """The parameters of the run that a server has saved in a directory; None if there is no run."""
    if not directory.is_dir():
        return None
    with closing(Store(directory)) as store:
        saved = store.load()
    if saved is None:
        return None
    return {name: one for state in saved.fragments.values() for name, one in state["masters"].items()}


@dataclass(frozen=True)
class Origin:
    """What a server is started with, as far as those that continue its run have to give the same; JSON-safe."""

    arguments: Mapping[str, Any]
    source: str | None = None
    """The path of the model, if it has one."""
    former: Sequence[Mapping[str, Any]] = ()
    """Arguments of earlier starts, that others have replaced."""

    @classmethod
    def of(cls, settings: Settings, fragments: Sequence[Fragment], source: Source | None) -> Origin:
        """Of a server with these settings and fragments; `source` is where the parameters are from, None for a saved
        run, whose parameters are what they are."""
        arguments = arguments_of(settings, type(fragments[0].optimizer).__name__, fragments[0].groups)
        if source is not None:
            digests = "".join(part.newest.digest for part in fragments)
            digest = hashlib.blake2b(digests.encode(), digest_size=8).hexdigest()
            arguments["model"] = f"parameters with hash {digest}"
        return cls(arguments, str(source.resolve()) if isinstance(source, Path) else None)

    def changed_to(self, given: Origin) -> Origin:
        """The same with other arguments that took effect."""
        arguments = {**self.arguments, **given.without_model().arguments}
        return self if arguments == self.arguments else Origin(arguments, self.source, [*self.former, self.arguments])

    def without_model(self) -> Origin:
        """The same, with any values of the parameters."""
        return Origin({name: one for name, one in self.arguments.items() if name != "model"})


def continued(saved: Saved, given: Origin, fragments: Sequence[Fragment], *, may_change: bool) -> Settings:
    """Give fragments their saved state; returns the settings of the run.

    Arguments that are those that it was started with mean what the run has now, unless they may change it.

    Raises:
        ConfigError: for other ones, unless they may change.
        CheckpointError: for the state of other parameters.
    """
    first = Origin(**saved.origin)
    if given.source is not None and given.source == first.source:
        given = given.without_model()  # there may be newer parameters by now
    before, outer = saved_settings(saved.rest["settings"]), saved.rest["outer"]
    now = arguments_of(before, first.arguments["outer optimizer"], outer[0])
    started_with = [first.arguments, *first.former]
    changed = changed_arguments(given.arguments, started_with, now, may_change=may_change)
    known = {field.name for field in fields(Settings)}
    settings = replace(before, **{name: given.arguments[name] for name in changed & known})
    check_settings(settings)
    rule, remedy = f"one of {', '.join(CODECS)}", "; continue it with --change-settings and one of them as --codec."
    require(settings.codec in CODECS, "codec of the saved run", rule, settings.codec, remedy)
    for number, part in enumerate(fragments):
        part.codec = settings.codec
        groups = [
            {key: one for key, one in group.items() if outer_name(key, index) in changed}
            for index, group in enumerate(part.groups)
        ]
        part.load_state_dict(saved.fragments[number])
        part.set_groups(outer[number])
        part.set_groups(groups)
        check_rates(part.optimizer)
    return settings
