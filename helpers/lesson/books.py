"""Where the notebooks are, and where what is made of them goes."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"


def notebooks() -> list[Path]:
    """The fourteen, in order."""
    return sorted((ROOT / "notebooks").glob("[01]*.ipynb"))
