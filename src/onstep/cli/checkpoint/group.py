"""`onstep checkpoint list|verify|diff|export|convert`: inspects checkpoints, and writes weights in other formats."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from onstep.cli.application import application
from onstep.cli.completed_words import complete_checkpoints
from onstep.cli.exit_codes import ERROR
from onstep.errors import ConfigError, OnstepError

app = application(
    no_args_is_help=True,
    help="List, verify, compare and export the checkpoints of a run; convert those of others.\n\n"
    "PATH is a checkpoint, a directory of checkpoints, or a run (a path, or a name below runs/). PATH@STEP selects the "
    "checkpoint of that step, PATH@best the best one; the default is the newest. The URL of a run in an object store "
    "(s3://bucket/runs/NAME) is a PATH, too.",
)

DIFFERENT = 1
"""Exit code of `diff` when the checkpoints differ."""
TROUBLE = 2
"""Exit code of `diff` when the comparison fails; the codes follow diff(1)."""


class Format(StrEnum):
    """Output formats of `export`."""

    SAFETENSORS = "safetensors"
    HF = "hf"
    GGUF = "gguf"


class Dtype(StrEnum):
    """Dtypes of exported weights."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@app.command("list")
def list_(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", autocompletion=complete_checkpoints, help="A run, or a directory of checkpoints."
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: {root, resumes_from, checkpoints: [...]}.")
    ] = False,
    quick: Annotated[bool, typer.Option(help="Check file sizes only; do not hash the newest checkpoint.")] = False,
) -> None:
    """List the checkpoints of a run, newest first.

    Includes damaged and unfinished ones; marks the best one and the one that a resume would load.
    """
    from onstep.cli.checkpoint.listing import as_json as in_json
    from onstep.cli.checkpoint.listing import as_lines, listing_of, shown_place

    with listing_of(path, verifies=not quick) as listing:
        text = json.dumps(in_json(listing), indent=2) if as_json else "\n".join(as_lines(listing))
        print(shown_place(listing, path, text))


@app.command()
def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            autocompletion=complete_checkpoints,
            help="A checkpoint, a run (its newest checkpoint), or a GGUF file.",
        ),
    ],
    everything: Annotated[bool, typer.Option("--all", help="All checkpoints of the run or directory.")] = False,
) -> None:
    """Check every file against its hash in the manifest; of a GGUF file, only that its header and tensors are complete.

    Lists each bad file. The exit code is 1 if any file is bad. A GGUF file has no hashes: its values are not checked.
    """
    if Path(path).is_file() and path.lower().endswith(".gguf"):
        from onstep.models.hf.gguf_types import check_gguf_file

        kinds = check_gguf_file(path)
        counts = ", ".join(f"{number} tensors in {kind}" for kind, number in kinds.items())
        print(f"{path}: complete (values are not checked), {counts}")
        return
    from onstep.cli.checkpoint.listing import dirs_to_verify, is_intact

    results = [is_intact(directory) for directory in dirs_to_verify(path, everything=everything)]
    if not all(results):
        raise typer.Exit(ERROR)


@app.command()
def diff(
    a: Annotated[
        str,
        typer.Argument(metavar="A", autocompletion=complete_checkpoints, help="A checkpoint, such as runs/NAME@20."),
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", autocompletion=complete_checkpoints, help="The checkpoint to compare it with.")
    ],
    everything: Annotated[bool, typer.Option("--all", help="Show everything, including what is equal.")] = False,
) -> None:
    """Compare two checkpoints.

    Compares configuration, components, every tensor, counters and other values; both are verified first. Exit code
    0: equal, 1: different, 2: comparison failed. Differences between otherwise identical runs do not count: run ids,
    dates, timings, paths in the run's own directory, and configuration keys that do not affect training results.
    """
    try:
        from onstep.cli.checkpoint.diff import report
        from onstep.cli.checkpoint.paths import find

        lines, is_equal = report(find(a), find(b), everything=everything)
    except OnstepError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(TROUBLE) from None
    print("\n".join(lines))
    if not is_equal:
        raise typer.Exit(DIFFERENT)


@app.command()
def export(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            autocompletion=complete_checkpoints,
            help="A checkpoint, or a run (its newest verified one).",
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="File or directory to write.")],
    form: Annotated[
        Format | None,
        typer.Option("--format", help="Default: that of OUT's ending (.safetensors, .gguf), hf if it has no ending."),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Dtype of the written weights. Default: that of the checkpoint.")
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Type of the matrices in a GGUF file: F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1, Q4_0, TQ1_0 or TQ2_0. "
            "Default: that of --dtype."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Write the weights of a checkpoint for other programs.

    safetensors: one file with all weights. hf: a directory for AutoModelForCausalLM.from_pretrained of transformers,
    including the tokenizer's files. gguf: one file for llama.cpp, including the tokenizer. hf and gguf are for Onstep's
    own models, and for models of transformers that it can convert.
    """
    import torch

    from onstep.analysis.text_tables import printable
    from onstep.cli.checkpoint.export import check_ending, export_gguf, export_hf, export_safetensors
    from onstep.cli.checkpoint.paths import find
    from onstep.stores.urls import with_urls

    if form is None:
        check_ending(out)
    ending = Path(out).suffix.lower().removeprefix(".")
    form = form or (Format(ending) if ending in ("safetensors", "gguf") else Format.HF)
    info = find(path)
    chosen = None if dtype is None else getattr(torch, dtype)
    if quantization is not None and (form is not Format.GGUF or dtype is not None):
        also = "drop --dtype" if form is Format.GGUF else "drop it, or name a .gguf file"
        raise ConfigError(f"--quantization {quantization} sets the type of the matrices in a GGUF file; {also}.")
    if form is Format.GGUF:
        notes = export_gguf(info, Path(out), force=force, dtype=chosen, quantization=quantization)
    else:
        notes = {Format.SAFETENSORS: export_safetensors, Format.HF: export_hf}[form](
            info, Path(out), force=force, dtype=chosen
        )
    print(printable(f"{out}: the weights of {with_urls(str(info.path))}; {'; '.join(notes)}"))


@app.command()
def convert(
    directory: Annotated[
        str, typer.Argument(metavar="DIRECTORY", help="A directory that torch.distributed.checkpoint wrote.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The directory or .safetensors file to write.")],
    prefix: Annotated[
        str,
        typer.Option(help="Write the tensors whose names begin with this, such as 'model.', without it."),
    ] = "",
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out values that are pickles, which are never read.")
    ] = False,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Dtype of the written tensors. Default: theirs.")
    ] = None,
    config_from: Annotated[
        str | None,
        typer.Option(help="Hugging Face directory of the same model: its configuration and tokenizer are copied."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier one.")] = False,
) -> None:
    """Write the tensors of a checkpoint of torchtitan, accelerate or another user of torch.distributed.checkpoint.

    They are written as safetensors, one at a time, in files of at most 5 GB with an index. Nothing is unpickled. The
    names stay those of the program that saved them, without --prefix; with --config-from, `onstep finetune` and
    transformers open the result if the names are those of transformers, or those of torchtitan's llama, which are then
    translated.
    """
    import torch

    from onstep.analysis.text_tables import printable
    from onstep.cli.checkpoint.convert import convert as convert_directory

    notes = convert_directory(
        Path(directory),
        Path(out),
        prefix=prefix,
        tensors_only=tensors_only,
        dtype=None if dtype is None else getattr(torch, dtype),
        config_from=None if config_from is None else Path(config_from),
        force=force,
    )
    print(printable(f"{out}: {directory}; {'; '.join(notes)}"))
