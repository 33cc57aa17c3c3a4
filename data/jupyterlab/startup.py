# Every kernel that `three-axes lab` starts runs this first, so that %%ranks is known before any cell has run,
# and can say which cells to run. A kernel of another environment may have no helpers.
try:
    __import__("helpers")
except ImportError:
    pass
