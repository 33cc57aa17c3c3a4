"""`tools.publish`: what must hold before a version is published."""

import pytest

from tools import publish


def test_the_version_is_the_same_everywhere_and_has_its_changes():
    assert publish.of_version(f"v{publish.version()}") == []


@pytest.mark.parametrize("below, refused", [("", False), ("\n\nMore.\n", True), ("\n### New\n", True)])
def test_unreleased_changes_are_not_published(monkeypatch, capsys, below, refused):
    changes = f"# Changes\n\n## Unreleased\n{below}\n## {publish.version()}\n\nThe first.\n"
    read = publish._read
    monkeypatch.setattr(publish, "_read", lambda name: changes if name == "CHANGELOG.md" else read(name))
    assert publish.main([f"v{publish.version()}"]) == refused
    assert ("lines under ## Unreleased" in capsys.readouterr().out) == refused


def test_files_that_do_not_agree_are_named(monkeypatch, capsys):
    other = {"pyproject.toml": 'version = "9.0"', "CITATION.cff": "", "CHANGELOG.md": ""}
    monkeypatch.setattr(publish, "_read", other.__getitem__)
    assert publish.main(["v99.0"]) == 1
    told = capsys.readouterr().out
    assert all(said in told for said in ("the tag is v99.0", "CITATION.cff", "no heading ## 9.0"))
