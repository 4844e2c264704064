"""
Generate text from one checkpoint, or from several side by side.

    python sample.py --ckpt out/a [--ckpt out/b ...] --start "To be" [--num_samples 3] [--max_new_tokens 300]
    python sample.py --ckpt out/a --start FILE:prompt.txt --temperature 0.8 --top_p 0.95

A run folder stands for its best.pt. Every checkpoint gets the same prompt, seed and settings; with one
checkpoint and one sample the text appears as it is made.
"""

import argparse
import codecs
import shutil
import sys
import textwrap
import time
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path

import torch

import checkpoint
from dataset import DataError, Dataset
from tokenizer import Tokenizer


def prompt(text):
    """The prompt itself; FILE:name reads it from a file, and \\n, \\t stand for what they usually do."""
    if not text.startswith("FILE:"):
        return text.replace("\\n", "\n").replace("\\t", "\t")
    try:
        return Path(text[5:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise checkpoint.CheckpointError(f"--start: {text[5:]} cannot be read as UTF-8 text ({e})")


def load(path, device):
    """(model, tokenizer) of a checkpoint; nanoGPT's take their vocabulary from the dataset that they name."""
    state = checkpoint.read(path, device)
    meta = state["meta"] or Dataset(state["dataset"] or "?").meta
    return checkpoint.build(state, path, device), Tokenizer.from_meta(meta)


def generate(model, tokenizer, text, args, on_piece=None):
    """args.num_samples continuations of `text`, as a list of str (the prompt not included), and tokens per second."""
    device = next(model.parameters()).device
    ids = tokenizer.encode(text).astype("int64") if text else [tokenizer.separator]  # an empty prompt: a text's beginning
    idx = torch.as_tensor(ids, device=device).repeat(args.num_samples, 1)
    generator = torch.Generator(device).manual_seed(args.seed)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be several tokens
    autocast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    rows, began = [], time.perf_counter()
    with autocast:
        for token in model.stream(idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.repetition_penalty,
                                  tokenizer.separator if args.stop else None, generator=generator):
            rows.append(token)
            if on_piece:
                on_piece(decoder.decode(tokenizer.decode_bytes(token.clamp_max(tokenizer.vocab_size - 1).tolist())))
    new = torch.stack(rows, dim=1).tolist()
    speed = len(new) * len(rows) / (time.perf_counter() - began)
    texts = [tokenizer.decode([t for t in row if t < tokenizer.vocab_size]) for row in new]  # a padded vocabulary may say nothing
    return texts, speed


def side_by_side(titles, texts, width):
    """Texts in columns of equal width, each wrapped to fit under its title."""
    each = max(20, (width - 3 * (len(texts) - 1)) // len(texts))
    columns = []
    for title, text in zip(titles, texts):
        lines = [w for line in text.splitlines() or [""] for w in (textwrap.wrap(line, each, drop_whitespace=False) or [""])]
        columns.append([title[-each:], "-" * min(each, len(title)), *lines])
    return "\n".join(" | ".join(cell.ljust(each) for cell in row).rstrip() for row in zip_longest(*columns, fillvalue=""))


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ckpt", action="append", required=True, help="a checkpoint or a run folder; may be repeated")
    p.add_argument("--start", default="\n", help='the prompt, or FILE:prompt.txt; "" begins at the corpus separator')
    p.add_argument("--num_samples", type=int, default=1)
    p.add_argument("--max_new_tokens", type=int, default=300)
    p.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    p.add_argument("--top_k", type=int, default=None, help="only the k likeliest tokens")
    p.add_argument("--top_p", type=float, default=None, help="only the likeliest tokens that hold this much of the mass")
    p.add_argument("--repetition_penalty", type=float, default=1.0, help="above 1: tokens already there become less likely")
    p.add_argument("--stop", action="store_true", help="stop at the corpus separator (a newline, or end of text)")
    p.add_argument("--seed", type=int, default=1337)
    p.add_argument("--device", default="auto")
    args = p.parse_args(argv)
    try:
        if args.num_samples < 1 or args.max_new_tokens < 1:
            raise checkpoint.CheckpointError("--num_samples and --max_new_tokens must be at least 1")
        device, text = checkpoint.pick_device(args.device), prompt(args.start)
        models = [load(path, device) for path in args.ckpt]
        if len(models) == args.num_samples == 1:
            sys.stdout.write(text)
            _, speed = generate(*models[0], text, args, lambda piece: (sys.stdout.write(piece), sys.stdout.flush()))
            print(f"\n\n{speed:,.0f} tokens/s", file=sys.stderr)
            return
        made = [generate(model, tokenizer, text, args) for model, tokenizer in models]
        for i in range(args.num_samples):
            print(f"\n==== sample {i + 1} ====")
            print(side_by_side(args.ckpt, [text + texts[i] for texts, _ in made], shutil.get_terminal_size((120, 40)).columns))
        for path, (_, speed) in zip(args.ckpt, made):
            print(f"{path}: {speed:,.0f} tokens/s", file=sys.stderr)
    except (checkpoint.CheckpointError, DataError, ValueError) as e:
        sys.exit(f"sample: {e}")


if __name__ == "__main__":
    main()
