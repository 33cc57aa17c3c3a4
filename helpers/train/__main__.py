"""`python -m helpers.train`: see the package's docstring."""

import os
import sys

from .launch import main

code = main()
sys.stdout.flush()
sys.stderr.flush()
# At once: a thread of gloo's that still holds a Python object would abort an interpreter on its way out.
os._exit(code)
