"""Defines the exceptions that Onstep raises; each message names the value, the rule and the remedy."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

PREEMPTED = 75
"""Exit code (`EX_TEMPFAIL`) of a process that was asked to end and has kept its work: the same command continues it."""


class OnstepError(Exception):
    """Base class of all exceptions that Onstep raises deliberately.

    Long values in its message are shortened, and URLs have neither user, password nor signature.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(abridged(without_credentials(one)) if isinstance(one, str) else one for one in args))


_CREDENTIALS = re.compile(r"(?<=://)[^/\s'\"@]+@|(?<=[A-Za-z]{2}:/)[^/\s'\"@:]+:[^/\s'\"@]+@")
"""With one slash, too, which a URL that was taken for a path has left."""
_SIGNATURE = re.compile(r"(?i)(?<=[?&])([\w.-]*(?:sig|token|credential|key|secret|passw)[\w.-]*=)[^&\s'\"]+")


def without_credentials(text: str) -> str:
    """The text without user, password and signature that a URL in it may have.

    Args:
        text: a message.
    """
    return _SIGNATURE.sub(r"\1...", _CREDENTIALS.sub("...@", text)) if ":/" in text else text


def text_of(error: BaseException) -> str:
    """The text of any exception, or the name of its class if that has a `__str__` that fails itself."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the code of the class's author
        return type(error).__name__


def named_text(error: BaseException) -> str:
    """The class of any exception and its text, as reports name what the user's code raised."""
    return f"{type(error).__name__}: {text_of(error)}"


class ConfigError(OnstepError, ValueError):
    """An invalid configuration value, key or combination; raised before any work starts."""


def of_exhausted_iterator(who: str, error: BaseException) -> ConfigError:
    """The error in place of a `StopIteration` of `who`, which would pass for the end of what calls it."""
    found = ConfigError(
        f"{who} raised StopIteration: something in it called next() on an exhausted iterator; give next() a default, "
        f"or catch StopIteration there."
    )
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


class ShardingError(ConfigError, RuntimeError):
    """A tensor is not sharded over ranks as a computation requires; also a RuntimeError, as in Megatron Bridge."""


class MainOnlyError(ConfigError, RuntimeError):
    """A collective in what only rank 0 runs; the message names the callback, and all ranks raise it."""


class CallbackError(ConfigError, TypeError):
    """A callback or handler that cannot be called as it is; also a TypeError, as a wrong argument of a function is."""


class OtherStageError(ConfigError, AttributeError):
    """Code on a stage of a pipeline that reads what another one has; also an AttributeError, as of a missing module."""


class LossError(ConfigError, TypeError):
    """The result of a loss function that has none of the documented forms; also a TypeError."""


class DataError(OnstepError, ValueError):
    """A corpus, tokenizer or dataset that cannot be used for training."""


class RunExistsError(OnstepError):
    """The output directory belongs to another run; nothing in it was modified."""


class StoreError(OnstepError):
    """A request to an object store that failed, also when it was repeated; the message contains no credentials."""


class LostLeaseError(StoreError):
    """Another process has taken over the run in an object store; this one can write nothing there any more."""


class HubError(OnstepError):
    """The Hugging Face Hub failed or could not be reached; the message contains neither tokens nor signed URLs."""


class NonFiniteError(OnstepError, ArithmeticError):
    """A loss or gradient norm was NaN or infinite; the update was not applied."""


class AnomalyError(OnstepError, ArithmeticError):
    """A loss or gradient norm spiked, or there were more skips or rollbacks than the configuration allows."""


class ReplicaMismatchError(OnstepError, ArithmeticError):
    """Ranks that must have identical weights do not; the message names the ranks and parameters that differ."""


class CheckpointError(OnstepError):
    """A checkpoint cannot be written, found, verified or loaded; the message names it and says what to do."""


class MissingWeightsError(CheckpointError, FileNotFoundError):
    """The pretrained weights that a run should start from were not found."""


class UnsupportedStateError(CheckpointError, TypeError):
    """A state contains a value that cannot be saved in a checkpoint; the message gives its path."""


class CollectiveAfterErrorError(OnstepError, RuntimeError):
    """A rank attempted a collective after an error that other ranks might not share; the message names both."""


class RanksApartError(OnstepError, RuntimeError):
    """The ranks are at different collectives; the message names what this one is at."""


class RankFailedError(OnstepError, RuntimeError):
    """This rank has reached the end of the run, but another one has failed."""


class MissingExtraError(ConfigError, ImportError):
    """An optional dependency is missing; the message gives the command that installs it."""


@contextmanager
def extra(name: str, what: str, remedy: str = "") -> Iterator[None]:
    """Explain an ImportError of the block, which imports an optional dependency.

    Args:
        name: of the extra that has the dependency.
        what: what requires it, and its name.
        remedy: what to do instead of installing it.

    Raises:
        MissingExtraError: in place of the ImportError.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"{what}: pip install 'onstep[{name}]'{remedy}") from error


_LONG_VALUE = re.compile(r"\[(?:[^][]|\[[^][]*\]){600,}\]|\S{600,}")
"""A list, or a text without spaces, that is longer than anybody reads; file names have up to 255 bytes."""


def abridged(message: str) -> str:
    """The message with the first 200 characters of each long value."""
    return _LONG_VALUE.sub(_beginning, message)


def _beginning(found: re.Match[str]) -> str:
    end = found[0][-1] if found[0][-1] in ";,:." else ""
    return f"{found[0][:200]}... ({len(found[0]) - len(end):,} characters){end}"


def require(holds: bool, name: str, rule: str, value: object, remedy: str = ".") -> None:
    """Check the value of a setting.

    Raises:
        ConfigError: if `holds` is False; the message names the value, the rule and the remedy.
    """
    if not holds:
        raise ConfigError(f"{name} must be {rule}, got {value!r}{remedy}")


_warned_of: set[str] = set()


def warn_once(logger: logging.Logger, text: str) -> None:
    """Log a warning, once in this process or, from its start, once in a training."""
    if text not in _warned_of:
        _warned_of.add(text)
        logger.warning("%s", text)


def forget_warnings() -> None:
    """Let `warn_once` repeat its warnings: another training starts."""
    _warned_of.clear()
