"""Shows a run on the console: a table of steps and evaluations, bars, messages above them, and a summary.

`progress` and `info` are the callbacks, `table` formats their values, `bars` owns the progress bars and keeps other
output above them, `level` says how much is shown, and `style` where there is colour.
"""

from onstep.console.info import InfoCallback
from onstep.console.level import Level, level_of, shown_by_default, with_progress
from onstep.console.printer import PrinterCallback
from onstep.console.progress import ProgressCallback

__all__ = [
    "InfoCallback",
    "Level",
    "PrinterCallback",
    "ProgressCallback",
    "level_of",
    "shown_by_default",
    "with_progress",
]
