"""
Dynamic heads in the runs of a study: how many are at work, in which states; how the model generates.

For studies with lives=True (config/studies/scenarios.py). All of it is measured on finished runs: heads.jsonl
and violations.jsonl hold what the heads did, best.pt generates and is timed without the heads that are off.
"""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from scipy.stats import t as student

from model import Roles
from nanoheads import checkpoint
from nanoheads.common import pick_device, write_atomic
from nanoheads.dataset import Dataset
from nanoheads.log import read_json, read_rows
from nanoheads.pruning import pack
from nanoheads.sampling import until_stop, write
from nanoheads.timing import take_turns
from lab.heads.measuring import all_heads, cache_bytes, fixed_text, measure
from lab.probes import quality as textquality
from lab.study.costs import as_in_a_run
from lab.study.variants import built

PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS = 8, 4, 32, 96  # generated: samples of each prompt, tokens each
ROUNDS = 9  # of timing, in alternation with the plain GPT of the same seed

# what is reported of a run: name -> (title, digits after the point)
FIGURES = {
    "perplexity": ("perplexity", 3),
    "heads": ("heads left", 1),
    "active": ("heads at work", 1),
    "forced": ("violations forced", 1),
    "blocked": ("blocked", 1),
    "decode": ("generation speed, x plain", 2),
    "cache": ("cache, x plain", 2),
    "rep_4": ("rep-4", 4),
    "distinct_2": ("distinct-2", 3),
    "self_bleu": ("self-BLEU", 3),
    "loop": ("loop", 3),
    "dwell": ("steps in a state", 0),
    "flops": ("training FLOPs, x plain", 3),
}


# ---- one run ----

def history_of(folder):
    """{figure: value} of a run's heads.jsonl and violations.jsonl; a run without them has no violations.

    dwell: steps that a state lasts, mean of all stays. A stay ends when the state changes, when the head was
    last seen, or with the last row. changes: of states.
    """
    rows = read_rows(Path(folder) / "heads.jsonl")
    found = dict(forced=0, blocked=0, occupancy={}, dwell=None, active=rows[-1]["active"] if rows else None)
    for row in read_rows(Path(folder) / "violations.jsonl"):
        if row["type"] in found:
            found[row["type"]] += 1
    stays, running, changes, last = [], {}, 0, 0  # running: {(layer, head): (its state, the step it began)}
    for row in rows:
        now = states_in(row)
        for at in running.keys() - now.keys():
            stays.append(last - running.pop(at)[1])
        for at, state in now.items():
            found["occupancy"][state] = found["occupancy"].get(state, 0) + 1
            if at in running and running[at][0] != state:
                stays.append(row["step"] - running.pop(at)[1])
                changes += 1
            running.setdefault(at, (state, row["step"]))
        last = row["step"]
    stays += [last - began for _, began in running.values()]
    total = sum(found["occupancy"].values())
    found["occupancy"] = {state: n / total for state, n in found["occupancy"].items()}
    if stays:
        found.update(dwell=statistics.fmean(stays), changes=changes)
    return found


def states_in(row):
    """{(layer, head): state} of a row of heads.jsonl."""
    return {(layer, head): state for layer, (ids, now) in enumerate(zip(row["heads"], row.get("state", ())))
            for head, state in zip(ids, now)}


def engagement(model, data):
    """{role: mean share of its layer's output norm, times the layer's heads} on fixed text of val."""
    if not model.config.roles:
        return {}
    T = model.config.block_size
    text = fixed_text(data, "val", T, min(4096, len(data.tokens("val")) - T))
    found = measure(model, *(t.to(model.lm_head.weight.device) for t in text))
    by_role = {}
    for layer, block in enumerate(model.transformer.h):
        for i, head in enumerate(block.attn.head_ids):
            share = found["utilisation"][layer][i].item() * block.attn.n_total
            by_role.setdefault(Roles.role_of(model.config, head), []).append(share)
    return {role: statistics.fmean(shares) for role, shares in by_role.items()}


@torch.no_grad()
def quality_of_samples(model, data):
    """Measures of textquality.py on samples of fixed prompts of val, at temperature 0.8."""
    device, tokens = model.lm_head.weight.device, data.tokens("val")
    starts = np.linspace(0, len(tokens) - PROMPT_TOKENS - 1, PROMPTS).astype(int)
    prompts = torch.from_numpy(np.stack([tokens[s:s + PROMPT_TOKENS] for s in starts]).astype(np.int64))
    samples = []
    for seed in range(SAMPLES):
        rows = write(model, prompts.to(device), TOKENS, seed, temperature=0.8)
        samples.append([data.tokenizer.decode_bytes(until_stop(row, data.tokenizer)) for row in rows])
    found = textquality.leave_one_out([list(each) for each in zip(*samples)])
    return {name: float(found[name][0]) for name in ("rep_4", "distinct_2", "self_bleu", "loop")}


def speed_of_generation(models):
    """Of models {packed, plain}: how much faster the first generates a context, median of ROUNDS turns."""
    args = SimpleNamespace(rounds=ROUNDS, device=pick_device("auto"))
    start = torch.zeros(1, 1, dtype=torch.long, device=args.device)

    def generate(name):
        models[name].generate(start, models[name].config.block_size - 1, temperature=0)

    with as_in_a_run(args.device, 1):  # two threads on a busy machine wait for each other, by turns
        seconds = take_turns(models, generate, args, "decoding")
    return statistics.median(b / a for a, b in zip(seconds["packed"], seconds["plain"]))


def opened(folder):
    """(model as evaluated, Dataset) of a finished run."""
    state = checkpoint.read(folder)
    return checkpoint.build(state, folder, pick_device("auto")), Dataset(state["train"]["dataset"])


def flops_of(folder, model):
    """Training FLOPs of a run whose heads came and went: of each stretch at the heads that were there.

    A row of heads.jsonl has the heads from its step on. Before the first row they were those of that row.
    """
    rows, last = read_rows(Path(folder) / "heads.jsonl"), read_rows(Path(folder) / "log.jsonl")[-1]
    if not rows:
        return last["tokens"] * model.flops_per_token()
    c, steps = model.config, [0, *(row["step"] for row in rows[1:]), last["step"]]
    total = 0.0
    for row, start, end in zip(rows, steps, steps[1:]):
        ids = [[h for h in own if h < c.n_head] for own in row["heads"]]
        then = built(replace(c, head_ids=ids))
        total += (end - start) * then.flops_per_token()
    return total * last["tokens"] / last["step"]


def figures_of(folder, plain_folder, nats_per_token):
    """{figure: value} of a finished run beside the plain GPT's of the same seed; kept in its dynamic.json,
    with the plain run that stood beside it, since another one gives other figures.
    """
    path = Path(folder) / "dynamic.json"
    beside = Path(plain_folder).name if Path(plain_folder, "best.pt").is_file() else None
    kept = read_json(path) or {}
    if "figures" in kept and kept["beside"] == beside:
        return kept["figures"]
    model, data = opened(folder)
    packed = pack(model)
    plain = opened(plain_folder)[0] if beside else None
    found = history_of(folder)
    if found["active"] is None:
        found["active"] = len(all_heads(packed))
    found.update(perplexity=math.exp(nats_per_token), heads=len(all_heads(model)),
                 engagement=engagement(model, data), **quality_of_samples(model, data))
    if plain is not None:
        found.update(decode=speed_of_generation(dict(packed=packed, plain=plain)),
                     cache=cache_bytes(packed) / cache_bytes(plain),
                     flops=flops_of(folder, model) / flops_of(plain_folder, plain))
    write_atomic(path, lambda f: f.write(json.dumps(dict(beside=beside, figures=found)).encode()))
    return found


# ---- all runs of a study ----

def of_study(study, runs, done):
    """{variant: {seed: figures_of()}} of the finished runs whose weights are here, of seeds that all have.

    runs: {variant: {seed: folder}} of all that are judged.
    """
    found = {}
    for name, folders in runs.items():
        if study.compared[name].kind == "budget":
            continue
        for seed, folder in folders.items():
            if seed not in study.config.seeds:
                continue
            beside = runs["plain"].get(seed)
            if folder in done and beside in done and Path(folder, "best.pt").is_file():
                nats = done[folder]["nats"] / done[folder]["tokens"]
                found.setdefault(name, {})[str(seed)] = figures_of(folder, beside, nats)
    return found


def means_over_seeds(figures):
    """{variant: {figure: [mean, half of its 95 % interval over seeds]}}; None: not defined."""
    found = {}
    for name, seeds in figures.items():
        found[name] = {key: mean_and_half([one.get(key) for one in seeds.values()]) for key in FIGURES}
    return found


def mean_and_half(values):
    values = [v for v in values if v is not None and math.isfinite(v)]
    if not values:
        return None
    n, mean = len(values), statistics.fmean(values)
    half = float(student.isf(0.025, n - 1)) * statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return [mean, half]


def shares(figures, what):
    """{variant: {state or role: mean over seeds}} of `occupancy` or `engagement`."""
    found = {}
    for name, seeds in figures.items():
        keys = dict.fromkeys(key for one in seeds.values() for key in one.get(what, {}))
        if keys:
            found[name] = {key: statistics.fmean(one[what].get(key, 0.0) for one in seeds.values())
                           for key in keys}
    return found
