"""
The plain GPT's own best rates: one flag at a time by a factor of 2, on validation, while that is better.

A comparison is worth what its baseline is worth. Where the search ends, no neighbour of the rates is better
by more than one standard error of the differences at the same seeds.
"""

import math

# flags of each optimizer that the search moves; lr takes along what follows from it
MOVED = {"muon": ("muon_lr", "muon_momentum", "adamw_lr", "embed_lr"), "adamw": ("adamw_lr", "embed_lr")}
FAR = 0.01  # bits/byte: twice what two seeds at the same rates differ by; so far off, two seeds are enough
MOST_MOVES = 12  # of one flag by one factor: a search that goes on for longer has found no optimum


def flags_at(train, steps):
    """{flag: value} of a TrainConfig with some flags moved, steps: {flag: how often by a factor of 2}.

    A momentum m is moved by its memory, 1 / (1 - m) steps.
    """
    moved = {}
    for flag, n in steps.items():
        if n and flag == "muon_momentum":
            moved[flag] = round(1 - (1 - train.muon_momentum) / 2**n, 12)
        elif n:
            keys = ("adamw_lr", "min_lr") if flag == "adamw_lr" else (flag,)
            moved.update({key: getattr(train, key) * 2.0**n for key in keys})
    return moved


def neighbours(steps):
    """All that differ from {flag: steps} by one factor of 2 in one flag."""
    return [{**steps, flag: n + more} for flag, n in steps.items() for more in (-1, 1)]


def paired(scores, other):
    """(mean, standard error) of scores minus others, {seed: bits/byte}, at the seeds that both have.

    Without scores, since the runs diverged, the mean is infinite, and -inf where only the others did.
    """
    if scores and not other:
        return -math.inf, 0.0
    differences = [scores[seed] - other[seed] for seed in scores if seed in other] or [math.inf]
    n, mean = len(differences), sum(differences) / len(differences)
    if n < 2:
        return mean, math.inf
    return mean, math.sqrt(sum((d - mean)**2 for d in differences) / (n - 1) / n)


def is_close(scores, best):
    """Whether rates with these {seed: bits/byte} are not so far behind the best that two seeds are enough."""
    return paired(scores, best)[0] < FAR


def search(tried):
    """(the best rates so far, those still to be tried) of [{"steps": ..., "bpb": {seed: bits/byte}}].

    From the first on, the search moves to the best neighbour while that is better by more than a standard
    error. One without a score diverged: it is left for any that did not, and no neighbour to move to.
    """
    scores = {key_of(each["steps"]): each["bpb"] for each in tried}
    at = tried[0]["steps"]
    for _ in range(MOST_MOVES):
        around = neighbours(at)
        if missing := [steps for steps in around if key_of(steps) not in scores]:
            return at, missing
        gains = [(*paired(scores[key_of(steps)], scores[key_of(at)]), steps) for steps in around]
        better = [(mean, key_of(steps), steps) for mean, error, steps in gains if mean < -error]
        if not better:
            break
        at = min(better)[-1]
    return at, []


def key_of(steps):
    return tuple(sorted(steps.items()))


def summary(record):
    """What a study's record of its search says: {"steps", "gain", "rows"}; see Study.tune_plain().

    rows: for each flag its value, and of half and of double the mean and standard error of the difference,
    infinite where it diverged, None where it was not tried.
    """
    scores = {key_of(each["steps"]): each["bpb"] for each in record["tried"]}
    steps, missing = search(record["tried"])
    rows = []
    for flag, n in steps.items():
        beside = [scores.get(key_of({**steps, flag: n + more})) for more in (-1, 1)]
        beside = [own if own is None else paired(own, scores[key_of(steps)]) for own in beside]
        rows.append(dict(flag=flag, steps=n, beside=beside))
    gain = paired(scores[key_of(steps)], record["tried"][0]["bpb"])
    finished = not missing and all(own and own[0] >= -own[1] for row in rows for own in row["beside"])
    return dict(steps=steps, finished=finished, gain=gain, rows=rows)
