"""Uniform layouts, which all stages of a plan share; their enumeration; and the plan of a layout.

1. `SearchSpace` lists the free decisions of a search; `SEARCH_SPACES` is the table of `--search-space`.
2. `uniform_layouts` enumerates the degrees that megatron-core executes for a model on a number of GPUs. It leaves out two kinds
   that are never the best: tensor-parallel groups across the network, since their ranks communicate in every layer; and CP with a
   micro-batch that shares a divisor c with it, since dividing both by c keeps the tokens per rank and sends fewer.
3. `uniform_plan` makes the plan of a layout with a memory choice.

Rules of divisibility are those of `plan/rules/stages.py`; a test compares every enumerated layout, and every missing one, with
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from math import gcd, lcm

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Devices, Offload, Plan, Recompute, StagePlan

MOST_VIRTUAL = 8
"""Most model chunks of a stage: each one adds transfers, and hides less of the bubble than the one before."""
MOST_SAMPLES = 32
"""Most samples of a micro-batch."""
LEVELS = (0, 1, 2, 3)
"""Levels of ZeRO."""
ON_HOST = ("weights", "gradients", "optimizer", "activations")
"""Tensors that may be offloaded to host memory; fields of `Offload`."""


class Restriction(StrEnum):
    """A restriction on the stages of plans on sub-meshes (pipeline/sub_meshes.py)."""

    FREE = "free"
    EQUAL_OPERATORS = "equal operators"
    """All stages have the same number of captured operators, as far as complete layers allow (Alpa's "equal operator")."""
    ONE_DEVICE = "one device"
    """Every stage has one device: no parallelism inside a stage (Alpa's "inter-op only")."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The decisions that a search makes in addition to the layout.

    Attributes:
        recomputes: True if layers and modules may be recomputed.
        all_layers: True if only all layers or none are recomputed, as Megatron-LM's users do, and no modules.
        zero_levels: the ZeRO levels.
        offloads: the members of `ON_HOST` that may be offloaded.
        frees_stages: True if every stage has its own layers and memory choice.
        equal_layers: True if stages keep the layers of a uniform plan, even with `frees_stages`.
        one_memory: True if stages keep the memory choice of the uniform plan, even with `frees_stages`.
        only_data: True if all ranks are data ranks.
        one_stage: True if all GPUs are one stage (Alpa's "intra-op only").
        shards_operators: True if the best sharding of every operator is searched, too.
        meshes: restrictions of the searches of plans on sub-meshes; empty: none is searched.
        uniform: True if uniform plans are in the space.
        overlaps: True if plans may hide their all-to-alls behind computation.
    """

    name: str
    recomputes: bool
    zero_levels: tuple[int, ...] = (1,)
    offloads: tuple[str, ...] = ()
    frees_stages: bool = False
    equal_layers: bool = False
    one_memory: bool = False
    only_data: bool = False
    one_stage: bool = False
    shards_operators: bool = False
    meshes: tuple[Restriction, ...] = ()
    uniform: bool = True
    all_layers: bool = False
    overlaps: bool = True

    def has(self, layout: UniformLayout, gpus: int | None = None) -> bool:
        """True if a layout on a number of GPUs is in the space; the number is read only if each stage has one GPU."""
        if self.one_stage and layout.pipeline > 1:
            return False
        if self.meshes == (Restriction.ONE_DEVICE,):
            return layout.pipeline == gpus and layout.virtual == 1
        return not self.only_data or (layout.ranks == (1, 1, 1, 1) and layout.pipeline == 1)


MEGATRON = SearchSpace("megatron", recomputes=False)
RECOMPUTE = SearchSpace("recompute", recomputes=True)
STAGES = SearchSpace("stages", recomputes=True, frees_stages=True, meshes=(Restriction.FREE,))
ZERO = SearchSpace("zero", recomputes=True, zero_levels=LEVELS)
OFFLOAD = replace(ZERO, name="offload", offloads=ON_HOST)
FULL = replace(OFFLOAD, name="full", frees_stages=True, meshes=tuple(Restriction))
EXECUTED_OFFLOADS = tuple(name for name in ON_HOST if name != "gradients")
"""Tensors that this fork offloads: the norm of the step reads all gradients on the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceOfTargets:
    """A value of `--search-space`.

    Attributes:
        about: its decisions in addition to the layout, for `--help`.
        any_target: the space of the target `any`.
        moe_overlap, megatron_lm: the part that this fork, or Megatron-LM, executes; None if it adds no plan for Megatron-LM.
    """

    about: str
    any_target: SearchSpace
    moe_overlap: SearchSpace
    megatron_lm: SearchSpace | None = None

    def of(self, target: str) -> SearchSpace | None:
        """The space that is searched for `moe-overlap`, `megatron-lm` or `any`."""
        return {"moe-overlap": self.moe_overlap, "megatron-lm": self.megatron_lm}.get(target, self.any_target)


SEARCH_SPACES = {
    "megatron": SpaceOfTargets(
        about="ZeRO-1, no recomputation", any_target=MEGATRON, moe_overlap=MEGATRON, megatron_lm=MEGATRON
    ),
    "recompute": SpaceOfTargets(
        about="and recomputation, the same on every stage",
        any_target=RECOMPUTE,
        moe_overlap=RECOMPUTE,
        megatron_lm=RECOMPUTE,
    ),
    "stages": SpaceOfTargets(
        about="each stage with its own layers and recomputation",
        any_target=STAGES,
        moe_overlap=STAGES,
        # Megatron-LM's flags set the layers of each stage, and one recomputation for all stages.
        megatron_lm=replace(STAGES, one_memory=True, meshes=()),
    ),
    # Megatron-FSDP shards gradients and weights over the replicas (ZeRO-2 and 3), without pipelines.
    "zero": SpaceOfTargets(
        about="ZeRO 0 to 3",
        any_target=ZERO,
        moe_overlap=replace(ZERO, frees_stages=True, meshes=(Restriction.FREE,)),
        megatron_lm=replace(ZERO, zero_levels=(1, 2, 3)),
    ),
    "offload": SpaceOfTargets(
        about="and states in host memory",
        any_target=OFFLOAD,
        moe_overlap=replace(OFFLOAD, offloads=EXECUTED_OFFLOADS, frees_stages=True, meshes=(Restriction.FREE,)),
        # Megatron-LM offloads activations of complete layers. Its offloaded optimizer steps on the CPU, which is not priced.
        megatron_lm=replace(OFFLOAD, zero_levels=(1, 2, 3), offloads=("activations",)),
    ),
    "full": SpaceOfTargets(
        about="and each stage with its own of all these",
        any_target=FULL,
        moe_overlap=replace(FULL, offloads=EXECUTED_OFFLOADS),
    ),
}
"""Value of `--search-space` -> its spaces; each includes the one before."""
REMOVED_SPACES = {
    **dict.fromkeys(("data", "zero2", "zero3"), "zero"),
    **dict.fromkeys(("equal-layer", "intra-only", "inter-only"), "full"),
    "equal-operator": "stages",
}
"""Removed values of `--search-space`, spaces that papers compare with -> a space that includes their plans."""


NARROW_DEFAULT = "stages"
"""The default space of targets that do not execute `full`."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class UniformLayout:
    """Degrees that all stages share; numbers of ranks, chunks and samples.

    Attributes:
        dispatcher: the token dispatcher if it differs from that of the flags; else empty.
        paired: True if two micro-batches run at a time, with Megatron-LM's overlap of their all-to-alls.
    """

    tensor: int
    context: int
    expert: int
    expert_tensor: int
    pipeline: int
    virtual: int
    micro_batch: int
    dispatcher: str = ""
    paired: bool = False

    @property
    def ranks(self) -> tuple[int, int, int, int]:
        """The degrees inside a stage, on which the cost of its layers depends."""
        return self.tensor, self.context, self.expert, self.expert_tensor

    @property
    def name(self) -> str:
        """The layout in the notation of Megatron's papers, such as `TP2 PP4, micro-batch 1`."""
        degrees = [("TP", self.tensor), ("CP", self.context), ("PP", self.pipeline), ("VPP", self.virtual)]
        degrees += [("EP", self.expert)]
        shown = [f"{axis}{size}" for axis, size in degrees if size > 1] or ["DP only"]
        if self.expert_tensor != self.tensor:
            shown.append(f"ETP{self.expert_tensor}")
        shown += [f"by {self.dispatcher}"] if self.dispatcher else []
        samples = f"micro-batch {self.micro_batch}"
        return f"{' '.join(shown)}, {f'two at a time of {samples}' if self.paired else samples}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The run whose layouts are enumerated.

    Attributes:
        domain_gpus: GPUs of an NVLink domain or of a node, whichever has more: the most ranks of a tensor-parallel group.
        micro_batch: the only size of a micro-batch; None: every divisor of the samples up to MOST_SAMPLES.
    """

    gpus: int
    domain_gpus: int
    sequence_length: int
    global_batch_size: int
    micro_batch: int | None = None

    def micro_batches(self, samples: int) -> list[int]:
        """Sizes of a micro-batch if a data rank has so many samples."""
        if self.micro_batch is None:
            return _divisors(samples, MOST_SAMPLES)
        return [] if samples % self.micro_batch else [self.micro_batch]


def uniform_layouts(model: ModelDescription, run: Run) -> Iterator[UniformLayout]:
    """Every layout that divides model, batch and GPUs."""
    for pipeline in _divisors(run.gpus, model.num_layers):
        ranks = run.gpus // pipeline
        for tensor, context in _attention_degrees(model, run, ranks):
            data = ranks // (tensor * context)
            if run.global_batch_size % data:
                continue
            samples = run.global_batch_size // data
            cuts = [
                (virtual, micro_batch)
                for micro_batch in run.micro_batches(samples)
                for virtual in _virtual_stages(model, pipeline, samples // micro_batch)
            ]
            cuts = [(virtual, micro_batch) for virtual, micro_batch in cuts if gcd(context, micro_batch) == 1]
            for expert, expert_tensor in _expert_degrees(model, run, ranks, tensor):
                for virtual, micro_batch in cuts:
                    yield UniformLayout(
                        tensor=tensor,
                        context=context,
                        expert=expert,
                        expert_tensor=expert_tensor,
                        pipeline=pipeline,
                        virtual=virtual,
                        micro_batch=micro_batch,
                    )


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [size for size in range(1, min(number, most or number) + 1) if number % size == 0]


def _attention_degrees(model: ModelDescription, run: Run, ranks: int) -> Iterator[tuple[int, int]]:
    """Tensor- and context-parallel ranks of a stage."""
    widths = [model.num_attention_heads, model.shared_expert_hidden_size]
    widths += [] if all(model.moe_layers) else [model.ffn_hidden_size]
    for tensor in _divisors(ranks, run.domain_gpus):
        # A tensor rank holds complete groups of queries, or several ranks share a group.
        groups = model.num_query_groups if model.latent_attention is None else tensor
        if any(width % tensor for width in widths) or (groups % tensor and tensor % groups):
            continue
        for context in _divisors(ranks // tensor):
            pieces = lcm(tensor * context, 2 * context if context > 1 else 1)
            if run.sequence_length % pieces == 0:
                yield tensor, context


def _expert_degrees(model: ModelDescription, run: Run, ranks: int, tensor: int) -> Iterator[tuple[int, int]]:
    """Expert- and expert-tensor-parallel ranks of a stage; for a dense model 1 and the tensor ranks of attention."""
    if not model.num_experts:
        yield 1, tensor
        return
    for expert_tensor in _divisors(ranks, run.domain_gpus):
        if model.moe_ffn_hidden_size % expert_tensor or (model.linear_bias and expert_tensor > 1):
            continue  # megatron-core does not split experts with biases
        for expert in _divisors(ranks // expert_tensor, model.num_experts):
            if model.num_experts % expert == 0:
                yield expert, expert_tensor


def _virtual_stages(model: ModelDescription, pipeline: int, micro_batches: int) -> Iterator[int]:
    """Model chunks of a stage: one, or several if the number of micro-batches is a multiple of the stages."""
    yield 1
    if pipeline > 1 and micro_batches % pipeline == 0:
        yield from range(2, min(MOST_VIRTUAL, model.num_layers // pipeline) + 1)


def layers_of_parts(num_layers: int, parts: int) -> list[int]:
    """Layers of each part of a pipeline, as equal as possible.

    Parts with one layer less are at the ends, which also run the embedding and the loss.
    """
    ends = [end for place in range(parts) for end in (parts - 1 - place, place)]
    short = set(list(dict.fromkeys(ends))[: -num_layers % parts])
    return [-(-num_layers // parts) - (place in short) for place in range(parts)]


def layers_of_chunks(num_layers: int, pipeline: int, virtual: int) -> list[int]:
    """Layers of each chunk of an interleaved pipeline in the order of the model, as equal as possible.

    Stages wait for each other's longer chunks (uneven_chunks.py), least if all stages have them at the same time. So the first
    rows of chunks have one layer more; in the row that is longer only in part, the stages in the middle have it. The last chunks,
    which also run the loss, are short.
    """
    least, longer = divmod(num_layers, pipeline * virtual)
    rows, rest = divmod(longer, pipeline)
    from_middle = sorted(range(pipeline), key=lambda stage: (stage == pipeline - 1, stage == 0, stage))
    long_stages = set(from_middle[:rest])
    return [
        least + (row < rows or (row == rows and stage in long_stages))
        for row in range(virtual)
        for stage in range(pipeline)
    ]


@cache
def chunks_of(num_layers: int, pipeline: int, virtual: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The layer ranges of every stage's chunks."""
    one_each = virtual == 1
    sizes = layers_of_parts(num_layers, pipeline) if one_each else layers_of_chunks(num_layers, pipeline, virtual)
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    ranges = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return tuple(tuple(ranges[stage::pipeline]) for stage in range(pipeline))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryChoice:
    """Decisions about memory that all stages share.

    Attributes:
        layers: number of layers per chunk that are recomputed completely.
        every_layer: True if all layers are recomputed and chunks have different numbers of them.
        modules: modules that all layers recompute; if there are any, `layers` and `every_layer` are not read.
    """

    layers: int = 0
    every_layer: bool = False
    modules: tuple[str, ...] = ()
    zero_level: int = 1
    offload: Offload = Offload()

    @property
    def moves_states(self) -> bool:
        """Whether parameter groups step by themselves, as `StagePlan.is_decoupled`."""
        return self.zero_level > 1 or self.offload != Offload()

    @property
    def name(self) -> str:
        """The decisions that are none of the defaults."""
        shown = [f"recompute {', '.join(self.modules)}"] if self.modules else []
        shown += [f"recompute {self.layers} layer{'s' * (self.layers > 1)} of a chunk"] if self.layers else []
        shown += ["recompute every layer"] if self.every_layer else []
        shown += [f"ZeRO-{self.zero_level}"] if self.zero_level != 1 else []
        shares = [("weights", self.offload.weights), ("gradients", self.offload.gradients)]
        shares += [("optimizer", self.offload.optimizer), ("activations", self.offload.activations)]
        shown += [f"{share:.0%} of {what} on the host" for what, share in shares if share]
        return ", ".join(shown)


PLAIN_MEMORY = MemoryChoice()


def uniform_plan(template: Plan, num_layers: int, layout: UniformLayout, memory: MemoryChoice = PLAIN_MEMORY) -> Plan:
    """The plan of a layout.

    Args:
        template: its model, machines, batch and precision stay.
    """
    pipeline = layout.pipeline
    ranks = template.world_size // pipeline
    data = ranks // (layout.tensor * layout.context)
    stages = tuple(
        StagePlan(
            chunks=chunks,
            devices=Devices(mesh=(1, ranks), ranks=tuple(range(index * ranks, (index + 1) * ranks))),
            micro_batch_size=layout.micro_batch,
            gradient_accumulation_steps=template.global_batch_size // (layout.micro_batch * data),
            tensor=layout.tensor,
            context=layout.context,
            data=data,
            expert=layout.expert,
            expert_tensor=layout.expert_tensor,
            zero_level=memory.zero_level,
            recompute=recompute_of(memory, chunks),
            offload=memory.offload,
        )
        for index, chunks in enumerate(chunks_of(num_layers, pipeline, layout.virtual))
    )
    return replace(
        template,
        pipeline_schedule="interleaved-1f1b" if layout.virtual > 1 else "1f1b",
        embedding_stage=0,
        mtp_stage=None if template.mtp_stage is None else pipeline - 1,
        loss_stage=pipeline - 1,
        stages=stages,
        transfers=(),
        predicted=None,
    )


def recompute_of(memory: MemoryChoice, chunks: Sequence[tuple[int, int]]) -> Recompute:
    """The recomputation of a stage with these chunks."""
    longest = max(last - first for first, last in chunks)
    if memory.modules:
        return Recompute(layers=longest, granularity="selective", modules=memory.modules)
    if memory.every_layer:
        return Recompute(layers=1, granularity="uniform")
    if memory.layers:
        return Recompute(layers=min(memory.layers, longest), granularity="full")
    return Recompute()
