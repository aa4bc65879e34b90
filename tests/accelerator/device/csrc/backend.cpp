// What PyTorch asks of a device: guard and streams, events, hooks, random numbers.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "ops.h"

namespace sim {
namespace {
// --- random numbers: a seed and an offset, as on CUDA ------------------------------------------
// Every random operation takes the next offset when it is enqueued, and draws from a generator of
// its own. So the state never waits for the device, and what the host draws is another sequence.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.dtype() == at::kByte && state.numel() == 16 && state.device().is_cpu(),
                "RNG state of the simulated device is 16 bytes on the CPU");
    auto* from = static_cast<const uint64_t*>(state.data());
    seed_ = from[0];
    offset_ = from[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(c10::kCPU));
    auto* to = static_cast<uint64_t*>(state.data_ptr());
    to[0] = seed_;
    to[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};

at::Generator make_generator(c10::DeviceIndex device) { return at::make_generator<Generator>(device); }
const at::Generator& generator_of(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int d = 0; d < kMostDevices; d++) made->push_back(make_generator(d));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex d) const override { return ever_used(d); }
  c10::DeviceIndex deviceCount() const override { return world().device_count; }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_current_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    int before = current_device();
    set_current_device(d);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return d < 0 ? current_device() : exchangeDevice(d);
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* p) const override { return {kSim, c10::DeviceIndex(device_of(p))}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return generator_of(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return make_generator(d < 0 ? current_device() : d);
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override { resize_storage(s, n); }
};

struct Event {
  MomentPtr moment;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream make(int device, int id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
  }
  static int index(c10::Device d) { return d.has_index() ? d.index() : current_device(); }
  static Stream& ours(const c10::Stream& s) { return stream(s.device_index(), int(s.id())); }

  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device before = getDevice();
    set_current_device(index(d));
    return before;
  }
  c10::Device getDevice() const override { return {kSim, c10::DeviceIndex(current_device())}; }
  void setDevice(c10::Device d) const override { set_current_device(index(d)); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { set_current_device(index(d)); }
  c10::Stream getStream(c10::Device d) const override { return make(index(d), current_stream_id(index(d))); }
  c10::Stream getDefaultStream(c10::Device d) const override { return make(index(d), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool high) const override {
    return make(index(d), next_pool_stream(index(d), high));
  }
  c10::Stream getNewStream(c10::Device d, int priority) const override {
    return make(index(d), next_pool_stream(index(d), priority < 0));
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    set_current_stream(s.device_index(), int(s.id()));
    return before;
  }
  void destroyEvent(void* e, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*e) *e = new Event();
    static_cast<Event*>(*e)->moment = sim::record(ours(s));
  }
  static MomentPtr moment(void* e) { return e ? static_cast<Event*>(e)->moment : nullptr; }
  void block(void* e, const c10::Stream& s) const override { order(ours(s), moment(e)); }
  bool queryEvent(void* e) const override { return query(moment(e)); }
  void synchronizeEvent(void* e) const override { host_wait("event", moment(e)); }
  double elapsedTime(void* a, void* b, c10::DeviceIndex) const override {
    auto first = moment(a), last = moment(b);
    TORCH_CHECK(first && last && first->over() && last->over(), "events have not been completed");
    return std::chrono::duration<double, std::milli>(last->when - first->when).count();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return world().device_count; }
  bool queryStream(const c10::Stream& s) const override { return idle(ours(s)); }
  void synchronizeStream(const c10::Stream& s) const override { host_wait("stream", sim::record(ours(s))); }
  void synchronizeDevice(c10::DeviceIndex d) const override {
    std::vector<MomentPtr> moments;
    {
      Lock lock(world().mutex);
      for (auto& s : world().streams)
        if (s->device == d) moments.push_back(sim::record(*s));
      world().counters.host_waits["device"]++;
    }
    for (auto& m : moments) host_wait("", m);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    device_allocator().recordStream(p, s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Registration {
  Registration() {
    c10::SetAllocator(kSim, &device_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} registration;
}  // namespace

at::Generator draw(const std::optional<at::Generator>& given, int device) {
  at::Generator from = given && given->defined() ? *given : generator_of(device);
  TORCH_CHECK(from.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
              from.device().type(), "'");
  std::lock_guard<std::mutex> lock(from.mutex());
  uint64_t seed = from.current_seed(), offset = from.get_offset();
  from.set_offset(offset + 4);
  uint64_t mixed = (seed ^ (offset * 0x9E3779B97F4A7C15ull)) + 0xD1B54A32D192ED03ull * offset;
  return at::detail::createCPUGenerator(mixed);
}
at::Generator default_generator(int device) { return generator_of(device); }
}  // namespace sim
