"""Write docs/configuration.md from the docstrings of the configuration classes; with --check, fail when the file is not what they say.

A field's docstring ends with optional ``Unit: ...`` and ``Arms: ...`` sentences, which become columns of their own.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from primus_odc import config
from primus_odc._config_keys import IN_TREE_KEYS
from primus_odc._config_values import FROM_ZERO, RANGES
from primus_odc.data.keys import DataConfig
from primus_odc.megatron.train_config import TrainConfig

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

Written by `scripts/config_reference.py` from the docstrings of the configuration classes; edit those.

primus_odc adds one key and one block to the trainer module of a Primus experiment YAML. All other keys are Primus' and Megatron's; which of
them the standalone trainer reads stands at the end.

```yaml
modules:
  post_trainer:
    framework: megatron
    comm_backend: odc_nopad
    odc:
      transport: auto
      timeout_s: 300
```

On a command line the same keys read `--comm_backend odc_nopad --odc.timeout_s 300`. Numbers may be given as text, `null` means the
default. All mistakes in a file are reported at once, before anything starts. A key without effect under the chosen `comm_backend` is
accepted, so that one file serves all arms; a contradiction is refused: `baseline` under another backend than `nccl_pad`,
`deterministic: true` with `accumulate: owner`, and `microbatch_cost` with a `cost_model` in which tokens cost nothing.
"""

MIGRATION = """## Keys of Primus' in-tree ODC

They are refused when they ask for something; at the value Primus' own presets give them they are ignored.

| old key | ignored at | now |
| --- | --- | --- |
"""


STANDALONE = """
## Keys of the standalone trainer

`primus-odc train` and `primus-odc compare` read these keys of a self-contained module, and Megatron's keys of model and optimizer with
Megatron's own defaults. What the trainer cannot do is refused, and so is a key that it does not know. The keys that say where output goes,
`work_group`, `user_name`, `exp_name` and `workspace`, can be overridden on the command line as well. No evaluation: `eval_iters: 0`.
"""


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the docstring under it, on one line, read from the source of ``cls``."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if not (isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)):
                raise SystemExit(f"{cls.__name__}.{field.target.id} has no docstring")
            docs[field.target.id] = " ".join(doc.value.value.split())
    return docs


def split_doc(doc: str) -> tuple[str, str, str]:
    """A docstring as (text, unit, arms)."""
    match = re.fullmatch(r"(?P<text>.*?)(?: Unit: (?P<unit>[^.]*)\.)?(?: Arms: (?P<arms>[^.]*)\.)?", doc)
    assert match is not None
    return match["text"], match["unit"] or "", match["arms"] or ""


def allowed(key: str) -> str:
    """The allowed values in the words of YAML."""
    hint = inspect.get_annotations(config.OdcConfig)[key].removesuffix(" | None")
    named: Any = getattr(config, hint, None)
    if key == "cost_model":
        return "`linear`, `attention`, `[a, b]`"
    if named is not None:
        return ", ".join(f"`{choice}`" for choice in named.__args__)
    if key in FROM_ZERO:
        return "number of at least 0"
    if key in RANGES:
        return "number from {:.0f} to {:.0f}".format(*RANGES[key])
    return {"bool": "`true`, `false`", "float": "number above 0", "int": "whole number above 0", "str": "a name"}[hint]


def yaml_word(value: Any) -> str:
    """A default as one writes it in YAML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "unset"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def render() -> str:
    """The whole document."""
    lines = [HEAD, "## comm_backend\n", f"Allowed: {', '.join(f'`{b}`' for b in config.COMM_BACKENDS)}; default: unset.\n"]
    lines.append(field_docs(config.ParsedComm)["comm_backend"] + "\n")
    lines.append("## The odc block\n")
    docs = field_docs(config.OdcConfig)
    for field in fields(config.OdcConfig):
        text, unit, arms = split_doc(docs[field.name])
        facts = [f"Allowed: {allowed(field.name)}", f"default: `{yaml_word(field.default)}`"]
        facts += [f"unit: {unit}"] if unit else []
        facts += [f"arms: {arms}"] if arms else []
        lines.append(f"### {field.name}\n\n{'; '.join(facts)}.\n\n{text}\n")
    rows = "".join(
        f"| `{old}` | `{'null' if inert is None else yaml_word(inert)}` | {new} |\n" for old, (inert, new) in IN_TREE_KEYS.items()
    )
    lines.append(MIGRATION + rows + STANDALONE)
    for title, cls in (("training loop", TrainConfig), ("data and tokenizer", DataConfig)):
        keys = "".join(f"* `{key}`: {plain(doc)}\n" for key, doc in field_docs(cls).items())
        lines.append(f"### Of {title}\n\n{keys}")
    return "\n".join(lines)


def plain(doc: str) -> str:
    """A docstring's markup in Markdown: no roles, single backticks."""
    return re.sub(r":\w+:`", "`", doc).replace("``", "`")


def main() -> int:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description="Write docs/configuration.md from the configuration's docstrings.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when the file is not up to date")
    text = render()
    if not parser.parse_args().check:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET} is not up to date; run python scripts/config_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
