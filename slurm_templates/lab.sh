# Interfaces and device nodes stand for NICs and GPUs here
for rail in /sys/class/net/rail*; do
  [ ! -e "$rail" ] || HPCTRAIN_RAILS="${HPCTRAIN_RAILS:+$HPCTRAIN_RAILS,}${rail##*/}"
done
export HPCTRAIN_RAILS="${HPCTRAIN_RAILS-}" HPCTRAIN_GPUS="${CUDA_VISIBLE_DEVICES-}"
