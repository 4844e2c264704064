"""A mechanism in a file of one's own: the page's files, what --check says, a study of it, every program."""

import importlib
import io
import itertools
import re
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import model
from helpers import CODE, EXAMPLES, PAGE, ROOT, forget_own_mechanisms, without_own_mechanisms, write_dataset
from nanoheads import causality, checkpoint, own_mechanism as own, promises
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.configurator import Presets, parse_command
from nanoheads.pruning import pack, prune_heads
from lab.heads.surgery import insert_heads
from lab.prune import why_unfit
from study.config import StudyConfig, variants_of

SIZES = dict(vocab_size=11, block_size=16, n_layer=2, n_head=4, n_embd=64)
HOOK = "    def score_mod(self, attn, heads):"
BEFORE = "\n        heads.k = heads.k + F.pad(heads.k[:, :, :-1], (0, 0, 1, 0))"  # of the token before
AHEAD = "\n        heads.q = heads.q + heads.x.mean(1)[:, None, None, :1]"
SMALL = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=4", "--eval_tokens=64",
         "--device=cpu"]


def run_here(program, *argv):
    """A program in this process, which knows of no mechanism of one's own before nor after."""
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


def broken(path, recipes=("gpt2", "modern")):
    """{promise: what is wrong} of the file's first mode."""
    name = own.add(path)[0]
    rows = itertools.takewhile(lambda row: row[1] in recipes, promises.check(name, model.MECHANISMS[name]))
    return {promise: wrong for _, _, promise, wrong in rows if wrong}


def gpt_of(flag, **more):
    return model.GPT(model.GPTConfig(**SIZES, **{flag: True}, **more)).eval()


# ---- the page's files ----

OTHERS = [code for code in EXAMPLES if code != CODE]
# methods: what not to write, a sum over tokens, and a score function that reads the keys
TRAP, SUM, SCORES = map(textwrap.dedent, re.findall(r"^ *```py\n(.*?)^ *```$", PAGE, re.M | re.S))


@pytest.mark.slow
@pytest.mark.parametrize("code", OTHERS, ids=lambda code: re.search(r"class (\w+)\(", code)[1])
def test_each_file_of_the_page_keeps_every_promise(code, mine):
    path = mine()
    path.write_text(code)
    assert broken(path) == {}


@pytest.mark.slow
@pytest.mark.parametrize("method, found", [
    (TRAP, {"cache", "padding", "documents", "grouped"}), (SUM, set())], ids=["trap", "sum"])
def test_the_first_trap_of_the_page_is_found_and_its_sum_is_right(method, found, mine):
    """In the class of the first example, which it makes another model than the plain GPT at any setting."""
    path = mine(HOOK, f"{textwrap.indent(method, '    ')}\n{HOOK}")
    code = path.read_text().replace("    neutral = ", "    needs_positions = True  # ")
    path.write_text(code.replace("\n\n", "\nfrom nanoheads.kernels import sum_so_far\n\n", 1))
    wrong, page = broken(path, ["gpt2"]), re.sub("  +", "  ", PAGE)
    assert wrong.keys() == found
    assert all(f"{promise}  {wrong[promise][:30]}" in page for promise in found - {"grouped"})


@pytest.mark.parametrize("kept, hinted", [(HOOK, True), (HOOK.replace("score_mod", "not_called"), False)])
def test_only_where_there_is_a_score_function_a_fault_is_explained_by_it(kept, hinted, mine):
    path = mine(HOOK, f"{textwrap.indent(TRAP, '    ')}\n{kept}")
    path.write_text(path.read_text().replace("    neutral = ", "    # "))
    assert ("score function" in broken(path, ["gpt2"])["padding"]) is hinted


def test_the_second_trap_of_the_page_is_refused_in_its_words(mine):
    code, = (text for text in EXAMPLES if "class TokenGate" in text)
    path = mine()
    path.write_text(re.sub(r"start_at\((.*), (.*)\)", r"nn.init.constant_(\1, \2)", code))
    with pytest.raises(UserError) as e:
        own.add(path)
    assert str(e.value).removeprefix(f"{path.parent}/") in " ".join(PAGE.split())


@pytest.mark.slow
def test_a_score_function_that_reads_the_keys_is_right(mine):
    path = mine()
    made, _ = CODE.split(HOOK)
    made = made.replace("self.slope = nn.Parameter(torch.full((attn.n_head,), config.forget_init))",
                        "self.proj = nn.Linear(config.n_embd, attn.n_head)")
    made = made.replace('("slope",)', '("proj.weight", "proj.bias")').replace(
        '{"forget": {"forgetting.slope": -60.0}}', '{"forget": {"forgetting.proj.*": 0.0}}')
    path.write_text(made + textwrap.indent(SCORES, "    "))
    assert broken(path, ["gpt2"]) == {}


@pytest.mark.slow
def test_the_commands_of_the_page(mine, tmp_path, monkeypatch):
    """--check as it stands there; compare.py's is taken apart as the program takes it."""
    block = PAGE.split("\n## Check")[1].split("```sh\n")[1].split("```")[0]
    commands = [line.split("#")[0].split()[1:] for line in block.strip().splitlines()]
    assert [Path(words[0]).name for words in commands] == ["train.py", "train.py", "compare.py"]
    path = mine()
    monkeypatch.chdir(tmp_path)
    done = run_here(*commands[0])
    assert done.returncode == 0 and done.stdout.count("kept") == 23, done.stderr
    command = parse_command((Presets, model.GPTConfig, TrainConfig, StudyConfig), commands[2][1:])
    kept = tmp_path / "kept" / own.read_own_file(path).digest / "mine.py"
    assert own.add_from_command(command, keep=tmp_path / "kept").words() == [
        "--mechanism=forget", f"--own_mechanism={kept}"]


@pytest.mark.parametrize("beside", [dict(n_kv_head=2), model.ALL_ON], ids=["grouped", "all_on"])
def test_it_acts_beside_other_mechanisms_and_grouped_queries(beside, mine):
    """At its neutral setting the model is the one without it; elsewhere it is another, and learns."""
    own.add(mine())
    ids = torch.randint(11, (2, 17), generator=torch.Generator().manual_seed(1))

    def with_slope(slope):
        forgets = {} if slope is None else dict(forget=True, forget_init=slope)
        gpt = model.GPT(model.GPTConfig(**SIZES, **beside, **forgets)).double().eval()
        with torch.no_grad():
            for name, weight in gpt.named_parameters():  # at the start some matrices are 0
                noise = torch.Generator().manual_seed(len(name))
                weight += 0.05 * torch.randn(weight.shape, generator=noise) * (".slope" not in name)
        return gpt, gpt(ids[:, :-1], ids[:, 1:]).loss
    without, neutral, (gpt, loss) = with_slope(None)[1], with_slope(-60.0)[1], with_slope(-1.0)
    assert abs(neutral - without) < 1e-12 and abs(loss - without) > 1e-6
    loss.backward()
    assert gpt.transformer.h[0].attn.forgetting.slope.grad.abs().min() > 0


# ---- what --check says ----

@pytest.mark.parametrize("promise, before, after", [
    ("causal", HOOK, HOOK + AHEAD),
    ("rows", HOOK, HOOK + "\n        heads.q = heads.q + heads.q.mean(0)"),
    ("documents", HOOK, HOOK + BEFORE),
    ("acts", "F.softplus(self.slope)", "0 * F.softplus(self.slope)")])
def test_each_promise_finds_its_mistake(promise, before, after, mine):
    name, = own.add(mine(before, after))
    rows = promises.check(name, model.MECHANISMS[name])
    assert any(wrong for _, _, tried, wrong in rows if tried == promise)


def test_mistakes_that_do_not_hide_one_another_are_found_together(mine):
    """One of each promise that the others leave to be seen."""
    path = mine("rate[h] * (t - s)", "(rate[h] + 0.1 * (rate.dtype == torch.float32)) * t * (t - s)"
                " * heads.q.size(2) * heads.k.size(1) / 1000")  # dtypes, padding, cache, grouped
    for before, after in (('per_head = ("slope",)', "per_head = ()"), ("-60.0}", "-1.0}"),
                          ("F.softplus(self.slope)", "F.softplus(self.slope.detach())")):
        assert before in path.read_text()
        path.write_text(path.read_text().replace(before, after))
    assert broken(path, ["gpt2"]).keys() >= {
        "cache", "padding", "grouped", "dtypes", "pruned", "learns", "neutral"}


def test_what_does_not_run_says_so_once(mine):
    done = run_here("train.py", f"--mechanism={mine(HOOK, HOOK + chr(10) + '        boom')}", "--check")
    assert done.returncode == 1 and done.stdout.count("name 'boom' is not defined") == 1
    assert "train: 1 of 1 promises are broken" in done.stderr


def test_a_mechanism_acts_or_says_why_not():
    """Agency alone starts as the plain GPT whatever its weights are; a window acts on distant tokens."""
    for name in ("agency", "window", "unet_scalar"):
        _, _, promise, wrong = next(promises.check(name, model.MECHANISMS[name]))
        assert wrong is None and (promise == "acts") == (name != "agency")


def test_heads_that_go_in_pairs_are_pruned_in_pairs():
    flags = model.MECHANISMS["diff_v1"]
    assert promises.broken(promises.pruned, lambda: promises.random_model(flags, "gpt2")) is None


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


@pytest.mark.slow
def test_a_buffer_that_starts_at_0_is_filled_before_it_is_judged(mine):
    """By passes in training, which are no leak from one batch to the next. One that stays 0 does nothing."""
    path = mine()
    path.write_text(MEAN.replace("SHARE", "0.1"))
    assert broken(path, ["gpt2"]) == {}
    gpt = causality.with_noise(gpt_of("mean"))
    assert causality.leak_in(gpt, causality.modes_of(gpt, 2))[0] is None
    forget_own_mechanisms()
    path.write_text(MEAN.replace("SHARE", "0.0"))
    own.add(path)
    _, _, promise, wrong = next(promises.check("mean", model.MECHANISMS["mean"]))
    assert promise == "acts" and "it does nothing" in wrong


GATES = '''
import torch
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
    "in a sequence": ("self.net = nn.Sequential(nn.Linear(config.n_embd, 5), nn.Linear(5, attn.n_total))",
                      "self.net(heads.x)"),
    "columns": ("self.back = nn.Linear(attn.n_total, config.n_embd, bias=False)",
                "heads.x @ self.back.weight"),
    "wide": ("self.proj = nn.Linear(config.n_embd, 3 * attn.n_total)",
             "self.proj(heads.x).unflatten(-1, (-1, 3)).sum(-1)"),
    "a part is declared": ("self.proj = nn.Linear(config.n_embd, attn.n_total); "
                           "self.scale = nn.Parameter(torch.ones(attn.n_total))",
                           "self.scale * self.proj(heads.x)")}


def pruned_right(path, code):
    """Whether the heads of Gates in a file are pruned rightly; what the check says to write, if not."""
    path.write_text(code)
    with without_own_mechanisms():
        own.add(path)
        wrong = promises.broken(promises.pruned, lambda: promises.random_model(dict(gates=True), "modern"))
        return wrong is None, promises.how_to_declare(dict(gates=True), "modern")


@pytest.mark.parametrize("name", MADE)
def test_what_the_check_says_of_per_head_works_as_it_stands(name, tmp_path):
    """Put into the file as it is printed, in place of what was declared before."""
    make, factor = MADE[name]
    code = GATES.replace("MAKE", make).replace("FACTOR", factor)
    declared = "    per_head = ('scale',)\n" if "scale" in make else ""
    right, advice = pruned_right(tmp_path / "gates.py", code.replace("    modes", f"{declared}    modes"))
    assert not right
    if match := re.fullmatch(r"write in class Gates `(.*)`", advice):
        code = code.replace("    modes", f"    {match[1]}\n    modes")
    else:
        form = "write `(.*)`, and at the end of Gates.__init__ `(.*)`"
        imported, line = re.fullmatch(form, advice).groups()
        code = f"{imported}\n" + code.replace("    def before", f"        {line}\n\n    def before")
    assert pruned_right(tmp_path / "gates.py", code)[0]


LED = """
from nanoheads.mechanism import Mechanism


class Led(Mechanism):
    class Options:
        led: bool = False  # each head's output and that of head 0

    name = flag = "led"
    modes = {"led": dict(led=True)}
    PER_HEAD

    def after_attention(self, attn, heads):
        heads.y = heads.y + heads.y[:, :1]
"""


@pytest.mark.slow
def test_heads_that_depend_on_one_another_say_so_and_are_not_pruned(mine, bytes_data, tmp_path):
    path = mine()
    path.write_text(LED.replace("PER_HEAD", ""))
    wrong = broken(path, ["gpt2"])
    assert wrong.keys() == {"pruned"}
    assert "where heads depend on one another, write `per_head = None` in the class" in wrong["pruned"]
    forget_own_mechanisms()
    path.write_text(LED.replace("PER_HEAD", "per_head = None"))
    assert broken(path, ["gpt2"]) == {}
    gpt = gpt_of("led")
    for refused in (lambda: prune_heads(gpt, {0: [1]}), lambda: insert_heads(gpt, {0: [1]})):
        with pytest.raises(ValueError, match=r"heads of Led depend on one another \(per_head = None\)"):
            refused()
    gpt.set_gate(0, 0, 0.0)
    assert pack(gpt).config.head_ids is None
    assert "has Led, whose heads depend" in why_unfit("importance", gpt)
    done = run_here("train.py", f"--mechanism={path}", "--sentinel=hard_concrete", "--prune_gate=0.05",
                    *SMALL, f"--dataset={bytes_data}", f"--out_dir={tmp_path / 'run'}", "--max_iters=1")
    assert "prune_gate or grow_heads: heads of Led depend" in done.stderr


# ---- before a study, and before training ----

@pytest.mark.slow
def test_a_study_of_the_controls_refuses_the_look_ahead_alone(own_mechanisms_go):
    """Dead parameters may be compared, with a note."""
    own.add(ROOT / "tests" / "controls.py")
    note, = promises.refuse_broken({"control_dead": model.MECHANISMS["control_dead"]})
    assert re.fullmatch("Note: 'control_dead' is compared all the same, although .* has no gradient .*", note)
    with pytest.raises(UserError, match=r"control_leak .* looks ahead.* position 10 .* at 12"):
        promises.refuse_broken({"control_leak": model.MECHANISMS["control_leak"]})


def test_what_does_nothing_or_looks_ahead_is_refused_before_a_study(mine):
    name, = own.add(mine("F.softplus(self.slope)", "0 * F.softplus(self.slope)"))
    with pytest.raises(UserError, match="forget .*it does nothing: .*: a comparison would mean nothing"):
        promises.refuse_broken({name: model.MECHANISMS[name]})
    forget_own_mechanisms()
    own.add(mine(HOOK, HOOK + AHEAD))
    # those of the repository have been tested
    promises.refuse_broken({"xsa": model.MECHANISMS["xsa"], "off": dict(forget=False, adamw_lr=0.1)})
    in_words = dict(mechanisms=["xsa"], variants={"x": dict(forget=True, adamw_lr=0.1)})
    for name, each in (("forget", dict(mechanisms=["forg*"])), ("x", in_words)):
        with pytest.raises(UserError, match=rf"{name} .*position 1 changes with the token at 12"):
            promises.refuse_broken(variants_of(StudyConfig(**each)))


def test_what_reads_the_document_before_is_not_trained_on_packed_rows(mine, tmp_path):
    """What reads the token before looks not ahead, and is trained on rows of one text."""
    path, text = mine(HOOK, HOOK + BEFORE), b"A line of text.\n\n" * 200
    data = write_dataset(tmp_path / "data", dict.fromkeys(("train", "val", "test"), text))
    command = [f"--mechanism={path}", f"--dataset={data}", *SMALL, "--max_iters=1", "--documents=8"]
    done = run_here("train.py", *command, "--documents_packed=cut", f"--out_dir={tmp_path / 'packed'}")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "packed").exists(), done.stderr
    assert "train: before training a document changes with the one before it in its row" in done.stderr
    done = run_here("train.py", *command, f"--out_dir={tmp_path / 'padded'}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("before, after, words, compiled", [
    ("score - rate[h] * (t - s)", "score.sum(1)", "it must return scores of the same shape", True),
    ("score - rate[h] * (t - s)", "torch.where(t == 3, -torch.inf, score - rate[h] * (t - s))",
     "query 3 of head 0, row 0, -inf for every key that it sees", True),
    ("score - rate[h] * (t - s)", "(score > rate[h] * (t - s)).long()", "scores must be floating", False)],
    ids=["shape", "empty row", "dtype"])
def test_a_score_function_that_returns_no_scores_is_one_line(before, after, words, compiled, mine,
                                                               bytes_data, tmp_path):
    """With its file and line, before anything is compiled."""
    path = mine(before, after)
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "return lambda" in text)
    done = run_here("train.py", f"--mechanism={path}", f"--dataset={bytes_data}", *SMALL, "--max_iters=2",
                    f"--compile={compiled}", f"--out_dir={tmp_path / 'run'}")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and words in last and f"{path}, line {line}" in last, done.stderr


# ---- in every program ----

@pytest.mark.slow
def test_a_run_with_it_goes_through_every_program(mine, bytes_data, tmp_path):
    """Trained, gone on with, evaluated, sampled, timed, pruned, exported; when the file is gone, the copy is
    enough. It may have the name of a module of ours.
    """
    path, out, exported = mine(name="own_mechanism.py"), tmp_path / "run", tmp_path / "hf"
    args = [f"--mechanism={path}", f"--dataset={bytes_data}", f"--out_dir={out}", *SMALL, "--eval_interval=2"]
    for more in (["--max_iters=2"], ["--max_iters=4", "--resume"]):
        done = run_here("train.py", *args, *more)
        assert done.returncode == 0, done.stderr
    kept = out / path.name
    assert kept.read_text() == CODE
    state = torch.load(out / "best.pt", weights_only=True)
    assert state["own_mechanism"] == [dict(file=path.name, digest=own.read_own_file(path).digest)]
    path.unlink()
    for command in (["evaluate.py", "--ckpt", out, "--split=val"],
                    ["sample.py", "--ckpt", out, "--max_new_tokens=3", "--start=a"],
                    ["lab.prune", "--ckpt", out, "--by=random", "--to=0.5", f"--out_dir={tmp_path / 'less'}"],
                    ["lab.export_hf", "--ckpt", out, "--out", exported]):
        done = run_here(*command, f"--mechanism={kept}")
        assert done.returncode == 0, done.stderr
    done = run_here("bench.py", f"--mechanisms=xsa,{kept}", "--rounds=1", "--steps=1", "--no-memory",
                    *SMALL[:5], "--device=cpu")
    assert done.returncode == 0 and re.search("^train +forget", done.stdout, re.M), done.stderr
    # a new checkpoint, with a copy of its own
    copied = tmp_path / "less" / path.name
    done = run_here("evaluate.py", "--ckpt", tmp_path / "less", "--split=val", f"--mechanism={copied}")
    assert done.returncode == 0 and copied.read_text() == CODE, done.stderr
    # what was exported is read as text, and runs where it is named
    state, path = checkpoint.read(str(exported)), exported / "own" / path.name
    with pytest.raises(UserError, match="whose code runs only where it is named: ") as e:
        checkpoint.build(state, exported)
    assert str(e.value).endswith(f"own_mechanism.add('{path}')")
    own.add(path)
    transformers = pytest.importorskip("transformers", reason="needs transformers: requirements-test.txt")
    here, there = (gpt(torch.arange(9)[None]).logits for gpt in (
        checkpoint.build(state, exported).eval(),
        transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True).eval()))
    assert here.any() and (here - there).abs().max() < 1e-6
