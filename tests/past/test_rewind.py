"""A rewound run repeats the steps of its past to the bit, and leaves the run's directory as it is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onstep
from onstep import pretrain
from onstep.errors import ConfigError, DataError
from onstep.events.context import unwrap
from onstep.past import Past, plan_rewind
from onstep.past.comparison import Comparison
from tests.support.past_runs import STEPS, content_of, run_config


@contextmanager
def untouched(run: Path) -> Iterator[None]:
    """Check that the files of a run are the same at the end."""
    before = content_of(run)
    yield
    assert content_of(run) == before


def logged(run: Path) -> dict[int, dict[str, Any]]:
    lines = map(json.loads, (run / "record.jsonl").read_text().splitlines())
    return {one["global_step"]: one for one in lines if one["kind"] == "log" and "grad_norm" in one}


def check(past: Past, run: Path) -> None:
    """The step that is held and those before are those of the record."""
    assert past.comparison.deviation is None
    assert past.loss == logged(run)[past.step]["loss"]
    assert past.grad_norm == logged(run)[past.step]["grad_norm"]


@pytest.mark.parametrize("step", [2, 5, STEPS])
def test_a_step_is_repeated_to_the_bit_from_the_nearest_checkpoint(run: Path, step: int) -> None:
    with untouched(run), onstep.rewind(run, step) as past:
        assert past.step == step
        assert past.plan.start_step == (step - 1) // 3 * 3
        check(past, run)


def test_next_continues_to_the_end_of_the_run(run: Path) -> None:
    with untouched(run), onstep.rewind(run, STEPS - 1) as past:
        assert past.next().step == STEPS
        check(past, run)
        assert past.comparison.steps == [STEPS - 1]
        with pytest.raises(ConfigError, match=f"no step after {STEPS}"):
            past.next()


def test_what_killed_rewinds_have_left_is_removed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as gone:
        pass
    left = [tmp_path / f"onstep-rewind-{socket.gethostname()}-{pid}-x" for pid in (gone.pid, os.getppid())]
    for one in left:
        one.mkdir()
    with onstep.rewind(run, 1):
        assert len(list(tmp_path.glob(f"onstep-rewind-*-{os.getpid()}-*"))) == 1
    assert list(tmp_path.iterdir()) == left[1:]


def test_gradients_are_those_that_the_update_applies(run: Path) -> None:
    with onstep.rewind(run, 5) as past:
        before = {name: one.detach().clone() for name, one in past.model.named_parameters()}
        assert past.gradients.keys() == before.keys()
        past.finish_step()
        assert past.is_finished
        assert all(not one.equal(before[name]) for name, one in past.model.named_parameters())


def test_the_loss_that_is_computed_again_has_the_gradients_of_the_step(run: Path) -> None:
    with onstep.rewind(run, 5) as past:
        named = dict(unwrap(past.model).named_parameters())
        again = torch.autograd.grad(past.forward(), list(named.values()))
        clipped = torch.stack([one.norm() for one in past.gradients.values()]).norm() / past.grad_norm
        for name, one in zip(named, again, strict=True):
            torch.testing.assert_close(one * clipped, past.gradients[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset__num_workers": 2},
        {"dataset__reset_attention_mask": True},
        {"model__num_moe_experts": 4, "model__moe_aux_loss_coeff": 0.01},
        {"anomaly__on_spike": "rollback"},
    ],
    ids=["workers", "packing", "experts", "spikes"],
)
def test_features_are_repeated_too(changes: dict[str, Any], corpus: Path, token_cache: Path, tmp_path: Path) -> None:
    pretrain(run_config(corpus, token_cache, tmp_path, **changes))
    run = tmp_path / "x"
    with untouched(run), onstep.rewind(run, 6) as past:
        check(past, run)


@pytest.mark.parametrize("step", [0, -1, STEPS + 1])
def test_a_step_that_the_run_does_not_have_is_refused(run: Path, step: int) -> None:
    with pytest.raises(ConfigError, match=f"step={step} "), onstep.rewind(run, step):
        pass


def test_a_changed_corpus_is_refused_by_name(corpus: Path, token_cache: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(path.read_bytes() for path in sorted(corpus.rglob("*")) if path.is_file()))
    pretrain(run_config(text, token_cache, tmp_path / "runs"))
    text.write_bytes(text.read_bytes() + b"more")
    run = tmp_path / "runs" / "x"
    with untouched(run), pytest.raises(DataError, match=r"text.txt was changed. Restore"), onstep.rewind(run, 5):
        pass


def test_averages_of_other_sites_are_named_as_what_is_not_repeated(run: Path) -> None:
    plan = plan_rewind(run, 5)
    synchronised = [{**one, "diloco/sync_count": 1} for one in plan.records]
    assert "DiLoCo" not in " ".join(Comparison(plan).causes)
    assert "DiLoCo" in " ".join(Comparison(replace(plan, records=synchronised)).causes)


def test_an_error_in_the_block_is_raised_and_ends_the_rewind(run: Path) -> None:
    with untouched(run), pytest.raises(KeyError, match="mine"), onstep.rewind(run, 4):
        raise KeyError("mine")
    with onstep.rewind(run, 4) as past:
        check(past, run)
