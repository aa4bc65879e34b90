// Operations on tensors of the simulated device.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/Generator.h>

#include "memory.h"

namespace sim {
constexpr auto kSim = c10::DeviceType::PrivateUse1;

bool on_sim(const at::Tensor& t);
Use use_of(const at::Tensor& t, bool reads, bool writes, const std::string& what);
at::Tensor stream_view(const at::Tensor& t);  // the same bytes as a CPU tensor, for use on a stream
void resize_storage(const c10::Storage& storage, size_t bytes);

// The generator of one operation; it takes the next offset of the one that was given.
at::Generator draw(const std::optional<at::Generator>& given, int device);
at::Generator default_generator(int device);
}  // namespace sim
