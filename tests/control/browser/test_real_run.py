"""The page of a real run: it is watched while it trains, saves when told to, and stops."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onstep.control.client.http_client import HTTPTrainerControlClient
from onstep.control.registry import list_infos
from tests.control.browser.conftest import Watched
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.process

SETTINGS = (
    "train.train_iters=100000", "logger.log_interval=1", "model.num_layers=1", "model.hidden_size=32",
    "model.num_attention_heads=2", "model.seq_length=32", "dataset.seq_length=32", "validation.eval_iters=1",
    "checkpoint.save_interval=1000000", "run.name=real", "rng.seed=1",
)  # fmt: skip


def test_a_real_run_is_watched_saved_and_stopped(
    tmp_path: Path, corpus: Path, registry: Path, new_page: Callable[..., Watched]
) -> None:
    arguments = [sys.executable, "-m", "onstep", "train", *SETTINGS, f"dataset.paths=[{corpus}]", "--control"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(arguments, cwd=tmp_path, env={**os.environ}, stdout=log, stderr=log)
    try:
        found = until(list_infos, (tmp_path / "log").read_text, while_true=lambda: process.poll() is None)
        client = HTTPTrainerControlClient()
        assert client.get_status(found[0].job_id)["tokenizer"]["bytes_per_token"] == 1.0
        link = client.login_link(found[0].job_id)
        watched = new_page(viewport={"width": 1280, "height": 900})
        watched.page.goto(link)
        watched.until("document.querySelector('[data-chart=loss]')?.dataset.points > 5")
        before = watched.points("loss")
        watched.until(f"document.querySelector('[data-chart=loss]').dataset.points > {before + 5}")
        watched.page.get_by_role("button", name="Save", exact=True).click()
        watched.page.locator(".toast.is-applied", has_text="Save: applied at step").wait_for()
        assert list((tmp_path / "runs" / "real" / "checkpoints").glob("checkpoint-*"))
        watched.page.get_by_role("button", name="Save and stop", exact=True).click()
        watched.page.get_by_role("dialog").get_by_role("button", name="Save and stop").click()
        assert process.wait(timeout=PATIENCE) == 0, (tmp_path / "log").read_text()
        watched.page.get_by_text("This run has ended").wait_for()
        watched.page.get_by_text("The run has ended, and its server with it.").wait_for()
        watched.page.close()
        watched.complaints[:] = [one for one in watched.complaints if "net::ERR_" not in one]  # the server is gone
    finally:
        process.kill()
        process.wait()
