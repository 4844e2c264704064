"""
What to type where a study left something undecided: a new study of that alone, with fresh seeds, which is the
study's own command with a few keys exchanged.

Seeds are fresh that neither screened nor judged here, nor in other reports that the results file names. Some
more seeds for the same study would be a second look at the same scores, which p does not allow for; a new
study of its own is held to its own 5 %.
"""

import fnmatch
import itertools
import math
import re
import shlex
from pathlib import Path

from nanoheads import configurator
from nanoheads.common import number, printable
from nanoheads.files import joined
from lab.study.variants import MOST_PLAIN_SEEDS, StudyConfig

PROGRAM = ["python", "compare.py"]
MOST_SEEDS = 300  # of a variant; where it takes more, the two are too close for runs to tell them apart


def follow_up(study):
    """{"undecided", "variants", "seeds", "command"} for what a study left undecided; None: nothing.

    undecided: [{"variant", "baseline", "seeds"}], with how many fresh seeds would decide four times in five,
    if the difference is as it was seen; None: more than 1000. variants, seeds: whom the command is for, all
    that take at most MOST_SEEDS, and how many seeds the slowest of them takes; [] and None: nobody. command:
    as text for a shell; None: there is none, or what made the study is not known.
    """
    rows = [dict(variant=c.variant, baseline=c.baseline, seeds=c.more_seeds)
            for c in study.comparisons if is_open(study, c)]
    if not rows:
        return None
    near = [row for row in rows if is_near(row)]
    names = dict.fromkeys(row[side] for row in near for side in ("variant", "baseline"))
    names = [name for name in names if study.arms[name].kind == "variant"]
    seeds = max((row["seeds"] for row in near), default=None)
    return dict(undecided=rows, variants=names, seeds=seeds,
                command=command_of(study, names, fresh(study, seeds)) if near and study.command else None)


def is_near(row):
    """Whether an undecided comparison is worth a study."""
    return (row["seeds"] or math.inf) <= MOST_SEEDS


def is_open(study, c):
    """Whether a comparison is undecided for want of seeds, and not for runs that failed."""
    if c.verdict != "undecided" or math.isnan(number(c.se)):
        return False
    return bool(c.more_seeds) or min(number(c.p_corrected), number(c.p_same)) > study.alpha


def fresh(study, n):
    """n seeds that no run on file has, in order."""
    judged = {*study.seeds, *(seed for arm in study.arms.values() for seed in arm.seeds)}
    judged |= {seed for row in study.left_out or () for seed in row.seeds}
    judged |= {seed for look in study.looks or () for own in look.seeds.values() for seed in own}
    chose = study.config.get("screen_seeds", StudyConfig().screen_seeds)
    seeds = (seed for seed in itertools.count(max(judged) + 1) if seed not in chose)
    return [*itertools.islice(seeds, n)]


# ---- the command ----

def command_of(study, names, seeds):
    """The study's command for these variants and seeds, quoted for a shell; None: it is not known."""
    config, keys = study.config, configurator.keys_of((StudyConfig,))
    try:
        words = shlex.split(study.command)
    except ValueError:  # a quotation without its end
        return None
    files, given = configurator.split_args(words[2:], keys)
    given = dict(given)
    is_known = (words[:2] == PROGRAM and printable(study.command) == study.command
                and not study.one_of_several and given.keys() <= keys.keys() and None not in given.values())
    if not (is_known and all(is_made_by(config, name) for name in names)):
        return None
    more = {**narrowed(study, names), "seeds": seeds}
    if config.get("plain_seeds"):
        in_proportion = round(config["plain_seeds"] * len(seeds) / len(study.seeds))
        more["plain_seeds"] = min(max(len(seeds), in_proportion), MOST_PLAIN_SEEDS)
    if config.get("screen") and len(names) > config["best"] + config["worst"]:
        more["screen"] = False
    if config.get("minutes"):  # what was cut from it stays cut, but for the seeds
        cut = ("screen", "tune_lr", "budgets", "settings", "tokens_per_param")
        more = {**{key: config[key] for key in cut if config.get(key) is not None}, **more}
    if folder := folder_given(study, given):
        more["out_dir"] = folder
    stays = {key: text for key, text in given.items() if key not in more and key not in ("minutes", "fresh")}
    return " ".join(map(quoted, [*PROGRAM, *files, *(f"--{key}={text}" for key, text in stays.items()),
                                 *(f"--{key}={in_text(value)}" for key, value in more.items())]))


def is_made_by(config, name):
    """Whether a study of this config has a variant of this name."""
    return name in config.get("variants", {}) or any(fnmatch.fnmatchcase(name, pattern)
                                                     for pattern in config.get("mechanisms", ()))


def narrowed(study, names):
    """{key: value} that leave a study these variants alone; {}: it has no others."""
    config, given = study.config, study.config.get("variants") or {}
    every = {name for name, arm in study.arms.items() if arm.kind == "variant"}
    if not {*every, *(study.screened_out or ())} - {*names}:
        return {}
    mechanisms = [name for name in names if is_made_by(config, name) and name not in given]
    more = dict(mechanisms=mechanisms)
    if config.get("mechanism"):
        more = dict(mechanism=",".join(mechanisms) or None)
    more["variants"] = {name: flags for name, flags in given.items() if name in names}
    more["contrasts"] = [pair for pair in config.get("contrasts", ()) if {*pair} <= {*names, "plain"}]
    more["always"] = [name for name in config.get("always", ()) if name in names]
    return {key: value for key, value in more.items() if value or config.get(key)}


def folder_given(study, given):
    """A folder beside the one that a command, or its config file, gave the study; None: it gave none."""
    folder, default = given.get("out_dir"), Path("out", joined([f"{study.name}-{study.scale}"]))
    own = str(study.out or default)
    if folder is None:
        if study.texts or study.one_of_several or own.startswith(str(default)):
            return None
        folder = own
    name, number = re.fullmatch(r"(.*?)(?:-(\d+))?/*", folder).groups()
    return f"{name}-{int(number or 1) + 1}"


def in_text(value):
    """A value as a command line has it."""
    if isinstance(value, list) and value and all(re.fullmatch(r"\w+", str(each)) for each in value):
        return ",".join(map(str, value))
    return str(value)


def quoted(word):
    """shlex.quote(), easier to read where a value is a dict of names in single quotes."""
    if "'" in word and not {*word} & {*'"$`\\!'}:
        return f'"{word}"'
    return shlex.quote(word)
