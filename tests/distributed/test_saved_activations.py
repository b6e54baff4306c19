"""The bytes that passes save on each rank, counted by hooks, are those of the theory: divided, and in flight."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from onstep.config import ParallelConfig
from onstep.config.pipelines import SCHEDULES, stages_of_rank
from tests.support.forked_processes import Processes
from tests.support.schedule_orders import FORWARD, FULL, INPUT, WEIGHT, most_at_once, orders_of

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.saved_jobs"
TENSORS, SEQUENCES = "parallel.tensor_model_parallel_size", "parallel.sequence_parallel=true"
TOKENS, LAYERS, WIDTH = 64, 3, 64
"""Of the micro-batch and of the model that tensor-parallel ranks divide."""
EMBEDDING = 8 + 1
"""Bytes of a token's row of a divided embedding, and of whether it is another rank's."""
NORM, OPERAND = 2 * 4 * WIDTH + 4, 4 * WIDTH
"""Bytes of a token in a norm, with its statistics, and in what products have as their input."""
DIVIDED = (f"{TENSORS}=2", SEQUENCES)
SHORT = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_activations_are_divided_between_tensor_parallel_ranks(
    processes: Processes, tmp_path: Path, ranks: int
) -> None:
    """All of them with sequence parallelism; without, norms and the inputs of divided products are whole."""
    [alone] = processes.results(JOBS, "of_tensors", tmp_path / "one", {"keys": [[]], "ranks": 1}, ranks=1)
    settings = {"keys": [[f"{TENSORS}={ranks}"], [f"{TENSORS}={ranks}", SEQUENCES]], "ranks": ranks}
    whole = TOKENS * (LAYERS * (2 * NORM + 2 * OPERAND) + NORM + OPERAND)
    saved = alone[0]["saved"] - 4  # of a mean
    for found in processes.results(JOBS, "of_tensors", tmp_path, settings, ranks=ranks):
        without, divided = (one["saved"] - EMBEDDING * TOKENS for one in found)
        assert divided == saved / ranks
        assert without == whole + (saved - whole) / ranks
        assert all(one["estimate"] == one["saved"] + 8 for one in found)  # of a mean, and of a loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ["mixed_precision=bf16_mixed"],
        ["model.num_query_groups=2", "model.qk_layernorm=true"],
        ["model.normalization=LayerNorm", "model.gated_linear_unit=false", "model.add_qkv_bias=true"],
        ["model.share_embeddings_and_output_weights=true", "optimizer.params_dtype=bfloat16"],
    ],
)
def test_what_is_saved_is_what_is_estimated(processes: Processes, tmp_path: Path, keys: list[str]) -> None:
    settings = {"keys": [[f"{TENSORS}=2", *keys], [f"{TENSORS}=2", SEQUENCES, *keys]], "ranks": 2}
    for found in processes.results(JOBS, "of_tensors", tmp_path, settings):
        for one in found:
            assert one["estimate"] == pytest.approx(one["saved"], abs=8), found


def rows_of(name: str, ranks: int, *keys: str) -> tuple[str, ...]:
    virtual = ["parallel.virtual_pipeline_model_parallel_size=2"] if SCHEDULES[name].chunks != "one" else []
    sizes = [f"parallel.pipeline_model_parallel_size={ranks}", f"parallel.pipeline_schedule={name}", *virtual]
    return (*sizes, "model.num_layers=8", "train.micro_batch_size=1", *keys)


def of_pass(each: dict[str, list[int]], last: int, kind: str, stage: int) -> int:
    """What a pass adds to the saved bytes: with the gradients of inputs, those of the loss are no longer needed."""
    whole, without_loss = each[str(stage)]
    if kind == FORWARD:
        return whole
    if kind == FULL:
        return -whole
    of_loss = whole - without_loss if stage == last else 0
    return -of_loss if kind == INPUT else of_loss - whole if kind == WEIGHT else 0


@pytest.mark.parametrize(
    ("ranks", "names", "keys"),
    [
        (2, SHORT, ()),
        pytest.param(2, tuple(SCHEDULES), DIVIDED, marks=pytest.mark.slow),
        pytest.param(4, tuple(SCHEDULES), (), marks=pytest.mark.slow),
    ],
)
def test_a_rank_saves_the_passes_that_its_schedule_has_in_flight(
    processes: Processes, tmp_path: Path, ranks: int, names: tuple[str, ...], keys: tuple[str, ...]
) -> None:
    rows = [rows_of(name, ranks, *keys) for name in names]
    number = ranks * (2 if keys else 1)
    found = processes.results(JOBS, "of_stages", tmp_path, {"rows": rows, "ranks": number}, ranks=number)
    for index, name in enumerate(names):
        virtual = 1 if SCHEDULES[name].chunks == "one" else 2
        own = stages_of_rank(
            ParallelConfig(
                pipeline_model_parallel_size=ranks, pipeline_schedule=name, virtual_pipeline_model_parallel_size=virtual
            ),
            0,
        )
        orders = orders_of(name, ranks, 12, own)
        for rank in range(number):
            row = found[rank][index]
            expected = most_at_once(orders[rank * ranks // number], partial(of_pass, row["each"], ranks * virtual - 1))
            assert (row["peak"], row["left"]) == (expected, 0), (name, rank, row)
