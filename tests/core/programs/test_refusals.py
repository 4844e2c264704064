"""What the core refuses: a row is a command line, or a config's flags, and words of its answer, one line.

A refusal that takes more than files to come about, such as a killed process, is tested where it belongs.
"""

import math
import os
import shutil
from pathlib import Path

import pytest
import torch

import sample
import train
from helpers import TINY, write_dataset
from helpers import VOCAB, check_refusal, make_checkpoint, make_model, save_model, under
from model import CONSTRAINTS, GPT, GPTConfig
from nanoheads import corpus
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.dataset import Dataset

# ---- the folder in which the commands are typed ----

RUN = dict(TINY, n_layer=2, block_size=32)
SWITCHED = dict(n_layer=2, n_head=4, n_embd=16, block_size=8, unet="concat", agency=True, routing="moh",
                routing_top_k=3)


def damaged(path, new, key=None, value=math.nan, **meta):
    """A copy of a checkpoint, all of its weight `key` this value, its dataset's meta with other entries."""
    state = torch.load(path, weights_only=True)
    if key:
        state["model"][key].fill_(value)
    torch.save({**state, "meta": {**state["meta"], **meta}}, new)


def nanogpt(path, vocab_size=len(VOCAB), **config):
    """A checkpoint of nanoGPT's."""
    sizes = dict(block_size=16, vocab_size=vocab_size, n_layer=1, n_head=2, n_embd=16)
    model, args = GPT(GPTConfig(**sizes)), dict(sizes, bias=False, dropout=0.0)
    torch.save(dict(model=model.state_dict(), model_args=args, iter_num=3, config=config), path)


@pytest.fixture(scope="module")
def home(tmp_path_factory, bytes_data, chars_data):
    """Data sets, checkpoints sound and damaged, runs, texts: what the rows below name."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as typed:
        typed.chdir(home)
        furnish(home, bytes_data, chars_data)
    return home


def furnish(home, bytes_data, chars_data):
    shutil.copytree(bytes_data, "sums", ignore=shutil.ignore_patterns("labels"))
    shutil.copytree(chars_data, "letters")
    write_dataset(home / "toy", dict.fromkeys(("train", "val", "test"), "".join(VOCAB)), "char", VOCAB)
    paragraphs = b"A stone in the river.\n\n" * 400
    write_dataset(home / "paragraphs", dict.fromkeys(("train", "val", "test"), paragraphs))
    train.main([*(f"--{key}={value}" for key, value in RUN.items()), "--dataset=sums", "--out_dir=run"])

    sums = Dataset("sums")
    save_model("bytes.pt", make_model(), sums, "sums")
    damaged("bytes.pt", "nan.pt", "transformer.wte.weight")
    damaged("bytes.pt", "large.pt", "transformer.wte.weight", 1e38)
    save_model("switched.pt", GPT(GPTConfig(vocab_size=256, **SWITCHED)), sums, "sums")
    make_checkpoint("chars.pt")
    damaged("chars.pt", "chars_nan.pt", "lm_head.weight")
    damaged("chars.pt", "dna.pt", vocab=["A", *VOCAB[1:]])  # "A" was the newline
    damaged("chars.pt", "number.pt", vocab=5)
    damaged("chars.pt", "numbers.pt", vocab=[1, 2])
    damaged("chars.pt", "float.pt", vocab_size=256.0)
    damaged("chars.pt", "doubled.pt", vocab=[VOCAB[0], *VOCAB[:-1]])
    nanogpt("owt.pt", dataset="owt")
    nanogpt("unnamed.pt")
    nanogpt("none.pt", dataset=None)
    nanogpt("five.pt", 5, dataset="toy")
    torch.save([1, 2], "list.pt")
    (home / "short.pt").write_bytes((home / "list.pt").read_bytes()[:-100])
    (home / "broken.pt").write_bytes(b"PK broken")
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
    (home / "cut.txt").write_bytes(b"x" * 2000 + "é".encode()[:1])
    for name in ("a", "b"):
        (home / "curves" / name).mkdir(parents=True)
        shutil.copy("run/log.jsonl", home / "curves" / name)
        shutil.copy("run/config.json", home / "curves" / name)
    shutil.copytree("curves/a", "occupied/file")
    (home / "occupied/file/figures").write_text("a file")


# ---- configs ----

SIZES = dict(block_size=16, vocab_size=37, n_layer=2, n_head=6, n_embd=48)
CONSTRAINED = dict(constraint_names=CONSTRAINTS)
B = dict(n_head=4, n_embd=64, head_dim=8, constraint_names=["a", "b", "c"], constraint_layers=[0, 1],
         constraint_variant="B", constraint_hidden=12)

GPT_CONFIGS = [
    # what a flag may be
    (dict(n_embd=30, n_head=4), "n_embd=30"),
    (dict(n_layer=0), "n_layer=0"),
    (dict(dropout=1.5), "dropout=1.5"),
    (dict(recipe="mamba"), "recipe='mamba'"),
    (dict(recipe="llama", rope_scaling=[8.0, 4.0, 1.0, 32.0]), "rope_scaling=[8.0, 4.0, 1.0, 32.0]"),
    (dict(recipe="llama", rope_scaling=[8.0]), "rope_scaling=[8.0]"),
    (dict(rope_scaling=[8.0, 1.0, 4.0, 32.0]), "rope_scaling=[8.0, 1.0, 4.0, 32.0]"),
    (dict(recipe="llama", qk_scale=True), "qk_scale=True"),
    (dict(softcap=-1.0), "softcap=-1.0"),
    (dict(loss_chunks=0), "loss_chunks=0"),
    (dict(seed=-1), "seed=-1"),
    (dict(rope_share=0.0), "rope_share=0.0"),
    (dict(qk_max=12.0), "qk_max=12.0"),
    (dict(routing="best"), "routing='best'"),
    (dict(routing="published", routing_mask="inf", routing_top_k=1), "routing_top_k=1"),
    (dict(routing="moh", routing_top_k=1), "routing_top_k=1"),
    (dict(routing="moh", routing_top_k=2, routing_shared=1), "routing_top_k=2"),
    (dict(routing="moh", routing_top_k=7), "routing_top_k=7"),
    (dict(routing="moh", routing_shared=3, routing_top_k=3), "routing_shared=3"),
    (dict(routing="published", routing_shared=1), "routing_shared=1"),
    (dict(routing="moh", routing_mask="zero"), "routing_mask='zero'"),
    (dict(unet="concat", n_layer=1), "unet='concat'"),
    (dict(unet="add", unet_init=1.5), "unet_init=1.5"),
    (dict(CONSTRAINED, constraint_variant="B", constraint_heads=15), "constraint_variant='B'"),
    (dict(CONSTRAINED, constraint_variant="B", constraint_round=8), "constraint_variant='B'"),
    (dict(CONSTRAINED, constraint_variant="B", constraint_round=0), "constraint_round=0"),
    (dict(CONSTRAINED, constraint_round=8), "constraint_round=8"),
    (dict(CONSTRAINED, constraint_variant="B", a2c="published"), "a2c='published'"),
    (dict(CONSTRAINED, constraint_layers=[2]), "constraint_layers=[2]"),
    (dict(CONSTRAINED, constraint_layers=[-1]), "constraint_layers=[-1]"),
    (dict(CONSTRAINED, constraint_layers=[]), "constraint_layers=[]"),
    (dict(CONSTRAINED, constraint_loss_layers=[0]), "constraint_loss_layers=[0]"),
    (dict(CONSTRAINED, constraint_name_coef=[1.0]), "constraint_name_coef=[1.0]"),
    (dict(CONSTRAINED, constraint_name_coef=[1.0, -1.0, 1.0]), "constraint_name_coef=[1.0, -1.0, 1.0]"),
    (dict(CONSTRAINED, constraint_heads=0), "constraint_heads=0"),
    (dict(CONSTRAINED, constraint_skip=0.1, constraint_gate="value"), "constraint_skip=0.1"),
    (dict(constraint_names=["a", "a"]), "constraint_names=['a', 'a']"),
    (dict(constraint_names=["a.b"]), "constraint_names=['a.b']"),
    (dict(a2c="temperature", a2c_gamma=1.0), "a2c_gamma=1.0"),
    (dict(roles=["near"]), "roles=['near']"),
    (dict(roles=[]), "roles=[]"),
    (dict(roles=["free"] * 7), "roles=['free', 'free'"),
    (dict(roles=["long"], roles_strength=-1.0), "roles_strength=-1.0"),
    (dict(roles=["long"], roles_waves=0), "roles_waves=0"),
    (dict(agency_learned=True), "agency_learned=True"),
    (dict(window=4, window_layers=[2]), "window_layers=[2]"),
    (dict(output_gate="headwise", output_gate_width=49), "output_gate_width=49"),
    (dict(head_ids=[[0, 1]]), "head_ids=[[0, 1]]"),
    (dict(n_kv_head=3, head_ids=[[0], [0, 1]]), "head_ids=[[0], [0, 1]]"),
    (dict(n_kv_head=4), "n_kv_head=4"),
    (dict(n_kv_head=0), "n_kv_head=0"),
    (dict(n_kv_head=3, a2c="published"), "n_kv_head=3"),
    (dict(short_conv="qkv", short_conv_width=1), "short_conv_width=1"),
    (dict(value_residual=True, n_layer=1), "value_residual=True"),
    (dict(n_inner=0), "n_inner=0 must be at least 1"),

    # sizes of constraint heads
    (dict(B, constraint_heads=50), "^constraint_variant='B' leaves 64 / 154 heads, less than 1 wide each$"),
    (dict(B, constraint_round=16), "^constraint_variant='B' leaves 64 / 7 heads, less than 16 wide each$"),
    (dict(B, constraint_heads=6, key_offset=True), "^key_offset needs a head size of at least 4: "
     "constraint_variant='B' leaves 2$"),
    (dict(B, constraint_variant="A", constraint_round=8), "^constraint_round=8 needs constraint_variant='B': "
     "heads of 'A' are as wide as the layer's others$"),

    # what does not go together
    (dict(acag="headwise", dropout=0.1), "acag", "attn_dropout"),
    (dict(window=0, dropout=0.1), "window", "attn_dropout"),
    (dict(window=4, attn_dropout=0.1), "window", "attn_dropout"),
    (dict(n_embd=18, key_offset=True), "key_offset", "head size"),
    (dict(CONSTRAINED, constraint_variant="B", constraint_heads=4, key_offset=True),
     "key_offset", "head size", "constraint_variant='B'"),
    (dict(a2c="published", head_dim=4), "a2c='published'", "head_dim=4"),
]

TRAIN_CONFIGS = [
    (dict(init_anyway=True), "init_anyway=True", "init_from"),
    (dict(profile=2, eval_only=True), "profile=2", "eval_only"),
    (dict(profile=0), "profile=0", "at least 1"),
]


@pytest.mark.parametrize("flags, words", [(flags, words) for flags, *words in GPT_CONFIGS],
                         ids=lambda v: "-".join(v) if isinstance(v, dict) else "")
def test_a_gpt_that_cannot_be_is_one_line(flags, words):
    config = GPTConfig(**{**SIZES, **flags})
    problem, = config.problems()
    assert "\n" not in problem and all(word in f"^{problem}$" for word in words), problem
    with pytest.raises(ValueError) as e:
        GPT(config)
    assert str(e.value) == problem


@pytest.mark.parametrize("flags, words", [(flags, words) for flags, *words in TRAIN_CONFIGS])
def test_a_training_that_cannot_be_is_one_line(flags, words):
    problem, = TrainConfig(**flags).problems()
    assert "\n" not in problem and all(word in f"^{problem}$" for word in words), problem


# ---- command lines ----

TRAIN = " ".join(["train.py", *(f"--{key}={value}" for key, value in RUN.items()), "--dataset=sums"])
OVER = "train.py --dataset=paragraphs --device=cpu --max_iters=6 --lr_decay_iters=20 --out_dir=new"

COMMANDS = [
    # ---- train.py: what no run can be ----
    *under(f"{TRAIN} --out_dir=new",
        ("--out_dir=", "--out_dir needs a value", "variable of the shell"),
        ("--init_from=", "--init_from needs a value"),
        ("--rope_base=0 --pos=rope", "rope_base=0.0 must be above 0"),
        ("--rope_base=-1.0", "rope_base=-1.0 must be above 0"),
        (f"--n_embd={10**9}", "^train: out of memory; ", "a lower n_embd, n_layer or vocab_size$"),
        (f"--n_layer={10**12}", "n_layer=1000000000000", "at most"),
        (f"--vocab_size={10**15}", "^train: out of memory; ", "a lower n_embd, n_layer or vocab_size$"),
        ("--seed=-1", "seed=-1"),
        ("--device=cuda:77", "^train: device=cuda:77 cannot be used"),
        ("--compile_mode=reduce-overhead",
         "compile_mode='reduce-overhead' replays CUDA graphs, and this run is on cpu")),

    # ---- train.py: what is missing or damaged, and whose folder it is ----
    *under(TRAIN,
        ("--out_dir=x --dataset=enwik9", "^train: no dataset enwik9; did you mean enwik8?$"),
        ("--out_dir=x --init_from=no.pt", "^train: no checkpoint no.pt"),
        ("--out_dir=x --init_from=broken.pt", "^train: broken.pt cannot be read as a checkpoint"),
        ("--out_dir=hello --resume", "^train: hello/ckpt.pt cannot be read as a checkpoint"),
        ("--out_dir=x --block_size=3000",
         "^train: block_size=3000 needs at least 3,000 tokens of val; sums has 2,000$"),
        ("--out_dir=x --documents=4", "^train: sums/train.bin has no documents",
         "no end-of-text token, title or blank line says where one begins"),
        ("--out_dir=x --dataset=paragraphs --documents=8 --batch_size=100000",
         "fewer than the 100,000 of a batch"),
        ("--out_dir=file/run", "^train: file/run: Not a directory$"),
        ("--out_dir=file", "^train: file: File exists$"),
        ("--out_dir=run", "^train: run already holds a run; go on with --resume, start over with "
                          "--overwrite, or choose another --out_dir$"),
        ("--out_dir=best_only", "take its weights with --init_from=best_only/best.pt"),
        ("--out_dir=best_only --resume", "take its weights with --init_from=best_only/best.pt"),
        ("--out_dir=not_last --resume --max_iters=9", "holds no state to go on from")),

    *under("train.py",
        *((f"--out_dir=nothing --resume --device=cpu {more}", "^train: nothing holds no run to go on with, "
           "neither config.json nor ckpt.pt, and this command does not say what to train")
          for more in ("", "--max_iters=9"))),

    # ---- train.py: what contradicts the run that is there ----
    *under(f"{TRAIN} --out_dir=run --resume --max_iters=12",
        ("--n_layer=3 --recipe=modern", "^train: run/ckpt.pt", "n_layer=3", "recipe='modern'", "pos='rope'",
         "norm='rmsnorm'", "act='relu2'", "qk_norm=True", "embed_norm=True", "tied=False", "zero_init=True"),
        ("--optimizer=muon --batch_size=8", "optimizer='muon'", "batch_size * grad_accum=8", "--init_from"),
        ("--dataset=letters", "vocabulary", "letters")),
    *under(f"{TRAIN} --init_from=run --out_dir=new",
        ("--n_layer=3 --block_size=64",
         "^train: run holds another model: block_size=64 here is 32 there; n_layer=3 here is 2 there$")),
    *under("train.py --dataset=sums --device=cpu --eval_only --eval_tokens=512",
        ("--out_dir=run --n_layer=7", "^train: run holds another model: n_layer=7 here is 2 there$"),
        ("--out_dir=nowhere", "^train: no checkpoint nowhere")),

    # ---- train.py: what means nothing over a checkpoint, and of documents ----
    *under(f"{OVER} --init_from=run",
        ("--skip_lr=1e-3", "skip_lr=0.001"),
        ("--skip_lr=0.0 --unet=add", "skip_lr=0.0"),
        ("--freeze_trunk", "freeze_trunk=True"),
        ("--freeze_trunk --agency --head_norm --init_anyway", "freeze_trunk=True"),
        ("--freeze_trunk --unet=add --unet_skips=False", "freeze_trunk=True"),
        ("--thaw_from=3", "thaw_from=3"),
        ("--freeze_trunk --xsa --thaw_from=6", "thaw_from=6"),
        ("--freeze_trunk --xsa --thaw_from=0", "thaw_from=0"),
        ("--unet=add --unet_from=6", "unet_from=6"),
        ("--unet=add --unet_from=-1", "unet_from=-1"),
        ("--unet=add --unet_ramp=3 --unet_skips=False", "unet_skips=False"),
        ("--documents=0", "documents=0"),
        ("--documents=17", "documents=17"),
        ("--documents=8 --routing=moh", "routing_coef=0.01"),
        ("--documents=8 --documents_packed=whole --routing=moh", "routing_coef=0.01"),
        ("--documents=17 --documents_packed=whole", "documents=17"),
        ("--documents=0 --documents_packed=whole", "^train: documents=0 must be at least 1$"),
        ("--documents=8 --documents_packed=cut --attn_dropout=0.1",
         "documents_packed has no fused kernel with dropout"),
        ("--documents_packed=cut", "documents_packed='cut' means nothing without documents"),
        ("--documents=8 --documents_packed=half", "documents_packed='half' is not whole, cut or None"),
        ("--documents=8 --constraint_names=\"['a']\" --constraint_entropy_coef=0.1 --init_anyway",
         "constraint_entropy_coef=0.1")),
    *under(OVER, ("--freeze_trunk --xsa", "init_from"), ("--unet_ramp=3", "unet_ramp=3")),

    # ---- sample.py ----
    *under("sample.py --ckpt=chars.pt",
        ("--temperature=-1", "temperature=-1.0 must be 0"),
        ("--temperature=nan", "temperature=nan"),
        ("--top_k=0", "top_k=0"),
        ("--top_p=0", "top_p=0.0"),
        ("--top_p=1.5", "top_p=1.5"),
        ("--top_p=nan", "top_p=nan"),
        ("--repetition_penalty=0", "repetition_penalty=0.0"),
        ("--repetition_penalty=inf", "repetition_penalty=inf"),
        ("--num_samples=0", "num_samples=0 must be at least 1"),
        ("--max_new_tokens=0", "max_new_tokens=0 must be at least 1"),
        ("--seed=-1", "seed=-1"),
        (f"--seed={'9' * 30}", "seed=999"),
        ("--num_samples=100000000", "num_samples=100000000 of max_new_tokens=300 are too many"),
        (f"--max_new_tokens={'9' * 30}", "are too many"),
        ("--device=gpu", "device=gpu cannot be used"),
        ("--start=FILE:.", "cannot be read: Is a directory"),
        ("--start=FILE:nowhere.txt", "nowhere.txt cannot be read: No such file"),
        ("--start=FILE:latin1.txt", "latin1.txt is not UTF-8 text")),
    *under("sample.py",
        ("--out_dir", ": --out_dir needs a value"),
        ("--ckpt=bytes.pt --ckpt=chars.pt --start=abcZ", "'Z' (U+005A) at position 3", "chars.pt"),
        ("--ckpt=dna.pt --start=a --stop", "^sample: --stop: this vocabulary has neither a newline nor an "
                                           "end-of-text token to stop at$"),
        ("--ckpt=dna.pt --start=a --stop --num_samples=2", "^sample: --stop: this vocabulary has neither a "
                                                           "newline nor an end-of-text token to stop at$")),
    *under("sample.py --ckpt=switched.pt",
        ("--set=unet_skip=False", "unknown key unet_skip; did you mean unet_skips?"),
        ("--set=unet_skips=3", "'3' is not bool"),
        ("--set=gate.0.5=0", "block 0 has no head 5"),
        ("--set=gate.0.0=1e39", "gate.0.0=1e+39: the gate must be a number of at most 3.40282e+38"),
        ("--set=gate.0.0=-1e39", "the gate must be a number of at most 3.40282e+38"),
        ("--set=gate.0.0=nan", "'nan' is not float"),
        ("--set=n_layer=1", "switched.pt: n_layer cannot be changed after training")),
    *under("sample.py",  # checkpoints that cannot speak
        ("--ckpt=nowhere.pt", "nowhere.pt"), ("--ckpt=short.pt", "short.pt"),
        ("--ckpt=broken.pt", "broken.pt"), ("--ckpt=list.pt", "list.pt"),
        ("--ckpt=chars_nan.pt --start=abc --temperature=0", "^sample: chars_nan.pt: ",
         "weight holds NaN or infinities"),
        ("--ckpt=chars_nan.pt --start=abc --temperature=0.8", "^sample: chars_nan.pt: ",
         "weight holds NaN or infinities"),
        ("--ckpt=number.pt", "^sample: number.pt: its vocabulary cannot be read"),
        ("--ckpt=numbers.pt", "^sample: numbers.pt: its vocabulary cannot be read"),
        ("--ckpt=float.pt", "^sample: float.pt is damaged: its meta does not say what its tokens mean"),
        ("--ckpt=doubled.pt", "^sample: doubled.pt",
         "its vocabulary cannot be read: a character vocabulary is a list"),
        ("--ckpt=owt.pt", "no dataset owt"),
        ("--ckpt=unnamed.pt", "does not say what it was trained on; name it with --dataset"),
        ("--ckpt=none.pt", "does not say what it was trained on"),
        ("--ckpt=five.pt", "knows 5 tokens; toy has 13")),

    # ---- evaluate.py ----
    *under("evaluate.py --ckpt=switched.pt",
        ("--split=dev", "no split 'dev'; it has train, val, test"),
        ("--stride=9", "stride=9 must be from 1 to block_size=8"),
        ("--stride=-1", "stride=-1 must be from 1 to block_size=8"),
        ("--tokens=0", "--tokens 0 must be at least 1"),
        ("--batch_size=-1", "--batch_size -1 must be"),
        ("--dataset=nothing_like_it", "no dataset nothing_like_it"),
        ("--dataset=toy", "whose vocabulary is not that of toy (char, 13)"),
        ("--json=no/such/folder.json", "cannot write into"),
        ("--json=.", "is not a file"),
        ("--json=pipe", "is not a file"),
        ("--split=dev --json=old.json", "no split 'dev'"),  # which stays as it is
        ("--device=gpu", "device=gpu cannot be used")),
    *under("evaluate.py",
        ("--ckpt=nowhere.pt", "nowhere.pt"), ("--ckpt=short.pt", "short.pt"),
        ("--ckpt=broken.pt", "broken.pt"), ("--ckpt=list.pt", "list.pt"),
        ("--ckpt=nan.pt", "nan.pt: transformer.wte.weight holds NaN or infinities"),
        ("--ckpt=large.pt", "large.pt gives nan nats"),
        ("--baseline_checkpoint", ": --baseline_checkpoint needs a value"),
        ("--ckpt=bytes.pt --set=state.0.1=withdrawn", "state.0.1=withdrawn: the model has no head states")),
    *under("evaluate.py --ckpt=switched.pt --set",  # what cannot be changed after training
        ("unet_skip=False", "--set unet_skip=False: unknown key unet_skip; did you mean unet_skips?"),
        ("gates.0.1=0", "unknown key gates.0.1; did you mean gate?"),
        ("zzz=1", "unknown key zzz; train.py --help lists"),
        ("unet_skips", "--set unet_skips: it must be unet_skips=value"),
        ("unet_skips=maybe", "'maybe' is not bool"),
        ("routing_top_k=2.5", "'2.5' is not int or None"),
        ("unet_init=nan", "'nan' is not float"),
        ("gate=0", "--set gate=0: it must be gate.<layer>.<head>=value"),
        ("gate.0=0", "--set gate.0=0: it must be gate.<layer>.<head>=value"),
        ("gate.0.x=0", "it must be gate."),
        ("gate.0.1", "it must be gate."),
        ("gate.0.-1=0", "it must be gate."),
        ("gate.0.1.2=0", "it must be gate."),
        ("gate.0.1=high", "'high' is not float"),
        ("gate.0.1=nan", "'nan' is not float"),
        ("consent.0.1=perhaps", "'perhaps' is not bool"),
        ("gate.0.4=0", "--set gate.0.4=0.0: block 0 has no head 4; it has 0, 1, 2, 3"),
        ("consent.2.0=no", "there is no block 2; they go from 0 to 1"),
        ("state.0.1=asleep", "state 'asleep' must be one of active, overloaded, misaligned, withdrawn"),
        ("n_embd=32", "n_embd cannot be changed after training: "),
        ("block_size=4", "block_size cannot be changed after training: transformer.wpe"),
        ("unet=add", "unet cannot be changed after training: fuse.0.logit"),
        ("routing=None", "routing cannot be changed after training"),
        ("sentinel=sigmoid", "sentinel cannot be changed"),
        ("n_head=2", "n_head cannot be changed"),
        ("tied=False", "tied cannot be changed"),
        ("recipe=modern", "recipe cannot be changed after training"),
        ("n_layer=1", "n_layer cannot be changed after training"),
        ("routing_top_k=5", "switched.pt: routing_top_k=5 must be from 1 to n_head=4"),
        ("window_global=1", "means nothing while window is off")),

    # ---- plot_curves.py ----
    *under("plot_curves.py",
        ("--log_file", ": --log_file needs a value"),
        ("--x epochs", "invalid choice: 'epochs'"),
        ("--heads --x tokens", "--heads knows steps alone"),
        ("curves/a curves/b --out=/proc/x", "--out: cannot write into /proc (No such file or directory)"),
        ("curves/a curves/b --out=file", "is a file, not a folder; name another one"),
        ("curves/a curves/b --out=file/x", "is a file, not a folder; name another one"),
        ("occupied/file", "cannot make the folder occupied/file/figures (File exists)")),

    # ---- data/prepare_text.py ----
    *under("data/prepare_text.py --out=mine",
        ("", "--source"),
        ("--source=empty.txt", "is empty"),
        ("--source=nothing.txt", "no such file"),
        ("--source=corpora", "no .txt"),
        ("--source=small.txt", "too small"),
        ("--source=whole.txt --val=0.6 --test=0.5", "--val"),
        ("--source=whole.txt --val=0", "--val"),
        *((f"--source=latin.txt --encoding={encoding}", "latin.txt", "not UTF-8 at byte 2,001",
           "; convert it, or take --errors=replace or --encoding=byte$") for encoding in ("char", "gpt2")),
        ("--source=cut.txt --encoding=char", "at byte 2,000"),
        ("--source=crlf.txt --separator=<eos>", "is not in the text"),
        ("--source=crlf.txt --separator=", "--separator is empty")),

    # ---- data/NAME/prepare.py ----
    *under("data/wikitext2/prepare.py --out=mine",
        ("--source=/nowhere", "/nowhere", "--source"),
        ("--source=corpora", "corpora", "train.txt"),
        ("--source=whole.txt", "one file")),
    *under("data/enwik8/prepare.py --out=mine", ("--source=whole.txt", "whole.txt", "100,000,000")),
    *under("data/pystdlib/prepare.py --out=mine", ("--source=corpora", "corpora", "no .py")),
    *under("data/openwebtext/prepare.py --out=mine", ("--source=corpora", "corpora", ".parquet")),
]


@pytest.mark.parametrize("command, words", COMMANDS)
def test_a_command_that_cannot_be_is_one_line(command, words, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    monkeypatch.delenv("NANOHEADS_DATA", raising=False)
    monkeypatch.setattr(corpus, "BLOCK", 1000)  # so that the texts above are of several
    monkeypatch.setattr(corpus, "HOME", home / "corpora")
    check_refusal(command, words, home, capsys)


@pytest.mark.parametrize("command, words, changes", [
    ("sample.py --ckpt=chars.pt --top_k=0", ["top_p=0"], False),
    ("sample.py --ckpt=chars.pt --top_k=0", ["^top_k=0"], False),
    ("sample.py --ckpt=chars.pt --start=ab --max_new_tokens=1", ["ab"], False),
    ("sample.py --ckpt=chars.pt --top_k=0", ["top_k=0"], True)])
def test_what_is_no_such_refusal_is_found(command, words, changes, tmp_path, monkeypatch, capsys):
    """Controls: other words, words elsewhere in the line, a command that goes through, a file left behind."""
    monkeypatch.chdir(tmp_path)
    make_checkpoint("chars.pt")
    if changes:
        monkeypatch.setattr(sample, "check", lambda args: Path("left").touch() or top_k_is_wrong())
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_refusal(command, words, tmp_path, capsys)


def top_k_is_wrong():
    raise UserError("top_k=0")
