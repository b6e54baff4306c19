"""Ways to call a tensor-parallel model: documents, positions, caches, hidden states, a value head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_pipelines import JOBS as OF_ROWS
from tests.distributed.test_pipelines import alone, results
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.tensor_call_jobs"
IN_TWO, SEQUENCES = "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"
EXPERTS = ["model.num_moe_experts=4", "model.moe_shared_expert_intermediate_size=64"]
BIASES = ["model.add_qkv_bias=true", "model.add_bias_linear=true", "model.normalization=LayerNorm"]
COMPILED = ["train.torch_compile=true", "train.torch_compile_backend=aot_eager"]
LEARNED = [*BIASES, "model.position_embedding_type=learned_absolute", "model.hidden_dropout=0.1"]


@pytest.mark.parametrize(
    "keys", [[], LEARNED, pytest.param(COMPILED, marks=pytest.mark.slow)], ids=["rotary", "learned", "compiled"]
)
def test_each_call_gives_what_one_process_gives_on_both_ranks(
    processes: Processes, tmp_path: Path, keys: list[str]
) -> None:
    [one] = processes.results(JOBS, "calls", tmp_path / "one", {"keys": keys, "ranks": 1}, ranks=1)
    assert one.pop("averaged") == []
    settings: dict[str, Any] = {"keys": [*keys, IN_TWO, SEQUENCES], "ranks": 2}
    for found in processes.results(JOBS, "calls", tmp_path / "two", settings, ranks=2):
        assert found.pop("refused") == (
            "parallel.sequence_parallel=true divides sequences between 2 ranks, but those of this batch have 7 "
            "positions; pad them to 8, or set it to false."
        )
        summed, divided = found.pop("averaged")
        assert "final_norm.weight.average_gradients_across_tp_domain is true, but each tensor-parallel rank" in summed
        assert "layers.0.attention.query.weight" in divided
        for name, (result, gradients) in one.items():
            assert found[name][0] == pytest.approx(result, rel=1e-6), name
            assert found[name][1] == pytest.approx(gradients, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize(
    "keys",
    [
        [SEQUENCES],
        pytest.param([], marks=pytest.mark.slow),
        pytest.param([SEQUENCES, "model.mtp_num_layers=1"], marks=pytest.mark.slow),
        pytest.param([SEQUENCES, "model.num_query_groups=1"], marks=pytest.mark.slow),
        pytest.param([SEQUENCES, *EXPERTS], marks=pytest.mark.slow),
        pytest.param([SEQUENCES, "model.recompute_granularity=full"], marks=pytest.mark.slow),
    ],
)
def test_a_rank_holds_the_weights_and_keeps_the_activations_that_are_estimated(
    processes: Processes, tmp_path: Path, keys: list[str]
) -> None:
    [found, _] = processes.results(JOBS, "memory", tmp_path, {"keys": [IN_TWO, *keys]}, ranks=2)
    assert found["weights"][0] == found["weights"][1]
    is_rough = any("moe" in key or "mtp" in key for key in keys)
    within = {"rel": 0.15} if is_rough else {"abs": 8}  # the loss itself
    assert found["activations"][0] == pytest.approx(found["activations"][1], **within)


WEIGHT = "the forward step or its loss computes with a weight of which each of 2 ranks has a part; "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "step", "said"),
    [
        ([IN_TWO], "penalized", f"the loss is a DTensor: {WEIGHT}use its whole value, weight.full_tensor(), on all"),
        ([IN_TWO], "product", f"got mixed torch.Tensor and DTensor: {WEIGHT}use its whole value, weight.full_tensor()"),
        ([IN_TWO, SEQUENCES], "hooked", "which compute one model: it reads a part that each rank has of a weight"),
        (["parallel.data_parallel_shard_size=2", "train.micro_batch_size=2"], "penalized", f"{WEIGHT}compute that par"),
    ],
)
def test_a_loss_that_computes_with_a_part_of_a_weight_is_refused_on_all_ranks(
    processes: Processes, tmp_path: Path, keys: list[str], step: str, said: str
) -> None:
    rows = [(keys, {"ranks": 2, "step": step})]
    assert 0 not in processes.run(OF_ROWS, "rows", tmp_path, {"rows": rows, "steps": 1}, ranks=2)
    for rank in range(2):
        last = [line for line in (tmp_path / f"rank-{rank}.out").read_text().splitlines() if "Error: " in line][-1]
        assert said in last


@pytest.mark.slow
def test_a_loss_of_whole_weights_is_that_of_one_process(processes: Processes, tmp_path: Path) -> None:
    options = {"ranks": 2, "step": "penalized whole", "dtype": "float64"}
    shared = "model.num_query_groups=1"
    rows = [([IN_TWO, *keys], options) for keys in ([], [SEQUENCES], [shared], [SEQUENCES, shared])]
    for ranks, one in zip(results(processes, tmp_path, rows, 3), alone(processes, tmp_path, rows, 3), strict=True):
        for found in ranks:
            assert found["losses"] == pytest.approx(one["losses"], rel=1e-12)
            assert found["norms"] == pytest.approx(one["norms"], rel=1e-12)


@pytest.mark.parametrize(
    ("keys", "ranks"), [([], 2), pytest.param(["parallel.data_parallel_shard_size=2"], 4, marks=pytest.mark.slow)]
)
def test_a_worker_of_diloco_exchanges_whole_weights(
    processes: Processes, tmp_path: Path, keys: list[str], ranks: int
) -> None:
    settings = {"keys": [IN_TWO, *keys], "ranks": ranks}
    for found in processes.results(JOBS, "exchanged", tmp_path, settings, ranks=ranks):
        assert found == [True, True, True]
