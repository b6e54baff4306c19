"""Scenarios: what a file may say, what is refused, and variations of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onstep.config import load_yaml
from onstep.diloco.simulator.reading import from_values, variations
from onstep.errors import ConfigError

TWO_SITES = """
sites:
  berlin: {workers: 2, upload_mbit: 40, download_mbit: 100, round_trip_ms: 30, step_seconds: 0.5}
  lima: {workers: 3, upload_mbit: 10, round_trip_ms: 220, packet_loss: 1e-3, hours_between_failures: 12}
server: {upload_mbit: 1000, round_seconds: 0.2}
parameters: 1.2e9
sync_every: 100
codec: int8
"""


def test_a_file_gives_sites_server_and_settings_with_a_majority_as_the_quorum(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(TWO_SITES)
    scenario = from_values(load_yaml(file))
    assert scenario.sites["lima"].packet_loss == 1e-3
    assert (scenario.total_workers, scenario.parameters) == (5, 1_200_000_000)
    settings = scenario.settings
    assert (settings.num_workers, settings.min_workers, settings.sync_every, settings.codec) == (5, 3, 100, "int8")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "sites must be a mapping of at least one site"),
        ({"sites": {"a": {"worker": 2}}}, r"no key 'sites.a.worker' in a scenario. Did you mean 'workers'"),
        ({"sites": {"a": {}}, "sync_evry": 5}, r"no key 'sync_evry' in a scenario. Did you mean 'sync_every'"),
        ({"sites": {"a": {}}, "server": {"down": 1}}, "no key 'server.down'"),
        ({"sites": {"a": {"step_seconds": 0}}}, "sites.a.step_seconds must be > 0, got 0"),
        ({"sites": {"a": {"upload_mbit": -1}}}, "sites.a.upload_mbit must be > 0"),
        ({"sites": {"a": {"step_seconds": "fast"}}}, "sites.a.step_seconds='fast' must be float"),
        ({"sites": {"a": {"step_seconds": float("nan")}}}, "sites.a.step_seconds must be > 0, got nan"),
        ({"sites": {"a": {"request_loss": 0.9}}}, "sites.a.request_loss must be a share from 0 to 0.5"),
        ({"sites": {"a": {}}, "codec": "int3"}, "codec must be one of fp32, bf16, int8, int4, got 'int3'"),
        ({"sites": {"a": {}}, "mode": "both"}, 'mode must be "sync" or "async"'),
        ({"sites": {"a": {}}, "min_workers": 2}, r"min_workers must be at most num_workers \(1\), got 2"),
        (
            {"sites": {"a": {}}, "num_workers": 3},
            "min_workers must be at most 1, the workers of all sites, got 2; with more, no round would ever be",
        ),
        ({"sites": {"a": {"workers": 200_000}}}, "the number of workers must be from 1 to 100,000"),
        ({"sites": {"a": {}}, "num_fragments": 9, "sync_every": 8}, "num_fragments must be at most sync_every"),
        ({"sites": ["a"]}, r"sites must be a mapping of keys to values, got \['a'\]"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_its_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_values(values)


def test_variations_are_all_combinations_in_the_order_of_the_options() -> None:
    values = {"sites": {"a": {"workers": 2}, "b": None}, "server": {"upload_mbit": 9}}
    found = variations(values, ["sync_every=50,100", "codec=fp32, int8"])
    assert [one.label for one in found] == [
        "sync_every=50 codec=fp32",
        "sync_every=50 codec=int8",
        "sync_every=100 codec=fp32",
        "sync_every=100 codec=int8",
    ]
    assert (found[2].scenario.settings.sync_every, found[2].scenario.settings.codec) == (100, "fp32")
    assert "sync_every" not in values


def test_keys_of_one_site_all_sites_and_the_server_can_be_varied() -> None:
    values = {"sites": {"a": {"workers": 2}, "b": None}}
    one, two = (one.scenario for one in variations(values, ["sites.b.upload_mbit=5,7"]))
    assert (one.sites["a"].upload_mbit, one.sites["b"].upload_mbit, two.sites["b"].upload_mbit) == (None, 5, 7)
    (varied,) = variations(values, ["sites.*.upload_mbit=5", "server.round_seconds=3"])
    one = varied.scenario
    assert ({site.upload_mbit for site in one.sites.values()}, one.server.round_seconds) == ({5}, 3)
    assert one.sites["a"].workers == 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("sync_every", "must have the form key=value,value"),
        ("sites.c.workers=1,2", "has no site 'c'"),
        ("sites=1", "sites is a section"),
        ("server=1", "server is a section"),
        ("sync_every=" + ",".join(map(str, range(1, 1200))), "1,199 simulations, and the limit is 1,000"),
        ("sync_every=[1", "not a YAML configuration"),
    ],
)
def test_a_variation_that_cannot_be_made_is_refused(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variations({"sites": {"a": {}}}, [option])
