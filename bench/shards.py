"""A model in several files, with weights that differ from each other everywhere."""

from __future__ import annotations

from pathlib import Path

import gguf

from swarm.artifact.manifest import Manifest, load_manifest


def split(source: Path, folder: Path, n_tensors: int = 60) -> Manifest:
    """``source`` as a split set in ``folder``: a first file without tensors, then some with ``n_tensors`` each. Nobody
    has noted the files' digests there."""
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(folder / "split.gguf", architecture, split_max_tensors=n_tensors, small_first_shard=True)
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    manifest = load_manifest(min(folder.glob("split-*.gguf")))
    for kept in folder.glob("*.json"):
        kept.unlink()
    return manifest
