"""
Makes the text that --help prints, from the flags.

    python train.py --help          what one sets every day, then all other keys of the model and of training,
                                    and a line for each mechanism
    python train.py --help=routing  what a mechanism does, with all of its keys; or any other key

A row has a key, its default, what it does, and in brackets the values that it takes, where the default does
not show their type.
"""

import inspect
import re
import textwrap
from dataclasses import dataclass

from model import MECHANISM_CLASSES, OWN, PlainConfig
from nanoheads.common import UserError
from nanoheads.config import CoreTrainConfig
from nanoheads.configurator import Presets, fields_of, is_help, keys_of, likely_name, type_name
from nanoheads.other_names import our_name

EVERY_DAY = ("scale", "mechanism", "check", "dataset", "out_dir", "resume", "overwrite", "init_from",
             "recipe", "n_layer", "n_head", "n_embd", "block_size", "dropout", "batch_size", "max_iters",
             "adamw_lr", "eval_interval", "seed", "device", "dtype", "compile", "wandb_log")
BY_NAME = "mechanisms by name; --help=NAME says what one does and has all of its keys, as in --help=routing"
WIDTH, COLUMN = 116, 42  # characters of a line, and where the descriptions begin


def answer(argv, doc, classes, only=None):
    """What --help, -h or --help=WORD, one of which is among the arguments, asks for, as text. UserError.

    doc: what the program is for. classes: the dataclasses that have its keys. only: those to show; None: all.
    """
    name = next(filter(is_help, argv)).partition("=")[2]
    return about(name, classes) if name else overview(doc, classes, only)


@dataclass
class Section:
    """A heading with the keys below it."""
    heading: str           # "size"; with a colon behind its name: "muon: trains the blocks' matrices"
    owner: type            # the dataclass that they are fields of
    in_full: bool          # whether all keys stand in the overview, or its name alone
    keys: list             # their names
    mechanism: type = None  # whose flags they are, if they are a mechanism's

    @property
    def name(self):
        return self.mechanism.flag if self.mechanism else self.heading.partition(":")[0]

    @property
    def modes(self):
        """{name: flags} of the names that --mechanism has for it."""
        return self.mechanism.modes if self.mechanism else {}

    @property
    def about(self):
        """What a line of the overview says of it: of a mechanism the first sentence of its documentation."""
        if self.mechanism is None:
            return self.heading.partition(":")[2].strip()
        paragraph = " ".join(inspect.getdoc(self.mechanism).split("\n\n")[0].split())
        return re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]


def sections_of(classes):
    """The Sections of dataclasses, in the order of their fields."""
    mechanisms, sections, owner = {cls.Options: cls for cls in (*MECHANISM_CLASSES, *OWN)}, [], None
    for cls in classes:
        for base, f, _ in fields_of(cls):
            heading = f.metadata.get("section")
            if heading or base is not owner:
                in_full = base in (*classes, PlainConfig, CoreTrainConfig)
                sections.append(Section(heading or base.__name__, base, in_full, [], mechanisms.get(base)))
            sections[-1].keys.append(f.name)
            owner = base
    return sections


def rows(names, keys):
    """The lines of these keys, out of {key: Key}. A type is left out where the default shows it."""
    lines = []
    for name in names:
        key = keys[name]
        values = "" if key.type is type(key.default) else f" ({type_name(key.type)})"
        start = f"  --{name:<24} {key.default!r}"
        words = textwrap.wrap(key.help + values, WIDTH - COLUMN)
        if len(start) < COLUMN:
            start = start.ljust(COLUMN) + words.pop(0)
        lines += [start, *(" " * COLUMN + line for line in words)]
    return lines


def overview(doc, classes, only=None):
    """What a program is for, what one sets every day, its other keys, and a line for each mechanism."""
    keys = {name: key for name, key in keys_of(classes).items() if only is None or name in only}
    every_day = [name for name in EVERY_DAY if name in keys] if Presets in classes else []
    lines, sections = [doc.strip()], sections_of(classes)
    if every_day:
        lines += ["", "---- what one sets every day ----", *rows(every_day, keys)]
    for section in sections:
        names = [name for name in section.keys if name in keys and name not in every_day]
        if section.in_full and names:
            lines += ["", f"---- {section.heading} ----", *rows(names, keys)]
    by_name = [section for section in sections if not section.in_full]
    if mechanisms := [section for section in by_name if section.mechanism]:
        lines += ["", f"---- {BY_NAME} ----", *(line for section in mechanisms for line in listed(section))]
    # of a class that has several headings the first
    firsts = {section.owner: section for section in reversed(by_name) if not section.mechanism}
    if firsts:
        lines += ["", "---- more keys; --help=NAME lists them, as in --help=task ----",
                  *(line for section in reversed(firsts.values()) for line in listed(section))]
    return "\n".join(lines)


def listed(section):
    """The lines of a section of which the overview has the name alone."""
    words = textwrap.wrap(section.about, WIDTH - COLUMN)
    if section.mechanism:
        words += textwrap.wrap(f"--mechanism={', '.join(section.modes)}", WIDTH - COLUMN)
    return [f"  {section.name:<{COLUMN - 2}}{words[0]}", *(" " * COLUMN + line for line in words[1:])]


def about(word, classes):
    """What --help=WORD prints: the sections that are called so, that have a key or a mechanism called so, or
    keys that begin with it; nanoGPT's names of keys mean ours. UserError: there are none.
    """
    keys, sections, word = keys_of(classes), sections_of(classes), word.strip("-").replace("-", "_")
    if word not in keys and our_name(word) in keys:
        word = our_name(word)
    found = [section for section in sections if word in (section.name, *section.keys, *section.modes)]
    found = found or [section for section in sections
                      if any(name.startswith(f"{word}_") for name in section.keys)]
    if not found:
        names = {name for section in sections for name in (section.name, *section.keys, *section.modes)}
        suggestion = likely_name(word, sorted(names))
        raise UserError(f"--help={word}: there is no key, mechanism or heading of that name; "
                        + (f"did you mean --help={suggestion}?" if suggestion else "--help lists them"))
    # the sections of one class belong together, but for those that the overview shows in full
    owners = {section.owner for section in found if not section.in_full}
    lines = []
    for section in (section for section in sections if section in found or section.owner in owners):
        lines += [f"---- {section.heading if not section.mechanism else section.name} ----"]
        if section.mechanism:
            lines += [inspect.getdoc(section.mechanism), ""]
            for name, flags in section.modes.items():
                flags = {key: ",".join(value) if isinstance(value, list) else value
                         for key, value in flags.items()}
                start = f"  --mechanism={name}".ljust(COLUMN)
                lines += textwrap.wrap(" ".join(f"--{key}={value}" for key, value in flags.items()), WIDTH,
                                       initial_indent=start, subsequent_indent=" " * COLUMN)
            lines += [""]
        lines += [*rows(section.keys, keys), ""]
    return "\n".join(lines).rstrip()
