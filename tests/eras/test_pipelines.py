"""Models in several blocks: pipelined, sharded and phased execution."""

import dataclasses

import pytest
import torch
from lightning_in_use import STRATEGIES, IPUStrategy
from parity.bench import FEATURES, Net, Setting, check_parity, observe

# A pipeline of two stages wants an accumulation of 3 and two device iterations at the least.
CUT = Setting(iterations=2, accumulation=3)


def pipelined(training_opts, inference_opts):
    """Two stages on two IPUs."""
    import poptorch

    for options in (training_opts, inference_opts):
        stages = [poptorch.Stage(name) for name in ("first", "second")]
        options.setExecutionStrategy(poptorch.PipelinedExecution(*stages))
    return IPUStrategy(training_opts=training_opts, inference_opts=inference_opts)


class Deep(Net):
    """Two layers, and a log call in each block."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 4)
        self.head = torch.nn.Linear(4, 1)

    def both(self, stage, batch):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return self.both("train", batch)

    def validation_step(self, batch, batch_idx):
        return self.both("val", batch)


class InBlocks(Deep):
    """`poptorch.Block` in the step itself."""

    def both(self, stage, batch):
        import poptorch

        x, y = batch
        with poptorch.Block("first", ipu_id=0):
            hidden = torch.tanh(self.layer(x))
            self.log(f"{stage}_hidden", hidden.mean(), on_epoch=True)
        with poptorch.Block("second", ipu_id=1):
            loss = torch.nn.functional.mse_loss(self.head(hidden).squeeze(-1), y)
            self.log(f"{stage}_loss", loss, on_epoch=True)
        return loss


class InBegunBlocks(Deep):
    """`poptorch.BeginBlock` around the layers, as a module's author places them."""

    def __init__(self):
        super().__init__()
        import poptorch

        self.layer = poptorch.BeginBlock(self.layer, "first", ipu_id=0)
        self.head = poptorch.BeginBlock(self.head, "second", ipu_id=1)

    def both(self, stage, batch):
        x, y = batch
        hidden = torch.tanh(self.layer(x))
        self.log(f"{stage}_hidden", hidden.mean(), on_epoch=True)
        loss = torch.nn.functional.mse_loss(self.head(hidden).squeeze(-1), y)
        self.log(f"{stage}_loss", loss, on_epoch=True)
        return loss


@pytest.mark.parametrize("make", [InBlocks, InBegunBlocks])
@pytest.mark.parametrize("replicas", [1, 2])
def test_log_calls_in_every_stage_of_a_pipeline(make, replicas):
    """What is logged in an early stage arrives like what is logged in the last."""
    setting = dataclasses.replace(CUT, replicas=replicas, strategy=pipelined)
    check_parity(make, setting=setting, tolerance=1e-4)


@pytest.mark.parametrize("kind", ["ShardedExecution", "SerialPhasedExecution"])
def test_other_executions_of_blocks(kind):
    """Sharded and phased execution change where things run, and no value."""

    def strategy(training_opts, inference_opts):
        import poptorch

        for options in (training_opts, inference_opts):
            if kind == "ShardedExecution":
                execution = poptorch.ShardedExecution("first", "second")
            else:
                execution = poptorch.SerialPhasedExecution(
                    [poptorch.Stage("first")], [poptorch.Stage("second")]
                )
            options.setExecutionStrategy(execution)
        return IPUStrategy(training_opts=training_opts, inference_opts=inference_opts)

    setting = Setting(iterations=1, accumulation=2, strategy=strategy)
    check_parity(InBlocks, setting=setting, tolerance=1e-4)


def test_a_pipeline_that_is_too_short_is_poptorchs_own_error():
    """Too little accumulation is refused as without the callback."""
    with pytest.raises(Exception, match="gradientAccumulation must be greater than or equal"):
        observe(
            True, InBlocks, setting=dataclasses.replace(CUT, accumulation=2, strategy=pipelined)
        )


@pytest.mark.parametrize("name", STRATEGIES)
def test_graphcores_strategy_too(name):
    """The same on each distribution's strategy."""

    def strategy(training_opts, inference_opts):
        made = pipelined(training_opts, inference_opts)
        return STRATEGIES[name](
            training_opts=made.training_opts, inference_opts=made.inference_opts
        )

    check_parity(InBegunBlocks, setting=dataclasses.replace(CUT, strategy=strategy), tolerance=1e-4)
