"""
The report of a study: a table for the terminal, report.html (page.py), the forest plot; of a ladder its page
and its picture, and the report of each size.

All of it comes from a results.json.gz: `python compare.py --from_results=FILE` makes it again.
"""

import textwrap
from pathlib import Path

from nanoheads import drawing
from nanoheads.common import table, write_atomic
from nanoheads.study import analysis, page, pictures
from nanoheads.study.findings import (Table, dynamic_tables, headline, ladder_sentences, ladder_table,
                                      mean_alone, notices, others_table, printable, remarks, texts_table,
                                      verdicts_table, without)

# ---- terminal ----

def table_of(found, width=120):
    """The plain GPT and each variant, the best first; long names lose their beginning to keep to `width`."""
    if "sizes" in found:
        above, tables = [f"{found['name']}: effects over sizes"], [ladder_table(found)]
        below = [f"{name}: {text}" for name, text in ladder_sentences(found)]
    elif "texts" in found:
        both = analysis.pooled(found)
        above, tables = [headline(both), *notices(both)], [texts_table(found), others_table(both)]
        below = [" ".join(remarks(both))]
    else:
        name, first = f"{found['name']}: ", headline(found)
        above = [first if first.startswith(name) else name + first, *notices(found)]
        below = [" ".join(remarks(found))]
        # of differences at equal cost the mean alone: intervals and costs are on the page
        main, more = (without(each, "seeds", "corrected p") for each in (
            verdicts_table(found, difference=mean_alone), others_table(found)))
        rows = [[cell.partition(" at ")[0] if title.startswith("at equal") else cell
                 for title, cell in zip(main.head, row)] for row in main.rows]
        tables = [Table([title.removeprefix("at ") for title in main.head], rows, main.words), more,
                  *dynamic_tables(found)]
    above, below = ([line for text in texts for line in textwrap.wrap(printable(text), width)]
                    for texts in (above, below))
    tables = [table(head, rows, left=words, width=width) + "\n" for head, rows, words in tables if rows]
    return "\n".join([*above, *tables, *below])


# ---- files ----

def write_all(found, folder):
    """Print the table, write every file of the report, print their paths. UserError: the disk refuses."""
    print(table_of(found))
    print(*write(found, folder), sep="\n")


def write(found, folder):
    """Write every file of the report -> their paths. UserError: the disk refuses."""
    folder, paths = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)

    def save(name, data):
        write_atomic(folder / name, lambda f: f.write(data))
        paths.append(folder / name)

    is_ladder, parts = "sizes" in found, found.get("sizes") or found.get("texts") or {}
    if "texts" in found:
        found = analysis.pooled(found)
    draws = [pictures.ladder] if is_ladder else [pictures.forest, pictures.learning, pictures.compute]
    drawn = {draw.__name__: drawing.drawn(draw, found) for draw in draws}
    html = page.ladder_html(found, drawn) if is_ladder else page.html(found, drawn)
    save("report.html", html.encode("utf-8", "replace"))
    main = draws[0].__name__
    if drawn[main]:
        save(f"{main}.svg", drawn[main])
        save(f"{main}.png", drawing.drawn(draws[0], found, "png"))
    for name, study in parts.items():
        paths += write(study, folder / name)
    return paths
