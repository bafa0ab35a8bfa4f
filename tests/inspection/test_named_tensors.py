"""Gradients, weights and optimizer states against plain PyTorch."""

import copy

import pytest
import torch
from torch.testing import assert_close

from ipu_log_callback import IPULogCallback, IPULogError, IPULogWarning
from ipu_log_callback.named_tensors import prefix_of

from .bench import (
    GRID,
    LEARNING_RATE,
    Counts,
    Net,
    fit,
    fit_quietly,
    options_of,
    pl,
    plain,
    trainer_of,
)


def mean_norm(tensors):
    """Mean over the updates of an execution of a norm."""
    return torch.stack([tensor.norm() for tensor in tensors]).mean()


@pytest.mark.parametrize("counts", GRID, ids=str)
def test_gradients_are_those_of_plain_pytorch(counts):
    """Each update's gradient is what `.grad` holds before the step, over every geometry."""
    net = Net()
    history = plain(copy.deepcopy(net), counts)
    callback = IPULogCallback(gradients="encoder.*")
    rows = fit(net, callback, counts)
    for row, updates in zip(rows, history):
        for name in ("encoder.0.weight", "encoder.0.bias"):
            expected = mean_norm([update.gradients[name] for update in updates])
            assert_close(torch.tensor(row[f"grad/{name}/norm"]), expected)
    last = torch.stack([update.gradients["encoder.0.weight"] for update in history[-1]])
    assert_close(callback.anchored["grad/encoder.0.weight"], last)
    assert "grad/head.weight/norm" not in rows[0]


@pytest.mark.parametrize("counts", [Counts(2, 1, 1), Counts(1, 2, 2)], ids=str)
def test_the_global_norm_is_that_of_clip_grad_norm(counts):
    """`grad/norm` is the norm that `torch.nn.utils.clip_grad_norm_` returns."""
    net = Net()
    history = plain(copy.deepcopy(net), counts)
    rows = fit(net, IPULogCallback(gradients="*"), counts)
    for row, updates in zip(rows, history):
        norms = [torch.cat([g.flatten() for g in u.gradients.values()]).norm() for u in updates]
        assert_close(torch.tensor(row["grad/norm"]), torch.stack(norms).mean())


def test_gradients_are_summed_where_the_options_say_so():
    """The reduction over accumulation and replicas is that of `poptorch.Options`."""
    import poptorch

    def summed(options):
        options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)

    net, counts = Net(), Counts(2, 3, 2)
    history = plain(copy.deepcopy(net), counts, summed=True)
    callback = IPULogCallback(gradients="head.bias")
    fit(net, callback, counts, edit=summed)
    expected = torch.stack([update.gradients["head.bias"] for update in history[-1]])
    assert_close(callback.anchored["grad/head.bias"], expected)


def test_loss_scaling_does_not_show():
    """Gradients and momentum are those of the loss, whatever scale the device computes in."""
    import poptorch

    def scaled(parameters):
        return poptorch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.5, loss_scaling=128.0)

    net = Net(lambda ps: torch.optim.SGD(ps, lr=LEARNING_RATE, momentum=0.5))
    history = plain(copy.deepcopy(net))
    net.make_optimizer = scaled
    callback = IPULogCallback(gradients="head.bias", optimizer_state="head.bias")
    fit(net, callback)
    last = history[-1][-1]
    assert_close(callback.anchored["grad/head.bias"][0], last.gradients["head.bias"])
    momentum = callback.anchored["optim/head.bias/momentum_buffer"][0]
    assert_close(momentum, last.states["head.bias"]["momentum_buffer"])


@pytest.mark.parametrize("counts", GRID, ids=str)
@pytest.mark.parametrize("mode", ["All", "Final", "EveryN"])
def test_weights_are_those_after_the_last_update(counts, mode):
    """In every geometry and output mode; weights alone leave the mode as it is."""
    import poptorch

    def choose(options):
        period = counts.accumulation if mode == "EveryN" else None
        options.outputMode(getattr(poptorch.OutputMode, mode), period)

    net = Net()
    history = plain(copy.deepcopy(net), counts)
    callback = IPULogCallback(weights=["head.*"])
    rows = fit(net, callback, counts, edit=choose)
    for row, updates in zip(rows, history):
        expected = updates[-1].weights["head.weight"].norm()
        assert_close(torch.tensor(row["weight/head.weight/norm"]), expected)
    assert_close(callback.anchored["weight/head.bias"][0], history[-1][-1].weights["head.bias"])


STATES = {
    "adam": (torch.optim.Adam, {}, ["exp_avg", "exp_avg_sq"]),
    "adamw": (torch.optim.AdamW, {}, ["exp_avg", "exp_avg_sq"]),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}, ["momentum_buffer"]),
    "rmsprop without momentum": (torch.optim.RMSprop, {}, ["square_avg"]),
    "rmsprop": (
        torch.optim.RMSprop,
        {"momentum": 0.9, "centered": True},
        ["square_avg", "grad_avg", "momentum_buffer"],
    ),
}


@pytest.mark.parametrize("counts", [Counts(2, 1, 1), Counts(2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", STATES)
def test_optimizer_states_are_those_of_plain_pytorch(name, counts):
    """Every state with a stable name in PopART, under PyTorch's name for it."""
    factory, arguments, states = STATES[name]
    net = Net(lambda ps: factory(ps, lr=LEARNING_RATE, **arguments))
    history = plain(copy.deepcopy(net), counts)
    callback = IPULogCallback(optimizer_state="head.weight")
    rows = fit(net, callback, counts)
    expected = history[-1][-1].states["head.weight"]
    found = {key for key in callback.anchored if key.startswith("optim/")}
    assert found == {f"optim/head.weight/{state}" for state in states}
    for state in states:
        assert_close(callback.anchored[f"optim/head.weight/{state}"][0], expected[state])
        logged = rows[-1][f"optim/head.weight/{state}/norm"]
        assert_close(torch.tensor(logged), expected[state].norm())


def test_plain_sgd_keeps_no_state():
    """Asking for one is an error that says so, before training."""
    with pytest.raises(IPULogError, match="keeps no state on the device"):
        fit(Net(), IPULogCallback(optimizer_state="head.*"))


def test_a_state_without_a_stable_name_is_read_from_the_optimizer():
    """The number of steps comes from `state_dict()`, only at every n-th execution."""
    import poptorch

    net = Net(lambda ps: poptorch.optim.Adam(ps, lr=LEARNING_RATE))
    callback = IPULogCallback(optimizer_state="head.bias/step", every_n_executions=2)
    rows = fit(net, callback, Counts(2, 1, 1), executions=4)
    # in between Lightning repeats the last value, as for any key that is not logged each time
    assert [row["optim/head.bias/step/norm"] for row in rows] == [2.0, 2.0, 6.0, 6.0]


def test_all_statistics_are_torchs_own():
    """Each statistic equals the torch function of that name, NaN and infinities counted."""
    names = ["norm", "mean", "std", "min", "max", "abs_max", "nonfinite"]
    callback = IPULogCallback(weights="head.weight", statistics=names)
    (row,) = fit(Net(), callback, executions=1)
    weight = callback.anchored["weight/head.weight"][0]
    expected = [
        weight.norm(),
        weight.mean(),
        weight.std(),
        weight.min(),
        weight.max(),
        weight.abs().max(),
        (~weight.isfinite()).float().mean(),
    ]
    logged = [row[f"weight/head.weight/{name}"] for name in names]
    assert_close(torch.tensor(logged), torch.stack(expected))


def test_nothing_is_copied_between_executions():
    """Looking inside causes no copy of the weights to the host before the run ends."""
    from ipu_log_callback import emulator

    seen = []

    class Counter(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            seen.append(emulator.counters.implicit_copies_to_host)

    emulator.counters.reset()
    callback = IPULogCallback(
        gradients="*", weights="*", optimizer_state="*/exp_avg", activations="*"
    )
    net = Net(lambda ps: torch.optim.Adam(ps, lr=LEARNING_RATE))
    fit(net, callback, Counts(2, 1, 1), executions=3, others=(Counter(),))
    assert seen == [0, 0, 0]


def test_any_tensor_comes_back_by_its_popart_name():
    """`tensors` takes names that `tensor_names()` lists, and stores them under the user's."""
    callback = IPULogCallback(tensors={"x": "input", "the loss": "loss"})
    counts = Counts(2, 1, 2)
    rows = fit(Net(), callback, counts)
    assert callback.anchored["x"].shape == (counts.total, 2, 4)
    assert callback.anchored["the loss"].shape == (counts.total,)
    assert {"input", "loss"} <= set(callback.tensor_names())
    assert_close(
        torch.tensor(rows[-1]["tensor/the loss/norm"]), callback.anchored["the loss"].mean()
    )


def test_an_anchor_of_the_users_own_is_not_declared_twice():
    """PopTorch fills one of two outputs of a tensor only; both names find its value."""
    own = {}

    class Reader(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            executor = trainer.strategy.poptorch_models["train"]
            own["mine"] = executor.getAnchoredTensor("mine")
            own["anchors"] = len(executor.options.anchored_tensors)

    net = Net()
    prefix = _prefix_of(net)
    callback = IPULogCallback(weights="head.bias")
    fit(
        net,
        callback,
        edit=lambda options: options.anchorTensor("mine", f"UpdatedVar___{prefix}head.bias"),
        others=(Reader(),),
    )
    assert own["anchors"] == 1
    assert_close(own["mine"], callback.anchored["weight/head.bias"][0])


def _prefix_of(net):
    """What the strategy's wrapper puts before the names of this module's parameters."""
    callback = IPULogCallback(weights="head.bias")
    fit(copy.deepcopy(net), callback, executions=1)
    names = callback.tensor_names()
    (name,) = [n for n in names if n.startswith("UpdatedVar___") and n.endswith("head.bias")]
    return name[len("UpdatedVar___") : -len("head.bias")]


def test_the_users_options_stay_as_they_are():
    """Anchors are declared in a clone: a second trainer with the same options has none."""
    options = options_of(Counts(2, 1, 1))
    trainer = trainer_of([IPULogCallback(gradients="*")], options)
    fit_quietly(trainer, Net(), Counts(2, 1, 1))
    assert options.anchored_tensors == {}
    assert trainer.strategy.training_opts is options


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        ({"gradients": "encode.*"}, "encoder.0.weight"),
        ({"weights": ["head.wieght"]}, "head.weight"),
        ({"optimizer_state": "head.bias/exp_av"}, "head.bias/exp_avg"),
        ({"activations": ["encodr.0"]}, "encoder.0"),
    ],
)
def test_a_glob_that_matches_nothing_is_an_error_before_training(arguments, nearest):
    """Raised while the trainer sets up, with the nearest name that exists."""
    net = Net(lambda ps: torch.optim.Adam(ps, lr=LEARNING_RATE))
    with pytest.raises(IPULogError) as raised:
        fit(net, IPULogCallback(**arguments))
    (argument,) = arguments
    assert str(raised.value).startswith(f"`IPULogCallback({argument}=[")
    assert nearest in str(raised.value)


def test_a_frozen_parameter_has_no_gradient():
    """A glob that matches frozen parameters only matches nothing."""
    net = Net()
    net.head.requires_grad_(False)
    with pytest.raises(IPULogError, match="matches no trained parameter"):
        fit(net, IPULogCallback(gradients="head.*"))


def test_a_module_that_is_not_what_the_strategy_compiles():
    """Names cannot be told then; the error names both."""
    with pytest.raises(IPULogError, match="`Net` is not part of the model") as raised:
        prefix_of(torch.nn.Identity(), Net())
    assert "`Identity`" in str(raised.value)


def test_a_parameter_beside_the_loss_has_no_gradient():
    """The error names the parameter, and says to leave it out."""
    net = Net()
    net.unused = torch.nn.Linear(2, 2)
    with pytest.raises(IPULogError) as raised:
        fit(net, IPULogCallback(gradients="unused.*"))
    assert "`IPULogCallback(gradients=[...])` of 'unused." in str(raised.value)
    assert "does not lead to the loss" in str(raised.value)
    assert "leave that parameter out" in str(raised.value)


@pytest.mark.parametrize("state", ["head.bias/momentum", "nothing.*"])
def test_a_state_that_the_device_does_not_keep_is_named(state):
    """What has no stable name is looked for after an execution; then those that exist are told."""
    import poptorch

    net = Net(lambda ps: poptorch.optim.Adam(ps, lr=LEARNING_RATE))
    with pytest.raises(IPULogError, match=r"matches no optimizer state of `Adam`") as raised:
        fit(net, IPULogCallback(optimizer_state=state))
    assert "'head.weight/exp_avg', or a glob" in str(raised.value)


def test_a_tensor_that_popart_does_not_know_is_named():
    """The error names the argument and says where the names are listed."""
    with pytest.raises(IPULogError) as raised:
        fit(Net(), IPULogCallback(tensors={"x": "inptu"}))
    assert "`IPULogCallback(tensors={'x': 'inptu'})`" in str(raised.value)
    assert "callback.tensor_names()" in str(raised.value)


def test_sums_of_gradients_over_updates_are_refused():
    """Under `Sum` with several updates the norms cannot be had: an error before training."""
    import poptorch

    with pytest.raises(IPULogError, match=r"OutputMode\.Sum"):
        fit(
            Net(),
            IPULogCallback(gradients="*", output_mode="keep"),
            Counts(2, 1, 1),
            edit=lambda options: options.outputMode(poptorch.OutputMode.Sum),
        )


def test_sums_over_one_update_are_exact():
    """Under `Sum` with one update an execution, the sum is the update's gradient."""
    import poptorch

    net, counts = Net(), Counts(1, 2, 2)
    history = plain(copy.deepcopy(net), counts)
    callback = IPULogCallback(gradients="*", output_mode="keep")
    fit(net, callback, counts, edit=lambda o: o.outputMode(poptorch.OutputMode.Sum))
    expected = history[-1][-1].gradients["head.weight"]
    assert_close(callback.anchored["grad/head.weight"][0], expected)


def test_partial_gradients_are_told():
    """Under `Final` with accumulation a gradient is the last micro-batch's: a warning says so."""
    with pytest.warns(IPULogWarning, match="those of single micro-batches"):
        fit(Net(), IPULogCallback(gradients="*", output_mode="keep"), Counts(1, 2, 1))


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradients": 3},
        {"statistics": "medain"},
        {"reduce_activations": "mean"},
        {"every_n_executions": 0},
        {"cost_warning": "1 MB"},
        {"tensors": ["input"]},
        {"tensors": {"a": "input", "b": "input"}},
    ],
    ids=str,
)
def test_arguments_are_checked_in_the_constructor(arguments):
    """What cannot be meant is refused before there is a trainer, by the argument's name."""
    (argument,) = arguments
    with pytest.raises(IPULogError, match=argument):
        IPULogCallback(**arguments)
