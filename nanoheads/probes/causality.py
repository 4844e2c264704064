"""
Does what a function computes of a token change with later tokens, or with other rows of the batch?

The function is asked again with other tokens in some places, and what should have stayed is compared. So do
`train.py --check` (promises.py: small models, in float64), each run of a study (lookahead.py: at the size of
the run) and `probe.py leak` (leak.py: any function). They differ in what they ask, in the positions that they
change, and in what may differ by rounding.
"""

from typing import NamedTuple

import torch


def two_texts(vocab_size, shape, generator):
    """Random ids, and others that differ from them at every place, where there is a second token."""
    ids = torch.randint(vocab_size, shape, generator=generator)
    other = (ids + torch.randint(1, max(2, vocab_size), shape, generator=generator)) % vocab_size
    return ids, other


def apart(a, b):
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
    """ask(ids [B, T]) -> [B, T, C], what is computed of each token, and the same after a change of some ids.

    other [B, T]: what the ids are changed to. before: what was computed of `ids`. A difference of more than
    `tolerance`, or a NaN that was none, is a change; most: the largest difference so far that is none.
    """

    def __init__(self, ask, ids, other, before, tolerance):
        self.ask, self.ids, self.other, self.before = ask, ids, other, before
        self.tolerance, self.most = tolerance, 0.0

    def changed(self, ids, stays):
        """Where something changes with these ids although it stays(bool [B, T]), bool [B, T]."""
        found = apart(self.ask(ids), self.before)
        small = found <= self.tolerance
        self.most = max(self.most, torch.where(small & stays, found, 0.0).max().item())
        return stays & ~small

    def ahead(self, positions):
        """Yield an Ahead of each batch in which something changes with a later token: of its first position.

        positions: for each batch the token of each row that is changed, [B]; T: none. First each alone, then
        each with all that come after it.
        """
        T = self.ids.size(1)
        place = torch.arange(T, device=self.ids.device)
        for all_after in (False, True):
            for tokens in positions:
                at = torch.tensor(tokens, device=self.ids.device)[:, None]
                ids = torch.where(place >= at if all_after else place == at, self.other, self.ids)
                wrong = self.changed(ids, place < at)
                if wrong.any():
                    position = int(wrong.any(0).nonzero()[0])
                    yield Ahead(position, tokens[int(wrong[:, position].nonzero()[0])], all_after)

    def rows(self):
        """A sentence about the first row of the batch that another one changes; None.

        By the digits of their numbers in base two, any two rows are kept and changed once: few batches do.
        """
        rows = len(self.ids)
        number = torch.arange(rows, device=self.ids.device)
        for bit in range((rows - 1).bit_length()):
            for digit in (0, 1):
                kept = ((number >> bit & 1) == digit)[:, None]
                wrong = self.changed(torch.where(kept, self.ids, self.other), kept)
                if wrong.any():
                    found = self.changed_by_one() or (int(wrong.any(1).nonzero()[0]),
                                                      f"{int((~kept).sum())} others together")
                    return "row {} of a batch changes with {}".format(*found)

    def changed_by_one(self):
        """(the first row that changes with a single other one, that row in words); None."""
        number, pairs = torch.arange(len(self.ids), device=self.ids.device)[:, None], []
        for row in range(len(self.ids)):
            wrong = self.changed(torch.where(number == row, self.other, self.ids), number != row)
            pairs += [(each, row) for each in wrong.any(1).nonzero().flatten().tolist()]
        return (min(pairs)[0], f"row {min(pairs)[1]}") if pairs else None
