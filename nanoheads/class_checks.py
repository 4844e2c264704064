"""
What is wrong with the class of a mechanism: in its declarations, and in small models of its modes.

Both are checked of a class in a file of one's own when it is added (own_mechanism.py). Of a new class in
model.py, small models are checked before it is trained (start.py). What a mechanism computes is tried in
causality.py and promises.py.
"""

import difflib
import re
import typing
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from fnmatch import fnmatch

import torch
from torch import nn

import model
from nanoheads.configurator import check, keys_of, likely_name, type_name
from nanoheads.mechanism import Mechanism, flags_of

SMALL = dict(n_layer=2, n_head=4, n_embd=64, block_size=16, vocab_size=37)  # flags of the small models
AS_NEW = 0.375  # in place of what PyTorch draws for a plain layer: another value was put there afterwards


# ---- its declarations ----

def problems_of_class(cls):
    """Yield a sentence for each thing that is wrong with the declarations of a class."""
    members = [name for name in vars(Mechanism) if not name.startswith("_")]
    for name in (name for name in vars(cls) if name not in members):
        # 0.88: one letter of nine may differ
        for member in difflib.get_close_matches(name, members, 1, 0.88):
            yield (f"{name} is nothing that a mechanism is asked for; did you mean {member}? If it is your "
                   "own, give it a name that is less like that one")
    if not is_dataclass(cls.Options):
        yield "it needs a class Options inside, with its flags as annotated fields"
        return
    flags = flags_of(cls)
    if not cls.flag or cls.flag not in flags:
        yield f"flag={cls.flag!r} must be one of its Options, the one that turns it on"
        return
    if misnamed := [name for name in flags if not name.startswith(cls.flag)]:
        yield f"Options: {misnamed[0]} must begin with {cls.flag}, as all its flags do"
    if any(f.default is MISSING and f.default_factory is MISSING for f in fields(cls.Options)):
        yield "Options: every flag needs a default, at which it does nothing"
    elif getattr(cls.Options, cls.flag) not in (None, False):
        yield f"Options: {cls.flag} must be off (None or False) where it is not set"
    if there_already := set(flags) & {*model.GPTConfig.defaults(), "own"}:
        yield f"Options: there is a flag {min(there_already)} already: choose another name"
    attributes = {other.name for other in model.MECHANISM_CLASSES} | {*dir(model.CausalSelfAttention)}
    if not str(cls.name).isidentifier() or cls.name in attributes:
        yield f"name={cls.name!r} must be a name of its own: it is the layer's attribute"
    for key, form in (("modes", f"{{name: {{{cls.flag!r}: ...}}}}"),
                      ("neutral", "{mode: {flag or parameter: value}}")):
        value = getattr(cls, key)
        if not isinstance(value, dict) or not all(isinstance(inner, dict) for inner in value.values()):
            yield f"{key}={value!r} must be a dict of dicts, {form}"
            return
    yield from problems_of_modes(cls)


def problems_of_modes(cls):
    """Yield a sentence for each thing that is wrong with the types of a class's flags, or with its modes."""
    try:
        hints = typing.get_type_hints(cls.Options)
    except Exception as e:  # an annotation may be any code
        yield f"Options: an annotation cannot be read: {type(e).__name__}: {e}"
        return
    if not cls.modes:
        yield f"modes must name at least one mode, {{name: {{{cls.flag!r}: ...}}}}"
    types = {**{key: t for key, (t, _, _) in keys_of((model.GPTConfig,)).items()}, **hints}
    for mode, flags in cls.modes.items():
        if not re.fullmatch(r"\w+", str(mode)):
            yield f"modes: {mode!r} must be a name, of letters, digits and _"
        if mode in model.MECHANISMS:
            yield f"modes: there is a mode {mode} already: choose another name"
        if cls.flag not in flags:
            yield f"modes: {mode!r} does not set {cls.flag}, the flag that turns the class on"
        for key, value in flags.items():
            if key not in types:
                yield f"modes: {mode} sets {key}, and there is no such flag{did_you_mean(key, types)}"
                continue
            try:
                check(value, types[key])
            except ValueError:
                yield f"modes: {mode}: {key}={value!r} is not {type_name(types[key])}"
    for name in set(cls.neutral) - set(cls.modes):
        yield f"neutral: there is no mode {name}{did_you_mean(name, cls.modes)}"


def did_you_mean(name, names):
    """"; did you mean ...?" for a name that is none of these names; "" where none is like it."""
    nearest = likely_name(str(name), names)
    return f"; did you mean {nearest}?" if nearest else ""


# ---- in small models ----

@contextmanager
def values_missing():
    """A context in which torch.empty() gives NaN, and plain layers fill their parameters with AS_NEW."""
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    methods = {layer: layer.reset_parameters for layer in (nn.Linear, nn.Embedding, nn.LayerNorm)}
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        for layer in methods:
            layer.reset_parameters = lambda self: [p.data.fill_(AS_NEW) for p in self.parameters()]
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        for layer, method in methods.items():
            layer.reset_parameters = method


class AsConstructed(model.GPT):
    """A GPT whose parameters are as their constructors leave them."""

    def init_weights(self):
        pass


def small_models(cls):
    """Yield (mode, AsConstructed, its first mechanism of this class) of the modes that can be so small. A
    parameter that no constructor has filled is NaN.
    """
    for mode, flags in cls.modes.items():
        try:
            with values_missing():
                gpt = AsConstructed(model.GPTConfig(**SMALL, **flags))
            yield mode, gpt, next(m for m in gpt.modules() if isinstance(m, cls))
        except Exception:  # a mechanism of one's own may raise anything; the run that builds it says so
            continue


def problems_of_models(cls):
    """Yield a sentence for each fault in small models of a class's modes: a name in `per_head` or `neutral`
    that no tensor or flag has, and an initial value that is missing or would be overwritten.
    """
    models = [*small_models(cls)]
    for mode, gpt, layer in models:
        tensors = [name for name, _ in tensors_of(layer)]
        for pattern in cls.neutral.get(mode, ()):
            names = [*model.GPTConfig.defaults(), *(name for name, _ in gpt.named_parameters())]
            if pattern not in names and not any(fnmatch(name, f"*{pattern}") for name in names):
                candidates = [*flags_of(cls), *(f"{cls.name}.{name}" for name in tensors)]
                yield (f"neutral: {mode} names {pattern!r}, which is none of its flags and parameters"
                       f"{did_you_mean(pattern, candidates)}")
        yield from problems_of_values(mode, layer)
    for _, _, layer in models:
        if isinstance(layer.per_head, str):
            yield (f"per_head={layer.per_head!r} must be a tuple of names, ({layer.per_head!r},), or a dict "
                   "of names and HeadAxis")
            return
    per_head = {name for _, _, layer in models for name in layer.per_head}
    tensors = {name for _, gpt, _ in models for m in gpt.modules() if isinstance(m, cls)
               for name, _ in tensors_of(m)}
    for name in sorted(per_head - tensors):
        yield f"per_head names {name!r}, which is none of its tensors{did_you_mean(name, tensors)}"


def tensors_of(module):
    """[(name, parameter or buffer)] of a module and the modules in it."""
    return [*module.named_parameters(), *module.named_buffers()]


def problems_of_values(mode, mechanism):
    """Yield a sentence for each parameter of a mechanism, built in values_missing(), that has no initial
    value, and for each one of a plain layer that holds values, some or all, which the model would overwrite.
    """
    for path, module in mechanism.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if hasattr(p, "initial_value"):
                continue
            name = f"{path}.{name}".lstrip(".")
            code = "self." + re.sub(r"\.(\d+)", r"[\1]", name)
            if not isinstance(module, model.PLAIN_LAYERS) and p.isnan().any():
                yield (f"{mode}: {name} has no initial value: fill it in __init__, as torch.zeros() does, or "
                       f"have the model draw it, start_at({code}, Normal(0.02))")
            if isinstance(module, model.PLAIN_LAYERS) and (p != AS_NEW).any():
                yield (f"{mode}: __init__ fills {name}, and the model would start it as GPT-2 starts all "
                       f"such layers; say start_at({code}, value)")
