"""The model's end: cross entropy over a split vocabulary, and multi-token prediction, with explicit process groups.

Cross entropy takes megatron-core's steps (tensor_parallel/cross_entropy.py). Its own functions around them cannot be used: one
reads a global group, the fused one rounds the logits' gradient to bf16 whatever their type (fusions/fused_cross_entropy.py:82).

Multi-token prediction (DeepSeek-V3, section 2.2): D layers follow the decoder. The k-th combines its predecessor's output at a
position (the decoder's, for the first) with the embedding of the token k further on, and predicts the token after that, through
the model's own output layer. Their mean loss, weighted, adds to the gradient; the reported loss stays that of the next token.
megatron-core's model and layer fetch their groups from `parallel_state` (gpt_model.py `_postprocess`,
multi_token_prediction.py), which this fork never initialises. Under context parallelism megatron-core's losses are means over
each rank's tokens; here they are means over the sample.

Legend: S sequence (this rank's share of it), B batch, H hidden, V vocabulary (this rank's share of it).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy as Steps
from megatron.core.tensor_parallel.utils import VocabUtility
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
    roll_tensor,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor


def cross_entropy(logits_SBV: Tensor, labels_SB: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Losses [S, B] in fp32, nats; the logits get a gradient of their own type, rounded once from fp32.

    Args:
        logits_SBV: fp32 logits are overwritten: the probabilities take their memory, as in megatron-core.
        labels_SB: numbers in the whole vocabulary.
        group: the tensor-parallel ranks, in the order of their shares of the vocabulary.
    """
    losses: Tensor = _CrossEntropy.apply(logits_SBV, labels_SB, group)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_SBV: Tensor, labels_SB: Tensor, group: dist.ProcessGroup) -> Tensor:
        wide_SBV, largest_SB = Steps.calculate_logits_max(logits_SBV)
        dist.all_reduce(largest_SB, op=dist.ReduceOp.MAX, group=group)
        first, end = VocabUtility.vocab_range_from_per_partition_vocab_size(
            logits_SBV.size(-1), group.rank(), group.size()
        )
        elsewhere_SB, columns, chosen_SB, sums_SB, wide_SBV = Steps.calculate_predicted_logits(
            wide_SBV, labels_SB, largest_SB, first, end
        )
        both = torch.stack((chosen_SB, sums_SB))
        dist.all_reduce(both, group=group)
        probabilities_SBV, losses_SB = Steps.calculate_cross_entropy_loss(wide_SBV, *both.unbind())
        ctx.save_for_backward(probabilities_SBV, elsewhere_SB, columns)
        ctx.logits_type = logits_SBV.dtype
        return losses_SB

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (of_losses_SB,) = gradients
        probabilities_SBV, elsewhere_SB, columns = ctx.saved_tensors
        flat, rows, is_local, wide_SBV = Steps.prepare_gradient_calculation_operands(probabilities_SBV, elsewhere_SB)
        gradient_SBV = Steps.calculate_gradients(flat, rows, columns, is_local, wide_SBV, of_losses_SB)
        return gradient_SBV.to(ctx.logits_type), None, None


class LanguageModel(GPTModel):
    """megatron-core's model with `cross_entropy` as its loss. The runtime's executor calls the same method."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Losses [B, S] of labels [B, S] and logits [S, B, V]. Megatron-core's name, which its forward calls."""
        losses_SB = cross_entropy(logits, labels.transpose(0, 1).contiguous(), self.pg_collection.tp)
        return losses_SB.transpose(0, 1).contiguous()


def prediction_spec(layer: ModuleSpec, norm: Any, linear: Any, count: int) -> MultiTokenPredictionBlockSubmodules:
    """The spec of `count` prediction layers.

    Args:
        layer: the spec of the transformer layer inside each.
        norm, linear: classes of the norms and of the column-parallel projection.
    """
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=linear, transformer_layer=layer, layer_norm=norm
    )
    return MultiTokenPredictionBlockSubmodules([ModuleSpec(module=PredictionLayer, submodules=parts)] * count)


class PredictionLoss(torch.nn.Module):
    """The loss of one prediction layer, a module so that hooks find its beginning and end."""

    def forward(self, model: Any, hidden_SBH: Tensor, weight: Tensor | None, labels_BS: Tensor, mask_BS: Tensor) -> Any:
        """Losses [B, S], 0 if they do not count, of labels that are already rolled to the layer's own."""
        logits, _ = model.output_layer(hidden_SBH, weight=weight)
        return mask_BS * model.compute_language_model_loss(labels_BS, logits)


class PredictionLayer(MultiTokenPredictionLayer):
    """megatron-core's layer, whose modules get their groups from the constructor; its number follows the decoder's."""

    def __init__(
        self,
        config: Any,
        submodules: MultiTokenPredictionLayerSubmodules,
        layer_number: int,
        vp_stage: int | None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        MegatronModule.__init__(self, config=config)
        self.sequence_parallel, self.submodules, self.vp_stage = config.sequence_parallel, submodules, vp_stage
        self.layer_number, self.offload_context = layer_number, nullcontext()
        self.cp_group, self.tp_group = pg_collection.cp, pg_collection.tp
        sizes = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm, self.hnorm = (build_module(norm, **sizes) for norm in (submodules.enorm, submodules.hnorm))
        self.eh_proj = build_module(
            submodules.eh_proj,
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=pg_collection.tp,
        )
        before = get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.transformer_layer = build_module(
            submodules.transformer_layer,
            config=config,
            layer_number=config.num_layers + layer_number - before,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        )
        self.final_layernorm = build_module(submodules.layer_norm, **sizes)
        self.loss = PredictionLoss()

    def _concat_embeddings(self, hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
        """[S, B, H] twice -> [S, B, H]: normed, side by side, projected. Megatron-core's name, which its forward calls."""
        both = torch.cat((self.enorm(decoder_input), self.hnorm(hidden_states)), dim=-1)
        projected = gather_from_tensor_model_parallel_region(self.eh_proj(both)[0], group=self.tp_group)
        return (
            scatter_to_sequence_parallel_region(projected, group=self.tp_group) if self.sequence_parallel else projected
        )


class Targets(NamedTuple):
    """Inputs and labels of a prediction layer; its successor rolls them by one more token."""

    tokens_BS: Tensor
    positions_BS: Tensor
    labels_BS: Tensor
    mask_BS: Tensor


class PredictingModel(LanguageModel):
    """The last chunk of a model with prediction layers.

    Attributes:
        prediction_report: sum of the losses and number of tokens of every prediction layer, in turn, for the last micro-batch.
        mean_counts: with a per-token loss, the tokens of a micro-batch that count in each prediction layer, in the mean over the
            step; set before the step.
    """

    mtp: Any
    prediction_report: Tensor
    mean_counts: Tensor | None = None

    def __init__(
        self,
        *,
        predictions: MultiTokenPredictionBlockSubmodules,
        pg_collection: ProcessGroupCollection,
        **arguments: Any,
    ) -> None:
        super().__init__(pg_collection=pg_collection, **arguments)
        self.mtp_process = True
        if not self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=self.config,
                vocab_size=self.vocab_size,
                max_sequence_length=self.max_sequence_length,
                position_embedding_type=self.position_embedding_type,
                tp_group=pg_collection.tp,
            )
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
            if self.share_embeddings_and_output_weights:
                self.output_layer.weight = None  # the copy of the embedding takes its place
        self.mtp = MultiTokenPredictionBlock(self.config, predictions, arguments["vp_stage"], pg_collection)
        self.mtp.tp_group = pg_collection.tp  # read by its sharded_state_dict
        if self.decoder.final_layernorm is None:  # this chunk has no layer of the decoder
            self.decoder.final_layernorm = build_module(
                self.transformer_layer_spec.layer_norm,
                config=self.config,
                hidden_size=self.config.hidden_size,
                eps=self.config.layernorm_epsilon,
            )
        super().setup_embeddings_and_output_layer()

    def setup_embeddings_and_output_layer(self) -> None:
        """Do nothing: GPTModel's constructor calls this before there is an embedding; this class's constructor does it later."""

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        *,
        loss_mask: Tensor,
        **inputs: Any,
    ) -> Tensor:
        """Losses [B, S] of the next tokens; their gradient carries the prediction layers' losses."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        ahead, targets = hidden_states, Targets(input_ids, position_ids, labels, loss_mask)
        shared = {
            name: inputs[name] for name in ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
        }
        reports = []
        for number, layer in enumerate(self.mtp.layers):
            ahead, targets, losses_BS, count = self.predict(layer, ahead, targets, weight, shared)
            reports += [losses_BS.detach().sum(), count]
            divisor = count if self.mean_counts is None else self.mean_counts[number]
            hidden_states = MTPLossAutoScaler.apply(hidden_states, self.weighted(losses_BS, divisor))
        self.prediction_report = torch.stack(reports)
        logits, _ = self.output_layer(hidden_states, weight=weight)
        return self.compute_language_model_loss(labels, logits)

    def predict(
        self, layer: Any, hidden_SBH: Tensor, targets: Targets, weight: Tensor | None, shared: dict[str, Any]
    ) -> tuple[Tensor, Targets, Tensor, Tensor]:
        """Run a prediction layer and its loss.

        Args:
            hidden_SBH, targets: hidden states and targets of its predecessor.
            weight: the output layer's weight if it is the embedding's.
            shared: attention mask and rotary tables.
        Returns:
            Its hidden states and targets, its losses [B, S], and the number of losses that count.
        """
        # The embedding's own hooks belong to its pass before the decoder.
        ahead, tokens_BS, positions_BS = layer(
            input_ids=targets.tokens_BS,
            position_ids=targets.positions_BS,
            hidden_states=hidden_SBH,
            embedding=self.embedding.forward,
            **shared,
        )
        labels_BS, _ = roll_tensor(targets.labels_BS, cp_group=self.cp_group)
        mask_BS, count = roll_tensor(targets.mask_BS, cp_group=self.cp_group)
        losses_BS = layer.loss(self, ahead, weight, labels_BS, mask_BS)
        return ahead, Targets(tokens_BS, positions_BS, labels_BS, mask_BS), losses_BS, count

    def weighted(self, losses_BS: Tensor, count: Tensor) -> Tensor:
        """This rank's share of one layer's weighted loss, which the step scales as its balancing losses.

        Args:
            losses_BS: 0 if they do not count.
            count: number of this rank's losses that count; with a per-token loss, of a micro-batch in the mean over the step.
        """
        if not self.config.calculate_per_token_loss:
            count = count.clone()
            dist.all_reduce(count, group=self.cp_group)
            count = count.clamp(min=1)
        return self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers * losses_BS / count
