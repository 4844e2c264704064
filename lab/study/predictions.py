"""
Which predictions came true: docs/results/predictions.md, judged by results files.

    python -m lab.study.predictions results/battery/*.json.gz results/tasks/*.json.gz
    python -m lab.study.predictions results/battery/*.json.gz --json=predictions.json

The page was written before the battery ran. Its table says of each mechanism that the public record knows
whether a proxy will agree with the record, and beside the table it says when a proxy agrees. A cell that is
marked ° was no prediction, since a measurement was on file, and is counted apart. What was not measured is
open. Below the table of the page are five sentences over all mechanisms; they are judged by transfer.py's
figures.
"""

import argparse
import re
from typing import NamedTuple, Optional

from nanoheads.common import (ROOT, ArgumentParser, UserError, as_program, json_safe, last_words, plural, say,
                              table, write_json)
from nanoheads.tasks import TASKS
from lab.study import transfer
from lab.study.findings import Table

PAGE = ROOT / "docs" / "results" / "predictions.md"
PROXIES = ("tiny", "deep", "long", "bpe", "tasks")
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


WORDS = {"yes": (True, False), "no": (False, False), "yes°": (True, True), "no°": (False, True)}


def side_of(effect):
    """1 where a mechanism is better by two standard errors, -1 where it is worse, otherwise 0."""
    return (effect.in_errors >= ERRORS) - (effect.in_errors <= -ERRORS)


def agrees(word, effects, margin):
    """Whether Effects in a proxy agree with the record's word; one of several tasks is enough for helps."""
    if word == "neutral":
        return all(side_of(each) == 0 and abs(each.better) < margin for each in effects)
    return any(side_of(each) == (1 if word == "helps" else -1) for each in effects)


def judged(page, effects_of):
    """[Cell] of a page's {mechanism: (word, predictions)} by {proxy or task: {mechanism: Effect}}."""
    cells = []
    for name, (word, predictions) in page.items():
        for proxy, (predicted, known_before) in predictions.items():
            here = [own[name] for key, own in effects_of.items()
                    if name in own and (key in TASKS if proxy == "tasks" else key == proxy)]
            margin = MARGIN_OF_TASKS if proxy == "tasks" else MARGIN
            cells.append(Cell(name, proxy, predicted, known_before,
                              agrees(word, here, margin) if here else None))
    return cells


def counted(cells):
    """(right, of how many) of cells that were measured."""
    right = [cell.right for cell in cells if cell.right is not None]
    return sum(right), len(right)


# ---- the five sentences over all mechanisms ----

def sentences(cells, found):
    """[(the number of the sentence, what came of it)]; found: a transfer.Transfer.

    What is said of all proxies is said so far, where some of them are not measured.
    """
    measured = {cell.proxy for cell in cells if cell.agrees is not None}
    so_far = "" if measured == {*PROXIES} else "so far "
    return [(1, most_agreement(cells)), *((2, unlike_tiny(found, each)) for each in ("bpe", "long")),
            (3, so_far + above_chance(found)), (4, so_far + more_signs(found)),
            (5, so_far + better_together(found))]


def verdict(came_true):
    return "came true" if came_true else "refuted"


def most_agreement(cells):
    shares = {proxy: [cell.agrees for cell in cells if cell.proxy == proxy and cell.agrees is not None]
              for proxy in PROXIES}
    words = ", ".join(f"{proxy} {sum(own)} of {len(own)}" for proxy, own in shares.items())
    if not all(shares.values()):
        return f"open, since not all proxies are measured: {words}"
    count = {proxy: sum(own) for proxy, own in shares.items()}
    alone = all(count["deep"] > n for proxy, n in count.items() if proxy != "deep")
    return f"{verdict(alone)}: the proxies agree with the record for {words}"


def unlike_tiny(found, proxy):
    one, other = (found.proxies.get(name, {}) for name in ("tiny", proxy))
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
    good = [row for row in single(found) if row.p_corrected <= 1 - transfer.LEVEL]
    words = "; ".join(transfer.in_words(row) for row in good) or "no proxy is above chance"
    return f"{verdict(not good)}: {words}"


def more_signs(found):
    above = [row.name for row in single(found) if row.signs > row.helps]
    return f"{verdict(not above)}: {', '.join(above) or 'no proxy'} has more signs right than the guess"


def better_together(found):
    two = next((row for row in found.rows if row.name not in found.proxies), None)
    if two is None:
        return "open, since too few mechanisms are measured in all proxies"
    best = max(single(found), key=lambda row: row.correlation)
    return (f"{verdict(two.correlation - best.correlation < BETTER_TOGETHER)}: two together "
            f"{two.correlation:+.2f} over {len(two.mechanisms)}, {best.name} alone {best.correlation:+.2f} "
            f"over {len(best.mechanisms)}")


# ---- words and tables ----

def headline(cells):
    (right, n), (old_right, old_n) = (counted([c for c in cells if c.known_before is known])
                                      for known in (False, True))
    open_cells = sum(cell.agrees is None for cell in cells)
    of = [cell for cell in cells if not cell.known_before and cell.agrees is not None]
    never = sum(not cell.agrees for cell in of)
    return (f"{right} of {plural(n, 'prediction')} came true; guessing that no proxy agrees with the record "
            f"is right for {never} of them. Of {plural(old_n, 'cell')} that were on file before, a new "
            f"measurement comes out as the old one in {old_right}. Open: {open_cells}.")


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
    """(cells, the Transfer) of results files. UserError."""
    found = transfer.transfer(paths)
    effects_of, _ = transfer.proxies_in(paths)
    return judged(on_the_page(PAGE.read_text(encoding="utf-8")), effects_of), found


@as_program("predictions")
def main(argv=None):
    parser = ArgumentParser(prog="python -m lab.study.predictions", description=__doc__, allow_abbrev=False,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="results files of compare.py")
    parser.add_argument("--json", help="write the cells and sentences to this file")
    args = parser.parse_args(argv)
    with last_words("predictions"):
        cells, found = read_all(args.files)
        head, rows, words = cells_table(cells)
        lines = sentences(cells, found)
        say(headline(cells), "", table(head, rows, words), "",
            *(f"{number}. {text}." for number, text in lines), *found.notes)
        if args.json:
            write_json(args.json, json_safe(dict(
                headline=headline(cells), cells=[{**c._asdict(), "right": c.right} for c in cells],
                sentences=[dict(number=number, text=text) for number, text in lines])))


if __name__ == "__main__":
    main()
