"""A study: baselines that match, runs that are never repeated, failures that sink nothing, numbers that add up."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import compare
from common import UserError
import configurator
import jobs
import trial
import study as making
from compare import Study, main
from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from study import Maker, StudyConfig, size_of, step_time_ratio

ROOT = Path(__file__).resolve().parents[1]
STUDIES = sorted(p.name for p in (ROOT / "config").glob("study_*.py"))
SMALL = "n_layer = 1\nn_head = 2\nn_embd = 16\nblock_size = 16\nbatch_size = 4\nmax_iters = 6\neval_interval = 3\neval_tokens = 64\nrecipe = 'modern'\n"


@pytest.fixture
def plain(tmp_path, bytes_data, monkeypatch):
    """The config file of a plain GPT that trains in a moment, and an empty folder for runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plain.py"
    path.write_text(SMALL + f"dataset = {str(bytes_data)!r}\n")
    return path


def study_of(plain, **keys):
    return Study(StudyConfig(**{"base": str(plain), "device": "cpu", "seeds": [1, 2], "match": [], "mechanisms": ["output_gate"], **keys}), "test")


class Here:
    """A place to run trials without a process, one at a time."""
    slots = 1

    def __init__(self):
        self.started = []

    def start(self, folder):
        self.started.append(folder)
        try:
            trial.run(folder)
            return ""
        except Exception as e:
            return str(e)

    def ended(self, job, folder):
        return job

    def stop(self, running):
        pass


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(compare.jobs.time, "sleep", lambda s: None)
    return Here()


# ---- baselines ----

class Bytes:
    """A dataset that is not there, for plans."""
    vocab_size = 256

    def __init__(self, name):
        self.vocab_size = 6064 if "char" in str(name) else 256
        self.tokens = lambda split: range(10**6)
        self.splits = {s: dict(sha256=s, tokens=10**6, bytes=10**6) for s in ("train", "val", "test")}


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_baselines_have_the_parameters_and_the_flops_of_their_variants(scale, monkeypatch):
    monkeypatch.setattr(making, "Dataset", Bytes)
    study = Study(StudyConfig(mechanisms=list(MECHANISMS), scale=scale), "test")
    study.add_baselines(list(study.baselines))
    plain = study.arms["plain"]
    for name, baselines in study.baselines.items():
        variant, wide, long = study.arms[name], study.arms[baselines["parameters"]], study.arms[baselines["FLOPs"]]
        assert baselines["hyperparameters"] == "plain"
        assert abs(wide.params - variant.params) <= 1e-3 * variant.params
        assert wide.params == GPT(wide.model).num_params() if scale == "tiny" else True  # counted, not solved for
        assert abs(long.flops - variant.flops) <= 0.5 * plain.flops / plain.train.max_iters * 1.0001  # half a step
        for baseline in (wide, long):  # nothing else differs from the plain GPT
            differ = {k for k, v in asdict(baseline.model).items() if v != asdict(plain.model)[k]}
            differ |= {k for k, v in asdict(baseline.train).items() if v != asdict(plain.train)[k]}
            assert differ <= {"n_inner"} or differ <= {"max_iters"}


def test_variants_whose_parameters_agree_share_a_baseline(monkeypatch):
    monkeypatch.setattr(making, "Dataset", Bytes)
    study = Study(StudyConfig(mechanisms=["routing_moh", "moh", "output_gate", "sentinel", "unet_concat", "output_gate_elementwise"]), "test")
    study.add_baselines(list(study.baselines))
    shared = {name: baselines["parameters"] for name, baselines in study.baselines.items()}
    assert shared["routing_moh"] == shared["moh"] == shared["output_gate"] != "plain"
    assert shared["sentinel"] == "plain"  # 32 parameters are less than 0.1 %
    assert shared["unet_concat"] == shared["output_gate_elementwise"]
    assert len(study.arms) == 7 + 2 + len({b["FLOPs"] for b in study.baselines.values()} - {"plain"})


def test_a_wider_mlp_is_the_only_difference_and_survives_a_checkpoint():
    sizes = [size_of(GPTConfig(vocab_size=65, n_layer=2, n_head=2, n_embd=16, block_size=8, n_inner=w))[0] for w in (None, 64, 65)]
    assert sizes[0] == sizes[1] and sizes[2] - sizes[1] == 2 * 2 * 16
    assert GPTConfig(n_inner=0).problems() == ["n_inner=0 must be at least 1"]


def test_what_cannot_be_matched_is_said(plain):
    study = study_of(plain, mechanisms=["a2c_published"], match=["parameters"], settings=dict(n_inner=1))
    with pytest.raises(UserError, match=r"a2c_published has [\d,]+ parameters, fewer than a plain GPT without its MLPs"):
        study.add_baselines(["a2c_published"])


def test_the_same_wall_clock_is_measured_once(plain, monkeypatch):
    asked = []
    monkeypatch.setattr(compare, "step_time_ratio", lambda a, b, device, threads: asked.append(a.name) or 1.5)
    for _ in range(2):
        study = study_of(plain, match=["wall-clock"])
        study.add_baselines(["output_gate"])
        assert study.arms[study.baselines["output_gate"]["wall-clock"]].train.max_iters == 9
    assert asked == ["output_gate"]


def test_a_model_takes_as_long_as_itself_and_less_than_a_bigger_one(plain):
    study = study_of(plain, variants={"deep": dict(n_layer=6)}, mechanisms=[])
    assert step_time_ratio(study.arms["deep"], study.arms["plain"], "cpu", threads=1, steps=2) > 1.5


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", ["tiny", "small", "seed"])
def test_every_shipped_study_makes_its_arms(name, scale, monkeypatch):
    monkeypatch.setattr(making, "Dataset", Bytes)
    monkeypatch.setattr(making, "size_of", lambda config: (1000, 1000))  # 90 million numbers take their time; sizes have their own test
    if scale != "tiny" and "\nbase = " in (ROOT / "config" / name).read_text():
        scale = "tiny"  # its plain GPT is its own
    config, = configurator.load((StudyConfig,), [f"config/{name}", f"--scale={scale}"])
    maker = Maker(config)
    arms = maker.variants()
    assert config.question and arms
    for arm in arms:
        assert not arm.model.problems() and arm.train.max_iters == maker.plain.train.max_iters
        assert arm.model.attn_dropout == maker.plain.model.attn_dropout  # on both sides or on none


def test_every_mechanism_and_rival_is_in_study_all():
    config, = configurator.load((StudyConfig,), ["config/study_all.py"])
    assert set(config.mechanisms) == {*MECHANISMS, "all_on"}
    in_others = set()
    for name in STUDIES:
        other, = configurator.load((StudyConfig,), [f"config/{name}"])
        in_others |= set(other.mechanisms) if name != "study_all.py" else set()
    assert in_others == set(MECHANISMS)


# ---- runs ----

def test_a_finished_study_repeats_nothing_and_a_change_only_what_it_touches(plain, here):
    study = study_of(plain)
    study.run(here)
    assert len(here.started) == 4 and not study.summary("test")["failures"]
    first, here.started = study.results(), []
    study_of(plain).run(here)
    assert here.started == []
    changed = study_of(plain, mechanisms=[], variants={"output_gate": dict(output_gate="headwise", lr=5e-4)})
    changed.run(here)
    assert len(here.started) == 2
    assert changed.results()["plain", 1] == first["plain", 1] and changed.results()["output_gate", 1] != first["output_gate", 1]


def test_a_trial_is_the_training_and_the_scoring_of_the_command_that_is_shown_for_it(plain, here, monkeypatch):
    import evaluate
    import train
    study = study_of(plain, seeds=[3])
    study.run(here)
    summary = study.summary("test")
    command = summary["arms"]["output_gate"]["commands"][0].split()
    train.main(command[2:])
    (again,) = [evaluate.evaluate(Path("out/output_gate"), "test", 0, "cpu")]
    assert command[1] == "train.py" and again["bpb"] == pytest.approx(summary["arms"]["output_gate"]["bpb"][0], abs=1e-7)  # kept in float32
    nats = np.load(study.trials()["output_gate", 3] / "nats.npy")
    assert nats.sum() == pytest.approx(study.results()["output_gate", 3]["nats"]) and len(nats) == -(-1000 // 16)


def test_a_slice_is_scored_window_by_window_and_its_bytes_are_its_own(plain, here, bytes_data):
    study = study_of(plain, seeds=[3], test_tokens=160, mechanisms=["agency"])
    study.run(here)
    found = study.results()["plain", 3]
    assert found["tokens"] == found["bytes"] == 160 and np.load(study.trials()["plain", 3] / "nats.npy").shape == (10,)


def test_the_hash_sees_flags_seeds_data_and_code_but_no_comments(plain, monkeypatch, tmp_path):
    study = study_of(plain)
    arm = study.arms["output_gate"]
    folders = {study.folder(arm, 1), study.folder(arm, 2), study.folder(study.arms["plain"], 1), study.folder(arm, 1, data=dict(train="other"))}
    assert len(folders) == 4
    for name in jobs.CODE:
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(jobs, "ROOT", tmp_path)
    digest = lambda: jobs.code_digest.__wrapped__()
    before = digest()
    source = (tmp_path / "model.py").read_text(encoding="utf-8")
    (tmp_path / "model.py").write_text(source.replace('"""Two linear layers', '"""Two quite linear layers') + "\n# a remark\n", encoding="utf-8")
    assert digest() == before
    (tmp_path / "model.py").write_text(source.replace("0.02 / math.sqrt", "0.03 / math.sqrt"), encoding="utf-8")
    assert digest() != before


def test_a_run_that_crashes_is_reported_and_sinks_nothing(plain, here):
    study = study_of(plain, variants={"hot": dict(lr=1e9, muon_lr=1e9, min_lr=1e9, recipe="gpt2", optimizer="adamw", grad_clip=0.0)})
    study.run(here)
    summary = study.summary("test")
    assert {f["arm"] for f in summary["failures"]} == {"hot"} and all("stopped before the update" in f["why"] for f in summary["failures"])
    words = {row["variant"]: row["words"] for row in summary["comparisons"]}
    assert "no verdict" in words["hot"] and summary["done"] == 4 and summary["planned"] == 6
    assert all(x is not None for x in summary["arms"]["output_gate"]["bpb"])
    again = study_of(plain, variants=study.config.variants, report_only=True)
    again.run(here)
    assert len(again.summary("test")["failures"]) == 2  # told again, without running anything


def test_a_study_is_cut_short_and_goes_on_to_the_same_numbers(plain):
    """The real thing: processes, a signal while two runs train (as Ctrl-C is one), and the same command again."""
    (Path.cwd() / "study.py").write_text(f"base = {str(plain)!r}\nmechanisms = ['output_gate']\nseeds = [1]\nmatch = []\njobs = 2\ndevice = 'cpu'\n"
                                         "settings = dict(max_iters=160, eval_interval=10)\n")
    command = [sys.executable, str(ROOT / "compare.py"), "study.py"]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    logs, until = lambda: [p for p in Path("out/trials").glob("*/log.jsonl") if p.read_text().count("val_bpb") > 1], time.monotonic() + 60
    while len(logs()) < 2 and time.monotonic() < until and job.poll() is None:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 130 and "the same command goes on" in said
    assert not list(Path("out/trials").glob("*/result.json"))
    saved = {p.parent: torch.load(p, weights_only=True)["step"] for p in Path("out/trials").glob("*/ckpt.pt")}
    assert len(saved) == 2 and all(0 < step < 160 for step in saved.values())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "output_gate" in done.stdout and "report.html" in done.stdout
    cut = json.loads(next(Path("out/trials").glob("*/result.json")).read_text())
    folder = next(Path("out/trials").glob("*/result.json")).parent
    assert "going on at step" in (folder / "trial.log").read_text()
    alone = Path("alone") / folder.name
    alone.mkdir(parents=True)
    (alone / "trial.json").write_text((folder / "trial.json").read_text())
    assert trial.run(alone)["bpb"] == cut["bpb"]  # to the last bit


def test_the_same_study_runs_through_submitit(plain):
    pytest.importorskip("submitit", reason="submitit is not installed: pip install submitit")
    study = study_of(plain, submit="local", seeds=[1], mechanisms=["agency"])
    study.run(jobs.Cluster("local", 2, {"timeout_min": 5}))
    assert study.summary("test")["comparisons"][0]["differences"] == [0.0]
    assert study.spec(study.arms["plain"], 1) == study_of(plain).spec(study.arms["plain"], 1)  # the same runs as without it


def test_a_failure_on_the_cluster_is_said(plain):
    pytest.importorskip("submitit", reason="submitit is not installed: pip install submitit")
    place, folder = jobs.Cluster("local", 1, {"timeout_min": 5}), Path("out/trials/broken")
    folder.mkdir(parents=True)
    (folder / "trial.json").write_text(json.dumps({"model": {}, "train": {"dataset": "nowhere"}, "score": {}}))
    assert "no dataset nowhere" in jobs.run_all([folder], place)[folder]
    assert "no dataset nowhere" in jobs.failure(folder)


def test_two_studies_that_want_the_same_run_train_it_once(plain):
    study = study_of(plain, seeds=[1], settings=dict(max_iters=30))
    folder = study.trials()["plain", 1]
    pair = [subprocess.Popen(jobs.command_of(folder)) for _ in range(2)]
    assert [job.wait(timeout=120) for job in pair] == [0, 0]
    said = (folder / "trial.log").read_text()
    assert said.count("starting anew") == 1 and "going on" not in said


def test_a_run_does_not_begin_with_other_code_or_data_than_was_planned(plain):
    study = study_of(plain, seeds=[1])
    for part in ("code", "data"):
        folder = jobs.make({**study.spec(study.arms["plain"], 1), part: {"train": "x"} if part == "data" else "x"})
        assert jobs.run_all([folder], jobs.Processes(1, "cpu"))[folder] == f"trial: the {part} changed after this run was planned; start the study again"


def test_a_best_checkpoint_alone_does_not_block_a_run(plain):
    study = study_of(plain, seeds=[1])
    folder = study.trials()["plain", 1]
    (folder / "best.pt").write_bytes(b"left behind by a full disk")
    assert jobs.run_all([folder], jobs.Processes(1, "cpu")) == {} and jobs.done(folder)


def test_what_cannot_be_started_is_a_failure_and_no_end(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Full(Here):
        def start(self, folder):
            raise RuntimeError("no such\npartition")
    assert jobs.run_all([Path("a"), Path("b")], Full()) == dict.fromkeys([Path("a"), Path("b")], "could not be started: no such partition")


def test_cores_and_gpus_are_shared_out(monkeypatch):
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert (jobs.Processes(0, "cpu").slots, jobs.Processes(0, "cpu").threads) == (8, 1)
    assert (jobs.Processes(3, "cpu").slots, jobs.Processes(3, "cpu").threads) == (3, 2)
    monkeypatch.setattr(jobs, "pick_device", lambda name: "cuda")
    monkeypatch.setattr(jobs.torch.cuda, "device_count", lambda: 2)
    for visible, places in {"4,6": ["4", "6"], "7,": ["7"], "": ["0", "1"], "GPU-abc,GPU-def": ["GPU-abc", "GPU-def"]}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert jobs.Processes(0, "auto").places == places
    assert jobs.Processes(3, "auto").places == ["GPU-abc", "GPU-def", "GPU-abc"]


def test_a_killed_run_is_named(tmp_path):
    place = jobs.Processes(1, "cpu")
    job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    job.place = place.places.pop()
    job.kill()
    job.wait()
    assert place.ended(job, tmp_path) == "killed by SIGKILL: out of memory?" and place.places == [None]


# ---- learning rates ----

def test_both_sides_get_the_rate_that_validates_best(plain, here, monkeypatch):
    study = study_of(plain, tune_lr=True, tune_factors=[0.01, 1.0, 30.0])
    study.run(here)
    short = [f for f in here.started if json.loads((f / "trial.json").read_text())["score"]["split"] == "val"]
    assert len(short) == 6 and {json.loads((f / "trial.json").read_text())["model"]["seed"] for f in short} == {1000002}
    for arm in study.arms.values():
        tried = study.tune([arm], here)
        best = min(tried, key=lambda key: jobs.result(tried[key])["bpb"])
        assert arm.lr_factor == best[1] and arm.edge == (best[1] != 1.0)
        used = json.loads((study.trials()[arm.name, 1] / "trial.json").read_text())["train"]
        assert used["muon_lr"] == pytest.approx(arm.train.muon_lr * arm.lr_factor)


# ---- what it says ----

def test_differences_pair_the_seeds(plain, here):
    study = study_of(plain, seeds=[5, 6, 7])
    study.run(here)
    summary, found = study.summary("test"), study.results()
    row, = summary["comparisons"]
    assert row["differences"] == [found["output_gate", s]["bpb"] - found["plain", s]["bpb"] for s in (5, 6, 7)]
    assert row["mean"] == pytest.approx(np.mean(row["differences"])) and row["low"] <= row["mean"] <= row["high"]
    for each, difference in zip(row["bootstrap"], row["differences"]):
        assert each["mean"] == pytest.approx(difference, abs=1e-7)
    json.dumps(summary, allow_nan=False)


def test_a_mechanism_that_does_nothing_is_identical_and_another_seed_is_not(plain, here):
    study = study_of(plain, mechanisms=["agency"], variants={"again": dict(seed=1000)})
    study.run(here)
    rows = {row["variant"]: row for row in study.summary("test")["comparisons"]}
    assert rows["agency"]["words"] == "identical: the same numbers on every seed"
    assert 0.0 not in rows["again"]["differences"]


def test_only_the_best_get_all_baselines(plain, here):
    study = study_of(plain, mechanisms=["output_gate", "unet_concat", "constraint_a"], settings=dict(n_layer=2, n_embd=32), match=["parameters", "FLOPs"], matched=1)
    study.run(here)
    found = study.results()
    means = {name: np.mean(study.differences(name, "plain", found)) for name in study.baselines}
    best = min(means, key=means.get)
    assert set(study.baselines[best]) == {"hyperparameters", "parameters", "FLOPs"}
    summary = study.summary("test")
    assert set(summary["missing"]) == set(means) - {best} and "best 1 of 3" in study.selection
    every = study_of(plain, mechanisms=["output_gate", "unet_concat", "constraint_a"], settings=dict(n_layer=2, n_embd=32), match=["parameters", "FLOPs"])
    every.add_baselines(list(every.baselines))  # to choose the best by the scores that are judged is to have looked at all of these
    assert summary["comparisons_made"] == sum(len(set(own.values())) for own in every.baselines.values()) > len(summary["comparisons"])


def test_a_plan_runs_nothing(plain, capsys):
    main(["--base", str(plain), "--mechanisms=output_gate", "--dry_run", "--device=cpu"])
    said = capsys.readouterr().out
    assert "plain, MLP 65" in said and "15 runs, 15 of them to do" in said
    assert not Path("out").exists()


@pytest.mark.parametrize("args, words", [
    (["--mechanisms=output_gat"], "unknown 'output_gat'; did you mean output_gate?"),
    (["--mechanisms=output_gate", "--scale=huge"], "scale='huge' must be one of tiny, small, seed"),
    ([], "name at least one variant"),
    (["--mechanisms=output_gate", "--seeds=1,1"], "seeds=[1, 1] must be different numbers"),
    (["--variants={'x': {'output_gatee': 1}}"], "x: variant with {'output_gatee': 1}: unknown key output_gatee; did you mean output_gate?"),
    (["--mechanisms=output_gate", "--match=flops"], "match='flops' must be among"),
    (["--mechanisms=output_gate", "--tune_lr", "--tune_factors=2,4"], "have 1 among them"),
    (["--mechanisms=output_gate", "--settings={'dataset': 'nowhere'}"], "no dataset nowhere"),
    (["--mechanisms=output_gate", "--settings={'init_from': 'x', 'seed': 3}"], "settings: init_from, seed cannot be set here"),
    (["--mechanisms=output_gate", "--split=tset"], "split='tset' must be test or val"),
    (["--mechanisms=output_gate", "--split=val", "--tune_lr"], "since val chooses the learning rate"),
    (["--mechanisms=output_gate", "--scale=small"], "scale='small' means nothing beside base="),
    (["--mechanisms=output_gate", "--submit=slurm"], "submit=slurm: "),
    (["--mechanisms=output_gate", "--out_dir=/proc/none"], "/proc/none: "),
])
def test_what_is_wrong_with_a_study_is_one_line(plain, args, words, refusal):
    assert words in refusal(["--base", str(plain), "--device=cpu", *args])


@pytest.mark.parametrize("flags", [{}, *({"routing": "moh"}, {"acag": "elementwise", "output_gate": "elementwise"}), ALL_ON, MECHANISMS["a2c_published"]])
def test_head_statistics_are_one_row_a_layer(flags):
    model = GPT(GPTConfig(vocab_size=9, n_layer=3, n_head=4, n_embd=32, block_size=8, **flags)).eval()
    with torch.no_grad():
        seen = compare.heads_of(model, torch.randint(9, (2, 9)))
    assert {"entropy", "concentration"} <= set(seen) and json.dumps(seen)
    assert ("gate" in seen) == bool(model.config.sentinel) and ("routing_load" in seen) == bool(model.config.routing)
    for name, layers in seen.items():
        if isinstance(layers, list):
            assert len(layers) == (3 if name != "router_gates" else 1), name
    assert all(len(row) == 4 + block.attn.n_extra for row, block in zip(seen["entropy"], model.transformer.h))
