"""The parts of a configuration that say what is read, and how text becomes tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from onstep.config.part import ConfigPart


@dataclass
class DatasetConfig(ConfigPart):
    """The corpus and how its samples are read."""

    kind: str = "text"
    """text (cut into sequences) | megatron (`.bin` and `.idx` files) | huggingface (a dataset of the `datasets`
    library) | chat (prompts and answers, with a loss on the answers)"""
    paths: list[str] = field(default_factory=list)
    """Of `text`: files, folders, globs or JSONL files; empty is the source of Python's own standard library. Of
    `megatron`: prefixes of pairs of `.bin` and `.idx` files. Of `huggingface`: folders of `save_to_disk`, json,
    parquet, arrow or csv files, folders or globs of such, or names on the hub. Of `chat`: JSONL files or folders of
    them, or what `huggingface` takes."""
    text_key: str = "text"
    """The key of a JSONL record, or the column of a Hugging Face dataset, that holds the text."""
    weights: list[float] | None = None
    """Share of each path in a blend of Megatron's files, divided by their sum; an epoch then is as long as it takes to
    meet every sample once, and smaller files come again. None is by their sizes: each sample once."""
    hf_subset: str | None = None
    """Configuration of a dataset on the hub."""
    hf_split: str = "train"
    """Split of a Hugging Face dataset that is trained on. Its own validation and test splits are taken where it has
    them and `split` has a share for them; for what it has not, `split` divides this one."""
    messages_key: str = "messages"
    """The key of a chat record that holds its messages, each with `role` and `content`; those of the role `assistant`
    are trained on."""
    prompt_key: str = "prompt"
    """The key of a prompt, in records without messages."""
    response_key: str = "response"
    """The key of its answer."""
    packing: bool = True
    """Put several conversations into one sequence, with attention within each; False pads each to its own sequence."""
    eod_mask_loss: bool = False
    """No loss at the token that ends a document, where the label is the first token of the next one. (The end token
    itself is learned as a label all the same.)"""
    reset_attention_mask: bool = False
    """Attention within documents only, and positions start again at each; a document reaches to its end token."""
    split: str = "90,5,5"
    """Shares of train, validation and test: contiguous ranges, of tokens (`text`, `huggingface`), of documents
    (`megatron`) or of conversations (`chat`)."""
    seq_length: int = 256
    cache_dir: str | None = None
    """Where token files are kept; None is `$ONSTEP_CACHE` or the user's cache folder."""
    shuffle: bool = True
    """Shuffle each epoch, by a pure function of seed and epoch."""
    num_workers: int = 2
    """Loader processes; 0 reads in the training process."""
    pin_memory: bool = True
    """Read into pinned memory where there is a GPU."""
    persistent_workers: bool = True
    """Keep loader processes from epoch to epoch."""


@dataclass
class TokenizerConfig(ConfigPart):
    """How text becomes tokens."""

    tokenizer_type: str = "bytes"
    """bytes | bpe (learned from the corpus, once, and kept in the run's folder) | tokenizers (a
    `tokenizer.json`) | huggingface (a local `transformers` tokenizer folder)"""
    tokenizer_model: str | None = None
    """Path of the tokenizer's file or folder."""
    vocab_size: int | None = None
    """Tokens that `bpe` learns, the 256 bytes and the end token included; None is 8192."""
