"""Prints the held-out passages that a checkpoint is measured on, as JSON lists of token ids.

    python -m quill.export.cli.passages SOURCE

For benchmarks, which score other programs on the same tokens, and have no torch in their process.
"""

import argparse
import json

from quill.export.verify.held_out import held_out
from quill.model.importers.import_weights import open_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints held-out passages as JSON.")
    parser.add_argument("source")
    args = parser.parse_args()
    found = held_out(open_checkpoint(args.source), None)
    print(json.dumps({"name": found.name, "passages": [each.ids for each in found.passages]}))


if __name__ == "__main__":
    main()
