"""
The records that one step of a study passes to the next, and the results file that holds them. Nothing here
changes once it is made.

    Variant, Run -> Result or Failure -> Study -> scores.py -> Comparison

A results file is JSON, compressed: a Study and its Comparisons. All figures follow from the Study, so that
`compare.py recheck` can compute them once more.
"""

import gzip
import hashlib
import json
import math
import zlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from nanoheads.common import UserError, json_safe, write_atomic

PLAIN = "plain"  # the name of the variant that the others are compared with
VERSION = 2      # of results files; those of the first kind are read by commit 86da9e9


# ---- what is trained ----

@dataclass(frozen=True)
class Variant:
    """What is compared: its flags on top of the plain GPT's, and what a run of it costs; None: not known.

    kind: plain, variant, budget (the plain GPT trained for longer or shorter) or wider (a plain GPT with as
    many parameters as a variant). steps, tokens: that it is trained for. flops: of the whole training, as
    executed; needed: of a token, by the algorithm. time: of a training step over the plain GPT's, (median,
    low, high). memory: MiB that a run adds.
    """
    name: str
    kind: str
    flags: dict = field(default_factory=dict)
    params: int | None = None
    tokens: float | None = None
    flops: float | None = None
    time: tuple | None = None
    steps: int | None = None
    needed: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Run:
    """One training that a study needs.

    stage: screen, tune or judge. variant: its name, and in the stage tune the rates that are tried behind it:
    "xsa, embed_lr x 2" or "xsa, rates as they are". text: a dataset or a task. spec: all that its numbers
    depend on: flags, seed, checksums of the data and of the sources. The runs of another program have a line
    of its file for a spec, and names for seeds.
    """
    stage: str
    variant: str
    text: str
    seed: int | str
    spec: dict

    @cached_property
    def name(self):
        """The hash of its spec, which is what its folder is called."""
        return hash_of(self.spec)


def hash_of(spec):
    """16 digits of the sha256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Result:
    """What a finished run gave. Of another program the score alone is known.

    score: bits per byte, or the share of right answers, the mean over levels. nats, bytes: of the scored
    text. levels: {level: [nats, answers right, answers asked]} of a task. curve: {"steps", "scores"} on
    validation. seconds: of training. leaks: what was tried to find the model looking ahead, in words.
    """
    score: float
    nats: float | None = None
    bytes: int | None = None
    levels: dict | None = None
    curve: dict | None = None
    seconds: float | None = None
    leaks: str | None = None


@dataclass(frozen=True)
class Failure:
    """Why a run has no score, in a line."""
    why: str


# ---- what is compared ----

@dataclass(frozen=True)
class Pair:
    """Two variants to compare, by the mean of their differences on these texts.

    equal: what else is made equal: "parameters", or nothing.
    """
    variant: str
    baseline: str
    texts: tuple
    equal: str = ""


@dataclass(frozen=True)
class DifferenceAtCost:
    """A variant's difference to a plain GPT trained for `ratio` times its own cost; None: not known."""
    ratio: float
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None


@dataclass(frozen=True)
class Worth:
    """The multiple of its budget at which the plain GPT is as good as a variant, with its interval.

    None: beyond the plain GPT's budgets, or not measured. words: the same as a phrase.
    """
    mean: float | None
    low: float | None
    high: float | None
    words: str


@dataclass(frozen=True)
class Comparison:
    """The difference of two variants, and the verdict on it: better, worse, same, identical or undecided.

    n, n_baseline: seeds. mean, low, high: variant minus baseline, with the uncorrected interval. p: of no
    difference; p_corrected: the same by Holm over the study; p_same: of a difference of the margin or more,
    corrected likewise. seeds: how many of the variant would decide four times in five; None: it is decided,
    no spread is known, or more than 1000. withheld: the verdict that is not given, since `failed` runs
    failed of the side that it favours, or of either.
    """
    variant: str
    baseline: str
    texts: tuple
    equal: str
    n: int
    n_baseline: int
    mean: float
    low: float
    high: float
    se: float
    df: float
    p: float
    p_corrected: float
    p_same: float
    verdict: str
    seeds: int | None = None
    failed: int = 0
    withheld: str = ""
    worth: Worth | None = None
    equal_flops: DifferenceAtCost | None = None
    equal_time: DifferenceAtCost | None = None


@dataclass(frozen=True)
class TargetTest:
    """Whether a variant's mean lies beyond a target: below it, or above it where higher is better.

    low, high: the two-sided interval of the mean. p: one-sided; p_corrected: by Holm over the variants.
    failed: so many of its runs failed, and it is not called beyond then.
    """
    variant: str
    n: int
    mean: float
    low: float
    high: float
    p: float
    p_corrected: float
    beyond: bool
    failed: int = 0


@dataclass(frozen=True)
class Study:
    """The settings of a study, its runs and their results: all that a report says follows from it.

    measure: a key of verdicts.MEASURES. results, failures: {name of a run: Result or Failure}. rates:
    {variant: {flag: rate}} where they were tuned; untuned: the same of what each variant adds, where they
    were not ({}: it adds no weights). target: what each mean is compared with; None: nothing. made: date,
    commit, versions, processor. config: the StudyConfig.

    What a reader must know beside the verdicts: whole: the steps, the tokens and the {text: bytes} of a run
    that is not cut short. guesses: {task: {level: the share that guessing gets right}}. other_code: {variant:
    how many of its runs other code made, as --accept_code allowed}. left_out: {variant: seeds of finished
    runs that the study does not count}. notes: on the data, as sentences.
    """
    name: str
    measure: str
    variants: tuple
    pairs: tuple
    texts: tuple
    runs: tuple = ()
    results: dict = field(default_factory=dict)
    failures: dict = field(default_factory=dict)
    alpha: float = 0.05
    margin: float = 0.01
    target: float | None = None
    question: str = ""
    command: str = ""
    made: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    rates: dict = field(default_factory=dict)
    untuned: dict = field(default_factory=dict)
    whole: dict = field(default_factory=dict)
    guesses: dict = field(default_factory=dict)
    other_code: dict = field(default_factory=dict)
    left_out: dict = field(default_factory=dict)
    notes: tuple = ()

    def variant(self, name):
        """The Variant of this name."""
        return next(variant for variant in self.variants if variant.name == name)

    @property
    def finished(self):
        """Whether every planned run has ended."""
        return all(run.name in self.results or run.name in self.failures for run in self.runs)


# ---- the results file ----

def write(path, study, comparisons):
    """Write a results file, whole or not at all. UserError: the disk refuses."""
    document = dict(version=VERSION, study=asdict(study), comparisons=[asdict(c) for c in comparisons])
    data = gzip.compress(json.dumps(json_safe(document)).encode(), mtime=0)
    write_atomic(path, lambda file: file.write(data))


def read(path):
    """(Study, its comparisons as dicts) of a results file. UserError: it cannot be read, or is damaged."""
    try:
        data = Path(path).read_bytes()
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or 'it is damaged'}") from None
    except (ValueError, EOFError, zlib.error):
        raise UserError(f"{path} is no results file, or it is damaged") from None
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise UserError(f"{path} is no results file of this version; files from before it are read at commit "
                        "86da9e9")
    try:
        return study_of(document["study"]), document["comparisons"]
    except (LookupError, TypeError, AttributeError, ValueError) as e:
        raise UserError(f"{path} is damaged: {type(e).__name__}, {e}") from None


def study_of(fields):
    """The Study of a dict from JSON. LookupError, TypeError, AttributeError or ValueError: it is not one."""
    fields = {**fields, "texts": tuple(fields["texts"]), "notes": tuple(fields.get("notes", ()))}
    fields["variants"] = tuple(Variant(**{**row, "time": row["time"] and tuple(row["time"])})
                               for row in fields["variants"])
    fields["pairs"] = tuple(Pair(**{**row, "texts": tuple(row["texts"])}) for row in fields["pairs"])
    fields["runs"] = tuple(Run(**row) for row in fields["runs"])
    fields["results"] = {name: Result(**row) for name, row in fields["results"].items()}
    fields["failures"] = {name: Failure(**row) for name, row in fields["failures"].items()}
    return Study(**fields)


def are_close(a, b):
    """Whether two values from JSON are the same, numbers up to rounding."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(are_close(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(are_close, a, b))
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    return a == b
