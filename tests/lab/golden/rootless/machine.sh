set -e
name=$1
hostname "$name"
cat /etc/hosts "/srv/lab/etc/hosts" >"/srv/lab/$name/hosts"
mount --bind "/srv/lab/$name/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 shm /dev/shm
for gpu in "/srv/lab/$name/gpu"*; do
  [ ! -e "$gpu" ] || mount --bind /dev/null "$gpu"
done
: >"/srv/lab/run/$name.up"
while [ -e "/srv/lab/lab.json" ]; do
  sleep 5 &
  wait $!
done
