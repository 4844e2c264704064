"""What a run starts from: its own last save, another checkpoint, or nothing. What does not fit is a line."""

import shutil
from pathlib import Path

import pytest

import train
from helpers import same, weights, write_dataset


@pytest.mark.parametrize("keys, words", [
    (dict(n_embd=32), "holds another model: n_embd=32 here is 16 there"),
    (dict(recipe="modern"), "holds another model: recipe='modern' here is 'gpt2' there"),
    (dict(mechanism="xsa"), "holds another model: xsa=True here is False there"),
    (dict(batch_size=2), "cannot go on like this: batch_size * grad_accum=2 here is 4 there; to begin a new "
                         "run with its weights: --init_from="),
    (dict(optimizer="muon"), "cannot go on like this: optimizer='muon' here is 'adamw' there"),
], ids=str)
def test_a_run_goes_on_as_the_same_run_or_not_at_all(keys, words, args, fails, tiny_run):
    before = (tiny_run / "ckpt.pt").read_bytes()
    said, = fails([*args(tiny_run, **keys), "--resume"])
    assert words in said and (tiny_run / "ckpt.pt").read_bytes() == before


def test_a_run_goes_on_only_with_what_it_was_trained_on(args, fails, tiny_run, bytes_data, tmp_path):
    text = b"".join(b"%d and %d\n" % (i, i * i % 91) for i in range(3000))
    shutil.copytree(bytes_data, tmp_path / "sums")
    write_dataset(tmp_path / "sums", dict(train=text[:20000], val=text[20000:22000], test=text[22000:23000]))
    said, = fails([*args(tiny_run, dataset=tmp_path / "sums", max_iters=9), "--resume"])
    assert "holds other data than sums did" in said


def test_a_run_that_was_killed_before_its_first_save_is_still_the_same_run(tiny_run, rows):
    """Its config.json says what it was asked for, and its folder is all that the command names."""
    for name in ("ckpt.pt", "best.pt", "log.jsonl"):
        (tiny_run / name).unlink()
    train.main(["--resume", f"--out_dir={tiny_run}"])
    assert weights(tiny_run / "ckpt.pt")["transformer.wpe.weight"].shape == (16, 16)
    assert [row["step"] for row in rows(tiny_run)[1]] == [0, 3, 6]


@pytest.mark.parametrize("more, words", [
    ((), "already holds a run; go on with --resume, start over with --overwrite, or choose another"),
    (("--overwrite", "--init_from={}"), "--overwrite removes the checkpoints of {}, and init_from names"),
    (("--resume", "--overwrite"), "overwrite=True must not be given with resume"),
])
def test_a_run_that_is_there_is_lost_by_no_command(more, words, args, fails, tiny_run):
    before = weights(tiny_run / "ckpt.pt")
    said, = fails([*args(tiny_run), *(each.format(tiny_run) for each in more)])
    assert words.format(tiny_run) in said and same(weights(tiny_run / "ckpt.pt"), before)


def test_a_checkpoint_brings_the_flags_that_are_left_open(args, fails, finished_run, rows, tmp_path):
    """Those of its model; one that is given must agree, and a shorter context cuts it."""
    new = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"), ...) | dict(init_from=finished_run)
    said, = fails(args("new", **{**new, "n_head": 4}))
    assert "holds another model: n_head=4 here is 2 there" in said
    train.main(args("new", **{**new, "block_size": 8}))
    assert weights(tmp_path / "new/ckpt.pt")["transformer.wpe.weight"].shape == (8, 16)
    assert rows(tmp_path / "new")[1][0]["step"] == 0, "it is a run of its own"


def test_what_the_data_lacks_is_said_before_the_folder_is_made(args, fails, tmp_path):
    assert "block_size=50000 needs at least 100,000 tokens of train" in fails(args(block_size=50000))[0]
    assert "vocab_size=200 is smaller than sums's 256" in fails(args(vocab_size=200))[0]
    assert not Path(tmp_path / "run").exists()


def test_what_is_started_over_is_not_its_own_teacher(args, fails, tiny_run):
    before = weights(tiny_run / "ckpt.pt")
    keys = dict(constraint_names="a", constraint_layers="0", constraint_match="kl", teacher=tiny_run)
    said, = fails([*args(tiny_run, **keys), "--overwrite"])
    assert f"--overwrite removes the checkpoints of {tiny_run}, and teacher names one of them" in said
    assert same(weights(tiny_run / "ckpt.pt"), before)
