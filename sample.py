"""
Generate text from one checkpoint, or from several side by side.

    python sample.py                                           # the newest run
    python sample.py --ckpt out/a --start "To be" --num_samples 3 --max_new_tokens 100
    python sample.py --ckpt out/a --ckpt out/b --start FILE:prompt.txt --temperature 0.8 --top_p 0.95
    python sample.py --ckpt out/a --set unet_skips=False --set gate.0.3=0      # with parts switched off
    python sample.py --ckpt out/a --start "To be" --audit audit.jsonl          # and what its heads do
    python sample.py --ckpt out/recall --levels 4,12           # a model that was trained on a task

Every checkpoint gets the same prompt, seed and settings. With one checkpoint and one sample the text appears
as it is made. More samples do not change the first. With several checkpoints the defaults are three samples
of 200 tokens and --top_k 200, as in the head-routing write-up. Without --ckpt it is the newest run, or both
of that write-up's runs if the newest is one of them.

--audit writes what mechanisms do to each text to a file, and a picture of attention maps (docs/heads.md).
Under each text it lists the tokens that constraint heads score highest.

For checkpoints of a task (docs/compare.md), rows are shown with the answers of each model, and wrong answers
are marked.
"""

import argparse
import shutil
import sys
from functools import partial

import nanoheads.threads  # noqa: F401  before torch: sets how long its threads spin while they wait
from nanoheads import other_names, own_mechanism, task_scores
from nanoheads.arguments import add_checkpoints, add_pack, default_runs
from nanoheads.common import UserError, as_program, from_lab, pick_device, say, writable, write_json
from nanoheads.sampling import (add_arguments, add_special, check, encode, generate, model_and_tokenizer,
                                read_prompt, side_by_side, stop_of)
from nanoheads.tokenizer import Tokenizer


def audit_files(args, models):
    """The files that --audit writes, or None without it. UserError where they could not be written."""
    if not args.audit:
        return None
    if len(models) > 1:
        raise UserError("--audit takes one checkpoint")
    return from_lab("lab.heads.look", "--audit").paths(args.audit, "--audit")


def write_audit(args, model, tokenizer, prompt, rows, files):
    """Write the audit of the texts that continue a prompt, rows of ids. Returns the lines to print under each
    text. files: see audit_files().
    """
    look = from_lab("lab.heads.look", "--audit")
    viewer = look.Viewer(model, args.ckpt[0], args.settings)
    return look.look_at_samples(viewer, tokenizer, prompt, rows, files)


def run(args):
    """Load, generate, print. The loop over tokens is GPT.stream(); generate() makes text of its tokens."""
    # where several texts stand side by side, the routing write-up's
    defaults = dict(num_samples=3, max_new_tokens=200, top_k=200) if args.ckpt[1:] else dict(
        num_samples=1, max_new_tokens=300, top_k=None)
    for name, value in defaults.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    check(args)
    args.start = "\n" if args.start is None else args.start
    device, text = pick_device(args.device), read_prompt(args.start)
    pack = args.pack and not args.audit
    models = [model_and_tokenizer(path, device, args.dataset, args.settings, pack) for path in args.ckpt]
    prompts = [encode(tokenizer, text, path, args.special)
               for (_, tokenizer), path in zip(models, args.ckpt)]
    for _, tokenizer in models:
        stop_of(args, tokenizer)  # what is wrong with it is said before anything is printed
    settings_note = f"with {', '.join(args.settings)}" if args.settings else None
    files = audit_files(args, models)
    out = writable(args.json) if args.json else None

    def audit():
        return write_audit(args, *models[0], prompts[0][0].tolist(), samples[0].rows, files)

    # one text appears as it is made
    if len(models) == args.num_samples == 1:
        print(text, end="", flush=True)
        try:
            samples = [generate(*models[0], prompts[0], args, partial(print, end="", flush=True))]
        finally:
            print(flush=True)  # also before a message of what went wrong
        if files and (rows := audit()[0]):
            print("", rows, sep="\n")
    # several stand side by side
    else:
        samples = [generate(*model, ids, args) for model, ids in zip(models, prompts)]
        audits = audit() if files else None
        if settings_note:
            say(settings_note, end="\n\n")
        print_samples(args, text, samples, audits)
    sys.stdout.flush()
    if out:
        write_json(out, [dict(ckpt=path, prompt=text, texts=list(run_samples.texts),
                              tokens_per_s=run_samples.tokens_per_s)
                         for path, run_samples in zip(args.ckpt, samples)])
    for path, run_samples in zip(args.ckpt, samples):
        which = f"{path}, {settings_note}" if settings_note else path
        say(f"{which}: {run_samples.tokens_per_s:,.0f} tokens/s", file=sys.stderr)
    for path in files or ():
        say(path, file=sys.stderr)


# ---- rows of a task ----

OF_TEXT_ALONE = ("start", "max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop",
                 "special", "dataset", "pack")


def chunks(columns, width):
    """Columns of words, [[str, one a line]], as lines of aligned text, in blocks no wider than `width`."""
    blocks, block, block_width = [], [], 0
    for column in columns:
        column_width = max(map(len, column))
        if block and block_width + 1 + column_width > width:
            blocks, block, block_width = [*blocks, block], [], 0
        block.append([word.ljust(column_width) for word in column])
        block_width += 1 + column_width
    return [[" ".join(words) for words in zip(*block)] for block in [*blocks, block]]


def row_of_task(names, row, targets, answers, width):
    """A row of a task as text: its tokens, below them the right answers and each checkpoint's answers.

    targets, answers [of each checkpoint]: see task_scores.rows_with_answers(). Behind a wrong one is a "!".
    """
    labels = ["", "wanted", *names]
    label_width = max(map(len, labels))
    places = [i for i, word in enumerate(targets) if word is not None]
    n_right = [sum(run_answers[i] == targets[i] for i in places) for run_answers in answers]
    columns = []
    for i, token in enumerate(row):
        cells = [""] * len(answers)
        if i in places:
            cells = [run_answers[i] + "!" * (run_answers[i] != targets[i]) for run_answers in answers]
        columns.append([token, targets[i] or "", *cells])
    lines, ends = [], {}
    for block in chunks(columns, max(1, width - label_width)):
        for label, line in zip(labels, block):
            if line.strip():
                ends[label] = len(lines)
                lines.append(f"{label:{label_width}} {line}".rstrip())
        lines.append("")
    for name, n in zip(names, n_right):
        end, text = ends.get(name), f"{n} of {len(places)} right"
        if end is not None and len(lines[end]) + 3 + len(text) <= width:
            lines[end] += f"   {text}"
        else:
            lines.insert(-1, f"{name:{label_width}} {text}")
    return "\n".join(lines[:-1])


def run_task(args):
    """Print rows of each level with the answers of checkpoints that were trained on one task."""
    n, device = 1 if args.num_samples is None else args.num_samples, pick_device(args.device)
    if n < 1 or not 0 <= args.seed < 1 << 63:
        raise UserError(f"num_samples={n} must be at least 1, seed={args.seed} from 0 to 2^63 - 1")
    out = writable(args.json) if args.json else None
    runs, levels, length = task_scores.open_runs(args, device)
    files, data = audit_files(args, runs), runs[0].data
    names, width, results = [run.name for run in runs], shutil.get_terminal_size((120, 40)).columns, []
    for level in levels:
        rows = task_scores.rows_with_answers(runs, level, length, args.split, n, args.seed)
        for number, (row, targets, answers) in enumerate(rows, 1):
            which = f", row {number}" if n > 1 else ""
            say(f"==== {data.name}, {level} {data.task.unit}{which} ====",
                row_of_task(names, row, targets, answers, width), "")
            results.append(dict(level=level, row=row, wanted=targets, answers=dict(zip(names, answers))))
    if out:
        write_json(out, results)
    if files:
        row_blocks = [data.rows(args.split, level, n, length, args.seed)[0] for level in levels]
        ids = [row for x in row_blocks for row in x.tolist()]
        write_audit(args, runs[0].model, Tokenizer.from_meta(data.meta), [], ids, files)
        say(*files, file=sys.stderr)


def print_samples(args, text, samples, audits=None):
    """Each sample after the prompt, those of several checkpoints side by side; under it its audit."""
    columns = shutil.get_terminal_size((120, 40)).columns
    for i in range(args.num_samples):
        if args.num_samples > 1:
            print(f"==== sample {i + 1} ====")
        texts = [text + run_samples.texts[i] for run_samples in samples]
        print(texts[0] if len(texts) == 1 else side_by_side(args.ckpt, texts, columns), end="\n\n")
        if audits and audits[i]:
            print(audits[i], end="\n\n")


@as_program("sample", "lower --num_samples or --max_new_tokens")
def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_checkpoints(p, required=False)
    p.add_argument("--start",
                   help='the prompt, or FILE:prompt.txt, which is taken as it is (default: a newline); \\n '
                        'is a newline, \\\\n a backslash and an n; "" is the separator of the corpus')
    p.add_argument("--num_samples", type=int,
                   help="number of samples of each checkpoint (default: 1, of several checkpoints 3); of a "
                        "task, rows of each level (default: 1)")
    p.add_argument("--max_new_tokens", type=int,
                   help="length of each sample, in tokens (default: 300, of several checkpoints 200)")
    add_arguments(p)
    add_special(p)
    p.add_argument("--audit", metavar="FILE",
                   help="write what mechanisms do to each text to this file, as JSON lines, and a picture "
                        "beside it, as .png")
    add_pack(p, "; --audit computes all heads")
    p.add_argument("--json", help="write the texts to this file too")
    p.add_argument("--levels", type=task_scores.numbers, metavar="4,12",
                   help="of a task: levels to show (default: those of its evaluations)")
    p.add_argument("--dataset",
                   help="for a checkpoint of nanoGPT: the dataset with its vocabulary, if that is not the "
                        "one that it names")
    args = p.parse_args(other_names.translate_arguments("sample", sys.argv[1:] if argv is None else argv))
    args.ckpt = args.ckpt or default_runs("sample")
    own_mechanism.add_named(args)
    if task_scores.are_of_tasks(args.ckpt):
        task_scores.refuse_arguments(args, p, OF_TEXT_ALONE,
                                     f"is of a text, and {args.ckpt[0]} was trained on a task")
        args.split = "test"
        return run_task(args)
    task_scores.refuse_arguments(args, p, ["levels"],
                                 f"is of a task, and {args.ckpt[0]} was trained on a text")
    run(args)


if __name__ == "__main__":
    main()
