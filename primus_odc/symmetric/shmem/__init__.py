"""Memory that network cards reach: one arena per PE in the symmetric heap of NVSHMEM (NVIDIA) or MORI-SHMEM (AMD).

``memory``
    :class:`~primus_odc.symmetric.shmem.memory.ShmemMemory`: the arena and the operations on it.
``network``
    :class:`~primus_odc.symmetric.shmem.network.ShmemNetwork` and ``LibraryMemory``: what the heap uses of it.
``plan``
    What an operation becomes: transfers in the order of the peers, in batches of one launch.
``bootstrap``
    Start-up of the library over the job's torch store, under time limits.
``running``
    The library as it runs in this process, for any number of memories.
``write_order``
    Whether a GPU keeps the order of a network card's writes.
``environment``
    The libraries' environment variables: what is set, and what is refused.
``extension``
    The native module of ``csrc/``, and whether it may be used.
``code_object``
    AMD's device code, compiled on the node.
"""
