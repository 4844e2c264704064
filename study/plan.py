"""
plan(): from what was asked, and what has ended so far, to the runs that a study needs.

It is a function, and is asked again whenever the runs that it named have ended: what follows from scores
(which variants are judged, at which rates, which of them meet a wider plain GPT) is then among what it names.
A study is at its end when nothing of its plan is missing. So a study that is started again goes on by itself.
"""

import itertools
import math
import statistics
from dataclasses import asdict, dataclass, field

import numpy as np

from nanoheads.common import UserError, pick_device
from nanoheads.config import TrainConfig
from nanoheads.extensions import EXTENSIONS
from nanoheads.optim import OPTIMIZERS, PEAK_RATES
from nanoheads.tasks import first_learned_step
from study import stats
from study.config import FIXED_KEYS, variants_of
from study.digest import dependencies
from study.models import Models
from study.records import PLAIN, Pair, Result, Run
from study.scores import scores_in
from study.verdicts import MEASURES, difference, seems_better

ROWS_OF_TASK = 256  # of each level, by which a run on a task is scored
FACTORS = (0.5, 1.0, 2.0)  # of a rate, that are tried first
ROUNDS = 3                 # of trying more, while the best is the last one tried


@dataclass(frozen=True)
class Plan:
    """The runs that a study needs so far, and what it compares.

    models: {name: Model on the first text} of what is judged, or would be. pairs: () until it is known what
    is judged. rates: {variant: {flag: rate}} of those that were tuned away from what they were, of a task
    {"variant on task": ...}. notes: what is left out, and why, as sentences.
    """
    runs: tuple
    models: dict = field(default_factory=dict)
    pairs: tuple = ()
    rates: dict = field(default_factory=dict)
    notes: tuple = ()


class Planner:
    """Plans one study, by the outcomes of runs, {name of a run: Result or Failure}. UserError: it cannot be.
    """

    def __init__(self, config):
        if bad := [*config.problems(), *config.problems_of_runs()]:
            raise UserError("\n".join(bad))
        self.config, self.models = config, Models(config)
        self.texts = (*self.models.texts,)
        self.measure = "right answers" if config.task else "bits/byte"
        self.device = pick_device(config.device).split(":")[0]  # GPUs are handed out by number
        self.defaults = asdict(TrainConfig())
        # what was made once: Runs, specs, digests, and whether a variant seems better
        self.runs, self.specs, self.surroundings, self.seen = {}, {}, {}, {}

    def plan(self, outcomes):
        """The Plan of the study, as far as these outcomes decide it."""
        variants, runs = variants_of(self.config), []
        if self.screens(variants):
            runs += self.screening(variants)
            if not ended(runs, outcomes):
                return Plan(tuple(runs), self.on_first(variants))
            chosen = self.chosen(scores_in(runs, outcomes_of(runs, outcomes), "screen"))
            variants = {name: flags for name, flags in variants.items() if name in chosen}
        rates = {}
        if self.config.tune_lr:
            search = self.search_on_task if self.config.task else self.search
            for text in self.texts if self.config.task else self.texts[:1]:
                more, rates[text] = search(text, variants, outcomes)
                runs += more
            if None in rates.values():
                return Plan(tuple(runs), self.on_first(variants))
            rates = {text: rates.get(text, rates[self.texts[0]]) for text in self.texts}
        return self.judged(variants, rates, runs, outcomes)

    def foreseen(self, outcomes):
        """The Plan that follows if all that is missing gives the same score: no fewer runs than there will
        be, but for rates whose best is the last one tried, and wider plain GPTs.
        """
        while not ended((plan := self.plan(outcomes)).runs, outcomes):
            outcomes = {run.name: Result(0.0) for run in plan.runs} | outcomes
        return plan

    def on_first(self, variants):
        """{name: Model on the first text} of the plain GPT, its budgets and some variants."""
        first = self.texts[0]
        every = [self.models.plain(first), *(self.models.at_budget(first, each)
                                             for each in self.config.budgets),
                 *(self.models.variant(first, *each) for each in variants.items())]
        return {model.name: model for model in every}

    # ---- runs ----

    def run(self, stage, model, seed, split, name=None):
        """The Run of a Model with a seed. name: of the variant, where it is not the model's."""
        key = stage, model, seed, split, name
        if key not in self.runs:
            spec = self.spec(model, split)
            flags = {**spec["model"], "seed": seed + model.flags.get("seed", 0)}
            self.runs[key] = Run(stage, name or model.name, model.text, seed, {**spec, "model": flags})
        return self.runs[key]

    def spec(self, model, split):
        """All that the numbers of a Model's runs depend on, but for their seed."""
        if (model, split) not in self.specs:
            training, task = asdict(model.training), model.training.task
            unused = {key for each in EXTENSIONS if not each.is_on(model.training)
                      for key in each.keys.__dataclass_fields__}
            keep = ("max_iters",) if task else ("max_iters", "dataset")
            train = not_default({key: value for key, value in training.items()
                                 if key not in FIXED_KEYS and key not in unused}, self.defaults, keep)
            flags = not_default(model.config.flags(), model.config.defaults())
            amount = dict(rows=ROWS_OF_TASK) if task else dict(tokens=self.config.test_tokens)
            self.specs[model, split] = dict(
                model=flags, train=train, score=dict(split=split, **amount), device=self.device,
                **self.surroundings_of(model))
        return self.specs[model, split]

    def surroundings_of(self, model):
        """dependencies() of a Model's runs, read once for all that read the same."""
        c = model.training
        files = [getattr(c, key) for each in EXTENSIONS for key in each.files]
        key = (model.text, c.own_mechanism, c.teacher, c.labels, *files, model.config.block_size)
        if key not in self.surroundings:
            try:
                self.surroundings[key] = dependencies(c, model.config, self.config.first.get(c.teacher))
            except UserError as e:
                raise type(e)(f"{model.name}: {e}") from None
        return self.surroundings[key]

    # ---- the first stage ----

    def screens(self, variants):
        """Whether a first stage is asked for and can leave a variant out."""
        c = self.config
        return c.screen and len(variants.keys() - self.named()) > c.best + c.worst

    def screening(self, variants):
        """The Runs of all variants on validation."""
        first, models = self.texts[0], {PLAIN: {}, **variants}
        return [self.run("screen", self.models.variant(first, name, flags), seed, "val")
                for seed in self.config.screen_seeds for name, flags in models.items()]

    def named(self):
        """The variants that are judged wherever they stand on validation."""
        return {*self.config.always, *itertools.chain(*self.config.contrasts)} - {PLAIN}

    def chosen(self, scores):
        """The variants to judge: the best and the worst on validation, and those named."""
        c, first = self.config, self.texts[0]
        means = {name: np.mean([*own[first].values()]) for name, own in scores.items() if name != PLAIN}
        others = [name for name in sorted(means, key=means.get) if name not in self.named()]
        return {*self.named(), *others[:c.best], *others[max(c.best, len(others) - c.worst):]}

    # ---- learning rates ----

    def search(self, text, variants, outcomes):
        """(runs, {variant: {flag: rate}}, None before they have ended) of a search on a text's validation.

        Each group of rates is moved by itself, with one seed, by FACTORS; where the best is the last one
        tried, the next beyond it is tried too. What is tried for a variant is tried for the plain GPT. Then
        runs with all seeds decide between the rates as they are, each group's best alone, and all of them:
        one seed's best is luck in part, and what is good by itself may be bad together.
        """
        seeds = self.config.screen_seeds
        models = {name: self.models.variant(text, name, flags)
                  for name, flags in {PLAIN: {}, **variants}.items()}
        tried = {name: {group: {*FACTORS} for group in model.groups()} for name, model in models.items()}
        for _ in range(ROUNDS):
            at = {(name, group, factor): self.at_rates(models[name], {group: factor}, seeds[0])
                  for name, own in tried.items() for group, factors in own.items()
                  for factor in sorted(factors)}
            if not ended(at.values(), outcomes):
                return [*at.values()], None
            best = best_factors(at, outcomes)
            for name, own in best.items():
                for group, factor in own.items():
                    tried[name][group] |= beyond(factor, tried[name][group])
            for group, factors in tried[PLAIN].items():
                factors.update(*(own[group] for own in tried.values() if group in own))
        candidates = {}
        for name in models:
            moved = {group: factor for group, factor in best.get(name, {}).items() if factor != 1}
            candidates[name] = [{}, *({group: factor} for group, factor in moved.items())]
            candidates[name] += [moved] if len(moved) > 1 else []
        runs = {name: [[self.at_rates(models[name], factors, seed) for seed in seeds] for factors in own]
                for name, own in candidates.items()}
        every = [*at.values(), *(run for own in runs.values() for each in own for run in each)]
        if not ended(every, outcomes):
            return every, None
        taken = best_candidates({name: [scores_of_done(each, outcomes) for each in own]
                                 for name, own in runs.items()})
        return every, {name: model.rates(candidates[name][taken[name]]) for name, model in models.items()}

    def search_on_task(self, text, variants, outcomes):
        """The same on validation rows of a task, with all seeds: a small grid over the optimizer's own rate,
        as Muon has one for matrices, and the rates of all other parameters.

        Scores that are nearly all or nothing mislead a search with one seed: its best pair may be a lucky
        one.
        """
        seeds, grids, runs = self.config.screen_seeds, {}, {}
        for name, flags in {PLAIN: {}, **variants}.items():
            model = self.models.variant(text, name, flags)
            own_rate = OPTIMIZERS[model.training.optimizer].rate
            grids[name] = {factors: model.rates(of_groups(factors, model.groups(), own_rate))
                           for factors in itertools.product(FACTORS, FACTORS)
                           if factors[0] == 1 or own_rate in model.groups()}
            runs[name] = {}
            for (own, rest), rates in grids[name].items():
                words = f"{name}, matrices x {own:g}, rest x {rest:g}"
                runs[name][own, rest] = [
                    self.run("tune", self.models.at(model, rates), seed, "val", words) for seed in seeds]
        every = [run for own in runs.values() for each in own.values() for run in each]
        if not ended(every, outcomes):
            return every, None
        return every, {name: grids[name][best_pair(own, outcomes)] for name, own in runs.items()}

    def at_rates(self, model, factors, seed):
        """The Run of a Model at some rates times a factor, on validation."""
        moved = {group: factor for group, factor in factors.items() if factor != 1}
        words = ", ".join(f"{group} x {factor:g}" for group, factor in moved.items()) or "rates as they are"
        model = self.models.at(model, model.rates(moved)) if moved else model
        return self.run("tune", model, seed, "val", f"{model.name}, {words}")

    # ---- what is judged ----

    def judged(self, variants, rates, runs, outcomes):
        """The Plan whose runs are judged: variants, budgets, a wider plain GPT for what seems better."""
        c, seeds, notes = self.config, self.plain_seeds(len(variants)), []
        on = {text: self.judged_on(text, variants, rates.get(text)) for text in self.texts}
        first = on[self.texts[0]]
        # of a task, to train for longer is one more variant
        names = [name for name, model in first.items()
                 if model.kind == "variant" or c.task and model.kind == "budget"]
        pairs = [Pair(name, PLAIN, texts) for texts in self.pools() for name in names]
        pairs += [Pair(*pair, texts) for texts in self.pools() for pair in c.contrasts if PLAIN not in pair]
        judged = [self.run("judge", model, seed, c.split)  # seed by seed: what is stopped has all variants
                  for seed in seeds for text in self.texts for model in on[text].values()
                  if seed in c.seeds or model.name == PLAIN]
        runs = [*runs, *judged]
        if c.match_parameters and ended(judged, outcomes):
            for pair in self.better(pairs, judged, outcomes):
                model, made = on[pair.texts[0]][pair.variant], on[pair.texts[0]]
                if model.same_size(made[PLAIN]):
                    continue
                fit = [each for each in made.values() if each.kind == "wider" and model.same_size(each)]
                if not (width := fit[0].config.n_inner if fit else self.models.width_for(model)):
                    notes.append(f"{pair.variant} has fewer parameters than any plain GPT of this size")
                    continue
                for text in pair.texts:
                    wide = self.with_rates(self.models.wider(text, width), rates.get(text))
                    on[text][wide.name] = wide
                    # of a task with all of the plain GPT's: with fewer nothing could be shown
                    runs += [self.run("judge", wide, seed, c.split)
                             for seed in (seeds if c.task else c.seeds)]
                pairs.append(Pair(pair.variant, wide.name, pair.texts, "parameters"))
        models = {name: model for text in self.texts[::-1] for name, model in on[text].items()}
        models = {**first, **{name: model for name, model in models.items() if name not in first}}
        once = {(run.stage, run.variant, run.text, run.name): run for run in runs}
        return Plan(tuple(once.values()), models, tuple(pairs), self.rates_found(variants, rates),
                    tuple(notes))

    def judged_on(self, text, variants, rates):
        """{name: Model} of what is judged on a text, at its own rates where those are known."""
        plain = self.with_rates(self.models.plain(text), rates)
        every = [plain, *(self.with_rates(self.models.at_budget(text, each), rates)
                          for each in self.config.budgets)]
        for name, flags in variants.items():
            model = self.models.variant(text, name, flags)
            every.append(self.models.at(model, rates[name], plain) if rates else model)
        return {model.name: model for model in every}

    def with_rates(self, model, rates):
        """A plain GPT of any budget or width, at the plain GPT's own rates where those are known."""
        return self.models.at(model, rates[PLAIN]) if rates else model

    def rates_found(self, variants, rates):
        """What Plan.rates says of {text: {variant: {flag: rate}}}."""
        found = {}
        for text in rates if self.config.task else [*rates][:1]:
            for name, flags in {PLAIN: {}, **variants}.items():
                before = self.models.variant(text, name, flags).rates()
                found[f"{name} on {text}" if self.config.task else name] = {
                    flag: rate for flag, rate in rates[text][name].items() if rate != before[flag]}
        return found

    def pools(self):
        """The texts of each comparison: all of them together, or each task by itself."""
        return [(task,) for task in self.texts] if self.config.task else [self.texts]

    def plain_seeds(self, n_variants):
        """The seeds of the plain GPT, which stands in every comparison: more than a variant has."""
        c, n = self.config, len(self.config.seeds)
        count = c.plain_seeds or round(n * max(1, n_variants) ** 0.5)
        if c.task and not c.plain_seeds:  # so many that Holm's correction leaves a verdict possible at all
            comparisons = len(self.texts) * (n_variants + len(c.budgets) + len(c.contrasts))
            count = next((m for m in range(2 * n, 1000)
                          if stats.smallest_p(n, m) * comparisons <= c.alpha / 2), None)
            if count is None:
                raise UserError(f"seeds={c.seeds} are too few for a verdict on one of {comparisons} "
                                "comparisons, whatever their scores: take more, or fewer variants or tasks")
        more = (seed for seed in itertools.count(max(c.seeds) + 1) if seed not in c.screen_seeds)
        return [*c.seeds, *itertools.islice(more, count - n)]

    def better(self, pairs, runs, outcomes):
        """The pairs of variants with the plain GPT that are on the better side before any correction, on the
        first of their texts or over all of them.
        """
        variants, scores = variants_of(self.config), scores_in(runs, outcomes_of(runs, outcomes))
        found = []
        for pair in pairs:
            if pair.variant in variants and pair.baseline == PLAIN:
                first = Pair(pair.variant, PLAIN, pair.texts[:1])
                if any(self.seems_better(each, scores) for each in dict.fromkeys((first, pair))):
                    found.append(pair)
        return found

    def seems_better(self, pair, scores):
        """Whether a pair is on the better side; the same scores are judged once."""
        c, measure = self.config, MEASURES[self.measure]
        key = repr([scores.get(name, {}).get(text) for name in (pair.variant, pair.baseline)
                    for text in pair.texts])
        if key not in self.seen:
            self.seen[key] = seems_better(difference(scores, pair, measure, c.alpha, c.margin), c.alpha,
                                          measure.higher_is_better)
        return self.seen[key]


# ---- outcomes ----

def is_done(run, outcomes):
    """Whether a run has a score."""
    return isinstance(outcomes.get(run.name), Result)


def ended(runs, outcomes):
    """Whether all of these runs are done or have failed."""
    return all(run.name in outcomes for run in runs)


def outcomes_of(runs, outcomes):
    """{name of a run: Result} of those of these runs that are done."""
    return {run.name: outcomes[run.name] for run in runs if is_done(run, outcomes)}


def scores_of_done(runs, outcomes):
    """The scores of those of these runs that are done."""
    return [outcomes[run.name].score for run in runs if is_done(run, outcomes)]


# ---- which rates are best ----

def best_factors(at, outcomes):
    """{variant: {group: the factor with the lowest score}}; at: {(variant, group, factor): Run}."""
    scores = {}
    for (name, group, factor), run in at.items():
        if is_done(run, outcomes):
            scores.setdefault(name, {}).setdefault(group, {})[factor] = outcomes[run.name].score
    return {name: {group: min(each, key=lambda factor: (each[factor], abs(math.log2(factor))))
                   for group, each in own.items()} for name, own in scores.items()}


def beyond(best, tried):
    """The factor beyond the best of those tried, where that is at their end."""
    return {best / 2} if best == min(tried) else {best * 2} if best == max(tried) else set()


def best_candidates(scores):
    """{variant: the index of the candidate to take}; scores: {variant: [scores over seeds of each]}.

    The first is the variant as it is, which stays unless the best is better by more than a standard error of
    such a difference, from the median spread over seeds of all candidates (the one-standard-error rule,
    Breiman et al. 1984). One with a run that failed is none, unless all have.
    """
    sds = [np.std(each, ddof=1) for own in scores.values() for each in own if len(each) > 1]
    taken = {}
    for name, own in scores.items():
        n = max(map(len, own))
        means = [float(np.mean(each)) if len(each) == n > 0 else math.inf for each in own]
        error = float(np.median(sds or [0.0])) * (2 / max(1, n)) ** 0.5
        best = int(np.argmin(means))
        taken[name] = best if means[0] - means[best] > error else 0
    return taken


def of_groups(factors, groups, own_rate):
    """{group: factor} of a pair of factors: of the optimizer's own rate, and of all other learning rates."""
    own, rest = factors
    return {group: own if group == own_rate else rest for group in groups if group in PEAK_RATES}


def best_pair(runs, outcomes):
    """The pair of factors whose runs are best: the most answers right on average, to 0.01; then learned
    first; then as near to the rates as they are as can be. runs: {pair: [Run]}; one with a run that failed is
    none.
    """
    def rank(pair):
        results = [outcomes[run.name] for run in runs[pair]]
        steps = [first_learned_step(each.curve["steps"], each.curve["scores"]) if each.curve else None
                 for each in results]
        step = statistics.median(math.inf if each is None else each for each in steps)
        return (-round(statistics.mean(each.score for each in results), 2), step,
                sum(abs(math.log2(factor)) for factor in pair))
    whole = [pair for pair, own in runs.items() if all(is_done(run, outcomes) for run in own)]
    return min(whole, key=rank, default=(1.0, 1.0))


# ---- flags ----

def not_default(flags, defaults, keep=()):
    """The flags whose value is not the default, and those to keep."""
    return {key: value for key, value in flags.items() if key in keep or value != defaults.get(key, ...)}
