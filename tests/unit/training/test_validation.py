"""Wrong command lines, each with the one line that answers it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.validation import validate
from moe_overlap.describe.errors import ConfigError
from tests.spawn import HANGS_SECONDS

ROOT = Path(__file__).resolve().parents[3]
BASE_FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 5 --disable-bias-linear --num-experts 8"
)
BASE = BASE_FLAGS.split()
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"

OVERLAP = (
    "--expert-model-parallel-size 2 --moe-gate topk --moe-token-dispatcher-type irregular "
    "--hidden-dropout 0 --attention-dropout 0"
)
DROPLESS = OVERLAP.replace("--moe-gate topk ", "")
GRAPHS = f"{OVERLAP} --defer-weight-gradients --moe-overlap-cuda-graphs"
INSIDE = "its collectives run inside operators, and a graph holds none"
DRAWS = "a graph would draw the same numbers in every micro-batch"
NOT_IN_GRAPHS = (
    (f"{TP2} --sequence-parallel", 2, f"--tensor-model-parallel-size 2: {INSIDE}", "use 1"),
    ("--context-parallel-size 2", 2, f"--context-parallel-size 2: {INSIDE}", "use 1"),
    ("--expert-tensor-parallel-size 2", 4, f"--expert-tensor-parallel-size 2: {INSIDE}", "use 1"),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        2,
        "--recompute-granularity full: graphs hold what recomputation would free",
        "drop it",
    ),
    ("--hidden-dropout 0.1", 2, f"--hidden-dropout 0.1: {DRAWS}", "use 0"),
    ("--attention-dropout 0.1", 2, f"--attention-dropout 0.1: {DRAWS}", "use 0"),
    ("--moe-gate random", 2, f"--moe-gate random: {DRAWS}", "use hash"),
    (
        "--fp8-format e4m3 --fp8-recipe tensorwise --bf16",
        2,
        "--fp8-format e4m3: scales of products in 8 and 4 bits are kept by the host",
        "drop it",
    ),
    (
        "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
        2,
        "--moe-router-load-balancing-type global_aux_loss: the host counts the micro-batches over which this loss is averaged",
        "use seq_aux_loss",
    ),
)

PREDICTION = "--mtp-num-layers 2 --position-embedding-type rope"

WORDS = [
    ("--num-layer 3", "--num-layer: unknown flag; did you mean --num-layers?"),
    ("--moe-grouped-gem", "--moe-grouped-gem: unknown flag; did you mean --moe-grouped-gemm?"),
    ("--qwertzuiop", "--qwertzuiop: unknown flag; see --help"),
    (
        "--use-megatron-fsdp",
        "--use-megatron-fsdp: not supported: this fork shards optimizer states alone (ZeRO-1); drop the flag",
    ),
    ("--lr nan", "--lr nan: must be finite; correct the value"),
    ("--lr -inf", "--lr -inf: must be finite; correct the value"),
    ("--optimizer muon", "--optimizer muon: not supported: this fork has AdamW and SGD; use adam or sgd"),
    (
        "--lr-decay-style cos",
        "--lr-decay-style cos: unknown choice; did you mean cosine? use constant, linear, cosine, inverse-square-root or WSD",
    ),
    ("--num-layers four", "--num-layers four: must be a whole number; correct the value"),
    ("--num-layers", "--num-layers: needs a value; write --num-layers VALUE"),
    ("--bf16 yes", "yes: a word that belongs to no flag (after --bf16); quote values with spaces"),
    (
        f"--bf16 {__file__}",
        f"{__file__}: a word that belongs to no flag (after --bf16); write @{__file__} for the flags in it",
    ),
    ("@missing.args", "@missing.args: cannot read missing.args: No such file or directory; correct the path"),
    (
        "--moe-layer-freq print(1)",
        "--moe-layer-freq print(1): must be a whole number or a list of 0 and 1; "
        'write for example 2 or "([0]*3+[1]*5)"',
    ),
    ("--window-size 128", "--window-size 128: must be two whole numbers; write for example 128,0"),
    ("--world-size 2", "--world-size 2: torchrun sets it; use torchrun --nproc-per-node N"),
    ("--dry-run --world-size ²", "--world-size ²: must be a positive whole number; correct the value"),
    (
        f"--dry-run --world-size {'9' * 5000}",
        f"--world-size {'9' * 399}…: must be a positive whole number; correct the value",
    ),
]

RULES = [
    (
        "--window-size 8,1",
        1,
        "--window-size 8,1: attention is causal: nothing after a token is seen; use 8,0",
    ),
    (
        "--window-size 8,0 --window-attn-skip-freq [1,0]",
        1,
        "--window-attn-skip-freq [1,0]: the list has 2 entries for 4 layers; give one entry per layer",
    ),
    (
        "--window-size 8,0 --window-attn-skip-freq [1,0,1,0] --mtp-num-layers 1 --position-embedding-type rope",
        1,
        "--window-attn-skip-freq [1,0,1,0]: the list has 4 entries for 4 layers and 1 behind them (--mtp-num-layers); "
        "give one entry per layer",
    ),
    (
        "--position-embedding-type yarn --rotary-percent 0.5",
        1,
        "--rotary-percent 0.5: YaRN rotates whole heads; use 1.0",
    ),
    (
        "--position-embedding-type yarn --yarn-beta-slow 40",
        1,
        "--yarn-beta-slow 40.0: --yarn-beta-fast 32 is not above it; correct one of them",
    ),
    (
        "--position-embedding-type yarn --multi-latent-attention",
        1,
        "--position-embedding-type yarn: latent attention has rotary positions of its own; use rope, and --rope-type yarn",
    ),
    (
        "--quick-geglu --swiglu",
        1,
        "--quick-geglu: --swiglu chooses another activation; drop one of the two flags",
    ),
    (
        "--swiglu --activation-func-clamp-value -7",
        1,
        "--activation-func-clamp-value -7.0: must be positive; use for example 7.0",
    ),
    (
        "--expert-model-parallel-size 3",
        3,
        "--expert-model-parallel-size 3: 8 experts are not divisible by 3; use 1, 2, 4 or 8",
    ),
    (
        "--micro-batch-size 3 --global-batch-size 16",
        2,
        "--micro-batch-size 3: global batch 16 is not a multiple of micro-batch × data-parallel = 3 × 2; "
        "use 1, 2, 4 or 8, or --global-batch-size 12 or 18",
    ),
    (
        "--micro-batch-size 8 --global-batch-size 8",
        2,
        "--micro-batch-size 8: global batch 8 is not a multiple of micro-batch × data-parallel = 8 × 2; "
        "use 1, 2 or 4, or --global-batch-size 16",
    ),
    (
        "--global-batch-size 3",
        2,
        "--global-batch-size 3: global batch 3 is not a multiple of micro-batch × data-parallel = 2 × 2; "
        "use a multiple of 4",
    ),
    (
        "--pipeline-model-parallel-size 3",
        3,
        "--pipeline-model-parallel-size 3: 4 layers are not divisible by 3; use 1, 2 or 4, or keep 3 by "
        "--decoder-last-pipeline-num-layers 2, --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "or --pipeline-model-parallel-layout",
    ),
    (
        TP2,
        2,
        "--tensor-model-parallel-size 2: experts with tensor parallelism need sequence parallelism; "
        "add --sequence-parallel",
    ),
    (
        f"{TP2} --sequence-parallel",
        3,
        "world size 3: not a multiple of TP × PP × CP = 2 × 1 × 1; use a multiple of 2 ranks",
    ),
    (
        "--expert-model-parallel-size 4",
        2,
        "world size 2: not a multiple of ETP × EP × PP = 1 × 4 × 1; use a multiple of 4 ranks",
    ),
    (
        "--context-parallel-size 2 --seq-length 62",
        2,
        "--seq-length 62: --context-parallel-size 2 cuts it into 4 pieces; use a multiple of 4",
    ),
    (
        f"{PP2} --pipeline-model-parallel-layout Et|t|tL",
        2,
        "--pipeline-model-parallel-layout Et|t|tL: names 3 stages for --pipeline-model-parallel-size 2; "
        "name a multiple of 2",
    ),
    (
        f"{PP2} --pipeline-model-parallel-layout E|t*{'9' * 5000}L",
        2,
        f"--pipeline-model-parallel-layout E|t*{'9' * 395}…: holds 100000 layers of --num-layers 4; name 4 layers t",
    ),
    (
        f"{PP2} --pipeline-model-parallel-layout E(tt|)*2L",
        2,
        "--pipeline-model-parallel-layout E(tt|)*2L: names 3 stages for --pipeline-model-parallel-size 2; "
        "name a multiple of 2",
    ),
    (
        "--mtp-num-layers 1",
        1,
        "--position-embedding-type learned_absolute: prediction layers have rotary positions or none; use rope",
    ),
    (
        "--mtp-num-layers -1 --position-embedding-type rope",
        1,
        "--mtp-num-layers -1: must be at least 0; use 0 or more",
    ),
    (
        f"{PREDICTION} --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        1,
        "--recompute-num-layers 2: --mtp-num-layers 2 recomputes uniformly layer by layer; "
        "use 1, or --recompute-method block",
    ),
    (
        f"{OVERLAP} --defer-weight-gradients --cpu-offloading-num-layers 2",
        2,
        "--cpu-offloading-num-layers: --defer-weight-gradients runs layers operator by operator, and only megatron-core's own "
        "passes offload activations; drop it or --defer-weight-gradients",
    ),
    (
        f"{OVERLAP} --moe-overlap-partitions 2 --fine-grained-activation-offloading --offload-modules core_attn",
        2,
        "--fine-grained-activation-offloading: --moe-overlap-partitions runs layers operator by operator, and only "
        "megatron-core's own passes offload activations; drop it or --moe-overlap-partitions",
    ),
    (
        f"{OVERLAP} {PREDICTION} --defer-weight-gradients",
        2,
        "--mtp-num-layers 2: --defer-weight-gradients overlaps the layers of the decoder alone; "
        "drop it or --defer-weight-gradients",
    ),
    (
        f"{OVERLAP} {PREDICTION} --moe-overlap-partitions 2",
        2,
        "--mtp-num-layers 2: --moe-overlap-partitions overlaps the layers of the decoder alone; "
        "drop it or --moe-overlap-partitions",
    ),
    (
        f"{PP2} {PREDICTION} --pipeline-model-parallel-layout Ett|ttmL",
        2,
        "--pipeline-model-parallel-layout Ett|ttmL: holds 1 prediction layers of --mtp-num-layers 2; name 2 layers m",
    ),
    (
        f"--pipeline-model-parallel-size 4 {PREDICTION} --pipeline-model-parallel-layout Ett|tt|m|mL",
        4,
        "--pipeline-model-parallel-layout Ett|tt|m|mL: prediction layers m stand in one part, the last of its rank; "
        'end with "mmL"',
    ),
    (
        "--pipeline-model-parallel-layout Ett|ttL",
        1,
        "--pipeline-model-parallel-layout Ett|ttL: interleaving needs a pipeline; "
        "add --pipeline-model-parallel-size or name one part",
    ),
    (
        "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ett||ttL",
        3,
        "--pipeline-model-parallel-layout Ett||ttL: names a part that holds nothing; give every part a layer t",
    ),
    (
        f"{PP2} --pipeline-model-parallel-layout Ett|tL",
        2,
        "--pipeline-model-parallel-layout Ett|tL: holds 3 layers of --num-layers 4; name 4 layers t",
    ),
    (
        "--pipeline-model-parallel-layout Exttt|L",
        1,
        "--pipeline-model-parallel-layout Exttt|L: has another letter than E (embedding), t (layer), "
        'm (prediction layers), L (loss) and |; write for example "Et*3|(tt|)*6tL"',
    ),
    (
        "--rampup-batch-size 2 2 8",
        1,
        "--rampup-batch-size 2 2 8: a batch that changes counts samples; give --train-samples instead of --train-iters",
    ),
    (
        "--moe-enable-deepep",
        1,
        "--moe-enable-deepep: belongs to --moe-token-dispatcher-type flex; add that flag or drop this one",
    ),
    (
        "--num-experts 8 --moe-token-dispatcher-type flex",
        1,
        "--moe-token-dispatcher-type flex: every rank has all experts; add --expert-model-parallel-size or use alltoall",
    ),
    ("--openai-gelu --swiglu", 1, "--openai-gelu: --swiglu chooses another activation; drop one of the two flags"),
    (
        "--openai-gelu --squared-relu",
        1,
        "--openai-gelu: --squared-relu chooses another activation; drop one of the two flags",
    ),
    ("--squared-relu --swiglu", 1, "--squared-relu: --swiglu chooses another activation; drop one of the two flags"),
    (
        "--decoupled-lr 1e-4 --decoupled-min-lr 1e-3",
        1,
        "--decoupled-min-lr 0.001: is above --decoupled-lr 0.0001; use 0.0001 or less",
    ),
    (
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --no-overlap-p2p-communication",
        2,
        "--no-overlap-p2p-communication: interleaved stages train wrongly with transfers in batches (2 stages); "
        "drop the flag",
    ),
    (
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 6",
        2,
        "--global-batch-size 6: 3 micro-batches do not fill groups of 2, as interleaved stages take them; "
        "choose --global-batch-size for a multiple of 2 micro-batches",
    ),
    ("--moe-router-topk 9", 1, "--moe-router-topk 9: there are 8 experts; use 1 to 8"),
    (
        "--moe-router-topk 1",
        1,
        "--moe-router-topk 1: a softmax over one expert is constant: the router would not learn; "
        "add --moe-router-pre-softmax",
    ),
    (
        "--moe-router-enable-expert-bias",
        1,
        "--moe-router-enable-expert-bias: megatron-core balances by bias on sigmoid scores only; "
        "add --moe-router-score-function sigmoid",
    ),
    (
        "--moe-pad-expert-input-to-capacity",
        1,
        "--moe-pad-expert-input-to-capacity: needs a capacity; add --moe-expert-capacity-factor",
    ),
    (
        "--moe-router-num-groups 4",
        1,
        "--moe-router-num-groups 4: needs the groups per token; add --moe-router-group-topk",
    ),
    (
        "--moe-router-num-groups 3 --moe-router-group-topk 2",
        1,
        "--moe-router-num-groups 3: 8 experts are not divisible by 3; use 1, 2, 4 or 8",
    ),
    (
        "--moe-router-load-balancing-type aux_loss seq_aux_loss",
        1,
        "--moe-aux-loss-coeff 0.0: 1 coefficients for 2 kinds of balancing; "
        "give one per --moe-router-load-balancing-type",
    ),
    (
        "--moe-layer-freq [0,1]",
        1,
        "--moe-layer-freq [0,1]: the list has 2 entries for 4 layers; give one entry per layer",
    ),
    (
        "--seq-length 128",
        1,
        "--seq-length 128: --max-position-embeddings covers 64 positions; "
        "use 64 or less, or raise --max-position-embeddings",
    ),
    (
        "--train-samples 10",
        1,
        "--train-samples 10: a run counts steps or samples; give --train-iters or --train-samples",
    ),
    ("--log-memory-interval 0", 1, "--log-memory-interval 0: must be at least 1; use 1 or more"),
    ("--vocab-size 200", 1, "--vocab-size 200: the tokenizer has 257 ids; use at least 257 or drop the flag"),
    (
        "--tokenizer-model m --vocab-file v",
        1,
        "--tokenizer-model m: is read with --tokenizer-type only, and there is none; add --tokenizer-type HuggingFaceTokenizer, "
        "TikTokenizer, SentencePieceTokenizer, GPTSentencePieceTokenizer or Llama2Tokenizer",
    ),
    (
        "--merge-file m",
        1,
        "--merge-file m: is read with --tokenizer-type only, and there is none; "
        "add --tokenizer-type GPT2BPETokenizer and --vocab-file FILE",
    ),
    ("--eval-global-batch-size 0", 1, "--eval-global-batch-size 0: must be at least 1; use 1 or more"),
    (
        "--eval-global-batch-size 3",
        2,
        "--eval-global-batch-size 3: not a multiple of micro-batch × data-parallel = 2 × 2; use a multiple of 4",
    ),
    (
        f"--eval-global-batch-size 6 --global-batch-size 8 {PP2} --num-virtual-stages-per-pipeline-rank 2",
        2,
        "--eval-global-batch-size 6: not a multiple of micro-batch × data-parallel = 2 × 1 × 2, the micro-batches that "
        "interleaved stages take at once; use a multiple of 4",
    ),
    ("--min-lr 1", 1, "--min-lr 1.0: is above --lr 0.001; use 0.001 or less"),
    (
        "--split 0,0,0",
        1,
        "--split 0,0,0: must be up to three parts for training, validation and test; use for example 969,30,1",
    ),
    (
        "--split ²,1",
        1,
        "--split ²,1: must be up to three parts for training, validation and test; use for example 969,30,1",
    ),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
        1,
        "--recompute-num-layers 5: the smallest part of the model on a rank has 4 layers; use 1 to 4",
    ),
    (
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 2",
        1,
        "--lr-warmup-iters 2: --lr-warmup-fraction says the same; give one of the two",
    ),
    (
        "--moe-gate switch",
        1,
        "--moe-router-topk 2: the switch gate sends a token to one expert; "
        "add --moe-router-topk 1 or use --moe-gate topk",
    ),
    (
        f"{OVERLAP} --moe-overlap-partitions 2 --moe-token-dispatcher-type alltoall",
        2,
        "--moe-token-dispatcher-type alltoall: --moe-overlap-partitions exchanges tokens by the irregular dispatcher; "
        "use irregular",
    ),
    (
        f"{OVERLAP} --moe-overlap-capacity-chunks 2 --moe-token-dispatcher-type alltoall",
        2,
        "--moe-token-dispatcher-type alltoall: --moe-overlap-capacity-chunks exchanges tokens by the irregular "
        "dispatcher; use irregular",
    ),
    (
        f"{OVERLAP} --moe-overlap-partitions 2 --moe-gate batch_prioritized --moe-expert-capacity-factor 1",
        2,
        "--moe-overlap-range around: the gate batch_prioritized sorts the tokens of the whole micro-batch, which can then "
        "not be partitioned before the MoE layer; use after or experts, or --moe-gate topk or switch or random or hash",
    ),
    (
        f"{DROPLESS} --moe-overlap-partitions 2 --moe-expert-capacity-factor 1",
        2,
        "--moe-overlap-partitions 2: capacity passes from part to part in our gates only; add --moe-gate topk",
    ),
    (
        f"{DROPLESS} --moe-overlap-partitions 2 --moe-input-jitter-eps 0.1",
        2,
        "--moe-input-jitter-eps 0.1: its noise depends on the order of the calls, which --moe-gate topk does not allow; "
        "drop the flag",
    ),
    (
        f"{OVERLAP} --moe-overlap-partitions 2 --hidden-dropout 0.1",
        2,
        "--hidden-dropout 0.1: its masks would depend on how the micro-batch is cut; use 0",
    ),
    (
        f"{OVERLAP} --moe-gate topk --moe-overlap-partitions 2 --attention-dropout 0 --hidden-dropout 0 "
        "--recompute-granularity selective --recompute-modules moe layernorm",
        2,
        "--recompute-modules moe layernorm: a layer keeps one normed input to compute again, and partitions are under way "
        "together; drop layernorm",
    ),
    (
        "--overlap-grad-reduce --moe-overlap-grad-reduce at-once",
        2,
        "--moe-overlap-grad-reduce at-once: says when instruction lists reduce gradients, and nothing is overlapped; "
        "drop it, or add --defer-weight-gradients",
    ),
    (
        f"{OVERLAP} --defer-weight-gradients --moe-overlap-grad-reduce at-once",
        2,
        "--moe-overlap-grad-reduce at-once: works on the buckets of --overlap-grad-reduce; add --overlap-grad-reduce",
    ),
    (
        f"{OVERLAP} --defer-weight-gradients --moe-overlap-forward-send late",
        2,
        "--moe-overlap-forward-send late: says when one of two micro-batches at a time sends to the next stage, and they run "
        "one by one; drop it, or add --moe-overlap-micro-batches 2",
    ),
    (
        f"{OVERLAP} --moe-overlap-micro-batches 2 --moe-overlap-forward-send late",
        2,
        "--moe-overlap-forward-send late: says when one of two micro-batches at a time sends to the next stage, and there is "
        "one; drop it",
    ),
    (
        f"{OVERLAP} --defer-weight-gradients --overlap-param-gather",
        2,
        "--overlap-param-gather: works on the buckets of --overlap-grad-reduce; add --overlap-grad-reduce",
    ),
    (
        "--moe-overlap-cuda-graphs",
        1,
        "--moe-overlap-cuda-graphs: captures the operators of instruction lists, and nothing is overlapped; "
        "drop it, or add --defer-weight-gradients",
    ),
    *(
        (f"{GRAPHS} {flag}", ranks, f"{said}; {fix} or drop --moe-overlap-cuda-graphs")
        for flag, ranks, said, fix in NOT_IN_GRAPHS
    ),
    (
        f"{GRAPHS.replace('--moe-gate topk ', '')}",
        2,
        "--moe-overlap-cuda-graphs: megatron-core's router logs its losses where a graph must not keep them; "
        "add --moe-gate topk",
    ),
    ("--vocab-size 1000000000000000", 1, "--vocab-size 1000000000000000: is more than 100000000; correct the value"),
    ("--hidden-size 1000000000000", 1, "--hidden-size 1000000000000: is more than 100000000; correct the value"),
    (
        "--moe-ffn-hidden-size 100000001",
        1,
        "--moe-ffn-hidden-size 100000001: is more than 100000000; correct the value",
    ),
    (
        "--hidden-size 66",
        1,
        "--num-attention-heads 4: hidden size 66 is not divisible by 4 heads; change one of them or give --kv-channels",
    ),
]


def answer(words: list[str], world_size: int) -> str:
    """The line a user reads after `error: `, or nothing."""
    try:
        validate(parse(words).config, world_size)
    except ConfigError as error:
        return str(error)
    return ""


def test_the_base_is_right() -> None:
    assert answer(BASE, 1) == ""
    assert answer([*BASE, "--expert-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"], 4) == ""


@pytest.mark.parametrize(("words", "line"), WORDS)
def test_wrong_words(words: str, line: str) -> None:
    assert answer([*BASE, *words.split()], 1) == line


@pytest.mark.parametrize(("words", "world_size", "line"), RULES)
def test_broken_rules(words: str, world_size: int, line: str) -> None:
    assert answer([*BASE, *words.split()], world_size) == line


@pytest.mark.parametrize(("words", "line"), [WORDS[0], WORDS[3], (RULES[0][0], RULES[0][2])])
def test_the_command_prints_one_line_and_exits_with_2(words: str, line: str) -> None:
    command = [sys.executable, "pretrain_moe.py", *BASE, *words.split()]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=HANGS_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {line}\n")


def test_validation_changes_nothing() -> None:
    config = parse(BASE).config
    before = repr(config)
    validate(config, 1)
    assert repr(config) == before
