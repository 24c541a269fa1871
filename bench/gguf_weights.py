"""A GGUF's weights in f32: read one by one, or written as a file of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


class GgufWeights:
    """Metadata and tensors of one GGUF file. A tensor is dequantised when it is asked for and not kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """In numpy's order: the last axis is ggml's first."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> Array:
        """float32 of ``shape(name)``. Raises KeyError when the file lacks it."""
        stored = self._tensors[name]
        values: Array = gguf.quants.dequantize(stored.data, stored.tensor_type)
        return values.astype(np.float32, copy=False).reshape(self.shape(name))

    def value(self, key: str, default: Any = None) -> Any:
        """Raises KeyError when the key is missing and has no default."""
        field = self._reader.fields.get(key)
        if field is None and default is None:
            raise KeyError(f"{self.path}: no metadata key {key}")
        return default if field is None else field.contents()

    def pairs(self) -> Iterator[tuple[str, Any, gguf.GGUFValueType, gguf.GGUFValueType | None]]:
        """Key, value, type and type of an array's elements, of everything the writer does not set by itself."""
        for field in self._reader.fields.values():
            if field.name != "general.architecture" and not field.name.startswith("GGUF."):
                kind = field.types[0]
                yield field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None


def write_f32(source: Path, path: Path) -> Path:
    """A copy of ``source`` with the same metadata and every tensor in F32, the MTP block's too."""
    weights = GgufWeights(source)
    writer = gguf.GGUFWriter(path, weights.value("general.architecture"))
    for key, value, kind, element_kind in weights.pairs():
        if key != "general.file_type":
            writer.add_key_value(key, value, kind, element_kind)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name in weights.names:
        shape = weights.shape(name)
        writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in weights.names:
        writer.write_tensor_data(weights.tensor(name))
    writer.close()
    return path
