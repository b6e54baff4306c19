"""`onstep finetune`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from onstep.cli.config import configuration
from onstep.cli.train import Imports, OnConfigChange, run_to_its_end
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.recipes import RECIPES, get_recipe
from onstep.recipes.finetuning import LORA_LR

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def finetune(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE | CONFIG.yaml] [KEY=VALUE ...]", help="A recipe or a file, and single values."),
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train a few added weights (peft.peft_scheme=lora).")] = False,
    imports: Imports = None,
    on_config_change: OnConfigChange = None,
) -> None:
    """Train trained weights further: onstep finetune checkpoint.pretrained_checkpoint=DIR 'dataset.paths=[chat.jsonl]'

    DIR is a Hugging Face folder, a run or a checkpoint. Without a recipe the model is whatever the weights are of. The
    run is kept in runs/NAME; the same command continues one that was interrupted. With --lora it leaves adapter/ beside
    the merged model/.
    """
    recipe, rest = _recipe(words or [], lora)
    config, names = configuration(rest, recipe)
    if lora:
        _set_lora(config, words or [])
    from onstep.training import finetune as start

    run_to_its_end(start, config, names, imports or [], on_config_change)


def _set_lora(config: ConfigContainer, words: list[str]) -> None:
    """LoRA in a configuration of whichever recipe or file."""
    for word in words:
        key, _, value = word.partition("=")
        if key == "peft.peft_scheme" and value != "lora":
            raise ConfigError(f"--lora is peft.peft_scheme=lora, and {word} is given too; leave one of them out.")
    if config.peft.peft_scheme is None:
        print(
            f"--lora: optimizer.lr={config.optimizer.lr} stays as the file has it; LoRA's matrices start at zero and "
            f"take more, such as {LORA_LR}",
            file=sys.stderr,
        )
    config.peft.peft_scheme = "lora"


def _recipe(words: list[str], lora: bool) -> tuple[str | None, list[str]]:
    """The recipe among the words, in its form for fine-tuning, and the other words; a file names its own."""
    named = [word for word in words if "=" not in word]
    if any(Path(word).is_file() for word in named):
        return None, words
    if len(named) > 1:
        raise ConfigError(f"One recipe or configuration file at the most, got {', '.join(named)}.")
    name = named[0].removesuffix("_config").removesuffix("_pretrain") if named else "any"
    form = name if "_finetune" in name else f"{name}_finetune"
    form += "_lora" if lora and form.endswith("_finetune") else ""
    if form not in RECIPES:
        get_recipe(name)  # says what there is
    return form, [word for word in words if "=" in word]
