"""Layers of the language model that compute no more rows than are needed. In the small policies:

* the last layer, 56 of 145 rows: of the tokens that predict actions;
* the first layer, 90 of 145 rows: the zeros that stand for the chunk in parallel decoding share one.

Tokens meet in attention alone, as keys and values, so that these are computed of all tokens, and the rest of some.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, rotate_half

_Rotation = tuple[Tensor, Tensor]  # cosine and sine of n positions, [N, n, head] each


class _PartialLayer(LlamaDecoderLayer):
    """A Llama layer in parts."""

    def _projected(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of normed tokens, [N, n, width] each."""
        return self.self_attn.k_proj(normed), self.self_attn.v_proj(normed)

    def _compute(
        self,
        hidden: Tensor,
        normed: Tensor,
        rotation: _Rotation,
        keys: Tensor,
        values: Tensor,
        rotation_of_all: _Rotation,
        mask: Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """Some tokens, [N, n, width] as they are and normed, attend to all, whose keys and values are [N, S, width].

        ``mask``: bool [N, 1, n, S].
        """
        attention = self.self_attn

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

        queries = _rotated(heads(attention.q_proj(normed)), rotation)
        keys, values = _rotated(heads(keys), rotation_of_all), heads(values)
        if cache is not None:
            keys, values = cache.update(keys, values, attention.layer_idx)
        mixed = F.scaled_dot_product_attention(queries, keys, values, mask, scale=attention.scaling)
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class LastLayer(_PartialLayer):
    """``forward`` takes also ``read``, int64 [N, R]: the columns of its output that are needed."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: _Rotation | None = None,
        read: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[N, S, width] -> [N, R, width]; without ``read``, as the library's layer."""
        if read is None or attention_mask is None or position_embeddings is None:
            whole: Any = super().forward
            others = position_ids, past_key_values, use_cache, position_embeddings
            output: Tensor = whole(hidden_states, attention_mask, *others, **kwargs)
            return output
        normed, (cos, sin) = self.input_layernorm(hidden_states), position_embeddings

        def picked(rows: Tensor) -> Tensor:
            return rows.take_along_dim(read.unsqueeze(-1), dim=-2)

        mask = attention_mask.take_along_dim(read[:, None, :, None], dim=2)
        rotation, keys_values = (picked(cos), picked(sin)), self._projected(normed)
        return self._compute(
            picked(hidden_states), picked(normed), rotation, *keys_values, (cos, sin), mask, past_key_values
        )


class FirstLayer(_PartialLayer):
    """``forward`` takes also ``zeros``, a range of columns: tokens that are zero.

    RMSNorm and the projections, which have no bias, leave them zero. So they weigh all tokens alike, wherever they
    stand, and what comes out is one row for all.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: _Rotation | None = None,
        zeros: range | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[N, S, width] -> [N, S, width]. All tokens that are zero must see the same ones."""
        if not zeros or attention_mask is None or position_embeddings is None or past_key_values is not None:
            whole: Any = super().forward
            others = position_ids, past_key_values, use_cache, position_embeddings
            output: Tensor = whole(hidden_states, attention_mask, *others, **kwargs)
            return output
        first, end = zeros.start, zeros.stop

        def distinct(rows: Tensor) -> Tensor:
            return torch.cat([rows[..., : first + 1, :], rows[..., end:, :]], dim=-2)

        def all_of(rows: Tensor) -> Tensor:
            alike = rows[:, first : first + 1].expand(-1, len(zeros), -1)
            return torch.cat([rows[:, :first], alike, rows[:, first + 1 :]], dim=1)

        hidden, (cos, sin) = distinct(hidden_states), position_embeddings
        normed = self.input_layernorm(hidden)
        keys, values = map(all_of, self._projected(normed))
        rotation = distinct(cos), distinct(sin)
        return all_of(self._compute(hidden, normed, rotation, keys, values, (cos, sin), distinct(attention_mask)))


def compute_what_is_needed(llama: LlamaModel) -> None:
    """Let the first layer take ``zeros`` and the last one ``read``, which ``llama`` passes on. No weight changes."""
    llama.layers[0].__class__ = FirstLayer
    llama.layers[-1].__class__ = LastLayer


def _rotated(heads: Tensor, rotation: _Rotation) -> Tensor:
    """[N, heads, n, head], turned by the positions."""
    cos, sin = rotation
    turned: Tensor = heads * cos.unsqueeze(1) + rotate_half(heads) * sin.unsqueeze(1)
    return turned
