"""
report.html: what a study found as one page, which asks the network for nothing.

Text from results.json is escaped where it is shown: samples hold anything.
"""

import html as escaping
import math
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from plot_curves import COLOURS, number
from study.findings import (BETTER, SAME, WORSE, corrected, headline, interval, known, label_of, labelled,
                            level, listed, mean_of, notices, printable, range_of, ranked, rows_of,
                            settings_of, short, show, verdict_of, verdicts_of)

FEW = 8  # arms that can be told apart by colour; of more, the best and the worst are
FEW_IN_SENTENCES = 6  # variants whose verdicts stand at the top as sentences; more become a list


# ---- html: pieces ----

class Html(str):
    """Text that is HTML already; all other text is escaped on its way into the page."""


def e(text):
    """Escaped and printable."""
    return text if isinstance(text, Html) else escaping.escape(printable(text))


def tag(name, *parts):
    """tag("p class=note", ...) -> Html; a part that is no Html is escaped."""
    return Html(f"<{name}>{''.join(map(e, parts))}</{name.split()[0]}>")


def grid(head, rows, words=(0,)):
    """A table that scrolls in a box of its own; the columns `words` hold text, the others numbers."""

    def line(cells, first, other):
        return tag("tr", *(tag((other if i else first) + " class=w" * (i in words), cell)
                           for i, cell in enumerate(cells)))

    table = tag("table", tag("thead", line(head, "th", "th")),
                tag("tbody", *(line(row, "th scope=row", "td") for row in rows)))
    return tag("div class=scroll tabindex=0", table)


def details(summary, *parts):
    return tag("details", tag("summary", summary), *parts)


def note(text):
    return tag("p class=note", text)


def style_of(verdict):
    return {BETTER: "better", WORSE: "worse", SAME: "same"}.get(verdict, "open")


def badge(verdict):
    return tag(f"span class='badge {style_of(verdict)}'", verdict)


def minus(text):
    return text.replace("-", "−")


def box(words, *paths):
    """A drawing of 1000 x 1000 units that takes the size of its frame, strokes and text keeping theirs."""
    return tag(f"svg viewBox='0 0 1000 1000' preserveAspectRatio=none role=img aria-label='{e(words)}'",
               *paths)


def path(kind, points, more=""):
    """A line through [(x, y)]; through a single point it is a dot, as wide as its stroke."""
    at = " ".join(f"{x:.0f},{min(max(y, -999), 1999):.0f}" for x, y in points)
    return Html(f"<path class={kind} d='M{at}{'h0' * (len(points) == 1)}' {more}/>")


def ticks_in(low, high, n):
    """([where], [as text]), all with the same decimals."""
    at = [float(f"{t:.6g}") for t in MaxNLocator(n, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
          if low <= t <= high]
    digits = max((len(f"{t:.6g}".partition(".")[2]) for t in at), default=0)
    return at, [minus(f"{t:.{digits}f}") for t in at]


# ---- html: sections ----

def verdicts(study):
    """First on the page: a sentence for each comparison or, of many variants, a ranked list."""
    found, cards, lines = ranked(study), [], []
    for name, comparisons in found:
        verdicts, label = verdicts_of(study, name, comparisons), tag("strong", label_of(study, name))
        sentences = [tag("p", f"At equal {listed(c['matched'])}: ",
                         badge(v := verdict_of(c)), " ", minus(c["words"]).removeprefix(v))
                     for c in comparisons] or [tag("p", *map(badge, verdicts))]
        lacks = study["missing"].get(name)
        rest = note(f"Not compared at equal {listed(lacks, 'or')}.") if lacks else ""
        cards.append(tag("li", label, *sentences, rest))
        gap = minus(show(comparisons[0]["mean"], "+.4f")) if comparisons else "–"
        groups = (tag("span", badge(verdict), " ", tag("small", listed(what)))
                  for verdict, what in verdicts.items())
        lines.append(tag("li", label, tag("b", gap), tag("div", *groups)))
    sentences = tag("ul class=cards", *cards)
    if len(found) <= FEW_IN_SENTENCES:
        return sentences
    words = ("Best first. The number is the difference to the plain GPT in bits/byte: lower is better. "
             "By a verdict: what was equal.")
    return tag("div", note(words), tag("ol class=ranks", *lines),
               details("Every verdict in a sentence", sentences))


def forest(study):
    """Mean, interval and seeds of each comparison on one axis; what lies far out is cut off and marked."""
    found = [(name, c) for name, comparisons in ranked(study) for c in comparisons if known(c["mean"])]
    if not found:
        return note("No two runs to compare yet.")
    left, right = range_of([c for _, c in found])

    def x(value):
        return 1000 * (value - left) / (right - left)

    at, texts = ticks_in(left, right, 4)
    lines = [path("zero" if t == 0 else "line", [(x(t), 0), (x(t), 1000)]) for t in at]
    rows, above = [], None
    for name, c in found:
        marks = [path("seed", [(x(d), 720)]) for d in c["differences"] if left <= number(d) <= right]
        if known(c["low"]):
            marks.append(path("bar", [(x(min(max(v, left), right)), 400) for v in (c["low"], c["high"])]))
        marks += [path("bar", [(end + 12 * way, 270), (end, 400), (end + 12 * way, 530)])  # an arrow head
                  for end, way, beyond in ((3, 1, number(c["low"]) < left),
                                           (997, -1, number(c["high"]) > right)) if beyond]
        marks += [path("dot", [(x(c["mean"]), 400)])] if left <= c["mean"] <= right else []
        who = tag("div class=who", "" if name == above else tag("strong", label_of(study, name)),
                  tag("small", listed(c["matched"])))
        rows.append(tag(f"div class='row {style_of(verdict_of(c))}'",
                        who, tag("div class=val", minus(interval(c, 3))),
                        tag("div class=track",
                            box(f"{label_of(study, name)}: {interval(c)}", *lines, *marks))))
        above = name
    axis = [tag(f"span style='left:{x(t) / 10:.1f}%'", text) for t, text in zip(at, texts)]
    ways = [tag("span class=better", "better ←"), tag("span class=worse", "→ worse")]
    caption = ("Bits/byte of the variant minus bits/byte of its baseline: the plain GPT, equal in what "
               "stands below "
               f"the variant's name. Large dot and line: mean and {level(study)} interval over seeds; small "
               "dots: "
               "the seeds; an arrow head: it goes on. Grey: no difference shown.")
    return tag("figure", tag("div class='row scale'",
                             tag(f"div class=track style='--zero:{x(0) / 10:.1f}%'", *ways)), *rows,
               tag("div class='row scale'", tag("div class=track", *axis)), tag("figcaption", caption))


def mean_curve(arm):
    """Mean, lowest, highest validation bits/byte where all finished seeds have one; None without a curve."""
    curves = [c for c, bpb in zip(arm.get("curves") or [], arm.get("bpb") or []) if c and known(bpb)]
    seeds = [{t: (t, s, b) for t, s, b in np.array([c["tokens"], c["seconds"], c["bpb"]], float).T
              if np.isfinite(b)} for c in curves]
    at = sorted(set.intersection(*map(set, seeds))) if seeds else []
    if not at:
        return None
    at = at[::-1][::math.ceil(len(at) / 100)][::-1]  # at most 100 points, the last one kept: a small page
    tokens, seconds, bpb = np.array([[seed[t] for t in at] for seed in seeds]).transpose(2, 0, 1)
    return {"tokens": tokens[0], "FLOPs": tokens[0] * number(arm.get("flops_per_token")),
            "seconds": seconds.mean(0), "mean": bpb.mean(0), "low": bpb.min(0),
            "high": bpb.max(0)}


def plot(curves, styles, axis, title, unit=1):
    """One picture of all mean curves; those without a style are thin and grey."""
    curves = {name: c for name, c in curves.items() if np.isfinite(c[axis]).all()}
    if not curves:
        return ""
    # after the steep start
    late = [c["high"][c["tokens"] >= c["tokens"][-1] / 3].max() for c in curves.values()]
    top, low = np.quantile(late, 1 if len(late) <= FEW else 0.9), min(c["low"].min() for c in curves.values())
    top, low = top + 0.05 * (top - low) + 1e-3, low - 0.05 * (top - low) - 1e-3
    right = max(c[axis].max() for c in curves.values()) / unit or 1

    def points(c, key):
        return list(zip(1000 * c[axis] / unit / right, 1000 * (top - c[key]) / (top - low)))

    def height(value):
        return 1000 * (top - value) / (top - low)

    # the first style lies on top
    drawn = [(curves[name], *styles[name]) for name in reversed(styles) if name in curves]
    (at, texts), (across, _) = ticks_in(low, top, 5), ticks_in(0, right, 4)
    paths = [path("line", [(0, height(t)), (1000, height(t))]) for t in at]
    paths += [path("thin", points(c, "mean")) for name, c in curves.items() if name not in styles]
    paths += [path("band", points(c, "low") + points(c, "high")[::-1], f"style='--k:{k}'")
              for c, k, _ in drawn if len(c["mean"]) > 1]
    paths += [path("curve", points(c, "mean"), f"style='--k:{k}' stroke-dasharray='{dash}'")
              for c, k, dash in drawn]
    labels = [tag(f"span class=y style='top:{height(t) / 10:.1f}%'", text) for t, text in zip(at, texts)]
    labels += [tag(f"span class=x style='left:{100 * t / right:.1f}%'", short(t)) for t in across]
    return tag("div", tag("h3", title),
               tag("div class=frame", box(f"validation bits/byte against {title}", *paths), *labels))


def learning(study):
    curves = {name: c for name, arm in study["arms"].items() if (c := mean_curve(arm))}
    if not curves:
        return note("No curves yet.")
    order = [name for name, _ in ranked(study) if name in curves]
    rest = [name for name in curves if name not in order and name != "plain"]
    chosen = order + rest if len(curves) <= FEW else order[:3] + order[3:][-2:]
    hues = len(COLOURS) - 1  # the last one is black, the plain GPT's
    styles = {"plain": ("var(--ink)", ""),
              **{name: (f"var(--k{i % hues})", "7 5" * (i >= hues)) for i, name in enumerate(chosen)}}
    longest = max(c["seconds"].max() for c in curves.values())
    unit, word = (3600, "hours") if longest > 7200 else (60, "minutes") if longest > 120 else (1, "seconds")
    pictures = [plot(curves, styles, "tokens", "against training tokens"),
                plot(curves, styles, "FLOPs", "against training FLOPs"),
                plot(curves, styles, "seconds", f"against {word} of training", unit)]
    last = sorted((name for name in styles if name in curves), key=lambda name: curves[name]["mean"][-1])

    def swatch(k, dash):
        line = path("curve", [(0, 4), (28, 4)], f"style='--k:{k}' stroke-dasharray='{dash}'")
        return tag("svg width=28 height=8", line)

    legend = [tag("li", swatch(*styles[name]), label_of(study, name),
                  tag("b", f"{curves[name]['mean'][-1]:.3f}")) for name in last]
    words = ("Validation bits/byte. Line: mean over the finished seeds; band: lowest seed to highest seed. "
             "The steep start is cut off.")
    if len(last) < len(curves):
        words += (f" Of {len(curves)} arms the plain GPT, the best three and the worst two variants "
                  "have a colour; the thin grey lines are the rest.")
    return tag("div", tag("div class=plots", *pictures), tag("ul class=legend", *legend), note(words))


def costs(study):
    base = study["arms"].get("plain", {})
    columns = {
        "parameters": ("params", show), "FLOPs/ token": ("flops_per_token", short), "steps": ("steps", show),
        "training FLOPs": ("train_flops", short), "training seconds": ("seconds", lambda v: show(v, ",.1f")),
        "tokens/s, training": ("tokens_per_s", show), "tokens/s, decoding": ("decode_tokens_per_s", show),
        "MiB added by training": ("memory_mib", show)}

    def cell(arm, key, form):
        ratio = number(arm.get(key)) / (number(base.get(key)) or math.nan)
        return Html(e(form(arm.get(key)))
                    + tag("small", f"{show(ratio, '.2f')}×" if known(ratio) and arm is not base else ""))

    rows = [(label, *(cell(arm, *column) for column in columns.values())) for label, arm in labelled(study)]
    words = ("Medians over the runs of an arm; × is the ratio to the plain GPT. Training seconds leave "
             "evaluation "
             "out. Where several runs shared a machine, seconds and tokens/s hang on its load, so take them "
             "as a "
             "rough guide: bench.py measures them in turn.")
    return tag("div", note(words), grid(("arm", *columns), rows))


def seeds_of(study):
    seeds = [f"seed {seed}" for seed in study["seeds"]]
    runs = [(label, *(show(v, ".4f") for v in arm.get("bpb") or []), show(mean_of(arm), ".4f"))
            for label, arm in labelled(study)]
    tests = [(label_of(study, name), label_of(study, c["baseline"]),
              *(minus(interval(b)) if b else "–" for b in c.get("bootstrap") or []))
             for name, comparisons in ranked(study) for c in comparisons]
    words = ("A bootstrap over the test set asks how much of the difference between two finished models "
             "hangs on "
             "which text was scored. It knows nothing of other seeds, and decides no verdict.")
    return tag("div", details("Bits/byte of every run", grid(("arm", *seeds, "mean"), runs)),
               details(f"Each seed's difference with its {level(study)} interval over the test set",
                       note(words), grid(("variant", "baseline", *seeds), tests, (0, 1))))


def heat(value):
    """A statistic of the heads: a number, or a row for each layer, a cell for each head, darker if larger."""
    if not isinstance(value, list):
        return tag("p", show(value, ".4g"))
    rows = [row if isinstance(row, list) else [row]
            for row in (value if any(isinstance(row, list) for row in value) else [value])]
    found = [v for row in rows for v in row if known(v)] or [0]
    low, span = min(found), max(found) - min(found) or math.inf

    def cell(v):
        share = 45 * (v - low) / span if known(v) else 0
        return tag(f"td style='--heat:{share:.0f}%'", minus(show(v, ".3g")))

    return tag("div class=scroll tabindex=0",
               tag("table class=heat", *(tag("tr", *map(cell, row)) for row in rows)))


def heads_of(study):
    parts = [details(label, tag("div class=heats",
                                *(tag("div", tag("h3", key), heat(value))
                                  for key, value in arm["heads"].items())))
             for label, arm in labelled(study) if arm.get("heads")]
    words = ("Of one finished run of each arm: a row for each layer, a column for each head; or one cell for "
             "each "
             "layer. Deeper colour: larger.")
    return tag("div", note(words), *parts) if parts else ""


def samples(study):
    arms = study["arms"]
    order = dict.fromkeys(["plain", *(name for name, _ in ranked(study)), *arms])
    cards = [tag("div", tag("h3", label_of(study, name)), tag("pre", arms[name]["sample"]))
             for name in order if arms.get(name, {}).get("sample")]
    more = details(f"{len(cards) - 3} more", tag("div class=samples", *cards[3:])) if len(cards) > 3 else ""
    words = "The same prompt for all: the plain GPT, then the variants from the best one on."
    return tag("div", note(words), tag("div class=samples", *cards[:3]), more) if cards else ""


def configs(study):
    tuned, head, rows = study.get("tuned"), ["arm", "name", "kind", "what differs from the plain GPT"], []
    words = "The learning rate was not tuned: every arm trains with that of its own configuration."
    if tuned:
        factors = listed([f"{factor:g}" for factor in tuned["factors"]])
        words = (f"The learning rate was tuned for every arm: {factors} times its own, "
                 f"{show(tuned['steps'])} steps each.")
        head.append("learning rate ×")
    for name, arm in study["arms"].items():
        flags = Html(" ".join(tag("code", f"{key}={value}")
                              for key, value in (arm.get("flags") or {}).items()) or "–")
        edge = tag("b class=warn", " at the edge of the grid") if arm.get("edge") else ""
        rows.append([label_of(study, name), name, arm["kind"], flags]
                    + [tag("span", show(arm.get("lr_factor"), "g"), edge)] * bool(tuned))
    return tag("div", note(words), grid(head, rows, range(5)))


def commands(study):
    each = [tag("div", tag("h3", label), tag("pre", "\n".join(arm.get("commands") or ["–"])),
                note(f"Runs: {', '.join(arm.get('folders') or ['–'])}"))
            for label, arm in labelled(study)]
    return tag("div", tag("pre", study["command"]), details(f"Each of the {len(each)} arms by itself", *each))


def reading(study):
    n, made, alpha = len(study["seeds"]), study["comparisons_made"], study["alpha"]
    return [
        "Bits/byte: how many bits the model needs for a byte of text that it has not seen. Lower is "
        "better, whatever the tokenizer.",
        "Paired: at one seed a variant and its baseline see the same batches and start alike where they "
        f"share weights. What is judged are the {n} differences, one for each seed; luck that both share "
        f"cancels. The {level(study)} interval is Student's t over them.",
        "Equal: a variant often has more parameters or costs more per token, and may win by that alone. "
        "So besides the plain GPT with the same hyperparameters it may meet one with as many parameters, "
        "one that trains for as many FLOPs, one that trains for as long.",
        "Holm: among many comparisons some look good by chance. The correction raises each p so that the "
        f"risk of one false verdict or more among all {made} (those that the best were chosen from "
        f"included) stays below {100 * alpha:g} %. A verdict needs a corrected p of at most {alpha:g}: an "
        "interval may leave out zero and still give none.",
        "Smallest detectable: the difference that this many seeds, as noisy as these, would find four "
        "times in five, correction included. “No difference shown” is not “equal”: a smaller difference "
        "may be there.",
    ]


# ---- html: the page ----

# the colours of the lines first: in the dark the sheet has lighter ones
CSS = (":root{" + "".join(f"--k{i}:{colour};" for i, colour in enumerate(COLOURS)) + "}\n"
       + Path(__file__).with_suffix(".css").read_text(encoding="utf-8"))


def html(study):
    head = ("variant", "at equal", "bits/byte", f"difference [{level(study)} interval]",
            "corrected p", "verdict", "smallest detectable")
    rows = []
    for name, baseline, matched, score, gap, p, verdict, smallest in rows_of(study):
        equal = tag("span", ", ".join(matched) or "–",
                    "" if baseline in ("plain", "–") else tag("small", label_of(study, baseline)))
        rows.append((label_of(study, name), equal, score, minus(gap), p, badge(verdict), smallest))
    lost = [(label_of(study, f["arm"]), f["seed"], f["why"], f["log"]) for f in study["failures"]]
    sections = {"Difference to the plain GPT": forest(study),
                "Every comparison": tag("div", grid(head, rows, (0, 1, 5)), note(corrected(study))),
                "Learning curves": learning(study), "Costs": costs(study), "Seed by seed": seeds_of(study),
                "Inside the heads": heads_of(study), "Samples": samples(study),
                "Configurations": configs(study), "Commands": commands(study),
                "Settings": tag("dl", *(tag(kind, text) for pair in settings_of(study)
                                        for kind, text in zip(("dt", "dd"), pair))),
                "How to read this": tag("div", *(tag("p", text) for text in reading(study))),
                "Failures": grid(("arm", "seed", "why", "log"), lost, (0, 2, 3)) if lost else ""}
    title, warnings = study["question"] or study["name"], [tag("p", text) for text in notices(study)]
    where = " · ".join(str(study[key]) for key in ("name", "scale", "date") if study.get(key))
    header = tag("header", note(where), tag("h1", title), tag("p class=lead", headline(study)),
                 tag("div class=warnings", *warnings) if warnings else "", verdicts(study))
    # the policy has the browser refuse what the page promises not to do: load anything, run anything
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    sections = [tag("section", tag("h2", name), part) for name, part in sections.items() if part]
    main = tag("main", header, *sections)
    return ("<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
            f'<meta http-equiv=Content-Security-Policy content="{policy}"><link rel=icon href=\'data:,\'>'
            "<meta name=viewport content='width=device-width, initial-scale=1'>"
            f"{tag('title', title)}<style>{CSS}</style></head>\n<body>{main}</body></html>\n")
