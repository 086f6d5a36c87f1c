"""Prints the folder of the presets."""

from pathlib import Path

print(Path(__file__).resolve().parent)
