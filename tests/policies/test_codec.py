"""ActionCodec against the published formulas, images against official sampling, prompts and vocabularies."""

from __future__ import annotations

import dataclasses
import io
import logging
import math

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.policies.policy_helpers import INSTRUCTIONS, nano
from vla_rl.core.actions import end_effector
from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds, bins_to_ids, ids_to_bins
from vla_rl.policies.openvla_oft.architecture import IMAGENET_MEAN, IMAGENET_STD, Architecture, openvla_7b, tiny
from vla_rl.policies.openvla_oft.images import crop_center, jpeg_round_trip, prepare_images, resize
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
    codec = ActionCodec.of_space(end_effector()).of_actions(actions)
    np.testing.assert_allclose(codec.bounds.q01, np.quantile(actions.reshape(-1, 7), 0.01, axis=0))
    np.testing.assert_allclose(codec.bounds.q99, np.quantile(actions.reshape(-1, 7), 0.99, axis=0))
    assert codec.bounds.mask == (True,) * 6 + (False,)
    decoded = codec.decode(codec.encode(actions))
    np.testing.assert_allclose(decoded[..., 3], 0.25)
    np.testing.assert_array_equal(decoded[..., 6] > 0.5, actions[..., 6] > 0.5)
    with pytest.raises(ValueError, match="statistics of no samples"):
        ActionCodec.of_space(end_effector()).of_actions(np.zeros((0, 7)))


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
    dino, siglip = prepare_images(images, nano())
    pixels = images.permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (IMAGENET_MEAN, IMAGENET_STD))
    torch.testing.assert_close(dino, (pixels - mean) / std, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(siglip, (pixels - 0.5) / 0.5, atol=1e-5, rtol=1e-5)


def test_other_sizes_are_resized_without_aliasing() -> None:
    stripes = torch.zeros(1, 96, 96, 3, dtype=torch.uint8)
    stripes[:, :, ::2] = 255
    _, siglip = prepare_images(stripes, nano())
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


@pytest.mark.parametrize(("old", "new"), [(256, 224), (40, 56)])
def test_lanczos_is_tensorflows(old: int, new: int) -> None:
    """A reference sample by sample: weights of the pixels within three lobes, and Pillow, which rounds in between."""
    image = torch.randint(0, 256, (old, old, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    scale, weights = max(old / new, 1.0), np.zeros((new, old))
    for i in range(new):
        middle = (i + 0.5) * old / new
        for j in range(max(0, math.ceil(middle - 3 * scale - 0.5)), min(old, math.floor(middle + 3 * scale + 0.5))):
            x = (j + 0.5 - middle) / scale
            a, b = math.pi * x, math.pi * x / 3
            weights[i, j] = 1.0 if x == 0 else math.sin(a) / a * math.sin(b) / b
        weights[i] /= weights[i].sum()
    exact = np.stack([weights @ image[..., colour].double().numpy() @ weights.T for colour in range(3)], -1)
    found = resize(image.permute(2, 0, 1)[None].float(), new, "lanczos")[0].permute(1, 2, 0).numpy()
    assert np.abs(found - exact.clip(0, 255)).max() < 0.501, "the nearest integers"
    soft = image // 4 + 96  # no sum of the first pass leaves 0..255, where Pillow clips it
    pillow = np.asarray(Image.fromarray(soft.numpy()).resize((new, new), Image.Resampling.LANCZOS)).astype(float)
    found = resize(soft.permute(2, 0, 1)[None].float(), new, "lanczos")[0].permute(1, 2, 0).numpy()
    assert np.abs(found - pillow).max() <= 1


def test_the_crop_truncates_as_tensorflow_does() -> None:
    """Bilinear samples of x in 0..1, then the integer part of 255.5 x, one pixel after the other."""
    size, side = 12, 0.9**0.5
    image = torch.randint(0, 256, (size, size), generator=torch.Generator().manual_seed(5)).double() / 255
    expected = torch.zeros(size, size)
    for row in range(size):
        for column in range(size):
            y, x = (((1 - side) / 2 + i * side / (size - 1)) * (size - 1) for i in (row, column))
            top, left = math.floor(y), math.floor(x)
            square, down, right = image[top : top + 2, left : left + 2], y - top, x - left
            upper, lower = (edge[0] * (1 - right) + edge[1] * right for edge in square)
            expected[row, column] = math.floor(float(upper * (1 - down) + lower * down) * 255.5)
    pixels = (image * 255).float()[None, None]
    found, nearest = crop_center(pixels, "truncate")[0, 0], crop_center(pixels, "nearest")[0, 0]
    assert (found != expected).float().mean() < 0.02, "float32 and float64 can fall on two sides of an integer"
    assert (found - expected).abs().max() <= 1
    assert (nearest - found).mean() > 0.2, "truncation makes images darker"


def test_jpeg_is_that_of_pillow_and_its_images_are_those_of_the_policy() -> None:
    image = np.stack([np.tile(np.linspace(0, 255, 40), (40, 1))] * 3, -1).astype(np.uint8)
    image[10:20, 10:20] = (200, 30, 30)
    images = torch.from_numpy(np.stack([image, image[::-1]]))
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=95)
    found = jpeg_round_trip(images)
    assert np.array_equal(found[0].numpy(), np.asarray(Image.open(buffer).convert("RGB")))
    assert found.dtype == torch.uint8
    assert 0 < (found.int() - images.int()).abs().float().mean() < 4
    official = dataclasses.replace(nano(), jpeg=True, resize="lanczos", center_crop=True, crop_rounding="truncate")
    by_hand = resize(found.permute(0, 3, 1, 2).float(), official.image_size, "lanczos")
    expected = crop_center(by_hand, "truncate") / 127.5 - 1
    assert torch.equal(prepare_images(images, official)[1], expected)
    assert not torch.equal(prepare_images(images, dataclasses.replace(official, jpeg=False))[1], expected)


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
