// What Python sees of the simulated device.
#include <torch/extension.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "ops.h"

namespace sim {
c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size);
}
namespace {
namespace py = pybind11;
using namespace sim;

struct Knowledge {  // what one thread of the host knows, on its way to another
  Clock clock;
};

// A Python function on the current stream, as one launch: f(views of reads, views of writes).
void launch(const std::string& what, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes,
            py::object f) {
  std::vector<Use> uses;
  std::vector<at::Tensor> r, w;
  int device = -1;
  auto take = [&](const at::Tensor& t, bool read) {
    TORCH_CHECK(on_sim(t) || is_pinned(t.storage().data()), what, ": a tensor is not on the simulated device");
    if (on_sim(t)) {
      TORCH_CHECK(device < 0 || device == t.device().index(), what, ": tensors are on several devices");
      device = t.device().index();
    }
    uses.push_back(use_of(t, read, !read, what));
    (read ? r : w).push_back(stream_view(t));
  };
  for (auto& t : reads) take(t, true);
  for (auto& t : writes) take(t, false);
  auto held = std::shared_ptr<py::object>(new py::object(std::move(f)), [](py::object* o) {
    if (!Py_IsInitialized() || world().ending) return;  // the interpreter is leaving: so does the object
    py::gil_scoped_acquire gil;
    delete o;
  });
  py::gil_scoped_release released;
  Stream& on = current_stream(device < 0 ? current_device() : device);
  for (auto& t : reads)
    if (!on_sim(t)) use_pinned(t.storage().data(), on);
  for (auto& t : writes)
    if (!on_sim(t)) use_pinned(t.storage().data(), on);
  enqueue(on, what, uses, [held, r, w] {
    if (world().ending) return;
    py::gil_scoped_acquire gil;
    (*held)(r, w);
  });
}

py::dict statistics() {
  Lock lock(world().mutex);
  auto& c = world().counters;
  auto& p = pinned_stats();
  py::dict d;
  d["launches"] = c.launches;
  d["launches_by_name"] = c.launches_by_name;
  d["host_waits"] = c.host_waits;
  d["without_shape"] = c.without_shape;
  d["races"] = c.races;
  d["pinned"] = p.allocated;
  d["pinned_peak"] = p.peak;
  d["pinned_reserved"] = p.reserved;
  d["streams"] = world().streams.size();
  return d;
}

void clear() {
  Lock lock(world().mutex);
  world().counters = {};
  pinned_stats().peak = pinned_stats().allocated;
}

void delay(const std::string& slow, int microseconds, unsigned seed) {
  set_delays({slow, microseconds, seed});
}

void set_device_count(int n) {
  TORCH_CHECK(0 < n && n <= kMostDevices, "the simulation has at most ", kMostDevices, " devices");
  Lock lock(world().mutex);
  TORCH_CHECK(world().streams.empty(), "a device is in use already: say how many there are before that");
  world().device_count = n;
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Knowledge>(m, "Knowledge");
  m.def("launch", &launch);
  m.def("statistics", &statistics);
  m.def("clear", &clear);
  m.def("delay", &delay);
  m.def("on_wait", [](py::object f) {
    Lock lock(world().mutex);
    if (f.is_none()) world().on_wait = nullptr;
    else
      world().on_wait = [held = new py::object(f)](const std::string& kind) {
        py::gil_scoped_acquire gil;
        (*held)(kind);
      };
  });
  m.def("device_count", [] { return world().device_count; });
  m.def("set_device_count", &set_device_count);
  m.def("host_register", [](uintptr_t begin, size_t bytes) {
    if (!register_pinned(begin, bytes)) return 1;
    at::globalContext().lazyInitDevice(kSim);  // before that nothing is pinned for torch
    Lock lock(world().mutex);
    auto& stats = pinned_stats();
    stats.allocated += bytes;
    stats.peak = std::max(stats.peak, stats.allocated);
    return 0;
  });
  m.def("host_unregister", [](uintptr_t begin, size_t bytes) {
    if (!unregister_pinned(begin)) return 1;
    Lock lock(world().mutex);
    pinned_stats().allocated -= bytes;
    return 0;
  });
  m.def("set_memory_limit", &set_memory_limit);
  m.def("ever_used", &ever_used);
  m.def("default_generator", &default_generator);
  m.def("priority", [](int device, int64_t id) { return stream(device, int(id)).priority; });
  m.def("knowledge", [] { return Knowledge{knowledge()}; });
  m.def("learn", [](const Knowledge& k) { learn(k.clock); });
  m.def("begin_thread", [](const Knowledge& k) { begin_thread(k.clock); });
  m.def("begin_backward", &begin_backward);
  m.def("end_backward", &end_backward);
  m.def("make_collectives", &make_collectives);
  // As builds with CUDA have it: what it sets belongs to c10, not to CUDA.
  m.def("refuse_access", [](size_t storage, const std::string& reason) {
    reinterpret_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(reason);
  });
  m.def("after_fork", &after_fork);
  m.def("in_forked_child", &in_forked_child);
  m.def("end", &end_world, py::call_guard<py::gil_scoped_release>());
}
