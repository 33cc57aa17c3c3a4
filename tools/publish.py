"""Checks that a tag, the version and the changelog agree before a version is published:

    python -m tools.publish v1.2.3

RELEASING.md has all steps.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from three_axes.terminal import Parser

ROOT = Path(__file__).resolve().parents[1]


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


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


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.publish", description=__doc__)
    parser.add_argument("tag", help="as it is pushed: v0.1.0")
    found = of_version(parser.parse_args(argv).tag)
    print("\n".join(found) or "They agree.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
