"""The page of layouts says what its cells come to: some are run again, and what it says is refused is refused so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from layout_names import LAYOUTS, PAGE, VARIANTS
from layout_page import COLUMNS, EVALUATION, LOSS, ROWS, SAME, TOKENS, read
from layout_rows import config_of, model_of
from onstep import Trainer, TrainingArguments
from onstep.config.checks.validation import validate
from onstep.distributed import World
from onstep.errors import ConfigError
from onstep.trainer.shard_checks import check_shards
from onstep.training.setup.model_and_data import cut_into_stages
from tests.distributed.test_tensor_layouts import compare
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

PAGE_FILE = Path(__file__).parents[2] / "docs/guide/layouts.md"
"""Written by `python benchmarks/layouts.py --page docs/guide/layouts.md --steps 6`."""
FOUND = read(PAGE_FILE)
DOORS = {variant: VARIANTS[variant].door for variant in PAGE}


def refusal(layout: str, variant: str, monkeypatch: pytest.MonkeyPatch, place: Path) -> str | None:
    """What a run would say on all ranks, before any has met another."""
    config, ranks = config_of(LAYOUTS[layout], VARIANTS[variant], 4), LAYOUTS[layout].ranks
    try:
        if DOORS[variant] == "pretrain":
            validate(config, ranks)
        elif DOORS[variant] == "train" and config.parallel.pipeline_model_parallel_size > 1:
            world = World(size=ranks, sizes=config.parallel_sizes(ranks))
            cut_into_stages([model_of(VARIANTS[variant], config)], config, world)
        elif DOORS[variant] == "Trainer":
            trainer = Trainer(
                model_of(VARIANTS[variant], config), TrainingArguments(output_dir=str(place), use_cpu=True)
            )
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
            check_shards(trainer, config)
    except ConfigError as error:
        return str(error)
    return None


def test_the_page_has_a_cell_of_every_layout_and_feature_and_none_is_far_from_one_process() -> None:
    assert set(FOUND) == {(layout, variant) for layout in ROWS.values() for variant in PAGE}
    assert {variant for variant, _ in COLUMNS.values()} == set(PAGE)
    for cell, found in FOUND.items():
        if found.refusal is None:
            near = [found.figures[kind] for kind in (LOSS, EVALUATION) if kind in found.figures]
            assert all(float(figure) <= 1e-5 for figure in near), cell
            assert found.figures.get(TOKENS, SAME) == SAME, cell


@pytest.mark.parametrize("variant", [one for one in PAGE if DOORS[one] != "Trainer"])
def test_what_the_page_says_is_refused_is_refused_with_its_words_and_nothing_else_is(
    variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = {layout: FOUND[layout, variant].refusal for layout in ROWS.values()}
    assert {layout: refusal(layout, variant, monkeypatch, tmp_path) for layout in said} == said


def test_a_trainer_refuses_what_the_page_says_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It says `config_overrides['ddp.x']=True` for `ddp.x=true`, as its arguments do."""
    written = re.compile(r"config_overrides\['(.+?)'\]")
    for layout in ROWS.values():
        words = FOUND[layout, "a Trainer"].refusal
        with monkeypatch.context() as patch:
            assert refusal(layout, "a Trainer", patch, tmp_path) == (
                words and written.sub(r"\1", words).replace("=True", "=true")
            ), layout


def ran(layout: str) -> list[tuple[str, str]]:
    """The cells of a layout that are not refused."""
    return [(layout, variant) for variant in PAGE if FOUND[layout, variant].refusal is None]


def test_a_cell_is_what_it_was(processes: Processes, tmp_path: Path) -> None:
    """A recipe with packed documents and tied embeddings, evaluations and generated tokens, on combined layouts."""
    compare(processes, tmp_path, [("tp2 x pp2", "recipe")], 4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ROWS.values(), ids=ROWS)
def test_each_cell_is_as_one_process(processes: Processes, tmp_path: Path, layout: str) -> None:
    compare(processes, tmp_path, ran(layout), 6)
