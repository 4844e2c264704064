"""
Does a mechanism beat a plain GPT? A study: baselines made to match, runs paired by seed, intervals, one report.

    python compare.py config/study_routing.py                     # this machine: its GPUs, or its cores
    python compare.py config/study_routing.py --scale=small       # tiny | small | seed: the plain GPT that everything is added to
    python compare.py config/study_all.py --seeds=1,2 --matched=0 # any key of a study, on the command line
    python compare.py config/study_all.py --submit=auto           # through submitit: Slurm where there is one
    python compare.py config/study_all.py --dry_run               # what would run

Every run is kept in out/trials, under a hash of its flags, its data and the code that matters: start a study again and it
goes on where it stopped; change a flag and only what depends on it runs again. `python compare.py --help` lists every key.
"""

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Optional

import numpy as np
import torch

import checkpoint
import configurator
import jobs
import report
import stats
import train
from checkpoint import write_atomic
from dataset import DataError, Dataset
from evaluate import windows_of
from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from train import TrainConfig

# what a scale means: the plain GPT, and how much of the test split is scored (0: all of it)
SCALES = {
    "tiny": dict(base="config/tiny_baseline.py", test_tokens=196608),  # two CPU cores; a slice, so that scoring costs less than training
    "small": dict(base="config/enwiki15_baseline.py", test_tokens=0),  # one GPU, half an hour a run
    "seed": dict(base="config/enwik8_baseline.py", test_tokens=0),     # the size of the head-routing write-up
}
# values of a variant's flags that follow the size of the plain GPT
RELATIVE = {"n_head": lambda model: model.n_head, "n_embd // 2": lambda model: model.n_embd // 2}
MATCHES = ("parameters", "FLOPs", "wall-clock")  # beside the same hyperparameters, which every variant is compared at
NOT_HASHED = {"out_dir", "resume", "overwrite", "eval_only", "wandb_log", "wandb_project", "wandb_run_name", "wandb_mode", "wandb_tags"}


@dataclass
class StudyConfig:
    # ---- what is asked ----
    question: str = ""                   # one line, at the top of the report
    mechanisms: list[str] = field(default_factory=list)  # variants: names of model.MECHANISMS, or all_on
    variants: dict = field(default_factory=dict)  # more variants: name -> flags of the model or of training; seed is added to the study's
    scale: str = "tiny"                  # tiny | small | seed: which plain GPT
    base: Optional[str] = None           # config file of another plain GPT
    settings: dict = field(default_factory=dict)  # flags for both sides, on top of the plain GPT's
    # ---- the budget ----
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5])  # initial values and data order; each pairs a variant with its baselines
    split: str = "test"                  # what is scored
    test_tokens: Optional[int] = None    # score so many tokens of it, in evenly spaced windows; 0: all; None: as the scale says
    # ---- baselines, beside the one with the same hyperparameters ----
    match: list[str] = field(default_factory=lambda: ["parameters", "FLOPs"])  # parameters (MLP width), FLOPs (steps), wall-clock (steps)
    matched: Optional[int] = None        # only for so many variants, the best ones; None: for all
    tune_lr: bool = False                # choose each side's learning rate first, with the same budget, on the validation split
    tune_factors: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0])  # times the configured rates
    tune_steps: Optional[int] = None     # steps of a trial of a rate; None: a third of the run's
    # ---- where it runs ----
    out_dir: Optional[str] = None        # the report's folder; None: out/<name of the config>-<scale>
    jobs: int = 0                        # runs at once; 0: one for each GPU, or one for each CPU core
    device: str = "auto"                 # auto | cpu | cuda | mps
    submit: Optional[str] = None         # submitit: auto (Slurm where there is one) | slurm | local; None: processes of this machine
    submit_options: dict = field(default_factory=dict)  # of submitit, for instance {"slurm_partition": "gpu", "timeout_min": 60}
    dry_run: bool = False                # say what would run
    report_only: bool = False            # write the report from what is done
    # ---- statistics ----
    alpha: float = 0.05                  # rate of false alarms of the whole study (Holm); intervals are 1 - alpha
    block: int = 4096                    # tokens in a block of the bootstrap over the test set

    def problems(self):
        """Everything that is wrong with this study, as a list of sentences (empty: fine)."""
        bad = []
        if self.scale not in SCALES:
            bad.append(f"scale={self.scale!r} must be one of {', '.join(SCALES)}")
        for name in self.mechanisms:
            if name not in MECHANISMS and name != "all_on":
                meant, words = configurator.nearest(name, [*MECHANISMS, "all_on"])
                bad.append(f"mechanisms: unknown {name!r}; {words if meant else 'model.MECHANISMS lists them'}")
        if not self.mechanisms and not self.variants:
            bad.append("mechanisms and variants are empty: name at least one variant to compare")
        for name, flags in self.variants.items():
            if not isinstance(flags, dict):
                bad.append(f"variants: {name!r} must be a dict of flags, not {flags!r}")
            if name == "plain" or name in self.mechanisms:
                bad.append(f"variants: the name {name!r} is taken")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            bad.append(f"seeds={self.seeds} must be different numbers, at least one, none negative")
        for what in self.match:
            if what not in MATCHES:
                bad.append(f"match={what!r} must be among {', '.join(MATCHES)}")
        for name in ("jobs", "test_tokens", "matched"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                bad.append(f"{name}={getattr(self, name)} must not be negative")
        if not self.tune_factors or min(self.tune_factors) <= 0 or 1.0 not in self.tune_factors:
            bad.append(f"tune_factors={self.tune_factors} must be positive and have 1 among them")
        if self.tune_steps is not None and self.tune_steps < 1 or self.block < 1:
            bad.append(f"tune_steps={self.tune_steps} and block={self.block} must be at least 1")
        if not 0 < self.alpha < 1:
            bad.append(f"alpha={self.alpha} must be between 0 and 1")
        if self.submit not in (None, "auto", "slurm", "local"):
            bad.append(f"submit={self.submit!r} must be one of auto, slurm, local")
        return bad


class StudyError(Exception):
    """Why a study cannot be made, in one line."""


# ---- arms: the models that are compared ----

@dataclass
class Arm:
    """One model and its training, for every seed: the plain GPT, a variant, or a baseline made to match one."""
    name: str
    kind: str                # plain | variant | baseline
    label: str
    flags: dict              # what differs from the plain GPT
    model: GPTConfig
    train: TrainConfig       # every key resolved
    params: int
    flops_per_token: int
    lr_factor: float = 1.0   # of the rates, found by tuning
    edge: bool = False       # that factor is the smallest or the largest that was tried

    @property
    def tokens(self):
        return self.train.max_iters * self.train.batch_size * self.train.grad_accum * self.model.block_size

    @property
    def flops(self):
        return self.tokens * self.flops_per_token


class Maker:
    """Makes arms from flags on top of a study's plain GPT. Raises StudyError, ConfigError, DataError."""

    def __init__(self, study):
        self.study, self.base = study, study.base or SCALES[study.scale]["base"]
        self.settings = dict(study.settings)
        (model, config), _ = self.configs({})
        needs = [name for name, flags in variants_of(study).items() if flags.get("acag") or "window" in flags or flags.get("routing_capacity")]
        if needs and (model.dropout if model.attn_dropout is None else model.attn_dropout):
            self.settings["attn_dropout"] = 0.0  # these have no fused kernel with it, and a comparison has it on both sides or on none
        self.data = Dataset(config.dataset)
        self.test_tokens = SCALES[study.scale]["test_tokens"] if study.test_tokens is None else study.test_tokens
        if study.base and study.test_tokens is None:
            self.test_tokens = 0
        self.plain = self.arm("plain", "plain", "plain GPT", {})

    def configs(self, flags):
        where = f"variant with {flags}" if flags else "study"
        pair = configurator.load((GPTConfig, TrainConfig), [self.base], more={"settings": self.settings, where: flags})
        return pair, where

    def arm(self, name, kind, label, flags):
        flags = {key: RELATIVE[value](self.plain.model) if value in list(RELATIVE) else value for key, value in flags.items()}
        try:
            (model, config), _ = self.configs(flags)
        except configurator.ConfigError as e:
            raise StudyError(f"{name}: {' '.join(str(e).split())}")
        model = replace(model, vocab_size=model.vocab_size or self.data.vocab_size)
        params, flops = size_of(model)
        return Arm(name, kind, label, flags, model, config.for_recipe(model.recipe), params, flops)

    def variants(self):
        return [self.arm(name, "variant", name, flags) for name, flags in variants_of(self.study).items()]

    def same_parameters(self, variant, made):
        """A plain GPT whose MLP is wide enough to have the variant's parameters to 0.1 %; one of `made` where that fits."""
        fits = lambda arm: abs(arm.params - variant.params) <= 1e-3 * variant.params
        if found := next((arm for arm in [self.plain, *made] if fits(arm) and arm.train.max_iters == self.plain.train.max_iters), None):
            return found
        c, width = self.plain.model, self.plain.model.n_inner or 4 * self.plain.model.n_embd
        per_unit = size_of(replace(c, n_inner=width + 1))[0] - self.plain.params
        width += round((variant.params - self.plain.params) / per_unit)
        if width < 1:
            raise StudyError(f"{variant.name} has {variant.params:,} parameters, fewer than a plain GPT without its MLPs: no baseline has as few")
        arm = self.arm(f"plain, MLP {width}", "baseline", f"plain GPT, MLP {width} wide", {"n_inner": width})
        if not fits(arm):
            raise StudyError(f"{variant.name} has {variant.params:,} parameters; the nearest plain GPT, with n_inner={width}, has "
                             f"{arm.params:,}, more than 0.1 % off")
        return arm

    def same_cost(self, steps, made):
        """The plain GPT trained for so many steps, rounded; one of `made` where it is the same."""
        steps = max(1, round(steps))
        if found := next((arm for arm in [self.plain, *made] if arm.train.max_iters == steps and arm.params == self.plain.params), None):
            return found
        return self.arm(f"plain, {steps} steps", "baseline", f"plain GPT, {steps:,} steps", {"max_iters": steps})


def variants_of(study):
    """{name: flags} of everything that is compared with the plain GPT."""
    return {**{name: ALL_ON if name == "all_on" else MECHANISMS[name] for name in study.mechanisms}, **study.variants}


def size_of(config):
    """(parameters, training FLOPs per token) of a model; built without memory where that is possible."""
    with torch.device("cpu" if config.window else "meta"):  # a window's FLOPs need its table of how many keys each token sees
        model = GPT(config)
    return model.num_params(), model.flops_per_token()


def step_time_ratio(a, b, device, steps=4, rounds=7):
    """Time of a training step of arm a over that of b: the median ratio over alternating rounds on this machine."""
    from optim import make_optimizers
    device = checkpoint.pick_device(device)

    def stepper(arm):
        model = GPT(arm.model).to(device)
        model = torch.compile(model) if device.startswith("cuda") and arm.train.compile is not False else model
        ids = torch.randint(arm.model.vocab_size, (arm.train.batch_size, arm.model.block_size + 1), device=device)
        optimizers = make_optimizers(model, arm.train)

        def step():
            out = model(ids[:, :-1], ids[:, 1:])
            sum(out.aux.values(), out.loss).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return step

    def timed(step):
        began = time.perf_counter()
        for _ in range(steps):
            step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - began

    pair = stepper(a), stepper(b)
    for step in pair:
        timed(step)  # compilation, allocation, caches
    return statistics.median(timed(pair[0]) / timed(pair[1]) for _ in range(rounds))


# ---- trials: an arm with a seed ----

class Study:
    """A study's arms, baselines and trials: which there are, which are done."""

    def __init__(self, config, name):
        self.config, self.name, self.maker = config, name, Maker(config)
        self.out = Path(config.out_dir or f"out/{name}-{config.scale}")
        self.arms = {"plain": self.maker.plain, **{arm.name: arm for arm in self.maker.variants()}}
        self.baselines = {name: {"hyperparameters": "plain"} for name, arm in self.arms.items() if arm.kind == "variant"}
        self.failures, self.selection = {}, None

    def spec(self, arm, seed, **changes):
        """trial.json of one run."""
        data, config, factor = self.maker.data, arm.train, arm.lr_factor
        model = replace(arm.model, seed=seed + arm.flags.get("seed", 0))
        rates = {key: getattr(config, key) * factor for key in ("lr", "muon_lr", "embed_lr", "min_lr")}
        device = "auto" if self.config.submit else checkpoint.pick_device(self.config.device).split(":")[0]  # a cluster's nodes decide
        flags = {k: v for k, v in asdict(replace(config, **rates)).items() if k not in NOT_HASHED} | {"device": device}
        spec = dict(model=asdict(model), train=flags, score=dict(split=self.config.split, tokens=self.maker.test_tokens),
                    code=jobs.code_digest(), data={k: s["sha256"] for k, s in data.splits.items()}, torch=torch.__version__)
        for part, values in changes.items():
            spec[part] = {**spec[part], **values}
        return spec

    def folder(self, arm, seed, **changes):
        return jobs.make(self.spec(arm, seed, **changes)) if not self.config.dry_run else jobs.folder_of(self.spec(arm, seed, **changes))

    def trials(self):
        """{(arm name, seed): folder}, seed by seed, so that a study that is cut short has whole pairs."""
        return {(name, seed): self.folder(arm, seed) for seed in self.config.seeds for name, arm in self.arms.items()}

    def results(self):
        """{(arm name, seed): result.json} of what is done."""
        return {key: found for key, folder in self.trials().items() if (found := jobs.result(folder))}

    def add_baselines(self, names):
        """Make the baselines that match these variants, beside the one with the same hyperparameters."""
        for name in names:
            variant = self.arms[name]
            for what in self.config.match:
                made = [arm for arm in self.arms.values() if arm.kind == "baseline"]
                if what == "parameters":
                    arm = self.maker.same_parameters(variant, made)
                else:
                    plain = self.maker.plain
                    steps = (variant.flops / (plain.flops / plain.train.max_iters) if what == "FLOPs" else
                             variant.train.max_iters * self.clock(variant))
                    arm = self.maker.same_cost(steps, made)
                self.arms.setdefault(arm.name, arm)
                self.baselines[name][what] = arm.name

    def clock(self, variant):
        """step_time_ratio() of a variant to the plain GPT; kept in the study's folder, so that starting again changes no plan."""
        path, key = self.out / "clock.json", jobs.folder_of([self.spec(variant, 0), self.spec(self.maker.plain, 0)]).name
        known = json.loads(path.read_text()) if path.is_file() else {}
        if key not in known:
            known[key] = step_time_ratio(variant, self.maker.plain, self.config.device)
            self.out.mkdir(parents=True, exist_ok=True)
            write_atomic(path, lambda f: f.write(json.dumps(known).encode()))
        return known[key]

    def tune(self, arms, place):
        """Choose each arm's learning-rate factor: the lowest validation loss of short runs with a seed that no comparison uses."""
        c, trials = self.config, {}
        seed = max(c.seeds) + 1000
        for arm in arms:
            steps = c.tune_steps or max(1, arm.train.max_iters // 3)
            for factor in c.tune_factors:
                tried = replace(arm, lr_factor=factor)
                trials[arm.name, factor] = self.folder(tried, seed, train=dict(max_iters=steps, lr_decay_iters=None, eval_interval=steps),
                                                       score=dict(split="val", tokens=self.maker.test_tokens))
        if not c.report_only:
            self.failures.update(jobs.run_all(list(trials.values()), place, "learning rates"))
        for arm in arms:
            found = {f: jobs.result(trials[arm.name, f])["bpb"] for f in c.tune_factors if jobs.done(trials[arm.name, f])}
            if found:
                arm.lr_factor = min(found, key=found.get)
                arm.edge = len(found) > 1 and arm.lr_factor in (min(found), max(found))
        return trials

    def run(self, place):
        """Run what is not done, in two rounds where only the best variants get all baselines."""
        c, variants = self.config, [name for name, arm in self.arms.items() if arm.kind == "variant"]
        some = c.matched is not None and c.matched < len(variants)

        def go(arms):
            if c.tune_lr:
                self.tune(arms, place)
            if not c.report_only:
                self.failures.update(jobs.run_all(list(self.trials().values()), place))

        first = list(self.arms.values())
        if not some:
            self.add_baselines(variants)
        go(first + [arm for arm in self.arms.values() if arm.kind == "baseline"])
        if some:
            found = self.results()
            means = {name: np.mean(d) for name in variants if (d := [x for x in self.differences(name, "plain", found) if x is not None])}
            best = sorted(means, key=means.get)[:c.matched]
            self.add_baselines(best)
            self.selection = f"the best {c.matched} of {len(variants)} by mean difference to the plain GPT got all baselines" if c.matched else None
            go([arm for arm in self.arms.values() if arm.kind == "baseline"])

    def differences(self, variant, baseline, found):
        """Variant minus baseline in bits per byte for each seed; None where one of the two is not done."""
        return [found[variant, s]["bpb"] - found[baseline, s]["bpb"] if {(variant, s), (baseline, s)} <= found.keys() else None
                for s in self.config.seeds]

    # ---- what it all says ----

    def compared(self, found, trials):
        """The comparisons, as the report wants them: one for each variant and baseline, corrected together."""
        c, rows = self.config, []
        for variant, baselines in self.baselines.items():
            for baseline in dict.fromkeys(baselines.values()):
                differences = self.differences(variant, baseline, found)
                rows.append(dict(variant=variant, baseline=baseline, matched=[what for what, b in baselines.items() if b == baseline],
                                 differences=differences, paired=stats.paired([d for d in differences if d is not None], 1 - c.alpha)))
        adjusted = stats.holm([row["paired"].p for row in rows])
        for row, p_holm in zip(rows, adjusted):
            paired = row.pop("paired")
            smallest = stats.detectable(paired.sd, paired.n, c.alpha / max(1, len(rows)))
            few = "" if paired.n == len(c.seeds) else f" ({paired.n} of {len(c.seeds)} seeds)"  # a run that diverged is no number, and no secret
            row.update(mean=paired.mean, low=paired.low, high=paired.high, p=paired.p, p_holm=float(p_holm), detectable=smallest,
                       verdict=stats.verdict(paired, p_holm, c.alpha), words=stats.in_words(paired, p_holm, smallest, c.alpha) + few,
                       bootstrap=[self.bootstrap(row["variant"], row["baseline"], seed, found, trials) for seed in c.seeds])
        return rows

    def bootstrap(self, variant, baseline, seed, found, trials):
        """The paired block bootstrap over the test set for one seed."""
        if not {(variant, seed), (baseline, seed)} <= found.keys():
            return None
        a, b = (np.load(trials[name, seed] / "nats.npy") for name in (variant, baseline))
        windows = max(1, self.config.block // self.maker.plain.model.block_size)
        mean, low, high = stats.block_bootstrap(a, b, found[variant, seed]["bytes"], windows, 1 - self.config.alpha)
        return dict(seed=seed, mean=mean, low=low, high=high)

    def summary(self, command):
        """Everything that the report shows, as a dict for results.json."""
        found, trials, c, maker = self.results(), self.trials(), self.config, self.maker
        data, split = maker.data, maker.data.splits[c.split]
        cuts = windows_of(data, c.split, maker.plain.model.block_size, max_tokens=maker.test_tokens)
        one = next(iter(found.values()), {})
        every = f"{len(cuts):,} evenly spaced windows" if len(cuts) < -(-split["tokens"] // maker.plain.model.block_size) else "all"
        rows = self.compared(found, trials)
        failures = [dict(arm=name, seed=seed, why=self.failures[folder], log=str(folder / "trial.log"))
                    for (name, seed), folder in trials.items() if folder in self.failures]
        lacks = {name: [what for what in c.match if what not in baselines] for name, baselines in self.baselines.items()}
        return clean(dict(
            name=self.name, scale=c.scale, question=c.question, command=command, date=date.today().isoformat(), commit=commit(),
            versions=dict(python=sys.version.split()[0], **{name: version(name) for name in ("torch", "numpy", "scipy")}),
            machine=dict(device=torch.cuda.get_device_name() if torch.cuda.is_available() and c.device != "cpu" else "cpu",
                         cores=os.cpu_count(), jobs=c.jobs or jobs.Processes(0, c.device).slots, threads=one.get("threads")),
            data=dict(dataset=data.meta["name"], split=c.split, tokens=one.get("tokens"), bytes=one.get("bytes"), of_bytes=split["bytes"],
                      name=f"{every} of {maker.plain.model.block_size:,} tokens", note=data.meta.get("note"),
                      context=f"disjoint windows of {maker.plain.model.block_size:,}"),
            seeds=c.seeds, alpha=c.alpha, comparisons_made=len(rows),
            tuned=dict(factors=c.tune_factors, steps=c.tune_steps or max(1, maker.plain.train.max_iters // 3)) if c.tune_lr else None,
            arms={name: self.shown(arm, found, trials) for name, arm in self.arms.items()}, comparisons=rows,
            missing={name: whats for name, whats in lacks.items() if whats}, selection=self.selection, failures=failures,
            planned=len(trials), done=len(found)))

    def shown(self, arm, found, trials):
        """One arm for the report: sizes, costs, scores and curves of every seed, and what its first finished run looks like inside."""
        got = [found.get((arm.name, seed)) for seed in self.config.seeds]
        middle = lambda key: statistics.median(values) if (values := [r[key] for r in got if r and r.get(key) is not None]) else None
        first = next((trials[arm.name, seed] for seed, r in zip(self.config.seeds, got) if r), None)
        flags = {**{f.name: getattr(arm.model, f.name) for f in fields(GPTConfig)}, **asdict(arm.train)}
        factor = {"lr_factor": arm.lr_factor} if arm.lr_factor != 1 else {}
        return dict(kind=arm.kind, label=arm.label, flags={**arm.flags, **factor}, steps=arm.train.max_iters, params=arm.params,
                    flops_per_token=arm.flops_per_token, train_flops=float(arm.flops), seconds=middle("seconds"), tokens_per_s=middle("tokens_per_s"),
                    memory_mib=middle("memory_mib"), lr_factor=arm.lr_factor, edge=arm.edge, bpb=[r and r["bpb"] for r in got],
                    curves=[curve(trials[arm.name, seed]) if r else None for seed, r in zip(self.config.seeds, got)],
                    commands=[self.command_of(arm, flags)], **(observed(first) if first else dict(decode_tokens_per_s=None, heads=None, sample=None)))

    def command_of(self, arm, flags):
        """The train.py line that repeats a run of this arm, for the first seed."""
        changed = {**self.maker.settings, **{k: v for k, v in arm.flags.items() if k != "seed"}, "seed": self.config.seeds[0] + arm.flags.get("seed", 0)}
        if arm.lr_factor != 1:
            changed.update({key: flags[key] * arm.lr_factor for key in ("lr", "muon_lr", "embed_lr", "min_lr")})
        name = "".join(ch if ch.isalnum() else "_" for ch in arm.name)
        return shlex.join(["python", "train.py", self.maker.base, *(f"--{key}={value}" for key, value in changed.items()), f"--out_dir=out/{name}"])


def curve(folder):
    """Validation bits per byte of one run against tokens and seconds."""
    rows = []
    for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "val_bpb" in row:
            rows.append(row)
    return dict(tokens=[r["tokens"] for r in rows], seconds=[r["elapsed_s"] for r in rows], bpb=[r["val_bpb"] for r in rows])


# ---- a look inside a trained model ----

PROMPT, SHOWN = "\n", 300  # what samples continue, and for how many tokens


def observed(folder):
    """{decode_tokens_per_s, heads, sample} of a finished run; measured once and kept beside it."""
    path = folder / "observed.json"
    if not path.is_file() and not (folder / "best.pt").is_file():  # brought from another machine without its weights
        return dict(decode_tokens_per_s=None, heads=None, sample=None)
    if not path.is_file():
        found = observe(folder)
        write_atomic(path, lambda f: f.write(json.dumps(found).encode()))
    return json.loads(path.read_text(encoding="utf-8"))


@torch.no_grad()
def observe(folder):
    """Decoding speed with the cache (batch 1, the better of two), a sample, and what the heads do on 15 windows of val."""
    state, device = checkpoint.read(folder), checkpoint.pick_device("auto")
    model = checkpoint.build(state, folder, device)
    data, T = Dataset(state["train"]["dataset"]), model.config.block_size
    ids = torch.tensor([data.tokenizer.encode(PROMPT).tolist()], device=device)
    best, text = math.inf, ""
    for _ in range(2):
        began = time.perf_counter()
        tokens = model.generate(ids, SHOWN, temperature=0.8, generator=torch.Generator(device).manual_seed(1))
        best = min(best, time.perf_counter() - began)
        text = data.tokenizer.decode_bytes([t for t in tokens[0].tolist() if t < data.vocab_size]).decode("utf-8", "replace")
    starts = [start for start, _, _ in windows_of(data, "val", T, max_tokens=16 * T)][:-1]  # the last may have no token after it
    x = torch.stack([torch.from_numpy(data.tokens("val")[start:start + T + 1].astype(np.int64)) for start in starts]).to(device)
    return dict(decode_tokens_per_s=SHOWN / best, sample=text, heads=heads_of(model, x))


# what traces say of heads, and over which dimensions of it the mean is shown
SEEN = dict(entropy=(0, 2), concentration=(0, 2), gate=(1, 2), output_gate=(0, 2, 3), acag_gate=(0, 2, 3), router_gates=(0, 1), advantage=(0, 1),
            advantage_correlation=None, routing_load=None, dead_heads=None, effective_heads=None, token_entropy=None, batch_entropy=None)


def heads_of(model, x):
    """{name: a row for each layer} of what the heads do on the tokens x [B, T + 1]; the names are those of the traces."""
    traces, found = model(x[:, :-1], x[:, 1:], traces=True).traces, {}
    for key, value in traces.items():
        name = key.split(".", 2)[-1]
        if key.startswith("blocks.") and name in SEEN and value.numel():
            found.setdefault(name, []).append((value.float() if SEEN[name] is None else value.float().mean(SEEN[name])).tolist())
    if "a2c.explained_variance" in traces:
        found["critic's explained variance"] = float(traces["a2c.explained_variance"])
    return found


def clean(value):
    """The same with NaN, infinities and numpy numbers made plain: JSON has none of them."""
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    if isinstance(value, (np.floating, np.integer)):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def commit():
    with suppress(OSError):
        out = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=jobs.ROOT, capture_output=True, text=True)
        return out.stdout.strip() or None


# ---- command line ----

def plan_of(study):
    """What a study consists of, as text: every arm with its size, and how many runs are left."""
    arms, trials = study.arms.values(), study.trials()
    wide = max(len(arm.name) for arm in arms)
    lines = [f"{'arm':<{wide}}  {'parameters':>12}  {'steps':>8}  {'FLOPs':>9}  flags"]
    for arm in arms:
        lines.append(f"{arm.name:<{wide}}  {arm.params:>12,}  {arm.train.max_iters:>8,}  {arm.flops:>9.3g}  "
                     + " ".join(f"{k}={v}" for k, v in arm.flags.items())[:80])
    left = sum(not jobs.done(folder) for folder in trials.values())
    later = study.config.matched is not None and study.config.matched < len(study.baselines)
    return "\n".join(lines + [f"{len(trials):,} runs, {left:,} of them to do, in {jobs.TRIALS}"
                              + (f"; then the other baselines of the best {study.config.matched}" if later and study.config.matched else "")])


def run(argv):
    study_config, = configurator.load((StudyConfig,), argv, __doc__)
    files = configurator.split_args(argv, configurator.keys_of((StudyConfig,)))[0]
    study = Study(study_config, Path(files[0]).stem if files else "study")
    if study_config.dry_run:
        if study_config.matched is None or study_config.matched >= len(study.baselines):
            study.add_baselines(list(study.baselines))
        print(plan_of(study))
        return
    place = (jobs.Cluster(study_config.submit, study_config.jobs, study_config.submit_options) if study_config.submit
             else jobs.Processes(study_config.jobs, study_config.device))
    study.run(place)
    found = study.summary(shlex.join(["python", "compare.py", *argv]))
    study.out.mkdir(parents=True, exist_ok=True)
    write_atomic(study.out / "results.json", lambda f: f.write(json.dumps(found).encode()))
    print(report.table(found))
    print(*report.write(found, study.out), sep="\n")
    if study.failures:
        sys.exit(f"compare: {len(study.failures)} run(s) failed, the report names them; start again to try them once more")


def main(argv=None):
    try:
        run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("\ncompare: stopped; what is done is kept, and the same command goes on", file=sys.stderr)
        sys.exit(130)
    except (configurator.ConfigError, StudyError, DataError, checkpoint.CheckpointError) as e:
        sys.exit("\n".join(f"compare: {line}" for line in str(e).splitlines()))
    except ModuleNotFoundError as e:
        sys.exit(f"compare: {e.name} is not installed: pip install {e.name}")


if __name__ == "__main__":
    main()
