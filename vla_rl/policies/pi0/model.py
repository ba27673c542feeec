"""π0 (arXiv:2410.24164), from the library's classes.

images ─► SigLIP ─► projector ┐
instruction ──────────────────┴► Gemma ─ keys and values ─┐
proprioception, noisy actions, time ─────────────────────► action expert ─► velocity
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PI0Config, PI0ForConditionalGeneration

from vla_rl.core.records import Array
from vla_rl.policies.base.constants import constant
from vla_rl.policies.base.flow_policy import FlowPolicy, FlowPrefix
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.base.words import UNKNOWN, build_word_tokenizer, with_words_of
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.pi0.input_format import OWN_FORMAT, InputFormat
from vla_rl.policies.pi0.statistics import Statistics

SPECIAL_WORDS = ("<pad>", "<bos>", UNKNOWN, "<eol>")  # ids 0..3 of a word vocabulary
_PAD = 0


@dataclass(frozen=True, slots=True)
class _Prefix(FlowPrefix):
    """The features are the mean over the tokens."""

    cache: Any  # keys and values of images and instruction
    attended: Tensor  # [N, L], 0 at padding
    state: Tensor  # [N, S], proprioception, normalized and padded


class Pi0(FlowPolicy):
    """See ``FlowPolicy``."""

    text_ids: Tensor  # int64 [tasks, L]: image tokens, <bos>, words, <eol>, padding
    text_kept: Tensor  # int64 [tasks, L]: 0 at the padding

    def __init__(
        self,
        config: Pi0Config,
        model_config: PI0Config,
        tokenizer: Tokenizer,
        actions: Statistics,
        proprio: Statistics | None,
        views: int,
        input_format: InputFormat = OWN_FORMAT,
    ) -> None:
        """A policy with random weights. ``actions`` has A dimensions, ``proprio`` P; None: it is not read."""
        super().__init__()
        self.config, self.tokenizer, self.views, self.input_format = config, tokenizer, views, input_format
        self.action_statistics, self.proprio_statistics = actions, proprio
        self.model = PI0ForConditionalGeneration(model_config)
        self.model.model.dit.embed_tokens = None  # the action expert reads no words
        self.model_lengths = model_config.chunk_size, model_config.max_action_dim
        self.action_dim = len(actions.mean)
        settings = self._settings
        proprio_dim = len(proprio.mean if proprio else ())
        self.add_heads(settings.vlm_config.text_config.hidden_size, proprio_dim, settings.dit_config.hidden_size)
        if config.expert_only:
            self.model.model.vlm.requires_grad_(False)
        self._freeze_what_no_action_depends_on()

    def set_instructions(self, instructions: Sequence[str]) -> None:
        if not instructions:
            raise ValueError("a policy needs at least one instruction")
        prompts = [self._prompt(text) for text in instructions]
        vision = self._settings.vlm_config.vision_config
        images = self.views * (vision.image_size // vision.patch_size) ** 2
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), images + longest), _PAD)
        kept = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, :images] = self._settings.vlm_config.image_token_id
            ids[row, images : images + len(prompt)] = torch.tensor(prompt)
            kept[row, : images + len(prompt)] = 1
        device = next(self.parameters()).device
        self.register_buffer("text_ids", ids.to(device), persistent=False)
        self.register_buffer("text_kept", kept.to(device), persistent=False)
        self.instructions = tuple(instructions)

    def learn_words(self, texts: Sequence[str]) -> None:
        if self.input_format.prompt == "words":
            self.tokenizer = with_words_of(self.tokenizer, texts, _text_ids(self._settings))

    def tells_apart(self, texts: Sequence[str]) -> bool:
        return len({tuple(self._prompt(text)) for text in texts}) == len(texts)

    def set_statistics(self, actions: Array, proprio: Array) -> None:
        self.action_statistics = Statistics.of(actions)
        self.proprio_statistics = Statistics.of(proprio) if self.proprio_statistics else None

    def varying_actions(self) -> Array:
        return self.action_statistics.varies

    def normalize_actions(self, actions: Array) -> Array:
        return self.action_statistics.normalize(actions)

    def decode(self, record: Mapping[str, Array]) -> Array:
        return self.action_statistics.denormalize(record["actions"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keeps frequencies in float32 when weights change their dtype: rounding would blur positions and times."""
        exact = {name: buffer for name, buffer in self.named_buffers() if buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            path, _, last = name.rpartition(".")
            owner = self.get_submodule(path)
            setattr(owner, last, buffer.to(getattr(owner, last).device))
        return self

    def _prompt(self, text: str) -> list[int]:
        return self.input_format.prompt_ids(self.tokenizer, text)

    @property
    def _settings(self) -> Any:
        """The library's ``PI0Config``, whose parts are typed as mappings or records."""
        return self.model.config

    def read(self, seen: PolicyInput) -> _Prefix:
        """Run the vision-language model, once for all denoising steps."""
        if not self.instructions:
            raise RuntimeError("call set_instructions before the first forward pass")
        if seen.images.ndim != 5 or seen.images.shape[1] != self.views or seen.images.dtype != torch.uint8:
            found = f"{seen.images.dtype} {list(seen.images.shape)}"
            raise ValueError(f"images: expected uint8 [N, {self.views}, H, W, 3], found {found}")
        kept, dtype = self.text_kept[seen.task.long()], self.model.action_out_proj.weight.dtype
        pixels = self._pixels(seen.images).to(dtype)
        cameras = torch.ones(pixels.shape[:2], dtype=torch.bool, device=pixels.device)
        embedded = self.model.model.embed_prefix(self.text_ids[seen.task.long()], pixels, cameras)
        output = self.model.model.vlm(
            inputs_embeds=embedded,
            attention_mask=kept,
            position_ids=kept.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(kept),  # every token sees every other
            use_cache=True,
        )
        hidden = output.last_hidden_state * kept.unsqueeze(-1)
        features = hidden.sum(1) / kept.sum(1, keepdim=True)
        proprio = self._normalized_proprio(seen.proprio)
        state = F.pad(proprio, (0, self._settings.max_state_dim - proprio.shape[1])).to(dtype)
        return _Prefix(features, proprio, output.past_key_values, kept, state)

    def _pixels(self, images: Tensor) -> Tensor:
        """float32 [N, V, 3, S, S] in [-1, 1]."""
        size = self._settings.vlm_config.vision_config.image_size
        pixels = images.flatten(0, 1).permute(0, 3, 1, 2).float()
        if pixels.shape[-1] != size:
            smooth = self.input_format.antialias
            pixels = F.interpolate(pixels, size=(size, size), mode="bilinear", antialias=smooth, align_corners=False)
        return (pixels / 127.5 - 1.0).unflatten(0, images.shape[:2])

    def _normalized_proprio(self, proprio: Tensor) -> Tensor:
        if self.proprio_statistics is None:
            return proprio.new_zeros(len(proprio), 0)
        mean, std = (constant(x, proprio.device) for x in (self.proprio_statistics.mean, self.proprio_statistics.scale))
        return (proprio - mean) / std

    def velocity(self, prefix: FlowPrefix, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(prefix, _Prefix)
        model, horizon = self.model, self._settings.chunk_size
        embedded = model.embed_action_time(prefix.state, x.to(prefix.state.dtype), time)
        output = model.model(action_embeds=embedded, attention_mask=prefix.attended, past_key_values=prefix.cache)
        prefix.cache.crop(-embedded.shape[1])  # steps do not see each other
        hidden = output.last_hidden_state[:, -horizon:]
        return model.action_out_proj(hidden).float(), hidden

    def _freeze_what_no_action_depends_on(self) -> None:
        """The last layer of the vision-language model gives keys and values; what follows feeds the value head only."""
        language = self.model.model.vlm.language_model
        last = language.layers[-1]
        for part in (
            last.self_attn.q_proj,
            last.self_attn.o_proj,
            last.mlp,
            last.post_attention_layernorm,
            language.norm,
        ):
            part.requires_grad_(False)


def make_tokenizer(texts: Sequence[str], model_config: PI0Config) -> Tokenizer:
    """A word-level tokenizer of instructions. Raises ValueError for too many words."""
    return build_word_tokenizer(texts, _text_ids(model_config), special=SPECIAL_WORDS)


def _text_ids(model_config: PI0Config) -> int:
    language: Any = model_config.vlm_config
    return int(language.text_config.vocab_size) - 1  # the last id is the image token
