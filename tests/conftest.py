"""What all tests share: the repository on the path, one thread, and a tiny data folder."""
import hashlib
import json
import os
import shutil
import signal
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: no test asks the network

from nanoheads import threads  # noqa: E402, F401  before torch, whose threads it has wait briefly

import torch  # noqa: E402

import train  # noqa: E402
from browser import CHROMIUM, Browser  # noqa: E402
from helpers import CODE, ROOT, SMALL, Here, NoThreads  # noqa: E402
from nanoheads.common import OWN_FILES  # noqa: E402
from nanoheads import own_mechanism as own, replaced  # noqa: E402
from nanoheads import causality  # noqa: E402
from lab.study import costs, digest, queue, results  # noqa: E402
from nanoheads import corpus  # noqa: E402
from nanoheads.corpus import Writer  # noqa: E402
from nanoheads.tokenizer import Tokenizer  # noqa: E402

torch.set_num_threads(1)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and what it starts does too
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in what a shell without jobs starts with &
    signal.signal(signal.SIGINT, signal.default_int_handler)
TINY = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4,
            max_iters=6, eval_interval=3, eval_tokens=512, log_interval=1,
            device="cpu", lr_decay_iters=100)  # a run of train.py, in a second


def write_dataset(folder, splits, encoding="byte", vocab=None):
    """A data folder as a prepare script writes it, from {split: bytes}."""
    tokenizer = Tokenizer(encoding, vocab)
    with Writer(SimpleNamespace(out=folder, name=folder.name), tokenizer, {"file": "made up"}) as writer:
        for split, text in splits.items():
            writer.add_pieces(split, [text])
    return folder


def forget_code():
    """Have files of code read again: in one process they are read once, as they were when it began."""
    for cached in (digest.digest_of, digest.files_of, digest.tree_of, digest.statements_of):
        cached.cache_clear()


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


@pytest.fixture(scope="session")
def bytes_data(tmp_path_factory):
    """A byte dataset: 20,000 bytes of easily learnt text to train on, 2,000 to validate, 1,000 to test."""
    text = b"".join(b"%d plus %d is %d.\n" % (i % 13, i % 7, i % 13 + i % 7) for i in range(2000))
    folder = tmp_path_factory.mktemp("data") / "sums"
    return write_dataset(folder, {"train": text[:20000], "val": text[20000:22000], "test": text[22000:23000]})


@pytest.fixture(scope="session")
def chars_data(tmp_path_factory):
    """A char dataset with a vocabulary of ten symbols."""
    text = "".join("abcdefgh \n"[i * i % 10] for i in range(2000))
    folder = tmp_path_factory.mktemp("data") / "letters"
    return write_dataset(folder, {"train": text[:1500], "val": text[1500:1800], "test": text[1800:]},
                         "char", sorted(set("abcdefgh \n")))


@pytest.fixture
def gpt2_files(tmp_path, monkeypatch):
    """The folder of GPT-2's byte pairs, data/ or $NANOHEADS_DATA; what is kept of them goes elsewhere."""
    folders = ROOT / "data", Path(os.environ.get("NANOHEADS_DATA") or ROOT / "../shared/data").resolve()
    found = [folder for folder in folders if all(
        (folder / file.names[0]).is_file() for file in (corpus.GPT2_MERGES, corpus.GPT2_ENCODER))]
    if not found:
        pytest.skip("no GPT-2 files: put gpt2_bpe/ into the folder NANOHEADS_DATA")
    (tmp_path / "kept").mkdir()
    monkeypatch.setenv("NANOHEADS_DATA", str(found[0]))
    monkeypatch.setattr(corpus, "HOME", tmp_path / "kept")
    return found[0]


@pytest.fixture
def refusal(request, capsys):
    """refusal(args) -> the one line that the tested script's main(args) ends with, nothing printed before.

    The line begins with the program's name: the test module's PROGRAM, or the script's own.
    """
    script = request.module.main
    program = getattr(request.module, "PROGRAM", script.__module__)

    def call(args):
        with pytest.raises(SystemExit) as e:
            script(args)
        assert isinstance(e.value.code, str) and "\n" not in e.value.code
        assert e.value.code.startswith(f"{program}: ")
        assert capsys.readouterr().out == ""
        return e.value.code
    return call


@pytest.fixture(params=["missing", "cut short", "no torch file", "foreign"])
def bad_checkpoint(request, tmp_path):
    """(path, what must be in the line about it)."""
    path = tmp_path / "bad.pt"
    if request.param == "missing":
        return str(path), str(path)
    torch.save([1, 2], path)
    if request.param == "foreign":
        return str(path), "bad.pt"
    path.write_bytes(path.read_bytes()[:-100] if request.param == "cut short" else b"PK broken")
    return str(path), "bad.pt"


@pytest.fixture
def unreadable():
    """unreadable(folder, name) -> a copy of the folder, of which this process may not read the file `name`.

    Root may read everything, so until the test ends it is another user, who may not enter its own folders.
    """
    before = os.geteuid()
    with tempfile.TemporaryDirectory() as place:
        def make(folder, name):
            copied = Path(shutil.copytree(folder, Path(place, "copied")))
            for path in (Path(place), copied, *copied.iterdir()):
                path.chmod(0o755)
            (copied / name).chmod(0)
            os.seteuid(before or 65534)
            return copied
        yield make
        os.seteuid(before)


@pytest.fixture
def rows():
    """rows(run folder) -> (training rows, evaluation rows) of its log.jsonl."""
    def read(out):
        every = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
        return [r for r in every if "loss" in r], [r for r in every if "val_loss" in r]
    return read


@pytest.fixture
def args(bytes_data, tmp_path):
    """args(out="run", **keys) -> a command line for a tiny run in tmp_path / out."""
    def make(out="run", **keys):
        keys = {"dataset": bytes_data, **TINY, "out_dir": tmp_path / out, **keys}
        return [f"--{key}={value}" for key, value in keys.items() if value is not ...]
    return make


@pytest.fixture
def fails(capsys):
    """fails(argv) -> what a run that the user got wrong says: lines, each "train: ...", and exit code 1."""
    def run(argv):
        with pytest.raises(SystemExit) as e:
            train.main(argv)
        assert isinstance(e.value.code, str) and "Traceback" not in capsys.readouterr().err
        lines = e.value.code.splitlines()
        assert all(line.startswith("train: ") for line in lines)
        return [line.removeprefix("train: ") for line in lines]
    return run


@pytest.fixture
def free_port():
    """A port of this machine that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def pass_of(model, x, **wanted):
    """The Heads in which a model's first block reads x [B, T, C], without a cache."""
    T = x.size(1)
    return model.make_heads(model.mask_of(0), slice(0, T), 0, T, None, None, x.device, **wanted)


@pytest.fixture
def own_mechanisms_go():
    """What a test adds of mechanisms in files of one's own goes with it: flags are those of all tests."""
    with without_own_mechanisms():
        yield


@contextmanager
def without_own_mechanisms():
    """Forget the mechanisms that were added inside: flags, classes, modes, and the modules of their files."""
    before = {*own.ADDED}
    yield
    forget_own_mechanisms(before)


def forget_own_mechanisms(but=()):
    """As in a process that has added none, but for these classes."""
    own.remove({*own.ADDED} - {*but})
    OWN_FILES.intersection_update(str(file.path) for file in own.ADDED.values())
    replaced.BEFORE.clear()


@pytest.fixture
def mine(tmp_path, own_mechanisms_go):
    """mine(before, after) -> the path of the page's file with an edit; what was added goes with the test."""
    def write(before="", after="", name="mine.py"):
        assert CODE.count(before) == 1 or not before
        path = tmp_path / name
        path.write_text(CODE.replace(before, after) if before else CODE, encoding="utf-8")
        return path

    return write


def small_plain(folder, data, monkeypatch):
    """A config file of a plain GPT that trains in a moment; its folder is made the working directory."""
    monkeypatch.chdir(folder)
    path = folder / "plain.py"
    path.write_text(SMALL + f"dataset = {str(data)!r}\n")
    return path


@pytest.fixture
def plain(tmp_path, bytes_data, monkeypatch):
    """The config file of a plain GPT that trains in a moment, and an empty folder for runs."""
    return small_plain(tmp_path, bytes_data, monkeypatch)


def in_this_process(monkeypatch):
    """A place to run trials without processes, in a moment.

    The time of a step is made up, samples are short, and nobody looks for leaks before and after each run:
    tests/probes/test_lookahead.py has runs that look, and takes most of a run's time for it.
    """
    monkeypatch.setattr(queue, "ThreadPoolExecutor", NoThreads)
    monkeypatch.setattr(causality, "refuse", lambda *args, **keys: "nowhere, in a test")
    monkeypatch.setattr(results, "SAMPLE_TOKENS", 20)
    row = dict(ratio=1.1, low=1.0, high=1.2, ratios=[1.0, 1.1, 1.2], clock="wall", load=0.0, cores=2,
               processor="AMD EPYC", compiled=False, threads=1)
    monkeypatch.setattr(costs, "step_time_ratios", lambda found, *args: {each.name: row for each in found})
    return Here()


@pytest.fixture
def here(monkeypatch):
    return in_this_process(monkeypatch)


@pytest.fixture
def browser(tmp_path):
    """A Browser, whose pages logged nothing and asked for nothing when the test is over."""
    if not CHROMIUM:
        pytest.skip("no Chromium or Chrome is installed, so no page can be opened")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()
    assert browser.events and browser.complaints() == []
