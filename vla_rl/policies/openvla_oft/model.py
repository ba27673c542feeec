"""OpenVLA-OFT with discrete actions; one class for all sizes.

    images ─► DINOv2 ┐                                      <s> [patches][proprio] prompt 0 0 ... 0 </s> <pad>
           └► SigLIP ┴► projector ─► patch tokens ──────►   └──────────── Llama, all see all ─────────────┘
    instruction ─► prompt tokens                                              │ │ │
                                                     the last prompt token ───┘ └─┴─ and the placeholders after it
                                                     predicts action number 0        predict numbers 1, 2, ...

Sources: OpenVLA (arXiv:2406.09246); parallel decoding: OpenVLA-OFT (arXiv:2502.19645); log-probabilities over the 256
action ids at the sampling temperature: SimpleVLA-RL (arXiv:2509.09674).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    LlamaConfig,
    LlamaModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from vla_rl.core.records import Array, Record
from vla_rl.policies.base.policy import Decisions, Policy, PolicyInput, PolicyOutput
from vla_rl.policies.base.value_head import ValueHead
from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
from vla_rl.policies.openvla_oft.architecture import NUM_BINS, Architecture
from vla_rl.policies.openvla_oft.images import prepare_images
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer


class ActionHead(nn.Linear):
    """``lm_head`` with the weights of the whole vocabulary; ``forward`` computes the logits of the action ids only.

    The slice is inside ``forward``, so that wrappers which gather parameters (ZeRO-3) see the access.
    """

    def __init__(self, architecture: Architecture, in_features: int) -> None:
        super().__init__(in_features, architecture.padded_vocab_size, bias=False)
        self.first, self.last = architecture.text_vocab_size, architecture.vocab_size
        self.in_float32 = False  # whether to compute in float32, whatever the dtype of the weights
        nn.init.normal_(self.weight, std=architecture.llm.initializer_range)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., in_features] -> [..., 256]; ids descend with the action, bins ascend."""
        weight = self.weight[self.first : self.last].flip(0)
        return F.linear(hidden.float(), weight.float()) if self.in_float32 else F.linear(hidden, weight)


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


class OpenVLAOFT(Policy):
    """See ``Policy``. A record holds the tokens of the chunk: uint8 [N, K, A], the bin of each action number."""

    text_ids: Tensor  # int64 [tasks, L]: prompt, placeholders, </s>, padding
    text_kept: Tensor  # bool [tasks, L]: false where the embedding is replaced by zero
    attended: Tensor  # bool [tasks, S]: false at the padding of the whole sequence
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
        self.codec = codec
        self.tokenizer = tokenizer
        self.proprio_bounds = proprio
        self.adapted: dict[str, Any] = {}  # layers with an adapter by path, filled by ``add_adapters``
        self.dino = _build_dino(architecture)
        self.siglip = _build_siglip(architecture)
        dino, siglip, width = architecture.dino.width, architecture.siglip.width, architecture.llm.width
        self.projector = Projector(dino + siglip, architecture.projector_hidden, width, width)
        self.proprio_projector = Projector(architecture.proprio_dim, width, width) if architecture.proprio_dim else None
        self.language_model = _build_llama(architecture)
        self.lm_head = ActionHead(architecture, width)
        self.value_head = ValueHead(architecture.llm.width + architecture.proprio_dim, *architecture.value_hidden)
        self.value_time = True  # whether the value head reads the elapsed time

    def set_instructions(self, instructions: Sequence[str]) -> None:
        """See ``Policy.set_instructions``. Raises ValueError also for a wrong tokenizer."""
        if not instructions:
            raise ValueError("a policy needs at least one instruction")
        arch = self.architecture
        prompts = [self.tokenizer.encode(text) for text in instructions]
        tail = [arch.pad_id] * arch.action_tokens + [arch.eos_id]  # the placeholders' ids do not matter
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest + len(tail)), arch.pad_id)
        kept = torch.zeros_like(ids, dtype=torch.bool)
        valid = torch.zeros_like(kept)
        for row, prompt in enumerate(prompts):
            end = len(prompt) + len(tail)
            ids[row, :end] = torch.tensor(prompt + tail)
            kept[row, : len(prompt)] = True
            kept[row, end - 1] = True
            valid[row, :end] = True
        vision = torch.ones(len(prompts), arch.vision_tokens, dtype=torch.bool)
        buffers = {
            "text_ids": ids,
            "text_kept": kept,
            "attended": torch.cat([valid[:, :1], vision, valid[:, 1:]], dim=1),
            "prompt_length": torch.tensor([len(prompt) for prompt in prompts]),
        }
        device = self.language_model.rotary_emb.inv_freq.device  # weights may be meta tensors, buffers never are
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor.to(device), persistent=False)
        self.instructions = tuple(instructions)

    def forward(
        self, seen: PolicyInput, record: Mapping[str, Tensor], temperature: float, detach_value: bool = True
    ) -> PolicyOutput:
        """See ``Policy.forward``. The record's tokens: uint8 [N, K, A]."""
        logits, state = self.distribution(seen, temperature)
        values, features = self._values(state, seen, detach_value)
        return PolicyOutput(token_logprobs(logits, record["tokens"]), token_entropy(logits), values, features)

    @torch.no_grad()
    def act(self, seen: PolicyInput, draws: Mapping[str, Tensor], greedy: Tensor, temperature: float) -> Decisions:
        """See ``Policy.act``. The draws' uniforms: float32 [N, K, A]; greedy rows take the most likely bins."""
        logits, state = self.distribution(seen, temperature)
        sampled = sample_tokens(logits, draws["uniforms"])
        tokens = torch.where(greedy[:, None, None], logits.argmax(-1), sampled)
        values, _ = self._values(state, seen, detach_value=True)
        return Decisions({"tokens": tokens.to(torch.uint8)}, token_logprobs(logits, tokens), values)

    def imitation_loss(
        self, seen: PolicyInput, actions: Array, mask: Tensor, rng: np.random.Generator, smoothing: float
    ) -> Tensor:
        """See ``Policy.imitation_loss``: cross-entropy with the demonstrated bins, at temperature 1."""
        logits, _ = self.distribution(seen, temperature=1.0)
        tokens = torch.from_numpy(self.codec.encode(actions)).to(logits.device)
        return smoothed_cross_entropy(logits, tokens, mask, smoothing)

    def encode(self, actions: Array, rng: np.random.Generator) -> Record:
        return {"tokens": self.codec.encode(actions)}

    def decode(self, record: Mapping[str, Array]) -> Array:
        return self.codec.decode(record["tokens"])

    def normalized_actions(self, record: Mapping[str, Array]) -> Array:
        return (record["tokens"].astype(np.float32) + 0.5) / (NUM_BINS / 2) - 1

    @property
    def has_reference(self) -> bool:
        return bool(self.adapted)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """See ``Policy.reference``: the adapters are switched off."""
        if not self.adapted:
            super().reference()
        try:
            for layer in self.adapted.values():
                layer.enable_adapters(False)
            yield
        finally:
            for layer in self.adapted.values():
                layer.enable_adapters(True)

    def value_parameters(self) -> Iterator[nn.Parameter]:
        return self.value_head.parameters()

    def distribution(self, seen: PolicyInput, temperature: float) -> tuple[Tensor, Tensor]:
        """Logits over the bins, float32 [N, K, A, 256], divided by the temperature, and the state [N, width].

        Bins ascend with the action. The state is the hidden state that predicts the first action number.
        """
        self._check_inputs(seen.images, seen.proprio, temperature)
        arch = self.architecture
        task = seen.task.long()
        hidden = self._hidden_states(seen.images, seen.proprio, task)
        last_prompt = arch.vision_tokens + self.prompt_length[task] - 1
        predicting = last_prompt[:, None] + torch.arange(arch.action_tokens, device=hidden.device)
        rows = torch.arange(len(task), device=hidden.device)
        features = hidden[rows[:, None], predicting]
        logits = self.lm_head(features).float() / temperature
        return logits.unflatten(1, (arch.chunk_size, arch.action_dim)), features[:, 0]

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

    def _hidden_states(self, images: Tensor, proprio: Tensor, task: Tensor) -> Tensor:
        """[N, S, width] after the last norm of the language model."""
        text = self.language_model.embed_tokens(self.text_ids[task])
        text = text * self.text_kept[task].unsqueeze(-1)
        sequence = [text[:, :1], self._patch_tokens(images)]
        if self.proprio_projector is not None and self.proprio_bounds is not None:
            sequence.append(self.proprio_projector(self._normalized(self.proprio_bounds, proprio)).unsqueeze(1))
        embeddings = torch.cat([*sequence, text[:, 1:]], dim=1)
        count, length, _ = embeddings.shape
        # Llama adds its causal mask to any mask but a 4-D one, which it passes on unchanged.
        mask = self.attended[task][:, None, None, :].expand(count, 1, length, length)
        positions = torch.arange(length, device=embeddings.device).unsqueeze(0)
        output = self.language_model(
            inputs_embeds=embeddings, attention_mask=mask, position_ids=positions, use_cache=False
        )
        return output.last_hidden_state

    def _patch_tokens(self, images: Tensor) -> Tensor:
        """[N, V * patches, width], view after view."""
        arch = self.architecture
        for_dino, for_siglip = prepare_images(
            images.flatten(0, 1), arch.image_size, arch.center_crop, arch.dino_mean, arch.dino_std
        )
        prefix = 1 + arch.dino_registers
        dino = self.dino(for_dino.to(self.lm_head.weight.dtype)).last_hidden_state[:, prefix:]
        siglip = self.siglip(for_siglip.to(self.lm_head.weight.dtype)).last_hidden_state
        tokens = self.projector(torch.cat([dino, siglip], dim=-1))
        return tokens.unflatten(0, (-1, arch.views)).flatten(1, 2)

    def _normalized(self, bounds: Bounds, proprio: Tensor) -> Tensor:
        """[N, P] in [-1, 1], in the dtype of the weights; computed in float32."""
        scale, shift = (torch.tensor(row, device=proprio.device) for row in bounds.affine())
        return (proprio.float() * scale + shift).clamp(-1, 1).to(self.lm_head.weight.dtype)

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


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """float32 [N, K, A]: log-probability of each token. Sampler and learner both use this function."""
    logits = logits.float()
    chosen = logits.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(-1)


def token_entropy(logits: Tensor) -> Tensor:
    """float32 [N, K, A]: entropy of each token's distribution, in nats."""
    logprobs = logits.float().log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def smoothed_cross_entropy(logits: Tensor, tokens: Tensor, mask: Tensor, smoothing: float) -> Tensor:
    """Mean cross-entropy with the demonstrated bins.

    Args:
        logits: [N, K, A, 256].
        tokens: uint8 [N, K, A].
        mask: bool [N, K], false after the end of the demonstration.
        smoothing: standard deviation, in bins, of the target, a normal distribution around the demonstrated bin
            (a neighbouring bin is nearly the same action); 0: that bin only.
    """
    if smoothing == 0:
        losses = F.cross_entropy(logits.flatten(0, 2), tokens.long().flatten(), reduction="none").view(tokens.shape)
    else:
        distance = torch.arange(logits.shape[-1], device=logits.device) - tokens.long().unsqueeze(-1)
        target = torch.softmax(-0.5 * (distance / smoothing) ** 2, dim=-1)
        losses = -(target * F.log_softmax(logits, dim=-1)).sum(-1)
    weights = mask.unsqueeze(-1).expand_as(losses).to(losses.dtype)
    return (losses * weights).sum() / weights.sum()


def sample_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [N, K, A]: the bin at which the cumulative distribution passes the uniform number (inverse transform).

    Sums in float64, so that rounding cannot choose a bin of probability zero.
    """
    cumulative = logits.float().softmax(-1).double().cumsum(-1)
    threshold = uniforms.double().unsqueeze(-1) * cumulative[..., -1:]
    return (cumulative <= threshold).sum(-1).clamp(max=NUM_BINS - 1)


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
    return LlamaModel(config)
