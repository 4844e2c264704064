"""
Differences in bits/byte as training compute: how much of it the plain GPT needs for a variant's score, what
a variant is worth at equal cost, and whether its effect grows with the size of the model.

The plain GPT of one size is trained at several multiples of the budget, in steps: FLOPs and time are the same
multiples. A difference is variant minus plain at multiple 1, in bits/byte: below 0 is better. It comes with
its standard error and degrees of freedom (stats.py), which hold the plain GPT's mean at multiple 1 once.
"""

import math
from typing import NamedTuple, Optional

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import f as f_distribution
from scipy.stats import t

from nanoheads.common import UserError, json_safe

NOT_FALLING = "the plain GPT's bits/byte does not fall all along its budgets: nothing can be said in compute"
# bits/byte that no training can go below: more than 0, and the best compressors of English need less than 1
FLOORS = (0.0, 1.0)
EXPONENTS = np.linspace(-3, 3, 241)  # of an effect over sizes; an interval that reaches an end is open


# ---- one size ----

class Curve:
    """The plain GPT's bits/byte against L = log(multiple of the budget): start + slope L + bend L^2.

    plain: {multiple: [bits/byte of each seed]}, 1 among at least two multiples. Least squares over all runs;
    with two multiples there is no bend. Their spread over seeds is pooled: with one seed at each multiple it
    is unknown, and every error infinite. Valid from the smallest to the largest multiple. Raises UserError.
    """

    def __init__(self, plain):
        self.multiples = sorted(float(m) for m in plain)
        runs = [np.asarray(plain[m], np.float64) for m in sorted(plain)]
        if len(runs) < 2 or 1.0 not in self.multiples or self.multiples[0] <= 0:
            raise UserError(f"budgets {self.multiples} of the plain GPT: two or more above 0, with 1")
        for m, scores in zip(self.multiples, runs):
            if not scores.size or not np.isfinite(scores).all():
                raise UserError(f"the plain GPT at {m:g} x the budget needs scores that are finite: {scores}")
        n, means = np.array([scores.size for scores in runs]), np.array([scores.mean() for scores in runs])
        self.low, self.high = self.multiples[0], self.multiples[-1]
        terms = min(len(runs), 3)
        x = self.powers(self.multiples)[:, :terms]
        # [3, 3], times the variance of one run: the covariance of start, slope, bend
        self.unit = np.zeros((3, 3))
        self.unit[:terms, :terms] = np.linalg.inv(x.T @ (n[:, None] * x))
        self.coefficients = self.unit[:, :terms] @ (x.T @ (n * means))
        self.df = int(n.sum() - len(runs))
        within = sum(((scores - scores.mean()) ** 2).sum() for scores in runs)
        self.variance = float(within) / self.df if self.df else math.inf
        at_one = self.multiples.index(1.0)
        self.score, self.n = float(means[at_one]), int(n[at_one])

    @staticmethod
    def powers(multiple):
        logs = np.log(np.asarray(multiple, np.float64))
        return np.stack([np.ones_like(logs), logs, logs * logs], -1)

    def value(self, multiple):
        """Bits/byte at a multiple; nan outside the measured ones."""
        return self.inside(multiple, self.powers(multiple) @ self.coefficients)

    def se(self, multiple):
        """Standard error of value(multiple)."""
        x = self.powers(multiple)
        return self.inside(multiple, np.sqrt(self.variance * np.einsum("...i,ij,...j", x, self.unit, x)))

    def inside(self, multiple, value):
        """value, and nan where the multiple is not among the measured ones."""
        m = np.asarray(multiple)
        return np.where((self.low <= m) & (m <= self.high), value, math.nan)[()]

    def steepness(self, multiple):
        """Bits/byte for one more unit of L."""
        return self.coefficients[1] + 2 * self.coefficients[2] * np.log(multiple)

    @property
    def falls(self):
        """Whether more compute is better all along: a parabola does where it does at both ends."""
        return self.steepness(self.low) < 0 and self.steepness(self.high) < 0

    def inverse(self, bpb):
        """The multiple at which the plain GPT has these bits/byte; None outside the measured ones."""
        if not (self.falls and self.value(self.high) <= bpb <= self.value(self.low)):
            return None
        return float(brentq(lambda m: self.powers(m) @ self.coefficients - bpb, self.low, self.high))


def minus_plain(curve, mean, se, df, multiple):
    """(difference, standard error, degrees of freedom) of a variant to the plain GPT at multiples [...].

    mean - (curve(m) - curve(1)), so that at 1 it is the difference itself. The plain runs at 1 are in both
    parts, and the error counts them once: a variant's runs are independent of the plain ones, so that
    cov(mean, plain score) is -variance / n, or as much of it as a variant's smaller error (paired seeds,
    moderated variance) leaves room for. Degrees of freedom as Welch and Satterthwaite.
    """
    if not (se >= 0 and df > 0 and math.isfinite(se)):
        se, df = math.inf, 1.0  # one seed: nothing is known of the error
    change = curve.powers(multiple) - [1, 0, 0]
    shared = curve.variance / curve.n
    share = 1.0 if shared <= se * se else se / math.sqrt(shared)
    # cov(plain score at 1, curve) is cov(start, curve): least squares has it so
    extra = np.einsum("...i,ij,...j", change, curve.unit, change) + 2 * share * change @ curve.unit[:, 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        extra = np.where(extra == 0, 0.0, curve.variance * extra)
        total = np.maximum(se * se + extra, 0.0)
        degrees = total ** 2 / (se ** 4 / df + extra ** 2 / max(curve.df, 1))
    # never below both: what takes away from the error is correlated with what it is taken from
    degrees = np.where(np.isfinite(degrees), np.maximum(degrees, min(df, max(curve.df, 1))), df)
    return mean - change @ curve.coefficients, np.sqrt(total), degrees


class Worth(NamedTuple):
    """A variant as a multiple of the plain GPT's compute, with its interval: None where that is not measured.

    beyond: "less" than smallest or "more" than largest, the measured multiples, where mean is None; low None
    and high None: the interval goes on below, above them. problem: a sentence, where there is no number.
    """

    mean: Optional[float]
    low: Optional[float]
    high: Optional[float]
    smallest: float
    largest: float
    beyond: Optional[str] = None
    problem: Optional[str] = None

    def words(self):
        if self.problem:
            return self.problem
        less, more = f"less than {self.smallest:g}", f"more than {self.largest:g}"
        value = less if self.beyond == "less" else more if self.beyond == "more" else f"{self.mean:.2f}"
        if self.beyond and self.low is not None and self.low == self.high:  # so is the whole interval
            return f"worth {value} x of the plain GPT's training compute"
        low = less if self.low is None else f"{self.low:.2f}"
        high = more if self.high is None else f"{self.high:.2f}"
        return f"worth {value} x [{low}, {high}] of the plain GPT's training compute"


def worth(curve, mean, se, df, level=0.95):
    """Worth of a variant: the multiple at which the plain GPT has its score.

    The interval reaches over the multiples at which a t test at 1 - level does not tell the variant from the
    plain GPT (Fieller): it leaves out 1 only where the difference's own interval leaves out 0.
    """
    if not curve.falls:
        return Worth(None, None, None, curve.low, curve.high, problem=NOT_FALLING)
    if not math.isfinite(mean):
        return Worth(None, None, None, curve.low, curve.high, problem="no difference was measured")

    def difference(multiple):
        return minus_plain(curve, mean, se, df, multiple)[0]

    def surplus(multiple):  # above 0: shown to differ
        apart, error, degrees = minus_plain(curve, mean, se, df, multiple)
        return abs(apart) - t.isf((1 - level) / 2, degrees) * error

    def edge(inside, outside):
        apart = surplus(inside) < 0 < surplus(outside)
        return float(brentq(surplus, inside, outside)) if apart else float(inside)

    beyond = "less" if difference(curve.low) > 0 else "more" if difference(curve.high) < 0 else None
    root = None if beyond else float(brentq(difference, curve.low, curve.high))
    tried = np.union1d(np.linspace(curve.low, curve.high, 501), [1.0] if beyond else [1.0, root])
    held = (surplus(tried) <= 0) | (tried == root)
    if not held.any():
        end = curve.low if beyond == "less" else curve.high
        return Worth(None, end, end, curve.low, curve.high, beyond)
    first, last = np.flatnonzero(held)[[0, -1]]
    low = None if first == 0 or beyond == "less" else edge(tried[first], tried[first - 1])
    high = None if last == len(tried) - 1 or beyond == "more" else edge(tried[last], tried[last + 1])
    return Worth(root, low, high, curve.low, curve.high, beyond)


class Difference(NamedTuple):
    """A difference in bits/byte with its interval and two-sided p, uncorrected; no ends (None): one seed."""

    mean: float
    low: Optional[float]
    high: Optional[float]
    p: float


def at_equal_cost(curve, mean, se, df, cost_ratio, level=0.95):
    """Difference of a variant to the plain GPT trained at its cost; None outside the measured budgets.

    cost_ratio: what the variant took over what plain took, executed FLOPs or time, taken as exact.
    """
    if not curve.low <= cost_ratio <= curve.high:
        return None
    difference, error, df = (float(v) for v in minus_plain(curve, mean, se, df, cost_ratio))
    if not math.isfinite(error):
        return Difference(difference, None, None, 1.0)
    half = float(t.isf((1 - level) / 2, df)) * error
    p = 2 * float(t.sf(abs(difference) / error, df)) if error else float(difference == 0)
    return Difference(difference, difference - half, difference + half, p)


def margin_as_compute(curve, margin):
    """(worse, better): multiples at which the plain GPT is this much worse, better; None: not measured."""
    return curve.inverse(curve.value(1.0) + margin), curve.inverse(curve.value(1.0) - margin)


# ---- over sizes ----

def ladder(sizes, held_out=None, level=0.95):
    """What changes with the size of the model, as a dict for JSON: figures, and sentences for the page.

    sizes: {N: {"plain": {multiple: [bits/byte]}, "arms": {variant: (mean, se, df)}}}, N the parameters of the
    blocks, each trained on as many bytes a parameter; held_out: the N that no fit sees and that checks them.
    Models: see variant_over_sizes, exponent_of_all, plain_over_sizes. Intervals are of one variant each,
    not corrected for their number. Of two fitted sizes an interval holds the noise of the runs, not that the
    model may be wrong: only the held-out size speaks of that. Raises UserError.
    """
    fitted = sorted(n for n in sizes if n != held_out)
    if len(fitted) < 2 or held_out not in (None, *sizes):
        raise UserError(f"sizes {sorted(sizes)}, held out {held_out}: two others are needed")
    curves = {n: Curve(sizes[n]["plain"]) for n in sizes}
    names = dict.fromkeys(name for n in sorted(sizes) for name in sizes[n]["arms"])
    effects = {name: {n: sizes[n]["arms"][name] for n in sorted(sizes) if name in sizes[n]["arms"]}
               for name in names}
    arms = {name: variant_over_sizes(curves, effects[name], fitted, held_out, level) for name in names}
    return json_safe(dict(level=level, fitted=fitted, held_out=held_out, arms=arms,
                          plain=plain_over_sizes(curves, fitted, held_out, level),
                          exponent=exponent_of_all(curves, effects, fitted, held_out, level)))


def line_weights(x, at):
    """(weights of the slope, of the height at `at`) in the values [n] of a least-squares line over x [n].

    Every size counts the same: weights that are not estimated keep the interval right with few seeds.
    """
    x = np.asarray(x, np.float64)
    slope = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    return slope, 1 / len(x) + (at - x.mean()) * slope


def half_width(weights, errors, dfs, level):
    """Half the interval of a weighted sum of independent values; Welch's and Satterthwaite's df."""
    parts = (np.asarray(weights) * errors) ** 2
    if not 0 < parts.sum() < math.inf:
        return math.sqrt(parts.sum())
    df = parts.sum() ** 2 / (parts ** 2 / np.maximum(dfs, 1e-9)).sum()
    return float(t.isf((1 - level) / 2, df)) * math.sqrt(parts.sum())


def span(low, high):
    """The interval for a sentence; too few seeds: none."""
    return f"[{low:.3g}, {high:.3g}]" if math.isfinite(high - low) else "(too few seeds for an interval)"


def checked(predicted, low, high, measured, n, unit=""):
    """A prediction beside what was measured; the interval is that of a new measurement, with its noise."""
    inside = bool(low <= measured <= high) if math.isfinite(high - low) else None
    where = {True: ": inside", False: ": outside", None: ""}[inside]
    sentence = (f"the held-out size {n:,}: predicted {predicted:.3g}{unit} {span(low, high)}, "
                f"measured {measured:.3g}{unit}{where}")
    return dict(predicted=predicted, low=low, high=high, measured=measured, inside=inside, sentence=sentence)


def variant_over_sizes(curves, effects, fitted, held_out, level):
    """One variant: log(worth) = a + slope log N, a straight line. effects: {N: (mean, se, df)}.

    Where the interval of the slope leaves out 0, the gain (a worth above 1 at all fitted sizes) or the loss
    (below 1) grows or shrinks with size; where the sizes are not on one side of 1, the worth does.
    """
    worths = {n: worth(curves[n], *effect, level) for n, effect in effects.items()}
    result = dict(effects={n: list(effect) for n, effect in effects.items()},
                  worth={n: {**each._asdict(), "words": each.words()} for n, each in worths.items()},
                  slope=None, verdict="cannot be told", held_out=None)
    used = [n for n in fitted if n in effects]
    without = [f"at {n:,}, {worths[n].words()}" for n in used if worths[n].mean is None]
    if len(used) < 2 or without:
        reason = "; ".join(without) or "it was measured at fewer than two sizes"
        return {**result, "sentence": f"cannot be told whether it grows with size: {reason}"}
    logs = {n: log_worth(curves[n], *effects[n], each.mean) for n, each in worths.items() if each.mean}
    values, errors, dfs = np.transpose([logs[n] for n in used])
    weights, at_held_out = line_weights(np.log(used), math.log(held_out or used[-1]))
    slope, half = weights @ values, half_width(weights, errors, dfs, level)
    result["slope"] = dict(mean=slope, low=slope - half, high=slope + half)
    what = "gain" if min(values) > 0 else "loss" if max(values) < 0 else "worth"
    if abs(slope) > half:
        grows = (slope > 0) != (what == "loss")
        result["verdict"] = f"the {what} {'grows' if grows else 'shrinks'} with size"
    with np.errstate(over="ignore"):
        tenfold = np.exp(math.log(10) * np.array([slope, slope - half, slope + half]))
    story = ", ".join(f"{worths[n].mean:.2f} x at {n:,}" for n in used)
    result["sentence"] = (f"{result['verdict']}: worth {story} of the plain GPT's compute, "
                          f"times {tenfold[0]:.3g} {span(*tenfold[1:])} for ten times the parameters")
    if held_out in worths and held_out not in logs:
        sentence = f"the held-out size {held_out:,}, which could not be checked: {worths[held_out].words()}"
        result["held_out"] = dict(inside=None, sentence=sentence)
    if held_out in logs:
        measured, error, df = logs[held_out]
        predicted = at_held_out @ values
        half = half_width([*at_held_out, 1], [*errors, error], [*dfs, df], level)
        with np.errstate(over="ignore"):
            bounds = np.exp([predicted, predicted - half, predicted + half, measured]).tolist()
        result["held_out"] = checked(*bounds, held_out, " x")
    return result


def log_worth(curve, mean, se, df, multiple):
    """(log of a worth, standard error, degrees of freedom), to first order."""
    _, error, degrees = minus_plain(curve, mean, se, df, multiple)
    return math.log(multiple), float(error) / abs(curve.steepness(multiple)), float(degrees)


def plain_over_sizes(curves, fitted, held_out, level):
    """The plain GPT at multiple 1: floor + A N^-alpha, a straight line in log(bits/byte - floor), log N.

    Two or three sizes do not show the floor, so it is not fitted: everything is given for a floor of
    0 and of 1 bit/byte (FLOORS), and the prediction reaches from the lower to the higher of them.
    """
    scores = np.array([curves[n].score for n in fitted])
    errors = np.array([math.sqrt(curves[n].variance / curves[n].n) for n in fitted])
    dfs = np.array([curves[n].df for n in fitted])
    weights, at_held_out = line_weights(np.log(fitted), math.log(held_out or fitted[-1]))
    alphas, predictions = {}, []
    for floor in (floor for floor in FLOORS if floor < scores.min()):
        logs = np.log(scores - floor)
        alpha, half = -weights @ logs, half_width(weights / (scores - floor), errors, dfs, level)
        alphas[f"{floor:g}"] = dict(mean=alpha, low=alpha - half, high=alpha + half)
        if held_out is not None:
            above, new = math.exp(at_held_out @ logs), curves[held_out]
            half = half_width([*above * at_held_out / (scores - floor), 1],
                              [*errors, math.sqrt(new.variance / new.n)], [*dfs, new.df], level)
            predictions.append((floor + above, floor + above - half, floor + above + half))
    story = ", ".join(f"{a['mean']:.3g} {span(a['low'], a['high'])} if it is {floor}"
                      for floor, a in alphas.items())
    result = dict(scores={n: curves[n].score for n in sorted(curves)}, alpha=alphas, held_out=None,
                  sentence=f"the plain GPT's bits/byte: floor + A N^-alpha, floor unknown, alpha {story}")
    if predictions:
        means, lows, highs = zip(*predictions)
        bounds = sum(means) / len(means), min(lows), max(highs), curves[held_out].score
        result["held_out"] = checked(*bounds, held_out)
    return result


def exponent_of_all(curves, effects, fitted, held_out, level):
    """All variants together: effect = c N^b in bits/byte, a c for each variant and one b, by least squares.

    Only variants with an error at every fitted size. Those of a size share its plain GPT: their errors'
    covariance is its variance (held below half of a variant's: plain has as many seeds as that, or more).
    The interval of b inverts a score test: at the true b what is left over is independent of the estimates
    of c, so that it holds its level however weak the effects are. Open (None) where they say nothing of b.
    """
    names = [name for name, at in effects.items()
             if all(n in at and 0 < at[n][1] < math.inf and at[n][2] > 0 for n in fitted)]
    result = dict(arms=names, b=None, low=None, high=None, p_shared=None, held_out={},
                  sentence="one exponent for all variants: cannot be estimated")
    if not names or not all(curves[n].df for n in fitted):
        return result
    middle = math.exp(np.log(fitted).mean())
    log_r = np.log(np.array(fitted) / middle)
    means, errors, dfs = np.moveaxis(np.array([[effects[a][n] for a in names] for n in fitted], float), 2, 0)
    df, whiten = float(dfs.min()), []
    for n, error in zip(fitted, errors):
        shared = np.minimum(math.sqrt(curves[n].variance / curves[n].n), error * math.sqrt(0.5))
        covariance = np.diag(error ** 2 - shared ** 2) + np.outer(shared, shared)
        whiten.append(np.linalg.inv(np.linalg.cholesky(covariance)))
    y = np.concatenate([w @ row for w, row in zip(whiten, means)])

    def fit(b):
        """(sum of squares, score over its error, (c, cov(c), what c takes of b, information on b))."""
        x = np.concatenate([w * math.exp(b * r) for w, r in zip(whiten, log_r)])  # (sizes * n, n)
        c = np.linalg.lstsq(x, y)[0]
        left = y - x @ c
        along = np.concatenate([w @ c * r * math.exp(b * r) for w, r in zip(whiten, log_r)])
        taken = np.linalg.lstsq(x, along)[0]
        along = along - x @ taken
        information = max(along @ along, 1e-300)
        details = c, np.linalg.inv(x.T @ x), taken, information
        return left @ left, along @ left / math.sqrt(information), details

    squares, scores = np.transpose([fit(b)[:2] for b in EXPONENTS])
    best = int(squares.argmin())
    held = np.union1d(np.flatnonzero(abs(scores) <= t.isf((1 - level) / 2, df)), best)
    if best in (0, len(EXPONENTS) - 1) or held[0] == 0 or held[-1] == len(EXPONENTS) - 1:
        return result
    found = minimize_scalar(lambda b: fit(b)[0], bounds=EXPONENTS[[best - 1, best + 1]], method="bounded")
    b, (low, high) = float(found.x), EXPONENTS[[held[0] - 1, held[-1] + 1]]
    more = y.size - len(names) - 1
    p = float(f_distribution.sf(found.fun / more, more, df)) if more else None
    trend = "grow" if low > 0 else "shrink" if high < 0 else "neither grow nor shrink for certain"
    fits = p is None or p > 1 - level
    doubt = "" if fits else f"; but one exponent does not fit all variants (p = {p:.2g})"
    result.update(b=b, low=low, high=high, p_shared=p, sentence=(
        f"effects in bits/byte {trend} with size, as N^{b:.2f} {span(low, high)}{doubt}"))
    c, cov, taken, information = fit(b)[2]
    for i, name in enumerate(names):
        if held_out in effects[name]:
            measured, error, new_df = effects[name][held_out]
            log, scale = math.log(held_out / middle), (held_out / middle) ** b
            own = scale * math.sqrt(cov[i, i] + (log * c[i] - taken[i]) ** 2 / information)
            half, effect = half_width([1, 1], [own, error], [df, new_df], level), scale * c[i]
            result["held_out"][name] = checked(effect, effect - half, effect + half, measured, held_out)
    return result
