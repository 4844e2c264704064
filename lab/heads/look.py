"""
What a checkpoint's mechanisms do to a text, token by token: as JSON lines, and as a page to look at.

    python -m lab.probe look --ckpt out/a [--ckpt out/b] --text FILE [--maps] [--out look.jsonl]
    python -m lab.probe look --ckpt out/a --start "To be"                          # the prompt itself
    python -m lab.probe look --ckpt out/recall --levels 2,12          # rows of the task it was trained on
    python sample.py --ckpt out/a --start "To be" --audit audit.jsonl          # of what it writes

A line is a window of block_size tokens (of two checkpoints the shorter), a row of a task, or a sample (its
last block_size tokens); of two checkpoints one line each, in turn. Beside the lines comes a page of the same
name, .html. A line holds

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

Series are the traces of the model and its mechanisms by their names, blocks.<i>.<trace>; of a gate for each
dimension of a head the mean is taken. first_token is the weight on the line's first token, sink_mass 1 less
the sink's gate. What constraint heads have is in blocks instead, by name: logits are the name's scores [T], a
mean over its heads; head_logits [heads, T]; gates the router's, in (0, 1), [heads, T] or [heads, 1]; top the
tokens that explain() names. All are of one forward pass over the line's tokens, rounded to six decimals. The
score at t is about token t.
"""

import argparse
import base64
import hashlib
import html as escaping
import json
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

from nanoheads import checkpoint, task_scores
from nanoheads.common import (ArgumentParser, UserError, last_words, no_link, pick_device, plural, read_whole,
                              say, writable, write_atomic, write_json)
from nanoheads.sampling import add_special, encode, model_and_tokenizer, read_prompt, same_tokens
from nanoheads.tokenizer import Tokenizer, char_sizes
from nanoheads.traces import GATE, declared_axes, explain, head_numbers
from lab.heads.measuring import attentions, in_float64

PROGRAM = "probe.py look"
FLOATS = 1 << 26  # of attention maps that are held at once
TOP = 5  # tokens that explain() names
PAGE_TOKENS = 32768  # a page of more is slow in a browser; the lines hold them all
PAGE_NUMBERS = 1 << 22  # of all series on a page
PAGE_MAPS = 12 << 20  # bytes of attention maps on a page
TEMPLATE = Path(__file__).with_name("look_page.html")


# ---- a text ----

class Text(NamedTuple):
    """Tokens and what they stand for: ids [n], the bytes of each [n], offsets [n, 2] in characters."""
    ids: list
    raw: list
    offsets: list


def spell(tokenizer, ids):
    """The Text of token ids; one beyond the vocabulary, which a padded model may sample, has no bytes."""
    known = {i: tokenizer.decode_bytes([i]) if i < tokenizer.vocab_size else b"" for i in set(ids)}
    raw = [known[i] for i in ids]
    whole = b"".join(raw).decode("utf-8", "surrogateescape")
    character = np.append(np.repeat(np.arange(len(whole)), char_sizes(whole)), len(whole))  # of each byte
    ends = np.cumsum([len(piece) for piece in raw])
    begins = ends - [len(piece) for piece in raw]
    last = np.where(ends > begins, character[ends - 1] + 1, character[begins])
    return Text(list(ids), raw, np.stack((character[begins], last), 1).tolist())


def printed(raw):
    return raw.decode("utf-8", "backslashreplace")


def printable(name):
    """A file's name as text that any file can hold."""
    return str(name).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read_ids(path, tokenizer):
    """Token ids of a file. UserError: it is missing, empty, or holds what the vocabulary lacks."""
    try:
        raw = read_whole(path)
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

class Kind(NamedTuple):
    """What a trace is, for a person; low, high: the ends of its colours, None: of the numbers there are.

    signed: has 0 a meaning, and a colour for each side? Of the tokens of one character the last one's number
    counts, or with `sums` their sum.
    """
    label: str
    about: str
    low: Optional[float] = None
    high: Optional[float] = None
    signed: bool = False
    sums: bool = False


KINDS = {
    "nats": Kind("surprise, nats", "-log p of the token after those before it in this part", 0, sums=True),
    "a2c.advantage": Kind("A2C advantage", "return less value: did it go better than expected? Near the end "
                          "of a part, of few tokens", signed=True),
    "a2c.return": Kind("A2C return", "discounted mean log p of the tokens to come in this part"),
    "a2c.value": Kind("A2C value", "the return that the value head expects from the text so far"),
    "advantage": Kind("A2C critic", "the critic's number, which acts on the head's attention logits",
                      signed=True),
    "routing_weights": Kind("routing weight", "what the router multiplies the head's output by", 0),
    "selected": Kind("chosen head", "1 where the router chose the head for this token", 0, 1),
    "routing_logits": Kind("routing logit", "what the router chooses by", signed=True),
    "acag_gate": Kind("ACAG gate", "factor on the head's output, from the context's length and the shape of "
                      "the attention row; the curve shows it against the length", 0),
    "output_gate": Kind("output gate", "factor on the head's output, from the token", 0, 1),
    "sink_mass": Kind("sink mass", "share of the attention that goes to nothing", 0, 1),
    "log_forget": Kind("log forget gate", "log of the factor by which the head fades all earlier keys"),
    "gate": Kind("static gate", "sentinel, agency or set by hand: the same factor for all tokens", 0, 1),
    "agency": Kind("agency", "factor of its state, the same for all tokens", 0, 1),
    "agency_utilisation": Kind("agency: utilisation", "share of the layer's output, as measured last in "
                               "training; the same for all tokens", 0, 1),
    "agency_last_signal": Kind("agency: last signal", "the training step in which its state or consent last "
                               "changed; the same for all tokens", 0),
    "head_scores": Kind("constraint logit of a head", "the score of each constraint head, before the mean",
                        signed=True),
    "router_gates": Kind("constraint router", "gate on the constraint head's output", 0, 1),
    "entropy": Kind("attention entropy", "of the head's attention row, in nats: 0 reads one token", 0),
    "concentration": Kind("attention concentration", "sum of squared weights of the row: 1 reads one token",
                          0, 1),
    "first_token": Kind("attention to the first token", "weight on the first token of this part", 0, 1),
}


def kind_of(name):
    """The Kind of a trace, by its name without the block; of one that is not known its name."""
    if name.startswith("constraint."):
        label = name.partition(".")[2]
        return Kind(f"score: {label}", f"probability that the heads give to {label}, from the text up to it",
                    0, 1)
    return KINDS.get(name, Kind(name, "a trace of that name"))


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
        self.axes = declared_axes(model)
        self.undeclared = set()  # traces that have neither such axes nor a gate's

    @torch.no_grad()
    def read(self, ids, take, maps=True):
        """(logits [T, V], {trace: tensor}) of ids [T]; take(block, map [heads, T, T]) gets the maps.

        One block's maps are in memory at a time.
        """
        idx = torch.tensor([ids], device=next(self.model.parameters()).device)
        targets = F.pad(idx[:, 1:], (0, 1), value=-1)  # A2C's return is one of what came
        with maps_to(self.layers, take):
            output = self.model(idx, targets=targets, traces="maps" if maps else True, logits=True)
        return output.logits[0], output.traces

    def series(self, traces):
        """{trace: Series} of a pass, in the order of KINDS: means over what is neither a token nor a head.

        Raises UserError for axes that are not as trace_axes has them.
        """
        series, T = {}, traces["blocks.0.entropy"].size(-1)
        for key, x in traces.items():
            axes, (block, name) = self.axes.get(key, GATE), parted(key)
            if len(axes) != x.dim():
                self.undeclared.add(name)
                continue
            if not x.numel():  # a layer whose heads are all pruned
                continue
            numbers = {} if block is None else head_numbers(self.layers[block])
            heads = next((numbers[axis] for axis in axes if axis in numbers), None)
            moved = [axes.index(axis) for axis in (*numbers, "token") if axis in axes]
            shape, x = [*x.shape], x.detach().cpu().double().movedim(moved, list(range(len(moved))))
            x = x.reshape(*x.shape[:len(moved)], -1).mean(-1)
            if heads is not None and len(x) == 1 != len(heads):  # one number for all heads
                x, heads = x[0], None
            x = x if "token" in axes else x[..., None]
            if x.size(-1) not in (1, T) or heads is not None and len(x) != len(heads):
                raise UserError(f"{self.path}: the trace {name} of shape {shape} does not have the axes "
                                f"{', '.join(axes)}: trace_axes of its mechanism says which it has")
            if heads is None:
                x = x.expand(T)
            else:
                left = [row for row, head in enumerate(heads) if head in numbers["head"]]
                x, heads = x[left], [heads[row] for row in left]
                if not left:
                    continue
            values = x.numpy()
            if key.endswith(".sink_gate"):
                key, values = key.replace("sink_gate", "sink_mass"), 1 - values
            if key.startswith("a2c."):
                values[-1] = np.nan  # nothing has come yet
            series[key] = Series(values, heads)
        rank = {name: number for number, name in enumerate(KINDS)}
        return dict(sorted(series.items(), key=lambda item: rank.get(parted(item[0])[1], -1)))


def parted(key):
    """(block or None, name) of a trace's key."""
    if not key.startswith("blocks."):
        return None, key
    _, block, name = key.split(".", 2)
    return int(block), name


@contextmanager
def maps_to(layers, take):
    """Meanwhile the attention maps of each layer, [heads, T, T], go to take(block, map) and no further."""
    def hook(attn, args, output):
        p = output[1]["traces"].pop("map", None)
        if p is not None and p.numel():
            take(attn.layer, p[0])

    hooks = [attn.register_forward_hook(hook) for attn in layers]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


# ---- one line ----

def plain(values):
    """Nested lists of an array's or tensor's numbers; what is none, null."""
    values = values.cpu().double().numpy() if torch.is_tensor(values) else values
    rounded, there = np.round(values, 6), np.isfinite(values)
    return (rounded if there.all() else np.where(there, rounded, None)).tolist()


class Look(NamedTuple):
    """What one checkpoint does in one window: its JSON line, {trace: Series}, {block: packed maps}."""
    line: dict
    series: dict
    maps: dict


def packed(p):
    """Attention maps [heads, T, T] as a base64 text for each head: 8 bits a weight, what lies ahead left out.

    First, for each row, what 0 and 255 stand for, float32, little-endian; then the rows, 1 to T long.
    """
    texts, seen = [], np.tri(p.size(-1), dtype=bool)
    for head in p.float():
        low, high = head.amin(-1, keepdim=True).clamp_max(0), head.amax(-1, keepdim=True)
        codes = ((head - low) * (255 / (high - low).clamp_min(1e-30))).round().clamp(0, 255)
        ends = torch.cat((low, high), -1).cpu().numpy().astype("<f4")
        raw = ends.tobytes() + codes.to(torch.uint8).cpu().numpy()[seen].tobytes()
        texts.append(base64.b64encode(raw).decode())
    return texts


class Room:
    """Bytes that are left on a page for attention maps."""

    def __init__(self):
        self.left = PAGE_MAPS

    def takes(self, p):
        """Whether maps [heads, T, T] still fit; then they have their room."""
        H, T, _ = p.shape
        size = H * (8 * T + T * (T + 1) // 2)
        fits = size <= self.left
        self.left -= size if fits else 0
        return fits


def room_for(viewers, T):
    """A Room; None where one block's attention maps over T tokens would not fit into memory."""
    heads = max(attn.n_total for viewer in viewers for attn in viewer.layers)
    return Room() if heads * T * T <= FLOATS else None


def look(viewer, text, name, maps=False, prompt=0, start=0, end=None, room=None):
    """The Look at tokens [start, end) of a Text; the whole forward pass is over them alone.

    name: of the text. maps: in the line too. prompt: how many tokens of the Text are one. room: a Room for
    maps; None: there are none, nor the weight on the first token. Raises UserError for what is no number.
    """
    ids, raw, offsets = (part[start:end] for part in text)
    packed_maps, rows, first = {}, {}, {}

    def take(block, p):
        first[f"blocks.{block}.first_token"] = Series(p[..., 0].cpu().double().numpy(),
                                                      viewer.layers[block].all_head_ids())
        if room and room.takes(p):
            packed_maps[block] = packed(p)
        if maps:
            rows[block] = [[row[:t + 1] for t, row in enumerate(head)] for head in plain(p)]

    logits, traces = viewer.read(ids, take, maps or room)
    logits = in_float64(logits[:-1])
    after = torch.tensor(ids[1:], dtype=torch.long, device=logits.device)
    nats = F.cross_entropy(logits, after, reduction="none").cpu().numpy()
    series = {"nats": Series(np.append(np.nan, nats), None), **viewer.series(traces), **first}
    tokens = [printed(piece) for piece in raw]
    line = dict(checkpoint=printable(viewer.path), set=viewer.settings, text=printable(name), first=start,
                prompt=min(max(prompt - start, 0), len(ids)), ids=ids, tokens=tokens, offsets=offsets,
                nats=plain(series["nats"].values))
    shown = {key: each for key, each in series.items() if key != "nats" and not of_constraints(key)}
    line.update(series={key: plain(each.values) for key, each in shown.items()},
                heads={key: each.heads for key, each in shown.items() if each.heads})
    if maps:
        line["maps"] = {str(block): each[:viewer.layers[block].n_head] for block, each in rows.items()}
    line["explain"] = [row for name in viewer.names for row in explain(traces, tokens, name, TOP).split("\n")]
    scored = [parted(key)[0] for key in traces if key.endswith(".head_scores")]
    line["blocks"] = {str(block): constraint_block(viewer, traces, block, tokens, rows) for block in scored}
    check_numbers(viewer, nats, series)
    return Look(line, series, packed_maps)


def check_numbers(viewer, nats, series):
    """Raise UserError where the model's own numbers or its scores are none."""
    must = [nats, *(each.values for key, each in series.items()
                    if of_constraints(key) or parted(key)[1] == "entropy")]
    if not all(np.isfinite(each).all() for each in must):
        raise UserError(f"{viewer.path}: its scores are not numbers: its weights are damaged")


def of_constraints(key):
    """Whether a trace is one of constraint heads alone, which has a place of its own in a line."""
    name = parted(key)[1]
    return name in ("head_scores", "router_gates") or name.startswith("constraint.")


def constraint_block(viewer, traces, block, tokens, rows):
    """What a line holds of the constraint heads of a block; rows: maps of its heads, {}: none are wanted."""
    names, heads = viewer.names, viewer.model.config.constraint_heads
    of = {parted(key)[1]: value[0] for key, value in traces.items() if parted(key)[0] == block}
    logits = {name: of[f"constraint.{name}"] for name in names}

    def by_name(values):
        """{name: the rows of its heads}; heads stand name after name."""
        return {name: values[i * heads:(i + 1) * heads] for i, name in enumerate(names)}

    block_line = dict(
        logits={name: plain(each) for name, each in logits.items()},
        probabilities={name: plain(in_float64(each).sigmoid()) for name, each in logits.items()},
        head_logits=by_name(plain(of["head_scores"])), gates=by_name(plain(of["router_gates"].T)), top={})
    for name, each in logits.items():
        best = each.topk(min(TOP, len(tokens))).indices.tolist()
        block_line["top"][name] = [dict(token=i, text=tokens[i], logit=plain(each[i])) for i in best]
    if rows:
        block_line["maps"] = by_name(rows[block][viewer.layers[block].n_head:])
    return block_line


# ---- means over a text ----

def as_shown(values, key):
    """A series as the page shows it: of a constraint's logits the probabilities."""
    return 1 / (1 + np.exp(-values)) if key.split(".")[2:3] == ["constraint"] else values


class Means:
    """The mean of each series over the tokens of a text, window after window; tokens without one left out."""

    def __init__(self):
        self.sums, self.counts, self.heads = {}, {}, {}

    def add(self, look):
        n = len(look.line["ids"])
        for key, each in look.series.items():
            values = as_shown(each.values, key)
            values = np.broadcast_to(values, (*values.shape[:-1], n))  # [.., 1]: the same for all tokens
            there = np.isfinite(values)
            self.sums[key] = self.sums.get(key, 0) + np.where(there, values, 0).sum(-1)
            self.counts[key] = self.counts.get(key, 0) + there.sum(-1)
            self.heads[key] = each.heads

    def means(self):
        """{series: mean, or {head: mean}}; None where no token has a number."""
        means = {}
        for key, total in self.sums.items():
            numbers = plain(np.where(self.counts[key], total / np.maximum(self.counts[key], 1), np.nan))
            heads = self.heads[key]
            means[key] = dict(zip(map(str, heads), numbers)) if heads else numbers
        return means


# ---- the page ----

def cells(line, raw):
    """[[text, its last token, token's character]]: what a person can point at.

    Tokens that share a character are one cell, which has the scores of the last: it alone has seen it all.
    raw: the bytes of the line's tokens.
    """
    groups = []
    for i, (begin, end) in enumerate(line["offsets"]):
        if groups and begin < line["offsets"][i - 1][1] and end > begin:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [[printed(b"".join(raw[i] for i in group)), group[-1], line["offsets"][group[0]][0]]
            for group in groups]


def word_starts(pieces):
    """The number of the first piece of each word: letters and digits, or what stands between, or one blank.

    A piece that begins with a blank and goes on, as GPT-2's do, begins a word.
    """
    def sort(c):
        return "blank" if c.isspace() else "word" if c.isalnum() or c in "_'’" else "sign"

    starts, before = [], None
    for i, piece in enumerate(pieces):
        here = sort(piece.lstrip()[:1] or " ")
        glued = piece[:1].strip() and here == before != "blank"
        if not glued:
            starts.append(i)
        before = sort(piece[-1:] or " ")
    return starts


def four_digits(v):
    """A number, short; None: it is none."""
    return float(f"{v:.4g}") if np.isfinite(v) else None


def for_page(looks, raw):
    """What the page shows of a window: its text once, and of each checkpoint the numbers of its cells."""
    line, shown = looks[0].line, cells(looks[0].line, raw)
    lasts = np.array([last for _, last, _ in shown])
    firsts = np.append(0, lasts[:-1] + 1)

    def short(values, key):  # one for each cell, or the one there is
        values = as_shown(values, key)
        if values.shape[-1] > 1:
            sums = kind_of(parted(key)[1]).sums
            values = np.add.reduceat(values, firsts, -1) if sums else values[..., lasts]
        return np.vectorize(four_digits, [object])(values).tolist()

    panes = [dict(values={key: short(each.values, key) for key, each in look.series.items()},
                  maps=look.maps, explain=look.line["explain"]) for look in looks]
    return dict(text=line["text"], first=line["first"], tokens=len(line["ids"]), prompt=line["prompt"],
                cells=shown, words=word_starts([piece for piece, _, _ in shown]), panes=panes)


def series_for_page(viewer, series):
    """[what the page has to know of each series, in the order of its list]."""
    described = []
    for key, each in series.items():
        block, name = parted(key)
        labels = each.heads
        if labels and viewer.names:
            n, per = viewer.layers[block].n_base, viewer.model.config.constraint_heads
            labels = [i if i < n else f"{i} {viewer.names[(i - n) // per]}" for i in labels]
        described.append(dict(key=key, block=block, name=name, heads=labels and [*map(str, labels)],
                              **kind_of(name)._asdict()))
    return described


def page(lines, panes, notes=()):
    """The page as text. lines: of for_page(), at least one; panes: [(title, series_for_page())].

    It asks the network for nothing.
    """
    names = {line["text"] for line in lines}
    title = " beside ".join(name for name, _ in panes)
    title += f" on {names.pop() if len(names) == 1 else f'{len(names)} samples'}"
    data = dict(notes=list(notes), panes=[dict(title=name, series=each) for name, each in panes], lines=lines)
    # what could end the element, or begin a comment in it, is written in another way
    data = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    head, script, tail = TEMPLATE.read_text(encoding="utf-8").partition("<script>")
    script, end, tail = tail.partition("</script>")
    code = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # the policy has the browser refuse what the page promises not to do: load anything, run what is not ours
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{code}'"
    values = dict(POLICY=policy, TITLE=escaping.escape(printable(title)), DATA=data)
    head = re.sub(r"\{\{(\w+)\}\}", lambda mark: values[mark[1]], head)
    return f"{head}<script>{script}{end}{tail}"


class Page:
    """The windows that a page has room for, and what it has to say of those that it has not."""

    def __init__(self, viewers, notes):
        self.viewers, self.notes = viewers, list(notes)
        self.lines, self.panes = [], []
        self.tokens = self.seen = self.numbers = 0

    def add(self, looks, raw):
        """Take a window, as far as there is room. raw: the bytes of its tokens."""
        if not self.panes:
            titles = (" with ".join([printable(r.path), *filter(None, [", ".join(r.settings)])])
                      for r in self.viewers)
            self.panes = [(title, series_for_page(r, look.series))
                          for title, r, look in zip(titles, self.viewers, looks)]
        self.seen += len(raw)
        numbers = sum(each.values.size for look in looks for each in look.series.values())
        if self.lines and (self.seen > PAGE_TOKENS or self.numbers + numbers > PAGE_NUMBERS):
            self.numbers = PAGE_NUMBERS  # none after it
            return
        self.numbers += numbers
        self.tokens += len(raw)
        self.lines.append(for_page(looks, raw))

    def text(self, out):
        """The page; out: the file of the JSON lines."""
        notes = list(self.notes)
        if self.tokens < self.seen:
            notes.append(f"The first {self.tokens:,} of {self.seen:,} tokens; {out.name} has them all.")
        if missing := sorted({name for viewer in self.viewers for name in viewer.undeclared}):
            notes.append(f"Not shown, since trace_axes does not name their axes: {', '.join(missing)}.")
        here = sum(len(pane["maps"]) for line in self.lines for pane in line["panes"])
        layers = sum(attn.n_total > 0 for viewer in self.viewers for attn in viewer.layers)
        every = len(self.lines) * layers
        made = any(key.endswith(".first_token") for key in self.lines[0]["panes"][0]["values"])
        if made and here < every:
            notes.append(f"Attention maps fill {PAGE_MAPS >> 20} MB: {here:,} of {every:,} (each of a block "
                         "in a part of the text) are here, the first.")
        return page(self.lines, self.panes, notes)


# ---- files ----

def paths(out, flag):
    """(the file of the JSON lines, the page beside it), both writable. UserError names the flag."""
    out = Path(out)
    if out.suffix.lower() == ".html":
        raise UserError(f"{flag}: {out} is the name of the page; the JSON lines need another, such as "
                        f"{out.with_suffix('.jsonl')}")
    lines = writable(out, flag)
    return lines, writable(no_link(out.with_suffix(".html")), flag)  # a name that nobody typed


UNTRAINED = "No label has trained these heads: their scores, about 0.5, mean nothing."


def untrained(model):
    """[UNTRAINED] where no label has moved a score: the scorers' biases are 0, as they start; else []."""
    scorers = [block.attn.constraint for block in model.transformer.h if block.attn.constraint]
    return [UNTRAINED] if scorers and not any(bool(heads.b2.any()) for heads in scorers) else []


def notes_of(viewers):
    """Sentences for the top of the page and for the terminal."""
    notes = []
    for viewer in viewers:
        own = untrained(viewer.model)
        if viewer.model.config.routing and not any(attn.router.in_eval for attn in viewer.layers):
            own.append("The router acts in training alone: it chooses nothing here.")
        notes += own if len(viewers) == 1 else [f"{printable(viewer.path)}: {note}" for note in own]
    return notes


def write(windows, out, page_path, viewers, notes=()):
    """Write the lines and the page of windows, each ([a Look of each viewer], bytes of its tokens).

    notes: sentences for the top of the page. Returns explain()'s lines of each window's first Look.
    """
    shown, explained = Page(viewers, notes), []

    def write_lines(f):
        for looks, raw in windows:
            for each in looks:
                f.write(json.dumps(each.line).encode() + b"\n")
            explained.append(looks[0].line["explain"])
            shown.add(looks, raw)

    try:
        write_atomic(out, write_lines)
    finally:  # of an interrupted one
        out.with_name(out.name + ".part").unlink(missing_ok=True)
    content = shown.text(out).encode()
    write_atomic(page_path, lambda f: f.write(content))
    return explained


def of_text(viewers, tokenizer, ids, name, files, maps=False, progress=False, width=None):
    """Write a text in windows of `width` tokens, None: block_size, the shortest of the viewers', each token
    once, into paths().

    Returns (what --json writes, the lines to print).
    """
    text, T = spell(tokenizer, ids), width or min(viewer.model.config.block_size for viewer in viewers)
    notes, room = notes_of(viewers), room_for(viewers, min(T, len(ids)))
    if len({viewer.model.config.block_size for viewer in viewers}) > 1:
        notes.append(f"Parts of {T:,} tokens, the shorter context.")
    if not (room or maps):
        notes.append("No attention maps: those of one block would not fit into memory.")
    starts = tqdm(range(0, len(text.ids), T), "look", disable=not progress, leave=False)
    means = [Means() for _ in viewers]

    def windows():
        for s in starts:
            looks = [look(viewer, text, name, maps, start=s, end=s + T, room=room) for viewer in viewers]
            for mean, each in zip(means, looks):
                mean.add(each)
            yield looks, text.raw[s:s + T]

    write(windows(), *files, viewers, notes)
    numbers = dict(text=printable(name), tokens=len(text.ids), windows=len(starts), block_size=T, notes=notes,
                   lines=str(files[0]), page=str(files[1]),
                   runs=[dict(ckpt=printable(viewer.path), set=viewer.settings, means=mean.means())
                         for viewer, mean in zip(viewers, means)])
    summary = f"{name}: {plural(len(text.ids), 'token')} in {plural(len(starts), 'window')} of {T:,}"
    return numbers, [summary, *notes, *map(str, files)]


def of_samples(viewer, tokenizer, prompt, samples, files):
    """Samples: [S] texts of explain()'s lines, "" where there are none.

    prompt: its ids; samples: the ids that follow it, a list each. files: paths().
    """
    T, windows = viewer.model.config.block_size, []
    room = room_for([viewer], T)
    for number, ids in enumerate(samples, 1):
        text = spell(tokenizer, [*prompt, *ids])
        start = max(0, len(text.ids) - T)
        seen = look(viewer, text, f"sample {number}", prompt=len(prompt), start=start, room=room)
        windows.append(([seen], text.raw[start:]))
    notes = notes_of([viewer])
    return ["\n".join([*notes, *rows]) for rows in write(windows, *files, [viewer], notes)]


def of_task(args, device, files):
    """A row of each of args.levels, of the task that args.ckpt were trained on; returns of_text()'s.
    UserError.
    """
    if not task_scores.are_of_tasks(args.ckpt):
        raise UserError(f"--levels is of a task, and {args.ckpt[0]} was trained on a text")
    args.split = "test"
    runs, levels, length = task_scores.opened(args, device)
    data = runs[0].data
    ids = [token for level in levels for token in data.rows(args.split, level, 1, length)[0][0].tolist()]
    viewers = [Viewer(each.model, path, args.settings) for each, path in zip(runs, args.ckpt)]
    name = f"{data.name}, {', '.join(map(str, levels))} {data.task.unit}"
    return of_text(viewers, Tokenizer.from_meta(data.meta), ids, name, files, args.maps, width=length)


# ---- command line ----

def run(args):
    """Look at args.text, args.start or args.levels with the checkpoints args.ckpt; returns of_text()'s.
    UserError.
    """
    if len(args.ckpt) > 2:
        raise UserError(f"--ckpt: one, or two side by side, not {len(args.ckpt)}")
    device, files = pick_device(args.device), paths(args.out or "look.jsonl", "--out")
    prompt, path = getattr(args, "start", None), args.text
    if path is not None and Path(path).resolve() in files:
        raise UserError(f"--out: {path} is the text itself, and would be lost")
    read_or_written = [*files, *([] if path is None else [Path(path).resolve()])]
    if args.json and writable(args.json) in read_or_written:
        raise UserError(f"--json: {args.json} is the text, the JSON lines or the page; it needs another name")
    if args.levels:
        return of_task(args, device, files)
    pairs = [model_and_tokenizer(each, device, settings=args.settings) for each in args.ckpt]
    tokenizer = pairs[0][1]
    if not all(same_tokens(tokenizer, other) for _, other in pairs):
        raise UserError(f"{args.ckpt[0]} and {args.ckpt[1]} have different vocabularies: side by side they "
                        "need the same tokens")
    if prompt is None:
        ids, name = read_ids(path, tokenizer), path
    else:
        ids = encode(tokenizer, read_prompt(prompt), args.ckpt[0], args.special)[0].tolist()
        name = "prompt"
    viewers = [Viewer(model, each, args.settings) for (model, _), each in zip(pairs, args.ckpt)]
    return of_text(viewers, tokenizer, ids, name, files, args.maps, sys.stderr.isatty())


def main(argv=None):
    p = ArgumentParser(prog=PROGRAM, description=__doc__,
                       formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoint.add_arguments(p)
    text = p.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", metavar="FILE", help="the text to read")
    text.add_argument("--start", help='the text itself, or FILE:prompt.txt; \\n is a newline')
    text.add_argument("--levels", type=task_scores.numbers, metavar="2,12",
                      help="of a task that the checkpoint was trained on: a row of each of these levels")
    add_special(p)
    p.add_argument("--maps", action="store_true", help="the attention maps in the JSON lines too")
    p.add_argument("--out", help="JSON lines; a page of that name, .html, comes beside them "
                                 "(default: look.jsonl)")
    p.add_argument("--json", help="write the mean of each series, and where the page is, to this file")
    with last_words(PROGRAM):
        args = p.parse_args(argv)
        checkpoint.allow_code(args)
        numbers, lines = run(args)
        if args.json:
            write_json(args.json, numbers)
        say(*lines, *([args.json] if args.json else []))
