"""What tests of the lab need: the programs for users of a checkpoint, labels."""

import numpy as np

from lab.labels.targets import encode, label_file, write_meta

OF_LAB = ["export_hf", "probe", "prune"]  # programs of lab/ for users of a checkpoint


def write_labels(folder, data, shift=0, splits=("train", "val", "test"), digit=None):
    """Make the label set of a byte dataset.

    digit: the token is one (some unknown, some 1/2), and for `shift` tokens earlier; noise: by chance.
    """
    folder.mkdir()
    for split in splits:
        tokens = np.asarray(data.tokens(split))
        is_digit = np.roll((tokens >= 48) & (tokens < 58), -shift).astype(float)
        is_digit[::7], is_digit[::11] = np.nan, 0.5
        noise = np.random.default_rng(len(tokens)).random(len(tokens))
        encode(is_digit if digit is None else np.full(len(tokens), digit)).tofile(
            label_file(folder, "digit", split))
        encode(noise).tofile(label_file(folder, "noise", split))
    write_meta(folder, data, ["digit", "noise"], splits, weak=True, note="made up")
    return str(folder)
