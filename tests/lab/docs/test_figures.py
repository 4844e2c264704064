"""The figures of README.md and docs/ that stand between marks are what `compare.py --tables` writes there."""


import matplotlib.image
import numpy as np
import pytest

from helpers import ROOT
from nanoheads.common import UserError
from lab.study import effects, findings, results, tables


@pytest.fixture(scope="module")
def both():
    """The study of all mechanisms, over both texts."""
    return effects.pooled(results.read(ROOT / "results" / "all-tiny.json.gz"))


@pytest.mark.slow
def test_the_command_finds_every_table_as_it_is(monkeypatch):
    """Control: a figure that was changed by hand is written anew. Pictures: see the next test."""
    monkeypatch.setattr(tables, "write_pictures", lambda: [])
    monkeypatch.setattr(tables, "write_atomic", lambda *args: None)
    assert tables.write() == [], "run python compare.py --tables"
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in tables.pages()]
    marks = [(kind, file) for text in texts for _, kind, file, *_ in tables.MARK.findall(text)]
    assert len(marks) > 20 and {*tables.OTHER_TABLES} <= {kind for kind, _ in marks}
    page = (ROOT / "docs/results/scale.md").read_text(encoding="utf-8")
    assert "| 0.733 |" in page and tables.filled(page.replace("| 0.733 |", "| 0.833 |"), "a page") == page


@pytest.mark.slow
def test_the_pictures_are_drawn_from_the_results(tmp_path):
    """As pixels: another version of matplotlib may write other bytes, and move a letter a little."""
    for name, file in tables.PICTURES.items():
        (tmp_path / "now.png").write_bytes(tables.picture(file))
        (tmp_path / "other.png").write_bytes(tables.picture("aa-tiny.json.gz"))
        now, other, there = (matplotlib.image.imread(path) for path in (
            tmp_path / "now.png", tmp_path / "other.png", ROOT / name))
        assert there.shape == now.shape and np.abs(there - now).mean() < 0.01, "run compare.py --tables"
        assert other.shape != now.shape  # control


# ---- what is in a table ----

def rows_of(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_the_table_of_pruning_has_means_and_ranges():
    def row(by, kept, bpb):
        return dict(by=by, kept=kept, heads=4, bpb=bpb, bpb_before=1.0)
    found = dict(rows=[row("random", 4, 1.0), row("random", 2, 2.0), row("random", 2, 3.0),
                       row("entropy", 1, 5.0)])
    head, _, *rows = rows_of(tables.pruned(found))
    assert head == ["removed by (nothing: 1.000)", "2 of 4 heads kept", "1 of 4 heads kept"]
    assert rows == [["random", "2.500 \\[2.000, 3.000\\]", "–"],
                    ["entropy", "–", "5.000 \\[5.000, 5.000\\]"]]


def test_the_table_of_scorers_has_figures_and_differences():
    figures = {"constraint heads": dict(auroc=[0.8, 0.7, 0.9]), "prior": dict(auroc=[0.5, 0.5, 0.5])}
    names = [dict(name="digit", positive=0.25, figures=figures,
                  heads_less=dict(probe=dict(auroc=[0.1, 0.1, 0.1]), prior=dict(auroc=[0.3, 0.2, 0.4])))]
    head, _, *rows = rows_of(tables.scorers(dict(one=dict(names=names), other=dict(names=[])), ["one"]))
    assert head == ["run: what scores", "digit (25.0% positive)"]
    assert rows == [["one: constraint heads", "0.800 ±0.100"], ["one: constraint heads less probe", "+0.100"]]


def test_the_table_of_tasks_is_paired_by_seed():
    scores = ("plain", 1, 0.5), ("plain", 2, 0.7), ("plain", 3, 0.9), ("xsa", 2, 0.6), ("xsa", 1, 0.6)
    models = [dict(variant=name, seed=seed, accuracy=share, nats=2 * share) for name, seed, share in scores]
    head, _, *rows = rows_of(tables.tasks(dict(size="1M", models=models)))
    half = 12.7062 * 0.1 * 2**0.5 / 2**0.5  # t of one degree of freedom; the differences are +0.1 and -0.1
    assert rows == [["plain", "0.700", "–", "–"],
                    ["xsa", "0.600", f"+0.0000 ±{half:.4f}", f"+0.0000 ±{2 * half:.4f}"]]


def test_the_table_of_the_recipe_is_of_the_same_seeds():
    rows = [dict(size=size, name=name, seed=seed, bpb=bpb) for size, name, seed, bpb in (
        ("0.1", "base", 1, 2.0), ("0.1", "base", 2, 3.0), ("0.1", "a", 1, 1.5), ("0.1", "a", 2, 2.7),
        ("0.33", "base", 1, 2.0), ("0.33", "a", 1, 2.25), ("0.33", "a", 2, 9.0))]
    found = dict(rows=rows, labels=[["**a**: it", "a", "base"]])
    assert rows_of(tables.recipe(found))[2:] == [["a: it", "-0.4000±0.1000", "+0.2500"]]


def test_every_variant_of_the_readme_is_explained_in_words(both):
    text = tables.TABLES["explained"](both)
    assert all(f"{name}: ".replace("_", "\\_") + words in text for name, words in tables.IN_WORDS.items()
               if name != "plain") and len(tables.IN_WORDS) == 10
    with pytest.raises(UserError, match="does not say what mudd does"):
        tables.TABLES["explained"](both, ["mudd"])


def test_the_counted_costs_have_no_times(both):
    """Other programs ran beside its runs; its steps were timed apart, in CPU seconds."""
    text = tables.TABLES["counted"](both)
    assert "FLOPs/token, executed" in text and "seconds" not in text and "time" not in text


def test_equal_parameters_are_equal_to_a_thousandth(both):
    """xsa adds 8 parameters and unet_scalar one: the plain GPT itself is of their size."""
    rows = {c["variant"]: c for c in findings.against_plain(both)}
    for name in ("xsa", "unet_scalar", "key_offset"):
        assert tables.at_equal_parameters(both, rows[name]) == (
            f"{findings.mean_alone(rows[name])}, {rows[name]['verdict']}")
    assert tables.at_equal_parameters(both, rows["routing_inf"]) == "–"
    assert tables.at_equal_parameters(both, rows["diff"]) == "+0.0033, same"
