// Runs any aten operation on the simulated device.
//
// The shape of a result comes from torch's own shape functions ("meta") when the operation is
// enqueued; its values come from the CPU kernel, which runs on the stream on views of device memory.
#include "ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

namespace sim {
namespace {
using at::Tensor;
using Values = torch::jit::Stack;

Tensor device_like(const Tensor& shape) {
  return at::detail::empty_strided_generic(shape.sizes(), shape.strides(), &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           shape.scalar_type());
}

template <class F>
c10::IValue map_tensors(const c10::IValue& value, const F& f) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(t.defined() ? f(t) : t);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> t : value.toOptionalTensorList())
      list.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return list;
  }
  return value;
}
template <class F>
void each_tensor(const c10::IValue& value, const F& f) {
  map_tensors(value, [&](const Tensor& t) {
    f(t);
    return t;
  });
}

Tensor keep_wrapped(const Tensor& from, Tensor to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
  return to;
}

bool starts(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

// On a real device too the host waits for these: their shape, or their result, depends on values.
bool depends_on_values(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::nonzero",     "aten::_unique2",   "aten::masked_select",  "aten::equal", "aten::bincount",
      "aten::unique_dim",  "aten::is_nonzero", "aten::unique_consecutive", "aten::histc"};
  return names.count(name) > 0;
}

bool is_out(const c10::Argument& a) { return a.kwarg_only() && a.alias_info() && a.alias_info()->isWrite(); }
bool is_written(const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); }

// One call, taken apart.
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::string name;
  Values args;
  int device = -1;
  Values real;  // the arguments as the CPU kernel gets them
  std::vector<Use> uses;

  Call(const c10::OperatorHandle& op, Values* stack)
      : op(op), schema(op.schema()), name(schema.name()) {
    args.assign(stack->end() - schema.arguments().size(), stack->end());
    for (auto& a : args)
      each_tensor(a, [&](const Tensor& t) {
        if (!on_sim(t)) return;
        if (device < 0) device = t.device().index();
        TORCH_CHECK(device == t.device().index(),
                    name, ": Expected all tensors to be on the same device, but found at least two devices, sim:",
                    device, " and ", t.device());
      });
    for (auto& a : args)
      if (device < 0 && a.isDevice() && a.toDevice().type() == kSim)
        device = a.toDevice().has_index() ? a.toDevice().index() : current_device();
    if (device < 0) device = current_device();
  }

  Values shapes() const {
    Values meta;
    for (auto& a : args) {
      meta.push_back(map_tensors(a, [](const Tensor& t) {
        if (t.device().is_cpu() && t.dim() == 0) return t;  // a number; it decides on types
        return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta).pinned_memory(false));
      }));
      if (meta.back().isDevice()) meta.back() = c10::Device(c10::kMeta);
      if (meta.back().isGenerator()) meta.back() = c10::IValue();
    }
    return meta;
  }

  // The tensors of out= get their shape before there is a view of them.
  void resize_outs() {
    const auto& declared = schema.arguments();
    bool any = false;
    for (size_t i = 0; i < declared.size(); i++) any |= is_out(declared[i]);
    if (!any) return;
    Values meta = shapes(), kept = meta;
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      op.callBoxed(&meta);
    }
    for (size_t i = 0; i < declared.size(); i++) {
      if (!is_out(declared[i])) continue;
      std::vector<Tensor> want, have;
      each_tensor(kept[i], [&](const Tensor& t) { want.push_back(t); });
      each_tensor(args[i], [&](const Tensor& t) { have.push_back(t); });
      for (size_t j = 0; j < want.size(); j++)
        if (want[j].sizes() != have[j].sizes()) {
          at::native::resize_output(have[j], want[j].sizes());
          have[j].unsafeGetTensorImpl()->set_sizes_and_strides(want[j].sizes(), want[j].strides());
        }
    }
  }

  void take_arguments() {
    for (size_t i = 0; i < args.size(); i++) {
      const auto& declared = schema.arguments()[i];
      bool written = is_written(declared), out = is_out(declared), list = !args[i].isTensor();
      real.push_back(map_tensors(args[i], [&](const Tensor& t) -> Tensor {
        if (on_sim(t)) {
          uses.push_back(use_of(t, !out, written, name));
          return stream_view(t);
        }
        // A number that lives on the CPU is read when the kernel is launched, as on a real device,
        // and indices may come from there; anything else is a mistake there too.
        bool number = t.dim() == 0 && !written && !(list && starts(name, "aten::_fused"));
        bool indices = starts(name, "aten::index") || starts(name, "aten::_index");
        TORCH_CHECK(t.device().is_cpu() && (number || indices), name,
                    ": Expected all tensors to be on the same device, but found at least two devices, sim:",
                    device, " and ", t.device(), "!");
        return keep_wrapped(t, t.clone());
      }));
      if (real.back().isDevice()) real.back() = c10::Device(c10::kCPU);
      if (declared.type()->str().find("Generator") != std::string::npos)
        real.back() = draw(args[i].isGenerator() ? std::optional(args[i].toGenerator()) : std::nullopt, device);
    }
  }

  // Results that are arguments; the others are taken from `fresh`, in order.
  void give_back(Values* stack, const Values& fresh) const {
    torch::jit::drop(*stack, args.size());
    size_t next = 0;
    for (auto& r : schema.returns()) {
      if (!r.alias_info()) {
        stack->push_back(fresh.at(next++));
        continue;
      }
      for (size_t i = 0; i < args.size(); i++) {
        auto* info = schema.arguments()[i].alias_info();
        if (info && *info == *r.alias_info()) {
          stack->push_back(args[i]);
          break;
        }
      }
    }
  }
};

void copy_results(const Values& from, const Values& to) {
  for (size_t i = 0; i < to.size(); i++) {
    std::vector<Tensor> a, b;
    each_tensor(from[i], [&](const Tensor& t) { a.push_back(t); });
    each_tensor(to[i], [&](const Tensor& t) { b.push_back(t); });
    for (size_t j = 0; j < b.size(); j++) b[j].copy_(a[j]);
  }
}

// For what has no shape function, or returns something that is no tensor: wait, compute, return.
void run_waiting(Call& call, Values* stack) {
  Stream& on = current_stream(call.device);
  {
    Lock lock(world().mutex);
    auto& counters = world().counters;
    (depends_on_values(call.name) ? counters.host_waits : counters.without_shape)[call.name]++;
  }
  enqueue(on, call.name, call.uses, [] {});
  host_wait("", record(on));
  Values results = call.real, fresh;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    call.op.callBoxed(&results);
  }
  for (size_t i = 0; i < results.size(); i++) {
    if (call.schema.returns()[i].alias_info()) continue;
    fresh.push_back(map_tensors(results[i], [&](const Tensor& t) {
      Tensor made = device_like(t);
      enqueue(on, "", {use_of(made, false, true, call.name)}, [to = stream_view(made), t]() mutable { to.copy_(t); });
      return made;
    }));
  }
  call.give_back(stack, fresh);
}

void fallback(const c10::OperatorHandle& op, Values* stack) {
  check_started();
  Call call(op, stack);
  c10::DeviceGuard here(c10::Device(kSim, c10::DeviceIndex(call.device)));
  const auto& returns = call.schema.returns();
  bool fresh = false, tensors = true;
  for (auto& r : returns) {
    TORCH_CHECK_NOT_IMPLEMENTED(!r.alias_info() || r.alias_info()->isWrite(), call.name,
                                " is a view the simulated device does not know");
    fresh |= !r.alias_info();
    tensors &= r.type()->isSubtypeOf(*c10::TensorType::get()) || r.type()->isSubtypeOf(*c10::ListType::ofTensors());
  }
  call.resize_outs();
  call.take_arguments();
  Values outs;
  bool waiting = depends_on_values(call.name) || !tensors;
  if (fresh && !waiting) {
    Values meta = call.shapes();
    try {
      at::AutoDispatchBelowADInplaceOrView guard;
      op.callBoxed(&meta);
      for (size_t i = 0; i < meta.size(); i++)
        if (!returns[i].alias_info()) outs.push_back(map_tensors(meta[i], device_like));
    } catch (const c10::NotImplementedError&) {
      waiting = true;
      outs.clear();
    }
  }
  if (waiting) return run_waiting(call, stack);
  Values out_views;
  for (auto& v : outs)
    out_views.push_back(map_tensors(v, [&](const Tensor& t) {
      call.uses.push_back(use_of(t, false, true, call.name));
      return stream_view(t);
    }));
  std::vector<bool> is_fresh;
  for (auto& r : returns) is_fresh.push_back(!r.alias_info());
  bool empty = true;
  for (auto& u : call.uses) empty &= u.begin == u.end;
  enqueue(current_stream(call.device), empty ? "" : call.name, call.uses,
          [op, name = call.name, real = call.real, out_views, is_fresh]() mutable {
            at::AutoDispatchBelowADInplaceOrView guard;
            // Devices keep the statistics in float32; the CPU kernel wants its weights' type.
            if (name == "aten::native_layer_norm_backward" && real[5].isTensor() && real[5].toTensor().defined())
              for (int i : {3, 4}) real[i] = real[i].toTensor().to(real[5].toTensor().scalar_type());
            op.callBoxed(&real);
            Values made;
            for (size_t i = 0; i < is_fresh.size(); i++)
              if (is_fresh[i]) made.push_back(real[i]);
            copy_results(made, out_views);
          });
  call.give_back(stack, outs);
}

// --- memory and views --------------------------------------------------------------------------
Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard here(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard here(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
const Tensor& resize_(const Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  t.unsafeGetTensorImpl()->generic_set_sizes_contiguous(size);
  size_t need = (t.storage_offset() + t.numel()) * t.itemsize();
  if (t.numel() && need > t.storage().nbytes()) resize_storage(t.storage(), need);
  return t;
}
Tensor& set_storage(Tensor& t, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {  // a storage that is too small grows, as on CUDA
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  if (strides.size() == sizes.size() && !sizes.empty()) {
    impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  }
  int64_t last = 0;
  for (int i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  size_t need = t.numel() ? (t.storage_offset() + last + 1) * t.itemsize() : 0;
  if (need > storage.nbytes()) resize_storage(storage, need);
  return t;
}
Tensor& set_source(Tensor& t, at::Storage s) {
  std::vector<c10::SymInt> size{int64_t(s.nbytes() / t.itemsize())};
  return set_storage(t, s, 0, size, {});
}
Tensor& set_tensor(Tensor& t, const Tensor& o) {
  return set_storage(t, o.storage(), o.storage_offset(), o.sym_sizes(), o.sym_strides());
}
void record_stream(Tensor& t, c10::Stream s) { device_allocator().recordStream(t.storage().data_ptr(), s); }

// --- copies ------------------------------------------------------------------------------------
bool pinned(const Tensor& t) { return t.device().is_cpu() && is_pinned(t.storage().data()); }

Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  if (!dst.numel()) return dst;
  bool up = !on_sim(src), down = !on_sim(dst), across = !up && !down && src.device() != dst.device();
  const char* name = up ? "copy H2D" : down ? "copy D2H" : "copy D2D";
  Stream& on = current_stream((up ? dst : src).device().index());
  std::vector<Use> uses;
  // Memory that is not pinned is copied by way of a buffer of the driver's: what is read, at once,
  // and what is written, before the call returns. On the way up the host converts types, and then
  // copies what is not pinned either.
  bool converts = up && src.scalar_type() != dst.scalar_type();
  if (converts && pinned(src)) {
    Lock lock(world().mutex);
    world().counters.host_waits["conversion H2D"]++;
  }
  Tensor from = up && (converts || !pinned(src)) ? src.to(dst.scalar_type(), false, true) : stream_view(src);
  Tensor to = down && !pinned(dst) ? dst.detach() : stream_view(dst);
  if (!up || (pinned(src) && !converts)) uses.push_back(use_of(src, true, false, name));
  if (!down || pinned(dst)) uses.push_back(use_of(dst, false, true, name));
  if (up && pinned(src) && !converts) use_pinned(src.storage().data(), on);
  if (down && pinned(dst)) use_pinned(dst.storage().data(), on);
  Stream* other = across ? &current_stream(dst.device().index()) : nullptr;
  if (other) order(on, record(*other));
  enqueue(on, name, uses, [from, to]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from.expand_as(to));
  });
  if (other) order(*other, record(on));
  if ((up && !non_blocking) || (down && (!non_blocking || !pinned(dst)))) host_wait(name, record(on));
  return dst;
}
Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  if (!dst.numel() && src.numel()) dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}
at::Scalar item(const Tensor& t) {
  Stream& on = current_stream(t.device().index());
  enqueue(on, "copy D2H", {use_of(t, true, false, "item")}, [] {});
  host_wait("item", record(on));
  return stream_view(t).item();
}

// --- what the CPU kernels do differently -------------------------------------------------------
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  c10::DeviceGuard here(x.device());
  if (!train.value_or(true) || p == 0) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  Tensor out = at::empty_like(x), mask = at::empty_like(x, x.options().dtype(at::kBool));
  at::Generator dice = draw(std::nullopt, x.device().index());
  std::string name = "aten::native_dropout";
  enqueue(current_stream(x.device().index()), name,
          {use_of(x, true, false, name), use_of(out, false, true, name), use_of(mask, false, true, name)},
          [p, dice, in = stream_view(x), to = stream_view(out), kept = stream_view(mask)]() mutable {
            at::AutoDispatchBelowADInplaceOrView guard;
            kept.bernoulli_(1 - p, dice);
            to.copy_(p == 1 ? at::zeros_like(in) : in.mul(kept).div_(1 - p));
          });
  return {out, mask};
}

// Attention is one kernel where the CPU has one, as on CUDA; the choice looks at shapes only.
int64_t attention_choice(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
                         double p, bool causal, std::optional<double> scale, bool gqa) {
  if (p > 0) return 0;
  auto shape = [](const Tensor& t) { return stream_view(t).requires_grad_(t.requires_grad()); };
  return at::_fused_sdp_choice(shape(q), shape(k), shape(v), mask ? std::optional(shape(*mask)) : mask, p, causal,
                               scale, gqa);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", [](const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
    return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                             offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
  });
  m.impl("view", [](const Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); });
  m.impl("_reshape_alias", [](const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  m.impl("unfold", [](const Tensor& t, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(t, dim, size, step); });
  m.impl("view_as_real", [](const Tensor& t) { return at::native::view_as_real(t); });
  m.impl("view_as_complex", [](const Tensor& t) { return at::native::view_as_complex(t); });
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("native_dropout", native_dropout);
  m.impl("_fused_sdp_choice", attention_choice);
  // Torch has these as many smaller operations; on CUDA each is a kernel of its own.
  for (const char* name : {"native_layer_norm", "native_group_norm", "split_with_sizes_copy.out", "_chunk_cat",
                           "_chunk_cat.out", "addr", "addr.out", "any.dims", "any.dims_out", "all.dims", "all.dims_out", "count_nonzero"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!starts(name.name, "aten::_foreach_") || name.overload_name.find("out") != std::string::npos) continue;
    auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
}  // namespace

bool on_sim(const Tensor& t) { return t.defined() && t.device().type() == kSim; }

Use use_of(const Tensor& t, bool reads, bool writes, const std::string& what) {
  if (!t.numel()) return {0, 0, reads, writes};
  int64_t last = 0;
  for (int i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  size_t from = t.storage_offset() * t.itemsize(), to = (t.storage_offset() + last + 1) * t.itemsize();
  TORCH_CHECK(to <= t.storage().nbytes(), "simulated device: illegal memory access: ", what,
              " uses a tensor whose storage has been freed or is too small");
  auto base = reinterpret_cast<uintptr_t>(t.storage().data());
  if (on_sim(t)) check_live(base + from, base + to, what);
  return {base + from, base + to, reads, writes};
}

Tensor stream_view(const Tensor& t) {
  auto* base = static_cast<char*>(const_cast<void*>(t.storage().data()));
  Tensor view = at::from_blob(alias(base + t.storage_offset() * t.itemsize()), t.sizes(), t.strides(),
                              at::TensorOptions().dtype(t.dtype()).device(c10::kCPU));
  if (t.is_conj()) view._set_conj(true);
  if (t.is_neg()) view._set_neg(true);
  return view;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  c10::DeviceGuard here(storage.device());
  auto fresh = device_allocator().allocate(bytes);
  size_t kept = std::min(impl->nbytes(), bytes);
  if (kept) {
    auto to = reinterpret_cast<uintptr_t>(fresh.get());
    auto from = reinterpret_cast<uintptr_t>(storage.data());
    enqueue(current_stream(storage.device().index()), "copy D2D",
            {{from, from + kept, true, false}, {to, to + kept, false, true}},
            [kept, a = alias(reinterpret_cast<void*>(to)), b = alias(reinterpret_cast<void*>(from))] { memcpy(a, b, kept); });
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}
}  // namespace sim
