"""
Says which runs a study needs, from its keys and the outcomes of its runs so far.

plan() is called again whenever the runs that it named have ended. It then names the runs that follow from
scores: of the variants that are judged, at their rates, and of wider plain GPTs. A study is finished when its
plan has no run without an outcome, so a study that is started again goes on by itself.
"""

import itertools
import math
import statistics
from dataclasses import asdict, dataclass, field

import numpy as np

from nanoheads.common import UserError, pick_device
from nanoheads.config import TrainConfig
from nanoheads.dataset import NotPrepared
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

    needs_files: runs whose labels or teacher are not made yet are refused; else they are planned, and
    `not_made` says what must be made first.
    """

    def __init__(self, config, needs_files=True):
        if problems := [*config.problems(), *config.problems_of_runs()]:
            raise UserError("\n".join(problems))
        self.config, self.models, self.needs_files, self.not_made = config, Models(config), needs_files, []
        self.texts = (*self.models.texts,)
        self.measure = "right answers" if config.task else "bits/byte"
        self.device = pick_device(config.device).split(":")[0]  # GPUs are handed out by number
        self.defaults = asdict(TrainConfig())
        # each is computed once: Runs, specs, dependencies, and whether a variant seems better
        self.runs, self.specs, self.dependencies_by_files, self.is_better = {}, {}, {}, {}

    def plan(self, outcomes):
        """The Plan of the study, as far as these outcomes decide it."""
        variants, runs = variants_of(self.config), []
        if self.has_screening(variants):
            runs += self.screening_runs(variants)
            if not have_ended(runs, outcomes):
                return Plan(tuple(runs), self.models_on_first_text(variants))
            names = self.variants_to_judge(scores_in(runs, results_of(runs, outcomes), "screen"))
            variants = {name: flags for name, flags in variants.items() if name in names}
        rates = {}
        if self.config.tune_lr:
            search = self.search_on_task if self.config.task else self.search
            for text in self.texts if self.config.task else self.texts[:1]:
                runs_of_search, rates[text] = search(text, variants, outcomes)
                runs += runs_of_search
            if None in rates.values():
                return Plan(tuple(runs), self.models_on_first_text(variants))
            rates = {text: rates.get(text, rates[self.texts[0]]) for text in self.texts}
        return self.plan_of_judging(variants, rates, runs, outcomes)

    def foresee(self, outcomes):
        """The Plan that follows if each missing run gives what those give that are done on its text, in the
        mean. It has all runs that there will be, except those of rates beyond the last one tried, and of
        wider plain GPTs for what will seem better.
        """
        while not have_ended((plan := self.plan(outcomes)).runs, outcomes):
            done = {}
            for run in plan.runs:
                done.setdefault(run.text, []).extend(scores_of_results([run], outcomes))
            outcomes = {run.name: Result(statistics.mean(done[run.text] or [0.0])) for run in plan.runs
                        } | outcomes
        return plan

    def models_on_first_text(self, variants):
        """{name: Model on the first text} of the plain GPT, its budgets and some variants."""
        first = self.texts[0]
        models = [self.models.plain(first), *(self.models.at_budget(first, multiple)
                                              for multiple in self.config.budgets),
                  *(self.models.variant(first, name, flags) for name, flags in variants.items())]
        return {model.name: model for model in models}

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
            task = model.training.task
            keep = ("max_iters",) if task else ("max_iters", "dataset")
            training = {key: value for key, value in asdict(model.training).items() if key not in FIXED_KEYS}
            training = non_default_flags(training, self.defaults, keep)
            flags = non_default_flags(model.config.flags(), model.config.defaults())
            amount = dict(rows=ROWS_OF_TASK) if task else dict(tokens=self.config.test_tokens)
            self.specs[model, split] = dict(
                model=flags, train=training, score=dict(split=split, **amount), device=self.device,
                **self.dependencies_of(model))
        return self.specs[model, split]

    def dependencies_of(self, model):
        """dependencies() of a Model's runs, read once for all models that depend on the same files."""
        c = model.training
        files = [getattr(c, key) for extension in EXTENSIONS for key in extension.files]
        key = (model.text, c.own_mechanism, c.teacher, c.labels, *files, model.config.block_size)
        if key not in self.dependencies_by_files:
            try:
                command = self.config.first.get(c.teacher)
                self.dependencies_by_files[key] = dependencies(c, model.config, command)
            except NotPrepared as e:
                if self.needs_files:
                    raise NotPrepared(f"{model.name}: {e}") from None
                self.not_made.append(str(e))
                # no finished run has these
                self.dependencies_by_files[key] = dict(data={}, own={}, code=None, torch=None)
            except UserError as e:
                raise type(e)(f"{model.name}: {e}") from None
        return self.dependencies_by_files[key]

    # ---- screening ----

    def has_screening(self, variants):
        """Whether the study has a screening, and one that can leave a variant out."""
        c = self.config
        return c.screen and len(variants.keys() - self.always_judged()) > c.best + c.worst

    def screening_runs(self, variants):
        """The Runs of all variants on validation."""
        first, flags_of = self.texts[0], {PLAIN: {}, **variants}
        return [self.run("screen", self.models.variant(first, name, flags), seed, "val")
                for seed in self.config.screen_seeds for name, flags in flags_of.items()]

    def always_judged(self):
        """The variants that are judged whatever their score on validation."""
        return {*self.config.always, *itertools.chain(*self.config.contrasts)} - {PLAIN}

    def variants_to_judge(self, scores):
        """The variants to judge: the best and the worst on validation, and those named."""
        c, first = self.config, self.texts[0]
        means = {name: np.mean([*by_text[first].values()])
                 for name, by_text in scores.items() if name != PLAIN}
        others = [name for name in sorted(means, key=means.get) if name not in self.always_judged()]
        return {*self.always_judged(), *others[:c.best], *others[max(c.best, len(others) - c.worst):]}

    # ---- learning rates ----

    def search(self, text, variants, outcomes):
        """(runs, {variant: {flag: rate}}) of a search on a text's validation; None: the runs have not ended.

        Each group of rates is changed alone, with one seed, by FACTORS. Where the best factor is the last one
        tried, the next one is tried too. All that is tried for a variant is tried for the plain GPT too. Then
        runs with all seeds decide between the rates as they are, each group's best alone, and all of them
        together: one seed's best is partly luck, and rates that are good alone may be bad together.
        """
        seeds = self.config.screen_seeds
        models = {name: self.models.variant(text, name, flags)
                  for name, flags in {PLAIN: {}, **variants}.items()}
        factors_tried = {name: {group: {*FACTORS} for group in model.groups()}
                         for name, model in models.items()}
        for _ in range(ROUNDS):
            run_at = {(name, group, factor): self.run_at_rates(models[name], {group: factor}, seeds[0])
                      for name, by_group in factors_tried.items() for group, factors in by_group.items()
                      for factor in sorted(factors)}
            if not have_ended(run_at.values(), outcomes):
                return [*run_at.values()], None
            best = best_factors(run_at, outcomes)
            for name, by_group in best.items():
                for group, factor in by_group.items():
                    factors_tried[name][group] |= next_factors(factor, factors_tried[name][group])
            for group, factors in factors_tried[PLAIN].items():
                factors.update(*(by_group[group] for by_group in factors_tried.values() if group in by_group))
        candidates = {}
        for name in models:
            best_of_groups = {group: factor for group, factor in best.get(name, {}).items() if factor != 1}
            candidates[name] = [{}, *({group: factor} for group, factor in best_of_groups.items())]
            candidates[name] += [best_of_groups] if len(best_of_groups) > 1 else []
        runs = {name: [[self.run_at_rates(models[name], factors, seed) for seed in seeds]
                       for factors in candidates[name]] for name in models}
        all_runs = [*run_at.values(), *itertools.chain(*itertools.chain(*runs.values()))]
        if not have_ended(all_runs, outcomes):
            return all_runs, None
        index_of_best = best_candidates({
            name: [scores_of_results(runs_of_candidate, outcomes) for runs_of_candidate in by_candidate]
            for name, by_candidate in runs.items()})
        return all_runs, {name: model.rates(candidates[name][index_of_best[name]])
                          for name, model in models.items()}

    def search_on_task(self, text, variants, outcomes):
        """The same on validation rows of a task, with all seeds: a small grid over the optimizer's own rate,
        if it has one, and the rates of all other parameters.

        Scores that are nearly all or nothing mislead a search with one seed: its best pair may be a lucky
        one.
        """
        seeds, grids, runs = self.config.screen_seeds, {}, {}
        for name, flags in {PLAIN: {}, **variants}.items():
            model = self.models.variant(text, name, flags)
            own_rate = OPTIMIZERS[model.training.optimizer].rate
            grids[name] = {factors: model.rates(factors_by_group(factors, model.groups(), own_rate))
                           for factors in itertools.product(FACTORS, FACTORS)
                           if factors[0] == 1 or own_rate in model.groups()}
            runs[name] = {}
            for (own_factor, other_factor), rates in grids[name].items():
                words = f"{name}, matrices x {own_factor:g}, rest x {other_factor:g}"
                runs[name][own_factor, other_factor] = [
                    self.run("tune", self.models.with_rates(model, rates), seed, "val", words)
                    for seed in seeds]
        all_runs = [run for by_factors in runs.values() for seed_runs in by_factors.values()
                    for run in seed_runs]
        if not have_ended(all_runs, outcomes):
            return all_runs, None
        return all_runs, {name: grids[name][best_pair(by_factors, outcomes)]
                          for name, by_factors in runs.items()}

    def run_at_rates(self, model, factors, seed):
        """The Run of a Model at some rates times a factor, on validation."""
        changed = {group: factor for group, factor in factors.items() if factor != 1}
        words = ", ".join(f"{group} x {factor:g}" for group, factor in changed.items()) or "rates as they are"
        model = self.models.with_rates(model, model.rates(changed)) if changed else model
        return self.run("tune", model, seed, "val", f"{model.name}, {words}")

    # ---- what is judged ----

    def plan_of_judging(self, variants, rates, runs, outcomes):
        """The Plan with the judged runs: variants, budgets, wider plain GPTs where one seems better."""
        c, seeds, notes = self.config, self.plain_seeds(len(variants)), []
        models_on = {text: self.models_to_judge(text, variants, rates.get(text)) for text in self.texts}
        first = models_on[self.texts[0]]
        # in a study of tasks a longer training is one more variant
        names = [name for name, model in first.items()
                 if model.kind == "variant" or c.task and model.kind == "budget"]
        pairs = [Pair(name, PLAIN, texts) for texts in self.text_groups() for name in names]
        pairs += [Pair(*pair, texts) for texts in self.text_groups()
                  for pair in c.contrasts if PLAIN not in pair]
        # seed by seed: a study that is stopped has all variants
        judged_runs = [self.run("judge", model, seed, c.split)
                       for seed in seeds for text in self.texts for model in models_on[text].values()
                       if seed in c.seeds or model.name == PLAIN]
        runs = [*runs, *judged_runs]
        if c.match_parameters and have_ended(judged_runs, outcomes):
            for pair in self.better_pairs(pairs, judged_runs, outcomes):
                model, models_here = models_on[pair.texts[0]][pair.variant], models_on[pair.texts[0]]
                if model.same_size(models_here[PLAIN]):
                    continue
                equal = [other for other in models_here.values()
                         if other.kind == "wider" and model.same_size(other)]
                if not (width := equal[0].config.n_inner if equal else self.models.width_for(model)):
                    notes.append(f"{pair.variant} has fewer parameters than any plain GPT of this size")
                    continue
                for text in pair.texts:
                    wider = self.at_plain_rates(self.models.wider(text, width), rates.get(text))
                    models_on[text][wider.name] = wider
                    # on a task with all seeds of the plain GPT: fewer could not show anything
                    runs += [self.run("judge", wider, seed, c.split)
                             for seed in (seeds if c.task else c.seeds)]
                pairs.append(Pair(pair.variant, wider.name, pair.texts, "parameters"))
        models = {name: model for text in self.texts[::-1] for name, model in models_on[text].items()}
        models = {**first, **{name: model for name, model in models.items() if name not in first}}
        unique_runs = {(run.stage, run.variant, run.text, run.name): run for run in runs}
        return Plan(tuple(unique_runs.values()), models, tuple(pairs), self.tuned_rates(variants, rates),
                    tuple(notes))

    def models_to_judge(self, text, variants, rates):
        """{name: Model} of all that is judged on a text, at their own rates where those are known."""
        plain = self.at_plain_rates(self.models.plain(text), rates)
        models = [plain, *(self.at_plain_rates(self.models.at_budget(text, multiple), rates)
                           for multiple in self.config.budgets)]
        for name, flags in variants.items():
            model = self.models.variant(text, name, flags)
            models.append(self.models.with_rates(model, rates[name], plain) if rates else model)
        return {model.name: model for model in models}

    def at_plain_rates(self, model, rates):
        """A plain GPT of any budget or width, at the plain GPT's own rates where those are known."""
        return self.models.with_rates(model, rates[PLAIN]) if rates else model

    def tuned_rates(self, variants, rates):
        """Plan.rates from {text: {variant: {flag: rate}}}: only the rates that the tuning changed."""
        changed = {}
        for text in rates if self.config.task else [*rates][:1]:
            for name, flags in {PLAIN: {}, **variants}.items():
                untuned = self.models.variant(text, name, flags).rates()
                changed[f"{name} on {text}" if self.config.task else name] = {
                    flag: rate for flag, rate in rates[text][name].items() if rate != untuned[flag]}
        return changed

    def text_groups(self):
        """The texts of each comparison: all texts together, or each task by itself."""
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

    def better_pairs(self, pairs, runs, outcomes):
        """The pairs of a variant and the plain GPT where the variant seems better before any correction, on
        the first of their texts or over all of them.
        """
        variants, scores = variants_of(self.config), scores_in(runs, results_of(runs, outcomes))
        better_pairs = []
        for pair in pairs:
            if pair.variant in variants and pair.baseline == PLAIN:
                first = Pair(pair.variant, PLAIN, pair.texts[:1])
                if any(self.seems_better(candidate, scores) for candidate in dict.fromkeys((first, pair))):
                    better_pairs.append(pair)
        return better_pairs

    def seems_better(self, pair, scores):
        """Whether a pair's variant is on the better side; computed once for the same scores."""
        c, measure = self.config, MEASURES[self.measure]
        key = repr([scores.get(name, {}).get(text) for name in (pair.variant, pair.baseline)
                    for text in pair.texts])
        if key not in self.is_better:
            self.is_better[key] = seems_better(difference(scores, pair, measure, c.alpha, c.margin), c.alpha,
                                               measure.higher_is_better)
        return self.is_better[key]


# ---- outcomes ----

def has_result(run, outcomes):
    """Whether a run has a score."""
    return isinstance(outcomes.get(run.name), Result)


def have_ended(runs, outcomes):
    """Whether all of these runs are done or have failed."""
    return all(run.name in outcomes for run in runs)


def results_of(runs, outcomes):
    """{name of a run: Result} of those of these runs that are done."""
    return {run.name: outcomes[run.name] for run in runs if has_result(run, outcomes)}


def scores_of_results(runs, outcomes):
    """The scores of those of these runs that are done."""
    return [outcomes[run.name].score for run in runs if has_result(run, outcomes)]


# ---- which rates are best ----

def best_factors(runs, outcomes):
    """{variant: {group: the factor with the lowest score}}; runs: {(variant, group, factor): Run}."""
    scores = {}
    for (name, group, factor), run in runs.items():
        if has_result(run, outcomes):
            scores.setdefault(name, {}).setdefault(group, {})[factor] = outcomes[run.name].score
    return {name: {group: min(score_of, key=lambda factor: (score_of[factor], abs(math.log2(factor))))
                   for group, score_of in by_group.items()} for name, by_group in scores.items()}


def next_factors(best, tried):
    """{the factor beyond the best}, where the best is the smallest or the largest of those tried, else {}."""
    return {best / 2} if best == min(tried) else {best * 2} if best == max(tried) else set()


def best_candidates(scores):
    """{variant: the index of the candidate to take}; scores: {variant: [each candidate's scores over seeds]}.

    The first candidate has the rates as they are. It stays unless the best one is better by more than a
    standard error of such a difference, from the median spread over seeds of all candidates (the
    one-standard-error rule, Breiman et al. 1984). A candidate with a failed run does not count, unless all
    have one.
    """
    sds = [np.std(by_seed, ddof=1) for by_candidate in scores.values() for by_seed in by_candidate
           if len(by_seed) > 1]
    chosen = {}
    for name, by_candidate in scores.items():
        n = max(map(len, by_candidate))
        means = [float(np.mean(by_seed)) if len(by_seed) == n > 0 else math.inf for by_seed in by_candidate]
        error = float(np.median(sds or [0.0])) * (2 / max(1, n)) ** 0.5
        best = int(np.argmin(means))
        chosen[name] = best if means[0] - means[best] > error else 0
    return chosen


def factors_by_group(factors, groups, own_rate):
    """{group: factor} of a pair of factors: of the optimizer's own rate, and of all other learning rates."""
    own_factor, other_factor = factors
    return {group: own_factor if group == own_rate else other_factor
            for group in groups if group in PEAK_RATES}


def best_pair(runs, outcomes):
    """The pair of factors whose runs are best: most right answers on average, to 0.01; then the task learned
    first; then factors nearest to 1. runs: {pair: [Run]}; a pair with a failed run does not count.
    """
    def rank(pair):
        results = [outcomes[run.name] for run in runs[pair]]
        steps = [first_learned_step(result.curve["steps"], result.curve["scores"]) if result.curve else None
                 for result in results]
        step = statistics.median(math.inf if step is None else step for step in steps)
        return (-round(statistics.mean(result.score for result in results), 2), step,
                sum(abs(math.log2(factor)) for factor in pair))
    finished_pairs = [pair for pair, runs_of_pair in runs.items()
                      if all(has_result(run, outcomes) for run in runs_of_pair)]
    return min(finished_pairs, key=rank, default=(1.0, 1.0))


# ---- flags ----

def non_default_flags(flags, defaults, keep=()):
    """The flags whose value is not the default, and those to keep."""
    return {key: value for key, value in flags.items() if key in keep or value != defaults.get(key, ...)}
