import copy
import dataclasses
import logging
import math

import pytest
import torch
from torch import nn

from onstep import CallbackManager, pretrain
from onstep.callbacks import RouterMonitor
from onstep.config import apply_overrides
from onstep.distributed import World
from onstep.errors import ConfigError
from onstep.events import Callback
from onstep.metrics.moe_losses import collapse, router_load
from onstep.models.layers.router import Router

EXPERTS, TOPK = 4, 2


@pytest.fixture
def run(tiny_config):
    """Runs a small mixture of experts; what was logged, and what a hook of the test counted until then."""

    def start(*overrides, layer=None, **options):
        config, probe = copy.deepcopy(tiny_config), Collapsing(layer)
        apply_overrides(
            config,
            [
                "train.train_iters=4",
                "train.micro_batch_size=2",
                "model.num_layers=3",
                "model.ffn_hidden_size=32",
                f"model.num_moe_experts={EXPERTS}",
                f"model.moe_router_topk={TOPK}",
                "model.moe_router_score_function=sigmoid",
                "model.moe_router_enable_expert_bias=true",
                "model.moe_router_bias_update_rate=0",
                "model.moe_aux_loss_coeff=0.01",
                "logger.log_interval=2",
                "validation.eval_iters=0",
                *overrides,
            ],
        )
        pretrain(config, callbacks=[RouterMonitor(**options), probe])
        return probe.records

    return start


class Collapsing(Callback):
    """Forces the router of one layer to two of its experts, and counts every choice by a hook of its own."""

    def __init__(self, layer=None):
        self.layer, self.records, self.entropies = layer, [], {}
        self.counts = {}

    def on_train_start(self, context):
        model = context.model[0]
        routers = [one for one in model.modules() if isinstance(one, Router)]
        if self.layer is not None:
            routers[self.layer].expert_bias[:2] = 100.0
        for router in routers:
            router.register_forward_hook(self.count)

    def count(self, router, given, routing):
        if torch._C._current_graph_task_id() == -1:
            chosen = routing.experts.flatten().tolist()
            self.counts.setdefault(router.layer_index, []).extend(chosen)

    def on_log_step(self, context):
        self.records.append((dict(context.logs), self.counts))
        self.counts = {}


def moe(logs):
    return {name: value for name, value in logs.items() if name.startswith("moe/")}


def test_statistics_equal_a_direct_count(run):
    records = run()
    assert len(records) == 2
    for logs, counts in records:
        for layer in range(3):
            load = [counts[layer].count(e) for e in range(EXPERTS)]
            assert sum(load) == 2 * 4 * 32 * TOPK
            mean = sum(load) / EXPERTS
            deviation = math.sqrt(sum((one - mean) ** 2 for one in load) / EXPERTS)
            found = {name: logs[f"moe/layer_{layer}/{name}"] for name in ("load_min", "load_max", "load_cv")}
            expected = {"load_min": min(load) / mean, "load_max": max(load) / mean, "load_cv": deviation / mean}
            assert found == pytest.approx(expected)
            assert logs[f"moe/layer_{layer}/dead_experts"] == load.count(0)
            assert logs[f"moe/layer_{layer}/dropped"] == 0
            assert 0.9 < logs[f"moe/layer_{layer}/entropy"] <= 1
        assert logs["moe/load_cv_max"] == max(logs[f"moe/layer_{layer}/load_cv"] for layer in range(3))


@pytest.mark.parametrize("overrides", [[], ["train.micro_batch_size=1"]])
def test_activation_checkpointing_and_accumulation_change_no_number(run, overrides):
    plain = [moe(logs) for logs, _ in run(*overrides)]
    again = [moe(logs) for logs, _ in run("model.recompute_granularity=full", *overrides)]
    assert plain == again
    assert plain[0]["moe/layer_0/load_cv"] > 0


def test_a_router_that_collapses_is_named_once(run, caplog):
    with caplog.at_level(logging.WARNING, "onstep.callbacks.router_monitor"):
        records = run(layer=1)
    for logs, _ in records:
        assert logs["moe/collapsed_layers"] == 1
        assert logs["moe/layer_1/dead_experts"] == 2
        assert logs["moe/layer_1/load_max"] == 2
        assert logs["moe/layer_0/dead_experts"] == 0
    messages = [record.getMessage() for record in caplog.records if record.name.endswith("router_monitor")]
    assert len(messages) == 1
    assert "the router of layer_1 has collapsed" in messages[0]
    assert "2.00 times a balanced load, and 2 experts are dead" in messages[0]


def test_a_router_in_balance_is_not_flagged(run, caplog):
    records = run()
    assert [logs["moe/collapsed_layers"] for logs, _ in records] == [0, 0]
    assert not [record for record in caplog.records if record.name.endswith("router_monitor")]


@pytest.mark.parametrize(("max_keys", "places"), [(8, 0), (14, 0), (15, 1), (24, 2), (64, None)])
def test_keys_are_never_more_than_the_cap(run, max_keys, places):
    records = run(layer=2, max_keys=max_keys)
    names = {name for logs, _ in records for name in moe(logs) if name != "moe/load_balancing_loss"}
    assert len(names) <= max_keys
    layers = {name.split("/")[1] for name in names if name.count("/") == 2}
    if places is None:
        assert layers == {"layer_0", "layer_1", "layer_2"}
    else:
        assert layers == {f"worst_{place}" for place in range(1, places + 1)}
    if places:
        assert records[0][0]["moe/worst_1/layer"] == 2
        assert records[0][0]["moe/worst_1/dead_experts"] == 2


def test_drops_are_shares_of_the_choices(run):
    records = run("model.moe_expert_capacity_factor=0.5", layer=0)
    for logs, _ in records:
        assert logs["moe/layer_0/dropped"] == pytest.approx(0.75)  # two experts with room for a quarter each of theirs
        assert logs["moe/layer_1/dropped"] >= 0.5


class OwnRouter(nn.Module):
    """A user's: it counts its loads and nothing else, and has no index."""

    def __init__(self):
        super().__init__()
        self.load = torch.zeros(3)

    def routing_totals(self):
        return {"load": self.load}


@dataclasses.dataclass
class Context:
    model: list
    logs: dict
    state: object
    rank: int = 0


def test_a_module_with_the_protocol_is_watched_by_its_name():
    model, state = nn.Module(), type("State", (), {"world": World()})()
    model.block = nn.Module()
    model.block.gate = OwnRouter()
    monitor = RouterMonitor()
    model.block.gate.load += torch.tensor([5.0, 5.0, 5.0])
    monitor.on_train_start(Context([model], {}, state))
    model.block.gate.load += torch.tensor([6.0, 2.0, 4.0])
    logs: dict = {}
    monitor.on_log_step(Context([model], logs, state))
    assert logs["moe/block.gate/load_max"] == 1.5
    assert logs["moe/block.gate/load_min"] == 0.5
    assert "moe/block.gate/entropy" not in logs
    assert "moe/dropped" not in logs
    logs.clear()
    monitor.on_log_step(Context([model], logs, state))
    assert logs == {}


def test_an_interval_goes_on_after_a_resume():
    model, state = nn.Module(), type("State", (), {"world": World()})()
    model.gate = OwnRouter()
    first = RouterMonitor()
    first.on_train_start(Context([model], {}, state))
    model.gate.load += torch.tensor([6.0, 0.0, 0.0])
    saved = first.state_dict()
    resumed, fresh = RouterMonitor(), nn.Module()
    fresh.gate = OwnRouter()
    resumed.load_state_dict(saved)
    resumed.on_train_start(Context([fresh], {}, state))
    fresh.gate.load += torch.tensor([0.0, 3.0, 3.0])
    logs: dict = {}
    resumed.on_log_step(Context([fresh], logs, state))
    assert (logs["moe/gate/load_max"], logs["moe/gate/load_min"]) == (1.5, 0.75)

    model.gate.load += torch.tensor([0.0, 0.0, 100.0])  # steps that a rollback takes back
    first.load_state_dict(saved)
    model.gate.load += torch.tensor([0.0, 3.0, 3.0])
    first.on_log_step(Context([model], logs, state))
    assert (logs["moe/gate/load_max"], logs["moe/gate/load_min"]) == (1.5, 0.75)


def test_collapse_goes_from_an_even_load_to_the_fewest_experts():
    assert collapse([5, 5, 5, 5], 2) == 0
    assert collapse([5, 5, 0, 0], 2) == 1
    assert collapse([5, 0, 0, 0], 1) == pytest.approx(1)
    assert 0 < collapse([5, 5, 2, 0], 2) < 1
    assert collapse([5, 5], 2) == 0
    assert router_load([0, 0]) is None


@pytest.mark.parametrize("options", [{"max_keys": 7}, {"max_keys": True}, {"collapse_threshold": 0.0}])
def test_arguments_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        RouterMonitor(**options)


def test_a_model_without_routers_is_named_in_the_log(caplog):
    monitor = RouterMonitor()
    manager = CallbackManager()
    manager.add([monitor])
    with caplog.at_level(logging.WARNING):
        monitor.on_train_start(Context([nn.Linear(2, 2)], {}, None))
    assert "no module with routing_totals()" in caplog.text
