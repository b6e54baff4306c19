"""Summaries, comparisons and the interactive report page: `summary`, `comparison`, and `report` with its parts
`charts_data`, `sections`, `ledger` and the files in `page/`.
"""
