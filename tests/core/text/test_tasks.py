"""Rows of tasks: a solver in plain Python computes every answer from the tokens of its row alone."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from nanoheads.common import UserError
from nanoheads.tasks import NOT_ASKED, TASKS, TaskBatches, TaskData, Words, first_learned_step, letters

LENGTH = 48


def of(name, length=LENGTH, **flags):
    return TaskData({"task": name, **{f"task_{key}": value for key, value in flags.items()}}, length)


# ---- a solver for each task: words of a row, as its vocabulary spells them -> {place: answer} ----

def kind(data, word):
    """The alphabet that a word is from: key, value, noise, mark or blank."""
    words = data.words
    begins = [(words.key, words.keys, "key"), (words.value, words.values, "value"),
              (words.noise, words.noises, "noise"), (words.mark, words.marks, "mark")]
    return next((name for first, size, name in begins if first <= word < first + size), "blank")


def solve_recall(data, row):
    """A key that a value follows is a pair; a key that none follows is asked for."""
    values, answers = {}, {}
    spoken = [(t, word) for t, word in enumerate(row) if kind(data, word) in ("key", "value")]
    for (t, word), (_, following) in zip(spoken, spoken[1:] + [(None, 0)]):
        if kind(data, word) == "key":
            if word in values:
                answers[t] = values[word]
            else:
                assert kind(data, following) == "value", "a key without a value that was not there before"
                values[word] = following
    return answers


def solve_fuzzy_recall(data, row):
    """Cut into keys and values of their sizes: the first time a key is met it is told, then asked for."""
    k, v = data.words.key_size, data.words.value_size
    values, answers, t = {}, {}, 0
    while t < len(row):
        if kind(data, row[t]) != "key":
            assert kind(data, row[t]) == "blank"
            t += 1
            continue
        key = tuple(row[t:t + k])
        assert all(kind(data, word) == "key" for word in key)
        if key not in values:
            values[key] = tuple(row[t + k:t + k + v])
            t += k + v
        else:
            for i, word in enumerate(values[key]):
                answers[t + k - 1 + i] = word
            assert tuple(row[t + k:t + k + v - 1]) == values[key][:-1]  # what was answered is then read
            t += k + v - 1
    return answers


def solve_copy(data, row):
    tokens = [word for word in row if kind(data, word) == "key"]
    marks = [t for t, word in enumerate(row) if kind(data, word) == "mark"]
    assert len(tokens) == len(marks)
    return dict(zip(marks, tokens))


def solve_induction(data, row):
    part = [(t, word) for t, word in enumerate(row) if kind(data, word) == "key"]
    first = {word: i for i, (_, word) in reversed([*enumerate(part)])}
    # at a word that was there before: what came behind it then
    answers = {t: part[first[word] + 1][1] for i, (t, word) in enumerate(part) if first[word] < i}
    answers.pop(part[-1][0])  # behind the last one nothing comes
    return answers


def solve_lookback(data, row):
    d = row[0] - data.words.mark + 1
    return {t: row[t - d] for t in range(len(row)) if t - d >= 1}


def solve_count(data, row):
    seen, answers = Counter(), {}
    for t, word in enumerate(row):
        if kind(data, word) == "key":
            seen[word] += 1
            answers[t] = data.words.value + seen[word] - 1
    return answers


def solve_parity(data, row):
    bits = [(t, word - data.words.key) for t, word in enumerate(row) if kind(data, word) == "key"]
    answers = {t: data.words.value + sum(bit for _, bit in bits[:i + 1]) % 2 for i, (t, _) in enumerate(bits)}
    return {t: answers[t] for t, _ in bits[len(bits) // 2:]}


SOLVERS = dict(recall=solve_recall, fuzzy_recall=solve_fuzzy_recall, noisy_recall=solve_recall,
               copy=solve_copy, induction=solve_induction, lookback=solve_lookback, count=solve_count,
               parity=solve_parity)

# other sizes than the tasks' own, at the edges of what fits
SIZES = [
    ("recall", 9, dict(levels=[3], test_levels=[1], keys=3, values=2)),
    ("fuzzy_recall", 27, dict(levels=[3], test_levels=[1], keys=2, values=2, key_size=3, value_size=2)),
    ("fuzzy_recall", 12, dict(levels=[3], test_levels=[1], keys=3, values=2, key_size=1, value_size=1)),
    ("fuzzy_recall", 20, dict(levels=[2], test_levels=[1], keys=2, values=3, key_size=1, value_size=4)),
    ("noisy_recall", 12, dict(levels=[3], test_levels=[1], keys=3, values=2, noises=1)),
    ("copy", 8, dict(levels=[4], test_levels=[1], keys=2)),
    ("induction", 15, dict(levels=[5], test_levels=[2], keys=5)),
    ("lookback", 8, dict(levels=[6], test_levels=[1], keys=2, marks=6)),
    ("count", 7, dict(levels=[7], test_levels=[1], keys=2, values=7)),
    ("parity", 7, dict(levels=[7], test_levels=[3]))]
EVERY = [(name, LENGTH, {}) for name in TASKS] + SIZES


def solved(data, x):
    """y as the solver has it, [n, T]."""
    y = np.full(x.shape, NOT_ASKED)
    for row, answers in zip(x.tolist(), y):
        for t, word in SOLVERS[data.name](data, row).items():
            answers[t] = word
    return y


@pytest.mark.parametrize("name, length, flags", EVERY)
def test_a_solver_computes_the_answers_from_the_row_alone(name, length, flags):
    """And a level says how many are asked for."""
    data = of(name, length, **flags)
    answers = dict(fuzzy_recall=lambda level: level * data.words.value_size,
                   induction=lambda level: level - 1,
                   lookback=lambda level: length - 1 - level, parity=lambda level: level - level // 2)
    for x, y, levels in [*((*data.batch(7, step, 40), data.levels) for step in range(3)),
                         *((*data.rows("val", level, 20), [level]) for level in data.test_levels)]:
        assert x.shape == y.shape == (len(x), length) and 0 <= x.min() and x.max() < data.vocab_size
        np.testing.assert_array_equal(y, solved(data, x))
        asked = {*(y != NOT_ASKED).sum(1).tolist()}
        assert asked <= {answers.get(name, int)(level) for level in levels} and min(asked) > 0


# ---- which rows ----

def test_rows_follow_from_seed_and_step_and_ranks_share_them():
    data = of("recall")
    batches, again, other = (TaskBatches(data, 6, seed) for seed in (3, 3, 4))
    x, y = batches(5)
    assert torch.equal(x, again(5)[0]) and torch.equal(y, again(5)[1])
    assert not torch.equal(x, other(5)[0]) and not torch.equal(x, batches(6)[0])
    for rank in range(3):
        mine = batches(5, rank, 3)
        assert torch.equal(mine[0], x[rank::3]) and torch.equal(mine[1], y[rank::3])
    assert batches.n_scored(5) == int((y != -1).sum()) and batches.tokens(5) == 5 * 6 * LENGTH


def test_evaluations_have_rows_of_their_own():
    """No row of val or test is read in training, and each level's are the same whatever others there are."""
    data = of("copy")
    val, test = ({tuple(row) for row in data.rows(split, 8, 64)[0].tolist()} for split in ("val", "test"))
    trained = {tuple(row) for step in range(50) for row in data.batch(0, step, 32)[0].tolist()}
    assert not val & test and not (val | test) & trained
    fewer = of("copy", test_levels=[8])
    np.testing.assert_array_equal(fewer.rows("val", 8, 64)[0], data.rows("val", 8, 64)[0])


def test_no_distance_gives_the_answers_of_induction():
    data = of("induction")
    for level in (2, 8, 16):
        x, y = data.rows("val", level, 512)
        asked = y != NOT_ASKED
        right = {d: (x[:, :-d] == y[:, d:])[asked[:, d:]].sum() / asked.sum() for d in range(1, LENGTH)}
        assert max(right.values()) < 0.25 and sum(right.values()) > 1 - 1e-9  # each is somewhere before


def test_levels_are_drawn_evenly():
    data = of("copy", levels=[1, 3])
    asked = np.concatenate([(data.batch(0, step, 40)[1] != NOT_ASKED).sum(1) for step in range(50)])
    share = (asked == 3).mean()
    assert set(asked.tolist()) == {1, 3} and abs(share - 0.5) < 0.05  # 2,000 rows: 0.011 is a standard error


def test_longer_rows_have_room_for_higher_levels():
    data = of("recall")
    x, y = data.rows("test", 24, 10, length=96)
    assert x.shape == (10, 96)
    np.testing.assert_array_equal(y, solved(data, x))


# ---- guessing ----

def test_who_guesses_among_what_was_seen_is_right_as_often_as_computed():
    """With any of the values that stood in the row by then, or with the one that stood there most often."""
    for name, alphabet, level in (("recall", "value", 1), ("recall", "value", 12), ("copy", "key", 8)):
        data = of(name)
        any_seen, most_often = [], []
        for row, answers in zip(*(each.tolist() for each in data.rows("val", level, 64))):
            for t, answer in enumerate(answers):
                if answer != NOT_ASKED:
                    seen = [word for word in row[:t + 1] if kind(data, word) == alphabet]
                    any_seen.append((answer in seen) / len({*seen}))
                    most_often.append(answer == max(sorted(seen), key=seen.count))
        guesses = data.guesses("val", level, 64)
        assert guesses["seen"] == pytest.approx(np.mean(any_seen))
        assert guesses["often"] == pytest.approx(np.mean(most_often))
        assert guesses["chance"] == 1 / (64 if alphabet == "value" else 16) < guesses["seen"]


def test_count_can_be_guessed_by_place():
    """After i tokens of four kinds the most likely answer is about i / 4: a binomial tells how likely."""
    right = [max(math.comb(i, k) * 0.25 ** k * 0.75 ** (i - k) for k in range(i + 1)) for i in range(32)]
    guesses = of("count").guesses("val", 32, 1000)
    assert guesses["place"] == pytest.approx(np.mean(right), abs=0.01) and guesses["seen"] == 0.0
    # where places say nothing they give no more than chance does: the usual word is not that of these rows
    assert of("recall").guesses("val", 4, 64)["place"] < 0.04
    guesses = of("parity").guesses("val", 16, 256)
    assert guesses["chance"] == 0.5 and guesses["place"] == pytest.approx(0.5, abs=0.05)


# ---- what was learned ----

def test_learned_from_the_step_from_which_on_nine_tenths_are_right():
    for shares, step in (([0.1, 0.5, 0.9, 0.95], 30), ([0.9, 0.5, 0.9, 0.95], 30), ([1, 1, 1, 1], 10),
                         ([0.1, 0.95, 0.95, 0.89], None)):
        assert first_learned_step([10, 20, 30, 40], shares) == step


# ---- what does not fit ----

@pytest.mark.parametrize("name, flags, words", [
    ("recall", dict(levels=[17]),
     "task_levels: 17 pairs of recall need rows of at least 51 tokens, and rows"),
    ("recall", dict(levels=[1], test_levels=[5], keys=4),
     "task_test_levels: 5 pairs of recall need as many keys, and task_keys=4 gives 4"),
    ("lookback", dict(levels=[9], marks=8), "9 tokens back of lookback need as many marks"),
    ("induction", dict(levels=[1]), "induction has no rows with 1 tokens"),
    ("recall", dict(levels=[]), "task_levels is empty"),
    ("fuzzy_recall", dict(levels=[1], keys=512), "task_keys=512 and task_key_size=2 make 262,144 keys"),
    ("copy", dict(values=5), "task_values=5: copy has no values"),
    ("recall", dict(key_size=2), "task_key_size=2: recall always has a key size of 1"),
    ("parity", dict(keys=3), "task_keys=3: parity always has 2 keys")])
def test_what_does_not_fit_is_one_line(name, flags, words):
    with pytest.raises(UserError) as e:
        of(name, **flags)
    assert words in str(e.value) and "\n" not in str(e.value)


def test_each_word_is_one_character_of_its_own():
    for name, sizes in [(name, {}) for name in TASKS] + [
            ("recall", dict(task_keys=512, task_values=512)),
            ("noisy_recall", dict(task_noises=128)), ("lookback", dict(task_marks=128))]:
        vocab = Words(name, sizes).vocab
        assert len(set(vocab)) == len(vocab) and set(map(len, vocab)) == {1}
    assert letters(ord("A"), 3) == ["A", "B", "C"]
