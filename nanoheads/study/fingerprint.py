"""
The code that a run's numbers come from, as one hash: each definition that training and scoring reach.

Comments, line breaks and docstrings do not count, nor do definitions that nothing reaches, nor the
mechanisms that are off: a change inside one mechanism repeats its own runs alone, a new one repeats none.
Where no head is moved during training, nor do the statements that name what comes from controller.py.
"""

import ast
import functools
import hashlib
from dataclasses import asdict
from pathlib import Path

from model import MECHANISM_CLASSES, CausalMask
from nanoheads.common import ROOT
from nanoheads.training.config import ControllerConfig

# (file, definition) from which a run is made; what these reach follows
ROOTS = (("train.py", "train"), ("nanoheads/training/checkpoint.py", "build"),
         ("nanoheads/training/scoring.py", "score_windows"))
# modules that a run uses and that its numbers do not come from: a change there repeats nothing
NO_NUMBERS = {"audit", "common", "configurator", "runlog"}
LISTS = {"modes", "neutral"}  # of a mechanism: names for flags, which a run has been given already
MOVER = "nanoheads/heads/controller.py"
# keys of training that change nothing where they are not set
OFF_UNLESS_SET = {"labels", "teacher", "documents", "freeze_trunk", "thaw_from", "skip_lr"}


def off_mechanisms(config):
    """The mechanisms of model.py that a GPTConfig leaves off; every model has a CausalMask."""
    return [cls for cls in MECHANISM_CLASSES if cls is not CausalMask and not cls.is_on(config)]


def own_training(config):
    """{key: value} of a TrainConfig that its run depends on: no key of what it does without."""
    return {name: value for name, value in asdict(config).items()
            if (config.dynamic_heads or name not in ControllerConfig.__dataclass_fields__)
            and (value or name not in OFF_UNLESS_SET)}


def own_flags(config):
    """{flag: value} of a GPTConfig that its model depends on: none of a mechanism that is off."""
    off = {name for cls in off_mechanisms(config) for name in cls.fields()}
    return {name: value for name, value in vars(config).items() if name in config.__dataclass_fields__
            and name not in off}


@functools.cache
def parsed(path):
    """(definitions {name: node}, imports {name: (file, name or None)}, other statements) of a file."""
    definitions, imports, others = {}, {}, []
    for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            definitions[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                definitions[name] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                imports[alias.asname or alias.name] = (alias.name.replace(".", "/") + ".py", None)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                of_package = f"{node.module.replace('.', '/')}/{alias.name}.py"
                is_module = any((above / of_package).is_file() for above in Path(path).parents)
                imports[alias.asname or alias.name] = (of_package, None) if is_module else (
                    node.module.replace(".", "/") + ".py", alias.name)
        elif not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
            others.append(node)
    return definitions, imports, [node for node in others if not isinstance(node, ast.Expr)
                                  or not isinstance(node.value, ast.Constant)]


def without(node, names, fields, unnamed=frozenset()):
    """A copy of a definition without docstrings, LISTS, these names in tuples and these fields of a class.

    unnamed: names whose statements are left out, an `if` on one of them whole.
    """
    node = ast.parse(ast.unparse(node)).body[0]
    for part in ast.walk(node):
        if isinstance(part, ast.Tuple):
            part.elts = [e for e in part.elts if not (isinstance(e, ast.Name) and e.id in names)]
        if isinstance(part, (ast.FunctionDef, ast.ClassDef)):
            part.body = [line for line in part.body if not dropped(line, fields)] or [ast.Pass()]
        if isinstance(part, ast.ClassDef):
            part.bases = [base for base in part.bases if not mentions(base, unnamed)]
        for block in ("body", "orelse", "finalbody"):
            if isinstance(lines := getattr(part, block, None), list):
                left = [line for line in lines if not mentions(line, unnamed)]
                setattr(part, block, left or ([ast.Pass()] if lines else []))
    return node


def mentions(node, names):
    """Whether a statement names one of these; of one that holds others, what stands before those does."""
    if hasattr(node, "body") and not isinstance(node, (ast.If, ast.IfExp, ast.Lambda)):
        return False
    of_if = [node.test] if isinstance(node, ast.If) else [node]
    return any(isinstance(part, ast.Name) and part.id in names
               or isinstance(part, ast.Attribute) and part.attr == "controller" and names
               for each in of_if for part in ast.walk(each))


def dropped(line, fields):
    if isinstance(line, ast.AnnAssign):
        return getattr(line.target, "id", None) in fields
    if isinstance(line, ast.Assign):
        return getattr(line.targets[0], "id", None) in LISTS
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def reached(root, names, fields, moved, roots=ROOTS):
    """{(file, name): its node} of everything that roots reach."""
    found, waiting = {}, list(roots)
    while waiting:
        file, name = waiting.pop()
        path = Path(root, file)
        if (file, name) in found or name in names or path.stem in NO_NUMBERS or not path.is_file():
            continue
        definitions, imports, others = parsed(path)
        if name not in definitions:
            if name in imports:
                waiting.append(imports[name])
            continue
        lines = [(f"line {i}", other) for i, other in enumerate(others)]
        for at, node in [(name, definitions[name]), *lines]:
            if (file, at) in found:
                continue
            still = set() if moved else {each for each, (module, _) in imports.items() if module == MOVER}
            found[file, at] = node = without(node, names, fields, still)
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                    module, member = imports.get(part.value.id, (None, ""))
                    waiting += [(module, part.attr)] if module and member is None else []
                if isinstance(part, ast.Name):
                    waiting.append((file, part.id))
    return found


def code_digest(config, training=None, root=ROOT):
    """A hash of the code that training and scoring a model of this GPTConfig, so trained, reaches."""
    off = off_mechanisms(config)
    moved = training is not None and training.dynamic_heads
    return digest(root, frozenset(cls.__name__ for cls in off),
                  frozenset(name for cls in off for name in cls.fields()), moved)


@functools.cache
def digest(root, names, fields, moved):
    found = reached(root, names, fields, moved)
    lines = sorted(f"{file}: {ast.unparse(node)}" for (file, _), node in found.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
