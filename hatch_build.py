"""What a wheel carries beside folders: the README and the licence, which the site shows. An editable
install must not have them: a folder `three_axes` without code in site-packages would pass for the course.
Where the wheel is shown, the README's links are the repository's.
"""

import re
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class BesideFolders(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        if version != "editable":
            for name in ("README.md", "LICENSE"):
                build_data["force_include"][name] = f"three_axes/course/{name}"


class Readme(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        there = metadata["urls"]["Source"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(r"(!\[[^]]*\]\()(?!http)", rf"\1{there}/raw/main/", text)
        text = re.sub(r"((?<!!)\[[^]]*\]\()(?!http|#)", rf"\1{there}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
