"""A private Slurm on one machine, for practice and for tests.

Every machine of it is a process in namespaces of its own; everything it writes lies in one folder.

Example:
    with cluster(LabSpec(Path("/var/tmp/my-lab"), nodes=2)) as lab:
        print(lab.run(["srun", "-N2", "hostname"]).stdout)

With `LabSpec(..., rails=4)` the machines have networks of their own, whose links can be counted, cut and slowed.
"""

from hpctrain.lab.client import Cluster
from hpctrain.lab.fabric import Traffic, counters
from hpctrain.lab.faults import drain_node, heal, link_down, slow
from hpctrain.lab.lifecycle import DEFAULT_FOLDER, attach, cluster, down, up
from hpctrain.lab.nodes import kill_node, start_node, status
from hpctrain.lab.spec import LabSpec

__all__ = [
    "DEFAULT_FOLDER",
    "Cluster",
    "LabSpec",
    "Traffic",
    "attach",
    "cluster",
    "counters",
    "down",
    "drain_node",
    "heal",
    "kill_node",
    "link_down",
    "slow",
    "start_node",
    "status",
    "up",
]
