"""The tables of README.md and docs/ that stand between marks are what `compare.py report --tables` writes."""

import json

import matplotlib.image
import numpy as np
import pytest

from helpers import ROOT
from nanoheads.common import UserError
from study import docs_tables as tables


@pytest.fixture(scope="module")
def both():
    """(Study, Comparisons) of all mechanisms, over both texts."""
    return tables.read_and_judge(ROOT / "results" / "all-tiny.json.gz")


@pytest.mark.slow
def test_the_command_finds_every_table_as_it_is(monkeypatch):
    """Control: a figure that was changed by hand is written anew. Pictures: see the next test."""
    monkeypatch.setattr(tables, "write_atomic", lambda *args: None)
    assert tables.write(picture_files={}) == [], "run python compare.py report --tables"
    texts = [page.read_text(encoding="utf-8") for page in tables.pages(ROOT)]
    assert sum(len(tables.MARK.findall(text)) for text in texts) > 15
    page = (ROOT / "docs/results/scale.md").read_text(encoding="utf-8")
    assert "| 2.3995 |" in page and tables.fill_tables(
        page.replace("| 2.3995 |", "| 2.4995 |"), "a page", ROOT / "results") == page


@pytest.mark.slow
def test_the_pictures_are_drawn_from_the_results(tmp_path):
    """As pixels: another version of matplotlib may write other bytes, and move a letter a little."""
    for name, files in tables.PICTURE_FILES.items():
        (tmp_path / "now.png").write_bytes(tables.draw_picture(ROOT / "results", files))
        (tmp_path / "other.png").write_bytes(tables.draw_picture(ROOT / "results", ["aa-tiny.json.gz"]))
        now, other, there = (matplotlib.image.imread(path) for path in (
            tmp_path / "now.png", tmp_path / "other.png", ROOT / name))
        assert there.shape == now.shape and np.abs(there - now).mean() < 0.01, "report --tables"
        assert other.shape != now.shape  # control


# ---- what is in a table ----

def rows_of(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_the_table_of_pruning_has_means_and_ranges(tmp_path):
    def row(by, kept, bpb):
        return dict(by=by, kept=kept, heads=4, bpb=bpb, bpb_before=1.0)
    found = dict(rows=[row("random", 4, 1.0), row("random", 2, 2.0), row("random", 2, 3.0),
                       row("entropy", 1, 5.0)])
    (tmp_path / "pruned.json").write_text(json.dumps(found))
    head, _, *rows = rows_of(tables.pruned_markdown(tmp_path, "pruned.json", None))
    assert head == ["removed by (nothing: 1.000)", "2 of 4 heads kept", "1 of 4 heads kept"]
    assert rows == [["random", "2.500 \\[2.000, 3.000\\]", "–"],
                    ["entropy", "–", "5.000 \\[5.000, 5.000\\]"]]


def test_every_variant_of_the_readme_is_explained_in_words(both):
    text = tables.TABLES["explained"](*both, None)
    assert all(f"{name}: ".replace("_", "\\_") + words in text for name, words in tables.DESCRIPTIONS.items()
               if name != "plain") and len(tables.DESCRIPTIONS) == 10
    with pytest.raises(UserError, match="does not say what mudd does"):
        tables.TABLES["explained"](*both, ["mudd"])
