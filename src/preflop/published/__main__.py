"""`python -m preflop.published --rows DIR`: errors against published runs, per source."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from preflop.errors import PreflopError
from preflop.published.predict import Prediction, Predictor
from preflop.published.rows import read_rows


def main(arguments: Sequence[str] | None = None) -> int:
    """0 done, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m preflop.published", description=__doc__)
    parser.add_argument(
        "--rows", required=True, metavar="DIR", help="folder with CSV files of published rows"
    )
    parser.add_argument("--source", metavar="TEXT", help="only sources whose name contains this")
    parser.add_argument("--json", action="store_true", help="print JSON: errors per source, and every row")
    parser.add_argument(
        "--write-docs",
        metavar="FILE",
        nargs="?",
        const="docs/accuracy.md",
        help="write the accuracy document",
    )
    parser.add_argument(
        "--write-evidence", metavar="FILE", help="write the rows that ship with the package as evidence"
    )
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    try:
        rows = read_rows(options.rows, options.source)
        predictor = Predictor()
        predictions: list[Prediction] = []
        for number, row in enumerate(rows, start=1):
            predictions += predictor.predict(row)
            _say(f"{number} of {len(rows)} rows, {len(predictor.tapes)} configurations recorded")
    except PreflopError as error:
        print(error, file=sys.stderr)
        return 2
    _say("")
    _write(options, predictions)
    if options.json:
        from preflop.published.summary import to_dict

        print(json.dumps(to_dict(predictions), indent=1))
    else:
        from preflop.published.table import show

        show(predictions)
    return 0


def _write(options: argparse.Namespace, predictions: list[Prediction]) -> None:
    if options.write_docs:
        from preflop.published.accuracy import accuracy_text

        Path(options.write_docs).write_text(accuracy_text(predictions), "utf-8")
    if options.write_evidence:
        from preflop.published.evidence_data import evidence_text

        Path(options.write_evidence).write_text(evidence_text(predictions), "utf-8")


def _say(words: str) -> None:
    """Progress, where a person looks."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
