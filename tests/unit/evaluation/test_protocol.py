"""Files of results."""

import pytest

from diffusion.errors import ConfigurationError
from diffusion.evaluation.protocol import Number, Result, table


def test_a_result_is_read_as_it_was_written(tmp_path):
    numbers = {"fid": Number(value=1.5, protocol={"num": 3})}
    result = Result(name="ep0-ba2-raw", path="runs/a", step=2, weights="raw", guidance_scale=3.0, numbers=numbers)
    file = result.write(tmp_path)
    assert Result.read(file) == result


def test_a_number_of_an_earlier_version_is_in_one_table_with_later_ones_but_two_data_sets_are_not():
    def result(name: str, **data: str) -> Result:
        return Result(name=name, path="", numbers={"validation_loss": Number(value=1.0, protocol={"num": 3, **data})})

    earlier, one, other = result("earlier"), result("one", data="a"), result("other", data="b")
    assert "| one |" in table([earlier, one, earlier])
    with pytest.raises(ConfigurationError, match="data: a, b"):
        table([earlier, one, other])
