"""The scripts of data/: what they make of small sources, what they refuse, and what a kill leaves."""
import gzip
import importlib
import json
import lzma
import os
import pickle
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, byte_pairs, in_llm_c
from hypothesis import given, settings, strategies as st

from nanoheads import corpus, prepare
from nanoheads.common import UserError
from nanoheads.corpus import File
from nanoheads.dataset import Dataset
from nanoheads.files import only_writer
from nanoheads.tokenizer import Tokenizer

SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in [
    *ROOT.glob("data/*/prepare.py"), ROOT / "data/prepare_text.py", ROOT / "data/from_nanogpt.py"])
SPLITS = "train", "val", "test"


def main(script, *argv):
    module = importlib.import_module(f"data.{script}".removesuffix(".py").replace("/", "."))
    module.main([str(arg) for arg in argv])


def made(script, out, *argv):
    """The Dataset that a script writes into a folder."""
    main(script, f"--out={out}", *argv)
    return Dataset(out)


def refused(script, *argv):
    """The line with which a script ends."""
    with pytest.raises(SystemExit) as e:
        prepare.run(lambda: main(script, *argv))
    assert e.value.code.startswith("error: ") and "\n" not in e.value.code
    return e.value.code


def texts_of(data):
    return [data.tokenizer.decode_bytes(data.tokens(split)) for split in SPLITS]


def real(name):
    """A folder of real corpora; skipped where it is not there."""
    folder = Path(os.environ.get("NANOHEADS_DATA") or ROOT / "data").resolve()
    if not (folder / name).is_dir():
        pytest.skip(f"no {name} in the folder of real corpora")
    return folder / name


# ---- texts of one's own ----

PARTS = ["To be ", "or not.", "|", "||", "\n", "\n\n", "\r\n", "naïve ", "日本", "a" * 30]
TEXT = st.lists(st.sampled_from(PARTS), min_size=40, max_size=90).map("".join)


@pytest.mark.parametrize("encoding", ["byte", "char", "gpt2", "hf"])
@settings(max_examples=8)
@given(st.lists(TEXT, min_size=1, max_size=3), st.sampled_from([None, "|", "||", "\n\n"]), st.booleans())
def test_the_splits_add_up_to_the_text(encoding, request, texts, separator, normalise):
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_files")
    more = ([f"--separator={separator}"] if separator else []) + ["--normalise"] * normalise
    lines = [text.replace("\r\n", "\n") for text in texts] if normalise else texts
    whole = lines[0]
    for text in lines[1:]:
        whole += (separator if separator and not whole.endswith(separator) else "") + text
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "texts"
        folder.mkdir()
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_bytes(text.encode())
        if encoding == "hf":
            (Path(root) / "tokenizer.json").write_text(byte_pairs("To be or not, naïve.\n" * 9))
            more.append(f"--tokenizer={root}")
        given = [f"--source={folder}", f"--encoding={encoding}", "--val=0.2", "--test=0.2", *more]
        if separator and separator not in whole:
            assert "is not in the text" in refused("prepare_text", f"--out={root}/out", *given)
            return
        data = made("prepare_text", f"{root}/out", *given)
        end = data.tokenizer.end
        found = [data.tokens(split).tolist() for split in SPLITS]
    assert [data.splits[split]["tokens"] for split in SPLITS] == [*map(len, found)]
    counts = [sum(data.splits[split][key] for split in SPLITS) for key in ("bytes", "chars")]
    if separator and encoding in ("gpt2", "hf"):  # an end-of-text token for each separator, or several
        documents, rest = [], b""
        for ids in found:
            for i in ids:
                documents += [rest] if i == end else []
                rest = b"" if i == end else rest + data.tokenizer.decode_bytes([i])
            documents += [rest] if rest else []  # a split ends in a document
            rest = b""
        pieces = [piece for piece in whole.split(separator) if piece]
        assert b"".join(documents) == "".join(pieces).encode()
        assert len(pieces) <= len(documents) <= len(pieces) + 2
        assert counts == [len("".join(pieces).encode()), len("".join(pieces))]
        return
    ends = np.cumsum([len(data.tokenizer.decode(ids)) if encoding != "byte" else len(ids) for ids in found])
    assert b"".join(map(data.tokenizer.decode_bytes, found)) == whole.encode()
    assert counts == [len(whole.encode()), len(whole)]
    text = whole.encode() if encoding == "byte" else whole
    share = int(len(text) * 0.2)
    for place, wanted in zip(ends, (len(text) - 2 * share, len(text) - share)):
        if not separator:
            assert place == wanted
        else:  # no split begins inside a separator
            mark = separator.encode() if encoding == "byte" else separator
            inside = [match.end() for match in re.finditer(re.escape(mark), text)
                      if match.start() < wanted < match.end()]
            assert place == (inside or [wanted])[0]


def test_what_is_odd_in_a_text_is_said(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/b.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfone\r\ntwo\rthree\n" * 40))
    (tmp_path / "texts/a.txt.xz").write_bytes(lzma.compress(b"a <|endoftext|> b\xff\n" * 40))
    (tmp_path / "texts/notes.md").write_text("no")
    data = made("prepare_text", tmp_path / "out", f"--source={tmp_path / 'texts'}", "--encoding=char",
                "--errors=replace")
    said = capsys.readouterr().out
    for words in ("a.txt.xz, b.txt.gz, and between two of them nothing; skipped: notes.md",
                  "line ends: 40 of 160 are CRLF, 40 are CR", "byte-order marks (U+FEFF): 40",
                  "<|endoftext|> is 40 times in the text and stays text",
                  "replaced by U+FFFD, which counts as 3 bytes: 40, the first at byte 17 of a.txt.xz"):
        assert words in said
    text = b"".join(texts_of(data)).decode()
    assert text == "a <|endoftext|> b\ufffd\n" * 40 + "\ufeffone\r\ntwo\rthree\n" * 40
    # in another encoding than UTF-8 characters cannot be counted: a byte may look like a continuation
    (tmp_path / "my.txt").write_bytes("“Straße” – naïve\n".encode("cp1252") * 40)
    data = made("prepare_text", tmp_path / "bytes", f"--source={tmp_path / 'my.txt'}")
    said = capsys.readouterr().out
    assert "my.txt is not UTF-8 at byte 0, so that" in said and "iconv -f ENCODING -t UTF-8 my.txt" in said
    assert "bits per character are of no character" in data.meta["note"]
    assert data.meta["source"]["sha256"] == corpus.describe(tmp_path / "my.txt").sha256


def test_bits_per_byte_count_the_text_where_tokens_spell_another(tmp_path, capsys):
    text = "cafe\u0301 au lait, 日本\n" * 40
    (tmp_path / "my.txt").write_text(text)
    (tmp_path / "tokenizer.json").write_text(byte_pairs(text, normalizer="NFC"))
    data = made("prepare_text", tmp_path / "out", f"--source={tmp_path / 'my.txt'}", "--encoding=hf",
                f"--tokenizer={tmp_path / 'tokenizer.json'}")
    assert "spell something else; bits per byte count the bytes of the text" in capsys.readouterr().out
    assert sum(data.splits[split]["bytes"] for split in SPLITS) == len(text.encode())
    for split in SPLITS:
        spelled = len(data.tokenizer.decode_bytes(data.tokens(split)))
        more = data.sizes_beyond(split)
        assert len(more) and spelled + more[:, 1].sum() == data.splits[split]["bytes"]


@pytest.mark.slow
def test_a_text_has_a_folder_of_its_name_in_data(tmp_path):
    """In a repository of its own, which has another text's prepare script in data/wikitext2."""
    shutil.copytree(ROOT / "nanoheads", tmp_path / "nanoheads")
    for name in ("prepare_text.py", "wikitext2/prepare.py"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "data" / name, tmp_path / "data" / name)
    (tmp_path / "b").mkdir()
    for path in ("my.txt", "b/my.txt", "wikitext2.txt"):
        (tmp_path / path).write_text(path * 99)

    asked = [("--source=my.txt", "data/my: byte"), ("--source=my.txt", "prepared, verified: data/my"),
             ("--source=my.txt --encoding=char", "data/my_char: char"),
             ("--source=b/my.txt", "data/my holds another text: name another folder with --out"),
             ("--source=wikitext2.txt", "data/wikitext2 is no name for its folder")]
    program = ("import runpy, sys\nfor argv in sys.argv[1:]:\n    sys.argv[1:] = argv.split()\n    try:\n"
               "        runpy.run_path('data/prepare_text.py', run_name='__main__')\n"
               "    except SystemExit as e:\n        print(e)\n    print('====')\n")
    done = subprocess.run([sys.executable, "-c", program, *(argv for argv, _ in asked)], cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True)
    for said, (_, words) in zip(done.stdout.split("====\n"), asked):
        assert words in said, done


# ---- corpora ----

def lines(n, word):
    return "".join(f"{word}\n" if i % 100 == 0 else "\n" for i in range(n))


def test_wikitext103_is_read_from_its_zip_or_the_folder_that_it_unpacks_to(tmp_path, capsys):
    texts = {"train": lines(1_801_350, "train"), "valid": lines(3_760, "val"), "test": lines(4_358, "é")}
    folder = tmp_path / "wikitext-103"
    folder.mkdir()
    with zipfile.ZipFile(tmp_path / "any.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in texts.items():
            (folder / f"wiki.{name}.tokens").write_text(text)
            file.writestr(f"wikitext-103/wiki.{name}.tokens", text)
    for source in ("any.zip", "wikitext-103"):
        data = made("wikitext103/prepare", tmp_path / f"out_{source}", "--encoding=byte",
                    f"--source={tmp_path / source}")
        assert [text.decode() for text in texts_of(data)] == list(texts.values())
        assert data.meta["source"]["file"] == ["wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"]
    capsys.readouterr()
    main("wikitext103/prepare", "--encoding=byte", f"--out={tmp_path / 'out_any.zip'}")
    assert "already prepared, verified" in capsys.readouterr().out  # without its source
    (folder / "wiki.valid.tokens").write_text("cut\n")
    said = refused("wikitext103/prepare", f"--source={folder}", f"--out={tmp_path / 'x'}")
    assert "wiki.valid.tokens: holds 1 lines where 3,760 are expected; replace it with a whole copy" in said


@pytest.mark.parametrize("script, name, encoding, tokens", [
    ("shakespeare_char/prepare", "tinyshakespeare", "char", [1_003_854, 111_540, 111_540]),
    ("shakespeare/prepare", "tinyshakespeare", "gpt2", [301_966, 36_059, 36_059]),
    ("wikitext2/prepare", "wikitext-2", "byte", [10_797_148, 1_121_681, 1_256_449])])
def test_a_corpus_has_the_counts_of_its_page(script, name, encoding, tokens, tmp_path, request, monkeypatch):
    folder = real(name)
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_files")
    data = made(script, tmp_path / "source", f"--source={folder}", f"--encoding={encoding}")
    assert [data.splits[split]["tokens"] for split in SPLITS] == tokens
    monkeypatch.setenv("NANOHEADS_DATA", str(folder.parent))
    if encoding != "gpt2":
        assert made(script, tmp_path / "named", f"--encoding={encoding}").digests == data.digests


def test_pystdlib_takes_each_file_whole_into_one_split(tmp_path):
    names = [f"package/m{i}.py" for i in range(60)]
    for name in [*names, "test/left_out.py"]:
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(f"x = {name!r}\n\n")
    (tmp_path / "lib/latin.py").write_bytes(b"\xff\n")
    data = made("pystdlib/prepare", tmp_path / "out", f"--source={tmp_path / 'lib'}")
    text = b"".join(texts_of(data)).decode()
    assert sorted(re.findall("^# ---- (.*) ----$", text, re.M)) == sorted(names)
    assert len(data.documents("train")) - 1 == text.count("# ----") - sum(
        each.count(b"# ----") for each in texts_of(data)[1:])


def parquet(path, documents):
    pyarrow = pytest.importorskip("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.table(dict(text=documents)), path)
    return path


@pytest.mark.slow
def test_openwebtext_documents_end_in_end_of_text(tmp_path, gpt2_files):
    pytest.importorskip("datasets")
    documents = [f"Document {i}: naïve " + "and more. " * (i % 9) for i in range(6000)]
    parquet(tmp_path / "a.parquet", [*(text.encode() for text in documents), b"half \xff face"])
    data, found = made("openwebtext/prepare", tmp_path / "out", f"--source={tmp_path}"), []
    for split in SPLITS:
        ids = data.tokens(split)
        ends = data.documents(split)
        assert (ids[ends[1:] - 1] == 50256).all() and (ids == 50256).sum() == len(ends) - 1
        found += [data.tokenizer.decode(ids[a:b - 1]) for a, b in zip(ends, ends[1:])]
    assert sorted(found) == sorted([*documents, "half \ufffd face"])
    assert "a part of the corpus, 6,001 of 8,013,769 documents" in data.meta["note"]


# ---- shards ----

DOCUMENTS = [f"Document {i}: naïve 日本 " + "and more of it. " * (i * 37 % 11) for i in range(60)] + ["", "x"]


def jsonl(path, documents=DOCUMENTS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dict(text=text, id=5)) + "\n" for text in documents))
    return path


def shards_in(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


@pytest.mark.slow
def test_fineweb_is_laid_out_as_llm_c_has_it(tmp_path, gpt2_files):
    data = made("fineweb/prepare", tmp_path / "out", f"--source={jsonl(tmp_path / 'a.jsonl')}",
                "--shard_tokens=400")
    tok = Tokenizer("gpt2")
    stream = np.concatenate([[50256, *tok.encode(text)] for text in DOCUMENTS])
    parts = [stream[at:at + 400] for at in range(0, len(stream), 400)]
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, len(parts)))]
    assert shards_in(tmp_path / "out") == dict(zip(names, map(in_llm_c, parts)))
    assert np.array_equal(data.tokens("val"), parts[0]) and np.array_equal(data.tokens("train"), stream[400:])
    sizes = [sum(data.splits[split][key] for split in ("train", "val")) for key in ("bytes", "chars")]
    assert sizes == [len("".join(DOCUMENTS).encode()), len("".join(DOCUMENTS))]
    assert data.splits["test"] == data.splits["val"] and "test is val over again" in data.meta["note"]


@pytest.mark.parametrize("form", ["gz", "parquet", "folder"])
def test_fineweb_in_bytes_reads_documents_from_any_form(tmp_path, form):
    source = jsonl(tmp_path / "a.jsonl")
    if form == "parquet":
        source = parquet(tmp_path / "a.parquet", DOCUMENTS)
    elif form == "folder":
        source = tmp_path / "folder"
        jsonl(source / "a.jsonl", DOCUMENTS[:30])
        jsonl(source / "b/a.jsonl", DOCUMENTS[30:])
    else:
        source = tmp_path / "copy.jsonl.gz"
        source.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    data = made("fineweb/prepare", tmp_path / "out", f"--source={source}", "--shard_tokens=300",
                "--encoding=byte")
    text = "".join(text + "\0" for text in DOCUMENTS).encode()
    assert data.tokens("val").tobytes() + data.tokens("train").tobytes() == text
    assert data.documents("train").tolist() == [0, *(m.end() for m in re.finditer(b"\0", text[300:]))]


@pytest.mark.slow
@pytest.mark.parametrize("form, encoding", [("jsonl", "byte"), ("parquet", "byte"), ("jsonl", "gpt2")])
def test_what_is_no_text_in_a_document_is_replaced_and_counted(form, encoding, tmp_path, request):
    """Half a surrogate pair; in a column of bytes what is not UTF-8; and a NUL where it parts documents."""
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_files")
    stray = "half \ud83d face" if form == "jsonl" else b"half \xff face"
    documents = [stray, "a NUL \0 inside", *(f"naïve {i}" for i in range(98))]
    source = jsonl(tmp_path / "a.jsonl", documents) if form == "jsonl" else parquet(
        tmp_path / "a.parquet", [text if isinstance(text, bytes) else text.encode() for text in documents])
    more = f"--source={source}", "--shard_tokens=300", f"--encoding={encoding}"
    data = made("fineweb/prepare", tmp_path / "out", *more)
    tokens = np.concatenate([data.tokens(split)[:] for split in ("val", "train")])
    count = 2 if encoding == "byte" else 1
    assert f"replaced by U+FFFD, which counts as 3 bytes: {count}" in data.meta["note"]
    assert (tokens == (0 if encoding == "byte" else 50256)).sum() == len(documents)
    assert data.tokenizer.decode(tokens).count("\ufffd") == count
    if encoding == "gpt2":
        assert 20543 in tokens  # " \ufffd" as tiktoken has it
    (tmp_path / "out/meta.json").unlink()
    assert made("fineweb/prepare", tmp_path / "out", *more).meta == data.meta  # from shards that are there


@pytest.mark.slow
def test_shards_that_are_there_are_read_where_they_lie(tmp_path, gpt2_files):
    tok, theirs = Tokenizer("gpt2"), tmp_path / "theirs"
    theirs.mkdir()
    texts = {"pretrain_val_0": "naïve 日本 " * 30, "a_train_1": "To be " * 50, "a_train_2": "é" * 70}
    for name, text in texts.items():
        (theirs / f"{name}.bin").write_bytes(in_llm_c([50256, *tok.encode(text)]))
    data = made("fineweb/prepare", tmp_path / "mine", "--shards", f"{theirs}/*.bin")
    train = [texts["a_train_1"], texts["a_train_2"]]
    assert data.tokens("train")[:].tolist() == [i for text in train for i in (50256, *tok.encode(text))]
    assert data.splits["train"]["bytes"] == len("".join(train).encode())
    assert len(list(theirs.iterdir())) == 3  # nothing is written beside them
    (theirs / "a_train_2.bin").write_bytes(in_llm_c([50257]))
    assert "holds the token 50,257, and the gpt2 vocabulary ends at 50,256" in refused(
        "fineweb/prepare", f"--out={tmp_path / 'mine'}", "--force", "--shards", f"{theirs}/*.bin")


# ---- nanoGPT's folders ----

def nanogpt_folder(folder, text="First Citizen:\nBefore we proceed, é\n" * 50):
    """What nanoGPT's data/shakespeare_char/prepare.py writes, of another text."""
    folder.mkdir()
    stoi = {c: i for i, c in enumerate(sorted(set(text)))}
    cut = int(0.9 * len(text))
    for split, part in (("train", text[:cut]), ("val", text[cut:])):
        np.array([stoi[c] for c in part], np.uint16).tofile(folder / f"{split}.bin")
    itos = {i: c for c, i in stoi.items()}
    (folder / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=len(stoi), itos=itos, stoi=stoi)))
    return folder, text[:cut], text[cut:]


def test_a_folder_of_nanogpt_becomes_a_dataset(tmp_path):
    folder, train, val = nanogpt_folder(tmp_path / "theirs")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    main("from_nanogpt", folder)
    data = Dataset(folder)
    assert [text.decode() for text in texts_of(data)] == [train, val, val]
    assert data.splits["val"]["bytes"] == len(val.encode()) > data.splits["val"]["chars"] == len(val)
    assert data.tokenizer.decode([data.separator]) == "\n" and data.meta["name"] == "theirs"
    assert all((folder / name).read_bytes() == content for name, content in before.items())
    assert "has a meta.json and is a dataset already; --force" in refused("from_nanogpt", folder)


def test_without_a_meta_pkl_a_folder_of_nanogpt_holds_gpt2s_tokens(tmp_path, gpt2_files):
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    for split in ("train", "val"):
        ids = [*Tokenizer("gpt2").encode("To be, naïve"), 50256]
        np.array(ids, np.uint16).tofile(pairs / f"{split}.bin")
    main("from_nanogpt", pairs)
    assert Dataset(pairs).splits["val"]["bytes"] == len("To be, naïve".encode())


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize("damage, words", [
    (lambda f: (f / "meta.pkl").write_bytes(pickle.dumps(Evil())), "(UnpicklingError: it wants to call "),
    (lambda f: (f / "meta.pkl").write_bytes(b"\x80\x04 no pickle"), "meta.pkl does not name the characters"),
    (lambda f: (f / "meta.pkl").write_bytes(pickle.dumps(dict(itos={0: "a"}))), "the char vocabulary has 1"),
    (lambda f: (f / "meta.pkl").unlink(), "no token is above 20, so that these are no byte pairs of GPT-2"),
    (lambda f: (f / "val.bin").unlink(), "has no val.bin; name the folder that nanoGPT's prepare.py wrote"),
    (lambda f: (f / "val.bin").write_bytes(b"abc"), "3 bytes are no tokens of nanoGPT's")])
def test_a_folder_that_is_not_nanogpts_runs_nothing_and_is_one_line(tmp_path, monkeypatch, damage, words):
    monkeypatch.chdir(tmp_path)
    folder, *_ = nanogpt_folder(tmp_path / "theirs")
    damage(folder)
    assert words in refused("from_nanogpt", folder)
    assert not (tmp_path / "evil").exists() and not (folder / "meta.json").exists()


# ---- written once, whole or not at all ----

def folder_as_it_is(folder):
    """{name: bytes} of its files, but for the lock of a process that was killed, and notes of checks."""
    return {path.name: path.read_bytes() for path in folder.iterdir()
            if path.name != "lock" and path.suffix != ".checked"}


def test_a_second_run_verifies_and_what_changed_is_written_anew(tmp_path, capsys):
    (tmp_path / "my.txt").write_text("some text\n" * 99)
    asked = ["prepare_text", f"--source={tmp_path / 'my.txt'}", f"--out={tmp_path / 'out'}"]
    main(*asked)
    first = folder_as_it_is(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")}
    main(*asked)
    assert "already prepared, verified" in capsys.readouterr().out
    assert times == {path: path.stat().st_mtime_ns for path in times}
    for damage in (lambda: (tmp_path / "out/val.bin").write_bytes(b"x"),
                   lambda: (tmp_path / "out/val.bin").unlink(),
                   lambda: (tmp_path / "out/meta.json").write_text("{"),
                   lambda: (tmp_path / "out/meta.json").unlink(),
                   lambda: main(*asked, "--val=0.3"),
                   lambda: main(*asked, "--encoding=char")):
        damage()
        capsys.readouterr()
        main(*asked)
        assert "already prepared" not in capsys.readouterr().out
        assert folder_as_it_is(tmp_path / "out") == first
    (tmp_path / "my.txt").write_text("other text\n" * 99)
    main(*asked)
    assert "was made with another sha256: preparing it anew" in capsys.readouterr().out
    assert folder_as_it_is(tmp_path / "out") != first


def is_killed(at, asked):
    """Whether a process of a script is killed right before the `at`-th file that it renames or removes; else
    it comes to its end.
    """
    child = os.fork()
    if child == 0:
        changes = count(1)

        def kill(event, arguments):
            if event in ("os.rename", "os.remove") and next(changes) == at:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(kill)
        try:
            main(*asked)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.parametrize("script, more", [
    ("prepare_text", "--source={0}/my.txt --encoding=hf --tokenizer={0} --separator=\\n"),
    ("fineweb/prepare", "--source={0}/my.jsonl --encoding=byte --shard_tokens=900")])
def test_a_kill_at_any_moment_leaves_a_whole_folder_or_none(script, more, tmp_path):
    """One of a text that was another one before; and one of shards, behind which the next run goes on."""
    (tmp_path / "tokenizer.json").write_text(byte_pairs("To be or not, naïve"))
    out, asked = tmp_path / "out", [script, f"--out={tmp_path / 'out'}", *more.format(tmp_path).split()]
    (tmp_path / "before").mkdir()
    for number in range(2):
        words = [f"To be, naïve or not, {number + i} " * 4 for i in range(30)]
        (tmp_path / "my.txt").write_text("\n".join(words))
        jsonl(tmp_path / "my.jsonl", words)
        if not number and script == "prepare_text":
            main(*asked)
            shutil.copytree(out, tmp_path / "before", dirs_exist_ok=True)
    main(*asked)
    whole = folder_as_it_is(out)
    for at in count(1):
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "before", out)
        if not is_killed(at, asked):
            break
        if (out / "meta.json").is_file():
            assert all(len(Dataset(out).tokens(split)) for split in SPLITS)
        main(*asked)
        assert folder_as_it_is(out) == whole
    assert at > 5 and folder_as_it_is(out) == whole


def test_a_full_disk_is_one_line_and_leaves_the_folder_as_it_was(tmp_path):
    asked = "prepare_text", f"--source={tmp_path / 'my.txt'}", f"--out={tmp_path / 'out'}"
    (tmp_path / "my.txt").write_text("some text\n" * 99)
    main(*asked)
    first = folder_as_it_is(tmp_path / "out")
    (tmp_path / "my.txt").write_text("other text\n" * 99999)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, limits[1]))
    try:
        said = refused(*asked)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said.startswith(f"error: {tmp_path / 'out'}: cannot write (File too large); make room")
    assert folder_as_it_is(tmp_path / "out") == first


# ---- downloads ----

def test_two_scripts_write_no_folder_at_once(tmp_path):
    (tmp_path / "my.txt").write_text("some text\n" * 99)
    asked = ("prepare_text", f"--source={tmp_path / 'my.txt'}", f"--out={tmp_path / 'x'}")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with only_writer(tmp_path / "x"):
                os.write(write, b"has it")
                signal.pause()
        finally:
            os._exit(1)
    assert os.read(read, 6) == b"has it"
    said = refused(*asked)
    assert f"is being written by process {child} on " in said and said.endswith("choose another --out")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    main(*asked)
    assert sorted(Dataset(tmp_path / "x").dir.iterdir()) == [
        tmp_path / "x" / name for name in ("meta.json", "test.bin", "train.bin", "val.bin")]


@pytest.fixture
def server(monkeypatch):
    """(address, asked): a server of /whole, /late (after an error), /cut, /wrong, and of nothing else."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            again = asked.count(self.path) > 1
            found = self.path in ("/whole", "/cut", "/wrong") or self.path == "/late" and again
            self.send_response(200 if found else 503 if self.path == "/late" else 404)
            data = b"" if not found else b"x" * 1000 if self.path == "/wrong" else b"text\n" * 200
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[:500] if self.path == "/cut" else data)

        def log_message(self, *args):
            pass

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()


@pytest.mark.slow
def test_a_download_is_whole_or_not_there(server, tmp_path, monkeypatch):
    address, asked = server
    monkeypatch.setenv("NANOHEADS_DATA", str(tmp_path))
    (tmp_path / "good").write_bytes(b"text\n" * 200)
    sha256 = corpus.describe(tmp_path / "good").sha256

    def get(path):
        return corpus.locate({"a": File(path.strip("/"), sha256, 1000, url=address + path)}, "corpus")["a"]
    for path in ("/whole", "/late"):
        for _ in range(2):
            assert get(path).read_bytes() == b"text\n" * 200
    assert asked == ["/whole", "/late", "/late"]  # a second run asks for nothing
    for path, words, times in (("/wrong", "the download has the sha256 ", 1), ("/none", "HTTP 404", 1),
                               ("/cut", "the download failed", 3)):
        with pytest.raises(UserError, match=words) as e:
            get(path)
        assert f"put corpus{path} into the folder NANOHEADS_DATA by hand" in str(e.value)
        assert asked.count(path) == times
    assert sorted(path.name for path in (tmp_path / "corpus").iterdir()) == ["late", "whole"]


# ---- refusals ----

@pytest.mark.parametrize("command, words", [
    ("prepare_text --source=none.txt", "none.txt: no such file or folder; correct --source"),
    ("prepare_text --source=my.txt --out=x --separator=", "--separator is empty"),
    ("prepare_text --source=my.txt --out=x --encoding=hf", "--encoding=hf and --tokenizer=FOLDER go"),
    ("prepare_text --source=my.txt --out=x --encoding=hf --tokenizer=no_s.json",
     "0x73, for which this vocabulary has no token; take another --tokenizer, or --encoding=byte"),
    ("prepare_text --source=utf16.txt --out=x --encoding=gpt2",
     "utf16.txt: is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 utf16.txt > new.txt"),
    ("prepare_text --source=cut.txt.gz --out=x", "cut.txt.gz: damaged ("),
    ("prepare_text --source=my.txt --out=my.txt", "my.txt: File exists"),
    ("enwik8_char/prepare --out=x --source=other.zip", "other.zip: holds no enwik8; replace it with a whole"),
    ("enwiki15/prepare --out=x", "enwiki15/train.txt: not found, and it has no download; put it into the"),
    ("pystdlib/prepare --out=x --source=folder", "holds no .py file; name the standard library's folder"),
    ("fineweb/prepare --out=x --source=folder", "holds no file of .jsonl, .jsonl.gz, .jsonl.xz, .parquet"),
    ("fineweb/prepare --out=x --source=bad.jsonl --encoding=byte", "1 is no JSON object with a \"text\""),
    ("fineweb/prepare --out=x --source=few.jsonl --encoding=byte", "fills 1 shard, and the first is val"),
    ("fineweb/prepare --out=x --source=numbers.parquet --encoding=byte", "\"text\" holds no text, but int"),
    ("fineweb/prepare --out=x --shards Llama_val.bin a_train.bin", "bin holds Llama 3's tokens, of uint32"),
    ("fineweb/prepare --out=x --shards a_train.bin", "no file has 'val' in its name")])
def test_what_cannot_be_prepared_is_one_line(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOHEADS_DATA", str(tmp_path))
    Path("folder").mkdir()
    for name, data in {"my.txt": b"some text\n" * 99, "utf16.txt": ("text\n" * 40).encode("utf-16"),
                       "cut.txt.gz": gzip.compress(os.urandom(999))[:500], "bad.jsonl": b"{}\n",
                       "few.jsonl": b'{"text": "a"}\n', "a_train.bin": b"abc",
                       "Llama_val.bin": np.array([20240801, 7, 1] + [0] * 253, "<i4").tobytes() + b"abcd"
                       }.items():
        Path(name).write_bytes(data)
    if "no_s" in command:
        about = json.loads(byte_pairs("other lines\n" * 9))
        vocab = about["model"]["vocab"].items()
        about["model"].update(merges=[], vocab={token: i for token, i in vocab if "s" not in token})
        Path("no_s.json").write_text(json.dumps(about))
    if "numbers" in command:
        parquet("numbers.parquet", [5])
    with zipfile.ZipFile("other.zip", "w") as file:
        file.writestr("other", "text")
    assert words in refused(*command.split())
    assert not Path("x/meta.json").exists()
    monkeypatch.setenv("NANOHEADS_DATA", "/nowhere")
    words = "/nowhere: no such file or folder; correct NANOHEADS_DATA"
    assert words in refused("wikitext2/prepare", "--out=y")


def test_a_script_begins_with_its_command_and_starts_anywhere(monkeypatch, capsys):
    monkeypatch.chdir("/")
    for script in SCRIPTS:
        text = (ROOT / script).read_text().split('"""')[1]
        assert f"python {script}" in text and "ou should see" in text
        monkeypatch.setattr(sys, "argv", [script, "--help"])
        monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(ROOT)])
        with pytest.raises(SystemExit, match="^0$"):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        assert "usage: " in capsys.readouterr().out and str(ROOT) in sys.path, script
