"""Every file that the daemons of a lab read, as text: a pure function of the `LabSpec`."""

from __future__ import annotations

from hpctrain.lab.requirements import PATH
from hpctrain.lab.spec import HEAD, SPINE, LabSpec

CLUSTER = "lab"
NEWLINE = "\n"
DATABASE = "slurm_acct_db"


def files(spec: LabSpec) -> dict[str, str]:
    """Name in `spec.etc` and content."""
    made = {
        "slurm.conf": slurm_conf(spec),
        "topology.conf": topology_conf(spec),
        "cgroup.conf": cgroup_conf(),
        "hosts": hosts(spec),
        "machine.sh": machine_script(spec),
    }
    if spec.rails:
        made["client.sh"] = client_script(spec)
    if spec.gpus:
        made["gres.conf"] = gres_conf(spec)
    if spec.accounting:
        made["slurmdbd.conf"] = slurmdbd_conf(spec)
    return made


def slurm_conf(spec: LabSpec) -> str:
    """Two partitions on all nodes: `high` preempts `batch`, whose jobs are warned, ended and requeued."""
    sections = (_daemons(spec), _scheduling(spec), _accounting(spec), *_nodes(spec))
    return "\n".join(sections)


def _daemons(spec: LabSpec) -> str:
    # TmpFS: slurmstepd makes PMIx's folders there, under a name that all nodes share.
    return f"""\
ClusterName={CLUSTER}
SlurmctldHost={HEAD}({spec.address(HEAD)})
SlurmctldPort={spec.controller_port}
SlurmUser={spec.user}
{f"SlurmdUser={spec.user}{NEWLINE}" if spec.rootless else ""}AuthType=auth/munge
AuthInfo=socket={spec.munge_socket},cred_expire={spec.requeue_delay_s}
CredType=cred/munge
MpiDefault=none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SlurmctldPidFile={spec.run}/slurmctld.pid
SlurmdPidFile={spec.run}/slurmd.%n.pid
SlurmctldLogFile={spec.log("slurmctld")}
SlurmdLogFile={spec.log("slurmd.%n")}
StateSaveLocation={spec.folder}/state
SlurmdSpoolDir={spec.folder}/%n/spool
TmpFS={spec.folder}/%n/tmp
"""


def _scheduling(spec: LabSpec) -> str:
    return f"""\
MessageTimeout={spec.message_timeout_s}
SlurmdTimeout={spec.slurmd_timeout_s}
KillWait={spec.kill_wait_s}
InactiveLimit=0
MinJobAge=600
ReturnToService=2
FirstJobId={spec.first_job}
JobRequeue=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TopologyPlugin=topology/tree
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
"""


def _accounting(spec: LabSpec) -> str:
    if not spec.accounting:
        return "AccountingStorageType=accounting_storage/none\n"
    # For slurmdbd the "password" is the socket of munge; AuthInfo does not count.
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={spec.address(HEAD)}
AccountingStoragePort={spec.accounting_port}
AccountingStoragePass={spec.munge_socket}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
"""


def _nodes(spec: LabSpec) -> tuple[str, str]:
    sockets = 2 if spec.cpus % 2 == 0 else 1
    size = (
        f"CPUs={spec.cpus} Sockets={sockets} CoresPerSocket={spec.cpus // sockets} ThreadsPerCore=1 "
        f"RealMemory={spec.memory_mb}" + (f" Gres=gpu:{spec.gpus}" if spec.gpus else "")
    )
    nodes = [f"NodeName={n} NodeAddr={spec.address(n)} Port={spec.node_port(n)} {size}" for n in spec.node_names]
    if spec.gpus:
        nodes.insert(0, "GresTypes=gpu")
    partitions = (
        f"PartitionName=batch Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={spec.grace_s}",
        "PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF",
    )
    return "\n".join(nodes) + "\n", "\n".join(partitions) + "\n"


def gres_conf(spec: LabSpec) -> str:
    """Character devices: with plain files jobs are given GPUs, but CUDA_VISIBLE_DEVICES stays empty."""
    return "".join(
        f"NodeName={n} Name=gpu File={spec.home(n)}/{_numbered('gpu', range(spec.gpus))}\n" for n in spec.node_names
    )


def topology_conf(spec: LabSpec) -> str:
    """Two leaf switches under a spine, the first with the larger half of the nodes.

    On rails all nodes are equally near to each other: each hangs on every leaf, which a tree cannot say. So it is one
    switch there.
    """
    if spec.rails:
        return f"SwitchName=rails Nodes={_numbered('n', range(spec.nodes))}\n"
    half = (spec.nodes + 1) // 2
    leaves = [names for names in (range(half), range(half, spec.nodes)) if names]
    lines = [f"SwitchName=leaf{i} Nodes={_numbered('n', names)}" for i, names in enumerate(leaves)]
    spine = f"SwitchName=spine Switches={_numbered('leaf', range(len(leaves)))}"
    return "\n".join((*lines, spine)) + "\n"


def _numbered(stem: str, numbers: range) -> str:
    """A run of names as Slurm writes it: `n[0-3]`, or `n0` where there is one."""
    return f"{stem}[{numbers[0]}-{numbers[-1]}]" if len(numbers) > 1 else f"{stem}{numbers[0]}"


def cgroup_conf() -> str:
    """Nothing here uses control groups, but slurmd looks for them, and ends where what it detects is not to its taste.

    Told to expect version 1 it starts everywhere: with version 1, with version 2, and with none.
    """
    return "CgroupPlugin=cgroup/v1\n"


def slurmdbd_conf(spec: LabSpec) -> str:
    """Accounting. The database knows no passwords: its socket lies in a folder for root alone."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={spec.munge_socket}
DbdHost={HEAD}
DbdAddr={spec.address(HEAD)}
DbdPort={spec.accounting_port}
SlurmUser={spec.user}
LogFile={spec.log("slurmdbd")}
PidFile={spec.run}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StoragePass=none
StorageLoc={DATABASE}
"""


def hosts(spec: LabSpec) -> str:
    """Names of the machines, as the machines see them; goes below what `/etc/hosts` has."""
    return "".join(f"{spec.address(name)} {name}\n" for name in spec.machines)


def machine_script(spec: LabSpec) -> str:
    """Process 1 of each machine, in namespaces of its own: whatever runs on the machine ends with it.

    It also ends by itself when the folder of the lab is gone.
    """
    return f"""\
set -e
name=$1
hostname "$name"
cat /etc/hosts "{spec.etc}/hosts" >"{spec.folder}/$name/hosts"
mount --bind "{spec.folder}/$name/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 shm /dev/shm
{_devices(spec) if spec.rootless else ""}{_own_network(spec) if spec.rails else ""}: >"{spec.run}/$name.up"
while [ -e "{spec.folder}/lab.json" ]; do
  sleep 5 &
  wait $!
done
"""


def _devices(spec: LabSpec) -> str:
    """Files that become device nodes on the machine alone: only root can make those."""
    return f"""\
for gpu in "{spec.folder}/$name/gpu"*; do
  [ ! -e "$gpu" ] || mount --bind /dev/null "$gpu"
done
"""


def _own_network(spec: LabSpec) -> str:
    """What a machine does about its network before it has links.

    A new sysfs shows its own interfaces; slurmd wants the control groups that the old one had. Nobody answers for
    names of hosts, and none is asked. The programs for use from outside are not for here.
    An address is answered for, and announced, by its own interface alone. With reno, flows that share a token bucket
    starve each other; with bbr they share it. Interfaces have no IPv6, whose chatter would be counted.
    """
    return f"""\
ip link set lo up
if [ -d /sys/fs/cgroup ]; then
  mkdir -p "{spec.folder}/$name/cgroup"
  mount --rbind /sys/fs/cgroup "{spec.folder}/$name/cgroup"
fi
mount -t sysfs sysfs /sys
[ ! -d "{spec.folder}/$name/cgroup" ] || mount --rbind "{spec.folder}/$name/cgroup" /sys/fs/cgroup
[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf
mount -t tmpfs bin "{spec.programs}"
cd /proc/sys/net
echo 1 >ipv4/conf/all/arp_ignore
echo 2 >ipv4/conf/all/arp_announce
echo 2 >ipv4/conf/all/rp_filter
echo bbr >ipv4/tcp_congestion_control || true
[ ! -d ipv6 ] || echo 1 >ipv6/conf/default/disable_ipv6
[ "$name" != {SPINE} ] || echo 1 >ipv4/ip_forward
cd /
"""


def client_script(spec: LabSpec) -> str:
    """A program of Slurm, by the name that this is called by, in the network of the head.

    Nothing but that network is entered, so files, processes and terminal are those of the caller.
    """
    return f"""\
#!/bin/sh
program=$(PATH={PATH}; command -v "${{0##*/}}") || {{
  echo "error: ${{0##*/}} is not here; on Debian or Ubuntu: apt-get install slurm-client." >&2
  exit 127
}}
read -r pid rest <"{spec.run}/{HEAD}.pid" || exit
exec nsenter --net="/proc/$pid/ns/net" -- "$program" "$@"
"""
