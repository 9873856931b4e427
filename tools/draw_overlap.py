"""Draw one step of one rank without and with overlap, from two traces, as a self-contained SVG.

    python tools/draw_overlap.py without.json with.json --output docs/overlap.svg

Both files are traces in the format of `moe_overlap/plan/trace.py`, as `pretrain_moe.py --trace`, `tools/predict.py --trace` and
`tools/benchmark_overlap.py --traces` write them. The picture is that of `moe_overlap/report/picture.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Only the folder of a script is on its path: the package `tools` is one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.commands.exits import interruptible
from moe_overlap.commands.help_topics import Parser
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.trace import read_traces
from moe_overlap.report.picture import draw, step_of


@interruptible
def main(argv: Sequence[str]) -> int:
    """Read both traces and write the picture; returns the exit status."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("without", type=Path, help="trace of a step without overlap")
    parser.add_argument("overlapped", metavar="with", type=Path, help="trace of the same step with overlap")
    parser.add_argument("--output", type=Path, default=Path("overlap.svg"), help="file to write")
    parser.add_argument("--rank", type=int, default=0, help="the rank that is drawn")
    arguments = parser.parse_args(argv)
    try:
        steps = []
        for path, title in ((arguments.without, "Without overlap"), (arguments.overlapped, "With overlap")):
            spans = {rank: spans for file in read_traces(path) for rank, spans in file.spans.items()}
            if arguments.rank not in spans:
                ranks = ", ".join(map(str, sorted(spans)))
                raise ConfigError("--rank", arguments.rank, f"is not in {path}", f"choose among {ranks}")
            steps.append(step_of(spans[arguments.rank], title))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(draw(steps), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
