"""
What a report says in words: numbers, names, each verdict as a sentence, the headline. Everything is a
function of a Study and its Comparisons, and nothing is tested here.

What is not known is shown as –; what a study did not measure reads "not measured".
"""

import math
import re
import statistics
from collections import Counter

from matplotlib.ticker import EngFormatter

from nanoheads.common import number, plural, printable
from nanoheads.tasks import LEARNED_SHARE, first_learned_step
from study.records import PLAIN
from study.scores import mean_of, scores_of
from study.verdicts import MEASURES, over, shown_at_equal

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

def known(value):
    """Whether something is a finite number."""
    return not math.isnan(number(value))


def show(value, spec=",.0f", unit=""):
    """A number in a format; what is not known is a dash."""
    return f"{value:{spec}}{unit}" if known(value) else "–"


def short(value):
    """5700000 -> 5.7M"""
    return EngFormatter(sep="")(float(f"{value:.3g}")) if known(value) else "–"


def interval(c, spec="+.4f"):
    """-0.0252 [-0.0304, -0.0201]"""
    mean, low, high = (show(end, spec) for end in (c.mean, c.low, c.high))
    return f"{mean} [{low}, {high}]" if known(c.low) else mean


def in_times(value):
    """A ratio in digits enough to tell it from 1: 2.00, 1.0026."""
    return show(value, ".4f" if known(value) and 0 < abs(value - 1) < 0.005 else ".2f")


def p_of(c):
    """A corrected p in a table."""
    return "<0.001" if number(c.p_corrected) < 0.001 else show(c.p_corrected, ".3f")


def p_in_words(p):
    """A corrected p in a sentence."""
    return "corrected p < 0.0001" if number(p) < 1e-4 else f"corrected p = {show(p, '.3g')}"


def listed(words, last="and"):
    """a, b and c"""
    words = [*words]
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def level(study):
    """Of the intervals, in words."""
    return f"{100 * (1 - study.alpha):g} %"


def ends_of(worth):
    """[(sign, value)] of a Worth: its value, then the ends of its interval where it has one; sign: < or >
    where that lies beyond the plain GPT's budgets, which end at the value. []: none was measured.
    """
    found = re.match(r"worth (.*?) x(?: \[(.*?), (.*?)\])? of", worth.words if worth else "")
    signs = {"less than ": "<", "more than ": ">"}
    parts = [re.match(r"(less than |more than |)(.*)", part).groups() for part in found.groups() if part
             ] if found else []
    exact = (worth.mean, worth.low, worth.high) if worth else ()
    return [(signs.get(sign, ""), float(text) if value is None else value)
            for (sign, text), value in zip(parts, exact)]


def worth_of(c):
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
    """What a variant is called in words."""
    each = next((each for each in study.variants if each.name == name), None)
    label = name
    if each and not trained_here(study):
        label = each.flags.get("variant") or name
    elif each and each.kind == "plain":
        label = "plain GPT"
    elif each and each.kind == "budget":
        label = name.replace("plain x ", "plain GPT, ") + " x the budget"
    elif each and each.kind == "wider":
        label = name.replace("plain, ", "plain GPT, ") + " wide" * ("MLP" in name)
    return " ".join(printable(label).split())


def baseline_of(study):
    """What sentences call the baseline: the plain GPT, or by its label the one of another program."""
    return "the plain GPT" if trained_here(study) else label_of(study, PLAIN)


def better_side(study):
    """Which differences are good."""
    return f"{'above' if MEASURES[study.measure].higher_is_better else 'below'} 0 is better"


def margin_in_words(study):
    """±0.01 bits/byte"""
    return " ".join(filter(None, [f"±{study.margin:g}", MEASURES[study.measure].unit]))


def settings_in_words(flags):
    """Flags in words."""
    return " ".join(f"{key}={value}" for key, value in flags.items()) or "–"


# ---- which comparisons ----

def against_plain(study, comparisons, only=None):
    """The Comparisons with the plain GPT as it is, the best first, or in the order of the names `only`."""
    rows = [c for c in comparisons if c.baseline == PLAIN and not c.equal]
    if only is not None:
        return sorted((c for c in rows if c.variant in only), key=lambda c: only.index(c.variant))
    sign = -1 if MEASURES[study.measure].higher_is_better else 1
    return sorted(rows, key=lambda c: (not known(c.mean), sign * number(c.mean)))


def others(comparisons):
    """All other Comparisons: with wider plain GPTs, and of two variants."""
    return [c for c in comparisons if c.baseline != PLAIN or c.equal]


def tested(comparisons):
    """The Comparisons that have a test, for which verdicts are corrected: not those of identical scores."""
    return [c for c in comparisons if c.verdict != "identical" and c.withheld != "identical"]


def progress(study):
    """{"finished", "planned", "done"}, for a program: done have ended, failed ones aside."""
    names = {run.name for run in study.runs}
    return dict(finished=study.finished, planned=len(names), done=len(names & study.results.keys()))


# ---- verdicts in words ----

def verdict_so_far(study, c):
    """The verdict by the runs that are done; without a difference, why there is none."""
    if known(c.mean):
        return c.verdict
    scores = scores_of(study)
    failed = {run.variant for run in study.runs if run.stage == "judge" and run.name in study.failures}
    missing = {name for name in (c.variant, c.baseline) if not scores.get(name)}
    return "failed" if missing & failed else "no runs yet"


def verdict_of(study, c):
    """The verdict as it is shown."""
    return INTERIM * (not study.finished and known(c.mean)) + verdict_so_far(study, c)


def not_shown_at(study, comparisons, c):
    """[What is equal where a variant that is better is not shown to be]; [] for all others."""
    if verdict_so_far(study, c) != "better" or c.baseline != PLAIN or c.equal:
        return []
    return [what for what, shown in shown_at_equal(study, comparisons, c).items() if shown is False]


def limited_verdict(study, comparisons, c):
    """verdict_of(), and of a variant that is better where it is not shown to be."""
    limits = listed(not_shown_at(study, comparisons, c), "or")
    return verdict_of(study, c) + (BUT + limits if limits else "")


def against_in_words(study, c):
    """Whom a comparison is of, against whom, and where."""
    where = f" on {c.texts[0]}" if len(c.texts) < len(study.texts) else ""
    equal = f", at equal {c.equal}" if c.equal else ""
    return f"{label_of(study, c.variant)} against {label_of(study, c.baseline)}{where}{equal}"


def sentence_of(study, c):
    """A verdict as a sentence, without the names."""
    if not known(c.mean):
        return verdict_of(study, c)
    measure = MEASURES[study.measure]
    unit = f" {measure.unit}".rstrip()
    seen = (f"{show(c.mean, '+.4f')}{unit} ({level(study)} interval {show(c.low, '+.4f')} to "
            f"{show(c.high, '+.4f')}")
    if c.withheld:
        words = (f"undecided: not called {c.withheld}, since {plural(c.failed, 'run')} failed; {seen}, "
                 f"{p_in_words(c.p_corrected)})")
    elif c.verdict == "identical":
        words = "identical: nothing acted, the scores are the same on every shared seed"
    elif c.verdict == "same":
        words = f"the same within {study.margin:g}{unit}: {seen}, {p_in_words(c.p_same)} of more)"
    elif c.verdict != "undecided":
        size = "" if is_of_tasks(study) else f" by {abs(c.mean):.4f}{unit}"
        ends = sorted((c.low, c.high)) if is_of_tasks(study) else sorted((abs(c.low), abs(c.high)))
        words = (f"{c.verdict}{size} ({level(study)} interval {ends[0]:.4f} to {ends[1]:.4f}, "
                 f"{p_in_words(c.p_corrected)})" if size and c.low * c.high > 0 else
                 f"{c.verdict}: {seen}, {p_in_words(c.p_corrected)})")
    elif not known(c.low):
        words = (f"undecided: {show(c.mean, '+.4f')}{unit}; {c.n} and {plural(c.n_baseline, 'seed')} show no "
                 "spread")
    else:
        words = f"undecided: {seen}, {p_in_words(c.p_corrected)})"
        if c.seeds:
            words += f"; about {c.seeds} seeds, now {c.n}, would probably decide"
    if re.search(r"[+-]\d", words):
        words += f"; {better_side(study)}"
    if c.verdict == "undecided" and known(c.low) and c.low * c.high > 0 and c.p_corrected > study.alpha:
        words += ("; the interval, which is not corrected, leaves out 0, and p, which is corrected, is above "
                  f"{study.alpha:g}")
    return " ".join(printable(INTERIM * (not study.finished) + words).split())


# ---- tasks ----

def learned(study, name, task):
    """(how many judged runs learned a task, of how many, the median step from which on, or None)."""
    runs = [study.results[run.name] for run in study.runs if run.stage == "judge" and run.variant == name
            and run.text == task and run.name in study.results]
    steps = [first_learned_step(result.curve["steps"], result.curve["scores"], LEARNED_SHARE)
                 for result in runs
             if result.curve]
    steps = sorted(math.inf if step is None else step for step in steps)
    middle = statistics.median(steps) if steps else math.inf
    return (sum(result.score >= LEARNED_SHARE for result in runs), len(runs),
            None if math.isinf(middle) else middle)


def learned_in_words(study, name, task):
    """5 of 5 from step 150 on"""
    count, n, step = learned(study, name, task)
    return f"{count} of {n}" + ("" if step is None else f" from step {step:,.0f} on")


def guess_of(study, task):
    """What guessing gives on a task, the mean over its levels; None: not known."""
    levels = study.guesses.get(task)
    return statistics.mean(levels.values()) if levels else None


def task_sentence(study, c):
    """sentence_of() with how many runs learn a task."""
    task, scores = c.texts[0], scores_of(study)
    own, other = (show(mean_of(scores, name, c.texts), ".3f") for name in (c.variant, c.baseline))
    return (f"{sentence_of(study, c)}; {own} right against {other}; runs that learn it: "
            f"{learned_in_words(study, c.variant, task)}, of {label_of(study, c.baseline)} "
            f"{learned_in_words(study, c.baseline, task)}")


def full_sentence(study, c):
    """What is said of a Comparison, whatever its measure."""
    return task_sentence(study, c) if is_of_tasks(study) and known(c.mean) else sentence_of(study, c)


# ---- the headline ----

def question_of(study):
    """What a study asks, the title of its page."""
    if study.question:
        return study.question
    names = dict.fromkeys(pair.variant for pair in study.pairs if pair.baseline == PLAIN and not pair.equal)
    names = [label_of(study, name) for name in names]
    if not names:
        return study.name
    which = listed(names, "or") if len(names) < 4 else f"any of {len(names)} variants"
    return f"Is {which} better than {baseline_of(study)}?"


def headline(study, comparisons, beyond=()):
    """The study in one sentence; before it one that says how it was cut, if it was."""
    done = progress(study)
    unfinished = f"UNFINISHED, {done['done']:,} of {plural(done['planned'], 'run')}:" * (not study.finished)
    rows = against_plain(study, comparisons)
    judged = "" if beyond and not rows else in_one_sentence(study, comparisons, rows)
    parts = [unfinished, cut_in_short(study), judged, target_in_a_sentence(study, beyond)]
    return " ".join(filter(None, parts))


def in_one_sentence(study, comparisons, rows):
    """The verdicts of a study in a sentence, and what of them does not hold at equal cost."""
    if not rows:
        return f"No variant was compared with {baseline_of(study)}."
    counts = Counter(verdict_so_far(study, c) for c in rows)
    if is_of_tasks(study):
        found = ", ".join(f"{counts[word]} {word}" for word in (*MEANING, "failed", "no runs yet")
                          if counts[word])
        return (f"{plural(len(rows), 'comparison')} with the plain GPT on "
                f"{plural(len(study.texts), 'task')}: {found}.")
    best = [c for c in rows if verdict_so_far(study, c) == "better"]
    lost, unmeasured = limits_of(study, comparisons, best)
    whats = listed(dict.fromkeys(what for own in lost.values() for what in own), "or")
    if len(rows) == 1:
        c = rows[0]
        parts = [sentence_of(study, c).rstrip(".")]
        parts += [f"not shown to be better at equal {whats}"] * bool(lost)
        parts += [f"it {words}" for words in of_other_tokens(study, rows).values()]
        against = "" if trained_here(study) else f" against {baseline_of(study)}"
        words = "; ".join([*parts, *unmeasured]).replace("; not shown to be better at equal ", BUT)
        return f"{label_of(study, c.variant)}{against}: {words}."
    rest = "".join(f"; {counts[word]} {word}" for word in (*MEANING, "failed", "no runs yet")
                   if counts[word] and word != "better")
    rest = rest.replace(" same", f" the same within {margin_in_words(study)}")
    rest = rest.replace(" identical", " identical to it, since nothing acted")
    n = len({run.variant for run in study.runs if run.stage == "screen"} - {PLAIN})
    screened = f"{plural(n, 'variant')} {'was' if n == 1 else 'were'} screened. " * (n > 0)
    said = INTERIM.capitalize() * (not study.finished) + screened
    were = "was" if len(best) < 2 else "were"
    said += (f"{len(best) or 'Not one'} of {len(rows)} variants {were} shown to be better than "
             f"{baseline_of(study)}{rest}.")
    parts = []
    if lost:
        one, *more = lost
        who = f"{len(lost)} of the {len(best)} are" if more else f"{label_of(study, one)} is"
        parts.append(f"{who} better{BUT}{whats}")
    parts += unmeasured
    parts += [f"{label_of(study, name)} {words}" for name, words in of_other_tokens(study, best).items()]
    more = "; ".join(parts)
    return f"{said} {more if lost else more[0].upper() + more[1:]}." if more else said


def limits_of(study, comparisons, best):
    """What else is to be said of the variants that are better than the plain GPT as it is.

    best: their Comparisons. Returns {variant: [what is equal where it is not shown to be better]}, without
    those that are shown to be better everywhere, and clauses on what was not measured.
    """
    shown = {c.variant: shown_at_equal(study, comparisons, c) for c in best}
    lost = {name: whats for name, own in shown.items()
            if (whats := [what for what, is_shown in own.items() if is_shown is False])}
    count = Counter(what for own in shown.values() for what, is_shown in own.items() if is_shown is None)
    of_all = [f"equal {what}" for what, n in count.items() if n == len(best)]
    clauses = [f"{listed(of_all)} {were_or_was(of_all)} {NOT_MEASURED}"] if of_all else []
    clauses += [f"equal {what} {were_or_was([what])} {NOT_MEASURED} for {n} of the {len(best)}"
                for what, n in count.items() if n < len(best)]
    return lost, clauses


def were_or_was(words):
    """The verb of a list."""
    return "were" if len(words) > 1 or words[0].endswith("s") else "was"


def ratio(study, amount, name, baseline=PLAIN):
    """How many times another variant's tokens, bytes or cost a variant takes; NaN: not known."""
    def of(each):
        return study.variant(each).tokens if amount == "tokens" else study.variant(each).flags.get(amount)
    return over(number(of(name)), number(of(baseline)))


def of_other_tokens(study, comparisons):
    """{variant: what it trains on, in words} of those that are trained on more or less than the baseline."""
    words = {}
    for c in comparisons:
        amounts = ("tokens",) if trained_here(study) else ("tokens", "bytes")
        other = [f"{in_times(value)} times {baseline_of(study)}'s {amount}" for amount in amounts
                 if abs((value := ratio(study, amount, c.variant)) - 1) > 0.001]
        words.update({c.variant: f"trains on {listed(other)}"} if other else {})
    return words


# ---- how much of a run a study had ----

def cut_of(study):
    """How much of a run a study had, as a dict, where that was not all of it; None: it was, or is not known.

    Runs are cut that have fewer steps than their scale's, and scores that are of a part of the split.
    """
    if study.measure != "bits/byte" or not study.whole:
        return None
    plain = study.variant(PLAIN)
    scored = {run.text: study.results[run.name].bytes for run in study.runs
              if run.stage == "judge" and run.name in study.results}
    whole = [study.whole.get("bytes", {}).get(text) for text in scored]
    is_known = bool(scored) and None not in (*whole, *scored.values())
    cut = dict(steps=plain.steps, of_steps=study.whole.get("steps"), tokens=plain.tokens,
               of_tokens=study.whole.get("tokens"), split=study.config.get("split"),
               bytes=sum(scored.values()) if is_known else None, of_bytes=sum(whole) if is_known else None)
    return cut if fewer(cut, "steps") or fewer(cut, "bytes") else None


def fewer(cut, key):
    """Whether there were fewer of something than a whole run has."""
    return number(cut[key]) < number(cut[f"of_{key}"])


def share_scored(cut):
    """Which part of the split was scored."""
    return f"{100 * cut['bytes'] / cut['of_bytes']:.2g} % of the {cut['split'] or 'scored'} split"


def cut_in_short(study):
    """How a study was cut, as a sentence before its verdicts; "": it was not."""
    cut, parts = cut_of(study), []
    if cut and fewer(cut, "steps"):
        scale = study.config.get("scale") or "whole"
        parts.append(f"short runs, {show(cut['steps'])} of the {scale} scale's {show(cut['of_steps'])} steps "
                     f"({short(cut['tokens'])} of {short(cut['of_tokens'])} tokens)")
    if cut and fewer(cut, "bytes"):
        parts.append(f"scored on {share_scored(cut)}")
    words = ", ".join(parts)
    return words and f"{words[0].upper()}{words[1:]}."


def cut_in_words(study):
    """The same with all figures; "": the study was not cut."""
    cut, parts = cut_of(study), []
    short_runs = bool(cut and fewer(cut, "steps"))
    if short_runs:
        scale = study.config.get("scale") or "whole"
        parts.append(f"trained for {plural(cut['steps'], 'step')}, where the {scale} scale has "
                     f"{show(cut['of_steps'])} ({show(cut['tokens'])} of {show(cut['of_tokens'])} tokens)")
    if cut and fewer(cut, "bytes"):
        parts.append(f"scored on {share_scored(cut)} ({show(cut['bytes'])} of {show(cut['of_bytes'])} bytes)")
    later = " After all steps the variants may rank otherwise" * short_runs
    mend = ": a study without max_iters trains them all" * ("max_iters" in study.config.get("settings", {}))
    later += (mend + ".") * short_runs
    return f"Each run of the plain GPT was {listed(parts)}.{later}" if parts else ""


# ---- a target ----

def target_in_a_sentence(study, beyond):
    """Which variants' means are shown to lie beyond the target of a study; "": it has none."""
    if not beyond:
        return ""
    side = side_of_target(study)
    shown = [label_of(study, each.variant) for each in beyond if each.beyond]
    return (f"Shown to be {side} the target of {study.target:g}: "
            f"{f'{listed(shown)}, {len(shown)} of {len(beyond)}' if shown else f'none of {len(beyond)}'}.")


def side_of_target(study):
    """On which side of a target a score is good."""
    return "above" if MEASURES[study.measure].higher_is_better else "below"


def verdict_on_target(study, each):
    """below or above, not shown, or no test."""
    if each.beyond:
        return side_of_target(study)
    return "not shown" if known(each.p) else "no test"
