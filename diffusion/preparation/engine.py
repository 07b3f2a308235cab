"""Tasks done by several workers: processes of this machine, or actors of a Ray cluster.

Tasks are independent, results come as they are ready, and a task may be done twice (its node was lost): what it writes
must not depend on the order, or on who does it.
"""

import contextlib
import itertools
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from typing import Any, TypeVar

import cloudpickle
from tqdm import tqdm

from diffusion.distributed import is_first_rank
from diffusion.errors import ConfigurationError, MachineError, first_line
from diffusion.launch import python_command
from diffusion.preparation.config import Engine, RayConfig

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
Result = TypeVar("Result")

_DIED = (
    "a worker died or ran out of memory{}; what was finished is kept: run the command again, with fewer workers or "
    "more memory for each; if it dies at the same place, take that file out"
)

_WAITING = 2
"""Tasks that a process holds: the one it works on, and the next."""

_RAY_STARTS = 3
"""Starts of a cluster on this machine: Ray gives its parts 30 s, which a busy machine may not."""

_RAY_BLOCKS = 5_000
"""Most groups of tasks that Ray schedules: each takes some 5 ms of the driver and 70 kB of its memory."""

_RAY_RETRIES = 20
"""Attempts for a group of tasks whose actor died; while Ray finds out that a node is lost, several fail at once."""

_is_worker_process = False
"""True in a process that is one of several workers of a machine, whose death the parent handles."""

_NODE_GROUP = "ray.io/node-group"
"""Label of the nodes that Ray's cluster launcher or KubeRay started: such a cluster may start more of them."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who does the tasks. It does not determine the data."""

    engine: Engine = Engine.processes

    number: int = 1
    """Processes; with 1 the calling process works. CPUs of a Ray cluster that is started on this machine."""

    ray: RayConfig = field(default_factory=RayConfig)


def progress_bar(name: str, total: int | None, *, unit: str = " images", initial: int = 0, shown: bool) -> "tqdm[Any]":
    """Make a bar on stderr; in a log it is a line every 30 s."""
    interval = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(desc=name, total=total, initial=initial, unit=unit, mininterval=interval,
                disable=not shown or not is_first_rank())  # fmt: skip


def run(
    workers: Workers,
    make: Callable[[], Callable[[Task], Result]],
    tasks: Iterable[Task],
    *,
    num_gpus: float = 0.0,
    describe: Callable[[Task], str] | None = None,
    on_death: Callable[[Task], Task] | None = None,
) -> Iterator[Result]:
    """Do tasks and yield their results as they come, in any order.

    `make` is called once in each worker and returns the function that does a task; what it loads stays loaded. It is
    pickled by cloudpickle, so a function of a notebook will do. Tasks and results are small values that can be pickled;
    processes take tasks as they need them. `num_gpus` are those of each worker, or the share of one. Processes are
    given the GPUs of this machine in turn, and see no other; with 0 a process of several sees none.

    A process may die at a task, or run out of memory. Where `on_death` is given, it says with which task to try again,
    or raises an error; that is done last, when nothing else is running. Ray itself tries the same task again.

    Raises:
        UserError: that of a task, as it is; other exceptions likewise, with their traceback as the cause.
        ConfigurationError: Ray is requested and not installed.
        MachineError: a worker died or memory ran out, at the task that `describe` names, or Ray cannot be used or
            lacks the resources. What tasks have written stays.
    """
    if workers.engine is Engine.ray:
        yield from _run_by_ray(workers, make, tasks, num_gpus)
    elif workers.number > 1:
        yield from _run_by_processes(workers.number, make, tasks, num_gpus, describe, on_death)
    else:
        function = make()
        for task in tasks:
            try:
                yield function(task)
            except MemoryError as error:
                raise death_error(task, describe) from error


def death_error(task: Task, describe: Callable[[Task], str] | None) -> MachineError:
    """Make the error of a worker that died, or ran out of memory, at a task."""
    return MachineError(_DIED.format(f" at {describe(task)}" if describe else ""))


class _Worker:
    """Does tasks; an exception is part of the answer, since not all survive the way of a library."""

    def __init__(self, make: bytes) -> None:
        self._function: Callable[[Any], Any] | None = None
        self._make = make

    def __call__(self, task: bytes) -> bytes:
        """Do a pickled task; return the pickled result, exception (or None) and its traceback."""
        try:
            self._function = self._function or cloudpickle.loads(self._make)()
            assert self._function is not None
            return cloudpickle.dumps((self._function(cloudpickle.loads(task)), None, ""))
        except Exception as error:  # noqa: BLE001 it is raised in the parent
            where = traceback.format_exc()
            if isinstance(error.__cause__, MemoryError):  # Causes are not pickled.
                error = error.__cause__
            with contextlib.suppress(Exception):  # Some cannot be pickled, others not be made again.
                answer = cloudpickle.dumps((None, error, where))
                cloudpickle.loads(answer)
                return answer
            return cloudpickle.dumps((None, RuntimeError(repr(error)), where))


def _result(result: Any, error: Exception | None, where: str) -> Any:
    """Return the result in an answer of a worker, or raise its exception."""
    if isinstance(error, MemoryError):
        raise MachineError(_DIED.format("")) from error
    if error is not None:
        raise error from RuntimeError(f"in a worker:\n{where}")
    return result


# Processes of this machine. Each is a new interpreter that gets tasks by a pipe. It does not run the main module again.


class _Process:
    """A process with the tasks that it holds, pickled; it works on the first."""

    def __init__(self, make: bytes, gpus: str) -> None:
        self.tasks: deque[bytes] = deque()
        self.gpus = gpus
        self.connection, theirs = Pipe()
        self._process = subprocess.Popen(
            python_command(f"from diffusion.preparation.engine import _serve; _serve({theirs.fileno()})"),
            pass_fds=[theirs.fileno()],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent, which ends its workers.
        )
        theirs.close()
        with contextlib.suppress(ConnectionError):  # It has died, as its pipe will say.
            self.connection.send_bytes(make)

    def give(self, tasks: Iterator[bytes], number: int = 1) -> None:
        """Send it some tasks, as far as there are any."""
        for task in itertools.islice(tasks, number):
            self.tasks.append(task)
            with contextlib.suppress(ConnectionError):
                self.connection.send_bytes(task)

    def end(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


def _run_by_processes(
    number: int,
    make: Callable[[], Callable[[Task], Result]],
    tasks: Iterable[Task],
    num_gpus: float,
    describe: Callable[[Task], str] | None,
    on_death: Callable[[Task], Task] | None,
) -> Iterator[Result]:
    pickled = cloudpickle.dumps(make)
    waiting: Iterator[bytes] = map(cloudpickle.dumps, tasks)
    gpus = visible_gpus() if num_gpus else []
    count = min(math.ceil(num_gpus), len(gpus))
    processes: list[_Process] = []
    suspects: deque[bytes] = deque()
    try:
        for index, task in enumerate(itertools.islice(waiting, number)):
            names = ",".join(gpus[(index * count + place) % len(gpus)] for place in range(count))
            processes.append(_Process(pickled, names))
            processes[-1].give(iter([task]))
        for process in processes:
            process.give(waiting, _WAITING - 1)
        while True:
            if suspects and not any(process.tasks for process in processes):
                processes[0].give(iter([suspects.popleft()]))
            busy = {process.connection: index for index, process in enumerate(processes) if process.tasks}
            if not busy:
                return
            for connection in wait(list(busy)):
                process = processes[busy[connection]]  # pyright: ignore[reportArgumentType]
                try:
                    answer = process.connection.recv_bytes()
                except (EOFError, ConnectionError):
                    answer = None
                result, error, where = (None, MemoryError(), "") if answer is None else cloudpickle.loads(answer)
                task = process.tasks.popleft()
                if isinstance(error, MemoryError):
                    if on_death is None:
                        raise death_error(cloudpickle.loads(task), describe) from error
                    suspects.append(cloudpickle.dumps(on_death(cloudpickle.loads(task))))
                if answer is None:  # It is dead.
                    process.end()
                    waiting = itertools.chain(process.tasks, waiting)
                    process = processes[busy[connection]] = _Process(pickled, process.gpus)  # pyright: ignore[reportArgumentType]
                process.give(waiting, _WAITING - len(process.tasks))
                if not isinstance(error, MemoryError):
                    yield _result(result, error, where)
    finally:
        for process in processes:
            process.end()


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """End this process if the block takes more CPU time, and it is one of several workers of a machine.

    The kernel does so: a decoder does not return to Python before it is done. `on_death` deals with the task.
    """
    if not _is_worker_process:
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _serve(descriptor: int) -> None:
    """Do the tasks that come by a pipe; end at once when the parent does, which ends the pipe."""
    global _is_worker_process
    _is_worker_process = True
    connection = Connection(descriptor)
    worker = _Worker(connection.recv_bytes())
    tasks: SimpleQueue[bytes] = SimpleQueue()

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                tasks.put(connection.recv_bytes())
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        connection.send_bytes(worker(tasks.get()))


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given is not None else list(map(str, range(torch.cuda.device_count())))
    return names[: torch.cuda.device_count()]


# Ray Data: groups of tasks are its blocks, which a pool of actors maps to blocks of answers.


def _run_by_ray(
    workers: Workers, make: Callable[[], Callable[[Task], Result]], tasks: Iterable[Task], num_gpus: float
) -> Iterator[Result]:
    pickled = list(map(cloudpickle.dumps, tasks))
    if not pickled:
        return
    import pyarrow as pa

    ray = _connected(workers)
    blocks = [pa.table({"task": pickled[start:stop]}) for start, stop in _groups(len(pickled))]
    resources = {"num_cpus": 1, "num_gpus": num_gpus, **workers.ray.remote_args}
    try:
        ray.remote(**resources)(_Actor)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"ray.remote_args: {error}") from error
    _check_room(ray, resources)
    number = workers.ray.concurrency
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Options without a parameter of their own, like the retries.
        answers = ray.data.from_arrow(blocks).map_batches(
            _Actor,
            fn_constructor_args=[cloudpickle.dumps(make)],
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=number) if number else ray.data.ActorPoolStrategy(min_size=1),
            **{"max_task_retries": _RAY_RETRIES, **resources},
        )
    try:
        for block in answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            for answer in block["answer"].to_pylist():
                yield _result(*cloudpickle.loads(answer))
    except ray.exceptions.RayError as error:
        raise MachineError(f"{_DIED.format('')} (Ray: {type(error).__name__})") from error


def _check_room(ray: Any, options: Mapping[str, Any]) -> None:
    """Check that a node of the cluster has what an actor asks for; Ray would wait for one without end."""
    requested = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], "memory": options.get("memory")}
    requested = {name: amount for name, amount in {**requested, **(options.get("resources") or {})}.items() if amount}
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if any(all(node["Resources"].get(name, 0) >= amount for name, amount in requested.items()) for node in nodes):
        return
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in requested.items())
    found = {name: max((node["Resources"].get(name, 0) for node in nodes), default=0) for name in requested}
    message = (
        f"no node of the Ray cluster has what each worker asks for: {wanted} (most on a node: "
        f"{', '.join(f'{amount:g} {name}' for name, amount in found.items())})"
    )
    if any(_NODE_GROUP in node.get("Labels", {}) for node in nodes):
        logger.warning("%s; waiting for the cluster to start one", message)
        return
    raise MachineError(f"{message}; lower num_gpus or ray.remote_args, or add nodes (`ray status`)")


def cluster_has_gpus(workers: Workers) -> bool:
    """Return whether the Ray cluster has GPUs now."""
    return _connected(workers).cluster_resources().get("GPU", 0) > 0


def _groups(num_tasks: int) -> Iterator[tuple[int, int]]:
    """Cut many tasks into groups that become smaller towards the end, so that the last actors end together."""
    number = min(num_tasks, _RAY_BLOCKS)
    exponent = 1 if num_tasks == number else 2
    starts = {num_tasks - round(num_tasks * (1 - i / number) ** exponent) for i in range(number + 1)}
    return itertools.pairwise(sorted(starts))


class _Actor:
    """Perform a block of tasks in an actor of the pool."""

    def __init__(self, make: bytes) -> None:
        import ray

        if not ray.get_gpu_ids():
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._worker = _Worker(make)

    def __call__(self, block: Any) -> Any:
        import pyarrow as pa

        return pa.table({"answer": [self._worker(task) for task in block["task"].to_pylist()]})


def _connected(workers: Workers) -> Any:
    """The module `ray`, connected to a cluster until this process ends."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Of libraries in C++, which write to stderr.
    try:
        import ray
        import ray.data
        import ray.exceptions
    except ImportError as error:
        raise ConfigurationError("Ray is not installed; uv pip install -e '.[ray]'") from error
    if not ray.is_initialized():
        _start(ray, workers.ray.address or os.environ.get("RAY_ADDRESS"), workers.number)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    for name in ("progress", "execution.operators.map_operator"):  # Bars are off; actors ask for CPUs and GPUs.
        logging.getLogger(f"ray.data._internal.{name}").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    return ray


def _start(ray: Any, address: str | None, num_cpus: int) -> None:
    # Without "local" Ray connects to whatever cluster somebody started on this machine.
    place = {"address": address} if address else {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    for left in reversed(range(1 if address else _RAY_STARTS)):
        try:
            ray.init(**place, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises a bare Exception for a part that does not come up.
            ray.shutdown()
            reason = first_line(error).rstrip(".")
            if not left:
                where = f"at {address} (ray.address or RAY_ADDRESS)" if address else "on this machine"
                raise MachineError(
                    f"Ray cannot be used {where}: {reason}. Free CPU time and memory, or choose the engine `processes`"
                ) from error
            logger.warning("Ray did not start (%s); it is tried again", reason)
        else:
            return
