"""
What a report says in words: the headline, the notices above the verdicts, each verdict as a sentence, what to
run next. Everything is a function of a Study and its Comparisons, and nothing is computed here.

What is not known is shown as –; what a study did not measure reads "not measured".
"""

import itertools
import math
import re
import shlex
import statistics
from collections import Counter

from matplotlib.ticker import EngFormatter

from nanoheads.common import number, plural, printable
from nanoheads.log import LEARNED, learned_from
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
NO_BUDGETS = ("This study has no plain GPT of other budgets, by which a difference would be compared with "
              'compute, FLOPs and time: --budgets="[0.7, 1.4, 2.0]" adds them.')
MOST_NAMED = 20   # failed runs
MOST_SEEDS = 300  # of a new study; where it takes more, the two are too close for runs to tell them apart
OUT = "out/trials"


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
    steps = [learned_from(result.curve["steps"], result.curve["scores"], LEARNED) for result in runs
             if result.curve]
    steps = sorted(math.inf if step is None else step for step in steps)
    middle = statistics.median(steps) if steps else math.inf
    return (sum(result.score >= LEARNED for result in runs), len(runs),
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


# ---- notices ----

def notices(study, comparisons):
    """What a reader must know before the numbers, as sentences."""
    lines, done, rows = [], progress(study), against_plain(study, comparisons)
    if words := cut_in_words(study):
        lines.append(words)
    if not study.finished:
        lines.append(f"This study is not finished: {done['done']:,} of {plural(done['planned'], 'run')} are "
                     "done; all of this may still change.")
    lines += failures_in_words(study)
    lines += [f"{against_in_words(study, c)}: not called {c.withheld}, since {plural(c.failed, 'run')} "
              "failed." for c in comparisons if c.withheld]
    if study.left_out:
        runs = listed([f"{len(seeds)} of {label_of(study, name)} ({seeds_in_words(seeds)})"
                       for name, seeds in study.left_out.items()])
        lines.append(f"Finished runs of the same variants lie in {OUT} and are left out: {runs}. p holds "
                     "where seeds were chosen before their scores were known.")
    if trained_here(study):
        lines += rates_in_words(study)
    if other := of_other_tokens(study, rows):
        each = [f"{label_of(study, name)} {words}" for name, words in other.items()]
        lines.append(f"{listed(each)}: that alone may make a difference.")
    if not trained_here(study) and (dearer := [
            label_of(study, c.variant) for c in rows
            if verdict_so_far(study, c) == "better" and ratio(study, "cost", c.variant) > 1.001]):
        lines.append(f"Better and dearer: {listed(dearer)}. Whether {baseline_of(study)} would be as good at "
                     "that cost was not measured.")
    if study.other_code:
        of = listed([label_of(study, name) for name in study.other_code])
        n = sum(study.other_code.values())
        lines.append(f"{plural(n, 'run')} {'was' if n == 1 else 'were'} made by other code or other "
                     f"libraries, which --accept_code allowed: of {of}.")
    lines += [f"{note[:1].upper()}{note[1:].rstrip('.')}." for note in study.notes]
    if not study.notes and is_scored_on_val(study):
        lines.append("Test is val: the test split is the validation split over again, so a test score here "
                     "is a validation score.")
    if early := scored_early(study):
        lines.append("Scored long before the end, where validation was best, since it got worse after: "
                     f"{listed(early)}.")
    if (study.made.get("commit") or "").endswith("-dirty"):
        lines.append("The code had changes that are in no commit.")
    return lines


def failures_in_words(study):
    """A line for each failed run."""
    once, lines = {}, []
    for run in study.runs:
        if run.name in study.failures and run.name not in once:
            once[run.name] = run
    for name, run in once.items():
        stage = "" if run.stage == "judge" else f", {run.stage}"
        where = f" on {run.text}" if len(study.texts) > 1 else ""
        log = f" ({OUT}/{name}/trial.log)" if trained_here(study) else ""
        of = label_of(study, run.variant)
        lines.append(f"Failed: {of}{where}, seed {run.seed}{stage}: {study.failures[name].why}{log}")
    if len(lines) > MOST_NAMED:
        lines[MOST_NAMED:] = [f"and {plural(len(lines) - MOST_NAMED, 'more failed run')}"]
    return lines


def seeds_in_words(seeds):
    """1, 2, 3, 7 as "seeds 1 to 3, 7"; seeds: in order."""
    parts = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    words = [f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(words)}"


def rates_in_words(study):
    """Whether learning rates were tuned, as sentences; what lies at the edge of what was tried."""
    if study.rates:
        edge = at_edge(study)
        more = [f"The best learning rate tried lies at the edge of the grid for {listed(edge)}: a better one "
                "may lie beyond."] if edge else []
        return ["The plain GPT and all that are judged have their own best rates: see Learning rates.", *more]
    if study.config.get("tune_lr"):
        return []  # they are not known yet
    names = {}
    for name, own in study.untuned.items():
        for flag, rate in own.items():
            given = flag in {**study.config.get("settings", {}), **study.variant(name).flags}
            at = f"{flag}={rate:g}, {'as given' if given else 'the default'}"
            names.setdefault(at, []).append(label_of(study, name))
    learns = [f"what {listed(own)} add{'s' * (len(own) == 1)} learns at {at}" for at, own in names.items()]
    if study.untuned and not learns:
        learns = ["no mechanism adds weights, and all learn at the plain GPT's rates"]
    said = ": ".join(["No learning rate was tuned", *filter(None, ["; ".join(learns)])])
    return [f"{said}. With --tune_lr both sides first get their best rates on validation."]


def is_scored_on_val(study):
    """Whether the test split of what was judged is the validation split."""
    digests = [run.spec["data"] for run in study.runs
               if run.stage == "judge" and isinstance(run.spec.get("data"), dict)]
    return any(each.get("test") and each.get("test") == each.get("val") for each in digests)


def scored_early(study):
    """[variant with its step] of those that were scored at a best step long before the end."""
    found = {}
    for run in study.runs:
        result = study.results.get(run.name)
        if study.measure == "bits/byte" and run.stage == "judge" and result and result.curve:
            steps, scores = result.curve["steps"], [number(score) for score in result.curve["scores"]]
            if any(map(known, scores)):
                best = min(range(len(scores)), key=lambda i: (not known(scores[i]), scores[i]))
                found.setdefault((run.variant, run.text), []).append((steps[best], steps[-1]))
    medians = {key: [statistics.median(each) for each in zip(*own)] for key, own in found.items()}
    return [f"{label_of(study, name)}{f' on {text}' * (len(study.texts) > 1)} (step {show(best)} of "
            f"{show(last)})" for (name, text), (best, last) in medians.items() if best < 0.9 * last]


# ---- learning rates that were tried ----

def tried(study):
    """{variant: {((group, factor), ...): the name of its runs}} of the search for rates, () as they are."""
    found, names = {}, sorted((each.name for each in study.variants), key=len, reverse=True)
    for run in study.runs:
        name = next((name for name in names if run.variant.startswith(f"{name}, ")), None)
        if run.stage == "tune" and name:
            rates = re.findall(r"(\w+) x ([\d.e-]+)", run.variant.removeprefix(name))
            key = tuple((group, float(factor)) for group, factor in rates)
            found.setdefault(name, {})[key] = run.variant
    return found


def at_edge(study):
    """[variant with its group] whose best rate is at an end of what was tried, one group at a time."""
    sign = -1 if MEASURES[study.measure].higher_is_better else 1
    scores, edge = scores_of(study, "tune"), []
    for name, own in tried(study).items():
        for group in dict.fromkeys(key[0][0] for key in own if len(key) == 1):
            at = {key[0][1] if key else 1.0: of for key, of in own.items()
                  if not key or len(key) == 1 and key[0][0] == group}
            seeds = [seed for of in at.values() for each in scores.get(of, {}).values() for seed in each]
            first = Counter(seeds).most_common(1)[0][0] if seeds else None  # which every factor has
            found = {factor: each[first] for factor, of in at.items()
                     for each in scores.get(of, {}).values() if first in each}
            best = min(found, key=lambda factor: sign * found[factor]) if found else None
            if len(found) > 1 and best in (min(found), max(found)):
                edge.append(f"{label_of(study, name)} ({group})")
    return edge


def rates_of(run):
    """{flag: rate} of a Run, as its spec has them."""
    return {key: value for key, value in run.spec.get("train", {}).items()
            if key.endswith("_lr") or key == "muon_momentum"}


# ---- below the numbers ----

def remarks(study, comparisons, beyond=()):
    """What belongs under the numbers: correction, margin, what seeds do not show, leaks looked for."""
    n, measure = len(tested(comparisons)), MEASURES[study.measure]
    lines = [f"Verdicts are corrected for {n} comparisons."] if n > 1 else [
        "One comparison: no correction."] if n else []
    lines.append(f"The margin is {margin_in_words(study)}.")
    over_text = " and not over other text" * (study.measure == "bits/byte")
    lines.append(f"Intervals ({level(study)}) are over seeds{over_text}.")
    rows = against_plain(study, comparisons)
    if measure.has_costs and n and not any(each.kind == "budget" for each in study.variants):
        lines.append(NO_BUDGETS)
    if any(c.verdict == "better" and c.equal_flops for c in rows):
        lines.append("At equal parameters better is a verdict; at equal FLOPs or time it means that the "
                     "interval, which is not corrected, lies below 0.")
    if is_of_tasks(study):
        lines.append(f"A run learns a task from the step on from which {LEARNED:.0%} of its answers are "
                     "right.")
    return [*lines, *remarks_on_target(study, beyond), *leaks_in_words(study), *timed_how(study)]


def leaks_in_words(study):
    """What was tried to find a model that looks ahead, as sentences."""
    if not trained_here(study):
        return []
    judged = {run.name for run in study.runs if run.stage == "judge" and run.name in study.results}
    looked = [study.results[name].leaks for name in judged if study.results[name].leaks]
    if not looked:
        return []
    of = f"{len(looked):,} of {len(judged):,} judged runs were"
    if len(looked) == len(judged):
        of = "Every judged run was"
    return [f"{of} searched for a model that looks ahead or mixes rows, and none was found: {words}."
            for words in sorted(set(looked))[:3]]


def timed_how(study):
    """How the time of a step was measured, as a sentence; []: it was not."""
    if not any(each.time and each.kind == "variant" for each in study.variants):
        return []
    processor = study.made.get("processor") or "one processor"
    return [f"Training steps of both sides were timed in alternation ({processor}). Another machine has "
            "other ratios."]


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


def remarks_on_target(study, beyond):
    """How means were held against the target of a study; []: it has none."""
    if not beyond:
        return []
    n, side = len(beyond), side_of_target(study)
    corrected = f", corrected for {n} means apart from the comparisons" * (n > 1)
    why = [f"{label_of(study, each.variant)} is not called {side} it, since {plural(each.failed, 'run')} "
           "of it failed." for each in beyond if each.failed and number(each.p_corrected) <= study.alpha]
    return [f"A mean is {side} {study.target:g} by a one-sided t test{corrected}.", *why]


# ---- what to run next ----

def next_study(study, comparisons):
    """What a finished study leaves open: {"undecided", "variants", "seeds", "command", "words"}; None:
    nothing. command: a new study with fresh seeds, for a shell; None: what made this one is not known.
    """
    rows = [c for c in comparisons if c.verdict == "undecided" and not c.withheld and known(c.se)]
    if not study.finished or not rows:
        return None
    near = [c for c in rows if (c.seeds or math.inf) <= MOST_SEEDS]
    seeds = max((c.seeds for c in near), default=None)
    names = dict.fromkeys(name for c in near for name in (c.variant, c.baseline))
    names = [name for name in names if study.variant(name).kind == "variant"]
    lines = []
    if near:
        lines.append(f"Undecided: {listed([open_in_words(study, c) for c in near])}. A new study with "
                     f"{seeds} fresh seeds would decide four times in five, if differences and spreads are "
                     "as they look now. Do not add seeds to this study: that would be a second look at the "
                     "same scores, for which p is not corrected.")
    if far := [f"{open_in_words(study, c)} ({c.seeds or 'more than 1000'})"
               for c in rows if c not in near]:
        lines.append(f"Undecided, and it would take more than {MOST_SEEDS} seeds: {listed(far)}.")
    undecided = [dict(variant=c.variant, baseline=c.baseline, seeds=c.seeds) for c in rows]
    return dict(undecided=undecided, variants=names, seeds=seeds,
                command=command_of(study, names, seeds) if near and names else None, words=" ".join(lines))


def open_in_words(study, c):
    """Whom an undecided comparison is of, and against whom if that is not the plain GPT as it is."""
    where = f" on {c.texts[0]}" if len(c.texts) < len(study.texts) else ""
    of, against = (label_of(study, name) for name in (c.variant, c.baseline))
    return (of if c.baseline == PLAIN else f"{of} against {against}") + where


def command_of(study, names, n):
    """The study's command for these variants and n fresh seeds; None: it is not known."""
    try:
        words = shlex.split(study.command)
    except ValueError:  # a quotation without its end
        return None
    if words[:2] != ["python", "compare.py"] or printable(study.command) != study.command:
        return None
    config, own = study.config, [each.name for each in study.variants if each.kind == "variant"]
    used = {run.seed for run in study.runs} | {seed for seeds in study.left_out.values() for seed in seeds}
    last = max(run.seed for run in study.runs if run.stage == "judge")
    fresh = itertools.islice((seed for seed in itertools.count(last + 1) if seed not in used), n)
    more = dict(seeds=",".join(map(str, fresh)), out_dir=f"out/{study.name}-{n}-seeds")
    if {*own} - {*names} and not config.get("mechanism"):
        given = config.get("variants") or {}
        more["mechanisms"] = ",".join(name for name in names if name not in given)
        more["variants"] = str({name: flags for name, flags in given.items() if name in names})
        more["contrasts"] = str([pair for pair in config.get("contrasts", ()) if {*pair} <= {*names, PLAIN}])
        more["always"] = ",".join(name for name in config.get("always", ()) if name in names)
        more = {key: value for key, value in more.items() if value not in ("", "{}", "[]") or config.get(key)}
    stays = [word for word in words[2:] if not word.startswith(tuple(f"--{key}=" for key in more))]
    return " ".join(map(quoted, [*words[:2], *stays, *(f"--{key}={value}" for key, value in more.items())]))


def quoted(word):
    """shlex.quote(), easier to read where a value is a dict of names in single quotes."""
    if "'" in word and not {*word} & {*'"$`\\!'}:
        return f'"{word}"'
    return shlex.quote(word)
