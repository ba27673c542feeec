"""The reference towers against the library timm. Skipped where timm, or torchvision, which it needs, is missing."""

from __future__ import annotations

import pytest
import torch

from tests.policies.openvla_reference import HEADS, VisionTransformer

timm = pytest.importorskip("timm", exc_type=ImportError)
TOWERS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": (VisionTransformer(32, 3, 64, 56, 4), {"mlp_ratio": 2}),
    "vit_so400m_patch14_siglip_224": (VisionTransformer(48, 2, 96, 56, 0), {"mlp_ratio": 2}),
}


@pytest.mark.parametrize("name", TOWERS)
def test_the_reference_is_timms_model(name: str) -> None:
    ours, sizes = TOWERS[name]
    theirs = timm.create_model(
        name,
        pretrained=False,
        num_classes=0,
        img_size=56,
        embed_dim=ours.pos_embed.shape[-1],
        depth=len(ours.blocks),
        num_heads=HEADS,
        act_layer=None,
        **sizes,
    ).eval()
    renamed = {key.replace("scale_factor", "gamma"): tensor for key, tensor in ours.state_dict().items()}
    theirs.load_state_dict(renamed)  # strict: names and shapes are timm's
    pixels = torch.randn(2, 3, 56, 56)
    with torch.no_grad():
        (expected,) = theirs.get_intermediate_layers(pixels, n={len(ours.blocks) - 2})
        assert (ours(pixels) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "heads", "depth"), [(name, HEADS, d) for name, d in zip(TOWERS, (24, 27), strict=True)]
)
def test_published_heads_and_depth(name: str, heads: int, depth: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False, num_classes=0)
    assert [model.blocks[0].attn.num_heads, len(model.blocks)] == [HEADS, depth]
