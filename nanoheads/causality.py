"""
Checks that what is computed of a token does not depend on later tokens or on other rows of the batch.

The first half asks any function from token ids: the function is asked again with other tokens in some places,
and what should have stayed is compared. The second half asks a GPT so, at the size at which it is trained and
scored. train.py does with a mechanism that is not in TRIED, before it trains it. A study does with each of
its runs, with the new model and with the trained one before its score is used. `train.py --check`
(nanoheads/promises.py: small models, in float64) and `lab/probe.py leak` (any function) ask the same. They
differ in what they ask, in the positions that they change, and in what may differ by rounding.

rows    the other rows of a batch become others: what is computed of a row stays
causal  token p becomes another, alone and with all behind it, a position to a row: what is before p stays

and of a run whose rows hold several documents (documents_packed):

documents  the first half of each row, which is a document, becomes another: the other half stays

A GPT's batches have the run's block_size; in training mode its batch_size, in evaluation mode as many rows as
are scored at once; the run's dtype, and float32, in which is scored. What is compared are the final hidden
states, of which each token's logits are a function. All is asked twice to know the noise. Computed in the
same shapes, on a CPU all mechanisms of model.py give what is to stay bit for bit, also in bfloat16. A GPU may
round otherwise where shapes depend on the data, so the tolerance is four times the noise, or a part of the
largest hidden state, whichever is more: 32 epsilon in float32 (4e-6), 4 epsilon in what has fewer digits
(TF32 and float16 0.4 %, bfloat16 3 %).
"""

import copy
from typing import NamedTuple

import torch

from nanoheads.common import UserError
from nanoheads.optim import precision, seed_step
from nanoheads.scoring import rows_at_once


# ---- any function ----

def two_texts(vocab_size, shape, generator):
    """Random ids, and others that differ from them at every place, where there is a second token."""
    ids = torch.randint(vocab_size, shape, generator=generator)
    other_ids = (ids + torch.randint(1, max(2, vocab_size), shape, generator=generator)) % vocab_size
    return ids, other_ids


def largest_differences(a, b):
    """The largest difference at each token of a and b [B, T, C]: [B, T]. Two infinities of one sign are the
    same, and so are two NaN.
    """
    same = (a == b) | a.isnan() & b.isnan()
    return torch.where(same, 0.0, (a - b).abs()).amax(-1)


class Ahead(NamedTuple):
    """A position that changes with a later token, by itself or (all_after) with all that come after that."""
    position: int
    token: int
    all_after: bool

    def __str__(self):
        what = f"the tokens from {self.token} on" if self.all_after else f"the token at {self.token}"
        return f"position {self.position} changes with {what}"


class Perturbation:
    """What ask(ids [B, T]) -> [B, T, C] computes of each token, before and after some ids are changed.

    outputs: what it computes of the unchanged ids. other_ids [B, T]: what ids are changed to. A difference of
    more than `tolerance` is a change, and so is a NaN that was none; largest_difference is the largest one
    that counts as none.
    """

    def __init__(self, ask, ids, other_ids, tolerance=0.0):
        self.ask, self.ids, self.other_ids, self.outputs = ask, ids, other_ids, ask(ids)
        self.tolerance, self.largest_difference = tolerance, 0.0

    def allow_for_noise(self, rounding, again, remedy):
        """Set the tolerance: four times what changes when the functions `again` read the same ids, or a part,
        `rounding`, of the largest number, whichever is more.

        UserError, which ends with the remedy, where 1 % of that number changes.
        """
        noise = max(largest_differences(ask(self.ids), self.outputs).max().item() for ask in again)
        size = self.outputs[~self.outputs.isinf()].abs()
        size = size.max().item() if size.numel() else 1.0
        if not noise <= 0.01 * size:  # nor where it is NaN
            raise UserError(f"the same tokens give other results when they are read again: they differ by "
                            f"{noise:.1e} (the largest is {size:.1e}); {remedy}")
        self.tolerance = max(4 * noise, rounding * size)

    def changes(self, ids, stays):
        """Where what should stay does not with these ids, bool [B, T]. stays, bool [B, T]: what should."""
        difference = largest_differences(self.ask(ids), self.outputs)
        small = difference <= self.tolerance
        allowed_difference = torch.where(small & stays, difference, 0.0).max().item()
        self.largest_difference = max(self.largest_difference, allowed_difference)
        return stays & ~small

    def find_ahead(self, positions):
        """Change tokens; yield the Ahead of the first position, for each batch in which one looks ahead.

        positions: for each batch, which token is changed in each row, [B]; T: none. All batches are tried
        twice: the token is changed alone, then with all that come after it.
        """
        T = self.ids.size(1)
        place = torch.arange(T, device=self.ids.device)
        for all_after in (False, True):
            for tokens in positions:
                token = torch.tensor(tokens, device=self.ids.device)[:, None]
                ids = torch.where(place >= token if all_after else place == token, self.other_ids, self.ids)
                is_changed = self.changes(ids, place < token)
                if is_changed.any():
                    position = int(is_changed.any(0).nonzero()[0])
                    yield Ahead(position, tokens[int(is_changed[:, position].nonzero()[0])], all_after)

    def find_mixed_rows(self):
        """A sentence about a row of the batch that other ones change; None.

        Rows are changed by the digits of their numbers in base two. So a few batches suffice for every row to
        be kept while any given other one is changed.
        """
        rows = len(self.ids)
        number = torch.arange(rows, device=self.ids.device)
        for bit in range((rows - 1).bit_length()):
            for digit in (0, 1):
                is_kept = ((number >> bit & 1) == digit)[:, None]
                is_changed = self.changes(torch.where(is_kept, self.ids, self.other_ids), is_kept)
                if is_changed.any():
                    return f"row {int(is_changed.any(1).nonzero()[0])} of a batch changes with other rows"


# ---- a GPT at its size ----

BATCHES = 8  # of positions: so many are tried, or all that there are, or those that have to be


class Mode(NamedTuple):
    """One way in which a model is asked."""
    training: bool
    rows: int            # of a batch
    dtype: str           # float32 | bfloat16 | float16
    scores: bool = False  # whether constraint heads give their scores, as in training on labels

    def __str__(self):
        how = "in training" if self.training else "when evaluated"
        return f"{how}, {self.rows} row{'s' * (self.rows > 1)}, {self.dtype}"


# ---- asking ----

class HiddenStates:
    """A copy of a GPT that is asked in one Mode, each time with the same noise and the same buffers.

    positions [B, T]: those of rows that hold several documents; None: a row is one text.
    """

    def __init__(self, model, mode, positions=None):
        self.model, self.mode, self.positions = model, mode, positions
        self.kind = next(model.parameters()).device.type
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def __call__(self, ids):
        """The final hidden states of ids [B, T], in float32, [B, T, C]."""
        with torch.no_grad():  # a forward pass in training may change what it keeps
            for name, buffer in self.model.named_buffers():
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])
        mode, model = self.mode, self.model.train(self.mode.training)
        seed_step(self.kind, "look ahead")
        # in training as where gradients are made: elsewhere other kernels are used, and a mechanism may ask
        with torch.set_grad_enabled(mode.training), precision(mode.dtype, self.kind)[1]:
            scores = mode.training and mode.scores
            x = model.run_blocks(ids, wants_losses=mode.training, wants_predictions=scores,
                                 positions=self.positions)[0]
        return x.detach().float()


def rounding_of(dtype, device):
    """The part of the largest number that rounding may change, see above. dtype: of matrix products."""
    if dtype == "float32" and device.type != "cuda":
        return 32 * torch.finfo(torch.float32).eps
    # on a GPU products in float32 are TF32's, of float16's digits
    return 4 * torch.finfo(torch.float16 if dtype == "float32" else getattr(torch, dtype)).eps


def positions_of(T, rows, generator):
    """The tokens to change, in order: the second, the last, around powers of two, and random ones.

    All of 1 to T - 1 where BATCHES of so many rows hold them. Before the first token there is nothing.
    """
    near = {2**k + d for k in range(T.bit_length()) for d in (-1, 0, 1)} | {T - 1}
    chosen = sorted(p for p in near if 1 <= p < T)
    others = [p for p in torch.randperm(T, generator=generator).tolist() if p and p not in near]
    batches = max(BATCHES, -(-len(chosen) // rows))
    return sorted(chosen + others[:batches * rows - len(chosen)])


def perturbation_of(model, mode, of_documents=None):
    """(the Perturbation of a model in one Mode, on random tokens; the positions to change). UserError.

    of_documents [B, T]: positions of documents in rows, for HiddenStates.
    """
    c, device = model.config, next(model.parameters()).device
    ask, generator = HiddenStates(model, mode, of_documents), torch.Generator().manual_seed(1)
    ids, other_ids = two_texts(c.vocab_size, (mode.rows, c.block_size), generator)
    positions = positions_of(c.block_size, mode.rows, generator)
    perturbation = Perturbation(ask, ids.to(device), other_ids.to(device))
    perturbation.allow_for_noise(
        rounding_of(mode.dtype, device), [ask],
        f"what is random must be PyTorch's, and nothing may be kept from one batch for the next ({mode})")
    return perturbation, positions


def describe_leak(perturbation, positions):
    """A sentence about rows that are mixed, or about a position that looks ahead; None.

    A batch changes a position in each of its rows.
    """
    if mixed_rows := perturbation.find_mixed_rows():
        return mixed_rows
    rows, T = perturbation.ids.shape
    batches = [positions[i:i + rows] for i in range(0, len(positions), rows)]
    batches = [batch + [T] * (rows - len(batch)) for batch in batches]
    ahead = next(perturbation.find_ahead(batches), None)
    return ahead and f"it looks ahead: {ahead}"


def describe_crossing(model, mode):
    """A sentence about a document that another one in its row changes; None."""
    device, T = next(model.parameters()).device, model.config.block_size
    column = torch.arange(T, device=device)
    positions = torch.where(column < T // 2, column, column - T // 2).expand(mode.rows, -1)
    perturbation, _ = perturbation_of(model, mode, positions)
    ids = torch.where(column < T // 2, perturbation.other_ids, perturbation.ids)
    if perturbation.changes(ids, (column >= T // 2).expand_as(ids)).any():
        return (f"a document changes with the one before it in its row ({mode}; leave documents_packed out, "
                "or see begins in docs/your-own-mechanism.md)")


# ---- a model ----

# The classes of model.py and rivals.py of which tests/core/mechanisms/test_promises.py shows, in all modes,
# that none looks ahead or mixes rows. Others, in a file of one's own or new in model.py, are tried before
# they are trained
TRIED = [
    "ShortConv", "ValueResidual", "ValueEmbedding", "QueryGain", "SSMax", "KeyOffset", "XSA",
    "HeadNorm", "HeadMix", "Routing", "Sentinel", "Agency", "ScoreCap", "A2C", "Roles", "Alibi",
    "RelativeBias", "FoX", "PairedHeads", "Diff", "DiffV1", "OutputGate", "ConstraintHeads", "ACAG",
    "Sink", "DepthAttention", "MUDD", "StreamScalars", "UNet", "Window"]


def untried_classes(config):
    """The classes of the mechanisms that a GPTConfig turns on and no test has TRIED."""
    return [cls for cls in config.mechanisms() if cls.__name__ not in TRIED or cls.__module__ not in (
        "model", "nanoheads.rivals")]


@torch.no_grad()
def with_noise(model):
    """A copy of a model with noise on each of its parameters, so that nothing is hidden behind a zero.

    As it is, where its results would not be finite.
    """
    noisy_model, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    for p in noisy_model.parameters():
        size = 0.15 if p.dim() < 2 else p.size(-1) ** -0.5
        p.add_((size * torch.randn(p.shape, generator=generator)).to(p))
    ids = torch.arange(model.config.block_size, device=p.device)[None] % model.config.vocab_size
    return noisy_model if noisy_model.eval().hidden(ids).isfinite().all() else copy.deepcopy(model)


def modes_of(model, batch_size, dtype="float32", scores=False):
    """The Modes in which a model is trained and evaluated. dtype: see precision()."""
    device, c = next(model.parameters()).device, model.config
    rows, _ = rows_at_once(device, c.block_size, c.vocab_size)
    dtypes = dict.fromkeys((precision(dtype, device.type)[0], "float32"))
    return [Mode(training, rows if not training else batch_size, name, scores)
            for training in (True, False) for name in dtypes]


def leak_in(model, modes, step=None, of_documents=False):
    """(what is wrong, in a sentence, or None; how many positions were changed in each of the modes).

    step: the number of the training step whose settings hold in training; None: as they are. of_documents:
    rows hold several documents in training. The model, its mode, its gradients and PyTorch's generators stay
    as they are. UserError: it cannot be asked.
    """
    counts, device = [], next(model.parameters()).device
    # generators are seeded within, and then are as before: PyTorch's on the CPU, and on this CUDA device
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        for mode in modes:
            # no gradient is made, nor memory taken for it
            model_copy = copy.deepcopy(model).requires_grad_(False)
            if mode.training and step is not None:
                model_copy.at_step(step)
            perturbation, positions = perturbation_of(model_copy, mode)
            if leak := describe_leak(perturbation, positions):
                return f"{leak} ({mode}, a block of {model.config.block_size})", counts
            if of_documents and mode.training and (leak := describe_crossing(model_copy, mode)):
                return leak, counts
            counts.append(len(positions))
    return None, counts


def refuse(model, config, when, step=None):
    """What was tried of a run's model, in words. UserError where it looks ahead or mixes rows.

    config: the run's TrainConfig. when: before or after training, for the message. step: see leak_in().
    """
    modes = modes_of(model, config.batch_size, config.dtype, bool(config.labels or config.teacher))
    leak, counts = leak_in(model, modes, step, bool(config.documents_packed))
    if leak:
        raise UserError(f"{when} {leak}: its score would mean nothing")
    return describe_trial(model, modes, counts)


def describe_trial(model, modes, counts):
    """What was tried, in words: the modes in training have the same rows, and so have those in evaluation."""
    of_mode = {mode.training: (count, mode.rows) for mode, count in zip(modes, counts)}
    parts = ["{} positions in {} rows {}".format(*of_mode[training], how)
             for training, how in ((True, "in training"), (False, "in evaluation"))]
    dtypes = " and ".join(dict.fromkeys(mode.dtype for mode in modes))
    return f"{', '.join(parts)}, of a block of {model.config.block_size}, in {dtypes}"
