"""Threads and processes beside and under a run."""

import contextlib
import threading

import pytest

from ipu_log_callback import IPULogCallback

from .runs import PROGRAMS, Net, loader, numbers_of, one_run, run, trainer


@pytest.fixture(scope="module")
def right():
    """What each program logs in a run of its own."""
    return {program: numbers_of(one_run(Net(), program=program)) for program in PROGRAMS}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_loader_with_workers(start, right):
    """Workers are processes of their own; the callback does not travel with them."""
    options = {"num_workers": 1, "multiprocessing_context": start}
    made = trainer([IPULogCallback("*")])
    run(made, "fit", Net(), loader(2, 4, **options), loader(2, 2, seed=1, **options))
    assert numbers_of(made) == pytest.approx(right["fit"])


@pytest.mark.parametrize("mode", ["Async", "AsyncRebatched"])
def test_poptorchs_asynchronous_loader(mode, right):
    """Batches that PopTorch's own loader fetches ahead."""
    import poptorch

    made = trainer([IPULogCallback("*")])
    loaders = [
        poptorch.DataLoader(
            options,
            loader(2, count, seed).dataset,
            batch_size=2,
            mode=getattr(poptorch.DataLoaderMode, mode),
        )
        for options, count, seed in (
            (made.strategy.training_opts, 4, 0),
            (made.strategy.inference_opts, 2, 1),
        )
    ]
    try:
        run(made, "fit", Net(), *loaders)
    finally:
        for each in loaders:
            each.terminate()
    assert numbers_of(made) == pytest.approx(right["fit"])


def test_another_thread_logs_and_reads_meanwhile(right):
    """The history and what was captured are read while steps are captured and replayed."""
    callback = IPULogCallback("*", history=True)
    made = trainer([callback])
    stop, faults, reads = threading.Event(), [], []

    other = Net()

    def read_once():
        reads.extend(len(callback.history[key]) for key in list(callback.history))
        str(callback.captured)
        # a module that no trainer has: its own `log` is untouched by the capture
        with contextlib.suppress(UserWarning):  # Lightning's: it has no trainer
            other.log("x", 1.0)

    def read():
        try:
            while not stop.is_set():
                read_once()
        except BaseException as error:  # noqa: BLE001 - told below
            faults.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(3):
            run(made, "test", Net())
    finally:
        stop.set()
        thread.join()
    assert faults == []
    assert reads
    assert numbers_of(made) == pytest.approx(right["test"])


def test_two_trainers_in_two_threads(right):
    """Both are right, or the second is refused in words: never a mixture of the two."""
    start = threading.Barrier(2)
    results = {}
    # made here: their weights come from the one generator of random numbers that threads share
    nets = [Net() for _ in range(2)]

    def work(name):
        try:
            start.wait(10)
            results[name] = numbers_of(one_run(nets[name], program="test"))
        except Exception as error:  # noqa: BLE001 - judged below
            results[name] = error

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, Exception):
            assert "thread" in str(result), result
        else:
            assert result == pytest.approx(right["test"])
    assert any(not isinstance(result, Exception) for result in results.values())
    assert numbers_of(one_run(Net(), program="test")) == pytest.approx(right["test"])
