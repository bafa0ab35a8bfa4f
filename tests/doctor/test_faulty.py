"""The doctor on modules that behave differently once compiled, one fault or kind of fault each."""

import inspect
import re

import pytest
import torch

from ipu_log_callback import doctor

from . import faulty_modules
from .faulty_modules import (
    FAULTY,
    FollowsOnHost,
    FreezesInPart,
    InHelpers,
    Sharpened,
    Submodule,
    follow,
    normalised,
)

SOURCE = faulty_modules.__file__
#: What else of the file a module runs.
ALSO = {
    InHelpers: (Submodule, normalised),
    FreezesInPart: (Sharpened,),
    FollowsOnHost: (follow,),
}


def expected_in(*objects):
    """What the comments in the source of some objects announce: kind, line, whether it fails."""
    expected = set()
    for thing in objects:
        lines, first = inspect.getsourcelines(thing)
        for number, line in enumerate(lines, first):
            for weight, kinds in re.findall(r"# (finds|remarks): ([\w\-, ]+)", line):
                for kind in kinds.split(","):
                    expected.add((kind.strip(), number, weight == "finds"))
    return expected


@pytest.mark.parametrize("module_class", FAULTY, ids=lambda cls: cls.__name__)
def test_each_fault_is_found_at_its_line_and_no_other(module_class):
    """Every announced line gives its finding with its weight; no other line gives any."""
    batch = [torch.randn(4, 8), torch.tensor([0, 1, 2, 1])]
    diagnosis = doctor.check(module_class(), batch)
    found = {(f.kind, f.site.line, f.fails) for f in diagnosis.findings}
    assert found == expected_in(module_class, *ALSO.get(module_class, ()))
    assert {f.site.file for f in diagnosis.findings} == {SOURCE}
    assert diagnosis.exit_code == int(any(fails for _, _, fails in found))
