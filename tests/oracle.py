"""A slow, plain GPT in float64: the T x T attention in memory, and the formula of each mechanism.

Tests compare the fast path with it, forward and gradient. It reads a model's config, its parameters and
buffers by name, and calls nothing of model.py. WITHOUT lists the flags whose work is not here. In the
shapes, H are the layer's heads and then its constraint heads; what a mechanism does to the first kind alone
says so. `plain` is the exception: the plain GPT in PyTorch's own operations, for equality to the last bit.
"""

import copy
import math
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

# in the order of their numbers, with their factors; 0.7 is kept in float32
STATES = {"active": 1.0, "overloaded": 0.5, "misaligned": torch.tensor(0.7).item(), "withdrawn": 0.0}


def give_states(model, generator=None):
    """In every layer a head in each state; random metrics."""
    for layer, block in enumerate(model.transformer.h):
        for head, state in zip(block.attn.all_head_ids(), STATES) if block.attn.agency is not None else ():
            model.set_state(layer, head, state=state)
        if model.config.agency_learned:
            block.attn.agency.metrics.normal_(generator=generator)


# Flags of mechanisms that no formula here reads -> why, or the test that has what they do. All others are
# read, and of every entry of MECHANISMS values and gradients are compared.
OF_SHAPES = "the shapes and the names of parameters, which the formulas go by, say it"
OF_STARTS = "an initial value: parameters are compared as they are"
SKIPS = "test_finetune.py::test_the_share_of_the_skips_by_hand"
WITHOUT = {
    **dict.fromkeys(("short_conv_width", "value_embedding", "routing_hidden", "constraint_variant",
                     "constraint_round", "constraint_layers", "constraint_hidden"), OF_SHAPES),
    **dict.fromkeys(("ssmax_init", "sentinel_init", "roles_strength", "unet_init"), OF_STARTS),
    "agency_threshold":
        "test_violations.py::test_a_head_without_consent_is_blocked_or_forced_by_whether_it_runs",
    "routing_skip": "test_promises.py::test_decoding_that_skips_heads_equals_decoding_that_does_not",
    "unet_from": SKIPS, "unet_ramp": SKIPS,
    "constraint_stop": "test_constraint_training.py::test_stopped_heads_send_no_gradient_into_the_trunk",
    "constraint_warmup": "test_constraint.py::test_warm_up_weighs_the_loss_on_labels_and_nothing_else",
}


def flags_read():
    """The names that the formulas of this file read of a config, c or config."""
    text = Path(__file__).read_text(encoding="utf-8")
    return set(re.findall(r"\bc(?:onfig)?\.([a-z]\w*)", text))


# ---- comparing ----

def tokens(*shape, seed=1):
    """Of a vocabulary of 37."""
    return torch.randint(37, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape, seed=1, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


def close(a, b, tol):
    assert a.shape == b.shape
    assert ((a - b).abs() <= tol).all(), f"off by {(a - b).abs().max():.1e}"


def gradients(outputs, inputs):
    """Of a random weighing of all outputs; zeros where an input was not used."""
    total = sum((y * normal(*y.shape, seed=7 + i)).sum() for i, y in enumerate(outputs))
    return torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True, materialize_grads=True)


def agree(got, want, inputs, tol):
    """Two lists of outputs and their gradients to all inputs are the same, and not all zeros by accident."""
    for a, b in zip(got, want, strict=True):
        close(a, b, tol)
    pairs = list(zip(gradients(got, inputs), gradients(want, inputs)))
    assert any(b.any() for _, b in pairs)
    for a, b in pairs:
        close(a, b, 10 * tol)


def equals_the_oracle(model, idx=tokens(2, 7), hint=None, tol=1e-9):
    """All that a model gives for idx [B, T] is the oracle's: hidden states and logits, every auxiliary loss,
    the gradients of all parameters, and the traces. hint [B, C]: what the router of constraint heads reads.
    """
    layers, parameters = [], list(model.parameters())
    got, x = model.hidden(idx, router_hint=hint), hidden(model, idx, hint, layers=layers)
    scale = x.detach().abs().max().item()  # states of a deep mixture may be large
    agree([got / scale], [x / scale], parameters, tol)
    targets, labels, teacher = made_up_targets(model, idx)
    said = teacher.predictions(idx) if isinstance(teacher, type(model)) else teacher
    out = model(idx, targets, traces="maps", logits=True, router_hint=hint, constraint_targets=labels,
                teacher=said)
    want = logits_of(model, x)
    scale = max(1.0, want.abs().max().item())
    close(out.logits.double() / scale, want / scale, 1e-5)  # which are float32
    close(out.loss.double() / scale, cross_entropy(want, targets) / scale, 1e-5)
    losses_agree(out.aux, losses(model, idx, x, layers, targets, labels, teacher), parameters)
    for layer, found in enumerate(layers):
        for name in TRACED & found.keys():
            trace = out.traces[f"blocks.{layer}.{name}"].double()
            close(trace.expand_as(found[name]), found[name], 1e-5)


def made_up_targets(model, idx):
    """(targets [B, T], labels of every constraint, a teacher or its features), some of them unknown; None:
    the model has no use for them.
    """
    c, labels, teacher = model.config, None, None
    targets = tokens(*idx.shape, seed=2)
    targets[0, ::3] = -1
    if c.constraint_names:  # hard and soft ones, and -1: unknown
        labels = {name: (tokens(*idx.shape, seed=3 + i) % 4 / 2 - 0.5).where(targets % 3 > 0, -1.0)
                  for i, name in enumerate(reversed(c.constraint_names))}
    if c.constraint_match and c.constraint_features:
        teacher = 2 * normal(*idx.shape, c.constraint_features)
    elif c.constraint_match:
        teacher = copy.deepcopy(model)
        with torch.no_grad():
            for i, p in enumerate(teacher.parameters()):
                p.add_(0.1 * normal(*p.shape, seed=i))
    return targets, labels, teacher


def losses_agree(got, want, parameters):
    """Two {name: loss} and their gradients to all parameters are the same, as each loss scales."""
    assert got.keys() == want.keys()
    if not want:
        return
    scales = [loss.detach().abs().item() or 1.0 for loss in want.values()]
    got, want = ([losses[name].double() / scale for name, scale in zip(want, scales)]
                 for losses in (got, want))
    for a, b in zip(got, want):
        close(a, b, 1e-4)  # nats and distances are float32
    for a, b in zip(gradients(got, parameters), gradients(want, parameters)):
        close(a, b, 1e-4 * b.abs().clamp_min(1.0))


# traces of a layer that are compared; `found` of attend() has the same names
TRACED = {"entropy", "concentration", "map", "routing_weights", "routing_logits", "advantage",
          "router_gates", "head_scores"}


# ---- functions ----

def softmax(s):
    """Over the last axis; entries of -inf get 0."""
    e = (s - s.amax(-1, keepdim=True).detach()).exp()
    return e / e.sum(-1, keepdim=True)


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def hard_concrete(logit):
    """Stretched to (-0.1, 1.1) and clamped (arXiv 1712.01312, eq. 13)."""
    return (1.2 * sigmoid(logit) - 0.1).clamp(0, 1)


def activation(x, name):
    if name == "swiglu":
        gate, up = x.chunk(2, -1)
        return gate * sigmoid(gate) * up
    if name == "relu2":
        return x.clamp_min(0) ** 2
    if name == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def rms(x, eps=1e-6):
    return x / ((x**2).mean(-1, keepdim=True) + eps).sqrt()


def normed(c, p, x, name):
    if c.norm == "rmsnorm":
        return rms(x, c.norm_eps or 1e-6) * (p[name + ".weight"] if c.norm_scale else 1)
    x = x - x.mean(-1, keepdim=True)
    x = x / ((x**2).mean(-1, keepdim=True) + (c.norm_eps or 1e-5)).sqrt()
    return x * p[name + ".weight"] + p.get(name + ".bias", 0)


def linear(p, x, name):
    return x @ p[name + ".weight"].T + p.get(name + ".bias", 0)


def slowed(theta, factor, low, high, context):
    """Llama 3's frequency: a wave that is long in the context turns slower, a short one as it did."""
    wave = 2 * math.pi / theta
    if wave < context / high:
        return theta
    if wave > context / low:
        return theta / factor
    smooth = (context / wave - low) / (high - low)
    return (1 - smooth) * theta / factor + smooth * theta


def rope(x, base=10000.0, share=1.0, scaling=None):
    """x [..., T, D]: pair (i, i + D/2) as a complex number, times e^(i t theta); the first share of them.

    Of an odd D the last dimension is in no pair, and stays as it is. The model's tables of cosines and sines
    are float32, so these are rounded too.
    """
    if x.size(-1) % 2:
        return torch.cat((rope(x[..., :-1], base, share, scaling), x[..., -1:]), -1)
    T, half = x.size(-2), x.size(-1) // 2
    n = max(1, round(share * half))
    theta = [base ** (-i / n) for i in range(n)]
    theta = [slowed(each, *scaling) for each in theta] if scaling else theta
    theta = torch.tensor(theta + [0.0] * (half - n), dtype=torch.float64)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * theta
    turn = torch.complex(*(each.float().double() for each in (angle.cos(), angle.sin())))
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((z.real, z.imag), -1)


def split(x, n_head):
    """[B, T, H * D] -> [B, H, T, D]."""
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)


def visible(model, layer, T):
    """Which key each query reads, bool [T, T]: the near, the first, those in drawn blocks; none to come."""
    c = model.config
    t, s = torch.arange(T)[:, None], torch.arange(T)
    if not c.window or c.window_layers is not None and layer not in c.window_layers:
        return s <= t
    seen = (t - s < c.window) | (s < c.window_global)
    if c.window_random:
        seen = seen | model.mask.random_cells[t // c.window_block, s // c.window_block]
    return seen & (s <= t)


def dense(q, k, v, scale, mask=None):
    """Attention with the T x T logits in memory: outputs, log-sum-exp, weights."""
    mask = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).tril() if mask is None else mask
    s = (scale * q @ k.mT).masked_fill(~mask, -math.inf)
    lse = s.exp().sum(-1).log()
    p = (s - lse[..., None]).exp()
    return p @ v, lse, p


# ---- factors on the outputs ----

def router_logits(p, x):
    hidden = activation(linear(p, x, "router.fc"), "gelu") if "router.fc.weight" in p else x
    return linear(p, hidden, "router.out")


def top_k(c):
    """Heads that a token uses: half of them, or two beside the shared ones."""
    if c.routing_top_k is not None:
        return c.routing_top_k
    return max(1, c.n_head // 2, c.routing_shared and c.routing_shared + 2)


def chosen(c, z):
    """Whether a head has one of the k largest of the logits z [..., heads]; shared heads are not in them."""
    larger = (z[..., None, :] > z[..., :, None]).sum(-1)
    return larger < top_k(c) - c.routing_shared


def routing_weights(c, p, x):
    """Each token's factor for each head, x [..., C] -> [..., n_head]: shared heads, then the others."""
    z, k = router_logits(p, x), top_k(c) - c.routing_shared
    on = chosen(c, z)
    if c.routing == "sigmoid":
        return 2 * sigmoid(z) * on
    if c.routing == "published":
        return softmax(z * on if c.routing_mask != "inf" else z.masked_fill(~on, -math.inf))
    w = k * softmax(z.masked_fill(~on, -math.inf))
    if not c.routing_shared:
        return w
    to_shared, to_routed = (2 * softmax(x @ p["router.split.weight"].T)).split(1, -1)
    shared = softmax(x @ p["router.shared.weight"].T) if c.routing_shared > 1 else torch.ones_like(to_shared)
    return torch.cat((to_shared * c.routing_shared * shared, to_routed * w), -1)


def routes(c, training):
    """Whether the gates of routing act: as published, in training alone."""
    in_eval = c.routing != "published" if c.routing_eval_gate is None else c.routing_eval_gate
    return bool(c.routing) and (training or in_eval)


def row_statistics(P):
    """(entropy in nats, sum p^2) of attention rows P [..., S]."""
    return -(P * P.clamp_min(1e-300).log()).sum(-1), (P**2).sum(-1)


def spread_of_rows(P, seen):
    """The sum of squared differences of rows P [..., S] from their mean, over the keys that are seen."""
    n = seen.sum(-1, keepdim=True).double()
    return torch.where(seen, P - 1 / n, 0.0).square().sum(-1)


def context_gate(c, p, P, seen, t):
    """ACAG's gate [B, H, T, 1 or D] from attention rows P [B, H, T, S]; t: the tokens before each query."""
    P = P.detach() if c.acag_detach else P
    n, t = seen.sum(-1).double().expand(P.shape[:-1]), t.double().expand(P.shape[:-1])
    alone = n == 1
    if c.acag_mode == "published":
        std = (spread_of_rows(P, seen) / n + 1e-12).sqrt()
        features = (t + 1) / c.acag_length, 1 / n, torch.where(alone, 0.0, std)
    else:
        entropy, p2 = row_statistics(P)
        features = ((1 + t).log() / math.log(1 + c.acag_length),
                    torch.where(alone, 0.0, 1 - entropy / n.clamp_min(2).log()),
                    torch.where(alone, 0.0, (n * p2).log()))
    w, b = p["acag.weight"].view(P.size(1), 1, -1, 3), p["acag.bias"].view(P.size(1), 1, -1)
    z = sum(f[..., None] * w[..., i] for i, f in enumerate(features)) + b
    return sigmoid(z) if c.acag_mode == "published" else 2 * sigmoid(z)


def sink_gate(p, s):
    """What a key of the learned logit and the value 0 leaves of the outputs; s [B, H, T, S]."""
    nothing = p["sink.logit"][:, None, None].expand(*s.shape[:3], 1)
    return 1 - softmax(torch.cat((s, nothing), -1))[..., -1:]


def agency_factor(c, p, b):
    """Factor of each head [H] by its state and consent, b: buffers. Learned: the mean factor's gradient."""
    states, consent = b["agency.state"], b["agency.consent"]
    factors = [*STATES.values()][:3] + [0.0 if c.agency_enforce else 1.0]
    factors = torch.tensor(factors, dtype=torch.float64)
    factor = factors[states]
    if c.agency_enforce:
        factor = factor * consent
    if c.agency_learned:
        chances = softmax(b["agency.metrics"] @ p["agency.weight"].T + p["agency.bias"])
        mean = chances @ factors
        factor = factor + consent * (mean - mean.detach())  # its value is 0
    return factor


def factors(c, p, b, x, s, P, seen, t, left, training):
    """The product of all gates, [B, H, T, 1 or D].

    s [B, H, T, ...], P [B, H, T, S]: logits, weights; t: the tokens before each query; left: the heads there.
    """
    H, gate = s.size(1), torch.ones(s.size(1), 1, 1, dtype=torch.float64)
    if c.sentinel:
        g = p["sentinel.logit"]
        gate = gate * (sigmoid(g) if c.sentinel == "sigmoid" else hard_concrete(g))[:, None, None]
    if c.agency:
        gate = gate * agency_factor(c, p, b)[:, None, None]
    if routes(c, training):  # constraint heads are always on
        w = routing_weights(c, p, x)[..., left]
        gate = gate * F.pad(w, (0, H - w.size(-1)), value=1.0).transpose(1, 2)[..., None]
    if c.output_gate:
        read = x[..., :c.output_gate_width or x.size(-1)]
        gate = gate * split(sigmoid(read @ p["output_gate.proj.weight"].T), H)
    if c.acag:
        gate = gate * context_gate(c, p, P, seen, t)
    if c.sink:
        gate = gate * sink_gate(p, s)
    return gate


def rewritten(c, p, b, x, y, v, left, training):
    """Outputs y [B, H, T, D] as they are before the gates; v: each token's own value; left: the heads."""
    if c.xsa:
        share = (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True)
        y = y - p["xsa.strength"].tanh()[:, None, None] * share * v
    y = rms(y) if c.head_norm else y
    if not c.head_mix:
        return y
    n = len(p["head_mix.write.weight"])  # the layer's own heads; M [B, T, to, from]
    M = linear(p, x, "head_mix.write")[..., :, None] * linear(p, x, "head_mix.read_from")[..., None, :]
    M = M * (static_factor(c, p, b, n) != 0)
    if routes(c, training):
        M = M * (routing_weights(c, p, x)[..., None, left] != 0)
    mixed = y[:, :n] + torch.einsum("bthg,bgtd->bhtd", M, y[:, :n])
    return torch.cat((mixed, y[:, n:]), 1)


def second_maps(c, p, x, y, v, P, other):
    """Outputs y [B, H, T, D] and weights P [B, H, T, S] of the layer's own heads, where each has two maps.

    other: {name of a mechanism: the weights of the second maps, before any are subtracted}.
    """
    if c.paired_heads:
        own, joined = other["paired"]
        P, y = own + joined, own @ v + joined @ swapped(v)
    if c.diff:
        share = sigmoid(linear(p, x, "diff.share")).transpose(1, 2)[..., None]
        P, y = P - share * other["diff"], y - share * other["diff"] @ v
    return P, y


def swapped(x):
    """x [B, H, ...]: each head's is its neighbour's, of 0 and 1, 2 and 3, ..."""
    return x[:, [h ^ 1 for h in range(x.size(1))]]


def differences(p, layer, P, v):
    """Outputs of pairs of heads [B, H, T, D] (Differential Transformer): both maps read both values."""
    a, b, c, d = p["diff_v1.vectors"]
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    share = (a @ b).exp() - (c @ d).exp() + start
    y = []
    for h in range(0, P.size(1), 2):
        both = (P[:, h] - share * P[:, h + 1]) @ torch.cat((v[:, h], v[:, h + 1]), -1)
        y += ((1 - start) * rms(both, 1e-5)).chunk(2, -1)
    return torch.stack(y, 1) if y else v


# ---- logits ----

def offset(k):
    """Dimensions D/4 to D/2 and 3D/4 to D of each key from the token before, as in modded-nanogpt.

    Of each half what is turned slowest: of an odd number of pairs the one in the middle stays, and of an odd
    D the last dimension, which is in no pair.
    """
    half, moved = k.size(-1) // 2, k.clone()
    for d in (*range((half + 1) // 2, half), *range(half + (half + 1) // 2, 2 * half)):
        moved[..., 1:, d] = k[..., :-1, d]
    return moved


def prior(role, d, n):
    """What a role adds to the logit of the key d tokens back, for each nat of its strength; n waves."""
    if role == "free":
        return 0.0
    peak, shortest = (1, 2) if role == "previous" else (0, 16)
    p = sum(math.cos(2 * math.pi * (d - peak) / (shortest * 1.5**i)) for i in range(n)) / n
    return -p if role == "long" else p


def priors(c, heads, T):
    """The prior of each of these heads for each query and key, [H, T, T]; 0 for keys to come."""
    by_distance = {role: [prior(role, d, c.roles_waves) for d in range(T)] for role in c.roles}
    rows = [[[by_distance[c.roles[h % len(c.roles)]][t - s] if s <= t else 0.0 for s in range(T)]
             for t in range(T)] for h in heads]
    return torch.tensor(rows, dtype=torch.float64).view(-1, T, T)


def distances(T):
    """How far each key is behind each query, [T, T]; 0 for keys to come."""
    t = torch.arange(T).double()
    return (t[:, None] - t).clamp_min(0)


def alibi_slope(head, n):
    """The slope of a head by its number (Press et al. 2022, appendix A.4's footnote and its code)."""
    if n & (n - 1) == 0:
        return 2.0 ** (-8 * (head + 1) / n)
    below = 1 << (n.bit_length() - 1)
    return alibi_slope(head, below) if head < below else alibi_slope(2 * (head - below), 2 * below)


def t5_bucket(d, n, far):
    """Of a distance, among n: half are exact, the others grow with the logarithm, and the last holds the
    rest.
    """
    half = n // 2
    if d < half:
        return d
    return min(half + math.floor((n - half) * math.log(d / half) / math.log(far / half)), n - 1)


def convolved(x, weight, bias):
    """y_t = x_t + b + sum_i w_i x_{t-i} of x [B, T, C], weight [width, C]; nothing before the first."""
    y = []
    for t in range(x.size(1)):
        y.append(x[:, t] + bias + sum(w * x[:, t - i] for i, w in enumerate(weight) if t >= i))
    return torch.stack(y, 1)


def short_convolutions(c, p, parts):
    """q, k, v [B, T, H * D], those that short_conv names convolved."""
    names = [name for name in "qkv" if c.short_conv and name in c.short_conv]
    if not names:
        return parts
    widths = [part.size(-1) for name, part in zip("qkv", parts) if name in names]
    of = dict(zip(names, zip(p["short_conv.weight"].split(widths, 1), p["short_conv.bias"][0].split(widths))))
    return [convolved(part, *of[name]) if name in of else part for name, part in zip("qkv", parts)]


def static_factor(c, p, b, n):
    """Of the first n heads, [n]: their gates that depend on no token."""
    own = torch.ones(n, dtype=torch.float64)
    if c.sentinel:
        g = p["sentinel.logit"][:n]
        own = own * (sigmoid(g) if c.sentinel == "sigmoid" else hard_concrete(g))
    return own * agency_factor(c, p, b)[:n] if c.agency else own


def mixed_values(c, p, b, x, v, layer, heads, passed):
    """Values v [B, H, T, D] with those of the first layer, and with those of a token's own table."""
    n = c.n_head // (c.n_kv_head or c.n_head)  # heads in a group, which shares its values
    groups = [h // n for h in heads[::n]]
    if c.value_residual and layer == 0:  # of a head that is closed or gone, nothing
        own = static_factor(c, p, b, len(heads))
        every = {g: (own[i * n:i * n + n] != 0).any() * v[:, i] for i, g in enumerate(groups)}
        passed["values"] = torch.stack([every.get(g, torch.zeros_like(x[..., :v.size(-1)]))
                                        for g in range(c.n_head // n)], 1)
    elif c.value_residual:
        share = p["value_residual.share"]
        v = (1 - share) * v + share * passed["values"][:, groups]
    if "value_embedding.wte.weight" in p:
        table = split(p["value_embedding.wte.weight"][passed["tokens"]], len(groups))
        gate = 3 * sigmoid(x[..., :12] @ p["value_embedding.gate.weight"].T)
        v = v + gate.transpose(1, 2)[..., None] * table
    return v


def base_logits(c, p, b, x, q, k, heads, seen):
    """Logits [B, H, T, S] of the layer's own heads, before the mask; seen [T, S]: who reads whom."""
    s = q @ k.mT * (c.qk_max / q.size(-1) if c.qk_max else q.size(-1) ** -0.5)
    if c.query_gain:
        s = s * p["query_gain.gain"][:, None, None]
    if c.ssmax:
        n = seen.sum(-1).double()
        s = s * p["ssmax.strength"][:, None, None] * n.log()[:, None]
    if c.score_cap:
        s = c.score_cap * torch.tanh(s / c.score_cap)
    if c.a2c:
        a = linear(p, x, "a2c.critic").transpose(1, 2)  # (B, H, T)
        if c.a2c == "published":
            s = s * a[..., None]
        elif c.a2c == "temperature":
            s = s * a.clamp_max(8).exp()[..., None]
        else:
            s = s + p["a2c.mix"][:, None, None] * a[..., None, :]
    if c.fox:  # the logarithm of the product of all gates behind the key
        f = sigmoid(linear(p, x, "fox.proj")).transpose(1, 2)  # (B, H, T)
        behind = [[f[..., j + 1:i + 1].log().sum(-1) for j in range(x.size(1))] for i in range(x.size(1))]
        s = s + torch.stack([torch.stack(row, -1) for row in behind], -2)
    if c.roles:
        s = s + p["roles.strength"][:, None, None] * priors(c, heads, x.size(1))
    if c.alibi:
        rates = torch.tensor([alibi_slope(h, c.n_head) for h in heads]).double()  # which are float32
        rates = p["alibi.log_slope"].exp() if c.alibi == "learned" else rates
        s = s - rates[:, None, None] * distances(x.size(1))
    if c.relative_bias:
        n, far = c.relative_bias_buckets, c.relative_bias_far
        bucket = distances(x.size(1)).apply_(lambda d: t5_bucket(d, n, far)).long()
        s = s + p["relative_bias.bias"][:, bucket]
    return s


def queries_and_keys(c, p, *both):
    if c.qk_norm:
        scales = (p["qk_scale.0"], p["qk_scale.1"]) if c.qk_scale else (1, 1)
        both = [rms(x, c.norm_eps or 1e-6) * scale for x, scale in zip(both, scales)]
    if c.pos != "rope":
        return list(both)
    return [rope(x, c.rope_base, c.rope_share, c.rope_scaling) for x in both]


# ---- constraint heads ----

def constraint_logits(c, p, x, hint):
    """The router's logits [B, T, heads] of x [B, T, C], or of a hint [B, C]."""
    T = x.size(1)
    if hint is not None:
        read = hint[:, None].expand(-1, T, -1)
    elif c.constraint_router_input == "first":
        read = x[:, :1].expand(-1, T, -1)
    else:
        read = torch.stack([x[:, :t + 1].mean(1) for t in range(T)], 1)
    return linear(p, linear(p, read, "constraint.fc").clamp_min(0), "constraint.out")


def constraint_gates(c, z, training):
    """The router's gates of its logits z [B, T, heads]."""
    g = sigmoid(z) if c.constraint_router == "sigmoid" else hard_concrete(z)
    return g if training else g * (g >= c.constraint_skip)


def constraint_scores(p, y):
    """One logit per head and token, [B, heads, T], of outputs y [B, heads, T, D]."""
    inner = torch.einsum("bhtd,hed->bhte", y, p["constraint.w1"]) + p["constraint.b1"][:, None]
    return torch.einsum("bhte,he->bht", inner.clamp_min(0), p["constraint.w2"]) + p["constraint.b2"][:, None]


def constraint_loss(scores, targets, weights, focal, positive):
    """Of scores {name: [B, T]} against targets {name: [B, T]}, token by token; -1: no target."""
    total = 0.0
    for name, rows in targets.items():
        terms = []
        for y, s in zip(rows.flatten().tolist(), scores[name].flatten()):
            if y >= 0:
                p = sigmoid(s)
                terms.append(-(positive * y * p.log() + (1 - y) * (1 - p).log()) * abs(y - p) ** focal)
        total = total + weights.get(name, 1.0) * sum(terms) / max(1, len(terms))
    return total / len(targets)


def on_itself(s, gates):
    """Logits s [B, heads, T, T] with the logarithm of its gate [B, heads, T] on each token's own."""
    return s + torch.diag_embed(gates.clamp_min(1e-300).log())


# ---- a layer, and the model ----

def heads_of(c, layer, p):
    """(the numbers of the heads that are left, how many constraint heads there are)."""
    left = list(range(c.n_head)) if c.head_ids is None else c.head_ids[layer]
    return left, len(p["constraint.w1"]) if "constraint.w1" in p else 0


def attention(model, layer, x, hint=None, seen=None, passed=None, inputs=None):
    """attend() of a model's layer. seen: who reads whom, in place of the model's own."""
    T, attn = x.size(1), model.transformer.h[layer].attn
    seen = visible(model, layer, T) if seen is None else seen
    return attend(model.config, attn, layer, x, seen, torch.arange(T), hint, passed, inputs)


def attend(c, attn, layer, x, seen, t, hint=None, passed=None, inputs=None):
    """x [B, T, C] through an attention layer -> (what joins the stream, {name: what was computed}).

    seen [T, T]: who reads whom; t [T]: the tokens before each; hint [B, C]: read by the constraint router;
    passed: {"tokens": [B, T], "values": of the first layer's heads, which that layer writes}; inputs: of
    queries, keys and values, where they are not x.
    """
    p, b = dict(attn.named_parameters()), dict(attn.named_buffers())
    heads, E = heads_of(c, layer, p)
    H = len(heads)
    if c.short_conv == "x":
        x = convolved(x, p["short_conv.weight"], p["short_conv.bias"][0])
    if c.a2c == "published":  # keys are queries, values are slices of x
        q, v = split(linear(p, x, "c_attn"), H), split(x, c.n_head)[:, heads]
        q, k = queries_and_keys(c, p, q, q)
    else:
        group = c.n_head // (c.n_kv_head or c.n_head)
        K = H // group
        D = p["c_attn.weight"].size(0) // max(1, H + 2 * K)
        parts = [linear(p, each, "c_attn") for each in inputs or (x, x, x)]
        parts = [part.split([H * D, K * D, K * D], -1)[i] for i, part in enumerate(parts)]
        q, k, v = (split(part, n) for part, n in zip(short_convolutions(c, p, parts), (H, K, K)))
        q, k = queries_and_keys(c, p, q, k)
    v = mixed_values(c, p, b, x, v, layer, heads, passed)
    if v.size(1) < H:  # heads of a group read the same keys and values
        k, v = (torch.stack([t[:, i // group] for i in range(H)], 1) for t in (k, v))
    k = offset(k) if c.key_offset else k
    s = base_logits(c, p, b, x, q, k, heads, seen)
    other, own_v, more = {}, v, torch.full_like(s, -math.inf)  # more: logits of further keys
    if c.paired_heads:
        both = torch.stack((s, base_logits(c, p, b, x, q, swapped(k), heads, seen)), -1)
        both = both.masked_fill(~seen[..., None], -math.inf)
        more = both[..., 1]
        other["paired"] = softmax(both.flatten(-2)).unflatten(-1, (-1, 2)).unbind(-1)
    if c.diff:
        q2 = queries_and_keys(c, p, split(linear(p, x, "diff.c_q"), H), k)[0]
        added = replace(c, a2c=c.a2c if c.a2c == "key_bias" else None, query_gain=False, ssmax=False,
                        ssmax_init=None)
        other["diff"] = softmax(base_logits(added, p, b, x, q2, k, heads, seen).masked_fill(~seen, -math.inf))
    if E:
        z = constraint_logits(c, p, x, hint)
        g = constraint_gates(c, z, attn.training).transpose(1, 2)  # (B, E, T)
        q, k, own = (split(part, E) for part in linear(p, x, "constraint.c_attn").chunk(3, -1))
        q, k = queries_and_keys(c, p, q, k)
        s = torch.cat((s, q @ k.mT * (c.qk_max / q.size(-1) if c.qk_max else q.size(-1) ** -0.5)), 1)
        v = torch.cat((v, own * g[..., None] if c.constraint_gate == "value" else own), 1)
    if E and c.constraint_gate == "score":
        s = torch.cat((s[:, :H], on_itself(s[:, H:], g)), 1)
    s = s.masked_fill(~seen, -math.inf)
    every = torch.cat((s, F.pad(more, (0, 0, 0, 0, 0, E), value=-math.inf)), -1)
    P = softmax(s)
    y = P @ v
    first, y_own = second_maps(c, p, x, y[:, :H], own_v, P[:, :H], other)
    used = torch.cat((first, P[:, H:]), 1)
    if c.diff_v1:
        y_own = differences(p, layer, P[:, :H], own_v)
    y = rewritten(c, p, b, x, torch.cat((y_own, y[:, H:]), 1), v, heads, attn.training)
    gate = factors(c, p, b, x, every, P, seen, t, heads, attn.training)
    found = dict(zip(("entropy", "concentration"), row_statistics(P)), map=used, parameters=p)
    if c.sink:
        found["map"] = used * sink_gate(p, every)
    if routes(c, attn.training):
        found.update(routing_weights=routing_weights(c, p, x), routing_logits=router_logits(p, x))
    if c.a2c:
        found["advantage"] = linear(p, x, "a2c.critic")
    if E:
        by_router = g[..., None] if c.constraint_gate == "output" else torch.ones_like(g[..., None])
        read = y[:, H:] * by_router if c.constraint_mode == "published" else y[:, H:]
        found.update(router_gates=g.transpose(1, 2), head_scores=constraint_scores(p, read),
                     constraint_y=read, constraint_logits=z)
    y = y * gate
    out = linear(p, y[:, :H].transpose(1, 2).flatten(2), "c_proj")
    if E:
        out = out + linear(p, (y[:, H:] * by_router).transpose(1, 2).flatten(2), "constraint.c_proj")
    return out, found


def fused(model, i, h, skip):
    """A decoder block's output h with an encoder's, both [B, T, C]; i: which fusion."""
    c, p = model.config, dict(model.fuse[i].named_parameters())
    skip = skip * float(c.unet_skips) * (1.0 if model.fuse[i].ramp is None else model.fuse[i].ramp)
    if c.unet == "add":
        return h + sigmoid(p["logit"]) * skip
    if c.unet == "scalar":
        return h + p["weight"] * skip
    mixed = torch.cat((skip, h), -1) @ p["weight"].T
    return h + mixed if c.unet == "concat" else mixed + p["bias"]


def sum_of_outputs(p, i, x, outputs):
    """MUDD's sums of outputs [B, T, C], weighted by the token's own x; i: which that read."""
    inner = activation(rms(x) @ p[f"mudd.fc.{i}"].T, "gelu")
    static = p[f"mudd.static.{i}"]
    weights = (inner @ p[f"mudd.out.{i}"].T).unflatten(-1, static.shape) + static
    return [sum(way[..., j, None] * y for j, y in enumerate(outputs)) for way in weights.unbind(-2)]


def over_depth(query, sources):
    """The mean of sources [B, T, C], weighted by a softmax of query . norm(source)."""
    weights = softmax(torch.stack([rms(source) @ query for source in sources], -1))
    return sum(weights[..., j, None] * source for j, source in enumerate(sources))


def before_block(model, i, x, outputs, depth):
    """(what block i adds to, inputs of its queries, keys and values or None); i = n_layer: the last norm.

    outputs: the embedding, then those of all blocks so far; depth: [what each block added, what it read].
    """
    c, p, N = model.config, dict(model.named_parameters()), model.config.n_layer
    inputs, scalars = None, ("stream_scalars.stream", "stream_scalars.embedding")
    if c.depth_attention:
        depth.append([x - depth[-1][1] if i else x, x])
        if i:
            depth[-1][1] = x = over_depth(p["depth_attention.query"][i - 1], [added for added, _ in depth])
    if c.mudd and i >= c.mudd_from:
        *inputs, x = sum_of_outputs(p, i - c.mudd_from, x, [*outputs[:-1], x])
    if c.stream_scalars and i < N:
        x = p[scalars[0]][i] * x + p[scalars[1]][i] * outputs[0]
    if c.unet and N - i < i - 1:  # the partner of block i - 1, both counted from 0
        x = fused(model, i - 1 - (N + 1) // 2, x, outputs[N - i + 1])
    return x, inputs or None


def hidden(model, idx, hint=None, seen=None, layers=None):
    """Final hidden states [B, T, C] of idx [B, T]. layers: a list for what each attention layer computed."""
    c, p, N = model.config, dict(model.named_parameters()), model.config.n_layer
    x = p["transformer.wte.weight"][idx]
    if c.pos == "learned":
        x = x + p["transformer.wpe.weight"][:idx.size(1)]
    x = rms(x) if c.embed_norm else x
    outputs, passed, depth = [x], dict(tokens=idx), []
    for i in range(N):
        name = f"transformer.h.{i}."
        x, inputs = before_block(model, i, x, outputs, depth)
        inputs = inputs and [normed(c, p, each, name + "ln_1") for each in inputs]
        y, found = attention(model, i, normed(c, p, x, name + "ln_1"), hint, seen, passed, inputs)
        if layers is not None:
            layers.append(found)
        after = x + y
        read = normed(c, p, x if c.parallel else after, name + "ln_2")
        inner = activation(linear(p, read, name + "mlp.c_fc"), c.act)
        x = after + linear(p, inner, name + "mlp.c_proj")
        outputs.append(x)
    return normed(c, p, before_block(model, N, x, outputs, depth)[0], "transformer.ln_f")


def logits_of(model, x):
    """[B, T, V] of final hidden states."""
    head = model.transformer.wte if model.config.tied else model.lm_head
    z, cap = x @ head.weight.T, model.config.softcap
    return cap * torch.tanh(z / cap) if cap else z


def logits(model, idx, hint=None, seen=None):
    """[B, T, V]."""
    return logits_of(model, hidden(model, idx, hint, seen))


def nats_of(logits, targets):
    """Of each target [B, T]."""
    return logits.exp().sum(-1).log() - logits.gather(-1, targets.clamp_min(0)[..., None]).squeeze(-1)


def cross_entropy(logits, targets):
    """Mean nats of the targets [B, T] that are not -1."""
    return nats_of(logits, targets)[targets >= 0].mean()


# ---- the losses beside it ----

def losses(model, idx, x, layers, targets, labels=None, teacher=None):
    """{name: weighted loss}: those of each layer, summed, and those of the whole model.

    x [B, T, C]: the final hidden states of idx [B, T]; layers: what attention layers computed, see hidden();
    labels: {name of a constraint: [B, T]}; teacher: another model, or its features [B, T, C].
    """
    c, total = model.config, {}
    for found in layers:
        for name, loss in losses_of_layer(c, found, model.training).items():
            total[name] = total.get(name, 0.0) + loss
    if c.a2c in ("temperature", "key_bias"):
        total.update(critic_losses(c, model.value, layers, x, logits_of(model, x), targets))
    if labels is not None:
        scored = [found for i, found in enumerate(layers) if "head_scores" in found
                  and (c.constraint_loss_layers is None or i in c.constraint_loss_layers)]
        weights = dict(zip(c.constraint_names, c.constraint_name_coef or ()))
        for name, wanted in labels.items():
            parts = [constraint_loss(scores_by_name(c, found), {name: wanted}, weights, c.constraint_focal,
                                     c.constraint_positive_coef) for found in scored]
            total[f"constraint.{name}"] = c.constraint_coef * sum(parts) / len(parts) / len(labels)
    if teacher is not None:
        match = match_features if c.constraint_features else match_model
        terms = [*match(c, [found for found in layers if "constraint_y" in found], teacher, idx)]
        total["constraint_match"] = c.constraint_match_coef * sum(terms) / len(terms)
    return total


def chance_open(logit):
    """That a hard concrete gate is not 0 (arXiv 1712.01312, eq. 12)."""
    return sigmoid(logit - 2 / 3 * math.log(0.1 / 1.1))


def losses_of_layer(c, found, training):
    """{name: weighted loss} of the gates and routers of an attention layer."""
    p, losses = found["parameters"], {}
    if "routing_logits" in found and c.routing == "published":  # the entropy of a token's weights
        w = found["routing_weights"]  # the write-up's code keeps 1e-8 away from log 0
        losses["routing_entropy"] = c.routing_coef * -(w * (w + 1e-8).log()).sum(-1).mean()
    elif "routing_logits" in found:  # heads times the sum of (mean chance) x (share of tokens that chose it)
        z = found["routing_logits"].flatten(0, 1)
        balance = softmax(z).mean(0) * chosen(c, z).double().mean(0)
        losses["routing_balance"] = c.routing_coef * z.size(-1) * balance.sum()
    if c.sentinel == "sigmoid":
        losses["gate_l1"] = c.sentinel_coef * sigmoid(p["sentinel.logit"]).sum()
    elif c.sentinel:
        losses["gate_l0"] = c.sentinel_coef * chance_open(p["sentinel.logit"]).sum()
    if "constraint_logits" in found:
        z, hard = found["constraint_logits"], c.constraint_router == "hard_concrete"
        if c.constraint_sparsity_coef:
            opened = chance_open(z) if hard else constraint_gates(c, z, training)
            losses["constraint_router"] = c.constraint_sparsity_coef * opened.mean()
        if c.constraint_entropy_coef:
            g = sigmoid(z)
            entropy = -(g * g.log() + (1 - g) * (1 - g).log())
            losses["constraint_entropy"] = c.constraint_entropy_coef * entropy.mean()
    return losses


def critic_losses(c, value, layers, x, logits, targets):
    """Errors of the value of each scored token, and of the advantages that heads have predicted."""
    r, gamma = -nats_of(logits, targets).detach(), c.a2c_gamma
    value_error, advantage_error = [], []
    for b, t in (targets >= 0).nonzero().tolist():
        ahead = [s for s in range(t, r.size(1)) if targets[b, s] >= 0]
        G = sum(gamma ** (s - t) * r[b, s] for s in ahead) / sum(gamma ** (s - t) for s in ahead)
        V = value.weight[0] @ x[b, t].detach() + value.bias[0]  # it sends no gradient into the blocks
        value_error.append((V - G) ** 2)
        said = [found["advantage"][b, t] for found in layers if found["advantage"].numel()]
        advantage_error += [((a - (G - V).detach()) ** 2).mean() for a in said]
    per_token = sum(found["advantage"].numel() > 0 for found in layers) or 1
    n = len(value_error)
    return dict(a2c_value=c.a2c_value_coef * sum(value_error) / n,
                a2c_advantage=c.a2c_advantage_coef * sum(advantage_error) / per_token / n)


def scores_by_name(c, found):
    """{name: [B, T]}: the mean over the heads of each name."""
    each = found["head_scores"].split(c.constraint_heads, 1)
    return {name: scores.mean(1) for name, scores in zip(c.constraint_names, each)}


def match_features(c, layers, teacher, idx):
    """How far what each of a student's layers makes of its heads' outputs is from features [B, T, C]."""
    for found in layers:
        y = found["constraint_y"].transpose(1, 2).flatten(2)
        mapped = linear(found["parameters"], y, "constraint.features")
        if c.constraint_match == "huber":
            yield huber_loss(mapped - teacher)
        else:
            p, q = softmax(teacher), softmax(mapped)
            yield (p * (p / q).log()).sum(-1).mean()


def match_model(c, layers, teacher, idx):
    """How far a student's scores, or its heads' outputs, are from those of a teacher, layer by layer."""
    theirs = []
    with torch.no_grad():
        hidden(teacher, idx, layers=theirs)
    for our, their in zip(layers, (found for found in theirs if "constraint_y" in found), strict=True):
        if c.constraint_match == "huber":
            yield huber_loss(our["constraint_y"] - their["constraint_y"])
            continue
        both = (scores_by_name(c, found) for found in (our, their))
        for q, p in zip(*(map(sigmoid, scores.values()) for scores in both)):
            yield (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()


def huber_loss(d):
    return torch.where(d.abs() < 1, d ** 2 / 2, d.abs() - 0.5).mean()


# ---- the plain GPT to the last bit ----

def plain(model, idx):
    """Logits of a recipe's plain GPT from its parameters, in few of PyTorch's operations, in float32."""
    c, w, (B, T) = model.config, dict(model.named_parameters()), idx.shape
    gpt2 = c.recipe == "gpt2"
    D = c.n_embd // c.n_head
    half = D // 2

    def rms(x):  # to the last bit what a CPU computes without a gradient, which test_kernels.py checks
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(torch.full((1,), 1e-6), length, length, value=1 / x.size(-1)).rsqrt()

    def norm(x, name):
        if gpt2:
            return F.layer_norm(x, (c.n_embd,), w[name + ".weight"], None, 1e-5)
        return rms(x)

    def turn(x):
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
        cos, sin = (f.repeat(1, 2).float()[:, None] for f in (angle.cos(), angle.sin()))
        sin[..., :half] *= -1
        x = rms(x)
        return torch.addcmul(x * cos, torch.cat((x[..., half:], x[..., :half]), -1), sin)

    x = F.embedding(idx, w["transformer.wte.weight"])
    x = x + w["transformer.wpe.weight"][:T] if gpt2 else rms(x)
    for i in range(c.n_layer):
        name = f"transformer.h.{i}."
        qkv = F.linear(norm(x, name + "ln_1"), w[name + "attn.c_attn.weight"])
        q, k, v = qkv.view(B, T, 3, c.n_head, D).unbind(2)
        q, k = (q, k) if gpt2 else (turn(q), turn(k))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + F.linear(y.transpose(1, 2).reshape(B, T, c.n_embd), w[name + "attn.c_proj.weight"])
        inner = F.linear(norm(x, name + "ln_2"), w[name + "mlp.c_fc.weight"])
        inner = F.gelu(inner) if gpt2 else F.relu(inner) ** 2
        x = x + F.linear(inner, w[name + "mlp.c_proj.weight"])
    return F.linear(norm(x, "transformer.ln_f"), w["transformer.wte.weight" if gpt2 else "lm_head.weight"])
