"""The fields of `TrainingArguments` that have an effect, by theme, with Hugging Face's names and defaults."""
