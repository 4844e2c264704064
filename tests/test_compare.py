"""A study: baselines that match, runs never repeated, failures that sink nothing, numbers that add up."""

import ast
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
import configurator
from common import UserError
from compare import Study, main
from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from study import queue, report, stats, trial
from study.arms import ArmBuilder, StudyConfig, size_of, step_time_ratio, variants_of

ROOT = Path(__file__).resolve().parents[1]
STUDIES = sorted(p.name for p in (ROOT / "config" / "studies").glob("*.py"))
SMALL = """
n_layer = 1
n_head = 2
n_embd = 16
block_size = 16
batch_size = 4
max_iters = 6
eval_interval = 3
eval_tokens = 64
recipe = 'modern'
"""


@pytest.fixture
def plain(tmp_path, bytes_data, monkeypatch):
    """The config file of a plain GPT that trains in a moment, and an empty folder for runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plain.py"
    path.write_text(SMALL + f"dataset = {str(bytes_data)!r}\n")
    return path


def study_of(plain, **keys):
    return Study(StudyConfig(**{"base": str(plain), "device": "cpu",
                                "seeds": [1, 2], "match": [], "mechanisms": ["output_gate"], **keys}), "test")


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
    monkeypatch.setattr(queue.time, "sleep", lambda s: None)
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
    monkeypatch.setattr("study.arms.Dataset", Bytes)
    study = Study(StudyConfig(mechanisms=list(MECHANISMS), scale=scale), "test")
    study.add_baselines(list(study.baselines))
    plain = study.arms["plain"]
    for name, baselines in study.baselines.items():
        variant, wide, long = study.arms[name], study.arms[baselines["parameters"]], study.arms[
            baselines["FLOPs"]]
        assert baselines["hyperparameters"] == "plain"
        assert abs(wide.params - variant.params) <= 1e-3 * variant.params
        # counted, not solved for
        assert wide.params == GPT(wide.model).num_params() if scale == "tiny" else True
        # half a step
        assert abs(long.flops - variant.flops) <= 0.5 * plain.flops / plain.train.max_iters * 1.0001
        for baseline in (wide, long):  # nothing else differs from the plain GPT
            differ = {k for k, v in asdict(baseline.model).items() if v != asdict(plain.model)[k]}
            differ |= {k for k, v in asdict(baseline.train).items() if v != asdict(plain.train)[k]}
            assert differ <= {"n_inner"} or differ <= {"max_iters"}


def test_variants_whose_parameters_agree_share_a_baseline(monkeypatch):
    monkeypatch.setattr("study.arms.Dataset", Bytes)
    study = Study(StudyConfig(mechanisms=["routing_moh", "moh", "output_gate",
                                          "sentinel", "unet_concat", "output_gate_elementwise"]), "test")
    study.add_baselines(list(study.baselines))
    shared = {name: baselines["parameters"] for name, baselines in study.baselines.items()}
    assert shared["routing_moh"] == shared["moh"] == shared["output_gate"] != "plain"
    assert shared["sentinel"] == "plain"  # 32 parameters are less than 0.1 %
    assert shared["unet_concat"] == shared["output_gate_elementwise"]
    assert len(study.arms) == 7 + 2 + len({b["FLOPs"] for b in study.baselines.values()} - {"plain"})


def test_a_wider_mlp_is_the_only_difference_and_survives_a_checkpoint():
    sizes = [size_of(GPTConfig(vocab_size=65, n_layer=2, n_head=2, n_embd=16, block_size=8, n_inner=w))[0]
             for w in (None, 64, 65)]
    assert sizes[0] == sizes[1] and sizes[2] - sizes[1] == 2 * 2 * 16
    assert GPTConfig(n_inner=0).problems() == ["n_inner=0 must be at least 1"]


def test_what_cannot_be_matched_is_said(plain):
    study = study_of(plain, mechanisms=["a2c_published"], match=["parameters"], settings=dict(n_inner=1))
    with pytest.raises(UserError,
                       match=r"a2c_published has [\d,]+ parameters, fewer than a plain GPT without its MLPs"):
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
@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
def test_every_shipped_study_makes_its_arms(name, scale, monkeypatch):
    monkeypatch.setattr("study.arms.Dataset", Bytes)
    # 90 million numbers take their time; sizes have their own test
    monkeypatch.setattr("study.arms.size_of", lambda config: (1000, 1000))
    if scale != "tiny" and "\nbase = " in (ROOT / "config" / "studies" / name).read_text():
        scale = "tiny"  # its plain GPT is its own
    config, = configurator.load((StudyConfig,), [f"config/studies/{name}", f"--scale={scale}"])
    builder = ArmBuilder(config)
    arms = builder.variants()
    assert config.question and arms
    for arm in arms:
        assert not arm.model.problems() and arm.train.max_iters == builder.plain.train.max_iters
        assert arm.model.attn_dropout == builder.plain.model.attn_dropout  # on both sides or on none


def test_every_mechanism_and_rival_is_in_the_study_of_all():
    config, = configurator.load((StudyConfig,), ["config/studies/all.py"])
    assert variants_of(config) == {**MECHANISMS, "all_on": ALL_ON, **config.variants}


@pytest.mark.parametrize("mechanisms, names", [
    (["moh", "routing_*"], ["moh"] + [name for name in MECHANISMS if name.startswith("routing_")]),
    (["acag_*", "acag*"], [name for name in MECHANISMS if name.startswith("acag_")] + ["acag"]),
    (["all_on", "moh", "moh"], ["all_on", "moh"])])
def test_a_star_stands_for_every_mechanism_that_fits(mechanisms, names):
    assert list(variants_of(StudyConfig(mechanisms=mechanisms))) == names


@pytest.mark.parametrize("args, folder", [
    (["--mechanisms=unet_concat,unet_add"], "unet_concat+unet_add"),
    (["--mechanisms=a2c_*,agency"], "a2c-all+agency"),
    (["--mechanisms=*"], "all"),
    (["--variants={'two heads': {'n_head': 2}}"], "two_heads"),
    (["config/studies/routing.py"], "routing")])
def test_a_study_is_named_after_its_file_or_its_mechanisms(args, folder):
    config, = configurator.load((StudyConfig,), args)
    files = [arg for arg in args if not arg.startswith("--")]
    assert compare.name_of(config, files) == folder


def test_the_ablations_of_routing_say_which_form_they_take_apart():
    """The literal mode multiplies by 0 and gates in training only; these take the other one apart."""
    config, = configurator.load((StudyConfig,), ["config/studies/routing.py"])
    published = [flags for flags in config.variants.values() if flags["routing"] == "published"]
    assert len(published) == 2
    for flags in published:
        assert flags["routing_mask"] == "inf" and flags["routing_eval_gate"] is True


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
    assert changed.results()["plain", 1] == first["plain",
                                                  1] and changed.results()["output_gate",
                                                                           1] != first["output_gate", 1]


def test_a_trial_is_the_training_and_the_scoring_of_the_command_that_is_shown_for_it(plain,
                                                                                     here, monkeypatch):
    import evaluate
    import train
    study = study_of(plain, seeds=[3])
    study.run(here)
    summary = study.summary("test")
    command = summary["arms"]["output_gate"]["commands"][0].split()
    train.main(command[2:])
    (again,) = [evaluate.evaluate(Path("out/output_gate"), "test", 0, "cpu")]
    # kept in float32
    assert command[1] == "train.py" and again["bpb"] == pytest.approx(
        summary["arms"]["output_gate"]["bpb"][0], abs=1e-7)
    nats = np.load(study.trials()["output_gate", 3] / "nats.npy")
    assert nats.sum() == pytest.approx(study.results()["output_gate",
                                                       3]["nats"]) and len(nats) == -(-1000 // 16)


def test_a_slice_is_scored_window_by_window_and_its_bytes_are_its_own(plain, here, bytes_data):
    study = study_of(plain, seeds=[3], test_tokens=160, mechanisms=["agency"])
    study.run(here)
    found = study.results()["plain", 3]
    assert found["tokens"] == found["bytes"] == 160 and np.load(study.trials()["plain",
                                                                               3] / "nats.npy").shape == (10,)


def test_nothing_in_the_study_folder_imports_what_uses_it():
    """Down alone: findings, page, report; trial, queue; no program but those that a run is made of."""
    for path in sorted((ROOT / "study").glob("*.py")):
        imported = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom):
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        assert "compare" not in imported, path.name
        allowed = {"queue": {"trial"}, "trial": {"fingerprint"}, "page": {"findings"},
                   "report": {"page", "findings"}}.get(path.stem, set())
        assert {name.split(".")[1] for name in imported if name.startswith("study.")} & {
            p.stem for p in (ROOT / "study").glob("*.py")} == allowed, path.name


def test_a_run_that_crashes_is_reported_and_sinks_nothing(plain, here):
    study = study_of(plain,
                     variants={"hot": dict(lr=1e9, muon_lr=1e9,
                                           min_lr=1e9, recipe="gpt2", optimizer="adamw", grad_clip=0.0)})
    study.run(here)
    summary = study.summary("test")
    assert {f["arm"] for f in summary["failures"]} == {"hot"} and all("stopped before the update" in f["why"]
                                                                      for f in summary["failures"])
    words = {row["variant"]: row["words"] for row in summary["comparisons"]}
    assert "no verdict" in words["hot"] and summary["done"] == 4 and summary["planned"] == 6
    assert all(x is not None for x in summary["arms"]["output_gate"]["bpb"])
    again = study_of(plain, variants=study.config.variants, report_only=True)
    again.run(here)
    assert len(again.summary("test")["failures"]) == 2  # told again, without running anything


def test_a_study_is_cut_short_and_goes_on_to_the_same_numbers(plain):
    """The real thing: processes, a signal while two runs train (as Ctrl-C is one), the same command again."""
    (Path.cwd() / "study.py").write_text(
        f"base = {str(plain)!r}\nmechanisms = ['output_gate']\nseeds = [1]\nmatch = []\n"
        "jobs = 2\ndevice = 'cpu'\n"
                                         "settings = dict(max_iters=160, eval_interval=10)\n")
    command = [sys.executable, str(ROOT / "compare.py"), "study.py"]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1"})
    until = time.monotonic() + 60

    def logs():
        return [p for p in Path("out/trials").glob("*/log.jsonl") if p.read_text().count("val_bpb") > 1]

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
    study.run(queue.Cluster("local", 2, {"timeout_min": 5}))
    assert study.summary("test")["comparisons"][0]["differences"] == [0.0]
    # the same runs as without it
    assert study.spec(study.arms["plain"], 1) == study_of(plain).spec(study.arms["plain"], 1)


def test_a_failure_on_the_cluster_is_said(plain):
    pytest.importorskip("submitit", reason="submitit is not installed: pip install submitit")
    place, folder = queue.Cluster("local", 1, {"timeout_min": 5}), Path("out/trials/broken")
    folder.mkdir(parents=True)
    (folder / "trial.json").write_text(json.dumps({"model": {},
                                                   "train": {"dataset": "nowhere"}, "score": {}}))
    assert "no dataset nowhere" in queue.run_all([folder], place)[folder]
    assert "no dataset nowhere" in trial.failure(folder)


def test_two_studies_that_want_the_same_run_train_it_once(plain):
    study = study_of(plain, seeds=[1], settings=dict(max_iters=30))
    folder = study.trials()["plain", 1]
    pair = [subprocess.Popen(queue.command_of(folder)) for _ in range(2)]
    assert [job.wait(timeout=120) for job in pair] == [0, 0]
    said = (folder / "trial.log").read_text()
    assert said.count("starting anew") == 1 and "going on" not in said


def test_a_run_does_not_begin_with_other_code_or_data_than_was_planned(plain):
    study = study_of(plain, seeds=[1])
    for part in ("code", "data"):
        folder = trial.make({**study.spec(study.arms["plain"], 1),
                             part: {"train": "x"} if part == "data" else "x"})
        assert queue.run_all([folder],
                             queue.Processes(1,
                                             "cpu"))[
            folder] == f"trial: the {part} changed after this run was planned; start the study again"


def test_a_best_checkpoint_alone_does_not_block_a_run(plain):
    study = study_of(plain, seeds=[1])
    folder = study.trials()["plain", 1]
    (folder / "best.pt").write_bytes(b"left behind by a full disk")
    assert queue.run_all([folder], queue.Processes(1, "cpu")) == {} and trial.done(folder)


def test_what_cannot_be_started_is_a_failure_and_no_end(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Full(Here):
        def start(self, folder):
            raise RuntimeError("no such\npartition")
    folders = [Path("a"), Path("b")]
    assert queue.run_all(folders, Full()) == dict.fromkeys(folders, "could not be started: no such partition")


def test_cores_and_gpus_are_shared_out(monkeypatch):
    monkeypatch.setattr(queue.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert (queue.Processes(0, "cpu").slots, queue.Processes(0, "cpu").threads) == (8, 1)
    assert (queue.Processes(3, "cpu").slots, queue.Processes(3, "cpu").threads) == (3, 2)
    monkeypatch.setattr(queue, "pick_device", lambda name: "cuda")
    monkeypatch.setattr(queue.torch.cuda, "device_count", lambda: 2)
    for visible, places in {"4,6": ["4", "6"], "7,": ["7"], "": ["0", "1"],
                            "GPU-abc,GPU-def": ["GPU-abc", "GPU-def"]}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert queue.Processes(0, "auto").free_gpus == places
    assert queue.Processes(3, "auto").free_gpus == ["GPU-abc", "GPU-def", "GPU-abc"]


def test_a_killed_run_is_named(tmp_path):
    place = queue.Processes(1, "cpu")
    job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    job.gpu = place.free_gpus.pop()
    job.kill()
    job.wait()
    assert place.ended(job, tmp_path) == "killed by SIGKILL: out of memory?" and place.free_gpus == [None]


# ---- learning rates ----

def test_both_sides_get_the_rate_that_validates_best(plain, here, monkeypatch):
    study = study_of(plain, tune_lr=True, tune_factors=[0.01, 1.0, 30.0])
    study.run(here)
    short = [f for f in here.started if json.loads((f / "trial.json").read_text())["score"]["split"] == "val"]
    assert len(short) == 6 and {json.loads((f / "trial.json").read_text())["model"]["seed"]
                                for f in short} == {1000002}
    for arm in study.arms.values():
        tried = study.tune([arm], here)
        best = min(tried, key=lambda key: trial.result(tried[key])["bpb"])
        assert arm.lr_factor == best[1] and arm.edge == (best[1] != 1.0)
        used = json.loads((study.trials()[arm.name, 1] / "trial.json").read_text())["train"]
        assert used["muon_lr"] == pytest.approx(arm.train.muon_lr * arm.lr_factor)


# ---- what it says ----

def test_results_hold_what_the_statistics_need(plain, here):
    """From the scores of each seed alone: the same differences, intervals and corrected p."""
    study = study_of(plain, seeds=[5, 6, 7], mechanisms=["output_gate", "unet_concat"],
                     settings=dict(n_layer=2))
    study.run(here)
    summary = json.loads(json.dumps(study.summary("python compare.py test")))
    assert summary["command"] and summary["commit"] and summary["versions"]["torch"] == torch.__version__
    assert summary["plain"]["n_layer"] == 2 and summary["plain"]["base"] == str(plain)
    assert not {"seed", "out_dir", "device"} & set(summary["plain"])
    paired = []
    for row in summary["comparisons"]:
        bpb = [summary["arms"][row[side]]["bpb"] for side in ("variant", "baseline")]
        assert row["differences"] == [a - b for a, b in zip(*bpb)]
        paired.append(stats.paired(row["differences"], 1 - summary["alpha"]))
        assert [row["mean"], row["low"], row["high"], row["p"]] == [paired[-1].mean,
                                                                    paired[-1].low, paired[-1].high,
                                                                    paired[-1].p]
    assert [row["p_holm"]
            for row in summary["comparisons"]] == stats.holm([each.p for each in paired]).tolist()


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_results_give_their_report_again_and_are_small(path, tmp_path, capsys):
    main([f"--from_results={path}", f"--out_dir={tmp_path}"])
    study = report.read(path)
    assert study["name"] in capsys.readouterr().out and path.stat().st_size < 300_000
    assert {p.name for p in tmp_path.iterdir()} == {"report.md", "report.html", "forest.svg", "forest.png"}
    for row in study["comparisons"]:
        variant, baseline = (study["arms"][row[side]]["bpb"] for side in ("variant", "baseline"))
        again = stats.paired([a - b for a, b in zip(variant, baseline)], 1 - study["alpha"])
        assert [row["mean"], row["low"], row["high"]] == pytest.approx([again.mean, again.low, again.high])
    assert study["command"].startswith("python compare.py ") and study["done"] == study["planned"]


def test_differences_pair_the_seeds(plain, here):
    study = study_of(plain, seeds=[5, 6, 7])
    study.run(here)
    summary, found = study.summary("test"), study.results()
    row, = summary["comparisons"]
    assert row["differences"] == [found["output_gate", s]["bpb"] - found["plain", s]["bpb"]
                                  for s in (5, 6, 7)]
    assert row["mean"] == pytest.approx(np.mean(row["differences"])) and row[
        "low"] <= row["mean"] <= row["high"]
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
    study = study_of(plain, mechanisms=["output_gate", "unet_concat", "constraint_a"],
                     settings=dict(n_layer=2, n_embd=32), match=["parameters", "FLOPs"], matched=1)
    study.run(here)
    found = study.results()
    means = {name: np.mean(study.differences(name, "plain", found)) for name in study.baselines}
    best = min(means, key=means.get)
    assert set(study.baselines[best]) == {"hyperparameters", "parameters", "FLOPs"}
    summary = study.summary("test")
    assert set(summary["missing"]) == set(means) - {best} and "best 1 of 3" in study.selection
    every = study_of(plain, mechanisms=["output_gate", "unet_concat", "constraint_a"],
                     settings=dict(n_layer=2, n_embd=32), match=["parameters", "FLOPs"])
    # to choose the best by the scores that are judged is to have looked at all of these
    every.add_baselines(list(every.baselines))
    assert summary["comparisons_made"] == sum(len(set(own.values()))
                                              for own in every.baselines.values()) > len(
        summary["comparisons"])


def test_a_plan_runs_nothing(plain, capsys):
    main(["--base", str(plain), "--mechanisms=output_gate", "--dry_run", "--device=cpu"])
    said = capsys.readouterr().out
    assert "plain, MLP 65" in said and "15 runs, 15 of them to do" in said
    assert not Path("out").exists()


@pytest.mark.parametrize("args, words", [
    (["--mechanisms=output_gat"], "unknown 'output_gat'; did you mean output_gate?"),
    (["--mechanisms=output_gate", "--scale=huge"], "scale='huge' is not tiny, nano, mid, small or paper"),
    ([], "name at least one variant"),
    (["--mechanisms=output_gate", "--seeds=1,1"], "seeds=[1, 1] must be different numbers"),
    (["--variants={'x': {'output_gatee': 1}}"],
     "x: variant with {'output_gatee': 1}: unknown key output_gatee; did you mean output_gate?"),
    (["--mechanisms=output_gate", "--match=flops"], "match='flops' must be among"),
    (["--mechanisms=output_gate", "--tune_lr", "--tune_factors=2,4"], "have 1 among them"),
    (["--mechanisms=output_gate", "--settings={'dataset': 'nowhere'}"], "no dataset nowhere"),
    (["--mechanisms=output_gate", "--settings={'init_from': 'x', 'seed': 3}"],
     "settings: init_from, seed cannot be set here"),
    (["--mechanisms=output_gate", "--split=tset"], "split='tset' must be test or val"),
    (["--mechanisms=output_gate", "--split=val", "--tune_lr"], "since val chooses the learning rate"),
    (["--mechanisms=output_gate", "--scale=small"], "scale='small' means nothing beside base="),
    (["--mechanisms=output_gate", "--submit=slurm"], "submit=slurm: "),
    (["--mechanisms=output_gate", "--out_dir=/proc/none"], "/proc/none: "),
])
def test_what_is_wrong_with_a_study_is_one_line(plain, args, words, refusal):
    assert words in refusal(["--base", str(plain), "--device=cpu", *args])


@pytest.mark.parametrize("flags",
                         [{}, *({"routing": "moh"}, {"acag": "elementwise", "output_gate": "elementwise"}),
                          ALL_ON, MECHANISMS["a2c_published"]])
def test_head_statistics_are_one_row_a_layer(flags):
    model = GPT(GPTConfig(vocab_size=9, n_layer=3, n_head=4, n_embd=32, block_size=8, **flags)).eval()
    with torch.no_grad():
        seen = compare.heads_of(model, torch.randint(9, (2, 9)))
    assert {"entropy", "concentration"} <= set(seen) and json.dumps(seen)
    assert ("gate" in seen) == bool(model.config.sentinel) and (
        "routing_load" in seen) == bool(model.config.routing)
    for name, layers in seen.items():
        if isinstance(layers, list):
            assert len(layers) == (3 if name != "router_gates" else 1), name
    assert all(len(row) == 4 + block.attn.n_extra for row, block in zip(seen["entropy"], model.transformer.h))
