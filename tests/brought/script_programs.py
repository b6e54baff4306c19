"""Scripts of our own: those that do what transformers' examples do, and users of libraries that stand on Trainer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.brought.programs import Program

SCRIPTS = Path(__file__).parent / "scripts"

# "sequential", as the random order of each library is its own; save and log often, for the kills. Models have dropout,
# except where batches are drawn too: transformers' Trainer draws the next one before it trains on this one.
_SHARED = (
    "--do_train --do_eval --use_cpu --seed 7 --logging_steps 1 --save_steps 4 --learning_rate 0.01 "
    "--train_sampling_strategy sequential --report_to none"
)
_TEXT = "--train_file {here}/examples/corpus_train.txt --validation_file {here}/examples/corpus_validation.txt"
_LANGUAGE = f"{_TEXT} --block_size 16 --per_device_train_batch_size 4 --gradient_accumulation_steps 2"
# AdamW makes full steps of gradients that are zero but for rounding, such as that of the bias of keys
_STEADY = "--adam_epsilon 1e-4"
_SENTENCES = (
    "--model {here}/examples/bert --use_cpu --seed 7 --logging_steps 1 --save_steps 4 --learning_rate 0.01 "
    "--report_to none --num_train_epochs 3 --per_device_train_batch_size 8 --warmup_steps 2"
)


def _model(name: str) -> str:
    return f"--model_name_or_path {{here}}/examples/{name}"


def _rows(kind: str) -> str:
    files = " ".join(f"--{part}_file {{here}}/examples/{kind}_{part}.json" for part in ("train", "validation", "test"))
    return f"{files} --do_predict"


def _example(script: str, *arguments: str, name: str = "", **options: Any) -> Program:
    words = " ".join((_SHARED, *arguments)).split()
    return Program(name or script, (str(SCRIPTS / f"{script}.py"),), words, **options)


def _user(name: str, script: str, *arguments: str, needs: Iterable[str], **options: Any) -> Program:
    words = " ".join(arguments).split()
    return Program(name, (str(SCRIPTS / f"{script}.py"),), words, needs=tuple(needs), **options)


def _sentences(name: str, script: str, *arguments: str, **options: Any) -> Program:
    return _user(name, script, _SENTENCES, *arguments, needs=["sentence_transformers"], **options)


_GLUE = "--max_seq_length 16 --num_train_epochs 4 --eval_strategy epoch --save_strategy epoch"
_BEST = "--load_best_model_at_end --metric_for_best_model"

PROGRAMS = [
    _example(
        "run_clm",
        f"{_model('causal')} {_LANGUAGE} --num_train_epochs 2 --warmup_steps 2 --lr_scheduler_type cosine",
        "--weight_decay 0.1 --eval_strategy steps --eval_steps 4 --max_eval_samples 16 --dtype float32",
    ),
    _example(
        "run_mlm",
        f"{_model('still')} {_TEXT} --line_by_line --max_seq_length 32 --mlm_probability 0.3 --pad_to_max_length",
        "--max_train_samples 100 --num_train_epochs 2 --per_device_eval_batch_size 32 --preprocessing_num_workers 1",
    ),
    _example("run_plm", f"{_model('xlnet')} {_TEXT} --max_seq_length 16 --num_train_epochs 2"),
    _example(
        "run_fim",
        f"--model_type llama --tokenizer_name {{here}}/examples/causal {_LANGUAGE} --max_steps 16 --fim_rate 0.7",
        "--config_overrides vocab_size=52,hidden_size=16,intermediate_size=32,num_hidden_layers=2,"
        "num_attention_heads=2,num_key_value_heads=2 --fim_spm_rate 0.4 --per_device_eval_batch_size 32",
    ),
    _example("run_glue", f"{_model('bert')} {_rows('reviews')} {_GLUE} {_BEST} accuracy"),
    _example(
        "run_ner",
        f"{_model('bert')} {_rows('tags')} --max_steps 16 --return_entity_level_metrics --label_all_tokens",
        f"--save_total_limit 2 --per_device_eval_batch_size 16 {_STEADY}",
    ),
    _example(
        "run_qa",
        f"{_model('bert')} {_rows('questions')} --max_seq_length 24 --doc_stride 4 --max_answer_length 4",
        f"--version_2_with_negative --max_steps 24 --eval_strategy steps --eval_steps 8 {_STEADY}",
    ),
    _example(
        "run_summarization",
        f"{_model('bart')} {_rows('summaries')} --max_source_length 32 --max_target_length 8 --max_steps 16",
        "--predict_with_generate --num_beams 2 --optim adafactor --text_column document --summary_column summary",
    ),
    _example(
        "run_translation",
        f"{_model('t5')} {_rows('translations')} --max_source_length 16 --max_target_length 16 --max_steps 16",
        "--source_lang en --target_lang xx --source_prefix answer: --predict_with_generate --pad_to_max_length",
        f"--eval_strategy steps --eval_steps 8 --label_smoothing_factor 0.1 {_STEADY}",
    ),
    _example(
        "run_image_classification",
        f"{_model('vit')} --train_dir {{here}}/examples/images/train --remove_unused_columns False",
        "--validation_dir {here}/examples/images/validation --num_train_epochs 4 --eval_strategy epoch",
        f"--save_strategy epoch --ignore_mismatched_sizes --max_train_samples 20 {_STEADY}",
    ),
    _sentences(
        "st-pairs",
        "train_bi_encoder",
        "--task pairs --sampler no_duplicates --eval_strategy steps --eval_steps 4",
        f"{_BEST} eval_dev_spearman_cosine --greater_is_better true",
    ),
    _sentences("st-several", "train_bi_encoder", "--task several --alternation proportional --eval_strategy epoch"),
    _sentences(
        "st-round-robin",
        "train_bi_encoder",
        "--task several --alternation round_robin --gradient_accumulation_steps 2 " + _STEADY,
        # torch derives logcumsumexp, in CoSENTLoss, by the logarithm of the gradient: what the loss is divided by
        # changes the rounding, and the results are as far from float64 here as there
        tolerance=1e-5,
    ),
    _sentences("st-routed", "train_bi_encoder", "--task routed"),
    _sentences("st-classes", "train_bi_encoder", "--task classes --loss_as_function --sampler group_by_label"),
    _sentences("st-cross", "train_cross_encoder", "--eval_strategy steps --eval_steps 4 --load_best_model_at_end"),
    _sentences("st-sparse", "train_sparse_encoder", "--eval_strategy epoch"),
    _user("setfit", "train_setfit", "--model {here}/examples/bert", needs=["setfit"]),
    _user("gliner", "train_gliner", "--model {here}/examples/bert", needs=["gliner"]),
    _example("run_clm", f"{_model('causal')} {_LANGUAGE} --num_train_epochs 2", name="run_clm-ranks", ranks=2),
    _example(
        "run_summarization",
        f"{_model('seq2seq')} {_rows('summaries')} --max_source_length 32 --max_target_length 8 --max_steps 12",
        "--predict_with_generate",
        name="run_summarization-ranks",
        ranks=2,
        # transformers multiplies the losses of encoders with decoders by the number of ranks otherwise
        only_there=["--average_tokens_across_devices", "False"],
    ),
    _sentences("st-pairs-ranks", "train_bi_encoder", "--task pairs --no_dropout", ranks=2),
]
