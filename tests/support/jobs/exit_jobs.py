"""What the ranks of the tests of exits by hand run: `job_*(settings)`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onstep.training import GlobalState, checkpoint_and_decide_exit


def job_by_hand(settings: dict[str, Any]) -> None:
    """Count steps until the decision to leave, at most 6; a signal reaches one rank in its third."""
    dist.init_process_group("gloo")
    rank, state, left_at = dist.get_rank(), GlobalState(), None
    state.cfg.checkpoint.save = settings["save"]
    state.cfg.train.exit_signal = signal.SIGUSR2
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 7):
        if (rank, step) == (settings["rank"], 3):
            os.kill(os.getpid(), signal.SIGUSR2)
        state.train_state.step = step
        if checkpoint_and_decide_exit(state, [model], optimizer, None, 0.0, {}, None):
            left_at = step
            break
    answer = {"left_at": left_at, "decided": state.exits.decided}
    Path(f"rank-{rank}.json").write_text(json.dumps(answer))
    state.reset_for_restart()
    dist.destroy_process_group()
