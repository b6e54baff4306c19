"""Programs that tests start as processes: `python -m tests.support.scripts.<name>`, or with `onstep --import`."""
