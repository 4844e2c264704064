"""
Mechanisms in files of one's own: checked, and added to the flags. docs/add-a-mechanism.md

    python train.py --scale=tiny --mechanism=mine.py    python compare.py --mechanisms=mine.py,other.py:mode
    python sample.py --ckpt out/a --mechanism=mine.py   python sample.py --ckpt out/a --trust_code

A run keeps a copy of the file beside its checkpoints, which hold its name and digest. What is only read is
not run: code runs where the command line names its file, or says --trust_code, which takes the copy in the
checkpoint's own folder and says so.
"""

import ast
import re
import sys
import typing
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import torch

import model
from nanoheads.common import UserError, say
from nanoheads.configurator import FILE, NAMING, check, keys_of, near, of_config, type_name
from nanoheads.mechanism import Mechanism, choices
from nanoheads import replaced
from nanoheads.own_files import OwnFile, add_arguments, copy, import_ahead, inside, opened, run

__all__ = ["ADDED", "OwnFile", "add", "add_arguments", "copy", "held", "opened", "take"]

ADDED = {}  # class -> its OwnFile


# ---- adding ----

def add(path, wanted=None):
    """Read a file and add the mechanisms in it, once; returns the names of all their modes. UserError.

    wanted: the digest without which nothing of it is executed.
    """
    file = opened(path)
    if wanted not in (None, file.digest):
        raise UserError(f"{path} is another text than the one wanted (sha256 {wanted}...)")
    if not classes_of(file):
        name = f"own_mechanism_{file.digest}"
        replaced.refuse()  # by a file that was added before
        import_ahead(file)
        replaced.remember()
        module = run(file, name)
        try:
            replaced.refuse(file.path)
            for cls in checked_classes(module, file):
                model.add_mechanism(cls)
                ADDED[cls] = file
            keys_of.cache_clear()
            choices.cache_clear()
            for cls in classes_of(file):
                if problem := next(problems_of_names(cls), None):
                    raise UserError(f"{file.path}: {cls.__name__}: {problem}")
        except UserError:
            remove(classes_of(file))
            del sys.modules[name]
            raise
    return [name for cls in classes_of(file) for name in cls.modes]


def remove(classes):
    """Take back what add() did to these classes."""
    for cls in classes:
        model.remove_mechanism(cls)
        ADDED.pop(cls)
    keys_of.cache_clear()
    choices.cache_clear()


def classes_of(file):
    """The classes of mechanisms that an OwnFile defines; none where it was not added."""
    return [cls for cls, each in ADDED.items() if each.digest == file.digest]


def checked_classes(module, file):
    """The mechanisms that an OwnFile's module defines. UserError: one is declared wrongly, or is there."""
    count = Counter(node.name for node in ast.parse(file.text).body if isinstance(node, ast.ClassDef))
    if twice := [name for name in count if count[name] > 1]:
        raise UserError(f"{file.path} defines {twice[0]} twice, so that the first would be lost: rename one")
    found = [cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, Mechanism)
             and cls.__module__ == module.__name__]
    # a class without a flag that others extend is what they share
    found = [cls for cls in found if cls.flag or not any(cls in other.__mro__[1:] for other in found)]
    if not found:
        raise UserError(f"{file.path} must define a class that extends Mechanism; it defines none")
    for i, cls in enumerate(found):
        if other := next((each for known, each in ADDED.items() if known.flag == cls.flag), None):
            raise UserError(f"{file.path} and {other.path} are two texts of one mechanism, with the flag "
                            f"{cls.flag}: one at a time")
        if problem := next(problems(cls, found[:i]), None):
            raise UserError(f"{file.path}: {cls.__name__}: {problem}")
    for other in ADDED.values():
        if other.path.name == file.path.name:
            raise UserError(f"{file.path} and {other.path} have one name, and a run keeps both in its "
                            "folder: rename one of them")
    return found


def problems(cls, before=()):
    """Yield what is wrong with a class as it is declared, sentence by sentence.

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
        for meant in (each for each in known if one_edit_apart(name, each)):
            yield (f"{name} is nothing that a mechanism is asked for; did you mean {meant}? If it is your "
                   "own, give it a name that is less like that one")
    own = cls.fields()
    if not cls.flag or cls.flag not in own:
        yield f"flag={cls.flag!r} must be one of its Options, the one that turns it on"
        return
    if loose := [name for name in own if not name.startswith(cls.flag)]:
        yield f"Options: {loose[0]} must begin with {cls.flag}, as all its flags do"
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
    if not cls.modes or any(cls.flag not in flags for flags in cls.modes.values()):
        yield f"modes must name at least one mode, {form}"
    types = {**{key: t for key, (t, _, _) in keys_of((model.GPTConfig,)).items()}, **hints}
    for mode, flags in cls.modes.items():
        if not (isinstance(mode, str) and re.fullmatch(r"\w+", mode)):
            yield f"modes: {mode!r} must be a name, of letters, digits and _"
        for key, value in flags.items():
            if key not in types:
                meant = near(str(key), types)
                yield f"modes: {mode} sets {key}, and there is no such flag" + (
                    f"; did you mean {meant}?" if meant else "")
                continue
            try:
                check(value, types[key])
            except ValueError:
                yield f"modes: {mode}: {key}={value!r} is not {type_name(types[key])}"
    for name in set(cls.modes) & {*model.MECHANISMS, *(mode for each in before for mode in each.modes)}:
        yield f"modes: there is a mode {name} already: choose another name"
    for name in set(cls.neutral) - set(cls.modes):
        yield f"neutral: there is no mode {name}" + (f"; did you mean {near(name, cls.modes)}?"
                                                     if near(name, cls.modes) else "")


def problems_of_names(cls):
    """Yield what in initial_values() and in `neutral` names no parameter and no flag, sentence by sentence.

    Which parameters there are is seen from small models of its modes. A mode that cannot be built so small is
    left to the run that builds it.
    """
    sizes = dict(n_layer=2, n_head=4, n_embd=64, block_size=16, vocab_size=37)
    for mode, flags in cls.modes.items():
        try:
            with torch.device("meta"):
                gpt = model.GPT(model.GPTConfig(**sizes, **flags))
            layer = next(m for m in gpt.modules() if isinstance(m, cls))
            starts = [*layer.initial_values()]
        except Exception:  # a mechanism of one's own may raise anything
            continue
        own = [name for name, _ in layer.named_parameters()]
        for name in (name for name in starts if name not in own):
            yield f"initial_values() names {name!r}, {which_of(name, own, 'its parameters')}"
        flags, every = model.GPTConfig.defaults(), [name for name, _ in gpt.named_parameters()]
        for name in cls.neutral.get(mode, ()):
            if name not in flags and not any(fnmatch(each, f"*{name}") for each in every):
                known = [*cls.fields(), *(f"{cls.name}.{each}" for each in own)]
                yield f"neutral: {mode} names {name!r}, {which_of(name, known, 'its flags and parameters')}"


def which_of(name, known, what):
    """Words behind a name that is none of the known ones."""
    meant = near(str(name), known)
    return (f"which is none of {what}; did you mean {meant}?" if meant else
            f"which is none of {what}: {', '.join(known) or 'there are none'}")


def one_edit_apart(a, b):
    """Whether two names differ by one letter that is missing, added, another, or two that are swapped."""
    if len(a) > len(b):
        a, b = b, a
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))
    if len(a) < len(b):
        return a[at:] == b[at + 1:]
    return a != b and (a[at + 1:] == b[at + 1:] or
                       (a[at:at + 2] == b[at:at + 2][::-1] and a[at + 2:] == b[at + 2:]))


# ---- the command line ----

def take(argv, keep=None, every=True):
    """Arguments in which the files of --mechanism or --mechanisms are added and are the names of their modes.

    With them comes --own_mechanism, their paths; keep: a folder where copies are made first, by digest.
    What a config file names is added, too, as an argument that wins over it. every: a file stands for all its
    modes; without, UserError where it has several.
    """
    taken, files, rest, configs = [], [], list(argv), {}
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if key.removeprefix("--") in NAMING and not equals and rest and not rest[0].startswith("--"):
            equals, value = "=", rest.pop(0)
        if key.removeprefix("--") in NAMING and key.startswith("--"):
            value = ",".join(named(value.split(","), files, keep, every))
        elif key == "--own_mechanism" and equals:
            files += [added(path, keep) for path in value.split(",") if path]
            continue
        elif key.endswith(".py") and not key.startswith("--"):
            configs.update(of_config(key))
        taken.append(key + equals + value)
    given = {arg.partition("=")[0] for arg in taken}
    taken += [f"{key}={','.join(named(words, files, keep, every))}" for key, words in configs.items()
              if key not in given]
    files = list(dict.fromkeys(files))
    return taken + ([f"--own_mechanism={','.join(files)}"] if files else [])


def named(words, files, keep, every):
    """Names of mechanisms, in which a file is those of its modes; its path is put to `files`. UserError."""
    found = []
    for word in map(str.strip, map(str, words)):
        if not (file := FILE.fullmatch(word)):
            found.append(word)
            continue
        path, mode = file.groups()
        files.append(added(path, keep))
        names = modes_in(files[-1], path, mode)
        several = any(len(cls.modes) > 1 for cls in classes_of(opened(files[-1])))
        if several and not (every or mode):
            raise UserError(f"{path} has the modes {', '.join(names)}: name one, as in {path}:{names[0]}")
        found += names
    return found


def modes_in(path, said, mode=None):
    """The names of the modes in a file, which is added by this, or the one of them that is named. UserError.

    said: what the command line calls the file.
    """
    names = add(path)
    if mode and mode not in names:
        raise UserError(f"{said} has no mode {mode}; it has {', '.join(names)}")
    return [mode] if mode else names


def added(path, keep):
    """The path of a file, or of its copy in `keep`, whose mechanisms are added by this. UserError."""
    if "," in str(path):
        raise UserError(f"{path}: the name of a mechanism's file must have no comma, which parts names")
    if keep:
        file = opened(path)
        path = copy(file, Path(keep, file.digest))
    add(path)
    return str(path)


def add_named(args):
    """Add the files of --mechanism in parsed arguments. UserError."""
    for word in (word.strip() for each in args.mechanism for word in each.split(",")):
        file = FILE.fullmatch(word)
        if not file:
            raise UserError(f"--mechanism={word} must be a file here, mine.py: the checkpoint says the rest")
        modes_in(file[1], *file.groups())


# ---- checkpoints ----

def files_for(config):
    """The OwnFiles of the mechanisms of one's own that a GPTConfig has on."""
    return list(dict.fromkeys(file for cls, file in ADDED.items() if cls.is_on(config)))


def record(config):
    """What a checkpoint holds of them: [{"file": name, "digest": ...}]; None: there is nothing to hold."""
    return [dict(file=file.path.name, digest=file.digest) for file in files_for(config)] or None


def held(config, folder):
    """What a new checkpoint in a folder holds of them: {} or {"own_mechanism": ...}; copies go there."""
    for file in files_for(config):
        copy(file, folder)
    return dict(own_mechanism=record(config)) if record(config) else {}


def records_of(state, path):
    """[{"file", "digest"}] that a read checkpoint holds; of one file also without a list. UserError."""
    found = state.get("own_mechanism") or []
    found = found if isinstance(found, list) else [found]
    for each in found:
        of_text = [isinstance(each, dict) and isinstance(each.get(key), str) for key in ("file", "digest")]
        if not all(of_text):
            raise UserError(f"{path}: own_mechanism={each!r} must be a file's name and its digest")
        inside(folder_of(path), each["file"])
    return found


def folder_of(path):
    """The folder that a checkpoint's path means."""
    return Path(path) if Path(path).is_dir() else Path(path).parent


def flat(config):
    """A checkpoint's flags, with those of mechanisms of one's own beside all others."""
    of_own = config.get("own")
    return {**(of_own if isinstance(of_own, dict) else {}),
            **{name: value for name, value in config.items() if name != "own"}}


def turned_on(config):
    """The flags in a flat config that are of no mechanism here, and that are on, with their details.

    A detail begins with the flag that turns its mechanism on.
    """
    names = [name for name in config if name not in model.GPTConfig.__dataclass_fields__]
    firsts = [name for name in names if not any(name != other and name.startswith(other) for other in names)]
    off = tuple(name for name in firsts if config[name] in (None, False))
    return [name for name in names if not off or not name.startswith(off)]


def lacking(state, path):
    """The records of a read checkpoint whose code its flags need, and which was not added. UserError."""
    if not turned_on(flat(state["config"])):
        return []
    there = {file.digest for file in ADDED.values()}
    return [each for each in records_of(state, path) if each["digest"] not in there]


def needs_code(state, path):
    """Whether a read checkpoint's flags need code that was not added. UserError: another text of it was."""
    missing = lacking(state, path)
    on = turned_on(flat(state["config"]))
    if missing and any(cls.flag in on for cls in ADDED):
        raise UserError(what_is_needed(missing, on, path))
    return bool(missing)


def flags_of(state, path):
    """A read checkpoint's flags, flat, without those of mechanisms of one's own that are off. UserError."""
    config = flat(state["config"])
    on = turned_on(config)
    if missing := lacking(state, path):
        raise UserError(what_is_needed(missing, on, path))
    known = model.GPTConfig.defaults()
    off = [name for name in config if name not in known and name not in on and state.get("own_mechanism")]
    if unknown := sorted(set(config) - set(known) - set(off)):
        raise UserError(f"{path} was written by a newer version: unknown flags {', '.join(unknown)}")
    return {name: value for name, value in config.items() if name not in off}


def what_is_needed(missing, on, path):
    """Why a checkpoint with these records cannot be used yet, in one line."""
    files = " and ".join(f"{each['file']} (sha256 {each['digest']}...)" for each in missing)
    other = next((file for cls, file in ADDED.items() if cls.flag in on), None)
    if other:
        return (f"{path} was made with {files}, and {other.path} is another text (sha256 {other.digest}...): "
                "name the file that it was made with")
    return (f"{path} was made with the mechanism in {files}, and what is only read is not run: name its "
            "file, --mechanism=FILE, or say --trust_code to run the one in its folder")


def trust(state, path):
    """Add what a read checkpoint's flags need from its own folder, and say what is run. UserError."""
    folder = folder_of(path)
    for each in lacking(state, path):
        place, wanted = inside(folder, each["file"]), f"{each['file']} (sha256 {each['digest']}...)"
        if not place.is_file():
            raise UserError(f"{path} was made with {wanted}, which is not in {folder}: name it, "
                            "--mechanism=FILE")
        if (found := opened(place).digest) != each["digest"]:
            raise UserError(f"{path} was made with {wanted}, and {place} is another text (sha256 "
                            f"{found}...): name the right one, --mechanism=FILE")
        say(f"--trust_code runs {place}", file=sys.stderr, flush=True)
        add(place, each["digest"])
