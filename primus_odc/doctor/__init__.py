"""``primus-odc doctor``: what would keep a run from starting or working on this machine, found without a GPU, a peer or a wait.

Checks of one family stand in one file and return :class:`~primus_odc.doctor.finding.Finding` objects. Those that read files or ask the
resolver run in threads of the command (:mod:`~primus_odc.doctor.limits`); those that import torch, touch a GPU or build a model run as
stages of a child process (:mod:`~primus_odc.doctor.child`), because only a process can be ended when a driver does not answer.
"""
