"""The figures of README.md and docs/ are those of results/."""

import json
import re

import matplotlib.image
import numpy as np
import pytest

from conftest import ROOT
from nanoheads.common import UserError
from nanoheads.intervals import t_interval
from nanoheads.probes.engagement import by_chance
from nanoheads.study import effects, findings, results, tables, trial

RESULTS = ROOT / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

# a difference with its interval, of four digits; not what its row or page marks as of the former scale
FIGURE = re.compile(r"(?<!ormer scale: )[+-]\d\.\d{4} \[[+-]\d\.\d{4}, [+-]\d\.\d{4}\]")
FORMER = ROOT / "docs" / "results" / "routing.md"
EXAMPLES = ROOT / "docs" / "scores.md"  # tests/study/test_scores.py runs them


def text_of(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8").replace("−", "-")


def row_of(text, title):
    """The cells after the first of the table row that begins with `title`."""
    line = re.findall(rf"^\| {re.escape(title)} \|(.*)\|$", text, re.M)[0]
    return [cell.strip() for cell in line.split("|")]


# ---- studies ----

def figures_on_file():
    """Every difference with its interval of results/, as pages write it."""
    for path in RESULTS.glob("*.json.gz"):
        found = results.read(path)
        over_texts = [found["together"]] if "texts" in found else []
        for study in [*trial.studies_in(found).values(), *over_texts]:
            rows = [*study["comparisons"], *(study["screened"] or [])]
            rows += [row[key] for row in rows for key in ("equal_flops", "equal_time") if row.get(key)]
            yield from (findings.interval(row) for row in rows if row["mean"] is not None)


@pytest.fixture(scope="module")
def known():
    return {*figures_on_file()}


@pytest.mark.slow
def test_the_tables_of_the_pages_are_those_of_the_results():
    texts = {str(page): page.read_text(encoding="utf-8") for page in PAGES}
    for name, text in texts.items():
        assert tables.filled(text, name) == text, f"{name}: run python compare.py --tables"
    assert sum(len(tables.MARK.findall(text)) for text in texts.values()) >= 9


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_differences_on_a_page_are_those_of_the_results(page, known):
    text = page.read_text(encoding="utf-8").replace("−", "-").replace("\\[", "[").replace("\\]", "]")
    found = set() if page in (FORMER, EXAMPLES) else set(FIGURE.findall(" ".join(text.split())))
    assert found <= known, found - known
    assert page.name != "claims.md" or len(FIGURE.findall(text)) > 50
    assert "+0.1234 [-0.1111, +0.2222]" not in known  # control


@pytest.fixture(scope="module")
def both():
    """The study of all mechanisms, over both texts."""
    return effects.pooled(results.read(RESULTS / "all-tiny.json.gz"))


@pytest.mark.slow
def test_the_picture_of_the_front_page_is_drawn_from_the_results(both, tmp_path):
    """As pixels: another version of matplotlib may write other bytes, and move a letter a little."""
    for name, file in tables.PICTURES.items():
        (tmp_path / "now.png").write_bytes(tables.picture(file))
        (tmp_path / "other.png").write_bytes(tables.picture("aa-tiny.json.gz"))
        now, other, there = (matplotlib.image.imread(path) for path in (
            tmp_path / "now.png", tmp_path / "other.png", ROOT / name))
        assert there.shape == now.shape and np.abs(there - now).mean() < 0.01, "run compare.py --tables"
        assert other.shape != now.shape  # control


def differences_of(found):
    """{(variant, what is equal): the difference, as prose has it}."""
    by = {}
    for c in found["comparisons"]:
        if c["baseline"] == "plain" or c["equal"]:
            by[(c["variant"], *c["equal"])] = f"{abs(c['mean']):.3f}"
        if c.get("equal_flops"):
            by[c["variant"], "FLOPs"] = f"{abs(c['equal_flops']['mean']):.3f}"
    return by


@pytest.mark.slow
def test_the_sentences_of_the_front_page_have_the_figures_of_the_results(both):
    by, rows = differences_of(both), {c["variant"]: c for c in findings.against_plain(both)}
    words = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for sentence in (
            f"only constraint heads beat the plain GPT**, by {by['constraint_a',]} bits per byte",
            f"as many FLOPs is better than they are by {by['constraint_a', 'FLOPs']}. One with as many "
            f"parameters is ahead by {by['constraint_a', 'parameters']}, but the test does not confirm",
            f"Head routing is worse than the plain GPT by {by['routing_inf',]}",
            f"They gain {by['short_conv',]} at equal hyperparameters: a plain GPT needs "
            f"{rows['short_conv']['worth']['mean']:.2f} times its training compute to be as good",
            f"At equal parameters they gain {by['short_conv', 'parameters']}.",
            f"no parameters at all and gains {by['key_offset',]}",
            f"only at equal hyperparameters**, by {by['diff',]}.",
            f"at equal FLOPs the plain GPT is better by {by['diff', 'FLOPs']}"):
        assert sentence in words
    better = {name for name, c in rows.items() if c["verdict"] == "better"}
    assert better == {"short_conv", "short_conv_kv", "short_conv_x", "key_offset", "diff", "constraint_a"}
    equal = {c["variant"]: c["verdict"] for c in both["comparisons"] if c["equal"] == ["parameters"]}
    assert (equal["constraint_a"], equal["diff"], equal["short_conv"]) == ("undecided", "same", "better")


@pytest.mark.slow
def test_the_seeds_and_scores_of_the_plain_gpt_are_those_of_the_results():
    words = " ".join((ROOT / "docs/results/mechanisms.md").read_text(encoding="utf-8").split())
    texts = results.read(RESULTS / "all-tiny.json.gz")["texts"]
    assert sum(study["done"] for study in texts.values()) == sum(study["planned"] for study in texts.values())
    runs = sum(study["done"] for study in texts.values())
    assert f"{runs}, none of which failed, at commit f18e3c5" in words
    for study in texts.values():
        own = study["arms"]["plain"]["bpb"]
        assert study["commit"].startswith("f18e3c5") and len(own) == 32 and not study["failures"]
        mean, spread = f"{np.mean(own):.4f}", f"{np.std(own, ddof=1):.4f}"
        assert re.search(rf"{mean} on \w[\w-]* \((standard deviation over seeds )?{spread}\)", words)
        budgets = [f"{np.mean(study['arms'][f'plain x {each}']['bpb']):.4f}" for each in ("0.7", "1.4", "2")]
        assert f"{budgets[0]}, {budgets[1]} and {budgets[2]}" in words


def test_every_variant_of_the_readme_is_explained_in_words(both):
    text = tables.TABLES["explained"](both)
    assert all(f"{name}: ".replace("_", "\\_") + words in text for name, words in tables.IN_WORDS.items()
               if name != "plain") and len(tables.IN_WORDS) == 10
    with pytest.raises(UserError, match="does not say what mudd does"):
        tables.TABLES["explained"](both, ["mudd"])


def test_no_page_quotes_the_disturbed_seconds_of_the_study_of_all_mechanisms(both):
    """Other programs ran beside its runs; its steps were timed apart, in CPU seconds."""
    text = tables.TABLES["counted"](both)
    assert "FLOPs/token, executed" in text and "seconds" not in text and "time" not in text
    with_seconds = re.compile(r"<!-- table: costs all-tiny")
    assert with_seconds.search("<!-- table: costs all-tiny.json.gz -->")  # control
    for page in PAGES:
        assert not with_seconds.search(page.read_text(encoding="utf-8")), page


def test_what_is_said_of_equal_time_is_one_sentence_and_that_of_the_file(both):
    """Wherever the study's differences at equal time stand, and on its own page."""
    sentence = findings.timed_how(both)
    assert sentence.startswith("For the time, training steps of both sides ") and "AMD EPYC" in sentence
    assert sentence in " ".join(findings.remarks(both))
    shown = [page for page in PAGES if "at equal time |" in page.read_text(encoding="utf-8")
             and "all-tiny" in page.read_text(encoding="utf-8") and page.name != "log.md"]
    assert {page.name for page in shown} >= {"README.md", "mechanisms.md"}
    for page in shown:
        assert sentence in " ".join(page.read_text(encoding="utf-8").split()), page
    for page in PAGES:
        assert "Equal time was not measured." not in page.read_text(encoding="utf-8"), page
    rows = {c["variant"]: c for c in findings.against_plain(both)}
    words = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    conv, offset = (rows[name]["equal_time"] for name in ("short_conv", "key_offset"))
    assert (f"since a step takes {conv['ratio']:.2f} times as long, they gain {abs(conv['mean']):.3f}. "
            in words and conv["high"] < 0)
    assert (f"no gain is shown at equal time: a step takes {offset['ratio']:.2f} times as long." in words
            and offset["low"] < 0 < offset["high"])
    # twice measured: once for each text
    ratios = [{name: arm["time_ratio"]["mean"] for name, arm in study["arms"].items()
               if arm["kind"] == "variant"} for study in both["texts"].values()]
    assert max(abs(ratios[0][name] - ratios[1][name]) for name in ratios[0]) < 0.035
    times = [row["equal_time"]["ratio"] for row in rows.values()]
    page = " ".join((ROOT / "docs/results/mechanisms.md").read_text(encoding="utf-8").split())
    assert f"here {min(times):.2f} to {max(times):.2f} times." in page


def test_the_front_page_says_what_each_text_says_alone(both):
    """enwiki15 chose neither variants nor rates: is a gain there too?"""
    alone = {text: {c["variant"] for c in findings.against_plain(study) if c["verdict"] == "better"}
             for text, study in both["texts"].items()}
    convolutions = {"short_conv", "short_conv_kv", "short_conv_x"}
    assert alone["enwiki15"] == convolutions
    assert alone["wikitext2_byte"] == {*convolutions, "constraint_a", "key_offset"}
    assert findings.on_each_text(both, "short_conv") == "better on both"
    assert findings.on_each_text(both, "key_offset") == "better on wikitext2_byte, undecided on enwiki15"
    words = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "On enwiki15 alone only short convolutions are better." in words
    assert "On WikiText-2 alone constraint heads and key offset are better too" in words


def test_equal_parameters_are_equal_to_a_thousandth(both):
    """xsa adds 8 parameters and unet_scalar one: the plain GPT itself is of their size."""
    rows = {c["variant"]: c for c in findings.against_plain(both)}
    for name in ("xsa", "unet_scalar", "key_offset"):
        assert tables.at_equal_parameters(both, rows[name]) == (
            f"{findings.mean_alone(rows[name])}, {rows[name]['verdict']}")
    assert tables.at_equal_parameters(both, rows["routing_inf"]) == "–"
    assert tables.at_equal_parameters(both, rows["diff"]) == "+0.0033, same"


# ---- pruning ----

TITLES = {"random": "random", "magnitude": "magnitude", "entropy": "entropy",  # how a row's title begins
          "importance": r"importance(?! meas|, meas)", "importance_rescored": "importance, measured again",
          "fitted": "gates fitted"}


@pytest.mark.parametrize("file, kept", [("prune-tiny.json", (7, 6, 5, 4, 3, 2)),
                                        ("prune-nano.json", (14, 9, 4))])
def test_the_pruning_page_has_the_means_of_its_file(file, kept):
    rows = json.loads((RESULTS / file).read_text())["rows"]
    text = text_of("results/pruning.md")
    text = text.split("## ")[1 if "tiny" in file else 2]
    for by in TITLES:
        title, = re.findall(rf"^\| ({TITLES[by]}[^|]*?) \|", text, re.M)
        for cell, heads in zip(row_of(text, title), kept):
            bits = [row["bpb"] for row in rows if row["by"] == by and row["kept"] == heads]
            assert len(bits) == 5, (by, heads)
            assert float(cell.split()[0]) == pytest.approx(np.mean(bits), abs=6e-4), (by, heads)


# ---- constraint heads ----

SCORES = {"constraint heads, λ = 0.2": "labels", "linear probe of the plain GPT, same block": "labels",
          "MLP probe, as many parameters as the heads": "labels",
          "untrained scorers (no labels)": "no_labels",
          "λ = 0.05": "coef_0.05", "λ = 1": "coef_1", "λ = 1, no warm-up": "coef_1_no_warm-up"}


@pytest.mark.parametrize("title", SCORES)
def test_the_scores_of_constraint_heads_are_those_of_their_file(title):
    found = json.loads((RESULTS / "constraint-scores-tiny.json").read_text())[SCORES[title]]
    cells = row_of(text_of("results/constraint-heads.md").split("## What the scores know")[1], title)
    scorer = next((probe for probe in ("linear probe", "MLP probe") if title.startswith(probe)), None)
    scorer = f"{scorer}, plain" if scorer else "constraint heads"
    figures = {each["name"]: each["figures"][scorer]["auroc"] for each in found["names"]}
    for cell, name in zip(cells, ("reciprocity", "testifiability", "decidability"), strict=True):
        mean, low, high = figures[name]
        for shown, measured in zip(cell.strip("*").split(" ±"), (mean, (high - low) / 2)):
            assert float(shown) == pytest.approx(measured, abs=5.1e-4), name


# ---- what heads are needed for ----

RANDOM, TEXT = ("pattern", "copying", "needle"), ("late", "natural")  # the kinds of a column each


@pytest.fixture(scope="module")
def engagement():
    """(the section of docs/results/dynamic-heads.md, {scenario: what its runs gave, seed by seed})."""
    page = text_of("results/dynamic-heads.md").split("\n## What heads are needed for\n")[1].split("\n## ")[0]
    found = json.loads((RESULTS / "engagement-tiny.json").read_text())
    for name, each in found.items():
        assert [run["name"] for run in each["runs"]] == [f"out/{name}-{seed}" for seed in range(1, 6)]
    return page, {name: [run["results"] for run in each["runs"]] for name, each in found.items()}


def critical(each, kind):
    return {tuple(at) for at in each["critical"][kind]}


def at_work(each):
    return {(row["layer"], row["head"]) for row in each["heads"] if row["factor"] > 0}


def test_critical_heads_on_the_page_are_counted_from_the_file(engagement):
    """Again from each head's cost; beside the states, and the critical heads of the same seed's plain GPT."""
    page, runs = engagement
    for each in (each for group in runs.values() for each in group):
        for kind in (*RANDOM, *TEXT):
            costs = {(row["layer"], row["head"]): row[kind]["cost"] for row in each["heads"]}
            dearest = sorted(costs, key=lambda at: -costs[at][0])[:2]
            assert critical(each, kind) == {at for at in dearest if costs[at][1] > 0}
            assert len(critical(each, kind)) == 2, "of 10 in five seeds"
    plain, half, most = runs["plain"], runs["constrained"], runs["mixed"]

    def counts(kind):
        return {
            "on natural text too, plain GPT (2.5)": [
                critical(e, kind) & critical(e, "natural") for e in plain],
            "at work, constrained (5)": [critical(e, kind) & at_work(e) for e in half],
            "the plain GPT's, at work, constrained (5)": [
                critical(p, kind) & at_work(e) for p, e in zip(plain, half)],
            "at work, mixed (7.5)": [critical(e, kind) & at_work(e) for e in most]}

    for column, kinds in enumerate((RANDOM, TEXT)):
        for kind in kinds:
            for title, both in counts(kind).items():
                cells = [int(cell) for cell in row_of(page, title)[column].split(", ")]
                own = cells[kinds.index(kind)] if len(cells) > 1 else cells[0]  # one number is all kinds'
                assert own == sum(map(len, both)), (title, kind)
    assert [len(at_work(e)) for e in half] == [4] * 5 and [len(at_work(e)) for e in most] == [6] * 5
    kept = by_chance([(8, 2, 4, len(critical(e, "natural") & at_work(e))) for e in half])
    of_plain = by_chance([(8, 2, 4, len(critical(p, "natural") & at_work(e))) for p, e in zip(plain, half)])
    assert f"keeps all ten critical heads of the constrained models (p = {kept['p']:.4f})" in page
    assert f"it keeps 9 (p = {of_plain['p']:.3f})" in page


def test_gains_and_shares_on_the_page_are_means_over_seeds(engagement):
    page, runs = " ".join(engagement[0].split()), engagement[1]

    def mean(values, digits, sign=""):
        middle, low, high = t_interval(values)
        return f"{middle:{sign}.{digits}f} ±{(high - low) / 2:.{digits}f}"

    for kind in RANDOM:
        gain = mean([each["texts"][kind]["gain"][0] for each in runs["plain"]], 3)
        assert re.search(rf"{re.escape(gain)} (nats of 8.6 )?\({kind}\)", page), (kind, gain)
    natural = [each["texts"]["natural"] for each in runs["constrained"]]
    before, active = (np.mean([each[key] for each in natural]) for key in ("nats", "nats_all_active"))
    factors = [np.mean([row["factor"] for row in each["heads"]
                        if (row["layer"], row["head"]) in critical(each, "natural")])
               for each in runs["constrained"]]
    assert f"{before:.2f} nats become {active:.2f}" in page
    assert f"critical heads is {mean(factors, 2)}, where the write-up has 0.92" in page
    for kind, words in (("needle", "of an equal share on needles"), ("natural", "on natural text")):
        sent = [np.mean([row[kind]["engagement"][0] for row in each["heads"] if row["role"] == "long"])
                for each in runs["specialised"]]
        assert f"{mean(sent, 2)} {words}" in page


def test_the_table_of_rates_on_the_page_about_size_is_that_of_its_file():
    arms = results.read(RESULTS / "ladder_rates-nano-0.33M.json.gz")["arms"]
    means = {name: np.mean(arm["bpb"]) for name, arm in arms.items()}
    text, best = text_of("results/scale.md"), []
    rows = ("× 0.5", "half rates"), ("as in `config/nano.py`", "plain"), ("× 2", "double rates")
    for title, plain in rows:
        variant = "short_conv_kv" + (f" at {plain}" if plain != "plain" else "")
        one, other = means[plain], means[variant]
        score, of_variant, difference = row_of(text, title)
        assert (score, of_variant) == (f"{one:.4f}", f"{other:.4f}")
        assert difference.startswith(f"{other - one:.4f} ") and other < one
        best.append((one, other))
    best_plain, best_other = (min(column) for column in zip(*best))
    words = f"at the best of its three rates the difference is {best_other - best_plain:.4f}."
    assert words in " ".join(text.split())


@pytest.mark.parametrize("size, variants, seeds, plain_seeds, differ", [
    ("0.33M", ["short_conv_kv", "key_offset", "constraint_a", "routing_inf"], 4, 6, set()),
    ("1M", ["short_conv_kv", "key_offset"], 3, 3, set())])
def test_the_tasks_on_the_page_about_size_have_the_figures_of_their_file(
        size, variants, seeds, plain_seeds, differ):
    """differ: what recalls more or less than the plain GPT, as the page says."""
    models = json.loads((RESULTS / f"tasks-nano-{size}.json").read_text())["models"]
    study = results.read(RESULTS / "ladder-nano.json.gz")["sizes"][size]
    assert all(each["bpb"] == study["runs"][each["run"]]["bpb"] for each in models)
    of = {(each["variant"], each["seed"]): each for each in models}
    assert of.keys() == ({("plain", seed) for seed in range(1, plain_seeds + 1)}
                         | {(name, seed) for name in variants for seed in range(1, seeds + 1)})
    text = text_of("results/scale.md")
    tasks = text[text.index("## Does it show beyond the loss?"):text.index("## How it was measured")]
    plain = np.mean([of["plain", seed]["accuracy"] for seed in range(1, plain_seeds + 1)])
    assert row_of(tasks, f"plain GPT | {size}")[0] == f"{plain:.3f}"
    for variant in variants:
        cells = [f"{np.mean([of[variant, seed]['accuracy'] for seed in range(1, seeds + 1)]):.3f}"]
        for key in ("accuracy", "nats"):
            mean, low, high = t_interval([of[variant, seed][key] - of["plain", seed][key]
                                          for seed in range(1, seeds + 1)])
            cells.append(f"{mean:+.4f} ± {(high - low) / 2:.4f}")
        assert row_of(tasks, variant.replace("_", "\\_") + f" | {size}") == cells
    depths = "0.1", "0.5", "0.9"
    recall = [np.mean([of["plain", seed]["recall_bits"][depth] for seed in range(1, plain_seeds + 1)])
              for depth in depths]
    assert "{:.2f}, {:.2f} and {:.2f}".format(*recall) in " ".join(tasks.split())
    intervals = {(variant, depth): t_interval([of[variant, seed]["recall_bits"][depth]
                                               - of["plain", seed]["recall_bits"][depth]
                                               for seed in range(1, seeds + 1)])
                 for variant in variants for depth in depths}
    assert {key for key, (_, low, high) in intervals.items() if not low < 0 < high} == differ


def test_the_task_of_the_controls_has_the_figures_of_its_file():
    found = json.loads((ROOT / "results" / "cloze-tiny.json").read_text())["models"]
    study = results.read(ROOT / "results" / "controls-tiny.json.gz")
    text = " ".join((ROOT / "docs" / "results" / "controls.md").read_text().split())
    bpb, accuracy, nats = np.array([[each[key] for key in ("bpb", "accuracy", "nats")] for each in found]).T
    assert all(each["bpb"] == study["runs"][each["run"]]["bpb"] for each in found) and len(found) == 35
    assert f"by {np.corrcoef(bpb, accuracy)[0, 1]:.2f}, the nats of the right word by " \
           f"{np.corrcoef(bpb, nats)[0, 1]:.2f}." in text
    labels = {"plain": "plain GPT", "short_conv": "`short_conv`", "AdamW for Muon": "AdamW",
              "learned positions for RoPE": "learned positions"}
    for variant, label in labels.items():
        own = [each["accuracy"] for each in found if each["variant"] == variant]
        assert len(own) == 5 and f"{label} {np.mean(own):.3f} ± {np.std(own, ddof=1):.3f}" in text
