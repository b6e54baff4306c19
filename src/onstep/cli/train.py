"""`onstep train` and `onstep finetune`: starts or resumes a run from the command line."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from onstep.analysis.logs.run_status import run_record
from onstep.cli.application import Imports, Recipe, Words
from onstep.cli.completed_words import complete_words
from onstep.cli.config import (
    configuration_and_keys,
    import_file,
    is_file,
    load_callback,
    run_directory,
)
from onstep.cli.exit_codes import ERROR
from onstep.cli.first_checks import check_start, is_main
from onstep.cli.hub import hf_directory, start_from
from onstep.cli.runs import RUNS, find_named, has_weights, not_found, run_names
from onstep.cli.streams import outliving_readers
from onstep.cli.train_ending import say_where, suggest
from onstep.config import ConfigContainer, apply_overrides
from onstep.config.suggestions import nearest, shown
from onstep.console.level import Level
from onstep.console.messages import show_messages
from onstep.console.style import in_words
from onstep.errors import PREEMPTED, ConfigError
from onstep.events import CallbackManager
from onstep.recipes import RECIPES
from onstep.recipes.finetuning import LORA_LR

if TYPE_CHECKING:
    from onstep.training import GlobalState

logger = logging.getLogger(__name__)

OnConfigChange = Annotated[
    str | None,
    typer.Option(
        help="If values or the files of the data changed since the run started: error, keep (stored values) or apply "
        "(values and files as they are now)."
    ),
]


Control = Annotated[
    bool,
    typer.Option("--control", help="Let `onstep control` and a browser watch and steer the job (run.control=true)."),
]
WithoutCommands = Annotated[
    int | None,
    typer.Option(
        "--without-commands-from",
        min=0,
        metavar="STEP",
        help="Continue without the commands that the run was sent after this step or later "
        "(run.without_commands_from).",
    ),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show warnings and the end (logger.console=quiet).")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show every row and size (logger.console=verbose).")]


HfModel = Annotated[
    str | None,
    typer.Option(
        "--hf-model",
        metavar="DIR|NAME[@REVISION]",
        help="Train a Hugging Face model of any family further: its directory, or its name on the Hub, which is "
        "downloaded once; REVISION is a branch, a tag or a commit. A directory without weights starts from new ones, "
        "as model.hf_model=DIR does.",
    ),
]


def train(
    words: Words = None,
    recipe: Recipe = None,
    hf_model: HfModel = None,
    imports: Imports = None,
    on_config_change: OnConfigChange = None,
    control: Control = False,
    without_commands_from: WithoutCommands = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train a model. Without arguments: a tiny GPT on the source code of Python's standard library.

    The run is stored in runs/NAME; the same command resumes an interrupted run from its newest checkpoint.
    Add your own callbacks with: --import my.py callbacks='[my:MyCallback]'
    """
    words = with_level(words or [], quiet=quiet, verbose=verbose)
    named = [word for word in words if "=" not in word]
    is_any = hf_model is not None and not set(named) & set(RECIPES)
    is_any = is_any or (not named and any(word.startswith("model.hf_model=") for word in words))
    config, names, keys = configuration_and_keys(words, "any" if recipe is None and is_any else recipe)
    if hf_model is not None:
        start_from(config, hf_directory(hf_model), keys)
    _apply(config, control, without_commands_from, on_config_change)
    announce(config, names, imports or [])
    from onstep.training import pretrain

    suggest(run_to_its_end(pretrain, config, names, imports or []))


def _apply(
    config: ConfigContainer, control: bool, without_commands_from: int | None, on_config_change: str | None
) -> None:
    """Set the options of a command in its configuration, in place."""
    config.run.control = config.run.control or control
    if without_commands_from is not None:
        config.run.without_commands_from = without_commands_from
    if on_config_change is not None:
        config.checkpoint.on_config_change = on_config_change


def finetune(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml | RUN | RECIPE] [KEY=VALUE ...]",
            autocompletion=complete_words,
            help="A file, a run of onstep finetune or a recipe, and overrides.",
        ),
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train low-rank adapters only (peft.peft_scheme=lora).")] = False,
    qlora: Annotated[
        bool, typer.Option("--qlora", help="--lora, with a base in 4 bits (peft.base_quantization=nf4).")
    ] = False,
    hf_model: HfModel = None,
    imports: Imports = None,
    on_config_change: OnConfigChange = None,
    control: Control = False,
    without_commands_from: WithoutCommands = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fine-tune a pretrained model: onstep finetune checkpoint.pretrained_checkpoint=DIR 'dataset.paths=[chat.jsonl]'

    DIR is a Hugging Face model directory (also as --hf-model DIR), a run or a checkpoint. Without a recipe, the model
    is read from the weights.
    The run is stored in runs/NAME; the same command resumes an interrupted run. With --lora or --qlora, it
    writes adapter/ in addition to the merged model/.
    """
    words = with_level(words or [], quiet=quiet, verbose=verbose)
    flag = "--qlora" if qlora else "--lora" if lora else None
    recipe, rest = _finetuned_recipe(words, flag is not None)
    config, names, keys = configuration_and_keys(rest, recipe)
    if flag is not None:
        _set_lora(config, words, flag)
    config.checkpoint.finetune = True
    if hf_model is not None:
        start_from(config, hf_directory(hf_model), keys)
    _apply(config, control, without_commands_from, on_config_change)
    announce(config, names, imports or [])
    from onstep.training import finetune as start

    suggest(run_to_its_end(start, config, names, imports or []))


def _set_lora(config: ConfigContainer, words: list[str], flag: str) -> None:
    """Enable LoRA, or QLoRA, in the configuration of any recipe or file."""
    meant = {"peft.peft_scheme": "lora"} | ({"peft.base_quantization": "nf4"} if flag == "--qlora" else {})
    for word in words:
        key, _, value = word.partition("=")
        if value != meant.get(key, value):
            raise ConfigError(f"{flag} means {key}={meant[key]}, which conflicts with {word}; drop one of them.")
    if config.peft.peft_scheme is None:
        note = (
            f"{flag}: keeping optimizer.lr={config.optimizer.lr} of the file; LoRA usually needs a higher learning "
            f"rate, such as {LORA_LR}"
        )
        print(in_words(note, sys.stderr), file=sys.stderr)
    apply_overrides(config, [f"{key}={value}" for key, value in meant.items()])


def _finetuned_recipe(words: list[str], lora: bool) -> tuple[str | None, list[str]]:
    """The fine-tuning variant of the recipe among the words, and the other words; a file names its own recipe."""
    named = [word for word in words if "=" not in word]
    if any(map(is_file, named)):
        return None, words
    if len(named) > 1:
        raise ConfigError(f"expected at most one recipe or configuration file, got {', '.join(named)}.")
    if named and _was_finetuned(named[0]):
        return None, words
    name = named[0].removesuffix("_config").removesuffix("_pretrain") if named else "any"
    form = name if "_finetune" in name else f"{name}_finetune"
    form += "_lora" if lora and form.endswith("_finetune") else ""
    if form not in RECIPES:
        if (found := find_named(named[0])) is not None:
            raise ConfigError(_no_fine_tuning(named[0], found))
        raise ConfigError(_nothing_named(named[0], name))
    return form, [word for word in words if "=" in word]


def _was_finetuned(word: str) -> bool:
    """Whether a word names a run of `onstep finetune`, which its stored configuration continues."""
    directory = run_directory(word)
    stored = None if directory is None else run_record(directory).get("config")
    checkpoint = stored.get("checkpoint") if isinstance(stored, dict) else None
    return isinstance(checkpoint, dict) and checkpoint.get("finetune") is True


def _no_fine_tuning(word: str, found: Path) -> str:
    """The error about a word that names something other than a recipe or a run of `onstep finetune`."""
    run = run_directory(word)
    if has_weights(found):
        return f"{word!r} is not a recipe; to fine-tune its weights, write checkpoint.pretrained_checkpoint={word}."
    if run is None:
        name = shlex.quote(found.resolve().name)
        return (
            f"{found} is a directory in which no run has started (it has no run.json) and no model is; start a run of "
            f"that name: onstep finetune run.name={name} checkpoint.pretrained_checkpoint=DIR 'dataset.paths=[FILE]'."
        )
    how = "its script" if run_record(run).get("layout") == "hugging_face" else f"onstep train {shlex.quote(word)}"
    return (
        f"the run {run} has no checkpoint and no weights that could be fine-tuned yet; it was not started by onstep "
        f"finetune. Start it again with {how}."
    )


def _nothing_named(word: str, recipe: str) -> str:
    """The error about a word that names nothing: the nearest recipe or the runs that there are, and what to write."""
    hint = nearest(recipe, list(RECIPES), cutoff=0.6)
    there = f"unknown recipe {shown(word)}.{hint} There is" if hint else "there is no recipe (onstep recipes list),"
    return (
        f"{there} no configuration file {shown(word)} and no run {shown(str(RUNS / word))}, which is stored once it "
        f"has started.{not_found(word, run_names(), '')} Weights to start from are given as "
        "checkpoint.pretrained_checkpoint=NAME, and the name of a new run as run.name=NAME."
    )


def run_to_its_end(
    start: Callable[..., GlobalState],
    config: ConfigContainer,
    names: list[str],
    imports: list[str],
    further: Sequence[object] = (),
) -> GlobalState:
    """Start a run with the callbacks named in `names`, report how it ended, and return its state.

    Args:
        start: `pretrain` or `finetune`.
        config: modified in place: a run without a name gets that of its recipe.
        names: callbacks as `module:attribute`.
        imports: files to import first.
        further: other callbacks.
    """
    show_messages(cast(Level, config.logger.console), is_main=is_main())
    for path in imports:
        import_file(path)
    from onstep.training.runs.signals import Preempted

    manager = _callbacks(config, names)
    manager.add(list(further))
    try:
        with outliving_readers():
            state = start(config, callbacks=manager)
    except Preempted as preempted:
        if is_main():
            print(f"{preempted}.", flush=True)
        raise typer.Exit(PREEMPTED) from None
    if is_main() and state.train_state.step > 0:
        say_where(state)
    if state.ending.by_anomaly or (state.checkpoints is not None and state.checkpoints.failure is not None):
        raise typer.Exit(ERROR)
    return state


def with_level(words: list[str], *, quiet: bool, verbose: bool) -> list[str]:
    """The words of a command, with the level of `-q` or `-v` as an override."""
    if quiet and verbose:
        raise ConfigError("-q and -v ask for less and for more output; drop one of them.")
    return [*words, f"logger.console={'quiet' if quiet else 'verbose'}"] if quiet or verbose else words


def announce(config: ConfigContainer, callbacks: Sequence[str] = (), imports: Sequence[str] = ()) -> None:
    """Check what can be checked, name the run, and say what is being started, before seconds of importing torch.

    Args:
        config: modified in place: a run without a name gets that of its recipe.
        callbacks: as `module:attribute`.
        imports: files to import first.
    """
    check_start(config, callbacks, imports)
    if not is_main() or config.logger.console == "quiet":
        return
    train, place = config.train, config.run.place
    unit = "step" if train.train_iters == 1 else "steps"
    length = f"{train.train_iters:,} {unit}" if train.train_iters is not None else "training"
    length = f"{train.num_epochs:g} epochs" if train.num_epochs is not None else length
    size = f" of {train.global_batch_size} x {config.model.seq_length} tokens" if train.global_batch_size else ""
    print(f"{config.run.recipe or config.run.name}: {length}{size} into {place}; loading PyTorch ...", flush=True)


def _callbacks(config: ConfigContainer, names: list[str]) -> CallbackManager:
    from onstep.callbacks import DefaultMetrics, DiLoCoCallback, JsonLogger
    from onstep.console import shown_by_default
    from onstep.integrations.ray import RayReport, is_in_ray_train

    given = [load_callback(name) for name in names]
    defaults: list[Any] = []
    if config.run.default_callbacks:
        defaults = [DefaultMetrics(), *shown_by_default(cast(Level, config.logger.console))]
    defaults.append(JsonLogger())
    manager = CallbackManager()
    manager.add([one for one in defaults if not any(isinstance(mine, type(one)) for mine in given)])
    for name, callback in zip(names, given, strict=True):
        try:
            manager.add(callback)
        except TypeError as error:
            raise ConfigError(f"callbacks={name}: {error}") from None
    if not any(isinstance(one, DiLoCoCallback) for one in manager.callbacks) and DiLoCoCallback().active:
        manager.add(DiLoCoCallback())
    if is_in_ray_train() and not any(isinstance(one, RayReport) for one in manager.callbacks):
        manager.add(RayReport())
    return manager
