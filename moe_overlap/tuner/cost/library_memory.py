"""Device memory that a plan cannot have: what the driver withholds, and what CUDA and NCCL hold beside torch's allocations.

Estimates for every layout of a job on a cluster, so that a search and a prediction compare plans with the same capacity:

    driver      memory on the data sheet less what CUDA reports (`Gpu.usable_gib`; where nobody has read it, 1 % less)
    context     one CUDA context with the kernels that a training step loads
    rings       three communicators of collectives: a tensor or context group, the data group, and all ranks (norms, losses)
    transfers   between nodes, one pool of buffers that the sends and receives of a communicator share
    all-to-alls for MoE models, buffers for every peer in the NVLink domain

NCCL's buffers are per communicator, channel and connection (NVIDIA/nccl#864): of the receiver `RECEIVE_BYTES`, of the sender
`SEND_BYTES` (allocations in NVIDIA/nccl#1685, all-to-all of eight H100: 3.1 GiB, predicted 2.6). Groups within a node that are
connected by NVLink have `NVLINK_CHANNELS` channels, others `OTHER_CHANNELS`.

Measured by others: 7 GB for all communicators of a dense model and 9.5 GB of an MoE model on eight H100, TP 2 PP 2 DP 2
(verl-project/verl#6408, NVLS included, which is not counted here); 0.53 GiB for a communicator of two A100, 0.67 of four
(NVIDIA/nccl#964).
"""

from __future__ import annotations

from moe_overlap.describe.cluster import GIB, Cluster

MIB = 1 << 20
REPORTED_SHARE = 0.99
"""Memory that CUDA reports over that of the data sheet where `usable_gib` is unknown: H100 0.989, B200 0.991, V100 0.986."""
CONTEXT_BYTES = 426 * MIB
"""Context of a process with torch 2.10 for CUDA 13.0 (unslothai/unsloth-zoo#1053)."""
RING_COMMUNICATORS = 3
RING_CONNECTIONS = 2
"""Peers of a rank in a ring and in a tree of the same communicator, each a receiver and a sender."""
RECEIVE_BYTES, SEND_BYTES = 10 * MIB, 2 * MIB
NVLINK_CHANNELS, OTHER_CHANNELS = 24, 4
PEER_CHANNELS = 32
"""Channels to every peer of an all-to-all over NVLink."""
NETWORK_BYTES = 512 * MIB
"""Buffers that sends and receives over the network share (NVIDIA/nccl#2363)."""


def reported_bytes(cluster: Cluster) -> int:
    """Bytes that CUDA reports for a GPU; of a measured machine, and of CPUs, those of its description."""
    gpu = cluster.group_of(0).gpu
    if cluster.measured is not None:
        return int(gpu.memory_gib * GIB)
    return int((REPORTED_SHARE * gpu.memory_gib if gpu.usable_gib is None else gpu.usable_gib) * GIB)


def library_bytes(cluster: Cluster, is_moe: bool) -> int:
    """Bytes of a GPU that CUDA and NCCL hold; 0 on CPUs.

    Args:
        is_moe: whether the model has experts.
    """
    if cluster.measured is not None and cluster.measured.device == "cpu":
        return 0
    links, ranks = cluster.group_of(0), cluster.gpus
    if ranks == 1:
        return CONTEXT_BYTES
    connection = RECEIVE_BYTES + SEND_BYTES
    channels = NVLINK_CHANNELS if links.domain_gpus > 1 else OTHER_CHANNELS
    rings = RING_COMMUNICATORS * RING_CONNECTIONS * channels * connection
    transfers = NETWORK_BYTES if len(cluster.groups) > 1 or links.nodes > 1 else 0
    # A collective library for experts over larger domains keeps fewer buffers than one for each of its peers.
    peers = min(links.domain_gpus, links.gpus_per_node, ranks) - 1
    exchanged = peers * PEER_CHANNELS * connection if is_moe else 0
    return CONTEXT_BYTES + rings + transfers + exchanged


def reserved_bytes(cluster: Cluster, is_moe: bool) -> int:
    """Bytes of a GPU's described memory that a plan cannot have."""
    described = int(cluster.group_of(0).gpu.memory_gib * GIB)
    return described - reported_bytes(cluster) + library_bytes(cluster, is_moe)
