import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler

ELEMENTS = 23


class Numbers(Dataset):
    """Elements 0 to 22, each with its negative."""

    def __len__(self):
        return ELEMENTS

    def __getitem__(self, index):
        return torch.tensor([float(index)]), -torch.tensor(index)


class Stream(IterableDataset):
    """The same numbers, without length or index."""

    def __iter__(self):
        return (Numbers()[index] for index in range(ELEMENTS))


def values(loader):
    """The elements of each batch, after checking that both tensors of a batch belong together."""
    batches = []
    for x, y in loader:
        assert torch.equal(x[:, 0], -y.to(torch.float32))
        batches.append(x[:, 0].int().tolist())
    return batches


@pytest.fixture
def options(poptorch):
    """Options of an execution that takes six micro-batches."""
    chosen = poptorch.Options().deviceIterations(3).replicationFactor(2)
    chosen.Training.gradientAccumulation(1)
    return chosen


def test_a_batch_holds_what_an_execution_takes(poptorch, options):
    """The combined batch size is the micro-batch's times iterations, replicas and accumulation."""
    options.Training.gradientAccumulation(4)
    loader = poptorch.DataLoader(options, range(100), batch_size=2)
    assert loader.combinedBatchSize == 2 * 3 * 2 * 4
    assert [len(batch) for batch in loader] == [48, 48]
    assert len(loader) == 2
    assert loader.options is options


@pytest.mark.parametrize("dataset", [Numbers, Stream])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("mode", ["Sync", "Async", "AsyncRebatched"])
def test_every_mode_gives_the_same_batches(poptorch, options, mode, dataset, drop_last):
    """In each epoch elements come in order, in whole batches; the rest comes last or not."""
    loader = poptorch.DataLoader(
        options, dataset(), drop_last=drop_last, mode=poptorch.DataLoaderMode[mode]
    )
    elements = list(range(ELEMENTS))
    expected = [elements[i : i + 6] for i in range(0, ELEMENTS, 6)]
    if drop_last:
        expected.pop()
    for _ in range(2):
        assert values(loader) == expected
    if dataset is Numbers:
        assert len(loader) == len(expected)
    loader.terminate()


@pytest.mark.parametrize("worker_size", [1, 4, 5, 6])
def test_rebatching_hides_what_workers_load_at_a_time(poptorch, options, worker_size):
    """However many elements are loaded at a time, batches are the execution's."""
    loader = poptorch.DataLoader(
        options,
        Numbers(),
        drop_last=False,
        mode=poptorch.DataLoaderMode.AsyncRebatched,
        rebatched_worker_size=worker_size,
    )
    assert [len(batch) for batch in values(loader)] == [6, 6, 6, 5]


def test_rebatching_loads_no_more_than_a_batch(poptorch, options):
    """Workers cannot load more at a time than an execution takes."""
    with pytest.raises(AssertionError, match=r"\(7\) must be <= to the combined batch size \(6\)"):
        poptorch.DataLoader(
            options,
            Numbers(),
            mode=poptorch.DataLoaderMode.AsyncRebatched,
            rebatched_worker_size=7,
        )


def test_workers_change_nothing(poptorch, options):
    """With worker processes the batches are the same, and the workers stay by default."""
    loader = poptorch.DataLoader(options, Numbers(), num_workers=1)
    assert loader.persistent_workers
    assert values(loader) == values(poptorch.DataLoader(options, Numbers()))


def test_an_iteration_that_was_broken_off_starts_anew(poptorch, options):
    """A new epoch of an asynchronous loader begins with the first element."""
    loader = poptorch.DataLoader(options, Numbers(), mode=poptorch.DataLoaderMode.Async)
    next(iter(loader))
    assert values(loader)[0][0] == 0


def test_shuffled_elements_come_once_each(poptorch, options):
    """Shuffling changes the order and nothing else."""
    torch.manual_seed(0)
    loader = poptorch.DataLoader(options, Numbers(), shuffle=True, drop_last=False)
    drawn = [element for batch in values(loader) for element in batch]
    assert sorted(drawn) == list(range(ELEMENTS))
    assert drawn != sorted(drawn)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("mode", ["Sync", "Async"])
def test_a_batch_sampler_draws_micro_batches(poptorch, options, mode, drop_last):
    """The micro-batches of one's own sampler are joined to batches of an execution."""
    sampler = BatchSampler(range(ELEMENTS), batch_size=2, drop_last=True)
    loader = poptorch.DataLoader(
        options,
        Numbers(),
        batch_sampler=sampler,
        drop_last=drop_last,
        mode=poptorch.DataLoaderMode[mode],
    )
    expected = [list(range(12)), list(range(12, 22))]
    assert values(loader) == (expected[:1] if drop_last else expected)


def test_a_batch_sampler_excludes_batch_size_and_shuffle(poptorch, options):
    """Two ways to say how batches are drawn contradict each other."""
    sampler = BatchSampler(RandomSampler(Numbers()), batch_size=2, drop_last=True)
    for other in ({"batch_size": 2}, {"shuffle": True}):
        with pytest.raises(poptorch.Error, match="mutually exclusive with batch_size, shuffle"):
            poptorch.DataLoader(options, Numbers(), batch_sampler=sampler, **other)


@pytest.mark.parametrize("mode", ["Sync", "Async", "AsyncRebatched"])
@pytest.mark.parametrize("collate", [lambda x: {"x": x}, lambda x: x], ids=["dictionary", "tensor"])
def test_a_batch_keeps_its_kind(poptorch, options, mode, collate):
    """Dictionaries and single tensors come back as such from every mode."""
    dataset = [collate(torch.tensor(float(index))) for index in range(12)]
    loader = poptorch.DataLoader(options, dataset, mode=poptorch.DataLoaderMode[mode])
    expected = [collate(torch.arange(0.0, 6.0)), collate(torch.arange(6.0, 12.0))]
    assert str(list(loader)) == str(expected)


def test_an_asynchronous_batch_is_flat(poptorch, options):
    """The accessor carries flat batches of tensors only, as on hardware."""
    nested = [(torch.zeros(1), {"y": torch.zeros(1)})] * 6
    loader = poptorch.DataLoader(options, nested, mode=poptorch.DataLoaderMode.Async)
    with pytest.raises(AssertionError, match="Tensor at index 1 is not a torch tensor"):
        list(loader)


def test_elements_as_they_are(poptorch, options):
    """Without a batch size the elements are not batched."""
    loader = poptorch.DataLoader(options, Numbers(), batch_size=None, drop_last=False)
    x, _ = next(iter(loader))
    assert x.shape == (1,)
    assert loader.combinedBatchSize is None


@pytest.mark.parametrize("drop_last", [True, False])
def test_processes_share_the_data_set(poptorch, drop_last):
    """Each process has a part of its own; together they have all, or as many whole batches each."""
    parts = []
    for process in range(3):
        options = poptorch.Options().deviceIterations(2)
        options.Distributed.configureProcessId(process, 3)
        parts.append(values(poptorch.DataLoader(options, Numbers(), drop_last=drop_last)))
    seen = [element for part in parts for batch in part for element in batch]
    assert seen == list(range(18 if drop_last else ELEMENTS))
    if drop_last:
        assert [len(part) for part in parts] == [3, 3, 3]


def test_processes_shuffle_alike(poptorch):
    """With one seed all processes draw one order, a new one each epoch: no element comes twice."""
    loaders = []
    for process in range(2):
        options = poptorch.Options().randomSeed(5)
        options.Distributed.configureProcessId(process, 2)
        loaders.append(poptorch.DataLoader(options, Numbers(), shuffle=True))
    epochs = []
    for _ in range(2):
        drawn = [element for loader in loaders for batch in values(loader) for element in batch]
        assert len(set(drawn)) == len(drawn) == 22
        epochs.append(drawn)
    assert epochs[0] != epochs[1]


def test_processes_need_a_common_seed_to_shuffle(poptorch):
    """Without it each process would draw an order of its own."""
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    with pytest.raises(AssertionError, match=r"Options\.randomSeed\(\)"):
        poptorch.DataLoader(options, Numbers(), shuffle=True)


def test_a_stream_cannot_be_shared_out(poptorch):
    """An iterable data set has no parts to give to processes."""
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    with pytest.raises(AssertionError, match="not supported for IterableDataset"):
        poptorch.DataLoader(options, Stream())


def test_an_incomplete_last_batch_is_announced(poptorch, options, caplog):
    """Keeping it is allowed, but the device will not take it."""
    poptorch.DataLoader(options, Numbers(), drop_last=True)
    assert not caplog.records
    poptorch.DataLoader(options, Numbers(), drop_last=False)
    assert "5 elements of the data set are left over" in caplog.text


def test_a_batch_sampler_is_its_processes_own(poptorch):
    """What several processes draw by it cannot be shared out automatically as well."""
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    sampler = BatchSampler(range(20), 2, drop_last=True)
    with pytest.raises(poptorch.Error, match="exclusive with auto_distributed_partitioning=True"):
        poptorch.DataLoader(options, Numbers(), batch_sampler=sampler)


def test_a_batch_sampler_need_not_know_its_length(poptorch, options, caplog):
    """One that says so is drawn from all the same; what is left over is then not known."""

    class Endless(torch.utils.data.Sampler):
        def __init__(self):
            pass

        def __iter__(self):
            return iter(range(20))

        def __len__(self):
            raise NotImplementedError

    known, unknown = (
        poptorch.DataLoader(
            options,
            Numbers(),
            batch_sampler=BatchSampler(sampler, batch_size=2, drop_last=True),
            drop_last=False,
        )
        for sampler in (range(20), Endless())
    )
    assert values(unknown) == values(known)
    told = [record.message for record in caplog.records]
    assert any("drop_last=False and 4 micro-batches" in text for text in told)
    assert any("an unknown number of micro-batches" in text for text in told)


def test_a_loader_has_one_accessor(poptorch, options):
    """An asynchronous loader cannot be wrapped again, a synchronous one can."""
    busy = poptorch.DataLoader(options, Numbers(), mode=poptorch.DataLoaderMode.Async)
    with pytest.raises(poptorch.Error, match="already uses an AsynchronousDataAccessor"):
        poptorch.AsynchronousDataAccessor(busy)
    accessor = poptorch.AsynchronousDataAccessor(poptorch.DataLoader(options, Numbers()))
    assert values(accessor) == values(busy)
    assert len(accessor) == 3


def test_an_accessor_takes_any_loader_and_returns_whole_batches(poptorch, options):
    """PyTorch's own as well; a loader that keeps its incomplete last batch needs a size.

    PopTorch 3.4 `__init__.py`, `AsynchronousDataAccessor`.
    """
    plain = torch.utils.data.DataLoader(Numbers(), batch_size=4, drop_last=True)
    assert values(poptorch.AsynchronousDataAccessor(plain)) == values(plain)
    with pytest.raises(AssertionError, match="only works if 'rebatched_size' is specified"):
        poptorch.AsynchronousDataAccessor(poptorch.DataLoader(options, Numbers(), drop_last=False))


def test_workers_repeat_a_stream(poptorch, options, caplog):
    """Each worker would go through all of it, which is said unless one's own start avoids it."""
    poptorch.DataLoader(options, Stream(), num_workers=2, worker_init_fn=print)
    assert not caplog.records
    poptorch.DataLoader(options, Stream(), num_workers=2)
    assert "2 workers and no worker_init_fn" in caplog.text


def test_an_accessor_can_rebatch(poptorch, options):
    """A loader of single elements can be put together later."""
    loader = poptorch.DataLoader(poptorch.Options(), Numbers())
    accessor = poptorch.AsynchronousDataAccessor(loader, rebatched_size=10)
    assert [len(batch) for batch in values(accessor)] == [10, 10]
    assert len(accessor) == 2
    with pytest.raises(AssertionError, match="must be None or greater than 1"):
        poptorch.AsynchronousDataAccessor(loader, rebatched_size=1)


def test_a_model_takes_a_loaders_batches(poptorch, options):
    """One batch of the loader is one execution of the model."""
    model = poptorch.inferenceModel(torch.nn.Identity(), options)
    for x, _ in poptorch.DataLoader(options, Numbers()):
        assert torch.equal(model(x), x)
