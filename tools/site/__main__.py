"""`python -m tools.site` makes the pages, in build/site/."""

from helpers.practice.books import BUILD

from .build import build

if __name__ == "__main__":
    pages = build(BUILD / "site")
    print(f"{pages} pages in {BUILD / 'site'}; open {BUILD / 'site' / 'index.html'}")
