"""What follows when a user changes one value of a recipe: its warm-up and intervals, rates and sequence lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep import pretrain
from onstep.cli.config import configuration
from onstep.config import ConfigContainer, dump_yaml, resolve
from onstep.errors import ConfigError
from onstep.recipes import get_recipe

KEYS = ("scheduler.lr_warmup_iters", "logger.log_interval", "validation.eval_interval")


def values(*words: str) -> tuple[int, int, int]:
    config, _ = configuration([*words], None)
    return config.scheduler.lr_warmup_iters, config.logger.log_interval, config.validation.eval_interval


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (1500, (75, 25, 250)),
        (300, (75, 25, 250)),
        (299, (14, 25, 250)),
        (50, (2, 5, 25)),
        (8, (0, 1, 4)),
        (1, (0, 1, 1)),
    ],
)
def test_a_recipes_values_are_scaled_to_a_short_run(
    steps: int, expected: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert values(f"train.train_iters={steps}") == expected
    note = capsys.readouterr().err
    assert bool(note) is (steps < 300)
    assert len(note.splitlines()) == int(steps < 300)  # whole in a file; `in_words` breaks it on a terminal
    assert [key for key in KEYS if key in note] == [
        key for key, one, own in zip(KEYS, expected, (75, 25, 250), strict=True) if one != own
    ]


def test_what_the_user_has_given_is_kept_and_named_if_it_does_not_fit(tmp_path: Path) -> None:
    given = ("scheduler.lr_warmup_iters=40", "logger.log_interval=25", "validation.eval_interval=250")
    assert values("train.train_iters=50", *given) == (40, 25, 250)
    file = tmp_path / "mine.yaml"
    file.write_text("logger: {log_interval: 25}\nvalidation.eval_interval: 250\n")
    assert values(str(file), "train.train_iters=50") == (2, 25, 250)
    for warmup in (50, 75):
        with pytest.raises(
            ConfigError, match=rf"lr_warmup_iters={warmup} must be less than train.train_iters=50.*drop"
        ):
            values("train.train_iters=50", f"scheduler.lr_warmup_iters={warmup}")


@pytest.mark.parametrize("word", ["train.train_iters=50", "optimizer.lr=1e-5"])
def test_quiet_says_nothing(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    values(word, "logger.console=quiet")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("steps", [0, -1])
def test_a_run_without_steps_is_not_scaled(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert values(f"train.train_iters={steps}") == (75, 25, 250)
    assert capsys.readouterr().err == ""


def test_one_step_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    values("train.train_iters=1")
    assert capsys.readouterr().err.startswith("scaled to a run of 1 step: ")


@pytest.mark.parametrize(
    ("recipe", "lr", "expected"),
    [("tiny_gpt", 1e-5, 1e-6), ("tiny_gpt_finetune", 3e-6, 3e-7), ("tiny_gpt", 3e-4, 3e-4)],
)
def test_the_final_rate_keeps_its_share_of_a_lower_peak(
    recipe: str, lr: float, expected: float, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = configuration([f"optimizer.lr={lr}"], recipe)
    assert config.optimizer.min_lr == expected
    note = " ".join(capsys.readouterr().err.split())
    assert note.startswith(f"optimizer.min_lr={expected} (not ") or (not note and lr == expected == 3e-4)
    assert note == "" or note.endswith(f"the recipe's share of optimizer.lr={lr}; set it to choose another")


def test_the_peak_of_a_file_counts_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("optimizer: {lr: 1e-5}\n")
    assert resolve(configuration([str(file)], "tiny_gpt")[0], 1).optimizer.min_lr == 1e-6


@pytest.mark.parametrize("min_lr", [3e-4, 1e-4])
def test_a_final_rate_of_the_user_above_the_peak_is_refused(min_lr: float) -> None:
    with pytest.raises(ConfigError, match=rf"min_lr={min_lr} must be at most optimizer.lr=1e-05; lower it"):
        resolve(configuration(["optimizer.lr=1e-5", f"optimizer.min_lr={min_lr}"], "tiny_gpt")[0], 1)


@pytest.mark.parametrize("key", ["model.seq_length", "dataset.seq_length"])
@pytest.mark.parametrize("in_file", [False, True])
def test_one_length_follows_the_other(key: str, in_file: bool, tmp_path: Path) -> None:
    words = [f"{key}=64"]
    if in_file:
        (tmp_path / "config.yaml").write_text(f"{key}: 64\n")
        words = [str(tmp_path / "config.yaml")]
    config, _ = configuration(words, None)
    assert (config.model.seq_length, config.dataset.seq_length) == (64, 64)


def test_a_word_wins_over_a_whole_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_yaml(get_recipe("tiny_gpt")()))
    config, _ = configuration([str(tmp_path / "config.yaml"), "model.seq_length=64"], None)
    assert (config.model.seq_length, config.dataset.seq_length) == (64, 64)


@pytest.mark.parametrize("section", ["model", "dataset"])
def test_an_attribute_is_followed_too(tiny_config: ConfigContainer, section: str) -> None:
    default = ConfigContainer()
    tiny_config.model.seq_length = tiny_config.dataset.seq_length = default.model.seq_length
    getattr(tiny_config, section).seq_length = 16
    tiny_config.run.recipe = None
    state = pretrain(tiny_config)
    assert (state.cfg.model.seq_length, state.cfg.dataset.seq_length) == (16, 16)
