"""A DiLoCo server script in Forgather's form."""

import sys
from functools import partial

import torch
from forgather.ml.diloco import DiLoCoServer

if __name__ == "__main__":
    output_dir, port = sys.argv[1:]
    server = DiLoCoServer(
        output_dir,
        num_workers=2,
        from_checkpoint=None,
        port=int(port),
        outer_optimizer_factory=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
        host="127.0.0.1",
        save_every_n_rounds=1,
        save_total_limit=3,
        async_mode=False,
        safetensors=True,
        dn_buffer_size=0,
        dylu_enabled=False,
        dylu_base_sync_every=4,
        heartbeat_timeout=120.0,
        min_workers=2,
        dashboard_enabled=True,
    )
    print(f"serving {server.address}", flush=True)
    server.run()
