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
    assert publish.main(["--tag", f"v{publish.version()}"]) == refused
    assert ("lines under ## Unreleased" in capsys.readouterr().out) == refused


def test_files_that_do_not_agree_are_named(monkeypatch, capsys):
    assert publish.main(["--tag", "v99.0"]) == 1
    assert "the tag is v99.0" in capsys.readouterr().out
    other = {"pyproject.toml": 'version = "9.0"\nhttps://github.com/some/where'}
    other |= {"CITATION.cff": "", "CHANGELOG.md": ""}
    monkeypatch.setattr(publish, "_read", other.__getitem__)
    monkeypatch.setattr(publish, "_git", lambda *words: "git@github.com:another/place.git")
    assert publish.main([]) == 1
    told = capsys.readouterr().out
    for said in ("not github.com/some/where", "not committed", "CITATION.cff", "no heading ## 9.0"):
        assert said in told and "trusted" in told
    assert "no repository is named" not in told
