import json
from types import SimpleNamespace

import pytest
import torch

from onstep import CallbackManager
from onstep.data import TrainLoader
from onstep.events import Callback
from onstep.metrics.moe_losses import reported_losses, tracked_losses
from onstep.optim import TrainingOptimizer
from onstep.training import train
from tests.support.expert_runs import moe_model, sum_step
from tests.support.small_runs import RaggedRows, loader, small_state

from onstep.training import _build_moe_metric_writer, _MoeMetricFanoutWriter  # isort: skip


class Scalars:
    def __init__(self):
        self.points = []

    def add_scalar(self, name, value, iteration):
        self.points.append((name, value, iteration))


class Metrics:
    def __init__(self):
        self.points = []

    def log_metrics(self, metrics, step=None):
        self.points.append((dict(metrics), step))


def test_a_value_goes_to_all_and_clients_get_plain_numbers():
    board, comet, mlflow = Scalars(), Metrics(), Metrics()
    writer = _MoeMetricFanoutWriter(board, comet, mlflow)
    value = torch.tensor(1.5)
    writer.add_scalar("z_loss", value, 7)
    assert board.points == [("z_loss", value, 7)]
    assert board.points[0][1] is value
    assert comet.points == mlflow.points == [({"z_loss": 1.5}, 7)]
    assert type(comet.points[0][0]["z_loss"]) is float


def test_only_tensors_without_dimensions_become_numbers():
    sanitize = _MoeMetricFanoutWriter._sanitize
    assert sanitize(torch.tensor(3)) == 3
    assert type(sanitize(torch.tensor(3))) is int
    vector = torch.ones(2)
    assert sanitize(vector) is vector
    assert sanitize("x") == "x"
    assert sanitize(2.5) == 2.5


def test_the_writer_is_tensorboards_own_where_there_is_nothing_else():
    board = Scalars()
    assert _build_moe_metric_writer(board, None, None) is board
    assert _build_moe_metric_writer(None, None, None) is None
    comet = Metrics()
    writer = _build_moe_metric_writer(None, comet, None)
    assert isinstance(writer, _MoeMetricFanoutWriter)
    writer.add_scalar("z_loss", torch.tensor(1.0), 1)
    assert comet.points == [({"z_loss": 1.0}, 1)]
    assert isinstance(_build_moe_metric_writer(board, None, comet), _MoeMetricFanoutWriter)


@pytest.mark.parametrize(
    ("kinds", "z", "expected"),
    [
        ("aux_loss", None, ["load_balancing_loss"]),
        ("seq_aux_loss", None, ["seq_load_balancing_loss"]),
        ("global_aux_loss", 0.1, ["global_load_balancing_loss", "z_loss"]),
        (["seq_aux_loss", "aux_loss"], None, ["load_balancing_loss", "seq_load_balancing_loss"]),
        ("none", None, []),
    ],
)
def test_a_type_is_tracked_by_its_whole_name(kinds, z, expected):
    model = SimpleNamespace(moe_router_load_balancing_type=kinds, moe_z_loss_coeff=z)
    assert list(tracked_losses(model).values()) == expected


def test_a_loss_is_the_mean_of_the_layers_with_experts():
    layers = {
        1: {"micro_batches": torch.tensor(4.0), "z_loss": torch.tensor(2.0)},
        3: {"micro_batches": torch.tensor(4.0), "z_loss": torch.tensor(6.0)},
    }
    found = reported_losses(layers, {"z_loss": "z_loss"}, per_layer=True)
    assert {name: value.item() for name, value in found.items()} == {
        "z_loss": 1.0,
        "moe/z_loss_layer_1": 0.5,
        "moe/z_loss_layer_3": 1.5,
    }


class Logs(Callback):
    def __init__(self):
        self.records = []

    def on_log(self, context):
        self.records.append({"step": context.state.train_state.step, **context.logs})


def run(state, *callbacks, model=None, size=16, is_the_runs=True):
    model = model or moe_model(mtp_num_layers=1)
    if is_the_runs:
        state.cfg.model = model.config
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TrainLoader(RaggedRows(size), micro_batch_size=2, global_batch_size=4)
    manager = CallbackManager()
    manager.add(list(callbacks))
    train(sum_step, [model], optimizer, None, data, None, state, callback_manager=manager)
    return model


NAMES = ["load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss", "mtp_1 loss"]


def test_a_run_reports_the_losses_in_tags_line_and_logs(capsys):
    state, logs = small_state(train_iters=4), Logs()
    state.cfg.logger.log_interval = 2
    state.cfg.logger.console = "bridge"
    board, wandb, comet = Scalars(), Metrics(), Metrics()
    wandb.log = wandb.log_metrics
    state.tensorboard_logger, state.wandb_logger, state.comet_logger = board, wandb, comet
    model = moe_model(mtp_num_layers=1, moe_per_layer_logging=True)
    run(state, logs, model=model)

    of_steps = {name: [float(v) for n, v, _ in board.points if n == name] for name in NAMES}
    steps = [step for name, _, step in board.points if name == "z_loss"]
    assert steps == [1, 2, 3, 4]
    first, second = [record for record in logs.records if "z_loss" in record]
    for name in NAMES:
        assert first[name] == pytest.approx(sum(of_steps[name][:2]) / 2, rel=1e-6)
        assert second[name] == pytest.approx(sum(of_steps[name][2:]) / 2, rel=1e-6)
        assert [points[name] for points, step in comet.points if name in points] == of_steps[name]
        assert [float(points[name]) for points, step in wandb.points if name in points] == of_steps[name]
    layers = {name for name, _, _ in board.points if name.startswith("moe/z_loss_layer_")}
    assert layers == {f"moe/z_loss_layer_{index}" for index in range(3)}
    lines = [line for line in capsys.readouterr().out.splitlines() if " iteration " in line]
    for line, half in zip(lines, (slice(0, 2), slice(2, 4)), strict=True):
        for name in NAMES:
            assert f" {name}: {sum(of_steps[name][half]) / 2:.6E} |" in line
    assert "moe/" not in "".join(lines)


def test_a_model_that_the_caller_built_is_reported_by_its_own_configuration():
    state, board = small_state(train_iters=1), Scalars()
    state.tensorboard_logger = board
    run(state, model=moe_model(mtp_num_layers=1, moe_per_layer_logging=True), is_the_runs=False)
    names = {name for name, _, _ in board.points}
    assert names.issuperset(NAMES)
    assert "moe/z_loss_layer_2" in names


def test_a_resumed_interval_reports_the_whole(tmp_path):
    """The counts since the last logged step travel with the loop's own parts."""
    whole = small_state(train_iters=4)
    run(whole, model=moe_model())
    half = small_state(train_iters=2)
    model = run(half, model=moe_model())
    saved = half.experts.state_dict()
    rest = small_state(train_iters=2)
    manager = CallbackManager()
    manager.register("on_train_start", lambda context: context.state.experts.load_state_dict(saved))
    data = loader(16)
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data.seek(0, 8)
    rest.train_state.consumed_train_samples = rest.train_state.samples_in_epoch = 8
    rest.cfg.model = model.config
    train(sum_step, [model], optimizer, None, data, None, rest, callback_manager=manager)
    assert rest.experts.interval[: 4 + 1].tolist() == whole.experts.interval[: 4 + 1].tolist()
    assert rest.experts.interval.shape == whole.experts.interval.shape


def test_nothing_is_reported_of_a_dense_model(capsys):
    state, logs = small_state(train_iters=2), Logs()
    state.cfg.logger.log_interval = 1
    state.cfg.logger.console = "bridge"
    model = moe_model(
        num_moe_experts=None,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
    )
    run(state, logs, model=model)
    assert not any("balancing" in json.dumps(list(record)) for record in logs.records)
    assert "balancing" not in capsys.readouterr().out
