"""The engine that runs a step: which one a job gets, and what features may ask of it."""

from __future__ import annotations

import pytest
import torch

from onstep.errors import ConfigError
from onstep.training.compute.loss_sums import StepLoss
from onstep.training.compute.losses import MicroLoss
from onstep.training.compute.step import Step
from onstep.training.engines import engine_of
from onstep.training.engines.engine import check_needs
from onstep.training.engines.loop_engine import LoopEngine
from onstep.training.feature import Feature
from onstep.training.stages.job import Job
from tests.support.small_runs import RaggedRows, TinyModel, loader, small_state, split, sum_step


class Greedy(Feature[Job]):
    """A feature that runs steps twice."""

    name = "greedy"
    when = "always, in this test"
    needs_of_engine = ("replay",)


class Bare:
    """An engine that gives nothing beyond gradients."""

    name = "the schedule 1F1B"
    gives = frozenset[str]()

    def compute(self, step: Step) -> None:
        raise NotImplementedError


def job_of(*features: type[Feature[Job]]) -> Job:
    model, state = TinyModel(), small_state(train_iters=1)
    made = Job.of(state, sum_step, [model], torch.optim.SGD(model.parameters(), lr=0.1), None, loader())
    state.features.build(features, made, state.world)
    return made


def test_a_whole_model_is_run_by_a_loop_which_gives_all_that_features_need() -> None:
    assert isinstance(engine_of(job_of(Greedy)), LoopEngine)


def test_a_feature_is_refused_by_its_name_if_the_engine_does_not_give_what_it_needs() -> None:
    refusal = (
        r"the feature greedy requires steps that can be run again, which the schedule 1F1B does not have; .*this test"
    )
    with pytest.raises(ConfigError, match=refusal):
        check_needs(job_of(Greedy), Bare())  # type: ignore[arg-type]
    check_needs(job_of(), Bare())  # type: ignore[arg-type]


def test_a_rank_without_losses_knows_the_loss_and_the_labels_of_its_samples_once_they_are_shared() -> None:
    step = Step(1, split(RaggedRows(4), [2, 2]))
    step.total = StepLoss(torch.tensor(9.0), 3, 3, own=(torch.tensor(8.0), 4, 4))
    assert step.loss.item() == 2
    assert step.tokens is not None
    assert step.tokens.item() == 4


def test_a_rank_with_losses_counts_its_own() -> None:
    step = Step(1, split(RaggedRows(4), [2, 2]), [MicroLoss(torch.tensor(6.0), 2, "sum", {}, 2)])
    step.total = StepLoss(torch.tensor(9.0), 3, 3, own=(torch.tensor(8.0), 4, 4))
    assert step.loss.item() == 3
