"""Files of results."""

import json

from diffusion.evaluation.protocol import Number, Result


def test_a_result_is_read_with_the_former_name_of_its_path_too(tmp_path):
    numbers = {"fid": Number(value=1.5, protocol={"num": 3})}
    result = Result(name="ep0-ba2-raw", path="runs/a", step=2, weights="raw", guidance_scale=3.0, numbers=numbers)
    file = result.write(tmp_path)
    assert Result.read(file) == result
    content = json.loads(file.read_text())
    content["place"] = content.pop("path")
    file.write_text(json.dumps(content))
    assert Result.read(file) == result
