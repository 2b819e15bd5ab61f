#include "support/port.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace shardwise::test {

Port::Port() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const int yes = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t size = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (socket_ < 0 || setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) != 0 ||
      bind(socket_, generic, size) != 0 || getsockname(socket_, generic, &size) != 0) {
    const int error = errno;
    close(socket_);
    throw std::system_error(error, std::generic_category(), "reserving a port");
  }
  number_ = ntohs(address.sin_port);
}

void Port::listen() const {
  if (::listen(socket_, 16) != 0) throw std::system_error(errno, std::generic_category(), "listening");
}

Port::~Port() {
  close(socket_);
}

} // namespace shardwise::test
