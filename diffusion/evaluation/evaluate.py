"""An evaluation, as `evaluate.py` runs it: load models, generate images, compute numbers, write results and table."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusion.distributed import agree, broadcast, is_first_rank, start_process_group
from diffusion.errors import ConfigurationError, error_context
from diffusion.evaluation.config import EvaluationConfig, SamplingConfig
from diffusion.evaluation.features import Extractor, Networks
from diffusion.evaluation.generate import EvaluatedModel, Generator, Task, find_models, generate_images, load_generator
from diffusion.evaluation.images import ImageFiles, list_images
from diffusion.evaluation.metrics import Metrics
from diffusion.evaluation.object_checks import ObjectChecks, open_object_checks
from diffusion.evaluation.prompts import Prompt, read_listing, read_prompts
from diffusion.evaluation.protocol import (
    RESULTS,
    Protocol,
    Result,
    check_one_protocol,
    difference,
    generated_record,
    given_record,
    read_results,
    table,
)
from diffusion.evaluation.ranks import choose_device
from diffusion.evaluation.validation_loss import NAME as VALIDATION_LOSS
from diffusion.evaluation.validation_loss import validation_losses
from diffusion.files import write_atomically

TABLE = "table.md"
IMAGES = "images"
"""Folder of generated images, in the output folder."""


@dataclass(kw_only=True)
class Evaluation:
    """A configured evaluation, with prompts and reference set opened and networks loaded.

    Args:
        config: the configuration.
    """

    config: EvaluationConfig

    def __post_init__(self) -> None:
        config, protocol = self.config, self.config.protocol
        self.folder = Path(config.output_folder).expanduser()
        self.device = agree(lambda: choose_device(config.device))
        self.metrics = Metrics(
            config=protocol,
            networks=Networks(protocol.networks, self.device),
            extractor=Extractor(
                device=self.device,
                resize_filter=protocol.resize_filter,
                batch_size=config.batch_size,
                num_threads=config.num_threads,
            ),
            cache=Path(config.reference_cache or self.folder / "reference").expanduser(),
        )
        agree(self.metrics.open)
        self.prompts: list[Prompt] = agree(self._read_prompts)
        self.object_checks: ObjectChecks | None = None
        if (settings := protocol.compositional) is not None:
            self.object_checks = agree(lambda: open_object_checks(settings, self.device))

    def evaluate(self, model: EvaluatedModel) -> list[Result]:
        """Evaluate a model at each guidance scale, except for existing results.

        Raises:
            ConfigurationError: the model is missing, or the output folder has numbers of another protocol.
            DataError: the model is damaged.
        """
        generator = agree(lambda: load_generator(model, self.device))
        results = []
        if self.config.protocol.metrics or self.object_checks is not None:
            results += [self._evaluate_images_of(model, generator, scale) for scale in self.config.guidance_scales]
        if self.config.protocol.validation_loss:
            results.append(self._evaluate_loss(model, generator))
        return results

    def evaluate_folder(self, folder: Path) -> Result:
        """Evaluate the images of a folder: those of its listing, or all without a listing.

        Raises:
            ConfigurationError: there are too few images, or no prompts.
            DataError: the listing is invalid.
        """
        listed = agree(lambda: read_listing(folder))
        files = list_images(folder) if listed is None else [image.path for image in listed]
        texts = None if listed is None else [image.prompt for image in listed]
        numbers = self.metrics.compute(ImageFiles(files), texts, given_record(len(files)))
        return self._write(Result(name=folder.resolve().name, path=str(folder), numbers=numbers))

    def _read_prompts(self) -> list[Prompt]:
        config = self.config.protocol.prompts
        if config is None or not self.config.protocol.metrics:
            return []
        with error_context("protocol.prompts"):
            return read_prompts(
                config.path, column=config.column, category_column=config.category_column, num=config.num
            )

    def _evaluate_loss(self, model: EvaluatedModel, generator: Generator) -> Result:
        result = _empty_result(model, generator, None)
        if (known := agree(lambda: self._read_result(result, {VALIDATION_LOSS: None}))) is not None:
            return known
        result.numbers |= validation_losses(model, generator)
        return self._write(result)

    def _evaluate_images_of(self, model: EvaluatedModel, generator: Generator, scale: float) -> Result:
        """Generate images at a guidance scale and compute their numbers."""
        result = _empty_result(model, generator, scale)
        tasks = self._tasks(scale)
        records = {kind: generated_record(task.record(generator), task.num_images) for kind, task in tasks.items()}
        expected = self._protocols(records)
        if known := agree(lambda: self._read_result(result, expected)):
            return known
        folder = self.folder / IMAGES / result.file_name.removesuffix(".json")
        for kind, task in tasks.items():
            files = generate_images(generator, task, folder / kind, f"{model.name} cfg {scale:g} {kind}")
            if kind == "prompts":
                texts = [self.prompts[task.prompt_of(image)].text for image in range(task.num_images)]
                result.numbers |= self.metrics.compute(ImageFiles(files), texts, records[kind])
            else:
                assert self.object_checks is not None
                result.numbers |= self.object_checks.evaluate(files, records[kind])
        self._write(result)
        if not self.config.keep_images and is_first_rank():
            shutil.rmtree(folder)
        return result

    def _tasks(self, scale: float) -> dict[str, Task]:
        """Images to generate, by their folder: for the metrics and for the object checks."""
        sampling, tasks = self.config.protocol.sampling, {}
        if self.config.protocol.metrics:
            tasks["prompts"] = self._task(self.prompts, sampling, scale)
        if self.object_checks is not None:
            copies = self.object_checks.config.images_per_prompt
            tasks["compositional"] = self._task(
                self.object_checks.prompts(), replace(sampling, images_per_prompt=copies), scale
            )
        return tasks

    def _task(self, prompts: Sequence[Prompt], sampling: SamplingConfig, scale: float) -> Task:
        return Task(prompts=prompts, sampling=sampling, guidance_scale=scale, batch_size=self.config.batch_size)

    def _protocols(self, records: dict[str, dict[str, Any]]) -> dict[str, Protocol]:
        expected = self.metrics.protocols(records["prompts"]) if "prompts" in records else {}
        if self.object_checks is not None:
            expected |= self.object_checks.protocols(records["compositional"])
        return expected

    def _read_result(self, result: Result, expected: Mapping[str, Protocol | None]) -> Result | None:
        """Read the existing result; None if there is none, or if numbers are missing.

        Args:
            result: the result without numbers.
            expected: names of the numbers, and protocols to compare unless None.

        Raises:
            ConfigurationError: the existing result is of another model or protocol.
        """
        path = self.folder / RESULTS / result.file_name
        if not path.is_file():
            return None
        found = Result.read(path)
        if found.identity != result.identity:
            raise ConfigurationError(f"{path} is of other weights of that name: choose another output_folder")
        for name, protocol in expected.items():
            number = found.numbers.get(name)
            if number and protocol and (differing := difference(number.protocol, protocol)):
                raise ConfigurationError(
                    f"{path} has {name} of another protocol ({'; '.join(differing)}): choose another output_folder"
                )
        return found if expected.keys() <= found.numbers.keys() else None

    def _write(self, result: Result) -> Result:
        """Write a result and the table of all results."""

        def write() -> None:
            if not is_first_rank():
                return
            existing = read_results([self.folder]) if (self.folder / RESULTS).is_dir() else []
            for other in existing:
                check_one_protocol([other, result])
            result.write(self.folder)
            write_atomically(self.folder / TABLE, table(read_results([self.folder])))

        agree(write)
        return result


def evaluate(config: EvaluationConfig) -> list[Result]:
    """Run an evaluation; collective.

    Returns:
        The results, with numbers on the first rank only.

    Raises:
        UserError: on every rank, for errors of the configuration, the data or the machine.
    """
    start_process_group()
    evaluation = Evaluation(config=config)
    if config.images is not None:
        return [evaluation.evaluate_folder(Path(config.images).expanduser())]
    assert config.model is not None
    source = config.model
    models = broadcast(agree(lambda: find_models(source, config.weights)))
    return [result for model in models for result in evaluation.evaluate(model)]


def _empty_result(model: EvaluatedModel, generator: Generator, guidance_scale: float | None) -> Result:
    return Result(
        name=model.name,
        path=model.origin or model.path,
        step=model.step,
        weights=model.weights,
        guidance_scale=guidance_scale,
        identity=generator.identity,
    )
