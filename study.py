"""
What is compared: the config of a study, and the arms that it makes - the plain GPT, its variants, and plain GPTs made to match them.
"""

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Optional

import torch

from common import UserError
import configurator
from dataset import Dataset
from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from optim import make_optimizers
from train import TrainConfig

# what a scale means: the plain GPT, and how much of the test split is scored (0: all of it)
SCALES = {
    "tiny": dict(base="config/tiny.py", test_tokens=196608),  # two CPU cores; a slice, so that scoring costs less than training
    "small": dict(base="config/small.py", test_tokens=0),  # one GPU, half an hour a run
    "seed": dict(base="config/paper.py", test_tokens=0),     # the size of the head-routing write-up
}
# values of a variant's flags that follow the size of the plain GPT
RELATIVE = {"n_head": lambda model: model.n_head, "n_embd // 2": lambda model: model.n_embd // 2}
MATCHES = ("parameters", "FLOPs", "wall-clock")  # beside the same hyperparameters, which every variant is compared at
# keys of training that a run of a study does not have: they say where and how, or would replace its model
NOT_ITS_OWN = {"out_dir", "resume", "overwrite", "eval_only", "wandb_log", "wandb_project", "wandb_run_name", "wandb_mode", "wandb_tags"}
REFUSED = NOT_ITS_OWN | {"init_from", "device"}


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
    test_tokens: Optional[int] = None    # score so many tokens of it, in evenly spaced windows; 0: all; None: as the scale says, all with a base
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
        for name, flags in [("settings", self.settings), *self.variants.items()]:
            if not isinstance(flags, dict):
                bad.append(f"variants: {name!r} must be a dict of flags, not {flags!r}")
            elif refused := sorted(set(flags) & (REFUSED | ({"seed"} if name == "settings" else set()))):
                bad.append(f"{name}: {', '.join(refused)} cannot be set here: a study decides it for every run")
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
        if self.base and self.scale in ("small", "seed"):
            bad.append(f"scale={self.scale!r} means nothing beside base={self.base!r}, which is the plain GPT already")
        if self.split not in ("val", "test") or self.split == "val" and self.tune_lr:
            bad.append(f"split={self.split!r} must be test" + (", since val chooses the learning rate" if self.tune_lr else " or val"))
        if self.submit not in (None, "auto", "slurm", "local"):
            bad.append(f"submit={self.submit!r} must be one of auto, slurm, local")
        return bad


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
    """Makes arms from flags on top of a study's plain GPT. Raises UserError."""

    def __init__(self, study):
        self.study, self.base = study, study.base or SCALES[study.scale]["base"]
        self.settings = dict(study.settings)
        model, config = self.configs({})
        needs = [name for name, flags in variants_of(study).items() if flags.get("acag") or "window" in flags or flags.get("routing_capacity")]
        if needs and (model.dropout if model.attn_dropout is None else model.attn_dropout):
            self.settings["attn_dropout"] = 0.0  # these have no fused kernel with it, and a comparison has it on both sides or on none
        self.data = Dataset(config.dataset)
        for split in (study.split, "val"):
            self.data.tokens(split)  # what is missing is said now, not after all runs
        self.test_tokens = study.test_tokens
        if study.test_tokens is None:
            self.test_tokens = 0 if study.base else SCALES[study.scale]["test_tokens"]
        self.plain = self.arm("plain", "plain", "plain GPT", {})

    def configs(self, flags):
        """(GPTConfig, TrainConfig) of the plain GPT with these flags. UserError."""
        return configurator.load((GPTConfig, TrainConfig), [self.base], more={"settings": self.settings, f"variant with {flags}": flags})

    def arm(self, name, kind, label, flags):
        flags = {k: RELATIVE[v](self.plain.model) if isinstance(v, str) and v in RELATIVE else v for k, v in flags.items()}
        try:
            model, config = self.configs(flags)
        except UserError as e:
            raise UserError(f"{name}: {' '.join(str(e).split())}")
        model = replace(model, vocab_size=model.vocab_size or self.data.vocab_size)
        params, flops = size_of(model)
        return Arm(name, kind, label, flags, model, config.for_recipe(model.recipe), params, flops)

    def variants(self):
        return [self.arm(name, "variant", name, flags) for name, flags in variants_of(self.study).items()]

    def same_parameters(self, variant, made):
        """A plain GPT whose MLP is wide enough to have the variant's parameters to 0.1 %; one of `made` where that fits."""
        def fits(arm):
            return abs(arm.params - variant.params) <= 1e-3 * variant.params and arm.train.max_iters == self.plain.train.max_iters

        if found := next(filter(fits, [self.plain, *made]), None):
            return found
        width = self.plain.model.n_inner or 4 * self.plain.model.n_embd
        per_unit = size_of(replace(self.plain.model, n_inner=width + 1))[0] - self.plain.params
        width += round((variant.params - self.plain.params) / per_unit)
        if width < 1:
            raise UserError(f"{variant.name} has {variant.params:,} parameters, fewer than a plain GPT without its MLPs: no baseline has as few")
        arm = self.arm(f"plain, MLP {width}", "baseline", f"plain GPT, MLP {width} wide", {"n_inner": width})
        if not fits(arm):
            raise UserError(f"{variant.name} has {variant.params:,} parameters; the nearest plain GPT, with n_inner={width}, has "
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


def step_time_ratio(a, b, device, threads, steps=4, rounds=7):
    """Time of a training step of arm a over that of b: the median ratio over alternating rounds, with a run's threads and precision."""
    kind = torch.device(device).type
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high")

    def stepper(arm):
        c, model = arm.train, GPT(arm.model).to(device)
        run = torch.compile(model) if (kind == "cuda" if c.compile is None else c.compile) else model
        half = {"auto": torch.bfloat16 if kind == "cuda" else None, "float32": None}.get(c.dtype, getattr(torch, c.dtype, None))
        ids = torch.randint(arm.model.vocab_size, (c.batch_size, arm.model.block_size + 1), device=device)
        optimizers, params = make_optimizers(model, c), list(model.parameters())

        def step():
            for _ in range(c.grad_accum):
                with torch.autocast(kind, half) if half else nullcontext():
                    out = run(ids[:, :-1], ids[:, 1:])
                sum(out.aux.values(), out.loss).backward()
            if c.grad_clip:
                torch.nn.utils.clip_grad_norm_(params, c.grad_clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return step

    def timed(step):
        began = time.perf_counter()
        for _ in range(steps):
            step()
        if kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    try:
        pair = stepper(a), stepper(b)
        for step in pair:
            timed(step)  # compilation, allocation, caches
        return statistics.median(timed(pair[0]) / timed(pair[1]) for _ in range(rounds))
    finally:
        torch.set_num_threads(before)
