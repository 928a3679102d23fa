"""DSpark's heads, which make a draft depend on the draft before it.

DFlash predicts every draft of a block independently. The Markov head adds `after @ latent` to the logits of a
draft, where the latent is the previous token's row of `before`, possibly multiplied by a gate that also reads
the hidden state ("gated"), or computed from a state of the whole block ("rnn"). The confidence head predicts
whether a draft is right, given that all before it are.

These weights are never quantised: they are small, or read one row at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.models.draft_config import DraftConfig, SparkConfig
from blockdraft.models.kernel_module import KernelModule


class Table(nn.Module):
    """One row of values per token."""

    def __init__(self, num_tokens: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_tokens, size))


class Projection(KernelModule):
    """y = x W^T + b."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias, None)


class MarkovHead(nn.Module):
    """The Markov head; `after` has one row per token of the drafter's vocabulary."""

    def __init__(self, config: DraftConfig, spark: SparkConfig) -> None:
        super().__init__()
        rank, hidden = spark.rank, config.hidden_size
        self.kind = spark.kind
        self.before = Table(config.vocab_size, rank)
        self.after = Table(config.draft_vocab_size, rank)
        self.gate = Projection(hidden + rank, rank) if spark.kind == "gated" else None
        self.joint = Projection(2 * rank + hidden, 3 * rank) if spark.kind == "rnn" else None

    def begin(self, num_rows: int) -> Tensor:
        """Return the state [R, rank] before the first draft of a block."""
        return self.before.weight.new_zeros(num_rows, self.before.weight.shape[1])

    def step(self, hidden: Tensor, token_ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents [R, rank] for hidden states [R, E] behind tokens [R], and the new state."""
        own = self.before.weight[token_ids]
        if self.gate is not None:
            return torch.sigmoid(self.gate(torch.cat((hidden, own), dim=1))) * own, state
        if self.joint is not None:
            keep, new, out = self.joint(torch.cat((state, own, hidden), dim=1)).chunk(3, dim=1)
            keep = torch.sigmoid(keep)
            return torch.tanh(out), keep * state + (1 - keep) * torch.tanh(new)
        return own, state

    def latents(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return [R, D, rank] for hidden states [R, D, E], given the tokens before all drafts [R, D]."""
        if self.kind == "vanilla":
            return self.before.weight[before]
        state, found = self.begin(len(hidden)), []
        for draft in range(hidden.shape[1]):
            latent, state = self.step(hidden[:, draft], before[:, draft], state)
            found.append(latent)
        return torch.stack(found, dim=1)


class ConfidenceHead(nn.Module):
    """Predicts whether a draft is right, from its hidden state and, if `reads_token`, the token before."""

    def __init__(self, config: DraftConfig, spark: SparkConfig) -> None:
        super().__init__()
        self.reads_token = spark.confidence_reads_token
        self.proj = Projection(config.hidden_size + (spark.rank if self.reads_token else 0), 1)

    def forward(self, hidden: Tensor, before: Tensor | None) -> Tensor:
        """Return logits [N] for hidden states [N, E] and rows of the Markov head's `before` [N, rank]."""
        if self.reads_token:
            assert before is not None
            hidden = torch.cat((hidden, before), dim=1)
        return self.proj(hidden)[:, 0]  # type: ignore[no-any-return]
