"""What a study trains, without any training: outcomes are made up and handed to plan()."""

import json
import math
import random
import shutil
from dataclasses import replace

import pytest
from helpers import ROOT, forget_own_mechanisms, save_model, without_own_mechanisms, write_dataset

from model import GPT, GPTConfig
from nanoheads import configurator, own_mechanism
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.dataset import Dataset
from study.config import StudyConfig, variants_of
from study.digest import digest_of_code
from study.plan import Planner, have_ended
from study.records import PLAIN, Failure, Pair, Result

STUDIES = sorted((ROOT / "config" / "studies").glob("*.py"))
# a plain GPT that is counted in no time, on the text of a test
SMALL = dict(n_layer=2, n_head=4, n_embd=16, block_size=16, batch_size=4, max_iters=60, eval_interval=30,
             eval_tokens=512)
SMALL_GPT = dict(vocab_size=256, n_layer=2, n_head=4, n_embd=16, block_size=16)
SMALL_TASK = {key: value for key, value in SMALL.items() if key != "eval_tokens"} | dict(block_size=48)
SUMS = b"".join(b"%d plus %d is %d.\n" % (i % 13, i % 7, i % 13 + i % 7) for i in range(2000))
SPLITS = dict(train=SUMS[:20000], val=SUMS[20000:22000], test=SUMS[22000:23000])
GATES = ["xsa", "output_gate", "query_gain", "value_residual", "short_conv", "sink"]


@pytest.fixture(autouse=True)
def texts(tmp_path):
    """The folder to work in: its datasets, which are those of config/studies, are a few sums."""
    for name in ("wikitext2_byte", "enwiki15", "pystdlib"):
        write_dataset(tmp_path / name, SPLITS)
    return tmp_path


def study(**keys):
    """A StudyConfig of small models."""
    small = SMALL_TASK if "task" in keys else SMALL
    return StudyConfig(**{**keys, "settings": {**small, **keys.get("settings", {})}, "device": "cpu"})


def finished(planner, outcome):
    """(the last Plan of a study, all outcomes), where each run ends as outcome(run) says: a score or why not.
    """
    outcomes = {}
    while not have_ended((plan := planner.plan(outcomes)).runs, outcomes):
        for run in plan.runs:
            if run.name not in outcomes:
                found = outcome(run)
                outcomes[run.name] = Failure(found) if isinstance(found, str) else Result(found)
    return plan, outcomes


def by_name(means, spread=0.001, usual=2.0):
    """An outcome() by the first part of a variant's name, and a little by its seed."""
    def outcome(run):
        name = run.variant if run.variant.startswith("plain, MLP") else run.variant.split(",")[0]
        noise = random.Random(f"{name} {run.text} {run.seed}").uniform(-spread, spread)
        return means.get(name, usual) + noise
    return outcome


def runs_of(plan, stage, variant=None, text=None):
    return [run for run in plan.runs if run.stage == stage and variant in (None, run.variant)
            and text in (None, run.text)]


# ---- what is judged ----

def test_variants_are_judged_with_their_seeds_and_the_plain_gpt_with_more():
    planner = Planner(study(mechanisms=GATES[:4], seeds=[1, 2, 3], budgets=[0.5, 2]))
    plan = planner.plan({})
    assert [run.seed for run in runs_of(plan, "judge", "xsa")] == [1, 2, 3]
    assert [run.seed for run in runs_of(plan, "judge", PLAIN)] == [1, 2, 3, 4, 5, 6]  # sqrt(4) times as many
    assert plan.pairs == tuple(Pair(name, PLAIN, ("wikitext2_byte",)) for name in GATES[:4])
    assert [run.spec["train"]["max_iters"] for run in runs_of(plan, "judge", "plain x 0.5")] == [30] * 3
    assert plan.models["plain x 2"].tokens == 2 * plan.models[PLAIN].tokens
    choosing = Planner(study(mechanisms=["xsa"], seeds=[1, 2], screen_seeds=[3], plain_seeds=4)).plan({})
    assert [run.seed for run in runs_of(choosing, "judge", PLAIN)] == [1, 2, 4, 5]  # not a seed that chooses
    # what is stopped has all variants of the seeds that it has
    assert [run.seed for run in plan.runs] == sorted(run.seed for run in plan.runs)


def test_screening_chooses_the_best_the_worst_and_those_that_are_named():
    config = study(mechanisms=GATES, screen=True, best=1, worst=1, always=["sink"], seeds=[1, 2],
                   contrasts=[["short_conv", "sink"]])
    planner = Planner(config)
    first = planner.plan({})
    assert {run.stage for run in first.runs} == {"screen"} and first.pairs == ()
    assert {run.spec["score"]["split"] for run in first.runs} == {"val"}
    assert {run.seed for run in first.runs} == {101, 102}
    assert {*first.models} == {PLAIN, *GATES, "plain x 0.7", "plain x 1.4", "plain x 2"}
    plan, _ = finished(planner, by_name(dict(xsa=1.9, output_gate=2.1, short_conv=1.0, sink=1.0)))
    assert {pair.variant for pair in plan.pairs if not pair.equal} == {"xsa", "output_gate", "short_conv",
                                                                       "sink"}
    assert {run.spec["score"]["split"] for run in runs_of(plan, "judge")} == {"test"}
    assert not {run.seed for run in runs_of(plan, "judge")} & {101, 102}
    # nothing is screened where nothing could be left out
    plan = Planner(replace(config, best=3, worst=3)).plan({})
    assert {run.stage for run in plan.runs} == {"judge"}


def test_a_contrast_is_a_pair_of_its_own_and_a_variants_seed_is_added_to_each_seed():
    """A contrast with the plain GPT is there already."""
    plan = Planner(study(mechanisms=["xsa"], variants={"again": dict(seed=1000)}, seeds=[1, 2],
                         contrasts=[["xsa", "again"], ["xsa", PLAIN]])).plan({})
    assert [(pair.variant, pair.baseline) for pair in plan.pairs] == [
        ("xsa", PLAIN), ("again", PLAIN), ("xsa", "again")]
    plain, again = (runs_of(plan, "judge", name)[0].spec for name in (PLAIN, "again"))
    assert again["model"]["seed"] == 1001 and plain["model"]["seed"] == 1
    assert {**again, "model": {**again["model"], "seed": 1}} == plain


# ---- equal parameters ----

def wider(plan):
    """The pairs of a Plan with a plain GPT that is wider."""
    return [pair for pair in plan.pairs if pair.equal]


def test_what_seems_better_meets_a_plain_gpt_of_as_many_parameters():
    """Not what adds none, nor what has fewer than any plain GPT, which a note says."""
    config = study(mechanisms=["output_gate", "short_conv", "xsa"], variants={"slim": dict(n_embd=8)},
                   seeds=[1, 2, 3])
    better = by_name(dict(output_gate=1.9, short_conv=2.1, xsa=1.9, slim=1.0))
    plan, _ = finished(Planner(config), better)
    (pair,) = wider(plan)
    assert (pair.variant, pair.equal, pair.texts) == ("output_gate", "parameters", ("wikitext2_byte",))
    wide, own = plan.models[pair.baseline], plan.models["output_gate"]
    assert wide.kind == "wider" and abs(wide.params - own.params) <= 1e-3 * own.params
    assert [run.seed for run in runs_of(plan, "judge", wide.name)] == [1, 2, 3]
    assert len(plan.notes) == 1 and plan.notes[0].startswith("slim has fewer parameters than any plain GPT")
    assert wider(finished(Planner(replace(config, match_parameters=False)), better)[0]) == []


# ---- several texts ----

def test_of_two_texts_the_first_chooses_and_both_judge():
    """What seems better on one of them alone meets the wider plain GPT on both."""
    config = study(mechanisms=GATES, texts=["wikitext2_byte", "enwiki15"], screen=True, tune_lr=True, best=1,
                   worst=0, seeds=[1, 2, 3], match_parameters=False)
    plan, _ = finished(Planner(config), by_rates(dict(xsa=4.0), dict(xsa=-1.0)))
    assert {run.text for run in (*runs_of(plan, "screen"), *runs_of(plan, "tune"))} == {"wikitext2_byte"}
    assert plan.pairs == (Pair("xsa", PLAIN, ("wikitext2_byte", "enwiki15")),)
    rates = [run.spec["train"]["adamw_lr"] for run in runs_of(plan, "judge", "xsa")]
    assert rates == [4 * 0.016] * 6
    assert len(runs_of(plan, "judge", "xsa", "enwiki15")) == len(runs_of(plan, "judge", "xsa")) // 2
    config = study(mechanisms=["output_gate"], texts=["wikitext2_byte", "enwiki15"], seeds=[1, 2, 3, 4])
    outcome, gains = by_name({}), {"wikitext2_byte": -0.1, "enwiki15": 0.2}
    plan, _ = finished(Planner(config), lambda run: outcome(run) + gains[run.text] * (
        run.variant == "output_gate"))
    (pair,) = wider(plan)
    assert pair.texts == ("wikitext2_byte", "enwiki15")
    assert len({run.text for run in runs_of(plan, "judge", pair.baseline)}) == 2


# ---- learning rates ----

def by_rates(factors, means=None, spread=0.001, curve=0.5):
    """An outcome() that is best where AdamW's rate is a factor, by variant, of that of the tiny scale."""
    usual = by_name(means or {}, spread)

    def outcome(run):
        factor = run.spec["train"]["adamw_lr"] / 0.016
        best = factors.get(run.variant.split(",")[0], 1.0)
        return usual(run) + curve * math.log2(factor / best) ** 2
    return outcome


def rates_judged(plan, name):
    """AdamW's rates with which a variant is judged."""
    return {run.spec["train"]["adamw_lr"] for run in runs_of(plan, "judge", name)}


def factors_tried(plan, name):
    return {run.spec["train"]["adamw_lr"] / 0.016 for run in runs_of(plan, "tune")
            if run.variant.startswith(f"{name},")}


def test_the_search_goes_on_where_the_best_is_the_last_one_tried():
    planner = Planner(study(mechanisms=["xsa", "short_conv"], tune_lr=True, seeds=[1, 2, 3], budgets=[2]))
    assert {run.seed for run in planner.plan({}).runs} == {101}
    plan, _ = finished(planner, by_rates({"xsa": 4.0, "short_conv": 0.5}))
    assert factors_tried(plan, "xsa") == {0.5, 1, 2, 4, 8}
    assert factors_tried(plan, "short_conv") == {0.25, 0.5, 1, 2}
    assert factors_tried(plan, PLAIN) == {0.25, 0.5, 1, 2, 4, 8}  # all that was tried for a variant
    for name, rate in ((PLAIN, 0.016), ("xsa", 0.064), ("short_conv", 0.008), ("plain x 2", 0.016)):
        assert rates_judged(plan, name) == {rate}
    assert plan.rates["xsa"] == dict(adamw_lr=0.064) and plan.rates[PLAIN] == {}
    # what follows AdamW's rate where nothing is set stays as it was
    assert {run.spec["train"]["embed_lr"] for run in runs_of(plan, "judge", "xsa")} == {0.02}


def test_the_rates_stay_unless_others_are_better_by_a_standard_error():
    config = study(mechanisms=["xsa"], tune_lr=True, seeds=[1, 2])

    def outcome(gain):
        def at(run):  # a spread of 0.02 over the two seeds, and a gain at twice AdamW's rate
            moved = run.spec["train"]["adamw_lr"] == 0.032
            return 2.0 + 0.01 * (-1) ** run.seed - gain * moved
        return at
    for gain, rate in ((0.005, 0.016), (0.05, 0.032)):
        plan, _ = finished(Planner(config), outcome(gain))
        assert rates_judged(plan, PLAIN) == rates_judged(plan, "xsa") == {rate}


def test_the_plain_gpts_own_rates_are_its_budgets_and_its_wider_ones():
    config = study(mechanisms=["output_gate"], tune_lr=True, seeds=[1, 2, 3], budgets=[2])
    plan, _ = finished(Planner(config), by_rates({PLAIN: 2.0, "plain x 2": 2.0}, {"output_gate": 1.5}))
    (pair,) = wider(plan)
    assert all(rates_judged(plan, name) == {0.032} for name in (PLAIN, "plain x 2", pair.baseline))
    assert plan.rates[PLAIN]["adamw_lr"] == 0.032
    # of a variant that stayed where it was the flags say that the plain GPT did not
    assert plan.models["output_gate"].flags["adamw_lr"] == 0.016 and plan.models[PLAIN].flags == {}


def test_rates_at_which_a_run_failed_are_not_taken():
    config, good = study(mechanisms=["xsa"], tune_lr=True, seeds=[1, 2]), by_rates({"xsa": 4.0, PLAIN: 4.0})

    def outcome(run):
        diverged = run.spec["train"]["adamw_lr"] > 0.03 and run.seed == 102
        return "its loss is nan" if diverged else good(run)
    plan, outcomes = finished(Planner(config), outcome)
    assert any(isinstance(each, Failure) for each in outcomes.values())
    assert rates_judged(plan, "xsa") == {0.016}


# ---- tasks ----

def test_each_task_is_judged_by_itself_and_training_longer_is_a_variant():
    planner = Planner(study(task=["copy", "recall"], mechanisms=["output_gate", "xsa"]))
    plan, _ = finished(planner, by_name({"output_gate": 0.9}, usual=0.2))
    assert planner.measure == "right answers" and planner.texts == ("recall", "copy")
    assert [pair.texts for pair in plan.pairs if pair.variant == "xsa"] == [("recall",), ("copy",)]
    assert {pair.variant for pair in plan.pairs} == {"output_gate", "xsa", "plain x 2"}
    assert {run.spec["score"]["rows"] for run in plan.runs} == {256}
    of_plain = runs_of(plan, "judge", PLAIN, "copy")
    assert [pair.texts for pair in wider(plan)] == [("recall",), ("copy",)]
    assert len(runs_of(plan, "judge", wider(plan)[1].baseline, "copy")) == len(of_plain)
    # the smallest p of a permutation test, times the comparisons, leaves a verdict possible
    assert 6 / math.comb(len(of_plain) + 5, 5) <= 0.05 / 2


def test_rates_of_a_task_come_from_a_small_grid_with_all_seeds():
    planner = Planner(study(task=["recall", "copy"], mechanisms=["xsa"], tune_lr=True))
    grid = planner.plan({})
    assert len({run.name for run in grid.runs}) == len(grid.runs) == 2 * 2 * 9 * 2
    assert {run.seed for run in grid.runs} == {101, 102}

    def outcome(run):
        muon = run.spec["train"].get("muon_lr", 0.02) / 0.01
        if run.text == "copy" and run.variant.startswith("xsa"):
            lucky = run.seed == 101 and muon == 0.5  # the best of one seed, not of two
            return 1.0 if lucky else 0.9 if muon == 2 else 0.3
        return 0.3
    plan, _ = finished(planner, outcome)
    judged = {(run.variant, run.text): run.spec["train"].get("muon_lr", 0.02)
              for run in runs_of(plan, "judge")}
    assert judged["xsa", "copy"] == 0.02 and judged["xsa", "recall"] == judged[PLAIN, "copy"] == 0.01
    assert plan.rates["xsa on copy"] == dict(muon_lr=0.02) and plan.rates["xsa on recall"] == {}


# ---- a function of its outcomes ----

@pytest.mark.slow
@pytest.mark.parametrize("keys", [
    dict(mechanisms=GATES[:4], screen=True, best=1, worst=1, tune_lr=True, seeds=[1, 2, 3], budgets=[2.0],
         texts=["wikitext2_byte", "enwiki15"]),
    dict(task=["recall"], mechanisms=["output_gate", "xsa"], tune_lr=True, seeds=[1, 2, 3])])
def test_the_same_outcomes_give_the_same_plan_in_whatever_order_they_come(keys):
    outcome = by_rates({"output_gate": 2.0}, {"output_gate": 1.8, "xsa": 2.2}, spread=0.01)

    def or_failed(run):
        return "killed" if int(run.name, 16) % 29 == 0 else outcome(run)
    whole, outcomes = finished(Planner(study(**keys)), or_failed)
    known, rng = [run.name for run in whole.runs], random.Random(1)
    planner = Planner(study(**keys))
    for _ in range(2):
        some = {name: outcomes[name] for name in rng.sample(known, rng.randrange(len(known)))}
        plan = planner.plan(some)
        assert {run.name for run in plan.runs} <= {*known}
        assert planner.plan(some) == plan and Planner(study(**keys)).plan(some).runs == plan.runs
        while not have_ended(plan.runs, some):
            missing = [run.name for run in plan.runs if run.name not in some]
            some.update((name, outcomes[name]) for name in rng.sample(missing, 1 + len(missing) // 2))
            plan = planner.plan(some)
        assert (plan.runs, plan.pairs, plan.rates) == (whole.runs, whole.pairs, whole.rates)


@pytest.mark.slow
def test_what_is_foreseen_is_what_follows_if_no_score_differs():
    """Where some are done, those that are missing do not seem better than these."""
    planner = Planner(study(mechanisms=GATES[:4], screen=True, best=1, worst=1, tune_lr=True, seeds=[1, 2]))
    before = planner.foresee({})
    after, _ = finished(planner, lambda run: 2.0)
    assert before.runs == after.runs and len(before.pairs) == 2
    planner = Planner(study(mechanisms=GATES[:4], seeds=[1, 2, 3], plain_seeds=4))
    done = {run.name: Result(2.0 + 0.01 * run.seed) for run in planner.plan({}).runs if run.variant == PLAIN}
    assert not any("plain, MLP" in run.variant for run in planner.foresee(done).runs)


# ---- specs ----

@pytest.mark.slow
def test_a_run_follows_from_its_spec_alone():
    """Also where nothing acts between its steps but the number of heads that it begins with."""
    config = study(mechanisms=["*"], seeds=[7], variants={"policy": dict(agency=True, policy=True),
                                                          "two": dict(grow_from=2)})
    planner = Planner(replace(config, match_parameters=False))
    plan = planner.plan({})
    for run in runs_of(plan, "judge"):
        spec, model = json.loads(json.dumps(run.spec)), plan.models[run.variant]
        assert GPTConfig(**spec["model"]) == replace(model.config, seed=spec["model"]["seed"])
        again = TrainConfig(**spec["train"], device=spec["device"])
        assert replace(again, out_dir=None) == replace(model.training, device="cpu", out_dir=None)
        backwards = replace(run, spec={key: run.spec[key] for key in [*run.spec][::-1]})
        assert backwards.name == run.name and replace(run, spec={**run.spec, "device": "x"}).name != run.name
    assert len({run.name for run in plan.runs}) == len(plan.runs)


def test_the_mechanism_file_of_a_teacher_goes_with_its_students(mine):
    names = dict(constraint_names=["digit"])
    own_mechanism.add(mine())
    teacher = GPT(GPTConfig(**SMALL_GPT, **names, forget=True))
    record = own_mechanism.record(teacher.config)
    save_model("teacher.pt", teacher, Dataset("wikitext2_byte"), own_mechanism=record)
    config = study(variants={"taught": dict(**names, teacher="teacher.pt", constraint_match="kl")},
                   mechanisms=["xsa"], seeds=[1], budgets=[])
    plan = Planner(config).plan({})
    taught, other = (runs_of(plan, "judge", name)[0].spec for name in ("taught", "xsa"))
    assert taught["train"]["own_mechanism"] == str(mine()) and "mechanism mine.py" in taught["own"]
    assert "own_mechanism" not in other["train"] and not other["own"]
    forget_own_mechanisms()
    with pytest.raises(UserError, match="teacher.pt was made with the mechanism in mine.py, whose code runs"):
        Planner(config).plan({})


def test_other_data_is_another_run_and_damaged_data_is_refused(texts):
    config = study(mechanisms=["xsa"], seeds=[1])
    before = {run.name for run in Planner(config).plan({}).runs}
    shutil.rmtree(texts / "wikitext2_byte")
    write_dataset(texts / "wikitext2_byte", {**SPLITS, "test": SUMS[:900]})
    assert not before & {run.name for run in Planner(config).plan({}).runs}
    # a study reads its text whole, also where the note of a check is right in everything else
    path = texts / "wikitext2_byte/train.bin"
    path.write_bytes(b" " * 20000)
    now, expected = path.stat(), Dataset(path.parent).splits["train"]["sha256"]
    path.with_name("train.bin.checked").write_text(json.dumps(
        [now.st_size, now.st_mtime_ns, now.st_ctime_ns, expected]))
    Dataset(path.parent).tokens("train")  # a run relies on it
    with pytest.raises(UserError, match=r"train\.bin is not the file that meta.json describes"):
        Planner(config).plan({})


# ---- sources ----

SOURCES = {
    "train.py": "from nanoheads import a\nfrom_lab('x', 1)\nimport_module(\"lab.b\")\n",
    "nanoheads/__init__.py": "", "lab/__init__.py": "",
    "nanoheads/a.py": '"""Words."""\nfrom nanoheads.mechanism import flag\n\n\nclass A:\n    """More."""\n'
                      '    x: int = flag(1, "what it is", section="keys")\n\n    def f(self):\n'
                      '        """Of f."""\n        return 3  # three\n',
    "nanoheads/mechanism.py": "flag = None\n", "lab/b.py": "B = 1\n", "lab/unread.py": "C = 1\n"}


@pytest.mark.parametrize("file, old, new, same", [
    ("nanoheads/a.py", "# three", "# four", True),
    ("nanoheads/a.py", "what it is", "what it was", True),
    ("lab/unread.py", "1", "2", True),
    ("nanoheads/a.py", "return 3", "return 4", False),
    ("lab/b.py", "1", "2", False)])
def test_a_comment_changes_no_digest_and_a_constant_does(tmp_path, file, old, new, same):
    for root in ("before", "after"):
        for name, text in SOURCES.items():
            path = tmp_path / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(old, new, 1) if (root, name) == ("after", file) else text)
    assert (digest_of_code(tmp_path / "before") == digest_of_code(tmp_path / "after")) == same


# ---- the studies on file ----

@pytest.mark.slow
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_on_file_is_planned(texts, path):
    """Also without the labels and the teacher that one of them reads."""
    (texts / "tests").symlink_to(ROOT / "tests")
    with without_own_mechanisms():
        command = configurator.parse_command((StudyConfig,), [str(path), "--device=cpu"])
        (c,), _ = configurator.build_configs(own_mechanism.add_from_command(command))
        plan = Planner(c, needs_files=False).foresee({})
        judged = {pair.variant for pair in plan.pairs}
        assert judged <= {*variants_of(c)} | {f"plain x {each:g}" for each in c.budgets}
        assert len(judged) >= (len(variants_of(c)) if not c.screen else c.best + len(c.always))
        assert all(model.params > 0 for model in plan.models.values())


def test_defaults_follow_from_what_is_asked():
    text, challenge, tasks = (StudyConfig(**keys) for keys in (
        dict(mechanisms=["xsa"]), dict(mechanism="xsa"), dict(mechanisms=["xsa"], task=["copy"])))
    assert (text.seeds, text.budgets, text.margin) == ([1, 2, 3, 4, 5], [0.7, 1.4, 2], 0.01)
    assert not (text.screen or tasks.screen)
    assert (len(challenge.seeds), challenge.budgets, challenge.screen) == (15, [], True)
    assert (tasks.scale, tasks.budgets, tasks.margin) == ("task", [2.0], 0.05)
    assert replace(challenge) == challenge


def test_the_best_on_validation_has_the_lowest_score():
    config = study(mechanisms=["xsa", "sink", "short_conv"], screen=True, best=1, worst=0, seeds=[1, 2])
    plan, _ = finished(Planner(config), by_name(dict(xsa=2.1, sink=1.9, short_conv=2.0)))
    assert {pair.variant for pair in plan.pairs if not pair.equal} == {"sink"}


@pytest.mark.parametrize("keys", [{}, dict(task=["recall"])], ids=["text", "task"])
def test_rates_are_chosen_on_validation_alone(keys):
    plan = Planner(study(mechanisms=["xsa"], tune_lr=True, seeds=[1, 2], **keys)).plan({})
    assert {(run.stage, run.spec["score"]["split"]) for run in plan.runs} == {("tune", "val")}
