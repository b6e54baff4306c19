"""The ways in which files reach Onstep: commands of `onstep`, and the functions that programs call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.faults.fuzz.honest_files import STEPS, TRAIN


@dataclass(frozen=True)
class Door:
    """One way in, called in the directory of the input."""

    name: str
    enter: Callable[[], object]
    """Returns an exit code, if any."""
    share: float = 1.0
    """Share of the inputs that go through it."""
    fine: tuple[int, ...] = (0,)
    """Exit codes that are no refusal."""


class NoMessageError(Exception):
    """A command that failed without a word."""


class SilentlyWrongError(Exception):
    """Something other than what the honest file holds was read, and nobody said so."""


def onstep(*words: str, share: float = 1.0, fine: tuple[int, ...] = (0,)) -> Door:
    """A command of `onstep`."""

    def enter() -> int:
        from onstep.cli.main import main

        sys.argv = ["onstep", *words]
        return main(list(words))

    return Door(f"onstep {' '.join(words)}"[:100], enter, share, fine)


def resume(share: float = 1.0, **more: Any) -> Door:
    """Continue the run for one step, as `onstep train` with the same words does."""
    words = (
        *TRAIN,
        "--on-config-change",
        "apply",
        f"train.train_iters={STEPS + 1}",
        *(f"{key}={value}" for key, value in more.items()),
    )
    door = onstep(*words, share=share)
    return Door(f"onstep train, resuming{''.join(f' {key}={value}' for key, value in more.items())}", door.enter, share)


def show_samples() -> None:
    """Read the text samples of a run and lay them out for a terminal."""
    from onstep.analysis.logs.samples_log import newest_by_step, read_samples
    from onstep.cli.demo.ending import sample_lines

    for line in sample_lines(newest_by_step(read_samples(Path("runs/run/text_samples.jsonl"))), 80):
        if len(line) > 80 or not line.replace("\ufffd", "").isprintable():
            raise SilentlyWrongError(f"a sample reaches the terminal as {line[:100]!r}")


def start(*words: str, name: str, share: float = 1.0) -> Door:
    """Start a run of one step of a tiny model."""
    own = ("run.name=started", "train.train_iters=1", "run.save_weights=false", "checkpoint.save_interval=null")
    door = onstep(*TRAIN, *own, *words, share=share)
    return Door(f"onstep train, {name}", door.enter, share)


def finetune(*words: str, name: str, share: float = 1.0) -> Door:
    """Fine-tune the model in `it` for one step."""
    own = [word for word in TRAIN[1:] if not word.startswith(("model.", "scheduler."))]
    size = ("train.train_iters=1", "train.num_epochs=null", "run.save_weights=false", "checkpoint.save_interval=null")
    door = onstep("finetune", "checkpoint.pretrained_checkpoint=it", *own, *size, *words, share=share)
    return Door(f"onstep finetune, {name}", door.enter, share)


def exported_weights(run: str, *, honest: str, changed: str, share: float = 1.0) -> Door:
    """`onstep checkpoint export`; unless the manifest was changed too, the weights are those that were saved."""

    def enter() -> int:
        import torch
        from safetensors.torch import load_file

        if code := int(onstep("checkpoint", "export", run, "weights.safetensors").enter()):  # type: ignore[call-overload]
            return code
        manifest = Path(changed) / "manifest.json"
        if not manifest.exists() or manifest.read_bytes() != (Path(honest) / "manifest.json").read_bytes():
            return 0
        found = load_file("weights.safetensors")
        for path in (Path(honest), Path(changed).with_name("checkpoint-3")):
            saved = load_file(path / "model" / "model.safetensors")
            if all(torch.equal(found[name], tensor) for name, tensor in saved.items() if name in found):
                return 0
        raise SilentlyWrongError("the weights that were exported are of no checkpoint")

    return Door("onstep checkpoint export", enter, share)


def read_samples(datasets: Iterable[Any], most: int = 20) -> None:
    """Read some samples of each dataset."""
    for dataset in datasets:
        if dataset is not None:
            for index in range(min(len(dataset), most)):
                dataset[index]


def data(name: str, tokenizer: Callable[[], Any], share: float = 1.0, length: int = 16, **values: Any) -> Door:
    """`build_datasets` of a configuration, and a look at the samples."""

    def enter() -> None:
        from onstep.config import DatasetConfig
        from onstep.data import build_datasets

        config = DatasetConfig(cache_dir="cache", seq_length=length, split="80,10,10", **values)
        read_samples(build_datasets(config, tokenizer(), show_progress=False))

    return Door(f"build_datasets({name})", enter, share)


def bytes_tokenizer() -> Any:
    from onstep.data import ByteTokenizer

    return ByteTokenizer()


def hugging_face(directory: str) -> Callable[[], Any]:
    """The tokenizer of a directory, as `transformers` opens it."""

    def made() -> Any:
        from onstep.config import TokenizerConfig
        from onstep.data import build_tokenizer

        return build_tokenizer(TokenizerConfig(tokenizer_type="huggingface", tokenizer_model=directory))

    return made


def tokenizer(kind: str, model: str) -> Door:
    """Open a tokenizer, and use all of it."""

    def enter() -> None:
        from onstep.config import TokenizerConfig
        from onstep.data import build_tokenizer

        found = build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=model))
        text = "def caf\u00e9(): return 'the <|im_end|> thing'\n"
        ids = [*found.encode(text.encode()), *found.encode_text(text), *found.encode_content(text)]
        found.decode([int(one) for one in ids])
        found.decode([*range(min(found.vocab_size, 300)), found.vocab_size + 5])
        assert found.fingerprint
        Path("saved").mkdir(exist_ok=True)
        found.save(Path("saved"))

    return Door(f"build_tokenizer({kind})", enter)


def chat_template(directory: str) -> Door:
    """Encode conversations by the template of a tokenizer."""

    def enter() -> None:
        from onstep.data import template_for

        template = template_for(hugging_face(directory)())
        for turns in (1, 2):
            asked = {"role": "user", "content": "What is <|im_end|> 2 + 2?"}
            template.encode([asked, {"role": "assistant", "content": "4 of course"}] * turns, "here")

    return Door("template_for(...).encode", enter)


def load_model(directory: str) -> Door:
    """`load_hf`, and a forward pass."""

    def enter() -> None:
        import torch

        from onstep.models import load_hf

        model = load_hf(directory)
        with torch.no_grad():
            model(torch.arange(4)[None])

    return Door("load_hf", enter)


def learn_bpe(path: str, share: float = 1.0) -> Door:
    def enter() -> None:
        from onstep.config import DatasetConfig
        from onstep.data import learn_bpe as learn
        from onstep.data import tokenizer_source

        source = tokenizer_source(DatasetConfig(paths=[path]))
        found = learn(source, 300, "cache", show_progress=False)
        found.encode(b"def caf")

    return Door("learn_bpe", enter, share)


def indexed(path: str) -> Door:
    """`IndexedFile`, and all of its tokens."""

    def enter() -> None:
        from onstep.data import IndexedFile

        for vocab_size in (None, 257):
            file = IndexedFile(path, vocab_size)
            for number in range(min(file.num_documents, 50)):
                file.read(file.document_start(number), file.document_start(number + 1))

    return Door("IndexedFile", enter)


def cached_tokens() -> Door:
    """The tokens of a corpus whose cache was changed: the right ones, from the cache or built again."""

    def enter() -> None:
        import numpy

        from onstep.data import build_token_file

        corpus = Path("corpus.txt")
        found = build_token_file([corpus], bytes_tokenizer(), "tokens", "text", show_progress=False)
        if not numpy.array_equal(found.tokens, [*corpus.read_bytes(), 256]):
            raise SilentlyWrongError("other tokens than those of the corpus")

    return Door("build_token_file with a cache", enter)


def training_log(path: str) -> Door:
    """`TrainingLog` and what analyses it."""

    def enter() -> None:
        from onstep import analysis

        log = analysis.TrainingLog.from_file(path)
        for key in log.keys()[:50]:
            log.column(key)
            log.has(key)
        for _ in zip(log.records, range(50), strict=False):
            pass
        for read in (log.get_training_records, log.get_eval_records, log.get_final_record):
            read()
        log.get_points("loss")
        analysis.smooth_values(log.column("loss"), 3)
        summary = analysis.compute_summary_statistics(log)
        for form in (analysis.format_summary_text, analysis.format_summary_markdown, analysis.format_summary_oneline):
            form(summary)
        analysis.format_summary_json(summary)

    return Door("TrainingLog", enter)


def log_tail(path: str) -> Door:
    """`LogTail` over the file as it is."""

    def enter() -> None:
        from onstep.analysis import LogTail

        tail = LogTail(path)
        tail.last(10)
        tail.news()

    return Door("LogTail", enter)


def prompts(path: str) -> Door:
    """The prompts of the text generation callback."""

    def enter() -> None:
        from onstep.callbacks import TextgenCallback

        TextgenCallback(None, path)

    return Door("TextgenCallback", enter)


def load_configuration(path: str) -> Door:
    """A configuration from YAML, checked and with everything derived."""

    def enter() -> None:
        from onstep.config import from_dict, resolve
        from onstep.config.load import dump_yaml, load_yaml

        shown = dump_yaml(resolve(from_dict(load_yaml(path)), 1))
        again = Path("again.yaml")
        again.write_text(shown, encoding="utf-8")
        if dump_yaml(resolve(from_dict(load_yaml(again)), 1)) != shown:
            raise SilentlyWrongError("the configuration that was written is not the one that was read")

    return Door("load_yaml, from_dict, resolve", enter)
