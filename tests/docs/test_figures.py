"""The tables and pictures of README.md and docs/ are what `compare.py report --tables` writes."""

import json
import shutil

import matplotlib.image
import numpy as np
import pytest
from helpers import ROOT

from study import docs_tables as tables


@pytest.mark.slow
def test_the_command_finds_every_table_as_it_is(tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path)
    for folder in ("docs", "results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    assert tables.write(tmp_path, picture_files={}) == [], "run python compare.py report --tables"
    texts = [page.read_text(encoding="utf-8") for page in tables.pages(tmp_path)]
    assert sum(len(tables.MARK.findall(text)) for text in texts) > 8


@pytest.mark.slow
def test_the_pictures_are_drawn_from_the_results(tmp_path):
    """As pixels: another version of matplotlib may write other bytes, and move a letter a little."""
    for name, files in tables.PICTURE_FILES.items():
        (tmp_path / "now.png").write_bytes(tables.draw_picture(ROOT / "results", files))
        now, there = (matplotlib.image.imread(path) for path in (tmp_path / "now.png", ROOT / name))
        assert there.shape == now.shape and np.abs(there - now).mean() < 0.01, "report --tables"


def test_the_table_of_pruning_has_means_and_ranges(tmp_path):
    found = [dict(by=by, kept=kept, heads=4, bpb=bpb, bpb_before=1.0) for by, kept, bpb in (
        ("random", 4, 1.0), ("random", 2, 2.0), ("random", 2, 3.0), ("entropy", 1, 5.0))]
    (tmp_path / "pruned.json").write_text(json.dumps(dict(rows=found)))
    text = tables.pruned_markdown(tmp_path, "pruned.json", None)
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert head == ["removed by (nothing: 1.000)", "2 of 4 heads kept", "1 of 4 heads kept"]
    assert rows == [["random", "2.500 \\[2.000, 3.000\\]", "–"],
                    ["entropy", "–", "5.000 \\[5.000, 5.000\\]"]]
