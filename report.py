"""
What a study found: a table for the terminal, report.md, and report.html, which is one file and asks the network for nothing.

    python report.py out/study/results.json      # writes report.md and report.html beside it once more

compare.py makes results.json and calls table() and write(). Text from it is escaped where it is shown: samples hold anything.
"""

import html as escaping
import json
import math
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

from plot_curves import COLOURS, number

from common import write_atomic

EQUAL = {"hyperparameters": "hyper", "parameters": "params", "FLOPs": "FLOPs", "wall-clock": "clock"}  # what a comparison holds equal
BETTER, WORSE, SAME, OPEN = "better", "worse", "no difference shown", "no verdict yet"
FEW = 8       # arms that can be told apart by colour; of more, the best and the worst are
IN_WORDS = 6  # variants whose verdicts stand at the top as sentences; more become a list
SHAPE = {"name": str, "question": str, "command": str, "seeds": list, "alpha": float, "data": dict, "machine": dict, "versions": dict,
         "arms": dict, "comparisons": list, "missing": dict, "failures": list, "comparisons_made": int, "planned": int, "done": int}


# ---- numbers and words ----

def known(value):
    return not math.isnan(number(value))


def show(value, spec=",.0f", unit=""):
    return f"{value:{spec}}{unit}" if known(value) else "–"


def short(value):
    """5700000 -> 5.7M"""
    return EngFormatter(sep="")(float(f"{value:.3g}")) if known(value) else "–"


def mean_of(arm):
    found = [v for v in arm.get("bpb") or [] if known(v)]
    return float(np.mean(found)) if found else None


def interval(c, digits=4):
    mean, low, high = (show(c[key], f"+.{digits}f") for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]" if known(c["low"]) else mean


def level(study, digits="g"):
    return f"{100 * (1 - study['alpha']):{digits}} %"


def listed(words, last="and"):
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def label_of(study, name):
    return study["arms"].get(name, {}).get("label") or name


def labelled(study):
    return [(label_of(study, name), arm) for name, arm in study["arms"].items()]


def verdict_of(c):
    return c["verdict"] if known(c["low"]) else OPEN  # one seed has no interval, hence no verdict


def ranked(study):
    """[(variant, its comparisons)], the best difference to the plain GPT first, at the end those without one."""
    found = []
    for name, arm in study["arms"].items():
        if arm["kind"] == "variant":
            own = [c for c in study["comparisons"] if c["variant"] == name]
            found.append((name, sorted(own, key=lambda c: min(list(EQUAL).index(m) for m in c["matched"]))))
    return sorted(found, key=lambda item: item[1][0]["mean"] if item[1] and known(item[1][0]["mean"]) else math.inf)


def said(study, name, comparisons):
    """{verdict: what was equal in the comparisons that gave it} of a variant."""
    found = {}
    for c in comparisons:
        found.setdefault(verdict_of(c), []).extend(c["matched"])
    return found or {"failed" if any(f["arm"] == name for f in study["failures"]) else OPEN: []}


def headline(study):
    found = [(name, said(study, name, comparisons)) for name, comparisons in ranked(study)]
    if len(found) == 1:
        parts = (verdict + (f" at equal {listed(what)}" if what else "") for verdict, what in found[0][1].items())
        return f"{label_of(study, found[0][0])}: {'; '.join(parts)}."
    kinds = [(set(verdicts), name in study["missing"]) for name, verdicts in found]
    best = kinds.count(({BETTER}, False))
    rest = {"better, but not compared with every baseline": kinds.count(({BETTER}, True)),
            "better in some comparisons only": sum(BETTER in k and k != {BETTER} for k, _ in kinds),
            SAME: sum(SAME in k and not k & {BETTER, WORSE} for k, _ in kinds),
            WORSE: sum(WORSE in k and BETTER not in k for k, _ in kinds),
            "without a verdict": sum(not k & {BETTER, WORSE, SAME} for k, _ in kinds)}
    return (f"{best or 'Not one'} of {len(kinds)} variants {'was' if best < 2 else 'were'} shown to be better than the plain GPT"
            + "".join(f"; {n} {what}" for what, n in rest.items() if n) + ".")


def notices(study):
    """What a reader must know before the numbers."""
    edge, failed, found = [label for label, arm in labelled(study) if arm.get("edge")], len(study["failures"]), []
    if study["done"] + failed < study["planned"]:
        found.append(f"This study is not finished: {study['done']} of {study['planned']} runs are done; all of this may still change.")
    if failed:
        found.append(f"{failed} failed {'run is' if failed == 1 else 'runs are'} missing from the numbers: see Failures.")
    if edge:
        found.append(f"The best learning rate tried lies at the edge of the grid for {listed(edge)}: a better one may lie beyond.")
    return found


def corrected(study):
    """How p was corrected, how small a difference could have been seen, and who got which baselines."""
    sizes = [c["detectable"] for c in study["comparisons"] if known(c["detectable"]) and c["detectable"] > 0]  # 0: identical on every seed
    spread = f" (median; {min(sizes):.4f} to {max(sizes):.4f})" if len(sizes) > 1 else ""
    seen = (f"With {len(study['seeds'])} seeds a difference of {np.median(sizes):.4f} bits/byte{spread} would have been found with 80 % power."
            if sizes else "How small a difference shows is not known yet.")
    chosen = f" Selection: {study['selection']}." if study.get("selection") else ""
    made = study["comparisons_made"]
    return (f"p is corrected for {made} comparisons (Holm). " if made > 1 else "One comparison: p is as it is. ") + seen + chosen


def rows_of(study):
    """[(variant, baseline, [what was equal], bits/byte, difference, p, verdict, smallest detectable)], ranked."""
    rows = []
    for name, comparisons in ranked(study):
        score = show(mean_of(study["arms"][name]), ".4f")
        for c in comparisons:
            p = "<0.001" if number(c["p_holm"]) < 0.001 else show(c["p_holm"], ".3f")
            n = sum(map(known, c["differences"]))
            few = f" ({n} of {len(study['seeds'])} seeds)" * (0 < n < len(study["seeds"]) and known(c["low"]))
            rows.append((name, c["baseline"], c["matched"], score, interval(c), p, verdict_of(c) + few, show(c["detectable"], ".4f")))
        rows += [] if comparisons else [(name, "–", [], score, "–", "–", *said(study, name, []), "–")]
    return rows


def settings_of(study):
    d, m = study["data"], study["machine"]
    part = f" of {d['of_bytes']:,}" if known(d["of_bytes"]) and d["of_bytes"] != d["bytes"] else ""
    return [("Study", f"{study['name']}, {study.get('scale')} scale, {study.get('date')}, commit {study.get('commit') or 'unknown'}"),
            ("Seeds", f"{', '.join(map(str, study['seeds']))}; {study['done']} of {study['planned']} runs done"),
            ("Scored", f"{d['dataset']}, {d['split']} split: {d['name']}, {d['context']}; {show(d['tokens'])} tokens, "
                       f"{show(d['bytes'])}{part} bytes"),
            *([("Note on the data", d["note"])] if d.get("note") else []),
            *([("On both sides", ", ".join(f"{k}={v}" for k, v in study["settings"].items()))] if study.get("settings") else []),
            ("Machine", f"{m['device']}, {show(m['cores'])} cores; runs at once: {show(m['jobs'])}, threads of each: {show(m['threads'])}"),
            ("Versions", ", ".join(f"{package} {version}" for package, version in study["versions"].items()))]


# ---- terminal ----

def table(study, width=120):
    """One line a comparison, the best variant first; long names lose their beginning so that `width` is kept."""
    head = ("variant", "matched", "params", "bits/byte", f"difference [{level(study)}]", "p (Holm)", "verdict")
    rows = [(name, "+".join(EQUAL[m] for m in matched) or "–", short(study["arms"][name].get("params")), *rest)
            for name, _, matched, *rest, _ in rows_of(study)]
    wide = [max(map(len, column)) for column in zip(head, *rows)]
    wide[0] = min(wide[0], max(12, width - sum(2 + w for w in wide[1:])))
    lines = [text for line in (f"{study['name']}: {headline(study)}", *notices(study)) for text in textwrap.wrap(line, width)]
    for name, *cells in (head, *rows):
        name = name if len(name) <= wide[0] else "…" + name[1 - wide[0]:]
        cells = [f"{cell:{'<' if i in (1, 6) else '>'}{wide[i]}}" for i, cell in enumerate(cells, 1)]
        lines.append("  ".join([name.ljust(wide[0]), *cells]).rstrip())
    return "\n".join(lines + textwrap.wrap(corrected(study), width))


# ---- markdown ----

def plain(text):
    """Text that is nothing but text in Markdown, also in a cell of a table."""
    return re.sub(r"([\\`*_|\[\]#~])", r"\\\1", " ".join(escaping.escape(str(text), quote=False).split()))


def markdown(study):
    head = ("variant", "baseline", "matched by", "parameters", "bits/byte", f"difference [{level(study)}]", "p (Holm)", "verdict",
            "smallest detectable")
    rows = [(name, baseline, ", ".join(matched) or "–", show(study["arms"][name].get("params")), *rest)
            for name, baseline, matched, *rest in rows_of(study)]
    lines = [f"# {plain(study['question'] or study['name'])}", "", f"**{plain(headline(study))}**", "",
             *(f"> {plain(text)}\n" for text in notices(study)),
             f"| {' | '.join(head)} |", f"|{'|'.join('---' if i in (0, 1, 2, 7) else '---:' for i in range(len(head)))}|",
             *(f"| {' | '.join(map(plain, row))} |" for row in rows), "", plain(corrected(study)), "", "## Verdicts in words"]
    for name, comparisons in ranked(study):
        label = plain(label_of(study, name))
        lines += [f"- **{label}**, at equal {listed(c['matched'])}: {plain(c['words'])}" for c in comparisons]
        lines += [] if comparisons else [f"- **{label}**: {listed([*said(study, name, [])])}"]
    lines += ["", "## Settings", *(f"- {key}: {plain(value)}" for key, value in settings_of(study))]
    lost = [f"- {plain(f['arm'])}, seed {f['seed']}: {plain(f['why'])} ({plain(f['log'])})" for f in study["failures"]]
    lines += ["", "## Failures", *lost] if lost else []
    lines += ["", "## Commands", "", f"    {study['command']}"]
    for label, arm in labelled(study):
        lines += ["", f"{plain(label)}, kept in {plain(', '.join(arm.get('folders') or ['–']))}:", "",
                  *("    " + " ".join(command.splitlines()) for command in arm.get("commands") or ["–"])]
    return "\n".join(lines) + "\n"


# ---- html: pieces ----

class Html(str):
    """Text that is HTML already; all other text is escaped on its way into the page."""


def e(text):
    """Escaped, and without what a page must not hold: control characters and halves of characters."""
    if isinstance(text, Html):
        return text
    return escaping.escape(re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "�", str(text)))


def tag(name, *parts):
    """tag("p class=note", ...) -> Html; a part that is no Html is escaped."""
    return Html(f"<{name}>{''.join(map(e, parts))}</{name.split()[0]}>")


def grid(head, rows, words=(0,)):
    """A table that scrolls in a box of its own; the columns `words` hold text, the others numbers."""
    def line(cells, first, other):
        return tag("tr", *(tag((other if i else first) + " class=w" * (i in words), cell) for i, cell in enumerate(cells)))
    table = tag("table", tag("thead", line(head, "th", "th")), tag("tbody", *(line(row, "th scope=row", "td") for row in rows)))
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
    return tag(f"svg viewBox='0 0 1000 1000' preserveAspectRatio=none role=img aria-label='{e(words)}'", *paths)


def path(kind, points, more=""):
    """A line through [(x, y)]; through a single point it is a dot, as wide as its stroke."""
    at = " ".join(f"{x:.0f},{min(max(y, -999), 1999):.0f}" for x, y in points)
    return Html(f"<path class={kind} d='M{at}{'h0' * (len(points) == 1)}' {more}/>")


def ticks_in(low, high, n):
    """([where], [as text]), all with the same decimals."""
    at = [float(f"{t:.6g}") for t in MaxNLocator(n, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= t <= high]
    digits = max((len(f"{t:.6g}".partition(".")[2]) for t in at), default=0)
    return at, [minus(f"{t:.{digits}f}") for t in at]


# ---- html: sections ----

def verdicts(study):
    """First on the page: a sentence for each comparison or, of many variants, a ranked list."""
    found, cards, lines = ranked(study), [], []
    for name, comparisons in found:
        verdicts, label = said(study, name, comparisons), tag("strong", label_of(study, name))
        sentences = [tag("p", f"At equal {listed(c['matched'])}: ", badge(v := verdict_of(c)), " ", minus(c["words"]).removeprefix(v))
                     for c in comparisons] or [tag("p", *map(badge, verdicts))]
        lacks = study["missing"].get(name)
        cards.append(tag("li", label, *sentences, note(f"Not compared at equal {listed(lacks, 'or')}.") if lacks else ""))
        gap = minus(show(comparisons[0]["mean"], "+.4f")) if comparisons else "–"
        groups = (tag("span", badge(verdict), " ", tag("small", listed(what))) for verdict, what in verdicts.items())
        lines.append(tag("li", label, tag("b", gap), tag("div", *groups)))
    sentences = tag("ul class=cards", *cards)
    if len(found) <= IN_WORDS:
        return sentences
    words = "Best first. The number is the difference to the plain GPT in bits/byte: lower is better. By a verdict: what was equal."
    return tag("div", note(words), tag("ol class=ranks", *lines), details("Every verdict in a sentence", sentences))


def forest(study):
    """Mean, interval and seeds of each comparison on one axis; what lies far outside the others' range is cut off and marked."""
    found = [(name, c) for name, comparisons in ranked(study) for c in comparisons if known(c["mean"])]
    if not found:
        return note("No two runs to compare yet.")
    spans = [[v for v in (c["low"], c["high"], c["mean"], *c["differences"]) if known(v)] for _, c in found]
    far = 3 * np.median([max(map(abs, span)) for span in spans]) or math.inf
    near = [v for span in spans if max(map(abs, span)) <= far for v in span]
    left, right = min(near), max(near)
    left, right = min(left, -0.25 * right), max(right, -0.25 * left)  # zero stands well inside
    pad = 0.05 * (right - left) or 0.01
    left, right = left - pad, right + pad
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
                  for end, way, beyond in ((3, 1, number(c["low"]) < left), (997, -1, number(c["high"]) > right)) if beyond]
        marks += [path("dot", [(x(c["mean"]), 400)])] if left <= c["mean"] <= right else []
        who = tag("div class=who", "" if name == above else tag("strong", label_of(study, name)), tag("small", listed(c["matched"])))
        rows.append(tag(f"div class='row {style_of(verdict_of(c))}'", who, tag("div class=val", minus(interval(c, 3))),
                        tag("div class=track", box(f"{label_of(study, name)}: {interval(c)}", *lines, *marks))))
        above = name
    axis = [tag(f"span style='left:{x(t) / 10:.1f}%'", text) for t, text in zip(at, texts)]
    ways = [tag("span class=better", "better ←"), tag("span class=worse", "→ worse")]
    caption = ("Bits/byte of the variant minus bits/byte of its baseline: the plain GPT, equal in what stands below the variant's name. "
               f"Large dot and line: mean and {level(study)} interval over seeds; small dots: the seeds; an arrow head: it goes on. "
               "Grey: no difference shown.")
    return tag("figure", tag("div class='row scale'", tag(f"div class=track style='--zero:{x(0) / 10:.1f}%'", *ways)), *rows,
               tag("div class='row scale'", tag("div class=track", *axis)), tag("figcaption", caption))


def mean_curve(arm):
    """Mean, lowest and highest validation bits/byte over the finished seeds, where all have a value; None without a curve."""
    curves = [c for c, bpb in zip(arm.get("curves") or [], arm.get("bpb") or []) if c and known(bpb)]
    seeds = [{t: (t, s, b) for t, s, b in np.array([c["tokens"], c["seconds"], c["bpb"]], float).T if np.isfinite(b)} for c in curves]
    at = sorted(set.intersection(*map(set, seeds))) if seeds else []
    if not at:
        return None
    at = at[::-1][::math.ceil(len(at) / 100)][::-1]  # at most 100 points, the last one kept: a small page
    tokens, seconds, bpb = np.array([[seed[t] for t in at] for seed in seeds]).transpose(2, 0, 1)
    return {"tokens": tokens[0], "FLOPs": tokens[0] * number(arm.get("flops_per_token")), "seconds": seconds.mean(0),
            "mean": bpb.mean(0), "low": bpb.min(0), "high": bpb.max(0)}


def plot(curves, styles, axis, title, unit=1):
    """One picture of all mean curves; those without a style are thin and grey."""
    curves = {name: c for name, c in curves.items() if np.isfinite(c[axis]).all()}
    if not curves:
        return ""
    late = [c["high"][c["tokens"] >= c["tokens"][-1] / 3].max() for c in curves.values()]  # after the steep start
    top, low = np.quantile(late, 1 if len(late) <= FEW else 0.9), min(c["low"].min() for c in curves.values())
    top, low = top + 0.05 * (top - low) + 1e-3, low - 0.05 * (top - low) - 1e-3
    right = max(c[axis].max() for c in curves.values()) / unit or 1
    def points(c, key):
        return list(zip(1000 * c[axis] / unit / right, 1000 * (top - c[key]) / (top - low)))
    def height(value):
        return 1000 * (top - value) / (top - low)
    drawn = [(curves[name], *styles[name]) for name in reversed(styles) if name in curves]  # the first style lies on top
    (at, texts), (across, _) = ticks_in(low, top, 5), ticks_in(0, right, 4)
    paths = [path("line", [(0, height(t)), (1000, height(t))]) for t in at]
    paths += [path("thin", points(c, "mean")) for name, c in curves.items() if name not in styles]
    paths += [path("band", points(c, "low") + points(c, "high")[::-1], f"style='--k:{k}'") for c, k, _ in drawn if len(c["mean"]) > 1]
    paths += [path("curve", points(c, "mean"), f"style='--k:{k}' stroke-dasharray='{dash}'") for c, k, dash in drawn]
    labels = [tag(f"span class=y style='top:{height(t) / 10:.1f}%'", text) for t, text in zip(at, texts)]
    labels += [tag(f"span class=x style='left:{100 * t / right:.1f}%'", short(t)) for t in across]
    return tag("div", tag("h3", title), tag("div class=frame", box(f"validation bits/byte against {title}", *paths), *labels))


def learning(study):
    curves = {name: c for name, arm in study["arms"].items() if (c := mean_curve(arm))}
    if not curves:
        return note("No curves yet.")
    order = [name for name, _ in ranked(study) if name in curves]
    rest = [name for name in curves if name not in order and name != "plain"]
    chosen = order + rest if len(curves) <= FEW else order[:3] + order[3:][-2:]
    hues = len(COLOURS) - 1  # the last one is black, the plain GPT's
    styles = {"plain": ("var(--ink)", ""), **{name: (f"var(--k{i % hues})", "7 5" * (i >= hues)) for i, name in enumerate(chosen)}}
    longest = max(c["seconds"].max() for c in curves.values())
    unit, word = (3600, "hours") if longest > 7200 else (60, "minutes") if longest > 120 else (1, "seconds")
    pictures = [plot(curves, styles, "tokens", "against training tokens"), plot(curves, styles, "FLOPs", "against training FLOPs"),
                plot(curves, styles, "seconds", f"against {word} of training", unit)]
    last = sorted((name for name in styles if name in curves), key=lambda name: curves[name]["mean"][-1])
    def swatch(k, dash):
        return tag("svg width=28 height=8", path("curve", [(0, 4), (28, 4)], f"style='--k:{k}' stroke-dasharray='{dash}'"))
    legend = [tag("li", swatch(*styles[name]), label_of(study, name), tag("b", f"{curves[name]['mean'][-1]:.3f}")) for name in last]
    words = "Validation bits/byte. Line: mean over the finished seeds; band: lowest seed to highest seed. The steep start is cut off."
    if len(last) < len(curves):
        words += (f" Of {len(curves)} arms the plain GPT, the best three and the worst two variants have a colour; "
                  "the thin grey lines are the rest.")
    return tag("div", tag("div class=plots", *pictures), tag("ul class=legend", *legend), note(words))


def costs(study):
    base, columns = study["arms"].get("plain", {}), {
        "parameters": ("params", show), "FLOPs/ token": ("flops_per_token", short), "steps": ("steps", show),
        "training FLOPs": ("train_flops", short), "training seconds": ("seconds", lambda v: show(v, ",.1f")),
        "tokens/s, training": ("tokens_per_s", show), "tokens/s, decoding": ("decode_tokens_per_s", show),
        "MiB added by training": ("memory_mib", show)}
    def cell(arm, key, form):
        ratio = number(arm.get(key)) / (number(base.get(key)) or math.nan)
        return Html(e(form(arm.get(key))) + tag("small", f"{show(ratio, '.2f')}×" if known(ratio) and arm is not base else ""))
    rows = [(label, *(cell(arm, *column) for column in columns.values())) for label, arm in labelled(study)]
    words = ("Medians over the runs of an arm; × is the ratio to the plain GPT. Training seconds leave evaluation out. Where several runs shared "
             "a machine, seconds and tokens/s hang on its load, so take them as a rough guide: bench.py measures them in turn.")
    return tag("div", note(words), grid(("arm", *columns), rows))


def seeds_of(study):
    seeds, name_of = [f"seed {seed}" for seed in study["seeds"]], lambda name: label_of(study, name)
    runs = [(label, *(show(v, ".4f") for v in arm.get("bpb") or []), show(mean_of(arm), ".4f")) for label, arm in labelled(study)]
    tests = [(name_of(name), name_of(c["baseline"]), *(minus(interval(b)) if b else "–" for b in c.get("bootstrap") or []))
             for name, comparisons in ranked(study) for c in comparisons]
    words = ("A bootstrap over the test set asks how much of the difference between two finished models hangs on which text was scored. "
             "It knows nothing of other seeds, and decides no verdict.")
    return tag("div", details("Bits/byte of every run", grid(("arm", *seeds, "mean"), runs)),
               details(f"Each seed's difference with its {level(study)} interval over the test set", note(words),
                       grid(("variant", "baseline", *seeds), tests, (0, 1))))


def heat(value):
    """A statistic of the heads: one number, or a row for each layer with a cell for each head, darker where larger."""
    if not isinstance(value, list):
        return tag("p", show(value, ".4g"))
    rows = [row if isinstance(row, list) else [row] for row in (value if any(isinstance(row, list) for row in value) else [value])]
    found = [v for row in rows for v in row if known(v)] or [0]
    low, span = min(found), max(found) - min(found) or math.inf
    def cell(v):
        return tag(f"td style='--heat:{45 * (v - low) / span if known(v) else 0:.0f}%'", minus(show(v, ".3g")))
    return tag("div class=scroll tabindex=0", tag("table class=heat", *(tag("tr", *map(cell, row)) for row in rows)))


def heads_of(study):
    parts = [details(label, tag("div class=heats", *(tag("div", tag("h3", key), heat(value)) for key, value in arm["heads"].items())))
             for label, arm in labelled(study) if arm.get("heads")]
    words = "Of one finished run of each arm: a row for each layer, a column for each head; or one cell for each layer. Deeper colour: larger."
    return tag("div", note(words), *parts) if parts else ""


def samples(study):
    order, arms = dict.fromkeys(["plain", *(name for name, _ in ranked(study)), *study["arms"]]), study["arms"]
    cards = [tag("div", tag("h3", label_of(study, name)), tag("pre", arms[name]["sample"])) for name in order if arms.get(name, {}).get("sample")]
    more = details(f"{len(cards) - 3} more", tag("div class=samples", *cards[3:])) if len(cards) > 3 else ""
    words = "The same prompt for all: the plain GPT, then the variants from the best one on."
    return tag("div", note(words), tag("div class=samples", *cards[:3]), more) if cards else ""


def configs(study):
    tuned, head, rows = study.get("tuned"), ["arm", "name", "kind", "what differs from the plain GPT"], []
    words = "The learning rate was not tuned: every arm trains with that of its own configuration."
    if tuned:
        factors = listed([f"{factor:g}" for factor in tuned["factors"]])
        words = f"The learning rate was tuned for every arm: {factors} times its own, {show(tuned['steps'])} steps each."
        head.append("learning rate ×")
    for name, arm in study["arms"].items():
        flags = Html(" ".join(tag("code", f"{key}={value}") for key, value in (arm.get("flags") or {}).items()) or "–")
        edge = tag("b class=warn", " at the edge of the grid") if arm.get("edge") else ""
        rows.append([label_of(study, name), name, arm["kind"], flags] + [tag("span", show(arm.get("lr_factor"), "g"), edge)] * bool(tuned))
    return tag("div", note(words), grid(head, rows, range(5)))


def commands(study):
    each = [tag("div", tag("h3", label), tag("pre", "\n".join(arm.get("commands") or ["–"])), note(f"Runs: {', '.join(arm.get('folders') or ['–'])}"))
            for label, arm in labelled(study)]
    return tag("div", tag("pre", study["command"]), details(f"Each of the {len(each)} arms by itself", *each))


def reading(study):
    alpha = study["alpha"]
    return [
        "Bits/byte: how many bits the model needs for a byte of text that it has not seen. Lower is better, whatever the tokenizer.",
        "Paired: at one seed a variant and its baseline see the same batches and start alike where they share weights. What is judged "
        f"are the {len(study['seeds'])} differences, one for each seed; luck that both share cancels. The {level(study)} interval is "
        "Student's t over them.",
        "Equal: a variant often has more parameters or costs more per token, and may win by that alone. So besides the plain GPT with "
        "the same hyperparameters it may meet one with as many parameters, one that trains for as many FLOPs, one that trains for as long.",
        "Holm: among many comparisons some look good by chance. The correction raises each p so that the risk of one false verdict or "
        f"more among all {study['comparisons_made']} (those that the best were chosen from included) stays below {100 * alpha:g} %. A verdict needs a corrected p of at most {alpha:g}: "
        "an interval may leave out zero and still give none.",
        "Smallest detectable: the difference that this many seeds, as noisy as these, would find four times in five, correction "
        "included. “No difference shown” is not “equal”: a smaller difference may be there."]


# ---- html: the page ----

LIGHT = "--paper:#fff;--soft:#f5f6f7;--ink:#1b1f23;--dim:#5a636d;--rule:#dfe3e7;--good:#0067a3;--bad:#a94400;"
DARK = ("--paper:#15181b;--soft:#1f2327;--ink:#e9ecef;--dim:#a3adb8;--rule:#343a41;--good:#6cbcf2;--bad:#ff9d5c;"
        "--k0:#4da6e0;--k1:#f07a2e;--k2:#21c08f;--k3:#dd92bd;")  # the darker colours of the lines, lighter
LINES = "".join(f"--k{i}:{colour};" for i, colour in enumerate(COLOURS))
CSS = f":root{{color-scheme:light dark;{LIGHT}{LINES}}}@media(prefers-color-scheme:dark){{:root{{{DARK}}}}}" + """
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
main { max-width: 72rem; margin: auto; padding: 2.5rem 1.25rem 5rem }
h1 { font-size: clamp(1.5rem, 4.5vw, 2.1rem); line-height: 1.25; margin: .2rem 0 1rem; text-wrap: balance }
h2 { font-size: 1.3rem; margin: 3.5rem 0 1rem; padding-top: 1.25rem; border-top: 1px solid var(--rule) }
h3 { font-size: 1rem; margin: 1rem 0 .4rem }
p { margin: .5rem 0; max-width: 48rem }
small, .note, figcaption { font-size: .9rem; color: var(--dim) }
.lead { font-size: 1.2rem; line-height: 1.5; font-weight: 600 }
.warnings { border-left: 4px solid var(--bad); background: var(--soft); padding: .5rem 1rem; margin: 1.25rem 0; max-width: 48rem }
.better { --v: var(--good) } .worse { --v: var(--bad) } .same, .open { --v: var(--dim) } .warn { color: var(--bad) }
.badge { display: inline-block; font-size: .875rem; font-weight: 600; line-height: 1.5; padding: 0 .6em; border-radius: 1em;
  white-space: nowrap; color: var(--v); border: 1.5px solid var(--v) }
.badge.better, .badge.worse { background: var(--v); color: var(--paper) } .badge.open { border-style: dashed }
ul, ol { list-style: none; padding: 0; margin: 1.25rem 0 }
.cards li { padding: 1rem 1.2rem; margin: .75rem 0; background: var(--soft); border-radius: 10px }
.ranks li { display: grid; grid-template-columns: minmax(9rem, 18rem) 5rem 1fr; gap: .2rem 1rem; align-items: baseline; padding: .45rem 0;
  border-bottom: 1px solid var(--rule) }
.ranks b { font-weight: 500; text-align: right } .ranks div { display: flex; flex-wrap: wrap; gap: .3rem 1rem }
figure { margin: 0 }
svg { display: block; overflow: hidden }
path { fill: none; stroke: var(--v); vector-effect: non-scaling-stroke; stroke-linecap: round; stroke-linejoin: round }
.line { stroke: var(--rule) } .zero { stroke: var(--ink); stroke-width: 1.5 }
.bar { stroke-width: 3 } .dot { stroke-width: 11 } .seed { stroke-width: 6; opacity: .45 }
.curve { stroke: var(--k); stroke-width: 2.4 } .thin { stroke: var(--dim); opacity: .4 }
.band { stroke: none; fill: var(--k); opacity: .16 }
.row { display: grid; grid-template: "who track val" / 15rem 1fr 13.5rem; gap: 0 1rem }
.who { grid-area: who; padding: .35rem 0; line-height: 1.35 } .who > * { display: block; font-weight: 600 } .who small { font-weight: 400 }
.val { grid-area: val; align-self: center; text-align: right; font-size: .9rem; white-space: nowrap }
.track { grid-area: track; position: relative; min-height: 44px } .scale .track { min-height: 1.8rem; font-size: .9rem }
.track svg, .frame svg { position: absolute; width: 100%; height: 100% }
.track span { position: absolute; transform: translateX(-50%); color: var(--dim); white-space: nowrap }
.track .better, .track .worse { transform: none; color: var(--v); font-weight: 600 }
.track .better { right: calc(100% - var(--zero) + .5rem) } .track .worse { left: calc(var(--zero) + .5rem) }
.scroll { overflow-x: auto; margin: 1rem 0; border: 1px solid var(--rule); border-radius: 8px }
table { border-collapse: collapse; font-size: .9rem; min-width: 100%; overflow-wrap: break-word }
th, td { padding: .5rem .7rem; text-align: right; white-space: nowrap; vertical-align: baseline; font-weight: 400 }
thead th { color: var(--dim); background: var(--soft); white-space: normal; vertical-align: bottom }
tbody tr { border-top: 1px solid var(--rule) }
.w { text-align: left } td.w { min-width: 8.5rem; white-space: normal } td.w small { display: block }
td small { display: inline-block; min-width: 2.9rem; margin-left: .4rem } td.w small { margin: 0 }
th.w:first-child { position: sticky; left: 0; min-width: 9rem; max-width: 15rem; white-space: normal }
th[scope] { font-weight: 600; background: var(--paper); overflow-wrap: anywhere }
.heat { min-width: 0 }
.heat td { background: color-mix(in srgb, var(--good) var(--heat), transparent); padding: .3rem .5rem; text-align: center }
.heats { display: flex; flex-wrap: wrap; gap: 0 2rem } .heats > div { max-width: 100% }
.plots, .samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: 1rem 2rem }
.samples > div { min-width: 0 }
.frame { position: relative; height: 18rem; margin: 0 .8rem 2rem 2.9rem; border: solid var(--dim); border-width: 0 0 1px 1px }
.frame span { position: absolute; font-size: .875rem; color: var(--dim); white-space: nowrap }
.y { right: calc(100% + .4rem); transform: translateY(-50%) } .x { top: calc(100% + .1rem); transform: translateX(-50%) }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.5rem; font-size: .9rem }
.legend li { display: flex; align-items: center; gap: .5rem }
.legend b { font-weight: 400; color: var(--dim) }
details { border-bottom: 1px solid var(--rule) } details[open] { padding-bottom: 1rem }
summary { cursor: pointer; padding: .7rem 0; color: var(--good) }
code, pre { font: .875rem/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--soft) }
code { border-radius: 4px; padding: .1em .35em }
pre { border-radius: 8px; padding: .9rem 1rem; margin: .4rem 0; overflow: hidden;
  white-space: pre-wrap; unicode-bidi: isolate }
dl { display: grid; grid-template-columns: 10rem 1fr; gap: .3rem 1rem } dt { color: var(--dim) } dd { margin: 0; min-width: 0 }
@media (max-width: 46rem) {
  main { padding: 1.5rem 1rem 4rem } dl { grid-template-columns: 1fr } dd { margin-bottom: .6rem }
  .row { grid-template: "who val" "track track" / 1fr auto; gap: 0 .5rem } .val { align-self: end; padding-bottom: .35rem }
  .ranks li { grid-template-columns: 1fr auto } .ranks div { grid-column: 1 / -1 } th.w:first-child { min-width: 7rem; max-width: 9rem }
}
"""


def html(study):
    head = ("variant", "at equal", "bits/byte", f"difference [{level(study)} interval]", "corrected p", "verdict", "smallest detectable")
    rows = []
    for name, baseline, matched, score, gap, p, verdict, smallest in rows_of(study):
        equal = tag("span", ", ".join(matched) or "–", "" if baseline in ("plain", "–") else tag("small", label_of(study, baseline)))
        rows.append((label_of(study, name), equal, score, minus(gap), p, badge(verdict), smallest))
    lost = [(label_of(study, f["arm"]), f["seed"], f["why"], f["log"]) for f in study["failures"]]
    sections = {"Difference to the plain GPT": forest(study),
                "Every comparison": tag("div", grid(head, rows, (0, 1, 5)), note(corrected(study))),
                "Learning curves": learning(study), "Costs": costs(study), "Seed by seed": seeds_of(study),
                "Inside the heads": heads_of(study), "Samples": samples(study), "Configurations": configs(study),
                "Commands": commands(study),
                "Settings": tag("dl", *(tag(kind, text) for pair in settings_of(study) for kind, text in zip(("dt", "dd"), pair))),
                "How to read this": tag("div", *(tag("p", text) for text in reading(study))),
                "Failures": grid(("arm", "seed", "why", "log"), lost, (0, 2, 3)) if lost else ""}
    title, warnings = study["question"] or study["name"], [tag("p", text) for text in notices(study)]
    where = " · ".join(str(study[key]) for key in ("name", "scale", "date") if study.get(key))
    header = tag("header", note(where), tag("h1", title), tag("p class=lead", headline(study)),
                 tag("div class=warnings", *warnings) if warnings else "", verdicts(study))
    # the policy has the browser refuse what the page promises not to do: load anything, run anything
    policy = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
    return (f"<!doctype html>\n<html lang=en><head><meta charset=utf-8>{policy}<link rel=icon href='data:,'>"
            f"<meta name=viewport content='width=device-width, initial-scale=1'>{tag('title', title)}<style>{CSS}</style></head>\n<body>"
            + tag("main", header, *(tag("section", tag("h2", name), part) for name, part in sections.items() if part)) + "</body></html>\n")


# ---- files ----

def write(study, folder):
    """Write report.md and report.html -> their paths. Raises UserError when the disk refuses."""
    paths = [Path(folder) / "report.md", Path(folder) / "report.html"]
    for path, text in zip(paths, (markdown(study), html(study))):
        write_atomic(path, lambda f: f.write(text.encode("utf-8", "replace")))
    return paths


def read(path):
    """The study in a results.json. Raises ValueError, in one line, where there is none."""
    try:
        study = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{path} is not JSON") from None
    wrong = [key for key, kind in SHAPE.items() if not isinstance(study, dict) or not isinstance(study.get(key), kind)]
    if wrong:
        raise ValueError(f"{path} is not what compare.py writes: {', '.join(wrong[:4])} missing or of another kind")
    return study


def main(argv=None):
    files = sys.argv[1:] if argv is None else argv
    if len(files) != 1:
        sys.exit("report: give one results.json; compare.py writes them")
    try:
        study = read(files[0])
        print(table(study), *write(study, Path(files[0]).parent), sep="\n")
    except ValueError as error:
        sys.exit(f"report: {error}")


if __name__ == "__main__":
    main()
