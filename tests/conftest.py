"""What all tests share: the repository on the path, one thread, and a tiny data folder."""
import json
import os
import shutil
import signal
import socket
import tempfile
from pathlib import Path

import hypothesis
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: no test asks the network

from nanoheads import threads  # noqa: E402, F401  before torch, whose threads it has wait briefly

import torch  # noqa: E402

import train  # noqa: E402
from helpers import (CODE, ROOT, TINY, TINY_TASK, articles, as_arguments,  # noqa: E402
                     without_own_mechanisms, write_dataset)
from nanoheads import corpus  # noqa: E402

# the same examples in each run, as many as a test says; all examples of a test have the same fixtures
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[
    hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow,
    hypothesis.HealthCheck.filter_too_much])
hypothesis.settings.load_profile("fixed")
torch.set_num_threads(1)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and what it starts does too
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in what a shell without jobs starts with &
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def articles_data(tmp_path_factory):
    """A byte dataset of articles, which are documents of 40 to 2,500 bytes: 120 to train on."""
    folder = tmp_path_factory.mktemp("data") / "articles"
    return write_dataset(folder, dict(train=articles(120, 1), val=articles(20, 2), test=articles(20, 3)))


@pytest.fixture(scope="session")
def finished_run(bytes_data, tmp_path_factory):
    """The folder of a tiny run that was trained to its end, with every file that a run writes: to be read.

    A test that changes something in it takes a copy, `tiny_run`.
    """
    folder = tmp_path_factory.mktemp("finished") / "run"
    train.main(as_arguments(dict(TINY, dataset=bytes_data, out_dir=folder)))
    return folder


@pytest.fixture
def tiny_run(finished_run, tmp_path):
    """A copy of the tiny run, in tmp_path / "tiny"."""
    return Path(shutil.copytree(finished_run, tmp_path / "tiny"))


@pytest.fixture
def gpt2_files(tmp_path, monkeypatch):
    """The folder of GPT-2's byte pairs, data/ or $NANOHEADS_DATA; what is kept of them goes elsewhere."""
    folders = [Path(folder) for folder in (ROOT / "data", os.environ.get("NANOHEADS_DATA")) if folder]
    found = [folder for folder in folders if all(
        (folder / "gpt2_bpe" / file.name).is_file() for file in (corpus.GPT2_MERGES, corpus.GPT2_ENCODER))]
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
    program = getattr(request.module, "PROGRAM", script.__module__.rpartition(".")[2])

    def call(args):
        with pytest.raises(SystemExit) as e:
            script(args)
        assert isinstance(e.value.code, str) and "\n" not in e.value.code
        assert e.value.code.startswith(f"{program}: ")
        assert capsys.readouterr().out == ""
        return e.value.code
    return call


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
        return as_arguments({"dataset": bytes_data, **TINY, "out_dir": tmp_path / out, **keys})
    return make


@pytest.fixture
def task_args(tmp_path):
    """task_args(out="run", **keys) -> a command line for a tiny run on a task in tmp_path / out."""
    def make(out="run", **keys):
        return as_arguments({**TINY_TASK, "out_dir": tmp_path / out, **keys})
    return make


@pytest.fixture(scope="session")
def task_run(tmp_path_factory):
    """The folder of a tiny run on the task recall; positions are rotary, so that rows may be longer."""
    out = tmp_path_factory.mktemp("runs") / "recall"
    train.main(as_arguments(dict(TINY_TASK, out_dir=out, recipe="modern", n_layer=2, n_head=4)))
    return out


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


@pytest.fixture
def own_mechanisms_go():
    """What a test adds of mechanisms in files of one's own goes with it: flags are those of all tests."""
    with without_own_mechanisms():
        yield


@pytest.fixture
def mine(tmp_path, own_mechanisms_go):
    """mine(before, after) -> the path of the page's file with an edit; what was added goes with the test."""
    def write(before="", after="", name="mine.py"):
        assert CODE.count(before) == 1 or not before
        path = tmp_path / name
        path.write_text(CODE.replace(before, after) if before else CODE, encoding="utf-8")
        return path

    return write
