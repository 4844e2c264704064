"""
Every figure of a study's page, from the scores in its results file alone: verdicts, effects as compute, equal
cost, the text's share in the uncertainty, and how effects go with size.
"""

import json

import numpy as np

from nanoheads.common import number
from nanoheads.intervals import block_bootstrap
from nanoheads.study import compute, rates, stats
from nanoheads.training.scoring import BLOCK


def comparisons(scores, pairs, alpha, margin):
    """A dict for each pair (variant, baseline, what is equal beside the hyperparameters), judged together."""
    rows = []
    found = stats.judge(scores, [tuple(pair[:2]) for pair in pairs], alpha, margin)
    for (variant, baseline, equal), each in zip(pairs, found):
        rows.append(dict(variant=variant, baseline=baseline, equal=equal, **each._asdict(),
                         words=stats.in_words(each, alpha, margin)))
    return rows


def figures(found):
    """{name: figure} of a study; found: its results file without them."""
    variants, alpha, margin = found["arms"], found["alpha"], found["margin"]
    scores = scores_of(variants)
    rows = comparisons(scores, found["pairs"], alpha, margin)
    curve = curve_of(variants)
    for row in rows:
        row["differences"] = differences(scores, row)
        row["text"] = text_interval(found, row)
        if row["baseline"] == "plain":
            row.update(as_compute(curve, row, variants, alpha))
        favoured = row["variant" if row["verdict"] in ("better", "same") else "baseline"]
        # files from before 2026-11-23 do not name the stage
        failed = sum(f["arm"] == favoured and f.get("stage", "judge") == "judge" for f in found["failures"])
        if failed and row["verdict"] in ("better", "same", "worse"):  # those that diverged might change it
            whose = "its" if favoured == row["variant"] else "the other side's"
            row.update(verdict="undecided", words=f"not called {row['verdict']}, since {failed} of {whose} "
                                                  f"runs failed; else {row['words']}")
    tuned = dict(taken=best_rates(found["candidates"])) if found.get("candidates") else {}
    if found.get("plain_rates"):
        tuned["plain_at_best"] = rates.summary(found["plain_rates"])
    return dict(comparisons=rows, screened=screened(found), findable=findable(scores, rows, alpha),
                margin_as_compute=curve and compute.margin_as_compute(curve, margin), **tuned)


def known(variant):
    """{seed: bits/byte} of a variant's finished runs."""
    return {str(seed): bpb for seed, bpb in zip(variant["seeds"], variant["bpb"]) if bpb is not None}


def scores_of(variants):
    """{variant: {seed: bits/byte}} of those that have a finished run."""
    return {name: known(variant) for name, variant in variants.items() if known(variant)}


def seem_better(scores, pairs, alpha, margin):
    """The variants that are better than the plain GPT, or lean to it, before anything else is made equal."""
    rows = comparisons(scores, [pair for pair in pairs if not pair[2]], alpha, margin)
    return [row["variant"] for row in rows if row["baseline"] == "plain" and (
        row["verdict"] == "better" or row["verdict"] == "leaning" and row["mean"] < 0)]


def failed_runs(failures):
    """How many runs failed: one may stand under several names, such as a rate times 1 in each group."""
    return len({row["log"] for row in failures})


def differences(scores, row):
    """Each seed of the variant minus the mean of the baseline, for the picture."""
    own, base = scores.get(row["variant"], {}), list(scores.get(row["baseline"], {}).values())
    return [score - float(np.mean(base)) for score in own.values()] if base else []


def screened(found):
    """The first stage's rows, the best first: differences on validation, with intervals and no verdicts."""
    screen = found["screen"]
    if not screen or "plain" not in screen["scores"]:
        return []
    pairs = [(name, "plain", []) for name in screen["scores"] if name != "plain"]
    rows = [dict(variant=row["variant"], bpb=float(np.mean([*screen["scores"][row["variant"]].values()])),
                 chosen=row["variant"] in screen["chosen"],
                 **{key: row[key] for key in ("mean", "low", "high")})
            for row in comparisons(screen["scores"], pairs, found["alpha"], found["margin"])]
    return sorted(rows, key=lambda row: row["mean"])


def findable(scores, rows, alpha):
    """The smallest difference to the plain GPT found four times in five, at a careful spread; or None."""
    sizes = [row["n"] for row in rows if row["baseline"] == "plain"]
    if not sizes or min(sizes) < 2:
        return None
    return stats.findable(scores, int(np.median(sizes)), len(scores.get("plain", ())), len(rows), alpha)


def best_rates(candidates):
    """{variant: index of the candidate taken}. candidates: {variant: [{"bpb": {seed: bits/byte}}, ...]}.

    The first is the variant as it is, which stays unless the best is better by more than a standard error of
    such a difference, from the median spread over seeds of all candidates (the one-standard-error rule,
    Breiman et al. 1984). One with a run that diverged is none, unless all have.
    """
    scores = {name: [list(each["bpb"].values()) for each in own] for name, own in candidates.items()}
    sds = [np.std(each, ddof=1) for own in scores.values() for each in own if len(each) > 1]
    taken = {}
    for name, own in scores.items():
        n = max(map(len, own))
        means = [float(np.mean(each)) if len(each) == n > 0 else np.inf for each in own]
        error = float(np.median(sds or [0.0])) * (2 / max(1, n)) ** 0.5
        best = int(np.argmin(means))
        taken[name] = best if means[0] - means[best] > error else 0
    return taken


# ---- compute ----

def curve_of(variants):
    """The plain GPT's score against its compute, from its runs at several budgets; None: only one."""
    plain = by_budget(variants)
    return compute.Curve(plain) if has_budgets(plain) else None


def by_budget(variants):
    """{multiple of the budget: bits/byte of the plain GPT's finished runs at it}."""
    return {variant["multiple"]: list(known(variant).values()) for variant in variants.values()
            if variant["kind"] in ("plain", "budget") and known(variant)}


def has_budgets(plain):
    return len(plain) > 1 and 1.0 in plain


def as_compute(curve, row, variants, alpha):
    """What a difference is worth in the plain GPT's compute, and what is left of it at equal cost."""
    if curve is None:
        return {}
    variant, plain, each = variants[row["variant"]], variants["plain"], (row["mean"], row["se"], row["df"])
    time = variant["time_ratio"]
    ratio = flops_ratio(variant, plain)
    worth = compute.worth(curve, *each, level=1 - alpha)
    return dict(worth={**worth._asdict(), "words": worth.words()},
                equal_flops=at_equal_cost(curve, each, ratio, alpha),
                equal_time=time and at_equal_time(curve, each, time, variant["multiple"], alpha))


def flops_ratio(variant, plain):
    """FLOPs that a variant's training executes over the plain GPT's; NaN where not counted."""
    return training_flops(variant) / training_flops(plain)


def training_flops(variant):
    """FLOPs that a variant's whole training executes, evaluations aside; NaN where they were not counted."""
    return number(variant.get("executed_flops_per_token")) * number(variant.get("tokens"))


def at_equal_cost(curve, each, ratio, alpha):
    found = compute.at_equal_cost(curve, *each, cost_ratio=ratio, level=1 - alpha)
    return dict(ratio=ratio, **(found._asdict() if found else dict(mean=None, low=None, high=None, p=None)))


def at_equal_time(curve, each, time, multiple, alpha):
    """The same for a time that was measured: from the low end at its least to the high end at its most."""
    found, least, most = (at_equal_cost(curve, each, time[end] * multiple, alpha)
                          for end in ("mean", "low", "high"))
    return {**found, "low": least["low"], "high": most["high"]}


# ---- text ----

def text_interval(found, row):
    """The interval over the text: these trained models, other text of its kind; None: blocks unknown.

    The last block, which is shorter, is left out.
    """
    sums, T = [], found["plain"]["block_size"]
    for name in (row["variant"], row["baseline"]):
        runs = [found["runs"].get(run) for run in found["arms"][name]["runs"]]
        blocks = [run["block_nats"][:-1] for run in runs if run and run.get("block_nats")]
        if not blocks or len({len(each) for each in blocks}) > 1:
            return None
        sums.append(np.mean(blocks, 0))
    if len(sums[0]) != len(sums[1]) or len(sums[0]) < 2:
        return None
    tokens = len(sums[0]) * max(1, BLOCK // T) * T
    size = found["data"]["bytes"] * tokens / found["data"]["tokens"]
    _, low, high = block_bootstrap(*sums, size, 1, 1 - found["alpha"])
    return dict(low=low, high=high)


# ---- texts ----

BOTH = " and "  # between the names of two texts, or of two runs, that count as one


def together(texts, name, command):
    """Studies of the same variants on several texts, {text: study}, as one dict: each, and all of them."""
    return dict(name=name, command=command, texts=texts, together=figures(over_texts(texts)))


def pooled(found):
    """The study over all texts of a results file, with the figures that the file has."""
    return {**found, **over_texts(found["texts"]), **found["together"]}


def over_texts(texts):
    """One study of those on several texts, without figures: the score of a seed is the mean over the texts.

    So a difference is the mean of those on each text, and what one text favours is none of its noise. Only
    what is judged on every text is in it.
    """
    studies, first = list(texts.values()), next(iter(texts.values()))
    names = [name for name in first["arms"] if all(name in study["arms"] for study in studies)]
    variants = {name: over_runs([study["arms"][name] for study in studies]) for name in names}
    pairs = [pair for pair in first["pairs"] if all(pair in study["pairs"] for study in studies)]
    sums = {key: sum(study[key] for study in studies) for key in ("planned", "done")}
    failures = [failure for study in studies for failure in study["failures"]]
    reused = reused_in(studies)
    size = {key: sum(study["data"][key] or 0 for study in studies) for key in ("tokens", "bytes", "of_bytes")}
    data = {**first["data"], **size, "dataset": BOTH.join(texts), "sha256": None, "note": None}
    settings = {key: value for key, value in first.get("settings", {}).items() if key != "dataset"}
    return {**first, **sums, "settings": settings, "arms": variants, "pairs": pairs, "failures": failures,
            "reused": reused, "runs": {}, "data": data}


def reused_in(studies):
    """The rows of reuse.counted() of several studies together: how many runs came from each source."""
    found = {}
    for row in (row for study in studies for row in study.get("reused") or ()):
        total = found.setdefault(row["from"], {"from": row["from"], "runs": 0, "other_code": 0, "of": []})
        total["runs"] += row["runs"]
        total["other_code"] += row["other_code"]
        total["of"] += [name for name in row.get("of", ()) if name not in total["of"]]
    return [*found.values()]


def seem_better_over_texts(texts):
    """seem_better() over all texts of {text: study}."""
    found = over_texts(texts)
    return seem_better(scores_of(found["arms"]), found["pairs"], found["alpha"], found["margin"])


def over_runs(variants):
    """A variant of several texts as one: of each seed that all have, the mean score, and its runs' names."""
    first, rows = variants[0], [dict(zip(each["seeds"], zip(each["bpb"], each["runs"]))) for each in variants]
    seeds = [seed for seed in first["seeds"] if all(seed in own for own in rows)]
    scores = [[own[seed][0] for own in rows] for seed in seeds]
    return {**first, "seeds": seeds,
            "bpb": [None if None in each else sum(each) / len(each) for each in scores],
            "runs": [BOTH.join(own[seed][1] for own in rows) for seed in seeds]}


# ---- sizes ----

UNFINISHED = "two sizes are needed, each with the plain GPT at two budgets or more: not finished"


def ladder(sizes, held_out, name, command):
    """A study of several sizes as one dict: the studies, and how their effects go with size."""
    inputs, left_out, alpha = {}, None, next(iter(sizes.values()))["alpha"]
    for size, study in sizes.items():
        blocks = 12 * study["plain"]["n_layer"] * study["plain"]["n_embd"] ** 2
        plain = by_budget(study["arms"])
        if has_budgets(plain):
            left_out = blocks if size == held_out else left_out
            inputs[blocks] = dict(plain=plain, arms={
                row["variant"]: (row["mean"], row["se"], row["df"] or np.inf) for row in study["comparisons"]
                if row["baseline"] == "plain" and not row["equal"] and row["se"] is not None})
    if len(set(inputs) - {left_out}) > 1:
        found = json.loads(json.dumps(compute.ladder(inputs, left_out, level=1 - alpha)))  # as it is read
    else:
        found = dict(level=1 - alpha, fitted=[], held_out=None, arms={}, exponent=dict(sentence=UNFINISHED),
                     plain=dict(scores={}, sentence=UNFINISHED))
    return dict(name=name, command=command, held_out=held_out, sizes=sizes, ladder=found)
