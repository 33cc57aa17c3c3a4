"""Where the files are that are no code: data/ and notebooks/.

In a clone they lie beside this package. A wheel carries them inside it, as pyproject.toml says.
"""

from __future__ import annotations

from pathlib import Path


def find(name: str) -> Path:
    """The file or folder that is called `name` in the repository: 'data/flashcards.csv', 'notebooks'.

    Raises FileNotFoundError where neither a clone nor a wheel has it.
    """
    package = Path(__file__).resolve().parent
    for place in (package / name, package.parent / name):
        if place.exists():
            return place
    raise FileNotFoundError(f"{name} is neither in {package} nor beside it: install the course again")
