"""Cuts a transformer into the stages of a pipeline, which keep the names that parameters have in the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from onstep.config import ModelConfig
from onstep.distributed.pipeline.seats import Seat, other_stage_of
from onstep.distributed.pipeline.stand_ins import stand_ins_of
from onstep.distributed.pipeline.whole import WholePipeline
from onstep.errors import ConfigError
from onstep.models.layers.sequence_context import (
    KeyValueCache,
    SequenceContext,
    chosen_positions,
    sequence_context,
)
from onstep.models.offloading import offloading
from onstep.models.sizes import vocabulary_size
from onstep.models.stage_dropout import Draws, StageDropout
from onstep.models.transformer import Transformer
from onstep.models.vocabulary_loss import Reduction


class TransformerStage(Transformer):
    """Consecutive layers of a transformer: the first stage has the embedding too, and the last the loss.

    It is called as the whole model is. Between the ends, what it computes is the hidden states (batch, seq, hidden)
    from those of `set_input_tensor`; of the tokens only the shape counts there.

    Args:
        whole: the model, whose modules it uses.
        seat: which stage it is.
        embedding: of the first stage, where that is on this rank too; the last stage may use it.
    """

    def __init__(self, whole: Transformer, seat: Seat, embedding: nn.Embedding | None = None) -> None:
        nn.Module.__init__(self)
        self.config = whole.config
        self.pipeline_seat = seat
        self.input_tensor: Tensor | None = None
        self.pipeline: WholePipeline | None = None
        """All stages, by which it generates; None in one process."""
        uses = has_embedding_at_both_ends(whole.config) and seat.is_last and not seat.is_first
        self.copies_embedding = uses and embedding is None
        """Whether its embedding is a copy of that of the first stage, which is on another rank and counts it."""
        last = seat.num_stages - 1
        self.elsewhere: dict[str, int] = {
            f"layers.{index}": stage
            for stage, layers in enumerate(seat.stages)
            for index in layers
            if stage != seat.stage
        }
        """The modules of other stages, each with its stage."""
        if seat.is_first or uses:
            self.embedding = whole.embedding if embedding is None else embedding
        else:
            self.elsewhere["embedding"] = 0
        if self.copies_embedding:
            self.embedding.weight.shared = True  # type: ignore[attr-defined]
        self._take(whole, "position_embedding", 0)
        self.dropout, self.rotary = whole.dropout, whole.rotary
        self.stream = _stream_of(whole, seat)
        self.layers = StageLayers(whole.layers, seat)
        for name in ("final_norm", "mtp", "output"):
            self._take(whole, name, last)
        self.stand_ins = stand_ins_of(whole, self)
        self.vocabulary = None
        self.whole_shapes = {name: tuple(one.shape) for name, one in whole.state_dict().items()}
        """The shapes of all weights of the model, in its order."""
        self.aliases: dict[str, str] = {}
        """The names of weights that have another name, too, each with that."""

    def _take(self, whole: Transformer, name: str, stage: int) -> None:
        """Use a module that one stage alone has, where this is that stage."""
        module = getattr(whole, name)
        if module is None or stage == self.pipeline_seat.stage:
            setattr(self, name, module)
        else:
            self.elsewhere[name] = stage

    def __getattr__(self, name: str) -> Any:
        """A module, by torch.

        Args:
            name: of an attribute that the object does not have.

        Raises:
            OtherStageError: for one that is on another stage.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            stage = self.__dict__.get("elsewhere", {}).get("output" if name == "output_layer" else name)
            if stage is None:
                raise
        raise self.pipeline_seat.lacks(name, stage)

    def get_submodule(self, target: str) -> nn.Module:
        """See torch.

        Args:
            target: the name of a module.

        Raises:
            OtherStageError: for one that is on another stage.
        """
        stage = other_stage_of(self, target)
        if stage is not None:
            raise self.pipeline_seat.lacks(target, stage)
        return super().get_submodule(target)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Set what the stage before has computed, (batch, seq, hidden), for the next call.

        Args:
            input_tensor: the hidden states, or as in Megatron a list of them alone; None for tokens to be embedded.
        """
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    @property
    def has_value_head(self) -> bool:
        """False: a model with such a head is not cut."""
        return False

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states."""
        return self.config.hidden_size

    @property
    def tied_weights(self) -> tuple[str, ...]:
        """The names of the parameters that the first stage and the last have both."""
        return ("embedding.weight",) if has_embedding_at_both_ends(self.config) else ()

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The type of the hidden states: that of the embedding, and so of all weights."""
        return next(self.parameters()).dtype

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        reduction: Reduction = "none",
        cache: KeyValueCache | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """As `Transformer.forward` on the last stage, else the hidden states, whatever is to be made of them.

        Raises:
            ConfigError: for a cache: `generate` runs all stages.
        """
        if cache is not None:
            raise ConfigError(
                "a stage of a pipeline has no logits for a cache; call generate(stage, ...) on all ranks."
            )
        if self.pipeline_seat.is_last:
            return super().forward(
                tokens,
                labels,
                reduction=reduction,
                position_ids=position_ids,
                document_ids=document_ids,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
            )
        position_ids = chosen_positions(position_ids, document_ids)
        context = self._context(tokens, None, position_ids, document_ids, cu_seqlens, max_seqlen)
        return self._hidden_states(tokens, position_ids, context)

    @torch.no_grad()
    def next_scores(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """The logits (batch, vocab) of the token after `tokens`, on all ranks. Collective over the pipeline.

        Args:
            tokens: (batch, seq), the same on all of them.
            cache: of the layers of this rank, at earlier positions, to which these are appended; None for none.
        """
        pipeline, (batch, length) = self.pipeline, tokens.shape
        assert pipeline is not None

        def forward(chunk: nn.Module, received: Tensor | None) -> Tensor:
            assert isinstance(chunk, TransformerStage)
            chunk.set_input_tensor(received)
            hidden = chunk.hidden_states(tokens, cache)
            return chunk.logits(hidden[:, -1]) if chunk.pipeline_seat.is_last else hidden

        shape, config, dtype = (batch, length, self.config.hidden_size), self.config, self.hidden_dtype
        scores = torch.empty(batch, vocabulary_size(config), dtype=dtype, device=tokens.device)
        pipeline.run(forward, shape, scores)
        if cache is not None:
            cache.advance(length)
        return scores

    def _context(self, tokens: Tensor, *rest: object) -> SequenceContext:
        return sequence_context(self.rotary, tokens, *rest, dtype=self.hidden_dtype)  # type: ignore[arg-type]

    def _hidden_states(self, tokens: Tensor, position_ids: Tensor | None, context: SequenceContext) -> Tensor:
        x = self.input_tensor
        if x is None and not self.pipeline_seat.is_first:
            raise ConfigError(
                f"stage {self.pipeline_seat.stage} of a pipeline has no input: the stage before has computed one for "
                f"each micro-batch; call the model once for each in the forward step, and nowhere else."
            )
        self.input_tensor = None
        has_dropout = self.training and self.stream.draws
        with self.stream.around(tokens, context) if has_dropout else nullcontext(), offloading(self, self.config):
            if x is None:
                x = self._embedded(tokens, context.cache, position_ids)
            for index, layer in zip(self.pipeline_seat.layers, self.layers, strict=True):
                x = self._run_layer(layer, x, context, index)
        return self.final_norm(x) if self.pipeline_seat.is_last else x

    def num_parameters(self, trainable_only: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of parameters of this stage, without an embedding that the first stage counts.

        Args:
            trainable_only: count only those with `requires_grad`.
            exclude_embeddings: exclude the embedding matrix and learned positions.
        """
        return sum(
            one.numel()
            for name, one in self.named_parameters()
            if (one.requires_grad or not trainable_only)
            and not (self.copies_embedding and name == "embedding.weight")
            and not (exclude_embeddings and "embedding." in name)
        )


class StageLayers(nn.ModuleList):
    """The layers of a stage, which are found by their numbers in the whole model.

    Args:
        layers: those of the whole model.
        seat: which stage it is.
    """

    def __init__(self, layers: nn.ModuleList, seat: Seat) -> None:
        super().__init__()
        self.seat = seat
        for index in seat.layers:
            self.add_module(str(index), layers[index])

    def __getitem__(self, index: int | slice) -> Any:
        """A layer of the whole model, or a list of several.

        Args:
            index: as in the list of all layers.

        Raises:
            OtherStageError: for a layer that is on another stage.
        """
        found = range(self.seat.num_layers)[index]
        for one in [found] if isinstance(found, int) else found:
            if one not in self.seat.layers:
                raise self.seat.lacks(f"layers.{one}", self.seat.stage_of(one))
        return self._modules[str(found)] if isinstance(found, int) else [self._modules[str(one)] for one in found]


def has_embedding_at_both_ends(config: ModelConfig) -> bool:
    """Whether the last stage uses the embedding too: for the logits, or to predict more tokens."""
    return config.share_embeddings_and_output_weights or bool(config.mtp_num_layers)


def _stream_of(whole: Transformer, seat: Seat) -> StageDropout:
    """What a stage and the others draw in a forward pass."""
    first = Draws((whole.config.hidden_size,) if whole.dropout.p else ())
    layers = [Draws.of(layer) for layer in whole.layers]
    own = layers[seat.layers.start : seat.layers.stop]
    before, after = [first, *layers[: seat.layers.start]], layers[seat.layers.stop :]
    before, own = ([], [first, *own]) if seat.is_first else (before, own)
    for depth in [] if whole.mtp is None else whole.mtp.depths:
        (own if seat.is_last else after).extend([first, Draws.of(depth.get_submodule("layer"))])
    return StageDropout(before, after, own, seat.stage, seat.num_stages)


def cut(whole: Transformer, seats: Sequence[Seat]) -> list[TransformerStage]:
    """The stages of this rank, ascending; the rest of the model is given up.

    Args:
        whole: the model.
        seats: which stages this rank has.
    """
    first = whole.embedding if any(seat.is_first for seat in seats) else None
    return [TransformerStage(whole, seat, first) for seat in seats]
