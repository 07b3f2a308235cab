"""Errors that a restart does not mend are still distinguished from others after they came through a loader worker."""

import pytest
from torch.utils.data import Dataset

from diffusion.datasets.loader import BatchLoader
from diffusion.errors import DataError, UnfitDataError


class Failing(Dataset):
    def __init__(self, error: type[DataError]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise self.error("11 images cannot be decoded")


@pytest.mark.parametrize("error", [DataError, UnfitDataError])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_loader_keeps_the_kind_of_an_error(error, num_workers):
    with pytest.raises(DataError) as caught:
        list(BatchLoader(Failing(error), num_workers=num_workers))
    assert type(caught.value) is error
    assert str(caught.value) == "11 images cannot be decoded"
    assert error.is_lasting == (error is UnfitDataError)
