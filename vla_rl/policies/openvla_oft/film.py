"""Vision blocks that the instruction modulates: FiLM (arXiv:1709.07871), as in OpenVLA-OFT (arXiv:2502.19645).

x ─► attention ─► (1 + gamma) x + beta ─► feed-forward
                        ▲         ▲
language ───────────────┴─────────┘    the mean embedding of the prompt's tokens
"""

from typing import Any

from torch import Tensor, nn
from transformers import Dinov2WithRegistersConfig, SiglipVisionConfig
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer


class Film(nn.Module):
    """Scales and shifts every feature of all tokens alike."""

    def __init__(self, language: int, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Linear(language, width), nn.Linear(language, width)

    def forward(self, x: Tensor, language: Tensor) -> Tensor:
        """[N, tokens, width] and [N, language] -> [N, tokens, width]."""
        return x * (1 + self.gamma(language).unsqueeze(1)) + self.beta(language).unsqueeze(1)


class FilmDinoLayer(Dinov2WithRegistersLayer):
    """The library's block, which hands unknown arguments on: ``language`` is given to the whole tower."""

    def __init__(self, config: Dinov2WithRegistersConfig, language: int) -> None:
        super().__init__(config)
        self.film = Film(language, config.hidden_size)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, language: Tensor, **kwargs: Any
    ) -> Tensor:
        attended, _ = self.attention(self.norm1(hidden_states), attention_mask=attention_mask, **kwargs)
        x = self.film(hidden_states + self.drop_path(self.layer_scale1(attended)), language)
        return x + self.drop_path(self.layer_scale2(self.mlp(self.norm2(x))))


class FilmSiglipLayer(SiglipEncoderLayer):
    """Likewise."""

    def __init__(self, config: SiglipVisionConfig, language: int) -> None:
        super().__init__(config)
        self.film = Film(language, config.hidden_size)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, language: Tensor, **kwargs: Any
    ) -> Tensor:
        attended, _ = self.self_attn(self.layer_norm1(hidden_states), attention_mask=attention_mask, **kwargs)
        x = self.film(hidden_states + attended, language)
        return x + self.mlp(self.layer_norm2(x))
