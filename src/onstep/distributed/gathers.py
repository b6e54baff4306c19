"""Gathers of updated parameters: in the order in which a forward pass uses them, each awaited by what uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from onstep.distributed.buckets import Bucket

_READERS: tuple[Callable[..., RemovableHandle], ...] = (
    nn.Module.register_state_dict_pre_hook,
    nn.Module.register_load_state_dict_pre_hook,
)


class Gathers:
    """Gathers the buckets of a model after an update, and knows which modules use them.

    All of them begin together, in the order of their first use in the first forward pass, the same on all ranks.
    A module waits for those of its own parameters, and of parameters in modules inside it that the first pass did not
    call, whose weights it uses by itself, as torch's attention does.

    Args:
        module: the model.
        buckets: from the last registered parameter to the first.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket]) -> None:
        self._module, self._buckets = module, list(buckets)
        self._of = {id(one.parameter): number for number, bucket in enumerate(buckets) for one in bucket.members}
        self._order: list[int] | None = None
        """The numbers of the buckets, as the ranks have agreed."""
        self._called: list[nn.Module] | None = None
        """The modules in the order of their first calls, once they have been noted."""
        self.handles: dict[nn.Module, RemovableHandle] = {}
        """The forward pre-hooks that are on."""
        self._readers: list[RemovableHandle] = []
        """The hooks by which `state_dict()` and `load_state_dict()` wait, as a gather would replace what is loaded."""

    @property
    def is_noted(self) -> bool:
        """Whether a forward pass has been watched."""
        return self._called is not None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note which modules a forward pass in this context calls, in which order."""
        called: dict[nn.Module, None] = {}
        watches = [one.register_forward_pre_hook(lambda module, _: called.setdefault(module)) for one in self._owners()]
        try:
            yield
            self._called = list(called)
        finally:
            for watch in watches:
                watch.remove()

    def start(self) -> None:
        """Begin to gather what has been updated. Collective."""
        if self._order is None:
            self._order = self._agreed()
        for number in self._order:
            self._buckets[number].start_gather()

    def finish(self) -> None:
        """Wait for the gathers that have begun; not collective."""
        for number in self._order or ():
            self._buckets[number].finish_gather()

    def hook(self) -> None:
        """Let modules wait for what they use before they are called, and for all before they are saved or loaded."""
        if self.handles:
            raise RuntimeError("the forward pre-hooks are on already; turn them off first")
        for module, numbers in self._uses().items():
            awaited = [self._buckets[number] for number in sorted(numbers, key=(self._order or [*numbers]).index)]
            self.handles[module] = module.register_forward_pre_hook(_Wait(awaited), prepend=True)

        def finish(module: nn.Module, *given: object) -> None:  # a function, which copies of the model share
            self.finish()

        self._readers = [register(module, finish) for module in self._module.modules() for register in _READERS]

    def unhook(self) -> None:
        """Undo `hook`."""
        if not self.handles:
            raise RuntimeError("the forward pre-hooks are off already; turn them on first")
        for handle in (*self.handles.values(), *self._readers):
            handle.remove()
        self.handles.clear()
        self._readers.clear()

    def _owners(self) -> dict[nn.Module, list[int]]:
        """The modules with parameters that are gathered, and their buckets."""
        found: dict[nn.Module, list[int]] = {}
        for module in self._module.modules():
            ids = dict.fromkeys(map(id, module.parameters(recurse=False)))
            numbers = [self._of[one] for one in ids if one in self._of]
            if numbers:
                found[module] = numbers
        return found

    def _uses(self) -> dict[nn.Module, set[int]]:
        """The buckets for which each module waits."""
        outer, called = outer_modules(self._module), {*(self._called or ())}
        uses: dict[nn.Module, set[int]] = {}
        for module, numbers in self._owners().items():
            for one in waiting_modules(module, outer, called):
                uses.setdefault(one, set()).update(numbers)
        return uses

    def _agreed(self) -> list[int]:
        """The order of use of the first of the ranks that gather together. Collective, once."""
        owners = self._owners()
        used = [number for module in self._called or () for number in owners.get(module, ())]
        order = list(dict.fromkeys([*used, *reversed(range(len(self._buckets)))]))
        if not self._buckets:
            return []
        sent = torch.tensor(order, device=self._buckets[0].device)
        dist.broadcast(sent, group=self._buckets[0].ranks.shards, group_src=0)
        return [int(number) for number in sent.tolist()]


def outer_modules(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """The module around each module of a model; of a module in several places, the last of them."""
    return {child: module for module in model.modules() for child in module.children()}


def waiting_modules(module: nn.Module, outer: Mapping[nn.Module, nn.Module], called: Set[nn.Module]) -> list[nn.Module]:
    """The modules that wait for the parameters of a module: itself and those around it, up to one that is called.

    Args:
        module: a module with parameters.
        outer: of `outer_modules`.
        called: the modules that a forward pass calls.
    """
    waiting = [module]
    while waiting[-1] not in called and waiting[-1] in outer:
        waiting.append(outer[waiting[-1]])
    return waiting


class _Wait:
    """A forward pre-hook that waits for some buckets, and gathers what has been updated since."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets

    def __deepcopy__(self, memo: dict[int, object]) -> _Wait:
        """Itself: a copy of the model waits for what is gathered into this one."""
        return self

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        for bucket in self._buckets:
            bucket.start_gather()
            bucket.finish_gather()
