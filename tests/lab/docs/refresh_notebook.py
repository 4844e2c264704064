"""
Execute the notebooks of docs/ in a fresh copy of the repository and store their outputs: `make notebook`.

    PYTHONPATH=.:tests python tests/lab/docs/refresh_notebook.py
"""
import sys
import tempfile
from pathlib import Path

import nbformat

from test_notebook import COMPARISON, NOTEBOOK, arithmetic, copy_into, differences, execute, problems_of


def refresh(path):
    notebook = nbformat.read(path, 4)
    before = {cell["id"]: cell for cell in nbformat.read(path, 4).cells}
    with tempfile.TemporaryDirectory() as folder:
        copy_into(Path(folder))
        cells = execute(notebook, Path(folder) / "docs", folder)
    for cell in notebook.cells:
        cell["metadata"] = {}  # when it ran
    notebook.metadata.update(language_info={"name": "python"}, arithmetic=arithmetic())
    if problems := problems_of(notebook):
        sys.exit(f"refresh_notebook: {path.name}: " + "; ".join(problems))
    nbformat.write(notebook, path)
    print(path.name, *differences(before, cells) or ["no output changed"], sep="\n")


if __name__ == "__main__":
    for each in sys.argv[1:] or (NOTEBOOK, COMPARISON):
        refresh(Path(each))
