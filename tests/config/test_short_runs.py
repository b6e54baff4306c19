"""A recipe's warm-up and intervals in a run that is shorter than the recipe's; the user's own values are kept."""

from __future__ import annotations

import pytest

from onstep.cli.config import configuration
from onstep.errors import ConfigError

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


def test_what_the_user_has_given_is_kept_and_named_if_it_does_not_fit(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    given = ("scheduler.lr_warmup_iters=40", "logger.log_interval=25", "validation.eval_interval=250")
    assert values("train.train_iters=50", *given) == (40, 25, 250)
    file = tmp_path / "mine.yaml"
    file.write_text("logger: {log_interval: 25}\nvalidation.eval_interval: 250\n")
    assert values(str(file), "train.train_iters=50") == (2, 25, 250)
    capsys.readouterr()
    for warmup in (50, 75):
        with pytest.raises(
            ConfigError, match=rf"lr_warmup_iters={warmup} must be less than train.train_iters=50.*drop"
        ):
            values("train.train_iters=50", f"scheduler.lr_warmup_iters={warmup}")


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    values("train.train_iters=50", "logger.console=quiet")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("steps", [0, -1])
def test_a_run_without_steps_is_not_scaled(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert values(f"train.train_iters={steps}") == (75, 25, 250)
    assert capsys.readouterr().err == ""


def test_one_step_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    values("train.train_iters=1")
    assert capsys.readouterr().err.startswith("scaled to a run of 1 step: ")
