"""What turns a block's hidden states into dependent drafts: sequential head and confidence head.

Source: DSpark, arXiv:2607.05147, section 2; the parameter names are those of published checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

if TYPE_CHECKING:
    from dspark_hf.drafting.block.spec import BlockSpec


class MarkovHead(nn.Module):
    """Bias on a position's logits by the token before it: W2 . f(W1[x], h), of low rank.

    vanilla: f = W1[x];  gated: f = sigmoid(Wg [h ; W1[x]] + b) * W1[x];
    rnn: (g, c, o) = chunk(W [s ; W1[x] ; h] + b), s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c),
    f = tanh(o), with s = 0 before the block.
    """

    def __init__(self, spec: BlockSpec) -> None:
        """Create the head of `spec.head`'s kind."""
        super().__init__()
        rank, width = spec.markov_rank, spec.hidden_size
        self.kind = spec.head
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def start(self, like: torch.Tensor) -> torch.Tensor:
        """Return the state before a block, shaped like W1 rows (..., r)."""
        return torch.zeros_like(like)

    def step(
        self,
        state: torch.Tensor,  # [..., r]
        token: torch.Tensor,  # [..., r], W1 row of the token before
        hidden: torch.Tensor,  # [..., d]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance one position.

        Returns:
            tuple: The code whose product with W2 is the bias, and the next state, both (..., r).
        """
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, token], dim=-1)))
            return gate * token, state
        if self.kind == "rnn":
            joint = self.joint_proj(torch.cat([state, token, hidden], dim=-1))
            keep, candidate, code = joint.chunk(3, dim=-1)
            keep = torch.sigmoid(keep)
            state = keep * state + (1 - keep) * torch.tanh(candidate)
            return torch.tanh(code), state
        return token, state

    def codes(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the codes (..., N, r) of whole blocks.

        Args:
            tokens: W1 rows of the tokens before each position, of shape (..., N, r).
            hidden: Hidden states of shape (..., N, d).
        """
        if self.kind != "rnn":
            return self.step(tokens, tokens, hidden)[0]
        state = self.start(tokens[..., 0, :])
        parts = []
        for k in range(tokens.shape[-2]):
            code, state = self.step(state, tokens[..., k, :], hidden[..., k, :])
            parts.append(code)
        return torch.stack(parts, dim=-2)

    def forward(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the biases (..., N, V_draft) of whole blocks whose tokens (..., N) are known."""
        codes = self.codes(self.markov_w1(previous), hidden)
        return cast("torch.Tensor", self.markov_w2(codes))


class ConfidenceHead(nn.Module):
    """Logit of the probability that a draft survives, given that those before it did."""

    def __init__(self, spec: BlockSpec) -> None:
        """Create the projection of [h] or [h ; W1[x]] to one logit."""
        super().__init__()
        self.sees_token = spec.confidence_sees_token
        self.proj = nn.Linear(spec.hidden_size + spec.markov_rank * self.sees_token, 1)

    def forward(self, hidden: torch.Tensor, token: torch.Tensor | None) -> torch.Tensor:
        """Return logits (...) for hidden states (..., d) and W1 rows (..., r)."""
        if self.sees_token and token is not None:
            hidden = torch.cat([hidden, token], dim=-1)
        return cast("torch.Tensor", self.proj(hidden)).squeeze(-1)
