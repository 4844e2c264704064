"""What a run starts from: its own last save, another checkpoint, or nothing. What does not fit is a line."""

import shutil

import pytest

import train
from helpers import TINY, same, weights, write_dataset


@pytest.fixture(scope="module")
def begun(bytes_data, tmp_path_factory):
    """A folder with a run of 3 steps in run/, and the data that it was trained on in data/."""
    folder = tmp_path_factory.mktemp("begun")
    shutil.copytree(bytes_data, folder / "data")
    train.main(command(folder, max_iters=3))
    return folder


@pytest.fixture
def copied(begun, tmp_path):
    """A copy of it, which a test may change."""
    shutil.copytree(begun, tmp_path / "copy")
    return tmp_path / "copy"


def command(folder, *more, **keys):
    keys = {"dataset": folder / "data", "out_dir": folder / "run", **TINY, **keys}
    return [*(f"--{key}={value}" for key, value in keys.items() if value is not ...), *more]


def refused(*argv):
    """The lines that train.py ends with."""
    with pytest.raises(SystemExit) as e:
        train.main([*argv])
    assert all(line.startswith("train: ") for line in e.value.code.splitlines())
    return e.value.code


@pytest.mark.parametrize("keys, words", [
    (dict(n_embd=32), "holds another model: n_embd=32 here is 16 there"),
    (dict(recipe="modern"), "holds another model: recipe='modern' here is 'gpt2' there"),
    (dict(mechanism="xsa"), "holds another model: xsa=True here is False there"),
    (dict(batch_size=2), "cannot go on like this: batch_size * grad_accum=2 here is 4 there; to begin a new "
                         "run with its weights: --init_from="),
    (dict(optimizer="muon"), "cannot go on like this: optimizer='muon' here is 'adamw' there"),
], ids=str)
def test_a_run_goes_on_as_the_same_run_or_not_at_all(keys, words, copied):
    before = (copied / "run/ckpt.pt").read_bytes()
    assert words in refused(*command(copied, "--resume", **keys))
    assert (copied / "run/ckpt.pt").read_bytes() == before


def test_a_run_goes_on_only_with_what_it_was_trained_on(copied):
    text = b"".join(b"%d and %d\n" % (i, i * i % 91) for i in range(3000))
    splits = {"train": text[:20000], "val": text[20000:22000], "test": text[22000:23000]}
    write_dataset(copied / "data", splits)
    assert "holds other data than sums did" in refused(*command(copied, "--resume"))


def test_a_run_that_was_killed_before_its_first_save_is_still_the_same_run(copied, rows):
    """Its config.json says what it was asked for, and its folder is all that the command names."""
    for name in ("ckpt.pt", "best.pt", "log.jsonl"):
        (copied / "run" / name).unlink()
    train.main(["--resume", f"--out_dir={copied / 'run'}", f"--dataset={copied / 'data'}"])
    assert weights(copied / "run/ckpt.pt")["transformer.wpe.weight"].shape == (16, 16)
    assert [row["step"] for row in rows(copied / "run")[1]] == [0, 3]


@pytest.mark.parametrize("more, words", [
    ((), "already holds a run; go on with --resume, start over with --overwrite, or choose another"),
    (("--overwrite", "--init_from={}/run"), "--overwrite removes the checkpoints of {}/run, and init_from "
                                            "names one of them"),
    (("--resume", "--overwrite"), "overwrite=True must not be given with resume"),
])
def test_a_run_that_is_there_is_lost_by_no_command(more, words, copied):
    before = weights(copied / "run/ckpt.pt")
    assert words.format(copied) in refused(*command(copied, *(each.format(copied) for each in more)))
    assert same(weights(copied / "run/ckpt.pt"), before)


def test_a_checkpoint_brings_the_flags_that_are_left_open(copied, rows):
    """Those of its model; one that is given must agree, and a shorter context cuts it."""
    sizes = {key: ... for key in ("n_layer", "n_head", "n_embd", "block_size")}
    new = {**sizes, "init_from": copied / "run", "out_dir": copied / "new"}
    said = refused(*command(copied, **{**new, "n_head": 4}))
    assert "holds another model: n_head=4 here is 2 there" in said
    train.main(command(copied, **{**new, "block_size": 8}))
    assert weights(copied / "new/ckpt.pt")["transformer.wpe.weight"].shape == (8, 16)
    assert rows(copied / "new")[1][0]["step"] == 0, "it is a run of its own"


def test_what_the_data_lacks_is_said_before_the_folder_is_made(copied):
    assert "block_size=50000 needs at least 100,000 tokens of train" in refused(
        *command(copied, block_size=50000, out_dir=copied / "new"))
    assert "vocab_size=200 is smaller than sums's 256" in refused(
        *command(copied, vocab_size=200, out_dir=copied / "new"))
    assert not (copied / "new").exists()
