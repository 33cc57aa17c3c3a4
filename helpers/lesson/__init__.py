"""What the reader sees and does: pictures, predictions, exercises, and the %%ranks cell."""

from .practice import predict

__all__ = ["predict"]
