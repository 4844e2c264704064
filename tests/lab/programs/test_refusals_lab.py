"""What the lab refuses (probes, pruning, labels, controllers), in tables as in test_refusals.py."""

import shutil

import numpy as np
import pytest
import torch

import train
from helpers import TINY, as_arguments, check_refusal, make_model, save_model, under, write_dataset
from lab_helpers import make_labelled_checkpoint, put_labels, write_labels
from model import GPT, GPTConfig, MECHANISMS
from nanoheads.dataset import Dataset

# ---- the folder in which the commands are typed ----

HEADS = dict(recipe="modern", block_size=32, vocab_size=256, n_layer=3, n_head=2, n_embd=32)
SCORERS = dict(constraint_names=["digit", "noise"], constraint_hidden=16)
FUNCTIONS = """import torch
table = torch.eye(37)
def causal(ids):
    return table[ids].cumsum(1)
def late(ids):
    return causal(ids)
def flat(ids):
    return table[ids].sum(-1)
def nan(ids):
    return causal(ids) / (causal(ids) * 0)
def noisy(ids):
    return causal(ids) + torch.randn(*ids.shape, 37)
"""
RULES = [("{", "is not JSON"), ('[{"states": ["tired"], "allow": true}]', "state 'tired' must be")]


def gpt(**flags):
    return GPT(GPTConfig(**flags))


def filled(model, name, value):
    """The model, all of the weight of this name this value."""
    with torch.no_grad():
        model.get_parameter(name).fill_(value)
    return model


@pytest.fixture(scope="module")
def home(tmp_path_factory, bytes_data, task_run):
    """Data sets, labels, checkpoints, runs and files: what the rows below name."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as typed:
        typed.chdir(home)
        furnish(home, bytes_data)
        shutil.copy(task_run / "best.pt", "recall.pt")
    return home


def furnish(home, bytes_data):
    shutil.copytree(bytes_data, "sums")
    sums = Dataset("sums")
    text = {split: bytes(sums.tokens(split)) for split in ("train", "val", "test")}
    turned, decoded = ({split: change(part) for split, part in text.items()}
                       for change in (lambda part: part[::-1], bytes.decode))
    backwards = Dataset(write_dataset(home / "backwards", turned))
    chars = Dataset(write_dataset(home / "chars", decoded, "char", sorted(set("0123456789 plusi.\n"))))
    put_labels(home / "sums/labels/truth", sums, digit=np.zeros_like, even=np.zeros_like)
    write_labels(home / "weak", sums)
    write_labels(home / "foreign", backwards)
    write_labels(home / "half", sums, splits=("train", "val"))
    write_labels(home / "same", sums, digit=1.0)
    keys = dict(TINY, dataset="sums", recipe="modern", n_head=4, n_embd=32, n_layer=2, block_size=32,
                controller_log=True, controller_interval=2, controller_tokens=320, controller_heldout=320,
                out_dir="run")
    train.main(as_arguments(keys))

    # ---- checkpoints ----
    save_model("plain.pt", make_model(), sums)
    save_model("rope.pt", make_model(recipe="modern"), sums)
    save_model("backwards.pt", make_model(recipe="modern"), backwards)
    save_model("chars.pt", make_model(vocab_size=chars.vocab_size), chars)
    save_model("large.pt", filled(make_model(), "transformer.wte.weight", 3e38), sums)
    # of constraint heads
    save_model("heads.pt", gpt(**HEADS, **SCORERS), sums)
    save_model("base.pt", gpt(**HEADS), sums)
    save_model("shallow.pt", gpt(**{**HEADS, "n_layer": 2}), sums)
    save_model("heads2.pt", gpt(**HEADS, **SCORERS, constraint_heads=2), sums)
    save_model("named.pt", gpt(**HEADS, **{**SCORERS, "constraint_names": ["truth"]}), sums)
    save_model("broken.pt", filled(gpt(**HEADS, **SCORERS), "transformer.h.2.attn.constraint.b2", torch.nan),
               sums)
    small = dict(block_size=16, vocab_size=256, n_layer=1, n_head=2, n_embd=16, recipe="modern")
    save_model("two_heads.pt", gpt(**small, constraint_names=["digit", "even"], constraint_heads=2), sums)
    save_model("one_name.pt", gpt(**small, constraint_names=["even"]), sums)
    # for pruning
    save_model("larger.pt", gpt(block_size=16, vocab_size=256, n_layer=3, n_head=4, n_embd=32), sums)
    save_model("unet.pt", gpt(block_size=16, vocab_size=256, n_layer=3, n_head=4, n_embd=32,
                              **MECHANISMS["unet_add"]), sums)
    state = torch.load("run/ckpt.pt", weights_only=False)
    state.pop("train")
    torch.save(state, "untold.pt")
    # for a look at constraint heads
    for name, encoding in (("fair.pt", "char"), ("fair_bytes.pt", "byte")):
        make_labelled_checkpoint(name, encoding, constraint_names=["fair", "clear"])
    (home / "with/best.pt").mkdir(parents=True)
    (home / "with/best.pt/best.pt").write_text("here")

    # ---- texts, functions ----
    (home / "t.txt").write_text("abc\n")
    (home / "empty.txt").write_text("")
    (home / "other.txt").write_text("abcZ")
    for folder in ("folder.html", "folder.png", "figures_taken"):
        (home / folder).mkdir()
    (home / "span.jsonl").write_text('{"name": "truth", "start": 0, "end": 1, "value": 1.0}\n')
    (home / "no_span.jsonl").write_text("")
    (home / "theirs.py").write_text(FUNCTIONS)
    for i, (text, _) in enumerate(RULES):
        (home / f"rules{i}.json").write_text(text)
    shutil.copytree("run", "figures_taken/file")
    (home / "figures_taken/file/figures").write_text("a file")


# ---- command lines ----

TRAIN = " ".join(["train.py", *as_arguments(TINY), "--dataset=sums"])

COMMANDS = [
    # ---- train.py: controllers, policies, growth ----
    *under(f"{TRAIN} --out_dir=new",
        ("--controller=rules", "controller='rules' needs gates: set sentinel"),
        ("--policy --agency --policy_no_consent=[5.1]", "must be layer.head"),
        *((f"--policy --agency --policy_rules=rules{i}.json", words) for i, (_, words) in enumerate(RULES)),
        ("--agency --agency_learned --policy", "both move the states"),
        ("--grow_heads=1", "all 2 heads are there from the start"),
        ("--prune_gate=0.1 --sentinel=sigmoid --n_kv_head=1", "prune_gate and grow_heads take single heads"),
        ("--controller_step=3.0", "controller_step=3.0 means nothing"),
        ("--controller_log --controller_tokens=10000000", "measuring heads takes"),
        ("--init_from=run --freeze_trunk --sentinel=sigmoid --controller_log",
         "freeze_trunk=True: heads are measured by gradients")),

    # ---- train.py: labels and teachers ----
    *under(f"{TRAIN} --out_dir=new --recipe=modern",
        ("--labels=truth --constraint_names=digit,truth", "truth"),
        ("--labels=lies --constraint_names=digit,even", "'lies'"),
        ("--constraint_names=digit,even --constraint_focal=2.0", "constraint_focal=2.0"),
        ("--labels=truth --constraint_names=digit,even --teacher=two_heads.pt --constraint_match=huber",
         "two_heads.pt"),
        ("--labels=truth --constraint_names=digit,even --teacher=one_name.pt --constraint_match=kl",
         "constraint_names"),
        ("--labels=truth --constraint_names=digit,even --documents=8", "documents=8")),

    # ---- plot_curves.py --heads, sample.py --audit ----
    *under("plot_curves.py --heads",
        ("figures_taken/file", "cannot make the folder figures_taken/file/figures (File exists)")),
    *under("sample.py --ckpt=fair.pt",
        ("--audit=s.jsonl --ckpt=fair.pt", "^sample: --audit takes one checkpoint")),

    # ---- probe.py look ----
    *under("lab/probe.py", ("haeds --ckpt x", "^probe: no probe 'haeds'; did you mean heads?$")),
    *under("lab/probe.py look --ckpt=fair.pt",
        ("--text=empty.txt", "--text: empty.txt is empty"),
        ("--text=other.txt", "other.txt: 'Z' (U+005A) at position 3 is not among the 13 symbols"),
        ("--text=t.txt --out=folder.jsonl", "folder.png is not a file"),
        ("--text=t.txt --out=t.txt", "--out: t.txt is the text itself, and would be lost"),
        ("--text=t.txt --ckpt=fair_bytes.pt", "fair.pt and fair_bytes.pt have different vocabularies")),

    # ---- probe.py constraints ----
    *under("lab/probe.py constraints",
        ("score --ckpt=base.pt --labels=weak", "has no constraint heads"),
        ("score --ckpt=heads.pt --labels=./foreign", "made for another"),
        ("score --ckpt=named.pt --labels=./weak", "heads for truth, and"),
        ("score --ckpt=heads.pt --labels=./same", "digit", "train is of one class only"),
        ("adjudicate --ckpt=heads.pt --labels=./half", "labels no split 'test'"),
        ("adjudicate --ckpt=heads.pt --labels=./weak --task=cited", "is about testifiability"),
        ("explain --ckpt=heads.pt --k=16", "--k 16: highest and lowest"),
        ("explain --ckpt=broken.pt", "transformer.h.2.attn.constraint.b2 holds NaN or infinities")),
    *under("lab/probe.py constraints score --ckpt=heads.pt --labels=./weak",
        ("--plain=shallow.pt", "reads block 2 of 32"),
        ("--plain=base.pt --plain=base.pt", "2 --plain for 1 --ckpt"),
        ("--ckpt=heads2.pt", "other constraint heads"),
        ("--split=train", "--split train")),

    # ---- probe.py leak ----
    *under("lab/probe.py leak --vocab=37",
        ("--module=theirs.py:none", "has no function none; it has causal, late,"),
        ("--module=theirs.py:flat", "returns [3, 32] for ids of [3, 32], which must be [B, T, V]"),
        ("--module=theirs.py:nan", "the logits are NaN at row 0, position 0"),
        ("--module=theirs.py:noisy", "turn dropout and sampling off"),
        ("--module=theirs.py", "name a file and a function")),

    # ---- probe.py heads, and what is of a text or of a task ----
    *under("lab/probe.py heads",
        ("--ckpt=rope.pt --context=99999", "a context of 99,999 is longer than the val split"),
        ("--ckpt=plain.pt --context=33", "learned positions, which end at 32"),
        ("--ckpt=rope.pt --ckpt=backwards.pt", "trained on different data"),
        ("--ckpt=recall.pt", "recall.pt was trained on the task recall, and this is of a text")),
    *under("lab/probe.py look",
        ("--levels=2 --ckpt=plain.pt", "--levels is of a task, and plain.pt was trained on a text")),
    *under("lab/prune.py --to=0.5 --by=random",
        ("--ckpt=recall.pt --dataset=sums", "and --dataset=sums is of a text")),

    # ---- probe.py text ----
    *under("lab/probe.py text --ckpt=plain.pt --num_prompts=3 --prompt_tokens=6 --samples=2 --tokens=24",
        ("--num_prompts=90", "90 prompts of 6 tokens, each with the 24 after it, need 2,700 tokens; the test "
                             "split of "),
        ("--judge=chars.pt", "its 18 characters cannot spell all that "),
        ("--judge=large.pt", "--judge large.pt gives nan nats")),

    # ---- prune.py ----
    *under("lab/prune.py --ckpt=run",
        ("--to 0.5 1.5 --by random", "--to 1.5"),
        ("--to 0.5 --by gate", "gate")),
    *under("lab/prune.py --to=0.5 --by=random --ckpt=run",
        ("--floor=5", "--floor 5"), ("--recover=5", "--out_dir"),
        ("--text=900000", "20,000 tokens of train"),
        ("--out_dir=with/best.pt", "with/best.pt"),
        ("--ckpt=larger.pt", "larger.pt and run")),
    *under("lab/prune.py --to=0.5",
        ("--ckpt=untold.pt --by=random --recover=5 --out_dir=y", "untold.pt"),
        ("--ckpt=unet.pt --by=blocks", "unet.pt has U-Net")),

    # ---- bench.py ----
    *under("bench.py",
        ("--nanogpt=folder.html", "--nanogpt must name a nanoGPT checkout"),
        ("--mechanisms=all --heads_off=0", "one at a time")),

    # ---- lab/label.py ----
    *under("lab/label.py --dataset=sums",
        ("--by=weak --noise=0.1", "--noise is for --by=synthetic, not for --by=weak"),
        ("--by=weak --names truth", "no weak labeller 'truth'; there are reciprocity"),
        ("--by=synthetic --names a.b", "'a.b' is no name"),
        ("--by=spans --file=span.jsonl --split=val --names x", "nothing about 'x'; there is truth"),
        ("--by=spans --file=no_span.jsonl --split=val", "holds no label")),
]


@pytest.mark.slow
@pytest.mark.parametrize("command, words", COMMANDS)
def test_a_command_that_cannot_be_is_one_line(command, words, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    check_refusal(command, words, home, capsys)
