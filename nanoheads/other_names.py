"""
Translates the names that nanoGPT and the head-routing write-up have for keys and arguments into ours.

A config file or a command line that somebody brings along works here as it is: each key that is called
otherwise here is translated, and a line says what it sets. That is done once all is known, since some mean
something only beside others: nanoGPT counts an evaluation in batches, for instance, so what eval_iters sets
depends on the size of a batch. The arguments of sample.py, evaluate.py and plot_curves.py follow below.
"""

import sys
from pathlib import Path
from typing import Optional

from nanoheads.common import say

# name -> (its type there, the key here that it sets or is nearest to; "": none)
NAMES = {
    # nanoGPT
    "learning_rate": (float, "adamw_lr"),
    "lr": (float, "adamw_lr"),
    "gradient_accumulation_steps": (int, "grad_accum"),
    "eval_iters": (int, "eval_tokens"),
    "decay_lr": (bool, "schedule"),
    "always_save_checkpoint": (bool, ""),
    "backend": (str, ""),
    # head routing
    "use_routing": (bool, "routing"),
    "top_k_heads": (Optional[int], "routing_top_k"),
    "entropy_reg_coef": (float, "routing_coef"),
}
# by these a config file is known to be written for nanoGPT
ONLY_NANOGPT = {"learning_rate", "gradient_accumulation_steps", "eval_iters", "decay_lr",
                "always_save_checkpoint", "backend"}
# what holds in nanoGPT where a config file does not say otherwise, from the head of its train.py (github.com/
# karpathy/nanoGPT, 3adf61e), under our names but for eval_iters. Its folder, device and precision are left
# out, as are its names for Weights & Biases: the numbers are the same with ours
NANOGPT = dict(
    dataset="openwebtext", n_layer=12, n_head=12, n_embd=768, block_size=1024, dropout=0.0, bias=False,
    batch_size=12, grad_accum=5 * 8, max_iters=600000, adamw_lr=6e-4, min_lr=6e-5, warmup_iters=2000,
    lr_decay_iters=600000, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0,
    eval_interval=2000, eval_iters=200, log_interval=1)


def our_name(name):
    """The key here that a name of another program sets or is nearest to; any other name as it is."""
    return NAMES[name][1] if name in NAMES else name


def nanogpt_defaults(values):
    """{key: value} of NANOGPT that these values, {key: value} under any names, leave open.

    A model that comes from a checkpoint brings its sizes, and a rate that does not fall has no end.
    """
    set_keys = {*values, *map(our_name, values)}
    if "eval_tokens" in set_keys:
        set_keys.add("eval_iters")
    if values.get("init_from") not in (None, "scratch", "resume"):
        set_keys |= {"n_layer", "n_head", "n_embd", "block_size", "bias"}
    if values.get("decay_lr") is False or values.get("schedule") == "constant":
        set_keys |= {"min_lr", "warmup_iters", "lr_decay_iters"}
    return {key: value for key, value in NANOGPT.items() if key not in set_keys}


def translate(values, all_values):
    """({key: value} under the names here, a line for each that had another); the later wins.

    values: {any name: value}. all_values: {key: value} of all keys, with their defaults.
    """
    translated, lines = {}, []
    for name, value in values.items():
        if name not in NAMES and not (name == "init_from" and value in ("scratch", "resume")):
            translated[name] = value
            continue
        translated_values, words = meaning(name, value, values, all_values)
        translated.update(translated_values)
        what = ", ".join(f"{key}={setting}" for key, setting in translated_values.items()) or "nothing here"
        lines.append(f"{name}={value} sets {what}{words and f': {words}'}")
    return translated, lines


def meaning(name, value, values, all_values):
    """({key here: value} that a name of another program sets, what else there is to say)."""
    batch, block, heads = (all_values.get(key) for key in ("batch_size", "block_size", "n_head"))
    has_routing = values.get("use_routing", all_values.get("routing") is not None)
    match name:
        case "learning_rate" | "lr":
            return dict(adamw_lr=value), "the peak rate of what has none of its own, see --help"
        case "gradient_accumulation_steps":
            return dict(grad_accum=value), ""
        case "eval_iters":
            return dict(eval_tokens=value * batch * block), \
                f"{value} batches of {batch} x {block} tokens, the same ones each time"
        case "decay_lr" if value:
            return {}, "the rate falls unless schedule=constant"
        case "decay_lr":
            return dict(schedule="constant", warmup_iters=0), ""
        case "always_save_checkpoint":
            return {}, "ckpt.pt is always the last save, and best.pt the best"
        case "backend":
            return {}, "the device decides it: nccl on cuda, gloo on a CPU"
        case "init_from":
            return dict(init_from=None, resume=value == "resume"), ""
        # the write-up's GPTConfig has use_routing=False, top_k_heads=None, which uses every head, and
        # entropy_reg_coef=0.01
        case "use_routing" if value:
            return dict(routing="published", routing_mask="zero", routing_eval_gate=False,
                        routing_top_k=values.get("top_k_heads") or heads,
                        routing_coef=values.get("entropy_reg_coef", 0.01)), \
                "the router as its write-up prints it"
        case "use_routing":
            return dict(routing=None), ""
        case "top_k_heads" | "entropy_reg_coef" if not has_routing:
            return {}, "there is no routing"
        case "top_k_heads":
            return dict(routing_top_k=heads if value is None else value), ""
        case "entropy_reg_coef":
            return dict(routing_coef=value), ""


# ---- arguments of programs that do not train ----

# folders of the head-routing write-up's two runs: the baseline, and what is compared with it
ROUTING_PAIR = ("out-enwik8-routing-ablation", "out-enwik8-routing")


def run_folder(path):
    """The run folder of a file in it: out-a/training_log.json -> out-a."""
    return str(Path(path).parent)


def test_data(path):
    """The arguments for a split's file. The write-up's data/enwik8 has the characters that its runs are
    trained on, enwik8_char here, and without --dataset a run is scored on what it was trained on.
    """
    dataset = [] if run_folder(path) == str(Path("data/enwik8")) else ["--dataset", run_folder(path)]
    return [*dataset, "--split", Path(path).stem]


# program -> {argument there: the arguments here that its value means}
ARGUMENTS = {
    "sample": {  # nanoGPT
        "--out_dir": lambda path: ["--ckpt", path],
        "--init_from": lambda name: [] if name == "resume" else ["--ckpt", name],
        "--compile": lambda value: [],
    },
    "evaluate": {  # head routing: the first checkpoint is what others are compared with
        "--baseline_checkpoint": lambda path: ["--ckpt", path],
        "--routing_checkpoint": lambda path: ["--ckpt", path],
        "--test_data": test_data,
        "--use_full_dataset": lambda value: [],
    },
    "plot_curves": {  # head routing
        "--log_file": lambda path: [run_folder(path)],
    },
}
WITHOUT_VALUE = {"--use_full_dataset"}


def translate_arguments(program, argv):
    """argv with the arguments of ARGUMENTS under the names here; a line for each says what it means.

    Ends the program in one line where a value is missing.
    """
    names, rest = ARGUMENTS[program], list(argv)
    groups = []  # [(place in names, arguments)]
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if name not in names:
            groups.append((len(names), [argument]))
            continue
        if not equals and name not in WITHOUT_VALUE:
            if not rest:
                sys.exit(f"{program}: {name} needs a value")
            value = rest.pop(0)
        arguments = names[name](value)
        # the baseline comes before what is compared with it
        groups.append((list(names).index(name), arguments))
        words = " ".join(arguments) or "nothing here"
        say(f"{program}: {name} {value}".rstrip() + f" means {words}", file=sys.stderr)
    return [argument for _, arguments in sorted(groups, key=lambda pair: pair[0]) for argument in arguments]
