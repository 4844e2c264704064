"""
Mechanisms in files of one's own: read, checked, added to the flags, recorded. docs/add-a-mechanism.md

    python train.py --scale=tiny --mechanism=mine.py    python compare.py --mechanisms=mine.py,other.py:mode
    python sample.py --ckpt out/a --mechanism=mine.py   python sample.py --ckpt out/a --trust_code

A run keeps a copy of the file beside its checkpoints, which hold its name and digest. What is only read is
not run: code runs where the command line names its file, or says --trust_code, which takes the copy in the
checkpoint's own folder and says so.

Such a file stands alone: it imports installed libraries, model.py and nanoheads/, and nothing else, so that
its text is all that a run has to keep, and all that a digest has to cover. It is read once, as an OwnFile;
what runs, what is copied and what is recorded is that text.
"""

import ast
import difflib
import hashlib
import importlib.util
import re
import sys
import types
import typing
from collections import Counter
from contextlib import suppress
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import torch

import model
from nanoheads import replaced
from nanoheads.common import OWN_FILES, UserError, fault_of_own_file, read_whole, say, write_atomic
from nanoheads.configurator import FILE, check, keys_of, near, type_name, where_it_failed
from nanoheads.mechanism import Mechanism, choices

ADDED = {}  # class -> its OwnFile
OURS = {"model", "nanoheads", "lab"}  # the repository's own modules that a file may import, wherever it lies
ALONE = "a mechanism's file stands alone, so put that code into it"


class OwnFile(NamedTuple):
    """A file as it was when it was read: it may be edited while a run goes on."""

    path: Path
    text: bytes

    @property
    def sha256(self):
        return hashlib.sha256(self.text).hexdigest()

    @property
    def digest(self):
        """The first 16 digits of its SHA-256."""
        return self.sha256[:16]


# ---- reading, which runs nothing ----

def opened(path):
    """The OwnFile of a path. UserError: it is not there, no Python, or imports another file of one's own."""
    path = Path(path)
    try:
        file = OwnFile(path, read_whole(path))
    except OSError as e:
        raise UserError(f"no mechanism file {path} ({e.strerror}); it holds a class for each mechanism, see "
                        "docs/add-a-mechanism.md") from None
    for name in sorted(imported(file) - OURS):
        place = place_of(name)
        if place and not {"site-packages", "dist-packages"} & {*place.parts}:
            raise UserError(f"{path} imports {name}, which is {place}: {ALONE}")
    return file


def tree_of(file):
    """The syntax tree of an OwnFile. UserError: it is no Python."""
    try:
        return ast.parse(file.text)
    except (SyntaxError, ValueError) as e:
        raise UserError(f"{file.path}, {where_it_failed(e, file.path)}") from None


def imported(file):
    """The first names of all that an OwnFile's import statements name, but for Python's own modules."""
    names = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
    return names - sys.stdlib_module_names


def place_of(name):
    """The Path of the module of this name on Python's path, or of the package's folder; None: no such."""
    with suppress(ValueError):  # of a module that says not where it is from, as __main__
        spec = importlib.util.find_spec(name)
        if spec and (places := [spec.origin] if spec.has_location else spec.submodule_search_locations):
            return Path([*places][0]).resolve()


# ---- adding, which runs the file ----

def add(path):
    """Add the mechanisms in a file, once; returns the names of all their modes. UserError.

    path: of the file, or the OwnFile that was read from it.
    """
    file = path if isinstance(path, OwnFile) else opened(path)
    if not classes_of(file):
        replaced.refuse()  # by a file that was added before
        import_ahead(file)
        replaced.remember()
        module = run(file, f"own_mechanism_{file.digest}")
        replaced.refuse(file.path)
        for cls in checked_classes(module, file):
            model.add_mechanism(cls)
            ADDED[cls] = file
        choices.cache_clear()
        for cls in classes_of(file):
            if problem := next(problems_of_models(cls), None):
                remove(classes_of(file))
                raise UserError(f"{file.path}: {cls.__name__}: {problem}")
    return [name for cls in classes_of(file) for name in cls.modes]


def remove(classes):
    """Take back what add() did to these classes."""
    for cls in classes:
        model.remove_mechanism(cls)
        ADDED.pop(cls)
    choices.cache_clear()


def classes_of(file):
    """The classes of mechanisms that an OwnFile defines; none where it was not added."""
    return [cls for cls, each in ADDED.items() if each.digest == file.digest]


def import_ahead(file):
    """Import what the import statements at the top of an OwnFile name; where that fails, run() says so.

    What a library changes when it is imported is then not taken for what the file changes.
    """
    for node in tree_of(file).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            with suppress(Exception):
                exec(compile(ast.Module([node], []), str(file.path), "exec"), {})


def run(file, name):
    """The module of this name that an OwnFile's text makes. UserError, in one line, where it fails."""
    path = str(file.path)
    OWN_FILES.add(path)
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = path
    try:
        exec(compile(file.text, path, "exec"), vars(module))
    except Exception as e:  # whatever a file of one's own may do
        del sys.modules[name]
        alone = f"; {ALONE}" * isinstance(e, ImportError)
        raise UserError(f"{fault_of_own_file(e) or e}{alone}") from None
    return module


def copy(file, folder):
    """A copy of an OwnFile in a folder; its path. UserError."""
    target = Path(folder) / file.path.name
    if not target.is_file() or target.read_bytes() != file.text:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, lambda f: f.write(file.text))
    return target


# ---- what is wrong with a class as it is declared ----

def checked_classes(module, file):
    """The mechanisms that an OwnFile's module defines. UserError: one is declared wrongly, or is there."""
    count = Counter(node.name for node in tree_of(file).body if isinstance(node, ast.ClassDef))
    if twice := [name for name in count if count[name] > 1]:
        raise UserError(f"{file.path} defines {twice[0]} twice, so that the first would be lost: rename one")
    classes = [cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, Mechanism)
             and cls.__module__ == module.__name__]
    # a class without a flag that others extend is what they share
    classes = [cls for cls in classes if cls.flag or not any(cls in other.__mro__[1:] for other in classes)]
    if not classes:
        raise UserError(f"{file.path} must define a class that extends Mechanism; it defines none")
    for i, cls in enumerate(classes):
        if other := next((each for known, each in ADDED.items() if known.flag == cls.flag), None):
            raise UserError(f"{file.path} and {other.path} are two texts of one mechanism, with the flag "
                            f"{cls.flag}: one at a time")
        if problem := next(problems(cls, classes[:i]), None):
            raise UserError(f"{file.path}: {cls.__name__}: {problem}")
    for other in ADDED.values():
        if other.path.name == file.path.name:
            raise UserError(f"{file.path} and {other.path} have one name, and a run keeps both in its "
                            "folder: rename one of them")
    return classes


def problems(cls, before=()):
    """Yield what is wrong with a class, sentence by sentence.

    before: classes of the same file, whose names are taken.
    """
    if not hasattr(cls.Options, "__dataclass_fields__"):
        yield "it needs a class Options inside, with its flags as annotated fields"
        return
    for key in ("name", "flag"):
        if not isinstance(getattr(cls, key), str):
            yield f"{key}={getattr(cls, key)!r} must be a text"
            return
    known = [name for name in vars(Mechanism) if not name.startswith("_")]
    for name in (name for name in vars(cls) if name not in known):
        for meant in difflib.get_close_matches(name, known, 1, 0.88):  # a letter of nine may be another
            yield (f"{name} is nothing that a mechanism is asked for; did you mean {meant}? If it is your "
                   "own, give it a name that is less like that one")
    own = cls.fields()
    if not cls.flag or cls.flag not in own:
        yield f"flag={cls.flag!r} must be one of its Options, the one that turns it on"
        return
    if misnamed := [name for name in own if not name.startswith(cls.flag)]:
        yield f"Options: {misnamed[0]} must begin with {cls.flag}, as all its flags do"
    if any(getattr(cls.Options, name, ...) is ... for name in own):
        yield "Options: every flag needs a default, at which it does nothing"
    elif getattr(cls.Options, cls.flag) not in (None, False):
        yield f"Options: {cls.flag} must be off (None or False) where it is not set"
    flags = {*model.GPTConfig.defaults(), "own", *(name for each in before for name in each.fields())}
    if taken := set(own) & flags:
        yield f"Options: there is a flag {min(taken)} already: choose another name"
    taken = {other.name for other in [*model.MECHANISM_CLASSES, *before]} | {*dir(model.CausalSelfAttention)}
    if not cls.name.isidentifier() or cls.name in taken:
        yield f"name={cls.name!r} must be a name of its own: it is the layer's attribute"
    yield from problems_of_modes(cls, before)


def problems_of_modes(cls, before):
    """Yield what is wrong with the types of a class's flags, and with its modes, sentence by sentence."""
    try:
        hints = typing.get_type_hints(cls.Options)
    except Exception as e:  # whatever an annotation may say
        yield f"Options: an annotation cannot be read: {type(e).__name__}: {e}"
        return
    form = f"{{name: {{{cls.flag!r}: ...}}}}"
    if not isinstance(cls.modes, dict) or not all(isinstance(flags, dict) for flags in cls.modes.values()):
        yield f"modes={cls.modes!r} must be a dict of dicts, {form}"
        return
    if not isinstance(cls.neutral, dict) or not all(isinstance(each, dict) for each in cls.neutral.values()):
        yield f"neutral={cls.neutral!r} must be a dict of dicts, {{mode: {{flag or parameter: value}}}}"
        return
    if not cls.modes:
        yield f"modes must name at least one mode, {form}"
    for mode, flags in cls.modes.items():
        if cls.flag not in flags:
            yield f"modes: {mode!r} does not set {cls.flag}, the flag that turns the class on: {form}"
    types = {**{key: t for key, (t, _, _) in keys_of((model.GPTConfig,)).items()}, **hints}
    for mode, flags in cls.modes.items():
        if not (isinstance(mode, str) and re.fullmatch(r"\w+", mode)):
            yield f"modes: {mode!r} must be a name, of letters, digits and _"
        for key, value in flags.items():
            if key not in types:
                yield f"modes: {mode} sets {key}, and there is no such flag{meant(key, types)}"
                continue
            try:
                check(value, types[key])
            except ValueError:
                yield f"modes: {mode}: {key}={value!r} is not {type_name(types[key])}"
    for name in set(cls.modes) & {*model.MECHANISMS, *(mode for each in before for mode in each.modes)}:
        yield f"modes: there is a mode {name} already: choose another name"
    for name in set(cls.neutral) - set(cls.modes):
        yield f"neutral: there is no mode {name}{meant(name, cls.modes)}"


SMALL = dict(n_layer=2, n_head=4, n_embd=64, block_size=16, vocab_size=37)


class AsConstructed(model.GPT):
    """A GPT that also keeps what constructors put into its parameters, before init_weights() sets them."""

    def init_weights(self):
        self.constructed = {name: p.detach().clone() for name, p in self.named_parameters()}
        super().init_weights()


def small_models(cls):
    """Yield (mode, AsConstructed, its first layer of this class, what initial_values() names) for each mode,
    and for each of its numbers moved a little, by which a parameter may be filled: then the mode's name is
    "mode, flag=number".

    Where memory is not set, as by torch.empty(), it is NaN in what was constructed, and so no constant. A
    mode that cannot be built so small is left to the run that builds it.
    """
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    every = [*cls.modes.items()]
    for mode, flags in cls.modes.items():
        numbers = {f.name: flags.get(f.name, f.default) for f in fields(cls.Options)}
        moved = {name: 0.75 * value + 0.0625 for name, value in numbers.items() if type(value) is float}
        every += [(f"{mode}, {name}={value:g}", {**flags, name: value}) for name, value in moved.items()]
    for mode, flags in every:
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            with torch.random.fork_rng(devices=[]):
                gpt = AsConstructed(model.GPTConfig(**SMALL, **flags))
            layer = next(m for m in gpt.modules() if isinstance(m, cls))
            starts = [*layer.initial_values()]
        except Exception:  # a mechanism of one's own may raise anything
            continue
        finally:
            torch.use_deterministic_algorithms(strict, warn_only=warns)
        yield mode, gpt, layer, starts


def problems_of_models(cls):
    """Yield what small models of its modes show, sentence by sentence: names in initial_values() and in
    `neutral` that are none of a parameter or a flag, and constants that would be overwritten before training.
    """
    for mode, gpt, layer, starts in small_models(cls):
        own = [name for name, _ in layer.named_parameters()]
        for name in (name for name in starts if name not in own):
            yield f"initial_values() names {name!r}, which is none of its parameters{meant(name, own)}"
        flags, every = model.GPTConfig.defaults(), [name for name, _ in gpt.named_parameters()]
        for name in cls.neutral.get(mode, ()):  # of a moved number there is none
            if name not in flags and not any(fnmatch(each, f"*{name}") for each in every):
                known = [*cls.fields(), *(f"{cls.name}.{each}" for each in own)]
                yield (f"neutral: {mode} names {name!r}, which is none of its flags and parameters"
                       f"{meant(name, known)}")
        yield from lost_constants(cls, mode, gpt)


def lost_constants(cls, mode, gpt):
    """Yield which constant, or which vector, that __init__ puts into a parameter is overwritten, unless the
    class says with what. A matrix may be filled at random, as layers are.
    """
    for path, layer in gpt.named_modules():
        for name, p in layer.named_parameters(recurse=False) if isinstance(layer, cls) else ():
            value, start = gpt.constructed[f"{path}.{name}"].flatten(), p.flatten()
            if name in layer.initial_values() or not len(value) or torch.equal(value, start):
                continue
            if (value == value[0]).all():
                yield (f"{mode}: __init__ fills {name} with {value[0]:g}, and the model would start with "
                       f"{start[0]:.3g}; say it in `starts`: {{{name!r}: {value[0]:g}}}")
            elif p.dim() < 2 and not value.isnan().any():
                yield (f"{mode}: __init__ fills {name} with {value[0]:.3g}, {value[1]:.3g}, ..., and the "
                       f"model would start with {start[0]:.3g}; give them in initial_values()")


def meant(name, known):
    """Words behind a name that is none of the known ones; "": nothing is like it."""
    nearest = near(str(name), known)
    return f"; did you mean {nearest}?" if nearest else ""


# ---- the command line ----

def add_arguments(parser):
    """The arguments of every program that reads checkpoints, by which code of one's own may run."""
    parser.add_argument("--mechanism", action="append", default=[], metavar="FILE",
                        help="the file of a mechanism of one's own that a checkpoint was made with; several "
                             "with commas, or repeated")
    parser.add_argument("--trust_code", action="store_true",
                        help="run the file of such a mechanism that lies in the checkpoint's own folder, and "
                             "say so; without this or --mechanism nothing that is read is run")


def take(command, keep=None, every=True):
    """Add the files that a configurator.Command names; in it they become the names of their modes.

    Their paths are set with them, own_mechanism; keep: a folder where copies are made first, by digest.
    every: a file stands for all its modes; without, UserError where it has several.
    """
    names, files = command.names(), []
    named(filter(None, names.pop("own_mechanism", ())), files, keep)
    for key, words in names.items():
        if (modes := named(words, files, keep, every)) != words:
            command.put(key, ",".join(modes))
    if files:
        command.put("own_mechanism", ",".join(dict.fromkeys(files)))


def take_argument(args):
    """take() for the parsed arguments of bench.py, --mechanisms and --own_mechanism."""
    files = []
    named(filter(None, (args.own_mechanism or "").split(",")), files)
    if args.mechanisms:
        args.mechanisms = ",".join(named(args.mechanisms.split(","), files))
    args.own_mechanism = ",".join(dict.fromkeys(files)) or None


def named(words, files, keep=None, every=True):
    """Names of mechanisms, in which a file is those of its modes; its path is put to `files`. UserError."""
    names = []
    for word in map(str.strip, map(str, words)):
        if not (match := FILE.fullmatch(word)):
            names.append(word)
            continue
        path, mode = match.groups()
        if "," in path:
            raise UserError(f"{path}: the name of a mechanism's file must have no comma, which parts names")
        file = opened(path)
        file = file._replace(path=copy(file, Path(keep, file.digest))) if keep else file
        modes = add(file)
        if mode and mode not in modes:
            raise UserError(f"{path} has no mode {mode}; it has {', '.join(modes)}")
        if not (mode or every) and any(len(cls.modes) > 1 for cls in classes_of(file)):
            raise UserError(f"{path} has the modes {', '.join(modes)}: name one, as in {path}:{modes[0]}")
        files.append(str(file.path))
        names += [mode] if mode else modes
    return names


def add_named(args):
    """Add the files of --mechanism in parsed arguments. UserError."""
    words = [word.strip() for each in args.mechanism for word in each.split(",")]
    for word in words:
        if not FILE.fullmatch(word):
            raise UserError(f"--mechanism={word} must be a file here, mine.py: the checkpoint says the rest")
    named(words, [])


# ---- checkpoints ----

def files_for(config):
    """The OwnFiles of the mechanisms of one's own that a GPTConfig has on."""
    return list(dict.fromkeys(file for cls, file in ADDED.items() if cls.is_on(config)))


def record(config):
    """What a checkpoint holds of them: [{"file": name, "digest": ...}]."""
    return [dict(file=file.path.name, digest=file.digest) for file in files_for(config)]


def held(config, folder):
    """What a new checkpoint in a folder holds of them: {} or {"own_mechanism": ...}; copies go there."""
    for file in files_for(config):
        copy(file, folder)
    records = record(config)
    return dict(own_mechanism=records) if records else {}


def lacking(state):
    """The records in a read checkpoint, [{"file", "digest"}], whose code was not added."""
    there = {file.digest for file in ADDED.values()}
    return [each for each in state.get("own_mechanism") or [] if each["digest"] not in there]


def flags_of(state, path):
    """A read checkpoint's flags. UserError: they need code that was not added, or are of another version."""
    flags = {name: value for name, value in state["config"].items() if name != "own"}
    if isinstance(own := state["config"].get("own"), dict):  # as asdict() of a GPTConfig has them
        flags.update(own)
    if missing := lacking(state):
        files = " and ".join(map(words_of, missing))
        if other := next((file for cls, file in ADDED.items() if cls.flag in flags), None):
            raise UserError(f"{path} was made with {files}, and {other.path} is another text (sha256 "
                            f"{other.digest}...): name the file that it was made with")
        raise UserError(f"{path} was made with the mechanism in {files}, and what is only read is not run: "
                        "name its file, --mechanism=FILE, or say --trust_code to run the one in its folder")
    if unknown := sorted(set(flags) - set(model.GPTConfig.defaults())):
        raise UserError(f"{path} was written by another version: unknown flags {', '.join(unknown)}")
    return flags


def words_of(record):
    """A file's name and the digest of its text, in words."""
    return f"{record['file']} (sha256 {record['digest']}...)"


def trust(state, path):
    """Add what a read checkpoint's flags need from its own folder, and say what is run. UserError."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    for each in lacking(state):
        place = Path(folder, each["file"])
        if not place.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{path} was made with {words_of(each)}, a name that leads out of {folder}: such "
                            "a file is never run")
        if not place.is_file():
            raise UserError(f"{path} was made with {words_of(each)}, which is not in {folder}: name it, "
                            "--mechanism=FILE")
        file = opened(place)
        if file.digest != each["digest"]:
            raise UserError(f"{path} was made with {words_of(each)}, and {place} is another text (sha256 "
                            f"{file.digest}...): name the right one, --mechanism=FILE")
        say(f"--trust_code runs {place}", file=sys.stderr, flush=True)
        add(file)
