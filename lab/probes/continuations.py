"""
What models write: continuations of the same prompts from each of several checkpoints, measured side by side.

    python -m lab.probe text --ckpt out/a [--ckpt out/b ...] [--judge out/big] [--tokens 256] [--json FILE]

The measures are repetition, diversity, loops, and bits per byte under a larger model, the judge, beside those
of the text's own continuation (lab/probes/quality.py, docs/results/text-quality.md).
"""

import math
import time
from typing import NamedTuple

import torch

from model import GPT
from nanoheads import sampling
from nanoheads.common import UserError, last_folders, say, table, text_of, unescaped
from nanoheads.dataset import Dataset
from nanoheads.logits import check_sampling
from nanoheads.sampling import bfloat16_on_gpu, same_tokens, settings_of, stop_of, until_stop, write
from nanoheads.scoring import bits, load
from nanoheads.timing import progress_bar
from lab.probes import quality as textquality
from lab.probes.intervals import jackknife
from lab.probes.shared import ask, finite, nats_after

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


def prompts_of_file(path, tokenizer, special):
    """[P] lists of ids: the lines of a file, unescaped(). special: are the names of special tokens in them
    those tokens? UserError.
    """
    try:
        lines = text_of(path).split("\n")
    except (OSError, UnicodeDecodeError) as e:
        why = getattr(e, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"--prompts: {path} cannot be read: {why}")
    found = []
    for i, line in enumerate(lines, 1):
        try:
            found.append(tokenizer.encode(unescaped(line), special).tolist())
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


def open_writers(args):
    """([Writer], the judge or None, what follows the prompts [P] or None), after every check that needs no
    generation. Prompts and what follows are from the data of the first. UserError, ValueError.
    """
    for name, least in (("num_prompts", 2), ("prompt_tokens", 1), ("samples", 1), ("tokens", 1)):
        if getattr(args, name) < least:
            raise UserError(f"{name}={getattr(args, name)} must be at least {least}")
    if args.seed >= 1 << 62:
        raise UserError(f"--seed={args.seed} must be at most 2^62 - 1")
    check_sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)

    def opened(path, settings=()):
        _, model, data = load(path, args.split, 0, args.device, args.dataset, settings)
        return Writer(str(path).removesuffix("/best.pt"), model, data)

    writers = [opened(path, args.settings) for path in args.ckpt]
    judge = opened(args.judge) if args.judge else None
    first = writers[0]
    for writer in writers:
        stop_of(args, writer.tokenizer)
    if args.prompts:
        prompts, real = prompts_of_file(args.prompts, first.tokenizer, args.special == "token"), None
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
                            f"all that {writer.name} may write")
    return writers, judge, real


def reread(ids, tokenizer, other):
    """The ids that another tokenizer has for the text of these. ValueError: it cannot spell a character."""
    if same_tokens(tokenizer, other):
        return ids
    raw = tokenizer.decode_bytes(ids)
    return other.encode(raw if other.encoding == "byte" else raw.decode("utf-8", "replace")).tolist()


def continuations(writer, length, args):
    """(the ids [P][S] that follow each prompt, tokens per second): args.samples continuations of each.

    Prompt i has the seed args.seed + i: what follows it does not depend on the other prompts.
    """
    device, tokenizer = next(writer.model.parameters()).device, writer.tokenizer
    settings, found, made, seconds = settings_of(args, tokenizer), [], 0, 0.0
    for i, prompt in enumerate(progress_bar(writer.prompts, writer.name)):
        idx = torch.tensor([prompt] * args.samples, device=device)
        began = time.perf_counter()
        try:
            with bfloat16_on_gpu(device):
                new = write(writer.model, idx, length, args.seed + i, **settings)
        except UserError as e:
            raise UserError(f"{writer.name}: {e}")
        seconds += time.perf_counter() - began
        made += args.samples * len(new[0])
        found.append([until_stop(row, tokenizer, settings["stop_token"]) for row in new])
    return found, made / seconds


def bits_under(judge, writer, samples):
    """Bits [P][S] of samples [P][S] of ids, given the writer's prompts, under a judge. UserError."""
    pairs = []
    for prompt, row in zip(writer.prompts, samples):
        prompt, *row = [reread(ids, writer.tokenizer, judge.tokenizer) for ids in (prompt, *row)]
        pairs += [(prompt, ids) for ids in row]
    nats = finite(nats_after(judge.model, judge.data.separator, pairs),
                  judge._replace(name=f"--judge {judge.name}"))
    return bits(nats, 1).reshape(len(samples), -1).tolist()


def reports_of(args):
    """Yield what is reported of each checkpoint's samples, a dict; the last is of the text itself.

    The first checkpoint is the baseline of the others. Raises UserError, ValueError.
    """
    writers, judge, real = open_writers(args)
    first, baseline = writers[0], None
    about = text_line(args, writers, judge)
    for writer in writers:
        length = args.tokens
        if not same_tokens(writer.tokenizer, first.tokenizer):  # as many as make the same number of bytes
            sizes = [one.data.bytes_per_token(args.split) for one in (first, writer)]
            length = max(1, round(length * sizes[0] / sizes[1]))
        samples, speed = continuations(writer, length, args)
        found, report = report_of(writer, samples, judge, baseline)
        baseline = baseline or found
        yield dict(name=writer.name, about=about, tokens=length, tokens_per_s=speed, set=args.settings,
                   **report)
    if real:
        stop = stop_of(args, first.tokenizer)
        _, report = report_of(first, [[until_stop(ids, first.tokenizer, stop)] for ids in real], judge)
        yield dict(name=TEXT, about=about, tokens=args.tokens, tokens_per_s=None, set=[], **report)


def text_line(args, writers, judge):
    """What was written, and how; in a second line, the judge."""
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


def report_of(writer, samples, judge=None, baseline=None):
    """(what leave_one_out() gives, the same for a report), of samples [P][S] in a writer's ids."""
    raw = [[writer.tokenizer.decode_bytes(ids) for ids in row] for row in samples]
    found = textquality.leave_one_out(raw, bits_under(judge, writer, samples) if judge else None)
    less = {key: jackknife(found[key] - baseline[key]) for key in found} if baseline else None
    return found, dict(
        figures={key: jackknife(values) for key, values in found.items()}, less_the_first=less,
        short=sum(len(textquality.words(one)) < SHORT for row in raw for one in row),
        prompts=[writer.tokenizer.decode(ids) for ids in writer.prompts],
        samples=[[one.decode("utf-8", "replace") for one in row] for row in raw])


# ---- output ----

def text_table(reports, width=120):
    """The reports in the order given under a line that says how; each after the first also less the first."""
    shown = {key: title for key, title in SHOWN.items() if key in reports[0]["figures"]}

    def cells(figures, sign=""):
        for key in shown:
            value, half = figures[key]
            digits = 1 if key == "first_repeat" else 3
            spread = "" if math.isnan(half) else f" ±{half:.{digits}f}"
            yield "–" if math.isnan(value) else f"{value:{sign}.{digits}f}{spread}"

    rows, notes = [], []
    for report in reports:
        speed = "–" if report["tokens_per_s"] is None else f"{report['tokens_per_s']:,.0f}"
        rows.append((report["name"], *cells(report["figures"]), speed))
        if report["less_the_first"]:
            rows.append(("  less the first", *cells(report["less_the_first"], "+"), ""))
        if report["short"]:
            count = sum(map(len, report["samples"]))
            notes.append(f"note: {report['short']:,} of {count:,} samples of {report['name']} have fewer "
                         f"than {SHORT} words and no rep-4")
    head = ("run", *shown.values(), "tokens/s")
    return "\n".join([reports[0]["about"], table(head, rows, width=width, cut=last_folders), *notes])


# ---- the probe ----

def probe(args):
    """What models write: repetition, diversity, loops, bits per byte."""
    for flag, default in (("num_prompts", 16), ("prompt_tokens", 64)):
        if getattr(args, flag) is None:
            setattr(args, flag, default)
        elif args.prompts:
            raise UserError(f"--{flag} means nothing with --prompts")
    reports = []
    try:
        for report in reports_of(args):
            reports.append(report)
    except KeyboardInterrupt:
        if reports:
            say(text_table(reports))
        raise
    return {"runs": reports}, [text_table(reports)]


def main(argv):
    ask("text", probe, "test", argv, more=sampling.add_arguments,
        prompts=dict(metavar="FILE", help="a prompt a line; \\n is a newline (default: from the split)"),
        num_prompts=(int, None, "or so many cut evenly from the split (default: 16)"),
        prompt_tokens=(int, None, "of so many tokens each (default: 64)"),
        samples=(int, 8, "continuations of each prompt"),
        tokens=(int, 256, "the length of each continuation; a checkpoint whose vocabulary is not the first "
                "one's writes as many as make the same number of bytes"),
        judge=dict(metavar="CKPT", help="a larger model, for the bits per byte of the samples under it"))
