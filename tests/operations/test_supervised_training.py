"""Real training under supervision, with faults: it reaches its end by itself, and equals an undisturbed run."""

import threading
from pathlib import Path

import pytest

from diffusion.config.operations import SupervisionConfig
from diffusion.operations.events import EventLog, read_events
from diffusion.operations.supervision import Places, Supervisor
from diffusion.verification.chaos import Chaos, Planned, format_overcome
from diffusion.verification.compare import compare
from diffusion.verification.faults import Scene
from diffusion.verification.forking import exit_code
from diffusion.verification.plan import RunSpec
from diffusion.verification.runner import Recipe, overrides_of, plugin, read_outcome, trace_plugin
from tests.training_runs import ROOT, Run, TrainingServer

NUM_STEPS = 28
FAULTS = ("poison", "kill_rank", "truncate_checkpoint", "freeze")


class TwoRanks:
    """A job as the supervisor knows it."""

    def __init__(self, server: TrainingServer, run: Run) -> None:
        self._job = server.start_training(2, [run])
        self.pids = self._job.pids

    def poll(self) -> int | None:
        codes = self._job.poll()
        return None if codes is None else exit_code(codes)


def supervise(server: TrainingServer, run: Run, folder: Path, codes: list[int], **settings: float) -> threading.Thread:
    supervisor = Supervisor(
        lambda lock: TwoRanks(server, run),
        Places(run=folder, beats=folder / "heartbeats"),
        SupervisionConfig(first_pause=0.1, longest_pause=1, **settings),  # pyright: ignore[reportArgumentType]
        EventLog(folder),
    )
    thread = threading.Thread(target=lambda: codes.append(supervisor.run()), daemon=True)
    thread.start()
    return thread


@pytest.mark.world_size(2)
def test_a_supervised_run_overcomes_faults_and_equals_an_undisturbed_one(server, tmp_path):
    recipe = Recipe(
        yaml=ROOT / "tests/toy.yaml",
        overrides=("samples.prompts=[]", "trainer.save_interval=4ba"),
        num_steps=NUM_STEPS,
        root=tmp_path,
        program=ROOT / "run.py",
    )
    spec = RunSpec(world_size=2)

    def overrides(folder: Path, *more: str) -> list[str]:
        plugins = ", ".join([trace_plugin(folder), *more])
        return [*overrides_of(recipe, spec, [f"output_folder={folder}"]), f"plugins.callbacks=[{plugins}]"]

    whole, hit, release = tmp_path / "whole", tmp_path / "hit", tmp_path / "release"
    server.train(2, [(str(recipe.yaml), overrides(whole))])
    scene = Scene(run=hit, poison=tmp_path / "poison")
    disturbances = (
        plugin("disturbance.PoisonBatch", request=f"'{scene.poison}'"),
        plugin("disturbance.HoldAt", step=NUM_STEPS - 3, release=f"'{release}'"),
    )
    codes: list[int] = []
    thread = supervise(server, (str(recipe.yaml), overrides(hit, *disturbances)), hit, codes, hang_floor=3)
    faults = [Planned(kind=kind, step=4 + 6 * i, delay=0, rank=1) for i, kind in enumerate(FAULTS)]
    rows = Chaos(scene, lambda: not thread.is_alive()).run(faults)
    release.touch()
    thread.join(timeout=120)
    assert codes == [0]

    comparison = compare(read_outcome(recipe, spec, hit), read_outcome(recipe, spec, whole))
    assert (comparison.num_wrong_steps, comparison.loss, comparison.weights) == (0, 0, 0)
    assert [row.kind for row in rows] == list(FAULTS)
    assert all(row.redone > 0 for row in rows if row.kind in ("poison", "truncate_checkpoint"))
    assert f"| {len(rows)} faults |" in format_overcome(rows)

    events = read_events(hit)
    names = [event["event"] for event in events]
    assert names.count("started") == len(FAULTS) + 1
    assert names.count("going_back") == 1
    assert names[-1] == "finished"
    (hang,) = [event for event in events if event["event"] == "hang"]
    stacks = (hit / hang["stacks"]).read_text()
    for rank in (0, 1):
        part = stacks.partition(f"rank {rank}, in phase")[2].partition("\nrank ")[0]
        assert "_train_loop" in part, stacks
