"""What can be read from the journal of a run. No torch in here.

Names are loaded when they are first used: a summary needs no drawing library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.analysis.comparison import compare_runs, format_comparison
    from onstep.analysis.export import export_csv, export_parquet
    from onstep.analysis.heatmap import plot_parameter_heatmap
    from onstep.analysis.log_files import find_diagnostic_logs, find_log_files
    from onstep.analysis.log_reading import LogTail
    from onstep.analysis.plots import plot_grad_norm, plot_loss, plot_loss_curves, plot_training_metrics
    from onstep.analysis.report import write_report
    from onstep.analysis.smoothing import smooth_values
    from onstep.analysis.summary import (
        compute_summary_statistics,
        format_summary_json,
        format_summary_markdown,
        format_summary_one_line,
        format_summary_text,
        get_perplexity,
    )
    from onstep.analysis.training_log import TrainingLog, distinct_labels

_HOMES = {
    "LogTail": "onstep.analysis.log_reading",
    "TrainingLog": "onstep.analysis.training_log",
    "compare_runs": "onstep.analysis.comparison",
    "compute_summary_statistics": "onstep.analysis.summary",
    "distinct_labels": "onstep.analysis.training_log",
    "export_csv": "onstep.analysis.export",
    "export_parquet": "onstep.analysis.export",
    "find_diagnostic_logs": "onstep.analysis.log_files",
    "find_log_files": "onstep.analysis.log_files",
    "format_comparison": "onstep.analysis.comparison",
    "format_summary_json": "onstep.analysis.summary",
    "format_summary_markdown": "onstep.analysis.summary",
    "format_summary_one_line": "onstep.analysis.summary",
    "format_summary_text": "onstep.analysis.summary",
    "get_perplexity": "onstep.analysis.summary",
    "plot_grad_norm": "onstep.analysis.plots",
    "plot_loss": "onstep.analysis.plots",
    "plot_loss_curves": "onstep.analysis.plots",
    "plot_parameter_heatmap": "onstep.analysis.heatmap",
    "plot_training_metrics": "onstep.analysis.plots",
    "smooth_values": "onstep.analysis.smoothing",
    "write_report": "onstep.analysis.report",
}

__all__ = [
    "LogTail",
    "TrainingLog",
    "compare_runs",
    "compute_summary_statistics",
    "distinct_labels",
    "export_csv",
    "export_parquet",
    "find_diagnostic_logs",
    "find_log_files",
    "format_comparison",
    "format_summary_json",
    "format_summary_markdown",
    "format_summary_one_line",
    "format_summary_text",
    "get_perplexity",
    "plot_grad_norm",
    "plot_loss",
    "plot_loss_curves",
    "plot_parameter_heatmap",
    "plot_training_metrics",
    "smooth_values",
    "write_report",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
