"""
What the core refuses, as a table: a row is a command line, or a config's flags, and words of the line that
answers it. There is a row for each kind of fault, not for each key that may have it: test_configurator.py
draws those.

A refusal that takes more than files to come about, such as a killed process, is tested where it belongs.
"""

import math
import os
import shutil

import pytest
import torch

import train
from helpers import (TINY, TINY_GPT, TINY_TASK, VOCAB, as_arguments, check_refusal, flags_of_variant_b,
                     make_checkpoint, make_model, save_model, under, write_dataset)
from model import CONSTRAINTS, GPT, GPTConfig
from nanoheads import corpus
from nanoheads.dataset import Dataset

# ---- the folder in which the commands are typed ----

RUN = dict(TINY, n_layer=2, block_size=32)
SWITCHED = dict(n_layer=2, n_head=4, n_embd=16, block_size=8, unet="concat", agency=True, routing="moh",
                routing_top_k=3)


def damaged(path, new, key=None, **meta):
    """A copy of a checkpoint, all of its weight `key` NaN, its dataset's meta with other entries."""
    state = torch.load(path, weights_only=True)
    if key:
        state["model"][key].fill_(math.nan)
    torch.save({**state, "meta": {**state["meta"], **meta}}, new)


def nanogpt(path, vocab_size=len(VOCAB), **config):
    """A checkpoint of nanoGPT's."""
    sizes = dict(block_size=16, vocab_size=vocab_size, n_layer=1, n_head=2, n_embd=16)
    model, args = GPT(GPTConfig(**sizes)), dict(sizes, bias=False, dropout=0.0)
    torch.save(dict(model=model.state_dict(), model_args=args, iter_num=3, config=config), path)


@pytest.fixture(scope="module")
def home(tmp_path_factory, bytes_data, chars_data, task_run):
    """Data sets, checkpoints sound and damaged, runs, texts: what the rows below name."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as typed:
        typed.chdir(home)
        furnish(home, bytes_data, chars_data)
        of_tasks(task_run)
    return home


def furnish(home, bytes_data, chars_data):
    shutil.copytree(bytes_data, "sums", ignore=shutil.ignore_patterns("labels"))
    shutil.copytree(chars_data, "letters")
    write_dataset(home / "toy", dict.fromkeys(("train", "val", "test"), "".join(VOCAB)), "char", VOCAB)
    paragraphs = b"A stone in the river.\n\n" * 400
    write_dataset(home / "paragraphs", dict.fromkeys(("train", "val", "test"), paragraphs))
    train.main([*as_arguments(RUN), "--dataset=sums", "--out_dir=run"])

    sums = Dataset("sums")
    save_model("bytes.pt", make_model(), sums, "sums")
    damaged("bytes.pt", "nan.pt", "transformer.wte.weight")
    save_model("switched.pt", GPT(GPTConfig(vocab_size=256, **SWITCHED)), sums, "sums")
    make_checkpoint("chars.pt")
    damaged("chars.pt", "chars_nan.pt", "lm_head.weight")
    damaged("chars.pt", "dna.pt", vocab=["A", *VOCAB[1:]])  # "A" was the newline
    damaged("chars.pt", "number.pt", vocab=5)
    nanogpt("owt.pt", dataset="owt")
    nanogpt("five.pt", 5, dataset="toy")
    for folder in ("hello", "occupied", "corpora", "best_only"):
        (home / folder).mkdir()
    (home / "hello/ckpt.pt").write_text("hello")
    shutil.copy("run/best.pt", "best_only")
    shutil.copytree("run", "not_last")
    shutil.copy("run/best.pt", "not_last/ckpt.pt")

    os.mkfifo("pipe")
    (home / "file").write_text("")
    (home / "old.json").write_text("old")
    (home / "latin1.txt").write_bytes(b"caf\xe9")
    (home / "empty.txt").write_text("")
    (home / "small.txt").write_text("tiny")
    (home / "whole.txt").write_text("To be, or not to be: that is the question.\n" * 100)
    (home / "crlf.txt").write_bytes(b"one\r\n\r\ntwo\r\n" * 30)
    (home / "latin.txt").write_bytes(b"x" * 1999 + "é".encode() + b"\xe9" + b"x" * 1000)
    shutil.copytree("run", "occupied/file")
    (home / "occupied/file/figures").write_text("a file")


def of_tasks(task_run):
    """Two runs on a task, and checkpoints that are damaged in what they say of theirs."""
    shutil.copytree(task_run, "recall")
    keys = dict(TINY_TASK, task_keys=7, max_iters=1, out_dir="other")
    train.main(as_arguments(keys))
    task = torch.load(task_run / "best.pt", weights_only=True)["meta"]["task"]
    damaged("recall/best.pt", "six.pt", task={**task, "task_keys": "six"})


# ---- configs ----

NAMED = dict(constraint_names=CONSTRAINTS)
B = flags_of_variant_b((64, 4, 3))

GPT_CONFIGS = [
    # a value by itself
    (dict(n_layer=0), "n_layer=0 must be at least 1"),
    (dict(dropout=1.5), "dropout=1.5"),
    (dict(recipe="mamba"), "recipe='mamba'"),
    (dict(NAMED, constraint_name_coef=[1.0, -1.0, 1.0]), "constraint_name_coef=[1.0, -1.0, 1.0]"),
    (dict(roles=["free"] * 7), "roles=['free', 'free'"),

    # what means nothing without another flag
    (dict(qk_max=12.0), "qk_max=12.0"),
    (dict(NAMED, constraint_round=8), "^constraint_round=8 needs constraint_variant='B': heads of 'A' are as "
                                      "wide as the layer's others$"),

    # of sizes: of the model, of its heads, of its layers
    (dict(n_embd=30, n_head=4), "n_embd=30"),
    (dict(n_kv_head=3, head_ids=[[0], [0, 1]]), "head_ids=[[0], [0, 1]]"),
    (dict(unet="concat", n_layer=1), "unet='concat'"),
    (dict(routing="moh", routing_shared=3, routing_top_k=3), "routing_shared=3"),
    (dict(window=4, window_layers=[2]), "window_layers=[2]"),
    (dict(B, constraint_heads=50), "^constraint_variant='B' leaves 64 / 154 heads, less than 1 wide each$"),
    (dict(B, constraint_round=16), "^constraint_variant='B' leaves 64 / 7 heads, less than 16 wide each$"),
    (dict(B, constraint_heads=6, key_offset=True), "^key_offset needs a head size of at least 4: "
     "constraint_variant='B' leaves 2$"),

    # what does not go together
    (dict(acag="headwise", dropout=0.1), "acag", "attn_dropout"),
    (dict(n_kv_head=3, a2c="published"), "n_kv_head=3"),
    (dict(NAMED, constraint_skip=0.1, constraint_gate="value"), "constraint_skip=0.1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("flags, words", [(flags, words) for flags, *words in GPT_CONFIGS],
                         ids=lambda v: "-".join(v) if isinstance(v, dict) else "")
def test_a_gpt_that_cannot_be_is_one_line(flags, words):
    config = GPTConfig(**{**TINY_GPT, **flags})
    problem, = config.problems()
    assert "\n" not in problem and all(word in f"^{problem}$" for word in words), problem
    with pytest.raises(ValueError) as e:
        GPT(config)
    assert str(e.value) == problem


# ---- command lines ----

TRAIN = " ".join(["train.py", *as_arguments(RUN), "--dataset=sums"])
OVER = "train.py --dataset=paragraphs --device=cpu --max_iters=6 --lr_decay_iters=20 --out_dir=new"

COMMANDS = [
    # ---- train.py: what no run can be ----
    *under(f"{TRAIN} --out_dir=new",
        (f"--n_embd={10**9}", "^train: out of memory; ", "a lower n_embd, n_layer or vocab_size$"),
        (f"--n_layer={10**12}", "n_layer=1000000000000", "at most"),
        ("--device=cuda:77", "^train: device=cuda:77 cannot be used"),
        ("--compile_mode=reduce-overhead",
         "compile_mode='reduce-overhead' replays CUDA graphs, and this run is on cpu"),
        ("--n_head=3 --json=old.json", "n_head=3")),  # which stays as it is

    # ---- train.py: what is missing or damaged, and whose folder it is ----
    *under(TRAIN,
        ("--out_dir=x --dataset=enwik9", "^train: no dataset enwik9; did you mean enwik8?$"),
        ("--out_dir=hello --resume", "^train: hello/ckpt.pt cannot be read as a checkpoint"),
        ("--out_dir=x --documents=4", "^train: sums/train.bin has no documents",
         "no end-of-text token, title or blank line says where one begins"),
        ("--out_dir=file/run", "^train: file/run: Not a directory$"),
        ("--out_dir=best_only --resume", "take its weights with --init_from=best_only/best.pt"),
        ("--out_dir=not_last --resume --max_iters=9", "holds no state to go on from")),
    *under("train.py --device=cpu",
        ("--out_dir=nothing --resume", "^train: nothing holds no run to go on with, "
         "neither config.json nor ckpt.pt, and this command does not say what to train"),
        ("--dataset=sums --eval_only --init_from=nan.pt", "nan.pt: transformer.wte.weight holds NaN")),

    # ---- train.py: what contradicts the run or the checkpoint that is there ----
    *under(f"{TRAIN} --out_dir=run --resume --max_iters=12",
        ("--n_layer=3 --recipe=modern", "^train: run/ckpt.pt", "n_layer=3", "recipe='modern'", "pos='rope'",
         "norm='rmsnorm'", "act='relu2'", "qk_norm=True", "embed_norm=True", "tied=False", "zero_init=True"),
        ("--dataset=letters", "vocabulary", "letters")),
    *under(f"{OVER} --init_from=run",
        ("--freeze_trunk", "freeze_trunk=True"),
        ("--unet=add --unet_from=6", "unet_from=6"),
        ("--documents=8 --batch_size=100000", "fewer than the 100,000 of a batch"),
        ("--documents=8 --routing=moh", "routing_coef=0.01"),
        ("--documents=8 --documents_packed=cut --attn_dropout=0.1",
         "documents_packed has no fused kernel with dropout")),
    *under(OVER,
        ("--init_anyway", "init_anyway=True", "init_from"),
        ("--profile=2 --eval_only", "profile=2", "eval_only")),

    # ---- sample.py ----
    *under("sample.py --ckpt=chars.pt",
        (f"--max_new_tokens={'9' * 30}", "are too many"),
        ("--start=FILE:latin1.txt", "latin1.txt is not UTF-8 text")),
    *under("sample.py",
        ("--ckpt=bytes.pt --ckpt=chars.pt --start=abcZ", "'Z' (U+005A) at position 3", "chars.pt"),
        ("--ckpt=dna.pt --start=a --stop", "^sample: --stop: this vocabulary has neither a newline nor an "
                                           "end-of-text token to stop at$"),
        # checkpoints that cannot speak
        ("--ckpt=chars_nan.pt --start=abc", "^sample: chars_nan.pt: ", "weight holds NaN or infinities"),
        ("--ckpt=number.pt", "^sample: number.pt: its vocabulary cannot be read"),
        ("--ckpt=owt.pt", "no dataset owt"),
        ("--ckpt=five.pt", "knows 5 tokens; toy has 13")),

    # ---- evaluate.py ----
    *under("evaluate.py --ckpt=switched.pt",
        ("--stride=9", "stride=9 must be from 1 to block_size=8"),
        ("--dataset=toy", "whose vocabulary is not that of toy (char, 13)"),
        ("--json=pipe", "is not a file"),
        ("--split=dev --json=old.json", "no split 'dev'")),  # which stays as it is
    *under("evaluate.py",
        ("--ckpt=bytes.pt --set=state.0.1=withdrawn", "state.0.1=withdrawn: the model has no head states")),
    *under("evaluate.py --ckpt=switched.pt --set",  # what cannot be changed after training
        ("unet_skip=False", "--set unet_skip=False: unknown key unet_skip; did you mean unet_skips?"),
        ("gate.0.0=1e39", "gate.0.0=1e+39: the gate must be a number of at most 3.40282e+38"),
        ("state.0.1=asleep", "state 'asleep' must be one of active, overloaded, misaligned, withdrawn"),
        ("gate.0.4=0", "--set gate.0.4=0.0: block 0 has no head 4; it has 0, 1, 2, 3"),
        ("n_layer=1", "switched.pt: n_layer cannot be changed after training"),
        ("routing_top_k=5", "switched.pt: routing_top_k=5 must be from 1 to n_head=4")),

    # ---- of a task, and of a text ----
    *under("evaluate.py --ckpt=recall",
        ("--stride=4", "--stride=4 is of a text, and"),
        ("--levels=9", "9 pairs of recall need as many keys, and task_keys=6 gives 6: name a smaller level"),
        ("--ckpt=other", "were trained on different tasks, task_keys=7 and 6: one at a time"),
        ("--ckpt=bytes.pt", "on a text: one kind at a time")),
    *under("sample.py", ("--ckpt=recall --temperature=0", "--temperature=0.0 is of a text, and")),
    *under("evaluate.py",
        ("--ckpt=bytes.pt --rows=9", "is of a task, and", "was trained on a text"),
        ("--ckpt=six.pt", "^evaluate: six.pt is damaged", "task_keys='six' is not")),

    # ---- plot_curves.py ----
    *under("plot_curves.py",
        ("--x epochs", "invalid choice: 'epochs'"),
        ("--heads --x tokens", "--heads knows steps alone"),
        ("run not_last --out=/proc/x", "--out: cannot write into /proc (No such file or directory)"),
        ("occupied/file", "cannot make the folder occupied/file/figures (File exists)")),

    # ---- data/prepare_text.py and data/NAME/prepare.py ----
    *under("data/prepare_text.py --out=mine",
        ("--source=empty.txt", "is empty"),
        ("--source=corpora", "no .txt"),
        ("--source=small.txt", "too small"),
        ("--source=whole.txt --val=0.6 --test=0.5", "--val"),
        ("--source=latin.txt --encoding=char", "latin.txt", "not UTF-8 at byte 2,001",
         "; convert it, or take --errors=replace or --encoding=byte$"),
        ("--source=crlf.txt --separator=<eos>", "is not in the text")),
    *under("data/wikitext2/prepare.py --out=mine",
        ("--source=corpora", "corpora", "train.txt")),
    *under("data/enwik8/prepare.py --out=mine", ("--source=whole.txt", "whole.txt", "100,000,000")),
]


@pytest.mark.parametrize("command, words", COMMANDS)
def test_a_command_that_cannot_be_is_one_line(command, words, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    monkeypatch.delenv("NANOHEADS_DATA", raising=False)
    monkeypatch.setattr(corpus, "BLOCK", 1000)  # so that the texts above are of several
    monkeypatch.setattr(corpus, "HOME", home / "corpora")
    check_refusal(command, words, home, capsys)
