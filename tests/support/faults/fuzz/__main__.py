"""Fuzz all formats, or repeat one input: `python -m tests.support.faults.fuzz FORMAT --seed 1 --index 123`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", MPLBACKEND="agg")

from tests.support.faults.fuzz.campaign import Campaign, as_json, shares, show
from tests.support.faults.fuzz.formats import FORMATS


def main() -> int:
    """Exit code 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("format", nargs="*", default=list(FORMATS), help="; ".join(FORMATS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=5000, help="how many in all")
    parser.add_argument("--index", type=int, help="only this one")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print what comes of every door, as --index does")
    parser.add_argument("--json", type=Path, help="where to write the counts and findings")
    options = parser.parse_args()
    campaign = Campaign(
        options.seed, options.at_once, shows=True, is_verbose=options.verbose or options.index is not None
    )
    try:
        campaign.prepare()
        inputs = [(FORMATS[name], options.index) for name in options.format]
        outcome = campaign.run(shares(options.inputs, options.format) if options.index is None else inputs)
    finally:
        campaign.close()
    show(outcome)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(outcome), indent=1))
    return int(bool(outcome.findings))


if __name__ == "__main__":
    sys.exit(main())
