"""The errors that Onstep raises on purpose: each message names the value, the rule and the remedy."""


class OnstepError(Exception):
    """Base of every error that Onstep raises on purpose."""


class ConfigError(OnstepError, ValueError):
    """A configuration value, key or combination that cannot work; raised before any work starts."""


class ShardingError(ConfigError, RuntimeError):
    """A tensor that is not split over ranks as a computation takes it; a RuntimeError too, as in Megatron Bridge."""


class DataError(OnstepError, ValueError):
    """A corpus, tokenizer or dataset that cannot be trained on."""


class RunExistsError(OnstepError):
    """The output folder holds another run; nothing in it was touched."""


class NonFiniteError(OnstepError, ArithmeticError):
    """A loss or gradient norm was NaN or infinite; the update was not applied."""


class AnomalyError(OnstepError, ArithmeticError):
    """A loss or gradient norm far above the last ones, or more skips or rollbacks than the configuration allows."""


class ReplicaMismatchError(OnstepError, ArithmeticError):
    """Ranks that must have the same weights have not; the message names the ranks and parameters that differ."""


class CheckpointError(OnstepError):
    """A checkpoint that cannot be written, found, verified or loaded; the message says which and what to do."""


class MissingWeightsError(CheckpointError, FileNotFoundError):
    """Trained weights that a run is to start from are not where the configuration says."""


class UnsupportedStateError(CheckpointError, TypeError):
    """A state holds something that a checkpoint has no form for; the message gives its path."""


class CollectiveAfterErrorError(OnstepError, RuntimeError):
    """A rank would wait for the others after an error that they may not have met; the message names both."""


class MissingExtraError(OnstepError, ImportError):
    """An optional dependency is needed; the message gives the install line."""


def require(holds: bool, name: str, rule: str, value: object, remedy: str = ".") -> None:
    """Refuse a setting whose value breaks a rule.

    Raises:
        ConfigError: naming the value, the rule and, after it, the remedy.
    """
    if not holds:
        raise ConfigError(f"{name} must be {rule}, got {value!r}{remedy}")
