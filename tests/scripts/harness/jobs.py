"""Jobs for the process server: write the inputs, and run one script under one of the two libraries."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tests.scripts.harness.inputs import write_inputs

OUTPUT = "out"
"""The `output_dir` of every script, relative to its working directory."""
CONFIGS = ("config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json")
_IMPORT = re.compile(r"^(# The import line that changes:\nfrom )transformers( import \w+, \w+)$", re.MULTILINE)


def imported_from(library: str, source: str) -> str:
    """The script with its marked import line naming `library`; nothing else differs."""
    changed, count = _IMPORT.subn(rf"\g<1>{library}\g<2>", source)
    assert count == 1, "a script marks exactly one import line"
    return changed


def job_inputs(settings: dict[str, Any]) -> None:
    write_inputs(Path(settings["directory"]))


def job_script(settings: dict[str, Any]) -> dict[str, Any]:
    """Run the script in the current directory as `python script.py <arguments>`, and report what it left behind."""
    os.environ["HF_DATASETS_CACHE"] = str(Path("cache").absolute())
    path = Path(settings["script"])
    script = Path(path.name).absolute()
    _write_once(script, imported_from(settings["library"], path.read_text()))
    sys.argv = [str(script), *settings["arguments"]]
    for name in settings["lost"]:
        shutil.rmtree(Path(OUTPUT, name))
    start = time.perf_counter()
    runpy.run_path(str(script), run_name="__main__")
    seconds = time.perf_counter() - start
    if os.environ.get("RANK", "0") != "0":
        return {}
    return {"seconds": seconds, **observed(Path(OUTPUT), settings["model_class"], settings["base"])}


def _write_once(path: Path, text: str) -> None:
    """Write a file as a whole: another rank may be reading it."""
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(text)
    own.replace(path)


def observed(directory: Path, model_class: str, base: str) -> dict[str, Any]:
    """What tools find in an `output_dir`: files, results, state, and the weights that `from_pretrained` loads."""
    from transformers.trainer_utils import get_last_checkpoint

    state = json.loads((directory / "trainer_state.json").read_text())
    found = get_last_checkpoint(str(directory))
    last = directory if found is None else Path(found)
    best = last if state["best_model_checkpoint"] is None else directory / Path(state["best_model_checkpoint"]).name
    loaded = {place: _weights(model_class, place, base) for place in {directory, last, best}}
    return {
        "files": sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()),
        "results": {path.name: json.loads(path.read_text()) for path in sorted(directory.glob("*_results.json"))},
        "configs": {
            name: json.loads((directory / name).read_text()) for name in CONFIGS if (directory / name).exists()
        },
        "state": state,
        "last_checkpoint": last.name,
        "best_checkpoint": best.name,
        "final_is_last": _are_equal(loaded[directory], loaded[last]),
        "final_is_best": _are_equal(loaded[directory], loaded[best]),
        "norms": {key: value.double().norm().item() for key, value in loaded[directory].items()},
    }


def _are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def _weights(model_class: str, directory: Path, base: str) -> dict[str, Any]:
    """The state dict after `from_pretrained(directory)`; adapters are loaded onto `base`."""
    import transformers

    if model_class == "PeftModel":
        from peft import PeftModel

        model = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), directory)
    else:
        model = getattr(transformers, model_class).from_pretrained(directory)
    return dict(model.state_dict())
