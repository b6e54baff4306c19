"""Refuses collectives on one rank alone, which would wait for the others until the timeout of their group.

Every collective, from Python, from DTensor, and from the code of DDP and FSDP2, is an operator `c10d::...` of torch's
dispatcher. While a section is open, one more dispatch key is active in its thread, for which these operators have
kernels that refuse. All other operators fall through that key at no cost, and outside of sections it is not active.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import _C

from onstep.distributed.call_sites import call_in_own_code
from onstep.errors import MainOnlyError
from onstep.processes.heartbeat import HEARTBEAT

logger = logging.getLogger(__name__)

_KEY = "TESTING_ONLY_GenericMode"
"""A dispatch key that torch keeps for tests: it has no kernels, and is never active."""
_NO_COLLECTIVES = {"check_for_nan"}
"""Operators of `c10d` that communicate with nobody."""
_REMEDY = "declare ranks = 'all' in the callback, so that all ranks call it"

_open: list[MainOnlySection] = []
"""The open sections of all threads, the innermost last."""


def main_only(what: str, remedy: str) -> AbstractContextManager[None]:
    """`World.main_only` for code without a world: of the default process group, if there is one.

    Args:
        what: what is done, for the message.
        remedy: what to do instead of the collective.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return nullcontext()
    return MainOnlySection(f"rank {dist.get_rank()}", dist.get_world_size(), what, remedy)


class MainOnlySection:
    """Context in which collectives raise on the rank that runs it, for it runs it alone.

    Groups without other ranks remain usable. Threads that are started in it are not watched. A compiled model is
    compiled once more in such contexts.

    Args:
        place: this rank, as messages name it.
        size: the number of ranks of the run.
        what: what only this rank does; None for the callback that is being called.
        remedy: what to do instead of the collective; None for what a callback can do.
    """

    def __init__(self, place: str, size: int, what: str | None = None, remedy: str | None = None) -> None:
        self._place, self._size, self._what, self._remedy = place, size, what, remedy
        self._refusal: MainOnlyError | None = None
        self._frame: FrameType | None = None

    def __enter__(self) -> None:
        self._frame = sys._getframe(1)
        self.thread = get_ident()
        self._guard = _active_key()
        self._guard.__enter__()
        _open.append(self)
        dist.distributed_c10d._process_group_name = _checked_group_name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._frame = None
        _open.remove(self)
        if not _open:
            dist.distributed_c10d._process_group_name = _group_name
        self._guard.__exit__(kind, error, trace)
        if self._refusal is not None and error is not self._refusal and _is_due_to(error, self._refusal):
            raise self._refusal from error

    def refuse(self, collective: str) -> None:
        """Raise in place of a collective.

        Args:
            collective: the name of its operator or function.

        Raises:
            MainOnlyError: naming who called it, and what to do instead.
        """
        what, callback = self._what, HEARTBEAT.callback
        if what is None:
            what = "code" if callback is None else f"callback '{callback[1]}' during '{callback[0]}'"
        called, collective = call_in_own_code(self._frame), f"the collective '{collective.strip('_')}'"
        called = collective if called is None else f"{called}, which calls {collective},"
        self._refusal = MainOnlyError(
            f"{what} called {called} on {self._place} alone, where it would wait for all {self._size} ranks: "
            f"{self._remedy or _REMEDY}."
        )
        raise self._refusal


class Postponed:
    """The error of a section of one rank, kept until all ranks agree on something and raise it together."""

    def __init__(self) -> None:
        self.error: MainOnlyError | None = None
        self._accepts = False

    def take(self, error: BaseException) -> bool:
        """Keep the error, if it is one of a section and an agreement follows; whether it is kept.

        Args:
            error: of what one rank did alone.
        """
        if not self._accepts or not isinstance(error, MainOnlyError):
            return False
        self.error = self.error or error
        return True

    @contextmanager
    def accepting(self) -> Iterator[None]:
        """Context that ends with an agreement, unless an error ends it."""
        before, self._accepts = self._accepts, True
        try:
            yield
        except BaseException:
            if self.error is not None:
                logger.error("%s", self.error)  # with an exit, nothing else would say so
            raise
        finally:
            self._accepts, self.error = before, None

    def raise_together(self, gather: Callable[[str | None], list[str | None]]) -> None:
        """Raise the error of any rank on all of them. Collective.

        Args:
            gather: gives every rank's text on every rank.

        Raises:
            MainOnlyError: with the same text on all ranks.
        """
        error, self.error = self.error, None
        texts = gather(None if error is None else str(error))
        if error is not None:
            raise error
        raise MainOnlyError(next(text for text in texts if text is not None))


def _active_key() -> Any:
    """Context in which the key is active in this thread."""
    return _C._IncludeDispatchKeyGuard(_key())


@cache
def _key() -> Any:
    """The dispatch key, after registering the kernels of all collectives for it."""
    library: Any = torch.library.Library
    everything, collectives = library("_", "IMPL"), library("c10d", "IMPL")
    _libraries.extend((everything, collectives))
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    for qualified in _C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace == "c10d" and name not in _NO_COLLECTIVES:
            operator = getattr(torch.ops.c10d, name).default
            kinds = [str(argument.type) for argument in operator._schema.arguments]
            group_at = next(at for at, kind in enumerate(kinds) if kind.endswith("c10d.ProcessGroup"))
            collectives.impl(name, partial(_run_if_alone, operator, name, group_at), _KEY)
    return _C._dispatch_key_parse(_KEY)


_libraries: list[object] = []
"""Their kernels are registered while these exist."""


def _run_if_alone(operator: Callable[..., Any], name: str, group_at: int, *args: Any) -> Any:
    """Run a collective of a group without other ranks; refuse it otherwise."""
    if dist.ProcessGroup.unbox(args[group_at]).size() > 1:
        _section_here().refuse(name)
    with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_key())):
        return operator(*args)


def _section_here() -> MainOnlySection:
    """The innermost section of this thread; autograd's own threads belong to the latest."""
    thread = get_ident()
    return next((one for one in reversed(_open) if one.thread == thread), _open[-1])


_group_name = dist.distributed_c10d._process_group_name
"""Gives a new group its name. All functions that make groups call it first."""


def _checked_group_name(ranks: list[int], use_hashed_name: bool) -> Any:
    """The name of a new group; refused in a section if other ranks would have to make it, too."""
    is_own = use_hashed_name and list(ranks) == [dist.get_rank()]
    if not is_own and _C._dispatch_tls_is_dispatch_key_included(_key()):
        _section_here().refuse("new_group")
    return _group_name(ranks, use_hashed_name)


def _is_due_to(error: BaseException | None, cause: BaseException) -> bool:
    """Whether one error was raised because of another."""
    seen: set[int] = set()
    while error is not None and error is not cause and id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return error is cause
