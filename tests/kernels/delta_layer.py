"""A layer of the gated delta rule whose inputs are given: for tests of its kernels and of its states."""

import torch

from blockdraft.cache.recurrent import RecurrentState, Scan
from blockdraft.kernels.gated_delta import DeltaWeights

NAN = float("nan")


class DeltaLayer:
    """A layer of four rows that all hold NaN, and the inputs that rows get at each position.

    As in a model, x and the logits are parts of one projection. It is layer `index` of `states`.
    """

    saves = None

    def __init__(self, states, num_tokens, dtype, *, index=0, seed=0):
        generator, device = torch.Generator().manual_seed(seed), states.state.device

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.states, self.spec, wide = states, states.spec, torch.promote_types(dtype, torch.float32)
        spec, heads = self.spec, self.spec.num_heads
        self.sizes = (spec.conv_channels, heads, heads)
        self.inputs = normal(4, num_tokens, sum(self.sizes)).to(device, dtype)
        self.weights = DeltaWeights(
            normal(spec.conv_channels, spec.conv_width).to(device, dtype),
            normal(heads).to(device, wide),
            normal(heads).to(device, wide),
        )
        self.storage = RecurrentState(states, index)
        self.poison()

    def poison(self):
        self.storage.state.fill_(NAN)
        self.storage.tail.fill_(NAN)

    def where(self, rows, starts, counts, *, is_known):
        return Scan(torch.tensor(rows), torch.tensor(starts), tuple(counts), is_known)

    def scan(self, rows, starts, counts, *, is_known, num_true=None, where=None):
        """Reads of each row's tokens [start, start + count). From num_true[r] on they are not numbers."""
        pieces = []
        for place, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            piece = self.inputs[row, start : start + count]
            piece = torch.cat((piece, piece.new_full((count - len(piece), piece.shape[1]), NAN)))
            if num_true is not None:
                piece[num_true[place] :] = NAN
            pieces.append(piece)
        x, beta, gate = torch.cat(pieces).split(self.sizes, dim=1)
        if where is None:
            where = self.where(rows, starts, counts, is_known=is_known)._replace(saves=self.saves)
        return self.storage.scan(x, beta, gate, self.weights, where).split(list(counts))

    def commit(self, rows, starts, counts):
        device = self.inputs.device
        self.states.commit(*(torch.tensor(one, device=device) for one in (rows, starts, counts)))

    def decode(self, row, length):
        """Token by token: the reads, and (state, tail) at every length."""
        reads, states = [], {}
        for start in range(length):
            reads += self.scan((row,), (start,), (1,), is_known=False)
            self.commit((row,), (start,), (1,))
            states[start + 1] = self.copy(row)
        return torch.cat(reads), states

    def copy(self, row):
        return self.storage.state[row].clone(), self.storage.tail[row].clone()


def is_same(mine, theirs):
    """Return whether all tensors have the same bits, NaN included."""
    return all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(mine, theirs, strict=True)
    )
