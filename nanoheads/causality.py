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
    """What ask(ids [B, T]) -> [B, T, C] computes of each token, before and after some ids are changed.

    before: what was computed of `ids`. other [B, T]: what they are changed to. A difference of more than
    `tolerance` is a change, and so is a NaN that was none; `most` is the largest difference that is none.
    """

    def __init__(self, ask, ids, other, before, tolerance):
        self.ask, self.ids, self.other, self.before = ask, ids, other, before
        self.tolerance, self.most = tolerance, 0.0

    def changed(self, ids, stays):
        """Where what should stay does not with these ids, bool [B, T]. stays, bool [B, T]: what should."""
        found = apart(self.ask(ids), self.before)
        small = found <= self.tolerance
        self.most = max(self.most, torch.where(small & stays, found, 0.0).max().item())
        return stays & ~small

    def ahead(self, positions):
        """Change tokens; yield the Ahead of the first position, for each batch in which one looks ahead.

        positions: for each batch, which token is changed in each row, [B]; T: none. All batches are tried
        twice: the token is changed alone, then with all that come after it.
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

        Rows are changed by the digits of their numbers in base two. So a few batches suffice for every row to
        be kept while any given other one is changed.
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
        """(the first row that changes with a single other one, the other one in words); None."""
        number, pairs = torch.arange(len(self.ids), device=self.ids.device)[:, None], []
        for row in range(len(self.ids)):
            wrong = self.changed(torch.where(number == row, self.other, self.ids), number != row)
            pairs += [(each, row) for each in wrong.any(1).nonzero().flatten().tolist()]
        return (min(pairs)[0], f"row {min(pairs)[1]}") if pairs else None
