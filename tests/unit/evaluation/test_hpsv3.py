"""The reward model of HPSv3, on tiny weights in the authors' form."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from diffusion.errors import ConfigurationError
from diffusion.evaluation.hpsv3 import NUM_PIXELS, RewardModel
from tests.tools.vision_language_models import INSTRUCTION, write_reward

CPU = torch.device("cpu")


def noise(seed: int, size: tuple[int, int] = (448, 448)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def test_the_score_is_the_first_output_of_the_head(tmp_path):
    model = RewardModel(str(write_reward(tmp_path / "reward", mean=3.25)), CPU)
    assert model.score(noise(0), "a red star") == 3.25


def test_the_head_is_given_the_hidden_state_of_the_reward_token(tmp_path):
    """Against transformers' processor and model, and the head as torch's modules."""
    from transformers import AutoProcessor, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    folder = write_reward(tmp_path / "reward")
    model = RewardModel(str(folder), CPU)
    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    weights = load_file(folder / "HPSv3.safetensors")
    config = Qwen2VLConfig.from_pretrained(folder)
    config.text_config.vocab_size = len(processor.tokenizer)
    backbone = Qwen2VLForConditionalGeneration(config).eval()
    backbone.load_state_dict({name: value for name, value in weights.items() if not name.startswith("rm_head.")})
    head = torch.nn.Sequential(
        torch.nn.Linear(32, 8), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(8, 4), torch.nn.ReLU(),
        torch.nn.Linear(4, 2),
    ).eval()  # fmt: skip
    head.load_state_dict({name.removeprefix("rm_head."): weights[name] for name in weights if "rm_head" in name})
    chat = "<|im_start|>user <|vision_start|><|image_pad|><|vision_end|>{}<|im_end|><|im_start|>assistant"
    scores = {}
    for seed, prompt in ((0, "a red star"), (1, "a red star"), (0, "a blue circle")):
        text = chat.format(INSTRUCTION.replace("{text_prompt}", prompt))
        sized = {"min_pixels": NUM_PIXELS, "max_pixels": NUM_PIXELS}  # The image has that size already.
        inputs = processor(text=[text], images=[noise(seed)], images_kwargs=sized, return_tensors="pt")
        with torch.no_grad():
            hidden = backbone(**inputs, output_hidden_states=True).hidden_states[-1]
            (place,) = (inputs["input_ids"][0] == len(processor.tokenizer) - 1).nonzero()
            scores[seed, prompt] = float(head(hidden[0, place])[0, 0])
        assert model.score(noise(seed), prompt) == pytest.approx(scores[seed, prompt], abs=1e-5)
    assert np.ptp(list(scores.values())) > 1e-3


def test_images_are_scaled_to_one_number_of_pixels(tmp_path):
    model = RewardModel(str(write_reward(tmp_path / "reward")), CPU)
    for size in ((448, 448), (64, 64), (300, 900), (512, 768)):
        image = model._resized(noise(0, size))
        assert image.width % 28 == image.height % 28 == 0
        assert 0.85 * NUM_PIXELS < image.width * image.height <= 1.15 * NUM_PIXELS
        assert image.height / image.width == pytest.approx(size[0] / size[1], rel=0.1)


def test_weights_may_have_the_names_of_older_versions_of_transformers(tmp_path):
    new, old = (
        RewardModel(str(write_reward(tmp_path / f"{is_old}", names_of_old=is_old)), CPU) for is_old in (False, True)
    )
    assert new.identity == old.identity
    assert new.score(noise(0), "a red star") == pytest.approx(old.score(noise(0), "a red star"), abs=1e-6)


def test_what_a_folder_lacks_is_named(tmp_path):
    folder = write_reward(tmp_path / "reward")
    instruction, weights = folder / "instruction.txt", folder / "HPSv3.safetensors"
    instruction.write_text("{text_prompt}")
    with pytest.raises(ConfigurationError, match=r"instruction\.txt needs .*<\|Reward\|>"):
        RewardModel(str(folder), CPU)
    instruction.write_text(INSTRUCTION)
    content = load_file(weights)
    save_file({name: value for name, value in content.items() if "layers.0.mlp" not in name}, weights)
    with pytest.raises(ConfigurationError, match=r"lacks 3 weights"):
        RewardModel(str(folder), CPU)
    save_file({name: value for name, value in content.items() if "rm_head" not in name}, weights)
    with pytest.raises(ConfigurationError, match="rm_head"):
        RewardModel(str(folder), CPU)
    weights.unlink()
    with pytest.raises(ConfigurationError, match=r"protocol\.networks\.hpsv3="):
        RewardModel(str(folder), CPU)
