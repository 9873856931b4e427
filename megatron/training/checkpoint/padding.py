"""The padded vocabulary at a resume: the saved number of rows is kept if the layout allows it, else a note states the change.

The embedding has the tokenizer's vocabulary rounded up to a multiple of the tensor ranks times --make-vocab-size-divisible-by. A
resume with other tensor ranks may pad to another size. Added rows start at random values and enter every token's softmax: a small
model's first loss rises by 5 %, and no shape error shows it.
"""

from __future__ import annotations

import dataclasses

from megatron.training.checkpoint.loader import index_of, tensor_shapes
from megatron.training.checkpoint.saver import EMBEDDING
from megatron.training.cli.config import CheckpointConfig, Config
from megatron.training.cli.rules.checkpoint import start_of
from megatron.training.initialize import on_first_rank
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Plan

DIVISIBLE_BY = "--make-vocab-size-divisible-by"
FIELD = "model.make_vocab_size_divisible_by"


def saved_rows(flags: CheckpointConfig) -> int | None:
    """Rows of the embedding in the checkpoint that a run starts from; None without a readable one. Collective.

    An unreadable checkpoint is no error here: loading it reports the fault.
    """

    def read() -> int | None:
        try:
            start = start_of(flags)
            shape = () if start is None else tensor_shapes(index_of(start.stored)).get(EMBEDDING, ())
        except ConfigError:
            return None
        return shape[0] if shape else None

    return on_first_rank(read)


def config_for_rows(config: Config, plan: Plan, vocabulary: int, rows: int) -> Config | None:
    """The configuration that pads the vocabulary to a number of rows; None if its tensor ranks do not divide them.

    Args:
        vocabulary: tokens of the tokenizer.
    """
    if rows < vocabulary or any(rows % stage.tensor for stage in plan.stages):
        return None
    divisor = rows // config.parallel.tensor_model_parallel_size
    return dataclasses.replace(config, model=dataclasses.replace(config.model, make_vocab_size_divisible_by=divisor))


def changed_rows_note(saved: int, rows: int, tensor: int) -> str:
    """A note that the embedding has another number of rows than the saved one, and the flag that keeps the saved number.

    Args:
        tensor: number of ranks that share the rows.
    """
    if rows > saved:
        effect = "they start at random values and enter the softmax, which raises the first losses"
        change = f"{rows - saved} rows of the vocabulary are new: {effect}"
    else:
        change = f"{saved - rows} padded rows of the vocabulary have left the softmax, which changes the first losses"
    if saved % tensor:
        return f"{change}; {tensor} tensor ranks cannot share the {saved} saved rows"
    return f"{change}; {DIVISIBLE_BY} {saved // tensor} keeps the {saved} saved rows"
