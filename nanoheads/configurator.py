"""
Config files and --key=value arguments -> typed, validated dataclasses.

    python train.py config/x.py [config/y.py ...] [--key=value] [--key value] [--flag]
    python train.py --scale=tiny --mechanism=moh,unet_add [--key=value ...]

A config file is plain Python assignments and holds only what differs from the defaults; later files and then
the command line win. It is Python code, and reading it runs it: name only files that you trust. Values that
may be chosen stand in the type, a Literal. Every problem is reported at once, in plain lines, before anything
is trained.

How a flag reaches its dataclass, in three steps:
    read()      takes the command line apart, once, into Settings: (source, key, value)
    resolve()   gives each its type, adds what a scale and mechanisms by name set, and says which one wins
    made()      makes the dataclasses, has them checked, and refuses or prints what there is to say
The keys are not here, but for the four of Presets: those of a model are GPTConfig's in model.py, those of
training TrainConfig's in config.py. What nanoGPT calls otherwise is translated in other_names.py.
"""

import ast
import difflib
import math
import os
import re
import reprlib
import runpy
import textwrap
import traceback
import types
import typing
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Optional

from nanoheads import other_names
from nanoheads.common import ROOT, UserError, number, say
from nanoheads.files import joined, setting_in_name

HELP_WIDE = 70  # characters of a key's description in a line of --help
TRUE, FALSE, NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")
Scale = Literal["task", "tiny", "nano", "mid", "small", "paper"]


@dataclass
class Presets:
    """Keys of train.py that are no part of a run's config: two set others, and two say what is done."""
    scale: Optional[Scale] = field(default=None, metadata=dict(
        help="start from config/<scale>.py; with another recipe: not its rates",
        section="presets: keys that set others, each of which may be set by itself as well and then wins"))
    mechanism: str | list[str] | None = field(default=None, metadata=dict(
        help="turn these on, name,name for several, or mine.py:"))
    check: bool = field(default=False, metadata=dict(
        help="try what the mechanisms named promise on a small model, and train nothing",
        section="what is done"))
    trust_code: bool = field(default=False, metadata=dict(
        help="run the files of mechanisms of one's own that lie beside the checkpoints that are read"))


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
    of_their_types = {}
    for key, t in hints_of(cls).items():
        if key in values:
            try:
                of_their_types[key] = check(values[key], t)
            except ValueError:
                raise ValueError(f"{key}={reprlib.repr(values[key])} is not {type_name(t)}") from None
    return of_their_types


class Key(NamedTuple):
    type: object
    default: object
    help: str


def keys_of(classes):
    """{key: Key} over all fields of the dataclasses, and of own_options()."""
    keys = {}
    for cls in classes:
        hints = hints_of(cls)
        for _, f in headed_fields(cls):
            default = f.default if f.default is not MISSING else f.default_factory()
            keys[f.name] = Key(hints[f.name], default, f.metadata.get("help", ""))
    return keys


def headed_fields(cls):
    """Yield (the heading above it in --help or "", field) of a dataclass, and of own_options().

    Those of a class that it extends come first. The Options of a mechanism, a class inside of its class, are
    headed by the flag that turns it on.
    """
    seen = {"own"}  # which holds flags and is none itself
    for each in (*reversed(cls.__mro__), *own_options(cls)):
        new = [f for f in fields(each) if f.name not in seen] if is_dataclass(each) else []
        for f in new:
            first = each.__name__ == "Options" and f is new[0]
            yield f.name if first else f.metadata.get("section", ""), f
        seen |= {f.name for f in new}


def near(word, names):
    """The name that was probably meant, or None: a letter or two off, or the only one it is a part of."""
    word, low = word.lower(), {name.lower(): name for name in names}
    # one letter of three may be wrong, two of eight: what differs more is another word
    close = difflib.get_close_matches(word, low, 1, 0.75 if len(word) > 3 else 0.66)
    inside = [name for name in low if word in name and len(word) > 2]
    for candidates in (close, [name for name in inside if name.startswith(word)], inside):
        if len(candidates) == 1:
            return low[candidates[0]]
    return None


def nearest(key, keys):
    """(the key that was probably meant or None, a few words about it)."""
    if not isinstance(key, str):  # out of a dict of flags
        return None, "a key must be a name in quotes"
    other = difflib.get_close_matches(key, other_names.NAMES, 1, 0.75)
    meant = near(key, keys) or (other_names.NAMES[other[0]][1] if other else None)
    meant = meant if meant in keys else None
    return meant, f"did you mean {meant}?" if meant else "--help lists the keys"


def help_text(classes, doc, mechanisms=(), only=None):
    """Every key with type, default and help, under their headings; only: those to show, None: all."""
    lines = [doc.strip()]
    for cls in classes:
        keys, above = keys_of((cls,)), ""
        for heading, f in headed_fields(cls):
            above = heading or above
            if only is not None and f.name not in only:
                continue
            if above:
                lines += ["", f"---- {above} ----"]
                above = ""
            t, default, about = keys[f.name]
            key = f"  --{f.name:<24}  {type_name(t):<31}  {default!r:<16}"
            words = textwrap.wrap(about, HELP_WIDE)
            # help begins in its column, also where what is before it is too long to leave it that room
            column = len(f"  --{'':<24}  {'':<31}  {'':<16}  ")
            first = [] if len(key) + 2 > column else words[:1]
            lines += [(f"{key}  {first[0]}" if first else key).rstrip(),
                      *(" " * column + line for line in words[len(first):])]
            if f.name == "mechanism":
                lines += [f"      {line}" for line in textwrap.wrap(", ".join(mechanisms), 100)]
    return "\n".join(lines)


# ---- sources ----

def find_file(path):
    """A config file's path: looked for here, then in the repository. UserError."""
    file = next((p for p in (Path(path), ROOT / path) if p.is_file()), None)
    if file:
        return file
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
    file = find_file(path)
    try:
        names = runpy.run_path(str(file))
    except SystemExit as e:
        raise UserError(f"{path}, {where_it_failed(e, file)}: a config file cannot end the program")
    except Exception as e:
        raise UserError(f"{path}, {where_it_failed(e, file)}")
    public = {key: value for key, value in names.items() if not key.startswith("_")}
    code = {key: value for key, value in public.items()
            if isinstance(value, types.ModuleType) or callable(value)}
    for key, value in code.items():
        if key in keys or getattr(value, "__module__", None) == names["__name__"]:  # no import
            kind = "class" if isinstance(value, type) else (
                "module" if isinstance(value, types.ModuleType) else "function")
            raise UserError(f"{path}: {key} is a {kind}, and a config file holds values; a helper's name "
                            "begins with an underscore")
    return {key: value for key, value in public.items() if key not in code}


def split_args(argv, keys):
    """argv -> (files, [(key, text)]); a bare --flag is True; a bool takes a value only if it reads as one.

    A key that is none of `keys` may be a flag out of a file of one's own, which is not read yet: it takes no
    config file for its value. What is bare and not known to be a flag has the text None.
    """
    files, given, rest = [], [], list(argv)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            files.append(arg)
            continue
        key, eq, text = arg[2:].partition("=")
        key = key.replace("-", "_")
        if not eq:
            is_bool = key in keys and bool in alternatives(keys[key].type)
            takes = rest and not rest[0].startswith("--")
            if is_bool:
                takes = takes and rest[0].lower() in TRUE + FALSE + NONE
            elif key not in keys:
                takes = takes and not rest[0].endswith(".py")
            text = rest.pop(0) if takes else "True" if is_bool else None
        given.append((key, text))
    return files, given


class Setting(NamedTuple):
    """What one place sets a key to. On the command line that is a text, None where it is missing, until
    with_types() has read it.
    """
    source: str
    key: str
    value: object


COMMAND_LINE = "command line"
BY_TASK = "the scale of tasks"  # that --task alone implies: a checkpoint's own sizes win over it
NAMING = ("mechanism", "mechanisms", "own_mechanism")  # keys that name mechanisms
FILE = re.compile(r"(.+\.py)(?::(\w+))?")  # mine.py, or mine.py:mode


@dataclass
class Command:
    """A command line, taken apart once, by read(): what its files and its arguments set."""
    classes: tuple     # the dataclasses whose keys it may set
    files: list        # config files, in their order
    settings: list     # Settings of the files, then of the arguments: the later wins
    problems: list     # what is wrong with files that cannot be read
    wants_help: bool

    @property
    def keys(self):
        return keys_of(self.classes)

    def values(self, *keys):
        """{key: value} of what is set by hand, of these keys, before anything of it is refused."""
        return {each.key: each.value for each in with_types(self.settings, self.keys)[0] if each.key in keys}

    def names(self):
        """{key: [name]} of what is set last of the keys of NAMING; any name may be that of a file."""
        keys = {*NAMING} & {*self.keys}
        last = {each.key: each.value for each in self.settings if each.key in keys}
        lists = {key: value.strip("[]()").split(",") if isinstance(value, str) else value
                 for key, value in last.items()}
        return {key: [str(word).strip(" '\"") for word in words] for key, words in lists.items()
                if isinstance(words, list)}

    @property
    def names_own_files(self):
        return any(FILE.fullmatch(word) for words in self.names().values() for word in words)

    def put(self, key, text):
        """Set a key as an argument does, in the place of those that set it."""
        others = [each for each in self.settings if each[:2] != (COMMAND_LINE, key)]
        self.settings = [*others, Setting(COMMAND_LINE, key, text)]

    def words(self, but=()):
        """The arguments that mean the same, without some keys: the files, then --key=text."""
        bools = {key for key, (t, *_) in self.keys.items() if bool in alternatives(t)}
        given = {each.key: each.value for each in self.settings if each.source == COMMAND_LINE}
        return [*self.files, *(f"--{key}" if text == "True" and key in bools else f"--{key}={text}"
                               for key, text in given.items() if key not in but)]


def read(classes, argv, more=None):
    """The Command that argv is. A config file that cannot be read is a problem of it.

    more: {where it comes from: {key: value}}, from the program that calls this: it wins over the files, and
    the arguments win over it.
    """
    keys, wants_help = with_theirs(keys_of(classes)), "--help" in argv or "-h" in argv
    files, given = split_args([arg for arg in argv if arg not in ("--help", "-h")], keys)
    command = Command(classes, files, [], [], wants_help)
    for path in command.files:
        try:
            scale = Presets in classes and scale_of(path)  # a scale's own file is its name
            values = {"scale": scale} if scale else read_file(path, keys)
            command.settings += [Setting(path, key, value) for key, value in values.items()]
        except UserError as e:
            command.problems.append(str(e))
    for source, values in (more or {}).items():
        command.settings += [Setting(source, key, value) for key, value in values.items()]
    command.settings += [Setting(COMMAND_LINE, key, text) for key, text in given]
    return command


def with_theirs(keys):
    """{key: Key} of a program, beside them the keys of other programs where it trains."""
    theirs = {name: Key(t, None, "") for name, (t, _) in other_names.NAMES.items()}
    return {**theirs, **keys} if "adamw_lr" in keys else keys


def with_types(settings, keys):
    """([Setting] with values of their keys' types, without those that are of another, [problems], {keys in
    problems}). Keys of other programs keep their names, see in_our_names().
    """
    of_their_types, problems, wrong, known = [], [], set(), with_theirs(keys)
    for source, key, value in settings:
        if key not in known:
            meant, words = nearest(key, keys)
            if "settings" in keys and not meant:  # of a study, in which other keys are train.py's
                words = f"a key of train.py goes into --settings=\"{{'{key}': ...}}\"; {words}"
            problems.append(f"{source}: unknown key {key}; {words}")
            wrong |= {meant} - {None}
            continue
        t = known[key].type
        is_text = source == COMMAND_LINE
        if value is None and is_text and bool in alternatives(t):
            value = "True"
        if value is None and is_text:
            problems.append(f"{source}: --{key} needs a value ({type_name(t)})")
            wrong.add(key)
            continue
        try:
            of_their_types.append(Setting(source, key, parse(value, t) if is_text else check(value, t)))
        except UserError as e:
            problems.append(f"{source}: {key}={value!r} {e}")
            wrong.add(key)
        except ValueError:
            words = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
            meant = [near(str(word), choices(t)) for word in words if word not in choices(t)]
            hint = f"; did you mean {meant[0]}?" if any(meant[:1]) else ""
            problems.append(f"{source}: {key}={value!r} is not {type_name(t)}{hint}")
            wrong.add(key)
    return of_their_types, problems, wrong


# ---- presets ----

def scale_of(path):
    """The scale that a config file is, or None: config/tiny.py means --scale=tiny."""
    with suppress(UserError):
        file = find_file(path).resolve()
        if file.parent == ROOT / "config" and file.stem in typing.get_args(Scale):
            return file.stem


def text_problems(config):
    """Yield a sentence for each text of a dataclass that is empty or holds a NUL, as no file's name can."""
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, str) and "\0" in value:
            yield f"{f.name}={value!r} holds a NUL character: take it out"
        elif isinstance(value, str) and not value.strip() and f.default != "":
            yield (f"{f.name} is empty, as it is when a variable of the shell is not set: give it a value or "
                   "leave it out")


def preset_settings(by_hand, mechanisms, files):
    """(the scale, [names of mechanisms], [Setting] of what these mean, [problems]), by what is set by hand.

    mechanisms: {name: flags}. files: the config files; a task without one is at its own scale.
    """
    by_hand = {each.key: each for each in by_hand}
    scale = by_hand["scale"].value if "scale" in by_hand else None
    implied = not scale and not files and "task" in by_hand and by_hand["task"].value
    scale = "task" if implied else scale
    source, _, names = by_hand.get("mechanism", (None, None, None))
    names = re.findall(r"\w+", names) if isinstance(names, str) else names or []
    settings, problems, set_by = [], [], {}  # {flag: (name that sets it, value)}
    turn_on = {next(iter(flags)) for flags in mechanisms.values() if flags}
    if scale:
        file = f"config/{scale}.py"
        values = read_file(str(ROOT / file))
        # a scale's rates were tuned for its own recipe: with another one they mean nothing
        other = "recipe" in by_hand and by_hand["recipe"].value != values.get("recipe")
        settings = [Setting(BY_TASK if implied else file, key, value) for key, value in values.items()
                    if not (other and key in OF_ITS_RECIPE)]
    for name in names:
        if name not in mechanisms:
            meant = near(name, mechanisms)
            known = (f"there are {', '.join(mechanisms)}; a class in model.py must be in a list there, as "
                     "HEAD_MECHANISMS, and one in a file of your own is named by the file, mine.py")
            problems.append(f"{source}: unknown mechanism {name}; "
                            + (f"did you mean {meant}?" if meant else known))
            continue
        # flags that turn one on belong to one name; others may be set twice, to one value
        clash = next((key for key, value in mechanisms[name].items() if key in set_by
                      and (key in turn_on or set_by[key][1] != value)), None)
        if clash:
            other = set_by[clash][0]
            problems.append(f"{source}: mechanisms {other} and {name} exclude each other: both set {clash}")
            continue
        set_by.update({key: (name, value) for key, value in mechanisms[name].items()})
        settings += [Setting(f"mechanism {name}", key, value) for key, value in mechanisms[name].items()]
    return scale, names, settings, problems


def run_name(scale, names, files, flags):
    """What a run is called: tiny-moh+unet_add, tiny-routing=published; without a scale after its last file.

    files: those that set more than presets; flags: {key: value} of the command line that turn a mechanism on.
    What else is set is no part of it: files.find() tells runs of one name apart by a number.
    """
    base = "-".join(filter(None, (scale, files and Path(files[-1]).stem))) or "gpt"
    return joined([*names, *(setting_in_name(key, value) for key, value in flags.items())], base)


# ---- all of it ----

class Resolved(NamedTuple):
    """What every key is set to: see resolve()."""

    scale: Optional[str]
    mechanisms: list  # names out of `mechanism`
    settings: dict  # {key: Setting} of what is set
    folder: str     # out/<name>, by what is set
    problems: list  # sentences
    notes: list     # lines to print
    wrong: set      # keys that problems are about
    lost: bool      # whether it is not known what else would have been set


def resolve(command, mechanisms=None, base=None):
    """What the keys of a Command's dataclasses are set to, as Resolved.

    A value comes from one of five places, and the later wins:
        0. `base`, (where it comes from, {key: value}): what the run that goes on was asked for
        1. config/<scale>.py, of --scale; without one, where a config file is written for nanoGPT, what
           nanoGPT's train.py sets before it reads that file
        2. the flags of each mechanism of --mechanism, out of `mechanisms`, {name: flags}
        3. the config files, in their order
        4. the command line
    Scale and mechanism are themselves set in 3 and 4. What nobody sets has the default of its dataclass;
    where that is None, the recipe says what it means (model.RECIPES), or the optimizer
    (TrainConfig.for_recipe()).
    """
    keys, mechanisms, notes = keys_of(command.classes), mechanisms or {}, []
    preset_keys = keys_of((Presets,)) if Presets in command.classes else {}

    def values(*settings):
        """{key: value} of all keys, the later of these Settings wins."""
        return {**{key: each.default for key, each in keys.items()},
                **{each.key: each.value for each in settings}}

    # what is set by hand, and below that what scale, mechanisms and the run that goes on set
    by_hand, bad, wrong = with_types(command.settings, keys)
    scale, names, presets, bad_presets = preset_settings(
        by_hand, mechanisms, command.files) if preset_keys else (None, [], [], [])
    asked = [Setting(base[0], *each) for each in base[1].items()] if base else []
    weaker, bad_weaker, _ = with_types([*asked, *presets], keys)
    lost = bool(command.problems or bad_presets or wrong & {"scale", "mechanism"})

    # nanoGPT's defaults, and its names and a write-up's, whose meaning depends on all that is known by now
    if "adamw_lr" in keys and not scale and (file := other_names.for_nanogpt(command.files, by_hand)):
        defaults = other_names.nanogpt_defaults({each.key: each.value for each in by_hand},
                                                values(*weaker, *by_hand))
        words = ", ".join(f"{key}={value}" for key, value in defaults.items())
        notes = [f"{file} is written for nanoGPT, whose defaults hold for what it leaves open: {words}"]
        weaker = [*(Setting("nanoGPT's default", *each) for each in defaults.items()), *weaker]
    by_hand, lines = in_our_names(by_hand, keys, values(*weaker, *by_hand))

    # the name of a run's folder says which mechanisms are on, also those that a flag turns on by itself
    turn_on = {next(iter(flags), None) for flags in mechanisms.values()}
    before = [each for each in by_hand if each.source != COMMAND_LINE]
    without = values(*weaker, *before)
    settings = {each.key: each for each in [*weaker, *by_hand] if each.key not in preset_keys}
    differ = {key: each.value for key, each in settings.items()
              if each.source == COMMAND_LINE and key in turn_on and each.value != without[key]}
    setting = {each.source for each in before if each.key not in preset_keys}
    files = [file for file in command.files if file in setting or not scale]
    tasks = [each.value for each in by_hand if each.key == "task"] if preset_keys else []
    task = tasks[-1] if tasks else None
    begin = "-".join(filter(None, (None if task and scale == "task" else scale, task)))
    folder = f"out/{run_name(begin, names, files, differ)}"

    problems = [*command.problems, *bad, *bad_presets, *bad_weaker]
    return Resolved(scale, names, settings, folder, problems, notes + lines, wrong, lost)


def in_our_names(settings, keys, known):
    """(typed settings under the names of the keys here, a line for each that had another).

    known: {key: value} of all keys, as they are without what is translated, see other_names.meanings().
    """
    last = {each.key: each for each in settings if each.key not in keys}
    meanings = {}
    if last:
        meanings = other_names.meanings({key: each.value for key, each in last.items()}, known)
    translated, lines = [], []
    for each in settings:
        source, key, value = each
        if key == "init_from" and value in ("scratch", "resume") and "adamw_lr" in keys:
            # nanoGPT's words for two other keys
            translated += [Setting(source, "init_from", None), Setting(source, "resume", value == "resume")]
            lines.append(f"{source}: init_from={value} sets resume={value == 'resume'}")
        elif key in keys:
            translated.append(each)
        elif each is last[key] and key in meanings:
            sets, words = meanings[key]
            translated += [Setting(source, *pair) for pair in sets.items()]
            what = ", ".join(f"{ours}={value}" for ours, value in sets.items()) or "nothing here"
            lines.append(f"{source}: {key}={value} sets {what}{words and f': {words}'}")
    return translated, lines


def load(classes, argv, more=None):
    """One instance per dataclass, from config files and arguments: see read() and made()."""
    return made(read(classes, argv, more))[0]


def made(command, doc="", mechanisms=None, base=None, together=None):
    """([one instance per dataclass], {key: value} that was set) of a Command; none of Presets, which is no
    config.

    mechanisms, base: see resolve(); what base alone says is not among what was set. With Presets an out_dir
    that is not set becomes out/<scale>-<mechanisms>. `--help` prints every key, beside other arguments with
    the values that they lead to, and exits.

    Raises UserError with every problem there is: unknown keys, wrong types, what each class's problems()
    says, and what together(*instances) says of all of them side by side.
    """
    if command.wants_help and not (command.files or command.settings):
        print(help_text(command.classes, doc, mechanisms or ()))
        raise SystemExit(0)
    resolved = resolve(command, mechanisms, base)
    settings, problems = dict(resolved.settings), list(resolved.problems)
    if Presets in command.classes and ("out_dir" not in settings or settings["out_dir"].value is None):
        settings["out_dir"] = Setting("a name made of scale and mechanisms", "out_dir", resolved.folder)
    classes = [cls for cls in command.classes if cls is not Presets]
    configs = [instance(cls, settings) for cls in classes]
    if not resolved.lost:
        bad = [p for config in configs for p in config.problems()] + (together(*configs) if together else [])
        # a key named in `wrong` kept its default, which nobody asked for: what follows from that is left out
        problems += [p for p in bad if not any(re.search(rf"\b{key}\b", p) for key in resolved.wrong)]
    if problems:
        raise UserError("\n".join(problems))
    if command.wants_help:
        print(help_of_values(configs, settings))
        raise SystemExit(0)
    given = {key: each for key, each in resolved.settings.items() if not base or each.source != base[0]}
    for note in [*resolved.notes, *what_the_run_says(configs, resolved.settings, given, base)]:
        print_once(note)
    return configs, {key: each.value for key, each in given.items() if each.source != BY_TASK}


def instance(cls, settings):
    """A dataclass of those of {key: Setting} that are its own."""
    keys = keys_of((cls,))
    return cls(**{key: each.value for key, each in settings.items() if key in keys})


def what_the_run_says(configs, settings, given, base):
    """Yield a line about what configs have from `base` alone, where that is anything; given: all but that."""
    words = []
    for config in reversed(configs) if len(given) < len(settings) else ():  # the text first
        bare = instance(type(config), given)
        words += [f"{key}={settings[key].value}" for key in settings if key not in given
                  and key in keys_of((type(config),)) and getattr(bare, key) != settings[key].value]
    if words:
        more = f" and {len(words) - 6} more" if len(words) > 6 else ""
        yield f"{base[0]} says what this command leaves open: {', '.join(words[:6])}{more}"


def help_of_values(configs, settings):
    """Every key of these configs with its value, and where that comes from; settings: {key: Setting}."""
    lines = ["Every key, its value for these arguments, and where that comes from.", ""]
    recipe = getattr(configs[0], "recipe", None)
    for config in configs:
        settled = config.for_recipe(recipe) if hasattr(config, "for_recipe") else config
        for key, (_, default, _) in keys_of((type(config),)).items():
            value = getattr(settled, key)
            source = settings[key].source if key in settings else "default"
            if key not in settings and value != default:
                source = f"follows from recipe={recipe} and what is set"
            lines.append(f"  --{key:<24}  {value!r:<32}  {source}")
    return "\n".join(lines)


def print_once(line):
    """Print a line, under torchrun on the first rank alone."""
    if os.environ.get("RANK", "0") == "0":
        say(line, flush=True)
