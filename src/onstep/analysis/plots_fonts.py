"""Fonts for names that the usual one cannot write: Chinese, Japanese, Korean, Arabic, Indic, emoji."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.text import Text

logger: logging.Logger = logging.getLogger(__name__)

FALLBACKS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR", "Source Han Sans SC",
    "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback", "Microsoft YaHei", "SimHei", "Yu Gothic",
    "Malgun Gothic", "PingFang SC", "Heiti SC", "Hiragino Sans", "Apple SD Gothic Neo", "Arial Unicode MS",
    "Noto Sans", "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai", "Noto Emoji",
    "Segoe UI Emoji", "Unifont",
)  # fmt: skip
"""Font families that are asked in this order for a letter that the usual font lacks, those of them that are there."""


def use_fallback_fonts(figure: Figure) -> None:
    """Let the texts of a figure that need it take further fonts; say once what no font of this machine can write."""
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
            "no font of this machine can write %s; boxes stand for them. Install one that can, such as Noto Sans CJK.",
            " ".join(missing[:20]) + (" ..." if len(missing) > 20 else ""),
        )


@contextmanager
def quiet_glyphs() -> Iterator[None]:
    """Without matplotlib's warning for each letter and each time that it is drawn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from", category=UserWarning)
        yield


def _glyphs(family: str | None) -> set[int]:
    """What a font family, or the usual one, can write."""
    return set(font_manager.get_font(font_manager.findfont(font_manager.FontProperties(family))).get_charmap())


def _lacking(text: str, glyphs: set[int]) -> set[str]:
    return {letter for letter in text if ord(letter) > 127 and ord(letter) not in glyphs}
