"""
A mechanism in a file of one's own: read, checked, and added to the flags (docs/add-a-mechanism.md).

    python train.py --scale=tiny --mechanism=mine.py        python compare.py --mechanism=mine.py

A run keeps a copy of the file beside its checkpoints, which hold its name and digest, never its code. What
reads such a checkpoint takes the copy, if its digest is right, or the file itself.
"""

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path

import model
from nanoheads.common import UserError, write_atomic
from nanoheads.configurator import keys_of, near
from nanoheads.mechanism import Mechanism, choices

ADDED = {}  # class -> its file


def digest(path):
    """The first 16 digits of a file's SHA-256. UserError."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError as e:
        raise UserError(f"no mechanism file {path} ({e.strerror}); it holds one class, see "
                        "docs/add-a-mechanism.md") from None


def add(path):
    """Read a file and add the mechanism in it, once; returns the names of its modes. UserError."""
    key = digest(path)
    for cls, file in ADDED.items():
        if digest(file) == key:
            return list(cls.modes)
    cls = class_in(path)
    if problem := next(problems(cls), None):
        raise UserError(f"{path}: {cls.__name__}: {problem}")
    model.add_mechanism(cls)
    keys_of.cache_clear()
    choices.cache_clear()
    ADDED[cls] = Path(path)
    return list(cls.modes)


def class_in(path):
    """The one class of a Mechanism that a file defines. UserError."""
    name = f"own_mechanism_{digest(path)}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:  # whatever a file of one's own may do
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path)]
        line = getattr(e, "lineno", None) or (lines[-1] if lines else "?")
        raise UserError(f"{path}, line {line}: {type(e).__name__}: {' '.join(str(e).split())}") from None
    found = [cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, Mechanism)
             and cls.__module__ == name]
    if len(found) != 1:
        names = ", ".join(cls.__name__ for cls in found) or "none"
        raise UserError(f"{path} must define one class that extends Mechanism; it defines {names}")
    return found[0]


def problems(cls):
    """Yield what is wrong with a class as it is declared, sentence by sentence."""
    own = [name for name in vars(cls.Options).get("__annotations__", {})]
    if not cls.flag or cls.flag not in own:
        yield f"flag={cls.flag!r} must be one of its Options, the one that turns it on"
        return
    if loose := [name for name in own if not name.startswith(cls.flag)]:
        yield f"Options: {loose[0]} must begin with {cls.flag}, as all its flags do"
    if any(getattr(cls.Options, name, ...) is ... for name in own):
        yield "Options: every flag needs a default, at which it does nothing"
    elif getattr(cls.Options, cls.flag) not in (None, False):
        yield f"Options: {cls.flag} must be off (None or False) where it is not set"
    if taken := set(own) & set(model.GPTConfig.__dataclass_fields__):
        yield f"Options: there is a flag {min(taken)} already: choose another name"
    taken = {other.name for other in model.MECHANISM_CLASSES} | set(dir(model.CausalSelfAttention))
    if not cls.name.isidentifier() or cls.name in taken:
        yield f"name={cls.name!r} must be a name of its own: it is the layer's attribute"
    if not cls.modes or any(cls.flag not in flags for flags in cls.modes.values()):
        yield f"modes must name at least one mode, {{name: {{{cls.flag!r}: ...}}}}"
    for name in set(cls.modes) & set(model.MECHANISMS):
        yield f"modes: there is a mode {name} already: choose another name"
    for name in set(cls.neutral) - set(cls.modes):
        yield f"neutral: there is no mode {name}" + (f"; did you mean {near(name, cls.modes)}?"
                                                     if near(name, cls.modes) else "")


def take(argv, keep=None):
    """Arguments in which a file of --mechanism or --mechanisms is added and is the name of its first mode.

    With it comes --own_mechanism, its path; keep: a folder where a copy is made first, by its digest.
    """
    taken, files = [], []
    for arg in argv:
        key, equals, value = arg.partition("=")
        words = value.split(",")
        if key in ("--mechanism", "--mechanisms") and any(word.endswith(".py") for word in words):
            for i, word in enumerate(words):
                if word.endswith(".py"):
                    path = copy(word, Path(keep, digest(word))) if keep else word
                    files.append(str(path))
                    words[i] = add(path)[0]
            arg = f"{key}={','.join(words)}"
        taken.append(arg)
    if len(files) > 1:
        raise UserError(f"{' and '.join(files)}: one file of one's own at a time")
    return taken + [f"--own_mechanism={path}" for path in files]


def copy(path, folder):
    """A copy of a file in a folder; its path. UserError."""
    target, text = Path(folder) / Path(path).name, Path(path).read_bytes()
    if not target.is_file() or target.read_bytes() != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, lambda f: f.write(text))
    return target


def file_for(config):
    """The file of the mechanism of one's own that a GPTConfig has on; None: it has none."""
    return next((str(path) for cls, path in ADDED.items() if cls.is_on(config)), None)


def class_of(path):
    """The class that was added from a file."""
    return next(cls for cls, file in ADDED.items() if str(file) == str(path))


def record(config):
    """What a checkpoint holds of it: {"file": name, "digest": ...}; None: there is nothing to hold."""
    path = file_for(config)
    return path and dict(file=Path(path).name, digest=digest(path))


def find(state, path):
    """Add the mechanism that a read checkpoint was made with, from the copy beside it. UserError."""
    held = state.get("own_mechanism")
    if not held:
        return
    places = [Path(path).parent / held["file"], Path((state.get("train") or {}).get("own_mechanism") or "")]
    for place in places:
        if place.is_file() and digest(place) == held["digest"]:
            add(place)
            return
    where = " and ".join(f"{place} ({'another text' if place.is_file() else 'not there'})"
                         for place in dict.fromkeys(places) if str(place) != ".")
    raise UserError(f"{path} was made with a mechanism of {held['file']} (sha256 {held['digest']}...), which "
                    f"is neither of {where}: put that file beside the checkpoint")
