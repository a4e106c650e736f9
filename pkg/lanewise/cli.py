"""The command line: `lanewise info | demo | bench | tune`."""

from __future__ import annotations

import argparse
import io
import os
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import lanewise

WRAP = partial(textwrap.TextWrapper, width=100, break_on_hyphens=False, break_long_words=False)


def shown(value: Any) -> str:
    if isinstance(value, str) or not isinstance(value, Collection):
        return str(value)
    return ", ".join(map(str, value.values() if isinstance(value, Mapping) else value))


def lines(values: Mapping[str, Any]) -> Iterator[str]:
    """A mapping, and the mappings in it, with the names of each in one column; long values are wrapped."""
    width = max(map(len, values))
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{name}:"
            deeper = max(map(len, value))
            yield from (f"  {inner:<{deeper}}  {shown(item)}" for inner, item in value.items())
        else:
            start = f"{name:<{width}}  "
            yield from WRAP(initial_indent=start, subsequent_indent=" " * len(start)).wrap(shown(value) or "none")


def info(_: argparse.Namespace) -> int:
    print("\n".join(lines(lanewise.info())))
    return 0


def demo(_: argparse.Namespace) -> int:
    from . import demo

    return demo.main()


def bench(args: argparse.Namespace) -> int:
    from . import bench

    return bench.main(quick=args.quick)


def tune(_: argparse.Namespace) -> int:
    for row in lanewise.tune():
        times = ", ".join(
            f"{isa} {us:.1f} us at {size:,}" for isa, sizes in row["microseconds"].items() for size, us in sizes.items()
        )
        print(f"{row['operation']:<12} {row['isa']:<8} {times}")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="lanewise", description=lanewise.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="info | demo | bench | tune")
    for command, about in (
        (info, "what was detected, what is compiled in, what each operation runs on and why"),
        (demo, "tokens drawn from real logits, beside the NumPy way"),
        (bench, "every operation beside its floor and the NumPy way, on this machine"),
        (tune, "times every operation on every ISA that runs here and keeps the winners"),
    ):
        sub = commands.add_parser(command.__name__, help=about, description=about)
        sub.set_defaults(run=command)
        if command is bench:
            sub.add_argument("--quick", action="store_true", help="one vocabulary, a few repeats")
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # tokens are in any script, terminals are not
    try:
        return int(args.run(args))
    except BrokenPipeError:  # the reader has seen enough, as head has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush fails too
        return 1
