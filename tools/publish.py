"""Lists what is still to do before a version is published: python -m tools.publish

RELEASING.md has all steps. With --tag v1.2.3 it only checks that tag, version and changelog agree.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from three_axes.terminal import Parser

from .colab import UNNAMED

ROOT = Path(__file__).resolve().parents[1]


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def version() -> str:
    """The version in pyproject.toml."""
    return re.search(r'(?m)^version = "(.+)"', _read("pyproject.toml"))[1]


def of_version(tag: str) -> list[str]:
    """A sentence for each file that disagrees with the tag, or with the version; [] if all agree."""
    now = version()
    checks = {
        f"the tag is {tag}, and pyproject.toml says {now}: make them agree": tag == f"v{now}",
        f"CITATION.cff has another version than {now}": f"version: {now}\n" in _read("CITATION.cff"),
        f"CHANGELOG.md has no heading ## {now}": f"\n## {now}\n" in _read("CHANGELOG.md"),
        f"CHANGELOG.md has lines under ## Unreleased: put them under ## {now}": not re.search(
            r"(?m)^## Unreleased\n\s*^(?!## )\S", _read("CHANGELOG.md")
        ),
    }
    return [what for what, holds in checks.items() if not holds]


def still_open() -> list[str]:
    """A sentence for each thing that is to do, in order; [] when the tag can be pushed."""
    repo = re.search(r"github\.com/([\w.-]+/[\w.-]+)", _read("pyproject.toml"))[1]
    remote = re.search(r"[:/]([\w.-]+/[\w.-]+?)(\.git)?$", _git("remote", "get-url", "origin"))
    tag = f"v{version()}"
    checks = {
        "no repository is named: push it to GitHub, then make colab REPO=owner/name": repo != UNNAMED,
        f"the remote origin is not github.com/{repo}": repo == UNNAMED or bool(remote and remote[1] == repo),
        "there are changes that are not committed": not _git("status", "--porcelain"),
        f"the tag {tag} is on another commit: raise the version": (
            _git("rev-list", "-n1", tag) in ("", _git("rev-parse", "HEAD"))
        ),
    }
    return [what for what, holds in checks.items() if not holds] + of_version(tag)


BY_HAND = "Not checked here: Pages, and the trusted publisher of the name three-axes (RELEASING.md)."


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.publish", description=__doc__)
    parser.add_argument("--tag", help="as it is pushed: v0.1.0")
    args = parser.parse_args(argv)
    found = of_version(args.tag) if args.tag else still_open()
    print("\n".join(f"open: {what}" for what in found) or "Nothing is open.")
    if not args.tag:
        print(BY_HAND)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
