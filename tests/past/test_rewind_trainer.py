"""A run of a Trainer is rewound with its script, or by the Trainer itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep import Trainer, TrainerCallback, TrainingArguments
from onstep.cli.main import main
from onstep.errors import ConfigError, DataError
from tests.support.past_runs import content_of

STEPS = 9
SCRIPT = """
import sys
from pathlib import Path
from tests.past.test_rewind_trainer import make

print("the script begins")
trainer = make(Path(sys.argv[1]), **eval(sys.argv[2]))
Path(trainer.args.output_dir).mkdir(exist_ok=True)
(Path(trainer.args.output_dir) / "notes.txt").write_text("of the script")
try:
    trainer.train()
except Exception:
    pass
print("the script goes on")
Path(sys.argv[1]).with_name("after.txt").write_text("after training")
"""


class Net(nn.Module):
    """Classifies vectors; with `num_items_in_batch`, its loss is a share of the step's."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.body(x), labels)}


class NormedNet(Net):
    """Normalises by the statistics of the batch, which a sample alone does not have."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__(width, dropout)
        self.body.insert(1, nn.BatchNorm1d(width))


class SharesNet(Net):
    def forward(  # type: ignore[override]
        self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(self.body(x), labels, reduction="sum")
        return {"loss": loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)}


class OwnStep(Trainer):
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return super().training_step(model, inputs, num_items_in_batch)


def rows(count: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    labels = x[:, :3].argmax(1)
    return [{"x": x[at], "labels": int(labels[at]), "text": f"row {at}"} for at in range(count)]


def make(
    output_dir: Path,
    kind: type[Trainer] = Trainer,
    net: type[Net] = Net,
    *,
    width: int = 8,
    dropout: float = 0.1,
    data: list[dict[str, Any]] | None = None,
    callbacks: Any = None,
    **arguments: Any,
) -> Trainer:
    torch.manual_seed(3)
    given = {"max_steps": STEPS, "logging_steps": 1, "save_steps": 4, "learning_rate": 1e-2, "report_to": "none"}
    given |= {"per_device_train_batch_size": 4, "save_total_limit": 5, "disable_tqdm": True, **arguments}
    args = TrainingArguments(output_dir=str(output_dir), **given)
    data = rows() if data is None else data
    return kind(model=net(width, dropout), args=args, train_dataset=data, callbacks=callbacks)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("trainer") / "out"
    make(output_dir).train()
    return output_dir


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def rewind(capsys: pytest.CaptureFixture[str], run: Path, *words: object, **settings: Any) -> tuple[int, str, str]:
    """`onstep rewind RUN WORDS --script ...`, whose script has these settings."""
    capsys.readouterr()
    code = main(["rewind", str(run), *map(str, words), str(run), repr(settings)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_script_is_taken_over_where_it_would_train(
    run: Path, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content_of(run)
    code, out, err = rewind(capsys, run, 7, "--json", "--log", "params_norm", "--script", script)
    view = json.loads(out)
    assert (code, view["comparison"]["is_equal"], view["comparison"]["steps"]) == (0, True, [5, 6, 7])
    assert len(view["samples"]) == 4
    assert all(one["fields"]["text"] == f"row {one['index']}" for one in view["samples"])
    assert all(one["fields"]["labels"] in "012" and one["grad_norm"] > 0 for one in view["samples"])
    assert list(view["log"]) == ["5", "6", "7"]
    assert [one["name"] for one in view["layers"]] == ["body.0", "body.3"]
    assert "the script begins" in err
    assert "the script goes on" not in err + out
    assert content_of(run) == before
    assert sorted(path.name for path in run.parent.iterdir()) == ["out"]


def test_a_step_is_found_by_a_condition_with_a_script(
    run: Path, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = rewind(capsys, run, "--when", "num_zeros >= 0", "--from", 3, "--script", script)
    assert (code, "first at step 3" in err, "equal to the bit" in out) == (0, True, True)


@pytest.mark.parametrize(
    ("settings", "words", "message"),
    [
        ({"width": 9}, ["7"], "trained another model than this script makes"),
        ({"dropout": 0.2}, ["7"], "trained another model than this script makes"),
        ({"data": rows(41)}, ["7"], "trained on other data than this script gives"),
        ({}, [str(STEPS + 1)], f"choose 1 to {STEPS}"),
    ],
)
def test_what_does_not_fit_the_run_is_one_line(
    run: Path, script: Path, capsys: pytest.CaptureFixture[str], settings: Any, words: list[str], message: str
) -> None:
    path = script
    if "data" in settings:
        path.write_text(
            SCRIPT.replace("import make", "import make, rows").replace("**eval(sys.argv[2])", "data=rows(41)")
        )
        settings = {}
    code, _, err = rewind(capsys, run, *words, "--script", path, **settings)
    assert code != 0
    assert [line for line in err.splitlines() if message in line] == [err.splitlines()[-1]]


def test_a_script_that_is_missing_or_does_not_train_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "idle.py"
    assert "idle.py: the file does not exist" in rewind(capsys, run, 7, "--script", path)[2]
    path.write_text("x = 1")
    assert "ended without Trainer.train()" in rewind(capsys, run, 7, f"--script={path}")[2]
    assert main(["rewind", str(run), "7"]) != 0
    assert "--script train.py [ARGS]" in capsys.readouterr().err
    assert main(["fork", f"{run}@4", "--script", "train.py"]) != 0
    assert "copy the checkpoint into another output_dir" in capsys.readouterr().err


class Counting(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.steps.append(state.global_step)
        Path(args.output_dir, "mine.txt").write_text("of a callback")


def test_a_trainer_rewinds_its_own_run_and_is_as_before(tmp_path: Path) -> None:
    trainer = make(tmp_path / "out", callbacks=[Counting()])
    trainer.train()
    before, weights = content_of(tmp_path), [one.clone() for one in trainer.model.parameters()]
    attributes, counting = dict(vars(trainer)), Counting()
    with trainer.rewind(6, callbacks=[counting]) as past:
        assert float(past.forward().detach()) == past.loss
        assert past.next().step == 7
        assert past.comparison.is_equal
    assert counting.steps == [5, 6]
    assert content_of(tmp_path) == before
    assert vars(trainer) == attributes
    assert all(torch.equal(one, old) for one, old in zip(trainer.model.parameters(), weights, strict=True))
    with (
        pytest.raises(ConfigError, match="initial weights have changed"),
        trainer.rewind(2),
    ):
        pass
    trainer.train_dataset = rows(seed=1)
    with pytest.raises(DataError, match="other data"), trainer.rewind(6):
        pass


@pytest.mark.parametrize("kind", [Trainer, OwnStep])
@pytest.mark.parametrize("net", [Net, SharesNet])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_samples_of_a_step_give_its_loss_and_its_gradient(
    tmp_path: Path, kind: type[Trainer], net: type[Net], accumulation: int
) -> None:
    trainer = make(tmp_path / "out", kind, net, dropout=0, gradient_accumulation_steps=accumulation, max_steps=5)
    trainer.train()
    with make(tmp_path / "out", kind, net, dropout=0, gradient_accumulation_steps=accumulation).rewind(3) as past:
        gradients = {name: one.clone() for name, one in past.gradients.items()}
        samples = past.samples()
        assert all(torch.equal(one, gradients[name]) for name, one in past.gradients.items())
        assert len(samples) == 4 * accumulation
        assert sum(one.share for one in samples) == pytest.approx(1)
        assert sum(one.grad_share or 0 for one in samples) == pytest.approx(1)
        assert sum(one.loss for one in samples) / len(samples) == pytest.approx(past.loss)
        past.next()
        assert past.comparison.is_equal


def test_samples_of_a_model_with_batch_norms_are_measured(tmp_path: Path) -> None:
    make(tmp_path / "out", net=NormedNet).train()
    with make(tmp_path / "out", net=NormedNet).rewind(6) as past:
        buffers = {name: one.clone() for name, one in past.model.named_buffers()}
        samples = past.samples()
        torch.autograd.grad(past.forward(), list(past.model.parameters()))
        assert all(torch.equal(one, buffers[name]) for name, one in past.model.named_buffers())
        assert len(samples) == 4
        assert all(one.grad_norm for one in samples)
        assert any("batch norms" in one for one in past.warnings)
        past.next()
        assert past.comparison.is_equal
