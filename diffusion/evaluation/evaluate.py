"""An evaluation: what `evaluate.py` does with a configuration."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.config.evaluation import EvaluationConfig, PromptsConfig, SamplingConfig
from diffusion.distributed import agree
from diffusion.errors import ConfigurationError
from diffusion.evaluation.compositional import Compositional, open_compositional
from diffusion.evaluation.extraction import Extractor
from diffusion.evaluation.features import Networks
from diffusion.evaluation.generation import Task, generate_images
from diffusion.evaluation.held_out_loss import NAME as VALIDATION_LOSS
from diffusion.evaluation.held_out_loss import held_out_losses
from diffusion.evaluation.images import ImageFiles, list_images
from diffusion.evaluation.listing import read_listing
from diffusion.evaluation.metrics import Metrics
from diffusion.evaluation.models import Generator, Subject, find_subjects, load_generator
from diffusion.evaluation.prompts import Prompt, read_prompts
from diffusion.evaluation.protocol import Protocol, difference, generated_record, given_record
from diffusion.evaluation.ranks import Ranks, choose_device
from diffusion.evaluation.results import Result, check_one_protocol, read_results, table
from diffusion.files import write_atomically

log = logging.getLogger(__name__)

TABLE = "table.md"
IMAGES = "images"
"""Folders of generated images, in the output folder."""


@dataclass(kw_only=True)
class Evaluation:
    """A protocol that is ready to be applied: what it needs is opened and loaded.

    Args:
        config: the configuration.
        ranks: this rank among all.
    """

    config: EvaluationConfig
    ranks: Ranks

    def __post_init__(self) -> None:
        config, protocol = self.config, self.config.protocol
        self.folder = Path(config.output_folder).expanduser()
        self.device = agree(lambda: choose_device(config.device))
        self.metrics = Metrics(
            config=protocol,
            networks=Networks(protocol.networks, self.device),
            extractor=Extractor(
                ranks=self.ranks,
                device=self.device,
                resize_filter=protocol.resize_filter,
                batch_size=config.batch_size,
                num_threads=config.num_threads,
            ),
            cache=Path(config.reference_cache or self.folder / "reference").expanduser(),
        )
        agree(self.metrics.open)
        self.prompts = agree(lambda: _prompts(protocol.prompts)) if protocol.metrics else []
        self.compositional: Compositional | None = None
        if (settings := protocol.compositional) is not None:
            self.compositional = agree(lambda: open_compositional(settings, self.device))

    def evaluate(self, subject: Subject) -> list[Result]:
        """Evaluate one model at each guidance scale; what is written already is not computed again.

        Raises:
            ConfigurationError: the model is not there, or the output folder holds numbers of another protocol.
            DataError: the model is damaged.
        """
        generator = agree(lambda: load_generator(subject, self.device))
        results = []
        for scale in self.config.guidance_scales:
            if result := self._at_scale(subject, generator, scale):
                results.append(result)
        if self.config.protocol.validation_loss:
            result = Result(**_of(subject, generator))
            if (known := agree(lambda: self._known(result, {VALIDATION_LOSS: None}))) is None:
                result.numbers |= held_out_losses(subject, generator, self.ranks)
                known = self._finish(result)
            results.append(known)
        return results

    def evaluate_images(self, folder: Path) -> Result:
        """Evaluate a folder of images: those of its listing, or all where it has none.

        Raises:
            ConfigurationError: it holds too few, or no prompts.
            DataError: the listing is wrong.
        """
        listed = agree(lambda: read_listing(folder))
        files = list_images(folder) if listed is None else [image.path for image in listed]
        texts = None if listed is None else [image.prompt for image in listed]
        numbers = self.metrics.compute(ImageFiles(files), texts, given_record(len(files)))
        return self._finish(Result(name=folder.resolve().name, place=str(folder), numbers=numbers))

    def _at_scale(self, subject: Subject, generator: Generator, scale: float) -> Result | None:
        """The numbers that depend on the guidance scale; None if there are none."""
        protocol = self.config.protocol
        if not protocol.metrics and self.compositional is None:
            return None
        result = Result(**_of(subject, generator), guidance_scale=scale)
        place = self.folder / IMAGES / result.file_name.removesuffix(".json")
        tasks = self._tasks(scale)
        records = {kind: generated_record(task.record(generator), task.num_images) for kind, task in tasks.items()}
        expected = self._protocols(records)
        if known := agree(lambda: self._known(result, expected)):
            return known
        for kind, task in tasks.items():
            files = generate_images(generator, task, place / kind, self.ranks, f"{subject.name} cfg {scale:g} {kind}")
            if kind == "prompts":
                texts = [self.prompts[task.prompt_of(image)].text for image in range(task.num_images)]
                result.numbers |= self.metrics.compute(ImageFiles(files), texts, records[kind])
            else:
                assert self.compositional is not None
                result.numbers |= self.compositional.judge(files, records[kind], self.ranks)
        self._finish(result)
        if not self.config.keep_images and self.ranks.is_first:
            shutil.rmtree(place)
        return result

    def _tasks(self, scale: float) -> dict[str, Task]:
        sampling, tasks = self.config.protocol.sampling, {}
        if self.config.protocol.metrics:
            tasks["prompts"] = self._task(self.prompts, sampling, scale)
        if self.compositional is not None:
            copies = self.compositional.config.images_per_prompt
            changed = SamplingConfig(**{**vars(sampling), "images_per_prompt": copies})
            tasks["compositional"] = self._task(self.compositional.prompts(), changed, scale)
        return tasks

    def _task(self, prompts: Sequence[Prompt], sampling: SamplingConfig, scale: float) -> Task:
        size = self.config.batch_size
        return Task(prompts=prompts, sampling=sampling, guidance_scale=scale, batch_size=size)

    def _protocols(self, records: dict[str, dict[str, Any]]) -> dict[str, Protocol]:
        expected = self.metrics.protocols(records["prompts"]) if "prompts" in records else {}
        if self.compositional is not None:
            expected |= self.compositional.protocols(records["compositional"])
        return expected

    def _known(self, result: Result, expected: Mapping[str, Protocol | None]) -> Result | None:
        """The result that is written already; None if there is none, or one that lacks numbers.

        Args:
            result: without numbers.
            expected: the numbers and their protocols; None is not compared.

        Raises:
            ConfigurationError: it is of another model or protocol.
        """
        path = self.folder / "results" / result.file_name
        if not path.is_file():
            return None
        found = Result.read(path)
        if found.identity != result.identity:
            raise ConfigurationError(f"{path} is of other weights of that name: choose another output_folder")
        for name, protocol in expected.items():
            number = found.numbers.get(name)
            if number and protocol and (differing := difference(number.protocol, protocol)):
                raise ConfigurationError(
                    f"{path} holds {name} by another protocol ({'; '.join(differing)}): choose another output_folder"
                )
        return found if expected.keys() <= found.numbers.keys() else None

    def _finish(self, result: Result) -> Result:
        """Write a result and the table of all."""

        def write() -> None:
            if self.ranks.is_first:
                for other in read_results([self.folder]) if (self.folder / "results").is_dir() else []:
                    check_one_protocol([other, result])
                result.write(self.folder)
                write_atomically(self.folder / TABLE, table(read_results([self.folder])))

        agree(write)
        return result


def evaluate(config: EvaluationConfig) -> list[Result]:
    """Evaluate as configured; to be called by all ranks.

    Returns:
        The results; with numbers on the first rank only.

    Raises:
        UserError: on every rank: the configuration, the data or the machine is at fault.
    """
    evaluation = Evaluation(config=config, ranks=Ranks.start())
    if config.images is not None:
        return [evaluation.evaluate_images(Path(config.images).expanduser())]
    assert config.model is not None
    place = config.model
    subjects = evaluation.ranks.broadcast(agree(lambda: find_subjects(place, config.weights)))
    return [result for subject in subjects for result in evaluation.evaluate(subject)]


def _prompts(config: PromptsConfig | None) -> list[Prompt]:
    return read_prompts(config) if config is not None else []


def _of(subject: Subject, generator: Generator) -> dict[str, Any]:
    return {
        "name": subject.name,
        "place": subject.origin or subject.place,
        "step": subject.step,
        "weights": subject.weights,
        "identity": generator.identity,
    }
