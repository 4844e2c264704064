"""
The public record: what others measured of the mechanisms that are here, in models of 20 M parameters on.

    python -m lab.study.outside                      # how many say that a mechanism helps, is neutral, hurts
    python -m lab.study.outside --strict             # without rows that have anything beside the mechanism
    python -m lab.study.outside --json=record.json   # the same, and every row, for a program

The record is results/outside.csv, and results/outside.md says what its columns are, which rows count, and
what it is worth. A study has the record beside its verdicts, and transfer.py asks which cheap setting agrees
with it. An installed copy has no results/: then there is no record, and a study says nothing of it.
"""

import argparse
import functools
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import NamedTuple, Optional

from model import MECHANISM_CLASSES, MECHANISMS
from nanoheads.common import (ROOT, ArgumentParser, UserError, as_program, cut_short, last_words, plural, say,
                              table, writable, write_json)
from lab.study import scores

FILE = ROOT / "results" / "outside.csv"
COLUMNS = ("mechanism", "detail", "source", "date", "params", "tokens", "data", "optimizer", "baseline",
           "effect_kind", "effect", "seeds", "noise", "verdict_there", "quality", "set_aside", "beside")
KINDS = ("nats", "bpb", "ppl", "accuracy", "steps_saved_pct", "time_saved_pct", "compute_multiplier")
ABOVE_IS_BETTER = ("accuracy", "steps_saved_pct", "time_saved_pct")  # above 1: compute_multiplier
VERDICTS = {"helps": 1, "neutral": 0, "hurts": -1}
# A comparison with seeds counts three times as much as an anecdote, and one careful run twice. By the noise
# of seeds alone the first would count more still; but what makes rows differ is mostly the recipe around a
# mechanism, which more seeds do not average out.
WEIGHTS = {"a": 3, "b": 2, "c": 1}
# what the record has rows of and no entry of MECHANISMS is
WITHOUT_ENTRY = {
    "gqa": "fewer key and value heads are a flag of the plain GPT, n_kv_head",
    "hyper-connections": "several residual streams were not built",
    "mla": "keys and values from a shared latent were not built",
    "qk_norm": "a part of the plain GPT's recipe, modern",
    "short_conv_k": "a setting of short_conv without an entry",
    "short_conv_v": "a setting of short_conv without an entry",
    "smear": "an embedding mixed with that of the token before was not built",
    "softcap": "a cap of the output logits was not built; score_cap caps attention scores",
    "survey": "many modifications in one row, which are not told apart",
}
STRICT = "leave out rows of the record that have anything beside the mechanism"
BIASES = ("Published rows lean to \"helps\", most are single runs, and rows of one source are not "
          "independent: a count is no test.")


@dataclass(frozen=True)
class Row:
    """A measurement; effect: None where its source has no number; size: (fewest, most) parameters or None."""
    mechanism: str
    detail: str
    source: str
    date: str
    params: str
    tokens: str
    data: str
    optimizer: str
    baseline: str
    effect_kind: str
    effect: Optional[float]
    seeds: str
    noise: str
    verdict_there: str
    quality: str
    set_aside: str
    beside: str
    size: Optional[tuple]

    @property
    def gain(self):
        """The effect, or the logarithm of a multiplier, with its sign turned so that above 0 is better."""
        if self.effect_kind == "compute_multiplier":
            return self.effect and math.log(self.effect)
        return self.effect if self.effect is None or self.effect_kind in ABOVE_IS_BETTER else -self.effect


class Summary(NamedTuple):
    """What the rows of a mechanism say together.

    verdict: the mean of 1 for each row that says helps, 0 for neutral and -1 for hurts, weighted by WEIGHTS;
    smallest, largest: parameters, None where no row has them; sized: how many rows have them; beside: how
    many have something beside the mechanism, see results/outside.md.
    """
    mechanism: str
    helps: int
    neutral: int
    hurts: int
    verdict: float
    sources: int
    smallest: Optional[float]
    largest: Optional[float]
    sized: int
    beside: int = 0

    @property
    def rows(self):
        return self.helps + self.neutral + self.hurts


# ---- the file ----

def read(path):
    """The Rows of a record. UserError names every row that cannot be used by its line."""
    seen = {}  # {a row's cells: its line}

    def parsed_once(cells, line):
        row, problem = parsed(cells, line)
        first = seen.setdefault(tuple(cells.values()), line)
        return row, problem or (f"it repeats line {first}" if first != line else None)
    return scores.rows_of(path, COLUMNS, (), parsed_once)


def parsed(cells, line):
    """(the Row, what is wrong with it or None); cells: {column: text}."""
    name, text = cells["mechanism"], cells["effect"]
    effect = scores.finite(text) if text else None
    row = Row(**{**{key: cells[key] for key in COLUMNS}, "effect": effect}, size=size_of(cells["params"]))
    if name not in MECHANISMS and name not in WITHOUT_ENTRY:
        return row, (f"mechanism {name!r} is no entry of MECHANISMS, and WITHOUT_ENTRY in "
                     "lab/study/outside.py has no reason for it")
    if text and effect is None:
        return row, f"effect {text!r} is not a number; leave it empty where the source gives none"
    for key, known in (("effect_kind", KINDS), ("verdict_there", VERDICTS), ("quality", WEIGHTS)):
        if cells[key] not in known:
            return row, f"{key} {cells[key]!r} must be one of {', '.join(known)}"
    if not row.source:
        return row, "source is empty"
    if row.effect_kind == "compute_multiplier" and effect is not None and effect <= 0:
        return row, f"effect {text!r} must be above 0: it is a multiplier of compute"
    if not row.set_aside and effect is not None and row.gain * VERDICTS[row.verdict_there] < 0:
        return row, (f"effect {text} {row.effect_kind} and verdict_there {row.verdict_there} contradict each "
                     "other; a row that is to count cannot have both")
    return row, None


SIZE = r"(?<![\w.])(\d+(?:\.\d+)?)([MB]?)(?:(?:-| and )(\d+(?:\.\d+)?))?([MB])\b"


def size_of(text):
    """(fewest, most) parameters by what a source says of a model; None: it does not say.

    Of a mixture of experts those that are active, where they are given; else the first number. Where only
    layers and width are given, those of the blocks.
    """
    if "GPT-2 small" in text:  # the speed runs' class: 12 layers of 768, about GPT-2's 124 M
        return 124e6, 124e6
    found = re.search(SIZE + " active", text) or re.search(SIZE, text)
    if found:
        unit = {"M": 1e6, "B": 1e9}
        low, of_low, high, of_high = found.groups()
        low = float(low) * unit[of_low or of_high]
        return low, float(high) * unit[of_high] if high else low
    if found := re.search(r"(\d+) layers, (\d+) wide", text):
        weights = 12.0 * int(found[1]) * int(found[2]) ** 2
        return weights, weights
    return None


# ---- what it says ----

@functools.cache
def on_file(path):
    """{mechanism: [Row]} of the record at a path, {} where there is none. UserError: it cannot be read."""
    if not path.is_file():
        return {}
    found = {}
    for row in sorted(read(path), key=lambda row: row.mechanism):
        found.setdefault(row.mechanism, []).append(row)
    return found


def summaries(every_row=False, strict=False):
    """{entry of MECHANISMS: Summary} of the record on file; every_row: rows that are set aside count too;
    strict: none does that has anything beside the mechanism.
    """
    counted = {name: [row for row in rows if (every_row or not row.set_aside) and not (strict and row.beside)]
               for name, rows in on_file(FILE).items() if name in MECHANISMS}
    return {name: summary(name, rows) for name, rows in counted.items() if rows}


def summary(name, rows):
    count = Counter(row.verdict_there for row in rows)
    weights = [WEIGHTS[row.quality] for row in rows]
    signs = [VERDICTS[row.verdict_there] for row in rows]
    sizes = [end for row in rows if row.size for end in row.size]
    return Summary(name, count["helps"], count["neutral"], count["hurts"],
                   sum(w * sign for w, sign in zip(weights, signs)) / sum(weights),
                   len({source_of(row) for row in rows}), min(sizes, default=None), max(sizes, default=None),
                   sum(row.size is not None for row in rows), sum(bool(row.beside) for row in rows))


def source_of(row):
    """The paper or the repository of a row: what its measurements have in common."""
    paper = re.match(r"arXiv \d{4}\.\d{5}", row.source)
    return paper[0] if paper else re.split(r"[ #]", row.source)[0]


def entry_of(name, flags):
    """The entry of MECHANISMS that a study's variant is, by its name and its flags; None: it is none.

    Rates and other flags beside those of the entry may be set.
    """
    own = MECHANISMS.get(name)
    return name if own and all(flags.get(key) == value for key, value in own.items()) else None


def known_of(name, flags):
    """The Summary of a study's variant; None: the record does not know it."""
    return summaries().get(entry_of(name, flags))


def words_on(name, flags):
    """What the record says of a study's variant: "helps in 13 of 13, at 124 M"; None: it does not know it."""
    found = known_of(name, flags)
    return found and in_words(found)


def in_words(found):
    said = f"helps in {found.helps} of {found.rows}" + f", hurts in {found.hurts}" * bool(found.hurts)
    if not found.sized:
        return said
    return f"{said}, at {sizes_in_words(found)}" + " where stated" * (found.sized < found.rows)


def in_short(found):
    """What stands in a column "helps in": "7 of 12, 2 hurt"."""
    return f"{found.helps} of {found.rows}" + f", {found.hurts} hurt" * bool(found.hurts)


def sizes_in_words(found):
    ends = [f"{size / 1e9:.2g} B" if size >= 1e9 else f"{size / 1e6:.3g} M"
            for size in (found.smallest, found.largest) if size is not None]
    return " to ".join(dict.fromkeys(ends))


# ---- the program ----

def what_is(name):
    """The flags of an entry, and the first line of its class, which several entries may share."""
    cls = next(cls for cls in MECHANISM_CLASSES if name in cls.modes)
    flags = " ".join(f"{key}={value}" for key, value in MECHANISMS[name].items())
    return f"{flags}: {cls.__doc__.strip().splitlines()[0]}"


def listing(rows, why):
    """A line for each row of which why(row) says something, as lines behind its mechanism's."""
    return [f"    {cut_short(row.detail, 70)} ({why(row)}); {cut_short(row.source, 60)}"
            for row in rows if why(row)]


def in_text(record, found):
    """The table of a record, and what is in none of its sums.

    record: {mechanism: [Row]}; found: summaries().
    """
    head = ("mechanism", "verdict", "helps", "neutral", "hurts", "beside", "in no sum", "sources",
            "parameters", "what it is here")
    rows = [(each.mechanism, f"{each.verdict:+.2f}", str(each.helps), str(each.neutral), str(each.hurts),
             str(each.beside), str(len(record[each.mechanism]) - each.rows), str(each.sources),
             sizes_in_words(each) or "–", cut_short(what_is(each.mechanism), 70))
            for each in sorted(found.values(), key=lambda each: -each.verdict)]
    every, count = sum(map(len, record.values())), sum(each.rows for each in found.values())
    mechanisms = plural(len(found), "mechanism")
    lines = [f"{every} measurements by others, {count} of which count for {mechanisms} of ours. {BIASES}",
             "Verdict: the mean of helps 1, neutral 0, hurts -1, each row weighted by its quality, "
             + ", ".join(f"{quality} {weight}" for quality, weight in WEIGHTS.items()) + ".", "",
             "Beside: rows that count, though they have something beside the mechanism; --strict leaves them "
             "out.", "", table(head, rows, left=(0, 8, 9))]
    for title, why in (("Set aside, and in no sum:", lambda row: row.set_aside),
                       ("With something beside the mechanism:", lambda row: row.beside)):
        lines += ["", title]
        for name, rows in record.items():
            if name in MECHANISMS and (its_own := listing(rows, why)):
                lines += [f"  {name}, {plural(len(its_own), 'row')}:", *its_own]
    lines += ["", "Without an entry here, and in no sum:"]
    lines += [f"  {name}, {plural(len(rows), 'row')}: {WITHOUT_ENTRY[name]}"
              for name, rows in record.items() if name not in MECHANISMS]
    return "\n".join(lines)


def record_on_file():
    """{mechanism: [Row]}. UserError: there is no record, or it cannot be read."""
    if not FILE.is_file():
        raise UserError(f"{FILE} is not there: the record is in the repository, and in no installed copy")
    if not (record := on_file(FILE)):
        raise UserError(f"{FILE} has no rows; git checkout brings the record back")
    return record


@as_program("outside")
def main(argv=None):
    parser = ArgumentParser(prog="python -m lab.study.outside", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help=STRICT)
    parser.add_argument("--json", help="write the sums and every row to this file too")
    args = parser.parse_args(argv)
    with last_words("outside"):
        if args.json:
            args.json = writable(args.json)
        record, found = record_on_file(), summaries(strict=args.strict)
        say(*in_text(record, found).splitlines())
        if args.json:
            write_json(args.json, dict(weights=WEIGHTS, biases=BIASES, without_entry=WITHOUT_ENTRY,
                                       mechanisms=[each._asdict() for each in found.values()],
                                       rows=[asdict(row) for rows in record.values() for row in rows]))
            say(args.json)


if __name__ == "__main__":
    main()
