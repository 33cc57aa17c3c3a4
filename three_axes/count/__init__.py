"""Count a reader's own job: what each rank was asked to move, along which axis, and how long it waited.

    torchrun --nproc-per-node 4 -m three_axes count train.py --its-arguments

`from three_axes import counting` does the same for a block of code.
"""
