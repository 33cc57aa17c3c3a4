"""`python -m helpers.train`: see the package's docstring."""

import os
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # While torch is imported there is nothing to save, and a traceback from each rank helps nobody.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .launch import main  # noqa: E402

code = main()
sys.stdout.flush()
sys.stderr.flush()
# At once: a thread of gloo's that still holds a Python object would abort an interpreter on its way out.
os._exit(code)
