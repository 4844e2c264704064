"""
The tables of README.md and docs/ that come from results/, written by `python compare.py --tables`.

A table stands between `<!-- table: KIND FILE [rows] -->` and `<!-- end -->`; what is between is written anew.
"""

import re
from pathlib import Path

from nanoheads.common import ROOT, UserError, write_atomic
from nanoheads.study import report, results

PAGES = ["README.md", *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").glob("**/*.md")))]
MARK = re.compile(r"(<!-- table: (\w+) (\S+\.gz)(?: ([^>]*?))? -->\n).*?(<!-- end -->)", re.S)


def filled(text, where):
    """A page's text, every table in it as results/ has it now. UserError: an unknown kind, or no file."""
    def fill(match):
        head, kind, file, only, end = match.groups()
        if kind not in report.TABLES:
            raise UserError(f"{where}: no table is called {kind}; there are {', '.join(report.TABLES)}")
        found = results.read(ROOT / "results" / file)
        names = re.split(r",\s*", only) if only else None
        return f"{head}{report.TABLES[kind](found, names)}\n{end}"

    return MARK.sub(fill, text)


def write():
    """Write every table of PAGES; a line for each page that changed."""
    before = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    after = {page: filled(text, page) for page, text in before.items()}
    changed = [page for page in PAGES if after[page] != before[page]]
    for page in changed:
        write_atomic(Path(ROOT, page), lambda f, text=after[page]: f.write(text.encode()))
    return [f"{page}: tables written from results/" for page in changed]
