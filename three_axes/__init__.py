"""Three Axes: plan, count, verify and explain a training job on three axes of parallelism.

`counting` counts the collectives of a block of code, in any process of torch.distributed. Modules are
imported when they are first used: `three_axes.paper`, `.plan` and `.explain` need only NumPy.
"""


def __getattr__(name: str):
    if name != "counting":
        raise AttributeError(f"module 'three_axes' has no attribute {name!r}")
    from .commands import course_needed

    with course_needed("three_axes.counting"):
        from .count.counting import counting
    return counting
