"""What a wheel carries beside folders: the README and the licence, which `three-axes site` shows. An editable
install must not have them: a folder `three_axes` without code in site-packages would pass for the course.
"""

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BesideFolders(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        if version != "editable":
            for name in ("README.md", "LICENSE"):
                build_data["force_include"][name] = f"three_axes/course/{name}"
