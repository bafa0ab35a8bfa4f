"""However a run is cut into executions, it logs what the CPU run of its micro-batches logs."""

import itertools

import pytest
import torch

from .bench import Net, Setting, check_parity, observe, validate_only

COUNTS = (1, 2, 4, 7)
LEVELS = {"on_step": True, "on_epoch": True}


class Logs(Net):
    """One key of each reduction, and an integer, in every step."""

    def logs(self, stage, x, loss):
        self.log(f"{stage}_loss", loss, prog_bar=True, **LEVELS)
        self.log(f"{stage}_sum", x.sum(), reduce_fx="sum", **LEVELS)
        self.log(f"{stage}_min", x.amin(), reduce_fx="min", **LEVELS)
        self.log(f"{stage}_max", x.amax(), reduce_fx=max, on_epoch=True)
        self.log(f"{stage}_count", (x > 0).sum(), reduce_fx="sum", **LEVELS)


# every count of each dimension, and every pair of counts of two dimensions
CUTS = sorted(
    {(i, 1, 1) for i in COUNTS}
    | {(1, a, 1) for a in COUNTS}
    | {(1, 1, r) for r in COUNTS}
    | {(i, a, 1) for i, a in itertools.product((2, 7), repeat=2)}
    | {(i, 1, r) for i, r in itertools.product((2, 7), repeat=2)}
    | {(1, a, r) for a, r in itertools.product((2, 7), repeat=2)}
    | {(2, 2, 2), (4, 2, 2), (2, 4, 2), (2, 2, 4), (4, 1, 4)}
)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "x".join(map(str, cut)))
def test_iterations_accumulation_and_replicas(cut):
    """The three counts only say how many micro-batches an execution holds, and in which order."""
    check_parity(Logs, setting=Setting(*cut), tolerance=1e-4)


MODES = [(None, 1), ("All", 1), ("Final", 1), ("Sum", 1), ("EveryN", 2)]


@pytest.mark.parametrize(("mode", "period"), MODES)
@pytest.mark.parametrize("cut", [(4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)], ids=str)
def test_with_auto_the_users_output_mode_changes_no_logged_value(cut, mode, period):
    """`output_mode="auto"` fetches every micro-batch, whatever mode the options have."""
    check_parity(Logs, setting=Setting(*cut, mode=mode, period=period))


@pytest.mark.parametrize("mode", [None, "All", "Final", "Sum"])
@pytest.mark.parametrize("cut", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_with_one_micro_batch_a_replica_every_mode_is_exact_when_kept(cut, mode):
    """Under `"keep"` a mode that returns each micro-batch loses nothing."""
    seen = check_parity(Logs, setting=Setting(*cut, mode=mode, output_mode="keep"))
    assert seen.warnings == []


class MeansAndSums(Net):
    """What a sum over micro-batches is enough for."""

    def logs(self, stage, x, loss):
        self.log(f"{stage}_loss", loss, **LEVELS)
        self.log(f"{stage}_sum", x.sum(), reduce_fx="sum", **LEVELS)
        self.log(f"{stage}_count", (x > 0).sum(), reduce_fx="sum", **LEVELS)
        self.log(f"{stage}_share", (x > 0).sum(), **LEVELS)
        self.log(f"{stage}_constant", torch.tensor(0.25), **LEVELS)
        self.log(f"{stage}_constants", torch.tensor(3), reduce_fx="sum", **LEVELS)


@pytest.mark.parametrize("cut", [(4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)], ids=str)
def test_sum_when_kept_is_exact_for_means_and_sums(cut):
    """The device adds up: cheapest, and enough for `reduce_fx` mean and sum."""
    seen = check_parity(MeansAndSums, setting=Setting(*cut, mode="Sum", output_mode="keep"))
    assert seen.warnings == []


@pytest.mark.parametrize("reduce_fx", ["mean", "sum"])
@pytest.mark.parametrize("cut", [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("mode", [None, "Sum", "All", "Final"])
def test_constants_alone_are_counted_once_a_micro_batch(mode, cut, reduce_fx):
    """An output made of nothing but constants comes back once, whatever the mode."""

    class Constant(Net):
        def logs(self, stage, x, loss):
            self.log(f"{stage}_constant", torch.tensor(0.25), reduce_fx=reduce_fx, **LEVELS)

    check_parity(Constant, setting=Setting(*cut, mode=mode))
    if mode == "Sum":  # added up on the device, or not: its shape does not show it
        check_parity(Constant, setting=Setting(*cut, mode=mode, output_mode="keep"))


@pytest.mark.parametrize("reduce_fx", ["min", "max", torch.max])
def test_sum_when_kept_refuses_what_a_sum_cannot_give(reduce_fx):
    """An error names the call before a wrong number is logged."""

    class Extremes(Net):
        def validation_step(self, batch, batch_idx):
            self.log("extreme", batch[0].amax(), reduce_fx=reduce_fx)

    with pytest.raises(Exception, match=r"self\.log\('extreme'") as caught:
        observe(True, Extremes, validate_only, Setting(mode="Sum", output_mode="keep"))
    assert type(caught.value).__name__ == "OutputModeError"


@pytest.mark.parametrize(("mode", "period"), [("Final", 1), ("EveryN", 2), (None, 1)])
def test_a_mode_that_drops_micro_batches_is_warned_about_when_kept(mode, period):
    """The user is told by name which step's values are not those of all micro-batches."""
    setting = Setting(iterations=4, accumulation=1, mode=mode, period=period, output_mode="keep")
    seen = observe(True, Logs, setting=setting)
    (text,) = [text for text in seen.warnings if "Logs.training_step" in text]
    assert "output_mode='auto'" in text


@pytest.mark.parametrize(("mode", "period"), [("Final", 1), ("EveryN", 2)])
def test_what_a_kept_mode_returns_is_what_is_logged(mode, period):
    """With one update an execution the values are those of the micro-batches that come back."""
    setting = Setting(iterations=4, accumulation=1, mode=mode, period=period, output_mode="keep")

    class LogsMean(Net):
        def validation_step(self, batch, batch_idx):
            self.log("mean", batch[0].mean())

    seen = observe(True, LogsMean, validate_only, setting)
    batches = [x.mean() for x, _ in seen.run.loader()]
    kept = batches[3::4] if mode == "Final" else batches[1::2]
    assert seen.results[0]["mean"] == pytest.approx(torch.stack(kept).mean().item(), rel=1e-5)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (1, 3)])
def test_shapes_may_change_between_stages(sizes):
    """Another batch size in validation is another executor's business."""
    train_size, val_size = sizes

    def program(run):
        run.trainer(max_epochs=2).fit(
            run.module,
            run.loader(size=train_size, samples=8 * train_size),
            run.loader(size=val_size, samples=8 * val_size),
        )

    check_parity(Logs, program)


@pytest.mark.parametrize("drop_last", [True, False])
def test_an_incomplete_last_execution_follows_poptorchs_loader(drop_last):
    """What does not fill an execution is left out: the CPU run of the whole ones is the same."""
    setting = Setting(iterations=2, accumulation=2, replicas=1)

    def program(run):
        extra = 3 * setting.micro_batch if run.ipu and drop_last else 0
        loader = run.loader(samples=setting.samples + extra, drop_last=drop_last)
        run.trainer().fit(run.module, loader, run.loader())

    check_parity(Logs, program, setting)


def test_executors_of_both_stages_may_have_cuts_of_their_own():
    """Accumulation is training's alone; validation executions hold fewer micro-batches."""
    check_parity(Logs, setting=Setting(iterations=2, accumulation=7, executions=1))


def test_float_and_integer_keys_do_not_mix():
    """Keys of either kind keep their columns when some are selected and some are not."""

    class Mixed(Net):
        def logs(self, stage, x, loss):
            for number in range(3):
                self.log(f"{stage}_f{number}", x[:, number].sum())
                self.log(f"{stage}_i{number}", (x[:, number] > 0).sum() + number)
                self.log(f"{stage}_b{number}", x[0, number] > 0)

    check_parity(Mixed)
    everything = observe(True, Mixed).final[0]
    some = observe(True, Mixed, setting=Setting(keys=["*_f1", "*_i2", "*_b0"])).final[0]
    assert len(some) == 6
    assert all(torch.equal(some[name], everything[name]) for name in some)
