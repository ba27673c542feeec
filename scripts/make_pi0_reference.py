"""Play the small twin of a published π0 with lerobot itself, and keep what it does for the tests.

LEROBOT_PYTHON scripts/make_pi0_reference.py [FOLDER]

Writes the small files of a checkpoint that lerobot saves (no weights), and expected.npz with the chunks of actions: by
default into tests/policies/pi0/published, which is committed. It needs an environment as
scripts/requirements_lerobot.txt describes.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.pi0 import processor_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.processor import TokenizerProcessorStep
from transformers import PreTrainedTokenizerFast

from tests.policies import pi0_twin as twin
from tests.policies.lerobot.small_gemma import make_small

CAMERAS = ("observation.images.image", "observation.images.image2")


def make_policy() -> Any:
    config = PI0Config(
        chunk_size=twin.CHUNK,
        n_action_steps=twin.CHUNK,
        image_resolution=(twin.PIXELS, twin.PIXELS),
        num_inference_steps=twin.STEPS,
        device="cpu",
        push_to_hub=False,
    )
    image = PolicyFeature(FeatureType.VISUAL, (3, twin.SEEN_PIXELS, twin.SEEN_PIXELS))
    config.input_features = dict.fromkeys(CAMERAS, image)
    config.input_features["observation.state"] = PolicyFeature(FeatureType.STATE, (twin.STATE,))
    config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (twin.ACTIONS,))}
    policy = make_small("pi0", twin.WORDS).PI0Policy(config).eval()
    paligemma = policy.model.paligemma_with_expert.paligemma
    paligemma.lm_head.weight = paligemma.model.language_model.embed_tokens.weight  # tied, as published
    weights = {name: torch.from_numpy(array) for name, array in twin.weights().items()}
    found = policy.load_state_dict(weights, strict=False)
    tied = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    assert found == ([tied], []), found
    return policy


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else twin.FIXTURE
    policy = make_policy()
    words = PreTrainedTokenizerFast(tokenizer_object=twin.tokenizer(), pad_token="<pad>", bos_token="<bos>")
    processor_pi0.TokenizerProcessorStep = lambda tokenizer_name, **keys: TokenizerProcessorStep(
        tokenizer=words, **keys
    )
    statistics = {name: {k: torch.from_numpy(v) for k, v in s.items()} for name, s in twin.statistics().items()}
    before, after = processor_pi0.make_pi0_pre_post_processors(policy.config, statistics)
    given = SimpleNamespace(**twin.inputs())
    images = torch.from_numpy(given.images).permute(0, 1, 4, 2, 3).float() / 255.0
    batch: dict[str, Any] = {name: images[:, view] for view, name in enumerate(CAMERAS)}
    batch |= {"observation.state": torch.from_numpy(given.state), "task": [twin.INSTRUCTIONS[i] for i in given.task]}
    with torch.no_grad():
        normalized = policy.predict_action_chunk(before(batch), noise=torch.from_numpy(given.noise))
    actions = after(normalized)
    folder.mkdir(parents=True, exist_ok=True)
    policy.config.save_pretrained(folder)
    before.save_pretrained(folder)
    after.save_pretrained(folder)
    twin.tokenizer().save(str(folder / "tokenizer.json"))
    np.savez(folder / "expected.npz", normalized=normalized.numpy(), actions=actions.numpy())
    check_that_it_is_trained(folder, policy, before, after, normalized)
    print(
        f"{folder}: chunks of deviation {actions.std():.3f}; policy=lerobot gives the same, and their log-probabilities"
    )


def check_that_it_is_trained(folder: Path, policy: Any, before: Any, after: Any, expected: torch.Tensor) -> None:
    """``policy=lerobot`` denoises to the same chunks, and learning finds the log-probabilities of sampling."""
    from vla_rl.core.actions import assumed
    from vla_rl.policies.base.policy import PolicyInput
    from vla_rl.policies.lerobot.config import LeRobotConfig
    from vla_rl.policies.lerobot.flow_model import LeRobotFlow

    given = {name: torch.from_numpy(array) for name, array in twin.inputs().items()}
    config = LeRobotConfig(checkpoint=str(folder), chunk_size=twin.CHUNK, random_steps="all")
    ours = LeRobotFlow(config, assumed(twin.ACTIONS), policy, before, after)
    ours.set_instructions(twin.INSTRUCTIONS)
    seen = PolicyInput(given["images"], given["state"], given["task"], torch.zeros(twin.ROWS))
    noise = torch.randn(twin.ROWS, twin.STEPS, twin.CHUNK, twin.PADDED)
    draws = {"start": given["noise"], "which": torch.zeros(twin.ROWS), "steps": noise}
    greedy = ours.act(seen, draws, torch.ones(twin.ROWS, dtype=torch.bool), 1.0)
    torch.testing.assert_close(greedy.record["actions"], expected, atol=1e-5, rtol=0)
    sampled = ours.act(seen, draws, torch.zeros(twin.ROWS, dtype=torch.bool), 0.7)
    rated = ours(seen, sampled.record, 0.7)
    torch.testing.assert_close(rated.logprobs, sampled.logprobs, atol=1e-3, rtol=1e-4)
    rated.logprobs.sum().backward()
    assert any(p.grad is not None for name, p in ours.named_parameters() if "gemma_expert" in name)


if __name__ == "__main__":
    main()
