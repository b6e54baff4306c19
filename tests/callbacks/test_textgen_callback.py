"""Texts at the right steps, and a training that notices nothing of them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from onstep import Callback, Trainer, TrainingArguments, pretrain
from onstep.analysis.logs.samples_log import read_samples, samples_of_run
from onstep.callbacks.textgen_callback import TextgenCallback
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.models.generation.prompts import continue_prompts
from onstep.training.compute.undisturbed import preserve_state
from tests.support.resuming import Interrupted
from tests.support.small_models import qwen

PROMPTS = ["def ", "import"]


class Writer:
    def __init__(self) -> None:
        self.texts: list[tuple[str, str, int]] = []
        self.flushed = 0

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((tag, text, step))

    def flush(self) -> None:
        self.flushed += 1

    @property
    def steps(self) -> list[int]:
        return [step for _, _, step in self.texts]


class Weights(Callback):
    """Keeps the model's weights and what the random generators give next, when training has ended."""

    def on_train_end(self, context: Any) -> None:
        self.weights = {key: value.clone() for key, value in context.unwrapped_model.state_dict().items()}
        self.drawn = (torch.rand(2).tolist(), np.random.rand(), random.random())


def same(first: Weights, second: Weights) -> bool:
    equal = all(torch.equal(value, second.weights[key]) for key, value in first.weights.items())
    return equal and first.drawn == second.drawn


@pytest.fixture
def config(tiny_config: ConfigContainer) -> ConfigContainer:
    tiny_config.model.hidden_dropout = 0.1  # so that training draws random numbers
    tiny_config.validation.eval_interval = 2
    tiny_config.validation.eval_iters = 1
    tiny_config.validation.eval_after_training = False
    return tiny_config


def textgen(writer: Any, **options: Any) -> TextgenCallback:
    return TextgenCallback(writer, **{"prompts": PROMPTS, "max_new_tokens": 6, **options})


def test_the_text_after_an_evaluation_has_each_prompt_and_what_follows_it(config: ConfigContainer) -> None:
    writer = Writer()
    pretrain(config, callbacks=[textgen(writer)])
    assert writer.steps == [2, 4, 6, 8]
    assert {tag for tag, _, _ in writer.texts} == {"eval-text"}
    first, second = writer.texts[0][1].split("\n\n---\n\n")
    assert first.startswith("def  [START] ")
    assert second.startswith("import [START] ")
    assert writer.flushed == 4


def test_the_texts_of_a_run_are_repeated_by_the_next_and_differ_from_step_to_step(config: ConfigContainer) -> None:
    writer, callback = Writer(), None
    callback = textgen(writer)
    for _ in range(2):
        pretrain(config, callbacks=[callback])
    assert writer.texts[:4] == writer.texts[4:]
    assert len({text for _, text, _ in writer.texts}) == 4


@pytest.mark.parametrize(("every", "steps"), [(1, [2, 4, 6, 8]), (3, [2, 4, 6]), (4, [2, 4, 8]), (100, [2])])
def test_generation_waits_for_its_steps(every: int, steps: list[int], config: ConfigContainer) -> None:
    writer = Writer()
    pretrain(config, callbacks=[textgen(writer, generation_steps=every)])
    assert writer.steps == steps


def test_training_is_the_same_bit_for_bit_with_and_without(config: ConfigContainer) -> None:
    plain, watched = Weights(), Weights()
    pretrain(config, callbacks=[plain])
    pretrain(config, callbacks=[textgen(Writer()), watched])
    assert same(plain, watched)


def test_a_resumed_run_generates_when_the_first_one_would_have(config: ConfigContainer, tmp_path: Path) -> None:
    config.checkpoint.save, config.train.exit_interval = str(tmp_path / "saved"), 5
    writer = Writer()
    pretrain(config, callbacks=[textgen(writer, generation_steps=8)])
    config.train.exit_interval = None
    pretrain(config, callbacks=[textgen(writer, generation_steps=8)])
    assert writer.steps == [2, 8]


class DiesAt7(Callback):
    def on_step_end(self, context: Any) -> None:
        if context.step == 7:
            raise Interrupted


@pytest.fixture
def kept(config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    """Texts at 2, 4, 6 and 8 and a checkpoint at 4, in a directory with a record."""
    config.run.name, config.run.output_dir, config.run.save_weights = "run", str(tmp_path), False
    config.checkpoint.save_interval = 4
    return config


def texts_of(config: ConfigContainer) -> list[tuple[int, str, str]]:
    directory = Path(str(config.run.output_dir)) / str(config.run.name)
    return [(one.step, one.prompt, one.text) for one in samples_of_run(directory)]


def test_a_killed_run_has_each_text_once_in_its_record(kept: ConfigContainer, tmp_path: Path) -> None:
    pretrain(kept, callbacks=[textgen(Writer())])
    whole = texts_of(kept)
    assert [(step, prompt) for step, prompt, _ in whole] == [(s, p) for s in (2, 4, 6, 8) for p in PROMPTS]
    kept.run.name = "killed"
    with pytest.raises(Interrupted):
        pretrain(kept, callbacks=[textgen(Writer()), DiesAt7()])
    assert texts_of(kept) == whole[:6]
    pretrain(kept, callbacks=[textgen(Writer())])
    assert texts_of(kept) == whole
    in_file = read_samples(tmp_path / "killed" / "text_samples.jsonl")
    assert [one.step for one in in_file[::2]] == [2, 4, 6, 6, 8], "a second view, to which lines are only added"


class RollsBack(Callback):
    """Goes back from step 7 to 4, and stops the run after the next step."""

    def on_step_end(self, context: Any) -> None:
        if context.step == 7:
            context.control.rollback(to_step=4)
        elif context.state.train_state.num_rollbacks:
            context.control.stop("enough")


def test_a_rollback_leaves_out_the_texts_of_the_abandoned_steps(kept: ConfigContainer) -> None:
    pretrain(kept, callbacks=[textgen(Writer()), RollsBack()])
    assert [step for step, _, _ in texts_of(kept)] == [2, 2, 4, 4]


def test_without_a_writer_the_texts_are_logged(config: ConfigContainer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pretrain(config, callbacks=[textgen(None, generation_steps=100)])
    calls = [message for message in caplog.messages if message.startswith("eval-text at step 2:\n")]
    assert len(calls) == 1
    assert "def  [START] " in calls[0]


def test_the_texts_of_a_run_with_a_directory_are_kept_in_a_file(config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.logging_dir = str(tmp_path / "logs")
    writer = Writer()
    pretrain(config, callbacks=[textgen(writer, generation_steps=4)])
    samples = read_samples(tmp_path / "logs" / "text_samples.jsonl")
    assert [(one.step, one.prompt) for one in samples] == [(s, p) for s in writer.steps for p in PROMPTS]
    assert writer.texts[0][1] == "\n\n---\n\n".join(f"{one.prompt} [START] {one.text}" for one in samples[:2])
    assert samples[0].timestamp > 1.7e9


def test_a_run_that_starts_anew_keeps_the_texts_of_the_one_before(config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.logging_dir = str(tmp_path)
    for _ in range(2):
        pretrain(config, callbacks=[textgen(Writer(), generation_steps=100)])
    files = [read_samples(tmp_path / name) for name in ("text_samples.jsonl", "text_samples.1.jsonl")]
    assert [len(samples) for samples in files] == [2, 2]


def test_a_text_may_be_longer_than_the_sequences_that_were_trained_on(config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.logging_dir = str(tmp_path)
    config.model.position_embedding_type = "learned_absolute"
    length = 4 * config.model.seq_length
    pretrain(config, callbacks=[textgen(Writer(), generation_steps=100, max_new_tokens=length)])
    assert all(len(one.text) > length // 2 for one in read_samples(tmp_path / "text_samples.jsonl"))


def test_prompts_can_come_from_a_yaml_file(config: ConfigContainer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.yaml"
    path.write_text("- 'class '\n- |\n  two\n  lines\n", encoding="utf-8")
    assert TextgenCallback(None, str(path)).prompts == ["class ", "two\nlines\n"]
    assert TextgenCallback(None, path).prompts[0] == "class "


class FailingWriter(Writer):
    def add_text(self, tag: str, text: str, step: int) -> None:
        raise ConnectionError("gone")


def test_generation_that_fails_costs_a_warning_and_changes_nothing(
    config: ConfigContainer, caplog: pytest.LogCaptureFixture
) -> None:
    plain, watched = Weights(), Weights()
    pretrain(config, callbacks=[plain])
    pretrain(config, callbacks=[textgen(FailingWriter()), watched])
    assert same(plain, watched)
    assert [record.message for record in caplog.records if "no text" in record.message] == [
        f"no text was generated at step {step}: ConnectionError: gone" for step in (2, 4, 6, 8)
    ]
    assert caplog.text.count("Traceback") == 1


def test_generation_that_fails_can_end_the_run(config: ConfigContainer) -> None:
    callback = textgen(FailingWriter())
    callback.on_generation_error = "raise"
    with pytest.raises(ConnectionError):
        pretrain(config, callbacks=[callback])


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(1, 28, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 28, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def letters() -> Any:
    vocab = {"</s>": 0, **{letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ", start=1)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


def trainer(directory: Path, callbacks: list[Any], **options: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(directory),
        max_steps=6,
        per_device_train_batch_size=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        use_cpu=True,
    )
    options = {"model": gpt2(), "processing_class": letters(), **options}
    return Trainer(
        args=args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=callbacks, default_callbacks=False, **options
    )


def test_a_model_of_transformers_generates_and_trains_on_as_if_it_had_not(tmp_path: Path) -> None:
    writer, plain, watched = Writer(), Weights(), Weights()
    trainer(tmp_path / "a", [plain]).train()
    trainer(tmp_path / "b", [textgen(writer, prompts=["abc", "de"]), watched]).train()
    assert same(plain, watched)
    assert writer.steps == [2, 4, 6]
    assert all(text.startswith("abc [START] ") for _, text, _ in writer.texts)


class Broken(transformers.GPT2LMHeadModel):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.eval()
        torch.rand(5)
        self.seen = (self._compiled_call_impl, self.training)
        raise RuntimeError("out of luck")


def test_a_generate_that_raises_leaves_mode_compiled_forward_and_generators_as_they_were(
    make_state: Any, args: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Broken(gpt2().config).train()
    model.transformer.drop.eval()  # frozen by its user
    call = model._compiled_call_impl = lambda *inputs: inputs  # what model.compile() keeps
    before = torch.get_rng_state()
    callback = textgen(Writer())
    callback.on_evaluate(args, make_state(step=2), None, model=model, processing_class=letters())
    assert "out of luck" in caplog.text
    assert model.seen == (None, False)
    assert model._compiled_call_impl is call
    assert model.training
    assert not model.transformer.drop.training
    assert torch.equal(torch.get_rng_state(), before)


def test_every_generator_is_put_back_whatever_happens_inside() -> None:
    def draw() -> tuple[Any, ...]:
        return torch.rand(1).item(), np.random.rand(), random.random()

    model = torch.nn.Linear(1, 1)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    expected = draw()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    with contextlib.suppress(KeyError), preserve_state(model):
        draw()
        raise KeyError
    assert draw() == expected


class Pipeline:
    """A trainer that generates over the stages of a pipeline."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def pipeline_generate(self, input_ids: Any, **options: Any) -> Any:
        self.calls.append({"ids": input_ids.tolist(), **options})
        return torch.cat([input_ids, torch.tensor([[8, 9, 0]])], dim=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_pipeline_generation_of_a_trainer_is_called_on_every_rank(rank: int, make_state: Any, args: Any) -> None:
    writer, pipeline = Writer(), Pipeline()
    callback = textgen(writer, prompts=["ab", "c"], generation_config={"do_sample": True})
    state = make_state(step=3, rank=rank, num_processes=2)
    callback.on_evaluate(args, state, None, model=gpt2(), processing_class=letters(), trainer=pipeline)
    common = {"max_new_tokens": 6, "eos_token_id": 0, "pad_token_id": 0, "do_sample": True}
    assert pipeline.calls == [{"ids": [[1, 2]], **common}, {"ids": [[3]], **common}]
    assert writer.steps == ([3] if rank == 0 else [])


def test_only_rank_0_generates_and_all_ranks_remember_the_same_step(make_state: Any, args: Any) -> None:
    writers = [Writer(), Writer()]
    callbacks = [textgen(writer, generation_steps=5) for writer in writers]
    for rank, callback in enumerate(callbacks):
        state = make_state(step=7, rank=rank, num_processes=2)
        callback.on_evaluate(args, state, None, model=gpt2(), processing_class=letters())
    assert [len(writer.texts) for writer in writers] == [1, 0]
    assert [callback.state_dict() for callback in callbacks] == [{"next_gen_step": 10}] * 2


def test_a_model_or_run_that_cannot_generate_trains_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path / "a", [textgen(Writer())], processing_class=None).train()
    assert caplog.text.count("no text will be generated: there is no tokenizer") == 1


def test_options_that_our_transformer_does_not_have_are_refused_before_training(config: ConfigContainer) -> None:
    with pytest.raises(ConfigError, match="'num_beams' is not one of the built-in transformer's"):
        pretrain(config, callbacks=[textgen(Writer(), generation_config={"num_beams": 2})])


def test_values_that_our_transformer_cannot_work_with_are_refused_before_training(config: ConfigContainer) -> None:
    with pytest.raises(ConfigError, match="top_k must be >= 1, got -5"):
        pretrain(config, callbacks=[textgen(Writer(), generation_config={"top_k": -5, "do_sample": True})])


def test_options_that_transformers_does_not_have_are_refused_before_training(tmp_path: Path) -> None:
    run = trainer(tmp_path / "a", [textgen(Writer(), generation_config={"tempurature": 3})])
    with pytest.raises(ConfigError, match=r"'tempurature' is not one of .*mean 'temperature'"):
        run.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "prompts must be a non-empty list of strings"),
        ({"prompts": [1]}, "prompts must be a non-empty list of strings"),
        ({"prompts": "missing.yaml"}, "cannot read prompts file 'missing.yaml'"),
        ({"generation_config": [1]}, "generation_config must be a dictionary"),
        ({"generation_steps": 0}, "generation_steps must be an integer >= 1, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer >= 1, got 2.5"),
    ],
)
def test_arguments_of_another_kind_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        textgen(None, **options)


def test_a_yaml_file_without_a_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.yaml"
    path.write_text("prompts: [a]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prompts\.yaml' must be a non-empty list of strings"):
        TextgenCallback(None, str(path))


def test_the_defaults_are_the_documented_ones() -> None:
    callback = TextgenCallback(None, ["a"])
    assert callback.generation_config == {
        "do_sample": True,
        "top_k": 20,
        "temperature": 0.7,
        "repetition_penalty": 1.15,
    }
    assert (callback.generation_steps, callback.max_new_tokens) == (None, 200)


def test_a_prompt_that_is_longer_than_the_context_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Words:
        eos_token_id = 0

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1] * len(text)}

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "x" * len(ids)

    prompts = ["short", "long" * 20]  # 80 tokens, of 32 positions
    pairs = continue_prompts(qwen(), Words(), prompts, {}, max_new_tokens=12, seed=0)
    assert [prompt for prompt, _ in pairs] == prompts
    assert "1 of 2 prompts are longer than the 20 tokens that max_new_tokens=12 leaves of 32 positions" in caplog.text


LINKS = itertools.pairwise("abcdefghi")
BILLION_LAUGHS = "- &a [x, x]\n" + "".join(f"- &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in LINKS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [x]\nb: &b [*a, *a]\n", "must be a non-empty list of strings, got dict"),
        (BILLION_LAUGHS, "got list as item 1"),
        ("&a [*a]", "got list as item 1"),
        ("- " * 3000, "maximum recursion depth"),
        ("- !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("- " + "9" * 10_000, "Exceeds the limit"),
        ("- 0x" + "f" * 10_000, "got int as item 1; put it in quotes"),
        ("- 2024-99-99", "month must be in 1"),
        ("- !!timestamp x", "cannot read prompts file"),
        ("- x\n" * (1 << 18) + "-", "bytes, and at most 1,048,576 are read"),
    ],
)
def test_a_hostile_prompts_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prompts.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        TextgenCallback(None, path)
    assert len(str(caught.value)) < 1000
