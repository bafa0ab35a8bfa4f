"""After a failure anywhere, everything is as it was, and the next run is right."""

import linecache
import traceback
import warnings
from contextlib import nullcontext
from functools import partial

import pytest

from ipu_log_callback import IPULogCallback, IPULogWarning

from .failures import (
    KINDS,
    Fuse,
    LineFuse,
    callback_hooks,
    callback_with,
    interruptible,
    is_with,
    module_hooks,
    module_with,
    own_points,
    reached_lines,
)
from .runs import FULL, PROGRAMS, Net, loader, numbers_of, run, trainer
from .snapshot import differences, leftovers, snapshot


def product(points):
    """Points x kinds x programs: all of it on demand, each point with one of each every day."""
    if FULL:
        return [
            (point, kind, program) for point in points for kind in KINDS for program in PROGRAMS
        ]
    sampled = []
    for number, point in enumerate(points):
        able = [p for p in PROGRAMS if reaches(p, str(point))] or PROGRAMS
        sampled.append((point, KINDS[number % 3], able[number // 3 % len(able)]))
    return sampled


def reaches(program, point):
    """Whether a program may come to a point, judged by its name."""
    fits = ("train", "fit", "zero_grad", "backward", "optimizer", "lr_scheduler")
    if program != "fit" and any(part in point for part in fits):
        return False
    if "validation" in point or "val_" in point:
        return program != "test"
    return program == "test" or "test" not in point


def identity(value):
    """How a part of a test's name is told."""
    return getattr(value, "__name__", str(value))


@pytest.fixture(scope="module")
def right():
    """What each program logs where nothing fails."""
    numbers = {}
    for program in PROGRAMS:
        made = trainer([IPULogCallback("*")])
        run(made, program, Net())
        numbers[program] = numbers_of(made)
        assert len(numbers[program]) > 6
    return numbers


def check_failure(module, callbacks, fuse, program, right, armed=None):
    """Run into a failure, then look at what is left, then run again."""
    callback = IPULogCallback("*", history=True)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    made = trainer([*callbacks, callback])
    before = snapshot(made, module)
    caught = None
    with armed or nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run(made, program, module)
        except BaseException as error:  # noqa: BLE001 - judged below
            caught = error
    if fuse.blown and not (caught is None and isinstance(fuse.error, KeyboardInterrupt)):
        assert caught is fuse.error
        assert caught.args == ("raised on purpose",)
        assert caught.__cause__ is None
        frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.__traceback__)]
        assert any(name.startswith("raising_") for name in frames)
    elif not fuse.blown:
        # Lightning refuses some hooks on IPUs
        assert caught is None or "is not supported with IPUs" in str(caught)
    assert differences(before, snapshot(made, module)) == []
    assert leftovers(made, module) == []
    assert callback._runs == {}
    if caught is not None and caught is not fuse.error:
        return False  # a hook that Lightning refuses stays refused

    module.load_state_dict(weights)
    for metric in module.modules():
        if hasattr(metric, "reset"):
            metric.reset()
    again = trainer([callback])
    run(again, program, module)
    assert numbers_of(again) == pytest.approx(right[program], nan_ok=True)
    assert differences(before_of(before, again, module), snapshot(again, module)) == []
    return fuse.blown


def test_a_device_that_cannot_be_released_masks_nothing():
    """The user's own exception is what is raised; the device's is told."""

    class Fails(Net):
        def on_train_batch_end(self, *_):
            executor = next(iter(self.trainer.strategy.poptorch_models.values()))
            executor.destroy = partial(failing_destroy, executor)
            raise ValueError("the user's own")

    def failing_destroy(executor):
        del executor.destroy  # Lightning's own attempt, later, succeeds
        raise RuntimeError("the device is gone")

    made = trainer([IPULogCallback("*")])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="the user's own"):
            made.fit(Fails(), loader(2, 4))
    (text,) = (str(each.message) for each in told if each.category is IPULogWarning)
    assert "could not be released after an exception: the device is gone" in text


def before_of(before, trainer, module):
    """The first snapshot, with what belongs to another trainer taken from it."""
    now = snapshot(trainer, module)
    return {
        place: now.get(place, value) if place[0] in ("trainer", "strategy") else value
        for place, value in before.items()
    }


@pytest.mark.parametrize(("hook", "kind", "program"), product(callback_hooks()), ids=identity)
def test_a_failing_hook_of_a_callback_leaves_nothing_behind(hook, kind, program, right):
    """Whichever hook raises, and whatever it raises."""
    fuse = Fuse(kind)
    check_failure(Net(), [callback_with(hook, fuse)], fuse, program, right)


@pytest.mark.parametrize(("hook", "kind", "program"), product(module_hooks()), ids=identity)
def test_a_failing_hook_of_the_module_leaves_nothing_behind(hook, kind, program, right):
    """Whichever hook or step raises, and whatever it raises."""
    fuse = Fuse(kind)
    module = module_with(hook, fuse)
    check_failure(module, [], fuse, program, right)


@pytest.mark.parametrize(("point", "kind", "program"), product(own_points()), ids=identity)
def test_a_failure_on_the_callbacks_own_way_leaves_nothing_behind(point, kind, program, right):
    """Before and after each function between the selection and the teardown."""
    fuse = Fuse(kind)
    fuse._left = point.at
    check_failure(Net(), [], fuse, program, right, armed=point.armed(fuse))


#: Lines at which an interrupt once left something behind.
FOUND = {"if other is not None:"}  # a run was entered, and no other thread's any more


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_interrupt_at_any_line_leaves_nothing_behind(program, right):
    """Ctrl-C does not wait for the end of a function: each line of this package is a point."""
    reached, wrong = {}, []
    made = trainer([IPULogCallback("*", history=True)])
    with reached_lines(reached):
        run(made, program, Net())
    lines = interruptible(reached)
    assert len(lines) > 300
    if not FULL:
        found = [line for line in lines if linecache.getline(*line).strip() in FOUND]
        assert len(found) >= len(FOUND)
        lines = [*lines[::51], *found]
    for number, line in enumerate(lines):
        at = 1 if is_with(line) else 1 + number % 3 // 2
        fuse = LineFuse((KeyboardInterrupt, SystemExit)[number % 2], line, at)
        try:
            blown = check_failure(Net(), [], fuse, program, right, armed=fuse.armed())
            assert blown or at > 1
        except Exception as error:  # noqa: BLE001 - all are told at the end
            wrong.append(f"{line[0].rpartition('/')[2]}:{line[1]} {error!r}"[:600])
    assert not wrong, "\n".join(wrong)
