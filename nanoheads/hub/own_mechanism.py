"""
A mechanism in a file of one's own: read, checked, and added to the flags (docs/add-a-mechanism.md).

    python train.py --scale=tiny --mechanism=mine.py        python compare.py --mechanism=mine.py

A run keeps a copy of the file beside its checkpoints, which hold its name and digest, never its code. What
reads such a checkpoint takes the copy, if its digest is right, or the file itself.
"""

import hashlib
import importlib.util
import linecache
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import model
from nanoheads.common import UserError, write_atomic
from nanoheads.configurator import keys_of, near, read_file, where_it_failed
from nanoheads.mechanism import Mechanism, choices


class OwnFile(NamedTuple):
    """A file as it was when it was read: it may be edited while a run goes on."""

    path: Path
    text: bytes

    @property
    def digest(self):
        """The first 16 digits of its SHA-256."""
        return hashlib.sha256(self.text).hexdigest()[:16]


ADDED = {}  # class -> its OwnFile


def opened(path):
    """The OwnFile of a path. UserError."""
    try:
        return OwnFile(Path(path), Path(path).read_bytes())
    except OSError as e:
        raise UserError(f"no mechanism file {path} ({e.strerror}); it holds one class, see "
                        "docs/add-a-mechanism.md") from None


def digest(path):
    """The digest of a file as it is now. UserError."""
    return opened(path).digest


def add(path, wanted=None):
    """Read a file and add the mechanism in it, once; returns the names of its modes. UserError.

    wanted: the digest without which nothing of it is executed.
    """
    file = opened(path)
    if wanted not in (None, file.digest):
        raise UserError(f"{path} is another text than the one wanted (sha256 {wanted}...)")
    for cls, known in ADDED.items():
        if known.digest == file.digest:
            return list(cls.modes)
    cls = class_in(file)
    if other := next((known for each, known in ADDED.items() if each.flag == cls.flag), None):
        raise UserError(f"{path} and {other.path} are two texts of one mechanism, with the flag {cls.flag}: "
                        "one at a time")
    if problem := next(problems(cls), None):
        raise UserError(f"{path}: {cls.__name__}: {problem}")
    model.add_mechanism(cls)
    keys_of.cache_clear()
    choices.cache_clear()
    ADDED[cls] = file
    return list(cls.modes)


def class_in(file):
    """The one class of a Mechanism that an OwnFile defines. UserError."""
    path, name = file.path, f"own_mechanism_{file.digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        # the text that the digest is of: a loader would take bytecode that stands beside it
        code = compile(file.text, str(path), "exec")
        # its source, for the comments of its flags, also when the file is edited or gone
        lines = file.text.decode(errors="replace").splitlines(keepends=True)
        linecache.cache[module.__file__] = len(file.text), None, lines, module.__file__
        exec(code, vars(module))
    except Exception as e:  # whatever a file of one's own may do
        raise UserError(f"{path}, {where_it_failed(e, path)}") from None
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


NAMING = ("mechanism", "mechanisms")  # keys of the command line and of config files


def take(argv, keep=None):
    """Arguments in which a file of --mechanism or --mechanisms is added and is the name of its first mode.

    With it comes --own_mechanism, its path; keep: a folder where a copy is made first, by its digest. What a
    config file names is added, too, as an argument that wins over it.
    """
    taken, files, rest, configs = [], [], list(argv), {}
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if key.removeprefix("--") in NAMING and not equals and rest and not rest[0].startswith("--"):
            equals, value = "=", rest.pop(0)
        if key.removeprefix("--") in NAMING and key.startswith("--"):
            value = ",".join(named(value.split(","), files, keep))
        elif key == "--own_mechanism" and equals:
            files.append(added(value, keep))
            continue
        elif key.endswith(".py") and not key.startswith("--"):
            configs.update(of_config(key))
        taken.append(key + equals + value)
    given = {arg.partition("=")[0] for arg in taken}
    taken += [f"{key}={','.join(named(words, files, keep))}" for key, words in configs.items()
              if key not in given]
    if len({digest(path) for path in files}) > 1:
        raise UserError(f"{' and '.join(files)}: one file of one's own at a time")
    return taken + [f"--own_mechanism={path}" for path in files[:1]]


def of_config(path):
    """{"--mechanism": names} that a config file sets, where one of them is a file."""
    with suppress(UserError):  # of what is wrong with it the configurator speaks
        values = {key: value for key, value in read_file(path).items() if key in NAMING}
        lists = {key: value.split(",") if isinstance(value, str) else value for key, value in values.items()}
        return {f"--{key}": words for key, words in lists.items()
                if isinstance(words, list) and any(str(word).endswith(".py") for word in words)}
    return {}


def named(words, files, keep):
    """Names of mechanisms, in which a file is that of its first mode; its path is put to `files`."""
    found = []
    for word in map(str, words):
        if word.strip().endswith(".py"):
            files.append(added(word.strip(), keep))
            word = add(files[-1])[0]
        found.append(word)
    return found


def added(path, keep):
    """The path of a file, or of its copy in `keep`, whose mechanism is added by this. UserError."""
    path = copy(opened(path), Path(keep, digest(path))) if keep else path
    add(path)
    return str(path)


def copy(file, folder):
    """A copy of an OwnFile in a folder; its path. UserError."""
    target = Path(folder) / file.path.name
    if not target.is_file() or target.read_bytes() != file.text:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, lambda f: f.write(file.text))
    return target


def class_for(config):
    """The mechanism of one's own that a GPTConfig has on; None: it has none."""
    return next((cls for cls in ADDED if cls.is_on(config)), None)


def file_for(config):
    """The OwnFile of the mechanism of one's own that a GPTConfig has on; None: it has none."""
    return ADDED.get(class_for(config))


def record(config):
    """What a checkpoint holds of it: {"file": name, "digest": ...}; None: there is nothing to hold."""
    file = file_for(config)
    return file and dict(file=file.path.name, digest=file.digest)


def held(config, folder):
    """What a new checkpoint in a folder holds of it, {} or {"own_mechanism": ...}; its file is copied there.
    """
    if not (file := file_for(config)):
        return {}
    copy(file, folder)
    return dict(own_mechanism=record(config))


def find(state, path):
    """Add the mechanism that a read checkpoint was made with, from the copy beside it. UserError."""
    held = state.get("own_mechanism")
    if not held:
        return
    if not isinstance(held, dict) or not all(isinstance(held.get(key), str) for key in ("file", "digest")):
        raise UserError(f"{path}: own_mechanism={held!r} must be a file's name and its digest")
    places = [Path(path).parent / Path(held["file"]).name,
              Path((state.get("train") or {}).get("own_mechanism") or "")]
    for place in places:
        if place.is_file() and digest(place) == held["digest"]:
            add(place, wanted=held["digest"])
            return
    where = " and ".join(f"{place} ({'another text' if place.is_file() else 'not there'})"
                         for place in dict.fromkeys(places) if str(place) != ".")
    raise UserError(f"{path} was made with a mechanism of {held['file']} (sha256 {held['digest']}...), which "
                    f"is neither of {where}: put that file beside it")
