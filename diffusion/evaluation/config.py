"""Configuration of `evaluate.py`: model, protocol, and output."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from diffusion.config.fields import MAX_SECONDS, MAX_SEED, bounded, location
from diffusion.config.frozen import FrozenPaths
from diffusion.config.model import NUM_TIMESTEPS, Sampler
from diffusion.config.operations import PrometheusConfig
from diffusion.config.training import Device, Plugin, WandbConfig


class Metric(str, Enum):
    """Metrics of images against a reference set, or against their prompts."""

    fid = "fid"
    kid = "kid"
    clip_fid = "clip_fid"
    cmmd = "cmmd"
    clip_score = "clip_score"
    hpsv3 = "hpsv3"


OF_REFERENCE = (Metric.fid, Metric.kid, Metric.clip_fid, Metric.cmmd)
"""Metrics that need a reference set."""

OF_PROMPTS = (Metric.clip_score, Metric.hpsv3)
"""Metrics of each image and its prompt: means over all, and over the images of each category."""


class ResizeFilter(str, Enum):
    """Filter that resizes images for a feature network: Pillow's, antialiased, on 32-bit numbers."""

    bicubic = "bicubic"
    bilinear = "bilinear"
    lanczos = "lanczos"


@dataclass(kw_only=True)
class PromptsConfig:
    """Prompts of generated images."""

    path: str = location(MISSING)
    """A .tsv or .csv file with a column of prompts (PartiPrompts, DrawBench), a .jsonl or .json of objects (GenEval), a
    .txt file with one prompt per line, or the folder of a prepared data set, for the first caption of each image."""

    column: str | None = None
    """Column of the prompts; null: the first of `Prompt`, `Prompts`, `caption`, `text`."""

    category_column: str | None = None
    """Column of the categories; null: `Category`, if present."""

    num: int | None = bounded(None, min=1)
    """Number of prompts, chosen by the hash of their position and text; null: all."""


@dataclass(kw_only=True)
class ReferenceConfig:
    """Real images for comparison with generated ones."""

    path: str = location(MISSING)
    """Folder of images, or of a prepared data set (or one split or bucket of it)."""

    num: int | None = bounded(None, min=1)
    """Number of images, chosen by the hash of their names; null: all."""

    size: int | None = bounded(None, min=1)
    """Side in pixels to which the centre square is scaled first; null: its own size."""


@dataclass(kw_only=True)
class NetworksConfig:
    """Feature networks, with weights from local files, or CLIP models from the hub."""

    inception: str | None = location(None)
    """File `weights-inception-2015-12-05-6726825d.pth` of torch-fidelity, for FID and KID."""

    inception_replacement: Plugin | None = None
    """A user-defined network (`diffusion.evaluation.features.FeatureNetwork`) that replaces it; the metrics then have
    its name, not FID and KID."""

    clip_fid: str = location("openai/clip-vit-base-patch32")
    """Folder or hub name of the CLIP model of CLIP-FID (transformers, safetensors)."""

    clip_score: str = location("openai/clip-vit-base-patch32")
    """CLIP model of the CLIP score."""

    cmmd: str = location("openai/clip-vit-large-patch14-336")
    """CLIP model of CMMD."""

    hpsv3: str | None = location(None)
    """Folder of the reward model of HPSv3: config.json, tokenizer and preprocessor files of Qwen2-VL-7B-Instruct,
    HPSv3.safetensors, and instruction.txt, the authors' instruction."""

    vqa: str | None = location(None)
    """Folder of a vision-language model (transformers) that answers the questions of `dpg` and `geneval2`."""

    local_files_only: bool = False
    """Never download from the hub; fail if the weights are not on this machine."""


@dataclass(kw_only=True)
class CompositionalConfig:
    """Prompts of colours, counts and spatial relations; a detector checks their images."""

    suite: str = location(MISSING)
    """A .jsonl file in GenEval's format, or the import path of a function that returns an
    `evaluation.object_checks.CheckSuite`."""

    detector: str | None = location(None)
    """Folder of an OWL-ViT or OWLv2 model (transformers); null: the detector that comes with the suite."""

    threshold: float = bounded(0.3, min=0, max=1)
    """Minimum confidence of an object that `detector` finds."""

    images_per_prompt: int = bounded(4, min=1)
    """Images of each prompt."""


@dataclass(kw_only=True)
class DpgConfig:
    """DPG-Bench: dense prompts; `networks.vqa` answers the yes-no questions about their images."""

    path: str = location(MISSING)
    """The benchmark's dpg_bench.csv."""

    images_per_prompt: int = bounded(4, min=1)
    """Images of each prompt; the authors make 4."""


@dataclass(kw_only=True)
class GenEval2Config:
    """GenEval 2: compositional prompts; Soft-TIFA is the probability of the correct answers to `networks.vqa`."""

    path: str = location(MISSING)
    """The benchmark's geneval2_data.jsonl."""

    images_per_prompt: int = bounded(1, min=1)
    """Images of each prompt; the authors make 1."""


@dataclass(kw_only=True)
class SamplingConfig:
    """Sampling of images."""

    num_inference_steps: int = bounded(50, min=1, max=NUM_TIMESTEPS)
    """Steps of the sampler."""

    sampler: Sampler | None = None
    """Null: ddim, or euler for rectified flow."""

    seed: int = bounded(0, min=0, max=MAX_SEED)
    """Seed of the initial latents, which depend on (seed, prompt, image of the prompt)."""

    height: int | None = bounded(None, min=1)
    """Size in pixels; null: the training size."""

    width: int | None = bounded(None, min=1)
    """Size in pixels; null: the training size."""

    negative_prompt: str = ""
    """Negative prompt of the guidance; by default the empty caption, as in training."""

    images_per_prompt: int = bounded(1, min=1)
    """Images of each prompt."""

    scores: dict[str, float] = field(default_factory=dict)
    """Scores to ask a checkpoint for, by name (`model.score_conditioning`)."""


@dataclass(kw_only=True)
class ProtocolConfig:
    """Everything that determines a metric besides the model and the guidance scale."""

    metrics: list[Metric] = field(default_factory=lambda: [*OF_REFERENCE, Metric.clip_score])
    """Metrics to compute; `hpsv3` needs `networks.hpsv3`."""

    prompts: PromptsConfig | None = None
    """Prompts; a model needs them."""

    reference: ReferenceConfig | None = None
    """Reference set; null only without metrics that need it."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    networks: NetworksConfig = field(default_factory=NetworksConfig)

    resize_filter: ResizeFilter = ResizeFilter.bicubic
    """Resize filter of all feature networks."""

    compositional: CompositionalConfig | None = None
    """Compositional prompts; null: none."""

    dpg: DpgConfig | None = None
    """DPG-Bench; null: none."""

    geneval2: GenEval2Config | None = None
    """GenEval 2; null: none."""

    validation_loss: bool = False
    """Compute the loss on the validation data of the run: overall, by timestep and by stream."""


@dataclass(kw_only=True)
class EvaluationLoggersConfig:
    """Additional destinations of the numbers of a watcher."""

    tensorboard: bool = False
    """Write event files to `RUN.evaluation` in the TensorBoard folder of the run, or of the output folder."""

    wandb: WandbConfig | None = None
    """A separate W&B run in the group of the run; null: none."""

    prometheus: PrometheusConfig | None = None
    """HTTP endpoint with the number of checkpoints to evaluate; null: none."""


@dataclass(kw_only=True)
class EvaluationConfig:
    """An evaluation."""

    model: str | None = location(None)
    """A checkpoint, a run folder or its `checkpoints` folder (a path or s3://bucket/prefix), a file of averaged
    weights, or a folder of a pipeline in the diffusers layout."""

    weights: list[str] = field(default_factory=lambda: ["raw"])
    """Weights of a checkpoint: `raw`, `ema`, or an average such as `decay-0.999`."""

    frozen: FrozenPaths = field(default_factory=FrozenPaths)
    """VAE and text encoder of the model, where they are not at the paths of its training."""

    images: str | None = location(None)
    """A folder of images instead of a model; its `metadata.jsonl` has their prompts."""

    guidance_scales: list[float] = bounded([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], min=0)
    """Guidance scales to evaluate; of a pipeline from 1 on."""

    output_folder: str = location(MISSING, local=True)
    """Folder of images, metrics and tables, shared by all nodes; the same command again continues."""

    reference_cache: str | None = location(None, local=True)
    """Folder of the statistics of reference sets; null: `reference` in the output folder."""

    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)

    keep_images: bool = True
    """Keep the generated images after their metrics are written."""

    batch_size: int = bounded(16, min=1)
    """Images per batch on each rank. Changes the images by rounding only."""

    num_threads: int = bounded(4, min=1)
    """Threads for resizing images."""

    device: Device = Device.auto
    """auto: a GPU if there is one."""

    watch: bool = False
    """Follow a run: evaluate each checkpoint once, until the run is finished."""

    runs: list[str] = location([])
    """Runs to follow, in place of one `model`; the results of each are in a folder of its name in the output folder."""

    watch_forever: bool = False
    """Continue to watch a finished run, since it may be continued."""

    poll_seconds: float = bounded(30.0, above=0, max=MAX_SECONDS)
    """Seconds between two checks for new checkpoints."""

    idle_seconds: float | None = bounded(None, min=0)
    """Seconds without a checkpoint to evaluate after which a watcher ends; null: it waits for the end of the runs."""

    watch_only: bool = False
    """Evaluate nothing, but write the tables, loggers and the Prometheus endpoint of what other watchers evaluate."""

    loggers: EvaluationLoggersConfig = field(default_factory=EvaluationLoggersConfig)

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations; `key` is empty, since this is the whole configuration."""
        protocol = self.protocol
        if sum((self.model is not None, self.images is not None, bool(self.runs))) != 1:
            yield "Set either model=CHECKPOINT or images=FOLDER, or (with watch=true) runs=[RUN_FOLDER, ...]."
        if self.watch and self.images is not None:
            yield "watch is true without a run. Set model=RUN_FOLDER or model=s3://bucket/prefix, not images."
        if not self.watch and (self.runs or self.watch_only or self.watch_forever or self.idle_seconds is not None):
            yield "runs, watch_only, watch_forever and idle_seconds are for watchers. Set watch=true."
        if len(set(map(run_label, self.runs))) != len(self.runs):
            yield f"runs is {self.runs}, with a repeated name of a folder. Evaluate these runs by separate watchers."
        compared = [metric.value for metric in protocol.metrics if metric in OF_REFERENCE]
        if compared and protocol.reference is None:
            yield (
                f"protocol.metrics has {', '.join(compared)}, which need real images. Set protocol.reference.path, or "
                "remove them."
            )
        if protocol.metrics and protocol.prompts is None and self.images is None:
            yield "protocol.metrics need prompts. Set protocol.prompts.path, or protocol.metrics=[]."
        if Metric.hpsv3 in protocol.metrics and protocol.networks.hpsv3 is None:
            yield "protocol.metrics has hpsv3, which needs the folder of a reward model. Set protocol.networks.hpsv3."
        if (protocol.dpg or protocol.geneval2) and protocol.networks.vqa is None:
            yield "protocol.dpg and protocol.geneval2 need a model that answers questions. Set protocol.networks.vqa."
        of_models = (protocol.compositional, protocol.dpg, protocol.geneval2, protocol.validation_loss)
        listed = "protocol.compositional, protocol.dpg, protocol.geneval2 or protocol.validation_loss"
        if not (protocol.metrics or any(of_models)):
            yield f"Nothing is evaluated. Set protocol.metrics, {listed}."
        if self.images is not None and any(of_models):
            yield f"images is set, but a model is needed for {listed}. Remove these, or set model instead."
        if len(set(self.guidance_scales)) != len(self.guidance_scales) or not self.guidance_scales:
            yield f"guidance_scales is {self.guidance_scales}, but must name at least one, and none twice."
        if not self.weights:
            yield "weights is empty. Set weights=[raw] or weights=[raw, ema]."


def run_label(uri: str) -> str:
    """Name of a run, of its folder or prefix, in output folders and metrics."""
    return uri.rstrip("/").removesuffix("/checkpoints").rpartition("/")[2]
