import numpy as np
import pytest

from diffusion.preparation.duplicates import find_candidates, find_duplicates

BITS = np.uint64(1) << np.arange(64, dtype=np.uint64)


def one_by_one(order, exact, phash, pixels, max_distance, kept_before) -> list[int]:
    """The definition: in the order of preference, each image against those that were kept before it."""
    kept, of = [], [0] * len(order)
    for i in sorted(range(len(order)), key=lambda i: (not kept_before[i], -int(pixels[i]), int(order[i]))):
        near = [
            k for k in kept
            if exact[k] == exact[i]
            or (max_distance is not None and (int(phash[k]) ^ int(phash[i])).bit_count() <= max_distance)
        ]  # fmt: skip
        of[i] = near[0] if near else i
        if not near:
            kept.append(i)
    return of


def duplicates(order, exact, phash, pixels, max_distance, kept_before) -> list[int]:
    """Both steps, as `select` takes them."""
    candidates = find_candidates(phash.copy(), max_distance)
    some = np.flatnonzero(np.isin(phash, candidates.values))
    exact = exact if exact.ndim == 2 else exact[:, None]
    near = None if max_distance is None else candidates
    found = find_duplicates(order[some], exact[some], phash[some], pixels[some], kept_before[some], near)
    of = np.arange(len(phash))
    of[some] = some[found]
    return of.tolist()


def find(phash, pixels=None, exact=None, max_distance=4, order=None, kept_before=None):
    num = len(phash)
    return duplicates(
        np.arange(num, dtype=np.uint64) if order is None else np.array(order, np.uint64),
        np.arange(num, dtype=np.uint64) if exact is None else np.array(exact, np.uint64),
        np.array(phash, np.uint64),
        np.ones(num, np.int64) if pixels is None else np.array(pixels),
        max_distance,
        np.zeros(num, bool) if kept_before is None else np.array(kept_before, bool),
    )


@pytest.mark.parametrize("max_distance", [None, 0, 1, 2, 4, 7, 12, 16])
def test_equal_to_the_definition_on_crowded_hashes(max_distance):
    random = np.random.default_rng(max_distance or 99)
    for num in (1, 2, 3, 30, 150, 400):
        phash = random.integers(0, 2**64, 6, dtype=np.uint64)[random.integers(0, 6, num)]
        for _ in range(random.integers(0, 9)):
            phash = phash ^ (BITS[random.integers(0, 64, num)] * (random.random(num) < 0.4).astype(np.uint64))
        content = random.integers(0, 2 * num, num)  # equal bytes have equal hashes and sizes
        first = np.unique(content, return_index=True, return_inverse=True)
        phash = phash[first[1]][first[2]]
        pixels = random.integers(1, 4, num)[first[1]][first[2]]
        order = random.permutation(num).astype(np.uint64)
        kept_before = random.random(num) < 0.2
        arguments = (order, content.astype(np.uint64), phash, pixels, max_distance, kept_before)
        assert duplicates(*arguments) == one_by_one(*arguments)


@pytest.mark.parametrize(("num", "distance"), [(1000, 16), (30_000, 1), (30_000, 4), (300_000, 6)])
def test_every_near_pair_is_found(num, distance):
    random = np.random.default_rng(1)
    phash = random.integers(0, 2**64, num, dtype=np.uint64)
    for i in range(0, 300, 3):
        changed = random.choice(64, distance + i % 2, replace=False)
        phash[i + 1] = phash[i] ^ np.bitwise_or.reduce(BITS[changed])
    phash = phash[random.permutation(num)]
    candidates = find_candidates(phash.copy(), distance)
    assert len(candidates.pairs) == len(np.unique(np.sort(candidates.pairs), axis=0))
    one, other = candidates.values[candidates.pairs].T
    assert (np.bitwise_count(one ^ other) <= distance).all()
    assert 50 <= len(candidates.pairs) <= 100
    assert np.isin(candidates.values, phash).all()
    assert not len(candidates.dense)


@pytest.mark.parametrize("step", [1, 4])
def test_hashes_crafted_to_be_near_cost_a_bounded_time_and_are_reported(step):
    """With step 4 most of the crafted ones agree in many bits without being near."""
    num = 2**13
    numbers = np.arange(num, dtype=np.uint64)
    crafted = np.zeros(num, np.uint64)
    for i in range(13):
        crafted |= (numbers >> np.uint64(i) & np.uint64(1)) * np.bitwise_or.reduce(BITS[i * step : i * step + step])
    random = np.random.default_rng(1)
    others = random.integers(0, 2**64, 2000, dtype=np.uint64)
    others[1::2] = others[::2] ^ BITS[:1000:16].repeat(250)[:1000]
    candidates = find_candidates(np.concatenate([crafted, others]), 4)
    assert np.isin(candidates.dense, crafted).mean() > 0.99
    assert len(candidates.dense) > num / 2
    assert np.isin(others, candidates.values).all(), "the copies of others are found"
    assert len(candidates.pairs) < 200 * num


def test_the_largest_stays_then_the_first_in_the_order():
    same = [7, 7, 7]
    assert find(same, pixels=[10, 30, 20]) == [1, 1, 1]
    assert find(same, pixels=[30, 30, 10], order=[5, 2, 0]) == [1, 1, 1]


def test_same_bytes_are_found_without_the_look_and_by_all_words():
    exact = [[1, 1], [1, 2], [1, 1], [2, 1]]
    phash = [0, 0, 0, 2**63]
    assert find(phash, exact=exact, max_distance=None) == [0, 1, 0, 3]
    assert find(phash, exact=exact, max_distance=0) == [0, 0, 0, 3]


def test_a_chain_is_not_taken_for_one_image():
    chain = [0, 0b111, 0b111111, 0b111111111]
    assert find(chain, max_distance=4) == [0, 0, 2, 2]
    assert find(chain, max_distance=4, pixels=[1, 9, 1, 1]) == [1, 1, 1, 3]


def test_a_duplicate_of_a_dropped_image_only_stays():
    # b is near a and dropped; c is near b only
    assert find([0, 0b1111, 0b11111111], order=[0, 1, 2]) == [0, 0, 2]


def test_what_an_earlier_run_kept_stays_whatever_comes_later():
    assert find([0, 1], pixels=[1, 100]) == [1, 1]
    assert find([0, 1], pixels=[1, 100], kept_before=[True, False]) == [0, 0]


def test_the_order_of_the_arrays_does_not_matter():
    random = np.random.default_rng(5)
    num = 3000
    phash = random.integers(0, 2**64, 1000, dtype=np.uint64)[random.integers(0, 1000, num)]
    phash ^= BITS[random.integers(0, 64, num)]
    order, exact = random.permutation(num).astype(np.uint64), random.integers(0, 2**64, num, dtype=np.uint64)
    pixels = random.integers(1, 5, num)
    kept_before = np.zeros(num, bool)
    of = np.array(duplicates(order, exact, phash, pixels, 4, kept_before))
    mixed = random.permutation(num)
    again = np.array(duplicates(order[mixed], exact[mixed], phash[mixed], pixels[mixed], 4, kept_before))
    assert (mixed[again] == of[mixed]).all()
    assert 1000 < (of != np.arange(num)).sum() < 2500


def test_the_number_of_comparisons_grows_about_linearly(monkeypatch):
    compared, bitwise_count = [0], np.bitwise_count

    def counting(values):
        compared[0] += len(values)
        return bitwise_count(values)

    monkeypatch.setattr(np, "bitwise_count", counting)
    for num in (50_000, 200_000):
        compared[0] = 0
        random = np.random.default_rng(num)
        assert not len(find_candidates(random.integers(0, 2**64, num, dtype=np.uint64), 4).values)
        assert 0 < compared[0] < 100 * num


def test_nothing():
    assert find([]) == []
    assert find([], max_distance=None) == []
