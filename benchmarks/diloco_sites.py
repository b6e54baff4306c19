"""A transformer of 70,000 parameters, and workers that train it on the default corpus, without sockets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onstep.data.corpus.text_files import default_corpus_files

LENGTH, BATCH, WIDTH, LR = 32, 8, 48, 3e-3
Tensors = dict[str, Tensor]


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (batch, length, WIDTH)."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        result: Tensor = x + self.feed(self.norms[1](x))
        return result


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128))

    def loss(self, text: Tensor) -> Tensor:
        """Of text with the shape (batch, LENGTH + 1)."""
        logits = self.head(self.blocks(self.bytes(text[:, :-1]) + self.positions.weight))
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def corpus(size: int = 3_000_000) -> Tensor:
    """The beginning of the default corpus."""
    text = b""
    for path in default_corpus_files():
        text += path.read_bytes()
        if len(text) > size:
            break
    return torch.frombuffer(bytearray(text[:size]), dtype=torch.uint8).long().clamp(max=127)


def new_model() -> Transformer:
    """The same at each call."""
    torch.manual_seed(0)
    return Transformer()


def values(model: nn.Module) -> Tensors:
    """Copies of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensors:
    """Of parameters."""
    return {name: one[name] - other[name] for name in one}


class Site:
    """A worker: its model, inner optimizer and data."""

    def __init__(
        self, index: int, text: Tensor, total_steps: int, *, lr: float = LR, batch: int = BATCH, warmup: int = 20
    ) -> None:
        self.model = new_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0, fused=True)
        self._lr, self._batch, self._warmup = lr, batch, warmup
        self._generator = torch.Generator().manual_seed(1000 + index)
        self._text, self._total, self._steps = text, total_steps, 0

    def train(self, start: Mapping[str, Tensor] | None, steps: int, run_step: float) -> Tensors:
        """The parameters after so many steps from `start`, or from those that it has."""
        if start is not None:
            self.model.load_state_dict(dict(start))
        for step in range(steps):
            share = min(1.0, (run_step + step) / self._total)
            self._steps += 1
            decayed = 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2
            self.optimizer.param_groups[0]["lr"] = self._lr * min(1.0, self._steps / self._warmup) * decayed
            starts = torch.randint(0, len(self._text) - LENGTH - 1, (self._batch, 1), generator=self._generator)
            self.optimizer.zero_grad()
            self.model.loss(self._text[starts + torch.arange(LENGTH + 1)]).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return values(self.model)


@dataclass(frozen=True)
class Bench:
    """What all runs have in common."""

    text: Tensor
    held_out: Tensor
    rounds: int
    steps: int
    """Of a round."""

    def sites(self, count: int) -> list[Site]:
        """New workers."""
        return [Site(index, self.text, self.rounds * self.steps) for index in range(count)]

    @torch.no_grad()
    def loss(self, parameters: Mapping[str, Tensor]) -> float:
        """Of held-out text."""
        model = new_model()
        model.load_state_dict(dict(parameters))
        starts = torch.randint(
            0, len(self.held_out) - LENGTH - 1, (1024, 1), generator=torch.Generator().manual_seed(5)
        )
        return float(model.loss(self.held_out[starts + torch.arange(LENGTH + 1)]))
