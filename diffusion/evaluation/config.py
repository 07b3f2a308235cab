"""Configuration of `evaluate.py`: what is evaluated, by which protocol, and where the numbers go."""

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from diffusion.config.training import Device, Plugin, WandbConfig
from diffusion.errors import ConfigurationError


class Metric(str, Enum):
    """Numbers that compare images with a reference set, or with their prompts."""

    fid = "fid"
    kid = "kid"
    clip_fid = "clip_fid"
    cmmd = "cmmd"
    clip_score = "clip_score"


OF_REFERENCE = (Metric.fid, Metric.kid, Metric.clip_fid, Metric.cmmd)
"""Metrics that need a reference set."""


class ResizeFilter(str, Enum):
    """How images are brought to the size of a feature network: Pillow's filters, antialiased, on 32-bit numbers."""

    bicubic = "bicubic"
    bilinear = "bilinear"
    lanczos = "lanczos"


@dataclass(kw_only=True)
class PromptsConfig:
    """Prompts that images are generated for."""

    path: str = MISSING
    """A .tsv or .csv with a column of prompts (PartiPrompts, DrawBench), a .txt with one a line, or the folder of a
    prepared data set, whose first captions are taken."""

    column: str | None = None
    """Column of the prompts; null: `Prompt`, `Prompts`, `caption` or `text`, whichever is there."""

    category_column: str | None = None
    """Column of the categories; null: `Category`, if it is there."""

    num: int | None = None
    """So many of them, chosen by the hash of their place and text; null is all."""


@dataclass(kw_only=True)
class ReferenceConfig:
    """Real images that generated ones are compared with."""

    path: str = MISSING
    """Folder of images, or of a prepared data set (or one split or bucket of it)."""

    num: int | None = None
    """So many of them, chosen by the hash of their names; null is all."""

    size: int | None = None
    """Side in pixels that the middle square is scaled to before anything else; null keeps its size."""


@dataclass(kw_only=True)
class NetworksConfig:
    """Feature networks: their weights are files of this machine, or CLIP models of the hub."""

    inception: str | None = None
    """File `weights-inception-2015-12-05-6726825d.pth` of torch-fidelity, for FID and KID."""

    inception_replacement: Plugin | None = None
    """A network of the user's own (`diffusion.evaluation.features.FeatureNetwork`) in its place; the numbers are then
    called by its name, not FID and KID."""

    clip_fid: str = "openai/clip-vit-base-patch32"
    """Folder or hub name of the CLIP model of CLIP-FID (transformers, safetensors)."""

    clip_score: str = "openai/clip-vit-base-patch32"
    """That of the CLIP score."""

    cmmd: str = "openai/clip-vit-large-patch14-336"
    """That of CMMD."""

    local_files_only: bool = False
    """Never ask the hub; fail when the weights are not on this machine."""


@dataclass(kw_only=True)
class CompositionalConfig:
    """Prompts of colours, counts and spatial relations, whose images a detector judges."""

    suite: str = "shapes"
    """`shapes` (those of the demo), or a .jsonl file in GenEval's format."""

    detector: str | None = None
    """Folder of an OWL-ViT or OWLv2 model (transformers); null: the oracle of the shapes."""

    threshold: float = 0.3
    """Least confidence of a detected object; without meaning for the oracle."""

    images_per_prompt: int = 4
    """Images of each prompt."""


@dataclass(kw_only=True)
class SamplingConfig:
    """How images are generated."""

    num_inference_steps: int = 50
    """DDIM steps."""

    seed: int = 0
    """Seed of the initial latents, whose addresses are (seed, prompt, image of the prompt)."""

    height: int | None = None
    """Pixels; null: as trained."""

    width: int | None = None
    """Pixels; null: as trained."""

    negative_prompt: str = ""
    """What to lead away from; the empty caption, as in training."""

    images_per_prompt: int = 1
    """Images of each prompt."""


@dataclass(kw_only=True)
class ProtocolConfig:
    """All that a number depends on besides the images' model and the guidance scale."""

    metrics: list[Metric] = field(default_factory=lambda: list(Metric))
    """Numbers to compute."""

    prompts: PromptsConfig | None = None
    """Null: no metrics of prompts."""

    reference: ReferenceConfig | None = None
    """Null: no metrics of a reference set."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    networks: NetworksConfig = field(default_factory=NetworksConfig)

    resize_filter: ResizeFilter = ResizeFilter.bicubic
    """Of all feature networks."""

    compositional: CompositionalConfig | None = None
    """Null: none."""

    validation_loss: bool = False
    """Loss on the held-out data of the run, over all, by timestep and by stream."""


@dataclass(kw_only=True)
class EvaluationLoggersConfig:
    """Where a watcher writes numbers besides its output folder."""

    tensorboard: bool = False
    """Write event files to `RUN.evaluation` in the TensorBoard folder of the run, or of the output folder."""

    wandb: WandbConfig | None = None
    """A run of its own in the group of the run; null is none."""


@dataclass(kw_only=True)
class EvaluationConfig:
    """An evaluation."""

    model: str | None = None
    """A checkpoint, a run folder or its `checkpoints` folder (a path or s3://bucket/prefix), a file of averaged
    weights, or a folder of a pipeline in the diffusers layout."""

    weights: list[str] = field(default_factory=lambda: ["raw"])
    """Of a checkpoint: `raw`, `ema`, or an average such as `decay-0.999`."""

    images: str | None = None
    """A folder of images in place of a model; `metadata.jsonl` in it names their prompts."""

    guidance_scales: list[float] = field(default_factory=lambda: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    """Each is evaluated."""

    output_folder: str = MISSING
    """Images, numbers and tables; the same command again continues. All nodes must see it."""

    reference_cache: str | None = None
    """Folder of the statistics of reference sets; null: `reference` in the output folder."""

    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)

    keep_images: bool = True
    """Keep the generated images once their numbers are written."""

    batch_size: int = 16
    """Images at a time on each rank. Images change by rounding errors only."""

    num_threads: int = 4
    """Threads that read and resize images."""

    device: Device = Device.auto
    """auto takes a GPU where there is one."""

    watch: bool = False
    """Follow a run: evaluate each of its checkpoints once, until the run is finished."""

    watch_forever: bool = False
    """Go on watching when the run is finished, since it may be continued."""

    poll_seconds: float = 30.0
    """Seconds between two looks at the run."""

    loggers: EvaluationLoggersConfig = field(default_factory=EvaluationLoggersConfig)


def check_evaluation(config: EvaluationConfig) -> None:
    """Refuse impossible combinations.

    Raises:
        ConfigurationError: says all that is wrong.
    """
    protocol = config.protocol
    problems = []
    if (config.model is None) == (config.images is None):
        problems.append("give either model=CHECKPOINT or images=FOLDER")
    if config.watch and config.model is None:
        problems.append("watch=true follows a run: give model=RUN_FOLDER or s3://bucket/prefix")
    if protocol.reference is None and (
        asked := [metric.value for metric in protocol.metrics if metric in OF_REFERENCE]
    ):
        problems.append(f"{', '.join(asked)} need real images: give protocol.reference.path, or leave them out")
    if protocol.metrics and protocol.prompts is None and config.images is None:
        problems.append("protocol.metrics need prompts: give protocol.prompts.path, or protocol.metrics=[]")
    if not (protocol.metrics or protocol.compositional or protocol.validation_loss):
        problems.append("nothing is asked for: give protocol.metrics, protocol.compositional or validation_loss")
    if config.images is not None and (protocol.compositional or protocol.validation_loss):
        problems.append("protocol.compositional and protocol.validation_loss need a model, not images")
    if len(set(config.guidance_scales)) != len(config.guidance_scales) or not config.guidance_scales:
        problems.append(f"guidance_scales={config.guidance_scales} must name at least one, and none twice")
    for key, number in (("batch_size", config.batch_size), ("num_threads", config.num_threads)):
        if number < 1:
            problems.append(f"{key}={number} must be 1 or more")
    if config.poll_seconds <= 0:
        problems.append(f"poll_seconds={config.poll_seconds} must be positive")
    if not config.weights:
        problems.append("weights=[] names none: give [raw], or [raw, ema]")
    if problems:
        raise ConfigurationError("The evaluation cannot be run: " + "; ".join(problems) + ".")
