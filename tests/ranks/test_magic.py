"""The messages about a %%ranks cell that fails: they have its number, and advice that one can type in a cell.
And %%ranks must be known in a kernel that has only imported `helpers`.
"""

import os
from types import SimpleNamespace

import kernels
import pytest

from helpers.ranks import RankError, magic
from three_axes.count.deadlock import Deadlock
from three_axes.files import find


def in_a_shell() -> tuple[str, ...]:
    """The errors of cells that run one after the other, as text."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    from helpers import World

    def run(cell: str) -> str:
        return str(shell.run_cell(cell, store_history=True).error_in_exec)

    with World(2) as world:
        shell.push({"pair": world, "lr": 0.1})
        return (
            run("%%ranks\nx = 1\nx / 0"),
            run("%%ranks\nlr * 2"),
            run("%%ranks --timeout 1\nimport time; time.sleep(9)"),
            *(run(cell) for cell in ("%%ranks --timeout nan\nrank", "%%ranks\n", "%ranks pair")),
            *(
                run(cell)
                for cell in ("%%ranks\ny = 1", "%%ranks\nlr", "%%ranks\nassert y; import os; os._exit(3)")
            ),
            *(run(cell) for cell in ("%%ranks\ny", "%%ranks\nlr")),
        )


@pytest.fixture(scope="module")
def messages(aside):
    return aside(in_a_shell)


def test_the_line_is_in_the_cell_that_shows_its_number(messages):
    assert "Cell In[1], line 3:  x / 0" in messages[0] and "Cell In[2], line 2" in messages[1]


def test_a_name_of_the_notebook_is_pushed(messages):
    assert "pair.push(lr=lr)" in messages[1] and "push" not in messages[0]


def test_ranks_that_are_new_need_the_cells_above(messages):
    good, of_the_notebook, gone, of_a_cell, of_either = messages[6:]
    new = "The ranks are new: run the %%ranks cells above this one again"
    assert good == "None" and new not in of_the_notebook and "The notebook has `lr`" in of_the_notebook
    assert "is gone" in gone and new in of_a_cell and "push" not in of_a_cell
    assert new in of_either and "If no such cell makes `lr`: pair.push(lr=lr)" in of_either


def test_advice_to_give_more_time_is_written_for_a_cell(messages):
    assert "%%ranks --timeout 60" in messages[2]


def test_an_error_with_advice_has_all_that_the_error_had():
    error = RankError("no rank can go on", "deadlock", [1], True, [], Deadlock("cycle", [], [], []))
    made = magic._for_a_cell(error, {}, SimpleNamespace(pids=[1, 2]))
    assert vars(made) == vars(error) and made.deadlock


def test_an_invalid_cell_for_ranks_is_refused_in_a_sentence(messages):
    timeout, empty, line = messages[3:6]
    assert timeout == "timeout=nan: give a positive number of seconds, or None for no limit"
    assert "the cell body is empty" in empty
    assert line == "%%ranks stands alone on the first line of a cell, and the ranks' Python below it"


def test_a_kernel_that_was_restarted_says_which_cells_to_run():
    """A kernel of `three-axes lab`, whose startup file only runs `import helpers`."""
    kernel = kernels.WithoutPorts()
    kernel.start_kernel(env=os.environ | {"PYTHONSTARTUP": str(find("data/jupyterlab/startup.py").resolve())})
    client = kernel.client()
    client.start_channels()

    def run(cell: str) -> str:
        printed = []
        client.execute_interactive(
            cell, timeout=60, output_hook=lambda message: printed.append(message["content"].get("text", ""))
        )
        return "".join(printed)

    try:
        client.wait_for_ready(60)
        assert run("import sys; print('helpers' in sys.modules, 'torch' in sys.modules)") == "True False\n"
        assert "run the notebook's first two cells (again)" in run("%%ranks\nrank")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
