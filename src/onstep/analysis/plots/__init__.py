"""Figures: `plots` (metrics, losses, gradient norm), `heatmap` (per-parameter norms), `series`, `shapes` and
`smoothing` (curves), `axes` and `output` (looks and files).
"""
