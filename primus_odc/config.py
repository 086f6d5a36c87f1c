"""The ``comm_backend`` key and the ``odc:`` block of a Primus experiment YAML.

``comm_backend`` chooses the arm; everything else about it stands in a nested block, beside Primus' own keys of the trainer module::

    comm_backend: odc_nopad
    odc:
      transport: auto
      timeout_s: 300

:func:`parse_odc` turns a module's parameters into a :class:`ParsedComm` or raises one :class:`~primus_odc.errors.ConfigError` with
everything that is wrong. Primus itself accepts any key, so a misspelt one would train on something else without a word; hence keys that
look like ours are looked for beside the block too, while keys of Primus, Megatron or the user's own are left alone.

One YAML serves all arms: a key that has no effect under the chosen arm is accepted, so that switching ``comm_backend`` is the only edit.
Refused is what contradicts: ``baseline`` under another backend than ``nccl_pad``, ``deterministic`` with ``accumulate: owner``,
``microbatch_cost`` where tokens cost nothing.

Nothing here imports torch or another part of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from primus_odc._config_keys import misplaced_keys
from primus_odc._config_values import BadValueError, as_mapping, describe, nearest, parse_value
from primus_odc.errors import ConfigError

CommBackend = Literal["nccl_pad", "odc_pad", "odc_nopad"]
Arm = Literal["stock", "nccl_pad", "nccl_localsort", "nccl_zero2", "odc_pad", "odc_nopad"]
Transport = Literal["auto", "host", "symm_mem", "nvshmem", "mori"]
Accumulate = Literal["auto", "local", "owner"]
Parameters = Literal["auto", "reshard", "resident"]
Verify = Literal["off", "checksum", "reference"]
CostModelChoice = Literal["linear", "attention"] | tuple[float, float]
OverLength = Literal["error", "truncate"]
Baseline = Literal["lb_micro", "localsort", "zero2"]
Nic = Literal["mlx5", "bnxt", "ionic"]

COMM_BACKENDS: tuple[CommBackend, ...] = get_args(CommBackend)
BASELINES: dict[str, Baseline] = {"nccl_localsort": "localsort", "nccl_zero2": "zero2"}
"""Reported names of the variants of ``nccl_pad``, and the ``baseline`` that chooses each."""


@dataclass(kw_only=True, slots=True, frozen=True)
class OdcConfig:
    """The keys of the ``odc:`` block; all are optional, and ``null`` means the default."""

    transport: Transport = "auto"
    """How ranks reach each other's memory. `host`: shared memory of one machine, for CPU training. `symm_mem`: torch symmetric memory,
    GPUs of one machine. `nvshmem` (NVIDIA) and `mori` (AMD): GPUs of any number of machines, `accumulate: local` only; built on request
    (docs/design.md, section 6). `auto` takes the one that fits the device and the number of machines, and says which; a named one that
    cannot be used is an error, never replaced.
    Arms: odc_pad, odc_nopad."""

    accumulate: Accumulate = "auto"
    """Where gradients add up within a minibatch. `local`: in an unsharded fp32 buffer of each rank, moved to the owners once a minibatch
    (4 bytes per parameter; fixed order of summation). `owner`: every microbatch pushes its gradients to the owners (ZeRO-3 memory).
    `auto`: `local` where it fits `memory_budget_gib` on every rank, else `owner`.
    Arms: odc_pad, odc_nopad."""

    parameters: Parameters = "auto"
    """Whether parameters are freed between their uses. `reshard`: gathered for every forward and backward, as the model was sharded.
    `resident`: gathered once a minibatch and kept (2 bytes per parameter in bf16). `auto`: `resident` where it fits `memory_budget_gib`
    on every rank, else `reshard`.
    Arms: odc_pad, odc_nopad."""

    memory_budget_gib: float | None = None
    """What `auto` may spend on one rank for all the engine adds and resident parameters together. Unset: half of the memory that is free
    when the engine is attached, divided by the ranks that share it.
    Unit: GiB per rank.
    Arms: odc_pad, odc_nopad."""

    deterministic: bool = False
    """Gradients are summed in a fixed order, so that two runs agree bit for bit. Makes `accumulate: auto` mean `local`; refused with
    `owner`.
    Arms: odc_pad, odc_nopad."""

    verify: Verify = "off"
    """Checks on transferred data while training. `checksum`: each gathered or pushed segment carries one. `reference`: every result is
    compared with the collective's (slow). YAML reads a bare `off` as false; both are understood.
    Arms: odc_pad, odc_nopad."""

    timeout_s: float = 600.0
    """How long a rank waits for a peer that gives no sign of life before it stops with the peer's name; for one that is alive, three times
    as long, so at least a third of what the slowest rank needs for a minibatch. A dead peer is noticed at once. Signs of life come ten
    times a second: a few seconds are too short where hosts are busy.
    Unit: seconds.
    Arms: odc_pad, odc_nopad."""

    cost_model: CostModelChoice = "linear"
    """What a sample of s tokens is taken to cost when the planner balances ranks. `linear`: s. `attention`: a*s^2 + b*s from the model's
    own floating-point operations. `[a, b]`: a*s^2 + b*s with these numbers (a measured fit; only their ratio matters).
    Arms: all."""

    microbatch_cost: float = 0.0
    """What a microbatch is taken to cost beside its samples, whatever it holds (launches, transfers of every layer): as much as so many
    tokens outside attention. Where it is not small, plans with fewer microbatches win. Measure it: the length at which a microbatch of one
    sample takes twice as long as a very short one. 0 suits CPUs; a GPU needs several thousand tokens to be busy.
    Unit: tokens.
    Arms: all."""

    max_tokens_per_microbatch: int | None = None
    """The most tokens the planner packs into one microbatch. Unset: `seq_length`.
    Unit: tokens.
    Arms: all."""

    over_length: OverLength = "error"
    """What happens to a sample longer than `max_tokens_per_microbatch`. `error`: training does not start, and the message names the sample.
    `truncate`: its end is cut off, and the number of cut samples and tokens is reported.
    Arms: all."""

    baseline: Baseline | None = None
    """The variant of `nccl_pad` to compare with. `lb_micro` (as unset): equal microbatch counts, samples balanced by cost. `localsort`: one
    sample a microbatch, sorted by length, reported as `nccl_localsort`. `zero2`: parameters stay unsharded within the minibatch and
    gradients are reduced once, reported as `nccl_zero2`. Refused with any other `comm_backend`.
    Arms: nccl_pad."""

    ranks_per_node: int | None = None
    """How many consecutive ranks share a node (the last one may have fewer); they must be of one machine. Unset: those of each machine. Set
    it to take one machine for several nodes: each shard then enters a node once a minibatch, gradients are added up inside a node and cross
    once, and `accumulate` is `local`.
    Unit: ranks.
    Arms: odc_pad, odc_nopad."""

    interface: str | None = None
    """The network interface by which this machine's ranks reach the others; may differ between machines. Unset: the one that leads to
    `MASTER_ADDR`. It serves start-up and signs of life; data go through the network cards.
    Arms: odc_pad, odc_nopad."""

    nic: Nic | None = None
    """With `transport: mori` the kind of network card its kernels are compiled for. Unset: that of the RDMA devices of the machine; needed
    where there are several kinds.
    Arms: odc_pad, odc_nopad."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ParsedComm:
    """What a module's parameters say about communication."""

    comm_backend: CommBackend | None
    """The top-level key that chooses the arm. `nccl_pad`: the framework's collectives (RCCL, NCCL; gloo on CPU), equal microbatch counts.
    `odc_pad`: on demand, the very same plan. `odc_nopad`: on demand, every rank its own number of microbatches. Unset: primus_odc stays
    out of the training altogether."""

    odc: OdcConfig
    """The `odc:` block, defaults filled in."""

    @property
    def arm(self) -> Arm:
        """The name under which the run is reported; ``stock`` when ``comm_backend`` is unset."""
        if self.comm_backend is None:
            return "stock"
        if self.comm_backend == "nccl_pad" and self.odc.baseline == "localsort":
            return "nccl_localsort"
        if self.comm_backend == "nccl_pad" and self.odc.baseline == "zero2":
            return "nccl_zero2"
        return self.comm_backend


ODC_KEYS: tuple[str, ...] = tuple(f.name for f in fields(OdcConfig))
_HINTS: dict[str, Any] = get_type_hints(OdcConfig)


def parse_odc(params: Mapping[str, Any]) -> ParsedComm:
    """Read ``comm_backend`` and ``odc:`` out of a trainer module's parameters.

    Args:
        params: the module's parameters, other keys included. The ``odc`` value may be a mapping or a namespace (Primus hands out the
        latter).

    Raises:
        ConfigError: naming every wrong key, value and combination at once.
    """
    problems: list[str] = []
    backend = _parse_backend(params.get("comm_backend"), problems)
    odc = _parse_block(params.get("odc"), "odc.", problems)
    active = params.get("comm_backend") is not None
    problems += misplaced_keys(params, ODC_KEYS, active=active)
    if odc.baseline is not None and backend != "nccl_pad" and (backend is not None or not active):
        now = f"comm_backend is {backend}" if active else "comm_backend is not set"
        problems.append(
            f"odc.baseline: {odc.baseline} is a variant of nccl_pad, but {now}; set comm_backend: nccl_pad or remove odc.baseline"
        )
    if problems:
        raise ConfigError(problems)
    return ParsedComm(comm_backend=backend, odc=odc)


def parse_options(options: Mapping[str, Any]) -> OdcConfig:
    """Check the keys of an ``odc:`` block given by themselves, as keyword options of ``primus_odc.attach`` for instance.

    Raises:
        ConfigError: naming every wrong key, value and combination at once.
    """
    problems: list[str] = []
    odc = _parse_block(options, "", problems)
    if problems:
        raise ConfigError(problems)
    return odc


def _parse_backend(value: Any, problems: list[str]) -> CommBackend | None:
    if value is None:
        return None
    for backend in COMM_BACKENDS:
        if value == backend:
            return backend
    allowed = f"allowed: {', '.join(COMM_BACKENDS)}, or leave it unset for Primus' own communication"
    if not isinstance(value, str):
        problems.append(f"comm_backend must be a name, but {describe(value)} was given; {allowed}")
        return None
    if value in BASELINES:
        problems.append(
            f"comm_backend: {value} is the reported name of a baseline; set comm_backend: nccl_pad and odc.baseline: {BASELINES[value]}"
        )
        return None
    problems.append(f"comm_backend: {value!r} is not known, did you mean {nearest(value, COMM_BACKENDS)!r}? {allowed}")
    return None


def _parse_block(block: Any, prefix: str, problems: list[str]) -> OdcConfig:
    """Check one ``odc:`` block; wrong entries are noted in ``problems`` and left at their default."""
    given = {} if block is None else as_mapping(block)
    if given is None:
        problems.append(f"odc must be a block of keys, but {describe(block)} was given; allowed keys: {', '.join(ODC_KEYS)}")
        return OdcConfig()
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _HINTS:
            problems.append(
                f"{prefix}{key} is not known, did you mean {nearest(str(key), ODC_KEYS)!r}? allowed keys: {', '.join(ODC_KEYS)}"
            )
        elif value is not None:
            try:
                values[key] = parse_value(key, value, _HINTS[key])
            except BadValueError as error:
                problems.append(f"{prefix}{key} {error}")
    odc = OdcConfig(**values)
    if odc.deterministic and odc.accumulate == "owner":
        problems.append(
            f"{prefix}deterministic: true needs a fixed order of summation, which {prefix}accumulate: owner does not have; "
            f"set {prefix}accumulate: local (or auto), or {prefix}deterministic: false"
        )
    if odc.microbatch_cost and isinstance(odc.cost_model, tuple) and odc.cost_model[1] == 0:
        problems.append(
            f"{prefix}microbatch_cost is counted in tokens, which cost nothing with b = 0 in {prefix}cost_model: "
            f"{list(odc.cost_model)}; give b, or set {prefix}microbatch_cost: 0"
        )
    return odc
