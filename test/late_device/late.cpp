#include "late.h"

#include "pinned.h"

#include <c10/core/DeviceType.h>

namespace late {
namespace {

bool installed = false;

} // namespace

bool is_installed() {
  return installed;
}

void install() {
  if (std::exchange(installed, true)) return;
  c10::register_privateuse1_backend("late");
  watch_the_host();
  register_guard();
  register_allocator();
  register_hooks();
  register_fallback();
  // For ever, as the device.
  auto* const library =
      new torch::Library(torch::Library::Kind::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  register_operations(*library);
  register_copies(*library);
  register_recurrent(*library);
}

} // namespace late
