"""The model of scaling beside the published table, and what its parts do."""

from dataclasses import replace

import pytest

from diffusion.planning.fleets import A100_RATES
from diffusion.planning.scaling import (
    PUBLISHED_INTERCONNECT,
    StepModel,
    communication_seconds,
    predict_images_per_second,
)

SD2 = StepModel(num_parameters=865_910_724, global_batch_size=2048, microbatch_size=16, images_per_gpu_second=1_100 / 8)
MODELS = {side: replace(SD2, images_per_gpu_second=A100_RATES[8][side] / 8) for side in (256, 512)}


def test_published_throughput_within_eight_percent():
    """From the rates of 8 GPUs and one number of the network, which is fitted to 256 px on 128 GPUs."""
    for side, model in MODELS.items():
        for num_gpus, rates in A100_RATES.items():
            predicted = predict_images_per_second(model, PUBLISHED_INTERCONNECT, num_gpus)
            assert predicted == pytest.approx(rates[side], rel=0.08), (side, num_gpus)
    fitted = predict_images_per_second(MODELS[256], PUBLISHED_INTERCONNECT, 128)
    assert fitted == pytest.approx(11_600, rel=0.01)


def test_why_256_px_scales_worse_than_512():
    scaling = {
        side: predict_images_per_second(model, PUBLISHED_INTERCONNECT, 128) / 16 / A100_RATES[8][side]
        for side, model in MODELS.items()
    }
    assert scaling[256] == pytest.approx(0.66, abs=0.02)
    assert scaling[512] == pytest.approx(0.99, abs=0.02)


def test_what_hides_and_what_helps():
    links, model = PUBLISHED_INTERCONNECT, MODELS[256]
    assert communication_seconds(model, links, 8) < communication_seconds(model, links, 16)
    halved = replace(model, reduce_bytes=2)
    assert communication_seconds(halved, links, 128) == pytest.approx(4 / 6 * communication_seconds(model, links, 128))
    faster = predict_images_per_second(halved, links, 128)
    assert faster > 1.1 * predict_images_per_second(model, links, 128)
    often = replace(model, reduces_each_microbatch=True)
    assert predict_images_per_second(often, links, 128) == predict_images_per_second(model, links, 128)
    assert predict_images_per_second(often, links, 64) < predict_images_per_second(model, links, 64)


def test_groups_of_one_node_gather_over_its_own_links():
    """Each node gathers by itself; between nodes every gradient travels twice, and in 16 bits half as far."""
    links, groups = PUBLISHED_INTERCONNECT, replace(MODELS[256], num_replicas=16)
    between = 2 * 4 * 15 / 16 * groups.num_parameters / links.node_bytes_per_second
    within = 7 / 8 * 6 * groups.num_parameters / links.gpu_bytes_per_second
    assert communication_seconds(groups, links, 128) == pytest.approx(between + within)
    assert communication_seconds(replace(groups, reduce_bytes=2), links, 128) < between
