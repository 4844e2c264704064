"""Files are whole or not there, a folder has one writer; names of folders, checksums of data."""

import json
import os
import re
import select
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import train
from helpers import ROOT, TINY, as_arguments, ending, forks, in_child, write_settings, write_shards
from nanoheads import checkpoint, files
from nanoheads.batches import Batches
from nanoheads.common import UserError, write_atomic, write_json, writable, writable_folder
from nanoheads.config import TrainConfig
from nanoheads.dataset import Dataset
from nanoheads.files import LONGEST, choose_folder, folders_named, name_of_words, only_writer
from nanoheads.log import read_rows
from nanoheads.start import RUN_FILES, checkpoint_of, settings_in

# ---- whole files or none ----

PIECES = st.lists(st.binary(max_size=300), max_size=5)


@settings(max_examples=20)
@given(PIECES, PIECES, st.integers(0, 5))
def test_a_file_is_the_old_one_or_the_new_one(tmp_path, before, after, at):
    """Also where writing it fails after some pieces, and where a killed process left half of one."""
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    (tmp_path / "file.part").write_bytes(b"half of")
    write_atomic(path, lambda file: file.writelines(before))

    def write(file):
        file.writelines(after[:at])
        if at < len(after):
            raise OSError(28, "No space left on device")
        file.writelines(after[at:])
    try:
        write_atomic(path, write)
    except UserError as e:
        assert str(e) == f"could not write {path} (No space left on device); the previous one is intact"
        after = before
    assert path.read_bytes() == b"".join(after) and [*tmp_path.iterdir()] == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows opens no folder as a file")
def test_a_file_and_then_its_name_reach_the_disk_before_anybody_relies_on_them(monkeypatch, tmp_path):
    """Else after a power failure there may be an empty file of the right name."""
    done, sync, rename = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.fstat(file).st_ino), sync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("rename"), rename(old, new)))
    write_atomic(tmp_path / "file", lambda file: file.write(b"new"))
    assert done == [(tmp_path / "file").stat().st_ino, "rename", tmp_path.stat().st_ino]


def test_json_has_no_nan(tmp_path):
    write_json(tmp_path / "a.json", {1: float("nan"), "b": (torch.tensor(2.5).numpy(), float("inf"))})
    assert json.loads((tmp_path / "a.json").read_text()) == {"1": None, "b": [2.5, None]}


def test_places_that_take_no_files_are_named_before_the_work(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for bad, words in ((file, "is a file, not a folder"), (file / "x" / "y", f"{file} is a file"),
                       ("/proc/x", "cannot write into /proc")):
        with pytest.raises(UserError, match=words):
            writable_folder(bad)
    for bad, words in (("/proc/x", "cannot write into /proc"), (tmp_path / "no/x", "No such file"),
                       (tmp_path, "is not a file"), (tmp_path / "loop", "is not a file")):
        with pytest.raises(UserError, match=f"^--json: .*{words}"):
            writable(bad)
    assert writable_folder(tmp_path / "new/one") == tmp_path / "new/one" and writable(file) == file
    assert {*tmp_path.iterdir()} == {file, tmp_path / "loop"}, "a check leaves nothing behind"


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can be another user")
def test_a_folder_that_may_not_be_written_is_one_line(args, tmp_path, unreadable, fails, bytes_data):
    folder = unreadable(bytes_data, "test.bin")
    line, = fails(args(dataset=folder, out_dir=folder / "run"))
    assert line == f"{folder}/run: Permission denied"


# ---- one writer ----

@pytest.fixture
def writer():
    """writer(folder) -> a living process that writes into a folder as soon as no other does, and says so."""
    started = []

    def start(folder):
        code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from nanoheads.files import only_writer\n"
                "print('waits', flush=True)\n"
                f"with only_writer({str(folder)!r}, wait=True):\n"
                "    print('has it', flush=True); sys.stdin.read()")
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "waits\n"
        return process
    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_writer_is_refused_by_the_number_of_the_first(args, fails, tiny_run, writer, tmp_path):
    """An evaluation writes nothing, and goes on beside it."""
    before = {path.name for path in tiny_run.iterdir()}
    other = writer(tiny_run)
    assert other.stdout.readline() == "has it\n"
    for argv in (args("tiny"), [*args("tiny", max_iters=9), "--resume"], [*args("tiny"), "--overwrite"]):
        said, = fails(argv)
        assert said.startswith(f"{tiny_run} is being written by process {other.pid} on ")
        assert said.endswith("; wait for it, stop it, or choose another --out_dir")
    train.main([*args("tiny"), "--eval_only"])
    assert {path.name for path in tiny_run.iterdir()} == before


def test_a_killed_writer_leaves_no_lock(tmp_path, writer):
    """Who waits writes then, and not before."""
    first = writer(tmp_path / "run")
    assert first.stdout.readline() == "has it\n"
    second = writer(tmp_path / "run")
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.3)
    assert not select.select([second.stdout], [], [], 0)[0]
    first.kill()
    assert second.stdout.readline() == "has it\n"
    second.kill()
    with only_writer(tmp_path / "run", wait=True):
        pass
    assert not (tmp_path / "run").exists() or os.listdir(tmp_path / "run") == ["lock"]


@forks
def test_a_process_may_ask_for_its_folder_again_and_so_may_its_child(args, tiny_run):
    """A trial does, and prune.py starts train.py in the folder that it holds."""
    with only_writer(tiny_run), open(os.devnull, "w") as out:
        train.main([*args("tiny", max_iters=7), "--resume"])
        assert ending(in_child([*args("tiny", max_iters=8), "--resume"], out=out)) == 0
    assert checkpoint.read(tiny_run / "ckpt.pt")["step"] == 8


def test_a_refused_command_leaves_no_empty_folder(args, fails, tmp_path):
    fails(args("new", init_from=tmp_path / "nowhere"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    fails(args("there", init_from=tmp_path / "nowhere"))
    assert (tmp_path / "there").is_dir(), "a folder of the user's stays"


# ---- names ----

WORDS = st.lists(st.text(max_size=20) | st.from_regex(r"[a-z]{1,20}", fullmatch=True), max_size=6)


@settings(max_examples=20)
@given(WORDS, st.text(max_size=20) | st.from_regex(r"[a-z]{1,99}", fullmatch=True))
def test_whatever_a_run_is_called_after_its_folder_has_a_name_that_can_be_typed(words, base):
    """And begins with its scale, and its first mechanism."""
    name = name_of_words(words, base)
    assert len(name) <= LONGEST and not set(name) - set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._=+-")
    assert not name.endswith((".", "-"))
    if words and re.fullmatch("[a-z]+", base) and re.fullmatch("[a-z]+", words[0]):
        assert name.startswith(f"{base[:40]}-{words[0]}"[:LONGEST])


# ---- which of several ----

@pytest.fixture
def runs(tmp_path, monkeypatch):
    """runs(name, asked): a folder in out/ with a run that was asked for so."""
    monkeypatch.chdir(tmp_path)

    def make(name, asked, file="config.json"):
        path = Path("out", name, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"asked": asked}))
    return make


def found(asked, **how):
    settings_of = {folder: settings_in(folder) for folder in folders_named("a", RUN_FILES)}
    folder, line = choose_folder("a", asked, settings_of, **how)
    assert line in (None, f"out/a holds another run: this one goes into {folder}")
    return folder.as_posix(), bool(line)


def test_a_name_that_is_free_is_taken_and_another_configuration_gets_the_next_number(runs):
    assert found({"lr": 1}) == ("out/a", False)
    runs("a", {"lr": 1})
    assert found({"lr": 1}) == ("out/a", False) and found({"lr": 2}) == ("out/a-2", True)
    runs("a-2", {"lr": 2})
    runs("a-4", {"lr": 4})
    for other in ("a-b", "a-4.5", "ab-2"):
        runs(other, {"lr": 9})
    assert [found({"lr": n}) for n in (1, 2, 4)] == [("out/a", False), ("out/a-2", False), ("out/a-4", False)]
    assert found({"lr": 9}) == found({}) == ("out/a-3", True)
    runs("a-3", None, file="lock")  # no run was ever there
    assert found({"lr": 9}) == ("out/a-3", True)


@pytest.mark.parametrize("text", ['{"asked": 3}', "\0"])
def test_a_folder_that_does_not_say_what_it_holds_is_another_run(runs, text):
    runs("a", {})
    Path("out/a/config.json").write_text(text)
    assert found({"lr": 1}) == ("out/a-2", True) and found({"lr": 1}, goes_on=True) == ("out/a", False)


def steps():
    """{folder: steps done} of the runs in out/."""
    return {path.parent.name: checkpoint.read(path)["step"] for path in sorted(Path("out").glob("*/ckpt.pt"))}


@pytest.mark.slow
def test_each_command_finds_its_own_run(tmp_path, monkeypatch, bytes_data, capsys):
    monkeypatch.chdir(tmp_path)

    def trained(*argv, lr=1e-3, **keys):
        write_settings(Path("small.py"), dict(TINY, adamw_lr=lr))
        train.main(["small.py", *argv, f"--dataset={bytes_data}",
                    *as_arguments(keys)])
        return capsys.readouterr().out
    assert "in out/small\n" in trained()
    with pytest.raises(SystemExit, match="out/small already holds a run; go on with --resume"):
        trained()
    assert trained(lr=2e-3).startswith("out/small holds another run: this one goes into out/small-2\n")
    assert "going on at step 6 of 8" in trained("--resume", lr=2e-3, max_iters=8, eval_interval=2)
    assert steps() == {"small": 6, "small-2": 8}
    trained("--resume", max_iters=7)
    assert steps() == {"small": 7, "small-2": 8}
    assert "step       8 " in trained("--eval_only", lr=2e-3)
    trained("--resume", lr=3e-3, max_iters=9)  # of which there is none: the newest goes on
    assert steps() == {"small": 9, "small-2": 8}
    trained("--overwrite", lr=2e-3)
    assert steps() == {"small": 9, "small-2": 6}


# ---- checksums ----

@pytest.fixture
def copied(bytes_data, tmp_path):
    return Path(shutil.copytree(bytes_data, tmp_path / "copied", ignore=shutil.ignore_patterns("*.checked")))


def is_noted(path):
    """Whether a file's checksum is noted beside it, with its size and times."""
    now, note = path.stat(), path.with_name(f"{path.name}.checked")
    return json.loads(note.read_text()) == [now.st_size, now.st_mtime_ns, now.st_ctime_ns, files.sha256(path)]


def opened(folder, split="train"):
    """Open a split as another process does, which knows only what is noted."""
    files.GOOD_STATES.clear()
    Dataset(folder).tokens(split)


def test_a_text_is_hashed_once_and_again_where_it_was_touched_or_copied(copied, tmp_path):
    path = copied / "train.bin"
    opened(copied)
    assert is_noted(path)
    note = (copied / "train.bin.checked").read_bytes()
    path.write_bytes(path.read_bytes())  # touched
    opened(copied)
    assert (copied / "train.bin.checked").read_bytes() != note and is_noted(path)
    again = Path(shutil.copytree(copied, tmp_path / "again"))  # with its times, and the note
    (again / "train.bin").write_bytes(b" " * 20000)
    os.utime(again / "train.bin", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    with pytest.raises(UserError, match=f"^{again}/train.bin is not the file that meta.json describes"):
        opened(again)


def test_a_text_that_changes_while_it_is_read_is_refused(copied, monkeypatch):
    monkeypatch.setattr("nanoheads.batches.REOPEN_AFTER", 1)
    batches = Batches(Dataset(copied), "train", 16, 4, 0)
    (copied / "train.bin").write_bytes(b" " * 20000)
    with pytest.raises(UserError, match="train.bin is not the file"):
        batches(0)


@settings(max_examples=10)
@given(st.binary(max_size=50))
def test_a_damaged_note_is_made_anew(copied, data):
    opened(copied)
    note = copied / "train.bin.checked"
    good = note.read_bytes()
    note.write_bytes(data)
    opened(copied)
    assert note.read_bytes() == good


def test_a_note_is_not_relied_on_where_another_checksum_is_expected(copied):
    opened(copied)
    meta = json.loads((copied / "meta.json").read_text())
    meta["splits"]["train"]["sha256"] = "0" * 64
    (copied / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="train.bin is not the file.* should be 0000000000000000..."):
        opened(copied)


def test_notes_of_shards_lie_in_the_data_folder(tmp_path):
    splits = dict(train=[[1, 2], [3, 4]], val=[[5]])
    folder = write_shards(tmp_path / "mine", splits, files=tmp_path / "theirs")
    opened(folder)
    assert {path.name for path in folder.glob("*.checked")} == {"train_0.bin.checked", "train_1.bin.checked"}
    assert not list((tmp_path / "theirs").glob("*.checked"))


@forks
def test_of_ranks_that_start_together_each_reads_its_text(copied):
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            with suppress(BaseException):
                opened(copied)
                os._exit(0)
            os._exit(1)
        children.append(child)
    assert [ending(child) for child in children] == [0] * 4
    assert is_noted(copied / "train.bin")


# ---- a name that leads to no file ----

READERS = {
    "run/best.pt": lambda home: checkpoint.read(home / "run"),
    "run/ckpt.pt": lambda home: checkpoint_of(TrainConfig(out_dir=str(home / "run"), resume=True)),
    "run/log.jsonl": lambda home: read_rows(home / "run/log.jsonl"),
    "data/meta.json": lambda home: Dataset(home / "data"),
    "data/val.bin": lambda home: Dataset(home / "data").tokens("val")}


@pytest.mark.parametrize("name", READERS)
def test_a_name_that_leads_to_no_file_is_no_missing_file(name, bytes_data, tmp_path):
    """What is asked for is not read from another file, or taken for nothing, without a word."""
    for n, put in enumerate((lambda path: path.symlink_to("nowhere"),
                             lambda path: path.symlink_to(path.name), Path.mkdir)):
        home = tmp_path / str(n)
        shutil.copytree(bytes_data, home / "data")
        (home / "run").mkdir()
        torch.save(dict(model={}, config={}, meta=None), home / "run/ckpt.pt")
        (home / name).unlink(missing_ok=True)
        put(home / name)
        what = "no file" if put is Path.mkdir else "a link, and leads to no file"
        with pytest.raises(UserError, match=f"^{home}/{name} is {what}: put the file there, or remove it$"):
            READERS[name](home)
