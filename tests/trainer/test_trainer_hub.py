"""Uploads to the Hub by the Trainer, with the real client on a Hub of the tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import CommitInfo, constants
from safetensors.torch import load

from onstep import Callback, CallbackContext, Trainer, TrainerCallback, TrainingArguments
from onstep.errors import ConfigError, HubError
from tests.support.hub_server import TOKEN, HubServer, hub_server, using
from tests.support.small_models import causal_rows, quiet, qwen

ROOT = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "README.md",
    "trainer_state.json",
    "training_args.json",
}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as hub, using(hub):
        yield hub


def pushing(directory: Path, **options: Any) -> TrainingArguments:
    """Six steps, saved every second one, to `me/model`; no save is skipped."""
    values: dict[str, Any] = {
        "output_dir": str(directory / "run"),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "save_steps": 2,
        "push_to_hub": True,
        "hub_model_id": "me/model",
        "hub_always_push": True,
    }
    return TrainingArguments(**{**values, **options})


def trained(directory: Path, *callbacks: object, kind: type[Trainer] = Trainer, **options: Any) -> Any:
    args = pushing(directory, **options)
    trainer = kind(qwen(), args, train_dataset=causal_rows(), default_callbacks=False, callbacks=list(callbacks))
    for one in callbacks:
        if isinstance(one, Settled):
            one.trainer = trainer
    trainer.train()
    return trainer


class Settled(TrainerCallback):
    """Lets every step begin after the upload before it."""

    trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer.push_in_progress.wait_until_done(30)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(6)[None]).logits
    return found


class Saved(Callback):
    """The files of each checkpoint as it is committed."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        directory = Path(str(context.checkpoint_path))
        self.files[directory.name] = {
            path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
        }


def below(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    return {path.removeprefix(f"{name}/"): content for path, content in files.items() if path.startswith(f"{name}/")}


_IN_PROGRESS = ["Training in progress, step 2", "Training in progress, step 4"]


@pytest.mark.parametrize(
    ("strategy", "messages", "directories"),
    [
        ("end", [], set()),
        ("every_save", _IN_PROGRESS, set()),
        ("checkpoint", _IN_PROGRESS, {"last-checkpoint"}),
        ("all_checkpoints", _IN_PROGRESS, {"checkpoint-2", "checkpoint-4"}),
    ],
)
def test_each_strategy_uploads_its_files(
    tmp_path: Path, hub: HubServer, strategy: str, messages: list[str], directories: set[str]
) -> None:
    saved = Saved()
    overrides = {"checkpoint.async_save": "checkpoint" in strategy}  # what is committed later is uploaded later
    trainer = trained(tmp_path, saved, hub_strategy=strategy, save_total_limit=1, config_overrides=overrides)
    assert hub.messages() == [*messages, "End of training"]
    files = hub.files()
    assert {path.partition("/")[0] for path in files} - {".gitattributes"} == ROOT | directories
    for name in directories:
        assert below(files, name) == saved.files["checkpoint-4" if name == "last-checkpoint" else name]
    first = hub.commits()[0].files
    assert not messages or load(first["model.safetensors"]).keys() == load(files["model.safetensors"]).keys()
    assert not messages or first["model.safetensors"] == saved.files["checkpoint-2"]["model.safetensors"]
    assert "checkpoint-2" not in os.listdir(tmp_path / "run")
    assert not list(tmp_path.rglob(".tmp-*"))

    loaded = transformers.AutoModelForCausalLM.from_pretrained(hub.download(tmp_path / "fetched"))
    assert torch.equal(logits(loaded), logits(trainer.model))


@pytest.mark.slow
def test_a_whole_checkpoint_of_the_hub_continues_a_run(tmp_path: Path, hub: HubServer) -> None:
    whole = trained(tmp_path, hub_strategy="all_checkpoints")
    checkpoint = hub.download(tmp_path / "fetched") / "checkpoint-2"
    continued = quiet(qwen(seed=1), pushing(tmp_path / "continued", push_to_hub=False), causal_rows())
    continued.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(logits(continued.model), logits(whole.model))


@pytest.mark.parametrize("answer", [500, *(pytest.param(one, marks=pytest.mark.slow) for one in (429, 401, None))])
def test_a_failed_upload_costs_a_warning_and_its_files_come_with_the_next_save(
    tmp_path: Path, hub: HubServer, answer: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = trained(tmp_path / "without", push_to_hub=False)
    fault = hub.fail("/commit/", answer, times=1)
    trainer = trained(tmp_path, Settled(), hub_strategy="all_checkpoints")
    assert fault.seen == 1
    assert hub.messages() == ["Training in progress, step 4", "End of training"]
    assert {"checkpoint-2", "checkpoint-4"} <= {path.partition("/")[0] for path in hub.commits()[0].files}
    [warning] = [one.getMessage() for one in caplog.records if "the commit to me/model failed" in one.getMessage()]
    assert warning.endswith("The run continues, and uploads again with the next save.")
    assert "\n" not in warning
    assert torch.equal(logits(trainer.model), logits(undisturbed.model))


class Slow(TrainerCallback):
    """Releases a request that the Hub holds only once training has done all its steps."""

    def __init__(self, hub: HubServer) -> None:
        self.hub, self.steps_meanwhile, self.directories = hub, 0, set[str]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            assert self.hub.arrived.wait(30)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps_meanwhile += self.hub.arrived.is_set()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.directories = {name for name in os.listdir(args.output_dir) if name.startswith("checkpoint-")}
        assert not self.hub.released.is_set()
        self.hub.released.set()


@pytest.mark.parametrize("always", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_and_saves_go_on_while_an_upload_hangs(
    tmp_path: Path, hub: HubServer, always: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hub.hold("/preupload/")
    saved, slow = Saved(), Slow(hub)
    options: dict[str, Any] = {
        "max_steps": 10,
        "save_total_limit": 1,
        "hub_always_push": always,
        "hub_strategy": "all_checkpoints",
    }
    trained(tmp_path, saved, slow, **options)
    assert slow.steps_meanwhile == 8
    assert slow.directories == {"checkpoint-10"}, "what is being uploaded is deleted like any other checkpoint"
    files = hub.files()
    assert below(files, "checkpoint-2") == saved.files["checkpoint-2"], "and is uploaded as it was"
    steps = (2, 4, 6, 8, 10) if always else (2,)
    assert hub.messages() == [*(f"Training in progress, step {step}" for step in steps), "End of training"]
    assert below(files, "checkpoint-10") == saved.files["checkpoint-10"], "a skipped save comes with the next upload"
    lost = {one.args[0].name for one in caplog.records if "deleted before it was uploaded" in one.msg}  # type: ignore[index, union-attr]
    assert lost == (set() if always else {"checkpoint-4", "checkpoint-6", "checkpoint-8"})


def test_a_token_that_is_missing_or_unknown_is_an_error_before_training(tmp_path: Path, hub: HubServer) -> None:
    with using(hub, token=None), pytest.raises(ConfigError) as missing:
        quiet(qwen(), pushing(tmp_path))
    assert str(missing.value) == (
        "the repository me/model cannot be created: HTTP 401, Invalid username or password; pass a token that may "
        "write there: hf auth login, HF_TOKEN, or hub_token."
    )
    with pytest.raises(ConfigError, match="HTTP 401") as unknown:
        quiet(qwen(), pushing(tmp_path, hub_token="hf_marked_but_wrong"))
    assert "hf_marked_but_wrong" not in str(unknown.value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE=1 forbids"):
            quiet(qwen(), pushing(tmp_path))
    assert not hub.repositories


def test_a_hub_that_cannot_be_reached_at_the_start_costs_a_warning(
    tmp_path: Path, hub: HubServer, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fail("/repos/create", None, times=1)
    trainer = quiet(qwen(), pushing(tmp_path, hub_model_id="model", hub_private_repo=True), causal_rows())
    assert trainer.hub_model_id is None
    assert any("cannot be created" in one.getMessage() for one in caplog.records)
    trainer.train()
    assert hub.messages() == [*_IN_PROGRESS, "End of training"]
    assert trainer.hub_model_id == "me/model"
    assert hub.private == {"me/model"}


def test_a_model_is_pushed_by_hand_with_its_card(tmp_path: Path, hub: HubServer) -> None:
    class Own(TrainerCallback):
        pushes = 0

        def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.pushes += 1

    own = Own()
    trainer = trained(tmp_path, own, push_to_hub=False, save_strategy="no")
    assert own.pushes == 0
    (tmp_path / "run" / "all_results.json").write_text("{}")
    trainer.model.model_tags = ["small"]
    told = trainer.push_to_hub("By hand", tags="mine", dataset="rows")
    assert isinstance(told, CommitInfo)
    assert (told.oid, trainer.hub_model_id, own.pushes) == (hub.commits()[-1].oid, "me/model", 1)
    files = hub.files()
    assert set(files) - {".gitattributes", "trainer_logs.json"} == {*ROOT, "all_results.json"}
    assert b"- mine\n- small\n" in files["README.md"]

    future = trainer.push_to_hub("In the background", blocking=False, revision="dev", language="en")
    trainer.push_in_progress.wait_until_done()
    assert future.result().oid == hub.commits(branch="dev")[-1].oid
    assert (hub.messages(), hub.messages(branch="dev")) == (["By hand"], ["In the background"])
    hub.fail("/commit/", 500)
    with pytest.raises(HubError, match=r"^the commit to me/model failed: HTTP 500, planted failure\.$"):
        trainer.push_to_hub(tags="other")


def test_a_saved_model_is_uploaded_to_the_branch(
    tmp_path: Path, hub: HubServer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trained(tmp_path, hub_strategy="end", hub_revision="trained")
    assert hub.messages(branch="trained") == ["End of training"]
    with torch.no_grad():
        trainer.model.lm_head.weight.zero_()
    trainer.save_model()
    assert hub.messages(branch="trained") == ["End of training", "Model save"]
    assert not hub.commits()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(hub.download(tmp_path / "fetched", branch="trained"))
    assert not logits(loaded).any()
    hub.fail("/commit/", 500)
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(1.0)
    trainer.save_model()
    assert any("trainer.push_to_hub() uploads it" in one.getMessage() for one in caplog.records)


@pytest.mark.parametrize("by", ["hub_token", pytest.param("HF_TOKEN", marks=pytest.mark.slow)])
def test_the_token_is_in_no_file_and_no_message(
    tmp_path: Path, hub: HubServer, by: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="onstep")
    hub.fail("/lfs/", 403, times=1)
    with using(hub, token=None if by == "hub_token" else TOKEN):
        args = pushing(tmp_path, hub_strategy="checkpoint", hub_token=TOKEN if by == "hub_token" else None)
        trainer: Any = Trainer(qwen(), args, train_dataset=causal_rows())
        trainer.train()
        hub.fail("/commit/", 403)
        with pytest.raises(ConfigError) as error:
            trainer.push_to_hub(tags="x")
    printed = "".join(capfd.readouterr())
    texts = [printed, caplog.text, str(error.value), repr(args), str(args), repr(trainer.pusher.uploads.repository)]
    texts += [repr(args.to_dict()), args.to_json_string(), repr(trainer.global_state.cfg)]
    assert "the commit to me/model failed" in caplog.text
    assert not [text for text in texts if TOKEN in text or "marked-signature" in text]
    found = [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert not found
    assert not [path for path, content in hub.files().items() if TOKEN.encode() in content]
