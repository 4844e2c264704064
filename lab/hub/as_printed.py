"""
The classes of two write-ups as they print them, in plain PyTorch, to be held against the pages line by line.

    ConstraintConfig, MultiHeadAttentionWithConstraints, TransformerBlockWithConstraint,
    language_model_loss, constraint_loss                             constraint heads
    A2CAttention, ActorCritic                                        A2C attention

Names, arguments, defaults and the keys of traces are the write-ups'. As printed, every token sees the whole
text. With causal=True a token sees itself and those before it, and the docstrings say what else that changes.
Added here are causal, and an error where a mistake would stay unseen. The constraint write-up's page has lost
its indentation and whatever reads like a web address: `self.dk =`, `, self.dk`, `torch.cat`, `@torch`. Those
are back.

The same mechanisms within a GPT, without a stored T x T, are in model.py; as layers with our names in
lab/hub/layers.py. docs/mechanisms.md says where those depart from what is printed here.
"""

import math
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanoheads.logits import label_losses


# ---- constraint heads: "Multi-Head Constraint Implementation for Precision and Scope" ----

class ConstraintConfig:
    """What the constraint heads are for, and how many there are.

    trace_token_scores is read by nothing, as printed: the scores are always in the traces. variant: A, wider
    concatenation; B, smaller heads. loss_weights: {name: weight}; None: 1 each.
    """

    def __init__(self, names=("reciprocity", "testifiability", "decidability"), heads_per_constraint=1,
                 trace_token_scores=True, trace_attn_maps=False, router_hidden=128, loss_weights=None,
                 variant="A"):
        if isinstance(names, str):
            raise ValueError(f"names={names!r} must be a list of names: [{names!r}]")
        if len(set(names)) < len(names):
            raise ValueError(f"names={list(names)} must be different: a name stands there twice")
        if variant not in ("A", "B"):
            raise ValueError(f"variant={variant!r} must be 'A' (wider concatenation) or 'B' (smaller heads)")
        self.names = list(names)
        self.heads_per_constraint = int(heads_per_constraint)
        self.trace_token_scores = trace_token_scores
        self.trace_attn_maps = trace_attn_maps
        self.router_hidden = int(router_hidden)
        self.loss_weights = loss_weights or {name: 1.0 for name in names}
        self.variant = variant


def added_mask(attn_mask, x, causal):
    """What is added to the logits, broadcastable to [B, 1, T, T], or None.

    That is attn_mask, of 0 and -inf, and where causal, -inf at all later tokens. Other numbers below 0 are
    added as they are.
    """
    B, T, _ = x.shape
    mask = None
    if attn_mask is not None:
        if torch.broadcast_shapes(attn_mask.shape, (B, 1, T, T)) != (B, 1, T, T):
            raise ValueError(f"attn_mask {list(attn_mask.shape)} must be broadcastable to [{B}, 1, {T}, "
                             f"{T}], one for all heads: [{T}, {T}] or [{B}, 1, {T}, {T}], say")
        if not attn_mask.is_floating_point() or not (attn_mask <= 0).all():
            raise ValueError("attn_mask is added to the logits: give floats, 0 where a token may look and "
                             "-inf where not, as in torch.zeros(T, T).masked_fill(hidden, -math.inf)")
        mask = attn_mask.to(x.dtype)
    if causal:
        later = torch.full((T, T), -math.inf, dtype=x.dtype, device=x.device).triu(1)
        mask = later if mask is None else mask + later
    return mask


class MultiHeadAttentionWithConstraints(nn.Module):
    """Attention with heads of their own for named constraints, [B, T, d_model] -> (the same, traces).

    The router reads the mean of x over the whole sequence and gates the constraint heads' values, one gate a
    text and head. causal=True masks later tokens, and the router reads the mean of the tokens so far: each
    token's value has the gate of its own position, and router_gates in the traces are [B, Hc, T]. A causal
    attn_mask alone is not enough, since the router's mean still holds the later tokens.

    Variant A keeps heads of d_model // n_heads_base, so the concatenation is wider. In variant B all heads
    have d_model // (all heads): 53 for 1024 / 19, which makes 1,007 columns. n_layers is read by nothing.
    """

    def __init__(self, d_model, n_heads_base, n_layers=1, constraint=None, dropout=0.0, causal=False):
        super().__init__()
        self.d_model = d_model
        self.n_heads_base = n_heads_base
        self.constraint = constraint or ConstraintConfig()
        self.dropout = nn.Dropout(dropout)
        self.causal = causal

        # head accounting
        self.n_constraint_heads = self.constraint.heads_per_constraint * len(self.constraint.names)
        self.n_total_heads = self.n_heads_base + self.n_constraint_heads
        if self.constraint.variant == "A":
            if d_model % n_heads_base:
                raise ValueError(f"d_model={d_model} must be a multiple of n_heads_base={n_heads_base} "
                                 "in variant 'A'")
            self.dk = self.dv = d_model // self.n_heads_base
        else:
            self.dk = self.dv = d_model // self.n_total_heads
        concat_width = self.dv * self.n_total_heads

        # base head projections
        self.Wq_base = nn.Linear(d_model, self.dk * self.n_heads_base, bias=False)
        self.Wk_base = nn.Linear(d_model, self.dk * self.n_heads_base, bias=False)
        self.Wv_base = nn.Linear(d_model, self.dv * self.n_heads_base, bias=False)

        # constraint head projections
        if self.n_constraint_heads > 0:
            self.Wq_con = nn.Linear(d_model, self.dk * self.n_constraint_heads, bias=False)
            self.Wk_con = nn.Linear(d_model, self.dk * self.n_constraint_heads, bias=False)
            self.Wv_con = nn.Linear(d_model, self.dv * self.n_constraint_heads, bias=False)
        else:
            self.Wq_con = self.Wk_con = self.Wv_con = None

        # one output projection over concatenated head outputs
        self.Wo = nn.Linear(concat_width, d_model, bias=False)

        # constraint routers and scorers
        with warnings.catch_warnings():  # torch warns of a router without outputs
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            self.router = nn.Sequential(
                nn.Linear(d_model, self.constraint.router_hidden),
                nn.ReLU(),
                nn.Linear(self.constraint.router_hidden, self.n_constraint_heads),
            )
        self.token_scorers = nn.ModuleList([
            nn.Sequential(nn.Linear(self.dv, self.dv), nn.ReLU(), nn.Linear(self.dv, 1))
            for _ in range(self.n_constraint_heads)
        ])

        # constraint name -> its contiguous heads
        self._constraint_spans = {}
        idx = 0
        for name in self.constraint.names:
            self._constraint_spans[name] = (idx, idx + self.constraint.heads_per_constraint)
            idx += self.constraint.heads_per_constraint

        self.scale = self.dk ** -0.5  # 1/sqrt(dk)

    def _split_heads(self, x, n_heads, head_dim):
        B, T, _ = x.shape
        return x.view(B, T, n_heads, head_dim).transpose(1, 2)  # [B, H, T, D]

    def _combine_heads(self, x):
        B, H, T, D = x.shape
        return x.transpose(1, 2).contiguous().view(B, T, H * D)

    def _attn(self, Q, K, V, mask):
        """(outputs [B, H, T, D], weights [B, H, T, T] after dropout) of Q, K, V [B, H, T, D]."""
        scores = torch.matmul(Q, K.transpose(-2, -1)) * self.scale  # [B, H, T, T]
        if mask is not None:
            scores = scores + mask
        P = torch.softmax(scores, dim=-1)
        P = self.dropout(P)
        return torch.matmul(P, V), P

    def _gates(self, x, router_hint):
        """Router gates of x [B, T, d_model]: [B, Hc], or [B, Hc, T] where each token has its own."""
        if router_hint is None and self.causal:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))  # a sum over many tokens
            n = torch.arange(1, x.size(1) + 1, device=x.device)
            so_far = (wide.cumsum(dim=1) / n[:, None]).to(x.dtype)  # [B, T, d_model]
            return torch.sigmoid(self.router(so_far)).transpose(1, 2)
        if router_hint is None:
            router_hint = x.mean(dim=1)  # [B, d_model]
        return torch.sigmoid(self.router(router_hint))

    def forward(self, x, attn_mask=None, need_weights=False, router_hint=None):
        """(y [B, T, d_model], traces) of x [B, T, d_model].

        attn_mask: broadcastable to [B, 1, T, T], of 0 and -inf, added to the logits. router_hint [B,
        d_model]: what the router reads instead of the mean of x. traces:

            {"constraint": {"head_token_scores": [B, Hc, T],
                            <name>: {"token_scores": [B, T], "attn_maps": [B, heads of the name, T, T]},
                            "router_gates": [B, Hc], or [B, Hc, T] if causal without a hint},
             "need_weights": need_weights, "base_attn_maps": [B, Hb, T, T]}

        The maps are there with need_weights alone, attn_maps if the config has trace_attn_maps too. Without
        constraint heads, "constraint" is empty.
        """
        mask = added_mask(attn_mask, x, self.causal)
        Hc, Hb = self.n_constraint_heads, self.n_heads_base

        # projections, [B, H, T, D]
        Qb = self._split_heads(self.Wq_base(x), Hb, self.dk)
        Kb = self._split_heads(self.Wk_base(x), Hb, self.dk)
        Vb = self._split_heads(self.Wv_base(x), Hb, self.dv)
        if Hc > 0:
            Qc = self._split_heads(self.Wq_con(x), Hc, self.dk)
            Kc = self._split_heads(self.Wk_con(x), Hc, self.dk)
            Vc = self._split_heads(self.Wv_con(x), Hc, self.dv)

        # attention; gates multiply the constraint heads' values
        H_all, Pb = self._attn(Qb, Kb, Vb, mask)
        if Hc > 0:
            gates = self._gates(x, router_hint)
            con, Pc = self._attn(Qc, Kc, Vc * gates.reshape(x.size(0), Hc, -1, 1), mask)
            H_all = torch.cat([H_all, con], dim=1)

        # concat heads and project
        y = self.Wo(self._combine_heads(H_all))

        # traces: scores read the gated outputs
        traces = {"constraint": {}, "need_weights": need_weights}
        if Hc > 0:
            head_scores = [self.token_scorers[h](con[:, h]).squeeze(-1) for h in range(Hc)]
            head_scores = torch.stack(head_scores, dim=1)  # [B, Hc, T]
            traces["constraint"]["head_token_scores"] = head_scores
            for name in self.constraint.names:
                lo, hi = self._constraint_spans[name]
                entry = {"token_scores": head_scores[:, lo:hi, :].mean(dim=1)}  # mean of the name's heads
                if need_weights and self.constraint.trace_attn_maps:
                    entry["attn_maps"] = Pc[:, lo:hi, :, :]
                traces["constraint"][name] = entry
            traces["constraint"]["router_gates"] = gates
        if need_weights:
            traces["base_attn_maps"] = Pb
        return y, traces

    @torch.no_grad()
    def explain(self, traces, tokens, constraint_name="reciprocity"):
        """The five tokens of highest score of the first text of a batch, as one line of text.

        tokens: the T tokens of that text, as strings.
        """
        if "constraint" not in traces or constraint_name not in traces["constraint"]:
            return "No constraint trace."
        ts = traces["constraint"][constraint_name]["token_scores"][0]  # [T], first in batch
        k = min(5, len(tokens))
        top_idx = torch.topk(ts, k=k).indices.tolist()
        parts = [f"{tokens[i]}:{ts[i]:.2f}" for i in top_idx]
        return f"{constraint_name} focus → " + ", ".join(parts)


class TransformerBlockWithConstraint(nn.Module):
    """A block around that attention, [B, T, d_model] -> (the same, traces), with its forward's arguments.

    The write-up calls this block and does not print it. Here it is x + attention(norm(x)), then x +
    MLP(norm(x)), with LayerNorm, and GELU in an MLP of mlp_ratio * d_model. dropout acts on attention
    weights, as printed, and on what the MLP adds.
    """

    def __init__(self, d_model, n_heads_base, mlp_ratio=4, dropout=0.0, constraint=None, causal=False):
        super().__init__()
        self.attn = MultiHeadAttentionWithConstraints(d_model, n_heads_base, constraint=constraint,
                                                      dropout=dropout, causal=causal)
        inner = int(mlp_ratio * d_model)
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, inner), nn.GELU(), nn.Linear(inner, d_model),
                                 nn.Dropout(dropout))

    def forward(self, x, attn_mask=None, need_weights=False, router_hint=None):
        y, traces = self.attn(self.ln_1(x), attn_mask, need_weights, router_hint)
        x = x + y
        return x + self.mlp(self.ln_2(x)), traces


def language_model_loss(logits, targets_next_tokens):
    """Mean cross-entropy of logits [B, T, V] with the next tokens [B, T], in nats: "your usual CE".

    The write-up hands it the block's own output, whose d_model columns are then the logits.
    """
    return F.cross_entropy(logits.flatten(0, -2), targets_next_tokens.flatten())


def constraint_loss(traces, targets, weights=None):
    """Mean over the names of weight * BCEWithLogits(token_scores, targets), in nats: label_losses() of a GPT.

    targets: {name: [B, T]} from 0 to 1; a name that is left out does not count, and neither does a target
    below 0. weights: {name: weight}, as loss_weights; None: 1 each. Without constraint heads it is 0.
    """
    scores = {name: entry["token_scores"] for name, entry in traces["constraint"].items()
              if isinstance(entry, dict)}
    if not scores and not targets:
        return 0.0
    for name, y in targets.items():
        if not (y <= 1).all():
            raise ValueError(f"targets[{name!r}] holds a number above 1 or NaN: give 0 to 1, or less than 0 "
                             "where it is not known")
    return sum(label_losses(scores, targets, weights).values())


# ---- A2C attention: "Inventing a new equation for attention (A2C-Attention)" ----

class A2CAttention(nn.Module):
    """softmax(q q^T a / sqrt(d_k)) x, a a critic's scalar for each query.

    x [B, T, input_dim] or [T, input_dim] -> (output, shaped as x, attention_weights [B, T, T] or [T, T]). As
    printed keys are queries, values are x, and there is no mask. causal=True leaves later tokens out of the
    softmax.
    """

    def __init__(self, input_dim, d_k, causal=False):
        super().__init__()
        self.d_k = d_k
        self.causal = causal
        self.actor = nn.Linear(input_dim, d_k)
        self.critic = nn.Linear(input_dim, 1)

    def forward(self, x):
        # query generation
        q = self.actor(x)

        # A2C-based attention weights; a scales the whole row of its query
        a2c = self.critic(x)
        attention_scores = torch.matmul(q, q.transpose(-2, -1)) / (self.d_k ** 0.5)
        logits = attention_scores * a2c
        if self.causal:  # after the product: a may be negative
            later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            logits = logits.masked_fill(later, -math.inf)
        attention_weights = F.softmax(logits, dim=-1)

        # output generation
        output = torch.matmul(attention_weights, x)
        return output, attention_weights


class ActorCritic(nn.Module):
    """The write-up's model: tokens [B, T] -> (output [B, T, output_dim], attention_weights [B, T, T], value).

    As printed nothing reads the actor's q. Its GRUs have no batch_first, so they run along the batch: value
    [1, T, hidden_dim] is the critic's state after the last text, and the texts of a batch are mixed in it.
    causal=True masks the attention and has the GRUs run along the tokens of each text; value is then the
    critic's state at each token, [B, T, hidden_dim].
    """

    def __init__(self, input_dim, hidden_dim, output_dim, causal=False):
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(input_dim, hidden_dim)
        self.actor = nn.GRU(hidden_dim, hidden_dim, batch_first=causal)
        self.critic = nn.GRU(hidden_dim, hidden_dim, batch_first=causal)
        self.attention = A2CAttention(hidden_dim, hidden_dim, causal)
        self.fc = nn.Linear(hidden_dim, output_dim)

    def forward(self, x):
        # query generation
        embedded = self.embedding(x)
        q, _ = self.actor(embedded)

        # A2C-based attention weights
        output, attention_weights = self.attention(embedded)

        # value estimation
        states, value = self.critic(output)

        # output generation
        output = self.fc(output)
        return output, attention_weights, states if self.causal else value
