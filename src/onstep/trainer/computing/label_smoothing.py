"""Label smoothing, for any model that returns logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onstep.data import Batch
from onstep.errors import ConfigError
from onstep.models.vocabulary_loss import LARGE_VOCABULARY, tokens_of_chunk
from onstep.trainer.loss_convention import MAPPING, shifts_labels
from onstep.training.compute.losses import IGNORE_INDEX


@dataclass(frozen=True)
class LabelSmoother:
    """The mean cross-entropy with `epsilon` of each label's probability spread evenly over all classes.

    Source: Szegedy et al. 2016, "Rethinking the Inception Architecture" (arXiv:1512.00567), section 7.
    """

    epsilon: float = 0.1
    ignore_index: int = IGNORE_INDEX

    def __call__(
        self,
        model_output: Mapping[str, Tensor] | Sequence[Tensor],
        labels: Tensor,
        shift_labels: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The loss, 0-d.

        Args:
            model_output: with logits (..., classes), under `logits` or as the first element.
            labels: class ids (...); those equal to `ignore_index` are not trained on.
            shift_labels: position t predicts the label of position t + 1.
            num_items_in_batch: what the sum is divided by; None is the number of labels trained on.
        """
        logits = model_output["logits"] if isinstance(model_output, MAPPING) else model_output[0]
        vocabulary = logits.shape[-1]
        if vocabulary >= LARGE_VOCABULARY and labels.numel() > tokens_of_chunk(vocabulary):
            if shift_labels:  # the last one is ignored, since a slice of the logits would be a copy
                labels = nn.functional.pad(labels[..., 1:], (0, 1), value=self.ignore_index)
            sums = self._sums_in_chunks(logits.reshape(-1, vocabulary), labels.reshape(-1))
        else:
            if shift_labels:
                logits, labels = logits[..., :-1, :], labels[..., 1:]
            sums = self._sums(logits, labels)
        items = labels.ne(self.ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        items = items.to(logits.device) if isinstance(items, Tensor) else items
        return (1 - self.epsilon) * sums[0] / items + self.epsilon * sums[1] / (items * vocabulary)

    def _sums(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of the costs of the labels, and of all classes."""
        costs = -nn.functional.log_softmax(logits, dim=-1)
        is_counted = labels.ne(self.ignore_index)
        own = costs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        even = costs.sum(dim=-1, dtype=torch.float32)
        return torch.where(is_counted, own, 0.0).sum(), torch.where(is_counted, even, 0.0).sum()

    def _sums_in_chunks(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The same; the backward pass normalizes the logits of each chunk of tokens again."""
        chunk, sums = tokens_of_chunk(logits.shape[-1]), list[tuple[Tensor, Tensor]]()
        for part, targets in zip(torch.split(logits, chunk), torch.split(labels, chunk), strict=True):
            if torch.is_grad_enabled():
                sums.append(checkpoint(self._sums, part, targets, use_reentrant=False))
            else:
                sums.append(self._sums(part, targets))
        own, even = zip(*sums, strict=True)
        return torch.stack(own).sum(), torch.stack(even).sum()


def smoothed_loss(
    smoother: Callable[..., Tensor], model: nn.Module, inputs: Batch, further: dict[str, object]
) -> tuple[Tensor, object]:
    """The smoothed loss of a model that is not passed the labels, and its outputs.

    Raises:
        ConfigError: for labels that are not class ids.
    """
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise ConfigError(f"label_smoothing_factor requires labels that are class ids (integers), got {kind}; use 0.")
    outputs = model(**inputs)
    return smoother(outputs, labels, shift_labels=shifts_labels(model), **further), outputs
