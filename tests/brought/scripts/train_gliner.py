"""Trains GLiNER to find names of kinds that are given as words."""

from gliner import GLiNER
from gliner.data_processing.collator import SpanDataCollator
from gliner.training import Trainer, TrainingArguments
from sentences import ANIMALS, PEOPLE, PLACES, Job, start, train
from transformers import AutoConfig


def tagged(draw, count):
    kinds = {**dict.fromkeys(PEOPLE, "person"), **dict.fromkeys(ANIMALS, "animal"), **dict.fromkeys(PLACES, "place")}
    rows = [draw.one()[0].split() for _ in range(count)]
    return [
        {"tokenized_text": row, "ner": [[at, at, kinds[word]] for at, word in enumerate(row) if word in kinds]}
        for row in rows
    ]


def main():
    inputs, draw = start(Job)
    encoder = AutoConfig.from_pretrained(inputs.model)
    config = {
        "model_name": inputs.model,
        "hidden_size": 16,
        "max_width": 3,
        "max_len": 32,
        "dropout": 0.1,
        "encoder_config": encoder.to_dict(),
        "max_types": 5,
    }
    model = GLiNER.from_config(config)
    train_dataset, eval_dataset = tagged(draw, 40), tagged(draw, 8)
    args = TrainingArguments(
        inputs.output_dir,
        learning_rate=0.002,
        others_lr=0.01,
        weight_decay=0.01,
        others_weight_decay=0.01,
        num_train_epochs=3,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        train_sampling_strategy="sequential",
        eval_strategy="steps",
        eval_steps=5,
        logging_steps=1,
        save_steps=4,
        warmup_steps=2,
        focal_loss_alpha=0.75,
        focal_loss_gamma=2,
        report_to="none",
        seed=inputs.seed,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=model.data_processor.transformer_tokenizer,
        data_collator=SpanDataCollator(model.config, data_processor=model.data_processor, prepare_labels=True),
    )
    train(trainer)
    model.save_pretrained(f"{inputs.output_dir}/final", safe_serialization=True)
    print(model.predict_entities("anna sees the cat in rome", ["person", "animal", "place"], threshold=0.3))


if __name__ == "__main__":
    main()
