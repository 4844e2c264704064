"""
Execute docs/heads.ipynb in a fresh copy of the repository and store its outputs: `make notebook`.

    PYTHONPATH=.:tests python tests/docs/refresh_notebook.py
"""
import sys
import tempfile
from pathlib import Path

import nbformat

from test_notebook import NOTEBOOK, arithmetic, copy_into, differences, execute, problems_of


def main():
    notebook = nbformat.read(NOTEBOOK, 4)
    before = {cell["id"]: cell for cell in nbformat.read(NOTEBOOK, 4).cells}
    with tempfile.TemporaryDirectory() as folder:
        copy_into(Path(folder))
        cells = execute(notebook, Path(folder) / "docs", folder)
    for cell in notebook.cells:
        cell["metadata"] = {}  # when it ran
    notebook.metadata.update(language_info={"name": "python"}, arithmetic=arithmetic())
    if problems := problems_of(notebook):
        sys.exit("refresh_notebook: " + "; ".join(problems))
    nbformat.write(notebook, NOTEBOOK)
    print("\n".join(differences(before, cells)) or "no output changed")


if __name__ == "__main__":
    main()
