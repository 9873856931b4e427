"""The names of the launcher's flags, which are torchrun's, and what `--help` says of them."""

from __future__ import annotations

LAUNCH_IS = "start of the ranks, as torchrun names it; on the command line, not in a file"
STANDALONE = "--standalone"
LAUNCH_FLAGS = {
    "--nproc-per-node": (
        "N",
        "Start N ranks on this machine, or `gpu`: one for each GPU. Everything is checked before.",
    ),
    "--nnodes": ("N", "Number of machines; the same command is started on each. Default 1."),
    "--rdzv-endpoint": ("HOST:PORT", "Where several machines meet: one of them, and a free port there."),
    "--rdzv-backend": ("NAME", "c10d: the machines number themselves; static: --node-rank numbers them."),
    "--rdzv-id": ("NAME", "Name of the job, where several jobs meet at the same endpoint."),
    "--node-rank": ("N", "Number of this machine, from 0; with --master-addr or --rdzv-backend static."),
    "--master-addr": ("HOST", "The machine with --node-rank 0, in place of --rdzv-endpoint."),
    "--master-port": ("PORT", "A free port there; default 29500."),
    "--max-restarts": ("N", "How often the ranks are started again after one has failed; default 0."),
    STANDALONE: ("", "One machine, a free port; so it is anyway where nothing else is said."),
}
"""Name -> placeholder of its value, and what it does."""


def launch_help() -> str:
    """The launcher's flags as paragraphs of `--help`, behind a line that says what they are."""
    return f"{LAUNCH_IS}\n" + "".join(
        f"  {f'{name} {value}'.strip()}\n    {text}\n" for name, (value, text) in LAUNCH_FLAGS.items()
    )
