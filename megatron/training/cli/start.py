"""Obstacles to a start that a dry run accepts: missing devices or packages, features not executed yet. No torch.

A dry run lists them all (`obstacles`); a start raises the first (`require_startable`).
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.training.cli.arguments import ParsedArguments
from megatron.training.cli.config import Config
from megatron.training.cli.flags.table import config_flags, flag_texts
from megatron.training.cli.packages import is_installed
from megatron.training.cli.sizes import layout_parts
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import whole_number
from moe_overlap.describe.readers.shell_script import VARIABLE
from moe_overlap.plan.capabilities import shares_scales
from moe_overlap.plan.plan import Plan

PACKAGES = ("transformer_engine", "deep_ep", "apex", "fused_weight_gradient_mlp_cuda")
"""Packages with kernels for GPUs; the last is an optional part of apex."""
DRY_RUN = "drop the flag; --dry-run accepts it"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
FEWEST_QUEUES = 8
"""CUDA's default number of hardware queues. The streams of a list share fewer, and then wait for each other."""


@dataclass(frozen=True, slots=True)
class StartMachine:
    """A machine's capabilities that flags may ask for."""

    cuda: bool
    packages: frozenset[str]
    """The installed ones of `PACKAGES`."""
    compiler: bool = True
    """Whether Triton finds a C compiler."""

    def lacks(self, need: str) -> str | None:
        """The missing GPU or package for a need of `cli/config_fields.py`; None if nothing is missing."""
        package = {"Transformer Engine": "transformer_engine", "DeepEP": "deep_ep"}.get(need)
        missing = ([] if self.cuda else ["a GPU"]) + ([package] if package and package not in self.packages else [])
        return " and ".join(missing) or None


def this_machine() -> StartMachine:
    """Describe this machine from its devices and installed packages, without torch."""
    packages = (name for name in PACKAGES if is_installed(name))
    compiler = bool(os.environ.get("CC")) or any(map(shutil.which, ("clang", "gcc")))
    return StartMachine(cuda_is_there(), frozenset(packages), compiler)


def cuda_is_there(root: Path = Path("/")) -> bool:
    """Whether the NVIDIA driver shows a GPU: by a device of each, or in WSL2 by one of Windows and CUDA's library beside it."""
    # Windows has its device for GPUs of every maker.
    in_windows = (root / "dev/dxg").exists() and any((root / "usr/lib/wsl").rglob("libcuda.so*"))
    return numbered_gpus(root) > 0 or in_windows


def numbered_gpus(root: Path = Path("/")) -> int:
    """The GPUs for which the driver has a device; none in WSL2, which does not number them."""
    return len(list((root / "dev").glob("nvidia[0-9]*")))


def few_queues(plan: Plan, environment: Mapping[str, str]) -> str | None:
    """The line on an environment whose hardware queues leave a plan little overlap on GPUs; None where they do not.

    Most scripts for Megatron-LM export CUDA_DEVICE_MAX_CONNECTIONS=1, by which it orders kernels of tensor parallelism.
    Instruction lists order theirs by events.
    """
    queues = whole_number(environment.get(CONNECTIONS, ""))
    if not plan.runs_lists or queues is None or queues >= FEWEST_QUEUES:
        return None
    rule = (
        f"{CONNECTIONS}={queues} makes the streams of a GPU wait for each other, so that communication is hardly hidden"
    )
    return f"{rule}; unset it, and 32 queues are used"


def require_startable(parsed: ParsedArguments, machine: StartMachine) -> None:
    """Raise the first obstacle: flag, value, rule and fix."""
    for obstacle in obstacles(parsed, machine):
        raise obstacle


def obstacles(parsed: ParsedArguments, machine: StartMachine) -> list[ConfigError]:
    """Every obstacle to a start of a valid configuration on this machine."""
    config = parsed.config
    awaited = (ConfigError(flag, "", f"{feature}: not executed yet", DRY_RUN) for flag, feature in parsed.awaited)
    return [*_not_given(config), *_needed(config, machine), *_no_compiler(machine), *awaited, *_not_executed(config)]


def _not_given(config: Config) -> Iterator[ConfigError]:
    """Flags that training needs, and a dry run does not."""
    training = config.training
    if training.skip_train:
        return
    if config.optimizer.lr is None:
        yield ConfigError("--lr", "", "training needs it", "add for example --lr 3e-4")
    if training.train_iters is None and training.train_samples is None:
        yield ConfigError("--train-iters", "", "training needs a length", "add --train-iters N")
    for flag in config_flags():
        value = getattr(getattr(config, flag.group), flag.field)
        texts = value if isinstance(value, tuple) else (value,)
        # A run that saved to a folder named ${1} would lose its checkpoints to the next one.
        if any(isinstance(text, str) and VARIABLE.search(text) for text in texts):
            rule = "holds a variable of a shell script without a value"
            fix = "write its value behind the file, or convert the script by tools/import_flags.py --set NAME=VALUE"
            yield ConfigError(flag.names[0], " ".join(map(str, texts)), rule, fix)
            return


def _needed(config: Config, machine: StartMachine) -> Iterator[ConfigError]:
    """Fields and choices whose needs the machine lacks."""
    for flag in config_flags():
        value = getattr(getattr(config, flag.group), flag.field)
        if value == flag.default:
            continue
        if flag.needs is not None:
            yield from _lacking(" ".join(flag_texts(flag, value)), flag.needs, machine)
    if config.moe.moe_token_dispatcher_type == "flex":
        yield from _lacking("--moe-token-dispatcher-type flex", "DeepEP", machine)
    if "moe_act" in (config.parallel.recompute_modules or ()):
        yield from _lacking("--recompute-modules moe_act", "Transformer Engine", machine)


def _no_compiler(machine: StartMachine) -> Iterator[ConfigError]:
    """megatron-core's `jit_fuser` is torch.compile; on a GPU its Triton compiles a launcher in C for every kernel."""
    if machine.cuda and not machine.compiler:
        rule = "none is found, and torch compiles megatron-core's fused functions in the first step on a GPU"
        yield ConfigError("C compiler", "", rule, "apt install gcc python3-dev, or set CC")


def _lacking(flag: str, need: str, machine: StartMachine) -> Iterator[ConfigError]:
    missing = machine.lacks(need)
    if missing is not None:
        fix = "drop the flag, or start where they are; --dry-run accepts it"
        needed = "a GPU" if need == "CUDA" else f"{need} on a GPU"
        yield ConfigError(flag, "", f"needs {needed}: this machine lacks {missing}", fix)


def _not_executed(config: Config) -> Iterator[ConfigError]:
    """Values of fields that this fork executes only in part."""
    parallel, layout = config.parallel, config.parallel.pipeline_model_parallel_layout
    if layout is not None and layout_parts(layout)[-1].count("m") != (config.model.mtp_num_layers or 0):
        rule, fix = "prediction layers m train in the part of the loss", "move m before L; --dry-run accepts it"
        yield ConfigError("--pipeline-model-parallel-layout", layout, rule, fix)
    precision, stages = config.precision, parallel.pipeline_model_parallel_size
    if precision.fp8 is not None and shares_scales(precision.fp8_recipe, stages):
        rule, fix = "its scales are not reduced over the ranks of one stage alone", "use tensorwise, blockwise or mxfp8"
        yield ConfigError("--fp8-recipe", "delayed", rule, f"{fix}; --dry-run accepts it")
    if precision.fp8 is not None and not precision.fp8_wgrad:
        # megatron-core passes it as `override_linear_precision`, which recipes have ignored since before release 2.8.
        rule = "Transformer Engine computes weight gradients in 8 bits all the same"
        yield ConfigError("--no-fp8-wgrad", "", rule, DRY_RUN)
    group, stages = parallel.microbatch_group_size_per_vp_stage, parallel.pipeline_model_parallel_size
    if group not in (None, stages):
        rule = f"a virtual stage gives way after --pipeline-model-parallel-size = {stages} micro-batches"
        fix = f"use {stages} or drop it; --dry-run accepts it"
        yield ConfigError("--microbatch-group-size-per-virtual-pipeline-stage", group, rule, fix)
    yield from _optimizers_not_executed(config)


def _optimizers_not_executed(config: Config) -> Iterator[ConfigError]:
    """Settings of the optimizer whose states this fork cannot store, step or gather."""
    precision, parallel = config.precision, config.parallel
    if config.device.optimizer_cpu_offload:
        rule = "parameters are updated layer by layer, and this optimizer updates all of them at once"
        yield ConfigError("--optimizer-cpu-offload", "", rule, DRY_RUN)
    if precision.use_precision_aware_optimizer and (config.checkpoint.save or config.checkpoint.load):
        rule = "checkpoints hold its states in 32 bits only, as this fork writes and reads them"
        fix = "drop it, or --save and --load; --dry-run accepts it"
        yield ConfigError("--use-precision-aware-optimizer", "", rule, fix)
    if precision.reuse_grad_buf_for_mxfp8_param_ag and parallel.overlap_param_gather:
        rule = "weights that are gathered later would be copied to a buffer that already sums gradients"
        fix = "drop one of the two; --dry-run accepts them"
        yield ConfigError("--reuse-grad-buf-for-mxfp8-param-ag", "", f"{rule} (--overlap-param-gather)", fix)


def quiet_libraries() -> None:
    """Silence the import-time remarks of torch and megatron-core (missing apex, missing Transformer Engine, spec types).

    `torch.utils.cpp_extension`, which megatron-core imports, prints a remark about a missing CUDA runtime if torch is a CUDA
    build and a CUDA toolkit is installed, but there is no GPU.
    """
    warnings.filterwarnings("ignore", module=r"(megatron\.core|torch)\b.*")
    warnings.filterwarnings("ignore", message=r".*(Apex|apex|Transformer Engine|nvidia_resiliency|multi-storage).*")
    for name in ("megatron.core", "torch.distributed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    threading.excepthook = _tell_of_thread


def _tell_of_thread(failed: threading.ExceptHookArgs) -> None:
    """Drop the traceback of TensorBoard's writing thread: the next call of its writer raises the same error."""
    if not type(failed.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(failed)
