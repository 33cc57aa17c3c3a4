"""Where the notebooks are, and where what is made of them goes."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"


def notebooks() -> list[Path]:
    """The fourteen, in order, and then those beyond them."""
    folder = ROOT / "notebooks"
    return sorted(folder.glob("[01]*.ipynb")) + sorted((folder / "beyond").glob("b*.ipynb"))


def module_of(number: str) -> str:
    """What belongs to a notebook: '07' -> helpers.lesson.drops.d07, 'b2' -> helpers.lesson.drops.b2."""
    return "helpers.lesson.drops." + (f"d{number}" if number.isdigit() else number)
