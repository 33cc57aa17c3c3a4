"""The web site: its pictures (frames) equal the simulator's, every link leads somewhere, answers stay folded,
and a browser shows it at three widths.
"""

import itertools
import json
import os
import random
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import axe_playwright_python
import forked
import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup

from drops.lines import LINES
from helpers.draw import explore
from helpers.practice import cards
from helpers.practice.books import answering, drop_number, notebooks
from helpers.ranks import folders
from three_axes.paper.pipelines import SCHEDULES
from three_axes.paper.simulation import paper
from tools import printables
from tools.site import first, frames, lines
from tools.site.build import build

ROOT = Path(__file__).resolve().parents[2]
BOOKS = {drop_number(path): path for path in notebooks()}
WIDTHS = {
    name: {"width": width, "height": height}
    for name, width, height in (("phone", 390, 844), ("laptop", 1366, 768), ("projector", 1920, 1080))
}


# -- frames ------------------------------------------------------------------------------------------------


def decoded(text: str, chunks: int) -> list[tuple[str, str, float, float]]:
    """(kind, label, start, end) of a rank's operations, as site.js reads its text. chunks: of one stage."""
    row, free = [], 0
    for idle, kind, label in re.findall(r"(?:\.(\d+))?([FBIW])(\d+'*)", text):
        start = free + int(idle or 0)
        free = start + (2 if kind == "B" else 1)
        row.append((kind, label, start / chunks, free / chunks))
    return row


def test_frames_of_schedules_are_the_simulators():
    made = frames.schedule_frames()
    controls = explore.schedules().controls
    assert len(made) == 3 * 32 * (len(SCHEDULES) - 1 + 3)
    for key in [*random.Random(0).sample(list(made), 60), "1F1B 4 8 1", "ZB-V 8 13 1", "interleaved 4 8 3"]:
        name, p, m, v = key.split()
        try:
            timeline = paper(SCHEDULES[name].make(int(p), int(m), int(v)))
        except ValueError as e:
            assert made[key] == str(e)
            continue
        title, *texts = made[key]
        shown = explore.draw_schedule(name, int(p), int(m), int(v)) if int(m) < 6 else None
        assert shown is None or shown.alt.startswith(title)
        assert f"{timeline.makespan:.4g} units" in title
        for text, row in zip(texts, timeline.rows, strict=True):
            for mine, true in zip(decoded(text, timeline.schedule.v), row, strict=True):
                assert mine[:2] == true[:2] and mine[2:] == pytest.approx(true[2:])
    assert set(controls) == {"schedule", "p", "m", "v"}, "the key of a frame has all controls"


# -- pages -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, BeautifulSoup]:
    return {path: BeautifulSoup(path.read_text(), "html.parser") for path in site.rglob("*.html")}


@pytest.mark.slow
def test_every_link_leads_somewhere_and_nothing_is_fetched_from_afar(site, pages):
    names = {path: {tag["id"] for tag in page.select("[id]")} for path, page in pages.items()}
    for path, page in pages.items():
        ids = [tag["id"] for tag in page.select("[id]")]
        assert len(ids) == len(set(ids)), f"{path}: an id twice"
        for tag in page.select("[href], [src]"):
            link = tag.get("href", tag.get("src"))
            if re.match(r"https?:|data:", link):
                assert tag.name == "a" or link.startswith("data:"), f"{path}: {tag.name} fetches {link}"
                continue
            target, _, anchor = unquote(link).partition("#")
            there = (path.parent / target).resolve() if target else path
            assert there.is_file() and there.is_relative_to(site), f"{path}: {link}"
            assert not anchor or anchor in names[there], f"{path}: {link}"
        assert not page.select("iframe, script:not([src]):not(:empty)") or path.parent.name == "slides"
    fetches = re.compile(r"https?://(?!www\.w3\.org)|@import|url\(['\"]?http")
    for asset in [*site.glob("*.css"), *({*site.glob("*.js")} - {site / "search.js"})]:  # that has texts
        assert not fetches.search(asset.read_text()), asset
    assert {f"{path.stem}.html" for path in BOOKS.values()} <= {path.name for path in pages}


@pytest.mark.slow
def test_the_search_knows_no_answers(site):
    sections = json.loads((site / "search.js").read_text().removeprefix("const SECTIONS = ").rstrip(";\n"))
    texts = " ".join(text for *_, text in sections)
    assert len(sections) > 200 and "One way to do it" not in texts and "Hint 1 of" not in texts


@pytest.mark.slow
@pytest.mark.parametrize("drop", BOOKS)
def test_answers_hints_and_solutions_stay_folded(pages, drop):
    page = next(page for path, page in pages.items() if path.name == f"{BOOKS[drop].stem}.html")
    questions = [form["data-name"] for form in page.select("form.question")]
    assert questions and all(len(form.select("input")) > 1 for form in page.select("form.question"))
    for name in questions:
        folded = [d for d in page.select("details.answer") if name in d["data-answers"].split()]
        assert folded and not any("open" in d.attrs for d in folded)
    assert all(details.get("open") is None for details in page.select("details"))
    for details in page.select("details"):
        details.decompose()
    seen = page.get_text()
    assert "You predicted" not in seen and not re.search(r"(Measured|Computed|Published): ", seen)
    assert "not started" not in seen
    notebook = nbformat.read(BOOKS[drop], as_version=4)
    for cell in notebook.cells:
        if cell.id in answering(notebook):
            for output in cell.outputs:
                text = output.get("text") or output.get("data", {}).get("text/markdown", "")
                assert not text.strip() or text.strip() not in seen


@pytest.mark.slow
def test_each_drop_leads_to_the_previous_and_the_next(pages):
    order = [f"{path.stem}.html" for path in BOOKS.values()]
    by_name = {path.name: page for path, page in pages.items() if "notebooks" in path.parts}
    leads = lambda page, rel: {a["href"].rpartition("/")[2] for a in by_name[page].select(f"a[rel={rel}]")}
    for before, after in itertools.pairwise(order):
        assert leads(before, "next") == {after} and leads(after, "prev") == {before}


def test_cells_that_answer_a_prediction_are_known():
    cell = nbformat.v4.new_code_cell
    asked, more = "guess = predict(1, 2)\nguess", "x = predict(3)"
    sources = ["a", asked, "b", more, "guess.reveal(1)", "x.reveal(2)", "drawn"]
    cells = [cell(source, id=f"c{i}") for i, source in enumerate(sources)]
    cells += [nbformat.v4.new_markdown_cell("and\n\n## Behind it"), cell("d", id="d")]
    both = ["guess", "x"]
    answers = {"c2": ["guess"], "c3": ["guess"], "c4": both, "c5": both, "c6": both}
    assert answering(nbformat.v4.new_notebook(cells=cells)) == answers


def test_pages_need_no_torch():
    """`make site` installs none. Drop 02 has an exercise, its hints and a picture; 12 an explorer."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from helpers.practice import notebooks\nfrom tools import pages, printables, slides\n"
        "from tools.site import build, drop, first\n"
        "assert first.first() and all(map(drop.page, (notebooks()[1], notebooks()[11])))"
    )
    done = forked.python(code)
    assert done.returncode == 0, done.stderr


# -- GitHub ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda p: p.stem)
def test_workflows_can_be_read_and_need_no_secrets(file):
    read = yaml.safe_load(file.read_text())
    assert read["name"] and read[True] and read["permissions"]["contents"] == "read"  # 'on' is YAML's true
    assert "secrets." not in file.read_text()
    for job in read["jobs"].values():
        assert job["timeout-minutes"] and job["steps"]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            # By commit: a tag can be moved.
            assert "uses" not in step or re.fullmatch(r"(actions|pypa)/[\w-]+@[0-9a-f]{40}", step["uses"])
            kept = step.get("with", {}).get("persist-credentials", True)
            assert not ("checkout@" in step.get("uses", "") and kept)


# -- in a browser ------------------------------------------------------------------------------------------

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
# A socket of Chromium's has a path of at most 107 characters, of which 47 are its own.
LAUNCH = dict(
    executable_path=CHROMIUM, args=["--no-sandbox"], env=os.environ | {"TMPDIR": folders.short_parent()}
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def chromium():
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**LAUNCH)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium, site):
    """visit(page) opens a page on a laptop; any error in the page fails the test."""
    wrong, contexts = [], []

    def opened(name: str):
        contexts.append(chromium.new_context(viewport=WIDTHS["laptop"], offline=True))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda e: wrong.append(str(e)))
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.on("requestfailed", lambda r: wrong.append(r.url))
        page.goto((site / name).as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


@needs_chromium
def test_the_page_for_the_wall_is_one_sheet_of_a4(chromium, tmp_path):
    printables.write_cheatsheet(tmp_path)
    wide, high = (round((side - 2 * 8) / 25.4 * 96) for side in (297, 210))  # pixels between the margins
    page = chromium.new_page(viewport={"width": wide, "height": high})
    page.emulate_media(media="print")
    page.goto((tmp_path / "cheatsheet.html").as_uri())
    wall = page.locator(".wall").bounding_box()
    assert wall["x"] + wall["width"] <= wide and wall["y"] + wall["height"] <= high
    page.close()


def page_of(drop: str) -> str:
    """The path of a notebook's page in the site."""
    path = BOOKS[drop].relative_to(ROOT / "notebooks").with_suffix(".html")
    return f"notebooks/{path.as_posix()}"


# What a page looks like now: [how far it is wider than its screen, its ink, its paper].
LOOKS = """() => {
  const {color, backgroundColor} = getComputedStyle(document.body)
  return [document.documentElement.scrollWidth - innerWidth, color, backgroundColor]
}"""


@needs_chromium
@pytest.mark.slow
def test_no_page_is_wider_than_its_screen_and_paper_follows_the_scheme(visit, pages):
    page = visit("index.html")
    for path in pages:
        if path.parent.name == "slides":
            continue
        page.goto(path.as_uri())
        for (width, size), scheme in zip(WIDTHS.items(), ("light", "dark", "light")):
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=scheme)
            wider, *colours = page.evaluate(LOOKS)
            assert wider <= 0, (path, width)
            ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
            assert (ink > paper) == (scheme == "dark") and abs(ink - paper) > 450, (path, scheme)


AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("name", "index.html 01 07 cards.html docs/planner.html slides/07.html".split())
def test_axe_finds_nothing_that_is_more_than_minor(visit, name):
    """By the rules of axe-core: a page of each kind, light and dark, and where it is narrow."""
    page, found = visit(page_of(name) if name in BOOKS else name), []
    page.add_script_tag(path=AXE)
    for width, scheme in (("laptop", "light"), ("laptop", "dark"), ("phone", "light")):
        page.set_viewport_size(WIDTHS[width])
        page.emulate_media(color_scheme=scheme)
        told = page.evaluate("axe.run({preload: false})")
        severe = [one for one in told["violations"] if one["impact"] not in (None, "minor")]
        found += [(width, scheme, one["id"], one["nodes"][0]["html"][:120]) for one in severe]
    assert found == []


@needs_chromium
@pytest.mark.slow
def test_a_prediction_unfolds_its_answers_and_says_what_was_chosen(visit):
    page = visit(page_of("07"))
    answers = page.locator("details.answer")
    assert not page.locator("details.answer[open]").count() and answers.count() == 3
    commit = page.get_by_role("button", name="This is my prediction")
    page.get_by_label("the memory", exact=True).check()
    assert not page.locator("details.answer[open]").count()  # an arrow key chooses, and commits to nothing
    commit.click()
    assert page.locator("details.answer[open]").count() == 3
    assert page.get_by_text("You predicted: the memory.").is_visible()
    page.get_by_label("both", exact=True).check()
    commit.click()
    assert page.get_by_text("You predicted: both.").is_visible()
    assert not page.get_by_text("You predicted: the memory.").count()
    page.reload()
    assert page.get_by_text("You predicted: both.").is_visible(), "a prediction is kept"
    assert page.get_by_label("both", exact=True).is_checked()


# A text -> the number in it that has this unit.
FIGURE = r"(\d[\d.]*) ?{}(?![\w/])"


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("drop", lines.questions())
def test_a_page_asks_its_drops_line_for_a_number_and_keeps_it(visit, drop):
    asked = lines.questions()[drop]
    page = visit(page_of(drop))
    page.set_viewport_size(WIDTHS["phone"])
    form, said = page.locator("form.line"), page.locator("form.line .said")
    measured = page.locator(f"details.answer[data-answers~={asked['name']}]")
    field, commit = form.get_by_role("spinbutton"), form.get_by_role("button")
    assert form.count() == measured.count() == 1 and asked["call"] in form.inner_text()
    assert page.evaluate(LOOKS)[0] <= 0 and measured.get_attribute("open") is None
    commit.click()
    assert measured.get_attribute("open") is None, "without a number nothing is shown"
    wrong, why = max(asked["mistakes"], key=lambda it: abs(it[0] - asked["right"]))
    field.fill(f"{wrong:.4g}")
    field.press("Enter")
    assert why in said.inner_text() and asked["shown"] in said.inner_text()
    for number in (f"{asked['right']:.3g}", f"{asked['right']:.6g}"):
        field.fill(number)
        commit.click()
        assert said.inner_text().startswith(f"Right: {asked['shown']}")
    figures = map(float, re.findall(FIGURE.format(asked["unit"]), measured.inner_text()))
    assert any(abs(figure - asked["right"]) <= asked["near"] * 1.001 for figure in figures)
    field.fill(f"{asked['right'] + 3 * asked['near']:.6g}")
    commit.click()
    assert "Right:" not in said.inner_text(), "the next number of three digits is wrong"
    kept = said.inner_text()
    page.reload()
    assert said.inner_text() == kept and measured.get_attribute("open") is not None
    assert page.evaluate(LOOKS)[0] <= 0


def test_numbers_are_asked_where_a_drop_has_a_line():
    sources = {drop: path.read_text(encoding="utf-8") for drop, path in BOOKS.items()}
    assert list(lines.questions()) == [drop for drop, source in sources.items() if ".line.check(" in source]
    for drop, asked in lines.questions().items():
        line = LINES[asked["name"]]
        assert line.formula.drop == drop and asked["shown"] == line.formula.shown(
            line.ours(*line.formula.cases[asked["case"]])
        ).replace("%", " %")


@needs_chromium
@pytest.mark.slow
def test_the_first_page_predicts_cuts_and_its_address_keeps_it(visit):
    page = visit("index.html")
    page.get_by_label("the layers", exact=True).check()
    assert page.locator("#does").inner_text() == "Choose, and see the cut."
    page.get_by_role("button", name="This is my prediction").click()
    form, answer = (page.locator(part).bounding_box() for part in ("#cuts", "#bars"))
    assert form["y"] <= answer["y"] <= form["y"] + form["height"], "the answer is beside the form"
    said = page.locator("#does").inner_text()
    assert page.locator("#does a").get_attribute("href") == page_of("01")
    assert "You predicted the layers, but it is the matrices." in said and "8 of 32 layers" in said
    page.get_by_label("the matrices", exact=True).check()
    assert f"the matrices: {first.gigabytes('tp'):.3g} GB" in page.locator("#bars .chosen").inner_text()
    long = [bar.bounding_box()["width"] for bar in page.locator("#bars i").all()]
    figures = [float(first.gigabytes(axis)) for axis in first.CUTS]
    by_figure = [max(long) * gb / max(figures) for gb in figures]
    assert max(long) > 150 and long == pytest.approx(by_figure, abs=1.5)

    address = page.url
    page.goto("about:blank")
    page.goto(address)
    assert page.get_by_label("the matrices", exact=True).is_checked()
    page.goto("about:blank")
    page.goto(address.partition("#")[0] + "#cut=up")  # nobody's cut
    assert page.locator("#does").inner_text() == "Choose, and see the cut."


@needs_chromium
@pytest.mark.slow
def test_the_search_finds_a_section_from_any_page(visit):
    page = visit(page_of("b1"))
    page.get_by_role("searchbox").fill("bubble interleaved")
    page.locator("#found a").first.wait_for()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"12_bubble|glossary|07_pipeline|planner"))
    page.get_by_role("searchbox").fill("zzzz")
    page.get_by_text("Nothing has all these words.").wait_for()


@needs_chromium
@pytest.mark.slow
def test_explorers_move_without_a_kernel(visit):
    told = lambda m: explore.schedule_title(paper(SCHEDULES["1F1B"].make(4, m, 1)))
    page = visit(page_of("07"))
    unfold = "document.querySelectorAll('details.later').forEach(section => section.open = true)"
    page.evaluate(unfold)
    explorer = page.locator("[data-explorer=schedules]")
    explorer.scroll_into_view_if_needed()
    explorer.locator("h4").wait_for()
    assert explorer.locator("h4").inner_text() == told(8)
    assert explorer.locator("svg rect").count() == 4 * 8 * 2
    explorer.locator("input[name=m]").focus()
    page.keyboard.press("ArrowRight")
    assert explorer.locator("h4").inner_text() == told(9)
    assert not explorer.locator("input[name=v]").is_visible()
    explorer.locator("select").select_option("interleaved")
    assert explorer.locator("input[name=v]").is_visible()
    with pytest.raises(ValueError) as refused:
        SCHEDULES["interleaved"].make(4, 9, 2)
    assert explorer.locator("h4").inner_text() == str(refused.value) and not explorer.locator("svg").count()

    page = visit(page_of("09"))
    page.evaluate(unfold)
    explorer = page.locator("[data-explorer=memory]")
    explorer.scroll_into_view_if_needed()
    explorer.locator("h4").wait_for()
    for zero in (1, 2, 3):
        _, stages, _ = explore.stages_of("llama-3-70b", 4, 8, 2, 1, zero, "none")
        most = max(float(sum(stage.values())) for stage in stages) / 1e9
        assert f"llama-3-70b on 64 GPUs: {most:.1f} GB" in explorer.locator("h4").inner_text()
        explorer.locator("input[name=zero]").focus()
        page.keyboard.press("ArrowRight")


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("name", ["07", "slides/07.html"])
def test_two_orders_play_without_a_kernel(visit, name):
    page = visit(page_of(name) if name in BOOKS else name)
    if name in BOOKS:
        page.get_by_label("the memory", exact=True).check()
        page.get_by_role("button", name="This is my prediction").click()
    orders = page.locator("[data-explorer=orders]")
    orders.scroll_into_view_if_needed()
    drawn = lambda: orders.locator("svg rect").count()
    until = orders.locator("input[name=until]")
    until.wait_for()
    assert drawn() == 2 * 4 * 8 * 2 and until.input_value() == "33"
    until.focus()
    for _ in range(33 - 4):
        page.keyboard.press("ArrowLeft")
    whole = explore._timelines(4, 8)
    assert drawn() == sum(start < 4 for line in whole for row in line.rows for *_, start, _ in row)
    page.clock.install()
    orders.get_by_role("button", name="play").click()
    page.clock.run_for(3 * 500)
    assert until.input_value() == "7"
    orders.get_by_role("button", name="stop").click()
    page.clock.run_for(3 * 500)
    assert until.input_value() == "7"
    orders.locator("input[name=m]").focus()
    page.keyboard.press("ArrowLeft")
    assert until.get_attribute("max") == "21" and until.input_value() == "7"
    if name in BOOKS:
        return
    page.keyboard.press("PageDown")  # as a clicker sends it
    assert orders.bounding_box()["y"] < 0, "a clicker still turns the slides"


@needs_chromium
@pytest.mark.slow
def test_cards_turn_and_come_back(visit):
    page = visit("cards.html")
    card = page.locator(".card:visible").first
    card.click()
    assert card.get_attribute("aria-pressed") == "true"
    page.select_option("#drops", "07")
    shown = page.locator(".card:visible").count()
    assert 0 < shown < page.locator(".card").count()
    page.click("#one")
    first = page.locator(".card:visible")
    assert first.count() == 1 and f"{shown} left" in page.locator("#round").inner_text()
    front = first.locator(".front").inner_text()
    assert page.locator("#known").is_disabled(), "the button works before the answer is visible"
    first.click()
    page.click("#again")
    assert page.locator(".card:visible .front").inner_text() != front
    for _ in range(shown):
        page.locator(".card:visible").click()
        page.click("#known")
    assert "All known." in page.locator("#round").inner_text()


@needs_chromium
@pytest.mark.slow
def test_cards_and_worksheets_print_a_page_each_in_an_order_that_is_read_aloud(chromium, tmp_path):
    printables.write_cards(tmp_path)
    printables.write_worksheets(tmp_path)
    for name, count in (("cards", 2 * len(cards.load())), ("worksheets", len(BOOKS) + 1)):  # 13: 2 pages
        page = chromium.new_page()
        page.goto((tmp_path / f"{name}.html").as_uri())
        printed = page.pdf(prefer_css_page_size=True, tagged=True)
        assert len(re.findall(rb"/Type /Page\b", printed)) == count and b"/StructTreeRoot" in printed
        page.close()


@needs_chromium
@pytest.mark.slow
def test_a_deck_is_stepped_by_arrow_keys_and_its_slides_have_numbers(visit):
    page = visit("slides/07.html")
    count = page.locator("section").count()
    assert page.locator("section").first.get_attribute("data-of") == str(count)
    shown = """() => getComputedStyle(document.querySelector("section"), "::after").content"""
    assert "counter(slide)" in page.evaluate(shown)
    top = lambda: page.evaluate(
        """() => [...document.querySelectorAll("section")]
            .findIndex(slide => slide.getBoundingClientRect().bottom > 9)"""
    )
    assert top() == 0
    for _ in range(6):  # a slide that is too high takes two
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(50)
    assert top() >= 3 and page.url.endswith(f"#{top() + 1}")
    page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(50)
    assert top() <= 5
