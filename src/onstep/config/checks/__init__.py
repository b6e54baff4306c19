"""The rules of a configuration, by subject: single values, batches, data, model, optimizer, and the run around them.

Each check raises a ConfigError for the first rule that is broken: it names the value, the rule and the remedy.
`validate` runs them all, and `resolve` fills in derived values. `idle_settings` finds what is set and has no effect.
"""

from onstep.config.checks.idle import idle_in_trainer, idle_line, idle_settings, idle_without_trainer
from onstep.config.checks.parallel import check_parallel
from onstep.config.checks.validation import resolve, validate

__all__ = [
    "check_parallel",
    "idle_in_trainer",
    "idle_line",
    "idle_settings",
    "idle_without_trainer",
    "resolve",
    "validate",
]
