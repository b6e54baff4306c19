"""Initializes accelerate's state as transformers' `TrainingArguments` do, for scripts and libraries that read it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from onstep.errors import ConfigError


def partial_state(args: Any, *, imports: bool = False) -> Any:
    """accelerate's `PartialState` with the ranks and the device of these arguments; None if accelerate is not in use.

    One that has them already is left as it is. Collective where there are several ranks, which join their process group
    here, as with transformers.

    Args:
        args: the `TrainingArguments`.
        imports: import accelerate; False uses it only if the script has imported it.
    """
    module: Any = importlib.import_module("accelerate.state") if imports else sys.modules.get("accelerate.state")
    if not hasattr(module, "PartialState"):
        return None
    size = args.parallel_sizes.ranks
    if size > 1 and "MASTER_ADDR" not in os.environ:  # ranks that nothing connects
        return None
    if size == 1 and "LOCAL_RANK" in os.environ and not {"MASTER_ADDR", "WORLD_SIZE"} <= os.environ.keys():
        return None  # accelerate would wait for the ranks of a launcher that is not there
    known = module.PartialState._shared_state
    if known and (bool(known.get("_cpu")), known.get("num_processes")) == (args.use_cpu, size):
        return module.PartialState()
    module.AcceleratorState._reset_state(reset_partial_state=True)
    options = {} if size == 1 else {"backend": args.ddp_backend, "timeout": args.ddp_timeout_delta}
    return module.PartialState(cpu=args.use_cpu, **options)


def use_configured_state(args: Any) -> None:
    """Take the device from the state that the script has initialized, as `use_configured_state` asks for.

    Raises:
        ConfigError: if it has not initialized any, or one with a GPU for a training with `use_cpu`.
    """
    module: Any = sys.modules.get("accelerate.state")
    known = getattr(getattr(module, "PartialState", None), "_shared_state", None)
    rule = "TrainingArguments.accelerator_config['use_configured_state']=True"
    if not known:
        raise ConfigError(
            f"{rule} requires accelerate's state before TrainingArguments; call accelerate.PartialState() first, or "
            f"drop the key."
        )
    on_cpu = known["device"].type == "cpu"
    if args.use_cpu and not on_cpu:
        raise ConfigError(f"{rule} contradicts use_cpu=True: the device of the state is {known['device']}; drop one.")
    args.use_cpu = args.use_cpu or bool(known["_cpu"])


def accelerator_state(args: Any, mixed_precision: str) -> None:
    """Initialize accelerate's `AcceleratorState`, as transformers' Trainer does; nothing if accelerate is not in use.

    Collective where `partial_state` is.
    """
    if partial_state(args) is None:
        return
    state: Any = sys.modules["accelerate.state"].AcceleratorState
    known = state._shared_state
    if known and (known.get("_mixed_precision"), bool(known.get("_cpu"))) == (mixed_precision, args.use_cpu):
        return
    state._reset_state()
    plugin = importlib.import_module("accelerate.utils").TorchDynamoPlugin()
    state(mixed_precision=mixed_precision, cpu=args.use_cpu, dynamo_plugin=plugin, _from_accelerator=True)
