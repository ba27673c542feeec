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

    def _attended(
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
        attended: Tensor = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return attended

    def _fed(self, hidden: Tensor) -> Tensor:
        """[N, n, width]: the MLP, whose wide tensors come when what attention needed is gone."""
        fed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return fed


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
        return self._fed(self._picked(hidden_states, attention_mask, position_embeddings, read, past_key_values))

    def _picked(self, hidden: Tensor, mask: Tensor, rotation: _Rotation, read: Tensor, cache: Cache | None) -> Tensor:
        """[N, R, width], after attention."""
        normed, columns = self.input_layernorm(hidden), read.unsqueeze(-1)
        picked = [rows.take_along_dim(columns, dim=-2) for rows in (hidden, normed, *rotation)]
        seen = mask.take_along_dim(columns.unsqueeze(1), dim=2)
        return self._attended(
            picked[0], picked[1], (picked[2], picked[3]), *self._projected(normed), rotation, seen, cache
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
        return _spread(self._fed(self._distinct(hidden_states, attention_mask, position_embeddings, zeros)), zeros)

    def _distinct(self, hidden: Tensor, mask: Tensor, rotation: _Rotation, zeros: range) -> Tensor:
        """[N, S - len(zeros) + 1, width], after attention."""
        hidden, mask, cos, sin = (_once(rows, zeros) for rows in (hidden, mask, *rotation))
        normed = self.input_layernorm(hidden)
        keys, values = (_spread(rows, zeros) for rows in self._projected(normed))
        return self._attended(hidden, normed, (cos, sin), keys, values, rotation, mask)


def _once(rows: Tensor, zeros: range) -> Tensor:
    """[..., S, n], with one of the rows that are zero."""
    return torch.cat([rows[..., : zeros.start + 1, :], rows[..., zeros.stop :, :]], dim=-2)


def _spread(rows: Tensor, zeros: range) -> Tensor:
    """[N, S, width] again."""
    alike = rows[:, zeros.start : zeros.start + 1].expand(-1, len(zeros), -1)
    return torch.cat([rows[:, : zeros.start], alike, rows[:, zeros.start + 1 :]], dim=1)


def compute_what_is_needed(llama: LlamaModel) -> None:
    """Let the first layer take ``zeros`` and the last one ``read``, which ``llama`` passes on. No weight changes."""
    llama.layers[0].__class__ = FirstLayer
    llama.layers[-1].__class__ = LastLayer


def _rotated(heads: Tensor, rotation: _Rotation) -> Tensor:
    """[N, heads, n, head], turned by the positions."""
    cos, sin = rotation
    turned: Tensor = heads * cos.unsqueeze(1) + rotate_half(heads) * sin.unsqueeze(1)
    return turned
