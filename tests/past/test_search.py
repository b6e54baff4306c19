"""The first step for which a condition holds is found in the record, or by repeating the run."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from onstep import Callback, CallbackManager, pretrain
from onstep.errors import ConfigError
from onstep.past.expressions import parse
from onstep.past.search import plan_search
from tests.support.past_runs import STEPS, content_of, run_config


class Spy(Callback):
    """Adds a metric to the log that the loop does not have."""

    def on_log_step(self, context: Any) -> None:
        context.logs["spy/largest"] = max(float(one.detach().abs().max()) for one in context.model[0].parameters())


def found_in(run: Path, text: str, from_step: int | None = None, *callbacks: object) -> int | None:
    before = content_of(run)
    found = plan_search(run, parse(text), from_step).run(callbacks)
    assert content_of(run) == before
    return None if found is None else found.step


def lines_of(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "record.jsonl").read_text().splitlines())
    return [one for one in lines if one["kind"] == "log" and "grad_norm" in one]


def test_a_metric_in_the_record_is_looked_up_there(run: Path) -> None:
    losses = [one["loss"] for one in lines_of(run)]
    limit = statistics.median(losses)
    first = next(step for step, loss in enumerate(losses, 1) if loss < limit)
    assert plan_search(run, parse("loss < 1")).is_recorded
    assert found_in(run, f"loss < {limit!r}") == first
    assert found_in(run, f"loss < {limit!r}", 1) == first
    assert found_in(run, f"loss < {limit!r}", first + 1) == first + 1
    assert found_in(run, "loss < 0") is None
    assert found_in(run, "eval_loss > 0 and grad_norm > 0") == 2  # evaluated after step 2


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
def test_a_metric_that_was_never_logged_is_found_where_a_run_that_logs_it_has_it(
    seed: int, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    changes = {"validation__eval_interval": None, "train__train_iters": 6, "checkpoint__save_interval": 4}
    changes |= {"rng__seed": seed, "logger__log_interval": 1}
    config = run_config(corpus, token_cache, tmp_path / "logged", **changes)
    manager = CallbackManager()
    manager.add([Spy()])
    pretrain(config, callbacks=manager)
    logged = [one["spy/largest"] for one in lines_of(tmp_path / "logged" / "x")]
    limit = statistics.median(logged)
    first = next(step for step, one in enumerate(logged, 1) if one > limit)
    pretrain(run_config(corpus, token_cache, tmp_path, **{**changes, "logger__log_interval": 100}))
    assert found_in(tmp_path / "x", f"spy/largest > {limit!r}", None, Spy()) == first


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("gradient/layers.1 > 0 and weight/layers.0 > 0", 1),
        ("update/layers.0 > 0", 2),  # the rate of the first update is 0
        ("max_update > 0 and activation/layers.0 > 0", 2),
        ("attention_logit/layers.1 > -1e9 and max_activation > 0", 1),
        ("params_norm/grad_norm/2 > 0", 1),
        ("params_norm/2.5 > 0", 1),
    ],
)
def test_layers_can_be_measured_afterwards(run: Path, text: str, step: int) -> None:
    assert found_in(run, text) == step
    assert found_in(run, f"{text} and epoch > 1e9") is None


def test_the_value_of_a_layer_is_that_of_its_step(run: Path) -> None:
    import onstep

    with onstep.rewind(run, 5) as past:
        grads = [one.float().norm() for name, one in past.gradients.items() if name.startswith("layers.1.")]
        norm = float(sum(one**2 for one in grads) ** 0.5)
    found = plan_search(run, parse(f"abs(gradient/layers.1 - {norm!r}) < 1e-5 * {norm!r}")).run()
    assert found is not None
    assert found.step == 5


@pytest.mark.parametrize("text", ["nothing > 1", "loss > 100 and spy/largest > 1", "gradient/layers.7 > 1"])
def test_a_metric_that_no_step_has_is_refused(run: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"nothing|spy/largest|layers\.7") as refusal:
        found_in(run, text)
    assert "\n" not in str(refusal.value)


def test_a_step_that_the_run_does_not_have_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=f"step={STEPS + 1} is beyond"):
        found_in(run, "loss > 1", STEPS + 1)


def test_a_step_that_an_error_ended_is_found(corpus: Path, token_cache: Path, tmp_path: Path) -> None:
    class Breaks(Callback):
        def on_pre_optimizer_step(self, context: Any) -> None:
            if context.state.train_state.step == 3:
                next(context.model[0].parameters()).data.fill_(float("nan"))

    manager = CallbackManager()
    manager.add([Breaks()])
    with pytest.raises(ArithmeticError):
        pretrain(run_config(corpus, token_cache, tmp_path), callbacks=manager)
    assert found_in(tmp_path / "x", "isnan(loss)") == 5
    assert found_in(tmp_path / "x", "isnan(loss) and not isnan(learning_rate)", 2, Breaks()) == 5
