"""`Seq2SeqTrainer`: generated predictions, those of `transformers.Seq2SeqTrainer` for the same weights and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from onstep import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments
from onstep.errors import ConfigError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using the model-agnostic default.*:UserWarning"),
]

PAD, END, WORDS = 0, 1, 20


def t5(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=PAD,
        initializer_factor=3.0,  # or all ids are the same
    )
    return transformers.T5ForConditionalGeneration(config)


def bart(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in LAYERS.items()}
    config = transformers.BartConfig(
        vocab_size=WORDS,
        d_model=16,
        max_position_embeddings=40,
        pad_token_id=PAD,
        bos_token_id=2,
        eos_token_id=END,
        decoder_start_token_id=END,
        forced_eos_token_id=END,
        init_std=0.5,
        **sizes,
    )
    return transformers.BartForConditionalGeneration(config)


LAYERS = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}


def rows(count: int = 8) -> list[dict[str, list[int]]]:
    """Reversing three words; all labels are trained on."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(3, WORDS, (count, 3), generator=generator).tolist()
    return [{"input_ids": [*row, END], "attention_mask": [1] * 4, "labels": [*row[::-1], END]} for row in words]


def exact(prediction: Any) -> dict[str, float]:
    """Metrics over generated ids."""
    ids, labels = prediction
    width = min(ids.shape[1], labels.shape[1])
    return {"length": float((ids != PAD).sum(-1).mean()), "same": float((ids[:, :width] == labels[:, :width]).mean())}


def options_of(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "train_sampling_strategy": "sequential",
        "predict_with_generate": True,
        **options,
    }


def ours(model: Any, tmp_path: Path, **options: Any) -> Seq2SeqTrainer:
    further = {name: options.pop(name) for name in ("processing_class",) if name in options}
    args = Seq2SeqTrainingArguments(
        **options_of(tmp_path / "ours", **options), config_overrides={"run.save_weights": False}
    )
    return Seq2SeqTrainer(
        model,
        args,
        train_dataset=rows(),
        eval_dataset=rows(),
        compute_metrics=exact,
        default_callbacks=False,
        **further,
    )


def theirs(model: Any, tmp_path: Path, **options: Any) -> Any:
    args = transformers.Seq2SeqTrainingArguments(**options_of(tmp_path / "theirs", save_strategy="no", **options))
    trainer = transformers.Seq2SeqTrainer(model, args, train_dataset=rows(), eval_dataset=rows(), compute_metrics=exact)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize(
    ("options", "gen_kwargs"),
    [
        ({}, {}),
        ({"generation_max_length": 7}, {}),
        ({"generation_num_beams": 2, "generation_max_length": 30}, {}),
        ({"generation_max_length": 7}, {"max_length": 9, "num_beams": 3}),
        ({}, {"max_new_tokens": 25}),
        ({"predict_with_generate": False}, {}),
    ],
)
def test_predictions_and_metrics_are_those_of_transformers(
    tmp_path: Path, make: Any, options: dict[str, Any], gen_kwargs: dict[str, Any]
) -> None:
    mine, their = ours(make(), tmp_path, **options), theirs(make(), tmp_path, **options)
    if not options.get("predict_with_generate", True):  # logits, and the metrics are of ids
        mine.compute_metrics = their.compute_metrics = None
    elif not options:
        their.predict(rows(4))  # its very first batch has one id more, then it writes its default to the model
    found, expected = mine.evaluate(**gen_kwargs), their.evaluate(**gen_kwargs)
    names = [name for name in expected if name.endswith(("loss", "length", "same"))]
    assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-5)
    output, reference = mine.predict(rows(5), **gen_kwargs), their.predict(rows(5), **gen_kwargs)
    np.testing.assert_array_equal(output.label_ids, reference.label_ids)
    pairs = [(output.predictions, reference.predictions)]
    if isinstance(reference.predictions, tuple):
        pairs = list(zip(output.predictions, reference.predictions, strict=True))
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [t5, bart])
def test_a_run_with_generation_in_its_evaluations_is_that_of_transformers(tmp_path: Path, make: Any) -> None:
    options: dict[str, Any] = {"eval_strategy": "epoch", "generation_max_length": 6, "logging_steps": 1}
    mine, their = ours(make(), tmp_path, **options), theirs(make(), tmp_path, **options)
    for trainer in (mine, their):  # dropout draws other numbers
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        for name in ("dropout", "dropout_rate", "attention_dropout", "activation_dropout"):
            for module in trainer.model.modules():
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        trainer.train()

    def values(trainer: Any, *names: str) -> list[float]:
        return [record[name] for record in trainer.state.log_history for name in names if name in record]

    evaluated = ("eval_loss", "eval_same", "eval_length")
    assert values(mine, "loss") == pytest.approx(values(their, "loss"), rel=1e-4)
    assert values(mine, *evaluated) == pytest.approx(values(their, *evaluated), rel=1e-4)
    assert len(values(mine, *evaluated)) == 6


def test_every_set_of_a_dict_is_generated_with_the_same_arguments(tmp_path: Path) -> None:
    trainer = ours(t5(), tmp_path)
    asked: list[int] = []
    generate = trainer.model.generate  # type: ignore[union-attr, operator]

    def noted(*args: Any, max_length: int, **kwargs: Any) -> Any:
        asked.append(max_length)
        return generate(*args, max_length=max_length, **kwargs)

    trainer.model.generate = noted  # type: ignore[union-attr, assignment]
    metrics = trainer.evaluate({"a": rows(4), "b": rows(5)}, max_length=6)
    assert set(asked) == {6}
    assert metrics.keys() >= {"eval_a_length", "eval_b_length"}


def test_a_generation_config_replaces_the_models_and_may_be_a_directory(tmp_path: Path) -> None:
    given = transformers.GenerationConfig(max_length=5, decoder_start_token_id=PAD, eos_token_id=END, pad_token_id=PAD)
    given.save_pretrained(tmp_path / "saved")
    predictions = [
        ours(t5(), tmp_path, generation_config=config).predict(rows(3)).predictions
        for config in (given, str(tmp_path / "saved"), str(tmp_path / "saved" / "generation_config.json"))
    ]
    assert predictions[0].shape == (3, 5)
    for one in predictions[1:]:
        np.testing.assert_array_equal(one, predictions[0])
    args = Seq2SeqTrainingArguments(generation_config=given)
    assert args.to_dict()["generation_config"]["max_length"] == 5


def test_a_model_from_model_init_has_the_generation_config_too(tmp_path: Path) -> None:
    given = transformers.GenerationConfig(max_length=5, decoder_start_token_id=PAD, eos_token_id=END, pad_token_id=PAD)
    args = Seq2SeqTrainingArguments(**options_of(tmp_path, generation_config=given))
    trainer = Seq2SeqTrainer(None, args, model_init=t5, default_callbacks=False)
    assert trainer.predict(rows(3)).predictions.shape == (3, 5)


def test_a_set_without_labels_is_generated_for(tmp_path: Path) -> None:
    unlabelled = [{key: row[key] for key in ("input_ids", "attention_mask")} for row in rows(3)]
    mine, their = (make(bart(), tmp_path, generation_max_length=6).predict(unlabelled) for make in (ours, theirs))
    np.testing.assert_array_equal(mine.predictions, their.predictions)
    assert mine.label_ids is None
    assert "test_loss" not in mine.metrics


def test_decoder_inputs_that_a_collator_made_from_labels_do_not_start_the_answer(tmp_path: Path) -> None:
    def shifted(samples: list[Any]) -> dict[str, Tensor]:
        batch = {key: torch.tensor([sample[key] for sample in samples]) for key in ("input_ids", "labels")}
        return {**batch, "decoder_input_ids": batch["labels"].roll(1, -1)}

    with_inputs, without = ours(t5(), tmp_path), ours(t5(), tmp_path)
    with_inputs.data_collator = shifted
    np.testing.assert_array_equal(with_inputs.predict(rows(3)).predictions, without.predict(rows(3)).predictions)


def test_a_prediction_step_of_a_script_passes_keywords_of_its_own(tmp_path: Path) -> None:
    class Short(Seq2SeqTrainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().prediction_step(*args, **kwargs, max_length=5)

    args = Seq2SeqTrainingArguments(**options_of(tmp_path))
    predictions = Short(t5(), args, default_callbacks=False).predict(rows(2)).predictions
    assert predictions.shape == (2, 20)
    assert (predictions[:, 5:] == PAD).all()


def test_other_arguments_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="requires Seq2SeqTrainingArguments as args, got TrainingArguments"):
        Seq2SeqTrainer(t5(), TrainingArguments(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"sortish_sampler=True is not supported.*group_by_length"):
        Seq2SeqTrainingArguments(sortish_sampler=True)
    with pytest.raises(ConfigError, match="sortish_sampler=True"):
        Seq2SeqTrainer(t5(), transformers.Seq2SeqTrainingArguments(str(tmp_path), sortish_sampler=True, use_cpu=True))
    with pytest.raises(ConfigError, match="generation_num_beams=0 must be an integer >= 1"):
        Seq2SeqTrainingArguments(generation_num_beams=0)
    with pytest.raises(ConfigError, match="has no argument 'generation_beams'"):
        Seq2SeqTrainingArguments(generation_beams=2)  # type: ignore[call-arg]


def test_arguments_of_transformers_are_used_as_they_are(tmp_path: Path) -> None:
    args = transformers.Seq2SeqTrainingArguments(**options_of(tmp_path, generation_max_length=6))
    trainer = Seq2SeqTrainer(t5(), args, default_callbacks=False)
    asked = trainer.predict(rows(2)).predictions
    np.testing.assert_array_equal(asked, ours(t5(), tmp_path, generation_max_length=6).predict(rows(2)).predictions)


def test_the_argument_parser_of_transformers_reads_them() -> None:
    parser = transformers.HfArgumentParser(Seq2SeqTrainingArguments)  # type: ignore[arg-type]
    words = ["--predict_with_generate", "--generation_max_length", "9", "--generation_config", "some/dir"]
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "x", *words, "--num_train_epochs", "2"])
    assert (args.predict_with_generate, args.generation_max_length, args.generation_num_beams) == (True, 9, None)
    assert (args.generation_config, args.sortish_sampler, args.num_train_epochs) == ("some/dir", False, 2)
