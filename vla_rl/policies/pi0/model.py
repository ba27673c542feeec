"""π0 (arXiv:2410.24164), from the library's classes, with a sampler whose samples have log-probabilities.

    images ─► SigLIP ─► projector ┐
    instruction ──────────────────┴► Gemma ─ keys and values ─┐            ┌► velocity ─► denoising step ─┐
    proprioception, noisy actions, time ─────────────────────► action expert      ▲                       │
                                                                                  └────── S times ────────┘

Random denoising steps have a normal distribution; their density is the policy's (πRL, arXiv:2510.25889). What the
other steps do is settled by the drawn numbers, so that it cancels in probability ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PI0Config, PI0ForConditionalGeneration

from vla_rl.core.records import Array, Record
from vla_rl.policies.base.constants import constant
from vla_rl.policies.base.policy import Decisions, Policy, PolicyInput, PolicyOutput
from vla_rl.policies.base.value_head import ValueHead
from vla_rl.policies.base.words import UNKNOWN, build_word_tokenizer, with_words_of
from vla_rl.policies.pi0 import flow
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.pi0.input_format import OWN_FORMAT, InputFormat
from vla_rl.policies.pi0.statistics import Statistics

SPECIAL_WORDS = ("<pad>", "<bos>", UNKNOWN, "<eol>")  # ids 0..3 of a word vocabulary
_PAD = 0
_VALUE_HIDDEN = 64, 32


@dataclass(frozen=True, slots=True)
class _Prefix:
    """What the action expert reads of N observations."""

    cache: Any  # keys and values of images and instruction
    attended: Tensor  # [N, L], 0 at padding
    state: Tensor  # [N, S], proprioception, normalized and padded
    features: Tensor  # [N, width], mean over the tokens


class Pi0(Policy):
    """See ``Policy``; for the record see ``Pi0Config.spec``."""

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
        width = self._settings.vlm_config.text_config.hidden_size
        self.value_head = ValueHead(width + len(proprio.mean if proprio else ()), *_VALUE_HIDDEN)
        expert = self._settings.dit_config.hidden_size
        self.noise_head = nn.Linear(expert, model_config.max_action_dim) if config.noise == "learned" else None
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

    @torch.no_grad()
    def act(self, seen: PolicyInput, draws: Mapping[str, Tensor], greedy: Tensor, temperature: float) -> Decisions:
        """See ``Policy.act``. Greedy rows take every step without noise."""
        config, prefix = self.config, self._read(seen)
        recorded, total = config.recorded_steps, config.denoise_steps
        last_first = total - recorded
        first = (draws["which"] * (last_first + 1)).long().clamp(max=last_first)
        x, chain, logprobs = draws["start"], [], []
        for number in range(total):
            step = torch.full_like(first, number)
            mean, deviation, velocity = self._step(prefix, x, step, temperature)
            place = (step - first).clamp(0, recorded - 1)
            noise = draws["steps"][torch.arange(len(x), device=x.device), place]
            random = (step >= first) & (step < first + recorded)
            plain = flow.ode_step(x, velocity, 1.0 / total)
            chosen = torch.where(greedy[:, None, None], plain, mean + deviation * noise)
            chain.append(x)
            logprobs.append(flow.gaussian_logprob(chosen, mean, deviation) * random[:, None, None])
            x = torch.where(random[:, None, None], chosen, plain)
        chain.append(x)
        window = first[:, None] + torch.arange(recorded + 1, device=x.device)
        rows = torch.arange(len(x), device=x.device)[:, None]
        record = {
            "chain": torch.stack(chain, dim=1)[rows, window],
            "first": first.int(),
            "actions": self._executed(x),
        }
        values = self._values(prefix, seen, detach_value=True)[0]
        return Decisions(record, self._executed(torch.stack(logprobs).sum(0)), values)

    def forward(
        self, seen: PolicyInput, record: Mapping[str, Tensor], temperature: float, detach_value: bool = True
    ) -> PolicyOutput:
        """See ``Policy.forward``."""
        prefix, chain = self._read(seen), record["chain"]
        logprobs, entropy = torch.zeros_like(chain[:, 0]), torch.zeros_like(chain[:, 0])
        for i in range(self.config.recorded_steps):
            mean, deviation, _ = self._step(prefix, chain[:, i], record["first"].long() + i, temperature)
            logprobs = logprobs + flow.gaussian_logprob(chain[:, i + 1], mean, deviation)
            entropy = entropy + flow.gaussian_entropy(deviation)
        values, features = self._values(prefix, seen, detach_value)
        return PolicyOutput(self._executed(logprobs), self._executed(entropy), values, features)

    def imitation_loss(
        self, seen: PolicyInput, actions: Array, mask: Tensor, rng: np.random.Generator, smoothing: float
    ) -> Tensor:
        """See ``Policy.imitation_loss``: flow matching, the squared error of the velocity at a random time."""
        target, prefix = torch.from_numpy(self._padded(actions)).to(seen.images.device), self._read(seen)
        drawn = 0.001 + 0.999 * rng.beta(1.5, 1.0, len(actions))  # of π0: near 1, noise, more often than near 0
        time = torch.from_numpy(drawn.astype(np.float32)).to(target)
        noise = torch.from_numpy(rng.standard_normal(target.shape, dtype=np.float32)).to(target)
        t = time[:, None, None]
        velocity, _ = self._velocity(prefix, t * noise + (1.0 - t) * target, time)
        errors = self._executed((velocity - (noise - target)) ** 2)
        weights = mask.unsqueeze(-1).expand_as(errors).to(errors.dtype)
        return (errors * weights).sum() / weights.sum()

    def encode(self, actions: Array, rng: np.random.Generator) -> Record:
        """See ``Policy.encode``: random steps on the straight way from noise to the actions. Their log-probability is a
        flow-matching loss at these times, up to factor and constant.
        """
        target, recorded = self._padded(actions), self.config.recorded_steps
        noise = rng.standard_normal(target.shape, dtype=np.float32)
        first = rng.integers(self.config.denoise_steps - recorded + 1, size=len(target)).astype(np.int32)
        number = first[:, None] + np.arange(recorded + 1)
        time = (1.0 - number / self.config.denoise_steps).astype(np.float32)[:, :, None, None]
        chain = time * noise[:, None] + (1.0 - time) * target[:, None]
        return {"chain": chain, "first": first, "actions": self.action_statistics.normalize(actions)}

    def decode(self, record: Mapping[str, Array]) -> Array:
        actions = self.action_statistics.denormalize(record["actions"])
        actions[..., -1] = actions[..., -1].clip(0.0, 1.0)  # the gripper
        return actions

    def normalized_actions(self, record: Mapping[str, Array]) -> Array:
        return record["actions"]

    def value_parameters(self) -> Iterator[nn.Parameter]:
        return self.value_head.parameters()

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

    def _read(self, seen: PolicyInput) -> _Prefix:
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
        state = self._normalized_proprio(seen.proprio)
        state = F.pad(state, (0, self._settings.max_state_dim - state.shape[1])).to(dtype)
        return _Prefix(output.past_key_values, kept, state, features)

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
        mean, std = (constant(x, proprio.device) for x in (self.proprio_statistics.mean, self.proprio_statistics.std))
        return (proprio - mean) / std

    def _velocity(self, prefix: _Prefix, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity, float32 [N, H, D], at ``x`` [N, H, D] and ``time`` [N], and the hidden states it comes from."""
        model, horizon = self.model, self._settings.chunk_size
        embedded = model.embed_action_time(prefix.state, x.to(prefix.state.dtype), time)
        output = model.model(action_embeds=embedded, attention_mask=prefix.attended, past_key_values=prefix.cache)
        prefix.cache.crop(-embedded.shape[1])  # steps do not see each other
        hidden = output.last_hidden_state[:, -horizon:]
        return model.action_out_proj(hidden).float(), hidden

    def _step(self, prefix: _Prefix, x: Tensor, number: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and deviation of random denoising steps [N], and the velocity; [N, H, D] each."""
        times, length = flow.step_times(self.config.denoise_steps, number, 1)
        time = times[:, 0]
        velocity, hidden = self._velocity(prefix, x, time)
        if self.noise_head is None:
            mean, deviation = flow.sde_step(x, velocity, time, length, self.config.noise_level)
            return mean, (temperature * deviation).expand_as(x), velocity
        low, high = np.log(self.config.noise_low), np.log(self.config.noise_high)
        deviation = torch.exp(low + (high - low) * torch.sigmoid(self.noise_head(hidden).float()))
        return flow.ode_step(x, velocity, length), temperature * deviation, velocity

    def _values(self, prefix: _Prefix, seen: PolicyInput, detach_value: bool) -> tuple[Tensor, Tensor]:
        features = prefix.features.detach() if detach_value else prefix.features
        state = torch.cat([features, self._normalized_proprio(seen.proprio).to(features.dtype)], dim=-1)
        time = seen.elapsed if self.config.value_time else torch.zeros_like(seen.elapsed)
        return self.value_head(state, time).float(), state.detach()

    def _executed(self, x: Tensor) -> Tensor:
        """[N, K, A] of [N, H, D]."""
        return x[:, : self.config.chunk_size, : len(self.action_statistics.mean)]

    def _padded(self, actions: Array) -> Array:
        """Normalized actions [n, H, D]: the last action is repeated, numbers that the simulator lacks are 0."""
        normalized = self.action_statistics.normalize(actions)
        more = self._settings.chunk_size - normalized.shape[1]
        longer = np.pad(normalized, ((0, 0), (0, more), (0, 0)), mode="edge")
        return np.pad(longer, ((0, 0), (0, 0), (0, self._settings.max_action_dim - normalized.shape[2])))

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
