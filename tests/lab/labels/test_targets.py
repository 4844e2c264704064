"""Labels on disk: aligned with the tokens, and refused where they are not."""
import json

import numpy as np
import pytest

from nanoheads.common import UserError
from nanoheads.batches import Batches
from nanoheads.dataset import Dataset
from lab.labels.targets import UNKNOWN, Targets, decode, encode, label_file
from lab_helpers import is_digit, put_labels


@pytest.fixture
def labelled(bytes_data, tmp_path):
    """(Dataset, folder of labels): "digit" is 1 on a digit, "soft" is byte / 255 on every other token."""
    dataset = Dataset(bytes_data)
    return dataset, put_labels(
        tmp_path / "weak", dataset, digit=is_digit,
        soft=lambda tokens: np.where(np.arange(len(tokens)) % 2, tokens / 255, np.nan))


def test_a_byte_holds_a_value_or_nothing():
    codes = encode(np.array([0, 1, 0.5, 0.251, np.nan]))
    assert codes.tolist() == [0, 254, 127, 64, UNKNOWN] and codes.dtype == np.uint8
    every = decode(np.arange(256, dtype=np.uint8)).numpy()
    assert every[0] == 0 and every[254] == 1 and every[UNKNOWN] == -1
    assert (encode(every[:UNKNOWN]) == np.arange(UNKNOWN)).all()
    for wrong in ([1.1], [-0.1], [np.inf]):
        with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
            encode(wrong)


def test_targets_stand_beside_the_tokens_that_are_read(labelled):
    """A batch's x[t] is a digit exactly where its target is 1: shifted by one, the test fails."""
    dataset, folder = labelled
    targets, batches = Targets(dataset, folder), Batches(dataset, "train", 16, 4, seed=3)
    for step in (0, 400):  # in the second pass, too
        ids = batches(step)
        found = targets.rows("train", batches.starts(step), 16)
        x, y = ids[:, :-1], ids[:, 1:]
        assert (found["digit"] == is_digit(x)).all()
        assert (found["digit"] != is_digit(y)).any()
        known = found["soft"] >= 0
        assert 0.4 < known.float().mean() < 0.6
        assert (found["soft"][known] - x[known] / 255).abs().max() < 0.002


def test_labels_say_what_they_are(labelled):
    dataset, folder = labelled
    meta = json.loads((folder / "labels.json").read_text())
    row, tokens = meta["splits"]["train"], np.asarray(dataset.tokens("train"))
    assert meta["weak"] and meta["names"] == ["digit", "soft"] and row["tokens"] == len(tokens)
    assert row["names"]["digit"]["labelled"] == len(tokens)
    assert row["names"]["digit"]["mean"] == pytest.approx(np.mean(is_digit(tokens)))
    assert row["names"]["soft"]["labelled"] == len(tokens) / 2
    assert Targets(dataset, folder, ["soft"]).unread == ["digit"]


def test_what_does_not_belong_to_the_tokens_is_refused_by_name(labelled, chars_data):
    dataset, folder = labelled

    def refused(words, labels=folder, data=dataset, split="train", names=None):
        with pytest.raises(UserError, match=words) as e:
            Targets(data, labels, names).rows(split, [0], 4)
        assert "\n" not in str(e.value)

    refused("'none'.*python -m lab.label --dataset=.*, see docs/constraints.md, makes them", "none")
    refused(f"'weak'.*: python -m lab.label --dataset={dataset.dir} --by=weak makes them", "weak")
    refused("'test'", split="test")
    refused("truth.*digit, soft", names=["digit", "truth"])
    refused("train", data=Dataset(chars_data))
    path = label_file(folder, "digit", "train")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    refused("digit.train.u8.*19,999.*20,000")
    path.write_bytes(whole[1:] + b"\0")  # as long, and one token off
    refused("digit.train.u8 is not the file that labels.json describes.*label digit anew")
    path.unlink()
    refused("digit.train.u8")
    path.write_bytes(whole)
    meta = json.loads((folder / "labels.json").read_text())
    del meta["splits"]["val"]["names"]["soft"]["sha256"]
    for damaged in (dict(meta, names=3), meta):
        (folder / "labels.json").write_text(json.dumps(damaged))
        refused("labels.json is not what lab/label.py writes .*label it anew")
