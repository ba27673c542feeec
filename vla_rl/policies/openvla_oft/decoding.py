"""How the language model predicts an action chunk: all its numbers at once, or one after the other.

    parallel         <s> [patches] prompt  0  0  0 ... </s>    every token sees all others (OpenVLA-OFT)
    autoregressive   <s> [patches] prompt  1  2  3 ...         every token sees those before it (OpenVLA)
                                        │  │  │  │
                                        1  2  3  4             a token's state predicts the next action number

Prompts of different lengths are padded behind the prompt, so that the chunks of all rows have the same columns. Padding
is masked and takes no position: a row computes what it would compute alone.

Sources: OpenVLA (arXiv:2406.09246); OpenVLA-OFT (arXiv:2502.19645); RLinf leaves out ``</s>``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaModel

from vla_rl.policies.openvla_oft.architecture import Architecture

# From states [N, n, width] that predict the action numbers of a part of the chunk to their bins, int64 [N, n].
Choose = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the language model reads before the chunk: ``<s>``, images, proprioception, prompt, padding."""

    embeddings: Tensor  # [N, L, width]
    attended: Tensor  # bool [N, L]: false at the padding
    length: Tensor  # int64 [N], without the padding


class Decoding(ABC):
    """A way to predict the K * A numbers of a chunk. It has no weights; the language model is an argument."""

    def __init__(self, architecture: Architecture) -> None:
        self._arch = architecture
        self._numbers = architecture.action_tokens

    @abstractmethod
    def states(self, llama: LlamaModel, prefix: Prefix, tokens: Tensor | None) -> Tensor:
        """Hidden states [N, K * A, width] that predict the action numbers, in one forward pass.

        ``tokens``: int64 [N, K * A], the bins of the chunk. Raises ValueError if they are needed and None.
        """

    @abstractmethod
    def generate(self, llama: LlamaModel, prefix: Prefix, choose: Choose) -> tuple[Tensor, Tensor]:
        """Bins of a chunk, int64 [N, K * A], and the state that predicts the first, [N, width]; no gradients.

        ``choose`` is called for consecutive parts of the chunk.
        """


class ParallelDecoding(Decoding):
    """Zeros stand for the chunk. An action number depends on the observation, not on the others' samples."""

    def states(self, llama: LlamaModel, prefix: Prefix, tokens: Tensor | None = None) -> Tensor:
        rows, _, width = prefix.embeddings.shape
        tail = prefix.embeddings.new_zeros(rows, self._numbers, width)
        if self._arch.stop_token:
            stop = llama.embed_tokens(prefix.length.new_full((rows, 1), self._arch.eos_id))
            tail = torch.cat([tail, stop], dim=1)
        seen = _seen_keys(prefix, tail.shape[1])
        length = seen.shape[-1]
        return _read(llama, prefix, tail, seen.expand(-1, 1, length, length), self._numbers, zeros=self._numbers)

    def generate(self, llama: LlamaModel, prefix: Prefix, choose: Choose) -> tuple[Tensor, Tensor]:
        states = self.states(llama, prefix)
        return choose(states, slice(0, self._numbers)), states[:, 0]


class AutoregressiveDecoding(Decoding):
    """Each action number depends on the ones before it, whose tokens the model reads."""

    def states(self, llama: LlamaModel, prefix: Prefix, tokens: Tensor | None) -> Tensor:
        if tokens is None:
            raise ValueError("autoregressive decoding: the distribution of an action number depends on the tokens")
        tail = self._embed(llama, tokens[:, :-1])
        seen = _seen_keys(prefix, tail.shape[1])
        causal = torch.ones(seen.shape[-1], seen.shape[-1], dtype=torch.bool, device=seen.device).tril()
        return _read(llama, prefix, tail, seen & causal, self._numbers)

    def generate(self, llama: LlamaModel, prefix: Prefix, choose: Choose) -> tuple[Tensor, Tensor]:
        """With a cache of keys and values. Raises RuntimeError in training mode with activation checkpointing."""
        cache = DynamicCache(config=llama.config)
        seen = _seen_keys(prefix, 0)
        causal = torch.ones(seen.shape[-1], seen.shape[-1], dtype=torch.bool, device=seen.device).tril()
        first = state = _read(llama, prefix, prefix.embeddings[:, :0], seen & causal, 1, cache=cache)
        if cache.get_seq_length() != seen.shape[-1]:
            raise RuntimeError("activation checkpointing keeps no cache in training mode: call eval() before act()")
        chosen: list[Tensor] = []
        for number in range(self._numbers):
            chosen.append(choose(state, slice(number, number + 1)))
            if number + 1 == self._numbers:
                break
            state = llama(
                inputs_embeds=self._embed(llama, chosen[-1]),
                attention_mask=_seen_keys(prefix, number + 1),
                position_ids=prefix.length.unsqueeze(1) + number,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        return torch.cat(chosen, dim=1), first[:, 0]

    def _embed(self, llama: LlamaModel, bins: Tensor) -> Tensor:
        """[N, n] -> [N, n, width]; ids descend with the action, bins ascend."""
        return llama.embed_tokens(self._arch.vocab_size - 1 - bins)


def make_decoding(architecture: Architecture) -> Decoding:
    """The one that the architecture names."""
    kinds = {"parallel": ParallelDecoding, "autoregressive": AutoregressiveDecoding}
    return kinds[architecture.decoding](architecture)


def _read(
    llama: LlamaModel,
    prefix: Prefix,
    tail: Tensor,
    mask: Tensor,
    numbers: int,
    *,
    zeros: int = 0,
    cache: DynamicCache | None = None,
) -> Tensor:
    """Hidden states [N, numbers, width] that predict the first action numbers, after the last norm.

    ``mask``: bool [N, 1, S, S]. Llama adds its causal mask to any mask but a 4-D one, which it passes on unchanged.
    ``zeros``: how many tokens at the start of the tail are zero.
    """
    length = prefix.embeddings.shape[1]
    columns = torch.arange(length, device=tail.device).expand(len(tail), -1)
    positions = prefix.length.unsqueeze(1) + torch.arange(tail.shape[1], device=tail.device)
    output = llama(
        inputs_embeds=torch.cat([prefix.embeddings, tail], dim=1),
        attention_mask=mask,
        position_ids=torch.cat([columns, positions], dim=1),
        past_key_values=cache,
        use_cache=cache is not None,
        read=_predicting(prefix, numbers),
        zeros=range(length, length + zeros),
    )
    return output.last_hidden_state


def _seen_keys(prefix: Prefix, tail: int) -> Tensor:
    """bool [N, 1, 1, L + tail]: false at the padding."""
    seen = torch.cat([prefix.attended, prefix.attended.new_ones(len(prefix.attended), tail)], dim=1)
    return seen[:, None, None, :]


def _predicting(prefix: Prefix, numbers: int) -> Tensor:
    """Columns, int64 [N, numbers]: the last token of the prompt, and the first ones behind the padding."""
    behind = prefix.embeddings.shape[1] + torch.arange(numbers - 1, device=prefix.length.device)
    return torch.cat([prefix.length.unsqueeze(1) - 1, behind.expand(len(prefix.length), -1)], dim=1)
