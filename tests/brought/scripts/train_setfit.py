"""Trains a few-shot classifier: contrastive training of the encoder, then a head on its embeddings."""

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from sentences import Job, start
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression


def classified(draw, count):
    rows = [draw.one()[0] for _ in range(count)]
    return Dataset.from_dict({"text": rows, "label": [int("cat" in row or "dog" in row) for row in rows]})


def main():
    inputs, draw = start(Job)
    word = Transformer(inputs.model)
    body = SentenceTransformer(modules=[word, Pooling(word.get_embedding_dimension())], device="cpu")
    model = SetFitModel(model_body=body, model_head=LogisticRegression())
    train_dataset, eval_dataset = classified(draw, 16), classified(draw, 8)
    args = TrainingArguments(
        inputs.output_dir,
        batch_size=(8, 4),
        num_epochs=(1, 4),
        body_learning_rate=(0.005, 0.001),
        num_iterations=3,
        logging_steps=1,
        save_steps=3,
        save_total_limit=None,
        eval_strategy="steps",
        eval_steps=6,
        report_to="none",
        seed=inputs.seed,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        metric=lambda found, known: {"accuracy": float(np.mean(np.asarray(found) == np.asarray(known)))},
    )
    trainer.train()
    print(trainer.evaluate(eval_dataset))
    with torch.no_grad():
        print(model.predict_proba(eval_dataset["text"][:2]))
    model.save_pretrained(f"{inputs.output_dir}/final")


if __name__ == "__main__":
    main()
