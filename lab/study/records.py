"""
What a results file holds, as dataclasses: the record of a study, with its variants, runs and comparisons.

as_json() and as_record() are the one way to a file and back. A field's annotation says what a file must have
there, so that every reader of a record can trust what it finds: a number is at most LARGEST, and None only
where the annotation allows it. A field with a default may be missing in a file. One with `sometimes` is
written only where it has a value, and one with `in_memory` never.
"""

import functools
import json
import types
import typing
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Optional

from nanoheads.common import UserError, json_safe, plural
from lab.study import permutation, stats
from lab.study.measures import MEASURES

LARGEST = 1e30  # of a score, a cost, a figure


def sometimes(default=None):
    """A field that is written where it is not `default`."""
    return field(default=default, metadata=dict(sometimes=True))


def in_memory():
    """A field that no file has."""
    return field(default=None, metadata=dict(in_memory=True))


class NotThatRecord(UserError):
    """What is read is not what a record's annotations ask for; the text says where, and what is there."""


class Record:
    """A dataclass that a results file holds."""

    def fault(self, where):
        """What is wrong with fields that have the right types by themselves, in words; None: nothing."""


# ---- a run ----

@dataclass(kw_only=True)
class ModelOfRun(Record):
    seed: int


@dataclass(kw_only=True)
class TrainingOfRun(Record):
    device: Optional[str] = None
    own_mechanism: Optional[str] = None


@dataclass(kw_only=True)
class ScoreOfRun(Record):
    split: str


@dataclass(kw_only=True)
class Spec(Record):
    """What every trial.json has; it is kept as the dict that it is, whose hash names a run."""
    model: ModelOfRun
    train: TrainingOfRun
    score: ScoreOfRun
    data: Optional[dict[str, Optional[str]]] = None


def of_one_length(where, *lists):
    """What is wrong with lists that should be of one length, in words; None: nothing."""
    if len({len(each) for each in lists}) > 1:
        return f"{where} has lists of several lengths"


@dataclass(kw_only=True)
class Curve(Record):
    """Bits per byte of one run against tokens and seconds: on validation, and on training text."""
    tokens: list[float]
    seconds: list[float]
    bpb: list[Optional[float]]
    train: list[Optional[float]]

    def fault(self, where):
        return of_one_length(where, self.tokens, self.seconds, self.bpb, self.train)


@dataclass(kw_only=True)
class Run(Record):
    """A trained and scored model, see trial.py.

    block_nats: nats of each block of the text; seconds: of training, by the clock.
    """
    nats: float
    bytes: float
    bpb: float
    tokens: Optional[int] = None
    params: float
    flops_per_token: float
    trial: Optional[str] = sometimes()
    checkpoint: Optional[str] = None
    looked_for_leaks: Optional[str] = None
    steps: Optional[float] = None
    best_step: Optional[float] = None
    seconds: Optional[float] = None
    tokens_per_s: Optional[float] = None
    memory_mib: Optional[float] = None
    processor: Optional[str] = None
    threads: Optional[int] = None
    torch: Optional[str] = None
    block_nats: Optional[list[float]] = sometimes()
    spec: Annotated[dict, Spec]
    curve: Optional[Curve] = None

    def fault(self, where):
        if not self.bytes > 0:
            return f"{where}.bytes is {self.bytes}, and must be above 0"


# ---- a variant ----

@dataclass(kw_only=True)
class TimeRatio(Record):
    """Time of a training step over the plain GPT's, see costs.step_time_ratios()."""
    mean: float
    low: float
    high: float
    ratios: Optional[list[float]] = sometimes()
    clock: Optional[str] = sometimes()
    load: Optional[float] = sometimes()
    cores: Optional[int] = sometimes()
    threads: Optional[int] = sometimes()
    processor: Optional[str] = sometimes()
    compiled: Optional[bool] = sometimes()


@dataclass(kw_only=True)
class Arm(Record):
    """A variant, or a plain GPT: what it is, what it costs, and the score and the run of each seed.

    kind: plain, variant, budget or baseline. Of another program's variant only label, seeds and scores are
    known, and in memory the means of what its file says of tokens, bytes and cost; the rest is None.
    """
    kind: str
    label: str
    flags: dict
    multiple: float
    steps: float
    params: float
    tokens: float
    flops_per_token: float
    executed_flops_per_token: Optional[float]
    time_ratio: Optional[TimeRatio] = None
    seconds: Optional[float]
    tokens_per_s: Optional[float]
    memory_mib: Optional[float]
    best_step: Optional[float]
    seeds: list[int]
    bpb: list[Optional[float]]
    runs: list[str]
    commands: Optional[list[str]] = None
    heads: Optional[dict] = None
    sample: Optional[str] = None
    bytes: Optional[float] = in_memory()  # that it was trained on, and its cost in any unit
    cost: Optional[float] = in_memory()

    def fault(self, where):
        if not len(self.seeds) == len(self.bpb) == len(self.runs):
            return (f"{where} has {plural(len(self.seeds), 'seed')}, {plural(len(self.bpb), 'score')} and "
                    f"{plural(len(self.runs), 'run')}")
        if not (self.multiple > 0 and self.tokens > 0 and self.steps > 0):
            return f"{where} must have steps, tokens and a multiple above 0"


# ---- figures: what effects.py computes ----

@dataclass(kw_only=True)
class Interval(Record):
    low: float
    high: float


@dataclass(kw_only=True)
class Worth(Record):
    """What a variant is worth in the plain GPT's compute, see effects.worth()."""
    mean: Optional[float]
    low: Optional[float]
    high: Optional[float]
    smallest: Optional[float]
    largest: Optional[float]
    beyond: Optional[str]
    problem: Optional[str] = None
    words: str = ""


@dataclass(kw_only=True)
class AtCost(Record):
    """What is left of a difference at equal cost, `ratio` times the plain GPT's; None: not measured."""
    ratio: float
    mean: Optional[float]
    low: Optional[float]
    high: Optional[float]
    p: Optional[float] = None


@dataclass(kw_only=True)
class Comparison(Record):
    """A difference of two variants and the verdict on it, as stats.Comparison has it, and what follows.

    equal: what is equal beside the hyperparameters; differences: each seed of the variant less the mean of
    the baseline; text: the interval over the text; words: the verdict as a sentence; look: the one of two
    that judged it.
    """
    variant: str
    baseline: str
    equal: list[str]
    n: int
    n_baseline: int
    mean: Optional[float]
    low: Optional[float]
    high: Optional[float]
    se: Optional[float]
    df: Optional[float]
    p: Optional[float]
    p_corrected: Optional[float]
    p_same: Optional[float] = None
    verdict: str
    more_seeds: Optional[float]
    words: str
    differences: list[float]
    text: Optional[Interval] = None
    worth: Optional[Worth] = sometimes()
    equal_flops: Optional[AtCost] = sometimes()
    equal_time: Optional[AtCost] = sometimes()
    look: Optional[int] = sometimes()


@dataclass(kw_only=True)
class AgainstTarget(Record):
    """Whether a variant's mean lies below a target, or above it where higher is better, see effects.py.

    low, high: the interval of the mean, two-sided; p: one-sided; verdict: below, above, not shown, no test.
    """
    variant: str
    n: int
    mean: Optional[float]
    low: Optional[float]
    high: Optional[float]
    se: Optional[float]
    df: Optional[float]
    p: Optional[float]
    p_corrected: Optional[float]
    verdict: str
    words: str


@dataclass(kw_only=True)
class Screened(Record):
    """A variant of the first stage: its mean on validation, and its difference to the plain GPT."""
    variant: str
    bpb: float
    mean: Optional[float]
    low: Optional[float]
    high: Optional[float]
    chosen: bool


@dataclass(kw_only=True)
class Figures(Record):
    """What follows from the scores of a study, or of several texts together, see effects.figures()."""
    procedure: str
    comparisons: list[Comparison]
    targets: Optional[list[AgainstTarget]] = sometimes()
    screened: Optional[list[Screened]] = None
    findable: Optional[float] = None
    margin_as_compute: Optional[list[Optional[float]]] = None
    levels: Optional[list[float]] = sometimes()
    taken: Optional[dict[str, int]] = sometimes()


# ---- a study ----

Scores = dict[str, dict[str, float]]  # {name: {seed: bits/byte}}


@dataclass(kw_only=True)
class ScoredText(Record):
    """Which text was scored, and how much of it."""
    dataset: str
    split: str
    sha256: Optional[str] = None
    tokens: Optional[float] = None
    bytes: Optional[float] = None
    of_bytes: Optional[float] = None
    name: str
    context: Optional[str] = None
    note: Optional[str] = None


@dataclass(kw_only=True)
class Machine(Record):
    processor: str
    cores: Optional[float] = None
    system: Optional[str] = None
    jobs: Optional[float] = None
    threads: Optional[str] = None


@dataclass(kw_only=True)
class Versions(Record):
    torch: str


@dataclass(kw_only=True)
class PlainFlags(Record):
    base: str
    recipe: str
    n_layer: int
    n_embd: int
    block_size: int


@dataclass(kw_only=True)
class Whole(Record):
    """The steps and tokens of a run that is not cut short."""
    steps: float
    tokens: float


@dataclass(kw_only=True)
class Failure(Record):
    arm: str
    seed: Optional[typing.Union[int, str]] = None
    stage: str
    why: str
    log: str


@dataclass(kw_only=True)
class Screen(Record):
    """The first stage: what was trained, and which were chosen by which rule."""
    seeds: list[int]
    split: Optional[str] = None
    scores: Scores
    chosen: list[str]
    rule: str


@dataclass(kw_only=True)
class Candidate(Record):
    """Rates of a variant, as factors, and bits per byte on validation of each seed."""
    rates: dict[str, float]
    bpb: dict[str, float]


@dataclass(kw_only=True)
class Untuned(Record):
    """Rates of what variants add, none of them tuned; runs: that tuning takes, at least and at most."""
    rates: Scores
    runs: list[int]


@dataclass(kw_only=True)
class LeftOut(Record):
    """Finished runs of a variant that judge nothing; text: of several the one that they are of."""
    variant: str
    seeds: list[int]
    text: Optional[str] = sometimes()


@dataclass(kw_only=True)
class PlannedLooks(Record):
    spending: str
    seeds: list[int]


@dataclass(kw_only=True)
class Look(Record):
    """Another report that judged the same variants, see looks.py; seeds: those of each variant."""
    date: str
    folder: str
    finished: bool
    planned: int
    done: int
    seeds: dict[str, list[int]]
    two_looks: Optional[PlannedLooks] = sometimes()
    text: Optional[str] = sometimes()


@dataclass(kw_only=True)
class Reused(Record):
    """Runs that were taken instead of trained; of: the variants that have runs of other code."""
    source: str = field(metadata=dict(key="from"))
    runs: int
    other_code: int
    of: list[str]


@dataclass(kw_only=True)
class Rescored(Record):
    """Runs that were scored once more from their checkpoints; without: how many have none."""
    runs: list[str]
    without: int


@dataclass(kw_only=True)
class TwoLooks(Record):
    """The plan of a study in two looks, see effects.first_look()."""
    spending: str
    look: int
    seeds: list[int]
    first_seeds: list[int]
    plain_seeds: list[int]
    pairs: list[list]


def fault_of_levels(study):
    """What is wrong with the level and the margin of a study's verdicts, in words; None: nothing."""
    if not 0 < study.alpha < 1 or not study.margin > 0:
        return f"alpha={study.alpha} must be between 0 and 1 and margin={study.margin} positive"


@dataclass(kw_only=True)
class StudyResults(Figures):
    """All that a study on one text found; its figures follow from the rest.

    runs: {name of a trial's folder: Run}; arms: the runs of each variant; pairs: (variant, baseline, what is
    equal beside the hyperparameters); lives: dynamic heads, see dynamic.py. In memory alone: `texts`, of
    several texts together the study on each; `one_of_several`, of these, whose verdicts are those of all.
    """
    name: str
    scale: Optional[str] = None
    size: Optional[str] = None
    question: str
    command: str
    out: Optional[str] = None
    date: Optional[str] = None
    commit: Optional[str] = None
    versions: Annotated[dict, Versions]
    config: dict
    settings: Optional[dict] = None
    plain: Annotated[dict, PlainFlags]
    of_scale: Optional[Whole] = None
    machine: Machine
    data: ScoredText
    alpha: float
    margin: float
    seeds: list[int]
    pairs: list[list]
    two_looks: Optional[TwoLooks] = sometimes()
    screen: Optional[Screen] = None
    tuned: Optional[dict[str, Scores]] = None
    candidates: Optional[dict[str, list[Candidate]]] = None
    tuned_on: Optional[str] = None
    untuned: Optional[Untuned] = None
    screened_out: Optional[list[str]] = None
    arms: dict[str, Arm]
    runs: dict[str, Run]
    lives: Optional[dict] = None
    reused: Optional[list[Reused]] = None
    rescored: Optional[Rescored] = None
    failures: list[Failure]
    planned: int
    done: int
    finished: Optional[bool] = None
    left_out: Optional[list[LeftOut]] = None
    looks: Optional[list[Look]] = None
    measure: str = sometimes("bits/byte")
    target: Optional[float] = sometimes()
    texts: Optional[dict] = in_memory()
    one_of_several: Optional[bool] = in_memory()

    @property
    def kind(self):
        """The Measure of its scores."""
        return MEASURES[self.measure]

    def fault(self, where):
        said = f"{where}: " * bool(where)
        if self.measure not in MEASURES:
            return f"{said}measure={shown(self.measure)} must be one of {', '.join(MEASURES)}"
        if "plain" not in self.arms:
            return f"{said}arms has no plain, the plain GPT"
        if words := (fault_of_levels(self) or self.fault_of_pairs() or self.fault_of_looks()):
            return said + words
        for i, c in enumerate(self.comparisons):
            if unknown := [name for name in (c.variant, c.baseline) if name not in self.arms]:
                return f"{said}comparisons[{i}]: {unknown[0]!r} is not one of its arms"

    def fault_of_pairs(self):
        for pair in [*self.pairs, *(self.two_looks.pairs if self.two_looks else ())]:
            if not (len(pair) == 3 and all(isinstance(each, str) for each in pair[:2])
                    and isinstance(pair[2], list) and all(isinstance(each, str) for each in pair[2])):
                return f"pairs: {shown(pair)} is not a variant, a baseline and what is equal"
            if unknown := [name for name in pair[:2] if name not in self.arms]:
                return f"pairs: {unknown[0]!r} is not one of its arms"

    def fault_of_looks(self):
        plan = self.two_looks
        if not plan:
            return None
        if not (plan.spending in stats.SPENDING and plan.look in (1, 2)
                and 0 < len(plan.first_seeds) < len(plan.seeds)):
            return (f"two_looks is no plan: {shown(plan.spending)}, look {plan.look}, with "
                    f"{len(plan.first_seeds)} of {len(plan.seeds)} seeds at the first look")
        if self.comparisons and len(self.levels or ()) != 2:
            return "levels must be those of two_looks, two numbers"
        for i, c in enumerate(self.comparisons):
            if c.look not in (1, 2):
                return f"comparisons[{i}].look is {shown(c.look)}, and must be 1 or 2"


@dataclass(kw_only=True)
class TextsResults(Record):
    """A study on each of several texts, and the figures over all of them."""
    name: str
    command: str
    texts: dict[str, StudyResults]
    together: Figures
    finished: Optional[bool] = None
    planned: Optional[int] = None
    done: Optional[int] = None
    config: Optional[dict] = None

    def fault(self, where):
        return None if self.texts else "texts holds no study"


# ---- a study of tasks: its file is read as the dict that it is, and these say what it must have ----

@dataclass(kw_only=True)
class AnswersOverSeeds(Record):
    """The runs of a variant: the share of answers that are right, and the step from which on it is learned.
    """
    seeds: list[int]
    acc: list[float]
    learned_from: list[Optional[float]]
    runs: list[str]

    def fault(self, where):
        if words := of_one_length(where, self.seeds, self.acc, self.learned_from, self.runs):
            return words
        if wrong := [acc for acc in self.acc if not 0 <= acc <= 1]:
            return f"{where}.acc has {wrong[0]}, which is no share"


@dataclass(kw_only=True)
class AnswersAtRates(AnswersOverSeeds):
    """One pair of a grid of rates, as factors."""
    muon: float
    adamw: float


@dataclass(kw_only=True)
class WithoutSeed(Record):
    """The spec of a variant's runs, whatever the seed."""
    model: dict
    train: dict
    score: dict


@dataclass(kw_only=True)
class ArmOnTask(Record):
    """A variant on one task: its runs at the shared rates, at its own best ones, and in a grid."""
    flags: dict
    params: float
    steps: float
    kind: str
    judge: AnswersOverSeeds
    best: AnswersOverSeeds
    what: WithoutSeed
    best_flags: Optional[dict]
    what_best: Optional[WithoutSeed]
    grid: list[AnswersAtRates]

    def fault(self, where):
        if self.best.runs and not self.what_best:
            return f"{where} has runs at its best rates, and no what_best that says which these are"


@dataclass(kw_only=True)
class CurveOnTask(Record):
    step: list[float]
    acc: list[float]

    def fault(self, where):
        return of_one_length(where, self.step, self.acc)


@dataclass(kw_only=True)
class SpecOnTask(Spec):
    data: Optional[dict] = None


@dataclass(kw_only=True)
class RunOnTask(Record):
    """levels: [nats, right answers, answers] of each level, whose name is that of a number."""
    acc: float
    nats: float
    learned_from: Optional[float]
    levels: dict[str, list[float]]
    curve: CurveOnTask
    spec: Annotated[dict, SpecOnTask]

    def fault(self, where):
        for level, counts in self.levels.items():
            if len(counts) != 3 or not 0 <= counts[1] <= counts[2] > 0:
                return f"{where}.levels.{level} is {shown(counts)}, not nats, right answers and answers"


@dataclass(kw_only=True)
class OneTask(Record):
    """pairs: (variant, what it is compared with); guesses: {level: {way of guessing: the share right}}."""
    arms: dict[str, ArmOnTask]
    pairs: list[list[str]]
    unit: str
    guesses: dict[str, dict[str, float]]
    runs: dict[str, RunOnTask]
    failures: list[Failure]
    reused: list[Reused] = field(default_factory=list)

    def fault(self, where):
        if "plain" not in self.arms:
            return f"{where}.arms has no plain, the plain GPT"
        for pair in self.pairs:
            if len(pair) != 2 or not self.arms.keys() >= {*pair}:
                return f"{where}.pairs: {shown(pair)} is not two of its arms"
        if not self.guesses or not all(self.guesses.values()):
            return f"{where}.guesses has a level without a guess, or none"
        for name, arm in self.arms.items():
            for each in (arm.judge, arm.best, *arm.grid):
                if unknown := [run for run in each.runs if run not in self.runs]:
                    return f"{where}: {name} has a score of run {unknown[0]}, which is not in its runs"
        for name, run in self.runs.items():
            if run.levels.keys() != self.guesses.keys():
                return f"{where}: run {name} has answers of other levels than guesses"


@dataclass(kw_only=True)
class VerdictOnTask(Record):
    """A comparison, see permutation.py, and what the two sides learn, see task_study.verdicts()."""
    task: str
    variant: str
    baseline: str
    stage: str
    n: int
    n_baseline: int
    mean: float
    low: float
    high: float
    p: float
    p_corrected: float
    p_same: float
    verdict: str
    acc: float
    acc_plain: float
    learned: int
    learned_plain: int
    step: Optional[float]
    step_plain: Optional[float]

    def fault(self, where):
        if self.stage not in ("judge", "best"):
            return f"{where}.stage is {shown(self.stage)}, not judge or best"
        if self.verdict not in permutation.VERDICTS:
            return f"{where}.verdict is {shown(self.verdict)}, not one of {', '.join(permutation.VERDICTS)}"


@dataclass(kw_only=True)
class TasksResults(Record):
    """What a study of tasks found, see task_study.py."""
    name: str
    question: str
    command: str
    commit: Optional[str]
    config: dict
    alpha: float
    margin: float
    seeds: list[int]
    plain_seeds: list[int]
    planned: int
    done: int
    finished: bool
    tasks: dict[str, OneTask]
    verdicts: list[VerdictOnTask]

    def fault(self, where):
        if not self.tasks:
            return "tasks holds none"
        if words := fault_of_levels(self):
            return words
        for i, row in enumerate(self.verdicts):
            arms = self.tasks[row.task].arms if row.task in self.tasks else {}
            if not arms.keys() >= {row.variant, row.baseline}:
                return f"verdicts[{i}] is on {row.variant} and {row.baseline}, which {row.task} does not have"


def studies_in(results):
    """{text: StudyResults} of what a results file holds; of one study, itself under ""."""
    return results.texts if isinstance(results, TextsResults) else {"": results}


# ---- to JSON ----

@functools.cache
def keys_of(cls):
    """[(name, type, key in a file, Field)] of the fields of a record that a file may have, its own first."""
    hints = typing.get_type_hints(cls, include_extras=True)
    every = sorted(fields(cls), key=lambda each: each.name not in cls.__annotations__)
    return [(each.name, hints[each.name], each.metadata.get("key") or each.name, each)
            for each in every if not each.metadata.get("in_memory")]


def as_json(value):
    """A record, or what holds records, as what JSON has: NaN and infinity are None."""
    if isinstance(value, Record):
        return {key: as_json(own) for name, _, key, each in keys_of(type(value))
                if (own := getattr(value, name)) != each.default or not each.metadata.get("sometimes")}
    if isinstance(value, dict):
        return {str(key): as_json(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(own) for own in value]
    return json_safe(value)


def as_read(record):
    """A record as it is when it is read from a file: without tuples, NaN, infinity and numpy's numbers."""
    return as_record(type(record), json.loads(json.dumps(as_json(record))))


# ---- from JSON ----

def as_record(cls, value, where=""):
    """The value of a JSON file as a record, or as another type that an annotation names.

    Keys that no field has are left out. NotThatRecord: it is none.
    """
    if typing.get_origin(cls) is Annotated:
        kind, record = typing.get_args(cls)
        as_record(record, value, where)
        return value
    if typing.get_origin(cls) in (typing.Union, types.UnionType):
        return one_of(typing.get_args(cls), value, where)
    base = typing.get_origin(cls) or cls
    if base is dict or issubclass(base, Record):
        if not isinstance(value, dict):
            raise NotThatRecord(f"{where.lstrip('.')} is {shown(value)}, not a dict")
        if base is dict:
            item = typing.get_args(cls)[1:]
            return {key: as_record(*item, own, f"{where}.{key}") for key, own in value.items()} if (
                item) else value
        return record_from(cls, value, where)
    if base is list:
        if not isinstance(value, list):
            raise NotThatRecord(f"{where.lstrip('.')} is {shown(value)}, not a list")
        item = typing.get_args(cls)
        return [as_record(*item, own, f"{where}[{i}]") for i, own in enumerate(value)] if item else value
    return plain_from(cls, value, where)


def record_from(cls, value, where):
    keys = keys_of(cls)
    for _, _, key, each in keys:
        if key not in value and each.default is MISSING and each.default_factory is MISSING:
            raise NotThatRecord(f"{where}.{key} is missing".lstrip("."))
    record = cls(**{name: as_record(kind, value[key], f"{where}.{key}")
                    for name, kind, key, _ in keys if key in value})
    if words := record.fault(where.lstrip(".")):
        raise NotThatRecord(words)
    return record


def one_of(kinds, value, where):
    """The value as the first of these types that it has; None where that is one of them."""
    if value is None and type(None) in kinds:
        return None
    *first, last = (kind for kind in kinds if kind is not type(None))
    for kind in first:
        try:
            return as_record(kind, value, where)
        except NotThatRecord:
            pass
    return as_record(last, value, where)


def plain_from(kind, value, where):
    """A number, text, True or False; an int is a float."""
    kinds = (int, float) if kind is float else (kind,)
    fits = isinstance(value, kinds) and (not isinstance(value, bool) or kind is bool)
    beyond = fits and isinstance(value, (int, float)) and not is_finite(value)
    if beyond or not fits:
        name = "number" if kind is float else kind.__name__
        raise NotThatRecord(f"{where.lstrip('.')} is {shown(value)}, not a {name}"
                            + f" up to {LARGEST:g}" * beyond)
    return value


def is_record(cls, value):
    """Whether a JSON value is a record of this class."""
    try:
        as_record(cls, value)
    except NotThatRecord:
        return False
    return True


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


