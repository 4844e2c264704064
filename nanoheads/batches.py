"""The batches that training reads: each follows from (seed, step) alone, so a resumed run reads the same."""

import math
from bisect import bisect
from functools import lru_cache

import numpy as np
import torch

from nanoheads.common import UserError, plural

REOPEN_AFTER = 64 << 20  # bytes read through one mapping before it is dropped: resident memory stays bounded


class Reader:
    """Reads pieces of a split through one mapping, dropped now and then."""

    def __init__(self, dataset, split):
        self.dataset = dataset
        self.split = split
        self.open()

    def open(self):
        """Map the split anew: what was read through the mapping before is no longer in memory."""
        data = self.dataset.tokens(self.split)
        self.data = np.asarray(data) if isinstance(data, np.memmap) else data  # which is slow to cut
        self.bytes_read = 0

    def cut(self, starts, ends):
        """The tokens from each start to its end, as a list."""
        # the kernel maps 64 KiB around each fault
        size = self.dataset.dtype.itemsize
        self.bytes_read += sum(max((end - start) * size, 1 << 16) for start, end in zip(starts, ends))
        if self.bytes_read > REOPEN_AFTER:
            self.open()
        return [self.data[start:end] for start, end in zip(starts, ends)]

    def check_ids(self, ids):
        """ids as they are. UserError where one is outside the vocabulary."""
        if ids.max() >= self.dataset.vocab_size:  # on a gpu this would be an assertion somewhere in a kernel
            raise UserError(f"{self.dataset.name_of(self.split)} holds the token {ids.max()}, "
                            f"and the vocabulary ends at {self.dataset.vocab_size - 1}; "
                            "run its prepare script with --force")
        return ids


class Batches(Reader):
    """Training batches as a function of (seed, step) alone: resuming needs no state, and ranks need no talk.

    The split is cut into pieces of block_size tokens and passed over in shuffled order, each pass with its
    own shuffle and its own offset of the cuts. A batch is `rows` pieces, each with the token after it.
    """

    def __init__(self, dataset, split, block_size, rows, seed):
        dataset.need(split, 2 * block_size, block_size)
        super().__init__(dataset, split)
        self.block_size = block_size
        self.rows = rows
        self.seed = seed
        # one less than fit, so that every offset below block_size does
        self.pieces = len(self.data) // block_size - 1
        self.one_pass = lru_cache(maxsize=2)(self.one_pass)

    def one_pass(self, number):
        """Offset of the cuts and order of the pieces, uint32 [pieces], in pass `number`."""
        rng = np.random.default_rng([self.seed, number])
        offset, order = int(rng.integers(self.block_size)), np.arange(self.pieces, dtype=np.uint32)
        rng.shuffle(order)
        return offset, order

    def starts(self, step, rank=0, world=1):
        """First token of each of this rank's rows of the batch at `step`, as a list."""
        rows = np.arange(step * self.rows + rank, (step + 1) * self.rows, world)
        number, place = np.divmod(rows, self.pieces)  # pass, place in it: a batch may reach into the next
        starts = []
        for n in range(number[0], number[-1] + 1) if len(rows) else ():
            offset, order = self.one_pass(n)
            starts += (offset + order[place[number == n]].astype(np.int64) * self.block_size).tolist()
        return starts

    def __call__(self, step, rank=0, world=1):
        """This rank's rows of the batch at `step`, int64 [rows / world, T + 1]: inputs, shifted targets."""
        starts = self.starts(step, rank, world)
        ids = self.check_ids(np.stack(self.cut(starts, [s + self.block_size + 1 for s in starts])))
        return torch.from_numpy(ids.astype(np.int64))

    def n_scored(self, step):
        """Tokens of the batch at `step` that are scored, over all ranks; None: all, in each of its rows."""

    def tokens(self, step):
        """Tokens scored in the steps before `step`."""
        return step * self.rows * self.block_size


class DocumentBatches(Reader):
    """Training batches of documents, a function of (seed, step) alone, like those of Batches.

    A row is a document by itself, of `shortest` to block_size tokens: those before it are not there, but for
    the separator that its first token is predicted from. Shorter documents are left out. A longer one is cut
    evenly into several rows, whose length each pass draws anew, so that lengths mix; a row that goes on in a
    document begins with the token before it. What a row lacks of the longest in its batch is padding behind
    it, which no token before sees.

    Each pass has an order of its own. Rows of similar length come together: POOL batches in a row are sorted
    by length, then batches are shuffled. What a pass has left over beyond whole batches is left out.

    few_widths: a batch is as wide as one of few widths, half an octave from each other, for a model that is
    compiled for each; else a multiple of eight, which kernels like.
    """

    POOL = 64

    def __init__(self, dataset, split, block_size, rows, seed, shortest, few_widths=False):
        super().__init__(dataset, split)
        widths = np.arange(8, block_size + 8, 8)
        if few_widths:
            octaves = math.log2(block_size / shortest)
            widths = 8 * np.ceil(block_size * 2 ** (-np.arange(2 * octaves + 1) / 2) / 8)
        self.widths = np.unique(np.minimum(widths, block_size)).astype(int)
        self.block_size, self.rows, self.seed, self.shortest = block_size, rows, seed, shortest
        cuts = dataset.documents(split)
        size = np.diff(cuts)
        self.n_documents = len(size)
        self.first, self.size = cuts[:-1][size >= shortest], size[size >= shortest]
        fewest = self.fewest_rows()
        if fewest < rows:
            raise UserError(f"{dataset.name_of(split)} has {fewest:,} rows of documents of at least "
                            f"{plural(shortest, 'token')}: fewer than the {rows:,} of a batch")
        self.ends = []  # of each pass so far, the steps and the tokens to its end
        self.one_pass = lru_cache(maxsize=2)(self.one_pass)

    def fewest_rows(self):
        """How many rows a pass has at least."""
        return int((-(-self.size // self.block_size)).sum())

    def even_parts(self, rng):
        """(first token, length) of documents, and of the parts of those that are longer than a row, [n]."""
        T = self.block_size
        low, high = math.log(min(2 * self.shortest, T)), math.log(T)  # even parts may be half as long
        target = np.exp(low + (high - low) * rng.random(len(self.size)))
        parts = np.where(self.size > T, np.ceil(self.size / target), 1).astype(np.int64)
        document = np.repeat(np.arange(len(parts)), parts)
        part = np.arange(len(document)) - np.repeat(parts.cumsum() - parts, parts)
        size, parts = self.size[document], parts[document]
        start, end = size * part // parts, size * (part + 1) // parts
        return self.first[document] + start, end - start

    def one_pass(self, number):
        """(first token, length) of each row in pass `number`, int64 [steps, rows] each."""
        rng = np.random.default_rng([self.seed, number])
        first, length = self.even_parts(rng)
        steps = len(first) // self.rows
        order = rng.permutation(len(first))[:steps * self.rows]
        pool = np.arange(len(order)) // (self.POOL * self.rows)
        order = order[np.lexsort((length[order], pool))].reshape(steps, self.rows)
        order = order[rng.permutation(steps)]
        return first[order], length[order]

    def place(self, step):
        """(pass, step within it) of a step."""
        while not self.ends or self.ends[-1][0] <= step:
            _, length = self.one_pass(len(self.ends))
            steps, tokens = self.ends[-1] if self.ends else (0, 0)
            self.ends.append((steps + len(length), tokens + int(length.sum())))
        number = bisect([steps for steps, _ in self.ends], step)
        return number, step - (self.ends[number - 1][0] if number else 0)

    def width(self, length):
        """Columns of a batch whose rows have these lengths."""
        return int(self.widths[np.searchsorted(self.widths, length.max())])

    def __call__(self, step, rank=0, world=1):
        """This rank's rows of the batch at `step`, int64 [rows / world, longest + 1], -1: padding."""
        number, index = self.place(step)
        first, length = (array[index] for array in self.one_pass(number))
        width = self.width(length)
        first, length = first[rank::world], length[rank::world]
        ids = np.full((len(first), 1 + width), -1)
        for row, n, piece in zip(ids, length, self.with_token_before(first, length)):
            row[:1 + n] = piece
        return torch.from_numpy(self.check_ids(ids))

    def with_token_before(self, first, length):
        """The tokens of each part of a document [n], after the one before them: in a document's first part
        that is the separator.
        """
        pieces = self.cut(np.maximum(first - 1, 0).tolist(), (first + length).tolist())
        begins = self.first[np.searchsorted(self.first, first, "right") - 1] == first
        for piece, n, is_first in zip(pieces, length, begins):
            yield np.append(self.dataset.separator, piece[-n:].astype(np.int64)) if is_first else piece

    def n_scored(self, step):
        """Tokens of the batch at `step` that are scored, over all ranks."""
        number, index = self.place(step)
        return int(self.one_pass(number)[1][index].sum())

    def tokens(self, step):
        """Tokens scored in the steps before `step`."""
        number, index = self.place(step)
        return int(self.one_pass(number)[1][:index].sum()) + (self.ends[number - 1][1] if number else 0)

    def __str__(self):
        """What there is of it, and how much of the first pass is padding, in a line."""
        _, length = self.one_pass(0)
        padded_size = sum(self.width(row) for row in length) * self.rows
        return (f"{self.coverage()}; a pass is {len(length):,} steps, its rows have {length.min():,} to "
                f"{length.max():,} tokens, {length.mean():,.0f} in the mean, and "
                f"{1 - length.sum() / padded_size:.1%} of it is padding")

    def coverage(self):
        """How much of the split is in documents that are long enough."""
        return (f"documents: {len(self.size):,} of {self.n_documents:,} have at least "
                f"{plural(self.shortest, 'token')}, {self.size.sum() / len(self.data):.1%} of {self.split}")


class PackedBatches(DocumentBatches):
    """Training batches whose rows are full of documents, a function of (seed, step) alone.

    Each document, or part of one, is as in a row of DocumentBatches: the model reads the separator or the
    token before it first, and its positions begin at 0. A pass has an order of its own.

    cut: documents follow one another, in random order, and a row ends after block_size tokens. A document
    that does not fit goes on in another row, and there is no padding. Without it documents of up to
    block_size tokens stay whole, and longer ones are cut as in DocumentBatches. Each goes, the longest first,
    into the fullest row that has room for it, and what a row lacks at its end is padding.
    """

    def __init__(self, dataset, split, block_size, rows, seed, shortest, cut):
        self.cuts = cut
        super().__init__(dataset, split, block_size, rows, seed, shortest)
        self.parts = lru_cache(maxsize=1)(self.parts)

    def fewest_rows(self):
        tokens = int(self.size.sum())
        return tokens // self.block_size if self.cuts else -(-tokens // self.block_size)

    def cut_anywhere(self, rng):
        """(first token, length, row) of the parts of documents, in the order in which rows hold them, [n]."""
        T, order = self.block_size, rng.permutation(len(self.size))
        end = self.size[order].cumsum()  # of each document, as if all of them were one text
        whole = int(end[-1]) // T * T
        cuts = np.union1d(np.append(0, end[end < whole]), np.arange(0, whole + 1, T))
        start = cuts[:-1]
        document = np.searchsorted(end, start, "right")
        first = self.first[order][document] + start - (end - self.size[order])[document]
        return first, np.diff(cuts), start // T

    def keep_whole(self, rng):
        """The same of documents that stay whole where a row has room for them."""
        first, length = self.even_parts(rng)
        order = rng.permutation(len(first))
        order = order[np.argsort(-length[order], kind="stable")]
        row = best_fit(length[order].tolist(), self.block_size)
        by_row = np.argsort(row, kind="stable")
        return first[order][by_row], length[order][by_row], row[by_row]

    def parts(self, number):
        """(first token, length) of the parts of documents in pass `number`, [n] each, row by row; which of
        them is the first of each row, and n, [rows + 1].
        """
        rng = np.random.default_rng([self.seed, number])
        first, length, row = self.cut_anywhere(rng) if self.cuts else self.keep_whole(rng)
        return first, length, np.searchsorted(row, np.arange(row[-1] + 2))

    def one_pass(self, number):
        """(number of each row, how many tokens it has) in pass `number`, int64 [steps, rows] each."""
        _, length, bounds = self.parts(number)
        size = np.add.reduceat(length, bounds[:-1])
        steps = len(size) // self.rows
        order = np.random.default_rng([self.seed, number, 1]).permutation(len(size))[:steps * self.rows]
        order = order.reshape(steps, self.rows)
        return order, size[order]

    def __call__(self, step, rank=0, world=1):
        """This rank's rows of the batch at `step`: (inputs, targets, positions), int64 [rows / world, T].

        A target is -1, and not scored, where a row has no more documents.
        """
        number, index = self.place(step)
        first, length, bounds = self.parts(number)
        rows = self.one_pass(number)[0][index][rank::world]
        x, y, positions = np.zeros((3, len(rows), self.block_size), np.int64)
        y[:] = -1
        for i, row in enumerate(rows):
            span, column = slice(bounds[row], bounds[row + 1]), 0
            for piece in self.with_token_before(first[span], length[span]):
                columns = slice(column, column + len(piece) - 1)
                x[i, columns], y[i, columns] = piece[:-1], piece[1:]
                positions[i, columns] = np.arange(len(piece) - 1)
                column = columns.stop
            positions[i, column:] = np.arange(self.block_size - column)
        self.check_ids(np.maximum(x, y))
        return tuple(torch.from_numpy(array) for array in (x, y, positions))

    def n_scored(self, step):
        """Tokens of the batch at `step` that are scored, over all ranks; None: all, in each of its rows."""
        return None if self.cuts else super().n_scored(step)

    def __str__(self):
        """What there is of it, and how full its rows are, in a line."""
        _, size = self.one_pass(0)
        first, _, bounds = self.parts(0)
        in_row = len(first) / (len(bounds) - 1)
        return (f"{self.coverage()}; a pass is {len(size):,} steps, its rows have {in_row:,.1f} documents or "
                f"parts of them in the mean, and {1 - size.mean() / self.block_size:.1%} of it is padding")


def best_fit(lengths, T):
    """The number of the row of T tokens that each of these lengths goes into, int64 [n]: the fullest row that
    has room for it, or else a new one. lengths: from the longest to the shortest.
    """
    rows, count = np.empty(len(lengths), np.int64), 0
    with_room = [[] for _ in range(T + 1)]  # the rows that have room for so many tokens
    rooms = 0  # a bit for each room that some row has
    for i, length in enumerate(lengths):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            row, room, count = count, T, count + 1
        rows[i] = row
        with_room[room - length].append(row)
        rooms |= 1 << room - length
    return rows
