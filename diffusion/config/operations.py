"""Configuration of what watches over a run: the guard of its loss, heartbeats, and the supervisor that restarts it."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class GuardConfig:
    """What happens when the loss is no number, or far above what it was.

    The run ends with exit code 75, and started again continues from a checkpoint before that step. The first time
    nothing is skipped, since a fault of the machine passes. When it comes again at the same step, it lies in the data
    and the weights: the updates of the `skip` steps that end there are left out, or, where `skip` is 0, the run ends
    for good. What was done is listed in `rollbacks.jsonl` in the run folder.
    """

    spike_factor: float | None = None
    """A loss above this multiple of the median of the steps before counts as wrong, too; null: none does."""

    spike_window: int = 100
    """Steps of that median; before as many are done, no loss counts as too high."""

    margin: int = 1
    """Checkpoints of the last so many steps before are given up as well; at least 1."""

    skip: int = 0
    """Steps whose updates are left out when going back did not help; 0 ends the run."""

    skip_steps: list[int] = field(default_factory=list)
    """Steps whose updates are left out from the beginning, as `rollbacks.jsonl` of another run lists them."""

    max_rollbacks: int = 20
    """How often a run may go back before it ends for good."""


@dataclass(kw_only=True)
class SupervisionConfig:
    """What `scripts/supervise.py` checks and waits for, and how often it starts a run again."""

    hang_floor: float = 120.0
    """Seconds without a sign of any rank, while the slowest is in a step, after which the job hangs, at least. A file
    system of several hosts may show their signs 70 s late: 10 s until they are written, 60 s for cached attributes."""

    hang_factor: float = 10.0
    """The same as a multiple of the median step; the longer of both counts."""

    data_patience: float = 1800.0
    """Seconds for which the slowest rank may wait for its batch; an event tells of it as soon as a hang would be."""

    pause_patience: float = 3600.0
    """Seconds without a sign while the slowest rank starts, compiles, evaluates, saves, ends, or is in its first
    steps."""

    max_restarts: int = 10
    """Restarts in a row without a step that is new; after them the supervisor ends."""

    first_pause: float = 10.0
    """Seconds before a restart; doubled with each that brought no new step. After exit code 75 there is none."""

    longest_pause: float = 600.0
    """Seconds before a restart, at most."""

    continue_preempted: bool = True
    """Start again at once after exit code 75 that the supervisor was not told to expect; false ends with it."""

    check_patience: float | None = 120.0
    """Seconds that the check of the machines before each start may take (it takes some); null: no check."""

    webhook_variable: str | None = None
    """Name of the environment variable that holds an address to which each event is posted as JSON; null: none."""


@dataclass(kw_only=True)
class OperationsConfig:
    """Running unattended. Nothing here changes what is computed, except for steps that are skipped."""

    guard: GuardConfig | None = field(default_factory=GuardConfig)
    """Null: a loss that is no number is trained on."""

    heartbeat_folder: str | None = None
    """Where each rank's sign of life is, one small file that is overwritten; null: `heartbeats/` in the run folder."""

    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)

    max_gpu_hours: float | None = None
    """GPU-hours of the run, all of its starts together, after which it saves and ends for good; null: no limit."""

    max_dollars: float | None = None
    """The same in dollars, with `plan.price_per_gpu_hour`; null: no limit."""
