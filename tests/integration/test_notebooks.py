"""The notebooks, run from the first cell to the last without a GPU and a network."""

import json
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

from diffusion.config.loading import load_config, to_yaml
from tests.tools.training_runs import ROOT

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NO_NETWORK = """
import os, socket, sys
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")

def refuse(event, arguments, unix=socket.AF_UNIX):
    if event == "socket.connect" and arguments[0].family != unix and arguments[1][0] != "127.0.0.1":
        raise RuntimeError(f"a notebook connects to {arguments[1]}")
    if event == "socket.getaddrinfo" and arguments[0] not in ("localhost", "127.0.0.1"):
        raise RuntimeError(f"a notebook looks up {arguments[0]}")

sys.addaudithook(refuse)
"""


def read(path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def with_values(notebook: NotebookNode, values: dict) -> list[NotebookNode]:
    """The cells of a notebook, some values of its cell of parameters replaced."""
    cells: list[NotebookNode] = []
    for cell in notebook.cells:
        cells.append(cell)
        if "parameters" in cell.metadata.get("tags", []):
            known = {line.split(" = ")[0] for line in cell.source.splitlines()}
            replaced = {name: value for name, value in values.items() if name in known}
            cells.append(new_code_cell("\n".join(f"{name} = {value!r}" for name, value in replaced.items())))
    assert len(cells) == len(notebook.cells) + 1
    return cells


def outputs_after(cells: list[NotebookNode], text: str) -> list[NotebookNode]:
    """Outputs of the one cell that holds a text."""
    (cell,) = [cell for cell in cells if cell.cell_type == "code" and text in cell.source]
    return cell.outputs


def shows_image(outputs: list[NotebookNode]) -> bool:
    return any("image/png" in output.get("data", {}) for output in outputs)


def value_of(outputs: list[NotebookNode]):
    """The value that a cell ends with."""
    (output,) = [output for output in outputs if output.output_type == "execute_result"]
    return eval(output.data["text/plain"])


def run_notebook(notebook: NotebookNode, working_directory: Path) -> None:
    """Run all cells.

    The kernel listens on sockets in a folder of its own: TCP ports are chosen seconds before they are bound, when
    another program may have them.
    """
    with tempfile.TemporaryDirectory() as folder:  # Its path is short: that of a socket may have 107 characters.
        kernel = AsyncKernelManager(
            kernel_name="python3", transport="ipc", connection_file=str(Path(folder, "kernel.json"))
        )
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=1500,
            startup_timeout=600,
            iopub_timeout=300,
            raise_on_iopub_timeout=True,
            resources={"metadata": {"path": str(working_directory)}},
        )
        client.execute(cleanup_kc=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_lies_in_the_repository_has_no_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_the_notebooks_run_and_show_what_they_say(tmp_path, server, shapes):
    """With their own paths, from a folder beside `runs`."""
    (tmp_path / "notebooks").mkdir()
    runs = [tmp_path / "first", tmp_path / "runs/demo/modern_64"]
    common = ["trainer.max_duration=4ba"]
    server.train(
        1,
        [
            (str(ROOT / "tests/tools/toy.yaml"), [f"output_folder={run}", f"optimizer.lr={lr}", *common])
            for run, lr in zip(runs, (0.001, 0.002), strict=True)
        ],
    )
    (tmp_path / "runs/demo/prepared").symlink_to(shapes / "prepared")
    values = {"RUNS": ["../first", "../runs/demo/modern_64"], "NUM_STEPS": 2}
    # One kernel for all, which imports once; each notebook begins without the names of those before.
    cells = [new_code_cell(NO_NETWORK)]
    for path in NOTEBOOKS:
        cells += [new_code_cell("%reset -f"), *with_values(read(path), values)]
    notebook = new_notebook(cells=cells)
    run_notebook(notebook, tmp_path / "notebooks")

    manifest = json.loads((shapes / "prepared" / "manifest.json").read_text())
    counted = value_of(outputs_after(notebook.cells, '"kept by source"'))
    assert counted["kept"] == manifest["kept"] == sum(counted["kept by source"].values())
    assert shows_image(outputs_after(notebook.cells, "axis.hist("))
    assert shows_image(outputs_after(notebook.cells, "axis.imshow("))
    parameters = value_of(outputs_after(notebook.cells, "count_parameters("))
    assert parameters["stable_diffusion_2"]["network"] == 865_910_724
    (difference,) = value_of(outputs_after(notebook.cells, "largest difference")).values()
    assert difference < 0.01
    assert shows_image(outputs_after(notebook.cells, "pairs = "))
    summary = value_of(outputs_after(notebook.cells, '"loss at the end"'))
    assert {run["steps"] for run in summary.values()} == {"4 of 4"}
    assert list(summary) == values["RUNS"]
    differing = value_of(outputs_after(notebook.cells, "config_text.splitlines()"))
    assert any("0.002" in line for line in differing[values["RUNS"][1]])
    assert value_of(outputs_after(notebook.cells, "find_checkpoints(")) == {"steps": [2, 4]}
    assert shows_image(outputs_after(notebook.cells, "load_model(checkpoint)"))


def test_a_run_that_has_just_begun_is_shown(tmp_path):
    config = load_config(str(ROOT / "tests/tools/toy.yaml"), [f"trainer.checkpoint_folder={tmp_path / 'elsewhere'}"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    shown: dict[str, Any] = {}
    for cell in with_values(read(ROOT / "notebooks" / "runs.ipynb"), {"RUNS": [str(tmp_path)]}):
        if cell.cell_type == "code":
            exec(cell.source, shown)
    assert shown["rows"] == []
