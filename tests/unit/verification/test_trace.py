import json
from types import SimpleNamespace

import torch

from diffusion.models.latent_diffusion import Draws
from verification.callbacks import DrawTrace, sample_digests, step_hashes


def draws(num: int, step: int = 3) -> Draws:
    generator = torch.Generator().manual_seed(step)
    return Draws(
        sample=torch.arange(num),
        step=torch.full((num,), step),
        noise=torch.randn(num, 4, 2, 2, generator=generator),
        timesteps=torch.randint(0, 1000, (num,), generator=generator),
        token_ids=torch.randint(0, 9, (num, 5), generator=generator),
        content=torch.randint(0, 256, (num, 3, 8, 8), generator=generator, dtype=torch.uint8),
        placement=torch.randint(0, 999, (num, 6), generator=generator),
    )


def part(whole: Draws, which: slice) -> Draws:
    return Draws(*(tensor[which] for tensor in whole if tensor is not None))


def write(folder, rank: int, world_size: int, step: int, pairs: list[tuple[int, str]]) -> None:
    row = {"step": step, "world_size": world_size, "samples": [s for s, _ in pairs], "digests": [d for _, d in pairs]}
    with (folder / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_a_digest_changes_with_each_thing_drawn():
    base = draws(1)
    [(_, digest)] = sample_digests(base)
    for name in ("sample", "step", "timesteps", "token_ids", "content", "placement"):
        changed = base._replace(**{name: getattr(base, name) + 1})
        assert sample_digests(changed)[0][1] != digest, name
    noise = base.noise.clone()
    noise[0, 3, 1, 1] = torch.nextafter(noise[0, 3, 1, 1], torch.tensor(9.0))
    assert sample_digests(base._replace(noise=noise))[0][1] != digest
    assert sample_digests(base._replace(placement=None))[0][1] != digest, "and without sizes"


def test_the_hash_of_a_step_does_not_know_ranks_and_microbatches(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    whole = draws(8)
    write(one, 0, 1, 3, sample_digests(whole))
    write(two, 1, 2, 3, sample_digests(part(whole, slice(0, 4))))
    write(two, 0, 2, 3, sample_digests(part(whole, slice(4, 6))) + sample_digests(part(whole, slice(6, 8))))
    assert step_hashes(one) == step_hashes(two)
    missing = tmp_path / "missing"
    missing.mkdir()
    write(missing, 0, 1, 3, sample_digests(part(whole, slice(0, 7))))
    assert step_hashes(missing) != step_hashes(one)


def test_a_step_that_was_run_again_counts_as_it_was_run_last(tmp_path):
    whole = draws(8)
    wrong = sample_digests(draws(8, step=4))
    for rank in range(2):
        write(tmp_path, rank, 2, 3, wrong[4 * rank : 4 * rank + 4])
    write(tmp_path, 0, 1, 3, sample_digests(whole))
    with (tmp_path / "rank-1.jsonl").open("a") as file:
        file.write('{"step": 3, "wor')
    alone = tmp_path / "alone"
    alone.mkdir()
    write(alone, 0, 1, 3, sample_digests(whole))
    assert step_hashes(tmp_path) == step_hashes(alone)


def test_the_images_of_a_vae_are_traced(tmp_path):
    hashes = []
    for image in (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.ones(2, 3, 4, 4, dtype=torch.uint8)):
        batch = {"sample": torch.arange(2), "step": torch.zeros(2, dtype=torch.int64), "image": image}
        state = SimpleNamespace(outputs=None, batch=batch, timestamp=SimpleNamespace(batch=SimpleNamespace(value=1)))
        trace = DrawTrace(str(tmp_path / str(len(hashes))))
        for event in (trace.fit_start, trace.after_forward, trace.batch_end):
            event(state, None)
        hashes.append(step_hashes(trace.folder))
    assert hashes[0].keys() == hashes[1].keys() == {0}
    assert hashes[0] != hashes[1]
