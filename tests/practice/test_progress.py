"""What a reader's progress file has, and what reads it: cards, the quiz, the next drop, a class."""

import inspect
import json
import linecache
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from kernels import WithoutPorts

from drops import b1, d01, d02, d04, d13
from helpers import predict
from helpers.practice import books, cards, missing, onward, passed, progress, quiz
from helpers.practice.engine import compiled
from three_axes.__main__ import main
from tools import classroom

ROOT = Path(__file__).resolve().parents[2]
# A right function that is not the solution itself: only this counts as passed.
OWN = compiled(inspect.getsource(d01.fingerprint), d01.fingerprint)
BOOKS = {books.drop_number(path): nbformat.read(path, as_version=4) for path in books.notebooks()}


# -- cards -----------------------------------------------------------------------------------------


def test_a_card_that_was_not_known_comes_again():
    deck = cards.deck(1)
    first, n = deck.top, len(deck.left)
    deck.show()
    assert first.back in deck._face()
    deck.not_yet()
    assert deck.top != first and len(deck.left) == n and first in deck.left and first.back not in deck._face()
    while deck.top:
        deck.know()
    assert "All known" in deck._face()
    deck.know(), deck.not_yet()  # nothing is left, and nothing happens
    deck.again()
    assert deck.top == first and "folded" not in repr(deck)
    assert first.front in deck._repr_mimebundle_()["text/html"]
    with pytest.raises(ValueError, match="there is no drop 15"):
        cards.deck(15)
    assert {c.drop for c in cards.deck("b2").all} == {"b2"} and "b2" not in {c.drop for c in cards.deck().all}


# -- the quiz, predictions, solutions ---------------------------------------------------------------


def test_ten_questions_in_two_stories_and_wrong_answers_point_to_a_heading_that_exists(monkeypatch, tmp_path):
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / "progress.json"))
    before, after = (quiz.Quiz(story) for story in quiz.STORIES)
    assert len(before.questions) == len(after.questions) == 10
    for question, other in zip(after.questions, before.questions):
        assert question.where == other.where and question.text != other.text
        drop, heading = question.where
        headings = "\n".join(cell.source for cell in BOOKS[drop].cells)
        assert re.search(rf"^## {re.escape(heading)}$", headings, re.M), question.where
        for one in (question, other):
            assert len(one.options) in (3, 4) and sum(not why for why in one.options.values()) == 1
            for option, why in one.options.items():
                assert (f"drop {drop}" in one.judge(option)) == bool(why)
    assert [q.right for q in after.questions[:3]] == ["280 MB", "160", "268 MB"]
    for i, question in enumerate(after.questions, 1):
        wrong = next(option for option, why in question.options.items() if why)
        assert "Read again" in after.answer(i, wrong if i == 1 else question.right) or i > 1
        assert before.answer(i, before.questions[i - 1].right).startswith("Noted.")
    assert after.answer(1, after.questions[0].right).startswith("Right. 9 of 10 right at the first try")
    assert passed.mine().quiz == {"before": [True] * 10, "after": [False] + [True] * 9}
    with pytest.raises(ValueError, match="is not an answer"):
        after.answer(1, "luck")
    with pytest.raises(ValueError, match="choose 'before' or 'after'"):
        quiz.Quiz("between")


def test_a_choice_is_kept_when_a_cell_runs_again(monkeypatch, tmp_path):
    """A click on an answer makes its cell the next to run."""
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / "progress.json"))
    ask = lambda: predict("What is measured here?", "one", "two")
    buttons = lambda guess: guess.ask(guess.choose)[-1]
    first = buttons(ask())
    first.value = "two"
    again = buttons(ask())
    assert again.value == "two" and not again.disabled
    again.value = "one"
    assert "You predicted that" in ask().reveal("one").text and again.disabled
    ask().choose("two")
    assert "You predicted that" in ask().reveal("one").text, "it was revealed"
    assert predict("What is measured here?", "one", "three").chosen is None
    unchosen = predict("And here?", "one", "two")
    late = unchosen.reveal("one")
    late._repr_mimebundle_()
    assert unchosen._shown[-1].value is None
    unchosen._shown[-1].value = "two"
    assert "You predicted: two." in unchosen.reveal("one").text

    monkeypatch.setattr(quiz, "_displayed", {})
    quizzes = [quiz.Quiz() for _ in range(2)]
    quizzes[0]._repr_mimebundle_()
    quizzes[0].answer(3, quizzes[0].questions[2].right)
    quizzes[1]._repr_mimebundle_()
    assert quizzes[1].chosen == {2: quizzes[0].questions[2].right} and quizzes[1].first == {2: True}


def test_solutions_can_be_hidden(monkeypatch):
    monkeypatch.setenv("THREE_AXES_SOLUTIONS", "hidden")
    shown = str(d01.fingerprints.solution())
    assert "put the solutions away" in shown and "def " not in shown


# -- progress ----------------------------------------------------------------------------------------


def test_progress_is_a_small_file_that_may_be_deleted(monkeypatch, tmp_path):
    file = tmp_path / "progress.json"
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(file))
    names = [n for group in progress.exercises().values() for n in group]
    assert all(set(one) <= set(progress.exercises()[drop]) for drop, one in books.lessons().items())
    assert len(names) == len(set(names)) >= 20 and set(progress.exercises()) == set(BOOKS)
    assert f"0 of {len(names)} exercises passed" in repr(progress.show())
    wrong = d01.fingerprints.check(lambda small, large: "data")
    assert wrong.kind == "wrong" and not passed.mine().passed
    assert d01.fingerprints.check(OWN).kind == "right"
    assert d01.fingerprints.check(lambda small, large: "data").kind == "wrong"  # not counted any more
    expected = {"tries": 2, "passed": True, "mistakes": {wrong.misconception: 1}, "source": ""}
    stored = {"exercises": {"traffic fingerprints": expected}, "left": ["01"]}
    stored |= {"cards": {}, "asked": {}, "quiz": {}}
    assert json.loads(file.read_text()) == stored
    assert f"1 of {len(names)} exercises passed" in repr(progress.show())
    strange = {"exercises": {"a": {"tries": "1"}}}, {"cards": {"a": [1, "tomorrow"]}}, {"left": 3}, []
    for broken in map(json.dumps, strange):
        file.write_text(broken)
        assert passed.mine() == passed.Done()
        with pytest.raises(ValueError, match="is no progress file of this course"):
            passed.read_progress(file)
    file.unlink()
    assert passed.mine() == passed.Done()
    monkeypatch.setenv("THREE_AXES_PROGRESS", "/nowhere/at/all.json")
    passed.note("x", None)  # cannot be written, and does not disturb
    monkeypatch.setenv("THREE_AXES_PROGRESS", "")
    passed.note("x", None)
    assert passed.mine() == passed.Done()


def test_a_button_pressed_while_a_cell_is_checked_loses_no_progress(monkeypatch, tmp_path):
    """JupyterLab calls the button's function in a thread of its own. Other notebooks read the file."""
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / "progress.json"))
    passed.note_read("01")
    with ThreadPoolExecutor(3) as threads:
        notes = [threads.submit(passed.note, f"exercise {i}", None) for i in range(60)]
        while not all(note.done() for note in notes):
            assert passed.read_progress(tmp_path / "progress.json").left == ["01"]
    assert len(passed.mine().passed) == 60 and len([*tmp_path.iterdir()]) == 1


def test_there_is_one_progress_file_for_the_fourteen_and_those_beyond(monkeypatch, tmp_path):
    monkeypatch.delenv("THREE_AXES_PROGRESS")
    (tmp_path / "beyond").mkdir()
    monkeypatch.chdir(tmp_path)
    passed.note("traffic fingerprints", None)
    monkeypatch.chdir("beyond")
    passed.note("the order of a step", None)
    assert json.loads((tmp_path / "progress.json").read_text())["exercises"].keys() == passed.mine().passed
    assert len(passed.mine().passed) == 2 and not any((tmp_path / "beyond").iterdir())


def test_the_course_knows_what_comes_next_and_what_went_wrong_last_time(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / "progress.json"))
    opens = lambda: onward.next_drop(passed.mine()).name[:2]
    assert opens() == "01"
    wrong = d01.fingerprints.check(lambda small, large: "data")
    assert opens() == "01"
    solved = d01.fingerprints.check(OWN)
    assert solved.next[1] == progress.notebooks()[1].name
    assert "1 of 14 drops done. Next: drop 02." in repr(solved)
    assert f'<a href="{solved.next[1]}">' in solved._repr_html_() and opens() == "02"
    capsys.readouterr()
    progress.here("02")
    said = capsys.readouterr().out
    assert "1 of 14 drops done. " in said
    assert "Last time, drop 01: traffic fingerprints solved. Three cards of what you have read:\n" in said
    assert wrong.misconception not in said, "it was solved since"
    progress.leave("05")  # read, and not practised
    assert "1 of 14 drops done, 2 read (" in capsys.readouterr().out
    assert opens() == "05"
    passed.note(d13.cases.name, None)  # which is for another day
    assert opens() == "13"
    assert onward.after(d13.cases.name, d13.__name__) == (f"Next in this drop: {d13.written.name}.", "")
    passed.note(d13.written.name, None)
    assert onward.after(d13.written.name, d13.__name__)[1].startswith("14_")
    for name in d02.average.name, d02.step.name:  # a lesson is enough, and leaves its drop's others open
        passed.note(name, None)
    assert onward.after(d02.average.name, d02.__name__)[1].startswith("14_")
    assert onward.after(d02.step.name, d02.__name__) == (f"Next in this drop: {d02.ring.name}.", "")
    for names in progress.exercises().values():
        for name in names:
            passed.note(name, None)
    assert opens() == "01"
    assert onward.after(b1.mesh.name, b1.__name__)[1].startswith("../01_")


def test_a_drop_can_be_skipped_by_its_exercises(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / "progress.json"))
    cells = []
    history = SimpleNamespace(input_hist_raw=cells)
    shell = SimpleNamespace(set_next_input=cells.append, history_manager=history)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    progress.skip("01")
    solved = d01.fingerprints.check(OWN)
    assert solved.next[1].startswith("02_") and passed.mine().left == [], "a skipped drop was not read"
    assert solved.next[0].startswith("1 of 14 drops done, 0 read.")
    cells[:] = ["d01.fingerprints.check(mine)"]
    assert d01.fingerprints.check(OWN).next[1] == solved.next[1] and passed.mine().left == ["01"]
    cells.clear()
    progress.skip("04")
    passed.note(d04.middle_stage.name, None)
    progress.skip("04")
    assert "d04.middle_stage.check(" in cells[0] and "d04.loop.check(" in cells[1]
    passed.note(d04.loop.name, None)
    progress.skip("04")
    assert len(cells) == 2 and "drop 04 is passed" in capsys.readouterr().out


def after_a_restart(drop: str) -> list[str]:
    """In a new shell that has run the drop's first cell: what each later cell says."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_cell(f"from helpers.practice import progress; progress.here({drop!r})").raise_error()
    cells = ("guess.reveal('data')", "d01.first_line(3)", "fingerprint", "data", "x = guess", "gues", "held")
    return [str(shell.run_cell(cell).error_in_exec) for cell in cells]


def test_after_a_restart_a_cell_says_which_cells_to_run(aside):
    """Not for a slip of the pen, nor for a name that only ranks have."""
    said = aside(after_a_restart, "01")
    for name, line in zip(("guess", "d01", "fingerprint", "data", "guess"), said):
        assert line.endswith(f"\n{missing.ADVICE.format(name)}")
    assert said[-2:] == ["name 'gues' is not defined", "name 'held' is not defined"]


def test_cards_come_back_by_spacing(monkeypatch, tmp_path):
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / "progress.json"))
    first = cards.load("01")
    in_days = lambda n: str(date.today() + timedelta(n))
    assert cards.beginning(in_days(0)).all == []
    passed.note_read("01")
    deck = cards.beginning(in_days(0))
    assert deck.all == first[:3]
    deck.know(), deck.not_yet()
    seen = passed.mine().cards
    assert seen == {first[0].front: (1, in_days(1)), first[1].front: (0, in_days(0))}
    passed.note_read("02")
    assert cards.beginning(in_days(0)).all == [*cards.load("02"), *first[3:]][:3], "none twice in a day"
    assert first[1] in cards.deck().all and first[0] not in cards.deck().all
    assert cards.beginning(in_days(1)).all == [first[1], *cards.load("02")[:2]]
    assert set(cards.deck().all) == set(cards.load("01", "02")) - {first[0]}
    cards.Deck(first[:1]).know()  # once more on the same day: it counts once
    assert passed.mine().cards[first[0].front] == (1, in_days(1))
    for times, days in enumerate((3, 7, 21, 21), 1):
        with passed.changing() as done:
            done.cards[first[0].front] = times, in_days(0)
        cards.Deck(first[:1]).know()
        assert passed.mine().cards[first[0].front] == (times + 1, in_days(days))


def test_a_drop_begins_with_what_is_due(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr(progress, "_begun", {})
    shown = []
    monkeypatch.setattr(progress, "display", shown.append)

    def said(drop: str) -> str:
        progress.here(drop)
        return capsys.readouterr().out

    assert said("01") == 'You know this drop already? progress.skip("01") asks its exercise now.\n'
    assert not shown, "without progress nothing is asked, as in the stored output"
    d01.fingerprints.check(OWN)
    assert "Three cards" in said("02") and "1 of 14 drops done" in said("02")
    assert len(shown) == 2 and shown[0] is shown[1], "the same cards when the cell runs again"
    assert "You know this drop already?" not in said("01")
    monkeypatch.setenv("THREE_AXES_PROGRESS", "")
    progress.leave("02")
    assert capsys.readouterr().out.startswith("drop 02: ○ the mean of unequal shares, ○")


def test_a_pass_keeps_the_source_and_an_empty_cell_offers_it(monkeypatch, tmp_path):
    """The notebook may be lost after a check: JupyterLab ended before it was saved."""
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / "progress.json"))

    def fingerprint(small, large): ...

    assert "You passed" not in repr(d01.fingerprints.check(fingerprint))
    d01.fingerprints.check(lambda small, large: "data")
    assert passed.mine().exercises[d01.fingerprints.name].source == "", "a wrong attempt is not kept"
    # A right function in a cell, whose source is where IPython keeps it.
    source, names = inspect.getsource(d01.fingerprint), dict(d01.fingerprint.__globals__)
    linecache.cache["<a cell>"] = len(source), None, source.splitlines(keepends=True), "<a cell>"
    exec(compile(source, "<a cell>", "exec"), names)
    assert d01.fingerprints.check(names["fingerprint"]).kind == "right"
    offered = d01.fingerprints.check(fingerprint)
    assert offered.kind == "not started" and offered.text.endswith(source)


def test_a_class_is_collected_into_what_to_discuss(monkeypatch, tmp_path, capsys):
    def hands_in(file: str, *checks: tuple[str, str | None]) -> None:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / file))
        for check in checks:
            passed.note(*check)

    first, second = (name for names in list(progress.exercises().values())[:2] for name in names[:1])
    hands_in("b/progress.json", (second, "no sum"), (second, "no sum"), (first, None))
    hands_in("a.json", (second, "no sum"), (second, "one step too few"), (second, None), (first, None))
    hands_in("c.json", ("of an older course", "crashed"))
    far = tmp_path / ("a folder of a long name" * 9)  # the file's own name stands in the message all the same
    far.mkdir()
    (far / "d.json").write_text("[]")
    students, unread = classroom.collect(tmp_path)
    assert [who for who, _ in students] == ["a", "b", "c"] and "d.json is no progress file" in unread[0][1]
    discuss = classroom.to_discuss(students)
    assert discuss.rows == [
        ["?", "of an older course", "0 of 3", "1.0", "crashed (1)"],
        ["02", second, "1 of 3", "2.5", "no sum (2), one step too few (1)"],
        ["01", first, "2 of 3", "1.0", ""],
    ]
    assert main(["class", "collect", str(tmp_path), "--csv", str(tmp_path / "out.csv")]) == 1
    told = capsys.readouterr().out
    assert "To discuss: 3 students" in told and "d.json is no progress file" in told
    assert "The quiz" not in told
    assert classroom.by_student(students).rows[0] == ["a", "2", "2", "4", "", "", ""]
    mistake = d02.average.rows[0].name
    hands_in("e.json", (second, mistake)), hands_in("f.json", (second, mistake), (second, "no sum"))
    students, _ = classroom.collect(tmp_path)
    assert classroom.advice(students).rows == [["02", mistake, "2", d02.average.rows[0].advice]]
    rows = (tmp_path / "out.csv").read_text().splitlines()
    assert rows[0] == "who,drop,exercise,passed,tries,mistakes (times)" and len(rows) == 6
    assert f"b,02,{second},no,2,no sum (2)" in rows
    assert main(["class", "collect", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """The folder of a reader's notebooks. The notebook of this kernel is 02 in it."""
    (tmp_path / "my" / "beyond").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "my")
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "my" / progress.notebooks()[1].name))
    return tmp_path / "my"


@contextmanager
def running(*kernels: tuple[str, Path]):
    """Processes that look like kernels. kernels: what Jupyter writes into the environment of each, and its
    folder.
    """
    with ExitStack() as stack:
        for session, folder in kernels:
            folder.mkdir(parents=True, exist_ok=True)
            script = "import time; print(flush=True); time.sleep(600)"
            command = [sys.executable, "-c", script, "-m", "ipykernel_launcher"]
            environ = os.environ | {"JPY_SESSION_NAME": session}
            kernel = stack.enter_context(
                subprocess.Popen(command, env=environ, cwd=folder, stdout=subprocess.PIPE)
            )
            stack.callback(kernel.kill)
            kernel.stdout.readline()
        yield


def test_a_drop_begins_with_one_line_on_the_notebooks_that_still_run(opened, monkeypatch):
    files = [path.name for path in progress.notebooks()]
    beyond = str(opened / "beyond" / "b1_fsdp.ipynb")
    of = lambda *names: [(str(opened / name), opened) for name in names]
    assert progress._still_run("02") == ""
    for session in str(opened / files[2]), f"my/{files[2]}", files[2]:  # as Jupyter's programs write it
        with running((session, opened)):
            said = progress._still_run("02")
            assert said.startswith(f"{files[2]} still runs: its kernel holds memory. The notebook's menu Ker")
            assert progress._still_run("03") == "", "the notebook just opened, in another editor"
    with running(*of(*files[:14]), (beyond, opened / "beyond")):
        said = progress._still_run("02")
        assert said.startswith("01, 03, 04, ") and " 14 and b1 still run: their kernels hold memory. " in said
        assert "\n" not in said
        monkeypatch.delenv("JPY_SESSION_NAME")  # as in VS Code
        assert progress._still_run("02") == said


def test_kernels_of_other_folders_and_a_kernels_other_processes_are_no_notebooks_that_still_run(opened):
    name = progress.notebooks()[2].name
    elsewhere = opened.parent / "elsewhere"
    with running(
        (str(elsewhere / name), elsewhere), (name, elsewhere), (str(opened / "other.ipynb"), opened)
    ):
        assert progress._still_run("02") == ""
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    environ = os.environ | {"JPY_SESSION_NAME": str(opened / name)}
    with subprocess.Popen(command, env=environ, cwd=opened, stdout=subprocess.PIPE) as left_behind:
        left_behind.stdout.readline()
        assert progress._still_run("02") == ""
        left_behind.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="ranks have names on Linux only")
def test_ranks_are_named_until_the_notebook_has_ended_them(opened):
    name = progress.notebooks()[2].name
    manager = WithoutPorts()
    manager.start_kernel(env=os.environ | {"JPY_SESSION_NAME": str(opened / name)}, cwd=str(ROOT))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(120)
        client.execute_interactive("from helpers import World; world = World(2)", timeout=300)
        assert "its kernel holds memory, and so do its ranks. " in progress._still_run("02")
        client.execute_interactive("world.close()", timeout=300)
        assert "its kernel holds memory. " in progress._still_run("02")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("name", ["=1", "+1", "-1", "@a", "＝1", "－1", " =1", "a;=1", "a; ＝1"])
def test_no_name_becomes_a_formula(name):
    formula = re.compile(r"(^|;)\s*[=+\-@＝＋－＠]")
    assert formula.search(name) and not formula.search(classroom._cell(name))
    assert classroom._cell("a = b; c") == "a = b; c"


def test_a_class_answers_the_quiz_and_sees_its_gain(monkeypatch, tmp_path, capsys):
    for who, story, reply in (("a", "before", "a"), ("a", "after", "b"), ("b", "before", "b")):
        monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / f"{who}.json"))
        replies = iter(["", "x", *[reply] * 10])
        monkeypatch.setattr("builtins.input", lambda _: next(replies))
        assert main(["class", "quiz", story]) == 0
    assert "right at the first try" in capsys.readouterr().out
    students, _ = classroom.collect(tmp_path)
    table = classroom.gain(students)
    assert table.title == "The quiz: students with before and after 1", "b has answered before alone"
    right = [
        [list(q.options.values())["ab".index(reply)] == "" for q in quiz.Quiz(story).questions]
        for story, reply in (("before", "a"), ("after", "b"))
    ]
    for row, before, after in zip(table.rows, *right, strict=True):
        more = f"{100 * (after - before):+.0f} points"
        assert row[1:] == [f"{before:d} of 1", f"{after:d} of 1", more]
    assert not classroom.gain(students[1:]).rows, "nobody has both"
    monkeypatch.setattr("builtins.input", lambda _: (_ for _ in ()).throw(EOFError))
    assert main(["class", "quiz", "after"]) == 2 and "nothing of it is kept" in capsys.readouterr().err


def test_a_students_file_can_neither_stop_the_class_nor_control_the_terminal(tmp_path, capsys):
    given = {"exercises": {"=exercise\x1b[2J": {"tries": 1, "mistakes": {"@mistake": 1}}}}
    (tmp_path / "+good\x1b[2J.json").write_text(json.dumps(given))
    (tmp_path / "digits.json").write_text(f'{{"a": {{"tries": {10**400}}}}}')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.json")
    assert main(["class", "collect", str(tmp_path), "--csv", str(tmp_path / "out.csv")]) == 1
    told = capsys.readouterr().out
    assert "To discuss: 1 students" in told and "=exercise�[2J" in told and "\x1b" not in told
    for sentence in ("401 digits", "deep.json is nested", "endless.json is a", "pipe.json is a"):
        assert sentence in told
    last = (tmp_path / "out.csv").read_text(encoding="utf-8").splitlines()[-1]
    assert last == "'+good�[2J,?,'=exercise�[2J,no,1,'@mistake (1)"
