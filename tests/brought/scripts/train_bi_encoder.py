"""Trains a bi-encoder of sentences: on pairs, on several datasets with a loss each, or with a path for queries."""

from dataclasses import dataclass

import torch
from datasets import DatasetDict
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator, SequentialEvaluator, TripletEvaluator
from sentence_transformers.models import Pooling, Router, Transformer
from sentence_transformers.training_args import BatchSamplers, MultiDatasetBatchSamplers
from sentences import Inputs, start, train


@dataclass
class BiEncoderInputs(Inputs):
    task: str = "pairs"
    sampler: str = "batch_sampler"
    alternation: str = "proportional"
    loss_as_function: bool = False
    no_dropout: bool = False


def encoder(inputs):
    if inputs.task != "routed":
        word = Transformer(inputs.model)
        return SentenceTransformer(modules=[word, Pooling(word.get_embedding_dimension())], device="cpu")
    query, document = Transformer(inputs.model), Transformer(inputs.model)
    size = query.get_embedding_dimension()
    paths = {"query": [query, Pooling(size)], "document": [document, Pooling(size)]}
    return SentenceTransformer(
        modules=[Router.for_query_document(**{f"{k}_modules": v for k, v in paths.items()})], device="cpu"
    )


def several(model, draw, rows):
    """Datasets, and the loss of each; the loss of classes has weights of its own."""
    data = {"pairs": draw.pairs(rows), "scored": draw.scored(rows // 2), "classes": draw.classified(rows // 3)}
    softmax = losses.SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=2)
    by_name = {
        "pairs": losses.MultipleNegativesRankingLoss(model),
        "scored": losses.CoSENTLoss(model),
        "classes": softmax,
    }
    return DatasetDict(data), by_name


def main():
    inputs, args, draw = start(BiEncoderInputs, SentenceTransformerTrainingArguments)
    model = encoder(inputs)
    for module in model.modules() if inputs.no_dropout else ():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    args.batch_sampler = BatchSamplers(inputs.sampler)
    args.multi_dataset_batch_sampler = MultiDatasetBatchSamplers(inputs.alternation)
    if inputs.task == "several":
        train_dataset, loss = several(model, draw, inputs.rows)
        eval_dataset = DatasetDict({"pairs": draw.pairs(16), "scored": draw.scored(16)})
    elif inputs.task == "routed":
        train_dataset, eval_dataset = draw.triplets(inputs.rows), draw.triplets(16)
        args.router_mapping = {"query": "query", "document": "document", "negative": "document"}
        loss = losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [16, 8])
    elif inputs.task == "classes":
        train_dataset, eval_dataset = draw.classified(inputs.rows), draw.classified(16)

        def loss(model):
            return losses.SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=2)

        loss = loss if inputs.loss_as_function else loss(model)
    else:
        train_dataset, eval_dataset = draw.pairs(inputs.rows), draw.pairs(16, distinct=True)
        loss = losses.MultipleNegativesRankingLoss(model)
    scored, triplets = draw.scored(24), draw.triplets(12)
    evaluator = SequentialEvaluator(
        [
            EmbeddingSimilarityEvaluator(scored["sentence1"], scored["sentence2"], scored["score"], name="dev"),
            TripletEvaluator(triplets["query"], triplets["document"], triplets["negative"], name="dev"),
        ]
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        loss=loss,
        evaluator=evaluator,
    )
    train(trainer)
    print(evaluator(model))
    model.save_pretrained(f"{args.output_dir}/final")


if __name__ == "__main__":
    main()
