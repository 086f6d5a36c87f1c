"""Experiment files for Primus: fragments to extend, and complete ones.

``python -m primus_odc.primus.presets`` prints the folder, for ``export PRIMUS_ODC_PRESETS=...`` and
``extends: ["${PRIMUS_ODC_PRESETS}/sft_odc_nopad.yaml"]``.
"""
