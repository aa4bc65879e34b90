// The allocators of the simulated device: device memory with CUDA's rules, pinned memory with its
// rounding.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include "world.h"

namespace sim {
struct PinnedStats {
  size_t allocated = 0, peak = 0, reserved = 0;  // rounded up to powers of two, as on CUDA
};
c10::DeviceAllocator& device_allocator();
c10::Allocator& pinned_allocator();
PinnedStats& pinned_stats();
void use_pinned(const void* address, Stream& on);  // a copy is in flight there
void set_memory_limit(size_t bytes);               // of each device
bool ever_used(int device);
void check_live(uintptr_t begin, uintptr_t end, const std::string& what);
}  // namespace sim
