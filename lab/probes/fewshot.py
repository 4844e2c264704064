"""
Does it learn from examples in front? Of several choices the likeliest after a prompt is the answer.

Before the prompt stand so many others of the same task with their right choices, the earliest left out where
the context is too short. Items are a file's, or made of the split's own words: copy one, its first letter,
its plural, the next letter, the word left out.

A file has a JSON object a line: {"task": "capitals", "prompt": "France:", "choices": [" Paris", " Rome"],
"answer": 0}; the task may be left out. Nothing is put between prompt and choice, so that a space belongs to
the choice. An example is a prompt with its right choice and a newline; those before an item are other items
of its task.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanoheads.common import UserError, from_json, plural, text_of, writable, write_atomic
from nanoheads.intervals import t_interval
from nanoheads.timing import progress_bar
from lab.probes.shared import (OVER, about_text, ask, finite, nats_after, numbers_of, open_checkpoints,
                               plus_minus, positive, run_table)

TASKS = {
    "copy": "the word again: river: river",
    "first": "its first letter: river: r",
    "plural": "the word with an s, where the text has both: river: rivers",
    "next": "the letter after three in order: c d e f",
    "cloze": "the word that goes on a piece of the text",
}
WORD = re.compile(r"(?<![\w<@'-])[a-z]{3,8}(?![\w>@'-])")
OFTEN = 3        # times that a word of an item is there
CHOICES = 4
BEFORE = 48      # characters of text before a word left out, at most


class Item(NamedTuple):
    """A question with choices."""
    task: str
    prompt: str
    choices: list    # of what follows it
    answer: int      # the number of the right one

    @property
    def example(self):
        return self.prompt + self.choices[self.answer] + "\n"


# ---- items ----

def read_items(path):
    """The Items of a file. UserError names the line that is none."""
    try:
        lines = text_of(path).splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--file: {path} cannot be read: {getattr(e, 'strerror', None) or 'no UTF-8 text'}")
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = from_json(line)
            item = Item(row.get("task", "items"), row["prompt"], row["choices"], row["answer"])
            if type(item.answer) is not int or not 0 <= item.answer < len(item.choices):
                raise ValueError("answer is no number of a choice, from 0")
            texts = [item.task, item.prompt, *item.choices]
            if not all(isinstance(text, str) for text in texts) or not isinstance(item.choices, list):
                raise ValueError("task, prompt and choices must be texts")
            if len(set(item.choices)) < max(2, len(item.choices)) or "" in item.choices:
                raise ValueError("it takes two choices or more, each another text")
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            why = f"no {e}" if isinstance(e, KeyError) else e
            raise UserError(f"--file: {path}, line {number} is no item ({why}); one is "
                            '{"prompt": "France:", "choices": [" Paris", " Rome"], "answer": 0}') from None
        items.append(item)
    if not items:
        raise UserError(f"--file: {path} holds no item")
    return items


def made_items(text, count, seed):
    """At most `count` Items of each of TASKS, out of a text; the same for the same seed. UserError.

    The wrong choices are as long as the right one: other words, or letters, that the text has.
    """
    rng, often = np.random.default_rng(seed), Counter(WORD.findall(text))
    words = sorted(word for word, n in often.items() if n >= OFTEN)
    plurals = [word for word in words if not word.endswith("s") and often[word + "s"] >= OFTEN]
    letters = sorted({word[0] for word in words})
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    matches = [m for m in WORD.finditer(text) if often[m[0]] >= OFTEN and m.start() > BEFORE
               and "\n" not in text[m.start() - BEFORE:m.start()] and text[m.start() - 1] == " "]

    def pick(options):
        options = list(options)
        return [options[i] for i in rng.permutation(len(options))[:count]]

    def item(task, prompt, right, options):
        wrong = [option for option in options if option != right and len(option) == len(right)]
        if len(wrong) < CHOICES - 1:
            return []
        wrong = [wrong[i] for i in rng.choice(len(wrong), CHOICES - 1, replace=False)]
        answer = int(rng.integers(CHOICES))
        choices = [" " + choice for choice in (*wrong[:answer], right, *wrong[answer:])]
        return [Item(task, prompt, choices, answer)]

    found = []
    for word in pick(words):
        found += item("copy", f"{word}:", word, words)
    for word in pick(words):
        found += item("first", f"{word}:", word[0], letters)
    for word in pick(plurals):
        found += item("plural", f"{word}:", word + "s", [other + "s" for other in plurals])
    for i in pick(range(len(alphabet) - 3)):
        found += item("next", " ".join(alphabet[i:i + 3]), alphabet[i + 3], alphabet)
    for match in pick(matches):
        before = text[match.start() - BEFORE:match.start() - 1]
        found += item("cloze", before[before.find(" ") + 1:], match[0], words)
    tasks = Counter(each.task for each in found)
    if min(tasks[task] for task in TASKS) < 2:
        raise UserError("the text has too few words to make items of: take another --split, or --file")
    return found


def save_items(path, items):
    """What read_items() reads."""
    lines = "".join(json.dumps(item._asdict(), ensure_ascii=False) + "\n" for item in items)
    write_atomic(path, lambda f: f.write(lines.encode()))


# ---- scores ----

def contexts(items, shots, seed):
    """[n][1 + most] texts: each item's prompt, before it one example, two, ...; as many as there are.

    Examples are drawn for each item, the same whatever the number: one more goes to the front. None has the
    item's own prompt.
    """
    by_task, found = {}, []
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    for number, item in enumerate(items):
        others = [other for other in by_task[item.task] if other.prompt != item.prompt]
        order = np.random.default_rng([seed, number]).permutation(len(others))[:shots]
        texts = [item.prompt]
        for i in order:
            texts.append(others[i].example + texts[-1])
        found.append(texts)
    return found


def choice_nats(model, tokenizer, items, texts, room):
    """(nats [n, choices] of every choice after its text, inf: no such choice; examples read [n]).

    texts: of contexts(), [n] lists with more and more examples: the longest is taken that fits into `room`
    tokens together with a choice. UserError where not even the prompt does.
    """
    pairs, where, read = [], [], []
    for number, (item, of_item) in enumerate(zip(items, texts)):
        choices = [tokenizer.encode(choice).tolist() for choice in item.choices]
        longest = max(map(len, choices))
        fit = [ids for ids in (tokenizer.encode(text).tolist() for text in of_item)
               if len(ids) + longest <= room]
        if not fit:
            raise UserError(f"item {number + 1} of {item.task!r}: its prompt and choices are longer than the "
                            f"{room:,} tokens that the model reads")
        read.append(len(fit) - 1)
        pairs += [(fit[-1], choice) for choice in choices]
        where += [(number, i) for i in range(len(choices))]
    nats = np.full((len(items), max(len(item.choices) for item in items)), np.inf)
    nats[tuple(np.array(where).T)] = nats_after(model, tokenizer.separator, pairs)
    return nats, np.array(read)


def graded(nats, answers):
    """(is the right choice the likeliest, its nats among the choices), [n] each, from nats [n, choices]."""
    right, least = nats[np.arange(len(nats)), answers], nats.min(1)
    alone = (nats <= right[:, None]).sum(1) == 1  # a tie is no answer
    return alone, right - least + np.log(np.exp(least[:, None] - nats).sum(1))


# ---- the probe ----

def items_of(args, data):
    """The Items of a command line, at most args.items of each task. UserError."""
    if not args.file:
        text = data.tokenizer.decode(data.tokens(args.split)[:1 << 21])
        return made_items(text, args.items, args.seed)
    if args.split != "test":
        raise UserError(f"--split {args.split} means nothing with --file")
    every = read_items(args.file)
    of_task = {task: [item for item in every if item.task == task] for task in {item.task for item in every}}
    few = {id(items[i * len(items) // n]) for items in of_task.values()
           for n in [min(len(items), args.items)] for i in range(n)}
    return [item for item in every if id(item) in few]


def scored_items(ckpts, data, items, context, args):
    """Yield each checkpoint's {shots: (examples read, whether right, nats of the right choice), [n] each}."""
    texts, answer = contexts(items, max(args.shots), args.seed), np.array([item.answer for item in items])
    with progress_bar(len(ckpts) * len(args.shots), "fewshot") as progress:
        for ckpt in ckpts:
            scored = {}
            for shots in args.shots:
                cut = [of_item[:shots + 1] for of_item in texts]
                nats, read = choice_nats(ckpt.model, data.tokenizer, items, cut, context)
                right, surprise = graded(nats, answer)
                scored[shots] = read, right.astype(float), finite(surprise, ckpt)
                progress.update(1)
            yield scored


def rows_of(scored, first, items, args):
    """A dict for each task and number of examples. first: the first checkpoint's `scored`, or None."""
    rows, chance = [], np.array([1 / len(item.choices) for item in items])
    for task in [*dict.fromkeys(item.task for item in items), "all"]:
        mine = np.array([task in (item.task, "all") for item in items])
        for shots in args.shots:
            read, right, surprise = (each[mine] for each in scored[shots])
            over = over_nats = None
            if first:
                _, right_of_first, surprise_of_first = (each[mine] for each in first[shots])
                over, over_nats = t_interval(right - right_of_first), t_interval(surprise - surprise_of_first)
            rows.append(dict(task=task, shots=shots, items=len(read), read=float(read.mean()),
                             chance=float(chance[mine].mean()), accuracy=t_interval(right),
                             accuracy_over_first=over, nats=t_interval(surprise), nats_over_first=over_nats))
    return rows


COLUMNS = [  # of the table with a line for each task and number of examples, see run_table()
    ("task", lambda r: r["task"]),
    ("shots", lambda r: r["shots"]),
    ("read", lambda r: f"{r['read']:.1f}"),
    ("items", lambda r: r["items"]),
    ("chance", lambda r: f"{r['chance']:.2f}"),
    ("accuracy", lambda r: plus_minus(r["accuracy"], 3, sign=False)),
    (OVER, lambda r: plus_minus(r["accuracy_over_first"], 3)),
    ("nats", lambda r: plus_minus(r["nats"], 3, sign=False)),
    (OVER, lambda r: plus_minus(r["nats_over_first"], 3)),
]


def probe(args):
    """Accuracy on items of several choices, with examples in front."""
    if min(args.shots) < 0:
        raise UserError(f"--shots {min(args.shots)} must not be negative")
    for key in ("save", "json"):
        path = getattr(args, key)
        if args.file and path and Path(path).resolve() == Path(args.file).resolve():
            raise UserError(f"--{key} {path} is the --file of the items: name another file")
    ckpts, data, context = open_checkpoints(args)
    items = items_of(args, data)
    if args.save:
        save_items(writable(args.save, "--save"), items)
    scored = [*scored_items(ckpts, data, items, context, args)]
    rows = [rows_of(each, scored[0] if each is not scored[0] else None, items, args) for each in scored]
    source = args.file or f"made of the words of {about_text(data, args)}"
    what = (f"{plural(len(items), 'item')}, {source}; read: examples that fit into {context:,} tokens; "
            "nats: of the right choice among all")
    return numbers_of(ckpts, data, args, rows), [what, run_table(ckpts, rows, COLUMNS, left=2)]


def main(argv):
    ask("fewshot", probe, "test", argv,
        file=(str, None, "items, a JSON object a line (default: made of the split's words)"),
        items=(positive, 200, "items of each task, at most"),
        shots=(int, [0, 1, 2, 4, 8], "examples before an item"),
        save=(str, None, "write the items to this file, as --file reads them"))
