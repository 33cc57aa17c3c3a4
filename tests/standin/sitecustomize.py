"""A Python that is started with this folder on PYTHONPATH and STANDIN_GPUS=n believes that it has n GPUs."""

import os

if os.environ.get("STANDIN_GPUS"):
    import standin_gpus

    standin_gpus.install(int(os.environ["STANDIN_GPUS"]))
