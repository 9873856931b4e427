"""Inner stages of a pipeline that are alike: looked at once, and renamed.

Two stages are alike if they have the same parallelism, layers of the same kinds in the same order, and the same overlap at the
same places. The first and the last stage are like no other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import replace

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.folded import Block, Contact, Folded
from moe_overlap.tuner.cost.instruction_seconds import StagePrices

LAYER = re.compile(r"(?<=\bL)\d+|(?<=\blayer=)\d+")
STAGE = re.compile(r"(?<=\bS)\d+|(?<=>S)\d+")


def likeness(plan: Plan, index: int, model: ModelDescription, here: StagePrices) -> Hashable:
    """Equal for stages that are alike.

    Args:
        here: prices of the stage; those of one family share their `priced`.
    """
    if index in (0, len(plan.stages) - 1) or plan.transfers:
        return index
    stage = plan.stages[index]
    place = {layer: f"{chunk}:{n}" for chunk, span in enumerate(stage.chunks) for n, layer in enumerate(range(*span))}
    overlap = LAYER.sub(lambda found: place[int(found[0])], repr(stage.overlap))
    overlap = STAGE.sub(lambda found: f"{int(found[0]) - index:+}", overlap)
    kinds = tuple(tuple((model.moe_layers[n], model.windows[n]) for n in range(*span)) for span in stage.chunks)
    return id(here.priced), here.priced.family.counts[:, here.column].tobytes(), kinds, overlap


def renamed(folded: Folded, plan: Plan, index: int) -> Folded:
    """What a stage does, as another one that is like it does it."""
    shift = index - folded.stage

    def shifted(name: str) -> str:
        return STAGE.sub(lambda found: str(int(found[0]) + shift), name)

    def transfer(i: Instruction) -> Instruction:
        peers = tuple(plan.stages[plan.stage_of(peer) + shift].devices.ranks[0] for peer in i.peers)
        return replace(i, name=shifted(i.name), channel=shifted(i.channel), stage=index, peers=peers)

    def contact(one: Contact) -> Contact:
        return replace(one, transfer=transfer(one.transfer))

    def block(one: Block) -> Block:
        return replace(one, contacts=tuple(map(contact, one.contacts)))

    blocks = {key: block(one) for key, one in folded.blocks.items()}
    return replace(folded, rank=plan.stages[index].devices.ranks[0], stage=index, blocks=blocks)


def renames(plan: Plan, index: int, other: int) -> Callable[[str], str]:
    """Names of a stage's operators -> those of the other one at the same places."""
    here, there = plan.stages[index].layers, plan.stages[other].layers
    layers = dict(zip(here, there, strict=True))
    return lambda name: LAYER.sub(lambda found: str(layers[int(found[0])]), name)
