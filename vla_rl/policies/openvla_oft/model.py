"""OpenVLA-OFT with discrete actions; one class for all sizes.

    images ─► DINOv2 ┐                                      <s> [patches][proprio] prompt 0 0 ... 0 </s> <pad>
           └► SigLIP ┴► projector ─► patch tokens ──────►   └──────────── Llama, all see all ─────────────┘
    instruction ─► prompt tokens                                              │ │ │
                                                     the last prompt token ───┘ └─┴─ and the placeholders after it
                                                     predicts action number 0        predict numbers 1, 2, ...

Sources: OpenVLA (arXiv:2406.09246); parallel decoding: OpenVLA-OFT (arXiv:2502.19645); log-probabilities over the 256
action ids at the sampling temperature: SimpleVLA-RL (arXiv:2509.09674).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

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

from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
from vla_rl.policies.openvla_oft.architecture import NUM_BINS, Architecture
from vla_rl.policies.openvla_oft.images import prepare_images
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer

_VALUE_INIT_STD = 0.01  # so that values start near 0 for any features


@dataclass(frozen=True)  # no slots: ZeRO-3 looks for the output's tensors in its __dict__
class PolicyOutput:
    """Result of one forward pass for N observations."""

    logits: Tensor  # float32 [N, K, A, 256], already divided by the temperature; bins ascend with the action
    values: Tensor  # float32 [N]
    features: Tensor  # [N, F], what the value head reads of the state, without gradient


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


class ValueHead(nn.Sequential):
    """A value from the hidden state that predicts the first action number, proprioception if any, and elapsed time.

    Time is an input because returns depend on what is left of it: without it, states before a time limit that ends the
    episode are not Markov (arXiv:1712.00378). The layers are those of RL4VLA's value head (arXiv:2505.19789).
    """

    def __init__(self, inputs: int, first: int, second: int) -> None:
        reads, rates = nn.Linear(inputs, first), nn.Linear(second, 1, bias=False)
        nn.init.normal_(rates.weight, std=_VALUE_INIT_STD)
        super().__init__(reads, nn.GELU(), nn.Linear(first, second), nn.GELU(), rates)
        self.time = nn.Parameter(torch.zeros(first))  # learned from 0

    def forward(self, state: Tensor, elapsed: Tensor) -> Tensor:  # type: ignore[override]
        """[N, inputs], [N] -> [N]."""
        first, *others = self
        hidden = first(state) + elapsed.to(state.dtype).unsqueeze(-1) * self.time
        for layer in others:
            hidden = layer(hidden)
        return hidden.squeeze(-1)


class OpenVLAOFT(nn.Module):
    """The policy: maps uint8 images, proprioception and a task number to action distributions and a value.

    Call ``set_instructions``, which defines the task numbers, before the first forward pass.
    """

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
        self.instructions: tuple[str, ...] = ()
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
        """Task number i becomes ``instructions[i]``. Raises ValueError for none, or for a wrong tokenizer."""
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
        self,
        images: Tensor,
        proprio: Tensor,
        task: Tensor,
        elapsed: Tensor,
        temperature: float,
        detach_value: bool = True,
    ) -> PolicyOutput:
        """Distributions over the action chunk and the value of the state.

        Args:
            images: uint8 [N, V, H, W, 3].
            proprio: float32 [N, P], in physical units.
            task: integers [N], indices into the instructions.
            elapsed: float32 [N], share of the time limit that has passed; read by the value head alone.
            temperature: divides the logits; sampling and learning must use the same one.
            detach_value: stop gradients of the values at the value head.

        Raises ValueError for wrong shapes, RuntimeError before ``set_instructions``.
        """
        self._check_inputs(images, proprio, temperature)
        arch = self.architecture
        task = task.long()
        hidden = self._hidden_states(images, proprio, task)
        last_prompt = arch.vision_tokens + self.prompt_length[task] - 1
        predicting = last_prompt[:, None] + torch.arange(arch.action_tokens, device=hidden.device)
        rows = torch.arange(len(task), device=hidden.device)
        features = hidden[rows[:, None], predicting]
        logits = self.lm_head(features).float() / temperature
        state = features[:, 0].detach() if detach_value else features[:, 0]
        if self.proprio_bounds is not None:
            # The trunk keeps only what actions need; the gripper's width and height tell how an episode goes.
            state = torch.cat([state, self._normalized(self.proprio_bounds, proprio)], dim=-1)
        time = elapsed if self.value_time else torch.zeros_like(elapsed)
        values = self.value_head(state, time).float()
        return PolicyOutput(logits.unflatten(1, (arch.chunk_size, arch.action_dim)), values, state.detach())

    @torch.no_grad()
    def act(
        self,
        images: Tensor,
        proprio: Tensor,
        task: Tensor,
        elapsed: Tensor,
        uniforms: Tensor,
        greedy: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose an action chunk for each row; see ``forward`` for the first four arguments and the errors.

        Args:
            uniforms: float32 [N, K, A] in [0, 1); they determine the sample, so that a row's actions depend neither on
                the rest of its batch nor on a global random state.
            greedy: bool [N]; these rows take the most likely bins. Their log-probabilities are still those of sampling
                at ``temperature``.

        Returns:
            tokens uint8 [N, K, A], log-probabilities float32 [N, K, A], values float32 [N].
        """
        output = self.forward(images, proprio, task, elapsed, temperature)
        sampled = sample_tokens(output.logits, uniforms)
        tokens = torch.where(greedy[:, None, None], output.logits.argmax(-1), sampled)
        return tokens.to(torch.uint8), token_logprobs(output.logits, tokens), output.values

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Switch the adapters off inside the block: the policy acts as before training. The value head does not change.

        Raises RuntimeError without adapters, because training then overwrites the weights it started from.
        """
        if not self.adapted:
            raise RuntimeError("this policy has no adapters to switch off: set policy.lora, or keep a copy of it")
        try:
            for layer in self.adapted.values():
                layer.enable_adapters(False)
            yield
        finally:
            for layer in self.adapted.values():
                layer.enable_adapters(True)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name: all, or those of adapters and value head. A weight sync transfers these."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the value head."""
        return self.value_head.parameters()

    def trunk_parameters(self) -> Iterator[nn.Parameter]:
        """All other trainable parameters."""
        return (p for name, p in self.trained_parameters().items() if not name.startswith("value_head."))

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
        for_dino, for_siglip = prepare_images(images.flatten(0, 1), arch.image_size, arch.center_crop)
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
