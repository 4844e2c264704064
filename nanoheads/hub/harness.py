"""
Checkpoints in EleutherAI's lm-evaluation-harness: its model `nanoheads`, and its command line with it.

    python -m nanoheads.hub.harness --model nanoheads --model_args ckpt=out/a --tasks lambada_openai
    python -m nanoheads.hub.harness --model nanoheads --model_args ckpt=out/a \
        --include_path data/lm_eval --tasks nanoheads_wikitext2

What follows the program's name is lm_eval's own (--help). --model_args has key=value, with commas between:

ckpt        a checkpoint, a run folder (its best.pt), or a Hugging Face folder that we can read
device      auto (default), cpu, cuda, cuda:1, mps
batch_size  texts at a time; auto (default): as many tokens as evaluate.py takes
dtype       float32 (default), or bfloat16 by autocast
windows     how a long text is cut for its perplexity: harness (default: the last window is full) or evaluate
            (as evaluate.py does: it holds what is left). Both figures are logged
stride      how far that window moves, as in evaluate.py; 0 (default): disjoint windows
dataset     where a nanoGPT checkpoint's vocabulary is, if not in the dataset that it names
mechanism   the file of a mechanism of one's own that the checkpoint was made with
trust_code  True: run the copy of that file in the checkpoint's folder; nothing else that is read is run

It scores and generates with nanoheads/training/: the one module of hub/ that stands after that folder.
"""

import argparse
import logging
import math
import re
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path

import nanoheads.threads  # noqa: F401  before torch, whose threads it has wait briefly

import numpy as np
import torch
from tqdm import tqdm

from nanoheads.common import ROOT, UserError, last_words, pick_device
from nanoheads.configurator import near
from nanoheads.training import checkpoint, sampling, scoring

PROGRAM = "nanoheads.hub.harness"
try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as e:
    if __name__ != "__main__":
        raise
    sys.exit(f"{PROGRAM}: {e}; pip install 'lm_eval>=0.4.13'")

KEYS = "ckpt", "device", "batch_size", "dtype", "windows", "stride", "dataset", "mechanism", "trust_code"
SAMPLING = "temperature", "top_k", "top_p", "repetition_penalty"
logger = logging.getLogger("lm_eval.nanoheads")


def padded(rows, left=False):
    """int64 [B, T] of lists of ids, with zeros after each, or before it."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for to, row in zip(ids, rows):
        (to[len(to) - len(row):] if left else to[:len(row)]).copy_(torch.tensor(row))
    return ids


def until_any(text, ends):
    """The text (bytes) before the first of `ends`."""
    return text[:min((at for end in ends if (at := text.find(end)) >= 0), default=len(text))]


@register_model("nanoheads")
class NanoHeads(TemplateLM):
    """A checkpoint as the harness asks it, with the keys of --model_args. Raises UserError."""

    def __init__(self, ckpt=None, device="auto", batch_size="auto", dtype="float32", windows="harness",
                 stride=0, dataset=None, mechanism=None, trust_code=False, **unknown):
        super().__init__()
        for key in unknown:
            meant = near(key, KEYS)
            raise UserError(f"--model_args: unknown key {key}; "
                            + (f"did you mean {meant}?" if meant else f"there are {', '.join(KEYS)}"))
        if ckpt is None:
            raise UserError("--model_args must name a checkpoint or a run folder: ckpt=out/a")
        automatic = str(batch_size).startswith("auto")
        if not automatic and (not str(batch_size).isdecimal() or int(batch_size) < 1):
            raise UserError(f"batch_size={batch_size} must be auto or a positive number")
        if dtype not in ("float32", "bfloat16"):
            raise UserError(f"--model_args: dtype={dtype} must be float32 or bfloat16")
        if windows not in ("harness", "evaluate"):
            raise UserError(f"--model_args: windows={windows} must be harness or evaluate")
        if trust_code not in (True, False):
            raise UserError(f"--model_args: trust_code={trust_code} must be True or False")
        code = argparse.Namespace(mechanism=[str(mechanism)] if mechanism else [], trust_code=trust_code)
        checkpoint.allow_code(code, str(ckpt))
        self.path, self._device = str(ckpt), torch.device(pick_device(str(device)))
        self.model, self.tokenizer = sampling.model_and_tokenizer(self.path, self._device, dataset)
        self.max_length = self.model.config.block_size
        if type(stride) is not int or not 0 <= stride <= self.max_length:
            raise UserError(f"--model_args: stride={stride} must be from 1 to block_size={self.max_length} "
                            "(0: disjoint windows)")
        self.batch_size = None if automatic else int(batch_size)
        self.dtype, self.windows, self.stride = dtype, windows, stride or self.max_length

    @classmethod
    def create_from_arg_obj(cls, arg_dict, additional_config=None):
        """What the harness calls: --batch_size and --device give way to model_args, and so do their defaults,
        1 and cuda:0, to what there is.
        """
        more = {key: value for key, value in (additional_config or {}).items() if value is not None}
        if str(more.get("batch_size")) == "1":
            del more["batch_size"]
        if more.get("device") == "cuda:0" and not torch.cuda.is_available():
            del more["device"]
        return cls(**{**more, **arg_dict})

    def get_model_info(self):
        """What the harness writes into its results beside model_args."""
        return dict(model_num_parameters=self.model.num_params(), model_dtype=self.dtype,
                    block_size=self.max_length, windows=self.windows, stride=self.stride)

    def chat_template(self, chat_template=False):
        raise UserError(f"{self.path} has no chat template; leave --apply_chat_template out")

    # ---- text ----

    @property
    def eot_token_id(self):
        """The corpus separator, which stands for an empty context."""
        return self.tokenizer.separator

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        """The ids of a text, a list. UserError: a character that the vocabulary lacks."""
        try:
            return self.tokenizer.encode(string).tolist()
        except ValueError as e:
            shown = string if len(string) <= 60 else string[:60] + "…"
            raise UserError(f"{self.path} cannot read the request {shown!r}: {e}") from None

    def rows(self, width):
        """How many texts of `width` tokens go together: scoring.score()'s limits, unless batch_size says."""
        most = 4096 if self._device.type == "cpu" else 16384
        return self.batch_size or max(1, min(most, (1 << 26) // self.model.config.vocab_size) // width)

    def autocast(self):
        bfloat16 = self.dtype == "bfloat16"
        return torch.autocast(self._device.type, torch.bfloat16) if bfloat16 else nullcontext()

    # ---- scores ----

    @torch.no_grad()
    def nats_of_pieces(self, pieces, n, disable_tqdm=False):
        """(nats [n], whether each token was the likeliest [n]) of pieces (which of n, ids, scored) summed up.

        The last `scored` of at most block_size + 1 ids are scored, given those before them. Longest first;
        shorter ones are padded at their end, which no token before it sees.
        """
        nats, greedy = np.zeros(n), np.ones(n, bool)
        pieces = sorted((piece for piece in pieces if piece[2]), key=lambda piece: -len(piece[1]))
        bar = tqdm(total=len(pieces), desc="nanoheads: scoring", disable=disable_tqdm, mininterval=0.5)
        with bar, self.autocast():
            while pieces:
                rows = self.rows(len(pieces[0][1]))
                batch, pieces = pieces[:rows], pieces[rows:]
                ids = padded([ids for _, ids, _ in batch]).to(self._device)
                logits, targets = self.model(ids[:, :-1]).logits, ids[:, 1:]
                each = scoring.nats_of(logits, targets)
                likeliest = (logits.argmax(-1) == targets).cpu().numpy()
                for row, (which, ids, scored) in enumerate(batch):
                    place = slice(len(ids) - 1 - scored, len(ids) - 1)
                    nats[which] += each[row, place].sum()
                    greedy[which] &= likeliest[row, place].all()
                bar.update(len(batch))
        if not np.isfinite(nats).all():
            raise UserError(f"{self.path} gives {nats[~np.isfinite(nats)][0]} nats: "
                            "its weights are damaged, or its training diverged")
        return nats, greedy

    def loglikelihood(self, requests, disable_tqdm=False):
        """[(log-probability, whether it is the greedy one)] of requests (context, continuation)."""
        pairs = []
        for context, text in (request.args for request in requests):
            encoded = self._encode_pair(context, text) if context else ([], self.tok_encode(text))
            pairs.append(((context, text), *encoded))
        return self._loglikelihood_tokens(pairs, disable_tqdm)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """The same of requests (strings for the cache, context ids, continuation ids).

        What does not fit loses its beginning; a continuation beyond a window goes on in further ones.
        """
        T, pieces = self.max_length, []
        for i, (_, context, continuation) in enumerate(requests):
            ids = [*(context or [self.eot_token_id]), *continuation]
            for _, end, scored in scoring.windows(len(continuation), T, T):
                end += len(ids) - len(continuation)
                pieces.append((i, ids[max(0, end - T - 1):end], scored))
        nats, greedy = self.nats_of_pieces(pieces, len(requests), disable_tqdm)
        found = [(-float(one), bool(hit)) for one, hit in zip(nats, greedy)]
        for (args, *_), answer in zip(requests, found):
            self.cache_hook.add_partial("loglikelihood", args, answer)
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """[log-probability] of requests (text,): every token once, the first given the separator."""
        texts, T, pieces = [request.args[0] for request in requests], self.max_length, []
        for i, text in enumerate(texts):
            ids = [self.eot_token_id, *self.tok_encode(text)]
            *cuts, (start, end, scored) = scoring.windows(len(ids) - 1, T, self.stride)
            # the last window as it is, and reaching back as far as fits
            full = max(0, end - T)
            lasts = {start: 1, full: 2} if full < start else {start: 0}
            pieces += [(3 * i, ids[a:b + 1], c) for a, b, c in cuts]
            pieces += [(3 * i + kind, ids[first:end + 1], scored) for first, kind in lasts.items()]
        nats, _ = self.nats_of_pieces(pieces, 3 * len(texts), disable_tqdm)
        shared, *lasts = nats.reshape(-1, 3).T
        nats = dict(evaluate=shared + lasts[0], harness=shared + lasts[1])

        self.report(texts, nats)
        found = [-float(one) for one in nats[self.windows]]
        for text, answer in zip(texts, found):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answer)
        return found

    def report(self, texts, nats):
        """Log what both ways to cut windows give; nats: {way: of each text}."""
        size = sum(len(text.encode("utf-8", "replace")) for text in texts) or 1
        words = sum(len(re.split(r"\s+", text)) for text in texts)
        both = {way: f"{scoring.bits(each.sum(), size):.5f} bits/byte, word perplexity "
                     f"{math.exp(min(each.sum() / words, 700)):.6g}" for way, each in nats.items()}
        logger.info(f"{size:,} bytes, {words:,} words, windows of {self.max_length}, stride {self.stride}\n"
                    f"  windows=harness, the last one full:          {both['harness']}\n"
                    f"  windows=evaluate, the last one what is left: {both['evaluate']}\n"
                    f"  the table has windows={self.windows}")

    # ---- generation ----

    def sampling(self, given):
        """(most tokens, what ends a text, stream()'s settings) of a request's gen_kwargs. UserError."""
        kwargs = normalize_gen_kwargs(given, 256)
        until, most, sampled = (kwargs.pop(key) for key in ("until", "max_gen_toks", "do_sample"))
        settings = {key: kwargs.pop(key) for key in SAMPLING if key in kwargs}
        if kwargs.pop("num_beams", 1) != 1 or kwargs:
            key = min(kwargs, default="num_beams")
            raise UserError(f"gen_kwargs: nanoheads does not know {key}; there are until, max_gen_toks, "
                            f"do_sample, {', '.join(SAMPLING)}")
        if not sampled:
            settings["temperature"] = 0.0
        return max(0, most), tuple(end.encode() for end in until if end), tuple(sorted(settings.items()))

    def generate_until(self, requests, disable_tqdm=False):
        """[str]: what follows each context, up to the first of its `until`. ValueError: settings.

        A context loses its beginning, so that what follows fits beside it, but keeps half a window.
        """
        asked, T = [request.args for request in requests], self.max_length
        prompts = [self.tok_encode(context) or [self.eot_token_id] for context, _ in asked]
        found, same_settings = [""] * len(asked), {}
        for i, (_, given) in enumerate(asked):
            same_settings.setdefault(self.sampling(given), []).append(i)
        with tqdm(total=len(asked), desc="nanoheads: writing", disable=disable_tqdm) as bar:
            for (most, ends, settings), group in same_settings.items():
                keep = max(T - most, T // 2, 1)
                group.sort(key=lambda i: -len(prompts[i]))
                for at in range(0, len(group), self.rows(T)):
                    batch = group[at:at + self.rows(T)]
                    texts = self.write([prompts[i][-keep:] for i in batch], most, ends, dict(settings))
                    for i, text in zip(batch, texts):
                        found[i] = text
                        self.cache_hook.add_partial("generate_until", asked[i], text)
                    bar.update(len(batch))
        return found

    def write(self, prompts, most, ends, settings):
        """[str]: continuations of lists of ids, in one batch, each up to the first of `ends` (bytes)."""
        newline = self.tokenizer.encoding in ("byte", "char")  # as the separator: it ends no text
        stop = None if newline else self.eot_token_id
        texts, unfinished = [b""] * len(prompts), set(range(len(prompts)))

        def add(tokens):
            for row in list(unfinished):
                token = tokens[row]
                new = self.tokenizer.decode_bytes(sampling.until_stop([token], self.tokenizer, stop))
                texts[row] += new
                if token == stop or any(end in texts[row][-len(end + new):] for end in ends):
                    unfinished.discard(row)
            return not unfinished

        idx, lengths = padded(prompts, left=True).to(self._device), [len(ids) for ids in prompts]
        with self.autocast():
            sampling.write(self.model, idx, most, on_step=add, lengths=lengths, **settings)
        return [until_any(text, ends).decode("utf-8", "replace") for text in texts]


def lacking(e):
    """What a task lacks, in one line, by the exception that ended its loading: a package, or its data."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(e.__traceback__)]
    task = ["a task", *(f"{file.parent.name}/{file.name}" for file in files if "tasks" in file.parts)][-1]
    why = " ".join(str(e).split())
    if isinstance(e, ImportError):
        return f"{task}: {why}; it needs what is not installed here, or another version of it"
    return f"{why}; a task's data come from the hub: it must be reached once, then they are in its cache"


def main():
    """lm_eval's command line. Its tasks find other modules before ours."""
    sys.path[:] = [*(path for path in sys.path if Path(path or ".").resolve() != ROOT), str(ROOT)]
    with last_words(PROGRAM):
        try:
            cli_evaluate()
        except (ImportError, ConnectionError) as e:
            raise UserError(lacking(e)) from None


if __name__ == "__main__":
    main()
