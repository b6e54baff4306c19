"""What could ruin a run for good is refused, held back or undone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.protocol.messages import Accepted, Dropped, Settings
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.server.screening import Screening, Size
from onstep.errors import ConfigError
from tests.support.diloco.raw_worker import RawWorker

Serve = Callable[..., DiLoCoServer]
Worker = Callable[..., RawWorker]
THREE = Settings(num_workers=3, min_workers=2, heartbeat_timeout=0.0)


def _filled(parameters: Mapping[str, Tensor], value: float) -> dict[str, Tensor]:
    return {name: torch.full(one.shape, value) for name, one in parameters.items()}


def _adam_with(lr: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda some: torch.optim.Adam(some, lr=lr)


@pytest.mark.parametrize("lr", [1e308, 1e37, 11.0])
def test_a_server_does_not_start_with_an_outer_rate_beyond_its_bound(lr: float, parameters: dict[str, Tensor]) -> None:
    with pytest.raises(ConfigError, match="the outer lr must be from 0 to 10"):
        DiLoCoServer(parameters, port=0, outer_optimizer_factory=_adam_with(lr))


def test_a_saved_rate_beyond_the_bound_is_named_and_can_be_changed(
    serve: Serve, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    serve(output_dir=tmp_path).stop()
    path = tmp_path / "diloco" / "server.json"
    document = json.loads(path.read_text())
    document["rest"]["outer"][0][0]["lr"] = 1e308
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"got 1e\+308; give another with --outer-lr .* --change-settings"):
        DiLoCoServer(None, port=0, output_dir=tmp_path, settings=Settings(heartbeat_timeout=0.0))
    server = serve(None, output_dir=tmp_path, change_settings=True)
    with DiLoCoClient(server.address, token=server.token) as client:
        assert client.get_status()["outer_lr"] == 0.7


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_step_that_is_not_finite_is_undone_and_its_submissions_are_named(
    is_saved: bool, serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    # the quotient of Adam's moments is not finite once the second one is, and stays so
    server = serve(output_dir=tmp_path if is_saved else None, outer_optimizer_factory=_adam_with(0.1))
    one = worker(server)
    one.join()
    one.submit(_filled(parameters, 1.0))
    before = one.get(1)[0].digest
    assert isinstance(one.submit(_filled(parameters, 1e29), 1, 1), Accepted)
    ready, _ = one.get(2)
    assert (ready.digest, ready.num_contributors) == (before, 0)
    again = one.submit(_filled(parameters, 1e29), 1, 1)
    assert isinstance(again, Dropped)
    assert "NaN or infinite (outer lr 0.1" in again.reason
    assert not again.is_anew
    assert one.submit(_filled(parameters, 1.0), 2, 2) == Accepted(3)
    assert one.get(3)[0].num_contributors == 1
    held = one.client.get_status()["held_back"]
    assert [(each["worker"], each["version"]) for each in held] == [("a", 2)]


def test_a_submission_far_from_the_others_does_not_decide_a_round(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor]
) -> None:
    server = serve(settings=THREE)
    workers = [worker(server, name) for name in "abc"]
    for one in workers:
        one.join()
    for one, value in zip(workers, (0.1, 0.11, 1e6), strict=True):
        one.submit(_filled(parameters, value))
    assert workers[0].get(1)[0].num_contributors == 2
    answer = workers[2].submit(_filled(parameters, 1e6))
    assert isinstance(answer, Dropped)
    assert "times that of the others" in answer.reason
    assert server.get_global_params()["head.bias"].abs().max() < 10


def test_sizes_are_compared_for_a_step_and_with_earlier_rounds() -> None:
    screening = Screening()
    assert not screening.far([Size(1.0, 1)])
    assert not screening.far([Size(1e9, 1)])  # one other is too few to say which of both is wrong
    screening = Screening()
    assert not screening.far([Size(1.0, 100), Size(1.2, 100)])
    assert not screening.far([Size(0.05, 1), Size(8.0, 1000)])
    assert list(screening.far([Size(1.0, 100), Size(50.0, 100)])) == [1]
    alone = Screening()
    found = [bool(alone.far([Size(size, 1)])) for size in (1.0, 1.0, 1.0, *[100.0] * 6)]
    assert found[3]
    assert not found[-1]


def test_an_operator_goes_back_to_a_kept_version_and_work_from_after_it_does_not_count(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    server = serve(output_dir=tmp_path, keep_versions=2)
    one = worker(server)
    one.join()
    digests = {}
    for number in range(4):
        one.submit(_filled(parameters, 0.1), number, number)
        digests[number + 1] = one.get(number + 1)[0].digest
    client = one.client
    assert client.get_status()["kept_versions"] == [2, 3]
    with pytest.raises(ConfigError, match=r"one of those kept \(2, 3\), got 1"):
        client.control("go_back", {"version": 1})
    client.control("go_back", {"version": 2})
    assert one.get(5)[0].digest == digests[2]
    late = one.submit(_filled(parameters, 0.1), 4, 4)
    assert isinstance(late, Dropped)
    assert late.is_anew
    assert "went back" in late.reason
    server.stop()
    server = serve(None, output_dir=tmp_path, keep_versions=2)
    one = worker(server)
    one.join()
    late = one.submit(_filled(parameters, 0.1), 5, 4)
    assert isinstance(late, Dropped)
    assert late.is_anew
    one.submit(_filled(parameters, 0.1), 6, 5)
    assert one.get(6)[0].digest == digests[3]  # the momentum is that of version 2 as well
    assert len(list((tmp_path / "diloco").glob("fragment-*"))) == 3


def test_what_waits_in_the_open_round_is_given_up_when_an_operator_goes_back(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    server = serve(settings=THREE, output_dir=tmp_path)
    one, other = worker(server, "a"), worker(server, "b")
    for each in (one, other):
        each.join()
    for each in (one, other):
        each.submit(_filled(parameters, 0.1))
    one.client.control("update_num_workers", {"num_workers": 2})
    one.get(1)
    one.submit(_filled(parameters, 0.2), 1, 1)
    one.client.control("go_back", {"version": 0})
    one.get(2)
    answer = one.submit(_filled(parameters, 0.2), 1, 1)
    assert isinstance(answer, Dropped)
    assert answer.is_anew
