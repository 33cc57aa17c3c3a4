"""Plan a training job without torch and without a GPU; count, verify and explain a real one; open the course.

    three-axes plan llama-3-70b --gpus 64 --batch 128 --seq 8192
    three-axes estimate llama-3-70b --tp 8 --pp 2 --dp 4 --zero 1
    three-axes estimate llama-3-8b --gpus 64 --zero 3 --measured 0.9s
    three-axes lab
    torchrun --nproc-per-node 4 -m three_axes count train.py --its-arguments
    torchrun --nproc-per-node 4 -m three_axes verify train.py
    three-axes explain trace-rank*.json.gz

`python -m three_axes plan …` is the same as `three-axes plan …`.
A model is a name, or a JSON file: the config.json of a decoder on Hugging Face is accepted. A cluster is a
name, or a JSON file with a device and the speeds of its links: bytes per second, per GPU, one direction.
`--json` prints the same results for other programs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .checks import unknown
from .commands import COMMANDS, call, course_needed
from .foreign import plain
from .options import PLANNING, add_command
from .sizing import job_of, layout_of
from .terminal import Parser, fitted, fold, put

ALL = ["count", "verify", *PLANNING, *COMMANDS]


def parser(only: str = "") -> Parser:
    """The parser of all commands, or, if there is a command `only`, of this one alone, which is faster."""
    prog = "three-axes" if Path(sys.argv[0]).stem == "three-axes" else "python -m three_axes"
    top = Parser(prog=prog, description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", prog=top.prog)
    for name in [only] if only in ALL else ALL:
        if name in PLANNING:
            add_command(commands, name)
        elif name in COMMANDS:
            command = COMMANDS[name]
            command.options(commands.add_parser(name, help=command.help, description=only and command.manual))
        else:
            from .count.options import SCRIPTS

            help, add = SCRIPTS[name]
            add(commands.add_parser(name, help=help))
    return top


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("three-axes")
    except PackageNotFoundError:
        return "from its source folder, not installed"


def main(argv: list[str] | None = None) -> int:
    """Run one command. argv: by default that of `sys`. Returns the exit status, 2 for refused arguments."""
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if argv[0] == "--version":
            return put(f"three-axes {_version()}")
        if argv[0] not in ALL and argv[0][:1] != "-":
            raise ValueError(f"unknown command {unknown(argv[0], ALL)}")
        args = parser(argv[0]).parse_args(argv)
        if args.command in COMMANDS:
            return call(args)
        if args.command == "count":
            with course_needed("three-axes count"):
                from .count.script import prepare

                run = prepare(args, lambda: (job := job_of(args), layout_of(args, job)))
        elif args.command == "verify":
            with course_needed("three-axes verify"):
                from .verify.script import prepare as prepare_check

                run = prepare_check(args)
        else:
            with fitted(sys.stdout):
                text, data = args.run(args)
                text = fold(text)
    except (ValueError, ModuleNotFoundError) as e:
        with fitted(sys.stderr):
            lines = (plain(line, 2000) for line in str(e).splitlines())  # a message may quote a file's text
            print(fold("\n".join(lines)), file=sys.stderr)
        return 2
    if args.command in ("count", "verify"):
        return run()  # an exception of the script is not caught
    return put(json.dumps(data, default=float, allow_nan=False) if args.json else text)


def command() -> None:
    """The command `three-axes` of an installation; `python -m three_axes` does the same."""
    # A character that the output's encoding lacks is printed as a question mark.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(main())


if __name__ == "__main__":
    command()
