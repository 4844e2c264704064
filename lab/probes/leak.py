"""
Does a function from token ids to logits look ahead? It needs no checkpoint and nothing of this repository.

    python -m lab.probe leak --module file.py:function [--vocab 256] [--length 32] [--batch 3] [--device cpu]

function(ids [B, T] int64) -> logits [B, T, V], or what holds them as .logits; positions count from 0.

ahead     tokens behind a position are changed, one by one and all at once: its logits stay
rows      all other rows of the batch are changed: the logits of a row stay
prefixes  tokens are cut off at the end: the logits before stay

Each is tried with several random texts. What stays is compared to a tolerance: four times what the same call
again changes, or 32 epsilon of the largest logit (at most 1 % of it), whichever is more. Other shapes have
other kernels: prefixes may differ by four times what a row alone differs from it in its batch.
Exits with 1 where it leaks. A leak that takes rare tokens, or is smaller than the tolerance, is not found.
"""

import importlib.util
import inspect
import sys
from functools import partial
from pathlib import Path

import torch

from nanoheads.causality import Perturbation, largest_differences, two_texts
from nanoheads.common import UserError, as_program, pick_device, writable, write_json
from nanoheads.configurator import describe_failure
from lab.probes.shared import parser_of, positive


def function_of(name):
    """The function that file.py:function names. UserError."""
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not file or not attribute.isidentifier():
        raise UserError(f"--module={name}: name a file and a function in it, file.py:function")
    if not path.is_file():
        raise UserError(f"--module={name}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"leak_of_{path.stem}", path)
    if spec is None:
        raise UserError(f"--module={name}: {file} is no Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # where it looks for files of its own
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # whatever a file of one's own may do
        raise UserError(f"--module={name}: {file}, {describe_failure(e, path)}") from None
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(f"--module={name}: {file} has no function {attribute}; "
                        f"it has {', '.join(names) or 'none'}")
    return function


class Logits:
    """A function that is asked for logits: no gradient, every answer checked."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    @torch.no_grad()
    def __call__(self, ids, seed=1):
        """Logits [B, T, V]. UserError: another shape, NaN, an exception."""
        torch.manual_seed(seed)
        self.calls += 1
        try:
            logits = self.function(ids.clone())  # a function may write into what it is given
        except (Exception, SystemExit) as e:
            raise UserError(f"the function fails on ids of {[*ids.shape]}: {type(e).__name__}: "
                            f"{' '.join(str(e).split())[:200]}") from None
        logits = getattr(logits, "logits", logits)
        if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
            raise UserError(f"the function returns {type(logits).__name__}, which is no tensor of logits")
        if logits.dim() != 3 or logits.shape[:2] != ids.shape:
            raise UserError(f"the function returns {[*logits.shape]} for ids of {[*ids.shape]}, "
                            "which must be [B, T, V]")
        if (bad := logits.isnan().any(2)).any():
            row, position = bad.nonzero()[0].tolist()
            raise UserError(f"the logits are NaN at row {row}, position {position}")
        return logits.clone()  # and one that it returns again


def texts(vocab, draws, batch, length, device):
    """Random ids [draws, batch, length], and as many others that differ from them at every place."""
    pair = two_texts(vocab, (draws, batch, length), torch.Generator().manual_seed(1))
    return [ids.to(device) for ids in pair]


class Leaks(Perturbation):
    """The checks of one function on one text and another that differs everywhere, [B, T] each."""

    def __init__(self, ask, ids, other_ids, tolerance=None):
        super().__init__(ask, ids, other_ids)
        rounding = min(32 * torch.finfo(self.outputs.dtype).eps, 0.01)
        self.allow_for_noise(rounding, [ask, partial(ask, seed=2)], "turn dropout and sampling off")
        self.has_fixed_tolerance = tolerance is not None
        if self.has_fixed_tolerance:
            self.tolerance = tolerance

    def first_ahead(self):
        """The Ahead of the first position that reads a later token; None.

        Of the tokens that it reads the first one, where one alone is enough; else the last from which on.
        """
        rows, T = self.ids.shape

        def rank(ahead):
            return ahead.position, ahead.all_after, -ahead.token if ahead.all_after else ahead.token

        return min(self.find_ahead([[token] * rows for token in range(1, T)]), default=None, key=rank)

    def shape_tolerance(self):
        """The tolerance between other shapes, once rows are known to be apart."""
        if self.has_fixed_tolerance:
            return self.tolerance
        alone = largest_differences(self.ask(self.ids[:1]), self.outputs[:1]).max().item()
        return max(self.tolerance, 4 * alone)

    def prefixes(self):
        """A sentence about the first position that changes when tokens are cut off at the end; None."""
        T, tolerance = self.ids.size(1), self.shape_tolerance()
        for cut in sorted({1, 3, T // 2}):
            if cut < T:
                differences = largest_differences(self.ask(self.ids[:, :-cut]), self.outputs[:, :-cut])
                is_changed = differences.amax(0) > tolerance
                if is_changed.any():
                    position = int(is_changed.nonzero()[0])
                    last = "token is" if cut == 1 else f"{cut} tokens are"
                    return f"position {position} changes when the last {last} cut off"


# ---- all of them ----

def find_leak(text):
    """(the first leak of one text in words or None, {what was not tried: why}), from its Leaks."""
    skipped = {}
    if ahead := text.first_ahead():
        return str(ahead), skipped
    if len(text.ids) == 1:
        skipped["rows"] = "there is one row alone, --batch"
    elif mixed_rows := text.find_mixed_rows():
        return mixed_rows, skipped
    try:
        return text.prefixes(), skipped
    except UserError as e:  # one that takes a single length
        return None, dict(skipped, prefixes=str(e))


def leaks(function, vocab=256, length=32, batch=3, draws=3, device="cpu", tolerance=None):
    """(the first leak in words or None, {what was not tried: why}, calls, the largest difference in what
    stayed).

    UserError: the function cannot be probed.
    """
    if vocab < 2 or length < 2:
        raise UserError(f"vocab={vocab} and length={length} must be at least 2: else nothing can change")
    if tolerance is not None and not tolerance >= 0:
        raise UserError(f"tolerance={tolerance} must be 0 or more")
    ask, largest_difference = Logits(function), 0.0
    for ids, other_ids in zip(*texts(vocab, draws, batch, length, device)):
        text = Leaks(ask, ids, other_ids, tolerance)
        leak, skipped = find_leak(text)
        largest_difference = max(largest_difference, text.largest_difference)
        if leak:
            break
    return leak, skipped, ask.calls, largest_difference


@as_program("probe.py leak")
def main(argv):
    """python -m lab.probe leak: the first leak that is found; exits with 1 where there is one."""
    parser = parser_of("leak", __doc__)
    parser.add_argument("--module", required=True, metavar="FILE.py:FUNCTION", help="what is probed")
    parser.add_argument("--vocab", type=positive, default=256, help="ids are below this (default: 256)")
    parser.add_argument("--length", type=positive, default=32, help="tokens in a row (default: 32)")
    parser.add_argument("--batch", type=positive, default=3, help="rows (default: 3)")
    parser.add_argument("--draws", type=positive, default=3, help="random texts (default: 3)")
    parser.add_argument("--device", default="cpu", help="cpu | cuda | mps | auto (default: cpu)")
    parser.add_argument("--tolerance", type=float, help="in place of the estimated one; 0: bit for bit")
    parser.add_argument("--json", help="write what was found to this file, a leak too")
    args = parser.parse_args(argv)
    out = writable(args.json) if args.json else None
    function, device = function_of(args.module), pick_device(args.device)
    leak, skipped, calls, largest_difference = leaks(function, args.vocab, args.length, args.batch,
                                                     args.draws, device, args.tolerance)
    if out:
        write_json(out, dict(module=args.module, leak=leak, calls=calls,
                             largest_difference=largest_difference, not_tried=skipped))
    if leak:
        raise UserError(leak)
    same = "bit for bit" if largest_difference == 0 else f"to {largest_difference:.1e}"
    print(f"no leak found in {calls} calls; what was to stay stayed {same} (ahead, rows)")
    for name, reason in skipped.items():
        print(f"{name} not tried: {reason}")
