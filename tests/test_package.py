"""The package as a whole: what it imports, ships, and promises about its own text."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "ipu_log_callback"
MODULES = sorted(PACKAGE.rglob("*.py"))
PROGRAMS = sorted(
    path
    for folder in ("ipu_log_callback", "examples", "tests")
    for path in (REPOSITORY / folder).rglob("*.py")
)
TEXTS = sorted(
    path
    for pattern in ("*.md", "*.toml", "Makefile", "requirements/*", ".ci/*", "docs/**/*.md")
    for path in REPOSITORY.glob(pattern)
)

#: Modules that may know Lightning's two names, and versions.
ABOUT_VERSIONS = {"_compat.py", "emulator/_torch_private.py"}

#: Modules of more than 400 lines, each with the reason.
LONG_MODULES = {
    "doctor/findings.py": "one table: every kind of finding with its texts",
    "emulator/options.py": "every option of `poptorch.Options`, in PopTorch's own grouping",
    "emulator/tracing.py": "one class, the recorder of a step, whose parts share its slots",
}


def _name(path):
    return path.relative_to(PACKAGE).as_posix()


def _relative(path):
    return path.relative_to(REPOSITORY).as_posix()


def test_import_loads_no_part_that_a_run_may_not_need():
    """In a fresh interpreter, the package leaves PopTorch, its emulator and what draws unloaded."""
    program = """
import sys, warnings
warnings.simplefilter("ignore")
try:
    import pytorch_lightning
except ImportError:
    import lightning.pytorch
before = set(sys.modules)
import ipu_log_callback
heavy = {"poptorch", "ipu_log_callback.emulator", "matplotlib", "pandas", "tensorboard"}
sys.exit(", ".join(heavy & (set(sys.modules) - before)) or 0)
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_py_typed_is_shipped():
    """Type checkers read the package's annotations: the marker is there and is package data."""
    assert (PACKAGE / "py.typed").is_file()
    assert 'ipu_log_callback = ["py.typed"]' in (REPOSITORY / "pyproject.toml").read_text()


def test_public_names_are_documented_and_few():
    """At most ten names, each with a docstring."""
    import ipu_log_callback

    assert len(ipu_log_callback.__all__) <= 10
    for name in ipu_log_callback.__all__:
        assert getattr(ipu_log_callback, name).__doc__, name


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_only_compat_knows_versions_and_lightnings_two_names(path):
    """Reading a `__version__`, or importing Lightning by either name, is done in one module."""
    if _name(path) in ABOUT_VERSIONS:
        pytest.skip("this one does")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            assert node.attr != "__version__", f"line {node.lineno}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            tops = {name.split(".")[0] for name in names}
            assert not tops & {"pytorch_lightning", "lightning", "lightning_fabric"}, (
                f"line {node.lineno}"
            )


@pytest.mark.parametrize("path", PROGRAMS, ids=_relative)
def test_syntax_is_that_of_python_3_8(path):
    """Every program can be parsed by the oldest Python that is supported."""
    ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 8))


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_module_fits_a_reader(path):
    """At most 400 lines, or a reason in this file's table."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if _name(path) in LONG_MODULES:
        assert lines > 400, "no reason is needed any more"
    else:
        assert lines <= 400


@pytest.mark.parametrize("path", [*PROGRAMS, *TEXTS], ids=_relative)
def test_text_points_at_nothing_outside_the_repository(path):
    """No absolute path of somebody's computer, and no registry's host, in code or prose."""
    text = path.read_text(encoding="utf-8")
    folders = "tmp|root|home|work|opt|mnt|Users"
    assert not re.findall(rf"(?<![\w.$}}/*])/(?:{folders})/\w+", text)
    assert not re.findall(r"https?://(?:files|download|pypi)\.\w+", text)


def test_changelog_begins_with_this_version():
    """The newest entry of the changelog is the version that pyproject.toml gives."""
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    newest = re.search(r"^## \[([\d.]+)\]", changelog, re.MULTILINE).group(1)
    assert newest == re.search(r'^version = "(.*)"', project, re.MULTILINE).group(1)
