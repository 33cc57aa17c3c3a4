"""Three Axes: plan, count, trace and explain a job on three axes of parallelism.

`counting` counts a block of any process of torch.distributed. Nothing is imported until it is asked for:
`three_axes.paper`, `.plan` and `.explain` need NumPy alone.
"""


def __getattr__(name: str):
    if name != "counting":
        raise AttributeError(f"module 'three_axes' has no attribute {name!r}")
    from .commands import course_needed

    with course_needed("three_axes.counting"):
        from .count.counting import counting
    return counting
