"""Heads by which a draft depends on those before it: of DSpark, of XPress (Refiner), of Domino (PrefixHead).

A head turns the tokens before a draft into a latent. The product of the latent and the table `after`, which
has a row for each token, is added to the draft's logits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from blockdraft.models.draft_config import DraftConfig
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.layers import GatedMLP, PlainLinear


class Table(nn.Module):
    """A row of values for each token."""

    def __init__(self, num_tokens: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_tokens, size))


class MarkovHead(nn.Module):
    """DSpark's head, whose latent is a row for the token before the draft; never quantised."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.before = Table(config.vocab_size, config.markov_rank)
        self.after = Table(config.draft_vocab_size, config.markov_rank)


class Refiner(KernelModule):
    """XPress's head, whose latents mix the columns of a block up to the draft's own.

    A column's input is its hidden state, the mean over the block's hidden states, and the token before it.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        head = config.xpress
        assert head is not None
        hidden, rank, columns = config.hidden_size, head.rank, config.num_columns
        self.before = Table(config.vocab_size, rank)
        self.own = PlainLinear(hidden, rank)
        self.mean = PlainLinear(hidden, rank)
        self.inputs = PlainLinear(3 * rank, rank)
        self.mixer = nn.Parameter(torch.empty(rank, columns, columns))  # each channel mixes by its own matrix
        self.mlp = GatedMLP(rank, head.inner_size)
        self.after = Table(config.draft_vocab_size, rank)

    def look(self, hidden: Tensor) -> Tensor:
        """Return what the latents need of the hidden states [R, B, E] of a whole block: [R, B, 2 * rank]."""
        own = self.own(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        return torch.cat((own, self.mean(hidden.mean(dim=1))[:, None].expand_as(own)), dim=-1)

    def latents(self, seen: Tensor, before: Tensor) -> Tensor:
        """Return the latents [R, C, rank] of the first C columns, behind the tokens `before` [R, C].

        `seen` [R, B, 2 * rank] is the result of `look`.
        """
        num_rows, count = before.shape
        said = torch.cat((seen[:, :count], self.before.weight[before]), dim=-1)
        x = self.inputs(said.flatten(0, 1)).view(num_rows, count, -1)
        mixer = self.mixer[:, :count, :count].tril().to(x.dtype)
        x = (x + torch.einsum("kij,rjk->rik", mixer, x)).flatten(0, 1)
        return (x + self.mlp(x)).view(num_rows, count, -1)  # type: ignore[no-any-return]


class PrefixHead(KernelModule):
    """Domino's head, whose latent joins a column's hidden state and a GRU's, which has read the drafts."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        head = config.domino
        assert head is not None
        self.state_size = head.state_size
        self.inputs = PlainLinear(config.hidden_size, 3 * head.state_size)
        self.recurrent = PlainLinear(head.state_size, 3 * head.state_size)
        self.joined = PlainLinear(config.hidden_size + head.state_size, head.rank)
        self.after = Table(config.draft_vocab_size, head.rank)

    def read(self, embedded: Tensor, state: Tensor | None) -> Tensor:
        """Return the GRU's state [R, S] after one more token of embedding [R, E]; None: before any token."""
        if state is None:
            state = embedded.new_zeros(len(embedded), self.state_size)
        given, kept = self.inputs(embedded).chunk(3, dim=-1), self.recurrent(state).chunk(3, dim=-1)
        reset, update = (torch.sigmoid(given[gate] + kept[gate]) for gate in (0, 1))
        new = torch.tanh(given[2] + reset * kept[2])
        return new + update * (state - new)

    def latent(self, hidden: Tensor, state: Tensor) -> Tensor:
        """Return the latent [R, rank] of a column with hidden states [R, E]."""
        return silu(self.joined(torch.cat((hidden, state), dim=-1)))
