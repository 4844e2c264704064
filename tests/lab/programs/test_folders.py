"""Default folders: names that can be typed, a number where one is taken, and each command finds its own."""
import json
import os
import re
from pathlib import Path

import pytest

import compare
import train
from helpers import TINY, without_own_mechanisms
from helpers import CODE, torchrun
from nanoheads import checkpoint, start
from nanoheads.files import LONGEST, differences, find, joined, setting_in_name
from study.config import StudyConfig


# ---- names ----

@pytest.mark.parametrize("key, value, name", [
    ("seed", 2, "seed=2"), ("lr", 1e-05, "lr=1e-05"), ("agency_threshold", -0.5, "agency_threshold=-0.5"),
    ("head_ids", [[0, 1], [2]], "head_ids=0_1_2"), ("tied", False, "tied=False"),
    ("schedule", "cosine", "schedule=cosine"), ("init_from", "out/x", "init_from=x"),
    ("init_from", "out/x/ckpt.pt", "init_from=x"), ("init_from", "best.pt", "init_from=best.pt"),
    ("dataset", "/", "dataset"), ("dataset", "..", "dataset"), ("labels", r"C:\my texts\weak", "labels=weak"),
    ("teacher", "a:b*c?", "teacher=a_b_c"),
    ("dataset", "~/texts/été", "dataset=t")])
def test_a_setting_in_a_name_has_no_path_and_no_odd_character(key, value, name):
    assert setting_in_name(key, value) == name


def test_as_many_words_are_in_a_name_as_fit():
    words = [f"mechanism{i}" for i in range(20)]
    for n in range(21):
        name = joined(words[:n], "tiny")
        kept = re.findall(r"mechanism\d+", name)
        assert len(name) <= LONGEST and kept == words[:len(kept)]
        if len(kept) < n:
            assert name.endswith(f"+{n - len(kept)}_more")
            longer = len("-".join(("tiny", "+".join((*words[:len(kept) + 1], f"{n - len(kept) - 1}_more")))))
            assert longer > LONGEST
    assert joined(["a" * 99]) == "a" * LONGEST and joined([], "tiny") == "tiny"
    assert joined(["b" * 99, "c"], "a" * 99) == "a" * 40 + "-" + "b" * 12 + "+1_more"


def test_differences_are_said_briefly():
    assert differences({"lr": 1}, {"seed": 2}) == (
        "lr is 1 there and its default here; seed is its default there and 2 here")
    many = {key: "x" * 99 for key in "abcdef"}
    assert differences(many, {}).endswith("; 3 more") and len(differences(many, {})) < 400


# ---- which of several ----

@pytest.fixture
def folders(tmp_path, monkeypatch):
    """make(name, asked=..., age=0): a folder in out/ that holds that; without asked it does not say."""
    monkeypatch.chdir(tmp_path)

    def make(name, asked=None, age=0, file="config.json"):
        path = Path("out", name, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({} if asked is None else {"asked": asked}))
        os.utime(path, (1e9 - age, 1e9 - age))
    return make


def found(asked):
    folder, line = find("a", asked, start.RUN_FILES, start.asked_in)
    return folder.as_posix(), bool(line)


def test_a_name_that_is_free_is_taken_and_another_configuration_gets_the_next_number(folders):
    assert found({"lr": 1}) == ("out/a", False)
    folders("a", {"lr": 1})
    assert found({"lr": 1}) == ("out/a", False) and found({"lr": 2}) == ("out/a-2", True)
    folders("a-2", {"lr": 2})
    folders("a-4", {"lr": 4})
    folders("a-b", {"lr": 9})
    folders("a-02", {"lr": 9})
    folders("ab-2", {"lr": 9})
    assert [found({"lr": n}) for n in (1, 2, 4)] == [("out/a", False), ("out/a-2", False), ("out/a-4", False)]
    assert found({"lr": 9}) == found({}) == ("out/a-3", True)
    line = find("a", {"lr": 9}, start.RUN_FILES, start.asked_in)[1]
    assert line == ("out/a holds another configuration (lr is 1 there and 9 here): this one goes into "
                    f"{Path('out/a-3')}")


def test_of_several_with_one_configuration_the_newest_is_found(folders):
    folders("a", {"lr": 1}, age=30)
    folders("a-2", {"lr": 1}, age=10)
    folders("a-3", {"lr": 1}, age=20)
    assert found({"lr": 1}) == ("out/a-2", False)
    folders("a", age=5, file="ckpt.pt")  # it was trained on since
    assert found({"lr": 1}) == ("out/a", False)


def test_a_folder_that_does_not_say_what_it_holds_is_meant_by_its_name_alone(folders):
    folders("a")
    folders("a-2")
    assert found({"lr": 1}) == ("out/a", False)
    folders("a-3", {"lr": 1})
    assert found({"lr": 1}) == ("out/a-3", False)
    folders("a", {"lr": 2})
    assert found({"lr": 3}) == ("out/a-4", True)


@pytest.mark.parametrize("text", ["", "[]", '{"asked": 3}', "{", "\0"])
def test_a_damaged_record_is_none(folders, text):
    folders("a")
    Path("out/a/config.json").write_text(text)
    assert found({"lr": 1}) == ("out/a", False)


def test_a_folder_without_a_run_is_free(folders):
    folders("a", {"lr": 1})
    folders("a-2", file="lock")
    assert found({"lr": 2}) == ("out/a-2", True)


# ---- runs ----

@pytest.fixture
def trained(tmp_path, monkeypatch, bytes_data, capsys):
    """trained(*argv, **keys) -> what a tiny run says that is not told its folder."""
    monkeypatch.chdir(tmp_path)

    def run(*argv, **keys):
        with without_own_mechanisms():
            train.main([*map(str, argv), *(f"--{key}={value}" for key, value in keys.items()),
                        f"--dataset={bytes_data}"])
        return capsys.readouterr().out
    return run


@pytest.fixture
def sizes(tmp_path):
    """A config file with the sizes of a tiny run, small.py; sizes(lr) writes it anew, with that rate."""
    def write(lr=1e-3):
        path = tmp_path / "small.py"
        path.write_text("".join(f"{key} = {value!r}\n" for key, value in {**TINY, "adamw_lr": lr}.items()))
        return path
    return write


def steps():
    """{folder: steps done} of the runs in out/."""
    return {path.parent.name: checkpoint.read(path)["step"] for path in sorted(Path("out").glob("*/ckpt.pt"))}


@pytest.mark.slow
def test_a_run_finds_its_folder_again_and_another_of_the_name_gets_a_number(trained, sizes, bytes_data):
    name = "small"
    config = sizes()
    assert f"in out/{name}\n" in trained(config)
    with pytest.raises(SystemExit, match=f"out/{name} already holds a run; go on with --resume"):
        trained(config)  # the same command twice
    assert steps() == {name: 6}
    sizes(lr=2e-3)
    said = trained(config)
    assert said.startswith(f"out/{name} holds another configuration (adamw_lr is 0.001 there and 0.002 "
                           "here): "
                           f"this one goes into out/{name}-2\n")
    with pytest.raises(SystemExit, match=f"out/{name}-2 already holds a run"):
        trained(config)
    more = dict(max_iters=8, eval_interval=2, device="cpu")  # which make no other run
    assert "going on at step 6 of 8" in trained(config, "--resume", **more)
    assert steps() == {name: 6, f"{name}-2": 8}
    sizes()
    trained(config, "--resume", max_iters=7)
    assert steps() == {name: 7, f"{name}-2": 8}
    sizes(lr=3e-3)  # a file edited before --resume: the newest run of the name goes on, and says what changed
    said = trained(config, "--resume", max_iters=8)
    assert "changed since the last save: adamw_lr=0.003, was 0.001" in said and f"in out/{name}\n" in said
    assert steps() == {name: 8, f"{name}-2": 8}
    sizes(lr=2e-3)
    trained(config, "--overwrite")  # its own folder alone
    assert steps() == {name: 8, f"{name}-2": 6}


def test_a_run_of_other_steps_or_another_seed_gets_a_folder_of_its_own(trained, sizes):
    config = sizes()
    trained(config)
    said = trained(config, max_iters=4)
    assert said.startswith("out/small holds another configuration (max_iters is 6 there and 4 here): this "
                           "one goes into out/small-2\n")
    trained(config, seed=7)
    assert steps() == {"small": 6, "small-2": 4, "small-3": 6}
    with pytest.raises(SystemExit, match="out/small-2 already holds a run; go on with --resume"):
        trained(config, max_iters=4)
    trained(config, "--resume", max_iters=5)  # of the three the newest that differs in its steps alone
    assert steps() == {"small": 6, "small-2": 5, "small-3": 6}
    trained(config, "--overwrite", max_iters=3, seed=7)
    assert steps() == {"small": 6, "small-2": 5, "small-3": 3}


@pytest.mark.slow
def test_evaluating_makes_no_folder_and_reads_the_one_that_is_meant(trained, sizes, bytes_data):
    name = "small"
    config = sizes()
    trained(config)
    sizes(lr=2e-3)
    trained(config, max_iters=4)
    assert "step       4 " in trained(config, "--eval_only")
    sizes(lr=3e-3)  # of which there is none: the newest of the name
    assert "step       4 " in trained(config, "--eval_only")
    assert {*steps()} == {name, f"{name}-2"} == {path.name for path in Path("out").iterdir()}


@pytest.mark.slow
def test_a_mechanism_in_a_file_has_its_own_name_and_another_text_a_number(
        trained, sizes, tmp_path, bytes_data):
    config = sizes()
    paths = [tmp_path / "here/mine.py", tmp_path / "a longer path/mine.py"]
    for path, text in zip(paths, (CODE, CODE + "\n# edited\n")):
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
    name = "small-forget"
    assert f"in out/{name}\n" in trained(config, f"--mechanism={paths[0]}")
    said = trained(config, f"--mechanism={paths[1]}:forget")
    assert re.match(rf"out/{re.escape(name)} holds another configuration \(own_mechanism is \['mine.py .*\): "
                    rf"this one goes into out/{re.escape(name)}-2\n", said)
    assert {*steps()} == {name, f"{name}-2"}
    paths[0].rename(tmp_path / "mine.py")  # the same text, wherever it lies
    assert "is finished: 6 of 6" in trained(config, "--resume", f"--mechanism={tmp_path / 'mine.py'}")
    assert {*steps()} == {name, f"{name}-2"}


@pytest.mark.slow
def test_a_folder_that_does_not_say_what_was_asked_is_gone_on_with_by_its_name(trained, sizes, bytes_data):
    name = "small"
    config = sizes()
    trained(config)
    path = Path("out", name, "config.json")
    details = json.loads(path.read_text())
    del details["asked"]
    path.write_text(json.dumps(details))
    assert "going on at step 6 of 8" in trained(config, "--resume", max_iters=8)
    assert steps() == {name: 8}
    assert json.loads(path.read_text())["asked"]["n_embd"] == TINY["n_embd"]


@pytest.mark.slow
def test_a_run_of_an_older_version_is_not_gone_on_with(trained, sizes, bytes_data):
    """It was asked for by a key that is no more."""
    trained(sizes())
    path = Path("out", "small", "config.json")
    details = json.loads(path.read_text())
    details["asked"]["lr"] = details["asked"].pop("adamw_lr")
    path.write_text(json.dumps(details))
    with pytest.raises(SystemExit, match=f"^train: {path} is of an older version .* commit 7a2abeb "):
        train.main(["--resume", "--out_dir=out/small"])


@pytest.mark.slow
def test_a_run_of_grown_heads_finds_its_folder_again(trained, sizes, bytes_data):
    """config.json's model has other heads than were asked for, from the first step."""
    config, grown = sizes(), ["--sentinel=sigmoid", "--grow_from=1", "--grow_heads=1",
                              "--controller_tokens=256", "--controller_heldout=256"]
    trained(config, *grown)
    folder, = steps()
    assert "going on at step 6 of 8" in trained(config, *grown, "--resume", max_iters=8)
    assert steps() == {folder: 8}


@pytest.mark.slow
def test_two_ranks_go_into_one_numbered_folder(sizes, trained, bytes_data):
    config = sizes()
    trained(config)
    done = torchrun([str(sizes(lr=2e-3)), f"--dataset={bytes_data}", "--batch_size=4"], 2)
    assert done.returncode == 0, done.stderr
    name = "small"
    assert steps() == {name: 6, f"{name}-2": 6}
    assert {path.name for path in Path("out").iterdir()} == {*steps()}
    assert done.stdout.count("holds another configuration") == 1, "one rank speaks"


# ---- studies ----

@pytest.mark.parametrize("keys, name", [
    (dict(mechanism="forget"), "challenge-forget-tiny"),
    (dict(mechanism="up,down"), "challenge-up+down-tiny"),
    (dict(mechanisms=["unet_concat", "unet_add"]), "unet_concat+unet_add-tiny"),
    (dict(mechanisms=["unet_concat"], size="0.33M", scale="nano"), "unet_concat-nano-0.33M"),
    (dict(mechanisms=["sink"], base="some where/my plain.py"), "sink-my_plain"),
    (dict(variants={"a/b: c": {}}), "a_b_c-tiny"),
    (dict(tune_lr=True), "plain-tiny"),
    (dict(variants={f"variant number {i}": {} for i in range(30)}),
     "variant_number_0+variant_number_1+28_more-tiny")])
def test_a_studys_folder_is_short_and_has_no_path(keys, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = StudyConfig(**keys)
    folder = compare.folder_of(config, compare.name_of(config, [])).name
    assert folder == name and len(folder) <= LONGEST and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]*", folder)
