"""
Write a checkpoint as a folder for Hugging Face transformers: config.json, model.safetensors, tokenizer.

    python -m lab.export_hf --ckpt out/a --out exported/a
    python -m lab.export_hf --ckpt out/a --out exported/a --as nanoheads    # our class where GPT-2's would do

The class is the plainest that computes the same, and a line says which, and why not a plainer one:

    recipe=gpt2, plain                    GPT2LMHeadModel
    recipe=modern, plain, no qk_max       NanoChatForCausalLM, which transformers has from version 5 on
    recipe=llama, plain                   LlamaForCausalLM; Qwen2's with qkv_bias, Qwen3's with qk_scale
    with mechanisms, pruned, or another   NanoHeadsForCausalLM, with this repository's code

The last one loads with trust_remote_code=True, which runs the code in the folder, mechanisms of your own
included. A mechanism whose file imports modules beside it is not exported. Gates that were set by hand are no
part of a checkpoint. docs/hugging-face.md has the other directions.
"""

import argparse
import shlex
import sys
from pathlib import Path

if __name__ == "__main__" and not __package__:  # as a script it finds lab/ alone, none of its imports
    command = shlex.join(["python", "-m", "lab.export_hf", *sys.argv[1:]])
    sys.exit(f"export_hf: type, in the repository's folder: {command}")

import nanoheads.threads  # noqa: F401  before torch, whose threads it has wait briefly
from nanoheads import checkpoint, own_mechanism
from nanoheads.common import as_program, say, writable, write_json
from nanoheads.sampling import tokenizer_of
from lab.hub import huggingface as hf


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, help="a checkpoint or a run folder (its best.pt)")
    parser.add_argument("--out", required=True, type=Path, help="the folder to write")
    parser.add_argument("--as", choices=list(hf.WRITERS), dest="family",
                        help="the class to write (default: the plainest that says the same)")
    parser.add_argument("--force", action="store_true", help="replace a folder that is there")
    parser.add_argument("--json", help="write what was written, and how to load it, to this file")
    own_mechanism.add_arguments(parser)
    return parser.parse_args(argv)


@as_program("export_hf")
def main(argv=None):
    args = arguments(argv)
    out = writable(args.json) if args.json else None
    own_mechanism.add_named(args)
    state = checkpoint.read(args.ckpt)
    model = checkpoint.build(state, args.ckpt)
    if state["meta"]:
        tokenizer_of(state["meta"], args.ckpt)
    family, why = hf.export(model, state["meta"], args.out, args.family, args.force)
    say(f"wrote {args.out}: {family}{f' ({why})' if why else ''}, {model.num_params():,} parameters, "
        f"tokenizer {state['meta']['encoding'] if state['meta'] else 'none'}")
    code = ", trust_remote_code=True" if family == "nanoheads" else ""
    say(f'AutoModelForCausalLM.from_pretrained("{args.out}"{code})')
    if out:
        write_json(out, dict(folder=str(args.out), family=family, parameters=model.num_params(),
                             trust_remote_code=family == "nanoheads"))


if __name__ == "__main__":
    main()
