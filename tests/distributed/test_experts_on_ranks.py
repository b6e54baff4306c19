"""Experts on two gloo ranks: gradients, biases, experts without tokens, a router that collapses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes
from tests.support.whole_runs import Ranks

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.expert_jobs"


@pytest.fixture(scope="module")
def runs(processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Ranks:
    return Ranks(processes, tmp_path_factory.mktemp("runs"), JOBS, corpus=str(corpus), cache=str(token_cache))


def results(runs: Ranks, name: str, job: str, ranks: int = 2, **settings: Any) -> list[dict[str, Any]]:
    """What each rank wrote, in rank order."""
    codes = runs.start(name, job, ranks=ranks, **settings)
    assert codes == [0] * ranks, runs.output(name)
    return [json.loads((runs.directory / name / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(("sizes", "recompute"), [([4], None), ([2, 2], "full")])
def test_the_gradient_is_that_of_the_mean_over_micro_batches_and_ranks(
    sizes: list[int], recompute: str | None, runs: Ranks
) -> None:
    options = {"sizes": sizes, "recompute": recompute, "grouped": True, "starved": False}
    first, second = results(runs, f"gradient-{recompute}", "gradient", **options)
    assert first["error"] < 1e-3 * first["scale"]
    assert second["error"] < 1e-3 * second["scale"]
    for layer in range(2):
        both = [a + b for a, b in zip(first["local"][layer], second["local"][layer], strict=True)]
        assert first["loads"][layer] == second["loads"][layer] == both
        assert sum(both) == 8 * 12 * 2
        mean = sum(both) / 4
        signs = [(mean > one) - (mean < one) for one in both]
        assert first["bias"][layer] == second["bias"][layer] == pytest.approx([1e-3 * sign for sign in signs])


@pytest.mark.parametrize("grouped", [True, False])
def test_experts_without_tokens_neither_hang_nor_differ(grouped: bool, runs: Ranks) -> None:
    options = {"sizes": [2, 2], "recompute": None, "grouped": grouped, "starved": True}
    first, second = results(runs, f"starved-{grouped}", "gradient", **options)
    assert first["norm"] == second["norm"] > 0
    assert first["unused"] == 0
    assert second["local"][0][2] == 0 < first["local"][0][2]


def test_a_router_that_collapses_is_flagged_on_two_ranks_with_the_numbers_of_one(
    runs: Ranks,
) -> None:
    first, second = results(runs, "two", "collapse")
    alone = results(runs, "one", "collapse", ranks=1)[0]
    assert first["warnings"] == alone["warnings"]
    assert second["warnings"] == []
    assert len(first["warnings"]) == 1
    assert "the router of layer_2 has collapsed" in first["warnings"][0]
    logged = [record for record in first["records"] if "moe/collapsed_layers" in record]
    assert [record["moe/collapsed_layers"] for record in logged] == [1, 1]
    assert logged[0]["moe/layer_2/dead_experts"] == 2
    expected = [record for record in alone["records"] if "moe/collapsed_layers" in record]
    for found, one in zip(logged, expected, strict=True):
        for name in one:
            if name.startswith("moe/") or name in ("loss", "load_balancing_loss", "mtp_1 loss"):
                assert found[name] == pytest.approx(one[name], rel=2e-2), name  # near ties may go the other way
