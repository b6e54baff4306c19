"""The scripts with the arguments that they are run with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Case:
    """A script, its arguments after the shared ones, and the class that loads what it trained."""

    script: str
    arguments: str
    model_class: str
    base: str = ""

    @property
    def path(self) -> Path:
        return SCRIPTS / f"{self.script}.py"

    def command_line(self, inputs: Path) -> list[str]:
        """The script's arguments; `{inputs}` is the directory of `write_inputs`."""
        return f"{_SHARED} {self.arguments}".format(inputs=inputs).split()


# "sequential", as the random order of each library is its own; nothing else here concerns the comparison
_SHARED = (
    "--output_dir out --do_train --do_eval --use_cpu --seed 7 --logging_steps 1 --save_steps 8 --learning_rate 0.01 "
    "--train_sampling_strategy sequential --report_to none"
)
_TEXT = "--text {inputs}/corpus"
_TEXT_FILES = "--train_file {inputs}/corpus_train.txt --validation_file {inputs}/corpus_validation.txt"


def _files(kind: str, test: bool = False) -> str:
    files = f"--train_file {{inputs}}/{kind}_train.json --validation_file {{inputs}}/{kind}_validation.json"
    return f"{files} --test_file {{inputs}}/{kind}_test.json --do_predict" if test else files


CASES = {
    "clm": Case(
        "run_clm",
        f"--weights {{inputs}}/causal {_TEXT} --num_train_epochs 2 --gradient_accumulation_steps 2 "
        "--warmup_steps 2 --lr_scheduler_type cosine --weight_decay 0.1 --save_total_limit 2",
        "AutoModelForCausalLM",
    ),
    # one batch of evaluation where batches differ in labels: Hugging Face weights them by samples
    "mlm": Case(
        "run_mlm",
        f"--weights {{inputs}}/encoder {_TEXT} --max_steps 16 --masked 0.3 --per_device_eval_batch_size 32",
        "AutoModelForMaskedLM",
    ),
    "classification": Case(
        "run_classification",
        "--weights {inputs}/encoder --rows {inputs}/reviews --do_predict --num_train_epochs 4 "
        "--eval_strategy epoch --save_strategy epoch --load_best_model_at_end --metric_for_best_model accuracy",
        "AutoModelForSequenceClassification",
    ),
    "ner": Case(
        "run_ner",
        f"--model_name_or_path {{inputs}}/encoder {_files('tags', test=True)} --max_steps 16 "
        "--per_device_eval_batch_size 16 --return_entity_level_metrics",
        "AutoModelForTokenClassification",
    ),
    "qa": Case(
        "run_qa",
        "--weights {inputs}/encoder --rows {inputs}/questions --do_predict --max_steps 24 "
        "--eval_strategy steps --eval_steps 12",
        "AutoModelForQuestionAnswering",
    ),
    "summarization": Case(
        "run_summarization",
        "--weights {inputs}/seq2seq --rows {inputs}/summaries --do_predict --max_steps 16 --optim adafactor "
        "--predict_with_generate --beams 2 --label_smoothing_factor 0.1",
        "AutoModelForSeq2SeqLM",
    ),
    "instruct": Case(
        "run_instruct",
        "--weights {inputs}/causal --tasks {inputs}/instructions.json --num_train_epochs 2 "
        "--gradient_accumulation_steps 2 --per_device_train_batch_size 4 --lr_scheduler_type cosine --warmup_steps 0.1",
        "AutoModelForCausalLM",
    ),
    "lora": Case(
        "run_lora",
        f"--weights {{inputs}}/causal {_TEXT} --max_steps 16 --gradient_checkpointing",
        "PeftModel",
        base="{inputs}/causal",
    ),
    "llava": Case(
        "run_llava",
        "--model_name_or_path {inputs}/llava --tokenizer_name {inputs}/causal --data_path {inputs}/pictures.json "
        "--image_path {inputs}/pictures.npy --num_train_epochs 2 --per_device_train_batch_size 4 "
        "--mm_projector_lr 0.05 --group_by_modality_length --weight_decay 0.1",
        "LlavaForConditionalGeneration",
    ),
    "distill": Case(
        "run_distill",
        f"--teacher_name_or_path {{inputs}}/causal {_TEXT_FILES} --max_steps 16 --temperature 3",
        "AutoModelForCausalLM",
    ),
    "weighted": Case(
        "run_weighted",
        f"--model_name_or_path {{inputs}}/encoder {_files('reviews')} --num_train_epochs 4 "
        "--eval_strategy epoch --save_strategy epoch --metric_for_best_model loss --load_best_model_at_end",
        "AutoModelForSequenceClassification",
    ),
    "weighted_function": Case(
        "run_weighted",
        f"--model_name_or_path {{inputs}}/encoder {_files('reviews')} --num_train_epochs 6 --loss_as_function "
        "--eval_strategy epoch --save_strategy best --metric_for_best_model balanced_accuracy "
        "--load_best_model_at_end --gradient_accumulation_steps 2",
        "AutoModelForSequenceClassification",
    ),
    "adversarial": Case(
        "run_adversarial",
        f"--model_name_or_path {{inputs}}/encoder {_files('reviews')} --num_train_epochs 4",
        "AutoModelForSequenceClassification",
    ),
}
