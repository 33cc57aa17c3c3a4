"""How well the cost model does on published runs, as Markdown: `python bench/cost_model.py`. The sets are in helpers/theory/validation.py."""

from helpers.theory import validation

if __name__ == "__main__":
    found = validation.table()
    print("| " + " | ".join(found.columns) + " |\n" + "|---" * len(found.columns) + "|")
    for row in found.rows:
        print("| " + " | ".join(row) + " |")
