"""A text with planted facts is made by the lab, python -m lab.needle: says so."""

import shlex
import sys

if __name__ == "__main__":
    sys.exit(f"needle: the lab makes this text; type: python -m lab.needle {shlex.join(sys.argv[1:])}")
