"""What all OpenVLA policies share: vision towers, projector, language model, value head; one class for all sizes.

    images ─► DINOv2 ┐                                      <s> [patches][proprio] prompt <pad>  chunk
           └► SigLIP ┴► projector ─► patch tokens ──────►   └─────────────── Llama ─────────────────┘
    instruction ─► prompt tokens                                                  │  see ``decoding``
                                                     the last prompt token ───────┘  for the others
                                                     predicts action number 0; the value head reads it, too

Sources: OpenVLA (arXiv:2406.09246); OpenVLA-OFT (arXiv:2502.19645); the place of the value head: RL4VLA
(arXiv:2505.19789).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    LlamaConfig,
    LlamaModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from vla_rl.core.records import Array
from vla_rl.policies.base.constants import constant
from vla_rl.policies.base.policy import Policy, PolicyInput
from vla_rl.policies.base.value_head import ValueHead
from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
from vla_rl.policies.openvla_oft.architecture import Architecture
from vla_rl.policies.openvla_oft.decoding import Prefix, make_decoding
from vla_rl.policies.openvla_oft.film import FilmDinoLayer, FilmSiglipLayer
from vla_rl.policies.openvla_oft.images import prepare_images
from vla_rl.policies.openvla_oft.partial_layers import compute_what_is_needed
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer


class Projector(nn.Module):
    """Linear layers ``fc1``, ``fc2``, ... from ``widths[0]`` to ``widths[-1]`` features, with GELU between them."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        for number, (inputs, outputs) in enumerate(pairwise(widths), 1):
            self.add_module(f"fc{number}", nn.Linear(inputs, outputs))

    def forward(self, features: Tensor) -> Tensor:
        first, *others = self.children()
        hidden = first(features)
        for layer in others:
            hidden = layer(F.gelu(hidden))
        return hidden


class OpenVLA(Policy):
    """See ``Policy``. All but the head that makes actions of hidden states, which each kind of policy adds."""

    text_ids: Tensor  # int64 [tasks, P]: prompt and padding
    attended: Tensor  # bool [tasks, L]: false at the padding of <s>, images, proprioception and prompt
    prompt_length: Tensor  # int64 [tasks]

    def __init__(
        self, architecture: Architecture, codec: ActionCodec, tokenizer: PromptTokenizer, proprio: Bounds | None = None
    ) -> None:
        """A policy with random weights. ``proprio``: statistics that normalize proprioception.

        Raises ValueError if the statistics do not fit the architecture's dimensions.
        """
        super().__init__()
        _check_statistics(architecture, codec, proprio)
        self.architecture = architecture
        self.decoding = make_decoding(architecture)
        self.codec = codec
        self.tokenizer = tokenizer
        self.proprio_bounds = proprio
        self.adapted: dict[str, Any] = {}  # layers with an adapter by path, filled by ``add_adapters``
        self.goes_on = False  # whether adapters began as a checkpoint's: the policy without them is another one
        self.merge_to_act: Callable[[], None] | None = None  # set where ``policy.lora`` asks for it
        self.dino = _build_dino(architecture)
        self.siglip = _build_siglip(architecture)
        dino, siglip, width = architecture.dino.width, architecture.siglip.width, architecture.llm.width
        self.projector = Projector(dino + siglip, architecture.projector_hidden, width, width)
        self.proprio_projector = Projector(architecture.proprio_dim, width, width) if architecture.proprio_dim else None
        self.language_model = _build_llama(architecture)
        self.add_head()
        self.value_head = ValueHead(architecture.llm.width + architecture.proprio_dim, *architecture.value_hidden)
        self.value_time = True  # whether the value head reads the elapsed time

    def set_instructions(self, instructions: Sequence[str]) -> None:
        """See ``Policy.set_instructions``. Raises ValueError also for a wrong tokenizer."""
        if not instructions:
            raise ValueError("a policy needs at least one instruction")
        prompts = [torch.tensor(self.tokenizer.encode(text)) for text in instructions]
        ids = pad_sequence(prompts, batch_first=True, padding_value=self.architecture.pad_id)
        kept = pad_sequence([torch.ones_like(prompt, dtype=torch.bool) for prompt in prompts], batch_first=True)
        vision = torch.ones(len(prompts), self.architecture.vision_tokens, dtype=torch.bool)
        buffers = {
            "text_ids": ids,
            "attended": torch.cat([kept[:, :1], vision, kept[:, 1:]], dim=1),
            "prompt_length": kept.sum(1),
        }
        device = self.language_model.rotary_emb.inv_freq.device  # weights may be meta tensors, buffers never are
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor.to(device), persistent=False)
        self.instructions = tuple(instructions)

    def learn_words(self, texts: Sequence[str]) -> None:
        self.tokenizer = self.tokenizer.with_words_of(texts)

    def tells_apart(self, texts: Sequence[str]) -> bool:
        return len({tuple(self.tokenizer.encode(text)) for text in texts}) == len(texts)

    def set_statistics(self, actions: Array, proprio: Array) -> None:
        """Percentiles, as OpenVLA's. Raises ValueError if they do not fit the architecture's dimensions."""
        codec = self.codec.of_actions(actions)
        bounds = Bounds.from_samples(proprio) if self.proprio_bounds is not None else None
        _check_statistics(self.architecture, codec, bounds)
        self.codec, self.proprio_bounds = codec, bounds

    @abstractmethod
    def add_head(self) -> None:
        """Add the modules that make actions of hidden states."""

    @abstractmethod
    def compute_head_in_float32(self, enabled: bool) -> None:
        """Whether the last layer that predicts actions computes in float32, whatever the dtype of the weights."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.language_model.norm.weight.dtype

    @property
    def whole_parts(self) -> tuple[nn.Module, ...]:
        """Parts that are trained in full where the rest has adapters."""
        return (self.value_head,)

    @property
    def has_reference(self) -> bool:
        return not self.goes_on and any(not layer.merged for layer in self.adapted.values())

    @contextmanager
    def reference(self) -> Iterator[None]:
        """See ``Policy.reference``: the adapters are switched off."""
        if not self.has_reference:
            super().reference()
        try:
            for layer in self.adapted.values():
                layer.enable_adapters(False)
            yield
        finally:
            for layer in self.adapted.values():
                layer.enable_adapters(True)

    def prepare_to_act(self) -> None:
        if self.merge_to_act is not None:
            self.merge_to_act()

    def _states(self, seen: PolicyInput, temperature: float, tokens: Tensor | None = None) -> Tensor:
        """Hidden states [N, K * A, width] that predict the action numbers. ``tokens`` as in ``Decoding.states``."""
        return self.decoding.states(self.language_model, self._prefix(seen, temperature), tokens)

    def _chunk(self, numbers: Tensor) -> Tensor:
        """[N, K * A, ...] -> [N, K, A, ...]."""
        return numbers.unflatten(1, (self.architecture.chunk_size, self.architecture.action_dim))

    def _values(self, state: Tensor, seen: PolicyInput, detach_value: bool) -> tuple[Tensor, Tensor]:
        """Values, float32 [N], and what they are computed from, without gradient [N, F]."""
        state = state.detach() if detach_value else state
        if self.proprio_bounds is not None:
            # The trunk keeps only what actions need; the gripper's width and height tell how an episode goes.
            state = torch.cat([state, self._normalized(self.proprio_bounds, seen.proprio)], dim=-1)
        time = seen.elapsed if self.value_time else torch.zeros_like(seen.elapsed)
        return self.value_head(state, time).float(), state.detach()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keeps the rotary frequencies in float32 when weights change their dtype: rounding would blur positions."""
        rotary = self.language_model.rotary_emb
        exact = rotary.inv_freq
        super()._apply(fn, recurse)
        rotary.inv_freq = exact.to(rotary.inv_freq.device)  # type: ignore[assignment]
        return self

    def _prefix(self, seen: PolicyInput, temperature: float) -> Prefix:
        """What the language model reads before the chunk. Raises as ``forward``."""
        self._check_inputs(seen.images, seen.proprio, temperature)
        task = seen.task.long()
        text = self.language_model.embed_tokens(self.text_ids[task])
        sequence = [text[:, :1], self._patch_tokens(seen.images, self._language(text, task))]
        if self.proprio_projector is not None and self.proprio_bounds is not None:
            sequence.append(self.proprio_projector(self._normalized(self.proprio_bounds, seen.proprio)).unsqueeze(1))
        embeddings = torch.cat([*sequence, text[:, 1:]], dim=1)
        length = self.prompt_length[task] + self.architecture.vision_tokens
        return Prefix(embeddings, self.attended[task], length)

    def _language(self, text: Tensor, task: Tensor) -> dict[str, Tensor]:
        """What FiLM reads, for each view: the mean over all tokens that are neither images nor actions."""
        arch = self.architecture
        if not arch.film:
            return {}
        kept = torch.arange(text.shape[1], device=text.device) < self.prompt_length[task].unsqueeze(1)
        embeddings, count = [text * kept.unsqueeze(-1)], self.prompt_length[task]
        if arch.stop_token:
            stop = self.language_model.embed_tokens(torch.full_like(task, arch.eos_id))
            embeddings, count = [*embeddings, stop.unsqueeze(1)], count + 1
        mean = torch.cat(embeddings, dim=1).sum(1) / count.unsqueeze(1).to(text.dtype)
        return {"language": mean.repeat_interleave(arch.views, dim=0)}

    def _patch_tokens(self, images: Tensor, language: Mapping[str, Tensor]) -> Tensor:
        """[N, V * patches, width], view after view."""
        arch = self.architecture
        for_dino, for_siglip = prepare_images(images.flatten(0, 1), arch)
        prefix = 1 + arch.dino_registers
        dino = self.dino(for_dino.to(self.dtype), **language).last_hidden_state[:, prefix:]
        siglip = self.siglip(for_siglip.to(self.dtype), **language).last_hidden_state
        tokens = self.projector(torch.cat([dino, siglip], dim=-1))
        return tokens.unflatten(0, (-1, arch.views)).flatten(1, 2)

    def _normalized(self, bounds: Bounds, proprio: Tensor) -> Tensor:
        """[N, P] in [-1, 1], in the dtype of the weights; computed in float32."""
        scale, shift = (constant(tuple(row), proprio.device) for row in bounds.affine())
        return (proprio.float() * scale + shift).clamp(-1, 1).to(self.dtype)

    def _check_inputs(self, images: Tensor, proprio: Tensor, temperature: float) -> None:
        arch = self.architecture
        if not self.instructions:
            raise RuntimeError("call set_instructions before the first forward pass")
        if images.ndim != 5 or images.shape[1] != arch.views or images.shape[-1] != 3 or images.dtype != torch.uint8:
            found = f"{images.dtype} {list(images.shape)}"
            raise ValueError(f"images: expected uint8 [N, {arch.views}, H, W, 3], found {found}")
        if arch.proprio_dim and proprio.shape != (len(images), arch.proprio_dim):
            raise ValueError(f"proprio: expected [{len(images)}, {arch.proprio_dim}], found {list(proprio.shape)}")
        if temperature <= 0:
            raise ValueError(f"temperature={temperature}: must be positive; for the most likely action use greedy rows")


def _check_statistics(architecture: Architecture, codec: ActionCodec, proprio: Bounds | None) -> None:
    if codec.action_dim != architecture.action_dim:
        raise ValueError(f"action statistics have {codec.action_dim} dimensions, action_dim={architecture.action_dim}")
    found = proprio.dim if proprio else 0
    if found != architecture.proprio_dim:
        raise ValueError(f"proprioception statistics have {found} dimensions, proprio_dim={architecture.proprio_dim}")


def _build_dino(architecture: Architecture) -> Dinov2WithRegistersModel:
    tower = architecture.dino
    config = Dinov2WithRegistersConfig(
        hidden_size=tower.width,
        num_hidden_layers=tower.layers - 1,
        num_attention_heads=tower.heads,
        mlp_ratio=tower.intermediate // tower.width,
        image_size=architecture.image_size,
        patch_size=architecture.patch_size,
        num_register_tokens=architecture.dino_registers,
    )
    config._attn_implementation = "sdpa"
    model = Dinov2WithRegistersModel(config)
    if architecture.film:
        language = architecture.llm.width
        model.encoder.layer = nn.ModuleList(FilmDinoLayer(config, language) for _ in model.encoder.layer)
    model.layernorm = nn.Identity()  # type: ignore[assignment]  # features are taken before it
    model.embeddings.register_parameter("mask_token", None)  # for masked pre-training only
    return model


def _build_siglip(architecture: Architecture) -> SiglipVisionModel:
    tower = architecture.siglip
    config = SiglipVisionConfig(
        hidden_size=tower.width,
        num_hidden_layers=tower.layers - 1,
        num_attention_heads=tower.heads,
        intermediate_size=tower.intermediate,
        image_size=architecture.image_size,
        patch_size=architecture.patch_size,
        hidden_act="gelu",  # the exact one, as in OpenVLA's backbone; the library defaults to the tanh form
        vision_use_head=False,
    )
    config._attn_implementation = "sdpa"
    model = SiglipVisionModel(config)
    if architecture.film:
        language = architecture.llm.width
        model.encoder.layers = nn.ModuleList(FilmSiglipLayer(config, language) for _ in model.encoder.layers)
    model.post_layernorm = nn.Identity()  # type: ignore[assignment]
    return model


def _build_llama(architecture: Architecture) -> LlamaModel:
    llm = architecture.llm
    config = LlamaConfig(
        vocab_size=architecture.padded_vocab_size,
        hidden_size=llm.width,
        intermediate_size=llm.intermediate,
        num_hidden_layers=llm.layers,
        num_attention_heads=llm.heads,
        rms_norm_eps=llm.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": llm.rope_theta},
        initializer_range=llm.initializer_range,
        pad_token_id=architecture.pad_id,
        bos_token_id=architecture.bos_id,
        eos_token_id=architecture.eos_id,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"  # eager attention would silently add a boolean mask to the scores
    model = LlamaModel(config)
    compute_what_is_needed(model)
    return model
