"""Configuration of unattended runs: loss guard, heartbeats, supervisor, budgets."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from omegaconf import MISSING

from diffusion.config.fields import MAX_SECONDS, bounded
from diffusion.config.secrets import is_variable


@dataclass(kw_only=True)
class GuardConfig:
    """Reaction to a loss that is not finite, or to a spike of the loss.

    The run ends with exit code 75, and the next start continues from a checkpoint before that step. The first time
    nothing is skipped, since a fault of the machine is transient. If it recurs at the same step, its cause is the data
    or the weights: the updates of the last `skip` steps up to it are skipped, or, if `skip` is 0, the run ends for
    good. `rollbacks.jsonl` in the run folder lists all rollbacks.
    """

    spike_factor: float | None = bounded(None, min=1)
    """Smallest spike, as a multiple of the median loss of the steps before; null: spikes are ignored. Of a loss with
    several terms that of `diffusion` counts, or those of a VAE's reconstruction: others start late or are negative."""

    spike_window: int = bounded(100, min=3)
    """Steps of that median; spikes are ignored until as many steps are done."""

    margin: int = bounded(1, min=1)
    """Steps before the wrong loss whose checkpoints are discarded, too."""

    skip: int = bounded(0, min=0)
    """Steps whose updates are skipped if the rollback did not help; 0: the run ends."""

    skip_steps: list[int] = bounded([], min=0)
    """Steps whose updates are always skipped, as listed in `rollbacks.jsonl` of another run."""

    max_rollbacks: int = bounded(20, min=0)
    """Number of rollbacks after which the run ends for good."""


@dataclass(kw_only=True)
class PrometheusConfig:
    """HTTP endpoint `/metrics` for Prometheus, without login."""

    port: int = bounded(MISSING, min=0, max=65535)
    """Port, of its own for each process of a machine. If it is in use, or 0, a free one is taken and logged."""

    address: str = "127.0.0.1"
    """Address of the interface; 0.0.0.0: all, which a Prometheus server on another machine needs."""


@dataclass(kw_only=True)
class SupervisionConfig:
    """Hang detection and restarts by `scripts/supervise.py`."""

    hang_floor: float = bounded(120.0, above=0)
    """Minimum of the timeout, in seconds without a heartbeat of any rank while the slowest is in a step. A shared file
    system may show heartbeats 70 s late: 10 s until they are written, 60 s for cached attributes."""

    hang_factor: float = bounded(10.0, above=0)
    """The timeout as a multiple of the median step; the longer of both counts."""

    data_timeout: float = bounded(1800.0, above=0)
    """Timeout in seconds while the slowest rank waits for its batch; an event reports the wait after the timeout of a
    step."""

    pause_timeout: float = bounded(3600.0, above=0)
    """Timeout in seconds while the slowest rank starts, compiles, evaluates, saves, draws samples, ends, or is in
    its first steps."""

    max_restarts: int = bounded(10, min=0)
    """Consecutive restarts without a new step after which the supervisor ends."""

    first_pause: float = bounded(10.0, min=0)
    """Seconds before a restart after a start with a new step; doubled after each start without one. No pause after
    exit code 75."""

    longest_pause: float = bounded(600.0, min=0, max=MAX_SECONDS)
    """Maximum of seconds before a restart."""

    continue_preempted: bool = True
    """Restart immediately after an unexpected exit code 75; false: the supervisor ends, too."""

    check_timeout: float | None = bounded(120.0, above=0)
    """Timeout in seconds of the check of the machines before each start; null: no check."""

    webhook_variable: str | None = None
    """Environment variable with the address to which each event is posted as JSON; null: none."""

    prometheus: PrometheusConfig | None = None
    """Endpoint of the supervisor; that of the run is in `loggers.prometheus`; null: none."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong names, without the value, which may be the address itself."""
        if self.webhook_variable is not None and not is_variable(self.webhook_variable):
            yield f"{key}.webhook_variable is no name of an environment variable. Give one, which holds the address."


@dataclass(kw_only=True)
class OperationsConfig:
    """Unattended runs. Only skipped steps change the results."""

    guard: GuardConfig | None = field(default_factory=GuardConfig)
    """Null: training continues after a loss that is not finite."""

    heartbeat_folder: str | None = None
    """Folder of the heartbeats, one small file per rank, in a subfolder for each run; null: `heartbeats/` in the run
    folder."""

    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)

    max_gpu_hours: float | None = bounded(None, above=0)
    """GPU-hours over all starts of the run after which it saves and ends for good; null: no limit."""

    max_dollars: float | None = bounded(None, above=0)
    """The same in dollars, with `plan.price_per_gpu_hour`; null: no limit."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations."""
        if "://" in (self.heartbeat_folder or ""):
            yield (
                f"{key}.heartbeat_folder is '{self.heartbeat_folder}', but must be a folder, since heartbeats are "
                "rewritten at each step. Use a path, or null for the run folder."
            )


@dataclass(kw_only=True)
class PlanConfig:
    """Assumptions of `--dry-run` about time and cost."""

    num_gpus: int | None = bounded(None, min=1)
    """GPUs of the fleet; null: the number of ranks."""

    gpus_per_node: int = bounded(8, min=1)
    """GPUs of one machine, for its reads and its cache, and the throughput of fleets from one measured GPU."""

    images_per_second: float | None = bounded(None, above=0)
    """Measured throughput of the fleet; null: days and cost are unknown."""

    price_per_gpu_hour: float | None = bounded(None, above=0)
    """Price in dollars."""

    gpu_memory_gb: float | None = bounded(None, above=0)
    """Memory of a GPU, in addition to 40, 80, 141 and 192 GB, for the largest microbatch; null: none."""

    num_samples: int | None = bounded(None, min=1)
    """Samples of the data set, if its index cannot be read."""

    image_kb: float | None = bounded(None, above=0)
    """Mean size of an image file, if training reads images."""
