"""Reads directories of torch.distributed.checkpoint, without unpickling anything."""
