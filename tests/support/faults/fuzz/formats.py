"""The formats: which honest files an input starts from, which of them it changes, and the doors it goes through."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.support.faults.fuzz import doors
from tests.support.faults.fuzz.doors import Door, onstep, resume, start
from tests.support.faults.fuzz.file_changes import change_file, seal
from tests.support.faults.fuzz.honest_files import copy
from tests.support.faults.fuzz.value_changes import strange_yaml

Files = tuple[tuple[str, str, float], ...]
"""Pattern of a path, kind of the file, and how often it is the one that is changed."""


@dataclass(frozen=True)
class Format:
    """A format that Onstep reads."""

    name: str
    files: Files
    doors: tuple[Door, ...]
    honest: str
    """The set of honest files."""
    weight: float = 1.0
    """Its share of all inputs, relative to the others."""
    variants: tuple[str, ...] = ()
    """Subdirectories of the honest files, of which an input has one, as `it`; empty: the honest files have no such."""

    def make_input(self, random: Random, honest: Path, place: Path, *, is_changed: bool = True) -> str:
        """Copy the honest files to `place` and change some; what was done."""
        source = honest / self.honest
        if self.variants:
            copy(source / random.choice(self.variants), place / "it")
            for path in source.iterdir():
                if path.is_file():
                    shutil.copy(path, place)
        else:
            copy(source, place)
        if not is_changed:
            return "nothing"
        done: list[str] = []
        changed: set[Path] = set()
        for _ in range(random.choices((1, 2), (5, 1))[0]):
            path, kind = self._file(place, random)
            what = change_file(path, "bytes" if path in changed else kind, random)
            changed.add(path)
            checkpoint = next((parent for parent in path.parents if parent.name.startswith("checkpoint-")), None)
            if checkpoint is not None and path.stat().st_size < 1 << 28 and random.random() < 0.85:
                seal(checkpoint, path.relative_to(checkpoint).as_posix())
                what += " (sealed)"
            done.append(f"{path.relative_to(place)}: {what}")
        return "; ".join(done)

    def _file(self, place: Path, random: Random) -> tuple[Path, str]:
        pattern, kind, _ = random.choices(self.files, [share for _, _, share in self.files])[0]
        there = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
        found = fnmatch.filter(there, pattern)
        while not found:  # this variant lacks the file
            pattern, kind, _ = random.choice(self.files)
            found = fnmatch.filter(there, pattern)
        return place / random.choice(found), kind


@dataclass(frozen=True)
class Words(Format):
    """Words of a command line, which are no file."""

    def make_input(self, random: Random, honest: Path, place: Path, *, is_changed: bool = True) -> str:
        """Write the words to a file, one a line, for the doors to read."""
        from onstep.config.keys import KEYS

        keys = [*KEYS]
        words = []
        for _ in range(random.choice((1, 1, 2, 3))):
            key = (
                random.choice(keys)
                if random.random() < 0.9
                else random.choice(("", ".", "model", "a.b.c", "__class__.x"))
            )
            value = strange_yaml(random)[1].replace("\0", "")[:100_000]
            words.append(f"{key}={value}" if random.random() < 0.95 else random.choice((key, value, f"{key}=", "=")))
        words = words if is_changed else ["optimizer.lr=0.5"]
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
                (f"{_CHECKPOINT}/manifest.json", "json", 4),
                (f"{_CHECKPOINT}/*/*.json", "json", 6),
                (f"{_CHECKPOINT}/*/*.safetensors", "safetensors", 3),
                ("runs/run/checkpoints/latest", "bytes", 0.5),
            ),
            (*_LOOKS_AT_CHECKPOINTS, resume(0.6), onstep("checkpoint", "verify", _CHECKPOINT, share=0.2)),
            "run",
            2.0,
        ),
        Format(
            "saved tracker points",
            ((f"{_CHECKPOINT}/callbacks/*.json", "json", 1),),
            (resume(),),
            "run",
            0.7,
        ),
        Format(
            "other files of a run",
            (
                ("runs/run/checkpoints/ft_state.json", "json", 3),
                ("runs/run/checkpoints/progress.txt", "bytes", 2),
                ("runs/run/.run.lock", "bytes", 1),
                ("runs/run/certificate/rank_0.json", "json", 1),
                ("runs/run/metrics.csv", "bytes", 2),
            ),
            (resume(), onstep("logs", "list", share=0.2)),
            "run",
            0.7,
        ),
        Format(
            "run.json",
            (("runs/run/run.json", "json", 1),),
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
            ((_LOG, "records", 1),),
            (*_log_doors(_LOG), onstep("logs", "list"), resume(0.15)),
            "run",
            2.0,
        ),
        Format(
            "decisions.jsonl",
            (("runs/run/decisions.jsonl", "records", 1),),
            (onstep("why", "run"), onstep("why", "run", "--step", "4")),
            "run",
        ),
        Format(
            "text_samples.jsonl",
            (("runs/run/text_samples.jsonl", "records", 1),),
            (Door("the samples of the demo", doors.show_samples),),
            "run",
            0.5,
        ),
        Format(
            "trainer_state.json",
            (("trainer_state.json", "json", 1),),
            _log_doors("trainer_state.json"),
            "trainer_state",
            1.5,
        ),
        Format(
            "parameter norms",
            (("runs/run/parameter_norms.json", "records", 1),),
            (onstep("plot", "heatmap", "run", "--output", "h.svg"),),
            "run",
            0.4,
        ),
        Format(
            "model config.json",
            (("it/config.json", "json", 1),),
            (
                doors.load_model("it"),
                doors.finetune(*_CHAT, name="on chats", share=0.2),
            ),
            "models",
            2.0,
            ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt2"),
        ),
        Format(
            "safetensors",
            (("it/*.safetensors", "safetensors", 1), ("it/*.index.json", "json", 1)),
            (doors.load_model("it"), doors.finetune(*_CHAT, name="on chats", share=0.1)),
            "models",
            1.0,
            ("llama", "gpt2", "sharded", "sharded"),
        ),
        Format(
            "tokenizer.json",
            (("it/tokenizer.json", "json", 1),),
            (
                doors.tokenizer("tokenizers", "it/tokenizer.json"),
                start(*_THE_TOKENIZER, name="with the tokenizer", share=0.15),
            ),
            "tokenizers",
            2.0,
            ("bpe", "bpe", "wordpiece", "unigram"),
        ),
        Format(
            "tokenizer directory",
            (("it/*.json", "json", 4), ("it/*.txt", "bytes", 1)),
            (doors.tokenizer("huggingface", "it"), doors.chat_template("it")),
            "tokenizers",
            1.5,
            ("fast", "template_in_config", "slow"),
        ),
        Format(
            "chat template",
            (("it/chat_template.jinja", "template", 3), ("it/tokenizer_config.json", "template in json", 3)),
            (doors.chat_template("it"),),
            "tokenizers",
            1.0,
            ("fast", "template_in_config"),
        ),
        Format(
            "chats",
            (("chats.jsonl", "records", 1),),
            (
                doors.data("chat", doors.bytes_tokenizer, length=128, kind="chat", paths=["chats.jsonl"]),
                doors.data(
                    "chat, packed", doors.bytes_tokenizer, 0.3, 128, kind="chat", paths=["chats.jsonl"], packing=True
                ),
                start(*_CHAT, name="on chats", share=0.15),
            ),
            "chats",
            1.5,
        ),
        Format(
            "text and JSONL corpora",
            (("corpus.txt", "bytes", 1), ("corpus.jsonl", "records", 2)),
            (
                doors.data("text", doors.bytes_tokenizer, paths=["corpus.txt"]),
                doors.data("JSONL", doors.bytes_tokenizer, paths=["corpus.jsonl"]),
                doors.learn_bpe("corpus.txt", 0.3),
                doors.learn_bpe("corpus.jsonl", 0.3),
                start("dataset.paths=[corpus.jsonl]", *_BPE, name="on BPE", share=0.1),
            ),
            "texts",
            1.2,
        ),
        Format(
            ".idx and .bin",
            (("docs.idx", "index", 4), ("docs.bin", "bytes", 1)),
            (
                doors.indexed("docs"),
                doors.data("megatron", doors.bytes_tokenizer, kind="megatron", paths=["docs"]),
                start("dataset.kind=megatron", "dataset.paths=[docs]", name="on indexed files", share=0.1),
            ),
            "indexed",
            1.5,
        ),
        Format(
            "token files",
            (("tokens/*.json", "json", 3), ("tokens/*.tokens", "bytes", 1)),
            (doors.cached_tokens(),),
            "tokens",
            0.8,
        ),
        Format(
            "YAML configuration",
            (("small.yaml", "yaml", 3), ("all.yaml", "yaml", 3)),
            (
                doors.load_configuration("small.yaml"),
                doors.load_configuration("all.yaml"),
                onstep("config", "show", "small.yaml"),
                onstep("config", "show", "all.yaml", share=0.5),
                onstep("why", "--features", "small.yaml", share=0.2),
            ),
            "configuration",
            1.5,
        ),
        Format("prompts", (("prompts.yaml", "yaml", 1),), (doors.prompts("prompts.yaml"),), "configuration", 0.3),
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
            1.2,
        ),
    )
}
"""By name, in the order of the report."""

Maker = Callable[[Random, Path, Path], str]
