"""Turns corpora into token files and datasets, and provides loaders whose position can be saved and resumed.

A corpus (`find_files`, `default_corpus_files`) becomes tokens (`build_tokenizer`, `learn_bpe`, `build_token_file`) and
sequences (`build_datasets`); Megatron's files are read directly (`IndexedFile`), and conversations become sequences
with a loss on the answers (`build_chat_file`, `PackedDataset`). Loaders pass the micro-batches of a step to the loop as
`StepBatches`: a `Loader` reads any source of rows, and is `TrainLoader` for a map-style dataset, `IterableLoader` for
an iterable one, `StreamLoader` for a `RecordStream` that is larger than the disk; `IteratorReader` reads a raw
iterator, `EvalLoader` an evaluation set; `as_step_source` adapts whatever a user passes to a `StepSource`.

Names are loaded on first use: the files of a corpus can be found without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.data.chat.dataset import ChatDataset, ChatFile, PackedDataset, build_chat_file
    from onstep.data.chat.records import ChatFiles, ChatKeys, ChatRows, ChatSource
    from onstep.data.chat.template import ChatTemplate, EncodedChat, PlainTemplate, TokenizerTemplate, template_for
    from onstep.data.corpus.bpe import learn_bpe
    from onstep.data.corpus.build_cache import default_cache_dir
    from onstep.data.corpus.documents import DocumentSource, iter_documents
    from onstep.data.corpus.indexed_file import IndexedFile, write_indexed_dataset
    from onstep.data.corpus.text_files import default_corpus_files, find_files
    from onstep.data.corpus.token_file import TokenFile, build_token_file
    from onstep.data.corpus.tokenizers import ByteTokenizer, Tokenizer, build_tokenizer, tokenizer_in_run
    from onstep.data.datasets import build_datasets, split_documents, split_tokens, tokenizer_source
    from onstep.data.loaders.collate import PaddingCollator, default_data_collator, is_map_style
    from onstep.data.loaders.epoch_orders import (
        EpochBatches,
        EpochOrders,
        OrderedBatches,
        OrderedSamples,
        OrderRandomness,
        ShuffledSampler,
    )
    from onstep.data.loaders.eval_loader import EvalLoader
    from onstep.data.loaders.iterable_loader import IterableLoader
    from onstep.data.loaders.listed_rows import ListedRows
    from onstep.data.loaders.loader import Loader, RowSource
    from onstep.data.loaders.sample_order import MicroBatchLayout, SampleOrder
    from onstep.data.loaders.step_batches import Batch, StepBatches, StepSource
    from onstep.data.loaders.step_source import ForeignReader, IteratorReader, as_step_source
    from onstep.data.loaders.train_loader import TrainLoader
    from onstep.data.streams.record_stream import RecordStream
    from onstep.data.streams.stream_loader import StreamLoader
    from onstep.data.token_dataset import BlendedDataset, Boundaries, TokenDataset

__all__ = [
    "Batch",
    "BlendedDataset",
    "Boundaries",
    "ByteTokenizer",
    "ChatDataset",
    "ChatFile",
    "ChatFiles",
    "ChatKeys",
    "ChatRows",
    "ChatSource",
    "ChatTemplate",
    "DocumentSource",
    "EncodedChat",
    "EpochBatches",
    "EpochOrders",
    "EvalLoader",
    "ForeignReader",
    "IndexedFile",
    "IterableLoader",
    "IteratorReader",
    "ListedRows",
    "Loader",
    "OrderRandomness",
    "OrderedBatches",
    "OrderedSamples",
    "PackedDataset",
    "PaddingCollator",
    "PlainTemplate",
    "RecordStream",
    "RowSource",
    "MicroBatchLayout",
    "SampleOrder",
    "ShuffledSampler",
    "StepBatches",
    "StepSource",
    "StreamLoader",
    "TokenDataset",
    "TokenFile",
    "Tokenizer",
    "TokenizerTemplate",
    "TrainLoader",
    "as_step_source",
    "build_chat_file",
    "build_datasets",
    "build_token_file",
    "build_tokenizer",
    "default_cache_dir",
    "default_corpus_files",
    "default_data_collator",
    "find_files",
    "is_map_style",
    "iter_documents",
    "learn_bpe",
    "split_documents",
    "split_tokens",
    "template_for",
    "tokenizer_in_run",
    "tokenizer_source",
    "write_indexed_dataset",
]

__getattr__, __dir__ = lazy_names(__name__)
