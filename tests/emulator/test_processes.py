"""One process of several: inference is its own affair, training is not."""

import pytest
import torch


def test_inference_in_one_of_several_processes(poptorch):
    """Replicas do not talk to each other: a process computes its own share."""
    options = poptorch.Options()
    options.Distributed.configureProcessId(1, 2)
    model = poptorch.inferenceModel(torch.nn.Linear(2, 1).requires_grad_(False), options)
    x = torch.randn(3, 2)
    assert torch.allclose(model(x), model.model(x))


def test_training_in_processes_that_cannot_exchange_gradients(poptorch):
    """Without an MPI that knows of the other processes, each would train a model of its own."""
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    with pytest.raises(poptorch.Error, match="2 processes, in training` is not emulated"):
        poptorch.trainingModel(torch.nn.Linear(2, 1), options)
