"""
What models write: continuations of the same prompts from each checkpoint, beside the text itself.

    python -m lab.probe text --ckpt out/a [--ckpt out/b ...] [--judge out/big] [--tokens 256] [--json FILE]

rep-4         share of a sample's four words in a row that came before
distinct-2    share of pairs of words that are different, over a sample of each prompt
self-BLEU     how much of a sample is also in those of the other prompts, 0 to 1
loop          share of a sample's bytes in its longest stretch that goes round and round
first repeat  at which byte 16 bytes come back for the first time
bits/byte     of the samples under a larger model, the --judge, given the prompts: how coherent they are

Prompts are cut evenly from the split. Prompt i is continued with the seed --seed + i by every checkpoint, and
differences are paired by prompt. --json has all measures (lab/probes/quality.py) and the samples.
"""

import math
import time
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from model import GPT
from nanoheads import sampling
from nanoheads.common import UserError, last_folders, table
from nanoheads.sampling import bfloat16_on_gpu, cut_at_stop, same_tokens, settings_of, stop_of, write
from nanoheads.scoring import (LOGITS_AT_ONCE, bits, nats_of_last, window_ids,
                               windows)
from nanoheads.timing import progress_bar
from nanoheads.tokenizer import Tokenizer
from lab.probes.intervals import jackknife
from lab.probes.quality import leave_one_out
from lab.probes.shared import about_text, ask, finite, numbers_of, open_checkpoints, positive

TEXT, LESS = "the text itself", "  less the first"  # names of rows that are no checkpoint
SHOWN = dict(rep_4="rep-4", distinct_2="distinct-2", self_bleu="self-BLEU", loop="loop",
             first_repeat="first repeat", judge="bits/byte")  # of a measure, in the table; all are in --json


class Judge(NamedTuple):
    """A checkpoint that reads what others write: its name, the model, its vocabulary."""
    name: str
    model: GPT
    tokenizer: Tokenizer


def check(args):
    """UserError: settings of which nothing can be sampled."""
    if args.num_prompts < 2:
        raise UserError(f"--num_prompts={args.num_prompts} must be at least 2, for an interval")
    if args.seed >= 1 << 62:
        raise UserError(f"--seed={args.seed} must be at most 2^62 - 1")
    sampling.check_settings(args)


def open_judge(args, tokenizer):
    """The Judge that --judge names. UserError: it cannot spell what is written in another vocabulary."""
    model_and_tokenizer = sampling.model_and_tokenizer(args.judge, args.device, args.dataset)
    judge = Judge(f"--judge {args.judge}", *model_and_tokenizer)
    if judge.tokenizer.vocab and not same_tokens(tokenizer, judge.tokenizer):
        raise UserError(f"{judge.name}: its {judge.tokenizer.vocab_size:,} characters cannot spell all that "
                        "may be written")
    return judge


def cut_prompts(args, data):
    """([P] lists of ids, [P] what follows each of them), cut evenly from the split. UserError."""
    split, size = data.tokens(args.split), args.prompt_tokens + args.tokens
    step = len(split) // args.num_prompts
    if step < size:
        raise UserError(f"{args.num_prompts:,} prompts of {args.prompt_tokens:,} tokens, each with the "
                        f"{args.tokens:,} after it, need {args.num_prompts * size:,} tokens; "
                        f"the {args.split} split of {data.dir} has {len(split):,}")
    cuts = [split[i * step:i * step + size].tolist() for i in range(args.num_prompts)]
    return [cut[:args.prompt_tokens] for cut in cuts], [cut[args.prompt_tokens:] for cut in cuts]


def continuations(ckpt, prompts, args, settings):
    """(the ids [P][S] that a checkpoint writes after each prompt, tokens per second)."""
    device, texts, n_tokens, seconds = next(ckpt.model.parameters()).device, [], 0, 0.0
    for i, prompt in enumerate(progress_bar(prompts, ckpt.name)):
        idx = torch.tensor([prompt] * args.samples, device=device)
        start_time = time.perf_counter()
        try:
            with bfloat16_on_gpu(device):
                text = write(ckpt.model, idx, args.tokens, args.seed + i, **settings)
        except UserError as e:
            raise UserError(f"{ckpt.name}: {e}")
        seconds += time.perf_counter() - start_time
        n_tokens += args.samples * len(text[0])
        texts.append(text)
    return texts, n_tokens / seconds


@torch.no_grad()
def nats_after(model, separator, pairs):
    """Nats [n] of each continuation given its prompt, from pairs (prompt, continuation) of ids.

    Windows move by half a block: beyond the first, a token sees at least half a block before it.
    """
    device, T = next(model.parameters()).device, model.config.block_size
    rows = max(1, min(4096, LOGITS_AT_ONCE // model.config.vocab_size) // T)
    pieces = []  # (number of its pair, ids of a window, how many of its last tokens are scored)
    for number, (prompt, continuation) in enumerate(pairs):
        text = np.array([*prompt, *continuation])
        for start, end, n_scored in windows(len(text), T, max(1, T // 2)):
            n_scored = min(n_scored, end - len(prompt))  # the prompt is context alone
            if n_scored > 0:
                pieces.append((number, window_ids(text, separator, start, end), n_scored))

    # windows of one length and one scored part go together
    def shape(piece):
        return len(piece[1]), piece[2]
    totals = np.zeros(len(pairs))
    for (_, n_scored), group in groupby(sorted(pieces, key=shape), shape):
        group = list(group)
        for first in range(0, len(group), rows):
            batch = group[first:first + rows]
            ids = torch.from_numpy(np.stack([piece[1] for piece in batch])).to(device)
            np.add.at(totals, [piece[0] for piece in batch], nats_of_last(model, ids, n_scored).sum(1))
    return totals


def bits_under(judge, tokenizer, prompts, samples):
    """Bits [P][S] of samples [P][S] under the judge, given the prompts [P]; ids of tokenizer. UserError."""
    def judge_ids(ids):
        if same_tokens(tokenizer, judge.tokenizer):
            return ids
        raw = tokenizer.decode_bytes(ids)
        text = raw if judge.tokenizer.encoding == "byte" else raw.decode("utf-8", "replace")
        return judge.tokenizer.encode(text).tolist()

    pairs = [(judge_ids(prompt), judge_ids(ids)) for prompt, row in zip(prompts, samples) for ids in row]
    nats = finite(nats_after(judge.model, judge.tokenizer.first, pairs), judge)
    return bits(nats, 1).reshape(len(samples), -1).tolist()


def measure(samples, prompts, tokenizer, judge, stop):
    """(what leave_one_out() gives, the texts [P][S]) of samples [P][S] of ids, each up to the stop token."""
    samples = [[cut_at_stop(ids, tokenizer, stop) for ids in row] for row in samples]
    raw = [[tokenizer.decode_bytes(ids) for ids in row] for row in samples]
    figures = leave_one_out(raw, bits_under(judge, tokenizer, prompts, samples) if judge else None)
    return figures, [[one.decode("utf-8", "replace") for one in row] for row in raw]


def with_intervals(figures):
    """{figure: (value, half of its interval)} of what leave_one_out() gives."""
    return {key: jackknife(values) for key, values in figures.items()}


# ---- output ----

def describe_setting(args, ckpts, data, judge):
    """The lines above the table: what was written, and how; who judges it."""
    line = (f"{about_text(data, args)}: {args.num_prompts:,} prompts, {args.samples:,} "
            f"sample{'s' * (args.samples > 1)} of {args.tokens:,} tokens each, seed {args.seed}, "
            f"temperature {args.temperature:g}")
    for name, off in (("top_k", None), ("top_p", None), ("repetition_penalty", 1.0), ("stop", False)):
        if getattr(args, name) != off:
            line += f", {name} {getattr(args, name)}"
    if judge is None:
        return [line]
    size, largest = judge.model.num_params(), max(ckpt.model.num_params() for ckpt in ckpts)
    larger = "" if size > largest else f", no more than the {largest:,} of those it judges"
    return [line, f"judge: {args.judge}, {size:,} parameters{larger}"]


def text_table(rows, width=120):
    """A line for each row (name, figures, tokens per second or None)."""
    titles = {key: title for key, title in SHOWN.items() if key in rows[0][1]}

    def cell(key, value, half, sign):
        digits = 1 if key == "first_repeat" else 3
        spread = "" if math.isnan(half) else f" ±{half:.{digits}f}"
        return "–" if math.isnan(value) else f"{value:{sign}.{digits}f}{spread}"

    lines = []
    for name, figures, speed in rows:
        sign = "+" if name == LESS else ""
        cells = [cell(key, *figures[key], sign) for key in titles]
        lines.append((name, *cells, f"{speed:,.0f}" if speed else ""))
    return table(("run", *titles.values(), "tokens/s"), lines, width=width, cut=last_folders)


# ---- the probe ----

def probe(args):
    """What models write: repetition, diversity, loops, bits per byte."""
    check(args)
    ckpts, data, _ = open_checkpoints(args)
    tokenizer = data.tokenizer
    judge = open_judge(args, tokenizer) if args.judge else None
    settings, stop = settings_of(args, tokenizer), stop_of(args, tokenizer)
    prompts, real_texts = cut_prompts(args, data)
    results, lines, first = [], [], None
    for ckpt in ckpts:
        texts, speed = continuations(ckpt, prompts, args, settings)
        sets, samples = measure(texts, prompts, tokenizer, judge, stop)
        figures, differences = with_intervals(sets), None
        lines.append((ckpt.name, figures, speed))
        if first:
            differences = with_intervals({key: sets[key] - first[key] for key in sets})
            lines.append((LESS, differences, None))
        first = first or sets
        results.append(dict(figures=figures, less_the_first=differences, tokens_per_s=speed, samples=samples))
    sets, samples = measure([[ids] for ids in real_texts], prompts, tokenizer, judge, stop)
    lines.append((TEXT, with_intervals(sets), None))
    numbers = dict(numbers_of(ckpts, data, args, results), prompts=[*map(tokenizer.decode, prompts)],
                   text=dict(figures=with_intervals(sets), samples=samples))
    return numbers, [*describe_setting(args, ckpts, data, judge), text_table(lines)]


def main(argv):
    ask("text", probe, "test", argv, add_more=sampling.add_arguments,
        num_prompts=(positive, 16, "prompts, cut evenly from the split"),
        prompt_tokens=(positive, 64, "tokens of a prompt"),
        samples=(positive, 8, "continuations of each prompt"),
        tokens=(positive, 256, "the length of each continuation"),
        judge=dict(metavar="CKPT", help="a larger model, for the bits per byte of the samples under it"))
