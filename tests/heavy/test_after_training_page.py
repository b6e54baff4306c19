"""The page "After training" works from top to bottom, and the file that "Serve it" loads is the page's."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import ROOT, blocks

GUIDE = ROOT / "docs/guide"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_the_page_works_from_top_to_bottom(
    tmp_path: Path, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONSTEP_CACHE", str(token_cache))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.manual_seed(0)
    page, namespace = GUIDE / "after-training.md", dict[str, Any](__name__="__main__")
    [task] = [block.code for block in blocks(page, "text") if block.code.startswith("task: ")]
    named = re.search(r"Write `(tasks/\w+\.yaml)`", page.read_text())
    assert named is not None
    Path("tasks").mkdir()
    Path(named[1]).write_text(task)
    for block in blocks(page, "python", "py", "bash"):
        if block.language == "bash":
            block.run_commands()
        else:  # on little text, of which a tokenizer is learned faster than of Python's library
            own = f'"run.name=mine", "dataset.paths=[{corpus}]", "dataset.split=\'80,10,10\'",'
            replace(block, code=block.code.replace('"run.name=mine",', own)).run(namespace)
    said = capsys.readouterr().out
    assert said.count("brackets: acc ") == 2  # onstep why names both evaluations
    assert "relative error of the logits: 0.0" in said
    assert "brackets" in Path("published/README.md").read_text()

    served = GUIDE / "serve.md"
    assert "mine-q8_0.gguf" in served.read_text()
    if importlib.util.find_spec("llama_cpp") is not None:
        for block in blocks(served, "py"):
            block.run(namespace)
