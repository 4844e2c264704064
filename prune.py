"""prune.py is lab/prune.py now, python -m lab.prune: says so."""

import shlex
import sys

if __name__ == "__main__":
    sys.exit(f"prune: it is part of lab/ now; type: python -m lab.prune {shlex.join(sys.argv[1:])}")
