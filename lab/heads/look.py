"""
What a checkpoint's mechanisms do to a text, token by token: JSON lines, a table, a picture of attention maps.

    python -m lab.probe look --ckpt out/a [--ckpt out/b] --text FILE [--maps] [--out look.jsonl]
    python -m lab.probe look --ckpt out/a --start "To be"                          # the prompt itself
    python -m lab.probe look --ckpt out/recall --levels 2,12          # rows of the task it was trained on
    python sample.py --ckpt out/a --start "To be" --audit audit.jsonl          # of what it writes

A line is a window of block_size tokens, a row of a task, or a sample (the last block_size tokens of the
prompt and what was written). The first tokens of a window see little text before them. Two checkpoints need
the same vocabulary. Both read windows of the shorter block_size, and their lines alternate. The table, on
the terminal, has a row for each token of the first window and a column for each trace, its mean over blocks
and heads. The picture, which has the name of the lines with .png, shows the attention map of each head over
the first 64 tokens of that window: a row reads, a column is read, and the brightest cell is the highest
weight of its map. docs/heads.md has more. A line holds

    checkpoint, set    where it comes from: the weights, and what --set changed in them
    text               a file, "prompt", "recall, 2 pairs", or "sample 2"
    first, prompt      number of its first token in the whole text; how many of its tokens are a prompt
    ids, tokens        the tokens; bytes that are no UTF-8 without their neighbours as \\xc3
    offsets            [begin, end) of each in characters of the whole text: two bytes of "é" have the same.
                       A byte that is no UTF-8 at all counts as a character
    nats               -log p of each token after those before it in this line; null for the first
    series             {trace: [T], or a row for each head: [T], or [1] where one number serves all tokens}
    heads              {trace: numbers of the heads that its rows are of}
    maps               with --maps, {block: for each of its own heads: what token t reads of tokens 0 to t}
    explain            explain()'s lines: the tokens with the highest scores, for each name and block
    blocks             {block with constraint heads: logits, probabilities, head_logits, gates, top, maps}

Series are the traces of the model and its mechanisms by their names, blocks.<i>.<trace>. Of a gate for each
dimension of a head the mean is taken. first_token is the weight on the line's first token, and sink_mass is
1 less the sink's gate; with a sink, first_token is a share of what does not go to it. Of a mechanism of your
own there are its gates, and its traces of the shapes [H], [B, T] and [B, T, H]; a note names those left out.
a2c.* are null at the last token, since a return looks ahead. What constraint heads have is in blocks instead,
by name: logits are the name's scores [T], a mean over its heads; head_logits [heads, T]; gates the router's,
in (0, 1), [heads, T] or [heads, 1]; top the tokens that explain() names. All are of one forward pass over the
line's tokens, rounded to six decimals. The score at t is about token t.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

from nanoheads import own_mechanism, task_scores
from nanoheads.arguments import add_checkpoints
from nanoheads.common import (UserError, as_program, pick_device, plural, say, table, writable, write_atomic,
                              write_json)
from nanoheads.sampling import add_special, encode, model_and_tokenizer, read_prompt, same_tokens
from nanoheads.tokenizer import Tokenizer, char_sizes
from nanoheads.traces import axes_of, explain, head_numbers
from lab.heads.measuring import attentions, in_float64, mean_gate

PROGRAM = "probe.py look"
FLOATS = 1 << 28  # of attention maps that are held at once
TOP = 5  # tokens that explain() names
DRAWN = 64  # tokens whose attention maps are drawn


# ---- a text ----

class Text(NamedTuple):
    """Tokens and what they stand for: ids [n], the bytes of each [n], offsets [n, 2] in characters."""
    ids: list
    raw: list
    offsets: list


def spell(tokenizer, ids):
    """The Text of token ids; one beyond the vocabulary, which a padded model may sample, has no bytes."""
    bytes_of = {i: tokenizer.decode_bytes([i]) if i < tokenizer.vocab_size else b"" for i in set(ids)}
    raw = [bytes_of[i] for i in ids]
    whole_text = b"".join(raw).decode("utf-8", "surrogateescape")
    n = len(whole_text)
    character = np.append(np.repeat(np.arange(n), char_sizes(whole_text)), n)  # of each byte
    ends = np.cumsum([len(piece) for piece in raw])
    begins = ends - [len(piece) for piece in raw]
    last = np.where(ends > begins, character[ends - 1] + 1, character[begins])
    return Text(list(ids), raw, np.stack((character[begins], last), 1).tolist())


def decode(raw):
    """Bytes as text; those that are no UTF-8 as \\xc3."""
    return raw.decode("utf-8", "backslashreplace")


def printable(name):
    """A file's name as text that any file can hold."""
    return str(name).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read_ids(path, tokenizer):
    """Token ids of a file. UserError: it is missing, empty, or holds what the vocabulary lacks."""
    try:
        raw = Path(path).read_bytes()
        ids = tokenizer.encode(raw if tokenizer.encoding == "byte" else raw.decode("utf-8"))
    except OSError as e:
        raise UserError(f"--text: {path} cannot be read: {e.strerror}")
    except UnicodeDecodeError as e:
        raise UserError(f"--text: {path} is not UTF-8 text: {e.reason} at byte {e.start:,}")
    except ValueError as e:
        raise UserError(f"--text: {path}: {e}")
    if not len(ids):
        raise UserError(f"--text: {path} is empty")
    return ids.tolist()


# ---- series ----

class Series(NamedTuple):
    """A number for each token: values [T], or [heads, T or 1]; heads: the numbers of the rows, or None."""
    values: np.ndarray
    heads: Optional[list]


class Viewer:
    """Reads a text with one checkpoint, window after window."""

    def __init__(self, model, path, settings=()):
        self.model, self.path, self.settings = model, path, list(settings)
        self.layers = attentions(model)
        self.names = model.config.constraint_names or []
        self.left_out = set()  # names of traces of which it is not known along which axes they go

    @torch.no_grad()
    def read(self, ids, maps=True):
        """(logits [T, V], {trace: tensor}) of ids [T]; maps: with the attention maps of all blocks."""
        idx = torch.tensor([ids], device=next(self.model.parameters()).device)
        targets = F.pad(idx[:, 1:], (0, 1), value=-1)  # A2C's return is one of what came
        output = self.model(idx, targets=targets, traces="maps" if maps else True, logits=True)
        return output.logits[0], output.traces

    def series(self, traces):
        """{trace: Series} of a pass: means over what is neither a token nor a head; of a map the weight on
        the first token, of a constraint's logits the probabilities.
        """
        series, T = {}, traces["blocks.0.entropy"].size(-1)
        for key, x in traces.items():
            block, name = split_key(key)
            if not x.numel():  # a layer whose heads are all pruned
                continue
            numbers = {} if block is None else head_numbers(self.layers[block])
            axes = axes_of(name, x, None if block is None else self.layers[block])
            if name == "map":
                axes, key, x = ("row", "head", "token"), f"blocks.{block}.first_token", x[..., 0]
            if axes is None:
                self.left_out.add(name)
                continue
            heads = next((numbers[axis] for axis in axes if axis in numbers), None)
            leading_axes = [axes.index(axis) for axis in (*numbers, "token") if axis in axes]
            x = x.detach().cpu().double().movedim(leading_axes, list(range(len(leading_axes))))
            x = x.reshape(*x.shape[:len(leading_axes)], -1).mean(-1)
            if heads is not None and len(x) == 1 != len(heads):  # one number for all heads
                x, heads = x[0], None
            x = x if "token" in axes else x[..., None]
            if x.size(-1) not in (1, T) or heads is not None and len(x) != len(heads):
                self.left_out.add(name)
                continue
            if heads is None:
                x = x.expand(T)
            else:
                base_rows = [row for row, head in enumerate(heads) if head in numbers["head"]]
                x, heads = x[base_rows], [heads[row] for row in base_rows]
                if not base_rows:
                    continue
            values = (x.sigmoid() if name.startswith("constraint.") else x).numpy()
            if name == "gates.sink":
                key, values = key.replace("gates.sink", "sink_mass"), 1 - values
            if key.startswith("a2c."):
                values[-1] = np.nan  # nothing has come yet
            series[key] = Series(values, heads)
        return series


def split_key(key):
    """(block or None, name) of a trace's key."""
    if not key.startswith("blocks."):
        return None, key
    _, block, name = key.split(".", 2)
    return int(block), name


# ---- one line ----

def to_lists(values):
    """Nested lists of an array's or tensor's numbers; what is none, null."""
    values = values.cpu().double().numpy() if torch.is_tensor(values) else values
    rounded, finite = np.round(values, 6), np.isfinite(values)
    return (rounded if finite.all() else np.where(finite, rounded, None)).tolist()


class Look(NamedTuple):
    """What one checkpoint does in one window: its JSON line, and {trace: Series}."""
    line: dict
    series: dict


def fits(viewers, T):
    """Whether the attention maps of all blocks over T tokens fit into memory."""
    return max(sum(attn.n_total for attn in viewer.layers) for viewer in viewers) * T * T <= FLOATS


def look(viewer, text, name, maps=False, prompt=0, start=0, end=None, first_token=True):
    """The Look at tokens [start, end) of a Text; the whole forward pass is over them alone.

    name: of the text. maps: in the line too. prompt: how many tokens of the Text are one. first_token: with
    the attention to the first token, for which maps are made. Raises UserError for what is no number.
    """
    ids, raw, offsets = (part[start:end] for part in text)
    logits, traces = viewer.read(ids, maps or first_token)
    logits = in_float64(logits[:-1])
    next_ids = torch.tensor(ids[1:], dtype=torch.long, device=logits.device)
    nats = F.cross_entropy(logits, next_ids, reduction="none").cpu().numpy()
    series = {"nats": Series(np.append(np.nan, nats), None), **viewer.series(traces)}
    tokens = [decode(piece) for piece in raw]
    line = dict(checkpoint=printable(viewer.path), set=viewer.settings, text=printable(name), first=start,
                prompt=min(max(prompt - start, 0), len(ids)), ids=ids, tokens=tokens, offsets=offsets,
                nats=to_lists(series["nats"].values))
    traces_of_line = {key: trace for key, trace in series.items()
                      if key != "nats" and not is_of_constraints(key)}
    line.update(series={key: to_lists(trace.values) for key, trace in traces_of_line.items()},
                heads={key: trace.heads for key, trace in traces_of_line.items() if trace.heads})
    rows = {}
    for block, p in maps_of(traces).items() if maps else ():
        rows[block] = [[row[:t + 1] for t, row in enumerate(head)] for head in to_lists(p)]
    if maps:
        line["maps"] = {str(block): heads[:viewer.layers[block].n_head] for block, heads in rows.items()}
    line["explain"] = [row for name in viewer.names for row in explain(traces, tokens, name, TOP).split("\n")]
    scored_blocks = [split_key(key)[0] for key in traces if key.endswith(".head_scores")]
    line["blocks"] = {str(block): constraint_block(viewer, traces, block, tokens, rows)
                      for block in scored_blocks}
    check_numbers(viewer, nats, series)
    return Look(line, series)


def maps_of(traces):
    """{block: its attention maps [heads, T, T]}, of blocks that have heads."""
    return {split_key(key)[0]: p[0] for key, p in traces.items() if split_key(key)[1] == "map" and p.numel()}


def check_numbers(viewer, nats, series):
    """Raise UserError where the model's own numbers or its scores are none."""
    numbers = [nats, *(trace.values for key, trace in series.items()
                       if is_of_constraints(key) or split_key(key)[1] == "entropy")]
    if not all(np.isfinite(values).all() for values in numbers):
        raise UserError(f"{viewer.path}: its scores are not numbers: its weights are damaged")


def is_of_constraints(key):
    """Whether a trace is one of constraint heads alone, which has a place of its own in a line."""
    name = split_key(key)[1]
    return name in ("head_scores", "router_gates") or name.startswith("constraint.")


def block_traces(traces, block):
    """The traces of a block, by their names without it."""
    return {split_key(key)[1]: value for key, value in traces.items() if split_key(key)[0] == block}


def constraint_block(viewer, traces, block, tokens, rows):
    """What a line holds of the constraint heads of a block; rows: maps of its heads, {}: none are wanted."""
    names, heads = viewer.names, viewer.model.config.constraint_heads
    traces_of_block = {name: value[0] for name, value in block_traces(traces, block).items()}
    logits = {name: traces_of_block[f"constraint.{name}"] for name in names}

    def rows_by_name(values):
        """{name: the rows of its heads}; heads stand name after name."""
        return {name: values[i * heads:(i + 1) * heads] for i, name in enumerate(names)}

    block_line = dict(
        logits={name: to_lists(scores) for name, scores in logits.items()},
        probabilities={name: to_lists(in_float64(scores).sigmoid()) for name, scores in logits.items()},
        head_logits=rows_by_name(to_lists(traces_of_block["head_scores"])),
        gates=rows_by_name(to_lists(traces_of_block["router_gates"].T)), top={})
    for name, scores in logits.items():
        best = scores.topk(min(TOP, len(tokens))).indices.tolist()
        block_line["top"][name] = [dict(token=i, text=tokens[i], logit=to_lists(scores[i])) for i in best]
    if rows:
        block_line["maps"] = rows_by_name(rows[block][viewer.layers[block].n_head:])
    return block_line


# ---- means, a table, a picture ----

class Means:
    """The mean of each series over the tokens of a text, window after window; tokens without one left out."""

    def __init__(self):
        self.sums, self.counts, self.heads = {}, {}, {}

    def add(self, look):
        n = len(look.line["ids"])
        for key, series in look.series.items():
            # [.., 1]: one for all tokens
            values = np.broadcast_to(series.values, (*series.values.shape[:-1], n))
            finite = np.isfinite(values)
            self.sums[key] = self.sums.get(key, 0) + np.where(finite, values, 0).sum(-1)
            self.counts[key] = self.counts.get(key, 0) + finite.sum(-1)
            self.heads[key] = series.heads

    def means(self):
        """{series: mean, or {head: mean}}; None where no token has a number."""
        means = {}
        for key, total in self.sums.items():
            numbers = to_lists(np.where(self.counts[key], total / np.maximum(self.counts[key], 1), np.nan))
            heads = self.heads[key]
            means[key] = dict(zip(map(str, heads), numbers)) if heads else numbers
        return means


def table_of(look):
    """A table of a window: a row for each token, a column for each trace, its mean over blocks and heads."""
    line, columns = look.line, {}
    for key, series in look.series.items():
        rows = np.atleast_2d(series.values)
        columns.setdefault(split_key(key)[1], []).extend(np.broadcast_to(rows, (len(rows), len(line["ids"]))))
    columns = {name: np.mean(rows, 0) for name, rows in columns.items()}
    rows = [(line["first"] + i, repr(token),
             *(f"{mean[i]:.3f}" if np.isfinite(mean[i]) else "-" for mean in columns.values()))
            for i, token in enumerate(line["tokens"])]
    return table(("", "token", *columns), rows, left=[1])


def picture(viewers, ids, name):
    """A Figure of the attention maps of each Viewer over ids [T], tokens of the text of that name.

    A row of maps is a block. In a map a row is the token that reads and a column the one that is read.
    """
    from nanoheads.drawing import canvas  # not at the top, since matplotlib takes a second
    traces_of_viewers = [viewer.read(ids)[1] for viewer in viewers]
    n = max(attn.n_total for viewer in viewers for attn in viewer.layers)
    heights = [len(viewer.layers) for viewer in viewers]
    figure = canvas(max(6, 0.4 + 1.3 * n), sum(0.6 + 1.3 * height for height in heights))
    axes = figure.subplots(len(traces_of_viewers), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, viewer, traces in zip(axes, viewers, traces_of_viewers):
        draw_maps(ax, viewer, traces, max(1, n), len(ids))
        ax.set_title(f"{title_of(viewer)}: attention of each head (block.head x mean gate)\n"
                     f"{plural(len(ids), 'token')} of {printable(name)}: a row reads, bright is read",
                     fontsize=9)
    return figure


def draw_maps(ax, viewer, traces, n, T):
    """Draw attention maps side by side, a block below the other; n: heads for which there is room.

    What lies ahead is left white. The colours of a map end at its highest weight.
    """
    gap = 1 + T // 5  # cells between two maps, for the numbers of the head
    grid = np.full((len(viewer.layers) * (T + gap), n * (T + gap)), np.nan)
    for block, maps in maps_of(traces).items():
        attn = viewer.layers[block]
        gates = mean_gate(attn, block_traces(traces, block)).tolist()
        for i, (head, p, gate) in enumerate(zip(attn.all_head_ids(), maps.cpu().numpy(), gates, strict=True)):
            top, left = block * (T + gap) + gap, i * (T + gap)
            grid[top:top + T, left:left + T] = np.where(np.tri(T), p / max(p.max(), 1e-30), np.nan)
            label = f"{block}.{head}" + (f" x {gate:.2f}" if gate != 1 else "")
            ax.text(left - 0.5, top - 0.7, label, fontsize=8)
    ax.imshow(grid, vmin=0, vmax=1, interpolation="nearest")
    ax.set_axis_off()


def title_of(viewer):
    return ", ".join([printable(viewer.path), *viewer.settings])


# ---- files ----

def paths(out, flag):
    """(the file of the JSON lines, the picture beside it), both writable. UserError names the flag."""
    out = Path(out)
    if out.suffix.lower() == ".png":
        raise UserError(f"{flag}: {out} is the name of the picture; the JSON lines need another, such as "
                        f"{out.with_suffix('.jsonl')}")
    lines = writable(out, flag)
    return lines, writable(out.with_suffix(".png"), flag)  # a name that nobody typed


UNTRAINED = "No label has trained these heads: their scores, about 0.5, mean nothing."


def notes_if_untrained(model):
    """[UNTRAINED] where no label has moved a score: the scorers' biases are 0, as they start; else []."""
    scorers = [block.attn.constraint for block in model.transformer.h if block.attn.constraint]
    return [UNTRAINED] if scorers and not any(bool(heads.b2.any()) for heads in scorers) else []


def notes_of(viewers):
    """Sentences for the terminal."""
    notes = []
    for viewer in viewers:
        viewer_notes = notes_if_untrained(viewer.model)
        if viewer.model.config.routing and not any(attn.router.in_eval for attn in viewer.layers):
            viewer_notes.append("The router acts in training alone: it chooses nothing here.")
        prefix = "" if len(viewers) == 1 else f"{printable(viewer.path)}: "
        notes += [prefix + note for note in viewer_notes]
    return notes


def write(windows, out):
    """Write the lines of windows, each [a Look of each checkpoint].

    Returns (the Looks of the first window, explain()'s lines of each window's first Look).
    """
    first_looks, explanations = [], []

    def write_lines(f):
        for looks in windows:
            for entry in looks:
                f.write(json.dumps(entry.line).encode() + b"\n")
            explanations.append(looks[0].line["explain"])
            first_looks.extend(looks if not first_looks else ())

    try:
        write_atomic(out, write_lines)
    finally:  # of an interrupted one
        out.with_name(out.name + ".part").unlink(missing_ok=True)
    return first_looks, explanations


def write_picture(path, viewers, ids, name):
    """Write the picture of the first DRAWN of the ids."""
    import matplotlib as mpl
    from nanoheads.drawing import RC, save
    with mpl.rc_context(RC):
        save(picture(viewers, ids[:DRAWN], name), path.with_suffix(""), ["png"])


def look_at_text(viewers, tokenizer, ids, name, files, maps=False, progress=False, width=None):
    """Write a text in windows of `width` tokens, None: block_size, the shortest of the viewers', each token
    once, into paths().

    Returns (what --json writes, the lines to print).
    """
    text, T = spell(tokenizer, ids), width or min(viewer.model.config.block_size for viewer in viewers)
    notes, first_token = notes_of(viewers), fits(viewers, min(T, len(ids)))
    if len({viewer.model.config.block_size for viewer in viewers}) > 1:
        notes.append(f"Windows of {T:,} tokens, the shorter context.")
    if not (first_token or maps):
        notes.append("No attention to the first token: the maps of all blocks would not fit into memory.")
    starts = tqdm(range(0, len(text.ids), T), "look", disable=not progress, leave=False)
    means = [Means() for _ in viewers]

    def windows():
        for s in starts:
            looks = [look(viewer, text, name, maps, start=s, end=s + T, first_token=first_token)
                     for viewer in viewers]
            for mean, entry in zip(means, looks):
                mean.add(entry)
            yield looks

    first, _ = write(windows(), files[0])
    write_picture(files[1], viewers, text.ids[:T], name)
    if missing := sorted({name for viewer in viewers for name in viewer.left_out}):
        notes.append(f"Left out, since their shapes are none of [H], [B, T] and [B, T, H]: "
                     f"{', '.join(missing)}.")
    numbers = dict(text=printable(name), tokens=len(text.ids), windows=len(starts), block_size=T, notes=notes,
                   lines=str(files[0]), picture=str(files[1]),
                   runs=[dict(ckpt=printable(viewer.path), set=viewer.settings, means=mean.means())
                         for viewer, mean in zip(viewers, means)])
    summary = f"{name}: {plural(len(text.ids), 'token')} in {plural(len(starts), 'window')} of {T:,}"
    lines = [summary, *notes]
    for viewer, entry in zip(viewers, first):
        lines += ["", f"{title_of(viewer)}, the first window: means over blocks and heads",
                  *table_of(entry).split("\n")]
    return numbers, [*lines, "", *map(str, files)]


def look_at_samples(viewer, tokenizer, prompt, samples, files):
    """Samples: [S] texts of explain()'s lines, "" where there are none.

    prompt: its ids; samples: the ids that follow it, a list each. files: paths().
    """
    T, windows = viewer.model.config.block_size, []
    for number, ids in enumerate(samples, 1):
        text = spell(tokenizer, [*prompt, *ids])
        windows.append([look(viewer, text, f"sample {number}", prompt=len(prompt),
                             start=max(0, len(text.ids) - T), first_token=fits([viewer], T))])
    _, explanations = write(windows, files[0])
    write_picture(files[1], [viewer], windows[0][0].line["ids"], "sample 1")
    return ["\n".join([*notes_of([viewer]), *rows]) for rows in explanations]


def look_at_task(args, device, files):
    """A row of each of args.levels, of the task that args.ckpt were trained on; returns look_at_text()'s.
    UserError.
    """
    if not task_scores.are_of_tasks(args.ckpt):
        raise UserError(f"--levels is of a task, and {args.ckpt[0]} was trained on a text")
    args.split = "test"
    runs, levels, length = task_scores.open_runs(args, device)
    data = runs[0].data
    ids = [token for level in levels for token in data.rows(args.split, level, 1, length)[0][0].tolist()]
    viewers = [Viewer(run.model, path, args.settings) for run, path in zip(runs, args.ckpt)]
    name = f"{data.name}, {', '.join(map(str, levels))} {data.task.unit}"
    return look_at_text(viewers, Tokenizer.from_meta(data.meta), ids, name, files, args.maps, width=length)


# ---- command line ----

def run(args):
    """Look at args.text, args.start or args.levels with the checkpoints args.ckpt; returns look_at_text()'s.
    UserError.
    """
    if len(args.ckpt) > 2:
        raise UserError(f"--ckpt: one, or two side by side, not {len(args.ckpt)}")
    device, files = pick_device(args.device), paths(args.out or "look.jsonl", "--out")
    prompt, path = getattr(args, "start", None), args.text
    if path is not None and Path(path).resolve() in files:
        raise UserError(f"--out: {path} is the text itself, and would be lost")
    other_files = [*files, *([] if path is None else [Path(path).resolve()])]
    if args.json and writable(args.json) in other_files:
        raise UserError(f"--json: {args.json} is the text, the JSON lines or the picture; "
                        "it needs another name")
    if args.levels:
        return look_at_task(args, device, files)
    pairs = [model_and_tokenizer(ckpt, device, settings=args.settings) for ckpt in args.ckpt]
    tokenizer = pairs[0][1]
    if not all(same_tokens(tokenizer, other_tokenizer) for _, other_tokenizer in pairs):
        raise UserError(f"{args.ckpt[0]} and {args.ckpt[1]} have different vocabularies: side by side they "
                        "need the same tokens")
    if prompt is None:
        ids, name = read_ids(path, tokenizer), path
    else:
        ids = encode(tokenizer, read_prompt(prompt), args.ckpt[0], args.special)[0].tolist()
        name = "prompt"
    viewers = [Viewer(model, ckpt, args.settings) for (model, _), ckpt in zip(pairs, args.ckpt)]
    return look_at_text(viewers, tokenizer, ids, name, files, args.maps, sys.stderr.isatty())


@as_program(PROGRAM)
def main(argv=None):
    p = argparse.ArgumentParser(prog=PROGRAM, description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    add_checkpoints(p)
    text = p.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", metavar="FILE", help="the text to read")
    text.add_argument("--start", help='the text itself, or FILE:prompt.txt; \\n is a newline')
    text.add_argument("--levels", type=task_scores.numbers, metavar="2,12",
                      help="of a task that the checkpoint was trained on: a row of each of these levels")
    add_special(p)
    p.add_argument("--maps", action="store_true", help="the attention maps in the JSON lines too")
    p.add_argument("--out", help="JSON lines; a picture of that name, .png, comes beside them "
                                 "(default: look.jsonl)")
    p.add_argument("--json", help="write the mean of each series, and where the picture is, to this file")
    args = p.parse_args(argv)
    own_mechanism.add_named(args)
    numbers, lines = run(args)
    if args.json:
        write_json(args.json, numbers)
    say(*lines, *([args.json] if args.json else []))
