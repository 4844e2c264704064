"""What the results of the GPU check say: what is wrong, what is printed, the tables in docs/gpu.md."""

import json
import re
import subprocess
from contextlib import suppress

from nanoheads.common import ROOT, UserError, table, write_atomic
from tests.lab.gpu.entries import CARDS, ENTRIES, MORE_CARDS, Check, checks, more_checks, switches
from tests.lab.gpu.environment import TORCH

RESULTS = ROOT / "results/gpu-compile.json"
PAGE = ROOT / "docs/gpu.md"
CODE = ("model.py", "train.py", "nanoheads", "lab")  # what is compiled
MARK = re.compile(rf"(<!-- table: (\w+) {RESULTS.name} -->\n).*?(<!-- end -->)", re.S)


# ---- the results file ----

def read():
    """{key: row} of the results file; empty where there is none. Raises UserError."""
    try:
        return json.loads(RESULTS.read_text(encoding="utf-8"))["checks"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{RESULTS} is not a results file of this check: delete it") from None


def write(rows):
    """Write {key: row}, a line each; those of checks that are no more are left out."""
    every = *checks(), *more_checks(MORE_CARDS, tuple(ENTRIES))
    known = [check.key for check in every]
    lines = [f" {json.dumps(key)}: {json.dumps(rows[key], sort_keys=True)}" for key in known if key in rows]
    text = f'{{"torch": "{TORCH}", "checks": {{\n' + ",\n".join(lines) + "\n}}\n"
    write_atomic(RESULTS, lambda f: f.write(text.encode()))


def code_commit():
    """The last commit that changed what is compiled, "-dirty" behind it where that has changed since.

    None without git.
    """
    def git(*args):
        command = ["git", *args, "--", *CODE]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    with suppress(OSError):
        commit = git("log", "-1", "--abbrev=8", "--format=%h")
        if not commit:
            return None
        return f"{commit}-dirty" if git("status", "--porcelain") else commit
    return None


def missing(wanted, commit):
    """Those of the wanted checks that the results file does not have from this commit, or has as an error."""
    rows = read()
    if commit is None or commit.endswith("-dirty"):
        return wanted
    have = {key for key, row in rows.items() if row["commit"] == commit and "error" not in row}
    return [check for check in wanted if check.key not in have]


# ---- what is wrong ----

def problems(check, row):
    """What is wrong with a check, from its row, a sentence each."""
    if "error" in row:
        yield f"does not compile: {row['error']}"
    for reason in row.get("breaks", ()):
        yield f"graph break: {reason}"
    graphs = row.get("graphs")
    if graphs and graphs[-1] > graphs[0] + switches(check):
        yield f"recompiled: {graphs} graphs after each step"
    if row.get("shared", 0) > row.get("limit", 0):
        yield (f"{row['largest']} asks for {row['shared']:,} bytes of shared memory, the card has "
               f"{row['limit']:,}; kernels that ask for too much: {row['too_large']}")


def wrong(rows, wanted):
    """Lines: each problem of the wanted checks, once for an entry, and how many of its checks have it."""
    found = {}
    for check in wanted:
        for problem in problems(check, rows.get(check.key, {})):
            found.setdefault((check.entry, problem), []).append(check.key)
    return [f"{keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}: {problem}"
            for (_, problem), keys in found.items()]


# ---- what is printed ----

def overview(rows, wanted):
    """A line for each entry: kernels, bytes and memory of its training step at head size 64 in the dtype
    that each card is compiled with.
    """
    lines, more = [], [card for card in MORE_CARDS if any(check.card == card for check in wanted)]
    cards = more or CARDS
    for name in dict.fromkeys(check.entry for check in wanted):
        of_cards = [rows.get(Check(name, "train", 64, MORE_CARDS.get(card, "bfloat16"), card).key, {})
                    for card in cards]
        first = next(filter(None, of_cards), {})
        cells = [first.get("kernels", "–"), f"{first['bytes'] / 1e6:.1f}" if "bytes" in first else "–"]
        cells += [f"{row['shared'] / 1024:.0f}" if "shared" in row else "–" for row in of_cards]
        mine = [check for check in wanted if check.entry == name]
        bad = sum(any(problems(check, rows.get(check.key, {}))) for check in mine)
        lines.append([name, *cells, f"{bad} of {len(mine)}" if bad else "0"])
    return table(["entry", "kernels", "MB moved", *(f"KB {card}" for card in cards), "wrong"], lines)


# ---- the table of commits ----

def commits_table(rows):
    """A table in Markdown: how many results there are of each commit, the newest first."""
    if not rows:
        return ""
    found = {}
    for check in checks():
        row = rows.get(check.key, {"date": "", "commit": "not compiled yet"})
        found.setdefault((row["date"], row["commit"]), []).append(check.entry)
    lines = [[commit, day, len(entries), in_short(dict.fromkeys(entries))]
             for (day, commit), entries in sorted(found.items(), reverse=True)]
    return in_markdown(["commit", "compiled on", "checks", "entries"], lines)


def in_short(entries):
    """Up to a dozen entries by name, more by their number."""
    return ", ".join(f"`{entry}`" for entry in entries) if len(entries) <= 12 else f"{len(entries)} entries"


# what docs/gpu.md can hold of the results file
TABLES = {"commits": commits_table}


def in_markdown(head, lines):
    rows = [head, ["---"] + ["--:"] * (len(head) - 1), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def filled(text):
    """A page's text with its tables as the results file has them now."""
    rows = read()

    def fill(match):
        made = TABLES[match.group(2)](rows)
        return match.group(1) + (made and f"{made}\n") + match.group(3)

    return MARK.sub(fill, text)


def write_page():
    """Write the tables into docs/gpu.md; whether anything changed."""
    before = PAGE.read_text(encoding="utf-8")
    after = filled(before)
    if after != before:
        write_atomic(PAGE, lambda f: f.write(after.encode()))
    return after != before
