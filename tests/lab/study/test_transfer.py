"""Which proxy predicts the public record: rank correlations, a choice that is paid for, effects of files."""

import gzip
import itertools
import json
import math
import statistics

import numpy as np
import pytest

from nanoheads.common import UserError
from lab.study import effects, outside, predictions, results, task_study, transfer
from helpers import ROOT

FEW = ROOT / "results/tasks/few.json.gz"


def slow_ranks(values):
    """Each value's rank: the mean of the places that it and its equals take in order, from 1."""
    ordered = sorted(values)
    return [statistics.mean(i for i, other in enumerate(ordered, 1) if other == value) for value in values]


def slow_correlation(x, y):
    """Pearson's of the ranks; 0 where one side has one rank alone."""
    x, y = slow_ranks(x), slow_ranks(y)
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    both = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y))
    spread = sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y)
    return both / math.sqrt(spread) if spread else 0


def battery(record, **proxies):
    """The Transfer of proxies {name: effects in standard errors} by a record of these verdicts."""
    names = [f"mechanism {i}" for i in range(len(record))]
    made = {proxy: {name: transfer.Effect(float(effect), 1.0, 3, "") for name, effect in zip(names, own)}
            for proxy, own in proxies.items()}
    known = {name: outside.Summary(name, 1, 0, 0, float(verdict), 1, None, None, 0)
             for name, verdict in zip(names, record)}
    return transfer.judged_by(made, known, [])


# ---- statistics ----

def test_rank_correlation_with_ties_is_that_of_the_definition():
    rng = np.random.default_rng(3)
    for n, levels in itertools.product((2, 5, 9), (1, 2, 4, 100)):
        x, y = rng.integers(levels, size=(2, 20, n))
        expected = [slow_correlation(a, b) for a, b in zip(x.tolist(), y.tolist())]
        assert transfer.rank_correlation(x, y) == pytest.approx(expected, abs=1e-12)


def test_signs_are_counted_where_the_record_has_one():
    effects_of, record = np.array([0.1, -0.1, 0.0, 5.0]), np.array([1.0, 1.0, 0.5, 0.0])
    assert transfer.share_of_signs(effects_of, record) == pytest.approx(1 / 3)
    assert math.isnan(transfer.share_of_signs(effects_of, np.zeros(4)))


def test_a_proxy_that_is_right_is_found_and_noise_is_not():
    rng = np.random.default_rng(0)
    record = rng.uniform(-1, 1, 20)
    found = battery(record, right=4 * record + rng.normal(0, 0.5, 20), noise=rng.normal(0, 1, 20))
    right, noise, _ = found.rows
    assert right.interval[0] > 0.5 and right.p_corrected < 0.01 and right.more_interval[0] > 0
    assert noise.interval[0] < 0 < noise.interval[1] and noise.p_corrected > 0.05
    said = transfer.headline(found)
    assert said.startswith("Better than chance: right, by a rank correlation of +0.9") and "noise" in said
    assert "always: right" in said


def test_noise_alone_is_called_no_better_than_chance():
    rng = np.random.default_rng(1)
    record = np.where(rng.random(15) < 0.8, 1.0, 0.5)
    found = battery(record, one=rng.normal(size=15), two=rng.normal(size=15))
    assert transfer.headline(found).startswith("No better than chance: of one, two and the best two none")
    assert "always: no proxy. That guess is right for 100 %" in transfer.headline(found)


def test_what_ties_of_the_record_allow_is_said():
    record = [1.0] * 6 + [0.0]
    row, = battery(record, best=[7, 6, 5, 4, 3, 2, 1]).rows
    expected = slow_correlation(range(7), [0] + 6 * [1])
    assert expected < 0.7 and row.correlation == pytest.approx(expected) == pytest.approx(row.highest)


def test_choosing_the_best_two_on_all_overstates_and_leaving_one_out_does_not(monkeypatch):
    """Noise alone: the pair that is best on all mechanisms correlates, its predictions of others do not."""
    monkeypatch.setattr(transfer, "DRAWS", 99)
    rng, flattered, left_out, p = np.random.default_rng(2), [], [], []
    for _ in range(40):
        record = rng.choice([1.0, 1.0, 0.8, 0.5, 0.2], 14)
        found = battery(record, **{f"proxy {i}": rng.normal(size=14) for i in range(6)})
        flattered.append(found.flattered)
        left_out.append(found.rows[-1].correlation)
        p.append(found.rows[-1].p)
    assert statistics.mean(flattered) > 0.4
    assert abs(statistics.mean(left_out)) < 0.15
    assert np.mean(np.array(p) <= 0.05) < 0.12


def test_two_proxies_that_are_right_together_are_chosen_without_what_they_predict():
    rng = np.random.default_rng(4)
    record, other = rng.uniform(-1, 1, 18), rng.normal(0, 1, 18)
    found = battery(record, half=4 * record + 6 * other, rest=4 * record - 6 * other, noise=other[::-1])
    assert found.chosen == {"half + rest": 18} and found.rows[-1].name == "the best two"
    assert found.rows[-1].correlation > 0.95 and found.rows[-1].p_corrected < 0.01


def test_the_best_two_are_of_proxies_that_have_most_mechanisms():
    rng = np.random.default_rng(6)
    record = rng.uniform(-1, 1, 20)
    own = {name: rng.normal(size=20) for name in ("one", "two", "half", "few")}
    made = {name: {f"mechanism {i}": transfer.Effect(better[i], 1.0, 3, "") for i in range(n)}
            for (name, better), n in zip(own.items(), (20, 20, 10, 9))}
    known = {f"mechanism {i}": outside.Summary(f"mechanism {i}", 1, 0, 0, record[i], 1, None, None, 0)
             for i in range(20)}
    found = transfer.judged_by(made, known, [])
    assert {*found.chosen} <= {"one + two", "one + half", "two + half"}
    assert [len(row.mechanisms) for row in found.rows] == [20, 20, 10, 9, 10]
    assert "over 10 mechanisms two together have" in predictions.better_together(found)


def test_of_pairs_that_fit_equally_well_the_first_is_chosen():
    """The few ranks of a record with ties make many fits equal but for their last digits."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        record = rng.choice([1.0, 0.8, 0.7], 7)
        values = rng.normal(size=(4, 7)) + record
        pairs = [*itertools.combinations(range(4), 2)]
        _, chosen = transfer.predicted(values, record[None])
        for left_out in range(7):
            rest = [i for i in range(7) if i != left_out]
            fits = [slow_correlation([values[i][m] + values[j][m] for m in rest], record[rest].tolist())
                    for i, j in pairs]
            assert chosen[0, left_out] == next(i for i, fit in enumerate(fits) if fit > max(fits) - 1e-9)


# ---- effects, from files ----

def test_effects_of_texts_are_over_all_of_them_and_above_0_where_better():
    path = ROOT / "results/scores-tiny.json.gz"
    found, finished = transfer.effects_in(path)
    both = effects.pooled(results.read(path))
    fox, = (c for c in both.comparisons if c.variant == "fox")
    by_name = {name: effect for proxy, name, effect in found if proxy == "tiny"}
    assert finished and by_name["fox"][:3] == (-fox.mean, fox.se, fox.n)
    assert "score_cap" in by_name and "score_cap 8" not in by_name  # it has other flags than the entry


def test_a_study_of_another_depth_is_another_proxy():
    found, _ = transfer.effects_in(ROOT / "results/value_embedding-depth6.json.gz")
    assert [proxy for proxy, _, _ in found] == ["tiny, n_layer=6"]
    found, _ = transfer.effects_in(ROOT / "results/ladder-nano.json.gz")
    assert {proxy for proxy, _, _ in found} == {"nano-0.1M", "nano-0.33M", "nano-1M"}


def test_effects_on_tasks_spread_as_the_permutation_test_has_it():
    found, finished = transfer.effects_in(FEW)
    effect = next(effect for task, name, effect in found if (task, name) == ("copy", "short_conv"))
    arms = task_study.read(FEW)["tasks"]["copy"]["arms"]
    own, plain = arms["short_conv"]["judge"]["acc"], arms["plain"]["judge"]["acc"]
    scores, ways = [*own, *plain], []
    for mine in itertools.combinations(range(len(scores)), len(own)):
        rest = [score for i, score in enumerate(scores) if i not in mine]
        ways.append(statistics.mean(scores[i] for i in mine) - statistics.mean(rest))
    assert effect.better == pytest.approx(statistics.mean(own) - statistics.mean(plain))
    assert effect.se == pytest.approx(statistics.pstdev(ways)) and effect.seeds == len(own)
    assert finished


def test_nothing_that_acted_is_no_effect():
    assert transfer.Effect(0.0, 0.0, 5, "a.json").in_errors == 0


def test_of_several_files_the_one_with_the_most_seeds_counts(monkeypatch):
    of_file = {"few.json": 2, "many.json": 8, "also.json": 8}
    monkeypatch.setattr(transfer, "effects_in", lambda path: (
        [("tiny", "xsa", transfer.Effect(0.1, 0.1, of_file[path], path))], path != "also.json"))
    for files in itertools.permutations(of_file):
        found, notes = transfer.proxies_in(files)
        assert found["tiny"]["xsa"].file == next(file for file in files if of_file[file] == 8)
        assert notes == ["The study in also.json is not finished: its effects may change."]


def test_of_what_does_much_the_same_the_most_measured_counts_alone():
    record = {name: outside.Summary(name, rows, 0, 0, 1.0, 1, None, None, 0) for name, rows in
              dict(short_conv=3, short_conv_x=14, key_offset=13, diff=1, diff_v1=6, fox=5).items()}

    def left(*proxies):
        found = transfer.one_of_kin({i: dict.fromkeys(names) for i, names in enumerate(proxies)}, record)
        return [[*own] for own in found.values()]

    assert left(["short_conv", "short_conv_x", "key_offset", "fox"]) == [["short_conv_x", "fox"]]
    assert left(["fox", "short_conv", "key_offset", "diff"]) == [["fox", "key_offset", "diff"]]
    assert left(["diff", "diff_v1", "unknown"]) == [["diff_v1", "unknown"]]
    # the same in all proxies: the one that most of them have
    assert left(["short_conv_x", "key_offset", "fox"], ["key_offset"]) == [["key_offset", "fox"],
                                                                          ["key_offset"]]


def test_a_finding_that_is_gone_with_one_of_each_kin_is_called_so():
    kin = transfer.KIN[0]
    names = [*kin, "fox", "xsa", "mudd", "sink", "moh", "window"]
    verdicts = [1.0] * 4 + [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    record = {name: outside.Summary(name, 1, 0, 0, verdict, 1, None, None, 0)
              for name, verdict in zip(names, verdicts)}
    own = {name: transfer.Effect(x, 1.0, 3, "") for name, x in zip(names, [9, 8, 7, 6, 0, 1, 2, -1, 1, 0])}
    found = transfer.judged_by({"tiny": own}, record, [])
    assert transfer.better_than_chance(found) == ["tiny"]
    found.one_of_kin = transfer.judged_by(transfer.one_of_kin({"tiny": own}, record), record, [])
    assert len(found.one_of_kin.rows[0].mechanisms) == 7
    said, (under,) = transfer.headline(found), [each for each in transfer.remarks(found) if "kin" in each]
    assert "With one mechanism alone of each kin, which are fewer, none is shown to be." in said
    assert under.startswith("With one mechanism alone") and "tiny +0.4" in under


# ---- the program ----

def test_the_command_prints_and_writes_what_it_found(tmp_path, capsys):
    study, few = str(ROOT / "results/rivals-tiny.json.gz"), tmp_path / "few.json.gz"
    found = task_study.read(FEW)
    few.write_bytes(gzip.compress(json.dumps({**found, "done": 100, "finished": False}).encode()))
    transfer.main([study, str(few), f"--out_dir={tmp_path}", f"--json={tmp_path / 'found.json'}"])
    said, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert said.splitlines()[0] == found["headline"]
    assert [row["name"] for row in found["proxies"]] == ["tiny", "recall", "noisy_recall", "copy"]
    assert found["effects"]["tiny"]["fox"]["better"] == pytest.approx(-0.0494, abs=1e-4)
    page = (tmp_path / "transfer.md").read_text()
    assert found["headline"] in page and "| fox |" in page
    assert (tmp_path / "transfer_map.png").read_bytes().startswith(b"\x89PNG")
    assert "The study in few.json.gz is not finished" in said


def test_too_few_mechanisms_are_refused_in_one_line(tmp_path):
    ladder = str(ROOT / "results/ladder-nano.json.gz")
    with pytest.raises(SystemExit, match="^transfer: no proxy has 5 mechanisms .* the most are 2; name more"):
        transfer.main([ladder, f"--out_dir={tmp_path}"])


def test_without_a_record_there_is_nothing_to_compare_with(tmp_path, monkeypatch):
    monkeypatch.setattr(outside, "FILE", tmp_path / "outside.csv")
    with pytest.raises(UserError, match="outside.csv is not there"):
        transfer.transfer([FEW])
