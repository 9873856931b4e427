"""The CUDA stand-ins: each answers what megatron-core asks, none is there unless it was asked for, none beside CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from megatron.core import jit
from megatron.core.tensor_parallel import mappings, random
from megatron.core.transformer.moe import token_dispatcher

from megatron.training import cpu_backend, initialize

ROOT = Path(__file__).resolve().parents[3]
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU backend is for machines without CUDA")


def test_refuses_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_backend, "_answer_torch_cuda", lambda: touched.append("patched"))
    assert not cpu_backend.is_needed()
    with pytest.raises(RuntimeError, match="must not be installed where CUDA is available"):
        cpu_backend.install()
    assert not touched


def fresh(program: str) -> str:
    """The output of a new interpreter."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_no_cuda
def test_imports_patch_nothing_and_the_order_is_checked() -> None:
    files = [path for part in ("megatron/training", "moe_overlap/runtime") for path in (ROOT / part).rglob("[a-z]*.py")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(files)]
    program = f"""
import importlib, warnings
warnings.simplefilter("ignore")
import torch
before = [torch.cuda.current_device, torch.zeros, torch.Tensor.type, torch.Tensor.cuda, torch.compile, torch.cuda.Stream]
for name in {modules}:
    importlib.import_module(name)
after = [torch.cuda.current_device, torch.zeros, torch.Tensor.type, torch.Tensor.cuda, torch.compile, torch.cuda.Stream]
assert all(a is b for a, b in zip(before, after, strict=True))
from megatron.training import cpu_backend
try:
    cpu_backend.install()
except RuntimeError as error:
    print(error)
assert torch.cuda.current_device is before[0] and torch.zeros is before[1]
"""
    assert fresh(program) == "the CPU backend must be installed before megatron.core is imported"


@needs_no_cuda
def test_a_run_installs_before_megatron_core_comes() -> None:
    """Importing pretrain_moe.py imports neither torch nor megatron-core."""
    program = "import sys, pretrain_moe; print([name for name in sys.modules if name in ('torch', 'megatron.core')])"
    assert fresh(program) == "[]"


@needs_no_cuda
def test_installing_twice_changes_nothing() -> None:
    before = (torch.cuda.current_device, torch.zeros, mappings._gather_along_first_dim)
    cpu_backend.install()
    assert before == (torch.cuda.current_device, torch.zeros, mappings._gather_along_first_dim)


@needs_no_cuda
def test_streams_events_and_devices() -> None:
    assert torch.cuda.current_device() == torch.device("cpu")
    stream, other = torch.cuda.Stream(), torch.cuda.current_stream()
    assert stream == other == torch.cuda.default_stream() and hash(stream) == hash(other) and stream != "stream"
    with torch.cuda.stream(stream):
        stream.wait_stream(other)
        event = stream.record_event()
    stream.wait_event(event)
    stream.synchronize()
    event.record()
    event.wait()
    event.synchronize()
    assert event.query() and isinstance(torch.cuda.Event(), cpu_backend.HostEvent)
    torch.cuda.synchronize()
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor


@needs_no_cuda
@pytest.mark.parametrize("make", ["zeros", "ones", "empty", "rand", "randn", "arange"])
def test_cuda_as_a_device_is_the_host(make: str) -> None:
    made = getattr(torch, make)(3, device="cuda", pin_memory=True)
    assert made.device.type == "cpu" and made.shape == (3,)


@needs_no_cuda
def test_cuda_as_a_device_with_a_value() -> None:
    assert torch.tensor([1.0], device="cuda").device.type == "cpu"
    assert torch.equal(torch.full((2,), 7, device="cuda"), torch.tensor([7, 7]))
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda:0")  # nobody asks for it: not answered


@needs_no_cuda
def test_types_carry_cuda_names() -> None:
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1, dtype=torch.long).type() == "torch.LongTensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


@needs_no_cuda
def test_nothing_is_compiled() -> None:
    def function() -> None:
        pass

    assert jit.jit_fuser(function) is function
    assert torch.compile.__module__ == "torch"


@needs_no_cuda
def test_generator_state() -> None:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(2)
    random._set_cuda_rng_state(state)
    assert torch.equal(first, torch.rand(2)) and not torch.equal(state, random._get_cuda_rng_state())


@needs_no_cuda
def test_the_tracker_forks_and_comes_back() -> None:
    tracker = cpu_backend.make_rng_tracker()
    tracker.add("model-parallel-rng", 5)
    torch.manual_seed(1)
    outside = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(2)
    assert torch.equal(outside, torch.get_rng_state())
    with pytest.raises(ValueError), tracker.fork():
        second = torch.rand(2)
        raise ValueError
    assert torch.equal(outside, torch.get_rng_state())
    torch.manual_seed(5)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(2), torch.rand(2)]))


@needs_no_cuda
def test_split_sizes_are_host_values() -> None:
    sizes = torch.tensor([3, 4])
    assert token_dispatcher.maybe_move_tensor_to_cpu is cpu_backend.host_splits
    as_array = cpu_backend.host_splits(sizes, as_numpy=True)
    assert isinstance(as_array, numpy.ndarray) and as_array.tolist() == [3, 4]
    assert cpu_backend.host_splits(sizes).tolist() == [3, 4] and cpu_backend.host_splits(None) is None


def test_device_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(is_available=lambda: True, current_device=lambda: 3)
    monkeypatch.setattr(initialize.torch, "cuda", fake)
    assert initialize.device_of_this_process() == torch.device("cuda", 3)
