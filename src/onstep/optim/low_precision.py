"""Updates bfloat16 weights in float32: with master weights, or without, rounding the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onstep.distributed.shards import held_like, held_parts, is_sharded
from onstep.errors import ConfigError
from onstep.optim.kernels import ADAM, MUON, SGD, Batch, Kernel
from onstep.optim.rounding import generator_of, join_remainder, round_stochastically, split_remainder
from onstep.optim.sharded_muon import Held, update

Group = dict[str, Any]

PIECE_ELEMENTS = 2**21
"""Weights that are updated at once; each requires up to 26 bytes meanwhile."""


class LowPrecisionOptimizer(torch.optim.Optimizer):
    """The step of AdamW, SGD or Muon over bfloat16 weights, with torch's fused kernels in float32.

    Weights, gradients and state are converted in pieces, which are updated and rounded back:

    - with master weights, the state is float32, and `remainder` (int16, in the state of each weight) holds the lower
      half of its float32 number, of which the weight itself is the upper half, rounded. A weight that something else
      changes keeps its remainder, which is less than its last bit;
    - without, the state is bfloat16. Weights are rounded stochastically, or have a `remainder` too (`kahan`: what Kahan
      summation compensates, exactly), or are rounded to nearest. The state is rounded stochastically, except with
      `nearest`: an average that decays by 0.999 would otherwise not change.

    Of float32 weights (`is_low=False`), only the state is of a smaller type.

    The numbers for stochastic rounding depend on the seed and the step alone: they are the same on all ranks and after
    a resume, and no other generator is used. Of weights that are sharded over ranks, each updates its part; Muon
    orthogonalizes their matrices as a whole, some on each rank.

    Its groups are those of `optimizers` in turn, as the same dictionaries. A group added later belongs to the last.

    Args:
        optimizers: torch's, without state: AdamW or SGD, or Muon and AdamW.
        has_masters: whether there are master weights.
        rounding: `stochastic`, `kahan` or `nearest`; without master weights.
        seed: for stochastic rounding.
        averages: the types of entries of the state, by name, where they are others than those above; bfloat16 ones are
            rounded stochastically.
        is_low: whether weights are bfloat16.

    Raises:
        ConfigError: for weights that are neither on a CPU nor on a GPU of CUDA.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        has_masters: bool = True,
        rounding: str = "stochastic",
        seed: int = 0,
        averages: Mapping[str, torch.dtype] | None = None,
        is_low: bool = True,
    ) -> None:
        self.has_masters, self.rounding, self.seed = has_masters, rounding, seed
        self.averages, self.is_low = dict(averages or {}), is_low
        self.step_of: Callable[[], int] | None = None
        """The number of the step that is being taken; None counts the calls of `step`."""
        self._num_steps = 0
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.defaults = dict(optimizers[-1].defaults)
        kernels = [_kernel_of(group) for group in self.param_groups]
        self._step_supports_amp_scaling = MUON not in kernels  # torch's name; whether `found_inf` is honoured
        params = [param for group in self.param_groups for param in group["params"]]
        devices = {param.device.type for param in params} - {"cpu", "cuda"}
        if devices:
            what = "optimizer.params_dtype=bfloat16" if is_low else "optimizer.use_precision_aware_optimizer=true"
            raise ConfigError(
                f"{what} requires a CPU or CUDA, got weights on {', '.join(sorted(devices))}; leave it at its default"
            )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient, unless the attribute `found_inf`, a tensor, is 1."""
        assert closure is None, "a training step has no closure"
        self._num_steps += 1
        found_inf: Tensor | None = vars(self).get("found_inf")
        number = self._num_steps if self.step_of is None else self.step_of()
        generators: dict[torch.device, torch.Generator] = {}

        def generator(device: torch.device) -> torch.Generator:
            if device not in generators:
                generators[device] = generator_of(self.seed, number, device)
            return generators[device]

        matrices = []
        for group in self.param_groups:
            kernel = _kernel_of(group)
            if kernel is MUON and is_sharded(group["params"]):
                matrices.append(group)
                continue
            for piece in self._pieces(group, kernel):
                self._update(group, kernel, piece, found_inf, generator(piece.weights[0].device))
        if matrices:
            self._update_matrices(matrices, generator)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`, of which each entry is converted to the type that it has here."""
        super().load_state_dict({**state_dict, "state": {}})  # which would convert everything to the weights' type
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        saved = state_dict["state"]
        for name, param in zip(names, params, strict=True):
            if name in saved:
                self.state[param] = {
                    key: value.to(self._dtype_of(key), copy=False).to(param.device)
                    for key, value in saved[name].items()
                    if key != "remainder" or self._has_remainder
                }

    def __getstate__(self) -> dict[str, Any]:
        """The content of copies and pickles."""
        own = ("has_masters", "rounding", "seed", "averages", "is_low", "_num_steps", "_step_supports_amp_scaling")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own}, "step_of": None}

    @property
    def _has_remainder(self) -> bool:
        return self.is_low and (self.has_masters or self.rounding == "kahan")

    def _dtype_of(self, key: str) -> torch.dtype:
        """The type of an entry of the state."""
        if key == "remainder":
            return torch.int16
        return self.averages.get(key, torch.float32 if key == "step" or self.has_masters else torch.bfloat16)

    def _state_of(self, param: Tensor, names: tuple[str, ...], *, counts: bool) -> dict[str, Tensor]:
        """The state of a parameter, created before its first update."""
        state: dict[str, Tensor] = self.state[param]
        names = (*names, "remainder") if self._has_remainder else names
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(param, dtype=self._dtype_of(name))
        if counts and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        return state

    def _pieces(self, group: Group, kernel: Kernel) -> Iterator[_Piece]:
        """The parameters with a gradient, as flat parts of about `PIECE_ELEMENTS` on one device.

        A larger parameter is split, unless the kernel needs the whole matrix or it is not contiguous.
        """
        names = _STATE[kernel] if kernel is not SGD or group["momentum"] else ()
        open_pieces: dict[torch.device, _Piece] = defaultdict(_Piece.empty)
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self._state_of(param, names, counts=kernel is ADAM)
            kept = (*names, "remainder") if self._has_remainder else names
            tensors = [*held_parts([param]), *held_like([param.grad], [param])]
            tensors += held_parts([state[name] for name in kept])
            is_flat = kernel is not MUON and all(one.is_contiguous() for one in tensors)
            size = tensors[0].numel()
            starts = range(0, size, PIECE_ELEMENTS) if is_flat and size > PIECE_ELEMENTS else range(1)
            for start in starts:
                piece = open_pieces[param.device]
                parts = tensors
                if is_flat:
                    parts = [one.view(-1) for one in tensors]
                    if len(starts) > 1:
                        parts = [one[start : start + PIECE_ELEMENTS] for one in parts]
                step = state.get("step")
                piece.add(parts, step if step is None or start == starts[-1] else step.clone(), len(names))
                if piece.size >= PIECE_ELEMENTS:
                    yield open_pieces.pop(param.device)
        yield from open_pieces.values()

    def _update(
        self, group: Group, kernel: Kernel, piece: _Piece, found_inf: Tensor | None, generator: torch.Generator
    ) -> None:
        """Update one piece."""
        wide = self._widened(piece)
        states = [piece.steps, *wide.columns] if kernel is ADAM else wide.columns
        kernel.update(Batch(group, wide.flat.device, wide.weights, []), wide.grads, states, found_inf)
        self._narrow(piece, wide, generator)

    def _update_matrices(self, groups: Sequence[Group], generator: Callable[[torch.device], torch.Generator]) -> None:
        """Update matrices of which this rank has some rows, orthogonalized as a whole. Collective."""
        opened, held = [], []
        for group in groups:
            params = iter([param for param in group["params"] if param.grad is not None])
            for piece in self._pieces(group, MUON):
                wide = self._widened(piece)
                opened.append((piece, wide))
                held += [
                    Held(next(params), weight, grad, momentum, group)
                    for weight, grad, momentum in zip(wide.weights, wide.grads, wide.columns[0], strict=True)
                ]
        update(held)
        for piece, wide in opened:
            self._narrow(piece, wide, generator(wide.flat.device))

    def _widened(self, piece: _Piece) -> _Wide:
        """A piece in float32."""
        flat, weights = _as_float32(piece.weights)
        if self._has_remainder:
            join_remainder(flat, _as_int32(piece.remainders))
        grads = _as_float32(piece.grads)[1]
        is_wide = [all(one.dtype == torch.float32 for one in column) for column in piece.columns]
        converted = [_as_float32(column) for column, wide in zip(piece.columns, is_wide, strict=True) if not wide]
        views_of_next = iter([views for _, views in converted])
        columns = [column if wide else next(views_of_next) for column, wide in zip(piece.columns, is_wide, strict=True)]
        low = [column for column, wide in zip(piece.columns, is_wide, strict=True) if not wide]
        return _Wide(
            flat, weights, grads, columns, [(*one, column) for one, column in zip(converted, low, strict=True)]
        )

    def _narrow(self, piece: _Piece, wide: _Wide, generator: torch.Generator) -> None:
        """Put the results into a piece, rounded."""
        flat, weights = wide.flat, wide.weights
        if self._has_remainder:
            remainder = torch.split(split_remainder(flat), [one.numel() for one in weights])
            views = [one.view_as(kept) for one, kept in zip(remainder, piece.remainders, strict=True)]
            torch._foreach_copy_(piece.remainders, views)
        elif self.is_low and self.rounding == "stochastic":
            round_stochastically(flat, generator)
        torch._foreach_copy_(piece.weights, weights)
        for flat_state, views, column in wide.converted:
            if self.rounding != "nearest":
                round_stochastically(flat_state, generator)
            torch._foreach_copy_(column, views)


class _Piece(NamedTuple):
    """Parts of weights, gradients and state that are updated together."""

    weights: list[Tensor]
    grads: list[Tensor]
    columns: list[list[Tensor]]
    """For each key of the state, that of all weights."""
    remainders: list[Tensor]
    steps: list[Tensor]

    @classmethod
    def empty(cls) -> _Piece:
        """One without any."""
        return cls([], [], [], [], [])

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(one.numel() for one in self.weights)

    def add(self, parts: list[Tensor], step: Tensor | None, num_columns: int) -> None:
        """Add a weight, its gradient, its state and its remainder, if there is one."""
        self.weights.append(parts[0])
        self.grads.append(parts[1])
        while len(self.columns) < num_columns:
            self.columns.append([])
        for column, part in zip(self.columns, parts[2:], strict=False):
            column.append(part)
        self.remainders.extend(parts[2 + num_columns :])
        if step is not None:
            self.steps.append(step)


class _Wide(NamedTuple):
    """A piece in float32."""

    flat: Tensor
    """All weights, one after the other."""
    weights: list[Tensor]
    """Views of it."""
    grads: list[Tensor]
    columns: list[list[Tensor]]
    converted: list[tuple[Tensor, list[Tensor], list[Tensor]]]
    """The columns that are not the piece's own: flat, views of it, and the piece's."""


_STATE: dict[Kernel, tuple[str, ...]] = {
    ADAM: ("exp_avg", "exp_avg_sq"),
    SGD: ("momentum_buffer",),
    MUON: ("momentum_buffer",),
}


def _kernel_of(group: Group) -> Kernel:
    return MUON if "ns_steps" in group else ADAM if "betas" in group else SGD


def _as_float32(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copies of all, one after the other, as one tensor and as views of it in their shapes."""
    return _flat(tensors, torch.float32)


def _as_int32(tensors: list[Tensor]) -> Tensor:
    return _flat(tensors, torch.int32)[0]


def _flat(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    sizes = [one.numel() for one in tensors]
    flat = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    views = [part.view(one.shape) for part, one in zip(torch.split(flat, sizes), tensors, strict=True)]
    torch._foreach_copy_(views, tensors)
    return flat, views
