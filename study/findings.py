"""
What a study found, in numbers and in words, from its results.json: what report.py and page.py both show.
"""

import math
import re

import numpy as np
from matplotlib.ticker import EngFormatter

from plot_curves import number

# what a comparison holds equal, and its short form
EQUAL = {"hyperparameters": "hyper", "parameters": "params", "FLOPs": "FLOPs", "wall-clock": "clock"}
BETTER, WORSE, SAME, OPEN = "better", "worse", "no difference shown", "no verdict yet"


# ---- numbers and words ----

def known(value):
    return not math.isnan(number(value))


def printable(text):
    """Without what no page and no font holds: control characters and halves of characters."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "�", str(text))


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
    """[(variant, its comparisons)], the best difference to the plain GPT first, last those without one."""
    found = []
    for name, arm in study["arms"].items():
        if arm["kind"] == "variant":
            own = [c for c in study["comparisons"] if c["variant"] == name]
            found.append((name, sorted(own, key=lambda c: min(list(EQUAL).index(m) for m in c["matched"]))))

    def mean_difference(item):
        comparisons = item[1]
        return comparisons[0]["mean"] if comparisons and known(comparisons[0]["mean"]) else math.inf

    return sorted(found, key=mean_difference)


def verdicts_of(study, name, comparisons):
    """{verdict: what was equal in the comparisons that gave it} of a variant."""
    found = {}
    for c in comparisons:
        found.setdefault(verdict_of(c), []).extend(c["matched"])
    return found or {"failed" if any(f["arm"] == name for f in study["failures"]) else OPEN: []}


def headline(study):
    """The study in one sentence."""
    found = [(name, verdicts_of(study, name, comparisons)) for name, comparisons in ranked(study)]
    if len(found) == 1:
        parts = (verdict + (f" at equal {listed(what)}" if what else "")
                 for verdict, what in found[0][1].items())
        return f"{label_of(study, found[0][0])}: {'; '.join(parts)}."
    kinds = [(set(verdicts), name in study["missing"]) for name, verdicts in found]
    best = kinds.count(({BETTER}, False))
    rest = {"better, but not compared with every baseline": kinds.count(({BETTER}, True)),
            "better in some comparisons only": sum(BETTER in k and k != {BETTER} for k, _ in kinds),
            SAME: sum(SAME in k and not k & {BETTER, WORSE} for k, _ in kinds),
            WORSE: sum(WORSE in k and BETTER not in k for k, _ in kinds),
            "without a verdict": sum(not k & {BETTER, WORSE, SAME} for k, _ in kinds)}
    verb = "was" if best < 2 else "were"
    return (f"{best or 'Not one'} of {len(kinds)} variants {verb} shown to be better than the plain GPT"
            + "".join(f"; {n} {what}" for what, n in rest.items() if n) + ".")


def notices(study):
    """What a reader must know before the numbers."""
    edge = [label for label, arm in labelled(study) if arm.get("edge")]
    failed, found = len(study["failures"]), []
    if study["done"] + failed < study["planned"]:
        found.append(f"This study is not finished: {study['done']} of {study['planned']} runs are done; "
                     "all of this may still change.")
    if failed:
        runs = "run is" if failed == 1 else "runs are"
        found.append(f"{failed} failed {runs} missing from the numbers: see Failures.")
    if edge:
        found.append(f"The best learning rate tried lies at the edge of the grid for {listed(edge)}: "
                     "a better one may lie beyond.")
    return found


def corrected(study):
    """How p was corrected, how small a difference could have been seen, and who got which baselines."""
    n = study["comparisons_made"]
    correction = f"p is corrected for {n} comparisons (Holm)." if n > 1 else "One comparison: p is as it is."
    # 0: identical on every seed
    sizes = [c["detectable"] for c in study["comparisons"] if known(c["detectable"]) and c["detectable"] > 0]
    spread = f" (median; {min(sizes):.4f} to {max(sizes):.4f})" if len(sizes) > 1 else ""
    power = "How small a difference shows is not known yet."
    if sizes:
        power = (f"With {len(study['seeds'])} seeds a difference of {np.median(sizes):.4f} bits/byte{spread} "
                 "would have been found with 80 % power.")
    selection = f" Selection: {study['selection']}." if study.get("selection") else ""
    return f"{correction} {power}{selection}"


def rows_of(study):
    """[(variant, baseline, [what was equal], bits/byte, difference, p, verdict, detectable)], ranked."""
    rows = []
    for name, comparisons in ranked(study):
        score = show(mean_of(study["arms"][name]), ".4f")
        for c in comparisons:
            p = "<0.001" if number(c["p_holm"]) < 0.001 else show(c["p_holm"], ".3f")
            n = sum(map(known, c["differences"]))
            few = f" ({n} of {len(study['seeds'])} seeds)" * (0 < n < len(study["seeds"]) and known(c["low"]))
            rows.append((name, c["baseline"], c["matched"], score,
                         interval(c), p, verdict_of(c) + few, show(c["detectable"], ".4f")))
        if not comparisons:
            rows.append((name, "–", [], score, "–", "–", *verdicts_of(study, name, []), "–"))
    return rows


def range_of(comparisons):
    """(left, right) of an axis for these differences, with zero well inside; what lies far out is cut off."""
    spans = [(c["low"], c["high"], c["mean"], *c["differences"]) for c in comparisons]
    spans = [[v for v in span if known(v)] for span in spans]
    far = 3 * np.median([max(map(abs, span)) for span in spans]) or math.inf
    near = [v for span in spans if max(map(abs, span)) <= far for v in span]
    left, right = min(near), max(near)
    left, right = min(left, -0.25 * right), max(right, -0.25 * left)  # zero stands well inside
    pad = 0.05 * (right - left) or 0.01
    return left - pad, right + pad


def settings_of(study):
    """[(heading, text)]: what was run, on what, with what."""
    d, m = study["data"], study["machine"]
    part = f" of {d['of_bytes']:,}" if known(d["of_bytes"]) and d["of_bytes"] != d["bytes"] else ""
    size = f"{show(d['tokens'])} tokens, {show(d['bytes'])}{part} bytes"
    commit = study.get("commit") or "unknown"
    seeds = ", ".join(map(str, study["seeds"]))
    rows = [("Study", f"{study['name']}, {study.get('scale')} scale, {study.get('date')}, commit {commit}"),
            ("Seeds", f"{seeds}; {study['done']} of {study['planned']} runs done"),
            ("Scored", f"{d['dataset']}, {d['split']} split: {d['name']}, {d['context']}; {size}")]
    if d.get("note"):
        rows.append(("Note on the data", d["note"]))
    if study.get("settings"):
        flags = ", ".join(f"{key}={value}" for key, value in study["settings"].items())
        rows.append(("On both sides", flags))
    at_once = f"runs at once: {show(m['jobs'])}, threads of each: {show(m['threads'])}"
    rows.append(("Machine", f"{m['device']}, {show(m['cores'])} cores; {at_once}"))
    versions = ", ".join(f"{package} {version}" for package, version in study["versions"].items())
    rows.append(("Versions", versions))
    return rows
