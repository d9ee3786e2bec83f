#!/bin/bash
# hpctrain VERSION, Slurm 22.05.8, profile made
#SBATCH --job-name=tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --signal=USR2@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir=/shared/runs/tiny
#SBATCH --output=/shared/runs/tiny/logs/slurm-%j.out

if [ ! -d "/shared/runs/tiny/jobs/20260101-120000-abcdef" ]; then
  echo "error: /shared/runs/tiny/jobs/20260101-120000-abcdef is gone: the submission was withdrawn, or a later one has taken its place" >&2
  exit 1
fi

export HF_HOME=/scratch/hf

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
}

# Ranks
export HPCTRAIN_SIGNAL_LEAD_S=120
export HPCTRAIN_MPI=pmix
export PYTHONPATH="/shared/runs/tiny/code/20260101-120000-abcdef${PYTHONPATH:+:$PYTHONPATH}"
export SUBMITIT_EXECUTOR=slurm
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
unset ${!SQUEUE_@} SLURM_CLUSTERS  # here Slurm's commands speak of this job, on this cluster
export HPCTRAIN_END_TIME="${SLURM_JOB_END_TIME:-$(SLURM_TIME_FORMAT=%s timeout 60 squeue --noheader --jobs=$job --format=%e)}"
export HPCTRAIN_STOPPED_FILE="/shared/runs/tiny/jobs/20260101-120000-abcdef/$job/stopped-${SLURM_RESTART_COUNT:-0}"
mkdir -p "/shared/runs/tiny/logs/$job"
trap : USR2 TERM  # they are for the ranks; this shell has to outlive those
srun \
  --export=ALL \
  --distribution=block:block \
  --kill-on-bad-exit=1 \
  --open-mode=append \
  --wait=600 \
  --mpi=pmix \
  --container-image=/images/torch.sif \
  --container-mounts=/shared/runs/tiny:/shared/runs/tiny,/shared/corpora:/shared/corpora,/scratch:/scratch \
  --no-container-mount-home \
  --output="/shared/runs/tiny/logs/$job/rank-%t.log" \
  sh -c 'trap "" USR2 TERM
p=$1; shift
if env --block-signal=USR2 --block-signal=TERM true 2>/dev/null; then exec env --block-signal=USR2 --block-signal=TERM "$@"; fi
if "$p" -S -c "" 2>/dev/null; then exec "$p" -S -c "import os, signal as s, sys; [s.signal(n, s.SIG_DFL) for n in (s.SIGPIPE, s.SIGXFSZ)]; s.pthread_sigmask(s.SIG_BLOCK, [s.SIGUSR2, s.SIGTERM]); os.execvp(sys.argv[1], sys.argv[1:])" "$@"; fi
exec "$@"' rank python3 \
  python3 -u -m submitit.core._submit /shared/runs/tiny/jobs/20260101-120000-abcdef/%j
status=$?
[ ! -e "$HPCTRAIN_STOPPED_FILE" ] || requeue || status=1
exit $status
