"""
Reads config files and --key=value arguments into typed dataclasses.

    python train.py config/x.py [config/y.py ...] [--key=value] [--key value] [--flag]
    python train.py --scale=tiny --mechanism=moh,unet_add [--key=value ...]

A config file is plain Python assignments and holds only what differs from the defaults. It is Python code,
and reading it runs it: name only files that you trust. What is set later wins: the files in their order, then
the command line.

    parse_command()    reads what each file sets, and the arguments
    build_configs()    gives each value its type, puts what a scale and named mechanisms set beneath, and
                       makes the dataclasses
    validate()         refuses what is wrong with them

The keys are fields of the dataclasses: those of a model are GPTConfig's in model.py, those of training
TrainConfig's in config.py, and the few of Presets are here. What nanoGPT calls otherwise is translated in
other_names.py.
"""

import ast
import difflib
import functools
import math
import os
import re
import reprlib
import runpy
import traceback
import types
import typing
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Optional

from nanoheads import other_names
from nanoheads.common import ROOT, UserError, say
from nanoheads.files import name_of_words, setting_in_name

COMMAND_LINE = "command line"
TRUE, FALSE, NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")
MECHANISM_KEYS = ("mechanism", "mechanisms", "own_mechanism")  # keys that name mechanisms
OWN_FILE = re.compile(r"(.+\.py)(?::(\w+))?")  # a mechanism of one's own: mine.py, or mine.py:mode
Scale = Literal["task", "tiny", "nano", "mid", "small", "paper"]


@dataclass
class Presets:
    """Keys of train.py that are no part of a run's config: two set others, and one says what is done."""
    scale: Optional[Scale] = field(default=None, metadata=dict(
        help="the model's size and training: start from config/<scale>.py; with another --recipe its rates "
             "are left out",
        section="presets: keys that set others, each of which may be set by itself as well and then wins"))
    mechanism: str | list[str] | None = field(default=None, metadata=dict(
        help="turn these on, by name (with commas between several), or one in a file of your own: mine.py"))
    check: bool = field(default=False, metadata=dict(
        help="check on a small model that the mechanisms named do not look ahead, give the same with a "
             "cache, and so on; train nothing",
        section="what is done"))


def load(classes, argv, more=None):
    """One instance per dataclass, of config files and arguments. UserError: what is wrong, line by line."""
    return validate(build_configs(parse_command(classes, argv, more))[0])


def validate(configs):
    """These configs. UserError: what their problems() say, line by line."""
    if problems := [problem for config in configs for problem in config.problems()]:
        raise UserError("\n".join(problems))
    return configs


# ---- a command line, taken apart ----

class Command(NamedTuple):
    """What a command line says, before its values have their types: a key may be the flag of a mechanism in a
    file of one's own, which the same command names.
    """
    classes: tuple       # the dataclasses whose keys it may set
    files: list          # paths of config files, in their order
    file_settings: list  # [(where it is set, {key: value})], of these files and of the calling program
    arguments: dict      # {key: text, None where there is none}: these win

    @property
    def settings(self):
        """[(where it is set, {key: value, on the command line a text})] of all, of which the later wins."""
        return [*self.file_settings, (COMMAND_LINE, self.arguments)]

    @property
    def keys(self):
        """{key: Key} that may be set here; where it trains, also by the names that others have for them."""
        keys = keys_of(self.classes)
        other_keys = {name: Key(t, None, "") for name, (t, _) in other_names.NAMES.items()}
        return {**other_keys, **keys} if "optimizer" in keys else keys

    def values(self):
        """{key: value} of all that is set. UserError: a key is unknown, or a value of another type."""
        return convert_settings(self.settings, self.keys)

    def names(self):
        """{key: [name]} of what is set last of the keys of NAMING; any name may be that of a file."""
        keys = {*MECHANISM_KEYS} & {*keys_of(self.classes)}
        last = {key: value for _, values in self.settings for key, value in values.items() if key in keys}
        return {key: names_in(value) for key, value in last.items()}

    @property
    def names_own_files(self):
        return any(OWN_FILE.fullmatch(word) for words in self.names().values() for word in words)

    def with_arguments(self, **texts):
        """The same command with these arguments."""
        return self._replace(arguments=merge(self.arguments, texts))

    def words(self):
        """The command as words: the files, then --key=text."""
        return [*self.files, *(f"--{key}" if text is None else f"--{key}={text}"
                               for key, text in self.arguments.items())]


def parse_command(classes, argv, program_settings=None):
    """The Command that argv is, what asks for help aside. UserError: a config file cannot be read.

    program_settings: {where it comes from: {key: value}}, from the program that calls this: it wins over the
    files, and the arguments win over it.
    """
    keys, file_settings = keys_of(classes), []
    files, arguments = split([arg for arg in argv if not is_help(arg)], keys)
    for path in files:
        scale = Presets in classes and scale_of(path)
        file_settings.append((path, {"scale": scale} if scale else read_file(path, keys)))
    return Command(classes, files, [*file_settings, *(program_settings or {}).items()], arguments)


def is_help(arg):
    """Whether an argument asks for help: -h, --help or --help=WORD."""
    return arg in ("-h", "--help") or arg.startswith("--help=")


def split(argv, keys):
    """argv -> (files, {key: text}), the text None where there is none; of a bool only what reads as one is.

    A key that is none of `keys` may be a flag out of a file of one's own, which is not read yet: it takes no
    config file for its value.
    """
    files, arguments, words = [], {}, list(argv)
    while words:
        arg = words.pop(0)
        if not arg.startswith("--"):
            files.append(arg)
            continue
        key, equals, text = arg[2:].partition("=")
        key = key.replace("-", "_")
        if not equals:
            takes_value = bool(words) and not words[0].startswith("--")
            if key not in keys:
                takes_value = takes_value and not words[0].endswith(".py")
            elif bool in alternatives(keys[key].type):
                takes_value = takes_value and words[0].lower() in TRUE + FALSE + NONE
            text = words.pop(0) if takes_value else None
        arguments.pop(key, None)  # what is set again is set later
        arguments[key] = text
    return files, arguments


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
    suggestion = likely_name(Path(path).stem, stems)
    raise UserError(f"no config file {path}" + (f"; did you mean {stems[suggestion]}?" if suggestion else ""))


def read_file(path, keys=()):
    """What a config file sets, {key: value}, without what it imports and defines. UserError names its line.

    keys: names under which modules and functions are kept, to be refused: nobody can mean them.
    """
    file = find_file(path)
    try:
        names = runpy.run_path(str(file))
    except (Exception, SystemExit) as e:  # sys.exit(0) would end the program as if it had done its work
        raise UserError(f"{path}, {describe_failure(e, file)}") from None
    return {key: value for key, value in names.items() if not key.startswith("_")
            and (key in keys or not (callable(value) or isinstance(value, types.ModuleType)))}


def describe_failure(e, path):
    """What went wrong in which line of a file that was executed, in words."""
    lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path)]
    line = getattr(e, "lineno", None) or (lines[-1] if lines else "?")
    return f"line {line}: {type(e).__name__}: {' '.join(str(getattr(e, 'msg', e)).split())}"


def scale_of(path):
    """The scale that a config file is, or None: config/tiny.py means --scale=tiny."""
    file = find_file(path).resolve()
    if file.parent == ROOT / "config" and file.stem in typing.get_args(Scale):
        return file.stem


def names_in(value):
    """The names in a value of a key that names mechanisms: a text, with commas or as a list, or a list."""
    entries = value.strip("[]()").split(",") if isinstance(value, str) else value or []
    entries = entries if isinstance(entries, list) else []
    return [name for entry in entries if (name := str(entry).strip(" '\""))]


# ---- from what is set to the dataclasses ----

def build_configs(command, mechanisms=None, base=None):
    """([one instance per dataclass], {key: value} that was set) of a Command; none of Presets, which is no
    config. UserError: unknown keys and wrong types, line by line.

    mechanisms: {name: flags} that `mechanism` chooses from. base: (where it is from, {key: value}) of a run
    that goes on: what the command leaves open, and no part of what was set. With Presets an out_dir that is
    not set becomes out/<scale>-<mechanisms>.
    """
    keys, mechanisms = keys_of(command.classes), mechanisms or {}
    hand_set, presets, notes = command.values(), {}, []
    has_presets = Presets in command.classes
    if has_presets:
        presets = {key: hand_set.pop(key) for key in keys_of((Presets,)) if key in hand_set}
    scale, names = presets.get("scale"), names_in(presets.get("mechanism"))
    task, recipe = hand_set.get("task"), hand_set.get("recipe")

    # beneath all that is set by hand: what a scale and mechanisms set, or nanoGPT's defaults
    named_settings = mechanism_settings(command, names, mechanisms)
    if scale:
        named_settings = [scale_settings(command, scale, recipe), *named_settings]
    named_values = convert_settings(named_settings, keys)
    # and beneath that, as nothing that was set: a run that goes on; or the scale of a task that is named
    # alone, since a checkpoint may have other sizes
    run_values = convert_settings([base] if base else [], keys)
    task_alone = has_presets and task and not (scale or command.files)
    task_values = convert_settings([scale_settings(command, "task", recipe)], keys) if task_alone else {}
    if not scale and (file := nanogpt_file(command)):
        defaults = other_names.nanogpt_defaults(merge(run_values, hand_set))
        notes.append(f"{file} is written for nanoGPT, whose defaults hold for what it leaves open: "
                     + ", ".join(f"{key}={value}" for key, value in defaults.items()))
        named_values = merge(defaults, named_values)

    # all of it, in our names
    set_values, defaults = merge(named_values, hand_set), {name: key.default for name, key in keys.items()}
    all_values = {**defaults, **task_values, **run_values, **set_values}
    set_values, translations = other_names.translate(set_values, all_values)
    values = {**task_values, **run_values, **set_values}
    if has_presets and values.get("out_dir") is None:
        switches = switch_flags(mechanisms)
        flags = {key: set_values[key] for key in map(other_names.our_name, command.arguments)
                 if key in switches and set_values[key] not in (None, False, named_values.get(key))}
        values["out_dir"] = folder_name(command, scale, task, names, flags)
    run_only = {key: value for key, value in run_values.items() if key not in set_values}
    for line in [*notes, *translations, *([note_on_run(base[0], run_only)] if run_only else [])]:
        print_once(line)
    class_keys = {cls: keys_of((cls,)) for cls in command.classes if cls is not Presets}
    return [cls(**{key: value for key, value in values.items() if key in keys_of_class})
            for cls, keys_of_class in class_keys.items()], set_values


def convert_settings(settings, keys):
    """{key: value} of [(where it is set, {key: value or text})]. A later value wins, and its key moves to the
    end. UserError: unknown keys and wrong types, line by line.
    """
    values, problems = {}, []
    for source, entries in settings:
        for key, value in entries.items():
            try:
                value = convert_value(key, value, keys, is_text=source == COMMAND_LINE)
                values = merge(values, {key: value})
            except ValueError as e:
                problems.append(f"{source}: {e}")
    if problems:
        raise UserError("\n".join(problems))
    return values


def merge(before, after):
    """Two {key: value} as one. The values of `after` win, and its keys come last."""
    return {**{key: value for key, value in before.items() if key not in after}, **after}


def scale_settings(command, scale, recipe):
    """(where it is set, {key: value}) of a scale, for a run of this recipe, None where it is not set.

    With another recipe than the scale's own, the default holds of what a class of the command lists as
    of_recipe.
    """
    file = f"config/{scale}.py"
    values = read_file(str(ROOT / file))
    if recipe is None or recipe == values.get("recipe"):
        return file, values
    of_recipe = {key for cls in command.classes for key in getattr(cls, "of_recipe", ())}
    return file, {key: value for key, value in values.items() if key not in of_recipe}


def switch_flags(mechanisms):
    """The flags that turn a mechanism on, the first of each of {name: flags}."""
    return {next(iter(flags)) for flags in mechanisms.values() if flags}


def mechanism_settings(command, names, mechanisms):
    """[(where it is set, flags)] of the mechanisms that a Command names, out of {name: flags}. UserError."""
    name_of, switches = {}, switch_flags(mechanisms)  # {flag: the name that sets it}
    source = next((source for source, values in reversed(command.settings) if "mechanism" in values), None)
    for name in names:
        if name not in mechanisms:
            suggestion = likely_name(name, mechanisms)
            hint = f"did you mean {suggestion}?" if suggestion else (
                f"there are {', '.join(mechanisms)}; a class in model.py must be in a list there, as "
                "HEAD_MECHANISMS, and one in a file of your own is named by the file, mine.py")
            raise UserError(f"{source}: unknown mechanism {name}; {hint}")
        for key, value in mechanisms[name].items():
            # a flag that turns one on belongs to one name; others may be set twice, to one value
            other = name_of.get(key)
            if other is not None and (key in switches or mechanisms[other][key] != value):
                raise UserError(f"{source}: mechanisms {other} and {name} exclude each other: both set {key}")
            name_of[key] = name
    return [(f"mechanism {name}", mechanisms[name]) for name in names]


def nanogpt_file(command):
    """The first config file of a Command with a key that only nanoGPT has; None: none has, or it is not
    train.py's.
    """
    nanogpt_keys = other_names.ONLY_NANOGPT & command.keys.keys()
    return next((source for source, values in command.file_settings if source in command.files
                 and nanogpt_keys & values.keys()), None)


def folder_name(command, scale, task, names, flags):
    """The folder of a run that names none: out/tiny-moh+unet_add, out/tiny-routing=published; without a scale
    after its last config file. What else is set is no part of it: choose_folder() tells runs of one name
    apart.

    flags: {key: value} of the arguments that turn on a mechanism by themselves.
    """
    preset_keys = keys_of((Presets,)).keys()
    setting_files = {source for source, values in command.file_settings if values.keys() - preset_keys}
    files = [Path(file).stem for file in command.files if file in setting_files or not scale]
    prefix = [None if task and scale == "task" else scale, task, *files[-1:]]
    words = [*names, *(setting_in_name(key, value) for key, value in flags.items())]
    return f"out/{name_of_words(words, '-'.join(filter(None, prefix)) or 'gpt')}"


def note_on_run(path, values):
    """A line about {key: value} that a run which goes on brings to a command."""
    words = [f"{key}={value}" for key, value in values.items()]
    remainder = f" and {len(words) - 6} more" if len(words) > 6 else ""
    return f"{path} says what this command leaves open: {', '.join(words[:6])}{remainder}"


def print_once(line):
    """Print a line, under torchrun on the first rank alone."""
    if os.environ.get("RANK", "0") == "0":
        say(line, flush=True)


# ---- keys ----

class Key(NamedTuple):
    type: object
    default: object
    help: str


types_in = functools.cache(typing.get_type_hints)  # a plan asks for those of the same classes many times


def fields_of(cls):
    """Yield (the class that has the field, the field, its type) of a dataclass.

    Those of a class that it extends come first. Last come the flags of mechanisms in files of one's own,
    which a GPTConfig holds in its field `own`.
    """
    listed = {"own"}  # which holds flags and is none itself
    own_classes = cls.own_options() if hasattr(cls, "own_options") else []
    for cls_or_base in filter(is_dataclass, (*reversed(cls.__mro__), *own_classes)):
        hints = types_in(cls_or_base)
        for f in fields(cls_or_base):
            if f.name not in listed:
                yield cls_or_base, f, hints[f.name]
        listed |= {f.name for f in fields(cls_or_base)}


def keys_of(classes):
    """{key: Key} over all fields of the dataclasses, see fields_of()."""
    return {f.name: Key(t, f.default if f.default is not MISSING else f.default_factory(),
                        f.metadata.get("help", ""))
            for cls in classes for _, f, t in fields_of(cls)}


def convert_fields(values, cls):
    """Those of the values, {key: value}, that are fields of a dataclass, by their types. ValueError."""
    keys = keys_of((cls,))
    return {key: convert_value(key, value, keys) for key, value in values.items() if key in keys}


def convert_value(key, value, keys, is_text=False):
    """A value converted to the type of its key. ValueError says what is wrong with it.

    is_text: the value is the text of an argument, None where it has none.
    """
    if key not in keys:
        raise ValueError(f"unknown key {key}; {likely_key(key, keys)[1]}")
    t, default, _ = keys[key]
    if is_text and value is None and bool in alternatives(t):
        value = "True"
    if (value == "" or is_text and value is None) and default != "":
        shell = "; a variable of the shell may be not set" * (value == "")
        raise ValueError(f"{'--' * is_text}{key} needs a value ({type_name(t)}){shell}")
    try:
        return parse(value, t) if is_text else check(value, t)
    except ValueError:
        words = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
        suggestions = [likely_name(str(word), choices(t)) for word in words if word not in choices(t)]
        hint = f"; did you mean {suggestions[0]}?" if any(suggestions[:1]) else ""
        raise ValueError(f"{key}={reprlib.repr(value)} is not {type_name(t)}{hint}") from None


def likely_name(word, names):
    """The name that was probably meant: it is a letter or two off, or the only one that has the word in it.
    None: there is no such name.
    """
    word, original = word.lower(), {name.lower(): name for name in names}
    # one letter of three may be wrong, two of eight: what differs more is another word
    close_names = difflib.get_close_matches(word, original, 1, 0.75 if len(word) > 3 else 0.66)
    containing = [name for name in original if word in name and len(word) > 2]
    for candidates in (close_names, [name for name in containing if name.startswith(word)], containing):
        if len(candidates) == 1:
            return original[candidates[0]]
    return None


def likely_key(key, keys):
    """(the key that was probably meant or None, a few words about it)."""
    close_names = difflib.get_close_matches(key, other_names.NAMES, 1, 0.75)
    suggestion = likely_name(key, [name for name in keys if name not in other_names.NAMES]) or (
        other_names.NAMES[close_names[0]][1] if close_names else None)
    if suggestion in keys:
        return suggestion, f"did you mean {suggestion}?"
    hint = "--help lists the keys"
    if "settings" in keys:  # of a study, in which other keys are train.py's
        hint = f"a key of train.py goes into --settings=\"{{'{key}': ...}}\"; {hint}"
    return None, hint


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


def item_types(kind):
    """The alternatives() of what is in a list; of anything else, none."""
    return alternatives(*typing.get_args(kind)) if typing.get_origin(kind) is list else ()


def choices(t):
    """The words that may be chosen in `t`, also inside of a list."""
    return [word for kind in alternatives(t) for word in (kind, *item_types(kind)) if isinstance(word, str)]


def type_name(t):
    """`t` as it is shown: "float or None", "cosine, trapezoid or None", "list of headwise or elementwise"."""
    def name(kind):
        if kind is type(None):
            return "None"
        if any(is_choice(item) for item in item_types(kind)):
            return f"list of {type_name(*typing.get_args(kind))}"
        return str(kind) if is_choice(kind) or typing.get_args(kind) else kind.__name__

    *names, last = [name(kind) for kind in alternatives(t)]
    return f"{', '.join(names)} or {last}" if names else last


def check(value, t):
    """`value` as type `t`, or ValueError: an int is a float, 1e3 an int, a bool neither, NaN nothing."""
    for kind in alternatives(t):
        base = typing.get_origin(kind) or kind
        if is_choice(kind):
            if value == kind and type(value) is type(kind):
                return kind
        elif base is list and isinstance(value, (list, tuple)):
            item_type = typing.get_args(kind)
            return [check(item, *item_type) for item in value] if item_types(kind) else list(value)
        elif isinstance(value, bool) != (base is bool):
            continue
        elif base is float and isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
        elif base is int and isinstance(value, float) and value.is_integer():
            return int(value)
        elif base is not float and isinstance(value, base):
            return value
    raise ValueError


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
    except (ValueError, SyntaxError, TypeError):  # such as a set of lists
        list_type = next((kind for kind in kinds if item_types(kind)), None)
        if list_type is None:
            raise ValueError from None
    brackets = re.fullmatch(r"\[(.*)\]|\((.*)\)|(.*)", text, re.DOTALL)  # [a,b] as well as a,b
    words = [word.strip(" '\"") for word in brackets[brackets.lastindex].split(",")]
    return [parse(word, *typing.get_args(list_type)) for word in words if word]
