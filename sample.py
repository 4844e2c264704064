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
import shutil
import sys
from functools import partial

from nanoheads.common import UserError, last_words, pick_device
from nanoheads.heads import audit
from nanoheads.training import checkpoint
from nanoheads.training.sampling import check, encode, generate, model_and_tokenizer, prompt, side_by_side


# ---- command line ----

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
