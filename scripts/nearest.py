"""Find the nearest training images of generated ones, and name suspected copies.

    python scripts/nearest.py IMAGES DATA --out FOLDER
    python scripts/nearest.py IMAGES RUN --data PREPARED --out FOLDER       # RUN was trained on latents

IMAGES is a folder as scripts/generate.py writes it, or any folder of images. DATA is a prepared data set, or a run that
was trained on one: then only the buckets of the run count. An image that is nearer to training than nearly all
validation images is a suspected copy. FOLDER gets nearest.jsonl, a row per image, and nearest.html, which shows the
images beside their neighbours.
"""

import sys
from functools import partial
from pathlib import Path

from diffusion.errors import explained_writes, printable
from diffusion.launch import CommandParser, choose_device, existing_folder, positive, run_command, share


def main() -> None:
    """Open, compare, write."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("images", type=existing_folder, metavar="IMAGES", help="folder of generated images")
    parser.add_argument("data", type=existing_folder, metavar="DATA", help="folder of a prepared data set, or of a run")
    parser.add_argument(
        "--data", type=existing_folder, dest="prepared", metavar="PREPARED",
        help="prepared data of a run that was trained on latents",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder for table and page")
    parser.add_argument(
        "--validation", type=existing_folder, metavar="DATA2",
        help="folder of images, or of prepared data, that were not trained on; default: the split `validation` of DATA",
    )  # fmt: skip
    parser.add_argument("--num", type=positive, default=3, help="neighbours of each image (default: 3)")
    parser.add_argument(
        "--quantile", type=share, default=0.01,
        help="an image nearer than this share of the validation images is a suspected copy (default: 0.01)",
    )  # fmt: skip
    parser.add_argument(
        "--clip", metavar="FOLDER", help="compare by features of this CLIP model, for likeness of content; default: by "
        "reduced pixels, which find copies",
    )  # fmt: skip
    parser.add_argument("--device", help="cpu, cuda ...; default: a GPU if available")
    options = parser.parse_args()

    import numpy as np
    import torch

    from diffusion.evaluation import nearest
    from diffusion.evaluation.config import EvaluationConfig
    from diffusion.evaluation.features import Clip
    from diffusion.evaluation.images import image_files
    from diffusion.evaluation.prompts import open_images

    images = open_images(options.images)
    data, buckets = nearest.find_data(options.data, options.prepared)
    training = nearest.open_training(data, buckets)
    validation = nearest.open_validation(data, options.validation)
    device = torch.device(choose_device(options.device))
    network = Clip(options.clip, "--clip", local_files_only=True) if options.clip else nearest.Pixels()
    config = EvaluationConfig(output_folder=str(options.out), batch_size=64)
    writing = partial(explained_writes, f"--out {options.out}", "Choose another folder")
    with writing():
        options.out.mkdir(parents=True, exist_ok=True)
    comparison = nearest.compare(
        image_files([image.path for image in images]), training, validation, network.to(device), config, device,
        num=options.num, quantile=options.quantile,
    )  # fmt: skip
    with writing():
        nearest.write_report(options.out, images, training, comparison, num=options.num, name=network.name)
    if (few := len(validation)) * options.quantile < 1 and options.quantile:
        chance = f"about one in {few + 1} new images is nearer than all of them, and then suspected"
        print(f"only {few} validation images: {chance}", file=sys.stderr)
    copies = comparison.copies()
    print(f"{len(copies)} of {len(images)} images are suspected copies of {len(training)} training images")
    for number in copies[:10]:
        near = next(filter(comparison.is_copy, comparison.neighbours[number]))
        print(printable(f"  {images[number].path.name} of {near.key}, distance {near.distance:.4f}"))
    for name, rows in {"generated": comparison.neighbours, "validation": comparison.validation}.items():
        print(f"median distance to the nearest training image, {name}: {np.median(nearest.distances(rows)):.4f}")
    print(f"suspected below {comparison.min_distance:.4f}; table and pairs: {options.out / nearest.PAGE}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
