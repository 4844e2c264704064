"""
What a study compares: its config, and the arms made from it - the plain GPT, variants, and plain GPTs
made to match them.
"""

import fnmatch
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Optional

import torch

import configurator
from common import UserError
from configurator import Scale
from dataset import Dataset
from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from optim import Trainer
from ranks import Process
from train import TrainConfig

# plain GPTs by size, the parameters of their blocks, for a ladder on one scale's data and recipe
SIZES = {
    "0.1M": dict(n_layer=2, n_head=4, n_embd=64),    # 98,304
    "0.33M": dict(n_layer=3, n_head=6, n_embd=96),   # 331,776
    "1M": dict(n_layer=5, n_head=8, n_embd=128),     # 983,040
    "10M": dict(n_layer=6, n_head=6, n_embd=384),    # 10,616,832
}
# values of a variant's flags that follow the size of the plain GPT
RELATIVE = {"n_head": lambda model: model.n_head, "n_embd // 2": lambda model: model.n_embd // 2}
# beside the same hyperparameters, which every variant is compared at
MATCHES = ("parameters", "FLOPs", "wall-clock")
# keys of training that no trial.json has: they say where a run goes, and nothing of its numbers
BOOKKEEPING = {"out_dir", "resume", "overwrite", "eval_only",
               "wandb_log", "wandb_project", "wandb_run_name", "wandb_mode", "wandb_tags"}
FIXED_BY_STUDY = BOOKKEEPING | {"init_from", "init_anyway", "device"}  # what settings and variants cannot say


@dataclass
class StudyConfig:
    # ---- what is asked ----
    question: str = ""                   # one line, at the top of the report
    mechanisms: list[str] = field(default_factory=list)  # variants: in model.MECHANISMS (also acag*), all_on
    variants: dict = field(default_factory=dict)  # more variants: name -> flags; seed: added
    scale: Scale = "tiny"                # which plain GPT: config/<scale>.py
    size: Optional[str] = None           # 0.1M | 0.33M | 1M | 10M: another size of it, see study/arms.py
    base: Optional[str] = None           # config file of another plain GPT
    settings: dict = field(default_factory=dict)  # flags for both sides, on top of the plain GPT's
    # ---- the budget ----
    tokens_per_param: Optional[float] = None  # train for so many a parameter of the plain GPT's blocks
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5])  # each is one pair of runs
    split: str = "test"                  # what is scored
    test_tokens: int = 0                 # of it, evenly spaced; 0: all
    # ---- baselines, beside the one with the same hyperparameters ----
    match: list[str] = field(default_factory=lambda: ["parameters", "FLOPs"])  # or wall-clock
    matched: Optional[int] = None        # only for so many variants, the best ones; None: for all
    tune_lr: bool = False                # choose each side's learning rate first, by validation loss
    tune_factors: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0])  # times the configured rates
    tune_steps: Optional[int] = None     # steps of a trial of a rate; None: a third of the run's
    # ---- where it runs ----
    out_dir: Optional[str] = None        # the report's folder; None: out/<config or mechanisms>-<scale>
    jobs: int = 0                        # runs at once; 0: one for each GPU, or one for each CPU core
    device: str = "auto"                 # auto | cpu | cuda | mps
    submit: Optional[str] = None         # submitit: auto (Slurm if there) | slurm | local; None: no
    submit_options: dict = field(default_factory=dict)  # submitit's: {"slurm_partition": "gpu"}
    dry_run: bool = False                # say what would run
    report_only: bool = False            # write the report from what is done
    from_results: Optional[str] = None   # write the report from this results.json, without the runs
    # ---- statistics ----
    alpha: float = 0.05                  # false alarms of the whole study (Holm); intervals are 1 - alpha
    block: int = 4096                    # tokens in a block of the bootstrap over the test set

    def problems(self):
        """Everything that is wrong with this study, as a list of sentences (empty: fine)."""
        return [*self.problems_of_variants(), *self.problems_of_budget()]

    def problems_of_variants(self):
        bad = []
        for pattern in self.mechanisms:
            if not matching(pattern):
                meant, hint = configurator.nearest(pattern, [*MECHANISMS, "all_on"])
                hint = hint if meant else "model.MECHANISMS lists them"
                bad.append(f"mechanisms: unknown {pattern!r}; {hint}")
        if not self.mechanisms and not self.variants and not self.from_results:
            bad.append("mechanisms and variants are empty: name at least one variant to compare")
        for name, flags in [("settings", self.settings), *self.variants.items()]:
            if not isinstance(flags, dict):
                bad.append(f"variants: {name!r} must be a dict of flags, not {flags!r}")
                continue
            fixed = FIXED_BY_STUDY | ({"seed"} if name == "settings" else set())
            if refused := sorted(set(flags) & fixed):
                bad.append(f"{name}: {', '.join(refused)} cannot be set here: "
                           "a study decides it for every run")
        names = {"plain", *(name for pattern in self.mechanisms for name in matching(pattern))}
        bad += [f"variants: the name {name!r} is taken" for name in self.variants if name in names]
        return bad

    def problems_of_budget(self):
        bad = []
        if self.size not in (None, *SIZES):
            bad.append(f"size={self.size!r} must be one of {', '.join(SIZES)}")
        if self.tokens_per_param is not None and not self.tokens_per_param > 0:
            bad.append(f"tokens_per_param={self.tokens_per_param} must be positive")
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
        if self.base and self.scale != "tiny":
            bad.append(f"scale={self.scale!r} means nothing beside base={self.base!r}, "
                       "which is the plain GPT already")
        if self.split not in ("val", "test") or self.split == "val" and self.tune_lr:
            reason = ", since val chooses the learning rate" if self.tune_lr else " or val"
            bad.append(f"split={self.split!r} must be test{reason}")
        if self.submit not in (None, "auto", "slurm", "local"):
            bad.append(f"submit={self.submit!r} must be one of auto, slurm, local")
        return bad


def matching(pattern):
    """The names that an entry of `mechanisms` stands for: itself, or those of MECHANISMS that its * match."""
    return ["all_on"] if pattern == "all_on" else fnmatch.filter(MECHANISMS, pattern)


def variants_of(config):
    """{name: flags} of everything that is compared with the plain GPT."""
    names = dict.fromkeys(name for pattern in config.mechanisms for name in matching(pattern))
    return {**{name: ALL_ON if name == "all_on" else MECHANISMS[name] for name in names}, **config.variants}


# ---- arms: the models that are compared ----

@dataclass
class Arm:
    """One model and its training, for all seeds: the plain GPT, a variant, or a baseline that matches one."""
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


class ArmBuilder:
    """Makes arms from flags on top of a study's plain GPT. Raises UserError."""

    def __init__(self, config):
        self.config = config
        self.base = config.base or f"config/{config.scale}.py"
        self.settings = {**SIZES.get(config.size, {}), **config.settings}
        model, training = self.load({})
        if config.tokens_per_param:
            self.settings.update(budget_of(model, training, config.tokens_per_param))
            model, training = self.load({})
        # these have no fused kernel with dropout on the attention weights, and both sides have it or none
        without = any(flags.get("acag") or "window" in flags or flags.get("routing_capacity")
                      for flags in variants_of(config).values())
        if without and (model.dropout if model.attn_dropout is None else model.attn_dropout):
            self.settings["attn_dropout"] = 0.0
        self.data = Dataset(training.dataset)
        for split in (config.split, "val"):
            self.data.tokens(split)  # what is missing is said now, not after all runs
        self.plain = self.arm("plain", "plain", "plain GPT", {})

    def load(self, flags):
        """(GPTConfig, TrainConfig) of the plain GPT with these flags. UserError."""
        more = {"settings": self.settings, f"variant with {flags}": flags}
        return configurator.load((GPTConfig, TrainConfig), [self.base], more=more)

    def arm(self, name, kind, label, flags):
        for key, value in flags.items():
            if isinstance(value, str) and value in RELATIVE:
                flags = {**flags, key: RELATIVE[value](self.plain.model)}
        try:
            model, training = self.load(flags)
        except UserError as e:
            raise UserError(f"{name}: {' '.join(str(e).split())}")
        model = replace(model, vocab_size=model.vocab_size or self.data.vocab_size)
        params, flops = size_of(model)
        return Arm(name, kind, label, flags, model, training.for_recipe(model.recipe), params, flops)

    def variants(self):
        return [self.arm(name, "variant", name, flags) for name, flags in variants_of(self.config).items()]

    def same_parameters(self, variant, baselines):
        """A plain GPT with the variant's parameters to 0.1 %, by MLP width; one of `baselines` if it fits."""
        def fits(arm):
            close = abs(arm.params - variant.params) <= 1e-3 * variant.params
            return close and arm.train.max_iters == self.plain.train.max_iters

        fitting = [arm for arm in [self.plain, *baselines] if fits(arm)]
        if fitting:
            return fitting[0]
        width = self.plain.model.n_inner or 4 * self.plain.model.n_embd
        per_unit = size_of(replace(self.plain.model, n_inner=width + 1))[0] - self.plain.params
        width += round((variant.params - self.plain.params) / per_unit)
        if width < 1:
            raise UserError(f"{variant.name} has {variant.params:,} parameters, "
                            "fewer than a plain GPT without its MLPs: no baseline has as few")
        arm = self.arm(f"plain, MLP {width}", "baseline", f"plain GPT, MLP {width} wide", {"n_inner": width})
        if not fits(arm):
            raise UserError(f"{variant.name} has {variant.params:,} parameters; the nearest plain GPT, "
                            f"with n_inner={width}, has {arm.params:,}, more than 0.1 % off")
        return arm

    def same_cost(self, steps, baselines):
        """The plain GPT trained for so many steps, rounded; one of `baselines` where it is the same."""
        steps = max(1, round(steps))
        for arm in [self.plain, *baselines]:
            if arm.train.max_iters == steps and arm.params == self.plain.params:
                return arm
        label = f"plain GPT, {steps:,} steps"
        return self.arm(f"plain, {steps} steps", "baseline", label, {"max_iters": steps})


def budget_of(model, training, tokens_per_param):
    """{max_iters, eval_interval} that train a plain GPT for so many tokens a parameter of its blocks."""
    with torch.device("meta"):
        blocks = sum(p.numel() for p in GPT(replace(model, vocab_size=1)).transformer.h.parameters())
    tokens = training.batch_size * training.grad_accum * model.block_size
    steps = max(1, round(tokens_per_param * blocks / tokens))
    return dict(max_iters=steps, eval_interval=max(1, steps // 10))


def size_of(config):
    """(parameters, training FLOPs per token) of a model; built without memory where that is possible."""
    # a window's FLOPs need its table of how many keys each token sees
    with torch.device("cpu" if config.window else "meta"):
        model = GPT(config)
    return model.num_params(), model.flops_per_token()


def step_time_ratio(a, b, device, threads, steps=4, rounds=7):
    """Time of a training step of arm a over that of b: the median ratio over alternating rounds.

    Threads and precision are those of a run.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high")

    def stepper(arm):
        model = GPT(arm.model).to(device)
        rows = arm.train.batch_size * arm.train.grad_accum
        ids = torch.randint(arm.model.vocab_size, (rows, arm.model.block_size + 1), device=device)
        trainer = Trainer(model, arm.train, Process(device))
        return lambda: trainer.step(ids[:, :-1], ids[:, 1:])

    def timed(step):
        began = time.perf_counter()
        for _ in range(steps):
            step()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    try:
        pair = stepper(a), stepper(b)
        for step in pair:
            timed(step)  # compilation, allocation, caches
        return statistics.median(timed(pair[0]) / timed(pair[1]) for _ in range(rounds))
    finally:
        torch.set_num_threads(before)
