"""
Which predictions came true: docs/results/predictions.md, judged by results files.

    python -m lab.study.predictions results/battery/*.json.gz results/tasks/*.json.gz
    python -m lab.study.predictions results/battery/*.json.gz --json=predictions.json

The page was written before the battery ran. Its table says of each mechanism that the public record knows
whether a proxy will agree with the record, and beside the table it says when a proxy agrees. A cell that is
marked ° was no prediction, since a measurement was on file, and is counted apart. What was not measured is
open, and on tasks what another one may decide: it takes all eight to say that none agrees. Below the table
of the page are five sentences over all mechanisms; they are judged by transfer.py's figures.
"""

import argparse
import re
from typing import NamedTuple, Optional

from nanoheads.common import (ROOT, ArgumentParser, UserError, as_program, json_safe, last_words, plural, say,
                              table, write_json)
from nanoheads.tasks import TASKS
from lab.study import outside, transfer
from lab.study.findings import Table

PAGE = ROOT / "docs" / "results" / "predictions.md"
PROXIES = ("tiny", "deep", "long", "bpe", "tasks")
# a cell's words: (whether it is expected to agree, whether a measurement was on file)
WORDS = {"yes": (True, False), "no": (False, False), "yes°": (True, True), "no°": (False, True)}
ERRORS = 2                           # standard errors from which on a difference counts, as the page has it
# bits per byte, and the share of answers: below it there is no difference
MARGIN, MARGIN_OF_TASKS = 0.01, 0.05
FEW = 4                              # mechanisms in which bpe and long may differ from tiny: sentence 2
BETTER_TOGETHER = 0.1                # in rank correlation, from which on two proxies are better: sentence 5


class Cell(NamedTuple):
    """A prediction and what came of it; agrees: None where nothing was measured."""
    mechanism: str
    proxy: str
    predicted: bool
    known_before: bool
    agrees: Optional[bool]

    @property
    def right(self):
        return None if self.agrees is None else self.agrees == self.predicted


def on_the_page(text):
    """{mechanism: (the record's word, {proxy: (predicted, known before)})} of the page's table. UserError."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not re.fullmatch(r"`\w+`", cells[0]) or len(cells) < 2 + len(PROXIES):
            continue
        words = cells[2:2 + len(PROXIES)]
        if cells[1] not in ("helps", "neutral", "hurts") or any(w not in WORDS for w in words):
            has = ", ".join(cells[1:2 + len(PROXIES)])
            raise UserError(f"{PAGE.name}: {cells[0]} must have helps, neutral or hurts, then yes or no for "
                            f"each of {', '.join(PROXIES)}, and has {has}")
        found[cells[0].strip("`")] = cells[1], {proxy: WORDS[w] for proxy, w in zip(PROXIES, words)}
    if not found:
        raise UserError(f"{PAGE.name} has no table of predictions")
    return found


def side_of(effect):
    """1 where a mechanism is better by two standard errors, -1 where it is worse, otherwise 0."""
    return (effect.in_errors >= ERRORS) - (effect.in_errors <= -ERRORS)


def agrees(word, effect, margin):
    """Whether an Effect agrees with the record's word."""
    if word == "neutral":
        return side_of(effect) == 0 and abs(effect.better) < margin
    return side_of(effect) == (1 if word == "helps" else -1)


def agrees_on_tasks(word, effects):
    """The same for Effects on several tasks; None: it is open, since another task may decide.

    One task is enough to agree with helps or hurts, and to disagree with neutral: else it takes all of them.
    """
    found = [agrees(word, each, MARGIN_OF_TASKS) for each in effects]
    decides = word != "neutral"
    if decides in found:
        return decides
    return not decides if len(found) == len(TASKS) else None


def judged(page, effects_of):
    """[Cell] of a page's {mechanism: (word, predictions)} by {proxy or task: {mechanism: Effect}}."""
    cells = []
    for name, (word, predictions) in page.items():
        on_tasks = [own[name] for key, own in effects_of.items() if key in TASKS and name in own]
        for proxy, (predicted, known_before) in predictions.items():
            if proxy == "tasks":
                found = agrees_on_tasks(word, on_tasks)
            else:
                effect = effects_of.get(proxy, {}).get(name)
                found = None if effect is None else agrees(word, effect, MARGIN)
            cells.append(Cell(name, proxy, predicted, known_before, found))
    return cells


def counted(cells):
    """(right, of how many) of cells that were measured."""
    right = [cell.right for cell in cells if cell.right is not None]
    return sum(right), len(right)


# ---- the five sentences over all mechanisms ----

def sentences(cells, effects_of, found):
    """[(the number of the sentence, what came of it)].

    effects_of: {proxy or task: {mechanism: Effect}}; found: the transfer.Transfer of these, or None where no
    proxy has enough mechanisms. While a cell is open, all of it is so far.
    """
    texts = [(1, most_agreement(cells)), *((2, unlike_tiny(effects_of, each)) for each in ("bpe", "long")),
             *((number, of(found) if found else "open, since no proxy has enough mechanisms")
               for number, of in ((3, above_chance), (4, more_signs), (5, better_together)))]
    if all(cell.agrees is not None for cell in cells):
        return texts
    return [(number, re.sub("^(came true|refuted)", r"so far \1", text)) for number, text in texts]


def verdict(came_true):
    return "came true" if came_true else "refuted"


def most_agreement(cells):
    """Sentence 1, over the mechanisms that every scale has; of tasks, what has agreed by now."""
    of = {(cell.mechanism, cell.proxy): cell.agrees for cell in cells}
    names = dict.fromkeys(cell.mechanism for cell in cells)
    common = [name for name in names if all(of[name, proxy] is not None for proxy in PROXIES[:-1])]
    if not common:
        return "open, since no mechanism is measured at tiny, deep, long and bpe"
    count = {proxy: sum(of[name, proxy] is True for name in common) for proxy in PROXIES}
    words = ", ".join(f"{proxy} {n}" for proxy, n in count.items())
    alone = all(count["deep"] > n for proxy, n in count.items() if proxy != "deep")
    return f"{verdict(alone)}: of {plural(len(common), 'mechanism')} these agree with the record: {words}"


def unlike_tiny(effects_of, proxy):
    one, other = (effects_of.get(name, {}) for name in ("tiny", proxy))
    both = [name for name in one if name in other]
    if not both:
        return f"open, since tiny and {proxy} are not both measured"
    unlike = [name for name in both if side_of(one[name]) != side_of(other[name])]
    names = f" ({', '.join(unlike)})" if unlike else ""
    return (f"{verdict(len(unlike) <= FEW)}: {proxy} differs from tiny for {len(unlike)} of "
            f"{plural(len(both), 'mechanism')}{names}")


def single(found):
    return [row for row in found.rows if row.name in found.proxies]


def above_chance(found):
    """Sentence 3, which figures on file refuted when it was written: it is no prediction."""
    good = [row for row in single(found) if row.name in transfer.better_than_chance(found)]
    words = "; ".join(transfer.in_words(row) for row in good) or "no proxy is above chance"
    return f"{verdict(not good)}, and apart, for what was on file when it was written refuted it: {words}"


def more_signs(found):
    """Sentence 4, which nothing can refute while the record has no verdict below 0."""
    if all(row.helps == 1 for row in single(found)):
        return "cannot be refuted: guessing helps is right for all that the record has a sign for"
    above = [row.name for row in single(found) if row.signs > row.helps]
    return f"{verdict(not above)}: {', '.join(above) or 'no proxy'} has more signs right than the guess"


def better_together(found):
    """Sentence 5: the best two against the best one, over the same mechanisms."""
    two = next((row for row in found.rows if row.name not in found.proxies), None)
    if two is None:
        return "open, since too few mechanisms are measured in all proxies"
    record = [found.record[name].verdict for name in two.mechanisms]
    alone = {proxy: float(transfer.rank_correlation([own[name].in_errors for name in two.mechanisms], record))
             for proxy, own in found.proxies.items() if {*two.mechanisms} <= {*own}}
    best = max(alone, key=alone.get)
    return (f"{verdict(two.correlation - alone[best] < BETTER_TOGETHER)}: over "
            f"{plural(len(record), 'mechanism')} two together have {two.correlation:+.2f}, {best} alone "
            f"{alone[best]:+.2f}")


# ---- words and tables ----

def headline(cells):
    """How many came true. Scales and tasks apart: a task that was measured can decide one way alone."""
    before, new = ([cell for cell in cells if cell.known_before is known] for known in (True, False))
    scales, tasks = ([cell for cell in new if (cell.proxy == "tasks") is on] for on in (False, True))
    (right, n), (right_on_tasks, n_tasks), (expected, n_before) = map(counted, (scales, tasks, before))
    never, still = (sum(cell.agrees is each for cell in scales) for each in (False, None))
    return (f"{right} of {plural(n, 'prediction')} for scales came true; "
            f"guessing that no scale agrees with the record is right for {never} of them. {still} are open. "
            f"On tasks {right_on_tasks} of {n_tasks} came true: where the record says \"helps\", one task "
            "that agrees makes a \"yes\" true and a \"no\" false, and the opposite takes all eight. "
            f"Of {plural(n_before, 'cell')} of which a measurement was on file before, which are no "
            f"predictions, {expected} are as expected.")


def cells_table(cells):
    """Each prediction and whether it came true."""
    def shown(cell):
        word = ("yes" if cell.predicted else "no") + "°" * cell.known_before
        return word + {True: ", right", False: ", wrong", None: ", open"}[cell.right]

    of = {(cell.mechanism, cell.proxy): shown(cell) for cell in cells}
    names = dict.fromkeys(cell.mechanism for cell in cells)
    rows = [(name, *(of[name, proxy] for proxy in PROXIES)) for name in names]
    for title, known in (("right of what was predicted", False), ("right of what was on file, °", True)):
        sums = [counted([cell for cell in cells if (cell.proxy, cell.known_before) == (proxy, known)])
                for proxy in PROXIES]
        rows.append((title, *(f"{right} of {n}" if n else "–" for right, n in sums)))
    return Table(("mechanism", *PROXIES), rows, tuple(range(1 + len(PROXIES))))


def read_all(paths):
    """(cells, {proxy or task: {mechanism: Effect}}, the Transfer or None, notes) of files. UserError."""
    outside.record_on_file()
    effects_of, notes = transfer.proxies_in(paths)
    try:
        found = transfer.judged_by(effects_of, outside.summaries(), notes)
    except UserError:  # no proxy has enough mechanisms
        found = None
    return judged(on_the_page(PAGE.read_text(encoding="utf-8")), effects_of), effects_of, found, notes


@as_program("predictions")
def main(argv=None):
    parser = ArgumentParser(prog="python -m lab.study.predictions", description=__doc__, allow_abbrev=False,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="results files of compare.py")
    parser.add_argument("--json", help="write the cells and sentences to this file")
    args = parser.parse_args(argv)
    with last_words("predictions"):
        cells, effects_of, found, notes = read_all(args.files)
        head, rows, words = cells_table(cells)
        lines = sentences(cells, effects_of, found)
        say(headline(cells), "", table(head, rows, words), "",
            *(f"{number}. {text}." for number, text in lines), *notes)
        if args.json:
            write_json(args.json, json_safe(dict(
                headline=headline(cells), cells=[{**c._asdict(), "right": c.right} for c in cells],
                sentences=[dict(number=number, text=text) for number, text in lines])))


if __name__ == "__main__":
    main()
