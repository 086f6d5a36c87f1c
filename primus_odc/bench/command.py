"""``primus-odc bench primitives | train | published | curves | primus | report``: start ranks on this host, or make tables of a file."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from primus_odc._arguments import positive, repeated, seed, take_overrides
from primus_odc.bench.in_primus import add_primus_arguments, run_in_primus
from primus_odc.bench.job import IDEAL, LENGTHS, ON_DEMAND, STOCK, Job
from primus_odc.bench.markdown import render
from primus_odc.bench.published import ARMS, BUDGET_S, MINIBATCHES, TABLE, render_published
from primus_odc.bench.results import load, merge, save
from primus_odc.bench.shapes import SHAPES
from primus_odc.bench.summary import BASELINE
from primus_odc.errors import ConfigError, OdcError
from primus_odc.megatron.compare import run_job
from primus_odc.megatron.local_ranks import run_ranks
from primus_odc.report.command import ARMS as COMPARED
from primus_odc.report.machine import describe_command

KIB, MIB = 2**10, 2**20
DEFAULT_SIZES = [256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
SHAPE_HELP = f"default: qwen2-1.5b; tiny divides lengths and caps by {SHAPES['tiny'].length_divisor}"
_SUFFIXES = {"K": KIB, "M": MIB, "G": 2**30}


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``primus-odc bench``."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    train = kinds.add_parser("train", help="steps of all arms on the same minibatches", allow_abbrev=False)
    train.add_argument("--points", type=_point, nargs="+", required=True, metavar="SAMPLES[:CAP]", help="samples a rank, microbatch cap")
    train.add_argument(
        "--arms",
        nargs="+",
        default=["nccl_pad", "odc_pad", "odc_nopad", IDEAL],
        metavar="ARM",
        help=f"of {', '.join([*STOCK, *ON_DEMAND, IDEAL])}, odc_nopad:resident, odc_nopad:owner",
    )
    train.add_argument("--cap", type=positive, default=32768, metavar="TOKENS", help="cap of points that name none (default: 32768)")
    train.add_argument("--minibatches", type=positive, default=8, metavar="N", help="of every point (default: 8)")
    train.add_argument("--sequence", type=positive, default=2, metavar="N", help="minibatches an arm runs back to back (default: 2)")
    train.add_argument("--shape", choices=list(SHAPES), default="qwen2-1.5b", help=SHAPE_HELP)
    train.add_argument("--lengths", choices=LENGTHS, default=LENGTHS[0], help="of the samples; equal: all of half the cap")
    train.add_argument("--layers", type=positive, metavar="N", help="instead of the shape's own number")
    train.add_argument("--seed", type=seed, default=0, help="of lengths and weights (default: 0)")
    train.add_argument("--optimizer", choices=["local", "graph", "dtensor"], default="local", help="see bench/optimizer.py")
    train.add_argument("--clip-grad", type=float, default=1.0, metavar="NORM", help="0: only the norm")
    train.add_argument(
        "--fixed-tokens", type=float, default=128.0, metavar="N", help="a microbatch's fixed cost in the plan (default: 128)"
    )
    train.add_argument("--share-model", action="store_true", help="one model for all arms; engines come and go between visits")
    train.add_argument("--deterministic", action="store_true", help="torch.use_deterministic_algorithms, engine option deterministic")
    train.add_argument("--budget-s", type=float, default=0.0, metavar="S", help="start no block that would end later; 0: no limit")
    train.add_argument("--trace", metavar="DIR", help="afterwards one minibatch of every arm as a trace and a picture")
    primitives = kinds.add_parser("primitives", help="gather and scatter-accumulate against the collectives", allow_abbrev=False)
    primitives.add_argument("--sizes", type=_bytes, nargs="+", default=DEFAULT_SIZES, metavar="BYTES", help="of the whole tensor, e.g. 64M")
    primitives.add_argument("--repeats", type=positive, default=20, metavar="N", help="timings of each (default: 20)")
    published = kinds.add_parser("published", help="the points of the published table, all arms in one call", allow_abbrev=False)
    published.add_argument("--samples-per-rank", type=int, nargs="+", choices=list(TABLE), default=list(TABLE), metavar="N")
    published.add_argument("--cap", type=positive, default=32768, metavar="TOKENS", help="of a microbatch (default: 32768)")
    published.add_argument("--shape", choices=list(SHAPES), default="qwen2-1.5b", help=SHAPE_HELP)
    published.add_argument("--layers", type=positive, metavar="N", help="instead of the shape's own number")
    published.add_argument(
        "--minibatches", type=positive, default=MINIBATCHES, metavar="N", help=f"of every point (default: {MINIBATCHES})"
    )
    published.add_argument(
        "--budget-s", type=float, default=BUDGET_S, metavar="S", help=f"start no block that would end later (default: {BUDGET_S:g})"
    )
    for kind in (train, primitives, published):
        kind.add_argument("--out", required=True, metavar="FILE.json", help="result file; entries are added to it")
        kind.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
        kind.add_argument("--nproc", type=positive, metavar="N", help="ranks (default: all GPUs; 2 on the CPU)")
        kind.add_argument("--transport", "--odc.transport", dest="transport", default="auto", help="of the engine, as odc.transport")
        kind.add_argument("--odc.ranks_per_node", dest="ranks_per_node", type=positive, metavar="N", help="as in the YAML")
        kind.add_argument("--odc.interface", dest="interface", metavar="NAME", help="as in the YAML")
        kind.add_argument("--odc.nic", dest="nic", metavar="KIND", help="as in the YAML")
        kind.add_argument("--timeout-s", type=float, default=120.0, metavar="S", help="for a silent peer or collective (default: 120)")
        kind.add_argument("--commit", metavar="TEXT", help="what was measured, where git cannot tell")
    what = "the minibatches of bench train in the real Primus, arm after arm"
    add_primus_arguments(kinds.add_parser("primus", help=what, allow_abbrev=False))
    curves = kinds.add_parser("curves", help="loss curves of the arms, and whether they are the same", allow_abbrev=False)
    curves.add_argument("config", type=Path, help="an experiment YAML, for example configs/gpu_curves.yaml")
    curves.add_argument("--arms", nargs="+", choices=list(COMPARED), default=list(COMPARED), metavar="ARM", help="default: all")
    curves.add_argument("--steps", type=positive, metavar="N", help="of every curve (default: train_iters)")
    curves.add_argument("--assignments", type=positive, default=6, metavar="N", help="of samples to ranks, for nccl_pad (default: 6)")
    curves.add_argument("--of-others", type=positive, default=2, metavar="N", help="for every other arm: the first N (default: 2)")
    curves.add_argument("--nproc", type=positive, metavar="N", help="ranks (default: all GPUs; on the CPU the smaller of cores and 4)")
    curves.add_argument("--out", required=True, metavar="FILE.json", help="result file; an entry is added to it")
    take_overrides(curves)
    report = kinds.add_parser("report", help="result files as Markdown", allow_abbrev=False)
    report.add_argument("files", type=Path, nargs="+", metavar="FILE.json", help="runs of one commit and machine are put together")
    report.add_argument("--output", type=Path, metavar="FILE.md", help="default: standard output")
    report.add_argument("--published", action="store_true", help="only the points of the published table, beside it")
    report.add_argument("--merged", type=Path, metavar="FILE.json", help="write all results into one file too")


def run_bench(args: argparse.Namespace) -> int:
    """Run the benchmark, or print its tables; returns the exit code.

    Raises:
        ConfigError: wrong arguments.
        OdcError: a rank failed; the message holds what it said. Or the time budget was too small for anything.
    """
    if args.kind == "report":
        if missing := [str(file) for file in args.files if not file.exists()]:
            raise ConfigError([f"{file} does not exist" for file in missing])
        content = load(args.files[0])
        for file in args.files[1:]:
            merge(content, load(file))
        if args.merged is not None:
            save(args.merged, content)
        _put(render_published(content) if args.published else render(content), args.output)
        return 0
    if args.kind == "primus":
        return run_in_primus(args)
    before = load(Path(args.out))  # rather now than after the measurement
    if args.kind == "curves":
        _curves(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="primus-odc-") as folder:
        job = _job(args, str(Path(folder) / "store"))
        job.check()
        file = Path(folder) / "job.json"
        job.write(file)
        run_ranks("primus_odc.bench.worker", [str(file)], job.world_size, silence_s=4 * job.timeout_s, progress=_show)
    if load(Path(args.out)) == before:
        raise OdcError(f"the time budget (--budget-s {job.budget_s:g}) ended before the first block: nothing was measured; give more")
    if args.kind == "published":
        _put(render_published(load(Path(args.out))), None)
    return 0


def _curves(args: argparse.Namespace) -> None:
    problems = []
    if BASELINE not in args.arms:
        problems.append(f"--arms: {BASELINE} is what the others are judged by; name it too")
    problems += repeated("--arms", args.arms)
    if set(args.arms) == {BASELINE}:
        problems.append(f"--arms: {BASELINE} alone leaves nothing to judge; name another arm beside it")
    if args.assignments < 2:
        problems.append(f"--assignments {args.assignments}: a spread needs at least 2")
    if args.of_others > args.assignments:
        problems.append(f"--of-others {args.of_others}: at most as many as --assignments {args.assignments}")
    if problems:
        raise ConfigError(problems)
    run_job(
        args.config,
        overrides=args.overrides,
        arms=args.arms,
        steps=args.steps,
        nproc=args.nproc,
        command=describe_command(sys.argv),
        result=Path(args.out).absolute(),
        entry="primus_odc.bench.curves:train_curves",
        assignments=args.assignments,
        of_others=args.of_others,
    )


def _job(args: argparse.Namespace, store: str) -> Job:
    common = {
        "kind": "primitives" if args.kind == "primitives" else "train",
        "device": args.device,
        "world_size": args.nproc or _default_ranks(args.device, args.kind),
        "transport": args.transport,
        "ranks_per_node": args.ranks_per_node,
        "interface": args.interface,
        "nic": args.nic,
        "timeout_s": args.timeout_s,
        "out": args.out,
        "commit": args.commit,
        "command": describe_command(sys.argv),
        "store": store,
    }
    if args.kind == "primitives":
        return Job(**common, bytes=args.sizes, repeats=args.repeats)
    divisor = SHAPES[args.shape].length_divisor
    if args.kind == "published":
        points = [(samples, args.cap // divisor) for samples in args.samples_per_rank]
        optimizer = "graph" if args.device == "cuda" else "local"
        rest = {name: getattr(args, name) for name in ("shape", "layers", "minibatches", "budget_s")}
        return Job(**common, points=points, arms=ARMS, optimizer=optimizer, clip_grad=1.0, **rest)
    points = [(samples, (cap or args.cap) // divisor) for samples, cap in args.points]
    names = (
        "arms",
        "lengths",
        "minibatches",
        "sequence",
        "shape",
        "layers",
        "seed",
        "optimizer",
        "clip_grad",
        "fixed_tokens",
        "share_model",
    )
    rest = {name: getattr(args, name) for name in (*names, "deterministic", "budget_s", "trace")}
    return Job(**common, points=points, **rest)


def _default_ranks(device: str, kind: str) -> int:
    if device == "cpu":
        return 2
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        shape = "" if kind == "primitives" else " --shape tiny"
        raise ConfigError([f"--device cuda: torch sees no GPU; use --device cpu{shape} to try the benchmark"])
    return count


def _put(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _point(word: str) -> tuple[int, int | None]:
    samples, colon, cap = word.partition(":")
    return positive(samples), positive(cap) if colon else None


def _bytes(word: str) -> int:
    number, unit = word[:-1], _SUFFIXES.get(word[-1:].upper())
    try:
        return positive(number) * unit if unit else positive(word)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of bytes; write 65536, 64K, 16M or 1G") from error
