"""Data: corpora to token files, datasets, and loaders whose position can be saved and continued.

A corpus (`find_files`, `default_corpus_files`) becomes tokens (`build_tokenizer`, `build_token_file`) and sequences
(`build_datasets`). Loaders hand a step's micro-batches to the loop as `StepBatches`: `TrainLoader` for datasets with an
index, `IterableLoader` for those without, `IteratorReader` for a raw iterator, `EvalLoader` for evaluation.
"""

from onstep.data.collate import PaddingCollator, default_data_collator
from onstep.data.corpus import default_corpus_files, find_files, iter_documents
from onstep.data.eval_loader import EvalLoader
from onstep.data.fetch import is_map_style
from onstep.data.iterable_loader import IterableLoader
from onstep.data.iterator_reader import IteratorReader
from onstep.data.loader import TrainLoader
from onstep.data.order import SampleOrder
from onstep.data.rows import RowLayout
from onstep.data.step_batches import StepBatches, StepSource
from onstep.data.token_build import build_token_file, default_cache_dir
from onstep.data.token_dataset import TokenDataset, build_datasets, split_tokens
from onstep.data.token_file import TokenFile
from onstep.data.tokenizers import ByteTokenizer, Tokenizer, build_tokenizer

__all__ = [
    "ByteTokenizer",
    "EvalLoader",
    "IterableLoader",
    "IteratorReader",
    "PaddingCollator",
    "RowLayout",
    "SampleOrder",
    "StepBatches",
    "StepSource",
    "TokenDataset",
    "TokenFile",
    "Tokenizer",
    "TrainLoader",
    "build_datasets",
    "build_token_file",
    "build_tokenizer",
    "default_cache_dir",
    "default_corpus_files",
    "default_data_collator",
    "find_files",
    "is_map_style",
    "iter_documents",
    "split_tokens",
]
