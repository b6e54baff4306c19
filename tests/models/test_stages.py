"""The stages of a transformer, one after the other in one process, are the whole model, by value and by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onstep.config import ModelConfig
from onstep.distributed.pipeline.kept_activations import refusing_kept_activations
from onstep.distributed.pipeline.seats import Seat, is_staged, seat_of
from onstep.distributed.pipeline.stand_ins import Shown
from onstep.errors import ConfigError, OtherStageError
from onstep.metrics.model_shape import ModelShape, num_parameters
from onstep.models.stages import TransformerStage, cut
from onstep.models.transformer import Transformer, build_transformer
from tests.support.small_configs import GPT2, SIZES


def whole_of(**options: Any) -> Transformer:
    return build_transformer(ModelConfig(**{**SIZES, "num_layers": 4, **options}), seed=3)


def seats(*counts: int) -> list[Seat]:
    starts = [sum(counts[:number]) for number in range(len(counts))]
    stages = tuple(range(at, at + size) for at, size in zip(starts, counts, strict=True))
    return [Seat(stage, stages) for stage in range(len(counts))]


@pytest.mark.parametrize("options", [{}, GPT2, {"share_embeddings_and_output_weights": True}])
@pytest.mark.parametrize("counts", [(2, 2), (0, 3, 1)])
def test_stages_compute_what_the_whole_model_does(options: dict[str, Any], counts: tuple[int, ...]) -> None:
    whole = whole_of(**options)
    tokens = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    expected = whole(tokens, tokens, reduction="sum", document_ids=documents)
    names = dict(whole.named_parameters())
    stages = [stage for seat in seats(*counts) for stage in cut(whole, [seat])]
    hidden = None
    for stage in stages:
        stage.set_input_tensor(hidden)
        hidden = stage(tokens, tokens, reduction="sum", document_ids=documents)
    assert torch.equal(hidden, expected)
    own = [dict(stage.named_parameters()) for stage in stages]
    assert set().union(*own) == set(names)
    assert all(one.shape == names[name].shape for part in own for name, one in part.items())
    assert sum(stage.num_parameters() for stage in stages) == sum(one.numel() for one in names.values())
    assert list(stages[0].whole_shapes) == list(names)


@pytest.mark.parametrize("documents", [[], [4, 5], [100, 160, 40]])
def test_stages_drop_what_the_whole_model_does_of_each_micro_batch(documents: list[int]) -> None:
    whole = whole_of(hidden_dropout=0.2, attention_dropout=0.3, seq_length=300)
    length = sum(documents) or 9
    tokens = torch.randint(0, 67, (2, length), generator=torch.Generator().manual_seed(0))
    ids = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)).expand(2, -1) if documents else None
    torch.manual_seed(7)
    expected = [whole(tokens, tokens, reduction="sum", document_ids=ids) for _ in range(2)]
    hidden: list[Any] = [None, None]
    for stage in [stage for seat in seats(1, 2, 1) for stage in cut(whole, [seat])]:
        torch.manual_seed(7)
        for number in range(2):
            stage.set_input_tensor(hidden[number])
            hidden[number] = stage(tokens, tokens, reduction="sum", document_ids=ids)
    assert torch.equal(torch.stack(hidden), torch.stack(expected))


def test_the_last_stage_of_a_tied_model_has_a_copy_that_the_first_one_counts() -> None:
    first, last = cut(whole_of(share_embeddings_and_output_weights=True), seats(2, 2)[:1])[0], None
    last = cut(whole_of(share_embeddings_and_output_weights=True), seats(2, 2)[1:])[0]
    assert getattr(last.embedding.weight, "shared", False)
    assert not getattr(first.embedding.weight, "shared", False)
    assert torch.equal(first.embedding.weight, last.embedding.weight)


def test_both_ends_on_one_rank_have_one_embedding() -> None:
    first, last = cut(whole_of(share_embeddings_and_output_weights=True), [seats(2, 2)[0], seats(2, 2)[1]])
    assert first.embedding is last.embedding
    assert not getattr(last.embedding.weight, "shared", False)


def test_a_stage_knows_its_seat_and_does_not_generate_by_itself() -> None:
    whole = whole_of()
    assert not is_staged([whole])
    [stage] = cut(whole, seats(2, 2)[1:])
    assert isinstance(stage, TransformerStage)
    assert seat_of(stage) == Seat(1, (range(2), range(2, 4)))
    assert is_staged([stage])
    assert [name.split(".")[1] for name, _ in stage.named_parameters() if name.startswith("layers.")][:1] == ["2"]
    with pytest.raises(
        ConfigError, match=r"a stage of a pipeline has no logits for a cache; call generate\(stage, ...\) on all ranks"
    ):
        stage(torch.zeros(1, 1, dtype=torch.int64), cache=object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"stage 1 of a pipeline has no input"):
        stage(torch.zeros(1, 1, dtype=torch.int64))


READS: dict[str, Callable[[Any], object]] = {
    "embedding": lambda stage: stage.embedding.weight,
    "position_embedding": lambda stage: stage.position_embedding.weight,
    "layers.0": lambda stage: stage.layers[0],
    "layers.1": lambda stage: stage.layers[1:3],
    "layers.1.attention": lambda stage: stage.get_parameter("layers.1.attention.query.weight"),
    "output_layer": lambda stage: stage.output_layer.weight,
    "final_norm": lambda stage: stage.final_norm.weight,
    "mtp": lambda stage: stage.mtp.depths,
}


@pytest.mark.parametrize("name", READS)
def test_what_is_on_another_stage_is_named_with_it(name: str) -> None:
    options = {"position_embedding_type": "learned_absolute"} if "position" in name else {"mtp_num_layers": 1}
    whole = whole_of(**(options if name in ("position_embedding", "mtp") else {}))
    first, middle, last = (cut(whole, [seat])[0] for seat in seats(1, 2, 1))
    owner = 0 if "embedding" in name or name == "layers.0" else 1 if name.startswith("layers.1") else 2
    without = middle if owner != 1 else last
    with pytest.raises(
        ConfigError, match=rf"^stage {without.pipeline_seat.stage} of a pipeline has no {name}\b.* {owner}:"
    ):
        READS[name](without)
    assert not hasattr(middle, "embedding")
    READS[name]((first, middle, last)[owner])
    assert last.layers[-1] is last.layers[3] is whole.layers[3]


HOOKS: dict[str, Callable[[list[Any], Any], Any]] = {
    "output": lambda kept, output: kept.append(output),
    "square": lambda kept, output: kept.append(output.float().square().mean()),
    "values": lambda kept, output: kept.append(output.detach()),
    "number": lambda kept, output: kept.append(output.square().mean().item()),
    "returns": lambda kept, output: kept.append(output) or output * 2,
    "in place": lambda kept, output: kept.append(output.mul_(2)),
}


@pytest.mark.parametrize("how", HOOKS)
def test_hooks_of_a_stage_may_keep_values_and_change_activations_but_not_keep_them(how: str) -> None:
    [stage] = cut(whole_of(), seats(2, 2)[:1])
    kept: list[Any] = []
    hook = stage.layers[1].register_forward_hook(lambda module, args, output: HOOKS[how](kept, output))
    with refusing_kept_activations(stage, stage.pipeline_seat):
        if how in ("output", "square"):
            with pytest.raises(
                OtherStageError, match=r"^a forward hook of layers.1 keeps an activation of stage 0 of a"
            ):
                stage(torch.zeros(1, 3, dtype=torch.int64))
        else:
            stage(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
            assert all(one.grad is not None for one in stage.layers[1].parameters())
    assert list(stage.layers[1]._forward_hooks) == [hook.id]
    assert kept


@pytest.mark.parametrize("tied", [False, True])
def test_users_code_is_shown_the_weights_of_all_stages_without_values(tied: bool) -> None:
    whole = whole_of(share_embeddings_and_output_weights=tied)
    whole.layers[0].requires_grad_(False)
    known = {name: (one.shape, one.requires_grad) for name, one in whole.named_parameters()}
    [stage] = cut(whole, seats(2, 2)[1:])
    own, hooks = dict(stage.named_parameters()), whole.layers[1]._forward_hooks
    with Shown(stage):
        found = dict(stage.named_parameters())
        assert {name: (one.shape, one.requires_grad) for name, one in found.items()} == known
        assert all(found[name] is one for name, one in own.items())
        assert {name for name, _ in stage.named_modules()} == {name for name, _ in whole.named_modules()}
        for name in found.keys() - own.keys():
            for compute in (torch.norm, torch.clone, lambda one: torch._foreach_norm([one]), lambda one: one.data):
                with pytest.raises(
                    OtherStageError, match=rf"^stage 1 of a pipeline has no {name}, which is on stage 0"
                ):
                    compute(found[name])
            with torch.no_grad():
                assert found[name].mul_(2) is found[name]
        for module in stage.modules():
            module.register_forward_hook(lambda *given: None)
        stage.set_input_tensor(torch.zeros(1, 3, whole.config.hidden_size))
        seen: list[str] = []
        stage.final_norm.register_forward_pre_hook(
            lambda *given: seen.extend(name for name, _ in stage.named_parameters())
        )
        stage(torch.zeros(1, 3, dtype=torch.int64))
    assert seen == list(own) == [name for name, _ in stage.named_parameters()]
    assert not hooks
    with Shown(copied := copy.deepcopy(stage)):
        assert list(own) == [name for name, _ in copied.named_parameters()]


@pytest.mark.parametrize("tied", [False, True])
def test_the_shape_of_a_stage_counts_its_experts_and_the_depths_of_the_last(tied: bool) -> None:
    options = {"num_moe_experts": 4, "moe_layer_freq": [1, 0, 0, 1], "mtp_num_layers": 2}
    whole = whole_of(**options, share_embeddings_and_output_weights=tied)
    shape = ModelShape.of(whole.config)
    assert shape is not None
    for seat in seats(1, 2, 1):
        [stage] = cut(whole, [seat])
        of_stage = shape.of_stages([*seat.layers], has_embedding=seat.is_first, has_head=seat.is_last)
        assert num_parameters(of_stage) == sum(one.numel() for one in stage.parameters()), seat
