"""Adds files to a wheel: README.md, LICENSE, and the notebooks without their outputs. Also makes the README's
links lead to the repository, for the project's page on PyPI.

An editable install gets none of these files: a folder `three_axes` without code in site-packages would be
taken for the course.
"""

import json
import re
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class BesideFolders(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        if version != "editable":
            for name in ("README.md", "LICENSE"):
                build_data["force_include"][name] = f"three_axes/course/{name}"
            self.blank = tempfile.TemporaryDirectory()  # removed when the wheel is written
            for path in Path(self.root, "notebooks").rglob("*.ipynb"):
                inside = path.relative_to(self.root).as_posix()
                if ".ipynb_checkpoints" not in inside:
                    copy = Path(self.blank.name, inside)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_text(without_outputs(path.read_text(encoding="utf-8")), encoding="utf-8")
                    build_data["force_include"][str(copy)] = f"three_axes/course/{inside}"

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:  # after the build
        if version != "editable":
            self.blank.cleanup()


def without_outputs(notebook: str) -> str:
    book = json.loads(notebook)
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return json.dumps(book, ensure_ascii=False, indent=1)


class Readme(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        there = metadata["urls"]["Source"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(r"(!\[[^]]*\]\()(?!http)", rf"\1{there}/raw/main/", text)
        text = re.sub(r"((?<!!)\[[^]]*\]\()(?!http|#)", rf"\1{there}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
