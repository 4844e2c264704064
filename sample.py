"""
Generate text from one checkpoint, or from several side by side.

    python sample.py --ckpt out/a [--ckpt out/b ...] --start "To be" [--num_samples 3] [--max_new_tokens 300]
    python sample.py --ckpt out/a --start FILE:prompt.txt --temperature 0.8 --top_p 0.95
    python sample.py --ckpt out/a --set unet_skips=False --set gate.0.3=0    # switches moved, heads set
    python sample.py --ckpt out/a --start "To be" --audit audit.jsonl    # what its constraint heads say of it

A run folder stands for its best.pt. Every checkpoint gets the same prompt, seed and settings; with one
checkpoint and one sample the text appears as it is made. --audit says under each text which of its tokens
score highest, and writes the rest to a file and a page (docs/audit.md).
"""

import argparse
import codecs
import math
import shutil
import sys
import time
import unicodedata
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch

from evaluate import model_and_tokenizer, said
from model import check_sampling
from nanoheads.common import UserError, last_words, pick_device
from nanoheads.heads import audit
from nanoheads.training import checkpoint


def prompt(text):
    """The prompt, in which \\n and \\t mean what they usually do; FILE:name reads it from a file as it is."""
    if not text.startswith("FILE:"):
        return text.replace("\\n", "\n").replace("\\t", "\t")
    try:
        return Path(text[5:]).read_bytes().decode()
    except OSError as e:
        raise ValueError(f"--start: {text[5:]} cannot be read: {e.strerror}")
    except UnicodeDecodeError as e:
        raise ValueError(f"--start: {text[5:]} is not UTF-8 text: {e.reason} at byte {e.start:,}")


def encode(tokenizer, text, path):
    """The prompt's token ids, [1, T]; an empty prompt is the corpus separator: the beginning of a text."""
    try:
        return torch.tensor([tokenizer.encode(text).tolist() or [tokenizer.separator]])
    except ValueError as e:
        raise ValueError(f"--start, for {path}: {e}")


def generate(model, tokenizer, ids, args, on_piece=None, rows=None):
    """(texts, tokens per second): args.num_samples continuations of ids [1, T].

    on_piece is called with every new piece of the first text, in whole characters. rows, a list, gets the ids
    of each text, a stop token and what follows it left out.
    """
    device = next(model.parameters()).device
    stop = tokenizer.separator if args.stop else None
    autocast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be several tokens

    def spell(tokens):
        return tokenizer.decode_bytes(said(tokens, tokenizer, stop))

    prompts = ids.to(device).repeat(args.num_samples, 1)
    generator = torch.Generator(device).manual_seed(args.seed)
    steps, began = [], time.perf_counter()
    with autocast:
        for token in model.stream(prompts, args.max_new_tokens, args.temperature, args.top_k, args.top_p,
                                  args.repetition_penalty, stop, generator=generator):
            steps.append(token)
            if on_piece:
                on_piece(decoder.decode(spell(token[:1].tolist())))
    if on_piece:
        on_piece(decoder.decode(b"", final=True))
    made = torch.stack(steps, dim=1).tolist()
    if rows is not None:
        rows += [row[:row.index(stop)] if stop in row else row for row in made]
    texts = [spell(row).decode("utf-8", "replace") for row in made]
    return texts, len(texts) * len(steps) / (time.perf_counter() - began)


# ---- columns ----

def cells(text):
    """Terminal cells that a text takes."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def wrap(line, width):
    """Cut a line into rows of at most `width` cells, after a space where there is one."""
    rows, row = [], ""
    for c in line.expandtabs(4):
        if unicodedata.category(c)[0] == "C":  # controls move the cursor
            c = "\ufffd"
        if cells(row + c) > width:
            cut = row.rfind(" ") + 1 or len(row)
            rows, row = rows + [row[:cut]], row[cut:]
        row += c
    return [*rows, row]


def side_by_side(titles, texts, width):
    """Texts in columns of equal width under their titles; columns that find no room come below."""
    fit = max(1, (width + 3) // 23)  # 20 cells and a rule
    if len(texts) > fit:
        return "\n\n".join(side_by_side(titles[i:i + fit], texts[i:i + fit], width)
                           for i in range(0, len(texts), fit))
    each = (width + 3) // len(texts) - 3
    columns = []
    for title, text in zip(titles, texts):
        rows = [row for line in text.split("\n") for row in wrap(line, each)]
        columns.append([title[-each:], "-" * min(each, len(title)), *rows])
    lines = []
    for row in zip_longest(*columns, fillvalue=""):
        lines.append(" | ".join(cell + " " * (each - cells(cell)) for cell in row).rstrip())
    return "\n".join(lines)


# ---- command line ----

def check(args):
    """Raise ValueError for the first setting that makes no sense."""
    for name in ("num_samples", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}={getattr(args, name)} must be at least 1")
    for name in ("temperature", "top_p", "repetition_penalty"):
        if not math.isfinite(getattr(args, name) or 0):
            raise ValueError(f"{name}={getattr(args, name)} must be a finite number")
    if not 0 <= args.seed < 1 << 63:
        raise ValueError(f"seed={args.seed} must be from 0 to 2^63 - 1")
    check_sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)


def audit_files(args, models):
    """Where --audit writes to, after every check that needs no text; None without it. UserError."""
    if not args.audit:
        return None
    if len(models) > 1:
        raise UserError("--audit takes one checkpoint")
    audit.auditable(models[0][0], args.ckpt[0])
    return audit.paths(args.audit, "--audit")


def explained(args, models, prompts, rows, files):
    """Write the audit of samples, lists of ids; returns explain()'s lines for each. files: audit_files()."""
    return audit.of_samples(*models[0], args.ckpt[0], args.settings, prompts[0][0].tolist(), rows, files)


def run(args):
    """Load, generate, print."""
    check(args)
    device, text = pick_device(args.device), prompt(args.start)
    models = [model_and_tokenizer(path, device, args.dataset, args.settings) for path in args.ckpt]
    prompts = [encode(tokenizer, text, path) for (_, tokenizer), path in zip(models, args.ckpt)]
    changed = f"with {', '.join(args.settings)}" if args.settings else ""
    files, rows = audit_files(args, models), []

    # one text appears as it is made
    if len(models) == args.num_samples == 1:
        print(text, end="", flush=True)
        _, speed = generate(*models[0], prompts[0], args, partial(print, end="", flush=True), rows)
        speeds = [speed]
        print()
        if files:
            print("", *explained(args, models, prompts, rows, files), sep="\n")
    # several stand side by side
    else:
        texts, speeds = zip(*(generate(*model, ids, args, rows=rows) for model, ids in zip(models, prompts)))
        said_of = explained(args, models, prompts, rows, files) if files else None
        columns = shutil.get_terminal_size((120, 40)).columns
        if changed:
            print(changed, end="\n\n")
        for i in range(args.num_samples):
            if args.num_samples > 1:
                print(f"==== sample {i + 1} ====")
            samples = [text + t[i] for t in texts]
            print(samples[0] if len(samples) == 1 else side_by_side(args.ckpt, samples, columns), end="\n\n")
            if said_of:
                print(said_of[i], end="\n\n")
    sys.stdout.flush()
    for path, speed in zip(args.ckpt, speeds):
        print(f"{path}{', ' * bool(changed)}{changed}: {speed:,.0f} tokens/s", file=sys.stderr)
    for path in files or ():
        print(path, file=sys.stderr)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoint.add_arguments(p)
    p.add_argument("--start", default="\n",
                   help='the prompt, or FILE:prompt.txt; \\n is a newline (the default); "" is the separator')
    p.add_argument("--num_samples", type=int, default=1,
                   help="continuations from each checkpoint (default: 1)")
    p.add_argument("--max_new_tokens", type=int, default=300,
                   help="length of each, in tokens (default: 300)")
    p.add_argument("--temperature", type=float, default=0.8,
                   help="0: always the likeliest token (default: 0.8)")
    p.add_argument("--top_k", type=int, help="only the k likeliest tokens (default: all)")
    p.add_argument("--top_p", type=float,
                   help="only the likeliest tokens that hold this much of the mass (default: all)")
    p.add_argument("--repetition_penalty", type=float, default=1.0,
                   help="above 1: tokens already there become less likely (default: 1)")
    p.add_argument("--stop", action="store_true",
                   help="stop at the corpus separator (a newline, or end of text)")
    p.add_argument("--seed", type=int, default=1337, help="same seed, same text (default: 1337)")
    p.add_argument("--audit", metavar="FILE",
                   help="write what the constraint heads say of each text, as JSON lines; a page of that "
                        "name, .html, comes beside them")
    p.add_argument("--dataset",
                   help="where a nanoGPT checkpoint's vocabulary is, if not in the dataset that it names")
    args = p.parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # what the terminal cannot show becomes "?"
    with last_words("sample"):
        try:
            run(args)
        except RuntimeError as e:
            if "probability tensor" not in str(e):
                raise
            raise UserError("the probabilities are not numbers: damaged weights, or an extreme temperature "
                            "or repetition_penalty") from None


if __name__ == "__main__":
    main()
