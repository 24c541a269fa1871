"""The hub, at a pinned revision: its addresses and the user's token through its own library."""

from __future__ import annotations

from collections.abc import Sequence

from swarm import __version__
from swarm.artifact.pinned_model import HubFolder
from swarm.store.sources.http import HttpSource, HttpTimeouts


def hub_source(hub: HubFolder, file_names: Sequence[str], timeouts: HttpTimeouts | None = None) -> HttpSource:
    """The hub sends to a storage server, another host, for the bytes: the token does not go there. ``HF_ENDPOINT``
    names another hub, ``HF_TOKEN`` or ``hf auth login`` the token."""
    from huggingface_hub import hf_hub_url  # half a second
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented there

    urls = [hf_hub_url(hub.repository, name, subfolder=hub.folder, revision=hub.revision) for name in file_names]
    headers = build_hf_headers(library_name="glm-swarm", library_version=__version__)
    name = f"hub {hub.repository} at {hub.revision[:12]}"
    return HttpSource(name, urls, {key.title(): value for key, value in headers.items()}, timeouts)
