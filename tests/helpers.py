"""What tests of several folders need: models, checkpoints, runs on two ranks, tables of refusals."""

import hashlib
import importlib
import itertools
import json
import math
import os
import re
import shlex
import sys
import traceback
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import assume, strategies as st

from model import GPT, MECHANISM_CLASSES, MECHANISMS, RECIPES, GPTConfig
from nanoheads import checkpoint, own_mechanism as own, prepare
from nanoheads.common import OWN_FILES
from nanoheads.configurator import alternatives, fields_of, is_choice
from nanoheads.dataset import Writer
from nanoheads.tokenizer import Tokenizer
from oracle import give_states

ROOT = Path(__file__).resolve().parents[1]


# ---- runs of train.py ----


def as_arguments(keys):
    """{key: value} as a command line says them; what is ... is left out."""
    return [f"--{key}={value}" for key, value in keys.items() if value is not ...]


def weights(path):
    return checkpoint.read(path)["model"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def untimed(rows):
    return [{k: v for k, v in row.items() if k not in ("elapsed_s", "tokens_per_s")} for row in rows]


# a process that is forked from this one need not import PyTorch
forks = pytest.mark.skipif(torch.accelerator.is_available(), reason="autograd's threads survive no fork")


def in_child(argv, before=lambda: None, out=None, err=None, fork=os.fork):
    """Run train.py in a forked process, as the program that it is; out and err: its streams, open files.

    before: called there first. Returns what `fork` does here: the number of the process first of all.
    """
    child = fork()
    if child if isinstance(child, int) else child[0]:
        return child
    code = 1
    try:
        for number, file in ((1, out), (2, err)):
            if file is not None:
                os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False, buffering=1) for number in (1, 2))
        before()
        importlib.import_module("train").main(argv)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
        if code == 1:
            print(e.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def ending(child):
    """The exit code of a process, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def unread():
    """Standard output inside is a pipe that nobody reads any more, as behind `| head -1`, line by line."""
    end, start = os.pipe()
    os.close(end)
    stream = open(start, "w", buffering=1)
    try:
        with redirect_stdout(stream):
            yield
    finally:
        with suppress(BrokenPipeError):
            stream.close()


# ---- data and runs ----

TINY = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4,
            max_iters=6, eval_interval=3, eval_tokens=512, log_interval=1,
            device="cpu", lr_decay_iters=100)  # a run of train.py, in a second


# a run of train.py on a task, with as little to it; rows have 12 tokens
TINY_TASK = dict(task="recall", task_keys=6, task_values=4, task_levels="1,2,3", task_test_levels="1,3",
                 task_rows=5, **{**TINY, "block_size": 12})
del TINY_TASK["eval_tokens"]  # of a text


def write_dataset(folder, splits, encoding="byte", vocab=None):
    """A data folder as a prepare script writes it, from {split: bytes}."""
    tokenizer = Tokenizer(encoding, vocab)
    with Writer(folder, folder.name, tokenizer, {"file": "made up"}) as writer:
        for split, text in splits.items():
            writer.add_text(split, text)
    return folder


def articles(n, seed):
    """The text of n WikiText articles of 1 to 400 words, in bytes."""
    rng, text = np.random.default_rng(seed), b""
    for i in range(n):
        words = rng.choice(["the", "river", "rivers", "of", "stone", "stones"], int(400 ** rng.random()))
        text += f" = Title {i} = \n \n {' '.join(words)} \n \n = = Section = = \n".encode()
    return text


def in_llm_c(tokens, magic=20240520, version=1, count=None):
    """A file in llm.c's format, in bytes; count: what its header says there are."""
    head = [magic, version, len(tokens) if count is None else count] + [0] * 253
    return np.array(head, "<i4").tobytes() + np.asarray(tokens, "<u2").tobytes()


def write_shards(folder, splits, kind="llm.c", files=None):
    """A data folder whose splits are in shards, from {split: [tokens of each shard]}.

    kind: llm.c, of GPT-2's vocabulary, or plain, of bytes. files: where the shards are to be, beside it.
    """
    files = files or folder
    for each in (folder, files):
        each.mkdir(parents=True, exist_ok=True)
    meta = dict(name=folder.name, encoding="gpt2", vocab_size=50257, dtype="uint16", separator=50256,
                splits={})
    if kind == "plain":
        meta.update(encoding="byte", vocab_size=256, dtype="uint8", separator=10)
    for split, parts in splits.items():
        shards = []
        for i, tokens in enumerate(parts):
            path = files / f"{split}_{i}.bin"
            path.write_bytes(in_llm_c(tokens) if kind == "llm.c" else np.asarray(tokens, "u1").tobytes())
            shards.append(dict(file=path.name if files == folder else str(path), tokens=len(tokens),
                               sha256=hashlib.sha256(path.read_bytes()).hexdigest(), format=kind))
        sums = [shard["sha256"] for shard in shards]
        whole = sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()
        n = sum(map(len, parts))
        meta["splits"][split] = dict(tokens=n, bytes=n if kind == "plain" else 3 * n, sha256=whole,
                                     shards=shards)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def put_split(folder, split, data):
    """Write other bytes into a split of a data folder, with their checksum in its meta.json."""
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"][split]["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / f"{split}.bin").write_bytes(data)
    (folder / "meta.json").write_text(json.dumps(meta))


def put_meta(folder, **fields):
    """Write other fields into the meta.json of a data folder; bytes, tokens and chars into each split's."""
    meta = json.loads((folder / "meta.json").read_text())
    for split in meta["splits"].values():
        split.update({key: fields[key] for key in ("bytes", "tokens", "chars") if key in fields})
    meta.update({key: value for key, value in fields.items() if key not in ("bytes", "tokens", "chars")})
    (folder / "meta.json").write_text(json.dumps(meta))


def pass_of(model, x, **wanted):
    """The ForwardPass in which a model's first block reads x [B, T, C], without a cache."""
    T = x.size(1)
    return model.make_forward_pass(model.mask_of(0), slice(0, T), 0, T, None, None, x.device, **wanted)


@contextmanager
def without_own_mechanisms():
    """Forget the mechanisms that were added inside: flags, classes, modes, and the modules of their files."""
    before = {*own.FILES}
    yield
    forget_own_mechanisms(before)


def forget_own_mechanisms(but=()):
    """As in a process that has added none, but for these classes."""
    own.remove({*own.FILES} - {*but})
    OWN_FILES.intersection_update(str(file.path) for file in own.FILES.values())


def curve(steps=60, every=20, floor=1.0):
    """Rows of a log whose loss falls to a floor."""
    for step in range(steps + 1):
        loss = floor + 4 * math.exp(-step / 15)
        at = {"step": step, "tokens": step * 768, "elapsed_s": step * 0.1}
        yield {**at, "loss": loss, "lr": 1e-3 * (1 - step / 100), "grad_norm": 0.9, "aux/penalty": 0.1}
        if step % every == 0:
            yield {**at, "train_loss": loss, "val_loss": loss + 0.1, "val_bpb": (loss + 0.1) * 1.5}


def write_run(run_dir, log):
    """A folder of a run with this log, rows or text."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text("{}")
    (run_dir / "log.jsonl").write_text(log if isinstance(log, str)
                                       else "".join(json.dumps(r) + "\n" for r in log))
    return run_dir


def words_in(svg):
    """The words of an SVG: matplotlib draws glyphs and writes each string as a comment beside them."""
    return " | ".join(re.findall(r"<!-- (.*?) -->", svg.read_text(), re.S))


# ---- models and checkpoints ----


# of six heads some go and some stay; variant B of constraint heads makes them 5 wide, an odd size
TINY_GPT = dict(block_size=16, vocab_size=37, n_layer=2, n_head=6, n_embd=48)


@torch.no_grad()
def alive(model, std=0.15, draw=0, states=True):
    """The module with a signal in every path: matrices are N(0, std), all other parameters N(1, 0.1).

    draw: the seed. states: of a GPT with agency, see give_states(); else all heads stay active.
    """
    torch.manual_seed(draw)
    for p in model.parameters():
        p.normal_(0.0, std) if p.dim() >= 2 else p.normal_(1.0, 0.1)
    if states and isinstance(model, GPT):
        give_states(model)
    return model


def tiny(flags={}, live=True, std=0.15, draw=0, states=True, **more):
    """A small GPT in float64, in evaluation: TINY_GPT with other flags. live: see alive(); else as it starts.
    """
    model = GPT(GPTConfig(**{**TINY_GPT, **more, **flags})).double().eval()
    return alive(model, std, draw, states) if live else model


VOCAB = ["\n", " ", *"abcdefghij", "é"]


def flags_of_variant_b(size, **more):
    """Two blocks, both with constraint heads. head_dim: 48 does not divide into 5 heads of a plain block."""
    C, H, names = size
    return dict(TINY_GPT, n_head=H, n_embd=C, head_dim=8, constraint_names=["a", "b", "c"][:names],
                constraint_layers=[0, 1], constraint_variant="B", constraint_hidden=12) | more


def config_of_variant_b(size, **more):
    return GPTConfig(**flags_of_variant_b(size, **more))


def meta_of(encoding, name="toy"):
    vocab, size, separator = dict(byte=(None, 256, 10), char=(VOCAB, len(VOCAB), 0),
                                  gpt2=(None, 50257, 50256))[encoding]
    counts = dict(tokens=1, bytes=1, chars=1, sha256="of no file")
    return dict(name=name, encoding=encoding, vocab_size=size,
                separator=separator, dtype="uint16", **({"vocab": vocab} if vocab else {}),
                splits={s: counts for s in ("train", "val", "test")})


def make_checkpoint(path, encoding="char", seed=0, vocab_size=None, **flags):
    """A checkpoint of a tiny random model; padded when vocab_size is above the encoding's."""
    meta = meta_of(encoding)
    model = GPT(GPTConfig(**{**dict(block_size=16, vocab_size=vocab_size or meta["vocab_size"],
                                    n_layer=1, n_head=2, n_embd=16, seed=seed), **flags}))
    weights = {k: 4 * v for k, v in model.state_dict().items()}  # so that the context shows in the text
    torch.save(dict(model=weights, config=asdict(model.config), meta=meta, step=1), path)
    return str(path)


def make_model(spread=3.0, noise=0.1, seed=1, dtype=torch.float32, **flags):
    """A tiny GPT of bytes, in evaluation, of which every token that is read shows in bits and samples.

    Its weights are `spread` times those that it starts with; noise: the deviation of what is added to them,
    also where they start at 0.
    """
    sizes = dict(block_size=32, vocab_size=256, n_layer=2, n_head=3, n_embd=24, seed=seed)
    model = GPT(GPTConfig(**{**sizes, **flags})).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(spread).add_(noise * torch.randn(p.shape, generator=generator, dtype=dtype))
    return model


# ---- tokenizers of others ----


def byte_pairs(text, *splits, normalizer=None, special=("<|endoftext|>",)):
    """The text of a tokenizer.json of GPT-2's kind, its merges learnt from a text.

    splits: its pre-tokenizers, a str: a pattern of Split; without any, merges may cross spaces. normalizer:
    the name of one.
    """
    pre = tokenizers.pre_tokenizers
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    steps = [pre.Split(tokenizers.Regex(each), "isolated") if isinstance(each, str) else each
             for each in splits]
    if not any(isinstance(each, pre.ByteLevel) for each in steps):
        steps.append(pre.ByteLevel(False, use_regex=False))
    own.pre_tokenizer = pre.Sequence(steps)
    if normalizer:
        own.normalizer = getattr(tokenizers.normalizers, normalizer)()
    own.decoder = tokenizers.decoders.ByteLevel()
    own.train_from_iterator([text], tokenizers.trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre.ByteLevel.alphabet(),
        special_tokens=[*special]))
    return own.to_str()


# ---- a mechanism of one's own: the file of docs/your-own-mechanism.md ----


PAGE = (ROOT / "docs" / "your-own-mechanism.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
CODE, = (text for text in EXAMPLES if "class Forgetting" in text)  # the one with a parameter


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Inside of it, the largest number of entries of a tensor that an operation gives."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.size = max(self.size, t.numel())
        return out


# ---- what is refused: tests/core/programs/test_refusals.py, tests/lab/programs/test_refusals_lab.py ----


def under(command, *rows):
    """Rows of a table of refusals: (more of this command line, words of its answer, ...) each."""
    for more, *words in rows:
        program = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), command.split()))
        yield pytest.param(f"{command} {more}", words, id=f"{program} {more}")


SPEAK_FIRST = "train.py", "bench.py", "data/"


def answer(command, capsys):
    """The one line, between ^ and $, with which the program of a command line refuses it.

    It exits with 1, or with 2 as argparse does, without a traceback and with nothing on standard output, but
    for what SPEAK_FIRST say of what they have read.
    """
    program, *argv = shlex.split(command)
    main = importlib.import_module(program.removesuffix(".py").replace("/", ".")).main
    with pytest.raises(SystemExit) as e, mock.patch("sys.argv", [program, *argv]):
        prepare.run(lambda: main(argv)) if program.startswith("data/") else main(argv)
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err and (shown.out == "" or program.startswith(SPEAK_FIRST)), shown
    line = e.value.code
    if line == 2:  # after how the program is used
        line = shown.err.removesuffix("\n").split("\n")[-1]
    assert "\n" not in line, line
    return f"^{line}$"


def files_in(folder):
    """{path: when it was written} of a folder, but for locks, notes of what was checked and what Python has
    compiled; folders: None.
    """
    return {path: path.stat().st_mtime_ns if path.is_file() else None for path in Path(folder).rglob("*")
            if path.name != "lock" and path.suffix != ".checked" and "__pycache__" not in path.parts}


def check_refusal(command, words, home, capsys):
    """A program's answer begins with its name and holds the words, and nothing in `home` has changed."""
    before = files_in(home)
    line, program = answer(command, capsys), command.split()[0]
    name = "error" if program.startswith("data/") else Path(program).stem
    assert re.match(rf"\^{name}(\.py( \w+)?)?: ", line) and all(word in line for word in words), line
    assert files_in(home) == before


def write_settings(path, values):
    """A file of settings as nanoGPT's are, {name: value}; its path as a string."""
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in values.items()))
    return str(path)


def save_model(path, model, data, dataset=None, **more):
    """A checkpoint of a model that was trained on a Dataset, which `dataset` names (None: by its folder)."""
    name = dataset or str(data.dir)
    torch.save(dict(model=model.state_dict(), config=asdict(model.config), meta=data.meta, step=1,
                    train=dict(dataset=name), dataset=name, **more), path)
    return str(path)


# ---- what hypothesis draws: values of flags, models, damage to files ----

TEXTS = st.text("abcXYZ019_-./ é", min_size=1, max_size=8).filter(lambda text: text == text.strip())
ANY_CHARACTER = st.characters(exclude_categories=())  # halves of surrogate pairs too, as JSON may hold them
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(ANY_CHARACTER, max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=4)


def values_of(t, limits, most=12):
    """Values of a type, out of the range that a flag's `limits` (see mechanism.flag) name and out of it.

    most: how far above the range's lower end whole numbers go, but for a few that are huge.
    """
    low = next((limits[key] for key in ("at_least", "above") if limits.get(key) is not None), None)
    high = next((limits[key] for key in ("at_most", "below") if limits.get(key) is not None), None)

    def of(kind):
        if kind is type(None) or is_choice(kind):
            return st.just(None if kind is type(None) else kind)
        if kind is bool:
            return st.booleans()
        if kind is int:
            first = int(low or 0)
            return st.integers(first, first + most) | st.sampled_from([first - 1, *([2**40] * (most > 12))])
        if kind is float:
            first = float(low or 0.0)
            last = float(first + 2.0 if high is None else high)
            return st.floats(first, last) | st.sampled_from([first, last, first - 1.0, last + 1.0])
        if kind is str:
            return TEXTS
        item, = kind.__args__
        return st.lists(values_of(item, {}, most), max_size=3)

    return st.one_of([of(kind) for kind in alternatives(t)])


def flags_of(*classes, but=()):
    """Strategy: {key: value} of some flags of these dataclasses, most of them in their ranges."""
    each = {f.name: values_of(t, f.metadata, most=40)
            for cls in classes for _, f, t in fields_of(cls) if f.name not in but}
    keys = st.lists(st.sampled_from(sorted(each)), min_size=1, max_size=6, unique=True)
    return keys.flatmap(lambda names: st.fixed_dictionaries({name: each[name] for name in names}))


@st.composite
def small_models(draw):
    """Strategy: flags of a small GPT with up to four mechanisms, and with some of their details, together."""
    flags = dict(recipe=draw(st.sampled_from([*RECIPES])), n_layer=draw(st.integers(1, 3)),
                 n_head=draw(st.sampled_from([2, 3, 4, 6])), block_size=16, vocab_size=37)
    flags["n_embd"] = 8 * flags["n_head"]
    if draw(st.booleans()):
        flags["n_kv_head"] = draw(st.sampled_from([n for n in (1, 2, 3) if not flags["n_head"] % n]))
    for name in draw(st.permutations([*MECHANISMS]))[:draw(st.integers(1, 4))]:
        if not flags.keys() & MECHANISMS[name].keys():  # else two modes of one thing
            flags |= MECHANISMS[name]
    details = {f.name: (t, f) for cls in MECHANISM_CLASSES if cls.flag in flags
               for _, f, t in fields_of(cls.Options) if f.name not in flags}
    if details:
        for name in draw(st.lists(st.sampled_from(sorted(details)), max_size=2, unique=True)):
            t, f = details[name]
            flags[name] = draw(values_of(t, f.metadata, most=4))
    assume(not GPTConfig(**flags).problems())
    return flags


def portions(length):
    """Strategy: sizes of the pieces in which so many tokens are read one after the other."""
    cuts = st.sets(st.integers(1, length - 1))
    return cuts.map(lambda at: [b - a for a, b in itertools.pairwise([0, *sorted(at), length])])


PLACE = st.floats(0, 1, exclude_max=True)  # as a share of the file
EDITS = st.lists(st.one_of(
    st.tuples(st.just("cut"), PLACE, st.integers(1, 2**16)),
    st.tuples(st.just("flip"), PLACE, st.integers(1, 255)),
    st.tuples(st.just("insert"), PLACE, st.binary(min_size=1, max_size=8))), min_size=1, max_size=3)


def damaged(content, edits):
    """Bytes of a file with some of them cut out, flipped or inserted; edits: as EDITS draws them."""
    for kind, place, what in edits:
        at = int(place * len(content))
        if kind == "cut":
            content = content[:at] + content[at + what:]
        elif kind == "insert":
            content = content[:at] + what + content[at:]
        elif content:
            content = content[:at] + bytes([content[at] ^ what]) + content[at + 1:]
    return content
