"""The notebooks in a real browser: JupyterLab as `make lab` starts it, and a headless Chromium that clicks
and types. test_browser_stored.py tests pages without a kernel, and the dark theme.

If no Chromium is found, these tests are skipped with a message. .ci/run installs one.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from io import BytesIO
from pathlib import Path

import nbformat
import pytest
from matplotlib.image import imread
from test_site import CHROMIUM, LAUNCH

from drops.d01 import fingerprints
from helpers.draw import explore
from helpers.practice.books import drop_number, notebooks
from helpers.ranks import folders
from helpers.ranks.ports import free_port
from tools import pages

ROOT = Path(__file__).resolve().parents[2]
if CHROMIUM is None:
    what_to_do = "no Chromium on this machine: install chromium to test the notebooks in a browser"
    pytest.skip(what_to_do, allow_module_level=True)
playwright_api = pytest.importorskip("playwright.sync_api")
sync_playwright, expect = playwright_api.sync_playwright, playwright_api.expect

MINUTE = 60_000  # for Playwright, in milliseconds
SETTINGS = {
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},  # all cells are in the page
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}
CONFIG = {
    "jupyter_lab_config.json": {"LabApp": {"expose_app_in_browser": True}},
    "jupyter_server_config.json": {
        "IdentityProvider": {"token": ""},
        "ServerApp": {"disable_check_xsrf": True},
        "KernelManager": {"transport": "ipc"},
    },
}


def _write(file: Path, content: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab with copies of the notebooks, and the folder of its files."""
    folder = tmp_path_factory.mktemp("lab")
    for name, content in SETTINGS.items():
        _write(folder / "settings" / f"{name.replace(':', '/')}.jupyterlab-settings", content)
    for name, content in CONFIG.items():
        _write(folder / "config" / name, content)
    port = free_port()  # kernels have none: see conftest
    places = {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
    places |= {"JUPYTER_CONFIG_DIR": "config", "THREE_AXES_PROGRESS": "progress.json"}
    environ = os.environ | {name: str(folder / place) for name, place in places.items()}
    # The path of a kernel's socket may have 107 characters, and its name has 50.
    sockets = tempfile.TemporaryDirectory(dir=folders.short_parent(40), ignore_cleanup_errors=True)
    environ["JUPYTER_RUNTIME_DIR"] = sockets.name
    command = [sys.executable, "-m", "three_axes", "lab", str(folder / "my"), "--no-browser"]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = subprocess.Popen([*command, f"--port={port}"], env=environ, **quiet)
    address = f"http://localhost:{port}/lab"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(address, timeout=5)
                break
            except OSError:
                time.sleep(0.25)
        yield address, folder
    finally:
        server.terminate()
        server.wait(30)
        sockets.cleanup()


@pytest.fixture(scope="module")
def page(lab):
    """JupyterLab in a browser, with nothing open."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(**LAUNCH)
        page = chromium.new_page(viewport={"width": 1366, "height": 768})
        page.goto(lab[0], timeout=2 * MINUTE)
        page.wait_for_function("() => window.jupyterapp?.shell", timeout=2 * MINUTE)
        page.evaluate("() => window.jupyterapp.restored")
        yield page
        chromium.close()


def show(page, **how) -> None:
    """Open a notebook. how: its path, and other arguments of JupyterLab's command."""
    page.evaluate("how => { window.jupyterapp.commands.execute('docmanager:open', how) }", how)
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell", timeout=2 * MINUTE)


class Notebook:
    """A notebook that is open in JupyterLab, with methods for what a learner does."""

    def __init__(self, page, folder: Path, number: str):
        self.page, self.folder = page, folder
        self.path = next(path for path in notebooks() if drop_number(path) == number)
        self.name = f"my/{self.path.relative_to(ROOT / 'notebooks').as_posix()}"
        self.open()

    def open(self) -> None:
        show(self.page, path=self.name)
        self.wait_for_kernel()

    def wait_for_kernel(self) -> None:
        """Wait until the kernel is connected and idle."""
        self.page.wait_for_function(
            """() => { const kernel = window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel
            return kernel && kernel.connectionStatus == 'connected' && kernel.status == 'idle' }""",
            timeout=3 * MINUTE,
        )
        # It has answered.
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.info")

    def command(self, name: str) -> None:
        """Choose an entry of the menu; returns when its action has ended."""
        self.page.evaluate(
            "name => { window.ended = false; window.jupyterapp.commands.execute(name).finally(() =>"
            " window.ended = true) }",
            name,
        )
        self.page.wait_for_function("window.ended", timeout=5 * MINUTE)
        self.wait_for_kernel()

    def select(self, text: str) -> None:
        """Make the first code cell that contains this text the active one."""
        source = self.page.evaluate(
            """text => { const notebook = window.jupyterapp.shell.currentWidget.content
            const has = cell => cell.model.type == 'code' && cell.model.sharedModel.source.includes(text)
            notebook.activeCellIndex = notebook.widgets.findIndex(has)
            notebook.mode = 'command'
            notebook.activate()
            return notebook.activeCell.model.sharedModel.source }""",
            text,
        )
        assert text in source, f"no cell has {text!r}"

    def run(self, *texts: str) -> None:
        """Run the cells that contain these texts, one after the other."""
        for text in texts:
            self.select(text)
            self.command("notebook:run-cell")

    def run_instead(self, code: str) -> None:
        """Run this code in the second cell of code, in place of its own: the first cell is folded."""
        self.page.evaluate(
            """code => { const notebook = window.jupyterapp.shell.currentWidget.content
            const second = notebook.widgets.filter(cell => cell.model.type == 'code')[1]
            notebook.activeCellIndex = notebook.widgets.indexOf(second)
            second.model.sharedModel.setSource(code) }""",
            code,
        )
        self.command("notebook:run-cell")

    def sources(self) -> list[str]:
        return self.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.content.widgets.map(cell =>"
            " cell.model.sharedModel.source)"
        )

    def errors(self) -> list[str]:
        shown = '.jp-RenderedText[data-mime-type="application/vnd.jupyter.error"]'
        return self.page.locator(shown).all_inner_texts()

    def cell(self, text: str):
        return self.page.locator(".jp-CodeCell", has_text=text).last

    def write(self, cell, code: str) -> None:
        """Replace the code of a cell, and run it with Shift+Enter."""
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.insert_text(code)
        self.page.keyboard.press("Shift+Enter")

    def close(self) -> None:
        """End its kernel, and close it without saving."""
        self.page.evaluate("""async () => { const panel = window.jupyterapp.shell.currentWidget
            await panel.sessionContext.shutdown(); panel.dispose() }""")


@pytest.fixture
def notebook(page, lab, request):
    opened = Notebook(page, lab[1], request.param)
    yield opened
    opened.close()


# What is wrong on the screen. above: the top of the last cell's output is above the screen; off: neither the
# last cell nor the next one is visible; wide, empty: numbers of outputs that are too wide, and of pictures
# without content. JupyterLab scrolls before an output is added, which may move the next cell below the edge.
SEEN = """() => {
    const notebook = window.jupyterapp.shell.currentWidget.content
    const panel = notebook.node.getBoundingClientRect()
    const at = notebook.activeCellIndex, near = notebook.widgets.slice(Math.max(0, at - 1), at + 1)
    const boxes = near.map(cell => cell.node.getBoundingClientRect())
    const output = near[0].node.querySelector('.jp-Cell-outputArea')
    const outputs = [...notebook.node.querySelectorAll('.jp-OutputArea-output')]
    const empty = image => !image.naturalWidth || !image.getBoundingClientRect().height
    return {
        above: output?.offsetHeight > 0 && output.getBoundingClientRect().top < panel.top - 1,
        off: boxes.every(cell => cell.top >= panel.bottom || cell.bottom <= panel.top),
        wide: outputs.filter(n => n.getBoundingClientRect().right > panel.right + 1).length,
        empty: outputs.flatMap(n => [...n.querySelectorAll('img')]).filter(empty).length,
    } }"""
RIGHT = {"above": False, "off": False, "wide": 0, "empty": 0}


OFTEN = ("01", "07", "14")  # the other notebooks have the same parts, and are tested once a week
CORES = [
    pytest.param(number, marks=pytest.mark.slow if number in OFTEN else pytest.mark.exhaustive)
    for number in map(drop_number, notebooks())
]


@pytest.mark.parametrize("notebook", CORES, indirect=True)
def test_the_core_of_a_notebook_runs_cell_by_cell_in_a_browser(notebook):
    """Follow the link to the practice, go back, and press Shift+Enter from cell to cell. Click on an answer,
    which makes its cell the next to run.
    """
    page, book = notebook.page, nbformat.read(notebook.path, as_version=4)
    page.locator(".jp-Notebook:visible a", has_text=re.compile(r"^practice \d+ minutes$")).click()
    practice = page.locator(".jp-Notebook:visible h2", has_text="Practice: ").first
    expect(practice).to_be_in_viewport(timeout=MINUTE)
    page.evaluate("""() => { const notebook = window.jupyterapp.shell.currentWidget.content
        notebook.activeCellIndex = 0; notebook.mode = 'command'; notebook.activate() }""")
    clicked, active = False, "() => window.jupyterapp.shell.currentWidget.content.activeCellIndex"
    while (at := page.evaluate(active)) < len(pages.core(book)):
        page.keyboard.press("Shift+Enter")
        page.wait_for_function(f"at => ({active})() > at", arg=at, timeout=MINUTE)
        notebook.wait_for_kernel()
        source = book.cells[at].source
        if " predict(" in source and not clicked:
            buttons = page.locator(".jp-Notebook:visible .jp-Cell").nth(at).locator(".widget-radio-box label")
            buttons.nth(1).click()
            clicked = page.evaluate(active) == at
            assert clicked, "a click makes its cell active"
        for _ in range(60):  # a picture takes a moment, and so does a scroll
            if (seen := page.evaluate(SEEN)) == RIGHT:
                break
            page.wait_for_timeout(500)
        assert seen == RIGHT, source
    assert clicked and notebook.errors() == []
    told = notebook.cell(".reveal(").inner_text()
    assert "You predicted" in told and "not predicted" not in told


# Rank 1 waits for a message that rank 0 never sends. It makes a file just before, for the test to see.
STUCK = """from helpers import World
import pathlib, time, torch, torch.distributed as dist
def wait():
    pathlib.Path({file!r}).touch()
    dist.recv(torch.zeros(1), src=0)
stuck = World(2, timeout=None)
stuck.run(lambda: wait() if dist.get_rank() else time.sleep(600))"""


@pytest.mark.slow
@pytest.mark.parametrize("notebook", ["01"], indirect=True)
def test_a_wrong_attempt_a_right_attempt_and_the_stop_button(notebook):
    page = notebook.page
    notebook.run("def fingerprint")
    practice = notebook.cell("def fingerprint")
    output = practice.locator(".jp-OutputArea-output")
    wrong = 'def fingerprint(small, large):\n    return "data"\n\nfingerprints.check(fingerprint)'
    notebook.write(practice, wrong)
    output.get_by_text("✗ wrong: ").wait_for(timeout=MINUTE)
    assert len(output.inner_text()) > 100, "the mistake is named and explained"
    again = notebook.cell("fingerprints.check")
    notebook.write(again, f"{fingerprints.solution()}\n\nfingerprints.check(fingerprint)")
    again.locator(".jp-OutputArea-output").get_by_text("✓ right").wait_for(timeout=MINUTE)
    assert fingerprints.name in json.loads((notebook.folder / "progress.json").read_text())["exercises"]

    waiting = notebook.folder / "waiting"
    notebook.write(again, STUCK.format(file=str(waiting)))
    for _ in range(120):
        if waiting.exists():
            break
        page.wait_for_timeout(500)
    page.wait_for_timeout(1000)
    page.click(
        '[data-command="notebook:interrupt-kernel"], button[title^="Interrupt the kernel"],'
        ' jp-button[title^="Interrupt the kernel"]'
    )
    hung = notebook.cell("stuck = World")
    stopped = hung.locator(".jp-OutputArea-output", has_text="stopped, as you asked").first
    stopped.wait_for(timeout=MINUTE)
    assert "waited in recv" in stopped.inner_text()
    notebook.write(hung, "print('and on:', stuck.run(lambda: 6 * 7)); stuck.close()")
    page.get_by_text("and on: [42, 42]").wait_for(timeout=MINUTE)


EXPLORERS = {
    call
    for path in notebooks()
    for cell in nbformat.read(path, as_version=4).cells
    if cell.cell_type == "code"
    for call in re.findall(r"explore\.\w+\(.*\)", cell.source)
}
IMAGES = ".three-axes-explorer img, img.three-axes-explorer"


@pytest.mark.slow
@pytest.mark.parametrize("notebook", ["02"], indirect=True)
def test_explorers_begin_as_python_says_and_move_by_keyboard_and_by_mouse(notebook):
    """All explorers of the notebooks, one after the other, in a notebook that has none."""
    for call in sorted(EXPLORERS):
        notebook.run_instead(f"from helpers.draw import explore\n{call}")
        begins_and_moves(notebook, call)


def begins_and_moves(notebook, call: str) -> None:
    """An explorer's first picture is Python's; keyboard, mouse and play button change it."""
    page = notebook.page
    assert notebook.errors() == []
    page.locator(IMAGES).last.wait_for(timeout=MINUTE)
    page.wait_for_timeout(2000)  # a link in the page would have pushed its own value by now
    shown = lambda: page.locator(IMAGES).last.get_attribute("src")
    fetched = "async src => Array.from(new Uint8Array(await (await fetch(src)).arrayBuffer()))"
    drawn = page.evaluate(fetched, shown())
    made = eval(call, {"explore": explore})
    first, python = (imread(BytesIO(png)) for png in (bytes(drawn), made.picture.png()))
    assert first.shape == python.shape and (abs(first - python) > 0.1).any(2).mean() < 0.005, (
        f"{call} begins with another picture than {made!r}"
    )
    usual = page.viewport_size
    page.set_viewport_size({"width": 1280, "height": 720})  # a projector of 1920 by 1080 at 150 %
    for side in ("expandLeft", "collapseLeft"):
        page.evaluate(f"() => window.jupyterapp.shell.{side}()")
        page.wait_for_timeout(1000)
        height = notebook.cell(call).locator(".jp-OutputArea-output").last.bounding_box()["height"]
        seen = page.evaluate("() => window.jupyterapp.shell.currentWidget.content.node.clientHeight")
        assert height <= seen, f"controls and picture do not fit the screen: {height} of {seen}"
    page.set_viewport_size(usual)

    def redrawn(before: str) -> str:
        changed = f"before => [...document.querySelectorAll('{IMAGES}')].pop().src != before"
        page.wait_for_function(changed, arg=before, timeout=MINUTE)
        return shown()

    before = shown()
    handle = page.locator(".noUi-handle").first
    handle.focus()
    page.keyboard.press("ArrowLeft")
    after = redrawn(before)
    box = handle.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 80, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    after = redrawn(after)
    for button in page.locator(".widget-play button").all()[:1]:  # from the end it plays from the beginning
        until = page.locator(".widget-readout").last
        last = int(until.inner_text())
        button.click()
        redrawn(after)
        assert int(until.inner_text()) < last / 2


@pytest.mark.slow
@pytest.mark.parametrize("notebook", ["14"], indirect=True)
def test_the_curve_of_a_training_a_card_and_the_final_quiz(notebook):
    page = notebook.page
    notebook.run("from helpers.practice import Defence", "cost = d13.your_lines")
    source = next(source for source in notebook.sources() if "d14.train_on" in source)
    notebook.write(
        notebook.cell("d14.train_on"),
        source.replace("d14.world_here()", "__import__('helpers').World(2)").replace("steps=30", "steps=20"),
    )
    curve = notebook.cell("d14.train_on").locator(".jp-OutputArea-output img")
    curve.wait_for(timeout=MINUTE)
    at_first = curve.get_attribute("src")
    page.get_by_text("20 steps are done.").wait_for(timeout=2 * MINUTE)
    assert curve.count() == 1 and curve.get_attribute("src") != at_first, "one picture, drawn anew"
    notebook.run("quiz.Quiz()", "progress.leave", "progress.here")
    assert notebook.errors() == []
    card = page.locator(".three-axes-card").last
    front, question = card.inner_text(), card.locator("b").first.inner_text()

    def press(button, until) -> None:
        """Click until it has an effect: a widget may be displayed before it listens."""
        for _ in range(20):
            page.get_by_role("button", name=button, exact=True).click()
            page.wait_for_timeout(1500)
            if until(card.inner_text()):
                return
        raise AssertionError(f"{button!r} does nothing: {card.inner_text()}")

    press("show", lambda text: len(text) > len(front) + 20)
    press("not yet", lambda text: question not in text)
    final = notebook.cell("quiz.Quiz()")
    final.locator(".widget-radio-box label").nth(1).click()
    final.get_by_text("Read again: drop 02").wait_for(timeout=MINUTE)
