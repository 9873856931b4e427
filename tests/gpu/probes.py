"""What one GPU can tell about this project, in order of information: `python -m tests.gpu.probes --output record.json`

    --device cuda|cpu   cpu is a rehearsal at tiny sizes: it shows that the program works, and nothing of GPUs
    --only NAME ...     these probes alone
    --seconds N         the longest time of a probe

Every probe is a function below that returns what it has measured; on a GPU each runs in a process of its own, so that an error of
one leaves the others a device. The record is written after each probe. `failures` says which claims of docs/gpu.md it refutes.
Nothing here has run on a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZED = "partitions, deferred, bf16"
"""The case whose memory is compared with its prediction."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a probe runs.

    Attributes:
        device: cuda or cpu.
    """

    device: str

    @property
    def is_tiny(self) -> bool:
        """Whether the sizes are those of a rehearsal."""
        return self.device == "cpu"

    def sized(self, real: int, tiny: int) -> int:
        """A number for the device."""
        return tiny if self.is_tiny else real

    def seconds(self, run: Callable[[], Any], repeats: int = 20) -> float:
        """The median time of a call, with the device's work."""
        import torch

        times = []
        for _ in range(self.sized(repeats, 2)):
            begin = time.perf_counter()
            run()
            if not self.is_tiny:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


def lists(setting: Setting) -> dict[str, Any]:
    """Every list of cases.py: where the host waits, whether channel streams have the bits of one stream, time and memory."""
    from tests.gpu.one_rank import LISTED, measure

    figures: dict[str, Any] = {}
    for case in LISTED:
        try:
            figures[case.name] = measure(case, setting.device, setting.is_tiny, setting.sized(6, 1))
        except Exception as error:  # the other lists are worth as much
            figures[case.name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return figures


def launched(setting: Setting) -> dict[str, Any]:
    """Kernels of a step: of a second partition by layer and micro-batch, with a static capacity, and with graphs of it."""
    from tests.gpu.one_rank import launches, lone_rank
    from tests.unit.runtime.fake_ranks import LAYERS, executor_of

    static = "--moe-expert-capacity-factor 0.75 --moe-pad-expert-input-to-capacity --moe-overlap-micro-batches 2"
    static += " --defer-weight-gradients"
    partitions = "--moe-overlap-partitions {} --moe-overlap-range around --defer-weight-gradients"
    runs = {"whole": partitions.format(1), "halves": partitions.format(2), "static": static}
    runs |= {} if setting.is_tiny else {"static, graphs": f"{static} --moe-overlap-cuda-graphs"}
    counts = {}
    with lone_rank(2):
        for name, flags in runs.items():
            runner, instructions, feed = executor_of(flags)
            micro_batches = len({i.micro_batch for i in instructions if i.micro_batch is not None})
            # Graphs are captured in the fourth step.
            for number in range(setting.sized(5, 0)):
                runner.run(instructions, feed, number)
            counts[name] = launches(runner, instructions, feed, setting.device) / LAYERS / micro_batches
    return {"per_layer_and_micro_batch": counts, "of_a_partition": counts["halves"] - counts["whole"]}


def communicators(setting: Setting) -> dict[str, Any]:
    """A world of one rank: communicators made at once, split with limits of thread blocks, used and destroyed."""
    import torch
    import torch.distributed as dist

    on_gpu = setting.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    begin = time.perf_counter()
    bound = {"device_id": device} if on_gpu else {}
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, **bound
    )
    figures: dict[str, Any] = {"init_seconds": time.perf_counter() - begin}
    options: Any = None
    if on_gpu:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = 16
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    begin = time.perf_counter()
    if on_gpu:
        group = dist.split_group(split_ranks=[[0]], timeout=timeout, pg_options=options, group_desc="ep")
    else:
        group = dist.new_group([0], timeout=timeout, group_desc="ep")
    figures["split_seconds"] = time.perf_counter() - begin
    ones = torch.ones(1024, device=device)
    dist.all_reduce(ones, group=group)
    arrived = torch.empty_like(ones)
    if on_gpu:
        dist.all_to_all_single(arrived, ones, [1024], [1024], group=group)
    figures["sum"] = float(ones.sum())
    begin = time.perf_counter()
    dist.destroy_process_group()
    return figures | {"destroy_seconds": time.perf_counter() - begin}


def blocking_calls(setting: Setting) -> dict[str, Any]:
    """Which calls of the host wait for a stream that is busy for half a second: seconds of each call."""
    import torch

    size = setting.sized(1 << 28, 1 << 10)
    if setting.device == "cpu":
        return {"torch.empty": setting.seconds(lambda: torch.empty(size))}
    busy, ready = torch.cuda.Stream(), torch.ones(1024, device="cuda")

    def captured() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            ready.add_(1)

    calls: dict[str, Callable[[], Any]] = {
        "device memory (cudaMalloc)": lambda: torch.empty(size, device="cuda", dtype=torch.uint8),
        "pinned memory (cudaHostAlloc)": lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True),
        "memory given back (empty_cache)": torch.cuda.empty_cache,
        "a stream": lambda: torch.cuda.Stream(priority=-1),
        "an event": lambda: torch.cuda.Event(enable_timing=True).record(),
        "a kernel not loaded before": lambda: torch.special.bessel_j0(ready),
        "a product not run before": lambda: torch.ones(77, 33, device="cuda") @ torch.ones(33, 55, device="cuda"),
        "a Triton kernel not compiled before": lambda: torch.compile(lambda x: x * 3 + 1)(ready),
        "a capture": captured,
        "an event's wait, unrelated": lambda: torch.cuda.Event().synchronize(),
    }
    seconds = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(int(1e9))
        begin = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - begin
        torch.cuda.synchronize()
        seconds[f"{name}, until the stream ends"] = time.perf_counter() - begin
    return seconds


def races(setting: Setting) -> dict[str, Any]:
    """Many steps on channel streams against one stream, where freed memory is not used again as it was: bits of all steps."""
    from tests.gpu.cases import BY_NAME
    from tests.gpu.one_rank import measure

    steps = setting.sized(200, 2)
    names = ("partitions, deferred", "two micro-batches")
    return {name: measure(BY_NAME[name], setting.device, is_tiny=True, steps=steps) for name in names}


def grouped(setting: Setting) -> dict[str, Any]:
    """Grouped products: experts without rows, and time against one product of all rows."""
    import torch
    import torch.nn.functional as F

    from megatron.training.model.layers.expert_weights import expert_gradients

    rows, width, figures = setting.sized(16384, 32), setting.sized(2048, 16), {}
    for experts in (1, 4, setting.sized(64, 8)):
        # The first and every third expert have no rows.
        shares = torch.tensor([0.0 if number % 3 == 0 and experts > 1 else 1.0 for number in range(experts)])
        counts = (shares / shares.sum() * rows).floor().int()
        ends = counts.cumsum(0, dtype=torch.int32).to(setting.device)
        x = torch.randn(int(counts.sum()), width, device=setting.device, dtype=torch.bfloat16)
        dy, weights = (
            torch.randn_like(x),
            torch.randn(experts, width, width, device=setting.device, dtype=torch.bfloat16),
        )
        gradient = expert_gradients(dy, x, ends)
        idle = (counts == 0).to(setting.device)
        figures[f"{experts} experts"] = {
            "largest_gradient_without_rows": float(gradient[idle].abs().max()) if bool(idle.any()) else None,
            "seconds": setting.seconds(lambda x=x, w=weights, e=ends: F.grouped_mm(x, w.transpose(1, 2), offs=e)),
            "one_product_seconds": setting.seconds(lambda x=x, w=weights: x @ w[0].t()),
        }
    return figures


def row_sums(setting: Setting) -> dict[str, Any]:
    """Rows of experts summed by token: by atomics, in a fixed order, and by a gather of each token's rows."""
    import torch

    from moe_overlap.runtime.dispatch.ordered_sums import sum_by_token

    tokens, width, top_k = setting.sized(8192, 16), setting.sized(4096, 8), 2
    places = torch.arange(tokens, device=setting.device).repeat_interleave(top_k)[torch.randperm(tokens * top_k)]
    rows = torch.randn(tokens * top_k, width, device=setting.device, dtype=torch.bfloat16)
    order = places.argsort(stable=True).view(tokens, top_k)
    ways: dict[str, Callable[[], Any]] = {
        "index_add": lambda: rows.new_zeros(tokens, width).index_add_(0, places, rows),
        "fixed order": lambda: sum_by_token(rows, places, tokens),
        "gather": lambda: rows[order].float().sum(1).to(rows.dtype),
    }
    exact = rows.double()[order].sum(1)
    return {
        name: {"seconds": setting.seconds(way), "largest_error": float((way().double() - exact).abs().max())}
        for name, way in ways.items()
    }


def attention(setting: Setting) -> dict[str, Any]:
    """torch's attention by shape: which backends take it, and the seconds of each."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    length, figures = setting.sized(4096, 16), {}
    shapes = {
        "grouped queries": (16, 4, 128, 128),
        "latent heads": (16, 16, 192, 128),
        "one head each": (16, 16, 128, 128),
    }
    for name, (heads, groups, key_width, value_width) in shapes.items():
        q, k, v = (
            torch.randn(2, count, length, width, device=setting.device, dtype=torch.bfloat16)
            for count, width in ((heads, key_width), (groups, key_width), (groups, value_width))
        )
        for backend in (
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.MATH,
        ):

            def attend(
                q: Any = q, k: Any = k, v: Any = v, backend: Any = backend, grouped: bool = heads != groups
            ) -> None:
                with sdpa_kernel(backend):
                    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

            try:
                figures[f"{name}, {backend.name}"] = setting.seconds(attend)
            except RuntimeError as error:
                figures[f"{name}, {backend.name}"] = str(error).splitlines()[0]
    return figures


def memory(setting: Setting) -> dict[str, Any]:
    """Peak bytes of a list against their prediction: the weights, states and activations of one rank of two."""
    from tests.gpu.cases import BY_NAME
    from tests.gpu.one_rank import command_line, measure

    case = BY_NAME[SIZED]
    forecast = predicted(command_line(case, setting.device, setting.is_tiny), case.ranks)
    measured = measure(case, setting.device, setting.is_tiny, setting.sized(6, 1))
    return {**forecast, **{name: measured[name] for name in ("peak_bytes", "reserved_bytes", "step_seconds")}}


def whole_step(setting: Setting) -> dict[str, Any]:
    """A run of four layers of Qwen3-30B-A3B on one GPU, as a user starts it: start, steps and memory against their prediction."""
    sizes = LAYERS_OF_QWEN3 if not setting.is_tiny else TINY_LAYERS
    words = [*sizes.split(), "--train-iters", str(setting.sized(30, 3))]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        begin = time.perf_counter()
        run([sys.executable, "pretrain_moe.py", *words, "--log-json", str(log)], {} if not setting.is_tiny else HIDDEN)
        seconds = time.perf_counter() - begin
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [row["step_seconds"] for row in rows]
    middle = statistics.median(steps[len(steps) // 3 :])
    return {
        **predicted(words, 1),
        "step_seconds": middle,
        "first_step_seconds": steps[0],
        "seconds_beside_steps": seconds - sum(steps),
        "last_row": rows[-1],
    }


HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
"""The environment of a program that must not see the GPU."""
COMMON = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights --group-query-attention --qk-layernorm --moe-token-dispatcher-type alltoall
    --moe-aux-loss-coeff 0 --lr 1e-4 --eval-iters 0 --num-workers 0 --mock-data --log-interval 1000000 --micro-batch-size 1
    --global-batch-size 4
"""
LAYERS_OF_QWEN3 = f"""{COMMON} --num-layers 4 --hidden-size 2048 --num-attention-heads 32 --kv-channels 128 --num-query-groups 4
    --seq-length 4096 --max-position-embeddings 4096 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
    --vocab-size 151936 --bf16"""
TINY_LAYERS = f"""{COMMON} --num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --seq-length 16
    --max-position-embeddings 16 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --vocab-size 500"""


def predicted(words: Sequence[str], ranks: int) -> dict[str, Any]:
    """Seconds and bytes of a command line on H200s, by a process that sees no GPU."""
    command = [sys.executable, "tools/predict.py", *words, "--gpu", "H200", "--num-gpus", str(ranks), "--json"]
    figures = json.loads(run(command, HIDDEN))
    return {"predicted_step_seconds": figures["step_seconds"], "predicted": figures["fullest_stage"]}


def run(command: Sequence[str], variables: dict[str, str]) -> str:
    """What a program writes.

    Raises:
        RuntimeError: it failed, with its reason.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip() or ended.stdout.strip())
    return ended.stdout


PROBES: dict[str, Callable[[Setting], dict[str, Any]]] = {
    probe.__name__: probe
    for probe in (
        lists,
        launched,
        communicators,
        blocking_calls,
        races,
        grouped,
        memory,
        whole_step,
        row_sums,
        attention,
    )
}
"""In order of information."""


MOST_LAUNCHES = 127
"""Of a further partition, by layer and micro-batch: 126 in layers (tests/unit/runtime/test_launch_cost.py), one outside."""


def failures(record: dict[str, Any]) -> list[str]:
    """The claims that a record refutes, and the probes that did not end, a line each."""
    lines = [f"{name}: {outcome['error']}" for name, outcome in record["probes"].items() if "error" in outcome]
    figures = {name: outcome["figures"] for name, outcome in record["probes"].items() if "figures" in outcome}
    for probe in ("lists", "races"):
        for case, of in figures.get(probe, {}).items():
            if "error" in of:
                lines.append(f"{probe}, {case}: {of['error']}")
                continue
            lines += [f"{probe}, {case}: the host waits: {wait}" for wait in of["waits"]]
            if not of["is_deterministic"]:
                lines.append(f"{probe}, {case}: two runs differ")
            elif not of["equals_one_stream"]:
                lines.append(f"{probe}, {case}: channel streams differ from one stream")
    of_a_partition = figures.get("launched", {}).get("of_a_partition", 1)
    if not 0 < of_a_partition <= MOST_LAUNCHES:
        lines.append(f"launched: {of_a_partition} kernels for a partition, not 1 to {MOST_LAUNCHES}")
    for experts, of in figures.get("grouped", {}).items():
        if of["largest_gradient_without_rows"]:
            lines.append(f"grouped, {experts}: a gradient without rows is {of['largest_gradient_without_rows']}")
    return lines


def start(device: str) -> None:
    """Prepare this process as a run does, before CUDA starts."""
    from megatron.training import cpu_backend
    from megatron.training.cli.arguments import parse
    from megatron.training.cli.start import quiet_libraries
    from moe_overlap.commands.device_settings import settle_environment
    from tests.gpu.cases import BY_NAME

    for name in ("rows summed in a fixed order", "pipeline of partitions"):
        settle_environment(parse(BY_NAME[name].words()).config, os.environ)
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    quiet_libraries()
    if cpu_backend.is_needed():
        cpu_backend.install()


def has_gpu() -> bool:
    """Whether torch sees one, asked without starting CUDA."""
    import torch

    return torch.cuda.device_count() > 0


def run_probe(name: str, setting: Setting) -> dict[str, Any]:
    """One probe in this process: its figures, or its error."""
    begin = time.perf_counter()
    try:
        outcome = {"figures": PROBES[name](setting)}
    except Exception as error:  # the record says what failed, and the next probe runs
        outcome = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {"seconds": time.perf_counter() - begin, **outcome}


def run_apart(name: str, device: str, longest_seconds: float) -> dict[str, Any]:
    """One probe in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "record.json")
        command = [
            sys.executable,
            "-m",
            "tests.gpu.probes",
            "--device",
            device,
            "--only",
            name,
            "--apart",
            "--output",
            str(output),
        ]
        try:
            ended = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=longest_seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no end within {longest_seconds:.0f} s"}
        if output.exists() and name in (record := json.loads(output.read_text()))["probes"]:
            return dict(record["probes"][name])
        return {"error": f"exit status {ended.returncode}", "output": (ended.stdout + ended.stderr)[-4000:]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the probes; 1 where one has failed or a claim is refuted."""
    parser = argparse.ArgumentParser(prog="tests.gpu.probes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(PROBES), default=list(PROBES))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not has_gpu():
        print("skipped: no GPU here; --device cpu rehearses")
        return 0
    in_this_process = arguments.apart or arguments.device == "cpu"
    record: dict[str, Any] = {"device": arguments.device, "probes": {}}
    if in_this_process:
        start(arguments.device)
        import torch

        if arguments.device == "cuda":
            torch.cuda.set_device(0)
            record["device"] = torch.cuda.get_device_name()
        record["torch"] = torch.__version__
    for name in arguments.only:
        if in_this_process:
            record["probes"][name] = run_probe(name, Setting(arguments.device))
        else:
            record["probes"][name] = run_apart(name, arguments.device, arguments.seconds)
        arguments.output.write_text(json.dumps(record, indent=1))
        print(f"{name}: {record['probes'][name].get('error', 'measured')}", flush=True)
    lines = failures(record)
    print("\n".join(lines) or "no claim is refuted")
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
