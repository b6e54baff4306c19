"""Figures: made without pyplot, saved, and shown where there is a screen."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from onstep.analysis.plots_fonts import quiet_glyphs, use_fallback_fonts
from onstep.errors import ConfigError

logger: logging.Logger = logging.getLogger(__name__)

FORMATS = ("png", "svg", "pdf")
DPI = 300


def new_figure(figsize: tuple[float, float]) -> Figure:
    """An empty figure that belongs to nobody else; pyplot does not know it."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=figsize, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def finish(figure: Figure, output_path: str | Path | None, *, show: bool, dpi: int = DPI) -> Figure:
    """Save and show a figure as asked, and return it."""
    if output_path is not None:
        save(figure, output_path, dpi=dpi)
    if show:
        show_figure(figure, output_path)
    return figure


def save(figure: Figure, output_path: str | Path, *, dpi: int = DPI) -> Path:
    """Write a figure; the suffix says the format, and folders are made if needed.

    Raises:
        ConfigError: for a suffix that no picture has.
    """
    path = Path(output_path)
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise ConfigError(f"{path} must end in .png, .svg or .pdf, so that the format is known.")
    path.parent.mkdir(parents=True, exist_ok=True)
    use_fallback_fonts(figure)
    with quiet_glyphs(), rc_context({"pdf.fonttype": 42}):  # fonts that printers and journals accept
        figure.savefig(path, dpi=dpi, bbox_inches="tight")
    return path


def show_figure(figure: Figure, path: str | Path | None = None) -> None:
    """Open a figure in the system's viewer; without a screen, or a viewer, say where it is."""
    if path is None:
        path = save(figure, Path(tempfile.mkdtemp(prefix="onstep-")) / "figure.png", dpi=150)
    if not open_file(path):
        logger.warning("there is no screen, or no viewer, to show %s on", path)


def open_file(path: str | Path) -> bool:
    """Open a file in the program that the system has for it; whether there was one."""
    command = {"darwin": "open", "linux": "xdg-open"}.get(sys.platform)
    if sys.platform == "win32":
        os.startfile(path)
        return True
    has_screen = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if command is None or not has_screen or shutil.which(command) is None:
        return False
    subprocess.Popen([command, str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    return True
