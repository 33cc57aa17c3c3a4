"""docs/skills/three-axes/SKILL.md, which teaches AI assistants to run the commands."""

import re
import shlex

import pytest

from three_axes.__main__ import parser
from three_axes.files import find

SKILL = find("docs/skills/three-axes/SKILL.md").read_text(encoding="utf-8")


def test_the_skill_has_the_front_matter_that_assistants_read():
    front = dict(re.findall(r"(?m)^(name|description): (.+)$", SKILL.split("---")[1]))
    assert front["name"] == "three-axes" and len(front["description"]) <= 1024


@pytest.mark.parametrize("words", re.findall(r"(?:three-axes|-m three_axes) ([a-z]+ [^`\n]*)`", SKILL))
def test_every_command_of_the_skill_is_accepted(words):
    words = shlex.split(words)
    if "--help" not in words:
        parser(words[0]).parse_args(words)
