"""What a study is asked (StudyConfig): its keys, and the checks of their values."""

import fnmatch
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from model import ALL_ON, MECHANISMS
from nanoheads import configurator
from nanoheads.config import with_extensions
from nanoheads.configurator import Scale
from nanoheads.mechanism import flag, range_problems
from nanoheads.tasks import TASKS, TaskConfig
from study.records import PLAIN

# plain GPTs by size, the parameters of their blocks, on one scale's data and recipe
SIZES = {
    "0.1M": dict(n_layer=2, n_head=4, n_embd=64, adamw_lr=0.016, embed_lr=0.02),  # 98,304 parameters
    "0.33M": dict(n_layer=3, n_head=6, n_embd=96),   # 331,776
    "1M": dict(n_layer=5, n_head=8, n_embd=128),     # 983,040
    "10M": dict(n_layer=6, n_head=6, n_embd=384),    # 10,616,832
}
# keys of training that say where a run goes, and nothing of its numbers
BOOKKEEPING = {"out_dir", "resume", "overwrite", "eval_only", "json", "profile", "tensorboard",
               "wandb_log", "wandb_project", "wandb_run_name", "wandb_mode", "wandb_tags"}
# keys that a study sets itself, the same in every run
FIXED_KEYS = BOOKKEEPING | {"init_from", "init_anyway", "device", "patience"}
# what variants cannot set: the two sides would be scored on other text
TEXT_KEYS = {"dataset", "block_size", *TaskConfig.__dataclass_fields__}
SCORES_KEYS = ("baseline", "higher_is_better", "target")  # keys for the scores of another program alone

# seeds a side: in 15 to 30 minutes on two cores they detect 0.010 bits/byte four times in five, or 0.013
# if a mechanism's scores spread half as much again as usual
CHALLENGE_SEEDS = 15
MAX_SEED = 10**9

# names that a study gives by itself: budgets, wider plain GPTs, rates that are tried
RESERVED_NAMES = re.compile(r"plain( x .*|, .*)?|.*, (rates as they are|\w+ x [\d.]+)")


@dataclass
class StudyConfig:
    """The keys of a study, on the command line or in a config file."""

    question: str = flag("", "one line, at the top of the report", section="the question")
    mechanism: Optional[str] = flag(
        None, "the challenge: this one, or all in mine.py, judged; of several with commas between, each by "
              "itself")
    own_mechanism: Optional[str] = flag(None, "files with mechanisms; --mechanism=mine.py sets it")
    mechanisms: list[str] = flag([], "variants, by name (also acag*), all_on, mine.py")
    variants: dict = flag({}, "more variants: name -> flags; seed: added")
    contrasts: list = flag([], 'pairs of variants to compare too: [["a", "b"]]')
    first: dict = flag({}, "what variants read besides: path -> the command that makes it")
    scale: Optional[Scale] = flag(
        None, "which plain GPT: config/<scale>.py; None: tiny, of a study of tasks task")
    size: Optional[str] = flag(None, "another size of it: 0.1M | 0.33M | 1M | 10M")
    base: Optional[str] = flag(None, "config file of another plain GPT")
    settings: dict = flag({}, "flags for both sides, on top of the plain GPT's")
    task: list[str] = flag(
        [], "judge on tasks in place of a text: recall,copy, or all; at --scale=task")
    texts: list[str] = flag([], "datasets to judge on, together; the first chooses, tunes")

    tokens_per_param: Optional[float] = flag(
        None, "tokens to train on, a parameter of the plain blocks", above=0, at_most=1e6,
        section="the budget")
    budgets: Optional[list[float]] = flag(
        None, "multiples of the budget at which the plain GPT is trained too, to know what compute is worth; "
              "None: 0.7, 1.4 and 2, of tasks 2, with --mechanism none: its time goes into seeds")
    seeds: Optional[list[int]] = flag(
        None, "of each variant that is judged; choose them before any score is known; None: 1 to 5, with "
              "--mechanism 1 to 15")
    plain_seeds: Optional[int] = flag(
        None, "of the plain GPT; None: sqrt(variants judged) times as many, of tasks as many as a verdict "
              "needs", at_most=1000)
    split: str = flag("test", "what is scored in the end")
    test_tokens: int = flag(0, "so many tokens of it, evenly spaced; 0: all", at_least=0)

    screen: Optional[bool] = flag(
        None, "choose the variants to judge by validation first, if all are too many: more than best + worst "
              "beside those that are named; None: with --mechanism alone",
        section="two stages: all variants on validation, some of them with fresh seeds on the test split")
    screen_seeds: list[int] = flag([101, 102], "of this stage, and of tune_lr; none of them judges")
    best: int = flag(6, "so many of the best are judged", at_least=0)
    worst: int = flag(2, "and so many of the worst", at_least=0)
    always: list[str] = flag([], "and these, wherever they stand")

    match_parameters: bool = flag(
        True, "what seems better is compared to a plain GPT of as many parameters", section="fairness")
    tune_lr: bool = flag(False, "the plain GPT and all that is judged: at their own best rates")

    json: Optional[str] = flag(
        None, "write the verdicts to this file too, for a program to read", section="where it runs")
    out_dir: Optional[str] = flag(
        None, "the report's folder; None: out/<config or mechanisms>-<scale>, with -2, -3, ... behind where "
              "another study has that name")
    jobs: int = flag(0, "runs at once, at most; 0: jobs_per_gpu a GPU, or one a CPU core", at_least=0)
    jobs_per_gpu: int = flag(1, "runs at once on one GPU, each with its part of the memory", at_least=1)
    device: str = flag("auto", "auto | cpu | cuda | mps; cuda:1: that GPU alone")

    accept_code: bool = flag(
        False, "take runs that other code or other libraries made, too",
        section="which finished runs count; without these keys those in out/trials of the same code alone")
    fresh: bool = flag(False, "train everything anew, and print how many scores agree with before")

    baseline: Optional[str] = flag(None, "the variant that the others are compared with; None: the first",
                                   section="of the scores of another program")
    higher_is_better: bool = flag(False, "of these scores; False: lower is, as for a loss")
    target: Optional[float] = flag(
        None, "is the mean of each variant below it, or above it where higher is better?")

    alpha: float = flag(0.05, "false verdicts of the whole study; intervals are 1 - alpha",
                        above=0, below=1, section="statistics")
    margin: Optional[float] = flag(
        None, "a difference below it is called the same; None: 0.01 bits/byte, of a task 0.05 of the answers",
        above=0)

    def __post_init__(self):
        if self.screen is None:
            self.screen = self.mechanism is not None and not self.task
        if self.mechanism:
            self.mechanisms = self.mechanisms or self.mechanism.split(",")
        if self.scale is None:
            self.scale = "task" if self.task and not self.base else "tiny"
        if self.margin is None:
            self.margin = 0.05 if self.task else 0.01
        if self.budgets is None:
            self.budgets = [2.0] if self.task else [] if self.mechanism else [0.7, 1.4, 2.0]
        if self.seeds is None:
            self.seeds = [*range(1, 1 + (CHALLENGE_SEEDS if self.mechanism else 5))]

    @property
    def file(self):
        """The config file of the plain GPT."""
        return self.base or f"config/{self.scale}.py"

    def problems(self):
        """Everything that is wrong with these keys, as a list of sentences (empty: fine)."""
        return [*range_problems(self), *self.problems_of_variants(), *self.problems_of_text(),
                *self.problems_of_seeds(), *self.problems_of_choices()]

    def problems_of_runs(self):
        """What else is wrong in a study that trains its runs; one of scores on file has no such problems."""
        bad = [f"{key} goes with compare.py scores FILE alone" for key in SCORES_KEYS
               if getattr(self, key) not in (None, False)]
        if self.fresh and self.accept_code:
            bad.append("fresh trains everything anew, and accept_code takes what is there: leave one out")
        if not (self.mechanisms or self.variants or self.tune_lr):
            bad.append("mechanisms and variants are empty: name at least one variant to compare")
        return bad

    def problems_of_variants(self):
        """What is wrong with what is compared."""
        bad = []
        for pattern in self.mechanisms:
            if not names_matching(pattern):
                suggestion, hint = configurator.likely_key(pattern, [*MECHANISMS, "all_on"])
                hint = hint if suggestion else ("model.MECHANISMS lists them, "
                                                "docs/your-own-mechanism.md adds one")
                bad.append(f"mechanisms: unknown {pattern!r}; {hint}")
        if self.mechanism and self.mechanisms != self.mechanism.split(","):
            bad.append(f"mechanism={self.mechanism!r} is a study of its own: leave out mechanisms, or it")
        for name, flags, forbidden in [("settings", self.settings, {"seed", "task"}),
                                      *((name, flags, TEXT_KEYS) for name, flags in self.variants.items())]:
            if not (isinstance(name, str) and name):
                bad.append(f"variants: the name {name!r} must be text in quotes")
            elif not isinstance(flags, dict):
                bad.append(f"variants: {name!r} must be a dict of flags, not {flags!r}")
            elif not_text := [key for key in flags if not isinstance(key, str)]:
                bad.append(f"{name}: the flag {not_text[0]!r} must be a name in quotes")
            elif refused := sorted({*flags} & (FIXED_KEYS | forbidden)):
                where = "; settings can" if {*refused} <= TEXT_KEYS - {"task"} else ""
                where = "; --task=NAME makes a study of tasks" if "task" in refused else where
                bad.append(f"{name}: {', '.join(refused)} cannot be set here: "
                           f"a study decides it for every run{where}")
        names = {PLAIN, *(name for pattern in self.mechanisms for name in names_matching(pattern))}
        bad += [f"variants: the name {name!r} is taken" for name in self.variants
                if isinstance(name, str) and (name in names or RESERVED_NAMES.fullmatch(name))]
        names |= {*self.variants}
        for pair in self.contrasts:
            are_names = isinstance(pair, (list, tuple)) and all(isinstance(name, str) for name in pair)
            if not (are_names and len(pair) == len({*pair}) == 2 and {*pair} <= names):
                bad.append(f"contrasts: {pair!r} must be two of this study's variants")
        bad += [f"always: {name!r} is no variant of this study" for name in self.always if name not in names]
        bad += [f"first: {path!r} and its command {command!r} must be texts"
                for path, command in self.first.items()
                if not (isinstance(path, str) and isinstance(command, str))]
        return bad

    def problems_of_text(self):
        """What is wrong with what it is judged on."""
        bad = []
        if self.size not in (None, *SIZES):
            bad.append(f"size={self.size!r} must be one of {', '.join(SIZES)}")
        names = {Path(text).name for text in self.texts}
        if self.texts and (len(names) < max(2, len(self.texts)) or "dataset" in self.settings):
            bad.append(f"texts={self.texts} must be two datasets or more (one is --settings=\"{{'dataset': "
                       "'NAME'}\"), each once, without settings of a dataset beside them")
        if self.base and self.scale != "tiny":
            bad.append(f"scale={self.scale!r} means nothing beside base={self.base!r}, "
                       "which is the plain GPT already")
        if unknown := [name for name in self.task if name not in (*TASKS, "all")]:
            bad.append(f"task: unknown {unknown[0]!r}; there are {', '.join(TASKS)}, and all")
        if self.task:
            text_keys = dict(texts=[], tokens_per_param=None, test_tokens=0, screen=False, best=6, worst=2,
                             always=[])
            bad += [f"task={self.task} and {key}={getattr(self, key)}: {key} is for a study of texts"
                    for key, default in text_keys.items() if getattr(self, key) != default]
            if self.settings.get("dataset"):
                bad.append(f"settings: dataset={self.settings['dataset']!r} is of a text, not of a task")
        return bad

    def problems_of_seeds(self):
        """What is wrong with seeds and budgets."""
        bad = []
        if any(not 0 < b <= 1000 or b == 1 for b in self.budgets) or len({*self.budgets}) < len(self.budgets):
            bad.append(f"budgets={self.budgets} must be different, positive, at most 1000, and not 1, the "
                       "plain GPT's own")
        for name in ("seeds", "screen_seeds"):
            seeds = getattr(self, name)
            if not seeds or len({*seeds}) < len(seeds) or min(seeds) < 0:
                bad.append(f"{name}={seeds} must be different numbers, at least one, none negative")
            elif max(seeds) > MAX_SEED:
                bad.append(f"{name}={seeds} must be numbers of at most {MAX_SEED:,}")
        if (self.screen or self.tune_lr) and {*self.seeds} & {*self.screen_seeds}:
            bad.append(f"screen_seeds={self.screen_seeds} choose, and seeds={self.seeds} judge: none in both")
        if self.plain_seeds is not None and self.plain_seeds < len(self.seeds):
            bad.append(f"plain_seeds={self.plain_seeds} must be at least a variant's, {len(self.seeds)}")
        return bad

    def problems_of_choices(self):
        """What is wrong with the rest."""
        bad = []
        val_chooses = self.tune_lr or self.screen
        if self.split not in ("val", "test") or self.split == "val" and val_chooses:
            reason = ", since val chooses" if val_chooses else " or val"
            bad.append(f"split={self.split!r} must be test{reason}")
        if self.target is not None and not math.isfinite(self.target):
            bad.append(f"target={self.target} must be a finite number")
        return bad


def names_matching(pattern):
    """The names that an entry of `mechanisms` stands for: itself, or those of MECHANISMS that its * match."""
    return ["all_on"] if pattern == "all_on" else fnmatch.filter(MECHANISMS, pattern)


def variants_of(config):
    """{name: flags} of everything that is compared with the plain GPT."""
    names = dict.fromkeys(name for pattern in config.mechanisms for name in names_matching(pattern))
    return {**{name: with_extensions(ALL_ON if name == "all_on" else MECHANISMS[name]) for name in names},
            **config.variants}
