"""The language model's last layer, computed only where its output is read.

Tokens meet in attention alone, as keys and values. So the last layer needs these of all tokens, but queries and the MLP
only of the tokens that predict actions: 56 of 145 in the small policies.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, rotate_half


class LastLayer(LlamaDecoderLayer):
    """A Llama layer whose ``forward`` also takes ``read``, the columns of its output that are needed."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        read: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """[N, S, width] -> [N, R, width] with ``read``, int64 [N, R]; else [N, S, width], as the library's layer.

        ``attention_mask``: bool [N, 1, S, S]; ``position_embeddings``: cosine and sine, [N, S, head] each.
        """
        if read is None or attention_mask is None or position_embeddings is None:
            layer = super().forward
            return layer(
                hidden_states, attention_mask, position_ids, past_key_values, use_cache, position_embeddings, **kwargs
            )
        columns, attention = read.unsqueeze(-1), self.self_attn
        normed = self.input_layernorm(hidden_states)

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

        keys, values = heads(attention.k_proj(normed)), heads(attention.v_proj(normed))
        queries = heads(attention.q_proj(normed.take_along_dim(columns, dim=1)))
        cos, sin = position_embeddings
        keys = _rotated(keys, cos, sin)
        queries = _rotated(queries, cos.take_along_dim(columns, dim=1), sin.take_along_dim(columns, dim=1))
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, attention.layer_idx)
        mask = attention_mask.take_along_dim(columns.unsqueeze(1), dim=2)
        mixed = F.scaled_dot_product_attention(queries, keys, values, mask, scale=attention.scaling)
        hidden = hidden_states.take_along_dim(columns, dim=1)
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def compute_last_layer_where_read(llama: LlamaModel) -> None:
    """Let the last layer take ``read``, which ``llama`` passes on; its weights and their names stay."""
    llama.layers[-1].__class__ = LastLayer


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of [N, heads, n, head], with cosine and sine [N, n, head]."""
    return heads * cos.unsqueeze(1) + rotate_half(heads) * sin.unsqueeze(1)
