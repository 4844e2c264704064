"""
Long-context recall out of real text: facts like "[QZX4831]" planted in a byte dataset, and repeated later.

python -m lab.needle                       plants into data/wikitext2_byte
python -m lab.needle --source=enwiki15     into any other dataset of bytes

A line with a name and four random digits comes eight times, the last seven about 64 to 16,384 bytes
(log-uniform) after the first: there the digits cannot be known, later they can be recalled. Names of val and
test never occur in train, and no name comes back with other digits before the last question. The text
between is the source's: facts go in after spaces.
From WikiText-2 you should see 14,508,020 train, 1,506,637 val and 1,687,759 test bytes.
"""
from nanoheads.common import UserError, last_words
from nanoheads.corpus import SPLITS, already, arguments, build, identity
from nanoheads.dataset import Dataset
from lab.probes.facts import DIGITS, digits_of, fact, names

import numpy as np


def plant(text, split, per_kib, asks, near, far, seed):
    """Pieces of bytes: the text with per_kib facts in each KiB, each `asks` times again near to far bytes on.

    UserError where there are too few names: one would come back before the last question about its fact.
    """
    rng, pool = np.random.default_rng([seed, SPLITS.index(split)]), names(split)
    # the facts between two places move them apart
    longer = 1 + per_kib * (1 + asks) * len(fact(pool[0], digits_of(0))) / 1024
    first = np.sort(rng.integers(0, len(text), int(per_kib * len(text) / 1024)))
    again = first + (np.exp(rng.uniform(np.log(near), np.log(far), (asks, len(first)))) / longer).astype(int)
    if (first[len(pool):] <= again.max(0)[:-len(pool)]).any():
        raise UserError(f"{per_kib:g} facts per KiB, asked up to {far:,} bytes later, need more than the "
                        f"{len(pool):,} names of "
                        f"{split}; take a smaller --per-kib or --far")
    values, deck = rng.integers(0, 10 ** DIGITS, len(first)), rng.permutation(len(pool))
    lines = [fact(pool[deck[i % len(pool)]], digits_of(value)) for i, value in enumerate(values)]
    places = np.concatenate((first, again.ravel()))
    spaces = np.flatnonzero(np.frombuffer(text, np.uint8) == 32) + 1
    if len(spaces):
        places = np.where(places < len(text),
                          spaces[np.searchsorted(spaces, places).clip(max=len(spaces) - 1)], places)
    done = 0
    for i in np.argsort(places, kind="stable"):  # of two at one place the fact comes before its question
        if places[i] > len(text):  # the text ends before it is asked
            break
        yield text[done:places[i]] + lines[i % len(lines)]
        done = places[i]
    yield text[done:]


def source_of(name):
    """The Dataset of bytes to plant into, its files compared with their checksums. UserError."""
    data = Dataset(name)
    if data.meta["encoding"] != "byte":
        raise UserError(f"{data.dir} is {data.meta['encoding']}, not byte: facts are planted between bytes")
    for split in SPLITS:
        data.tokens(split)  # compares it with its checksum
    return data


# {option: what argparse takes}; meta.json keeps their values
OPTIONS = dict(per_kib=dict(type=float, default=4.0, help="facts per KiB of source (default: 4)"),
               asks=dict(type=int, default=7, help="how often each is asked (default: 7)"),
               near=dict(type=int, default=64,
                         help="shortest distance between fact and question, bytes (default: 64)"),
               far=dict(type=int, default=16384, help="longest distance (default: 16384)"),
               seed=dict(type=int, default=1337, help="of places, names and digits (default: 1337)"))


def main(argv=None):
    with last_words("needle", "take a smaller text"):
        run(arguments(__doc__, "needle", ["byte"], argv, **OPTIONS))


def run(args):
    """Write the dataset that the command line asks for, or verify what is there. UserError."""
    if not (0 < args.per_kib <= 32 and 1 <= args.asks <= 16
            and 32 <= args.near < args.far and args.seed >= 0):
        raise UserError(f"--per-kib={args.per_kib:g} --asks={args.asks} --near={args.near} "
                        f"--far={args.far} --seed={args.seed}: "
                        "take up to 32 facts per KiB, 1 to 16 questions, 32 <= near < far, seed >= 0")
    data = source_of(args.source or "wikitext2_byte")
    about = {"file": data.meta["name"], "bytes": sum(data.splits[s]["bytes"] for s in SPLITS),
             "sha256": identity([data.splits[s]["sha256"] for s in SPLITS])}
    options = {key: getattr(args, key) for key in OPTIONS}
    if not already(args, sha256=about["sha256"], options=options):
        def splits():
            return [(split, plant(data.tokens(split).tobytes(), split, **options)) for split in SPLITS]
        build(args, about, splits, options=options)


if __name__ == "__main__":
    main()
