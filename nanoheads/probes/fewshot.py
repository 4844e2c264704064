"""
Few-shot items: a prompt, choices of what follows it, and which is right. Read from a file, or made of a text.

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

from nanoheads.common import UserError
from nanoheads.training.scoring import nats_after

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
    """What is asked."""
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
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--file: {path} cannot be read: {getattr(e, 'strerror', None) or 'no UTF-8 text'}")
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
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
    Path(path).write_text(lines, encoding="utf-8")


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


def judged(nats, answers):
    """(is the right choice the likeliest, its nats among the choices), [n] each, from nats [n, choices]."""
    right, least = nats[np.arange(len(nats)), answers], nats.min(1)
    alone = (nats <= right[:, None]).sum(1) == 1  # a tie is no answer
    return alone, right - least + np.log(np.exp(least[:, None] - nats).sum(1))
