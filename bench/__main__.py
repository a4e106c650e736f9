"""`python -m bench`: see docs/performance.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from lanewise import _caches

from . import article, attention, bars, beside, kv, readme, report, table

VIEWS = {
    "table": table.VIEW,
    "bars": bars.VIEW,
    "kv": kv.VIEW,
    "attention": attention.VIEW,
    "article": article.VIEW,
    "peers": beside.VIEW,
    "readme": readme.VIEW,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="operations beside their floors and peers")
    which = parser.add_mutually_exclusive_group()
    which.set_defaults(view="table")
    for name, view in VIEWS.items():
        which.add_argument(f"--{name}", dest="view", action="store_const", const=name, help=view.about)
    which.add_argument(
        "--docs", type=Path, metavar="PAGE", help="measure nothing: put the latest results into the page"
    )
    parser.add_argument("--quick", action="store_true", help="few repeats and sizes: whether it runs, not how fast")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where to write to")
    args = parser.parse_args()
    if args.docs:
        report.document(VIEWS, args.results, args.docs)
    else:
        _caches.assume_last_level_cache(1 << 20 if args.quick else None)
        report.run(args.view, VIEWS[args.view], args.results, args.quick)


if __name__ == "__main__":
    main()
