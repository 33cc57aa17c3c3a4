"""Drop 05: when data parallelism sends, and how to hide it under backward."""

from .forward import forward
from .practice import judge, overlap, overlapped
from .shown import BACKWARD, BUCKET, FORWARD, NETWORK, exposed, paced_model, trace
