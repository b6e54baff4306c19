"""The files of a checkpoint: `codec` (typed JSON and tensors), `values`, `strict_json`, `tensor_file` and
`tensor_header` (safetensors, streamed, every bound checked).
"""
