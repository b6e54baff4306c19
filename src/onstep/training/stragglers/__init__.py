"""Finds slow ranks.

`detector.Stragglers` times data and forward passes, `comparison` compares the ranks, `nvrx.NvrxStragglers` uses
`nvidia-resiliency-ext`.
"""
