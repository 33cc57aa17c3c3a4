"""Where the notebooks are, and where what is made of them goes."""

from pathlib import Path

from ..files import find

BUILD = Path("build")  # in the reader's folder


def notebooks() -> list[Path]:
    """The fourteen, in order, and then those beyond them."""
    folder = find("notebooks")
    return sorted(folder.glob("[01]*.ipynb")) + sorted((folder / "beyond").glob("b*.ipynb"))


def number(path: Path) -> str:
    """'07' of 07_microbatches_filling_the_pipeline.ipynb"""
    return path.name.split("_")[0]


def module_of(number: str) -> str:
    """What belongs to a notebook: '07' -> helpers.lesson.drops.d07, 'b2' -> helpers.lesson.drops.b2."""
    return "helpers.lesson.drops." + (f"d{number}" if number.isdigit() else number)
