"""Check indexed datasets completely: every length, offset and document boundary, and every token id.

    python tools/check_data.py my_text_document --vocab-size 32000

A run checks samples of a large index before its first step; this tool reads the full index and all tokens. The status is 2 if a
dataset is damaged or has ids outside the vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron.training.data.sources import REBUILD, check_indexed_dataset, token_range
from moe_overlap.commands.exits import interruptible
from moe_overlap.commands.help_topics import Parser
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.version import VERSION_LINE


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    """Check the datasets and print a line for each; 2 at the first damaged one."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    parser.add_argument("prefix", nargs="+", help="PREFIX of PREFIX.bin and PREFIX.idx")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids must be below it")
    arguments = parser.parse_args(argv)
    try:
        for prefix in arguments.prefix:
            facts = check_indexed_dataset(prefix, "dataset", is_complete=True)
            _, highest = token_range(prefix, "dataset")
            if arguments.vocab_size is not None and highest >= arguments.vocab_size:
                rule = f"has the token id {highest}, the vocabulary has {arguments.vocab_size}"
                raise ConfigError("dataset", prefix, rule, f"give its tokenizer's --vocab-size, or {REBUILD}")
            print(f"{prefix}: {facts.sequences:,} sequences, {facts.tokens:,} tokens, the highest id is {highest}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
