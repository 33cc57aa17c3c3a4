"""Notebooks as they are stored, in JupyterLab without a kernel and with its dark theme: all outputs of a cell
are readable, and no widget is missing.
"""

import shutil

import beside
import nbformat
import pytest
from test_browser import MINUTE, ROOT, Notebook, lab, page, show  # noqa: F401

from helpers.draw.picture import INK
from helpers.practice.books import drop_number, notebooks

WITHOUT_KERNEL = {"shouldStart": False, "autoStartDefault": False}
# What is not readable, or missing, in the outputs of the open notebook. Contrast is WCAG's, at least 4.5.
TROUBLE = """async ink => {
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4
  const light = c => c.map((v, i) => [.2126, .7152, .0722][i] * linear(v / 255)).reduce((a, b) => a + b)
  const contrast = (a, b) => { const [low, high] = [light(a), light(b)].sort((x, y) => x - y)
    return (high + .05) / (low + .05) }
  const over = (a, b) => b.map((v, i) => a[3] * a[i] + (1 - a[3]) * v)
  const colour = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n }
  const behind = e => e == null ? [255, 255, 255]
    : over(colour(getComputedStyle(e).backgroundColor), behind(e.parentElement))
  const trouble = [], open = document.querySelector(".jp-NotebookPanel:not(.lm-mod-hidden)")
  for (const output of open.querySelectorAll(".jp-OutputArea-output")) {
    const shown = output.innerText.slice(0, 60)
    if (/model not found|Loading widget/.test(output.innerText)) trouble.push("a widget is missed: " + shown)
    if (output.scrollWidth > output.clientWidth + 1) trouble.push("scrolls sideways: " + shown)
    for (const e of [output, ...output.querySelectorAll("*")]) {
      if (![...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()) || !e.offsetWidth) continue
      const ground = behind(e), how = contrast(over(colour(getComputedStyle(e).color), ground), ground)
      if (how < 4.5) trouble.push(`contrast ${how.toFixed(1)}: ${e.innerText.slice(0, 60)}`)
    }
    for (const image of output.querySelectorAll("img")) {
      await image.decode()
      const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
      const context = canvas.getContext("2d")
      context.drawImage(image, 0, 0)  // its first pixel: the paper that it is drawn on
      const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data
      const how = contrast(ink, over([r, g, b, a / 255], behind(image)))
      if (how < 4.5) trouble.push(`contrast ${how.toFixed(1)}: ${image.alt.slice(0, 60)}`)
      const {width, height} = image.getBoundingClientRect(), shape = image.naturalWidth / image.naturalHeight
      if (Math.abs(width / height / shape - 1) > .02) trouble.push("out of shape: " + image.alt.slice(0, 60))
    }
  }
  return trouble }"""


def trouble(page) -> list[str]:  # noqa: F811
    return page.evaluate(TROUBLE, [int(INK[i : i + 2], 16) for i in (1, 3, 5)])


def put_away(page) -> None:  # noqa: F811
    page.evaluate("() => window.jupyterapp.shell.currentWidget.dispose()")


def change_theme(page, theme: str) -> None:  # noqa: F811
    """Change the theme, and wait for it: JupyterLab ignores a second change before the first has ended."""
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
    light = str(theme == "JupyterLab Light").lower()
    page.wait_for_function(f"() => document.body.dataset.jpThemeLight == '{light}'", timeout=MINUTE)


@pytest.fixture
def dark(page):  # noqa: F811
    """The page with JupyterLab's dark theme, on a small laptop."""
    size = page.viewport_size
    page.set_viewport_size({"width": 1366, "height": 768})
    change_theme(page, "JupyterLab Dark")
    yield page
    change_theme(page, "JupyterLab Light")
    page.set_viewport_size(size)


@pytest.mark.slow
def test_all_that_is_stored_can_be_read_in_the_dark(dark, lab):  # noqa: F811
    shutil.copytree(ROOT / "notebooks", lab[1] / "stored")
    troubles = {}
    for path in notebooks():
        name = path.relative_to(ROOT / "notebooks").as_posix()
        show(dark, path=f"stored/{name}", kernelPreference=WITHOUT_KERNEL)
        dark.wait_for_timeout(500)
        troubles[path.name] = trouble(dark)
        put_away(dark)
    assert troubles == {name: [] for name in troubles}


# Whether the open notebook is the one of this name, with so many cells.
FILLED = """([name, cells]) => { const panel = window.jupyterapp.shell.currentWidget
  return panel?.context?.path.endsWith(name) && panel.content.widgets.length == cells }"""
# How many cells under this one are on the screen when this one is at its top.
UNDER = """at => {
  const notebook = window.jupyterapp.shell.currentWidget.content, top = e => e.getBoundingClientRect().top
  const cells = notebook.widgets.map(widget => widget.node)
  const panel = cells[at].closest('.jp-WindowedPanel-outer')
  panel.scrollTop += top(cells[at]) - top(panel)
  const edge = panel.getBoundingClientRect().bottom - 16  // of which a cell's margin is no text
  return cells.slice(at + 1).filter(cell => top(cell) < edge).length }"""


@pytest.mark.slow
def test_what_is_on_the_screen_with_an_open_question_was_read(dark, lab):  # noqa: F811
    """In the reader's copy, where no cell has run. test_notebooks.py asks whether its text has changed."""
    unread, rows = {}, beside.kept()
    for path in notebooks():
        number, name = drop_number(path), path.relative_to(ROOT / "notebooks").as_posix()
        show(dark, path=f"my/{name}", kernelPreference=WITHOUT_KERNEL)
        notebook = nbformat.read(path, as_version=4)
        dark.wait_for_function(FILLED, arg=[path.name, len(notebook.cells)], timeout=MINUTE)
        for question, at in beside.questions(notebook).items():
            read, _ = rows.get((number, question), (-1, ""))
            for _ in range(20):  # until all cells have their heights
                if (under := dark.evaluate(UNDER, at)) <= read:
                    break
                dark.wait_for_timeout(500)
            else:
                unread[number, question] = under
        put_away(dark)
    assert not unread, f"write these numbers of cells into {beside.KEPT.name}, and read them: {unread}"


@pytest.mark.slow
def test_a_notebook_whose_kernel_is_gone_misses_no_widget(dark, lab):  # noqa: F811
    opened = Notebook(dark, lab[1], "09")
    opened.run("from drops import", "guess = predict(", "explore.")
    dark.locator(".noUi-handle").first.wait_for(timeout=MINUTE)
    dark.locator(".jp-OutputArea-output", has_text="Loading widget").first.wait_for(state="hidden")
    assert opened.errors() == [] and trouble(dark) == []
    sliders = dark.locator(".noUi-handle").count()
    dark.evaluate("() => window.jupyterapp.shell.currentWidget.context.save()")
    assert sliders and dark.locator(".noUi-handle").count() == sliders, "saving has removed a widget"
    opened.close()
    show(dark, path=opened.name, kernelPreference=WITHOUT_KERNEL)
    dark.locator(".jp-OutputArea-output img").first.wait_for(timeout=MINUTE)
    assert trouble(dark) == [] and dark.locator(".noUi-handle").count() == 0
    put_away(dark)
