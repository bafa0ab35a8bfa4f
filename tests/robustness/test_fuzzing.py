"""Random steps through capture and replay, and random batches through the emulator.

Each against a reference of a few lines. `--hypothesis-profile=thorough` tries thousands.
"""

import numpy as np
import pytest
import torch
import torchmetrics
from host_capture import OnTheHost
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ipu_log_callback.geometry import Geometry
from ipu_log_callback.metrics import Metrics
from ipu_log_callback.record import LoggedCall
from ipu_log_callback.replay import Replay
from ipu_log_callback.selection import Selection

REDUCTIONS = {"mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max}
NAMES = st.sampled_from(["a", "b", "val/x", "[odd]*", "é", "loss", "k" * 300])
NUMBERS = st.integers(-(2**20), 2**20)


class CaptureAndReplay(RuleBasedStateMachine):
    """Any sequence of logged calls and metric calls, against a list of what was called.

    Micro-batches of an execution are rows of numbers; the step is run for one of them, and what
    every row gives is laid out along dimension 0, as PopTorch does.
    """

    @initialize(
        iterations=st.integers(1, 3),
        replicas=st.integers(1, 2),
        selected=st.lists(NAMES, unique=True, max_size=4),
        everything=st.booleans(),
    )
    def begin(self, iterations, replicas, selected, everything):
        self.geometry = Geometry(iterations, 1, replicas)
        self.selection = Selection(["*"] if everything else selected)
        self.calls = []  # (name or None, column, reduce_fx, is_integer)
        self.columns = 0

    @rule(name=NAMES, reduce_fx=st.sampled_from(list(REDUCTIONS)), integer=st.booleans())
    def log(self, name, reduce_fx, integer):
        self.calls.append((name, self.columns, reduce_fx, integer))
        self.columns += 1

    @rule(name=NAMES, which=st.integers(0, 5))
    @precondition(lambda self: self.columns)
    def log_an_earlier_tensor_again(self, name, which):
        _, column, reduce_fx, integer = self.calls[which % len(self.calls)]
        self.calls.append((name, column, reduce_fx or "sum", integer))

    @rule()
    def update_the_metric(self):
        self.calls.append((None, self.columns, None, False))
        self.columns += 1

    @rule(data=st.data())
    @precondition(lambda self: self.calls)
    def execute(self, data):
        count = self.geometry.micro_batches
        rows = data.draw(
            st.lists(
                st.lists(NUMBERS, min_size=self.columns, max_size=self.columns),
                min_size=count,
                max_size=count,
            )
        )
        module = torch.nn.Module()
        module.metric = torchmetrics.CatMetric()
        plain = vars(module.metric)["update"]
        seen = []
        packed = [self.captured(module, row) for row in rows]
        _, record, wire = packed[0]
        returned = [
            torch.cat([tensors[number] for (_, tensors), _, _ in packed])
            for number in range(wire.extra_outputs)
        ]
        whole = ("out", tuple(returned)) if returned else "out"
        output, anchored = wire.unpack(whole, self.geometry, self.geometry)
        assert output == "out"
        Replay(record, wire, self.geometry)(
            anchored, lambda name, value, **_: seen.append((name, float(value))), None
        )
        assert seen == [
            (name, pytest.approx(REDUCTIONS[how](np.array(rows, np.float64)[:, column]), rel=1e-5))
            for name, column, how, _ in self.calls
            if name is not None and self.selection.selects(name)
        ]
        updates = [column for name, column, _, _ in self.calls if name is None]
        wanted = updates if self.selection.selects("metric") else []
        held = module.metric.value
        assert sum(map(torch.numel, held)) == len(wanted) * count
        expected = sorted(row[column] for row in rows for column in wanted)
        assert sorted(float(v) for part in held for v in part.reshape(-1)) == expected
        assert vars(module.metric)["update"] is plain

    def captured(self, module, row):
        """Run the calls as a step of one micro-batch."""
        metrics = Metrics(module)
        capture = OnTheHost(module, "test_step", self.selection, metrics, False)
        tensors = [torch.tensor(float(value)) for value in row]
        integers = {}
        with metrics.recorded(capture.record_metric):
            for name, column, how, integer in self.calls:
                if name is None:
                    module.metric.update(tensors[column])
                    continue
                value = tensors[column]
                if integer:
                    value = integers.setdefault(column, value.int())
                capture.record_log(None, name, value, {"reduce_fx": how})
        packed, record, wire = capture.finish("out")
        return packed if wire.carries_anchored else ("out", ()), record, wire


class Batching(RuleBasedStateMachine):
    """Executions of random geometry and output mode, against slicing with numpy."""

    @initialize(
        iterations=st.integers(1, 4),
        replicas=st.integers(1, 3),
        micro_batch=st.integers(1, 3),
        mode=st.sampled_from(["All", "Final", "EveryN", "Sum"]),
        data=st.data(),
    )
    def begin(self, iterations, replicas, micro_batch, mode, data):
        import poptorch

        divisors = [n for n in range(1, iterations + 1) if iterations % n == 0]
        self.period = data.draw(st.sampled_from(divisors)) if mode == "EveryN" else 1
        options = poptorch.Options()
        options.deviceIterations(iterations)
        options.replicationFactor(replicas)
        options.outputMode(
            getattr(poptorch.OutputMode, mode), *([self.period] * (mode == "EveryN"))
        )

        class Step(torch.nn.Module):
            def forward(self, x):
                return x * 2, x.sum()

        self.model = poptorch.inferenceModel(Step(), options)
        self.shape = (iterations, replicas, micro_batch)
        self.mode = mode

    @rule(data=st.data())
    def execute(self, data):
        iterations, replicas, micro_batch = self.shape
        count = iterations * replicas * micro_batch
        values = data.draw(st.lists(st.integers(-1000, 1000), min_size=count, max_size=count))
        doubled, sums = self.model(torch.tensor(values, dtype=torch.float32))
        x = np.array(values, np.float32).reshape(self.shape)  # [iterations, replicas, samples]
        picked = {
            "All": lambda it: it,
            "Final": lambda it: it[-1:],
            "EveryN": lambda it: it[self.period - 1 :: self.period],
            "Sum": lambda it: it.sum(0, keepdims=True),
        }[self.mode]
        assert doubled.tolist() == (picked(x) * 2).reshape(-1).tolist()
        assert sums.reshape(-1).tolist() == picked(x.sum(2)).reshape(-1).tolist()
        assert sums.dim() == (sums.numel() > 1)


def machine(kind, examples):
    """The machine as a test, with a part of the profile's examples."""
    case = kind.TestCase
    case.settings = settings(
        max_examples=settings().max_examples * examples // 100,
        stateful_step_count=12,
        deadline=None,
    )
    return case


TestCaptureAndReplay = machine(CaptureAndReplay, 50)
TestBatching = machine(Batching, 50)


def test_a_logged_call_holds_no_value():
    """What is recorded of a device tensor is its place, shape and type."""
    capture = OnTheHost(
        torch.nn.Module(), "test_step", Selection(["*"]), Metrics(torch.nn.Module()), False
    )
    capture.record_log(None, "x", torch.tensor(3.0), {})
    _, record, _ = capture.finish(None)
    (call,) = record.events
    assert isinstance(call, LoggedCall)
    assert "3." not in repr(call)
