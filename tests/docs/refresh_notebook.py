"""
Execute the notebooks of docs/ in a fresh copy of the repository and store their outputs: `make notebook`.

    PYTHONPATH=.:tests python tests/docs/refresh_notebook.py
"""
import sys
import tempfile
from pathlib import Path

import nbformat

from test_notebook import COMPARISON, NOTEBOOK, copy_into, execute, problems_of, words_of


def refresh(path):
    notebook = nbformat.read(path, 4)
    before = {cell["id"]: cell for cell in nbformat.read(path, 4).cells if cell["cell_type"] == "code"}
    with tempfile.TemporaryDirectory() as folder:
        copy_into(Path(folder))
        cells = execute(notebook, Path(folder) / "docs", folder)
    for cell in notebook.cells:
        cell["metadata"] = {}  # when it ran
    notebook.metadata.update(language_info={"name": "python"})
    if problems := problems_of(notebook):
        sys.exit(f"refresh_notebook: {path.name}: " + "; ".join(problems))
    nbformat.write(notebook, path)
    changed = [name for name, cell in before.items() if words_of(cell) != words_of(cells[name])]
    print(path.name, *[f"{name}: other words" for name in changed] or ["the same words"], sep="\n")


if __name__ == "__main__":
    for each in sys.argv[1:] or (NOTEBOOK, COMPARISON):
        refresh(Path(each))
