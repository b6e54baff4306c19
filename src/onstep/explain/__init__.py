"""Explains a script of `transformers` by reading its source: nothing of it is run or imported.

`explaining` is the way in; `onstep run --explain script.py` prints what `report` makes of it.
"""
