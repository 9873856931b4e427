"""Lower bounds of a uniform layout that need no captured graph: seconds of a step, and bytes of a stage.

Seconds. No product runs faster than the best efficiency of this GPU; exposed all-to-alls count in full; tensor ranks wait for
their output in every forward pass. `pipelined` bounds a step by the seconds of one micro-batch.

Bytes. An average stage holds its share of weights, gradients and optimizer states, sharded as far as the space allows. Of each
micro-batch in flight it holds the inputs of its layers, which full recomputation keeps, too.

A bound above the true value would lose plans without notice: `test_search_uniform.py` compares both with evaluated layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from moe_overlap.describe.model import (
    ModelDescription,
    Share,
    expert_parameters,
    rank_parameters,
    training_flops_per_token,
)
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.sizes import ACTIVATION_BYTES
from moe_overlap.tuner.cost.hardware import Features
from moe_overlap.tuner.cost.links import all_to_all_seconds, axis_group, collective_seconds
from moe_overlap.tuner.cost.machine import Machine
from moe_overlap.tuner.cost.operators import LOW_PRECISIONS, low_precision_rate
from moe_overlap.tuner.cost.pipeline import in_flight
from moe_overlap.tuner.cost.router import DISPATCH_LIBRARIES, library_sends
from moe_overlap.tuner.search.space import SearchSpace, UniformLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Lower bounds for one model, batch and machine."""

    model: ModelDescription
    template: Plan
    machine: Machine
    features: Features
    space: SearchSpace

    def step_seconds(self, layout: UniformLayout) -> float:
        """Lower bound of the seconds of a step of the layout."""
        plan = self.template
        data = plan.world_size // (layout.tensor * layout.context * layout.pipeline)
        micro_batches = plan.global_batch_size // (data * layout.micro_batch)
        through = self._compute_seconds(layout) + self._sent_seconds(layout)
        return pipelined(through, layout, micro_batches)

    @property
    def state_bytes(self) -> float:
        """Lower bound of the bytes that all GPUs of any plan hold together, unlike stages included: every weight, gradient and
        optimizer state once, but for those that the space moves to the host."""
        features = self.features
        widths = {
            "weights": features.weight_bytes,
            "gradients": features.gradient_bytes,
            "optimizer": features.optimizer_bytes,
        }
        bytes_each = sum(width for state, width in widths.items() if state not in self.space.offloads)
        return bytes_each * sum(_parameters(self.model, 1, 1, 1))

    def needed_bytes(self, layout: UniformLayout) -> float:
        """Lower bound of the bytes that any plan of the layout needs on its fullest stage."""
        features, plan, space = self.features, self.template, self.space
        dense, experts = _parameters(self.model, layout.tensor, layout.expert, layout.expert_tensor)
        ranks = plan.world_size // layout.pipeline
        data, expert_data = ranks // layout.tensor, ranks // (layout.expert * layout.expert_tensor)
        unsharded, sharded = dense + experts, dense / data + experts / expert_data
        level = max(space.zero_levels)
        if space.offloads:
            return 0.0
        weights, gradients, optimizer = (sharded if level >= first else unsharded for first in (3, 2, 1))
        states = features.weight_bytes * weights + features.gradient_bytes * gradients
        states += features.optimizer_bytes * optimizer
        # Averages over the stages: the fullest stage holds at least as much.
        micro_batches = plan.global_batch_size * layout.context // (data * layout.micro_batch)
        stages = layout.pipeline
        equal_chunks = (1,) * layout.virtual
        flying = sum(in_flight(stages, index, micro_batches, equal_chunks) for index in range(stages)) / stages
        inputs = self.model.num_layers * self._hidden_bytes(layout) / layout.tensor
        return (states + flying * inputs) / stages

    def _hidden_bytes(self, layout: UniformLayout) -> float:
        """Hidden states of a micro-batch on the tensor ranks together."""
        tokens = layout.micro_batch * self.template.sequence_length / layout.context
        return tokens * self.model.hidden_size * ACTIVATION_BYTES[self.template.precision]

    def _compute_seconds(self, layout: UniformLayout) -> float:
        """Seconds of the products of a micro-batch, over all stages."""
        if self.machine.lookup is not None:  # Measured seconds of operators have no bound.
            return 0.0
        constants, precision = self.machine.constants, self.features.precision
        gpu = self.machine.cluster.group_of(0).gpu
        best = max(constants.gemm, constants.grouped_gemm, constants.attention_forward, constants.attention_backward)
        rate = gpu.bf16_tflops * 1e12 * best
        if precision in LOW_PRECISIONS:
            rate = max(rate, low_precision_rate(gpu, precision, constants))
        flops = _flops(self.model, self.template.sequence_length)
        tokens = layout.micro_batch * self.template.sequence_length / (layout.tensor * layout.context)
        return flops * tokens / rate

    def _sent_seconds(self, layout: UniformLayout) -> float:
        """Seconds of a micro-batch's exposed communication, over all stages."""
        features, model = self.features, self.model
        links, world = self.machine.cluster.group_of(0), self.template.world_size
        rates, hidden = self.machine.constants.link_rates, self._hidden_bytes(layout)
        seconds = self.exchange_seconds(layout)
        if not features.overlap_tensor:
            group = axis_group(layout.tensor, 1, world, links)
            # Latent attention gathers its latents, which are narrower than hidden states: only the scatter counts.
            kinds = ("reduce_scatter",) if model.latent_attention is not None else ("all_gather", "reduce_scatter")
            for kind in kinds:
                seconds += model.num_layers * float(collective_seconds(kind, hidden, group, rates))
        return seconds

    def exchange_seconds(self, layout: UniformLayout) -> float:
        """Exposed seconds of the dispatch and combine of a micro-batch's tokens, in both passes and over all stages."""
        features, model = self.features, self.model
        if features.overlap_experts or features.overlap_shared_expert:
            return 0.0
        links, world = self.machine.cluster.group_of(0), self.template.world_size
        rates, hidden = self.machine.constants.link_rates, self._hidden_bytes(layout)
        # Dispatch and combine, in both passes.
        passes, width = 2.0 * sum(model.moe_layers), (model.moe_latent_size or model.hidden_size) / model.hidden_size
        if features.dispatcher == "allgather":
            every = axis_group(layout.expert * layout.expert_tensor, 1, world, links)
            gathered = hidden / layout.tensor * width * every.size
            kinds = ("all_gather", "reduce_scatter")
            return passes * sum(float(collective_seconds(kind, gathered, every, rates)) for kind in kinds)
        group = axis_group(layout.expert, layout.expert_tensor, world, links)
        rows, share = hidden / layout.tensor * width * model.router_topk, 1.0
        if features.dispatcher in DISPATCH_LIBRARIES:
            choices = max(1, model.router_topk)
            ranks, share = library_sends(model.num_experts, choices, features.router_groups, group)
            rows = rows * ranks / choices
        return 2.0 * passes * float(all_to_all_seconds(rows, group, rates, share))


def pipelined(through: float, layout: UniformLayout, micro_batches: int) -> float:
    """Lower bound of a step over all ways to divide a micro-batch's seconds C among the stages.

    1F1B with G > S: the weighted mean of pipeline.py's chains in which every stage counts the same is the step of equal stages.
    1F1B with fewer micro-batches: the largest chain Σ_(j<s) t_j + G t_s is smallest if t_s falls by the factor 1 - 1 / G from
    stage to stage. Interleaved: the chain at stage s takes C / v and at least G v - 1 - (S - 1 - s) further passes of t_s / v;
    the largest of these products is smallest if all are equal.

    Args:
        through: C, seconds of one micro-batch over all stages.
    """
    stages, virtual = layout.pipeline, layout.virtual
    if virtual == 1 and micro_batches > stages:
        return through * (micro_batches + stages - 1) / stages
    if virtual == 1:
        return through / (1.0 - (1.0 - 1.0 / micro_batches) ** stages)
    if micro_batches < stages:
        return micro_batches * through / stages
    passes = (micro_batches * virtual - stages + stage for stage in range(stages))
    return through / virtual * (1.0 + 1.0 / sum(1.0 / count for count in passes))


_flops = lru_cache(training_flops_per_token)


@lru_cache(maxsize=1024)
def _parameters(model: ModelDescription, tensor: int, expert: int, expert_tensor: int) -> tuple[float, float]:
    """Parameters of a rank if one stage held all layers: of dense parts, and of experts."""
    every = ((0, model.num_layers),)
    share = Share(chunks=every, tensor=tensor, expert=expert, expert_tensor=expert_tensor)
    layers = sum(model.moe_layers) + (model.mtp_layers if model.moe_layers[-1] else 0)
    experts = 0.0
    if model.num_experts:
        experts = layers * model.num_experts // expert * expert_parameters(model, expert_tensor)
    return rank_parameters(model, share).total - experts, experts
