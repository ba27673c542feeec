"""ActionCodec against the published formulas, images against official sampling, prompts and vocabularies."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.policies.policy_helpers import INSTRUCTIONS, nano
from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds, bins_to_ids, ids_to_bins
from vla_rl.policies.openvla_oft.architecture import Architecture, openvla_7b, tiny
from vla_rl.policies.openvla_oft.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    crop_center,
    official_preprocess,
    prepare_images,
)
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer, build_tiny_tokenizer, format_prompt

BOUNDS = Bounds((-0.6, -0.9, -0.2, 0.0), (0.8, 0.9, 0.1, 0.0), (True, True, True, False))


def published_ids(normalized: np.ndarray) -> np.ndarray:
    """OpenVLA's action tokenizer, for Llama 2's vocabulary."""
    return 32000 - np.digitize(np.clip(normalized, -1, 1), np.linspace(-1, 1, 256))


def published_actions(ids: np.ndarray) -> np.ndarray:
    bins = np.linspace(-1, 1, 256)
    centers = (bins[:-1] + bins[1:]) / 2
    return centers[np.clip(32000 - ids - 1, 0, 254)]


def test_codec_equals_the_published_formulas() -> None:
    identity = ActionCodec(Bounds((-1.0,), (1.0,), (False,)))
    actions = np.concatenate([np.linspace(-1.2, 1.2, 5001), np.linspace(-1, 1, 256)])[:, None]
    ids = bins_to_ids(identity.encode(actions), 32000)
    np.testing.assert_array_equal(ids, published_ids(actions))
    assert (ids.min(), ids.max()) == (31744, 31999)
    all_bins = np.arange(256, dtype=np.uint8)[:, None]
    np.testing.assert_allclose(identity.decode(all_bins), published_actions(bins_to_ids(all_bins, 32000)), atol=1e-7)
    np.testing.assert_array_equal(ids_to_bins(ids, 32000), identity.encode(actions))
    assert identity.decode(all_bins)[254] == identity.decode(all_bins)[255], "two bins alias"


def test_normalization_follows_percentiles_and_leaves_the_gripper() -> None:
    codec = ActionCodec(BOUNDS)
    low, high = np.array([-0.6, -0.9, -0.2, 0.0]), np.array([0.8, 0.9, 0.1, 1.0])
    np.testing.assert_array_equal(codec.encode(low), [0, 0, 0, 127])
    assert (codec.encode(high) >= 254).all()
    np.testing.assert_array_equal(codec.encode(high + 5)[:3], [255, 255, 255])
    decoded = codec.decode(codec.encode(np.stack([low, high])))
    assert decoded.dtype == np.float32
    half_bin = (high - low) / 255 / 2 + 1e-6
    assert (np.abs(decoded - np.stack([low, high]))[:, :3] <= 2 * half_bin[:3]).all()
    np.testing.assert_allclose(decoded[:, 3], [0.0, 1.0], atol=0.005)
    values = np.random.default_rng(0).uniform(low, high, (100, 4))
    published = 0.5 * (published_actions(published_ids(2 * (values - low) / (high - low) - 1)) + 1) * (high - low) + low
    np.testing.assert_allclose(codec.decode(codec.encode(values))[:, :3], published[:, :3], atol=1e-6)


def test_statistics_of_demonstrations() -> None:
    actions = np.random.default_rng(1).normal(size=(40, 25, 7))
    actions[..., 3] = 0.25  # a dimension that never moves
    actions[..., 6] = actions[..., 6] > 0
    codec = ActionCodec.from_actions(actions)
    np.testing.assert_allclose(codec.bounds.q01, np.quantile(actions.reshape(-1, 7), 0.01, axis=0))
    np.testing.assert_allclose(codec.bounds.q99, np.quantile(actions.reshape(-1, 7), 0.99, axis=0))
    assert codec.bounds.mask == (True,) * 6 + (False,)
    decoded = codec.decode(codec.encode(actions))
    np.testing.assert_allclose(decoded[..., 3], 0.25)
    np.testing.assert_array_equal(decoded[..., 6] > 0.5, actions[..., 6] > 0.5)
    with pytest.raises(ValueError, match="statistics of no samples"):
        ActionCodec.from_actions(np.zeros((0, 7)))


def test_bounds_round_trip_and_refuse_nonsense() -> None:
    assert Bounds.from_dict(BOUNDS.to_dict()) == BOUNDS
    with pytest.raises(ValueError, match="q01 <= q99"):
        Bounds((1.0,), (0.0,), (True,))
    with pytest.raises(ValueError, match=r"lengths \(2, 1, 1\)"):
        Bounds((0.0, 0.0), (1.0,), (True,))
    with pytest.raises(ValueError, match="expected the keys q01, q99 and mask"):
        Bounds.from_dict({"q01": [0.0]})
    with pytest.raises(ValueError, match="lists of numbers"):
        Bounds.from_dict({"q01": 3, "q99": [1.0], "mask": [True]})
    with pytest.raises(ValueError, match=r"action ids lie in 31744\.\.31999, found 31743\.\.31743"):
        ids_to_bins(np.array([31743]), 32000)


# --- images ---------------------------------------------------------------------------------------------------------


def test_each_tower_gets_its_own_normalization() -> None:
    images = torch.randint(0, 256, (2, 24, 24, 3), dtype=torch.uint8)
    dino, siglip = prepare_images(images, 24, center_crop=False)
    pixels = images.permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (IMAGENET_MEAN, IMAGENET_STD))
    torch.testing.assert_close(dino, (pixels - mean) / std, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(siglip, (pixels - 0.5) / 0.5, atol=1e-5, rtol=1e-5)


def test_other_sizes_are_resized_without_aliasing() -> None:
    stripes = torch.zeros(1, 96, 96, 3, dtype=torch.uint8)
    stripes[:, :, ::2] = 255
    _, siglip = prepare_images(stripes, 24, center_crop=False)
    assert siglip.shape == (1, 3, 24, 24)
    assert siglip[..., 2:-2].abs().max() < 0.02, "one-pixel stripes must average to grey"


def test_the_centre_crop_samples_like_crop_and_resize() -> None:
    """On a ramp, bilinear sampling is exact: sample i lies at (1 - s) / 2 + i s / (n - 1) of the image's extent."""
    size, side = 224, 0.9**0.5
    ramp = torch.arange(size).float().expand(1, 1, size, size)
    position = ((1 - side) / 2 + torch.arange(size) * side / (size - 1)) * (size - 1)
    cropped = crop_center(ramp)
    assert (cropped[0, 0, 0] - position).abs().max() <= 0.51
    torch.testing.assert_close(cropped[0, 0], position.round().expand(size, size), atol=1, rtol=0)
    assert torch.equal(crop_center(ramp.transpose(2, 3)), cropped.transpose(2, 3))


def test_official_preprocessing_keeps_the_picture() -> None:
    row = np.linspace(0, 255, 256)
    image = np.stack([np.tile(row, (256, 1)), np.tile(row[:, None], (1, 256)), np.full((256, 256), 80.0)], -1)
    small = official_preprocess(image.astype(np.uint8))
    assert small.shape == (224, 224, 3)
    assert small.dtype == np.uint8
    expected = (np.arange(224) + 0.5) * 256 / 224 - 0.5
    assert np.abs(small[112, 5:-5, 0] - expected[5:-5]).max() < 6
    assert np.abs(small[5:-5, 112, 1] - expected[5:-5]).max() < 6


# --- prompts --------------------------------------------------------------------------------------------------------


def test_the_prompt_is_openvlas() -> None:
    assert format_prompt("Pick up the Bowl") == "In: What action should the robot take to pick up the bowl?\nOut:"


def test_words_get_ids_from_the_texts_alone() -> None:
    arch = tiny()
    prompts = PromptTokenizer(build_tiny_tokenizer(INSTRUCTIONS, arch.text_vocab_size), arch)
    again = PromptTokenizer(build_tiny_tokenizer(reversed(INSTRUCTIONS), arch.text_vocab_size), arch)
    ids = prompts.encode("Pick up the bowl")
    assert ids == again.encode("pick up the bowl")
    assert ids[0] == arch.bos_id
    assert ids[-1] == arch.final_id
    assert len(ids) == 2 + 2 + 4, "two special tokens, the two fixed parts of the prompt, four words"
    assert len(set(ids)) == len(ids)
    assert prompts.encode("pick up it")[:4] == ids[:4]
    restored = PromptTokenizer.from_json(prompts.to_json(), arch)
    assert restored.encode(INSTRUCTIONS[1]) == prompts.encode(INSTRUCTIONS[1])


def test_unknown_words_are_marked_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    arch = tiny()
    prompts = PromptTokenizer(build_tiny_tokenizer(["pick up the bowl"], arch.text_vocab_size), arch)
    with caplog.at_level(logging.WARNING):
        assert 0 in prompts.encode("pick up the ramekin")
    assert "ramekin" in caplog.text
    caplog.clear()
    assert 0 not in prompts.encode("pick up the bowl")
    assert caplog.text == ""


def test_vocabularies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit a text vocabulary of 10"):
        build_tiny_tokenizer(["one two three four five six seven"], 10)
    foreign = Tokenizer(WordLevel({"<unk>": 0, "in": 400}, unk_token="<unk>"))
    foreign.pre_tokenizer = Whitespace()
    foreign.add_tokens(["In"])
    with pytest.raises(ValueError, match="belongs to another architecture"):
        PromptTokenizer(Tokenizer(WordLevel({"<unk>": 300}, unk_token="<unk>")), tiny()).encode("go")
    with pytest.raises(ValueError, match="not JSON"):
        PromptTokenizer.from_json("{", tiny())
    with pytest.raises(ValueError, match="no 'model'"):
        PromptTokenizer.from_json("[]", tiny())


def test_llama_prompts_end_with_the_empty_token() -> None:
    """With any tokenizer, the 7B prompt starts with <s> and ends with 29871, once."""
    arch = openvla_7b()
    ids = PromptTokenizer(build_tiny_tokenizer(INSTRUCTIONS, arch.text_vocab_size), arch).encode("push it")
    assert ids[0] == 1
    assert ids[-1] == 29871
    assert ids.count(29871) == 1


# --- architecture ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [tiny(views=2, proprio_dim=8), openvla_7b(), nano()])
def test_architectures_round_trip(arch: Architecture) -> None:
    assert Architecture.from_dict(arch.to_dict()) == arch


def test_wrong_architectures_name_every_problem() -> None:
    values = tiny().to_dict()
    del values["chunk_size"]
    values["colour"] = 3
    values["views"] = "two"
    values["llm"]["layers"] = 2.5
    with pytest.raises(ValueError, match="chunk_size is missing") as caught:
        Architecture.from_dict(values)
    for part in ("architecture.colour is unknown", "architecture.views='two'", "architecture.llm.layers=2.5"):
        assert part in str(caught.value)
    for key, value, problem in (
        ("image_size", 100, "image_size=100 is not a multiple of patch_size=12"),
        ("chunk_size", 0, "chunk_size=0: should be greater than or equal to 1"),
        ("vocab_size", 200, "vocab_size=200"),
        ("final_id", 300, "final_id=300 is an action id"),
    ):
        with pytest.raises(ValueError, match=problem):
            Architecture.from_dict({**tiny().to_dict(), key: value})
    with pytest.raises(ValueError, match="expected a mapping, found NoneType"):
        Architecture.from_dict(None)
