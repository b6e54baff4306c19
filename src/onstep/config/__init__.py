"""The configuration of a run: dataclasses, YAML, `a.b=c` overrides and `TrainingArguments`."""
