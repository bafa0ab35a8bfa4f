import base64
import json
import os
import sys
from pathlib import Path

import pytest
from lightning_in_use import pl

EXAMPLES = Path(__file__).parents[2] / "examples"
FIRST = 'keys=["train_loss", "val_*"], history=True'


@pytest.fixture
def make_notebook(monkeypatch):
    """The generator, as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import make_notebook

    yield make_notebook
    sys.modules.pop("make_notebook")


def test_the_notebook_is_made_of_the_script(make_notebook):
    """`notebook.ipynb` is what the generator makes of `notebook.py`."""
    assert make_notebook.main(["--check"]) == 0


def test_a_stale_notebook_is_told(make_notebook, monkeypatch, tmp_path, capsys):
    """A notebook that was not made again fails the check, and making it mends that."""
    monkeypatch.setattr(make_notebook, "NOTEBOOK", tmp_path / "notebook.ipynb")
    assert make_notebook.main(["--check"]) == 1
    assert "make_notebook.py" in capsys.readouterr().out
    assert make_notebook.main([]) == 0
    assert make_notebook.main(["--check"]) == 0


def test_cells_are_the_scripts(make_notebook):
    """Every line of code is in a code cell, every line of text in one of text, in order."""
    script = "# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1\n\n\n# %%\nx\n"
    made = make_notebook.notebook_of(script)
    assert [cell["cell_type"] for cell in made["cells"]] == ["markdown", "code", "code"]
    assert "".join(made["cells"][0]["source"]) == "# Title\n\ntext"
    assert "".join(made["cells"][1]["source"]) == "x = 1"


@pytest.fixture(scope="module")
def executed():
    """The notebook's cells after a run in a kernel of its own."""
    if pl.__name__ != "pytorch_lightning":
        pytest.skip("written for pytorch-lightning with its own IPU strategy")
    nbformat = pytest.importorskip("nbformat", reason="notebooks are executed with nbclient")
    nbclient = pytest.importorskip("nbclient", reason="notebooks are executed with nbclient")
    pytest.importorskip("ipykernel", reason="a notebook needs a kernel")
    pytest.importorskip("matplotlib", reason="the notebook draws")
    pytest.importorskip("pandas", reason="the notebook shows a table of pandas")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
    client.execute(cwd=str(EXAMPLES), env={**os.environ, "PYTHONPATH": path})
    folder = os.environ.get("IPU_LOG_PICTURES")
    for number, picture in enumerate(_pictures(notebook)) if folder else ():
        (Path(folder) / f"notebook-{number}.png").write_bytes(picture)
    return notebook


def _pictures(notebook):
    found = [
        output["data"]["image/png"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    return [base64.b64decode(picture) for picture in found]


def _outputs(notebook, source):
    """Outputs of the cell whose last lines these are."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (found,) = [cell for cell in code if f"\n{cell.source}".endswith(f"\n{source}")]
    return found.outputs


def test_it_runs_from_a_clean_kernel_and_draws(executed):
    """Every cell runs; each of the three pictures is shown once."""
    pictures = _pictures(executed)
    assert len(pictures) == 3
    assert all(len(picture) > 10_000 for picture in pictures)


def test_it_shows_what_was_captured_and_what_it_costs(executed):
    """The callback and the cost are shown as tables, with the same said in text."""
    (captured,) = _outputs(executed, "callback")
    assert "self.accuracy.update" in captured["data"]["text/html"]
    (cost,) = _outputs(executed, "callback.cost")
    assert "<table" in cost["data"]["text/html"]


def test_it_warns_of_what_was_not_selected(executed):
    """The first run's warning names the key that the second one logs."""
    outputs = _outputs(executed, f"callback = IPULogCallback({FIRST})\nmodel = fit(callback)")
    assert "train_sure" in json.dumps(outputs)
