"""Imports what the inputs need, which takes longer to import than to use, once for all processes that read one."""

from __future__ import annotations

import importlib
import os

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", MPLBACKEND="agg")
IMPORTED = (
    "torch", "torch._dynamo", "matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg",
    "PIL.PngImagePlugin", "omegaconf", "transformers", "transformers.models.auto.tokenization_auto", "tokenizers",
    "safetensors.torch", "jinja2", "pyarrow.parquet", "onstep", "onstep.analysis.plots.plots",
    "onstep.analysis.plots.heatmap", "onstep.analysis.reports.report", "onstep.callbacks",
    "onstep.cli.generation.generate", "onstep.cli.logs.replay", "onstep.cli.logs.summary", "onstep.cli.logs.tail",
    "onstep.cli.main", "onstep.cli.plot",
    "onstep.cli.checkpoint.group", "onstep.cli.checkpoint.diff", "onstep.cli.checkpoint.export",
    "onstep.cli.checkpoint.listing", "onstep.cli.recipes", "onstep.cli.train", "onstep.cli.why",
    "onstep.cli.why_features", "onstep.data", "onstep.models", "onstep.trainer", "onstep.trackers.services.csv_tracker",
    "onstep.trackers.services.tensorboard_tracker", "torch.utils.tensorboard",
)  # fmt: skip

for name in (*IMPORTED, "tests.support.faults.fuzz.formats"):
    importlib.import_module(name)
