"""
Config files and --key=value arguments -> typed, validated dataclasses.

    python train.py config/x.py [config/y.py ...] [--key=value] [--key value] [--flag]
    python train.py --scale=tiny --mechanism=moh,unet_add [--key=value ...]

A config file is plain Python assignments and holds only what differs from the defaults; later files and then
the command line win. It is Python code, and reading it runs it: name only files that you trust. Values that
may be chosen stand in the type, a Literal. Two keys are the configurator's own: see Presets. Every problem is
reported at once, in plain lines, before anything is trained.
"""

import ast
import difflib
import functools
import linecache
import math
import os
import re
import reprlib
import runpy
import sys
import textwrap
import traceback
import types
import typing
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple, Optional

from nanoheads import other_names
from nanoheads.common import ROOT, UserError, number, say
from nanoheads.files import joined, setting_in_name

COMMENT_WIDE = 70  # characters of a key's description in a line of --help
TRUE, FALSE, NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")
Scale = Literal["tiny", "nano", "mid", "small", "paper"]


@dataclass
class Presets:
    """Two keys that set others: defaults to start from, over which every file and the command line win."""
    # ---- presets: keys that set others, each of which may be set by itself as well and then wins ----
    scale: Optional[Scale] = None        # start from config/<scale>.py; with another recipe: not its rates
    mechanism: str | list[str] | None = None  # turn these on, name,name for several, or mine.py:


# what a scale sets for its own recipe: with another one its default holds
OF_ITS_RECIPE = ("qk_max", "adamw_lr", "embed_lr", "muon_lr", "muon_momentum")


# ---- types ----

def alternatives(t):
    """The plain types and chosen values that `t` allows: Optional[Literal["a", 1]] -> ("a", 1, NoneType)."""
    if typing.get_origin(t) in (typing.Union, types.UnionType):
        return tuple(kind for part in typing.get_args(t) for kind in alternatives(part))
    if typing.get_origin(t) is Literal:
        return tuple(type(None) if value is None else value for value in typing.get_args(t))
    return (t,)


def is_choice(kind):
    """Whether one of alternatives() is a value out of a Literal, not a type."""
    return isinstance(kind, (str, int))


def items(kind):
    """The alternatives() of what is in a list; of anything else, none."""
    return alternatives(*typing.get_args(kind)) if typing.get_origin(kind) is list else ()


def choices(t):
    """The words that may be chosen in `t`, also inside of a list."""
    return [word for kind in alternatives(t) for word in (kind, *items(kind)) if isinstance(word, str)]


def type_name(t):
    """`t` as it is shown: "float or None", "cosine, trapezoid or None", "list of headwise or elementwise"."""
    def name(kind):
        if kind is type(None):
            return "None"
        if any(is_choice(item) for item in items(kind)):
            return f"list of {type_name(*typing.get_args(kind))}"
        return str(kind) if is_choice(kind) or typing.get_args(kind) else kind.__name__

    *names, last = [name(kind) for kind in alternatives(t)]
    return f"{', '.join(names)} or {last}" if names else last


def check(value, t):
    """`value` as type `t`, or ValueError: an int is a float, 1e3 an int, a bool neither, NaN nothing."""
    for kind in alternatives(t):
        if is_choice(kind):
            with suppress(ValueError):
                if check(value, type(kind)) == kind:
                    return kind
            continue
        base, item = typing.get_origin(kind) or kind, (typing.get_args(kind) or (None,))[0]
        if isinstance(value, bool) and base is not bool:
            continue
        if base is list and isinstance(value, (list, tuple)):
            return [check(v, item) for v in value] if item else list(value)
        if base is float and not math.isnan(number(value)):
            return float(value)
        if base is int and isinstance(value, float) and value.is_integer():
            return checked_size(int(value))
        if base is not float and isinstance(value, base):
            return checked_size(value)
    raise ValueError


def checked_size(value):
    """A value as it is. UserError where it is a whole number that no tensor or array takes."""
    if isinstance(value, int) and not -2**63 <= value < 2**63:
        raise UserError("is beyond 64 bits, which no size or number of a run needs")
    return value


def parse(text, t):
    """The value that `text`, from the command line, means for type `t`, or ValueError."""
    kinds, low = alternatives(t), text.lower()
    if text in kinds:  # a word that may be chosen
        return text
    if type(None) in kinds and low in NONE:
        return None
    if low in TRUE + FALSE and any(kind is bool or kind is (low in TRUE) for kind in kinds):
        return low in TRUE
    if str in kinds:
        return text
    try:
        return check(ast.literal_eval(text), t)
    except UserError:
        raise
    except (ValueError, SyntaxError, TypeError):  # such as a set of lists
        of_items = next((kind for kind in kinds if items(kind)), None)
        if of_items is None:
            raise ValueError
        inside = re.fullmatch(r"\[(.*)\]|\((.*)\)|(.*)", text, re.DOTALL)  # [a,b] as well as a,b
        words = inside[inside.lastindex].split(",")
        words = [word.strip(" '\"") for word in words if word.strip()]
        return [parse(word, *typing.get_args(of_items)) for word in words]


# ---- keys ----

def source_lines(cls):
    """The lines of a dataclass's source, and before them those of the dataclasses that it extends.

    The Options of a mechanism, a class inside of its class, get a heading: its first flag's name. Last are
    those of mechanisms in files of one's own.
    """
    lines = []
    for each in (*reversed(cls.__mro__[:-1]), *own_options(cls)):
        if each.__name__ == "Options":
            lines.append(f"    # ---- {next(iter(each.__annotations__))} ----")
        lines += classes_of(each.__module__)[each.__qualname__]
    return lines


@functools.cache  # inspect.getsource() would parse the file anew for each class
def classes_of(module):
    """{qualified name: its lines, dedented} of the classes in a module's source."""
    lines, found = linecache.getlines(sys.modules[module].__file__), {}

    def visit(node, path):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                name = f"{path}{child.name}"
                found[name] = textwrap.dedent("".join(lines[child.lineno - 1:child.end_lineno])).splitlines()
                visit(child, f"{name}.")
            elif not isinstance(child, ast.expr):
                visit(child, f"{path}{child.name}.<locals>." if hasattr(child, "name") else path)
    visit(ast.parse("".join(lines)), "")
    return found


def comments(cls):
    """{field: its comment}: behind the field in the source, and going on below it, indented further."""
    found, field = {}, None
    for line in source_lines(cls):
        if start := re.match(r"    (\w+):", line):
            field = start[1]
        elif not re.match(r"     +\S", line):
            field = None
        if field and (comment := re.search(r"#\s*(.*)", line)):
            found[field] = f"{found.get(field, '')} {comment[1]}".strip()
    return found


def own_options(cls):
    """The Options of mechanisms in files of one's own, whose flags a GPTConfig holds in its field `own`."""
    return cls.own_options() if hasattr(cls, "own_options") else []


def hints_of(cls):
    """{key: type} of all fields of a dataclass, and of its own_options()."""
    return {name: hint for each in (cls, *own_options(cls))
            for name, hint in typing.get_type_hints(each).items()}


def typed(values, cls):
    """Those of the values, {key: value}, that are fields of a dataclass, as their types have them.

    ValueError, which names the key, where one is of another type.
    """
    found = {}
    for key, t in hints_of(cls).items():
        if key in values:
            try:
                found[key] = check(values[key], t)
            except ValueError:
                raise ValueError(f"{key}={reprlib.repr(values[key])} is not {type_name(t)}") from None
    return found


@functools.cache  # reading the source takes 0.1 s
def keys_of(classes):
    """{key: (type, default, comment)} over all fields of the dataclasses, and of own_options()."""
    keys = {}
    for cls in classes:
        words, options, hints = comments(cls), own_options(cls), hints_of(cls)
        for f in (f for each in (cls, *options) for f in fields(each)):
            if f.name == "own":  # which holds flags and is none itself
                continue
            default = f.default if f.default is not MISSING else f.default_factory()
            keys[f.name] = hints[f.name], default, words.get(f.name, "")
    return keys


def near(word, names):
    """The name that was probably meant, or None: a letter or two off, or the only one it is a part of."""
    word, low = word.lower(), {name.lower(): name for name in names}
    # one letter of three may be wrong, two of eight: what differs more is another word
    close = difflib.get_close_matches(word, low, 1, 0.75 if len(word) > 3 else 0.66)
    inside = [name for name in low if word in name and len(word) > 2]
    for found in (close, [name for name in inside if name.startswith(word)], inside):
        if len(found) == 1:
            return low[found[0]]
    return None


def nearest(key, keys):
    """(the key that was probably meant or None, a few words about it)."""
    if not isinstance(key, str):  # out of a dict of flags
        return None, "a key must be a name in quotes"
    theirs = difflib.get_close_matches(key, other_names.NAMES, 1, 0.75)
    meant = near(key, keys) or (other_names.NAMES[theirs[0]][1] if theirs else None)
    meant = meant if meant in keys else None
    return meant, f"did you mean {meant}?" if meant else "--help lists the keys"


def help_text(classes, doc, mechanisms=()):
    """Every key with type, default and comment, under the headings of the dataclasses' source."""
    lines, keys = [doc.strip()], keys_of(classes)
    for line in (line for cls in classes for line in source_lines(cls)):
        if heading := re.match(r"    # (---- .*)", line):
            lines += ["", heading[1]]
        elif (field := re.match(r"    (\w+):", line)) and field[1] in keys:
            t, default, comment = keys[field[1]]
            key = f"  --{field[1]:<24}  {type_name(t):<31}  {default!r:<16}"
            words = textwrap.wrap(comment, COMMENT_WIDE)
            # a comment begins in its column, also where what is before it is too long to leave it that room
            at = len(f"  --{'':<24}  {'':<31}  {'':<16}  ")
            first = [] if len(key) + 2 > at else words[:1]
            lines += [(f"{key}  {first[0]}" if first else key).rstrip(),
                      *(" " * at + line for line in words[len(first):])]
            if field[1] == "mechanism":
                names = textwrap.wrap(", ".join(mechanisms), 100)
                lines += [f"      {line}" for line in names]
    return "\n".join(lines)


# ---- sources ----

def find_file(path):
    """A config file's path: looked for here, then in the repository. UserError."""
    found = next((p for p in (Path(path), ROOT / path) if p.is_file()), None)
    if found:
        return found
    if "=" in path:
        raise UserError(f"no config file {path}; a key takes two dashes: --{path.lstrip('-')}")
    # of two files with one name, the one whose folder is called as the one that was asked for
    files = sorted((ROOT / "config").rglob("[!_]*.py"), key=lambda p: p.parent.name == Path(path).parent.name)
    stems = {p.stem: p.relative_to(ROOT) for p in files}
    meant = near(Path(path).stem, stems)
    raise UserError(f"no config file {path}" + (f"; did you mean {stems[meant]}?" if meant else ""))


def where_it_failed(e, path):
    """What went wrong in which line of a file that was executed, in words."""
    lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path)]
    line = getattr(e, "lineno", None) or (lines[-1] if lines else "?")
    words = " ".join(str(getattr(e, "msg", e)).split())
    return f"line {line}: {type(e).__name__}: {words}"


def read_file(path, keys=()):
    """The public assignments of a config file, as a dict; what it imports is left out.

    keys: names under which an import is a mistake, too. UserError names the file and what is wrong in it.
    """
    found = find_file(path)
    try:
        names = runpy.run_path(str(found))
    except SystemExit as e:
        raise UserError(f"{path}, {where_it_failed(e, found)}: a config file cannot end the program")
    except Exception as e:
        raise UserError(f"{path}, {where_it_failed(e, found)}")
    public = {key: value for key, value in names.items() if not key.startswith("_")}
    code = {key for key, value in public.items() if isinstance(value, types.ModuleType) or callable(value)}
    imported = imports_of(found)
    for key in code:
        if key in keys or key not in imported and "*" not in imported:
            kind = "class" if isinstance(public[key], type) else (
                "module" if isinstance(public[key], types.ModuleType) else "function")
            raise UserError(f"{path}: {key} is a {kind}, and a config file holds values; a helper's name "
                            "begins with an underscore")
    return {key: value for key, value in public.items() if key not in code}


NAMING = ("mechanism", "mechanisms")  # keys of the command line and of config files
FILE = re.compile(r"(.+\.py)(?::(\w+))?")  # mine.py, or mine.py:mode


def of_config(path):
    """{"--mechanism": names} that a config file sets, where one of them is a file."""
    with suppress(UserError):  # of what is wrong with it the configurator speaks
        values = {key: value for key, value in read_file(path).items() if key in NAMING}
        lists = {key: value.split(",") if isinstance(value, str) else value for key, value in values.items()}
        return {f"--{key}": words for key, words in lists.items()
                if isinstance(words, list) and any(FILE.fullmatch(str(word).strip()) for word in words)}
    return {}


def names_own_files(argv):
    """Whether arguments, or a config file among them, name a mechanism by its file."""
    for before, arg in zip(["", *argv], argv):
        key, _, value = arg.partition("=")
        if key.startswith("--"):
            found = ".py" in value and key[2:] in (*NAMING, "own_mechanism")
        else:
            found = arg.endswith(".py") and (before[2:] in NAMING or of_config(arg))
        if found or ".py:" in arg:
            return True
    return False


def imports_of(path):
    """The names that the import statements of a Python file bind; "*" where one binds all of a module's."""
    nodes = ast.walk(ast.parse(path.read_bytes()))
    return {alias.asname or alias.name.split(".")[0] for node in nodes
            if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}


def split_args(argv, keys):
    """argv -> (files, [(key, text)]); a bare --flag is True; a bool takes a value only if it reads as one."""
    files, given, rest = [], [], list(argv)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            files.append(arg)
            continue
        key, eq, text = arg[2:].partition("=")
        key = key.replace("-", "_")
        if not eq:
            is_bool = key in keys and bool in alternatives(keys[key][0])
            takes = rest and not rest[0].startswith("--")
            if is_bool:
                takes = takes and rest[0].lower() in TRUE + FALSE + NONE
            text = rest.pop(0) if takes else "True" if is_bool else None
        given.append((key, text))
    return files, given


def read_values(settings, keys):
    """[(source, key, value, check or parse)], weakest first -> ({key: value}, [problems], {keys in them})."""
    values, bad, wrong = {}, [], set()
    for source, key, value, read in settings:
        if key not in keys:
            meant, words = nearest(key, keys)
            bad.append(f"{source}: unknown key {key}; {words}")
            wrong |= {meant} - {None}
            continue
        t = keys[key][0]
        if value is None and read is parse:
            bad.append(f"{source}: --{key} needs a value ({type_name(t)})")
            wrong.add(key)
            continue
        try:
            values[key] = read(value, t)
        except UserError as e:
            bad.append(f"{source}: {key}={value!r} {e}")
            wrong.add(key)
        except ValueError:
            words = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
            meant = [near(str(word), choices(t)) for word in words if word not in choices(t)]
            hint = f"; did you mean {meant[0]}?" if any(meant[:1]) else ""
            bad.append(f"{source}: {key}={value!r} is not {type_name(t)}{hint}")
            wrong.add(key)
    return values, bad, wrong


# ---- presets ----

def scale_of(path):
    """The scale that a config file is, or None: config/tiny.py means --scale=tiny."""
    with suppress(UserError):
        found = find_file(path).resolve()
        if found.parent == ROOT / "config" and found.stem in typing.get_args(Scale):
            return found.stem


def text_problems(config):
    """Yield a sentence for each text of a dataclass that is empty or holds a NUL, as no file's name can."""
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, str) and "\0" in value:
            yield f"{f.name}={value!r} holds a NUL character: take it out"
        elif isinstance(value, str) and not value.strip() and f.default != "":
            yield (f"{f.name} is empty, as it is when a variable of the shell is not set: give it a value or "
                   "leave it out")


def preset_values(scale, names, mechanisms, source):
    """What a scale and mechanisms, named in `source`, mean -> ([(source, key, value, check)], [problems])."""
    settings, bad, first = [], [], {}
    turn_on = {next(iter(flags)) for flags in mechanisms.values() if flags}
    if scale:
        file = f"config/{scale}.py"
        settings = [(file, key, value, check) for key, value in read_file(ROOT / file).items()]
    for name in names:
        if name not in mechanisms:
            meant = near(name, mechanisms)
            bad.append(f"{source}: unknown mechanism {name}; "
                       + (f"did you mean {meant}?" if meant else f"there are {', '.join(mechanisms)}"))
            continue
        # flags that turn one on belong to one name; others may be set twice, to one value
        clash = next((key for key, value in mechanisms[name].items() if key in first
                      and (key in turn_on or first[key][1] != value)), None)
        if clash:
            other = first[clash][0]
            bad.append(f"{source}: mechanisms {other} and {name} exclude each other: both set {clash}")
            continue
        first.update({key: (name, value) for key, value in mechanisms[name].items()})
        settings += [(f"mechanism {name}", key, value, check) for key, value in mechanisms[name].items()]
    return settings, bad


def run_name(scale, names, files, flags):
    """What a run is called: tiny-moh+unet_add, tiny-routing=published; without a scale after its last file.

    files: those that set more than presets; flags: {key: value} of the command line that turn a mechanism on.
    What else is set is no part of it: folders.find() tells runs of one name apart by a number.
    """
    base = "-".join(filter(None, (scale, files and Path(files[-1]).stem))) or "gpt"
    return joined([*names, *(setting_in_name(key, value) for key, value in flags.items())], base)


# ---- all of it ----

def in_files(files, presets, keys=()):
    """([(file, key, value, check)], [problems]) of config files; presets: a scale's own file is its name.

    keys: see read_file().
    """
    settings, bad = [], []
    for path in files:
        try:
            values = {"scale": scale_of(path)} if presets and scale_of(path) else read_file(path, keys)
            settings += [(path, key, value, check) for key, value in values.items()]
        except UserError as e:
            bad.append(str(e))
    return settings, bad


class Resolved(NamedTuple):
    """What every key is set to: see resolve()."""

    scale: Optional[str]
    mechanisms: list  # names out of `mechanism`
    values: dict    # {key: value} of what is set
    sources: dict   # {key: where it is set: a file, a mechanism, the command line}
    folder: str     # out/<name>, by what is set
    problems: list  # sentences
    notes: list     # lines to print
    wrong: set      # keys that problems are about
    lost: bool      # whether it is not known what else would have been set
    of_run: dict    # {key: value} out of `values` that `base` alone sets


def resolve(classes, argv, mechanisms=None, more=None, base=None):
    """What the fields of these dataclasses are set to, by files and arguments, as Resolved.

    A value comes from one of six places, and the later wins:
        0. `base`, (where it comes from, {key: value}): what the run that goes on was asked for
        1. config/<scale>.py, of --scale; without one, where a config file is written for nanoGPT, what
           nanoGPT's train.py sets before it reads that file
        2. the flags of each mechanism of --mechanism
        3. the config files, in their order
        4. `more`, {where it comes from: {key: value}}, from the program that calls this
        5. the command line
    Scale and mechanism are themselves set in 3 to 5. What nobody sets has the default of its dataclass; where
    that is None, the recipe says what it means (model.RECIPES), or the optimizer (TrainConfig.for_recipe()).
    """
    presets = () if mechanisms is None else (Presets,)
    keys = keys_of((*presets, *classes))
    files, texts = split_args(argv, {**other_names.KEYS, **keys})

    # what is set by hand, 3 to 5
    explicit, problems = in_files(files, presets, keys)
    lost = bool(problems)  # a file that cannot be read may have set anything
    for source, values in (more or {}).items():
        explicit += [(source, key, value, check) for key, value in values.items()]
    explicit += [("command line", key, text, parse) for key, text in texts]
    ours = [each for each in explicit if each[1] in keys]
    values = read_values(ours, keys)[0]
    sources = {key: source for source, key, *_ in ours if key in values}

    # what scale and mechanisms set, 1 and 2
    scale, names, weaker, weaker_sources, bad_presets = None, [], {}, {}, []
    if presets:
        scale, names = values.pop("scale", None), values.pop("mechanism", None) or []
        names = re.findall(r"\w+", names) if isinstance(names, str) else names
        preset, bad_presets = preset_values(scale, names, mechanisms, sources.get("mechanism"))
        lost = lost or bool(bad_presets)
        weaker, bad, _ = read_values(preset, keys_of(classes))
        bad_presets += bad
        weaker_sources = {key: source for source, key, *_ in preset}
        # a scale's rates were tuned for its own recipe: with another one they mean nothing
        if values.get("recipe", weaker.get("recipe")) != weaker.get("recipe"):
            weaker = {key: value for key, value in weaker.items() if key not in OF_ITS_RECIPE}

    # what the run that goes on was asked for, 0
    run, asked = base or (None, {})
    of_run, bad, _ = read_values([(run, key, value, check) for key, value in asked.items()], keys)
    problems += bad
    weaker = {**of_run, **weaker}
    weaker_sources = {**dict.fromkeys(of_run, run), **weaker_sources}

    known = {**{key: default for key, (_, default, _) in keys.items()}, **weaker, **values}
    notes = []
    if "adamw_lr" in keys and not scale and (file := other_names.for_nanogpt(files, explicit)):
        set_by_hand = read_values(explicit, {**other_names.KEYS, **keys})[0]
        defaults = other_names.nanogpt_defaults(set_by_hand, known)
        words = ", ".join(f"{key}={value}" for key, value in defaults.items())
        notes = [f"{file} is written for nanoGPT, whose defaults hold for what it leaves open: {words}"]
        known = {**known, **defaults}
        weaker = {**defaults, **weaker}
        weaker_sources = {**dict.fromkeys(defaults, "nanoGPT's default"), **weaker_sources}

    # nanoGPT's names and a write-up's, whose meaning depends on all that is known by now
    explicit, translated, bad = in_our_names(explicit, keys, known)
    notes += translated
    problems += bad
    values, bad, wrong = read_values(explicit, keys)
    sources = {key: source for source, key, *_ in explicit if key in values}
    problems += bad + bad_presets
    lost = lost or bool(wrong & {"scale", "mechanism"})

    # the name of a run's folder says which mechanisms are on, also those that a flag turns on by itself
    turn_on = {next(iter(flags), None) for flags in (mechanisms or {}).values()}
    before = [each for each in explicit if each[0] != "command line"]
    without = {**weaker, **read_values(before, keys)[0]}
    on_the_line = [key for source, key, *_ in explicit if source == "command line"]
    differ = {key: values[key] for key in on_the_line if key in values and key in turn_on
              and values[key] != without.get(key, keys[key][1])}
    setting = {source for source, key, *_ in before if key not in ("scale", "mechanism")}
    folder = f"out/{run_name(scale, names, [f for f in files if f in setting] if scale else files, differ)}"

    for key in ("scale", "mechanism") if presets else ():
        values.pop(key, None)
    values = {**weaker, **values}
    sources = {key: sources.get(key) or weaker_sources[key] for key in values}
    of_run = {key: value for key, value in of_run.items() if sources[key] == run}
    return Resolved(scale, names, values, sources, folder, problems, notes, wrong, lost, of_run)


def set_by_hand(argv, classes):
    """{key: value} that files and arguments set of these dataclasses, before anything of it is checked."""
    keys = keys_of((Presets, *classes))
    files, texts = split_args(argv, {**other_names.KEYS, **keys})
    settings = in_files(files, (Presets,))[0] + [("command line", key, text, parse) for key, text in texts]
    return read_values([each for each in settings if each[1] in keys], keys)[0]


def in_our_names(settings, keys, known):
    """(settings under the names of the keys here, a line for each that had another, [problems]).

    known: {key: value} of all keys, as they are without what is translated, see other_names.meanings().
    """
    if "adamw_lr" not in keys:  # not a program that trains
        return settings, [], []
    theirs = [each for each in settings if each[1] in other_names.NAMES and each[1] not in keys]
    values, problems, _ = read_values(theirs, other_names.KEYS)
    meanings = other_names.meanings(values, known)
    last = {each[1]: each for each in theirs}
    found, lines = [], []
    for each in settings:
        source, key, value, _ = each
        if key == "init_from" and value in ("scratch", "resume"):  # nanoGPT's words for two other keys
            found += [(source, "init_from", None, check), (source, "resume", value == "resume", check)]
            lines.append(f"{source}: init_from={value} sets resume={value == 'resume'}")
        elif key in keys or key not in other_names.NAMES:
            found.append(each)
        elif each is last[key] and key in meanings:
            sets, words = meanings[key]
            found += [(source, ours, value, check) for ours, value in sets.items()]
            what = ", ".join(f"{ours}={value}" for ours, value in sets.items()) or "nothing here"
            lines.append(f"{source}: {key}={values[key]} sets {what}{words and f': {words}'}")
    return found, lines, problems


def load(classes, argv, doc="", **how):
    """One instance per dataclass, from config files and arguments; see load_given()."""
    return load_given(classes, argv, doc, **how)[0]


def load_given(classes, argv, doc="", together=None, more=None, mechanisms=None, base=None):
    """([one instance per dataclass], {key: value} that was set), from config files and arguments.

    more, mechanisms, base: see resolve(); what base alone says is not among what was set. With mechanisms
    there are the keys of Presets too, and an out_dir that is not set becomes out/<scale>-<mechanisms>.
    `--help` prints every key, beside other arguments with the values that they lead to, and exits.

    Raises UserError with every problem there is: unknown keys, wrong types, what each class's problems()
    says, and what together(*instances) says of all of them side by side.
    """
    wants_help = "--help" in argv or "-h" in argv
    argv = [arg for arg in argv if arg not in ("--help", "-h")]
    found = resolve(classes, argv, mechanisms, more, base)
    if wants_help and not argv:
        presets = () if mechanisms is None else (Presets,)
        print(help_text((*presets, *classes), doc, mechanisms or ()))
        raise SystemExit(0)
    values, problems = dict(found.values), list(found.problems)
    if mechanisms is not None and values.get("out_dir") is None:
        values["out_dir"] = found.folder
        found.sources["out_dir"] = "a name made of scale and mechanisms"
    made = []
    for cls in classes:
        of_class = keys_of((cls,))
        made.append(cls(**{key: value for key, value in values.items() if key in of_class}))
    if not found.lost:
        bad = [p for instance in made for p in instance.problems()] + (together(*made) if together else [])
        # a key named in `wrong` kept its default, which nobody asked for: what follows from that is left out
        problems += [p for p in bad if not any(re.search(rf"\b{key}\b", p) for key in found.wrong)]
    if problems:
        raise UserError("\n".join(problems))
    if wants_help:
        print(help_of_values(made, found.sources))
        raise SystemExit(0)
    for note in [*found.notes, *what_the_run_says(found, made, base)]:
        print_once(note)
    return made, {key: value for key, value in found.values.items() if key not in found.of_run}


def what_the_run_says(found, made, base):
    """Yield a line about what the configs that were made have from `base` alone, where that is anything."""
    words = []
    for config in reversed(made) if found.of_run else ():  # the text first
        keys = keys_of((type(config),))
        bare = type(config)(**{key: value for key, value in found.values.items()
                               if key in keys and key not in found.of_run})
        words += [f"{key}={value}" for key, value in found.of_run.items()
                  if key in keys and getattr(bare, key) != value]
    if words:
        more = f" and {len(words) - 6} more" if len(words) > 6 else ""
        yield f"{base[0]} says what this command leaves open: {', '.join(words[:6])}{more}"


def help_of_values(made, sources):
    """Every key of these configs with its value, and where that comes from."""
    lines = ["Every key, its value for these arguments, and where that comes from.", ""]
    recipe = getattr(made[0], "recipe", None)
    for config in made:
        settled = config.for_recipe(recipe) if hasattr(config, "for_recipe") else config
        for key, (_, default, _) in keys_of((type(config),)).items():
            value = getattr(settled, key)
            source = sources.get(key) or "default"
            if key not in sources and value != default:
                source = f"follows from recipe={recipe} and what is set"
            lines.append(f"  --{key:<24}  {value!r:<32}  {source}")
    return "\n".join(lines)


def print_once(line):
    """Print a line, under torchrun on the first rank alone."""
    if os.environ.get("RANK", "0") == "0":
        say(line, flush=True)
