"""The hub, at a pinned revision: its addresses and the user's token through its own library."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.artifact.pinned_model import HubFolder
from swarm.store.sources.http import HttpSource, HttpTimeouts


def hub_source(hub: HubFolder, file_names: Sequence[str], timeouts: HttpTimeouts | None = None) -> HttpSource:
    """The hub sends to a storage server, another host, for the bytes: the token does not go there. ``HF_ENDPOINT``
    names another hub, ``HF_TOKEN`` or ``hf auth login`` the token."""
    from huggingface_hub import constants, get_token, hf_hub_url  # half a second

    urls = [hf_hub_url(hub.repository, name, subfolder=hub.folder, revision=hub.revision) for name in file_names]
    # not build_hf_headers: it may ask the hub for what to write into its user agent
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    name = f"hub {hub.repository} at {hub.revision[:12]}"
    return HttpSource(name, urls, {"Authorization": f"Bearer {token}"} if token else None, timeouts)
