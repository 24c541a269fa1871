"""``python -m bench.glm_tiny``: trains glm-tiny and writes its GGUF file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.glm_tiny.measuring import Run, measure, report
from bench.glm_tiny.recipe import Recipe
from shim.source import file_sha256

SHIPPED = Path(__file__).resolve().parents[2] / "swarm" / "artifact" / "models" / "glm-tiny.gguf"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.glm_tiny", description="Trains glm-tiny and writes its GGUF file."
    )
    parser.add_argument("--out", type=Path, default=SHIPPED, help="file to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; another number, other bits (default: 1)")
    parser.add_argument("--work", type=Path, help="keeps what each stage made (default: beside the file)")
    parser.add_argument("--record", action="store_true", help="write evidence/glm-tiny.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    work = options.work or options.out.with_suffix(".work")
    made = Recipe(options.seed, work, lambda line: print(line, file=sys.stderr, flush=True)).make(options.out)
    print(f"{options.out}: {options.out.stat().st_size} bytes, SHA-256 {file_sha256(options.out)}")
    record = measure(Run(options.out, options.seed, options.threads), made)
    print(report(record))
    if options.record:
        print(f"recorded in {record.write()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
