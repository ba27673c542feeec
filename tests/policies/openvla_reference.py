"""OpenVLA as its publications define it, in plain torch with the published parameter names, and folders as published.

Independent of ``vla_rl``: the vision transformers are written from timm's definition, the language model is
transformers' LlamaForCausalLM. The library timm itself is not used, because it needs torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

HEADS = 16
VOCAB = 640  # unpadded; the last 256 ids are actions
FINAL = "\u2581"
MASK = [True] * 6 + [False]
STATISTICS = {
    "action": {
        "mean": [0.1] * 7,
        "q01": [-0.75, -0.5, -0.25, -0.125, -0.5, -0.25, 0.0],
        "q99": [0.5, 0.75, 1.0, 0.25, 0.125, 0.25, 1.0],
        "mask": MASK,
    },
    "proprio": {"q01": [-0.5] * 8, "q99": [0.75] * 8},
    "num_trajectories": 432,
}
OPENVLA_CODE = 'raise SystemExit("code of a checkpoint must not run")\n'
OFT_CODE = f"from prismatic.vla.constants import NUM_ACTIONS_CHUNK\n{OPENVLA_CODE}"


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(rows, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        weights = (q * (width // HEADS) ** -0.5 @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(rows, tokens, width))


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.rand(width))  # timm's gamma, renamed by OpenVLA

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, scaled: bool, language: int = 0) -> None:
        """``language``: width of what modulates the block (FiLM); 0: nothing does."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = Attention(width), Mlp(width, hidden)
        self.ls1, self.ls2 = (LayerScale(width) if scaled else nn.Identity() for _ in range(2))
        if language:
            self.scale, self.shift = nn.Linear(language, width), nn.Linear(language, width)

    def forward(self, x: Tensor, language: Tensor | None = None) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        if language is not None:
            x = x * (1 + self.scale(language)[:, None]) + self.shift(language)[:, None]
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)


class AttentionPool(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(1, 1, width))
        self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width, hidden)


class VisionTransformer(nn.Module):
    """timm's, with class token and registers (DINOv2, no position for either) or with attention pooling (SigLIP)."""

    def __init__(self, width: int, depth: int, hidden: int, size: int, registers: int, language: int) -> None:
        super().__init__()
        self.registers = registers
        if registers:
            self.cls_token = nn.Parameter(torch.randn(1, 1, width))
            self.reg_token = nn.Parameter(torch.randn(1, registers, width))
        self.pos_embed = nn.Parameter(torch.randn(1, (size // 14) ** 2, width))
        self.patch_embed = PatchEmbed(width, 14)
        self.blocks = nn.ModuleList(Block(width, hidden, registers > 0, language) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        if not registers:
            self.attn_pool = AttentionPool(width, hidden)

    def forward(self, pixels: Tensor, language: Tensor | None = None) -> Tensor:
        """Patch tokens after the second-to-last block, without a final norm."""
        x = self.patch_embed.proj(pixels).flatten(2).transpose(1, 2) + self.pos_embed
        prefix = [self.cls_token, self.reg_token] if self.registers else []
        x = torch.cat([*(token.expand(len(x), -1, -1) for token in prefix), x], dim=1)
        for block in self.blocks[:-1]:
            x = block(x, language)
        return x[:, 1 + self.registers :] if self.registers else x


class Projector(nn.Module):
    def __init__(self, vision: int, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(vision, 4 * vision), nn.Linear(4 * vision, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class Backbone(nn.Module):
    def __init__(self, dino: tuple[int, int, int], siglip: tuple[int, int, int], size: int, language: int) -> None:
        super().__init__()
        self.featurizer = VisionTransformer(*dino, size, 4, language)
        self.fused_featurizer = VisionTransformer(*siglip, size, 0, language)


class ReferenceOpenVLA(nn.Module):
    """``dino`` and ``siglip``: width, depth and hidden width. ``film``: whether the prompt modulates them."""

    def __init__(
        self,
        dino: tuple[int, int, int] = (32, 3, 64),
        siglip: tuple[int, int, int] = (48, 2, 80),
        size: int = 56,
        film: bool = False,
        **text_config: Any,
    ) -> None:
        super().__init__()
        self.size, self.text_config, self.film = size, text_config, film
        config = LlamaConfig(**text_config)
        self.vision_backbone = Backbone(dino, siglip, size, config.hidden_size if film else 0)
        config._attn_implementation = "eager"
        self.projector = Projector(dino[0] + siglip[0], config.hidden_size)
        self.language_model = LlamaForCausalLM(config)

    def get_input_embeddings(self) -> nn.Module:
        """peft asks models of transformers for these, and saves them whole beside an adapter of ``lm_head``."""
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def patches(
        self, images: Tensor, mean: Sequence[float], std: Sequence[float], prompt: Sequence[int] = ()
    ) -> Tensor:
        """uint8 [N, H, W, 3] of the model's size -> [N, patches, width]; FiLM reads the prompt and ``</s>``."""
        language = None
        if self.film:
            language = self.language_model.model.embed_tokens(torch.tensor([[*prompt, 2]])).mean(1)
        pixels = images.permute(0, 3, 1, 2).float() / 255
        normal = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        backbone = self.vision_backbone
        return self.projector(
            torch.cat([backbone.featurizer(normal, language), backbone.fused_featurizer(2 * pixels - 1, language)], -1)
        )

    def parallel_states(
        self, patches: Tensor, prompt: Sequence[int], actions: int, *, proprio: Tensor | None = None, stop: bool = True
    ) -> Tensor:
        """OpenVLA-OFT's parallel decoding of one prompt: hidden states [N, actions, width].

        ``proprio``: [N, width], the token that follows the patches. ``stop``: whether ``</s>`` ends the sequence.
        """
        embed = self.language_model.model.embed_tokens
        text = embed(torch.tensor(prompt)).expand(len(patches), -1, -1)
        seen = [patches] if proprio is None else [patches, proprio.unsqueeze(1)]
        empty = torch.zeros(len(patches), actions, text.shape[-1])
        ends = [embed(torch.tensor([2])).expand(len(patches), -1, -1)] if stop else []
        x = torch.cat([text[:, :1], *seen, text[:, 1:], empty, *ends], dim=1)
        mask = torch.zeros(len(x), 1, x.shape[1], x.shape[1])  # added to the scores: everything sees everything
        hidden = self.language_model.model(inputs_embeds=x, attention_mask=mask).last_hidden_state
        last = x.shape[1] - len(ends) - actions - 1
        return hidden[:, last : last + actions]

    def parallel_logits(self, patches: Tensor, prompt: Sequence[int], actions: int, **options: Any) -> Tensor:
        """The logits of the action ids: [N, actions, 256], bins ascending with the action."""
        states = self.parallel_states(patches, prompt, actions, **options)
        return self.language_model.lm_head(states)[..., VOCAB - 256 : VOCAB].flip(-1)

    def autoregressive_logits(self, patches: Tensor, prompt: Sequence[int], actions: Sequence[int]) -> Tensor:
        """OpenVLA's logits of one row's action ids, each after the ones before it: [actions, 256], bins ascending."""
        embed = self.language_model.model.embed_tokens
        text = embed(torch.tensor([*prompt, *actions]))
        logits = self.language_model(inputs_embeds=torch.cat([text[:1], patches, text[1:]]).unsqueeze(0)).logits
        last = len(patches) + len(prompt) - 1
        return logits[0, last : last + len(actions), VOCAB - 256 : VOCAB].flip(-1)

    def generate(self, patches: Tensor, prompt: Sequence[int], actions: int) -> list[int]:
        """The ids that transformers' ``generate`` finds most likely, as RL4VLA and RLinf restrict them to actions."""
        text = self.language_model.model.embed_tokens(torch.tensor(prompt))
        ids = self.language_model.generate(
            inputs_embeds=torch.cat([text[:1], patches, text[1:]]).unsqueeze(0),
            max_new_tokens=actions,
            do_sample=False,
            eos_token_id=-1,
            logits_processor=LogitsProcessorList([OnlyActions()]),
        )
        return ids[0].tolist()


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())


class MlpResNet(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1, self.fc1 = nn.LayerNorm(inputs), nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(2))
        self.layer_norm2, self.fc2 = nn.LayerNorm(width), nn.Linear(width, outputs)


class L1Head(nn.Module):
    """OpenVLA-OFT's: the states of an action's numbers side by side, normalized, and two residual blocks."""

    def __init__(self, width: int, action_dim: int) -> None:
        super().__init__()
        self.model = MlpResNet(width * action_dim, width, action_dim)

    def forward(self, states: Tensor, chunk_size: int) -> Tensor:
        """[N, chunk_size * action_dim, width] -> [N, chunk_size, action_dim]."""
        layers = self.model
        x = torch.relu(layers.fc1(layers.layer_norm1(states.reshape(len(states), chunk_size, -1))))
        for block in layers.mlp_resnet_blocks:
            x = block.ffn(x) + x
        return layers.fc2(layers.layer_norm2(x))


class OnlyActions(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        allowed[:, VOCAB - 256 : VOCAB] = True
        return scores.masked_fill(~allowed, -torch.inf)


def twin(seed: int = 0, dtype: torch.dtype = torch.float32, film: bool = False) -> ReferenceOpenVLA:
    """OpenVLA with small widths. Norms are not ones, so that a norm left out or confused would show."""
    torch.manual_seed(seed)
    model = ReferenceOpenVLA(
        film=film,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCAB + 64,
        pad_token_id=VOCAB,
        rms_norm_eps=1e-3,
        rope_theta=500.0,
        initializer_range=0.2,
    ).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model.to(dtype)


def llama_tokenizer() -> Tokenizer:
    """Built as Llama's: byte pairs with byte fallback, spaces replaced by U+2581 and one put in front, <s> added."""
    symbols = [*["<unk>", "<s>", "</s>"], *(f"<0x{byte:02X}>" for byte in range(256))]
    symbols += [*(chr(code) for code in range(33, 127)), FINAL]
    vocabulary = {symbol: number for number, symbol in enumerate(dict.fromkeys(symbols))}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = Normalizers([Prepend(FINAL), Replace(" ", FINAL)])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def config_json(model: ReferenceOpenVLA, norm_stats: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "arch_specifier": "no-align+fused-gelu-mlp",
        "architectures": ["OpenVLAForActionPrediction"],
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [model.size, model.size],
        "llm_backbone_id": "llama2-7b-pure",
        "llm_max_length": 2048,
        "model_type": "openvla",
        "n_action_bins": 256,
        "norm_stats": norm_stats,
        "output_projector_states": False,
        "pad_to_multiple_of": 64,
        "pad_token_id": model.text_config["pad_token_id"],
        "text_config": {"model_type": "llama", "torch_dtype": "bfloat16", **model.text_config},
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "timm_override_act_layers": [None, None],
        "torch_dtype": "bfloat16",
        "use_fused_vision_backbone": True,
        "vision_backbone_id": "dinosiglip-vit-so-224px",
    }


def write_folder(
    folder: Path,
    model: ReferenceOpenVLA,
    *,
    norm_stats: Mapping[str, Any] | None = None,
    statistics: Mapping[str, Any] | None = None,
    shards: int = 1,
    extra: Mapping[str, Tensor] | None = None,
    code: str | None = OFT_CODE,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Files as published.

    Args:
        shards: more than 1 as openvla-7b, with an index.
        statistics: dataset_statistics.json, as fine-tunes have it.
        extra: tensors besides the model's.
        code: of modeling_prismatic.py.
        config: entries of config.json that differ from openvla-7b's.
    """
    folder.mkdir(parents=True)
    stats = {"bridge_orig": {"action": STATISTICS["action"]}} if norm_stats is None else norm_stats
    mean = [0.484375, 0.455078125, 0.40625]  # rounded to bfloat16, as in the published file
    std = [0.228515625, 0.2236328125, 0.224609375]
    half = [0.5, 0.5, 0.5]
    texts = {
        "config.json": config_json(model, stats) | dict(config or {}),
        "generation_config.json": {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2},
        "preprocessor_config.json": {
            "means": [[0.485, 0.456, 0.406], half],
            "stds": [[0.229, 0.224, 0.225], half],
            "tvf_normalize_params": [
                {"inplace": False, "mean": mean, "std": std},
                {"inplace": False, "mean": half, "std": half},
            ],
        },
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"},
        **({"dataset_statistics.json": statistics} if statistics is not None else {}),
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text(llama_tokenizer().to_str())
    if code is not None:
        (folder / "modeling_prismatic.py").write_text(code)
    tensors = {**model.state_dict(), **(extra or {})}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = sorted(tensors)
    places = {
        name: f"model-{1 + i * shards // len(names):05}-of-{shards:05}.safetensors" for i, name in enumerate(names)
    }
    for file in sorted(set(places.values())):
        held = {name: tensors[name] for name in names if places[name] == file}
        save_file(held, folder / file, {"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def merged_towers(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names of ``ReferenceOpenVLA``: blocks are unwrapped, adapters merged as OpenVLA-OFT's code uses them."""
    merged = {}
    for key, tensor in stored.items():
        if ".lora_" in key:
            continue
        if ".base_layer.weight" in key:
            path = key.removesuffix(".base_layer.weight")
            a, b = (stored[f"{path}.lora_{matrix}.default.weight"] for matrix in "AB")
            delta = torch.einsum("or,r...->o...", b.flatten(1), a)
            tensor = tensor + delta * min(len(a), 16) / len(a)
        merged[key.replace(".block.", ".").replace(".base_layer.", ".")] = tensor
    return merged


def read_folder(folder: Path) -> ReferenceOpenVLA:
    """The model of a folder of ``write_folder``, by its config.json; every tensor but a value head's must fit."""
    config = json.loads((folder / "config.json").read_text())
    text = {name: value for name, value in config["text_config"].items() if name not in ("model_type", "torch_dtype")}
    towers = list(folder.glob("vision_backbone*.safetensors"))
    model = ReferenceOpenVLA(size=config["image_sizes"][0], film=bool(towers), **text).eval()
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("model*.safetensors"):
        tensors |= load_file(file)
    for file in towers:
        tensors |= merged_towers(load_file(file))
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items() if "value_head." not in name})
    return model
