"""
What a results file must hold, and what is wrong with one that does not: so that every reader of it can trust
what it finds.

A shape is a type, or NUMBER; a tuple of shapes, one of which must fit; {key: shape}, a dict with these keys
and any others; [shape], a list of such; Each(shape), a dict with such values; Maybe(shape), which may be
None or missing.
"""

from typing import NamedTuple

from nanoheads.common import plural
from lab.study import stats

LARGEST = 1e30  # of a score, a cost, a figure


class Maybe(NamedTuple):
    """A shape of what may be None, or missing in its dict."""
    shape: object


class Each(NamedTuple):
    """A shape of a dict under any names: that of each of its values."""
    shape: object


NUMBER = (int, float)
OPEN = (int, float, type(None))  # a number that may not be known, its key there all the same
INTERVAL = dict(mean=OPEN, low=OPEN, high=OPEN)
WORTH = dict(**INTERVAL, words=str, smallest=OPEN, largest=OPEN, beyond=(str, type(None)))
PIECE = dict(nats=NUMBER, bytes=NUMBER, bpb=NUMBER)
SCORES = Each(Each(NUMBER))  # {name: {seed: bits/byte}}

RUN = dict(**PIECE, tokens=Maybe(int), params=NUMBER, flops_per_token=NUMBER, block_nats=Maybe([NUMBER]),
           spec=dict(model=dict(seed=int), train=dict(device=Maybe(str), own_mechanism=Maybe(str)),
                     score=dict(split=str), data=Maybe(Each((str, type(None))))),
           curve=Maybe(dict(tokens=[NUMBER], seconds=[NUMBER], bpb=[OPEN], train=[OPEN])))
ARM = dict(kind=str, label=str, flags=dict, steps=NUMBER, multiple=NUMBER, params=NUMBER, tokens=NUMBER,
           flops_per_token=NUMBER, executed_flops_per_token=OPEN,
           time_ratio=Maybe(dict(mean=NUMBER, low=NUMBER, high=NUMBER, ratios=Maybe([NUMBER]),
                                 clock=Maybe(str), processor=Maybe(str), compiled=Maybe(bool))),
           seconds=OPEN, tokens_per_s=OPEN, memory_mib=OPEN,
           best_step=OPEN, sample=Maybe(str), heads=Maybe(dict),
           seeds=[int], bpb=[OPEN], runs=[str], commands=Maybe([str]))
COMPARISON = dict(**INTERVAL, variant=str, baseline=str, equal=[str], n=int, verdict=str, words=str,
                  se=OPEN, df=OPEN, p=OPEN, p_corrected=OPEN,
                  more_seeds=OPEN, differences=[NUMBER], text=Maybe(dict(low=NUMBER, high=NUMBER)),
                  worth=Maybe(WORTH), equal_flops=Maybe(INTERVAL),
                  equal_time=Maybe(INTERVAL), look=Maybe(int))
LOOK = dict(date=str, folder=str, planned=int, done=int, finished=bool, seeds=Each([int]),  # see looks.py
            two_looks=Maybe(dict(spending=str, seeds=[int])))
STUDY = dict(
    name=str, question=str, command=str, alpha=NUMBER, margin=NUMBER, planned=int, done=int, config=dict,
    seeds=[int],
    settings=Maybe(dict), date=Maybe(str), commit=Maybe(str),
    versions=dict(torch=str), machine=dict(processor=str),
    data=dict(dataset=str, split=str, name=str, tokens=Maybe(NUMBER), bytes=Maybe(NUMBER),
              of_bytes=Maybe(NUMBER), note=Maybe(str)),
    plain=dict(base=str, recipe=str, n_layer=int, n_embd=int, block_size=int),
    failures=[dict(arm=str, stage=str, log=str, why=str)], pairs=[list], arms=Each(ARM), runs=Each(RUN),
    screen=Maybe(dict(seeds=[int], scores=SCORES, chosen=[str], rule=str)), screened_out=Maybe([str]),
    tuned=Maybe(Each(SCORES)), candidates=Maybe(Each([dict(rates=Each(NUMBER), bpb=Each(NUMBER))])),
    plain_rates=Maybe(dict(seeds=[int], start=dict, flags=dict, tried=[dict(steps=dict, bpb=Each(NUMBER))])),
    of_scale=Maybe(dict(steps=NUMBER, tokens=NUMBER)),
    finished=Maybe(bool), left_out=Maybe([dict(variant=str, seeds=[int])]), looks=Maybe([LOOK]),
    reused=Maybe([{"from": str, "runs": int, "other_code": int, "of": [str]}]),
    rescored=Maybe(dict(runs=[str], without=int)), lives=Maybe(dict),
    two_looks=Maybe(dict(spending=str, look=int, seeds=[int], first_seeds=[int], plain_seeds=[int],
                         pairs=[list])),
    untuned=Maybe(dict(rates=Each(Each(NUMBER)), runs=[int])))
# what effects.py computes from that
FIGURES = dict(
    comparisons=[COMPARISON], findable=Maybe(NUMBER), margin_as_compute=Maybe([Maybe(NUMBER)]),
    screened=Maybe([dict(**INTERVAL, variant=str, bpb=NUMBER, chosen=bool)]), taken=Maybe(Each(int)),
    levels=Maybe([NUMBER]))

# around the studies of several sizes, or on several texts
OF_SIZES = dict(name=str, command=str, sizes=Each(dict))
OF_TEXTS = dict(name=str, command=str, texts=Each(dict), together=dict)


def misfit(value, shape, where=""):
    """Where a value does not have a shape and what is there, in words; None: it has it."""
    if isinstance(shape, Maybe):
        return None if value is None else misfit(value, shape.shape, where)
    if isinstance(shape, (dict, Each)) and not isinstance(value, dict):
        return f"{where} is {shown(value)}, not a dict"
    if isinstance(shape, Each):
        parts = [(f"{where}.{key}", each, shape.shape) for key, each in value.items()]
    elif isinstance(shape, dict):
        missing = [key for key, each in shape.items() if key not in value and not isinstance(each, Maybe)]
        if missing:
            return f"{where}.{missing[0]} is missing"
        parts = [(f"{where}.{key}", value.get(key), each) for key, each in shape.items()]
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is {shown(value)}, not a list"
        parts = [(f"{where}[{i}]", each, shape[0]) for i, each in enumerate(value)]
    elif isinstance(shape, tuple) and not all(isinstance(kind, type) for kind in shape):
        every = [misfit(value, each, where) for each in shape]
        return every[0] if all(every) else None
    else:
        kinds = shape if isinstance(shape, tuple) else (shape,)
        fits = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
        beyond = fits and isinstance(value, (int, float)) and not is_finite(value)
        name = "number" if int in kinds and float in kinds else kinds[0].__name__
        words = f"{where} is {shown(value)}, not a {name}" + f" up to {LARGEST:g}" * beyond
        return words if beyond or not fits else None
    return next((words for part, each, own in parts if (words := misfit(each, own, part))), None)


def is_finite(value):
    """Whether a number is at most LARGEST, so that what statistics make of it, fourth powers, is finite too.
    """
    return abs(value) <= LARGEST  # False for nan


def shown(value):
    """A value in a message, cut short."""
    try:
        return repr(value)[:40]
    except ValueError:  # an int of more digits than Python prints
        return "a very long number"


def problem_of(study):
    """What is wrong with one study of a results file, in words; None: nothing a reader would trip over."""
    if words := misfit(study, STUDY):
        return words.lstrip(".")
    arms = study["arms"]
    if "plain" not in arms:
        return "arms has no plain, the plain GPT"
    if not 0 < study["alpha"] < 1 or not study["margin"] > 0:
        return f"alpha={study['alpha']} must be between 0 and 1 and margin={study['margin']} positive"
    for name, arm in arms.items():
        if not len(arm["seeds"]) == len(arm["bpb"]) == len(arm["runs"]):
            return (f"arms.{name} has {plural(len(arm['seeds']), 'seed')}, "
                    f"{plural(len(arm['bpb']), 'score')} and {plural(len(arm['runs']), 'run')}")
        if not (arm["multiple"] > 0 and arm["tokens"] > 0 and arm["steps"] > 0):
            return f"arms.{name} must have steps, tokens and a multiple above 0"
    looks = study.get("two_looks") or {}
    for pair in [*study["pairs"], *looks.get("pairs", ())]:
        if len(pair) != 3 or misfit(pair[2], [str]) or not all(isinstance(each, str) for each in pair[:2]):
            return f"pairs: {shown(pair)} is not a variant, a baseline and what is equal"
        if unknown := [name for name in pair[:2] if name not in arms]:
            return f"pairs: {unknown[0]!r} is not one of its arms"
    if looks and not (looks["spending"] in stats.SPENDING and looks["look"] in (1, 2)
                      and 0 < len(looks["first_seeds"]) < len(looks["seeds"])):
        return (f"two_looks is no plan: {shown(looks['spending'])}, look {looks['look']}, with "
                f"{len(looks['first_seeds'])} of {len(looks['seeds'])} seeds at the first look")
    for name, run in study["runs"].items():
        if not run["bytes"] > 0:
            return f"runs.{name}.bytes is {run['bytes']}, and must be above 0"
        if len({len(each) for each in (run.get("curve") or {}).values() if each is not None}) > 1:
            return f"runs.{name}.curve has lists of several lengths"
    return None


def problem_of_figures(study):
    """What is wrong with the figures of one study of a results file, in words; None: nothing."""
    if words := misfit(study, FIGURES):
        return words.lstrip(".")
    if study.get("two_looks") and len(study.get("levels") or ()) != 2:
        return "levels must be those of two_looks, two numbers"
    for i, c in enumerate(study["comparisons"]):
        if study.get("two_looks") and c.get("look") not in (1, 2):
            return f"comparisons[{i}].look is {shown(c.get('look'))}, and must be 1 or 2"
        if unknown := [c[side] for side in ("variant", "baseline") if c[side] not in study["arms"]]:
            return f"comparisons[{i}]: {unknown[0]!r} is not one of its arms"
