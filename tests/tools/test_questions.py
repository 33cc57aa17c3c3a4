"""Questions for assistants, and the skill file that teaches them to ask the commands."""

import re
import shlex

import pytest

from three_axes.__main__ import parser
from three_axes.files import find
from tools.questions import answer, rows

SKILL = find("docs/skills/three-axes/SKILL.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["question"])
def test_the_commands_give_the_answers(row):
    assert answer(row["command"], row["key"], row["unit"]) == row["answer"]


def test_they_are_fifty_and_as_many_are_impossible_as_the_skill_says():
    questions = [row["question"] for row in rows()]
    assert len(set(questions)) == len(questions) == 50
    impossible = [row for row in rows() if not row["key"]]
    assert len(impossible) == 12 and "Twelve are impossible" in SKILL


def test_the_skill_has_the_front_matter_that_assistants_read():
    front = dict(re.findall(r"(?m)^(name|description): (.+)$", SKILL.split("---")[1]))
    assert front["name"] == "three-axes" and len(front["description"]) <= 1024


@pytest.mark.parametrize("words", re.findall(r"(?:three-axes|-m three_axes) ([a-z]+ [^`\n]*)`", SKILL))
def test_a_command_of_the_skill_is_one(words):
    words = shlex.split(words)
    if "--help" not in words:
        parser(words[0]).parse_args(words)
