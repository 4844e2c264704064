"""
What is each head needed for? What it sends and what its absence costs, by kind of text.

pattern   a few random tokens, again and again; scored is the last time
copying   the separator, random tokens, the separator, the same tokens; scored where they come again
needle    text with a needle of random tokens that begins again at the end; scored is the rest of it
late      windows of the split; scored is the last quarter of each
natural   other windows of the split; every token is scored

Random tokens are the frequent ones of the split, each as likely. Gain: nats per scored token of a control,
less those of the text; above 0, the model does what the text asks. The control has nothing to copy: other
random tokens stand where those that come again came before. For late it is the last quarter alone.

Engagement: norm of what a head sends at scored tokens, all gates included, over the mean of its block's.
Cost: rise of the loss with the head's gate at 0, in nats per scored token, with every other head active,
whatever states the checkpoint has. Critical: a cost whose interval is above 0, among the largest quarter of
the model's. The first alone would name nearly every head once there are texts enough, the second alone would
name heads where none is needed.

Kept: how many critical heads the states leave at work, beside a random choice of as many heads at work
(hypergeometric, over all checkpoints, two-sided p); factor: what states multiply a head's output by.
"""

from contextlib import contextmanager
from itertools import combinations
from typing import NamedTuple, Optional

import numpy as np
import torch
from scipy.stats import hypergeom

from model import Agency, Roles
from nanoheads.common import UserError, plural, table
from nanoheads.intervals import t_interval
from nanoheads.scoring import LOGITS_AT_ONCE, nats_of_last
from nanoheads.timing import progress_bar
from lab.heads.measuring import (all_heads, attentions, closed, even_starts, ids_at, inputs_of,
                                 out_projections)
from lab.probes.detectors import common_tokens, joined
from lab.probes.intervals import by_jackknife
from lab.probes.shared import (CONTEXT, about_text, ask, finite, numbers_of, open_checkpoints, plus_minus,
                               positive)

AT_ONCE = 8192  # tokens in a forward pass
QUARTER = 4     # the critical heads are among the first 1/4 by cost


# ---- texts ----

class Kind(NamedTuple):
    """Texts of one kind, ids [B, 1 + T], of which the last `scored` are scored; control [B, 1 + T']: the same
    without what could help.
    """
    ids: np.ndarray
    scored: int
    control: Optional[np.ndarray] = None


def pattern_texts(alphabet, period, context, samples, separator, rng):
    """The separator, then a pattern of `period` random tokens that fills the context."""
    ids = np.tile(rng.choice(alphabet, (samples, period)), (1, -(-context // period)))[:, :context]
    other = rng.choice(alphabet, (samples, context - period))
    return Kind(joined(separator, ids), period, joined(separator, other, ids[:, -period:]))


def copying_texts(alphabet, n, samples, separator, rng):
    """The separator, n random tokens, and all that again."""
    half, other = rng.choice(alphabet, (2, samples, n))
    return Kind(joined(separator, half, separator, half), n, joined(separator, other, separator, half))


def needles(text, alphabet, context, n, samples, rng):
    """(ids [samples, context], where the needle begins [samples]).

    A needle of n random tokens, no two the same where the alphabet has as many, is planted into real text at
    a random place; the text ends in all but its last token.
    """
    ids, at = [], rng.integers(context - 2 * n + 2, size=samples)
    for place in at:
        start = rng.integers(len(text) - context + 1)
        rest = text[start:start + context - 2 * n + 1]
        needle = rng.choice(alphabet, n, replace=len(alphabet) < n)
        ids.append(np.concatenate((rest[:place], needle, rest[place:], needle[:-1])))
    return np.array(ids).astype(np.int64), at


def needle_texts(text, alphabet, context, n, asked, samples, rng):
    """needles(), to the end of the needle that begins again; its first `asked` tokens ask."""
    ids, at = needles(text, alphabet, context, n, samples, rng)
    rows, places = np.arange(samples)[:, None], at[:, None] + np.arange(n)
    ids = joined(ids, ids[rows, places[:, -1:]])
    control = ids.copy()
    control[rows, places] = rng.choice(alphabet, (samples, n))
    return Kind(ids, n - asked, control)


def window_texts(text, context, samples):
    """(late, natural): windows by turns, evenly spaced."""
    ids = ids_at(text, even_starts(text, 2 * samples, context), context + 1).numpy()
    late, quarter = ids[1::2], context // 4
    return Kind(late, quarter, late[:, -1 - quarter:]), Kind(ids[::2], context)


def texts_of(args, data, context):
    """{name: Kind} of the five kinds. UserError, ValueError."""
    rng, text, samples = np.random.default_rng(args.seed), data.tokens(args.split), args.samples
    if samples < 2:
        raise UserError(f"--samples={samples} must be at least 2: one text has no interval")
    if context < 16:
        raise UserError(f"a context of {context} tokens is too short for a needle: at least 16")
    if len(text) < 2 * samples * context + 1:
        raise UserError(f"--samples={samples}: {2 * samples:,} windows of {context:,} tokens are more than "
                        f"{args.split} of {data.dir} has, {len(text):,} tokens")
    if 2 * args.period > context:
        raise ValueError(f"--period={args.period} must be at most {context // 2}, half of the context")
    n, size = min(64, (context - 1) // 2), min(12, context // 3)
    alphabet = common_tokens(text)
    found = dict(pattern=pattern_texts(alphabet, args.period, context, samples, data.separator, rng),
                 copying=copying_texts(alphabet, n, samples, data.separator, rng),
                 needle=needle_texts(text, alphabet, context, size, size // 3, samples, rng))
    found["late"], found["natural"] = window_texts(text, context, samples)
    return found


# ---- a model on texts of one kind ----

def in_portions(ids):
    """ids [B, 1 + T] in a few rows at a time."""
    return ids.split(max(1, AT_ONCE // ids.size(1)))


@torch.no_grad()
def last_nats(model, ids, n):
    """-log p of the last n of ids [B, 1 + T], float64 [B, n]."""
    most = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    return np.concatenate([nats_of_last(model, part, n, most) for part in in_portions(ids)])


@torch.no_grad()
def power_sent(model, ids, n):
    """[B, heads of all blocks], float64: the squared norm of what each head sends, mean of the n last tokens
    that are read of ids [B, 1 + T].
    """
    outs = [(size, attn.head_size, out) for attn in attentions(model)
            for size, out in zip((attn.n_head, attn.n_extra), out_projections(attn))]
    rows = []
    for part in in_portions(ids):
        with inputs_of([out for *_, out in outs]) as ys:
            model.hidden(part[:, :-1])
        row = []
        for (size, D, out), y in zip(outs, ys):
            if y is None:  # constraint heads that no token opens
                row.append(torch.zeros(len(part), size, dtype=torch.float64))
                continue
            y = y[:, -n:].cpu().double().unflatten(-1, (size, D))
            weight = out.weight.cpu().double().unflatten(-1, (size, D))
            gram = torch.einsum("cnd,cne->nde", weight, weight)
            row.append((torch.einsum("btnd,nde->btne", y, gram) * y).sum((1, 3)) / n)
        rows.append(torch.cat(row, 1))
    return torch.cat(rows).numpy()


def equal_shares(power, sizes):
    """[..., heads]: norms of mean squares, over the mean norm of each block's heads; sizes: heads a block."""
    norms = np.split(np.sqrt(np.maximum(power, 0.0)), np.cumsum(sizes)[:-1], axis=-1)
    return np.concatenate([n / np.maximum(n.mean(-1, keepdims=True), 1e-30) for n in norms], -1)


def engagements(power, sizes):
    """[[value, low, high] a head] of power [B, heads]; the interval by the jackknife over texts."""
    total = power.sum(0)
    without = np.concatenate((total[None] / len(power), (total - power) / (len(power) - 1)))
    return [by_jackknife(values) for values in equal_shares(without, sizes).T]


@contextmanager
def all_active(model):
    """The model with every head's state active, and then as it was."""
    agencies = [attn.agency for attn in attentions(model) if attn.agency is not None]
    before = [(agency.state.clone(), agency.consent.clone()) for agency in agencies]
    for agency in agencies:
        agency.state.zero_()
        agency.consent.fill_(True)
    try:
        yield
    finally:
        for agency, (state, consent) in zip(agencies, before):
            agency.state.copy_(state)
            agency.consent.copy_(consent)


def critical_heads(costs):
    """The numbers, dearest first, of costs [[mean, low, high]] above 0 that are among the first quarter."""
    dearest = sorted(range(len(costs)), key=lambda i: -costs[i][0])[:max(1, len(costs) // QUARTER)]
    return [i for i in dearest if costs[i][1] > 0]


def heads_of(model):
    """[dict(layer, head)] of every head, where it has them with its state, the state's factor, its role."""
    rows = [dict(layer=layer, head=head) for layer, head in all_heads(model)]
    by_layer = [[row for row in rows if row["layer"] == i] for i in range(model.config.n_layer)]
    for attn, own in zip(attentions(model), by_layer):
        if attn.agency is not None:
            factors = attn.agency.static_gate().tolist()
            for row, state, factor in zip(own, attn.agency.state.tolist(), factors):
                row.update(state=list(Agency.STATES)[state], factor=factor)
        if model.config.roles:
            for row, head in zip(own, attn.head_ids):
                row["role"] = Roles.role_of(model.config, head)
    return rows


def result_of(ckpt, kinds, progress):
    """What is written of a checkpoint: heads by kind of text, how well it reads each, the critical ones."""
    model, heads = ckpt.model, heads_of(ckpt.model)
    found = dict(heads=heads, texts={}, critical={})
    sizes = [attn.n_total for attn in attentions(model)]
    for name, kind in kinds.items():
        ids = torch.from_numpy(kind.ids).to(model.lm_head.weight.device)
        nats = finite(last_nats(model, ids, kind.scored), ckpt).mean(1)
        text = dict(nats=float(nats.mean()), gain=None)
        if kind.control is not None:
            control = last_nats(model, torch.from_numpy(kind.control).to(ids.device), kind.scored)
            text["gain"] = t_interval(control.mean(1) - nats)
        engaged, costs = engagements(power_sent(model, ids, kind.scored), sizes), []
        with all_active(model):
            every = finite(last_nats(model, ids, kind.scored), ckpt).mean(1)
            text["nats_all_active"] = float(every.mean())
            for row in heads:
                with closed(model, [(row["layer"], row["head"])]):
                    without = finite(last_nats(model, ids, kind.scored), ckpt).mean(1)
                costs.append(t_interval(without - every))
                progress.update(1)
        for row, share, cost in zip(heads, engaged, costs):
            row[name] = dict(engagement=share, cost=cost)
        found["texts"][name] = text
        found["critical"][name] = [[heads[i]["layer"], heads[i]["head"]] for i in critical_heads(costs)]
    return found


# ---- all checkpoints together ----

def by_chance(cases):
    """dict(hits, of, expected, p) of cases (heads, marked, drawn, hits), beside drawing each by chance.

    hits: marked among the drawn. p: the probability, two-sided, of sums that are no likelier than this one.
    """
    chance, total, expected = np.ones(1), 0, 0.0
    for n, marked, drawn, hits in cases:
        chance = np.convolve(chance, hypergeom.pmf(np.arange(marked + 1), n, marked, drawn))
        total, expected = total + hits, expected + marked * drawn / n
    p = chance[chance <= chance[total] * (1 + 1e-9)].sum()
    return dict(hits=total, of=sum(case[1] for case in cases), expected=expected, p=float(min(1.0, p)))


def overlaps(results, kinds):
    """[dict(of two kinds, by_chance() of the heads that are critical on both)] for every two kinds."""
    rows = []
    for a, b in combinations(kinds, 2):
        cases = []
        for each in results:
            one, other = ({*map(tuple, each["critical"][name])} for name in (a, b))
            cases.append((len(each["heads"]), len(one), len(other), len(one & other)))
        rows.append(dict(kinds=[a, b], **by_chance(cases)))
    return rows


def kept(results, kinds):
    """{kind: by_chance() of critical heads at work, and factors}; {} where no checkpoint has states."""
    results, found = [each for each in results if "factor" in each["heads"][0]], {}
    for name in kinds if results else ():
        cases, factors, every = [], [], []
        for each in results:
            factor = {(row["layer"], row["head"]): row["factor"] for row in each["heads"]}
            own = [factor[tuple(at)] for at in each["critical"][name]]
            at_work = sum(value > 0 for value in factor.values())
            cases.append((len(factor), len(own), at_work, sum(value > 0 for value in own)))
            if own:
                factors.append(np.mean(own))
                every.append(np.mean(list(factor.values())))
        found[name] = dict(**by_chance(cases), factor=t_interval(factors) if factors else None,
                           factor_of_all=t_interval(every) if every else None)
    return found


def by_role(results, kinds):
    """{role: {kind: t_interval() over checkpoints with roles of the mean engagement of its heads}}."""
    found = {}
    for each in results:
        roles = dict.fromkeys(row["role"] for row in each["heads"] if "role" in row)
        for role in roles:
            own = [row for row in each["heads"] if row.get("role") == role]
            for name in kinds:
                mean = np.mean([row[name]["engagement"][0] for row in own])
                found.setdefault(role, {}).setdefault(name, []).append(mean)
    return {role: {name: t_interval(values) for name, values in own.items()} for role, own in found.items()}


# ---- output ----

def head_lines(ckpts, results, kinds):
    """Two tables, a line for each head: costs, with a star for critical heads; engagement."""
    costs, shares = [], []
    for ckpt, each in zip(ckpts, results):
        for row in each["heads"]:
            stars = ["*" if [row["layer"], row["head"]] in each["critical"][name] else " " for name in kinds]
            who = (ckpt.name, row["layer"], row["head"], row.get("role", "-"), row.get("state", "-"))
            costs.append((*who, *(plus_minus(row[name]["cost"]) + star for name, star in zip(kinds, stars))))
            shares.append((*who, *(plus_minus(row[name]["engagement"], 2, False) for name in kinds)))
    head = ("run", "block", "head", "role", "state", *kinds)
    yield "Cost of removal, nats per scored token (*: critical)"
    yield table(head, costs)
    yield "Engagement (1: an equal share of its block)"
    yield table(head, shares)


def summary_lines(numbers, ckpts, results, kinds):
    """What holds of all checkpoints together."""
    cells = [(ckpt.name, name, f"{text['nats']:.4f}", plus_minus(text["gain"]),
              f"{text['nats_all_active']:.4f}")
             for ckpt, each in zip(ckpts, results) for name, text in each["texts"].items()]
    yield table(("run", "text", "nats per token", "gain", "all heads active"), cells, left=2)
    pairs = [(" and ".join(row["kinds"]), *chance_cells(row)) for row in numbers["overlap"]]
    yield table(("critical on", "both", "by chance", "p"), pairs)
    if numbers["kept"]:
        cells = [(name, *chance_cells(row), plus_minus(row["factor"], 2, False),
                  plus_minus(row["factor_of_all"], 2, False)) for name, row in numbers["kept"].items()]
        yield table(("critical on", "at work", "by chance", "p", "factor", "of all heads"), cells)
    if numbers["roles"]:
        cells = [(role, *(plus_minus(own[name], 2, False) for name in kinds))
                 for role, own in numbers["roles"].items()]
        yield table(("engagement by role", *kinds), cells)


def chance_cells(row):
    return f"{row['hits']} of {row['of']}", f"{row['expected']:.1f}", f"{row['p']:.2g}"


def probe(args):
    """What each head sends and what its absence costs, by kind of text."""
    ckpts, data, context = open_checkpoints(args, args.context)
    kinds = texts_of(args, data, context)
    steps = sum(len(kinds) * len(all_heads(ckpt.model)) for ckpt in ckpts)
    with progress_bar(steps, "engagement") as progress:
        results = [result_of(ckpt, kinds, progress) for ckpt in ckpts]
    together = dict(overlap=overlaps(results, kinds), kept=kept(results, kinds),
                    roles=by_role(results, kinds))
    scored = ", ".join(f"{name} {kind.scored:,} of {kind.ids.shape[1] - 1:,}" for name, kind in kinds.items())
    above = f"{about_text(data, args)}: {plural(args.samples, 'text')} of each kind; scored tokens: {scored}"
    lines = [above, *head_lines(ckpts, results, kinds), *summary_lines(together, ckpts, results, kinds)]
    return numbers_of(ckpts, data, args, results) | together, lines


def main(argv):
    ask("engagement", probe, "val", argv,
        context=CONTEXT,
        samples=(positive, 128, "texts of each kind"),
        period=(positive, 8, "tokens in a pattern"))
