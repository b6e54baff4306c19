"""Builds what a run needs from its configuration: model, optimizer, scheduler, tokenizer, data, pretrained weights,
LoRA.

`setup.set_up` does it all; `final_weights` exports the trained weights.
"""
