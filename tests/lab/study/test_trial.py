"""One run and the queue of runs: done once, damage found and named, nothing left running, numbers on file."""

import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train

import compare
from helpers import put_meta, write_dataset
from model import GPTConfig
from nanoheads import log as runlog
from nanoheads.common import ROOT, UserError
from nanoheads.dataset import Dataset
from nanoheads.files import sha256
from nanoheads.threads import processor
from lab.study import digest, queue, trial


def spec_of(data, tokens=0, **keys):
    """trial.json of a run that trains in a moment."""
    model = GPTConfig(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=16, recipe="modern", seed=1)
    training = dict(dataset=str(data), device="cpu", batch_size=4, max_iters=6, eval_interval=3,
                    eval_tokens=64, log_interval=2)
    return dict(model=digest.own_flags(model), train={**training, **keys},
                score=dict(split="test", tokens=tokens), code=digest.code_digest(model),
                data=trial.digests_of_all(Dataset(data)),
                torch=torch.__version__)


@pytest.fixture
def spec(bytes_data, tmp_path, monkeypatch):
    """spec_of(), and an empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return spec_of(bytes_data)


@pytest.fixture(scope="module")
def trained(bytes_data, tmp_path_factory):
    folder = trial.make(spec_of(bytes_data), tmp_path_factory.mktemp("trials"))
    trial.run(folder, train.train)
    return folder


@pytest.fixture
def finished(trained, spec):
    """The folder of a run that is done."""
    return Path(shutil.copytree(trained, trial.TRIALS / trained.name))


def rewrite(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- damage ----

def truncated(content):
    return content[:len(content) // 2]


def emptied(content):
    return b""


def zeroed(content):
    return b"\0" * len(content)


DAMAGE = [truncated, emptied, zeroed]


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["result.json", "nats.npy"])
def test_a_damaged_result_is_set_aside_and_run_again(name, damage, finished, capsys):
    before = trial.result(finished)
    (finished / name).write_bytes(damage((finished / name).read_bytes()))
    assert trial.result(finished) is None and not trial.done(finished)
    assert trial.result(finished) is None
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and str(finished / name) in printed and f"{name}.damaged" in printed
    assert (finished / f"{name}.damaged").is_file() and not (finished / name).exists()
    again = trial.run(finished, train.train)
    assert again["bpb"] == before["bpb"] and trial.done(finished)


@pytest.mark.slow
def test_a_result_without_its_nats_is_no_result(finished, capsys):
    (finished / "nats.npy").unlink()
    assert not trial.done(finished) and (finished / "result.json.damaged").is_file()
    assert str(finished) in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("change", [
    dict(bpb=2.0), dict(nats=1000.0), dict(bytes=999), dict(bpb=math.nan), dict(nats=math.inf, bpb=math.inf),
    dict(bpb=None), dict(bytes=0), dict(nats="7"), "last digit", "nats.npy"])
def test_a_changed_figure_is_not_believed(change, finished, capsys):
    found = trial.result(finished)  # what is remembered of it does not hide the change
    if change == "nats.npy":
        nats = np.load(finished / "nats.npy")
        nats[3] += 1e-4
        np.save(finished / "nats.npy", nats)
    else:
        rewrite(finished / "result.json", **(dict(bpb=found["bpb"] * (1 + 1e-8)) if change == "last digit"
                                             else change))
    assert trial.result(finished) is None
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and str(finished) in printed


def test_rounding_is_no_change_and_what_today_wrote_stays_valid(finished):
    found = trial.result(finished)
    old = {key: value for key, value in found.items() if key not in ("block_nats", "processor", "torch")}
    (finished / "result.json").write_text(json.dumps({**old, "nats": old["nats"] * (1 + 1e-13)}))
    again = trial.result(finished)
    assert again["bpb"] == found["bpb"] and again["block_nats"] == found["block_nats"]


def test_a_result_is_checked_once(finished, monkeypatch):
    loads, load = [], np.load
    monkeypatch.setattr(trial.np, "load", lambda path: loads.append(path) or load(path))
    for _ in range(100):
        trial.result(finished)["bpb"] = 0  # nor can a caller change what the next one gets
    assert len(loads) == 1 and trial.result(finished)["bpb"] > 1


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_plan_is_written_again(damage, spec, capsys):
    folder = trial.make(spec)
    path = folder / "trial.json"
    path.write_bytes(damage(path.read_bytes()))
    assert trial.make(spec) == folder and json.loads(path.read_text()) == spec
    printed = capsys.readouterr().err
    assert printed == f"{path} is damaged; set aside as trial.json.damaged\n"
    path.write_text(json.dumps({**spec, "torch": "another"}))  # not what the folder is named after
    assert trial.make(spec) == folder and json.loads(path.read_text()) == spec


@pytest.mark.parametrize("damage", [*DAMAGE, lambda content: b"[1, 2]"])
def test_a_damaged_json_is_set_aside(damage, tmp_path, capsys):
    path = tmp_path / "inspected.json"
    assert trial.read_json(path) is None and capsys.readouterr().err == ""
    path.write_text('{"heads": 3}')
    assert trial.read_json(path) == {"heads": 3}
    path.write_bytes(damage(path.read_bytes()))
    assert trial.read_json(path) is None and not path.exists()
    assert capsys.readouterr().err == f"{path} is damaged; set aside as inspected.json.damaged\n"


def test_a_damaged_log_keeps_its_good_lines_and_its_run(finished, capsys):
    path, before = finished / "log.jsonl", trial.rows(finished)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(before) == len(lines) > 4 and any("val_bpb" in row for row in before)
    path.write_bytes(lines[0] + b"\0\xff\n" + b"".join(lines[1:-1]) + lines[-1][:20])
    assert trial.rows(finished) == before[:-1] == trial.rows(finished) and trial.done(finished)
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and f"{path} has 2 damaged" in printed
    assert path.read_bytes() == b"".join(lines[:-1])  # as they were, to the byte
    assert (finished / "log.jsonl.damaged").is_file()


def test_the_log_of_a_run_that_goes_on_is_left_alone(finished, capsys):
    (finished / "result.json").unlink()
    with open(finished / "log.jsonl", "a") as log:
        log.write('{"step": 7, "lo')
    before = (finished / "log.jsonl").read_bytes()
    assert trial.rows(finished) and (finished / "log.jsonl").read_bytes() == before
    assert capsys.readouterr().err == "" and trial.rows(Path("nowhere")) == []


def test_evaluations_reach_the_disk_and_so_does_the_end(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    with ExitStack() as closing:
        log = runlog.Log(tmp_path, -1, -1, closing)
        monkeypatch.setattr(runlog.os, "fsync", lambda f: synced.append(f == log.file.fileno()) or sync(f))
        log.write(dict(step=10, loss=1.0))
        assert synced == []
        log.write(dict(step=10, val_loss=1.0))
        assert synced == [True]
        log.write(dict(step=20, loss=1.0))
    assert synced == [True, True] and len((tmp_path / "log.jsonl").read_text().splitlines()) == 3


# ---- what a run leaves ----

def test_blocks_are_sums_of_whole_windows_in_order():
    nats = np.random.default_rng(0).uniform(100, 300, 1001)
    for block_size in (16, 100, 5000):
        windows, expected, i = max(1, 4096 // block_size), [], 0
        while i < len(nats):
            total = 0.0
            for value in nats[i:i + windows]:
                total += float(value)
            expected.append(total)
            i += windows
        found = trial.sums_of_blocks(nats, block_size)
        assert found == pytest.approx(expected, abs=6e-7) and all(round(x, 6) == x for x in found)
        assert found != pytest.approx(np.add.reduceat(nats, np.arange(0, 1001, windows + 1)), abs=1e-3)


@pytest.mark.slow
def test_a_result_says_what_it_was_computed_on_and_its_blocks(spec, monkeypatch):
    monkeypatch.setattr(trial, "BLOCK", 64)
    folder = trial.make(spec)
    found = trial.run(folder, train.train)
    nats = np.load(folder / "nats.npy")
    assert len(nats) == -(-1000 // 16) and nats.sum() == pytest.approx(found["nats"], rel=1e-12)
    assert found["block_nats"] == [round(float(nats[i:i + 4].sum()), 6) for i in range(0, len(nats), 4)]
    assert found == trial.result(folder) == json.loads((folder / "result.json").read_text())
    assert found["torch"] == torch.__version__ and found["threads"] == 1 and found["processor"] == processor()


@pytest.mark.slow
def test_a_slice_is_scored_window_by_window_and_its_bytes_are_its_own(bytes_data, spec):
    folder = trial.make(spec_of(bytes_data, tokens=160))
    found = trial.run(folder, train.train)
    assert found["tokens"] == found["bytes"] == 160 and np.load(folder / "nats.npy").shape == (10,)


def test_a_result_names_the_checkpoint_that_was_scored(finished):
    assert trial.result(finished)["checkpoint"] == sha256(finished / "best.pt")


# ---- its data is what was planned, from the first step until it is scored ----

@pytest.fixture
def swap(tmp_path, bytes_data):
    """(data folder, swap()): exchanges all of it with other text of the same sizes, each file by a rename."""
    here, away = tmp_path / "sums", tmp_path / "away"
    shutil.copytree(bytes_data, here, ignore=shutil.ignore_patterns("*.checked"))
    write_dataset(away, dict(train=b"ab" * 10000, val=b"ab" * 1000, test=b"ab" * 500))

    def exchange():
        for path in (*here.glob("*.bin"), here / "meta.json"):
            os.rename(path, tmp_path / "third")
            os.rename(away / path.name, path)
            os.rename(tmp_path / "third", away / path.name)

    @contextmanager
    def exchanged():
        exchange()
        try:
            yield
        finally:
            exchange()
    return here, exchange, exchanged


def test_data_that_was_replaced_in_the_last_steps_gives_no_score(swap, finished):
    """Its score was kept as the planned text's, and counted as done when that was put back."""
    data, exchange, _ = swap
    folder = trial.make(spec_of(data))
    with pytest.raises(UserError, match="^the data changed after this run was planned; start the study"):
        trial.run(folder, lambda *args: (train.train(*args), exchange())[0])
    assert not (folder / "result.json").exists() and not (folder / "nats.npy").exists()
    exchange()
    # nothing is trained once more
    assert trial.run(folder, train.train)["bpb"] == trial.result(finished)["bpb"]


def test_data_that_was_replaced_for_the_training_alone_gives_no_score(swap, finished):
    data, _, exchanged = swap
    folder = trial.make(spec_of(data))
    with pytest.raises(UserError, match="^the data changed while this run was trained, which begins ane"):
        trial.run(folder, exchanged()(train.train))
    assert not [*folder.glob("*.pt"), *folder.glob("result.json")]
    assert trial.run(folder, train.train)["bpb"] == trial.result(finished)["bpb"]


def test_data_that_was_replaced_for_the_scoring_alone_gives_no_score(swap, finished, monkeypatch):
    """Also where the file itself is written to, and put back with its times: what was mapped is not what is
    there now.
    """
    data, _, exchanged = swap
    folder, score = trial.make(spec_of(data)), trial.score_windows
    path = data / "test.bin"
    before, times = path.read_bytes(), os.stat(path)

    def written_to(model, dataset, **what):
        dataset.tokens("test")
        path.write_bytes(b"ab" * 500)
        monkeypatch.setattr(dataset, "tokens", lambda split: np.memmap(path, "u1", "r"))
        found = score(model, dataset, **what)
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return found

    for wrapped, words in ((exchanged()(score), "test.bin is not the file that meta.json describes"),
                           (written_to, "test.bin changed while this run was scored; start the study again")):
        with monkeypatch.context() as replaced:
            replaced.setattr(trial, "score_windows", wrapped)
            with pytest.raises(UserError, match=words):
                trial.run(folder, train.train)
        assert not (folder / "result.json").exists()
    assert trial.run(folder, train.train)["bpb"] == trial.result(finished)["bpb"]


@pytest.mark.parametrize("field, value", [("options", {"separator": "x"}), ("separator", 11)])
def test_a_changed_meta_json_is_another_run_and_ends_one_that_was_planned(swap, field, value):
    data, *_ = swap
    before = spec_of(data)
    folder = trial.make(before)
    put_meta(data, note="nothing reads it", name="another")
    assert spec_of(data) == before
    put_meta(data, **{field: value})
    assert trial.folder_of(spec_of(data)) != folder
    with pytest.raises(UserError, match="the data changed after this run was planned"):
        trial.check_unchanged(folder)


# ---- a run's folder is its own ----

def test_a_folder_copied_from_another_run_is_not_done(finished, spec, capsys):
    """Neither where all of it was copied, nor where its scores alone were."""
    other = {**spec, "torch": "0.1"}
    folder = trial.make(other)
    shutil.rmtree(folder)
    shutil.copytree(finished, folder)
    assert not trial.done(folder) and "another run" in capsys.readouterr().err
    assert (folder / "result.json.damaged").is_file()
    shutil.rmtree(folder)
    trial.make(other)
    for name in ("result.json", "nats.npy"):
        shutil.copy(finished / name, folder)
    assert not trial.done(folder) and "another run" in capsys.readouterr().err
    assert trial.done(finished)


def test_no_link_in_a_runs_folder_is_written_through(spec, tmp_path, monkeypatch):
    folder, victim = trial.make(spec), tmp_path / "victim"
    victim.write_text("mine")
    names = ["trial.log", "nats.npy", "nats.npy.part", "result.json.part", "best.pt.part", "config.json.part",
             "failed.txt", "failed.txt.part"]
    for name in names:
        (folder / name).symlink_to(victim)
    monkeypatch.setattr(os, "dup2", lambda log, stream: None)
    trial.main([str(folder)], train.train)
    queue.fail(folder, "killed by nobody")
    assert victim.read_text() == "mine" and trial.done(folder)
    assert not [name for name in names if (folder / name).is_symlink()]
    assert (folder / "failed.txt").read_text() == "killed by nobody"


def test_what_another_run_left_is_not_moved_over_a_link(finished, spec, tmp_path):
    (finished.with_name(f"{finished.name}.damaged")).symlink_to(tmp_path)
    rewrite(finished / "trial.json", torch="another")
    with pytest.raises(UserError, match="damaged is a link to"):
        trial.make(spec)


def test_what_another_run_left_is_no_start_for_this_one(finished, spec, capsys):
    """A checkpoint of another variant would be gone on from."""
    folder = trial.folder_of({**spec, "torch": "0.1"})
    shutil.copytree(finished, folder)
    assert trial.make({**spec, "torch": "0.1"}) == folder
    assert [path.name for path in folder.iterdir()] == ["trial.json"]
    assert (Path(f"{folder}.damaged") / "best.pt").is_file() and "held another run" in capsys.readouterr().err


def test_a_trial_json_in_another_runs_folder_is_not_run(finished, spec):
    folder = finished.with_name("0123456789abcdef")
    folder.mkdir()
    shutil.copy(finished / "trial.json", folder)
    with pytest.raises(SystemExit, match="that of another run"):
        trial.main([str(folder)], train.train)


# ---- processes ----

def test_what_cannot_be_started_is_a_failure_and_no_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Full:
        slots = 1

        def run(self, folder):
            raise RuntimeError("no such\nfile")
    folders = [Path("a"), Path("b")]
    why = "could not be started: no such file"
    assert queue.run_all(folders, Full()) == dict.fromkeys(folders, why)
    assert [trial.failure(folder) for folder in folders] == [why, why]


@pytest.mark.slow
def test_a_study_that_cannot_start_a_run_ends_with_an_error(bytes_data, spec, monkeypatch, capsys):
    def refuse(self, folder):
        raise RuntimeError("the queue is full")
    monkeypatch.setattr(queue.Processes, "run", refuse)
    Path("plain.py").write_text("n_layer = 1\nn_head = 2\nn_embd = 16\nblock_size = 16\nmax_iters = 6\n"
                                f"eval_interval = 3\nrecipe = 'modern'\ndataset = {str(bytes_data)!r}\n")
    with pytest.raises(SystemExit) as e:
        compare.main(["--base=plain.py", "--mechanisms=output_gate", "--seeds=1,2", "--budgets=[]",
                      "--device=cpu"])
    assert e.value.code not in (0, None) and "the queue is full" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_stops_when_its_parent_is_killed(bytes_data, spec):
    """The real thing: a parent that SIGKILL gives no time to stop anything."""
    folder = trial.make(spec_of(bytes_data, max_iters=20000, eval_interval=10000))
    script = ("import sys; from pathlib import Path; from lab.study import queue; "
              "queue.run_all([Path(sys.argv[1])], queue.Processes(1, 'cpu'))")
    parent = subprocess.Popen([sys.executable, "-c", script, str(folder)],
                              env={**os.environ, "PYTHONPATH": str(ROOT)})

    def wait_until(what):
        until = time.monotonic() + 60
        while not what() and time.monotonic() < until:
            time.sleep(0.05)
        return what()

    def unlocked():
        with open(folder / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
        return True
    try:
        assert wait_until(lambda: queue.progress_of(folder))
        time.sleep(0.2)
        assert not unlocked()  # it trains on while its parent runs
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert wait_until(unlocked)
    assert "stopped by SIGTERM" in (folder / "trial.log").read_text()
    assert 0 < torch.load(folder / "ckpt.pt", weights_only=True)["step"] < 20000


def test_without_a_terminal_a_study_prints_a_line_a_minute(tmp_path, monkeypatch, capsys):
    """Runs done and to do, and the time left, which follows from the steps that were made so far."""
    monkeypatch.chdir(tmp_path)
    now = [1000.0]
    monkeypatch.setattr(queue.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(queue.Progress, "printed", None)
    folders = [Path("a"), Path("b"), Path("c")]
    progress = queue.Progress("runs", dict.fromkeys(folders, 100), total=5)  # two of five are done already
    folders[0].mkdir()
    for seconds, step in ((0, 10), (59, 20), (61, 60)):
        now[0] = 1000.0 + seconds
        row = dict(step=step, loss=2.5, tokens_per_s=1000.0)
        (folders[0] / "log.jsonl").write_text(json.dumps(row) + "\n")
        progress.show(waiting=folders[1:], running=folders[:1])
    # 50 of 290 steps took 61 s, since the first ten were there when it began
    assert capsys.readouterr().out == (
        "runs: 2 of 5 runs done, 3 to do, 5 min left, loss 2.500, 1,000 tok/s, 1 at once\n")
    now[0] += 30
    progress.show(waiting=folders[1:], running=folders[:1])
    assert capsys.readouterr().out == ""


def test_a_bar_has_the_time_left(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(queue.sys.stderr, "isatty", lambda: True, raising=False)
    now = [1000.0]
    monkeypatch.setattr(queue.time, "monotonic", lambda: now[0])
    Path("a").mkdir()
    progress = queue.Progress("runs", {Path("a"): 100}, total=1)
    for seconds, step in ((0, 0), (10, 50)):
        now[0] = 1000.0 + seconds
        row = dict(step=step, loss=2.5, tokens_per_s=1000.0)
        (Path("a") / "log.jsonl").write_text(json.dumps(row) + "\n")
        progress.show(waiting=[], running=[Path("a")])
    progress.bar.close()
    shown = capsys.readouterr().err
    assert "0.5 of 1 runs" in shown and "10 s left" in shown and " 50%" in shown


@pytest.mark.parametrize("seconds, words", [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"),
                                            (7200, "2.0 h"), (36000, "10.0 h")])
def test_a_length_of_time_is_in_words(seconds, words):
    assert queue.time_in_words(seconds) == words


@pytest.mark.slow
def test_two_studies_that_want_the_same_run_train_it_once(bytes_data, spec):
    folder = trial.make(spec_of(bytes_data, max_iters=30))
    # by hand, and with nothing at their standard input
    pair = [subprocess.Popen(queue.command_of(folder), stdin=subprocess.DEVNULL) for _ in range(2)]
    assert [job.wait(timeout=120) for job in pair] == [0, 0]
    printed = (folder / "trial.log").read_text()
    assert printed.count("starting anew") == 1 and "going on" not in printed


@pytest.mark.slow
def test_a_run_does_not_begin_with_other_code_or_data_than_was_planned(spec):
    folder = trial.make({**spec, "code": "x"})
    why = queue.run_all([folder], queue.Processes(1, "cpu"))[folder]
    assert why == "trial: the code changed after this run was planned; start the study again"
    with pytest.raises(ValueError, match="the data changed after this run was planned"):
        trial.check_unchanged(trial.make({**spec, "data": {"train": "x"}}))
    for other, what in ((dict(torch="0.1"), "torch"), (dict(libraries={"numpy": "0.1"}), "numpy")):
        with pytest.raises(ValueError, match=f"^{what} is '.*' here, and was '0.1' when this run was"):
            trial.check_unchanged(trial.make({**spec, **other}))


@pytest.mark.slow
def test_a_best_checkpoint_alone_does_not_block_a_run(spec):
    folder = trial.make(spec)
    (folder / "best.pt").write_bytes(b"left behind by a full disk")
    trial.run(folder, train.train)
    assert trial.done(folder)


# ---- places ----

def gpus(monkeypatch, count):
    """As on a machine with so many GPUs."""
    monkeypatch.setattr(queue, "pick_device", lambda name: "cuda" if name == "auto" else name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def handed_out(slots, count=None):
    """The GPUs that the next trials get, as many as there is room for."""
    with ExitStack() as running:
        return [running.enter_context(slots.gpu()) for _ in range(count or slots.count)]


WRITE = "import json, os, sys; open(sys.argv[1] + '/env.json', 'w').write(json.dumps({**os.environ}))"


def write_environment(monkeypatch, code=WRITE):
    """Instead of training, a trial writes down its environment, or does what other code says."""
    monkeypatch.setattr(queue, "command_of", lambda folder: [sys.executable, "-c", code, str(folder)])
    monkeypatch.setattr(queue, "done", lambda folder: (folder / "env.json").is_file())


def environments(place, count):
    """What so many trials found in their environment."""
    folders = [Path("out/trials", str(i)) for i in range(count)]
    for folder in folders:
        folder.mkdir(parents=True)
    assert queue.run_all(folders, place) == {}
    return [json.loads((folder / "env.json").read_text()) for folder in folders]


def test_cores_and_gpus_are_shared_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(queue.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [(queue.Slots(jobs, "cpu").count, queue.Slots(jobs, "cpu").threads) for jobs in (0, 3)] == [
        (8, 1), (3, 2)]
    assert queue.Slots(0, "cpu").env(None) == {"OMP_NUM_THREADS": "1"}
    gpus(monkeypatch, 2)
    for visible, places in {"4,6": ["4", "6"], "7,": ["7"], "": ["0", "1"],
                            "GPU-abc,GPU-def": ["GPU-abc", "GPU-def"]}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert handed_out(queue.Slots(0, "auto")) == places
    assert handed_out(queue.Slots(3, "auto")) == ["GPU-abc", "GPU-def", "GPU-abc"]


@pytest.mark.parametrize("visible, device, place", [
    ("", "cuda:1", "1"), ("4,6", "cuda:1", "6"), ("4,6", "cuda:0", "4"), ("GPU-a, GPU-b", "cuda:1", "GPU-b")])
def test_a_gpu_that_is_named_is_the_only_one(visible, device, place, monkeypatch):
    gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert handed_out(queue.Slots(0, device)) == [place]
    assert handed_out(queue.Slots(0, device, jobs_per_gpu=2)) == [place] * 2


@pytest.mark.parametrize("jobs, each, count, at_most", [
    (0, 1, 2, 1), (0, 3, 6, 3), (5, 3, 5, 3), (9, 3, 6, 3), (2, 3, 2, 1), (1, 3, 1, 1)])
def test_several_trials_share_a_gpu_and_its_memory(jobs, each, count, at_most, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(queue.os, "sched_getaffinity", lambda pid: set(range(12)))
    gpus(monkeypatch, 2)
    slots = queue.Slots(jobs, "cuda", each)
    assert handed_out(slots) == ["0", "1", "0", "1", "0", "1"][:count]
    assert slots.threads == 12 // count
    assert slots.env("1") == {"OMP_NUM_THREADS": str(slots.threads), "CUDA_VISIBLE_DEVICES": "1",
                              trial.TRIALS_ON_GPU: str(at_most)}


def test_the_next_trial_gets_the_gpu_with_the_fewest(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus(monkeypatch, 3)
    slots = queue.Slots(0, "cuda", 2)
    with ExitStack() as running, ExitStack() as of_the_second:
        for place in ("0", "1", "2") * 2:
            at = of_the_second if place == "1" else running
            assert at.enter_context(slots.gpu()) == place
        of_the_second.close()
        assert handed_out(slots, 2) == ["1", "1"]


def test_one_trial_each_on_a_gpu_of_its_own_and_the_gpu_back(spec, monkeypatch):
    """The environment of real processes."""
    write_environment(monkeypatch)
    gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    place = queue.Processes(0, "cuda")
    found = [each["CUDA_VISIBLE_DEVICES"] for each in environments(place, 3)]
    # which of two threads asks first is the machine's choice
    assert sorted(found[:2]) == ["4", "6"] and found[2] in found[:2]
    assert place.room.running == {"4": 0, "6": 0}


def test_a_run_that_cannot_be_started_takes_no_gpu(spec, monkeypatch):
    gpus(monkeypatch, 1)
    place = queue.Processes(0, "cuda")
    monkeypatch.setattr(queue, "command_of", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        place.run(Path("out/trials/x"))
    assert set(place.room.running.values()) == {0}


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_gpus_that_are_not_there_cannot_be_shared(device, monkeypatch):
    monkeypatch.setattr(queue, "pick_device", lambda name: "cpu")
    with pytest.raises(UserError, match="^jobs_per_gpu=2 means nothing on device=cpu, which has no CUDA GPU"):
        queue.Slots(0, device, 2)


def test_a_trial_on_a_shared_gpu_allocates_its_part_of_the_memory(monkeypatch):
    parts, size = [], 80 * 2**30
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", parts.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=size))
    trial.limit_memory()
    monkeypatch.setenv(trial.TRIALS_ON_GPU, "1")
    trial.limit_memory()
    assert parts == []  # alone
    monkeypatch.setenv(trial.TRIALS_ON_GPU, "4")
    trial.limit_memory()
    assert parts == [pytest.approx(0.95 / 4 - 0.75 / 80)]
    assert 4 * (parts[0] * size + trial.CONTEXT) < size
    size = 2 * 2**30
    with pytest.raises(UserError, match="^4 trials on a GPU of 2.0 GiB have no memory: lower jobs_per_gpu$"):
        trial.limit_memory()


@pytest.mark.parametrize("at_once, words", [
    ("1", "trial: out of memory; lower batch_size"),
    ("4", "trial: out of memory; lower jobs_per_gpu, or jobs, of which 4 share this GPU; or lower batch")])
def test_memory_that_runs_out_on_a_shared_gpu_has_a_second_reason(at_once, words, spec, monkeypatch):
    def runs_out(folder, train):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    monkeypatch.setenv(trial.TRIALS_ON_GPU, at_once)
    monkeypatch.setattr(trial, "limit_memory", lambda: None)
    monkeypatch.setattr(trial, "log_to", lambda path: None)
    monkeypatch.setattr(trial, "run", runs_out)
    with pytest.raises(SystemExit) as e:
        trial.main([str(trial.make(spec))], train.train)
    assert e.value.code.startswith(words) and "\n" not in e.value.code


def test_memory_is_limited_before_a_trial_trains(spec, monkeypatch):
    order = []
    monkeypatch.setattr(trial, "log_to", lambda path: None)
    monkeypatch.setattr(trial, "limit_memory", lambda: order.append("limit"))
    monkeypatch.setattr(trial, "run", lambda *args: order.append("run"))
    trial.main([str(trial.make(spec))], train.train)
    assert order == ["limit", "run"]


@pytest.mark.parametrize("asked, threads", [("1", [1, 1]), ("3,2", [3, 2]), ("64", [8, 2]), ("", [8, 2]),
                                            ("many", [8, 2])])
def test_no_more_threads_than_were_asked_for(asked, threads, monkeypatch):
    monkeypatch.setattr(queue.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert [queue.Slots(jobs, "cpu").threads for jobs in (1, 3)] == threads
    assert [queue.Slots(jobs, "cpu").env(None) for jobs in (1, 3)] == [
        {"OMP_NUM_THREADS": str(each)} for each in threads]


@pytest.mark.slow
def test_a_killed_run_is_one_line_and_takes_nothing_with_it(tmp_path, monkeypatch, capsys):
    code = ("import os, sys; from pathlib import Path; folder = Path(sys.argv[1]); "
            "os.kill(os.getpid(), 9) if folder.name == 'b' else (folder / 'env.json').write_text('{}')")
    write_environment(monkeypatch, code)
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    why = "killed by SIGKILL: out of memory?"
    assert queue.run_all(folders, queue.Processes(2, "cpu")) == {folders[1]: why}
    assert trial.failure(folders[1]) == why and all(queue.done(folders[i]) for i in (0, 2))
    assert capsys.readouterr().err.count(f"{folders[1]} failed: {why}\n") == 1


def test_ctrl_c_stops_what_runs_and_starts_nothing_more(tmp_path, monkeypatch):
    """One of two runs at once is asked to save; what waits for its place does not begin."""
    code = ("import signal, sys, time; from pathlib import Path; folder = Path(sys.argv[1]); "
            "signal.signal(15, lambda *_: ((folder / 'saved').write_text(''), sys.exit(143))); "
            "(folder / 'begun').write_text(''); time.sleep(100)")
    write_environment(monkeypatch, code)
    folders = [tmp_path / str(i) for i in range(6)]
    for folder in folders:
        folder.mkdir()

    def show(self, waiting, running):
        if len([*tmp_path.glob("*/begun")]) == 2:
            raise KeyboardInterrupt
    monkeypatch.setattr(queue.Progress, "show", show)
    with pytest.raises(KeyboardInterrupt):
        queue.run_all(folders, queue.Processes(2, "cpu"))
    begun, saved = ({path.parent for path in tmp_path.glob(f"*/{name}")} for name in ("begun", "saved"))
    assert begun == saved == {*folders[:2]}
