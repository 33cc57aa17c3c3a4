"""`python -m helpers.train`: see the package's docstring."""

import os
import sys

from .launch import main

code = main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(
    code
)  # at once: a thread of gloo's that still holds a Python object would abort an interpreter on its way out
