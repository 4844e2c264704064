"""
Config files and --key=value arguments -> typed, validated dataclasses.

    python train.py config/x.py [config/y.py ...] [--key=value] [--key value] [--flag]

A config file is plain Python assignments and holds only what differs from the defaults; later files and
then the command line win. Every problem is reported at once, in plain lines, before anything runs.
"""

import ast
import difflib
import functools
import inspect
import math
import re
import runpy
import traceback
import types
import typing
from dataclasses import MISSING, fields
from pathlib import Path

from common import UserError

ROOT = Path(__file__).resolve().parent
TRUE, FALSE, NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")
# nanoGPT's names for what is called otherwise here, for those who bring a config along
OLD_NAMES = {"learning_rate": "lr", "gradient_accumulation_steps": "grad_accum", "eval_iters": "eval_tokens (counted in tokens)",
             "decay_lr": "schedule (cosine or trapezoid)", "backend": "device (it decides the backend)",
             "always_save_checkpoint": "save_interval (ckpt.pt is always the last, best.pt the best)"}


# ---- types ----

def alternatives(t):
    """The plain types that `t` allows: Optional[int] -> (int, NoneType)."""
    return typing.get_args(t) if typing.get_origin(t) in (typing.Union, types.UnionType) else (t,)


def type_name(t):
    return " or ".join("None" if a is type(None) else str(a) if typing.get_args(a) else a.__name__ for a in alternatives(t))


def check(value, t):
    """`value` as type `t`, or ValueError: an int is a float, 1e3 is an int, a bool is neither, NaN is nothing."""
    for a in alternatives(t):
        base, item = typing.get_origin(a) or a, (typing.get_args(a) or (None,))[0]
        if isinstance(value, bool) and base is not bool:
            continue
        if base is list and isinstance(value, (list, tuple)):
            return [check(v, item) for v in value] if item else list(value)
        if base is float and isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
        if base is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if base is not float and isinstance(value, base):
            return value
    raise ValueError


def parse(text, t):
    """The value that `text`, from the command line, means for type `t`, or ValueError."""
    kinds, low = alternatives(t), text.lower()
    if type(None) in kinds and low in NONE:
        return None
    if bool in kinds and low in TRUE + FALSE:
        return low in TRUE
    if str in kinds:
        return text
    try:
        return check(ast.literal_eval(text), t)
    except (ValueError, SyntaxError):
        items = next((a for a in kinds if typing.get_origin(a) is list), None)
        if items is None:
            raise ValueError
        return [parse(s.strip(" '\""), typing.get_args(items)[0]) for s in text.strip("[]()").split(",") if s.strip()]  # a,b


# ---- keys ----

@functools.cache  # reading the source takes 0.1 s
def keys_of(classes):
    """{key: (type, default, comment)} over all fields; the comment is the one behind the field in the source."""
    keys = {}
    for cls in classes:
        comments = dict(re.findall(r"^    (\w+):[^#\n]*#\s*(.*)$", inspect.getsource(cls), re.M))
        hints = typing.get_type_hints(cls)
        for f in fields(cls):
            keys[f.name] = hints[f.name], f.default if f.default is not MISSING else f.default_factory(), comments.get(f.name, "")
    return keys


def nearest(key, keys):
    """(the key that was probably meant or None, a few words about it)."""
    old, *more = OLD_NAMES.get(key, "").split(" ", 1)
    if old in keys:
        return old, f"nanoGPT's {key} is {' '.join([old, *more])} here"
    close = difflib.get_close_matches(key, keys, 1, 0.5)
    return (close[0], f"did you mean {close[0]}?") if close else (None, "--help lists the keys")


def help_text(classes, doc):
    """Every key with type, default and comment, under the headings that the dataclasses have in the source."""
    lines, keys = [doc.strip()], keys_of(classes)
    for line in (line for cls in classes for line in inspect.getsource(cls).splitlines()):
        if heading := re.match(r"    # (---- .*)", line):
            lines += ["", heading[1]]
        elif (field := re.match(r"    (\w+):", line)) and field[1] in keys:
            t, default, comment = keys[field[1]]
            lines.append(f"  --{field[1]:<24} {type_name(t):<18} {default!r:<20} {comment}")
    return "\n".join(lines)


# ---- sources ----

def read_file(path):
    """The public assignments of a config file, as a dict; looked for here, then in the repository. UserError."""
    found = next((p for p in (Path(path), ROOT / path) if p.is_file()), None)
    if found is None:
        if "=" in path:
            raise UserError(f"no config file {path}; a key takes two dashes: --{path.lstrip('-')}")
        near = difflib.get_close_matches(Path(path).name, [p.name for p in (ROOT / "config").glob("*.py")], 1, 0.4)
        raise UserError(f"no config file {path}" + (f"; did you mean config/{near[0]}?" if near else ""))
    try:
        names = runpy.run_path(str(found))
    except Exception as e:
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(found)]
        line = getattr(e, "lineno", None) or (lines[-1] if lines else "?")
        raise UserError(f"{path}, line {line}: {type(e).__name__}: {' '.join(str(getattr(e, 'msg', e)).split())}")
    return {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, types.ModuleType) and not callable(v)}


def split_args(argv, keys):
    """argv -> (config files, [(key, text)]); a bare --flag is True, and a bool takes a value only if it reads as one."""
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
            takes = rest and not rest[0].startswith("--") and (not is_bool or rest[0].lower() in TRUE + FALSE + NONE)
            text = rest.pop(0) if takes else "True" if is_bool else None
        given.append((key, text))
    return files, given


def load(classes, argv, doc="", together=None, more=None):
    """One instance per dataclass, from config files and arguments; `given` on each is the set of keys that they set.

    more: {where it comes from: {key: value}} wins over the files, and the command line over both.

    Raises UserError with every problem there is: unknown keys, wrong types, what each class's problems()
    says, and what together(*instances) says of all of them side by side. `--help` prints the keys and exits.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(classes, doc))
        raise SystemExit(0)
    keys, values, bad, wrong, lost = keys_of(classes), {}, [], set(), False
    files, given = split_args(argv, keys)
    sources = []
    for path in files:
        try:
            sources += [(path, key, value, check) for key, value in read_file(path).items()]
        except UserError as e:
            bad.append(str(e))
            lost = True  # what it would have set is not known, so the values cannot be judged
    for source, given_there in (more or {}).items():
        sources += [(source, key, value, check) for key, value in given_there.items()]
    for source, key, value, read in sources + [("command line", key, text, parse) for key, text in given]:
        if key not in keys:
            meant, words = nearest(key, keys)
            bad.append(f"{source}: unknown key {key}; {words}")
            wrong.update([meant] if meant else [])
        elif value is None and read is parse:
            bad.append(f"{source}: --{key} needs a value ({type_name(keys[key][0])})")
            wrong.add(key)
        else:
            try:
                values[key] = read(value, keys[key][0])
            except ValueError:
                bad.append(f"{source}: {key}={value!r} is not {type_name(keys[key][0])}")
                wrong.add(key)
    made = []
    for cls in classes:
        made.append(cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values}))
        made[-1].given = {f.name for f in fields(cls)} & set(values)
    if not lost:
        found = [p for instance in made for p in instance.problems()] + (together(*made) if together else [])
        # a key named in `wrong` kept its default, which nobody asked for: what follows from that is no news
        bad += [p for p in found if not any(re.search(rf"\b{key}\b", p) for key in wrong)]
    if bad:
        raise UserError("\n".join(bad))
    return made
