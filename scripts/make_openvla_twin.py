#!/usr/bin/env python
"""Writes a small twin of a published OpenVLA checkpoint: the same files and key names, random weights.

    python scripts/make_openvla_twin.py --layout openvla --output FOLDER

Twins stand in for the checkpoints where the model hub cannot be reached: they load, train, export and load again.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.policies.openvla_twins import LAYOUTS


def main() -> int:
    parser = argparse.ArgumentParser(description="A small twin of a published OpenVLA checkpoint.")
    parser.add_argument("--layout", required=True, choices=LAYOUTS, help="whose files to imitate")
    parser.add_argument("--output", type=Path, required=True, help="the new folder")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"--output {args.output} exists; name a new folder")
    print(LAYOUTS[args.layout](args.output, args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
