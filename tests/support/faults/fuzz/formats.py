"""The formats: which honest files an input starts from, which of them it changes, and the doors it goes through."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from tests.support.faults.fuzz import doors
from tests.support.faults.fuzz.changes import YAML_TEXTS, change_file, seal
from tests.support.faults.fuzz.doors import Door, onstep, resume, start
from tests.support.faults.fuzz.honest_files import copy

Files = tuple[tuple[str, str], ...]
"""Pattern of a path, and the kind of the file."""


@dataclass(frozen=True)
class Format:
    """A format that Onstep reads."""

    name: str
    files: Files
    doors: tuple[Door, ...]
    honest: str
    """The set of honest files."""
    variants: tuple[str, ...] = ()
    """Subdirectories of the honest files, of which an input has one, as `it`; empty: the honest files have no such."""

    def copy_honest(self, honest: Path, place: Path, variant: str | None) -> None:
        """Copy the honest files, with one of the variants if there are some."""
        source = honest / self.honest
        if variant is None:
            copy(source, place)
            return
        copy(source / variant, place / "it")
        for path in source.iterdir():
            if path.is_file():
                shutil.copy(path, place)

    def found(self, place: Path) -> list[tuple[Path, str]]:
        """The files that may be changed, with their kinds."""
        there = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
        return [(place / path, kind) for pattern, kind in self.files for path in fnmatch.filter(there, pattern)]

    def change(self, draw: st.DrawFn, place: Path) -> str:
        """Change one file or two; what was done."""
        done = []
        found = self.found(place)
        kinds = {kind: [path for path, other in found if other == kind] for _, kind in found}
        for _ in range(draw(st.sampled_from((1, 1, 1, 2)))):
            kind = draw(st.sampled_from(sorted(kinds)))
            path = draw(st.sampled_from(kinds[kind]))
            how = change_file(draw, path, "bytes" if done else kind)
            checkpoint = next((parent for parent in path.parents if parent.name.startswith("checkpoint-")), None)
            is_sealed = checkpoint is not None and draw(st.sampled_from((True, True, False)))
            if checkpoint is not None and is_sealed:
                seal(checkpoint, path.relative_to(checkpoint).as_posix())
            done.append(f"{path.relative_to(place)}: {how}{' (sealed)' * is_sealed}")
        return "; ".join(done)


@dataclass(frozen=True)
class Words(Format):
    """Words of a command line, which are no file."""

    def change(self, draw: st.DrawFn, place: Path) -> str:
        """Write the words to a file, for the doors to read."""
        from onstep.config.keys import KEYS

        key = st.sampled_from([*KEYS]) | st.sampled_from([*KEYS]) | st.sampled_from(("", ".", "a.b.c", "__class__.x"))
        value = YAML_TEXTS.map(lambda text: text.replace("\0", "")[:100_000])
        word = st.builds("{}={}".format, key, value)
        words = draw(st.lists(word | word | word | key | value, min_size=1, max_size=3))
        (place / "words.txt").write_text("\0".join(words), encoding="utf-8", errors="surrogatepass")
        return " ".join(words)[:200]


def _with_words(*before: str, key_only: bool = False, share: float = 1.0) -> Door:
    def enter() -> object:
        words = Path("words.txt").read_text(encoding="utf-8", errors="surrogatepass").split("\0")
        given = [word.partition("=")[0] for word in words] if key_only else words
        return onstep(*before, "--", *given).enter()

    return Door(f"onstep {' '.join(before)} WORDS", enter, share)


_CHECKPOINT = "runs/run/checkpoints/checkpoint-6"
_LOOKS_AT_CHECKPOINTS = (
    onstep("checkpoint", "list", "run"),
    onstep("checkpoint", "list", "run", "--json", "--quick", share=0.3),
    onstep("checkpoint", "verify", "run", "--all", share=0.7),
    onstep("checkpoint", "diff", "copied/checkpoint-6", "run@6", fine=(0, 1)),
    doors.exported_weights("run", honest="copied/checkpoint-6", changed=_CHECKPOINT, share=0.5),
    onstep("checkpoint", "export", "run", "exported", share=0.5),
)
_LOG = "runs/run/trainer_logs.json"


def _log_doors(path: str) -> tuple[Door, ...]:
    return (
        doors.training_log(path),
        doors.log_tail(path),
        onstep("logs", "summary", path),
        onstep("logs", "summary", path, "--format", "json", "--export", "t.csv", "--export", "t.parquet", share=0.4),
        onstep("logs", "tail", path, "--json", share=0.5),
        onstep("logs", "tail", path, "-n", "1000", share=0.5),
        onstep("logs", "plot", path, "--output", "p.svg", share=0.12),
        onstep("logs", "plot", path, "--loss-curves", "--output", "p.png", share=0.06),
        onstep("logs", "compare", path, "other", share=0.3),
        onstep("logs", "report", path, "--output", "r.html", share=0.12),
        onstep("logs", "replay", path, "--to", "csv", "--output", "sent", share=0.5),
        onstep("logs", "replay", path, "--to", "tensorboard", "--output", "sent", share=0.1),
    )


_CHAT = (
    "dataset.kind=chat",
    "dataset.paths=[chats.jsonl]",
    "dataset.split=1",
    "dataset.seq_length=128",
    "model.seq_length=128",
)
_THE_TOKENIZER = ("tokenizer.tokenizer_type=tokenizers", "tokenizer.tokenizer_model=it/tokenizer.json")
_BPE = ("tokenizer.tokenizer_type=bpe", "tokenizer.vocab_size=300")

FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Format(
            "checkpoint",
            (
                (f"{_CHECKPOINT}/manifest.json", "json"),
                (f"{_CHECKPOINT}/*/*.json", "json"),
                (f"{_CHECKPOINT}/*/*.safetensors", "safetensors"),
                ("runs/run/checkpoints/latest", "bytes"),
            ),
            (*_LOOKS_AT_CHECKPOINTS, resume(0.6), onstep("checkpoint", "verify", _CHECKPOINT, share=0.2)),
            "run",
        ),
        Format(
            "saved tracker points",
            ((f"{_CHECKPOINT}/callbacks/*.json", "json"),),
            (resume(),),
            "run",
        ),
        Format(
            "other files of a run",
            (
                ("runs/run/checkpoints/ft_state.json", "json"),
                ("runs/run/checkpoints/progress.txt", "bytes"),
                ("runs/run/.run.lock", "bytes"),
                ("runs/run/certificate/chain.json", "json"),
                ("runs/run/metrics.csv", "bytes"),
            ),
            (resume(), onstep("logs", "list", share=0.2)),
            "run",
        ),
        Format(
            "run.json",
            (("runs/run/run.json", "json"),),
            (
                onstep("generate", "runs/run", "def ", "--max-new-tokens", "2", share=0.5),
                onstep("why", "run"),
                onstep("why", "--features", "run"),
                onstep("logs", "list"),
                onstep("logs", "summary", "run", share=0.3),
                onstep("logs", "report", "run", "--output", "r.html", share=0.1),
                onstep("checkpoint", "list", "run", share=0.5),
                resume(0.5),
            ),
            "run",
        ),
        Format(
            "metrics log",
            ((_LOG, "records"),),
            (*_log_doors(_LOG), onstep("logs", "list"), resume(0.15)),
            "run",
        ),
        Format(
            "record",
            (("runs/run/record.jsonl", "records"),),
            (
                onstep("why", "run"),
                onstep("logs", "list"),
                onstep("logs", "summary", "run"),
                onstep("logs", "tail", "run", "--json", share=0.5),
                onstep("logs", "plot", "run", "--output", "p.svg", share=0.12),
                onstep("logs", "report", "run", "--output", "r.html", share=0.12),
                onstep("logs", "replay", "run", "--to", "csv", "--output", "sent", share=0.5),
                resume(),
            ),
            "run",
        ),
        Format(
            "decisions.jsonl",
            (("runs/run/decisions.jsonl", "records"),),
            (onstep("why", "run"), onstep("why", "run", "--step", "4")),
            "run",
        ),
        Format(
            "text_samples.jsonl",
            (("runs/run/text_samples.jsonl", "records"),),
            (Door("the samples of the demo", doors.show_samples),),
            "run",
        ),
        Format(
            "trainer_state.json",
            (("trainer_state.json", "json"),),
            _log_doors("trainer_state.json"),
            "trainer_state",
        ),
        Format(
            "parameter norms",
            (("runs/run/parameter_norms.json", "records"),),
            (onstep("plot", "heatmap", "run", "--output", "h.svg"),),
            "run",
        ),
        Format(
            "model config.json",
            (("it/config.json", "json"),),
            (
                doors.load_model("it"),
                doors.finetune(*_CHAT, name="on chats", share=0.2),
            ),
            "models",
            ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt2"),
        ),
        Format(
            "safetensors",
            (("it/*.safetensors", "safetensors"), ("it/*.index.json", "json")),
            (doors.load_model("it"), doors.finetune(*_CHAT, name="on chats", share=0.1)),
            "models",
            ("llama", "gpt2", "sharded", "sharded"),
        ),
        Format(
            "tokenizer.json",
            (("it/tokenizer.json", "json"),),
            (
                doors.tokenizer("tokenizers", "it/tokenizer.json"),
                start(*_THE_TOKENIZER, name="with the tokenizer", share=0.15),
            ),
            "tokenizers",
            ("bpe", "bpe", "wordpiece", "unigram"),
        ),
        Format(
            "tokenizer directory",
            (("it/*.json", "json"), ("it/*.txt", "bytes")),
            (doors.tokenizer("huggingface", "it"), doors.chat_template("it")),
            "tokenizers",
            ("fast", "template_in_config", "slow"),
        ),
        Format(
            "chat template",
            (("it/chat_template.jinja", "template"), ("it/tokenizer_config.json", "template in json")),
            (doors.chat_template("it"),),
            "tokenizers",
            ("fast", "template_in_config"),
        ),
        Format(
            "chats",
            (("chats.jsonl", "records"),),
            (
                doors.data("chat", doors.bytes_tokenizer, length=128, kind="chat", paths=["chats.jsonl"]),
                doors.data(
                    "chat, packed", doors.bytes_tokenizer, 0.3, 128, kind="chat", paths=["chats.jsonl"], packing=True
                ),
                start(*_CHAT, name="on chats", share=0.15),
            ),
            "chats",
        ),
        Format(
            "text and JSONL corpora",
            (("corpus.txt", "bytes"), ("corpus.jsonl", "records")),
            (
                doors.data("text", doors.bytes_tokenizer, paths=["corpus.txt"]),
                doors.data("JSONL", doors.bytes_tokenizer, paths=["corpus.jsonl"]),
                doors.learn_bpe("corpus.txt", 0.3),
                doors.learn_bpe("corpus.jsonl", 0.3),
                start("dataset.paths=[corpus.jsonl]", *_BPE, name="on BPE", share=0.1),
            ),
            "texts",
        ),
        Format(
            ".idx and .bin",
            (("docs.idx", "index"), ("docs.bin", "bytes")),
            (
                doors.indexed("docs"),
                doors.data("megatron", doors.bytes_tokenizer, kind="megatron", paths=["docs"]),
                start("dataset.kind=megatron", "dataset.paths=[docs]", name="on indexed files", share=0.1),
            ),
            "indexed",
        ),
        Format(
            "token files",
            (("tokens/*.json", "json"), ("tokens/*.tokens", "bytes")),
            (doors.cached_tokens(),),
            "tokens",
        ),
        Format(
            "YAML configuration",
            (("small.yaml", "yaml"), ("all.yaml", "yaml")),
            (
                doors.load_configuration("small.yaml"),
                doors.load_configuration("all.yaml"),
                onstep("config", "show", "small.yaml"),
                onstep("config", "show", "all.yaml", share=0.5),
                onstep("why", "--features", "small.yaml", share=0.2),
            ),
            "configuration",
        ),
        Format("prompts", (("prompts.yaml", "yaml"),), (doors.prompts("prompts.yaml"),), "configuration"),
        Words(
            "key=value words",
            (),
            (
                _with_words("config", "show"),
                _with_words("memory", "tiny_gpt", share=0.2),
                _with_words("why", "--features", share=0.2),
                _with_words("config", "explain", key_only=True, share=0.2),
            ),
            "configuration",
        ),
    )
}
"""By name, in the order of the report."""


def doors_of(name: str) -> Sequence[Door]:
    """The ways in of a format."""
    return FORMATS[name].doors
