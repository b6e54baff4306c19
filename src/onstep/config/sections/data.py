"""The corpus, the tokenizer and the seeds."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.section import INCOMPATIBLE, NEW_DATA, NEW_ORDER, PATH, SAFE, TRAJECTORY, ConfigSection, option

_CHAT = "dataset.kind=chat or stream"
_STREAM = "dataset.kind=stream"


@dataclass
class DatasetConfig(ConfigSection):
    """The corpus and how its samples are read."""

    kind: str = option(
        "text",
        TRAJECTORY,
        choices=("text", "megatron", "huggingface", "chat", "stream"),
        effect=NEW_DATA,
        common=True,
        help="Kind of data: text (split into sequences) | megatron (`.bin` and `.idx` files) | huggingface (a "
        "dataset of the `datasets` library) | chat (prompts and answers, with a loss on the answers) | stream (texts "
        "or chats of any size, read and tokenized while the run trains).",
    )
    paths: list[str] = option(
        [],
        TRAJECTORY,
        bound=PATH,
        effect=NEW_DATA,
        common=True,
        help="Sources of the data; files, directories and globs may be URLs of object stores (s3://bucket/corpus, "
        "gs://, az://, file://), which are downloaded to `cache_dir`. For `text`: files, directories, globs or JSONL "
        "files; empty is the source code of "
        "Python's standard library. For `megatron`: prefixes of pairs of `.bin` and `.idx` files. For "
        "`huggingface`: directories of `save_to_disk`, json, parquet, arrow or csv files, directories or globs of "
        "such, or names on the hub, with `@REVISION` for a branch, tag or commit. For `chat`: JSONL files or "
        "directories of them, or anything that `huggingface` accepts. For `stream`: parquet and JSON-lines files "
        "(`.jsonl`, `.gz`, `.zst`), globs or directories of them, URLs, with `{000..127}` for numbered ones, or names "
        "on the hub.",
    )
    text_key: str = option(
        "text",
        TRAJECTORY,
        only_with="dataset.kind=text or huggingface or stream",
        effect=NEW_DATA,
        help="The key of a JSONL record, or the column of a Hugging Face dataset, that holds the text.",
    )
    weights: list[float] | None = option(
        None,
        TRAJECTORY,
        only_with="dataset.kind=megatron",
        effect=NEW_DATA,
        help="Share of each path in a blend of Megatron's files, normalized by their sum; an epoch then uses every "
        "sample at least once, and smaller files repeat. None weights by size: each sample once.",
    )
    hf_subset: str | None = option(
        None,
        TRAJECTORY,
        only_with="dataset.kind=huggingface or chat or stream",
        effect=NEW_DATA,
        help="Configuration (subset) of a dataset on the hub.",
    )
    hf_split: str = option(
        "train",
        TRAJECTORY,
        only_with="dataset.kind=huggingface or chat or stream",
        effect=NEW_DATA,
        help="Split of a Hugging Face dataset to train on. Its own validation and test splits are used where it "
        "has them and `split` has a share for them; otherwise `split` divides this one.",
    )
    messages_key: str = option(
        "messages",
        TRAJECTORY,
        only_with=_CHAT,
        effect=NEW_DATA,
        help="The key of a chat record that holds its messages, each with `role` and `content`; the loss is on "
        "messages of the role `assistant`.",
    )
    prompt_key: str = option(
        "prompt",
        TRAJECTORY,
        only_with=_CHAT,
        effect=NEW_DATA,
        help="The key of the prompt in records without messages.",
    )
    response_key: str = option(
        "response",
        TRAJECTORY,
        only_with=_CHAT,
        effect=NEW_DATA,
        help="The key of the response in records without messages.",
    )
    packing: bool = option(
        True,
        TRAJECTORY,
        only_with=_CHAT,
        effect=NEW_DATA,
        help="Pack several conversations into one sequence, with attention within each; False pads each to a "
        "sequence of its own.",
    )
    eod_mask_loss: bool = option(
        False,
        TRAJECTORY,
        only_with="dataset.kind=text or huggingface or megatron or stream",
        help="Mask the loss at the token that ends a document, where the label is the first token of the next "
        "document. (The end token is still learned as a label.)",
    )
    reset_attention_mask: bool = option(
        False,
        TRAJECTORY,
        only_with="dataset.kind=text or huggingface or megatron or stream",
        help="Limit attention to documents and restart positions at each; a document includes its end token.",
    )
    split: str = option(
        "90,5,5",
        TRAJECTORY,
        effect=NEW_DATA,
        common=True,
        help="Shares of train, validation and test: contiguous ranges, of tokens (`text`, `huggingface`), of "
        "documents (`megatron`) or of conversations (`chat`). For `stream`, shares of its records, by a hash of each.",
    )
    stream_of: str = option(
        "text",
        TRAJECTORY,
        choices=("text", "chat"),
        only_with=_STREAM,
        effect=NEW_DATA,
        help="Records of a stream: text (`text_key`), packed into sequences | chat (the keys of `chat`).",
    )
    stream_window_bytes: int = option(
        4 << 20,
        TRAJECTORY,
        bound="> 0",
        only_with=_STREAM,
        effect=NEW_DATA,
        help="Bytes of consecutive records that are shuffled and packed together; the order of files is shuffled, too.",
    )
    stream_epoch_tokens: int | None = option(
        None,
        TRAJECTORY,
        bound="> 0",
        only_with=_STREAM,
        effect=NEW_DATA,
        help="Tokens of an epoch, rounded down to whole steps; the next epoch continues in the stream, and the stream "
        "starts over at its end. None: an epoch is one pass over the stream, whose length is unknown.",
    )
    stream_validation_paths: list[str] = option(
        [],
        SAFE,
        bound=PATH,
        only_with=_STREAM,
        help="Files to validate on, named as `paths`. Empty: the validation share of `split`, or the stream's own "
        "validation files.",
    )
    stream_validation_samples: int = option(
        512,
        SAFE,
        bound="> 0",
        only_with=_STREAM,
        help="Sequences of validation, and of test, that are read from the stream at the start and kept in memory.",
    )
    stream_skip_damaged: bool = option(
        False,
        SAFE,
        only_with=_STREAM,
        help="Leave out records that cannot be read, and warn of each; otherwise the run ends at the first.",
    )
    seq_length: int = option(
        256,
        TRAJECTORY,
        bound="> 0",
        effect=NEW_DATA,
        common=True,
        help="Tokens per training sequence, those of `model.seq_length`; set either, and the other follows.",
    )
    cache_dir: str | None = option(
        None,
        SAFE,
        bound=PATH,
        help="Where token files and downloaded data are cached; None is `$ONSTEP_CACHE` or the user's cache directory.",
    )
    shuffle: bool = option(
        True, TRAJECTORY, effect=NEW_ORDER, help="Shuffle each epoch, as a pure function of seed and epoch."
    )
    num_workers: int = option(
        2,
        SAFE,
        bound=">= 0 and at most 1,024",
        hf="dataloader_num_workers",
        common=True,
        help="Worker processes that load data; 0 loads in the training process.",
    )
    pin_memory: bool = option(
        True, SAFE, hf="dataloader_pin_memory", help="Load into pinned memory where there is a GPU."
    )
    persistent_workers: bool = option(
        True,
        SAFE,
        hf="dataloader_persistent_workers",
        help="Keep worker processes between epochs and between evaluations.",
    )
    prefetch_factor: int | None = option(
        None,
        SAFE,
        bound="> 0 and at most 10,000",
        hf="dataloader_prefetch_factor",
        needs="dataset.num_workers > 0",
        help="Micro-batches that each worker process reads ahead; None is torch's default, 2.",
    )
    multiprocessing_context: str | None = option(
        None,
        SAFE,
        choices=("fork", "spawn", "forkserver"),
        hf="dataloader_multiprocessing_context",
        needs="dataset.num_workers > 0",
        help="How worker processes are started: fork | spawn | forkserver; None is Python's default.",
    )


@dataclass
class TokenizerConfig(ConfigSection):
    """The tokenizer."""

    tokenizer_type: str = option(
        "bytes",
        INCOMPATIBLE,
        choices=("bytes", "bpe", "tokenizers", "huggingface"),
        common=True,
        help="Tokenizer: bytes | bpe (learned once from the corpus and kept in the run's directory) | tokenizers (a "
        "`tokenizer.json`) | huggingface (a local `transformers` tokenizer directory).",
    )
    tokenizer_model: str | None = option(
        None, TRAJECTORY, bound=PATH, common=True, help="Path of the tokenizer's file or directory."
    )
    vocab_size: int | None = option(
        None,
        INCOMPATIBLE,
        bound="> 0",
        help="Size of the vocabulary that `bpe` learns, including the 256 bytes and the end token; None is 8192.",
    )


@dataclass
class RNGConfig(ConfigSection):
    """Seeds of the random generators."""

    seed: int = option(
        1234,
        TRAJECTORY,
        bound=">= 0",
        effect="no effect on weights and dropout, whose state is loaded; where data_seed is unset, see there",
        hf="seed",
        common=True,
        help="Seed of weights and dropout.",
    )
    data_seed: int | None = option(
        None,
        TRAJECTORY,
        bound=">= 0",
        effect=NEW_ORDER,
        hf="data_seed",
        help="Seed of the order of samples; None is `seed`.",
    )
