"""`python -m tools.site` makes the pages, in build/site/."""

import sys

from helpers.practice import BUILD
from three_axes.files import PACKAGE, ROOT

from .build import build

if __name__ == "__main__":
    if PACKAGE in ROOT.parents:  # the course is installed from a wheel
        sys.exit("The pages show what each cell printed. A wheel's notebooks have none of it: use a clone.")
    pages = build(BUILD / "site")
    print(f"{pages} pages in {BUILD / 'site'}; open {BUILD / 'site' / 'index.html'}")
