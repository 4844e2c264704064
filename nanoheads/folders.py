"""
Default folders, out/<name>: names that a person can type, and which of several with one name is meant.

A run is called after its scale and mechanisms, and its config.json says all the rest. A name that is taken
gets a number behind it: out/tiny-forget, then out/tiny-forget-2. It is taken where the folder holds a run, or
a study, of another configuration, as the folder itself says. The same command finds its own folder again.
"""

import re
from itertools import count
from pathlib import Path

LONGEST = 60  # characters of a name, its number aside


# ---- names ----

def cleaned(text):
    """A text in the characters that names of files have on every system and that no shell reads as more."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", text).strip("_").rstrip(".")


def setting_in_name(key, value):
    """key=value; of a path only its last part, or where that is a run's checkpoint the run's name."""
    if isinstance(value, str):
        parts = [part for part in re.split(r"[/\\]", value) if part not in ("", ".", "..")]
        if len(parts) > 1 and parts[-1] in ("best.pt", "ckpt.pt"):
            parts.pop()
        value = parts[-1] if parts else ""
    value = cleaned(str(value))
    return f"{key}={value}" if value else key


def joined(words, base="", longest=LONGEST):
    """base-word+word; where that is too long, the first words and how many more: tiny-moh+agency+3_more."""
    base = cleaned(base)[:2 * longest // 3].lstrip("-.")
    words = [cleaned(word) or "x" for word in words]
    start = base + "-" * bool(base and words)
    for kept in range(len(words), 0, -1):
        more = [f"{len(words) - kept}_more"] * (kept < len(words))
        if len(name := start + "+".join((*words[:kept], *more))) <= longest:
            return name
    if not words:
        return start
    more = f"+{len(words) - 1}_more" * (len(words) > 1)
    return start + words[0][:longest - len(start + more)] + more


# ---- which of several ----

def find(name, asked, files, asked_in, goes_on=False, free=()):
    """(the folder that a command means, a line where its name is taken by others or None).

    It is that of out/name, out/name-2, ... which holds what is asked for, the newest of several, and else the
    first that is free. asked: {key: value}. files: names of files; a folder without any of them is free.
    asked_in(folder): what was asked for there; None: it does not say, and then out/name itself is taken for
    what is asked for, since that is all that there was before folders had numbers. goes_on: the command
    begins nothing new, so where no folder holds what is asked for it means the newest that has the name.
    free: keys in which a folder may differ from what is asked for, where none holds exactly that.
    """
    def but_for(values, keys):
        return values and {key: value for key, value in values.items() if key not in keys}

    first, numbered = Path("out", name), re.compile(rf"{re.escape(name)}-([2-9]|[1-9]\d+)")
    several = {1: first, **{int(match[1]): path for path in first.parent.glob("*")
                            if (match := numbered.fullmatch(path.name))}}
    held = {number: path for number, path in several.items() if written(path, files)}
    there = {number: asked_in(path) for number, path in held.items()}
    for keys in ((), free):
        own = [path for number, path in held.items() if but_for(there[number], keys) == but_for(asked, keys)]
        if own:
            return max(own, key=lambda path: written(path, files)), None
    if goes_on and held:
        return max(held.values(), key=lambda path: written(path, files)), None
    if 1 not in held or there[1] is None:
        return first, None
    new = first.with_name(f"{name}-{next(number for number in count(2) if number not in held)}")
    return new, (f"{first} holds another configuration ({differences(there[1], asked)}): this one goes into "
                 f"{new}")


def written(folder, files):
    """When the newest of these files of a folder was written, in seconds; 0: none of them is there."""
    return max([(folder / file).stat().st_mtime for file in files if (folder / file).is_file()], default=0)


def differences(there, here, most=3):
    """What differs of two {key: value}, in words; a key that one lacks has its default there."""
    def said(values, key):
        text = repr(values[key]) if key in values else "its default"
        return text if len(text) <= 60 else f"{text[:59]}…"

    keys = [key for key in {**there, **here} if there.get(key, ...) != here.get(key, ...)]
    more = [f"{len(keys) - most} more"] if len(keys) > most else []
    return "; ".join([f"{key} is {said(there, key)} there and {said(here, key)} here"
                      for key in keys[:most]] + more)
