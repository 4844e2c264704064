"""A session with a model's heads: its answers are those of evaluate.py, sample.py and what it saves."""
import copy
import io
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

import sample
from model import GPT, MECHANISMS, GPTConfig
from nanoheads.common import UserError
from nanoheads.heads.inspection import Session, arguments, folded, main
from nanoheads.heads.measuring import attentions
from nanoheads.text.dataset import Dataset
from nanoheads.training import checkpoint, scoring
from nanoheads.training.sampling import side_by_side
from conftest import ROOT
from helpers import make_model

PROGRAM = "probe.py inspect"  # see the fixture refusal

PLAIN = {}
ALL = dict(agency=True, sentinel="sigmoid", unet="concat", routing="moh", routing_top_k=2,
           constraint_names=["a", "b"])
# command -> what --set says to the same end
SAME = {"gate 0.1 0.25": "gate.0.1=0.25", "gate 1.0 0": "gate.1.0=0", "prune 0.2": "gate.0.2=0",
        "withdraw 1.2": "state.1.2=withdrawn", "state 0.0 overloaded": "state.0.0=overloaded",
        "consent 1.1 no": "consent.1.1=False", "skips off": "unet_skips=False", "gate 1.4 -1": "gate.1.4=-1"}


@pytest.fixture
def ckpt(tmp_path, bytes_data):
    """ckpt(flags) -> path of a tiny model's checkpoint."""
    def make(flags, name="model.pt"):
        model, data = make_model(**flags), Dataset(bytes_data)
        torch.save(dict(model=model.state_dict(), config=asdict(model.config), meta=data.meta, step=7,
                        train=dict(dataset=str(bytes_data))), tmp_path / name)
        return str(tmp_path / name)
    return make


def session_of(path, *args):
    args = arguments([f"--ckpt={path}", "--max_new_tokens=20", *args])
    args.device = "cpu"
    return Session(args)


@pytest.fixture
def drive(monkeypatch, capsys):
    """drive(path, command, ...) -> (stdout, stderr, exit status) of a session that reads these lines."""
    def call(path, *lines, asks=False):
        stdin = io.StringIO("".join(f"{line}\n" for line in lines))
        monkeypatch.setattr(stdin, "isatty", lambda: asks)
        monkeypatch.setattr(sys, "stdin", stdin)
        status = 0
        try:
            main([f"--ckpt={path}", "--max_new_tokens=20", "--device=cpu"])
        except SystemExit as e:
            status = e.code
        return *capsys.readouterr(), status
    return call


@torch.no_grad()
def logits(model, seed=0):
    ids = torch.randint(256, (3, 32), generator=torch.Generator().manual_seed(seed))
    return model(ids).logits


def off_by(model, other):
    want = logits(other)
    return ((logits(model) - want).abs().max() / want.abs().max()).item()


# ---- the answer to a change ----

@pytest.mark.parametrize("command", SAME)
def test_bits_are_those_that_evaluate_gives_the_changed_model(ckpt, command, capsys):
    path = ckpt(ALL)
    bpb = [scoring.evaluate(path, "val", 0, "cpu", settings=each)["bpb"] for each in ([], [SAME[command]])]
    assert abs(bpb[1] - bpb[0]) > 1e-3, "the change does nothing here: it would show nothing"
    session = session_of(path, "--tokens=0")
    assert session.bits == pytest.approx(bpb[0], abs=1e-6)
    capsys.readouterr()
    session.obey(command)
    assert session.bits == pytest.approx(bpb[1], abs=1e-6)
    assert (f"bits/byte {bpb[0]:.4f} -> {bpb[1]:.4f} ({bpb[1] - bpb[0]:+.4f}), "
            f"{bpb[1] - bpb[0]:+.4f} from the checkpoint as loaded") in capsys.readouterr().out


def test_the_second_difference_is_to_the_checkpoint_as_loaded(ckpt, capsys):
    session = session_of(ckpt(ALL))
    bits = [session.bits]
    for command in ("withdraw 0.1", "prune 1.0"):
        session.obey(command)
        bits.append(session.bits)
    assert f"({bits[2] - bits[1]:+.4f}), {bits[2] - bits[0]:+.4f} from" in capsys.readouterr().out


def test_bits_of_characters_are_per_byte_of_the_slice(tmp_path, capsys):
    """Two-byte letters lie in the second half of the split alone: a mean over the split would be wrong."""
    from conftest import write_dataset
    text = "abab \n" * 100 + "éé" * 300
    data = Dataset(write_dataset(tmp_path / "two", {s: text for s in ("train", "val", "test")}, "char",
                                 sorted(set(text))))
    model = GPT(GPTConfig(block_size=32, vocab_size=data.vocab_size, n_layer=1, n_head=2, n_embd=16)).eval()
    path = tmp_path / "a.pt"
    torch.save(dict(model=model.state_dict(), config=asdict(model.config), meta=data.meta, step=1,
                    train=dict(dataset=str(data.dir))), path)
    session = session_of(path, "--tokens=32", "--start=a")  # the first window
    nats, _ = scoring.score(model, data, "val", max_tokens=32)
    assert session.n_bytes == 32 and session.bits == scoring.bits(nats, 32)


@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_samples_are_those_of_sample_py(ckpt, capsys, monkeypatch, temperature):
    path, texts = ckpt(ALL), []
    args = ["--start=3 plus", "--max_new_tokens=20", f"--temperature={temperature}", "--device=cpu"]
    for settings in ([], ["--set=gate.0.1=-2", "--set=state.1.2=withdrawn"]):
        sample.main([f"--ckpt={path}", *args, *settings])
        texts.append(capsys.readouterr().out.removesuffix("\n"))
    assert texts[0] != texts[1]
    monkeypatch.setenv("COLUMNS", "110")
    session = session_of(path, "--start=3 plus", f"--temperature={temperature}")
    session.obey("gate 0.1 -2")
    session.obey("withdraw 1.2")
    shown = side_by_side(("as loaded", "now"), texts, 110)
    assert capsys.readouterr().out.endswith(shown + "\n")
    for command in ("sample 3 plus", "text 3 plus"):
        session.obey(command)
        assert capsys.readouterr().out == shown + "\n"


def test_a_prompt_may_hold_blanks_and_numbers_signs(ckpt, capsys):
    session = session_of(ckpt(PLAIN))
    session.obey(r"text  # 3\n4 ")
    assert session.start[0] == " # 3\n4 "
    assert bytes(session.start[1][0].tolist()) == b" # 3\n4 "
    session.obey("sample other")
    assert session.start[0] == " # 3\n4 "


# ---- undo ----

def test_undo_takes_back_every_change_exactly(ckpt, capsys):
    session = session_of(ckpt(ALL))
    been = [(session.bits, logits(session.model))]
    for command in SAME:
        session.obey(command)
        been.append((session.bits, logits(session.model)))
    for bits, want in reversed(been[:-1]):
        assert not torch.equal(logits(session.model), want)
        session.obey("undo")
        assert session.bits == bits and torch.equal(logits(session.model), want)
    assert attentions(session.model)[0].n_head == 3
    with pytest.raises(UserError, match="nothing to undo"):
        session.obey("undo")


def test_a_change_that_breaks_the_model_is_not_made(ckpt, capsys):
    session = session_of(ckpt(PLAIN))
    session.obey("gate 0.0 0.5")
    before = logits(session.model)
    with pytest.raises(UserError, match="nothing was changed"):
        session.obey("gate 0.1 1e38")
    assert torch.equal(logits(session.model), before) and len(session.changes) == 1


# ---- agency, and without it ----

def test_withdraw_without_agency_is_a_gate_of_0_by_hand(ckpt, capsys):
    path = ckpt(dict(sentinel="sigmoid"))
    session = session_of(path)
    start = logits(session.model)
    session.obey("withdraw 1.1")
    assert capsys.readouterr().out.endswith("agency is off: its gate is 0 by hand\n")
    closed = checkpoint.build(checkpoint.read(path), path, settings=["gate.1.1=0"])
    assert torch.equal(logits(session.model), logits(closed)) and not torch.equal(logits(closed), start)
    session.obey("restore 1.1")
    assert torch.equal(logits(session.model), start)


def test_restore_brings_consent_back_too(ckpt, capsys):
    session = session_of(ckpt(ALL))
    start = logits(session.model)
    for commands in (("withdraw 0.1",), ("consent 0.1 no",), ("state 0.1 misaligned", "consent 0.1 no")):
        for command in commands:
            session.obey(command)
        assert not attentions(session.model)[0].agency.consent[1]
        assert off_by(session.model, session.loaded) > 1e-3
        session.obey("restore 0.1")
        assert torch.equal(logits(session.model), start)
    assert attentions(session.model)[0].agency.last_signal[1] == 7, "the checkpoint's step"


def test_a_gate_by_hand_over_a_withdrawn_head_is_said_and_a_violation(ckpt, capsys):
    session = session_of(ckpt(dict(agency=True)))
    session.obey("violations")
    assert capsys.readouterr().out.endswith("\nnone\n")
    session.obey("withdraw 0.1")
    assert "overrides" not in capsys.readouterr().out
    session.obey("violations")
    assert capsys.readouterr().out.split()[-5:] == ["0", "1", "blocked", "1.000", "withdrawn"]
    session.obey("gate 0.1 0.5")
    session.obey("violations")
    assert capsys.readouterr().out.split()[-5:] == ["0", "1", "forced", "0.500", "withdrawn"]
    session.obey("state 0.1 withdrawn")
    assert "gate 0.1 auto ends that" in capsys.readouterr().out


# ---- MLPs and blocks with states ----

@pytest.mark.parametrize("scope", ["mlp", "block"])
def test_an_mlp_or_a_block_is_set_by_hand_and_saved(ckpt, tmp_path, capsys, scope):
    path = ckpt(dict(agency=True, agency_scope=scope, bias=True))
    session, out = session_of(path, "--tokens=0"), str(tmp_path / "saved")
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.split()[:2] == [scope, "gate"])
    assert lines[lines.index(head) + 1].split()[:4] == ["0", "1.000", "active", "yes"]
    start = logits(session.model)
    session.obey("withdraw 1")
    closed = checkpoint.build(checkpoint.read(path), path, settings=["state.1=withdrawn"])
    assert torch.equal(logits(session.model), logits(closed)) and not torch.equal(logits(closed), start)
    session.obey("violations")
    assert capsys.readouterr().out.split()[-5:] == ["1", scope, "blocked", "1.000", "withdrawn"]
    session.obey("restore 1")
    assert torch.equal(logits(session.model), start)
    session.obey("withdraw 1.2")
    assert capsys.readouterr().out.endswith("heads have no states: its gate is 0 by hand\n")
    for command in ("gate 0 0.3", "state 1 overloaded", "consent 0 no", "gate 1.2 auto"):
        session.obey(command)
    assert "overrides state and consent; gate 0 auto ends that" in capsys.readouterr().out
    session.obey("violations")
    assert capsys.readouterr().out.split()[-5:] == ["0", scope, "forced", "0.300", "active"]
    stuck = rf"{scope} 0 is at 0\.3 by hand while its own gate is 0.*gate 0 auto"
    with pytest.raises(UserError, match=stuck):
        session.obey(f"save {out}")
    for command in ("consent 0 yes", f"save {out}"):
        session.obey(command)
    assert "gate 0.3 of 0 is in its output projections there" in capsys.readouterr().out
    saved = checkpoint.build(checkpoint.read(out), out)
    assert off_by(saved, session.model) < 1e-5
    assert [block.agency.state.tolist() for block in saved.transformer.h[:2]] == [[0], [1]]
    with pytest.raises(UserError, match="only heads are pruned"):
        session.obey("prune 0")
    with pytest.raises(UserError, match=rf"'x' is no head.*the {scope}'s block"):
        session.obey("gate x 1")


def test_a_block_alone_is_no_place_where_heads_have_the_states(ckpt, capsys):
    with pytest.raises(UserError, match="'1' is no head; write block.number"):
        session_of(ckpt(dict(agency=True))).obey("withdraw 1")


# ---- saving ----

@pytest.mark.parametrize("flags", [PLAIN, dict(sentinel="sigmoid"), dict(agency=True, agency_enforce=False),
                                   ALL], ids=["plain", "sentinel", "agency", "all"])
def test_what_is_saved_says_what_the_session_said(ckpt, tmp_path, capsys, flags):
    path = ckpt(flags)
    session = session_of(path, "--tokens=0", "--set=gate.0.0=0.7")
    commands = ["gate 0.1 0", "gate 1.2 0.5", "prune 1.0"]
    if "agency" in flags:
        commands += ["withdraw 0.2", "state 1.1 overloaded", "consent 1.1 no"]
    if "unet" in flags:
        commands += ["skips off", "gate 1.4 -0.3"]
    for command in commands:
        session.obey(command)
    session.obey(f"save {tmp_path / 'new' / 'saved'}")
    out = str(tmp_path / "new" / "saved")
    state = checkpoint.read(out)
    saved = checkpoint.build(state, out)
    assert off_by(saved, session.model) < 1e-5
    unfolded = checkpoint.build({**state, "model": session.model.state_dict()}, out)
    assert off_by(unfolded, session.model) > 1e-3, "without the gates set by hand it is another model"
    assert scoring.evaluate(out, "val", 0, "cpu")["bpb"] == pytest.approx(session.bits, abs=1e-5)
    assert session_of(out, "--tokens=0").bits == pytest.approx(session.bits, abs=1e-5)
    for old, new in zip(attentions(session.model), attentions(saved)):
        assert old.head_ids == new.head_ids
        if old.agency is not None:
            assert torch.equal(old.agency.state, new.agency.state)
            assert torch.equal(old.agency.consent, new.agency.consent)
    assert saved.config == session.model.config and state["step"] == 7
    assert state["edits"] == dict(ckpt=path, set=["gate.0.0=0.7"], commands=commands)
    sample.main([f"--ckpt={out}", "--max_new_tokens=5", "--device=cpu"])


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


@pytest.mark.parametrize("flags", [dict(agency=True), dict(sentinel="hard_concrete")], ids=str)
def test_a_head_that_only_the_hand_opens_is_not_saved(ckpt, tmp_path, capsys, flags):
    session = session_of(ckpt(flags))
    with torch.no_grad():
        if session.loaded.config.sentinel:
            attentions(session.loaded)[0].sentinel.logit[1] = -9.0
        else:
            session.loaded.set_head(0, 1, state="withdrawn")
    session.obey("gate 0.1 0")
    session.obey(f"save {tmp_path / 'closed'}")  # 0 over 0 is nothing to hold
    session.obey("gate 0.1 0.5")
    with pytest.raises(UserError, match=r"0\.1 is at 0\.5 by hand while its own gate is 0.*gate 0\.1 auto"):
        session.obey(f"save {tmp_path / 'open'}")
    assert not (tmp_path / "open").exists()
    session.obey("gate 0.1 auto")
    session.obey(f"save {tmp_path / 'open'}")
    assert (tmp_path / "open" / "best.pt").exists()


def test_a_save_that_would_say_something_else_is_not_written(ckpt, tmp_path, capsys, monkeypatch):
    session = session_of(ckpt(PLAIN))
    session.obey("gate 0.1 0.5")
    monkeypatch.setattr("nanoheads.heads.inspection.folded", copy.deepcopy)  # forgets the gates set by hand
    with pytest.raises(UserError, match="nothing was written"):
        session.obey(f"save {tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_a_run_is_left_alone(ckpt, tmp_path, capsys):
    session = session_of(ckpt(PLAIN))
    for name in ("best.pt", "ckpt.pt"):
        folder = tmp_path / f"has_{name}"
        folder.mkdir()
        (folder / name).write_bytes(b"old")
        with pytest.raises(UserError, match=f"{name} is there already"):
            session.obey(f"save {folder}")
        assert [p.read_bytes() for p in folder.iterdir()] == [b"old"]


# ---- the table ----

def table_of(text):
    """{(layer, head): cells} of a table in what was printed."""
    rows = [line.split() for line in text.splitlines() if line[:5].strip().isdigit()]
    return {tuple(row[:2]): row for row in rows}


def test_the_table_shows_heads_as_they_are(ckpt, drive):
    commands = "gate 0.1 0", "state 1.1 overloaded", "consent 1.1 no", "prune 0.2", "heads"
    out, err, status = drive(ckpt(ALL), *commands)
    first, last = out.split("> gate")[0], out.split("> heads")[1]
    row = table_of(first)
    assert set(row) == {("0", h) for h in "012"} | {("1", h) for h in "01234"}, "constraint heads too"
    assert {cells[3] for cells in row.values()} == {"active"} and all(len(c) == 10 for c in row.values())
    row = table_of(last)
    assert ("0", "2") not in row
    assert row["0", "1"][2] == "0.000*" and float(row["0", "1"][6]) == 0 and "* set by hand" in last
    assert row["1", "1"][2:5] == ["0.000", "overloaded", "no"]
    assert (err, status) == ("", 0)


@pytest.mark.parametrize("flags", [PLAIN, ALL], ids=["plain", "all"])
def test_a_layer_may_lose_all_its_heads(ckpt, drive, tmp_path, flags):
    out, err, status = drive(ckpt(flags), "prune 0.0 0.1 0.2", "heads", f"save {tmp_path / 'less'}", "undo")
    assert (err, status) == ("", 0) and out.count("-> ") == 2
    assert checkpoint.read(tmp_path / "less")["config"]["head_ids"] == [[], [0, 1, 2]]


# ---- what is wrong ----

WRONG = {
    "gaet 0.1 0": "no command 'gaet'; did you mean gate?",
    "xyzzy": "help lists the commands",
    "gate 0.7 0": "block 0 has no head 7; it has 0, 1, 2",
    "gate 5.0 0": "there is no block 5; they go from 0 to 1",
    "gate 0,1 0": "'0,1' is no head; write block.number",
    "gate 0.1 high": "'high' must be a number, or auto",
    "gate 0.1 nan": "'nan' must be a number, or auto",
    "gate 0.1": "it takes L.H VALUE|auto",
    "withdraw": "it takes L.H",
    "undo": "there is nothing to undo",
    "undo 2": "it takes nothing",
    "state 0.1 tired": "must be one of active, overloaded, misaligned, withdrawn",
    "consent 0.1 maybe": "'maybe' must be yes or no",
    "skips": "it takes on|off",
    "prune": "it takes L.H [L.H ...]",
    "prune 1.3": "1.3 is a constraint head",
    "prune 0.0 0.9": "block 0 has no head 9; it has 0, 1, 2",
    "text": "it takes PROMPT",
    "text FILE:none.txt": "none.txt cannot be read",
    "save /proc/none/x": "/proc/none",
}


@pytest.mark.parametrize("command, words", WRONG.items(), ids=WRONG)
def test_a_wrong_command_is_named_and_the_session_goes_on(ckpt, drive, command, words):
    out, err, status = drive(ckpt(ALL), command, "gate 0.1 0.5", "undo")
    assert err.startswith(f"probe.py inspect: {command}: ") and err.count("\n") == 1 and words in err
    assert status == 1 and out.count("-> ") == 2, "what follows is done"


@pytest.mark.parametrize("command, words", [("skips off", "trained with unet off"),
                                            ("state 0.1 active", "trained with agency off")])
def test_what_the_model_does_not_have_is_refused(ckpt, drive, command, words):
    out, err, status = drive(ckpt(PLAIN), command)
    assert words in err and status == 1 and "-> " not in out


def test_a_person_is_not_punished_for_a_slip(ckpt, drive):
    out, err, status = drive(ckpt(PLAIN), "gaet 0.1", asks=True)
    assert "did you mean gate?" in err and status == 0


def test_comments_are_passed_over_and_quit_ends(ckpt, drive):
    lines = "# gate 0.1 0", "", "  # x", "gate 0.1 0 # closed", "quit", "prune 0.0"
    out, err, status = drive(ckpt(PLAIN), *lines)
    assert (err, status) == ("", 0) and out.count("-> ") == 1 and "prune" not in out


def test_help_lists_every_command(ckpt, drive):
    out, _, _ = drive(ckpt(PLAIN), "help")
    from nanoheads.heads.inspection import COMMANDS
    listed = out.split("> help\n")[1]
    assert all(f"\n{name} " in listed for name in COMMANDS)
    assert all(callable(getattr(Session, f"do_{name}")) for name in COMMANDS)


def test_a_bad_checkpoint_is_one_line(refusal, bad_checkpoint):
    path, words = bad_checkpoint
    assert words in refusal([f"--ckpt={path}"])


@pytest.mark.parametrize("args, words", [
    (["--tokens=-1"], "tokens=-1"), (["--ckpt=b"], "one at a time, not 2"), (["--split=dev"], "no split"),
    (["--temperature=-1"], "temperature=-1"), (["--start=FILE:none"], "none cannot be read")])
def test_a_wrong_argument_is_one_line(ckpt, refusal, args, words):
    assert words in refusal([f"--ckpt={ckpt(PLAIN)}", "--device=cpu", *args])


def test_damaged_weights_are_named(ckpt, refusal):
    path = ckpt(PLAIN)
    state = torch.load(path)
    state["model"]["transformer.wte.weight"].fill_(float("nan"))
    torch.save(state, path)
    assert "nan bits/byte on val" in refusal([f"--ckpt={path}", "--device=cpu"])


# ---- a real pipe ----

def test_a_pipe_drives_it(ckpt, tmp_path):
    commands = f"withdraw 0.1\ngaet 0.1 0\nsave {tmp_path / 'saved'}\n".encode() + b"sample \xff3 plus\n"
    command = [sys.executable, "-c", "from nanoheads.heads.inspection import main; main()",
               f"--ckpt={ckpt(ALL)}", "--device=cpu", "--max_new_tokens=20"]
    done = subprocess.run(command, input=commands, capture_output=True, timeout=120, cwd=ROOT)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 1
    assert err == "probe.py inspect: gaet 0.1 0: no command 'gaet'; did you mean gate?\n"
    assert out.startswith(str(tmp_path)) and "> withdraw 0.1\nbits/byte " in out
    assert "as loaded" in out.split("> sample")[1]
    assert not attentions(checkpoint.build(checkpoint.read(tmp_path / "saved"), "saved"))[0].agency.consent[1]
