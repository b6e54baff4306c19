"""Reads every parameter at every moment at which a user can, for any layout of a model.

The readings of two runs that differ only in how parameters are gathered must be the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from onstep import Callback, CallbackManager
from onstep.callbacks import TextgenCallback, textgen_callback
from onstep.distributed.shards import whole
from onstep.events import VALID_EVENTS
from onstep.training import GlobalState
from onstep.training.verification import weight_hash
from tests.support.small_runs import eval_loader, loader, run, sum_step

Reading = tuple[str, int, str]
"""A moment, the steps that are done, and a digest of all parameters."""

FAILURE = "the user's own error"


def digest(tensors: dict[str, Tensor]) -> str:
    """A digest of named tensors; of the whole ones, if they are sharded."""
    found = blake2b(digest_size=8)
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(whole(tensors[name].detach()).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


class EveryMoment(Callback):
    """Notes the parameters at events, all or some; asks for a rollback after step 5."""

    def __init__(self, model: nn.Module, events: Collection[str] = VALID_EVENTS) -> None:
        self.model, self._events = model, events
        self.seen: list[Reading] = []
        self.state: GlobalState | None = None
        self._has_gone_back = False

    def note(self, moment: str) -> None:
        """Note what a user reads now, from the parameters themselves."""
        step = 0 if self.state is None else self.state.train_state.step
        self.seen.append((moment, step, digest(dict(self.model.named_parameters()))))

    def note_state_dict(self, moment: str) -> None:
        """Note what a user reads now, from `state_dict()`."""
        step = 0 if self.state is None else self.state.train_state.step
        tensors = {name: one for name, one in self.model.state_dict().items() if isinstance(one, Tensor)}
        self.seen.append((f"{moment}, state_dict", step, digest(tensors)))

    def at(self, event: str, context: Any) -> None:
        """Note an event, and ask for what the run shall do then."""
        self.state = context.state
        self.note(event)
        if event != "on_step_end":
            return
        step = context.state.train_state.step
        if step == 5 and not self._has_gone_back and context.state.checkpoints is not None:
            self._has_gone_back = True
            context.control.rollback("a test", to_step=3)
        elif step == 6:
            context.control.command("look")

    def skips_event(self, name: str) -> bool:
        return name not in self._events

    commands = {"look": "Note the parameters."}  # noqa: RUF012

    def generate(self, *given: Any) -> list[tuple[str, str]]:
        """What the generation of texts is replaced by."""
        self.note("generation")
        return [("prompt", "text")]


def check_same(seen: list[Reading], expected: list[Reading]) -> None:
    """Check that two runs show the same weights; when an asynchronous save is durable is a matter of luck."""
    assert [one for one in seen if one[0] not in _AT_ANY_TIME] == [
        one for one in expected if one[0] not in _AT_ANY_TIME
    ]
    weights = {(step, found) for _, step, found in expected}
    assert {(step, found) for _, step, found in seen} <= weights


_AT_ANY_TIME = ("on_checkpoint_save", "on_decision")


def _listen(event: str) -> Callable[[EveryMoment, Any], None]:
    def listener(self: EveryMoment, context: Any) -> None:
        self.at(event, context)

    return listener


for _event in VALID_EVENTS:
    setattr(EveryMoment, _event, _listen(_event))


def readings(
    model: nn.Module,
    optimizer: Any,
    state: GlobalState,
    directory: Path,
    monkeypatch: Any,
    *,
    is_async: bool = False,
    fails_at: int | None = None,
    fails_in_evaluation: bool = False,
    events: Collection[str] = VALID_EVENTS,
    data: Any = None,
    valid: Any = None,
) -> list[Reading]:
    """Train eight steps with all that reads weights, and return what a user sees of them at each moment. Collective.

    Saves are due every third step, evaluations, comparisons and generations every second; a rollback goes from step 5
    to step 3, and a command is carried out after step 6, if `events` has `on_step_end`. If it has none, the model is
    read only where the run itself does, and by `state_dict()` before no forward pass.
    """
    every, manager = EveryMoment(model, events), CallbackManager()
    texts = TextgenCallback(None, ["ab"], max_new_tokens=1)
    for one in (model, getattr(model, "module", model)):
        object.__setattr__(one, "generate", every.generate)
    manager.add([every, texts])
    cfg = state.cfg
    cfg.train.train_iters, cfg.validation.eval_interval = 8, 2
    cfg.checkpoint.save, cfg.checkpoint.save_interval, cfg.checkpoint.async_save = str(directory), 3, is_async
    cfg.train.check_weight_hash_across_dp_replicas_interval, cfg.checkpoint.certify = 2, False
    cfg.logger.log_interval = 4
    state.entry_point.processing_class = object()
    compare = weight_hash.check_param_hashes_across_dp_replicas

    def compared(*args: Any, **kwargs: Any) -> None:
        every.note("comparison")
        compare(*args, **kwargs)

    def step(data_iterator: Any, chunk: nn.Module) -> Any:
        if chunk.training and state.train_state.step == fails_at:  # after an update whose gathers are in flight
            raise ArithmeticError(FAILURE)
        if events:
            every.note_state_dict("before the forward pass" if chunk.training else "in the evaluation")
        if not chunk.training:
            every.note("in the evaluation")
            if fails_in_evaluation and state.train_state.step == 4:
                raise ArithmeticError(FAILURE)
        result = sum_step(data_iterator, chunk)
        every.note("after the forward pass")
        return result

    with monkeypatch.context() as patched, suppress(ArithmeticError):
        patched.setattr(textgen_callback, "check_options", lambda *given: None)
        patched.setattr(textgen_callback, "continue_prompts", every.generate)
        patched.setattr(weight_hash, "check_param_hashes_across_dp_replicas", compared)
        run(
            state,
            manager,
            step=step,
            data=data or loader(),
            valid=valid or eval_loader(),
            model=model,
            optimizer=optimizer,
        )
    every.note("after the training")
    for file in sorted(directory.glob("*/model/*.safetensors")):
        every.seen.append((f"saved in {file.parent.parent.name}", 0, digest(load_file(file))))
    return every.seen
