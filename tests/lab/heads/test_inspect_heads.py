"""Heads changed by hand: what is printed is what evaluate.py says, and what is saved has the same logits."""
import copy
import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

import sample
from model import GPT, MECHANISMS, GPTConfig
from nanoheads import checkpoint, scoring
from nanoheads.dataset import Dataset
from nanoheads.pruning import prune_heads
from nanoheads.tasks import TaskData, score_levels, summary
from lab.heads.inspection import folded, main
from lab.heads.measuring import attentions
from helpers import ROOT
from helpers import make_model

PROGRAM = "probe.py inspect"  # see the fixture refusal

PLAIN = {}
ALL = dict(agency=True, sentinel="sigmoid", unet="concat", routing="moh", routing_top_k=2,
           constraint_names=["a", "b"])
CHANGES = ["gate.0.1=0.25", "gate.1.0=0", "state.1.2=withdrawn", "state.0.0=overloaded", "consent.1.1=False",
           "unet_skips=False", "gate.1.4=-1"]


@pytest.fixture
def ckpt(tmp_path, bytes_data):
    """ckpt(flags) -> path of a tiny model's checkpoint; change: what is done to the model before."""
    def make(flags, change=lambda model: None):
        model, data = make_model(**flags), Dataset(bytes_data)
        change(model)
        torch.save(dict(model=model.state_dict(), config=asdict(model.config), meta=data.meta, step=7,
                        train=dict(dataset=str(bytes_data))), tmp_path / "model.pt")
        return str(tmp_path / "model.pt")
    return make


@pytest.fixture
def inspect(capsys):
    """inspect(path, argument, ...) -> what is printed; an argument with = that is no flag is a --set."""
    def call(path, *args):
        args = [arg if arg.startswith("--") or "=" not in arg else f"--set={arg}" for arg in args]
        main([f"--ckpt={path}", "--device=cpu", *args])
        out, err = capsys.readouterr()
        assert err == ""
        return out
    return call


def changed_by(path, *settings, prune=None):
    """The model of a checkpoint, changed."""
    model = checkpoint.build(checkpoint.read(path), path, settings=settings)
    if prune:
        prune_heads(model, prune)
    return model


@torch.no_grad()
def logits(model, seed=0):
    ids = torch.randint(256, (3, 32), generator=torch.Generator().manual_seed(seed))
    return model(ids).logits


def off_by(model, other):
    want = logits(other)
    return ((logits(model) - want).abs().max() / want.abs().max()).item()


# ---- what a change costs ----

def test_a_change_of_a_task_s_checkpoint_is_scored_in_answers(task_run, tmp_path, inspect):
    out = tmp_path / "found.json"
    text = inspect(task_run, "gate.0.1=0", "--tokens=0", f"--json={out}")
    found, data = json.loads(out.read_text()), TaskData(checkpoint.read(task_run)["meta"]["task"], 12)
    for key, settings in (("", []), ("_after", ["gate.0.1=0"])):
        counted = summary(score_levels(changed_by(task_run, *settings), data, "val"))
        assert found[f"right{key}"] == counted["right"] and found[f"nats{key}"] == counted["nats"]
        assert f"{counted['right']:.4f} right" in text
    assert f"({found['nats_after'] - found['nats']:+.4f})" in text and len(found["heads"]) == 8


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_bits_are_those_that_evaluate_gives_the_changed_model(ckpt, inspect, change):
    path = ckpt(ALL)
    bpb = [scoring.evaluate(path, "val", 0, "cpu", settings=each, progress=False)["bpb"]
           for each in ([], [change])]
    assert abs(bpb[1] - bpb[0]) > 1e-3, "the change does nothing here: it would show nothing"
    lines = inspect(path, "--tokens=0", change).splitlines()
    assert lines[0].startswith(f"{path}: {bpb[0]:.4f} bits/byte on ")
    assert lines[1] == f"{change}: {bpb[1]:.4f} bits/byte ({bpb[1] - bpb[0]:+.4f})"


@pytest.mark.slow
def test_bits_without_heads_are_those_of_the_pruned_model(ckpt, inspect):
    path = ckpt(ALL)
    data, bits = Dataset(checkpoint.read(path)["train"]["dataset"]), []
    for prune in (None, {0: [2], 1: [0]}):
        bits.append(scoring.score_windows(changed_by(path, "gate.0.1=0", prune=prune) if prune
                                          else changed_by(path), data, "val", 0)[1]["bpb"])
    out = inspect(path, "--tokens=0", "gate.0.1=0", "--prune", "0.2", "1.0")
    assert f"\ngate.0.1=0, without 0.2, 1.0: {bits[1]:.4f} bits/byte ({bits[1] - bits[0]:+.4f})\n" in out


def test_bits_of_characters_are_per_byte_of_the_slice(tmp_path, inspect):
    """Two-byte letters lie in the second half of the split alone: a mean over the split would be wrong."""
    from helpers import write_dataset
    text = "abab \n" * 100 + "éé" * 300
    data = Dataset(write_dataset(tmp_path / "two", {s: text for s in ("train", "val", "test")}, "char",
                                 sorted(set(text))))
    model = GPT(GPTConfig(block_size=32, vocab_size=data.vocab_size, n_layer=1, n_head=2, n_embd=16)).eval()
    path = tmp_path / "a.pt"
    torch.save(dict(model=model.state_dict(), config=asdict(model.config), meta=data.meta, step=1,
                    train=dict(dataset=str(data.dir))), path)
    nats, _ = scoring.score(model, data, "val", max_tokens=32)
    out = inspect(path, "--tokens=32")  # the first window
    assert f": {scoring.bits(nats, 32):.4f} bits/byte on 32 tokens of " in out


# ---- for a program to read ----

def strict(path):
    """What a JSON file holds, which must have no NaN and no infinities."""
    return json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{path} has {word}"))


@pytest.mark.slow
def test_json_has_what_is_printed(ckpt, inspect, tmp_path):
    path, out = ckpt(ALL), tmp_path / "found.json"
    changes = ["gate.0.1=0", "state.1.1=withdrawn", "consent.1.1=False", "gate.1.1=0.5"]
    text = inspect(path, *changes, "--prune=0.2", f"--json={out}")
    lines, found = text.splitlines(), strict(out)
    assert lines[-1] == str(out)
    assert lines[0].startswith(f"{found['ckpt']}: {found['bpb']:.4f} bits/byte on {found['tokens']:,} tokens")
    assert f": {found['bpb_after']:.4f} bits/byte (" in lines[1]
    assert found["set"] == changes and found["prune"] == ["0.2"] and found["split"] == "val"
    shown = table_of(text)
    assert shown.keys() == {(str(row["layer"]), str(row["head"])) for row in found["heads"]}
    for row in found["heads"]:
        cells = shown[str(row["layer"]), str(row["head"])]
        assert cells[2:5] == [f"{row['gate']:.3f}" + "*" * row["set_by_hand"], row["state"],
                              "yes" if row["consent"] else "no"]
        assert cells[5:] == [f"{row['entropy']:.3f}", f"{row['importance']:.2e}", f"{row['utilisation']:.3f}",
                             f"{row['gradient']:.2e}", f"{row['conflict']:+.2f}"]
    assert found["violations"] == [dict(layer=1, head=1, type="forced", gate=0.5, state="withdrawn",
                                        utilisation=0.0, last_signal=7)]
    assert found["written"] is None and found["pieces"] == []


@pytest.mark.slow
def test_json_without_a_change_has_one_score_and_a_state_for_each_piece(ckpt, inspect, tmp_path):
    out = tmp_path / "found.json"
    inspect(ckpt(dict(agency=True, agency_scope="mlp")), f"--json={out}", f"--save={tmp_path / 'saved'}")
    found = strict(out)
    assert found["bpb"] > 0 and found["bpb_after"] is None
    assert found["written"] == str(tmp_path / "saved" / "best.pt")
    assert [(row["layer"], row["state"], row["consent"]) for row in found["pieces"]] == [
        (0, "active", True), (1, "active", True)]
    assert "state" not in found["heads"][0]


# ---- consent ----

@pytest.mark.slow
def test_heads_without_consent_are_listed(ckpt, inspect):
    path = ckpt(dict(agency=True))
    assert "without consent" not in inspect(path)
    out = inspect(path, "state.0.1=withdrawn", "consent.0.1=False")
    assert out.split()[-7:] == ["0", "1", "blocked", "1.000", "withdrawn", "0.000", "7"]
    out = inspect(path, "state.0.1=withdrawn", "consent.0.1=False", "gate.0.1=0.5")
    assert out.split()[-7:] == ["0", "1", "forced", "0.500", "withdrawn", "0.000", "7"]


# ---- MLPs and blocks with states ----

@pytest.mark.slow
@pytest.mark.parametrize("scope", ["mlp", "block"])
def test_an_mlp_or_a_block_is_set_by_hand_and_saved(ckpt, inspect, tmp_path, refusal, scope):
    path = ckpt(dict(agency=True, agency_scope=scope, bias=True))
    lines = inspect(path).splitlines()
    head = next(line for line in lines if line.split()[:2] == [scope, "gate"])
    assert lines[lines.index(head) + 1].split()[:4] == ["0", "1.000", "active", "yes"]
    out = inspect(path, "state.1=withdrawn", "consent.1=False")
    assert out.split()[-7:] == ["1", scope, "blocked", "1.000", "withdrawn", "0.000", "7"]
    out = inspect(path, "gate.0=0.3", "consent.0=False")
    assert out.split()[-7:] == ["0", scope, "forced", "0.300", "active", "0.000", "7"]
    folder = str(tmp_path / "saved")
    changes = "gate.0=0.3", "consent.0=False", "state.1=overloaded"
    said = refusal([f"--ckpt={path}", "--device=cpu", *(f"--set={each}" for each in changes),
                    f"--save={folder}"])
    assert f"{scope} 0 is at 0.3 by hand while its own gate is 0" in said and "leave out gate.0" in said
    changes = "gate.0=0.3", "state.1=overloaded"
    out = inspect(path, *changes, f"--save={folder}")
    assert "gate 0.3 of 0 is in its output projections there" in out
    saved = checkpoint.build(checkpoint.read(folder), folder)
    assert off_by(saved, changed_by(path, *changes)) < 1e-5
    assert [block.agency.state.tolist() for block in saved.transformer.h[:2]] == [[0], [1]]


# ---- saving ----

@pytest.mark.slow
@pytest.mark.parametrize("flags", [PLAIN, dict(sentinel="sigmoid"), dict(agency=True, agency_enforce=False),
                                   ALL], ids=["plain", "sentinel", "agency", "all"])
def test_what_is_saved_has_the_changed_logits(ckpt, inspect, tmp_path, flags):
    path, out = ckpt(flags), str(tmp_path / "new" / "saved")
    changes = ["gate.0.0=0.7", "gate.0.1=0", "gate.1.2=0.5"]
    if "agency" in flags:
        changes += ["state.0.2=withdrawn", "state.1.1=overloaded", "consent.1.1=False"]
    if "unet" in flags:
        changes += ["unet_skips=False", "gate.1.4=-0.3"]
    lines = inspect(path, "--tokens=0", *changes, "--prune", "1.0", f"--save={out}").splitlines()
    assert f"{out}/best.pt" in lines
    changed, state = changed_by(path, *changes, prune={1: [0]}), checkpoint.read(out)
    saved = checkpoint.build(state, out)
    assert off_by(saved, changed) < 1e-5
    unfolded = checkpoint.build({**state, "model": changed.state_dict()}, out)
    assert off_by(unfolded, changed) > 1e-3, "without the gates set by hand it is another model"
    bits = float(lines[1].split()[-3])
    assert scoring.evaluate(out, "val", 0, "cpu", progress=False)["bpb"] == pytest.approx(bits, abs=1e-4)
    assert f": {bits:.4f} bits/byte" in inspect(out, "--tokens=0")
    for old, new in zip(attentions(changed), attentions(saved)):
        assert old.head_ids == new.head_ids
        if old.agency is not None:
            assert torch.equal(old.agency.state, new.agency.state)
            assert torch.equal(old.agency.consent, new.agency.consent)
            assert new.agency.last_signal.max() == 7, "the checkpoint's step"
    assert saved.config == changed.config and state["step"] == 7
    assert state["edits"] == dict(ckpt=path, set=changes, prune=["1.0"])
    sample.main([f"--ckpt={out}", "--max_new_tokens=5", "--device=cpu"])


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_gates_by_hand_go_into_the_projections_of_every_mechanism(name):
    model = make_model(n_head=4, n_embd=64, **MECHANISMS[name]).double()
    shown = copy.deepcopy(model)
    for layer, attn in enumerate(attentions(model)):
        for head in attn.all_head_ids()[1:]:
            shown.set_head(layer, head, gate=0.3 * head - 0.5)
    assert off_by(shown, model) > 1e-3
    assert off_by(folded(shown), shown) < 1e-6  # a gate by hand is float32
    assert all(attn.gate_override is None for attn in attentions(folded(shown)))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [dict(agency=True), dict(sentinel="hard_concrete")], ids=str)
def test_a_head_that_only_the_hand_opens_is_not_saved(ckpt, inspect, refusal, tmp_path, flags):
    def close(model):
        if model.config.sentinel:
            attentions(model)[0].sentinel.logit.data[1] = -9.0
        else:
            model.set_head(0, 1, state="withdrawn")

    path = ckpt(flags, close)
    inspect(path, "gate.0.1=0", f"--save={tmp_path / 'closed'}")  # 0 over 0 is nothing to hold
    words = refusal([f"--ckpt={path}", "--device=cpu", "--set=gate.0.1=0.5", f"--save={tmp_path / 'open'}"])
    assert "head 0.1 is at 0.5 by hand while its own gate is 0" in words and "leave out gate.0.1" in words
    assert not (tmp_path / "open").exists()


def test_a_checkpoint_of_other_logits_is_not_written(ckpt, refusal, tmp_path, monkeypatch):
    monkeypatch.setattr("lab.heads.inspection.folded", copy.deepcopy)  # forgets the gates set by hand
    assert "nothing was written" in refusal([f"--ckpt={ckpt(PLAIN)}", "--device=cpu", "--set=gate.0.1=0.5",
                                             f"--save={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


# ---- the table ----

def table_of(text):
    """{(layer, head): cells} of a table in what was printed."""
    rows = [line.split() for line in text.splitlines() if line[:5].strip().isdigit()]
    return {tuple(row[:2]): row for row in rows if len(row) == 10}


@pytest.mark.slow
def test_the_table_shows_heads_as_they_are(ckpt, inspect):
    path = ckpt(ALL)
    row = table_of(inspect(path))
    assert set(row) == {("0", h) for h in "012"} | {("1", h) for h in "01234"}, "constraint heads too"
    assert {cells[3] for cells in row.values()} == {"active"}
    out = inspect(path, "gate.0.1=0", "state.1.1=overloaded", "consent.1.1=False", "--prune=0.2")
    row = table_of(out)
    assert ("0", "2") not in row
    assert row["0", "1"][2] == "0.000*" and float(row["0", "1"][6]) == 0 and "* set by hand" in out
    assert row["1", "1"][2:5] == ["0.000", "overloaded", "no"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [PLAIN, ALL], ids=["plain", "all"])
def test_a_layer_may_lose_all_its_heads(ckpt, inspect, tmp_path, flags):
    inspect(ckpt(flags), "--prune", "0.0", "0.1", "0.2", f"--save={tmp_path / 'less'}")
    assert checkpoint.read(tmp_path / "less")["config"]["head_ids"] == [[], [0, 1, 2]]


# ---- what is wrong ----

@pytest.mark.slow
def test_the_command_changes_and_saves(ckpt, tmp_path):
    command = [sys.executable, "-m", "lab.probe", "inspect", f"--ckpt={ckpt(ALL)}", "--device=cpu",
               "--set=consent.0.1=False", f"--save={tmp_path / 'saved'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(str(tmp_path)) and "\nconsent.0.1=False: " in done.stdout
    assert not attentions(checkpoint.build(checkpoint.read(tmp_path / "saved"), "saved"))[0].agency.consent[1]
