"""
Config files and --key=value arguments -> typed, validated dataclasses.

    python train.py config/x.py [config/y.py ...] [--key=value] [--key value] [--flag]

A config file is plain Python assignments and holds only what differs from the defaults; later files and
then the command line win. Every problem is reported at once, in plain lines, before anything runs.
"""

import ast
import difflib
import inspect
import re
import runpy
import types
import typing
from dataclasses import MISSING, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# nanoGPT's names for what we call otherwise: offered when somebody brings a config along
OLD_NAMES = {"learning_rate": "lr", "eval_iters": "eval_tokens", "always_save_checkpoint": "save_interval",
             "decay_lr": "schedule", "backend": "device", "wandb_name": "wandb_run_name"}


class ConfigError(Exception):
    """What is wrong with a configuration, one problem a line."""


def keys_of(classes):
    """{key: (type, default, comment)} over all fields; the comment is the one behind the field in the source."""
    keys = {}
    for cls in classes:
        comments = dict(re.findall(r"^    (\w+):[^#\n]*#\s*(.*)$", inspect.getsource(cls), re.M))
        hints = typing.get_type_hints(cls)
        for f in fields(cls):
            default = f.default if f.default is not MISSING else f.default_factory()
            keys[f.name] = (hints[f.name], default, comments.get(f.name, ""))
    return keys


def type_name(t):
    return " or ".join("None" if a is type(None) else str(a) if typing.get_args(a) else a.__name__ for a in alternatives(t))


def alternatives(t):
    """The plain types that `t` allows: Optional[int] -> [int, NoneType]."""
    return typing.get_args(t) if typing.get_origin(t) in (typing.Union, types.UnionType) else [t]


def check(value, t):
    """`value` as type `t`, or ValueError; an int is a float, a bool is not an int."""
    for a in alternatives(t):
        base = typing.get_origin(a) or a
        if base is list and isinstance(value, (list, tuple)):
            item = (typing.get_args(a) or (object,))[0]
            return [check(v, item) for v in value] if item is not object else list(value)
        if base is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if base is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, base) and not (isinstance(value, bool) and base is not bool):
            return value
    raise ValueError


def parse(text, t):
    """The value that `text`, from the command line, means for type `t`, or ValueError."""
    kinds = alternatives(t)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    if bool in kinds and text.lower() in ("true", "false", "yes", "no", "on", "off", "1", "0"):
        return text.lower() in ("true", "yes", "on", "1")
    if str in kinds:
        return text
    if any((typing.get_origin(a) or a) is list for a in kinds) and not text.startswith(("[", "(")):
        return check([literal(s.strip()) for s in text.split(",") if s.strip()], t)
    return check(literal(text), t)


def literal(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def nearest(key, keys):
    if key in OLD_NAMES and OLD_NAMES[key] in keys:
        return f"; did you mean {OLD_NAMES[key]}?"
    close = difflib.get_close_matches(key, keys, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else "; --help lists the keys"


def read_file(path):
    """The public assignments of a config file, as a dict. Looked for here, then in the repository."""
    found = next((p for p in (Path(path), ROOT / path) if p.is_file()), None)
    if found is None:
        near = difflib.get_close_matches(Path(path).name, [p.name for p in (ROOT / "config").glob("*.py")], 1, 0.4)
        raise ConfigError(f"no config file {path}" + (f"; did you mean config/{near[0]}?" if near else ""))
    try:
        names = runpy.run_path(str(found))
    except Exception as e:
        raise ConfigError(f"{path}: {type(e).__name__}: {e}")
    return {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, types.ModuleType)}


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
            t = keys.get(key, (str,))[0]
            takes = rest and not rest[0].startswith("--")
            if bool in alternatives(t) and takes:
                takes = rest[0].lower() in ("true", "false", "yes", "no", "on", "off", "1", "0", "none", "null")
            text = rest.pop(0) if takes else "True"
        given.append((key, text))
    return files, given


def help_text(classes, doc):
    lines = [doc.strip(), ""]
    for cls in classes:
        for line in inspect.getsource(cls).splitlines():
            heading = re.match(r"\s+# (---- .*)", line)
            name = re.match(r"    (\w+):", line)
            if heading:
                lines += ["", heading[1]]
            elif name and name[1] in keys_of([cls]):
                t, default, comment = keys_of([cls])[name[1]]
                lines.append(f"  --{name[1]:<28} {type_name(t):<14} {default!r:<16} {comment}")
    return "\n".join(lines)


def load(classes, argv, doc=""):
    """One instance per dataclass, from config files and arguments.

    Raises ConfigError with every problem found: unknown keys, wrong types, and what each class's own
    problems() says. `--help` prints all keys and exits.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(classes, doc))
        raise SystemExit(0)
    keys = keys_of(classes)
    values, bad = {}, []
    files, given = split_args(argv, keys)
    for source, pairs, read in [(f, None, check) for f in files] + [("command line", given, parse)]:
        if pairs is None:
            try:
                pairs = read_file(source).items()
            except ConfigError as e:
                bad.append(str(e))
                continue
        for key, value in pairs:
            if key not in keys:
                bad.append(f"{source}: unknown key {key}{nearest(key, keys)}")
                continue
            try:
                values[key] = read(value, keys[key][0])
            except ValueError:
                bad.append(f"{source}: {key}={value!r} is not {type_name(keys[key][0])}")
    made = []
    for cls in classes:
        made.append(cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values}))
    if not bad:
        for instance in made:
            bad += instance.problems()
    if bad:
        raise ConfigError("\n".join(bad))
    return made
