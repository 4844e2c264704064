"""
Mechanisms in files of one's own (--mechanism=mine.py): run, checked, added to the flags, kept with each run.
docs/your-own-mechanism.md

    python train.py --scale=tiny --mechanism=mine.py    python compare.py --mechanisms=mine.py,other.py:mode
    python sample.py --ckpt out/a --mechanism=out/a/mine.py

A file runs where the command line names it, and nowhere else; class_checks.py says what is wrong with its
classes. What it imports from its own folder are its helpers. A run keeps a copy of all of these beside its
checkpoints, which hold their names and a digest.
"""

import ast
import hashlib
import importlib.util
import os
import shlex
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import model
from nanoheads.class_checks import problems_of_class, problems_of_models
from nanoheads.common import OWN_FILES, ROOT, UserError, fault_of_own_file, write_atomic
from nanoheads.configurator import OWN_FILE, names_in
from nanoheads.mechanism import Mechanism, choices

FILES = {}  # class -> its OwnFile
# the repository's own modules, which are no helpers of a file that lies beside them
OURS = {"nanoheads", "lab", "study", "data", "model", "train", "sample", "evaluate", "compare", "bench",
        "plot_curves"}


class OwnFile(NamedTuple):
    """A file and its helpers as they were when they were read: they may be edited while a run goes on."""

    path: Path
    text: bytes
    helpers: dict = {}  # {path from the file's folder, such as "gates.py" or "project/gates.py": text}

    @property
    def texts(self):
        """{path in a run's folder: text} of the file and its helpers."""
        return {self.path.name: self.text, **self.helpers}

    @property
    def sha256(self):
        """{path in a run's folder: SHA-256 of the text} of the file and its helpers."""
        return {name: hashlib.sha256(text).hexdigest() for name, text in self.texts.items()}

    @property
    def digest(self):
        """The first 16 digits of the SHA-256 of the file; with helpers, of a SHA-256 over all of theirs."""
        sha256 = self.sha256
        file_digest = sha256.pop(self.path.name)
        lines = sorted([file_digest, *(f"{name} {helper_digest}" for name, helper_digest in sha256.items())])
        joint_digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return (joint_digest if self.helpers else file_digest)[:16]

    def __str__(self):
        return " with ".join(filter(None, (str(self.path), ", ".join(self.helpers))))


# ---- running a file ----

def read_own_file(path, helpers=()):
    """The OwnFile of a path, with those of these helpers that lie beside it. UserError: there is no file."""
    path = Path(path)
    try:
        texts = {name: (path.parent / name).read_bytes() for name in helpers
                 if name != path.name and (path.parent / name).is_file()}
        return OwnFile(path, path.read_bytes(), texts)
    except OSError as e:
        raise UserError(f"no mechanism file {path} ({e.strerror}); it holds a class for each mechanism, see "
                        "docs/your-own-mechanism.md") from None


def run(path):
    """(the module that a file makes, its OwnFile). UserError, in one line, where it fails.

    Its helpers then leave sys.modules under the names by which it imports them, as another file may have
    others of the same names.
    """
    file, folder = read_own_file(path), Path(path).resolve().parent
    name = "own_mechanism_" + hashlib.sha256(str(file.path.resolve()).encode() + file.text).hexdigest()[:16]
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, file.path))
    sys.modules[name] = module
    OWN_FILES.add(str(file.path))
    other_helpers = take_out_helpers(folder)
    try:
        with first_on_path(folder):
            exec(compile(file.text, str(file.path), "exec"), vars(module))  # the text that is kept
    except (Exception, SystemExit) as e:  # whatever a file of one's own may do
        del sys.modules[name]
        code_paths = [frame.filename for frame in traceback.extract_tb(e.__traceback__)]
        code_paths += [e.filename] if isinstance(e, SyntaxError) else []
        OWN_FILES.update(code_path for code_path in code_paths if helper_path(code_path, folder))
        raise UserError(str(fault_of_own_file(e) or e)) from None
    finally:
        helpers = take_out_helpers(folder)
        sys.modules.update(other_helpers)
    for helper_name, helper in helpers.items():  # torch.compile finds a function's module by this name
        helper.__name__ = f"{name}_{helper_name.replace('.', '_')}"
        sys.modules[helper.__name__] = helper
    code_paths = [*filter(None, (getattr(helper, "__file__", None) for helper in helpers.values()))]
    OWN_FILES.update(code_paths)
    names = sorted(filter(None, (helper_path(code_path, folder) for code_path in code_paths)))
    return module, file._replace(helpers=read_own_file(path, names).helpers)


@contextmanager
def first_on_path(folder):
    """Inside, a folder is the first on Python's path, as it is of a program in it, and no bytecode is kept:
    Python would know a helper by its size and the second of its last change.
    """
    old_setting, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = old_setting


def take_out_helpers(folder):
    """Take out of sys.modules what was imported from a folder, and return it: {name: module}."""
    first_names = set()
    for name, module in sys.modules.items():
        if "." in name or name.startswith(("__", "own_mechanism_")):
            continue
        attributes = getattr(module, "__dict__", {})
        location = next(iter(attributes.get("__path__") or ()), attributes.get("__file__"))
        # not in a folder of that folder
        if location and helper_path(location, folder) == Path(location).name:
            first_names.add(name)
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in first_names}


def helper_path(location, folder):
    """The path of a module's file, or of a package's folder, from the folder in which it is: "gates.py", or
    "project/gates.py"; None: it is elsewhere, or there as a library, or one of the repository's own.
    """
    location = Path(location).parent.resolve() / Path(location).name
    is_ours = ROOT in location.parents and location.relative_to(ROOT).parts[0].removesuffix(".py") in OURS
    if folder in location.parents and not is_ours:
        name = location.relative_to(folder)
        return name.as_posix() if all(part.isidentifier() for part in name.with_suffix("").parts) else None


def copy(file, folder):
    """A copy of an OwnFile and its helpers in a folder; the path of the first. UserError."""
    for name, text in file.texts.items():
        target = Path(folder) / name
        if not target.is_file() or target.read_bytes() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, lambda f, text=text: f.write(text))
    return Path(folder) / file.path.name


# ---- adding its mechanisms ----

def add(path, keep=None):
    """Run a file, unless it was, and add the mechanisms that it defines; the names of all their modes.

    keep: a folder; what is added is then a copy that is made there, by digest. UserError.
    """
    if file := find_added(path):
        return [name for cls in classes_of(file) for name in cls.modes]
    module, file = run(path)
    refuse_twice(file)
    classes = mechanisms_in(module, path)
    try:
        for cls in classes:
            others = [other for other in FILES if other.flag == cls.flag and other not in classes]
            if others:
                raise UserError(f"{path} and {FILES[others[0]].path} are two texts of one mechanism, with "
                                f"the flag {cls.flag}: one at a time")
            refuse(path, cls, problems_of_class(cls))
            model.add_mechanism(cls)
            FILES[cls] = file
            choices.cache_clear()
            refuse(path, cls, problems_of_models(cls))
    except BaseException:  # no class stays that was not checked to the end
        remove(classes_of(file))
        raise
    if keep:
        FILES.update(dict.fromkeys(classes, file._replace(path=copy(file, Path(keep, file.digest)))))
    return [name for cls in classes for name in cls.modes]


def find_added(path):
    """The OwnFile that was added from a path, or from another with the same text and helpers; None."""
    return next((file for file in FILES.values()
                 if read_own_file(path, file.helpers).digest == file.digest), None)


def remove(classes):
    """Take back what add() did to these classes."""
    for cls in classes:
        model.remove_mechanism(cls)
        FILES.pop(cls)
    choices.cache_clear()


def classes_of(file):
    """The classes of mechanisms that an OwnFile defines; none where it was not added."""
    return [cls for cls, its_file in FILES.items() if its_file.digest == file.digest]


def mechanisms_in(module, path):
    """The classes of mechanisms that a file's module defines. UserError: it defines none."""
    classes = [cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, Mechanism)
               and cls.__module__ == module.__name__]
    # a class without a flag that others extend is what they share
    classes = [cls for cls in classes if cls.flag or not any(cls in other.__mro__[1:] for other in classes)]
    if not classes:
        raise UserError(f"{path} must define a class that extends Mechanism; it defines none")
    return classes


def refuse_twice(file):
    """UserError where an OwnFile has two classes of one name, of which Python keeps the last."""
    lines = {}
    for node in ast.parse(file.text).body:
        if isinstance(node, ast.ClassDef) and lines.setdefault(node.name, node.lineno) != node.lineno:
            raise UserError(f"{file.path}: class {node.name} of line {lines[node.name]} is defined anew in "
                            f"line {node.lineno}, and Python keeps that one alone: give it another name")


def refuse(path, cls, sentences):
    """UserError with the first of these sentences about a class, if there is one."""
    for sentence in sentences:
        raise UserError(f"{path}: {cls.__name__}: {sentence}")


# ---- the command line ----

def add_arguments(parser):
    """The argument of every program that reads checkpoints, by which code of one's own is run."""
    parser.add_argument("--mechanism", action="append", default=[], metavar="FILE",
                        help="where a checkpoint has a mechanism of your own: its file, mine.py, or the copy "
                             "in the run's folder; several with commas between, or repeated")


def add_named(args):
    """Add the files of --mechanism in parsed arguments. UserError."""
    words = [word.strip() for argument in args.mechanism for word in argument.split(",")]
    for word in words:
        if not OWN_FILE.fullmatch(word):
            raise UserError(f"--mechanism={word} must be a file here, mine.py: the checkpoint says the rest")
    add_files(words)


def add_from_command(command, keep=None, all_modes=True):
    """Add the files that a configurator.Command names; the Command that names their modes in their place.

    Their paths are in it as own_mechanism. keep: see add(). all_modes: a file stands for all its
    modes; without it, UserError where it has several.
    """
    names, modes_of = command.names(), {}
    _, files = add_files(names.pop("own_mechanism", ()), keep)
    for key, words in names.items():
        modes, more = add_files(words, keep, all_modes)
        files += more
        if modes != words:
            modes_of[key] = ",".join(modes)
    refuse_same_names(files)
    return command.with_arguments(**modes_of, **(dict(own_mechanism=paths_of(files)) if files else {}))


def add_from_arguments(args):
    """add_from_command() for the parsed arguments of bench.py, --mechanisms and --own_mechanism."""
    _, files = add_files(names_in(args.own_mechanism))
    if args.mechanisms:
        modes, more = add_files(names_in(args.mechanisms))
        args.mechanisms, files = ",".join(modes), files + more
    args.own_mechanism = paths_of(files) or None


def paths_of(files):
    """The paths of OwnFiles, each once, as --own_mechanism takes them."""
    return ",".join(dict.fromkeys(str(file.path) for file in files))


def add_files(words, keep=None, all_modes=True):
    """(names of mechanisms, in which a file is those of its modes; the OwnFiles added). UserError."""
    names, files = [], []
    for word in words:
        if not (match := OWN_FILE.fullmatch(word)):
            names.append(word)
            continue
        path, mode = match.groups()
        modes, file = add(path, keep), find_added(path)
        if mode and mode not in modes:
            raise UserError(f"{path} has no mode {mode}; it has {', '.join(modes)}")
        if not (mode or all_modes) and any(len(cls.modes) > 1 for cls in classes_of(file)):
            raise UserError(f"{path} has the modes {', '.join(modes)}: name one, as in {path}:{modes[0]}")
        files.append(file)
        names += [mode] if mode else modes
    return names, files


def refuse_same_names(files):
    """UserError where two OwnFiles, or helpers of theirs, have one name and other texts: a run keeps both."""
    first_of_name = {}
    for file in files:
        for name, text in file.texts.items():
            other = first_of_name.setdefault(name, file)
            if other.texts[name] != text:
                raise UserError(f"{file.path} and {other.path} come with two different {name}, and a run "
                                "keeps both in its folder: rename one of them")


# ---- checkpoints ----

def files_for(config):
    """The OwnFiles of the mechanisms of one's own that a GPTConfig has on."""
    return [*{file.digest: file for cls, file in FILES.items() if cls.is_on(config)}.values()]


def record(config):
    """What a checkpoint says of the files of own mechanisms: [{"file": name, "digest": ...}], and "helpers"
    where a file has some.
    """
    return [dict(file=file.path.name, digest=file.digest,
                 **({"helpers": [*file.helpers]} if file.helpers else {}))
            for file in files_for(config)]


def record_text(record):
    """An entry of record() as config.json has it: "mine.py 0123456789abcdef gates.py"."""
    return " ".join([record["file"], record["digest"], *record.get("helpers", ())])


def record_from_text(words):
    """The record that record_text() was made of."""
    stem, _, others = words.partition(".py ")  # the file's name may have spaces
    digest, *helpers = others.split()
    return dict(file=f"{stem}.py", digest=digest, helpers=helpers)


def keep(config, folder):
    """Copy the files of the mechanisms that a config has on into the folder of its run. UserError."""
    for file in files_for(config):
        copy(file, folder)


def missing_records(state):
    """The records in a read checkpoint, as record()'s, whose code was not added."""
    digests = {file.digest for file in FILES.values()}
    return [record for record in state.get("own_mechanism") or [] if record["digest"] not in digests]


def flags_of(state, path):
    """A read checkpoint's flags. UserError: they need code that was not added, or are of another version."""
    flags = {name: value for name, value in state["config"].items() if name != "own"}
    if isinstance(own_flags := state["config"].get("own"), dict):  # as asdict() of a GPTConfig has them
        flags.update(own_flags)
    if missing_records(state):
        raise UserError(naming_advice(state, flags, path))
    if unknown := sorted(set(flags) - set(model.GPTConfig.defaults())):
        raise UserError(f"{path} was written by another version: unknown flags {', '.join(unknown)}")
    return flags


def naming_advice(state, flags, path):
    """A line about a read checkpoint whose code was not added. Where the copies in its folder are the files
    that it was made with, the line ends in the command that names them. flags: see flags_of().
    """
    folder, missing = Path(path) if Path(path).is_dir() else Path(path).parent, missing_records(state)
    made_with = {record["digest"] for record in state["own_mechanism"]}
    files = " and ".join(f"{record['file']} (sha256 {record['digest']}...)" for record in missing)
    message = f"{path} was made with the mechanism in {files}"
    for cls, file in FILES.items():
        if cls.flag in flags and file.digest not in made_with:
            return f"{message}, and {file} is another text (sha256 {file.digest}...): name the right file"
    for record in missing:
        if not (folder / record["file"]).is_file():
            return (f"{message}, and there is no copy {folder / record['file']}: name the right file, "
                    "--mechanism=FILE")
        file_copy = read_own_file(folder / record["file"], record.get("helpers", ()))
        if file_copy.digest != record["digest"]:
            return (f"{message}, and {file_copy} is another text (sha256 {file_copy.digest}...): "
                    "name the right file, --mechanism=FILE")
    names = " and ".join(record["file"] for record in missing)
    return (f"{path} was made with the mechanism in {names}, whose code runs only where it is named: "
            f"{command_with([folder / record['file'] for record in missing])}")


def command_with(files):
    """The command of this process, and with it the files of one's own to run; of other code, such as a
    notebook, the call that adds them.
    """
    main = sys.modules["__main__"]
    program_path = Path(getattr(main, "__file__", None) or "/").resolve()
    if program_path.parent not in (ROOT, ROOT / "lab"):
        return "; ".join(f"own_mechanism.add({str(file)!r})" for file in files)
    # train.py and compare.py would turn on what --mechanism names, and take the last --own_mechanism alone
    key = "own_mechanism" if program_path.name in ("train.py", "compare.py") else "mechanism"
    paths = dict.fromkeys(map(str, [*(file.path for file in FILES.values()), *files]))
    option = f"--{key}={','.join(paths)}"
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return f"add {shlex.quote(option)} to the command of torchrun"
    program = ["-m", main.__spec__.name] if main.__spec__ else [sys.argv[0]]
    return shlex.join(["python", *program, *sys.argv[1:], option])
