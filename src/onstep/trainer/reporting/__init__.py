"""Reports of a Trainer beside the loop's own records: metrics files, model card, memory, input tokens."""
