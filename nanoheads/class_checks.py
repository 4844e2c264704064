"""
Checks of a mechanism's class: its declarations, small models of its modes, what its hooks give to a layer.

The first two are checked of a class in a file of one's own when it is added (own_mechanism.py). Of a new
class in model.py, small models are checked before it is trained (start.py). Hooks are tried before a run, and
by --check. What a mechanism computes is tried in causality.py and promises.py.
"""

import difflib
import inspect
import re
import types
import typing
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from fnmatch import fnmatch
from functools import partial

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import model
from nanoheads.attention import RowStats, code_of
from nanoheads.common import UserError, fault_of_own_file, ran_out_of_memory
from nanoheads.configurator import check, keys_of, likely_name, type_name
from nanoheads.mechanism import AddedHeads, Mechanism, Outcome, flags_of
from nanoheads.pruning import HeadAxis

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
    yield from problems_of_methods(cls)
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
    for key, known in (("takes", None), ("needs_row_stats", RowStats._fields)):
        names = getattr(cls, key)
        if isinstance(names, property):  # it depends on the flags
            continue
        if not isinstance(names, (tuple, list, set)):
            yield f"{key}={names!r} must be a tuple of names, ({names!r},)"
            return
        if unknown := [name for name in names if known and name not in known]:
            yield f"{key}: there is no {unknown[0]}; there are {', '.join(known)}"
    for key, form in (("modes", f"{{name: {{{cls.flag!r}: ...}}}}"),
                      ("neutral", "{mode: {flag or parameter: value}}")):
        value = getattr(cls, key)
        if not isinstance(value, dict) or not all(isinstance(inner, dict) for inner in value.values()):
            yield f"{key}={value!r} must be a dict of dicts, {form}"
            return
    yield from problems_of_modes(cls)


def problems_of_methods(cls):
    """Yield a sentence for each method that cannot be called with the arguments that it is given."""
    for name, member in vars(Mechanism).items():
        is_method = isinstance(member, (types.FunctionType, staticmethod, classmethod))
        if not is_method or name.startswith("_") and name != "__init__":
            continue
        names = [*inspect.signature(getattr(Mechanism, name)).parameters]
        kind = "" if isinstance(member, types.FunctionType) else f", as a {type(member).__name__}"
        if not kind and isinstance(inspect.getattr_static(cls, name), (staticmethod, classmethod)):
            names.remove("self")
        if wrong := cannot_call(getattr(cls, name), names):
            yield f"{name}() is called with ({', '.join(names)}){kind}: {wrong}"


def cannot_call(function, names):
    """Why a function cannot be called with arguments in the order of these names, in words; None: it can."""
    if not callable(function):
        return f"{in_short(function)} is not a callable object"
    try:
        signature = inspect.signature(function)
        signature.bind(*names)
    except TypeError as e:
        return str(e)
    except ValueError:  # one that is written in C, and does not say
        return None
    own_names = [*signature.parameters]
    if own_names != [*names] and sorted(own_names) == sorted(names):
        return f"it has these arguments in another order, ({', '.join(own_names)})"


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
    """A context in which torch.empty() gives NaN, or the largest integer, and plain layers fill their
    parameters with AS_NEW.
    """
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
    for mode in cls.modes:
        if wrong := wrong_sentences(cls, mode):
            yield wrong
    models = [*small_models(cls)]
    for mode, gpt, layer in models:
        if "_parameters" not in vars(layer):
            yield "__init__ must begin with super().__init__()"
        if any(isinstance(m, model.CausalSelfAttention) for m in layer.modules()):
            yield "it keeps attn, so that two modules contain each other: keep what it needs of attn instead"
        tensors = [name for name, _ in tensors_of(layer)]
        for pattern in cls.neutral.get(mode, ()):
            names = [*model.GPTConfig.defaults(), *(name for name, _ in gpt.named_parameters())]
            if pattern not in names and not any(fnmatch(name, f"*{pattern}") for name in names):
                candidates = [*flags_of(cls), *(f"{cls.name}.{name}" for name in tensors)]
                yield (f"neutral: {mode} names {pattern!r}, which is none of its flags and parameters"
                       f"{did_you_mean(pattern, candidates)}")
        yield from problems_of_values(mode, gpt, layer)
    for _, _, layer in models:
        names = layer.per_head
        if not isinstance(names, (tuple, list, dict, type(None))) or isinstance(names, dict) and not all(
                isinstance(axis, HeadAxis) for axis in names.values()):
            example = names if isinstance(names, str) else "slope"
            yield (f"per_head={names!r} must be a tuple of names, ({example!r},), a dict of names and "
                   "HeadAxis, or None where heads depend on one another")
            return
    per_head = {name for _, _, layer in models for name in layer.per_head or ()}
    tensors = {name for _, gpt, _ in models for m in gpt.modules() if isinstance(m, cls)
               for name, _ in tensors_of(m)}
    for name in sorted(per_head - tensors):
        yield f"per_head names {name!r}, which is none of its tensors{did_you_mean(name, tensors)}"


def wrong_sentences(cls, mode):
    """What is wrong, in words, with what problems() of a class gives for one of its modes; None: nothing."""
    try:
        found = cls.problems(model.GPTConfig(**SMALL, **cls.modes[mode]))
        sentences = [*found] if isinstance(found, Iterable) and not isinstance(found, str) else [None]
    except Exception:  # the run that asks it says so
        return None
    if not all(isinstance(sentence, str) for sentence in sentences):
        return f"problems() must give a list of sentences, or yield them; for {mode} it gives {found!r}"


def tensors_of(module):
    """[(name, parameter or buffer)] of a module and the modules in it."""
    return [*module.named_parameters(), *module.named_buffers()]


def is_empty(t):
    """Whether a tensor, made in values_missing(), has numbers that nobody has set."""
    if t.dtype in (torch.int32, torch.int64):
        return bool((t == torch.iinfo(t.dtype).max).any())
    return t.is_floating_point() and bool(t.isnan().any())


def problems_of_values(mode, gpt, mechanism):
    """Yield a sentence for each parameter or buffer of a mechanism, built in values_missing(), that has no
    initial value, and for each parameter of a plain layer that holds values, some or all, in whose place the
    model would start it at others.
    """
    for path, module in mechanism.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_empty(buffer):
                yield (f"{mode}: the buffer {f'{path}.{name}'.lstrip('.')} has no initial value: fill it in "
                       "__init__, as torch.zeros() does")
        for name, p in module.named_parameters(recurse=False):
            name = f"{path}.{name}".lstrip(".")
            if is_lazy(p):
                yield f"{mode}: {name} has no shape yet, as those of lazy layers: give the layer its sizes"
                return
            if hasattr(p, "initial_value"):
                continue
            code = "self." + re.sub(r"\.(\d+)", r"[\1]", name)
            if not isinstance(module, model.PLAIN_LAYERS) and is_empty(p):
                yield (f"{mode}: {name} has no initial value: fill it in __init__, as torch.zeros() does, or "
                       f"have the model draw it, start_at({code}, Normal(0.02))")
            if isinstance(module, model.PLAIN_LAYERS) and (p != AS_NEW).any():
                start = gpt.plain_start(name, p)
                if isinstance(start, float) and (p == start).all():
                    continue  # training starts from that value in any case
                yield (f"{mode}: __init__ fills {name}, and the model would start it as GPT-2 starts all "
                       f"such layers; say start_at({code}, value)")


# ---- in a forward pass ----

# those in which a layer goes on with what they return or set
HOOKS = ("before_projection", "after_projection", "before_attention", "score_mod", "after_kernel",
         "after_attention", "trace_map")
SCORE = ("score", "b", "h", "t", "s")  # what a score function is called with


def try_hooks(gpt, classes):
    """UserError, with file, line, class and hook, where a hook of these classes gives what its layer cannot
    go on with. gpt: a model on the CPU, whose buffers may change.
    """
    called = []  # where the hooks stand, in the order in which they were called
    for m in [m for m in gpt.modules() if type(m) in classes and not isinstance(m, AddedHeads)]:
        for name in HOOKS:
            if getattr(type(m), name) is not getattr(Mechanism, name):
                setattr(m, name, partial(call_hook, getattr(m, name), called))
    # no dimension of heads has 61 numbers, so that none can be taken for the tokens
    ids = torch.zeros(2, min(gpt.config.block_size, 61), dtype=torch.long)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            gpt.eval().run_blocks(ids, wants_traces="maps")
            with torch.enable_grad():
                x, results = gpt.train().run_blocks(ids, wants_losses=True)
            _, nats = gpt.cross_entropy(x, ids, None, per_token=gpt.needs_nats)
            outcome = Outcome(x, results["predictions"], {}, None, ids, nats, None)
            for cls in classes:
                called.append(place_of(cls.model_losses))
                if wrong := wrong_losses("must return", cls.model_losses(gpt, outcome)):
                    raise UserError(f"{called[-1]} {wrong}")
    except Exception as e:
        if isinstance(e, UserError) or ran_out_of_memory(e) or not called:
            raise
        words = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        wrong = fault_of_own_file(e) or f"{called[-1]}: the layer cannot go on after it: {words}"
        if "NoneType" in words and isinstance(e, (AttributeError, TypeError)):
            wrong += ("; heads.row_stats is None unless the class names in needs_row_stats what it reads, "
                      "positions and n_keys unless it has needs_positions = True")
        raise UserError(wrong) from None


def place_of(hook):
    """A bound method as an error names it: "mine.py, line 5: Cap.score_mod()"."""
    code = code_of(hook)
    return f"{code.co_filename}, line {code.co_firstlineno}: {hook.__qualname__}()"


def call_hook(hook, called, attn, *args):
    """What a hook returns. UserError: its layer cannot go on with that, or with what it has set of heads."""
    heads = next(arg for arg in args if isinstance(arg, model.Heads))
    before = {name: getattr(heads, name) for name in "xqkvy"}
    called.append(place_of(hook))
    returned = hook(attn, *args)
    for problem in (wrong_return(hook.__name__, args, returned), wrong_heads(attn, heads, before)):
        if problem:
            raise UserError(f"{called[-1]} {problem}")
    return returned


def wrong_return(name, args, returned):
    """What is wrong, in words, with what a hook of this name returned for its arguments; None: nothing."""
    if name in ("before_projection", "before_attention", "after_attention") and returned is not None:
        return (f"must return nothing, and returned {in_short(returned)}, which would be ignored: set "
                "heads.x, heads.q, heads.k, heads.v or heads.y, or put a gate into heads.gates")
    if name in ("after_projection", "trace_map"):
        return wrong_shape("must return a tensor", returned, args[0].shape)
    if name == "score_mod" and returned is not None and (wrong := cannot_call(returned, SCORE)):
        return f"must return None or a function of ({', '.join(SCORE)}): {wrong}"
    if name == "after_kernel":
        if not isinstance(returned, tuple) or len(returned) != 2:
            what = "y alone" if torch.is_tensor(returned) else in_short(returned)
            return f"must return y and row_stats, and returned {what}"
        return wrong_shape("must return outputs y", returned[0], args[1].shape, but_last=True)


def wrong_heads(attn, heads, before):
    """What is wrong, in words, with what a hook has set of heads, whose tensors were `before`; None: nothing.
    """
    for name, old in before.items():
        new = getattr(heads, name)
        if old is None or new is old:
            continue
        shape = [*old.shape]
        if name in "kv" and torch.is_tensor(new) and new.shape[1:2] == heads.q.shape[1:2]:
            shape[1] = new.size(1)  # copies of grouped keys or values, one for each head
        if wrong := wrong_shape(f"must leave in heads.{name} a tensor", new, shape, but_last=name != "x"):
            return wrong
    if heads.k is not None and heads.q.size(-1) != heads.k.size(-1):
        return (f"must leave in heads.q and heads.k heads of one size, and theirs are {heads.q.size(-1)} and "
                f"{heads.k.size(-1)}")
    if wrong := wrong_losses("must leave in heads.losses", heads.losses):
        return wrong
    B, T = heads.x.shape[:2]
    shape = (B, attn.n_total, T, attn.head_size)
    for name, gate in heads.gates.items():
        if not torch.is_tensor(gate):
            return f"must put a tensor into heads.gates[{name!r}], not {in_short(gate)}"
        if gate.dim() > 4 or any(n not in (1, m) for n, m in zip(reversed(gate.shape), reversed(shape))):
            return (f"must put into heads.gates[{name!r}] what broadcasts over the outputs {[*shape]}, and "
                    f"its shape is {[*gate.shape]}")


def wrong_losses(words, losses):
    """What is wrong, in words, with losses of a mechanism, in a sentence that begins so; None: nothing."""
    form = f"{words} a dictionary of losses, each a tensor of no dimension"
    if not isinstance(losses, dict):
        return f"{form}, and it is {in_short(losses)}"
    for name, loss in losses.items():
        if not torch.is_tensor(loss) or loss.dim():
            what = f"has the shape {[*loss.shape]}" if torch.is_tensor(loss) else f"is {in_short(loss)}"
            return f"{form}, and {name!r} {what}"


def in_short(value):
    """A value as an error shows it, in a few words: by its type, where it is long."""
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else f"a {type(value).__name__}"


def wrong_shape(words, value, shape, but_last=False):
    """"<words> of the shape ..., and ..." where a value is no tensor of this shape; None: it is.

    but_last: the last dimension is free, since heads may be of another size until they are merged.
    """
    shape = [*shape]
    if not torch.is_tensor(value):
        return f"{words} of the shape {shape}, and it is {in_short(value)}"
    if value.dim() != len(shape) or [*value.shape][:len(shape) - but_last] != shape[:len(shape) - but_last]:
        return f"{words} of the shape {shape}, and its shape is {[*value.shape]}"
