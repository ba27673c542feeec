"""SmolVLA, π0 and π0.5 of the package lerobot, by their own code: read, denoised, trained, and saved as lerobot does.

lerobot's processors tokenize and normalize; its networks read the prefix and give velocities (``embed_prefix``,
``denoise_step``). Which parameters are trained is what the checkpoint's config.json says.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d
from safetensors.torch import load_file
from torch import Tensor

from vla_rl.core.actions import ActionSpace
from vla_rl.core.records import Array
from vla_rl.policies.base.checkpoint_folder import WEIGHTS, Tensors, write_checkpoint
from vla_rl.policies.base.flow_policy import FlowPolicy, FlowPrefix
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.base.prompts import check_cut_prompts
from vla_rl.policies.base.steering import read_steering, steered_files
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.lerobot.model import as_batch, cameras_of, open_checkpoint

VALUE_HEAD, METADATA = "value_head.safetensors", "metadata.json"
_TOKENS, _TOKENS_KEPT = "observation.language.tokens", "observation.language.attention_mask"
_STATE, _ACTION = "observation.state", "action"


@dataclass(frozen=True, slots=True)
class _Prefix(FlowPrefix):
    """The features are the mean over the tokens."""

    kept: Tensor  # bool [N, L]
    cache: Any  # keys and values
    state: Tensor  # [N, S], padded


def load_flow(
    config: LeRobotConfig, space: ActionSpace, seed: int, device: str, dtype: torch.dtype | None
) -> LeRobotFlow:
    """The policy of ``config.checkpoint``; ``seed`` draws a value head if the folder has none."""
    model, before, after = open_checkpoint(config, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = LeRobotFlow(config, space, model, before, after)
    heads = Path(str(config.checkpoint)) / VALUE_HEAD
    if heads.is_file():
        policy.load_state_dict(load_file(heads), strict=False)
    policy.load_state_dict(read_steering(heads.parent, policy.steering), strict=False)
    return policy.to(device, dtype or torch.float32)


class LeRobotFlow(FlowPolicy):
    """See ``FlowPolicy``."""

    def __init__(self, config: LeRobotConfig, space: ActionSpace, model: Any, before: Any, after: Any) -> None:
        super().__init__()
        self._space = space
        self.config, self.model, self._before, self._after = config, model.eval(), before, after
        settings = model.config
        self.model_lengths = settings.chunk_size, settings.max_action_dim
        self.action_dim = settings.output_features[_ACTION].shape[0]
        self._state_dim = settings.input_features[_STATE].shape[0]
        self._cameras = cameras_of(model)
        self._folder = Path(str(config.checkpoint))
        self.add_heads(_prefix_width(self._with_expert), self._state_dim, None)

    def train(self, mode: bool = True) -> LeRobotFlow:
        """Never switches lerobot's part: its dropout would make what was sampled unlikely."""
        super().train(mode)
        self.model.eval()
        return self

    def set_instructions(self, instructions: Sequence[str]) -> None:
        if not instructions:
            raise ValueError("a policy needs at least one instruction")
        seen = self._before({_STATE: torch.zeros(len(instructions), self._state_dim), "task": list(instructions)})
        rows = zip(instructions, seen[_TOKENS], seen[_TOKENS_KEPT].bool(), strict=True)
        prompts = {text: ids[kept].tolist() for text, ids, kept in rows}
        check_cut_prompts(prompts, self.model.config.tokenizer_max_length, str(self._folder))
        self.instructions = tuple(instructions)

    def set_statistics(self, *_: Any) -> NoReturn:
        raise RuntimeError("a policy of lerobot keeps the statistics in its processors: leave out sft.new_statistics")

    def read(self, seen: PolicyInput) -> _Prefix:
        if not self.instructions:
            raise RuntimeError("call set_instructions before the first forward pass")
        batch = self._before(as_batch(seen, self._cameras, self.instructions))
        prepare = getattr(self.model, "prepare_images", None) or self.model._preprocess_images
        images, masks = prepare(batch)
        state = self.model.prepare_state(batch) if hasattr(self.model, "prepare_state") else batch[_STATE]
        inputs = images, masks, batch[_TOKENS], batch[_TOKENS_KEPT]
        embed = self.model.model.embed_prefix
        with self._mixed():
            embedded, kept, blocks = embed(*inputs, **_if_taken(embed, state=state))
        attended = make_att_2d_masks(kept, blocks)
        if not hasattr(self.model.model, "vlm_with_expert"):
            attended = prepare_attention_masks_4d(attended)
            self._with_expert.paligemma.model.language_model.config._attn_implementation = "eager"
        with self._mixed():
            (hidden, _), cache = self._with_expert.forward(
                attention_mask=attended,
                position_ids=kept.cumsum(dim=1) - 1,
                past_key_values=None,
                inputs_embeds=[embedded.to(self._dtype), None],
                use_cache=True,
            )
        shown = kept.unsqueeze(-1).to(hidden.dtype)
        features = (hidden * shown).sum(1) / shown.sum(1)
        return _Prefix(features, batch[_STATE], kept, cache, state)

    def velocity(self, prefix: FlowPrefix, x: Tensor, time: Tensor) -> tuple[Tensor, None]:
        assert isinstance(prefix, _Prefix)
        step = self.model.model.denoise_step
        with self._mixed():
            found = step(
                prefix_pad_masks=prefix.kept,
                past_key_values=prefix.cache,
                x_t=x.to(self._dtype),
                timestep=time,
                **_if_taken(step, state=prefix.state),
            )
        return found.float(), None

    def normalize_actions(self, actions: Array) -> Array:
        rows = len(actions)
        batch = {
            _STATE: torch.zeros(rows, self._state_dim),
            "task": [""] * rows,
            _ACTION: torch.from_numpy(self._space.to_data(actions).astype(np.float32)),
        }
        normalized: Tensor = self._before(batch)[_ACTION]
        return normalized.float().cpu().numpy()

    def decode(self, record: Mapping[str, Array]) -> Array:
        actions: Tensor = self._after(torch.from_numpy(np.ascontiguousarray(record["actions"], np.float32)))
        return self._space.from_data(actions.float().cpu().numpy())

    def save(self, folder: str | Path, metadata: Mapping[str, Any]) -> None:
        """Write what lerobot loads, and the value head; see ``write_checkpoint``."""
        heads = {name: w for name, w in self.state_dict().items() if not name.startswith("model.")}
        weights = {
            WEIGHTS: Tensors(_once(self.model.state_dict()), {"format": "pt"}),
            **steered_files(VALUE_HEAD, heads),
        }
        texts: dict[str, Mapping | str] = {METADATA: metadata}
        for path in sorted(self._folder.iterdir()):
            if path.suffix == ".json" and path.name != METADATA:
                texts[path.name] = path.read_text(encoding="utf-8")
            elif path.suffix == ".safetensors" and path.name not in weights:
                weights[path.name] = Tensors(load_file(path))
        write_checkpoint(Path(folder), weights, texts)

    @property
    def _with_expert(self) -> Any:
        """No attribute: the state dict would hold its weights twice."""
        return getattr(self.model.model, "vlm_with_expert", None) or self.model.model.paligemma_with_expert

    def _mixed(self) -> torch.autocast:
        """lerobot mixes dtypes: it computes times and what leaves the expert in float32, whatever the weights are."""
        weight = self.model.model.action_out_proj.weight
        return torch.autocast(weight.device.type, torch.bfloat16, enabled=weight.dtype == torch.bfloat16)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.model.action_out_proj.weight.dtype
        return dtype


def _prefix_width(with_expert: Any) -> int:
    vlm = getattr(with_expert, "vlm", None) or with_expert.paligemma
    return int(vlm.config.text_config.hidden_size)


def _once(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied ones under their first name only, as ``save_pretrained`` writes them. The folder's own names do not tell:
    lerobot also reads files whose names lack "model.", and files without one of two that it takes for equal."""
    first = {(weights[name].data_ptr(), weights[name].shape): name for name in sorted(weights, reverse=True)}
    return {name: weights[name] for name in sorted(first.values())}


def _if_taken(function: Any, **values: Any) -> dict[str, Any]:
    """Those that the function has parameters for: π0 reads the state with the actions, SmolVLA before."""
    return {name: value for name, value in values.items() if name in inspect.signature(function).parameters}
