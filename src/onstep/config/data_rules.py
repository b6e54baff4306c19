"""The rules of what is read, in what batches, for how long: sizes, data and tokenizer against each other.

Each check raises a ConfigError for the first rule that is broken: it names the value, the rule and the remedy.
"""

from __future__ import annotations

import math
import warnings
from pathlib import PurePath

from onstep.config.lengths import batch_sizes, sizes_of
from onstep.config.parts import ConfigContainer, DatasetConfig, TokenizerConfig
from onstep.errors import ConfigError

_said: set[str] = set()
"""Warnings given: a run checks its configuration more than once."""

_SMALLEST_BPE = 257
_KINDS_OF: dict[str, tuple[str, ...]] = {
    "text_key": ("text", "huggingface"),
    "weights": ("megatron",),
    "hf_subset": ("huggingface", "chat"),
    "hf_split": ("huggingface", "chat"),
    "messages_key": ("chat",),
    "prompt_key": ("chat",),
    "response_key": ("chat",),
    "packing": ("chat",),
    "eod_mask_loss": ("text", "huggingface", "megatron"),
    "reset_attention_mask": ("text", "huggingface", "megatron"),
}
"""The kinds of data that a key means something for."""

_JSONL = (".jsonl", ".ndjson", ".jsonlines")
_FILES_OF_ROWS = (*_JSONL, ".json", ".parquet", ".arrow", ".csv", ".tsv")
_PLAIN_TEXT = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".py", ".csv", ".tsv", ".json")
"""Ends of files that `text` takes as one document each; a folder or glob may hold JSONL too."""


def check_batches(config: ConfigContainer, world_size: int) -> None:
    """Check the length of a run and the sizes of its batches, also of those that grow."""
    train = config.train
    lengths = {"train_iters": train.train_iters, "train_samples": train.train_samples, "num_epochs": train.num_epochs}
    given = [f"train.{name}={value}" for name, value in lengths.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both lengths of the run; keep one and set the others to null.")
    if not given and not config.validation.skip_train:
        raise ConfigError("the run has no length: set one of train.train_iters, train.train_samples, train.num_epochs.")
    for step in train.iterations_to_skip:
        if step < 1:
            raise ConfigError(f"train.iterations_to_skip holds {step}; steps are counted from 1, so give 1 or more.")
    if train.rampup_batch_size is not None and train.step_batch_size_schedule is not None:
        raise ConfigError(
            "train.rampup_batch_size and train.step_batch_size_schedule both say how the batch grows; keep one and "
            "set the other to null."
        )
    schedules = {name: getattr(train, name) for name in ("rampup_batch_size", "step_batch_size_schedule")}
    for name, schedule in schedules.items():
        if schedule is not None:
            _check_schedule(config, name, world_size)
            return
    micro, total = train.micro_batch_size, train.global_batch_size
    if micro is None and total is None:
        raise ConfigError(
            "the batch has no size: set train.micro_batch_size (samples of one forward pass on one rank)."
        )
    if micro is None and total is not None:
        check_multiple(f"train.global_batch_size={total}", total, "ranks", (world_size,))
    elif micro is not None and total is not None:
        _check_size(config, total, world_size, f"train.global_batch_size={total}")


def _check_schedule(config: ConfigContainer, name: str, world_size: int) -> None:
    train, key = config.train, f"train.{name}={getattr(config.train, name)!r}"
    if train.micro_batch_size is None:
        raise ConfigError(f"{key} takes train.micro_batch_size: a batch grows by micro-batches; set it.")
    is_ramp = name == "rampup_batch_size"
    if is_ramp and train.global_batch_size is None:
        raise ConfigError(f"{key} takes train.global_batch_size, the size that it grows to; set it.")
    sizes = batch_sizes(train, world_size, config.model.seq_length)
    if train.global_batch_size is not None and sizes.nominal[-1] != train.global_batch_size:
        raise ConfigError(
            f"{key} ends at {sizes.nominal[-1]} and must end at train.global_batch_size={train.global_batch_size}; "
            "make them the same, or leave global_batch_size unset."
        )
    if is_ramp and not sizes.varies:
        raise ConfigError(
            f"{key} starts at train.global_batch_size={train.global_batch_size}, so nothing grows; start below it, or "
            "set rampup_batch_size to null."
        )
    for size in dict.fromkeys(sizes.nominal):
        _check_size(config, size, world_size, f"{key} has steps of {size} samples; {size}")


def _check_size(config: ConfigContainer, size: int, world_size: int, subject: str) -> None:
    """A batch is made of whole micro-batches, or can be rounded down to them, which takes at least one."""
    micro = config.train.micro_batch_size or 1
    if not config.train.decrease_batch_size_if_needed:
        check_multiple(subject, size, "micro_batch_size * ranks", (micro, world_size))
    elif size < micro * world_size:
        raise ConfigError(
            f"a global batch of {size} must have at least micro_batch_size * ranks = {micro} * {world_size} = "
            f"{micro * world_size} samples; with fewer, decrease_batch_size_if_needed would leave nothing of it."
        )


def check_multiple(subject: str, value: int, factors: str, sizes: tuple[int, ...]) -> None:
    """Check that `value`, which the message calls `subject`, is a multiple of the product of `sizes`.

    Raises:
        ConfigError: with the nearest values that are.
    """
    unit = math.prod(sizes)
    if value % unit == 0:
        return
    product = " * ".join(map(str, sizes)) + (f" = {unit}" if len(sizes) > 1 else "")
    lower, upper = value // unit * unit, (value // unit + 1) * unit
    choices = f"{lower} or {upper}" if lower else str(upper)
    raise ConfigError(f"{subject} must be a multiple of {factors} = {product}; choose {choices}.")


def check_steps(filled: ConfigContainer, iters: int | None, world_size: int) -> None:
    """Check the batches of evaluation, and that a run of `iters` steps has one.

    None is an unknown length. Warns (UserWarning, once) where the run ends before its ramp or before a step to skip.
    """
    train, validation = filled.train, filled.validation
    micro, total = validation.eval_micro_batch_size, validation.eval_global_batch_size
    if validation.eval_iters != 0 and micro is not None and total is not None:
        subject = f"validation.eval_global_batch_size={total}"
        check_multiple(subject, total, "eval_micro_batch_size * ranks", (micro, world_size))
    if iters is None:
        return
    sizes = sizes_of(filled, world_size)
    if iters == 0:
        size = f"train.global_batch_size={train.global_batch_size}"
        step = f"the first step of {sizes.at(0)}" if sizes.varies else f"one step of {size}"
        raise ConfigError(
            f"train.train_samples={train.train_samples} is less than {step} samples; train on at least one batch."
        )
    last = sizes.at(sizes.samples_after(iters - 1))
    if train.rampup_batch_size is not None and last < sizes.last:
        _warn_once(
            f"train.rampup_batch_size={train.rampup_batch_size} ramps over {train.rampup_batch_size[2]} samples, and "
            f"the run of {iters} steps takes {sizes.samples_after(iters)}: its last step has {last} samples and not "
            f"train.global_batch_size={train.global_batch_size}; train longer, or ramp over fewer samples.",
        )
    beyond = sorted(step for step in set(train.iterations_to_skip) if step > iters)
    if beyond:
        _warn_once(
            f"train.iterations_to_skip has the step {beyond[0]}, but the run has {iters} steps; it is not reached.",
        )


def _warn_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, UserWarning, stacklevel=2)


def check_data(config: ConfigContainer) -> None:
    """Check the keys of data and tokenizer against each other."""
    data = config.dataset
    if parse_split(data.split)[0] == 0 and not config.validation.skip_train:
        raise ConfigError(f"dataset.split={data.split!r} leaves nothing to train on.")
    _check_kind(data)
    _check_files(data)
    _check_weights(data)
    _check_tokenizer(config.tokenizer, data.kind)


def parse_split(text: str) -> tuple[float, float, float]:
    """The shares of train, validation and test as fractions of 1, from text such as '90,5,5'.

    Missing shares are 0, so '100' trains on everything.

    Raises:
        ConfigError: not one to three numbers >= 0 with a sum above 0.
    """
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < math.inf for share in shares) or sum(shares) == 0:
        raise ConfigError(f"dataset.split={text!r} must be the shares of train, validation and test, such as '90,5,5'.")
    train, valid, test = (share / sum(shares) for share in [*shares, 0.0, 0.0][:3])
    return train, valid, test


def _check_kind(data: DatasetConfig) -> None:
    changed = data.changed()
    for name, kinds in _KINDS_OF.items():
        if name in changed and data.kind not in kinds:
            raise ConfigError(
                f"dataset.{name}={changed[name]!r} means nothing for dataset.kind={data.kind}; leave it out, or set "
                f"kind to {' or '.join(kinds)}."
            )
    if data.kind != "text" and not data.paths:
        what = {
            "megatron": "the prefixes of .bin and .idx files",
            "huggingface": "a folder, files, or a name on the hub",
            "chat": "JSONL files or datasets of conversations",
        }
        raise ConfigError(f"dataset.paths=[] is empty; dataset.kind={data.kind} takes {what[data.kind]}.")


def _check_files(data: DatasetConfig) -> None:
    """Keys that the named files have no use for, as far as their names tell."""
    if data.hf_subset is not None and _all_end(data.paths, _FILES_OF_ROWS):
        raise ConfigError(
            f"dataset.hf_subset={data.hf_subset!r} is a configuration of a dataset on the hub, and dataset.paths="
            f"{data.paths} are files; leave it out."
        )
    if data.kind == "text" and "text_key" in data.changed() and _all_end(data.paths, _PLAIN_TEXT):
        named = f"dataset.paths={data.paths} are files of plain text" if data.paths else "Python's own sources are not"
        raise ConfigError(
            f"dataset.text_key={data.text_key!r} is a key of JSONL records, and {named}; leave it out, or name files "
            f"that end in {', '.join(_JSONL)}."
        )


def _all_end(paths: list[str], suffixes: tuple[str, ...]) -> bool:
    return all(PurePath(path).suffix.lower() in suffixes for path in paths)


def _check_weights(data: DatasetConfig) -> None:
    if data.weights is None:
        return
    if len(data.weights) != len(data.paths):
        raise ConfigError(
            f"dataset.weights={data.weights} must have one number for each of the {len(data.paths)} dataset.paths."
        )
    if not all(math.isfinite(weight) and weight > 0 for weight in data.weights):
        raise ConfigError(
            f"dataset.weights={data.weights} must be numbers > 0 (they are divided by their sum); leave out a path "
            "with a share of 0."
        )


def _check_tokenizer(tokenizer: TokenizerConfig, kind: str) -> None:
    how, path, size = tokenizer.tokenizer_type, tokenizer.tokenizer_model, tokenizer.vocab_size
    has_path = how not in ("bytes", "bpe")
    if has_path and path is None:
        raise ConfigError(f"tokenizer_type={how} takes the path tokenizer.tokenizer_model.")
    if not has_path and path is not None:
        raise ConfigError(
            f"tokenizer.tokenizer_model={path} means nothing for tokenizer_type={how}; leave it out, or set "
            "tokenizer_type to tokenizers (a file) or huggingface (a folder)."
        )
    if how != "bpe" and size is not None:
        raise ConfigError(
            f"tokenizer.vocab_size={size} is what tokenizer_type=bpe learns, and tokenizer_type is {how}; leave it "
            "out, or set model.vocab_size for a larger model."
        )
    if how == "bpe" and size is not None and size < _SMALLEST_BPE:
        raise ConfigError(f"tokenizer.vocab_size={size} must be >= {_SMALLEST_BPE}: all bytes and the end token.")
    if how == "bpe" and kind == "megatron":
        raise ConfigError(
            "tokenizer_type=bpe is learned from text, and dataset.kind=megatron has token ids; set the tokenizer that "
            "the files were made with."
        )
