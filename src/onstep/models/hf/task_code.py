"""Keeps lm-eval from executing what the files of tasks bring along, unless their user trusts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from onstep.config.suggestions import nearest
from onstep.errors import ConfigError

_REMEDY = "read it, and pass --trust-task-code (trust_task_code=True) if you want it to run."


@contextmanager
def no_foreign_code(lm_eval: Any, *, is_trusted: bool) -> Iterator[None]:
    """A context in which lm-eval executes no code of tasks except those of its own package, unless it is trusted.

    That is: no function that a file names (`!function`), no metric of the library `evaluate`, which is a script, and
    templates are rendered in jinja's sandbox. In the context, a task with one of the first two raises a `ConfigError`.
    """
    if is_trusted:
        yield
        return
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils
    from lm_eval.api import metrics as _  # noqa: F401 - which registers lm-eval's metrics
    from lm_eval.api import registry, task
    from lm_eval.tasks import _yaml_loader

    own = Path(lm_eval.__file__).resolve().parent
    import_function = _yaml_loader._import_func_in_yml  # there is no public name for it

    def function_of(name: str, directory: Path) -> Any:
        if not directory.resolve().is_relative_to(own):
            raise ConfigError(f"a task file in {directory} executes the Python function {name} (!function); {_REMEDY}")
        return import_function(name, directory)

    def metric_of(name: str, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric or name not in registry.metric_registry:
            hint = "" if name in registry.metric_registry else nearest(name, list(registry.metric_registry))
            raise ConfigError(
                f"the metric {name!r} is none of lm-eval's, but a script of the library evaluate; {_REMEDY}{hint}"
            )
        return registry.get_metric(name)

    templates = SandboxedEnvironment(
        loader=utils.env.loader,
        undefined=utils.env.undefined,
        keep_trailing_newline=utils.env.keep_trailing_newline,
    )
    templates.filters.update(utils.env.filters)
    with ExitStack() as stack:
        stack.enter_context(replaced(_yaml_loader, "_import_func_in_yml", function_of))
        stack.enter_context(replaced(task, "get_metric", metric_of))
        stack.enter_context(replaced(utils, "env", templates))
        yield


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which an attribute of a module has another value."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
