"""Pieces of shell that every batch script has. They run on the hosts, where Slurm's commands are."""

from __future__ import annotations

import shlex

from hpctrain.launch.life.stop import SIGNALS, STOPPED_VARIABLE

NAMES = [signal.name.removeprefix("SIG") for signal in SIGNALS]

_PYTHON = (
    "import os, signal as s, sys; [s.signal(n, s.SIG_DFL) for n in (s.SIGPIPE, s.SIGXFSZ)]; "
    f"s.pthread_sigmask(s.SIG_BLOCK, [{', '.join(f's.{signal.name}' for signal in SIGNALS)}]); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Python ignores two signals for itself, and a program that it becomes would too."""

_BLOCKED = "env " + " ".join(f"--block-signal={name}" for name in NAMES)

_HELD = f"""\
trap "" {" ".join(NAMES)}
p=$1; shift
if {_BLOCKED} true 2>/dev/null; then exec {_BLOCKED} "$@"; fi
if "$p" -S -c "" 2>/dev/null; then exec "$p" -S -c "{_PYTHON}" "$@"; fi
exec "$@\""""
"""Run by the shell that becomes a rank. Until Python says what the signals mean, they would end the process; blocked
they wait, through every exec and also inside a container. Where neither env (coreutils before 8.31) nor Python can
block, they stay ignored: such a rank lives on, but has not heard."""

WITHDRAWN = """\
if [ ! -d "{folder}" ]; then
  echo "error: {folder} is gone: the submission was withdrawn, or a later one has taken its place" >&2
  exit 1
fi"""
"""sbatch may be ended, and its job be queued all the same."""

CHECKED = r"""
failed() {
  case " ${FUNCNAME[*]} " in *" source "*) return ;; esac # a file that the prologue reads knows what it does
  echo "error: the prologue failed with status $1, in line $2 of the batch script: $3" >&2
  exit 1
}
trap 'failed $? $LINENO "$BASH_COMMAND"' ERR""".lstrip()
UNCHECKED = "trap - ERR; set +e +u +o pipefail"
"""A prologue speaks of its own commands; the rest of the script looks at each status itself."""

REQUEUE = r"""
# A run that was asked to stop and has saved goes back into the queue. A job that Slurm is ending already is left to it:
# somebody cancelled it, and it must not come back, or requeued it. Only a time limit is no such end.
requeue() {
  local deadline=$((SECONDS + 600)) pause=1 said
  while :; do
    if said=$(timeout 60 squeue --noheader --states=all "--jobs=$job" '--format=%T|%r' 2>&1); then
      case ${said##*$'\n'} in
        *'|TimeLimit') ;;
        COMPLETING* | CANCELLED* | PENDING* | REQUEUED*) return ;;
      esac
      said=$(timeout 60 scontrol requeue "$job" 2>&1) && return
    fi
    said=${said##*$'\n'}
    case ${said:=no answer} in # a controller that is away comes back; what it refuses it refuses again
      'no answer' | *contact* | *'imed out'* | *'Connection refused'* | *'Zero Bytes'* | *'in standby'*) ;;
      *) break ;;
    esac
    ((SECONDS + pause < deadline)) || break
    echo "the job is not requeued yet ($said): trying again in $pause s" >&2
    sleep $pause
    pause=$((pause < 30 ? 2 * pause : 60))
  done
  echo "error: the run has saved and stopped, but its job cannot be put back into the queue ($said): submit it again," \
    "or several in a row with --chain" >&2
  return 1
}"""

ORDERED = """\
# Which rank goes where, now that the nodes are known. Without an answer ranks are where Slurm puts them.
export {variable}="{table}"
if placed=$(timeout 300 {python} -m hpctrain.launch.place.arrange "{folder}"); then
  case $placed in *=arbitrary*) export SLURM_HOSTFILE="${{{variable}%.json}}.hosts" ;; esac
else
  if [ $? -eq {refused} ]; then # it was given nodes that are known to be broken
    # No timeout, no subshell: a requeue ends those, and this has to tell Slurm which nodes are excluded.
    {python} -m hpctrain.launch.place.badnodes "{home}" "$job" {spares} && exit 0
    exit 1
  fi
  rm -f "${variable}"
  placed="PLACED"
fi"""

LEAVE = f'[ ! -e "${STOPPED_VARIABLE}" ] || requeue || status=1\nexit $status'
"""The file is looked for once, and after the ranks have left: what a client of NFS did not find, it believes to be
absent for a while."""


def held(python: str) -> str:
    """Words that come before a rank's command, and hold back signals while it starts.

    Args:
        python: an interpreter, where the shell runs; used if it is there and `env` cannot block signals.
    """
    return f"sh -c {shlex.quote(_HELD)} rank {shlex.quote(python)}"
