"""A function with the arguments that an exercise wants, and nothing in it."""

import inspect


def empty(exercise):
    names = list(inspect.signature(exercise.reference).parameters)
    made = {}
    exec(f"def attempt({', '.join(names)}):\n    'Documented.'\n    ...", made)
    return made["attempt"]
