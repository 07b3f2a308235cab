"""Files of results."""

from diffusion.evaluation.protocol import Number, Result


def test_a_result_is_read_as_it_was_written(tmp_path):
    numbers = {"fid": Number(value=1.5, protocol={"num": 3})}
    result = Result(name="ep0-ba2-raw", path="runs/a", step=2, weights="raw", guidance_scale=3.0, numbers=numbers)
    file = result.write(tmp_path)
    assert Result.read(file) == result
