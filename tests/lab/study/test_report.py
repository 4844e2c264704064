"""The report: one table of numbers as measured, its verdicts, one page that loads nothing, at any width."""

import base64
import html
import json
import math
import re
import subprocess
from html.parser import HTMLParser

import matplotlib as mpl
import numpy as np
import pytest
from scipy.special import stdtrit

from browser import CHROMIUM
from labels import hidden_labels
from nanoheads import drawing
from nanoheads.common import ROOT
from lab_helpers import but, some
from lab.study import effects, findings, pictures, records, report, results, tables
from lab.study.findings import headline
from lab.study.report import page as html_of


def make_found(variants=2, seeds=5, screened=0, evals=12, size=None):
    """A study: a plain GPT at four budgets, `variants` judged, the best against a wider one and tuned."""
    rng = np.random.default_rng(1)
    names = [f"routing_{i}" if i else "acag+elementwise" for i in range(variants)]
    effect = dict(zip(names, np.linspace(-0.05, 0.06, variants)))
    budgets = {"plain": 1.0, "plain x 0.7": 0.7, "plain x 1.4": 1.4, "plain x 2": 2.0}
    effect |= {name: -0.15 * math.log(multiple) for name, multiple in budgets.items()}
    tuned = f"{names[0]}, tuned"
    effect |= {"plain, MLP 280": -0.01, "plain, tuned": -0.01, tuned: -0.05}
    labels = {"plain": "plain GPT", "acag+elementwise": "ACAG, a gate for each element",
              "plain, MLP 280": "plain GPT, MLP 280 wide"}

    runs = {}

    def run(i, seed, curve):
        runs[name := f"{i:02x}{seed:014x}"] = dict(curve=curve)
        return name

    def entry_of(name, i):
        kind = ("plain" if name == "plain" else "budget" if name in budgets else
                "baseline" if name.startswith("plain") else "variant")
        own = list(range(1, 1 + (2 * seeds if kind == "plain" else seeds)))
        bpb = (2.3 + effect[name] + rng.normal(0, 0.01, len(own))).tolist()
        tokens = [25600 * t for t in range(evals)]

        def curve(b):
            return dict(tokens=tokens, seconds=[round(t / 7000 * (1 + i / 40), 2) for t in tokens],
                        bpb=[round(b + 5.7 * math.exp(-4 * t / evals), 6) for t in range(evals)],
                        train=[None] * evals)

        flags = {"variant": {"routing": "published", "routing_top_k": i}, "baseline": {"n_embd": 128 + 8 * i},
                 "budget": {"max_iters": 150 * budgets.get(name, 1)}, "plain": {}}[kind]
        ratio = 1 if kind in ("plain", "budget") else 1 + i / 50
        return dict(kind=kind, label=labels.get(name, name), flags=flags, steps=150,
                    multiple=budgets.get(name, 1.0), params=851968 + 4096 * i, tokens=3_000_000,
                    flops_per_token=5.7e6 * ratio, executed_flops_per_token=6e6 * ratio ** 2,
                    time_ratio=dict(mean=ratio, low=ratio - 0.01, high=ratio + 0.01), seconds=44.1 + i,
                    tokens_per_s=6900.0 - 50 * i, memory_mib=120.0 + i, seeds=own, bpb=bpb,
                    runs=[run(i, seed, curve(b)) for seed, b in zip(own, bpb)],
                    commands=[f"OMP_NUM_THREADS=1 python train.py config/tiny.py --routing_top_k={i}",
                              "OMP_NUM_THREADS=1 python evaluate.py --ckpt out/x --split test"],
                    sample=f"\nThe cat of {name} sat = the = station , <unk> . " * 4,
                    heads={"entropy": rng.random((4, 8)).round(4).tolist(), "heat": 0.7,
                           "dead_heads": [0.0, 1.0, 0.0, 2.0]} if kind == "variant" else None)

    order = ["plain", *(n for n in effect if n != "plain")]
    entries = {name: entry_of(name, i) for i, name in enumerate(order)}
    pairs = [(name, "plain", []) for name in names]
    pairs += [(names[0], "plain, MLP 280", ["parameters"]), (tuned, "plain, tuned", ["tuned rates"])]
    pairs += [(names[0], names[1], [])] if variants > 1 else []
    comparisons = [comparison(entries, *pair) for pair in pairs]
    first = [f"screened_{i}" for i in range(screened)]
    scores = {name: {"101": 2.2 + 0.01 * i, "102": 2.21 + 0.01 * i}
              for i, name in enumerate(["plain", *names, *first])}
    rows = [dict(variant=name, bpb=own["101"] + 0.005, chosen=name in names, mean=own["101"] - 2.2,
                 low=own["101"] - 2.22, high=own["101"] - 2.18)
            for name, own in scores.items() if name != "plain"]
    screen = dict(seeds=[101, 102], split="val", scores=scores, chosen=names,
                  rule="the best 6 and the worst 2 on validation")
    rates = {"lr": {"0.5": 2.4, "1.0": 2.3, "2.0": 2.31},
             "muon_lr": {"0.5": 2.3, "1.0": 2.3, "2.0": 2.31, "4.0": 2.2}}
    n = sum(len(a["seeds"]) for a in entries.values())
    found = dict(name="routing", scale="tiny", size=size, out="out/routing-tiny",
                 question="Does routing tokens to their best heads beat a plain GPT?",
                 command="python compare.py config/studies/routing.py", date="2026-11-21",
                 commit="abc123",
                 versions=dict(python="3.11.7", torch="2.13.0"), config=dict(alpha=0.05), settings={},
                 plain=dict(base="config/tiny.py", n_layer=2, n_embd=64, block_size=256),
                 machine=dict(processor="AMD EPYC", cores=2, system="Linux", jobs=2, threads="1"),
                 data=dict(dataset="wikitext2_byte", split="test", tokens=1292014, bytes=1292014,
                           of_bytes=1292014, name="all of 256 tokens", context="disjoint windows of 256",
                           note=None),
                 alpha=0.05, margin=0.01, seeds=list(range(1, seeds + 1)), pairs=pairs,
                 screen=screen if screened else None, screened=rows if screened else [], screened_out=first,
                 tuned={"plain": rates, names[0]: rates}, arms=entries, runs=runs,
                 failures=[], planned=n, done=n, comparisons=comparisons, findable=0.0123,
                 margin_as_compute=[0.93, 1.08])
    return some(records.StudyResults, found)


def comparison(entries, variant, baseline, equal):
    """One row as effects.py makes it; the figures are made up of the scores, simply."""
    a, b = (np.array(entries[name]["bpb"]) for name in (variant, baseline))
    mean, se = a.mean() - b.mean(), 0.004
    low, high, p = mean - 2 * se, mean + 2 * se, math.exp(-abs(mean) / se)
    verdict = ("better" if mean < -0.02 else "worse" if mean > 0.02 else "same" if abs(mean) < 0.004 else
               "undecided")
    found = dict(variant=variant, baseline=baseline, equal=equal, n=len(a), n_baseline=len(b), mean=mean,
                 low=low, high=high, se=se, df=20.0, p=p, p_corrected=min(1.0, 10 * p), p_same=1 - p,
                 verdict=verdict, more_seeds=14 if verdict == "undecided" else None,
                 words=f"{verdict} by {abs(mean):.4f} bits/byte", differences=(a - b.mean()).tolist(),
                 text=dict(low=mean - 0.002, high=mean + 0.002))
    if baseline == "plain":
        worth = math.exp(-mean / 0.15)
        out = dict(mean=None, low=None, high=None, p=None)
        ratio = entries[variant]["executed_flops_per_token"] / 6e6
        gap = dict(mean=mean + 0.15 * math.log(ratio), low=low, high=high, p=p) if ratio < 2 else out
        found.update(equal_flops=dict(ratio=ratio, **gap), equal_time=dict(ratio=1.1, **gap), worth=dict(
            mean=worth, low=worth - 0.05, high=None, smallest=0.7, largest=2.0, beyond=None, problem=None,
            words=f"worth {worth:.2f} x of the plain GPT's training compute"))
    return found


def make_ladder(variants=2):
    """Studies of three sizes."""
    studies = [make_found(variants, size=size) for size in ("0.1M", "0.33M", "1M")]
    for (layers, width), study in zip(((2, 64), (3, 96), (5, 128)), studies):
        study["plain"].update(n_layer=layers, n_embd=width)
    return studies


def poisoned(found):
    """The study, all text but keys and verdicts replaced by one that wants to be HTML, Markdown, wide."""
    bad = "<script>alert('x')</script><img src=http://evil.example/a.png>| `a` **b**\n & \x00\x1b[31m "
    bad += "\ud800 " + "w" * 300
    found.update(question=bad, name=bad.replace("\ud800", ""), command=bad, commit=bad)
    found["failures"] = [dict(arm="plain", seed=1, stage="judge", why=bad, log=bad)]
    found["data"].update(note=bad, name=bad)
    found["machine"]["processor"] = bad
    for entry in found["arms"].values():
        entry.update(label=bad, sample=bad, commands=[bad], flags={bad: bad}, heads={bad: [1.0, 2.0]})
    for c in found["comparisons"]:
        c["words"] = bad
    return found


def emptied(found):
    """The study before its first run: no score, no cost, no curve, no comparison with a number."""
    for entry in found["arms"].values():
        nothing = len(entry["seeds"]) * [None]
        entry.update(bpb=nothing, heads=None, sample=None, seconds=None, tokens_per_s=math.nan,
                   memory_mib=None, time_ratio=None)
    for c in found["comparisons"]:
        c.update(dict.fromkeys(("mean", "low", "high", "se", "df", "p", "p_corrected", "p_same")), text=None,
                 differences=[], verdict="undecided", words="no runs", n=0, n_baseline=0)
        for key in ("worth", "equal_flops", "equal_time"):
            c.pop(key, None)
    found["data"].update(tokens=None, bytes=None)
    found["runs"] = {}
    found["machine"].update(threads="", processor="")
    return but(found, done=0, commit=None, findable=None, margin_as_compute=None, tuned={},
                   screened=[], screen=None)


class Page(HTMLParser):
    """What a page holds: its tags with their attributes, and its text, that of <style> apart."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.css, self.inside = [], [], [], ""
        self.feed(text.replace("<wbr>", ""))  # a name is one word, wherever it may break
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        (self.css if self.inside == "style" else self.words).append(data)


def cells(line):
    return [cell.strip().replace("\\", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def rows_in(markdown):
    """The first table of a text as [{head: cell}]."""
    lines = markdown[markdown.index("\n|" if markdown[0] != "|" else "|"):].strip().split("\n\n")[0]
    head, _, *rows = [cells(line) for line in lines.splitlines()]
    assert all(len(row) == len(head) for row in rows)
    return [dict(zip(head, row)) for row in rows]


def main_rows(found):
    return [c for c in found["comparisons"] if c["baseline"] == "plain" and not c["equal"]]


every_size = pytest.mark.parametrize("variants", [1, 2, 30])


# ---- what comes first ----

@pytest.mark.slow
@every_size
def test_table_with_every_verdict_comes_first(variants):
    found = make_found(variants)
    page = html_of(found)
    top = page[page.index("<h1>"):page.index("<section>")]
    rows = [Page(row).text for row in re.findall(r"<tr>.*?</tr>", top, re.S)]
    assert rows[1].startswith("plain GPT")
    for c in main_rows(found):
        label = found["arms"][c["variant"]]["label"]
        assert any(row.startswith(f"{label} {c['verdict']} ") for row in rows)
    assert top.index("class=lead") < top.index("<table>")


def test_verdicts_over_several_texts_are_those_of_all_together():
    """--json of such a study was a KeyError."""
    found = results.read(ROOT / "results" / "all-tiny.json.gz")
    rows = findings.verdicts(found)["comparisons"]
    expected = {(c["variant"], c["baseline"]): c for c in found["together"]["comparisons"]}
    assert len(rows) == len(expected) > 20
    for row in rows:
        c = expected[row["variant"], row["baseline"]]
        assert all(row[key] == c[key] for key in ("verdict", "mean", "n", "p_corrected"))
        assert all(row[key] == records.as_json(c).get(key) for key in ("worth", "equal_flops", "equal_time"))


def test_headline_counts_verdicts():
    found = make_found(5, screened=3)
    for c, word in zip(main_rows(found), findings.MEANING):
        c["verdict"] = word
    assert headline(found) == (
        "8 variants were screened. 1 of 5 variants was shown to be better than the plain GPT; 1 worse; 1 the "
        "same within ±0.01 bits/byte; 1 identical to it, since nothing acted; 1 undecided.")
    for c in found["comparisons"]:
        c["verdict"] = "undecided"
    assert "Not one of 5 variants was shown to be better than the plain GPT; 5 undecided." in headline(found)


def test_undecided_beside_an_interval_without_0_says_that_it_is_the_correction():
    """+0.3131 [+0.2008, +0.4254], undecided, reads like a mistake."""
    found, row = one_better()
    row.update(verdict="undecided", mean=0.3131, low=0.2008, high=0.4254, p=0.01, p_corrected=0.09,
               words="undecided: +0.3131 bits/byte (95 % interval +0.2008 to +0.4254, corrected p = 0.09); "
                     "about 9 seeds, now 5, would probably decide")
    found["comparisons"] *= 9
    side = "; below 0 is better"
    said = ("; the interval, which is not corrected, leaves out 0, and p, which is corrected for 9 "
            "comparisons, is above 0.05")
    assert findings.sentence_of(found, row) == row["words"] + side + said
    assert row["words"] + side + said in Page(html_of(found)).text
    assert {c["words"] for c in findings.verdicts(found)["comparisons"]} == {row["words"] + side + said}
    row.update(low=-0.1)
    assert findings.sentence_of(found, row) == row["words"] + side
    # withheld for a failed run, and not by the correction
    row.update(low=0.2, p_corrected=0.01, words="not called worse, since 1 of the other side's runs failed")
    assert findings.sentence_of(found, row) == row["words"]
    row.update(verdict="worse", words="worse by 0.3131 bits/byte (95 % interval 0.2008 to 0.4254)")
    assert findings.sentence_of(found, row) == row["words"]  # whose word holds the sign


def test_identical_scores_stand_in_no_count_of_findings():
    found = results.read(ROOT / "results" / "controls-tiny.json.gz")
    row, = (c for c in found["comparisons"] if c["verdict"] == "identical")
    n = len(found["comparisons"]) - 1
    assert " the same" not in headline(found) and "1 identical to it, since nothing acted" in headline(found)
    assert f"Verdicts are corrected for {n} comparisons." in findings.remarks(found)
    page = Page(html_of(found))
    assert f"here they are {n}." in page.text and row["words"] in page.text
    assert findings.MEANING["identical"] in page.text
    assert sum(tag == "span" and attrs["class"] == "badge identical" for tag, attrs in page.tags) == 3
    c, = (c for c in findings.verdicts(found)["comparisons"] if c["variant"] == row["variant"])
    assert (c["verdict"], c["mean"], c["p_corrected"], c["p_same"]) == ("identical", 0.0, None, None)
    line = next(line for line in report.in_text(found).splitlines() if "  identical  " in line)
    assert re.search(r"\+0\.0000 \[\+0\.0000, \+0\.0000\]  +–  ", line)
    texts = [text.get_text() for text in pictures.forest(found).legends[0].get_texts()]
    assert "identical" in texts and "same" not in texts


# ---- what was asked, and how much of it was run ----

def cut(found, steps=None, share=1):
    found["of_scale"] = dict(steps=1000, tokens=2_048_000)
    for arm in found["arms"].values():
        arm.update(steps=steps or 1000, tokens=2048 * (steps or 1000))
    found["data"].update(bytes=round(found["data"]["of_bytes"] * share))
    return found


def test_a_cut_study_says_so_in_headline_box_and_json():
    whole = cut(make_found(2))
    assert findings.verdicts(whole)["cut"] is None and headline(whole).startswith("1 of 2 variants")
    assert not any("Each run" in line for line in findings.notices(whole))
    found = cut(make_found(2), steps=150, share=0.14)
    size = found["data"]["of_bytes"]
    first = ("Short runs, 150 of the tiny scale's 1,000 steps (307k of 2.05M tokens), scored on 14 % of the "
             "test split.")
    assert headline(found) == f"{first} {headline(whole)}"
    box = findings.notices(found)[0]
    assert box == ("Each run of the plain GPT was trained for 150 steps, where the tiny scale has 1,000 "
                   "(307,200 of 2,048,000 tokens) and scored on 14 % of the test split "
                   f"({0.14 * size:,.0f} of {size:,} bytes). After all steps the variants may rank "
                   "otherwise.")
    told = findings.verdicts(found)
    assert told["headline"] == headline(found) and told["cut"] == dict(
        steps=150, of_steps=1000, tokens=307200, of_tokens=2048000, split="test", bytes=round(0.14 * size),
        of_bytes=size)
    text = Page(html_of(found)).text
    assert first in text and box in text
    assert first in report.in_text(found).replace("\n", " ")
    part = cut(make_found(2), share=0.25)
    assert headline(part).startswith("Scored on 25 % of the test split. 1 of 2")
    assert "After all steps" not in findings.notices(part)[0]
    del found["of_scale"]  # of a file from before
    assert headline(found).startswith("Scored on 14 % of the test split. 1 of 2 variants")
    assert findings.verdicts(found)["cut"]["of_steps"] is None


@pytest.mark.parametrize("variants, screened, title", [
    (1, 0, "Is routing_0 better than the plain GPT?"),
    (2, 0, "Is routing_0 or routing_1 better than the plain GPT?"),
    (2, 1, "Is routing_0, routing_1 or screened_0 better than the plain GPT?"),
    (3, 2, "Is any of 5 variants better than the plain GPT?")])
def test_a_study_without_a_question_asks_whether_its_variants_are_better(variants, screened, title):
    found = make_found(variants, screened=screened)
    assert f"<h1>{found['question']}</h1>" in html_of(found)
    found.update(question="")
    found["arms"]["acag+elementwise"]["label"] = "routing_0"
    assert f"<h1>{title}</h1>" in html_of(found) and findings.verdicts(found)["question"] == title
    assert report.in_text(found).replace("\n", " ").startswith(f"{title} {headline(found)}")
    assert findings.question_of(but(found, pairs=[], screened_out=[])) == "routing"  # its name


def test_a_long_name_keeps_its_beginning():
    found = make_found(30)
    name = "temperature_that_grows_with_position_and_more"
    main_row = main_rows(found)[0]
    found["arms"][main_row["variant"]]["label"] = name
    row = next(line for line in report.in_text(found).splitlines() if re.match(r"temp\S+ +better ", line))
    first = row.split()[0]
    assert first.endswith("…") and name.startswith(first[:-1]) and len(first) >= 12
    assert pictures.cut(name) == name[:39] + "…"
    assert pictures.cut("a  short\nname") == "a short name"


def test_what_a_page_says_of_seeds_and_comparisons_is_so_in_this_study():
    nothing = but(make_found(2), comparisons=[], findable=None)
    assert headline(nothing) == "No variant was compared with the plain GPT."
    assert "comparison" not in " ".join(findings.remarks(nothing))
    few = make_found(2)
    for c in few["comparisons"]:
        c.update(n=2, text=None)
    said = " ".join(findings.remarks(few))
    assert "With 2 seeds a variant, 0.0123" in said and "over the text beside" not in said
    few["comparisons"][0]["text"] = dict(low=-0.1, high=0.1)
    assert "over the text beside" in " ".join(findings.remarks(few))
    for more, word in ((0, "may have"), (1, "has")):
        seeds = few["arms"]["plain"]["seeds"] = list(range(min(
            len(own["seeds"]) for name, own in few["arms"].items() if name != "plain") + more))
        few["arms"]["plain"]["bpb"] = [2.1] * len(seeds)
        assert f"every comparison, {word} more seeds than" in Page(html_of(few)).text


def test_better_only_than_a_smaller_baseline_is_told():
    found = make_found(2)
    wider = next(c for c in found["comparisons"] if c["equal"] == ["parameters"])
    wider["verdict"] = "undecided"
    assert headline(found).startswith("1 of 2 variants was shown to be better than the plain GPT; 1 worse. ")
    assert headline(found).endswith("ACAG, a gate for each element is not shown to be better at equal "
                                    "parameters.")
    alone = make_found(1)
    next(c for c in alone["comparisons"] if c["equal"] == ["parameters"])["verdict"] = "undecided"
    assert headline(alone).endswith("bits/byte; not shown to be better at equal parameters.")
    label = headline(alone).partition(":")[0]
    for name in ("of one", label):
        first = report.in_text(but(alone, name=name)).replace("\n", " ")
        assert first.startswith(f"{name}: ") and first.count(f"{label}: ") == 1


def one_better(**changes):
    """A study of one variant, better by 0.02; changes: of its own entry. (study, comparison)."""
    found = make_found(1)
    found["comparisons"] = [row := main_rows(found)[0]]
    row.update(verdict="better", mean=-0.02, low=-0.03, high=-0.01, words="better by 0.02 bits/byte")
    plain, entry = found["arms"]["plain"], found["arms"][row["variant"]]
    entry.update({**{key: plain[key] for key in ("params", "flops_per_token", "executed_flops_per_token",
                                                 "multiple")}, **changes})
    return found, row


def of_one_budget(row):
    for key in ("worth", "equal_flops", "equal_time"):
        row.pop(key)


def test_what_was_not_measured_is_not_called_lost():
    """The demo's headline once spoke of equal time, at which nothing had been compared."""
    found, row = one_better(params=10**9, flops_per_token=5.8e6, time_ratio=dict(mean=1.1, low=1.0, high=1.2))
    of_one_budget(row)
    assert headline(found).endswith("better by 0.02 bits/byte; equal parameters, equal FLOPs and equal time "
                                    "were not measured.")
    found["arms"][row["variant"]]["params"] = found["arms"]["plain"]["params"]
    assert headline(found).endswith("bits/byte; equal FLOPs and equal time were not measured.")
    head, (_, cells), _ = findings.verdicts_table(found)
    assert [title for title, cell in zip(head, cells) if cell == "not measured"] == [
        "worth × compute", "at equal FLOPs", "at equal time"]


def test_columns_in_which_nothing_was_measured_are_left_out_and_named_once():
    found, row = one_better(time_ratio=None, memory_mib=None)
    found["arms"]["plain"].update(time_ratio=None, memory_mib=None)
    found["arms"] = {name: found["arms"][name] for name in ("plain", row["variant"])}
    time = row["equal_time"]
    of_one_budget(row)
    said = "Not measured, and so not in the table: worth × compute, equal FLOPs and equal time."
    page = Page(html_of(found)).text
    for text in (report.in_text(found).replace("\n", " "), page,
                 tables.TABLES["verdicts"](found).replace("\\", "")):
        assert text.count(said) == text.count("worth × compute") == 1
    assert "not in the table: MiB added and time of a step × [95 %]." in page
    assert "not measured" not in report.in_text(found).partition("variant  ")[2]
    row["equal_time"] = time
    first = rows_in(tables.TABLES["verdicts"](found))[1]
    assert first["at equal time"] == findings.at_cost(row, "equal_time", findings.interval)
    said = "Not measured, and so not in the table: worth × compute and equal FLOPs."
    assert said in report.in_text(found).replace("\n", " ") and said in Page(html_of(found)).text
    # a difference that could not be measured at a known cost still has the cost
    time.update(dict.fromkeys(("mean", "low", "high")))
    assert rows_in(tables.TABLES["verdicts"](found))[1]["at equal time"] == "not measured at 1.10 ×"


def test_better_at_equal_hyperparameters_alone_does_not_look_like_better():
    found, row = one_better()
    row["equal_flops"].update(mean=-0.01, low=-0.02, high=-0.005)
    row["equal_time"].update(mean=0.0, low=-0.01, high=0.01)
    blue = pictures.VERDICT_COLOURS["better"]

    def looks():
        """The badges, the words beside them, the colour of the mean and the texts of the legend."""
        page, figure = html_of(found), pictures.forest(found)
        mean, = (line for line in figure.axes[0].get_lines() if list(line.get_xdata()) == [row["mean"]])
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        dot = pictures.compute(found).axes[0].get_lines()[1]
        assert dot.get_color() == mean.get_color()
        return (set(re.findall(r'class="(badge better[^"]*)"', page.split("How to read this")[0])),
                set(re.findall("<span class=limit>(.*?)</span>", page)), mean.get_color(), legend)

    badges, words, colour, legend = looks()
    assert badges == {"badge better limited"} and words == {"but not at equal time"} and colour != blue
    assert legend == ["better, but not at equal time"]
    # the verdict is what the statistics say
    assert findings.verdicts(found)["comparisons"][0]["verdict"] == "better"
    assert findings.verdicts_table(found).rows[1][1] == "better"
    row["equal_time"].update(high=-0.001)
    assert looks() == ({"badge better"}, set(), blue, ["better"])
    row.update(verdict="undecided")
    row["equal_time"].update(high=0.01)
    assert looks()[1] == set()


def test_a_variant_that_costs_no_more_is_better_at_equal_cost_too():
    found, row = one_better(time_ratio=dict(mean=0.97, low=0.95, high=1.0))
    of_one_budget(row)
    assert headline(found).endswith(": better by 0.02 bits/byte.")
    # a machine may execute as many FLOPs where the algorithm needs more, and the other way round
    for key in ("flops_per_token", "executed_flops_per_token", "tokens"):
        more, row = one_better(time_ratio=dict(mean=0.9, low=0.9, high=0.9))
        of_one_budget(row)
        more["arms"][row["variant"]][key] *= 1.01
        tokens = "; it trains on 1.01 times the plain GPT's tokens" * (key == "tokens")
        assert headline(more).endswith(f"bits/byte{tokens}; equal FLOPs were not measured.")


@pytest.mark.parametrize("key, what", [("equal_flops", "FLOPs"), ("equal_time", "time")])
def test_each_equal_cost_is_better_lost_or_not_measured(key, what):
    found, row = one_better()
    low = dict(ratio=1.2, mean=-0.01, low=-0.015, high=-0.005, p=0.01)
    row.update(equal_flops=dict(low), equal_time=dict(low))
    assert "equal" not in headline(found)
    row[key].update(mean=0.0, low=-0.01, high=0.01)
    assert headline(found).endswith(f"; not shown to be better at equal {what}.")
    row[key].update(ratio=2.4, mean=None, low=None, high=None, p=None)  # no plain GPT was trained for as much
    assert headline(found).endswith("; equal FLOPs were not measured." if what == "FLOPs" else
                                    "; equal time was not measured.")
    cell = findings.verdicts_table(found).rows[1][-2 if what == "FLOPs" else -1]
    assert cell == "not measured at 2.40 ×"


def test_a_baseline_of_equal_parameters_without_runs_is_not_measured():
    found = make_found(1)
    wider = next(c for c in found["comparisons"] if c["equal"] == ["parameters"])
    found["comparisons"] = [*main_rows(found), wider]
    wider.update(dict.fromkeys(("mean", "low", "high", "p_corrected")), verdict="undecided")
    assert headline(found).endswith("; equal parameters were not measured.")


def test_of_several_winners_the_headline_counts_what_was_not_measured():
    found = make_found(3)
    found["comparisons"] = rows = main_rows(found)
    for row in rows:
        row["verdict"], row["equal_time"] = "better", None
        found["arms"][row["variant"]].update(params=found["arms"]["plain"]["params"], time_ratio=None)
    for row, high in zip(rows, (-0.01, 0.01, 0.01)):
        row["equal_flops"].update(mean=0.0, low=-0.02, high=high)
    assert headline(found) == (
        "3 of 3 variants were shown to be better than the plain GPT. 2 of the 3 are not shown to be better "
        "at equal FLOPs; equal time was not measured.")
    rows[0]["equal_time"] = dict(ratio=1.1, mean=-0.01, low=-0.02, high=-0.001)
    assert headline(found).endswith("; equal time was not measured for 2 of the 3.")
    for row in rows:
        row["equal_flops"].update(high=-0.01)
    assert headline(found).endswith("plain GPT. Equal time was not measured for 2 of the 3.")


def test_the_demo_claims_nothing_of_what_it_did_not_measure():
    found = results.read(ROOT / "results" / "demo.json.gz")
    assert found["config"]["budgets"] == [] and not found["config"]["match_parameters"]
    assert headline(found) == (
        "Short runs, 320 of the tiny scale's 960 steps (655k of 1.97M tokens). 1 of 2 variants was shown to "
        "be better than the plain GPT; 1 worse. Equal parameters, equal FLOPs and equal time were not "
        "measured.")
    said = report.in_text(found).replace("\n", " ")
    assert said.count("not measured") == 1
    assert "Not measured, and so not in the table: worth × compute, equal FLOPs and equal time." in said


@pytest.mark.slow
def test_unfinished_study_says_so_at_the_top():
    found = make_found(30)
    assert not any("not finished" in f(found) for f in (report.in_text, html_of))
    n, found["done"] = found["done"], found["done"] - 7
    for text in (report.in_text(found), html_of(found).split("<body>")[1]):
        assert f"not finished: {n - 7} of {n} runs are done" in text[:1000]


def test_verdicts_of_an_unfinished_study_are_marked_wherever_they_stand():
    """A script that asks for "better" must not find it, and no line can be quoted as a verdict."""
    found, row = one_better()
    n = found["planned"]
    c, = findings.verdicts(found)["comparisons"]
    assert (c["verdict"], c["interim_verdict"], c["words"]) == ("better", None, "better by 0.02 bits/byte")
    found["planned"] += 4
    told = findings.verdicts(found)
    assert (told["finished"], told["planned"], told["done"]) == (False, n + 4, n)
    c, = told["comparisons"]
    assert (c["verdict"], c["interim_verdict"]) == ("unfinished", "better")
    assert c["words"] == "interim: better by 0.02 bits/byte"
    for text in (told["headline"], report.in_text(found), Page(html_of(found)).text):
        assert text.count("better by 0") == text.count("interim: better by 0") > 0
    assert findings.verdicts_table(found).rows[1][1] == "interim: better"
    assert ">interim: better</span>" in html_of(found)
    legend, = pictures.forest(found).legends
    assert [text.get_text() for text in legend.get_texts()] == ["interim: better"]
    assert headline(but(make_found(5), planned=10**4)).startswith("Interim: 2 of 5 variants were shown")
    # what failed is not to come, unless it is tried again
    found["failures"] = [dict(arm="plain", seed=9 + i, stage="judge", why="killed", log=str(i))
                         for i in range(4)]
    assert findings.verdicts(found)["finished"]


def test_of_several_sizes_or_texts_the_unfinished_ones_are_marked():
    ladder = make_ladder()
    ladder[1]["done"] -= 3
    assert {row[1] for row in findings.ladder_table(ladder).rows if row[2].startswith("interim")} == {"0.33M"}
    texts = results.read(ROOT / "results" / "all-tiny.json.gz")
    assert findings.verdicts(texts)["finished"]
    next(reversed(texts["texts"].values()))["planned"] += 1
    told = findings.verdicts(texts)
    assert not told["finished"] and {c["verdict"] for c in told["comparisons"]} == {"unfinished"}
    # each text has verdicts of its own
    assert [{c["verdict"] == "unfinished" for c in findings.verdicts(study)["comparisons"]}
            for study in texts["texts"].values()] == [{False}, {True}]


def test_what_p_does_not_know_of_is_said_of_each_text():
    both = results.read(ROOT / "results" / "all-tiny.json.gz")
    first = next(iter(both["texts"]))
    assert not any("left out" in line for line in findings.notices(effects.pooled(both)))
    both["texts"][first].update(
        left_out=[dict(variant="xsa", seeds=[1, 2, 3, 5, 6])],
        looks=[dict(date=f"2026-11-0{i}", folder="out/x", planned=9, done=9 - i % 2, finished=i % 2 == 0,
                    seeds={"plain": [1, 2], "xsa": [1, 2], "sink": [3, i]}) for i in range(4, 10)])
    left, judged = findings.notices(effects.pooled(both))[:2]
    assert left.startswith("Finished runs of the same variants are left out: 5 of xsa (seeds 1 to 3, 5, 6, "
                           f"on {first}). p holds where seeds were chosen before their scores were known")
    assert judged.startswith(
        "The same variants were judged by other runs: 2 times before; on 2026-11-06 by seeds 1, 2 of plain "
        f"GPT and xsa and seeds 3, 6 of sink, on {first} (out/x); on 2026-11-07 ")
    assert judged.count("(out/x, unfinished with 8 of 9 runs)") == 2
    told = findings.verdicts(both)
    assert told["left_out"] == [dict(variant="xsa", seeds=[1, 2, 3, 5, 6], text=first)]
    assert len(told["looks"]) == 6 and told["notices"][:2] == [left, judged]


def test_failures_edges_and_changed_code_are_reported():
    found = make_found(3)
    found["failures"] = [dict(arm="routing_1", seed=4, stage="judge", why="loss is nan in step 73",
                              log="out/0f/trial.log")]
    found["commit"] = "55b4914-dirty"
    text = Page(html_of(found)).text
    for words in ("1 failed run is missing", "loss is nan in step 73", "out/0f/trial.log", "in no commit",
                  "edge of the grid for plain GPT (muon_lr) and ACAG, a gate for each element (muon_lr)"):
        assert words in text


def test_variant_whose_runs_all_failed_is_listed_as_failed():
    found, row = make_found(3), None
    for c in found["comparisons"]:
        if c["variant"] == "routing_1":
            c.update(dict.fromkeys(("mean", "low", "high", "p_corrected")), differences=[])
    found["failures"] = [dict(arm="routing_1", seed=s, stage="judge", why="out of memory", log="x")
                         for s in found["seeds"]]
    assert re.search(r"^routing_1 +failed ", report.in_text(found), re.M)
    row = rows_in(tables.TABLES["verdicts"](found))[-1]
    assert row["variant"] == "routing_1" and row["verdict"] == "failed"
    assert "1 failed" in headline(found)
    assert ">failed</span>" in html_of(found)


def test_one_seed_has_a_mean_and_no_interval():
    found = make_found(2)
    c = main_rows(found)[0]
    c.update(low=None, high=None, p_corrected=None, verdict="undecided", worth=None)
    row, = (line for line in report.in_text(found).splitlines() if f"{c['mean']:+.4f}  " in line)
    assert "[" not in row and "  undecided  " in row


# ---- safe and whole ----

@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda s: s, poisoned, emptied], ids=["plain", "poisoned", "empty"])
@every_size
def test_page_asks_the_network_for_nothing_and_runs_nothing(variants, change):
    found = change(make_found(variants, screened=3))
    page = Page(html_of(found, {"forest": b"<svg/>", "learning": b"<svg/>", "compute": None}))
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "embed", "base", "form", "use"}
    for _, attrs in page.tags:
        assert not [k for k in attrs if k.startswith("on")]
        assert all(attrs.get(k, "data:,").startswith("data:")
                   for k in ("src", "href", "xlink:href", "srcset", "poster"))
    assert sum(tag == "img" for tag, _ in page.tags) == 2
    styles = " ".join(page.css) + " ".join(attrs.get("style") or "" for _, attrs in page.tags)
    assert not re.search(r"url\(|@import|https?:", styles)
    assert any("default-src 'none'" in (attrs.get("content") or "") for _, attrs in page.tags)


def test_long_names_break_behind_underscores_and_stay_text():
    found = make_found(3)
    found["arms"]["routing_1"]["label"] = "a_long<b>_name+<wbr>"
    page = html_of(found)
    assert "<th scope=row class=w>a_<wbr>long&lt;b&gt;_<wbr>name+<wbr>&lt;wbr&gt;</th>" in page
    assert "a_long&lt;b&gt;_name" not in page.partition("<table>")[2].partition("</table>")[0]
    assert "a_long<b>_name+" in Page(page).text


def test_text_from_the_study_stays_text():
    found = poisoned(make_found(3))
    page = Page(html_of(found))
    assert page.text.count("<script>alert('x')</script><img src=http://evil.example/a.png>") > 20
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", page.text + report.in_text(found).replace("\n", ""))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert len(rows_in(tables.TABLES["verdicts"](found))) == 4


@pytest.mark.slow
@every_size
def test_what_is_not_known_is_a_dash(variants):
    found = emptied(make_found(variants))
    for text in (Page(html_of(found)).text, report.in_text(found),
                 *(table(found) for kind, table in tables.TABLES.items()
                   if kind not in ("texts", "each_text"))):
        assert not re.search(r"\b(nan|NaN|None|null|inf)\b", text)
    assert "no runs yet" in report.in_text(found) and "–" in report.in_text(found)


def test_every_tag_is_closed_where_it_was_opened():
    class Nested(HTMLParser):
        open = []

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "link", "img", "source", "wbr"):
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    Nested().feed(html_of(make_found(3, screened=2), {"forest": b"<svg/>", "forest_narrow": b"<svg/>"}))
    assert Nested.open == []


# ---- numbers ----

@every_size
def test_terminal_table_fits_and_holds_the_numbers_best_first(variants):
    found = make_found(variants)
    lines = report.in_text(found).splitlines()
    assert max(map(len, lines)) <= 120
    head = next(i for i, line in enumerate(lines) if line.startswith("variant "))
    plain = lines[head + 1].split()
    mean = np.mean(found["arms"]["plain"]["bpb"])
    assert plain[:3] == ["plain", "GPT", "–"] and float(plain[3]) == pytest.approx(mean, abs=5e-5)
    rows = lines[head + 2:head + 2 + variants]
    shown = [[float(v) for v in re.findall(r"(?<![\w.])[-+][\d.]+", row)] for row in rows]
    ranked = sorted(main_rows(found), key=lambda c: c["mean"])
    for c, numbers, row in zip(ranked, shown, rows):
        assert numbers[:3] == pytest.approx([c["mean"], c["low"], c["high"]], abs=5e-5)
        assert f"  {c['verdict']}  " in row and f"{c['worth']['mean']:.2f} [" in row
        assert re.search(rf"\]  +{re.escape(findings.p_of(c))}  +\d", row)  # beside the interval
        assert numbers[3:] == pytest.approx([c[key]["mean"] for key in ("equal_flops", "equal_time")
                                             if c[key]["mean"] is not None], abs=5e-5)
    assert f"corrected for {len(found['comparisons'])} comparisons" in " ".join(lines)
    assert "0.0123 bits/byte would be found" in " ".join(lines)


@pytest.mark.slow
@every_size
def test_tables_of_the_docs_and_page_hold_the_same(variants):
    found = make_found(variants)
    plain, *rows = rows_in(tables.TABLES["verdicts"](found))
    page = Page(html_of(found)).text.replace("−", "-")
    assert plain["variant"] == "plain GPT" and len(rows) == variants
    for c, row in zip(sorted(main_rows(found), key=lambda c: c["mean"]), rows):
        gap = row["difference [95 %], below 0 is better"]
        assert [float(v) for v in re.findall(r"[-+][\d.]+", gap)] == pytest.approx(
            [c["mean"], c["low"], c["high"]], abs=5e-5)
        assert row["verdict"] == c["verdict"] and gap in page
        assert row["at equal FLOPs"] in page


@pytest.mark.parametrize("worth, text", [
    (dict(mean=0.93, low=0.88, high=0.99), "0.93 [0.88, 0.99]"),
    (dict(mean=None, low=None, high=0.72, beyond="less"), "<0.7 [<0.7, 0.72]"),
    (dict(mean=None, low=1.9, high=None, beyond="more"), ">2 [1.90, >2]"),
    (dict(mean=None, low=0.7, high=0.7, beyond="less"), "<0.7"),
    (dict(mean=None, low=None, high=None, beyond="less"), "<0.7 [<0.7, >2]"),
    (dict(mean=None, low=None, high=None, problem="it does not fall"), "–")])
def test_worth_says_where_it_was_not_measured(worth, text):
    c = some(records.Comparison, dict(worth=dict(smallest=0.7, largest=2.0, **worth)))
    assert findings.worth_of(c) == text


def test_steps_to_the_same_score_follow_from_worth():
    """Worth 1.25 of 800 steps: the plain GPT takes 1,000, of which the variant saves a fifth."""
    found = make_found(3)
    names = [c["variant"] for c in findings.against_plain(found)]
    for c in found["comparisons"]:
        c["worth"] = dict(mean=1.25, low=1.1, high=None, smallest=0.7, largest=2)
    for entry in found["arms"].values():
        entry["steps"] = 800
    rows = findings.steps_table(found).rows
    assert [row[0] for row in rows] == [findings.label_of(found, name) for name in names]
    assert {row[1:] for row in rows} == {("800", "1,000 [880, >1,600]", "20 % fewer steps")}
    assert "1,000 [880, >1,600]" in Page(html_of(found)).text
    for c in found["comparisons"]:
        c["worth"] = dict(mean=None, low=None, high=0.8, beyond="less", smallest=0.7, largest=2.0)
    assert {row[2:] for row in findings.steps_table(found).rows} == {("<560 [<560, 640]", "–")}
    for worth, words in ((0.8, "25 % more steps"), (1.0, "as many steps")):
        for c in found["comparisons"]:
            c["worth"].update(mean=worth, beyond=None)
        assert {row[3] for row in findings.steps_table(found).rows} == {words}
    for c in found["comparisons"]:
        c["worth"] = None
    assert findings.steps_table(found).rows == []


def test_tables_keep_the_named_variants_in_that_order():
    found, only = make_found(4, screened=3), ["routing_3", "routing_1"]
    names = [row["variant"] for row in rows_in(tables.TABLES["verdicts"](found, only))]
    assert names == ["plain GPT", *only]
    assert len(rows_in(tables.TABLES["screened"](found, None))) == 1 + 4 + 3
    assert [row["judged"] for row in rows_in(tables.TABLES["screened"](found, None))][-3:] == ["no"] * 3
    costs = rows_in(tables.TABLES["costs"](found, ["routing_1"]))
    assert [row["variant"] for row in costs] == ["plain GPT", "routing_1"]
    entry = found["arms"]["routing_1"]
    assert costs[1]["FLOPs/token, needed"].endswith(f"({entry['flops_per_token'] / 5.7e6:.2f} ×)")
    assert costs[1]["FLOPs/token, executed"].endswith(f"({entry['executed_flops_per_token'] / 6e6:.2f} ×)")
    assert costs[1]["time of a step × [95 %]"] == findings.interval(entry["time_ratio"], ".2f")
    assert costs[1]["seconds a run"] == findings.show(entry["seconds"])  # no ratio: it was not timed in turn
    assert not any("decoding" in title for title in costs[1])
    entry["memory_mib"] = 0.0
    entry["time_ratio"] = None
    row = rows_in(tables.TABLES["costs"](found, ["routing_1"]))[1]
    assert row["MiB added"] == row["time of a step × [95 %]"] == "not measured"


def test_grid_of_rates_says_what_was_chosen_and_what_lies_at_the_edge():
    rows = rows_in(tables.TABLES["tuned"](make_found(2), None))
    assert [row["rates"] for row in rows] == ["lr", "muon_lr"] * 2
    assert [row["best"] for row in rows] == ["× 1", "× 4, at the edge"] * 2
    # factor 1 once for both groups, 0.5 and 2 of each, 4 of one
    assert {row["runs of it"] for row in rows} == {"6"} and rows[0]["× 4"] == "–"


def test_a_study_at_best_rates_says_so():
    found, words = but(make_found(2), candidates={"plain": []}), "have their own best rates"
    assert findings.at_own_rates(found) and any(words in line for line in findings.notices(found))
    assert not any(words in line for line in findings.notices(but(found, candidates={})))
    c = some(records.Comparison, dict(equal=[]))
    assert findings.equal_of(found, c) == "hyperparameters, rates aside"


def test_text_and_seeds_have_an_interval_each():
    found = make_found(1)
    text = Page(html_of(found)).text.split("Intervals over seeds and over text")[1]
    c = found["comparisons"][0]
    assert f"[{c['text']['low']:+.4f}, {c['text']['high']:+.4f}]".replace("-", "−") in text


# ---- pictures and files ----

@pytest.mark.slow
def test_forest_has_plain_and_every_variant_once_in_the_colour_of_its_verdict():
    found = make_found(30)
    axes, = pictures.forest(found).axes
    ranked = sorted(main_rows(found), key=lambda c: c["mean"])
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "plain GPT", *(found["arms"][c["variant"]]["label"] for c in ranked)]
    zero, *lines = axes.get_lines()
    assert list(zero.get_xdata()) == [0, 0] and len(lines) == 3 * 31  # seeds, interval, mean; nothing goes on
    assert len(lines[0].get_xdata()) == 10 and sum(lines[0].get_xdata()) == pytest.approx(0)
    assert list(lines[1].get_xdata()) == pytest.approx([-(half := own_half(found)), half])
    for c, seeds, interval, mean in zip(ranked, lines[3::3], lines[4::3], lines[5::3]):
        assert list(seeds.get_xdata()) == c["differences"]
        assert list(interval.get_xdata()) == [c["low"], c["high"]] and list(mean.get_xdata()) == [c["mean"]]
        assert mean.get_color() == pictures.VERDICT_COLOURS[c["verdict"]]
    assert axes.yaxis_inverted() and "left is better" in axes.get_xlabel()
    for draw in (pictures.forest, pictures.learning, pictures.compute):
        assert draw(emptied(make_found(3))) is None


def own_half(found):
    """Half the 95 % interval of the plain GPT's own mean."""
    scores = found["arms"]["plain"]["bpb"]
    n = len(scores)
    return stdtrit(n - 1, 0.975) * np.std(scores, ddof=1) / n ** 0.5


def test_the_plain_gpt_has_the_interval_of_its_own_mean():
    found = make_found(3)
    said = f"its mean ±{own_half(found):.4f}"
    for text in (report.in_text(found), Page(html_of(found)).text):
        assert said in text.replace("\N{NO-BREAK SPACE}", " ")
    assert rows_in(tables.TABLES["verdicts"](found))[0]["difference [95 %], below 0 is better"] == said
    # of two texts: of the mean of two means, which are independent of each other
    both = results.read(ROOT / "results" / "all-tiny.json.gz")
    halves = [own_half(study) for study in both["texts"].values()]
    half = effects.uncertainty(effects.pooled(both), "plain")
    assert half == pytest.approx(math.hypot(*halves) / 2, rel=0.02)  # a few more degrees of freedom
    for few in ([2.3], []):
        found["arms"]["plain"].update(seeds=list(range(len(few))), bpb=few)
        assert effects.uncertainty(found, "plain") is None and findings.own_interval(found) == "–"


def test_the_forest_for_a_phone_says_the_same_in_fewer_inches():
    found = make_found(3)
    found["arms"]["routing_1"]["label"] = "a_name_of_more_than_thirty_letters"
    wide, narrow = pictures.forest(found), pictures.forest_narrow(found)
    assert narrow.get_figwidth() < 0.6 * wide.get_figwidth()

    def says(figure):
        axes, = figure.axes
        legend, = figure.legends
        texts = [*axes.get_yticklabels(), *legend.get_texts(), legend.get_title(), axes.xaxis.label]
        return ["".join(text.get_text().split()) for text in texts], [
            list(line.get_xdata()) for line in axes.get_lines()]

    assert says(narrow) == says(wide)
    assert "a_name_of_more_\nthan_thirty_" in narrow.axes[0].get_yticklabels()[2].get_text()
    page = Page(html_of(found, {"forest": b"<svg wide/>", "forest_narrow": b"<svg narrow/>"}))
    source, = (attrs for tag, attrs in page.tags if tag == "source")
    img, = (attrs for tag, attrs in page.tags if tag == "img")
    for data, svg in ((source["srcset"], b"<svg narrow/>"), (img["src"], b"<svg wide/>")):
        assert base64.b64decode(data.removeprefix("data:image/svg+xml;base64,")) == svg
    assert "max-width" in source["media"]


def test_what_lies_far_outside_the_forest_is_cut_off_and_marked():
    found = make_found(8)
    worst = max(main_rows(found), key=lambda c: c["mean"])
    far = {key: worst[key] + 5 for key in ("mean", "low", "high")}
    worst.update(far, differences=[d + 5 for d in worst["differences"]])
    axes, = pictures.forest(found).axes
    assert axes.get_xlim()[1] < 0.5
    marks = [line for line in axes.get_lines() if line.get_marker() == ">"]
    assert [list(mark.get_ydata()) for mark in marks] == [[8]]


def test_seeds_that_failed_or_stopped_early_do_not_bend_the_mean_curve():
    found = make_found(1)
    entry, runs = found["arms"]["acag+elementwise"], found["runs"]
    whole = pictures.mean_curve(but(entry, runs=entry["runs"][:3], bpb=entry["bpb"][:3]), runs)
    entry["bpb"][3:], runs[entry["runs"][3]]["curve"]["bpb"] = [None, None], [99.0] * 12
    del runs[entry["runs"][4]]
    assert np.array_equal(pictures.mean_curve(entry, runs)["mean"], whole["mean"])
    assert (whole["low"] <= whole["mean"]).all() and (whole["mean"] <= whole["high"]).all()


@pytest.mark.slow
def test_of_many_variants_a_few_curves_have_a_colour():
    few, many = (pictures.learning(make_found(n)) for n in (3, 30))
    # the plain GPT and its three budgets, a wider and a tuned one, a tuned variant
    assert [len(figure.axes[0].get_lines()) for figure in (few, many)] == [3 + 7, 30 + 7]
    assert [len(figure.legends[0].get_texts()) for figure in (few, many)] == [4, 6]
    # the grey ones in the order of the study: a set's differs from process to process, and so did the bytes
    found = make_found(30)
    grey = [line for line in many.axes[0].get_lines() if line.get_color() == "0.8"]
    means = {name: pictures.mean_curve(arm, found["runs"])["mean"] for name, arm in found["arms"].items()}
    names = [name for line in grey for name, mean in means.items() if np.array_equal(mean, line.get_ydata())]
    assert len(names) == len(grey) == 30 + 7 - 6
    assert names == [name for name in found["arms"] if name in names]


def with_train_loss(found):
    for run in found["runs"].values():
        run["curve"]["train"] = [bpb - 0.1 for bpb in run["curve"]["bpb"]]
    return found


@pytest.mark.slow
def test_learning_curves_show_train_loss_beside_validation():
    found = make_found(3)
    without, figure = (pictures.learning(each) for each in (make_found(3), with_train_loss(found)))
    for old, new in zip(without.axes, figure.axes):
        dotted = [line for line in new.get_lines() if line.get_linestyle() == ":"]
        assert len(dotted) == 4 and len(new.get_lines()) == len(old.get_lines()) + 4
        for line in dotted:  # 0.1 below the validation of the same colour, and in the picture
            colour = line.get_color()
            val, = (each for each in new.get_lines() if each.get_color() == colour and each is not line)
            assert np.allclose(val.get_ydata() - line.get_ydata(), 0.1)
            assert line.get_ydata().min() > new.get_ylim()[0]
    assert "dotted: train" in figure.legends[0].get_title().get_text()
    assert "not in this results file" in without.legends[0].get_title().get_text()


@pytest.mark.slow
@pytest.mark.parametrize("variants", [1, 3, 16, 30])
def test_no_label_of_a_picture_lies_under_a_curve(variants):
    found = with_train_loss(make_found(variants))
    for draw in (pictures.learning, pictures.compute):
        with mpl.rc_context({**drawing.RC, "font.size": 11}):
            assert hidden_labels(draw(found)) == []
    figure, axes = drawing.panels(6, 4)  # as it was: names beside their dots, within the axes
    axes.plot([0, 1, 2], [2, 1, 0])
    axes.annotate("a name", (0.9, 1.1), (6, 0), textcoords="offset points", va="center")
    assert hidden_labels(figure) == ["a name"]


@pytest.mark.slow
def test_names_of_variants_do_not_overlap_in_the_picture_of_compute():
    found = results.read(ROOT / "results" / "all-tiny.json.gz")["texts"]["wikitext2_byte"]
    with mpl.rc_context({**drawing.RC, "font.size": 11}):
        figure = pictures.compute(found)
        figure.draw_without_rendering()
    assert hidden_labels(figure) == []
    names = {findings.label_of(found, c["variant"]) for c in main_rows(found)}
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text() in names]
    assert len(boxes) == len(names) == 16
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_compute_shows_plain_budgets_and_variants_at_their_cost():
    found = make_found(3)
    line, *dots = pictures.compute(found).axes[0].get_lines()
    assert list(line.get_xdata()) == [0.7, 1.0, 1.4, 2.0]
    assert [dot.get_xdata()[0] for dot in dots] == [c["equal_flops"]["ratio"] for c in
                                                    sorted(main_rows(found), key=lambda c: c["mean"])]


def test_a_bar_of_the_picture_of_compute_crosses_the_line_if_the_difference_may_be_0():
    found = results.read(ROOT / "results" / "all-tiny.json.gz")["texts"]["wikitext2_byte"]
    axes, = pictures.compute(found).axes
    plain, *bars = axes.collections
    budgets = {arm["multiple"]: arm["bpb"] for arm in found["arms"].values()
               if arm["kind"] in ("plain", "budget")}
    for (x, low), (_, high) in plain.get_segments():
        n = len(budgets[x])
        half = stdtrit(n - 1, 0.975) * np.std(budgets[x], ddof=1) / n ** 0.5
        assert [low, high] == pytest.approx([np.mean(budgets[x]) - half, np.mean(budgets[x]) + half])
    assert len(plain.get_segments()) == len(budgets) == 4
    line = axes.get_lines()[0]
    rows = [c for c in findings.against_plain(found) if c["equal_flops"]]
    assert len(bars) == len(rows) == 16
    crosses = []
    for c, bar in zip(rows, bars):
        ((x, low), (_, high)), = bar.get_segments()
        at = np.interp(math.log(x), np.log(line.get_xdata()), line.get_ydata())
        each = c["equal_flops"]
        if low < high < axes.get_ylim()[1] - 0.01:  # not cut off
            assert [low - at, high - at] == pytest.approx([each["low"], each["high"]], abs=1e-9)
            crosses.append(each["low"] < 0 < each["high"])
    assert set(crosses) == {True, False}


@pytest.mark.slow
def test_files_are_whole_and_the_same_each_time(tmp_path, capsys):
    found = poisoned(make_found(3, screened=2))
    report.write_all(found, tmp_path / "one")
    names = ["report.html", "forest.svg", "forest.png"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:] == [str(tmp_path / "one" / name) for name in names]
    again = report.write(found, tmp_path / "two")
    assert [path.read_bytes() for path in again] == [(tmp_path / "one" / name).read_bytes() for name in names]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(names)
    assert len(again[0].read_bytes()) < 1_000_000


@pytest.mark.slow
def test_one_seed_still_has_pictures(tmp_path):
    found = make_found(2, seeds=1)
    for c in found["comparisons"]:
        c.update(low=None, high=None, se=None, df=None)
    assert len(pictures.forest(found).axes[0].get_lines()) == 1 + 3 * 3
    assert len(report.write(found, tmp_path)) == 3


@pytest.mark.slow
def test_36_variants_stay_a_small_page():
    found = make_found(30, screened=6)
    drawn = {draw.__name__: drawing.drawn(draw, found)
             for draw in (pictures.forest, pictures.forest_narrow, pictures.learning, pictures.compute)}
    assert len(html_of(found, drawn).encode()) < 1_000_000


# ---- ladders ----

def test_studies_of_several_sizes_have_a_table():
    found = make_ladder()
    plain, *rows = rows_in(findings.in_markdown(*findings.ladder_table(found)))
    assert plain["variant"] == "plain GPT" and len(rows) == 2 + 2 * 3 and rows[1]["size"] == "1M"
    c = main_rows(found[0])[0]
    assert rows[2]["difference [95 %], below 0 is better"] == findings.interval(c)
    assert rows[2]["verdict"] == c["verdict"] and html.unescape(rows[2]["corrected p"]) == findings.p_of(c)


def curves_of(axes):
    """{name: line} of what a panel of the ladder's picture draws through its sizes."""
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


def test_ladder_picture_has_difference_and_worth_at_each_size():
    found = make_ladder()
    smallest = found[0]
    one, other = findings.against_plain(smallest)
    one["worth"].update(mean=None, low=None, high=None, beyond="more")
    other["worth"]["mean"] = None
    differences, worth = pictures.ladder(found).axes
    for c in one, other:
        curve = curves_of(differences)[c["variant"]]
        assert curve.get_ydata()[0] == c["mean"] and len(curve.get_ydata()) == 3
    curves = curves_of(worth)
    assert curves[one["variant"]].get_ydata()[0] == 2.0 and len(curves[one["variant"]].get_ydata()) == 3
    assert curves[one["variant"]].get_xdata() == pytest.approx([98304, 331776, 983040], rel=0.05)
    assert len(curves[other["variant"]].get_ydata()) == 2
    assert [line.get_ydata()[0] for line in worth.get_lines() if line.get_marker() == "^"] == [2.0]


def test_ladder_picture_says_95_percent_and_has_no_tick_without_data():
    found = make_ladder()
    for c in found[2]["comparisons"]:
        c["worth"] = None
    figure = pictures.ladder(found)
    differences, worth = figure.axes
    assert [len(axes.get_xticks()) for axes in (differences, worth)] == [3, 2]
    assert "95 % intervals" in figure.legends[0].get_title().get_text()


def test_ladder_picture_does_without_worth_and_marks_what_lies_far_out():
    sizes = make_ladder()
    for study in sizes:
        for c in study["comparisons"]:
            c["worth"] = None
    far = findings.against_plain(sizes[2])[0]
    far.update(mean=5.0, low=4.0, high=6.0)
    axes, = pictures.ladder(sizes).axes
    top = axes.get_ylim()[1]
    assert top < 1 and curves_of(axes)[far["variant"]].get_ydata()[2] == top
    assert [line.get_ydata()[0] for line in axes.get_lines() if line.get_marker() == "^"] == [top]
    for study in sizes:
        for c in study["comparisons"]:
            c["mean"] = None
    assert pictures.ladder(sizes) is None


# ---- a browser ----

MEASURE = """<!doctype html><title>x</title><body></body><script>
const found = [], ask = PAGES;
for (const [name, width] of ask) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:800px;border:0`;
  frame.onload = () => {
    const d = frame.contentDocument, closed = d.documentElement.scrollWidth;
    d.querySelectorAll("details").forEach(x => x.open = true);
    const small = [...d.querySelectorAll("body *")].filter(x =>
      [...x.childNodes].some(n => n.nodeType == 3 && n.data.trim())
      && parseFloat(getComputedStyle(x).fontSize) < 14).length;
    found.push({name, width, closed, open: d.documentElement.scrollWidth, small,
                tall: d.documentElement.scrollHeight,
                loaded: frame.contentWindow.performance.getEntriesByType("resource").map(r => r.name)});
    if (found.length == ask.length) document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
  };
  frame.src = name; document.body.append(frame);
}
</script>"""


CUT = """(() => {
  document.querySelectorAll("details").forEach(each => each.open = true);
  const right = each => each.getBoundingClientRect().right;
  return {
    page: document.documentElement.scrollWidth,
    scrolling: [...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth)
      .map(box => box.textContent.slice(0, 60)),
    cut: [...document.querySelectorAll("th, td, .badge")].filter(each =>
      each.scrollWidth > each.clientWidth + 1 && each.clientWidth || right(each) > innerWidth)
      .map(each => each.textContent.slice(0, 60)),
    tables: document.querySelectorAll("table").length, badges: document.querySelectorAll("td .badge").length,
  };
})()"""


def pages_on_file(name):
    """{name: html} of a results file's report: over all its texts, and on each."""
    found = results.read(ROOT / "results" / f"{name}.json.gz")
    parts = {"all": effects.pooled(found), **found["texts"]} if "texts" in found else {"all": found}
    return {part: html_of(study) for part, study in parts.items()}


@pytest.mark.parametrize("name", ["demo", "all-tiny"])
def test_in_a_browser_no_table_is_cut_off_or_scrolls_at_a_desk(name, browser, tmp_path):
    """The verdict was the last column, right of what a window of 1,200 px shows."""
    for part, text in pages_on_file(name).items():
        (tmp_path / f"{part}.html").write_text(text, encoding="utf-8")
        for width in (1200, 1920):
            browser.open(tmp_path / f"{part}.html", width)
            found = browser.ask(CUT)
            assert found["page"] <= width and found["scrolling"] == found["cut"] == [], (part, width, found)
            assert found["tables"] >= 4 and found["badges"] >= 2
    browser.open(tmp_path / "all.html", 400)  # what the script looks for is found on a phone
    assert browser.ask(CUT)["scrolling"]


def test_in_a_browser_a_phone_has_a_forest_of_its_own_and_a_cue_for_what_scrolls(browser, tmp_path):
    found = make_found(3)
    drawn = {draw.__name__: drawing.drawn(draw, found)
             for draw in (pictures.forest, pictures.forest_narrow, pictures.compute)}
    (tmp_path / "page.html").write_text(html_of(found, drawn), encoding="utf-8")
    for width, narrow in ((390, True), (500, True), (1280, False)):
        browser.open(tmp_path / "page.html", width)
        table, forest, compute = (browser.ask(f"""(() => {{
          const boxes = [...document.querySelectorAll("[role=region]")];
          const box = boxes.find(each => each.querySelector("{what}"));
          const img = box.querySelector("img"), cue = getComputedStyle(box);
          box.focus();
          return {{scrolls: box.scrollWidth > box.clientWidth, label: box.ariaLabel,
                   focused: document.activeElement == box, source: img && img.currentSrc.slice(26),
                   shown: img && img.naturalWidth > 0,
                   cue: cue.backgroundImage.split("gradient").length - 1 + cue.backgroundAttachment}};
        }})()""") for what in ("table", "picture", "img:only-child"))
        assert base64.b64decode(forest["source"]) == drawn["forest_narrow" if narrow else "forest"]
        assert forest["shown"] and compute["shown"] and not forest["scrolls"]
        assert table["scrolls"] is compute["scrolls"] is narrow
        for box in (table, forest, compute):
            assert box["focused"] and box["label"] and box["cue"] == "2local, scroll"
        # nothing but headings draws a rule between sections: two had an empty stripe between them
        assert browser.ask("""[...document.querySelectorAll("section, header")].every(each =>
            getComputedStyle(each.lastElementChild).borderBottomStyle == "none"
            || each.lastElementChild.matches(".scroll"))""")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "all-tiny"])
def test_the_verdict_stands_right_after_the_name(name):
    for part, text in pages_on_file(name).items():
        heads = [re.findall(r"<th(?: [^>]*)?>(.*?)</th>", head)
                 for head in re.findall(r"<thead>.*?</thead>", text)]
        with_verdict = [head for head in heads if "verdict" in head]
        assert with_verdict and all(head[:2] == ["variant", "verdict"] for head in with_verdict), part


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium or Chrome is installed, so no page can be opened")
def test_in_a_real_browser_the_page_fits_a_phone_and_a_desk_loads_nothing_and_logs_nothing(tmp_path):
    pages = {"three.html": make_found(3), "thirty.html": make_found(30),
             "poisoned.html": poisoned(make_found(8)),
             "empty.html": emptied(make_found(2))}
    for name, found in pages.items():
        (tmp_path / name).write_bytes(html_of(found).encode("utf-8", "replace"))
    # in frames: a window of Chromium has at least 500 px
    ask = [[name, width] for name in pages for width in (360, 390, 1280)]
    (tmp_path / "measure.html").write_text(MEASURE.replace("PAGES", json.dumps(ask)))
    done = subprocess.run([CHROMIUM, "--headless", "--no-sandbox",
                           "--disable-gpu", "--allow-file-access-from-files", "--hide-scrollbars",
                           "--enable-logging=stderr", "--disable-background-networking",
                           f"--user-data-dir={tmp_path / 'profile'}",
                           "--virtual-time-budget=8000", "--dump-dom", (tmp_path / "measure.html").as_uri()],
                          capture_output=True, text=True, timeout=60)
    measured = json.loads(html.unescape(re.search("FOUND(.*)END", done.stdout).group(1)))
    assert len(measured) == len(ask)
    for f in measured:
        assert f["closed"] <= f["width"] and f["open"] <= f["width"] and f["tall"] > 800, f
        assert f["loaded"] == [] and f["small"] == 0, f
    assert "CONSOLE" not in done.stderr


def test_a_winner_that_loses_at_the_cost_it_takes_is_no_plain_winner():
    small = make_found(1)
    row = next(c for c in small["comparisons"] if c["baseline"] == "plain" and not c["equal"])
    row.update(verdict="better", mean=-0.02, low=-0.03, high=-0.01,
               equal_flops=dict(ratio=1.2, mean=0.01, low=0.005, high=0.015, p=0.01), equal_time=None)
    assert "at equal FLOPs" in findings.headline(small)
    row["equal_flops"].update(mean=-0.01, low=-0.015, high=-0.005)
    assert "FLOPs" not in findings.headline(small)
    # no plain GPT was as dear, or as cheap: the first is not measured, the second only helps the variant
    row["equal_flops"].update(ratio=2.4, mean=None, low=None, high=None, p=None)
    assert "equal FLOPs and equal time were not measured" in findings.headline(small)
    row["equal_flops"].update(ratio=0.6)
    assert "FLOPs" not in findings.headline(small)


def test_a_variant_whose_best_step_lies_long_before_the_end_is_named():
    found = make_found(2)
    names = [name for name, entry in found["arms"].items() if entry["kind"] == "variant"]
    for name, entry in found["arms"].items():
        entry["best_step"] = entry["steps"]
    assert not any("validation was best" in line for line in findings.notices(found))
    found["arms"][names[0]]["best_step"] = 0.4 * found["arms"][names[0]]["steps"]
    line, = [line for line in findings.notices(found) if "validation was best" in line]
    assert findings.label_of(found, names[0]) in line and findings.label_of(found, names[1]) not in line
