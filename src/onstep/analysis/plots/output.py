"""Saves and shows figures, with fallback fonts for all scripts."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from matplotlib import font_manager, rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from onstep.errors import ConfigError

logger: logging.Logger = logging.getLogger(__name__)

FALLBACKS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR", "Source Han Sans SC",
    "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback", "Microsoft YaHei", "SimHei", "Yu Gothic",
    "Malgun Gothic", "PingFang SC", "Heiti SC", "Hiragino Sans", "Apple SD Gothic Neo", "Arial Unicode MS",
    "Noto Sans", "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai", "Noto Emoji",
    "Segoe UI Emoji", "Unifont",
)  # fmt: skip
"""Font families to try, in this order, for characters that the default font lacks."""


def _use_fallback_fonts(figure: Figure) -> None:
    """Add fallback fonts to texts that need them; warn about characters that no installed font has."""
    usual = _glyphs(None)
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and _lacking(text.get_text(), usual)]
    if not texts:
        return
    known = {font.name for font in font_manager.fontManager.ttflist}
    families = [name for name in FALLBACKS if name in known]
    glyphs = usual.union(*(_glyphs(name) for name in families))
    missing = sorted({letter for text in texts for letter in _lacking(text.get_text(), glyphs)})
    for text in texts:
        text.set_fontfamily([*text.get_fontfamily(), *(one for one in families if one not in text.get_fontfamily())])
    if missing:
        logger.warning(
            "no installed font has the characters %s, shown as boxes; install one that does, such as Noto Sans CJK.",
            " ".join(missing[:20]) + (" ..." if len(missing) > 20 else ""),
        )


def _glyphs(family: str | None) -> set[int]:
    """The code points of a font family, or of the default one."""
    return set(font_manager.get_font(font_manager.findfont(font_manager.FontProperties(family))).get_charmap())


def _lacking(text: str, glyphs: set[int]) -> set[str]:
    return {letter for letter in text if ord(letter) > 127 and ord(letter) not in glyphs}


FORMATS = ("png", "svg", "pdf")
DPI = 300


def new_figure(figsize: tuple[float, float]) -> Figure:
    """An empty figure that is not registered with pyplot."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=figsize, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def finish(figure: Figure, output_path: str | Path | None, *, show: bool, dpi: int = DPI) -> Figure:
    """Save and show a figure as requested, and return it."""
    if output_path is not None:
        save(figure, output_path, dpi=dpi)
    if show:  # without a display or viewer, log the path
        path = output_path
        if path is None:
            path = save(figure, Path(tempfile.mkdtemp(prefix="onstep-")) / "figure.png", dpi=150)
        if not open_file(path):
            logger.warning("cannot show %s: there is no display, or no viewer", path)
    return figure


def save(figure: Figure, output_path: str | Path, *, dpi: int = DPI) -> Path:
    """Write a figure in the format given by the suffix, creating directories if needed.

    Raises:
        ConfigError: for an unknown suffix.
    """
    path = Path(output_path)
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise ConfigError(f"the file name must end in .png, .svg or .pdf, got {path}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    _use_fallback_fonts(figure)
    with warnings.catch_warnings(), rc_context({"pdf.fonttype": 42}):  # TrueType, which printers and publishers accept
        # reported once for all characters, instead of for each one at every draw
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from", category=UserWarning)
        figure.savefig(path, dpi=dpi, bbox_inches="tight")
    return path


def open_file(path: str | Path) -> bool:
    """Open a file in the system's default program; False if there is none."""
    command = {"darwin": "open", "linux": "xdg-open"}.get(sys.platform)
    if sys.platform == "win32":
        os.startfile(path)
        return True
    has_screen = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if command is None or not has_screen or shutil.which(command) is None:
        return False
    subprocess.Popen([command, str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    return True
