"""The classes of two write-ups as printed: their programs run, their values are those of `published` modes.

The published modes themselves are held against the oracle in tests/core/mechanisms and in test_layers.py.
"""

import inspect
import math
import re
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lab.hub.as_printed import (A2CAttention, ActorCritic, ConstraintConfig,
                                MultiHeadAttentionWithConstraints, TransformerBlockWithConstraint,
                                constraint_loss)
from lab.hub.layers import ConstraintAttention, CriticAttention
from helpers import ROOT
from oracle import agree, close, normal

B, T, C, H = 2, 5, 24, 4
NAMES = ["reciprocity", "testifiability"]
PAGE = (ROOT / "docs/mechanisms.md").read_text(encoding="utf-8")
OF_CONSTRAINTS, OF_A2C = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)

# The classes of the A2C write-up, word for word: what ours are compared with.
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

# The program of the A2C write-up. Above it are two functions in place of torchtext's, last released in April
# 2024, and its two classes are imported.
A2C_PROGRAM = r"""
import re, sys
from collections import Counter
from types import ModuleType

class Vocab(dict):                                              # word: its number
    def __call__(self, words):
        return [self[word] for word in words]

    def get_stoi(self):
        return self

def get_tokenizer(kind):                                        # basic_english: small letters, marks apart
    return lambda text: re.findall(r"\w+|[.,'()!?]", text.lower())

def build_vocab_from_iterator(texts, specials=()):              # the most frequent words first
    counts = Counter(word for text in texts for word in text)
    words = sorted(counts, key=lambda word: (-counts[word], word))
    return Vocab({word: i for i, word in enumerate([*specials, *words])})

for name in ("torchtext", "torchtext.data", "torchtext.data.utils", "torchtext.vocab"):
    sys.modules[name] = ModuleType(name)
sys.modules["torchtext.data.utils"].get_tokenizer = get_tokenizer
sys.modules["torchtext.vocab"].build_vocab_from_iterator = build_vocab_from_iterator

# ---- the write-up's program ----
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

from lab.hub.as_printed import A2CAttention, ActorCritic  # the two classes

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
def test_the_programs_of_the_write_ups_run(monkeypatch, capsys):
    """Those of docs/mechanisms.md as they stand there, and the whole program of the A2C write-up."""
    for name in ("torchtext", "torchtext.data", "torchtext.data.utils", "torchtext.vocab"):
        monkeypatch.setitem(sys.modules, name, None)  # and is gone after the test
    torch.manual_seed(0)
    exec(OF_CONSTRAINTS, names := {"__name__": "page"})
    assert names["y"].shape == (2, 8, 1024) and names["total"].isfinite()
    assert all(p.grad is not None for p in names["block"].parameters())
    assert "reciprocity focus → " in capsys.readouterr().out
    exec(OF_A2C, {"__name__": "page"})
    shapes = [f"torch.Size([{size}])" for size in ("2, 6, 10000", "2, 6, 6", "1, 6, 256")]
    assert capsys.readouterr().out.split("\n")[0] == " ".join(shapes)
    exec(A2C_PROGRAM, names := {"__name__": "page"})
    assert len(names["vocab"]) == 9
    assert capsys.readouterr().out == "".join(f"{what} shape: {shape}\n" for what, shape in zip(
        ("Output", "Attention weights", "Value"), shapes))


def test_arguments_and_defaults_are_those_printed():
    none = inspect.Parameter.empty
    for function, printed in (
            (ConstraintConfig, dict(names=("reciprocity", "testifiability", "decidability"),
                                    heads_per_constraint=1, trace_token_scores=True, trace_attn_maps=False,
                                    router_hidden=128, loss_weights=None, variant="A")),
            (MultiHeadAttentionWithConstraints, dict(d_model=none, n_heads_base=none, n_layers=1,
                                                     constraint=None, dropout=0.0, causal=False)),
            (MultiHeadAttentionWithConstraints.forward, dict(self=none, x=none, attn_mask=None,
                                                             need_weights=False, router_hint=None)),
            (MultiHeadAttentionWithConstraints.explain, dict(self=none, traces=none, tokens=none,
                                                             constraint_name="reciprocity")),
            (A2CAttention, dict(input_dim=none, d_k=none, causal=False)),
            (ActorCritic, dict(input_dim=none, hidden_dim=none, output_dim=none, causal=False))):
        found = inspect.signature(function).parameters.values()
        assert {p.name: p.default for p in found} == printed
    assert ConstraintConfig().loss_weights == dict(reciprocity=1.0, testifiability=1.0, decidability=1.0)


# ---- constraint heads ----

def attention(variant="A", causal=False, **config):
    """The printed layer with random parameters."""
    torch.manual_seed(0)
    config = ConstraintConfig(NAMES, trace_attn_maps=True, router_hidden=7, variant=variant, **config)
    layer = MultiHeadAttentionWithConstraints(C, H, constraint=config, causal=causal).double()
    for p in layer.parameters():
        p.data.normal_(0, 0.4)
    return layer


def as_printed(ours):
    """The printed layer with the weights of a ConstraintAttention."""
    attn, c = ours.attn, ours.config
    config = ConstraintConfig(NAMES, c.constraint_heads, trace_attn_maps=True, variant=c.constraint_variant)
    layer = MultiHeadAttentionWithConstraints(c.n_embd, c.n_head, constraint=config, causal=ours.causal)
    layer, theirs = layer.double(), attn.constraint
    for kind, weight in (("base", attn.c_attn.weight), ("con", theirs.c_attn.weight)):
        for n, rows in zip("qkv", weight.data.chunk(3)):
            getattr(layer, f"W{n}_{kind}").weight.data = rows
    layer.Wo.weight.data = torch.cat((attn.c_proj.weight.data, theirs.c_proj.weight.data), 1)
    layer.router[0], layer.router[2] = theirs.fc, theirs.out
    for h, scorer in enumerate(layer.token_scorers):
        scorer[0].weight.data, scorer[0].bias.data = theirs.w1.data[h], theirs.b1.data[h]
        scorer[2].weight.data, scorer[2].bias.data = theirs.w2.data[h:h + 1], theirs.b2.data[h:h + 1]
    return layer


HIDDEN = torch.rand(B, T, T, generator=torch.Generator().manual_seed(5)) < 0.4
HIDDEN &= ~torch.eye(T, dtype=torch.bool)
CAUSAL = torch.zeros(T, T).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("variant, width, heads, per_name", [
    ("A", C, H, 2), ("B", 88, 8, 1), ("B", 20, H, 1)])
def test_constraint_heads_are_the_published_mode_of_model_py(variant, width, heads, per_name, causal):
    """Outputs, scores, gates, maps and gradients, with a mask and a hint; 20 / 6 is floored to 3."""
    ours = ConstraintAttention(width, heads, NAMES, T, variant, per_name, causal=causal,
                               constraint_mode="published").double()
    for i, p in enumerate(ours.parameters()):
        p.data = normal(*p.shape, seed=i) / 3
    layer, x = as_printed(ours), normal(B, T, width, grad=True)
    mask = torch.zeros(B, 1, T, T).masked_fill(HIDDEN[:, None], -math.inf)
    for how, theirs in ((dict(), dict()), (dict(attn_mask=HIDDEN), dict(attn_mask=mask)),
                        (dict(hint=x.mean(1).square()), dict(router_hint=x.mean(1).square()))):
        want, traced = ours(x, need_weights=True, **how)
        y, traces = layer(x, need_weights=True, **theirs)
        found = traces["constraint"]
        gates = found["router_gates"].reshape(B, len(layer.token_scorers), -1)  # one of a text, or of a token
        agree([y, gates, *(found[name]["token_scores"] for name in NAMES)],
              [want, traced["blocks.0.router_gates"].mT,
               *(traced[f"blocks.0.constraint.{name}"] for name in NAMES)],
              [x, *layer.router.parameters()], 1e-11)
        maps = torch.cat([traces["base_attn_maps"], *(found[name]["attn_maps"] for name in NAMES)], 1)
        close(maps, traced["blocks.0.map"].double(), 1e-6)  # in float32 there


@pytest.mark.parametrize("C, H, names, heads", [(144, 4, 3, 1), (48, 5, 2, 1), (64, 4, 3, 2)])
def test_variant_b_has_as_many_parameters_as_printed(C, H, names, heads):
    names = ["a", "b", "c"][:names]
    printed = MultiHeadAttentionWithConstraints(C, H, constraint=ConstraintConfig(names, heads, variant="B"))
    for mode in ("published", "query"):
        ours = ConstraintAttention(C, H, names, 16, "B", heads, constraint_mode=mode,
                                   **(dict(head_dim=8) if C % H else {}))
        assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in printed.parameters())
    assert printed.dk == C // (H + len(names) * heads)


def test_constraint_heads_look_ahead_unless_causal():
    """A causal mask alone hides no later token from the router's mean; rows never mix."""
    x = normal(B, T, C)
    for causal, mask in ((True, None), (False, None), (False, CAUSAL)):
        layer = attention(causal=causal)
        whole, part = layer(x, mask)[0], layer(x[:, :3], None if mask is None else mask[:3, :3])[0]
        moved = (whole[:, :3] - part).abs().max()
        assert moved < 1e-13 if causal else moved > 1e-3
        close(whole[:1], layer(x[:1], mask)[0], 1e-13)


def test_traces_are_nested_as_printed():
    for need_weights, maps in ((False, True), (True, False), (True, True)):
        layer = attention(heads_per_constraint=2)
        layer.constraint.trace_attn_maps = maps
        _, traces = layer(normal(B, T, C), need_weights=need_weights)
        found = traces["constraint"]
        assert list(traces) == ["constraint", "need_weights"] + ["base_attn_maps"] * need_weights
        assert traces["need_weights"] is need_weights
        assert list(found) == ["head_token_scores", *NAMES, "router_gates"]
        assert found["head_token_scores"].shape == (B, 4, T) and found["router_gates"].shape == (B, 4)
        for name in NAMES:
            assert list(found[name]) == ["token_scores"] + ["attn_maps"] * (need_weights and maps)
            assert found[name]["token_scores"].shape == (B, T)
            assert not (need_weights and maps) or found[name]["attn_maps"].shape == (B, 2, T, T)


@pytest.mark.parametrize("variant", ["A", "B"])
@pytest.mark.filterwarnings("error")
def test_without_constraint_heads_it_is_the_base_heads_attention(variant):
    """The printed branches for none: no projections, no gates, an empty trace."""
    torch.manual_seed(0)
    config, x = ConstraintConfig([], variant=variant), torch.randn(B, T, 32)
    layer = MultiHeadAttentionWithConstraints(32, 4, constraint=config, causal=True)
    y, traces = layer(x, need_weights=True)
    assert traces.pop("base_attn_maps").shape == (B, 4, T, T)
    assert traces == {"constraint": {}, "need_weights": True} and layer.Wq_con is None
    q, k, v = (layer.get_submodule(f"W{n}_base")(x).view(B, T, 4, 8).transpose(1, 2) for n in "qkv")
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    close(y, layer.Wo(want.transpose(1, 2).flatten(2)), 1e-6)
    assert layer.explain(traces, ["a"] * T) == "No constraint trace." and constraint_loss(traces, {}) == 0.0


def test_the_block_is_attention_and_mlp_added_to_a_normed_stream():
    torch.manual_seed(1)
    block = TransformerBlockWithConstraint(C, H, 2, 0.5, ConstraintConfig(NAMES), causal=True).double()
    x = normal(B, T, C)
    assert block.mlp[0].out_features == 2 * C and not torch.equal(block(x)[0], block(x)[0])
    block.eval()
    y, traces = block(x, CAUSAL, True)
    attended, same = block.attn(block.ln_1(x), CAUSAL, True)
    close(y, x + attended + block.mlp(block.ln_2(x + attended)), 1e-12)
    assert torch.equal(traces["base_attn_maps"], same["base_attn_maps"])
    assert isinstance(block.mlp[1], nn.GELU)


def traces_of(reciprocity, testifiability):
    return {"constraint": {"head_token_scores": normal(B, 2, T), "reciprocity": {"token_scores": reciprocity},
                           "testifiability": {"token_scores": testifiability}, "router_gates": normal(B, 2)},
            "need_weights": False}


def test_the_loss_is_the_mean_over_names_of_weighted_bce():
    """A target below 0 is not known; a name without targets does not count."""
    scores = [normal(B, T, grad=True), normal(B, T, seed=2, grad=True)]
    targets = dict(reciprocity=normal(B, T, seed=3).sigmoid(), testifiability=torch.ones(B, T).long())
    targets["reciprocity"][0, 1:3] = -1
    known = targets["reciprocity"] >= 0
    each = [F.binary_cross_entropy_with_logits(scores[0][known], targets["reciprocity"][known]),
            F.binary_cross_entropy_with_logits(scores[1], targets["testifiability"].double())]
    for weights in ({"reciprocity": 1.0, "testifiability": 0.5}, None):
        want = (each[0] + each[1] * (0.5 if weights else 1)) / 2
        agree([constraint_loss(traces_of(*scores), targets, weights)], [want], scores, 1e-12)
    assert constraint_loss(traces_of(*scores), {"reciprocity": torch.full((B, T), -1)}) == 0


def test_explain_names_the_five_highest_tokens_of_the_first_text():
    scores = torch.tensor([[.1, 3, -1, 2, .25, .5], [9, 0, 0, 0, 0, 0]], requires_grad=True)
    traces, explain = traces_of(scores, normal(2, 6)), attention().explain
    assert explain(traces, list("abcdef")) == "reciprocity focus → b:3.00, d:2.00, f:0.50, e:0.25, a:0.10"
    assert explain(traces, list("abcdef"), "testifiability").startswith("testifiability focus → ")
    assert explain({}, []) == explain(traces, list("abcde"), "truth") == "No constraint trace."


# ---- A2C ----

def test_actor_critic_is_the_printed_class_to_the_last_bit():
    exec(A2C_CLASSES, printed := dict(torch=torch, nn=nn, F=F))
    models = []
    for make in (ActorCritic, printed["ActorCritic"]):
        torch.manual_seed(0)
        models.append(make(11, 8, 13))
    ours, theirs = (model.state_dict() for model in models)
    assert list(ours) == list(theirs) and all(torch.equal(t, theirs[name]) for name, t in ours.items())
    tokens = torch.randint(11, (3, T))
    for a, b in zip(*(model(tokens) for model in models), strict=True):
        assert torch.equal(a, b)


def test_causal_a2c_reads_each_token_as_if_the_text_ended_with_it():
    """As printed that does not hold, and the value of a text depends on others of its batch."""
    torch.manual_seed(0)
    tokens, sizes = torch.randint(11, (3, T)), (11, 8, 13)
    causal, printed = ActorCritic(*sizes, causal=True).double(), ActorCritic(*sizes).double()
    assert (causal.attention.critic(causal.embedding(tokens)) < 0).any()  # a mask before the product leaks
    output, maps, value = causal(tokens)
    assert output.shape == (3, T, 13) and maps.shape == (3, T, T) and value.shape == (3, T, 8)
    for t in range(T):
        for whole, part in zip(causal(tokens), causal(tokens[:1, :t + 1])):
            close(whole[:1, t, :part.size(-1)], part[:, t], 1e-13)
    x = causal.embedding(tokens)
    open_form = A2CAttention(8, 8).double()
    open_form.load_state_dict(causal.attention.state_dict())
    close(causal.attention(x)[0][:, -1], open_form(x)[0][:, -1], 1e-13)
    close(causal.attention(x[0])[0], causal.attention(x)[0][0], 1e-13)
    assert (printed(tokens)[0][:, 1] - printed(tokens[:, :2])[0][:, 1]).abs().max() > 1e-3
    assert (printed(tokens)[2] - printed(tokens[-1:])[2]).abs().max() > 1e-3


@pytest.mark.parametrize("causal", [True, False])
def test_a2c_is_the_published_mode_of_model_py_with_one_head_and_no_projection(causal):
    ours = CriticAttention(C, 1, T, "published", causal, bias=True).double()
    attn, layer = ours.attn, A2CAttention(C, C, causal).double()
    for i, p in enumerate(ours.parameters()):
        p.data = normal(*p.shape, seed=i) / 3
    attn.c_proj.weight.data, attn.c_proj.bias.data = torch.eye(C).double(), torch.zeros(C).double()
    layer.actor.weight.data, layer.actor.bias.data = attn.c_attn.weight.data, attn.c_attn.bias.data
    layer.critic, x = attn.a2c.critic, normal(B, T, C, grad=True)
    want, maps, _ = ours(x, need_weights=True)
    y, weights = layer(x)
    agree([y], [want], [x, *layer.critic.parameters()], 1e-11)
    close(weights, maps[:, 0].double(), 1e-6)


# ---- mistakes ----

def read(mask):
    return lambda: attention().float()(torch.zeros(B, T, C), attn_mask=mask)


def judge(targets):
    return lambda: constraint_loss(traces_of(normal(B, T), normal(B, T)), targets)


MISTAKES = [
    (lambda: ConstraintConfig("truth"), r"names='truth' must be a list of names: \['truth'\]"),
    (lambda: ConstraintConfig(NAMES, variant="C"), r"variant='C' must be 'A' \(wider concatenation\) or 'B'"),
    (lambda: MultiHeadAttentionWithConstraints(25, H), "d_model=25 must be a multiple of n_heads_base=4"),
    (read(HIDDEN[:, None]), "attn_mask is added to the logits: give floats"),
    (read(torch.zeros(B, 8, T, T)), r"attn_mask \[2, 8, 5, 5\] must be broadcastable to .*one for all heads"),
    (judge({}), "targets for nothing; the heads are for reciprocity, testifiability"),
    (judge({"truth": torch.zeros(B, T)}), r"targets for \['truth'\]; the heads are for"),
    (judge({"reciprocity": torch.full((B, T), math.nan)}), "a number above 1 or NaN: give 0 to 1"),
]


@pytest.mark.parametrize("mistake, words", MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_mistake_that_would_stay_unseen_is_one_clear_line(mistake, words):
    with pytest.raises(ValueError, match=words) as e:
        mistake()
    assert "\n" not in str(e.value)
