set -e
name=$1
hostname "$name"
cat /etc/hosts "/srv/lab/etc/hosts" >"/srv/lab/$name/hosts"
mount --bind "/srv/lab/$name/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 shm /dev/shm
ip link set lo up
if [ -d /sys/fs/cgroup ]; then
  mkdir -p "/srv/lab/$name/cgroup"
  mount --rbind /sys/fs/cgroup "/srv/lab/$name/cgroup"
fi
mount -t sysfs sysfs /sys
[ ! -d "/srv/lab/$name/cgroup" ] || mount --rbind "/srv/lab/$name/cgroup" /sys/fs/cgroup
[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf
mount -t tmpfs bin "/srv/lab/bin"
cd /proc/sys/net
echo 1 >ipv4/conf/all/arp_ignore
echo 2 >ipv4/conf/all/arp_announce
echo 2 >ipv4/conf/all/rp_filter
echo bbr >ipv4/tcp_congestion_control || true
[ ! -d ipv6 ] || echo 1 >ipv6/conf/default/disable_ipv6
[ "$name" != spine ] || echo 1 >ipv4/ip_forward
cd /
: >"/srv/lab/run/$name.up"
while [ -e "/srv/lab/lab.json" ]; do
  sleep 5 &
  wait $!
done
