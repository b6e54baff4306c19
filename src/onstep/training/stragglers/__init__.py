"""Finds slow ranks.

`detector.Stragglers` times data and forward passes, `rank_times` compares the ranks, `nvrx.NvrxStragglers` uses
`nvidia-resiliency-ext`.
"""
