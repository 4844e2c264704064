"""
Score checkpoints on a split of their text, in bits per byte, and compare them. Every token counts once.

    python evaluate.py                                         # the newest run, on the test split
    python evaluate.py --ckpt out/a --ckpt out/b               # two models, compared
    python evaluate.py --ckpt out/a --tokens 16384             # a quick look at a part of the split
    python evaluate.py --ckpt out/a --set unet_skips=False --set gate.0.3=0    # with parts switched off
    python evaluate.py --ckpt out/recall --levels 12,24        # a model that was trained on a task

A score depends on how many earlier tokens the model sees. Without --stride the split is cut into windows of
block_size tokens, and a token is predicted from 1 to block_size tokens. With --stride S the window moves on
by S tokens and scores its last S, so that after the first window every token is predicted from more than
block_size - S. The very first token is predicted from the separator of the corpus. --tokens scores the same
tokens of all checkpoints, evenly spaced, each as in the whole split.

In the table, words are separated by whitespace, as lm-evaluation-harness counts them. FLOPs/token are those
of training, forward and backward. A router's load is measured on a part of the split.

Each further checkpoint is compared with the first, token by token. The interval is over the text; another
seed of the same model may differ by more, so judge a mechanism by several seeds, with compare.py. If the
checkpoints differ in context, training steps or tokens in a step, a line says so, since the difference
includes the effect of that. Scores on different texts are not compared, and a line says what differs.

Checkpoints of a task (docs/compare.md) are scored on rows that no run was trained on: the share of right
answers, by level, and below it what guessing gives. A level may need longer rows than training had.

What models write, and what their heads do: python -m lab.probe --help.
"""

import argparse
import sys
from itertools import groupby

import nanoheads.threads  # noqa: F401  before torch: sets how long its threads spin while they wait
from nanoheads import other_names, own_mechanism, task_scores
from nanoheads.arguments import add_pack, add_scoring, default_runs
from nanoheads.common import (UserError, as_program, last_folders, pick_device, say, table, writable,
                              write_json)
from nanoheads.intervals import block_bootstrap
from nanoheads.scoring import evaluate, load

# ---- output: a report is the dict that nanoheads/scoring.py's evaluate() gives of a checkpoint ----

HEAD = ("run", "bits/byte", "bits/char", "nats/token", "perplexity", "params", "non-embed.", "steps",
        "FLOPs/token", "tokens/s")


def scored_line(report):
    """A line that says which text a report is of, and how it was scored."""
    part = f" of {report['of']:,}" if report["tokens"] < report["of"] else ""
    line = (f"{report['dataset']}, {report['split']}: {report['tokens']:,}{part} tokens, "
            f"{report['bytes']:,} bytes, {report['chars']:,} characters, each once, in {report['context']}")
    line += "; evenly spaced: a quick look, not the split's score" if part else ""
    return line + (f", with {', '.join(report['set'])}" if report.get("set") else "")


def score_table(reports, width=120):
    """The whole output, as text.

    Checkpoints that were scored on the same text stand under one line that says what was scored and how, one
    aligned line each, and below them are their perplexities per word. Then come notes, differences, routing.
    """
    rows = [(r["name"].removesuffix("/best.pt"), f"{r['bpb']:.4f}", f"{r['bpc']:.4f}",
             f"{r['nats_per_token']:.4f}", f"{r['ppl']:.5g}",
             f"{r['params']:,}", f"{r['params_non_embedding']:,}", steps_of(r),
             f"{r['flops_per_token'] / 1e6:,.2f}M", f"{r['tokens_per_s']:,.0f}") for r in reports]
    head, *rows = table(HEAD, rows, width=width, cut=last_folders).splitlines()
    lines = []
    for heading, group in groupby(zip(reports, rows), lambda pair: scored_line(pair[0])):
        group = list(group)
        report = group[0][0]
        lines += ["", heading] if lines else [heading]
        lines += [f"note: {report['note']}", head] if report.get("note") else [head]
        lines += [row for _, row in group]
        if report["words"]:
            lines.append(f"perplexity of a word, of {report['words']:,} parted by whitespace: "
                         + ", ".join(f"{r['word_ppl']:.6g}" for r, _ in group))
    for block in (unequal_lines(reports), difference_table(reports, width), heads_line(reports),
                  *map(routing_table, reports)):
        lines += ["", block] if block else []
    return "\n".join(lines)


def steps_of(report):
    """How many steps a checkpoint was trained for before it was saved; a dash: its file does not say."""
    return format_number(report["step"])


def format_number(number):
    """A number, as text; None: a dash."""
    return "–" if number is None else f"{number:,}"


def unequal_lines(reports):
    """A line where the checkpoints' steps differ, where their batches, their contexts or the scored text do;
    "" where nothing differs.
    """
    names, lines = [report["name"].removesuffix("/best.pt") for report in reports], []
    if len({report["step"] for report in reports} - {None}) > 1:
        steps = ", ".join(f"{name} {steps_of(report)}" for name, report in zip(names, reports))
        lines.append(f"The checkpoints were trained for different numbers of steps: {steps}.")
    if len({report["tokens_a_step"] for report in reports} - {None}) > 1:
        counts = [format_number(report["tokens_a_step"]) for report in reports]
        token_counts = ", ".join(f"{name} {count}" for name, count in zip(names, counts))
        lines.append("The checkpoints were trained on different numbers of tokens in each step: "
                     f"{token_counts}.")
    if len({report["block_size"] for report in reports}) > 1:
        contexts = ", ".join(f"{name} {report['block_size']:,}" for name, report in zip(names, reports))
        lines.append(f"The checkpoints see contexts of different lengths, in tokens: {contexts}.")
    other_texts = [f"{name} ({difference})" for name, report in zip(names[1:], reports[1:])
                   if (difference := text_difference(report, reports[0]))]
    if other_texts:
        lines.append(f"Not compared with {names[0]}, since the scored text differs: "
                     f"{', '.join(other_texts)}.")
    return "\n".join(lines)


# what makes the scored text of two checkpoints one text, beside its sha256: in words, and how it is shown
OF_TEXT = dict(dataset=("the data set", ""), split=("the split", ""), tokens=("scored tokens", ","),
               bytes=("scored bytes", ","), separator=("the token before the first", ""))


def text_difference(a, b):
    """In words, how the text that two reports were scored on differs; "": it is the same text."""
    words = [f"{what}: {a[key]:{form}} and {b[key]:{form}}" for key, (what, form) in OF_TEXT.items()
             if a[key] != b[key]]
    if not words and a["split_sha256"] != b["split_sha256"]:
        words = ["the sha256 of the split"]
    return ", ".join(words)


def compare_reports(report, first):
    """The comparison of a report with the first one, a dict; None where it was scored on other text.

    bpb: the difference in bits/byte, [value, low, high], an interval over the text; bpc: in bits/character.
    params, flops: ratios.
    """
    if text_difference(report, first):
        return None
    bpb = block_bootstrap(report["pieces"], first["pieces"], report["bytes"], 1)
    bpc = [value * report["bytes"] / report["chars"] for value in bpb]
    return dict(name=report["name"], bpb=list(bpb), bpc=bpc, percent=100 * bpb[0] / first["bpb"],
                params=report["params"] / first["params"],
                flops=report["flops_per_token"] / first["flops_per_token"])


def difference_table(reports, width):
    """A table that compares each later report with the first; "" where there is only one."""
    first, rows = reports[0], []
    for report in reports[1:]:
        comparison = compare_reports(report, first)
        name = report["name"].removesuffix("/best.pt")
        if comparison is None:
            rows.append((name, "other text: not compared", *["–"] * 5))
            continue
        bpb, low, high = comparison["bpb"]
        rows.append((name, f"{bpb:+.4f} [{low:+.4f}, {high:+.4f}]", f"{comparison['bpc'][0]:+.4f}",
                     f"{comparison['percent']:+.2f} %",
                     f"{report['params'] - first['params']:+,}", f"{comparison['params']:.3f} x",
                     f"{comparison['flops']:.3f} x"))
    head = ("less " + first["name"].removesuffix("/best.pt"), "bits/byte [95 % over text], < 0 better",
            "bits/char", "of it", "params", "ratio", "FLOPs")
    return table(head, rows, width=width, cut=last_folders) if rows else ""


def heads_line(reports):
    """How many heads of each checkpoint are at work; "" where all heads of all of them are."""
    if all(active == total for active, total in (report["heads"] for report in reports)):
        return ""
    return "heads at work: " + ", ".join("{} of {}".format(*report["heads"]) for report in reports)


def routing_table(report):
    """What the router of each block does; "": there is none."""
    rows = [(str(block["block"]), " ".join(f"{100 * load:.0f}" for load in block["routing_load"]),
             str(block["dead_heads"]), f"{block['effective_heads']:.2f}", f"{block['token_entropy']:.3f}",
             f"{block['batch_entropy']:.3f}") for block in report["routing"]]
    head = ("block", "load of each head, %", "dead", "effective heads", "nats of a token", "of all")
    return f"routing of {report['name'].removesuffix('/best.pt')}:\n{table(head, rows)}" if rows else ""


def score_runs(args, device, progress):
    """Yield what evaluate() reports of each checkpoint. All are opened before the first one is scored."""
    options, longest = (args.split, args.stride, device, args.dataset, args.settings), 0
    if args.ckpt[1:]:  # what is wrong with the last should not cost the time of those before it
        longest = max(load(path, *options)[1].config.block_size for path in args.ckpt)
    for path in args.ckpt:
        yield evaluate(path, *options, progress, args.tokens or 0, args.batch_size, longest, args.pack)


def as_json(reports):
    """The reports without `pieces` (the nats of parts of the text), and each compared with the first."""
    less = [compare_reports(report, reports[0]) for report in reports[1:]]
    return {"runs": [{key: value for key, value in report.items() if key != "pieces"} for report in reports],
            "less_the_first": less}


# ---- checkpoints of a task ----

OF_TEXT_ALONE = ("dataset", "stride", "tokens", "batch_size", "pack")
OF_TASKS_ALONE = ("levels", "rows")


def task_table(reports, guesses, info):
    """The output for checkpoints of a task, as text; see evaluate_task()."""
    levels = list(guesses)
    rows = [(r["name"], *(f"{share:.3f}" for share in r["levels"].values()), f"{r['right']:.3f}",
             f"{r['nats']:.4f}", f"{r['params']:,}", format_number(r["step"])) for r in reports]
    best = [max(guesses[level].values()) for level in levels]
    rows.append(("guessing", *(f"{share:.3f}" for share in best), f"{sum(best) / len(best):.3f}", *"–––"))
    head = ("run", *map(str, levels), "mean", "nats/answer", "parameters", "steps")
    lines = [f"{info['task']}, {info['split']}: {info['rows']:,} rows of each level, {info['length']:,} "
             f"tokens each{info['set']}; what share of the answers is right, by {info['unit']}",
             table(head, rows, width=120, cut=last_folders)]
    for r in reports:
        training = r["trained_on"]
        new = [level for level in levels if level not in training["task_levels"]]
        parts = [f"no rows with {', '.join(map(str, new))} {info['unit']}"] if new else []
        if info["length"] > training["task_length"]:
            parts.append(f"rows of {training['task_length']:,} tokens")
        if parts:
            lines.append(f"{r['name']} was trained on {', and on '.join(parts)}.")
    lines.append("guessing: at each level the best of any answer there may be, one of those in the row so "
                 "far, that which is there most often, and that which is usual at its place.")
    return "\n".join(lines)


def evaluate_task(args, device):
    """(what --json writes, what is printed) of checkpoints that were trained on one task. UserError."""
    rows = args.rows or task_scores.ROWS
    runs, levels, length = task_scores.open_runs(args, device)
    data = runs[0].data
    reports = [task_scores.score_run(run, levels, length, args.split, rows) for run in runs]
    guesses = task_scores.guess_levels(data, levels, length, args.split, rows)
    info = dict(task=data.meta["name"], split=args.split, rows=rows, length=length, unit=data.task.unit,
                set=f", with {', '.join(args.settings)}" if args.settings else "")
    results = {**info, "set": args.settings, "guessing": guesses, "runs": reports}
    return results, task_table(reports, guesses, info)


@as_program("evaluate", "lower --batch_size or --tokens")
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_scoring(p, "test", required=False)
    p.add_argument("--stride", type=int, default=0,
                   help="move the window on by this many tokens (default: 0, windows do not overlap)")
    p.add_argument("--tokens", type=int, help="score only this many, evenly spaced (default: all)")
    p.add_argument("--batch_size", type=int, help="windows in one forward pass (default: by device)")
    p.add_argument("--levels", type=task_scores.numbers, metavar="12,24",
                   help="of a task: levels to score (default: those of its evaluations)")
    p.add_argument("--rows", type=int, help=f"of a task: rows of each level (default: {task_scores.ROWS})")
    add_pack(p)
    args, reports = p.parse_args(other_names.translate_arguments("evaluate", argv)), []
    try:
        args.ckpt = args.ckpt or default_runs("evaluate")
        device = pick_device(args.device)
        out = writable(args.json) if args.json else None
        for flag in ("tokens", "batch_size", "rows"):
            if getattr(args, flag) is not None and getattr(args, flag) < 1:
                raise UserError(f"--{flag} {getattr(args, flag)} must be at least 1")
        own_mechanism.add_named(args)
        if task_scores.are_of_tasks(args.ckpt):
            task_scores.refuse_arguments(args, p, OF_TEXT_ALONE,
                                         f"is of a text, and {args.ckpt[0]} was trained on a task")
            results, text = evaluate_task(args, device)
            if out:
                write_json(out, results)
            return say(text, *([args.json] if out else []))
        task_scores.refuse_arguments(args, p, OF_TASKS_ALONE,
                                     f"is of a task, and {args.ckpt[0]} was trained on a text")
        for report in score_runs(args, device, sys.stderr.isatty()):
            reports.append(report)
        if out:
            write_json(out, as_json(reports))
        say(score_table(reports), *([args.json] if out else []))
    except KeyboardInterrupt:
        if reports:
            say(score_table(reports))
        raise


if __name__ == "__main__":
    main()
