"""
Generate text from one checkpoint, or from several side by side.

    python sample.py --ckpt out/a [--ckpt out/b ...] --start "To be" [--num_samples 3] [--max_new_tokens 300]
    python sample.py --ckpt out/a --start FILE:prompt.txt --temperature 0.8 --top_p 0.95
    python sample.py --ckpt out/a --set unet_skips=False --set gate.0.3=0    # switches moved, heads set
    python sample.py --ckpt out/a --start "To be" --audit audit.jsonl    # what its heads do to it

A run folder stands for its best.pt. Every checkpoint gets the same prompt, seed and settings; with one
checkpoint and one sample the text appears as it is made. More samples do not change the first. With several
checkpoints the defaults are three samples of 200 tokens and --top_k 200, as in the routing write-up. Without
--ckpt it is the newest run; where that is one of the write-up's pair, both. --audit writes what mechanisms do
to each text to a file and a page (docs/look.md); under a text it lists which tokens constraint heads score
highest.
"""

import argparse
import shutil
import sys
from functools import partial

import nanoheads.threads  # noqa: F401  before torch: sets how long its threads spin while they wait
from nanoheads import checkpoint, other_names
from nanoheads.common import (ArgumentParser, UserError, as_program, from_lab, last_words, pick_device, say,
                              writable, write_json)
from nanoheads.sampling import (add_arguments, check, encode, generate, model_and_tokenizer, read_prompt,
                                side_by_side, stop_of)


def audit_files(args, models):
    """The files that --audit writes, or None without it. UserError where they could not be written."""
    if not args.audit:
        return None
    if len(models) > 1:
        raise UserError("--audit takes one checkpoint")
    return from_lab("lab.heads.look", "--audit").paths(args.audit, "--audit")


def explained(args, models, prompts, made, files):
    """Write the audit of `made`, one Samples per checkpoint; returns the lines to print under each text.

    files: see audit_files().
    """
    look = from_lab("lab.heads.look", "--audit")
    (model, tokenizer), = models
    viewer = look.Viewer(model, args.ckpt[0], args.settings)
    return look.of_samples(viewer, tokenizer, prompts[0][0].tolist(), made[0].rows, files)


def run(args):
    """Load, generate, print. The loop over tokens is GPT.stream(); generate() makes text of its tokens."""
    args.ckpt = args.ckpt or checkpoint.default_runs("sample")
    # where several texts stand side by side, the routing write-up's
    defaults = dict(num_samples=3, max_new_tokens=200, top_k=200) if args.ckpt[1:] else dict(
        num_samples=1, max_new_tokens=300, top_k=None)
    for name, value in defaults.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    check(args)
    checkpoint.allow_code(args)
    device, text = pick_device(args.device), read_prompt(args.start)
    pack = args.pack and not args.audit
    models = [model_and_tokenizer(path, device, args.dataset, args.settings, pack) for path in args.ckpt]
    prompts = [encode(tokenizer, text, path, args.special)
               for (_, tokenizer), path in zip(models, args.ckpt)]
    for _, tokenizer in models:
        stop_of(args, tokenizer)  # what is wrong with it is said before anything is printed
    changed = f"with {', '.join(args.settings)}" if args.settings else None
    files = audit_files(args, models)
    out = writable(args.json) if args.json else None

    # one text appears as it is made
    if len(models) == args.num_samples == 1:
        print(text, end="", flush=True)
        try:
            made = [generate(*models[0], prompts[0], args, partial(print, end="", flush=True))]
        finally:
            print(flush=True)  # also before a message of what went wrong
        if files and (rows := explained(args, models, prompts, made, files)[0]):
            print("", rows, sep="\n")
    # several stand side by side
    else:
        made = [generate(*model, ids, args) for model, ids in zip(models, prompts)]
        audits = explained(args, models, prompts, made, files) if files else None
        if changed:
            say(changed, end="\n\n")
        print_samples(args, text, made, audits)
    sys.stdout.flush()
    if out:
        write_json(out, [dict(ckpt=path, prompt=text, texts=list(samples.texts),
                              tokens_per_s=samples.tokens_per_s) for path, samples in zip(args.ckpt, made)])
    for path, samples in zip(args.ckpt, made):
        which = f"{path}, {changed}" if changed else path
        say(f"{which}: {samples.tokens_per_s:,.0f} tokens/s", file=sys.stderr)
    for path in files or ():
        say(path, file=sys.stderr)


def print_samples(args, text, made, audits=None):
    """Each sample after the prompt, those of several checkpoints side by side; under it its audit."""
    columns = shutil.get_terminal_size((120, 40)).columns
    for i in range(args.num_samples):
        if args.num_samples > 1:
            print(f"==== sample {i + 1} ====")
        texts = [text + samples.texts[i] for samples in made]
        print(texts[0] if len(texts) == 1 else side_by_side(args.ckpt, texts, columns), end="\n\n")
        if audits and audits[i]:
            print(audits[i], end="\n\n")


@as_program("sample")
def main(argv=None):
    p = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoint.add_arguments(p, required=False)
    p.add_argument("--start", default="\n",
                   help='the prompt, or FILE:prompt.txt; \\n is a newline (the default), \\\\n a backslash '
                        'and an n; "" is the separator')
    p.add_argument("--num_samples", type=int,
                   help="continuations from each checkpoint (default: 1; of several checkpoints 3)")
    p.add_argument("--max_new_tokens", type=int,
                   help="length of each, in tokens (default: 300; of several checkpoints 200)")
    add_arguments(p)
    p.add_argument("--audit", metavar="FILE",
                   help="write what mechanisms do to each text, as JSON lines; a page of that name, .html, "
                        "comes beside them")
    checkpoint.add_pack(p, "; --audit looks at all heads")
    p.add_argument("--json", help="write the texts to this file as well")
    p.add_argument("--dataset",
                   help="where a nanoGPT checkpoint's vocabulary is, if not in the dataset that it names")
    args = p.parse_args(other_names.in_our_arguments("sample", sys.argv[1:] if argv is None else argv))
    with last_words("sample", "lower --num_samples or --max_new_tokens"):
        run(args)


if __name__ == "__main__":
    main()
