"""
What a report says in words: numbers, names, each verdict as a sentence, the headline. Everything is a
function of a Study and its Comparisons, and nothing is tested here.

What is not known is shown as –; what a study did not measure reads "not measured".
"""

import itertools
import math
import re
import statistics
from collections import Counter

import numpy as np

from nanoheads.common import number, plural, printable
from nanoheads.tasks import LEARNED_SHARE, first_learned_step
from study.records import PLAIN
from study.scores import mean_of, scores_of
from study.verdicts import MEASURES, better_at_equal, quotient

MEANING = {
    "better": "ahead of the other side, by however little; by chance alone that would hardly be seen",
    "worse": "behind the other side, by however little; by chance alone that would hardly be seen",
    "same": "whichever of the two is ahead, it is by less than the margin: too little to matter",
    "identical": "nothing acted: the scores are those of the other side on every shared seed, and no finding",
    "undecided": "better, worse or the same: these seeds cannot tell, a new study with more would",
}
NOT_MEASURED = "not measured"
INTERIM = "interim: "         # before a verdict of an unfinished study, so that nobody quotes it as one
BUT = ", but not at equal "   # between a verdict and what it does not hold for
AMOUNTS = ("tokens", "bytes", "cost")  # that a variant may take more of than another


# ---- numbers ----

def is_known(value):
    """Whether something is a finite number."""
    return not math.isnan(number(value))


def show(value, spec=",.0f", unit=""):
    """A number in a format; what is not known is a dash."""
    return f"{value:{spec}}{unit}" if is_known(value) else "–"


def si_number(value):
    """5700000 -> 5.7M"""
    from matplotlib.ticker import EngFormatter  # takes 0.1 s to import
    return EngFormatter(sep="")(float(f"{value:.3g}")) if is_known(value) else "–"


def interval(c, spec="+.4f"):
    """-0.0252 [-0.0304, -0.0201]"""
    mean, low, high = (show(end, spec) for end in (c.mean, c.low, c.high))
    return f"{mean} [{low}, {high}]" if is_known(c.low) else mean


def ratio_in_digits(value):
    """A ratio in digits enough to tell it from 1: 2.00, 1.0026."""
    return show(value, ".4f" if is_known(value) and 0 < abs(value - 1) < 0.005 else ".2f")


def p_cell(c):
    """A corrected p in a table."""
    return "<0.001" if number(c.p_corrected) < 0.001 else show(c.p_corrected, ".3f")


def p_in_words(p):
    """A corrected p in a sentence."""
    return "corrected p < 0.0001" if number(p) < 1e-4 else f"corrected p = {show(p, '.3g')}"


def join_words(items, conjunction="and"):
    """a, b and c"""
    items = [*items]
    return f" {conjunction} ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def confidence_level(study):
    """The confidence level of the intervals: 95 %"""
    return f"{100 * (1 - study.alpha):g} %"


def ends_of(worth):
    """[(sign, value)] of a Worth: its value, then the ends of its interval where it has one; []: none was
    measured. sign: < or > where the true value lies beyond the plain GPT's budgets, which end at this value.
    """
    match = re.match(r"worth (.*?) x(?: \[(.*?), (.*?)\])? of", worth.words if worth else "")
    sign_of = {"less than ": "<", "more than ": ">"}
    parts = [re.match(r"(less than |more than |)(.*)", part).groups() for part in match.groups() if part
             ] if match else []
    values = (worth.mean, worth.low, worth.high) if worth else ()
    return [(sign_of.get(sign, ""), float(text) if value is None else value)
            for (sign, text), value in zip(parts, values)]


def worth_in_words(c):
    """0.93 [0.88, 0.99]: a multiple of the plain GPT's budget; –: its score does not fall with its budget."""
    ends = [f"{sign}{value:g}" if sign else f"{value:.2f}" for sign, value in ends_of(c.worth)]
    if not ends:
        return "–" if c.worth else NOT_MEASURED
    return f"{ends[0]} [{', '.join(ends[1:])}]" if ends[1:] else ends[0]


# ---- names ----

def trained_here(study):
    """Whether this program made the runs, and knows their settings."""
    return study.measure == "bits/byte" or is_of_tasks(study)


def is_of_tasks(study):
    """Whether the texts are tasks, each of which has verdicts of its own."""
    return not MEASURES[study.measure].pools


def label_of(study, name):
    """A variant's name for a reader."""
    variant = next((variant for variant in study.variants if variant.name == name), None)
    label = name
    if variant and not trained_here(study):
        label = variant.flags.get("variant") or name
    elif variant and variant.kind == "plain":
        label = "plain GPT"
    elif variant and variant.kind == "budget":
        label = name.replace("plain x ", "plain GPT, ") + " x the budget"
    elif variant and variant.kind == "wider":
        label = name.replace("plain, ", "plain GPT, ") + " wide" * ("MLP" in name)
    return " ".join(printable(label).split())


def baseline_label(study):
    """What sentences call the baseline: the plain GPT, or by its label the one of another program."""
    return "the plain GPT" if trained_here(study) else label_of(study, PLAIN)


def side_in_words(study):
    """Which differences are good."""
    return f"{'above' if MEASURES[study.measure].higher_is_better else 'below'} 0 is better"


def margin_in_words(study):
    """±0.01 bits/byte"""
    return " ".join(filter(None, [f"±{study.margin:g}", MEASURES[study.measure].unit]))


def settings_in_words(flags):
    """Flags in words."""
    return " ".join(f"{key}={value}" for key, value in flags.items()) or "–"


def differing_keys(study):
    """{variant: {key: value}} of every key of model and training in which its judged runs differ from the
    plain GPT's; {text: value} of one that depends on the text. A variant without runs has its flags.
    """
    specs = {}
    for run in study.runs:
        if run.stage == "judge" and "model" in run.spec:
            flags = {**run.spec["model"], **run.spec.get("train", {})}
            specs.setdefault(run.variant, {}).setdefault(run.text, flags)
    differing = {}
    for variant in study.variants:
        by_key, specs_by_text = {}, specs.get(variant.name, {})
        for text, flags in specs_by_text.items():
            flags_of_plain = specs.get(PLAIN, {}).get(text, flags)
            for key in {**flags_of_plain, **flags}:
                if key != "seed" and flags.get(key, ...) != flags_of_plain.get(key, ...):
                    value = flags.get(key, variant.flags.get(key, "as by default"))
                    by_key.setdefault(key, {})[text] = value
        differing[variant.name] = {key: value for key, value in variant.flags.items()
                                   if key == "seed" or not specs_by_text}
        for key, by_text in by_key.items():
            value, *others = by_text.values()
            is_same = len(by_text) == len(specs_by_text) and all(other == value for other in others)
            differing[variant.name][key] = value if is_same else by_text
    return differing


# ---- which comparisons ----

def against_plain(study, comparisons, only=None):
    """The Comparisons with the plain GPT as it is, the best first, or in the order of the names `only`."""
    rows = [c for c in comparisons if c.baseline == PLAIN and not c.equal]
    if only is not None:
        return sorted((c for c in rows if c.variant in only), key=lambda c: only.index(c.variant))
    sign = -1 if MEASURES[study.measure].higher_is_better else 1
    return sorted(rows, key=lambda c: (not is_known(c.mean), sign * number(c.mean)))


def other_comparisons(comparisons):
    """All other Comparisons: with wider plain GPTs, and of two variants."""
    return [c for c in comparisons if c.baseline != PLAIN or c.equal]


def tested_comparisons(comparisons):
    """The Comparisons that have a test, for which verdicts are corrected: not those of identical scores."""
    return [c for c in comparisons if c.verdict != "identical" and c.withheld != "identical"]


def progress(study):
    """{"finished", "planned", "done"}, for a program; done: how many of the planned runs have a score."""
    names = {run.name for run in study.runs}
    return dict(finished=study.finished, planned=len(names), done=len(names & study.results.keys()))


# ---- verdicts in words ----

def verdict_so_far(study, c):
    """The verdict by the runs that are done, or why there is none yet."""
    if is_known(c.mean):
        return c.verdict
    scores = scores_of(study)
    failed = {run.variant for run in study.runs if run.stage == "judge" and run.name in study.failures}
    without_scores = {name for name in (c.variant, c.baseline) if not scores.get(name)}
    return "failed" if without_scores & failed else "no runs yet"


def verdict_of(study, c):
    """The verdict as it is shown."""
    return INTERIM * (not study.finished and is_known(c.mean)) + verdict_so_far(study, c)


def limits_at_equal(study, comparisons, c):
    """[What a better variant is not shown to be better at an equal amount of]; [] for other verdicts."""
    if verdict_so_far(study, c) != "better" or c.baseline != PLAIN or c.equal:
        return []
    return [resource for resource, is_better in better_at_equal(study, comparisons, c).items()
            if is_better is False]


def verdict_with_limits(study, comparisons, c):
    """verdict_of(), and behind "better" the limits_at_equal()."""
    limits = join_words(limits_at_equal(study, comparisons, c), "or")
    return verdict_of(study, c) + (BUT + limits if limits else "")


def against_in_words(study, c):
    """The names of both sides of a comparison, and where it holds."""
    where = f" on {c.texts[0]}" if len(c.texts) < len(study.texts) else ""
    equal = f", at equal {c.equal}" if c.equal else ""
    return f"{label_of(study, c.variant)} against {label_of(study, c.baseline)}{where}{equal}"


def sentence_of(study, c):
    """A verdict as a sentence, without the names."""
    if not is_known(c.mean):
        return verdict_of(study, c)
    measure = MEASURES[study.measure]
    unit = f" {measure.unit}".rstrip()
    figures = (f"{show(c.mean, '+.4f')}{unit} ({confidence_level(study)} interval {show(c.low, '+.4f')} to "
               f"{show(c.high, '+.4f')}")
    if c.withheld:
        words = (f"undecided: not called {c.withheld}, since {plural(c.failed, 'run')} failed; {figures}, "
                 f"{p_in_words(c.p_corrected)})")
    elif c.verdict == "identical":
        words = "identical: nothing acted, the scores are the same on every shared seed"
    elif c.verdict == "same":
        words = f"the same within {study.margin:g}{unit}: {figures}, {p_in_words(c.p_same)} of a larger one)"
    elif c.verdict != "undecided":
        size = "" if is_of_tasks(study) else f" by {abs(c.mean):.4f}{unit}"
        ends = sorted((c.low, c.high)) if is_of_tasks(study) else sorted((abs(c.low), abs(c.high)))
        words = (f"{c.verdict}{size} ({confidence_level(study)} interval {ends[0]:.4f} to {ends[1]:.4f}, "
                 f"{p_in_words(c.p_corrected)})" if size and c.low * c.high > 0 else
                 f"{c.verdict}: {figures}, {p_in_words(c.p_corrected)})")
    elif not is_known(c.low):
        words = (f"undecided: {show(c.mean, '+.4f')}{unit}; {c.n} and {plural(c.n_baseline, 'seed')} show no "
                 "spread")
    else:
        words = f"undecided: {figures}, {p_in_words(c.p_corrected)})"
        if c.seeds and not longer_runs_in_words(study):
            words += f"; about {c.seeds} seeds, now {c.n}, would probably decide"
    if re.search(r"[+-]\d", words):
        words += f"; {side_in_words(study)}"
    if c.verdict == "undecided" and is_known(c.low) and c.low * c.high > 0 and c.p_corrected > study.alpha:
        words += ("; the interval, which is not corrected, leaves out 0, and p, which is corrected, is above "
                  f"{study.alpha:g}")
    return " ".join(printable(INTERIM * (not study.finished) + words).split())


# ---- tasks ----

def learning_counts(study, name, task):
    """(how many judged runs learned a task, how many there are, the median step of learning it, or None)."""
    runs = [study.results[run.name] for run in study.runs if run.stage == "judge" and run.variant == name
            and run.text == task and run.name in study.results]
    steps = [first_learned_step(result.curve["steps"], result.curve["scores"], LEARNED_SHARE)
             for result in runs if result.curve]
    steps = sorted(math.inf if step is None else step for step in steps)
    median = statistics.median(steps) if steps else math.inf
    return (sum(result.score >= LEARNED_SHARE for result in runs), len(runs),
            None if math.isinf(median) else median)


def learned_in_words(study, name, task):
    """5 of 5 from step 150 on"""
    count, n, step = learning_counts(study, name, task)
    return f"{count} of {n}" + ("" if step is None else f" from step {step:,.0f} on")


def guess_of(study, task):
    """The score of guessing on a task, the mean over its levels; None: not known."""
    levels = study.guesses.get(task)
    return statistics.mean(levels.values()) if levels else None


def task_sentence(study, c):
    """sentence_of() with how many runs learn a task."""
    task, scores = c.texts[0], scores_of(study)
    share, share_baseline = (show(mean_of(scores, name, c.texts), ".3f") for name in (c.variant, c.baseline))
    return (f"{sentence_of(study, c)}; {share} right against {share_baseline}; runs that learn it: "
            f"{learned_in_words(study, c.variant, task)}, of {label_of(study, c.baseline)} "
            f"{learned_in_words(study, c.baseline, task)}")


def full_sentence(study, c):
    """The sentence on a Comparison, whatever its measure."""
    return task_sentence(study, c) if is_of_tasks(study) and is_known(c.mean) else sentence_of(study, c)


# ---- the headline ----

def question_of(study):
    """What a study asks, the title of its page."""
    if study.question:
        return study.question
    names = dict.fromkeys(pair.variant for pair in study.pairs if pair.baseline == PLAIN and not pair.equal)
    names = [label_of(study, name) for name in names]
    if not names:
        return study.name
    variants = join_words(names, "or") if len(names) < 4 else f"any of {len(names)} variants"
    return f"Is {variants} better than {baseline_label(study)}?"


def headline(study, comparisons, target_tests=()):
    """The study in one sentence; before it how it was cut, if it was, and where validation was scored."""
    done, planned = progress(study)["done"], progress(study)["planned"]
    unfinished = f"UNFINISHED, {done:,} of {plural(planned, 'run')}:" * (not study.finished)
    rows = against_plain(study, comparisons)
    verdicts_clause = "" if target_tests and not rows else verdicts_sentence(study, comparisons, rows)
    parts = [unfinished, cut_in_short(study), validation_in_words(study), verdicts_clause,
             target_sentence(study, target_tests)]
    return " ".join(filter(None, parts))


def verdicts_sentence(study, comparisons, rows):
    """The verdicts of a study in a sentence, and which of them do not hold at equal cost."""
    if not rows:
        return f"No variant was compared with {baseline_label(study)}."
    counts = Counter(verdict_so_far(study, c) for c in rows)
    if is_of_tasks(study):
        counted = ", ".join(f"{counts[word]} {word}" for word in (*MEANING, "failed", "no runs yet")
                            if counts[word])
        return (f"{plural(len(rows), 'comparison')} with the plain GPT on "
                f"{plural(len(study.texts), 'task')}: {counted}.")
    better_rows = [c for c in rows if verdict_so_far(study, c) == "better"]
    limits, gaps = limits_and_gaps(study, comparisons, better_rows)
    resources = join_words(dict.fromkeys(itertools.chain(*limits.values())), "or")
    if len(rows) == 1:
        c = rows[0]
        parts = [sentence_of(study, c).rstrip(".")]
        parts += [f"not shown to be better at equal {resources}"] * bool(limits)
        parts += [f"it {words}" for words in differing_amounts(study, rows).values()]
        against = "" if trained_here(study) else f" against {baseline_label(study)}"
        words = "; ".join([*parts, *gaps]).replace("; not shown to be better at equal ", BUT)
        return f"{label_of(study, c.variant)}{against}: {words}."
    others_clause = "".join(f"; {counts[word]} {word}" for word in (*MEANING, "failed", "no runs yet")
                            if counts[word] and word != "better")
    others_clause = others_clause.replace(" same", f" the same within {margin_in_words(study)}")
    others_clause = others_clause.replace(
        " identical", " identical to it on the seeds that both have, since nothing acted")
    n = len({run.variant for run in study.runs if run.stage == "screen"} - {PLAIN})
    screening = f"{plural(n, 'variant')} {'was' if n == 1 else 'were'} screened. " * (n > 0)
    sentence = INTERIM.capitalize() * (not study.finished) + screening
    verb = "was" if len(better_rows) < 2 else "were"
    sentence += (f"{len(better_rows) or 'Not one'} of {len(rows)} variants {verb} shown to be better than "
                 f"{baseline_label(study)}{others_clause}.")
    parts = []
    if limits:
        name, *more = limits
        subject = f"{len(limits)} of the {len(better_rows)} are" if more else f"{label_of(study, name)} is"
        parts.append(f"{subject} better{BUT}{resources}")
    parts += gaps
    parts += [f"{label_of(study, name)} {words}"
              for name, words in differing_amounts(study, better_rows).items()]
    more = "; ".join(parts)
    return f"{sentence} {more if limits else more[0].upper() + more[1:]}." if more else sentence


def limits_and_gaps(study, comparisons, better_rows):
    """(limits, gaps) of the variants that are better than the plain GPT as it is, by their Comparisons.

    limits: {variant: [what it is not shown to be better at an equal amount of]}, without variants that have
    no limit. gaps: clauses on what was not measured.
    """
    better_at = {c.variant: better_at_equal(study, comparisons, c) for c in better_rows}
    limits = {name: resources for name, flags in better_at.items()
              if (resources := [resource for resource, is_better in flags.items() if is_better is False])}
    unmeasured = Counter(resource for flags in better_at.values()
                         for resource, is_better in flags.items() if is_better is None)
    of_all = [f"equal {resource}" for resource, n in unmeasured.items() if n == len(better_rows)]
    gaps = [f"{join_words(of_all)} {were_or_was(of_all)} {NOT_MEASURED}"] if of_all else []
    gaps += [f"equal {resource} {were_or_was([resource])} {NOT_MEASURED} for {n} of the {len(better_rows)}"
             for resource, n in unmeasured.items() if n < len(better_rows)]
    return limits, gaps


def were_or_was(words):
    """The verb behind a list."""
    return "were" if len(words) > 1 or words[0].endswith("s") else "was"


def ratio(study, amount, name, baseline=PLAIN):
    """A variant's tokens, bytes or cost over another variant's; NaN: not known."""
    def amount_of(variant):
        return variant.tokens if amount == "tokens" else variant.flags.get(amount)
    return quotient(number(amount_of(study.variant(name))), number(amount_of(study.variant(baseline))))


def differing_amounts(study, comparisons):
    """{variant: a clause on its tokens or bytes} of those that train on more or less than the baseline."""
    words = {}
    for c in comparisons:
        amounts = ("tokens",) if trained_here(study) else ("tokens", "bytes")
        clauses = [f"{ratio_in_digits(value)} times {baseline_label(study)}'s {amount}" for amount in amounts
                   if abs((value := ratio(study, amount, c.variant)) - 1) > 0.001]
        words.update({c.variant: f"trains on {join_words(clauses)}"} if clauses else {})
    return words


# ---- the text that is scored ----

def texts_of_validation(study):
    """The texts of which the scored split is the validation split, as a digest of the data shows."""
    split, texts = study.config.get("split") or "test", {}
    for run in study.runs:
        digests = run.spec.get("data")
        if run.stage == "judge" and isinstance(digests, dict) and digests.get("val"):
            texts[run.text] = digests["val"] == digests.get(split)
    return [text for text, is_val in texts.items() if is_val]


def validation_in_words(study):
    """A short sentence before the verdicts where the validation split is scored; "": it is not."""
    texts, stages = texts_of_validation(study), {run.stage for run in study.runs}
    if not texts:
        return ""
    where = f" of {join_words(texts)}" if len(texts) < len(study.texts) else ""
    copied = "" if study.config.get("split") == "val" else ", of which test is a copy"
    choices = {"screen": "what is judged", "tune": "rates"}
    chosen = join_words([*(words for stage, words in choices.items() if stage in stages), "best.pt"])
    return f"Scored on the validation split{where}{copied}, which also chose {chosen}."


# ---- how much of a run a study had ----

def cut_of(study):
    """How far a study was cut, as a dict; None: it was not, or nothing is known of it.

    It is cut where runs have fewer steps than their scale's, or where a part of the split is scored.
    """
    if study.measure != "bits/byte" or not study.whole:
        return None
    plain = study.variant(PLAIN)
    bytes_of = {run.text: study.results[run.name].bytes for run in study.runs
                if run.stage == "judge" and run.name in study.results}
    whole = [study.whole.get("bytes", {}).get(text) for text in bytes_of]
    has_bytes = bool(bytes_of) and None not in (*whole, *bytes_of.values())
    cut = dict(steps=plain.steps, of_steps=study.whole.get("steps"), tokens=plain.tokens,
               of_tokens=study.whole.get("tokens"), split=study.config.get("split"),
               bytes=sum(bytes_of.values()) if has_bytes else None,
               of_bytes=sum(whole) if has_bytes else None)
    return cut if is_cut(cut, "steps") or is_cut(cut, "bytes") else None


def is_cut(cut, key):
    """Whether a cut study has fewer of these than a whole one."""
    return number(cut[key]) < number(cut[f"of_{key}"])


def share_of_split(cut):
    """The share of the split that was scored."""
    return f"{100 * cut['bytes'] / cut['of_bytes']:.2g} % of the {cut['split'] or 'scored'} split"


def cut_in_short(study):
    """A short sentence before the verdicts on how a study was cut; "": it was not."""
    cut, parts = cut_of(study), []
    if cut and is_cut(cut, "steps"):
        scale = study.config.get("scale") or "whole"
        parts.append(f"short runs, {show(cut['steps'])} of the {scale} scale's {show(cut['of_steps'])} steps "
                     f"({si_number(cut['tokens'])} of {si_number(cut['of_tokens'])} tokens)")
    if cut and is_cut(cut, "bytes"):
        parts.append(f"scored on {share_of_split(cut)}")
    words = ", ".join(parts)
    return words and f"{words[0].upper()}{words[1:]}."


def cut_in_words(study):
    """A sentence with all figures on how a study was cut; "": it was not."""
    cut, parts = cut_of(study), []
    short_runs = bool(cut and is_cut(cut, "steps"))
    if short_runs:
        scale = study.config.get("scale") or "whole"
        parts.append(f"trained for {plural(cut['steps'], 'step')}, where the {scale} scale has "
                     f"{show(cut['of_steps'])} ({show(cut['tokens'])} of {show(cut['of_tokens'])} tokens)")
    if cut and is_cut(cut, "bytes"):
        parts.append(f"scored on {share_of_split(cut)} ({show(cut['bytes'])} of {show(cut['of_bytes'])} "
                     "bytes)")
    consequence = " After all steps the variants may rank otherwise" * short_runs
    remedy = ": a study without max_iters trains them all" * ("max_iters" in study.config.get("settings", {}))
    consequence += (remedy + ".") * short_runs
    return f"Each run of the plain GPT was {join_words(parts)}.{consequence}" if parts else ""


def longer_runs_in_words(study):
    """Why more steps come before more seeds: the plain GPT's score on validation still falls.

    "": it does not, or the runs are whole ones of a scale, whose question is asked at its own length.
    """
    cut, fall = cut_of(study), fall_at_the_end(study)
    is_short = bool(cut and is_cut(cut, "steps"))
    if study.measure != "bits/byte" or not fall > study.margin or not (is_short or study.config.get("base")):
        return ""
    remedy = "raise max_iters"
    if is_short:
        has_key = "max_iters" in study.config.get("settings", {})
        remedy = f"a whole run has {plural(cut['of_steps'], 'step')}" + ": leave max_iters out" * has_key
    return (f"Longer runs come first ({remedy}): over the last tenth of its "
            f"{show(study.variant(PLAIN).steps)} steps the plain GPT's score on validation still fell by "
            f"{fall:.4f} bits/byte, more than the margin. More seeds would decide only what holds of runs "
            "this short.")


def fall_at_the_end(study):
    """By how much the plain GPT's score on validation fell over the last tenth of its steps, the mean of its
    judged runs; NaN: it is not known.
    """
    falls = []
    for run in study.runs:
        result = study.results.get(run.name)
        if run.stage == "judge" and run.variant == PLAIN and result and result.curve:
            steps, scores = result.curve["steps"], [number(score) for score in result.curve["scores"]]
            falls.append(float(np.interp(0.9 * steps[-1], steps, scores)) - scores[-1])
    return statistics.mean(falls) if falls else math.nan


# ---- a target ----

def target_sentence(study, target_tests):
    """Which variants' means are shown to lie beyond the target of a study; "": it has none."""
    if not target_tests:
        return ""
    side = side_of_target(study)
    names = [label_of(study, test.variant) for test in target_tests if test.beyond]
    n = len(target_tests)
    count = f"{join_words(names)}, {len(names)} of {n}" if names else f"none of {n}"
    return f"Shown to be {side} the target of {study.target:g}: {count}."


def side_of_target(study):
    """On which side of a target a score is good."""
    return "above" if MEASURES[study.measure].higher_is_better else "below"


def verdict_on_target(study, test):
    """The cell of a variant in the table of a target: below or above, not shown, or no test."""
    if test.beyond:
        return side_of_target(study)
    return "not shown" if is_known(test.p) else "no test"
