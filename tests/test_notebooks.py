"""Every notebook runs from a fresh kernel, as a reader would run it, and says what it promises."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EVERY_NOTEBOOK = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


@EVERY_NOTEBOOK
def test_a_notebook_is_kept_without_outputs(path):
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, f"clear the outputs of {path.name}."


@pytest.mark.slow
@EVERY_NOTEBOOK
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    notebook = nbformat.read(path, as_version=4)
    # NPROC, JAX_PLATFORMS and the compilation cache are in the environment (conftest), which the kernel inherits.
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    texts = {cell.id: printed(cell) for cell in notebook.cells if cell.cell_type == "code"}
    assert "token ids equal: True" in texts["equal"]
    difference = re.search(r"largest logprob difference: (\S+)", texts["equal"])
    assert difference is not None and float(difference[1]) < 1e-4
