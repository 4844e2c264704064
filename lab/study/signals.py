"""
How well a scale shows a change that is known: its effect over the spread of the seeds, and what that costs.

python -m lab.study.signals results/all-tiny.json.gz results/battery/bpe.json.gz
python -m lab.study.signals out/proxies-long/results.json.gz --changes short_conv "plain x 1.4"
python -m lab.study.signals results/calm-tiny.json.gz --spreads

A file is of a study such as config/studies/proxies.py. By these numbers a cheap scale is chosen, or a setting
of one (Signal and Noise, arXiv 2508.13144): a scale on which a change is far outside of what seeds do, for
little processor time. With --spreads it is asked by how much each variant's own score differs over seeds: a
plain GPT that is as good and spreads less needs fewer of them.
"""

import argparse
import math
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple, Optional

from scipy.special import nctdtrinc
from scipy.stats import chi2, levene, nct, t

from nanoheads.common import (ArgumentParser, UserError, as_program, json_safe, last_words, say, table,
                              write_json)
from lab.study import effects, results, task_study
from lab.study.findings import Table, show
from lab.study.records import studies_in

CHANGES = ("short_conv", "plain x 1.4")  # that are known to help: no scale should miss them
FOUR_IN_FIVE = 0.8
NORMAL = 1.959964 + 0.841621  # the z of 5 % on two sides, and of that power


class Signal(NamedTuple):
    """A known change at one scale. Differences are in bits/byte, below 0 is better."""
    change: str
    seeds: tuple           # (of the change, of the plain GPT)
    effect: float          # the difference of means, change less plain GPT
    spread: float          # of a score over seeds, pooled over the plain GPT and the known changes
    signal: float          # minus the effect over the spread: above 0 where the change helps
    low: float             # its 95 % interval, from the noncentral t distribution
    high: float
    seconds: Optional[float]   # of the processor, of a run of the change and of the plain GPT, the mean
    per_minute: Optional[float]  # the signal for each minute of the processor in a run
    # of the processor, for as many runs of both sides as show the change four times in five by a t test, were
    # effect and spread as seen; None: it does not help
    minutes: Optional[float]


def signals(study, changes=CHANGES):
    """[Signal] of the changes in a StudyResults that have a finished run. UserError: no spread known."""
    own = {name: arm for name, arm in study.arms.items() if name in ("plain", *changes)}
    scores = effects.scores_of(own)
    known = [name for name in changes if name in scores]
    df = sum(len(each) - 1 for each in scores.values())
    if "plain" not in scores or not known or not df:
        raise UserError(f"{study.name} at {study.scale} has too few runs: it takes the plain GPT and one of "
                        f"{', '.join(changes)} (--changes), and two seeds of one of them")
    squares = sum((bpb - mean(each.values())) ** 2 for each in scores.values() for bpb in each.values())
    spread = math.sqrt(squares / df)
    return [signal_of(study, name, scores, spread, df) for name in known]


def signal_of(study, name, scores, spread, df):
    """The Signal of one change; spread: pooled, of df degrees of freedom."""
    own, plain = [*scores[name].values()], [*scores["plain"].values()]
    effect, per_se = mean(own) - mean(plain), math.sqrt(1 / len(own) + 1 / len(plain))
    found = -effect / spread
    # t = found / per_se is noncentral t with the true signal / per_se
    low, high = (float(nctdtrinc(df, p, found / per_se)) * per_se for p in (0.975, 0.025))
    seconds = [cpu_seconds(study, each) for each in (name, "plain")]
    both = None if None in seconds else sum(seconds)
    return Signal(name, (len(own), len(plain)), effect, spread, found, low, high,
                  both and both / 2, both and found / (both / 2 / 60),
                  both and (seeds_to_show(found) * both / 60 if found > 0 else None))


def seeds_to_show(signal):
    """The fewest seeds a side with which a two-sided t test at 5 % sees a signal (above 0) FOUR_IN_FIVE."""
    n = max(2, math.ceil(2 * (NORMAL / signal) ** 2))  # by the normal distribution, which is too few
    while nct.sf(t.ppf(0.975, 2 * n - 2), 2 * n - 2, signal * math.sqrt(n / 2)) < FOUR_IN_FIVE:
        n += 1
    return n


def cpu_seconds(study, name):
    """Seconds of the processor in a run of an arm, the mean over those of its runs that say so; None: none
    does. One that was stopped and went on does not.
    """
    arm = study.arms[name]
    seconds = [study.runs[run].cpu_seconds for run, bpb in zip(arm.runs, arm.bpb) if bpb is not None]
    seconds = [each for each in seconds if each is not None]
    return mean(seconds) if seconds else None


def signals_table(rows):
    """The Table of [(where, Signal)]."""
    head = ("scale", "change", "seeds", "bits/byte", "spread", "signal [95 %]", "CPU seconds a run",
            "signal a CPU minute", "CPU minutes to show it")
    return Table(head, [(where, s.change, "{} and {}".format(*s.seeds), f"{s.effect:+.4f}", f"{s.spread:.4f}",
                         f"{s.signal:.1f} [{s.low:.1f}, {s.high:.1f}]", show(s.seconds),
                         show(s.per_minute, ".2f"), show(s.minutes, ".1f")) for where, s in rows], (0, 1))


def read_signals(paths, changes=CHANGES):
    """[(scale, Signal)] of results files, in order. UserError."""
    return of_studies(read_studies(paths), lambda study: signals(study, changes))


def read_studies(paths):
    """[(path, {text or size: StudyResults})] of results files, in order. UserError: one cannot be read, or is
    of tasks, whose scores are no bits per byte.
    """
    read = []
    for path in paths:
        if task_study.read(path):
            raise UserError(f"{path} is a study of tasks; signals and spreads are of scores in bits per byte")
        read.append((path, studies_in(results.read(path))))
    return read


def of_studies(read, of):
    """[(scale, row)] of the rows that of(study) has for each study of read_studies(), in order."""
    found = []
    for name, study in (each for _, studies in read for each in studies.items()):
        text = name or (study.settings or {}).get("dataset")
        where = ", ".join(filter(None, [study.scale, text]))
        found += [(where, each) for each in of(study)]
    return found


def unfinished(read):
    """A sentence for each file of read_studies() whose study is not finished."""
    return [f"The study in {Path(path).name} is not finished: its figures may change."
            for path, studies in read
            if not all(effects.progress(study)["finished"] for study in studies.values())]


class Spread(NamedTuple):
    """How a variant's score differs over seeds, beside the plain GPT's. Scores are in bits/byte."""
    variant: str
    seeds: int
    bpb: float              # the mean
    spread: float           # the standard deviation over seeds
    low: float              # its 95 % interval, were the scores normally distributed
    high: float
    p: Optional[float]      # that the plain GPT spreads as much, by Brown and Forsythe; None: it is it


def spreads(study):
    """[Spread] of the plain GPT and of variants with three runs or more in a StudyResults. UserError."""
    scores = {name: [*each.values()] for name, each in effects.scores_of(study.arms).items() if len(each) > 2}
    if "plain" not in scores:
        raise UserError(f"{study.name} at {study.scale} has fewer than three runs of the plain GPT: nothing "
                        "is known of its spread")
    plain = scores.pop("plain")
    return [spread_of("plain", plain), *(spread_of(name, own, plain) for name, own in scores.items())]


def spread_of(name, own, plain=None):
    """The Spread of a variant's scores over its seeds."""
    spread, df = stdev(own), len(own) - 1
    low, high = (float(spread * math.sqrt(df / chi2.ppf(p, df))) for p in (0.975, 0.025))
    # not the F test of variances: one seed far off, of which there are some, makes it see differences
    p = float(levene(own, plain, center="median").pvalue) if plain else None
    return Spread(name, len(own), mean(own), spread, low, high, p)


def spreads_table(rows):
    """The Table of [(where, Spread)]. p is of one comparison: it is not corrected for their number."""
    head = "scale", "variant", "seeds", "bits/byte", "spread [95 %]", "p, the plain GPT spreads as much"
    cells = [(where, s.variant, s.seeds, f"{s.bpb:.4f}", f"{s.spread:.4f} [{s.low:.4f}, {s.high:.4f}]",
              show(s.p, ".3f")) for where, s in rows]
    return Table(head, cells, (0, 1))


def read_spreads(paths):
    """[(scale, Spread)] of results files, in order. UserError."""
    return of_studies(read_studies(paths), spreads)


@as_program("signals")
def main(argv=None):
    parser = ArgumentParser(description=__doc__, allow_abbrev=False,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="results files of compare.py")
    parser.add_argument("--changes", nargs="+", default=CHANGES, help="variants that are known to help")
    parser.add_argument("--spreads", action="store_true",
                        help="how much each variant differs over seeds, in place of signals")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args(argv)
    with last_words("signals"):
        read = read_studies(args.files)
        rows = of_studies(read, spreads if args.spreads else lambda study: signals(study, args.changes))
        head, cells, words = (spreads_table if args.spreads else signals_table)(rows)
        say(table(head, cells, words), *unfinished(read))
        if args.json:
            write_json(args.json, json_safe([{"scale": where, **each._asdict()} for where, each in rows]))


if __name__ == "__main__":
    main()
