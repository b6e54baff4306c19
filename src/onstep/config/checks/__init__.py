"""The rules of a configuration, by subject: single values, batches, data, model, optimizer, and the run around them.

Each check raises a ConfigError for the first rule that is broken: it names the value, the rule and the remedy.
`validate` runs them all, and `resolve` fills in derived values.
"""

from onstep.config.checks.validation import resolve, validate

__all__ = ["resolve", "validate"]
