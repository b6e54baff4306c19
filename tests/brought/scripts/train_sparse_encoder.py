"""Trains a sparse encoder (SPLADE), with regularizers whose weights rise during the training."""

from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.models import Transformer
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from sentence_transformers.sparse_encoder.modules import SpladePooling
from sentences import Inputs, start, train


def main():
    inputs, args, draw = start(Inputs, SparseEncoderTrainingArguments)
    word = Transformer(inputs.model, transformer_task="fill-mask")
    model = SparseEncoder(modules=[word, SpladePooling("max")], device="cpu")
    train_dataset, eval_dataset, known = draw.pairs(inputs.rows), draw.pairs(16), draw.pairs(20)
    loss = SpladeLoss(
        model,
        loss=SparseMultipleNegativesRankingLoss(model),
        query_regularizer_weight=5e-5,
        document_regularizer_weight=3e-5,
    )
    queries = {str(number): text for number, text in enumerate(known["anchor"])}
    corpus = {str(number): text for number, text in enumerate(known["positive"])}
    evaluator = SparseInformationRetrievalEvaluator(queries, corpus, {key: {key} for key in queries}, name="dev")
    trainer = SparseEncoderTrainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        loss=loss,
        evaluator=evaluator,
    )
    train(trainer)
    trainer.save_state()
    model.save_pretrained(f"{args.output_dir}/final")


if __name__ == "__main__":
    main()
