"""A vision transformer that recognises colours and shapes of drawn objects, for `model.alignment` on `shapes`.

    python benchmarks/image_encoder.py runs/leaderboard/encoder

Its scenes are not those of the training images.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import ViTModel

if __name__ == "__main__":  # As a file, for the imports of this repository.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.leaderboard import RESOLUTION
from demo.scenes import COLOURS, SHAPES, draw, scenes
from diffusion.files import write_json
from diffusion.launch import CommandParser, run_command

PAIRS = [(colour, shape) for colour in COLOURS for shape in SHAPES]
NUM_IMAGES, NUM_TRAINED = 20_000, 19_000
BATCH_SIZE, LEARNING_RATE, WIDTH, PATCH_SIZE = 64, 1e-3, 128, 8


def train(steps: int) -> "tuple[ViTModel, float]":
    """Train on drawn scenes; return the network, and the share of other images with all pairs right."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    drawn = scenes(NUM_IMAGES, split="encoder", shares=(0.3, 0.35, 0.35))
    images = np.stack([np.array(draw(scene, RESOLUTION)) for scene in drawn])
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1
    shown = [{(thing.colour, thing.shape) for thing in scene.things} for scene in drawn]
    labels = torch.tensor([[pair in one for pair in PAIRS] for one in shown], dtype=torch.float32)
    network = ViTModel(
        ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=4 * WIDTH,
            image_size=RESOLUTION,
            patch_size=PATCH_SIZE,
        ),
        add_pooling_layer=False,
    )
    head = nn.Linear(WIDTH, len(PAIRS))

    def logits(of: "Tensor | slice") -> "Tensor":
        return head(network(pixels[of]).last_hidden_state[:, 1:].mean(1))

    optimizer = torch.optim.AdamW([*network.parameters(), *head.parameters()], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in tqdm(range(steps), unit=" steps"):
        chosen = torch.randint(0, NUM_TRAINED, (BATCH_SIZE,))
        loss = F.binary_cross_entropy_with_logits(logits(chosen), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        others = slice(NUM_TRAINED, None)
        right = ((logits(others) > 0) == labels[others].bool()).all(1)
    return network, right.float().mean().item()


def main() -> None:
    """Train and write."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()

    from diffusion.models.ingredients.alignment import PREPROCESSOR

    network, right = train(options.steps)
    network.save_pretrained(options.out)
    write_json(options.out / PREPROCESSOR, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    print(f"{options.out}: all colours of shapes right in {right:.1%} of other images")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
