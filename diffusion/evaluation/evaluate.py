"""An evaluation, as `evaluate.py` runs it: load models, generate images, compute numbers, write results and table."""

import copy
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diffusion import storage
from diffusion.config.training import Device
from diffusion.distributed import (
    agree,
    broadcast,
    is_first_rank,
    local_rank,
    local_world_size,
    on_first_rank,
    start_process_group,
)
from diffusion.errors import ConfigurationError, MachineError, error_context, explained_writes
from diffusion.evaluation import dpg, geneval2
from diffusion.evaluation.config import EvaluationConfig, ProtocolConfig
from diffusion.evaluation.generate import (
    EvaluatedModel,
    GenerationTask,
    Generator,
    find_models,
    generate_images,
    load_generator,
)
from diffusion.evaluation.images import image_files
from diffusion.evaluation.metrics import Metrics
from diffusion.evaluation.object_checks import ObjectChecks
from diffusion.evaluation.prompts import ListedImage, Prompt, open_images, read_prompts
from diffusion.evaluation.protocol import (
    RESULTS,
    VALIDATION_LOSS,
    Number,
    Protocol,
    Result,
    check_one_protocol,
    content_hash,
    read_results,
    table,
)
from diffusion.evaluation.suites import Suite
from diffusion.evaluation.validation_loss import validation_losses
from diffusion.evaluation.vqa import VisionLanguageModel
from diffusion.models.pretrained import is_pipeline

TABLE = "table.md"
IMAGES = "images"
"""Folder of generated images, in the output folder."""

JUDGEMENTS = "judgements"
"""Folder of the judgements of a suite's images, beside them."""


def evaluate(config: EvaluationConfig) -> None:
    """Run an evaluation; collective.

    Raises:
        UserError: on every rank, for errors of the configuration, the data or the machine.
    """
    start_process_group()
    if config.images is not None:
        folder = Path(config.images).expanduser()
        with error_context("images"):
            images = agree(lambda: open_images(folder))  # Before networks are loaded, which takes minutes.
        Evaluation(config=config).evaluate_folder(folder, images)
        return
    if is_pipeline(str(config.model)) and (low := [scale for scale in config.guidance_scales if scale < 1]):
        raise ConfigurationError(
            f"guidance_scales has {low}, but {config.model} is a pipeline, which has no guidance below 1: evaluate the "
            "run that it was exported from"
        )
    # Each node downloads a checkpoint of a store, before networks are loaded.
    models = broadcast(agree(lambda: find_models(str(config.model), config.weights)))
    evaluation = Evaluation(config=config)
    for model in models:
        evaluation.evaluate(model)


@dataclass(kw_only=True)
class Evaluation:
    """A configured evaluation, with prompts and reference set opened and networks loaded."""

    config: EvaluationConfig
    replaces: bool = False
    """Replace results and images of a checkpoint that was written again, where they are otherwise an error."""

    def __post_init__(self) -> None:
        config, protocol = self.config, self.config.protocol
        self.folder = Path(config.output_folder).expanduser()

        def make_folder() -> None:
            with explained_writes(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)

        on_first_rank(make_folder)
        self.device = agree(lambda: rank_device(config.device))
        self.prompts: list[Prompt] = agree(self._read_prompts)
        cache = Path(config.reference_cache or self.folder / "reference").expanduser()
        self.metrics = agree(lambda: Metrics(config=config, device=self.device, cache=cache))
        self.suites: dict[str, Suite[Any]] = agree(
            lambda: {suite.name: suite for suite in open_suites(protocol, self.device)}
        )

    def of_run(self, folder: Path) -> "Evaluation":
        """Return the same evaluation with the folder of a watched run, which may write a checkpoint again."""
        other = copy.copy(self)
        other.folder, other.replaces = folder, True
        return other

    def _read_prompts(self) -> list[Prompt]:
        config = self.config.protocol.prompts
        if config is None or not self.config.protocol.metrics:
            return []
        with error_context("protocol.prompts"):
            return read_prompts(
                config.path, column=config.column, category_column=config.category_column, num=config.num
            )

    def evaluate(self, model: EvaluatedModel) -> None:
        """Evaluate a model at each guidance scale, except for existing results.

        Raises:
            ConfigurationError: the model is missing, or the output folder has numbers of another protocol.
            DataError: the model is damaged.
        """
        generator = agree(lambda: load_generator(model, self.device, self.config.frozen))
        if self.config.protocol.metrics or self.suites:
            for scale in self.config.guidance_scales:
                self._evaluate_images(model, generator, scale)
        if self.config.protocol.validation_loss:
            result = _empty_result(model, generator, None)
            if not self._is_done(result, [VALIDATION_LOSS]):
                result.numbers |= validation_losses(model, generator)
                self._write(result)

    def evaluate_folder(self, folder: Path, images: Sequence[ListedImage]) -> None:
        """Evaluate the images of a folder.

        Raises:
            ConfigurationError: there are too few images, or no prompts; or the output folder has numbers of another
                folder of that name.
        """
        result = Result(name=folder.resolve().name, path=str(folder.resolve()))

        def find_others() -> None:
            states = [(image.path.name, image.path.stat()) for image in images]
            result.identity = content_hash([(name, state.st_size, state.st_mtime_ns) for name, state in states])
            path = self.folder / RESULTS / result.file_name
            if path.is_file():
                found = Result.read(path)
                if Path(found.path).resolve() != folder.resolve():
                    raise ConfigurationError(f"{path} is of another folder of that name: choose another output_folder")
                if found.identity == result.identity:
                    result.numbers = found.numbers

        on_first_rank(find_others)
        record: dict[str, Any] = {"num": len(images), "given": True}
        prompts = None
        if any(image.prompt for image in images):
            prompts = [Prompt(text=image.prompt, category=image.category) for image in images]
            record["prompts"] = content_hash([prompt.text for prompt in prompts])
        self._check_protocols(result, self.metrics.protocols(record, prompts or ()))
        result.numbers |= self.metrics.compute(image_files([image.path for image in images]), prompts, record)
        self._write(result)

    def _evaluate_images(self, model: EvaluatedModel, generator: Generator, scale: float) -> None:
        """Generate images at a guidance scale and compute their numbers."""
        result = _empty_result(model, generator, scale)
        tasks = self._tasks(scale)
        records = {kind: _protocol_record(task, generator) for kind, task in tasks.items()}
        expected = self.metrics.protocols(records["prompts"], self.prompts) if "prompts" in records else {}
        for name, suite in self.suites.items():
            expected |= suite.protocols(records[name])
        self._check_protocols(result, expected)
        folder = self.folder / IMAGES / result.file_name.removesuffix(".json")
        if not self._is_done(result, expected):
            for kind, task in tasks.items():
                label = f"{model.name} cfg {scale:g} {kind}"
                files = generate_images(generator, task, folder / kind, label, replaces=self.replaces)
                if kind in self.suites:
                    judgements = folder / kind / JUDGEMENTS
                    result.numbers |= self.suites[kind].evaluate(files, records[kind], judgements)
                else:
                    prompts = [self.prompts[task.prompt_of(image)] for image in range(task.num_images)]
                    result.numbers |= self.metrics.compute(image_files(files), prompts, records[kind])
            self._write(result)
        if not self.config.keep_images and is_first_rank() and folder.is_dir():
            shutil.rmtree(folder)

    def _tasks(self, scale: float) -> dict[str, GenerationTask]:
        """Images to generate, by their folder: for the metrics and for the suites."""
        protocol, batch_size = self.config.protocol, self.config.batch_size
        images = {"prompts": (self.prompts, protocol.sampling)} if protocol.metrics else {}
        for name, suite in self.suites.items():
            images[name] = suite.prompts(), replace(protocol.sampling, images_per_prompt=suite.images_per_prompt)
        return {
            name: GenerationTask(prompts=prompts, sampling=sampling, guidance_scale=scale, batch_size=batch_size)
            for name, (prompts, sampling) in images.items()
        }

    def _is_done(self, result: Result, expected: Iterable[str]) -> bool:
        """Check that the file of a result has all expected numbers; on the first rank, take over its numbers."""

        def check() -> bool:
            path = self.folder / RESULTS / result.file_name
            if not path.is_file():
                return False
            found = Result.read(path)
            if found.identity != result.identity:
                if self.replaces and found.path == result.path:
                    return False
                raise ConfigurationError(
                    f"{path} is of other weights of that name, or of a version whose hash of a model left out its "
                    "ingredients: choose another output_folder"
                )
            result.numbers |= found.numbers
            return set(expected) <= found.numbers.keys()

        return on_first_rank(check)

    def _check_protocols(self, result: Result, expected: Mapping[str, Protocol]) -> None:
        """Compare the protocols of a result to come with those of the output folder."""
        numbers = {name: Number(value=math.nan, protocol=protocol) for name, protocol in expected.items()}
        on_first_rank(lambda: check_one_protocol([*self._results(), replace(result, numbers=numbers)]))

    def _results(self) -> list[Result]:
        return read_results([self.folder]) if any((self.folder / RESULTS).glob("*.json")) else []

    def _write(self, result: Result) -> None:
        """Write a result and the table of all results."""

        def write() -> None:
            check_one_protocol([*self._results(), result])
            result.write(self.folder)
            write_table(self.folder)

        on_first_rank(write)


def write_table(folder: Path) -> None:
    """Write the table of all results of an output folder, which another process may write, too."""
    storage.write(str(folder / TABLE), table(read_results([folder])).encode())


def open_suites(config: ProtocolConfig, device: torch.device) -> list[Suite[Any]]:
    """Read the suites of a protocol and load their models; a ConfigurationError if one is missing."""
    suites: list[Suite[Any]] = []
    if config.compositional is not None:
        suites.append(ObjectChecks.open(config.compositional, device))
    kinds = ((config.dpg, dpg.read_items, dpg.Dpg), (config.geneval2, geneval2.read_items, geneval2.GenEval2))
    asked: list[Any] = [  # The questions are read before the model, which takes minutes.
        partial(kind, items=read_items(Path(one.path).expanduser()), images_per_prompt=one.images_per_prompt)
        for one, read_items, kind in kinds
        if one is not None
    ]
    if asked:
        assert config.networks.vqa is not None
        vqa = VisionLanguageModel(config.networks.vqa, device)
        suites += [suite(vqa=vqa) for suite in asked]
    return suites


def rank_device(device: Device) -> torch.device:
    """Device of this rank; a MachineError if the machine has fewer GPUs than ranks."""
    num_gpus = torch.cuda.device_count()
    if device.resolve(num_gpus) is Device.cpu:
        return torch.device("cpu")
    if num_gpus < local_world_size():
        raise MachineError(f"{local_world_size()} ranks on this machine, but {num_gpus} GPUs: start one rank per GPU")
    torch.cuda.set_device(local_rank())
    return torch.device("cuda", local_rank())


def _protocol_record(task: GenerationTask, generator: Generator) -> dict[str, Any]:
    """Part of the protocols: all that the images depend on, without model and guidance scale, which are compared."""
    # Another batch size changes rounding errors only; the noise schedule is the model's.
    excluded = ("model", "guidance_scale", "batch_size", "noise_schedule")
    record = {key: value for key, value in task.record(generator).items() if key not in excluded}
    return {"num": task.num_images, **record}


def _empty_result(model: EvaluatedModel, generator: Generator, guidance_scale: float | None) -> Result:
    return Result(
        name=model.name,
        path=model.origin or model.path,
        step=model.step,
        weights=model.weights,
        guidance_scale=guidance_scale,
        identity=generator.mark.version,
    )
