"""
Attention layers of the write-ups for a model of one's own, [B, T, d_model] -> [B, T, d_model].

    AdaptiveContextualAttention(d_model=768, num_heads=12, max_len=2048)(x)   ACAG
    ConstraintAttention(d_model=768, num_heads=12)(x)                         constraint heads
    CriticAttention(d_model=768, num_heads=12)(x)                             A2C: a critic on the logits
    encoder_layer.self_attn = AsMultiheadAttention(layer)                     one of these in torch.nn's block

They add no positions. Masks are those of nn.MultiheadAttention: key_padding_mask [B, T] is True at padding,
attn_mask [T, T] (or [B, T, T], [B, 1, T, T]) where a query must not look; both may be of 0 and -inf instead.
Padding may be anywhere; what comes out at it means nothing.
"""

import math

import torch
import torch.nn as nn

from model import CONSTRAINTS, GPT, CausalMask, ForwardPass, GPTConfig
from nanoheads.common import UserError
from nanoheads.logits import label_losses


def to_boolean(mask, name):
    """A mask of nn.MultiheadAttention as booleans, True: hidden. UserError where it is of other numbers."""
    if mask.dtype == torch.bool:
        return mask
    if not ((mask == 0) | (mask == -math.inf)).all():
        raise UserError(f"{name} must be boolean, True where nothing may be seen, or of 0 and -inf alone")
    return mask == -math.inf


class AttentionLayer(nn.Module):
    """CausalSelfAttention alone, with the mechanisms of some flags. Raises UserError on impossible ones.

    dropout: on attention weights, and on what comes out; ACAG has it on the latter alone.
    """

    def __init__(self, d_model, num_heads, max_len, causal=True, dropout=0.0, **flags):
        super().__init__()
        seed = int(torch.randint(2**31, ()))  # layers of one model shall not start equal
        if flags.get("acag"):
            flags["attn_dropout"] = 0.0
        self.config = GPTConfig(block_size=max_len, vocab_size=1, n_layer=1, n_head=num_heads, n_embd=d_model,
                                seed=seed, dropout=dropout, **flags)
        if self.config.problems():
            raise UserError("; ".join(self.config.problems()))
        self.max_len, self.causal = max_len, causal
        self.attn = GPT(self.config).transformer.h[0].attn
        self.mask = CausalMask(self.config)

    def run(self, x, key_padding_mask=None, attn_mask=None, traces=False, **pass_fields):
        """(y [B, T, C], Heads.results()) of x [B, T, C]; pass_fields: more fields of ForwardPass."""
        T, device, valid = x.size(1), x.device, None
        if T > self.max_len:
            raise UserError(f"{T} tokens are more than max_len={self.max_len}")
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.causal and key_padding_mask is None and attn_mask is None:
            by_flex = self.attn.needs_row_stats is not None or self.attn.changes_scores or bool(traces)
            positions = torch.arange(T, device=device)
            mask, n_keys = self.mask.make(0, T, None, device, False, by_flex, traces == "maps"), positions + 1
        else:
            mask = self.visible_keys(x, key_padding_mask, attn_mask)
            n_keys = mask.sum(-1)
            real = torch.ones(len(x), T, dtype=torch.bool, device=device)
            if key_padding_mask is not None:
                real = ~to_boolean(key_padding_mask, "key_padding_mask")
                valid = real[..., None]
            count = real.cumsum(-1) if self.is_causal(attn_mask) else real.sum(-1, keepdim=True).expand(-1, T)
            positions = (count - 1).clamp_min(0)  # [B, T]
        return self.attn(x, ForwardPass(mask=mask, positions=positions, n_keys=n_keys.to(dtype), valid=valid,
                                        wants_traces=traces, **pass_fields))

    def is_causal(self, attn_mask):
        """Whether no token sees later ones, by the layer's own rule or by a mask [..., T, T]."""
        return self.causal or attn_mask is not None and not bool(
            (~to_boolean(attn_mask, "attn_mask")).triu(1).any())

    def visible_keys(self, x, key_padding_mask, attn_mask):
        """Who sees whom, bool [B or 1, 1, T, T]; a token that sees none sees itself: a softmax needs one."""
        B, T = x.shape[:2]
        mask = torch.ones(1, 1, T, T, dtype=torch.bool, device=x.device)
        if self.causal:
            mask = mask.tril()
        if attn_mask is not None:
            hidden = to_boolean(attn_mask, "attn_mask")
            hidden = hidden[:, None] if hidden.dim() == 3 else hidden
            if hidden.dim() not in (2, 4) or hidden.shape[-2:] != (T, T) or hidden.dim() == 4 and (
                    hidden.size(1) != 1 or hidden.size(0) not in (1, B)):
                raise UserError(f"attn_mask {list(attn_mask.shape)} must be [{T}, {T}], [{B}, {T}, {T}] or "
                                f"[{B}, 1, {T}, {T}], one for all heads")
            mask = mask & ~hidden
        if key_padding_mask is not None:
            if key_padding_mask.shape != (B, T):
                raise UserError(f"key_padding_mask {list(key_padding_mask.shape)} must be [{B}, {T}]")
            mask = mask & ~to_boolean(key_padding_mask, "key_padding_mask")[:, None, None]
        itself = torch.eye(T, dtype=torch.bool, device=x.device)
        return mask | itself & ~mask.any(-1, keepdim=True)


class AdaptiveContextualAttention(AttentionLayer):
    """ACAG as a layer (its README, "Quick Start").

    mode: normalised, or published, the write-up's formula. gate: headwise or elementwise. detach: no gradient
    into the statistics. causal=False: every token sees all of x, those behind it too.
    """

    def __init__(self, d_model=768, num_heads=12, max_len=2048, mode="normalised", gate="headwise",
                 detach=False, causal=True, bias=False, dropout=0.0):
        super().__init__(d_model, num_heads, max_len, causal, dropout, acag=gate, acag_mode=mode,
                         acag_detach=detach, bias=bias)

    def forward(self, x, key_padding_mask=None, attn_mask=None, need_weights=False):
        """y, or with need_weights (y, weights [B, H, T, T] before the gates)."""
        y, results = self.run(x, key_padding_mask, attn_mask, "maps" if need_weights else False)
        return (y, results["traces"]["map"]) if need_weights else y


class ConstraintAttention(AttentionLayer):
    """Constraint heads as a layer, causal or not.

    variant: A, a wider concatenation, or B, smaller heads. heads: per name. router: sigmoid or hard_concrete.
    flags: other constraint_ flags of GPTConfig, such as constraint_mode="published".
    """

    def __init__(self, d_model=768, num_heads=12, names=CONSTRAINTS, max_len=2048, variant="A", heads=1,
                 router="sigmoid", bias=False, dropout=0.0, causal=True, **flags):
        super().__init__(d_model, num_heads, max_len, causal, dropout, constraint_names=list(names),
                         constraint_heads=heads, constraint_variant=variant, constraint_router=router,
                         constraint_layers=[0], bias=bias, **flags)

    def forward(self, x, hint=None, traces=False, key_padding_mask=None, attn_mask=None, need_weights=False):
        """(y [B, T, C], {"blocks.0.constraint.<name>": a logit per token, [B, T]}), which explain() reads.

        hint [B, C]: what the router reads instead of the mean of x, which is that of the tokens so far, or of
        the whole text where tokens see later ones. traces: True or "maps" adds all that a model's traces
        hold; need_weights: as "maps"; the weights [B, H + heads, T, T] are blocks.0.map
        """
        if hint is None and not self.is_causal(attn_mask):
            hint = self.mean_input(x, key_padding_mask)
        inputs = {} if hint is None else {"router_hint": hint}
        y, results = self.run(x, key_padding_mask, attn_mask, "maps" if need_weights else traces,
                              inputs=inputs, wants_predictions=True)
        tensors = {**results["predictions"], **results["traces"]}
        return y, {f"blocks.0.{name}": t for name, t in tensors.items()}

    def mean_input(self, x, key_padding_mask):
        """The mean of the tokens that are no padding, [B, C]; or the first of them, by the router's flag."""
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if key_padding_mask is not None:
            real = ~to_boolean(key_padding_mask, "key_padding_mask")
        if self.config.constraint_router_input == "first":
            real = real & (real.cumsum(-1) == 1)
        dtype = torch.promote_types(x.dtype, torch.float32)  # a sum over many tokens
        total = (x.to(dtype) * real[..., None]).sum(1)
        return total / real.sum(-1, keepdim=True).clamp_min(1)

    def losses(self, traces, labels, **options):
        """{name: its part of the cross-entropy, nats} of forward()'s traces beside labels {name: [B, T]}.

        Labels are from 0 to 1, below 0: not known. options: of label_losses(). Add their sum, weighted, to
        the model's own loss.
        """
        scores = {name: traces[f"blocks.0.constraint.{name}"] for name in self.config.constraint_names}
        return label_losses(scores, labels, **options)


class CriticAttention(AttentionLayer):
    """A2C attention as a layer: a critic's scalar of each token and head acts on the logits.

    mode: temperature, key_bias, or published, the write-up's formula, in which queries are keys and values
    are slices of x. In the first two the critic starts at 0 and is trained by a loss of your own: it is to
    predict how much better than expected the rest will go.
    """

    def __init__(self, d_model=768, num_heads=12, max_len=2048, mode="temperature", causal=True, bias=False,
                 dropout=0.0):
        super().__init__(d_model, num_heads, max_len, causal, dropout, a2c=mode, bias=bias)

    def forward(self, x, key_padding_mask=None, attn_mask=None, need_weights=False):
        """(y, weights [B, H, T, T] or None, the critic's scalars [B, T, H])."""
        y, results = self.run(x, key_padding_mask, attn_mask, "maps" if need_weights else False)
        return y, results["traces"].get("map"), results["predictions"]["advantage"]


A2CAttention = CriticAttention  # its former name, which is that of the printed class in as_printed.py


class NoFastPath(torch.Tensor):
    """A weight at which nn.TransformerEncoder and its layers leave their fast path: they take it for plain
    attention's and would compute that, past forward().
    """


class AsMultiheadAttention(nn.Module):
    """A layer with the call of nn.MultiheadAttention, for nn.TransformerEncoderLayer(...).self_attn.

    layer: an ACAG, constraint or A2C layer, with causal=False where a token is to see later ones.
    batch_first: as of the layer around it, whose default is False. side_outputs: what the layer returned
    beside its output in the last call, such as the traces that ConstraintAttention.losses() takes.
    """
    # what those around it ask for before their fast path
    in_proj_weight, in_proj_bias, _qkv_same_embed_dim = torch.empty(0).as_subclass(NoFastPath), None, False

    def __init__(self, layer, batch_first=False):
        super().__init__()
        self.layer, self.batch_first, self.side_outputs = layer, batch_first, None
        self.embed_dim, self.num_heads = layer.config.n_embd, layer.config.n_head

    def __getstate__(self):  # a tensor of a graph cannot be copied
        return {**super().__getstate__(), "side_outputs": None}

    @property
    def out_proj(self):
        return self.layer.attn.c_proj

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
                average_attn_weights=True, is_causal=False):
        """(y, attention weights or None) as of nn.MultiheadAttention; the weights are those before gates.

        query, key and value are one tensor: [T, B, C], with batch_first [B, T, C], or [T, C]. attn_mask is
        one for all heads. is_causal without a mask hides later tokens. Raises UserError.
        """
        if not (query is key is value):
            raise UserError("query, key and value must be one and the same tensor: these layers attend to "
                            "their own input, not to another one's")
        x = query.unsqueeze(0) if query.dim() == 2 else query if self.batch_first else query.transpose(0, 1)
        if query.dim() == 2 and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        if is_causal and attn_mask is None:
            attn_mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        result = self.layer(x, key_padding_mask=key_padding_mask, attn_mask=self.mask_of_texts(attn_mask, x),
                            need_weights=need_weights)
        y, *self.side_outputs = result if isinstance(result, tuple) else (result,)
        weights = self.weights(average_attn_weights) if need_weights else None
        if query.dim() == 2:
            return y.squeeze(0), weights if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def mask_of_texts(self, mask, x):
        """A mask as the layers take it: nn.MultiheadAttention's may be [B * H, T, T]. UserError."""
        B, H = len(x), self.num_heads
        if mask is None or mask.dim() != 3 or len(mask) != B * H or H == 1:
            return mask
        per_head = mask.unflatten(0, (B, H))
        if not (per_head == per_head[:, :1]).all():
            raise UserError("attn_mask differs between heads: it must be one for all heads of a text")
        return per_head[:, 0]

    def weights(self, average):
        """The base heads' attention of the last call, [B, H, T, T], or their mean, [B, T, T]."""
        maps = next(each for each in self.side_outputs if each is not None)
        maps = (maps["blocks.0.map"] if isinstance(maps, dict) else maps)[:, :self.num_heads]
        return maps.mean(1) if average else maps
