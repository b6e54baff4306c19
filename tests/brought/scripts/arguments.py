"""The arguments that several of the examples declare, and what is read by them: configurations, tokenizers, data."""

from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer

READERS = {"txt": "text", "jsonl": "json"}
"""The builders of file types whose names differ."""


def described(text, default=None, **metadata):
    return field(default=default, metadata={"help": text, **metadata})


@dataclass
class ModelArguments:
    """Where the pretrained parts come from."""

    model_name_or_path: str | None = described("Directory or name of the model.")
    config_name: str | None = described("Directory or name of the configuration, if it is another.")
    tokenizer_name: str | None = described("Directory or name of the tokenizer, if it is another.")
    cache_dir: str | None = described("Directory of downloads.")
    model_revision: str = described("Branch, tag or commit of the model.", "main")
    token: str | None = described("Bearer token for files that are not public.")
    trust_remote_code: bool = described("Whether code of the hub may be executed.", False)

    def source(self, **more):
        """The keywords of each `from_pretrained`."""
        same = {"cache_dir": self.cache_dir, "revision": self.model_revision, "token": self.token}
        return {**same, "trust_remote_code": self.trust_remote_code, **more}

    def config(self, **more):
        return AutoConfig.from_pretrained(self.config_name or self.model_name_or_path, **self.source(**more))

    def tokenizer(self, **more):
        return AutoTokenizer.from_pretrained(self.tokenizer_name or self.model_name_or_path, **self.source(**more))

    def pretrained(self, auto_class, config, **more):
        return auto_class.from_pretrained(self.model_name_or_path, config=config, **self.source(**more))


@dataclass
class FastTokenizerArguments(ModelArguments):
    """Examples that still let the user choose a tokenizer written in Python."""

    use_fast_tokenizer: bool = described("Whether to use a tokenizer of the tokenizers library.", True)

    def tokenizer(self, **more):
        return super().tokenizer(use_fast=self.use_fast_tokenizer, **more)


@dataclass
class HeadArguments(FastTokenizerArguments):
    """Examples that put a new head on a model."""

    ignore_mismatched_sizes: bool = described("Whether a head of other sizes is replaced.", False)


@dataclass
class LanguageModelArguments(FastTokenizerArguments):
    """Examples that also start from random weights."""

    model_type: str | None = described(f"Architecture of a new model, one of {len(CONFIG_MAPPING)}, such as gpt2.")
    config_overrides: str | None = described("Fields of the new configuration: n_embd=10,resid_pdrop=0.2 and so on.")
    low_cpu_mem_usage: bool = described("Whether to build the model only when its weights are read.", False)
    torch_dtype: str | None = described("Former name of dtype.", choices=["auto", "bfloat16", "float16", "float32"])
    dtype: str | None = described("Type of the weights.", choices=["auto", "bfloat16", "float16", "float32"])

    def __post_init__(self):
        if self.config_overrides is not None and (self.config_name or self.model_name_or_path):
            raise ValueError("--config_overrides changes a new configuration: drop --config_name, --model_name_or_path")

    def config(self, **more):
        if self.config_name or self.model_name_or_path:
            return super().config(**more)
        config = CONFIG_MAPPING[self.model_type]()
        if self.config_overrides is not None:
            config.update_from_string(self.config_overrides)
        return config

    def tokenizer(self, **more):
        if not (self.tokenizer_name or self.model_name_or_path):
            raise ValueError("a new tokenizer has to be trained first: name one with --tokenizer_name")
        return super().tokenizer(**more)

    def model(self, auto_class, config, **more):
        """Pretrained weights, or random ones; with a row of the embedding for each token."""
        if self.model_name_or_path:
            model = self.pretrained(auto_class, config, dtype=self.dtype or self.torch_dtype, **more)
        else:
            model = auto_class.from_config(config, trust_remote_code=self.trust_remote_code, **more)
            distinct = {weight.data_ptr(): weight.numel() for weight in model.parameters()}
            print(f"a new model of {sum(distinct.values()):,} parameters")
        return model


@dataclass
class DataArguments:
    """Which rows are read, and how many."""

    dataset_name: str | None = described("Name of a dataset of the hub.")
    dataset_config_name: str | None = described("Which of its configurations.")
    train_file: str | None = described("File of the rows to train on.")
    validation_file: str | None = described("File of the rows to evaluate on.")
    overwrite_cache: bool = described("Whether rows are prepared again.", False)
    preprocessing_num_workers: int | None = described("Processes that prepare rows.")
    max_train_samples: int | None = described("At most so many rows are trained on.")
    max_eval_samples: int | None = described("At most so many rows are evaluated on.")

    def files(self):
        named = {"train": self.train_file, "validation": self.validation_file}
        return {part: name for part, name in named.items() if name is not None}

    def read(self, model_args, streaming=False, validation_percentage=None, **options) -> DatasetDict:
        """All parts; the first percents of the training rows are the validation rows if there are none."""
        source = {"cache_dir": model_args.cache_dir, "token": model_args.token, "streaming": streaming}
        if self.dataset_name is not None:
            source.update(path=self.dataset_name, name=self.dataset_config_name)
        else:
            files = self.files()
            if not files:
                raise ValueError("nothing to read: name --dataset_name, or files such as --train_file")
            kind = Path(next(iter(files.values()))).suffix.removeprefix(".")
            source.update(path=READERS.get(kind, kind), data_files=files, **options)
        parts = load_dataset(**source)
        if validation_percentage and "validation" not in parts:
            if streaming:
                raise ValueError("a stream cannot be split: name --validation_file")
            for part, where in (
                ("validation", f"[:{validation_percentage}%]"),
                ("train", f"[{validation_percentage}%:]"),
            ):
                parts[part] = load_dataset(**source, split=f"train{where}")
        return parts

    def preparing(self, description):
        """The keywords of `map`."""
        reads = {"num_proc": self.preprocessing_num_workers, "load_from_cache_file": not self.overwrite_cache}
        return {"batched": True, "desc": description, **reads}

    def limit(self, part):
        return {"train": self.max_train_samples, "validation": self.max_eval_samples}.get(part)

    def first(self, parts, part):
        """The rows of a part, up to the limit."""
        if part not in parts:
            raise ValueError(f"no rows for {part}: the parts are {', '.join(parts)}")
        rows, most = parts[part], self.limit(part)
        if most is None:
            return rows
        return rows.select(range(min(most, len(rows)))) if isinstance(rows, Dataset) else rows.take(most)


@dataclass
class PredictingDataArguments(DataArguments):
    """Examples that also predict."""

    test_file: str | None = described("File of the rows to predict.")
    max_predict_samples: int | None = described("At most so many rows are predicted.")

    def files(self):
        return {**super().files(), **({"test": self.test_file} if self.test_file is not None else {})}

    def limit(self, part):
        return self.max_predict_samples if part == "test" else super().limit(part)


@dataclass
class CorpusArguments(DataArguments):
    """Examples that train on running text."""

    validation_split_percentage: int | None = described("Percents of the training rows to evaluate on.", 5)


@dataclass
class BlockArguments(CorpusArguments):
    """Examples whose rows are blocks of the text, whatever its lines are."""

    streaming: bool = described("Whether to read the rows while training.", False)
    block_size: int | None = described("Tokens of a row.")
    keep_linebreaks: bool = described("Whether the lines of a text file keep their ends.", True)

    def texts(self, model_args):
        is_text = (self.train_file or self.validation_file or "").endswith(".txt")
        options = {"keep_linebreaks": self.keep_linebreaks} if is_text else {}
        return self.read(model_args, self.streaming, self.validation_split_percentage, **options)


@dataclass
class LineArguments(CorpusArguments):
    """Examples whose rows are lines, if the user wants that."""

    line_by_line: bool = described("Whether each line is a row.", False)
    pad_to_max_length: bool = described("Whether lines are padded to the same length.", False)
