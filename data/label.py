"""data/label.py is lab/label.py now, python -m lab.label: says so."""

import shlex
import sys

if __name__ == "__main__":
    sys.exit(f"label: it is part of lab/ now; type: python -m lab.label {shlex.join(sys.argv[1:])}")
