"""The report: the verdict first, every number as measured, one file that needs nobody, at any width."""

import html
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from compare import main
from study import report
from study.findings import EQUAL, headline
from study.page import html as html_of
from study.page import mean_curve

WORDS = {"better": "better by 0.0300 bits/byte", "worse": "worse by 0.0300 bits/byte",
         "no difference shown": "no difference shown at this budget"}


def make_study(variants=2, seeds=5, evals=12):
    """A made-up study: a plain GPT, `variants` variants, wider plain GPTs for the best half, four at most."""
    rng = np.random.default_rng(1)
    names = [f"routing_{i}" if i else "acag+elementwise" for i in range(variants)]
    effect = dict(zip(names, np.linspace(-0.05, 0.06, variants)))
    effect |= {f"plain, {w} % wider": -0.002 * w for w in range(1, min(4, (variants + 1) // 2) + 1)}
    luck = rng.normal(0, 0.02, seeds)
    labels = {"plain": "plain GPT", "acag+elementwise": "ACAG, a gate for each element"}

    def arm(name, i):
        bpb = (2.3 + effect.get(name, 0) + luck + rng.normal(0, 0.01, seeds)).tolist()
        tokens = [25600 * t for t in range(evals)]

        def curve(b):
            return dict(tokens=tokens, seconds=[round(t / 7000 * (1 + i / 40), 2) for t in tokens],
                        bpb=[round(b + 5.7 * math.exp(-4 * t / evals), 6) for t in range(evals)])

        kind = "plain" if name == "plain" else "baseline" if name.startswith("plain") else "variant"
        flags = {"plain": {}, "variant": {"routing": "published", "routing_top_k": i},
                 "baseline": {"n_embd": 128 + 8 * i, "lr_factor": 0.5}}[kind]
        entropy = rng.random((4, 8)).round(4).tolist()
        heads = {"entropy": entropy, "dead_heads": [0.0, 1.0, 0.0, 2.0], "heat": 0.7}
        command = f"python train.py config/tiny.py --routing=published --routing_top_k={i} --max_iters=150"
        return dict(kind=kind, label=labels.get(name, name), flags=flags, steps=150, params=851968 + 4096 * i,
                    flops_per_token=5.7e6 * (1 + i / 50), train_flops=1.75e12 * (1 + i / 50),
                    seconds=44.1 + i, tokens_per_s=6900.0 - 50 * i, decode_tokens_per_s=700.0 + i,
                    memory_mib=120.0 + i,
                    lr_factor=1.0, edge=False, bpb=bpb, curves=[curve(b) for b in bpb],
                    heads=heads if kind == "variant" else None,
                    sample=f"\nThe cat of {name} sat and looked at = the = station , <unk> in 1887 . " * 4,
                    commands=[command])

    arms = {name: arm(name, i) for i, name in enumerate(["plain", *effect])}

    def comparison(variant, baseline, matched):
        d = np.subtract(arms[variant]["bpb"], arms[baseline]["bpb"])
        half = 2.776 * d.std(ddof=1) / math.sqrt(seeds)
        verdict = "better" if d.mean() < 0 else "worse"
        verdict = "no difference shown" if abs(d.mean()) < 1.7 * half else verdict
        return dict(variant=variant, baseline=baseline, matched=matched, differences=d.tolist(),
                    mean=d.mean(), low=d.mean() - half, high=d.mean() + half,
                    p=0.01, p_holm=min(1.0, 0.0004 + abs(half / d.mean()) / 20),
                    detectable=2 * half, verdict=verdict, words=WORDS[verdict],
                    bootstrap=[dict(seed=s + 1, mean=v, low=v - 0.004, high=v + 0.004)
                               for s, v in enumerate(d)])
    comparisons = [comparison(name, "plain", ["hyperparameters"]) for name in names]
    baselines = [n for n in arms if n.startswith("plain,")]
    comparisons += [comparison(name, base, ["parameters", "FLOPs"]) for name, base in zip(names, baselines)]
    missing = {name: ["parameters", "FLOPs"] for name in names[len(baselines):]}
    selection = f"the best {len(baselines)} of {variants} by mean difference got all three baselines"
    study = dict(name="routing", scale="tiny",
                 question="Does routing tokens to their best heads beat a plain GPT?",
                 command="python compare.py config/studies/routing.py",
                 date="2026-11-21", commit="abc123-dirty",
                 versions=dict(python="3.11.7", torch="2.13.0", numpy="2.3", scipy="1.16"),
                 machine=dict(device="cpu", cores=2, jobs=2, threads=1),
                 seeds=list(range(1, seeds + 1)), alpha=0.05,
                 comparisons_made=len(comparisons),
                 data=dict(dataset="wikitext2_byte", split="test",
                           tokens=200064, bytes=200064, of_bytes=1292014,
                           name="every 6th window of 128 of the test split",
                           context="disjoint windows of 128", note=None),
                 tuned=None, arms=arms, comparisons=comparisons, missing=missing,
                 selection=selection if missing else None,
                 failures=[], planned=len(arms) * seeds, done=len(arms) * seeds)
    return json.loads(json.dumps(study))


def test_33_arms_of_5_seeds_stay_a_small_results_file():
    """With head statistics, samples and 25 points of every curve, as compare.py keeps them."""
    study = make_study(29, evals=25)
    assert len(study["arms"]) == 34 and len(json.dumps(study)) < 300_000


def poisoned(study):
    """The study, all text but keys and verdicts replaced by one that wants to be HTML, Markdown, wide."""
    bad = "<script>alert('x')</script><img src=http://evil.example/a.png>| `a` **b**\n & \x00\x1b[31m \ud800 "
    bad += "w" * 300
    study.update(question=bad, name=bad.replace("\ud800", ""), command=bad, commit=bad)
    study["failures"] = [dict(arm="plain", seed=1, why=bad, log=bad)]
    study["data"].update(note=bad, name=bad)
    for arm in study["arms"].values():
        arm.update(label=bad, sample=bad, commands=[bad], flags={bad: bad}, heads={bad: [1.0, 2.0]})
    for c in study["comparisons"]:
        c["words"] = bad
    return study


def emptied(study):
    """The study before its first run: no score, no cost, no curve, no comparison with a number."""
    nothing = len(study["seeds"]) * [None]
    for arm in study["arms"].values():
        arm.update(bpb=nothing, curves=nothing, heads=None, sample=None,
                   seconds=None, tokens_per_s=math.nan, decode_tokens_per_s=None,
                   memory_mib=None)
    for c in study["comparisons"]:
        c.update({key: math.nan for key in ("mean", "low", "high", "p", "p_holm", "detectable")},
                 differences=nothing, bootstrap=nothing,
                 verdict="no difference shown", words="only failed runs: no verdict")
    study["data"].update(tokens=None, bytes=None)
    study["machine"]["threads"] = None
    return {**study, "done": 0, "commit": None}


class Page(HTMLParser):
    """What a page holds: its tags with their attributes, and its text, that of <style> apart."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.css, self.inside = [], [], [], ""
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        (self.css if self.inside == "style" else self.words).append(data)


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def rows_in(markdown):
    """The table of report.md as [{head: cell}]."""
    head, _, *rows = [cells(line) for line in markdown.splitlines() if line.startswith("|")]
    assert all(len(row) == len(head) for row in rows)
    return [dict(zip(head, row)) for row in rows]


every_size = pytest.mark.parametrize("variants", [1, 2, 30])


@every_size
def test_the_verdict_on_every_variant_stands_before_everything_else(variants):
    study = make_study(variants)
    page = html_of(study)
    top = page[page.index("<h1>"):page.index("<section>")]
    items = [Page(item).text for item in re.findall(r"<li>.*?</li>", top, re.S)]
    for c in study["comparisons"]:
        label = study["arms"][c["variant"]]["label"]
        assert any(label in item and c["verdict"] in item for item in items)
    assert top.index("class=lead") < top.index("<li>")


def test_the_headline_counts_what_the_comparisons_say():
    study = make_study(30)
    best = set(study["arms"]) - {c["variant"] for c in study["comparisons"]
                                 if c["verdict"] != "better"} - set(study["missing"])
    best = {name for name in best if study["arms"][name]["kind"] == "variant"}
    assert 0 < len(best) < 30
    assert headline(study).startswith(f"{len(best)} of 30 variants")
    for c in study["comparisons"]:
        c["verdict"] = "no difference shown"
    assert headline(
        study) == "Not one of 30 variants was shown to be better than the plain GPT; 30 no difference shown."


def test_a_variant_that_only_beats_the_smaller_baseline_is_not_called_better():
    study = make_study(2)
    one = [c for c in study["comparisons"] if c["variant"] == "acag+elementwise"]
    one[0]["verdict"], one[1]["verdict"] = "better", "no difference shown"
    assert headline(study) == ("Not one of 2 variants was shown to be better than the plain GPT; "
                                      "1 better in some comparisons only; 1 worse.")


def test_one_seed_gives_no_verdict():
    study = make_study(2)
    c = study["comparisons"][0]
    c.update(low=None, high=None, p=None, p_holm=None, detectable=None,
             verdict="no difference shown", words="only one seed: no verdict")
    rows = report.table_of(study).splitlines()
    row = next(r for r in rows if r.startswith("acag+elementwise  hyper ")).split()
    assert row[4:] == [f"{c['mean']:+.4f}", "–", "no", "verdict", "yet"]


@pytest.mark.parametrize("change", [lambda s: s, poisoned, emptied], ids=["plain", "poisoned", "empty"])
@every_size
def test_the_page_asks_the_network_for_nothing_and_runs_nothing(variants, change):
    page = Page(html_of(change(make_study(variants))))
    assert not {tag for tag, _ in page.tags} & {"script", "img",
                                                "iframe", "object", "embed", "base", "form", "image", "use"}
    for tag, attrs in page.tags:
        assert not [k for k in attrs if k.startswith("on")]
        assert all(attrs.get(k, "data:,") == "data:,"
                   for k in ("src", "href", "xlink:href", "srcset", "poster"))
    styles = " ".join(page.css) + " ".join(attrs.get("style") or "" for _, attrs in page.tags)
    assert not re.search(r"url\(|@import|https?:", styles)
    assert any("default-src 'none'" in (attrs.get("content") or "") for _, attrs in page.tags)


def test_text_from_the_study_stays_text():
    page = Page(html_of(poisoned(make_study(3))))
    assert page.text.count("<script>alert('x')</script><img src=http://evil.example/a.png>") > 20
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", page.text)
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert len(rows_in(report.markdown(poisoned(make_study(3))))) == 5


@every_size
def test_what_is_not_known_is_a_dash(variants):
    study = emptied(make_study(variants))
    for text in (Page(html_of(study)).text, report.markdown(study), report.table_of(study)):
        assert "–" in text
        assert not re.search(r"\b(nan|NaN|None|null)\b", text)
        assert "no verdict yet" in text


def test_a_study_that_is_not_finished_says_so_at_the_top():
    study = make_study(30)
    assert not any("not finished" in f(study) for f in (report.table_of, report.markdown, html_of))
    study["done"] -= 7
    for text in (report.table_of(study), report.markdown(study), html_of(study).split("<body>")[1]):
        assert "not finished: 168 of 175 runs are done" in text[:1000]


def test_failures_and_rates_at_the_edge_are_told():
    study = make_study(3)
    study["failures"] = [dict(arm="routing_1", seed=4, why="loss is nan in step 73",
                              log="out/trials/0f/trial.log")]
    study["tuned"] = dict(factors=[0.5, 1, 2], steps=50)
    study["arms"]["routing_2"].update(lr_factor=2, edge=True)
    for text in (report.markdown(study).replace("\\", ""), Page(html_of(study)).text):
        for words in ("1 failed run is missing", "loss is nan in step 73",
                      "out/trials/0f/trial.log", "edge of the grid for routing_2"):
            assert words in text
    assert "at the edge of the grid" in html_of(study).split("<h2>Configurations")[1]


def test_a_variant_whose_runs_all_failed_is_listed_as_failed():
    study = make_study(3)
    study["comparisons"] = [c for c in study["comparisons"] if c["variant"] != "routing_1"]
    study["failures"] = [dict(arm="routing_1", seed=s, why="out of memory", log="x") for s in study["seeds"]]
    assert re.search(r"^routing_1 .* failed$", report.table_of(study), re.M)
    assert rows_in(report.markdown(study))[-1]["verdict"] == "failed"
    assert re.search(r"<strong>routing_1</strong>.*?failed", html_of(study))


@every_size
def test_the_terminal_table_fits_and_holds_the_numbers_best_first(variants):
    study = make_study(variants)
    study["comparisons"][0]["matched"] = ["hyperparameters", "parameters", "FLOPs", "wall-clock"]
    study["arms"]["plain"]["params"] = 124_439_808
    lines = report.table_of(study).splitlines()
    assert max(map(len, lines)) <= 120
    rows = [re.fullmatch(r"(\S+) +(\S+) +\S+ +([\d.]+) +(\S+) \[(\S+), (\S+)\] +(\S+)  (.*)", line)
            for line in lines]
    rows = [row.groups() for row in rows if row]
    assert len(rows) == len(study["comparisons"])
    for c in study["comparisons"]:
        row = next(r for r in rows if r[0] == c["variant"] and r[1].split("+")[0] == EQUAL[c["matched"][0]])
        assert float(row[2]) == pytest.approx(np.mean(study["arms"][c["variant"]]["bpb"]), abs=5e-5)
        assert [float(v) for v in row[3:6]] == pytest.approx([c["mean"], c["low"], c["high"]], abs=5e-5)
        assert float(row[6]) == pytest.approx(c["p_holm"], abs=5e-4) and row[7] == c["verdict"]
    first = [next(float(r[3]) for r in rows if r[0] == name) for name in dict.fromkeys(r[0] for r in rows)]
    assert first == sorted(first)
    assert f"corrected for {study['comparisons_made']} comparisons" in " ".join(lines)


@every_size
def test_markdown_and_page_hold_the_same_table(variants):
    study = make_study(variants)
    rows, page = rows_in(report.markdown(study)), Page(html_of(study)).text.replace("−", "-")
    assert len(rows) == len(study["comparisons"])
    for row in rows:
        name = row["variant"].replace("\\", "")
        gap = row["difference [95 %]"].replace("\\", "")
        c = next(c for c in study["comparisons"] if c["variant"] == name
                 and row["matched by"] == ", ".join(c["matched"]))
        assert [float(v) for v in re.findall(r"[-+][\d.]+",
                                             gap)] == pytest.approx([c["mean"], c["low"], c["high"]],
                                                                    abs=5e-5)
        assert row["verdict"] == c["verdict"] and int(row["parameters"].replace(",",
                                                                                "")) == study[
            "arms"][name]["params"]
        assert gap in page and row["smallest detectable"] in page


def test_of_many_arms_a_few_are_coloured_and_the_page_says_so():
    few, many = (html_of(make_study(n)).split("<h2>Learning curves")[1].split("<h2>")[0] for n in (3, 30))
    # 3 pictures and the legend; 3 variants, 2 wider, plain
    assert "class=thin" not in few and few.count("path class=curve") == 4 * 6
    assert many.count("path class=thin") == 3 * (35 - 6) and many.count("path class=curve") == 4 * 6
    assert "Of 35 arms the plain GPT, the best three and the worst two variants have a colour" in many


def test_seeds_that_failed_or_stopped_early_do_not_bend_the_mean_curve():
    arm = make_study(1)["arms"]["plain"]
    whole = mean_curve({**arm, "curves": arm["curves"][:3], "bpb": arm["bpb"][:3]})
    arm["bpb"][3:], arm["curves"][3]["bpb"], arm["curves"][4] = [None, None], [99.0] * 12, None
    assert np.array_equal(mean_curve(arm)["mean"], whole["mean"])
    assert (whole["low"] <= whole["mean"]).all() and (whole["mean"] <= whole["high"]).all()


def test_35_arms_of_5_seeds_stay_a_small_page():
    assert len(html_of(make_study(30, evals=400)).encode()) < 1_000_000


def test_files_are_written_whole_and_again_from_results_json(tmp_path, capsys):
    study = poisoned(make_study(3))
    (tmp_path / "results.json").write_text(json.dumps({**study, "alpha": 0.05}))
    paths = report.write(study, tmp_path)
    before = [path.read_bytes() for path in paths]
    names = ["report.md", "report.html", "forest.svg", "forest.png"]
    assert [path.name for path in paths] == names and not list(tmp_path.glob("*.part"))
    main([f"--from_results={tmp_path / 'results.json'}", f"--out_dir={tmp_path / 'again'}"])
    again = [tmp_path / "again" / name for name in names]
    assert [path.read_bytes() for path in again] == before
    assert capsys.readouterr().out.splitlines()[-4:] == [str(path) for path in again]


def test_the_forest_plot_has_every_variant_once_best_on_top_in_the_colour_of_its_verdict():
    study = make_study(30)
    axes, = report.forest_plot(study).axes
    equal = [c for c in study["comparisons"] if "hyperparameters" in c["matched"]]
    ranked = sorted(equal, key=lambda c: c["mean"])
    assert [text.get_text() for text in axes.get_yticklabels()] == [study["arms"][c["variant"]]["label"]
                                                                    for c in ranked]
    zero, *lines = axes.get_lines()
    assert list(zero.get_xdata()) == [0, 0] and len(lines) == 3 * 30  # seeds, interval, mean; nothing goes on
    for c, seeds, interval, mean in zip(ranked, lines[::3], lines[1::3], lines[2::3]):
        assert list(seeds.get_xdata()) == c["differences"]
        assert list(interval.get_xdata()) == [c["low"], c["high"]] and list(mean.get_xdata()) == [c["mean"]]
        assert mean.get_color() == report.VERDICT_COLOURS[c["verdict"]]
    assert axes.yaxis_inverted() and "bits/byte" in axes.get_xlabel(
        ) and "left is better" in axes.get_xlabel()
    assert report.forest_plot(emptied(make_study(3))) is None


def test_what_lies_far_outside_the_forest_plot_is_cut_off_and_marked():
    study = make_study(8)
    worst = max((c for c in study["comparisons"] if c["baseline"] == "plain"), key=lambda c: c["mean"])
    far = {key: worst[key] + 5 for key in ("mean", "low", "high")}
    worst.update(far, differences=[d + 5 for d in worst["differences"]])
    axes, = report.forest_plot(study).axes
    assert axes.get_xlim()[1] < 0.5
    marks = [line for line in axes.get_lines() if line.get_marker() == ">"]
    assert [list(mark.get_ydata()) for mark in marks] == [[7]]


def test_one_seed_still_has_a_forest_plot(tmp_path):
    study = make_study(2, seeds=2)
    for c in study["comparisons"]:
        c.update(low=None, high=None)
    assert len(report.forest_plot(study).axes[0].get_lines()) == 1 + 3 * 2
    assert len(report.write(study, tmp_path)) == 4


@pytest.mark.parametrize("text, words",
                         [(None, "cannot read"), ("{", "is not JSON"),
                          ("[]", "is not what compare.py writes"),
                                         ('{"runs": []}', "is not what compare.py writes: name, question"),
                          ('{"arms": []}', "is not what")])
def test_a_missing_or_foreign_file_gives_one_line(tmp_path, refusal, text, words):
    path = tmp_path / "results.json"
    if text:
        path.write_text(text)
    said = refusal([f"--from_results={path}", f"--out_dir={tmp_path}"])
    assert words in said and str(path) in said
    assert not (tmp_path / "report.html").exists()


BROWSER = next(filter(None,
                      map(shutil.which,
                          ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)
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


@pytest.mark.skipif(not BROWSER, reason="no Chromium or Chrome is installed, so no page can be opened")
def test_in_a_real_browser_the_page_fits_a_phone_and_a_desk_loads_nothing_and_logs_nothing(tmp_path):
    pages = {"three.html": make_study(3), "thirty.html": make_study(30),
             "poisoned.html": poisoned(make_study(8)),
             "empty.html": emptied(make_study(2))}
    for name, study in pages.items():
        (tmp_path / name).write_bytes(html_of(study).encode("utf-8", "replace"))
    # in frames: a window of Chromium has at least 500 px
    ask = [[name, width] for name in pages for width in (360, 390, 1280)]
    (tmp_path / "measure.html").write_text(MEASURE.replace("PAGES", json.dumps(ask)))
    done = subprocess.run([BROWSER, "--headless", "--no-sandbox",
                           "--disable-gpu", "--allow-file-access-from-files", "--hide-scrollbars",
                           "--enable-logging=stderr", "--disable-background-networking",
                           f"--user-data-dir={tmp_path / 'profile'}",
                           "--virtual-time-budget=8000", "--dump-dom", (tmp_path / "measure.html").as_uri()],
                          capture_output=True, text=True, timeout=60)
    found = json.loads(html.unescape(re.search("FOUND(.*)END", done.stdout).group(1)))
    assert len(found) == len(ask)
    for f in found:
        assert f["closed"] <= f["width"] and f["open"] <= f["width"] and f["tall"] > 800, f
        assert f["loaded"] == [] and f["small"] == 0, f
    assert "CONSOLE" not in done.stderr
