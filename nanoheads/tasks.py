"""
Tasks such as recall or copy, to see what a model can learn: rows drawn anew at each step, whose answers
follow from the row alone.

    python train.py --task=recall          # and see TASKS for the others

A task is a function of a generator and a level to (x, y): tokens, and behind each token the answer that is
wanted there, -1 where nothing is asked. Rows follow from (seed, step, row), so a resumed run reads what one
that was never stopped reads, and all variants of a study read the same. What a run is scored on is drawn from
other numbers, the same for all runs. Who asks which variant learns a task from which step on is compare.py.

Each task has in tests/core/text/test_tasks.py a solver in plain Python, which computes the answers from x.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Callable, Literal, NamedTuple, Optional

import numpy as np
import torch
from torch.nn import functional as F

from nanoheads.common import UserError
from nanoheads.mechanism import flag

BLANK = 0        # the first word of each alphabet: nothing is said here
NOT_ASKED = -1   # in y


# ---- drawing: n rows at once, each function gives int64 ----

def distinct(rng, n, size, count):
    """`count` different numbers below `size` in each of n rows, in a random order, [n, count]."""
    return rng.random((n, size)).argsort(1)[:, :count]


def places(rng, n, count, width, room):
    """Where `count` pieces of `width` tokens begin in `room` tokens, none over another, rising [n, count]."""
    gaps = np.sort(distinct(rng, n, room - count * (width - 1), count), 1)
    return gaps + np.arange(count) * (width - 1)


def put(rows, where, pieces):
    """Write pieces [n, count, width] into rows [n, T] from the places `where` [n, count] on."""
    n, _, width = pieces.shape
    rows[np.arange(n)[:, None, None], where[..., None] + np.arange(width)] = pieces


def empty(n, length):
    """(x of blanks, y in which nothing is asked), [n, length] each."""
    return np.full((n, length), BLANK), np.full((n, length), NOT_ASKED)


# ---- the tasks ----

def recall(rng, level, n, words, length):
    """Pairs of a key and a value, then the keys again in another order among blanks: which value was it?

    level: pairs. Source: multi-query associative recall of Zoology, arXiv 2312.04927, section 3.
    """
    x, y = empty(n, length)
    keys = words.key + distinct(rng, n, words.keys, level)
    values = words.value + rng.integers(words.values, size=(n, level))
    x[:, :2 * level] = np.stack((keys, values), -1).reshape(n, -1)
    query_places = 2 * level + distinct(rng, n, length - 2 * level, level)
    np.put_along_axis(x, query_places, keys, 1)
    np.put_along_axis(y, query_places, values, 1)
    return x, y


def fuzzy_recall(rng, level, n, words, length):
    """As recall, with keys and values of several tokens, in which single tokens occur in several keys.

    After the last token of a key the first of its value is asked, after that the next one. level: pairs.
    Source: fuzzy in-context recall of MAD, arXiv 2403.17844, section 3.1; there the sizes of keys vary.
    """
    x, y = empty(n, length)
    k, v = words.key_size, words.value_size
    numbers = distinct(rng, n, words.keys ** k, level)
    keys = words.key + numbers[..., None] // words.keys ** np.arange(k) % words.keys
    values = words.value + rng.integers(words.values, size=(n, level, v))
    pairs, end = np.concatenate((keys, values), -1), level * (k + v)
    x[:, :end] = pairs.reshape(n, -1)
    order = distinct(rng, n, level, level)[..., None]
    pairs = np.take_along_axis(pairs, order, 1)
    query_places = end + places(rng, n, level, k + v - 1, length - end)
    put(x, query_places, pairs[..., :-1])  # the last token of a value is asked, and never read
    put(y, query_places + k - 1, np.take_along_axis(values, order, 1))
    return x, y


def noisy_recall(rng, level, n, words, length):
    """As recall, with distractors in place of blanks: pairs among them in the first half, keys in the other.

    level: pairs. Source: noisy in-context recall of MAD, arXiv 2403.17844, section 3.1.
    """
    _, y = empty(n, length)
    x = words.noise + rng.integers(words.noises, size=(n, length))
    half = length // 2
    keys = words.key + distinct(rng, n, words.keys, level)
    values = words.value + rng.integers(words.values, size=(n, level))
    put(x, places(rng, n, level, 2, half), np.stack((keys, values), -1))
    query_places = half + distinct(rng, n, length - half, level)
    np.put_along_axis(x, query_places, keys, 1)
    np.put_along_axis(y, query_places, values, 1)
    return x, y


def copy(rng, level, n, words, length):
    """Tokens among blanks, then so many marks: at the i-th mark, which was the i-th token?

    level: tokens. Source: selective copying of MAD, arXiv 2403.17844, section 3.1.
    """
    x, y = empty(n, length)
    tokens = words.key + rng.integers(words.keys, size=(n, level))
    put(x, places(rng, n, level, 1, length - level), tokens[..., None])
    x[:, length - level:] = words.mark
    y[:, length - level:] = tokens
    return x, y


def induction(rng, level, n, words, length):
    """Different tokens among blanks, and later the same again: in the repetition, what comes next?

    Both parts are at random places, so that no distance says where the answer is, nor does the level.
    level: tokens in the part that is repeated. Source: Olsson et al. 2022, arXiv 2209.11895.
    """
    x, y = empty(n, length)
    part = words.key + distinct(rng, n, words.keys, level)
    where = places(rng, n, 2, level, length)
    put(x, where, np.stack((part, part), 1))
    put(y, where[:, 1:], part[:, None, 1:])
    return x, y


def lookback(rng, level, n, words, length):
    """A word that says d, then random tokens: at each of them, which came d before it?

    level: d.
    """
    x, y = empty(n, length)
    x[:, 0] = words.mark + level - 1
    x[:, 1:] = words.key + rng.integers(words.keys, size=(n, length - 1))
    y[:, 1 + level:] = x[:, 1:length - level]
    return x, y


def count(rng, level, n, words, length):
    """Blanks, then random tokens of a small alphabet: how often has each occurred by now, itself included?

    level: random tokens.
    """
    x, y = empty(n, length)
    tokens = rng.integers(words.keys, size=(n, level))
    counts = (tokens[..., None] == np.arange(words.keys)).cumsum(1)
    occurrences = np.take_along_axis(counts, tokens[..., None], 2)[..., 0]
    x[:, length - level:] = words.key + tokens
    y[:, length - level:] = words.value + occurrences - 1
    return x, y


def parity(rng, level, n, words, length):
    """Blanks, then random bits: in the second half of them, is the number of ones by now even or odd?

    level: bits. A control: attention finds it hard, Hahn 2020, arXiv 1906.06755.
    """
    x, y = empty(n, length)
    bits = rng.integers(2, size=(n, level))
    n_queries = level - level // 2
    x[:, length - level:] = words.key + bits
    y[:, length - n_queries:] = words.value + (bits.cumsum(1) % 2)[:, -n_queries:]
    return x, y


class Task(NamedTuple):
    """The properties of a task, beside its rows. Alphabets and levels may be set by flags."""
    draw: Callable
    unit: str           # what a level counts
    levels: list        # drawn in training
    test_levels: list   # of an evaluation
    room: Callable      # (level, words) -> tokens that a row needs at least
    most: str           # the alphabet that a level may not exceed; "": any level
    keys: int           # words of each alphabet; 0: it has none
    values: int = 0     # 0: what is asked for are keys
    noises: int = 0
    marks: int = 0
    key_size: int = 1
    value_size: int = 1
    show: Callable = None  # the number of a value -> how a person reads it; None: as its letter


TASKS = {
    "recall": Task(recall, "pairs", [1, 2, 4, 12], [1, 2, 4, 8, 12], keys=64, values=64, most="keys",
                   room=lambda level, words: 3 * level),
    "fuzzy_recall": Task(
        fuzzy_recall, "pairs", [1, 2, 3, 6], [1, 2, 3, 4, 6], keys=8, values=8, key_size=2, value_size=2,
        most="keys", room=lambda level, words: level * (2 * (words.key_size + words.value_size) - 1)),
    "noisy_recall": Task(noisy_recall, "pairs", [1, 2, 4, 8], [1, 2, 4, 6, 8], keys=64, values=64, noises=16,
                         most="keys", room=lambda level, words: 4 * level),
    "copy": Task(copy, "tokens", [1, 2, 4, 8, 16], [1, 2, 4, 8, 16], keys=16, marks=1, most="",
                 room=lambda level, words: 2 * level),
    # with less room both parts could stand at few distances from each other
    "induction": Task(induction, "tokens", [2, 4, 8, 12, 16], [2, 4, 8, 12, 16], keys=64, most="keys",
                      room=lambda level, words: 3 * level),
    "lookback": Task(lookback, "tokens back", [1, 2, 4, 8, 16], [1, 2, 4, 8, 16], keys=16, marks=64,
                     most="marks", room=lambda level, words: level + 2),
    "count": Task(count, "tokens", [4, 8, 16, 32, 48], [4, 8, 16, 32, 48], keys=4, values=64, most="values",
                  room=lambda level, words: level, show=lambda value: str(value + 1)),
    "parity": Task(parity, "bits", [2, 4, 8, 16], [2, 4, 8, 16], keys=2, values=2, most="",
                   room=lambda level, words: level, show=lambda value: ("even", "odd")[value]),
}
ALPHABETS = ("keys", "values", "noises", "marks")
SIZES = tuple(f"task_{size}" for size in (*ALPHABETS, "key_size", "value_size"))


@dataclass
class TaskConfig:
    """The flags of a task; what is None is as TASKS says."""
    task: Optional[Literal[tuple(TASKS)]] = flag(
        None, "train on rows of this task, not on a text; if there is no scale and no config file, at "
              "--scale=task (docs/compare.md)",
        section="task: rows drawn anew at each step, whose answers follow from the row alone")
    task_levels: Optional[list[int]] = flag(
        None, "levels of difficulty in training; each row's is drawn from these")
    task_test_levels: Optional[list[int]] = flag(
        None, "levels of difficulty in evaluations, which have task_rows rows of each")
    task_length: Optional[int] = flag(None, "number of tokens in a row; None: block_size", at_least=2)
    task_keys: Optional[int] = flag(
        None, "number of words that are keys, or that are copied, repeated, looked up or counted",
        at_least=2, at_most=512)
    task_values: Optional[int] = flag(
        None, "number of words that are values; in count, of numbers", at_least=2, at_most=512)
    task_noises: Optional[int] = flag(
        None, "noisy_recall: number of words that distract", at_least=1, at_most=128)
    task_marks: Optional[int] = flag(
        None, "lookback: number of words that say how far to look back, and so the largest distance",
        at_least=1, at_most=128)
    task_key_size: Optional[int] = flag(None, "fuzzy_recall: number of tokens in a key", at_least=1)
    task_value_size: Optional[int] = flag(None, "fuzzy_recall: number of tokens in a value", at_least=1)
    task_rows: int = flag(64, "rows of each level in an evaluation", at_least=1)
    task_enough: Optional[float] = flag(
        None, "stop at the first evaluation in which this share of the answers is right, as a mean over "
              "levels; None: train to max_iters", above=0, at_most=1)


# ---- words ----

def letters(first, n, kind=str.isalpha):
    """n characters from a code point on that are of a kind, a letter by default."""
    characters = (chr(code) for code in range(first, 0x3000) if kind(chr(code)))
    return [next(characters) for _ in range(n)]


class Words:
    """The vocabulary of a task: a blank, then its alphabets; each word is one character.

    key, value, noise, mark: the first word of each alphabet. keys, values, noises, marks: how many it has.
    UserError where a flag is for an alphabet that the task has not.
    """

    def __init__(self, name, sizes):
        self.task = TASKS[name]
        for key in SIZES:
            alphabet = key.removeprefix("task_")
            size, usual = sizes.get(key), getattr(self.task, alphabet)
            fixed = usual == (1 if alphabet.endswith("size") else 0) or name == "parity"
            if size is not None and size != usual and fixed:
                has = f"has no {alphabet}" if not usual else f"always has {usual} {alphabet}"
                if alphabet.endswith("size"):
                    has = f"always has a {alphabet.replace('_', ' ')} of 1"
                raise UserError(f"{key}={size}: {name} {has}")
            setattr(self, alphabet, usual if size is None else size)
        bits = name == "parity"
        self.vocab = [".", *("01" if bits else letters(ord("A"), self.keys)), *letters(0x0410, self.values),
                      *letters(0x2500, self.noises, bool), *letters(0x2460, self.marks, bool)]
        first = 1
        for alphabet in ALPHABETS:
            setattr(self, alphabet.removesuffix("s"), first)
            first += getattr(self, alphabet)

    @property
    def answers(self):
        """(first word, number of words) of the alphabet that answers are from."""
        return (self.value, self.values) if self.values else (self.key, self.keys)

    def text_of(self, word):
        """A word as a person reads it."""
        if self.task.show and self.value <= word < self.value + self.values:
            return self.task.show(int(word) - self.value)
        return self.vocab[word]


# ---- what a run is trained and scored on ----

STREAMS = {"train": 0, "val": 1, "test": 2}  # the first number of what seeds a generator
MOST_KEYS = 32_768       # of all rows of a batch each has a random number
TOKENS_COUNTED = 200_000  # in the rows that say which answer is usual at which place


class TaskData:
    """The rows of a task, as a run's dataset. UserError: a level or an alphabet that does not fit.

    flags: {key: value}, those of a TaskConfig. length: of a row, where task_length is None. meta: what a
    checkpoint keeps of it, with the flags in meta["task"], each with its value.
    """

    def __init__(self, flags, length):
        self.name = flags["task"]
        self.flags = {f.name: flags.get(f.name, f.default) for f in fields(TaskConfig)}
        self.words, self.task = Words(self.name, flags), TASKS[self.name]
        self.length = flags.get("task_length") or length
        self.levels = flags.get("task_levels") or self.task.levels
        self.test_levels = flags.get("task_test_levels") or self.task.test_levels
        self.vocab_size, self.separator = len(self.words.vocab), BLANK
        for key in ("levels", "test_levels"):
            if flags.get(f"task_{key}") == []:
                raise UserError(f"task_{key} is empty: name a level, or leave it out for the task's own")
            levels = getattr(self, key)
            if repeated := [level for level in levels if levels.count(level) > 1]:
                raise UserError(f"task_{key} names {repeated[0]} twice: name each level once")
            for level in levels:
                self.check_level(f"task_{key}", level, self.length)
        self.dir = f"task {self.name}"  # in messages, in the place of a folder
        self.meta = dict(name=self.dir, encoding="char", vocab=self.words.vocab,
                         vocab_size=self.vocab_size, separator=BLANK, task=self.full_flags())

    @property
    def digests(self):
        """What two of these must have in common to be the same rows in training, as Dataset.digests."""
        return training_flags(self.meta)

    def full_flags(self):
        """{key: value} of the flags, in which every None is replaced by the value that it means."""
        sizes = {key: getattr(self.words, key.removeprefix("task_")) for key in SIZES}
        return dict(self.flags, **sizes, task_levels=list(self.levels), task_length=self.length,
                    task_test_levels=list(self.test_levels))

    def check_level(self, key, level, length):
        """UserError where rows of this length have no room for a level, or an alphabet is too small."""
        words, task = self.words, self.task
        if level < (2 if self.name in ("induction", "parity") else 1):
            raise UserError(f"{key}: {self.name} has no rows with {level} {task.unit}")
        if (room := task.room(level, words)) > length:
            raise UserError(f"{key}: {level} {task.unit} of {self.name} need rows of at least {room} tokens, "
                            f"and rows have {length}: raise block_size, or name a smaller level")
        most = getattr(words, task.most) if task.most else math.inf
        if task.most == "keys":
            most **= words.key_size
            if most > MOST_KEYS:
                raise UserError(f"task_keys={words.keys} and task_key_size={words.key_size} make {most:,} "
                                "keys, and drawing needs a number for each of them: lower task_keys until "
                                f"there are at most {MOST_KEYS:,}")
        if level > most:
            what_to_do = "name a smaller level" if key.startswith("--") else "give more, or a smaller level"
            raise UserError(f"{key}: {level} {task.unit} of {self.name} need as many {task.most}, and "
                            f"task_{task.most}={getattr(words, task.most)} gives {most}: "
                            f"{what_to_do}")

    def rows(self, split, level, n, length=None, seed=0):
        """(x, y) of n rows of one level, int64 [n, T] each, of `length` tokens; the same for all runs."""
        rng = np.random.default_rng([STREAMS[split], level, seed])
        return self.task.draw(rng, level, n, self.words, length or self.length)

    def mixed_rows(self, split, n):
        """(x, y) of n rows of all levels of training in turn, tensors [n, T], always the same."""
        k = len(self.levels)
        parts = [self.rows(split, level, -(-n // k)) for level in self.levels]
        return [torch.from_numpy(np.stack(arrays, 1).reshape(-1, self.length)[:n]) for arrays in zip(*parts)]

    def length_for(self, levels):
        """Tokens of rows with room for these levels: those of training, doubled as often as it takes."""
        most, length = max(self.task.room(level, self.words) for level in levels), self.length
        while length < most:
            length *= 2
        return length

    def batch(self, seed, step, n):
        """(x, y) of the n rows that a run of this seed reads at a step, int64 [n, T] each."""
        rng = np.random.default_rng([STREAMS["train"], seed, step])
        x, y = empty(n, self.length)
        row_levels = rng.integers(len(self.levels), size=n)
        for i, level in enumerate(self.levels):
            level_rows = np.flatnonzero(row_levels == i)
            if not len(level_rows):
                continue
            n_rows = len(level_rows)
            x[level_rows], y[level_rows] = self.task.draw(rng, level, n_rows, self.words, self.length)
        return x, y

    def guesses(self, split, level, n, length=None):
        """The share of answers in these rows that guessing gets right, {way of guessing: share}.

        chance: with any of the words that may be the answer. seen: with any of those that stand in the row by
        then, each counted once. often: with the one of them that stands there most often. place: with the
        word that is right most often at that place of a row, as other rows of this level have it.
        """
        length = length or self.length
        x, y = self.rows(split, level, n, length)
        first, size = self.words.answers
        of_words = np.arange(first, first + size)
        counts = (x[..., None] == of_words).cumsum(1, dtype=np.int16)  # [n, T, words]
        is_query = y != NOT_ASKED
        answers, query_counts = y[is_query] - first, counts[is_query]
        is_seen = query_counts > 0
        hits = is_seen[np.arange(len(answers)), answers] / is_seen.sum(1).clip(1)
        usual_answers = self.usual_answers(split, level, length)
        return dict(chance=1 / size, seen=float(hits.mean()),
                    often=float((query_counts.argmax(1) == answers).mean()),
                    place=float((usual_answers[is_query.nonzero()[1]] == answers + first).mean()))

    def usual_answers(self, split, level, length):
        """The word that is right most often at each place, [T], in rows that are not those scored."""
        first, size = self.words.answers
        _, y = self.rows(split, level, max(256, TOKENS_COUNTED // length), length, seed=1)
        places, words = (y != NOT_ASKED).nonzero()[1], y[y != NOT_ASKED] - first
        return first + np.bincount(places * size + words, minlength=length * size).reshape(-1, size).argmax(1)


def check_split(split, path):
    """UserError unless an evaluation may have rows of this split."""
    if split not in ("val", "test"):
        raise UserError(f"--split={split}: {path} was trained on a task, whose rows are drawn anew at each "
                        "step of training; there are val and test beside")


def training_flags(meta):
    """{key: value} of the flags that decide the rows of training, from a meta; {}: it is that of a text."""
    return {key: value for key, value in (meta.get("task") or {}).items()
            if key not in ("task_rows", "task_test_levels", "task_enough")}


class TaskBatches:
    """Training batches of a task, a function of (seed, step) alone, like those of dataset.Batches."""

    def __init__(self, data, rows, seed):
        self.data, self.rows = data, rows
        self.whole = lru_cache(maxsize=2)(lambda step: data.batch(seed, step, rows))

    def __call__(self, step, rank=0, world=1):
        """This rank's rows of the batch at `step`: (x, y), int64 [rows / world, T] each."""
        x, y = self.whole(step)
        return torch.from_numpy(x[rank::world]), torch.from_numpy(y[rank::world])

    def n_scored(self, step):
        """Answers asked for in the batch at `step`, over all ranks."""
        return int((self.whole(step)[1] != NOT_ASKED).sum())

    def tokens(self, step):
        """Tokens read in the steps before `step`."""
        return step * self.rows * self.data.length


def level_shares(row):
    """{level: share of answers that are right} of an evaluation's row of log.jsonl."""
    return {int(key.removeprefix("acc/")): share for key, share in row.items() if key.startswith("acc/")}


@torch.no_grad()
def logits_of(model, x, at_once=4096):
    """Yield (rows of x [n, T] as a slice, the model's logits there [rows, T, V], float32 on the CPU)."""
    device, rows = next(model.parameters()).device, max(1, at_once // x.size(1))
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        yield part, model(x[part].to(device)).logits.float().cpu()


def answers_of(model, x):
    """The most probable next word after each token of x [n, T], int64 [n, T]."""
    return torch.cat([logits.argmax(-1) for _, logits in logits_of(model, x)])


@torch.no_grad()
def score_levels(model, data, split, rows=None, levels=None, length=None, rank=0, world=1, autocast=None):
    """{level: (nats summed, answers right, answers asked)} of rows that no run was trained on.

    rows: of each level, None: task_rows. levels: None: task_test_levels. Of several ranks each scores its
    share; the caller adds them up.
    """
    was_training, counts = model.training, {}
    model.eval()
    try:
        with autocast or nullcontext():
            for level in levels or data.test_levels:
                x, y = data.rows(split, level, rows or data.flags["task_rows"], length)
                x, y = torch.from_numpy(x[rank::world]), torch.from_numpy(y[rank::world])
                nats, right = 0.0, 0
                for part, logits in logits_of(model, x):
                    targets = y[part]
                    nats += float(F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(),
                                                  ignore_index=NOT_ASKED, reduction="sum"))
                    right += int((logits.argmax(-1) == targets).sum())
                counts[level] = nats, right, int((y != NOT_ASKED).sum())
    finally:
        model.train(was_training)
    return counts


def summary(counts):
    """What score_levels() counted, as a dict: levels, {level: share of the answers that are right}; right,
    the mean over levels; nats, of an answer, over all of them.
    """
    nats, n_answers = (sum(level_counts[i] for level_counts in counts.values()) for i in (0, 2))
    levels = {level: right / of_level for level, (_, right, of_level) in counts.items()}
    return dict(levels=levels, right=sum(levels.values()) / len(levels), nats=nats / n_answers)


def rows_per_level(data, tokens):
    """Rows of each test level that have so many tokens together, at least one; 0: task_rows."""
    return max(1, tokens // (data.length * len(data.test_levels))) if tokens else data.flags["task_rows"]


# ---- what was learned ----

LEARNED_SHARE = 0.9  # the share of answers that must be right


def first_learned_step(steps, shares, enough=LEARNED_SHARE):
    """The first of these steps from which on a share is at least `enough` to the end; None: there is none."""
    first = None
    for step, share in zip(steps, shares):
        if share < enough:
            first = None
        elif first is None:
            first = step
    return first


def describe_learning(data, rows):
    """A line that says which levels were learned, from which step on, and how far the others came.

    rows: the evaluations of a run, as in its log; those that scored other levels say nothing.
    """
    keys = {f"acc/{level}" for level in data.test_levels}
    rows = [row for row in rows if keys == {key for key in row if key.startswith("acc/")}]
    steps, last = [row["step"] for row in rows], rows[-1]
    learned_levels, other_levels = [], []
    for level in data.test_levels:
        shares = [row[f"acc/{level}"] for row in rows]
        step = first_learned_step(steps, shares)
        if step is not None:
            learned_levels.append((level, step))
        else:
            guess = data.guesses("val", level, data.flags["task_rows"])
            other_levels.append(f"{level} ({shares[-1]:.2f} right, guessing gives "
                                f"{max(guess.values()):.2f})")
    unit, parts = data.task.unit, []
    if learned_levels:
        steps_of_levels = [f"{level} from step {step:,} on" for level, step in learned_levels]
        parts.append(f"learned {', '.join(steps_of_levels)}")
    if other_levels:
        parts.append(f"not learned in {last['step']:,} steps " + ", ".join(other_levels))
    common_step = first_learned_step(steps, [row["val_acc"] for row in rows])
    when = "never" if common_step is None else f"from step {common_step:,} on"
    return (f"{data.name}, by {unit}: {'; '.join(parts)}. All levels together: {last['val_acc']:.3f} right, "
            f"{LEARNED_SHARE:.0%} {when}. One run; compare.py --task={data.name} asks several seeds")
