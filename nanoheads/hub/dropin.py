"""
The mechanisms in a model of transformers; as layers of one's own they are in nanoheads/hub/layers.py.

    insert(model, "acag,sentinel")        gates into a loaded Hugging Face model, neutral as they start
    load(folder)                          what model.save_pretrained(folder) wrote of such a model
    mask_heads(model, {layer: [heads]}), prune_heads(model, {layer: [heads]})

transformers is an optional extra: insert() and load() alone import it.
"""

import importlib
import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn

from model import (MECHANISM_CLASSES, MECHANISMS, AttentionCore, ContextGate, ExclusiveAttention, GPTConfig,
                   HeadNorm, HeadRouter, OutputGate, Pass, SentinelGate, Sink)
from nanoheads.common import UserError
from nanoheads.configurator import near
from nanoheads.mechanism import Uniform
from nanoheads.pruning import keep_rows, prune_layer


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

# what changes the outputs of heads and nothing else
INSERTABLE = (ExclusiveAttention, HeadNorm, HeadRouter, SentinelGate, OutputGate, ContextGate, Sink)


def needed(name):
    """An optional module. Raises UserError."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f'{name.split(".")[0]} is missing: pip install -e ".[hf]"') from None


def places(model):
    """The Place of every layer. Raises UserError for a model of a family that is not known."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise UserError(f"{type(model).__name__} ({kind}) is of none of the families {', '.join(FAMILIES)}")
    if getattr(config, "add_cross_attention", False):
        raise UserError(f"{type(model).__name__} has cross-attention, which is not taken")
    blocks, path, proj = FAMILIES[kind]
    path, _, name = path.rpartition(".")
    parents = [block.get_submodule(path) for block in getattr(model.base_model, blocks)]
    attns = [getattr(parent, name) for parent in parents]
    return [Place(parent, name, attn, getattr(attn, proj)) for parent, attn in zip(parents, attns)]


def heads_left(model, layer):
    """The heads that pruning left in a layer, by their original numbers."""
    gone = getattr(model.config, "pruned_heads", {}).get(layer, ())
    return [i for i in range(model.config.num_attention_heads) if i not in gone]


class Gates(AttentionCore):
    """The mechanisms of one layer of another model.

    Queries, keys, values and the mask come from the model's own attention, x from a hook before it.
    """

    def __init__(self, config, layer, head_ids, head_size):
        super().__init__()
        self.layer, self.head_ids, self.head_size = layer, head_ids, head_size
        self.n_base, self.n_head, self.n_extra = config.n_head, len(head_ids), 0
        self.add_mechanisms(config)
        self.x, self.losses = None, {}
        self.keeps_lse, self.lowest_lse = False, None  # the lowest log-sum-exp of each head, [H]

    def __getstate__(self):
        return {**super().__getstate__(), "x": None, "losses": {}}  # a tensor of a graph cannot be copied

    def forward(self, q, k, v, mask, dropout, scale):
        """Gated outputs [B, T, H, D] of q [B, H, T, D] over k and v [B, H or fewer, S, D].

        mask [B, 1, T, S]: mask_and_positions() or booleans.
        """
        x, self.x = self.x, None
        groups = q.size(1) // k.size(1)
        if groups > 1:  # a gate is a query head's
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        seen = mask.bool()
        n_keys = seen.sum(-1)
        positions = (n_keys if mask.dtype == torch.bool else mask.amax(-1)).squeeze(1) - 1
        h = Pass(mask=seen, positions=positions, wants_losses=self.training, x=x, q=q, k=k, v=v,
                 n_keys=n_keys.to(torch.promote_types(q.dtype, torch.float32)))
        self.scale, self.attn_dropout = scale, dropout
        h, y = self.outputs(h)
        self.losses = h.losses
        if self.keeps_lse:
            self.lowest_lse = h.row_stats.lse.amin((0, 2))
        return y.transpose(1, 2)

    def attend(self, h):
        found = super().attend(h)
        if self.xsa is not None and h.v.size(2) > h.q.size(2):  # it wants own values, and takes the last: a
            h.v = h.v.gather(2, last_seen(h.mask).expand(-1, h.v.size(1), -1, h.v.size(-1)))  # static cache
        return found  # has rows behind them


def remember_x(attn, args, kwargs):
    """Before a model's attention: gates read its input, which the attention interface does not pass on."""
    if not isinstance(attn, NeoAttention) and attn.config._attn_implementation != "nanoheads":
        raise UserError(f"{attn.config._attn_implementation} attention knows of no gates: "
                        "model.set_attn_implementation('nanoheads')")
    attn.nanoheads.x = args[0] if args else kwargs["hidden_states"]


def gated_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """For the attention interface: (outputs [B, T, H, D], no attention weights)."""
    if attention_mask is None or attention_mask.is_floating_point():
        raise UserError("gates want to know who sees whom: give an attention_mask of 0 and 1, or of booleans")
    return module.nanoheads(query, key, value, attention_mask, dropout, scaling), None


def mask_and_positions(sdpa_mask, batch_size, q_length, kv_length, q_offset=0, attention_mask=None,
                       local_size=None, device="cpu", **kwargs):
    """For the mask interface, around its sdpa_mask(): int32 [B, 1, T, S], 0 where a query does not see a key.

    Elsewhere it is 1 + the tokens before the query, padding aside, which a sliding window does not show. A
    query without a key sees all: a softmax needs something.
    """
    kwargs["allow_is_causal_skip"] = False
    seen = sdpa_mask(batch_size, q_length, kv_length, q_offset, attention_mask=attention_mask, device=device,
                     **kwargs)
    count = seen.sum(-1, keepdim=True)
    if local_size is not None:
        last = torch.arange(q_length, device=device) + q_offset
        last = last[None] + 1 if attention_mask is None else attention_mask.cumsum(-1)[:, last]
        count = last[:, None, :, None]
    return ((seen | ~seen.any(-1, keepdim=True)) * count.clamp_min(1)).int()


def last_seen(mask):
    """The last key that each query sees, which is its own, [B, 1, T, 1], of a mask [B, 1, T, S]."""
    return (mask.bool() * torch.arange(mask.size(-1), device=mask.device)).amax(-1, keepdim=True)


class NeoAttention(nn.Module):
    """GPT-Neo's attention with gates: it goes past the attention interface. Around the old one's layers."""

    def __init__(self, old, window):
        super().__init__()
        for name, module in old.named_children():
            self.add_module(name, module)
        self.num_heads, self.layer_id = old.num_heads, old.layer_id
        self.attention_type, self.window = old.attention_type, window
        self.train(old.training)

    def forward(self, hidden_states, attention_mask=None, layer_past=None, **kwargs):
        q, k, v = (proj(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_id)
        if self.attention_type == "local":
            key = torch.arange(k.size(2), device=k.device)
            attention_mask = attention_mask * (key > last_seen(attention_mask) - self.window)
        dropout, dtype = self.attn_dropout.p if self.training else 0.0, v.dtype
        # without a scale its logits are large: in float32, as they were
        q, k, v = (t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v))
        y, weights = gated_attention(self, q, k, v, attention_mask, dropout, 1.0)
        return self.resid_dropout(self.out_proj(y.flatten(2).to(dtype))), weights


def insert(model, mechanisms=(), anyway=False, **flags):
    """Put mechanisms into a loaded Hugging Face model, in place, and return it: its logits stay as they were.

    mechanisms: names of MECHANISMS, with commas or as a list; flags: fields of GPTConfig, which win. Routing
    starts with all heads, unless routing_top_k says how many. Where a gate starts at another constant than 1,
    the projection out makes up for it. What cannot be neutral is refused; with anyway=True it starts as in a
    new model. Raises UserError, and then the model is as it was.
    """
    layers, held = places(model), getattr(model.config, "nanoheads", {})
    if held:
        names = ", ".join(cls.flag for cls in INSERTABLE if cls.flag in held)
        there = any(isinstance(m, Gates) for m in model.modules())
        raise UserError(f"the model has {names} already: insert all in one call" if there else
                        f"the model was saved with {names}, which only dropin.load(folder) reads")
    config = gpt_config(model, mechanisms, flags)
    made = build_gates(model, layers, config)
    constants = [math.prod(start(m, config, anyway) for m in gates.mechanisms()) for _, gates in made]
    for (place, gates), constant in zip(made, constants):  # from here on nothing can be refused
        scale_columns(place.proj, 1 / constant, gates)
    attach(model, made, config)
    lower_sinks(model, [gates for _, gates in made if gates.sink is not None])
    return model


def build_gates(model, layers, config):
    """[(Place, Gates)] of the layers that have heads. Raises UserError for quantised weights."""
    made = []
    for i, place in enumerate(layers):
        heads, weight = heads_left(model, i), place.proj.weight
        if not weight.is_floating_point():
            raise UserError(f"{type(model).__name__} is quantised, in {weight.dtype}: load it without")
        if heads:
            gates = Gates(config, i, heads, weight.numel() // config.n_embd // len(heads))
            made.append((place, gates.to(weight.device, weight.dtype).train(place.attn.training)))
    return made


def attach(model, made, config):
    """Put Gates where build_gates() says, let attention go through them, and say so in model.config."""
    attention = needed("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    attention.register("nanoheads", gated_attention)
    masks = needed("transformers.masking_utils")  # without one registered attention would get no mask at all
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register("nanoheads", partial(mask_and_positions, masks.sdpa_mask))
    for (parent, name, attn, _), gates in made:
        if model.config.model_type == "gpt_neo":
            attn = NeoAttention(attn, model.config.window_size)
            setattr(parent, name, attn)
        attn.nanoheads = gates
        attn.register_forward_pre_hook(remember_x, with_kwargs=True)
    model.config._attn_implementation = "nanoheads"
    model.config.nanoheads = {name: getattr(config, name) for cls in INSERTABLE if cls.is_on(config)
                              for name in cls.fields()}


def gpt_config(model, mechanisms, flags):
    """The GPTConfig of what insert() puts into a model. Raises UserError."""
    names = mechanisms.replace(",", " ").split() if isinstance(mechanisms, str) else list(mechanisms)
    known = [name for cls in INSERTABLE for name in cls.fields()]
    for kind, given, among in (("mechanism", names, list(MECHANISMS)), ("flag", flags, known)):
        for name in given:
            if name not in among:
                meant = near(str(name), among)
                hint = f"did you mean {meant}?" if meant else f"there are {', '.join(among)}"
                raise UserError(f"no {kind} {name!r} to insert; {hint}")
    flags = {**{key: value for name in names for key, value in MECHANISMS[name].items()}, **flags}
    if flags.get("routing"):
        flags = {"routing_top_k": model.config.num_attention_heads, **flags}
    c = model.config
    config = GPTConfig(block_size=c.max_position_embeddings, vocab_size=1, n_layer=c.num_hidden_layers,
                       n_head=c.num_attention_heads, n_embd=c.hidden_size, **flags)
    on = [cls for cls in MECHANISM_CLASSES if cls.is_on(config)]
    others = [cls.flag for cls in on if cls not in INSERTABLE]
    if others:
        raise UserError(f"{', '.join(others)} cannot be inserted: that changes more than the heads' outputs")
    if config.problems() or not on:
        there = ", ".join(name for cls in INSERTABLE for name in cls.modes)
        raise UserError("; ".join(config.problems()) or f"nothing to insert; there are {there}")
    return config


@torch.no_grad()
def start(m, config, anyway):
    """Set a mechanism's parameters where it but multiplies by a constant, and return that: [H] or a number.

    Raises UserError where it has no such setting, unless anyway: it then starts as in a new model.
    """
    values, constant, neutral = {}, 1.0, not isinstance(m, (HeadNorm, HeadRouter))
    if isinstance(m, OutputGate):
        values, constant = {"proj.weight": 0.0}, 0.5
    elif isinstance(m, ContextGate):
        values, constant = {"weight": 0.0, "bias": 0.0}, 0.5 if m.published else 1.0
    elif isinstance(m, HeadRouter) and m.in_eval and m.k + m.n_shared == config.n_head:
        values = dict.fromkeys(("out.weight", "out.bias", "split.weight", "shared.weight"), 0.0)
        constant, neutral = 1 / config.n_head if m.mode == "published" else 1.0, True
    values = {**m.initial_values(), **values}
    for name, p in m.named_parameters():
        value = values.get(name, Uniform(0.0) if p.dim() < 2 else None)
        if value is None:
            p.normal_(0.0, 0.02)
        elif isinstance(value, Uniform):
            p.uniform_(-value.bound, value.bound)
        else:
            p.copy_(torch.as_tensor(value))
    if isinstance(m, SentinelGate):
        constant = m.static_gate(noisy=False)
        neutral = bool(constant.min() > 0.01)  # below, what the projection makes up for would be lost
    if not (neutral or anyway):
        given = ", ".join(f"{name}={getattr(config, name)}" for name in m.fields())
        raise UserError(f"{m.flag} has no neutral setting, that is, the model's own logits, with {given}; "
                        "anyway=True starts it as in a new model")
    return constant if neutral else 1.0


@torch.no_grad()
def lower_sinks(model, layers):
    """Set each Sink 12 below the lowest log-sum-exp of its head's rows, on random tokens.

    There it takes 6e-6 of that row, and less of others; much lower it would have no slope to learn by.
    """
    if not layers:
        return
    for gates in layers:
        gates.keeps_lse = True
    c, training = model.config, model.training
    tokens = torch.randint(c.vocab_size, (4, min(64, c.max_position_embeddings)),
                           generator=torch.Generator().manual_seed(0))
    model.eval().base_model(tokens.to(model.device), use_cache=False)
    model.train(training)
    for gates in layers:
        gates.sink.logit.copy_(gates.lowest_lse - 12)
        gates.keeps_lse, gates.lowest_lse = False, None


@torch.no_grad()
def scale_columns(proj, factor, gates):
    """Multiply what each head sends through a projection out by factor, [H] or a number."""
    per_column = torch.as_tensor(factor, device=proj.weight.device).expand(gates.n_head)
    per_column = per_column.repeat_interleave(gates.head_size)
    proj.weight.mul_(per_column if isinstance(proj, nn.Linear) else per_column[:, None])  # Conv1D: transposed


def aux_losses(model):
    """{name: weighted loss, summed over layers} of gates in the last pass in training mode."""
    total = {}
    for gates in (m for m in model.modules() if isinstance(m, Gates)):
        for name, loss in gates.losses.items():
            total[name] = total[name] + loss if name in total else loss
    return total


def new_of(cls, *arguments):
    return cls.__new__(cls, *arguments)


def load(folder, **options):
    """The model that save_pretrained(folder) wrote, with its gates and without its pruned heads: an instance
    of a class of the same name that extends it.

    options: of from_pretrained(), such as dtype. Raises UserError where something is missing or does not fit.
    """
    transformers, safetensors, folder = needed("transformers"), needed("safetensors"), Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: no folder that save_pretrained() wrote")

    def init(self, config, *args, **kwargs):
        flags, pruned = config.__dict__.pop("nanoheads", {}), config.__dict__.pop("pruned_heads", {})
        cls.__init__(self, config, *args, **kwargs)
        if pruned:
            prune_heads(self, {int(layer): heads for layer, heads in pruned.items()})
        if flags:
            gpt = gpt_config(self, (), flags)
            attach(self, build_gates(self, places(self), gpt), gpt)

    def reduce(self, protocol):
        _, (_, *arguments), *state = object.__reduce_ex__(self, protocol)
        return new_of, (cls, *arguments), *state  # a copy, and what is pickled, is of transformers' own class

    try:
        name = (transformers.AutoConfig.from_pretrained(folder).architectures or ["none"])[0]
        if not hasattr(transformers, name):
            raise UserError(f"transformers has no class {name!r}, which config.json names")
        cls = getattr(transformers, name)
        as_saved = type(name, (cls,), {"__init__": init, "__reduce_ex__": reduce,
                                       "__module__": cls.__module__})
        model, found = as_saved.from_pretrained(folder, output_loading_info=True,
                                                ignore_mismatched_sizes=True, **options)
    except (OSError, RuntimeError, ValueError, safetensors.SafetensorError) as e:
        raise UserError(f"{folder}: {' '.join(str(e).split())[:200]}") from None
    wrong = [str(name) for kind in ("missing", "unexpected", "mismatched") for name in found[f"{kind}_keys"]]
    if wrong:
        raise UserError(f"{folder}: its weights are not those of its config.json: {', '.join(wrong[:3])}")
    return model


# ---- heads that are off, or gone ----

def checked(model, heads):
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
    layers, heads = places(model), checked(model, heads or {})
    for i, (_, _, _, proj) in enumerate(layers):
        if not hasattr(proj, "head_mask"):
            proj.register_buffer("head_mask", None, persistent=False)
            proj.register_forward_pre_hook(mask_columns)
        left = heads_left(model, i)
        proj.head_mask = None
        if left and heads.get(i):
            head_size = proj.weight.numel() // model.config.hidden_size // len(left)
            mask = proj.weight.new_tensor([head not in heads[i] for head in left])
            proj.head_mask = mask.repeat_interleave(head_size)


def mask_columns(proj, args):
    """Before a projection out: masked heads give 0."""
    return args if proj.head_mask is None else (args[0] * proj.head_mask, *args[1:])


def prune_heads(model, heads, optimizers=()):
    """Remove heads of a GPT-2 for good, {layer: [head, ...]} by their original numbers: as masked, but gone.

    config.pruned_heads records them, as in version 4; those that are gone already are passed over. Gates and
    optimizers' moments lose them, too. load() reads what save_pretrained() writes. Raises UserError.
    """
    layers, heads = places(model), checked(model, heads)
    if model.config.model_type != "gpt2":
        raise UserError(f"{type(model).__name__}: only GPT-2's heads can be pruned; mask_heads() masks any")
    for layer, gone in heads.items():
        parent, name, attn, proj = layers[layer]
        old, D = heads_left(model, layer), attn.head_dim
        left = [i for i, head in enumerate(old) if head not in gone]
        columns = torch.tensor([i * D + d for i in left for d in range(D)], dtype=torch.long, device="cpu")
        rows = torch.cat([columns + part * len(old) * D for part in range(3)])  # q, k, v
        keep_rows(attn.c_attn, "weight", 1, rows, optimizers)
        keep_rows(attn.c_attn, "bias", 0, rows, optimizers)
        keep_rows(proj, "weight", 0, columns, optimizers)
        keep_rows(proj, "head_mask", 0, columns, ())
        attn.c_attn.nf, proj.nx = len(rows), len(columns)
        attn.split_size, attn.num_heads = len(columns), len(left)
        if hasattr(attn, "nanoheads"):
            prune_layer(attn.nanoheads, set(gone), optimizers)
        if not left and not isinstance(attn, NoHeads):
            setattr(parent, name, NoHeads(attn))
        left = {old[i] for i in left}
        model.config.pruned_heads = {**getattr(model.config, "pruned_heads", {}),
                                     layer: [i for i in range(model.config.n_head) if i not in left]}


class NoHeads(nn.Module):
    """GPT-2's attention without a head: its output bias. A cache counts tokens by the first layer's keys."""

    def __init__(self, old):
        super().__init__()
        self.c_attn, self.c_proj, self.resid_dropout = old.c_attn, old.c_proj, old.resid_dropout
        self.layer_idx, self.head_dim = old.layer_idx, old.head_dim
        self.train(old.training)

    def forward(self, hidden_states, past_key_values=None, **kwargs):
        if past_key_values is not None:
            nothing = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.size(1), 1)
            past_key_values.update(nothing, nothing, self.layer_idx)
        return self.resid_dropout(self.c_proj.bias.expand_as(hidden_states)), None
