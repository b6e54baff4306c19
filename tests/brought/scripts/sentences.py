"""Data for models of sentences: pairs, scored pairs, classes and queries, from the words that the tokenizer knows."""

import os
import random
from dataclasses import dataclass, field

from datasets import Dataset
from transformers import HfArgumentParser, set_seed
from transformers.trainer_utils import get_last_checkpoint

PEOPLE = ("anna", "ben", "clara", "david")
ANIMALS = ("cat", "dog", "bird", "fish", "horse", "mouse")
PLACES = ("paris", "rome", "oslo")
VERBS = ("sees", "likes", "finds", "fears")


@dataclass
class Inputs:
    model: str = field(metadata={"help": "Directory of a model and its tokenizer."})
    rows: int = 48


@dataclass
class Job:
    """Inputs of a library whose arguments no parser reads."""

    model: str
    output_dir: str
    seed: int = 7


class Sentences:
    """Draws sentences; the same ones for the same seed."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def one(self):
        person, verb, animal, place = map(self.draw.choice, (PEOPLE, VERBS, ANIMALS, PLACES))
        return f"{person} {verb} the {animal} in {place}", f"who {verb} the {animal} ?", f"{person} is in {place}"

    def pairs(self, count, distinct=False):
        """Questions with what answers them; each question once if they are to be distinct."""
        rows = [self.one() for _ in range(count)]
        while distinct and len(by_question := {row[1]: row for row in rows}) < count:
            rows = [*by_question.values(), self.one()]
        return Dataset.from_dict({"anchor": [row[1] for row in rows], "positive": [row[0] for row in rows]})

    def triplets(self, count):
        rows = [(self.one(), self.one()) for _ in range(count)]
        return Dataset.from_dict(
            {
                "query": [right[1] for right, _ in rows],
                "document": [right[0] for right, _ in rows],
                "negative": [wrong[0] for _, wrong in rows],
            }
        )

    def scored(self, count):
        rows = [(self.one()[0], self.one()[0]) for _ in range(count)]
        scores = [len(set(one.split()) & set(other.split())) / 6 for one, other in rows]
        return Dataset.from_dict(
            {"sentence1": [one for one, _ in rows], "sentence2": [other for _, other in rows], "score": scores}
        )

    def classified(self, count):
        rows = [(row := self.one(), self.one()[2] if number % 3 else row[2]) for number, _ in enumerate(range(count))]
        return Dataset.from_dict(
            {
                "premise": [row[0][0] for row in rows],
                "hypothesis": [row[1] for row in rows],
                "label": [int(number % 3 > 0) for number in range(count)],
            }
        )


def start(*classes):
    """Each of these from the command line, and sentences; the last one has the seed."""
    parsed = HfArgumentParser(classes).parse_args_into_dataclasses()
    set_seed(parsed[-1].seed)
    return *parsed, Sentences(parsed[-1].seed)


def train(trainer):
    """Train, from the checkpoint of an earlier start if there is one."""
    args = trainer.args
    found = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or found)
    trainer.save_state()
