"""A private Slurm on one machine, for practice and for tests.

Every machine of it is a process in namespaces of its own; everything it writes lies in one folder.

Example:
    with cluster(LabSpec(Path("/var/tmp/my-lab"), nodes=2)) as lab:
        print(lab.run(["srun", "-N2", "hostname"]).stdout)
"""

from hpctrain.lab.client import Cluster
from hpctrain.lab.lifecycle import DEFAULT_FOLDER, attach, cluster, down, up
from hpctrain.lab.nodes import kill_node, start_node, status
from hpctrain.lab.spec import LabSpec

__all__ = [
    "DEFAULT_FOLDER",
    "Cluster",
    "LabSpec",
    "attach",
    "cluster",
    "down",
    "kill_node",
    "start_node",
    "status",
    "up",
]
