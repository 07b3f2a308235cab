"""Averages in one process: swapped in and out, also around failures; loaded by name."""

import pytest
import torch
from composer import Callback, Evaluator, Logger, State, Trainer
from composer.models import ComposerModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diffusion.ema.averaging import Exponential, PowerFunction, WeightAverage, check_names, trainable_parameters
from diffusion.ema.callbacks import LateStartEMA


class Line(ComposerModel):
    """y = w x, with a frozen part and a counter, neither of which is averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.frozen(self.line(batch[0]))

    def loss(self, outputs: Tensor, batch: list[Tensor]) -> Tensor:
        return (outputs - batch[1]).square().mean()

    def eval_forward(self, batch: list[Tensor], outputs: Tensor | None = None) -> Tensor:
        return self(batch)


class Watch(Callback):
    """Keep the weights with which was evaluated; fail in an evaluation after a step."""

    def __init__(self, fail_at: int) -> None:
        self.fail_at = fail_at
        self.seen: dict[int, Tensor] = {}

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        step = state.timestamp.batch.value
        self.seen[step] = weights(state.model)
        if step == self.fail_at:
            raise RuntimeError("evaluation failed on purpose")


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters() if p.requires_grad])


def average_of(ema: LateStartEMA) -> Tensor:
    return torch.cat([tensor.flatten().clone() for tensor in ema.averages[0].averages.values()])


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 3, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def trainer(ema: LateStartEMA, *callbacks: Callback) -> Trainer:
    torch.manual_seed(0)
    model = Line()
    return Trainer(
        model=model,
        train_dataloader=data(),
        eval_dataloader=Evaluator(label="validation", dataloader=data(), eval_interval="2ba"),
        optimizers=torch.optim.SGD(model.line.parameters(), lr=0.1),
        max_duration="6ba",
        callbacks=[ema, *callbacks],
        device="cpu",
        progress_bar=False,
    )


@pytest.fixture
def ema():
    return LateStartEMA(start="3ba", profiles=[Exponential(0.9), PowerFunction(0.1)])


def test_only_trainable_parameters_are_averaged(ema):
    trainer(ema).fit()
    assert [set(average.averages) for average in ema.averages] == [{"line.weight", "line.bias"}] * 2
    assert [average.num_updates for average in ema.averages] == [3, 3]
    assert [average.time for average in ema.averages] == [4, 4]


def test_the_first_average_is_evaluated_unless_told_otherwise(ema):
    watch = Watch(fail_at=-1)
    run = trainer(ema, watch)
    run.fit()
    assert torch.equal(watch.seen[6], average_of(ema))
    assert not torch.equal(watch.seen[6], weights(run.state.model))

    watch, ema = Watch(fail_at=-1), LateStartEMA(start="3ba", profiles=[Exponential(0.9)], evaluate=False)
    run = trainer(ema, watch)
    run.fit()
    assert torch.equal(watch.seen[6], weights(run.state.model))


def test_the_weights_are_back_after_an_evaluation_that_failed(ema):
    reference = LateStartEMA(start="3ba", profiles=[Exponential(0.9), PowerFunction(0.1)])
    undisturbed = trainer(reference)
    undisturbed.fit()

    run = trainer(ema, watch := Watch(fail_at=4))
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit()
    assert torch.equal(weights(run.state.model), watch.seen[4]), "this is the average"
    watch.fail_at = -1
    run.fit()
    assert torch.equal(weights(run.state.model), weights(undisturbed.state.model))
    assert torch.equal(average_of(ema), average_of(reference))

    before, average = weights(run.state.model), average_of(ema)
    watch.fail_at = 6
    with pytest.raises(RuntimeError, match="on purpose"):
        run.eval()
    assert torch.equal(weights(run.state.model), average)
    run.close()
    assert torch.equal(weights(run.state.model), before)
    assert torch.equal(average_of(ema), average)


def test_the_block_swaps_back_after_an_exception_and_does_not_nest(ema):
    run = trainer(ema)
    with ema.swapped_in(run.state) as is_average:
        assert not is_average, "it has not started"
    run.fit()
    before, average = weights(run.state.model), average_of(ema)
    with pytest.raises(KeyError), ema.swapped_in(run.state) as is_average:
        assert is_average
        assert torch.equal(weights(run.state.model), average)
        with ema.swapped_in(run.state) as is_average:
            assert is_average
            assert torch.equal(weights(run.state.model), average)
        with pytest.raises(AssertionError, match="while the average is swapped in"):
            ema.state_dict()
        raise KeyError
    assert torch.equal(weights(run.state.model), before)
    assert torch.equal(average_of(ema), average)


def test_an_average_follows_parameters_whose_memory_is_replaced():
    """FSDP2 may do so in its first forward pass, and `nn.Module.to` does."""
    model = nn.Linear(3, 1)
    average = WeightAverage(trainable_parameters(model), Exponential(0.5))
    before = weights(model)
    for parameter in model.parameters():
        parameter.data = parameter.data + 1.0
    average.update()
    found = torch.cat([tensor.flatten().clone() for tensor in average.averages.values()])
    torch.testing.assert_close(found, before + 0.5)
    average.swap()
    assert torch.equal(weights(model), found)


def test_updates_at_an_interval():
    ema = LateStartEMA(start="1ba", profiles=[Exponential(0.9)], interval="2ba")
    trainer(ema).fit()
    assert ema.averages[0].num_updates == 3, "after 2, 4 and 6"
    with pytest.raises(ValueError, match="counted in batches"):
        LateStartEMA(start="1ba", profiles=[Exponential(0.9)], interval="2ep")


@pytest.mark.parametrize(
    ("stored", "message"),
    [("a", r"1 missing \['b'\], 0 unexpected"), ("abc", r"0 missing .*, 1 unexpected \['c'\]")],
)
def test_other_names_are_refused(stored, message):
    with pytest.raises(ValueError, match=message):
        check_names("ab", stored)
