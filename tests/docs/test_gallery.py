"""The gallery: the page is the one that its script writes, and has all of its pictures."""

from __future__ import annotations

import re
from pathlib import Path

from tools.gallery import ASSETS, PAGE, PICTURES, page

PICTURE = re.compile(r"!\[(.+?)\]\(\.\./assets/(.+?)\)")


def test_the_page_is_the_one_that_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run tools/gallery.py"


def test_all_pictures_are_there_and_small() -> None:
    names = [name for _, name in PICTURE.findall(page())]
    assert len(names) == len(PICTURES) + 2
    assert [name for name in names if not 5_000 < (ASSETS / name).stat().st_size < 300_000] == []


def test_the_page_is_in_the_navigation() -> None:
    navigation = (Path(__file__).parents[2] / "mkdocs.yml").read_text(encoding="utf-8")
    assert "- guide/gallery.md" in navigation
