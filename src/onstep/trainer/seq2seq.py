"""`Seq2SeqTrainer`: a Trainer whose evaluations generate text, with the interface of Hugging Face's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from onstep.config import Seq2SeqTrainingArguments
from onstep.config.hf.seq2seq import check_generation
from onstep.data import Batch
from onstep.errors import ConfigError
from onstep.record.kinds import Metrics
from onstep.trainer.predictions import PredictionOutput
from onstep.trainer.trainer import Trainer


class Lengths(Protocol):
    """The limits of a generation config."""

    max_length: int
    max_new_tokens: int | None


class Seq2SeqTrainer(Trainer):
    """A `Trainer` whose predictions are generated token ids if `args.predict_with_generate` is set.

    The arguments are those of `Trainer`; `args` are `Seq2SeqTrainingArguments`, Onstep's or Hugging Face's.

    Args:
        kwargs: the arguments of `Trainer`.

    Raises:
        ConfigError: as `Trainer`; for other arguments.
        ValueError: for an invalid generation config.
    """

    args: Seq2SeqTrainingArguments
    _evaluation_weighting = "batches"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_generation(self.args)
        self._gen_kwargs: dict[str, object] = {}
        """Arguments of `generate` in the evaluation in progress."""
        given = self.args.generation_config
        if given is not None:
            self._use_generation_config(self.load_generation_config(given))

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> object:
        """A copy of a `GenerationConfig`, or the one of a file, a directory or a name, checked strictly.

        Args:
            gen_config_arg: a `GenerationConfig`, its file or directory, or a model's name.

        Raises:
            ValueError: if it could not be saved with the model.
        """
        from transformers import GenerationConfig

        if isinstance(gen_config_arg, GenerationConfig):
            config = copy.deepcopy(gen_config_arg)
        elif Path(gen_config_arg).is_file():
            path = Path(gen_config_arg)
            config = GenerationConfig.from_pretrained(path.parent, path.name)
        else:
            config = GenerationConfig.from_pretrained(gen_config_arg)
        config.validate(strict=True)
        return config

    def evaluate(
        self,
        eval_dataset: object = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: object,
    ) -> Metrics:
        """As `Trainer.evaluate`; `max_length`, `num_beams` and further keywords are passed to `generate`.

        Args:
            ignore_keys: the keys of the model's outputs that are not gathered; None for
                `model.config.keys_to_ignore_at_inference`.
            metric_key_prefix: what the names of the metrics begin with, before an underscore.
            gen_kwargs: keywords of the model's `generate`.
        """
        with self._generating(gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: object,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: object,
    ) -> PredictionOutput:
        """As `Trainer.predict`; `max_length`, `num_beams` and further keywords are passed to `generate`.

        Args:
            test_dataset: the samples to predict, as the model's inputs; labels may be absent.
            ignore_keys: the keys of the model's outputs that are not gathered; None for
                `model.config.keys_to_ignore_at_inference`.
            metric_key_prefix: what the names of the metrics begin with, before an underscore.
            gen_kwargs: keywords of the model's `generate`.
        """
        with self._generating(gen_kwargs):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: object,
    ) -> tuple[Tensor | None, object, object]:
        """The loss, generated ids and labels of one batch, padded to the length of the generation config.

        Args:
            model: the module in eval mode.
            inputs: one micro-batch as the collator returned it, with `labels` by name; it is moved to the device here.
            prediction_loss_only: whether only the loss is returned, without outputs and labels.
            ignore_keys: the keys of the model's outputs that are not gathered; None for
                `model.config.keys_to_ignore_at_inference`.
            gen_kwargs: keywords of the model's `generate`.
        """
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        inputs = self._placed(inputs)
        labels = inputs.get("labels")
        with torch.no_grad():
            generated = self._generate(inputs, gen_kwargs or self._gen_kwargs)
        loss = None if labels is None else super().prediction_step(model, inputs, True)[0]
        return loss, self._padded(generated), None if labels is None else self._padded(labels)

    def _generate(self, inputs: Batch, gen_kwargs: dict[str, object]) -> Tensor:
        module: Any = self.model
        asked = {name: value for name, value in gen_kwargs.items() if value is not None}
        decoded, labels = inputs.get("decoder_input_ids"), inputs.get("labels")
        if decoded is not None and labels is not None and decoded.shape == labels.shape:
            # a collator made them from the labels: generation would continue the answer
            made = ("decoder_input_ids", "decoder_attention_mask")
            inputs = {name: value for name, value in inputs.items() if name not in made}
        own, lengths = module.generation_config, ("max_length", "max_new_tokens")
        has_length = any(name in asked or getattr(own, name) is not None for name in lengths)
        if not has_length and module.config.is_encoder_decoder:
            asked["max_length"] = self._whole_generation_config().max_length
        generated: Tensor = module.generate(**inputs, **asked)
        return generated

    def _padded(self, ids: Tensor) -> Tensor:
        """Rows of ids, filled up to the length of the generation config so that batches can be joined."""
        config, width = self._whole_generation_config(), ids.shape[-1]
        if width < config.max_length:
            return self._pad_tensors_to_max_len(ids, config.max_length)
        if config.max_new_tokens is not None and width < config.max_new_tokens + 1:
            return self._pad_tensors_to_max_len(ids, config.max_new_tokens + 1)
        return ids

    def _whole_generation_config(self) -> Lengths:
        """A copy of the model's generation config, with transformers' defaults where it has no value."""
        module: Any = self.model
        config = copy.deepcopy(module.generation_config)
        config.update(**config._get_default_generation_params(), defaults_only=True)
        lengths: Lengths = config
        return lengths

    def _pad_tensors_to_max_len(self, tensor: Tensor, max_length: int) -> Tensor:
        pad = _padding_of(self.processing_class)
        if pad is None:
            pad = getattr(getattr(self.model, "config", None), "pad_token_id", None)
        if pad is None:
            raise ConfigError(
                "Seq2SeqTrainer pads generated rows to one length, and neither processing_class nor model.config has a "
                "pad_token_id; set model.config.pad_token_id."
            )
        padded = tensor.new_full((tensor.shape[0], max_length), pad)
        padded[:, : tensor.shape[-1]] = tensor
        return padded

    @contextmanager
    def _generating(self, gen_kwargs: dict[str, object]) -> Iterator[None]:
        """Pass these keywords to `generate` in the block; those of `args` apply where nothing else says so.

        In a dict of evaluation sets each is evaluated by a call of its own, within the block of the first.
        """
        args = self.args
        before = self._gen_kwargs
        asked = {**before, **gen_kwargs}
        if asked.get("max_length") is None and asked.get("max_new_tokens") is None:
            asked["max_length"] = args.generation_max_length
        if asked.get("num_beams") is None:
            asked["num_beams"] = args.generation_num_beams
        self._gen_kwargs = asked
        try:
            yield
        finally:
            self._gen_kwargs = before

    def _use_generation_config(self, config: Any) -> None:
        """Give the model this generation config, now or when `model_init` makes one."""
        if self.model is not None:
            self.model.generation_config = config
            return
        make = self.model_init
        assert make is not None

        @functools.wraps(make)
        def configured(*args: object) -> nn.Module:
            model: Any = make(*args)
            model.generation_config = copy.deepcopy(config)
            return model  # type: ignore[no-any-return]

        self.model_init = configured


def _padding_of(processing_class: Any) -> int | None:
    """The id that a tokenizer pads with, else that of the end of a text."""
    if not hasattr(processing_class, "pad_token_id"):
        return None
    pad: int | None = processing_class.pad_token_id
    return processing_class.eos_token_id if pad is None else pad
