"""
The models of a study: the plain GPT, its variants, which are flags on top of it, the plain GPT at other
budgets, and plain GPTs with a variant's parameters.
"""

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from model import GPT, GPTConfig
from nanoheads import configurator, files
from nanoheads.common import UserError
from nanoheads.config import TrainConfig, data_of, training_problems
from nanoheads.optim import OPTIMIZERS, TUNED, rate_of, roles
from nanoheads.tasks import TASKS
from study.config import BOOKKEEPING, SIZES, variants_of
from study.digest import mechanism_files
from study.records import PLAIN
from study.verdicts import same_size

SMALL_MODEL = 2_000_000  # parameters up to which a model is built with memory to count things in it


class Counts(NamedTuple):
    """What is counted in a model. groups: the keys of TUNED that its optimizers have, by optimizer; added:
    the keys of the rates at which what its mechanisms add learns, likewise.
    """
    params: int
    flops_per_token: int  # as the algorithm needs them
    groups: dict
    added: dict


@dataclass(frozen=True, eq=False)  # Models makes each once, so that one is equal to itself alone
class Model:
    """A variant as it is trained on one text, with every default filled in."""
    name: str
    kind: str       # as records.Variant's
    text: str
    flags: dict     # what differs from the plain GPT, by the names that a run has it under
    config: GPTConfig
    training: TrainConfig

    @cached_property
    def counts(self):
        """Its Counts."""
        return counts_of(self.config)

    @property
    def params(self):
        """How many parameters it has."""
        return self.counts.params

    @property
    def tokens(self):
        """How many tokens a run of it is trained on."""
        return self.training.max_iters * tokens_a_step(self.config, self.training)

    def groups(self):
        """The keys of TUNED that its optimizers have."""
        return self.counts.groups[self.training.optimizer]

    def rates(self, factors=()):
        """{flag: rate} of all that is TUNED, those of some groups times a factor each; a rate that follows
        another one where nothing is set stays as it was.
        """
        rates = {key: getattr(self.training, key) for keys in TUNED.values() for key in keys}
        return rates | {key: scale_rate(factor, key, rates[key])
                        for group, factor in dict(factors).items() for key in TUNED[group]}

    def rates_of_its_own(self):
        """{flag: learning rate} of the weights that its mechanisms add; {}: they add none."""
        flags = self.counts.added[self.training.optimizer]
        return {flag: getattr(self.training, flag) for flag in flags}

    def same_size(self, other):
        """Whether both count as of equal parameters."""
        return same_size(self.params, other.params)


def scale_rate(factor, key, value):
    """A rate times a factor; a momentum m has its memory of 1 / (1 - m) steps multiplied."""
    if factor == 1:
        return value
    return max(0.0, round(1 - (1 - value) / factor, 12)) if key.endswith("_momentum") else value * factor


class Models:
    """Makes the models of a study, each once. Raises UserError."""

    def __init__(self, config):
        self.config, self.cache, self.data = config, {}, {}
        # {name of a text or a task: the value of its flag}
        self.texts = {text if config.task else Path(text).name: text for text in texts_of(config)}

    # ---- settings of the plain GPT ----

    @cached_property
    def settings(self):
        """The settings of both sides on the first text or task."""
        c = self.config
        text_flag = {"task" if c.task else "dataset": next(iter(self.texts.values()))}
        settings = {**SIZES.get(c.size, {}), **c.settings, **text_flag}
        model, training = self.load(settings)
        if training.task and not c.task:
            raise UserError(f"{c.file} trains on the task {training.task}: add --task={training.task}, or "
                            "other ones, or all")
        if c.tokens_per_param:
            settings |= budget_of(model, training, c.tokens_per_param)
        if model.weight_dropout and any(self.conflicts_with_dropout(settings, flags)
                                        for flags in variants_of(c).values()):
            settings["attn_dropout"] = 0.0  # on both sides, so that dropout is no part of the difference
        return settings

    def load(self, settings, flags={}):
        """(GPTConfig, TrainConfig) of the plain GPT with these settings and flags. UserError."""
        return configurator.load((GPTConfig, TrainConfig), [self.config.file],
                                 more={"settings": settings, f"variant with {flags}": flags})

    def whole_run(self):
        """(steps, tokens) of a run of the plain GPT's config file, without settings; one of another size has
        as many tokens a parameter of its blocks.
        """
        model, training = configurator.load((GPTConfig, TrainConfig), [self.config.file])
        steps = training.max_iters
        if self.config.size:
            steps = round(steps * size_of_blocks(self.load(self.settings)[0]) / size_of_blocks(model))
        return steps, steps * tokens_a_step(model, training)

    def conflicts_with_dropout(self, settings, flags):
        """Whether only dropout on the attention weights keeps the plain GPT from taking these flags."""
        def is_accepted(flags):
            try:
                return bool(self.load(settings, flags))
            except UserError:
                return False
        return not is_accepted(flags) and is_accepted({**flags, "attn_dropout": 0.0})

    def data_on(self, text, training, block_size):
        """The Dataset of a text or the TaskData of a task, opened once; a text's checksums are taken anew."""
        if text not in self.data:
            self.data[text] = data = data_of(training, block_size)
            for split in () if training.task else data.splits:
                for path in data.files(split):
                    files.forget(path, data.dir)
        return self.data[text]

    # ---- models ----

    def make(self, text, name, kind, flags):
        """The Model of these flags on a text, or a task."""
        key = text, name, repr(flags)
        if key not in self.cache:
            self.cache[key] = self.build(text, name, kind, flags)
        return self.cache[key]

    def build(self, text, name, kind, flags):
        """Make the Model; make() keeps it."""
        first = next(iter(self.texts))
        if text != first:
            return self.move_to(text, self.make(first, name, kind, flags))
        plain = self.plain(text) if flags else None
        model, training = self.checked(name, flags)
        vocab_size = model.vocab_size or self.data_on(text, training, model.block_size).vocab_size
        own_files = ",".join(str(file.path) for file in mechanism_files(training, model))
        model = replace(model, vocab_size=vocab_size)
        training = replace(training, own_mechanism=own_files or None).for_recipe(model.recipe)
        flags = flags_of_run(flags, model, training, plain) if plain else flags
        return Model(name, kind, text, flags, model, training)

    def checked(self, name, flags):
        """(GPTConfig, TrainConfig) of a variant, of which its data is not asked. UserError: what is wrong."""
        try:
            model, training = self.load(self.settings, flags)
        except UserError as e:
            raise UserError(f"{name}: {' '.join(str(e).split())}") from None
        if problems := training_problems(model, training):
            raise UserError(f"{name}: {'; '.join(problems)}")
        if training.patience:
            raise UserError(f"{name}: patience={training.patience} would end runs at different steps, and a "
                            "study compares runs of equal length: leave it out")
        return model, training

    def move_to(self, text, model):
        """A Model of the first text, on another one: nothing but the text and its vocabulary differ."""
        key = "task" if self.config.task else "dataset"
        training, vocab_size = replace(model.training, **{key: self.texts[text]}), model.config.vocab_size
        data = self.data_on(text, training, model.config.block_size)
        if vocab_size == self.data_on(model.text, model.training, model.config.block_size).vocab_size:
            vocab_size = data.vocab_size
        return replace(model, text=text, training=training,
                       config=replace(model.config, vocab_size=vocab_size))

    def with_rates(self, model, rates, plain=None):
        """A Model at other rates; its flags name those that differ from the plain GPT's, a Model; None: no
        new flags.
        """
        key = model, repr(rates), plain
        if key not in self.cache:
            flags = {flag: rate for flag, rate in rates.items() if plain and (
                flag in model.flags or rate != getattr(plain.training, flag))}
            self.cache[key] = replace(model, training=replace(model.training, **rates),
                                      flags={**model.flags, **flags})
        return self.cache[key]

    def plain(self, text):
        """The plain GPT."""
        return self.make(text, PLAIN, "plain", {})

    def variant(self, text, name, flags):
        """A variant of the plain GPT; of PLAIN the plain GPT itself."""
        return self.plain(text) if name == PLAIN else self.make(text, name, "variant", flags)

    def at_budget(self, text, multiple):
        """The plain GPT trained for so many times as many steps."""
        steps = max(1, round(multiple * self.plain(text).training.max_iters))
        return self.make(text, f"plain x {multiple:g}", "budget", {"max_iters": steps})

    def wider(self, text, width):
        """The plain GPT with an MLP of this width."""
        return self.make(text, f"plain, MLP {width}", "wider", {"n_inner": width})

    def width_for(self, model):
        """The MLP width of the plain GPT of a model's parameters; None: without its MLP it has more."""
        width = 64  # of two sizes any width follows
        plain = self.plain(model.text).config
        params, params_of_next = (counts_of(replace(plain, n_inner=n)).params for n in (width, width + 1))
        width += round((model.params - params) / (params_of_next - params))
        return width if width > 0 else None


# ---- flags ----

def texts_of(config):
    """The tasks or the texts of a study, or the text of its scale, as its flags name them."""
    if config.task:
        return [name for name in TASKS if name in config.task or "all" in config.task]
    if config.texts:
        return config.texts
    _, training = configurator.load((GPTConfig, TrainConfig), [config.file],
                                    more={"settings": config.settings})
    return [training.dataset]


def flags_of_run(flags, model, training, plain):
    """Flags by the names and values that they have in a run: nanoGPT's names become the flags that they
    changed, and a warm-up may have been shortened.
    """
    all_own, all_of_plain = all_flags(model, training), all_flags(plain.config, plain.training)
    run_flags = {key: all_own[key] if key == "warmup_iters" else value
                 for key, value in flags.items() if key in all_own}
    if len(run_flags) < len(flags):
        run_flags.update({key: value for key, value in all_own.items() if value != all_of_plain.get(key)})
    return run_flags


def all_flags(model, training):
    """Every flag of a model and of its training, except those that change no number."""
    flags = {**{name: getattr(model, name) for name in GPTConfig.defaults()}, **asdict(training)}
    return {key: value for key, value in flags.items() if key not in BOOKKEEPING}


def budget_of(model, training, tokens_per_param):
    """{max_iters, eval_interval} that train a plain GPT for so many tokens a parameter of its blocks."""
    steps = max(1, round(tokens_per_param * size_of_blocks(model) / tokens_a_step(model, training)))
    return dict(max_iters=steps, eval_interval=max(1, steps // 10))


def size_of_blocks(model):
    """The parameters of a plain GPT's blocks."""
    return sum(p.numel() for p in build_to_count(replace(model, vocab_size=1)).transformer.h.parameters())


def tokens_a_step(model, training):
    """How many tokens a step of training reads."""
    return training.batch_size * training.grad_accum * model.block_size


# ---- counting ----

def build_to_count(config):
    """A GPT to count things in, without memory where it is large."""
    # a window's FLOPs need its table of how many keys each token sees
    with torch.device("cpu" if is_small(config) or config.window else "meta"):
        return GPT(config)


def is_small(config):
    """Whether counting in a model takes less time than torch needs to import its compiler, 2 s, as it does
    for the first tensor without memory.
    """
    return 12 * config.n_layer * config.n_embd ** 2 + config.vocab_size * config.n_embd < SMALL_MODEL


COUNTS = {}  # {a GPTConfig as text: its Counts}: building takes longer than all else that is planned


def tuned_key_of(role, optimizer):
    """The key of TUNED that the rate of a Role goes with; one that is not tuned follows mechanism_lr."""
    rate = rate_of(role, optimizer)
    return rate if rate in TUNED else "mechanism_lr"


def counts_of(config):
    """The Counts of a GPTConfig."""
    if (key := repr(config)) not in COUNTS:
        gpt = build_to_count(config)
        groups, added = {}, {}
        for name, optimizer in OPTIMIZERS.items():
            rates = {role: tuned_key_of(role, name) for role in roles(gpt).values()}
            own_keys = optimizer.tuned if optimizer.rate in rates.values() else ()
            groups[name] = tuple(group for group in TUNED if group in {*rates.values(), *own_keys})
            added[name] = tuple(dict.fromkeys(rate for role, rate in rates.items() if role.added))
        COUNTS[key] = Counts(gpt.num_params(), gpt.flops_per_token(), groups, added)
    return COUNTS[key]
