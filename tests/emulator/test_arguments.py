import pytest
import torch


class Sum(torch.nn.Module):
    def forward(self, a, b=None, *rest, scale=1.0, **named):
        out = a * scale
        for value in (b, *rest, *named.values()):
            if value is not None:
                out = out + value
        return out


class Two(torch.nn.Module):
    def forward(self, pair, scale=2):
        return pair[0] * scale + pair[1]


ONE = torch.ones(2)


def test_arguments_bind_like_a_call(poptorch):
    """Positional, named, variadic and default arguments reach `forward` as in plain Python.

    PopTorch 3.4 `_args_parser.py`.
    """
    for args, kwargs in [
        ((ONE,), {}),
        ((ONE, ONE, ONE), {"scale": 3.0}),
        ((ONE,), {"b": ONE, "c": ONE}),
    ]:
        assert torch.equal(poptorch.inferenceModel(Sum())(*args, **kwargs), Sum()(*args, **kwargs))


class Open(torch.nn.Module):
    def forward(self, *parts, **named):
        return sum(parts) + sum(named["d"].values())


FIRST_CALLS = {
    Two: lambda m: m((ONE, ONE)),
    Open: lambda m: m(ONE, ONE, d={"a": ONE, "b": ONE}),
}

MISTAKES = {
    "shape": (
        Two,
        lambda m: m((ONE, torch.ones(3))),
        r"Shape mismatch for pair\[1\]: expected torch.Size\(\[2\]\)",
    ),
    "dtype": (
        Two,
        lambda m: m((ONE, ONE.int())),
        r"Data type mismatch for pair\[1\]: expected torch.float32",
    ),
    "length": (
        Two,
        lambda m: m((ONE, ONE, ONE)),
        "Length mismatch for pair: expected 2 elements but got 3",
    ),
    "type": (Two, lambda m: m({"a": ONE}), "Type mismatch for pair"),
    "value": (Two, lambda m: m((ONE, ONE), 5), "Value mismatch for scale: expected 2 but got 5"),
    "count": (
        Open,
        lambda m: m(ONE, ONE, ONE, d={"a": ONE, "b": ONE}),
        "Number of positional arguments mismatch: expected 2 arguments but got 3",
    ),
    "missing name": (
        Open,
        lambda m: m(ONE, ONE),
        "Keys mismatch for named arguments: Missing arguments: d",
    ),
    "further name": (
        Open,
        lambda m: m(ONE, ONE, d={"a": ONE, "b": ONE}, e=ONE),
        "Keys mismatch for named arguments: Unexpected arguments: e",
    ),
    "keys": (
        Open,
        lambda m: m(ONE, ONE, d={"a": ONE, "c": ONE}),
        "Keys mismatch for d: Unexpected arguments: c. Missing arguments: b",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_later_calls_must_be_alike(poptorch, name):
    """Shapes, types, lengths, names, keys and compiled-in values are fixed until ``destroy``.

    PopTorch 3.4 `validateInputs`.
    """
    kind, mistake, text = MISTAKES[name]
    model = poptorch.inferenceModel(kind())
    assert torch.equal(FIRST_CALLS[kind](model), FIRST_CALLS[kind](kind()))
    with pytest.raises(poptorch.Error, match=text):
        mistake(model)
    with pytest.raises(poptorch.Error, match="call destroy\\(\\)"):
        mistake(model)


def test_destroy_allows_other_arguments(poptorch):
    """A new compilation takes new shapes."""
    model = poptorch.inferenceModel(Two())
    model((ONE, ONE))
    model.destroy()
    assert model((torch.ones(3), torch.ones(3))).shape == (3,)
    assert model.counters.compiles == 2


def test_wrong_calls(poptorch):
    """Too many, unknown, doubled and missing arguments.

    PopTorch 3.4 `_args_parser.py`.
    """
    model = poptorch.inferenceModel(Two())
    for args, kwargs, text in [
        ((ONE, 1, 2), {}, "Too many arguments"),
        ((ONE,), {"other": 1}, "other is not a valid parameter"),
        ((ONE,), {"pair": 1}, "passed more than once"),
    ]:
        with pytest.raises(AssertionError, match=text):
            model(*args, **kwargs)
    with pytest.raises(poptorch.Error, match="Mandatory parameter pair missing"):
        model()
    with pytest.raises(TypeError, match=r"Expected a torch\.nn\.Module or a callable"):
        poptorch.inferenceModel(3)


def test_custom_types_need_a_parser(poptorch):
    """A registered parser lets an object of a user's own type carry tensors in and out.

    PopTorch 3.4 `inputs_test.py`.
    """

    class Batch:
        def __init__(self, x):
            self.x = x

    class Parser(poptorch.ICustomArgParser):
        def yieldTensors(self, struct):
            yield struct.x

        def reconstruct(self, original_structure, tensor_iterator):
            return Batch(next(tensor_iterator))

    class Double(torch.nn.Module):
        def forward(self, batch):
            return Batch(batch.x * 2)

    poptorch.registerCustomArgParser(Batch, Parser())
    try:
        out = poptorch.inferenceModel(Double(), poptorch.Options().deviceIterations(2))(
            Batch(torch.ones(4))
        )
    finally:
        poptorch.registerCustomArgParser(Batch, None)
    assert isinstance(out, Batch)
    assert torch.equal(out.x, 2 * torch.ones(4))
    with pytest.raises(poptorch.Error, match="must inherit from ICustomArgParser"):
        poptorch.registerCustomArgParser(Batch, object())


def test_an_input_written_to_comes_back(poptorch):
    """A step that writes to an input changes the caller's tensor.

    PopTorch 3.4 `PoplarExecutable.cpp`.
    """

    class Write(torch.nn.Module):
        def forward(self, x):
            x.add_(1)
            return x * 2

    x = torch.zeros(2)
    out = poptorch.inferenceModel(Write())(x)
    assert torch.equal(out, torch.full((2,), 2.0))
    assert torch.equal(x, ONE)


def test_non_contiguous_inputs(poptorch, caplog):
    """They are converted, with one warning.

    PopTorch 3.4 `_args_parser.py`.
    """
    x = torch.arange(4.0).reshape(2, 2).T
    model = poptorch.inferenceModel(Sum())
    assert torch.equal(model(x), x)
    assert torch.equal(model(x * 2), x * 2)
    assert caplog.text.count("non-contiguous tensors will be converted") == 1
