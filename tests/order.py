"""In which order workers take the test files.

Some files mostly wait: for attempts that hang, for stand-ins of computation that sleep. Others keep every
processor busy. One worker takes those that wait first, the others those that compute, so that the two kinds
run side by side. Of each kind the long ones come first: none is left alone with one at the end. Before them
comes drop 14, whose eight ranks would compete with the eight of test_train.
"""

from xdist.scheduler import LoadFileScheduling

WAIT = (
    "test_exercises_beyond test_exercises_phase2 test_exercises_phase1 11_ test_beyond 07_ 12_ 05_ b4_ 08_"
    " 06_ test_fabric test_meter test_timeline"
).split()
COMPUTE = (
    "14_ test_browser test_train test_attempts test_gpus test_install 10_ test_world test_exercises_phase3"
    " test_toy test_endings test_site test_trace 02_ 09_ b1_ test_exercises_phase4 test_adversary"
    " test_magic b3_ test_traffic 03_ 04_ b2_ 01_ test_count test_structure test_planner test_learning 13_"
    " test_terminal"
).split()


def place(file: str, names: list[str]) -> int:
    """Of a file's name among names, which it begins with; behind all others where it is not among them."""
    return next((i for i, name in enumerate(names) if file.startswith(name)), len(names))


class SideBySide(LoadFileScheduling):
    """The first worker takes what waits, the others what computes; and what is left when there is no more."""

    def _assign_work_unit(self, node) -> None:
        wanted = node is self.nodes[0]
        for scope in self.workqueue:
            if scope.split("/")[-1].startswith(tuple(WAIT)) == wanted:
                self.workqueue.move_to_end(scope, last=False)
                break
        super()._assign_work_unit(node)
