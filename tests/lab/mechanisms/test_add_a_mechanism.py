"""A mechanism in a file of one's own: the page's file, its commands, the promises, and what is refused."""

import importlib
import io
import itertools
import os
import py_compile
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import model
from helpers import ROOT, forget_own_mechanisms, without_own_mechanisms, write_dataset
from helpers import CODE, EXAMPLES, PAGE
from nanoheads import checkpoint, own_mechanism as own, promises
from nanoheads.class_checks import problems_of_values, small_models
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.configurator import Presets, build_configs, keys_of, parse_command
from nanoheads.mechanism import start_at
from nanoheads.pruning import pack, prune_heads
from lab.heads.surgery import insert_heads
from lab.hub import huggingface as hf
from lab.prune import why_unfit
from study import digest
from study.config import StudyConfig, variants_of

SIZES = dict(vocab_size=11, block_size=16, n_layer=2, n_head=4, n_embd=64)
PASS = "    def score_mod(self, attn, heads):"
BEFORE = "\n        heads.k = heads.k + F.pad(heads.k[:, :, :-1], (0, 0, 1, 0))"  # of the token before


def run(*argv, cwd=ROOT):
    return subprocess.run([sys.executable, *map(str, argv)], cwd=cwd, capture_output=True, text=True)


def run_here(program, *argv):
    """As run(), in this process, which knows of no mechanism of one's own before nor after."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        with without_own_mechanisms(), redirect_stdout(out), redirect_stderr(err):
            importlib.import_module(program.removesuffix(".py")).main([*map(str, argv)])
    except SystemExit as e:
        code = e.code
        if isinstance(code, str):
            print(code, file=err)
    return SimpleNamespace(returncode=1 if isinstance(code, str) else code or 0, stdout=out.getvalue(),
                           stderr=err.getvalue())


def broken(path):
    """{promise: what is wrong} of the file's first mode."""
    name = own.add(path)[0]
    return {promise: wrong for _, _, promise, wrong in promises.check(name, model.MECHANISMS[name]) if wrong}


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: re.search(r"class (\w+)\(", code)[1])
def test_each_file_of_the_page_keeps_every_promise(code, mine):
    path = mine()
    path.write_text(code)
    assert broken(path) == {}


@pytest.mark.parametrize("name", ["paired_heads", "diff_v1"])
def test_heads_that_go_in_pairs_are_checked_in_pairs(name):
    """--check took one head of a pair, which pruning refuses, and called the mechanism broken."""
    wrong = {promise: wrong for _, _, promise, wrong in promises.check(name, model.MECHANISMS[name]) if wrong}
    assert wrong == {}


def test_it_equals_the_formula(mine):
    """Logits fall by rate (t - s), in float64, against a softmax that is written out."""
    own.add(mine())
    gpt = model.GPT(model.GPTConfig(**SIZES, forget=True, forget_init=-1.0)).double().eval()
    attn, x = gpt.transformer.h[0].attn, torch.randn(2, 9, 64, dtype=torch.float64)
    heads = model.Heads(gpt.make_forward_pass(gpt.mask, slice(0, 9), 0, 9, None, None, x.device), x)
    heads.q, heads.k, heads.v = attn.split(attn.c_attn(x).unflatten(-1, (12, -1)), heads, 4, 4)
    q, k, v = heads.q, heads.k, heads.v
    distance = torch.arange(9)[:, None] - torch.arange(9)
    rate = torch.nn.functional.softplus(attn.forgetting.slope)[:, None, None]
    logits = q @ k.mT * attn.scale - rate * distance
    want = logits.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v
    got = attn.attend(heads)[0]  # a score function acts inside of it
    assert (got - want).abs().max() < 1e-12


@pytest.mark.parametrize("beside", [
    dict(n_kv_head=2), "constraint_a", "constraint_published", "constraint_b", "acag", "sink", "routing_inf",
    "diff", "fox"], ids=str)
def test_it_acts_beside_other_mechanisms_and_grouped_queries(beside, mine):
    """At its neutral setting the model is the one without it; elsewhere it is another, and learns."""
    own.add(mine())
    flags = beside if isinstance(beside, dict) else model.MECHANISMS[beside]
    ids = torch.randint(11, (2, 17), generator=torch.Generator().manual_seed(1))

    def with_slope(slope):
        forgets = {} if slope is None else dict(forget=True, forget_init=slope)
        gpt = model.GPT(model.GPTConfig(**SIZES, **flags, **forgets)).double().eval()
        with torch.no_grad():
            for name, weight in gpt.named_parameters():  # at the start some matrices are 0
                noise = torch.Generator().manual_seed(len(name))
                weight += 0.05 * torch.randn(weight.shape, generator=noise) * (".slope" not in name)
        return gpt, gpt(ids[:, :-1], ids[:, 1:]).loss
    without, neutral, (gpt, loss) = with_slope(None)[1], with_slope(-60.0)[1], with_slope(-1.0)
    assert abs(neutral - without) < 1e-12 and abs(loss - without) > 1e-6
    loss.backward()
    assert gpt.transformer.h[0].attn.forgetting.slope.grad.abs().min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("promise, before, after", [
    ("causal", PASS, PASS + "\n        heads.q = heads.q + heads.x.mean(1)[:, None, None, :1]"),
    ("rows", PASS, PASS + "\n        heads.q = heads.q + heads.q.mean(0)"),
    ("cache", "rate[h] * (t - s)", "rate[h] * (t - s) * heads.q.size(2)"),
    ("padding", "rate[h] * (t - s)", "rate[h] * t * (t - s)"),
    ("documents", PASS, PASS + BEFORE),
    ("grouped", "rate[h] * (t - s)", "rate[h] * (t - s) * heads.k.size(1)"),
    ("dtypes", "rate[h] * (t - s)", "(rate[h] + 0.1 * (rate.dtype == torch.float32)) * (t - s)"),
    ("pruned", 'per_head = ("slope",)', "per_head = ()"),
    ("learns", "F.softplus(self.slope)", "F.softplus(self.slope.detach())"),
    ("neutral", "-60.0}", "-1.0}"),
    ("acts", "F.softplus(self.slope)", "0 * F.softplus(self.slope)"),
    ("runs", PASS, PASS + "\n        heads.q = heads.q + boom"),
])
def test_each_promise_finds_its_mistake(promise, before, after, mine):
    assert promise in broken(mine(before, after))


def test_what_reads_the_document_before_is_not_trained_on_packed_rows(mine, tmp_path):
    """What reads the token before looks not ahead, and is trained on rows of one text."""
    path, text = mine(PASS, PASS + BEFORE), b"A line of text.\n\n" * 200
    data = write_dataset(tmp_path / "data", dict.fromkeys(("train", "val", "test"), text))
    command = [f"--mechanism={path}", f"--dataset={data}", "--n_layer=1", "--n_head=2", "--n_embd=16",
               "--block_size=32", "--max_iters=1", "--eval_tokens=64", "--device=cpu", "--documents=8"]
    done = run_here("train.py", *command, "--documents_packed=cut", f"--out_dir={tmp_path / 'packed'}")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "packed").exists(), done.stderr
    assert "train: before training a document changes with the one before it in its row" in done.stderr
    done = run_here("train.py", *command, f"--out_dir={tmp_path / 'padded'}")
    assert done.returncode == 0, done.stderr


def test_every_mechanism_acts_or_says_why_not():
    """Agency alone starts as the plain GPT whatever its weights are."""
    kept = {}
    for name, flags in model.MECHANISMS.items():
        for _, recipe, promise, wrong in itertools.islice(promises.check(name, flags), 1):
            kept[name] = promise == "acts" and wrong is None
    assert {name for name, acts in kept.items() if not acts} == {*model.Agency.modes}
    assert "all heads are active at first" in model.Agency.no_effect_because


MEAN = """
import torch
from torch import nn
from nanoheads.mechanism import Mechanism


class Mean(Mechanism):
    class Options:
        mean: bool = False  # the input less the mean of the batches before

    name = flag = "mean"
    modes = {"mean": dict(mean=True)}

    def __init__(self, config, attn):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("kept", torch.zeros(config.n_embd))

    def before_projection(self, attn, heads):
        x, heads.x = heads.x, heads.x - self.w * self.kept
        if self.training:
            self.kept = 0.9 * self.kept + SHARE * x.mean((0, 1)).detach()
"""


@pytest.mark.parametrize("share, words", [("0.1", set()), ("0.0", {"acts", "learns"})])
def test_a_buffer_that_starts_at_0_is_filled_before_it_is_judged(share, words, mine):
    """By passes in training. The control: one that stays 0 does nothing."""
    path = mine()
    path.write_text(MEAN.replace("SHARE", share))
    assert broken(path).keys() == words


def test_what_does_nothing_is_refused_before_a_study(mine):
    """It passed every promise, and the study called it the same as the plain GPT."""
    name, = own.add(mine("F.softplus(self.slope)", "0 * F.softplus(self.slope)"))
    with pytest.raises(UserError, match="forget .*it does nothing: .*: a comparison would mean nothing"):
        promises.refuse_broken({name: model.MECHANISMS[name]})


def test_what_does_not_run_says_so_once(mine, capsys):
    path = mine(PASS, PASS + "\n        boom")
    done = run_here("train.py", f"--mechanism={path}", "--check")
    assert done.returncode == 1 and done.stdout.count("name 'boom' is not defined") == 1
    assert "train: 1 of 1 promises are broken" in done.stderr


def test_one_mode_of_a_file_is_checked_alone(mine):
    path = mine('modes = {"forget": dict(forget=True)}',
                'modes = {"forget": dict(forget=True), "fast": dict(forget=True, forget_init=-1.0)}')
    one, both = (run_here("train.py", f"--mechanism={path}{mode}", "--check").stdout
                 for mode in (":fast", ""))
    assert {line.split()[0] for line in one.splitlines()[1:]} == {"fast"}
    assert {line.split()[0] for line in both.splitlines()[1:]} == {"fast", "forget"}


GATES = '''
from torch import nn
from nanoheads.mechanism import Mechanism


class Gates(Mechanism):
    class Options:
        gates: bool = False  # factors on the heads' outputs

    name = flag = "gates"
    modes = {"gates": dict(gates=True)}

    def __init__(self, config, attn):
        super().__init__()
        MAKE

    def before_attention(self, attn, heads):
        gate = FACTOR
        heads.gates[self.name] = gate.sigmoid().transpose(1, 2)[..., None]
'''
MADE = {
    "linear": ("self.proj = nn.Linear(config.n_embd, attn.n_total)", "self.proj(heads.x)"),
    "no bias": ("self.proj = nn.Linear(config.n_embd, attn.n_total, bias=False)", "self.proj(heads.x)"),
    "in a sequence": ("self.net = nn.Sequential(nn.Linear(config.n_embd, 5), nn.Linear(5, attn.n_total))",
                      "self.net(heads.x)"),
    "columns": ("self.back = nn.Linear(attn.n_total, config.n_embd, bias=False)",
                "heads.x @ self.back.weight"),
    "wide": ("self.proj = nn.Linear(config.n_embd, 3 * attn.n_total)",
             "self.proj(heads.x).unflatten(-1, (-1, 3)).sum(-1)"),
    "beside a vector": ("self.proj = nn.Linear(config.n_embd, attn.n_total); "
                        "self.scale = nn.Parameter(torch.ones(attn.n_total))",
                        "self.scale * self.proj(heads.x)")}


def said_of_pruning(path, code):
    """{what the check says of per_head, or None where pruning is right}, of both recipes."""
    path.write_text(code)
    with without_own_mechanisms():
        own.add(path)
        found = [wrong for _, _, promise, wrong in promises.check("gates", model.MECHANISMS["gates"])
                 if promise == "pruned"]
    return {wrong and wrong.partition("; ")[2] for wrong in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("has", ["nothing", "a part"])
def test_what_the_check_says_of_per_head_works_as_it_stands(name, has, tmp_path):
    """Put into the file as it is printed, in place of what was declared before."""
    make, factor = MADE[name]
    code = "import torch\n" + GATES.replace("MAKE", make).replace("FACTOR", factor)
    declared = "    per_head = ('scale',)\n" if has == "a part" and "scale" in make else ""
    said, = said_of_pruning(tmp_path / "gates.py", code.replace("    modes", f"{declared}    modes"))
    if match := re.fullmatch(r"write in class Gates `(.*)`", said):
        code = code.replace("    modes", f"    {match[1]}\n    modes")
    else:
        imported, line = re.fullmatch(r"write `(.*)`, and at the end of Gates.__init__ `(.*)`", said).groups()
        code = f"{imported}\n" + code.replace("    def before", f"        {line}\n\n    def before")
    assert said_of_pruning(tmp_path / "gates.py", code) == {None}


# heads that depend on one another by design
SELECTIVE = """
import torch
from torch.nn import functional as F
from nanoheads.mechanism import Mechanism


class Selective(Mechanism):
    # score -= what head 0 of earlier queries says of a key (arXiv 2410.02703, section 3)
    class Options:
        selective: bool = False  # head 0 masks tokens for later queries

    name = flag = "selective"
    modes = {"selective": dict(selective=True)}
    needs_positions = True
    PER_HEAD

    def score_mod(self, attn, heads):
        q, k, of_pass = heads.q, heads.k, heads.forward_pass
        T, S = q.size(2), k.size(2)
        column, key = torch.arange(S - T, S), torch.arange(S)
        first = column - of_pass.positions
        seen = (key < column[:, None]) & (key > first[..., None])  # not the token itself, nor the first one
        said = (q[:, 0] @ k[:, 0].mT * attn.scale).relu() * seen
        total = F.pad(said.cumsum(1), (0, 0, 1, 0))
        if of_pass.begins is not None:  # queries of other documents do not count
            total = total[:, :-1] - total.gather(1, of_pass.begins[..., None].expand(-1, -1, S))
        elif of_pass.cache is not None:
            before = of_pass.cache.swap(attn.layer, self.name, None)
            if before is not None:
                total = total + F.pad(before, (0, S - before.size(-1)))
            of_pass.cache.swap(attn.layer, self.name, total[:, -1:])
        return lambda score, b, h, t, s: score - total[b, t - (S - T), s]
"""


def test_heads_that_depend_on_one_another_say_so_and_are_not_pruned(mine, bytes_data, tmp_path):
    path, hint = mine(), "; where heads depend on one another, write `per_head = None` in the class, and none"
    path.write_text(SELECTIVE.replace("PER_HEAD", ""))
    wrong = broken(path)
    assert wrong.keys() == {"pruned"} and hint in wrong["pruned"]
    forget_own_mechanisms()
    path.write_text(SELECTIVE.replace("PER_HEAD", "per_head = None"))
    assert broken(path) == {}
    gpt = model.GPT(model.GPTConfig(**SIZES, selective=True)).eval()
    for refused in (lambda: prune_heads(gpt, {0: [1]}), lambda: insert_heads(gpt, {0: [1]})):
        with pytest.raises(ValueError, match=r"heads of Selective depend on one another \(per_head = None\)"):
            refused()
    gpt.set_gate(0, 0, 0.0)
    assert pack(gpt).config.head_ids is None
    assert "has Selective, whose heads depend" in why_unfit("importance", gpt)
    command = [f"--mechanism={path}", "--sentinel=hard_concrete", "--prune_gate=0.05",
               f"--dataset={bytes_data}", f"--out_dir={tmp_path / 'run'}", "--n_layer=1", "--n_head=2",
               "--n_embd=16", "--block_size=16", "--max_iters=1", "--eval_tokens=64", "--device=cpu"]
    assert "prune_gate or grow_heads: heads of Selective depend" in run_here("train.py", *command).stderr


@pytest.mark.slow
def test_the_controls_break_what_they_should_and_nothing_else(mine):
    """tests/controls.py: noise and dead parameters may be compared, the look ahead is refused."""
    own.add(ROOT / "tests" / "controls.py")
    broken = {name: {row[2] for row in promises.check(name, model.MECHANISMS[name]) if row[3]}
              for name in ("control_noise", "control_dead", "control_leak")}
    assert broken == dict(control_noise=set(), control_dead={"learns"},
                          control_leak={"causal", "cache", "grouped"})
    allowed = {name: model.MECHANISMS[name] for name in ("control_noise", "control_dead")}
    note, = promises.refuse_broken(allowed)
    assert re.fullmatch("Note: 'control_dead' is compared all the same, although .* has no gradient .*", note)
    with pytest.raises(UserError, match=r"control_leak .* looks ahead.* position 10 .* at 12"):
        promises.refuse_broken({"control_leak": model.MECHANISMS["control_leak"]})


def test_a_look_ahead_is_refused_before_a_study_with_its_position(mine):
    path = mine(PASS, PASS + "\n        heads.q = heads.q + heads.x.mean(1)[:, None, None, :1]")
    name = own.add(path)[0]
    with pytest.raises(UserError, match=r"forget.*position 1 changes with the token at 12"):
        promises.refuse_broken({name: model.MECHANISMS[name]})
    # those of the repository have been tested
    promises.refuse_broken({"xsa": model.MECHANISMS["xsa"], "all_on": model.ALL_ON})
    variants = {"gates": dict(output_gate="headwise"),
                "fast": dict(forget=True, forget_init=-1.0, adamw_lr=0.1)}
    with pytest.raises(UserError, match=r"fast .*position 1 changes with the token at 12"):
        promises.refuse_broken(variants)
    promises.refuse_broken({"off": dict(forget=False, adamw_lr=0.1)})
    in_words = dict(mechanisms=["xsa"], variants={"x": dict(forget=True)})
    for name, each in (("forget", dict(mechanisms=["forg*"])), ("x", in_words)):
        with pytest.raises(UserError, match=rf"{name} .*position 1 changes with the token at 12"):
            promises.refuse_broken(variants_of(StudyConfig(**each)))


LAYER = "self.slope = nn.Parameter(torch.full((attn.n_head,), config.forget_init))"


@pytest.mark.parametrize("before, after, words", [
    ("class Forgetting(Mechanism)", "class Forgetting", "must define a class .* defines none"),
    ("import torch\n", "import torch\nboom\n", "line 3: NameError: name 'boom'"),
    ('    flag = "forget" ', '    flag = "xsa" ', "flag='xsa' must be one of its Options"),
    ("forget_init: float", "init: float", "init must begin with forget"),
    ("forget: bool = flag(False", "forget: bool = flag(True", "forget must be off"),
    ('name = "forgetting"', 'name = "router"', "name='router' must be a name of its own"),
    ('modes = {"forget"', 'modes = {"moh"', "there is a mode moh already"),
    ('neutral = {"forget"', 'neutral = {"forgt"', "there is no mode forgt; did you mean forget"),
    ("def score_mod", "def scoremod", "scoremod is .* did you mean score_mod?"),
    ("    per_head = ", "    per_heads = ", "per_heads is nothing .*; did you mean per_head?"),
    ('per_head = ("slope",)', 'per_head = ("slop",)', "per_head names 'slop', .*; did you mean slope?"),
    ('per_head = ("slope",)', 'per_head = ("slope")', r"per_head='slope' must be a tuple .* \('slope',\)"),
    ('per_head = ("slope",)', 'per_head = {"slope": 0}', "per_head={'slope': 0} must be a tuple of names"),
    ('per_head = ("slope",)', 'per_head = 3', r"per_head=3 must be a tuple of names, \('slope',\)"),
    ('per_head = ("slope",)', 'takes = "memory"', r"takes='memory' must be a tuple of names, \('memory',\)"),
    ('per_head = ("slope",)', 'needs_row_stats = ("entropie",)', "no entropie; there are lse, entropy"),
    ("\nclass Forgetting", "\nclass Forgetting(Mechanism):\n    pass\n\nclass Forgetting",
     "class Forgetting of line 9 is defined anew in line 12"),
    (LAYER, f"{LAYER}; self.map = nn.LazyLinear(2)", "map.weight has no shape yet, as those of lazy layers"),
    ('    flag = "forget" ', '    need_positions = True\n    flag = "forget" ',
     "need_positions is nothing .* did you mean needs_positions?"),
    ('{"forgetting.slope": -60.0}', '{"forgeting.slope": -60.0}',
     "neutral: forget names 'forgeting.slope', which is none .*; did you mean forgetting.slope?"),
])
def test_a_file_that_cannot_be_added_is_one_line(before, after, words, mine):
    with pytest.raises(UserError, match=words) as e:
        own.add(mine(before, after))
    assert "\n" not in str(e.value)
    assert all(cls.flag != "forget" for cls in model.MECHANISM_CLASSES)


@pytest.mark.parametrize("fill", ["torch.zeros(attn.n_head)", "torch.linspace(0, 1, attn.n_head)",
                                  "torch.eye(attn.n_head)[1]", "0.1 * torch.randn(attn.n_head)"])
def test_a_parameter_starts_at_what_its_constructor_says(fill, mine):
    """A random one is the same in each model of one seed, whatever was drawn before."""
    own.add(mine("torch.full((attn.n_head,), config.forget_init)", fill))
    config = model.GPTConfig(**SIZES, forget=True, seed=5)
    slopes = [model.GPT(config).transformer.h[1].attn.forgetting.slope for _ in range(2)]
    assert torch.equal(*slopes)
    if "randn" not in fill:
        want = eval(fill, dict(torch=torch, attn=SimpleNamespace(n_head=4)))
        assert torch.equal(slopes[0].detach(), want)


def test_a_parameter_without_a_value_is_refused(mine):
    with pytest.raises(UserError) as e:
        own.add(mine("torch.full((attn.n_head,), config.forget_init)", "torch.empty(attn.n_head)"))
    assert str(e.value).endswith("forget: slope has no initial value: fill it in __init__, as torch.zeros() "
                                 "does, or have the model draw it, start_at(self.slope, Normal(0.02))")


def test_what_has_no_value_in_a_list_is_named_as_python_reads_it(mine):
    with pytest.raises(UserError, match=r"maps\.1 has no .*start_at\(self\.maps\[1\], Normal"):
        own.add(mine(LAYER, f"{LAYER}; self.maps = nn.ParameterList([torch.zeros(2), torch.empty(2)])"))


@pytest.mark.parametrize("fill", ["torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))",
                                  "nn.Parameter(nn.Linear(4, 4).weight.detach().clone())",
                                  "nn.Conv1d(4, 4, 3)"])
def test_what_is_made_of_pytorchs_own_values_keeps_them(fill, mine):
    """It draws them from the seed of the model, whatever was drawn before."""
    own.add(mine(LAYER, f"{LAYER}; self.map = {fill}"))
    config = model.GPTConfig(**SIZES, forget=True, seed=5)
    first, second = (model.GPT(config).state_dict() for _ in range(2))
    made = [name for name in first if ".map" in name and not name.endswith("bias")]
    assert made and all(first[name].any() and torch.equal(first[name], second[name]) for name in made)


@pytest.mark.parametrize("fill", ["torch.empty(3)", "torch.empty(3, dtype=torch.long)",
                                  "torch.cat((torch.zeros(2), torch.empty(1)))"])
def test_a_buffer_without_a_value_is_refused(fill, mine):
    with pytest.raises(UserError, match="forget: the buffer kept has no initial value: fill it in __init__"):
        own.add(mine(LAYER, f"{LAYER}; self.register_buffer('kept', {fill})"))


@pytest.mark.parametrize("fill, says", [
    ("nn.init.zeros_(self.map.weight)", "fills map.weight"),
    ("nn.init.eye_(self.map.weight)", "fills map.weight"),
    ("nn.init.normal_(self.map.weight, std=0.1)", "fills map.weight"),
    ("nn.init.ones_(self.map.bias)", "fills map.bias"),
    ("self.map.weight.data[0] = 0.5", "fills map.weight"),
    ("self.map.weight.data.mul_(0.1)", "fills map.weight"),
    ("self.map.weight.data.add_(torch.eye(4))", "fills map.weight"),
])
def test_a_layers_weight_that_would_be_overwritten_is_refused_whatever_its_value(fill, says, mine):
    code = f"self.map = nn.Linear(4, 4); {LAYER}; {fill}"
    with pytest.raises(UserError, match=f"forget: __init__ {says}, and the model would start it as GPT-2 "
                                        r"starts all such layers; say start_at\(self.map"):
        own.add(mine(LAYER, code))


@pytest.mark.parametrize("make, starts", [
    ("nn.Linear(4, 4); nn.init.zeros_(self.map.bias)", "bias"),
    ("nn.LayerNorm(4); nn.init.ones_(self.map.weight)", "bias"),
    ("nn.MultiheadAttention(4, 2)", "out_proj.bias"),
])
def test_a_layer_may_be_filled_with_what_it_starts_at(make, starts, mine):
    own.add(mine(LAYER, f"{LAYER}; self.map = {make}"))
    gpt = model.GPT(model.GPTConfig(**SIZES, forget=True))
    assert not gpt.get_parameter(f"transformer.h.0.attn.forgetting.map.{starts}").any()


def test_a_padding_row_of_an_embedding_starts_at_0_and_no_other(mine):
    own.add(mine(LAYER, f"{LAYER}; self.map = nn.Embedding(5, 4, padding_idx=2)"))
    layer = model.GPT(model.GPTConfig(**SIZES, forget=True)).transformer.h[0].attn.forgetting.map
    assert layer.weight.any(1).tolist() == [True, True, False, True, True]


def test_what_start_at_declares_is_what_a_layer_starts_with(mine):
    path = mine(LAYER, f"self.map = nn.Linear(4, 4); {LAYER}; start_at(self.map.weight, torch.eye(4))")
    path.write_text(path.read_text().replace("Mechanism, flag", "Mechanism, flag, start_at"))
    own.add(path)
    layer = model.GPT(model.GPTConfig(**SIZES, forget=True)).transformer.h[0].attn.forgetting.map
    assert torch.equal(layer.weight.detach(), torch.eye(4)) and not layer.bias.any()


def test_a_value_declared_of_a_layer_and_not_of_its_weight_is_refused():
    with pytest.raises(TypeError, match="takes a parameter, such as self.proj.weight: not a Linear"):
        start_at(torch.nn.Linear(2, 2), 0.0)


@pytest.mark.parametrize("value, words", [(torch.zeros(4), r"\[3\] .*of the shape \[4\]"),
                                          (torch.zeros(1, 3), r"of the shape \[1, 3\]"), ("zero", "'zero'")])
def test_a_value_that_does_not_fill_its_parameter_is_refused(value, words):
    with pytest.raises(ValueError, match=f"start_at.*{words}"):
        start_at(torch.nn.Parameter(torch.empty(3)), value)
    start_at(torch.nn.Parameter(torch.empty(2, 3)), torch.zeros(3))


def test_every_parameter_of_the_repositorys_mechanisms_has_an_initial_value():
    assert sum(1 for cls in model.MECHANISM_CLASSES for _ in small_models(cls)) > 40
    assert [problem for cls in model.MECHANISM_CLASSES for mode, gpt, mechanism in small_models(cls)
            for problem in problems_of_values(mode, gpt, mechanism)] == []


def test_flags_of_the_repository_are_not_taken_over(mine):
    path = mine()
    path.write_text(CODE.replace("forget", "sink"))
    with pytest.raises(UserError, match="there is a flag sink already"):
        own.add(path)


def test_its_flags_are_keys_with_ranges_and_help(mine):
    own.add(mine())
    words = keys_of((model.GPTConfig,))["forget_init"].help
    assert words == "softplus of it is the initial rate, in nats a token"
    assert model.GPTConfig(**SIZES, forget=True, forget_init=1.0).problems() == [
        "forget_init=1.0 must be at most 0"]
    assert model.GPTConfig(**SIZES, forget_init=-1.0).problems() == [
        "forget_init=-1.0 means nothing while forget is off"]


def test_the_hash_of_other_runs_does_not_see_it(mine):
    before = digest.digest_of_code()
    own.add(mine())
    assert digest.digest_of_code() == before


@pytest.mark.slow
def test_a_run_with_it_goes_through_every_program(mine, bytes_data, tmp_path):
    """Trained, gone on with, evaluated, sampled and pruned; when the file is gone, the copy is enough."""
    path, out = mine(), tmp_path / "run"
    args = [f"--mechanism={path}", f"--dataset={bytes_data}", f"--out_dir={out}", "--n_layer=2", "--n_head=4",
            "--n_embd=32", "--block_size=16", "--batch_size=4", "--eval_tokens=64", "--device=cpu",
            "--eval_interval=2"]
    for more in (["--max_iters=2"], ["--max_iters=4", "--resume"]):
        done = (run if more[1:] else run_here)("train.py", *args, *more)
        assert done.returncode == 0, done.stderr
    assert (out / "mine.py").read_text() == CODE
    state = torch.load(out / "best.pt", weights_only=True)
    assert state["own_mechanism"] == [dict(file="mine.py", digest=own.read_own_file(path).digest)]
    path.unlink()
    named = f"--mechanism={out / 'mine.py'}"
    for command in (["evaluate.py", "--ckpt", out, "--split=val"],
                    ["sample.py", "--ckpt", out, "--max_new_tokens=3", "--start=a"],
                    ["lab.prune", "--ckpt", out, "--by=random", "--to=0.5",
                     f"--out_dir={tmp_path / 'less'}"],
                    ["lab.export_hf", "--ckpt", out, "--out", tmp_path / "hf"]):
        done = run_here(*command, named)
        assert done.returncode == 0, done.stderr
    # a new checkpoint, with a copy of its own
    done = run_here("evaluate.py", "--ckpt", tmp_path / "less", "--split=val",
                    f"--mechanism={tmp_path / 'less' / 'mine.py'}")
    assert done.returncode == 0 and (tmp_path / "less" / "mine.py").read_text() == CODE, done.stderr
    (out / "mine.py").write_text(CODE + "\n# changed\n")
    for more in ([], [named]):
        done = run_here("evaluate.py", "--ckpt", out, *more)
        assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
        assert str(out / "mine.py") in done.stderr and "another text" in done.stderr


def test_the_record_is_of_the_text_that_runs(mine, tmp_path):
    """A file that is edited during a run, or deleted: the copy and the digest are those of what was read."""
    path = mine()
    own.add(path)
    before, config = own.read_own_file(path).digest, model.GPTConfig(**SIZES, forget=True)
    path.write_text(CODE + "\n# edited\n")
    assert own.record(config) == [dict(file="mine.py", digest=before)]
    file, = own.files_for(config)
    assert own.copy(file, tmp_path / "run").read_text() == CODE
    with pytest.raises(UserError, match="two texts of one mechanism, with the flag forget"):
        own.add(path)
    path.unlink()
    assert own.add(tmp_path / "run" / "mine.py") == ["forget"]
    assert "rate, in nats" in keys_of((model.GPTConfig,))["forget_init"][2]


def test_bytecode_beside_a_file_is_not_run(mine):
    """Python would take it by the file's time and size alone."""
    path = mine()
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    mine("-60.0}", "-61.0}")
    own.add(path)
    assert model.NEUTRAL["forget"] == {"forgetting.slope": -61.0}


@pytest.mark.parametrize("argv, config, taken", [
    (["--mechanism", "F", "--resume"], None, ["--resume", "--mechanism=forget", "--own_mechanism=F"]),
    (["--mechanism=xsa,F"], None, ["--mechanism=xsa,forget", "--own_mechanism=F"]),
    (["C"], 'mechanism = "F"', ["C", "--mechanism=forget", "--own_mechanism=F"]),
    (["C"], 'mechanisms = ["xsa", "F"]', ["C", "--mechanisms=xsa,forget", "--own_mechanism=F"]),
    (["C", "--mechanism=xsa"], 'mechanism = "F"', ["C", "--mechanism=xsa"]),
    (["--own_mechanism=F", "--mechanism=forget"], None, ["--mechanism=forget", "--own_mechanism=F"]),
    (["--own_mechanism", "F", "--mechanism", "forget"], None, ["--mechanism=forget", "--own_mechanism=F"]),
    (["--mechanism=moh", "--mechanism=[xsa, 'F']"], None, ["--mechanism=xsa,forget", "--own_mechanism=F"]),
])
def test_a_file_is_found_in_every_form(argv, config, taken, mine, tmp_path):
    names = {"F": str(mine()), "C": str(tmp_path / "config.py")}

    def put(text):
        return re.sub(r"\b[FC]\b", lambda found: names[found[0]], text)

    (tmp_path / "config.py").write_text(put(config or ""))
    assert arguments_taken([put(arg) for arg in argv]) == [put(arg) for arg in taken]


def arguments_taken(argv, **how):
    """The arguments of train.py or compare.py after take()."""
    command = parse_command((Presets, model.GPTConfig, TrainConfig, StudyConfig), argv)
    return own.add_from_command(command, **how).words()


def test_its_flag_takes_no_config_file_for_its_value(mine, tmp_path):
    """Until its file is read nobody knows that the flag is a bool."""
    (tmp_path / "config.py").write_text("n_head = 4\nn_embd = 64")
    command = parse_command((Presets, model.GPTConfig, TrainConfig),
                            ["--own_mechanism", str(mine()), "--forget", str(tmp_path / "config.py")])
    (config, _), _ = build_configs(own.add_from_command(command))
    assert config.forget is True and config.n_head == 4


@pytest.mark.slow
def test_it_is_timed(mine):
    sizes = ["--n_layer=1", "--n_head=4", "--n_embd=32", "--block_size=16", "--batch_size=1", "--device=cpu"]
    done = run("bench.py", f"--mechanisms=xsa,{mine()}", "--rounds=1", "--steps=1", *sizes)
    assert done.returncode == 0 and re.search("^train +forget", done.stdout, re.M), done.stderr
    done = run("bench.py", "--mechanisms", mine(), "--what=memory", *sizes)
    assert done.returncode == 0 and re.search("^memory +forget", done.stdout, re.M), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine.py", "mechanism.py", "own_mechanism.py"])
def test_an_export_is_read_as_text_and_runs_where_it_is_named(name, mine, tmp_path):
    with without_own_mechanisms():
        own.add(mine(name=name))
        gpt, idx = model.GPT(model.GPTConfig(**SIZES, forget=True)).eval(), torch.arange(9)[None]
        hf.export(gpt, None, tmp_path / "hf")
        want = gpt(idx).logits
    state = checkpoint.read(str(tmp_path / "hf"))
    with pytest.raises(UserError, match="whose code runs only where it is named: ") as e:
        checkpoint.build(state, tmp_path / "hf")
    assert str(e.value).endswith(f"own_mechanism.add('{tmp_path / 'hf' / 'own' / name}')")
    own.add(tmp_path / "hf" / "own" / name)
    assert torch.equal(checkpoint.build(state, tmp_path / "hf")(idx).logits, want)


@pytest.mark.slow
def test_an_export_loads_in_transformers(mine, tmp_path):
    pytest.importorskip("transformers")
    own.add(mine(name="mechanism.py"))
    gpt = model.GPT(model.GPTConfig(**SIZES, forget=True)).eval()
    hf.export(gpt, None, tmp_path / "hf")
    torch.save(gpt(torch.arange(9)[None]).logits, tmp_path / "logits.pt")
    code = ("import sys, torch; from transformers import AutoModelForCausalLM as A; "
            "m = A.from_pretrained('hf', trust_remote_code=True).eval(); "
            "off = (m(torch.arange(9)[None]).logits - torch.load('logits.pt')).abs().max(); "
            "sys.exit(0 if off < 1e-6 else f'off by {off}')")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("argv, words", [
    (["--check"], "--check: name a mechanism"),
    (["--mechanism=xs", "--check"], "train: command line: unknown mechanism xs; did you mean xsa?"),
    (["--mechanism", "xsa", "--check", "--blok_size=8"], "unknown key blok_size; did you mean block_size?"),
    (["--mechanism=xsa", "--check", "--n_head=3"], "n_embd=64 must be a multiple of n_head=3"),
    (["--mechanism=nowhere.py"], "no mechanism file nowhere.py"),
])
def test_what_cannot_be_checked_is_one_line(argv, words):
    done = run("train.py", *argv)
    assert done.returncode == 1 and words in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_the_commands_of_the_page(mine, tmp_path):
    """--check as it stands there; the two others are taken apart as the programs take them."""
    block = PAGE.split("```sh\n")[1].split("```")[0]
    commands = [line.split("#")[0].split()[1:] for line in block.strip().splitlines()]
    assert [Path(words[0]).name for words in commands] == ["train.py", "train.py", "compare.py"]
    mine()
    done = run(ROOT / commands[0][0], *commands[0][1:], cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("kept") == 23, done.stderr
    taken = arguments_taken([str(tmp_path / "mine.py").join(arg.split("mine.py")) for arg in commands[2][1:]],
                            keep=tmp_path / "kept")
    digest = own.read_own_file(tmp_path / "mine.py").digest
    assert taken == ["--mechanism=forget", f"--own_mechanism={tmp_path / 'kept' / digest / 'mine.py'}"]


# ---- score functions ----

BAD_SCORES = {
    "shape": ("score - rate[h] * (t - s)", "score.sum(1)",
              r"given scores of the shape \[.*\] and returned the shape \[.*\]; it must return scores of the "
              "same shape"),
    "nothing": ("score - rate[h] * (t - s)", "None", "and returned a NoneType"),
    "dtype": ("score - rate[h] * (t - s)", "(score > rate[h] * (t - s)).long()",
              "returned torch.int64; scores must be floating-point numbers"),
    "empty row": ("score - rate[h] * (t - s)", "torch.where(t == 3, -torch.inf, score - rate[h] * (t - s))",
                  "the score function gave query 3 of head 0, row 0, -inf for every key that it sees"),
    "name": ("score - rate[h] * (t - s)", "score - rat[h] * (t - s)", "NameError: name 'rat' is not defined"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("before, after, words", BAD_SCORES.values(), ids=BAD_SCORES)
def test_a_score_function_that_returns_no_scores_is_one_line(before, after, words, compiled, mine,
                                                               bytes_data, tmp_path):
    """With its file and line, before anything is compiled."""
    path = mine(before, after)
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "return lambda" in text)
    done = run_here("train.py", f"--mechanism={path}", f"--dataset={bytes_data}", "--n_layer=1", "--n_head=2",
                    "--n_embd=32", "--block_size=8", "--max_iters=2", "--device=cpu", f"--compile={compiled}",
                    f"--out_dir={tmp_path / 'run'}")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and re.search(words, last) and f"{path}, line {line}" in last, done.stderr
    assert "Traceback" not in done.stderr
