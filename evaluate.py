"""
Score whole splits: every token once, bits per byte first.

    python evaluate.py --ckpt out/a [--ckpt out/b/ckpt.pt ...] [--split test] [--stride 128] [--json FILE]
    python evaluate.py --ckpt out/a --set unet_skips=False --set gate.0.3=0    # switches moved, heads set
    python evaluate.py --text --ckpt out/a [--ckpt out/b ...] [--judge out/big]    # what they write
    python evaluate.py --audit --ckpt out/a --text FILE [--maps] [--out audit.jsonl]   # what its heads say

The context policy is part of the number. Without --stride the split is cut into disjoint windows of
block_size tokens, and a token sees from 1 to block_size tokens before it. With --stride S the window moves on
by S tokens and scores its last S: after the first window, every token sees more than block_size - S. The very
first token is conditioned on the corpus separator. Words are what whitespace parts, as lm-evaluation-harness
counts them. FLOPs/token count training: forward and backward.

--text lets each model go on from the same prompts, and measures what it says: repetition, diversity, loops,
and its bits per byte under a larger model, beside the text's own continuation (docs/results/text-quality.md).

--audit writes what the constraint heads of a checkpoint think of each token of a file, as JSON lines and as a
page for the browser (docs/audit.md).
"""

import argparse
import codecs
import math
import re
import sys
import time
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from model import GPT, check_sampling
from nanoheads.common import UserError, pick_device, table, writable, write_json
from nanoheads.heads import audit
from nanoheads.text.dataset import Dataset
from nanoheads.text.tokenizer import Tokenizer
from nanoheads.training import checkpoint


BLOCK = 4096  # tokens whose nats a study keeps as one sum: neighbours resemble each other for less than that


# ---- scoring ----

def windows(n, block_size, stride):
    """[(start, end, scored)]: read tokens [start, end), score the last `scored`; each of n is scored once."""
    if not 1 <= stride <= block_size:
        raise ValueError(f"stride={stride} must be from 1 to block_size={block_size} (0: disjoint windows)")
    cuts = [(0, min(block_size, n), min(block_size, n))]
    while (done := cuts[-1][1]) < n:
        end = min(done + stride, n)
        cuts.append((done + stride - block_size, end, end - done))
    return cuts


def windows_of(dataset, split, block_size, stride=0, max_tokens=0):
    """The windows of a split that score() scores.

    max_tokens > 0: whole windows, evenly spaced from the first to the last, at least one, and beyond that so
    many tokens at most.
    """
    n, step = len(dataset.tokens(split)), stride or block_size
    cuts = windows(n, block_size, step)
    if 0 < max_tokens < n:
        cuts = [c for c in cuts if c[1] - c[0] == block_size] or cuts
        count = max(1, 1 + (max_tokens - block_size) // step)
        cuts = [cuts[i * (len(cuts) - 1) // max(1, count - 1)] for i in range(count)]
    return cuts


def window_ids(tokens, separator, start, end):
    """Tokens [start, end) after the one before them, at the beginning the separator; int64 [1 + n]."""
    ids = tokens[start - 1:end] if start else np.concatenate(([separator], tokens[:end]))
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


def nats_of_last(model, ids, n, most=None):
    """-log p of the last n of ids [B, 1 + T], float64 [B, n]; logits of `most` tokens in memory at a time,
    None: of all.
    """
    if most is None or len(ids) * n <= most:
        return nats_of(model(ids[:, :-1]).logits[:, -n:], ids[:, -n:])
    x = model.hidden(ids[:, :-1])[:, -n:].flatten(0, 1)
    parts = [nats_of(model.head(x_), y) for x_, y in zip(x.split(most), ids[:, -n:].flatten().split(most))]
    return np.concatenate(parts).reshape(len(ids), n)


LOGITS_AT_ONCE = 1 << 26  # 256 MB of them


@torch.no_grad()
def score(model, dataset, split, stride=0, max_tokens=0, batch_tokens=16384, rank=0, world=1, autocast=None,
          per_token=False, progress=False):
    """Cross-entropy of a split: (nats summed, tokens scored), or with per_token those of each, [n] float32.

    stride 0: disjoint windows. max_tokens > 0 scores at most so many tokens, the same at each call, see
    windows_of(). Windows go to ranks in turn; the caller adds the ranks' sums up.
    """
    device, T, tokens = next(model.parameters()).device, model.config.block_size, dataset.tokens(split)
    cuts = windows_of(dataset, split, T, stride, max_tokens)[rank::world]
    # logits are vocab_size floats a token. A CPU is fastest while they fit its caches; a GPU wants many rows
    # in the blocks, and the logits of a large vocabulary in portions
    most = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    if device.type == "cpu":
        batch_tokens, most = min(batch_tokens, most, 4096), None
    rows = max(1, batch_tokens // T)

    nats, count, parts = 0.0, 0, [np.empty(0, np.float32)]
    bar = tqdm(total=sum(scored for _, _, scored in cuts), desc=split, unit="tok", unit_scale=True,
               disable=not progress, leave=False, mininterval=0.5)
    was_training = model.training
    model.eval()
    try:
        with autocast or nullcontext(), bar:
            # windows of one length and one scored part go together
            for (_, scored), group in groupby(cuts, lambda c: (c[1] - c[0], c[2])):
                group = list(group)
                for at in range(0, len(group), rows):
                    ids = np.stack([window_ids(tokens, dataset.separator, start, end)
                                    for start, end, _ in group[at:at + rows]])
                    ids = torch.from_numpy(ids).to(device)
                    each = nats_of_last(model, ids, scored, most)
                    nats += float(each.sum())
                    count += each.size
                    if per_token:
                        parts.append(each.astype(np.float32).ravel())
                    bar.update(each.size)
    finally:
        model.train(was_training)
    return np.concatenate(parts) if per_token else (nats, count)


def bits(nats, count):
    """Bits for each of `count` bytes (or characters)."""
    return nats / (math.log(2) * count)


def count_words(dataset, split, piece=1 << 20):
    """Words of a split, one more than its runs of whitespace, as lm-evaluation-harness counts them.

    Where a text begins or ends with whitespace, nothing before or after it counts as one. None: GPT-2's byte
    pairs, where nobody has their spelling.
    """
    from nanoheads.text.sources import GPT2_ENCODER, GPT2_MERGES, here  # not part of a run
    if dataset.tokenizer.encoding == "gpt2" and not here(GPT2_MERGES, GPT2_ENCODER):
        return None
    tokens, decoder = dataset.tokens(split), codecs.getincrementaldecoder("utf-8")("replace")
    count, space = 1, False
    for at in range(0, len(tokens), piece):
        text = decoder.decode(dataset.tokenizer.decode_bytes(tokens[at:at + piece]))
        if text:
            count += len(re.findall(r"\s+", text)) - (space and text[0].isspace())
            space = text[-1].isspace()
    return count


# ---- checkpoints and their data ----

def dataset_of(state, path, name=None):
    """The Dataset called `name`, or else the one that a read checkpoint was trained on. UserError."""
    meta, train = state["meta"] or {}, state.get("train") or {}
    names = [name] if name else [train.get("dataset"), state.get("dataset"), meta.get("name")]
    names = [n for n in names if n]
    if not names:
        raise UserError(f"{path} does not say what it was trained on; name it with --dataset")
    for other in names[:-1]:  # a path may lead nowhere from here, while data/<name> is there
        try:
            return Dataset(other)
        except UserError:
            pass
    return Dataset(names[-1])


def load(path, split, stride, device, dataset=None, settings=()):
    """(state, model, Dataset) of one checkpoint, after every check that needs no scoring."""
    state = checkpoint.read(path)
    model = checkpoint.build(state, path, device, settings)
    data = dataset_of(state, path, dataset)
    checkpoint.same_vocabulary(state, data, path)
    then, now = ((m or {}).get("splits", {}).get(split, {}).get("sha256") for m in (state["meta"], data.meta))
    if then and then != now and not dataset:
        raise UserError(f"{path}: the {split} split of {data.dir} is not the one of its training, "
                        f"and may hold what it was trained on; --dataset={data.dir} scores it all the same")
    windows(len(data.tokens(split)), model.config.block_size, stride or model.config.block_size)
    return state, model, data


def evaluate(path, split, stride, device, dataset=None, settings=(), progress=True):
    """Everything that is reported of one checkpoint, as a dict. Raises UserError, ValueError."""
    state, model, data = load(path, split, stride, device, dataset, settings)
    T, size = model.config.block_size, data.splits[split]
    began = time.perf_counter()
    nats, tokens = score(model, data, split, stride, progress=progress)
    seconds = time.perf_counter() - began
    if not math.isfinite(nats):
        raise UserError(f"{path} gives {nats} nats on {split}: "
                        "its weights are damaged, or its training diverged")
    stride, words = stride or T, count_words(data, split)
    context = f"disjoint windows of {T:,}" if stride == T else f"windows of {T:,}, stride {stride:,}"
    return dict(name=str(path), dataset=data.meta["name"], split=split, tokens=tokens, bytes=size["bytes"],
                chars=size["chars"], words=words, context=context, block_size=T, stride=stride,
                bpb=bits(nats, size["bytes"]), bpc=bits(nats, size["chars"]),
                nats_per_token=nats / tokens, ppl=math.exp(min(nats / tokens, 700)),
                word_ppl=words and math.exp(min(nats / words, 700)),
                params=model.num_params(), params_non_embedding=model.num_params(non_embedding=True),
                flops_per_token=model.flops_per_token(), tokens_per_s=tokens / seconds,
                step=state.get("step"), device=device, split_sha256=size.get("sha256"),
                note=data.meta.get("note"), set=list(settings))


# ---- what a model writes ----

TEXT = "the text itself"
SHORT = 4  # words: fewer have no rep-4
SHOWN = dict(rep_4="rep-4", distinct_2="distinct-2", self_bleu="self-BLEU", loop="loop",
             first_repeat="first repeat", judge="bits/byte")  # of a measure, in the table; all are in --json


class Writer(NamedTuple):
    """A checkpoint that writes: name, model, the data of its vocabulary, the prompts [P], lists of its ids.

    A judge has no prompts.
    """
    name: str
    model: GPT
    data: Dataset
    prompts: list | None = None

    @property
    def tokenizer(self):
        return self.data.tokenizer


def model_and_tokenizer(path, device, dataset=None, settings=()):
    """(model, tokenizer) of a checkpoint.

    nanoGPT's take their vocabulary from a dataset: the one they name, or `dataset`.
    """
    state = checkpoint.read(path)
    model, meta = checkpoint.build(state, path, device, settings), state["meta"]
    if not meta:
        data = dataset_of(state, path, dataset)
        checkpoint.same_vocabulary(state, data, path)
        meta = data.meta
    return model, Tokenizer.from_meta(meta)


def said(ids, tokenizer, stop=None):
    """The ids up to a stop token, without those beyond the vocabulary, which a padded model may say."""
    ids = ids[:ids.index(stop)] if stop in ids else ids
    return [i for i in ids if i < tokenizer.vocab_size]


def same_tokens(one, other):
    """Whether the ids of two tokenizers mean the same."""
    return (one.encoding, one.vocab) == (other.encoding, other.vocab)


def reread(ids, tokenizer, other):
    """The ids that another tokenizer has for the text of these. ValueError: it cannot spell a character."""
    if same_tokens(tokenizer, other):
        return ids
    raw = tokenizer.decode_bytes(ids)
    return other.encode(raw if other.encoding == "byte" else raw.decode("utf-8", "replace")).tolist()


def read_prompts(path, tokenizer):
    """[P] lists of ids: the lines of a file, where \\n and \\t mean what they usually do. UserError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        why = getattr(e, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"--prompts: {path} cannot be read: {why}")
    found = []
    for i, line in enumerate(lines, 1):
        try:
            found.append(tokenizer.encode(line.replace("\\n", "\n").replace("\\t", "\t")).tolist())
        except ValueError as e:
            raise UserError(f"--prompts: {path}, line {i}: {e}")
    found = [ids for ids in found if ids]
    if not found:
        raise UserError(f"--prompts: {path} holds no prompt; it takes one a line")
    return found


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


def open_writers(args, device):
    """([Writer], the judge or None, what follows the prompts [P] or None), after every check that needs no
    generation. Prompts and what follows are from the data of the first. UserError, ValueError.
    """
    for name, least in (("num_prompts", 2), ("prompt_tokens", 1), ("samples", 1), ("tokens", 1)):
        if getattr(args, name) < least:
            raise UserError(f"{name}={getattr(args, name)} must be at least {least}")
    if not 0 <= args.seed < 1 << 62:
        raise UserError(f"seed={args.seed} must be from 0 to 2^62 - 1")
    check_sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)

    def opened(path, settings=()):
        _, model, data = load(path, args.split, 0, device, args.dataset, settings)
        return Writer(str(path).removesuffix("/best.pt"), model, data)

    writers = [opened(path, args.settings) for path in args.ckpt]
    judge = opened(args.judge) if args.judge else None
    first = writers[0]
    if args.prompts:
        prompts, real = read_prompts(args.prompts, first.tokenizer), None
    else:
        prompts, real = cut_prompts(args, first.data)
    for i, writer in enumerate(writers):
        own = []
        for number, ids in enumerate(prompts, 1):
            try:
                own.append(reread(ids, first.tokenizer, writer.tokenizer))
            except ValueError as e:
                raise UserError(f"prompt {number}, for {writer.name}: {e}")
        writers[i] = writer._replace(prompts=own)
        if judge and judge.tokenizer.vocab and not same_tokens(writer.tokenizer, judge.tokenizer):
            raise UserError(f"--judge {judge.name}: its {judge.data.vocab_size:,} characters cannot spell "
                            f"all that {writer.name} may say")
    return writers, judge, real


def continuations(writer, length, args, progress=False):
    """(what it says [P][S], lists of ids, tokens per second): args.samples continuations of each prompt.

    Prompt i has the seed args.seed + i: what is said to it does not depend on the other prompts.
    """
    device, tokenizer = next(writer.model.parameters()).device, writer.tokenizer
    stop = tokenizer.separator if args.stop else None
    autocast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    found, made, seconds = [], 0, 0.0
    for i, prompt in enumerate(tqdm(writer.prompts, writer.name, disable=not progress, leave=False)):
        idx = torch.tensor([prompt] * args.samples, device=device)
        generator = torch.Generator(device).manual_seed(args.seed + i)
        began = time.perf_counter()
        try:
            with autocast:
                steps = list(writer.model.stream(idx, length, args.temperature, args.top_k, args.top_p,
                                                 args.repetition_penalty, stop, generator=generator))
                new = torch.stack(steps, dim=1).tolist()
        except RuntimeError as e:
            if "probability tensor" not in str(e):
                raise
            raise UserError(f"{writer.name}: the probabilities are not numbers: damaged weights, "
                            "or an extreme temperature or repetition_penalty")
        seconds += time.perf_counter() - began
        made += args.samples * len(steps)
        found.append([said(row, tokenizer, stop) for row in new])
    return found, made / seconds


@torch.no_grad()
def nats_after(model, separator, pairs):
    """Nats [n] of each continuation given its prompt, from pairs (prompt, continuation) of ids.

    Windows move by half a block: beyond the first, a token sees at least half a block before it.
    """
    device, T = next(model.parameters()).device, model.config.block_size
    batch = max(1, min(4096, LOGITS_AT_ONCE // model.config.vocab_size) // T)
    found, pieces = np.zeros(len(pairs)), []
    for i, (before, after) in enumerate(pairs):
        text = np.array([*before, *after])
        for start, end, new in windows(len(text), T, max(1, T // 2)):
            new = min(new, end - len(before))  # the prompt is context alone
            if new > 0:
                pieces.append((i, window_ids(text, separator, start, end), new))

    # windows of one length and one scored part go together
    def shape(piece):
        return len(piece[1]), piece[2]
    for (_, new), alike in groupby(sorted(pieces, key=shape), shape):
        alike = list(alike)
        for first in range(0, len(alike), batch):
            part = alike[first:first + batch]
            ids = torch.from_numpy(np.stack([piece[1] for piece in part])).to(device)
            nats = nats_of_last(model, ids, new)
            np.add.at(found, [piece[0] for piece in part], nats.sum(1))
    return found


def judged(judge, writer, samples):
    """Bits [P][S] of samples [P][S] of ids, given the writer's prompts, under a judge. UserError."""
    pairs = []
    for prompt, row in zip(writer.prompts, samples):
        prompt, *row = [reread(ids, writer.tokenizer, judge.tokenizer) for ids in (prompt, *row)]
        pairs += [(prompt, ids) for ids in row]
    nats = nats_after(judge.model, judge.data.separator, pairs)
    if not np.isfinite(nats).all():
        raise UserError(f"--judge {judge.name} gives {nats[~np.isfinite(nats)][0]} nats: "
                        "its weights are damaged, or its training diverged")
    return bits(nats, 1).reshape(len(samples), -1).tolist()


def text_runs(args, device, progress=True):
    """Yield what is reported of each checkpoint's samples, a dict; the last is of the text itself.

    The first checkpoint is the baseline of the others. Raises UserError, ValueError.
    """
    writers, judge, real = open_writers(args, device)
    first, baseline = writers[0], None
    about = text_line(args, writers, judge)
    for writer in writers:
        length = args.tokens
        if not same_tokens(writer.tokenizer, first.tokenizer):  # as many as make the same number of bytes
            sizes = [one.data.bytes_per_token(args.split) for one in (first, writer)]
            length = max(1, round(length * sizes[0] / sizes[1]))
        samples, speed = continuations(writer, length, args, progress)
        found, run = text_run(writer, samples, judge, baseline)
        baseline = baseline or found
        yield dict(name=writer.name, about=about, tokens=length, tokens_per_s=speed, set=args.settings, **run)
    if real:
        stop = first.tokenizer.separator if args.stop else None
        _, run = text_run(first, [[said(ids, first.tokenizer, stop)] for ids in real], judge)
        yield dict(name=TEXT, about=about, tokens=args.tokens, tokens_per_s=None, set=[], **run)


def text_run(writer, samples, judge=None, baseline=None):
    """(what measure() gives, the same for a report), of samples [P][S] in a writer's ids."""
    from nanoheads.text import quality as textquality  # not part of a run, which scores with this file
    raw = [[writer.tokenizer.decode_bytes(ids) for ids in row] for row in samples]
    found = textquality.measure(raw, judged(judge, writer, samples) if judge else None)
    less = {key: textquality.interval(found[key] - baseline[key]) for key in found} if baseline else None
    return found, dict(
        figures={key: textquality.interval(values) for key, values in found.items()}, less_the_first=less,
        short=sum(len(textquality.words(one)) < SHORT for row in raw for one in row),
        prompts=[writer.tokenizer.decode(ids) for ids in writer.prompts],
        samples=[[one.decode("utf-8", "replace") for one in row] for row in raw])


# ---- output ----

HEAD = ("run", "bits/byte", "bits/char", "nats/token", "perplexity", "params", "non-embed.", "FLOPs/token",
        "tokens/s")


def scored_line(run):
    """What was scored, and how."""
    line = (f"{run['dataset']}, {run['split']}: {run['tokens']:,} tokens, {run['bytes']:,} bytes, "
            f"{run['chars']:,} characters, each once, in {run['context']}")
    return line + (f", with {', '.join(run['set'])}" if run.get("set") else "")


def score_table(runs, width=120):
    """The runs in the order given, one aligned line each, under a line that says what was scored and how, and
    over one with their perplexities of a word.
    """
    rows = [(r["name"].removesuffix("/best.pt"), f"{r['bpb']:.4f}", f"{r['bpc']:.4f}",
             f"{r['nats_per_token']:.4f}", f"{r['ppl']:.5g}",
             f"{r['params']:,}", f"{r['params_non_embedding']:,}",
             f"{r['flops_per_token'] / 1e6:,.2f}M", f"{r['tokens_per_s']:,.0f}") for r in runs]
    head, *rows = table(HEAD, rows, width=width).splitlines()
    lines = []
    for scored, group in groupby(zip(runs, rows), lambda pair: scored_line(pair[0])):
        group = list(group)
        run = group[0][0]
        lines += ["", scored] if lines else [scored]
        lines += [f"note: {run['note']}", head] if run.get("note") else [head]
        lines += [row for _, row in group]
        if run["words"]:
            lines.append(f"perplexity of a word, of {run['words']:,} parted by whitespace: "
                         + ", ".join(f"{r['word_ppl']:.6g}" for r, _ in group))
    return "\n".join(lines)


def text_line(args, writers, judge):
    """What was written, and how; in a second line, who judges."""
    source = args.prompts or f"{writers[0].data.meta['name']}, {args.split}"
    prompts = len(writers[0].prompts)
    line = (f"{source}: {prompts:,} prompts, {args.samples:,} sample{'s' * (args.samples > 1)} of "
            f"{args.tokens:,} tokens each, seed {args.seed}, temperature {args.temperature:g}")
    for name, off in (("top_k", None), ("top_p", None), ("repetition_penalty", 1.0), ("stop", False)):
        if getattr(args, name) != off:
            line += f", {name} {getattr(args, name)}"
    line += f", with {', '.join(args.settings)}" if args.settings else ""
    if judge is None:
        return line
    size, largest = judge.model.num_params(), max(writer.model.num_params() for writer in writers)
    larger = "" if size > largest else f", no more than the {largest:,} of those it judges"
    return f"{line}\njudge: {judge.name}, {size:,} parameters{larger}"


def text_table(runs, width=120):
    """The runs in the order given under a line that says how; each after the first also less the first."""
    shown = {key: title for key, title in SHOWN.items() if key in runs[0]["figures"]}

    def cells(figures, sign=""):
        for key in shown:
            value, half = figures[key]
            digits = 1 if key == "first_repeat" else 3
            spread = "" if math.isnan(half) else f" ±{half:.{digits}f}"
            yield "–" if math.isnan(value) else f"{value:{sign}.{digits}f}{spread}"

    rows, notes = [], []
    for run in runs:
        speed = "–" if run["tokens_per_s"] is None else f"{run['tokens_per_s']:,.0f}"
        rows.append((run["name"], *cells(run["figures"]), speed))
        if run["less_the_first"]:
            rows.append(("  less the first", *cells(run["less_the_first"], "+"), ""))
        if run["short"]:
            count = sum(map(len, run["samples"]))
            notes.append(f"note: {run['short']:,} of {count:,} samples of {run['name']} have fewer than "
                         f"{SHORT} words and no rep-4")
    head = ("run", *shown.values(), "tokens/s")
    return "\n".join([runs[0]["about"], table(head, rows, width=width), *notes])


def add_arguments(parser, split):
    """The arguments of every program that scores checkpoints; split: the default one."""
    checkpoint.add_arguments(parser)
    parser.add_argument("--split", default=split, help=f"train, val or test (default: {split})")
    parser.add_argument("--dataset", help="read this dataset, which must have the same vocabulary "
                                          "(default: the one trained on)")
    parser.add_argument("--json", help="write the numbers to this file as well")


def add_text_arguments(parser):
    """The arguments of --text; the actions, which mean nothing without it."""
    add = parser.add_argument_group("text").add_argument
    return [
        add("--prompts", metavar="FILE", help="a prompt a line; \\n is a newline (default: from the split)"),
        add("--num_prompts", type=int, default=16, help="or so many cut evenly from the split (default: 16)"),
        add("--prompt_tokens", type=int, default=64, help="of so many tokens each (default: 64)"),
        add("--samples", type=int, default=8, help="continuations of each prompt (default: 8)"),
        add("--tokens", type=int, default=256,
            help="length of each (default: 256); a checkpoint whose vocabulary is not the first one's says "
                 "what makes as many bytes"),
        add("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)"),
        add("--top_k", type=int, help="only the k likeliest tokens (default: all)"),
        add("--top_p", type=float, help="only the likeliest that hold this much of the mass (default: all)"),
        add("--repetition_penalty", type=float, default=1.0,
            help="above 1: tokens already there become less likely (default: 1)"),
        add("--stop", action="store_true", help="a sample ends at the corpus separator"),
        add("--seed", type=int, default=1337, help="same seed, same samples (default: 1337)"),
        add("--judge", metavar="CKPT", help="a larger model, for the bits per byte of the samples under it"),
    ]


def refuse_what_means_nothing(args, text):
    """Raise UserError for flags that another one makes idle; text: the actions of --text."""
    given = ["--" + a.dest for a in text if getattr(args, a.dest) != a.default]
    if args.audit:
        refuse_beside_audit(args, given)
        return
    if args.maps or args.out:
        raise UserError(f"{'--maps' if args.maps else '--out'} means nothing without --audit")
    if args.text not in (True, False):
        raise UserError(f"--text {args.text}: a file means nothing without --audit")
    if given and not args.text:
        raise UserError(f"{given[0]} means nothing without --text")
    if args.text and args.stride:
        raise UserError("--stride means nothing with --text")
    idle = [flag for flag in given if flag in ("--num_prompts", "--prompt_tokens")]
    if idle and args.prompts:
        raise UserError(f"{idle[0]} means nothing with --prompts")


def refuse_beside_audit(args, given):
    """Raise UserError for what does not go with --audit; given: flags of --text."""
    if args.text in (True, False):
        raise UserError("--audit needs the text to read: --text FILE")
    if len(args.ckpt) > 1:
        raise UserError("--audit reads with one checkpoint")
    idle = [*given, *(f"--{key}" for key in ("stride", "dataset", "json") if getattr(args, key)),
            *(["--split"] if args.split != "test" else [])]
    if idle:
        raise UserError(f"{idle[0]} means nothing with --audit")


def scored_runs(args, device, progress):
    """Yield what evaluate() reports of each checkpoint; the last are opened before the first is scored."""
    options = args.split, args.stride, device, args.dataset, args.settings
    for path in args.ckpt[1:]:  # what is wrong with the last should not cost the time of those before it
        load(path, *options)
    for path in args.ckpt:
        yield evaluate(path, *options, progress=progress)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(p, "test")
    p.add_argument("--stride", type=int, default=0,
                   help="move the window by so many tokens; 0: disjoint windows (default)")
    p.add_argument("--text", nargs="?", const=True, default=False, metavar="FILE",
                   help="measure what the models write instead; with --audit: the text to read")
    p.add_argument("--audit", action="store_true", help="write what the constraint heads say of --text FILE")
    p.add_argument("--maps", action="store_true", help="with --audit: their attention maps too")
    p.add_argument("--out", help="of --audit, JSON lines; a page of that name, .html, comes beside them "
                                 "(default: audit.jsonl)")
    text = add_text_arguments(p)
    args = p.parse_args(argv)
    runs, show = [], text_table if args.text else score_table
    try:
        device = pick_device(args.device)
        out = writable(args.json) if args.json else None
        refuse_what_means_nothing(args, text)
        if args.audit:
            model, tokenizer = model_and_tokenizer(args.ckpt[0], device, settings=args.settings)
            source = args.ckpt[0], args.settings, args.text
            print(audit.of_file(model, tokenizer, source, args.out or "audit.jsonl", args.maps,
                                sys.stderr.isatty()))
            return
        for run in (text_runs if args.text else scored_runs)(args, device, sys.stderr.isatty()):
            runs.append(run)
        if out:
            write_json(out, {"runs": runs})
        print(show(runs), *([args.json] if out else []), sep="\n")
    except ValueError as e:
        sys.exit(f"evaluate: {e}")
    except KeyboardInterrupt:
        if runs:
            print(show(runs))
        print("\nevaluate: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
