"""Where the notebooks are, and where what is made of them goes."""

from pathlib import Path

from ..files import find

BUILD = Path("build")  # in the reader's folder


def notebooks() -> list[Path]:
    """The fourteen, in order."""
    return sorted(find("notebooks").glob("[01]*.ipynb"))


def number(path: Path) -> str:
    """'07' of 07_microbatches_filling_the_pipeline.ipynb"""
    return path.name.split("_")[0]
