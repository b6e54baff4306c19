"""The parts of the documentation that are read from the code, and the site as a whole."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import threading
from dataclasses import fields
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urljoin

import pytest

import onstep
from onstep import callbacks
from onstep.cli.main import COMMANDS
from onstep.cli.why_features import PARTS
from onstep.config import ConfigContainer, TrainingArguments, to_flat
from onstep.events import EVENTS, Callback, TrainerCallback
from onstep.training.feature import HOOKS
from onstep.training.features import FEATURES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """`docs/generate.py`, which is not part of a package."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules["docs_generate"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def first_cells(table: str) -> list[str]:
    """What stands in the first column, without the head."""
    return [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| `")]


def test_the_table_of_events_has_every_event_in_firing_order(generate: ModuleType) -> None:
    cells = first_cells(generate.events_table())
    assert [re.findall(r"`(\w+)`", cell)[0] for cell in cells] == [event.name for event in EVENTS]
    assert [re.findall(r"`(\w+)`", cell)[-1] for cell in cells] == [event.hf_name for event in EVENTS]


def test_the_tables_of_keys_have_every_key_with_its_default(generate: ModuleType) -> None:
    tables = generate.configuration_tables()
    keys = [cell.strip("`") for cell in first_cells(tables)]
    assert keys == list(to_flat(ConfigContainer()))
    assert "| `optimizer.adam_beta2` | `float` | `0.999` |" in tables
    row = "| `mixed_precision` | <code>str &#124; None</code> | `None` | Precision: None (float32), bf16_mixed or fp16"
    assert row in tables


def test_every_argument_is_in_one_of_two_tables(generate: ModuleType) -> None:
    working = [cell.strip("`") for cell in first_cells(generate.argument_table())]
    refused = [cell.strip("`") for cell in first_cells(generate.refused_table())]
    assert sorted([*working, *refused]) == sorted(f.name for f in fields(TrainingArguments) if f.init)
    assert "learning_rate" in working
    assert "deepspeed" in refused


def test_the_table_of_features_has_every_feature_in_its_order(generate: ModuleType) -> None:
    table = generate.feature_table()
    assert [cell.strip("`") for cell in first_cells(table)] == [
        kind.name for kinds, _ in PARTS.values() for kind in kinds
    ]
    row = "| `fault_tolerance` | SECTIONS | `ft.calc_ft_timeouts`, `ft.enable_ft_package`, `ft.simulate_fault` | "
    assert row + "`session`, `pause`, `wrap_score`, `wrap_step` |  | yes |" in table


def test_the_table_of_hooks_has_every_hook_with_its_doc_string(generate: ModuleType) -> None:
    table = generate.hook_table()
    assert [cell.strip("`") for cell in first_cells(table)] == list(HOOKS)
    assert "| `after_count` | The counters hold this step. |" in table


def test_the_table_of_callbacks_has_each_with_its_section(generate: ModuleType) -> None:
    rows = generate.callback_table().splitlines()[2:]
    kinds = [kind for kind in map(callbacks.__dict__.get, callbacks.__all__) if inspect.isclass(kind)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, Callback | TrainerCallback)}
    assert [row.partition("`")[2].partition("`")[0] for row in rows] == [n for n in callbacks.__all__ if n in names]
    assert all(re.search(r"\| \[[^\]]+\]\([a-z_-]+\.md(#\w+)?\) \|$", row) for row in rows)


def test_the_page_of_the_command_line_has_every_command_with_its_options(generate: ModuleType) -> None:
    text = generate.command_line()
    assert set(re.findall(r"^## onstep ([\w-]+)$", text, re.MULTILINE)) == set(COMMANDS)
    assert "### onstep control pause" in text
    assert "| `-q, --quiet` | Show warnings and the end (logger.console=quiet). |" in text
    assert "| `--kills N` | Number of kills." in text


def test_every_row_of_a_table_has_the_cells_of_its_head(generate: ModuleType) -> None:
    tables = [
        table for make in generate.GENERATED.values() for table in re.findall(r"(?:^\|.*\n?)+", make(), re.MULTILINE)
    ]
    assert len(tables) > len(generate.GENERATED)
    for table in tables:
        rows = table.splitlines()
        assert (
            len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
        )  # GitHub ends a cell at a bar in code, too


def test_the_home_page_of_the_site_is_the_readme_with_links_from_there(generate: ModuleType) -> None:
    text = generate.readme()
    assert "](guide/first-run.md)" not in text, "the site has its own list of pages"
    assert "](docs/" not in text
    assert "## Three ways in" in text
    assert "](guide/how-do-i.md)" in text


def test_a_bar_in_code_is_written_so_that_no_cell_ends_there(generate: ModuleType) -> None:
    assert generate._cell("`a` | `b | c*` or `d` | e") == "`a` \\| <code>b &#124; c&#42;</code> or `d` \\| e"


def test_what_looks_like_html_in_a_doc_string_is_shown_as_text(generate: ModuleType) -> None:
    assert generate._prose("cuda:<n> and `<run>/model`") == "cuda:&lt;n> and `<run>/model`"


def part(name: str, text: str) -> str:
    return f"before\n\n<!-- generated: {name} -->\n{text}<!-- end of generated part -->\n\nafter\n"


def test_a_part_is_renewed_between_its_comments(generate: ModuleType) -> None:
    renewed = generate.fill(part("hooks", "\n| an old | table |\n\n"))
    assert renewed == part("hooks", f"\n{generate.hook_table()}\n\n")
    assert generate.fill(part("hooks", "")) == generate.fill(renewed) == renewed


def test_an_unknown_part_is_an_error(generate: ModuleType) -> None:
    with pytest.raises(KeyError, match="momets"):
        generate.fill(part("momets", ""))


def test_a_stale_page_is_named_and_renewed(generate: ModuleType, tmp_path: Path) -> None:
    fresh, stale = tmp_path / "fresh.md", tmp_path / "stale.md"
    stale.write_text(part("hooks", "| an old | table |\n"), encoding="utf-8")
    fresh.write_text(generate.fill(stale.read_text(encoding="utf-8")), encoding="utf-8")
    assert generate.stale_pages(tmp_path) == {stale: fresh.read_text(encoding="utf-8")}


def changed_lines(page: Path, text: str) -> list[str]:
    """The lines of a page that are stale, and those it should have, shortened."""
    lines = difflib.ndiff(page.read_text(encoding="utf-8").splitlines(), text.splitlines())
    return [line[:200] for line in lines if line[0] in "+-"][:6]


def test_no_page_is_stale(generate: ModuleType) -> None:
    stale = {str(page.relative_to(ROOT)): changed_lines(page, text) for page, text in generate.stale_pages().items()}
    assert not stale, f"what is generated from the code has changed: run `{generate.RENEW}` and commit the pages"


def test_the_pages_use_every_generated_part(generate: ModuleType) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    assert {found["name"] for found in generate.PART.finditer(text)} == set(generate.GENERATED)
    assert text.count("<!-- generated: ") == text.count(generate.END) == len(generate.GENERATED)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built strictly; signatures stay on one line, as each would start Ruff once more."""
    directory = tmp_path_factory.mktemp("site")
    program = "import sys; sys.modules['ruff'] = None; from mkdocs.__main__ import cli; cli()"
    command = [sys.executable, "-c", program, "build", "--strict", "--quiet", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.mark.process
def test_the_site_builds_and_shows_the_generated_tables(site: Path) -> None:
    page = (site / "guide" / "callbacks" / "index.html").read_text(encoding="utf-8")
    assert all(f"<code>{event.name}</code>" in page for event in EVENTS)
    loop = (site / "guide" / "training-loop" / "index.html").read_text(encoding="utf-8")
    assert all(f"<code>{kind.name}</code>" in loop for kind in FEATURES)
    assert "forward_backward" in loop
    configuration = (site / "guide" / "configuration" / "index.html").read_text(encoding="utf-8")
    assert "<td><code>str &#124; None</code></td>" in configuration


FOUND_FIRST = {
    "lightning": "coming-from/lightning/",
    "accelerate": "coming-from/accelerate/",
    "trl": "coming-from/trl/",
    "sentence-transformers": "coming-from/sentence-transformers/",
    "resume": "guide/checkpoints/",
    "out of memory": "guide/when-things-go-wrong/",
    "gguf": "guide/after-training/",
    "push to hub": "guide/trainer/",
    "learning rate": "guide/optimizers/",
}
"""Words that are searched for, and the page that comes first."""


@pytest.mark.process
def test_the_search_finds_the_page_of_a_subject_first(site: Path, chromium: Any) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start, found = f"http://127.0.0.1:{server.server_port}/", {}
        page = chromium.new_page()
        page.set_default_timeout(120_000)
        page.goto(f"{start}?q=")
        search, first = page.locator(".md-search__input"), page.locator(".md-search-result__link").first
        for words in FOUND_FIRST:
            search.fill("")
            search.press("Backspace")  # the page looks at the words when a key is released
            first.wait_for(state="detached")
            search.fill(words[:-1])
            search.press(words[-1])
            first.wait_for(state="attached")
            found[words] = urljoin(start, first.get_attribute("href").partition("?")[0]).removeprefix(start)
        page.close()
        server.shutdown()
    assert found == FOUND_FIRST


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (site / "reference").rglob("index.html"))
    shown = set(re.findall(r'<h\d id="(onstep\.[\w.]+)"', text))
    assert not [places[0] for places in public_names() if shown.isdisjoint(places)]


def public_names() -> list[tuple[str, ...]]:
    """The functions and classes that the packages of Onstep export, each with the anchors that may show it."""
    found = []
    for info in pkgutil.iter_modules(onstep.__path__):
        if info.name.startswith("_") or info.name in ("cli", "as_transformers"):
            continue
        package = importlib.import_module(f"onstep.{info.name}")
        for name in getattr(package, "__all__", []):
            value = getattr(package, name)
            if (inspect.isroutine(value) or inspect.isclass(value)) and value is not Any:  # `Batch` is an alias
                parts = value.__module__.split(".")  # shown with its module, or with a package above it
                homes = [".".join(parts[:length]) for length in range(2, len(parts) + 1)]
                found.append((f"onstep.{info.name}.{name}", *(f"{home}.{name}" for home in homes)))
    return found
