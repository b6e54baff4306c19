"""Writes docs/guide/gallery.md and the pictures of it and of docs/guide/reading-logs.md, from runs that it trains.

    python tools/gallery.py [RUNS]

Without RUNS, a directory with the runs `base`, `low-lr` and `wide`, it trains these three: a few minutes on two cores.
The pictures of the report require playwright and Chromium, as the tests of pages do.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guide" / "gallery.md"
ASSETS = ROOT / "docs" / "assets"

_WIDTH = 1400
"""Of a picture, in pixels."""

SMALL = ("train.train_iters=300", "logger.log_interval=2", "validation.eval_interval=25", "run.output_dir=runs")
RUNS = {
    "base": (),
    "low-lr": ("optimizer.lr=0.0006", "optimizer.min_lr=0.00006"),
    "wide": ("model.hidden_size=192", "model.kv_channels=48", "model.ffn_hidden_size=512"),
}


@dataclass(frozen=True)
class Picture:
    """A figure of the gallery."""

    title: str
    text: str
    command: str
    """What draws it, without its output."""
    name: str
    """The file in docs/assets."""
    alternative: str
    """What is in the picture, for those who cannot see it."""


PICTURES = (
    Picture(
        "One run",
        "Training and validation loss, with the learning rate on an axis of its own. The strong line is a centered "
        "moving mean that starts at the first loss.",
        "onstep logs plot base --loss-curves",
        "gallery_one_run.png",
        "Losses of one run, falling from 5.5 to 2, and its learning rate",
    ),
    Picture(
        "Several runs over tokens",
        "Training and validation side by side, on one y scale.",
        "onstep logs plot base low-lr wide --loss-curves --x-axis tokens",
        "gallery_tokens.png",
        "Losses of three runs over the tokens they were trained on",
    ),
    Picture(
        "The same over wall time",
        "Over time, what a step costs counts too, and so does what else the machine was doing.",
        "onstep logs plot base low-lr wide --loss-curves --x-axis time",
        "gallery_time.png",
        "Losses of three runs over minutes",
    ),
    Picture(
        "Logarithmic axes",
        "The first steps get as much room as the rest; a power law is a straight line.",
        "onstep logs plot base low-lr wide --metrics loss --log-x --log-scale",
        "gallery_log.png",
        "Losses of three runs on two logarithmic axes",
    ),
    Picture(
        "The gradient norm",
        "Before clipping, and the largest of the steps between two records.",
        "onstep logs plot base --grad-norm --log-scale",
        "gallery_grad_norm.png",
        "Gradient norm of a run on a logarithmic axis",
    ),
    Picture(
        "Any metrics",
        "Each on axes of its own.",
        "onstep logs plot base low-lr --metrics loss,eval_loss,tok_per_sec,learning_rate",
        "gallery_metrics.png",
        "Four metrics of two runs",
    ),
)

HEAD = """# Gallery

What the commands of [Read your logs](reading-logs.md) draw, from three runs of `tiny_gpt` on a CPU. This page and its
pictures are written by `tools/gallery.py`.
"""
REPORT = """
## The report

```bash
onstep logs report base low-lr wide
```

![The report in the light theme: summary, configuration differences and the first charts](../assets/logs_report.png)

![The report in the dark theme](../assets/logs_report_dark.png)
"""


def page() -> str:
    """The text of the page."""
    parts = [
        f"\n## {one.title}\n\n{one.text}\n\n```bash\n{one.command}\n```\n\n![{one.alternative}](../assets/{one.name})\n"
        for one in PICTURES
    ]
    return HEAD + "".join(parts) + REPORT


def train() -> None:
    """Train the runs in the working directory."""
    from onstep.cli.main import main

    for name, options in RUNS.items():
        _run(main, ["train", f"run.name={name}", *SMALL, *options])


def draw(runs: Sequence[str]) -> None:
    """Draw all pictures from the runs in the working directory."""
    from onstep.cli.main import main

    for one in PICTURES:
        _run(main, [*shlex.split(one.command)[1:], "-o", str(ASSETS / one.name)])
        shrink(ASSETS / one.name)
    _run(main, ["logs", "report", *runs, "--title", "Learning rate and width", "-o", "report.html"])
    photograph(Path("report.html").absolute())


def shrink(path: Path) -> None:
    """Reduce a picture for print to what a page needs."""
    from PIL import Image

    with Image.open(path) as picture:
        height = round(picture.height * _WIDTH / picture.width)
        small = picture.convert("RGB").resize((_WIDTH, height), Image.Resampling.LANCZOS)
    small.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def photograph(report: Path) -> None:
    """Photograph the report in both themes."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for scheme, name, top in (("light", "logs_report.png", 0), ("dark", "logs_report_dark.png", 1)):
            shown = browser.new_context(viewport={"width": 1200, "height": 1100}, color_scheme=scheme).new_page()
            shown.goto(report.as_uri())
            if top:
                shown.locator("#controls").evaluate("(found) => found.scrollIntoView()")
            shown.wait_for_timeout(500)
            shown.locator(".plot").first.hover()
            shown.screenshot(path=ASSETS / name)
            shown.close()
        browser.close()


def _run(main: object, words: list[str]) -> None:
    assert callable(main)
    sys.argv = ["onstep", *words]
    try:
        main()
    except SystemExit as end:
        if end.code not in (0, None):
            raise


if __name__ == "__main__":
    given = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        if given is None:
            train()
        else:
            Path("runs").symlink_to(given)
        draw(list(RUNS))
    PAGE.write_text(page(), encoding="utf-8")
