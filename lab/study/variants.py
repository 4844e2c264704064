"""
What a study compares: its config, and the models made from it - the plain GPT, variants of it, the plain GPT
at other budgets, and plain GPTs with a variant's parameters.
"""

import fnmatch
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, Optional

import torch

from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from nanoheads import checkpoint, configurator, own_mechanism
from nanoheads.common import UserError
from nanoheads.config import TrainConfig, data_of, training_problems, with_log
from nanoheads.configurator import Scale
from nanoheads.mechanism import flag
from nanoheads.optim import block_matrices, of_mechanisms
from nanoheads.tasks import TASKS, TaskConfig
from nanoheads.teacher import is_function
from lab.study import effects
from lab.study.records import LARGEST, is_finite

# plain GPTs by size, the parameters of their blocks, on one scale's data and recipe
SIZES = {
    "0.1M": dict(n_layer=2, n_head=4, n_embd=64, adamw_lr=0.016, embed_lr=0.02),  # 98,304 parameters
    "0.33M": dict(n_layer=3, n_head=6, n_embd=96),   # 331,776
    "1M": dict(n_layer=5, n_head=8, n_embd=128),     # 983,040
    "10M": dict(n_layer=6, n_head=6, n_embd=384),    # 10,616,832
}
# values of a variant's flags that follow the size of the plain GPT
RELATIVE = {"n_head": lambda model: model.n_head, "n_embd // 2": lambda model: model.n_embd // 2,
            "half the heads": lambda model: [list(range((model.n_head + 1) // 2))] * model.n_layer}
# keys of training that no trial.json has: where a run goes, and nothing of its numbers
BOOKKEEPING = {"out_dir", "resume", "overwrite", "eval_only", "json", "profile", "tensorboard",
               "wandb_log", "wandb_project", "wandb_run_name", "wandb_mode", "wandb_tags"}
FIXED_BY_STUDY = BOOKKEEPING | {"init_from", "init_anyway", "device"}  # what settings and variants cannot set
# what variants cannot set: the two sides would be scored on other text
SAME_TEXT = {"dataset", "block_size", *(f.name for f in fields(TaskConfig))}
# what is tuned, and which keys move together. min_lr goes with adamw_lr, which it must not exceed
RATES = {"muon_lr": ("muon_lr",), "muon_momentum": ("muon_momentum",), "adamw_lr": ("adamw_lr", "min_lr"),
         "embed_lr": ("embed_lr",), "mechanism_lr": ("mechanism_lr",)}


# what is beyond these is a slip: no machine trains it
MOST_TOKENS_PER_PARAM, MOST_BUDGETS = 1_000_000, 1000
MOST_SEED, MOST_PLAIN_SEEDS = 10**9, 1000
LEAST_FOR_TWO_LOOKS = 3  # seeds: fewer than two judge nothing at the first one

# a side: in half an hour of two cores they find 0.015 bits/byte four times in five, also where a mechanism's
# scores spread half as much again as usual (docs/add-a-mechanism.md)
SEEDS_OF_CHALLENGE = 15

# names that a study gives: budgets, baselines, rates that are tried
OF_STUDY = re.compile(r"plain( x .*|, .*)|.*, (candidate \d+|\w+ x [\d.]+)")


@dataclass
class StudyConfig:
    question: str = flag("", "one line, at the top of the report", section="the question")
    mechanism: Optional[str] = flag(None, "the challenge: this one, or all in mine.py, judged")
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
        [], "judge on tasks in place of a text: recall,copy, or all (docs/tasks.md); at --scale=task")
    texts: list[str] = flag([], "datasets to judge on, together; the first chooses, tunes")

    minutes: Optional[float] = flag(
        None, "all of it in so many on this machine: fewer seeds, then fewer steps", section="the budget")
    tokens_per_param: Optional[float] = flag(None, "tokens to train on, a parameter of the plain blocks")
    budgets: Optional[list[float]] = flag(
        None, "multiples of the budget at which the plain GPT is trained too, to know what compute is worth; "
              "None: 0.7, 1.4 and 2.0, with --mechanism none: its time goes into seeds")
    seeds: Optional[list[int]] = flag(
        None, "of each variant that is judged; choose them before any score is known; None: 1 to 5, with "
              "--mechanism 1 to 15")
    plain_seeds: Optional[int] = flag(None, "of the plain GPT; None: sqrt(variants judged) times as many")
    looks: Literal[1, 2] = flag(
        1, "2: judge by the first half of the seeds, and train the other half for what is undecided then; p "
           "is corrected for both looks")
    spending: Literal["obrien_fleming", "pocock"] = flag(
        "obrien_fleming", "how two looks share the error: the first is strict, so that the second loses "
                          "little; or both alike, so that more is decided at the first and less in the end")
    split: str = flag("test", "what is scored in the end")
    test_tokens: int = flag(0, "so many tokens of it, evenly spaced; 0: all")

    screen: Optional[bool] = flag(
        None, "choose the variants to judge by validation first, if all are too many: more than best + worst "
              "beside those that are named; None: with --mechanism alone",
        section="two stages: all variants on validation, some of them with fresh seeds on the test split")
    screen_seeds: list[int] = flag([101, 102], "of this stage, and of tune_lr; none of them judges")
    best: int = flag(6, "so many of the best are judged")
    worst: int = flag(2, "and so many of the worst")
    always: list[str] = flag([], "and these, wherever they stand")

    match_parameters: bool = flag(
        True, "what seems better is compared to a plain GPT of as many parameters", section="fairness")
    tune_lr: bool = flag(False, "the plain GPT and all that is judged: at their own best rates")
    lives: bool = flag(False, "dynamic heads: also report their states, speed, samples")

    json: Optional[str] = flag(
        None, "write the verdicts to this file too, for a program to read", section="where it runs")
    out_dir: Optional[str] = flag(
        None, "the report's folder; None: out/<config or mechanisms>-<scale>, with -2, -3, ... behind where "
              "another study has that name")
    jobs: int = flag(0, "runs at once, at most; 0: jobs_per_gpu a GPU, or one a CPU core")
    jobs_per_gpu: int = flag(1, "runs at once on one GPU, each with its part of the memory")
    device: str = flag("auto", "auto | cpu | cuda | mps; cuda:1: that GPU alone")
    dry_run: bool = flag(False, "print what would run, and for how long")
    report_only: bool = flag(False, "write the report from what is done")

    accept_code: bool = flag(
        False, "take runs that other code or other libraries made, too",
        section="which finished runs count; without these keys those in out/trials of the same code alone")
    fresh: bool = flag(False, "train everything anew, and print how many scores agree with before")
    rescore: Optional[int] = flag(
        None, "so many runs are scored once more from their checkpoints before the report; None: one in ten "
              "of those that are done, 0: none")

    from_results: Optional[str] = flag(
        None, "write its report once more, without the runs", section="from a results.json.gz")
    recheck: Optional[str] = flag(None, "compute every figure of it once more, and compare")
    tables: bool = flag(False, "write the tables in README.md and docs/ from results/")

    scores: Optional[str] = flag(
        None, "CSV: variant, seed, score; optional: tokens, bytes, cost",
        section="from a file of scores that another program made (docs/scores.md)")
    baseline: Optional[str] = flag(None, "the variant that the others are compared with; None: the first")
    higher_is_better: bool = flag(False, "of these scores; False: lower is, as for a loss")
    target: Optional[float] = flag(
        None, "is the mean of each variant below it, or above it where higher is better?")

    alpha: float = flag(
        0.05, "false verdicts of the whole study; intervals are 1 - alpha", section="statistics")
    margin: Optional[float] = flag(
        None, "a difference below it is called the same; None: 0.01 bits/byte, of a task 0.05 of the answers")

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
            self.budgets = [] if self.mechanism or self.task else [0.7, 1.4, 2.0]
        if self.seeds is None:
            self.seeds = [*range(1, 1 + (SEEDS_OF_CHALLENGE if self.mechanism else 5))]

    @property
    def has_results_already(self):
        return self.from_results or self.recheck or self.tables or self.scores

    def problems(self):
        """Everything that is wrong with this study, as a list of sentences (empty: fine)."""
        return [*configurator.text_problems(self), *self.problems_of_variants(), *self.problems_of_text(),
                *self.problems_of_budget(), *self.problems_of_choices()]

    def problems_of_variants(self):
        bad = []
        given = [key for key in ("baseline", "higher_is_better") if getattr(self, key)]
        given += ["target"] * (self.target is not None)
        if given and not self.scores:
            return [f"{', '.join(given)}: these go with compare.py scores FILE alone"]
        for pattern in self.mechanisms:
            if not matching(pattern):
                meant, hint = configurator.nearest(pattern, [*MECHANISMS, "all_on"])
                hint = hint if meant else "model.MECHANISMS lists them, docs/add-a-mechanism.md adds one"
                bad.append(f"mechanisms: unknown {pattern!r}; {hint}")
        if self.mechanism and self.mechanisms != self.mechanism.split(","):
            bad.append(f"mechanism={self.mechanism!r} is a study of its own: leave out mechanisms, or it")
        if not (self.mechanisms or self.variants or self.tune_lr or self.has_results_already):
            bad.append("mechanisms and variants are empty: name at least one variant to compare")
        every = [("settings", self.settings, {"seed"})]
        every += [(name, flags, SAME_TEXT) for name, flags in self.variants.items()]
        for name, flags, not_here in every:
            if not (isinstance(name, str) and name):
                bad.append(f"variants: the name {name!r} must be text in quotes")
            if not isinstance(flags, dict):
                bad.append(f"variants: {name!r} must be a dict of flags, not {flags!r}")
                continue
            if unnamed := [key for key in flags if not isinstance(key, str)]:
                bad.append(f"{name}: the flag {unnamed[0]!r} must be a name in quotes")
                continue
            if refused := sorted(set(flags) & (FIXED_BY_STUDY | not_here)):
                where = "; settings can" if set(refused) <= SAME_TEXT else ""
                bad.append(f"{name}: {', '.join(refused)} cannot be set here: "
                           f"a study decides it for every run{where}")
        names = {"plain", *(name for pattern in self.mechanisms for name in matching(pattern))}
        bad += [f"variants: the name {name!r} is taken" for name in self.variants
                if name in names or isinstance(name, str) and OF_STUDY.fullmatch(name)]
        names |= set(self.variants)
        for pair in self.contrasts:
            known = isinstance(pair, (list, tuple)) and all(isinstance(name, str) for name in pair)
            if not (known and len(pair) == len({*pair}) == 2 and {*pair} <= names):
                bad.append(f"contrasts: {pair!r} must be two of this study's variants")
        bad += [f"always: {name!r} is no variant of this study" for name in self.always if name not in names]
        return bad

    def problems_of_text(self):
        bad = []
        if self.size not in (None, *SIZES):
            bad.append(f"size={self.size!r} must be one of {', '.join(SIZES)}")
        names = {Path(text).name for text in self.texts}
        if self.texts and (len(names) < max(2, len(self.texts)) or "dataset" in self.settings):
            bad.append(f"texts={self.texts} must be two datasets or more (one is --settings=\"{{'dataset': "
                       "'NAME'}\"), each once, without settings of a dataset beside them")
        return bad

    def problems_of_budget(self):
        bad = []
        if self.minutes is not None and not self.minutes > 0:
            bad.append(f"minutes={self.minutes} must be above 0")
        if self.tokens_per_param is not None and not 0 < self.tokens_per_param <= MOST_TOKENS_PER_PARAM:
            bad.append(f"tokens_per_param={self.tokens_per_param} must be positive, and at most "
                       f"{MOST_TOKENS_PER_PARAM:,}")
        if large := [b for b in self.budgets if b > MOST_BUDGETS]:
            bad.append(f"budgets={self.budgets} must be at most {MOST_BUDGETS:,} times the plain GPT's own, "
                       f"and {large[0]:g} is not")
        if any(not b > 0 or b == 1 for b in self.budgets) or len(set(self.budgets)) < len(self.budgets):
            bad.append(f"budgets={self.budgets} must be different, positive, and not 1, the plain GPT's own")
        for name in ("seeds", "screen_seeds"):
            seeds = getattr(self, name)
            if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
                bad.append(f"{name}={seeds} must be different numbers, at least one, none negative")
            elif max(seeds) > MOST_SEED:
                bad.append(f"{name}={seeds} must be numbers of at most {MOST_SEED:,}")
        if (self.screen or self.tune_lr) and set(self.seeds) & set(self.screen_seeds):
            bad.append(f"screen_seeds={self.screen_seeds} choose, and seeds={self.seeds} judge: none in both")
        if self.looks == 2 and len(self.seeds) < LEAST_FOR_TWO_LOOKS:
            bad.append(f"looks=2 needs {LEAST_FOR_TWO_LOOKS} seeds or more, two of them for the first look: "
                       f"seeds={self.seeds}")
        if self.plain_seeds is not None and self.plain_seeds < len(self.seeds):
            bad.append(f"plain_seeds={self.plain_seeds} must be at least a variant's, {len(self.seeds)}")
        if self.plain_seeds is not None and self.plain_seeds > MOST_PLAIN_SEEDS:
            bad.append(f"plain_seeds={self.plain_seeds} must be at most {MOST_PLAIN_SEEDS:,}")
        for name in ("jobs", "test_tokens", "best", "worst", "rescore"):
            if (getattr(self, name) or 0) < 0:
                bad.append(f"{name}={getattr(self, name)} must not be negative")
        if self.jobs_per_gpu < 1:
            bad.append(f"jobs_per_gpu={self.jobs_per_gpu} must be at least 1")
        return bad

    def problems_of_choices(self):
        bad = []
        given = [key for key in ("dry_run", "recheck", "tables") if getattr(self, key)]
        if self.json and given:
            bad.append(f"json={self.json!r} has nothing to hold: {given[0]} judges nothing")
        if self.target is not None and not is_finite(self.target):
            bad.append(f"target={self.target} must be a finite number, up to {LARGEST:g}")
        if not 0 < self.alpha < 1 or not self.margin > 0:
            bad.append(f"alpha={self.alpha} must be between 0 and 1 and margin={self.margin} positive")
        if self.base and self.scale != "tiny":
            bad.append(f"scale={self.scale!r} means nothing beside base={self.base!r}, "
                       "which is the plain GPT already")
        chooses = self.tune_lr or self.screen
        if self.split not in ("val", "test") or self.split == "val" and chooses:
            reason = ", since val chooses" if chooses else " or val"
            bad.append(f"split={self.split!r} must be test{reason}")
        if self.looks == 2 and (self.texts or self.has_results_already):
            bad.append("looks=2 is for a study that trains its runs, on one text: leave it out with "
                       f"{'texts' if self.texts else 'a file of results or scores'}")
        if unknown := [name for name in self.task if name not in (*TASKS, "all")]:
            bad.append(f"task: unknown {unknown[0]!r}; there are {', '.join(TASKS)}, and all")
        if self.task:
            of_text = dict(texts=[], looks=1, minutes=None, tokens_per_param=None,
                           budgets=[], contrasts=[], test_tokens=0, screen=False, best=6,
                           worst=2, always=[], fresh=False, lives=False, rescore=None)
            bad += [f"task={self.task} and {key}={getattr(self, key)}: {key} is for a study of texts"
                    for key, usual in of_text.items() if getattr(self, key) != usual]
            if self.settings.get("dataset"):
                bad.append(f"settings: dataset={self.settings['dataset']!r} is of a text, not of a task")
        if "task" in self.settings:
            bad.append(f"settings: task={self.settings['task']!r} makes no study of tasks: name it by --task")
        if self.looks == 1 and self.spending != "obrien_fleming":
            bad.append(f"spending={self.spending!r} is how the error is spent on two looks: add --looks=2")
        return bad


def matching(pattern):
    """The names that an entry of `mechanisms` stands for: itself, or those of MECHANISMS that its * match."""
    return ["all_on"] if pattern == "all_on" else fnmatch.filter(MECHANISMS, pattern)


def variants_of(config):
    """{name: flags} of everything that is compared with the plain GPT."""
    names = dict.fromkeys(name for pattern in config.mechanisms for name in matching(pattern))
    return {**{name: with_log(ALL_ON if name == "all_on" else MECHANISMS[name]) for name in names},
            **config.variants}


# ---- variants: the models that are compared ----

@dataclass
class Variant:
    """One model and its training, for all seeds; the plain GPT is a variant, too."""
    name: str
    kind: str                # plain | variant | budget (the plain GPT at another one) | baseline (wider)
    label: str
    flags: dict              # what differs from the plain GPT
    model: GPTConfig
    train: TrainConfig       # every key resolved
    params: int
    flops_per_token: int     # as the algorithm needs them

    @property
    def tokens(self):
        return self.train.max_iters * tokens_a_step(self.model, self.train)

    def at_rates(self, factors, name):
        """This variant, under another name, with the rates of some groups of RATES times a factor each."""
        flags = {key: times(factor, key, getattr(self.train, key))
                 for group, factor in factors.items() if factor != 1 for key in RATES[group]}
        if "adamw_lr" in flags:  # as these were resolved, from the rate before
            for key in ("embed_lr", "mechanism_lr"):
                flags.setdefault(key, getattr(self.train, key))
        return replace(self, name=name, label=name, train=replace(self.train, **flags),
                       flags={**self.flags, **flags})

    def at_best_rates(self, factors, plain):
        """This variant at these rates, its flags beside those of a plain GPT at its own."""
        rates = self.at_rates(factors, self.name).train
        flags = {key: getattr(rates, key) for keys in RATES.values() for key in keys}
        flags = {key: rate for key, rate in flags.items()
                 if key in self.flags or rate != getattr(plain.train, key)}
        return replace(self, train=rates, flags={**self.flags, **flags})

    def groups(self):
        """The groups of RATES that this variant's optimizers have."""
        model = built(self.model)
        muons = {id(p) for p, _ in block_matrices(model)} if self.train.optimizer == "muon" else set()
        added = of_mechanisms(model)
        has = {"muon_lr": muons, "muon_momentum": muons, "adamw_lr": True, "embed_lr": True, "mechanism_lr":
               [p for name, p in model.named_parameters() if name in added and id(p) not in muons]}
        return [group for group in RATES if has[group]]

    def rates_of_its_own(self):
        """{flag: learning rate} of the weights that its mechanisms add; {}: they add none."""
        model = built(self.model)
        muons = {id(p) for p, _ in block_matrices(model)} if self.train.optimizer == "muon" else set()
        added = of_mechanisms(model)
        flags = ["muon_lr" if id(p) in muons else "mechanism_lr"
                 for name, p in model.named_parameters() if name in added]
        return {flag: getattr(self.train, flag) for flag in dict.fromkeys(flags)}


def times(factor, key, value):
    """A rate times a factor; a momentum m at so many times its memory of 1 / (1 - m) steps."""
    return max(0.0, round(1 - (1 - value) / factor, 12)) if key == "muon_momentum" else value * factor


def relative(flags, model):
    """Flags with the values of RELATIVE worked out for a plain GPT, a GPTConfig."""
    return {key: RELATIVE[value](model) if isinstance(value, str) and value in RELATIVE else value
            for key, value in flags.items()}


class VariantBuilder:
    """Makes variants from flags on top of a study's plain GPT. Raises UserError."""

    def __init__(self, config, rates=()):
        self.config = config
        self.base = config.base or f"config/{config.scale}.py"
        of_task = {"task": config.task[0]} if config.task else {}  # a study of several has a builder for each
        self.settings = {**SIZES.get(config.size, {}), **config.settings, **of_task, **dict(rates)}
        model, training = self.load({})
        if config.tokens_per_param:
            self.settings.update(budget_of(model, training, config.tokens_per_param))
            model, training = self.load({})
        if model.weight_dropout and any(self.needs_no_dropout(relative(flags, model))
                                        for flags in variants_of(config).values()):
            self.settings["attn_dropout"] = 0.0  # on both sides, so that dropout is no part of the difference
        if training.task and not config.task:
            raise UserError(f"{self.base} trains on the task {training.task}: add --task={training.task}, "
                            "or other ones, or all")
        self.data = data_of(training, model.block_size)
        for split in dict.fromkeys(("train", "val", config.split)) if not training.task else ():
            self.data.tokens(split)  # what is missing is reported now, not after all runs
        self.plain = self.make("plain", "plain", "plain GPT", {})

    def load(self, flags):
        """(GPTConfig, TrainConfig) of the plain GPT with these flags. UserError."""
        more = {"settings": self.settings, f"variant with {flags}": flags}
        return configurator.load((GPTConfig, TrainConfig), [self.base], more=more)

    def of_scale(self):
        """{"steps", "tokens"} of a whole run of the plain GPT: those in its config file, without settings.

        A plain GPT of another size has as many tokens a parameter of its blocks.
        """
        model, training = configurator.load((GPTConfig, TrainConfig), [self.base])
        steps = training.max_iters
        if self.config.size:
            steps = round(steps * size_of_blocks(self.plain.model) / size_of_blocks(model))
        return dict(steps=steps, tokens=steps * tokens_a_step(model, training))

    def needs_no_dropout(self, flags):
        """Whether only dropout on the attention weights keeps the plain GPT from taking these flags."""
        def accepted(flags):
            try:
                return bool(self.load(flags))
            except UserError:
                return False
        return not accepted(flags) and accepted({**flags, "attn_dropout": 0.0})

    def make(self, name, kind, label, flags):
        if flags:  # the plain GPT, which has none, is made before there is a self.plain
            flags = relative(flags, self.plain.model)
        try:
            model, training = self.load(flags)
        except UserError as e:
            raise UserError(f"{name}: {' '.join(str(e).split())}")
        if bad := training_problems(model, training):
            raise UserError(f"{name}: {'; '.join(bad)}")
        if training.patience:
            raise UserError(f"{name}: patience={training.patience} would end runs at different steps, and a "
                            "study compares runs of equal length: leave it out")
        model = replace(model, vocab_size=model.vocab_size or self.data.vocab_size)
        teacher = training.teacher and checkpoint.file_of(training.teacher)
        teacher = None if is_function(training.teacher) else teacher
        if teacher and teacher.is_file() and own_mechanism.lacking(checkpoint.read(teacher)):
            raise UserError(f"{name}: teacher={training.teacher} has a mechanism in a file of one's own, "
                            "which a study cannot name to its runs: train the student with train.py")
        mine = ",".join(str(file.path) for file in own_mechanism.files_for(model))
        training = replace(training, own_mechanism=mine or None)
        training, (params, flops) = training.for_recipe(model.recipe), size_of(model)
        if flags:
            flags = self.as_taken(flags, model, training)
        return Variant(name, kind, label, flags, model, training, params, flops)

    def as_taken(self, flags, model, training):
        """Flags by the names and values that a run has them under, with which a recheck compares its runs.

        nanoGPT's names become what they changed, and a warm-up may have been shortened.
        """
        known, plain = all_flags(model, training), all_flags(self.plain.model, self.plain.train)
        own = {key: known[key] if key == "warmup_iters" else value
               for key, value in flags.items() if key in known or key in BOOKKEEPING}
        if len(own) < len(flags):
            own.update({key: value for key, value in known.items() if value != plain[key]})
        return own

    def variants(self):
        return [self.make(name, "variant", name, flags) for name, flags in variants_of(self.config).items()]

    def at_budget(self, multiple):
        """The plain GPT trained for so many times as many steps."""
        steps = max(1, round(multiple * self.plain.train.max_iters))
        label = f"plain GPT, {multiple:g} x the budget"
        return self.make(f"plain x {multiple:g}", "budget", label, {"max_iters": steps})

    def same_parameters(self, variant, baselines):
        """A plain GPT with the variant's parameters to 0.1 %, by MLP width; one of `baselines` if it fits.

        None where a plain GPT without its MLPs has more.
        """
        fitting = [plain for plain in [self.plain, *baselines]
                   if effects.same_size(variant.params, plain.params)]
        if fitting:
            return fitting[0]
        width = 64  # of two sizes any width follows; that of the plain GPT depends on its recipe
        params, more = (size_of(replace(self.plain.model, n_inner=n))[0] for n in (width, width + 1))
        width += round((variant.params - params) / (more - params))
        return self.wide(width) if width > 0 else None

    def wide(self, width):
        """The plain GPT with an MLP of this width."""
        label = f"plain GPT, MLP {width} wide"
        return self.make(f"plain, MLP {width}", "baseline", label, {"n_inner": width})


def all_flags(model, training):
    """Every flag of a model and of its training but those that change no number."""
    flags = {**{name: getattr(model, name) for name in GPTConfig.defaults()}, **asdict(training)}
    return {key: value for key, value in flags.items() if key not in BOOKKEEPING}


def budget_of(model, training, tokens_per_param):
    """{max_iters, eval_interval} that train a plain GPT for so many tokens a parameter of its blocks."""
    steps = max(1, round(tokens_per_param * size_of_blocks(model) / tokens_a_step(model, training)))
    return dict(max_iters=steps, eval_interval=max(1, steps // 10))


def size_of_blocks(model):
    """The parameters of a plain GPT's blocks."""
    return sum(p.numel() for p in built(replace(model, vocab_size=1)).transformer.h.parameters())


def tokens_a_step(model, training):
    return training.batch_size * training.grad_accum * model.block_size


def built(config):
    """A GPT to count things in, without memory where that is possible."""
    # a window's FLOPs need its table of how many keys each token sees
    with torch.device("cpu" if config.window else "meta"):
        return GPT(config)


def size_of(config):
    """(parameters, training FLOPs per token) of a model."""
    model = built(config)
    return model.num_params(), model.flops_per_token()
