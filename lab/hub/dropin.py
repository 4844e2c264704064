"""
Puts mechanisms into a loaded Hugging Face model: gates, head states, constraint heads, head masks. As layers
of one's own they are in lab/hub/layers.py.

    insert(model, "acag,sentinel")        gates into a loaded Hugging Face model, neutral as they start
    aux_losses(model, targets)            their own losses; predictions(model): scores of constraint heads
    Control(model).set_gate(0, 1, 0.0)    gates by hand; set_state(): states and consent of agency
    load(folder)                          what model.save_pretrained(folder) wrote of such a model
    mask_heads(model, {layer: [heads]})   the model's own heads off, and on again

How that runs is in lab/hub/inserted.py. transformers is an optional extra: insert() and load() alone
import it.
"""

import importlib
import math
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn as nn

from model import (ACAG, MECHANISM_CLASSES, MECHANISMS, XSA, Agency, ConstraintHeads, GPTConfig, HeadNorm,
                   OutputGate, Routing, Sentinel, Sink, plain_parameters)
from nanoheads.checkpoint import IGNORED_FLAGS
from nanoheads.common import UserError
from nanoheads.configurator import likely_name
from nanoheads.by_hand import HeadControl
from nanoheads.mechanism import Normal, flags_of, set_to
from lab.hub.huggingface import check_loaded, config_of, sizes
from lab.hub.inserted import (InsertedAttention, NeoAttention, attend_inserted, mask_and_positions,
                              remember_call)


# ---- gates in a Hugging Face model ----

class Place(NamedTuple):
    """Where a layer of a model has its attention."""

    parent: nn.Module  # the module that holds it
    name: str          # under this name
    attn: nn.Module
    proj: nn.Module    # its projection out


# model_type -> the base model's blocks, a block's attention, its projection out
LLAMA_LIKE = "llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "smollm3", "starcoder2", "phi3"
FAMILIES = {"gpt2": ("h", "attn", "c_proj"), "gpt_neo": ("h", "attn.attention", "out_proj"),
            "gpt_neox": ("layers", "attention", "dense"),
            **dict.fromkeys(LLAMA_LIKE, ("layers", "self_attn", "o_proj"))}

# what can do with a model's own projections
INSERTABLE = (XSA, HeadNorm, Routing, Sentinel, Agency, OutputGate, ConstraintHeads, ACAG, Sink)
# flags that train.py's steps or its teacher give a meaning to
OF_TRAINING = ("constraint_warmup", "constraint_stop", "constraint_match", "constraint_features")


def require(name):
    """Import an optional module; of transformers, whose masks are called in another way before version 5.4,
    no older one. Raises UserError.
    """
    try:
        module = importlib.import_module(name)
    except ImportError:
        raise UserError(f'{name.split(".")[0]} is missing: pip install -e ".[hf]"') from None
    if name == "transformers" and tuple(map(int, module.__version__.split(".")[:2])) < (5, 4):
        raise UserError(f"gates go into models of transformers 5.4 and later, and here is "
                        f"{module.__version__}: pip install -U transformers")
    return module


def blocks_of(model):
    """The blocks of a model. Raises UserError for one of a family that is not known."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise UserError(f"{type(model).__name__} ({kind}) is of none of the families {', '.join(FAMILIES)}")
    if getattr(config, "add_cross_attention", False):
        raise UserError(f"{type(model).__name__} has cross-attention, which is not taken")
    return getattr(model.base_model, FAMILIES[kind][0])


def places(model):
    """The Place of every layer. Raises UserError for a model of a family that is not known."""
    blocks = blocks_of(model)
    _, path, proj = FAMILIES[model.config.model_type]
    path, _, name = path.rpartition(".")
    parents = [block.get_submodule(path) for block in blocks]
    attns = [getattr(parent, name) for parent in parents]
    return [Place(parent, name, attn, getattr(attn, proj)) for parent, attn in zip(parents, attns)]


def insert(model, mechanisms=(), anyway=False, **flags):
    """Put mechanisms into a loaded Hugging Face model, in place, and return it: its logits stay as they were.

    mechanisms: names of MECHANISMS, with commas or as a list; flags: fields of GPTConfig, which win. Routing
    starts with all heads, unless routing_top_k says how many. Where a gate starts at another constant than 1,
    the projection out makes up for it. What cannot be neutral is refused; with anyway=True it starts as in a
    new model. Raises UserError, and then the model is as it was.
    """
    require("transformers")
    layers, saved_flags = places(model), getattr(model.config, "nanoheads", {})
    if saved_flags:
        names = ", ".join(cls.flag for cls in INSERTABLE if cls.flag in saved_flags)
        is_inserted = bool(inserted_attention(model))
        raise UserError(f"the model has {names} already: insert all in one call" if is_inserted else
                        f"the model was saved with {names}, which only dropin.load(folder) reads")
    config = gpt_config(model, mechanisms, flags)
    inserted_layers = build_gates(model, layers, config)
    constants = [math.prod(start(m, config, anyway) for m in inserted.mechanisms())
                 for _, inserted in inserted_layers]
    for (place, inserted), constant in zip(inserted_layers, constants):  # from here on nothing can be refused
        scale_columns(place.proj, 1 / constant, inserted)
    attach(model, inserted_layers, config)
    lower_sinks(model, [inserted for _, inserted in inserted_layers if inserted.sink is not None])
    return model


def build_gates(model, layers, config):
    """[(Place, InsertedAttention)] of the layers. UserError for quantised weights."""
    inserted_layers = []
    for i, place in enumerate(layers):
        weight = place.proj.weight
        if not weight.is_floating_point():
            raise UserError(f"{type(model).__name__} is quantised, in {weight.dtype}: load it without")
        inserted = InsertedAttention(config, i, weight.numel() // config.n_embd // config.n_head)
        inserted_layers.append((place, inserted.to(weight.device, weight.dtype).train(place.attn.training)))
    return inserted_layers


def attach(model, inserted_layers, config):
    """Hook what is inserted in each layer into its attention, and write its flags into model.config.

    inserted_layers: as build_gates() returns them.
    """
    attention = require("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    attention.register("nanoheads", attend_inserted)
    masks = require("transformers.masking_utils")  # without one registered attention would get no mask at all
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register("nanoheads", partial(mask_and_positions, masks.sdpa_mask))
    for (parent, name, attn, proj), inserted in inserted_layers:
        if model.config.model_type == "gpt_neo":
            attn = NeoAttention(attn, model.config.window_size)
            setattr(parent, name, attn)
        attn.nanoheads = inserted
        attn.register_forward_pre_hook(remember_call, with_kwargs=True)
        if inserted.n_extra:
            proj.register_forward_hook(inserted.add_extra)
    model.config._attn_implementation = "nanoheads"
    model.config.nanoheads = {name: getattr(config, name) for cls in INSERTABLE if cls.is_on(config)
                              for name in flags_of(cls)}


def gpt_config(model, mechanisms, flags):
    """The GPTConfig of what insert() puts into a model. Raises UserError."""
    names = mechanisms.replace(",", " ").split() if isinstance(mechanisms, str) else list(mechanisms)
    flag_names = [name for cls in INSERTABLE for name in flags_of(cls)]
    for kind, words, among in (("mechanism", names, list(MECHANISMS)), ("flag", flags, flag_names)):
        for name in words:
            if name not in among:
                suggestion = likely_name(str(name), among)
                hint = f"did you mean {suggestion}?" if suggestion else f"there are {', '.join(among)}"
                raise UserError(f"no {kind} {name!r} to insert; {hint}")
    flags = {**{key: value for name in names for key, value in MECHANISMS[name].items()}, **flags}
    c = model.config
    if flags.get("routing"):
        flags = {"routing_top_k": c.num_attention_heads, **flags}
    config = GPTConfig(**sizes(c), bias=places(model)[-1].proj.bias is not None, **flags)
    on = [cls for cls in MECHANISM_CLASSES if cls.is_on(config)]
    others = [cls.flag for cls in on if cls not in INSERTABLE]
    if others:
        raise UserError(f"{', '.join(others)} cannot be inserted, but turned on with train.py --init_from")
    problems = [*config.problems(), *insert_problems(c, config)]
    if problems or not on:
        modes = ", ".join(name for cls in INSERTABLE for name in cls.modes)
        raise UserError("; ".join(problems) or f"nothing to insert; there are {modes}")
    return config


def insert_problems(c, config):
    """Yield what another model, of config c, cannot have of a GPTConfig, sentence by sentence."""
    for name in OF_TRAINING:
        if getattr(config, name):
            yield f"{name}={getattr(config, name)!r} is for train.py: an inserted model knows of no steps"
    if config.constraint_names and config.constraint_variant == "B":
        yield "constraint_variant='B' makes a model's own heads smaller, which cannot be inserted: 'A' can"
    dropout = getattr(c, "attn_pdrop", getattr(c, "attention_dropout", 0.0))
    if config.constraint_gate == "score" and dropout:
        yield f"constraint_gate='score' goes with no dropout on attention weights: it is {dropout}"


@torch.no_grad()
def start(m, config, anyway):
    """Set a mechanism's parameters where it but multiplies by a constant, and return that: [H] or a number.

    Raises UserError where it has no such setting, unless anyway: it then starts as in a new model.
    """
    values, constant, neutral = {}, 1.0, not isinstance(m, (HeadNorm, Routing))
    if isinstance(m, ConstraintHeads):
        values = {"c_proj.weight": 0.0}
    elif isinstance(m, OutputGate):
        values, constant = {"proj.weight": 0.0}, 0.5
    elif isinstance(m, ACAG):
        values, constant = {"weight": 0.0, "bias": 0.0}, 0.5 if m.published else 1.0
    elif isinstance(m, Routing) and m.in_eval and m.k + m.n_shared == config.n_head:
        values = dict.fromkeys(("out.weight", "out.bias", "split.weight", "shared.weight"), 0.0)
        constant, neutral = 1 / config.n_head if m.mode == "published" else 1.0, True
    plain = plain_parameters(m)
    for name, p in m.named_parameters():
        value = values.get(name, getattr(p, "initial_value", None))
        if value is None and p in plain:
            value = Normal(0.02) if p.dim() > 1 else 0.0
        if value is not None:
            set_to(p, value)
    if isinstance(m, Sentinel):
        constant = m.gate(noisy=False)
        neutral = bool(constant.min() > 0.01)  # below, what the projection makes up for would be lost
    if not (neutral or anyway):
        settings = ", ".join(f"{name}={getattr(config, name)}" for name in flags_of(m))
        raise UserError(f"{m.flag} has no neutral setting, that is, the model's own logits, with {settings}; "
                        "anyway=True starts it as in a new model")
    return constant if neutral else 1.0


@torch.no_grad()
def lower_sinks(model, layers):
    """Set each Sink 12 below the lowest log-sum-exp of its head's rows, on random tokens.

    There it takes 6e-6 of that row, and less of others; much lower it would have no slope to learn by.
    """
    if not layers:
        return
    c, training = model.config, model.training
    tokens = torch.randint(c.vocab_size, (4, min(64, c.max_position_embeddings)),
                           generator=torch.Generator().manual_seed(0))
    for inserted in layers:
        inserted.keeps_lse = True
    try:
        model.eval().base_model(tokens.to(model.device), use_cache=False)
        for inserted in layers:
            inserted.sink.logit.copy_(inserted.lowest_lse - 12)
    finally:
        model.train(training)
        for inserted in layers:
            inserted.keeps_lse, inserted.lowest_lse = False, None


@torch.no_grad()
def scale_columns(proj, factor, inserted):
    """Multiply what each head sends through a projection out by factor, [H] or a number."""
    per_column = torch.as_tensor(factor, device=proj.weight.device).expand(inserted.n_total)[:inserted.n_head]
    per_column = per_column.repeat_interleave(inserted.head_size)  # constraint heads put out 0 as they start
    proj.weight.mul_(per_column if isinstance(proj, nn.Linear) else per_column[:, None])  # Conv1D: transposed


def inserted_attention(model):
    """{layer: InsertedAttention} of a model into which insert() has put some, whatever is around it."""
    return {m.layer: m for m in model.modules() if isinstance(m, InsertedAttention)}


def predictions(model):
    """{"blocks.<i>.constraint.<name>": logits [B, T]} of the last pass."""
    return {f"blocks.{i}.{name}": t for i, inserted in inserted_attention(model).items()
            for name, t in inserted.predictions.items()}


def aux_losses(model, constraint_targets=None):
    """{name: weighted loss, summed over layers} of what is inserted, of the last pass in training mode.

    constraint_targets {name: [B, T]}, from 0 to 1, below 0: not known; these have a loss in any mode. Raises
    UserError.
    """
    total, scores, config = {}, predictions(model), None
    for inserted in inserted_attention(model).values():
        config = inserted.config
        for name, loss in inserted.losses.items():
            total[name] = total[name] + loss if name in total else loss
    if constraint_targets is not None:
        if config is None or not ConstraintHeads.is_on(config):
            raise UserError("constraint_targets are for constraint heads: insert some")
        if not scores:
            raise UserError("constraint_targets are for the scores of a pass: call the model before")
        try:
            total.update(ConstraintHeads.losses(config, scores, constraint_targets))
        except ValueError as e:
            raise UserError(str(e)) from None
    return total


class Control(HeadControl):
    """Gates, states and consent of an inserted model by hand, as of a GPT: set_gate() and set_state().

    Constraint heads are numbered on from the model's own. It is such a model to find_violations() and
    states_of() of lab/heads/states.py, too.
    """

    def __init__(self, model):
        inserted, layers = inserted_attention(model), places(model)
        if not inserted:
            raise UserError("the model has no gates: insert some")
        agency = all(attn.agency is not None for attn in inserted.values())
        self.config = SimpleNamespace(n_layer=len(layers), agency=agency)
        blocks = [SimpleNamespace(attn=inserted[i]) for i in range(len(inserted))]
        self.transformer = SimpleNamespace(h=blocks, wte=model.get_input_embeddings())

    def set_gate(self, layer, head, gate):
        """As of a GPT. Raises UserError."""
        try:
            super().set_gate(layer, head, gate)
        except ValueError as e:
            raise UserError(str(e)) from None

    def set_state(self, layer, head, state=None, consent=None, step=0):
        """As of a GPT. Raises UserError."""
        try:
            super().set_state(layer, head, state, consent, step)
        except ValueError as e:
            raise UserError(str(e)) from None


def new_of(cls, *arguments):
    return cls.__new__(cls, *arguments)


def load(folder, **options):
    """The model that save_pretrained(folder) wrote, with its gates: an instance of a class of the same name
    that extends it.

    options: of from_pretrained(), such as dtype. Raises UserError where something is missing or does not fit.
    """
    transformers, safetensors = require("transformers"), require("safetensors")
    name = (config_of(folder).get("architectures") or ["none"])[0]
    if not hasattr(transformers, name):
        raise UserError(f"{folder}: transformers has no class {name!r}, which config.json names")
    cls = getattr(transformers, name)

    def init(self, config, *args, **kwargs):
        flags = config.__dict__.pop("nanoheads", {})
        flags = {key: value for key, value in flags.items() if (key, value) not in IGNORED_FLAGS}
        cls.__init__(self, config, *args, **kwargs)
        if flags:
            gpt = gpt_config(self, (), flags)
            attach(self, build_gates(self, places(self), gpt), gpt)

    def reduce(self, protocol):
        _, (_, *arguments), *state = object.__reduce_ex__(self, protocol)
        return new_of, (cls, *arguments), *state  # a copy, and what is pickled, is of transformers' own class

    try:
        attributes = {"__init__": init, "__reduce_ex__": reduce, "__module__": cls.__module__}
        class_with_gates = type(name, (cls,), attributes)
        model, info = class_with_gates.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except (OSError, RuntimeError, ValueError, safetensors.SafetensorError) as e:
        raise UserError(f"{folder}: {' '.join(str(e).split())[:200]}") from None
    check_loaded(info, folder, model.config.model_type)
    for inserted in inserted_attention(model).values():
        inserted.fill_buffers()
    return model


# ---- heads that are off ----

def check_heads(model, heads):
    """{layer: [heads]} -> the same with every layer and head there. Raises UserError."""
    n_layer, n_head = model.config.num_hidden_layers, model.config.num_attention_heads
    for layer, numbers in heads.items():
        if layer not in range(n_layer):
            raise UserError(f"there is no layer {layer!r}; they go from 0 to {n_layer - 1}")
        for head in numbers:
            if head not in range(n_head):
                raise UserError(f"layer {layer} has no head {head!r}; they go from 0 to {n_head - 1}")
    return heads


def mask_heads(model, heads):
    """Turn these heads off, {layer: [head, ...]} by their original numbers, and all others on; None: all on.

    What a masked head sends out is multiplied by 0, as version 4's head_mask did. The mask moves with the
    model, holds while it trains, and is not saved. Raises UserError.
    """
    layers, heads = places(model), check_heads(model, heads or {})
    for i, (_, _, _, proj) in enumerate(layers):
        if not hasattr(proj, "head_mask"):
            proj.register_buffer("head_mask", None, persistent=False)
            proj.register_forward_pre_hook(mask_columns)
        proj.head_mask = None
        if heads.get(i):
            n_head = model.config.num_attention_heads
            head_size = proj.weight.numel() // model.config.hidden_size // n_head
            mask = proj.weight.new_tensor([head not in heads[i] for head in range(n_head)])
            proj.head_mask = mask.repeat_interleave(head_size)


def mask_columns(proj, args):
    """Before a projection out: masked heads give 0."""
    return args if proj.head_mask is None else (args[0] * proj.head_mask, *args[1:])
