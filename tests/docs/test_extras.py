"""The extras of the package, and what README and the page of the installation say of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from onstep.trackers import TRACKERS, tracker_class

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOR_DEVELOPERS = {"dev", "docs"}


def rows(page: str) -> list[tuple[set[str], str]]:
    """The extras of each row of the page's table, and its second column."""
    table = (ROOT / page).read_text(encoding="utf-8").partition("| Extra |")[2].partition("\n\n")[0]
    found = re.findall(r"^\| (`[^|]*) \|([^|]*)\|", table, re.MULTILINE)
    return [(set(re.findall(r"`([a-z-]+)`", names)), second.strip()) for names, second in found]


def test_both_tables_have_every_extra_and_no_other() -> None:
    """The trackers are examples there: the guide has a table of them, made from their classes."""
    for page, left_out in (("docs/install.md", set()), ("README.md", FOR_DEVELOPERS)):
        named = set().union(*(names for names, _ in rows(page)))
        assert set(EXTRAS) - set(TRACKERS) <= named | left_out
        assert named <= set(EXTRAS)


def test_every_tracker_with_a_package_has_an_extra_that_developers_have_too() -> None:
    named = {name for name in TRACKERS if tracker_class(name).package}
    assert named == set(TRACKERS) & set(EXTRAS)
    assert named <= set(re.findall(r"\w+", EXTRAS["dev"][0]))


def test_the_page_of_the_installation_names_what_an_extra_installs() -> None:
    for names, installed in rows("docs/install.md"):
        for name in names - FOR_DEVELOPERS - set(TRACKERS):
            packages = [re.split(r"[>=\[]", requirement)[0] for requirement in EXTRAS[name]]
            assert installed.split(", ") == packages, name


def test_the_page_on_one_card_installs_what_its_commands_need() -> None:
    page = (ROOT / "docs" / "guide" / "one-card.md").read_text(encoding="utf-8")
    named = re.search(r'pip install "onstep\[(.*)\]"', page)
    assert named
    assert {"hf", "peft", "quantization", "lm-eval", "gguf"} <= set(named[1].split(","))
