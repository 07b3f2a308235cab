import pytest
import torch

from diffusion.datasets.batch import BatchKey, num_microbatches, num_samples, split_batch


def ragged() -> dict:
    """Two groups of four samples: images of 2 x 3 and of 1 x 5, filled with the sample's number."""
    numbers = torch.arange(8)
    shapes = [(2, 3), (1, 5)]
    return {
        BatchKey.SAMPLE: numbers,
        BatchKey.LATENT_MEAN: [
            numbers[4 * i : 4 * i + 4].view(4, 1, 1, 1).expand(4, 1, *shape).float() for i, shape in enumerate(shapes)
        ],
    }


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_microbatches_of_groups_have_one_shape_and_one_size(size: int, expected: int) -> None:
    parts = split_batch(ragged(), size)
    assert [num_samples(part) for part in parts] == [expected] * (8 // expected)
    assert torch.cat([part[BatchKey.SAMPLE] for part in parts]).tolist() == list(range(8))
    for part in parts:
        latents = part[BatchKey.LATENT_MEAN]
        assert tuple(latents.shape[2:]) == ((2, 3) if part[BatchKey.SAMPLE][0] < 4 else (1, 5))
        assert torch.equal(latents[:, 0, 0, 0].long(), part[BatchKey.SAMPLE])


def test_a_microbatch_that_does_not_divide_a_group_is_refused() -> None:
    with pytest.raises(AssertionError):
        split_batch(ragged(), 3)


def test_microbatches_of_tensors() -> None:
    batch = {BatchKey.SAMPLE: torch.arange(7), BatchKey.TOKEN_IDS: torch.arange(14).view(7, 2)}
    parts = split_batch(batch, 3)
    assert [part[BatchKey.SAMPLE].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6]]
    assert torch.equal(torch.cat([part[BatchKey.TOKEN_IDS] for part in parts]), batch[BatchKey.TOKEN_IDS])
    assert len(split_batch(batch, 100)) == 1


def test_texts_do_not_change_the_microbatches() -> None:
    assert num_microbatches({BatchKey.SAMPLE: torch.arange(8), "caption": ["a cat"] * 8}, 4) == 2  # pyright: ignore
