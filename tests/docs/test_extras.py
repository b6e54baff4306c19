"""The extras of the package, and what README and the page of the installation say of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOR_DEVELOPERS = {"dev", "docs"}
TRACKERS = {"comet", "mlflow", "tensorboard", "trackio", "wandb"}


def rows(page: str) -> list[tuple[set[str], str]]:
    """The extras of each row of the page's table, and its second column."""
    table = (ROOT / page).read_text(encoding="utf-8").partition("| Extra |")[2].partition("\n\n")[0]
    found = re.findall(r"^\| (`[^|]*) \|([^|]*)\|", table, re.MULTILINE)
    return [(set(re.findall(r"`([a-z]+)`", names)), second.strip()) for names, second in found]


def test_both_tables_have_every_extra_and_no_other() -> None:
    assert set().union(*(names for names, _ in rows("docs/install.md"))) == set(EXTRAS)
    assert set().union(*(names for names, _ in rows("README.md"))) == set(EXTRAS) - FOR_DEVELOPERS


def test_the_page_of_the_installation_names_what_an_extra_installs() -> None:
    for names, installed in rows("docs/install.md"):
        for name in names - FOR_DEVELOPERS - TRACKERS:
            packages = [re.split(r"[>=\[]", requirement)[0] for requirement in EXTRAS[name]]
            assert installed.split(", ") == packages, name
