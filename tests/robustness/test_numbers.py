"""Numbers at the edges: what arrives is what was computed."""

import math
import struct

import pytest
import torch
import torchmetrics

from ipu_log_callback import IPULogCallback

from .runs import FULL, QUIET, numbers_of, pl, run, trainer


class Logging(pl.LightningModule):
    """Logs in its test step what a function makes of a micro-batch."""

    def __init__(self, logs):
        super().__init__()
        self.logs = logs

    def test_step(self, batch, batch_idx):
        self.logs(self, batch[0])


def logged(logs, data, micro_batch=2, iterations=2, **given):
    """What is logged of data that passes in micro-batches."""
    dataset = torch.utils.data.TensorDataset(data)
    made = trainer([IPULogCallback("*")], iterations=iterations, **given)
    run(made, "test", Logging(logs), torch.utils.data.DataLoader(dataset, batch_size=micro_batch))
    return numbers_of(made)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_halves_do_not_overflow(dtype):
    """Each micro-batch fits into a half; their sum and their mean need not."""
    found = logged(
        lambda module, x: [
            module.log(f"x_{how}", x.amax().to(dtype), reduce_fx=how) for how in ("sum", "mean")
        ],
        torch.full((8, 1), 49152.0),
    )
    assert found == {"x_sum": 4 * 49152.0, "x_mean": 49152.0}


def test_a_half_that_overflows_in_the_step_is_infinite():
    """As on the device: nothing hides it."""
    found = logged(
        lambda module, x: module.log("x", (x.half() * 2).amax()), torch.full((4, 1), 6e4)
    )
    assert found == {"x": math.inf}


def test_counts_above_2_to_the_24_are_exact():
    """Integers do not travel, and are not added up, as float32."""
    odd = 2**24 + 1

    class Exact(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

        def update(self, value):
            self.total += value

        def compute(self):
            return self.total

    module = Logging(lambda module, x: module.total.update(x.amax()))
    module.total = Exact()
    data = torch.full((8, 1), odd, dtype=torch.int32)
    dataset = torch.utils.data.TensorDataset(data)
    callback = IPULogCallback("*")
    made = trainer([callback])
    seen = []
    module.on_test_batch_end = lambda *_: seen.append(int(module.total.total))
    run(made, "test", module, torch.utils.data.DataLoader(dataset, batch_size=2))
    assert seen == [2 * odd, 4 * odd]


@pytest.mark.parametrize("reduce_fx", ["max", "min", "sum"])
def test_large_integers_in_the_history_are_exact(reduce_fx):
    """What came back is kept as integers, micro-batch by micro-batch."""
    values = [2**24 + 1, 2**24 + 3, 2**30 + 1, 7]
    data = torch.tensor(values, dtype=torch.int32).reshape(-1, 1)
    callback = IPULogCallback("*", history=True)
    made = trainer([callback], iterations=4)
    module = Logging(lambda module, x: module.log("n", x.amax(), reduce_fx=reduce_fx))
    dataset = torch.utils.data.TensorDataset(data)
    run(made, "test", module, torch.utils.data.DataLoader(dataset, batch_size=1))
    entry = callback.history["n"][0]
    assert entry.micro_batches.tolist() == values
    exact = {"max": max, "min": min, "sum": sum}[reduce_fx](values)
    assert numbers_of(made)["n"] == float(torch.tensor(float(exact)))


def test_the_mean_of_many_values_does_not_drift():
    """Micro-batches are reduced once an execution, not added one by one in float32."""
    count = 2**20 if FULL else 2**16
    found = logged(
        lambda module, x: module.log("x", x.mean()),
        torch.full((count, 1), 0.1),
        micro_batch=count // 64,
        iterations=64,
    )
    assert found["x"] == pytest.approx(0.1, rel=1e-6)


SPECIAL = [math.nan, math.inf, -math.inf, -0.0, 1e-40, 1.4e-45, 3.4e38, 5.0]


@pytest.mark.parametrize("value", SPECIAL, ids=repr)
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_a_special_number_is_what_it_is_on_the_cpu(value, reduce_fx):
    """NaN, infinities, a negative zero and denormals pass through, sign included."""

    def logs(module, x):
        module.log("x", x.amax(), reduce_fx=reduce_fx, on_step=True, on_epoch=True)

    on_ipu = trainer([IPULogCallback("*")], iterations=1)
    on_cpu = pl.Trainer(accelerator="cpu", logger=False, max_epochs=1, **QUIET)
    bits = []
    for made in (on_ipu, on_cpu):
        module, seen = Logging(logs), []

        def see(*_, made=made, seen=seen):
            seen.append({**made.logged_metrics, **made.callback_metrics})

        module.on_test_batch_end = module.on_test_epoch_end = see
        dataset = torch.utils.data.TensorDataset(torch.full((1, 1), value))
        run(made, "test", module, torch.utils.data.DataLoader(dataset))
        see()
        bits.append(
            [{name: struct.pack("f", float(it)) for name, it in each.items()} for each in seen]
        )
    assert bits[0] == bits[1]
    assert any(bits[0])


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_all_nan_stays_nan(reduce_fx):
    """An epoch without a number has none."""
    found = logged(
        lambda module, x: module.log("x", x.amax(), reduce_fx=reduce_fx),
        torch.full((8, 1), math.nan),
    )
    assert math.isnan(found["x"])


@pytest.mark.parametrize("reduce_fx", ["min", "max"])
def test_extremes_of_an_empty_epoch(reduce_fx):
    """A loader without batches logs nothing, and is no error of ours."""
    found = logged(
        lambda module, x: module.log("x", x.amax(), reduce_fx=reduce_fx), torch.zeros((0, 1))
    )
    assert found == {}
