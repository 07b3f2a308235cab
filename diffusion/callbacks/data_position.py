"""Position in the training data at the start of a run, as of the checkpoint that it continues."""

from typing import Any

from composer import Callback, Logger, State


class DataPosition(Callback):
    """Start at the epoch and sample of the Trainer's timestamp.

    At the end of an epoch Composer saves `sample_in_epoch=0` of the epoch that has ended, which would be replayed.
    """

    def fit_start(self, state: State, logger: Logger) -> None:
        """Set the position from the timestamp of the checkpoint."""
        dataset: Any = getattr(state.train_dataloader, "dataset", None)
        if state.timestamp.batch.value == 0 or not hasattr(dataset, "load_state_dict"):
            return
        position = dataset.state_dict(num_samples=0, from_beginning=False)
        position.update(epoch=state.timestamp.epoch.value, sample_in_epoch=state.timestamp.sample_in_epoch.value)
        dataset.load_state_dict(position)
