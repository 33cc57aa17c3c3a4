"""What a wheel carries beside folders: the README and the licence, which the site shows, and the notebooks
without outputs, which are three quarters of it. An editable install must not have them: a folder `three_axes`
without code in site-packages would pass for the course. Where the wheel is shown, the README's links are the
repository's.
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
            blank = Path(tempfile.mkdtemp())
            for path in Path(self.root, "notebooks").rglob("*.ipynb"):
                inside = path.relative_to(self.root).as_posix()
                if ".ipynb_checkpoints" not in inside:
                    copy = blank / inside
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_text(without_outputs(path.read_text(encoding="utf-8")), encoding="utf-8")
                    build_data["force_include"][str(copy)] = f"three_axes/course/{inside}"


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
