"""Who decays, who has a rate of its own, and what an entry of the configuration changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onstep.config import ModelConfig, OptimizerConfig, SchedulerConfig
from onstep.errors import CheckpointError, ConfigError
from onstep.models import build_transformer
from onstep.optim import TrainingOptimizer, build_optimizer, build_scheduler


def transformer(**sizes: Any) -> nn.Module:
    config = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16, "seq_length": 8}
    return build_transformer(ModelConfig(**{**config, "share_embeddings_and_output_weights": False, **sizes}), seed=0)


def names_of(model: nn.Module, group: dict[str, Any]) -> list[str]:
    names = {param: name for name, param in model.named_parameters()}
    return [names[param] for param in group["params"]]


def built(model: nn.Module, **options: Any) -> TrainingOptimizer:
    return build_optimizer([model], OptimizerConfig(**{"lr": 0.1, **options}))


def test_every_group_says_whether_its_rate_is_decoupled() -> None:
    model = transformer()
    assert [group["is_decoupled_lr"] for group in built(model).param_groups] == [False, False]
    decoupled, *others = built(model, decoupled_lr=0.02).param_groups
    assert names_of(model, decoupled) == ["embedding.weight", "output.weight"]
    assert [group["is_decoupled_lr"] for group in (decoupled, *others)] == [True, False, False]
    assert (decoupled["max_lr"], decoupled["min_lr"], decoupled["wd_mult"]) == (0.02, None, 1.0)
    assert "max_lr" not in others[0]


def test_a_tied_embedding_is_decoupled_once() -> None:
    model = transformer(share_embeddings_and_output_weights=True)
    decoupled = built(model, decoupled_min_lr=0.01).param_groups[0]
    assert names_of(model, decoupled) == ["embedding.weight"]


def test_the_output_of_a_hugging_face_model_is_found_by_its_own_word() -> None:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.inner, self.scores = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)

        def get_output_embeddings(self) -> nn.Module:
            return self.scores

    model = Headed()
    assert names_of(model, built(model, decoupled_lr=0.2).param_groups[0]) == ["wte.weight", "scores.weight"]


def test_a_parameter_may_be_marked_as_embedding_or_output() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.is_embedding_or_output_parameter = True
    assert names_of(model, built(model, decoupled_lr=0.2).param_groups[0]) == ["1.weight"]


OUTPUTS = ["classifier", "score", "qa_outputs", "head", "fc", "v_head", "lm_head", "output", "output_layer"]


class Body(nn.Module):
    """An encoder of one layer, of which parts have names that outputs have too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(9, 4)
        self.layers = nn.ModuleList([nn.ModuleDict({"output": nn.Linear(4, 4), "score": nn.Linear(4, 4)})])


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_output_of_a_classifier_is_known_by_its_name(name: str) -> None:
    model = Body()
    model.add_module(name, nn.Linear(4, 2))
    model.add_module("pooler", nn.Linear(4, 4))
    decoupled, *others = built(model, optimizer="muon", decoupled_lr=0.2).param_groups[::-1]
    groups = [decoupled, *others]
    [outer] = [group for group in groups if group["is_decoupled_lr"]]
    assert names_of(model, outer) == ["words.weight", f"{name}.weight"]
    assert "ns_steps" not in outer
    [muon] = [group for group in groups if "ns_steps" in group]
    assert names_of(model, muon) == ["layers.0.output.weight", "layers.0.score.weight", "pooler.weight"]


def test_an_output_of_several_layers_ends_with_its_last() -> None:
    model, wrapper = Body(), nn.Module()
    model.classifier = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    wrapper.backbone = model
    assert names_of(wrapper, built(wrapper, decoupled_lr=0.2).param_groups[0]) == [
        "backbone.words.weight",
        "backbone.classifier.2.weight",
    ]


def test_the_last_linear_of_a_model_is_its_output_where_no_name_says_so() -> None:
    model = Body()
    model.to_pixels, model.norm = nn.Linear(4, 2), nn.LayerNorm(2)
    assert names_of(model, built(model, decoupled_lr=0.2).param_groups[0]) == ["words.weight", "to_pixels.weight"]
    alone = nn.Sequential(nn.Linear(4, 4))
    assert not any(group["is_decoupled_lr"] for group in built(alone, decoupled_lr=0.2).param_groups)


def test_an_entry_by_which_a_decoupled_rate_would_rise_is_refused_by_name_for_any_model() -> None:
    model = Body()
    model.head = nn.Linear(4, 2)
    entries = [{"match": "layers.*", "min_lr": 0.05}, {"match": "head.*", "max_lr": 0.001}]
    with pytest.raises(ConfigError, match=r"param_groups\[1\] .*max_lr=0.001 and optimizer.decoupled_min_lr=0.01; set"):
        built(model, decoupled_lr=0.2, decoupled_min_lr=0.01, param_groups=entries)


def test_decoupled_rates_follow_the_same_schedule_between_their_own_values() -> None:
    optimizer = built(transformer(), min_lr=0.01, decoupled_lr=0.5, decoupled_min_lr=0.1)
    config = OptimizerConfig(lr=0.1, min_lr=0.01, decoupled_lr=0.5, decoupled_min_lr=0.1)
    scheduler = build_scheduler(
        optimizer, SchedulerConfig(lr_warmup_iters=2), config, train_iters=12, global_batch_size=1
    )
    decoupled, common = optimizer.param_groups[0], optimizer.param_groups[-1]
    seen = []
    for _ in range(13):
        seen.append((decoupled["lr"], common["lr"]))
        scheduler.step(1)
    assert seen[1] == pytest.approx((0.25, 0.05))
    assert seen[2] == (0.5, 0.1)
    assert seen[7] == pytest.approx((0.3, 0.055))
    assert seen[12] == pytest.approx((0.1, 0.01))


def test_the_first_entry_that_matches_holds_and_the_rest_keeps_the_rule() -> None:
    model = transformer()
    entries = [
        {"match": "layers.0.*norm*", "lr_mult": 0.5},
        {"match": "*norm*", "wd_mult": 1.0},
        {"match": "layers.?.attention.*", "max_lr": 0.3, "min_lr": 0.2, "start_wd": 0.4, "end_wd": 0.4},
    ]
    groups = built(model, param_groups=entries, weight_decay=0.2).param_groups
    assert names_of(model, groups[0]) == ["layers.0.attention_norm.weight", "layers.0.feed_forward_norm.weight"]
    assert (groups[0]["lr_mult"], groups[0]["wd_mult"], groups[0]["weight_decay"]) == (0.5, 0.0, 0.0)
    assert names_of(model, groups[1]) == [
        "layers.1.attention_norm.weight",
        "layers.1.feed_forward_norm.weight",
        "final_norm.weight",
    ]
    assert (groups[1]["wd_mult"], groups[1]["weight_decay"]) == (1.0, 0.2)
    assert all("attention." in name for name in names_of(model, groups[2]))
    assert (groups[2]["max_lr"], groups[2]["min_lr"], groups[2]["start_wd"]) == (0.3, 0.2, 0.4)
    everything = [param for group in groups for param in group["params"]]
    assert len(everything) == len(set(everything)) == len(list(model.parameters()))
    assert "lr_mult" not in groups[-1]


def test_the_scheduler_writes_what_an_entry_says() -> None:
    model = transformer()
    entries = [{"match": "final_norm.*", "lr_mult": 0.5, "wd_mult": 2.0}, {"match": "output.*", "max_lr": 0.4}]
    options = OptimizerConfig(lr=0.1, weight_decay=0.3, param_groups=entries)
    optimizer = build_optimizer([model], options)
    scheduler = build_scheduler(optimizer, SchedulerConfig(), options, train_iters=4, global_batch_size=1)
    scheduler.step(1)
    norm, output, common, plain = optimizer.param_groups
    assert (norm["lr"], output["lr"], common["lr"]) == pytest.approx((0.0375, 0.3, 0.075))
    assert (norm["weight_decay"], common["weight_decay"], plain["weight_decay"]) == pytest.approx((0.6, 0.3, 0.0))
    assert scheduler.get_lr(norm) == norm["lr"]
    scheduler.lr_factor = 0.5
    assert norm["lr"] == pytest.approx(0.01875)


def test_names_are_those_of_the_bare_model() -> None:
    model = transformer()
    wrapped = torch.nn.DataParallel(model)
    optimizer = build_optimizer(
        [wrapped], OptimizerConfig(lr=0.1, param_groups=[{"match": "final_norm.weight", "lr_mult": 2.0}])
    )
    assert names_of(model, optimizer.param_groups[0]) == ["final_norm.weight"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"match": "*.atention.*", "lr_mult": 1}], r"got match='\*.atention.\*'. Did you mean 'attention"),
        ([{"match": "final_nrm.weight", "lr_mult": 1}], "Did you mean 'final_norm.weight'"),
        ([{"match": "zzz", "lr_mult": 1}], "Examples of names: embedding.weight"),
        (
            [{"match": "layers.*", "lr_mult": 1}, {"match": "*.attention.*", "lr_mult": 1}],
            r"\[1\] matches only parameters of earlier entries, layers.\*",
        ),
        ([{"match": "*", "lr_mul": 1}], "no key 'lr_mul'. Did you mean 'lr_mult'"),
    ],
)
def test_an_entry_without_effect_is_refused(entries: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(transformer(), param_groups=entries)


def test_frozen_parameters_are_matched_by_nobody() -> None:
    model = transformer()
    model.embedding.weight.requires_grad_(False)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="must match the name of a trainable parameter"):
        built(model, param_groups=[{"match": "embedding.weight", "lr_mult": 0.1}])


def test_a_state_of_other_groups_is_refused_in_words() -> None:
    model = transformer()
    saved = built(model, decoupled_lr=0.2).state_dict()
    with pytest.raises(CheckpointError, match=r"groups of \[16, 5\] .* \[2, 14, 5\]; resume with the saved"):
        built(model).load_state_dict(saved)
