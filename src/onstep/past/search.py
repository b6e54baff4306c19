"""Finds the first step of a run for which a condition on its metrics holds, in its record or by repeating the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from onstep.config.keys import own_copy
from onstep.errors import AnomalyError, ConfigError, NonFiniteError
from onstep.events import Callback
from onstep.past.expressions import Expression, MissingMetricError, metrics_of_quotient
from onstep.past.layers import Weights, largest_activations
from onstep.past.metrics import KNOWN, metric_named
from onstep.past.place import Plan, last_step, plan_rewind, rollbacks_of
from onstep.past.repetition import rewind
from onstep.past.rewinding import Past
from onstep.record import Record, leading_records
from onstep.record.kinds import FILE_NAME

MEASURED = ("update/LAYER", "activation/LAYER", "attention_logit/LAYER", "max_update", "max_activation")
"""What is measured besides the metrics of `onstep.past.metrics`: norms of updates, and largest magnitudes."""
_KINDS = ("update", "activation", "attention_logit")


@dataclass(frozen=True)
class Found:
    """The first step for which a condition holds."""

    step: int
    values: dict[str, float]
    """The metrics of the condition at that step."""


@dataclass(frozen=True)
class Search:
    """How the first step for which a condition holds is to be found."""

    expression: Expression
    plan: Plan
    """How the run is repeated, from the first step that counts."""
    last: int
    """The last known step of the run."""
    records: list[Record]
    """The run's record."""
    is_recorded: bool
    """Whether the record has all metrics of the condition, so that nothing is repeated."""

    @property
    def cost(self) -> str:
        """One line about what it costs."""
        if self.is_recorded:
            return "looking through the record, which has these metrics of the steps that were logged"
        begin = self.plan.start_step
        return f"repeating up to {self.last - begin} steps, from step {begin}, until it holds; plus loading"

    def run(
        self, callbacks: Sequence[object] = (), rewind: Callable[..., AbstractContextManager[Past]] = rewind
    ) -> Found | None:
        """The first step for which the condition holds; None if there is none. Collective.

        Raises:
            ConfigError: for a metric that no step has.
        """
        if self.is_recorded:
            return _in_record(self.expression, values_of(self.records, self.plan.step))
        return _repeated(self, callbacks, rewind)


def plan_search(run: Path, expression: Expression, from_step: int | None = None) -> Search:
    """Find out whether the record tells, and from where the run would be repeated otherwise.

    Args:
        run: the run's directory.
        expression: the condition.
        from_step: the first step that counts; the run is then repeated even if the record has the metrics, since it
            need not have logged each step. None looks at all steps.

    Raises:
        ConfigError: if there is no such run or step.
    """
    plan = plan_rewind(run, 1 if from_step is None else from_step)
    records = leading_records(run / FILE_NAME)
    known = {name for _, values in values_of(records, 1) for name in values}
    is_recorded = from_step is None and all(_is_known(name, known) for name in expression.names)
    return Search(expression, plan, last_step(run, plan.run_json, records), records, is_recorded)


def values_of(records: Iterable[Record], first: int) -> list[tuple[int, dict[str, float]]]:
    """The numbers that were logged of each step from `first` on, those of its evaluations and anomalies included."""
    found: dict[int, dict[str, float]] = {}
    for one in records:
        kind, step, values = one.get("kind"), one.get("global_step"), dict(one)
        details = one.get("details")
        if kind == "decision" and isinstance(details, dict) and "anomaly" in details:
            step, values = details.get("bad_step"), {key: details.get(key) for key in ("loss", "grad_norm")}
        elif kind not in ("log", "evaluation", "test"):
            continue
        if isinstance(step, int) and step >= first:
            found.setdefault(step, {}).update(_numbers(values))
    return sorted(found.items())


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    others = ("timestamp", "kind", "global_step")
    return {
        key: float(one)
        for key, one in values.items()
        if isinstance(one, (int, float)) and not isinstance(one, bool) and key not in others
    }


def _is_known(name: str, known: Iterable[str]) -> bool:
    """Whether a metric is known, or a quotient of metrics."""
    names = set(known)
    return name in names or ("/" in name and names.issuperset(metrics_of_quotient(name)))


def _in_record(expression: Expression, steps: Iterable[tuple[int, dict[str, float]]]) -> Found | None:
    """The first step; a metric that a step has not logged has the value of the newest step that has."""
    known: dict[str, float] = {}
    for step, values in steps:
        known |= values
        if _is_any(expression, values) and _holds(expression, known):
            return Found(step, _of(expression, known))
    return None


def _is_any(expression: Expression, values: Mapping[str, float]) -> bool:
    return any(name in values or not {*name.split("/")}.isdisjoint(values) for name in expression.names)


def _holds(expression: Expression, values: Mapping[str, float]) -> bool:
    try:
        return expression.holds(values)
    except MissingMetricError:
        return False


def _of(expression: Expression, values: Mapping[str, float]) -> dict[str, float]:
    names = [part for name in expression.names for part in ([name] if name in values else name.split("/"))]
    return {name: values[name] for name in names if name in values}


def _repeated(
    search: Search, callbacks: Sequence[object], rewind: Callable[..., AbstractContextManager[Past]]
) -> Found | None:
    """Repeat the run, and look at each step after its update."""
    expression, plan, measures = search.expression, search.plan, _Measures(search.expression.names)
    config = own_copy(plan.config)
    named = [part for name in expression.names if name not in measures.names for part in _metrics_in(name)]
    if any(name not in measures.names and not _metrics_in(name) for name in expression.names):
        config.logger.log_interval, config.logger.log_first_step = 1, True
    plan, rollbacks = replace(plan, config=config, branch=0), rollbacks_of(plan.directory)
    known: dict[str, float] = {}
    missing = ""
    with rewind(
        plan.directory,
        plan.step,
        callbacks=[*callbacks, measures],
        log=named,
        around_step=measures.around,
        plan=plan,
    ) as past:
        for step in _steps(past, search.last):
            known |= _values_at(past, measures, step)
            is_kept = not any(to_step < step for to_step, _ in rollbacks[past.branch :])
            found = is_kept and _holds(expression, known), _missing(expression, known)
            is_found, missing = past.job.run.world.share(found) if past.is_finished else found
            if is_found:
                return Found(step, _of(expression, known))
            if missing and not callbacks and step > plan.step:
                break
    if missing:
        there = ", ".join([*KNOWN, *MEASURED, *sorted(known.keys() - {*KNOWN})])
        raise ConfigError(f"--when: no step has the metric {missing!r}; there are {there}, and what a --callback logs.")
    return None


def _steps(past: Past, last: int) -> Iterator[int]:
    """The steps from the one that is held on, each held at its end; the last one may be ended by an anomaly's error."""
    yield past.step
    while past.step < last:
        number = past.step + 1
        try:
            past.next()
        except (NonFiniteError, AnomalyError):
            yield number
            return
        yield past.step


def _missing(expression: Expression, values: Mapping[str, float]) -> str:
    """The first metric of an expression that is not known; empty if all are."""
    return next((name for name in expression.names if not _is_known(name, values)), "")


def _metrics_in(name: str) -> list[str]:
    """The metric of a name, or those of a quotient; none if a run has to log it."""
    parts = metrics_of_quotient(name)
    return [name] if _is_metric(name) else parts if all(map(_is_metric, parts)) else []


def _is_metric(name: str) -> bool:
    with suppress(ConfigError):
        metric_named(name)
        return True
    return False


def _values_at(past: Past, seen: _Measures, step: int) -> dict[str, float]:
    """The numbers of a repeated step: what it logged, and what was measured."""
    logged, measured = past.comparison.lines.get(step, {}), {} if past.log is None else past.log.rows.get(step, {})
    return _numbers(logged) | _numbers(measured) | seen.values.pop(step, {})


class _Measures(Callback):
    """Measures updates and activations of each repeated step."""

    ranks = "all"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = [
            one for one in names if one.partition("/")[0] in _KINDS or one in ("max_update", "max_activation")
        ]
        self.values: dict[int, dict[str, float]] = {}
        self._model: nn.Module | None = None

    def on_train_start(self, context: Any) -> None:
        """Keep the model."""
        self._model = context.model[0] if isinstance(context.model, list) else context.model

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Measure one step."""
        model, names = self._model, self.names
        if model is None or not names:
            yield
            return
        activations: dict[str, Tensor] = {}
        logits: dict[str, Tensor] = {}
        weights = Weights(model) if any("update" in one for one in names) else None
        watch: AbstractContextManager[None] = largest_activations(model, activations, logits)
        with watch:
            yield
        updates = {} if weights is None else weights.update_norms()
        found = {f"update/{name}": float(one) for name, one in updates.items()}
        found |= {f"activation/{name}": float(one) for name, one in activations.items()}
        found |= {f"attention_logit/{name}": float(one) for name, one in logits.items()}
        for kind in ("update", "activation"):
            of_kind = [value for name, value in found.items() if name.startswith(f"{kind}/")]
            if of_kind:
                found[f"max_{kind}"] = max(of_kind)
        self.values[step] = found
