"""The rows of a vocabulary that are padding, over a resume: as many as were saved, or a line says what others do.

An embedding has the tokenizer's vocabulary rounded up to a multiple that depends on the tensor ranks. In another layout that may
be another number of rows. New ones begin at random and join the softmax of every token: the first losses are higher (by 5 % of a
small model's), and no shape shows it.
"""

from __future__ import annotations

import dataclasses

from megatron.training.checkpoint.loader import index_of, tensor_shapes
from megatron.training.checkpoint.start import may_pass_over
from megatron.training.cli.config import CheckpointConfig, Config
from megatron.training.cli.rules.checkpoint import start_of
from megatron.training.initialize import on_first_rank
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Plan

EMBEDDING = "embedding.word_embeddings.weight"
DIVISIBLE_BY = "--make-vocab-size-divisible-by"
FIELD = "model.make_vocab_size_divisible_by"


def saved_rows(flags: CheckpointConfig) -> int | None:
    """Rows of the embedding in the checkpoint that a run starts from; None where there is none. Collective.

    A checkpoint that cannot be read is no error here: loading it says what is wrong.
    """

    def read() -> int | None:
        try:
            start = start_of(flags, () if may_pass_over(flags) else None)
            shape = () if start is None else tensor_shapes(index_of(start.stored)).get(EMBEDDING, ())
        except ConfigError:
            return None
        return shape[0] if shape else None

    return on_first_rank(read)


def keeping_rows(config: Config, plan: Plan, vocabulary: int, rows: int | None) -> Config | None:
    """The configuration under which the embedding has the saved rows; None where its layout cannot have so many.

    Args:
        vocabulary: the tokenizer's.
        rows: those that were saved.
    """
    if rows is None or rows < vocabulary or any(rows % stage.tensor for stage in plan.stages):
        return None
    divisor = rows // config.parallel.tensor_model_parallel_size
    return dataclasses.replace(config, model=dataclasses.replace(config.model, make_vocab_size_divisible_by=divisor))


def rows_told(saved: int, here: int, tensor: int) -> str:
    """A line on rows that differ, and the flag by which they would not.

    Args:
        tensor: ranks.
    """
    keeps = f"{DIVISIBLE_BY} {saved // tensor} keeps the {saved} that were saved"
    fix = keeps if saved % tensor == 0 else f"{tensor} tensor ranks cannot share the {saved} that were saved"
    if here > saved:
        effect = "they begin at random and join the softmax, which raises the first losses"
        what = f"{here - saved} rows of the vocabulary are new: {effect}"
    else:
        what = f"{saved - here} padded rows of the vocabulary are gone from the softmax, which changes the first losses"
    return f"{what}; {fix}"
