"""The page "Fine-tune a 7B model on one card", from top to bottom, with a small model in the place of the large one."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from onstep.cli.main import main
from tests.docs.pages import ROOT, blocks
from tests.support.chat_directory import chat_directory

pytest.importorskip("bitsandbytes")
pytest.importorskip("lm_eval")

PAGE = ROOT / "docs" / "guide" / "one-card.md"
SMALLER = (
    ("dataset.seq_length=2048", "dataset.seq_length=64"),
    ("train.global_batch_size=16", "train.global_batch_size=2"),
    ("checkpoint.save_interval=50", "checkpoint.save_interval=1"),
)
"""What a test shortens in the commands of the page."""
INTERRUPTED = "run.name=support "


@pytest.mark.process
def test_the_page_works_from_top_to_bottom(
    tmp_path: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("ONSTEP_CACHE", token_cache),
        ("ONSTEP_REGISTRY", tmp_path / "registry"),
        ("HF_DATASETS_CACHE", tmp_path / "cache"),
        ("HF_HUB_OFFLINE", 1),
    ):
        monkeypatch.setenv(name, str(value))
    chat_directory(tmp_path / "qwen2.5-7b-instruct")
    namespace: dict[str, object] = {"__name__": "__main__"}
    totals: list[str] = []
    for block in blocks(PAGE, "python", "bash"):
        if block.language == "python":
            block.run(namespace)
            continue
        for line in block.lines():
            words = shlex.split(line, comments=True)
            if words[1] == "finetune" and len(words) > 3:
                line = smaller(line)
                if INTERRUPTED in f"{line} ":
                    line += " train.exit_interval=2"  # the next command of the page continues it
                words = shlex.split(line)
            elif words[1] == "finetune":
                words.append("train.exit_interval=null")
            if words[1] == "evaluate":
                words += ["--device", "cpu"]
            assert main(words[1:]) == 0, f"{block}: {line}\n{capsys.readouterr().err}"
            out = capsys.readouterr().out
            if words[1] == "memory":
                totals += re.findall(r"^total +([\d,.]+ MiB)$", out, re.MULTILINE)
    assert len(totals) == 2
    assert all(f"| {total} |" in PAGE.read_text(encoding="utf-8") for total in totals)
    for name in ("support", "support-qlora"):
        assert "chat_template" in {path.stem for path in Path(f"runs/{name}/model").iterdir()}
        assert json.loads(Path(f"runs/{name}/run.json").read_text())["config"]["peft"]["peft_scheme"] == "lora"
    assert Path("support.gguf").read_bytes()[:4] == b"GGUF"
    assert Path("support-model/config.json").exists()


def smaller(line: str) -> str:
    """A command of the page, for a test; each number that is replaced must be there."""
    for long, short in SMALLER:
        assert long in line
        line = line.replace(long, short)
    return re.sub(" +", " ", line)
