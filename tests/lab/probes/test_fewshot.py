"""probe.py fewshot: its items, how choices are scored, what it prints."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from helpers import write_dataset
from scipy.stats import t as student

from lab import probe
from model import GPT, GPTConfig
from nanoheads import checkpoint
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.dataset import Dataset
from lab.probes import fewshot
from lab.probes.fewshot import TASKS, Item, choice_nats, contexts, graded, made_items, read_items, save_items
from lab.study import digest


SIZES = dict(block_size=32, vocab_size=256, n_layer=2, n_head=2, n_embd=16)


def test_keys_that_are_not_set_are_not_in_a_studys_hash():
    new = {"documents", "freeze_trunk", "thaw_from", "skip_lr", "patience"}
    assert not new & set(digest.own_training(TrainConfig().for_recipe("gpt2")))
    assert digest.own_training(TrainConfig(documents=8))["documents"] == 8


TEXT = " ".join(["the river runs by stones and rivers", "a stone wall near towns", "one town of houses",
                 "some house with doors", "every door is open to friends", "a friend has horses",
                 "the horse and riders", "no rider sees gardens", "this garden has walls"] * 40)


class Bytes:
    """A tokenizer of bytes."""
    separator = 10

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8)


@pytest.fixture(scope="module")
def items():
    return made_items(TEXT, 12, seed=1)


def test_items_are_what_they_are_called(items):
    right = {task: [(item.prompt, item.choices[item.answer]) for item in items if item.task == task]
             for task in TASKS}
    assert all(answer == f" {prompt[:-1]}" for prompt, answer in right["copy"])
    assert all(answer == f" {prompt[0]}" for prompt, answer in right["first"])
    assert all(answer == f" {prompt[:-1]}s" and answer[1:] in TEXT for prompt, answer in right["plural"])
    assert all(ord(answer[1]) == ord(prompt[-1]) + 1 for prompt, answer in right["next"])
    assert all(prompt + answer in TEXT for prompt, answer in right["cloze"])
    for item in items:
        assert len(set(item.choices)) == 4 and len({len(choice) for choice in item.choices}) == 1
    answers = [item.answer for item in made_items(TEXT, 40, seed=2)]
    assert set(answers) == {0, 1, 2, 3}
    assert made_items(TEXT, 12, seed=1) == items != made_items(TEXT, 12, seed=2)


def test_examples_are_other_items_of_the_task_one_more_each_time(items):
    items = [*items, items[0]]  # an item that is there twice is no example of itself
    for item, texts in zip(items, contexts(items, 5, seed=3)):
        others = {other.prompt for other in items if other.task == item.task} - {item.prompt}
        assert len(texts) == 1 + min(5, len(others)) and texts[0] == item.prompt
        for fewer, more in zip(texts, texts[1:]):
            assert more.endswith(fewer)
            example = more.removesuffix(fewer)
            assert example in {other.example for other in items
                               if other.task == item.task and other.prompt != item.prompt}
    assert max(map(len, contexts(items[:3], 5, seed=3))) == 3, "no more than there are"


def slow_nats(model, context, choice):
    """Nats of a choice's bytes, one forward pass each, nothing padded."""
    total, ids = 0.0, [10, *context.encode()]
    for byte in choice.encode():
        with torch.no_grad():
            total -= model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)[byte].item()
        ids.append(byte)
    return total


@pytest.mark.slow
def test_choices_are_scored_one_at_a_time(items):
    model = GPT(GPTConfig(**{**SIZES, "block_size": 96}, recipe="modern", zero_init=False)).double().eval()
    some = [*items[:5], *items[-5:]]  # copies, and pieces of text
    texts = contexts(some, 3, seed=1) + [["France:", "Italy: Rome\nFrance:"]]
    some.append(Item("capitals", "France:", [" Paris", " Rome", " the capital"], 2))
    nats, read = choice_nats(model, Bytes(), some, texts, 96)
    for i, (item, of_item) in enumerate(zip(some, texts)):
        fit = [text for text in of_item if len(text) + max(map(len, item.choices)) <= 96]
        assert read[i] == len(fit) - 1
        want = [slow_nats(model, fit[-1], choice) for choice in item.choices]
        assert nats[i, :len(want)] == pytest.approx(want, abs=1e-5) and np.isinf(nats[i, len(want):]).all()
    assert {1, 3} < set(read.tolist()), "some examples do not fit"
    other, _ = choice_nats(model, Bytes(), some, [of_item[:1] for of_item in texts], 96)
    assert not np.allclose(other, nats), "negative control: examples are read"
    with pytest.raises(UserError, match="item 1 of 'copy': its prompt and choices are longer than the 4 tok"):
        choice_nats(model, Bytes(), some, texts, 4)


def test_the_likeliest_choice_is_the_answer():
    nats = np.array([[1.0, 2.0, np.inf], [2.0, 1.0, 3.0], [1.0, 1.0, 5.0]])
    right, surprise = graded(nats, np.array([0, 0, 0]))
    assert right.tolist() == [True, False, False], "a tie is no answer"
    p = np.exp(-nats)
    assert surprise == pytest.approx(-np.log(p[:, 0] / p.sum(1)))


def test_who_knows_the_rules_is_right_and_who_does_not_is_at_chance(monkeypatch):
    items = made_items(TEXT, 40, seed=4)
    answer, texts = np.array([item.answer for item in items]), contexts(items, 1, seed=1)

    def accuracy(nats_of_pair):
        monkeypatch.setattr(fewshot, "nats_after", lambda model, separator, pairs: np.array(
            [nats_of_pair(bytes(before).decode().split("\n")[-1], bytes(after).decode())
             for before, after in pairs]))
        return graded(choice_nats(None, Bytes(), items, texts, 500)[0], answer)[0].mean()

    known = {(item.prompt, item.choices[item.answer]) for item in items}
    rng = np.random.default_rng(0)
    assert accuracy(lambda before, after: float((before, after) not in known)) > 0.95
    assert abs(accuracy(lambda before, after: rng.random()) - 0.25) < 0.12
    assert accuracy(lambda before, after: 1.0) == 0.0


def test_a_text_of_too_few_words_is_one_line():
    with pytest.raises(UserError, match="too few words"):
        made_items("a b c", 5, 0)


def test_items_are_read_as_they_were_saved(items, tmp_path):
    save_items(tmp_path / "items.jsonl", items)
    assert read_items(tmp_path / "items.jsonl") == items


@pytest.mark.slow
def test_probe_fewshot_end_to_end(tmp_path, capsys):
    data = Dataset(write_dataset(tmp_path / "text", dict.fromkeys(("train", "val", "test"), TEXT.encode())))
    paths = []
    for seed in (1, 2):
        model = GPT(GPTConfig(**{**SIZES, "block_size": 64}, seed=seed))
        checkpoint.save(tmp_path / f"{seed}.pt", dict(
            model=model.state_dict(), config=asdict(model.config), meta=data.meta, step=1,
            train=dict(dataset=str(data.dir)), dataset=str(data.dir)))
        paths += ["--ckpt", str(tmp_path / f"{seed}.pt")]
    common = ["fewshot", *paths, "--shots", "0", "2", "--device", "cpu"]
    saved = str(tmp_path / "items.jsonl")
    probe.main([*common, "--items", "10", "--save", saved, "--json", str(tmp_path / "a.json")])
    out = capsys.readouterr().out
    assert f"{len(read_items(saved))} items, made of the words of text, test" in out
    first, second = (run["results"] for run in json.loads((tmp_path / "a.json").read_text())["runs"])
    assert [(r["task"], r["shots"]) for r in first] == [(task, k) for task in [*TASKS, "all"] for k in (0, 2)]
    assert all(r["accuracy_over_first"] is None for r in first)

    # by hand, from the same items
    items = read_items(saved)
    models = [checkpoint.build(checkpoint.read(path), path) for path in paths[1::2]]
    texts, answer = contexts(items, 2, 1337), np.array([item.answer for item in items])
    right = [graded(choice_nats(model, Bytes(), items, texts, 64)[0], answer)[0] for model in models]
    over = right[1].astype(float) - right[0]
    half = student.isf(0.025, len(over) - 1) * over.std(ddof=1) / math.sqrt(len(over))
    assert second[-1]["accuracy"][0] == pytest.approx(right[1].mean())
    bounds = [over.mean(), over.mean() - half, over.mean() + half]
    assert second[-1]["accuracy_over_first"] == pytest.approx(bounds)

    # the same items from the file, and fewer of them
    probe.main([*common, "--file", saved, "--json", str(tmp_path / "b.json")])
    assert json.loads((tmp_path / "b.json").read_text())["runs"][1]["results"] == second
    probe.main([*common, "--file", saved, "--items", "3"])
    assert "15 items" in capsys.readouterr().out
