"""The models known by name."""

from __future__ import annotations

from swarm.artifact.pinned_model import HubFolder, PinnedModel
from swarm.ids import ArtifactId

GLM52 = PinnedModel(
    name="glm-5.2-ud-iq1_s",
    artifact_id=ArtifactId("c65ab53c46be6c02b954839d082693aed13f2bae2993c5b14a7ddd7422188148"),
    hub=HubFolder("unsloth/GLM-5.2-GGUF", "abc55e72527792c6e77069c99b4cb7de16fa9f23", "UD-IQ1_S"),
    stem="GLM-5.2-UD-IQ1_S",
    n_files=6,
    variable="SWARM_GLM52_DIR",
)
