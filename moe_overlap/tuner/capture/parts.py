"""Runs each part of a built model once per sample batch and turns the recording into a graph.

Legend: S tokens of a sample that this rank holds, B samples, H hidden size.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.utils import GlobalMemoryBuffer

from megatron.training.model.layers.output import Targets
from moe_overlap.plan.operators import (
    ATTENTION,
    COMBINE,
    COUNT,
    DISPATCH,
    EMBEDDING,
    EXPERTS,
    GATE,
    HEAD_LOSS,
    HEAD_NORM,
    LOSS,
    MERGE,
    MLP,
    PROJECT,
    SHARED,
)
from moe_overlap.tuner.capture.dependencies import finished, in_order_of_experts
from moe_overlap.tuner.capture.graph import CapturedPart, Layout, Op, Role, Storage
from moe_overlap.tuner.capture.record import Recorder
from moe_overlap.tuner.capture.request import FULL


@dataclass(frozen=True, slots=True)
class RunnablePart:
    """A part of the model that can be run.

    Attributes:
        kind: see `CapturedPart.kind`.
        modules: modules that hold its parameters, whose names start with the key.
        borrowed: modules with parameters that another part counts: constants here.
        inputs: (samples, tokens) -> its input tensors; those of a floating type get gradients.
        run: inputs -> the output, hidden states or the loss.
    """

    kind: str
    modules: dict[str, torch.nn.Module]
    inputs: Callable[[int, int], tuple[torch.Tensor, ...]]
    run: Callable[..., torch.Tensor]
    is_layer: bool = False
    borrowed: dict[str, torch.nn.Module] = field(default_factory=dict)


class HandOver(torch.autograd.Function):
    """Passes the input hidden states to the part, which alone holds them; receives their gradient."""

    @staticmethod
    def forward(ctx: Any, seed: torch.Tensor, box: list[torch.Tensor], results: list[torch.Tensor]) -> torch.Tensor:
        """Return the tensor in the box."""
        ctx.results = results
        return box.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        """Store the gradient."""
        ctx.results.append(gradients[0])
        return None, None, None


class TakeOver(torch.autograd.Function):
    """The output of a part; its backward passes on the gradient in the box, which only the backward pass then holds."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        """Return a scalar to start a backward pass from."""
        ctx.box = box
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the tensor in the box."""
        return ctx.box.pop(), None


class PartRecorder:
    """Runs the parts of one model.

    Args:
        model: megatron-core's GPTModel with one layer of each of `kinds`, prediction layers last.
        recorder: records it; its hooks are placed on the model here.
        buffer: the scratch buffer that the model's linears share.
        variant: the recomputation.
    """

    def __init__(
        self,
        model: Any,
        kinds: Sequence[str],
        layout: Layout,
        recorder: Recorder,
        buffer: GlobalMemoryBuffer,
        variant: str,
    ) -> None:
        self._model, self._layout, self._recorder, self._buffer = model, layout, recorder, buffer
        self._variant = variant
        self._warm: dict[str, set[int]] = {}
        self._seed = torch.zeros((), requires_grad=True)
        for name, module in (("embedding", model.embedding), ("final_layernorm", model.decoder.final_layernorm)):
            recorder.watch_modules(module, name)
        recorder.watch_modules(model.output_layer, "output_layer")
        decoder, ahead = model.decoder.layers, prediction_layers(model)
        layers = [self._layer(kind, layer) for kind, layer in zip(kinds[: len(decoder)], decoder, strict=True)]
        layers += [self._prediction(kind, layer) for kind, layer in zip(kinds[len(decoder) :], ahead, strict=True)]
        self.runnable_parts = {runnable.kind: runnable for runnable in (self._embedding(), *layers, self._head())}

    def record(self, runnable: RunnablePart, samples: int, tokens: int) -> CapturedPart:
        """The graph of one batch: its numbers are constants."""
        recorder = self._recorder
        with self._recording(runnable, samples, tokens) as inputs:
            input_ids = tuple(recorder.hold(tensor, "input") for tensor in inputs)
            results: list[torch.Tensor] = []
            arguments = [HandOver.apply(self._seed, [x.detach()], results) if x.requires_grad else x for x in inputs]
            # A reference to the inputs would keep them alive through both passes: as in a step, only the part and autograd may
            # hold them.
            inputs.clear()
            with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
                output = runnable.run(*arguments)
                output_id = recorder.id_of(output)
                recorder.end_forward()
            gradient = [torch.empty_like(output)]
            gradient_id = recorder.hold(gradient[0], "input")
            end = TakeOver.apply(output, gradient)
            # From here on the next part would own the output; the backward pass must find only the storages alive that a
            # step would hold.
            del arguments, output
            with recorder:
                torch.autograd.backward([end], [self._seed.detach()])
            gradient_outputs = tuple(recorder.id_of(tensor) for tensor in results)
            # At the end, because the linears allocate it while they run.
            for tensor in self._buffer.buffer.values():
                recorder.hold(tensor, "constant", "shared all-gather buffer")
            recording = recorder.recording
            ops, storages = in_order_of_experts(recording.ops, recording.frozen_storages())
            part = CapturedPart(
                kind=runnable.kind,
                variant=self._variant,
                one_sample=samples == 1,
                ops=finished(ops, [storage.role for storage in storages]),
                storages=storages,
                saved=_saved(recording, input_ids, output_id),
                inputs=input_ids,
                outputs=(output_id,),
                gradient_inputs=(gradient_id,),
                gradient_outputs=gradient_outputs,
            )
            del results
            return part

    def record_without_gradients(
        self, runnable: RunnablePart, samples: int, tokens: int
    ) -> tuple[Sequence[Op], Sequence[Storage]]:
        """The forward pass of one batch without gradients, followed by one with gradients.

        In the first, only the model's code holds storages; the second pass then replaces those that it still holds.
        """
        recorder = self._recorder
        with self._recording(runnable, samples, tokens) as inputs:
            for tensor in inputs:
                recorder.hold(tensor, "input")
            with recorder:
                with torch.no_grad():
                    outputs = [runnable.run(*inputs)]
                self._buffer.buffer.clear()
                outputs.append(runnable.run(*inputs))
            ops, storages = recorder.recording.ops, recorder.recording.frozen_storages()
            # Storages that are freed now existed when the passes ended.
            del outputs
            return ops, storages

    @contextlib.contextmanager
    def _recording(self, runnable: RunnablePart, samples: int, tokens: int) -> Iterator[list[torch.Tensor]]:
        """Begin a recording; yields the inputs of the part."""
        self._make_tables(runnable, samples, tokens)
        # Every recording allocates its own buffer, at the size of its batch.
        self._buffer.buffer.clear()
        gc.collect()
        # The garbage collector need not walk through the present objects before the next recording.
        gc.freeze()
        with _no_collection():
            self._recorder.begin()
            self._hold_parameters(runnable)
            yield list(runnable.inputs(samples, tokens))

    def _make_tables(self, runnable: RunnablePart, samples: int, tokens: int) -> None:
        """Build the tables that layers compute once, or once for a sequence length, so that no recording contains them."""
        if not runnable.is_layer:
            return
        lengths = self._warm.setdefault(runnable.kind, set())
        if tokens in lengths:
            return
        self._recorder.begin()
        with self._recorder:
            output = runnable.run(*runnable.inputs(samples, tokens))
            if not lengths:
                # Recomputed layers log their losses only in the backward pass, from the first one on.
                torch.autograd.backward([output], [torch.empty_like(output)])
        lengths.add(tokens)

    def _hold_parameters(self, runnable: RunnablePart) -> None:
        roles: tuple[tuple[Role, dict[str, torch.nn.Module]], ...]
        roles = (("parameter", runnable.modules), ("constant", runnable.borrowed))
        for role, modules in roles:
            for prefix, module in modules.items():
                for name, parameter in module.named_parameters(prefix=prefix):
                    replicas = "dp" if getattr(parameter, "allreduce", True) else "edp"
                    self._recorder.hold(parameter, role, name, replicas)
                    self._recorder.hold(parameter.main_grad, "gradient", name, replicas)

    def _hidden(self, samples: int, tokens: int) -> torch.Tensor:
        config = self._model.config
        split = self._layout.context * (self._layout.tensor if config.sequence_parallel else 1)
        shape = (tokens // split, samples, config.hidden_size)
        return torch.zeros(shape, dtype=config.params_dtype, requires_grad=True)

    def _tokens(self, samples: int, tokens: int) -> torch.Tensor:
        return torch.zeros((samples, tokens // self._layout.context), dtype=torch.long)

    def _rotary(self, tokens: int) -> Any:
        """The rotary table, as megatron-core's GPTModel computes it for a sequence."""
        if getattr(self._model, "rotary_pos_emb", None) is None or self._model.config.multi_latent_attention:
            return None
        table = self._model.rotary_pos_emb(tokens)
        return table[0] if isinstance(table, tuple) else table

    def _embedding(self) -> RunnablePart:
        def run(tokens_BS: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
            with self._recorder.at(EMBEDDING):
                hidden: torch.Tensor = self._model.embedding(input_ids=tokens_BS, position_ids=positions_BS)
            return hidden

        def inputs(samples: int, tokens: int) -> tuple[torch.Tensor, ...]:
            return self._tokens(samples, tokens), self._tokens(samples, tokens)

        return RunnablePart("embedding", {"embedding": self._model.embedding}, inputs, run)

    def _head(self) -> RunnablePart:
        model = self._model

        def run(x_SBH: torch.Tensor, labels_BS: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
            with self._recorder.at(HEAD_NORM):
                hidden = model.decoder.final_layernorm(x_SBH)
            with self._recorder.at(HEAD_LOSS):
                weight = (
                    model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
                )
                logits, _ = model.output_layer(hidden, weight=weight)
                losses_BS = model.compute_language_model_loss(labels_BS, logits)
                loss: torch.Tensor = (losses_BS.reshape(-1).float() * mask_BS.reshape(-1)).sum()
            return loss

        def inputs(samples: int, tokens: int) -> tuple[torch.Tensor, ...]:
            labels = self._tokens(samples, tokens)
            return self._hidden(samples, tokens), labels, torch.ones(labels.shape)

        modules = {"final_layernorm": model.decoder.final_layernorm, "output_layer": model.output_layer}
        if model.share_embeddings_and_output_weights:
            modules["embedding.word_embeddings"] = model.embedding.word_embeddings
        return RunnablePart("head", modules, inputs, run)

    def _layer(self, kind: str, layer: Any) -> RunnablePart:
        self._recorder.watch_modules(layer)
        name_operators(layer, self._recorder)

        def forward(x_SBH: torch.Tensor, rotary: Any) -> torch.Tensor:
            hidden, _ = layer(hidden_states=x_SBH, attention_mask=None, rotary_pos_emb=rotary)
            return hidden  # type: ignore[no-any-return]

        def run(x_SBH: torch.Tensor) -> torch.Tensor:
            # The table covers the whole sample, of which a rank holds one share of the hidden states.
            split = self._layout.context * (self._layout.tensor if self._model.config.sequence_parallel else 1)
            rotary = self._rotary(x_SBH.shape[0] * split)
            if self._variant == FULL:
                return checkpoint(forward, False, x_SBH, rotary)  # type: ignore[no-any-return]
            return forward(x_SBH, rotary)

        return RunnablePart(
            kind, {"": layer}, lambda samples, tokens: (self._hidden(samples, tokens),), run, is_layer=True
        )

    def _prediction(self, kind: str, layer: Any) -> RunnablePart:
        model, recorder = self._model, self._recorder
        recorder.watch_modules(layer)
        name_operators(layer.transformer_layer, recorder)
        for owner, method, operator in (
            (layer, "_concat_embeddings", PROJECT),
            (layer, "_postprocess", LOSS),
            (layer.loss, "forward", LOSS),
        ):
            _name(owner, method, operator, recorder)
        if self._variant == FULL:
            # The caller wraps decoder layers; a prediction layer wraps its projection and its layer itself.
            config = model.config
            config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1

        def run(x_SBH: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
            rotary = self._rotary(targets[0].shape[1] * self._layout.context)
            shared = {"attention_mask": None, "rotary_pos_emb": rotary, "rotary_pos_cos": None, "rotary_pos_sin": None}
            tied = model.share_embeddings_and_output_weights
            weight = model.shared_embedding_or_output_weight() if tied else None
            with recorder.at(PROJECT):
                _, _, losses_BS, count = model.predict(layer, x_SBH, Targets(*targets), weight, shared)
            with recorder.at(LOSS):
                return MTPLossAutoScaler.apply(x_SBH, model.weighted(losses_BS, count))  # type: ignore[no-any-return]

        def inputs(samples: int, tokens: int) -> tuple[torch.Tensor, ...]:
            words_BS = [self._tokens(samples, tokens) for _ in range(3)]
            return self._hidden(samples, tokens), *words_BS, torch.ones(words_BS[0].shape)

        borrowed = {"embedding": model.embedding, "output_layer": model.output_layer}
        return RunnablePart(kind, {"": layer}, inputs, run, is_layer=True, borrowed=borrowed)


def prediction_layers(model: Any) -> Sequence[Any]:
    """The multi-token-prediction layers of megatron-core's GPTModel."""
    return model.mtp.layers if model.mtp_process else ()


def name_operators(layer: Any, recorder: Recorder) -> None:
    """Attribute the operators in the methods of a transformer layer to operators of the plan's vocabulary."""
    _name(layer, "_forward_attention", ATTENTION, recorder)
    if not layer.is_moe_layer:
        _name(layer, "_forward_mlp", MLP, recorder)
        return
    _name(layer, "_forward_mlp", GATE, recorder)
    _name(layer, "_forward_post_mlp", MERGE, recorder)
    moe = layer.mlp
    names = {
        "route": GATE,
        "preprocess": GATE,
        "shared_experts_compute": SHARED,
        "dispatch": DISPATCH,
        "routed_experts_compute": EXPERTS,
        "combine": COMBINE,
        "postprocess": MERGE,
    }
    for method, operator in names.items():
        _name(moe, method, operator, recorder)
    if hasattr(moe.token_dispatcher, "preprocess") and moe.token_dispatcher.tp_ep_group.size() > 1:
        _name(moe.token_dispatcher, "preprocess", COUNT, recorder)


def _name(owner: Any, method: str, operator: str, recorder: Recorder) -> None:
    stock = getattr(owner, method)

    def named(*args: Any, **kwargs: Any) -> Any:
        with recorder.at(operator):
            return stock(*args, **kwargs)

    # Not through the module's __setattr__, which looks for parameters.
    object.__setattr__(owner, method, named)


def keep_gradients_apart(model: torch.nn.Module, in_fp32: bool) -> None:
    """Add gradients to separate buffers and drop them, as megatron-core's DDP does in its hooks."""
    for parameter in model.parameters():
        kind = torch.float32 if in_fp32 else parameter.dtype
        parameter.main_grad = torch.zeros_like(parameter, dtype=kind, requires_grad=False)  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(_into_main_gradient)


def _into_main_gradient(parameter: Any) -> None:
    """Return no gradient: the product has added it to the buffer itself."""
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector, which would free cycles of references at an arbitrary operator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _saved(recording: Any, input_ids: tuple[int, ...], output_id: int) -> tuple[int, ...]:
    """Storages that the forward pass leaves for the backward pass: `CapturedPart.saved`."""
    saved = {index for index in recording.alive if recording.storages[index].role == "activation"} - {output_id}
    return tuple(sorted(saved | (recording.packed & {*input_ids, output_id})))
