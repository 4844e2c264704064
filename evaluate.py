"""
Score whole splits: every token once, bits per byte first.

    python evaluate.py --ckpt out/a [--ckpt out/b/ckpt.pt ...] [--split test] [--stride 128] [--json FILE]
    python evaluate.py --ckpt out/a --ckpt out/b --tokens 16384       # a quick look: so many, evenly spaced
    python evaluate.py --ckpt out/a --set unet_skips=False --set gate.0.3=0    # switches moved, heads set
    python evaluate.py --text --ckpt out/a [--ckpt out/b ...] [--judge out/big]    # what they write
    python evaluate.py --audit --ckpt out/a --text FILE [--maps] [--out look.jsonl]   # what its heads do

The context policy is part of the number. Without --stride the split is cut into disjoint windows of
block_size tokens, and a token sees from 1 to block_size tokens before it. With --stride S the window moves on
by S tokens and scores its last S: after the first window, every token sees more than block_size - S. The very
first token is conditioned on the corpus separator. With --tokens all checkpoints score the same tokens, those
of whole windows of the longest context among them, and each token as in the whole split. Words are what
whitespace parts, as lm-evaluation-harness counts them. FLOPs/token count training: forward and backward.

Each checkpoint after the first is compared with the first, token by token: the interval is over the text, and
another seed of the same model may differ by more (compare.py takes several). Where contexts or training steps
are unequal, a line says so: a difference includes what that does. A router's load is measured on a part of
the split.

--text has each model continue the same prompts, and measures what it writes: repetition, diversity, loops,
and its bits per byte under a larger model, beside the text's own continuation (docs/results/text-quality.md).

--audit writes what the mechanisms of one checkpoint, or of two, do at each token of a file, as JSON lines and
as a page for the browser, as probe.py look does (docs/look.md).
"""

import argparse
import math
import sys
from itertools import groupby

import nanoheads.threads  # noqa: F401  before torch, whose threads it has wait briefly
from nanoheads.common import (UserError, last_words, output_written, pick_device, table, writable,
                              write_json)
from nanoheads.heads import look
from nanoheads.intervals import block_bootstrap
from nanoheads.training import checkpoint, sampling
from nanoheads.training.continuations import SHORT, text_runs
from nanoheads.training.scoring import add_arguments, evaluate, load

SHOWN = dict(rep_4="rep-4", distinct_2="distinct-2", self_bleu="self-BLEU", loop="loop",
             first_repeat="first repeat", judge="bits/byte")  # of a measure, in the table; all are in --json


# ---- output ----

HEAD = ("run", "bits/byte", "bits/char", "nats/token", "perplexity", "params", "non-embed.", "steps",
        "FLOPs/token", "tokens/s")


def scored_line(run):
    """What was scored, and how."""
    part = f" of {run['of']:,}" if run["tokens"] < run["of"] else ""
    line = (f"{run['dataset']}, {run['split']}: {run['tokens']:,}{part} tokens, {run['bytes']:,} bytes, "
            f"{run['chars']:,} characters, each once, in {run['context']}")
    line += "; evenly spaced: a quick look, not the split's score" if part else ""
    return line + (f", with {', '.join(run['set'])}" if run.get("set") else "")


def score_table(runs, width=120):
    """The runs in the order given, one aligned line each, under a line that says what was scored and how, and
    over one with their perplexities of a word.
    """
    rows = [(r["name"].removesuffix("/best.pt"), f"{r['bpb']:.4f}", f"{r['bpc']:.4f}",
             f"{r['nats_per_token']:.4f}", f"{r['ppl']:.5g}",
             f"{r['params']:,}", f"{r['params_non_embedding']:,}", steps_of(r),
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
    for block in (unequal_lines(runs), difference_table(runs, width), heads_line(runs),
                  *map(routing_table, runs)):
        lines += ["", block] if block else []
    return "\n".join(lines)


def steps_of(run):
    """How many steps a run was trained for before it was saved; a dash: its file does not say."""
    return "–" if run["step"] is None else f"{run['step']:,}"


def unequal_lines(runs):
    """A line each where the checkpoints' steps, and where their contexts, are not the same; "": they are."""
    names, lines = [run["name"].removesuffix("/best.pt") for run in runs], []
    if len({run["step"] for run in runs} - {None}) > 1:
        steps = ", ".join(f"{name} {steps_of(run)}" for name, run in zip(names, runs))
        lines.append(f"The checkpoints were trained for different numbers of steps: {steps}.")
    if len({run["block_size"] for run in runs}) > 1:
        contexts = ", ".join(f"{name} {run['block_size']:,}" for name, run in zip(names, runs))
        lines.append(f"The checkpoints see contexts of different lengths, in tokens: {contexts}.")
    return "\n".join(lines)


def same_text(a, b):
    """Whether two runs of one command are of the same tokens."""
    return all(a[key] == b[key] for key in ("dataset", "split", "split_sha256", "tokens", "bytes"))


def compared(run, first):
    """What a run has beside the first: a dict, None: scored on other text.

    bpb: the difference in bits/byte [value, low, high], its interval over the text.
    """
    if not same_text(run, first):
        return None
    bpb = block_bootstrap(run["pieces"], first["pieces"], run["bytes"], 1)
    return dict(name=run["name"], bpb=list(bpb), percent=100 * bpb[0] / first["bpb"],
                params=run["params"] / first["params"],
                flops=run["flops_per_token"] / first["flops_per_token"])


def difference_table(runs, width):
    """Each run after the first beside the first; "": there is one alone."""
    first, rows = runs[0], []
    for run in runs[1:]:
        found = compared(run, first)
        name = run["name"].removesuffix("/best.pt")
        if found is None:
            rows.append((name, "other text: not compared", *["–"] * 4))
            continue
        mean, low, high = found["bpb"]
        rows.append((name, f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]", f"{found['percent']:+.2f} %",
                     f"{run['params'] - first['params']:+,}", f"{found['params']:.3f} x",
                     f"{found['flops']:.3f} x"))
    head = ("less " + first["name"].removesuffix("/best.pt"), "bits/byte [95 % over text]", "of it",
            "parameters", "ratio", "FLOPs/token")
    return table(head, rows, width=width) if rows else ""


def heads_line(runs):
    """How many heads of each run are at work, "": all of all."""
    if all(active == total for active, total in (run["heads"] for run in runs)):
        return ""
    return "heads at work: " + ", ".join(f"{run['heads'][0]} of {run['heads'][1]}" for run in runs)


def routing_table(run):
    """What the router of each block does; "": there is none."""
    rows = [(str(each["block"]), " ".join(f"{100 * load:.0f}" for load in each["routing_load"]),
             str(each["dead_heads"]), f"{each['effective_heads']:.2f}", f"{each['token_entropy']:.3f}",
             f"{each['batch_entropy']:.3f}") for each in run["routing"]]
    head = ("block", "load of each head, %", "dead", "effective heads", "nats of a token", "of all")
    return f"routing of {run['name'].removesuffix('/best.pt')}:\n{table(head, rows)}" if rows else ""


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


def add_text_arguments(parser):
    """The arguments of --text; the actions, which mean nothing without it."""
    group = parser.add_argument_group("text")
    add = group.add_argument
    return [
        add("--prompts", metavar="FILE", help="a prompt a line; \\n is a newline (default: from the split)"),
        add("--num_prompts", type=int, default=16, help="or so many cut evenly from the split (default: 16)"),
        add("--prompt_tokens", type=int, default=64, help="of so many tokens each (default: 64)"),
        add("--samples", type=int, default=8, help="continuations of each prompt (default: 8)"),
        *sampling.add_arguments(group),
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
    for flag in ("stride", "batch_size"):
        if args.text and getattr(args, flag):
            raise UserError(f"--{flag} means nothing with --text")
    for flag in ("tokens", "batch_size"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise UserError(f"--{flag} {getattr(args, flag)} must be at least 1")
    idle = [flag for flag in given if flag in ("--num_prompts", "--prompt_tokens")]
    if idle and args.prompts:
        raise UserError(f"{idle[0]} means nothing with --prompts")


def refuse_beside_audit(args, given):
    """Raise UserError for what does not go with --audit; given: flags of --text."""
    if args.text in (True, False):
        raise UserError("--audit needs the text to read: --text FILE")
    idle = [*given, *(f"--{key}" for key in ("stride", "dataset", "json", "tokens", "batch_size")
                      if getattr(args, key)),
            *(["--split"] if args.split != "test" else [])]
    if idle:
        raise UserError(f"{idle[0]} means nothing with --audit")


def scored_runs(args, device, progress):
    """Yield what evaluate() reports of each checkpoint; the last are opened before the first is scored."""
    options, longest = (args.split, args.stride, device, args.dataset, args.settings), 0
    if args.ckpt[1:]:  # what is wrong with the last should not cost the time of those before it
        longest = max(load(path, *options)[1].config.block_size for path in args.ckpt)
    for path in args.ckpt:
        yield evaluate(path, *options, progress, args.tokens or 0, args.batch_size, longest)


def as_json(runs):
    """The runs of scoring without the nats of parts of the text, and what each has beside the first."""
    less = [compared(run, runs[0]) for run in runs[1:]]
    return {"runs": [{key: value for key, value in run.items() if key != "pieces"} for run in runs],
            "less_the_first": less}


@output_written("evaluate")
def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(p, "test")
    p.add_argument("--stride", type=int, default=0,
                   help="move the window by so many tokens; 0: disjoint windows (default)")
    p.add_argument("--tokens", type=int, help="score so many, evenly spaced: a quick look (default: all); "
                   "--text: the length of each continuation (default: 256). There a checkpoint whose "
                   "vocabulary is not the first one's writes as many as make the same number of bytes")
    p.add_argument("--batch_size", type=int, help="windows in one forward pass (default: by device)")
    p.add_argument("--text", nargs="?", const=True, default=False, metavar="FILE",
                   help="measure what the models write instead; with --audit: the text to read")
    p.add_argument("--audit", action="store_true", help="write what mechanisms do to --text FILE")
    p.add_argument("--maps", action="store_true", help="with --audit: the attention maps in the lines too")
    p.add_argument("--out", help="of --audit, JSON lines; a page of that name, .html, comes beside them "
                                 "(default: look.jsonl)")
    text = add_text_arguments(p)
    args = p.parse_args(argv)
    runs, show = [], text_table if args.text else score_table
    with last_words("evaluate", "lower --batch_size or --tokens"):
        try:
            device = pick_device(args.device)
            out = writable(args.json) if args.json else None
            refuse_what_means_nothing(args, text)
            checkpoint.allow_code(args, *args.ckpt, *filter(None, [args.judge]))
            if args.audit:
                print(look.run(args))
                return
            if args.text and args.tokens is None:
                args.tokens = 256
            for run in (text_runs if args.text else scored_runs)(args, device, sys.stderr.isatty()):
                runs.append(run)
            if out:
                write_json(out, {"runs": runs} if args.text else as_json(runs))
            print(show(runs), *([args.json] if out else []), sep="\n")
        except KeyboardInterrupt:
            if runs:
                print(show(runs))
            raise


if __name__ == "__main__":
    main()
