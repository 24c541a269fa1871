"""Activations as bytes: row-major little-endian f32 (lossless) or f16, shape [n_tokens, width]."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.wire_errors import WireError

Activations: TypeAlias = npt.NDArray[np.float32]
Buffer: TypeAlias = bytes | bytearray | memoryview

VALUE_BYTES: dict[int, int] = {pb.F32_LE: 4, pb.F16_LE: 2}
_DTYPES: dict[int, np.dtype[np.floating]] = {pb.F32_LE: np.dtype("<f4"), pb.F16_LE: np.dtype("<f2")}
_F16_MAX = 65504.0
_BLOCK = 1 << 16  # values checked at once, so that the mask stays in the cache


def encode_activations(activations: Activations, encoding: pb.ActivationEncoding.ValueType) -> memoryview:
    """Bytes of a 2-d array. A contiguous f32 array is viewed, not copied: it must not change until it is sent.

    Raises ``WireError`` INTERNAL for values that are not finite or beyond f16 with F16_LE: this side is at fault.
    """
    rows = np.ascontiguousarray(activations, dtype=np.float32)
    if not _all_finite(rows):
        raise WireError(pb.INTERNAL, "the activations hold values that are not finite")
    if encoding == pb.F16_LE and float(np.abs(rows).max(initial=0.0)) > _F16_MAX:
        raise WireError(pb.INTERNAL, "the activations exceed the range of f16: open the session with f32")
    encoded = rows.astype(_DTYPES[encoding], copy=False)
    return encoded.reshape(-1).view(np.uint8).data


def decode_activations(
    data: Buffer, encoding: pb.ActivationEncoding.ValueType, n_tokens: int, width: int
) -> Activations:
    """f32 [n_tokens, width]; with F32_LE a view of ``data``. ``WireError`` MALFORMED when size or values are wrong."""
    if len(data) != n_tokens * width * VALUE_BYTES[encoding]:
        raise WireError(pb.MALFORMED, f"{len(data)} bytes are not {n_tokens} rows of {width} values")
    values = np.frombuffer(data, dtype=_DTYPES[encoding]).astype(np.float32, copy=False)
    if not _all_finite(values):
        raise WireError(pb.MALFORMED, "the activations hold values that are not finite")
    return values.reshape(n_tokens, width)


def _all_finite(values: Activations) -> bool:
    flat = values.reshape(-1)
    return all(bool(np.isfinite(flat[at : at + _BLOCK]).all()) for at in range(0, flat.size, _BLOCK))
