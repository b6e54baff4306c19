"""Teaches an encoder to fill in masked words, with a share of masked tokens chosen by the user."""

import math
import os
from dataclasses import dataclass

import transformers
from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint

# isort: split
# The import line that changes:
from transformers import Trainer, TrainingArguments


@dataclass
class Cloze:
    weights: str
    text: str
    """Start of the names of the two files."""
    masked: float = 0.15
    longest: int = 24

    def parts(self, tokenizer):
        lines = load_dataset("text", data_files={part: f"{self.text}_{part}.txt" for part in ("train", "validation")})
        cut = {"truncation": True, "max_length": self.longest, "return_special_tokens_mask": True}
        return lines.map(lambda rows: tokenizer(rows["text"], **cut), batched=True, remove_columns=["text"])


def share_of_masks_filled(evaluated):
    is_masked = evaluated.label_ids >= 0
    return {"accuracy": float((evaluated.predictions == evaluated.label_ids)[is_masked].mean())}


def steps_of(trainer, options, data):
    """Each stage that was asked for, with its metrics."""
    if options.do_train:
        start = options.resume_from_checkpoint
        if start is None and os.path.isdir(options.output_dir):
            start = get_last_checkpoint(options.output_dir)
        yield "train", {**trainer.train(resume_from_checkpoint=start).metrics, "train_samples": len(data["train"])}
        trainer.save_model()
        trainer.save_state()
    if options.do_eval:
        scores = trainer.evaluate()
        yield "eval", {**scores, "eval_samples": len(data["validation"]), "perplexity": math.exp(scores["eval_loss"])}


def run():
    cloze, options = transformers.HfArgumentParser((Cloze, TrainingArguments)).parse_args_into_dataclasses()
    transformers.set_seed(options.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cloze.weights)
    with options.main_process_first():
        data = cloze.parts(tokenizer)
    trainer = Trainer(
        model=transformers.AutoModelForMaskedLM.from_pretrained(cloze.weights),
        args=options,
        # a seed of its own: the same tokens are masked wherever the global random numbers are
        data_collator=transformers.DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=cloze.masked, seed=options.seed
        ),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        compute_metrics=share_of_masks_filled,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
    )
    for stage, metrics in steps_of(trainer, options, data):
        trainer.log_metrics(stage, metrics)
        trainer.save_metrics(stage, metrics)
    trainer.create_model_card(finetuned_from=cloze.weights, tasks="fill-mask")


run()
