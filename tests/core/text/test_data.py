"""The data scripts: exact counts, refusals by name, whole files, verified second runs, downloads."""
import gzip
import http.server
import importlib
import json
import lzma
import os
import pickle
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data import from_nanogpt, prepare_text
from nanoheads import corpus, files
from nanoheads.common import UserError
from nanoheads.corpus import File
from nanoheads.dataset import Dataset
from nanoheads.files import temporary
from nanoheads.tokenizer import Tokenizer
from helpers import ROOT
from helpers import byte_pairs, in_llm_c

REAL = os.environ.get("NANOHEADS_DATA") or ROOT / "../shared/data"
NAMES = ["pystdlib", "shakespeare_char", "shakespeare", "enwik8", "enwik8_char", "wikitext2", "wikitext103",
         "openwebtext", "enwiki15", "fineweb"]
SCRIPTS = {name: importlib.import_module(f"data.{name}.prepare") for name in NAMES}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No script sees this machine's data: downloads go to a temporary folder, $NANOHEADS_DATA is unset."""
    monkeypatch.delenv("NANOHEADS_DATA", raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setattr("nanoheads.corpus.HOME", tmp_path / "home")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    corpus.digest.cache_clear()
    yield
    corpus.digest.cache_clear()


def corpora(*names):
    """The folder of real corpora: $NANOHEADS_DATA, else a sibling folder; else the test is skipped."""
    folder = Path(REAL).resolve()
    for name in names:
        if not (folder / name).exists():
            pytest.skip(f"no {name} in the folder of real corpora: set NANOHEADS_DATA to it")
    return folder


def load(out):
    """meta.json and the three splits of a data folder, each checked against the other."""
    meta = json.loads((out / "meta.json").read_text())
    bins = {s: np.fromfile(out / f"{s}.bin", dtype=meta["dtype"]) for s in ("train", "val", "test")}
    # nothing left over
    assert sorted(p.name for p in out.iterdir()) == ["meta.json", "test.bin", "train.bin", "val.bin"]
    for split, ids in bins.items():
        assert len(ids) == meta["splits"][split]["tokens"] and ids.max() < meta["vocab_size"]
        assert corpus.digest.__wrapped__(out / f"{split}.bin")["sha256"] == meta["splits"][split]["sha256"]
    return meta, bins


def counts(meta, key="tokens"):
    return tuple(meta["splits"][s][key] for s in ("train", "val", "test"))


def text_file(path, text="To be, or not to be: that is the question.\n" * 100):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def mine(tmp_path, source, *more):
    prepare_text.main([f"--source={source}", f"--out={tmp_path / 'mine'}", *more])
    return load(tmp_path / "mine")


def refused(call, *words):
    """The one line with which a call is refused; every word is in it."""
    with pytest.raises(UserError) as error:
        call()
    line = str(error.value)
    assert "\n" not in line and all(word in line for word in words), line
    return line


# ---- real corpora, exact counts ----

def test_shakespeare_char_has_nanogpt_counts(tmp_path, capsys):
    source = corpora("tinyshakespeare")
    SCRIPTS["shakespeare_char"].main([f"--source={source}", f"--out={tmp_path / 'out'}"])
    meta, bins = load(tmp_path / "out")
    assert counts(meta) == (1_003_854, 111_540, 111_540) and meta["vocab_size"] == len(meta["vocab"]) == 65
    assert meta["vocab"] == sorted(meta["vocab"]) and meta["separator"] == 0 and meta["vocab"][0] == "\n"
    assert (bins["val"] == bins["test"]).all() and "test is val" in meta["note"]
    assert "test is val" in capsys.readouterr().out
    text = (source / "tinyshakespeare/input.txt").read_text()
    assert Tokenizer.from_meta(meta).decode(np.concatenate([bins["train"], bins["val"]])) == text
    assert meta["source"] == {"file": "input.txt", "bytes": 1_115_394,
                              "sha256": SCRIPTS["shakespeare_char"].TEXT.sha256}


@pytest.mark.slow
def test_shakespeare_has_nanogpt_counts(tmp_path, gpt2_files):
    SCRIPTS["shakespeare"].main([f"--source={corpora('tinyshakespeare')}", f"--out={tmp_path / 'out'}"])
    meta, bins = load(tmp_path / "out")
    assert counts(meta)[:2] == (301_966, 36_059) and (bins["val"] == bins["test"]).all()
    assert meta["separator"] == 50256 and meta["dtype"] == "uint16" and counts(meta, "bytes")[0] == 1_003_854


@pytest.mark.slow
def test_wikitext2_has_its_published_counts(tmp_path, gpt2_files):
    folder = f"--source={corpora('wikitext-2')}"
    SCRIPTS["wikitext2"].main([folder, f"--out={tmp_path / 'bpe'}"])
    SCRIPTS["wikitext2"].main([folder, f"--out={tmp_path / 'byte'}", "--encoding=byte"])
    meta, _ = load(tmp_path / "bpe")
    assert counts(meta) == (2_448_382, 258_659, 295_877) and meta["name"] == "wikitext2"
    byte, bins = load(tmp_path / "byte")
    assert counts(byte) == counts(byte, "bytes") == counts(meta, "bytes")
    assert counts(byte) == (10_797_148, 1_121_681, 1_256_449)
    assert counts(byte, "chars") == counts(meta, "chars") and byte["name"] == "wikitext2_byte"
    assert "vocab" not in byte
    with gzip.open(corpora("wikitext-2") / "wikitext-2/test.txt.gz") as f:
        assert f.read() == bins["test"].tobytes()


@pytest.mark.slow
def test_enwiki15_reads_xz(tmp_path, monkeypatch):
    script, folder = SCRIPTS["enwiki15"], corpora("enwiki15")
    # the small one only
    monkeypatch.setattr(script, "FILES", {s: script.FILES["test"] for s in ("train", "val", "test")})
    script.main([f"--source={folder}", f"--out={tmp_path / 'out'}"])
    assert counts(load(tmp_path / "out")[0]) == (5_972_296,) * 3


@pytest.mark.slow
def test_enwiki15_without_a_copy_says_so_in_one_line():
    env = {k: v for k, v in os.environ.items() if k != "NANOHEADS_DATA"}
    for more in ([], ["--source=/nowhere"]):
        done = subprocess.run([sys.executable, ROOT / "data/enwiki15/prepare.py",
                               "--out=/nowhere/out", *more], env=env,
                              capture_output=True, text=True, cwd="/")
        if (ROOT / "data/enwiki15/train.txt.xz").exists():
            pytest.skip("data/enwiki15/ holds a copy")
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
        assert "enwiki15/train.txt" in done.stderr or "/nowhere" in done.stderr


# ---- enwik8 ----

TEXT8 = ("<page> naïve — 日本語 text\n" * 1000).encode()


def as_enwik8(tmp_path, data=TEXT8):
    """A file, and the File that says it is enwik8."""
    path = text_file(tmp_path / "enwik8", data)
    return path, replace(SCRIPTS["enwik8"].ENWIK8, sha256=corpus.digest(path)["sha256"], bytes=len(data))


@pytest.mark.parametrize("form", ["plain", "gz", "xz", "zip", "folder"])
def test_enwik8_is_cut_in_bytes_from_any_form(tmp_path, form, monkeypatch):
    path, file = as_enwik8(tmp_path)
    monkeypatch.setattr(corpus, "BLOCK", 1000)  # many blocks, none at the cuts
    if form in ("gz", "xz"):
        path = tmp_path / f"copy.{form}"
        path.write_bytes({"gz": gzip, "xz": lzma}[form].compress(TEXT8))
    if form == "zip":
        path = tmp_path / "enwik8.zip"
        with zipfile.ZipFile(path, "w") as z:
            z.writestr("enwik8", TEXT8)
    if form == "folder":
        monkeypatch.setenv("NANOHEADS_DATA", str(tmp_path))
    sizes = (len(TEXT8) - 2000, 1001, 999)
    SCRIPTS["enwik8"].main([f"--out={tmp_path / 'out'}"] + ([] if form == "folder" else [f"--source={path}"]),
                           sizes=sizes, file=file)
    meta, bins = load(tmp_path / "out")
    assert counts(meta) == counts(meta, "bytes") == sizes and meta["dtype"] == "uint8"
    assert meta["separator"] == 10
    assert b"".join(bins[s].tobytes() for s in bins) == TEXT8
    assert sum(counts(meta, "chars")) == len(TEXT8.decode()) and meta["name"] == "enwik8"
    assert "note" not in meta


def test_enwik8_char_is_cut_in_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK", 1000)  # blocks end inside characters
    path, file = as_enwik8(tmp_path)
    total = len(TEXT8.decode())
    SCRIPTS["enwik8"].main([f"--source={path}", f"--out={tmp_path / 'out'}"], "enwik8_char", "char",
                           (total - 200, 101, 99), file)
    meta, bins = load(tmp_path / "out")
    assert counts(meta) == counts(meta, "chars") == (total - 200, 101, 99) and meta["dtype"] == "uint16"
    assert sum(counts(meta, "bytes")) == len(TEXT8) and meta["vocab"] == sorted(set(TEXT8.decode()))
    assert Tokenizer.from_meta(meta).decode(np.concatenate(list(bins.values()))) == TEXT8.decode()


def test_a_foreign_source_never_passes_for_enwik8(tmp_path):
    path, main = text_file(tmp_path / "some"), SCRIPTS["enwik8"].main
    same_size = replace(SCRIPTS["enwik8"].ENWIK8, bytes=path.stat().st_size)
    refused(lambda: main([f"--source={path}", f"--out={tmp_path / 'out'}"], file=same_size),
            str(path), "sha256", "replace it")
    of_this = replace(same_size, sha256=corpus.digest(path)["sha256"])
    for sizes in ((4000, 200, 99), (4000, 200, 101)):  # 4,300 bytes
        refused(lambda: main([f"--source={path}", f"--out={tmp_path / 'out'}"], sizes=sizes, file=of_this),
                "test")
    assert not list((tmp_path / "out").glob("*"))


def test_enwik8_facts():
    assert SCRIPTS["enwik8"].ENWIK8.bytes == 100_000_000
    assert SCRIPTS["enwik8"].ENWIK8.sha256.startswith("2b49720ec4d78c3c")
    assert sum((90_000_000, 5_000_000, 4_621_832)) == 99_621_832


# ---- sources that are refused by name ----

@pytest.mark.parametrize("damage", ["empty", "short", "wrong", "gz cut off", "gz rotten", "xz cut off",
                                    "xz rotten", "no zip"])
def test_bad_sources_are_refused_by_name(tmp_path, damage):
    whole = TEXT8 * 3
    _, file = as_enwik8(tmp_path, whole)
    kind = damage.split()[0] if damage[:2] in ("gz", "xz") else "zip" if damage == "no zip" else "txt"
    packed = {"gz": gzip.compress, "xz": lzma.compress}.get(kind, bytes)(whole)
    content = {"empty": b"", "short": whole[:-1], "wrong": b"x" + whole[1:],
               "cut off": packed[:-20], "no zip": b"PK",
               "rotten": packed[:50] + bytes(20) + packed[70:]}
    content = content[damage if kind in ("txt", "zip") else damage[3:]]
    path = tmp_path / f"source.{kind}"
    path.write_bytes(content)
    line = refused(lambda: SCRIPTS["enwik8"].main([f"--source={path}", f"--out={tmp_path / 'out'}"],
                                                  file=file), str(path))
    assert {"empty": "is empty", "short": "are expected", "wrong": "sha256"}.get(damage, "damaged") in line
    assert "replace it" in line and not (tmp_path / "out").exists()


def test_a_missing_folder_of_the_environment_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("NANOHEADS_DATA", "/nowhere")
    refused(lambda: SCRIPTS["wikitext2"].main([]), "/nowhere", "NANOHEADS_DATA")


def test_wikitext103_takes_a_folder_or_its_zip_and_counts_lines(tmp_path, monkeypatch):
    script, lines = SCRIPTS["wikitext103"], {"train": 50, "val": 7, "test": 9}
    monkeypatch.setattr(script, "FILES", {s: replace(f, lines=lines[s]) for s, f in script.FILES.items()})
    folder = tmp_path / "wikitext-103"
    folder.mkdir()
    with zipfile.ZipFile(tmp_path / "wikitext-103-v1.zip", "w") as z:
        for split, file in script.FILES.items():
            z.writestr(file.names[0], "word <unk> @-@\n" * lines[split])
    script.main([f"--source={tmp_path / 'wikitext-103-v1.zip'}",
                 f"--out={tmp_path / 'a'}", "--encoding=byte"])
    zipfile.ZipFile(tmp_path / "wikitext-103-v1.zip").extractall(tmp_path)
    (tmp_path / "wikitext-103-v1.zip").unlink()
    script.main([f"--source={tmp_path}", f"--out={tmp_path / 'b'}", "--encoding=byte"])
    a, b = load(tmp_path / "a")[0], load(tmp_path / "b")[0]
    assert a == b and counts(a) == (750, 105, 135) and a["name"] == "wikitext103_byte"
    text_file(folder / "wiki.valid.tokens", "too\nfew\n")
    corpus.digest.cache_clear()
    refused(lambda: script.main([f"--source={tmp_path}", f"--out={tmp_path / 'c'}"]),
            "wiki.valid.tokens", "7 are expected")


# ---- writing ----

def test_second_run_verifies_and_stops(tmp_path, capsys):
    source = text_file(tmp_path / "a.txt")
    mine(tmp_path, source)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "mine").iterdir()}
    capsys.readouterr()
    mine(tmp_path, source)
    out = capsys.readouterr().out
    assert "already prepared, verified" in out and "3,870" in out
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "mine").iterdir()} == before
    mine(tmp_path, source, "--force")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "mine").iterdir()} != before


def test_second_run_of_a_known_corpus_needs_no_source(tmp_path, capsys):
    path, file = as_enwik8(tmp_path)
    args = [f"--out={tmp_path / 'out'}", f"--source={path}"]
    sizes = (len(TEXT8) - 20, 10, 10)
    SCRIPTS["enwik8"].main(args, sizes=sizes, file=file)
    path.unlink()
    SCRIPTS["enwik8"].main(args, sizes=sizes, file=file)
    assert "already prepared, verified" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("change", ["bin", "short bin", "no bin", "meta", "no meta", "meta of another kind",
                                    "number in meta", "source", "share", "encoding", "errors"])
def test_whatever_changed_is_noticed_and_built_anew(tmp_path, capsys, change):
    source, more = text_file(tmp_path / "a.txt"), []
    good, _ = mine(tmp_path, source)
    out = tmp_path / "mine"
    if change == "bin":
        data = bytearray((out / "val.bin").read_bytes())
        data[5] ^= 1
        (out / "val.bin").write_bytes(data)
    if change == "short bin":
        os.truncate(out / "train.bin", 10)
    if change.startswith("no "):
        (out / {"bin": "test.bin", "meta": "meta.json"}[change[3:]]).unlink()
    if change.startswith("meta"):
        (out / "meta.json").write_text('{"name":' if change == "meta" else "[1]")
    if change == "number in meta":
        text = (out / "meta.json").read_text()
        text_file(out / "meta.json", text.replace('"vocab_size": 256', '"vocab_size": "256"'))
    if change == "source":
        text_file(source, source.read_text() + "More.\n")
        corpus.digest.cache_clear()
    more += {"share": ["--val=0.1"], "encoding": ["--encoding=char"],
             "errors": ["--encoding=char", "--errors=replace"]}.get(change, [])
    capsys.readouterr()
    meta, _ = mine(tmp_path, source, *more)
    assert "already prepared" not in capsys.readouterr().out
    assert (meta == good) == (change not in ("source", "share", "encoding", "errors"))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["writing", "before renaming", "while renaming"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_no_half_folder(tmp_path, monkeypatch, capsys, moment, error):
    source = text_file(tmp_path / "a.txt")
    good, _ = mine(tmp_path, source)
    text_file(source, "Another text.\n" * 500)
    corpus.digest.cache_clear()
    calls = []

    def fail(*args, **kwargs):
        calls.append(1)
        if moment != "while renaming" or len(calls) == 2:
            raise error
        return REPLACE(*args, **kwargs)
    REPLACE = os.replace
    with monkeypatch.context() as m:
        if moment == "writing":
            m.setattr(Tokenizer, "encode", fail)
        else:
            m.setattr(os, "fsync" if moment == "before renaming" else "replace", fail)
        with pytest.raises((KeyboardInterrupt, UserError, OSError)):
            mine(tmp_path, source)
    names = sorted(p.name for p in (tmp_path / "mine").iterdir())
    if moment == "while renaming":
        assert "meta.json" not in names and not [n for n in names if "tmp" in n]  # counts as not prepared
    else:
        assert load(tmp_path / "mine")[0] == good  # as it was
    meta, _ = mine(tmp_path, source)
    assert meta["source"]["bytes"] == 7000


@pytest.mark.slow
def test_a_full_disk_is_one_line(tmp_path):
    source = text_file(tmp_path / "a.txt", b"x" * 3_000_000)
    command = f"ulimit -f 1000; exec {sys.executable} {ROOT / 'data/prepare_text.py'} --source={source}"
    command += f" --out={tmp_path / 'o'}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd="/")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert str(tmp_path / "o") in done.stderr and "make room" in done.stderr
    assert not list((tmp_path / "o").iterdir())


@pytest.mark.slow
def test_an_impossible_folder_is_one_line(tmp_path):
    source = text_file(tmp_path / "a.txt")
    done = subprocess.run([sys.executable, ROOT / "data/prepare_text.py",
                           f"--source={source}", f"--out={source}/out"],
                          capture_output=True, text=True, cwd="/")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and f"{source}/out" in done.stderr


# writes a text of a megabyte, and ends as it is told: "killed", or after "go" on standard input
WRITES = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from nanoheads.tokenizer import Tokenizer
from nanoheads.corpus import Writer
with Writer(SimpleNamespace(out=Path(sys.argv[1]), name="mine"), Tokenizer("byte"), {"file": "x"}) as writer:
    for split in writer.files:
        writer.add_pieces(split, [b"x" * 1_000_000])
    print("written", flush=True)
    if sys.stdin.readline() == "killed\\n":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def writer_of(out):
    """A process that prepares a folder, in the middle of it."""
    process = subprocess.Popen([sys.executable, "-c", WRITES, str(out)], cwd=ROOT, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "written\n"
    return process


@pytest.mark.parametrize("again", ["the folder is whole", "--force"])
def test_the_next_start_removes_what_a_killed_run_left(tmp_path, again):
    """Of gigabytes for a large corpus. What another process still writes stays, and so do foreign files."""
    source, out = text_file(tmp_path / "a.txt"), tmp_path / "mine"
    mine(tmp_path, source)
    killed, alive = writer_of(out), writer_of(out)
    killed.communicate("killed\n")
    text_file(out / "notes.tmp")
    assert len([*out.glob("*.bin.*.tmp")]) == 6
    prepare_text.main([f"--source={source}", f"--out={out}", *["--force"] * (again == "--force")])
    left = sorted(path.name for path in out.glob("*.tmp"))
    assert left == ["notes.tmp", *(f"{split}.bin.{alive.pid}.tmp" for split in ("test", "train", "val"))]
    alive.communicate("go\n")  # it prepares the folder in its turn
    assert alive.returncode == 0 and (out / "train.bin").stat().st_size == 1_000_000
    assert [path.name for path in out.glob("*.tmp")] == ["notes.tmp"]


def test_a_temporary_file_is_a_new_one_where_a_link_has_its_name(tmp_path):
    victim = text_file(tmp_path / "victim", "mine")
    (tmp_path / f"a.bin.{os.getpid()}.tmp").symlink_to(victim)
    with temporary(tmp_path / "a.bin") as file:
        file.write(b"x")
    assert victim.read_text() == "mine" and not Path(file.name).is_symlink()


# ---- downloads, from a server on this machine ----

class Server(http.server.BaseHTTPRequestHandler):
    data, failures, asked = b"", 0, []

    def do_GET(self):
        self.asked.append(self.path)
        if self.path == "/missing" or len(self.asked) <= self.failures:
            return self.send_error(404 if self.path == "/missing" else 500)
        body = {"/wrong": b"x" * len(self.data), "/empty": b""}.get(self.path, self.data)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = self.path == "/cut" or self.path == "/cut_once" and len(self.asked) == 1
        self.wfile.write(body[:-5] if cut else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(Server, "asked", [])
    monkeypatch.setattr(Server, "failures", 0)
    monkeypatch.setattr(Server, "data", TEXT8)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()


def remote(server, tmp_path, path):
    _, file = as_enwik8(tmp_path)
    return replace(file, url=server + path, archive=None)


def test_a_download_removes_what_a_killed_one_left(server, tmp_path):
    folder = corpus.HOME / "enwik8"
    folder.mkdir(parents=True)
    text_file(folder / "enwik8.1.tmp")
    text_file(folder / "another.1.tmp")
    with temporary(folder / "enwik8") as alive:
        os.rename(alive.name, folder / "enwik8.2.tmp")  # as of another process
        corpus.find(remote(server, tmp_path, "/good"))
    assert sorted(path.name for path in folder.iterdir()) == ["another.1.tmp", "enwik8", "enwik8.2.tmp"]


def test_download_is_kept_and_asked_for_once(server, tmp_path):
    file = remote(server, tmp_path, "/good")
    path, _ = corpus.find(file)
    assert path == corpus.HOME / "enwik8/enwik8" and path.read_bytes() == TEXT8
    assert corpus.find(file)[0] == path and Server.asked == ["/good"]


def test_download_is_tried_again_after_a_server_error(server, tmp_path, monkeypatch):
    monkeypatch.setattr(Server, "failures", 2)
    assert corpus.find(remote(server, tmp_path, "/good"))[0].read_bytes() == TEXT8 and len(Server.asked) == 3


def test_a_download_that_was_cut_off_is_tried_again(server, tmp_path):
    assert corpus.find(remote(server, tmp_path, "/cut_once"))[0].read_bytes() == TEXT8
    assert Server.asked == ["/cut_once"] * 2


@pytest.mark.parametrize("path,words,asked", [
    ("/missing", ["HTTP 404", "NANOHEADS_DATA"], 1), ("/cut", ["download failed", "NANOHEADS_DATA"], 3),
    ("/wrong", ["sha256"], 1), ("/empty", ["is empty"], 1)])
def test_a_bad_download_is_refused_and_leaves_nothing(server, tmp_path, path, words, asked):
    refused(lambda: corpus.find(remote(server, tmp_path, path)), server + path, *words)
    assert len(Server.asked) == asked and not [p for p in corpus.HOME.rglob("*") if p.is_file()]


def test_a_server_that_is_down_is_one_line(tmp_path):
    refused(lambda: corpus.find(remote("http://127.0.0.1:9", tmp_path, "/x")),
            "http://127.0.0.1:9/x", "by hand")


def test_a_download_in_a_zip_is_unpacked(server, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as z:
        z.writestr("enwik8", TEXT8)
    monkeypatch.setattr(Server, "data", (tmp_path / "a.zip").read_bytes())
    _, file = as_enwik8(tmp_path)
    packed = corpus.digest.__wrapped__(text_file(tmp_path / "b", Server.data))
    file = replace(file, archive=File(("enwik8/enwik8.zip",),
                                      packed["sha256"], packed["bytes"], url=server + "/good"))
    SCRIPTS["enwik8"].main([f"--out={tmp_path / 'out'}"], sizes=(len(TEXT8) - 20, 10, 10), file=file)
    assert sum(counts(load(tmp_path / "out")[0])) == len(TEXT8)
    assert (corpus.HOME / "enwik8/enwik8.zip").is_file()


def test_gpt2_files_are_kept_so_that_later_runs_need_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOHEADS_DATA", str(corpora("gpt2_bpe")))
    kept = corpus.keep(corpus.GPT2_MERGES)
    assert kept == corpus.HOME / "gpt2_bpe/vocab.bpe"
    monkeypatch.setenv("NANOHEADS_DATA", "/nowhere")
    assert corpus.keep(corpus.GPT2_MERGES) == kept
    kept.write_bytes(b"rotten")
    corpus.digest.cache_clear()
    monkeypatch.setenv("NANOHEADS_DATA", str(corpora("gpt2_bpe")))
    assert corpus.keep(corpus.GPT2_MERGES).stat().st_size == 456_318  # mended


def test_every_download_names_a_public_https_or_http_address_and_a_checksum():
    files = [SCRIPTS["shakespeare_char"].TEXT, SCRIPTS["enwik8"].ENWIK8.archive, SCRIPTS["wikitext103"].ZIP,
             *SCRIPTS["wikitext2"].FILES.values(), corpus.GPT2_MERGES, corpus.GPT2_ENCODER]
    for file in files:
        assert file.url.startswith("http") and len(file.sha256) == 64, file


# ---- pystdlib ----

@pytest.mark.slow
def test_pystdlib_is_the_same_every_time(tmp_path):
    for out in ("a", "b"):
        SCRIPTS["pystdlib"].main([f"--out={tmp_path / out}"])
    (a, bins), (b, _) = load(tmp_path / "a"), load(tmp_path / "b")
    assert a == b and a["options"]["python"] == "%d.%d.%d" % sys.version_info[:3]
    assert 5e6 < sum(counts(a)) < 3e7 and counts(a)[0] > 0.8 * sum(counts(a)) and min(counts(a)) > 1e5
    bins["train"].tobytes().decode()  # UTF-8 throughout


def test_pystdlib_splits_by_file(tmp_path):
    for name in ("a.py", "pkg/b.py", "pkg/test/c.py", "site-packages/d.py",
                 "__pycache__/e.py", "_sysconfigdata_x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text_file(tmp_path / name, f"name = {name!r}\n")
    text_file(tmp_path / "latin.py", "# é\n".encode("latin-1"))
    assert [name for _, name, _ in SCRIPTS["pystdlib"].library(tmp_path)] == ["a.py", "pkg/b.py"]
    for i in range(300):
        text_file(tmp_path / f"m{i}.py", "x = 1\n")
    SCRIPTS["pystdlib"].main([f"--source={tmp_path}", f"--out={tmp_path / 'out'}"])
    _, bins = load(tmp_path / "out")
    names = [set(line for line in ids.tobytes().splitlines() if line.startswith(b"# ----"))
             for ids in bins.values()]
    assert len(set.union(*names)) == sum(map(len, names)) == 302  # each file in one split
    assert len(names[0]) > 240 and min(map(len, names)) > 3


# ---- any text ----

@pytest.mark.parametrize("encoding", ["byte", "char", "gpt2"])
def test_any_text_in_any_encoding(tmp_path, encoding, request):
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_files")
    text = "naïve — 日本語\n" * 400
    meta, bins = mine(tmp_path, text_file(tmp_path / "a.txt", text),
                      f"--encoding={encoding}", "--val=0.1", "--test=0.2")
    tok = Tokenizer.from_meta(meta)
    assert b"".join(tok.decode_bytes(ids) for ids in bins.values()) == text.encode()
    assert meta["encoding"] == encoding and meta["name"] == "mine"
    assert sum(counts(meta, "bytes")) == len(text.encode())
    cut_in = ("bytes", text.encode()) if encoding == "byte" else ("chars", text)
    assert counts(meta, cut_in[0])[2] == int(0.2 * len(cut_in[1]))


def test_a_folder_of_texts_is_read_in_order_of_name(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "cab":
        text_file(folder / f"{name}.txt", name * 100)
    text_file(folder / "ignored.md")
    (folder / "d.txt.gz").write_bytes(gzip.compress(b"d" * 100))
    meta, bins = mine(tmp_path, folder)
    text = b"".join(ids.tobytes() for ids in bins.values())
    assert text == b"a" * 100 + b"b" * 100 + b"c" * 100 + b"d" * 100
    assert meta["source"]["file"] == ["a.txt", "b.txt", "c.txt", "d.txt.gz"]
    assert meta["source"]["bytes"] == 400


def test_bytes_need_not_be_text(tmp_path):
    data = bytes(range(256)) * 10
    meta, bins = mine(tmp_path, text_file(tmp_path / "a.bin", data))
    assert b"".join(ids.tobytes() for ids in bins.values()) == data
    assert sum(counts(meta, "chars")) == 10 * 192  # all but the 64 continuation bytes


def test_a_text_of_ones_own_goes_into_data_under_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare_text, "HOME", tmp_path / "data")
    source = text_file(tmp_path / "my text.txt")
    prepare_text.main([f"--source={source}"])
    prepare_text.main([f"--source={source}", "--encoding=char"])
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["my_text", "my_text_char"]
    assert load(tmp_path / "data/my_text")[0]["encoding"] == "byte"
    capsys.readouterr()
    prepare_text.main([f"--source={source}"])
    assert "already prepared, verified" in capsys.readouterr().out
    # other text of the name is not written over it, and nothing goes beside a prepare.py
    (tmp_path / "elsewhere").mkdir()
    other = text_file(tmp_path / "elsewhere/my text.txt", "something else\n" * 500)
    before = (tmp_path / "data/my_text/train.bin").read_bytes()
    refused(lambda: prepare_text.main([f"--source={other}"]), "my_text holds another text", "--out")
    assert (tmp_path / "data/my_text/train.bin").read_bytes() == before
    prepare_text.main([f"--source={other}", "--force"])
    assert (tmp_path / "data/my_text/train.bin").read_bytes() != before
    (tmp_path / "data/enwik8").mkdir()
    (tmp_path / "data/enwik8/prepare.py").touch()
    refused(lambda: prepare_text.main([f"--source={text_file(tmp_path / 'enwik8.txt.gz')}"]), "--out")


@pytest.mark.parametrize("encoding", ["char", "gpt2"])
@pytest.mark.parametrize("block", [7, 1 << 22])
def test_what_is_not_utf8_is_replaced_and_counted(tmp_path, encoding, block, request, monkeypatch, capsys):
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_files")
    monkeypatch.setattr(corpus, "BLOCK", block)  # blocks end inside characters
    folder = tmp_path / "texts"
    folder.mkdir()
    text_file(folder / "a.txt", "naïve — 日本語 \ufffd\n" * 50)  # whole, and U+FFFD of its own is not counted
    # a lone byte of Latin-1, a stray continuation, a character cut short, surrogates, and the end cut short
    broken = "naïve caf".encode() + b"\xe9 \x80 \xe6\x97" + b" \xed\xb2\x80 ok" * 20 + b" \xe6\x97"
    text_file(folder / "b.txt", broken)
    argv = [f"--encoding={encoding}", "--errors=replace", "--val=0.2", "--test=0.2"]
    meta, bins = mine(tmp_path, folder, *argv)
    tok, strays = Tokenizer.from_meta(meta), 1 + 1 + 2 + 3 * 20 + 2
    text = b"".join(tok.decode_bytes(ids) for ids in bins.values()).decode()
    want = (folder / "a.txt").read_text() + broken.decode("utf-8", "surrogateescape")
    assert text == "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in want)
    assert text.count("\ufffd") == 50 + strays
    assert meta["options"] == {"val": 0.2, "test": 0.2, "errors": "replace"}
    assert meta["note"] == ("bytes that are not UTF-8, replaced by U+FFFD, which counts as 3 bytes: "
                            f"{strays}, the first at byte 10 of b.txt")
    assert f"note: {meta['note']}" in capsys.readouterr().out
    assert sum(counts(meta, "bytes")) == len(text.encode())
    assert counts(meta, "chars")[1:] == (int(0.2 * len(text)),) * 2


def test_replacing_in_a_text_that_is_whole_changes_nothing(tmp_path):
    source = text_file(tmp_path / "a.txt", "naïve\n" * 100)
    plain, before = mine(tmp_path, source, "--encoding=char")
    meta, bins = mine(tmp_path, source, "--encoding=char", "--errors=replace")
    assert all((bins[split] == before[split]).all() for split in bins) and "note" not in meta
    assert meta == {**plain, "options": {**plain["options"], "errors": "replace"}}


def test_bytes_need_no_replacing_which_is_said(tmp_path, capsys):
    data = bytes(range(256)) * 10
    meta, bins = mine(tmp_path, text_file(tmp_path / "a.bin", data), "--errors=replace")
    assert b"".join(ids.tobytes() for ids in bins.values()) == data and "note" not in meta
    assert capsys.readouterr().out.startswith("--errors=replace changes nothing here: with --encoding=byte")
    assert "errors" not in meta["options"]


# ---- line ends, byte-order marks, UTF-16, folders of texts ----

def test_a_folder_says_what_it_took_what_it_skipped_and_what_stands_between(tmp_path, capsys):
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    for name in "ba":
        text_file(folder / f"{name}.txt", name * 100)
    text_file(folder / "notes.md")
    mine(tmp_path, folder)
    line = capsys.readouterr().out.splitlines()[0]
    assert line == f"{folder}: a.txt, b.txt, and between two of them nothing; skipped: more/, notes.md"
    for i in range(20):
        text_file(folder / f"c{i}.txt")
    mine(tmp_path, folder, "--separator=|")
    line = capsys.readouterr().out.splitlines()[0]
    assert "c4.txt" not in line and "c13.txt and 14 more, and between two of them '|'; skipped" in line
    plain = text_file(tmp_path / "plain.txt")
    mine(tmp_path, plain, "--force")
    assert capsys.readouterr().out.startswith(f"{os.path.relpath(tmp_path / 'mine')}: byte")  # nothing to say


@pytest.mark.parametrize("encoding", ["byte", "char"])
@pytest.mark.parametrize("block", [1, 3, 1 << 22])
def test_line_ends_and_byte_order_marks_are_named_and_normalised_on_request(tmp_path, encoding, block,
                                                                            monkeypatch, capsys):
    monkeypatch.setattr(corpus, "BLOCK", block)  # blocks end inside them
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = "\ufeffone\r\ntwo\n\r\n\rthr\ufeffée\r" * 10
    for name in "ab":
        text_file(folder / f"{name}.txt", lines)
    argv = [f"--encoding={encoding}", "--val=0.2", "--test=0.2"]

    def prepared(*more):
        meta, bins = mine(tmp_path, folder, *argv, *more)
        whole = np.concatenate(list(bins.values()))
        return meta, Tokenizer.from_meta(meta).decode(whole), capsys.readouterr().out
    meta, text, said = prepared()
    assert text == 2 * lines and "note" not in meta
    assert "line ends: 40 of 100 are CRLF, 40 are CR; --normalise makes all of them LF\n" in said
    assert "byte-order marks (U+FEFF): 40, which stay in the text; --normalise removes them\n" in said
    meta, text, said = prepared("--normalise")
    assert text == "one\ntwo\n\n\nthrée\n" * 20 and meta["options"]["normalise"] is True
    assert "line ends: 40 of 100 are CRLF, 40 are CR; all are LF now\n" in said
    assert "byte-order marks (U+FEFF): 40, which are removed\n" in said
    assert sum(counts(meta, "bytes")) == len(text.encode()) and sum(counts(meta, "chars")) == len(text)


@pytest.mark.parametrize("codec, kind", [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16LE"),
                                         ("utf-16-be", "UTF-16BE"), ("utf-32", "UTF-32")])
def test_utf16_is_named_with_what_makes_it_utf8(tmp_path, codec, kind, capsys):
    source = text_file(tmp_path / "a.txt", ("To be, naïve — or not\n" * 50).encode(codec))
    advice = f"convert it: iconv -f {kind} -t UTF-8 a.txt > new.txt"
    for more in (["--encoding=char"], ["--encoding=char", "--errors=replace"]):
        assert refused(lambda more=more: mine(tmp_path, source, *more)) == (
            f"{source}: is {kind[:6]}, not UTF-8; {advice}")
    meta, _ = mine(tmp_path, source)  # bytes may be anything: it is said, and said again with each score
    assert advice in capsys.readouterr().out
    assert meta["note"].startswith(f"a.txt is {kind[:6]}: its bits per byte")


# ---- documents ----

STORIES = ["A first one.\n\nIt has two parts, naïve ones.\n", "A second.\n",
           "A third, | here.\n\nAnd on.\n"] * 45


def split_up(data):
    """{split: the texts of its documents}."""
    found = {}
    for split in data.splits:
        cuts, tokens = data.documents(split), data.tokens(split)
        found[split] = [data.tokenizer.decode(tokens[a:b]) for a, b in zip(cuts, cuts[1:])]
    return found


@pytest.mark.parametrize("encoding", ["byte", "char", "gpt2", "hf"])
@pytest.mark.parametrize("block", [50, 1 << 22])
def test_documents_are_cut_where_the_separator_is(tmp_path, encoding, block, request, monkeypatch):
    """All 135 of them, and not at their blank lines; the separator is a token, or stays text in bytes."""
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_files")
    monkeypatch.setattr(corpus, "BLOCK", block)  # blocks end inside separators
    mark, more = "<|endoftext|>", []
    if encoding == "hf":
        more = [f"--tokenizer={text_file(tmp_path / 'tokenizer.json', byte_pairs(STORIES[0]))}"]
    source = text_file(tmp_path / "a.txt", mark.join(STORIES))
    meta, bins = mine(tmp_path, source, f"--encoding={encoding}", f"--separator={mark}", *more)
    data = Dataset(tmp_path / "mine")
    found = split_up(data)
    cut = sum(found.values(), [])
    assert "".join(cut) == mark.join(STORIES) and meta["options"]["separator"] == mark
    # a document may go on in the next split, and no separator is cut
    assert 135 <= len(cut) <= 137 and sum(text.endswith(mark) for text in cut) == 134
    assert all(text.count(mark) <= 1 for text in cut)
    if encoding in ("gpt2", "hf"):
        for split, ids in bins.items():
            assert (ids == data.separator).sum() == sum(text.endswith(mark) for text in found[split])
            text = "".join(found[split]).replace(mark, "").encode()
            assert meta["splits"][split]["bytes"] == len(text)  # separators are tokens, and no text
    else:
        assert sum(counts(meta, "bytes")) == len(mark.join(STORIES).encode())


@pytest.mark.parametrize("at", range(13))
def test_a_split_does_not_end_inside_a_separator(tmp_path, at):
    """Wherever in it the shares would have the split end."""
    mark, total = "<|endoftext|>", 400
    text = ("a" * (320 - at) + mark).ljust(total, "b")
    _, bins = mine(tmp_path, text_file(tmp_path / "a.txt", text), f"--separator={mark}", "--val=0.1",
                   "--test=0.1")
    sizes = [len(ids) for ids in bins.values()]
    assert sizes == [320 if at == 0 else 320 - at + 13, 40 if at == 0 else 27 + at, 40]
    assert "".join(Tokenizer("byte").decode(ids) for ids in bins.values()) == text


def test_blank_lines_may_part_documents_and_so_may_files(tmp_path, gpt2_files, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    text_file(folder / "a.txt", "\n\n".join(["one of\ntwo lines"] * 20))
    text_file(folder / "b.txt", "\n\n".join(["another"] * 20) + "\n\n")  # ends with one
    text_file(folder / "c.txt", "last " * 50 + "\n\n\n\n" + "very last " * 20)  # two in a row are one
    meta, bins = mine(tmp_path, folder, "--encoding=gpt2", r"--separator=\n\n", "--val=0.2", "--test=0.2")
    assert "and between two of them an end-of-text token" in capsys.readouterr().out
    text = Tokenizer("gpt2").decode(np.concatenate(list(bins.values())))
    expected = ["one of\ntwo lines"] * 20 + ["another"] * 20 + ["last " * 50, "very last " * 20]
    assert text.split("<|endoftext|>") == expected


def test_special_tokens_that_stay_text_are_counted(tmp_path, capsys):
    mark = "<|endoftext|>"
    source = text_file(tmp_path / "a.txt", mark.join(STORIES))
    mine(tmp_path, source)
    assert (f"{mark} is 134 times in the text and stays text; --separator='{mark}' makes documents of what "
            "is between\n") in capsys.readouterr().out
    mine(tmp_path, source, f"--separator={mark}")
    said = capsys.readouterr().out
    assert "stays text" not in said and f"'{mark}' ends a document 134 times\n" in said


def test_separators_that_cannot_be_are_one_line(tmp_path):
    crlf = text_file(tmp_path / "a.txt", "one\r\n\r\ntwo\r\n" * 30)
    line = refused(lambda: mine(tmp_path, crlf, r"--separator=\n\n"))
    assert line == (f"{crlf}: --separator='\\n\\n' is not in the text; lines end in CRLF: take --normalise "
                    "as well")
    mine(tmp_path, crlf, r"--separator=\n\n", "--normalise")
    assert len(Dataset(tmp_path / "mine").documents("train")) == 29
    tokenizer = text_file(tmp_path / "tokenizer.json", byte_pairs("a text", special=["<pad>"]))
    argv = ["--encoding=hf", f"--tokenizer={tokenizer}", "--separator=two"]
    line = refused(lambda: mine(tmp_path, crlf, *argv))
    assert line.startswith(f"--separator: {tokenizer} has no end-of-text token (<|endoftext|>, </s>, ")


def test_an_encoding_that_changes_the_text_says_so(tmp_path, capsys):
    """NFC: two of five words have a decomposed accent."""
    text = "cafe\u0301 or tea pre\u0301s or\n" * 40
    tokenizer = text_file(tmp_path / "tokenizer.json", byte_pairs(text, r"\S+|\s", normalizer="NFC"))
    argv = ["--encoding=hf", f"--tokenizer={tokenizer}", "--val=0.25", "--test=0.25"]
    command = [f"--source={text_file(tmp_path / 'a.txt', text)}", f"--out={tmp_path / 'mine'}", *argv]
    prepare_text.main(command)
    meta, size = json.loads((tmp_path / "mine/meta.json").read_text()), len(text.encode())
    assert meta["note"] == (f"the encoding changes the text: the tokens of {40 * (6 + 6):,} of its {size:,} "
                            "bytes spell something else; bits per byte count the bytes of the text")
    assert f"note: {meta['note']}\n" in capsys.readouterr().out
    prepare_text.main(command)
    assert "already prepared, verified" in capsys.readouterr().out
    (tmp_path / "mine/val.sizes.bin").write_bytes(b"other")
    prepare_text.main(command)
    assert "val.sizes.bin: differs from its checksum: preparing it anew" in capsys.readouterr().out
    composed = text_file(tmp_path / "b.txt", text.replace("e\u0301", "é"))
    meta, _ = mine(tmp_path, composed, *argv)  # load(): and nothing of the old one is left over
    assert "note" not in meta and meta["spelled"]


def test_a_corpus_script_does_not_name_an_option_it_lacks(tmp_path):
    path, file = as_enwik8(tmp_path, b"caf\xe9" * 100)
    line = refused(lambda: SCRIPTS["enwik8_char"].main([f"--source={path}", f"--out={tmp_path / 'out'}"],
                                                       file=file))
    assert line == f"{path}: is not UTF-8 at byte 3; convert it"


# ---- openwebtext ----

def arguments(tmp_path):
    return corpus.arguments("", "openwebtext", ["gpt2"], [f"--out={tmp_path / 'out'}"])


@pytest.mark.slow
def test_openwebtext_documents_end_in_end_of_text(tmp_path, gpt2_files):
    documents = [f"Document {i}: naïve <|endoftext|> text.\n\n" for i in range(1000)]
    documents += documents[:300]  # copies
    script = SCRIPTS["openwebtext"]
    script.write(arguments(tmp_path), iter(documents), "made up", share=0.05)
    meta, bins = load(tmp_path / "out")
    tok, found = Tokenizer("gpt2"), {}
    for split, ids in bins.items():
        ends = np.flatnonzero(ids == 50256)
        assert ids[-1] == 50256
        found[split] = [tok.decode(part[part != 50256]) for part in np.split(ids, ends + 1)[:-1]]
        assert meta["splits"][split]["bytes"] == len("".join(found[split]).encode())  # separators are no text
        assert f"{split} {len(ends):,}" in meta["note"]
    assert sorted(sum(found.values(), [])) == sorted(documents)
    for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
        assert not set(found[one]) & set(found[other])  # copies stay on one side
    assert 30 < len(found["val"]) < 120 and 30 < len(found["test"]) < 120
    assert meta["source"]["bytes"] == sum(len(d.encode()) for d in documents)


@pytest.mark.slow
def test_openwebtext_memory_does_not_grow_with_the_corpus(tmp_path, gpt2_files):
    def documents(n):
        return (f"{i} " + "word " * 300 for i in range(n))
    script, args, peaks = SCRIPTS["openwebtext"], arguments(tmp_path), []
    for n in (600, 3000):
        tracemalloc.start()
        script.write(args, documents(n), "made up", share=0.1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


def test_openwebtext_says_what_it_lacks(monkeypatch):
    script = SCRIPTS["openwebtext"]
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
    refused(lambda: next(script.stream([])), "pip install datasets")


@pytest.mark.slow
def test_openwebtext_is_streamed_from_a_fixed_commit(tmp_path, gpt2_files, monkeypatch, capsys):
    import types
    asked = []

    def load_dataset(path, **kwargs):
        asked.append({"path": path, **kwargs})
        if len(asked) == 2:
            raise RuntimeError("no network\nwith details")
        return ({"text": f"document {i}"} for i in range(20_000))
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    script = SCRIPTS["openwebtext"]
    script.main([f"--out={tmp_path / 'out'}"])
    assert asked[0] == {"path": script.REPO, "revision": script.REVISION, "split": "train", "streaming": True}
    assert "a part of the corpus, 20,000 of 8,013,769" in load(tmp_path / "out")[0]["note"]
    script.main([f"--out={tmp_path / 'out'}"])
    assert "already prepared, verified" in capsys.readouterr().out and len(asked) == 1
    refused(lambda: script.main([f"--out={tmp_path / 'out'}", "--force"]), script.REPO, "no network")


# ---- fineweb ----

DOCUMENTS = [f"Document {i}: naïve 日本 " + "and more of it. " * (i * 37 % 11) for i in range(120)]
DOCUMENTS += ["", "x"]


def jsonl(path, documents=DOCUMENTS):
    path.write_text("".join(json.dumps(dict(text=text, id=5)) + "\n" for text in documents))
    return path


def fineweb(tmp_path, *more, source=None, out="out", tokens=400):
    """The Dataset that data/fineweb/prepare.py makes of DOCUMENTS."""
    source = source or jsonl(tmp_path / "documents.jsonl")
    SCRIPTS["fineweb"].main([f"--source={source}", f"--out={tmp_path / out}", f"--shard_tokens={tokens}",
                             *more])
    return Dataset(tmp_path / out)


def shards_in(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def test_fineweb_is_laid_out_as_llm_c_has_it(tmp_path, gpt2_files):
    data, tok = fineweb(tmp_path), Tokenizer("gpt2")
    stream = np.concatenate([[50256, *tok.encode(text)] for text in DOCUMENTS])
    parts = [stream[at:at + 400] for at in range(0, len(stream), 400)]
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, len(parts))]
    found = shards_in(tmp_path / "out")
    assert found == dict(zip(sorted(names[1:]) + names[:1], map(in_llm_c, parts[1:] + parts[:1])))
    assert (data.tokens("val")[:] == parts[0]).all()
    assert (data.tokens("train")[:] == stream[400:]).all()
    assert len(parts[-1]) < 400 and "test is val over again" in data.meta["note"]
    for split in ("train", "val"):  # an end-of-text token is no text
        text = tok.decode_bytes([i for i in data.tokens(split)[:].tolist() if i != 50256])
        assert data.splits[split]["bytes"] == len(text)
    assert data.splits["val"]["chars"] + data.splits["train"]["chars"] == sum(map(len, DOCUMENTS))


def test_fineweb_in_bytes_has_a_nul_behind_each_document(tmp_path):
    data, text = fineweb(tmp_path, "--encoding=byte"), "".join(text + "\0" for text in DOCUMENTS).encode()
    assert data.tokens("val")[:].tobytes() + data.tokens("train")[:].tobytes() == text
    assert b"".join(shards_in(tmp_path / "out").values()) == text[400:] + text[:400]
    assert data.meta["dtype"] == "uint8" and data.splits["train"]["bytes"] == len(text) - 400
    ends = [0, *(i + 1 for i, byte in enumerate(text[400:]) if byte == 0)]
    assert data.documents("train").tolist() == ends


@pytest.mark.parametrize("form", ["jsonl.gz", "jsonl.xz", "parquet", "folder"])
def test_fineweb_reads_documents_from_any_form(tmp_path, form, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK", 100)  # lines go on in the next block
    good = fineweb(tmp_path, "--encoding=byte")
    source = tmp_path / f"copy.{form}"
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        importlib.import_module("pyarrow.parquet").write_table(
            pyarrow.table(dict(id=list(range(122)), text=DOCUMENTS)), source, row_group_size=50)
    elif form == "folder":
        (source / "b").mkdir(parents=True)
        jsonl(source / "a.jsonl", DOCUMENTS[:50])
        jsonl(source / "b/a.jsonl", DOCUMENTS[50:])
        (source / "README.md").write_text("no documents")
    else:
        raw = (tmp_path / "documents.jsonl").read_bytes()
        source.write_bytes({"gz": gzip, "xz": lzma}[form[6:]].compress(raw))
    assert fineweb(tmp_path, "--encoding=byte", source=source, out="other").sums == good.sums


@pytest.mark.parametrize("moment, encoding, tokens", [
    ("writing", "byte", 90), ("after writing", "byte", 90), ("describing", "byte", 400),
    ("writing", "gpt2", 200), ("after writing", "gpt2", 200)])
def test_fineweb_goes_on_behind_the_last_whole_shard(tmp_path, monkeypatch, capsys, request, encoding, tokens,
                                                     moment):
    """Killed again and again, also in a document that is longer than a shard."""
    source = jsonl(tmp_path / "few.jsonl", DOCUMENTS[:30])
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_files")
    script, more = SCRIPTS["fineweb"], f"--encoding={encoding}"
    whole = fineweb(tmp_path, more, out="whole", tokens=tokens, source=source)
    left = [2]

    def kill(real):
        def killed(*given, **named):
            if not left[0]:
                raise ZeroDivisionError("as if killed")
            left[0] -= 1
            return real(*given, **named)
        return killed
    name = {"writing": "write_atomic", "after writing": "keep", "describing": "read_once"}[moment]
    monkeypatch.setattr(script, name, kill(getattr(script, name)))
    for _ in range(20):
        try:
            fineweb(tmp_path, more, tokens=tokens, source=source)
            break
        except ZeroDivisionError:
            assert not (tmp_path / "out/meta.json").exists()
            left[0] = 99 if moment == "describing" else 4
    assert "going on behind them" in capsys.readouterr().out or moment == "describing"
    assert shards_in(tmp_path / "out") == shards_in(tmp_path / "whole")
    assert Dataset(tmp_path / "out").meta["splits"] == whole.meta["splits"]


def test_a_second_run_of_fineweb_verifies_and_stops(tmp_path, capsys):
    fineweb(tmp_path, "--encoding=byte")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    fineweb(tmp_path, "--encoding=byte")
    assert "already prepared, verified" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    refused(lambda: fineweb(tmp_path, "--encoding=byte", tokens=300), "holds another text", "--force")
    again = fineweb(tmp_path, "--encoding=byte", "--force", tokens=3000)
    assert {*(tmp_path / "out").glob("*.bin")} == {*again.files("train"), *again.files("val")}
    assert fineweb(tmp_path, "--encoding=byte", "--force", tokens=300).splits["val"]["tokens"] == 300
    path = tmp_path / "out/fineweb_train_000002.bin"
    os.truncate(path, 5)
    refused(lambda: fineweb(tmp_path, "--encoding=byte", tokens=300), f"{path} is cut short")
    path.unlink()
    (tmp_path / "out/meta.json").unlink()
    refused(lambda: fineweb(tmp_path, "--encoding=byte"), "holds shards of", "'shard_tokens': 300", "--force")


def test_fineweb_writes_over_no_shards_of_others(tmp_path):
    (tmp_path / "out").mkdir()
    theirs = tmp_path / "out/fineweb_train_000001.bin"
    theirs.write_bytes(in_llm_c([1, 2]))
    refused(lambda: fineweb(tmp_path, "--encoding=byte"), str(theirs), "--shards", "--force")
    assert theirs.read_bytes() == in_llm_c([1, 2])


def test_shards_that_are_there_are_read_where_they_lie(tmp_path, gpt2_files, monkeypatch, capsys):
    """They are hashed once, here, and nothing is written beside them."""
    tok, theirs, script = Tokenizer("gpt2"), tmp_path / "theirs", SCRIPTS["fineweb"]
    theirs.mkdir()
    texts = {"fineweb_val_000000": "naïve 日本 " * 30, "fineweb_train_000001": "To be " * 50,
             "fineweb_train_000010": "or not " * 40, "fineweb_train_000002": "é" * 70}
    for name, text in texts.items():
        (theirs / f"{name}.bin").write_bytes(in_llm_c([50256, *tok.encode(text)]))
        os.utime(theirs / f"{name}.bin", ns=(1, 1))
    monkeypatch.setattr(files, "SETTLED", -1e18)
    command = ["--shards", f"{theirs}/*.bin", f"--out={tmp_path / 'mine'}"]
    script.main(command)
    data = Dataset(tmp_path / "mine")
    train = [texts[f"fineweb_train_{i:06d}"] for i in (1, 2, 10)]
    stream = data.tokens("train")[:]
    assert stream.tolist() == [i for text in train for i in (50256, *tok.encode(text))]
    assert data.splits["train"]["bytes"] == len("".join(train).encode())
    assert data.splits["val"]["chars"] == len(texts["fineweb_val_000000"])
    assert data.splits["test"] == data.splits["val"] and "test is val over again" in data.meta["note"]
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == sorted(
        ["meta.json", *(f"{name}.bin.checked" for name in texts)])
    assert len(list(theirs.iterdir())) == 4

    def never(*given):
        raise AssertionError("hashed again")
    monkeypatch.setattr(files, "sha256_of", never)
    monkeypatch.setattr(files, "KNOWN", {})  # another process
    Dataset(tmp_path / "mine").tokens("train")
    capsys.readouterr()
    script.main(command)
    assert "already prepared, verified" in capsys.readouterr().out
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell leaves the ~ of a quoted name to us
    script.main(["--shards", "~/theirs/*.bin", command[-1]])
    assert "already prepared, verified" in capsys.readouterr().out
    (theirs / "fineweb_train_000002.bin").unlink()
    refused(lambda: script.main(command), "holds another text")


@pytest.mark.parametrize("name, content, words", [
    ("fineweb_train_000002.bin", b"abc", "it is shorter than its header"),
    ("fineweb_train_000002.bin", in_llm_c([1, 2])[:-1], "is cut short"),
    ("fineweb_train_000002.bin", in_llm_c([1, 2]) + b"a", "is too long"),
    ("fineweb_train_000002.bin", in_llm_c([1, 2], magic=20240522), "begins with 20240522"),
    ("fineweb_train_000002.bin", in_llm_c([1, 2], version=7), "of version 7"),
    ("fineweb_train_000002.bin", in_llm_c([1, 50257]), "holds the token 50,257, and the gpt2 vocabulary"),
    ("fineweb_000002.bin", in_llm_c([1, 2]), "its name must have train, val or test in it"),
    ("trainval.bin", in_llm_c([1, 2]), "its name must have train, val or test in it"),
])
def test_a_bad_shard_is_named_before_meta_json_is_written(tmp_path, gpt2_files, name, content, words):
    for split in ("train", "val"):
        (tmp_path / f"fineweb_{split}_000000.bin").write_bytes(in_llm_c([1, 2, 3]))
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "mine"
    refused(lambda: SCRIPTS["fineweb"].main(["--shards", f"{tmp_path}/*.bin", f"--out={out}"]),
            f"{tmp_path / name}", words)
    assert not (out / "meta.json").exists()


@pytest.mark.parametrize("more, words", [
    (["--shards", "nothing*.bin"], "no such file"), (["--shards", "a_train.bin"], "no file has 'val' in"),
    (["--shards", "a_train.bin", "b/a_train.bin"], "two files are called a_train.bin"),
    (["--shards", "a_train.bin", "--encoding=byte"], "leave --source and"),
    (["--shards", "b"], "b is a folder; name the files in it"),
    (["--shard_tokens=0"], "--shard-tokens=0 must be from 1"), (["--shard-tokens=3e9"], "3e9"),
    (["--source=nowhere"], "no such file"), (["--source=b"], "holds no file of .jsonl"),
    (["--source=bad.jsonl"], "bad.jsonl: line 2 is no JSON object with a \"text\""),
    (["--source=bad.parquet"], "bad.parquet: has no column \"text\""),
    (["--source=few.jsonl", "--encoding=byte"], "fills 1 shard, and the first is val"),
])
def test_what_fineweb_cannot_read_is_one_line(tmp_path, gpt2_files, monkeypatch, capsys, more, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    for name in ("a_train.bin", "b/a_train.bin"):
        (tmp_path / name).write_bytes(in_llm_c([1]))
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n\n{"content": "bad"}\n')
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    jsonl(tmp_path / "few.jsonl", ["one"])
    if "3e9" in words:
        with pytest.raises(SystemExit):
            SCRIPTS["fineweb"].main(more)
        assert words in capsys.readouterr().err
        return
    refused(lambda: SCRIPTS["fineweb"].main([*more, f"--out={tmp_path / 'out'}"]), words)
    assert not (tmp_path / "out/meta.json").exists()


def test_fineweb_is_streamed_from_the_commit_that_it_began_with(tmp_path, gpt2_files, monkeypatch, capsys):
    import types
    script, asked = SCRIPTS["fineweb"], []
    monkeypatch.setattr(script, "BATCH", 16)

    class Stream(list):
        def skip(self, n):
            asked.append(n)
            return Stream(self[n:])

    def load_dataset(path, **given):
        asked.append((path, given["name"], given["revision"], given["split"], given["streaming"]))
        rows = Stream(dict(text=text) for text in DOCUMENTS)
        return rows if len(asked) > 2 else Broken(rows)

    class Broken(Stream):
        def skip(self, n):
            def rows():
                yield from self[n:100]
                raise RuntimeError("no network\nwith details")
            asked.append(n)
            return rows()

    api = types.SimpleNamespace(dataset_info=lambda repo: types.SimpleNamespace(sha=f"c{len(asked)}"))
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=lambda: api))
    command = [f"--out={tmp_path / 'hub'}", "--shard_tokens=400"]
    refused(lambda: script.main(command), script.REPO, "no network", "run this again")
    script.main(command)
    hub = ("HuggingFaceFW/fineweb-edu", "sample-10BT", "c0", "train", True)
    assert asked[:3] == [hub, 0, hub] and 0 < asked[3] < 100, "the second time behind the documents it has"
    script.main(command)
    assert len(asked) == 4 and "already prepared, verified" in capsys.readouterr().out
    fineweb(tmp_path)
    assert shards_in(tmp_path / "hub") == shards_in(tmp_path / "out")
    assert Dataset(tmp_path / "hub").meta["source"]["file"] == "HuggingFaceFW/fineweb-edu@c0, sample-10BT"
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
    refused(lambda: script.main([*command, "--force"]), "pip install datasets")


# ---- nanoGPT's folders ----

def nanogpt_folder(folder, text="First Citizen:\nBefore we proceed, é\n" * 50, **pickled):
    """What nanoGPT's data/shakespeare_char/prepare.py writes, of another text."""
    folder.mkdir()
    chars = sorted(set(text))
    stoi = {c: i for i, c in enumerate(chars)}
    cut = int(0.9 * len(text))
    for split, part in (("train", text[:cut]), ("val", text[cut:])):
        np.array([stoi[c] for c in part], np.uint16).tofile(folder / f"{split}.bin")
    meta = dict(vocab_size=len(chars), itos=dict(enumerate(chars)), stoi=stoi, **pickled)
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder, text[:cut], text[cut:]


def test_a_folder_of_nanogpt_is_named_with_the_command_that_makes_it_a_dataset(tmp_path):
    folder, *_ = nanogpt_folder(tmp_path / "shakespeare_char")
    line = refused(lambda: Dataset(folder), f"{folder} has train.bin and val.bin but no meta.json; if nano")
    assert line.endswith(f"run: python {os.path.relpath(ROOT / 'data/from_nanogpt.py')} {folder}")
    from_nanogpt.main([str(folder)])
    assert Dataset(folder).vocab_size == 21


def test_characters_of_nanogpt_are_those_of_its_meta_pkl(tmp_path, capsys):
    folder, train, val = nanogpt_folder(tmp_path / "theirs")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    from_nanogpt.main([str(folder)])
    data, said = Dataset(folder), capsys.readouterr().out
    for split, text in (("train", train), ("val", val), ("test", val)):
        assert data.tokenizer.decode(data.tokens(split)) == text
    assert data.splits["val"]["bytes"] == len(val.encode()) > data.splits["val"]["chars"] == len(val)
    assert data.tokenizer.decode([data.separator]) == "\n" and data.meta["name"] == "theirs"
    assert "test is val over again" in data.meta["note"] and "test is val over again" in said
    assert all((folder / name).read_bytes() == content for name, content in before.items())
    assert "is a dataset already" in refused(lambda: from_nanogpt.main([str(folder)]))
    # a third part of one's own is taken
    (folder / "test.bin").write_bytes(before["val.bin"][:20])
    from_nanogpt.main([str(folder), "--force"])
    assert Dataset(folder).splits["test"]["tokens"] == 10 and "note" not in Dataset(folder).meta


def test_without_a_meta_pkl_the_tokens_are_gpt2s(tmp_path, gpt2_files):
    folder, tok = tmp_path / "shakespeare", Tokenizer("gpt2")
    folder.mkdir()
    text = "To be, naïve, or not 日本."
    np.append(tok.encode(text), [50256]).astype(np.uint16).tofile(folder / "train.bin")
    tok.encode(text).tofile(folder / "val.bin")
    from_nanogpt.main([str(folder)])
    data = Dataset(folder)
    assert data.meta["encoding"] == "gpt2" and data.separator == 50256
    for split in ("train", "val"):  # the end of a text is no text
        assert data.splits[split]["bytes"] == len(text.encode()) and data.splits[split]["chars"] == len(text)
    np.array([50257], np.uint16).tofile(folder / "val.bin")
    line = refused(lambda: from_nanogpt.main([str(folder), "--force"]))
    assert line == f"{folder}: a token is 50,257, and the gpt2 vocabulary has 50,257"


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize("damage, words", [
    (lambda f: (f / "meta.pkl").write_bytes(pickle.dumps(Evil())), "(UnpicklingError: it wants to call "),
    (lambda f: (f / "meta.pkl").write_bytes(b"\x80\x04 no pickle"), "meta.pkl does not name the characters"),
    (lambda f: (f / "meta.pkl").write_bytes(b""), "(EOFError: "),
    (lambda f: (f / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=3))), "(KeyError: 'itos')"),
    (lambda f: (f / "meta.pkl").write_bytes(pickle.dumps(dict(itos={0: "the"}))), "single characters"),
    (lambda f: (f / "meta.pkl").write_bytes(pickle.dumps(dict(itos={0: "a"}))), "the char vocabulary has 1"),
    (lambda f: (f / "meta.pkl").unlink(), "no token is above 20, so that these are no byte pairs of GPT-2"),
    (lambda f: (f / "val.bin").unlink(), "has no val.bin"),
    (lambda f: (f / "val.bin").write_bytes(b"abc"), "3 bytes are no tokens of nanoGPT's"),
])
def test_a_folder_that_is_not_nanogpts_is_one_line(tmp_path, monkeypatch, damage, words):
    monkeypatch.chdir(tmp_path)
    folder, *_ = nanogpt_folder(tmp_path / "theirs")
    damage(folder)
    assert words in refused(lambda: from_nanogpt.main([str(folder)]))
    assert not (tmp_path / "evil").exists() and not (folder / "meta.json").exists()


# ---- all scripts ----

@pytest.mark.slow
@pytest.mark.parametrize("script", [f"{name}/prepare.py" for name in NAMES] + ["prepare_text.py",
                                                                               "from_nanogpt.py"])
def test_scripts_start_from_any_folder_and_begin_with_their_command(script):
    text = (ROOT / "data" / script).read_text()
    doc = text.split('"""')[1]
    assert f"python data/{script}" in doc and "ou should see" in doc
    if script in ("pystdlib/prepare.py", "prepare_text.py"):  # the others share their frame
        done = subprocess.run([sys.executable, ROOT / "data" / script, "--help"],
                              capture_output=True, text=True, cwd="/")
        assert done.returncode == 0 and "--source" in done.stdout
