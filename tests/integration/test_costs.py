"""What a run has cost, over its starts, and that a spent budget ends it."""

import json

import pytest
from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.callbacks.monitoring import CostMeter
from diffusion.config.operations import OperationsConfig
from diffusion.formats.run_folder import BUDGET, COSTS, TRAIN_LOSS, read_metrics
from diffusion.operations.costs import Activity, CostsFile, StartCosts, budget_left, project, read_costs, total
from diffusion.operations.inventory import expense_rows

HOUR = 3600.0


def start(began: float, *, num_devices: int = 8, price: float | None = 2.0, **hours: float) -> StartCosts:
    seconds = {kind.value: HOUR * hours.get(kind.value, 0.0) for kind in Activity}
    ended = began + sum(seconds.values())
    return StartCosts(
        began=began, ended=ended, num_devices=num_devices, price=price, step=0, reached=10, seconds=seconds
    )


def test_hours_are_added_up_by_what_they_went_into():
    first = start(0.0, starting=0.5, training=2.0, data=0.25, evaluation=0.25)
    second = start(4 * HOUR, num_devices=4, starting=0.5, repeated=0.5, training=1.0)
    totals = total([first, second])
    assert totals.gpu_hours == pytest.approx(8 * 3 + 4 * 2)
    assert totals.dollars == pytest.approx(64)
    assert totals.hours["training"] == pytest.approx(8 * 2 + 4 * 1)
    assert totals.restart_hours == pytest.approx(4 * (0.5 + 0.5)), "the first start is no loss"
    assert totals.gap_hours == pytest.approx(1.0)
    assert totals.mfu is None
    assert total([first, start(4 * HOUR, price=None)]).dollars is None


def test_mfu_counts_new_operations_against_all_of_the_time():
    whole = start(0.0, training=1.0)
    whole.flops, whole.peak_flops = 0.5 * HOUR * 1e12, 1e12
    half = start(HOUR, training=0.5, repeated=0.5, starting=1.0)
    half.flops, half.peak_flops = 0.5 * HOUR * 1e12, 1e12
    assert total([whole]).mfu == pytest.approx(0.5)
    assert total([whole, half]).mfu == pytest.approx((0.5 + 0.25) / 3)


def test_the_budget_is_spent_when_either_limit_is_reached():
    starts = [start(0.0, training=1.0)]
    assert budget_left(starts, OperationsConfig())[0]
    assert budget_left(starts, OperationsConfig(max_gpu_hours=9.0, max_dollars=17.0))[0]
    assert not budget_left(starts, OperationsConfig(max_gpu_hours=8.0, max_dollars=17.0))[0]
    is_left, text = budget_left(starts, OperationsConfig(max_gpu_hours=9.0, max_dollars=16.0))
    assert not is_left
    assert "$16.00 of $16.00" in text


def test_the_use_of_a_budget_is_projected_to_the_last_step():
    starts = [start(0.0, starting=0.5, training=2.0), start(4 * HOUR, training=1.5)]
    starts[-1].reached = 250
    (hours, dollars) = project(starts, 1000, OperationsConfig(max_gpu_hours=128.0, max_dollars=250.0))
    assert hours.endswith("128.00 of 128.00 GPU-hours (operations.max_gpu_hours) at step 1,000")
    assert dollars.endswith("$256.00 of $250.00 (operations.max_dollars) at step 1,000; it ends at step 976")
    starts[-1].reached = 0
    assert project(starts, 1000, OperationsConfig(max_gpu_hours=128.0)) == []


def test_gpu_time_storage_and_traffic_have_their_prices():
    month = 365.25 / 12 * 24 * HOUR
    starts = [start(0.0, training=1.0), start(month - HOUR, price=None, training=1.0)]
    starts[0].fetched_bytes, starts[1].fetched_bytes = 2 * 10**12, 5 * 10**11
    prices = {"gpu_price": 3.0, "storage_price": 20.0, "egress_price": 90.0}
    rows = expense_rows(starts, 4 * 10**12, 1000, **prices)
    assert [row[2] for row in rows[1:-1]] == ["40.00", "80.00", "225.00"]
    assert rows[-1][2:] == ("345.00", "34,500.00")
    prices = {"gpu_price": None, "storage_price": None, "egress_price": 0.0}
    rows = expense_rows(starts, 10**12, 1000, **prices)
    assert [row[2] for row in rows[1:]] == ["-", "-", "0.00", "-"]


def test_a_row_that_was_cut_off_is_left_out_and_the_next_start_has_its_own(tmp_path):
    file = CostsFile(tmp_path)
    file.write(start(0.0, training=1.0))
    file.write(start(0.0, training=2.0))
    file.close()
    with (tmp_path / COSTS).open("ab") as damaged:
        damaged.write(b'{"began": 1')
    file = CostsFile(tmp_path)
    file.write(start(HOUR, training=3.0))
    file.close()
    assert [row.seconds["training"] / HOUR for row in read_costs(tmp_path)] == [2.0, 3.0]


class SpendAfter(Callback):
    """Let rank 0 have spent 1,000 hours more after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step and dist.get_global_rank() == 0:
            (meter,) = [callback for callback in state.callbacks if isinstance(callback, CostMeter)]
            assert meter._costs is not None
            meter._costs.seconds[Activity.training.value] += 1000 * HOUR


@pytest.mark.world_size(2)
def test_a_spent_budget_saves_and_ends_the_run_until_it_is_raised(server, tmp_path):
    plugin = "plugins.callbacks=[{path: tests.integration.test_costs.SpendAfter, arguments: {step: 3}}]"
    common = [f"output_folder={tmp_path}", "samples.prompts=[]", "plan.price_per_gpu_hour=0.5"]
    limited = [*common, "trainer.save_interval=100ba", "operations.max_dollars=500"]
    spent = server.run(2, [("tests/tools/toy.yaml", [*limited, plugin])])
    assert spent.codes == [2, 2], spent.output[-3000:]
    assert spent.output.count("BudgetSpentError") == 1
    marker = json.loads((tmp_path / BUDGET).read_text())
    assert "operations.max_dollars" in marker["reason"]
    assert 4 <= marker["step"] <= 6
    assert list(tmp_path.glob(f"checkpoints/ep*-ba{marker['step']}"))

    refused = server.run(2, [("tests/tools/toy.yaml", limited)])
    assert refused.codes == [2, 2], refused.output[-3000:]
    assert "nothing was computed" in refused.output

    server.train(2, [("tests/tools/toy.yaml", [*common, "operations.max_dollars=1500"])])
    assert not (tmp_path / BUDGET).exists()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl") if TRAIN_LOSS in row] == list(range(8))
    starts = read_costs(tmp_path)
    assert [(row.step, row.reached) for row in starts] == [
        (0, marker["step"]),
        (marker["step"], marker["step"]),
        (marker["step"], 8),
    ]
    totals = total(starts)
    assert totals.hours["repeated"] == 0
    assert totals.dollars == pytest.approx(1000, rel=0.01)
    assert 0 < totals.restart_hours < 1
