"""A kernel as VS Code uses it: silent calls between the cells, no answers to widgets, and a stop button that
sends a message. VS Code itself does not run here.
"""

import sys
import threading
import time

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from kernels import WithoutPorts

from helpers.practice.books import notebooks

pytestmark = pytest.mark.slow

QUIET = {"silent": True, "store_history": False, "stop_on_error": False}  # as between the cells
VARIABLES = "import json as _json\n_json.dumps([name for name in globals() if not name.startswith('_')])"


class Manager(WithoutPorts):
    """Starts a kernel from the specification that VS Code writes: it is interrupted by a message."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="VS Code's", language="python", interrupt_mode="message")


@pytest.fixture
def client(tmp_path):
    manager = Manager()
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    yield client
    client.stop_channels()
    manager.shutdown_kernel()


def run(client, code: str, **how) -> tuple[dict, list[dict]]:
    """The kernel's reply to a cell, and the messages that the kernel sent before the reply."""
    sent = []
    asked = lambda message: pytest.fail(f"asked for input: {message}")
    hooks = dict(allow_stdin=True, stdin_hook=asked, output_hook=sent.append)
    reply = client.execute_interactive(code, timeout=300, **hooks, **how)
    return reply["content"], sent


def test_a_drop_runs_and_the_stop_button_frees_its_ranks(client, tmp_path):
    for cell in nbformat.read(notebooks()[0], as_version=4).cells:
        if cell.cell_type != "code":
            continue
        assert run(client, VARIABLES, **QUIET)[0]["status"] == "ok"
        reply, sent = run(client, cell.source)
        assert reply["status"] == "ok", (cell.source, reply)
        for message in sent:
            if message["msg_type"] in ("display_data", "execute_result"):
                assert message["content"]["data"]["text/plain"], "text in place of a widget"
    assert run(client, "world = World(4)")[0]["status"] == "ok"  # the last cell has ended the drop's ranks

    here = tmp_path / "rank 0 is here"

    def press() -> None:
        while not here.exists():
            time.sleep(0.05)
        client.control_channel.send(client.session.msg("interrupt_request", {}))

    stuck = f"%%ranks\nif rank:\n    dist.barrier()\nopen({str(here)!r}, 'w').close()\nwhile True:\n    pass"
    threading.Thread(target=press, daemon=True).start()
    reply, _ = run(client, stuck)
    assert (reply["status"], reply["ename"]) == ("error", "RanksInterrupted")
    _, sent = run(client, "%%ranks\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()")
    assert "ranks 0–3 │ 4.0\n" in [message["content"].get("text") for message in sent]
