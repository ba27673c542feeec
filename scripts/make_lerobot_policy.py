"""Write a tiny policy of the package lerobot with random weights, as lerobot saves one. It needs no model hub.

python scripts/make_lerobot_policy.py KIND FOLDER [--state 8] [--image-size 64]

smolvla: the classes of SmolVLA with a small SmolVLM and a tokenizer of bytes; act: the classes of ACT; pi0, pi05: those
of π0 and π0.5, made small, which only a process that has made them small loads (tests/policies/lerobot/small_gemma.py).
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors

CHUNK = 16


def byte_tokenizer() -> Any:
    """Each byte is a token; so are the marks of a SmolVLM."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )


def make_vlm(folder: Path) -> None:
    """A SmolVLM with its processor, as AutoConfig and AutoProcessor read them."""
    from transformers import SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    tokenizer = byte_tokenizer()
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(), tokenizer=tokenizer, video_processor=SmolVLMVideoProcessor()
    )
    processor.save_pretrained(folder)
    config = SmolVLMConfig(
        image_token_id=2,
        scale_factor=2,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 16,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pad_token_id": 0,
        },
    )
    config.save_pretrained(folder)


def make_gemma(kind: str, folder: Path) -> None:
    """Make the classes of π0 or π0.5 small in this process, and write a tokenizer where theirs is on the hub."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.policies.lerobot.small_gemma import make_small

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    make_small(kind, len(tokenizer))
    processors: Any = import_module(f"lerobot.policies.{kind}.processor_{kind}")
    step = processors.TokenizerProcessorStep
    processors.TokenizerProcessorStep = lambda tokenizer_name, **keys: step(tokenizer_name=str(folder), **keys)


def draw_zeros(policy: torch.nn.Module) -> None:
    """Matrices that start as zeros, of π0.5's adaptive norms, would hide what the layers of its expert do."""
    for parameter in policy.parameters():
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)


def settings(kind: str, folder: Path) -> dict[str, Any]:
    """Arguments of the policy's configuration that make it small."""
    if kind == "act":
        return {"dim_model": 32, "n_heads": 2, "dim_feedforward": 64, "pretrained_backbone_weights": None}
    if kind in ("pi0", "pi05"):
        make_gemma(kind, folder / "tokenizer")
        size, steps = {"image_resolution": (56, 56)}, {"num_inference_steps": 4}
        return size | steps | {"tokenizer_max_length": 96, "max_state_dim": 16, "max_action_dim": 16}
    make_vlm(folder / "vlm")
    return {
        "vlm_model_name": str(folder / "vlm"),
        "num_vlm_layers": 2,
        "resize_imgs_with_padding": (64, 64),
        "num_steps": 4,
        "max_state_dim": 16,
        "max_action_dim": 16,
    }


def numbers(dims: int, deviation: float) -> dict[str, torch.Tensor]:
    """Statistics of normal numbers with mean 0; the quantiles are π0.5's."""
    ones = torch.ones(dims)
    quantiles = {"q01": -2.33 * deviation * ones, "q99": 2.33 * deviation * ones}
    return {"mean": 0 * ones, "std": deviation * ones} | quantiles


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny policy of lerobot with random weights.")
    parser.add_argument("kind", choices=["smolvla", "pi0", "pi05", "act"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--state", type=int, default=8, help="numbers of the state")
    parser.add_argument("--image-size", type=int, default=64)
    args = parser.parse_args()
    folder: Path = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    image = PolicyFeature(FeatureType.VISUAL, (3, args.image_size, args.image_size))
    inputs = {"observation.images.image": image, "observation.state": PolicyFeature(FeatureType.STATE, (args.state,))}
    config = make_policy_config(
        args.kind,
        input_features=inputs,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        device="cpu",
        push_to_hub=False,
        **settings(args.kind, folder),
    )
    torch.manual_seed(0)
    policy = get_policy_class(args.kind)(config)
    draw_zeros(policy)
    stats = {
        "observation.state": numbers(args.state, 1.0),
        "action": numbers(7, 0.5),
        "observation.images.image": {"mean": torch.zeros(3, 1, 1), "std": torch.ones(3, 1, 1)},
    }
    before, after = make_pre_post_processors(config, dataset_stats=stats)
    policy.save_pretrained(folder)
    before.save_pretrained(folder)
    after.save_pretrained(folder)
    print(f"{folder}: {args.kind}, {sum(p.numel() for p in policy.parameters()):,} parameters")


if __name__ == "__main__":
    main()
