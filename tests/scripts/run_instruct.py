"""Teaches a causal language model to follow instructions: a torch data set, labels on the answers only, a new word."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

# isort: split
# The import line that changes:
from transformers import Trainer, TrainingArguments

NOT_TRAINED_ON = -100


@dataclass
class Lesson:
    weights: str
    tasks: str = field(metadata={"help": "JSON: a list of instruction, input, output."})
    mark: str = "<|answer|>"


@dataclass
class LessonArguments(TrainingArguments):
    """The Trainer's arguments, and one more."""

    longest: int = field(default=32, metadata={"help": "Tokens after which a conversation is cut."})


def question_of(task):
    given = f" the input : {task['input']}" if task["input"] else ""
    return f"the instruction : {task['instruction']}{given} answer :"


class Conversations(torch.utils.data.Dataset):
    """Rows of ids with the number of ids that belong to the question."""

    def __init__(self, tasks, tokenizer):
        self.rows = []
        for task in tasks:
            asked = self.ids(tokenizer, question_of(task))
            whole = self.ids(tokenizer, f"{question_of(task)} {task['output']} {tokenizer.eos_token}")
            labels = whole.clone()
            labels[: len(asked)] = NOT_TRAINED_ON
            self.rows.append({"input_ids": whole, "labels": labels})

    @staticmethod
    def ids(tokenizer, text):
        return torch.tensor(tokenizer(text, truncation=True, max_length=tokenizer.model_max_length)["input_ids"])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


class Padder:
    """Makes rows equally long; it has no state but the id that fills them."""

    def __init__(self, filler):
        self.fillers = {"input_ids": filler, "labels": NOT_TRAINED_ON}

    def __call__(self, rows):
        batch = {
            name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=filler)
            for name, filler in self.fillers.items()
        }
        batch["attention_mask"] = batch["input_ids"] != self.fillers["input_ids"]
        return batch


def add_word(word, tokenizer, model):
    """Give the model a row for a new word, the average of the others, in the embeddings and in the output."""
    if not tokenizer.add_special_tokens({"additional_special_tokens": [word]}):
        return
    model.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        for layer in {model.get_input_embeddings(), model.get_output_embeddings()}:
            layer.weight[-1] = layer.weight[:-1].mean(0)


def save_from_cpu(trainer, directory):
    weights = {name: value.to("cpu", copy=True) for name, value in trainer.model.state_dict().items()}
    if trainer.args.should_save:
        trainer._save(directory, state_dict=weights)


lesson, options = transformers.HfArgumentParser((Lesson, LessonArguments)).parse_args_into_dataclasses()
transformers.set_seed(options.seed)
tokenizer = transformers.AutoTokenizer.from_pretrained(
    lesson.weights, model_max_length=options.longest, padding_side="right"
)
model = transformers.AutoModelForCausalLM.from_pretrained(lesson.weights)
add_word(lesson.mark, tokenizer, model)
trainer = Trainer(
    model=model,
    args=options,
    data_collator=Padder(tokenizer.pad_token_id),
    train_dataset=Conversations(json.loads(Path(lesson.tasks).read_text()), tokenizer),
    eval_dataset=None,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_state()
save_from_cpu(trainer, options.output_dir)
if trainer.is_world_process_zero():
    print(sorted(path.name for path in Path(options.output_dir).iterdir()))
