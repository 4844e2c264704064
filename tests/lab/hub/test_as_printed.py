"""The classes of two write-ups as printed: their snippets run, formulas by loops, masks, what sees whom."""

import copy
import inspect
import math
import re
import sys

import pytest
import torch
from torch.nn import functional as F

from model import GPT, CausalMask, ForwardPass, GPTConfig
from lab.hub.as_printed import (A2CAttention, ActorCritic, ConstraintConfig,
                                      MultiHeadAttentionWithConstraints, TransformerBlockWithConstraint,
                                      constraint_loss, language_model_loss)
from lab.hub.layers import ConstraintAttention
from helpers import ROOT
from oracle import agree, close, normal

B, T, C, H = 2, 5, 24, 4
NAMES = ["reciprocity", "testifiability"]

# ---- the snippets, word for word: only the page's curly quotes are straight here ----

CONSTRAINT_IMPORT = """
from lab.hub.as_printed import (ConstraintConfig, TransformerBlockWithConstraint, constraint_loss,
                                      language_model_loss)
"""
CONSTRAINT_BLOCK = """
cfg = ConstraintConfig(
names=["reciprocity", "testifiability", "decidability"],
heads_per_constraint=1,
trace_token_scores=True,
trace_attn_maps=False,
loss_weights={"reciprocity":1.0, "testifiability":0.5, "decidability":0.5},
variant="A",
)

block = TransformerBlockWithConstraint(d_model=1024, n_heads_base=16, mlp_ratio=4, dropout=0.1, \
constraint=cfg)
"""  # one line there
CONSTRAINT_STEP = """
# x: [B,T,1024]; attn_mask: broadcastable to [B,1,T,T]
y, traces = block(x, attn_mask=None, need_weights=False)

# During training:
lm_loss = language_model_loss(y, targets_next_tokens)
# your usual CE
c_targets = {
"reciprocity": recip_labels,
# [B,T] in {0,1} or real
"testifiability": testif_labels,
# [B,T]
"decidability": decid_labels,
# [B,T]
}
c_loss = constraint_loss(traces, c_targets, cfg.loss_weights)
total = lm_loss + 0.2 * c_loss
total.backward(); optimizer.step()
"""

A2C_IMPORTS = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader
from torchtext.data.utils import get_tokenizer
from torchtext.vocab import build_vocab_from_iterator

class TextDataset(Dataset):
    def __init__(self, texts, vocab):
        self.texts = texts
        self.vocab = vocab

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, idx):
        tokens = self.vocab(self.texts[idx])
        indices = [self.vocab.get_stoi().get(token, self.vocab.get_stoi()['']) for token in tokens]
        return torch.tensor(indices)
"""
A2C_CLASSES = """
class ActorCritic(nn.Module):
    def __init__(self, input_dim, hidden_dim, output_dim):
        super(ActorCritic, self).__init__()

        self.embedding = nn.Embedding(input_dim, hidden_dim)
        self.actor = nn.GRU(hidden_dim, hidden_dim)
        self.critic = nn.GRU(hidden_dim, hidden_dim)
        self.attention = A2CAttention(hidden_dim, hidden_dim)
        self.fc = nn.Linear(hidden_dim, output_dim)

    def forward(self, x):
        # Query Generation
        embedded = self.embedding(x)
        q, _ = self.actor(embedded)

        # A2C-based Attention Weights
        output, attention_weights = self.attention(embedded)

        # Value Estimation
        _, value = self.critic(output)

        # Output Generation
        output = self.fc(output)

        return output, attention_weights, value


class A2CAttention(nn.Module):
    def __init__(self, input_dim, d_k):
        super(A2CAttention, self).__init__()
        self.d_k = d_k

        self.actor = nn.Linear(input_dim, d_k)
        self.critic = nn.Linear(input_dim, 1)

    def forward(self, x):
        # Query Generation
        q = self.actor(x)

        # A2C-based Attention Weights
        a2c = self.critic(x)
        attention_scores = torch.matmul(q, q.transpose(-2, -1)) / (self.d_k ** 0.5)
        attention_weights = F.softmax(attention_scores * a2c, dim=-1)

        # Output Generation
        output = torch.matmul(attention_weights, x)

        return output, attention_weights
"""
A2C_IMPORT = "from lab.hub.as_printed import ActorCritic"
A2C_USAGE = """
# Example usage
hidden_dim = 256
output_dim = 10000  # Vocabulary size

# Create a sample dataset
texts = ["This is the first text.", "This is the second text.", "This is the third text."]

# Tokenize the texts
tokenizer = get_tokenizer('basic_english')
tokenized_texts = [tokenizer(text) for text in texts]

# Build the vocabulary from the tokenized texts
vocab = build_vocab_from_iterator(tokenized_texts, specials=[""])

# Create a dataset using the tokenized texts and vocabulary
dataset = TextDataset(tokenized_texts, vocab)

# Create a DataLoader for the dataset
batch_size = 2
dataloader = DataLoader(dataset, batch_size=batch_size, shuffle=True)

# Create an instance of the model
input_dim = len(vocab)
model = ActorCritic(input_dim, hidden_dim, output_dim)

# Generate a batch of sample input tensors
input_tensor = next(iter(dataloader))

# Forward pass through the model
output, attention_weights, value = model(input_tensor)

# Print the output and attention weights
print("Output shape:", output.shape)
print("Attention weights shape:", attention_weights.shape)
print("Value shape:", value.shape)
"""


@pytest.mark.slow
def test_the_snippet_of_constraint_heads_runs_as_printed():
    """The reader brings x, labels, next tokens and an optimizer, as the snippet says."""
    torch.manual_seed(0)
    names = dict(x=torch.randn(B, T, 1024), targets_next_tokens=torch.randint(1024, (B, T)),
                 recip_labels=torch.randint(2, (B, T)), testif_labels=torch.rand(B, T),
                 decid_labels=torch.randint(2, (B, T)).float())
    exec(CONSTRAINT_IMPORT + CONSTRAINT_BLOCK, names)
    block = names["block"]
    names["optimizer"] = torch.optim.SGD(block.parameters(), lr=0.1)
    before = copy.deepcopy(block.state_dict())
    exec(CONSTRAINT_STEP, names)
    assert names["y"].shape == (B, T, 1024) and names["total"].isfinite()
    assert all(not torch.equal(before[name], p) for name, p in block.named_parameters())


PAGE = (ROOT / "docs/mechanisms.md").read_text(encoding="utf-8")
OF_CONSTRAINTS, OF_A2C = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
STAND_IN = OF_A2C.partition("# ---- the write-up's program ----")[0]  # for torchtext


@pytest.fixture
def no_torchtext(monkeypatch):
    """What stands in for it goes with the test."""
    for name in ("torchtext", "torchtext.data", "torchtext.data.utils", "torchtext.vocab"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("classes", [A2C_IMPORT, A2C_CLASSES], ids=["ours", "those printed"])
def test_the_program_of_a2c_runs_as_printed(classes, no_torchtext, capsys):
    exec(STAND_IN + A2C_IMPORTS + classes + A2C_USAGE, names := {"__name__": "snippet"})
    assert capsys.readouterr().out == ("Output shape: torch.Size([2, 6, 10000])\n"
                                       "Attention weights shape: torch.Size([2, 6, 6])\n"
                                       "Value shape: torch.Size([1, 6, 256])\n")
    assert names["vocab"] == {word: i for i, word in enumerate(
        ["", ".", "is", "text", "the", "this", "first", "second", "third"])}  # as torchtext orders them
    assert not names["input_tensor"].any()  # docs/mechanisms.md says so: every token is number 0


def squeezed(text):
    return re.sub(r"\s", "", text)


@pytest.mark.slow
def test_the_page_shows_both_snippets_and_they_run(no_torchtext, capsys):
    for block in (OF_CONSTRAINTS, OF_A2C):
        exec(block, {"__name__": "page"})
    assert capsys.readouterr().out.count("torch.Size") == 3
    for shown, printed in ((OF_CONSTRAINTS, CONSTRAINT_BLOCK + CONSTRAINT_STEP),
                           (OF_A2C, A2C_IMPORTS + A2C_USAGE)):
        for line in printed.splitlines():
            assert squeezed(line) in squeezed(shown), line
    assert len([line for line in STAND_IN.splitlines() if line]) <= 20


def parameters_of(function):
    """[(name, default)]; inspect.Parameter.empty: none."""
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_arguments_and_defaults_are_those_printed():
    none = inspect.Parameter.empty
    assert parameters_of(ConstraintConfig) == [
        ("names", ("reciprocity", "testifiability", "decidability")), ("heads_per_constraint", 1),
        ("trace_token_scores", True), ("trace_attn_maps", False), ("router_hidden", 128),
        ("loss_weights", None), ("variant", "A")]
    cfg = ConstraintConfig()
    assert cfg.names == ["reciprocity", "testifiability", "decidability"]
    assert cfg.loss_weights == dict.fromkeys(cfg.names, 1.0)
    assert parameters_of(MultiHeadAttentionWithConstraints) == [
        ("d_model", none), ("n_heads_base", none), ("n_layers", 1), ("constraint", None), ("dropout", 0.0),
        ("causal", False)]
    assert parameters_of(MultiHeadAttentionWithConstraints.forward)[1:] == [
        ("x", none), ("attn_mask", None), ("need_weights", False), ("router_hint", None)]
    assert parameters_of(MultiHeadAttentionWithConstraints.explain)[1:] == [
        ("traces", none), ("tokens", none), ("constraint_name", "reciprocity")]
    assert parameters_of(A2CAttention) == [("input_dim", none), ("d_k", none), ("causal", False)]
    assert parameters_of(ActorCritic) == [("input_dim", none), ("hidden_dim", none), ("output_dim", none),
                                          ("causal", False)]


# ---- constraint heads ----

def attention(variant="A", per_name=2, causal=False, C=C, H=H, **how):
    torch.manual_seed(0)
    cfg = ConstraintConfig(NAMES, per_name, trace_attn_maps=True, router_hidden=7, variant=variant)
    layer = MultiHeadAttentionWithConstraints(C, H, constraint=cfg, causal=causal, **how)
    for p in layer.parameters():
        p.data.normal_(0, 0.4)
    return layer.double()


def gate_by_loops(p, h, m):
    hidden = (p["router.0.weight"] @ m + p["router.0.bias"]).clamp_min(0)
    return 1 / (1 + (-(p["router.2.weight"][h] @ hidden + p["router.2.bias"][h])).exp())


def constraint_by_loops(layer, x, seen, D, causal=False, hint=None):
    """(y [B, T, C], head scores [B, Hc, T], gates [B, Hc, T], weights [B, H, T, T]), token by token.

    seen(b, t, s): whether t looks at s.
    """
    p, (B, T, _) = dict(layer.named_parameters()), x.shape
    Hb, Hc = len(p["Wq_base.weight"]) // D, len(p["Wq_con.weight"]) // D
    q, k, v = (torch.cat((p[f"W{n}_base.weight"], p[f"W{n}_con.weight"])).split(D) for n in "qkv")
    y, scores = torch.zeros(B, T, layer.d_model).double(), torch.zeros(B, Hc, T).double()
    gates, maps = torch.ones(B, Hc, T).double(), torch.zeros(B, Hb + Hc, T, T).double()
    for b in range(B):
        heads = [[] for _ in range(T)]
        for h in range(Hb + Hc):
            values = []
            for s in range(T):
                values.append(v[h] @ x[b, s])
                if h >= Hb:
                    m = sum(x[b, i] for i in range(s + 1)) / (s + 1) if causal else sum(x[b]) / T
                    gate = gate_by_loops(p, h - Hb, m if hint is None else hint[b])
                    values[s] = gate * values[s]
                    gates[b, h - Hb, s] = gate
            for t in range(T):
                look = [s for s in range(T) if seen(b, t, s)]
                e = [((q[h] @ x[b, t]) @ (k[h] @ x[b, s]) / math.sqrt(D)).exp() for s in look]
                for s, each in zip(look, e):
                    maps[b, h, t, s] = each / sum(e)
                head = sum(each / sum(e) * values[s] for s, each in zip(look, e))
                heads[t].append(head)
                if h >= Hb:
                    n = f"token_scorers.{h - Hb}"
                    hidden = (p[n + ".0.weight"] @ head + p[n + ".0.bias"]).clamp_min(0)
                    scores[b, h - Hb, t] = p[n + ".2.weight"][0] @ hidden + p[n + ".2.bias"][0]
        for t in range(T):
            y[b, t] = p["Wo.weight"] @ torch.cat(heads[t])
    return y, scores, gates, maps


SOME = torch.rand(B, T, T, generator=torch.Generator().manual_seed(5)) < 0.6
SOME |= torch.eye(T, dtype=torch.bool)
MASKS = {"none": None, "causal": torch.ones(T, T, dtype=torch.bool).tril()[None], "of each text": SOME,
         "of keys": torch.tensor([[True] * T, [True] * 3 + [False] * 2])[:, None]}


def additive(seen):
    """[B or 1, T or 1, T], True where a token looks -> the write-up's mask, [B or 1, 1, T or 1, T]."""
    return None if seen is None else torch.zeros(seen.shape).masked_fill(~seen, -math.inf)[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("variant, per_name, width, D", [("A", 2, C, 6), ("B", 2, C, 3), ("B", 1, 20, 3)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_constraint_heads_are_the_write_ups_formula(variant, per_name, width, D, mask, causal):
    """Outputs, scores, gates, maps and all gradients; 20 / (4 + 2) is floored to 3: 18 of 20 columns."""
    layer, x = attention(variant, per_name, causal, C=width), normal(B, T, width, grad=True)
    rows = MASKS[mask] if MASKS[mask] is not None else torch.ones(1, T, T, dtype=torch.bool)
    rows = rows.expand(B, T, T)

    def seen(b, t, s):
        return rows[b, t, s] and (s <= t or not causal)

    y, traces = layer(x, additive(MASKS[mask]), need_weights=True)
    found, n = traces["constraint"], per_name
    want, scores, gates, maps = constraint_by_loops(layer, x, seen, D, causal)
    assert layer.Wo.in_features == D * (H + 2 * n)
    got = [y, found["head_token_scores"], found["router_gates"], traces["base_attn_maps"]]
    wanted = [want, scores, gates if causal else gates[..., 0], maps[:, :H]]
    for i, name in enumerate(NAMES):
        got += [found[name]["token_scores"], found[name]["attn_maps"]]
        wanted += [scores[:, i * n:i * n + n].mean(1), maps[:, H + i * n:H + i * n + n]]
    agree(got, wanted, [x, *layer.parameters()], 1e-12)


def test_a_hint_takes_the_place_of_the_mean():
    x, hint = normal(B, T, C), normal(B, C, seed=2)
    for causal in (False, True):
        layer = attention(causal=causal)
        y, traces = layer(x, router_hint=hint)
        want, _, gates, _ = constraint_by_loops(layer, x, lambda b, t, s: s <= t or not causal, 6, causal,
                                                hint)
        close(y, want, 1e-12)
        close(traces["constraint"]["router_gates"], gates[..., 0], 1e-12)
        assert (layer(x)[0] - y).abs().max() > 1e-3


@pytest.mark.slow
def test_head_sizes_of_the_variants():
    """1024 / 16 = 64 and 19 heads of 53, as printed."""
    for variant, D in (("A", 64), ("B", 53)):
        layer = MultiHeadAttentionWithConstraints(1024, 16, constraint=ConstraintConfig(variant=variant))
        assert layer.dk == layer.dv == D and layer.Wo.weight.shape == (1024, 19 * D)
        assert not any(name.startswith("W") and name.endswith("bias") for name, _ in layer.named_parameters())


@pytest.mark.parametrize("need_weights, maps", [(False, True), (True, False), (True, True)])
def test_traces_are_nested_as_printed(need_weights, maps):
    cfg = ConstraintConfig(trace_attn_maps=maps, heads_per_constraint=2)
    layer = MultiHeadAttentionWithConstraints(C, H, constraint=cfg)
    _, traces = layer(normal(B, T, C).float(), need_weights=need_weights)
    found = traces["constraint"]
    assert list(traces) == ["constraint", "need_weights"] + ["base_attn_maps"] * need_weights
    assert traces["need_weights"] is need_weights
    assert list(found) == ["head_token_scores", *cfg.names, "router_gates"]
    assert found["head_token_scores"].shape == (B, 6, T) and found["router_gates"].shape == (B, 6)
    for name in cfg.names:
        assert list(found[name]) == ["token_scores"] + ["attn_maps"] * (need_weights and maps)
        assert found[name]["token_scores"].shape == (B, T)
        assert not (need_weights and maps) or found[name]["attn_maps"].shape == (B, 2, T, T)


@pytest.mark.parametrize("variant", ["A", "B"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cfg", [dict(names=[]), dict(heads_per_constraint=0)], ids=str)
@pytest.mark.filterwarnings("error")
def test_without_constraint_heads_it_is_the_base_heads_attention(cfg, variant, causal):
    """The printed branches for none: no projections, no gates, an empty trace."""
    torch.manual_seed(0)
    cfg = ConstraintConfig(variant=variant, **cfg)
    layer, x = MultiHeadAttentionWithConstraints(32, 4, constraint=cfg, causal=causal), torch.randn(B, T, 32)
    y, traces = layer(x, need_weights=True)
    assert traces.pop("base_attn_maps").shape == (B, 4, T, T)
    assert traces == {"constraint": {}, "need_weights": True}
    assert layer.Wq_con is layer.Wk_con is layer.Wv_con is None
    q, k, v = (layer.get_submodule(f"W{n}_base")(x).view(B, T, 4, 8).transpose(1, 2) for n in "qkv")
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    close(y, layer.Wo(want.transpose(1, 2).flatten(2)), 1e-6)
    assert layer.explain(traces, ["a"] * T) == "No constraint trace." and constraint_loss(traces, {}) == 0.0
    block = TransformerBlockWithConstraint(32, 4, constraint=cfg, causal=causal)
    block(x)[0].sum().backward()


def changed_after(function, x, t, new):
    """How far function(x)[:, :t + 1] moves when what comes after token t does."""
    other = x.clone()
    other[:, t + 1:] = new[:, t + 1:]
    return max((a[:, :t + 1] - b[:, :t + 1]).abs().max() for a, b in zip(function(x), function(other)))


def all_by_token(layer, mask=None):
    """Its output and everything in the traces that has a token, each [B, T, ...]."""
    def run(x):
        y, traces = layer(x, mask)
        found = traces["constraint"]
        gates = found["router_gates"]
        return [y, found["head_token_scores"].mT, *([gates.mT] if gates.dim() == 3 else [])]
    return run


CAUSAL = torch.zeros(T, T).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -math.inf)


@pytest.mark.parametrize("make, exact", [
    (lambda: all_by_token(attention(causal=True)), True),
    (lambda: all_by_token(attention("B", causal=True), torch.zeros(T, T)), True),
    (lambda: all_by_token(attention()), False),
    (lambda: all_by_token(attention(), CAUSAL), False)],
    ids=["causal", "causal and a mask", "as printed", "a causal mask alone: the router pools all"])
def test_constraint_heads_leak_nothing_only_where_causal(make, exact):
    run, x, new = make(), normal(B, T, C), normal(B, T, C, seed=3)
    moved = [changed_after(run, x, t, new).item() for t in range(T - 1)]
    assert all(d == 0 for d in moved) if exact else all(d > 1e-4 for d in moved)


def test_rows_of_a_batch_do_not_mix():
    x = normal(B, T, C)
    for layer in (attention(), attention(causal=True)):
        close(layer(x)[0][:1], layer(x[:1])[0], 1e-13)


def test_the_block_is_attention_and_mlp_added_to_a_normed_stream():
    torch.manual_seed(1)
    cfg = ConstraintConfig(NAMES)
    block, x = TransformerBlockWithConstraint(C, H, 2, 0.5, cfg, causal=True).double(), normal(B, T, C)
    assert block.mlp[0].out_features == 2 * C and block.attn.dropout.p == 0.5
    assert not torch.equal(block(x)[0], block(x)[0])
    block.eval()
    y, traces = block(x, CAUSAL, True)
    attended, same = block.attn(F.layer_norm(x, [C], block.ln_1.weight, block.ln_1.bias), CAUSAL, True)
    after = x + attended
    h = F.layer_norm(after, [C], block.ln_2.weight, block.ln_2.bias)
    h = h @ block.mlp[0].weight.T + block.mlp[0].bias
    h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    close(y, after + h @ block.mlp[2].weight.T + block.mlp[2].bias, 1e-12)
    assert torch.equal(traces["base_attn_maps"], same["base_attn_maps"])
    moved = changed_after(lambda x: [block(x)[0]], x, 2, normal(B, T, C, seed=3))
    assert moved == 0


# ---- the loss and explain() ----

def some_traces(grad=False):
    return {"constraint": {"head_token_scores": normal(B, 2, T),
                           "reciprocity": {"token_scores": normal(B, T, grad=grad)},
                           "testifiability": {"token_scores": normal(B, T, seed=2, grad=grad)},
                           "router_gates": normal(B, 2)}, "need_weights": False}


def test_the_loss_is_the_mean_over_names_of_weighted_bce():
    """By loops, forward and gradient; a target below 0 is not known."""
    traces = some_traces(grad=True)
    targets = {"reciprocity": normal(B, T, seed=3).sigmoid(), "testifiability": torch.ones(B, T).long()}
    targets["reciprocity"][0, 1:3] = -1
    weights = {"reciprocity": 1.0, "testifiability": 0.5}
    want = 0
    for name, y in targets.items():
        nats = []
        for b in range(B):
            for t in range(T):
                p = 1 / (1 + (-traces["constraint"][name]["token_scores"][b, t]).exp())
                if y[b, t] >= 0:
                    nats.append(-(y[b, t] * p.log() + (1 - y[b, t]) * (1 - p).log()))
        want = want + weights[name] * sum(nats) / len(nats) / 2
    scores = [traces["constraint"][name]["token_scores"] for name in NAMES]
    got = constraint_loss(traces, targets, weights)
    agree([got], [want], scores, 1e-12)
    close(constraint_loss(traces, targets), constraint_loss(traces, targets, dict.fromkeys(NAMES, 1.0)), 0)
    assert (constraint_loss(traces, targets) - got).abs() > 1e-2
    unknown = {"reciprocity": torch.full((B, T), -1)}
    assert constraint_loss(traces, unknown) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_lowers_both_losses(dtype):
    torch.manual_seed(0)
    cfg = ConstraintConfig(NAMES, loss_weights={"reciprocity": 1.0, "testifiability": 0.5})
    block = TransformerBlockWithConstraint(32, H, constraint=cfg, causal=True).to(dtype)
    x, tokens = torch.randn(4, 16, 32).to(dtype), torch.randint(32, (4, 16))
    labels = {"reciprocity": (x[..., 0] > 0).float(), "testifiability": (x[..., 1] > 0).long()}
    optimizer, seen = torch.optim.Adam(block.parameters(), lr=1e-2), []
    for _ in range(60):
        y, traces = block(x)
        lm_loss, c_loss = language_model_loss(y, tokens), constraint_loss(traces, labels, cfg.loss_weights)
        seen.append((lm_loss.item(), c_loss.item()))
        optimizer.zero_grad()
        (lm_loss + 0.2 * c_loss).backward()
        optimizer.step()
    assert seen[-1][0] < seen[0][0] / 2 and seen[-1][1] < seen[0][1] / 2


def test_explain_names_the_five_highest_tokens_of_the_first_text():
    traces = some_traces(grad=True)
    scores = torch.tensor([[.1, 3, -1, 2, .25, .5], [9, 0, 0, 0, 0, 0]], requires_grad=True)
    traces["constraint"]["reciprocity"]["token_scores"] = scores
    line = "reciprocity focus → b:3.00, d:2.00, f:0.50, e:0.25, a:0.10"
    explain = attention().explain
    assert explain(traces, list("abcdef")) == line
    assert explain(traces, list("abcdef"), constraint_name="reciprocity") == line
    assert explain(traces, list("abcde"), "testifiability").startswith("testifiability focus → ")
    assert explain({}, []) == explain(traces, list("abcde"), "truth") == "No constraint trace."


# ---- A2C ----

def a2c_by_loops(layer, x, causal):
    p, (B, T, _) = dict(layer.named_parameters()), x.shape
    y, maps = torch.zeros_like(x), torch.zeros(B, T, T).double()
    for b in range(B):
        q = [p["actor.weight"] @ x[b, t] + p["actor.bias"] for t in range(T)]
        for t in range(T):
            a = p["critic.weight"][0] @ x[b, t] + p["critic.bias"][0]
            look = range(t + 1 if causal else T)
            e = [(q[t] @ q[s] / math.sqrt(len(q[t])) * a).exp() for s in look]
            for s in look:
                maps[b, t, s] = e[s] / sum(e)
            y[b, t] = sum(e[s] / sum(e) * x[b, s] for s in look)
    return y, maps


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d_k", [C, 3])
def test_a2c_is_the_write_ups_formula(causal, d_k):
    torch.manual_seed(0)
    layer, x = A2CAttention(C, d_k, causal).double(), normal(B, T, C, grad=True)
    assert (layer.critic(x) < 0).any()  # where a mask before the product would show what is later
    agree(layer(x), a2c_by_loops(layer, x, causal), [x, *layer.parameters()], 1e-12)
    close(layer(x[0])[0], layer(x)[0][0], 1e-13)


def test_actor_critic_is_the_printed_class_to_the_last_bit():
    printed = dict(torch=torch, nn=torch.nn, F=F)
    exec(A2C_CLASSES, printed)
    torch.manual_seed(0)
    ours = ActorCritic(11, 8, 13)
    torch.manual_seed(0)
    theirs = printed["ActorCritic"](11, 8, 13)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(a, b)
    idx = torch.randint(11, (3, T))
    for a, b in zip(ours(idx), theirs(idx), strict=True):
        assert torch.equal(a, b)


def test_actor_critic_leaks_nothing_only_where_causal():
    """Each token is as if the text ended with it; as printed neither that holds, nor is a text alone."""
    torch.manual_seed(0)
    idx, sizes = torch.randint(11, (3, T)), (11, 8, 13)
    causal, printed = ActorCritic(*sizes, causal=True).double(), ActorCritic(*sizes).double()
    output, maps, value = causal(idx)
    assert output.shape == (3, T, 13) and maps.shape == (3, T, T) and value.shape == (3, T, 8)
    for t in range(T):
        for whole, part in zip(causal(idx), causal(idx[:1, :t + 1])):
            close(whole[:1, t, :part.size(-1)], part[:, t], 1e-13)
    assert not maps.triu(1).any()
    for a, b in zip(printed(idx), printed(idx[:, :2])):
        assert (a[:, 1, :b.size(-1)] - b[:, 1]).abs().max() > 1e-3
    assert (printed(idx)[2] - printed(idx[-1:])[2]).abs().max() > 1e-3  # the value reads other texts too


# ---- beside model.py ----

def attention_of_gpt(n_embd, n_head, **flags):
    config = GPTConfig(block_size=T, vocab_size=1, n_layer=1, n_head=n_head, n_embd=n_embd, **flags)
    attn = GPT(config).double().transformer.h[0].attn
    for i, p in enumerate(attn.parameters()):
        p.data = normal(*p.shape, seed=i) / 3
    mask = CausalMask(config).dense(0, T, None, torch.device("cpu"))
    positions = torch.arange(T)
    counted = ForwardPass(mask=mask, positions=positions, n_keys=(positions + 1).double(),
                          wants_traces="maps", wants_predictions=True)
    return attn, counted


def copied_from(attn, cfg, width, heads, causal):
    """The printed layer with the weights of model.py's attention."""
    layer = MultiHeadAttentionWithConstraints(width, heads, constraint=cfg, causal=causal).double()
    theirs = attn.constraint
    for kind, weight in (("base", attn.c_attn.weight), ("con", theirs.c_attn.weight)):
        for n, rows in zip("qkv", weight.data.chunk(3)):
            getattr(layer, f"W{n}_{kind}").weight.data = rows
    layer.Wo.weight.data = torch.cat((attn.c_proj.weight.data, theirs.c_proj.weight.data), 1)
    layer.router[0], layer.router[2] = theirs.fc, theirs.out
    for h, scorer in enumerate(layer.token_scorers):
        scorer[0].weight.data, scorer[0].bias.data = theirs.w1.data[h], theirs.b1.data[h]
        scorer[2].weight.data, scorer[2].bias.data = theirs.w2.data[h:h + 1], theirs.b2.data[h:h + 1]
    return layer


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("variant, width, heads", [("A", C, H), ("B", 88, 8)])
def test_the_printed_constraint_heads_are_those_of_model_py_as_published(variant, width, heads, causal):
    """As printed, that is model.py's attention in the layer that lets tokens see later ones."""
    names = [*NAMES, "decidability"]
    ours = ConstraintAttention(width, heads, names, T, variant, causal=causal,
                               constraint_mode="published").double()
    for i, p in enumerate(ours.parameters()):
        p.data = normal(*p.shape, seed=i) / 3
    layer = copied_from(ours.attn, ConstraintConfig(names, trace_attn_maps=True, variant=variant), width,
                        heads, causal)
    x = normal(B, T, width)
    want, traced = ours(x, need_weights=True)
    y, traces = layer(x, need_weights=True)
    close(y, want, 1e-11)
    found = traces["constraint"]
    close(found["router_gates"].reshape(B, 3, -1), traced["blocks.0.router_gates"].mT, 1e-12)
    for name in names:
        close(found[name]["token_scores"], traced[f"blocks.0.constraint.{name}"], 1e-11)
    maps = torch.cat([traces["base_attn_maps"], *(found[name]["attn_maps"] for name in names)], 1)
    close(maps, traced["blocks.0.map"].double(), 1e-6)  # in float32 there
    layer.causal = False  # the control: with a mask alone it is another function
    assert (layer(x, CAUSAL)[0] - want).abs().max() > 1e-3


def test_causal_a2c_is_that_of_model_py_as_published_with_one_head_and_no_projection():
    attn, p = attention_of_gpt(C, 1, a2c="published", qkv_bias=True)
    layer = A2CAttention(C, C, causal=True).double()
    layer.actor.weight.data, layer.actor.bias.data = attn.c_attn.weight.data, attn.c_attn.bias.data
    layer.critic = attn.a2c.critic
    x = normal(B, T, C)
    projected = attn(x, p)[0]
    y, maps = layer(x)
    close(y @ attn.c_proj.weight.T, projected, 1e-11)
    attn.c_proj.weight.data = torch.eye(C).double()
    want, results = attn(x, p)
    close(y, want, 1e-11)
    close(maps, results["traces"]["map"][:, 0].double(), 1e-6)
    assert (projected - y).abs().max() > 1e-3 and (A2CAttention(C, C).double()(x)[0] - y).abs().max() > 1e-3


# ---- mistakes ----

def read(**how):
    return lambda: attention().float()(torch.zeros(B, T, C), **how)


def judge(targets):
    return lambda: constraint_loss(some_traces(), targets)


MISTAKES = [
    (lambda: ConstraintConfig("truth"), r"names='truth' must be a list of names: \['truth'\]"),
    (lambda: ConstraintConfig(["a", "a"]), r"names=\['a', 'a'\] must be different"),
    (lambda: ConstraintConfig(NAMES, variant="C"), r"variant='C' must be 'A' \(wider concatenation\) or 'B'"),
    (lambda: MultiHeadAttentionWithConstraints(25, H), "d_model=25 must be a multiple of n_heads_base=4"),
    (read(attn_mask=SOME[:, None]), "attn_mask is added to the logits: give floats"),
    (read(attn_mask=torch.ones(T, T).long()), "attn_mask is added to the logits: give floats"),
    (read(attn_mask=torch.ones(T, T)), "attn_mask is added to the logits: give floats, 0 where"),
    (read(attn_mask=torch.full((T, T), math.nan)), "attn_mask is added to the logits"),
    (read(attn_mask=torch.zeros(B, T, T)), r"attn_mask \[2, 5, 5\] must be broadcastable to \[2, 1, 5, 5\]"),
    (read(attn_mask=torch.zeros(B, 8, T, T)), "one for all heads"),
    (judge({}), "targets for nothing; the heads are for reciprocity, testifiability"),
    (judge({"truth": torch.zeros(B, T)}), r"targets for \['truth'\]; the heads are for"),
    (judge({"reciprocity": torch.full((B, T), 2)}), "a number above 1 or NaN: give 0 to 1"),
    (judge({"reciprocity": torch.full((B, T), math.nan)}), "a number above 1 or NaN"),
]


@pytest.mark.parametrize("mistake, words", MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_mistake_that_would_stay_unseen_is_one_clear_line(mistake, words):
    with pytest.raises(ValueError, match=words) as e:
        mistake()
    assert "\n" not in str(e.value)
