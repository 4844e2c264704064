"""
What constraint heads score in a text, token by token.

    python probe.py audit --ckpt out/a --text FILE [--maps] [--out audit.jsonl]    # a file
    python evaluate.py --audit --ckpt out/a --text FILE                            # the same
    python sample.py --ckpt out/a --start "To be" --audit audit.jsonl              # what it writes

JSON lines, a line for each window of block_size tokens, or for each sample (its last block_size tokens), and
beside them a page of the same name, .html, that shows the text in colours. A line holds

    checkpoint, set    where it comes from: the weights, and what --set changed in them
    text               a file, or "sample 2"
    first, prompt      number of its first token in the whole text; how many of its tokens are a prompt
    ids, tokens        the tokens; bytes that are no UTF-8 without their neighbours as \\xc3
    offsets            [begin, end) of each in characters of the whole text: two bytes of "é" have the same.
                       A byte that is no UTF-8 at all counts as a character
    nats               -log p of each token after those before it in this line; null for the first
    explain            explain()'s lines: the tokens with the highest scores, for each name and block
    blocks             {number of a block: logits, probabilities, head_logits, gates, top, maps}, each by name

Of a block, logits are the name's scores [T], a mean over its heads; head_logits [heads, T]; gates the
router's, in (0, 1), [heads, T] or [heads, 1] where one gate serves the whole row; top the tokens that
explain() names; maps, only with --maps, [heads, T, t + 1]: what token t reads of those up to it. All are
those of one forward pass over the line's tokens, rounded to six decimals. The score at t is about token t.
"""

import argparse
import base64
import hashlib
import html as escaping
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

from nanoheads.common import UserError, last_words, pick_device, writable, write_atomic
from nanoheads.traces import explain
from nanoheads.text.tokenizer import char_sizes
from nanoheads.training import checkpoint
from nanoheads.training.sampling import model_and_tokenizer

PROGRAM = "probe.py audit"
TOP = 5  # tokens that explain() names
PAGE_TOKENS = 32768  # a page of more is slow in a browser; the lines hold them all
TEMPLATE = Path(__file__).with_name("audit_page.html")


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


# ---- one line ----

def plain(tensor):
    """Nested lists of a tensor's numbers."""
    return np.round(tensor.double().cpu().numpy(), 6).tolist()


@torch.no_grad()
def audit(model, text, source, maps=False, prompt=0, start=0, end=None):
    """The line of tokens [start, end) of a Text, as a dict; the whole forward pass is over them alone.

    source: (checkpoint, its settings, name of the text). prompt: how many tokens of the Text are one. Raises
    UserError for scores that are not numbers.
    """
    ids, raw, offsets = (part[start:end] for part in text)
    idx = torch.tensor([ids], device=next(model.parameters()).device)
    output = model(idx, traces="maps" if maps else True)
    traces, tokens = output.traces, [printed(piece) for piece in raw]
    nats = F.cross_entropy(output.logits[0, :-1].double(), idx[0, 1:], reduction="none").cpu().numpy()
    path, settings, name = source
    line = dict(checkpoint=printable(path), set=list(settings), text=printable(name), first=start,
                prompt=min(max(prompt - start, 0), len(ids)), ids=ids, tokens=tokens, offsets=offsets,
                nats=[None, *np.round(nats, 6).tolist()])
    names, heads = model.config.constraint_names, model.config.constraint_heads
    line["explain"] = [row for name in names for row in explain(traces, tokens, name, TOP).split("\n")]
    line["blocks"] = {}
    for layer in [key.split(".")[1] for key in traces if key.endswith(".head_scores")]:
        of = {key.split(".", 2)[2]: value[0] for key, value in traces.items()
              if key.startswith(f"blocks.{layer}.")}
        logits = {name: of[f"constraint.{name}"] for name in names}
        if not (np.isfinite(nats).all() and all(torch.isfinite(each).all() for each in logits.values())):
            raise UserError(f"{path}: its scores are not numbers: its weights are damaged")

        def by_name(tensor):
            """{name: the rows of its heads}; heads stand name after name."""
            return dict(zip(names, plain(tensor.unflatten(0, (len(names), heads)))))

        block = dict(logits={name: plain(each) for name, each in logits.items()},
                     probabilities={name: plain(each.double().sigmoid()) for name, each in logits.items()},
                     head_logits=by_name(of["head_scores"]), gates=by_name(of["router_gates"].T), top={})
        for name, each in logits.items():
            best = each.topk(min(TOP, len(ids))).indices.tolist()
            block["top"][name] = [dict(token=i, text=tokens[i], logit=plain(each[i])) for i in best]
        if maps:
            found = by_name(of["map"][-len(names) * heads:])
            block["maps"] = {name: [[row[:t + 1] for t, row in enumerate(head)] for head in found[name]]
                             for name in names}
        line["blocks"][layer] = block
    return line


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


def for_page(line, raw):
    """What the page shows of a line: numbers of its cells, short."""
    shown = cells(line, raw)

    def short(values):  # one for each cell, or the one there is
        values = values if len(values) == 1 else [values[last] for _, last, _ in shown]
        return [value if value is None else float(f"{value:.4g}") for value in values]

    return dict(text=line["text"], first=line["first"], tokens=len(line["ids"]), prompt=line["prompt"],
                cells=shown, nats=short(line["nats"]), explain=line["explain"],
                blocks={layer: dict(logits={n: short(v) for n, v in block["logits"].items()},
                                    gates={n: [short(v) for v in rows] for n, rows in block["gates"].items()})
                        for layer, block in line["blocks"].items()})


def page(lines, weights, note=""):
    """The page as text, of what for_page() returns, at least one. It asks the network for nothing."""
    names = {line["text"] for line in lines}
    title = f"{weights} on {names.pop() if len(names) == 1 else f'{len(names)} samples'}"
    # what could end the element, or begin a comment in it, is written in another way
    data = json.dumps(dict(note=note, lines=lines), separators=(",", ":")).replace("<", "\\u003c")
    head, script, tail = TEMPLATE.read_text(encoding="utf-8").partition("<script>")
    script, end, tail = tail.partition("</script>")
    code = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # the policy has the browser refuse what the page promises not to do: load anything, run what is not ours
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{code}'"
    values = dict(POLICY=policy, TITLE=escaping.escape(printable(title)), DATA=data)
    head = re.sub(r"\{\{(\w+)\}\}", lambda mark: values[mark[1]], head)
    return f"{head}<script>{script}{end}{tail}"


# ---- files ----

def paths(out, flag):
    """(the file of the JSON lines, the page beside it), both writable. UserError names the flag."""
    out = Path(out)
    if out.suffix.lower() == ".html":
        raise UserError(f"{flag}: {out} is the name of the page; the JSON lines need another, such as "
                        f"{out.with_suffix('.jsonl')}")
    return writable(out, flag), writable(out.with_suffix(".html"), flag)


def auditable(model, path):
    """Raise UserError for a model without constraint heads."""
    if not model.config.constraint_names:
        raise UserError(f"{path} has no constraint heads, and nothing to audit: "
                        "train.py --constraint_names=... or config/constraint.py makes some")


UNTRAINED = "No label has trained these heads: their scores, about 0.5, mean nothing."


def untrained(model):
    """[UNTRAINED] where no label has moved a score: the scorers' biases are 0, as they start; else []."""
    scorers = [block.attn.constraint for block in model.transformer.h if block.attn.constraint]
    return [] if any(bool(heads.b2.any()) for heads in scorers) else [UNTRAINED]


def write(found, out, page_path, notes=()):
    """Write the lines and the page, of pairs (line, bytes of its tokens); returns the lines' explain rows.

    notes: sentences for the top of the page.
    """
    shown, explained, count, weights = [], [], 0, None

    def write_lines(f):
        nonlocal count, weights
        for line, raw in found:
            f.write(json.dumps(line).encode() + b"\n")
            count += len(raw)
            explained.append(line["explain"])
            weights = " with ".join([line["checkpoint"], *filter(None, [", ".join(line["set"])])])
            if not shown or count <= PAGE_TOKENS:
                shown.append(for_page(line, raw))

    try:
        write_atomic(out, write_lines)
    finally:  # of an interrupted one
        out.with_name(out.name + ".part").unlink(missing_ok=True)
    here = sum(line["tokens"] for line in shown)
    if here < count:
        notes = [*notes, f"The first {here:,} of {count:,} tokens; {out.name} has them all."]
    content = page(shown, weights, " ".join(notes)).encode()
    write_atomic(page_path, lambda f: f.write(content))
    return explained


def of_file(model, tokenizer, source, out, maps=False, progress=False):
    """A file in windows of block_size, each token once. Returns what to print.

    source: (checkpoint, its settings, the file).
    """
    (ckpt, _, path), (out, page_path) = source, paths(out, "--out")
    if Path(path).resolve() in (out, page_path):
        raise UserError(f"--out: {path} is the text itself, and would be lost")
    auditable(model, ckpt)
    text, T = spell(tokenizer, read_ids(path, tokenizer)), model.config.block_size
    starts = tqdm(range(0, len(text.ids), T), "audit", disable=not progress, leave=False)
    found = ((audit(model, text, source, maps, start=s, end=s + T), text.raw[s:s + T]) for s in starts)
    write(found, out, page_path, notes := untrained(model))
    names = ", ".join(model.config.constraint_names)
    summary = f"{path}: {len(text.ids):,} tokens in {len(starts):,} windows of {T:,}, judged for {names}"
    return "\n".join([summary, *notes, str(out), str(page_path)])


def of_samples(model, tokenizer, ckpt, settings, prompt, samples, files):
    """Samples: [S] texts of explain()'s lines.

    prompt: its ids; samples: the ids that follow it, a list each. files: paths().
    """
    T, found = model.config.block_size, []
    for number, ids in enumerate(samples, 1):
        text = spell(tokenizer, [*prompt, *ids])
        start = max(0, len(text.ids) - T)
        source = ckpt, settings, f"sample {number}"
        found.append((audit(model, text, source, prompt=len(prompt), start=start), text.raw[start:]))
    notes = untrained(model)
    return ["\n".join([*notes, *rows]) for rows in write(found, *files, notes)]


# ---- command line ----

def run(args):
    """Audit the file args.text with the checkpoint args.ckpt[0]; returns what to print. UserError."""
    path, device = args.ckpt[0], pick_device(args.device)
    model, tokenizer = model_and_tokenizer(path, device, settings=args.settings)
    source = path, args.settings, args.text
    return of_file(model, tokenizer, source, args.out or "audit.jsonl", args.maps, sys.stderr.isatty())


def main(argv=None):
    p = argparse.ArgumentParser(prog=PROGRAM, description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoint.add_arguments(p)
    p.add_argument("--text", required=True, metavar="FILE", help="the text to read")
    p.add_argument("--maps", action="store_true", help="the attention maps of the constraint heads too")
    p.add_argument("--out", help="JSON lines; a page of that name, .html, comes beside them "
                                 "(default: audit.jsonl)")
    args = p.parse_args(argv)
    with last_words(PROGRAM):
        if len(args.ckpt) > 1:
            raise UserError(f"--ckpt: one at a time, not {len(args.ckpt)}")
        print(run(args))
