"""Mutation testing: is there a test that fails when a line is wrong?

`python -m tests.mutants` changes one expression at a time in the modules that carry `self.log`
across compilation, and runs the tests that reach the line until one fails. Every change that no
test notices is printed, and kept with the others in `.mutants/`. A first run gives each the
quickest of its tests; `--again --seconds 30` tries those that survived with more of them.
A run that was interrupted goes on where it was; without `.mutants/` it starts anew.

Importing torch and collecting the tests takes longer than the tests themselves. Both are done once:
pytest stops before its first test, and each mutant is a fork of that process, in which the module's
functions are replaced where they stand. No file is changed.
"""

import argparse
import difflib
import gc
import itertools
import json
import os
import random
import resource
import signal
import sys
import time
import types
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

import coverage
import libcst as cst
import pytest
from libcst import matchers
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

PACKAGE = "ipu_log_callback"
MODULES = ("capture", "wire", "geometry", "replay")
#: What the modules' behaviour shows in; the rest runs in processes of its own, or elsewhere.
TESTS = (
    *("tests/test_capture.py", "tests/test_wire.py", "tests/test_geometry.py"),
    "tests/test_replay.py",
    *("tests/test_metric_replay.py", "tests/test_messages.py", "tests/parity"),
    *("tests/robustness", "tests/inspection", "tests/shown", "tests/eras"),
    "tests/processes/test_refusals.py",
)
#: Where the first of several tests provokes the error that they all look at.
PROVOKED_ONCE = "tests/test_messages.py"
LEFT_OUT = ("test_load", "test_notebook", "test_security", "test_cli")

KEPT = Path(".mutants")


class Mutant(NamedTuple):
    """One change to one module."""

    module: str
    line: int
    source: str
    difference: str

    @property
    def key(self) -> str:
        """The change in words, whatever moves above it."""
        return f"{self.module}\n{self.difference}"


# -- mutants ----------------------------------------------------------------------------------


def _nothing_returned(node: Any) -> Iterator[cst.CSTNode]:
    if node.value is not None and not matchers.matches(node.value, matchers.Name("None")):
        yield node.with_changes(value=cst.Name("None"))


def _another_string(node: Any) -> Iterator[cst.CSTNode]:
    # one is enough: its other spellings fail the same tests
    yield from itertools.islice(mutators.operator_string(node), 1)


OPERATORS: List[Tuple[type, Callable[[Any], Any]]] = [
    *(each for each in mutators.mutation_operators if each[1] is not mutators.operator_string),
    (cst.BaseString, _another_string),
    (cst.Return, _nothing_returned),
]


# What a module exports is for readers and linters.
_ALL = matchers.Assign(targets=[matchers.AssignTarget(target=matchers.Name("__all__"))])


class _Sites(cst.CSTVisitor):
    """Collects what can be changed: the node's range, and what to write in its place."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: List[Tuple[Any, str]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.Annotation, cst.Decorator)):
            return False
        if isinstance(node, cst.Assign) and matchers.matches(node, _ALL):
            return False
        if isinstance(node, cst.If):  # a branch taken always, and never
            self._replace(node.test, cst.Name("True"))
            self._replace(node.test, cst.Name("False"))
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                for other in operator(node):
                    self._replace(node, other)
        return True

    def _replace(self, node: cst.CSTNode, other: cst.CSTNode) -> None:
        text = cst.Module([]).code_for_node(other)
        self.found.append((self.get_metadata(PositionProvider, node), text))


def mutants_of(module: str) -> Iterator[Mutant]:
    """Every mutant of a module of the package."""
    lines = _source(module).splitlines()
    sites = _Sites()
    MetadataWrapper(cst.parse_module(_source(module))).visit(sites)
    seen: Dict[str, int] = Counter()
    for place, text in sites.found:
        start, end = place.start, place.end
        before = lines[start.line - 1 : end.line]
        inner = before[0][: start.column] + text + before[-1][end.column :]
        after = inner.splitlines()
        source = "\n".join([*lines[: start.line - 1], *after, *lines[end.line :]])
        differing = difflib.unified_diff(before, after, n=0, lineterm="")
        difference = "\n".join(each for each in list(differing)[2:] if not each.startswith("@@"))
        seen[difference] += 1
        if seen[difference] > 1:  # the same line a second time
            difference += f"\n({seen[difference]})"
        yield Mutant(module, start.line, source, difference)


def _source(module: str) -> str:
    return Path(PACKAGE, f"{module}.py").read_text()


def put_in_place(mutant: Mutant) -> None:
    """Make the package behave as if its module had been imported from the mutant's source.

    Functions and classes stay the objects that other modules imported; what is in them changes.
    """
    module = import_module(f"{PACKAGE}.{mutant.module}")
    own = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and isinstance(value, (type, types.FunctionType))
    }
    exec(compile(mutant.source, module.__file__, "exec"), vars(module))  # noqa: S102 - our own source
    for name, before in own.items():
        now = vars(module).get(name)
        if isinstance(before, types.FunctionType):
            _become(before, now)
        else:
            for attribute, value in vars(now).items():
                if attribute not in ("__dict__", "__weakref__", "__slots__") and not isinstance(
                    value, types.MemberDescriptorType
                ):
                    setattr(before, attribute, value)
        setattr(module, name, before)


def _become(function: types.FunctionType, other: types.FunctionType) -> None:
    function.__code__ = other.__code__
    function.__defaults__, function.__kwdefaults__ = other.__defaults__, other.__kwdefaults__
    function.__dict__.update(vars(other))
    for cell, theirs in zip(function.__closure__ or (), other.__closure__ or ()):
        cell.cell_contents = theirs.cell_contents


# -- tests ------------------------------------------------------------------------------------


class Reached(NamedTuple):
    """What each test takes, in seconds, and which tests run a line.

    A line is known by its text: editing a module needs no new measurement.
    """

    seconds: Dict[str, float]
    by_text: Dict[str, List[str]]
    failed: List[str]
    imported: List[str]

    def tests_of(self, mutant: Mutant) -> List[str]:
        """Tests that run a mutant's line, the quickest first."""
        tests = list(self.seconds)  # what no test runs by itself is run by the import
        for text in reversed(_source(mutant.module).splitlines()[: mutant.line]):
            # an expression's later lines count with its first
            if self.by_text.get(text.strip()):
                tests = self.by_text[text.strip()]
                break
        return sorted(tests, key=self.seconds.__getitem__)


class Mutation:
    """The pytest plugin: takes the place of the loop over all tests."""

    def __init__(
        self, modules: List[str], again: bool, only: Optional[str], seconds: float
    ) -> None:
        self._modules = modules
        self._seconds = seconds
        self._again = again
        self._only = only
        self._items: Dict[str, Any] = {}
        self._lately: List[str] = []
        self._trusted: Set[str] = set()

    def pytest_sessionstart(self) -> None:
        """After the suite's own profile was loaded, and before decorators read it."""
        from hypothesis import settings  # pytest wants to see its plugins before anyone else

        settings.register_profile(
            "mutants", max_examples=15, deadline=None, derandomize=True, database=None
        )
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try every mutant, each in a fork."""
        self._items = {item.nodeid: item for item in session.items}
        reached = self._reached()
        for name in reached.imported:  # what tests import while they run, every fork would import
            with suppress(Exception):
                import_module(name)
        results = {}
        kept = KEPT / "results.json"
        if kept.exists():
            results = json.loads(kept.read_text())
        mutants = [mutant for module in self._modules for mutant in mutants_of(module)]
        ended = {m.key: results.get(m.key, [None])[0] for m in mutants}
        wanted = "survived" if self._again else None  # what was tried is not tried again
        mutants = [m for m in mutants if ended[m.key] == wanted]
        random.Random(0).shuffle(mutants)  # an interrupted run has seen something of everything
        if self._only:
            mutants = [m for m in mutants if self._only in m.difference]
        print(f"{len(mutants)} mutants, {len(self._items)} tests")
        gc.freeze()  # what is here already need not be looked through in every fork
        for number, mutant in enumerate(mutants, 1):
            names = self._chosen(reached, mutant)
            outcome, test = self._truly_killed_by(session, mutant, names)
            results[mutant.key] = [outcome, test, mutant.line, len(names)]
            kept.write_text(json.dumps(results, indent=1))
            if outcome == "survived":
                where = f"{PACKAGE}/{mutant.module}.py:{mutant.line}"
                print(f"\n{where}: {len(names)} tests\n{mutant.difference}", flush=True)
            elif number % 50 == 0:
                print(f"{number} tried", flush=True)
        print(dict(Counter(outcome for outcome, *_ in results.values())))
        return True

    def _chosen(self, reached: Reached, mutant: Mutant) -> List[str]:
        """The tests of one mutant: those that killed others lately, and then the quickest."""
        names = [name for name in reached.tests_of(mutant) if name in self._items]
        known = reached.seconds.keys() | set(reached.failed)
        new = [name for name in self._items if name not in known] if self._again else []
        spent, quick = 0.0, []
        for name in names:
            spent += reached.seconds[name]
            if spent > self._seconds:
                break
            quick.append(name)
        first = [*new, *(name for name in self._lately if name in names)]
        rest = [name for name in quick if name not in first]
        # a file at a time: its fixtures are made once
        files = list(dict.fromkeys(name.partition("::")[0] for name in rest))
        rest.sort(key=lambda name: files.index(name.partition("::")[0]))
        return first + rest

    def _killed_by(
        self, session: pytest.Session, mutant: Mutant, names: List[str]
    ) -> Tuple[str, Optional[str]]:
        """Run tests over one mutant until one fails: how it ended, and in which test."""
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(here)
            _bounded(seconds=60 + 3 * int(self._seconds))
            try:
                put_in_place(mutant)
            except BaseException as error:  # noqa: BLE001 - whatever a mutant raises on import
                os.write(there, f"import: {error!r}".encode())
                os._exit(1)
            self._run(session, names, lambda name: os.write(there, f"{name}\0".encode()))
            os._exit(bool(session.testsfailed))
        os.close(there)
        with open(here, "rb") as pipe:
            told = pipe.read().decode()
        _, status = os.waitpid(child, 0)
        last = told.rstrip("\0").rpartition("\0")[2] or None
        if os.WIFSIGNALED(status):
            return "stuck", last
        if os.WEXITSTATUS(status) == 0:
            return "survived", None
        if last in self._items:
            self._lately = [last, *(name for name in self._lately if name != last)][:4]
        return "killed", last

    def _truly_killed_by(
        self, session: pytest.Session, mutant: Mutant, names: List[str]
    ) -> Tuple[str, Optional[str]]:
        """As `_killed_by`, without tests that fail over the module as it is, run in this order."""
        outcome, test = self._killed_by(session, mutant, names)
        if outcome == "killed" and test in self._items and test not in self._trusted:
            untouched = mutant._replace(source=_source(mutant.module))
            if self._killed_by(session, untouched, names[: names.index(test) + 1])[0] != "survived":
                print(f"left out from here on: {test}", flush=True)
                del self._items[test]
                remaining = [name for name in names if name != test]
                return self._truly_killed_by(session, mutant, remaining)
            self._trusted.add(test)
        return outcome, test

    def _run(
        self, session: pytest.Session, names: List[str], started: Callable[[str], Any]
    ) -> None:
        """Run tests until one fails, silently."""
        _silence()
        items = [self._items[name] for name in names]
        for item, following in zip(items, [*items[1:], None]):
            started(item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return

    def _reached(self) -> Reached:
        """Which tests run which lines: found once, in a fork, as everything else."""
        kept = KEPT / "reached.json"
        if kept.exists():
            return Reached(*json.loads(kept.read_text()))
        print("finding out which tests run which lines (some minutes)", flush=True)
        KEPT.mkdir(exist_ok=True)
        child = os.fork()
        if child == 0:
            self._measure(kept)
            os._exit(0)
        os.waitpid(child, 0)
        return Reached(*json.loads(kept.read_text()))

    def _measure(self, kept: Path) -> None:
        _silence()
        files = [str(Path(PACKAGE, f"{name}.py").resolve()) for name in MODULES]
        measured = coverage.Coverage(data_file=None, config_file=False, include=files)
        seconds: Dict[str, float] = {}
        items = list(self._items.values())
        measured.start()
        for item, following in zip(items, [*items[1:], None]):
            measured.switch_context(item.nodeid)
            before, failed = time.process_time(), item.session.testsfailed
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if item.session.testsfailed == failed:  # what fails now says nothing of a mutant
                seconds[item.nodeid] = time.process_time() - before
        measured.stop()
        data = measured.get_data()
        by_text: Dict[str, List[str]] = {}
        for file in data.measured_files():
            lines = Path(file).read_text().splitlines()
            for line, names in data.contexts_by_lineno(file).items():
                reaching = by_text.setdefault(lines[line - 1].strip(), [])
                reaching.extend(seconds.keys() & _with_those_that_look_on(names, seconds))
        failed = [name for name in self._items if name not in seconds]
        own = {PACKAGE, "poptorch", *(path.stem for path in Path("tests").iterdir())}
        imported = [name for name in sys.modules if name.partition(".")[0] not in own]
        kept.write_text(json.dumps([seconds, by_text, failed, imported]))


def _with_those_that_look_on(names: Iterable[str], tests: Iterable[str]) -> Set[str]:
    """Names, and the tests that look at what one of them was the first to provoke."""
    found = set(names)
    for name in names:
        case = name.rstrip("]").partition("[")[2]
        if case and name.startswith(PROVOKED_ONCE):
            own = (each for each in tests if each.startswith(PROVOKED_ONCE))
            found.update(each for each in own if f"[{case}" in each)
    return found


def _silence() -> None:
    """Let nothing more that this process tells be seen."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _bounded(seconds: int) -> None:
    """End this process when a mutant made a test endless."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(4 * seconds)


def main() -> int:
    """Run from the repository's root."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(MODULES), metavar="MODULE")
    parser.add_argument("--again", action="store_true", help="what survived, with new tests too")
    parser.add_argument("--seconds", type=float, default=1.5, help="of tests for each mutant")
    parser.add_argument("--only", metavar="TEXT", help="only changes that contain this")
    chosen = parser.parse_args()
    left_out = [f"--ignore-glob=*{name}*" for name in LEFT_OUT]
    return pytest.main(
        ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-s", *left_out, *TESTS],
        plugins=[Mutation(chosen.modules, chosen.again, chosen.only, chosen.seconds)],
    )


if __name__ == "__main__":
    sys.exit(main())
