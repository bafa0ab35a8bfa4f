import copy

import pytest
import torch
from torch.nn import functional as F


class Net(torch.nn.Module):
    def __init__(self, losses):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.losses = losses

    def forward(self, x, y):
        return self.losses(self.linear(x), y)


X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0])
MULTIPLE = "Multiple independent losses found in graph. Graph must have one final loss."


def step(poptorch, losses):
    """One training step; returns the outputs and the change of the weights, plain and emulated."""
    torch.manual_seed(0)
    model = Net(losses)
    before = copy.deepcopy(model.linear.weight.data)
    executor = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    out = executor(X, Y)
    return out, model.linear.weight.data - before


def gradient(loss):
    """The gradient of a loss in plain PyTorch."""
    torch.manual_seed(0)
    model = Net(loss)
    model(X, Y).backward()
    return model.linear.weight.grad


def test_no_loss(poptorch):
    """A training step needs a loss.

    PopTorch 3.4 `RemoveSurplusIdentityLosses.cpp`.
    """
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph!"):
        step(poptorch, lambda out, y: (out - 1).abs().mean())


def test_two_independent_losses(poptorch):
    """Two losses that do not meet are refused, even if one is detached.

    PopTorch 3.4 `RemoveSurplusIdentityLosses.cpp`.
    """
    for second in (
        lambda out: F.l1_loss(out, out * 2),
        lambda out: F.mse_loss(out, out * 2).detach(),
    ):
        with pytest.raises(poptorch.Error, match=MULTIPLE):
            step(poptorch, lambda out, y, second=second: (F.cross_entropy(out, y), second(out)))


def test_a_loss_that_is_not_returned_is_dead(poptorch):
    """Only what an output depends on counts."""

    def losses(out, y):
        return (F.l1_loss(out, out * 2), F.cross_entropy(out, y))[1]

    _, change = step(poptorch, losses)
    torch.testing.assert_close(-change, gradient(F.cross_entropy))


def test_a_loss_that_feeds_another_is_an_operation(poptorch):
    """`identity_loss` around several losses makes one.

    PopTorch 3.4 `custom_loss_test.py`.
    """

    def both(out, y):
        return F.cross_entropy(out, y) + 2 * F.mse_loss(out, torch.zeros_like(out))

    def marked(out, y):
        return poptorch.identity_loss(both(out, y), reduction="none")

    _, change = step(poptorch, marked)
    torch.testing.assert_close(-change, gradient(both))


def test_arithmetic_after_the_loss_has_no_gradient(poptorch):
    """Gradients start at the loss; what is computed from it later is only returned.

    PopTorch 3.4 `RemoveSurplusIdentityLosses.cpp`.
    """
    out, change = step(poptorch, lambda out, y: F.cross_entropy(out, y) * 10)
    torch.testing.assert_close(-change, gradient(F.cross_entropy))
    torch.manual_seed(0)
    torch.testing.assert_close(out, Net(lambda out, y: F.cross_entropy(out, y) * 10)(X, Y).detach())


def test_arithmetic_in_place_on_the_loss_has_no_gradient(poptorch):
    """`loss /= 4` changes what the step returns and logs, and no weight differently."""

    def divided(p, y):
        loss = F.cross_entropy(p, y)
        loss /= 4
        return loss

    out, change = step(poptorch, divided)
    torch.manual_seed(0)
    assert torch.allclose(out, divided(Net(divided).linear(X), Y).detach())
    assert torch.allclose(change, -gradient(F.cross_entropy))


def test_a_detached_loss_and_arithmetic_on_it_are_harmless(poptorch):
    """They are not losses of their own."""
    (loss, doubled, mae), _ = step(poptorch, _loss_and_metrics)
    assert doubled == 2 * loss
    assert mae >= 0


def _loss_and_metrics(out, y):
    loss = F.cross_entropy(out, y)
    return loss, loss.detach() * 2, (out - 1).abs().mean()


def test_class_probabilities_are_no_loss(poptorch):
    """With probabilities as target PyTorch decomposes `cross_entropy` into arithmetic.

    PopTorch 3.4 `LossOps.cpp`.
    """
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        step(poptorch, lambda out, y: F.cross_entropy(out, F.one_hot(y, 3).float()))


def test_a_final_loss_with_smoothed_labels_is_refused_by_name(poptorch):
    """PopTorch's own gradient of it is wrong; marked as the loss, it is PyTorch's."""

    def smoothed(out, y):
        return F.cross_entropy(out, y, label_smoothing=0.1)

    with pytest.raises(NotImplementedError, match=r"label_smoothing=.* as the final loss"):
        step(poptorch, smoothed)
    _, change = step(poptorch, lambda out, y: poptorch.identity_loss(smoothed(out, y), "none"))
    torch.testing.assert_close(change, -gradient(smoothed))


def test_a_final_loss_is_one_number(poptorch):
    """A loss without reduction cannot be the final one."""
    with pytest.raises(poptorch.Error, match="must be a single number"):
        step(poptorch, lambda out, y: F.cross_entropy(out, y, reduction="none"))


def test_inference_needs_no_loss(poptorch):
    """The rule holds for training only."""
    model = Net(lambda out, y: (F.l1_loss(out, out), F.mse_loss(out, out)))
    assert len(poptorch.inferenceModel(model)(X, Y)) == 2


def test_backward_on_an_output(poptorch):
    """The device did the backward pass already.

    PopTorch 3.4 `_assign_backward_error`.
    """
    out, _ = step(poptorch, F.cross_entropy)
    with pytest.raises(poptorch.Error, match="backward\\(\\) cannot be called explicitly"):
        out.backward()
