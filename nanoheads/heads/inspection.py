"""
A session with the heads of a checkpoint: change one, and see what it costs and what the model then writes.

    python probe.py inspect --ckpt out/a [--tokens 16384] [--start "To be"] [--set gate.0.3=0]
    printf 'withdraw 0.3\\nskips off\\nsave out/b\\n' | python probe.py inspect --ckpt out/a

Prints a table of the heads, then reads commands, from a person or a pipe. Each change is answered with bits
per byte on the same text, and with a sample beside the checkpoint's own, of the same seed. A wrong command is
named and the session goes on; a pipe that held one ends with status 1. A gate set by hand is no part of a
checkpoint: save puts it into the head's output projection.
"""

import argparse
import cmd
import copy
import math
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from model import Agency
from nanoheads.common import UserError, explain, last_words, pick_device, table
from nanoheads.configurator import near
from nanoheads.heads.measuring import METRICS, attentions, fixed_text, measure, measure_pieces
from nanoheads.heads.states import find_violations
from nanoheads.heads.surgery import fold_gates
from nanoheads import own_mechanism
from nanoheads.locks import only_writer
from nanoheads.pruning import prune_heads
from nanoheads.training import checkpoint, scoring
from nanoheads.training.sampling import check, encode, generate, read_prompt, side_by_side

PROGRAM = "probe.py inspect"
METRIC_TOKENS = 4096  # what the table is measured on, forward and backward
# name: (arguments, what it does); a head L.H is block and number, as in the table; L alone is what
# agency_scope gives a state in that block: its MLP, or all of it
COMMANDS = {
    "heads": ("", "the table of the heads as they are now"),
    "gate": ("L.H VALUE|auto", "set a gate by hand, over sentinel and agency; auto: as learned"),
    "withdraw": ("L.H", "state withdrawn, no consent; with agency off: gate 0"),
    "restore": ("L.H", "state active, with consent; with agency off: gate auto"),
    "state": ("L.H NAME", " | ".join(Agency.STATES)),
    "consent": ("L.H yes|no", "a head without consent is held back"),
    "skips": ("on|off", "the U-Net skips between blocks"),
    "prune": ("L.H [L.H ...]", "remove heads"),
    "undo": ("", "take back the last change; again: the one before it"),
    "sample": ("[PROMPT]", "samples as loaded and now, of this prompt or the session's"),
    "text": ("PROMPT", r"the session's prompt; \n is a newline, FILE:name reads a file"),
    "violations": ("", "heads without consent whose gate says that they are in use"),
    "save": ("FOLDER", "write FOLDER/best.pt, a checkpoint of the model as it is now"),
    "help": ("", "this list"),
    "quit": ("", "the end, as is the end of the input"),
}
FREE_TEXT = ("sample", "text", "save")  # what they take is the rest of the line, blanks and # included


def help_text():
    """The commands, and what the columns of the table are."""
    names = [(name, *words) for name, words in COMMANDS.items()]
    places = "L.H: a head; L alone: the MLP or the block, where agency_scope gives that a state"
    return "\n\n".join((table(("command", "", ""), names, left=3), places,
                        table(("column", ""), METRICS.items(), left=2)))


def choose(word, yes, no):
    """True for yes, False for no. Raises UserError."""
    if word not in (yes, no):
        raise UserError(f"{word!r} must be {yes} or {no}")
    return word == yes


# ---- what is done to a model ----

def by_hand(block):
    """{head: gate} of the heads of a block whose gate was set by hand; None: its MLP, or the block."""
    attn, agency = block.attn, block.agency
    gates = [] if attn.gate_override is None else attn.gate_override.tolist()
    found = dict(zip(attn.all_head_ids(), gates))
    if agency is not None and agency.by_hand is not None:
        found[None] = agency.by_hand.item()
    return {head: gate for head, gate in found.items() if not math.isnan(gate)}


def in_words(layer, head):
    """L.H of a head, L of an MLP or a block."""
    return f"{layer}" if head is None else f"{layer}.{head}"


def agency_of(model, layer, head):
    """The Agency of what is at a place, or None."""
    block = model.transformer.h[layer]
    return block.agency if head is None else block.attn.agency


def set_skips(model, on):
    """Let the U-Net skips join the decoder, or give nothing. UserError where there are none."""
    if not model.config.unet:
        raise UserError("the model has no skips: it was trained with unet off")
    for fuse in model.fuse:
        fuse.skips = on
    model.config = replace(model.config, unet_skips=on)


def folded(model):
    """A copy whose output projections hold the gates that were set by hand: the same logits.

    UserError for a head that runs by hand while its own gate is 0: no factor leads from there.
    """
    copied, stuck = fold_gates(model)
    for layer, head in stuck:
        gate, place = by_hand(model.transformer.h[layer])[head], in_words(layer, head)
        what = "head" if head is not None else model.config.agency_scope
        raise UserError(f"{what} {place} is at {gate:g} by hand while its own gate is 0, "
                        f"which no checkpoint can hold; say gate {place} auto first")
    return copied


# ---- a session ----

class Session(cmd.Cmd):
    """A checkpoint as loaded, the changes made to it, and the model that they make. do_* are COMMANDS."""
    prompt = "> "

    def __init__(self, args):
        self.on_terminal, self.n_wrong = sys.stdin.isatty(), 0
        super().__init__(completekey="tab" if self.on_terminal else None)
        self.args, self.path = args, args.ckpt[0]
        self.read, self.loaded, self.data = scoring.load(self.path, args.split, 0, args.device,
                                                         args.dataset, args.settings)
        self.model, self.changes = self.loaded, []  # [(command, what it does to a model)]
        self.line = ""
        tokens, T = self.data.tokens(args.split), self.loaded.config.block_size
        cuts = scoring.windows_of(self.data, args.split, T, 0, args.tokens)
        texts = (self.data.tokenizer.decode_bytes(tokens[end - n:end]) for _, end, n in cuts)
        self.n_bytes = sum(map(len, texts))
        probe = fixed_text(self.data, args.split, T, min(METRIC_TOKENS, len(tokens) - 1))
        self.probe = [ids.to(args.device) for ids in probe]
        self.start, self.plain = self.read_prompt(args.start), {}
        self.bits = self.at_start = self.bits_per_byte(self.loaded)
        if not math.isfinite(self.bits):
            raise UserError(f"{self.path} gives {self.bits} bits/byte on {args.split}: "
                            "its weights are damaged, or its training diverged")
        changed = f", with {', '.join(args.settings)}" if args.settings else ""
        print(f"{self.path}{changed}: {self.bits:.4f} bits/byte on {sum(n for _, _, n in cuts):,} tokens of "
              f"{self.data.meta['name']}, {args.split}", end="\n\n")
        self.do_heads()

    def bits_per_byte(self, model):
        """Bits per byte on the session's text, in float32."""
        nats, _ = scoring.score(model, self.data, self.args.split, max_tokens=self.args.tokens)
        return scoring.bits(nats, self.n_bytes)

    def read_prompt(self, text):
        """(text, token ids [1, T]). UserError."""
        try:
            text = read_prompt(text)
            return text, encode(self.data.tokenizer, text, self.path)
        except ValueError as e:  # which begins with the flag of sample.py
            raise UserError(f"prompt: {str(e).partition(': ')[2]}")

    def show(self, text, ids):
        """A sample of the checkpoint as loaded, beside one of the model as it is now."""
        if text not in self.plain:
            self.plain = {text: generate(self.loaded, self.data.tokenizer, ids, self.args).texts[0]}
        now = generate(self.model, self.data.tokenizer, ids, self.args).texts[0]
        width = shutil.get_terminal_size((110, 40)).columns
        print(side_by_side(("as loaded", "now"), (text + self.plain[text], text + now), width))

    def become(self, changes):
        """Go to the model that these changes make of the checkpoint, and say what it does. UserError."""
        model = copy.deepcopy(self.loaded)
        for _, change in changes:
            change(model)
        before, after = self.bits, self.bits_per_byte(model)
        if not math.isfinite(after):
            raise UserError(f"that would make {after} bits/byte; nothing was changed")
        self.model, self.changes, self.bits = model, changes, after
        print(f"bits/byte {before:.4f} -> {after:.4f} ({after - before:+.4f}), "
              f"{after - self.at_start:+.4f} from the checkpoint as loaded")
        self.show(*self.start)

    def change(self, change):
        self.become([*self.changes, (self.line, change)])

    # ---- commands ----

    def place(self, word):
        """(layer, head) of a word L.H, (layer, None) of L. Raises ValueError, which says what there is."""
        match = re.fullmatch(r"(\d+)(?:\.(\d+))?", word)
        pieces = self.model.transformer.h[0].agency is not None
        if not match or match[2] is None and not pieces:
            more = f", or the {self.model.config.agency_scope}'s block, as in 0" if pieces else ""
            raise UserError(f"{word!r} is no head; write block.number, as in 0.3{more}")
        layer, head = int(match[1]), None if match[2] is None else int(match[2])
        self.model.set_head(layer, head)
        return layer, head

    def set(self, word, **values):
        layer, head = self.place(word)
        step = self.read.get("step") or 0
        self.change(lambda model: model.set_head(layer, head, step=step, **values))
        if "gate" not in values and head in by_hand(self.model.transformer.h[layer]):
            print(f"its gate, set by hand, overrides state and consent; gate {word} auto ends that")
        elif "gate" not in values and not agency_of(self.model, layer, head).enforce:
            print("agency_enforce is off: no head is withdrawn or held back")

    def do_heads(self):
        metrics, rows, states = measure(self.model, *self.probe), [], list(Agency.STATES)
        hands = [by_hand(block) for block in self.model.transformer.h]
        for layer, (attn, hand) in enumerate(zip(attentions(self.model), hands)):
            agency = attn.agency
            for i, head in enumerate(attn.all_head_ids()):
                m = {name: each[layer][i].item() for name, each in metrics.items()}
                who = ("-", "-")
                if agency is not None:
                    who = states[agency.state[i]], "yes" if agency.consent[i] else "no"
                rows.append((layer, head, f"{m['gate']:.3f}" + (" ", "*")[head in hand], *who,
                             f"{m['entropy']:.3f}", f"{m['importance']:.2e}", f"{m['utilisation']:.3f}",
                             f"{m['gradient']:.2e}", f"{m['conflict']:+.2f}"))
        print(table(("layer", "head", "gate ", "state", "consent", "entropy", "importance", "utilisation",
                     "gradient", "conflict"), rows, left=(3, 4)))
        if found := measure_pieces(self.model, *self.probe):
            rows = []
            for layer, (block, hand) in enumerate(zip(self.model.transformer.h, hands)):
                m, agency = {name: each[layer].item() for name, each in found.items()}, block.agency
                rows.append((layer, f"{m['gate']:.3f}" + (" ", "*")[None in hand], states[agency.state[0]],
                             "yes" if agency.consent[0] else "no", f"{m['importance']:.2e}",
                             f"{m['utilisation']:.3f}", f"{m['gradient']:.2e}", f"{m['conflict']:+.2f}"))
            print("\n" + table((self.model.config.agency_scope, "gate ", "state", "consent", "importance",
                                "utilisation", "gradient", "conflict"), rows, left=(2, 3)))
        if any(hands):
            print("* set by hand")

    def do_gate(self, word, value):
        number = math.nan  # not set
        if value != "auto":
            with suppress(ValueError):
                number = float(value)
            if not math.isfinite(number):
                raise UserError(f"{value!r} must be a number, or auto")
        self.set(word, gate=number)

    def do_withdraw(self, word):
        if agency_of(self.model, *self.place(word)):
            return self.set(word, state="withdrawn", consent=False)
        self.set(word, gate=0.0)
        print(f"{self.stateless()}: its gate is 0 by hand")

    def do_restore(self, word):
        if agency_of(self.model, *self.place(word)):
            return self.set(word, state="active", consent=True)
        self.set(word, gate=math.nan)
        print(f"{self.stateless()}: its gate is as learned")

    def stateless(self):
        """Why a head has no state."""
        return "heads have no states" if self.model.config.agency else "agency is off"

    def do_state(self, word, name):
        self.set(word, state=name)

    def do_consent(self, word, answer):
        self.set(word, consent=choose(answer, "yes", "no"))

    def do_skips(self, answer):
        on = choose(answer, "on", "off")
        self.change(lambda model: set_skips(model, on))

    def do_prune(self, *words):
        gone = {}
        for layer, head in map(self.place, words):
            if head is None:
                raise UserError(f"{layer} is no head, and only heads are pruned; withdraw {layer} closes it")
            if head not in attentions(self.model)[layer].head_ids:
                raise UserError(f"{layer}.{head} is a constraint head, which stays for its scores; "
                                f"gate {layer}.{head} 0 closes it")
            gone.setdefault(layer, set()).add(head)
        self.change(lambda model: prune_heads(model, gone))

    def do_undo(self):
        if not self.changes:
            raise UserError("there is nothing to undo")
        print("undone:", self.changes[-1][0])
        self.become(self.changes[:-1])

    def do_violations(self):
        rows = [(v["layer"], v.get("head", v.get("scope")), v["type"], f"{v['gate']:.3f}", v["state"])
                for v in find_violations(self.model)]
        print(table(("layer", "head", "type", "gate", "state"), rows, left=(2, 4)) if rows else "none")

    def do_sample(self, text=None):
        self.show(*(self.start if text is None else self.read_prompt(text)))

    def do_text(self, text):
        self.start = self.read_prompt(text)
        self.show(*self.start)

    def do_save(self, folder):
        path = Path(folder.strip()).expanduser() / "best.pt"
        if taken := [p for p in (path, path.with_name("ckpt.pt")) if p.exists()]:
            raise UserError(f"{taken[0]} is there already; name another folder")
        model = folded(self.model)
        state = {key: self.read[key] for key in ("dataset", "train", "step") if key in self.read}
        edits = dict(ckpt=str(self.path), set=self.args.settings, commands=[line for line, _ in self.changes])
        state.update(model=model.state_dict(), config=model.config.flags(), meta=self.data.meta, edits=edits)
        if not checkpoint.same_logits(checkpoint.build(state, path, self.args.device), self.model):
            raise UserError("a checkpoint of it would say something else; nothing was written")
        with only_writer(path.parent):
            state.update(own_mechanism.held(model.config, path.parent))
            checkpoint.save(path, state)
        print(path)
        for layer, block in enumerate(self.model.transformer.h):
            for head, gate in by_hand(block).items():
                where = "its output projection" if head is not None else "its output projections"
                print(f"gate {gate:g} of {in_words(layer, head)} is in {where} there")

    def do_help(self):
        print(help_text())

    def do_quit(self):
        return True

    # ---- reading ----

    def obey(self, line):
        """Do what a line says; True: it was the last. Raises ValueError, OSError."""
        name, _, rest = line.lstrip().partition(" ")
        if name not in COMMANDS:
            meant = near(name, COMMANDS)
            hint = f"did you mean {meant}?" if meant else "help lists the commands"
            raise UserError(f"no command {name!r}; {hint}")
        words = rest.partition("#")[0].split()
        if name in FREE_TEXT:
            words = [rest] if rest.strip() else []
        usage, _ = COMMANDS[name]
        least, more = len(usage.partition("[")[0].split()), "[" in usage
        if not (len(words) == least or more and len(words) > least):
            raise UserError(f"it takes {usage or 'nothing'}")
        self.line = " ".join((name, *words))
        return getattr(self, f"do_{name}")(*words)

    def onecmd(self, line):
        """obey(), but what goes wrong is named, and the session goes on."""
        if line == "EOF":  # cmd's word for it
            print()
            return True
        if not self.on_terminal:
            print(line)  # what comes out of a pipe reads like a session
        if not line.strip() or line.lstrip().startswith("#"):
            return False
        try:
            return self.obey(line)
        except (ValueError, OSError) as e:
            self.n_wrong += 1
            sys.stdout.flush()
            print(f"{PROGRAM}: {line.strip()}: {explain(e) or e}", file=sys.stderr, flush=True)


# ---- command line ----

def arguments(argv):
    p = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, epilog=help_text(),
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoint.add_arguments(p)
    p.add_argument("--split", default="val", help="train, val or test (default: val)")
    p.add_argument("--dataset", help="read this dataset, which must have the same vocabulary "
                                     "(default: the one trained on)")
    p.add_argument("--tokens", type=int, default=16384,
                   help="tokens to score at each change, in evenly spaced windows; 0: all (default: 16,384)")
    p.add_argument("--start", default="\n", help="the prompt of the samples (default: a newline)")
    p.add_argument("--max_new_tokens", type=int, default=120, help="length of a sample (default: 120 tokens)")
    p.add_argument("--temperature", type=float, default=0.8,
                   help="0: always the likeliest token (default: 0.8)")
    p.add_argument("--seed", type=int, default=1337, help="same seed, same sample (default: 1337)")
    p.set_defaults(num_samples=1, top_k=None, top_p=None, repetition_penalty=1.0, stop=False)
    return p.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)  # bytes that are no text come through, as in sample.py
    with last_words(PROGRAM):
        check(args)
        if len(args.ckpt) > 1:
            raise UserError(f"--ckpt: one at a time, not {len(args.ckpt)}")
        if args.tokens < 0:
            raise UserError(f"--tokens={args.tokens} must not be negative")
        checkpoint.allow_code(args)
        args.device = pick_device(args.device)
        session = Session(args)
        session.cmdloop()
        if session.n_wrong and not session.on_terminal:
            sys.exit(1)
