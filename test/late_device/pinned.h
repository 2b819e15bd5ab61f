#pragma once

#include "clock.h"
#include "history.h"
#include "stream.h"

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>
#include <string>

namespace late {

/// Host memory that copies need not wait for. From the moment that a copy is issued until the host has waited for it,
/// its pages may not be touched by the host: neither written, if the copy reads them, nor read, if it writes them.
c10::Allocator* pinned_allocator();
bool is_pinned(uintptr_t address);
uintptr_t for_worker_in_pinned(uintptr_t address);

/// From now on a signal that ends the process says what memory the host touched.
void watch_the_host();

/// For Device: an operation of a device's uses pinned memory. Returns what it is not ordered after, if anything.
std::optional<History::Conflict> use_pinned(
    uintptr_t begin, uintptr_t end, bool writes, int device, const Operation& operation, const Clock& clock);
/// For Device: the host knows that so much of a device's work is done.
void release_pinned(int device, const Clock& clock);

} // namespace late
