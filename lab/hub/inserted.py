"""
The modules that lab/hub/dropin.py puts into a Hugging Face model, and how they run there.

    InsertedAttention   in every layer: the mechanisms of heads, constraint heads with their projections

Queries, keys and values come from the model's own attention, by the attention interface; who sees whom by the
mask interface; the rest by hooks. A cache is written behind the mechanisms, as in model.py.
"""

import sys
from dataclasses import replace
from typing import NamedTuple, Optional

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import CausalSelfAttention, ConstraintHeads, ForwardPass
from nanoheads.common import UserError
from nanoheads.kernels import for_each_head


# what an attention of transformers calls its cache: since 5.24, before it, and in GPT-Neo and GPT-NeoX
CACHE_NAMES = "cache", "past_key_values", "layer_past"


# ---- in a layer ----

class Call(NamedTuple):
    """What a layer's attention is called with, which the attention interface does not pass on."""

    attn: nn.Module
    x: torch.Tensor                      # its input, [B, T, C]
    cache: Optional["LateCache"] = None
    rope: Optional[tuple] = None         # (cos, sin) of the positions


class InsertedAttention(CausalSelfAttention):
    """The mechanisms of one layer of another model: our attention without the projections, which are that
    model's.
    """

    group = unit = 1
    per_head = {}  # these heads cannot be pruned

    def __init__(self, config, layer, head_size):
        nn.Module.__init__(self)
        self.config, self.layer, self.head_size = config, layer, head_size
        self.head_ids = [*range(config.n_head)]
        self.n_base = self.n_head = config.n_head
        self.n_extra = config.added_heads(layer)
        self.add_mechanisms(config)
        if self.constraint is not None:
            self.constraint = RoutedByMask(config, self)
        self.qkv, self.call, self.extra = None, None, None  # of the pass that is under way
        self.losses, self.predictions = {}, {}  # of the last one, as of a Heads
        self.keeps_lse, self.lowest_lse = False, None  # the lowest log-sum-exp of each head, [H]

    def __getstate__(self):  # a tensor of a graph cannot be copied
        return {**super().__getstate__(), "qkv": None, "call": None, "extra": None, "losses": {},
                "predictions": {}}

    def fill_buffers(self):
        """Those that no file has, which from_pretrained() leaves without values."""
        fresh = type(self)(self.config, self.layer, self.head_size)
        for name, buffer in fresh.named_buffers():
            if name not in fresh.state_dict():
                self.get_buffer(name).copy_(buffer)

    def forward(self, q, k, v, mask, dropout, scale):
        """Gated outputs [B, T, H, D] of q [B, H, T, D] over k and v [B, H or fewer, S, D].

        mask [B, 1, T, S]: mask_and_positions() or booleans. S is T where there is a LateCache.
        """
        visible = mask.bool()
        n_keys = visible.sum(-1)
        positions = (n_keys if mask.dtype == torch.bool else mask.amax(-1)).squeeze(1) - 1
        forward_pass = ForwardPass(
            cache=self.call.cache, mask=visible, positions=positions, wants_losses=self.training,
            wants_predictions=self.n_extra > 0,
            n_keys=n_keys.to(torch.promote_types(q.dtype, torch.float32)))
        self.scale, self.attn_dropout = self.head_size ** -0.5 if scale is None else scale, dropout
        self.qkv = q, k, v
        y, results = super().forward(self.call.x, forward_pass)
        self.qkv, self.call = None, None
        self.losses, self.predictions = results["losses"], results["predictions"]
        return y

    def project(self, x, inputs=None):
        """None: own_heads() gives what the model's own attention has projected."""

    def own_heads(self, qkv, heads):
        return self.qkv

    def attend(self, heads):
        y, row_stats = super().attend(heads)
        n = heads.q.size(1)  # a gate is a query head's
        heads.k, heads.v = for_each_head(heads.k, n), for_each_head(heads.v, n)
        # XSA wants the queries' own values and takes the last ones: a static cache has rows behind them
        if self.xsa is not None and heads.v.size(2) > heads.q.size(2):
            last_keys = last_visible_key(heads.forward_pass.mask)
            heads.v = heads.v.gather(2, last_keys.expand(-1, heads.v.size(1), -1, heads.v.size(-1)))
        if self.keeps_lse:
            self.lowest_lse = row_stats.lse.amin((0, 2))
        return y, row_stats

    def merge(self, y):
        """[B, H, T, D] -> outputs of the model's own heads, [B, T, H, D]; add_extra() takes the others."""
        if self.n_extra:
            y, self.extra = y.split((self.n_head, self.n_extra), 1)
        return y.transpose(1, 2)

    def split(self, qkv, heads, n_head, n_kv_head):
        """As in CausalSelfAttention, for constraint heads: normed and turned as the model's own heads are."""
        attn = self.call.attn
        q, k, v = qkv.transpose(1, 2).split((n_head, n_kv_head, n_kv_head), 1)
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        if self.call.rope is not None and getattr(attn, "use_rope", True):
            q, k = sys.modules[type(attn).__module__].apply_rotary_pos_emb(q, k, *self.call.rope)
        return q, k, v

    def add_extra(self, proj, args, out):
        """Behind the layer's projection out: what constraint heads add to it, through one of their own."""
        extra, self.extra = self.extra, None
        return self.constraint.merge_added(out, extra.to(out.dtype))


class RoutedByMask(ConstraintHeads):
    """Constraint heads whose router reads the mean of the tokens that the mask shows, not a running sum."""

    def router_logits(self, x, forward_pass, layer):
        before = None if forward_pass.cache is None else forward_pass.cache.inputs()
        inputs = x if before is None else torch.cat((before.to(x.dtype), x), 1)  # (B, S, C)
        visible = forward_pass.mask.squeeze(1)
        if self.of_first:
            visible = visible & (visible.cumsum(-1) == 1)
        weights = visible.to(torch.promote_types(x.dtype, torch.float32))
        mean = (weights @ inputs.to(weights.dtype)) / weights.sum(-1, keepdim=True)
        hint = mean.flatten(0, 1)  # a sequence of its own for each token
        hinted = replace(forward_pass, inputs={"router_hint": hint})
        return super().router_logits(x, hinted, layer).view(*x.shape[:2], -1)


class LateCache:
    """The model's cache in one call of a layer's attention: written behind the mechanisms, not before them.

    keeps_x: the layer's inputs, which a router reads later, are kept as further heads: one half of each in
    the keys, the other in the values.
    """

    length = 0  # decoding computes all heads, selected or not

    def __init__(self, cache, x, keeps_x):
        self.cache, self.x, self.keeps_x = cache, x, keeps_x

    def update(self, k, v, *args, **kwargs):
        """For the model's own attention, which calls it too early."""
        self.args, self.kwargs, self.dtype = args, kwargs, k.dtype
        return k, v

    def append(self, layer, k, v):
        """For InsertedAttention: store k, v [B, H, T, D], return those of all tokens."""
        n, dtype = k.size(1), k.dtype
        if self.keeps_x:
            heads = self.heads_for_x(k.size(-1))
            x = F.pad(self.x, (0, 2 * heads * k.size(-1) - self.x.size(-1))).unflatten(-1, (2, heads, -1))
            k, v = (torch.cat((t, half), 1) for t, half in zip((k, v), x.permute(2, 0, 3, 1, 4)))
        k, v = self.cache.update(k.to(self.dtype), v.to(self.dtype), *self.args, **self.kwargs)
        return k[:, :n].to(dtype), v[:, :n].to(dtype)

    def heads_for_x(self, width):
        """How many heads of this width an input takes."""
        return -(-self.x.size(-1) // (2 * width))

    def inputs(self):
        """x of the tokens before, [B, S, C], or None. Raises UserError for a cache of another kind."""
        layers, i = self.cache.layers, self.args[0]
        kind = type(layers[i]) if i < len(layers) else self.cache.layer_class_to_replicate
        if kind.__name__ not in ("DynamicLayer", "DynamicSlidingWindowLayer"):
            raise UserError(f"constraint heads need a dynamic cache, for what their router reads: this one "
                            f"has a {kind.__name__}")
        if i >= len(layers) or layers[i].keys is None or not layers[i].keys.numel():
            return None
        heads = self.heads_for_x(layers[i].keys.size(-1))
        x = torch.stack([t[:, -heads:] for t in (layers[i].keys, layers[i].values)])
        return x.permute(1, 3, 0, 2, 4).flatten(2)[..., :self.x.size(-1)].to(self.x.device)


def remember_call(attn, args, kwargs):
    """Before a model's attention: what is inserted reads its input and writes its cache."""
    if not isinstance(attn, NeoAttention) and attn.config._attn_implementation != "nanoheads":
        raise UserError(f"{attn.config._attn_implementation} attention knows of no gates: "
                        "model.set_attn_implementation('nanoheads')")
    inserted, x = attn.nanoheads, args[0] if args else kwargs["hidden_states"]
    kwargs, cache = dict(kwargs), None
    for name in CACHE_NAMES:
        if kwargs.get(name) is not None:
            kwargs[name] = cache = LateCache(kwargs[name], x, inserted.constraint is not None)
    inserted.call = Call(attn, x, cache, kwargs.get("position_embeddings"))
    return args, kwargs


def attend_inserted(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
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
    visible = sdpa_mask(batch_size, q_length, kv_length, q_offset, attention_mask=attention_mask,
                        device=device, **kwargs)
    count = visible.sum(-1, keepdim=True)
    if local_size is not None:
        positions = torch.arange(q_length, device=device) + q_offset
        count = positions[None] + 1 if attention_mask is None else attention_mask.cumsum(-1)[:, positions]
        count = count[:, None, :, None]
    return ((visible | ~visible.any(-1, keepdim=True)) * count.clamp_min(1)).int()


def last_visible_key(mask):
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
            k, v = layer_past.update(k, v, self.layer_id)  # a LateCache: nothing is there yet
        if self.attention_type == "local":
            key = torch.arange(attention_mask.size(-1), device=k.device)
            attention_mask = attention_mask * (key > last_visible_key(attention_mask) - self.window)
        dropout, dtype = self.attn_dropout.p if self.training else 0.0, v.dtype
        # without a scale its logits are large: in float32, as they were
        q, k, v = (t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v))
        y, weights = attend_inserted(self, q, k, v, attention_mask, dropout, 1.0)
        return self.resid_dropout(self.out_proj(y.flatten(2).to(dtype))), weights
