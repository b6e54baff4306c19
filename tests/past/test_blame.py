"""Dropping a sample of a step shows what the next losses would have been without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import onstep
from onstep import pretrain
from onstep.errors import ConfigError
from onstep.past.blame import drop_each
from tests.support.past_runs import STEPS, content_of, run_config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__micro_batch_size": 1},
        pytest.param({"dataset__num_workers": 2, "optimizer__clip_grad": 0.0}, marks=pytest.mark.slow),
        {"model__num_moe_experts": 4, "model__moe_aux_loss_coeff": 0.01},
        {"anomaly__on_spike": "skip", "optimizer__optimizer": "sgd"},
    ],
    ids=["micro-batches", "rows", "workers", "experts", "spikes"],
)
def test_with_all_samples_the_next_losses_are_those_that_were(
    changes: dict[str, Any], corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    pretrain(run_config(corpus, token_cache, tmp_path, **changes))
    before = content_of(tmp_path / "x")
    with onstep.rewind(tmp_path / "x", 5) as past:
        ids = [one for micro in past.current.sample_ids or [] for one in micro]
        found = drop_each(past, 2)
    assert found.repeated == found.happened
    assert len(found.happened) == 2
    assert sorted(one.index for one in found.dropped if one.index is not None) == sorted(ids)
    assert all(one.losses != found.happened for one in found.dropped)
    assert [one.mean for one in found.dropped] == sorted(one.mean for one in found.dropped)
    assert content_of(tmp_path / "x") == before


def test_a_dropped_sample_is_one_that_the_step_did_not_train_on(run: Path) -> None:
    """The gradient of the other samples is computed here by hand."""
    from onstep.past import blame

    updates = []
    with onstep.rewind(run, 5) as past:
        model, job = past.model, past.job
        weights = {name: one.detach().clone() for name, one in model.named_parameters()}
        batches = blame._without(past.current.batches, 1, 0)
        gradients: dict[str, Any] = dict.fromkeys(weights, 0.0)
        model.eval()
        for batch in batches.micro_batches:
            labels = batch["labels"]
            model.zero_grad()
            model(batch["tokens"], labels, reduction="sum").backward()
            for name, one in model.named_parameters():
                gradients[name] = gradients[name] + one.grad
        rows = [one for batch in past.current.micro_batches for one in batch["tokens"].split(1)]
        labels_of = [one for batch in past.current.micro_batches for one in batch["labels"].split(1)]
        model.zero_grad()
        for number in (0, 1, 3):  # micro-batch 1, row 0 is left out
            model(rows[number], labels_of[number], reduction="sum").backward()
        for name, one in model.named_parameters():
            updates.append((gradients[name] - one.grad).abs().max() / one.grad.abs().max())
        assert job.run.train_state.step == 4
    assert max(updates) < 1e-4


def test_more_steps_than_the_run_has_are_those_that_it_has(run: Path) -> None:
    with onstep.rewind(run, STEPS - 1) as past:
        assert len(drop_each(past, 10).happened) == 1
    with onstep.rewind(run, STEPS) as past, pytest.raises(ConfigError, match="no step follows"):
        drop_each(past, 3)


def counted(chunks: list[Any]) -> list[Any]:
    """Let the output of a model depend on the number of its forward passes, as a running statistic does."""
    chunks[0].register_buffer("passes", torch.zeros(()))

    def count(module: Any, inputs: Any, output: Any) -> Any:
        module.passes += 1
        return output * (1 + 0.01 * module.passes.clone())

    chunks[0].register_forward_hook(count)
    return chunks


def test_buffers_are_those_from_before_the_step(corpus: Path, token_cache: Path, tmp_path: Path) -> None:
    changes = {"validation__eval_interval": None, "validation__eval_iters": 0, "run__save_weights": False}
    pretrain(run_config(corpus, token_cache, tmp_path, **changes), pre_wrap_hooks=[counted])
    with onstep.rewind(tmp_path / "x", 5, pre_wrap_hooks=[counted]) as past:
        found = drop_each(past, 2)
    assert found.repeated == found.happened
