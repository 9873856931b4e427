"""Stand-ins for CUDA, so that megatron-core runs on a machine without it.

megatron-core asks torch.cuda for devices, streams and generators in places that a CPU run reaches too. `install()` replaces
those calls, each listed below with its callers, and the few functions of megatron-core that touch CUDA generators or split sizes
directly. Call it before megatron.core is imported. It refuses to run on a machine with CUDA, so GPU runs are never patched.

Callers are megatron-core 0.16.1 files, relative to `megatron/core/`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CUDA_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


class HostStream:
    """A stream of a machine with only one: every stream equals every other, and nothing is left to wait for."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostStream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: HostStream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: object = None) -> HostEvent:
        """An event that has already happened."""
        return HostEvent()


class HostEvent:
    """An event that has already happened."""

    def record(self, stream: object = None) -> None:
        """Already happened."""

    def wait(self, stream: object = None) -> None:
        """Already happened."""

    def synchronize(self) -> None:
        """Already happened."""

    def query(self) -> bool:
        """Already happened."""
        return True


def is_needed() -> bool:
    """Whether this machine lacks CUDA."""
    return not torch.cuda.is_available()


def install() -> None:
    """Replace megatron-core's CUDA calls in this process. Idempotent.

    Raises:
        RuntimeError: CUDA is available, or megatron.core was imported before.
    """
    if torch.cuda.is_available():
        raise RuntimeError("the CPU backend must not be installed where CUDA is available")
    if getattr(torch.cuda.current_device, "stands_in", False):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("the CPU backend must be installed before megatron.core is imported")
    _answer_torch_cuda()
    _map_cuda_devices()
    _import_without_compilation()
    _replace_in_megatron_core()


def _answer_torch_cuda() -> None:
    def current_device() -> torch.device:
        """Passed as `device=` in param_and_grad_buffer.py, layers.py, router.py, p2p_communication.py and others."""
        return torch.device("cpu")

    current_device.stands_in = True  # type: ignore[attr-defined]
    cuda: Any = torch.cuda
    cuda.current_device = current_device
    # moe/token_dispatcher.py (copies of the counts), moe/shared_experts.py (overlap of the shared expert)
    cuda.Stream = HostStream
    cuda.Event = HostEvent
    cuda.current_stream = lambda device=None: HostStream()
    cuda.default_stream = lambda device=None: HostStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    # p2p_communication.py, timers.py, dist_checkpointing/strategies/filesystem_async.py
    cuda.synchronize = lambda device=None: None
    # tensor_parallel/random.py seeds and reads the generator of the current device
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    # models/common/embeddings/rope_utils.py, dist_checkpointing/exchange_utils.py
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]


def _map_cuda_devices() -> None:
    """Create tensors for CUDA on the host, and answer with CUDA's names for their types.

    `device="cuda"` in factories: schedules.py, optimizer/clip_grads.py, optimizer/optimizer.py, utils.py, moe_utils.py,
    dist_checkpointing/exchange_utils.py (--ckpt-fully-parallel-load).
    `pin_memory=True`: rope_utils.py. Names of CUDA types that `Tensor.type()` is compared with: clip_grads.py,
    distrib_optimizer.py, optimizer.py.
    """
    for name in ("zeros", "ones", "empty", "empty_like", "full", "tensor", "arange", "rand", "randn"):
        setattr(torch, name, _on_host(getattr(torch, name)))
    type_of = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        return _CUDA_TYPE_NAMES.get(answer, answer) if isinstance(answer, str) else answer

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]


def _on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        # Pinning asks the CUDA driver for pages, and there is no driver.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _import_without_compilation() -> None:
    """megatron-core binds torch.compile as `jit_fuser` at import: on a CPU it would call a C++ compiler at the first step."""
    compile_function = torch.compile
    torch.compile = _mark_compiled  # type: ignore[assignment]
    try:
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel
        import megatron.core.transformer.moe.moe_layer  # noqa: F401
    finally:
        # Only the functions that megatron-core binds at import are replaced: the caller's own torch.compile stays as it is.
        torch.compile = compile_function


def _mark_compiled(function: Any = None, **_: Any) -> Any:
    """Return the function unchanged, with a mark by which the tuner's capture finds functions that are one kernel on a GPU."""
    if function is None:
        return _mark_compiled
    function.is_compiled_on_cuda = True
    return function


def _replace_in_megatron_core() -> None:
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    moe_utils.maybe_move_tensor_to_cpu = host_splits
    token_dispatcher.maybe_move_tensor_to_cpu = host_splits
    mappings._gather_along_first_dim = _uneven_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _uneven_reduce_scatter(mappings._reduce_scatter_along_first_dim)


def make_rng_tracker() -> Any:
    """megatron-core's tracker of generator states, on the host's one generator.

    The stock `fork` logs a warning whenever the CPU generator moves, which is intended here.
    """
    from megatron.core.tensor_parallel import random

    class HostRngTracker(random.CudaRNGStatesTracker):
        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    return HostRngTracker()


def host_splits(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes of an all-to-all as the host values gloo wants (moe/token_dispatcher.py `_maybe_dtoh_and_synchronize`)."""
    if not torch.is_tensor(tensor):
        return tensor
    return tensor.detach().numpy() if as_numpy else tensor.detach()


def _uneven_gather(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """All-gather of unequal parts (experts under tensor parallelism): gloo gathers equal parts only, so pad and cut."""

    def gather(
        input_: torch.Tensor,
        group: Any = None,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None:
            return stock(input_, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        padded = input_.new_zeros((longest, *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        # Every rank pads to the longest part; all ranks know it from the split sizes, without another collective.
        gathered = input_.new_empty((longest * group.size(), *input_.shape[1:]))
        torch.distributed.all_gather_into_tensor(gathered, padded, group=group)
        parts = gathered.split(longest)
        return torch.cat([part[:rows] for part, rows in zip(parts, output_split_sizes, strict=True)])

    return gather


def _uneven_reduce_scatter(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Reduce-scatter into unequal parts: reduce all of them and keep this rank's part."""

    def reduce_scatter(
        input_: torch.Tensor,
        group: Any = None,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None:
            return stock(input_, group, input_split_sizes, use_global_buffer)
        # Moves as many bytes as all ranks together keep; a CPU run is for correctness, not for speed.
        total = input_.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    return reduce_scatter
