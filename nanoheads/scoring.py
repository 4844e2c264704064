"""
Scores a model on a text: the loss of every token of a split, in nats, each token once.

A split is cut into windows; what a token sees before it is part of the number (see windows()).
"""

import codecs
import math
import re
import sys
import time
from bisect import bisect_right
from contextlib import nullcontext
from itertools import groupby

import numpy as np
import torch
from tqdm import tqdm

from nanoheads import checkpoint
from nanoheads.common import UserError, say
from nanoheads.configurator import convert_fields
from nanoheads.dataset import Dataset
from nanoheads.pruning import constant_gate
from nanoheads.tasks import TaskConfig, TaskData, check_split
from nanoheads.tokenizer import Tokenizer, count_chars


BLOCK = 4096  # tokens whose nats a study keeps as one sum: neighbours resemble each other for less than that


# ---- scoring ----

def windows(n, block_size, stride):
    """[(start, end, scored)]: read tokens [start, end), score the last `scored`; each of n is scored once."""
    return [window(i, n, block_size, stride) for i in range(n_windows(n, block_size, stride))]


def n_windows(n, block_size, stride):
    """How many windows() there are. UserError: windows that leave tokens out."""
    if not 1 <= stride <= block_size:
        raise UserError(f"stride={stride} must be from 1 to block_size={block_size} (0: disjoint windows)")
    return 1 + max(0, -(-(n - block_size) // stride))


def window(i, n, block_size, stride):
    """The i-th of windows()."""
    if i == 0:
        return 0, min(block_size, n), min(block_size, n)
    position = block_size + (i - 1) * stride  # scored by the windows before it
    end = min(position + stride, n)
    return position + stride - block_size, end, end - position


def windows_of(dataset, split, block_size, stride=0, max_tokens=0, longest=0):
    """The windows of a split that score() scores.

    max_tokens > 0: whole windows, evenly spaced from the first to the last, at least one, and beyond that so
    many tokens at most. longest: a longer context, in whose windows these tokens are chosen; each of them is
    scored as it is in the whole split, in windows of block_size.
    """
    n, longest = len(dataset.tokens(split)), longest or block_size
    if not 0 < max_tokens < n:
        return windows(n, block_size, stride or block_size)
    # only those that are chosen are made: of a large split there are millions, at each evaluation
    step = stride or longest
    last = n_windows(n, longest, step) - 1
    start, end, _ = window(last, n, longest, step)
    if last and end - start < longest:
        last -= 1  # it is cut short by the end of the text
    count = max(1, 1 + (max_tokens - longest) // step)
    chosen_windows = [window(i * last // max(1, count - 1), n, longest, step) for i in range(count)]
    if longest == block_size:
        return chosen_windows
    return cut_windows(windows(n, block_size, stride or block_size), chosen_windows)


def cut_windows(cuts, chosen_windows):
    """The windows of `cuts`, shortened so that they score the same tokens as the chosen windows."""
    ends, parts = [end for _, end, _ in cuts], []
    for _, stop, n_scored in chosen_windows:
        position = stop - n_scored
        while position < stop:  # the window that scores the next token; what follows in it is not read
            start, end, _ = cuts[bisect_right(ends, position)]
            end = min(end, stop)
            parts.append((start, end, end - position))
            position = end
    return parts


def window_ids(tokens, first, start, end):
    """Tokens [start, end) after the one before them, at the beginning `first`; int64 [1 + n]."""
    ids = tokens[start - 1:end] if start else np.concatenate(([first], tokens[:end]))
    return ids.astype(np.int64)


def nats_of(logits, targets):
    """-log p(target), float64 [B, T] on the CPU, from logits [B, T, V].

    The sum over V is float32, its log float64.
    """
    top = logits.amax(-1)
    mass = (logits - top[..., None]).exp().sum(-1)
    short = top - logits.gather(-1, targets[..., None]).squeeze(-1)
    mass, short = torch.stack((mass, short)).cpu().double()
    return (mass.log() + short).numpy()


def nats_of_last(model, ids, n, tokens_at_once=None):
    """-log p of the last n of ids [B, 1 + T], float64 [B, n]. tokens_at_once: tokens whose logits are in
    memory at a time, None: all.
    """
    if tokens_at_once is None or len(ids) * n <= tokens_at_once:
        return nats_of(model(ids[:, :-1]).logits[:, -n:], ids[:, -n:])
    x, targets = model.hidden(ids[:, :-1])[:, -n:].flatten(0, 1), ids[:, -n:].flatten()
    parts = [nats_of(model.head(x_), y)
             for x_, y in zip(x.split(tokens_at_once), targets.split(tokens_at_once))]
    return np.concatenate(parts).reshape(len(ids), n)


LOGITS_AT_ONCE = 1 << 26  # 256 MB of them


def rows_at_once(device, block_size, vocab_size, batch_tokens=16384):
    """(rows in a forward pass, tokens whose logits are in memory at a time or None: all) when scoring.

    Logits are vocab_size floats a token. A CPU is fastest while they fit its caches; a GPU wants many rows in
    the blocks, and the logits of a large vocabulary in portions.
    """
    tokens_at_once = max(1, LOGITS_AT_ONCE // vocab_size)
    if device.type == "cpu":
        batch_tokens, tokens_at_once = min(batch_tokens, tokens_at_once, 4096), None
    return max(1, batch_tokens // block_size), tokens_at_once


@torch.no_grad()
def score(model, dataset, split, stride=0, max_tokens=0, batch_tokens=16384, rank=0, world=1, autocast=None,
          per_token=False, progress=False, rows=None, into=None, longest=0):
    """Cross-entropy of a split: (nats summed, tokens scored), or with per_token those of each, [n] float32.

    stride 0: disjoint windows. max_tokens > 0 scores at most so many tokens, the same at each call, and with
    one `longest` the same for each model, see windows_of(). Windows go to ranks in turn; the caller adds the
    ranks' sums up. rows: windows in a forward pass, None: by batch_tokens. into: a list that the nats of each
    token are added to, in parts.
    """
    device, T, tokens = next(model.parameters()).device, model.config.block_size, dataset.tokens(split)
    cuts = windows_of(dataset, split, T, stride, max_tokens, longest)[rank::world]
    default_rows, tokens_at_once = rows_at_once(device, T, model.config.vocab_size, batch_tokens)
    rows = rows or default_rows

    nats, count, parts = 0.0, 0, [np.empty(0, np.float32)] if into is None else into
    bar = tqdm(total=sum(n_scored for _, _, n_scored in cuts), desc=split, unit="tok", unit_scale=True,
               disable=not progress, leave=False, mininterval=0.5)
    was_training = model.training
    model.eval()
    try:
        with autocast or nullcontext(), bar:
            # windows of one length and one scored part go together
            for (_, n_scored), group in groupby(cuts, lambda c: (c[1] - c[0], c[2])):
                group = list(group)
                for first in range(0, len(group), rows):
                    ids = np.stack([window_ids(tokens, dataset.first, start, end)
                                    for start, end, _ in group[first:first + rows]])
                    ids = torch.from_numpy(ids).to(device)
                    token_nats = nats_of_last(model, ids, n_scored, tokens_at_once)
                    nats += float(token_nats.sum())
                    count += token_nats.size
                    if per_token or into is not None:
                        parts.append(token_nats.astype(np.float32).ravel())
                    bar.update(token_nats.size)
    finally:
        model.train(was_training)
    return np.concatenate(parts) if per_token else (nats, count)


def bits(nats, count):
    """Bits for each of `count` bytes (or characters)."""
    return nats / (math.log(2) * count)


def score_windows(model, data, split, tokens):
    """(nats of each window [n_windows], {nats, tokens, bytes, bpb}). UserError where they are not finite."""
    nats = score(model, data, split, max_tokens=tokens, per_token=True).astype(np.float64)
    total = float(nats.sum())
    if not np.isfinite(nats).all():
        raise UserError(f"the trained model gives {total} nats on {split}: its training diverged")
    windows = windows_of(data, split, model.config.block_size, max_tokens=tokens)
    count, size = scored_size(data, split, windows)
    per_window = sum_parts(nats, [n_scored for _, _, n_scored in windows])
    return per_window, dict(nats=total, tokens=count, bytes=size, bpb=bits(total, size))


def scored_size(data, split, cuts):
    """(tokens, bytes) of the text that these windows score."""
    count, whole = sum(n_scored for _, _, n_scored in cuts), data.splits[split]
    if count == whole["tokens"]:
        return count, whole["bytes"]
    # a slice, whose tokens may be longer or shorter than the others
    return count, text_size(data, split, cuts)[0]


def sum_parts(nats, sizes):
    """The sums of consecutive parts of nats [n], so many tokens each."""
    return np.add.reduceat(nats, np.cumsum([0, *sizes[:-1]]))


def scored_text(data, split, cuts):
    """The text, in bytes, of what each of these windows scores. A separator of documents is no text."""
    ids, mark = data.tokens(split), mark_of(data)
    parts = (ids[end - n_scored:end] for _, end, n_scored in cuts)
    return [data.tokenizer.decode_bytes(part if mark is None else part[part != data.separator])
            for part in parts]


def text_size(data, split, cuts):
    """(bytes, characters) of the text of what these windows score: of the text itself, also where its tokens
    spell something else. UserError where the data folder does not say what they stand for.
    """
    text = scored_text(data, split, cuts)
    size, chars = sum(map(len, text)), sum(map(count_chars, text))
    if data.tokenizer.encoding == "hf" and "spelled" not in data.meta:  # an older folder
        check_spelled(data, split)
    more = data.sizes_beyond(split)
    for _, end, n_scored in cuts:
        first, last = np.searchsorted(more[:, 0], (end - n_scored, end))
        more_bytes, more_chars = more[first:last, 1:].sum(0).tolist()
        size, chars = size + more_bytes, chars + more_chars
    return size, chars


def check_spelled(data, split, piece=1 << 20):
    """UserError unless the tokens of a split spell as many bytes as its text has."""
    tokens, size = data.sizes[split]
    cuts = ((0, min(start + piece, tokens), min(piece, tokens - start)) for start in range(0, tokens, piece))
    n_spelled = sum(len(scored_text(data, split, [cut])[0]) for cut in cuts)
    if n_spelled != size:
        raise UserError(f"{data.dir}: the tokens of {split} spell {n_spelled:,} bytes where its text has "
                        f"{size:,}, so that a part of it has no bits per byte; run its prepare script with "
                        "--force")


def mark_of(data):
    """How the token between documents is spelled, in bytes; None: what separates them is text, a newline."""
    if data.tokenizer.encoding in ("byte", "char"):
        return None
    return data.tokenizer.decode_bytes([data.separator]) if data.separator == data.tokenizer.end else None


def count_words(dataset, split, piece=1 << 20):
    """Words of a split, one more than its runs of whitespace, as lm-evaluation-harness counts them.

    Where a text begins or ends with whitespace, nothing before or after it counts as one. None: GPT-2's byte
    pairs, where their spelling is not at hand.
    """
    from nanoheads.corpus import gpt2_is_here  # not part of a run
    if dataset.tokenizer.encoding == "gpt2" and not gpt2_is_here():
        return None
    tokens, decoder = dataset.tokens(split), codecs.getincrementaldecoder("utf-8")("replace")
    count, space, mark = 1, False, mark_of(dataset)
    for start in range(0, len(tokens), piece):
        data = dataset.tokenizer.decode_bytes(tokens[start:start + piece])
        text = decoder.decode(data.replace(mark, b"\n") if mark else data)  # between documents a word ends
        if text:
            count += len(re.findall(r"\s+", text)) - (space and text[0].isspace())
            space = text[-1].isspace()
    return count


# ---- checkpoints and their data ----

def dataset_of(state, path, name=None, task=False):
    """The Dataset called `name`, or else the one that a read checkpoint was trained on. UserError.

    task: of one that was trained on a task its TaskData; without, a line says that what asks is of texts.
    """
    meta, train = state["meta"] or {}, state.get("train") or {}
    if flags := meta.get("task"):
        if name or not task:
            asks = f"--dataset={name}" if name else "this"
            raise UserError(f"{path} was trained on the task {flags['task']}, and {asks} is of a text")
        return task_data(flags, path)
    names = [name] if name else [train.get("dataset"), state.get("dataset"), meta.get("name")]
    names = [n for n in names if n]
    if not names:
        raise UserError(f"{path} does not say what it was trained on; name it with --dataset")
    for candidate in names[:-1]:  # a path may lead nowhere from here, while data/<name> is there
        try:
            return Dataset(candidate)
        except UserError:
            pass
    return Dataset(names[-1])


def task_data(flags, path):
    """The TaskData of the flags in a checkpoint's meta. UserError: they are damaged."""
    try:
        return TaskData(convert_fields(flags, TaskConfig), flags["task_length"])
    except (UserError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is damaged, or no checkpoint of this program: its task: {e}") from None


def at_context(model, context, state, path, device, settings=()):
    """The model with block_size=context; ACAG's length and the window stay the checkpoint's. UserError."""
    longest = model.config.block_size
    if context <= longest:
        model.crop_block_size(context)
        return model
    if model.config.pos == "learned":
        raise UserError(f"{path} has learned positions, which end at {longest:,}: "
                        f"it cannot read a context of {context:,}")
    return checkpoint.build(state, path, device, [*settings, f"block_size={context}"])


def say_first(path, tokenizer):
    """A line on what a published model's tokenizer puts before a text, unless that is the separator."""
    if tokenizer.first != tokenizer.separator:
        say(f"{path}: before the text stands {tokenizer.decode([tokenizer.first])}, as its tokenizer puts it",
            file=sys.stderr)


def load(path, split, stride, device, dataset=None, settings=(), task=False):
    """(state, model, Dataset) of one checkpoint, after every check that needs no scoring.

    task: also of one that was trained on a task, whose TaskData stands for the Dataset.
    """
    state = checkpoint.read(path)
    model = checkpoint.build(state, path, device, settings)
    data = dataset_of(state, path, dataset, task)
    checkpoint.check_vocabulary(state, data, path)
    if isinstance(data, TaskData):
        check_split(split, path)
        return state, model, data
    if state["meta"] and state["meta"].get("published"):
        tokenizer = Tokenizer.from_meta(state["meta"])
        say_first(path, tokenizer)
        data.first = tokenizer.first
    trained_split, current_split = (
        {"separator": meta.get("separator"), **(meta.get("splits") or {}).get(split, {})}
        for meta in (state["meta"] or {}, data.meta))
    if trained_split.get("sha256") and not dataset:
        advice = f"--dataset={data.dir} scores it all the same"
        if trained_split["sha256"] != current_split.get("sha256"):
            raise UserError(f"{path}: the {split} split of {data.dir} is not the one of its training, "
                            f"and may hold what it was trained on; {advice}")
        for key in ("tokens", "bytes", "separator"):
            if trained_split.get(key) not in (None, current_split[key]):
                raise UserError(f"{path}: at its training {data.dir / 'meta.json'} had "
                                f"{key}={trained_split[key]} for {split}, and it has {current_split[key]} "
                                f"now; {advice}")
    windows(len(data.tokens(split)), model.config.block_size, stride or model.config.block_size)
    return state, model, data


PIECES = 64  # of the scored text, at least where it has as many tokens: what a difference's interval rests on


def evaluate(path, split, stride, device, dataset=None, settings=(), progress=True, max_tokens=0, rows=None,
             longest=0, pack=False):
    """Everything that is reported of one checkpoint, as a dict. Raises UserError, ValueError.

    max_tokens: score so many tokens at most, evenly spaced, in windows of `longest`, 0: of the model's own
    context; rows: windows in one forward pass, None: by device. pack: score without the heads whose gate is
    0, see pruning.pack(); what is said of the model is of all heads. pieces, [n], are nats of consecutive
    parts of the text: what the comparison of two checkpoints needs.
    """
    state, model, data = load(path, split, stride, device, dataset, settings)
    T, size, parts = model.config.block_size, dict(data.splits[split]), []
    model_report = dict(heads=heads_at_work(model), routing=routing_of(model, data, split),
                        params=model.num_params(), params_non_embedding=model.num_params(non_embedding=True),
                        flops_per_token=model.flops_per_token())
    if pack:
        from nanoheads.pruning import pack_in_place  # not part of a run
        pack_in_place(model)
    start_time = time.perf_counter()
    nats, tokens = score(model, data, split, stride, max_tokens, progress=progress, rows=rows, into=parts,
                         longest=longest)
    seconds, whole = time.perf_counter() - start_time, size["tokens"]
    if not math.isfinite(nats):
        raise UserError(f"{path} gives {nats} nats on {split}: "
                        "its weights are damaged, or its training diverged")
    if tokens < whole:
        cuts = windows_of(data, split, longest or T, stride, max_tokens)
        size["bytes"], size["chars"] = text_size(data, split, cuts)
    stride, words = stride or T, None
    if tokens == whole and data.meta.get("spelled", True):  # other tokens do not show the text's words
        words = count_words(data, split)
    context = f"disjoint windows of {T:,}" if stride == T else f"windows of {T:,}, stride {stride:,}"
    token_nats, piece = np.concatenate(parts).astype(np.float64), max(1, min(BLOCK, tokens // PIECES))
    return dict(pieces=sum_parts(token_nats, [piece] * (tokens // piece)), of=whole, **model_report,
                name=str(path), dataset=data.meta["name"], split=split, tokens=tokens, bytes=size["bytes"],
                chars=size["chars"], words=words, context=context, block_size=T, stride=stride,
                bpb=bits(nats, size["bytes"]), bpc=bits(nats, size["chars"]),
                nats_per_token=nats / tokens, ppl=math.exp(min(nats / tokens, 700)),
                word_ppl=words and math.exp(min(nats / words, 700)),
                tokens_per_s=tokens / seconds,
                step=state.get("step"), tokens_a_step=tokens_a_step(state, T), device=device,
                split_sha256=size.get("sha256"), separator=data.separator,
                note=data.meta.get("note"), set=list(settings))


def tokens_a_step(state, block_size):
    """Tokens that each step of a read checkpoint's training scored; None: its file does not say, or it was
    trained on documents, which are not all of one length; where they are cut to fit, all rows are full.
    """
    train = state.get("train") or {}
    uneven = train.get("documents") and train.get("documents_packed") != "cut"
    if uneven or not {"batch_size", "grad_accum"} <= train.keys():
        return None
    return train["batch_size"] * train["grad_accum"] * block_size


def heads_at_work(model):
    """[heads whose gate is above agency_threshold whatever they read, all heads]."""
    counts = [0, 0]
    for block in model.transformer.h:
        gate, n = constant_gate(block.attn), block.attn.n_total
        counts[0] += n if gate is None else int((gate > model.config.agency_threshold).sum())
        counts[1] += n
    return counts


def some_windows(model, data, split, tokens):
    """Yield ids [1, 1 + block_size] of windows of a split, evenly spaced, always the same: so many tokens."""
    device, text = next(model.parameters()).device, data.tokens(split)
    for start, end, _ in windows_of(data, split, model.config.block_size, max_tokens=min(tokens, len(text))):
        yield torch.from_numpy(window_ids(text, data.first, start, end)[None]).to(device)


ROUTING_TOKENS = 16384  # on which a router's load is measured, at most
CRITIC_TOKENS = 4096    # on which a critic's explained variance is measured at each evaluation


@torch.no_grad()
def critic_metrics(model, data, split):
    """{name: how much of the returns' variance A2C's value head explains, at most 1}; {}: the model has none,
    or the returns do not vary.
    """
    if not hasattr(model, "value"):
        return {}
    from nanoheads.traces import critic_summary  # only here: most models have no critic
    was_training, batches = model.training, []
    model.eval()
    try:
        for ids in some_windows(model, data, split, CRITIC_TOKENS):
            (x, results), targets, traces = model.run_blocks(ids[:, :-1]), ids[:, 1:], {}
            # a pass with traces would measure all rows, too
            nats = model.cross_entropy(x, targets, per_token=True)[1]
            model.value.losses(x, nats, targets != -1, results["predictions"], traces)
            batches.append(traces)
    finally:
        model.train(was_training)
    traces = {key: torch.cat([batch[key] for batch in batches], 1) for key in batches[0]}
    summary = critic_summary(traces, torch.ones_like(traces["a2c.return"]))
    return {key.replace(".", "_"): float(value) for key, value in summary.items()
            if key == "a2c.explained_variance"}


@torch.no_grad()
def routing_of(model, data, split):
    """[what the router of a block does, with `block`] as in traces.routing_summary(); []: none acts."""
    if not model.config.routing:
        return []
    from nanoheads.traces import summaries  # only here: most models have no router
    weights = {}
    for ids in some_windows(model, data, split, ROUTING_TOKENS):
        for key, value in model(ids[:, :-1], traces=True).traces.items():
            if key.endswith((".routing_weights", ".selected")):
                weights.setdefault(key, []).append(value)
    rows = {}
    for key, value in summaries({key: torch.cat(parts, 1) for key, parts in weights.items()}).items():
        _, block, what = key.split(".")
        rows.setdefault(block, dict(block=int(block)))[what] = value.tolist()
    return list(rows.values())
