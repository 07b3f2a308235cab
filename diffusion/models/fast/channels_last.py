"""Blocks of the U-Net with activations in channels-last order (NHWC) throughout.

In training, the blocks of diffusers return to NCHW after each transformer block, in the shortcut of a ResNet block, and
before upsampling at batches of 64 and more. The classes of existing blocks are changed in place; their parameters,
names and hooks stay. The memory format of parameters stays too, because FSDP2 supports no other.
"""

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from diffusion.models.fast.norms import LowPrecisionGroupNorm, fuse

INT32_ELEMENTS = 2**31
"""Number of elements from which torch's channels-last upsampling has no backward pass on a GPU."""


class ChannelsLastConv(nn.Conv2d):
    """First convolution, which converts its input to channels-last order."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve [B, C, H, W]."""
        return super().forward(input.contiguous(memory_format=torch.channels_last))


class ChannelsLastResnet(ResnetBlock2D):
    """ResNet block with the activations and the addition of the timestep fused into its norms."""

    def forward(self, input_tensor: Tensor, temb: Tensor) -> Tensor:
        """Transform [B, C, H, W] with the embedding of the timestep [B, D]."""
        shift = self.time_emb_proj(F.silu(temb))  # pyright: ignore[reportOptionalCall]
        hidden, conv = self.norm1(input_tensor), self.conv1
        if type(conv) is nn.Conv2d:
            hidden, shift = F.conv2d(hidden, conv.weight, padding=conv.padding), shift + conv.bias
        else:  # An adapter wraps the convolution.
            hidden = conv(hidden)
        hidden = self.conv2(self.dropout(self.norm2(hidden, shift)))
        return (input_tensor if self.conv_shortcut is None else self.conv_shortcut(input_tensor)) + hidden


class ChannelsLastTransformer(Transformer2DModel):
    """Transformer over the positions of a feature map, with a channels-last view as output."""

    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Tensor:
        """Reshape [B, H*W, C] to [B, C, H, W] and add the residual."""
        if self.use_linear_projection:
            hidden_states = self.proj_out(hidden_states)
        hidden_states = hidden_states.reshape(batch_size, height, width, -1).permute(0, 3, 1, 2)
        return (hidden_states if self.use_linear_projection else self.proj_out(hidden_states)) + residual


class ChannelsLastUpsample(Upsample2D):
    """Nearest-neighbour upsampling and a convolution."""

    def forward(self, hidden_states: Tensor, output_size: tuple[int, int] | None = None) -> Tensor:
        """Upsample [B, C, H, W] to twice its size, or to `output_size`."""
        if hidden_states.numel() * 4 >= INT32_ELEMENTS:
            hidden_states = hidden_states.contiguous()
        scale = 2.0 if output_size is None else None
        upsampled = F.interpolate(hidden_states, size=output_size, scale_factor=scale, mode="nearest")
        return self.conv(upsampled)  # pyright: ignore[reportOptionalCall]


def _is_plain_resnet(block: nn.Module) -> bool:
    return (
        type(block) is ResnetBlock2D
        and block.upsample is None
        and block.downsample is None
        and block.time_emb_proj is not None
        and block.time_embedding_norm == "default"
        and not block.skip_time_act
        and block.output_scale_factor == 1.0
        and isinstance(block.nonlinearity, nn.SiLU)
    )


def _is_plain_upsample(block: nn.Module) -> bool:
    return (
        type(block) is Upsample2D
        and block.norm is None
        and block.use_conv
        and block.interpolate
        and not block.use_conv_transpose
        and block.name == "conv"
    )


def keep_channels_last(unet: UNet2DConditionModel, *, is_fused: bool) -> None:
    """Change the plain blocks of a U-Net to channels-last order, in place; `is_fused` as in `FusedGroupNorm`."""
    unet.conv_in.__class__ = ChannelsLastConv
    for block in unet.modules():
        if _is_plain_resnet(block):
            for norm in (block.norm1, block.norm2):
                fuse(norm, silu=True, is_fused=is_fused)  # pyright: ignore[reportArgumentType]
            block.__class__ = ChannelsLastResnet
        elif type(block) is Transformer2DModel and block.is_input_continuous:
            block.__class__ = ChannelsLastTransformer
        elif _is_plain_upsample(block):
            block.__class__ = ChannelsLastUpsample  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(unet.conv_act, nn.SiLU):
        fuse(unet.conv_norm_out, silu=True, is_fused=is_fused)  # pyright: ignore[reportArgumentType]
        unet.conv_act = nn.Identity()
    for norm in unet.modules():
        if type(norm) in (nn.GroupNorm, LowPrecisionGroupNorm):
            fuse(norm, silu=False, is_fused=is_fused)  # pyright: ignore[reportArgumentType]
