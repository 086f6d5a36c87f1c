"""Supervised fine-tuning in Primus: the data, the model's packed attention and head, and the forward step.

Data and tokenizer are primus_odc's own (:mod:`primus_odc.data`), read from the same keys as by the standalone trainer; Megatron gets a
stand-in tokenizer of the same vocabulary. The model is Megatron's as Primus builds it, with two changes: samples of a microbatch never see
each other, with TransformerEngine by its own means, without it by :class:`~primus_odc.megatron.attention.PackedAttention`; and the head is
:class:`~primus_odc.megatron.loss.CrossEntropyHead`, so logits exist for targets alone and for one chunk of them at a time.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from primus_odc.data import TokenDataset, build_dataset, build_stream
from primus_odc.data.packing import pack_microbatch
from primus_odc.errors import DataError
from primus_odc.megatron.loss import CrossEntropyHead
from primus_odc.megatron.microbatch import Microbatch, PackedSamples
from primus_odc.megatron.minibatch import Minibatch, MinibatchFactory, make_minibatch
from primus_odc.planning import CostModel, Policy
from primus_odc.primus.evaluation import EvaluationCycle
from primus_odc.primus.loop import LOSS
from primus_odc.primus.plan import StepPlan
from primus_odc.primus.refusals import Checked

logger = logging.getLogger("primus_odc")

# Megatron imports it when it builds the model.
_LOCAL_LAYER = ("primus_odc.primus.layer_spec", "LAYER")


class SftSource:
    """The minibatches of a run, packed by samples; see :class:`primus_odc.primus.plan.MinibatchSource`."""

    def __init__(
        self,
        dataset: TokenDataset,
        args: Any,
        params: Mapping[str, Any],
        *,
        policy: Policy,
        cost_model: CostModel,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        """``params`` are the keys that chose the data; ``args`` are Megatron's, after a checkpoint was loaded.

        Raises:
            DataError: a step has more samples than the dataset; Megatron's own datasets would repeat them within it.
        """
        self.identity = {
            "source": params["sft_dataset_name"],
            "tokenizer": params["tokenizer_type"],
            "fingerprint": dataset.fingerprint,
            "samples": len(dataset),
        }
        self._stream = build_stream(dataset, args.global_batch_size, args.seed)
        self._stream.fast_forward(args.consumed_train_samples)
        self._next_step = args.iteration
        make = functools.partial(
            make_minibatch,
            policy=policy,
            cost_model=cost_model,
            max_tokens=max_tokens,
            world_size=dist.get_world_size(),
            rank=dist.get_rank(),
            device=device,
        )
        self._factory = MinibatchFactory(dataset, self._stream, make, first_step=args.iteration)
        self._left: Iterator[Microbatch] = iter(())
        self._warned_masked = False

    def begin(self, step: int, consumed_samples: int) -> StepPlan:
        before = self._stream.consumed_samples
        minibatch = self._factory.get(step)
        if before != consumed_samples:
            raise DataError(f"step {step + 1} begins after {consumed_samples} samples for Megatron, after {before} for the data")
        self._left = iter(minibatch.microbatches)
        self._warn_masked(minibatch)
        return StepPlan(
            step=step,
            counts=minibatch.counts,
            tokens=minibatch.tokens,
            target_tokens=minibatch.target_tokens,
            samples=len(minibatch.sample_ids),
            digest=minibatch.digest,
        )

    def _warn_masked(self, minibatch: Minibatch) -> None:
        # A microbatch of one token is the padding of a rank short of work, or as good as that.
        masked = [n for n, microbatch in enumerate(minibatch.microbatches) if not microbatch.num_targets and microbatch.tokens.shape[1] > 1]
        if masked and minibatch.target_tokens and not self._warned_masked:
            self._warned_masked = True
            logger.warning(
                "step %d: no sample of microbatch %d of rank %d has a target token; such microbatches add nothing to loss and gradient and "
                "are not mentioned again",
                minibatch.step + 1,
                masked[0],
                dist.get_rank(),
            )

    def close(self) -> None:
        self._factory.close()

    def __iter__(self) -> SftSource:
        return self

    def __next__(self) -> Microbatch:
        return next(self._left)


def datasets_provider(
    args_of: Callable[[], Any],
    checked: Checked,
    workspace: Path,
    use: Callable[[SftSource, TokenDataset], None],
    *,
    policy: Policy,
    cost_model: CostModel,
) -> Callable[..., tuple[Any, Any, None]]:
    """What Megatron calls for its train, validation and test data; ``use`` is told the source and what it draws from."""

    def build(split: Any) -> TokenDataset:
        return build_dataset(
            checked.params, split, workspace=workspace, max_tokens=checked.max_tokens, over_length=checked.comm.odc.over_length
        )

    def provide(_: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, None]:
        args = args_of()
        device = torch.device(torch.cuda.current_device())
        dataset = build("train")
        source = SftSource(
            dataset, args, checked.params, policy=policy, cost_model=cost_model, max_tokens=checked.max_tokens, device=device
        )
        use(source, dataset)
        if not args.eval_iters:
            return source, None, None
        held_out = build("validation")

        def make(indices: Sequence[int]) -> Microbatch:
            return Microbatch.of(pack_microbatch([held_out[i] for i in indices]), device)

        evaluated = args.eval_iters * args.global_batch_size
        cycle = EvaluationCycle(make, len(held_out), evaluated, args.micro_batch_size, dist.get_rank(), dist.get_world_size())
        return source, cycle, None

    provide.is_distributed = True  # type: ignore[attr-defined]  # read by Megatron: every rank has the data
    return provide


def model_provider(native: Callable[..., Any], args: Any) -> Callable[..., Any]:
    """Primus' model provider with packed attention, where TransformerEngine does not bring it, and with the summing head."""

    def provide(*positional: Any, **named: Any) -> Any:
        if args.transformer_impl == "local":
            args.spec = _LOCAL_LAYER
        model = native(*positional, **named)
        model.output_layer = CrossEntropyHead(model.output_layer.weight)
        model._postprocess = types.MethodType(_loss_sum, model)
        return model

    return provide


def _loss_sum(model: Any, *, hidden_states: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, **_: Any) -> torch.Tensor:
    """In place of GPTModel's: the cross entropy summed over the targets ``labels``, which stand at the positions ``loss_mask``."""
    loss: torch.Tensor = model.output_layer(hidden_states, loss_mask, labels)
    return loss


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[Any, ...]]]:
    """Megatron's forward step: the loss sum of the next microbatch, and what it reports of it."""
    microbatch: Microbatch = next(data_iterator)
    packed = _on_device(microbatch.packed, microbatch.tokens.device) if _transformer_engine(model) else microbatch.packed
    loss_sum = model(
        microbatch.tokens,
        microbatch.position_ids,
        None,
        labels=microbatch.targets,
        loss_mask=microbatch.target_index,
        packed_seq_params=packed,
    )

    def report(loss: torch.Tensor) -> tuple[Any, ...]:
        # Filled on the device: copying a number there would make the host wait for the whole forward.
        targets = torch.full((), microbatch.num_targets, dtype=torch.int, device=loss.device)
        return loss, targets, {LOSS: torch.stack([loss.detach().float(), targets.float()])}

    return loss_sum, report


def _transformer_engine(model: Any) -> bool:
    return bool(model.config.transformer_impl == "transformer_engine")


def _on_device(packed: PackedSamples, device: torch.device) -> PackedSeqParams:
    """TransformerEngine's kernels read the borders on the device."""
    borders = packed.cu_seqlens_q.to(device, non_blocking=True)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=packed.max_seqlen_q,
        max_seqlen_kv=packed.max_seqlen_kv,
    )
