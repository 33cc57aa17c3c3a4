"""Drop 03: the split of the MLP, forward and backward, and what it saves."""

from .practice import judge, mlp, split_mlp
from .shown import gradients_match, memory_on
