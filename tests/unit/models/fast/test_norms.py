import pytest
import torch
from torch import nn

from diffusion.models import tiny
from diffusion.models.fast.norms import LowPrecisionGroupNorm, LowPrecisionLayerNorm, use_low_precision_norms


@pytest.mark.parametrize(("norm", "shape"), [(nn.GroupNorm(4, 16), (2, 16, 8, 8)), (nn.LayerNorm(16), (2, 7, 16))])
def test_low_precision_under_autocast_only(norm, shape):
    x = torch.randn(shape)
    expected = norm(x)
    holder = nn.Sequential(norm)
    parameter = norm.weight
    use_low_precision_norms(holder)
    assert torch.equal(norm(x), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = norm(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.03)
    assert norm.weight is parameter
    assert parameter.dtype == torch.float32


def test_only_the_unet_is_changed_and_stays_trainable():
    model = tiny()
    norms = [m for m in model.unet.modules() if isinstance(m, nn.GroupNorm | nn.LayerNorm)]
    assert norms
    assert all(isinstance(m, LowPrecisionGroupNorm | LowPrecisionLayerNorm) for m in norms)
    frozen = [m for part in (model.vae, model.text_encoder) for m in part.modules()]
    assert not any(isinstance(m, LowPrecisionGroupNorm | LowPrecisionLayerNorm) for m in frozen)
    assert all(p.requires_grad for p in model.unet.parameters())
    assert not any(p.requires_grad for part in (model.vae, model.text_encoder) for p in part.parameters())


def test_gradients_reach_the_fp32_weights():
    norm = nn.GroupNorm(2, 8)
    use_low_precision_norms(norm)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        norm(torch.randn(2, 8, 4, 4)).float().square().mean().backward()
    assert norm.weight.grad is not None
    assert norm.weight.grad.dtype == torch.float32
    assert norm.weight.grad.abs().sum() > 0
