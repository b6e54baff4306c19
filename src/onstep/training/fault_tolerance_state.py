"""What the fault-tolerance sections of a run remember."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class FaultToleranceState:
    """Which sections are open, and what was seen so far; it decides which time limits may be learned."""

    ft_state_path: Path | None = None
    """`ft_state.json`, in the folder of the checkpoints; None where nothing is learned."""
    is_persistent_chkpt_loaded: bool = False
    """The set-up has loaded a checkpoint, so its time is one that a later start takes too."""
    is_async_chkpt_enabled: bool = False
    """Saves go on in the background: their section does not tell how long they take."""
    is_calculating_timeouts: bool = False
    """`ft.calc_ft_timeouts`."""
    is_setup_section_open: bool = False
    seen_checkpoints_cnt: int = 0
    seen_tr_iters_cnt: int = 0
    curr_eval_iter_idx: int = 0
    open_steps: int = 0
    """Steps and evaluation batches that run, one inside the other."""
