"""How a checkpoint is served: commands for every engine, and a Kubernetes manifest for `quantkit deploy`.

serve_commands  each engine's command and flags as data, with the pages they were read from
commands        these for one checkpoint, or the reason why there is none
target          the checkpoint, and how it is to be served
ray_service     a RayService of KubeRay
"""

from quantkit.launch.commands import Launch, Wishes, launches
from quantkit.launch.ray_service import IMAGE, IMPORT_PATH, RAY_VERSION, deploy_config, manifest, manifest_text
from quantkit.launch.target import Target, read_target

__all__ = [
    "IMAGE",
    "IMPORT_PATH",
    "RAY_VERSION",
    "Launch",
    "Target",
    "Wishes",
    "deploy_config",
    "launches",
    "manifest",
    "manifest_text",
    "read_target",
]
