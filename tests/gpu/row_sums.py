"""Sums of a token's rows, three ways: `python -m tests.gpu.row_sums [--repeats 5]`

Unpermute and the backward pass of permute add the rows of a token: four passes over them in a layer. The way that runs is
`index_add_`; with --deterministic-mode it is that of runtime/dispatch/ordered_sums.py. On a CPU, bf16, 4096 tokens, 8 rows each,
2048 wide, one thread, `index_add_` takes 56 ms, segments 845 and a sum over a token's rows 476. A GPU adds by atomics, in bf16:
whether a gather and sums in fp32 are faster there, and how much closer, is what this program measures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_overlap.runtime.dispatch.ordered_sums import sum_by_token

SIZES = ((4096, 8, 2048), (4096, 2, 4096), (16384, 8, 2048))
"""(tokens, rows of each, elements of a row)."""


def added(rows_NX: Tensor, tokens_N: Tensor, tokens: int) -> Tensor:
    """By atomics."""
    return rows_NX.new_zeros((tokens, rows_NX.shape[1])).index_add_(0, tokens_N, rows_NX)


def gathered(rows_NX: Tensor, tokens_N: Tensor, tokens: int) -> Tensor:
    """A gather and a sum in fp32: right where every token has as many rows, as without a capacity."""
    order_N = tokens_N.argsort(stable=True)
    sorted_TKX = rows_NX.index_select(0, order_N).view(tokens, -1, rows_NX.shape[1])
    return sorted_TKX.sum(1, dtype=torch.promote_types(rows_NX.dtype, torch.float32)).to(rows_NX.dtype)


WAYS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "index_add_": added,
    "segments in fp32": sum_by_token,
    "gather, sum in fp32": gathered,
}


def routed(tokens: int, rows_each: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """Rows in fp32 in order of their expert, and the token of each."""
    drawn = torch.Generator(device).manual_seed(0)
    experts = 4 * rows_each
    chosen_TE = torch.rand(tokens, experts, generator=drawn, device=device).argsort(1) < rows_each
    return torch.randn(tokens * rows_each, width, generator=drawn, device=device), chosen_TE.t().nonzero()[:, 1]


def seconds_of(way: Callable[[], Tensor], repeats: int, device: str) -> list[float]:
    """Seconds of every repeat, behind one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        way()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def main(argv: Sequence[str] | None = None, sizes: Sequence[tuple[int, int, int]] = SIZES) -> int:
    """Print the table; it says which device it is of."""
    parser = argparse.ArgumentParser(prog="tests.gpu.row_sums", description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args(argv).repeats
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}; {repeats} repeats"
    )
    print("| tokens × rows × width | type | way | least ms | median | largest | error |\n|---|---|---|---|---|---|---|")
    for tokens, rows_each, width in sizes:
        exact_NX, tokens_N = routed(tokens, rows_each, width, device)
        for dtype in (torch.bfloat16, torch.float32):
            rows_NX = exact_NX.to(dtype)
            sums_TX = added(rows_NX.double(), tokens_N, tokens)
            for name, way in WAYS.items():
                seconds = seconds_of(lambda w=way, r=rows_NX, t=tokens_N, n=tokens: w(r, t, n), repeats, device)  # type: ignore[misc]
                figures = [1e3 * s for s in (min(seconds), statistics.median(seconds), max(seconds))]
                error = float((way(rows_NX, tokens_N, tokens).double() - sums_TX).norm() / sums_TX.norm())
                shown = " | ".join(f"{figure:.3f}" for figure in figures)
                print(f"| {tokens} × {rows_each} × {width} | {str(dtype)[6:]} | {name} | {shown} | {error:.1e} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
