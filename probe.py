"""probe.py is lab/probe.py now, python -m lab.probe: says so."""

import shlex
import sys

if __name__ == "__main__":
    sys.exit(f"probe: it is part of lab/ now; type: python -m lab.probe {shlex.join(sys.argv[1:])}")
