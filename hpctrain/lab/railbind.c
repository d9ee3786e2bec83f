/* Connections leave from the rail that they were given.
 *
 * gloo listens on the interface that GLOO_SOCKET_IFNAME names, but connects without binding, so the kernel sends what
 * it sends by whichever interface is in the network of the peer: a rank never leaves its peer's rail. NICs and their
 * queues know no such choice. With this library in LD_PRELOAD, a TCP connection to an address of a rail is bound to
 * the address in RAILBIND first. Rails are those addresses that have their first 16 bits in common with it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>

typedef int connect_t(int, const struct sockaddr *, socklen_t);

static int unbound(int fd) {
  struct sockaddr_in own = {0};
  socklen_t size = sizeof own;
  return getsockname(fd, (struct sockaddr *)&own, &size) == 0 && own.sin_family == AF_INET && own.sin_port == 0;
}

int connect(int fd, const struct sockaddr *peer, socklen_t size) {
  connect_t *next = (connect_t *)dlsym(RTLD_NEXT, "connect");
  const char *text = getenv("RAILBIND");
  struct sockaddr_in own = {.sin_family = AF_INET};
  if (text && peer && peer->sa_family == AF_INET && inet_aton(text, &own.sin_addr)) {
    in_addr_t differing = own.sin_addr.s_addr ^ ((const struct sockaddr_in *)peer)->sin_addr.s_addr;
    int late = 1; /* the port is chosen by connect, among those that are free for that peer */
    if (!(ntohl(differing) >> 16) && unbound(fd)) {
      setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &late, sizeof late);
      if (bind(fd, (struct sockaddr *)&own, sizeof own))
        return -1;
    }
  }
  return next(fd, peer, size);
}
