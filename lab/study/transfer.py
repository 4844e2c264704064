"""
Which proxy predicts? Whether a cheap setting orders mechanisms as the public record of larger models does.

    python -m lab.study.transfer results/battery/*.json.gz             # studies, and studies of tasks
    python -m lab.study.transfer results/all-tiny.json.gz results/tasks/few.json.gz --json=transfer.json

A proxy is the scale of a study, or a task. Of each it has the effect of every mechanism that the record
knows, the difference to the plain GPT with its sign turned so that above 0 is better, as it is and in units
of its standard error. Of each proxy it then says how these effects correlate with the record's weighted
verdicts (outside.py) over mechanisms, by ranks, and how often their signs agree. Nearly all of the record
says "helps", so the signs are compared with guessing that always. Choosing the best two proxies and judging
them by the same mechanisms would flatter them: so they are chosen without the mechanism that they are to
predict, for each in turn.

p is of the hypothesis that a proxy has nothing to do with the record: the record's verdicts are shuffled
over the mechanisms, and for the best two the choice is made anew each time. It is one-sided and corrected by
Holm. Intervals are bootstrapped over mechanisms, and with few of them they are rough. Both take mechanisms
for independent of each other. Some are not: short convolutions and key offset do much the same. So all of it
is computed once more with one mechanism of each KIN.
"""

import argparse
import itertools
import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
from scipy.stats import rankdata

from nanoheads.common import (ArgumentParser, UserError, as_program, last_words, plural, say, table, writable,
                              writable_folder, write_atomic, write_json)
from nanoheads.drawing import coloured_table, drawn
from lab.study import effects, outside, permutation, results, task_study
from lab.study.findings import Table, against_plain, in_markdown, known, listed
from lab.study.records import TextsResults, studies_in
from lab.study.stats import holm

FEWEST = 5      # mechanisms of a proxy that is judged: fewer have too few orders
DRAWS = 5000    # of the bootstrap, and shuffles of the record
LEVEL = 0.95
SHAPE = ("n_layer", "n_embd", "block_size")
DARKEST = 4     # standard errors, in the picture
# what does much the same: the token before for each head; a gate behind attention; two maps of attention
KIN = (("short_conv", "short_conv_kv", "short_conv_x", "key_offset"),
       ("output_gate", "output_gate_elementwise", "output_gate_narrow"), ("diff", "diff_v1"))


class Effect(NamedTuple):
    """Of a mechanism in a proxy: how much better than the plain GPT, its standard error, seeds, its file.

    tuned: on a task, both sides at their own best rates, with seeds that chose nothing.
    """
    better: float
    se: float
    seeds: int
    file: str
    tuned: bool = False

    @property
    def in_errors(self):
        """In units of its standard error; 0 where nothing acted and so nothing spreads."""
        return self.better / self.se if self.se else 0.0


@dataclass
class Judged:
    """What a proxy, or two together, has to do with the record. Intervals are (low, high).

    correlation: by ranks, of effects in units of their standard errors; as_it_is: of effects as they are,
    None of two proxies; highest: what effects that are all different and in the record's order would have,
    since the record has ties; signs: the share that agrees; helps: the share that guessing "helps" always has
    right; more: signs less helps.
    """
    name: str
    mechanisms: list
    correlation: float
    interval: tuple
    p: float
    as_it_is: Optional[float]
    as_it_is_interval: Optional[tuple]
    highest: float
    signs: float
    signs_interval: tuple
    helps: float
    more: float
    more_interval: tuple
    p_corrected: float = math.nan


# ---- effects, from results files ----

def proxies_in(paths):
    """({proxy: {mechanism: Effect}}, sentences on what is not finished) of results files.

    Where several files have a mechanism at one scale, the one with the most seeds counts, of these the first;
    on a task what was judged at the best rates comes before all others.
    UserError: a file cannot be read, or is of another kind.
    """
    found, unfinished = {}, []
    for path in paths:
        each, finished = effects_in(path)
        if not finished:
            unfinished.append(f"The study in {Path(path).name} is not finished: its effects may change.")
        for proxy, name, effect in each:
            own = found.setdefault(proxy, {})
            if name not in own or (effect.tuned, effect.seeds) > (own[name].tuned, own[name].seeds):
                own[name] = effect
    return found, unfinished


def effects_in(path):
    """([(proxy, mechanism, Effect)] of what the record could know, whether the study is finished)."""
    file = Path(path).name
    if tasks := task_study.read(path):
        return [*effects_on_tasks(tasks, file)], tasks["finished"]
    record = results.read(path)
    studies = [effects.pooled(record)] if isinstance(record, TextsResults) else [*studies_in(record).values()]
    found = []
    for study in studies:
        sign = 1 if study.kind.higher_is_better else -1
        for c in against_plain(study):
            name = outside.entry_of(c.variant, study.arms[c.variant].flags)
            if name and known(c.mean) and known(c.se):
                found.append((proxy_of(study), name, Effect(sign * c.mean, c.se, c.n, file)))
    return found, all(effects.progress(study)["finished"] for study in studies)


def proxy_of(study):
    """The scale of a study; where its settings change the shape of the plain GPT, it is another proxy."""
    settings = {} if study.size else study.settings or {}
    shape = [f"{key}={settings[key]}" for key in SHAPE if key in settings]
    return ", ".join([study.scale or study.name, *shape])


def effects_on_tasks(tasks, file):
    """(task, mechanism, Effect) for each; the standard error is that of the permutation test.

    Scores that are all or nothing may not spread at all on either side, and still differ: what spreads is the
    difference over all ways of calling as many of the scores the variant's. Where both sides were judged at
    their own best rates, that counts and not what they did at the rates of the scale.
    """
    for task, each in tasks["tasks"].items():
        plain = each["arms"][task_study.PLAIN]
        for variant, arm in each["arms"].items():
            stage = "best" if arm["best"]["acc"] and plain["best"]["acc"] else "judge"
            own, others = arm[stage]["acc"], plain[stage]["acc"]
            name = outside.entry_of(variant, arm["flags"])
            if name and len(own) > 1 and len(others) > 1:
                ways = permutation.divisions(len(own), len(others)) @ np.array([*own, *others])
                yield task, name, Effect(float(ways[0]), float(ways.std()), len(own), file, stage == "best")


# ---- statistics ----

def in_ranks(values):
    """Ranks along the last axis, ties shared, less their mean and over their length; 0 where all are tied."""
    ranks = rankdata(values, axis=-1)
    ranks = ranks - ranks.mean(-1, keepdims=True)
    length = np.sqrt((ranks ** 2).sum(-1, keepdims=True))
    return np.divide(ranks, length, out=np.zeros_like(ranks), where=length > 1e-9)


def rank_correlation(x, y):
    """Spearman's, along the last axis; 0 where one of both has no order."""
    return (in_ranks(x) * in_ranks(y)).sum(-1)


def share_of_signs(x, y):
    """How many signs agree along the last axis, of those that y has; nan: it has none."""
    signed = (np.sign(y) != 0).sum(-1)
    right = ((np.sign(x) == np.sign(y)) & (np.sign(y) != 0)).sum(-1)
    return np.divide(right, signed, out=np.full(np.shape(right), np.nan), where=signed > 0)


def bootstrap(statistic, *values):
    """(low, high) of statistic(*values) over mechanisms, the last axis, drawn with replacement."""
    n = len(values[0])
    drawn_anew = np.random.default_rng(0).integers(n, size=(DRAWS, n))
    found = statistic(*(value[drawn_anew] for value in values))
    ends = np.nanquantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(ends[0]), float(ends[1])


def shuffled(verdicts):
    """The record's verdicts [n] in DRAWS random orders [DRAWS, n]."""
    return np.random.default_rng(1).permuted(np.tile(verdicts, (DRAWS, 1)), axis=1)


def p_above(seen, by_chance):
    """The share of what chance gives that is as high as what was seen, which is one of them."""
    return float((1 + (by_chance >= seen - 1e-9).sum()) / (1 + len(by_chance)))


def judge(name, mechanisms, in_errors, as_it_is, verdicts, by_chance):
    """Judged of effects [n] by the record's verdicts [n]; by_chance: correlations of shuffled records."""
    correlation = float(rank_correlation(in_errors, verdicts))
    helps, ones = share_of_signs(np.ones(len(verdicts)), verdicts), np.ones(len(verdicts))
    signs = share_of_signs(in_errors, verdicts)

    def more(x, y, one):
        return share_of_signs(x, y) - share_of_signs(one, y)

    return Judged(
        name, mechanisms, correlation, bootstrap(rank_correlation, in_errors, verdicts),
        p_above(correlation, by_chance),
        None if as_it_is is None else float(rank_correlation(as_it_is, verdicts)),
        None if as_it_is is None else bootstrap(rank_correlation, as_it_is, verdicts),
        float(rank_correlation(np.arange(len(verdicts)), np.sort(verdicts))),
        float(signs), bootstrap(share_of_signs, in_errors, verdicts), float(helps), float(signs - helps),
        bootstrap(more, in_errors, verdicts, ones))


def judge_proxy(name, own, verdicts):
    """Judged of a proxy's {mechanism: Effect} by the record's {mechanism: verdict}."""
    mechanisms = [each for each in verdicts if each in own]
    y = np.array([verdicts[each] for each in mechanisms])
    in_errors = np.array([own[each].in_errors for each in mechanisms])
    as_it_is = np.array([own[each].better for each in mechanisms])
    return judge(name, mechanisms, in_errors, as_it_is, y, rank_correlation(in_errors, shuffled(y)))


def predicted(values, verdicts):
    """(predictions [B, n], pairs chosen [B, n]) of the best two proxies, chosen without what they predict.

    values: effects in units of their standard errors [k, n]; verdicts [B, n]: of the record, and of shuffled
    ones. A pair predicts the sum of its effects. For each mechanism the pair is taken whose sums correlate
    best with the verdicts of all others, of equals the first. Without any relation the correlation of such
    predictions lies somewhat below 0 on average: what fits a pair by chance is missing where it is chosen.
    """
    pairs = [*itertools.combinations(range(len(values)), 2)]
    sums = np.array([values[i] + values[j] for i, j in pairs])
    n = values.shape[1]
    found, chosen = np.empty(verdicts.shape), np.empty(verdicts.shape, int)
    for left_out in range(n):
        others = np.arange(n) != left_out
        fits = in_ranks(verdicts[:, others]) @ in_ranks(sums[:, others]).T
        chosen[:, left_out] = fits.round(9).argmax(1)  # the last digits are chance: of equals the first pair
        found[:, left_out] = sums[chosen[:, left_out], left_out]
    return found, chosen


def judge_best_two(proxies, verdicts):
    """(Judged, {pair: for how many mechanisms it was chosen}, flattered) of the best two proxies.

    Proxies that have less than half of the mechanisms of the one that has most are not among them: what is
    compared are the mechanisms that all of these have, and one task of seven would leave seven.
    flattered: the correlation of the pair that is best on all mechanisms, which the choice makes too high.
    None: too few mechanisms are in all proxies. proxies: {name: {mechanism: Effect}}; verdicts: the record's
    {mechanism: verdict}.
    """
    most = max(map(len, proxies.values()))
    proxies = {name: own for name, own in proxies.items() if 2 * len(own) >= most}
    mechanisms = [each for each in verdicts if all(each in own for own in proxies.values())]
    if len(proxies) < 2 or len(mechanisms) < FEWEST:
        return None
    y = np.array([verdicts[each] for each in mechanisms])
    values = np.array([[own[each].in_errors for each in mechanisms] for own in proxies.values()])
    found, chosen = predicted(values, y[None])
    by_chance = shuffled(y)
    row = judge("the best two", mechanisms, found[0], None, y,
                rank_correlation(predicted(values, by_chance)[0], by_chance))
    pairs = [*itertools.combinations(proxies, 2)]
    count = Counter(" + ".join(pairs[i]) for i in chosen[0])
    flattered = max(float(rank_correlation(values[i] + values[j], y))
                    for i, j in itertools.combinations(range(len(values)), 2))
    return row, dict(count.most_common()), flattered


@dataclass
class Transfer:
    """All that is found: proxies {name: {mechanism: Effect}} that are judged, and what came of it."""
    proxies: dict
    too_few: dict         # proxy: how many mechanisms it has, of those that are not judged
    record: dict          # mechanism: outside.Summary
    rows: list            # of Judged: each proxy, then the best two where there are enough
    chosen: dict          # pair: for how many mechanisms it was chosen
    flattered: Optional[float]
    notes: list
    with_every_row: Optional[list] = None  # what is better than chance if rows that are set aside count too
    one_of_kin: Optional["Transfer"] = None  # the same with one mechanism of each kin


def transfer(paths, strict=False):
    """The Transfer of results files; strict: by rows of the record that have nothing beside the mechanism.

    UserError: no record; a file that cannot be read; too few mechanisms.
    """
    outside.record_on_file()
    effects_of, notes = proxies_in(paths)
    record = outside.summaries(strict=strict)
    found = judged_by(effects_of, record, notes)
    every_row = outside.summaries(every_row=True, strict=strict)
    found.with_every_row = better_than_chance(judged_by(effects_of, every_row, notes))
    alone = one_of_kin(found.proxies, found.record)
    if any(len(own) >= FEWEST for own in alone.values()):
        found.one_of_kin = judged_by(alone, record, notes)
    return found


def one_of_kin(proxies, record):
    """Proxies {name: {mechanism: Effect}} with one mechanism of each KIN, the same in all of them.

    It is the one that most proxies have, and of those the one that is measured most often in the record
    {mechanism: outside.Summary}.
    """
    def known(name):
        return sum(name in own for own in proxies.values()), record[name].rows if name in record else 0

    left_out = {name for kin in KIN for name in kin if name != max(kin, key=known)}
    return {proxy: {name: effect for name, effect in own.items() if name not in left_out}
            for proxy, own in proxies.items()}


def judged_by(effects_of, record, notes):
    """The Transfer of {proxy: {mechanism: Effect}} by a record {mechanism: outside.Summary}. UserError."""
    in_record = {name: {each: effect for each, effect in own.items() if each in record}
                 for name, own in effects_of.items()}
    proxies = {name: own for name, own in in_record.items() if len(own) >= FEWEST}
    if not proxies:
        most = max(map(len, in_record.values()), default=0)
        raise UserError(f"no proxy has {FEWEST} mechanisms of those that the record knows, the most are "
                        f"{most}; name more results files")
    verdicts = {name: each.verdict for name, each in record.items()}
    rows = [judge_proxy(name, own, verdicts) for name, own in proxies.items()]
    both = judge_best_two(proxies, verdicts)
    rows += [both[0]] if both else []
    for row, p in zip(rows, holm([row.p for row in rows])):
        row.p_corrected = float(p)
    too_few = {name: len(own) for name, own in in_record.items() if 0 < len(own) < FEWEST}
    return Transfer(proxies, too_few, record, rows, both[1] if both else {}, both[2] if both else None, notes)


def better_than_chance(found):
    """The names of what is shown to order mechanisms as the record does, at 5 % over all rows."""
    return [row.name for row in found.rows if row.p_corrected <= 1 - LEVEL]


# ---- words and tables ----

def headline(found):
    """What came of it, in some sentences; the first says whether any proxy is better than chance."""
    good = better_than_chance(found)
    rest = listed([row.name for row in found.rows if row.name not in good])
    if good:
        words = "; ".join(in_words(row) for row in found.rows if row.name in good)
        lines = [f"Better than chance: {words}."] + [f"Not shown to be: {rest}."] * bool(rest)
    else:
        best = max(found.rows, key=lambda row: row.correlation)
        lines = [f"No better than chance: of {rest} none is shown to order mechanisms as the public record "
                 f"does. The best is {in_words(best)}."]
    if found.with_every_row not in (None, good):
        names = listed(found.with_every_row) or "none"
        lines.append(f"This hangs on which rows of the record count: by all of them {names} would be better.")
    if found.one_of_kin and better_than_chance(found.one_of_kin) != good:
        names = listed(better_than_chance(found.one_of_kin)) or "none"
        lines.append(f"With one mechanism alone of each kin, which are fewer, {names} is shown to be.")
    above = listed([row.name for row in found.rows if row.more_interval[0] > 0]) or "no proxy"
    helps = dict.fromkeys(share(end(row.helps for row in found.rows)) for end in (min, max))
    lines.append(f"Right about the sign more often than guessing \"helps\" always: {above}. That guess is "
                 f"right for {' to '.join(helps)} of the mechanisms.")
    return " ".join(lines)


def in_words(row):
    correlation = f"{signed(row.correlation)} {span(row.interval, signed)}"
    return (f"{row.name}, by a rank correlation of {correlation} over "
            f"{plural(len(row.mechanisms), 'mechanism')}, corrected p = {row.p_corrected:.2g}")


def share(value):
    return f"{100 * value:.0f} %" if known(value) else "–"


def span(ends, form):
    return f"[{form(ends[0])}, {form(ends[1])}]"


def signed(value):
    return f"{value:+.2f}"


def proxies_table(found):
    """What each proxy has to do with the record."""
    head = ("proxy", "mechanisms", f"rank correlation [{100 * LEVEL:g} %]", "corrected p", "at most",
            "of effects as they are", "signs right", "always \"helps\"", "more than that")
    rows = [(row.name, str(len(row.mechanisms)), f"{signed(row.correlation)} {span(row.interval, signed)}",
             f"{row.p_corrected:.2g}", signed(row.highest),
             "–" if row.as_it_is is None else f"{signed(row.as_it_is)} {span(row.as_it_is_interval, signed)}",
             f"{share(row.signs)} {span(row.signs_interval, share)}", share(row.helps),
             f"{signed(row.more)} {span(row.more_interval, signed)}") for row in found.rows]
    return Table(head, rows)


def in_order(found):
    """The mechanisms that a proxy has, by the record's verdict, the best first."""
    names = {name for own in found.proxies.values() for name in own}
    return sorted(names, key=lambda name: (-found.record[name].verdict, name))


def effects_table(found):
    """The effect of each mechanism in each proxy, as it is and in units of its standard error."""
    def cell(effect):
        return "–" if effect is None else f"{effect.better:+.4f} ({effect.in_errors:+.1f})"

    head = ("mechanism", *found.proxies, "the record", "helps in")
    rows = [(name, *(cell(own.get(name)) for own in found.proxies.values()),
             signed(found.record[name].verdict), outside.in_short(found.record[name]))
            for name in in_order(found)]
    return Table(head, rows)


def remarks(found):
    """What belongs under the tables, as sentences."""
    verdicts = Counter(round(found.record[name].verdict, 9) for name in in_order(found))
    most, count = verdicts.most_common(1)[0]
    lines = ["An effect above 0 is better; in brackets it is in units of its standard error. The record: "
             f"the mean of helps 1, neutral 0 and hurts -1, weighted by quality. {outside.BIASES}",
             f"{count} of {sum(verdicts.values())} mechanisms have the verdict {most:+.2f}. There is no "
             "order among them, so that no correlation can be above \"at most\", unless the effects have "
             "ties too."]
    if found.flattered is not None:
        pairs = "; ".join(f"{pair} ({count})" for pair, count in found.chosen.items())
        lines.append(f"The best two were chosen without the mechanism that they predict: {pairs}. The pair "
                     f"that is best on all has {signed(found.flattered)}, and was chosen for that.")
    if found.one_of_kin:
        rows = "; ".join(f"{row.name} {signed(row.correlation)} over {len(row.mechanisms)}, corrected p = "
                         f"{row.p_corrected:.2g}" for row in found.one_of_kin.rows)
        kin = "; ".join(listed(each) for each in KIN)
        lines.append(f"With one mechanism alone of each kin ({kin}): {rows}.")
    if found.too_few:
        names = listed([f"{name} ({count})" for name, count in found.too_few.items()])
        lines.append(f"Not judged, for they have fewer than {FEWEST} mechanisms: {names}.")
    for name, own in found.proxies.items():
        files = Counter(effect.file for effect in own.values())
        seeds = sorted({effect.seeds for effect in own.values()})
        many = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
        lines.append(f"{name}: {many} seeds a mechanism, from "
                     f"{listed([f'{file} ({count})' for file, count in files.items()])}.")
    return [*lines, *found.notes]


def in_text(found):
    """The first line says what came of it."""
    first, second = (table(each.head, each.rows, left=each.words)
                     for each in (proxies_table(found), effects_table(found)))
    return "\n".join([headline(found), "", first, "", second, "", *remarks(found)])


def page(found):
    """The same as Markdown, with the picture."""
    parts = ["# Which proxy predicts?", headline(found), "![mechanisms by proxies](transfer_map.png)",
             in_markdown(*proxies_table(found)), in_markdown(*effects_table(found)), *remarks(found)]
    return "\n\n".join(parts) + "\n"


def transfer_map(found):
    """A map of mechanisms by proxies, blue where better, red where worse; the record is the last column."""
    names, columns = in_order(found), [*found.proxies]
    cells = np.full((len(names), len(columns) + 1), np.nan)
    for i, name in enumerate(names):
        for j, column in enumerate(columns):
            if effect := found.proxies[column].get(name):
                cells[i, j] = effect.in_errors
        cells[i, -1] = found.record[name].verdict
    shade = cells / DARKEST
    shade[:, -1] = cells[:, -1]
    figure, ax = coloured_table(3.4 + 1.1 * len(columns), 1.4 + 0.27 * len(names),
                                "Effects in standard errors", shade, [*columns, "the record\n(-1 to 1)"],
                                names, vmin=-1, vmax=1, cmap="RdBu")
    ax.axvline(len(columns) - 0.5, color="black", lw=2)
    for (i, j), value in np.ndenumerate(cells):
        if not math.isnan(value):
            text = signed(value) if j == len(columns) else f"{value:+.1f}"
            ax.text(j, i, text, ha="center", va="center", fontsize=9,
                    color="white" if abs(shade[i, j]) > 0.7 else "black")
    return figure


# ---- the program ----

def for_a_program(found):
    """A Transfer as what JSON has."""
    by_proxy = {name: {each: {**effect._asdict(), "in_errors": effect.in_errors}
                       for each, effect in own.items()} for name, own in found.proxies.items()}
    return dict(headline=headline(found), proxies=[asdict(row) for row in found.rows], effects=by_proxy,
                record={name: each._asdict() for name, each in found.record.items()}, chosen=found.chosen,
                flattered=found.flattered, with_every_row=found.with_every_row,
                one_of_kin=[asdict(row) for row in found.one_of_kin.rows] if found.one_of_kin else None,
                too_few=found.too_few, notes=found.notes)


def write(found, out):
    """Write the page and the picture -> their paths."""
    out.mkdir(parents=True, exist_ok=True)
    files = {"transfer.md": page(found).encode()}
    files |= {f"transfer_map.{kind}": drawn(transfer_map, found, kind) for kind in ("png", "svg")}
    for name, data in files.items():
        write_atomic(out / name, lambda f, data=data: f.write(data))
    return [out / name for name in files]


@as_program("transfer")
def main(argv=None):
    parser = ArgumentParser(prog="python -m lab.study.transfer", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="results files of studies, and of studies of tasks")
    parser.add_argument("--strict", action="store_true", help=outside.STRICT)
    parser.add_argument("--out_dir", default="out/transfer", help="of the page (default: out/transfer)")
    parser.add_argument("--json", help="write all figures to this file too")
    args = parser.parse_args(argv)
    with last_words("transfer"):
        out = writable_folder(args.out_dir, "--out_dir")
        if args.json:
            args.json = writable(args.json)
        found = transfer(args.results, args.strict)
        say(*in_text(found).splitlines(), *write(found, out))
        if args.json:
            write_json(args.json, for_a_program(found))
            say(args.json)


if __name__ == "__main__":
    main()
