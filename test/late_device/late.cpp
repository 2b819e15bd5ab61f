#include "late.h"

#include "pinned.h"

#include <c10/core/DeviceType.h>

namespace late {
void install() {
  static bool installed = false;
  if (std::exchange(installed, true)) return;
  c10::register_privateuse1_backend("late");
  watch_the_host();
  register_guard();
  register_allocator();
  register_hooks();
  register_fallback();
  // For ever, as the device.
  const auto library_of = [](c10::DispatchKey key) -> torch::Library& {
    return *new torch::Library(torch::Library::Kind::IMPL, "aten", key, __FILE__, __LINE__);
  };
  auto& library = library_of(c10::DispatchKey::PrivateUse1);
  register_operations(library);
  register_copies(library);
  register_recurrent(library);
  register_recurrent(library_of(c10::DispatchKey::AutogradPrivateUse1));
}

} // namespace late
