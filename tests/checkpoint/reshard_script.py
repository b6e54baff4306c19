"""One of several ranks: loads the tensors of a folder of ours through DCP, sharded over all ranks, and checks them."""

from __future__ import annotations

import os
import sys

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def main(folder: str) -> None:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state: dict[str, DTensor] = {
        "rows": distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.zeros(5, 4), mesh, [Shard(1)]),
    }
    state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(folder))
    expected = torch.arange(20.0).reshape(5, 4)
    for name, tensor in state.items():
        assert tensor.to_local().numel() < expected.numel(), f"{name} is not sharded"
        assert torch.equal(tensor.full_tensor(), expected), name
    torch.distributed.barrier()  # a rank that leaves while another still talks to it may abort that one


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then while the interpreter takes them apart
