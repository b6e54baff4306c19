"""Data: corpora to token files, datasets, and loaders whose position can be saved and continued.

A corpus (`find_files`, `default_corpus_files`) becomes tokens (`build_tokenizer`, `learn_bpe`, `build_token_file`) and
sequences (`build_datasets`); Megatron's files are read as they are (`IndexedFile`), and conversations become sequences
with a loss on the answers (`build_chat_file`, `PackedDataset`). Loaders hand a step's micro-batches to the loop as
`StepBatches`: `TrainLoader` for datasets with an index, `IterableLoader` for those without, `IteratorReader` for a raw
iterator, `EvalLoader` for evaluation; `as_step_source` makes a `StepSource` of whatever a user gives.
"""

from onstep.data.bpe import learn_bpe
from onstep.data.build import build_datasets, split_documents, split_tokens, tokenizer_source
from onstep.data.chat_dataset import ChatDataset, ChatFile, PackedDataset, build_chat_file
from onstep.data.chat_records import ChatFiles, ChatKeys, ChatRows, ChatSource
from onstep.data.chat_template import EncodedChat, PlainTemplate, TokenizerTemplate, template_for
from onstep.data.corpus import DocumentSource, default_corpus_files, find_files, iter_documents
from onstep.data.eval_loader import EvalLoader
from onstep.data.fetch import PaddingCollator, default_data_collator, is_map_style
from onstep.data.indexed_file import IndexedFile, write_indexed_dataset
from onstep.data.loader import TrainLoader
from onstep.data.made_once import default_cache_dir
from onstep.data.order import RowLayout, SampleOrder
from onstep.data.step_batches import Batch, StepBatches, StepSource
from onstep.data.step_source import ForeignReader, IteratorReader, as_step_source
from onstep.data.stream import IterableLoader
from onstep.data.token_dataset import BlendedDataset, Boundaries, TokenDataset
from onstep.data.token_file import TokenFile, build_token_file
from onstep.data.tokenizers import ByteTokenizer, Tokenizer, build_tokenizer, tokenizer_in_run

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
    "DocumentSource",
    "EncodedChat",
    "EvalLoader",
    "ForeignReader",
    "IndexedFile",
    "IterableLoader",
    "IteratorReader",
    "PackedDataset",
    "PaddingCollator",
    "PlainTemplate",
    "RowLayout",
    "SampleOrder",
    "StepBatches",
    "StepSource",
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
