"""Memory that network cards reach: one arena per PE in the symmetric heap of NVSHMEM (NVIDIA) or MORI-SHMEM (AMD).

``memory``
    :class:`~primus_odc.symmetric.shmem.memory.ShmemMemory`: the arena and the operations on it.
``plan``
    What an operation becomes: transfers in the order of the peers, in batches of one launch.
``bootstrap``
    Start-up of the library over the job's torch store, under time limits.
``environment``
    The libraries' environment variables: what is set, and what is refused.
``extension``
    The native module of ``csrc/``, and whether it may be used.
``code_object``
    AMD's device code, compiled on the node.
"""
