"""Trains a cross-encoder that scores pairs of sentences."""

import torch
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.evaluation import CrossEncoderCorrelationEvaluator
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentences import Inputs, start, train


def main():
    inputs, args, draw = start(Inputs, CrossEncoderTrainingArguments)
    model = CrossEncoder(inputs.model, num_labels=1, device="cpu")
    train_dataset, eval_dataset, scored = draw.scored(inputs.rows), draw.scored(16), draw.scored(24)
    pairs = list(zip(scored["sentence1"], scored["sentence2"], strict=True))
    evaluator = CrossEncoderCorrelationEvaluator(pairs, scored["score"], name="dev")
    trainer = CrossEncoderTrainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        loss=BinaryCrossEntropyLoss(model, pos_weight=torch.tensor(2.0)),
        evaluator=evaluator,
    )
    train(trainer)
    print(evaluator(model))
    model.save_pretrained(f"{args.output_dir}/final")


if __name__ == "__main__":
    main()
