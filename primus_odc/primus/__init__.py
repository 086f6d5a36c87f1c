"""The plugin: ``comm_backend`` in an unmodified Primus.

:mod:`primus_odc.primus.loading` is found by torch through an entry point and registers, in a process that runs Primus, the trainer classes
of :mod:`primus_odc.primus.trainers`. Everything else here is glue between Megatron's training loop and :mod:`primus_odc.megatron`.

This module and ``loading`` import nothing but the standard library: they are read by every process that imports torch.
"""
