"""A loop of one's own in Forgather's form: `DiLoCoWorker` as a context manager around any training."""

import sys

import torch
from forgather.ml.diloco import DiLoCoClient, DiLoCoWorker

if __name__ == "__main__":
    server_addr, worker_id = sys.argv[1:]
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCoWorker(
        model,
        optimizer,
        server_addr,
        sync_every=500,
        worker_id=worker_id,
        bf16_comm=True,
        timeout=600,
        dylu=False,
        heartbeat_interval=30.0,
        num_fragments=1,
        max_sync_retries=3,
    ) as worker:
        for step in range(6):
            x = torch.full((4, 3), float(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step == 2:
                worker.force_sync()
        metrics = worker.sync_metrics
        print("syncs", metrics["diloco/sync_count"], "local", metrics["diloco/local_step"])
    client = DiLoCoClient(server_addr, timeout=600, max_retries=3, retry_delay=1.0)
    info = {"hostname": "here", "sync_every": 500, "bf16_comm": True, "dylu": False, "num_gpus": 0, "gpu_names": []}
    parameters = client.register("client", info)
    client.submit_pseudogradients("client", {name: torch.zeros_like(value) for name, value in parameters.items()})
    print("beat", client.heartbeat("client", steps_per_second=1.5)["status"])
    client.deregister("client")
    print("round", client.get_status()["sync_round"])
