"""export_hf.py is lab/export_hf.py now, python -m lab.export_hf: says so."""

import shlex
import sys

if __name__ == "__main__":
    sys.exit(f"export_hf: it is part of lab/ now; type: python -m lab.export_hf {shlex.join(sys.argv[1:])}")
