"""data/needle/prepare.py is lab/needle.py now, python -m lab.needle: says so."""

import shlex
import sys

if __name__ == "__main__":
    sys.exit(f"needle: it is part of lab/ now; type: python -m lab.needle {shlex.join(sys.argv[1:])}")
