"""Makes text with a checkpoint: the prompt from the command line, the tokens, several texts side by side."""

import codecs
import math
import time
import unicodedata
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from nanoheads import checkpoint
from nanoheads.common import UserError, printable, unescape
from nanoheads.logits import NotNumbers, check_sampling
from nanoheads.pruning import pack_in_place
from nanoheads.scoring import dataset_of, say_first
from nanoheads.tokenizer import Tokenizer, same_vocabulary


def model_and_tokenizer(path, device, dataset=None, settings=(), pack=False):
    """(model, tokenizer) of a checkpoint; pack: without the heads whose gate is 0, see pruning.pack().

    nanoGPT's take their vocabulary from a dataset: the one they name, or `dataset`.
    """
    state = checkpoint.read(path)
    model, meta = checkpoint.build(state, path, device, settings), state["meta"]
    if pack:
        pack_in_place(model)
    if not meta:
        data = dataset_of(state, path, dataset)
        checkpoint.check_vocabulary(state, data, path)
        meta = data.meta
    return model, tokenizer_of(meta, path)


def tokenizer_of(meta, path):
    """The Tokenizer of a checkpoint's meta. UserError: its vocabulary is damaged."""
    try:
        return Tokenizer.from_meta(meta)
    except (ValueError, TypeError) as e:  # TypeError: no list of characters at all
        raise UserError(f"{path}: its vocabulary cannot be read: {e}") from None


def cut_at_stop(ids, tokenizer, stop=None):
    """The ids up to a stop token, without those beyond the vocabulary, which a padded model may sample."""
    ids = ids[:ids.index(stop)] if stop in ids else ids
    return [i for i in ids if i < tokenizer.vocab_size]


def same_tokens(one, other):
    """Whether the ids of two tokenizers mean the same."""
    return same_vocabulary((one.encoding, one.vocab), (other.encoding, other.vocab))


# ---- settings, from the command line ----

MOST_TOKENS = 100_000_000  # all texts of one call are in memory at once


def add_arguments(parser):
    """The settings of every program that samples."""
    add = parser.add_argument
    add("--temperature", type=float, default=0.8,
        help="the higher, the more random; 0: always the likeliest token (default: 0.8)")
    add("--top_k", type=int, help="draw from the k likeliest tokens only (default: from all)")
    add("--top_p", type=float,
        help="draw from the likeliest tokens that have this probability together (default: from all)")
    add("--repetition_penalty", type=float, default=1.0,
        help="above 1: tokens that are already there become less likely (default: 1)")
    add("--stop", action="store_true", help="stop at the separator of the corpus: a newline, or end of text")
    add("--seed", type=int, default=1337, help="the same seed gives the same text (default: 1337)")


def add_special(parser):
    """The argument of every program that takes a prompt."""
    parser.add_argument("--special", choices=["token", "text"], default="token",
                        help="read <|endoftext|> and other special tokens in a prompt as these tokens "
                             "(default), or as plain text")


def check(args):
    """Raise UserError for the first setting that makes no sense."""
    for name in ("num_samples", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"{name}={getattr(args, name)} must be at least 1")
    if args.num_samples * args.max_new_tokens > MOST_TOKENS:
        raise UserError(f"num_samples={args.num_samples} of max_new_tokens={args.max_new_tokens} are too "
                        f"many to be made at once: at most {MOST_TOKENS:,} tokens; another "
                        "--seed makes others")
    for name in ("temperature", "top_p", "repetition_penalty"):
        if not math.isfinite(getattr(args, name) or 0):
            raise UserError(f"{name}={getattr(args, name)} must be a finite number")
    if not 0 <= args.seed < 1 << 63:
        raise UserError(f"seed={args.seed} must be from 0 to 2^63 - 1")
    check_settings(args)


def check_settings(args):
    """Raise UserError for a temperature, top_k, top_p or penalty that means nothing."""
    try:
        check_sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)
    except ValueError as e:
        raise UserError(str(e)) from None


def stop_of(args, tokenizer):
    """The token that ends a text, None without --stop. UserError: the vocabulary has none."""
    if args.stop and tokenizer.end is None:
        raise UserError("--stop: this vocabulary has neither a newline nor an end-of-text token to stop at")
    return tokenizer.end if args.stop else None


def settings_of(args, tokenizer):
    """The settings as GPT.stream() takes them. UserError: see stop_of()."""
    return dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
                repetition_penalty=args.repetition_penalty,
                stop_token=stop_of(args, tokenizer))


def read_prompt(text):
    """The prompt, by unescape(); FILE:name reads it from a file as it is."""
    if not text.startswith("FILE:"):
        return unescape(text)
    try:
        return Path(text[5:]).read_bytes().decode()
    except OSError as e:
        raise UserError(f"--start: {text[5:]} cannot be read: {e.strerror}")
    except UnicodeDecodeError as e:
        raise UserError(f"--start: {text[5:]} is not UTF-8 text: {e.reason} at byte {e.start:,}")


def encode(tokenizer, text, path, special="token"):
    """The prompt's token ids, [1, T]; an empty prompt is the corpus separator: the beginning of a text.

    special: "text": the names of special tokens in it are text. A line says what a published model's
    tokenizer puts before them.
    """
    say_first(path, tokenizer)
    try:
        return torch.tensor([tokenizer.encode_prompt(text, special == "token") or [tokenizer.first]])
    except ValueError as e:
        raise UserError(f"--start, for {path}: {e}")


# ---- generation ----

def write(model, idx, length, seed=None, on_step=None, **settings):
    """The ids that a model makes of prompts idx [B, T]: B lists of the same length, `length` at most.

    seed: of a generator of this call's own, or a list with one for each prompt; None: the global one.
    settings: those of GPT.stream(). on_step is called with each step's ids [B], a list; where it returns
    True, that was the last. Raises UserError where the probabilities are not numbers.
    """
    if isinstance(seed, list):
        settings["generator"] = [torch.Generator(idx.device).manual_seed(row_seed) for row_seed in seed]
    elif seed is not None:
        settings["generator"] = torch.Generator(idx.device).manual_seed(seed)
    steps = []
    try:
        for ids in model.stream(idx, length, **settings):
            steps.append(ids)
            if on_step and on_step(ids.tolist()):
                break
    except NotNumbers as e:
        raise UserError(str(e)) from None
    return torch.stack(steps, dim=1).tolist() if steps else [[] for _ in idx]


def seeds_of(seed, count):
    """A seed for each of `count` texts, a list. The first is `seed`; none depends on how many there are."""
    others = (np.random.SeedSequence([seed, i]).generate_state(1, np.uint64) for i in range(1, count))
    return [seed, *(int(state[0]) for state in others)]


def bfloat16_on_gpu(device):
    """The autocast of a text that nothing is measured against: bfloat16 on a GPU, elsewhere none."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


class Samples(NamedTuple):
    """Texts [S]; the ids of each, a stop token and what follows it left out; tokens made per second."""
    texts: list
    rows: list
    tokens_per_s: float


def generate(model, tokenizer, ids, args, on_piece=None):
    """The Samples of args.num_samples continuations of ids [1, T].

    on_piece is called with every new piece of the first text, in whole characters.
    """
    device, settings = next(model.parameters()).device, settings_of(args, tokenizer)
    stop = settings["stop_token"]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be several tokens

    def spell(tokens):
        return tokenizer.decode_bytes(cut_at_stop(tokens, tokenizer, stop))

    def show_first(tokens):
        on_piece(decoder.decode(spell(tokens[:1])))

    idx, start_time = ids.to(device).repeat(args.num_samples, 1), time.perf_counter()
    with bfloat16_on_gpu(device):
        seeds = seeds_of(args.seed, args.num_samples)
        rows = write(model, idx, args.max_new_tokens, seeds, show_first if on_piece else None, **settings)
    if on_piece:
        on_piece(decoder.decode(b"", final=True))
    texts = [spell(row).decode("utf-8", "replace") for row in rows]
    speed = len(rows) * len(rows[0]) / (time.perf_counter() - start_time)
    return Samples(texts, [row[:row.index(stop)] if stop in row else row for row in rows], speed)


# ---- columns ----

def cell_count(text):
    """Terminal cells that a text takes."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def wrap(line, width):
    """Cut a line into rows of at most `width` cells, after a space where there is one."""
    rows, row = [], ""
    for c in line.expandtabs(4):
        if unicodedata.category(c)[0] == "C":  # controls move the cursor
            c = "\ufffd"
        if cell_count(row + c) > width:
            cut = row.rfind(" ") + 1 or len(row)
            rows, row = rows + [row[:cut]], row[cut:]
        row += c
    return [*rows, row]


def side_by_side(titles, texts, width):
    """Texts in columns of equal width under their titles; columns that find no room come below."""
    n_columns = max(1, (width + 3) // 23)  # 20 cells and a rule
    if len(texts) > n_columns:
        return "\n\n".join(side_by_side(titles[i:i + n_columns], texts[i:i + n_columns], width)
                           for i in range(0, len(texts), n_columns))
    column_width = (width + 3) // len(texts) - 3
    columns = []
    for title, text in zip(titles, texts):
        rows = [row for line in text.split("\n") for row in wrap(line, column_width)]
        title = printable(title)
        columns.append([title[-column_width:], "-" * min(column_width, len(title)), *rows])
    lines = []
    for row in zip_longest(*columns, fillvalue=""):
        lines.append(" | ".join(cell + " " * (column_width - cell_count(cell)) for cell in row).rstrip())
    return "\n".join(lines)
