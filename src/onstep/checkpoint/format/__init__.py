"""The files of a checkpoint: `codec` (typed JSON and tensors), `values`, `tensor_file` and `tensor_header`
(safetensors, streamed, every bound checked).
"""
