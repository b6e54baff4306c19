"""Updates bfloat16 weights in float32: with master weights, or without, rounding the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onstep.distributed.shards import is_sharded
from onstep.errors import ConfigError
from onstep.optim.kernels import ADAM, MUON, SGD, Batch, Kernel
from onstep.optim.rounding import generator_of, join_remainder, round_stochastically, split_remainder

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

    The numbers for stochastic rounding depend on the seed and the step alone: they are the same on all ranks and after
    a resume, and no other generator is used.

    Its groups are those of `optimizers` in turn, as the same dictionaries. A group added later belongs to the last.

    Args:
        optimizers: torch's, without state: AdamW or SGD, or Muon and AdamW.
        has_masters: whether there are master weights.
        rounding: `stochastic`, `kahan` or `nearest`; without master weights.
        seed: for stochastic rounding.

    Raises:
        ConfigError: for weights that are sharded, or neither on a CPU nor on a GPU of CUDA.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        has_masters: bool = True,
        rounding: str = "stochastic",
        seed: int = 0,
    ) -> None:
        self.has_masters, self.rounding, self.seed = has_masters, rounding, seed
        self.step_of: Callable[[], int] | None = None
        """The number of the step that is being taken; None counts the calls of `step`."""
        self._num_steps = 0
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.defaults = dict(optimizers[-1].defaults)
        kernels = [_kernel_of(group) for group in self.param_groups]
        self._step_supports_amp_scaling = MUON not in kernels  # torch's name; whether `found_inf` is honoured
        params = [param for group in self.param_groups for param in group["params"]]
        if is_sharded(params):
            raise ConfigError(
                "optimizer.params_dtype=bfloat16 updates whole weights, and these are sharded over ranks; leave it "
                "float32, and set mixed_precision=bf16_mixed"
            )
        devices = {param.device.type for param in params} - {"cpu", "cuda"}
        if devices:
            raise ConfigError(
                f"optimizer.params_dtype=bfloat16 requires a CPU or CUDA, got weights on {', '.join(sorted(devices))}; "
                "leave it float32"
            )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient, unless the attribute `found_inf`, a tensor, is 1."""
        assert closure is None, "a training step has no closure"
        self._num_steps += 1
        found_inf: Tensor | None = vars(self).get("found_inf")
        number = self._num_steps if self.step_of is None else self.step_of()
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            kernel = _kernel_of(group)
            for piece in self._pieces(group, kernel):
                device = piece.weights[0].device
                if device not in generators:
                    generators[device] = generator_of(self.seed, number, device)
                self._update(group, kernel, piece, found_inf, generators[device])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`, in the types that it was saved in."""
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
        own = ("has_masters", "rounding", "seed", "_num_steps", "_step_supports_amp_scaling")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own}, "step_of": None}

    @property
    def _has_remainder(self) -> bool:
        return self.has_masters or self.rounding == "kahan"

    def _dtype_of(self, key: str) -> torch.dtype:
        """The type of an entry of the state."""
        if key == "remainder":
            return torch.int16
        return torch.float32 if key == "step" or self.has_masters else torch.bfloat16

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
            tensors = [param, param.grad, *(state[name] for name in names)]
            tensors += [state["remainder"]] if self._has_remainder else []
            is_flat = kernel is not MUON and all(one.is_contiguous() for one in tensors)
            size = param.numel()
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
        flat, weights = _as_float32(piece.weights)
        if self._has_remainder:
            join_remainder(flat, _as_int32(piece.remainders))
        grads = _as_float32(piece.grads)[1]
        columns, flats = piece.columns, []
        if not self.has_masters:
            converted = [_as_float32(column) for column in piece.columns]
            flats, columns = [one for one, _ in converted], [views for _, views in converted]
        states = [piece.steps, *columns] if kernel is ADAM else columns
        batch = Batch(group, flat.device, weights, [])
        kernel.update(batch, grads, states, found_inf)
        if self._has_remainder:
            remainder = torch.split(split_remainder(flat), [one.numel() for one in weights])
            views = [one.view_as(kept) for one, kept in zip(remainder, piece.remainders, strict=True)]
            torch._foreach_copy_(piece.remainders, views)
        elif self.rounding == "stochastic":
            round_stochastically(flat, generator)
        torch._foreach_copy_(piece.weights, weights)
        for flat_state, views, column in zip(flats, columns, piece.columns, strict=False):
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
