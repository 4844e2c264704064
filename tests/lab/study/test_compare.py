"""A study: two stages, seeds, baselines that match, results that anybody can compute again."""

import errno
import gzip
import html
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from scipy.stats import ttest_ind

import compare
from compare import Study, main, plan_of
from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from nanoheads import checkpoint, configurator, files, own_mechanism
from nanoheads.common import UserError
from nanoheads.dataset import missing
from lab.study import (costs, digest, effects, findings, own_files, pictures, records, report,
                       rescoring, results, tables, task_study, trial)
from lab.study.variants import SIZES, StudyConfig, VariantBuilder, size_of, times, variants_of

from helpers import ROOT, put_meta, unread, without_own_mechanisms, write_dataset
from lab_helpers import as_on_file, but, in_this_process, small_plain, some, study_of

STUDIES = sorted(p.name for p in (ROOT / "config" / "studies").glob("*.py") if not p.name.startswith("task"))
OF_TASKS = sorted(p.name for p in (ROOT / "config" / "studies").glob("task*.py"))

def started(here, study):
    """[(variant, split)] of the runs that a place started, by the flags of the study's specs."""
    names = {folder: (name, study.runs.specs[folder]["score"]["split"])
             for (_, name, _), folder in study.runs.folders.items()}
    return [names[folder] for folder in here.started]


# ---- variants ----

class Bytes:
    """A dataset that is not there, for plans."""
    vocab_size = 256

    def __init__(self, name):
        self.vocab_size = 6064 if "char" in str(name) else 256
        self.tokens = lambda split: range(10**6)
        self.splits = {s: dict(sha256=s, tokens=10**6, bytes=10**6) for s in ("train", "val", "test")}
        self.digests = dict.fromkeys(("train", "val", "test", "meta"), "0")


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_a_matched_baseline_has_the_parameters_of_its_variant_and_nothing_else_differs(scale, monkeypatch):
    monkeypatch.setattr("nanoheads.config.Dataset", Bytes)
    builder = VariantBuilder(StudyConfig(mechanisms=list(MECHANISMS), scale=scale))
    for variant in builder.variants():
        wide = builder.same_parameters(variant, [])
        per_unit = 2 * builder.plain.model.n_embd * builder.plain.model.n_layer
        assert abs(wide.params - variant.params) <= max(1e-3 * variant.params, per_unit / 2)
        # counted, not solved for
        assert scale != "tiny" or wide.params == GPT(wide.model).num_params()
        differ = {k for k, v in asdict(wide.model).items() if v != asdict(builder.plain.model)[k]}
        differ |= {k for k, v in asdict(wide.train).items() if v != asdict(builder.plain.train)[k]}
        assert differ <= {"n_inner"}


def test_variants_whose_parameters_agree_share_a_baseline(monkeypatch):
    monkeypatch.setattr("nanoheads.config.Dataset", Bytes)
    builder = VariantBuilder(StudyConfig(mechanisms=["routing_moh", "output_gate", "sentinel"]))
    first, same, few = builder.variants()
    wide = builder.same_parameters(first, [])
    assert builder.same_parameters(same, [wide]) is wide
    assert builder.same_parameters(few, [wide]) is builder.plain  # 8 parameters are less than 0.1 %


def test_a_wider_mlp_is_the_only_difference_and_survives_a_checkpoint():
    sizes = [size_of(GPTConfig(vocab_size=65, n_layer=2, n_head=2, n_embd=16, block_size=8, n_inner=w))[0]
             for w in (None, 64, 65)]
    assert sizes[0] == sizes[1] and sizes[2] - sizes[1] == 2 * 2 * 16


@pytest.mark.slow
def test_what_cannot_be_matched_is_said_and_keeps_its_verdict(plain, here, monkeypatch, capsys):
    study = study_of(plain, mechanisms=["a2c_published"], settings=dict(n_inner=1))
    monkeypatch.setattr(compare.Study, "seem_better", lambda study: ["a2c_published"])
    study.run(here)
    assert "a2c_published has fewer parameters than any plain GPT of this size" in capsys.readouterr().err
    assert study.pairs == [("a2c_published", "plain", [])] and results.collect(study, "test")["comparisons"]


def test_the_width_of_a_matched_baseline_counts_the_recipes_own(plain):
    """SwiGLU's MLP is 8/3 of the width wide, not 4 times."""
    study = study_of(plain, mechanisms=["short_conv"], settings=dict(recipe="llama", qk_max=None, n_embd=64))
    variant = study.variants["short_conv"]
    wide = study.builder.same_parameters(variant, [])
    assert abs(wide.params - variant.params) <= 1.5 * 64 and wide.model.n_inner > 168


@pytest.mark.slow
def test_a_run_that_another_study_starts_again_counts_as_failed(plain, here, monkeypatch):
    """Else its variant would be judged at rates that were never tuned."""
    run = here.run

    def diverges(folder):
        spec = json.loads((folder / "trial.json").read_text())
        return "diverged" if spec["train"]["muon_lr"] == 0.04 else run(folder)

    monkeypatch.setattr(here, "run", diverges)
    monkeypatch.setattr(trial, "failure", lambda folder: None)  # failed.txt is gone
    study = study_of(plain, tune_lr=True, screen_seeds=[9, 8], match_parameters=False)
    study.run(here)
    assert study.candidates and study.runs.failed


@pytest.mark.slow
def test_a_report_does_not_fall_over_a_file_of_several_studies(finished):
    study, found = finished
    results.write(effects.together(dict(a=found, b=found), "both", ""), study.out)
    path = study.out / "results.json.gz"
    assert results.holds_runs(path) and ("judge", "output_gate", 5) in results.scored_in(path)


@pytest.mark.slow
def test_a_budget_is_given_in_tokens_a_parameter_and_a_size_by_name(monkeypatch):
    monkeypatch.setattr("nanoheads.config.Dataset", Bytes)
    for size, steps in {"0.1M": 960, "0.33M": 3240, "1M": 9600}.items():
        config = StudyConfig(mechanisms=["xsa"], scale="nano", size=size, tokens_per_param=20.0)
        builder = VariantBuilder(config)
        plain = builder.plain
        blocks = sum(p.numel() for p in GPT(plain.model).transformer.h.parameters())
        assert blocks == 12 * plain.model.n_layer * plain.model.n_embd ** 2
        assert plain.train.max_iters == steps == round(20 * blocks / 2048)
        assert all(getattr(plain.train if key.endswith("lr") else plain.model, key) == value
                   for key, value in SIZES[size].items())
        assert builder.at_budget(0.7).train.max_iters == round(0.7 * steps)
        # a study of half the tokens is a short one, whatever the size
        short = VariantBuilder(replace(config, tokens_per_param=10.0))
        assert short.of_scale() == builder.of_scale() == dict(steps=steps, tokens=2048 * steps)
        assert short.plain.train.max_iters == steps // 2
    # the smallest of the ladder is the tiny scale: their runs have the same hashes
    spec = [Study(StudyConfig(mechanisms=["xsa"], device="cpu", **keys), "x").runs.spec
            for keys in (dict(), dict(scale="nano", size="0.1M", tokens_per_param=20.0))]
    variants = [VariantBuilder(StudyConfig(mechanisms=["xsa"], **keys)).plain
            for keys in (dict(), dict(scale="nano", size="0.1M", tokens_per_param=20.0))]
    assert spec[0](variants[0], 1, "test") == spec[1](variants[1], 1, "test")


def test_the_groups_of_rates_are_those_that_the_optimizers_have(plain):
    study = study_of(plain, mechanisms=["output_gate", "window"], settings=dict(n_layer=2),
                     variants={"adamw": dict(optimizer="adamw")})
    every = ["muon_lr", "muon_momentum", "adamw_lr", "embed_lr"]
    assert study.builder.plain.groups() == every == study.variants["window"].groups()
    assert study.variants["output_gate"].groups() == [*every, "mechanism_lr"]
    assert study.variants["adamw"].groups() == ["adamw_lr", "embed_lr"]
    twice = study.variants["output_gate"].at_rates({"adamw_lr": 2.0, "muon_lr": 1.0}, "twice")
    assert twice.train.adamw_lr == 8e-3 and twice.train.embed_lr == 2e-2 and twice.train.mechanism_lr == 4e-3
    assert twice.flags == dict(output_gate="headwise", adamw_lr=8e-3, embed_lr=2e-2, min_lr=0.0,
                               mechanism_lr=4e-3)
    assert twice.at_rates({"embed_lr": 2.0}, "").train.embed_lr == 4e-2


@pytest.mark.parametrize("name", OF_TASKS)
def test_every_shipped_study_of_tasks_makes_its_variants(name):
    (config,), _ = configurator.made(configurator.read((StudyConfig,), [f"config/studies/{name}"]))
    assert config.question and config.task
    for task in task_study.TaskStudy(config, name).tasks:
        assert task.variants and not any(each.model.problems() for each in task.arms.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", ["tiny", "mid", "paper"])
def test_every_shipped_study_makes_its_variants(name, scale, monkeypatch, own_mechanisms_go):
    monkeypatch.setattr("nanoheads.config.Dataset", Bytes)
    # 90 million numbers take their time; sizes have their own test
    monkeypatch.setattr("lab.study.variants.size_of", lambda config: (1000, 1000))
    nano = ("ladder_01M.py", "ladder_033M.py", "ladder_1M.py")
    if name in ("demo.py", *nano):
        scale = "nano" if name in nano else "tiny"
    asked = configurator.read((StudyConfig,), [f"config/studies/{name}", f"--scale={scale}"])
    own_mechanism.take(asked)
    (config,), _ = configurator.made(asked)
    builder = VariantBuilder(config)
    variants = builder.variants()
    assert config.question and (variants or config.tune_lr)
    for variant in variants:
        assert not variant.model.problems()
        assert variant.train.max_iters == builder.plain.train.max_iters
        assert variant.model.attn_dropout == builder.plain.model.attn_dropout  # on both sides or on none


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, flags in MECHANISMS.items()
                                  if GPTConfig(dropout=0.1, **flags).problems()])
def test_what_has_no_kernel_with_dropout_is_compared_without_it_on_both_sides(name, monkeypatch):
    monkeypatch.setattr("nanoheads.config.Dataset", Bytes)
    builder = VariantBuilder(StudyConfig(mechanisms=[name], settings=dict(dropout=0.1)))
    variant, = builder.variants()
    assert builder.plain.model.attn_dropout == variant.model.attn_dropout == 0 != variant.model.dropout


def test_every_mechanism_and_rival_is_in_the_study_of_all():
    config, = configurator.load((StudyConfig,), ["config/studies/all.py"])
    want = {**MECHANISMS, "all_on": ALL_ON, **config.variants}
    want["agency_learned"] = {**want["agency_learned"], "controller_log": True}
    assert variants_of(config) == want


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
    (["config/studies/scores.py"], "scores")])
def test_a_study_is_named_after_its_file_or_its_mechanisms(args, folder):
    config, = configurator.load((StudyConfig,), args)
    files = [arg for arg in args if not arg.startswith("--")]
    assert compare.name_of(config, files) == folder


# ---- stages ----

@pytest.mark.slow
def test_a_finished_study_repeats_nothing_and_a_change_only_what_it_touches(plain, here):
    study = study_of(plain)
    study.run(here)
    assert len(here.started) == 4 and not results.collect(study, "test")["failures"]
    first, here.started = study.runs.scores("judge"), []
    study_of(plain).run(here)
    assert here.started == []
    slower = {"output_gate": dict(output_gate="headwise", adamw_lr=5e-4)}
    changed = study_of(plain, mechanisms=[], variants=slower)
    changed.run(here)
    assert len(here.started) == 2
    again = changed.runs.scores("judge")
    assert again["plain"] == first["plain"] and again["output_gate"] != first["output_gate"]


@pytest.mark.slow
def test_the_plain_gpt_has_more_seeds_and_other_budgets(plain, here):
    study = study_of(plain, mechanisms=["output_gate", "xsa", "sink", "key_offset"], plain_seeds=None,
                     budgets=[0.5, 2.0], seeds=[3, 4])
    study.run(here)
    seeds = {name: list(own) for name, own in study.runs.scores("judge").items()}
    assert seeds["plain"] == [3, 4, 5, 6] and seeds["xsa"] == [3, 4] == seeds["plain x 0.5"]
    found = results.collect(study, "test")
    assert [found["arms"][name]["steps"] for name in ("plain x 0.5", "plain", "plain x 2")] == [3, 6, 12]
    row = found["comparisons"][0]
    assert (row["n"], row["n_baseline"]) == (2, 4) and {"worth", "equal_flops", "equal_time"} <= set(row)


@pytest.mark.slow
def test_the_best_and_the_worst_on_validation_are_judged_with_fresh_seeds_on_test(plain, here):
    names = ["output_gate", "xsa", "sink", "key_offset", "head_norm"]
    study = study_of(plain, mechanisms=names, screen=True, best=1, worst=1, always=["sink"],
                     contrasts=[["xsa", "plain"]])
    study.run(here)
    runs = started(here, study)
    assert set(runs[:12]) == {(name, "val") for name in ("plain", *names)}
    means = {name: np.mean(list(own.values())) for name, own in study.runs.scores("screen").items()}
    others = sorted({"output_gate", "key_offset", "head_norm"}, key=means.get)
    chosen = {"sink", "xsa", others[0], others[-1]}
    assert set(study.screened["chosen"]) == chosen and {name for name, _ in runs[12:]} == {"plain", *chosen}
    assert {split for _, split in runs[12:]} == {"test"}
    found = results.collect(study, "test")
    assert len(found["comparisons"]) == 4  # what was judged, and no more, is corrected for
    assert [row["variant"] for row in found["screened"]] == sorted(names, key=means.get)
    assert {row["variant"] for row in found["screened"] if row["chosen"]} == chosen
    assert found["screened_out"] == [name for name in names if name not in chosen]


@pytest.mark.slow
@pytest.mark.parametrize("keys, excludes", [
    (dict(mechanism="output_gate"), False), (dict(screen=True, best=1, worst=1), False),
    (dict(screen=True, best=1, worst=0), True), (dict(screen=True, best=0, worst=0, always=["xsa"]), True),
    (dict(screen=True, best=0, worst=0, always=["xsa"], contrasts=[["sink", "plain"]]), False)], ids=str)
def test_nothing_is_screened_where_nothing_can_be_left_out(plain, here, keys, excludes):
    """One mechanism of one's own was once trained with two seeds on validation, to be chosen from one."""
    mechanisms = [] if "mechanism" in keys else ["xsa", "sink"]
    study = study_of(plain, mechanisms=mechanisms, match_parameters=False, seeds=[1], plain_seeds=1,
                     screen_seeds=[9], **keys)
    assert study.screens() == excludes
    study.run(None)
    planned = {(stage, split) for (stage, *_), folder in study.runs.folders.items()
               for split in [study.runs.specs[folder]["score"]["split"]]}
    assert planned == {("judge", "test")} | ({("screen", "val")} if excludes else set())
    assert (study.screened is None) != excludes


@pytest.mark.slow
def test_what_seems_better_meets_a_plain_gpt_of_its_size(plain, here, monkeypatch):
    def verdicts(texts, pairs, *settings):
        rows = [dict(variant=v, baseline=b, verdict={"unet_concat": "better"}.get(v, "worse"), high=1.0)
                for v, b, _ in pairs]
        return [some(records.Comparison, row) for row in rows]

    monkeypatch.setattr(effects, "comparisons", verdicts)
    study = study_of(plain, mechanisms=["output_gate", "unet_concat"], settings=dict(n_layer=2, n_embd=32))
    study.run(here)
    (_, wide, equal), = [pair for pair in study.pairs if pair[2]]
    assert equal == ["parameters"] and study.compared[wide].kind == "baseline"
    assert abs(study.compared[wide].params - study.variants["unet_concat"].params) < 70
    assert list(study.runs.scores("judge")[wide]) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("stays", [None, "plain", "output_gate"])
def test_what_is_judged_has_its_own_best_rates(plain, here, monkeypatch, capsys, stays):
    """Seeds that no comparison uses, on validation; each group of rates by itself, then all together."""
    study = study_of(plain, tune_lr=True, screen_seeds=[9, 8], match_parameters=False, budgets=[2.0])
    before = {variant.name: variant.train for variant in (study.builder.plain, *study.variants.values())}
    monkeypatch.setattr(effects, "best_rates", lambda candidates: {
        name: 0 if name == stays else len(own) - 1 for name, own in candidates.items()})
    study.run(here)
    tuning = {(name, seed): study.runs.specs[folder]
              for (stage, name, seed), folder in study.runs.folders.items() if stage == "tune"}
    assert {spec["score"]["split"] for spec in tuning.values()} == {"val"}
    assert {seed for _, seed in tuning} == {9, 8}
    every, best = ["muon_lr", "muon_momentum", "adamw_lr", "embed_lr"], {}
    for name, groups in {"plain": every, "output_gate": [*every, "mechanism_lr"]}.items():
        assert list(study.tuned[name]) == groups
        best[name] = {group: min(scores, key=scores.get) for group, scores in study.tuned[name].items()}
        for group, scores in study.tuned[name].items():
            assert {0.5, 1.0, 2.0} <= set(scores)
            # an end is tried further out, twice at most
            inside = min(scores) < best[name][group] < max(scores)
            assert inside or best[name][group] in (0.125, 8.0)
        moved = {group: factor for group, factor in best[name].items() if factor != 1}
        own = study.candidates[name]
        assert [each["rates"] for each in own[:len(moved) + 1]] == [{}, *({g: f} for g, f in moved.items())]
        assert own[-1]["rates"] == moved and all({*each["bpb"]} == {9, 8} for each in own)
        last = tuning[f"{name}, candidate {len(own) - 1}", 8]["train"]
        judged = study.compared[name].train
        for group in every:
            assert last[group] == times(best[name][group], group, getattr(before[name], group))
            factor = 1 if name == stays else best[name][group]
            assert getattr(judged, group) == pytest.approx(
                times(factor, group, getattr(before[name], group)), rel=1e-15)
    for group, scores in study.tuned["output_gate"].items():  # no factor that the plain GPT did not get
        assert {*scores} <= {*study.tuned["plain"].get(group, scores)}
    assert study.compared["plain x 2"].train.adamw_lr == study.compared["plain"].train.adamw_lr
    assert study.pairs == [("output_gate", "plain", [])]
    # what its flags say is what runs, also where they are read again
    variant = study.compared["output_gate"]
    assert study.builder.make("output_gate", "variant", "", variant.flags).train == variant.train
    found = results.collect(study, "test")
    rates = [row[1] for row in findings.candidates_table(found).rows if row[-1] == "taken"]
    assert [word == "as they are" for word in rates] == [name == stays for name in ("plain", "output_gate")]
    results.write(found, ".")
    assert "all of them the same" in results.recheck("results.json.gz")
    found["candidates"]["plain"][0]["bpb"]["8"] += 0.1
    found["taken"]["output_gate"] += 1
    results.write(found, ".")
    with pytest.raises(UserError, match="2 of"):
        results.recheck("results.json.gz")
    told = capsys.readouterr().err
    assert "plain at {}, seed 8: no run gave" in told and "taken.output_gate: " in told


@pytest.mark.slow
def test_a_variant_of_another_optimizer_keeps_its_own_rates_beside_a_tuned_plain_gpt(plain):
    flags = {"adamw": dict(optimizer="adamw", adamw_lr=8e-3, min_lr=0.0), "gpt2": dict(recipe="gpt2")}
    study = study_of(plain, mechanisms=["output_gate"], variants=flags)
    faster = study.builder.plain.at_rates({"adamw_lr": 2.0, "muon_lr": 0.5}, "")
    tuned = VariantBuilder(study.config, faster.flags)
    for variant in study.variants.values():
        for factors in ({}, {"adamw_lr": 2.0}, {"adamw_lr": 0.5}):
            new = variant.at_best_rates(factors, tuned.plain)
            for key in ("adamw_lr", "embed_lr", "min_lr", "muon_lr", "mechanism_lr"):
                times = factors.get("adamw_lr", 1) if key in ("adamw_lr", "min_lr") else 1
                assert getattr(new.train, key) == getattr(variant.train, key) * times
            assert tuned.make(variant.name, "variant", "", new.flags).train == new.train


@pytest.mark.slow
def test_what_diverges_at_every_rate_is_judged_at_its_own(plain, here, monkeypatch):
    run, spec_of = here.run, lambda folder: json.loads((folder / "trial.json").read_text())
    monkeypatch.setattr(here, "run", lambda folder: run(folder) if spec_of(folder)["model"].get(
        "output_gate") is None else "diverged")
    study = study_of(plain, tune_lr=True, screen_seeds=[9, 8], match_parameters=False)
    before = study.variants["output_gate"].train
    study.run(here)
    assert study.compared["output_gate"].train == before and {*study.runs.scores("judge")} == {"plain"}


def test_rates_are_taken_where_they_are_better_by_a_standard_error():
    def at(*scores):
        return [records.Candidate(rates={}, bpb=dict(enumerate(each))) for each in scores]

    variants = dict(loud=at([3.0, 3.4], [2.0, 2.8]), a=at([2.0, 2.02], [2.0, 2.01]),
                b=at([2.0, 2.02], [1.95, 1.97], [1.9, 2.0], [1.9]))
    # n = 2: a difference of two means has the spread as its error: 0.02 / 2 ** 0.5, the median
    assert effects.best_rates(variants) == dict(loud=1, a=0, b=2)
    assert effects.best_rates(dict(a=at([2.0, 2.02], [1.99, 2.01]), b=variants["b"]))["a"] == 0
    assert effects.best_rates(dict(a=at([2.0, 2.0], [1.9, 2.2]))) == dict(a=0)  # one seed's luck
    assert effects.best_rates(dict(a=at([2.0, 2.0], [1.5]), b=at([], []))) == dict(a=0, b=0)  # diverged
    assert effects.best_rates(dict(a=at([2.0], [1.9]))) == dict(a=1)
    assert effects.best_rates(dict(a=at([1.9], [1.5, 1.6]), b=at([], [3.0, 3.1]))) == dict(a=1, b=1)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, factors, flags", [
    ("muon", dict(muon_lr=2.0, muon_momentum=1.0), dict(muon_lr=0.04)),
    ("muon", dict(muon_momentum=2.0), dict(muon_momentum=0.95)),
    ("muon", dict(muon_momentum=0.05), dict(muon_momentum=0.0)),
    ("muon", dict(muon_momentum=2.0, adamw_lr=0.5), dict(
        muon_momentum=0.95, adamw_lr=0.001, min_lr=0.0, embed_lr=0.01, mechanism_lr=0.002)),
    ("muon", dict(embed_lr=4.0), dict(embed_lr=0.04)),
    ("adamw", dict(adamw_lr=2.0, embed_lr=1.0), dict(
        adamw_lr=0.004, min_lr=0.0002, embed_lr=0.01, mechanism_lr=0.002)),
    ("muon", dict(adamw_lr=1.0), {})], ids=str)
def test_a_rate_moves_with_what_follows_from_it(plain, optimizer, factors, flags):
    """A momentum of 0.9 remembers 10 steps, one of 0.95 twice as many."""
    variant = study_of(plain).builder.plain
    rates = dict(optimizer=optimizer, muon_lr=0.02, muon_momentum=0.9, adamw_lr=0.002, embed_lr=0.01,
                 mechanism_lr=0.002, min_lr=0.0 if optimizer == "muon" else 1e-4)
    variant = replace(variant, train=replace(variant.train, **rates))
    assert variant.at_rates(factors, "").flags == pytest.approx(flags)


@pytest.mark.slow
def test_a_study_of_the_plain_gpt_alone_finds_its_best_rates(plain, here, monkeypatch):
    """It is judged at them, the page says so, and a recheck finds a score that no run gave."""
    def result(folder, **how):  # the best: muon_lr doubled once, momentum as long again
        spec = trial.read_json(folder / "trial.json") if (folder / "trial.json").is_file() else None
        found = real(folder, **how)
        if found and spec["score"]["split"] == "val":
            muon_lr, lr, m = (spec["train"][key] for key in ("muon_lr", "adamw_lr", "muon_momentum"))
            off = abs(math.log2(muon_lr / 0.04)) + abs(math.log2(lr / 0.004)) + abs(m - 0.975)
            factor = (4 + off + spec["model"]["seed"] / 100) / found["bpb"]
            found["block_nats"] = [n * factor for n in found["block_nats"]]
            found.update(bpb=found["bpb"] * factor, nats=found["nats"] * factor)
        return found
    real = trial.result
    monkeypatch.setattr(trial, "result", result)
    study = study_of(plain, mechanisms=[], tune_lr=True, screen_seeds=[8, 9, 7], rescore=0)
    study.run(here)
    taken = study.builder.plain.train
    assert (taken.muon_lr, taken.muon_momentum, taken.adamw_lr) == (0.04, 0.975, 0.004)
    assert list(study.tuned["plain"]) == ["muon_lr", "muon_momentum", "adamw_lr", "embed_lr"]
    tuning = {(name, seed): study.runs.specs[folder]
              for (stage, name, seed), folder in study.runs.folders.items() if stage == "tune"}
    assert {spec["score"]["split"] for spec in tuning.values()} == {"val"}
    assert {seed for _, seed in tuning} == {7, 8, 9}
    judged = [study.runs.specs[folder]["train"]
              for (stage, *_), folder in study.runs.folders.items() if stage == "judge"]
    assert judged and all(train["muon_lr"] == 0.04 and train["muon_momentum"] == 0.975 for train in judged)
    found = results.collect(study, "test")
    assert "have their own best rates" in " ".join(findings.notices(found)) and "Learning rates" in (
        report.page(found))
    results.write(found, ".")
    assert "all of them the same" in results.recheck("results.json.gz")
    found["tuned"]["plain"]["muon_lr"]["1.0"] += 0.5
    results.write(found, ".")
    with pytest.raises(UserError):
        results.recheck("results.json.gz")


@pytest.mark.slow
def test_a_run_that_crashes_is_reported_and_sinks_nothing(plain, here, monkeypatch):
    hot = dict(adamw_lr=1e9, muon_lr=1e9, min_lr=1e9, recipe="gpt2", optimizer="adamw", grad_clip=0.0)
    study = study_of(plain, variants={"hot": hot})
    study.run(here)
    timed = costs.step_time_ratios

    def diverges(variants, *args):
        if variants[0].name == "hot":
            raise UserError("loss is nan in step 1")
        return timed(variants, *args)

    monkeypatch.setattr(costs, "step_time_ratios", diverges)
    found = results.collect(study, "test")
    assert found["arms"]["hot"]["time_ratio"] is None and found["arms"]["output_gate"]["time_ratio"]
    assert {f["arm"] for f in found["failures"]} == {"hot"}
    assert all("stopped before anything of it is saved" in f["why"] for f in found["failures"])
    verdicts = {row["variant"]: row["verdict"] for row in found["comparisons"]}
    assert verdicts["hot"] == "undecided" and found["done"] == 4 and found["planned"] == 6
    assert all(x is not None for x in found["arms"]["output_gate"]["bpb"])
    again = study_of(plain, variants=study.config.variants, report_only=True)
    again.run(here)
    assert len(results.collect(again, "test")["failures"]) == 2  # reported again, without running anything


@pytest.mark.slow
def test_a_study_is_cut_short_and_goes_on_to_the_same_numbers(plain):
    """The real thing: processes, a signal while two runs train (as Ctrl-C is one), the same command again.

    With 160 steps one run was sometimes done before the other began.
    """
    (Path.cwd() / "study.py").write_text(
        f"base = {str(plain)!r}\nmechanisms = ['output_gate']\nseeds = [1]\nbudgets = []\n"
        "jobs = 2\ndevice = 'cpu'\nsettings = dict(max_iters=600, eval_interval=10)\n")
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
    assert len(saved) == 2 and all(0 < step < 600 for step in saved.values())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "output_gate" in done.stdout and "report.html" in done.stdout
    cut = json.loads(next(Path("out/trials").glob("*/result.json")).read_text())
    folder = next(Path("out/trials").glob("*/result.json")).parent
    assert "going on at step" in (folder / "trial.log").read_text()
    alone = Path("alone") / folder.name
    alone.mkdir(parents=True)
    (alone / "trial.json").write_text((folder / "trial.json").read_text())
    assert trial.run(alone, train.train)["bpb"] == cut["bpb"]  # to the last bit


# ---- results ----

@pytest.mark.slow
def test_the_displayed_commands_give_the_displayed_score(plain, here, monkeypatch):
    """Word for word, in a shell, with the threads that they name: the same digits."""
    study = study_of(plain, seeds=[3], plain_seeds=1)
    study.run(here)
    variant = results.collect(study, "test")["arms"]["output_gate"]
    train, evaluate = variant["commands"]
    assert train.startswith(f"OMP_NUM_THREADS={torch.get_num_threads()} python train.py ")
    for line in (train, f"{evaluate} --json=score.json"):
        words = line.replace(" python ", f" {sys.executable} {ROOT}/", 1)
        done = subprocess.run(words, shell=True, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    score, = json.loads(Path("score.json").read_text())["runs"]
    assert score["bpb"] == pytest.approx(variant["bpb"][0], rel=1e-7)  # of a token's nats, 32 bits are kept
    assert f"{variant['bpb'][0]:.4f}" in done.stdout


@pytest.mark.slow
def test_a_slice_is_scored_window_by_window_and_its_bytes_are_its_own(plain, here, bytes_data):
    study = study_of(plain, seeds=[3], plain_seeds=1, test_tokens=160, mechanisms=["agency"])
    study.run(here)
    folder = study.runs.folders["judge", "plain", 3]
    found = trial.result(folder)
    assert found["tokens"] == found["bytes"] == 160 and np.load(folder / "nats.npy").shape == (10,)


def run_study_of_three_seeds(plain, here):
    study = study_of(plain, seeds=[5, 6, 7], plain_seeds=4, mechanisms=["output_gate", "unet_concat"],
                     settings=dict(n_layer=2), budgets=[0.5], out_dir="out/test")
    study.run(here)
    found = results.collect(study, "python compare.py test")
    study.out.mkdir(exist_ok=True)
    results.write(found, study.out)
    return study, found


@pytest.fixture(scope="module")
def finished_once(bytes_data, tmp_path_factory):
    """The folder out of a finished study of three seeds, trained once for all tests of this file."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        place = in_this_process(monkeypatch)
        run_study_of_three_seeds(small_plain(folder, bytes_data, monkeypatch), place)
    return folder / "out"


@pytest.fixture
def finished(finished_once, plain, here):
    """That study, and its results, in this test's own out/test; nothing of it runs again."""
    shutil.copytree(finished_once, "out")
    found = run_study_of_three_seeds(plain, here)
    assert not here.started
    return found


@pytest.mark.slow
def test_results_hold_what_the_statistics_need(finished):
    """From the scores of each seed alone: the same figures; from the blocks alone: the same scores."""
    _, found = finished
    assert found == as_on_file(found) == results.read("out/test/results.json.gz")
    assert found["command"] and found["commit"] and found["versions"]["torch"] == torch.__version__
    for draw in (pictures.forest, pictures.learning, pictures.compute):  # all that they need is in it
        assert draw(found).axes[0].get_lines()
    assert found["plain"]["n_layer"] == 2 and not {"seed", "out_dir", "device"} & set(found["plain"])
    scores = {name: dict(zip(map(str, variant["seeds"]), variant["bpb"]))
              for name, variant in found["arms"].items()}
    for row in found["comparisons"]:
        own, other = ([*scores[row[side]].values()] for side in ("variant", "baseline"))
        want = ttest_ind(own, other, equal_var=False)
        # never surer than Welch: with more seeds of the plain GPT the degrees of freedom may be fewer
        assert row["mean"] / row["se"] == pytest.approx(want.statistic)
        assert row["df"] <= want.df * (1 + 1e-9)
        assert row["p_corrected"] >= row["p"] >= want.pvalue * (1 - 1e-9)
    for variant in found["arms"].values():
        for run, bpb in zip(variant["runs"], variant["bpb"]):
            nats = sum(found["runs"][run]["block_nats"])
            assert nats / np.log(2) / found["data"]["bytes"] == pytest.approx(bpb, rel=1e-8)


@pytest.mark.slow
def test_a_recheck_computes_every_figure_and_finds_a_changed_one(finished, capsys):
    _, found = finished
    main(["--recheck=out/test/results.json.gz"])
    assert "all of them the same" in capsys.readouterr().out

    said = []

    def changed(change):
        copy = as_on_file(found)
        change(copy)
        results.write(copy, ".")
        with pytest.raises(SystemExit) as e:
            main(["--recheck=results.json.gz"])
        assert re.search(r"(1 of .* is|\d\d* of .* are) not what its runs give", e.value.code)
        assert "\n" not in e.value.code
        said.append(capsys.readouterr().err)
        return said[-1]

    assert "output_gate: " in changed(lambda f: f["arms"]["output_gate"]["bpb"].__setitem__(0, 2.0))
    assert "comparisons[0].mean" in changed(lambda f: f["comparisons"][0].__setitem__("mean", -0.5))
    assert "verdict" in changed(lambda f: f["comparisons"][1].__setitem__("verdict", "better"))
    run = found["arms"]["plain"]["runs"][0]
    assert "blocks sum up" in changed(lambda f: f["runs"][run]["block_nats"].__setitem__(0, 3.0))
    gate = "output_gate"
    for key in ("params", "flops_per_token"):
        assert f"is of another variant or seed: {key}" in changed(lambda f: f["arms"][gate].update({key: 5}))
    assert "equal_flops" in changed(lambda f: f["arms"][gate].update(executed_flops_per_token=5))
    assert "time of a step.high" in changed(lambda f: f["arms"][gate]["time_ratio"].update(high=9.0))


def exchanged(found):
    """Two variants have each other's runs and scores."""
    one, other = (found["arms"][name] for name in ("output_gate", "unet_concat"))
    for key in ("runs", "bpb"):
        one[key], other[key] = other[key], one[key]


def twice(found):
    variant = found["arms"]["output_gate"]
    for key in ("runs", "bpb"):
        variant[key][0] = variant[key][1]


def dropped(found):
    for key in ("seeds", "runs", "bpb"):
        found["arms"]["output_gate"][key].pop()


def of_fewer_steps(found):
    found["runs"][found["arms"]["plain"]["runs"][0]]["spec"]["train"]["max_iters"] = 3


def screened(found, score=2.0):
    found["screen"] = dict(seeds=[9], split="val", rule="", chosen=["output_gate"],
                           scores={"plain": {"9": score}, "output_gate": {"9": score}})


@pytest.mark.slow
def test_a_recheck_asks_whose_the_runs_are(finished, capsys):
    """Also where every figure was computed anew from what was changed."""
    _, found = finished

    def changed(change, *args):
        copy = as_on_file(found)
        change(copy, *args)
        results.write(but(copy, **vars(effects.figures(copy))), ".")

    for change, problem in (
            (exchanged, "is of another variant or seed: output_gate, params"),
            (twice, "is of another variant or seed: seed"), (dropped, "stands under no variant"),
            (of_fewer_steps, "has another spec"),
            (screened, "screened output_gate, seed 9: no run gave 2.0")):
        changed(change)
        with pytest.raises(UserError, match="(is|are) not what its runs give"):
            results.recheck("results.json.gz")
        assert problem in capsys.readouterr().err, problem
    run = next(iter(found["runs"].values()))
    spec = {**run["spec"], "score": {**run["spec"]["score"], "split": "val"}}
    nats = [run["block_nats"][0] + 0.1, *run["block_nats"][1:]]
    for of_screen, problem in ((dict(bpb=run["bpb"] - 0.3), "is not"), (dict(block_nats=nats), "sum up to")):
        of_screen = but(run, spec=spec, **of_screen)  # of a run in no table
        runs = {**found["runs"], trial.folder_of(spec).name: of_screen}
        results.write(but(found, runs=runs), ".")
        with pytest.raises(UserError, match="1 of"):
            results.recheck("results.json.gz")
        assert problem in capsys.readouterr().err
    changed(screened, found["arms"]["plain"]["bpb"][0])  # what a run did give
    assert "all of them the same" in results.recheck("results.json.gz")


def test_a_recheck_compares_the_flags_that_a_variant_names(plain):
    """Of another optimizer the rest of the rates are others too, of another recipe the flags.

    A flag may stand for what follows from others: a window of 0 is a quarter of the context.
    """
    flags = {"adamw": dict(optimizer="adamw", adamw_lr=8e-3), "gpt2": dict(recipe="gpt2", optimizer="adamw"),
             "window": dict(window=0)}
    study = study_of(plain, mechanisms=[], variants=flags)
    tuned = [v.at_rates({"adamw_lr": 2.0}, f"{v.name}, tuned") for v in study.variants.values()]
    for variant in [*study.variants.values(), *tuned]:
        spec = study.runs.spec(variant, 1, "test")
        run = trial.folder_of(spec).name
        arm = dict(flags=variant.flags, runs=[run], seeds=[1], bpb=[2.0], params=1, flops_per_token=1)
        of_run = dict(params=1, flops_per_token=1, bpb=2.0)
        found = some(records.StudyResults, dict(data=dict(split="test"), arms={"it": arm},
                                                runs={run: dict(spec=spec, **of_run)}))
        assert results.wrong_runs(found) == []
        for key in variant.flags:
            other = json.loads(json.dumps(spec))
            other["model" if key in spec["model"] else "train"][key] = "other"
            found["runs"][run]["spec"] = other
            problem, = results.wrong_runs(found)
            assert problem.endswith(f"is of another variant or seed: {key}")


def on_file(found, name="x"):
    """A results file, and nothing left in out/trials."""
    Path("results").mkdir(exist_ok=True)
    path = Path("results", f"{name}.json.gz")
    path.write_bytes(gzip.compress(json.dumps(records.as_json(found)).encode()))
    shutil.rmtree("out/trials")
    return str(path)


def change_trials(changed):
    """Let the runs in out/trials be those of what changed() makes of each trial.json."""
    for folder in [*Path("out/trials").glob("*/")]:
        if (folder / "result.json").is_file():
            spec = changed(json.loads((folder / "trial.json").read_text()))
            there = folder.rename(trial.folder_of(spec))
            (there / "trial.json").write_text(json.dumps(spec))
            result = json.loads((there / "result.json").read_text())
            (there / "result.json").write_text(json.dumps({**result, "trial": there.name}))


@pytest.mark.slow
def test_a_run_in_results_does_not_count_as_done(finished, here):
    """Today's table must not be one of another day."""
    study, found = finished
    on_file(found)
    here.started = []
    anew = Study(replace(study.config, out_dir="out/elsewhere"), "test")
    anew.run(here)
    assert len(here.started) == len(found["runs"]) and anew.runs.reused() == []
    assert not results.collect(anew, "test")["reused"]


def test_a_damaged_training_text_is_refused_before_the_first_run(plain, bytes_data, refusal):
    path = bytes_data / "train.bin"
    before = path.read_bytes()
    try:
        path.write_bytes(before[:-1] + b"?")
        argv = ["--base", str(plain), "--device=cpu", "--mechanisms=sink", "--dry_run"]
        assert "train.bin" in refusal(argv)
    finally:
        path.write_bytes(before)


def test_other_policy_rules_in_a_file_of_one_name_are_another_run(plain, tmp_path):
    rules = tmp_path / "rules.json"
    keys = dict(mechanisms=[], variants={"rules": dict(agency=True, policy=True, policy_rules=str(rules))})
    folders = []
    for text in ("[]", '[{"who": "policy", "allow": false}]'):
        rules.write_text(text)
        study = study_of(plain, **keys)
        folders.append({folder.name for folder in study.runs.plan("judge", study.variants.values(), [1])})
    assert not folders[0] & folders[1]


@pytest.mark.slow
def test_a_study_does_not_combine_scores_of_two_texts_of_one_name(finished, plain, bytes_data, refusal):
    """A test split of blanks in the place of another of that length once gave a variant 3 bits/byte."""
    path = bytes_data / "test.bin"
    before = path.read_bytes()
    try:
        path.write_bytes(b" " * len(before))
        said = refusal(["--base", str(plain), "--device=cpu", "--mechanisms=sink", "--out_dir=out/test"])
    finally:
        path.write_bytes(before)
    assert "test.bin" in said and "sha256" in said


@pytest.mark.slow
@pytest.mark.parametrize("change", [
    dict(code="other"), dict(torch="0.1"), dict(libraries={"numpy": "1.26"}), dict(environment={"MYK": "1"}),
    dict(libraries=None)], ids=lambda change: "".join(change))
def test_runs_of_other_code_are_taken_only_where_that_is_accepted(finished, here, change, capsys):
    study, found = finished
    change_trials(lambda spec: {**spec, **change})
    here.started, n = [], len(found["runs"])
    taking = Study(replace(study.config, out_dir="out/b", accept_code=True), "test")
    taking.run(here)
    again = results.collect(taking, "test")
    row, = again["reused"]
    assert here.started == [] and (row["source"], row["runs"], row["other_code"]) == ("out/trials", n, n)
    assert {*row["of"]} == {*again["arms"]}
    assert again["comparisons"] == found["comparisons"]
    assert f"({n} of them made by other code or other libraries, which --accept_code allowed, those of " in (
        " ".join(findings.notices(again)))
    capsys.readouterr()
    refusing = Study(replace(study.config, out_dir="out/a"), "test")
    refusing.run(here)
    assert len(here.started) == n
    told = " ".join(capsys.readouterr().out.split())
    told = re.findall(r"(\d+) runs? of out/trials do(?:es)? not count, since other code or other "
                      r"libraries made (?:it|them); --accept_code takes", told)
    assert sum(map(int, told)) == n


@pytest.mark.slow
def test_runs_are_not_done_where_what_their_mechanism_reads_changed(plain, here, mine, monkeypatch):
    library = Path("site-packages/strengths.py")
    library.parent.mkdir()
    library.write_text("STRENGTH = 1.0\n")
    monkeypatch.syspath_prepend(library.parent.resolve())
    monkeypatch.setenv("MYK", "1")
    own_mechanism.add(mine("import torch\n", "import os\nimport strengths\nimport torch\n"
                                             "K = os.environ['MYK']\n"))

    def started():
        here.started = []
        study_of(plain, mechanisms=["forget"], match_parameters=False).run(here)
        return len(here.started)

    assert started() == 4 and started() == 0
    monkeypatch.setenv("MYK", "2")
    assert started() == 2 and started() == 0  # the plain GPT's runs do not read it
    library.write_text("STRENGTH = 2.0\n")
    own_files.libraries_of.cache_clear()  # as in another process
    assert started() == 2
    own_files.libraries_of.cache_clear()
    del sys.modules["strengths"]


@pytest.mark.slow
def test_runs_of_an_earlier_text_of_ones_file_are_not_offered(plain, here, mine, capsys):
    for edit in ((), ("import torch\n", "import torch  # edited\n")):
        capsys.readouterr()
        with without_own_mechanisms():  # as in a process of its own
            own_mechanism.add(mine(*edit))
            study_of(plain, mechanisms=["forget"], match_parameters=False).run(here)
    told = " ".join(capsys.readouterr().out.split())
    assert "2 runs of out/trials do not count, since the file of the mechanism has another text now." in told
    assert "--accept_code takes" not in told


# ---- one text on both sides ----

@pytest.fixture
def copied(plain, bytes_data, tmp_path):
    """A data folder of this test's own, of the same text in characters, in the place of the one that `plain`
    names: of tokens that are bytes another number of bytes is refused.
    """
    splits = {name: (bytes_data / f"{name}.bin").read_bytes().decode() for name in ("train", "val", "test")}
    folder = write_dataset(tmp_path / "copied", splits, "char", sorted({*"".join(splits.values())}))
    plain.write_text(plain.read_text().replace(str(bytes_data), str(folder)))
    return folder


def test_other_bytes_in_meta_json_are_another_text(copied, plain, here):
    """A mechanism that was trained after the edit of 20000 bytes into 22000 was better by 0.27, p = 0.01."""
    study_of(plain).run(here)
    before = (copied / "meta.json").read_text()
    put_meta(copied, bytes=22000)
    here.started = []
    study_of(plain, mechanisms=["output_gate", "sink"]).run(here)
    assert len(here.started) == 6 and {trial.result(folder)["bytes"] for folder in here.started} == {22000}
    (copied / "meta.json").write_text(before)
    put_meta(copied, note="nothing reads it", name="other")
    here.started = []
    study_of(plain).run(here)
    assert here.started == []


def test_runs_that_read_another_meta_json_are_not_taken(copied, plain, here):
    study = study_of(plain)
    study.run(here)
    for meta, done in ((dict(note="other"), 4), (dict(separator=11), 0)):
        put_meta(copied, **meta)
        again = study_of(plain, accept_code=True)
        again.run(None)
        assert sum(again.runs.result(folder) is not None for folder in again.runs.specs) == done


def with_bytes(run, size):
    """A run as one of the same nats on so many bytes."""
    values = dict(bytes=size, bpb=run["bpb"] * run["bytes"] / size)
    return but(run, **values) if isinstance(run, records.Record) else {**run, **values}


def test_a_recheck_names_runs_of_another_text(finished, capsys):
    _, found = finished
    name = found["arms"]["output_gate"]["runs"][1]

    def said(change):
        copy = as_on_file(found)
        change(copy)
        results.write(but(copy, **vars(effects.figures(copy))), ".")
        with pytest.raises(UserError, match="(is|are) not what its runs give"):
            results.recheck("results.json.gz")
        return capsys.readouterr().err

    def other_bytes(copy):
        copy["runs"][name] = with_bytes(copy["runs"][name], 1100)
        copy["arms"]["output_gate"]["bpb"][1] = copy["runs"][name]["bpb"]

    assert said(other_bytes) == (
        f"run {name} is of another text: bytes of test is 1100, and of most runs 1000\n")
    assert f"run {name} is of another text: data.meta is x, and of most runs " in said(
        lambda copy: copy["runs"][name]["spec"]["data"].update(meta="x"))
    assert said(lambda copy: copy["data"].update(bytes=1100)) == (
        "data.bytes is 1100, and no run scored so many\n")


def test_a_study_does_not_subtract_scores_of_other_bytes(finished):
    """Its nats bear out such a score, and its hash does not hold it."""
    study, _ = finished
    folder = study.runs.folders["judge", "output_gate", 6]
    other = with_bytes(json.loads((folder / "result.json").read_text()), 1100)
    (folder / "result.json").write_text(json.dumps(other))
    assert trial.done(folder)
    study.config.rescore = 0
    with pytest.raises(UserError) as e:
        results.collect(study, "test")
    assert str(e.value) == (f"run {folder.name} is of another text: bytes of test is 1100, and of most runs "
                            "1000; delete its folder in out/trials, and it is trained once more")


# ---- some runs are scored once more before the report ----

def scaled(folder, factor):
    """Multiply a run's score, everywhere in its folder."""
    found = json.loads((folder / "result.json").read_text())
    found.update({key: factor * found[key] for key in ("nats", "bpb")})
    found["block_nats"] = [factor * nats for nats in found["block_nats"]]
    (folder / "result.json").write_text(json.dumps(found))
    np.save(folder / "nats.npy", factor * np.load(folder / "nats.npy"))


def test_a_score_that_its_checkpoint_does_not_give_ends_the_study(plain, here):
    """Scores x 0.85 in out/trials were "better", and --recheck agreed."""
    study = study_of(plain, rescore=10)
    study.run(here)
    for seed in (1, 2):
        scaled(study.runs.folders["judge", "output_gate", seed], 0.85)
    assert all(trial.done(folder) for folder in study.runs.folders.values())
    with pytest.raises(UserError) as e:
        results.collect(study, "test")
    lines = sorted(str(e.value).splitlines(), key=lambda line: line.partition("(")[2])
    for seed, line in zip((1, 2), lines, strict=True):
        folder = study.runs.folders["judge", "output_gate", seed]
        bpb = trial.result(folder)["bpb"]
        assert line == (f"{folder} (output_gate, seed {seed}): its best.pt gives {bpb / 0.85:.6f} bits/byte, "
                        f"and {bpb:.6f} is on file; delete this folder and start again, and it is trained "
                        "once more; --rescore=0 reports what is there")
    study.config.rescore = 0
    found = results.collect(study, "test")
    assert vars(found["rescored"]) == dict(runs=[], without=0)
    assert "No run was scored once more from its checkpoint." in findings.remarks(found)


def nats_exchanged(folder):
    nats = np.load(folder / "nats.npy")
    np.save(folder / "nats.npy", nats[::-1])


def of_another_size(folder):
    found = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(with_bytes(found, 1100)))


def checkpoint_exchanged(folder):
    shutil.copy(next(path for path in folder.parent.glob("*/best.pt") if path.parent != folder), folder)


def checkpoint_damaged(folder):
    path = folder / "best.pt"
    path.write_bytes(path.read_bytes()[:-100])
    found = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**found, "checkpoint": files.sha256(path)}))


def taken_from(other, folder):
    """All that another run is scored by, as if it were this one's."""
    for name in ("best.pt", "nats.npy", "result.json"):
        shutil.copy(other / name, folder)
    found = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**found, "trial": folder.name}))


def believed(folder):
    """A score that was changed, and a note that it was checked, which --rescore=N does not believe."""
    scaled(folder, 0.85)
    (folder / "rescored.json").write_text(json.dumps(dict(files=rescoring.digest_of(folder))))


@pytest.mark.parametrize("edit, words", [
    (believed, "its best.pt gives "),
    (nats_exchanged, "its best.pt gives "),
    (of_another_size, "it scored 1,100 bytes, and today these are 1,000"),
    (checkpoint_exchanged, "its best.pt is not the file that was scored"),
    (checkpoint_damaged, "it cannot be scored once more: ")], ids=lambda each: getattr(each, "__name__", ""))
def test_what_else_is_edited_in_a_run_ends_the_study_too(plain, here, edit, words):
    study = study_of(plain, rescore=10)
    study.run(here)
    edit(study.runs.folders["judge", "plain", 2])
    with pytest.raises(UserError) as e:
        results.collect(study, "test")
    assert f"(plain, seed 2): {words}" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("whose, seed, key", [
    ("plain", 1, "seed is 1 there, and 2 was planned"),
    ("output_gate", 1, "seed is 1 there, and 2 was planned"),
    ("output_gate", 2, "output_gate is 'headwise' there, and None was planned")])
def test_the_run_of_another_seed_or_of_a_variant_is_not_that_of_a_plain_gpt(plain, here, whose, seed, key):
    study = study_of(plain, rescore=10)
    study.run(here)
    taken_from(study.runs.folders["judge", whose, seed], study.runs.folders["judge", "plain", 2])
    with pytest.raises(UserError) as e:
        results.collect(study, "test")
    assert f"(plain, seed 2): its best.pt is of another run: {key}" in str(e.value)


def test_runs_whose_heads_come_and_go_are_scored_once_more_too(plain, here):
    study = study_of(plain, rescore=10, mechanisms=[], variants={
        "pruned": dict(sentinel="sigmoid", prune_gate=0.99, prune_margin=1e9, controller_interval=2,
                       controller_warmup=0, controller_patience=1, controller_tokens=32,
                       controller_heldout=32)})
    study.run(here)
    folder = study.runs.folders["judge", "pruned", 1]
    assert checkpoint.read(folder / "best.pt")["config"]["head_ids"], "no head was taken out"
    assert len(results.collect(study, "test")["rescored"]["runs"]) == 4


def test_a_report_says_how_many_runs_were_scored_once_more(finished, plain, here, monkeypatch, capsys):
    study, found = finished
    n, again = len(found["runs"]), found["rescored"]
    assert n == 13 and len(again["runs"]) == 2 and again["without"] == 0
    words = "2 of 13 runs were scored once more from their checkpoints and gave their scores."
    for said in (findings.remarks(found), [report.in_text(found).replace("\n", " ")], [report.page(found)]):
        assert words in " ".join(said)
    assert findings.verdicts(found)["rescored"] == dict(runs=2, without=0)
    # the same once more takes no second time, another result does
    score, scored = trial.score_as_planned, []
    monkeypatch.setattr(trial, "score_as_planned", lambda *args: scored.append(1) or score(*args))
    assert results.collect(study, "test")["rescored"] == again and not scored
    folder = Path("out/trials", again["runs"][0])
    scaled(folder, 1 + 1e-9)
    assert results.collect(study, "test")["rescored"] == again and len(scored) == 1
    # of those without a checkpoint none can be drawn
    for gone in Path("out/trials").glob("*/best.pt"):
        gone.unlink() if gone.parent != folder else None
    found = results.collect(study, "test")
    assert vars(found["rescored"]) == dict(runs=[folder.name], without=12)
    words = ("1 of 13 runs was scored once more from its checkpoint and gave its score; 12 of 13 have none "
             "here.")
    assert words in findings.remarks(found)


@pytest.mark.parametrize("keys, done, n", [
    ({}, 1, 1), ({}, 10, 1), ({}, 11, 2), (dict(rescore=3), 40, 3), (dict(rescore=0), 40, 0),
    (dict(report_only=True), 40, 0), (dict(report_only=True, rescore=2), 40, 2)], ids=str)
def test_one_run_in_ten_is_drawn_or_as_many_as_are_asked_for(keys, done, n):
    config = StudyConfig(mechanisms=["xsa"], **keys)
    assert rescoring.how_many(config, done, nothing_runs=True) == n
    assert rescoring.how_many(config, done, nothing_runs=False) == (config.rescore or 0)
    folders = [Path(f"{i:016x}") for i in range(done)]
    drawn = rescoring.draw(folders, n)
    assert len({*drawn}) == n and drawn == rescoring.draw(folders[::-1], n)
    assert rescoring.draw(folders, done) != folders or done == 1


def test_runs_without_a_checkpoint_are_counted(finished, here):
    study, found = finished
    unknown = but(found, rescored=None)
    assert findings.rescored_sentence(unknown) is None and findings.verdicts(unknown)["rescored"] is None
    for path in Path("out/trials").glob("*/best.pt"):
        path.unlink()
    again = Study(replace(study.config, out_dir="out/elsewhere"), "test")
    again.run(here)
    again = results.collect(again, "test")
    assert vars(again["rescored"]) == dict(runs=[], without=13)
    words = "No run was scored once more from its checkpoint; 13 of 13 have none here."
    assert words in findings.remarks(again)


def test_over_several_texts_they_are_counted_together(finished):
    _, found = finished
    both = effects.pooled(effects.together(dict(a=found, b=found), "both", ""))
    assert vars(both["rescored"]) == dict(runs=2 * found["rescored"]["runs"], without=0)
    old = effects.together(dict(a=found, b=but(found, rescored=None)), "both", "")
    assert effects.pooled(old)["rescored"] is None


# ---- other tokens than the plain GPT's ----

@pytest.mark.parametrize("flags", [dict(max_iters=12), dict(batch_size=8), dict(grad_accum=2)], ids=str)
def test_a_variant_that_trains_on_other_tokens_says_so(plain, here, flags):
    study = study_of(plain, mechanisms=["output_gate"], variants={"x": flags}, match_parameters=False)
    study.run(here)
    found = results.collect(study, "test")
    head, rows, _ = findings.verdicts_table(found)
    assert {row[0]: row[head.index("tokens ×")] for row in rows} == {
        "plain GPT": "1", "output_gate": "1.00", "x": "2.00"}
    words = "x trains on 2.00 times the plain GPT's tokens"
    assert f"{words}: that alone may make a difference." in findings.notices(found)
    assert words in report.in_text(found).replace("\n", " ")
    assert words in html.unescape(report.page(found))
    row, = (row for row in findings.verdicts(found)["comparisons"] if row["variant"] == "x")
    assert row["tokens_ratio"] == 2.0
    alone, = (c for c in found["comparisons"] if c["variant"] == "x")
    assert "; it trains on 2.00 times the plain GPT's tokens" in findings.headline(
        but(found, comparisons=[alone]))
    alone["verdict"] = "better"
    assert words in findings.headline(found)


def test_nothing_is_said_of_tokens_where_they_are_the_same(finished):
    _, found = finished
    assert "tokens ×" not in findings.verdicts_table(found).head
    assert "times the plain GPT's tokens" not in report.in_text(found)
    assert {row["tokens_ratio"] for row in findings.verdicts(found)["comparisons"]} == {1.0}


def test_a_variant_trained_on_documents_has_the_tokens_that_it_was_trained_on(plain, here, tmp_path):
    text = b"".join(b"%d plus %d\n\n" % (i % 13, i % 7) for i in range(2000))
    splits = dict(train=text[:18000], val=text[18000:20000], test=text[:1000])
    folder = write_dataset(tmp_path / "short", splits)
    study = study_of(plain, mechanisms=[], variants={"x": dict(documents=8)}, match_parameters=False,
                     settings=dict(dataset=str(folder)))
    study.run(here)
    found = results.collect(study, "test")
    own, all_of_them = (found["arms"][name]["tokens"] for name in ("x", "plain"))
    logged = [trial.rows(study.runs.folders["judge", "x", seed])[-1]["tokens"] for seed in (1, 2)]
    assert own == sum(logged) / 2 < all_of_them == 6 * 4 * 16
    assert any(f"x trains on {own / all_of_them:.2f} times" in line for line in findings.notices(found))


@pytest.mark.slow
@pytest.mark.parametrize("key", ["data", "train", "model", "score"])
def test_runs_of_other_data_or_flags_are_never_taken(finished, here, key):
    study, found = finished
    change_trials(lambda spec: {**spec, key: {**spec[key], "more": "1"}})
    here.started = []
    Study(replace(study.config, out_dir="out/a", accept_code=True), "test").run(here)
    assert len(here.started) == len(found["runs"])


@pytest.mark.slow
def test_runs_of_other_code_in_out_trials_count_only_where_that_is_accepted(finished, here, monkeypatch,
                                                                            capsys):
    study, found = finished
    monkeypatch.setattr(digest, "code_digest", lambda *args, **keys: "tomorrow's")
    n = len(found["runs"])
    planned = Study(replace(study.config, out_dir="out/a"), "test")
    planned.run(None)
    assert f"{n} of them to do" in plan_of(planned)
    words = f"{n} runs of out/trials do not count, since other code or other libraries made them; --accept"
    assert words in " ".join(plan_of(planned).split())
    report = Study(replace(study.config, out_dir="out/d", report_only=True), "test")
    report.run(None)
    assert "do not count, since other code" in capsys.readouterr().out
    fresh = Study(replace(study.config, out_dir="out/c", fresh=True), "test")
    fresh.run(None)  # trains all of them because that was asked for
    assert "not count" not in plan_of(fresh)
    here.started = []
    taking = Study(replace(study.config, out_dir="out/b", accept_code=True), "test")
    taking.run(here)
    again = results.collect(taking, "test")
    row, = again["reused"]
    assert here.started == [] and (row["source"], row["runs"], row["other_code"]) == ("out/trials", n, n)
    assert again["comparisons"] == found["comparisons"]
    # what is damaged does not count for another reason, and what is no run of ours is passed over
    next(Path("out/trials").glob("*/nats.npy")).unlink()
    foreign = {"foreign": '{"train": null}', "note": "[1]", "cut": "{", "other": '{"train": {}}'}
    for folder, text in foreign.items():
        Path("out/trials", folder).mkdir()
        Path("out/trials", folder, "result.json").write_text("{}")
        Path("out/trials", folder, "trial.json").write_text(text)
    less = Study(replace(study.config, out_dir="out/e"), "test")
    less.run(None)
    assert len(less.runs.refused) == n - 1


@pytest.mark.slow
def test_fresh_trains_everything_anew_and_says_how_many_scores_agree(
        finished, here, plain, monkeypatch, capsys):
    study, found = finished
    monkeypatch.setattr(compare, "place_for", lambda config: here)
    n, here.started = len(found["runs"]), []
    one = next(Path("out/trials").glob("*/result.json"))
    result = json.loads(one.read_text())
    double = {key: 2 * result[key] for key in ("nats", "bpb")}
    np.save(one.with_name("nats.npy"), np.load(one.with_name("nats.npy")) * 2)
    one.write_text(json.dumps({**result, **double}))
    argv = ["--base", str(plain), "--device=cpu", "--seeds=5,6,7", "--plain_seeds=4", "--budgets=[0.5]",
            "--mechanisms=output_gate,unet_concat", "--settings={'n_layer': 2}"]
    main([*argv, "--fresh", "--out_dir=out/b"])
    said = capsys.readouterr().out
    assert len(here.started) >= n and {folder.parent for folder in here.started} == {Path("out/b/fresh")}
    words = f"Trained anew: {n - 1} of {n} scores are those that were there, to the last digit; the others"
    assert words in said
    # what was trained last is what counts from now on
    assert json.loads(one.read_text())["bpb"] == result["bpb"]
    assert not list(Path("out/b/fresh").glob("*/result.json"))
    here.started = []
    main([*argv, "--out_dir=out/c"])
    assert here.started == []


@pytest.mark.slow
def test_a_fresh_study_that_was_stopped_says_what_it_goes_on_with(finished, here, capsys):
    study, found = finished
    fresh = replace(study.config, out_dir="out/b", fresh=True)
    Study(fresh, "test").run(here)
    assert "--fresh goes on" not in capsys.readouterr().out
    here.started = []
    Study(fresh, "test").run(here)  # the first one ended before its runs were put into out/trials
    n = len(found["runs"])
    assert here.started == [] and f"stopped: {n} finished runs in out/b/fresh;" in capsys.readouterr().out


@pytest.fixture
def other_text(tmp_path_factory):
    """A second byte dataset, of other text."""
    text = b"".join(b"%d times %d is %d.\n" % (i % 13, i % 7, i % 13 * (i % 7)) for i in range(2000))
    return write_dataset(tmp_path_factory.mktemp("data") / "products",
                         {"train": text[:20000], "val": text[20000:22000], "test": text[22000:23500]})


@pytest.mark.slow
def test_a_study_on_two_texts_is_one_analysis_and_the_second_chooses_nothing(
        plain, here, bytes_data, other_text, monkeypatch, capsys):
    monkeypatch.setattr(compare, "place_for", lambda config: here)
    texts = [str(bytes_data), str(other_text)]
    argv = ["--base", str(plain), "--device=cpu", "--mechanisms=output_gate,sink,xsa", f"--texts={texts}",
            "--seeds=1,2,3", "--plain_seeds=4", "--budgets=[0.5]", "--screen", "--best=1", "--worst=1",
            "--screen_seeds=9,8", "--tune_lr", "--out_dir=out/two"]
    main([*argv, "--dry_run"])
    assert f"is trained again on {other_text}" in capsys.readouterr().out and not here.started
    main(argv)
    found = results.read("out/two/results.json.gz")
    first, second = found["texts"].values()
    assert [study["data"]["dataset"] for study in (first, second)] == ["sums", "products"]
    assert {run["spec"]["score"]["split"] for run in second["runs"].values()} == {"test"}
    assert {run["spec"]["data"]["train"] for run in first["runs"].values()}.isdisjoint(
        run["spec"]["data"]["train"] for run in second["runs"].values())
    judged = first["screen"]["chosen"]
    assert len(judged) == 2 and second["screen"] is None and not second["tuned"]
    assert findings.at_own_rates(second) and "found on sums." in " ".join(findings.notices(second))
    for name in ("plain", *judged, "plain x 0.5"):  # the same models, at the rates that the first text chose
        own, other = ([study["runs"][run]["spec"] for run in study["arms"][name]["runs"]]
                      for study in (first, second))
        assert [spec["model"] for spec in own] == [spec["model"] for spec in other]
        assert [{**spec["train"], "dataset": 0} for spec in own] == [{**spec["train"], "dataset": 0}
                                                                  for spec in other]
    # by hand: the mean over the texts of each seed, then as any study
    means = {name: {seed: (a + b) / 2 for seed, a, b in zip(
        first["arms"][name]["seeds"], first["arms"][name]["bpb"], second["arms"][name]["bpb"])}
        for name in first["arms"] if name in second["arms"]}
    assert len(means["plain"]) == 4
    row = next(c for c in found["together"]["comparisons"] if c["variant"] == judged[0] and not c["equal"])
    of_two = np.mean([*means[judged[0]].values()]) - np.mean([*means["plain"].values()])
    assert row["n"] == 3 and math.isclose(row["mean"], of_two, abs_tol=1e-4)
    page = Path("out/two/report.html").read_text()
    assert "On each text" in page and all(f"{text}/report.html" in page for text in ("sums", "products"))
    assert Path("out/two/products/report.html").is_file() and Path("out/two/sums/forest.png").is_file()
    assert "sums and products" in page and row["verdict"] in page
    table = findings.texts_table(effects.pooled(found))
    assert table.head[5:7] == ("on sums", "on products") and len(table.rows) == 3
    assert "all of them the same" in results.recheck("out/two/results.json.gz")
    found["together"]["comparisons"][0]["mean"] += 0.01
    results.write(found, "out/two")
    with pytest.raises(UserError, match="1 of"):
        results.recheck("out/two/results.json.gz")


def on_two(plain, bytes_data, other_text, *more):
    """A command line of a study on two texts, its report in out/two."""
    return ["--base", str(plain), "--device=cpu", f"--texts={[str(bytes_data), str(other_text)]}",
            "--seeds=1,2", "--plain_seeds=2", "--budgets=[]", "--out_dir=out/two", *more]


@pytest.mark.slow
def test_a_report_of_the_first_text_is_written_again_while_the_second_has_none(
        plain, here, bytes_data, other_text, monkeypatch):
    monkeypatch.setattr(compare, "place_for", lambda config: here)
    run = here.run

    def stopped(folder):
        if "products" in json.loads((folder / "trial.json").read_text())["train"]["dataset"]:
            raise KeyboardInterrupt
        return run(folder)

    argv = on_two(plain, bytes_data, other_text, "--mechanisms=sink")
    main([*argv, "--report_only"])
    monkeypatch.setattr(here, "run", stopped)
    with pytest.raises(SystemExit):
        main(argv)
    main([*argv, "--report_only"])
    studies = results.read("out/two/results.json.gz")["texts"]
    assert [study["done"] for study in studies.values()] == [4, 0]
    assert not results.holds_runs("out/two/products/results.json.gz")
    assert results.holds_runs("out/two/sums/results.json.gz")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["sums", "both"])
def test_what_is_better_over_all_texts_meets_the_same_wider_plain_gpt_on_each(
        plain, here, bytes_data, other_text, monkeypatch, where):
    """Better on the first text alone, and over both alone: the plain GPT of its parameters is on both."""
    monkeypatch.setattr(compare, "place_for", lambda config: here)
    monkeypatch.setattr(compare.Study, "seem_better", lambda study: ["output_gate"] * (
        study.builder.data.meta["name"] == where))
    monkeypatch.setattr(effects, "seem_better_over_texts", lambda texts: ["output_gate"] * (where == "both"))
    monkeypatch.setattr(VariantBuilder, "same_parameters", lambda builder, variant, baselines: builder.wide(
        70 if builder.data.meta["name"] == "sums" else 71))  # as where another vocabulary counts
    main(on_two(plain, bytes_data, other_text, "--mechanisms=output_gate,sink"))
    found = results.read("out/two/results.json.gz")
    for study in (*found["texts"].values(), effects.pooled(found)):
        assert study["pairs"][2:] == [["output_gate", "plain, MLP 70", ["parameters"]]]
        assert len(effects.finished_scores(study["arms"]["plain, MLP 70"])) == 2
    assert len(findings.others(effects.pooled(found))) == 1
    assert results.read("out/two/products/results.json.gz") == found["texts"]["products"]


def test_what_seems_better_over_all_texts_is_by_the_mean_of_the_differences():
    def study(gain):
        scores = dict(plain=[3.00, 3.02, 2.98, 3.01], a=[2.99 - gain, 3.01 - gain, 3.00 - gain, 2.97 - gain],
                      b=[3.02, 2.99, 3.01, 3.00])
        arms = {name: dict(kind="variant", seeds=[1, 2, 3, 4], runs=[""] * 4, bpb=own)
                for name, own in scores.items()}
        return some(records.StudyResults, dict(
            arms=arms, pairs=[["a", "plain", []], ["b", "plain", []]], planned=8, done=8, runs={},
            failures=[], data=dict(tokens=1, bytes=1, of_bytes=1), alpha=0.05, margin=0.001))

    assert effects.seem_better_over_texts(dict(x=study(0.3), y=study(-0.1))) == ["a"]
    assert effects.seem_better_over_texts(dict(x=study(0.3), y=study(-0.4))) == []
    assert effects.seem_better_over_texts(dict(x=study(0.0), y=study(-0.01))) == []


@pytest.mark.slow
def test_a_run_that_fails_under_several_names_is_one_failed_run(plain, here, monkeypatch):
    run = here.run

    def diverges(folder):
        if json.loads((folder / "trial.json").read_text())["model"].get("output_gate") is None:
            return run(folder)
        (folder / "failed.txt").write_text("diverged")
        return "diverged"

    monkeypatch.setattr(here, "run", diverges)
    study = study_of(plain, tune_lr=True, screen_seeds=[9], match_parameters=False)
    study.run(here)
    found = results.collect(study, "")
    failed = found["planned"] - found["done"]
    assert len(found["failures"]) > failed == results.failures_in(found)
    assert any(f"{failed} failed runs are missing" in line for line in findings.notices(found))
    assert not any("not finished" in line for line in findings.notices(found))
    found["planned"] += 1
    assert any("not finished" in line for line in findings.notices(found))


@pytest.mark.slow
@pytest.mark.parametrize("verdict, failed, stays", [
    ("better", ("output_gate", "judge"), False), ("better", ("output_gate", "screen"), True),
    ("same", ("output_gate", "judge"), False), ("same", ("plain", "judge"), False),
    ("identical", ("output_gate", "judge"), False), ("identical", ("plain", "screen"), True),
    ("worse", ("output_gate", "judge"), True), ("worse", ("plain", "judge"), False),
    ("better", ("plain", "judge"), True)], ids=str)
def test_a_verdict_that_favours_a_side_whose_runs_failed_is_withheld(verdict, failed, stays, finished):
    _, found = finished
    shift = dict(better=-1.0, worse=1.0, same=1e-6, identical=0.0)[verdict]
    arms, plain = found["arms"], found["arms"]["plain"]
    scores = [2.0 + 1e-5 * i for i in range(len(plain["bpb"]))]
    plain["bpb"], arms["output_gate"]["bpb"] = scores, [score + shift for score in scores[:3]]
    found["failures"] = [dict(arm=failed[0], stage=failed[1], seed=1, why="killed", log="x")]
    row = next(row for row in effects.figures(found)["comparisons"] if row["variant"] == "output_gate")
    assert row["verdict"] == (verdict if stays else "undecided")
    assert row["words"].startswith(f"not called {verdict}, since 1 of") is not stays


@pytest.mark.slow
def test_more_tokens_a_step_count_as_more_flops(plain, here):
    study = study_of(plain, mechanisms=[], variants={"twice": dict(batch_size=8)}, budgets=[0.5],
                     match_parameters=False)  # SMALL has 4
    study.run(here)
    found = results.collect(study, "test")
    row, = found["comparisons"]
    assert row["equal_flops"]["ratio"] == pytest.approx(2.0)


@pytest.mark.slow
def test_a_damaged_plan_of_a_run_that_is_done_is_written_again(finished, here):
    study, found = finished
    folder = study.runs.folders["judge", "output_gate", 5]
    (folder / "trial.json").write_text("{")
    again = Study(study.config, "test")
    again.run(here)
    assert json.loads((folder / "trial.json").read_text()) == study.runs.specs[folder]
    assert results.collect(again, "test")["runs"] == found["runs"]


@pytest.mark.slow
def test_a_report_of_nothing_does_not_replace_one_of_something(plain, finished, refusal):
    study, _ = finished
    before = Path("out/test/results.json.gz").read_bytes()
    said = refusal(["--base", str(plain), "--mechanisms=sink", "--seeds=8,9", "--device=cpu", "--report_only",
                    "--out_dir=out/test"])
    assert "none is done with today's code" in said
    assert Path("out/test/results.json.gz").read_bytes() == before


@pytest.mark.slow
def test_a_report_of_less_does_not_replace_one_of_more(finished):
    """After an edit of one mechanism the plain GPT's runs are still done, and the mechanism's are not."""
    study, found = finished
    for seed in (5, 6):
        (study.runs.folders["judge", "output_gate", seed] / "result.json").unlink()
    less = Study(replace(study.config, report_only=True), "test")
    less.run(None)
    with pytest.raises(UserError, match="are not done with .*: 2, output_gate with seed 5 the first"):
        results.collect(less, "test")
    (study.out / "results.json.gz").unlink()
    assert results.collect(less, "test")["done"] == found["done"] - 2


def test_a_study_of_fewer_steps_and_a_part_of_the_split_says_so(plain, here):
    study = study_of(plain, settings=dict(max_iters=3), test_tokens=320, match_parameters=False)
    study.run(here)
    found = results.collect(study, "test")
    whole, size = found["of_scale"], found["data"]["of_bytes"]
    assert vars(whole) == dict(steps=6, tokens=6 * 4 * 16)
    assert findings.cut_of(found) == dict(steps=3, of_steps=6, tokens=3 * 4 * 16, of_tokens=6 * 4 * 16,
                                          split="test", bytes=320, of_bytes=size)
    assert findings.headline(found).startswith(
        "Short runs, 3 of the plain scale's 6 steps (192 of 384 tokens), scored on "
        f"{100 * 320 / size:.2g} % of the test split. ")


@pytest.mark.slow
def test_a_mechanism_that_does_nothing_is_identical_and_another_seed_is_not(plain, here):
    study = study_of(plain, mechanisms=["agency"], variants={"again": dict(seed=1000)}, plain_seeds=3)
    study.run(here)
    rows = {row["variant"]: row for row in results.collect(study, "test")["comparisons"]}
    assert rows["agency"]["verdict"] == "identical" and rows["agency"]["mean"] == 0.0
    assert "nothing acted" in rows["agency"]["words"] and rows["again"]["mean"] != 0.0


@pytest.mark.slow
def test_a_report_from_a_file_says_first_whether_its_runs_give_its_figures(finished, capsys):
    study, found = finished
    main(["--from_results=out/test/results.json.gz", "--out_dir=out/a"])
    assert "figures computed once more from its runs, all of them the same" in capsys.readouterr().out.split(
        "\n")[0]
    found["comparisons"][0]["mean"] -= 0.5
    results.write(found, study.out)
    main(["--from_results=out/test/results.json.gz", "--out_dir=out/a"])
    first = capsys.readouterr().out.split("\n")[0]
    assert first.startswith("NOT AS COMPUTED: out/test/results.json.gz: 1 of ") and "--recheck" in first


def test_the_verdicts_of_a_file_are_written_for_a_program_too(finished, refusal, capsys):
    _, found = finished
    main(["--from_results=out/test/results.json.gz", "--out_dir=out/a", "--json=verdicts.json"])
    assert json.loads(Path("verdicts.json").read_text()) == findings.verdicts(found)
    capsys.readouterr()
    said = refusal(["--recheck=out/test/results.json.gz", "--json=verdicts.json"])
    assert "json='verdicts.json' has nothing to hold: recheck judges nothing" in said


def test_a_report_of_an_unfinished_study_has_no_verdict_for_a_program(finished, plain, capsys):
    study, found = finished
    for seed in (6, 7):
        (study.runs.folders["judge", "output_gate", seed] / "result.json").unlink()
    argv = ["--base", str(plain), "--device=cpu", "--seeds=5,6,7", "--plain_seeds=4", "--budgets=[0.5]",
            "--mechanisms=output_gate,unet_concat", "--settings={'n_layer': 2}", "--out_dir=out/b"]
    main([*argv, "--report_only", "--json=verdicts.json"])
    told, kept = json.loads(Path("verdicts.json").read_text()), results.read("out/b/results.json.gz")
    n = found["planned"]
    for each in (told, kept):
        assert (each["finished"], each["planned"], each["done"]) == (False, n, n - 2)
    assert {c["verdict"] for c in told["comparisons"]} == {"unfinished"}
    assert [c["interim_verdict"] for c in told["comparisons"]] == [
        c["verdict"] for name in [c["variant"] for c in told["comparisons"]]
        for c in kept["comparisons"] if c["variant"] == name]
    assert "interim: " in capsys.readouterr().out and found["finished"] is True


def small_study(plain, here, monkeypatch):
    """compare(seeds, *more) -> what --json has of a study of sink with these seeds."""
    monkeypatch.setattr(compare, "place_for", lambda config: here)

    def call(seeds, *more):
        main(["--base", str(plain), "--device=cpu", "--mechanisms=sink", "--budgets=[]", f"--seeds={seeds}",
              "--match_parameters=False", "--json=v.json", *more])
        return json.loads(Path("v.json").read_text())
    return call


def seen(told):
    """[{variant: seeds}] of the other reports that --json names."""
    return [look["seeds"] for look in told["looks"]]


def test_a_study_says_which_runs_it_leaves_out_and_how_it_was_judged_before(plain, here, monkeypatch, capsys):
    """Three verdicts from the same runs, each as if it were the only one."""
    study = small_study(plain, here, monkeypatch)
    both = {side: dict(plain=seeds, sink=seeds) for side, seeds in (("two", [1, 2]), ("four", [1, 2, 3, 4]))}
    first = study("1,2")
    assert first["left_out"] == first["looks"] == []
    more = study("1,2,3,4")
    assert more["left_out"] == [] and seen(more) == [both["two"]]
    look, = more["looks"]
    assert (look["folder"], look["finished"], look["planned"], look["done"]) == ("out/sink-plain", True, 4, 4)
    capsys.readouterr()
    chosen = study("2,4")
    assert chosen["left_out"] == [dict(variant="plain", seeds=[1, 3]), dict(variant="sink", seeds=[1, 3])]
    assert sorted(seen(chosen), key=str) == [both["four"], both["two"]]
    left, judged = chosen["notices"][:2]
    assert left.startswith("Finished runs of the same variants are left out: 2 of plain GPT (seeds 1, 3) "
                           "and 2 of sink (seeds 1, 3).")
    assert judged.startswith("The same variants were judged by other runs: on ")
    assert "by seeds 1 to 4 of plain GPT and sink (out/sink-plain-2)" in judged
    printed, page = capsys.readouterr().out, Path("out/sink-plain-3/report.html").read_text()
    main(["--from_results=out/sink-plain-3/results.json.gz"])
    for text in (printed, page, capsys.readouterr().out):
        assert all("".join(line.split()) in "".join(text.split()) for line in (left, judged))
    # the same report once more is no other one; without runs or with other ones there is nothing to say
    assert study("2,4") == chosen
    assert study("5,6")["left_out"] == [dict(variant=name, seeds=[1, 2, 3, 4]) for name in ("plain", "sink")]
    other = study("5,6", "--mechanisms=xsa", "--out_dir=out/x")
    assert other["left_out"] == other["looks"] == []  # of the plain GPT's seeds, which nobody chose
    of_other_steps = study("1,2", "--settings={'max_iters': 5}", "--out_dir=out/y")
    assert of_other_steps["left_out"] == of_other_steps["looks"] == []
    assert "all of them the same" in results.recheck("out/sink-plain-3/results.json.gz")


def test_what_a_study_was_judged_by_stays_with_its_results(plain, here, monkeypatch):
    """Also where out/trials is gone, and where the file does not say what else judged."""
    study = small_study(plain, here, monkeypatch)
    study("1,2", "--out_dir=out/a")
    study("1,2,3", "--out_dir=out/a")
    shutil.rmtree("out/trials")
    two, three = (dict(plain=seeds, sink=seeds) for seeds in ([1, 2], [1, 2, 3]))
    chosen = study("2,3", "--out_dir=out/a")
    assert sorted(seen(chosen), key=str) == [three, two]
    assert chosen["left_out"] == [dict(variant="plain", seeds=[1]), dict(variant="sink", seeds=[1])]
    before = results.read("out/a/results.json.gz")
    results.write(but(before, looks=None, left_out=None), "out/a")
    shutil.rmtree("out/trials")
    assert seen(study("5,6", "--out_dir=out/a")) == [dict(plain=[2, 3], sink=[2, 3])]


def test_a_report_of_a_part_of_the_runs_is_a_look_too(plain, here, monkeypatch):
    study = small_study(plain, here, monkeypatch)
    study("1,2,3")
    assert study("1,2,3,4", "--report_only")["looks"] == []  # of the same runs
    (next(Path("out/trials").glob("*/result.json"))).unlink()
    told = study("1,2,3,4", "--report_only", "--out_dir=out/a")
    assert told["finished"] is False and told["done"] == 5
    looks = study("1,2,3,4")["looks"]
    assert [(look["finished"], look["done"]) for look in looks] == [(True, 6), (False, 5)]
    assert sorted(map(len, looks[1]["seeds"].values())) == [2, 3]


def test_damaged_records_of_reports_stop_no_study(plain, here, monkeypatch):
    study = small_study(plain, here, monkeypatch)
    study("1,2")
    look, = Path("out/trials/looks").glob("*.json")
    look.with_name("other.json").write_text('{"date": 3}')
    look.with_name("half.json").write_text('{"date')
    folder = next(Path("out/trials").glob("*/result.json")).parent
    shutil.copytree(folder, "out/trials/copy")
    Path("out/trials/copy/trial.json").write_text('{"model": {}}')
    assert seen(study("1,2,3")) == [dict(plain=[1, 2], sink=[1, 2])]


@pytest.mark.parametrize("more", [[], ["--from_results=out/sink-plain/results.json.gz"],
                                  ["--scores=scores.csv"]], ids=["study", "results", "scores"])
def test_a_report_is_written_without_a_reader(more, plain, here, monkeypatch, tmp_path):
    """As by `compare.py ... | head -1`, which closes the pipe behind the first line."""
    study = small_study(plain, here, monkeypatch)
    if more:
        study("1,2")
        Path("scores.csv").write_text("variant,seed,score\na,1,2\na,2,2.1\nb,1,3\nb,2,3.1\n")
        Path("v.json").unlink()
    with unread():
        if more:
            main([*more, "--json=v.json", "--out_dir=out/b"])
        else:
            study("1,2", "--out_dir=out/b")
    assert json.loads(Path("v.json").read_text())["comparisons"]
    assert Path("out/b/report.html").is_file() and Path("out/b/forest.png").is_file()


def test_a_study_that_is_stopped_leaves_no_verdict_of_another_day(plain, here, monkeypatch, capsys):
    study = small_study(plain, here, monkeypatch)
    study("1,2")

    def interrupted(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(compare, "finished", interrupted)
    with pytest.raises(SystemExit) as e:
        study("1,2,3")
    assert e.value.code == 130 and not Path("v.json").exists() and Path("v.json.old").is_file()
    assert f"is in {Path('v.json.old').resolve()}" in capsys.readouterr().err


def test_a_run_is_gone_only_when_the_new_one_is_in_its_place(finished, monkeypatch):
    study, _ = finished
    folder = next(iter(study.runs.folders.values()))
    new = Path("out/b/fresh", folder.name)
    shutil.copytree(folder, new)
    monkeypatch.setattr(study.runs, "folders", {("judge", "plain", 5): new})

    def full(here, there):
        raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as disk:
        disk.setattr(shutil, "move", full)
        with pytest.raises(OSError):
            study.runs.take_into_trials()
    assert trial.done(folder) and trial.done(new)
    study.runs.take_into_trials()
    assert trial.done(folder) and not new.exists()


def test_flags_by_nanogpts_names_and_a_shortened_warm_up_are_those_of_their_runs(plain, here):
    study = study_of(plain, mechanisms=[], seeds=[1, 2], plain_seeds=2, match_parameters=False, budgets=[],
                     variants={"low": dict(learning_rate=2e-3), "warm": dict(warmup_iters=2000)})
    study.run(here)
    found = results.collect(study, "test")
    assert found["arms"]["low"]["flags"]["adamw_lr"] == 2e-3
    assert "learning_rate" not in found["arms"]["low"]["flags"]
    results.write(found, ".")
    assert "all of them the same" in results.recheck("results.json.gz")
    found["arms"]["low"]["flags"]["adamw_lr"] = 3e-3  # control
    results.write(found, ".")
    with pytest.raises(UserError):
        results.recheck("results.json.gz")


def test_what_cannot_be_sampled_costs_the_report_its_sample_alone(finished, monkeypatch, capsys):
    study, found = finished
    for kept in Path("out/trials").glob("*/inspected.json"):
        kept.unlink()

    def fails(folder):
        raise ValueError("no cache here")
    monkeypatch.setattr(results, "inspect", fails)
    again = results.collect(study, "test")
    assert again["comparisons"] == found["comparisons"] and again["arms"]["plain"]["sample"] is None
    assert "the report has no sample of out/trials/" in capsys.readouterr().out


def test_a_study_in_minutes_counts_runs_that_are_done(finished, plain, monkeypatch):
    """Else the same command would be a larger study when it goes on."""
    study, _ = finished
    seconds = []
    monkeypatch.setattr(costs, "probe", lambda *args: (0.1, 0.0))
    monkeypatch.setattr(compare.budget, "fitted", lambda config, clock, steps: seconds.append(clock(config)))
    config = replace(study.config, minutes=5.0)
    compare.within_minutes(config, "test")
    shutil.rmtree("out/trials")
    compare.within_minutes(config, "test")
    assert seconds[0] == seconds[1] > 0


def test_a_named_mechanism_is_screened_unless_that_is_switched_off():
    assert StudyConfig(mechanism="xsa").screen is True
    assert StudyConfig(mechanism="xsa", screen=False).screen is False
    assert StudyConfig(mechanisms=["xsa"]).screen is False
    assert not StudyConfig(mechanism="xsa", screen=False, seeds=[101, 102, 103]).problems()


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted([*(ROOT / "results").glob("*.json.gz"),
                                         *(ROOT / "results").glob("ladder*/*.json.gz")]),
                         ids=lambda path: str(path.relative_to(ROOT / "results")))
def test_shipped_results_are_what_their_runs_give_and_make_their_report(path, tmp_path, capsys,
                                                                        own_mechanisms_go):
    main([f"--recheck={path}"])
    main([f"--from_results={path}", f"--out_dir={tmp_path}"])
    study = results.read(path)
    said = " ".join(capsys.readouterr().out.split())
    assert study["name"] in said or findings.question_of(study) in said
    assert study["command"].startswith("python compare.py ")
    row = next(line for line in (ROOT / "results/README.md").read_text().splitlines()
               if f"`{path.name}`" in line or f"`{path.parent.name}/`" in line)
    for each in records.studies_in(study).values():
        assert each["done"] == each["planned"] or "missing" in row, "an unfinished study is called that"


@pytest.mark.slow
def test_a_table_is_written_between_its_marks_and_a_wrong_one_is_named(finished, monkeypatch, tmp_path):
    _, found = finished
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "pages", lambda: ["page.md"])
    monkeypatch.setattr(tables, "PICTURES", {"differences.png": ["results.json.gz"]})
    (tmp_path / "results").mkdir()
    results.write(found, tmp_path / "results")
    text = "before\n<!-- table: verdicts results.json.gz unet_concat -->\nold\n<!-- end -->\nafter\n"
    (tmp_path / "page.md").write_text(text)
    assert tables.write() == ["page.md: tables written from results/",
                              "differences.png: drawn from results/results.json.gz"]
    assert tables.write() == [] and (tmp_path / "differences.png").read_bytes().startswith(b"\x89PNG")
    after = (tmp_path / "page.md").read_text()
    assert after.startswith("before\n<!--") and after.endswith("<!-- end -->\nafter\n") and "old" not in after
    assert f"{np.mean(found['arms']['unet_concat']['bpb']):.4f}" in after and "output_gate" not in after
    with pytest.raises(UserError, match="page: no table is called verdict; there are verdicts"):
        tables.filled(text.replace("verdicts", "verdict"), "page")


# ---- the command line ----

@pytest.mark.slow
def test_a_plan_runs_nothing(plain, capsys):
    main(["--base", str(plain), "--mechanisms=output_gate,xsa", "--dry_run", "--device=cpu", "--screen",
          "--best=1", "--worst=0"])
    said = capsys.readouterr().out
    assert "plain x 0.7" in said and "xsa" in said
    assert re.search(r"about (1 minute|\d+ minutes|[\d.]+ hours), \d+ at once", said)
    # 3 variants x 2 seeds on validation, then 5 of one variant, 5 of the plain GPT and of each of 3 budgets
    assert "31 runs, 31 of them to do" in said and not Path("out").exists()


def test_a_plan_shows_the_whole_of_long_flags(plain, capsys):
    """They ended after 70 characters."""
    flags = dict(sentinel="hard_concrete", sentinel_init=2.5, sentinel_coef=0.125, mechanism_lr=0.0625,
                 head_ids=[[0, 1]], output_gate="headwise")
    argv = ["--base", str(plain), f"--variants={dict(long=flags)}", "--dry_run", "--device=cpu", "--seeds=1",
            "--budgets=[]", "--plain_seeds=1"]
    main(argv)
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("long "))
    column = lines[0].index("flags")
    rows = [lines[at][column:], *(line.strip() for line in lines[at + 1:] if line[:column].strip() == "")]
    assert len(rows) > 1 and all(len(row) <= 70 for row in rows)
    assert " ".join(rows) == " ".join(f"{key}={value}" for key, value in flags.items())
    assert "2 runs, 2 of them to do" in "\n".join(lines)


def column_of(plan, title):
    """{variant: cell} of a column of a plan's table."""
    head, *rows = [re.split("  +", line) for line in plan.splitlines()]
    return {row[0]: row[head.index(title)] for row in rows if len(row) > 3}


def training_flops_of(found):
    """{variant: training FLOPs} as the report's table of costs shows them."""
    head, rows, _ = findings.costs_table(found)
    return {name: row[head.index("training FLOPs")].split(" (")[0] for name, row in zip(found["arms"], rows)}


@pytest.mark.slow
def test_a_plan_has_the_training_flops_of_the_report(plain, here, monkeypatch, capsys):
    """--dry_run once showed what the algorithm needs, and the report what the kernels execute."""
    monkeypatch.setattr(compare, "place_for", lambda config: here)
    monkeypatch.setattr(costs, "seconds_per_run", lambda *args: 1.0)
    argv = ["--base", str(plain), "--device=cpu", "--mechanisms=constraint_a,routing_inf,unet_concat,window",
            "--settings={'n_layer': 2, 'n_head': 4}", "--seeds=1,2", "--plain_seeds=2", "--budgets=[0.5]",
            "--out_dir=out/a"]
    main([*argv, "--dry_run"])
    planned = column_of(capsys.readouterr().out, "training FLOPs")
    assert set(planned) == {"plain", "plain x 0.5", "constraint_a", "routing_inf", "unet_concat", "window"}
    main([*argv, "--match_parameters=False"])
    found = results.read("out/a/results.json.gz")
    assert training_flops_of(found) == planned
    for name, arm in found["arms"].items():  # those that differences at equal FLOPs are read at
        ratio = effects.training_flops(arm) / effects.training_flops(found["arms"]["plain"])
        assert name in ("plain", "plain x 0.5") or ratio == next(
            c["equal_flops"]["ratio"] for c in found["comparisons"] if c["variant"] == name)
        needed = arm["flops_per_token"] * arm["tokens"]
        assert findings.short(needed) != planned[name]  # what the plan showed before


@pytest.mark.slow
def test_the_plan_of_the_demo_has_the_training_flops_of_its_report(tmp_path, bytes_data, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(costs, "seconds_per_run", lambda *args: 1.0)
    settings = dict(dataset=str(bytes_data), max_iters=320, eval_interval=80)
    main([str(ROOT / "config/studies/demo.py"), "--dry_run", "--device=cpu", f"--settings={settings}"])
    planned = column_of(capsys.readouterr().out, "training FLOPs")
    assert planned == training_flops_of(results.read(ROOT / "results/demo.json.gz")) and len(planned) == 3


@pytest.mark.slow
def test_a_plan_without_its_data_names_the_command_that_makes_it(monkeypatch, capsys, own_mechanisms_go):
    monkeypatch.chdir(ROOT)

    def not_there(name):
        raise missing("wikitext2_byte")
    monkeypatch.setattr("nanoheads.config.Dataset", not_there)
    main(["config/studies/controls.py", "--dry_run", "--device=cpu"])
    said = capsys.readouterr()
    *rows, last = said.out.splitlines()
    assert last.startswith("dataset wikitext2_byte is not prepared; run: python ")
    assert "data/wikitext2/prepare.py --encoding=byte;" in last and said.err == ""
    named = [name for row in rows if (name := re.split("  +", row)[0].strip())]  # long flags go on below
    assert named == [
        "variant", "plain", "control_noise", "short_conv", "query_gain", "parameters without effect",
        "AdamW for Muon", "learned positions for RoPE", "no QK-norm", "QK-norm without a gain", "plain again",
        "plain x 0.7", "plain x 1.4", "plain x 2"]
    with pytest.raises(SystemExit, match="is not prepared"):  # a study itself is refused
        main(["config/studies/controls.py", "--device=cpu"])


@pytest.mark.slow
def test_the_plan_of_the_controls_reads_as_a_plan(
        tmp_path, bytes_data, monkeypatch, capsys, own_mechanisms_go):
    """It began with two lines that called a promise broken: parameters without effect have no gradient."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(trial, "TRIALS", tmp_path)
    monkeypatch.setattr(costs, "seconds_per_run", lambda *args: 1.0)
    main(["config/studies/controls.py", "--dry_run", "--device=cpu",
          f"--settings={dict(dataset=str(bytes_data))}"])
    said = capsys.readouterr()
    assert said.out.startswith("variant ") and "broken" not in said.out and said.err == ""
    assert "\nNote: 'parameters without effect' is compared all the same, although " in said.out
    assert said.out.count("Note: ") == 1 and "75 runs, 75 of them to do" in said.out


@pytest.fixture
def two_gpus(monkeypatch):
    """Make believe that there are two; what is computed on them is computed on the CPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **keys: empty(
        *shape, device=None if "cuda" in str(device) else device, **keys))


def test_which_gpu_and_how_many_runs_on_it_change_no_hash(plain, two_gpus):
    specs = []
    for keys in (dict(), dict(device="cuda:1"), dict(jobs_per_gpu=4)):
        study = study_of(plain, **{"device": "cuda", **keys})
        specs.append(study.runs.spec(study.builder.plain, 1, "test"))
    assert all(spec == specs[0] for spec in specs) and specs[0]["train"]["device"] == "cuda"


def test_a_study_hands_its_keys_to_the_queue(plain, two_gpus):
    config = study_of(plain, device="cuda:1", jobs_per_gpu=3).config
    place = compare.place_for(config)
    assert place.slots == 3 and [*place.room.running] == ["1"]


@pytest.mark.slow
def test_times_are_those_of_the_gpu_that_is_named(plain, two_gpus, here, monkeypatch, capsys):
    """Of the plan, and of steps after the runs."""
    devices = []
    monkeypatch.setattr(costs, "seconds_per_run", lambda variant, device, *rest: devices.append(device) or 60)
    main(["--base", str(plain), "--mechanisms=output_gate", "--dry_run", "--device=cuda:1",
          "--jobs_per_gpu=3"])
    said = capsys.readouterr().out
    assert "3 at once" in said and "3 runs share a GPU, and each takes longer than alone" in said
    ratios = costs.step_time_ratios
    monkeypatch.setattr(costs, "step_time_ratios",
                        lambda found, plain, device, *rest: devices.append(device) or ratios(found, plain))
    study = study_of(plain, device="cuda:1", seeds=[1], plain_seeds=1)
    study.runs.plan("judge", [study.builder.plain], [1])
    results.time_ratio(study, study.variants["output_gate"], nothing_runs=True)
    assert devices == ["cuda:1"] * 2


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_one_line(plain, two_gpus, refusal):
    for more in ([], ["--dry_run"]):
        said = refusal(["--base", str(plain), "--mechanisms=output_gate", "--device=cuda:2", *more])
        assert said == "compare: device=cuda:2 cannot be used: GPUs here: 2, and the last one is cuda:1"


@pytest.mark.parametrize("flags",
                         [{}, *({"routing": "moh"}, {"acag": "elementwise", "output_gate": "elementwise"}),
                          ALL_ON, MECHANISMS["a2c_published"]])
def test_head_statistics_are_one_row_a_layer(flags):
    model = GPT(GPTConfig(vocab_size=9, n_layer=3, n_head=4, n_embd=32, block_size=8, **flags)).eval()
    with torch.no_grad():
        seen = results.heads_of(model, torch.randint(9, (2, 9)))
    assert {"entropy", "concentration"} <= set(seen) and json.dumps(seen)
    assert ("gate" in seen) == bool(model.config.sentinel) and (
        "routing_load" in seen) == bool(model.config.routing)
    for name, layers in seen.items():
        if isinstance(layers, list):
            assert len(layers) == (3 if name != "router_gates" else 1), name
    assert all(len(row) == 4 + block.attn.n_extra for row, block in zip(seen["entropy"], model.transformer.h))


# ---- a damaged results file ----

def path_of(found, *keys):
    """The dict or list that holds the last of these keys; None stands for the first run or arm there is."""
    for key in keys[:-1]:
        found = found[next(iter(found)) if key is None else key]
    return found


DAMAGE = [
    (["arms"], [], "arms is [], not a dict"),
    (["arms"], {}, "arms has no plain"),
    (["arms"], ..., "arms is missing"),
    (["arms", "plain"], 3, "arms.plain is 3, not a dict"),
    (["arms", "plain", "bpb"], ["text"], "arms.plain.bpb[0] is 'text', not a number"),
    (["arms", "plain", "seeds"], [], "arms.plain has 0 seeds"),
    (["arms", "plain", "params"], math.nan, "arms.plain.params is nan, not a number"),
    (["arms", "plain", "tokens"], 0, "above 0"),
    (["runs"], [1], "runs is [1], not a dict"),
    (["runs", "0123"], 5, "runs.0123 is 5, not a dict"),
    (["runs", None, "spec"], None, "spec is None, not a dict"),
    (["runs", None, "spec", "model"], "text", "spec.model is 'text', not a dict"),
    (["runs", None, "nats"], "text", "nats is 'text', not a number"),
    (["runs", None, "nats"], 10**400, "nats is 1000"),
    (["runs", None, "nats"], 1e308, "nats is 1e+308, not a number up to 1e+30"),
    (["runs", None, "bytes"], 0, "bytes is 0, and must be above 0"),
    (["runs", None, "bpb"], True, "bpb is True, not a number"),
    (["runs", None, "block_nats"], [[1]], "block_nats[0] is [1], not a number"),
    (["pairs"], [["plain", "nobody", []]], "pairs: 'nobody' is not one of its arms"),
    (["pairs"], [[["output_gate"], "plain", []]], "is not a variant, a baseline and what is equal"),
    (["pairs"], ["ab"], "pairs[0] is 'ab', not a list"),
    (["comparisons", 0, "variant"], "nobody", "comparisons[0]: 'nobody' is not one of its arms"),
    (["comparisons", 0, "mean"], ..., "comparisons[0].mean is missing"),
    (["comparisons", 0, "low"], "text", "comparisons[0].low is 'text', not a number"),
    (["findable"], "text", "findable is 'text', not a number"),
    (["alpha"], 2, "alpha=2 must be between 0 and 1"),
    (["data", "bytes"], "text", "data.bytes is 'text', not a number"),
    (["config", "seeds"], "text", "config.seeds is 'text', not list[int]"),
    (["texts"], 3, "together is missing"),
]


@pytest.fixture(scope="module")
def demo():
    return results.read(ROOT / "results/demo.json.gz")


@pytest.mark.slow
@pytest.mark.parametrize("where, value, words", DAMAGE)
def test_what_is_wrong_in_a_results_file_is_named_when_it_is_read(demo, tmp_path, where, value, words):
    found = records.as_json(demo)
    holder, key = path_of(found, *where), where[-1]
    if value is ...:
        del holder[key]
    else:
        holder[key] = value
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(found))
    with pytest.raises(UserError) as e:
        results.read(path)
    said = str(e.value)
    assert said.startswith(f"{path} is not what compare.py writes: ") and words in said and "\n" not in said


def test_tables_name_a_damaged_results_file(demo, tmp_path, monkeypatch, refusal):
    found = records.as_json(demo)
    next(iter(found["runs"].values()))["nats"] = "text"
    (tmp_path / "results").mkdir()
    (tmp_path / "results/demo.json.gz").write_bytes(gzip.compress(json.dumps(found).encode()))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/claims.md").write_text("")
    (tmp_path / "README.md").write_text("<!-- table: verdicts demo.json.gz -->\n<!-- end -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert "nats is 'text', not a number" in refusal(["--tables"])


@pytest.mark.slow
def test_every_file_in_results_has_the_shape_that_is_asked():
    paths = [path for path in (ROOT / "results").rglob("*.json.gz") if path.parent.name != "tasks"]
    assert len(paths) > 5
    for path in paths:
        assert records.studies_in(results.read(path)), path
