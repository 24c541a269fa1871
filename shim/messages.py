"""What the worker and its parent say to each other, as fields and arrays of ``wire``.

The parent sends requests, each with an ``op``; the worker answers them in order with ``ok`` or ``error``. While it
loads, it sends ``progress`` in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from shim import errors
from shim.types import ContextSpec, EngineConfig, EngineInfo, KvType, RowSummary, StepBatch, StepResult, SummarySpec
from shim.wire import Array, Arrays, Fields, encode


def open_request(config: EngineConfig) -> bytes:
    return encode({"op": "open", "config": {**asdict(config), "model_path": str(config.model_path)}})


def read_config(fields: Fields) -> EngineConfig:
    config = dict(fields["config"])
    contexts = tuple(ContextSpec(**spec) for spec in config.pop("contexts"))
    return EngineConfig(
        model_path=Path(config.pop("model_path")), contexts=contexts, kv_type=KvType(config.pop("kv_type")), **config
    )


def info_reply(info: EngineInfo) -> bytes:
    return encode({"ok": True, "info": asdict(info)})


def read_info(fields: Fields) -> EngineInfo:
    info = dict(fields["info"])
    return EngineInfo(contexts=tuple(ContextSpec(**spec) for spec in info.pop("contexts")), **info)


def step_request(batch: StepBatch, summaries: Sequence[SummarySpec]) -> bytes:
    fields = {
        "op": "step",
        "run": batch.run,
        "tiled": batch.tiled,
        "summaries": [[spec.temperature, spec.top, spec.ids] for spec in summaries],
    }
    arrays = {
        "slot": batch.slot,
        "position": batch.position,
        "tokens": batch.tokens,
        "hidden": batch.hidden,
        "want": batch.want,
    }
    return encode(fields, arrays)


def read_step(fields: Fields, arrays: Arrays) -> tuple[StepBatch, list[SummarySpec]]:
    first, last = fields["run"]
    batch = StepBatch(
        run=(first, last),
        slot=arrays["slot"],
        position=arrays["position"],
        tokens=arrays.get("tokens"),
        hidden=arrays.get("hidden"),
        want=arrays.get("want"),
        tiled=fields["tiled"],
    )
    return batch, [SummarySpec(temperature, top, tuple(ids)) for temperature, top, ids in fields["summaries"]]


def step_reply(result: StepResult) -> bytes:
    found = result.summaries
    fields = {
        "ok": True,
        "compute": result.compute_seconds,
        "counts": [[len(summary.top_ids), len(summary.asked)] for summary in found],
        "rest": [summary.rest_log_sum_exp for summary in found],
    }
    arrays: dict[str, Array | None] = {"hidden": result.hidden}
    if found:
        arrays["top_ids"] = np.concatenate([summary.top_ids for summary in found])
        arrays["top_logits"] = np.concatenate([summary.top_logits for summary in found])
        arrays["asked"] = np.concatenate([summary.asked for summary in found])
    return encode(fields, arrays)


def read_step_reply(fields: Fields, arrays: Arrays) -> StepResult:
    summaries = []
    top = asked = 0
    for (n_top, n_asked), rest in zip(fields["counts"], fields["rest"], strict=True):
        summaries.append(
            RowSummary(
                top_ids=arrays["top_ids"][top : top + n_top],
                top_logits=arrays["top_logits"][top : top + n_top],
                rest_log_sum_exp=rest,
                asked=arrays["asked"][asked : asked + n_asked],
            )
        )
        top, asked = top + n_top, asked + n_asked
    return StepResult(arrays.get("hidden"), tuple(summaries), fields["compute"])


def error_reply(error: errors.EngineError) -> bytes:
    return encode({"error": type(error).__name__, "text": str(error)})


def read_error(fields: Fields) -> errors.EngineError:
    """The error of the class that the worker raised."""
    kind = getattr(errors, str(fields["error"]), errors.EngineError)
    if not (isinstance(kind, type) and issubclass(kind, errors.EngineError)):
        kind = errors.EngineError
    return kind(str(fields["text"]))
