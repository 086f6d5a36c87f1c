"""``primus-odc traffic``: what would cross between nodes, counted, and a prediction beside the published dual-node table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from primus_odc.errors import PlanError
from primus_odc.planning.across import SHAPES, DualNode, Layout, Machine, predict_dual_node
from primus_odc.planning.traffic import NodeTraffic

_GB = 1e9


def add_traffic_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``primus-odc traffic``."""
    machine = Machine()
    parser.add_argument("--shape", choices=sorted(SHAPES), default="14B", help="DeepSeek-R1-Distill-Qwen of that size (default: 14B)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], metavar="N", help="default: 2 4 8 16 32 64")
    parser.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="a NIC each (default: 8)")
    parser.add_argument("--microbatches", type=int, default=3, metavar="N", help="of every rank in a step (default: 3)")
    parser.add_argument("--published", action="store_true", help="predict the published dual-node 14B table instead")
    parser.add_argument("--tflops", type=float, default=machine.tflops, metavar="X", help=f"computed a GPU (default: {machine.tflops:g})")
    parser.add_argument(
        "--nic-gbytes",
        type=float,
        default=machine.nic_gbytes,
        metavar="X",
        help=f"GB/s of a NIC, one way (default: {machine.nic_gbytes:g})",
    )
    parser.add_argument(
        "--link-gbytes",
        type=float,
        default=machine.link_gbytes,
        metavar="X",
        help=f"GB/s inside the node (default: {machine.link_gbytes:g})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_traffic(args: argparse.Namespace) -> int:
    """Print the table; returns the exit code.

    Raises:
        PlanError: a number that is none of its kind.
    """
    for name, least in (("ranks_per_node", 1), ("microbatches", 1), ("tflops", 1e-9), ("nic_gbytes", 1e-9), ("link_gbytes", 1e-9)):
        if not getattr(args, name) >= least:
            raise PlanError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    if min(args.nodes) < 2:
        raise PlanError(f"--nodes {min(args.nodes)}: nothing crosses with fewer than 2")
    machine = Machine(args.tflops, args.nic_gbytes, args.link_gbytes)
    if args.published:
        found = predict_dual_node(machine)
        print(json.dumps(asdict(found)) if args.json else render_prediction(found, machine))
        return 0
    rows = traffic_rows(args.shape, args.nodes, args.ranks_per_node, args.microbatches)
    print(json.dumps(rows) if args.json else render_traffic(args.shape, args.ranks_per_node, args.microbatches, rows))
    return 0


def traffic_rows(shape: str, nodes: Sequence[int], ranks_per_node: int, microbatches: int) -> list[dict[str, Any]]:
    """One row for every number of nodes and way to move the data."""
    rows = []
    for count in nodes:
        layout = Layout(SHAPES[shape], count, ranks_per_node, Machine())
        ways: dict[str, NodeTraffic] = {
            "odc, two levels": layout.ours(),
            "ring, nccl_pad": layout.collectives(microbatches),
            "ring, nccl_zero2": layout.collectives(microbatches, resident=True),
            "published port": layout.port(microbatches),
        }
        rows += [{"nodes": count, "way": way, **asdict(traffic)} for way, traffic in ways.items()]
    return rows


def render_traffic(shape: str, ranks_per_node: int, microbatches: int, rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""

    def lines() -> Iterator[str]:
        yield f"{shape}, {ranks_per_node} ranks and NICs a node, {microbatches} microbatches a step; bf16, but gradients of odc fp32."
        yield ""
        yield "| nodes | way | GB out of a node | GB through each NIC | transfers and words a rank | meetings of all ranks |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for row in rows:
            out = (row["out_parameters"] + row["out_gradients"]) / _GB
            nic = (row["network_parameters"] + row["network_gradients"]) / ranks_per_node / _GB
            yield f"| {row['nodes']} | {row['way']} | {out:.1f} | {nic:.2f} | {row['messages'] / ranks_per_node:.0f} | {row['meetings']} |"

    return "\n".join(lines())


def render_prediction(found: DualNode, machine: Machine) -> str:
    """The prediction as a Markdown table, marked as one."""
    head = [
        "PREDICTION: nothing of ours was run between machines. Speed-up over collectives with equal counts; two nodes of eight, 14B, "
        f"lengths like LongAlign's; assumed: {machine.tflops:g} TFLOP/s a GPU, {machine.nic_gbytes:g} GB/s a NIC, "
        f"{machine.link_gbytes:g} GB/s inside a node.",
        "",
        f"The model of the port has one fitted rate, {found.port_gbytes:.0f} GB/s a NIC; it misses the published figures by "
        f"{found.error:.3f} (root mean square).",
        "",
        "| samples a rank | global batch | published (port) | model of the port | predicted, odc_nopad here | what the plans alone allow |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows = [
        f"| {p.samples_per_rank} | {16 * p.samples_per_rank} | {p.published:.3f} | {p.port:.3f} | {p.ours:.3f} | {p.possible:.3f} |"
        for p in found.points
    ]
    return "\n".join([*head, *rows])
