"""
What is wrong with the class of a mechanism: as it is declared, and as small models of its modes show.

A class in a file of one's own is asked both when it is added (own_mechanism.py), a new one in model.py what
models show, before it is trained (start.py). What it computes is tried in causality.py and promises.py.
"""

import difflib
import re
import typing
from dataclasses import MISSING, fields, is_dataclass
from fnmatch import fnmatch

import torch

import model
from nanoheads.configurator import check, keys_of, near, type_name
from nanoheads.mechanism import Mechanism

SMALL = dict(n_layer=2, n_head=4, n_embd=64, block_size=16, vocab_size=37)  # what models are tried at


# ---- as it is declared ----

def problems_of_class(cls):
    """Yield what is wrong with a class as it is declared, sentence by sentence."""
    hooks = [name for name in vars(Mechanism) if not name.startswith("_")]
    for name in (name for name in vars(cls) if name not in hooks):
        for hook in difflib.get_close_matches(name, hooks, 1, 0.88):  # a letter of nine may be another
            yield (f"{name} is nothing that a mechanism is asked for; did you mean {hook}? If it is your "
                   "own, give it a name that is less like that one")
    if not is_dataclass(cls.Options):
        yield "it needs a class Options inside, with its flags as annotated fields"
        return
    flags = cls.fields()
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
    """Yield what is wrong with the types of a class's flags, and with its modes, sentence by sentence."""
    try:
        hints = typing.get_type_hints(cls.Options)
    except Exception as e:  # whatever an annotation may say
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


def did_you_mean(name, known):
    """Words behind a name that is none of the known ones; "": nothing is like it."""
    nearest = near(str(name), known)
    return f"; did you mean {nearest}?" if nearest else ""


# ---- in small models ----

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
    tried = [*cls.modes.items()]
    for mode, flags in cls.modes.items():
        numbers = {f.name: flags.get(f.name, f.default) for f in fields(cls.Options)}
        moved = {name: 0.75 * value + 0.0625 for name, value in numbers.items() if type(value) is float}
        tried += [(f"{mode}, {name}={value:g}", {**flags, name: value}) for name, value in moved.items()]
    for mode, flags in tried:
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
        of_layer = [name for name, _ in layer.named_parameters()]
        for name in (name for name in starts if name not in of_layer):
            yield (f"initial_values() names {name!r}, which is none of its parameters"
                   f"{did_you_mean(name, of_layer)}")
        flags, parameters = model.GPTConfig.defaults(), [name for name, _ in gpt.named_parameters()]
        for pattern in cls.neutral.get(mode, ()):  # of a moved number there is none
            if pattern not in flags and not any(fnmatch(name, f"*{pattern}") for name in parameters):
                known = [*cls.fields(), *(f"{cls.name}.{name}" for name in of_layer)]
                yield (f"neutral: {mode} names {pattern!r}, which is none of its flags and parameters"
                       f"{did_you_mean(pattern, known)}")
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
