"""`HubCallback` uploads what either entry point trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from onstep import pretrain
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.events import Callback, CallbackContext
from onstep.integrations.hub import HubCallback
from tests.support.hub_server import TOKEN, HubServer, hub_server, using
from tests.support.small_models import arguments, causal_rows, quiet, qwen
from tests.support.waiting import until


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as hub, using(hub):
        yield hub


def test_pretrain_uploads_its_final_weights_and_newest_checkpoint(
    tmp_path: Path, hub: HubServer, tiny_config: ConfigContainer, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_config.run.output_dir, tiny_config.run.name = str(tmp_path), "run"
    tiny_config.train.train_iters, tiny_config.checkpoint.save_interval = 4, 2
    fault = hub.fail("/commit/", 500, times=1)
    pretrain(tiny_config, callbacks=[HubCallback("me/model", "checkpoint", always_push=True)])
    assert fault.seen == 1
    assert hub.messages()[-1] == "End of training"
    places = hub.download(tmp_path / "fetched"), tmp_path / "run" / "model"
    loaded, local = (transformers.AutoModelForCausalLM.from_pretrained(place) for place in places)
    assert torch.equal(loaded(torch.arange(6)[None]).logits, local(torch.arange(6)[None]).logits)
    newest = tmp_path / "run" / "checkpoints" / "checkpoint-4"
    for path in (one for one in newest.rglob("*") if one.is_file()):
        assert hub.files()[f"last-checkpoint/{path.relative_to(newest).as_posix()}"] == path.read_bytes()
    assert not [path for path in hub.files() if "run.json" in path or "record" in path]
    assert not list(tmp_path.rglob(".tmp-*"))
    assert any("the commit to me/model failed" in one.getMessage() for one in caplog.records)


def test_a_failure_that_is_known_late_does_not_bring_an_older_checkpoint(
    tmp_path: Path, hub: HubServer, tiny_config: ConfigContainer
) -> None:
    class FirstFailsAtTheSecond(Callback):
        def on_checkpoint_save(self, context: CallbackContext) -> None:
            if context.checkpoint_step == 4:
                hub.released.set()
                until(lambda: sum("/commit/" in path for _, path in hub.requests) == 2)

    tiny_config.run.output_dir, tiny_config.run.name = str(tmp_path), "run"
    tiny_config.train.train_iters, tiny_config.checkpoint.save_interval = 4, 2
    hub.fail("/commit/", 500, times=1)
    hub.hold("/commit/")
    pushes = HubCallback("me/model", "checkpoint", always_push=True)
    pretrain(tiny_config, callbacks=[pushes, FirstFailsAtTheSecond()])
    assert hub.messages() == ["Training in progress, step 4", "End of training"]
    assert json.loads(hub.files()["last-checkpoint/manifest.json"])["step"] == 4


@pytest.mark.slow
def test_a_trainer_has_the_callback_too(tmp_path: Path, hub: HubServer) -> None:
    args = arguments(tmp_path, save_steps=2, config_overrides={})
    callback = HubCallback("me/model", "all_checkpoints", token=TOKEN, private=True, always_push=True)
    quiet(qwen(), args, causal_rows(), callbacks=[callback]).train()
    assert hub.messages() == ["Training in progress, step 2", "Training in progress, step 4", "End of training"]
    assert {"checkpoint-2", "checkpoint-4"} < {path.partition("/")[0] for path in hub.files()}
    assert hub.private == {"me/model"}


def test_without_a_token_no_step_is_trained(tmp_path: Path, hub: HubServer, tiny_config: ConfigContainer) -> None:
    tiny_config.run.output_dir, tiny_config.run.name = str(tmp_path), "run"
    with using(hub, token=None), pytest.raises(ConfigError, match="HTTP 401"):
        pretrain(tiny_config, callbacks=[HubCallback("me/model")])
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))
    with pytest.raises(ConfigError, match="strategy must be one of end, checkpoint, all_checkpoints, got 'every_save'"):
        HubCallback("me/model", "every_save")  # type: ignore[arg-type]
