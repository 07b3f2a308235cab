import subprocess
import sys

from diffusers import UNet2DConditionModel

from diffusion.config.model import Architecture, ModelConfig
from diffusion.models import count_parameters
from diffusion.models.architectures import ARCHITECTURES, STABLE_DIFFUSION_2, TINY


def test_stable_diffusion_2_has_exactly_the_published_parameters():
    assert count_parameters(ModelConfig()) == {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840}


def test_stable_diffusion_xl_has_exactly_the_published_parameters():
    counts = count_parameters(ModelConfig(architecture=Architecture.stable_diffusion_xl))
    first, second = 123_060_480, 694_659_840
    assert counts == {"unet": 2_567_463_684, "vae": 83_653_863, "text_encoder": first + second}


def test_changes_in_the_configuration_reach_the_unet():
    config = ModelConfig(architecture=Architecture.tiny, unet={"block_out_channels": [16, 32], "norm_num_groups": 4})
    assert count_parameters(config)["unet"] < count_parameters(ModelConfig(architecture=Architecture.tiny))["unet"] / 5


def test_text_encoders_and_unets_fit_one_another():
    for spec in ARCHITECTURES.values():
        encoders = [encoder for encoder in (spec.text_encoder, spec.text_encoder_2) if encoder]
        assert spec.unet["cross_attention_dim"] == sum(encoder["hidden_size"] for encoder in encoders)
        if spec.text_encoder_2 is not None:
            told = spec.text_encoder_2["projection_dim"] + 6 * spec.unet["addition_time_embed_dim"]
            assert spec.unet["projection_class_embeddings_input_dim"] == told
        assert spec.unet["in_channels"] == spec.vae["latent_channels"]
        assert spec.text_encoder["max_position_embeddings"] == spec.max_tokens
    assert STABLE_DIFFUSION_2.vae_factor == 8


def test_importing_starts_no_gpu_and_no_process_group():
    code = (
        "import diffusion.models, torch, sys\n"
        "assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()\n"
        "assert 'streaming' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_unet_is_diffusers_own_class():
    assert UNet2DConditionModel(**{**TINY.unet, "block_out_channels": (16, 32), "norm_num_groups": 4}) is not None
