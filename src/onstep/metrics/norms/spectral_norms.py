"""Estimates spectral norms, the largest singular values of weight matrices, from a few products with each matrix.

An iteration multiplies a vector by the matrix and its adjoint, as in power iteration. While that only keeps the last
vector, here the norm is computed over the span of all vectors so far (Golub-Kahan bidiagonalization), which is much
more accurate for the same products, even if several singular values are close to the largest. Iterations are added
until the estimate has converged.

Source: Golub and Kahan 1965, "Calculating the singular values and pseudo-inverse of a matrix"; Paige and Saunders 1982,
"LSQR", section 3, for the recurrence; Kuczynski and Wozniakowski 1992, "Estimating the largest eigenvalue by the power
and Lanczos algorithms with a random start", for the rates of both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from onstep.distributed.shard_sums import ShardSums
from onstep.distributed.shards import local_part, split_of, whole
from onstep.errors import ConfigError
from onstep.metrics.norms.named_parameters import Model, measurable_parameters, reshard
from onstep.metrics.norms.parameter_norms import full_norms, local_norms, of_all_stages

TOLERANCE = 3e-3
"""An estimate has converged when the second half of its iterations increased it by less than this fraction."""
MOST_ITERATIONS = 320
"""After this many, the expected error is below 0.2% for any matrix of up to 100,000 rows (Kuczynski, Wozniakowski)."""
_BATCH = 2**22
"""Elements of same-shaped matrices multiplied in one call; a larger matrix is multiplied alone, without a copy."""


class SpectralNorms:
    """Measures the spectral norm of every parameter of a model repeatedly during training.

    A parameter with more than two dimensions is treated as a matrix ``(shape[0], -1)``; with fewer, the norm is its
    largest absolute value. The first measurement uses `2 * num_steps` iterations; later ones start from the previous
    singular vectors, mixed with random directions, and use `num_steps`; both add iterations until the estimate has
    converged. It is within 1% of an exact decomposition, typically within 0.1%, and never above it except for rounding.
    For a matrix with an infinite element it is infinite, for one with a NaN it is NaN.

    Start vectors come from separate generators, seeded by the parameter's name: no other random numbers are affected,
    and the same weights with the same state give the same norms.

    Args:
        num_steps: iterations of later measurements; each is two products with the matrix.

    Raises:
        ConfigError: if `num_steps` is not an integer >= 1.
    """

    def __init__(self, num_steps: int = 10) -> None:
        require_count("num_steps", num_steps)
        self.num_steps = num_steps
        self._vectors: dict[str, Tensor] = {}

    @torch.no_grad()
    def measure(self, model: Model) -> dict[str, float]:
        """The spectral norm of every parameter by name, tied ones once, in module order.

        Parameters without values (`missing_parameters`) are omitted. Collective in a pipeline, for the norms of all
        stages, and if parameters are DTensors: each is
        gathered and measured on every rank. Synchronizes with the device a few times in total: once for vectors, and
        once for all matrices whenever iterations are added.

        Args:
            model: the module, or its chunks.
        """
        reshard(model)
        parameters = measurable_parameters(model)
        vectors = {name: local_part(one) for name, one in parameters.items() if one.dim() < 2}
        norms = full_norms(local_norms(vectors, math.inf), model)
        matrices = {name: one for name, one in parameters.items() if one.dim() >= 2}
        waiting = [_Batch(matrices, names, self._vectors) for names in _batches(matrices)]
        while waiting:
            for batch in waiting:
                batch.iterate(batch.next_iterations(self.num_steps))
            for batch, read in zip(waiting, _read([batch.recurrence() for batch in waiting]), strict=True):
                batch.conclude(read)
            for batch in waiting:
                if batch.is_settled:
                    norms |= batch.norms
                    self._vectors |= batch.left_vectors()
            waiting = [batch for batch in waiting if not batch.is_settled]
        return of_all_stages({name: norms.get(name, 0.0) for name in parameters}, model)

    def state_dict(self) -> dict[str, Any]:
        """The latest left singular vectors by name, from which the next measurement starts."""
        return {"vectors": dict(self._vectors)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Start the next measurement from the vectors of `state_dict`."""
        self._vectors = dict(state_dict["vectors"])


class _Batch:
    """Matrices of one shape, their bidiagonal forms so far, and the corresponding basis vectors."""

    def __init__(self, matrices: Mapping[str, Tensor], names: list[str], starts: Mapping[str, Tensor]) -> None:
        self.names = names
        self.norms: dict[str, float] = {}
        self.is_settled = False
        self._parameters = [matrices[name] for name in names]
        self._rows, self._columns = _shape(self._parameters[0])
        first = self._parameters[0]
        is_tiny = first.dtype.itemsize == 1  # float8, which torch does not promote
        self._dtype = torch.float32 if is_tiny else torch.promote_types(first.dtype, torch.float32)
        known = {name: starts[name] for name in names if name in starts and self._fits(starts[name])}
        self._is_cold = len(known) < len(names)
        self._left = _starts(names, self._rows, known, self._dtype, first.device)[:, None]
        """Orthonormal vectors, (num_matrices, iterations + 1, rows); zero vectors once the space is exhausted."""
        self._right = self._left.new_zeros(len(names), 0, self._columns)
        self._alphas = self._betas = self._left.new_zeros(len(names), 0, dtype=torch.float64)
        self._coefficients = torch.zeros(0)

    def _fits(self, start: Tensor) -> bool:
        return start.shape == (self._rows,) and start.is_complex() == self._dtype.is_complex

    def next_iterations(self, num_steps: int) -> int:
        """Number of iterations to add: `num_steps` at first, then as many as have been done."""
        done = self._right.shape[1]
        wanted = done or num_steps * (2 if self._is_cold else 1)
        return min(wanted, self._most() - done)

    def iterate(self, count: int) -> None:
        """Extend the bidiagonal forms by `count` iterations: ``A V_k = U_(k+1) B_k``. Does not synchronize.

        Each matrix is scaled so that its largest absolute value is near 1.
        """
        shape = self._rows, self._columns
        each = [whole(parameter).detach().to(self._dtype).reshape(shape) for parameter in self._parameters]
        matrices = each[0][None] if len(each) == 1 else torch.stack(each)
        largest = torch.stack(torch._foreach_norm(each, math.inf))[:, None]
        scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0).rsqrt()
        done = self._right.shape[1]
        self._left = _extended(self._left, count)
        self._right = _extended(self._right, count)
        self._alphas, self._betas = _extended(self._alphas, count), _extended(self._betas, count)
        for step in range(done, done + count):
            left = self._left[:, step].conj() * scale
            image = torch.bmm(left.unsqueeze(1), matrices).squeeze(1).conj() * scale
            self._alphas[:, step] = self._append(self._right, step, image)
            image = torch.bmm(matrices, (self._right[:, step] * scale).unsqueeze(2)).squeeze(2) * scale
            self._betas[:, step] = self._append(self._left, step + 1, image)
        self._scale = torch.where(largest.isfinite(), scale, largest).squeeze(1).to(torch.float64)
        """The scale factor; for a matrix with non-finite elements, its norm instead."""

    def recurrence(self) -> Tensor:
        """The coefficients that the host needs, (num_matrices, 2 * iterations + 1) float64 on the device.

        Collective for DTensors: ranks with different hardware get the same values, so all add iterations or none.
        """
        recurrence = torch.cat([self._alphas, self._betas, self._scale[:, None]], dim=1)
        same = ShardSums([split_of(self._parameters[0])])(recurrence.flatten(), partial(torch.amax, dim=0))
        return same.view_as(recurrence)

    def conclude(self, recurrence: Tensor) -> None:
        """Compute the norms from the bidiagonal forms and whether they have converged."""
        count = self._alphas.shape[1]
        is_finite = recurrence.isfinite().all(dim=1)
        alphas, betas, scale = torch.split(recurrence.where(is_finite[:, None], 1.0), [count, count, 1], dim=1)
        vectors, values, _ = torch.linalg.svd(_bidiagonal(alphas, betas), full_matrices=False)
        self._coefficients, largest = vectors[:, :, 0], values[:, 0]
        half = (count + 1) // 2
        before = torch.linalg.matrix_norm(_bidiagonal(alphas[:, :half], betas[:, :half]), 2)
        has_settled = half < count and bool(((largest - before <= TOLERANCE * largest) | ~is_finite).all())
        self.is_settled = has_settled or count == self._most()
        instead = recurrence[:, -1].where(~recurrence[:, -1].isfinite(), math.nan)
        scale = scale.squeeze(1)  # its square could exceed the range of float64
        norms = (largest / scale / scale).where(is_finite, instead)
        self.norms = dict(zip(self.names, norms.tolist(), strict=True))

    def left_vectors(self) -> dict[str, Tensor]:
        """The left singular vector of each largest singular value, (rows,), in a dtype that a checkpoint can hold."""
        coefficients = self._coefficients.to(self._left.device, self._dtype)
        found = torch.bmm(coefficients.unsqueeze(1), self._left).squeeze(1)
        kept = torch.complex64 if found.is_complex() else found.dtype
        return {name: vector.to(kept, copy=True) for name, vector in zip(self.names, found, strict=True)}

    def _most(self) -> int:
        return min(self._rows, self._columns, MOST_ITERATIONS)

    def _append(self, basis: Tensor, place: int, image: Tensor) -> Tensor:
        """Add the component of `image` orthogonal to the basis as vector `place`; returns its length, (num_matrices,).

        Orthogonalizes twice, since otherwise rounding would reintroduce existing vectors. The length is float64.
        """
        length_before = _lengths(image)
        for _ in range(2):
            image = image - torch.bmm(torch.bmm(basis.conj(), image.unsqueeze(2)).transpose(1, 2), basis).squeeze(1)
        length = _lengths(image)
        is_new = ~(length <= 1e-6 * length_before)  # NaN counts as new, so that it propagates
        length = torch.where(is_new, length, 0.0)
        inverse = torch.where(length == 0, 0.0, length.reciprocal())
        basis[:, place] = image * inverse[:, None].to(image.dtype)
        return length


def require_count(name: str, value: Any) -> None:
    """Refuse a value that is not a valid number of iterations.

    Raises:
        ConfigError: if `value` is not an integer >= 1.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise ConfigError(f"{name} must be an integer >= 1, got {value!r}; the default is 10")


def _batches(matrices: Mapping[str, Tensor]) -> list[list[str]]:
    """Group the names of matrices with the same shape, dtype, device and sharding, up to the batch size."""
    alike: dict[Any, list[str]] = {}
    for name, matrix in matrices.items():
        if matrix.numel():
            alike.setdefault((_shape(matrix), matrix.dtype, matrix.device, split_of(matrix)), []).append(name)
    batches = []
    for names in alike.values():
        size = max(1, _BATCH // matrices[names[0]].numel())
        batches += [names[start : start + size] for start in range(0, len(names), size)]
    return batches


def _shape(parameter: Tensor) -> tuple[int, int]:
    return parameter.shape[0], math.prod(parameter.shape[1:])


def _starts(
    names: list[str], size: int, known: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Unit vectors, (num_names, size): a random direction, or halfway between that and the previous singular vector.

    The random half finds a singular value that has outgrown the previous one. Does not synchronize with the device.
    """
    random = torch.stack([_random_direction(name, size) for name in names]).to(device, dtype)
    zero = torch.zeros(size, dtype=dtype, device=device)
    before = torch.stack([known[name].to(device, dtype) if name in known else zero for name in names])
    return normalize(random + before.nan_to_num(), dim=1)


def _random_direction(name: str, size: int) -> Tensor:
    """A unit vector on the CPU, determined by name and size."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(size, generator=generator, dtype=torch.float64), dim=0)


def _read(tensors: list[Tensor]) -> list[Tensor]:
    """Copy the tensors to the host in a single transfer."""
    home = tensors[0].device
    flat = torch.cat([tensor.flatten().to(home) for tensor in tensors]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _bidiagonal(alphas: Tensor, betas: Tensor) -> Tensor:
    """Lower bidiagonal matrices, (n, k + 1, k), with `alphas` on the diagonal and `betas` below."""
    count = alphas.shape[1]
    forms = alphas.new_zeros(alphas.shape[0], count + 1, count)
    places = torch.arange(count)
    forms[:, places, places], forms[:, places + 1, places] = alphas, betas
    return forms


def _extended(basis: Tensor, count: int) -> Tensor:
    """`basis` extended by `count` entries along dimension 1."""
    return torch.cat([basis, basis.new_zeros(basis.shape[0], count, *basis.shape[2:])], dim=1)


def _lengths(vectors: Tensor) -> Tensor:
    if vectors.is_complex():
        vectors = torch.view_as_real(vectors.resolve_conj()).flatten(1)
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64)
    return lengths
