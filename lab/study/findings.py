"""
What a study found, in words and as tables of text: what the terminal, the docs and report.html show.

study: a records.StudyResults, as results.py reads it from a results.json.gz; of several texts a TextsResults
where that is said. Whatever is not known yet is None, and shown as –;
what a study did not measure reads "not measured".
"""

import html
import math
import re
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import EngFormatter

from nanoheads.common import json_safe, number, plural, printable
from lab.study import effects
from lab.study.dynamic import FIGURES, means_over_seeds, shares
from lab.study.follow_up import MOST_SEEDS, follow_up, is_near
from lab.study.measures import COSTS_ELSEWHERE, COSTS_HERE
from lab.study.records import TextsResults, as_json

# the verdicts, and what each means
MEANING = {
    "better": "ahead of the other side, by however little; by chance alone that would hardly be seen",
    "worse": "behind the other side, by however little; by chance alone that would hardly be seen",
    "same": "whichever of the two is ahead, it is by less than the margin: too little to matter",
    "identical": "nothing acted: the scores are those of the other side on every shared seed, and no finding",
    "undecided": "better, worse or the same: these seeds cannot tell, a new study with more would",
}

NOT_MEASURED = "not measured"
NO_BUDGETS = ("This study has no plain GPT of other budgets, by which a difference would be compared with "
              'compute, FLOPs and time: --budgets="[0.7, 1.4, 2.0]" adds them.')


class Table(NamedTuple):
    """Rows of text; words: the columns that hold words, the others hold numbers."""
    head: tuple
    rows: list
    words: tuple = (0,)


def escaped(text):
    """Text that is nothing but text in Markdown, also in a cell of a table."""
    return re.sub(r"([\\`*_|\[\]#~])", r"\\\1", " ".join(html.escape(str(text), quote=False).split()))


def in_markdown(head, rows, words):
    rule = ["---" if i in words else "---:" for i in range(len(head))]
    return "\n".join([f"| {' | '.join(map(escaped, head))} |", f"|{'|'.join(rule)}|",
                      *(f"| {' | '.join(map(escaped, row))} |" for row in rows)])


# ---- numbers and words ----

def known(value):
    return not math.isnan(number(value))


def show(value, spec=",.0f", unit=""):
    return f"{value:{spec}}{unit}" if known(value) else "–"


def short(value):
    """5700000 -> 5.7M"""
    return EngFormatter(sep="")(float(f"{value:.3g}")) if known(value) else "–"


def duration(seconds):
    """5 minutes, or 2.3 hours"""
    minutes = math.ceil(seconds / 60)
    return plural(minutes, "minute") if seconds < 7200 else f"{seconds / 3600:.2g} hours"


def chosen(by_variant, only):
    """Of {variant: ...}, or None, the plain GPT's and those of `only`; None: all."""
    return {name: own for name, own in (by_variant or {}).items() if only is None or name in ("plain", *only)}


def mean_of(scores):
    """The mean of the scores that are known; None: there is none."""
    scores = [score for score in scores if known(score)]
    return float(np.mean(scores)) if scores else None


def interval(c, spec="+.4f"):
    mean, low, high = (show(end, spec) for end in (c.mean, c.low, c.high))
    return f"{mean} [{low}, {high}]" if known(c.low) else mean


def p_of(c):
    return "<0.001" if number(c.p_corrected) < 0.001 else show(c.p_corrected, ".3f")


def level(study):
    return f"{100 * (1 - study.alpha):g} %"


def better_side(study):
    return f"{'above' if study.kind.higher_is_better else 'below'} 0 is better"


def head_of_difference(study):
    """The head of a column of interval(): its numbers have a sign, and no word says which is better."""
    return f"difference [{level(study)}], {better_side(study)}"


def listed(words, last="and"):
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def label_of(study, name):
    label = study.arms[name].label if name in study.arms else name
    return " ".join(printable(label or name).split())


def baseline_of(study):
    """What sentences call the baseline: the plain GPT, or by its label the one of another program."""
    return study.kind.baseline or label_of(study, "plain")


def margin_in_words(study):
    return " ".join(filter(None, [f"±{study.margin:g}", study.kind.unit]))


def labelled(study):
    return [(label_of(study, name), variant) for name, variant in study.arms.items()]


# ---- verdicts ----

def verdicts(results):
    """The verdicts of a study for a program to read, as a dict for JSON; of a TextsResults those over all
    texts.
    """
    several = isinstance(results, TextsResults)
    study = effects.pooled(results) if several else results
    out = (None if several else study.out) or results.config.get("out_dir")
    keys = ("mean", "low", "high", "p", "p_corrected", "p_same", "n", "n_baseline", "more_seeds", "worth",
            "equal_flops", "equal_time", *(["look"] if study.two_looks else []))
    amounts = ("tokens",) if study.kind.trained_here else AMOUNTS
    rows = [dict(variant=name_for_a_program(study, c.variant), baseline=name_for_a_program(study, c.baseline),
                 equal=c.equal,
                 **verdict_for_a_program(study, c), **{key: as_json(getattr(c, key)) for key in keys},
                 **{f"{key}_ratio": ratio(study, key, c.variant, c.baseline) for key in amounts},
                 words=sentence_of(study, c))
            for c in [*against_plain(study), *others(study)]]
    scores = {name_for_a_program(study, name): mean_of(arm.bpb) for name, arm in study.arms.items()}
    again = study.rescored
    rescored = again and dict(runs=len(again.runs), without=again.without)
    elsewhere = {} if study.kind.trained_here else dict(higher_is_better=study.kind.higher_is_better,
                                                        baseline=label_of(study, "plain"))
    return json_safe(dict(name=study.name, question=question_of(study), out=out, **effects.progress(study),
                          headline=headline(study), notices=notices(study), cut=cut_of(study),
                          alpha=study.alpha, margin=study.margin,
                          failures=effects.failed_runs(study.failures), left_out=as_json(study.left_out),
                          looks=as_json(study.looks),
                          **{"bpb" if study.kind.trained_here else "scores": scores}, comparisons=rows,
                          rescored=rescored, follow_up=next_study(study), **elsewhere,
                          **looks_for_a_program(study), **targets_for_a_program(study)))


def name_for_a_program(study, name):
    """A variant as a program knows it: of another program's file, what that calls it."""
    return name if study.kind.trained_here else study.arms[name].label


def part_of(results, name):
    """The study on one of several texts."""
    return replace(results.texts[name], one_of_several=True)


def next_study(study):
    """follow_up() of a finished study, with "words": what it means, in sentences; None: nothing is undecided.
    """
    if is_interim(study) or not (more := follow_up(study)):
        return None
    rows = more["undecided"]
    near = [open_in_words(study, row) for row in rows if is_near(row)]
    far = [f"{open_in_words(study, row)} ({row['seeds'] or 'more than 1000'})" for row in rows
           if not is_near(row)]
    lines = []
    if near:
        lines.append(f"Undecided: {listed(near)}. A new study with {more['seeds']} fresh seeds would decide "
                     "four times in five, if differences and spreads are as they look now. Do not add seeds "
                     "to this study: that would be a second look at the same scores, for which p is not "
                     "corrected.")
    if far:
        lines.append(f"Undecided, and it would take more than {MOST_SEEDS} seeds: {listed(far)}.")
    return dict(**more, words=" ".join(lines))


def open_in_words(study, row):
    """Whom an undecided comparison is of, and against whom if that is not the plain GPT as it is."""
    of, against = (label_of(study, row[side]) for side in ("variant", "baseline"))
    return of if row["baseline"] == "plain" else f"{of} against {against}"


def looks_for_a_program(study):
    """{"two_looks": {"spending", "look", "levels"}} of a study that was planned so, else {}."""
    plan = study.two_looks
    if not plan:
        return {}
    return dict(two_looks=dict(spending=plan.spending, look=plan.look, levels=study.levels))


def targets_for_a_program(study):
    """{"target": number, "targets": [{"variant", "verdict", ...}]} of a study with a target, else {}."""
    if not study.targets:
        return {}
    rows = [{**as_json(row), "variant": name_for_a_program(study, row.variant)} for row in study.targets]
    return dict(target=study.target, targets=rows)


def verdict_for_a_program(study, c):
    """{"verdict", "interim_verdict"}: what asks for "better" must not find it in an unfinished study."""
    so_far = verdict_so_far(study, c)
    if is_interim(study):
        return dict(verdict="unfinished", interim_verdict=so_far)
    return dict(verdict=so_far, interim_verdict=None)


def against_plain(study, only=None):
    """The comparisons with the plain GPT as it is, the best first, or in the order of `only`."""
    rows = [c for c in study.comparisons if c.baseline == "plain" and not c.equal]
    rows = [c for c in rows if only is None or c.variant in only]
    if only is not None:
        return sorted(rows, key=lambda c: only.index(c.variant))
    sign = -1 if study.kind.higher_is_better else 1
    return sorted(rows, key=lambda c: (not known(c.mean), sign * number(c.mean)))


def others(study):
    """All other comparisons: with wider plain GPTs, and of two variants."""
    return [c for c in study.comparisons if c.baseline != "plain" or c.equal]


AMOUNTS = ("tokens", "bytes", "cost")  # that a variant may take more of than another


def ratio(study, amount, name, baseline="plain"):
    """How many times another variant's tokens, bytes or cost a variant takes; NaN: not known."""
    own, other = (number(getattr(study.arms[each], amount)) for each in (name, baseline))
    return own / other


def in_times(value):
    """A ratio in digits enough to tell it from 1: 2.00, 1.0026."""
    return show(value, ".4f" if known(value) and 0 < abs(value - 1) < 0.005 else ".2f")


def of_other_tokens(study, comparisons):
    """{variant: what it trains on, in words} of those that are trained on more or less than the baseline."""
    words = {}
    for c in comparisons:
        ratios = {amount: ratio(study, amount, c.variant) for amount in ("tokens", "bytes")}
        other = [f"{in_times(value)} times {baseline_of(study)}'s {amount}"
                 for amount, value in ratios.items() if abs(value - 1) > 0.001]
        words.update({c.variant: f"trains on {listed(other)}"} if other else {})
    return words


def equal_of(study, c):
    return listed(c.equal) or "hyperparameters" + ", rates aside" * at_own_rates(study)


def at_own_rates(study):
    """Whether the plain GPT and all that are judged have their own best rates."""
    return bool(study.candidates or study.tuned_on)


INTERIM = "interim: "  # before a verdict of an unfinished study


def is_interim(study):
    """Whether a study has runs left to do: then all of its verdicts may still change."""
    return not effects.progress(study)["finished"]


def verdict_of(study, c):
    """The verdict as it is shown: of an unfinished study it is marked, so that nobody quotes it as one."""
    return INTERIM * (is_interim(study) and known(c.mean)) + verdict_so_far(study, c)


def verdict_so_far(study, c):
    """The verdict by the runs that are done; without a difference, why there is none."""
    if known(c.mean):
        return c.verdict
    failed = {f.arm for f in study.failures}
    baseline_has_score = mean_of(study.arms[c.baseline].bpb) is not None
    if c.variant in failed or c.baseline in failed and not baseline_has_score:
        return "failed"
    return "no runs yet"


def sentence_of(study, c):
    words = INTERIM * is_interim(study) + in_full(study, c) if known(c.mean) else verdict_of(study, c)
    return " ".join(printable(words).split())


def not_shown_at(study, c):
    """[What is equal where a variant that is better is not shown to be], as limits_of() has it.

    [] for all others, and for the scores of another program, whose costs are not known.
    """
    if verdict_so_far(study, c) != "better":
        return []
    return limits_of(study, [c])[0].get(c.variant, [])


BUT = ", but not at equal "  # between a verdict and what it does not hold for


def limited_verdict(study, c):
    """verdict_of(), and of a variant that is better where it is not shown to be, for the page."""
    return but_not_at(verdict_of(study, c), not_shown_at(study, c))


def but_not_at(verdict, whats):
    return BUT.join([verdict, *filter(None, [listed(whats, "or")])])
def in_full(study, c):
    """A verdict in words, and what they leave open: on which side of 0 better is, what the correction did."""
    parts = [c.words]
    if re.search(r"[+-]\d", c.words):
        parts.append(better_side(study))
    if c.verdict == "undecided" and leaves_out_0(c) and c.p_corrected > study.alpha:
        n = effects.corrected_for(study)
        parts.append(f"the interval, which is not corrected, leaves out 0, and p, which is corrected for "
                     f"{plural(n, 'comparison')}, is above {study.alpha:g}")
    return "; ".join(parts)


def leaves_out_0(c):
    return known(c.low) and (c.low > 0 or c.high < 0)


# ---- what a study asks, and how much of a run it had ----

def question_of(study):
    """What a study asks, the title of its page; without a question in its config, what it compared."""
    if study.question:
        return study.question
    judged = [name for name, baseline, equal in study.pairs if baseline == "plain" and not equal]
    names = [label_of(study, name) for name in [*judged, *(study.screened_out or [])]]
    if not names:
        return study.name
    which = listed(names, "or") if len(names) < 4 else f"any of {len(names)} variants"
    return f"Is {which} better than {baseline_of(study)}?"


def cut_of(study):
    """How much of a run a study had, as a dict, where that was not all of it; None: it was, or is not known.

    Runs are cut that have fewer steps than their scale's, and scores that are of a part of the split. Where
    it is not known how many steps their scale has, of_steps and of_tokens are None.
    """
    if not study.kind.trained_here:
        return None
    plain, whole, data = study.arms["plain"], study.of_scale, study.data
    cut = dict(steps=plain.steps, of_steps=whole and whole.steps, tokens=plain.tokens,
               of_tokens=whole and whole.tokens, split=data.split, bytes=data.bytes,
               of_bytes=data.of_bytes)
    return cut if fewer(cut, "steps") or fewer(cut, "bytes") else None


def fewer(cut, key):
    """Whether there were fewer of something than a whole run has; see cut_of()."""
    return number(cut[key]) < number(cut[f"of_{key}"])


def share_scored(cut):
    return f"{100 * cut['bytes'] / cut['of_bytes']:.2g} % of the {cut['split']} split"


def cut_in_short(study):
    """How a study was cut, as a sentence before its verdicts; "": it was not."""
    cut, parts = cut_of(study), []
    if cut and fewer(cut, "steps"):
        parts.append(f"short runs, {show(cut['steps'])} of the {study.scale} scale's "
                     f"{show(cut['of_steps'])} steps ({short(cut['tokens'])} of {short(cut['of_tokens'])} "
                     "tokens)")
    if cut and fewer(cut, "bytes"):
        parts.append(f"scored on {share_scored(cut)}")
    words = ", ".join(parts)
    return words and f"{words[0].upper()}{words[1:]}."


def cut_in_words(study):
    """The same for the box of notices, with all figures; "": the study was not cut."""
    cut, parts = cut_of(study), []
    if cut and fewer(cut, "steps"):
        parts.append(f"trained for {plural(cut['steps'], 'step')}, where the {study.scale} scale has "
                     f"{show(cut['of_steps'])} ({show(cut['tokens'])} of {show(cut['of_tokens'])} tokens)")
    if cut and fewer(cut, "bytes"):
        parts.append(f"scored on {share_scored(cut)} ({show(cut['bytes'])} of {show(cut['of_bytes'])} bytes)")
    later = " After all steps the variants may rank otherwise." * bool(cut and fewer(cut, "steps"))
    return parts and f"Each run of the plain GPT was {listed(parts)}.{later}"


def headline(study):
    """The study in one sentence; before it one that says how it was cut, if it was."""
    judged = "" if study.targets and not against_plain(study) else verdicts_in_a_sentence(study)
    return " ".join(filter(None, [cut_in_short(study), judged, target_in_a_sentence(study)]))


def verdicts_in_a_sentence(study):
    rows = against_plain(study)
    if not rows:
        return f"No variant was compared with {baseline_of(study)}."
    best = [c for c in rows if verdict_so_far(study, c) == "better"]
    lost, unmeasured = limits_of(study, best)
    whats = listed(list(dict.fromkeys(what for own in lost.values() for what in own)), "or")
    if len(rows) == 1:
        parts = [sentence_of(study, rows[0]).rstrip(".")]
        if lost:
            parts.append(f"not shown to be better at equal {whats}")
        parts += (f"it {words}" for words in of_other_tokens(study, rows).values())
        against = "" if study.kind.baseline else f" against {baseline_of(study)}"
        return f"{label_of(study, rows[0].variant)}{against}: {'; '.join([*parts, *unmeasured])}."
    verdicts = [verdict_so_far(study, c) for c in rows]
    words = [word for word in (*MEANING, "failed", "no runs yet") if word in verdicts and word != "better"]
    rest = "".join(f"; {verdicts.count(word)} {word}" for word in words)
    n = len(study.screened or [])
    screened = f"{plural(n, 'variant')} {'was' if n == 1 else 'were'} screened. " * (n > 0)
    rest = rest.replace(" same", f" the same within {margin_in_words(study)}")
    rest = rest.replace(" identical", " identical to it, since nothing acted")
    were = f"variants {'was' if len(best) < 2 else 'were'} shown to be better than {baseline_of(study)}"
    said = f"{screened}{len(best) or 'Not one'} of {len(rows)} {were}{rest}."
    said = INTERIM.capitalize() * is_interim(study) + said
    parts = []
    if lost:
        one, *more = lost
        who = f"{len(lost)} of the {len(best)} are" if more else f"{label_of(study, one)} is"
        parts.append(f"{who} not shown to be better at equal {whats}")
    parts += unmeasured
    parts += (f"{label_of(study, name)} {words}" for name, words in of_other_tokens(study, best).items())
    more = "; ".join(parts)
    return f"{said} {more if lost else more[0].upper() + more[1:]}." if more else said


def limits_of(study, best):
    """What else is to be said of the variants that are better than the plain GPT as it is.

    best: their comparisons. Returns {variant: [what is equal where it is not shown to be better]}, without
    those that are shown to be better everywhere, and clauses on what was not measured.
    """
    lost, unmeasured = {}, []
    for c in best if study.kind.trained_here else ():
        shown = shown_at_equal(study, c)
        unmeasured += [what for what, is_shown in shown.items() if is_shown is None]
        if whats := [what for what, is_shown in shown.items() if is_shown is False]:
            lost[c.variant] = whats
    count = Counter(unmeasured)
    of_all = [f"equal {what}" for what, n in count.items() if n == len(best)]
    clauses = [f"{listed(of_all)} {were_or_was(of_all)} {NOT_MEASURED}"] if of_all else []
    clauses += [f"equal {what} {were_or_was([what])} {NOT_MEASURED} for {n} of the {len(best)}"
                for what, n in count.items() if n < len(best)]
    return lost, clauses


def were_or_was(words):
    return "were" if len(words) > 1 or words[0].endswith("s") else "was"


def shown_at_equal(study, c):
    """{what is equal: whether a variant is shown to be better there too, None: that was not measured}.

    One rule, is_shown(): the interval lies below 0, and where the study also made a verdict, it is "better".
    It makes one at equal parameters, and none at equal FLOPs or time, whose intervals are not corrected;
    remarks() says so. A variant that needs no more of something than the plain GPT is better at an equal
    amount of it. Where no plain GPT was trained for as much, nothing was measured.
    """
    variant, plain = study.arms[c.variant], study.arms["plain"]
    more = {key: number(getattr(variant, key)) / number(getattr(plain, key))
            for key in ("params", "flops_per_token", "executed_flops_per_token")}
    no_larger = more["params"] <= 1 or effects.same_size(variant.params, plain.params)
    shown = {"parameters": no_larger or None}
    for other in others(study):
        if other.equal and other.variant == c.variant:
            shown[equal_of(study, other)] = is_shown(other)
    multiple, time = number(variant.multiple), variant.time_ratio
    tokens = number(variant.tokens) / number(plain.tokens)
    flops = max(more["flops_per_token"], more["executed_flops_per_token"]) * tokens
    shown["FLOPs"] = shown_at_cost(c.equal_flops, flops)
    shown["time"] = shown_at_cost(c.equal_time, number(time and time.high) * multiple)
    return shown


def is_shown(difference):
    """Whether a difference is shown to be better, see shown_at_equal(); None: it was not measured."""
    if not known(difference.high):
        return None
    return difference.high < 0 and getattr(difference, "verdict", "better") == "better"


def shown_at_cost(each, ratio):
    """is_shown() at equal cost; without a figure, whether the variant costs no more than the plain GPT.

    each: c.equal_flops or c.equal_time, None without budgets; ratio: the cost then, × the plain GPT's.
    """
    if each and known(each.high):
        return is_shown(each)
    return True if (each.ratio if each else ratio) <= 1 else None


def timed_how(study):
    """How the time of a step was measured, as a sentence; None: it was not."""
    rows = [arm.time_ratio for arm in study.arms.values() if arm.time_ratio and arm.time_ratio.clock]
    if not rows:
        return None
    processor = rows[0].processor or "one machine"
    clock = "CPU seconds of one thread" if rows[0].clock == "processor" else "seconds"
    compiled = "" if rows[0].compiled else ", without torch.compile"
    steps = "For the time, training" if any(c.equal_time for c in study.comparisons) else "Training"
    return (f"{steps} steps of both sides were timed in alternation, in "
            f"{clock} on one processor ({processor}){compiled}. Another machine has other ratios.")


def notices(study):
    """What a reader must know before the numbers."""
    failed, lines = effects.failed_runs(study.failures), [*standing(study), *planned_looks(study)]
    if not is_interim(study) and at_own_rates(study):
        where = f"found on {study.tuned_on}" if study.tuned_on else "see Learning rates"
        lines.append(f"The plain GPT and all that are judged have their own best rates: {where}.")
    if untuned := untuned_sentence(study):
        lines.append(untuned)
    if other := of_other_tokens(study, against_plain(study)):
        each = [f"{label_of(study, name)} {words}" for name, words in other.items()]
        lines.append(f"{listed(each)}: that alone may make a difference.")
    if dearer := dearer_and_better(study):
        lines.append(f"Better and dearer: {listed(dearer)}. Whether {baseline_of(study)} would be as good at "
                     "that cost was not measured.")
    if study.reused:
        lines.append(reused_sentence(study.reused, study.planned))
    if failed:
        runs = "run is" if failed == 1 else "runs are"
        lines.append(f"{failed} failed {runs} missing from the numbers: see Failures.")
    edge = [f"{label_of(study, name)} ({group})" for name, own in (study.tuned or {}).items()
            for group, scores in own.items() if at_edge(scores)]
    if edge:
        lines.append(f"The best learning rate tried lies at the edge of the grid for {listed(edge)}: "
                     "a better one may lie beyond.")
    early = [f"{label_of(study, name)} (step {show(variant.best_step)} of {show(variant.steps)})"
             for name, variant in study.arms.items()
             if known(variant.best_step) and variant.best_step < 0.9 * variant.steps]
    if early:
        lines.append("Scored long before the end, where validation was best, since it got worse after: "
                     f"{listed(early)}.")
    if (study.commit or "").endswith("-dirty"):
        lines.append("The code had changes that are in no commit.")
    return lines


def dearer_and_better(study):
    """The variants that are better, and by another program's account cost more than the baseline."""
    return [label_of(study, c.variant) for c in against_plain(study)
            if verdict_so_far(study, c) == "better" and ratio(study, "cost", c.variant) > 1.001]


def untuned_sentence(study):
    """The rates at which what variants add learns, where no rate was tuned, and what tuning would cost; None:
    rates were tuned, or it is not known.
    """
    if not (untuned := study.untuned):
        return None
    said = f"No learning rate was tuned: {rates_in_words(study, untuned.rates)}."
    if not study.command.startswith("python "):
        return said
    without = " and without --minutes" if study.config.get("minutes") else ""
    said += (f" With --tune_lr behind this study's command{without} both sides first get their best rates on "
             "validation")
    if study.config.get("minutes"):
        said += "; with --dry_run too it says how long that takes"
    else:
        least, most = untuned.runs
        whole = most + study.planned
        said += f", in {least} to {most} runs, and what these change is judged anew: at most {whole} runs"
        seconds, jobs = study.arms["plain"].seconds, study.machine.jobs
        if seconds and jobs:
            said += f", which would train for about {duration(whole * seconds / jobs)} here"
    return f"{said}."


def rates_in_words(study, rates):
    """{variant: {flag: rate of what it adds}} as words."""
    names = {}  # of the variants, for each rate
    for name, own in rates.items():
        for flag, rate in own.items():
            given = flag in {**(study.settings or {}), **study.arms[name].flags}
            at = f"{flag}={rate:g}, {'as given' if given else 'the default'}"
            names.setdefault(at, []).append(label_of(study, name))
    learns = [f"what {listed(own)} add{'s' * (len(own) == 1)} learns at {at}" for at, own in names.items()]
    return "; ".join(learns) or "no mechanism adds weights, and all learn at the plain GPT's rates"


MOST_LOOKS = 4  # of other reports, that are named one by one
WHAT_IT_DOES = "docs/results/verdicts.md says how often it misleads"


def standing(study):
    """What p values do not know of, as sentences: runs that were cut, are to come, are left out, or were
    judged before.
    """
    lines = [words] if (words := cut_in_words(study)) else []
    if is_interim(study):
        lines.append(f"This study is not finished: {study.done} of {study.planned} runs are done; "
                     "all of this may still change.")
    if rows := study.left_out:
        runs = listed([f"{len(row.seeds)} of {label_of(study, row.variant)} "
                       f"({seeds_in_words(row.seeds)}{of_text(row)})" for row in rows])
        lines.append(f"Finished runs of the same variants are left out: {runs}. p holds where seeds were "
                     f"chosen before their scores were known; else {WHAT_IT_DOES}.")
    apart, sharing = [], []
    for look in study.looks or ():
        (apart if is_apart(study, look) else sharing).append(look)
    if sharing:
        lines.append(f"The same variants were judged by other runs: {looks_in_words(study, sharing)}. p does "
                     f"not allow for another look; {WHAT_IT_DOES}.")
    if apart:
        lines.append("The same variants were judged before by other seeds, none of which judges here: "
                     f"{looks_in_words(study, apart)}. p holds for this study by itself.")
    return lines


def is_apart(study, look):
    """Whether another report judged the variants of a study by none of its seeds."""
    return all(not {*seeds} & {*study.arms[name].seeds}
               for name, seeds in look.seeds.items() if name in study.arms)


def looks_in_words(study, looks):
    more = len(looks) - MOST_LOOKS
    return "; ".join([f"{more} times before"] * (more > 0) + [look_in_words(study, look)
                                                              for look in looks[-MOST_LOOKS:]])


SPENDING = {"obrien_fleming": "O'Brien-Fleming", "pocock": "Pocock"}


def planned_looks(study):
    """What a study in two looks was judged by, in sentences; [] without such a plan."""
    if not (plan := study.two_looks):
        return []
    first, second = (f"{level:.4f}" for level in study.levels)
    n, whole, look = len(plan.first_seeds), len(plan.seeds), plan.look
    words = (f"Look {look} of 2, as planned ({SPENDING[plan.spending]}): corrected p is held against "
             f"{first} at look 1, by {n} of {whole} seeds, and against {second} at look 2, by all of them. "
             f"Together that keeps false verdicts to {100 * study.alpha:g} % of studies")
    if look == 1:
        return [words + ("." if is_interim(study) else
                         ". Look 1 decided everything, so the other seeds were not trained.")]
    early = [f"{label_of(study, c.variant)} against {label_of(study, c.baseline)}"
             for c in study.comparisons if c.look == 1]
    stays = f"{listed(early)}, which stays as it was there, by its seeds" if early else "nothing"
    return [f"{words}. Look 1 decided {stays}."]


def of_text(row):
    """Behind a figure of a study on several texts: the one that it is of."""
    return f", on {row.text}" if row.text else ""


def look_in_words(study, look):
    """When and by which seeds another report judged the variants of a study."""
    by_seeds = {}
    for name, seeds in look.seeds.items():
        by_seeds.setdefault(seeds_in_words(seeds), []).append(label_of(study, name))
    seeds = listed([f"{words} of {listed(names) if len(names) < 6 else f'{len(names)} of them'}"
                    for words, names in by_seeds.items()])
    interim = "" if look.finished else f", unfinished with {look.done} of {look.planned} runs"
    second, *_ = look.date.split(".")  # the file has milliseconds, for the order
    return f"on {printable(second)} by {seeds}{of_text(look)} ({printable(look.folder)}{interim})"


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


def reused_sentence(rows, planned):
    """How many runs a study took from where; rows: those of Runs.reused(); planned: runs in all."""
    def other_code(row):
        of = f", those of {listed(row.of)}" * bool(row.of)
        return (f" ({row.other_code:,} of them made by other code or other libraries, which --accept_code "
                f"allowed{of})" if row.other_code else "")

    parts = [f"{row.runs:,} from {row.source}{other_code(row)}" for row in rows]
    n = sum(row.runs for row in rows)
    return (f"{n:,} of {plural(planned, 'run')} {'was' if n == 1 else 'were'} not trained for this study: "
            f"{' and '.join(parts)}.")


def rescored_sentence(study):
    """How many runs were scored once more, and how many have no checkpoint; None: it is not known."""
    if not (again := study.rescored):
        return None
    n, of = len(again.runs), study.done
    line = (f"{n:,} of {plural(of, 'run')} {'was' if n == 1 else 'were'} scored once more from "
            f"{'its checkpoint and gave its score' if n == 1 else 'their checkpoints and gave their scores'}"
            if n else "No run was scored once more from its checkpoint")
    have = "has" if again.without == 1 else "have"
    return line + f"; {again.without:,} of {of:,} {have} none here" * bool(again.without) + "."


def remarks(study, over_text="report.html"):
    """What belongs under the numbers: correction, what could be found, margin, what seeds do not show."""
    n, size = effects.corrected_for(study), study.findable
    lines = [f"Verdicts are corrected for {n} comparisons."] if n > 1 else [
        "One comparison: no correction."] if n else []
    if known(size):
        last = effects.tested(effects.rows_of_last_look(study, study.comparisons))
        seeds = int(np.median([c.n for c in last if c.baseline == "plain"]))
        found = " ".join(filter(None, [f"{size:.4f}", study.kind.unit]))
        lines.append(f"With {seeds} seeds a variant, {found} would be found four times in five, "
                     "taking the spread over seeds at its upper bound.")
    worth = [f"{value:.2f} ×" for value in study.margin_as_compute or [] if known(value)]
    lines.append(f"The margin is {margin_in_words(study)}"
                 + f": so much does the plain GPT change at {listed(worth)} its compute" * bool(worth) + ".")
    beside = f"; {over_text} has one over the text beside each" * any(
        c.text for c in study.comparisons)
    over = f" and not over other text{beside}" * study.kind.trained_here
    lines.append(f"Intervals ({level(study)}) are over seeds{over}.")
    if study.kind.trained_here and n and not any(arm.kind == "budget" for arm in study.arms.values()):
        lines.append(NO_BUDGETS)
    if any(verdict_so_far(study, c) == "better" and c.equal_flops for c in against_plain(study)):
        lines.append("At equal parameters better is a verdict; at equal FLOPs or time it means that the "
                     "interval, which is not corrected, lies below 0.")
    return [*lines, *remarks_on_target(study), *filter(None, [timed_how(study), rescored_sentence(study)])]


# ---- a target ----

def target_in_a_sentence(study):
    """Which variants' means are shown to lie below the target of a study; "": it has none."""
    if not study.targets:
        return ""
    side = side_of_target(study)
    shown = [label_of(study, row.variant) for row in study.targets if row.verdict == side]
    n = len(study.targets)
    if n == 1:
        return f"{label_of(study, study.targets[0].variant)}: {study.targets[0].words}."
    return (f"Shown to be {side} the target of {study.target:g}: "
            f"{f'{listed(shown)}, {len(shown)} of {n}' if shown else f'none of {n}'}.")


def side_of_target(study):
    return "above" if study.kind.higher_is_better else "below"


def remarks_on_target(study):
    """How means were held against the target of a study, and why a variant has no verdict; []: it has none.
    """
    if not study.targets:
        return []
    rows, n = study.targets, len(study.targets)
    corrected = f", corrected for {n} means apart from the comparisons" * (n > 1)
    why = [f"{label_of(study, row.variant)}: {row.words}." for row in rows
           if n > 1 and row.words.startswith(("no test", "not called"))]
    return [f"A mean is {side_of_target(study)} {study.target:g} by a one-sided t test{corrected}.", *why]


def target_table(study):
    """Each variant's mean with its interval, and whether it lies below the target of a study."""
    side = side_of_target(study)
    head = ("variant", f"{side} {study.target:g}?", "seeds", f"mean [{level(study)}]", "p, one-sided",
            "corrected p")
    rows = []
    for row in study.targets or ():
        p, corrected = ("<0.00001" if number(each) < 1e-5 else show(each, ".5f")
                        for each in (row.p, row.p_corrected))
        rows.append((label_of(study, row.variant), row.verdict, str(row.n), interval(row, ".4f"), p,
                     corrected))
    return Table(head, rows, (0, 1))


# ---- tables ----

def verdicts_table(study, only=None, difference=interval, verdict=verdict_of):
    """The plain GPT, then each variant against it, the best first.

    difference: how a difference at equal cost is shown; verdict: how a verdict is.
    """
    head = ("variant", "verdict", "params", "seeds", study.kind.name, head_of_difference(study),
            "corrected p", "worth × compute", "at equal FLOPs", "at equal time",
            *(f"{amount} ×" for amount in AMOUNTS))
    label, *sizes = label_and_figures(study, "plain")
    rows = [(label, "–", *sizes, own_interval(study), "–", "1", "–", "–", *("1" for _ in AMOUNTS))]
    for c in against_plain(study, only):
        label, *sizes = label_and_figures(study, c.variant)
        rows.append((label, verdict(study, c), *sizes, interval(c), p_of(c), worth_of(c),
                     at_cost(c, "equal_flops", difference), at_cost(c, "equal_time", difference),
                     *(in_times(ratio(study, amount, c.variant)) for amount in AMOUNTS)))
    return without(Table(head, rows, (0, 1)), *columns_without_use(study, only))


def columns_without_use(study, only):
    """Heads of verdicts_table() of what is not known of this kind of score, or is the same for all."""
    rows = against_plain(study, only)
    least = 0.001 if study.kind.trained_here else 0  # what another program says is shown
    used = [amount for amount in AMOUNTS
            if any(abs(ratio(study, amount, c.variant) - 1) >= least for c in rows)]
    every = (*COSTS_HERE, *COSTS_ELSEWHERE)
    return {*every} - {*study.kind.columns} | {f"{amount} ×" for amount in AMOUNTS if amount not in used}


def texts_table(both, only=None, verdict=verdict_of):
    """Each variant's difference over all texts and on each of them, its worth and its verdict.

    both: the study over all texts, as effects.pooled() makes it.
    """
    texts = both.texts
    rows = [("plain GPT", "–", score_of(both, "plain"), own_interval(both), "–",
             *map(own_interval, texts.values()), "1")]
    for c in against_plain(both, only):
        label, *_, score = label_and_figures(both, c.variant)
        each = (interval(own) for study in texts.values() for own in against_plain(study, [c.variant]))
        rows.append((label, verdict(both, c), score, interval(c), p_of(c), *each, worth_of(c)))
    head = ("variant", "verdict", "bits/byte", head_of_difference(both), "corrected p",
            *(f"on {text}" for text in texts), "worth × compute")
    return Table(head, rows, (0, 1))


def on_each_text(study, name):
    """A variant's verdict on each text by itself, in words; each is corrected for that text alone."""
    verdicts = {text: verdict_of(own, c) for text, own in (study.texts or {}).items()
                for c in against_plain(own, [name])}
    if len(set(verdicts.values())) == 1:
        return f"{next(iter(verdicts.values()))} on {'both' if len(verdicts) == 2 else 'all'}"
    return ", ".join(f"{verdict} on {text}" for text, verdict in verdicts.items())


def without(table, *titles):
    """A table without the columns of these titles."""
    shown = [i for i, title in enumerate(table.head) if title not in titles]
    return Table([table.head[i] for i in shown], [[row[i] for i in shown] for row in table.rows],
                 [shown.index(i) for i in table.words if i in shown])


def measured(table):
    """(A table without the columns in which nothing was measured, a sentence that names them or "")."""
    cells = {title: {row[i] for row in table.rows} for i, title in enumerate(table.head)}
    empty = [title for title, own in cells.items()
             if NOT_MEASURED in own and own <= {NOT_MEASURED, "–", "1"}]  # the last two: of the plain GPT
    titles = listed([title.removeprefix("at ") for title in empty])
    return without(table, *empty), f"Not measured, and so not in the table: {titles}." if empty else ""


def own_interval(study):
    """The interval of the plain GPT's own mean over seeds, for its row in a table of differences to it."""
    half = effects.uncertainty(study, "plain")
    return "–" if half is None else f"its mean ±{half:.4f}"


def score_of(study, name):
    """A variant's mean bits per byte, as text."""
    return show(mean_of(study.arms[name].bpb), ".4f")


def label_and_figures(study, name):
    """(label, parameters, seeds, bits per byte) of a variant, as text."""
    variant = study.arms[name]
    seeds = sum(map(known, variant.bpb))
    return label_of(study, name), short(variant.params), str(seeds), score_of(study, name)


def worth_of(c, of=1, spec=".2f"):
    """0.93 [0.88, 0.99]: a multiple of the plain GPT's compute, or of its steps; < or > what was measured.

    – where the plain GPT does not get better with compute.
    """
    w = c.worth
    if not w or w.problem:
        return "–" if w else NOT_MEASURED
    less, more = (f"{sign}{show(number(end) * of, 'g' if of == 1 else spec)}"
                  for sign, end in (("<", w.smallest), (">", w.largest)))
    mean = {"less": less, "more": more}.get(w.beyond) or show(number(w.mean) * of, spec)
    if known(w.low) and w.low == w.high:  # the whole interval lies beyond
        return mean
    low, high = (show(end * of, spec) if known(end) else beyond
                 for end, beyond in ((w.low, less), (w.high, more)))
    return f"{mean} [{low}, {high}]"


def steps_table(study, only=None):
    """The plain GPT's steps to each variant's score, by its worth, and how many fewer or more it takes."""
    steps, rows = study.arms["plain"].steps, []
    for c in against_plain(study, only):
        worth, own = c.worth and c.worth.mean, study.arms[c.variant].steps
        if known(steps) and known(own) and worth_of(c) not in ("–", NOT_MEASURED):
            takes = fewer_or_more(own / worth / steps) if known(worth) else "–"
            rows.append((label_of(study, c.variant), show(own), worth_of(c, steps, ",.0f"), takes))
    return Table(("variant", "its steps", "plain GPT's steps to its score", "so it takes"), rows, (0,))


def fewer_or_more(ratio):
    """0.8 -> 20 % fewer steps"""
    percent = round(100 * (ratio - 1))
    return f"{abs(percent)} % {'more' if percent > 0 else 'fewer'} steps" if percent else "as many steps"


def at_cost(c, key, difference):
    """What is left of a difference at equal cost, and that cost; whether a plain GPT was trained for it."""
    each = getattr(c, key)
    if not each:
        return NOT_MEASURED
    left = difference(each) if known(each.mean) else NOT_MEASURED
    return f"{left} at {show(each.ratio, '.2f')} ×"


def mean_alone(c):
    return show(c.mean, "+.4f")


def others_table(study, only=None):
    head = ("variant", "verdict", "against", "what is equal", "bits/byte", "the other's",
            head_of_difference(study), "corrected p")
    rows = [(label_of(study, c.variant), verdict_of(study, c), label_of(study, c.baseline),
             equal_of(study, c), score_of(study, c.variant), score_of(study, c.baseline),
             interval(c), p_of(c))
            for c in others(study) if only is None or c.variant in only]
    return Table(head, rows, (0, 1, 2, 3))


def screened_table(study, only=None):
    """All variants of the first stage, on validation."""
    own = study.screen.scores.get("plain", {}) if study.screen else {}
    head = ("variant", "bits/byte, validation", head_of_difference(study), "judged")
    rows = [(label_of(study, "plain"), show(mean_of(own.values()), ".4f"), "–", "yes")]
    for row in study.screened or []:
        if only is None or row.variant in only:
            rows.append((label_of(study, row.variant), show(row.bpb, ".4f"), interval(row),
                         "yes" if row.chosen else "no"))
    return Table(head, rows if own else [], (0, 3))


def costs_table(study, only=None):
    """What each variant costs, with its ratio to the plain GPT where both were counted, or timed in turn."""
    columns = {"params": ("params", short), "FLOPs/token, needed": ("flops_per_token", short),
               "FLOPs/token, executed": ("executed_flops_per_token", short), "steps": ("steps", show),
               "training FLOPs": ("training_flops", short), "seconds a run": ("seconds", show),
               "MiB added": ("memory_mib", lambda mib: show(mib) if mib else NOT_MEASURED)}
    costs = {name: {**vars(variant), "training_flops": effects.training_flops(variant)}
             for name, variant in chosen(study.arms, only).items()}

    def cell(name, key, form):
        ratio = number(costs[name].get(key)) / (number(costs["plain"].get(key)) or math.nan)
        alone = name == "plain" or key == "seconds"  # which other work on the machine has its part in
        return form(costs[name].get(key)) + f" ({ratio:.2f} ×)" * bool(known(ratio) and ratio and not alone)

    rows = [(label_of(study, name), *(cell(name, *column) for column in columns.values()),
             interval(own["time_ratio"], ".2f") if own["time_ratio"] else NOT_MEASURED)
            for name, own in costs.items()]
    return Table(("variant", *columns, f"time of a step × [{level(study)}]"), rows)


def dynamic_tables(study, only=None):
    """The dynamic heads: figures a row, variants a column; then states, and roles; [] where not measured."""
    runs = {name: seeds for name, seeds in chosen(study.lives, only).items()
            if study.arms[name].kind != "budget"}
    if not runs:
        return []

    def cell(value, digits):
        if value is None:
            return "–"
        mean, half = value
        return show(mean, f".{digits}f") + (f" ±{show(half, f'.{digits}f')}" if half else "")

    variants, means = list(runs), means_over_seeds(runs)
    head = ("mean over seeds, ± 95 %", *(label_of(study, name) for name in variants))
    rows = [(title, *(cell(means[name][key], digits) for name in variants))
            for key, (title, digits) in FIGURES.items() if any(means[name][key] for name in variants)]
    tables = [Table(head, rows, (0,))]
    for what, title in (("occupancy", "share of time in a state"),
                        ("engagement", "output sent, x equal share")):
        each = shares(runs, what)
        keys = dict.fromkeys(key for own in each.values() for key in own)
        rows = [(key, *(show(each.get(name, {}).get(key), ".3f") for name in variants)) for key in keys]
        tables += [Table((title, *head[1:]), rows, (0,))] if rows else []
    return tables


def at_edge(scores):
    """Whether the best of {factor: bits/byte} has the lowest or the highest factor."""
    tried = sorted((float(factor), bpb) for factor, bpb in scores.items() if known(bpb))
    return len(tried) > 1 and min(tried, key=lambda pair: pair[1]) in (tried[0], tried[-1])


def tuned_table(study, only=None):
    """Bits/byte on validation of each variant, optimizer group and factor of its rates; the cost in runs."""
    tuned = chosen(study.tuned, only)
    factors = sorted({key for own in tuned.values() for group in own.values() for key in group}, key=float)
    rows = []
    for name, own in tuned.items():
        # the run at the rates as they are is the same for all groups
        runs = 1 + sum(float(factor) != 1 for scores in own.values() for factor in scores)
        for group, scores in own.items():
            best = min(scores, key=lambda factor: (not known(scores[factor]), number(scores[factor])))
            tried = (show(scores.get(factor), ".4f") for factor in factors)
            rows.append((label_of(study, name), group, *tried,
                         f"× {float(best):g}" + ", at the edge" * at_edge(scores), str(runs)))
    head = ("variant", "rates", *(f"× {float(factor):g}" for factor in factors), "best", "runs of it")
    return Table(head, rows, (0, 1, len(factors) + 2))


def candidates_table(study, only=None):
    """Validation bits/byte of each variant as it is, at each group's best rate and at all; which is taken."""
    rows = []
    for name, own in chosen(study.candidates, only).items():
        for i, each in enumerate(own):
            rates = ", ".join(f"{group} × {factor:g}" for group, factor in each.rates.items())
            scores, taken = list(each.bpb.values()), study.taken[name] == i
            rows.append((label_of(study, name), rates or "as they are", str(len(scores)),
                         show(mean_of(scores), ".4f"), "taken" * taken))
    return Table(("variant", "rates", "seeds", "bits/byte, validation", "taken"), rows, (0, 1, 4))


def ladder_table(studies):
    """Each variant's difference to the plain GPT and its worth, in studies of several sizes, one by one."""
    rows = [("plain GPT", study.size, "–", score_of(study, "plain"), own_interval(study), "–", "1")
            for study in studies]
    for name in dict.fromkeys(c.variant for study in studies for c in against_plain(study)):
        for study in studies:
            rows += [(label_of(study, name), study.size, verdict_of(study, c), score_of(study, name),
                      interval(c), p_of(c), worth_of(c)) for c in against_plain(study, [name])]
    gap = head_of_difference(studies[0])
    head = ("variant", "size", "verdict", "bits/byte", gap, "corrected p", "worth × compute")
    return Table(head, rows, (0, 1, 2))


def settings_of(study):
    """[(heading, text)]: what was run, on what, with what."""
    d, m = study.data, study.machine
    part = f" of {d.of_bytes:,}" if known(d.of_bytes) and d.of_bytes != d.bytes else ""
    size = f"{show(d.tokens)} tokens, {show(d.bytes)}{part} bytes"
    commit = study.commit or "unknown"
    more = sum(map(known, study.arms["plain"].bpb))
    rows = [("Study", f"{study.name}, {study.scale} scale, {study.date}, commit {commit}"),
            ("Seeds", f"{', '.join(map(str, study.seeds))}, of the plain GPT {more}; "
                      f"{study.done} of {plural(study.planned, 'run')} done"),
            ("Scored", f"{d.dataset}, {d.split} split: {d.name}, {d.context}; {size}")]
    if d.note:
        rows.append(("Note on the data", d.note))
    if study.settings:
        flags = ", ".join(f"{key}={value}" for key, value in study.settings.items())
        rows.append(("On both sides", flags))
    cores = plural(m.cores, "core") if known(m.cores) else "– cores"
    at_once = f"runs at once: {show(m.jobs)}, threads of each: {m.threads or '–'}"
    rows.append(("Machine", f"{m.processor or '–'}, {cores}, {m.system}; {at_once}"))
    versions = ", ".join(f"{package} {version}" for package, version in study.versions.items())
    return [*rows, ("Versions", versions)]
