"""
What a file of one's own replaced: a mechanism must not change the programs that train and score it.

Before such a file is run, remember() notes what each name in our modules and in their classes means, and what
Python, NumPy and PyTorch have under the names that a score is computed with. changed() compares that with
what is there: after the file was run, before and after each scoring, and before results are written. What a
file puts back before that is not seen, nor what it changes inside lists, dicts and objects.
docs/add-a-mechanism.md
"""

import builtins
import functools
import inspect
import math
import sys
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from nanoheads.common import OWN_FILES, ROOT, UserError

PROGRAMS = {"model", "train", "evaluate", "compare"}  # beside the folders: what trains and scores
LIBRARIES = builtins, math, np, torch, nn, F, torch.Tensor, nn.Module, nn.Linear, nn.Embedding


class Replaced(UserError):
    """A file of one's own replaced something: no fault of the run that was looked at when it was seen."""


OF_COMPILER = "__compiled_fn_", "__resume_at_"  # names that torch.compile adds to the modules it compiles

BEFORE = {}  # (module or class of a library, name in it): (what it means, what that consists of)


def remember():
    """Note what all names mean now."""
    BEFORE.clear()
    BEFORE.update({**of_libraries(), **of_ours()})


def refuse(*paths):
    """UserError where a file of one's own replaced something. paths: of the file; none: of all that ran."""
    if names := changed():
        files = " or ".join(map(str, paths or sorted(OWN_FILES)))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise Replaced(f"{files} replaced {', '.join(names[:3])}{more}; a mechanism must not change the "
                       "programs that train and score it")


def changed():
    """The names that mean something else than what was noted, sorted; none where nothing was noted.

    Of a module of ours that was loaded since, these are the functions that a file of one's own defines.
    """
    if not BEFORE:
        return []
    now, known = {**of_libraries(), **of_ours()}, {module for module, _ in BEFORE}
    found = [at for at in BEFORE if at not in now]
    for at, (value, parts) in now.items():
        module, name = at
        if module not in known:
            wrong = any(isinstance(part, CodeType) and part.co_filename in OWN_FILES for part in parts)
        elif at not in BEFORE:  # a package has a new name for each of its modules, once that is loaded
            is_module = isinstance(value, ModuleType) and sys.modules.get(f"{module}.{name}") is value
            wrong = not is_module and not name.startswith(OF_COMPILER)
        elif BEFORE[at][0] is not value:
            wrong = not is_pytorchs(parts, BEFORE[at][1])
        else:  # a function that is the same and consists of something else is named where it was defined
            home = getattr(value, "__module__", module)
            wrong = [*map(id, parts)] != [*map(id, BEFORE[at][1])] and (home == module or home not in known)
        if wrong:
            found.append(at)
        else:
            BEFORE[at] = value, parts
    return sorted(".".join(filter(None, at)) for at in found)


def is_pytorchs(parts, before):
    """Whether PyTorch itself put a function in the place of one that consisted of `before`, or around it.

    It does so when it first compiles, and when the first optimizer of a class is made.
    """
    codes = [part for part in parts if isinstance(part, CodeType)]
    return bool(codes) and codes[0].co_flags & inspect.CO_NESTED and all(
        Path(torch.__file__).parent in Path(code.co_filename).parents or any(code is part for part in before)
        for code in codes)


# ---- what names mean: {(module or class, name): (value, parts_of(value))} ----

def of_ours():
    """Every name of our modules that are loaded, and of their classes."""
    found = {}
    for name, module in list(sys.modules.items()):
        first = name.split(".")[0]
        ours = first in {"nanoheads", "study", "lab", "__main__", *PROGRAMS}
        if ours and is_program(getattr(module, "__file__", None)):
            found[name, ""] = module, ()
            found.update(names_in(module, name))
    return found


def of_libraries():
    """What can be called by a name of LIBRARIES, for a class that of its bases too, which a method may hide.

    Once something is noted, only what was there then: libraries add to themselves.
    """
    found = {}
    for library in LIBRARIES:
        where = library.__name__
        if isinstance(library, type):
            where = f"{library.__module__}.{where}"
        for each in reversed(getattr(library, "__mro__", [library])):
            found.update({(where, name): (value, parts_of(value)) for name, value in list(vars(each).items())
                          if callable(value) and ((where, name) in BEFORE or not BEFORE)})
    return found


@functools.cache
def is_program(file):
    """Whether a module's file is of this repository, and of what trains and scores; None: it has none."""
    path = Path(file or "/").resolve()
    if path.parent == ROOT:
        return path.stem in PROGRAMS
    return any(ROOT / folder in path.parents for folder in ("nanoheads", "study", "lab"))


def names_in(owner, module, prefix=""):
    """Yield the names in a module or in a class of it, without a class's data, which may well change."""
    for name, value in list(vars(owner).items()):
        data = not callable(value) and not isinstance(value, (classmethod, property))
        if data and (prefix or name.startswith("__")):
            continue
        yield (module, prefix + name), (value, parts_of(value))
        if isinstance(value, type) and (value.__module__, value.__qualname__) == (module, prefix + name):
            yield from names_in(value, module, f"{prefix}{name}.")


def parts_of(value):
    """The code and defaults of a function, a method or a property, which may change while it stays."""
    if isinstance(value, property):
        return (*parts_of(value.fget), *parts_of(value.fset))
    if isinstance(value, (classmethod, staticmethod)):
        return parts_of(value.__func__)
    if isinstance(value, FunctionType):
        inside = parts_of(getattr(value, "__wrapped__", None))  # of a decorator
        return value.__code__, value.__defaults__, *(value.__kwdefaults__ or {}).values(), *inside
    return parts_of(value.__wrapped__) if isinstance(value, type(is_program)) else ()  # of functools.cache
